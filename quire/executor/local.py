"""The executor of one worker in this process."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from quire.errors import ConfigError
from quire.executor.clock import StepClock
from quire.executor.device import memory_in_use
from quire.executor.precompile import Precompile
from quire.executor.profile import hold_activation_memory, let_go_of_held_memory
from quire.executor.virtual_memory import SleepingMemory
from quire.executor.worker import ForwardPass, Sampled, StepMasks, Worker
from quire.grammar.rows import ConstrainedLine
from quire.plan import StepPlan, StepResult
from quire.request import FinishReason
from quire.sampling import RankedBatch, Sampler, TokenMasks
from quire.tiers.sealed import SealedStore


@dataclass(slots=True)
class _Submitted:
    """A step that runs, or has run, and is not collected yet."""

    plan: StepPlan
    done: ForwardPass
    clock: StepClock
    constrained: list[ConstrainedLine]
    is_followed: bool  # whether their constraints know its tokens
    masks: StepMasks | None = None  # while they are filled
    is_sampled: bool = False  # all but the last one are
    sampled: Sampled | None = None


class LocalExecutor:
    """Runs plans on one worker, as the executor's contract says."""

    def __init__(
        self,
        worker: Worker,
        *,
        single_threaded_torch: bool = False,
        precompile: Precompile | None = None,
        memory: SleepingMemory | None = None,
        activation_bytes: int = 0,
    ) -> None:
        """memory: where weights and cache are, on a GPU that may give them back; activation_bytes: held for steps."""
        self.worker = worker
        self._memory = memory
        self._activation_bytes = activation_bytes
        if memory is not None:
            weakref.finalize(self, memory.close)
        self._single_threaded_torch = single_threaded_torch
        self._precompile = precompile  # while it is at work, captures would compile what it is about to
        self._submitted: deque[_Submitted] = deque()
        self.host_clock: Callable[[], float] = time.perf_counter  # of a CPU's steps

    @property
    def depth(self) -> int:
        """On a GPU the next step is prepared while one runs; a CPU has nothing to prepare it on."""
        return 2 if self.worker.is_gpu else 1

    @property
    def stores(self) -> list[SealedStore]:
        """Levels below the device that keep blocks."""
        return self.worker.stores.stores

    def submit(self, plan: StepPlan) -> int:
        worker = self.worker
        self._sample_masked()
        with torch.inference_mode(), torch_threads(single=self._single_threaded_torch):
            for step in self._submitted:
                self._judge(step)  # where its drafts are not judged, the next step would not know where to start
            clock = StepClock(on_gpu=worker.is_gpu, host_clock=self.host_clock)
            worker.apply(plan)
            constrained = worker.constrained(plan)
            done = worker.forward(plan, clock)
            step = _Submitted(plan, done, clock, constrained, is_followed=not constrained)
            self._submitted.append(step)
            if not constrained:
                self._sample(step, None)
            elif self.depth == 1:
                self._sample_masked()
            elif len(self._submitted) == 1:
                self._begin_masks(step)
        return plan.step

    def _begin_masks(self, step: _Submitted) -> None:
        """Masks are filled while a GPU runs the forward pass, which is queued before the tokens of the step before are
        known. When those come, in `collect`, threads begin to fill the masks; the host takes the tokens in and plans
        the next step meanwhile, and when that is submitted, this one is sampled first. Steps without constrained rows
        wait for nothing.

        On a CPU a thread beside the pass costs more than filling a mask: the two would take turns at the interpreter.
        """
        for earlier in self._submitted:
            if earlier is not step:
                self._follow(earlier)
        step.masks = self.worker.begin_masks(step.constrained, step.done)

    def _sample_masked(self) -> None:
        """Sample what was submitted last, if it was left for its masks."""
        if not self._submitted or (step := self._submitted[-1]).is_sampled:
            return
        with torch.inference_mode(), torch_threads(single=self._single_threaded_torch):
            if step.masks is None:
                self._begin_masks(step)
            assert step.masks is not None
            self._sample(step, step.masks.finish())

    def _sample(self, step: _Submitted, masks: TokenMasks | None) -> None:
        step.sampled = self.worker.sample(step.plan, step.done, masks)
        step.is_sampled, step.masks = True, None
        step.clock.mark("sample")

    def _follow(self, step: _Submitted) -> None:
        """Tell a step's tokens to the constraints of its rows. Waits for the step, where it has any."""
        if step.is_followed:
            return
        step.is_followed = True
        if not step.constrained:
            return
        assert step.sampled is not None and self.worker.constraints is not None
        tokens, _, _ = step.sampled.to_lists()
        self.worker.constraints.advance(step.constrained, tokens)

    @property
    def last_sampled(self) -> Sampled | None:
        """What the step that was submitted last samples."""
        self._sample_masked()
        return self._submitted[-1].sampled

    @property
    def has_ended(self) -> bool:
        """Whether the step that is collected next is over."""
        self._sample_masked()
        return self._submitted[0].clock.is_over()

    def collect(self, ticket: int) -> StepResult:
        if len(self._submitted) == 1:
            self._sample_masked()
        step = self._submitted.popleft()
        assert step.plan.step == ticket, f"step {ticket} collected out of order, {step.plan.step} is next"
        result = StepResult(step=ticket, prompt_logprobs=step.done.prompt_logprobs)
        if not step.clock.is_over():
            step.clock.wait()
            result.ended_s = time.perf_counter()
        self._judge(step)
        if step.sampled is not None:
            result.tokens, result.logprobs, result.failed = step.sampled.to_lists()
            if isinstance(step.sampled, RankedBatch):
                result.candidates = step.sampled.candidates()
        if step.done.pooled is not None:
            pooled = step.done.pooled.to_list()
            result.tokens, result.pooled = [[] for _ in pooled], dict(enumerate(pooled))
        for line in step.constrained if result.failed else ():
            if line.index in result.failed and result.failed[line.index][0] is FinishReason.BANNED:
                result.failed[line.index] = (FinishReason.BANNED, line.constraint.why_stuck())
        self._follow(step)
        if self._submitted and not (last := self._submitted[-1]).is_sampled:
            if last.masks is None:
                self._begin_masks(last)
            result.next_is_unsampled = True
        result.timings = step.clock.read()
        if isinstance(sampler := self.worker.sampler, Sampler):
            result.timings.processors_s = sampler.processors.take_seconds()
        cache, stores = self.worker.cache, self.worker.stores
        has_failed = any(reason is FinishReason.ERROR for reason, _ in result.failed.values())  # its KV may be bad
        stores.on_step(ticket, is_good=not has_failed)
        if not step.plan.spans.rows:  # nobody runs: without waiting, the loop would spin until a move is over
            cache.wait_for_a_move()
            stores.wait_a_moment()
        result.moved = cache.take_finished()
        for moved, missing in stores.take_finished():
            result.moved.append(moved)
            if missing:
                result.missing[moved] = missing
        return result

    def _judge(self, step: _Submitted) -> None:
        """Tell the batch how many of a step's drafts were accepted. Waits for the step, where it has any."""
        if not step.done.unjudged:
            return
        assert step.sampled is not None
        tokens, _, _ = step.sampled.to_lists()
        num_tokens = {row: len(line) for row, line in zip(step.done.rows, tokens, strict=True)}
        for each in step.done.unjudged:
            self.worker.batch.judge(each, max(0, num_tokens[each.row] - 1))
        step.done.unjudged = []

    def is_idle(self) -> bool:
        self._sample_masked()  # else the device might wait for it
        return not self._submitted or self._submitted[-1].clock.is_over()

    def has_time(self) -> bool:
        if self._precompile is not None and not self._precompile.is_done():
            return False
        self._sample_masked()
        return bool(self._submitted) and not self._submitted[0].clock.is_over()

    def prepare_more(self) -> bool:
        self._sample_masked()  # captures may write where its logits are
        with torch.inference_mode():
            return self.worker.capture_more()

    def device_memory_bytes(self) -> tuple[int, int] | None:
        return memory_in_use(self.worker.cache.device_blocks.device)

    def prepare_sleep(self) -> None:
        """Raises a ConfigError where it was not made for it, a MemoryBudgetError where the host cannot keep the
        weights. Nothing has changed then."""
        if self.worker.is_gpu and self._memory is None:
            raise ConfigError("on a GPU an engine that shall sleep is made with enable_sleep_mode=True")
        if self._memory is not None:
            torch.cuda.synchronize(self.worker.cache.device_blocks.device)
            self._memory.copy_to_host()

    def fall_asleep(self, kept_blocks: list[int]) -> None:
        """Give back the cache, of which the content of these blocks is kept on the host, and on a GPU the weights, too,
        which are copied to the host. Nothing may be under way."""
        assert not self._submitted, "steps are under way"
        worker = self.worker
        with torch.inference_mode():
            worker.cache.fall_asleep(kept_blocks)
            if worker.draft is not None:
                worker.draft.fall_asleep()
        if self._memory is not None:
            torch.cuda.synchronize(worker.cache.device_blocks.device)
            self._memory.sleep()
            let_go_of_held_memory(worker.cache.device_blocks.device)

    def wake_up(self) -> None:
        """All of it is where it was: captured steps find it. Raises a MemoryBudgetError, and sleeps on, where others
        have taken the memory."""
        worker = self.worker
        if self._memory is not None:
            self._memory.wake()
        with torch.inference_mode():
            worker.cache.wake_up()
        hold_activation_memory(self._activation_bytes, worker.cache.device_blocks.device)

    def _forget_steps(self) -> None:
        for step in self._submitted:
            if step.masks is not None:
                step.masks.finish()  # threads write to memory that would be the next one's
        self._submitted.clear()

    def reset(self) -> None:
        """Forget every row and every step: the next plan may be another scheduler's first."""
        self._forget_steps()
        self.worker.reset()

    def close(self) -> None:
        self._forget_steps()
        self.worker.stores.close()


@contextlib.contextmanager
def torch_threads(*, single: bool) -> Iterator[None]:
    """Native kernels have threads of their own; torch's would spin on the same cores beside them."""
    before = torch.get_num_threads()
    if not single or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
