"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens, as translations of a chat.

    system, text, thinking, tool_use, tool_result      the chat's messages
    tools, tool_choice, thinking, stop_sequences       the chat's fields
    content blocks, stop_reason, usage                 from the chat's answer

`cache_control` has no effect: prefixes are cached without being told. Images, documents and tools that Anthropic's
servers run are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.params import MAX_STOPS
from quire.server.endpoint import Exchange
from quire.server.errors import ApiError, bad_request, shown
from quire.server.protocol import BodyDecoder, Count, Positive, StopString, TokenizeBody
from quire.server.relay import event, parts_of, relay, tool_call
from quire.server.tokenize import tokens_of

_ERROR_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_decode_tokenize = BodyDecoder(TokenizeBody).decode


class _Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: dict[str, Any] | None = None


class TextBlock(_Block, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    data: str


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Annotated[Literal["custom"] | None, Meta(description="Tools that Anthropic runs are not here.")] = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    # How and when its caller runs it, which changes no prompt.
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any], Meta(max_length=0)] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: str | None = None


class KeepThinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The only edit that is taken: it leaves the conversation as it is."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    edits: list[KeepThinking] = []


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    # They edit a conversation or shape an answer on Anthropic's servers; taken where they ask for nothing.
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    context_management: Annotated[
        ContextManagement | None, Meta(description="Only what leaves the conversation as it is sent.")
    ] = None
    output_config: Annotated[dict[str, Any] | None, Meta(description="effort alone, as reasoning_effort.")] = None


class MessagesBody(CountTokensBody, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Positive
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Count | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Without effect.")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Meta(description="Without effect: there is one.")
    ] = None
    container: None = None
    inference_geo: None = None


async def create_message(exchange: Exchange, body: MessagesBody) -> None:
    """Answer a conversation, in the shape of Anthropic's Messages API."""
    served = exchange.context.find(body.model).served
    await relay(exchange, _chat(body, thinks=served.engine.dialect.thinking is not None), MessageTranslation())


async def count_message_tokens(exchange: Exchange, body: CountTokensBody) -> None:
    """Count the tokens of a conversation."""
    chat = _conversation(body)
    tokenized = _decode_tokenize(msgspec.json.encode(chat))
    await exchange.reply({"input_tokens": (await tokens_of(exchange, tokenized)).count})


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kind = _ERROR_TYPES.get(error.status) or ("api_error" if error.status >= 500 else error.type)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _conversation(body: CountTokensBody) -> dict[str, Any]:
    """What the model reads: the chat's messages and tools."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for number, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{number}]")
    chat: dict[str, Any] = {"messages": messages}
    if body.model is not None:
        chat["model"] = body.model
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    return chat


def _chat(body: MessagesBody, *, thinks: bool) -> dict[str, Any]:
    chat = _conversation(body)
    chat["max_completion_tokens"] = body.max_tokens
    for name in ("temperature", "top_p", "top_k", "stream"):
        if (value := getattr(body, name)) is not None:
            chat[name] = value
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    if body.tool_choice is not None and (body.tools or body.tool_choice.type in ("any", "tool")):  # else no effect
        chat |= _tool_choice(body.tool_choice)
    if body.thinking is not None and thinks:  # clients send it to every model, and one that never thinks obeys it
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
        if body.thinking.budget_tokens is not None:
            chat["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config:
        extra = sorted(body.output_config.keys() - {"effort"})
        if extra:
            raise bad_request(f"output_config.{extra[0]} is not supported", f"output_config.{shown(extra[0])}")
        chat["reasoning_effort"] = body.output_config["effort"]
    return chat


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice of the type tool needs the tool's name", "tool_choice.name")
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return fields | {"tool_choice": {"any": "required"}.get(choice.type, choice.type)}


def _messages(turn: Turn, where: str) -> list[dict[str, Any]]:
    """A turn as messages of a chat: results of tools are messages of their own there, before what else was said."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    message: dict[str, Any] = {"role": turn.role}
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for number, block in enumerate(turn.content):
        _check_role(turn.role, block, f"{where}.content[{number}]")
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            message["reasoning"] = message.get("reasoning", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            arguments = msgspec.json.encode(block.input).decode()
            message.setdefault("tool_calls", []).append(tool_call(block.id, block.name, arguments))
        elif isinstance(block, ToolResultBlock):
            text = _text(block.content or "")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    if texts or not (results or "tool_calls" in message):
        message["content"] = "\n".join(texts)
    is_more = len(message) > 1
    return [*results, message] if is_more else results


def _check_role(role: str, block: Block, where: str) -> None:
    if isinstance(block, ToolResultBlock) and role != "user":
        raise bad_request(f"{where}: a tool_result belongs to a user's turn", where)
    if isinstance(block, (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)) and role != "assistant":
        raise bad_request(f"{where}: tool_use and thinking belong to an assistant's turn", where)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class MessageTranslation:
    """One answer: whole, or as events. A stream's blocks are open one at a time."""

    names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
    }

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None  # the type of the block that is open
        self._has_begun = False
        self._stop: tuple[str | None, str | None] = (None, None)
        self._num_output = 0
        self._is_over = False

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        if thought := message.get("reasoning"):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if text := message.get("content"):
            content.append({"type": "text", "text": text})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = msgspec.json.decode(function["arguments"] or "{}")
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        stop_reason, stop_sequence = _stop(choice)
        head = _head(answer["id"], answer["model"], answer["usage"])
        return head | {"content": content, "stop_reason": stop_reason, "stop_sequence": stop_sequence}

    def chunk(self, chunk: dict[str, Any]) -> list[bytes]:
        if "error" in chunk:
            self._is_over = True
            error = chunk["error"]
            return [event("error", {"error": {"type": "api_error", "message": error["message"]}})]
        events: list[bytes] = []
        self._num_output = chunk["usage"]["completion_tokens"]
        if not self._has_begun:
            self._has_begun = True
            message = _head(chunk["id"], chunk["model"], chunk["usage"])
            message["usage"]["output_tokens"] = 0
            events += [event("message_start", {"message": message}), event("ping", {})]
        for kind, part in parts_of(chunk):
            if kind == "reasoning":
                events += self._in_block("thinking", {"thinking": "", "signature": ""})
                events.append(self._delta({"type": "thinking_delta", "thinking": part}))
            elif kind == "content":
                events += self._in_block("text", {"text": ""})
                events.append(self._delta({"type": "text_delta", "text": part}))
            elif kind == "call":
                events += self._in_call(part)
            else:
                self._stop = _stop(part)
        return events

    def ending(self) -> list[bytes]:
        if self._is_over:
            return []
        stop_reason, stop_sequence = self._stop
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        usage = {"output_tokens": self._num_output}
        return [*self._close(), event("message_delta", {"delta": delta, "usage": usage}), event("message_stop", {})]

    def _in_call(self, call: dict[str, Any]) -> list[bytes]:
        events: list[bytes] = []
        function = call["function"]
        if "id" in call:
            events += self._close()
            events += self._in_block("tool_use", {"id": call["id"], "name": function["name"], "input": {}})
        if arguments := function["arguments"]:
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _in_block(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """The events that open a block of this kind, where another one is open or none."""
        if self._open == kind:
            return []
        events = self._close()
        self._index += 1
        self._open = kind
        return [*events, event("content_block_start", {"index": self._index, "content_block": {"type": kind, **block}})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [event("content_block_stop", {"index": self._index})]


def _head(chat_id: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "id": f"msg_{chat_id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        },
    }


def _stop(choice: dict[str, Any]) -> tuple[str | None, str | None]:
    """stop_reason and stop_sequence."""
    if choice["finish_reason"] == "stop" and isinstance(choice.get("stop_reason"), str):
        return "stop_sequence", choice["stop_reason"]
    return _STOP_REASONS.get(choice["finish_reason"], choice["finish_reason"]), None
