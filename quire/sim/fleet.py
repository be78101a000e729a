"""Replicas behind a router in one virtual time, and what their clients saw of them."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from quire.bench.report import KVReport, Percentiles, RunReport, Sample
from quire.errors import ConfigError
from quire.request import Request
from quire.sim.apart import Handovers, Link
from quire.sim.cores import OwnDevices, SharedCores, StepEnds
from quire.sim.cost import StepCost
from quire.sim.policies import POLICIES, Policy
from quire.sim.replica import Replica, ReplicaConfig, TokenTimes
from quire.sim.traffic import SimRequest

_NUM_SAMPLES = 200  # readings over a run


@dataclass(slots=True, kw_only=True)
class Fleet:
    """`front_s`: HTTP, JSON, tokenizing and the way to the engine and back, of which clients see the sum.

    `roles`: of each replica, prefill, decode or both; blocks go from the first kind to the second over `link`.
    `num_cores`: that the replicas share, one thread each; None: each has a device of its own."""

    config: ReplicaConfig
    cost: StepCost
    num_replicas: int = 1
    policy: str = "first-token"
    front_s: float = 0.0
    num_cores: int | None = None
    roles: tuple[str, ...] = ()
    link: Link = field(default_factory=lambda: Link(bytes_per_s=50e9))
    replicas: list[Replica] = field(default_factory=list)
    times: TokenTimes = field(default_factory=TokenTimes)
    samples: list[Sample] = field(default_factory=list)
    now_s: float = 0.0
    wall_s: float = 0.0  # real seconds that the simulation took
    num_done: int = 0
    first_arrival_s: float = 0.0
    num_moved: int = 0

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"the number of replicas must be at least 1, got {self.num_replicas}")
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown policy {self.policy!r}: there are {', '.join(POLICIES)}")
        if self.roles and len(self.roles) != self.num_replicas:
            raise ConfigError(f"{len(self.roles)} roles are given, and there are {self.num_replicas} replicas")
        if self.num_cores is not None and self.num_cores < 1:
            raise ConfigError(f"the number of cores must be at least 1, got {self.num_cores}")
        can_leap = self.config.can_leap and self.num_cores is None
        config = replace(self.config, has_peers=bool(self.roles), can_leap=can_leap)
        self.replicas = [Replica(config, self.cost, self.times) for _ in range(self.num_replicas)]

    def run(self, requests: Sequence[SimRequest], *, from_s: float | None = None, until_s: float | None = None) -> None:
        """Serve them all, or as far as they get until `until_s`; of what comes before `from_s` no times are kept."""
        started = time.perf_counter()
        block_bytes = self.config.scheduler.kv_bytes_per_block
        roles = self.roles or ("both",) * self.num_replicas
        moving = Handovers(self.replicas, roles, self.link, block_bytes)
        arriving = moving.prefilling
        policy = POLICIES[self.policy]([self.replicas[index] for index in arriving], lambda: self.now_s)
        for member in arriving:
            self.replicas[member].on_first_token = partial(self._on_first_token, policy, moving, member)
        moving.on_leave = policy.on_end
        for replica in self.replicas:
            replica.on_end = partial(self._on_end, policy)
            replica.on_fetched = moving.on_fetched
        self.first_arrival_s = requests[0].arrival_s if requests else 0.0
        num_samples = max(20, min(_NUM_SAMPLES, 20_000 // self.num_replicas))
        sample_s = max(requests[-1].arrival_s - self.first_arrival_s, 1.0) / num_samples if requests else 1.0
        next_sample_s = self.first_arrival_s
        coming = _engine_requests(requests)
        arrival = next(coming, None)
        ends: StepEnds = (
            OwnDevices(self.replicas) if self.num_cores is None else SharedCores(self.replicas, self.num_cores)
        )
        while True:
            next_s = step_s = ends.next_s
            if moving.timers:
                next_s = min(step_s, moving.timers[0][0])
            if arrival is None and next_s == math.inf:
                break
            if arrival is not None and arrival.arrival_s + self.front_s <= next_s:
                now_s, index = arrival.arrival_s + self.front_s, None
            elif moving.timers and moving.timers[0][0] <= next_s:
                now_s, _, arrive = heapq.heappop(moving.timers)
                self.now_s = now_s
                arrive(now_s)
                self._note(ends, moving.touched)
                continue
            else:
                now_s, index = step_s, ends.pop()
                if index is None:
                    continue
            if until_s is not None and now_s > until_s:
                break
            self.now_s = now_s
            if from_s is not None and now_s >= from_s:
                self.times.forget()
                from_s = None
            while now_s >= next_sample_s:
                self.samples.append(self._sample(next_sample_s - self.first_arrival_s))
                next_sample_s += sample_s
            if index is None:
                assert arrival is not None
                direct = moving.direct(arrival) if "decode" in self.roles else None
                index = arriving[policy.choose(arrival)] if direct is None else direct
                replica = self.replicas[index]
                before_s = replica.due_s
                replica.add(arrival, now_s)
                arrival = next(coming, None)
                if replica.due_s == before_s:
                    continue
            else:
                replica = self.replicas[index]
                replica.advance()
            moving.touched.add(index)
            self._note(ends, moving.touched)
        self.num_moved = moving.num_moved
        self.wall_s = time.perf_counter() - started

    def _note(self, ends: StepEnds, touched: set[int]) -> None:
        ends.note(touched, self.now_s)
        touched.clear()

    def _on_first_token(self, policy: Policy, moving: Handovers, index: int, request: Request) -> None:
        policy.on_first_token(request)
        if self.roles and self.roles[index] == "prefill":
            begun_s = request.sequences[0].first_scheduled_s
            assert begun_s is not None
            moving.on_first_token(index, request, self.now_s, begun_s)

    def _on_end(self, policy: Policy, request: Request) -> None:
        self.num_done += 1
        policy.on_end(request)

    def _sample(self, t_s: float) -> Sample:
        used = sum(replica.kv.num_used_blocks for replica in self.replicas)
        return Sample(
            t_s=t_s,
            running=sum(replica.scheduler.num_running for replica in self.replicas),
            waiting=sum(replica.num_requests - replica.scheduler.num_running for replica in self.replicas),
            kv_usage=used / (self.num_replicas * self.config.num_blocks),
            prompt_tokens=self.times.num_prompt_tokens,
            output_tokens=sum(replica.scheduler.stats.num_decode_tokens for replica in self.replicas),
        )

    def report(self, name: str, num_requests: int) -> RunReport:
        """A report like that of a measured run, so that the two can be compared."""
        times, seconds = self.times, max(self.now_s - self.first_arrival_s, 1e-9)
        replicas = self.replicas
        stats = [replica.scheduler.stats for replica in replicas]
        prefix = [replica.kv.counters.prefix for replica in replicas]
        pools = [replica.kv.pool for replica in replicas]
        busy_s = sum(replica.busy_s for replica in replicas)
        num_steps = sum(one.num_steps for one in stats)
        kv = KVReport(
            num_blocks=self.num_replicas * self.config.num_blocks,
            block_size=self.config.block_size,
            block_bytes=self.config.scheduler.kv_bytes_per_block,
            occupancy_mean=_ratio(sum(r.block_seconds for r in replicas), busy_s * self.config.num_blocks),
            occupancy_max=max(1 - pool.min_free_blocks / self.config.num_blocks for pool in pools),
            peak_blocks=max(self.config.num_blocks - pool.min_free_blocks for pool in pools),
            min_available=min(pool.min_free_blocks for pool in pools),
            blocks_allocated=sum(pool.num_allocated_blocks for pool in pools),
            blocks_freed=sum(pool.num_freed_blocks for pool in pools),
            churn_per_s=sum(pool.num_allocated_blocks + pool.num_freed_blocks for pool in pools) / seconds,
            preemptions={"recompute": sum(one.num_recompute_preemptions for one in stats)},
            recomputed_tokens=sum(one.num_recomputed_tokens for one in stats),
            prefix_query_tokens=sum(one.num_query_tokens for one in prefix),
            prefix_hit_tokens=sum(one.num_hit_tokens for one in prefix),
            evictions=sum(replica.kv.cache.num_evictions for replica in replicas),
        )
        report = RunReport(
            workload=name,
            engine="sim",
            requests=num_requests,
            completed=self.num_done - sum(times.errors.values()),
            errors=dict(times.errors),
            prompt_tokens=times.num_prompt_tokens,
            output_tokens=times.num_output_tokens,
            seconds=seconds,
            output_tok_s=times.num_output_tokens / seconds,
            total_tok_s=(times.num_output_tokens + times.num_prompt_tokens) / seconds,
            ttft_s=Percentiles.of(times.first_s),
            itl_s=weighted_percentiles(times.between_s, times.between_counts),
            e2e_s=Percentiles.of(times.whole_s),
            num_steps=num_steps,
            running_mean=_ratio(sum(one.num_decode_tokens for one in stats), num_steps),
            kv=kv,
            device_percent=100 * _ratio(busy_s, seconds * self.num_replicas),
            samples=self.samples,
        )
        report.values = {
            "replicas": float(self.num_replicas),
            "simulation_wall_s": self.wall_s,
            "simulated_steps_per_s": _ratio(num_steps, self.wall_s),
            "moved_requests": float(self.num_moved),
            "events_per_s": _ratio(sum(r.num_events for r in replicas) + num_requests, self.wall_s),
        }
        return report


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _engine_requests(requests: Sequence[SimRequest]) -> Iterator[Request]:
    """Made one at a time: the tokens of a million prompts would not fit."""
    before_s = -1e300
    for index, one in enumerate(requests):
        assert one.arrival_s >= before_s, "arrivals are not in order"
        before_s = one.arrival_s
        yield one.for_engine(index)


def weighted_percentiles(values: Sequence[float], counts: Sequence[float]) -> Percentiles | None:
    """Percentiles of values that each count as often as their count says."""
    import numpy as np

    if not len(values):
        return None
    array, weights = np.asarray(values), np.asarray(counts)
    order = np.argsort(array)
    array, cumulative = array[order], np.cumsum(weights[order])
    total = float(cumulative[-1])
    p50, p95, p99 = (float(array[np.searchsorted(cumulative, q * total)]) for q in (0.50, 0.95, 0.99))
    mean = float(np.average(np.asarray(values), weights=weights))
    return Percentiles(int(total), mean, p50, p95, p99, float(array[-1]))
