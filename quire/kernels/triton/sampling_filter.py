# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Sampling with min_p, top_k and top_p without a sort: the draws of `quire/sampling/draw.py`, in four launches.

  1. chunk_kernel (sampling.py) notes the largest logit and the mass of every tile of 128 tokens.
  2. bound_kernel derives from these notes a logit below which nothing is kept, whatever the tiles look like inside.
  3. gather_kernel collects the candidates: tokens that reach the bound. It reads only tiles that have some. Of a chunk
     with too many of them (a flat distribution) it notes the winner of the race instead.
  4. finish_kernel, one program a row, takes the race's winner and asks if the filters keep it: that needs only the
     number and mass of the tokens ranked before it. A token that is kept would also have won among the kept ones
     alone. Of one that is not we learn that nothing ranked behind it is kept either: the race is run again among the
     tokens before it. It walks through the candidates or, where a chunk had too many, through the whole row.

Tokens rank by logit; of equal ones the lower id comes first. Rows of all kinds may stand in one batch. Nothing waits
for the device and sums have a fixed order, so equal logits give equal tokens, in a CUDA graph or not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.common import next_power_of_2
from quire.kernels.triton.log_totals import row_log_totals
from quire.kernels.triton.sampling import (
    CHUNK,
    HEAD,
    NUM_PARAMS,
    TILE,
    Layout,
    chunk_fields,
    chunk_kernel,
    exponentials,
    first_best,
    head_field,
    inverse,
    is_filtered,
    load_keys,
    merge_chunks,
    sample_unfiltered,
    store_result,
    tile_winners,
    token_or_failure,
)

_WAYS: tl.constexpr = tl.constexpr(16)  # a search narrows its range by this each round
# The share of the mass by which a bound on it is taken too large: float32 sums of it err by far less.
_MARGIN: tl.constexpr = tl.constexpr(2.0**-16)
_FINISH_BLOCK = 4096


@triton.jit
def _weight(logits, largest, inverse_temperature):
    return tl.exp2((logits - largest) * inverse_temperature * 1.4426950408889634)


@triton.jit
def _key(x):
    """An integer that orders floats as they are ordered."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _thresholds(low, high):
    """Keys that cut low..high in equal parts, and their distance."""
    step = (high - low + _WAYS - 1) // _WAYS
    return tl.minimum(low + (tl.arange(0, _WAYS) + 1) * step, high), step


@triton.jit(do_not_specialize=["num_chunks"])
def bound_kernel(params_ptr, floats_ptr, vocab_size, num_chunks, TILES: tl.constexpr, SLOTS: tl.constexpr,
                 TILES_PAD: tl.constexpr, ROUNDS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    if is_filtered(params_ptr, row, vocab_size):
        head = head_field(floats_ptr, row, num_chunks, TILES, SLOTS)
        tile_fields = head + HEAD
        index = tl.arange(0, TILES_PAD)
        mask = index < num_chunks * TILES
        tile_largest = tl.load(tile_fields + index, mask=mask, other=float("-inf"))
        mass = tl.load(tile_fields + num_chunks * TILES + index, mask=mask, other=0.0)
        largest = tl.max(tile_largest, axis=0)
        bound = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        if (largest < float("inf")) & (largest > float("-inf")):
            params = params_ptr + row * NUM_PARAMS
            tile_weight = _weight(tile_largest, largest, inverse(tl.load(params).to(tl.float32)))
            mass *= tile_weight
            total = tl.sum(mass.to(tl.float64), axis=0).to(tl.float32)
            top_p = tl.load(params + 2)
            top_k = tl.load(params + 3)
            low = _key(tl.full((), -3.4028234663852886e38, tl.float32))
            high = _key(largest + 0.0) + 1  # -0.0 counts as 0.0
            if top_k < vocab_size:
                # As many tiles as top_k reach the bound with their largest: at least as many tokens do.
                k = top_k.to(tl.float32)
                if tl.sum((tile_largest > float("-inf")).to(tl.float32), axis=0) >= k:
                    for _round in range(ROUNDS):
                        keys, step = _thresholds(low, high)
                        reach = tile_largest[:, None] >= _from_key(keys)[None, :]
                        low += tl.sum((tl.sum(reach.to(tl.float32), axis=0) >= k).to(tl.int64), axis=0) * step
                        high = tl.minimum(low + step, high)
                    bound = _from_key(low)
            elif top_p < 1.0:
                # The mass below the bound is no more than top_p leaves out. A tile whose largest is below it has all
                # its mass there; another one at most its mass without its largest, and no token above the bound's.
                limit = (1.0 - top_p - _MARGIN).to(tl.float32) * total
                rest = tl.maximum(mass - tile_weight, 0.0)
                if limit >= 0.0:
                    scale = inverse(tl.load(params).to(tl.float32))
                    for _round in range(ROUNDS):
                        keys, step = _thresholds(low, high)
                        values = _from_key(keys)
                        most = (TILE - 1) * _weight(values, largest, scale)
                        reach = tile_largest[:, None] >= values[None, :]
                        below = tl.where(reach, tl.minimum(rest[:, None], most[None, :]), mass[:, None])
                        low += tl.sum((tl.sum(below, axis=0) <= limit).to(tl.int64), axis=0) * step
                        high = tl.minimum(low + step, high)
                    bound = _from_key(low)
        tl.store(head, largest)
        tl.store(head + 1, bound)
        tl.store(head + 2, total)


@triton.jit(do_not_specialize=["num_chunks"])
def gather_kernel(logits_ptr, keys_ptr, params_ptr, floats_ptr, ints_ptr, vocab_size, row_stride, num_chunks,
                  TILES: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    if is_filtered(params_ptr, row, vocab_size):
        head = head_field(floats_ptr, row, num_chunks, TILES, SLOTS)
        chunk_floats, chunk_ints = chunk_fields(floats_ptr, ints_ptr, row, num_chunks, TILES, SLOTS)
        list_values = chunk_floats + 3 * num_chunks
        list_tokens = chunk_ints + 2 * num_chunks
        largest = tl.load(head)
        bound = tl.load(head + 1)
        if (largest < float("inf")) & (largest > float("-inf")):
            params = params_ptr + row * NUM_PARAMS
            scale = inverse(tl.load(params).to(tl.float32))
            min_p = tl.load(params + 1).to(tl.float32)
            # With min_p and top_p the mass that min_p leaves is needed, too.
            needs_mass = (min_p > 0.0) & (tl.load(params + 2) < 1.0)
            read_bound = tl.where(needs_mass, float("-inf"), bound)
            # Neighbours in the vocabulary go to different programs: likely tokens often stand together.
            tile = chunk + tl.arange(0, TILES) * num_chunks
            tile_largest = tl.load(head + HEAD + tile)
            is_read = (tile_largest > float("-inf")) & (_weight(tile_largest, largest, scale) >= min_p)
            is_read &= tile_largest >= read_bound
            count = tl.zeros((), tl.int32)
            winner = tl.zeros((), tl.int32)
            mass = tl.zeros((), tl.float32)
            best = tl.full((), float("-inf"), tl.float32)
            if tl.max(is_read.to(tl.int32), axis=0) > 0:
                token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
                place = logits_ptr + row.to(tl.int64) * row_stride + token
                logits = tl.load(place, mask=is_read[:, None] & (token < vocab_size), other=float("-inf"))
                weight = _weight(logits, largest, scale)
                is_left = (weight >= min_p) & (logits > float("-inf"))
                mass = tl.sum(tl.sum(tl.where(is_left, weight, 0.0), axis=1), axis=0)
                is_candidate = is_left & (logits >= bound)
                count = tl.sum(tl.sum(is_candidate.to(tl.int32), axis=1), axis=0)
                if count > SLOTS:
                    key0, key1 = load_keys(keys_ptr, row)
                    score = (logits - largest) * scale - tl.log(exponentials(token, key0, key1))
                    tile_best, tile_token = tile_winners(tl.where(is_candidate, score, float("-inf")), token)
                    best, winner = first_best(tile_best, tile_token, vocab_size)
                elif count > 0:
                    flags = tl.reshape(is_candidate.to(tl.int32), (TILES * TILE,))
                    slot = chunk * SLOTS + tl.cumsum(flags, axis=0) - 1
                    slot = tl.reshape(slot, (TILES, TILE))
                    tl.store(list_values + slot, logits, mask=is_candidate)
                    tl.store(list_tokens + slot, token, mask=is_candidate)
            slots = tl.arange(0, SLOTS)
            num_listed = tl.where(count > SLOTS, 0, count)
            empty = tl.full((SLOTS,), float("-inf"), tl.float32)
            tl.store(list_values + chunk * SLOTS + slots, empty, mask=slots >= num_listed)
            tl.store(chunk_floats + chunk, best)
            tl.store(chunk_floats + 2 * num_chunks + chunk, mass)
            tl.store(chunk_ints + chunk, winner)
            tl.store(chunk_ints + num_chunks + chunk, count)


@triton.jit
def _load_logits(values, start, num_tokens, BLOCK: tl.constexpr):
    place = start + tl.arange(0, BLOCK)
    return tl.load(values + place, mask=place < num_tokens, other=float("-inf"))


@triton.jit
def _load_tokens(values, tokens, start, num_tokens, is_whole, BLOCK: tl.constexpr):
    """A block of the row, or of its list of candidates: logits and tokens. Empty slots have -inf."""
    logits = _load_logits(values, start, num_tokens, BLOCK)
    token = start + tl.arange(0, BLOCK)
    if not is_whole:
        token = tl.load(tokens + token, mask=logits > float("-inf"), other=0)
    return logits, token


@triton.jit
def _is_before(logits, token, other_logit, other_token):
    return (logits > other_logit) | ((logits == other_logit) & (token < other_token))


@triton.jit
def _race(logits, token, is_in, largest, scale, key0, key1, best, winner):
    """The better one of the best so far and the best in this block."""
    if tl.max(is_in.to(tl.int32), axis=0) > 0:
        score = (logits - largest) * scale - tl.log(exponentials(token, key0, key1))
        score = tl.where(is_in, score, float("-inf"))
        block_best = tl.max(score, axis=0)
        block_winner = tl.min(tl.where(score == block_best, token, 0x7FFFFFFF), axis=0)
        if (block_best > best) | ((block_best == best) & (block_winner < winner)):
            best = block_best
            winner = block_winner
    return best, winner


@triton.jit
def _top_k_mass(values, num_tokens, k, bound, largest, scale, BLOCK: tl.constexpr):
    """The mass of the first k of more than k tokens."""
    low = _key(tl.maximum(bound, -3.4028234663852886e38))
    high = _key(largest + 0.0) + 1
    while high - low > 1:
        keys, step = _thresholds(low, high)
        thresholds = _from_key(keys)
        counts = tl.zeros((_WAYS,), tl.int32)
        for start in range(0, num_tokens, BLOCK):
            logits = _load_logits(values, start, num_tokens, BLOCK)
            counts += tl.sum((logits[:, None] >= thresholds[None, :]).to(tl.int32), axis=0)
        low += tl.sum((counts >= k).to(tl.int64), axis=0) * step
        high = tl.minimum(low + step, high)
    last = _from_key(low)
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float64)
    for start in range(0, num_tokens, BLOCK):
        logits = _load_logits(values, start, num_tokens, BLOCK)
        weight = _weight(logits, largest, scale)
        count += tl.sum((logits > last).to(tl.int32), axis=0)
        mass += tl.sum(tl.where(logits > last, weight, 0.0), axis=0).to(tl.float64)
    return mass + (k - count).to(tl.float64) * _weight(last, largest, scale).to(tl.float64)


@triton.jit(do_not_specialize=["num_chunks"])
def finish_kernel(logits_ptr, keys_ptr, params_ptr, floats_ptr, ints_ptr, out_ptr, vocab_size, row_stride, num_chunks,
                  TILES: tl.constexpr, SLOTS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    head = head_field(floats_ptr, row, num_chunks, TILES, SLOTS)
    chunk_floats, chunk_ints = chunk_fields(floats_ptr, ints_ptr, row, num_chunks, TILES, SLOTS)
    list_values = chunk_floats + 3 * num_chunks
    list_tokens = chunk_ints + 2 * num_chunks
    params = params_ptr + row * NUM_PARAMS
    temperature = tl.load(params).to(tl.float32)
    if is_filtered(params_ptr, row, vocab_size):
        largest = tl.load(head)
        winner = tl.zeros((), tl.int32)
        if (largest < float("inf")) & (largest > float("-inf")):
            bound = tl.load(head + 1)
            total = tl.load(head + 2).to(tl.float64)
            scale = inverse(temperature)
            min_p = tl.load(params + 1).to(tl.float32)
            top_p = tl.load(params + 2)
            top_k = tl.load(params + 3).to(tl.int32)
            key0, key1 = load_keys(keys_ptr, row)
            chunk = tl.arange(0, CHUNKS_PAD)
            mask = chunk < num_chunks
            counts = tl.load(chunk_ints + num_chunks + chunk, mask=mask, other=0)
            is_whole = tl.max(counts, axis=0) > SLOTS
            if (min_p > 0.0) & (top_p < 1.0):
                masses = tl.load(chunk_floats + 2 * num_chunks + chunk, mask=mask, other=0.0)
                total = tl.sum(masses.to(tl.float64), axis=0)

            # The race's winner among all candidates: of full chunks it is known already.
            best = tl.load(chunk_floats + chunk, mask=mask, other=float("-inf"))
            tokens = tl.load(chunk_ints + chunk, mask=mask, other=vocab_size - 1)
            best, winner = first_best(best, tokens, vocab_size)
            for start in range(0, num_chunks * SLOTS, BLOCK):
                logits, token = _load_tokens(list_values, list_tokens, start, num_chunks * SLOTS, False, BLOCK)
                is_in = logits > float("-inf")
                best, winner = _race(logits, token, is_in, largest, scale, key0, key1, best, winner)

            logits_row = logits_ptr + row.to(tl.int64) * row_stride
            if is_whole:
                values = logits_row
                num_tokens = vocab_size
            else:
                values = list_values
                num_tokens = num_chunks * SLOTS
            if (top_k < tl.sum(counts, axis=0)) & (top_p < 1.0):
                total = _top_k_mass(values, num_tokens, top_k, bound, largest, scale, BLOCK)
            target = top_p * total
            is_kept = (top_k >= vocab_size) & (top_p >= 1.0)
            while not is_kept:
                winner_logit = tl.load(logits_row + winner)
                count = tl.zeros((), tl.int32)
                mass = tl.zeros((), tl.float64)
                for start in range(0, num_tokens, BLOCK):
                    logits, token = _load_tokens(values, list_tokens, start, num_tokens, is_whole, BLOCK)
                    is_before = _is_before(logits, token, winner_logit, winner)
                    weight = tl.where(is_before, _weight(logits, largest, scale), 0.0)
                    count += tl.sum(is_before.to(tl.int32), axis=0)
                    mass += tl.sum(weight, axis=0).to(tl.float64)
                is_kept = (count == 0) | ((count < top_k) & (mass < target))
                if not is_kept:
                    best = tl.full((), float("-inf"), tl.float32)
                    next_winner = tl.full((), 0x7FFFFFFF, tl.int32)
                    for start in range(0, num_tokens, BLOCK):
                        logits, token = _load_tokens(values, list_tokens, start, num_tokens, is_whole, BLOCK)
                        is_in = _is_before(logits, token, winner_logit, winner)
                        best, next_winner = _race(logits, token, is_in, largest, scale, key0, key1, best, next_winner)
                    winner = next_winner
        code = token_or_failure(winner, largest)
    else:
        winner, code = merge_chunks(chunk_floats, chunk_ints, temperature, vocab_size, num_chunks, CHUNKS_PAD, True)
    store_result(out_ptr, row, winner, code)


def sample_rows(
    logits: Tensor, params: Tensor, keys: Tensor | None, *, filters: bool, chunk: int = CHUNK, num_warps: int = 4
) -> Tensor:
    """-> [2, rows] int64: tokens, in range in any case, and codes: the token again, or -1 or -2 for a failure.

    logits: [rows, vocab] float32. params: [rows, 4] float64, contiguous: temperature, min_p, top_p, top_k; a
    temperature of 0 is greedy, top_p above 1 and a top_k of vocab are off. keys: [rows, 2] int32; None where all rows
    are greedy. filters: whether any row has min_p, top_p or top_k.
    """
    num_params = NUM_PARAMS.value
    if not filters:
        return sample_unfiltered(logits, keys, params, num_params, chunk=chunk, num_warps=num_warps)
    rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and keys is not None
    layout = Layout(vocab_size, chunk)
    floats, ints, out = layout.allocate(rows, logits.device)
    num_chunks, tiles, slots = layout.num_chunks, layout.tiles, layout.slots
    grid, stride = (num_chunks, rows), logits.stride(0)
    chunk_kernel[grid](
        logits, keys, params, floats, ints, vocab_size, stride, num_chunks, TILES=tiles, SLOTS=slots,
        PARAMS=num_params, SAMPLE=True, FILTER=True, num_warps=num_warps,
    )  # fmt: skip
    bound_kernel[(rows,)](
        params, floats, vocab_size, num_chunks, TILES=tiles, SLOTS=slots,
        TILES_PAD=next_power_of_2(num_chunks * tiles), ROUNDS=5, num_warps=8,
    )  # fmt: skip
    gather_kernel[grid](
        logits, keys, params, floats, ints, vocab_size, stride, num_chunks, TILES=tiles, SLOTS=slots,
        num_warps=num_warps,
    )  # fmt: skip
    finish_kernel[(rows,)](
        logits, keys, params, floats, ints, out, vocab_size, stride, num_chunks, TILES=tiles, SLOTS=slots,
        CHUNKS_PAD=next_power_of_2(num_chunks), BLOCK=min(_FINISH_BLOCK, next_power_of_2(vocab_size)), num_warps=16,
    )  # fmt: skip
    return out


def draw_each_way(vocab_size: int, device: torch.device) -> None:
    """One row by each path of `sample_rows`, and its logprobs, so that no request waits for a compiler."""
    logits = torch.zeros((1, vocab_size), device=device)
    params = torch.ones((1, NUM_PARAMS.value), dtype=torch.float64, device=device)
    keys = torch.zeros((1, 2), dtype=torch.int32, device=device)
    sample_rows(logits, params, keys, filters=True)
    sample_rows(logits, params, keys, filters=False)
    sample_rows(logits, params, None, filters=False)
    row_log_totals(logits)
