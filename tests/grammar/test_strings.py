"""Masks inside of strings of bounded length are those of the grammar library, to the last bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from grammar.schemas import schema_of
from grammar.test_validity import NUM_SCHEMAS
from grammar.walk import allowed

from quire.grammar import GrammarCompiler, lower
from quire.grammar.constraint import Constraint
from quire.grammar.rows import ConstrainedLine, RowConstraints
from quire.grammar.strings import bounds_plain_strings
from quire.structured import StructuredOutputsParams
from quire.text import Tokenizer

NAME = {"type": "string", "minLength": 3, "maxLength": 9}
BOUNDED: list[dict[str, Any]] = [
    {"type": "array", "items": NAME, "minItems": 50},
    {
        "type": "object",
        "properties": {"name": NAME, "kind": {"enum": ["a long one", "b"]}, "tags": {"type": "array", "items": NAME}},
        "required": ["name", "kind", "tags"],
        "additionalProperties": {"type": "string", "maxLength": 4},
    },
    {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "array", "items": {"type": "string", "maxLength": 2}}]},
    {
        "$defs": {
            "tree": {"properties": {"name": NAME, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "array", "items": {"maxLength": 6}, "minItems": 50},
]


@pytest.fixture(scope="module")
def strings_compiler(smollm2_tokenizer: Tokenizer) -> GrammarCompiler:
    tokenizer = smollm2_tokenizer
    compiler = GrammarCompiler(lambda: (tokenizer, tokenizer.end_token_ids), vocab_size=tokenizer.vocab_size)
    compiler.follow_strings()
    return compiler


def walk(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], seed: int, length: int) -> int:
    """Write any allowed tokens, and compare each mask. Returns how many stood in a string."""
    rng = np.random.default_rng(seed)
    grammar = lower(StructuredOutputsParams(json=schema))
    compiler.check(grammar)
    rows = RowConstraints(compiler, num_threads=2)
    lines = []
    for row in range(3):
        matcher, strings = compiler.matchers(grammar, row)
        assert strings is not None
        lines.append(ConstrainedLine(row, row, Constraint(matcher, strings=strings)))
    num_in_strings = 0
    for _ in range(length):
        open_rows = [line for line in lines if allowed(line.constraint, compiler.vocab_size).any()]
        if len(open_rows) < 2:
            break
        pending = rows.begin_masks(open_rows, [[] for _ in open_rows])
        masks = pending.finish().copy()
        for line, mask in zip(open_rows, masks, strict=True):
            wanted = allowed(line.constraint, compiler.vocab_size)
            told = np.unpackbits(mask.view(np.uint8), bitorder="little", count=compiler.vocab_size).astype(bool)
            assert np.array_equal(told, wanted), [tokenizer.token_bytes(int(i)) for i in np.flatnonzero(told != wanted)]
            strings = line.constraint.strings
            if strings is not None:
                num_in_strings += strings.is_in_string()
            options = [int(one) for one in np.flatnonzero(wanted)]
            going_on = [one for one in options if one not in tokenizer.end_token_ids]
            token = int(rng.choice(going_on or options))
            line.constraint.advance((token,))
    return num_in_strings


@pytest.mark.parametrize("number", range(len(BOUNDED)))
def test_masks_are_the_librarys(strings_compiler: GrammarCompiler, smollm2_tokenizer: Tokenizer, number: int) -> None:
    assert walk(strings_compiler, smollm2_tokenizer, BOUNDED[number], seed=number, length=60) > 2


def test_masks_of_many_schemas(strings_compiler: GrammarCompiler, smollm2_tokenizer: Tokenizer) -> None:
    num_bounded = num_in_strings = 0
    for number in range(NUM_SCHEMAS):
        schema = schema_of(number)
        if bounds_plain_strings(lower(StructuredOutputsParams(json=schema))):
            num_bounded += 1
            num_in_strings += walk(strings_compiler, smollm2_tokenizer, schema, seed=number, length=12)
    assert num_bounded > 10 and num_in_strings > 100


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string"}, "no length: the library is quick"),
        ({"type": "object", "properties": {"a": NAME, "b": {"type": "string", "pattern": "[a-z]+"}}}, "a pattern"),
        ({"type": "object", "properties": {"a": NAME, "b": {"type": "string", "format": "date"}}}, "a format"),
        ({"type": "object", "patternProperties": {"^a": NAME}}, "patterns of names"),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"const": "abcdefgh"}]}, "a literal beside any text"),
        ({"type": "string", "maxLength": 8, "description": "\u2042"}, "the probe stands in it"),
    ],
)
def test_other_grammars_are_left_to_the_library(schema: dict[str, Any], why: str) -> None:
    assert not bounds_plain_strings(lower(StructuredOutputsParams(json=schema))), why


def test_which_grammars_have_them() -> None:
    for schema in BOUNDED:
        assert bounds_plain_strings(lower(StructuredOutputsParams(json=schema)))
    optional = {"properties": {"a": {"anyOf": [NAME, {"type": "null"}]}, "b": {"enum": ["x", "y"]}}}
    assert bounds_plain_strings(lower(StructuredOutputsParams(json=optional))), "one branch has strings"
    other_space = StructuredOutputsParams(json={"type": "array", "items": NAME}, whitespace_pattern=".*")
    assert not bounds_plain_strings(lower(other_space)), "any text between parts"
    assert bounds_plain_strings(lower(StructuredOutputsParams(json=NAME, disable_any_whitespace=True)))
    assert not bounds_plain_strings(lower(StructuredOutputsParams(regex="[a-z]{1,4}")))
    assert not bounds_plain_strings(json.dumps({"grammars": [{"json_schema": True}]}))


def test_a_string_matcher_that_fails_is_left_out(strings_compiler: GrammarCompiler) -> None:
    grammar = lower(StructuredOutputsParams(json=NAME))
    matcher, strings = strings_compiler.matchers(grammar)
    assert strings is not None
    constraint = Constraint(matcher, strings=strings)
    strings.follow(0)  # out of step with the other
    before = allowed(constraint, strings_compiler.vocab_size)
    token = int(np.flatnonzero(before)[0])
    constraint.advance((token,))
    assert constraint.strings is None
    assert allowed(constraint, strings_compiler.vocab_size).any()
