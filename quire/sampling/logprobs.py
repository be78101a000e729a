"""Logprobs of a model's own logits: before penalties, bias and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.plan import TokenLogprobs
from quire.sampling.scratch import Scratch
from quire.sampling.select import chunks, max_top_k, tokens_from, top_bound
from quire.sampling.transfer import HostCopy, to_device

WHOLE_VOCABULARY = -1


class PendingLogprobs:
    """Logprobs on their way to the host; only to_list waits for them."""

    __slots__ = ("_copy",)

    def __init__(self, integers: Tensor, floats: Tensor) -> None:
        # integers: [rows, 2 + top] token id, rank, top ids; floats: [rows, 1 + top] logprob, top logprobs
        self._copy = HostCopy(integers, floats)

    def to_list(self, num_top: list[int] | None = None) -> list[TokenLogprobs]:
        """One entry a row, with its first num_top[row] top tokens, or with as many as were computed."""
        integers, floats = self._copy.wait()
        entries = []
        for row, (ids, logprobs) in enumerate(zip(integers.tolist(), floats.tolist(), strict=True)):
            end = len(ids) if num_top is None or num_top[row] == WHOLE_VOCABULARY else num_top[row] + 2
            entries.append(TokenLogprobs(ids[0], logprobs[0], ids[1], ids[2:end], logprobs[1 : end - 1]))
        return entries


def compute_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, scratch: Scratch | None = None
) -> PendingLogprobs:
    """The logprobs of one token a row, and of the num_top likeliest (-1: all). Never waits for the device.

    logits: [rows, vocab]; token_ids: [rows]. A logprob is a logit less the row's log total, so only what is asked for
    is computed, not a log_softmax.
    """
    num_rows, vocab_size = logits.shape
    num_top = vocab_size if num_top == WHOLE_VOCABULARY else min(num_top, vocab_size)
    scratch = scratch or Scratch(logits.device)
    integers = torch.empty((num_rows, 2 + num_top), dtype=torch.int64, device=logits.device)
    floats = torch.empty((num_rows, 1 + num_top), dtype=torch.float32, device=logits.device)
    integers[:, 0] = token_ids
    for rows in chunks(num_rows, vocab_size, logits.device):
        _fill(logits[rows], num_top, integers[rows], floats[rows], scratch)
    return PendingLogprobs(integers, floats)


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The same for known tokens, token_ids[i] under logits[i], brought to the host at once."""
    targets = to_device(np.asarray(token_ids, dtype=np.int64), logits.device)
    return compute_logprobs(logits, targets, num_top).to_list()


def _fill(logits: Tensor, num_top: int, integers: Tensor, floats: Tensor, scratch: Scratch) -> None:
    target = logits.gather(1, integers[:, :1])
    work = scratch.get("weights", logits.shape)
    integers[:, 1] = torch.gt(logits, target, out=work).sum(1).add_(1)
    floats[:, :1] = target
    if num_top:
        floats[:, 1:], integers[:, 2:] = top_tokens(logits, num_top)
    floats.sub_(log_totals(logits, work))


def log_totals(logits: Tensor, work: Tensor | None = None) -> Tensor:
    """The logarithm of each row's total weight: a logit less this is a logprob. [rows, 1]"""
    if logits.is_cuda and _has_kernel(logits.device):
        from quire.kernels.triton.log_totals import row_log_totals

        return row_log_totals(logits)
    largest = logits.amax(1, keepdim=True)
    return torch.sub(logits, largest, out=work).exp_().sum(1, keepdim=True).log_().add_(largest)


@cache
def _has_kernel(device: torch.device) -> bool:
    from quire.kernels.triton import unavailable_reason

    return unavailable_reason(device) is None


def top_tokens(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row and whose they are, the largest first."""
    if num_top > logits.shape[1] // 8:
        values, token_ids = torch.sort(logits, dim=1, descending=True, stable=True)
    elif logits.device.type == "cpu" and num_top <= max_top_k(logits.shape[1]):
        k = torch.full((len(logits), 1), num_top)
        values, token_ids = tokens_from(logits, top_bound(logits, k, num_top))
    else:
        values, token_ids = logits.topk(num_top, dim=1)
    return values[:, :num_top], token_ids[:, :num_top]
