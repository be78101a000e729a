"""Blocks as bytes: copies and swaps move exactly one block of every layer."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch

from quire.executor import kv_cache
from quire.executor.kv_cache import KVCache
from quire.models.architectures import spec_from_config
from quire.models.kv_layout import kv_layout
from quire.plan import Move

SPEC = spec_from_config(fakes.TINY_LLAMA, source="test")


def make(num_host_blocks: int = 3, num_blocks: int = 6, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(
        SPEC,
        kv_layout(SPEC, None),
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=4,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    assert not cache.device_blocks.view(torch.int32).any()
    cache.device_blocks.view(torch.int32).random_(1 << 20)
    return cache


def test_a_layer_is_a_view() -> None:
    cache = make()
    assert [tuple(layer.shape) for layer in cache.layers] == [(7, 2, 2, 4, 32)] * 2  # six and the spare one
    cache.layers[1][3, 1, 0, 2, 5] = 77.0
    assert cache.device_blocks[1, 3, 1, 0, 2, 5] == 77.0
    assert cache.block_bytes == kv_layout(SPEC, None).block_bytes(SPEC, 4, 4) == cache.device_blocks[:, 0].nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the process holds from /proc")
def test_pages_that_are_taken_hold_what_they_held() -> None:
    zeros = kv_cache._untouched_zeros((64 << 20,), torch.uint8)
    zeros[::4099] = 5
    before = zeros[: 1 << 20].clone()
    untouched = kv_cache._untouched_zeros((64 << 20,), torch.uint8)
    held = resident_bytes()
    kv_cache.take_pages(zeros)
    assert resident_bytes() - held < 8 << 20 and torch.equal(zeros[: 1 << 20], before)
    kv_cache.take_pages(untouched)
    assert resident_bytes() - held > 60 << 20 and not untouched.any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


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


class PlainLink:
    """In the place of streams: what is queued is done at once, and told when it is asked for."""

    NUM_LANES = 2

    def __init__(self) -> None:
        self.finished: list[int | None] = []

    def mark(self) -> None:
        return None

    @contextlib.contextmanager
    def storing(self, ticket: int | None, after: None, host_ids: frozenset[int]) -> Iterator[None]:
        yield
        self.finished.append(ticket)

    loading = storing

    def lane(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def follow(self, number: int, other: int) -> None:
        pass

    def take_finished(self) -> list[int | None]:
        finished, self.finished = self.finished, []
        return finished


@pytest.mark.parametrize("piece_blocks", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_cross_a_link_in_pieces(monkeypatch: pytest.MonkeyPatch, piece_blocks: int, dtype: torch.dtype) -> None:
    """As on a GPU: by way of staging buffers, in runs of host blocks and singly, and only once they are started."""
    cache = make(num_host_blocks=20, num_blocks=40, dtype=dtype)
    monkeypatch.setattr(kv_cache, "_PIECE_BYTES", piece_blocks * cache.block_bytes)
    link: Any = PlainLink()
    cache._open_link(link)
    words = cache.device_blocks.view(torch.int32)
    words.random_()
    before = words.clone()
    hosts = [3, 4, 5, 9, 19, 2, 1, 0, 7, 8, 10, 11, 12]
    sources, targets = list(range(13)), list(range(39, 26, -1))
    cache.move(Move(1, False, list(zip(sources, hosts, strict=True))))
    cache.move(Move(2, True, list(zip(targets, hosts, strict=True))))
    assert torch.equal(words, before) and cache.take_finished() == []
    cache.start_moves()
    cache.start_moves()
    assert cache.take_finished() == [1, 2]
    assert torch.equal(words[:, targets], before[:, sources])
    assert torch.equal(words[:, :27], before[:, :27]) and torch.equal(words[:, 40], before[:, 40])


def test_nobody_is_told_of_a_load_that_its_own_step_awaits() -> None:
    moves = [Move(1, True, [(0, 0)]), Move(2, True, [(1, 1)], is_awaited=True), Move(3, False, [(2, 2)])]
    cache = make()
    linked = make()
    link: Any = PlainLink()
    linked._open_link(link)
    for move in moves:
        cache.move(move)
        linked.move(move)
    linked.start_moves()
    assert cache.take_finished() == [1, 3]
    assert linked.take_finished() == [1, None, 3]  # the link leaves out what has no ticket


def test_swap_rate_is_measured() -> None:
    rate = make().measure_swap_rate()
    assert rate is not None
    assert rate > 0
    assert make(num_host_blocks=0).measure_swap_rate() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_as_bytes_and_back(dtype: torch.dtype) -> None:
    cache = make(num_host_blocks=0, dtype=dtype)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("has_link", [False, True])
def test_some_slots_of_blocks_are_read_block_after_block(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_link: bool
) -> None:
    """With a link as on a GPU: gathered and copied on the stream of the thread that reads."""
    cache = make(dtype=dtype)
    assert cache.mark() is None
    if has_link:
        link: Any = PlainLink()
        cache._open_link(link)
        waits: list[str] = []
        stream = type("Stream", (), {"synchronize": lambda self: waits.append("copied")})()
        monkeypatch.setattr(cache, "_own_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda each: contextlib.nullcontext())
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **rest: empty(*size, **rest))
    blocks, raw = [4, 0, 5], cache.device_blocks.view(torch.uint8)
    for slots in (range(1), range(1, 2), range(2)):
        expected = torch.cat([raw[slots.start : slots.stop, block].flatten() for block in blocks])
        found = cache.read_slots(blocks, slots)
        assert found.nbytes == len(found) == len(expected) and bytes(found) == expected.numpy().tobytes()
    assert not has_link or waits == ["copied"] * 3
