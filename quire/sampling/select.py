"""Finding large values in rows of logits without sorting them.

torch's argmax, topk and sort on a CPU are ten to a hundred times slower than amax, which runs at memory speed. So the
CPU looks at the maxima of blocks of tokens first, and then only into the blocks that matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_BLOCK_TOKENS = 256
_TOP_BLOCK_TOKENS = 64
# Elements of one pass: on a CPU so that intermediates stay in its cache, elsewhere to bound their memory.
_CPU_CHUNK_ELEMENTS = 1 << 19
_CHUNK_ELEMENTS = 1 << 24


def chunks(num_rows: int, vocab_size: int, device: torch.device) -> list[slice]:
    """The rows, cut into pieces of a good size for one pass over [rows, vocab]."""
    num_elements = _CPU_CHUNK_ELEMENTS if device.type == "cpu" else _CHUNK_ELEMENTS
    step = max(1, num_elements // vocab_size)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def row_max(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest value and the lowest token id that has it: [rows], [rows]. NaN counts as the largest."""
    vocab_size = values.shape[1]
    if values.device.type != "cpu" or vocab_size <= 2 * _MAX_BLOCK_TOKENS:
        token_ids = values.argmax(1, keepdim=True)
        return values.gather(1, token_ids)[:, 0], token_ids[:, 0]
    maxima = _block_maxima(values, _MAX_BLOCK_TOKENS)
    tail = values[:, vocab_size - vocab_size % _MAX_BLOCK_TOKENS :]
    if tail.shape[1]:
        maxima = torch.cat((maxima, tail.amax(1, keepdim=True)), dim=1)
    first = maxima.argmax(1, keepdim=True) * _MAX_BLOCK_TOKENS
    token_ids = (first + torch.arange(_MAX_BLOCK_TOKENS)).clamp_(max=vocab_size - 1)
    in_block = values.gather(1, token_ids)
    place = in_block.argmax(1, keepdim=True)
    return in_block.gather(1, place)[:, 0], token_ids.gather(1, place)[:, 0]


def max_top_k(vocab_size: int) -> int:
    """The largest k that top_bound takes."""
    return vocab_size // (2 * _TOP_BLOCK_TOKENS)


def top_bound(values: Tensor, k: Tensor, max_k: int) -> Tensor:
    """A value that at least k tokens of each row reach, and seldom many more: [rows, 1]. On a CPU only.

    It is the k-th largest of the maxima of blocks. k: [rows, 1], none above max_k.
    """
    return _block_maxima(values, _TOP_BLOCK_TOKENS).topk(max_k, dim=1).values.gather(1, k - 1)


def tokens_from(values: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each row that reach its bound, in order, then -inf: values and ids, [rows, n]. On a CPU only.

    The order is by value, and by token id where values are equal. bound: [rows, 1]. Tokens at -inf are left out.
    """
    num_rows, vocab_size = values.shape
    if vocab_size % _TOP_BLOCK_TOKENS:
        missing = _TOP_BLOCK_TOKENS - vocab_size % _TOP_BLOCK_TOKENS
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    bound = bound.clamp(min=torch.finfo(values.dtype).min)
    # Few blocks have such tokens: find those first.
    block_rows, blocks = _block_maxima(values, _TOP_BLOCK_TOKENS).ge(bound).nonzero(as_tuple=True)
    near = values.view(num_rows, -1, _TOP_BLOCK_TOKENS)[block_rows, blocks]
    found, places = near.ge(bound[block_rows]).nonzero(as_tuple=True)
    row_ids = block_rows[found]
    # Write them to the front of their rows, where they stand by token id, and sort.
    counts = row_ids.bincount(minlength=num_rows)
    fronts = torch.arange(len(row_ids)) - (counts.cumsum(0) - counts)[row_ids]
    shape = (num_rows, max(1, int(counts.max())))
    front_values = near.new_full(shape, -torch.inf).index_put_((row_ids, fronts), near[found, places])
    token_ids = blocks[found] * _TOP_BLOCK_TOKENS + places
    front_ids = token_ids.new_zeros(shape).index_put_((row_ids, fronts), token_ids)
    front_values, order = torch.sort(front_values, dim=1, descending=True, stable=True)
    return front_values, front_ids.gather(1, order)


def _block_maxima(values: Tensor, num_block_tokens: int) -> Tensor:
    """The maxima of all whole blocks: [rows, blocks]."""
    num_rows, vocab_size = values.shape
    num_blocks = vocab_size // num_block_tokens
    return values[:, : num_blocks * num_block_tokens].view(num_rows, num_blocks, num_block_tokens).amax(2)
