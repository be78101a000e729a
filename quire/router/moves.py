"""Which running requests leave one replica for another with their blocks: from one that drains, that has far more than
another, or whose role is to compute prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from quire.engine.streams import Stream
from quire.log import get_logger
from quire.router.carry import bring_blocks
from quire.router.members import Flight, Member
from quire.router.policy import Prompt, Router, Ticket

_CARRY_S = 30.0  # for a request's blocks to reach another replica
_CARRIES = 4  # requests that leave one replica at the same time
_MAX_FAILED_CARRIES = 2  # of one request, before it is left where it is
_BALANCE_S = 0.25  # between two looks at how the requests are spread
_UNEVEN = 4  # sequences, and half of what the fuller replica has: a smaller difference is not worth a move
_WORTH_MOVING = 64  # tokens that a request may still make


class Moves:
    """Belongs to a set of replicas, whose members and flights these are."""

    def __init__(
        self,
        members: Mapping[str, Member],
        flights: Mapping[Stream, Flight],
        router: Router,
        *,
        prompt_of: Callable[[Stream, list[int]], Prompt],
        adopt: Callable[[Stream, list[int], Ticket], None],
    ) -> None:
        """prompt_of: what a request with the tokens so far of these sequences is to a router. adopt: has the ticket's
        replica go on with them."""
        self._members = members
        self._flights = flights
        self._router = router
        self._prompt_of = prompt_of
        self._adopt = adopt
        self.num_carried = 0

    def _target_for(self, source: Member) -> Member | None:
        """The replica with the fewest sequences that would go on with a request of another; None where none can."""
        found = [
            member
            for name, member in self._members.items()
            if member is not source
            and member.is_ready
            and member.role != "prefill"
            and member.client.info.kv_address is not None
            and self._router.replicas[name].is_open
            and self._router.replicas[name].num_sequences < member.client.info.max_num_seqs
        ]
        return min(found, key=lambda member: self._router.replicas[member.name].num_sequences, default=None)

    def blocks_of_prompt_go(self, replica: str, prompt: Prompt) -> tuple[str, int] | None:
        """Where the blocks of a prompt go while it is computed, and how many leading ones are there: to who goes on
        with it, if all that its replica is for are prompts."""
        source = self._members[replica]
        target = self._target_for(source) if source.role == "prefill" else None
        if target is None or (to := target.client.info.kv_address) is None or source.client.info.kv_address is None:
            return None
        return to, self._router.num_leading_blocks(target.name, prompt.hashes)

    def start(self, stream: Stream, flight: Flight) -> asyncio.Task[bool] | None:
        """Begin to move a running request, where there is a replica for it. It stays where it is if that fails."""
        source = self._members.get(flight.ticket.replica)
        target = None if source is None else self._target_for(source)
        if source is None or target is None or source.client.info.kv_address is None or flight.carrying is not None:
            return None
        flight.carrying = task = asyncio.create_task(self._carry(stream, flight, source, target))

        def done(task: asyncio.Task[bool]) -> None:
            flight.carrying = None
            if task.cancelled():
                return
            if (error := task.exception()) is not None:
                get_logger().error("a request could not be moved", exc_info=error)
            flight.num_failed_carries += error is not None or not task.result()

        task.add_done_callback(done)
        return task

    async def _carry(self, stream: Stream, flight: Flight, source: Member, target: Member) -> bool:
        client, to = target.client, target.client.info.kv_address
        here, there = source.client.streams, client.streams
        assert to is not None
        hashes = self._prompt_of(stream, [0]).hashes
        num_known = self._router.num_leading_blocks(target.name, hashes)
        block_size = self._router.block_size
        limits = {"block_size": block_size, "num_known": num_known, "within_s": _CARRY_S}
        if not await bring_blocks(stream, here, there, to, **limits) or not target.is_ready:  # type: ignore[arg-type]
            return False
        if target.client is not client or not (open_indices := here.release_one(stream, abort=True)):
            return False
        self._router.on_end(flight.ticket)
        self._adopt(stream, open_indices, self._router.route_to(target.name, self._prompt_of(stream, open_indices)))
        self.num_carried += 1
        return True

    async def carry_all(self, source: Member) -> int:
        """Move the requests that decode; the others have little to take along, or wait."""
        room = asyncio.Semaphore(_CARRIES)

        async def carry(stream: Stream, flight: Flight) -> bool:
            async with room:
                task = flight.carrying or self.start(stream, flight)
                if task is None:
                    return False
                await asyncio.wait([task])
                return not task.cancelled() and task.exception() is None and task.result()

        decoding = [
            (stream, flight)
            for stream, flight in self._flights.items()
            if flight.ticket.replica == source.name and flight.ticket.first_token_s is not None
        ]
        return sum(await asyncio.gather(*(carry(stream, flight) for stream, flight in decoding)))

    async def balance(self) -> None:
        """Requests leave a replica that has far more than another, one at a time, and those whose prompt another one
        should have computed go where they decode."""
        while True:
            await asyncio.sleep(_BALANCE_S)
            counts = {
                name: known.num_sequences
                for name, known in self._router.replicas.items()
                if known.is_open and self._members[name].role != "prefill"
            }
            fullest = max(counts, key=counts.__getitem__, default=None)
            if fullest is not None and counts[fullest] - min(counts.values()) < max(_UNEVEN, counts[fullest] / 2):
                fullest = None
            for stream, flight in self._movable(fullest):
                task = self.start(stream, flight)
                if task is not None:
                    await asyncio.wait([task])
                break

    def _movable(self, fullest: str | None) -> list[tuple[Stream, Flight]]:
        """Requests that decode at the fullest replica, or at one that should not; the one with most to make first."""
        found = []
        for stream, flight in self._flights.items():
            member = self._members.get(flight.ticket.replica)
            num_left = stream.request.max_tokens - max(stream.num_made_tokens)
            if (
                member is not None
                and (member.name == fullest or member.role == "prefill")
                and flight.ticket.first_token_s is not None
                and flight.carrying is None
                and flight.num_failed_carries < _MAX_FAILED_CARRIES
                and num_left >= _WORTH_MOVING
            ):
                found.append((num_left, stream, flight))
        return [(stream, flight) for _, stream, flight in sorted(found, key=lambda one: -one[0])]
