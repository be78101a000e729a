# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Tokens that a grammar forbids, a bit for each: their logits become -inf in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # tokens of a program


@triton.jit(do_not_specialize=["stride", "num_words", "vocab_size"])
def ban_kernel(logits_ptr, lines_ptr, words_ptr, stride, num_words, vocab_size, TILE: tl.constexpr):
    mask = tl.program_id(0)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = tokens < vocab_size
    words = tl.load(words_ptr + mask.to(tl.int64) * num_words + tokens // 32, mask=is_token, other=-1)
    line = tl.load(lines_ptr + mask)
    is_banned = (words >> (tokens % 32)) & 1 == 0
    tl.store(logits_ptr + line * stride + tokens, float("-inf"), mask=is_token & is_banned)


def ban_tokens(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """logits: [rows, vocab], changed in place; lines: [masks] int64; words: [masks, words] int32."""
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1 and words.is_contiguous() and words.shape[1] * 32 >= vocab_size
    grid = (len(lines), triton.cdiv(vocab_size, _TILE))
    ban_kernel[grid](logits, lines, words, logits.stride(0), words.shape[1], vocab_size, TILE=_TILE, num_warps=4)
