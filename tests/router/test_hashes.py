"""What a router remembers of texts whose blocks a server told."""

from __future__ import annotations

import random

from quire.router.hashes import KnownTexts, prompt_hashes

BLOCK_SIZE = 16


def told(known: KnownTexts, text: str, scope: str = "") -> list[bytes]:
    """As a server with one token a character would."""
    hashes = prompt_hashes([ord(char) for char in text], BLOCK_SIZE)
    known.learn(known.pieces(text, scope), text, len(text), hashes, BLOCK_SIZE)
    return hashes


def test_a_text_that_begins_like_one_before_is_known_as_far_as_they_agree() -> None:
    rng, known = random.Random(0), KnownTexts()
    prefix, *tails = ("".join(rng.choices("abcdefgh ", k=size)) for size in (400, 90, 90))
    first = told(known, prefix + tails[0])
    pieces = known.pieces(prefix + tails[1], "")
    num_known, hashes = known.find(pieces)
    assert num_known == 400 // 32 and list(hashes) == first[: len(hashes)] and 400 // 16 - 2 <= len(hashes) <= 25
    second = told(known, prefix + tails[1])
    assert known.find(pieces)[0] == len(pieces)
    assert list(known.find(pieces)[1]) == second[: len(known.find(pieces)[1])]


def test_another_scope_or_another_beginning_is_unknown() -> None:
    known = KnownTexts()
    told(known, "a" * 200, scope="alice")
    assert known.find(known.pieces("a" * 200, "bob")) == (0, ())
    assert known.find(known.pieces("b" + "a" * 199, "alice")) == (0, ())
    assert known.find([]) == (0, ())


def test_blocks_that_were_reckoned_too_far_are_cut_where_two_texts_part() -> None:
    # The first half has a token a character, the second none: reckoned evenly, the half has half of the blocks too few,
    # and turned around too many. The second text shows where they part.
    known = KnownTexts()
    one, other = "x" * 64 + "y" * 256, "x" * 64 + "z" * 256
    for text in (one, other):
        tokens = [ord(char) for char in text if char != "x"]
        known.learn(known.pieces(text, ""), text, len(tokens), prompt_hashes(tokens, BLOCK_SIZE), BLOCK_SIZE)
    assert known.find(known.pieces("x" * 64 + "w" * 100, ""))[1] == []


def test_what_is_not_used_is_forgotten_first() -> None:
    known = KnownTexts(max_pieces=20)
    told(known, "a" * 320)
    told(known, "b" * 320)
    assert known.find(known.pieces("a" * 320, ""))[0] == 9  # used: the later now
    told(known, "c" * 320)
    assert known.find(known.pieces("a" * 320, ""))[0] == 9
    assert known.find(known.pieces("b" * 320, ""))[0] < 9
