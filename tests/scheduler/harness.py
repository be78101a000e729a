"""A scheduler on the real KV manager and the simulated executor, with the engine's loop around them."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from sim_executor import SimExecutor
from sim_language import ToyLanguage
from sim_memory import SimStore

from quire.kv import KVManager
from quire.params import SamplingSpec
from quire.plan import StepPlan, StepResult
from quire.request import Request, Sequence, SequenceState
from quire.scheduler import Drafter, Scheduler, SchedulerConfig, SequenceUpdate
from quire.sim import CostModel, SimClock

_ids = itertools.count()


def make_request(
    prompt: int | list[int] = 8,
    *,
    max_tokens: int = 8,
    n: int = 1,
    seed: int = 0,
    ends: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    min_tokens: int = 0,
    request_id: str | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    **fields: Any,
) -> Request:
    """An int prompt is a length: tokens of its own, so that nothing is shared by accident."""
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = [(number * 7919 + i * 31) % 997 for i in range(prompt)]
    spec = SamplingSpec(
        seed=seed, min_tokens=min_tokens, end_token_ids=ends, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    return Request(
        request_id=request_id or f"r{number}",
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        end_token_ids=frozenset(ends),
        eos_token_ids=frozenset(eos),
        spec=spec,
        n=n,
        **fields,
    )


class Proposer(Drafter):
    """A drafter that says of each sequence that decodes what it proposes for it."""

    def propose(self, seq: Sequence) -> list[int] | int:
        return 0

    def draft(self, running: list[Sequence], most: int, *, ends_together: bool = False) -> dict[int, list[int] | int]:
        decoding = [s for s in running if s.num_computed_tokens == len(s.token_ids) + s.num_pending_tokens - 1]
        return {seq.seq_id: drafts for seq in decoding if (drafts := self.propose(seq))}


class Rig:
    """The loop, one call a step. `history` has every plan, `updates` everything that came out, per sequence."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = 4,
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        depth: int = 1,
        transfer_steps: int = 0,
        vocab_size: int = 1000,
        windows: tuple[int | None, ...] = (None,),
        enable_prefix_caching: bool = True,
        cost: CostModel | None = None,
        fault: Any = None,
        verify: bool = True,
        executor: Any = None,
        host_block_s: float | None = None,
        stores: tuple[SimStore, ...] = (),
        **config: Any,
    ) -> None:
        self.clock = SimClock()
        config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200, **config}
        self.kv = KVManager(
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            host_block_s=host_block_s,
            stores=stores,
            windows=windows,
            max_span_tokens=config["max_num_batched_tokens"],
            watermark=watermark,
            enable_prefix_caching=enable_prefix_caching,
            clock=self.clock,
        )
        depth = depth if executor is None else executor.depth
        self.config = SchedulerConfig(max_in_flight=depth, **config)
        self.scheduler = Scheduler(self.config, self.kv, clock=self.clock)
        self.executor = executor or SimExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            stores=stores,
            max_num_seqs=self.config.max_num_seqs,
            windows=windows,
            depth=depth,
            language=ToyLanguage(vocab_size),
            cost=cost,
            clock=self.clock,
            transfer_steps=transfer_steps,
            verify=verify,
            fault=fault,
        )
        self.tickets: deque[int] = deque()
        self.history: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.updates: dict[Sequence, list[SequenceUpdate]] = {}
        self.checking = True

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def submit(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.history.append(plan)
            self.tickets.append(self.executor.submit(plan))
        return plan

    def collect(self) -> list[SequenceUpdate]:
        result = self.executor.collect(self.tickets.popleft())
        self.results.append(result)
        return self.note(self.scheduler.update(result))

    def step(self) -> list[SequenceUpdate]:
        while len(self.tickets) < self.executor.depth and self.submit() is not None:
            pass
        updates = self.collect() if self.tickets else self.note(self.scheduler.take_failures())
        if self.checking:
            self.kv.check()
            self.scheduler.check()
        return updates

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        return self.note(self.scheduler.abort(request_id))

    def note(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        for update in updates:
            seen = self.updates.setdefault(update.seq, [])
            assert not any(u.finished for u in seen), "news of a sequence that had ended"
            assert update.finished == (update.seq.state is SequenceState.FINISHED)
            seen.append(update)
        return updates

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def check_idle(self) -> None:
        """Everything is back where it was."""
        self.kv.check()
        assert not self.scheduler.has_work
        assert self.kv.num_used_blocks == 0
        assert self.kv.num_free_blocks + self.kv.num_pinned_blocks == self.kv.num_blocks
        assert self.kv.host.num_free_blocks == self.kv.host.num_blocks
        life = self.scheduler._life
        assert life.rows.num_free == self.config.max_num_seqs
        assert not (life.queue or life.running or life.requests or life.reserved_rows)
        assert not (life.lost_tokens or life.paid_tokens)
        assert not (life.queue.num_active_tenants or life.queue.num_waiting_tokens)
        assert not (life.moving or life.loading or life.loaded or self.scheduler._prompt_logprobs)

    def outputs(self, request: Request) -> list[list[int]]:
        """What the updates said, which must be what the sequences hold."""
        lines = []
        for seq in request.sequences:
            told = [token for update in self.updates.get(seq, []) for token in update.new_token_ids]
            assert told == seq.output_token_ids
            lines.append(told)
        return lines


def spans(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    assert plan is not None
    s = plan.spans
    return list(zip(s.rows, s.num_tokens, s.samples, strict=True))


def alone(request: Request, vocab_size: int = 1000) -> list[list[int]]:
    """The outputs of the same request with a large pool to itself."""
    copy = Request(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        max_tokens=request.max_tokens,
        end_token_ids=request.end_token_ids,
        eos_token_ids=request.eos_token_ids,
        spec=request.spec,
        n=request.n,
        adapter=request.adapter,
    )
    rig = Rig(num_blocks=400, max_num_batched_tokens=512, max_model_len=400, vocab_size=vocab_size)
    rig.checking = False
    rig.add(copy)
    rig.run()
    return rig.outputs(copy)
