"""Serving load: what a server's clients see, and what the server says of itself meanwhile."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.bench.client import REFUSED, ClientRequest, Outcome, Target, find_model, require_aiohttp, run_load
from quire.bench.machine import describe_machine
from quire.bench.progress import WARM_UP, Progress, RunProgress, WarmUpInterrupted
from quire.bench.report import Percentiles, RunReport, Sample
from quire.bench.workloads import Workload
from quire.errors import ConfigError

# A word is about a token in most vocabularies; the server's own count is what is reported.
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state", "family",
    "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "question",
    "work", "number", "night", "point", "home", "water", "room", "area", "money", "story", "fact", "month", "study",
    "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend", "power",
)  # fmt: skip
_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+([-+\deE.naifNIF]+)\s*$")
_GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(slots=True, kw_only=True)
class Load:
    """What is sent, when, and what counts as good."""

    target: Target
    requests: list[ClientRequest]
    arrivals: list[float]
    max_concurrency: int | None = None
    num_warmups: int = 0
    goodput_s: dict[str, float] = field(default_factory=dict)  # ttft, tpot, e2el -> at most so many seconds


def client_requests(workload: Workload, *, as_text: bool, seed: int = 0) -> list[ClientRequest]:
    """A seeded workload's requests: token ids, or for a chat as many words."""
    if not as_text:
        return [ClientRequest(prompt, num_out) for prompt, num_out in workload]
    rng = random.Random(seed)
    return [ClientRequest(" ".join(rng.choices(_WORDS, k=len(p))), num_out) for p, num_out in workload]


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """ "ttft:200" -> at most 0.2 s."""
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value) / 1e3
        except ValueError:
            limits[name] = -1.0
        if name not in _GOODPUT or limits[name] <= 0:
            raise ConfigError(
                f"--goodput {text!r}: write a metric and milliseconds, as in ttft:200 ({', '.join(_GOODPUT)})"
            )
    return limits


def run_serve(
    load: Load, *, name: str, parameters: dict[str, Any], progress: RunProgress | None = None, repeat: str = ""
) -> RunReport:
    """Send the load and wait for it. Ctrl-C ends it early and keeps what came back; in the warm-up it raises
    WarmUpInterrupted. `repeat` is what its progress calls it."""
    require_aiohttp()
    report = asyncio.run(_run(load, name, parameters, progress or RunProgress(name), repeat))
    if report is None:
        raise WarmUpInterrupted
    return report


async def _run(
    load: Load, name: str, parameters: dict[str, Any], progress: RunProgress, repeat: str
) -> RunReport | None:
    """Send the load; None where Ctrl-C came before it."""
    target = replace(load.target, model=await find_model(load.target))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, stop.set)
        handles_signals = True
    except (RuntimeError, ValueError):  # not in the main thread
        handles_signals = False
    try:
        if load.num_warmups:
            warm = [load.requests[i % len(load.requests)] for i in range(load.num_warmups)]
            show = progress.stage(WARM_UP, len(warm))
            await _send_all(target, warm, [0.0] * len(warm), load.max_concurrency, stop, show)
        if stop.is_set():
            return None
        watch = _ServerWatch(target)
        watching = asyncio.create_task(watch.run())
        started = time.perf_counter()
        show = progress.stage(repeat, len(load.requests))
        outcomes = await _send_all(target, load.requests, load.arrivals, load.max_concurrency, stop, show)
        seconds = time.perf_counter() - started
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    finally:
        if handles_signals:
            loop.remove_signal_handler(signal.SIGINT)
    report = summarize(outcomes, num_requests=len(load.requests), seconds=seconds, goodput_s=load.goodput_s)
    report.workload, report.parameters, report.interrupted = name, parameters, stop.is_set()
    report.settings = {"base_url": target.base_url, "endpoint": target.endpoint, "model": target.model}
    report.machine = describe_machine()
    report.values |= watch.values()
    report.samples = watch.samples
    return report


async def _send_all(
    target: Target,
    requests: list[ClientRequest],
    arrivals: list[float],
    max_concurrency: int | None,
    stop: asyncio.Event,
    show: Progress,
) -> list[Outcome]:
    so_far = _SoFar()
    telling = asyncio.create_task(so_far.tell(show))
    try:
        return await run_load(
            target,
            requests,
            arrivals,
            max_concurrency=max_concurrency,
            stop=stop,
            on_sent=so_far.on_sent,
            on_done=so_far.on_done,
        )
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


@dataclass(slots=True)
class _SoFar:
    """A load as it goes, with what requests under way have brought: none may end for minutes."""

    num_done: int = 0
    num_tokens_done: int = 0
    under_way: dict[int, Outcome] = field(default_factory=dict)  # by id(): outcomes have no hash

    def on_sent(self, outcome: Outcome) -> None:
        self.under_way[id(outcome)] = outcome

    def on_done(self, outcome: Outcome) -> None:
        del self.under_way[id(outcome)]
        self.num_done += 1
        self.num_tokens_done += outcome.output_tokens

    async def tell(self, show: Progress, every_s: float = 0.5) -> None:
        while True:
            await asyncio.sleep(every_s)
            # Chunks, before the server has said how many tokens they were.
            num_chunks = sum(len(o.itl_s) + (o.ttft_s is not None) for o in self.under_way.values())
            show(self.num_tokens_done + num_chunks, self.num_done)


def summarize(
    outcomes: Sequence[Outcome], *, num_requests: int, seconds: float, goodput_s: dict[str, float] | None = None
) -> RunReport:
    """Latencies of the requests that succeeded; the others are counted by what went wrong. What a full server refuses
    is no failure: a load test may want to see just that."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    span = max(seconds, 1e-9)
    output_tokens, prompt_tokens = sum(o.output_tokens for o in good), sum(o.prompt_tokens for o in good)
    report = RunReport(
        workload="",
        engine="server",
        requests=num_requests,
        completed=len(good),
        errors=dict(Counter(outcome.error or "" for outcome in failed)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=seconds,
        output_tok_s=output_tokens / span,
        total_tok_s=(prompt_tokens + output_tokens) / span,
        ttft_s=Percentiles.of([o.ttft_s for o in good if o.ttft_s is not None]),
        itl_s=Percentiles.of([gap for o in good for gap in o.itl_s]),
        tpot_s=Percentiles.of([tpot for o in good if (tpot := _tpot(o)) is not None]),
        e2e_s=Percentiles.of([o.e2e_s for o in good if o.e2e_s is not None]),
    )
    report.values["req_s"] = len(good) / span
    num_refused = report.errors.get(REFUSED, 0)
    report.values |= {"failed_requests": len(failed) - num_refused, "refused_requests": num_refused}
    if goodput_s:
        kept = sum(all(_meets(o, metric, limit) for metric, limit in goodput_s.items()) for o in good)
        report.values |= {"goodput_requests": kept, "goodput_req_s": kept / span}
    told = {o.error: o.detail for o in failed if o.detail}
    report.notes = [f"{error}: {detail}" for error, detail in told.items()]
    return report


def _tpot(outcome: Outcome) -> float | None:
    if outcome.e2e_s is None or outcome.ttft_s is None or outcome.output_tokens < 2:
        return None
    return (outcome.e2e_s - outcome.ttft_s) / (outcome.output_tokens - 1)


def _meets(outcome: Outcome, metric: str, limit: float) -> bool:
    value = {"ttft": outcome.ttft_s, "tpot": _tpot(outcome), "e2el": outcome.e2e_s}[metric]
    return value is None or value <= limit


class _ServerWatch:
    """Reads /metrics while the load runs, under the names that vLLM and Quire use. A server without them is fine."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self.samples: list[Sample] = []

    async def run(self, every_s: float = 0.5) -> None:
        import aiohttp

        started = time.perf_counter()
        timeout = aiohttp.ClientTimeout(total=5)
        url = self._target.base_url.rstrip("/") + "/metrics"
        async with aiohttp.ClientSession(headers=self._target.headers(), timeout=timeout) as session:
            while True:
                try:
                    async with session.get(url) as response:
                        if response.status != 200:
                            return
                        self._add(read_metrics(await response.text()), time.perf_counter() - started)
                except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
                    return
                await asyncio.sleep(every_s)

    def _add(self, now: dict[str, float], t_s: float) -> None:
        self._first = self._first or now
        self._last = now
        if "vllm:num_requests_running" not in now:
            return
        self.samples.append(
            Sample(
                t_s=t_s,
                running=int(now["vllm:num_requests_running"]),
                waiting=int(now.get("vllm:num_requests_waiting", 0)),
                kv_usage=now.get("vllm:kv_cache_usage_perc", 0.0),
                waste_percent=now.get("quire:kv_waste_percent", 0.0),
                rss_bytes=int(now.get("process_resident_memory_bytes", 0)),
                prompt_tokens=int(self._grown("vllm:prompt_tokens_total")),
                output_tokens=int(self._grown("vllm:generation_tokens_total")),
            )
        )

    def _grown(self, name: str) -> float:
        return self._last.get(name, 0.0) - self._first.get(name, 0.0)

    def values(self) -> dict[str, float]:
        found = {}
        if self.samples:
            found["server_kv_usage_max"] = max(sample.kv_usage for sample in self.samples)
            found["server_running_max"] = float(max(sample.running for sample in self.samples))
            found["server_waiting_max"] = float(max(sample.waiting for sample in self.samples))
        if "vllm:num_preemptions_total" in self._last:
            found["server_preemptions"] = self._grown("vllm:num_preemptions_total")
        queries = self._grown("vllm:prefix_cache_queries_total")
        if queries > 0:
            found["server_prefix_hit_rate"] = self._grown("vllm:prefix_cache_hits_total") / queries
        return found


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format: the sum over labels of each name."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _METRIC.match(line)
        if match:
            try:
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
            except ValueError:
                continue
    return found
