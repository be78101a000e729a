"""Predictions beside measurements: what the simulator says of runs whose figures are known, misses included.

`h200`: what docs/performance.md recorded on one H200. The constants (`quire/sim/devices.py`) come from single kernels,
but for the time of a layer's launches, which is from the row that says so.
`live`: this machine, now. One engine is profiled on some workloads and measured on others, in turn, so that whatever
else the machine does falls on both.
`served`: the same of replicas that share this machine's cores (`served.py`).
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench.profile import STEP_COLUMNS
from quire.bench.report import Percentiles, RunReport, write_text
from quire.bench.units import number, table
from quire.bench.workloads import WORKLOADS, Workload, arrival_times, even_lengths, sharegpt, usable_vocab
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.lab.shapes import read_model_spec
from quire.lab.simulated import SimulatedEngine, engine_by_arithmetic, engine_by_profile
from quire.request import Sequence as TokenSequence
from quire.sim.devices import DEVICES
from quire.sim.fleet import Fleet, weighted_percentiles
from quire.sim.profile import RecordedProfile, fit_steps
from quire.sim.replica import TokenTimes
from quire.sim.traffic import SimRequest, from_workload

if TYPE_CHECKING:
    from quire import LLMEngine

WANTED_PERCENT = 10.0


@dataclass(slots=True, frozen=True)
class Row:
    """One metric of one run. `loads`: what is predicted of each of several loads of the same kind, or with several
    drawings of the noise, rising, where the prediction is their median."""

    run: str
    metric: str
    measured: float
    predicted: float
    loads: tuple[float, ...] = ()

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)

    @property
    def spread(self) -> str:
        """From the second lowest to the second highest of the loads: the range in which a measurement is chance."""
        return f"{number(self.loads[1])} to {number(self.loads[-2])}" if len(self.loads) > 4 else ""

    @property
    def is_met(self) -> bool:
        return abs(self.error_percent) <= WANTED_PERCENT


@dataclass(slots=True)
class Seen:
    """What the readers of several loads saw, together: percentiles of one load are those of a few requests."""

    times: TokenTimes = field(default_factory=TokenTimes)
    seconds: float = 0.0

    def add(self, fleet: Fleet, requests: list[SimRequest], from_s: float = 0.0) -> None:
        """Simulate a load, of which what comes before `from_s` is not seen."""
        fleet.run(requests, from_s=from_s)
        self.times.add(fleet.times)
        self.seconds += fleet.now_s - from_s

    def report(self) -> RunReport:
        return RunReport(
            workload="",
            seconds=self.seconds,
            output_tokens=self.times.num_output_tokens,
            output_tok_s=self.times.num_output_tokens / self.seconds,
            ttft_s=Percentiles.of(self.times.first_s),
            itl_s=weighted_percentiles(self.times.between_s, self.times.between_counts),
        )


def validate(what: str, config: EngineConfig, num_replicas: int, output_json: str | None) -> int:
    """Print the table. Misses are its finding, not a failure."""
    ways: dict[str, Callable[[], list[Row]]] = {
        "h200": recorded_h200,
        "live": lambda: measured_live(config),
        "served": lambda: measured_served(config, num_replicas),
    }
    if what not in ways:
        raise ConfigError(f"--validate {what} is not known: there are {', '.join(ways)}")
    if num_replicas != 1 and what != "served":
        raise ConfigError(f"--validate {what} is of one engine: leave --replicas out, or use --validate served")
    rows = ways[what]()
    print(as_text(rows))
    if output_json:
        write_text(Path(output_json), json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def as_text(rows: Sequence[Row]) -> str:
    heads = ["run", "metric", "measured", "predicted", "of single loads", "error"]
    cells = []
    for row in rows:
        mark = "" if row.is_met else "  miss"
        numbers = [number(row.measured), number(row.predicted), row.spread]
        cells.append([row.run, row.metric, *numbers, f"{row.error_percent:+.1f} %{mark}"])
    num_met = sum(row.is_met for row in rows)
    return f"{table(heads, cells)}\n{num_met} of {len(rows)} within {WANTED_PERCENT:g} %"


# -- one H200, recorded

# docs/performance.md: tokens/s, the mean of two runs; and of its serving table first token and inter-token p50 and p99,
# by a client over HTTP.
_OFFLINE = {"single": 238.0, "lab16": 3_608.0, "mixed256": 10_498.0, "sharegpt": 14_119.0, "prefill": 42_142.0}
_SERVING = {8: (200, (13.2, 48.0, 4.6, 9.7)), 24: (480, (16.7, 52.0, 5.6, 11.0))}
_ALL_AT_ONCE = 13_696.0
_NUM_LOADS = 15  # of other seeds: which ones were sent is not known
_CLIENT_TOKEN_S = 0.11e-3  # CPU time of a client in Python for a streamed token, on two cores
# benchmarks/gpu_loop.py: output tokens/s, and the same percentiles of two loads together, at the engine's own loop. The
# loads of a seed came after each other, so that 24 requests/s find the first 200 prompts in the cache.
_AT_ENGINE = {8: (2_242.0, (11.66, 36.07, 4.72, 8.38)), 24: (6_202.0, (13.74, 52.55, 6.02, 11.19))}
_ENGINE_SEEDS = (11, 12)
PAUSE_S = 100.0  # after which all of a load has been served


def recorded_h200() -> list[Row]:
    spec = read_model_spec("llama-3.1-8b")
    config = EngineConfig(model="llama-3.1-8b", max_model_len=4096, gpu_memory_utilization=0.9)

    def engine(*, is_read_along: bool) -> SimulatedEngine:
        return engine_by_arithmetic(config, spec, DEVICES["h200"], is_read_along=is_read_along)

    rows = []
    for name, measured in _OFFLINE.items():
        report = _run(engine(is_read_along=False), from_workload(WORKLOADS[name](128_000), None))
        is_total = name == "prefill"
        metric = "tokens/s in and out" if is_total else "output tokens/s"
        origin = ", which one constant is from" if name == "lab16" else ""
        rows.append(
            Row(f"{name}, offline{origin}", metric, measured, report.total_tok_s if is_total else report.output_tok_s)
        )
    for rate, (speed, measured_ms) in _AT_ENGINE.items():
        found = _at_engine(engine(is_read_along=True), rate)
        rows.append(Row(f"{rate} requests/s, engine", "output tokens/s", speed, found.output_tok_s))
        rows += _latency_rows(f"{rate} requests/s, engine", measured_ms, [[one] for one in _latencies_ms(found)])
    for rate, (num, measured_ms) in _SERVING.items():
        served = engine(is_read_along=True)
        runs = [_run(served, _poisson(rate, num, 10 * nth + rate)) for nth in range(1, _NUM_LOADS + 1)]
        columns = _columns(runs)
        # The client that measured took the value at a place and not between two, which of 200 requests is the second.
        columns[1] = [1e3 * run.values["client_ttft_p99_s"] for run in runs]
        # And it was one process, in which a first token waits for half of the tokens that came with it.
        wait_ms = 1e3 * _CLIENT_TOKEN_S * statistics.median(run.running_mean for run in runs) / 2
        columns[:2] = [[one + wait_ms for one in column] for column in columns[:2]]
        rows += _latency_rows(f"{rate} requests/s, HTTP", measured_ms, columns)
    report = _run(engine(is_read_along=True), from_workload(sharegpt(128_000, seed=109), None))
    rows.append(Row("1,000 at once, HTTP", "output tokens/s", _ALL_AT_ONCE, report.output_tok_s))
    return rows


def _poisson(rate: float, num: int, seed: int) -> list[SimRequest]:
    """The kind of load that was sent: ShareGPT-like lengths and exponential gaps, both of one seed."""
    rng, now_s, times = random.Random(seed), 0.0, []
    for _ in range(num):
        times.append(now_s)
        now_s += rng.expovariate(rate)
    return from_workload(sharegpt(128_000, seed=seed, num=num), times)


def _at_engine(engine: SimulatedEngine, rate: int) -> RunReport:
    """The very loads that were measured, together, with nothing before or behind the engine."""
    config = replace(engine.config, first_token_s=0.0)
    seen = Seen()
    for seed in _ENGINE_SEEDS:
        fleet, requests, began_s = Fleet(config=config, cost=engine.cost), list[SimRequest](), 0.0
        for each, (num, _) in _SERVING.items():
            began_s = PAUSE_S if requests else 0.0
            arrivals = [began_s + at for at in arrival_times(num, each, seed=seed)]
            requests += from_workload(sharegpt(128_000, seed=seed, num=num), arrivals)
            if each == rate:
                break
        seen.add(fleet, requests, began_s)
    return seen.report()


def _run(engine: SimulatedEngine, requests: list[SimRequest]) -> RunReport:
    fleet = _fleet(engine)
    fleet.run(requests)
    report = fleet.report("", len(requests))
    first_s = sorted(fleet.times.first_s)
    report.values["client_ttft_p99_s"] = first_s[min(len(first_s) - 1, int(0.99 * len(first_s)))]
    return report


def _fleet(engine: SimulatedEngine) -> Fleet:
    return Fleet(config=engine.config, cost=engine.cost, front_s=engine.front_s)


def _latencies_ms(report: RunReport) -> list[float]:
    """First token p50 and p99, inter-token p50 and p99."""
    assert report.ttft_s is not None and report.itl_s is not None
    return [1e3 * s for s in (report.ttft_s.p50, report.ttft_s.p99, report.itl_s.p50, report.itl_s.p99)]


def _latency_rows(run: str, measured_ms: Sequence[float], predicted_ms: Sequence[Sequence[float]]) -> list[Row]:
    """`predicted_ms`: of each metric, by each of the loads."""
    metrics = ("first token p50, ms", "first token p99, ms", "inter-token p50, ms", "inter-token p99, ms")
    return [
        Row(run, metric, measured, statistics.median(values), tuple(sorted(values)))
        for metric, measured, values in zip(metrics, measured_ms, predicted_ms, strict=True)
    ]


# -- this machine, now

ROUNDS = 6
NUM_DRAWS = 5  # simulations of all rounds, since the noise of single steps is drawn
WARM_UP_SEED = 99
SHARE_OF_CAPACITY = 0.5  # of the requests/s with which a load that comes at once is served
_NUM_EACH = 12  # requests of a load, for each replica
_NUM_SCATTERED = 4  # of a load that comes scattered in time, to learn from
_SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_NUM_ALONE_OUT = 12


@dataclass(slots=True, frozen=True)
class Loads:
    """The requests of a round, by its seed: some to learn costs from, and others to be measured with."""

    vocab: int
    max_len: int
    num_replicas: int = 1

    def together(self, seed: int) -> Workload:
        return even_lengths(self.vocab, seed, 16 * self.num_replicas, (16, 200), (8, 48))

    def scattered(self, seed: int) -> Workload:
        return even_lengths(self.vocab, 2_000 + seed, _NUM_SCATTERED * self.num_replicas, (16, 200), (8, 48))

    def alone(self, seed: int) -> Workload:
        """Prompts to be computed each alone, so that a profile has steps of every width."""
        sizes = [size for size in _SIZES if size + _NUM_ALONE_OUT <= self.max_len]
        return [even_lengths(self.vocab, seed + 50 + size, 1, (size, size), (4, _NUM_ALONE_OUT))[0] for size in sizes]

    def at_once(self, seed: int) -> Workload:
        return even_lengths(self.vocab, 1_000 + seed, _NUM_EACH * self.num_replicas, (32, 200), (16, 48))

    def timed(self, seed: int) -> Workload:
        return self.at_once(500 + seed)

    def before(self, seed: int) -> list[Workload]:
        """What replicas have served before a round's `at_once`, of which they know what their steps cost."""
        return [self.together(WARM_UP_SEED), self.together(seed), *([one] for one in self.alone(seed))]


def measured_live(config: EngineConfig) -> list[Row]:
    """Rounds of steps to learn from, a batch, and timed arrivals, so that drift falls on all of them.

    With one thread the clock is that of the thread itself, which stands still while other programs have the core.
    """
    from quire import LLMEngine
    from quire.bench.machine import describe_engine, describe_machine
    from quire.bench.steps import take_cache_pages

    clock = time.process_time if config.num_threads == 1 else time.perf_counter
    engine = LLMEngine.from_config(config)
    take_cache_pages(engine.core)
    loads = Loads(usable_vocab(engine.spec.vocab_size), engine.max_model_len)

    def learn(seed: int) -> list[SimRequest]:
        """Requests to learn from: some at once, and then prompts of all sizes, each alone."""
        alone = loads.alone(seed)
        apart = from_workload(alone, [1e6 * (i + 1) for i in range(len(alone))])
        return from_workload(loads.together(seed), None) + apart

    _drive(engine, learn(WARM_UP_SEED)[:4], clock, Seen())
    recorded: list[RunReport] = []
    at_once, timed, arrivals = Seen(), Seen(), list[list[float]]()
    for seed in range(ROUNDS):
        recorded.append(_drive(engine, learn(seed), clock, Seen()))
        _drive(engine, from_workload(loads.at_once(seed), None), clock, at_once)
        if not seed:
            rate = SHARE_OF_CAPACITY * _NUM_EACH / at_once.seconds
        arrivals.append(arrival_times(_NUM_EACH, rate, seed=seed))
        _drive(engine, from_workload(loads.timed(seed), arrivals[seed]), clock, timed)
    profile = RecordedProfile(fit_steps(recorded), describe_engine(engine), describe_machine())
    simulated = engine_by_profile(profile, is_read_along=False)
    engine.close()
    drawn = [(Seen(), Seen()) for _ in range(NUM_DRAWS)]
    for seed in range(ROUNDS):
        for one_at_once, one_timed in drawn:
            one_at_once.add(_fleet(simulated), from_workload(loads.at_once(seed), None))
            one_timed.add(_fleet(simulated), from_workload(loads.timed(seed), arrivals[seed]))
    rows = rows_of_all(f"{_NUM_EACH} at once", at_once.report(), [one for one, _ in drawn])
    return rows + rows_of_all(f"{_NUM_EACH}, Poisson at half of that", timed.report(), [one for _, one in drawn])


def rows_of_all(run: str, measured: RunReport, drawn: Sequence[Seen]) -> list[Row]:
    """Of all rounds' requests together. `drawn`: with each drawing of the noise."""
    predicted = [one.report() for one in drawn]
    speed = statistics.median(one.output_tok_s for one in predicted)
    rows = [Row(run, "output tokens/s", measured.output_tok_s, speed)]
    return rows + _latency_rows(run, _latencies_ms(measured), _columns(predicted))


# -- replicas on this machine's cores, now


def measured_served(config: EngineConfig, num_replicas: int) -> list[Row]:
    from quire.bench.replicas import report_of_loads
    from quire.lab.served import serve_and_predict

    runs = serve_and_predict(config, num_replicas)
    print(
        f"{num_replicas} replicas of one thread on {runs.num_cores} cores, of which other programs left them "
        f"{100 * min(runs.core_shares):.0f} to {100 * max(runs.core_shares):.0f} %; {1e3 * runs.front_s:.1f} ms before "
        f"and behind an engine"
    )
    rows = rows_of_all("at once", report_of_loads(runs.at_once), runs.at_once_predicted)
    return rows + rows_of_all("Poisson at half of that", report_of_loads(runs.timed), runs.timed_predicted)


def _drive(engine: LLMEngine, requests: list[SimRequest], clock: Callable[[], float], seen: Seen) -> RunReport:
    """Serve them by a clock of its own, in which an engine that waits for the next arrival need not wait for it.
    Returns the steps."""
    from quire.bench.engines import forced_length
    from quire.bench.steps import watch_steps

    engine.reset_prefix_cache()
    steps: dict[str, list[float]] = {column: [] for column in ("seconds", *STEP_COLUMNS)}
    last_s: dict[int, tuple[int, float]] = {}  # by request: its tokens so far, and when the last came
    lines: dict[int, TokenSequence] = {}
    num_added, skipped_s = 0, -clock()
    with watch_steps(engine.core, every_step=False) as watch:
        while num_added < len(requests) or engine.has_unfinished_requests():
            now_s = clock() + skipped_s
            if num_added < len(requests) and not engine.has_unfinished_requests():
                skipped_s += max(0.0, requests[num_added].arrival_s - now_s)
                now_s = max(now_s, requests[num_added].arrival_s)
            while num_added < len(requests) and requests[num_added].arrival_s <= now_s:
                request = requests[num_added]
                assert request.prompt is not None
                added = engine.add_request(str(num_added), request.prompt, forced_length(request.output_len))
                lines[num_added] = added.sequences[0]
                num_added += 1
            began_s, num_before = clock(), len(watch.steps)
            engine.step()
            now_s = clock() + skipped_s
            if len(watch.steps) > num_before:
                steps["seconds"].append(clock() - began_s)
                for column in STEP_COLUMNS:
                    steps[column].append(float(getattr(watch.steps[-1].load, column)))
            for index, line in list(lines.items()):
                before = last_s.get(index)
                if line.num_output_tokens > (before[0] if before else 0):
                    if before is None:
                        seen.times.first_s.append(now_s - requests[index].arrival_s)
                    else:
                        seen.times.between(now_s - before[1], 1.0)
                    last_s[index] = (line.num_output_tokens, now_s)
                if line.finish_reason is not None:
                    del lines[index]
    seen.seconds += clock() + skipped_s
    seen.times.num_output_tokens += sum(request.output_len for request in requests)
    return RunReport(workload="live", steps=steps)


def _columns(runs: Sequence[RunReport]) -> list[list[float]]:
    """The latencies of each run, by metric."""
    return [list(column) for column in zip(*(_latencies_ms(run) for run in runs), strict=True)]
