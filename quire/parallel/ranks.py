"""How one rank reaches the others: memory that they share on one machine, torch.distributed between machines.

Every rank makes the same calls in the same order, because all of them run the same plans. Nothing here looks at what
is sent, and nothing is pickled.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from quire.parallel.shared import share_memory

# Far longer than any step: who hangs is found by heartbeats (executor/rank_watch.py), and everybody is ended then.
_TIMEOUT = timedelta(hours=6)


class Ranks:
    """One rank's view of all ranks of a model: `tensor_size` neighbours are a stage."""

    def __init__(self, store: Store, rank: int, tensor_size: int, num_stages: int, widths: list[int]) -> None:
        """widths: how many words of the vocabulary each rank of a stage has."""
        self._rank, self._tensor_size, self._widths = rank, tensor_size, widths
        self._world_size = tensor_size * num_stages
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self._world_size, timeout=_TIMEOUT)
        self._stage: dist.ProcessGroup | None = None
        for stage in range(num_stages):  # every rank has to take part in making each group
            members = list(range(stage * tensor_size, (stage + 1) * tensor_size))
            group = dist.new_group(members, timeout=_TIMEOUT) if num_stages > 1 and tensor_size > 1 else None
            if rank in members:
                self._stage = group
        self._first = rank // tensor_size * tensor_size  # of this stage
        self.sampler = self._world_size - tensor_size  # the rank that samples: the first of the last stage
        self._max_unsent = (4 * num_stages + 8) * self._world_size  # no receiver is so many steps behind
        self.waited_s = 0.0  # for hidden states and tokens that were not there yet
        self._unsent: deque[tuple[dist.Work | None, Tensor]] = deque()
        others = [other for other in range(self._world_size) if other != self.sampler]
        pairs = [(self.sampler, other) for other in others]  # tokens
        pairs += [(other, self.sampler) for other in others if other > self.sampler]  # logits
        pairs += [(sender, sender + tensor_size) for sender in range(self.sampler)]  # hidden states
        neighbours = list(range(self._first, self._first + tensor_size))
        self._shared = share_memory(store, rank, self._world_size, neighbours, pairs)

    @property
    def samples(self) -> bool:
        return self._rank == self.sampler

    def barrier(self) -> None:
        dist.barrier()

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks of this stage, in place: the same bits on each of them."""
        if self._shared is not None and self._shared.sums(x):
            self._shared.sum(x)
        else:
            dist.all_reduce(x, group=self._stage)
        return x

    def gather(self, part: Tensor) -> Tensor | None:
        """[rows, words] of each rank of this stage, side by side, on its first; None on the others."""
        if self._rank != self._first:
            self._send(part.contiguous(), self._first)
            return None
        whole = part.new_empty((part.shape[0], sum(self._widths)))
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

    def close(self) -> None:
        dist.destroy_process_group()

    def _receive(self, into: Tensor, rank: int) -> Tensor:
        began_s = time.perf_counter()
        self._take(into, rank)
        self.waited_s += time.perf_counter() - began_s
        return into

    def _take(self, into: Tensor, rank: int) -> None:
        if self._shared is not None and self._shared.reaches(rank, self._rank):
            self._shared.receive(into, rank)
        else:
            dist.recv(into, rank)

    def _send(self, x: Tensor, rank: int) -> None:
        """x must not be changed afterwards."""
        if self._shared is not None and self._shared.reaches(self._rank, rank):
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
