"""How KV memory is used under one policy: every slot of the pool accounted for, at every step of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from quire.kv import KVManager
from quire.request import Sequence as TokenSequence
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel, SimClock, SimRequest, SimRun, StepView
from quire.sim.drive import Execute
from quire.sim.reservation import Allocator, Buddy, Policy, ReservedKV

MAX_NUM_SEQS = 256
STEP_TOKENS = 2560
PAGED = "paged"  # the key of blocks, where a policy's own would stand


@dataclass(slots=True, frozen=True)
class Usage:
    """Slots of the whole pool, by what is in them. They add up to all that the pool has."""

    tokens: float  # hold K and V
    reserved: float  # taken, and will hold some before their request ends
    internal: float  # taken, and will never hold any: over-reservation, or the end of a last block
    rounding: float  # lost to the allocator's chunk sizes
    free: float  # in nobody's hands, while somebody waits for memory

    @property
    def external(self) -> float:
        """The paper's "external fragmentation and others"."""
        return self.rounding + self.free


@dataclass(slots=True)
class Run:
    """One policy's run. Shares are percent of the pool, averaged over the steps in which somebody waited."""

    key: str
    name: str
    usage: Usage  # percent
    width: float  # requests that ran at once
    max_width: int
    output_tok_s: float
    num_steps: int
    num_sampled: int
    num_preemptions: int
    recomputed_percent: float  # of all tokens computed, those computed again after a preemption
    timeline: list[tuple[float, int, float]] = field(default_factory=list)  # (time, width, percent holding tokens)


def reserved_usage(kv: ReservedKV, running: Sequence[TokenSequence]) -> Usage:
    """What regions hold once the step has run."""
    tokens = reserved = internal = rounding = given = 0
    for seq in running:
        reservation = kv.tables[seq.seq_id]
        region, computed = reservation.region, seq.num_computed_tokens
        tokens += computed
        reserved += reservation.num_used_at_end - computed
        internal += region.num_asked - reservation.num_used_at_end
        rounding += region.num_given - region.num_asked
        given += region.num_given
    return Usage(tokens, reserved, internal, rounding, kv.num_blocks - given)


def paged_usage(kv: KVManager, running: Sequence[TokenSequence]) -> Usage:
    """What blocks hold once the step has run. A prompt has its blocks before all of its chunks have run."""
    tokens = reserved = given = 0
    for seq in running:
        table = kv.tables[seq.seq_id]
        tokens += seq.num_computed_tokens
        reserved += max(0, table.num_tokens - seq.num_computed_tokens)
        given += len(table.block_ids) * kv.block_size
    return Usage(tokens, reserved, given - tokens - reserved, 0, kv.num_blocks * kv.block_size - given)


def run_policy(
    arrivals: Sequence[SimRequest],
    policy: Policy | None,
    *,
    num_slots: int,
    max_model_len: int,
    cost: CostModel,
    block_size: int = 16,
    allocator: Callable[[int], Allocator] = Buddy,
    make_executor: Callable[[KVManager, SchedulerConfig, SimClock], Execute] | None = None,
    on_step: Callable[[StepView, Usage], None] | None = None,
) -> Run:
    """Serve the arrivals under one policy; None is blocks."""
    config = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=max(STEP_TOKENS, max_model_len),
        max_model_len=max_model_len,
        # Orca runs a prompt whole; so does this, for all four alike.
        enable_chunked_prefill=False,
        preemption="recompute",
    )
    measure: Callable[[Sequence[TokenSequence]], Usage]
    on_add: Callable[[TokenSequence, SimRequest], None] | None = None
    if policy is None:
        paged = KVManager(num_blocks=num_slots // block_size, block_size=block_size, enable_prefix_caching=False)
        run = SimRun.build(paged, config, cost=cost, make_executor=make_executor)

        def measure(running: Sequence[TokenSequence]) -> Usage:
            return paged_usage(paged, running)
    else:
        reserved = ReservedKV(allocator(num_slots), policy)
        # The scheduler asks nothing of a KV manager that this one does not have.
        run = SimRun.build(cast(KVManager, reserved), config, cost=cost, make_executor=make_executor)

        def measure(running: Sequence[TokenSequence]) -> Usage:
            return reserved_usage(reserved, running)

        def on_add(seq: TokenSequence, arrival: SimRequest) -> None:
            reserved.expect(seq.seq_id, arrival.prompt_len, arrival.output_len)

    samples: list[tuple[float, int, Usage, int]] = []  # of steps in which somebody waited
    widths: list[tuple[float, int, float]] = []

    def look(view: StepView) -> None:
        usage = measure(view.running)
        if on_step is not None:
            on_step(view, usage)
        widths.append((view.start_s, len(view.running), 100.0 * usage.tokens / num_slots))
        if view.num_waiting:
            samples.append((view.start_s, len(view.running), usage, sum(view.plan.spans.samples)))

    run.run(arrivals, on_add=on_add, on_step=look)
    return _summarize(run, policy, samples, widths, num_slots)


def _summarize(
    run: SimRun,
    policy: Policy | None,
    samples: list[tuple[float, int, Usage, int]],
    widths: list[tuple[float, int, float]],
    num_slots: int,
) -> Run:
    # At first every request is young and memory holds less than it will: the first fifth is not counted.
    steady = samples[len(samples) // 5 :]
    assert len(steady) > 1, "nobody waited for memory: more requests are needed, or a smaller pool"
    usage = Usage(
        **{
            name: 100.0 * sum(getattr(sample[2], name) for sample in steady) / len(steady) / num_slots
            for name in ("tokens", "reserved", "internal", "rounding", "free")
        }
    )
    stats = run.scheduler.stats
    every = max(1, len(widths) // 400)
    return Run(
        key=PAGED if policy is None else policy.key,
        name="blocks" if policy is None else policy.name,
        usage=usage,
        width=sum(sample[1] for sample in steady) / len(steady),
        max_width=max(sample[1] for sample in steady),
        output_tok_s=sum(sample[3] for sample in steady[:-1]) / (steady[-1][0] - steady[0][0]),
        num_steps=run.num_steps,
        num_sampled=len(steady),
        num_preemptions=stats.num_preemptions,
        recomputed_percent=100.0 * stats.num_recomputed_tokens / (stats.num_prefill_tokens + stats.num_decode_tokens),
        timeline=widths[::every],
    )
