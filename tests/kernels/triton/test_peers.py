"""One rank's part of a sum and of a gather, beside peers who have written theirs already.

What several ranks do at once is for a machine with a GPU: tests/test_gpu_ranks.py.
"""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton import peers

WORLD, ROOM_BYTES = 3, 1 << 16


class Peers:
    """Memory of all ranks, with everybody's flags raised for the call that comes."""

    def __init__(self, device, num_calls):
        size = (peers.FLAG_BYTES + 2 * ROOM_BYTES) // 8
        self.memory = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(WORLD)]
        self.call = num_calls + 1
        for memory in self.memory:
            memory[: peers.FLAG_BYTES // 8] = self.call
        self.addresses = torch.tensor([memory.data_ptr() for memory in self.memory], device=device)
        self.state = torch.tensor([num_calls, 0], device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)

    def room(self, rank, dtype):
        start = (peers.FLAG_BYTES + self.call % 2 * ROOM_BYTES) // 8
        return self.memory[rank][start : start + ROOM_BYTES // 8].view(dtype)

    def constants(self, rank):
        names = ("MAX_PROGRAMS", "MAX_RANKS", "FLAG_BYTES")
        return {name: getattr(peers, name) for name in names} | {"RANK": rank, "WORLD": WORLD}


def sum_of(memory, rank, x, *, two_shot=False, block=64):
    unit = block * WORLD if two_shot else block
    chunk = -(-len(x) // (4 * unit)) * unit
    peers.sum_kernel[(-(-len(x) // chunk),)](
        x, memory.addresses, memory.state, memory.failed, len(x), chunk, ROOM_BYTES, 10, **memory.constants(rank),
        TWO_SHOT=two_shot, IS_FLOAT=x.is_floating_point(), ALIGNED=len(x) % 16 == 0, BLOCK=block,
    )  # fmt: skip


@pytest.mark.parametrize("num_calls", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("num_values", [1, 100, 800])
def test_a_sum_in_one_shot(device, dtype, num_values, num_calls):
    memory = Peers(device, num_calls)
    parts = [(torch.randn(num_values, device=device) * 1000).to(dtype) for _ in range(WORLD)]
    for rank in (0, 2):
        memory.room(rank, dtype)[:num_values] = parts[rank]
    x = parts[1].clone()
    sum_of(memory, 1, x)
    wide = [part.float() if dtype.is_floating_point else part for part in parts]
    assert torch.equal(x, (wide[0] + wide[1] + wide[2]).to(dtype))  # in the order of ranks
    assert memory.state.tolist() == [num_calls + 1, 0] and not memory.failed.item()


def test_a_sum_in_two_shots(device):
    """The peers' rooms hold their values where this rank sums them, and their sums elsewhere: to it that is all one."""
    num_values, block = 800, 64
    memory = Peers(device, 0)
    parts = [torch.randn(num_values, device=device) for _ in range(WORLD)]
    for rank in (0, 2):
        memory.room(rank, torch.float32)[:num_values] = parts[rank]
    x = parts[1].clone()
    sum_of(memory, 1, x, two_shot=True, block=block)
    chunk = -(-num_values // (4 * block * WORLD)) * block * WORLD
    at = torch.arange(num_values, device=device)
    owner = at % chunk // (chunk // WORLD)
    expected = torch.where(owner == 1, parts[0] + parts[1] + parts[2], torch.where(owner == 0, parts[0], parts[2]))
    assert torch.equal(x, expected)
    own = memory.room(1, torch.float32)[:num_values]
    assert torch.equal(own[owner == 1], expected[owner == 1])  # where the others will read them


@pytest.mark.parametrize("rank", [0, 2])
def test_a_gather(device, rank):
    widths, num_rows = [100, 64, 30], 5
    memory = Peers(device, 3)
    parts = [torch.randn((num_rows, width), device=device) for width in widths]
    for peer in range(WORLD):
        if peer != rank:
            memory.room(peer, torch.float32)[: parts[peer].numel()] = parts[peer].view(-1)
    starts = torch.tensor([0, 100, 164, 194], device=device)
    whole = torch.zeros((num_rows, 200), device=device)
    peers.gather_kernel[(2,)](
        parts[rank], whole, starts, memory.addresses, memory.state, memory.failed, num_rows, ROOM_BYTES, 10,
        whole.stride(0), **memory.constants(rank), BLOCK=64,
    )  # fmt: skip
    if rank == 0:
        assert torch.equal(whole[:, :194], torch.cat(parts, dim=1))
        assert not whole[:, 194:].any()
    else:
        assert torch.equal(memory.room(rank, torch.float32)[: parts[rank].numel()], parts[rank].view(-1))
    assert memory.state.tolist() == [4, 0]


def test_a_peer_that_does_not_come_is_named(device):
    memory = Peers(device, 0)
    memory.memory[1][: peers.FLAG_BYTES // 8 : 1].view(-1, peers.MAX_RANKS)[:, 2] = 0
    sum_of(memory, 1, torch.ones(32, device=device))
    assert memory.failed.item() == 3
