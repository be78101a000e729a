"""The KV manager against a naive model, and against simulated KV bytes, under random operations.

The model keeps lists and scans them. It predicts every table, the whole order of the free queue and the counters.
The bytes are simulated: each slot holds the salt and all tokens up to its position, which is what attention KV depends
on. Copies and transfers happen as an executor would do them, those to the host as late as is allowed. After each
operation every computed position of every sequence, and every cached block, must hold the right bytes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.kv import KVManager
from quire.request import CacheOutcome

Name = tuple[str | None, tuple[int, ...]]  # what a full block holds: the salt, and every token up to its end
SALTS = (None, "a")


@dataclass
class Line:
    """A sequence as the model sees it."""

    tokens: list[int]
    salt: str | None
    num_computed: int
    num_slots: int  # tokens that were told to the manager
    blocks: list[int] = field(default_factory=list)
    num_committed: int = 0  # blocks
    ticket: int | None = None  # of the move that brings its blocks back

    def kv_at(self, position: int) -> Name:
        return self.salt, tuple(self.tokens[: position + 1])


@dataclass
class World:
    """A manager, the naive model of it, and the bytes. Operations take integers, whatever their size, as choices."""

    num_blocks: int = 12
    block_size: int = 4
    num_host_blocks: int = 6
    caching: bool = True
    watermark: float = 0.1

    def __post_init__(self) -> None:
        self.kv = KVManager(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_host_blocks=self.num_host_blocks,
            enable_prefix_caching=self.caching,
            watermark=self.watermark,
        )
        self.queue = list(range(self.num_blocks))
        self.lines: dict[int, Line] = {}
        self.names: dict[int, Name] = {}  # by block
        self.evicted: set[Name] = set()
        self.pins: dict[Name, set[int]] = {}
        self.moving: dict[int, list[tuple[str, int, int]]] = {}  # by step: direction, device, host; tail first
        self.swapped: dict[int, tuple[Line, list[int]]] = {}
        self.host_free = set(range(self.num_host_blocks))
        self.device = [[None] * self.block_size for _ in range(self.num_blocks)]
        self.host = [[None] * self.block_size for _ in range(self.num_host_blocks)]
        self.count: Counter[str] = Counter()
        self.num_ops = 0
        self.step = 0
        self.next_seq_id = 0

    # -- the naive model

    def users(self, block: int) -> list[Line]:
        return [line for line in self.lines.values() if block in line.blocks]

    def is_moving(self, block: int) -> bool:
        return any(block == device for pairs in self.moving.values() for _, device, _ in pairs)

    def is_pinned(self, block: int) -> bool:
        return any(block in pinned for pinned in self.pins.values())

    def find(self, name: Name) -> int | None:
        for block, other in self.names.items():
            if other == name:  # its bytes may be on their way out, which only reads them
                return block
        return None

    def prefix_names(self, line_tokens: list[int], salt: str | None, num_blocks: int) -> list[Name]:
        return [(salt, tuple(line_tokens[: (i + 1) * self.block_size])) for i in range(num_blocks)]

    def cached_prefix(self, names: list[Name]) -> list[int]:
        blocks = []
        for name in names:
            block = self.find(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, num_blocks: int) -> list[int]:
        taken = [self.queue.pop(0) for _ in range(num_blocks)]
        for block in taken:
            if block in self.names:
                self.evicted.add(self.names.pop(block))
                self.count["evictions"] += 1
            # What was there is gone: reading it before it is written would be noticed.
            self.device[block] = [None] * self.block_size
        return taken

    def rest(self, block: int) -> None:
        """The block may have lost a user or a transfer: if it was the last one, it goes to the queue."""
        if self.users(block) or self.is_moving(block) or block in self.queue:
            return
        if block not in self.names:
            self.queue.insert(0, block)
        elif not self.is_pinned(block):
            self.queue.append(block)

    def leave(self, seq_id: int) -> Line:
        line = self.lines.pop(seq_id)
        for block in reversed(line.blocks):
            self.rest(block)
        return line

    def has_room(self, num_blocks: int) -> bool:
        spare = int(self.watermark * self.num_blocks) if any(line.blocks for line in self.lines.values()) else 0
        return num_blocks <= len(self.queue) - spare

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    # -- the bytes

    def write(self, line: Line, upto: int) -> None:
        for position in range(line.num_computed, upto):
            self.device[line.blocks[position // self.block_size]][position % self.block_size] = line.kv_at(position)
        line.num_computed = max(line.num_computed, upto)

    def move_out(self, step: int) -> None:
        """Do the step's transfers to the host: at the latest moment, when they are about to be reported."""
        for i, (direction, device, host) in enumerate(self.moving[step]):
            if direction == "out":
                self.host[host] = list(self.device[device])
                self.moving[step][i] = ("done", device, host)

    # -- operations

    def pick(self, table: dict[int, object], choice: int) -> int | None:
        return sorted(table)[choice % len(table)] if table else None

    def some_tokens(self, choice: int) -> list[int]:
        """One of a family of prompts that share prefixes of different lengths."""
        rng = random.Random(choice % 24)
        shared = [1 + i % 3 for i in range(rng.choice((0, 3, 4, 9, 16)))]
        return shared + [rng.randrange(3) for _ in range(rng.randrange(1, 14))]

    def admit(self, choice: int, how: int, num_written: int) -> None:
        tokens = self.some_tokens(choice)
        salt = SALTS[how % 8 == 0]
        reads_cache, recompute = how // 32 % 4 != 0, how // 128 % 2 == 1
        seq_id = self.next_seq_id
        self.next_seq_id += 1
        match = self.kv.match(tokens, salt=salt) if reads_cache else None
        matched: list[int] = []
        outcome = CacheOutcome.SKIPPED if self.caching else CacheOutcome.DISABLED
        if match is not None:
            names = self.prefix_names(tokens, salt, (len(tokens) - 1) // self.block_size)
            matched = self.cached_prefix(names)
            if self.caching:
                outcome = self.outcome(names, len(matched))
            assert (match.block_ids, match.num_tokens) == (matched, len(matched) * self.block_size)
            assert match.outcome is outcome
            again = self.kv.match(tokens, salt=salt, previous=match)
            assert again == match
        num_new = self.blocks_for(len(tokens)) - len(matched)
        fits = self.has_room(num_new + sum(block in self.queue for block in matched))
        before = self.kv.stats
        table = self.kv.admit(seq_id, tokens, match, salt=salt, recompute=recompute)
        assert (table is not None) == fits
        if table is None:
            assert self.kv.stats == before
            return
        self.queue = [block for block in self.queue if block not in matched]
        line = Line(tokens, salt, len(matched) * self.block_size, len(tokens), num_committed=len(matched))
        line.blocks = matched + self.take(num_new)
        assert table == [(0, line.blocks)]
        self.lines[seq_id] = line
        kind = "recompute" if recompute else "first"
        self.count[f"{kind} {outcome}"] += 1
        if outcome not in (CacheOutcome.SKIPPED, CacheOutcome.DISABLED):
            self.count[f"{kind} asked"] += len(tokens)
            self.count[f"{kind} found"] += line.num_computed
        self.write(line, min(len(tokens), line.num_computed + 1 + num_written % len(tokens)))

    def outcome(self, names: list[Name], num_matched: int) -> CacheOutcome:
        if not names:
            return CacheOutcome.TOO_SHORT
        if num_matched == len(names):
            return CacheOutcome.HIT
        missed = names[num_matched]
        if missed in self.evicted or missed in self.names.values():
            return CacheOutcome.EVICTED
        return CacheOutcome.PARTIAL if num_matched else CacheOutcome.COLD

    def grow(self, choice: int, how: int, token: int) -> None:
        """The next chunk of a prompt, or one more generated token."""
        seq_id = self.pick(self.arrived(), choice)
        if seq_id is None:
            return
        line = self.lines[seq_id]
        appends = line.num_computed == len(line.tokens)
        num_tokens = len(line.tokens) + appends
        lookahead = (0, 0, 0, 2)[how % 4]
        first = line.num_computed // self.block_size
        replaced = [
            i for i in range(first, len(line.blocks)) if len(self.users(line.blocks[i])) > 1
        ]  # no block at or after the first one is cached, or it would be full and computed
        num_new = max(0, self.blocks_for(num_tokens + lookahead) - len(line.blocks))
        fits = len(replaced) + num_new <= len(self.queue)
        change = self.kv.grow(seq_id, num_tokens, line.num_computed, lookahead)
        assert (change is not None) == fits
        if change is None:
            self.count["failures"] += 1
            return
        old = list(line.blocks)
        own = self.take(len(replaced) + num_new)
        for index, block in zip(replaced, own, strict=False):
            line.blocks[index] = block
        line.blocks += own[len(replaced) :]
        kept = [i for i in replaced if i * self.block_size < line.num_computed]
        assert change.appended == ([(0, own[len(replaced) :])] if num_new else [])
        assert change.remapped == [(0, i, line.blocks[i]) for i in replaced]
        assert change.copies == [(old[i], line.blocks[i]) for i in kept]
        for source, target in change.copies:
            self.device[target] = list(self.device[source])
        self.count["copies"] += len(kept)
        if appends:
            line.tokens = [*line.tokens, token % 3]
        line.num_slots = num_tokens
        self.write(line, min(len(line.tokens), line.num_computed + 1 + how // 4 % 9))

    def commit(self, choice: int, _how: int, _more: int) -> None:
        seq_id = self.pick(self.arrived(), choice)
        if seq_id is None:
            return
        line = self.lines[seq_id]
        self.kv.commit(seq_id, line.tokens, line.num_computed)
        self.commit_line(line)

    def commit_line(self, line: Line) -> None:
        if not self.caching:
            return
        num_full = line.num_computed // self.block_size
        names = self.prefix_names(line.tokens, line.salt, num_full)
        for index in range(line.num_committed, num_full):
            if names[index] not in self.names.values():
                self.names[line.blocks[index]] = names[index]
        line.num_committed = max(line.num_committed, num_full)

    def fork(self, choice: int, _how: int, _more: int) -> None:
        seq_id = self.pick(self.arrived(), choice)
        if seq_id is None or len(self.lines) >= 12:
            return
        line = self.lines[seq_id]
        child_id = self.next_seq_id
        self.next_seq_id += 1
        self.kv.fork(seq_id, child_id)
        self.lines[child_id] = Line(
            list(line.tokens), line.salt, line.num_computed, line.num_slots, list(line.blocks), line.num_committed
        )
        self.count["forks"] += 1

    def free(self, choice: int, _how: int, _more: int) -> None:
        seq_id = self.pick(self.lines, choice)
        if seq_id is None:
            return
        self.kv.free(seq_id)
        self.leave(seq_id)

    def swap_out(self, choice: int, how: int, _more: int) -> None:
        seq_id = self.pick(self.arrived(), choice)
        if seq_id is None:
            return
        self.step += 1
        line = self.lines[seq_id]
        num_moved = self.blocks_for(line.num_computed)
        pairs = self.kv.swap_out(seq_id, line.num_computed, self.step)
        assert (pairs is not None) == (num_moved <= len(self.host_free))
        if pairs is None:
            return
        host_ids = [host for _, host in pairs]
        assert [device for device, _ in pairs] == line.blocks[:num_moved]
        assert len(set(host_ids)) == num_moved and set(host_ids) <= self.host_free
        self.host_free -= set(host_ids)
        for device, host in reversed(pairs):
            self.moving.setdefault(self.step, []).append(("out", device, host))
        self.leave(seq_id)
        self.swapped[seq_id] = (line, host_ids)
        self.count["swapped out"] += num_moved

    def swap_in(self, choice: int, how: int, _more: int) -> None:
        seq_id = self.pick(self.swapped, choice)
        if seq_id is None:
            return
        self.step += 1
        line, host_ids = self.swapped[seq_id]
        num_blocks = self.blocks_for(len(line.tokens))
        fits = self.has_room(num_blocks)
        answer = self.kv.swap_in(seq_id, line.tokens, self.step)
        assert (answer is not None) == fits
        if answer is None:
            return
        for step in sorted(self.moving):  # bytes move in step order: first those still on their way out
            self.move_out(step)
        del self.swapped[seq_id]
        pairs, table = answer
        line.blocks = self.take(num_blocks)
        assert table == [(0, line.blocks)]
        assert pairs == list(zip(line.blocks, host_ids, strict=False))
        for device, host in pairs:
            self.device[device] = list(self.host[host])
        for device, host in reversed(pairs):
            self.moving.setdefault(self.step, []).append(("in", device, host))
        self.lines[seq_id] = line
        line.num_slots = len(line.tokens)
        line.num_committed = 0
        line.ticket = self.step if pairs else None
        self.count["swapped in"] += len(pairs)

    def drop_swapped(self, choice: int, _how: int, _more: int) -> None:
        seq_id = self.pick(self.swapped, choice)
        if seq_id is None:
            return
        self.kv.drop_swapped(seq_id)
        _, host_ids = self.swapped.pop(seq_id)
        self.release_host(host_ids)

    def release_host(self, host_ids: list[int]) -> None:
        busy = {host for pairs in self.moving.values() for _, _, host in pairs}
        busy |= {host for _, held in self.swapped.values() for host in held}
        self.host_free |= set(host_ids) - busy

    def moves_done(self, choice: int, _how: int, _more: int) -> None:
        step = self.pick(self.moving, choice)
        if step is None:
            self.kv.moves_done(self.step + 1)  # a step without transfers: nothing happens
            return
        self.move_out(step)
        self.kv.moves_done(step)
        pairs = self.moving.pop(step)
        for i, (_, device, _) in enumerate(pairs):
            # The same block may have moved twice in a step: it rests when the last of its transfers is done.
            if device not in [later for _, later, _ in pairs[i + 1 :]]:
                self.rest(device)
        self.release_host([host for _, _, host in pairs])
        for line in self.lines.values():
            if line.ticket == step:
                line.ticket = None
                self.commit_line(line)
        self.step += 1

    def arrived(self) -> dict[int, Line]:
        """Those that may run: their blocks are not on the way."""
        return {seq_id: line for seq_id, line in self.lines.items() if line.ticket is None}

    def pin(self, choice: int, how: int, _more: int) -> None:
        tokens, salt = self.some_tokens(choice), SALTS[how % 8 == 0]
        if sum(map(len, self.pins.values())) > self.num_blocks // 2:
            return
        names = self.prefix_names(tokens, salt, len(tokens) // self.block_size)
        blocks = self.cached_prefix(names)
        if blocks:
            self.pins.setdefault(names[-1], set()).update(blocks)
            self.queue = [block for block in self.queue if block not in blocks]
        expected = len(self.pins.get(names[-1], ())) if names else 0
        assert self.kv.pin(tokens, salt=salt) == expected * self.block_size

    def unpin(self, choice: int, how: int, _more: int) -> None:
        tokens, salt = self.some_tokens(choice), SALTS[how % 8 == 0]
        if self.pins and how % 3:  # else most would miss
            salt, prefix = sorted(self.pins, key=repr)[choice % len(self.pins)]
            tokens = list(prefix)
        names = self.prefix_names(tokens, salt, len(tokens) // self.block_size)
        pinned = self.pins.pop(names[-1], set()) if names else set()
        assert self.kv.unpin(tokens, salt=salt) == len(pinned) * self.block_size
        for block in sorted(pinned, key=lambda block: len(self.names[block][1]), reverse=True):
            self.rest(block)

    def reset(self, _choice: int, how: int, _more: int) -> None:
        force = how % 4 == 0
        busy = any(self.users(block) or self.is_moving(block) for block in range(self.num_blocks))
        assert self.kv.reset_prefix_cache(force=force) == (force or not busy)
        if busy and not force:
            return
        idle = [block for block in self.names if not self.users(block) and not self.is_moving(block)]
        if force:
            for name in list(self.pins):
                self.pins[name] -= set(idle)
                if not self.pins[name]:
                    del self.pins[name]
        for block in idle:
            if not self.is_pinned(block):
                del self.names[block]
        self.evicted.clear()
        # Blocks that were pinned and idle stand in the queue now, in an order that no longer means anything.
        real = [block.block_id for block in self.kv.pool.queue]
        freed = [block for block in real if block not in self.queue]
        assert set(freed) <= set(idle) and real[: len(self.queue)] == self.queue
        self.queue = real

    OPS = (
        ("admit", 20),
        ("grow", 34),
        ("commit", 16),
        ("fork", 6),
        ("free", 9),
        ("swap_out", 5),
        ("swap_in", 6),
        ("drop_swapped", 1),
        ("moves_done", 7),
        ("pin", 3),
        ("unpin", 3),
        ("reset", 2),
    )

    def do(self, op: str, choice: int, how: int, more: int) -> None:
        getattr(self, op)(choice, how, more)
        self.num_ops += 1
        self.compare()

    # -- after each operation

    def compare(self) -> None:
        kv = self.kv
        kv.check()
        assert [block.block_id for block in kv.pool.queue] == self.queue
        assert {seq_id: kv.block_ids(seq_id) for seq_id in kv.tables} == {
            seq_id: line.blocks for seq_id, line in self.lines.items()
        }
        assert kv.num_free_blocks == len(self.queue)
        assert kv.host.num_free_blocks == len(self.host_free)
        assert {block.block_id for block in kv.pool.blocks if block.block_hash} == set(self.names)
        self.compare_bytes()
        self.compare_stats()

    def compare_bytes(self) -> None:
        for line in self.lines.values():
            for position in range(line.num_computed):
                block = line.blocks[position // self.block_size]
                assert self.device[block][position % self.block_size] == line.kv_at(position)
        for block, (salt, tokens) in self.names.items():
            for slot in range(self.block_size):
                end = len(tokens) - self.block_size + slot + 1
                assert self.device[block][slot] == (salt, tokens[:end])
        still_out = {host for pairs in self.moving.values() for way, _, host in pairs if way == "out"}
        for line, host_ids in self.swapped.values():
            for position in range(line.num_computed):
                host = host_ids[position // self.block_size]
                if host not in still_out:
                    assert self.host[host][position % self.block_size] == line.kv_at(position)

    def compare_stats(self) -> None:
        stats = self.kv.stats
        used = {block for line in self.lines.values() for block in line.blocks}
        moving = {device for pairs in self.moving.values() for _, device, _ in pairs} - used
        cached = set(self.names) - used - moving
        assert (stats.num_used, stats.num_in_transit, stats.num_cached) == (len(used), len(moving), len(cached))
        assert stats.num_free == self.num_blocks - len(used) - len(moving) - len(cached)
        assert stats.num_pinned == sum(self.is_pinned(block) for block in range(self.num_blocks))
        num_tokens = 0
        for block in used:
            filled = [
                min(self.block_size, max(0, line.num_slots - line.blocks.index(block) * self.block_size))
                for line in self.users(block)
            ]
            num_tokens += max(filled)
        assert (stats.num_tokens, stats.internal_waste_tokens) == (num_tokens, len(used) * self.block_size - num_tokens)
        assert stats.num_evictions == self.count["evictions"]
        assert stats.num_forks == self.count["forks"]
        assert stats.num_copies == self.count["copies"]
        assert stats.num_swapped_out_blocks == self.count["swapped out"]
        assert stats.num_swapped_in_blocks == self.count["swapped in"]
        assert stats.num_allocation_failures == self.count["failures"]
        for kind, counters in (("first", stats.prefix), ("recompute", stats.recompute)):
            assert counters.outcomes == {outcome: self.count[f"{kind} {outcome}"] for outcome in CacheOutcome}
            assert counters.num_query_tokens == self.count[f"{kind} asked"]
            assert counters.num_hit_tokens == self.count[f"{kind} found"]


WORLDS = {
    "tight": World(),
    "roomy": World(num_blocks=40, num_host_blocks=20, watermark=0.0),
    "tiny": World(num_blocks=5, num_host_blocks=3, watermark=0.2),
    "larger blocks": World(num_blocks=10, block_size=8, num_host_blocks=5),
    "no host": World(num_host_blocks=0),
    "no cache": World(caching=False),
}
NUM_OPS = 3_000


@pytest.mark.parametrize("name", WORLDS)
def test_random_operations(name: str) -> None:
    template = WORLDS[name]
    world = World(
        template.num_blocks, template.block_size, template.num_host_blocks, template.caching, template.watermark
    )
    rng = random.Random(name)
    ops, weights = zip(*World.OPS, strict=True)
    for op in rng.choices(ops, weights, k=NUM_OPS):
        world.do(op, rng.randrange(1 << 16), rng.randrange(1 << 16), rng.randrange(1 << 16))
    assert world.num_ops == NUM_OPS
    # The driver reached what it is for.
    count = world.count
    assert count["forks"] and count["copies"] and count["failures"]
    assert bool(count["swapped in"]) == (template.num_host_blocks > 0)
    assert bool(count["first hit"] and count["evictions"]) == template.caching
    # And everything comes back.
    for seq_id in list(world.lines):
        world.kv.free(seq_id)
        world.leave(seq_id)
    for seq_id in list(world.swapped):
        world.drop_swapped(seq_id, 0, 0)
    while world.moving:
        world.moves_done(0, 0, 0)
    world.reset(0, 0, 0)
    world.compare()
    assert world.kv.num_free_blocks == template.num_blocks
    assert world.kv.host.num_free_blocks == template.num_host_blocks


def test_the_drivers_do_ten_thousand_operations() -> None:
    assert len(WORLDS) * NUM_OPS >= 10_000


choices = st.integers(0, 1 << 12)


class KVMachine(RuleBasedStateMachine):
    """The same world, driven by hypothesis, which shrinks what it breaks."""

    @initialize(name=st.sampled_from(sorted(WORLDS)))
    def start(self, name: str) -> None:
        template = WORLDS[name]
        self.world = World(
            template.num_blocks, template.block_size, template.num_host_blocks, template.caching, template.watermark
        )

    @rule(choice=choices, how=choices, more=choices)
    def admit(self, choice: int, how: int, more: int) -> None:
        self.world.do("admit", choice, how, more)

    @rule(choice=choices, how=choices, more=choices)
    def grow(self, choice: int, how: int, more: int) -> None:
        self.world.do("grow", choice, how, more)
        self.world.do("commit", choice, how, more)

    @rule(op=st.sampled_from([op for op, _ in World.OPS]), choice=choices, how=choices)
    def other(self, op: str, choice: int, how: int) -> None:
        self.world.do(op, choice, how, 0)


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
