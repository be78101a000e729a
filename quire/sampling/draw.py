"""Drawing one token a row: the race of `noise.py`, run over the tokens that min-p, top-k and top-p keep.

Tokens rank by their weight exp((logit - largest) / temperature); of equal ones the lower id comes first. The filters
apply in this order, and each keeps a prefix of the ranking: min_p keeps weights >= min_p (the largest weight is 1);
top_k the first k; top_p the shortest prefix whose share of what is left by then reaches p.

Several ways to the same answer, one chosen per request by `choose_method`:

  PLAIN    runs the race over all tokens: no filter.
  DENSE    the same with min_p, and on a CPU with top_p (see _check_top_p).
  TOP_K    on a CPU: sorts the few tokens that can be among the first k.
  NUCLEUS  on a CPU, for top_p: sorts the likeliest tokens, and is done if their mass reaches p; else DENSE.
  SORTED   sorts all tokens. The only one for top_k and top_p that never waits for the device.

Where a device has a kernel for the whole batch (fused.py), that is used instead of all of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from quire.params import SamplingSpec
from quire.sampling.noise import exponentials, token_words
from quire.sampling.scratch import Scratch
from quire.sampling.select import max_top_k, row_max, tokens_from, top_bound

NO_TOP_P = 2.0  # no mass reaches twice the total

_NUCLEUS_CANDIDATES = 64
# Mass that float32 sums may be wrong by, generously, as a share of the total.
_SUM_TOLERANCE = 1e-4


class Method(IntEnum):
    GREEDY = 0
    PLAIN = 1
    DENSE = 2
    TOP_K = 3
    NUCLEUS = 4
    SORTED = 5


DRAWN_METHODS = tuple(method for method in Method if method is not Method.GREEDY)


@dataclass(slots=True)
class DrawParams:
    """Rows' parameters, as columns on the device: [rows, 1] each. The rest is what the host knows of them."""

    temperature: Tensor  # float32
    min_p: Tensor  # float32
    top_p: Tensor  # float64; NO_TOP_P where it is off
    top_k: Tensor  # int64; the vocabulary's size where it is off
    any_min_p: bool
    any_top_p: bool
    max_top_k: int

    def __getitem__(self, rows: slice | Tensor) -> DrawParams:
        columns = (self.temperature[rows], self.min_p[rows], self.top_p[rows], self.top_k[rows])
        return DrawParams(*columns, self.any_min_p, self.any_top_p, self.max_top_k)


class Workspace(Scratch):
    """What does not depend on the rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self.token_words = token_words(vocab_size, device)


def choose_method(spec: SamplingSpec, vocab_size: int, device: torch.device) -> Method:
    on_cpu = device.type == "cpu"
    if spec.temperature == 0:
        return Method.GREEDY
    if 0 < spec.top_k < vocab_size:
        return Method.TOP_K if on_cpu and spec.top_k <= max_top_k(vocab_size) else Method.SORTED
    if spec.top_p < 1:
        if not on_cpu:
            return Method.SORTED
        if max_top_k(vocab_size) >= _NUCLEUS_CANDIDATES:
            return Method.NUCLEUS
        return Method.DENSE
    return Method.DENSE if spec.min_p > 0 else Method.PLAIN


def draw(
    method: Method,
    logits: Tensor,  # [rows, vocab]
    largest: Tensor,  # [rows, 1]: their maxima
    keys: Tensor,  # [rows, 2]: see noise.py
    params: DrawParams,
    space: Workspace,
    tokens: Tensor | None = None,  # [n]: the only ones that have a chance, in order, where they are few
) -> Tensor:
    """One token per row: [rows] int64."""
    if tokens is not None:
        values, order = torch.sort(logits.index_select(1, tokens), dim=1, descending=True, stable=True)
        return _draw_ranked(_weights(values, largest, params, space), tokens[order], keys, params, space)
    match method:
        case Method.TOP_K:
            values, token_ids = tokens_from(logits, top_bound(logits, params.top_k, params.max_top_k))
            return _draw_ranked(_weights(values, largest, params, space), token_ids, keys, params, space)
        case Method.SORTED:
            values, token_ids = torch.sort(logits, dim=1, descending=True, stable=True)
            return _draw_ranked(_weights(values, largest, params, space), token_ids, keys, params, space)
        case Method.NUCLEUS:
            return _draw_nucleus(_weights(logits, largest, params, space), keys, params, space)
        case _:
            assert method in (Method.PLAIN, Method.DENSE)
            return _draw_dense(_weights(logits, largest, params, space), keys, params, space)


def _weights(logits: Tensor, largest: Tensor, params: DrawParams, space: Workspace) -> Tensor:
    """The weights of the tokens that min_p keeps, zeros for the others."""
    # The largest goes first, so that no temperature, however small, overflows.
    weights = torch.sub(logits, largest, out=space.get("weights", logits.shape)).div_(params.temperature).exp_()
    if params.any_min_p:
        weights.mul_(torch.ge(weights, params.min_p, out=space.get("mask", weights.shape)))
    return weights


def _draw_ranked(
    weights: Tensor,  # [rows, n], in the ranking's order: at least all tokens that are kept
    token_ids: Tensor,  # [rows, n]
    keys: Tensor,
    params: DrawParams,
    space: Workspace,
    total: Tensor | None = None,  # [rows, 1] float64: the mass that top_p is a share of, if not these weights'
) -> Tensor:
    weights.mul_(torch.arange(weights.shape[1], device=weights.device) < params.top_k)
    if params.any_top_p:
        mass = weights.cumsum(1, dtype=torch.float64)
        target = (mass[:, -1:] if total is None else total) * params.top_p
        weights.mul_(mass.sub_(weights) < target)
    scores = weights.div_(exponentials(keys, space.token_words[token_ids], space))
    return token_ids.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def _draw_nucleus(weights: Tensor, keys: Tensor, params: DrawParams, space: Workspace) -> Tensor:
    bound = top_bound(weights, torch.full_like(params.top_k, _NUCLEUS_CANDIDATES), _NUCLEUS_CANDIDATES)
    # Where the mass is too small, top_p keeps tokens below the bound, too. Rounding counts as too small.
    mass = _mass_from(weights, bound, space)
    is_closed = mass > weights.sum(1, keepdim=True) * (params.top_p + _SUM_TOLERANCE)
    closed, still_open = (x[:, 0].nonzero()[:, 0] for x in (is_closed, ~is_closed))
    if not len(closed):
        return _draw_dense(weights, keys, params, space)
    drawn = torch.empty(len(weights), dtype=torch.int64)
    likely = _take(weights, closed, space)
    candidates, token_ids = tokens_from(likely, bound[closed])
    candidates.clamp_(min=0)  # the padding
    total = likely.sum(1, keepdim=True, dtype=torch.float64)
    drawn[closed] = _draw_ranked(candidates, token_ids, keys[closed], params[closed], space, total)
    if len(still_open):
        unlikely = _take(weights, still_open, space)
        drawn[still_open] = _draw_dense(unlikely, keys[still_open], params[still_open], space)
    return drawn


def _take(weights: Tensor, rows: Tensor, space: Workspace) -> Tensor:
    shape = (len(rows), weights.shape[1])
    return torch.index_select(weights, 0, rows, out=space.get("taken", shape))


def _draw_dense(weights: Tensor, keys: Tensor, params: DrawParams, space: Workspace) -> Tensor:
    noise = exponentials(keys, space.token_words[None], space)
    scores = torch.div(weights, noise, out=noise)
    _, winners = row_max(scores)
    return _check_top_p(weights, scores, winners, params, space) if params.any_top_p else winners


def _check_top_p(weights: Tensor, scores: Tensor, winners: Tensor, params: DrawParams, space: Workspace) -> Tensor:
    """Replace those winners of the race over all tokens that top_p does not keep. On a CPU only.

    A winner that top_p keeps would have won the race over the kept tokens alone. Of one that it does not keep we
    learn that nothing ranked below it is kept either: cut there and look again. So nothing need be sorted.
    """
    won = weights.gather(1, winners[:, None])
    # Errs only towards a closer look: rounding is allowed for, and all tokens that tie with the winner count.
    mass_before = _mass_from(weights, won, space) - won
    is_doubtful = mass_before > weights.sum(1, keepdim=True) * (params.top_p - _SUM_TOLERANCE)
    for row in is_doubtful[:, 0].nonzero()[:, 0].tolist():
        target = float(weights[row].sum(dtype=torch.float64) * params.top_p[row, 0])
        winners[row] = _first_within(weights[row], scores[row], int(winners[row]), target, space)
    return winners


def _mass_from(weights: Tensor, bound: Tensor, space: Workspace) -> Tensor:
    """The sum of the weights at or above the bound, in float32: [rows, 1]."""
    return torch.ge(weights, bound, out=space.get("mask", weights.shape)).mul_(weights).sum(1, keepdim=True)


def _first_within(weights: Tensor, scores: Tensor, token_id: int, target: float, space: Workspace) -> int:
    """The best score whose token has less than target mass ranked before it. [vocab], [vocab]; eats the scores.

    token_id: the best score of all.
    """
    before, other = space.get("mask", weights.shape), space.get("other", weights.shape)
    while True:
        torch.gt(weights, weights[token_id], out=before)
        before[:token_id] += torch.eq(weights[:token_id], weights[token_id], out=other[:token_id])
        if not float(torch.mul(weights, before, out=other).sum(dtype=torch.float64)) >= target:
            return token_id
        token_id = int(row_max(scores.mul_(before)[None])[1])
