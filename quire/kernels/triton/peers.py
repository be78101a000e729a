# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Sums and gathers over ranks on GPUs of one machine, through memory that each of them has opened of all others.

A rank's memory is flags, and room for two messages. A call copies its part into its own room, raises a flag with all
peers, waits until theirs are raised with it, and then reads what they wrote. Calls take turns with the two rooms: a
rank that writes to one again has heard from everybody in the call between, so that nobody reads it any more.

Calls are numbered on the device, not in their arguments: a captured graph repeats the same arguments. Sums add in the
order of ranks, so that all ranks have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_RANKS = 8
MAX_PROGRAMS = 64  # few enough that all of them run at once, beside another process's on the same GPU
FLAG_BYTES = 2 * MAX_PROGRAMS * MAX_RANKS * 8  # two rounds of int64
STATE_WORDS = 2  # of a rank's own counters: calls so far, and programs that have finished this one


@triton.jit
def _meet(peers_ptr, failed_ptr, round_index, call, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
          MAX_PROGRAMS: tl.constexpr, MAX_RANKS: tl.constexpr):  # fmt: skip
    """Tell this program's peers that what it wrote before is there, and wait for the same from them."""
    first = (round_index * MAX_PROGRAMS + tl.program_id(0)) * MAX_RANKS
    tl.debug_barrier()  # all threads have written before one of them says so
    for peer in tl.static_range(WORLD):
        flags = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flags + first + RANK, call, sem="release", scope="sys")
    own = tl.load(peers_ptr + RANK).to(tl.pointer_type(tl.int64))
    for peer in tl.static_range(WORLD):
        polls = 0
        while (tl.atomic_add(own + first + peer, 0, sem="acquire", scope="sys") < call) & (polls < max_polls):
            polls += 1
        if polls >= max_polls:
            tl.store(failed_ptr, peer + 1)  # the host looks at it; what follows is of no use
    tl.debug_barrier()


@triton.jit
def _leave(state_ptr, call):
    """The program that is last counts the call."""
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, call)


@triton.jit
def _room(peers_ptr, peer, call, room_bytes, FLAG_BYTES: tl.constexpr, dtype: tl.constexpr):
    address = tl.load(peers_ptr + peer) + FLAG_BYTES + (call % 2) * room_bytes
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def sum_kernel(x_ptr, peers_ptr, state_ptr, failed_ptr, num_values, chunk, room_bytes, max_polls,
               RANK: tl.constexpr, WORLD: tl.constexpr, TWO_SHOT: tl.constexpr, IS_FLOAT: tl.constexpr,
               ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MAX_PROGRAMS: tl.constexpr, MAX_RANKS: tl.constexpr,
               FLAG_BYTES: tl.constexpr):  # fmt: skip
    """x, summed in place. A program has `chunk` values, a multiple of BLOCK (with two shots, of WORLD times that).

    One shot: everybody reads and sums everything. Two shots: everybody sums one part in WORLD, puts the sums where its
    own values were, and the parts are read after a second meeting: each value is read twice instead of WORLD times."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    call = tl.load(state_ptr) + 1
    begin = tl.program_id(0).to(tl.int64) * chunk
    end = tl.minimum(begin + chunk, num_values)
    if ALIGNED:
        end = tl.multiple_of(end, 16)
    own = _room(peers_ptr, RANK, call, room_bytes, FLAG_BYTES, dtype)
    lanes = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        at = tl.multiple_of(start, 16) + lanes
        tl.store(own + at, tl.load(x_ptr + at, mask=at < end), mask=at < end)
    _meet(peers_ptr, failed_ptr, 0, call, max_polls, RANK, WORLD, MAX_PROGRAMS, MAX_RANKS)
    part = chunk // WORLD if TWO_SHOT else chunk
    first = begin + RANK * part if TWO_SHOT else begin
    for start in range(first, tl.minimum(first + part, end), BLOCK):
        at = tl.multiple_of(start, 16) + lanes
        total = tl.zeros((BLOCK,), dtype=tl.float32 if IS_FLOAT else dtype)
        for peer in tl.static_range(WORLD):
            theirs = _room(peers_ptr, peer, call, room_bytes, FLAG_BYTES, dtype)
            total += tl.load(theirs + at, mask=at < end, other=0, cache_modifier=".cg").to(total.dtype)
        # With two shots nobody else reads this part before the second meeting: its values may give way to the sums.
        tl.store((own if TWO_SHOT else x_ptr) + at, total.to(dtype), mask=at < end)
    if TWO_SHOT:
        _meet(peers_ptr, failed_ptr, 1, call, max_polls, RANK, WORLD, MAX_PROGRAMS, MAX_RANKS)
        for peer in tl.static_range(WORLD):
            theirs = _room(peers_ptr, peer, call, room_bytes, FLAG_BYTES, dtype)
            from_part = begin + peer * part
            for start in range(from_part, tl.minimum(from_part + part, end), BLOCK):
                at = tl.multiple_of(start, 16) + lanes
                tl.store(x_ptr + at, tl.load(theirs + at, mask=at < end, cache_modifier=".cg"), mask=at < end)
    _leave(state_ptr, call)


@triton.jit
def gather_kernel(part_ptr, whole_ptr, starts_ptr, peers_ptr, state_ptr, failed_ptr, num_rows, room_bytes, max_polls,
                  whole_stride, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
                  MAX_PROGRAMS: tl.constexpr, MAX_RANKS: tl.constexpr, FLAG_BYTES: tl.constexpr):  # fmt: skip
    """part: this rank's columns of every row, from starts[RANK] to starts[RANK + 1]; whole: all columns, on rank 0.
    A program has every so many rows of each part."""
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    call = tl.load(state_ptr) + 1
    own = _room(peers_ptr, RANK, call, room_bytes, FLAG_BYTES, dtype)
    width = tl.load(starts_ptr + RANK + 1) - tl.load(starts_ptr + RANK)
    lanes = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        for column in range(0, width, BLOCK):
            at = column + lanes
            values = tl.load(part_ptr + row * width + at, mask=at < width)
            tl.store(own + row * width + at, values, mask=at < width)
    _meet(peers_ptr, failed_ptr, 0, call, max_polls, RANK, WORLD, MAX_PROGRAMS, MAX_RANKS)
    if RANK == 0:
        for peer in tl.static_range(WORLD):
            theirs = _room(peers_ptr, peer, call, room_bytes, FLAG_BYTES, dtype)
            begin = tl.load(starts_ptr + peer)
            their_width = tl.load(starts_ptr + peer + 1) - begin
            for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
                for column in range(0, their_width, BLOCK):
                    at = column + lanes
                    values = tl.load(theirs + row * their_width + at, mask=at < their_width, cache_modifier=".cg")
                    tl.store(whole_ptr + row * whole_stride + begin + at, values, mask=at < their_width)
    _leave(state_ptr, call)
