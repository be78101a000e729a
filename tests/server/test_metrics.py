from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from observing_fakes import ToldEngine, output, prepared
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.testclient import TestClient

import quire.server.metrics as metrics_module
from quire.engine.api import EngineLoad, EngineState
from quire.engine.stats import Metric
from quire.errors import EngineDeadError
from quire.outputs import RequestMetrics
from quire.params import OutputKind
from quire.server.app import make_route
from quire.server.metric_names import NAMES
from quire.server.metrics import ServerMetrics, show_metrics
from quire.server.paths import Operation


class Clock:
    now_s = 200.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def engine() -> ToldEngine:
    return ToldEngine()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(engine: ToldEngine, clock: Clock) -> ServerMetrics:
    return ServerMetrics(engine, "served-name", clock=clock)


def read(metrics: ServerMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The page as (sample name, labels besides the two that all have) -> value."""
    found = {}
    for family in text_string_to_metric_families(asyncio.run(metrics.scrape()).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith(("vllm:", "quire:")):
                assert (labels.pop("model_name"), labels.pop("engine")) == ("served-name", "0"), sample
            key = (sample.name, frozenset(labels.items()))
            assert key not in found, f"{key} is there twice: Prometheus would refuse the page"
            found[key] = sample.value
    return found


def get(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return read(metrics).get((name, frozenset(labels.items())))


# -- one request's numbers


def test_a_streamed_request(metrics: ServerMetrics, clock: Clock) -> None:
    request = prepared(num_prompt_tokens=10, arrival_s=100.0, max_tokens=7)
    metrics.on_output(request, output("r1", [1], num_cached_tokens=4), 100.03)
    metrics.on_output(request, output("r1", [2]), 100.05)
    last = output(
        "r1",
        [3],
        finish_reason="stop",
        num_cached_tokens=4,
        metrics=RequestMetrics(
            arrival_s=100.0,
            queue_s=0.01,
            first_token_s=0.03,
            inter_token_s=0.02,
            total_s=0.07,
            num_preemptions=2,
            cache_outcome="partial",
        ),
    )
    metrics.on_output(request, last, 100.07)
    clock.now_s = 100.08
    summary = metrics.on_finished(request, last, "stop")
    page = read(metrics)

    def value(name: str, **labels: str) -> float:
        return page[name, frozenset(labels.items())]

    assert value("vllm:prompt_tokens_total") == 10
    assert value("vllm:prompt_tokens_cached_total") == 4
    assert value("vllm:request_success_total", finished_reason="stop") == 1
    assert value("vllm:request_success_total", finished_reason="abort") == 0
    assert value("vllm:time_to_first_token_seconds_count") == 1
    assert value("vllm:time_to_first_token_seconds_sum") == pytest.approx(0.03)
    assert value("vllm:inter_token_latency_seconds_count") == 2
    assert value("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.04)
    assert value("vllm:e2e_request_latency_seconds_sum") == pytest.approx(0.08)
    assert value("vllm:request_queue_time_seconds_sum") == pytest.approx(0.01)
    assert value("vllm:request_prefill_time_seconds_sum") == pytest.approx(0.02)
    assert value("vllm:request_decode_time_seconds_sum") == pytest.approx(0.04)
    assert value("vllm:request_inference_time_seconds_sum") == pytest.approx(0.06)
    assert value("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.02)
    assert value("vllm:request_prompt_tokens_sum") == 10
    assert value("vllm:request_generation_tokens_sum") == 3
    assert value("vllm:request_max_num_generation_tokens_sum") == 3
    assert value("vllm:request_params_n_sum") == 1
    assert value("vllm:request_params_max_tokens_sum") == 7
    assert value("vllm:time_to_first_token_seconds_bucket", le="0.04") == 1
    assert (summary.num_output_tokens, summary.num_cached_tokens, summary.num_preemptions) == (3, 4, 2)
    assert (summary.finish_reason, summary.cache_outcome) == ("stop", "partial")
    assert summary.total_s == pytest.approx(0.08)


def test_what_was_made_counts_though_nobody_read_it(metrics: ServerMetrics) -> None:
    request = prepared(num_prompt_tokens=10, output_kind=OutputKind.FINAL_ONLY)
    request.num_made_tokens[:] = [7]
    request.num_cached_tokens = 8
    summary = metrics.on_finished(request, None, "error")
    assert (summary.num_output_tokens, summary.output_tokens_by_index) == (7, (7,))
    assert get(metrics, "vllm:request_generation_tokens_sum") == 7
    assert get(metrics, "vllm:prompt_tokens_total") == 10
    assert get(metrics, "vllm:prompt_tokens_cached_total") == summary.num_cached_tokens == 8


def test_of_a_finished_request_what_was_shown_counts(metrics: ServerMetrics) -> None:
    request = prepared()
    request.num_made_tokens[:] = [5]  # two came after its stop string
    last = output("r1", [1, 2, 3], finish_reason="stop")
    metrics.on_output(request, last, 101.0)
    assert metrics.on_finished(request, last, "stop").num_output_tokens == 3


def test_cumulative_outputs_count_each_token_once(metrics: ServerMetrics) -> None:
    request = prepared(output_kind=OutputKind.CUMULATIVE)
    metrics.on_output(request, output("r1", [1]), 101.0)
    metrics.on_output(request, output("r1", [1, 2, 3]), 101.4)  # the reader was late for one
    assert sum(metrics.inter_token.counts) == 2
    assert metrics.inter_token.total == pytest.approx(0.4)
    assert metrics.on_finished(request, None, "abort").num_output_tokens == 3


def test_the_whole_text_at_once_has_the_engines_times(metrics: ServerMetrics) -> None:
    request = prepared(output_kind=OutputKind.FINAL_ONLY)
    measured = RequestMetrics(arrival_s=100.0, queue_s=0.0, first_token_s=0.5, inter_token_s=0.1, total_s=0.9)
    metrics.on_output(request, output("r1", [1, 2, 3, 4, 5], finish_reason="length", metrics=measured), 105.0)
    assert metrics.first_token.total == pytest.approx(0.5)
    assert (sum(metrics.inter_token.counts), metrics.inter_token.total) == (4, pytest.approx(0.4))


def test_each_of_n_sequences_has_its_own_times(metrics: ServerMetrics) -> None:
    request = prepared(n=2)
    metrics.on_output(request, output("r1", [1], [2]), 101.0)
    metrics.on_output(request, output("r1", [3], []), 101.5)
    last = output("r1", [], [4], finish_reason="stop")
    metrics.on_output(request, last, 102.0)
    summary = metrics.on_finished(request, last, None)
    assert metrics.inter_token.total == pytest.approx(0.5 + 1.0)
    assert summary.num_output_tokens == 4
    page = read(metrics)
    assert page["vllm:request_generation_tokens_count", frozenset()] == 2
    assert page["vllm:request_max_num_generation_tokens_sum", frozenset()] == 2
    assert page["vllm:prompt_tokens_total", frozenset()] == 10  # once, not per sequence
    assert page["vllm:request_success_total", frozenset({("finished_reason", "stop")})] == 2


def test_a_reader_that_left_before_the_first_token(metrics: ServerMetrics) -> None:
    summary = metrics.on_finished(prepared(), None, None)
    assert (summary.finish_reason, summary.num_output_tokens, summary.first_token_s) == ("abort", 0, None)
    page = read(metrics)
    assert page["vllm:prompt_tokens_total", frozenset()] == 0
    assert page["vllm:time_to_first_token_seconds_count", frozenset()] == 0
    assert page["vllm:request_success_total", frozenset({("finished_reason", "abort")})] == 1


def test_of_ended_requests_only_the_last_summaries_are_kept(metrics: ServerMetrics) -> None:
    for i in range(300):
        request = prepared(f"r{i}")
        metrics.on_output(request, output(f"r{i}", [1]), 101.0)
        metrics.on_finished(request, None, "abort")
    assert not metrics._live
    assert [summary.request_id for summary in metrics.recent] == [f"r{i}" for i in range(44, 300)]


def test_tenants_are_told_apart_and_limited(metrics: ServerMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_MAX_TENANTS", 2)
    for tenant in ("a", "b", "c", "d", "a", ""):
        request = prepared(tenant=tenant)
        metrics.on_output(request, output("r1", [1, 2]), 101.0)
        metrics.on_finished(request, None, "stop")
    page = read(metrics)
    requests = {dict(k[1])["tenant"]: v for k, v in page.items() if k[0] == "quire:tenant_requests_total"}
    assert requests == {"a": 2, "b": 1, "other": 2}
    assert page["quire:tenant_tokens_total", frozenset({("tenant", "a"), ("kind", "prompt")})] == 20
    assert page["quire:tenant_tokens_total", frozenset({("tenant", "a"), ("kind", "output")})] == 4


def test_starts_and_refusals(metrics: ServerMetrics) -> None:
    metrics.on_request_start("/v1/completions")
    metrics.on_refused("waiting_tokens")
    metrics.on_refused("waiting_tokens")
    assert get(metrics, "quire:requests_started_total", endpoint="/v1/completions") == 1
    assert get(metrics, "quire:requests_refused_total", reason="waiting_tokens") == 2


# -- the engine's part


def test_the_engines_numbers_are_passed_on(metrics: ServerMetrics, engine: ToldEngine) -> None:
    engine.now_load = EngineLoad(brownout_level=2, num_waiting_tokens=77)
    engine.reading = [
        Metric("vllm:num_requests_waiting_by_reason", "gauge", 3, {"reason": "capacity"}),
        Metric("vllm:generation_tokens_total", "counter", 42),
        Metric("quire:preemptions_total", "counter", 1, {"kind": "swap"}),
        Metric("quire:preemptions_total", "counter", 2, {"kind": "recompute"}),
        Metric("quire:kv_swapped_out_blocks_total", "counter", 5),
        Metric("quire:kv_swapped_in_blocks_total", "counter", 4),
        Metric("vllm:iteration_tokens_total", "histogram", 1, {"le": "8"}),
        Metric("vllm:iteration_tokens_total", "histogram", 3, {"le": "+Inf"}),
        Metric("vllm:iteration_tokens_total", "histogram", 300.0),
        Metric("quire:something_new_total", "counter", 9),
    ]
    page = read(metrics)
    assert page["vllm:generation_tokens_total", frozenset()] == 42
    assert page["vllm:num_requests_waiting_by_reason", frozenset({("reason", "capacity")})] == 3
    assert page["quire:preemptions_total", frozenset({("kind", "swap")})] == 1
    assert page["quire:swap_bytes_total", frozenset({("direction", "out")})] == 5 * 1024
    assert page["quire:swap_bytes_total", frozenset({("direction", "in")})] == 4 * 1024
    assert page["quire:brownout_level", frozenset()] == 2
    assert page["quire:num_waiting_tokens", frozenset()] == 77
    assert page["vllm:iteration_tokens_total_bucket", frozenset({("le", "8")})] == 1
    assert page["vllm:iteration_tokens_total_count", frozenset()] == 3
    assert page["vllm:iteration_tokens_total_sum", frozenset()] == 300
    assert page["quire:something_new_total", frozenset()] == 9


def test_requests_are_counted_by_the_server_alone(metrics: ServerMetrics, engine: ToldEngine) -> None:
    engine.reading = [
        Metric("vllm:prompt_tokens_total", "counter", 999),
        Metric("vllm:request_success_total", "counter", 999, {"finished_reason": "stop"}),
    ]
    page = read(metrics)  # would meet a name twice
    assert page["vllm:prompt_tokens_total", frozenset()] == 0
    assert page["vllm:request_success_total", frozenset({("finished_reason", "stop")})] == 0


def test_what_the_cache_is(metrics: ServerMetrics) -> None:
    page = read(metrics)
    labels = next(dict(key[1]) for key in page if key[0] == "vllm:cache_config_info")
    assert labels == {
        "block_size": "16",
        "cache_dtype": "float32",
        "enable_prefix_caching": "True",
        "num_gpu_blocks": "64",
        "num_cpu_blocks": "8",
        "kv_cache_size_tokens": "1024",
        "kv_cache_max_concurrency": "4.00",
    }
    assert page["quire:engine_start_seconds", frozenset({("part", "weights")})] == 1.0
    assert page["quire:engine_ready_seconds", frozenset()] == 1.5


@pytest.mark.parametrize("state", list(EngineState))
def test_the_page_answers_in_every_state(metrics: ServerMetrics, engine: ToldEngine, state: EngineState) -> None:
    engine.state = state
    engine.reading = [Metric("quire:steps_total", "counter", 1)]
    page = read(metrics)
    assert page["quire:engine_state", frozenset({("state", state.value)})] == 1
    assert sum(v for k, v in page.items() if k[0] == "quire:engine_state") == 1
    alive = state in (EngineState.READY, EngineState.STUCK, EngineState.SLEEPING)
    assert (("quire:steps_total", frozenset()) in page) is alive


def test_an_engine_that_does_not_answer_leaves_its_last_reading(
    metrics: ServerMetrics, engine: ToldEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "_READING_TIMEOUT_S", 0.02)
    engine.reading = [Metric("quire:steps_total", "counter", 7)]

    async def twice() -> bytes:
        await metrics.scrape()
        engine.hangs, clock.now_s = True, clock.now_s + 30
        await metrics.scrape()
        page = await metrics.scrape()
        assert engine.num_asked == 2, "a question that hangs is not asked again"
        asking = metrics._engines["0"]._asking
        assert asking is not None
        asking.cancel()
        return page

    page = asyncio.run(twice()).decode()
    assert 'quire:steps_total{engine="0",model_name="served-name"} 7.0' in page
    assert 'quire:engine_metrics_age_seconds{engine="0",model_name="served-name"} 30.0' in page


def test_an_engine_that_dies_when_asked(metrics: ServerMetrics, engine: ToldEngine) -> None:
    async def die() -> list[Metric]:
        raise EngineDeadError("gone")

    engine.metrics = die  # type: ignore[method-assign]
    assert ("vllm:request_params_n_count", frozenset()) in read(metrics)


async def test_scrapes_close_together_share_a_reading(metrics: ServerMetrics, engine: ToldEngine, clock: Clock) -> None:
    await asyncio.gather(*(metrics.scrape() for _ in range(5)))
    await metrics.scrape()
    assert engine.num_asked == 1
    clock.now_s += 1
    await metrics.scrape()
    assert engine.num_asked == 2


def test_no_metric_says_what_is_not_there(metrics: ServerMetrics) -> None:
    names = {name for name, _ in read(metrics)} | set(NAMES)
    assert not [n for n in names if "lora" in n or "sleep" in n]


def test_the_route(metrics: ServerMetrics) -> None:
    context = SimpleNamespace(models=[SimpleNamespace(metrics=metrics)])
    route = make_route(Operation("get", "/metrics", show_metrics), context)  # type: ignore[arg-type]
    with TestClient(Starlette(routes=[route])) as client:
        response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "process_resident_memory_bytes" in response.text
    assert "# TYPE vllm:prompt_tokens_total counter" in response.text
