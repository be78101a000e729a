"""POST /v1/completions: text or token ids in, their continuation out."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.engine.api import PreparedRequest, ServingEngine
from quire.errors import BadRequestError
from quire.inputs import Prompt
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import SamplingParams
from quire.server.endpoint import ClientGone, Exchange
from quire.server.errors import bad_request
from quire.server.generation import Generation, answer_head, engine_ids
from quire.server.logprobs import TextOffsets, TokenNames, completion_logprobs, prompt_logprobs
from quire.server.protocol import MAX_ANSWERS, CompletionBody
from quire.server.replies import CachedTokens, Completion, CompletionChoice, CompletionLogprobs, Usage
from quire.server.sampling import by_own_name, check_logprobs, check_room, completion_params, has_grammar, priority_of
from quire.server.sse import StreamWriter, stream_reply
from quire.server.text_work import request_deadline


async def create_completion(exchange: Exchange, body: CompletionBody) -> None:
    """Continue a text. With `stream`, as server-sent events that end with `data: [DONE]`."""
    asked = exchange.context.find(body.model)
    served, model, adapter = asked.served, asked.name, asked.adapter_ref
    engine = served.engine
    prompts = read_prompts(body.prompt, max(body.n or 1, (body.best_of or 1) if body.use_beam_search else 1))
    params = completion_params(body, engine.default_sampling)
    priority = priority_of(body, engine.info)
    deadline = request_deadline(exchange, body.timeout)
    ids = engine_ids(exchange, "cmpl", len(prompts))

    def prepare() -> tuple[list[PreparedRequest], _Shown]:
        prepared = []
        for request_id, prompt in zip(ids, prompts, strict=True):
            if exchange.is_abandoned:
                raise ClientGone
            made = _engine_prompt(engine, body, prompt)
            try:
                prepared.append(
                    engine.prepare(request_id, made, params, priority=priority, tenant=exchange.tenant, adapter=adapter)
                )
            except BadRequestError as error:
                raise by_own_name(body, error) from None
        check_room(body, prepared, engine.info.max_model_len)
        check_logprobs(prepared, engine.info.max_model_len)
        return prepared, _Shown(engine, body, prepared[0].params, prepared)

    # A request of its own costs as much as a hundred characters.
    num_chars = sum(map(len, prompts)) + 100 * (len(prompts) - 1) + sum(map(len, body.bad_words or ()))
    prepared, shown = await exchange.context.text_work.run(
        exchange, deadline, prepare, num_chars, compiles=has_grammar(params)
    )
    head = answer_head(exchange, "cmpl", model, engine.info)
    async with Generation(exchange, body, prepared, served, model, deadline) as generation:
        if body.stream:
            await stream_reply(exchange, generation, _Writer(head, body, shown, num_prompts=len(prepared)))
            return
        outputs = await generation.take_all()
        answer = await generation.write(lambda: msgspec.json.encode(_whole(head, body, shown, outputs)), outputs)
        await exchange.reply(answer, generation.headers)


def read_prompts(given: str | list[Any], n: int = 1, name: str = "prompt") -> list[Any]:
    """A list of one or several prompts; the types tell which was sent."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if len(given) * n > MAX_ANSWERS:
        each = f" with {n} answers each" if n > 1 else ""
        raise bad_request(
            f"{name} holds {len(given):,} prompts{each}, and one request gets at most {MAX_ANSWERS:,} answers: "
            f"send at most {MAX_ANSWERS // n:,} prompts",
            name,
        )
    if int in kinds:
        raise bad_request(f"{name} mixes token ids with whole prompts: send one kind", name)
    return given


def _engine_prompt(engine: ServingEngine, body: CompletionBody, prompt: str | list[int]) -> Prompt:
    made: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    if isinstance(prompt, str) and body.add_special_tokens is False:
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise bad_request("this server has no tokenizer: send token ids", "prompt")
        at_most = engine.info.max_model_len
        made["prompt_token_ids"] = tokenizer.encode(prompt, add_special_tokens=False, at_most=at_most)
    if body.cache_salt is not None:
        made["cache_salt"] = body.cache_salt
    return made


class _Shown:
    """Makes the parts of an answer that a request wants to see, for whole answers and chunks alike."""

    def __init__(
        self, engine: ServingEngine, body: CompletionBody, params: SamplingParams, prepared: list[PreparedRequest]
    ) -> None:
        self.body = body
        self.is_echo_only = body.max_tokens == 0
        self._tokenizer = engine.tokenizer
        if body.logprobs is not None:
            self._names = TokenNames(self._tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._skip_special = params.skip_special_tokens
        self.echoes = [self._echo_of(one) if body.echo else "" for one in prepared]

    def _echo_of(self, prepared: PreparedRequest) -> str:
        if prepared.prompt is not None:
            return prepared.prompt
        if self._tokenizer is None:
            raise bad_request("echo needs a tokenizer, and this server has none", "echo")
        return self._tokenizer.decode(prepared.request.prompt_token_ids, skip_special_tokens=False)

    def offsets(self) -> TextOffsets | None:
        """Finds where each token of a choice begins in its text; None if no logprobs are wanted."""
        if self.body.logprobs is None:
            return None
        stripped = self._tokenizer.num_spaces_stripped if self._tokenizer is not None and self.body.echo else 0
        return TextOffsets(self._tokenizer, skip_special_tokens=self._skip_special, num_spaces_stripped=stripped)

    def choice(
        self,
        index: int,
        prompt: int,
        completion: CompletionOutput,
        output: RequestOutput,
        offsets: TextOffsets | None,
        *,
        is_first: bool,
    ) -> CompletionChoice:
        """A whole answer, or the next piece of one; the first brings what is told of the prompt."""
        text = "" if self.is_echo_only else completion.text
        choice = CompletionChoice(
            index=index,
            text=self.echoes[prompt] + text if is_first else text,
            logprobs=self._logprobs(completion, output, offsets, with_prompt=is_first),
            finish_reason="length" if self.is_echo_only else completion.finish_reason,
            stop_reason=None if self.is_echo_only else completion.stop_reason,
        )
        if self.body.return_token_ids:
            choice.token_ids = [] if self.is_echo_only else completion.token_ids
            if is_first:
                choice.prompt_token_ids = output.prompt_token_ids
        return choice

    def _logprobs(
        self, completion: CompletionOutput, output: RequestOutput, offsets: TextOffsets | None, *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        assert offsets is not None
        token_ids: list[int] = []
        entries: list[Any] = []
        if with_prompt and self.body.echo:
            assert output.prompt_logprobs is not None
            token_ids += output.prompt_token_ids
            entries += output.prompt_logprobs
        if not self.is_echo_only:
            token_ids += completion.token_ids
            entries += completion.logprobs or ()
        return completion_logprobs(token_ids, entries, num_top=self.body.logprobs, names=self._names, offsets=offsets)


def _whole(head: dict[str, Any], body: CompletionBody, shown: _Shown, outputs: list[RequestOutput]) -> Completion:
    choices: list[CompletionChoice] = []
    usage = Usage(0, 0, 0, CachedTokens(0))
    for prompt, output in enumerate(outputs):
        usage.prompt_tokens += len(output.prompt_token_ids)
        usage.prompt_tokens_details.cached_tokens += output.num_cached_tokens
        for completion in output.outputs[: body.n or 1]:  # the best n of best_of beams
            usage.completion_tokens += 0 if shown.is_echo_only else len(completion.token_ids)
            choice = shown.choice(len(choices), prompt, completion, output, shown.offsets(), is_first=True)
            if body.prompt_logprobs is not None:
                assert output.prompt_logprobs is not None
                choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
            choices.append(choice)
    usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
    return Completion(**head, choices=choices, usage=usage)


class _Writer(StreamWriter):
    OBJECT = "text_completion"
    TAIL = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def __init__(self, head: dict[str, Any], body: CompletionBody, shown: _Shown, *, num_prompts: int) -> None:
        n = body.n or 1
        is_plain = body.logprobs is None and not body.echo and not body.return_token_ids
        super().__init__(head, num_prompts=num_prompts, n=n, options=body.stream_options, is_plain=is_plain)
        self._shown = shown
        self._offsets = [shown.offsets() for _ in range(num_prompts * n)]

    def start(self, index: int, *, is_first: bool) -> bytes:
        return b'{"index":%d,"text":' % index

    def num_counted(self, completion: CompletionOutput) -> int:
        return 0 if self._shown.is_echo_only else len(completion.token_ids)

    def choice(
        self, index: int, prompt: int, completion: CompletionOutput, output: RequestOutput, *, is_first: bool
    ) -> CompletionChoice:
        return self._shown.choice(index, prompt, completion, output, self._offsets[index], is_first=is_first)
