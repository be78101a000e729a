"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from quire.agents import AnswerParser, CallDelta, ToolChoice, checked_tools
from quire.beams import BeamSearchParams
from quire.engine.api import ServingEngine
from quire.engine.chat import NO_TOOLS, ChatTurn, PreparedChat, prepare_chat
from quire.errors import BadRequestError, TemplateLimitError, TokenizerError
from quire.log import get_logger
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import SamplingParams
from quire.request import FinishReason
from quire.server.endpoint import Exchange
from quire.server.errors import bad_request
from quire.server.generation import Generation, answer_head, engine_ids
from quire.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.server.protocol import ChatBody, TokenizeBody
from quire.server.replies import (
    AnswerMessage,
    AnswerToolCall,
    CachedTokens,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    CompletionDetails,
    Usage,
)
from quire.server.sampling import by_own_name, chat_params, check_logprobs, check_room, priority_of
from quire.server.sse import StreamWriter, stream_reply
from quire.server.text_work import request_deadline
from quire.text.chat_template import NOT_SWITCHES

_LOGPROB_CHARS = 20  # what writing one costs, in parsed characters
# Names that chat_template_kwargs must not bring: they have fields of their own, or are the renderer's.
_NOT_SWITCHES = NOT_SWITCHES | {"tools", "add_generation_prompt", "continue_final_message"}


async def create_chat(exchange: Exchange, body: ChatBody) -> None:
    """Answer a conversation. With `stream`, as server-sent events that end with `data: [DONE]`."""
    asked = exchange.context.find(body.model)
    served, model = asked.served, asked.name
    engine = served.engine
    params = chat_params(body, engine.default_sampling)
    priority = priority_of(body, engine.info)
    deadline = request_deadline(exchange, body.timeout)
    (request_id,) = engine_ids(exchange, "chatcmpl", 1)

    turn = chat_turn(body, params)

    def prepare() -> PreparedChat:
        try:
            with naming_templates():
                return prepare_chat(
                    engine, request_id, turn, priority=priority, tenant=exchange.tenant, adapter=asked.adapter_ref
                )
        except BadRequestError as error:
            if error.param == "prompt":
                error.param = "messages"
            raise by_own_name(body, error) from None

    chat = await exchange.context.text_work.run(
        exchange, deadline, prepare, exchange.num_body_bytes, is_chat=True, compiles=turn.compiles
    )
    check_room(body, [chat.prepared], engine.info.max_model_len)
    check_logprobs([chat.prepared], engine.info.max_model_len)
    head = answer_head(exchange, "chatcmpl", model, engine.info)
    shown = _Shown(engine, body, chat)
    async with Generation(exchange, body, [chat.prepared], served, model, deadline) as generation:
        if body.stream:
            await stream_reply(exchange, generation, _Writer(head, shown))
            return
        (output,) = await generation.take_all()

        def make() -> bytes:
            return msgspec.json.encode(_whole(head, shown, output))

        if chat.is_plain:
            answer = await generation.write(make, [output])
        else:  # parsing takes a microsecond a character
            num_chars = sum(len(one.text) + _LOGPROB_CHARS * len(one.logprobs or ()) for one in output.outputs)
            answer = await exchange.context.text_work.run(exchange, deadline, make, num_chars)
        await exchange.reply(answer, generation.headers)


def chat_turn(body: ChatBody, params: SamplingParams | BeamSearchParams) -> ChatTurn:
    """The chat that a body asks for, checked as far as that needs no model."""
    tools = checked_tools(body.tools or [])
    return ChatTurn(
        messages=[msgspec.to_builtins(message) for message in body.messages],
        params=params,
        tools=tools,
        choice=ToolChoice.of(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        options=template_options(body),
        cache_salt=body.cache_salt,
    )


def template_options(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Options of the chat template, beside the messages."""
    switches = body.chat_template_kwargs or {}
    if taken := sorted(_NOT_SWITCHES.intersection(switches)):
        raise bad_request(f"chat_template_kwargs must not hold {', '.join(taken)}", "chat_template_kwargs")
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request(
            "continue_final_message continues the last message, add_generation_prompt begins a new one: set one",
            "continue_final_message",
        )
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {
        "add_generation_prompt": begins,
        "continue_final_message": continues,
        "add_special_tokens": bool(body.add_special_tokens),
        **switches,
    }


def render(engine: ServingEngine, body: TokenizeBody) -> dict[str, Any]:
    """The conversation as a prompt: its text and token ids."""
    messages: list[dict[str, Any]] = [msgspec.to_builtins(message) for message in body.messages or ()]
    options = template_options(body)
    if tools := checked_tools(body.tools or []):
        if not engine.dialect.shows_tools:
            raise bad_request(NO_TOOLS, "tools")
        options["tools"] = tools
    with naming_templates():
        return engine.render_chat(messages, **options)


@contextmanager
def naming_templates() -> Iterator[None]:
    """Turn a template's errors into ones that a client may see: they name no files."""
    try:
        yield
    except TokenizerError as error:
        get_logger().error("a chat could not be rendered: %s", error)
        # Not a 5xx, though the template is the operator's: clients would send those again, and cost as much again.
        if isinstance(error, TemplateLimitError):
            raise bad_request(
                f"the model's chat template {error.limit} on these messages and was stopped: send fewer or shorter "
                "ones, or ask the operator to set --chat-template",
                "messages",
            ) from None
        raise bad_request(
            "this model has no chat template that works: use /v1/completions, or ask the operator to set "
            "--chat-template",
            "messages",
        ) from None


class _Shown:
    """Makes the parts of an answer that a request wants to see, for whole answers and chunks alike."""

    def __init__(self, engine: ServingEngine, body: ChatBody, chat: PreparedChat) -> None:
        self.body = body
        self.chat = chat
        self.tokenizer = engine.tokenizer
        self.shows_reasoning = body.include_reasoning is not False
        self._num_top = body.top_logprobs or 0
        if body.logprobs:
            self._names = TokenNames(engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(completion.token_ids, completion.logprobs or (), num_top=self._num_top, names=self._names)

    def message(self, completion: CompletionOutput) -> tuple[AnswerMessage, int]:
        """A whole answer, and how many of its tokens were thinking."""
        parser = self.chat.parser()
        found = parser.push(completion.text)
        rest = parser.finish()
        reasoning, calls = found.reasoning + rest.reasoning, merged_calls([*found.calls, *rest.calls])
        content = self.chat.shown(found.content + rest.content)
        message = AnswerMessage(content=content or (None if calls else ""))
        if calls:
            message.tool_calls = [
                AnswerToolCall(id=self.chat.new_call_id(), function=CalledFunction(*call)) for call in calls
            ]
        num_thought = self.chat.num_reasoning_tokens(self.tokenizer, completion.token_ids, reasoning)
        if reasoning and self.shows_reasoning:
            message.reasoning = message.reasoning_content = reasoning
        return message, num_thought


def _whole(head: dict[str, Any], shown: _Shown, output: RequestOutput) -> ChatCompletion:
    num_prompt, num_output, num_reasoning = len(output.prompt_token_ids), 0, 0
    choices = []
    for completion in output.outputs:
        num_output += len(completion.token_ids)
        message, finish_reason = AnswerMessage(content=completion.text), completion.finish_reason
        if not shown.chat.is_plain:
            message, num_thought = shown.message(completion)
            num_reasoning += num_thought
            if message.tool_calls and finish_reason == FinishReason.STOP:
                finish_reason = "tool_calls"
        choice = ChatChoice(
            index=completion.index,
            message=message,
            logprobs=shown.logprobs(completion),
            finish_reason=finish_reason,
            stop_reason=completion.stop_reason,
        )
        if shown.body.return_token_ids:
            choice.token_ids = completion.token_ids
        choices.append(choice)
    usage = Usage(num_prompt, num_output, num_prompt + num_output, CachedTokens(output.num_cached_tokens))
    if shown.chat.dialect.thinking is not None:
        usage.completion_tokens_details = CompletionDetails(num_reasoning)
    usage.count_drafts(output.metrics)
    answer = ChatCompletion(**head, choices=choices, usage=usage)
    if shown.body.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
    if shown.body.return_token_ids:
        answer.prompt_token_ids = output.prompt_token_ids
    return answer


class _Writer(StreamWriter):
    """The role comes with the first text: a chunk before it would look like a first token that is none."""

    OBJECT = "chat.completion.chunk"
    TAIL = b'},"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def __init__(self, head: dict[str, Any], shown: _Shown) -> None:
        body = shown.body
        is_plain = not body.logprobs and not body.return_token_ids and shown.chat.is_plain
        super().__init__(head, num_prompts=1, n=body.n or 1, options=body.stream_options, is_plain=is_plain)
        self._shown = shown
        self._parsers: dict[int, AnswerParser] = {}
        self._undecided: dict[int, int] = {}  # tokens that may turn out to begin a thought
        if shown.chat.dialect.thinking is not None:
            self.usage.completion_tokens_details = CompletionDetails(0)
        self._num_thought = 0

    def start(self, index: int, *, is_first: bool) -> bytes:
        role = b'"role":"assistant",' if is_first else b""
        return b'{"index":%d,"delta":{%s"content":' % (index, role)

    def choice(
        self, index: int, prompt: int, completion: CompletionOutput, output: RequestOutput, *, is_first: bool
    ) -> dict[str, Any] | None:
        self.usage.count_drafts(output.metrics)
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        finish_reason = completion.finish_reason
        if self._shown.chat.is_plain:
            if completion.text or is_first or completion.token_ids:
                delta["content"] = completion.text
        else:
            parser = self._parsers.setdefault(index, self._shown.chat.parser())
            parsed = self._parse(parser, completion)
            tells_tokens = self._shown.body.logprobs or self._shown.body.return_token_ids
            if not parsed and finish_reason is None and not tells_tokens:
                return None  # it may become a marker
            delta |= parsed
            if parser.num_calls and finish_reason == FinishReason.STOP:
                finish_reason = "tool_calls"
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._shown.logprobs(completion),
            "finish_reason": finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._shown.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _parse(self, parser: AnswerParser, completion: CompletionOutput) -> dict[str, Any]:
        """Parse new text into fields of a delta."""
        shown = self._shown
        was_thinking = parser.is_thinking
        found = parser.push(completion.text)
        num_tokens = self._undecided.pop(id(parser), 0) + len(completion.token_ids)
        if parser.may_think:
            self._undecided[id(parser)] = num_tokens
        elif was_thinking or parser.is_thinking or found.reasoning:
            self._num_thought += num_tokens
            if isinstance(self.usage.completion_tokens_details, CompletionDetails):
                self.usage.completion_tokens_details.reasoning_tokens = self._num_thought
        parts = [found, parser.finish()] if completion.finish_reason is not None else [found]
        delta: dict[str, Any] = {}
        if content := shown.chat.shown("".join(part.content for part in parts)):
            delta["content"] = content
        reasoning = "".join(part.reasoning for part in parts)
        if reasoning and shown.shows_reasoning:
            delta["reasoning"] = delta["reasoning_content"] = reasoning
        if calls := [call for part in parts for call in part.calls]:
            delta["tool_calls"] = [self._call(call) for call in calls]
        return delta

    def _call(self, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": self._shown.chat.new_call_id(), "type": "function", "function": function}

    def extra(self, output: RequestOutput) -> dict[str, Any]:
        return {"prompt_token_ids": output.prompt_token_ids} if self._shown.body.return_token_ids else {}


def merged_calls(deltas: list[CallDelta]) -> list[tuple[str, str]]:
    """(name, arguments) of each call."""
    found: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.name is not None:
            found.append((delta.name, delta.arguments))
        else:
            found[-1] = (found[-1][0], found[-1][1] + delta.arguments)
    return found
