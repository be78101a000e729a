"""The policies that the product's router is compared with."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.bench.alternatives import ALTERNATIVES, AlternativeRouter
from quire.router.hashes import text_pieces
from quire.router.policy import Prompt


def prompt(text: str) -> Prompt:
    return Prompt(len(text), text_pieces(text))


def sent_to(router: AlternativeRouter, text: str) -> str:
    ticket = router.route(prompt(text))
    assert ticket is not None
    return ticket.replica


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_they_choose_among_those_that_are_open(name: str) -> None:
    router = AlternativeRouter(name, "abc", 16)
    router.set_open("b", False)
    taken = Counter(sent_to(router, f"{i:03d}" * 40) for i in range(60))
    assert set(taken) == {"a", "c"} and min(taken.values()) >= 10
    router.check()
    for server in "ac":
        router.set_open(server, False)
    assert router.route(prompt("x" * 100)) is None


def test_a_consistent_hash_sends_the_same_beginning_to_the_same_server() -> None:
    router = AlternativeRouter("consistent hash", "abc", 16)
    assert len({sent_to(router, "x" * 100 + str(i)) for i in range(9)}) == 1


@pytest.mark.parametrize("name", ["least loaded", "power of two"])
def test_load_counts_while_requests_are_under_way(name: str) -> None:
    router = AlternativeRouter(name, "ab", 16)
    for _ in range(5):
        router.route_to("a", prompt("x"))
    assert [sent_to(router, "x") for _ in range(5)] == ["b"] * 5


def test_cache_aware_returns_to_the_longest_beginning_until_loads_are_far_apart() -> None:
    router = AlternativeRouter("cache aware", "ab", 16)
    first = sent_to(router, "x" * 400)
    other = sent_to(router, "y" * 100)
    assert first != other  # a new text goes where less text was sent
    assert sent_to(router, "x" * 400 + "z" * 100) == first
    assert sent_to(router, "x" * 40 + "z" * 400) == other  # a tenth of it is too little to follow
    while (load := router.replicas[first].num_sequences - router.replicas[other].num_sequences) <= 64:
        assert sent_to(router, "x" * 400) == first, load
    assert sent_to(router, "x" * 400) == other
