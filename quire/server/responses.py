"""OpenAI's Responses API: POST /v1/responses, as a translation of a chat, and the answers that the server remembers.

    input, instructions, previous_response_id   the chat's messages
    tools, tool_choice, text.format, reasoning  the chat's fields
    output items, status, usage                 from the chat's answer

What a response said is kept with the conversation before it, under a limit in bytes, the oldest leaving first: so
`previous_response_id` goes on from it, and GET finds it again. `store: false` keeps nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server.endpoint import Exchange, json_response, tenant_of
from quire.server.errors import ApiError, bad_request, shown, to_api_error
from quire.server.protocol import Positive
from quire.server.relay import relay, tool_call
from quire.server.response_events import Items, ResponseTranslation

if TYPE_CHECKING:
    from quire.server.context import ServerContext

_MAX_KEPT_BYTES = 64 << 20
_MAX_BACKGROUND = 256
_BUILT_IN = "tools of the type function are here; those that OpenAI's servers run are not"


class Part(msgspec.Struct, kw_only=True):
    """A part of a message. Answers that are sent back bring fields that say nothing new."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""


class Item(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a conversation. Which fields it needs depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    phase: str | None = None
    namespace: None = None
    encrypted_content: None = None


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[Literal["function"], Meta(description=_BUILT_IN)]
    name: Annotated[str, Meta(min_length=1)]
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Annotated[str | None, Meta(description="Without effect: the thought itself is shown.")] = None
    generate_summary: None = None


class ResponsesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    input: Annotated[str, Meta(min_length=1)] | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    deterministic: bool | None = None  # Quire's own, as in chats
    # Without effect, as in chats.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Only with the values that ask for nothing.
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Meta(max_length=1)] | None = None
    stream_options: dict[str, Literal[False]] | None = None
    top_logprobs: Literal[0] | None = None
    max_tool_calls: None = None
    conversation: None = None
    prompt: None = None


class Kept(msgspec.Struct):
    """A response that is remembered, and the conversation up to it."""

    tenant: str
    response: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponseStore:
    """Responses of one server by their ids, each its sender's; the oldest leave when the bytes are used up."""

    def __init__(self, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()  # encoded: one object instead of thousands
        self._num_bytes = 0
        self.running: dict[str, asyncio.Task[None]] = {}  # in the background

    def keep(self, kept: Kept) -> None:
        encoded = msgspec.msgpack.encode(kept)
        self.forget(kept.response["id"])
        self._kept[kept.response["id"]] = encoded
        self._num_bytes += len(encoded)
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._kept)))

    def find(self, response_id: str, tenant: str, param: str | None = None) -> Kept:
        encoded = self._kept.get(response_id)
        kept = None if encoded is None else msgspec.msgpack.decode(encoded, type=Kept)
        if kept is None or kept.tenant != tenant:
            raise ApiError(
                404,
                f"the response {shown(response_id)!r} is not here: it was never kept, or newer ones took its place",
                param=param,
                code="response_not_found",
            )
        return kept

    def forget(self, response_id: str) -> None:
        self._num_bytes -= len(self._kept.pop(response_id, b""))


async def create_response(exchange: Exchange, body: ResponsesBody) -> None:
    """Answer a conversation, in the shape of OpenAI's Responses API."""
    store = exchange.context.responses
    before: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        before = store.find(body.previous_response_id, exchange.tenant, "previous_response_id").messages
    messages = [*before, *_messages(body.input)]
    keeps = body.store is not False
    model = exchange.context.find(body.model).name
    head = _head(f"resp_{exchange.request_id}", model, body)

    def on_done(response: dict[str, Any], items: Items) -> None:
        if keeps:
            store.keep(Kept(exchange.tenant, response, [*messages, items.message()]))

    translation = ResponseTranslation(head, on_done)
    chat = _chat(body, messages)
    if not body.background:
        await relay(exchange, chat, translation)
        return
    if body.stream or not keeps:
        raise bad_request("background needs store, and cannot be streamed: ask for it by its id", "background")
    if len(store.running) >= _MAX_BACKGROUND:
        raise ApiError(429, f"{_MAX_BACKGROUND} responses run in the background already", code="too_many_requests")
    store.keep(Kept(exchange.tenant, head | {"status": "queued"}, messages))
    task = asyncio.create_task(_run_in_background(exchange.detached(), chat, translation, store, messages))
    store.running[head["id"]] = task
    task.add_done_callback(lambda _: store.running.pop(head["id"], None))
    await exchange.reply(head | {"status": "queued"})


async def _run_in_background(
    exchange: Exchange,
    chat: Mapping[str, Any],
    translation: ResponseTranslation,
    store: ResponseStore,
    messages: list[dict[str, Any]],
) -> None:
    try:
        await relay(exchange, chat, translation)
    except asyncio.CancelledError:
        store.keep(Kept(exchange.tenant, translation.head | {"status": "cancelled"}, messages))
    except Exception as failure:
        error = to_api_error(failure)
        told = {"code": error.code or error.type, "message": error.message}
        store.keep(Kept(exchange.tenant, translation.head | {"status": "failed", "error": told}, messages))


def _found(context: ServerContext, request: HttpRequest) -> Kept:
    return context.responses.find(request.path_params["id"], tenant_of(request.scope))


async def show_response(context: ServerContext, request: HttpRequest) -> Response:
    """Show a response that the server remembers."""
    return json_response(_found(context, request).response)


async def delete_response(context: ServerContext, request: HttpRequest) -> Response:
    """Delete a response that the server remembers."""
    response_id = _found(context, request).response["id"]
    context.responses.forget(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(context: ServerContext, request: HttpRequest) -> Response:
    """Cancel a response that runs in the background."""
    task = context.responses.running.get(_found(context, request).response["id"])
    if task is None:
        raise ApiError(409, "only a response that runs in the background can be cancelled", code="not_running")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return json_response(_found(context, request).response)


def _messages(given: str | list[Item]) -> list[dict[str, Any]]:
    """A conversation's items as messages of a chat. One answer's text, thought and calls are one message there."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thought = ""
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if item.type == "reasoning":
            thought += _text(item.content or item.summary or [])
        elif item.type == "function_call_output":
            _need(item, where, "call_id", "output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output or "")})
        elif item.type == "function_call":
            _need(item, where, "call_id", "name", "arguments")
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(tool_call(item.call_id, item.name, item.arguments))
        else:
            _need(item, where, "role", "content")
            messages.append({"role": item.role, "content": _text(item.content or "")})
        if thought and messages and messages[-1]["role"] == "assistant" and item.type != "reasoning":
            messages[-1]["reasoning"], thought = thought, ""
    return messages


def _need(item: Item, where: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise bad_request(f"{where}.{name} is required in an item of the type {item.type}", f"{where}.{name}")


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _chat(body: ResponsesBody, messages: list[dict[str, Any]]) -> dict[str, Any]:
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat: dict[str, Any] = {"messages": [*system, *messages]}
    for name in ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "deterministic"):
        if (value := getattr(body, name)) is not None:
            chat[name] = value
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": {name: value for name, value in fields.items() if name != "type"}}
            for fields in (_given(tool) for tool in body.tools)
        ]
    if isinstance(body.tool_choice, NamedTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice is not None:
        chat["tool_choice"] = body.tool_choice
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    return chat


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema is None:
        raise bad_request("text.format.schema is required for json_schema", "text.format.schema")
    schema = {name: value for name, value in _given(wanted).items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "answer"} | schema}


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


def _head(response_id: str, model: str, body: ResponsesBody) -> dict[str, Any]:
    """The fields of a response that are known before it is answered."""
    choice = body.tool_choice if not isinstance(body.tool_choice, NamedTool) else _given(body.tool_choice)
    text_format = _given(body.text.format) if body.text is not None and body.text.format is not None else None
    reasoning = body.reasoning or Reasoning()
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": [_given(tool) for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
