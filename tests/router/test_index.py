"""Which replica holds which links of a chain."""

from __future__ import annotations

from quire.router.index import BlockIndex, TextIndex


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(length)]


def test_leading_links_are_counted_for_every_replica_that_is_asked_about() -> None:
    index, links = BlockIndex(), chain("x", 5)
    for bit in range(3):
        index.add(bit)
    index.fill(0, links[:2])
    index.fill(1, links)
    index.fill(2, links[1:])  # without the first, the others are of no use
    assert index.leading(links, 0b111) == {0: 2, 1: 5}
    assert index.leading(links, 0b101) == {0: 2}
    assert index.leading([], 0b111) == {}
    index.check(range(3))


def test_a_promise_stands_until_all_who_made_it_withdraw_it() -> None:
    index, links = BlockIndex(), chain("x", 2)
    index.add(0)
    index.promise(0, links)
    index.promise(0, links)
    index.withdraw(0, links)
    assert index.leading(links, 1) == {0: 2}
    index.withdraw(0, links)
    assert index.leading(links, 1) == {} and not index.num_cached(0)
    index.check([0])


def test_a_snapshot_replaces_what_was_filled_before() -> None:
    index, links = BlockIndex(), chain("x", 4)
    index.add(0)
    index.fill(0, links[:3])
    index.replace(0, [links[0], links[3]])
    assert index.leading(links, 1) == {0: 1} and index.num_cached(0) == 2
    index.remove(0)
    index.check([])


def test_of_texts_the_oldest_are_forgotten_and_their_ends_first() -> None:
    index = TextIndex(capacity=6)
    index.add(0)
    for name in ("x", "y"):
        index.route(0, chain(name, 4))
    assert index.leading(chain("y", 4), 1) == {0: 4} and index.leading(chain("x", 4), 1) == {0: 2}
    index.check([0])
