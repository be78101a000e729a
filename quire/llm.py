"""LLM: offline batches, under the names that vLLM's users write."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from quire.agents import checked_tools
from quire.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from quire.config import EngineConfig
from quire.engine.api import PreparedRequest
from quire.engine.batch import run_batch, runs_beside_host
from quire.engine.chat import NO_TOOLS
from quire.engine.llm_engine import LLMEngine
from quire.engine.pooled import PoolingMethods
from quire.engine.stats import Metric
from quire.errors import BadRequestError, QuireError
from quire.inputs import Prompt, as_batch, per_prompt
from quire.log import get_logger
from quire.lora.request import LoRARequest
from quire.outputs import RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.pooling import PoolingParams
from quire.refusals import CALL, has_refused_methods, sift
from quire.request import Request
from quire.text import HFTokenizerFacade
from quire.text.chat_template import NOT_SWITCHES, read_chat_template

Message = Mapping[str, Any]


@has_refused_methods
class LLM(PoolingMethods):
    """A model, its KV cache and a scheduler in this process.

        llm = LLM("smollm2")
        for output in llm.generate(["Hello,"], SamplingParams(temperature=0, max_tokens=32)):
            print(output.outputs[0].text)

    Takes every field of `quire.config.EngineConfig` by name. Threads may share it: their calls run one after another.
    """

    def __init__(self, model: str = "smollm2", **kwargs: Any) -> None:
        started = time.perf_counter()
        config = EngineConfig(model=model, **kwargs)
        self.llm_engine = LLMEngine.from_config(config, show_progress=True)
        self._ids = itertools.count()
        self._one_at_a_time = threading.Lock()
        log_start(self.llm_engine, time.perf_counter() - started)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        return cls(**dataclasses.asdict(engine_args))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the prompts' order. `lora_request`: with this adapter, or one for each.

        A prompt that is refused ends the call, and nothing of it goes on. A GPU may have begun with the ones before it;
        otherwise nothing starts until all are taken. `others` are arguments of vLLM's, refused with their reason.
        """
        sift(others, CALL)
        batch = as_batch(prompts)
        return self._generate(batch.__getitem__, len(batch), sampling_params, priority, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        allow_special_tokens_in_content: bool | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue one conversation (a list of messages) or several (a list of such lists).

        Special tokens such as <|im_end|> are those that the template writes. In a message they are plain text, unless
        `allow_special_tokens_in_content` (None: as the engine was made). `tools` are shown to the model; its calls are
        in the text, as the model writes them, and `quire.agents.AnswerParser` reads them.
        """
        sift(others, CALL)
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise BadRequestError(
                f"chat_template_content_format must be auto, string or openai, got {chat_template_content_format!r}",
                param="chat_template_content_format",
            )
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise BadRequestError("messages must be a list of messages, or of such lists, not empty", param="messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "content_format": chat_template_content_format,
            "allow_special_tokens": allow_special_tokens_in_content,
        }
        switches = chat_template_kwargs or {}
        if not isinstance(switches, Mapping) or not all(isinstance(name, str) for name in switches):
            raise BadRequestError("chat_template_kwargs must map names to values", param="chat_template_kwargs")
        if taken := sorted(NOT_SWITCHES.intersection(switches)):
            raise BadRequestError(
                f"chat_template_kwargs must not contain {', '.join(taken)}", param="chat_template_kwargs"
            )
        if switches.get("tools"):
            raise BadRequestError("chat_template_kwargs must not contain tools: they have an argument", param="tools")
        if tools:
            if not self.llm_engine.built.text.dialect.shows_tools and chat_template is None:
                raise BadRequestError(NO_TOOLS, param="tools")
            options["tools"] = checked_tools(tools)
        template = None if chat_template is None else read_chat_template(chat_template)
        options |= switches

        def prompt_of(i: int) -> Prompt:
            return self.llm_engine.render_chat(conversations[i], chat_template=template, **options)  # type: ignore[arg-type]

        return self._generate(prompt_of, len(conversations), sampling_params, None, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of every prompt, as many as `params.beam_width`, the best first.

        `concurrency_limit` is vLLM's: the engine itself runs as many prompts at once as fit.
        """
        sift({"concurrency_limit": concurrency_limit, **others}, CALL)
        if not isinstance(params, BeamSearchParams):
            raise BadRequestError(f"params must be BeamSearchParams, got {type(params).__name__}", param="params")
        batch = as_batch(prompts)
        outputs = self._generate(batch.__getitem__, len(batch), params, None, use_tqdm, lora_request)
        return [self._beams_of(output, params) for output in outputs]

    def _beams_of(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        tokenizer, found = self.llm_engine.tokenizer, []
        for one in output.outputs:
            if one.error is not None:
                raise QuireError(f"beam search failed: {one.error}")
            cum_logprob = one.cumulative_logprob or 0.0
            score = cum_logprob / max(1, len(one.token_ids)) ** params.length_penalty
            has_end = one.finish_reason == "stop" and not params.include_stop_str_in_output
            tokens = output.prompt_token_ids + one.token_ids[: len(one.token_ids) - has_end]
            text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)
            found.append(
                BeamSearchSequence(
                    tokens, one.logprobs or [], text, cum_logprob, score, one.finish_reason, one.stop_reason
                )
            )
        return BeamSearchOutput(found)

    def _generate(
        self,
        prompt_of: Callable[[int], Prompt],
        count: int,
        sampling_params: SamplingParams | Sequence[SamplingParams] | Sequence[PoolingParams] | BeamSearchParams | None,
        priority: int | Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        is_search = isinstance(sampling_params, BeamSearchParams)
        pools = isinstance(sampling_params, list) and any(isinstance(own, PoolingParams) for own in sampling_params)
        kind = BeamSearchParams if is_search else PoolingParams if pools else SamplingParams
        params = per_prompt(sampling_params, count, "sampling_params", kind)
        priorities = per_prompt(priority, count, "priority", int)
        adapters = per_prompt(lora_request, count, "lora_request", LoRARequest, optional=True)
        ids = [str(next(self._ids)) for _ in range(count)]
        now = time.monotonic()

        def prepare(i: int) -> PreparedRequest:
            own = params[i] or self.get_default_sampling_params()
            if isinstance(own, SamplingParams):
                own = own.clone(output_kind=OutputKind.FINAL_ONLY)  # nobody sees a batch before it is done
            with _naming_prompt(i, count):
                return self.llm_engine.prepare(
                    ids[i],
                    prompt_of(i),
                    own,
                    arrival_time=now,
                    priority=priorities[i] or 0,
                    lora_request=adapters[i],
                )

        # With priorities the last may have to go first: nothing can begin before it is known.
        in_slices = priority is None and runs_beside_host(self.llm_engine.core)
        prepared = prepare if in_slices else [prepare(i) for i in range(count)].__getitem__
        with self._one_at_a_time:  # each call takes all outputs that a step brings
            outputs = self._run(ids, prepared, in_slices, use_tqdm)
        for output, adapter in zip(outputs, adapters, strict=True):
            output.lora_request = adapter
        return outputs

    def _run(
        self,
        ids: list[str],
        prepared: Callable[[int], PreparedRequest],
        in_slices: bool,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        engine = self.llm_engine

        def add(i: int) -> Request:
            own = prepared(i)
            with _naming_prompt(i, len(ids)):
                engine.add_prepared(own)
            return own.request

        done: dict[str, RequestOutput] = {}
        bar = _Bar(engine, len(ids), use_tqdm) if use_tqdm else None
        try:
            with closing(run_batch(engine, add, len(ids), in_slices=in_slices)) as steps:
                for outputs in steps:
                    if bar is not None:
                        bar.tick()
                    for output in outputs:
                        done[output.request_id] = output
                        if bar is not None:
                            bar.add(output)
        finally:
            if bar is not None:
                bar.close()
            engine.abort_request(ids)  # after an error or Ctrl-C: give the blocks back
        return [done[i] for i in ids]

    def get_tokenizer(self) -> HFTokenizerFacade:
        """The engine's tokenizer under the names that Hugging Face's have."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (its generation config) over SamplingParams's."""
        return self.llm_engine.built.default_sampling.clone()

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        return self.llm_engine.reset_prefix_cache(force=force)

    def sleep(self, level: int = 1, *, keep_kv: bool = False) -> None:
        """Give memory back until `wake_up`: the KV cache, whose prefixes are forgotten unless `keep_kv`, and on a GPU
        the weights, which are copied to host memory; there the LLM is made with enable_sleep_mode=True."""
        with self._one_at_a_time:
            self.llm_engine.sleep(level, keep_kv=keep_kv)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Everything is where it was: captured steps and compiled kernels are kept."""
        with self._one_at_a_time:
            self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.llm_engine.is_sleeping()

    def get_metrics(self) -> list[Metric]:
        return self.llm_engine.get_metrics()


class _Bar:
    """tqdm over requests, with tokens per second beside it: of all requests as they go, not of the finished alone."""

    _REFRESH_S = 0.5

    def __init__(self, engine: LLMEngine, total: int, make: bool | Callable[..., Any]) -> None:
        self._engine = engine
        self._total = total
        self._make = make  # as the caller has it: tqdm's, or another one's like it
        self._bar: Any = None  # drawn when the first step has begun: a batch that is refused leaves no bar behind
        self._before_in, self._before_out = self._counts()
        self._started = self._refreshed = time.perf_counter()
        self._tokens_in = self._tokens_out = 0  # of finished requests

    def tick(self) -> None:
        """Draw the bar; called between two steps."""
        now = time.perf_counter()
        if self._bar is None:
            from tqdm import tqdm

            make = self._make if callable(self._make) else tqdm
            self._bar = make(total=self._total, desc="prompts", unit="req", dynamic_ncols=True)
        elif now - self._refreshed >= self._REFRESH_S:
            self._refreshed = now
            num_in, num_out = self._counts()
            # Never less than what is finished: a preempted sequence's tokens leave the count until they are computed
            # again.
            self._show_rates(
                max(num_in - self._before_in, self._tokens_in), max(num_out - self._before_out, self._tokens_out)
            )
            self._bar.refresh()

    def add(self, output: RequestOutput) -> None:
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(c.token_ids) for c in output.outputs)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is None:
            return
        if self._bar.n == self._total:  # else Ctrl-C or an error: the last rates stand
            self._show_rates(self._tokens_in, self._tokens_out)
        self._bar.close()

    def _counts(self) -> tuple[int, int]:
        """Prompt tokens that steps were given or the cache had, and tokens generated, since the engine's start."""
        core = self._engine.core
        planned = core.scheduler.stats
        num_in = planned.num_prefill_tokens - planned.num_recomputed_tokens + core.kv.counters.prefix.num_hit_tokens
        return num_in, self._engine.stats.generation_tokens

    def _show_rates(self, tokens_in: int, tokens_out: int) -> None:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"in {tokens_in / seconds:.1f} tok/s, out {tokens_out / seconds:.1f} tok/s", refresh=False
        )


def log_start(engine: LLMEngine, seconds: float) -> None:
    """What runs where, the memory ledger, where the start-up went, and the blocks."""
    backend, spec = engine.built.executor.backend, engine.spec
    log = get_logger()
    log.info(
        "%s (%s) in %s on %s, %s, KV in %s, max_model_len %d, ready in %.1f s",
        engine.config.model,
        spec.architecture,
        backend.shown_weights,
        backend.device.type,
        backend.kernels,
        str(backend.kv_dtype).removeprefix("torch."),
        engine.max_model_len,
        seconds,
    )
    log.info("memory: %s", engine.ledger.summary())
    log.info("start-up: %s", ", ".join(f"{part} {took:.2f} s" for part, took in engine.built.timeline_s.items()))
    log.info("%s", engine.ledger.blocks_line())
    if backend.note:
        log.warning("%s", backend.note)


@contextmanager
def _naming_prompt(i: int, count: int) -> Iterator[None]:
    """A refusal says which of several prompts it means."""
    try:
        yield
    except BadRequestError as error:
        if count == 1:
            raise
        raise BadRequestError(f"prompt {i}: {error}", param=error.param) from None
