"""What a router remembers of texts whose blocks a server told."""

from __future__ import annotations

import itertools
import random

from quire.router.hashes import KnownTexts, piece_ends, prompt_hashes, text_pieces

BLOCK_SIZE = 16


def told(known: KnownTexts, text: str, scope: str = "") -> list[bytes]:
    """As a server with one token a character would."""
    hashes = prompt_hashes([ord(char) for char in text], BLOCK_SIZE)
    known.learn(text_pieces(text, scope), text, len(text), hashes, BLOCK_SIZE)
    return hashes


def test_a_text_that_begins_like_one_before_is_known_as_far_as_they_agree() -> None:
    rng, known = random.Random(0), KnownTexts()
    prefix, *tails = ("".join(rng.choices("abcdefgh ", k=size)) for size in (400, 90, 90))
    first = told(known, prefix + tails[0])
    pieces = text_pieces(prefix + tails[1])
    num_known, hashes = known.find(pieces)
    assert num_known == 400 // 16 and list(hashes) == first[: len(hashes)] and 400 // 16 - 2 <= len(hashes) <= 25
    second = told(known, prefix + tails[1])
    assert known.find(pieces)[0] == len(pieces)
    assert list(known.find(pieces)[1]) == second[: len(known.find(pieces)[1])]


def test_another_scope_or_another_beginning_is_unknown() -> None:
    known = KnownTexts()
    told(known, "a" * 200, scope="alice")
    assert known.find(text_pieces("a" * 200, "bob")) == (0, ())
    assert known.find(text_pieces("b" + "a" * 199, "alice")) == (0, ())
    assert known.find([]) == (0, ())


def test_blocks_that_were_reckoned_too_far_are_cut_where_two_texts_part() -> None:
    # The first half has a token a character, the second none: reckoned evenly, the half has half of the blocks too few,
    # and turned around too many. The second text shows where they part.
    known = KnownTexts()
    one, other = "x" * 64 + "y" * 256, "x" * 64 + "z" * 256
    for text in (one, other):
        tokens = [ord(char) for char in text if char != "x"]
        known.learn(text_pieces(text, ""), text, len(tokens), prompt_hashes(tokens, BLOCK_SIZE), BLOCK_SIZE)
    assert known.find(text_pieces("x" * 64 + "w" * 100, ""))[1] == []


def test_what_is_not_used_is_forgotten_first() -> None:
    known = KnownTexts(max_pieces=20)
    told(known, "a" * 160)
    told(known, "b" * 160)
    assert known.find(text_pieces("a" * 160))[0] == 9  # used: the later now
    told(known, "c" * 160)
    assert known.find(text_pieces("a" * 160))[0] == 9
    assert known.find(text_pieces("b" * 160))[0] < 9


def test_long_texts_have_few_pieces_that_end_where_those_of_every_text_do() -> None:
    ends = piece_ends(200_000)
    assert len(ends) < 600 and piece_ends(5_000) == [end for end in ends if end < 5_000]
    assert all(b - a <= max(16, a / 63) for a, b in itertools.pairwise([0, *ends]))
    text = "".join(random.Random(0).choices("abcdefgh ", k=9_000))
    pieces, others = text_pieces(text), text_pieces(text[:6_000] + "x" + text[6_001:])
    num_same = sum(a == b for a, b in zip(pieces, others, strict=True))
    assert (
        pieces[:num_same] == others[:num_same]
        and piece_ends(9_000)[num_same - 1] <= 6_000 < piece_ends(9_000)[num_same]
    )
