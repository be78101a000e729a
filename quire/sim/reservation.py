"""KV memory as servers had it before blocks: one contiguous region a request, taken when it starts and kept to its end.

The regions come from an allocator (a buddy system or first fit), their sizes from a policy. `ReservedKV` shows both to
the real scheduler in the place of the KV manager, so that admission, order and batching are the same ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.kv import UNCHANGED, Allocation, PrefixMatch, TableSlices
from quire.request import CacheOutcome


@dataclass(slots=True, frozen=True)
class Region:
    """`num_asked` slots from `start`, one slot a token; the allocator gave `num_given`, the rest of which is lost."""

    start: int
    num_asked: int
    num_given: int


class Allocator(Protocol):
    """Contiguous regions out of `num_slots`."""

    num_slots: int

    @property
    def num_free_slots(self) -> int: ...

    def allocate(self, num_slots: int) -> Region | None: ...

    def free(self, region: Region) -> None: ...


class FirstFit:
    """The lowest hole that is large enough, and just as much of it as was asked for. Neighbouring holes merge."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._holes: list[tuple[int, int]] = [(0, num_slots)]  # (start, end), ascending, never touching

    @property
    def num_free_slots(self) -> int:
        return sum(end - start for start, end in self._holes)

    def allocate(self, num_slots: int) -> Region | None:
        for i, (start, end) in enumerate(self._holes):
            if end - start >= num_slots:
                if end - start == num_slots:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + num_slots, end)
                return Region(start, num_slots, num_slots)
        return None

    def free(self, region: Region) -> None:
        start, end = region.start, region.start + region.num_given
        i = bisect.bisect(self._holes, (start, end))
        if i < len(self._holes) and self._holes[i][0] == end:
            end = self._holes.pop(i)[1]
        if i and self._holes[i - 1][1] == start:
            self._holes[i - 1] = (self._holes[i - 1][0], end)
        else:
            self._holes.insert(i, (start, end))


class Buddy:
    """Chunks of powers of two, halved on demand, merged with their other half when both are free.

    A pool that is no power of two is cut into ever smaller ones, the largest first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: dict[int, set[int]] = {}  # by chunk size: starts
        self._tops: list[tuple[int, int]] = []  # (start, size) of the chunks that are nobody's half
        start = 0
        while start < num_slots:
            size = 1 << ((num_slots - start).bit_length() - 1)
            self._tops.append((start, size))
            self._free.setdefault(size, set()).add(start)
            start += size

    @property
    def num_free_slots(self) -> int:
        return sum(size * len(starts) for size, starts in self._free.items())

    def allocate(self, num_slots: int) -> Region | None:
        wanted = next_power_of_two(num_slots)
        size = min((s for s, starts in self._free.items() if starts and s >= wanted), default=None)
        if size is None:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        return Region(start, num_slots, wanted)

    def free(self, region: Region) -> None:
        start, size = region.start, region.num_given
        top, top_size = next(t for t in self._tops if t[0] <= start < t[0] + t[1])
        while size < top_size:
            other = top + ((start - top) ^ size)
            if other not in self._free.get(size, ()):
                break
            self._free[size].remove(other)
            start, size = min(start, other), size * 2
        self._free.setdefault(size, set()).add(start)


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@dataclass(slots=True, frozen=True)
class Policy:
    """How many slots a request asks for, from its prompt's length and the output length that it will turn out to
    have (which only an oracle may look at)."""

    key: str
    name: str  # as the paper has it
    num_slots: Callable[[int, int], int]


def reservation_policies(max_model_len: int) -> list[Policy]:
    """The three of the PagedAttention paper: to the maximum length, the output to the next power of two, to the true
    length. The last token that is sampled needs no KV: the oracle knows that as well."""
    return [
        Policy("max", "Orca (Max)", lambda prompt, output: max_model_len),
        Policy("pow2", "Orca (Pow2)", lambda prompt, output: min(max_model_len, prompt + next_power_of_two(output))),
        Policy("oracle", "Orca (Oracle)", lambda prompt, output: prompt + output - 1),
    ]


@dataclass(slots=True)
class Reservation:
    """A running request's region, and how many of its slots will ever hold a token."""

    region: Region
    num_used_at_end: int


class ReservedKV:
    """A KV manager whose blocks are single slots and whose tables are contiguous: what the scheduler asks of one.

    A region never grows, so nothing is ever preempted; nothing is shared and nothing is swapped.
    """

    block_size = 1
    tiers = None  # it has no levels below

    def __init__(self, allocator: Allocator, policy: Policy) -> None:
        self.allocator = allocator
        self.policy = policy
        self.num_blocks = allocator.num_slots
        self.tables: dict[int, Reservation] = {}
        self._lengths: dict[int, tuple[int, int]] = {}

    def expect(self, seq_id: int, prompt_len: int, output_len: int) -> None:
        """Tell the lengths that a sequence will turn out to have, before it is scheduled."""
        self._lengths[seq_id] = (prompt_len, output_len)

    @property
    def num_free_blocks(self) -> int:
        return self.allocator.num_free_slots

    def num_blocks_for(self, num_tokens: int) -> int:
        return num_tokens

    def can_ever_fit(self, num_tokens: int) -> bool:
        return num_tokens <= self.num_blocks

    def match(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        adapter: str | None = None,
        previous: PrefixMatch | None = None,
    ) -> PrefixMatch:
        return PrefixMatch.nothing(CacheOutcome.DISABLED)

    def admit(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        match: PrefixMatch | None,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        recompute: bool = False,
    ) -> TableSlices | None:
        assert not recompute, "a region lasts to the end: nothing is computed twice"
        prompt_len, output_len = self._lengths[seq_id]
        region = self.allocator.allocate(self.policy.num_slots(prompt_len, output_len))
        if region is None:
            return None
        self.tables[seq_id] = Reservation(region, prompt_len + output_len - 1)
        return [(0, list(range(region.start, region.start + region.num_asked)))]

    def grow(self, seq_id: int, num_tokens: int, first_written: int, lookahead: int = 0) -> Allocation | None:
        assert num_tokens <= self.tables[seq_id].region.num_asked, f"sequence {seq_id} outgrew its region"
        return UNCHANGED

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Nothing is cached."""

    def free(self, seq_id: int, *, distrust: bool = False) -> None:
        self.allocator.free(self.tables.pop(seq_id).region)
        del self._lengths[seq_id]
