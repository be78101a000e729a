"""Drafting on an H200 in virtual time: nothing lost where nothing repeats, little where chances mislead, and at least
twice the speed where a single stream copies."""

from __future__ import annotations

import argparse
import inspect
import random
import re
import statistics
from collections.abc import Callable, Iterable

import pytest
from drafting.virtual_gpu import Job, Ran, run

from quire.bench.workloads import Workload, mixed256, sharegpt
from quire.lab.shapes import read_model_spec
from quire.sim.devices import DEVICES
from quire.sim.roofline import RooflineCost

VOCAB = 128_000
COST = RooflineCost(read_model_spec("llama-3.1-8b"), DEVICES["h200"])

# A real text, word by word, with the words that follow one another as they do in texts.
_WORDS = re.findall(r"\w+|\s+|.", inspect.getsource(argparse))
TEXT = [{word: i for i, word in enumerate(dict.fromkeys(_WORDS))}[word] for word in _WORDS]


def of_random_tokens(work: Iterable[tuple[list[int], int]], rng: random.Random) -> list[Job]:
    return [Job(prompt, [rng.randrange(VOCAB) for _ in range(num_out)]) for prompt, num_out in work]


def of_text(work: Iterable[tuple[list[int], int]], rng: random.Random) -> list[Job]:
    """Prompts and answers are different pieces of one text: much of an answer has stood somewhere, and goes on
    otherwise."""

    def piece(size: int) -> list[int]:
        start = rng.randrange(len(TEXT) - size)
        return TEXT[start : start + size]

    return [Job([VOCAB + i, *piece(len(prompt))], piece(num_out)) for i, (prompt, num_out) in enumerate(work)]


def arriving(jobs: list[Job], per_s: float, rng: random.Random) -> list[Job]:
    now_s = 0.0
    for job in jobs:
        now_s += rng.expovariate(per_s)
        job.arrival_s = now_s
    return jobs


def shorter(work: Workload, share: int) -> Workload:
    return [(prompt[: max(4, len(prompt) // share)], max(2, num_out // share)) for prompt, num_out in work]


LOADS: dict[str, Callable[[], list[tuple[list[int], int]]]] = {
    "mixed256": lambda: shorter(mixed256(VOCAB), 6),
    "sharegpt": lambda: shorter(sharegpt(VOCAB, num=200), 3),
    **{f"{rate} a second": lambda rate=rate: shorter(sharegpt(VOCAB, num=3 * rate), 2) for rate in (4, 8, 24)},  # type: ignore[misc]
}


def jobs_of(load: str, kind: Callable[..., list[Job]]) -> list[Job]:
    rng = random.Random(1)
    jobs = kind(LOADS[load](), rng)
    return arriving(jobs, float(load.split()[0]), rng) if "second" in load else jobs


def slowdown(ran: Ran, plain: Ran) -> float:
    """The worst of what is asked: throughput, time to the first token, time to the last."""
    pairs = ((ran.first_s, plain.first_s), (ran.whole_s, plain.whole_s))
    return max(
        plain.tokens_per_s / ran.tokens_per_s,
        *(statistics.mean(ours) / statistics.mean(theirs) for ours, theirs in pairs),
    )


@pytest.mark.parametrize("load", LOADS)
def test_where_nothing_repeats_drafting_costs_nothing(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(jobs_of(load, of_random_tokens), COST, monkeypatch, None)
    drafting = run(jobs_of(load, of_random_tokens), COST, monkeypatch, "suffix")
    assert plain.num_tokens == drafting.num_tokens
    assert slowdown(drafting, plain) < 1.005 and drafting.num_drafts == 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_wide_batch_of_text_that_misleads_loses_next_to_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(jobs_of("mixed256", of_text), COST, monkeypatch, None)
    drafting = run(jobs_of("mixed256", of_text), COST, monkeypatch, method)
    assert drafting.num_drafts > 100
    assert drafting.tokens_per_s > 0.98 * plain.tokens_per_s
    assert statistics.mean(drafting.whole_s) < 1.02 * statistics.mean(plain.whole_s)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_single_stream_that_copies_is_more_than_twice_as_fast(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits of a text: a few of its words are replaced wherever they stand."""

    def edits() -> list[Job]:
        rng, jobs = random.Random(2), []
        for i in range(4):
            start = rng.randrange(len(TEXT) - 400)
            piece = TEXT[start : start + 400]
            replaced = rng.sample([*dict.fromkeys(piece)], 5)
            answer = [VOCAB + token if token in replaced else token for token in piece]
            jobs.append(Job([i, *piece], answer, arrival_s=100.0 * i))
        return jobs

    plain, drafting = (run(edits(), COST, monkeypatch, each) for each in (None, method))
    assert statistics.mean(plain.whole_s) > 2 * statistics.mean(drafting.whole_s)
