"""The executor of one device in this process: applies a plan, runs the model, samples."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.batch import PersistentBatch
from quire.executor.clock import StepClock
from quire.executor.decode_graphs import DecodeGraphs
from quire.executor.kv_cache import KVCache
from quire.executor.mixed_graphs import MixedGraphs
from quire.executor.mixed_step import MixedShape
from quire.executor.precompile import Precompile
from quire.models.decoder import Decoder
from quire.params import SamplingSpec
from quire.plan import StepPlan, StepResult, TokenLogprobs
from quire.sampling import SampledBatch, Sampler, prompt_logprobs

# Rows of logits held at once for prompt logprobs: a long prompt over a large vocabulary would not fit.
_PROMPT_LOGPROB_ROWS = 128


@dataclass(slots=True)
class _Submitted:
    """A step that runs, or has run, and is not collected yet."""

    plan: StepPlan
    sampled: SampledBatch | None
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    clock: StepClock


class LocalExecutor:
    """Decoder, KV bytes, persistent batch and sampler of one device, behind the executor's contract."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        batch: PersistentBatch,
        sampler: Sampler,
        *,
        graphs: DecodeGraphs | None = None,
        mixed: MixedGraphs | None = None,
        single_threaded_torch: bool = False,
        precompile: Precompile | None = None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.batch = batch
        self.sampler = sampler
        self.graphs = graphs
        self._mixed = mixed
        self._on_gpu = cache.device_blocks.is_cuda
        self._single_threaded_torch = single_threaded_torch
        self._precompile = precompile  # while it is at work, captures would compile what it is about to
        self._submitted: deque[_Submitted] = deque()
        # By row: what a prompt's logprobs need while the prompt runs.
        self._prompt_logprob_rows: dict[int, tuple[SamplingSpec, list[int]]] = {}

    @property
    def depth(self) -> int:
        """On a GPU the next step is prepared while one runs; a CPU has nothing to prepare it on."""
        return 2 if self._on_gpu else 1

    def submit(self, plan: StepPlan) -> int:
        with torch.inference_mode(), self._torch_threads():
            self._submitted.append(self._run(plan))
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        done = self._submitted.popleft()
        assert done.plan.step == ticket, f"step {ticket} collected out of order, {done.plan.step} is next"
        result = StepResult(step=ticket, prompt_logprobs=done.prompt_logprobs)
        if not done.clock.is_over():
            done.clock.wait()
            result.ended_s = time.perf_counter()
        if done.sampled is not None:
            result.tokens, result.logprobs, result.failed = done.sampled.to_lists()
        result.timings = done.clock.read()
        result.transfers_done = self.cache.take_finished(ticket)
        return result

    def is_idle(self) -> bool:
        return not self._submitted or self._submitted[-1].clock.is_over()

    def has_time(self) -> bool:
        if self._precompile is not None and not self._precompile.is_done():
            return False
        return bool(self._submitted) and not self._submitted[0].clock.is_over()

    def device_memory_bytes(self) -> tuple[int, int] | None:
        """(in use by anyone, there is) on a GPU; None on a CPU, whose memory is the process's."""
        if not self._on_gpu:
            return None
        free, total = torch.cuda.mem_get_info(self.cache.device_blocks.device)
        return total - free, total

    def reset(self) -> None:
        """Forget every row and every step: the next plan may be another scheduler's first."""
        self._submitted.clear()
        self._prompt_logprob_rows.clear()
        for row, generation in enumerate(self.batch.generations):
            if generation is not None:
                self.batch.release(row)
                self.sampler.release(row)

    def close(self) -> None:
        self._submitted.clear()

    def _run(self, plan: StepPlan) -> _Submitted:
        clock = StepClock(on_gpu=self._on_gpu)
        self._apply(plan)
        num_attempts = self._num_attempts
        can_replay = self._can_replay(plan)
        shape = None if can_replay else self._mixed_shape(plan)
        if self._num_attempts != num_attempts:
            clock = StepClock(on_gpu=self._on_gpu)  # the scheduler would take a capture for a slow step
        sampled = None
        prompt: dict[int, list[TokenLogprobs]] = {}
        if can_replay:
            assert self.graphs is not None
            self.graphs.prepare(plan.spans.rows, plan.spans.starts)
            clock.mark("prepare")
            positions = [start + 1 for start in plan.spans.starts]
            logits = self.graphs.replay(len(plan.spans.rows))
            clock.mark("forward")
            places = self.graphs.next_places(len(plan.spans.rows))
            sampled = self._sample(plan, plan.spans.rows, positions, logits, places)
        elif shape is not None:
            assert self._mixed is not None
            self._mixed.prepare(plan, shape)
            clock.mark("prepare")
            rows = plan.sampled_rows()
            logits = self._mixed.replay(shape, len(rows))
            clock.mark("forward")
            if rows:
                spans = zip(plan.spans.starts, plan.spans.num_tokens, plan.spans.samples, strict=True)
                positions = [start + count for start, count, samples in spans if samples]
                sampled = self._sample(plan, rows, positions, logits)
        elif plan.spans.rows:
            inputs = self.batch.prepare(plan)
            clock.mark("prepare")
            hidden = self.decoder.forward(inputs.token_ids, inputs.attention, self.cache.layers)
            prompt = self._prompt_logprobs(plan, hidden)
            if inputs.sampled_rows:
                logits = self.decoder.logits(hidden, inputs.logit_indices)
                clock.mark("forward")
                sampled = self._sample(plan, inputs.sampled_rows, inputs.sampled_positions, logits)
            else:
                clock.mark("forward")
        clock.mark("sample")
        return _Submitted(plan, sampled, prompt, clock)

    def _can_replay(self, plan: StepPlan) -> bool:
        """Whether the step is one token of each sequence, all of them sampling, and there is a graph for it."""
        spans = plan.spans
        return (
            self.graphs is not None
            and bool(spans.rows)
            and not plan.forks
            and max(spans.num_tokens) == 1
            and all(spans.samples)
            and not self._prompt_logprob_rows
            and self.graphs.choose(spans.rows, spans.starts)
        )

    def _mixed_shape(self, plan: StepPlan) -> MixedShape | None:
        """The captured shape for a step with short prompts, where there is one."""
        if self._mixed is None or plan.forks or self._prompt_logprob_rows:
            return None
        return self._mixed.shape_of(plan)

    @property
    def _num_attempts(self) -> int:
        """To capture a step."""
        return self.graphs.memory.num_attempts if self.graphs is not None else 0

    def prepare_more(self) -> bool:
        with torch.inference_mode():
            return any(graphs is not None and graphs.capture_next() for graphs in (self._mixed, self.graphs))

    def _apply(self, plan: StepPlan) -> None:
        """Everything of a plan that comes before the forward pass, in the contract's order."""
        for row in plan.released:
            self.batch.release(row)
            self.sampler.release(row)
            self._prompt_logprob_rows.pop(row, None)
        self.cache.move(plan.swap_out, plan.swap_in, plan.step)
        self.cache.copy(plan.copies)
        for new in plan.admitted:
            self.batch.admit(new.row, new.generation, new.token_ids, new.block_ids)
            self.sampler.admit(new.row, new.sampling, new.token_ids, new.num_prompt_tokens)
            if new.sampling.prompt_logprobs is not None:
                self._prompt_logprob_rows[new.row] = (new.sampling, new.token_ids[: new.num_prompt_tokens])
        self.batch.apply_table_diffs(plan)

    def _sample(
        self,
        plan: StepPlan,
        rows: list[int],
        positions: list[int],
        logits: Tensor,
        places: tuple[Tensor, Tensor] | None = None,
    ) -> SampledBatch:
        """places: rows and positions on the device, where they are there already."""
        for fork in plan.forks:
            self.batch.fork(fork.source_row, fork.row, fork.generation)
            self.sampler.fork(fork.source_row, fork.row, fork.sampling)
        sampled = self.sampler.sample(logits, rows, positions)
        self.batch.store(places or self.batch.places(rows, positions), sampled.token_ids)
        return sampled

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """For rows that ask: the logprob of each prompt token that follows a token of this step."""
        found: dict[int, list[TokenLogprobs]] = {}
        if not self._prompt_logprob_rows:
            return found
        first = 0
        for row, start, count in zip(plan.spans.rows, plan.spans.starts, plan.spans.num_tokens, strict=True):
            if row in self._prompt_logprob_rows:
                spec, prompt = self._prompt_logprob_rows[row]
                assert spec.prompt_logprobs is not None
                targets = prompt[start + 1 : start + 1 + count]
                entries: list[TokenLogprobs] = []
                for at in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
                    some = targets[at : at + _PROMPT_LOGPROB_ROWS]
                    indices = torch.arange(first + at, first + at + len(some), device=hidden.device)
                    logits = self.decoder.logits(hidden, indices)
                    entries.extend(prompt_logprobs(logits, some, spec.prompt_logprobs))
                if entries:
                    found[row] = entries
                if start + count >= len(prompt):
                    del self._prompt_logprob_rows[row]
            first += count
        return found

    @contextlib.contextmanager
    def _torch_threads(self) -> Iterator[None]:
        """Native kernels have threads of their own; torch's would spin on the same cores beside them."""
        before = torch.get_num_threads()
        if not self._single_threaded_torch or before == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
