"""Replicas that share this machine's cores, served for real and predicted: the `served` part of the validation.

The replicas are engine processes of one thread each behind the product's router. They get requests to learn from and
other requests to be measured with, in turn. The steps of the first are recorded, with the time of a core that each
took. These alone tell the simulator what steps cost, and how much dearer they were in each round. The simulated engines
first serve what the measured ones had served before, and then the requests to be measured with, on as many cores. Those
cores are slower by what other programs took of them meanwhile, which is nothing on a quiet machine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.bench.machine import num_usable_cpus
from quire.bench.profile import STEP_COLUMNS
from quire.bench.replicas import ReplicaBench, TimedLoad, replica_bench
from quire.bench.report import RunReport
from quire.bench.workloads import Workload, arrival_times, usable_vocab
from quire.config import EngineConfig
from quire.engine.api import EngineInfo
from quire.errors import ConfigError
from quire.lab.simulated import engine_by_profile
from quire.lab.validation import NUM_DRAWS, PAUSE_S, ROUNDS, SHARE_OF_CAPACITY, WARM_UP_SEED, Loads, Seen
from quire.sim.fleet import Fleet
from quire.sim.profile import ProfileCost, RecordedProfile, fit_steps
from quire.sim.traffic import from_workload
from quire.step_costs import StepLoad


@dataclass(slots=True)
class ServedRuns:
    """What was measured, what was predicted of it, and what the prediction was made from."""

    num_cores: int
    front_s: float
    core_shares: list[float] = field(default_factory=list)  # of each load that was measured
    at_once: list[TimedLoad] = field(default_factory=list)
    timed: list[TimedLoad] = field(default_factory=list)
    # All loads together, by each drawing of the noise.
    at_once_predicted: list[Seen] = field(default_factory=lambda: [Seen() for _ in range(NUM_DRAWS)])
    timed_predicted: list[Seen] = field(default_factory=lambda: [Seen() for _ in range(NUM_DRAWS)])


@dataclass(slots=True)
class _Round:
    """The loads of one round."""

    together: TimedLoad
    alone: list[TimedLoad]
    scattered: TimedLoad
    at_once: TimedLoad
    timed: TimedLoad
    arrivals: list[float]

    @property
    def learned(self) -> list[TimedLoad]:
        """What the simulator may learn costs from."""
        return [self.together, *self.alone, self.scattered]


def serve_and_predict(config: EngineConfig, num_replicas: int) -> ServedRuns:
    if config.given & {"device", "num_threads"} and (config.device, config.num_threads) != ("cpu", 1):
        raise ConfigError("--validate served is for replicas of one thread on the CPU: leave --device and threads out")
    config = config.replace(device="cpu", num_threads=1, data_parallel_size=num_replicas)
    return asyncio.run(_serve_and_predict(config, num_replicas))


async def _serve_and_predict(config: EngineConfig, num_replicas: int) -> ServedRuns:
    async with replica_bench(config, num_replicas) as bench:
        info = bench.info
        loads = Loads(usable_vocab(info.vocab_size), info.max_model_len, num_replicas)
        await bench.run(loads.together(WARM_UP_SEED))  # to warm up
        rounds: list[_Round] = []
        for seed in range(ROUNDS):
            rounds.append(await _measure(bench, loads, seed, rounds[0].at_once if rounds else None))
    cost = fit_steps([_report(bench.steps, [load for one in rounds for load in one.learned])])
    engine = engine_by_profile(RecordedProfile(cost, _settings(config, info), {}))
    runs = ServedRuns(num_usable_cpus(), _front_s(bench.steps, [load for one in rounds for load in one.alone]))

    def predict(
        drawn: list[Seen], times: float, before: Sequence[Workload], workload: Workload, arrivals: Sequence[float]
    ) -> None:
        """`times`: how much longer steps take than on average of all rounds, or by what others have of the cores."""
        requests, began_s = [], 0.0
        for each in before:
            requests += from_workload(each, [began_s] * len(each))
            began_s += PAUSE_S
        requests += from_workload(workload, [began_s + at for at in arrivals])
        for one in drawn:
            fleet = Fleet(
                config=engine.config,
                cost=cost.slower(times),
                num_replicas=num_replicas,
                front_s=runs.front_s,
                num_cores=runs.num_cores,
            )
            one.add(fleet, requests, began_s)

    for seed, one in enumerate(rounds):
        dearer = _mean_stray(cost, _report(bench.steps, one.learned))
        shares = [_core_share(bench.steps, load, runs.num_cores) for load in (one.at_once, one.timed)]
        before, at_once = loads.before(seed), loads.at_once(seed)
        runs.core_shares += shares
        runs.at_once.append(one.at_once)
        predict(runs.at_once_predicted, dearer / shares[0], before, at_once, [0.0] * len(at_once))
        runs.timed.append(one.timed)
        predict(runs.timed_predicted, dearer / shares[1], [*before, at_once], loads.timed(seed), one.arrivals)
    return runs


async def _measure(bench: ReplicaBench, loads: Loads, seed: int, first_at_once: TimedLoad | None) -> _Round:
    together = await bench.run(loads.together(seed))
    alone = [await bench.run([one]) for one in loads.alone(seed)]
    at_once = await bench.run(loads.at_once(seed))
    capacity = first_at_once or at_once
    rate = SHARE_OF_CAPACITY * len(capacity.first_s) / (capacity.ended_s - capacity.began_s)
    scattered = loads.scattered(seed)
    learned = await bench.run(scattered, arrival_times(len(scattered), rate, seed=100 + seed))
    arrivals = arrival_times(len(at_once.first_s), rate, seed=seed)
    return _Round(together, alone, learned, at_once, await bench.run(loads.timed(seed), arrivals), arrivals)


def _settings(config: EngineConfig, info: EngineInfo) -> dict[str, object]:
    names = ("device", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    found: dict[str, object] = {name: getattr(info, name) for name in (*names, "enable_prefix_caching")}
    return found | {"enable_chunked_prefill": config.enable_chunked_prefill}


# -- from recorded steps

Steps = dict[str, list[float]]


def _report(replicas: Sequence[Steps], loads: Sequence[TimedLoad]) -> RunReport:
    """The columns that a cost is fitted to, of the steps of these loads."""
    kept: Steps = {name: [] for name in ("seconds", *STEP_COLUMNS)}
    for steps in replicas:
        for i, span in enumerate(zip(steps["began_s"], steps["ended_s"], strict=True)):
            if any(_is_within(span, load) for load in loads):
                for name, values in kept.items():
                    values.append(steps[name][i])
    return RunReport(workload="", steps=kept)


def _mean_stray(cost: ProfileCost, report: RunReport) -> float:
    """How much longer these steps took than the cost says: machines are faster and slower from minute to minute."""
    columns = [map(int, report.steps[name]) for name in STEP_COLUMNS]
    loads = [StepLoad(**dict(zip(STEP_COLUMNS, values, strict=True))) for values in zip(*columns, strict=True)]
    return sum(report.steps["seconds"]) / sum(map(cost.fitted_s, loads))


def _is_within(span: tuple[float, float], load: TimedLoad) -> bool:
    return load.began_s <= span[0] and span[1] <= load.ended_s


def _spans(replicas: Sequence[Steps], load: TimedLoad) -> Iterator[tuple[float, float, float]]:
    """When each step of a load began and ended, and the processor's seconds that it took."""
    for steps in replicas:
        for began_s, ended_s, step_s in zip(steps["began_s"], steps["ended_s"], steps["step_s"], strict=True):
            if _is_within((began_s, ended_s), load):
                yield began_s, ended_s, step_s


def _core_share(replicas: Sequence[Steps], load: TimedLoad, num_cores: int) -> float:
    """The processor's seconds of all steps over those that would have been theirs on cores that nobody else uses."""
    taken_s = offered_s = before_s = 0.0
    changes: list[tuple[float, int]] = []
    for began_s, ended_s, step_s in _spans(replicas, load):
        taken_s += step_s
        changes += [(began_s, 1), (ended_s, -1)]
    num_busy = 0
    for at_s, change in sorted(changes):
        offered_s += min(num_busy, num_cores) * (at_s - before_s)
        num_busy, before_s = num_busy + change, at_s
    return min(1.0, taken_s / offered_s)


def _front_s(replicas: Sequence[Steps], alone: Sequence[TimedLoad]) -> float:
    """What a first token takes beside the steps of its prompt, where no other request is under way."""
    found = []
    for load in alone:
        first_at_s = load.began_s + load.first_s[0]
        steps_s = sum(ended_s - began_s for began_s, ended_s, _ in _spans(replicas, load) if ended_s <= first_at_s)
        found.append(max(0.0, load.first_s[0] - steps_s))
    return statistics.median(found)
