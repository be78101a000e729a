"""Blocks as bytes: copies and swaps move exactly one block of every layer."""

from __future__ import annotations

import fakes
import pytest
import torch

from quire.executor.kv_cache import KVCache
from quire.models.architectures import spec_from_config
from quire.models.kv_layout import kv_layout
from quire.plan import Move

SPEC = spec_from_config(fakes.TINY_LLAMA, source="test")


def make(num_host_blocks: int = 3) -> KVCache:
    cache = KVCache(
        SPEC,
        kv_layout(SPEC, None),
        num_blocks=6,
        num_host_blocks=num_host_blocks,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert not cache.device_blocks.any()
    cache.device_blocks.normal_()
    return cache


def test_a_layer_is_a_view() -> None:
    cache = make()
    assert [tuple(layer.shape) for layer in cache.layers] == [(7, 2, 2, 4, 32)] * 2  # six and the spare one
    cache.layers[1][3, 1, 0, 2, 5] = 77.0
    assert cache.device_blocks[1, 3, 1, 0, 2, 5] == 77.0
    assert cache.block_bytes == kv_layout(SPEC, None).block_bytes(SPEC, 4, 4) == cache.device_blocks[:, 0].nbytes


def test_copies_read_before_any_is_written() -> None:
    cache = make()
    before = cache.device_blocks.clone()
    cache.copy([(0, 1), (1, 2)])
    assert torch.equal(cache.device_blocks[:, 1], before[:, 0])
    assert torch.equal(cache.device_blocks[:, 2], before[:, 1])
    for untouched in (0, 3, 4, 5):
        assert torch.equal(cache.device_blocks[:, untouched], before[:, untouched])
    cache.copy([])


def test_out_and_in_again() -> None:
    cache = make()
    before = cache.device_blocks.clone()
    cache.move(Move(1, False, [(4, 0), (2, 2)]))
    assert (cache.take_finished(), cache.take_finished()) == ([1], [])
    cache.device_blocks.zero_()
    cache.move(Move(2, True, [(1, 0), (5, 2)]))
    assert torch.equal(cache.device_blocks[:, 1], before[:, 4])
    assert torch.equal(cache.device_blocks[:, 5], before[:, 2])


def test_moves_are_told_to_nobody_once_they_are_forgotten() -> None:
    cache = make()
    cache.move(Move(1, False, [(4, 0)]))
    cache.forget_moves()
    assert cache.take_finished() == []


def test_swap_rate_is_measured() -> None:
    rate = make().measure_swap_rate()
    assert rate is not None
    assert rate > 0
    assert make(num_host_blocks=0).measure_swap_rate() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_as_bytes_and_back(dtype: torch.dtype) -> None:
    cache = KVCache(
        SPEC,
        kv_layout(SPEC, None),
        num_blocks=6,
        num_host_blocks=0,
        block_size=4,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    words = cache.device_blocks.view(torch.int32)
    words.random_()
    before = words.clone()
    blocks = cache.payloads([4, 1], 16)()
    assert [len(block) for block in blocks] == [cache.block_bytes + 16] * 2
    fill = cache.fillers([0, 5])
    for place, block in enumerate(blocks):
        fill(place, block[: cache.block_bytes])
    assert torch.equal(words[:, [0, 5]], before[:, [4, 1]])
    assert torch.equal(words[:, 1:5], before[:, 1:5])
