"""What is refused before it costs anything, by the name and the place of what is wrong."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
from grammar.walk import constraint_of

from quire.errors import BadRequestError
from quire.grammar import GrammarCompiler
from quire.structured import StructuredOutputsParams

DEEP: Any = reduce(lambda inner, _: {"type": "array", "items": inner}, range(500), {"type": "string"})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "json.properties.a.items.uniqueItems"),
        ({"anyOf": [{"type": "string"}, {"not": {"type": "null"}}]}, "json.anyOf[1].not"),
        ({"$defs": {"x": {"if": {}}}}, "json.$defs.x.if"),
        ({"type": "string", "format": "phone"}, "json.format"),
        ({"items": [{"type": "string"}]}, "json.items"),
        ({"x-guidance": {"lenient": True}}, "json.x-guidance"),
        ({"type": "integer", "multipleOf": 1_000_003}, "json.multipleOf"),
        ({"properties": {f"p{i}": {} for i in range(1500)}}, "json.properties"),
        ({"properties": []}, "json.properties"),
        ({"anyOf": {}}, "json.anyOf"),
        ({"items": 3}, "json.items"),
        (DEEP, "json"),
        ({"enum": ["x" * 100] * 5000}, "json"),
        ({"enum": [f"value {i}" for i in range(20_000)]}, "json"),
        ({"type": "nope"}, None),
        ({"$ref": "http://example.com/schema"}, None),
        ({"$ref": "#/definitions/none"}, None),
        ({"type": "integer", "minimum": 5, "maximum": 3}, None),
        ({"type": "string", "pattern": "(?=a)b"}, None),
        ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(10)]}, None),
        ({"const": "\ud800"}, None),
        (False, None),
    ],
)
def test_schemas(compiler: GrammarCompiler, schema: Any, place: str | None) -> None:
    with pytest.raises(BadRequestError) as caught:
        constraint_of(compiler, json=schema)
    assert caught.value.param == (f"structured_outputs.{place}" if place else "structured_outputs")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(?<=a)b"),
        ("regex", "("),
        ("grammar", "start: undefined_rule"),
        ("grammar", "root ::= ("),
        ("grammar", "root ::= " + "(" * 5000),
        ("structural_tag", {"structures": [], "triggers": ["<"]}),
        ("structural_tag", {"structures": [{"begin": "x", "end": ""}], "triggers": ["<"]}),
        ("structural_tag", {"structures": [{"begin": "<", "end": "", "schema": 3}], "triggers": ["<"]}),
        ("structural_tag", {"format": {"type": "any_text"}}),
    ],
)
def test_other_kinds(compiler: GrammarCompiler, kind: str, value: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        constraint_of(compiler, **{kind: value})
    assert (caught.value.param or "").startswith("structured_outputs")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": "{"},
        {"json": 3},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", 1]},
        {"choice": [str(i) for i in range(5000)]},
        {"regex": ""},
        {"json_object": False},
        {"regex": "a", "disable_any_whitespace": True},
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
        {"jsn": {}},
        {"structural_tag": []},
    ],
)
def test_params(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        StructuredOutputsParams(**fields)


def test_the_cache_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.grammar.compiler._MAX_KEPT", 4)
    for i in range(10):
        constraint_of(compiler, choice=[f"only {i}"])
    assert len(compiler._kept) == 4
    assert compiler._num_chars == sum(map(len, compiler._kept))
    first = next(iter(compiler._kept))
    assert compiler.start(first) is compiler.start(first)


def test_special_tokens_are_no_text(compiler: GrammarCompiler, smollm2_tokenizer: Any) -> None:
    """A string may hold the characters of a special token, and never the token itself."""
    from grammar.walk import allowed

    constraint = constraint_of(compiler, json={"type": "string"})
    constraint.advance(smollm2_tokenizer.encode('"', add_special_tokens=False))
    found = allowed(constraint, smollm2_tokenizer.vocab_size)
    assert found.any() and not any(found[token] for token in smollm2_tokenizer.special_token_ids)
