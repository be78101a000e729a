"""Drafting on an H200 in virtual time: nothing lost where nothing repeats, little where chances mislead, and at least
twice the speed where a single stream copies."""

from __future__ import annotations

import argparse
import inspect
import random
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from drafting.virtual_gpu import SLOW_HOST, SMOLLM2_HOST, Job, Ran, SmallModel, run

from quire.bench.workloads import Workload, mixed256, sharegpt
from quire.lab.shapes import read_model_spec
from quire.sim.devices import DEVICES, Efficiency
from quire.sim.roofline import RooflineCost

VOCAB = 128_000
COST = RooflineCost(read_model_spec("llama-3.1-8b"), DEVICES["h200"])
# What steps of many rows take more of each layer was measured with matrices fifty times as large. This model's steps
# hardly depend on their tokens (`SmallModel`), and the device has to be faster than the host here.
SMALL_COST = RooflineCost(read_model_spec("smollm2"), DEVICES["h200"], efficiency=Efficiency(wide_layer_s=0.0))

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


def copies(count: int, replaced_share: Callable[[int], float]) -> list[Job]:
    """Requests that come at once: a piece of text each, and its answer, which is that piece with some of its words
    replaced, of each request another share."""
    rng, jobs = random.Random(3), []
    for i in range(count):
        start = rng.randrange(len(TEXT) - 200)
        piece = TEXT[start : start + 200]
        answer = [VOCAB + rng.randrange(VOCAB) if rng.random() < replaced_share(i) else word for word in piece]
        jobs.append(Job([3 * VOCAB + i, *piece], answer))
    return jobs


# By name: the share of its words that a request's answer replaces.
ANSWERS: dict[str, Callable[[int], float]] = {
    "all copy": lambda i: 0.1,
    "all copy loosely": lambda i: 0.3,
    "some copy more closely than others": lambda i: 0.05 + 0.1 * (i % 5),
    "every other copies": lambda i: 0.1 if i % 2 else 1.0,
    "all but one copy": lambda i: 1.0 if i == 2 else 0.1,
    "none copies": lambda i: 1.0,
}


@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("width", [4, 16, 64])
def test_a_batch_on_a_slow_host_ends_no_later_with_drafts(
    width: int, answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model, for which the device is faster than the host: what drafts cost is the host's time, and that no
    step is planned beside one that has some. All are waited for, so that it counts when the last ends."""
    jobs = copies(width, ANSWERS[answers])
    plain, drafting = (
        run(jobs, SMALL_COST, monkeypatch, method, host=SLOW_HOST, together=True) for method in (None, "ngram")
    )
    assert drafting.tokens_per_s > 0.98 * plain.tokens_per_s
    if answers == "all copy" and width <= 16:
        assert drafting.tokens_per_s > 1.1 * plain.tokens_per_s


@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("width", [16, 64])
def test_a_full_server_on_a_slow_host_is_no_slower_with_drafts(
    width: int, answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are always others who wait for a row: whoever ends makes way for them."""
    jobs = copies(4 * width, ANSWERS[answers])
    plain, drafting = (
        run(jobs, SMALL_COST, monkeypatch, method, host=SLOW_HOST, max_num_seqs=width) for method in (None, "ngram")
    )
    assert drafting.tokens_per_s > 0.98 * plain.tokens_per_s


def test_a_single_stream_that_copies_gains_on_a_slow_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = copies(4, ANSWERS["all copy"])
    for i, job in enumerate(jobs):
        job.arrival_s = 100.0 * i
    plain, drafting = (run(jobs, SMALL_COST, monkeypatch, method, host=SLOW_HOST) for method in (None, "ngram"))
    assert statistics.mean(plain.whole_s) > 2 * statistics.mean(drafting.whole_s)


def test_where_drafts_lose_few_steps_try_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """About every other draft is right, and yet they cost more than they bring."""
    dear = replace(SLOW_HOST, submitting=replace(SLOW_HOST.submitting, draft_s=40e-6))
    ran = run(copies(256, ANSWERS["all copy"]), SMALL_COST, monkeypatch, "ngram", host=dear, max_num_seqs=64)
    assert ran.num_accepted > 0.4 * ran.num_drafts > 0
    assert ran.num_steps_with_drafts < 0.01 * ran.num_steps


def edits(rng: random.Random, piece: list[int]) -> list[int]:
    """A few words are replaced wherever they stand, and here and there a word is put in or left out."""
    replaced = rng.sample([*dict.fromkeys(piece)], 5)
    answer = []
    for token in piece:
        answer += [VOCAB + token if token in replaced else token] * (rng.random() > 0.02)
        answer += [2 * VOCAB + rng.randrange(VOCAB)] * (rng.random() < 0.02)
    return answer


def extraction(rng: random.Random, piece: list[int]) -> list[int]:
    """Passages of 5 to 40 tokens, one after the other, with a few others between them."""
    answer, at = [], 0
    while at < len(piece):
        answer += [2 * VOCAB + rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
        size = rng.randrange(5, 40)
        answer += piece[at : at + size]
        at += size + rng.randrange(30)
    return answer


def quotes(rng: random.Random, piece: list[int]) -> list[int]:
    """Word for word, and for a while in the model's own words."""
    own = [2 * VOCAB + rng.randrange(VOCAB) for _ in range(32)]
    at = rng.randrange(40, 120)
    return [*piece[:at], *own, *piece[at:]]


def of_kind(kind: Callable[[random.Random, list[int]], list[int]], count: int, num_out: int = 192) -> list[Job]:
    rng, jobs = random.Random(4), []
    for i in range(count):
        start = rng.randrange(len(TEXT) - 600)
        piece = TEXT[start : start + 600]
        jobs.append(Job([4 * VOCAB + i, *piece], kind(rng, piece)[:num_out]))
    return jobs


@pytest.mark.parametrize(("kind", "times"), [(edits, 2.8), (extraction, 2.8), (quotes, 3.7)])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_four_short_requests_one_after_the_other_are_enough_to_gain(
    kind: Callable[[random.Random, list[int]], list[int]], times: float, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 on an H200: 192 tokens are some thirty steps with drafts, so that whoever learns slowly gains nothing."""
    jobs = of_kind(kind, 4)
    for i, job in enumerate(jobs):
        job.arrival_s = 100.0 * i
    plain, drafting = (run(jobs, SmallModel(), monkeypatch, each, host=SMOLLM2_HOST) for each in (None, method))
    assert statistics.mean(plain.whole_s) > times * statistics.mean(drafting.whole_s)


@pytest.mark.parametrize("kind", [edits, extraction, quotes])
@pytest.mark.parametrize("width", [16, 64])
def test_a_batch_of_a_small_model_is_no_slower_with_drafts(
    kind: Callable[[random.Random, list[int]], list[int]], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = of_kind(kind, width)
    plain, drafting = (
        run(jobs, SmallModel(), monkeypatch, each, host=SMOLLM2_HOST, together=True) for each in (None, "ngram")
    )
    assert drafting.tokens_per_s > 0.98 * plain.tokens_per_s
