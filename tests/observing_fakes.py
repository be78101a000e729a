"""A serving engine that says what a test tells it to, requests and outputs without a model, and waiting for things."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import fakes

from quire.agents import Dialect
from quire.engine.api import EngineHealth, EngineLoad, EngineState, PreparedRequest
from quire.engine.stats import Metric
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.request import Request

INFO = fakes.engine_info(
    model="smollm2", kernels="native", num_host_blocks=8, ready_s=1.5, timeline_s={"weights": 1.0, "tokenizer": 0.5}
)


class ToldEngine:
    """quire.engine.api.ServingEngine as far as watching goes; other fakes add requests or calls to it."""

    info = INFO
    tokenizer: Any = None
    default_sampling = SamplingParams()
    dialect = Dialect()

    def __init__(self) -> None:
        self.state = EngineState.READY
        self.now_load = EngineLoad()
        self.reading: list[Metric] = []
        self.hangs = False
        self.num_asked = 0

    def health(self) -> EngineHealth:
        return EngineHealth(self.state, "" if self.state is EngineState.READY else "as the test said")

    def load(self) -> EngineLoad:
        return self.now_load

    def prepare(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nobody asks here")

    render_chat = stream = prepare

    async def call(self, name: str, **_: Any) -> Any:
        raise AssertionError("nobody calls here")

    async def metrics(self) -> list[Metric]:
        self.num_asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        return self.reading


def eventually(condition: Any, timeout_s: float = 60.0) -> Any:
    """The first thing that is true, or a failure."""
    until_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until_s, "it never happened"
        time.sleep(0.01)
    return found


def prepared(
    request_id: str = "r1",
    *,
    num_prompt_tokens: int = 10,
    arrival_s: float = 100.0,
    tenant: str = "",
    asked: SamplingParams | None = None,
    **params: Any,
) -> PreparedRequest:
    asked = asked or SamplingParams(**{"output_kind": OutputKind.DELTA} | params)
    request = Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt_tokens)),
        max_tokens=asked.max_tokens or 16,
        n=asked.n,
        end_token_ids=frozenset(),
        arrival_s=arrival_s,
        tenant=tenant,
    )
    return PreparedRequest(request, asked, None)


def output(
    request_id: str = "r1",
    *token_lists: list[int],
    finish_reason: str | None = None,
    metrics: RequestMetrics | None = None,
    num_cached_tokens: int = 0,
) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[],
        outputs=[
            CompletionOutput(index=i, text="secret text", token_ids=tokens, finish_reason=finish_reason)
            for i, tokens in enumerate(token_lists)
        ],
        finished=finish_reason is not None,
        metrics=metrics,
        num_cached_tokens=num_cached_tokens,
    )
