"""A model's dialect: how it calls tools and how it thinks, read from its chat template or named by a flag."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.agents.formats import FORMATS, THINKING_FORMATS, ThinkingFormat, ToolFormat, find_format, find_thinking
from quire.errors import ConfigError

_SWITCHES = {"tools", "enable_thinking", "thinking", "reasoning_effort"}


@dataclass(slots=True, frozen=True)
class Dialect:
    tools: ToolFormat | None = None
    thinking: ThinkingFormat | None = None
    switches: frozenset[str] = frozenset()  # names of _SWITCHES that the template reads

    @property
    def shows_tools(self) -> bool:
        return "tools" in self.switches


def find_dialect(template: str | None, tool_call_parser: str | None, reasoning_parser: str | None) -> Dialect:
    """Raises ConfigError for a name that nobody knows."""
    tools = find_format(template or "")
    if tool_call_parser:
        if tool_call_parser not in FORMATS:
            raise ConfigError(f"tool_call_parser={tool_call_parser!r} is not one of {', '.join(sorted(FORMATS))}")
        tools = FORMATS[tool_call_parser]
    thinking = find_thinking(template or "")
    if reasoning_parser:
        if reasoning_parser not in THINKING_FORMATS:
            known = ", ".join(sorted(THINKING_FORMATS))
            raise ConfigError(f"reasoning_parser={reasoning_parser!r} is not one of {known}")
        thinking = THINKING_FORMATS[reasoning_parser]
    return Dialect(tools, thinking, frozenset(_SWITCHES.intersection(re.findall(r"\w+", template or ""))))
