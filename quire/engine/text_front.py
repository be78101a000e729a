"""The half of a serving engine that does not depend on where tokens are made: its text, and making requests."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from quire.agents import Dialect
from quire.beams import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.api import EngineInfo, PreparedRequest
from quire.engine.inputs import InputProcessor
from quire.engine.launch import EngineProcessOptions
from quire.engine.text_side import TextSide, open_model
from quire.inputs import Prompt
from quire.params import SamplingParams
from quire.pooling import PoolingParams
from quire.request import AdapterRef
from quire.text import Tokenizer


class SharedText:
    """A model's text side, opened once for however many engines run it in this event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._opening: asyncio.Task[TextSide] | None = None

    async def open(self) -> TextSide:
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open))
        text = await asyncio.shield(self._opening)
        if not hasattr(self, "opened"):
            self.opened, self.outputs = text, text.make_outputs()
        return text

    def _open(self) -> TextSide:
        text = TextSide(self._config, open_model(self._config))
        text.compile_template()  # while the child loads: the first chat need not wait for it
        return text


class TextFront(ABC):
    """The text half of every `quire.engine.api.ServingEngine`: one process, replicas, or a process that sleeps."""

    def __init__(self, config: EngineConfig, options: EngineProcessOptions | None, text: SharedText | None) -> None:
        self.config = config
        self.options = options or EngineProcessOptions()
        self._text = text or SharedText(config)

    @abstractmethod
    def raise_if_dead(self) -> None:
        """Raise where the engine takes no requests."""

    def _take_limits(self, info: EngineInfo) -> InputProcessor:
        """Requests are held to what an engine that started can serve."""
        self._inputs = self._text.opened.make_inputs(info.max_model_len, info.max_num_seqs, info.serves_determinism)
        return self._inputs

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._text.opened.tokenizer

    @property
    def dialect(self) -> Dialect:
        return self._text.opened.dialect

    @property
    def default_sampling(self) -> SamplingParams:
        return self._text.opened.default_sampling

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        adapter: AdapterRef | None = None,
    ) -> PreparedRequest:
        """Tokenize and check. Any thread may call it."""
        self.raise_if_dead()
        return self._inputs.make_request(
            request_id,
            prompt,
            params,
            arrival_s=time.monotonic(),
            priority=priority,
            tenant=tenant,
            cache_tenant=tenant if self.options.isolated_tenants else "",
            adapter=adapter,
        )

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        self.raise_if_dead()
        return self._text.opened.render_chat(messages, chat_template=chat_template, **kwargs)
