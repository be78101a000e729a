"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from quire.engine.api import PreparedRequest, ServingEngine
from quire.errors import BadRequestError, TemplateLimitError, TokenizerError
from quire.log import get_logger
from quire.outputs import CompletionOutput, RequestOutput
from quire.server.endpoint import Exchange
from quire.server.errors import bad_request
from quire.server.generation import Generation, engine_ids
from quire.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.server.models import fingerprint
from quire.server.protocol import ChatBody, TokenizeBody
from quire.server.replies import AnswerMessage, CachedTokens, ChatChoice, ChatCompletion, ChatLogprobs, Usage
from quire.server.sampling import chat_params, check_logprobs, check_room, has_grammar, param_of, priority_of
from quire.server.sse import StreamWriter, stream_reply
from quire.server.text_work import request_deadline
from quire.text.chat_template import NOT_SWITCHES

# Names that chat_template_kwargs must not bring: they have fields of their own, or are the renderer's.
_NOT_SWITCHES = NOT_SWITCHES | {"tools", "add_generation_prompt", "continue_final_message"}


async def create_chat(exchange: Exchange, body: ChatBody) -> None:
    served, model = exchange.context.find(body.model)
    engine = served.engine
    params = chat_params(body, engine.default_sampling)
    priority = priority_of(body, engine.info)
    deadline = request_deadline(exchange, body.timeout)
    (request_id,) = engine_ids(exchange, "chatcmpl", 1)

    def prepare() -> PreparedRequest:
        try:
            prompt = render(engine, body)
            if body.cache_salt is not None:
                prompt["cache_salt"] = body.cache_salt
            return engine.prepare(request_id, prompt, params, priority=priority, tenant=exchange.tenant)
        except BadRequestError as error:
            error.param = "messages" if error.param == "prompt" else param_of(body, error.param)
            raise

    prepared = await exchange.context.text_work.run(
        exchange,
        deadline,
        prepare,
        exchange.num_body_bytes,
        is_chat=True,
        compiles=has_grammar(params),
    )
    check_room(body, [prepared], engine.info.max_model_len)
    check_logprobs([prepared], engine.info.max_model_len)
    head: dict[str, Any] = {
        "id": f"chatcmpl-{exchange.request_id}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint(engine.info),
    }
    shown = _Shown(engine, body)
    async with Generation(exchange, body, [prepared], served, model, deadline) as generation:
        if body.stream:
            await stream_reply(exchange, generation, _Writer(head, shown))
            return
        ((_, output),) = await generation.take()
        answer = await generation.write(lambda: msgspec.json.encode(_whole(head, shown, output)), [output])
        await exchange.reply(answer, generation.headers)


def render(engine: ServingEngine, body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """The conversation as a prompt: its text and token ids."""
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
    messages: list[dict[str, Any]] = [msgspec.to_builtins(message) for message in body.messages or ()]
    try:
        return engine.render_chat(
            messages,
            add_generation_prompt=begins,
            continue_final_message=continues,
            add_special_tokens=bool(body.add_special_tokens),
            **switches,
        )
    except TokenizerError as error:  # names files, so its text stays here
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
    """What a request wants to see of an output, for answers and chunks alike."""

    def __init__(self, engine: ServingEngine, body: ChatBody) -> None:
        self.body = body
        self._num_top = body.top_logprobs or 0
        self._names = TokenNames(engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(completion.token_ids, completion.logprobs or (), num_top=self._num_top, names=self._names)


def _whole(head: dict[str, Any], shown: _Shown, output: RequestOutput) -> ChatCompletion:
    num_prompt, num_output = len(output.prompt_token_ids), 0
    choices = []
    for completion in output.outputs:
        num_output += len(completion.token_ids)
        choice = ChatChoice(
            index=completion.index,
            message=AnswerMessage(content=completion.text),
            logprobs=shown.logprobs(completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if shown.body.return_token_ids:
            choice.token_ids = completion.token_ids
        choices.append(choice)
    usage = Usage(num_prompt, num_output, num_prompt + num_output, CachedTokens(output.num_cached_tokens))
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
        is_plain = not body.logprobs and not body.return_token_ids
        super().__init__(head, num_prompts=1, n=body.n or 1, options=body.stream_options, is_plain=is_plain)
        self._shown = shown

    def start(self, index: int, *, is_first: bool) -> bytes:
        role = b'"role":"assistant",' if is_first else b""
        return b'{"index":%d,"delta":{%s"content":' % (index, role)

    def choice(
        self, index: int, prompt: int, completion: CompletionOutput, output: RequestOutput, *, is_first: bool
    ) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if completion.text or is_first or completion.token_ids:
            delta["content"] = completion.text
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._shown.logprobs(completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._shown.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def extra(self, output: RequestOutput) -> dict[str, Any]:
        return {"prompt_token_ids": output.prompt_token_ids} if self._shown.body.return_token_ids else {}
