"""The sampler: from logits to the next token of each row, with every field of SamplingSpec, on the logits' device.

In the order of vLLM: masks of grammars, allowed tokens, bad words, min_tokens, logit bias; penalties; temperature;
min_p; top_k; top_p; the draw. Logprobs are those of the logits before all of it. A batch pays for what its rows use:
rows without edits are not touched, greedy rows are an argmax, and what depends only on which rows stand in the batch
is kept until that changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.params import SamplingSpec
from quire.plan import TokenLogprobs
from quire.request import FinishReason
from quire.sampling.draw import DRAWN_METHODS, NO_TOP_P, DrawParams, Method, Workspace, choose_method, draw
from quire.sampling.edits import EditBatch, LogitEdits
from quire.sampling.fused import DrawKernel, find_kernel
from quire.sampling.logprobs import WHOLE_VOCABULARY, PendingLogprobs, compute_logprobs
from quire.sampling.masks import TokenMasks
from quire.sampling.noise import sequence_words, step_keys
from quire.sampling.penalties import Penalties, PenaltyBatch, has_penalties
from quire.sampling.processors import Failures, LogitsProcessor, LogitsProcessors
from quire.sampling.select import chunks, row_max
from quire.sampling.transfer import HostCopy, to_device

_NOT_FINITE = -1
_ALL_BANNED = -2
NOT_FINITE = (FinishReason.ERROR, "the model's logits are not finite (NaN or infinity)")
_FAILURES = {
    _NOT_FINITE: NOT_FINITE,
    _ALL_BANNED: (
        FinishReason.BANNED,
        "no token is left to sample: allowed_token_ids, bad_words and min_tokens together ban all of them",
    ),
}
_MANY_LOGPROBS = 64  # rows that ask for more are computed apart, so that the others do not pay for them


class Sampler:
    """Sampling state of the executor's rows. A row is held from admit or fork until release.

    kernel: what draws for all rows at once, instead of draw.py; by default the device's own, if it has one.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        max_model_len: int,
        kernel: DrawKernel | None = None,
        plugins: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._kernel = kernel or find_kernel(vocab_size, device)
        self._specs: list[SamplingSpec | None] = [None] * num_rows
        self._methods = np.zeros(num_rows, dtype=np.int8)
        self._space = Workspace(vocab_size, device)
        self._words = np.zeros((num_rows, 2), dtype=np.uint32)
        self._num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self._min_tokens = np.zeros(num_rows, dtype=np.int64)
        self._params = torch.zeros((num_rows, 4), dtype=torch.float64, device=device)  # as DrawParams' columns
        self._edits = LogitEdits(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._penalties = Penalties(
            num_rows=num_rows, vocab_size=vocab_size, device=device, max_model_len=max_model_len
        )
        self.processors = LogitsProcessors(plugins)
        self._last_plan: tuple[tuple[int, ...], bytes, _BatchPlan] | None = None

    def admit(self, row: int, spec: SamplingSpec, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Take a row. token_ids: all known tokens, the prompt first, then what was generated before a preemption."""
        self._take(row, spec, num_prompt_tokens)
        self._edits.add(row, spec, token_ids)
        self.processors.add(row, spec, token_ids, num_prompt_tokens)
        if has_penalties(spec):
            self._penalties.add(row, spec, token_ids, num_prompt_tokens)

    def fork(self, source_row: int, row: int, spec: SamplingSpec) -> None:
        """Take a row with the source's history. The spec may differ in all but bad_words and having penalties."""
        assert self._specs[source_row] is not None, f"row {source_row} is not held"
        self._take(row, spec, int(self._num_prompt_tokens[source_row]))
        self._edits.fork(source_row, row, spec)
        self.processors.fork(source_row, row, spec)
        if has_penalties(spec):
            self._penalties.fork(source_row, row, spec)

    def release(self, row: int) -> None:
        assert self._specs[row] is not None, f"row {row} is not held"
        self._specs[row] = None
        self._edits.release(row)
        self.processors.release(row)
        self._penalties.release(row)
        self._last_plan = None

    def sample(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], masks: TokenMasks | None = None
    ) -> SampledBatch:
        """Draw the token at positions[i] of rows[i] from logits[i], and add it to that row's history. A row without a
        history may stand there several times, with several positions. `masks` are of lines of the logits.

        logits: [rows, vocab] float32, contiguous; changed in place. Nothing here waits for the device.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        assert logits.dtype == torch.float32 and logits.is_contiguous()
        if not rows:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return SampledBatch(nothing, nothing, [])
        row_array = np.asarray(rows, dtype=np.int64)
        position_array = np.asarray(positions, dtype=np.int64)
        num_output_tokens = position_array - self._num_prompt_tokens[row_array]
        assert (num_output_tokens >= 0).all(), "a prompt's tokens are not sampled"
        plan = self._plan(row_array, num_output_tokens < self._min_tokens[row_array])

        # Logprobs are the model's own, so they need its logits from before the edits, which are made in place.
        edits_logits = plan.edits_logits or masks is not None or bool(self.processors)
        raw = [_copy(logits, g.indices) if edits_logits else None for g in plan.logprob_groups]
        failures = self.processors.apply(logits, rows) if self.processors else {}
        few_tokens = masks.apply(logits) if masks is not None else None
        if plan.edits is not None:
            plan.edits.apply(logits)
        if plan.penalties is not None:
            plan.penalties.apply(logits, self._space)
        if self.processors.has_last:
            self.processors.apply_last(logits, rows, plan.params[:, 0], failures)
        if self._kernel is not None:
            token_ids, codes = self._draw_fused(self._kernel, plan, logits, row_array, position_array)
        else:
            token_ids, codes = self._draw_by_groups(plan, logits, position_array, few_tokens)
        if plan.edits is not None:
            plan.edits.follow(token_ids)
        if plan.penalties is not None:
            plan.penalties.follow(token_ids)
        if self.processors:
            self.processors.follow(rows, token_ids)

        logprobs = []
        for asked, kept in zip(plan.logprob_groups, raw, strict=True):
            source = kept if kept is not None else _select(logits, asked.indices)
            targets = _select(token_ids, asked.indices)
            logprobs.append((asked, compute_logprobs(source, targets, asked.max_num_top, self._space)))
        return SampledBatch(token_ids, codes, logprobs, failures)

    def has_history(self, row: int) -> bool:
        """Whether the row's tokens change the logits of those after them."""
        return self._penalties.has(row) or self._edits.has_phrases(row) or self.processors.has(row)

    def spec_of(self, row: int) -> SamplingSpec:
        spec = self._specs[row]
        assert spec is not None, f"row {row} is not held"
        return spec

    def state_bytes(self) -> int:
        """Device memory that the rows' state takes now."""
        return self._fixed_bytes() + self._edits.num_bytes + self._penalties.num_bytes

    def max_state_bytes(self) -> int:
        """The same, once every row has penalties."""
        return self._fixed_bytes() + self._edits.num_bytes + self._penalties.max_num_bytes

    def _fixed_bytes(self) -> int:
        return self._params.nbytes + self._space.token_words.nbytes

    def _take(self, row: int, spec: SamplingSpec, num_prompt_tokens: int) -> None:
        assert self._specs[row] is None, f"row {row} is held already"
        self._specs[row] = spec
        self._methods[row] = choose_method(spec, self._vocab_size, self._device)
        self._words[row] = sequence_words(spec.seed, spec.index)
        self._num_prompt_tokens[row] = num_prompt_tokens
        self._min_tokens[row] = spec.min_tokens
        top_p = spec.top_p if spec.top_p < 1 else NO_TOP_P
        top_k = spec.top_k if 0 < spec.top_k < self._vocab_size else self._vocab_size
        params = np.array([spec.temperature, spec.min_p, top_p, top_k], dtype=np.float64)
        self._params[row].copy_(to_device(params, self._device))
        self._last_plan = None

    def _draw_fused(
        self,
        kernel: DrawKernel,
        plan: _BatchPlan,
        logits: Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> tuple[Tensor, Tensor]:
        """Tokens and codes of all rows: the token again, or why there is none."""
        keys = to_device(step_keys(self._words[rows], positions), self._device) if plan.draws else None
        token_ids, codes = kernel(logits, plan.params, keys, filters=plan.filters).unbind()
        return token_ids, codes

    def _draw_by_groups(
        self, plan: _BatchPlan, logits: Tensor, positions: npt.NDArray[np.int64], tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same in torch. tokens: see draw."""
        largest, token_ids = row_max(logits)
        if plan.draw_groups:
            words = self._words[plan.drawn_rows]
            keys = to_device(step_keys(words, positions[plan.drawn_indices]), self._device)
            for group in plan.draw_groups:
                drawn = self._draw(group, logits, largest, keys[group.keys], tokens)
                if group.indices is None:
                    token_ids = drawn
                else:
                    token_ids.index_copy_(0, group.indices, drawn)
        failures = torch.where(largest == -torch.inf, _ALL_BANNED, _NOT_FINITE)
        return token_ids, torch.where(largest.isfinite(), token_ids, failures)

    def _draw(self, group: _DrawGroup, logits: Tensor, largest: Tensor, keys: Tensor, tokens: Tensor | None) -> Tensor:
        params = group.params
        largest = _select(largest, group.indices)[:, None]
        drawn = []
        for rows in chunks(len(keys), self._vocab_size, self._device):
            chosen = logits[rows] if group.indices is None else logits.index_select(0, group.indices[rows])
            drawn.append(draw(group.method, chosen, largest[rows], keys[rows], params[rows], self._space, tokens))
        return torch.cat(drawn)

    def _plan(self, rows: npt.NDArray[np.int64], bans_ends: npt.NDArray[np.bool_]) -> _BatchPlan:
        """What the batch needs; made anew only when its rows, or those still short of min_tokens, change."""
        held = tuple(rows.tolist())
        bans = bans_ends.tobytes()
        if self._last_plan is None or self._last_plan[:2] != (held, bans):
            twice = [row for row, times in Counter(held).items() if times > 1] if len(set(held)) != len(held) else ()
            assert not any(map(self.has_history, twice)), "rows with a history are sampled one token at a time"
            self._last_plan = (held, bans, self._new_plan(rows, bans_ends.tolist()))
        return self._last_plan[2]

    def _new_plan(self, rows: npt.NDArray[np.int64], bans_ends: list[bool]) -> _BatchPlan:
        held = rows.tolist()
        specs = [self.spec_of(row) for row in held]
        methods = self._methods[rows]
        draw_groups, drawn_indices, num_drawn = [], [], 0
        for method in DRAWN_METHODS if self._kernel is None else ():
            indices = np.flatnonzero(methods == method)
            if len(indices):
                keys = slice(num_drawn, num_drawn + len(indices))
                params = self._draw_params(rows[indices], [specs[i] for i in indices])
                draw_groups.append(_DrawGroup(method, self._places(indices, len(rows)), keys, params))
                drawn_indices.append(indices)
                num_drawn += len(indices)
        drawn = np.concatenate(drawn_indices) if drawn_indices else np.empty(0, dtype=np.int64)
        asked = {i: spec.logprobs for i, spec in enumerate(specs) if spec.logprobs is not None}
        many = [i for i, num_top in asked.items() if num_top == WHOLE_VOCABULARY or num_top > _MANY_LOGPROBS]
        few = [i for i in asked if i not in set(many)]
        return _BatchPlan(
            params=self._params[to_device(rows, self._device)],
            draws=bool((methods != Method.GREEDY).any()),
            filters=bool((methods > Method.PLAIN).any()),
            drawn_rows=rows[drawn],
            drawn_indices=drawn,
            draw_groups=draw_groups,
            edits=self._edits.batch(held, bans_ends),
            penalties=self._penalties.batch(held),
            logprob_groups=[
                _LogprobGroup(group, self._places(np.array(group), len(rows)), [asked[i] for i in group])
                for group in (few, many)
                if group
            ],
        )

    def _places(self, indices: npt.NDArray[np.int64], num_rows: int) -> Tensor | None:
        return None if len(indices) == num_rows else to_device(indices, self._device)

    def _draw_params(self, rows: npt.NDArray[np.int64], specs: list[SamplingSpec]) -> DrawParams:
        params = self._params[to_device(rows, self._device)]
        return DrawParams(
            temperature=params[:, 0:1].float(),
            min_p=params[:, 1:2].float(),
            top_p=params[:, 2:3],
            top_k=params[:, 3:4].long(),
            any_min_p=any(spec.min_p > 0 for spec in specs),
            any_top_p=any(spec.top_p < 1 for spec in specs),
            max_top_k=max(spec.top_k for spec in specs),
        )


class SampledBatch:
    """The sampled tokens, on the device; to_lists brings them to the host."""

    __slots__ = ("_codes", "_failures", "_host_codes", "_logprobs", "token_ids")

    def __init__(
        self,
        token_ids: Tensor,  # [rows] int64; in range for failed rows, too
        codes: Tensor,  # [rows] int64: the token, or why there is none
        logprobs: list[tuple[_LogprobGroup, PendingLogprobs]],
        failures: Failures | None = None,  # known on the host already
    ) -> None:
        self.token_ids = token_ids
        self._codes = codes
        self._host_codes = HostCopy(codes)
        self._logprobs = logprobs
        self._failures = failures or {}

    @property
    def finite(self) -> Tensor:
        """[rows] bool: false where no token could be drawn."""
        return self._codes >= 0

    def to_lists(
        self,
    ) -> tuple[list[list[int]], dict[int, list[TokenLogprobs]], dict[int, tuple[FinishReason, str]]]:
        """Tokens of each row, logprobs of those that asked, and why a row failed, the latter two by index.

        A failed row has no tokens. Waits for the device.
        """
        codes: list[int] = self._host_codes.wait()[0].tolist()
        failed = {i: _FAILURES[code] for i, code in enumerate(codes) if code < 0} | self._failures
        tokens = [[] if i in failed else [code] for i, code in enumerate(codes)]
        logprobs = {
            i: [entry]
            for group, pending in self._logprobs
            for i, entry in zip(group.host_indices, pending.to_list(group.num_top), strict=True)
            if i not in failed
        }
        return tokens, logprobs, failed


@dataclass(slots=True)
class _DrawGroup:
    """Rows of a batch that are drawn in the same way."""

    method: Method
    indices: Tensor | None  # places in the batch; None: the whole batch
    keys: slice  # where their keys stand among all drawn rows'
    params: DrawParams


@dataclass(slots=True)
class _LogprobGroup:
    host_indices: list[int]
    indices: Tensor | None  # the same on the device; None: the whole batch
    num_top: list[int]

    @property
    def max_num_top(self) -> int:
        return WHOLE_VOCABULARY if WHOLE_VOCABULARY in self.num_top else max(self.num_top)


@dataclass(slots=True)
class _BatchPlan:
    """What depends on which rows stand in the batch, but not on logits and positions."""

    params: Tensor  # [rows, 4], as Sampler._params
    draws: bool  # whether any row is not greedy
    filters: bool  # whether any row has min_p, top_k or top_p
    drawn_rows: npt.NDArray[np.int64]  # in the order of their groups; these three are empty where a kernel draws
    drawn_indices: npt.NDArray[np.int64]
    draw_groups: list[_DrawGroup]
    edits: EditBatch | None
    penalties: PenaltyBatch | None
    logprob_groups: list[_LogprobGroup]

    @property
    def edits_logits(self) -> bool:
        return self.edits is not None or self.penalties is not None


def _select(tensor: Tensor, indices: Tensor | None) -> Tensor:
    return tensor if indices is None else tensor.index_select(0, indices)


def _copy(tensor: Tensor, indices: Tensor | None) -> Tensor:
    return tensor.clone() if indices is None else tensor.index_select(0, indices)
