"""Whatever is written under a mask and comes to an end fits its schema."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from grammar.schemas import schema_of
from grammar.walk import constraint_of, write

from quire.grammar import GrammarCompiler
from quire.text import Tokenizer

NUM_SCHEMAS = 320
_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.mark.parametrize("part", range(8))
def test_every_answer_that_ends_fits_its_schema(
    compiler: GrammarCompiler, smollm2_tokenizer: Tokenizer, part: int
) -> None:
    num_ended = 0
    for number in range(part, NUM_SCHEMAS, 8):
        schema = schema_of(number)
        tokens, has_ended = write(constraint_of(compiler, json=schema), smollm2_tokenizer, seed=number)
        if not has_ended:
            continue
        num_ended += 1
        text = smollm2_tokenizer.decode(tokens)
        jsonschema.validate(json.loads(text), schema, format_checker=_CHECKER)
    assert num_ended >= 0.6 * NUM_SCHEMAS / 8


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", r"[0-9]{3}-(ab|cd)+/[xyz]{2}", r"[0-9]{3}-(ab|cd)+/[xyz]{2}"),
        ("choice", ["yes", "no", "perhaps / 私"], r"yes|no|perhaps / 私"),
        ("grammar", 'start: "<" item ("," item)~0..3 ">"\nitem: /[a-z]{1,3}/', r"<[a-z]{1,3}(,[a-z]{1,3}){0,3}>"),
        ("grammar", 'root ::= "a" digit{1,4} | "b"\ndigit ::= [0-9]', r"a[0-9]{1,4}|b"),
    ],
)
def test_other_kinds(
    compiler: GrammarCompiler, smollm2_tokenizer: Tokenizer, kind: str, value: object, pattern: str
) -> None:
    for seed in range(10):
        tokens, has_ended = write(constraint_of(compiler, **{kind: value}), smollm2_tokenizer, seed, max_tokens=60)
        text = smollm2_tokenizer.decode(tokens)
        assert not has_ended or re.fullmatch(pattern, text), text


def test_whitespace_and_additional_properties_as_asked(compiler: GrammarCompiler, smollm2_tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    for seed in range(20):
        compact = constraint_of(compiler, json=schema, disable_any_whitespace=True, disable_additional_properties=True)
        tokens, has_ended = write(compact, smollm2_tokenizer, seed, max_tokens=40)
        assert not has_ended or re.fullmatch(r'\{"a":-?[0-9]+\}', smollm2_tokenizer.decode(tokens))


def test_structural_tags_hold_inside_free_text(compiler: GrammarCompiler, smollm2_tokenizer: Tokenizer) -> None:
    tag = {
        "triggers": ["<f"],
        "structures": [{"begin": "<f>", "schema": {"type": "integer", "minimum": 1, "maximum": 3}, "end": "</f>"}],
    }
    constraint = constraint_of(compiler, structural_tag=tag)
    text = "Words first, then <f>"
    for token in smollm2_tokenizer.encode(text, add_special_tokens=False):
        constraint.advance((token,))
    tokens, _ = write(constraint, smollm2_tokenizer, 1, max_tokens=8)
    assert re.match(r"[123]</f>", smollm2_tokenizer.decode(tokens)), smollm2_tokenizer.decode(tokens)
