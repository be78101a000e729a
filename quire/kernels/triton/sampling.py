# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Greedy choice and sampling with temperature in one pass over the logits.

The first kernel runs the race of `quire/sampling/noise.py` within each chunk of the vocabulary, the second one among
the chunks' winners, so that even one row fills the chip. Scores are kept relative to their chunk's largest logit: no
temperature, however small, overflows. Rows that min_p, top_k or top_p restrict go on to `sampling_filter.py`, for
which the first kernel leaves notes on every tile of TILE tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.common import next_power_of_2

TILE: tl.constexpr = tl.constexpr(128)  # what one warp loads at once, and what filters look at or leave out
NUM_PARAMS: tl.constexpr = tl.constexpr(4)  # of a row: temperature, min_p, top_p, top_k
HEAD: tl.constexpr = tl.constexpr(4)  # of a row's notes: largest logit, lower bound, mass; one is spare
NOT_FINITE: tl.constexpr = tl.constexpr(-1)  # instead of a token: a NaN or an infinity among the logits
ALL_BANNED: tl.constexpr = tl.constexpr(-2)  # no logit above -inf
CHUNK = 2048  # tokens of one program: one size for all batches, so that no batch has to wait for a compiler
_SLOT_TOKENS = 64  # room for one candidate in so many tokens


@dataclass(slots=True, frozen=True)
class Layout:
    """How a row's tokens are cut up, and where its notes stand: floats and ints, one run of each for a row.

    floats  head | tiles' largest | tiles' mass | chunks' score | value | mass | candidates' value
    ints                                          chunks' token | count        | candidates' token
    """

    vocab_size: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        return -(-self.vocab_size // self.chunk)

    @property
    def tiles(self) -> int:
        """How many tiles one chunk has."""
        return self.chunk // int(TILE.value)

    @property
    def slots(self) -> int:
        """Room for candidates, for one chunk."""
        return self.chunk // _SLOT_TOKENS

    @property
    def num_floats(self) -> int:
        return int(HEAD.value) + self.num_chunks * (2 * self.tiles + 3 + self.slots)

    @property
    def num_ints(self) -> int:
        return self.num_chunks * (2 + self.slots)

    def allocate(self, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The notes, floats and ints, and the result."""
        floats = torch.empty(num_rows * self.num_floats, dtype=torch.float32, device=device)
        ints = torch.empty(num_rows * self.num_ints, dtype=torch.int32, device=device)
        return floats, ints, torch.empty((2, num_rows), dtype=torch.int64, device=device)


@triton.jit
def exponentials(token, key0, key1):
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


@triton.jit
def load_keys(keys_ptr, row):
    key0 = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
    return key0, key1


@triton.jit
def inverse(temperature):
    """1 / temperature, but finite and above zero, so that no product with a difference of logits is NaN."""
    return tl.minimum(tl.maximum(1.0 / temperature, 1.0e-37), 3.0e38)


@triton.jit
def is_filtered(params_ptr, row, vocab_size):
    params = params_ptr + row * NUM_PARAMS
    restricts = (tl.load(params + 1) > 0.0) | (tl.load(params + 2) < 1.0) | (tl.load(params + 3) < vocab_size)
    return (tl.load(params).to(tl.float32) > 0.0) & restricts


@triton.jit
def first_best(score, token, vocab_size):
    """The largest of the scores, and the lowest token that has it; in range even if all are NaN."""
    best = tl.max(score, axis=0)
    token = tl.min(tl.where(score == best, token, vocab_size - 1), axis=0)
    return best, token


@triton.jit
def tile_winners(score, token):
    """The best of each tile: [tiles, TILE] -> [tiles], and its token."""
    best, place = tl.max(score, axis=1, return_indices=True, return_indices_tie_break_left=True)
    return best, tl.min(token, axis=1) + place


@triton.jit
def head_field(floats_ptr, row, num_chunks, TILES: tl.constexpr, SLOTS: tl.constexpr):
    """Where a row's notes begin; what follows where, see Layout."""
    return floats_ptr + row.to(tl.int64) * (HEAD + num_chunks * (2 * TILES + 3 + SLOTS))


@triton.jit
def chunk_fields(floats_ptr, ints_ptr, row, num_chunks, TILES: tl.constexpr, SLOTS: tl.constexpr):
    """Where the chunks' floats and ints begin."""
    floats = head_field(floats_ptr, row, num_chunks, TILES, SLOTS) + HEAD + num_chunks * (2 * TILES)
    return floats, ints_ptr + row.to(tl.int64) * (num_chunks * (2 + SLOTS))


@triton.jit(do_not_specialize=["num_chunks"])
def chunk_kernel(logits_ptr, keys_ptr, params_ptr, floats_ptr, ints_ptr, vocab_size, row_stride, num_chunks,
                 TILES: tl.constexpr, SLOTS: tl.constexpr, PARAMS: tl.constexpr, SAMPLE: tl.constexpr,
                 FILTER: tl.constexpr):  # fmt: skip
    """A chunk's winner, or for a row that is filtered each tile's largest logit and mass. PARAMS: columns of params."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    tile_fields = head_field(floats_ptr, row, num_chunks, TILES, SLOTS) + HEAD
    chunk_floats, chunk_ints = chunk_fields(floats_ptr, ints_ptr, row, num_chunks, TILES, SLOTS)
    tile = tl.arange(0, TILES)
    token = chunk * (TILES * TILE) + tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    logits = tl.load(logits_ptr + row.to(tl.int64) * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    logits = logits.to(tl.float32)
    # A row with a NaN fails like one with an infinity: one comparison less for every logit.
    logits = tl.where(logits < float("inf"), logits, float("inf"))
    tile_largest = tl.max(logits, axis=1)
    temperature = 0.0
    filtered = False
    if SAMPLE:
        temperature = tl.load(params_ptr + row * PARAMS).to(tl.float32)
    if FILTER:
        filtered = is_filtered(params_ptr, row, vocab_size)
    if filtered:
        z = (logits - tile_largest[:, None]) * inverse(temperature)
        mass = tl.sum(tl.exp2(z * 1.4426950408889634), axis=1)
        tiles = chunk * TILES + tile
        tl.store(tile_fields + tiles, tile_largest)
        tl.store(tile_fields + num_chunks * TILES + tiles, tl.where(tile_largest > float("-inf"), mass, 0.0))
    else:
        largest = tl.max(tile_largest, axis=0)
        score = logits
        if SAMPLE:
            if temperature > 0.0:
                key0, key1 = load_keys(keys_ptr, row)
                score = (logits - largest) * inverse(temperature) - tl.log(exponentials(token, key0, key1))
            else:
                score = logits - largest
            # A chunk that bans every token has largest = -inf, and -inf - -inf is NaN: nothing to win here.
            score = tl.where(logits == float("-inf"), float("-inf"), score)
        tile_best, tile_token = tile_winners(score, token)
        best, winner = first_best(tile_best, tile_token, vocab_size)
        tl.store(chunk_floats + chunk, best)
        tl.store(chunk_floats + num_chunks + chunk, largest)
        tl.store(chunk_ints + chunk, winner)


@triton.jit
def merge_chunks(chunk_floats, chunk_ints, temperature, vocab_size, num_chunks, CHUNKS_PAD: tl.constexpr,
                 SAMPLE: tl.constexpr):  # fmt: skip
    """The winner of a row that is not filtered, and its code: the token again, or why there is none."""
    index = tl.arange(0, CHUNKS_PAD)
    mask = index < num_chunks
    score = tl.load(chunk_floats + index, mask=mask, other=float("-inf"))
    largest = tl.load(chunk_floats + num_chunks + index, mask=mask, other=float("-inf"))
    top = tl.max(largest, axis=0)
    if SAMPLE:
        below = (largest - top) * tl.where(temperature > 0.0, inverse(temperature), 1.0)
        score = tl.where(score == float("-inf"), score, score + below)
    token = tl.load(chunk_ints + index, mask=mask, other=vocab_size - 1)
    winner = first_best(score, token, vocab_size)[1]
    return winner, token_or_failure(winner, top)


@triton.jit
def token_or_failure(token, largest):
    code = tl.where(largest == float("-inf"), ALL_BANNED, token)
    return tl.where(largest < float("inf"), code, NOT_FINITE)


@triton.jit
def store_result(out_ptr, row, token, code):
    """out: [2, rows]. One pointer: that to the codes would be aligned for some numbers of rows only."""
    tl.store(out_ptr + row, token.to(tl.int64))
    tl.store(out_ptr + tl.num_programs(0) + row, code.to(tl.int64))


@triton.jit(do_not_specialize=["num_chunks"])
def winner_kernel(params_ptr, floats_ptr, ints_ptr, out_ptr, vocab_size, num_chunks, TILES: tl.constexpr,
                  SLOTS: tl.constexpr, PARAMS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
                  SAMPLE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    chunk_floats, chunk_ints = chunk_fields(floats_ptr, ints_ptr, row, num_chunks, TILES, SLOTS)
    temperature = 0.0
    if SAMPLE:
        temperature = tl.load(params_ptr + row * PARAMS).to(tl.float32)
    token, code = merge_chunks(chunk_floats, chunk_ints, temperature, vocab_size, num_chunks, CHUNKS_PAD, SAMPLE)
    store_result(out_ptr, row, token, code)


def sample(
    logits: Tensor,  # [rows, vocab], float32 or 16 bits wide
    keys: Tensor | None = None,  # [rows, 2] int32: see quire/sampling/noise.py
    temperature: Tensor | None = None,  # [rows] float32; 0 is greedy
    *,
    chunk: int = CHUNK,
    num_warps: int = 4,
) -> Tensor:
    """-> [rows] int64: the largest logit, or the winner of the race where keys and temperatures are given."""
    assert (keys is None) == (temperature is None)
    return sample_unfiltered(logits, keys, temperature, 1, chunk=chunk, num_warps=num_warps)[0]


def sample_unfiltered(
    logits: Tensor,
    keys: Tensor | None,
    params: Tensor | None,  # [rows, num_params], the temperature first
    num_params: int,
    *,
    chunk: int = CHUNK,
    num_warps: int = 4,
) -> Tensor:
    """-> [2, rows] int64: tokens, in range in any case, and codes: the token again, or why there is none."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    layout = Layout(vocab_size, chunk)
    floats, ints, out = layout.allocate(rows, logits.device)
    num_chunks, tiles, slots, does_sample = layout.num_chunks, layout.tiles, layout.slots, keys is not None
    chunk_kernel[(num_chunks, rows)](
        logits, keys, params, floats, ints, vocab_size, logits.stride(0), num_chunks, TILES=tiles, SLOTS=slots,
        PARAMS=num_params, SAMPLE=does_sample, FILTER=False, num_warps=num_warps,
    )  # fmt: skip
    winner_kernel[(rows,)](
        params, floats, ints, out, vocab_size, num_chunks, TILES=tiles, SLOTS=slots, PARAMS=num_params,
        CHUNKS_PAD=next_power_of_2(num_chunks), SAMPLE=does_sample, num_warps=1,
    )  # fmt: skip
    return out
