"""What Prometheus reads. Requests are counted here, in this process; blocks and steps by the engine, which is asked
when Prometheus scrapes.

Observing a token costs two look-ups and a bisection; everything that Prometheus wants as text waits for the scrape.
Every prepared request that was given to `on_output` must be given to `on_finished` once, however it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import quire
from quire.engine.api import EngineInfo, EngineState, PreparedRequest, ServingEngine, is_replicated, replicas_of
from quire.engine.stats import Metric
from quire.errors import QuireError
from quire.outputs import RequestMetrics, RequestOutput
from quire.params import OutputKind
from quire.request import FinishReason
from quire.server.histogram import FIRST_TOKEN_S, INTER_TOKEN_S, REQUEST_S, SEQUENCES, TOKENS, Histogram
from quire.server.metric_names import NAMES

if TYPE_CHECKING:
    from quire.server.context import ServerContext

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_TENANTS = 256  # further ones are summed up as "other": a label must not grow without end
_NUM_RECENT = 256
_READING_TIMEOUT_S = 5.0  # a scrape waits no longer for the engine; Prometheus gives up after 10
_READING_FRESH_S = 0.2  # scrapes closer together share a reading: asking often must not cost steps
# Histograms of requests, by vLLM's names, with their buckets.
_HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN_S,
    "inter_token_latency_seconds": INTER_TOKEN_S,
    "request_time_per_output_token_seconds": INTER_TOKEN_S,
    "e2e_request_latency_seconds": REQUEST_S,
    "request_queue_time_seconds": REQUEST_S,
    "request_prefill_time_seconds": REQUEST_S,
    "request_decode_time_seconds": REQUEST_S,
    "request_inference_time_seconds": REQUEST_S,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_n": SEQUENCES,
    "request_params_max_tokens": TOKENS,
}


@dataclass(slots=True)
class _Live:
    """A request that has given output."""

    has_deltas: bool
    num_tokens: list[int]  # by completion
    last_s: list[float]


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestSummary:
    """A request at its end, for its line in the log and for /debug/kv. None: did not happen."""

    request_id: str
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float | None
    first_token_s: float | None
    inter_token_s: float | None
    total_s: float
    finish_reason: str
    cache_outcome: str | None
    num_preemptions: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    output_tokens_by_index: tuple[int, ...] = ()


class _Families:
    """Makes families whose samples say which model and engine they are of."""

    def __init__(self, model_name: str, engine_name: str) -> None:
        self._labels = (model_name, engine_name)

    def _family(self, name: str, *samples: tuple[tuple[str, ...], float]) -> Family:
        known = NAMES[name]
        return self._make(name, known.kind, known.help, known.labels, samples)

    def _make(
        self, name: str, kind: str, help_: str, extra: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> Family:
        labels = ("model_name", "engine", *extra)
        family: CounterMetricFamily | GaugeMetricFamily
        if kind == "counter":
            family = CounterMetricFamily(name, help_, labels=labels)
        else:
            family = GaugeMetricFamily(name, help_, labels=labels)
        for values, value in samples:
            family.add_metric((*self._labels, *values), value)
        return family


class ServerMetrics(_Families, Collector):
    """Counters of one server, in the event loop's thread. Requests of several replicas are counted together, under the
    engine "all"; numbers that an engine counts have the engine's own name."""

    def __init__(self, engine: ServingEngine, model_name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(model_name, "all" if is_replicated(engine) else "0")
        self._engine = engine
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._engines: dict[str, _EngineMetrics] = {}
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)

        self.recent: deque[RequestSummary] = deque(maxlen=_NUM_RECENT)  # ended last, the newest at the end
        self._histograms = {name: Histogram(bounds) for name, bounds in _HISTOGRAMS.items()}
        self.first_token = self._histograms["time_to_first_token_seconds"]
        self.inter_token = self._histograms["inter_token_latency_seconds"]
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self._started: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._tenant_requests: Counter[str] = Counter()
        self._tenant_tokens: Counter[tuple[str, str]] = Counter()  # by tenant and kind

    # -- told by the request's way

    def on_request_start(self, endpoint: str) -> None:
        self._started[endpoint] += 1

    def on_refused(self, reason: str) -> None:
        """A request that got an error instead of text. `reason` is one of a few words, never the user's text."""
        self._refused[reason] += 1

    def on_output(self, prepared: PreparedRequest, output: RequestOutput, now_s: float) -> None:
        """An output of a request, read at `now_s`."""
        live = self._live.get(output.request_id)
        if live is None:
            live = self._begin(prepared, output)
        counts, last_s, has_deltas = live.num_tokens, live.last_s, live.has_deltas
        for completion in output.outputs:
            index = completion.index
            before = counts[index]
            num_new = len(completion.token_ids) if has_deltas else len(completion.token_ids) - before
            if not num_new:
                continue
            counts[index] = before + num_new
            if before:
                # Several at once: the reader was late, not the engine, which gave them out one by one.
                self.inter_token.observe((now_s - last_s[index]) / num_new, num_new)
            else:
                self._on_first_token(prepared, output, now_s, num_new)
            last_s[index] = now_s

    def _begin(self, prepared: PreparedRequest, output: RequestOutput) -> _Live:
        params = prepared.params
        live = _Live(params.output_kind is OutputKind.DELTA, [0] * params.n, [0.0] * params.n)
        self._live[output.request_id] = live
        self._num_prompt_tokens += prepared.num_prompt_tokens
        self._num_cached_tokens += output.num_cached_tokens
        return live

    def _on_first_token(self, prepared: PreparedRequest, output: RequestOutput, now_s: float, num_new: int) -> None:
        measured = output.metrics
        if num_new == 1 or measured is None or measured.first_token_s is None:
            self.first_token.observe(now_s - prepared.request.arrival_s)
            return
        # The whole text at once: only the engine knows when its tokens came.
        self.first_token.observe(measured.first_token_s)
        if measured.inter_token_s is not None:
            self.inter_token.observe(measured.inter_token_s, num_new - 1)

    def on_finished(
        self, prepared: PreparedRequest, last_output: RequestOutput | None, finish_reason: str | None
    ) -> RequestSummary:
        """A request ended: with its last output, or without one where it failed or its reader left.

        `finish_reason` is for sequences that the last output does not say it of.
        """
        request = prepared.request
        live = self._live.pop(request.request_id, None)
        total_s = self._clock() - request.arrival_s
        counts = live.num_tokens if live is not None else [0] * request.n
        num_cached_tokens = prepared.num_cached_tokens if last_output is None else last_output.num_cached_tokens
        if prepared.num_made_tokens and not (last_output is not None and last_output.finished):
            # The engine made these tokens, even if none were to be shown before the end.
            counts = [max(pair) for pair in zip(counts, prepared.num_made_tokens, strict=True)]
            if live is None and any(counts):
                self._num_prompt_tokens += prepared.num_prompt_tokens
                self._num_cached_tokens += num_cached_tokens
        reasons = [finish_reason or FinishReason.ABORT.value] * request.n
        for completion in last_output.outputs if last_output is not None else ():
            reasons[completion.index] = completion.finish_reason or reasons[completion.index]
        self._finished.update(reasons)
        self._observe("request_params_n", request.n)
        self._observe("request_params_max_tokens", prepared.params.max_tokens)
        self._observe("request_prompt_tokens", prepared.num_prompt_tokens)
        for count in counts:
            self._observe("request_generation_tokens", count)
        self._observe("request_max_num_generation_tokens", max(counts))
        self._observe("e2e_request_latency_seconds", total_s)
        num_output_tokens = sum(counts)
        has_begun = live is not None or num_output_tokens > 0
        self._on_tenant(request.tenant, prepared.num_prompt_tokens if has_begun else 0, num_output_tokens)
        measured = (last_output.metrics if last_output is not None else None) or RequestMetrics(request.arrival_s)
        self._on_phases(measured)
        summary = RequestSummary(
            request_id=request.request_id,
            tenant=request.tenant,
            num_prompt_tokens=prepared.num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
            queue_s=measured.queue_s,
            first_token_s=measured.first_token_s,
            inter_token_s=measured.inter_token_s,
            total_s=total_s,
            finish_reason=reasons[0] if len(set(reasons)) == 1 else ",".join(reasons),
            cache_outcome=measured.cache_outcome,
            num_preemptions=measured.num_preemptions,
            num_draft_tokens=measured.num_draft_tokens,
            num_accepted_tokens=measured.num_accepted_tokens,
            output_tokens_by_index=tuple(counts),
        )
        self.recent.append(summary)
        return summary

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)

    def _on_phases(self, measured: RequestMetrics) -> None:
        queue_s, first_token_s, total_s = measured.queue_s, measured.first_token_s, measured.total_s
        self._observe("request_queue_time_seconds", queue_s)
        self._observe("request_time_per_output_token_seconds", measured.inter_token_s)
        if queue_s is not None and first_token_s is not None:
            self._observe("request_prefill_time_seconds", first_token_s - queue_s)
            if total_s is not None:
                self._observe("request_decode_time_seconds", total_s - first_token_s)
                self._observe("request_inference_time_seconds", total_s - queue_s)

    def _on_tenant(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if not tenant:
            return
        if tenant not in self._tenant_requests and len(self._tenant_requests) >= _MAX_TENANTS:
            tenant = "other"
        self._tenant_requests[tenant] += 1
        self._tenant_tokens[tenant, "prompt"] += num_prompt_tokens
        self._tenant_tokens[tenant, "output"] += num_output_tokens

    # -- asked by Prometheus

    async def scrape(self, *others: ServerMetrics) -> bytes:
        """The page, with those of other models. Answers within seconds even when an engine does not: its part is then
        that of the last time."""
        shown = (self, *others)
        await asyncio.gather(*(metrics._read_engine() for metrics in shown))
        return generate_latest(_Together(shown)) + generate_latest(self._process)

    async def _read_engine(self) -> None:
        self._find_engines()
        await asyncio.gather(*(engine.read() for engine in self._engines.values()))

    def _find_engines(self) -> None:
        """Find the engines that run now. One that was started again is new: its counters begin at zero."""
        self._engines = {
            name: known
            if (known := self._engines.get(name)) is not None and known.engine is engine
            else _EngineMetrics(engine, self._labels[0], name, self._clock)
            for name, engine in replicas_of(self._engine).items()
        }

    def collect(self) -> Iterator[Family]:
        yield from self._server_families()
        if not self._engines:
            self._find_engines()
        yield from _Together(self._engines.values()).collect()

    def _server_families(self) -> Iterator[Family]:
        for name, histogram in self._histograms.items():
            name = f"vllm:{name}"
            family = HistogramMetricFamily(name, NAMES[name].help, labels=("model_name", "engine"))
            histogram.add_to(family, self._labels)
            yield family
        yield self._family("vllm:prompt_tokens_total", ((), self._num_prompt_tokens))
        yield self._family("vllm:prompt_tokens_cached_total", ((), self._num_cached_tokens))
        yield self._family("vllm:request_success_total", *_by_label(self._finished))
        yield self._family("quire:requests_started_total", *_by_label(self._started))
        yield self._family("quire:requests_refused_total", *_by_label(self._refused))
        yield self._family("quire:tenant_requests_total", *_by_label(self._tenant_requests))
        yield self._family("quire:tenant_tokens_total", *self._tenant_tokens.items())


class _EngineMetrics(_Families, Collector):
    """The numbers that one engine counts, read when Prometheus scrapes."""

    def __init__(self, engine: ServingEngine, model_name: str, engine_name: str, clock: Callable[[], float]) -> None:
        super().__init__(model_name, engine_name)
        self.engine = engine
        self._clock = clock
        self._reading: list[Metric] = []
        self._read_s: float | None = None
        self._asking: asyncio.Task[None] | None = None

    async def read(self) -> None:
        if self._read_s is None or self._clock() - self._read_s >= _READING_FRESH_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask())
            await asyncio.wait([self._asking], timeout=_READING_TIMEOUT_S)

    async def _ask(self) -> None:
        if not self.engine.health().is_up:
            return
        try:
            self._reading = await self.engine.metrics()
        except QuireError:
            return  # it died meanwhile: engine_state says so
        self._read_s = self._clock()

    def collect(self) -> Iterator[Family]:
        health = self.engine.health()
        yield self._family("quire:engine_state", *(((s.value,), float(s is health.state)) for s in EngineState))
        if not health.is_up:
            return  # what a dead engine counted last is not how things are
        yield from self._info_families(self.engine.info)
        if self._read_s is not None:
            yield from self._engine_families(self.engine.info)

    def _info_families(self, info: EngineInfo) -> Iterator[Family]:
        num_kv_tokens = info.num_blocks * info.block_size
        cache = (
            *(str(info.block_size), info.kv_dtype, str(info.enable_prefix_caching), str(info.num_blocks)),
            *(str(info.num_host_blocks), str(num_kv_tokens), f"{num_kv_tokens / info.max_model_len:.2f}"),
        )
        yield self._family("vllm:cache_config_info", (cache, 1))
        yield self._family("quire:build_info", ((quire.__version__, info.device, info.dtype), 1))
        yield self._family("quire:engine_ready_seconds", ((), info.ready_s))
        yield self._family("quire:engine_start_seconds", *(((part,), s) for part, s in info.timeline_s.items()))

    def _engine_families(self, info: EngineInfo) -> Iterator[Family]:
        """Families of the engine's own numbers, and of numbers that follow from them."""
        readings: dict[str, list[Metric]] = {}
        for metric in self._reading:
            readings.setdefault(metric.name, []).append(metric)
        load = self.engine.load()
        for name, value in (
            ("quire:brownout_level", load.brownout_level),
            ("quire:num_waiting_tokens", load.num_waiting_tokens),
        ):
            readings.setdefault(name, [Metric(name, "gauge", value)])
        for name, metrics in readings.items():
            if name not in _OWN:
                yield self._engine_family(name, metrics)
        moved = [
            ((direction,), metric.value * info.block_bytes)
            for direction in ("in", "out")
            for metric in readings.get(f"quire:kv_swapped_{direction}_blocks_total", ())
        ]
        yield self._family("quire:swap_bytes_total", *moved)
        yield self._family("quire:engine_metrics_age_seconds", ((), self._clock() - (self._read_s or 0.0)))

    def _engine_family(self, name: str, metrics: list[Metric]) -> Family:
        """A family of the engine's. A histogram comes as its cumulative buckets, labelled `le`, and its sum."""
        kind, help_ = metrics[0].kind, NAMES[name].help if name in NAMES else name
        if kind == "histogram":
            buckets = [(metric.labels["le"], metric.value) for metric in metrics if "le" in metric.labels]
            total = next(metric.value for metric in metrics if "le" not in metric.labels)
            histogram = HistogramMetricFamily(name, help_, labels=("model_name", "engine"))
            histogram.add_metric(self._labels, buckets, total)
            return histogram
        extra = tuple(metrics[0].labels)
        return self._make(name, kind, help_, extra, ((tuple(m.labels.values()), m.value) for m in metrics))


class _Together(Collector):
    """Several models' or engines' metrics: one family of each name, in which every sample says whose it is."""

    def __init__(self, parts: Iterable[Collector]) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        for part in self._parts:
            for family in part.collect():
                if (known := families.setdefault(family.name, family)) is not family:
                    known.samples += family.samples
        return families.values()


# Counted here and by the engine, which sees a stop string as an abort and knows no request that came as text.
_OWN = {"vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:request_success_total"}


def _by_label(counts: Counter[str]) -> Iterator[tuple[tuple[str], int]]:
    return (((label,), count) for label, count in counts.items())


async def show_metrics(context: ServerContext, _: HttpRequest) -> Response:
    """Metrics in Prometheus' format, under vLLM's names and Quire's own."""
    first, *others = (served.metrics for served in context.models)
    return Response(await first.scrape(*others), headers={"content-type": _CONTENT_TYPE})
