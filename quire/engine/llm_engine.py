"""LLMEngine: requests in, RequestOutputs out, one step at a time. Text and tokens meet here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from quire.beams import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.api import PreparedRequest
from quire.engine.build import BuiltEngine, build_engine
from quire.engine.calls import pin_prefix
from quire.engine.metrics import request_metrics, step_metrics
from quire.engine.outputs import Job
from quire.engine.stats import Metric, RequestStats, StepStats
from quire.errors import BadRequestError, ConfigError, DownloadError, EngineDeadError, ModelError
from quire.inputs import Prompt
from quire.lora.request import LoRARequest
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from quire.pooling import PoolingParams
from quire.refusals import CALL, has_refused_methods, sift
from quire.request import AdapterRef, Request, cache_scope
from quire.text import HFTokenizerFacade


def check_level(level: int) -> None:
    if level != 1:
        raise BadRequestError(
            f"sleep takes level 1, which keeps the weights in host memory, got {level!r}: to give up those too, end "
            "the engine and make it again, as a server does at level 2",
            param="level",
        )


def check_tags(tags: list[str] | None) -> None:
    """vLLM wakes weights and cache one by one, to load other weights between."""
    if tags is not None and set(tags) != {"weights", "kv_cache"}:
        raise BadRequestError("wake_up wakes weights and KV cache together: leave out tags", param="tags")


@has_refused_methods
class LLMEngine:
    """The engine that both fronts drive. Not thread-safe: one thread calls it."""

    def __init__(self, built: BuiltEngine) -> None:
        self.built = built
        self.config = built.config
        self.spec = built.spec
        self.ledger = built.tokens.ledger
        self.tokenizer = built.text.tokenizer
        self.core = built.tokens.core
        self.request_stats = RequestStats()
        self._adapters: dict[int, tuple[tuple[str, str], AdapterRef]] = {}  # by number: name and path, as read
        self._adapters_lock = threading.Lock()
        self._inputs = built.inputs
        self._outputs = built.outputs
        for token_ids in self._inputs.encode_pinned(self.config.pinned_prefixes, self.config.block_size):
            self.pin_prefix(token_ids)

    @classmethod
    def from_config(cls, config: EngineConfig, *, show_progress: bool = False) -> LLMEngine:
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={config.data_parallel_size} needs a server in front of the replicas: use quire "
                "serve -dp, or leave it out"
            )
        return cls(build_engine(config, show_progress=show_progress))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig | dict[str, Any]) -> LLMEngine:
        """vLLM's spelling; takes an EngineConfig or a dict of its arguments."""
        config = engine_args if isinstance(engine_args, EngineConfig) else EngineConfig(**engine_args)
        return cls.from_config(config)

    @property
    def stats(self) -> StepStats:
        return self.core.stats

    @property
    def max_model_len(self) -> int:
        return self.ledger.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> Request:
        """Queue a request. Raises BadRequestError, and then nothing has changed.

        `arrival_time` is on time.monotonic's clock. `others` are arguments of vLLM's, refused with their reason.
        """
        sift(others, CALL)
        prepared = self.prepare(
            request_id, prompt, params, arrival_time=arrival_time, priority=priority, lora_request=lora_request
        )
        self.add_prepared(prepared)
        return prepared.request

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        """Tokenize and check without touching the engine: any thread may do it, so that no step waits for it."""
        if priority and self.config.scheduling_policy == "fcfs":
            raise BadRequestError(
                f"priority={priority!r} has no effect in the order of arrival: leave it out, or make the engine with "
                f'scheduling_policy="priority"',
                param="priority",
            )
        return self._inputs.make_request(
            request_id,
            prompt,
            params or (self.built.default_sampling if self.spec.pooler is None else PoolingParams()),
            arrival_s=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            adapter=None if lora_request is None else self.find_adapter(lora_request),
        )

    def find_adapter(self, wanted: LoRARequest) -> AdapterRef:
        """The adapter that is meant; it is read where it is new. Any thread may call it."""
        if self.core.adapters is None:
            raise BadRequestError("this engine has no adapters: make it with enable_lora=True", param="lora_request")
        if not isinstance(wanted, LoRARequest):
            raise BadRequestError(f"lora_request must be a LoRARequest, got {wanted!r}", param="lora_request")
        with self._adapters_lock:
            known = self._adapters.get(wanted.lora_int_id)
            if known is not None and not wanted.load_inplace:
                if known[0] == (wanted.lora_name, wanted.lora_path):
                    return known[1]
                name, path = known[0]
                raise BadRequestError(
                    f"lora_int_id={wanted.lora_int_id} is the adapter {name!r} in {path}: give {wanted.lora_name!r} "
                    "another number, or set load_inplace=True",
                    param="lora_int_id",
                )
            try:
                info = self.core.adapters.slots.read(wanted.lora_name, wanted.lora_path)
            except (ModelError, DownloadError) as error:
                raise BadRequestError(str(error), param="lora_path") from error
            found = AdapterRef(info.key, info.path)
            self._adapters[wanted.lora_int_id] = ((wanted.lora_name, wanted.lora_path), found)
            return found

    def add_prepared(self, prepared: PreparedRequest) -> None:
        self._outputs.add(Job(prepared))
        try:
            self.core.add(prepared.request)
        except BaseException:
            self._outputs.discard(prepared.request.request_id)
            raise

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """A conversation as a prompt: the template's text and its tokens."""
        return self.built.text.render_chat(messages, chat_template=chat_template, **kwargs)

    def get_tokenizer(self) -> HFTokenizerFacade:
        """The engine's tokenizer under the names that Hugging Face's have. Its own is `tokenizer`."""
        return self._hf_tokenizer

    @cached_property
    def _hf_tokenizer(self) -> HFTokenizerFacade:
        if self.tokenizer is None:
            raise BadRequestError("this engine was made with skip_tokenizer_init=True and has no tokenizer")
        return HFTokenizerFacade(self.tokenizer, self.built.text.chat_template)

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests wherever they are; gives their last outputs. Unknown ids are passed over."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        updates = [update for one in ids if one in self._outputs for update in self.core.abort(one)]
        return self._deliver(updates)

    def has_unfinished_requests(self) -> bool:
        return len(self._outputs) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._outputs)

    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests that it moved on."""
        updates = self.core.step()
        if self.core.device_waits:
            self.core.begin_step()
        return self._deliver(updates)

    def _deliver(self, updates: list[Any]) -> list[RequestOutput]:
        outputs, stopped = self._outputs.process(updates)
        for seq, stop in stopped:
            self.core.finish(seq, stop)
        for output in outputs:
            if output.finished:
                self.request_stats.on_finished(output)
        return outputs

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forget cached prefixes. False, and nothing changed, while requests hold blocks; spares pinned ones."""
        return self.core.kv.reset_prefix_cache(force=force)

    def sleep(self, level: int = 1, *, keep_kv: bool = False) -> None:
        """Give memory back until `wake_up`: the KV cache, whose prefixes are forgotten unless `keep_kv`, and on a GPU
        the weights, which are copied to host memory; there the engine is made with enable_sleep_mode=True."""
        check_level(level)
        self.core.fall_asleep(keep_kv=keep_kv)

    def wake_up(self, tags: list[str] | None = None) -> None:
        check_tags(tags)
        self.core.wake_up()

    def is_sleeping(self) -> bool:
        return self.core.is_asleep

    def pin_prefix(self, prefix: str | Iterable[int], *, cache_salt: str | None = None) -> int:
        """Compute a prefix and keep its full blocks from eviction; returns the number of tokens pinned."""
        if not self.config.enable_prefix_caching:
            raise BadRequestError("pinning needs enable_prefix_caching=True", param="prefix")
        token_ids = self._inputs.encode(prefix) if isinstance(prefix, str) else list(prefix)
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        request = self.prepare("pinned-prefix", prompt, SamplingParams(max_tokens=1)).request  # to have it checked
        return pin_prefix(self.core, token_ids=token_ids, salt=request.salt)

    def unpin_prefix(self, prefix: str | Iterable[int], *, cache_salt: str | None = None) -> int:
        """Let a pinned prefix be evicted again; returns the number of tokens unpinned."""
        token_ids = self._inputs.encode(prefix) if isinstance(prefix, str) else list(prefix)
        return self.core.kv.unpin(token_ids, salt=cache_scope(cache_salt))

    def get_metrics(self) -> list[Metric]:
        return step_metrics(self.core) + request_metrics(self.request_stats)

    def check_health(self) -> None:
        self.core.check()
        if self.core.is_dead:
            raise EngineDeadError("the engine failed in a step and stopped")

    def close(self) -> None:
        self.core.close()
