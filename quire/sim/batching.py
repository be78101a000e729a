"""The same arrivals through two ways of batching: a batch that ends together, and the real scheduler's slots.

Static batching takes up to a batch of waiting requests, pads them to the longest, and runs until the last of them is
done. With continuous batching a slot is given away in the step after its request ends. Both pay for their steps by
the same cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.kv import KVManager
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel, SimRequest, SimRun, StepView

BLOCK_SIZE = 16
MAX_LEN = 2048
COST = CostModel()  # Llama-3.1-8B in bf16 on one H200


@dataclass(slots=True)
class Occupation:
    """A request in a slot: steps [start, end) of the run, of which the first `num_prompt_steps` ran its prompt, and
    those from `done` on, under static batching, only kept the slot."""

    index: int
    slot: int
    start: int
    done: int
    end: int
    num_prompt_steps: int = 1


@dataclass(slots=True)
class BatchRun:
    """One way of batching. Latencies in simulated seconds, in the order of the arrivals."""

    name: str
    num_slots: int
    num_steps: int
    seconds: float
    output_tokens: int
    useful_slot_steps: int  # slots in steps that computed for a request which was not done
    queued_steps: int = 0  # steps that began while somebody waited for a slot
    queued_useful_slot_steps: int = 0
    latencies_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    occupations: list[Occupation] = field(default_factory=list)
    width: list[tuple[float, int]] = field(default_factory=list)  # (time, requests not done in the batch) by step

    @property
    def utilisation(self) -> float:
        """Share of all slots in all steps that did useful work."""
        return self.useful_slot_steps / (self.num_steps * self.num_slots)

    @property
    def queued_utilisation(self) -> float | None:
        """The same over the steps in which somebody waited; None: nobody ever did."""
        return self.queued_useful_slot_steps / (self.queued_steps * self.num_slots) if self.queued_steps else None

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.seconds


def run_static(arrivals: Sequence[SimRequest], num_slots: int, cost: CostModel = COST) -> BatchRun:
    """A batch at a time: the requests that wait when the last batch ends, up to `num_slots`."""
    run = BatchRun("static", num_slots, 0, 0.0, sum(a.output_len for a in arrivals), 0)
    run.latencies_s, run.first_tokens_s = [0.0] * len(arrivals), [0.0] * len(arrivals)
    now_s, first = 0.0, 0
    while first < len(arrivals):
        now_s = max(now_s, arrivals[first].arrival_s)
        last = first
        while last < len(arrivals) and last - first < num_slots and arrivals[last].arrival_s <= now_s:
            last += 1
        now_s = _run_batch(run, arrivals, range(first, last), now_s, cost)
        first = last
    run.seconds = now_s
    return run


def _run_batch(run: BatchRun, arrivals: Sequence[SimRequest], batch: range, now_s: float, cost: CostModel) -> float:
    """Every row is as long as the longest prompt and runs as long as the longest output. Returns when it ends."""
    prompt_len = max(arrivals[i].prompt_len for i in batch)
    num_steps = max(arrivals[i].output_len for i in batch)
    start = run.num_steps
    for step in range(num_steps):
        num_tokens = prompt_len if step == 0 else 1
        begin = 0 if step == 0 else prompt_len + step - 1
        num_alive = sum(arrivals[i].output_len > step for i in batch)
        run.width.append((now_s, num_alive))
        run.useful_slot_steps += num_alive
        if batch.stop < len(arrivals) and arrivals[batch.stop].arrival_s <= now_s:
            run.queued_steps += 1
            run.queued_useful_slot_steps += num_alive
        now_s += cost.step_s([num_tokens] * len(batch), [begin] * len(batch))
        for i in batch:
            if step == 0:
                run.first_tokens_s[i] = now_s - arrivals[i].arrival_s
            if step == arrivals[i].output_len - 1:
                run.latencies_s[i] = now_s - arrivals[i].arrival_s
    run.num_steps += num_steps
    run.occupations += [
        Occupation(i, slot, start, start + arrivals[i].output_len, start + num_steps) for slot, i in enumerate(batch)
    ]
    return now_s


def run_continuous(arrivals: Sequence[SimRequest], num_slots: int, cost: CostModel = COST) -> BatchRun:
    """The real scheduler and KV manager, with blocks enough: slots are the only limit, as for static batching."""
    blocks_each = -(-max(a.prompt_len + a.output_len for a in arrivals) // BLOCK_SIZE)
    # One slot's worth more than needed, for the watermark.
    kv = KVManager(num_blocks=blocks_each * (num_slots + 1), block_size=BLOCK_SIZE, enable_prefix_caching=False)
    config = SchedulerConfig(
        max_num_seqs=num_slots,
        max_num_batched_tokens=max(8192, num_slots),
        max_model_len=max(MAX_LEN, blocks_each * 16),
    )
    sim = SimRun.build(kv, config, cost=cost)
    run = BatchRun("continuous", num_slots, 0, 0.0, sum(a.output_len for a in arrivals), 0)
    open_spans: dict[int, Occupation] = {}

    def look(view: StepView) -> None:
        step = sim.num_steps - 1
        run.width.append((view.start_s, len(view.running)))
        run.useful_slot_steps += len(view.plan.spans)
        if view.num_waiting:
            run.queued_steps += 1
            run.queued_useful_slot_steps += len(view.plan.spans)
        for seq in view.running:
            assert seq.row is not None
            occupation = open_spans.get(seq.seq_id)
            if occupation is None:
                occupation = open_spans[seq.seq_id] = Occupation(
                    int(seq.request.request_id), seq.row, step, step + 1, step + 1, 0
                )
                run.occupations.append(occupation)
            occupation.done = occupation.end = step + 1
            # Until the step that samples its first token.
            occupation.num_prompt_steps += seq.num_computed_tokens <= seq.num_prompt_tokens

    sim.run(arrivals, on_step=look)
    assert not sim.scheduler.stats.num_preemptions, "blocks were short: slots should be the only limit"
    run.num_steps, run.seconds = sim.num_steps, sim.clock.now_s
    for served in sim.served:
        assert served.finished_s is not None and served.first_token_s is not None
        run.latencies_s.append(served.finished_s - served.arrival.arrival_s)
        run.first_tokens_s.append(served.first_token_s - served.arrival.arrival_s)
    return run
