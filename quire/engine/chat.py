"""A conversation's way through an engine, whatever wire format asks for it: rendered, generated from, and its answer
parsed into thinking, content and tool calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.agents import AnswerParser, Dialect, ToolChoice, tool_grammar
from quire.agents.formats import LISTED, ToolFormat
from quire.beams import BeamSearchParams
from quire.errors import BadRequestError
from quire.grammar.lowering import json_rule, literal
from quire.grammar.schema import checked_schema
from quire.params import SamplingParams
from quire.request import AdapterRef
from quire.structured import StructuredOutputsParams
from quire.text import Tokenizer

if TYPE_CHECKING:
    from quire.engine.api import PreparedRequest, ServingEngine

_LETTERS = string.ascii_letters + string.digits

NO_TOOLS = (
    "this model's chat template has no place for tools: use a model that was made to call them, or give a template "
    "that shows them (--chat-template)"
)


@dataclass(slots=True, kw_only=True)
class ChatTurn:
    """A chat to be answered. `tools` are those of `checked_tools`."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams | BeamSearchParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # for the chat template, its switches among them
    cache_salt: str | None = None

    @property
    def compiles(self) -> bool:
        """Whether a grammar may have to be compiled for it."""
        params = self.params
        has_own = isinstance(params, SamplingParams) and params.structured_outputs is not None
        return has_own or self.choice.is_forced or any(tool["function"].get("strict") for tool in self.tools)


@dataclass(slots=True)
class PreparedChat:
    """A turn on its way, and how its answers are to be read."""

    prepared: PreparedRequest
    dialect: Dialect
    is_open: bool  # the prompt ends inside a thought
    names: frozenset[str]  # the tools that may be called
    _hidden: re.Pattern[str] | None  # special tokens that only the parser is to see

    @property
    def is_plain(self) -> bool:
        """Whether answers are content alone."""
        return self.dialect.thinking is None and not self.names

    def parser(self) -> AnswerParser:
        """For one answer."""
        dialect = self.dialect
        return AnswerParser(thinking=dialect.thinking, is_open=self.is_open, tools=dialect.tools, names=self.names)

    def shown(self, content: str) -> str:
        """Content without special tokens that were let through for the parser."""
        return self._hidden.sub("", content) if self._hidden is not None and content else content

    def new_call_id(self) -> str:
        size = self.dialect.tools.id_chars if self.dialect.tools is not None else 24
        text = "".join(secrets.choice(_LETTERS) for _ in range(size))
        return text if size < 24 else f"call_{text}"

    def num_reasoning_tokens(self, tokenizer: Tokenizer | None, token_ids: Sequence[int], reasoning: str) -> int:
        """How many of a whole answer's tokens come before the end of its thought, the closing marker included."""
        thinking = self.dialect.thinking
        if thinking is None or tokenizer is None or not (reasoning or self.is_open):
            return 0
        ends = tokenizer.encode(thinking.end, add_special_tokens=False)
        for at in range(len(token_ids) - len(ends) + 1):
            if list(token_ids[at : at + len(ends)]) == ends:
                return at + len(ends)
        return min(len(token_ids), len(tokenizer.encode(reasoning, add_special_tokens=False)) + len(ends))


def prepare_chat(
    engine: ServingEngine,
    request_id: str,
    turn: ChatTurn,
    *,
    priority: int = 0,
    tenant: str = "",
    adapter: AdapterRef | None = None,
) -> PreparedChat:
    """Render, tokenize and check. Any thread may call it; raises BadRequestError."""
    dialect, params, tokenizer = engine.dialect, turn.params, engine.tokenizer
    options = dict(turn.options) | _effort(turn.reasoning_effort, dialect)
    names: frozenset[str] = frozenset()
    tools = dialect.tools
    if turn.tools and turn.choice.mode != "none":
        if isinstance(params, BeamSearchParams):
            raise BadRequestError("tools are not served with beam search: leave one of them out", param="tools")
        if not dialect.shows_tools:
            raise BadRequestError(NO_TOOLS, param="tools")
        if tools is None and not turn.choice.is_forced:
            raise BadRequestError(
                "this model's chat template shows no format of tool calls that Quire knows: ask the operator to set "
                "--tool-call-parser, or set tool_choice to required",
                param="tools",
            )
        options["tools"] = turn.tools
        names = frozenset(tool["function"]["name"] for tool in turn.tools)
        tools, params = _hold_to_tools(turn, params, tools, tokenizer)
    prompt = engine.render_chat(turn.messages, **options)
    if turn.cache_salt is not None:
        prompt["cache_salt"] = turn.cache_salt
    thinking = dialect.thinking
    is_open = thinking is not None and thinking.is_open(prompt["prompt"])
    dialect = Dialect(tools, thinking, dialect.switches)
    hidden = None
    if isinstance(params, SamplingParams) and params.skip_special_tokens and tokenizer is not None:
        special = {tokenizer.token(token) for token in tokenizer.special_token_ids}
        if special.intersection(_markers(dialect if names else Dialect(None, thinking))):
            params = params.clone(skip_special_tokens=False)
            hidden = re.compile("|".join(re.escape(one) for one in sorted(special, key=len, reverse=True)))
    prepared = engine.prepare(request_id, prompt, params, priority=priority, tenant=tenant, adapter=adapter)
    return PreparedChat(prepared, dialect, is_open, names, hidden)


def _hold_to_tools(
    turn: ChatTurn, params: SamplingParams, form: ToolFormat | None, tokenizer: Tokenizer | None
) -> tuple[ToolFormat | None, SamplingParams]:
    """The format that calls will have where they are forced or strict, and the grammar that holds answers to it."""
    assert tokenizer is not None
    special = {tokenizer.token(token): token for token in sorted(tokenizer.special_token_ids)}
    pattern = re.compile("|".join(re.escape(one) for one in sorted(special, key=len, reverse=True)) or r"(?!)")

    def text_rule(text: str) -> str:
        """A text as a part of a rule: special tokens in it are tokens, the rest is characters."""
        parts, at = [], 0
        for found in pattern.finditer(text):
            parts += [literal(text[at : found.start()]), f"<[{special[found[0]]}]>"]
            at = found.end()
        return " ".join(part for part in (*parts, literal(text[at:])) if part)

    made = tool_grammar(
        form or LISTED,
        turn.tools,
        turn.choice,
        parallel=turn.parallel_tool_calls,
        json_rule=lambda schema, where: json_rule(checked_schema(schema, where)),
        text_rule=text_rule,
    )
    if made is None:
        return form, params
    if params.structured_outputs is not None:
        raise BadRequestError(
            "response_format cannot be held to together with forced or strict tools: send one of them",
            param="response_format",
        )
    grammar, form = made
    return form, params.clone(structured_outputs=StructuredOutputsParams(grammar=grammar))


def _markers(dialect: Dialect) -> set[str]:
    tools, thinking = dialect.tools, dialect.thinking
    found = {thinking.begin, thinking.end} if thinking is not None else set()
    if tools is not None:
        text = "".join((*tools.begins, *tools.dropped, tools.end, *(tools.written or ()), *tools.around))
        found |= set(re.findall(r"<｜.*?｜>|<[^<>]*>|\[/?[A-Z_]+\]", text))
    return found


def _effort(effort: str | None, dialect: Dialect) -> dict[str, Any]:
    """The switches of a template that say how much to think."""
    if effort is None:
        return {}
    if "reasoning_effort" in dialect.switches:
        return {"reasoning_effort": effort}
    for name in ("enable_thinking", "thinking"):
        if name in dialect.switches:
            return {name: effort not in ("none", "minimal")}
    raise BadRequestError(
        "reasoning_effort: this model's chat template has no switch for it. Leave it out", param="reasoning_effort"
    )
