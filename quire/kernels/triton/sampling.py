# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Greedy choice and sampling with temperature in one pass over the logits.

The first kernel runs the race of `quire/sampling/noise.py` within each chunk of the vocabulary, the second one among
the chunks' winners, so that even one row fills the chip. Scores are kept relative to their chunk's largest logit: no
temperature, however small, overflows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.common import next_power_of_2


@triton.jit
def _exponentials(token, key0, key1):
    """e of the specification. token: int32; keys: uint32 -> float32."""
    x = token.to(tl.uint32)
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    x = (x ^ key0) * 0x85EBCA6B + key1
    # From here on the specification shifts the sign bit in.
    x ^= (x.to(tl.int32, bitcast=True) >> 15).to(tl.uint32, bitcast=True)
    x *= 0xC2B2AE35
    x ^= (x.to(tl.int32, bitcast=True) >> 16).to(tl.uint32, bitcast=True)
    v = (x & 0x7FFFFFFF).to(tl.float32) * 4.656612595521636e-10 + 2.3283064365386963e-10
    # -log1p(-v). The hardware's logarithm is rough near 1, where small e decide the race: there the series of
    # 2 atanh(s) with s = v / (2 - v), whose first term left out is below float32's precision for v <= 1/2.
    s = v / (2.0 - v)
    t = s * s
    series = 1.0 / 13 + t * (1.0 / 15)
    series = 1.0 / 11 + t * series
    series = 1.0 / 9 + t * series
    series = 1.0 / 7 + t * series
    series = 1.0 / 5 + t * series
    series = 1.0 / 3 + t * series
    return tl.where(v < 0.5, 2.0 * s * (1.0 + t * series), -tl.log(1.0 - v))


@triton.jit(do_not_specialize=["vocab_size", "row_stride", "num_chunks"])
def chunk_kernel(logits_ptr, keys_ptr, temperature_ptr, score_ptr, largest_ptr, token_ptr, vocab_size, row_stride,
                 num_chunks, CHUNK: tl.constexpr, SAMPLE: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    logits = logits.to(tl.float32)
    largest = tl.max(logits, axis=0)
    score = logits
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            key0 = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
            key1 = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
            score = (logits - largest) / temperature - tl.log(_exponentials(token, key0, key1))
            # A chunk that bans every token has largest = -inf, and -inf - -inf is NaN: nothing to win here.
            score = tl.where(logits == float("-inf"), float("-inf"), score)
        else:
            score = tl.where(logits == float("-inf"), float("-inf"), logits - largest)
    best, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    entry = row * num_chunks + chunk
    tl.store(score_ptr + entry, best)
    tl.store(largest_ptr + entry, largest)
    tl.store(token_ptr + entry, tl.minimum(chunk * CHUNK + place, vocab_size - 1))


@triton.jit(do_not_specialize=["num_chunks"])
def winner_kernel(score_ptr, largest_ptr, token_ptr, temperature_ptr, out_ptr, num_chunks, CHUNKS_PAD: tl.constexpr,
                  SAMPLE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    index = tl.arange(0, CHUNKS_PAD)
    mask = index < num_chunks
    score = tl.load(score_ptr + row * num_chunks + index, mask=mask, other=float("-inf"))
    if SAMPLE:
        largest = tl.load(largest_ptr + row * num_chunks + index, mask=mask, other=float("-inf"))
        top = tl.max(largest, axis=0)
        temperature = tl.load(temperature_ptr + row)
        below = (largest - top) / tl.where(temperature > 0.0, temperature, 1.0)
        score = tl.where(score == float("-inf"), score, score + below)
    _, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(token_ptr + row * num_chunks + place).to(tl.int64))


def sample(
    logits: Tensor,  # [rows, vocab], float32 or 16 bits wide
    keys: Tensor | None = None,  # [rows, 2] int32: see quire/sampling/noise.py
    temperature: Tensor | None = None,  # [rows] float32; 0 is greedy
    *,
    chunk: int | None = None,
    num_warps: int = 4,
) -> Tensor:
    """-> [rows] int64: the largest logit, or the winner of the race where keys and temperatures are given."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and (keys is None) == (temperature is None)
    if chunk is None:
        chunk = 1024 if rows < 8 else 4096
    num_chunks = -(-vocab_size // chunk)
    score = torch.empty((2, rows, num_chunks), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, num_chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    does_sample = keys is not None
    chunk_kernel[(num_chunks, rows)](
        logits, keys, temperature, score[0], score[1], token, vocab_size, logits.stride(0), num_chunks,
        CHUNK=chunk, SAMPLE=does_sample, num_warps=num_warps,
    )  # fmt: skip
    winner_kernel[(rows,)](
        score[0], score[1], token, temperature, out, num_chunks, CHUNKS_PAD=next_power_of_2(num_chunks),
        SAMPLE=does_sample, num_warps=4,
    )  # fmt: skip
    return out
