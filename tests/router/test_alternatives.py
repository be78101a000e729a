"""The simpler routing policies."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.errors import ConfigError
from quire.router.alternatives import ALTERNATIVES, AlternativeRouter, CacheAware, new_router
from quire.router.hashes import text_pieces
from quire.router.policy import Prompt, Router


def router_of(name: str, replicas: str) -> Router:
    router = new_router(name, 16)
    for replica in replicas:
        router.add(replica, is_exact=False)
    return router


def prompt(text: str) -> Prompt:
    return Prompt(len(text), pieces=text_pieces(text))


def sent_to(router: Router, text: str) -> str:
    ticket = router.route(prompt(text))
    assert ticket is not None
    return ticket.replica


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_they_choose_among_those_that_are_open(name: str) -> None:
    router = router_of(name, "abc")
    router.set_open("b", False)
    taken = Counter(sent_to(router, f"{i:03d}" * 40) for i in range(60))
    assert set(taken) == {"a", "c"} and min(taken.values()) >= 10
    router.check()
    for server in "ac":
        router.set_open(server, False)
    assert router.route(prompt("x" * 100)) is None


def test_a_consistent_hash_sends_the_same_beginning_to_the_same_server() -> None:
    router = router_of("consistent-hash", "abc")
    assert len({sent_to(router, "x" * 100 + str(i)) for i in range(9)}) == 1


@pytest.mark.parametrize("name", ["least-loaded", "power-of-two"])
def test_load_counts_while_requests_are_under_way(name: str) -> None:
    router = router_of(name, "ab")
    for _ in range(5):
        router.route_to("a", prompt("x"))
    assert [sent_to(router, "x") for _ in range(5)] == ["b"] * 5


def test_cache_aware_returns_to_the_longest_beginning_until_loads_are_far_apart() -> None:
    router = router_of("cache-aware", "ab")
    first = sent_to(router, "x" * 400)
    other = sent_to(router, "y" * 100)
    assert first != other  # a new text goes where less text was sent
    assert sent_to(router, "x" * 400 + "z" * 100) == first
    assert sent_to(router, "x" * 40 + "z" * 400) == other  # a tenth of it is too little to follow
    while (load := router.replicas[first].num_sequences - router.replicas[other].num_sequences) <= 64:
        assert sent_to(router, "x" * 400) == first, load
    assert sent_to(router, "x" * 400) == other


def test_what_was_sent_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheAware, "most_pieces", 40)
    router = router_of("cache-aware", "a")
    for i in range(20):
        sent_to(router, f"{i:03d}" * 100)
    assert isinstance(router, AlternativeRouter) and isinstance(router._pick, CacheAware)
    assert len(router._pick._sent["a"]) == 40


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="first-token, cache-aware"):
        new_router("fastest", 16)
