"""Beam search in the scheduler: the simulated executor ranks, and checks what every row reads and writes."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from scheduler.harness import Rig, make_request
from sim_language import ToyLanguage

from quire.errors import BadRequestError
from quire.plan import BeamCandidate
from quire.request import BeamSpec, FinishReason, Request
from quire.scheduler.beams import BeamSearch

VOCAB = 50  # small: some beams end


def beam_request(prompt: int | list[int], width: int, **fields: Any) -> Request:
    spec = BeamSpec(**{name: fields.pop(name) for name in ("length_penalty", "early_stopping") if name in fields})
    return make_request(prompt, n=width, beams=spec, **fields)


def search_plainly(request: Request, vocab: int = VOCAB) -> list[tuple[list[int], float]]:
    """The same search over whole token lists, without sequences, blocks or steps."""
    language, spec, width = ToyLanguage(vocab), request.beams, request.n
    assert spec is not None
    num_candidates = max(2, 1 + len(request.end_token_ids)) * width
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for length in range(1, request.max_tokens + 1):
        candidates: list[tuple[list[int], float]] = []
        for line, score in beams:
            fingerprints: list[int] = []
            language.extend(fingerprints, language.root(request.adapter), request.prompt_token_ids + line)
            for token, logprob in language.likeliest(fingerprints[-1], num_candidates):
                candidates.append(([*line, token], score + logprob))
        candidates = sorted(candidates, key=lambda one: -one[1])[:num_candidates]
        beams = []
        for nth, (line, score) in enumerate(candidates):
            if line[-1] in request.end_token_ids or length == request.max_tokens:
                if nth < width:
                    ended.append((line, score / length**spec.length_penalty))
            elif len(beams) < width:
                beams.append((line, score))
        ended = sorted(ended, key=lambda one: -one[1])[:width]
        if len(ended) == width and beams:
            reach = request.max_tokens if spec.early_stopping == "never" and spec.length_penalty > 0 else length
            if spec.early_stopping is True or beams[0][1] / reach**spec.length_penalty <= ended[-1][1]:
                break
    return ended


def check(rig: Rig, request: Request) -> None:
    expected = search_plainly(request)
    assert rig.outputs(request) == [line for line, _ in expected]
    assert request.beams is not None
    for seq, (line, score) in zip(request.sequences, expected, strict=True):
        (update,) = rig.updates[seq]
        assert update.logprobs is not None and [one.token_id for one in update.logprobs] == line
        total = sum(one.logprob for one in update.logprobs)
        assert math.isclose(total / len(line) ** request.beams.length_penalty, score, rel_tol=1e-9)
        is_end = line[-1] in request.end_token_ids
        assert seq.finish_reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_best_continuations(width: int, length_penalty: float, early_stopping: bool | str) -> None:
    rig = Rig(vocab_size=VOCAB, num_blocks=200)
    request = beam_request(
        10, width, max_tokens=12, ends=(3, 30), length_penalty=length_penalty, early_stopping=early_stopping
    )
    rig.add(request)
    rig.run()
    rig.check_idle()
    check(rig, request)


def test_beams_share_the_blocks_of_their_prompt() -> None:
    rig = Rig(vocab_size=VOCAB, num_blocks=400, max_model_len=400, max_num_batched_tokens=512)
    request = beam_request(128, 8, max_tokens=24)
    rig.add(request)
    most = 0
    while rig.scheduler.has_work:
        rig.step()
        most = max(most, rig.kv.num_used_blocks)
    check(rig, request)
    assert most < 8 * rig.kv.num_blocks_for(128 + 24) / 3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_among_others_with_little_memory(depth: int) -> None:
    """Chunked prompts, preemption by both ways, aborts, windows and a cache that may be off."""
    rng = random.Random(depth)
    num_preemptions = 0
    for _ in range(15):
        rig = Rig(
            vocab_size=VOCAB,
            depth=depth,
            num_blocks=rng.randint(40, 60),
            num_host_blocks=rng.choice([0, 20]),
            watermark=rng.choice([0.0, 0.05]),
            windows=rng.choice([(None,), (None,), (None, 8), (12,)]),
            enable_prefix_caching=rng.random() < 0.7,
            preemption=rng.choice(["recompute", "swap"]),
            transfer_steps=rng.randrange(3),
            max_num_batched_tokens=16,
            long_prefill_token_threshold=rng.choice([None, 8]),
            max_num_seqs=rng.choice([5, 8]),
        )
        requests: list[Request] = []
        for _ in range(14):
            tenant = rng.choice(["", "", "other"])
            max_tokens = rng.randint(1, 14)
            if rng.random() < 0.6:
                request = beam_request(
                    rng.randint(1, 30), rng.choice([1, 2, 3, 4]), max_tokens=max_tokens, ends=(3,), tenant=tenant
                )
            else:
                request = make_request(rng.randint(1, 40), max_tokens=max_tokens, n=rng.choice([1, 2]), tenant=tenant)
            requests.append(request)
        waiting, aborted = list(requests), set()
        while waiting or rig.scheduler.has_work:
            if waiting and rng.random() < 0.5:
                try:
                    rig.add(waiting[0])
                except BadRequestError:
                    requests.remove(waiting[0])
                waiting.pop(0)
            if rng.random() < 0.02 and rig.scheduler.requests:
                victim = rng.choice(list(rig.scheduler.requests))
                rig.abort(victim)
                aborted.add(victim)
            rig.step()
        rig.check_idle()
        assert not rig.scheduler._life.beams
        num_preemptions += sum(
            seq.num_preemptions > 0 for one in requests if one.beams for seq in one.sequences if len(one.sequences) > 1
        )
        for request in requests:
            if request.request_id not in aborted and request.beams is not None:
                check(rig, request)
    assert num_preemptions > 3


def test_beams_that_come_back_compute_what_they_share_once() -> None:
    rig = Rig(vocab_size=VOCAB, long_prefill_token_threshold=8)
    request = beam_request(40, 4, max_tokens=12)
    rig.add(request)
    for _ in range(10):
        rig.step()
    rig.scheduler._life.preempt_beams(rig.scheduler._life.beams[request.request_id], rig.history[-1])
    rig.kv.reset_prefix_cache(force=True)
    before = rig.scheduler.stats.num_prefill_tokens
    rig.step()
    assert rig.scheduler.waiting_by_reason == {"beams": 3}
    rig.run()
    check(rig, request)
    assert rig.scheduler.stats.num_prefill_tokens - before < 40 + 4 * 12


def test_a_prefix_in_the_cache_is_found_by_beams_and_theirs_by_others() -> None:
    rig = Rig(vocab_size=VOCAB)
    first = beam_request(list(range(20)), 4, max_tokens=8)
    rig.add(first)
    rig.run()
    second = beam_request(list(range(20)), 4, max_tokens=8)
    rig.add(second)
    rig.run()
    assert second.sequences[0].num_cached_tokens == 16
    assert rig.outputs(first) == rig.outputs(second)


def test_a_beam_that_fails_ends_its_search_and_nothing_else() -> None:
    rig = Rig(vocab_size=VOCAB, fault=lambda tokens: "broken" if len(tokens) == 14 and tokens[0] == 1 else None)
    broken, fine = beam_request([1] * 10, 3, max_tokens=8), beam_request([2] * 10, 3, max_tokens=8)
    rig.add(broken, fine)
    rig.run()
    rig.check_idle()
    assert [seq.finish_reason for seq in broken.sequences] == [FinishReason.ERROR] * 3
    assert [rig.updates[seq][-1].error for seq in broken.sequences] == ["broken"] * 3
    check(rig, fine)


def test_pinned_blocks_in_the_way_of_beams_that_come_back_end_them() -> None:
    rig = Rig(vocab_size=VOCAB, num_blocks=24)
    request = beam_request(20, 4, max_tokens=12)
    rig.add(request)
    for _ in range(6):
        rig.step()
    rig.scheduler._life.preempt_beams(rig.scheduler._life.beams[request.request_id], rig.history[-1])
    others = rig.kv.pool.allocate(rig.kv.num_free_blocks - 9)  # as if somebody had pinned them
    rig.checking = False
    rig.run()
    assert [seq.finish_reason for seq in request.sequences] == [FinishReason.ERROR] * 4
    assert rig.kv.num_free_blocks == rig.kv.num_blocks - len(others)


def test_more_beams_than_blocks_or_rows_are_refused() -> None:
    rig = Rig(num_blocks=20, max_num_seqs=8)
    with pytest.raises(BadRequestError, match="beam_width"):
        rig.add(beam_request(20, 9, max_tokens=2))
    with pytest.raises(BadRequestError, match="beam_width or max_tokens") as refused:
        rig.add(beam_request(20, 8, max_tokens=40))
    assert refused.value.param == "beam_width"
    rig.check_idle()


def test_a_beam_with_children_keeps_its_place() -> None:
    request = beam_request(4, 3, max_tokens=8)
    Rig().add(request)
    search = BeamSearch(request)
    candidates = [BeamCandidate(2, token, -0.1 * token, -0.1, 1) for token in (1, 2)]
    candidates += [BeamCandidate(0, 3, -0.3, -0.1, 1)] + [BeamCandidate(0, 4, -0.4, -0.1, 1)] * 3
    placed = search.rank(candidates)
    assert placed is not None
    assert [(each.parent, each.token_id) for each in placed] == [(0, 3), (2, 2), (2, 1)]
    assert search.parents == [0, 2, 2] and search.scores == [-0.3, -0.2, -0.1]
