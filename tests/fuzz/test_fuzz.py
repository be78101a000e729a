from __future__ import annotations

import pytest

from fuzz.harness import CORPUS, Finding, Target, check, fuzz
from fuzz.targets import load_target, target_names

SECONDS = 0.5  # of CPU time, for each target; `make fuzz` takes longer


@pytest.mark.parametrize("name", target_names())
def test_a_parser_takes_or_refuses_whatever_it_is_given(name: str) -> None:
    target = load_target(name)
    fuzz(target, seconds=0)  # what a target loads at its first input is not the inputs' time
    assert fuzz(target, seconds=SECONDS) > len(target.known_inputs())


def test_every_corpus_has_its_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(target_names())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"bug", "KeyError: 'no refusal of its own'"),
        (b"echo", "a refusal of 5000 characters"),
        (b"slow", "took more than 0.2 s of CPU time"),
        (b"large", "MiB of memory"),
    ],
)
def test_the_harness_finds(data: bytes, words: str) -> None:
    def parse(data: bytes) -> object:
        match data:
            case b"bug":
                raise KeyError("no refusal of its own")
            case b"echo":
                raise ValueError("x" * 5_000)
            case b"slow":
                while True:
                    try:
                        sum(range(100))
                    except Exception:
                        continue
            case b"large":
                return bytearray(b"x" * (300 << 20))
        raise ValueError("refused")

    target = Target(name="own", parse=parse, refusals=(ValueError,), seeds=lambda: [b"slow {1}"], max_cpu_s=0.2)
    check(target, b"other")
    with pytest.raises(Finding, match=words) as found:
        check(target, data)
    assert found.value.data == data


def test_the_same_seed_tries_the_same_inputs() -> None:
    seen: list[bytes] = []
    target = Target(name="own", parse=seen.append, refusals=(), words=(b"{", b"}"), seeds=lambda: [b'{"a": 12}', b"[]"])
    first = fuzz(target, seconds=0.05, seed=7)
    seen_first, seen[:] = list(seen), []
    second = fuzz(target, seconds=0.05, seed=7)
    num_both = min(first, second)
    assert num_both > 10
    assert seen_first[:num_both] == seen[:num_both]
    assert len(set(seen)) > 5
