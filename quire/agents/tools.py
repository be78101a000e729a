"""The tools of a request: checked, and held to by a grammar where calls are forced or strict."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.agents.formats import LISTED, ToolFormat
from quire.errors import BadRequestError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 256


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """Which of a request's tools may be called, and whether one must be."""

    mode: str = "auto"  # auto, none, required, named
    name: str | None = None

    @classmethod
    def of(cls, given: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
        names = [tool["function"]["name"] for tool in tools]
        match given:
            case None | "auto":
                return cls("auto" if names else "none")
            case "none":
                return cls("none")
            case "required" if names:
                return cls(given)
            case {"type": "function", "function": {"name": str(name)}} if set(given) == {"type", "function"}:
                if name not in names:
                    raise _bad("tool_choice", f"names {name!r:.60}, and tools has {', '.join(names) or 'none'}")
                return cls("named", name)
            case "required":
                raise _bad("tool_choice", "is required, and there are no tools")
        raise _bad(
            "tool_choice", 'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        )

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


def checked_tools(given: Any) -> list[dict[str, Any]]:
    """Copies of the tools with a name and parameters each. Raises BadRequestError with the place of what is wrong."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise _bad("tools", "must be a list")
    if len(given) > MAX_TOOLS:
        raise _bad("tools", f"may be {MAX_TOOLS}, and there are {len(given):,}")
    checked, seen = [], set()
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise _bad(where, 'must be {"type": "function", "function": {...}}')
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _bad(f"{where}.function", "must be an object with a name and parameters")
        if unknown := sorted(set(function) - {"name", "description", "parameters", "strict"}):
            raise _bad(f"{where}.function.{unknown[0]:.60}", "is not a field of a function")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _bad(f"{where}.function.name", "must be 1 to 64 letters, digits, dots, dashes or underscores")
        if name in seen:
            raise _bad(f"{where}.function.name", f"is {name!r} for the second time")
        if not isinstance(function.get("description", ""), (str, type(None))):
            raise _bad(f"{where}.function.description", "must be a text")
        if not isinstance(function.get("parameters"), (Mapping, type(None))):
            raise _bad(f"{where}.function.parameters", "must be a JSON schema")
        if not isinstance(function.get("strict"), (bool, type(None))):
            raise _bad(f"{where}.function.strict", "must be true or false")
        seen.add(name)
        checked.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return checked


def tool_grammar(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    parallel: bool,
    json_rule: Callable[[Any, str], str],
    text_rule: Callable[[str], str],
) -> tuple[str, ToolFormat] | None:
    """A Lark grammar that answers must fit, and the format in which their calls then are; None where none is needed.

    `json_rule` makes a part of a rule from a schema and its place, `text_rule` from a text.
    """
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if not choice.is_forced and not (choice.mode == "auto" and is_strict):
        return None
    if form.written is None:
        if not choice.is_forced:
            raise _bad("tools", f"strict needs tool_choice required or a name with this model's format ({form.name})")
        form = LISTED
    assert form.written is not None
    before, between, after = form.written
    begin, comma, end = form.around
    opening = begin + before
    marker = max((one for one in (*form.begins, *form.dropped) if opening.startswith(one)), key=len, default="")
    heads: list[str] = []  # name and arguments, without what is before the name
    for i, tool in enumerate(tools):
        function = tool["function"]
        if choice.name is not None and function["name"] != choice.name:
            continue
        schema: Any = function.get("parameters") or {"type": "object", "properties": {}}
        if not function.get("strict") and not choice.is_forced:
            schema = {"type": "object"}
        rule = json_rule(schema, f"tools[{i}].function.parameters")
        heads.append(f"{text_rule(function['name'] + between)} {rule} {text_rule(after)}")
    more = f"({text_rule(comma)} call)*" if parallel and choice.mode != "named" else ""
    lines = [f"body: {' | '.join(heads)}", f"call: {text_rule(before)} body", r"FREE: /(.|\n)*/"]
    if choice.is_forced:
        lines.append(f"start: {text_rule(begin)} call {more} {text_rule(end)}")
    elif form.bare:  # a text that begins otherwise is no call
        lines.append(f"start: call {more} | OTHER")
        lines.append(rf"OTHER: /[^{re.escape(form.bare)}\s](.|\n)*/")
    else:
        tail = f"{text_rule(opening[len(marker) :])} body {more} {text_rule(end)}"
        mark = text_rule(marker)
        lines.append(f"start: FREE | {'FREE ' + mark if mark.startswith('<') else 'head'} {tail}")
        lines.append(f"head[lazy]: FREE {mark}" if not mark.startswith("<") else "")
    return "\n".join(lines), form


def _bad(where: str, what: str) -> BadRequestError:
    return BadRequestError(f"{where} {what}", param=where)
