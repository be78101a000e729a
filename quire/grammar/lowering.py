"""From StructuredOutputsParams to the grammar text that is compiled, cached and sent to the executor."""

from __future__ import annotations

import json
from typing import Any

from quire.errors import BadRequestError
from quire.grammar.schema import checked_schema
from quire.structured import StructuredOutputsParams

# One space, or a line break and its indentation. JSON allows any amount, which a model can go on with for ever.
WHITESPACE = r"(\x20|\r?\n[\x20\x09]{0,40})?"
_MAX_TAGS = 256
# Compiled where no grammar but the vocabulary is needed, and never followed.
NO_GRAMMAR = json.dumps({"grammars": [{"lark_grammar": 'start: "x"'}]})


def lower(params: StructuredOutputsParams) -> str:
    """Raises BadRequestError."""
    from llguidance import LLMatcher

    where = "structured_outputs"
    if params.json is not None:
        schema = checked_schema(params.json, f"{where}.json", closed=params.disable_additional_properties)
        return json_grammar(schema, params)
    if params.json_object:
        return json_grammar({"type": "object"}, params)
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        return lark("start: CHOICE\nCHOICE: " + " | ".join(map(literal, params.choice)))
    if params.grammar is not None:
        return _from_text(params.grammar)
    assert isinstance(params.structural_tag, dict)
    return _from_structural_tag(params.structural_tag)


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def json_options(params: StructuredOutputsParams | None = None) -> dict[str, Any]:
    """How the compiler is to read a schema: strictly, whatever the schema itself says of that."""
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": True}
    if params is not None and params.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    own = params.whitespace_pattern if params is not None else None
    return options | {"whitespace_pattern": WHITESPACE if own is None else own}


def json_grammar(schema: Any, params: StructuredOutputsParams | None = None) -> str:
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, params)}]})


def json_rule(schema: Any) -> str:
    """A checked schema as a part of a Lark rule."""
    return "%json " + json.dumps(_with_options(schema))


def _with_options(schema: Any, params: StructuredOutputsParams | None = None) -> dict[str, Any]:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {**schema, "x-guidance": json_options(params)}


def _from_text(text: str) -> str:
    """Lark as it is; GBNF and EBNF (`root ::= ...`) are rewritten."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return lark(any_to_lark(text))
    except RecursionError:
        raise _bad("grammar", "is nested too deeply: give its parts names") from None
    except Exception as error:  # the converter raises what it comes across
        raise _bad("grammar", f"cannot be read: {error!s:.300}") from None


def _from_structural_tag(tag: dict[str, Any]) -> str:
    """vLLM's: free text until a trigger, then one of the structures that begin with it, and so on."""
    if isinstance(tag.get("format"), dict):
        raise _bad("structural_tag", 'with "format" is not supported: send "structures" and "triggers"')
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if unknown := sorted(set(tag) - {"type", "structures", "triggers"}):
        raise _bad("structural_tag", f"has an unknown field {unknown[0]!r:.60}")
    if not isinstance(structures, list) or not 0 < len(structures) <= _MAX_TAGS:
        raise _bad("structural_tag.structures", f"must be a list of 1 to {_MAX_TAGS} structures")
    if not isinstance(triggers, list) or not triggers or any(not isinstance(one, str) or not one for one in triggers):
        raise _bad("structural_tag.triggers", "must be a list of non-empty texts")
    found: list[tuple[str, str, str]] = []
    for i, one in enumerate(structures):
        where = f"structural_tag.structures[{i}]"
        if not isinstance(one, dict) or any(not isinstance(one.get(name), str) for name in ("begin", "end")):
            raise _bad(where, "must be an object with begin, schema and end")
        if unknown := sorted(set(one) - {"begin", "schema", "end"}):
            raise _bad(where, f"has an unknown field {unknown[0]!r:.60}")
        if not any(one["begin"].startswith(trigger) for trigger in triggers):
            raise _bad(f"{where}.begin", "must start with one of the triggers")
        schema = checked_schema(one.get("schema", True), f"structured_outputs.{where}.schema")
        found.append((one["begin"], json_rule(schema), one["end"]))
    return lark(tagged_text(found, triggers))


def tagged_text(structures: list[tuple[str, str, str]], triggers: list[str]) -> str:
    """A Lark grammar of text with (begin, rule, end) in it wherever a trigger stands."""
    lines = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(triggers)))})* TEXT", r"TEXT: /(.|\n)*/"]
    for i, trigger in enumerate(triggers):
        options = [one for one in structures if one[0].startswith(trigger)]
        if not options:
            raise _bad("structural_tag.triggers", f"has {trigger!r:.60}, with which no structure begins")
        bodies = [f"{literal(begin[len(trigger) :])} {rule} {literal(end)}" for begin, rule, end in options]
        lines.append(f"head_{i}[lazy]: TEXT {literal(trigger)}")
        lines.append(f"tag_{i}: head_{i} ({' | '.join(bodies)})")
    return "\n".join(lines)


def literal(text: str) -> str:
    """A text as Lark writes it; nothing where it is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _bad(name: str, what: str) -> BadRequestError:
    return BadRequestError(f"structured_outputs.{name} {what}", param=f"structured_outputs.{name}")
