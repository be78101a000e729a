"""Blocks that leave with the step that fills them: each layer once it is written, the last once the step was good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch

from quire.executor.kv_cache import KVCache
from quire.executor.layer_sends import layer_runs
from quire.executor.store_moves import StoreMoves
from quire.models.architectures import spec_from_config
from quire.models.kv_layout import KVLayout, kv_layout
from quire.plan import KeyedMove
from quire.tiers.peers import Peers, Piece
from quire.tiers.sealed import SealedStore

LLAMA = {**fakes.TINY_LLAMA, "num_hidden_layers": 5}
GEMMA = {
    **fakes.TINY_LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 11,
    "sliding_window": 8,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 3 + ["sliding_attention"] * 2,
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10000.0,
}
STEP = 7


@pytest.mark.parametrize("num_layers", [1, 2, 3, 9, 16, 30, 32, 81])
def test_runs_are_few_and_the_last_is_one_layer(num_layers: int) -> None:
    layout = KVLayout((None,), num_layers, (0,) * num_layers, tuple(range(num_layers)))
    runs = layer_runs(layout, 0)
    assert [slot for run in runs for slot in run.slots] == list(range(num_layers))
    assert [run.last_layer for run in runs] == [run.slots[-1] for run in runs]
    assert len(runs[-1].slots) == 1 and len(runs) <= 9
    assert len({len(run.slots) for run in runs[1:-1]}) <= 1  # of one size, but for the first


def test_a_groups_runs_wait_for_its_own_layers() -> None:
    spec = spec_from_config(GEMMA, source="test")
    layout = kv_layout(spec, None)
    assert len(layout.windows) > 1 and len(set(layout.slots)) > 1
    for group in range(len(layout.windows)):
        layers = [layer for layer, each in enumerate(layout.groups) if each == group]
        runs = layer_runs(layout, group)
        assert [slot for run in runs for slot in run.slots] == list(range(layout.num_slots))
        for run in runs:  # of the slots that belong to a layer, none is written later than it waits
            assert max(layer for layer in layers if layout.slots[layer] in run.slots) == run.last_layer


class HeldStore:
    """In a store's place: pieces arrive when the test says so."""

    def __init__(self, cache: KVCache) -> None:
        self.block_bytes = cache.block_bytes
        self.counters = SealedStore("x", fake_connector(), identity=b"", block_bytes=cache.block_bytes).counters
        self.left: list[tuple[Piece, bytes]] = []
        self._dones: list[Callable[[bool], None]] = []

    def start_send(self, to: str, piece: Piece, read: Callable[[], Any], done: Callable[[bool], None]) -> None:
        assert to == "there"
        self.left.append((piece, bytes(read())))
        self._dones.append(done)

    def arrive(self, *, is_taken: bool = True) -> None:
        """All that has left."""
        dones, self._dones = self._dones, []
        for done in dones:
            done(is_taken)

    def close(self) -> None:
        pass


def fake_connector() -> Any:
    return type("Nothing", (), {"close": lambda self: None})()


def make_cache(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[KVCache, KVLayout]:
    spec = spec_from_config(config, source="test")
    layout = kv_layout(spec, None)
    sizes = {"num_blocks": 20, "num_host_blocks": 0, "block_size": 4}
    return KVCache(spec, layout, **sizes, dtype=dtype, device=torch.device("cpu")), layout


def write(cache: KVCache, layer: int, blocks: list[int]) -> None:
    """What a step does in a layer."""
    cache.layers[layer].view(torch.int32)[blocks] = torch.randint(
        1 << 30, cache.layers[layer].view(torch.int32)[blocks].shape, dtype=torch.int32
    )


class Rig:
    def __init__(self, config: dict[str, Any] = LLAMA, dtype: torch.dtype = torch.float32) -> None:
        self.cache, self.layout = make_cache(config, dtype)
        self.store = HeldStore(self.cache)
        self.moves = StoreMoves(self.cache, [self.store], self.layout)  # type: ignore[list-item]

    def start(self, ticket: int = 3, group: int = 0, step: int = STEP) -> list[int]:
        blocks = [4 * group + 2, 4 * group, 4 * group + 3]
        pairs = [(block, b"key %d" % block) for block in blocks]
        self.moves.move(KeyedMove(ticket, 0, False, pairs, "there", group), step)
        return blocks

    def content(self, block: int) -> bytes:
        return self.cache.device_blocks[:, block].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["one group", "windows"])
def test_each_layer_leaves_when_it_is_written_and_the_last_behind_all_others(
    config: dict[str, Any], dtype: torch.dtype
) -> None:
    rig = Rig(config, dtype)
    groups = range(len(rig.layout.windows))
    blocks = {group: rig.start(ticket=group, group=group) for group in groups}
    hook = rig.moves.layer_hook(STEP)
    assert hook is not None and rig.moves.layer_hook(STEP + 1) is None
    num_layers = len(rig.layout.groups)
    for layer in range(num_layers):
        write(rig.cache, layer, blocks[rig.layout.groups[layer]])
        if layer < num_layers - 1:
            hook(layer)
        written = {group: rig.layout.groups[: layer + 1].count(group) for group in groups}
        sizes = rig.cache.block_bytes // rig.layout.num_slots
        for group in groups:
            left = sum(
                (p.end - p.begin) // sizes for p, _ in rig.store.left if p.keys[0] == b"key %d" % blocks[group][0]
            )
            assert left == min(written[group], len(layer_runs(rig.layout, group)) - 1)
    rig.moves.on_pass(STEP)
    num_early = len(rig.store.left)
    rig.moves.on_step(STEP, is_good=True)
    assert len(rig.store.left) == num_early and rig.moves.take_finished() == []  # behind all others
    rig.store.arrive()
    assert len(rig.store.left) == num_early + len(groups)
    rig.store.arrive()
    assert sorted(rig.moves.take_finished()) == [(group, []) for group in groups]
    for group in groups:
        keys = [b"key %d" % block for block in blocks[group]]
        parts = sorted((piece.begin, data) for piece, data in rig.store.left if piece.keys == keys)
        for i, block in enumerate(blocks[group]):
            sizes = [len(data) // len(keys) for _, data in parts]
            whole = b"".join(data[i * size : (i + 1) * size] for size, (_, data) in zip(sizes, parts, strict=True))
            assert whole == rig.content(block)


def test_counted_is_what_had_arrived_when_the_step_ended() -> None:
    rig = Rig()
    rig.start()
    hook = rig.moves.layer_hook(STEP)
    assert hook is not None
    for layer in range(3):
        hook(layer)
    rig.store.arrive()
    hook(3)  # leaves, and has not arrived
    rig.moves.on_pass(STEP)
    rig.moves.on_step(STEP, is_good=True)
    of_layer = 3 * rig.cache.block_bytes // 5
    assert (rig.store.counters.num_bytes_beside, rig.store.counters.num_bytes_behind) == (3 * of_layer, 2 * of_layer)


def test_a_pass_without_moments_sends_all_but_the_last_when_it_is_over() -> None:
    rig = Rig()
    rig.start()
    assert not rig.store.left
    rig.moves.on_pass(STEP)
    assert len(rig.store.left) == 4
    rig.store.arrive()
    assert len(rig.store.left) == 4
    rig.moves.on_step(STEP, is_good=True)
    rig.store.arrive()
    assert len(rig.store.left) == 5 and rig.moves.take_finished() == [(3, [])]


def test_of_a_step_that_failed_the_last_layer_never_leaves() -> None:
    rig = Rig()
    rig.start()
    rig.moves.on_pass(STEP)
    rig.store.arrive()
    rig.moves.on_step(STEP, is_good=False)
    rig.store.arrive()
    assert len(rig.store.left) == 4 and rig.moves.take_finished() == [(3, [0, 1, 2])]


def test_once_a_piece_is_lost_no_other_leaves() -> None:
    rig = Rig()
    rig.start()
    hook = rig.moves.layer_hook(STEP)
    assert hook is not None
    hook(0)
    rig.store.arrive(is_taken=False)
    hook(1)
    rig.moves.on_pass(STEP)
    assert len(rig.store.left) == 1 and rig.moves.take_finished() == []
    rig.moves.on_step(STEP, is_good=True)
    assert rig.moves.take_finished() == [(3, [0, 1, 2])]


def test_steps_in_flight_do_not_end_each_other() -> None:
    rig = Rig()
    rig.start(ticket=3)
    rig.moves.on_pass(STEP)
    rig.start(ticket=4, step=STEP + 1)
    rig.moves.on_pass(STEP + 1)
    rig.store.arrive()
    rig.moves.on_step(STEP, is_good=True)
    rig.store.arrive()
    assert rig.moves.take_finished() == [(3, [])]
    rig.moves.on_step(STEP + 1, is_good=False)
    assert rig.moves.take_finished() == [(4, [0, 1, 2])]


@pytest.mark.parametrize("ends", ["forget_moves", "close"])
def test_nobody_waits_for_a_step_that_never_ends(ends: str) -> None:
    rig = Rig()
    rig.start()
    hook = rig.moves.layer_hook(STEP)
    assert hook is not None
    hook(0)
    threading.Timer(0.05, rig.store.arrive).start()
    getattr(rig.moves, ends)()
    rig.store.arrive()
    assert len(rig.store.left) == 1


class FakeMark:
    """In an event's place: the device reaches it when the test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        assert self.reached.wait(30)


def test_on_a_device_that_lags_behind_layers_leave_when_it_has_written_them() -> None:
    """As on a GPU: the host has submitted two steps before the first layer of the first is written."""
    rig = Rig()
    marks: list[FakeMark] = []
    rig.cache.mark = lambda: marks.append(FakeMark()) or marks[-1]  # type: ignore[method-assign, func-returns-value]
    for step, ticket in ((1, 3), (2, 4)):
        rig.start(ticket=ticket, step=step)
        hook = rig.moves.layer_hook(step)
        assert hook is not None
        for layer in range(4):
            hook(layer)
        rig.moves.on_pass(step)
    assert len(marks) == 10 and not rig.store.left
    for count, mark in enumerate(marks[:3], start=1):
        mark.reached.set()
        wait_until(lambda count=count: len(rig.store.left) == count)
    # The step's end is heard of before the thread that waits for its layers has got there.
    rig.moves.on_step(1, is_good=True)
    rig.store.arrive()
    assert len(rig.store.left) == 3
    for mark in marks[3:5]:
        mark.reached.set()
    wait_until(lambda: len(rig.store.left) == 4)
    rig.store.arrive()
    rig.store.arrive()  # the last layer, which waits for nothing of the step behind it
    assert rig.moves.take_finished() == [(3, [])] and len(rig.store.left) == 5
    rig.moves.on_step(2, is_good=False)
    assert rig.moves.take_finished() == [(4, [0, 1, 2])]
    for mark in marks:
        mark.reached.set()
    rig.moves.close()
    assert len(rig.store.left) == 5


def wait_until(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[tuple[KVCache, StoreMoves, Peers]]]:
    """Two that send each other blocks over sockets."""
    found = []
    for name in "ab":
        cache, layout = make_cache(LLAMA)
        peers = Peers(str(tmp_path / name), description="x", block_bytes=cache.block_bytes, max_bytes=1 << 26)
        store = SealedStore("peers", peers, identity=b"i" * 16, block_bytes=cache.block_bytes)
        found.append((cache, StoreMoves(cache, [store], layout), peers))
    yield found
    for _, moves, _ in found:
        moves.close()


def finished(moves: StoreMoves) -> list[tuple[int, list[int]]]:
    found: list[tuple[int, list[int]]] = []
    wait_until(lambda: bool(found.extend(moves.take_finished()) or found))
    return found


@pytest.mark.parametrize("is_filled", [True, False])
def test_what_leaves_is_loaded_by_the_other_engine(
    engines: list[tuple[KVCache, StoreMoves, Peers]], is_filled: bool
) -> None:
    (here, sending, _), (there, loading, inbox) = engines
    blocks = list(range(12))
    pairs = [(block, b"key %d" % block) for block in blocks]
    group = 0 if is_filled else None
    if not is_filled:
        for layer in range(5):
            write(here, layer, blocks)
    sending.move(KeyedMove(1, 0, False, pairs, inbox.address, group), STEP)
    if is_filled:
        hook = sending.layer_hook(STEP)
        assert hook is not None
        for layer in range(5):
            write(here, layer, blocks)
            hook(layer)
            time.sleep(0.002)  # so that pieces are read while later layers are written
        sending.on_pass(STEP)
        assert not any(inbox.contains(b"i" * 16 + key) for _, key in pairs)
        sending.on_step(STEP, is_good=True)
    assert finished(sending) == [(1, [])]
    targets = [(19 - block, key) for block, key in pairs]
    loading.move(KeyedMove(2, 0, True, targets), STEP)
    assert finished(loading) == [(2, [])]
    for block in blocks:
        assert torch.equal(there.device_blocks[:, 19 - block], here.device_blocks[:, block])


def test_a_peer_that_goes_away_in_the_middle_has_nothing_and_the_sender_hears_it(
    engines: list[tuple[KVCache, StoreMoves, Peers]],
) -> None:
    (_, sending, _), (_, _, inbox) = engines
    pairs = [(block, b"key %d" % block) for block in range(3)]
    sending.move(KeyedMove(1, 0, False, pairs, inbox.address, 0), STEP)
    hook = sending.layer_hook(STEP)
    assert hook is not None
    hook(1)
    wait_until(lambda: inbox.usage()["incomplete_bytes"] > 0)
    inbox.close()
    sending.on_pass(STEP)
    sending.on_step(STEP, is_good=True)
    assert finished(sending) == [(1, [0, 1, 2])]
    assert inbox.usage()["num_blocks"] == 0
