"""Forced and strict calls: what the grammar allows is what the parser reads, and arguments fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar.walk import write

from quire.agents import AnswerParser, ToolChoice, tool_grammar
from quire.agents.formats import FORMATS
from quire.errors import BadRequestError
from quire.grammar import GrammarCompiler, lower
from quire.grammar.constraint import Constraint
from quire.grammar.lowering import json_rule, literal
from quire.grammar.schema import checked_schema
from quire.structured import StructuredOutputsParams
from quire.text import Tokenizer
from quire.weights import open_checkpoint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get", "strict": True, "parameters": SCHEMA}},
]
NAMES = frozenset({"get_weather", "get"})


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(smollm2).gguf_metadata or {}, source=str(smollm2))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: (tokenizer, tokenizer.end_token_ids), vocab_size=tokenizer.vocab_size)


def made(name: str, choice: ToolChoice, compiler: GrammarCompiler, *, parallel: bool = True) -> tuple[Constraint, Any]:
    found = tool_grammar(
        FORMATS[name],
        TOOLS,
        choice,
        parallel=parallel,
        json_rule=lambda schema, where: json_rule(checked_schema(schema, where)),
        text_rule=literal,
    )
    assert found is not None
    grammar, form = found
    return Constraint(compiler.matchers(lower(StructuredOutputsParams(grammar=grammar)))[0]), form


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "get")], ids=["required", "named"])
def test_forced_calls(name: str, choice: ToolChoice, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint, form = made(name, choice, compiler, parallel=False)
    tokens, has_ended = write(constraint, tokenizer, seed=3)
    assert has_ended
    parser = AnswerParser(tools=form, names=NAMES)
    found, rest = parser.push(tokenizer.decode(tokens)), parser.finish()
    assert parser.num_calls == 1 and not found.content and not rest.content
    assert found.calls[0].name in ({"get"} if choice.name else NAMES)
    jsonschema.validate(json.loads("".join(call.arguments for call in found.calls)), SCHEMA)


@pytest.mark.parametrize("name", FORMATS)
def test_strict_calls_after_free_text(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    if FORMATS[name].written is None:
        with pytest.raises(BadRequestError, match="strict"):
            made(name, ToolChoice("auto"), compiler)
        return
    constraint, form = made(name, ToolChoice("auto"), compiler)
    opening = form.around[0] + form.written[0]
    text = opening if form.bare else f"I look it up.\n{opening}"
    constraint.advance(tokenizer.encode(text, add_special_tokens=False))
    tokens, _ = write(constraint, tokenizer, seed=5, max_tokens=200)
    parser = AnswerParser(tools=form, names=NAMES)
    found = parser.push(text + tokenizer.decode(tokens))
    assert found.content == ("" if form.bare else "I look it up.")
    assert found.calls
    first = "".join(call.arguments for call in found.calls if call.index == 0)
    jsonschema.validate(json.loads(first), SCHEMA)
