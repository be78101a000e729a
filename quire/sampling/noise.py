"""The noise that draws tokens: a pure function of (seed, index, position, token id), nothing else.

So a sequence draws the same tokens from the same logits alone or batched, in any row, before and after preemption.
This docstring is the specification: any backend that follows it draws the same tokens.

Integers have 32 bits and no sign; + and * wrap; >> shifts zeros in; ^ is exclusive or.

    mix(x):  x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16      (murmur3's finaliser)

Each row has two keys a step, with C0 = 0x243F6A88, C1 = 0x85A308D3 and the seed taken modulo 2**64:

    key[i] = mix(mix(mix(mix(C[i] ^ seed_low) + seed_high) + index) + position)

`position` is the index, in its sequence, of the token that is drawn. mix is a bijection, so no two positions of one
sequence share a key. Each token then has 31 bits. Here >> copies the sign bit (int32_t in C), which saves the array
backends a mask:

    x = mix(token) ^ key[0]
    x = x * 0x85EBCA6B + key[1];  x ^= x >> 15;  x *= 0xC2B2AE35;  x ^= x >> 16
    bits = x & 0x7FFFFFFF

and from them, in float32, a uniform v in (0, 1), an exponential e, and the Gumbel noise g:

    v = bits * ((1 - 2**-24) * 2**-31) + 2**-32
    e = -log(1 - v)              as log1p, so that small e, which decide the race, keep their full precision
    g = -log(e)                  between -2.9 and 22.2

The token is the one with the largest z + g over the kept tokens, where z = (logit - largest logit) / temperature;
exp(z) / e has the same order and is what gets computed. Of equal logits with equal noise the lower token id wins.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling.scratch import Scratch
from quire.sampling.transfer import to_device

Words = npt.NDArray[np.uint32]

LANE_CONSTANTS = (0x243F6A88, 0x85A308D3)
MULTIPLIER_1 = 0x85EBCA6B
MULTIPLIER_2 = 0xC2B2AE35
UNIFORM_SCALE = (1 - 2.0**-24) * 2.0**-31
UNIFORM_OFFSET = 2.0**-32

_WORD = 0xFFFFFFFF


def mix(x: Words) -> Words:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(MULTIPLIER_1)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(MULTIPLIER_2)
    return x ^ (x >> np.uint32(16))


def sequence_words(seed: int, index: int) -> Words:
    """The part of the keys that does not change while a sequence runs: [2]."""
    words = np.array(LANE_CONSTANTS, dtype=np.uint32)
    words = mix(words ^ np.uint32(seed & _WORD))
    words = mix(words + np.uint32(seed >> 32 & _WORD))
    return mix(words + np.uint32(index & _WORD))


def step_keys(words: Words, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The rows' keys at these positions. words: [rows, 2] -> [rows, 2], as int32 with the same bits."""
    return mix(words + positions.astype(np.uint32)[:, None]).view(np.int32)


def token_words(vocab_size: int, device: torch.device) -> Tensor:
    """mix(token) of every token: [vocab] int32. The part of the noise that no row changes."""
    words = mix(np.arange(vocab_size, dtype=np.uint32))
    return to_device(words.view(np.int32), device)


def exponentials(keys: Tensor, words: Tensor, scratch: Scratch) -> Tensor:
    """e for each row and token. keys: [rows, 2] int32; words: [rows or 1, n] of token_words -> [rows, n] float32.

    The result is the scratch named "noise".
    """
    shape = (len(keys), words.shape[1])
    x = torch.bitwise_xor(words, keys[:, :1], out=scratch.get("bits", shape, torch.int32))
    noise = scratch.get("noise", shape)
    shifted = noise.view(torch.int32)
    x.mul_(_signed(MULTIPLIER_1)).add_(keys[:, 1:])
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=shifted)).mul_(_signed(MULTIPLIER_2))
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=shifted)).bitwise_and_(0x7FFFFFFF)
    return noise.copy_(x).mul_(-UNIFORM_SCALE).sub_(UNIFORM_OFFSET).log1p_().neg_()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
