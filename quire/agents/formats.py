"""The formats in which models call tools, each of which is data and a reader, and those in which they mark what they
think before they answer; and a model's dialect, which is one of each, read from its chat template or named by a flag.
Names are vLLM's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quire.agents import readers
from quire.agents.readers import Calls, Reading
from quire.errors import ConfigError

_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True, frozen=True)
class ToolFormat:
    name: str
    marks: tuple[str, ...]  # texts that are all in the chat templates of this format
    read: Callable[[Calls], Reading]  # what follows `begins`, or `bare`
    begins: tuple[str, ...] = ()  # markers before a call
    end: str = ""  # the marker after it, where there is one
    bare: str = ""  # the character that a call may begin with, at an answer's very beginning
    dropped: tuple[str, ...] = ()  # markers around calls that say nothing
    # How a call is written where a grammar forces it: what is before the name, after it, and after the arguments. Where
    # it is None, forced calls are a list in JSON, whatever the model is used to.
    written: tuple[str, str, str] | None = None
    around: tuple[str, str, str] = ("", "", "")  # before all calls, between two, after all
    id_chars: int = 24


def _json(*ends: str) -> Callable[[Calls], Reading]:
    return partial(readers.json_calls, names=("name",), arguments=_ARGUMENTS, ends=ends)


def _mistral(calls: Calls) -> Reading:
    """A list in JSON, or since 2025 a name with its arguments."""
    char = yield from readers.skip_space()
    if char == "[":
        yield from readers.json_calls(calls, ("name",), _ARGUMENTS, first=char)
    else:
        yield from readers.named_call(calls, ("[ARGS]", "{"), "", first=char)


def _glm(calls: Calls) -> Reading:
    pairs = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    return readers.whole_call(calls, "</tool_call>", readers.tagged_arguments(pairs, r"\s*([\w.-]+)\s*"))


def _qwen_xml(calls: Calls) -> Reading:
    pairs = r"<parameter=([^>]+)>(.*?)</parameter>"
    return readers.whole_call(calls, "</tool_call>", readers.tagged_arguments(pairs, r"\s*<function=([^>]+)>"))


# In the order in which templates are looked through: the more peculiar first.
FORMATS = {
    one.name: one
    for one in (
        ToolFormat(
            "deepseek_v3",
            ("<｜tool▁calls▁begin｜>", "```json"),
            partial(
                readers.named_call,
                between=("\n```json\n", "\n```json"),
                end="<｜tool▁call▁end｜>",
                before="function<｜tool▁sep｜>",
            ),
            begins=("<｜tool▁call▁begin｜>",),
            dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            written=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
            around=("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
        ),
        ToolFormat(
            "deepseek_v31",
            ("<｜tool▁calls▁begin｜>",),
            partial(readers.named_call, between=("<｜tool▁sep｜>",), end="<｜tool▁call▁end｜>"),
            begins=("<｜tool▁call▁begin｜>",),
            dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            written=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            around=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        ),
        ToolFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            _mistral,
            begins=("[TOOL_CALLS]",),
            written=('{"name": "', '", "arguments": ', "}"),
            around=("[TOOL_CALLS][", ", ", "]"),
            id_chars=9,  # their templates refuse any other length
        ),
        ToolFormat(
            "functiongemma",
            ("<start_function_call>",),
            partial(readers.whole_call, end="<end_function_call>", parse=readers.parse_gemma),
            begins=("<start_function_call>",),
        ),
        ToolFormat("glm45", ("<arg_key>",), _glm, begins=("<tool_call>",)),
        ToolFormat("qwen3_xml", ("<tool_call>", "<function="), _qwen_xml, begins=("<tool_call>",)),
        ToolFormat(
            "granite",
            ("<|tool_call|>",),
            _json(),
            begins=("<|tool_call|>", "<tool_call>"),
            written=('{"name": "', '", "arguments": ', "}"),
            around=("<|tool_call|>[", ", ", "]"),
        ),
        ToolFormat(
            "hermes",
            ("<tool_call>",),
            _json("</tool_call>", "```"),
            begins=(
                "<tool_call>",
                "```json",
            ),  # the second is what small models write all the same (Qwen2.5-Coder 1.5B)
            end="</tool_call>",
            written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
            around=("", "\n", ""),
        ),
        ToolFormat(
            "minimax",
            ("<tool_calls>",),
            _json("</tool_calls>"),
            begins=("<tool_calls>",),
            end="</tool_calls>",
            written=('{"name": "', '", "arguments": ', "}"),
            around=("<tool_calls>\n", "\n", "\n</tool_calls>"),
        ),
        ToolFormat("pythonic", ("[func_name1(",), readers.python_calls, bare="["),
        ToolFormat(
            "llama3_json",
            ("<|python_tag|>",),
            _json(),
            begins=("<|python_tag|>",),
            bare="{",
            written=('{"name": "', '", "parameters": ', "}"),
            around=("", "; ", ""),
        ),
    )
}
FORMATS["llama4_pythonic"] = FORMATS["pythonic"]
FORMATS["qwen3_coder"] = FORMATS["qwen3_xml"]
# The format of forced calls of models whose own format is no JSON.
LISTED = ToolFormat(
    "json",
    (),
    _json(),
    bare="[",
    written=('{"name": "', '", "parameters": ', "}"),
    around=("[", ", ", "]"),
)


def find_format(template: str) -> ToolFormat | None:
    """The format that a chat template writes its calls in."""
    return next((one for one in FORMATS.values() if one.marks and all(mark in template for mark in one.marks)), None)


@dataclass(slots=True, frozen=True)
class ThinkingFormat:
    name: str
    begin: str
    end: str
    always_open: bool = False  # an answer begins inside a thought, though the prompt does not say so

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside a thought."""
        return self.always_open or prompt.rstrip().endswith(self.begin)


_THINK = ThinkingFormat("think", "<think>", "</think>")
_MISTRAL = ThinkingFormat("mistral", "[THINK]", "[/THINK]")
# vLLM's names of them.
THINKING_FORMATS = {
    **dict.fromkeys(("think", "qwen3", "glm45", "granite", "deepseek_v3", "hunyuan_a13b"), _THINK),
    "deepseek_r1": ThinkingFormat("deepseek_r1", "<think>", "</think>", always_open=True),
    "mistral": _MISTRAL,
}


def find_thinking(template: str) -> ThinkingFormat | None:
    """The format whose closing marker a template writes or reads: other markers it may merely mention."""
    return next((one for one in (_THINK, _MISTRAL) if one.end in template), None)


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
    """Raises ConfigError for an unknown name."""
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
