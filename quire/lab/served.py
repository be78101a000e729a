"""Replicas that share this machine's cores, served for real and predicted: the `served` part of the validation.

The replicas are engine processes of one thread each behind the product's router. They get requests to learn from and
other requests to be measured with, in turn. Of the first their steps are kept, with what each took of a core; from
those alone the simulator knows what steps cost. It then serves the second on as many cores, which are slower by what
other programs took of them meanwhile: nothing, on a quiet machine.
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
from quire.bench.workloads import Workload, arrival_times, even_lengths, usable_vocab
from quire.config import EngineConfig
from quire.engine.api import EngineInfo
from quire.errors import ConfigError
from quire.lab.simulated import engine_by_profile
from quire.lab.validation import prompts_of_all_sizes
from quire.sim.fleet import Fleet
from quire.sim.profile import RecordedProfile, fit_steps
from quire.sim.traffic import from_workload

ROUNDS = 6
_NUM_EACH = 12  # requests of a load, for each replica
_SHARE_OF_CAPACITY = 0.5  # of the requests/s with which a load that comes at once is served


@dataclass(slots=True)
class ServedRuns:
    """What was measured, what was predicted of it, and what the prediction was made from."""

    num_cores: int
    front_s: float
    core_shares: list[float] = field(default_factory=list)  # of each load that was measured
    at_once: list[RunReport] = field(default_factory=list)
    timed: list[RunReport] = field(default_factory=list)
    at_once_predicted: list[RunReport] = field(default_factory=list)
    timed_predicted: list[RunReport] = field(default_factory=list)


@dataclass(slots=True)
class _Round:
    """The loads of one round. `alone` and `together` are learned from."""

    together: TimedLoad
    alone: list[TimedLoad]
    at_once: TimedLoad
    timed: TimedLoad
    arrivals: list[float]


@dataclass(slots=True, frozen=True)
class _Loads:
    """The requests of a round, by its seed."""

    vocab: int
    max_len: int
    num_replicas: int

    def together(self, seed: int) -> Workload:
        return even_lengths(self.vocab, seed, 16 * self.num_replicas, (16, 200), (8, 48))

    def alone(self, seed: int) -> Workload:
        return prompts_of_all_sizes(self.vocab, seed, self.max_len)

    def at_once(self, seed: int) -> Workload:
        return even_lengths(self.vocab, 1_000 + seed, _NUM_EACH * self.num_replicas, (32, 200), (16, 48))

    def timed(self, seed: int) -> Workload:
        return self.at_once(500 + seed)


def serve_and_predict(config: EngineConfig, num_replicas: int) -> ServedRuns:
    if config.given & {"device", "num_threads"} and (config.device, config.num_threads) != ("cpu", 1):
        raise ConfigError("--validate served is for replicas of one thread on the CPU: leave --device and threads out")
    config = config.replace(device="cpu", num_threads=1, data_parallel_size=num_replicas)
    return asyncio.run(_serve_and_predict(config, num_replicas))


async def _serve_and_predict(config: EngineConfig, num_replicas: int) -> ServedRuns:
    async with replica_bench(config, num_replicas) as bench:
        info = bench.info
        loads = _Loads(usable_vocab(info.vocab_size), info.max_model_len, num_replicas)
        await bench.run(loads.together(99))  # to warm up
        rounds: list[_Round] = []
        for seed in range(ROUNDS):
            rounds.append(await _measure(bench, loads, seed, rounds[0].at_once if rounds else None))
    learned = [load for one in rounds for load in (one.together, *one.alone)]
    cost = fit_steps([RunReport(workload="", steps=_steps_during(replica, learned)) for replica in bench.steps])
    engine = engine_by_profile(RecordedProfile(cost, _settings(config, info), {}))
    runs = ServedRuns(num_usable_cpus(), _front_s(bench.steps, [load for one in rounds for load in one.alone]))

    def predict(measured: TimedLoad, workload: Workload, arrivals: list[float] | None) -> RunReport:
        share = _core_share(bench.steps, measured, runs.num_cores)
        runs.core_shares.append(share)
        fleet = Fleet(
            config=engine.config,
            cost=cost.slower(1 / share),
            num_replicas=num_replicas,
            front_s=runs.front_s,
            num_cores=runs.num_cores,
        )
        fleet.run(from_workload(workload, arrivals))
        return fleet.report("", len(workload))

    for seed, one in enumerate(rounds):
        runs.at_once.append(one.at_once.report())
        runs.at_once_predicted.append(predict(one.at_once, loads.at_once(seed), None))
        runs.timed.append(one.timed.report())
        runs.timed_predicted.append(predict(one.timed, loads.timed(seed), one.arrivals))
    return runs


async def _measure(bench: ReplicaBench, loads: _Loads, seed: int, first_at_once: TimedLoad | None) -> _Round:
    together = await bench.run(loads.together(seed))
    alone = [await bench.run([one]) for one in loads.alone(seed)]
    at_once = await bench.run(loads.at_once(seed))
    capacity = first_at_once or at_once
    rate = _SHARE_OF_CAPACITY * len(capacity.first_s) / (capacity.ended_s - capacity.began_s)
    arrivals = arrival_times(len(at_once.first_s), rate, seed=seed)
    return _Round(together, alone, at_once, await bench.run(loads.timed(seed), arrivals), arrivals)


def _settings(config: EngineConfig, info: EngineInfo) -> dict[str, object]:
    names = ("device", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    found: dict[str, object] = {name: getattr(info, name) for name in (*names, "enable_prefix_caching")}
    return found | {"enable_chunked_prefill": config.enable_chunked_prefill}


# -- from recorded steps

Steps = dict[str, list[float]]


def _steps_during(steps: Steps, loads: Sequence[TimedLoad]) -> Steps:
    """The columns that a cost is fitted to, of the steps of these loads."""
    spans = list(zip(steps["began_s"], steps["ended_s"], strict=True))
    kept = [i for i, span in enumerate(spans) if any(_is_within(span, load) for load in loads)]
    return {name: [steps[name][i] for i in kept] for name in ("seconds", *STEP_COLUMNS)}


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
