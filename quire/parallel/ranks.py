"""How one rank reaches the others: memory that they share on one machine, torch.distributed between machines.

| | CPUs | GPUs |
|---|---|---|
| sums of one machine | shared memory (shared.py) | the GPUs' own memory (peers.py), NCCL where they are large |
| sums between machines | gloo | NCCL |
| hidden states, logits, tokens | shared memory, gloo between machines | the GPUs' own memory, or NCCL |

Every rank makes the same calls in the same order, because all of them run the same plans. Nothing here looks at what
is sent, and nothing is pickled.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from quire.parallel.shared import share_memory

# Far longer than any step: who hangs is found by heartbeats (executor/rank_watch.py), and everybody is ended then.
_TIMEOUT = timedelta(hours=6)


class Ranks:
    """One rank's view of all ranks of a model: `tensor_size` neighbours are a stage."""

    def __init__(
        self,
        store: Store,
        rank: int,
        tensor_size: int,
        num_stages: int,
        widths: list[int],
        device: torch.device | None = None,
        *,
        shares_gpu: bool = False,
    ) -> None:
        """widths: how many words of the vocabulary each rank of a stage has. shares_gpu: whether several ranks have one
        GPU, for which NCCL is not made."""
        self._rank, self._tensor_size, self._widths = rank, tensor_size, widths
        self._world_size = tensor_size * num_stages
        self._device = device or torch.device("cpu")
        on_gpu = self._device.type == "cuda"
        self._has_nccl = on_gpu and not shares_gpu
        backend = "cpu:gloo,cuda:nccl" if self._has_nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=self._world_size, timeout=_TIMEOUT)
        self._stage: dist.ProcessGroup | None = None
        for stage in range(num_stages):  # every rank has to take part in making each group
            members = list(range(stage * tensor_size, (stage + 1) * tensor_size))
            group = dist.new_group(members, timeout=_TIMEOUT) if num_stages > 1 and tensor_size > 1 else None
            if rank in members:
                self._stage = group
        self._first = rank // tensor_size * tensor_size  # of this stage
        self.sampler = self._world_size - tensor_size  # the rank that samples: the first of the last stage
        # Where all ranks work on one step, the tokens that it samples stay on the GPUs.
        self.has_device_tokens = on_gpu and num_stages == 1
        self._max_unsent = (4 * num_stages + 8) * self._world_size  # no receiver is so many steps behind
        self.waited_s = 0.0  # for hidden states and tokens that were not there yet
        self._unsent: deque[tuple[dist.Work | None, Tensor]] = deque()
        others = [other for other in range(self._world_size) if other != self.sampler]
        pairs = [(self.sampler, other) for other in others]  # tokens
        pairs += [(other, self.sampler) for other in others if other > self.sampler]  # logits
        pairs += [(sender, sender + tensor_size) for sender in range(self.sampler)]  # hidden states
        neighbours = list(range(self._first, self._first + tensor_size))
        self._shared = share_memory(store, rank, self._world_size, neighbours, pairs)
        self._peers = None
        if on_gpu and tensor_size > 1:
            from quire.parallel.peers import open_peers  # Triton takes its time to import

            self._peers = open_peers(
                store, rank, neighbours, self._world_size, self._device, is_needed=not self._has_nccl
            )

    @property
    def samples(self) -> bool:
        return self._rank == self.sampler

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1))  # dist.barrier would wait for the GPU, too

    def check(self) -> None:
        """Raises if another rank's GPU was waited for in vain. Costs nothing."""
        if self._peers is not None:
            self._peers.check()

    def largest(self, pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """For each number, the largest value that any rank of this stage has."""
        table = torch.tensor(pairs, dtype=torch.float64)
        dist.all_reduce(table, dist.ReduceOp.MAX, group=self._stage)
        return [(first, second) for first, second in table.tolist()]

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks of this stage, in place: the same bits on each of them."""
        if self._shared is not None and self._shared.sums(x):
            self._shared.sum(x)
        elif self._peers is not None and (self._peers.fits(x) or not self._has_nccl):
            self._peers.sum(x)
        else:
            dist.all_reduce(x, group=self._stage)
        return x

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor | None:
        """[rows, words] of each rank of this stage, side by side, on its first, in `out` where given; None on the
        others."""
        whole = None
        if self._rank == self._first:
            whole = part.new_empty((part.shape[0], sum(self._widths))) if out is None else out
        if self._peers is not None:
            self._peers.gather(part, self._widths, whole)
        elif whole is None:
            self._send(part.contiguous(), self._first)
        else:
            start = 0
            for index, width in enumerate(self._widths):
                if index:
                    part = part.new_empty((part.shape[0], width))
                    self._take(part, self._first + index)
                whole[:, start : start + width] = part
                start += width
        return whole

    def send_hidden(self, hidden: Tensor) -> None:
        """To the same rank of the next stage. Does not wait for it, unless it is several steps behind."""
        self._send(hidden, self._rank + self._tensor_size)

    def receive_hidden(self, into: Tensor) -> Tensor:
        return self._receive(into, self._rank - self._tensor_size)

    def send_tokens(self, tokens: Tensor) -> None:
        """From the rank that samples to all others. Does not wait for them."""
        assert self.samples
        for rank in range(self._world_size):
            if rank != self._rank:
                self._send(tokens, rank)

    def receive_tokens(self, into: Tensor) -> Tensor:
        return self._receive(into, self.sampler)

    def share_tokens(self, tokens: Tensor | None, count: int) -> Tensor:
        """[count] int64 on the GPU, from the rank that samples to all of its stage. No host waits."""
        if self._world_size == 1:
            assert tokens is not None
            return tokens
        found = torch.zeros(count, dtype=torch.int64, device=self._device) if tokens is None else tokens.clone()
        if self._peers is not None:
            self._peers.sum(found)  # of zeros but for one rank's
        else:
            dist.broadcast(found, self.sampler)
        return found

    def close(self) -> None:
        dist.destroy_process_group()

    def _receive(self, into: Tensor, rank: int) -> Tensor:
        began_s = time.perf_counter()
        self._take(into, rank)
        self.waited_s += time.perf_counter() - began_s
        return into

    def _take(self, into: Tensor, rank: int) -> None:
        if into.is_cuda and not self._has_nccl:
            on_host = torch.empty(into.shape, dtype=into.dtype)
            self._take(on_host, rank)
            into.copy_(on_host)
        elif self._shared is not None and not into.is_cuda and self._shared.reaches(rank, self._rank):
            self._shared.receive(into, rank)
        else:
            dist.recv(into, rank)

    def _send(self, x: Tensor, rank: int) -> None:
        """x must not be changed afterwards."""
        if x.is_cuda and not self._has_nccl:
            x = x.cpu()
        if self._shared is not None and not x.is_cuda and self._shared.reaches(self._rank, rank):
            self._shared.send(x, rank)
            return
        self._unsent.append((dist.isend(x, rank), x))
        while self._unsent and (len(self._unsent) > self._max_unsent or self._is_sent()):
            work, _ = self._unsent.popleft()
            if work is not None:
                work.wait()

    def _is_sent(self) -> bool:
        work = self._unsent[0][0]
        return work is None or work.is_completed()
