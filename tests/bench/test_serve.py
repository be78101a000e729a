"""What a serving run makes of its outcomes, and of what the server says meanwhile."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from bench_server import FakeServer, serving_in_a_thread

from quire.bench.client import ClientRequest, Outcome, Target
from quire.bench.progress import Progress, RunProgress, WarmUpInterrupted
from quire.bench.serve import Load, client_requests, parse_goodput, read_metrics, run_serve, summarize
from quire.errors import ConfigError

METRICS = """# HELP x y
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 3.0
vllm:num_requests_waiting{model_name="m"} 2
vllm:kv_cache_usage_perc 0.25
vllm:num_preemptions_total 4
vllm:prefix_cache_queries_total{a="1"} 100
vllm:prefix_cache_queries_total{a="2"} 50
broken line
"""


def outcome(i: int, error: str | None = None) -> Outcome:
    if error:
        return Outcome(0.0, 5, 1, error=error, detail="why")
    return Outcome(0.0, 10, 5, ttft_s=0.1 * (i + 1), itl_s=[0.01 * (i + 1)] * 4, e2e_s=0.1 * (i + 1) + 0.04 * (i + 1))


def test_latencies_are_of_what_succeeded() -> None:
    outcomes = [outcome(i) for i in range(10)] + [outcome(0, "HTTP 429")] * 3 + [outcome(0, "timeout")]
    report = summarize(outcomes, num_requests=20, seconds=2.0, goodput_s={"ttft": 0.55, "tpot": 0.035})
    assert (report.requests, report.completed, report.errors) == (20, 10, {"HTTP 429": 3, "timeout": 1})
    assert (report.prompt_tokens, report.output_tokens) == (100, 50)
    assert (report.output_tok_s, report.total_tok_s) == (25.0, 75.0)
    assert report.values["req_s"] == 5.0
    assert (report.values["failed_requests"], report.values["refused_requests"]) == (1, 3)
    assert report.ttft_s and report.itl_s and report.tpot_s
    assert report.ttft_s.p95 == pytest.approx(np.percentile([0.1 * (i + 1) for i in range(10)], 95))
    assert (report.itl_s.count, report.tpot_s.count) == (40, 10)
    assert report.tpot_s.p50 == pytest.approx(0.055)
    assert report.values["goodput_requests"] == 3
    assert report.values["goodput_req_s"] == pytest.approx(3 / 2.0)  # tpot is the stricter of the two: 10, 20, 30 ms
    assert report.notes == ["HTTP 429: why", "timeout: why"]


def test_nothing_came_back() -> None:
    report = summarize([outcome(0, "connection refused")], num_requests=1, seconds=0.1)
    assert report.completed == 0 and report.ttft_s is None and report.output_tok_s == 0


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "e2el:1500"]) == {"ttft": 0.2, "e2el": 1.5}
    for text in ("ttft", "ttft:fast", "speed:5", "ttft:0"):
        with pytest.raises(ConfigError, match="ttft:200"):
            parse_goodput([text])


def test_metrics_are_summed_over_labels() -> None:
    found = read_metrics(METRICS)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:prefix_cache_queries_total"] == 150
    assert "broken" not in found


def test_words_stand_for_tokens_in_a_chat() -> None:
    work = [([5] * 7, 3), ([6] * 2, 4)]
    assert client_requests(work, as_text=False) == [ClientRequest([5] * 7, 3), ClientRequest([6] * 2, 4)]
    texts = client_requests(work, as_text=True)
    assert [(len(str(r.prompt).split()), r.num_out) for r in texts] == [(7, 3), (2, 4)]
    assert texts == client_requests(work, as_text=True)


def test_a_whole_run_with_the_servers_own_numbers() -> None:
    with serving_in_a_thread(FakeServer(metrics=METRICS, faults=[None, None, 429])) as server:
        load = Load(
            target=Target(base_url=server.url),
            requests=[ClientRequest([1, 2], 4)] * 5,
            arrivals=[0.0, 0.02, 0.04, 0.06, 0.08],
            num_warmups=2,
        )
        report = run_serve(load, name="five", parameters={})
    assert (report.completed, report.errors, report.output_tokens) == (4, {"HTTP 429": 1}, 16)
    assert len(server.bodies) == 7 and server.bodies[0]["model"] == "fake-model"
    assert report.settings["model"] == "fake-model"
    assert report.values["server_kv_usage_max"] == 0.25
    assert report.values["server_preemptions"] == 0  # grew by none during the run
    assert (report.samples[0].running, report.samples[0].waiting) == (3, 2)
    assert not report.interrupted


class Interrupting(FakeServer):
    """Presses Ctrl-C when it is asked again after so many requests."""

    after = 0

    async def answer(self, request):  # type: ignore[no-untyped-def]
        if len(self.bodies) == self.after:
            os.kill(os.getpid(), signal.SIGINT)
        return await super().answer(request)


def test_ctrl_c_keeps_what_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupting, "after", 3)
    with serving_in_a_thread(Interrupting(token_s=0.001)) as server:
        load = Load(
            target=Target(base_url=server.url, model="m"),
            requests=[ClientRequest([1], 3)] * 3 + [ClientRequest([1], 50_000)] * 2,
            arrivals=[0.0] * 5,
            max_concurrency=1,
        )
        report = run_serve(load, name="cut", parameters={})
    assert report.interrupted
    assert (report.requests, report.completed, report.output_tokens) == (5, 3, 9)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_warm_up_is_no_measurement() -> None:
    with serving_in_a_thread(Interrupting(token_s=0.001)) as server:
        load = Load(
            target=Target(base_url=server.url, model="m"),
            requests=[ClientRequest([1], 50_000)],
            arrivals=[0.0],
            num_warmups=1,
        )
        with pytest.raises(WarmUpInterrupted):
            run_serve(load, name="cut", parameters={})
    assert len(server.bodies) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_progress_counts_what_is_under_way() -> None:
    stages: list[tuple[str, int]] = []
    said: list[tuple[int, int]] = []

    class Recorded(RunProgress):
        def stage(self, name: str, num_requests: int, num_tokens: int | None = None) -> Progress:
            stages.append((name, num_requests))
            return lambda output_tokens, completed: said.append((output_tokens, completed))

    with serving_in_a_thread(FakeServer(token_s=0.01)) as server:
        load = Load(
            target=Target(base_url=server.url),
            requests=[ClientRequest([1], 5), ClientRequest([1], 100)],
            arrivals=[0.0, 0.0],
            num_warmups=1,
        )
        run_serve(load, name="two", parameters={}, progress=Recorded("two"), repeat="run 1 of 2")
    assert stages == [("warming up", 1), ("run 1 of 2", 2)]
    tokens, completed = said[0]  # half a second into a load of at least one
    assert completed == 1 and 5 < tokens < 105
