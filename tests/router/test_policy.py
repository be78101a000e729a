"""The routing core: least expected time to the first token, caches by block hash, fairness, bookkeeping."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from quire.router.policy import CacheChanges, Prompt, ReplicaLoad, Router, Ticket

BLOCK = 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def router_of(*names: str, rate: float = 1_000.0, **options: object) -> tuple[Router, Clock]:
    clock = Clock()
    router = Router(BLOCK, clock=clock)
    for name in names:
        router.add(name, **options)  # type: ignore[arg-type]
        router.on_load(name, ReplicaLoad(prefill_tokens_per_s=rate))
    return router, clock


def chain(name: str, num_blocks: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(num_blocks)]


def prompt_of(name: str, num_blocks: int, **options: object) -> Prompt:
    return Prompt(num_blocks * BLOCK + 1, chain(name, num_blocks), **options)  # type: ignore[arg-type]


def first_token(router: Router, ticket: Ticket) -> None:
    """It has come, and its time is not counted."""
    router.on_first_token(ticket, is_timed=False)


def text_prompt(text: str, num_tokens: int, hashes: Sequence[bytes] = ()) -> Prompt:
    """A piece is a character, and makes a block of tokens."""
    pieces = [text[: end + 1].encode() for end in range(len(text))]
    ends = [BLOCK * (end + 1) for end in range(len(text))]
    return Prompt(num_tokens, hashes, pieces=pieces, piece_ends=ends)


def test_a_prompt_goes_where_its_blocks_are() -> None:
    router, _ = router_of("a", "b")
    router.on_cache("b", CacheChanges(filled=chain("x", 8)))
    ticket = router.route(prompt_of("x", 10))
    assert ticket is not None and (ticket.replica, ticket.num_cached_tokens) == ("b", 8 * BLOCK)
    router.check()


def test_an_evicted_block_ends_the_match() -> None:
    router, _ = router_of("a", "b")
    router.on_cache("b", CacheChanges(filled=chain("x", 8)))
    router.on_cache("b", CacheChanges(evicted=chain("x", 4)[3:]))
    ticket = router.choose(prompt_of("x", 8))
    assert ticket is not None and ticket.num_cached_tokens == 3 * BLOCK


def test_a_snapshot_replaces_what_was_known() -> None:
    router, _ = router_of("a")
    router.on_cache("a", CacheChanges(filled=chain("x", 8)))
    router.on_cache("a", CacheChanges(filled=chain("y", 2), is_snapshot=True))
    assert router.num_blocks_of("a") == 2
    router.check()


def test_a_queue_longer_than_the_prefix_is_worth_sends_it_elsewhere() -> None:
    """Neither is affinity thrown away under imbalance nor a hot replica buried."""
    router, _ = router_of("a", "b")
    router.on_cache("a", CacheChanges(filled=chain("x", 10)))
    for name in ("a", "b"):  # as much was computed at each
        first_token(router, router.route_to(name, prompt_of(f"{name} before", 50)))
    router.route_to("a", prompt_of("other", 15))  # 241 tokens are queued at a; the prefix is worth 160, three times
    ticket = router.choose(prompt_of("x", 10))
    assert ticket is not None and ticket.replica == "a"
    router.route_to("a", prompt_of("more", 20))
    ticket = router.choose(prompt_of("x", 10))
    assert ticket is not None and ticket.replica == "b"


def test_a_prefix_that_everybody_asks_for_gets_a_second_home() -> None:
    """Little waits at any moment, but all of it at one replica, while the other does nothing."""
    router, clock = router_of("a", "b")
    homes = []
    for nth in range(40):
        ticket = router.route(Prompt(50 * BLOCK, [*chain("x", 40), *chain(f"tail {nth}", 9)]))
        assert ticket is not None
        homes.append(ticket.replica)
        clock.now_s += ticket.num_uncached_tokens / 1_000 / 2  # they come twice as fast as one replica computes
        router.on_load(ticket.replica, ReplicaLoad(prefill_tokens_per_s=1_000.0))
    assert set(homes[:3]) == {homes[0]} and 10 <= homes.count("a") <= 30


def test_a_new_prefix_goes_where_least_was_computed_lately() -> None:
    router, clock = router_of("a", "b", "c")
    for name, num_prefixes in (("a", 4), ("b", 2), ("c", 3)):
        for nth in range(num_prefixes):
            ticket = router.route_to(name, prompt_of(f"{name}{nth}", 20))
            clock.now_s += 0.3
            first_token(router, ticket)
            router.on_end(ticket)
    assert router.choose(prompt_of("new", 20)).replica == "b"  # type: ignore[union-attr]
    router.on_cache("a", CacheChanges(filled=chain("old", 20)))
    assert router.choose(prompt_of("old", 20)).replica == "a"  # type: ignore[union-attr]


def test_a_prefix_that_is_being_computed_counts_as_cached() -> None:
    router, _ = router_of("a", "b", "c")
    first = router.route(prompt_of("x", 50))
    assert first is not None
    second = router.route(Prompt(60 * BLOCK, [*chain("x", 50), *chain("tail", 9)]))
    assert second is not None and second.num_cached_tokens in (0, 50 * BLOCK)
    followers = [router.route_to(first.replica, prompt_of("x", 50)) for _ in range(3)]
    assert all(ticket.num_uncached_tokens == 1 for ticket in followers)


def test_a_promise_stands_until_the_replica_had_time_to_tell() -> None:
    router, clock = router_of("a")
    ticket = router.route(prompt_of("x", 4))
    assert ticket is not None
    router.on_first_token(ticket)
    router.on_end(ticket)
    clock.now_s += 0.9
    assert router.choose(prompt_of("x", 4)).num_cached_tokens == 4 * BLOCK  # type: ignore[union-attr]
    clock.now_s += 0.2
    assert router.choose(prompt_of("x", 4)).num_cached_tokens == 0  # type: ignore[union-attr]
    router.check()


def test_a_request_that_computed_nothing_promises_nothing() -> None:
    router, _ = router_of("a")
    ticket = router.route(prompt_of("x", 4))
    assert ticket is not None
    router.on_end(ticket)
    assert router.choose(prompt_of("x", 4)).num_cached_tokens == 0  # type: ignore[union-attr]
    router.check()


def test_what_others_queued_is_computed_meanwhile() -> None:
    router, clock = router_of("a", "b")
    router.on_load("a", ReplicaLoad(num_queued_tokens=500, prefill_tokens_per_s=1_000.0))
    router.on_cache("a", CacheChanges(filled=chain("x", 10)))
    assert router.choose(prompt_of("x", 10)).replica == "b"  # type: ignore[union-attr]
    clock.now_s += 0.4
    assert router.choose(prompt_of("x", 10)).replica == "a"  # type: ignore[union-attr]


def test_blocks_that_are_told_later_count_from_then_on() -> None:
    router, clock = router_of("a", "b")
    ticket = router.route(Prompt(161))
    assert ticket is not None
    router.on_hashes(ticket, 161, prompt_of("x", 10).hashes)
    router.on_first_token(ticket)
    router.check()
    again = router.choose(prompt_of("x", 10))
    assert again is not None and (again.replica, again.num_cached_tokens) == (ticket.replica, 160)
    router.on_end(ticket)
    router.on_hashes(ticket, 161, prompt_of("y", 10).hashes)  # too late
    clock.now_s += 2.0
    router.check()
    assert router.choose(prompt_of("x", 10)).num_cached_tokens == 0  # type: ignore[union-attr]


def test_a_length_that_is_told_later_counts_in_the_queue() -> None:
    router, _ = router_of("a", "b")
    guessed = router.route(Prompt(40))
    assert guessed is not None
    router.on_hashes(guessed, 161, prompt_of("x", 10).hashes)
    router.check()
    assert router.replicas[guessed.replica].num_queued_tokens == 161
    router.on_first_token(guessed)
    router.on_hashes(guessed, 300, prompt_of("x", 18).hashes)  # not in the queue any more
    router.check()
    assert router.replicas[guessed.replica].num_queued_tokens == 0


def test_own_prompts_that_are_mostly_cached_are_not_taken_for_others() -> None:
    """A server counts whole prompts in its queue, and the router what the cache does not have of them."""
    router, _ = router_of("a", "b")
    router.on_cache("a", CacheChanges(filled=chain("x", 20)))
    begun = router.replicas["a"].num_begun_tokens
    tickets = [router.route(prompt_of("x", 20)) for _ in range(4)]
    assert all(ticket is not None and ticket.replica == "a" for ticket in tickets)
    router.on_load("a", ReplicaLoad(prefill_tokens_per_s=1_000.0, num_queued_tokens=4 * 321))
    assert router.replicas["a"].num_foreign_tokens == 0
    # The answer to a question of before, that two first tokens have overtaken.
    for ticket in tickets[:2]:
        router.on_first_token(ticket)  # type: ignore[arg-type]
    late = ReplicaLoad(prefill_tokens_per_s=1_000.0, num_queued_tokens=4 * 321 + 500)
    router.on_load("a", late, num_begun_tokens=begun)
    assert router.replicas["a"].num_foreign_tokens == 500
    router.check()


def test_what_was_routed_to_a_replica_that_publishes_nothing_is_there() -> None:
    router, _ = router_of("a", "b", is_exact=False)
    ticket = router.route(text_prompt("abcdefgh", 130))
    assert ticket is not None
    again = router.choose(text_prompt("abcdxyz", 130))
    assert again is not None and (again.replica, again.num_cached_tokens) == (ticket.replica, 4 * BLOCK)
    router.check()


def test_a_text_finds_what_was_routed_before_anybody_tells_of_blocks() -> None:
    router, _ = router_of("a", "b")
    first = router.route(text_prompt("abcd", 70))
    assert first is not None
    second = router.choose(text_prompt("abcdefghijkl", 200))
    assert second is not None and (second.replica, second.num_cached_tokens) == (first.replica, 4 * BLOCK)


def test_a_block_that_was_evicted_contradicts_the_text() -> None:
    router, _ = router_of("a", "b")
    hashes = chain("x", 3)
    first = router.route_to("a", text_prompt("abcdef", 100, hashes))
    router.on_first_token(first)
    router.on_cache("a", CacheChanges(filled=hashes))
    assert router.choose(text_prompt("abcdefgh", 140, hashes)).num_cached_tokens == 6 * BLOCK  # type: ignore[union-attr]
    router.remove("a")
    router.add("a")
    router.route_to("a", text_prompt("abcdef", 100))  # what blocks it makes was not known
    router.on_cache("a", CacheChanges(filled=hashes[:1]))
    found = router.route_to("a", text_prompt("abcdefgh", 140, hashes))
    assert found.num_cached_tokens == BLOCK
    router.check()


def test_the_faster_of_two_replicas_takes_more() -> None:
    router, _ = router_of("slow", "fast")
    router.on_load("fast", ReplicaLoad(prefill_tokens_per_s=4_000.0))
    taken = [ticket.replica for i in range(20) if (ticket := router.route(prompt_of(f"p{i}", 10))) is not None]
    assert taken.count("fast") > 2 * taken.count("slow") > 0


def test_equal_replicas_share_equally() -> None:
    router, _ = router_of("a", "b", "c")
    taken = [ticket.replica for i in range(30) if (ticket := router.route(prompt_of(f"p{i}", 3))) is not None]
    assert {taken.count(name) for name in "abc"} == {10}


def test_ties_go_to_the_replica_with_fewer_running() -> None:
    router, _ = router_of("a", "b")
    router.on_load("a", ReplicaLoad(prefill_tokens_per_s=1_020.0, num_running=9))
    router.on_load("b", ReplicaLoad(prefill_tokens_per_s=1_000.0, num_running=2))
    assert [router.choose(prompt_of("p", 3)).replica for _ in range(5)] == ["b"] * 5  # type: ignore[union-attr]


def test_a_full_replica_is_waited_for_only_as_long_as_it_is_worth() -> None:
    router, clock = router_of("a", "b", max_num_seqs=2)
    router.on_cache("a", CacheChanges(filled=chain("x", 20)))
    under_way = []
    for _ in range(2):
        ticket = router.route_to("a", prompt_of("x", 20))
        router.on_first_token(ticket)
        under_way.append(ticket)
    clock.now_s = 10.0
    router.on_end(router_ticket := under_way.pop())
    assert router_ticket.is_over
    assert router.choose(prompt_of("x", 20)).replica == "a"  # type: ignore[union-attr]
    router.on_first_token(router.route_to("a", prompt_of("x", 20)))
    assert router.choose(prompt_of("x", 20)).replica == "b"  # type: ignore[union-attr]


def test_the_queue_shrinks_with_time_and_with_first_tokens() -> None:
    router, clock = router_of("a")
    ticket = router.route(prompt_of("x", 100))
    assert ticket is not None
    before = router.choose(prompt_of("y", 1))
    clock.now_s = 1.0
    later = router.choose(prompt_of("y", 1))
    first_token(router, ticket)
    after = router.choose(prompt_of("y", 1))
    assert before is not None and later is not None and after is not None
    assert before.expected_s - later.expected_s == 1.0
    assert later.expected_s > after.expected_s == 17 / 1_000


def timed(router: Router, clock: Clock, name: str, seconds: float) -> None:
    ticket = router.route_to(name, prompt_of(f"{name} {clock.now_s}", 10))
    clock.now_s += seconds
    router.on_first_token(ticket)
    router.on_end(ticket)


def test_the_rate_of_a_replica_that_reports_none_is_measured() -> None:
    router, clock = router_of("a")
    router.on_load("a", ReplicaLoad())
    timed(router, clock, "a", 0.5)
    assert router.tokens_per_s(router.replicas["a"]) == 161 / 0.5
    assert router.tokens_per_s(router.add("new")) == 161 / 0.5


def test_prompts_that_end_in_one_step_are_counted_together() -> None:
    router, clock = router_of("a")
    tickets = [router.route_to("a", prompt_of(name, 10)) for name in "xyz"]
    clock.now_s = 0.3
    for ticket in tickets:
        router.on_first_token(ticket)
    assert router.tokens_per_s(router.replicas["a"]) == pytest.approx(3 * 161 / 0.3, rel=0.05)


def test_replicas_count_as_alike_until_one_shows_otherwise() -> None:
    """What runs beside a prompt decides how long it takes: by chance nobody loses a conversation."""
    router, clock = router_of("a", "b")
    rng = random.Random(0)
    for _ in range(40):
        for name, seconds in (("a", 0.13), ("b", 0.17)):
            timed(router, clock, name, seconds * rng.uniform(0.3, 1.7))
    rates = [router.tokens_per_s(replica) for replica in router.replicas.values()]
    assert rates[0] == rates[1] == pytest.approx(161 / 0.15, rel=0.2)
    router.on_load("b", ReplicaLoad(prefill_tokens_per_s=50_000.0))  # its last step was a quick one
    router.on_cache("a", CacheChanges(filled=chain("x", 10)))
    assert router.choose(prompt_of("x", 10)).replica == "a"  # type: ignore[union-attr]
    for _ in range(20):
        timed(router, clock, "a", 1.5)
    assert router.tokens_per_s(router.replicas["a"]) < router.tokens_per_s(router.replicas["b"]) / 3


def test_what_others_queue_at_a_replica_counts() -> None:
    router, _ = router_of("a", "b")
    router.on_load("a", ReplicaLoad(prefill_tokens_per_s=1_000.0, num_queued_tokens=500))
    assert router.choose(prompt_of("x", 2)).replica == "b"  # type: ignore[union-attr]


def test_another_keys_flood_counts_only_as_far_as_it_is_served_first() -> None:
    router, _ = router_of("a", "b")
    router.on_cache("a", CacheChanges(filled=chain("x", 20)))
    for i in range(20):
        router.route_to("a", prompt_of(f"flood{i}", 20, tenant="greedy"))
    mine = prompt_of("x", 20, tenant="modest")
    assert router.choose(mine).replica == "a"  # type: ignore[union-attr]
    theirs = prompt_of("x", 20, tenant="greedy")
    assert router.choose(theirs).replica == "b"  # type: ignore[union-attr]


def test_closed_and_excluded_replicas_take_nothing() -> None:
    router, _ = router_of("a", "b")
    router.set_open("a", False)
    assert router.choose(prompt_of("x", 1)).replica == "b"  # type: ignore[union-attr]
    assert router.choose(prompt_of("x", 1), excluding={"b"}) is None


def test_tickets_of_a_removed_replica_do_no_harm() -> None:
    router, _ = router_of("a")
    old = router.route(prompt_of("x", 4))
    assert old is not None
    router.remove("a")
    router.add("a")
    new = router.route(prompt_of("x", 4))
    assert new is not None
    router.on_first_token(old)
    router.on_end(old)
    assert router.replicas["a"].num_sequences == 1
    router.check()
    router.on_end(new)
    router.check()


def test_whatever_happens_the_books_are_right_and_nothing_is_left() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        clock = Clock()
        router = Router(BLOCK, clock=clock)
        tickets: list[Ticket] = []
        for nth in range(300):
            clock.now_s += rng.random()
            name = rng.choice("abcde")
            match rng.randrange(8):
                case 0 if name not in router.replicas:
                    router.add(name, is_exact=rng.random() < 0.7)
                case 1 if name in router.replicas and rng.random() < 0.2:
                    router.remove(name)
                case 2 if name in router.replicas:
                    hashes = chain(rng.choice("xyz"), rng.randrange(12))
                    changes = CacheChanges(
                        filled=rng.sample(hashes, len(hashes) // 2),
                        evicted=rng.sample(hashes, len(hashes) // 3),
                        is_snapshot=rng.random() < 0.2,
                    )
                    router.on_cache(name, changes)
                case 3 if name in router.replicas:
                    router.on_load(name, ReplicaLoad(num_queued_tokens=rng.randrange(99), num_running=rng.randrange(9)))
                case 4 if tickets:
                    ticket = rng.choice(tickets)
                    if rng.random() < 0.3:
                        router.on_hashes(ticket, rng.randrange(1, 200), chain(rng.choice("xyz"), rng.randrange(12)))
                    router.on_first_token(ticket)
                case 5 if tickets:
                    router.on_end(tickets.pop(rng.randrange(len(tickets))))
                case 6 if name in router.replicas:
                    router.set_open(name, rng.random() < 0.8)
                case _:
                    wanted = prompt_of(rng.choice("xyz"), rng.randrange(12), tenant=rng.choice(("", "t")))
                    if rng.random() < 0.5:
                        text = rng.choice("uv") * rng.randrange(12)
                        wanted = text_prompt(text, wanted.num_tokens, wanted.hashes)
                    ticket = router.route(wanted)
                    assert (ticket is None) == (not any(one.is_open for one in router.replicas.values()))
                    if ticket is not None:
                        assert 0 <= ticket.num_cached_tokens < wanted.num_tokens and ticket.expected_s > 0
                        tickets.append(ticket)
            if nth % 10 == 0:
                router.check()
        for ticket in tickets:
            router.on_end(ticket)
        router.check()
        assert all(one.num_sequences == one.num_queued_tokens == 0 for one in router.replicas.values())
        for name in list(router.replicas):
            router.remove(name)
        router.check()
        assert not router._index._holders and not router._texts._holders


def test_a_choice_among_a_thousand_replicas_finds_the_longest_prefix() -> None:
    router, _ = router_of(*(f"r{i}" for i in range(1000)))
    for i in range(1000):
        router.on_cache(f"r{i}", CacheChanges(filled=chain("x", i % 100)))
    ticket = router.choose(prompt_of("x", 100))
    assert ticket is not None and ticket.num_cached_tokens == 99 * BLOCK
