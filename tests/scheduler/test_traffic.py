"""Requests that move between engines: real schedulers, simulated executors that check every read, torn connections."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.harness import Rig, alone, make_request
from sim_memory import SimStore

from quire.request import BeamSpec, Request
from quire.scheduler.traffic import FetchReport, SendReport

VOCAB = 50
BLOCK = 4


class Pair:
    """Two engines that can send each other blocks."""

    def __init__(self, **changes: Any) -> None:
        self.inboxes: dict[str, SimStore] = {}
        for name in ("a", "b"):
            self.inboxes[name] = SimStore("peers", peers=self.inboxes)
        self.rigs = {
            name: Rig(**({"num_blocks": 40, "vocab_size": VOCAB, "stores": (inbox,)} | changes))
            for name, inbox in self.inboxes.items()
        }

    def send(self, request: Request, to: str, num_known: int = 0) -> None:
        self.rigs["ab".replace(to, "")].scheduler.traffic.send(request, to, num_known)

    def reports(self, name: str) -> list[Any]:
        return self.rigs[name].scheduler.traffic.take_reports()

    def fetch(self, name: str, request: Request, index: int = 0) -> int:
        """Tokens of a sequence that the engine has on its device once it has fetched what was sent."""
        traffic, tokens = self.rigs[name].scheduler.traffic, request.sequences[index].token_ids
        traffic.fetch(7, tokens, request.salt, request.adapter)
        while not (reports := traffic.take_reports()):
            self.rigs[name].step()
        [report] = reports
        assert isinstance(report, FetchReport) and report.fetch_id == 7
        return report.num_tokens

    def hand_over(self, request: Request, source: str) -> Request:
        """The request leaves one engine with the tokens that came, and is added to the other."""
        continued = {seq.index: seq.output_token_ids for seq in request.sequences if seq.finish_reason is None}
        self.rigs[source].abort(request.request_id)
        following = replace(request, sequences=[], is_finished=False, continued=continued)
        self.rigs["ab".replace(source, "")].add(following)
        return following

    def check_idle(self) -> None:
        for rig in self.rigs.values():
            rig.run()
            rig.check_idle()


def sent_tokens(pair: Pair, name: str, request: Request, at_least: int) -> SendReport:
    """Steps until so many tokens have arrived, or sending has failed."""
    while True:
        for report in pair.reports(name):
            assert isinstance(report, SendReport) and report.request_id == request.request_id
            if report.has_failed or report.num_tokens >= at_least:
                return report
        pair.rigs[name].step()


@pytest.mark.parametrize("windows", [(None,), (None, 8), (12,)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_request_goes_on_elsewhere_with_its_blocks(depth: int, windows: tuple[int | None, ...]) -> None:
    pair = Pair(depth=depth, windows=windows, num_blocks=80, transfer_steps=1)
    request = make_request(30, max_tokens=40)
    pair.rigs["a"].add(request)
    while not request.sequences or request.sequences[0].num_output_tokens < 3:
        pair.rigs["a"].step()
    pair.send(request, "b")
    assert not sent_tokens(pair, "a", request, 28).has_failed
    assert pair.fetch("b", request) >= 28
    before = request.sequences[0].output_token_ids
    following = pair.hand_over(request, "a")
    pair.rigs["b"].run()
    [seq] = following.sequences
    assert before and alone(make_request(request.prompt_token_ids, max_tokens=40), VOCAB)[0] == seq.output_token_ids
    # What is computed again is less than a block, and what came while the blocks travelled.
    assert pair.rigs["b"].scheduler.stats.num_recomputed_tokens <= 4 * BLOCK
    pair.check_idle()


def test_blocks_go_out_while_later_chunks_are_computed() -> None:
    pair = Pair(max_num_batched_tokens=8)
    request = make_request(60, max_tokens=4)
    pair.rigs["a"].add(request)
    pair.send(request, "b")
    sent = []
    while not request.sequences[0].num_output_tokens:
        pair.rigs["a"].step()
        sent += [report.num_tokens for report in pair.reports("a")]
    assert sent == [*range(8, 60, 8), 60]  # each chunk with its own step
    assert pair.fetch("b", request) == 60
    moves = [move for plan in pair.rigs["a"].history for move in plan.keyed_moves]
    assert all(move.filled_group == 0 for move in moves) and sum(len(move.pairs) for move in moves) == 60 // BLOCK
    pair.check_idle()


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_what_was_cached_goes_beside_what_a_chunk_fills(windows: tuple[int | None, ...]) -> None:
    """The one was computed by earlier steps, and its turn may come after that of the other."""
    pair = Pair(max_num_batched_tokens=16, windows=windows)  # 40 blocks, of which 5 may go down or out at once
    first = make_request(40, max_tokens=2)
    pair.rigs["a"].add(first)
    pair.rigs["a"].run()
    request = make_request([*first.prompt_token_ids, *range(24)], max_tokens=30)
    pair.rigs["a"].add(request)
    pair.send(request, "b")
    planned = len(pair.rigs["a"].history)
    assert not sent_tokens(pair, "a", request, 64).has_failed
    moves = [move for plan in pair.rigs["a"].history[planned:] for move in plan.keyed_moves]
    filled = {key for move in moves if move.filled_group is not None for _, key in move.pairs}
    others = [key for move in moves if move.filled_group is None for _, key in move.pairs]
    assert len(filled) == len(windows) * 24 // BLOCK and len(others) == len(set(others)) and filled.isdisjoint(others)
    assert moves[0].filled_group is not None  # with the first chunk, before the other's turn has come
    assert pair.fetch("b", request) >= 64
    pair.check_idle()


def test_a_step_that_fails_gives_the_other_nothing() -> None:
    bad = make_request(24, max_tokens=8)
    pair = Pair(fault=lambda token_ids: "broken" if token_ids[:24] == bad.prompt_token_ids else None)
    pair.rigs["a"].add(bad)
    pair.send(bad, "b")
    pair.rigs["a"].run()
    assert bad.is_finished and not pair.inboxes["b"].blocks
    assert pair.reports("a") in ([], [SendReport(bad.request_id, 0, has_failed=True)])
    pair.check_idle()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    depth=st.sampled_from([1, 2, 3]),
    windows=st.sampled_from([(None,), (None, 8), (12,)]),
    transfer_steps=st.integers(0, 3),
)
def test_prompts_that_leave_as_they_are_computed_are_right_or_not_there(
    seed: int, depth: int, windows: tuple[int | None, ...], transfer_steps: int
) -> None:
    """One engine computes prompts, chunk by chunk and with little memory, and another goes on with some of them, while
    connections tear, requests are aborted and preempted, and steps fail. Whatever is read is what it should be."""
    rng = random.Random(seed)
    bad_token = VOCAB + 1  # whose sequence fails when its prompt is done
    pair = Pair(
        depth=depth,
        windows=windows,
        num_blocks=rng.choice((28, 60)),
        transfer_steps=transfer_steps,
        max_num_batched_tokens=rng.choice((8, 16, 40)),
        max_model_len=80,
        fault=lambda token_ids: "broken" if bad_token in token_ids[:60] else None,
    )
    source = pair.rigs["a"]
    head = [rng.randrange(VOCAB) for _ in range(17)]
    tails = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 25))] for _ in range(5)]
    requests: list[Request] = []
    moved: list[tuple[Request, list[int]]] = []
    for number in range(80):
        chance = rng.random()
        running = [one for one in requests if one.sequences and not one.is_finished]
        if chance < 0.25 and len(running) < 6:
            prompt = head[: rng.randrange(len(head))] + rng.choice(tails) + [bad_token] * (rng.random() < 0.15)
            request = make_request(prompt, max_tokens=rng.randrange(2, 15), seed=number)
            requests.append(request)
            source.add(request)
            if rng.random() < 0.8:
                pair.send(request, "b", rng.randrange(2))
        elif chance < 0.3 and running:
            source.abort(rng.choice(running).request_id)
        elif chance < 0.38:
            pair.inboxes["a"].is_torn = True
        elif chance < 0.5 and (begun := [one for one in running if one.sequences[0].num_output_tokens]):
            request = rng.choice(begun)
            pair.rigs["b"].scheduler.traffic.fetch(1, request.sequences[0].token_ids, None, None)
            moved.append((pair.hand_over(request, "a"), request.prompt_token_ids))
        else:
            pair.rigs[rng.choice("aaab")].step()
        pair.reports("a")
        pair.reports("b")
    for rig in pair.rigs.values():
        while rig.scheduler.has_work:
            rig.step()
            rig.scheduler.traffic.take_reports()
        rig.check_idle()
    for request, prompt in moved:
        expected = alone(make_request(prompt, max_tokens=request.max_tokens, seed=request.spec.seed), VOCAB)
        assert [seq.output_token_ids for seq in request.sequences] == expected


def test_what_the_other_has_is_not_sent_and_sequences_share_what_was() -> None:
    pair = Pair()
    request = make_request(32, max_tokens=12, n=3)
    pair.rigs["a"].add(request)
    pair.send(request, "b", 3)
    while len(request.sequences) < 3 or request.sequences[0].num_output_tokens < 9:
        pair.rigs["a"].step()
    moves = [move for plan in pair.rigs["a"].history for move in plan.keyed_moves]
    keys = [key for move in moves for _, key in move.pairs]
    assert len(keys) == len(set(keys)) == (32 // BLOCK - 3) + 3
    pair.check_idle()


def test_who_cannot_send_says_so() -> None:
    rig = Rig()
    request = make_request(8)
    rig.add(request)
    rig.scheduler.traffic.send(request, "b")
    assert rig.scheduler.traffic.take_reports() == [SendReport(request.request_id, 0, has_failed=True)]
    pair = Pair()
    beams = make_request(8, n=2, beams=BeamSpec())
    pair.rigs["a"].add(beams)
    pair.send(beams, "b")
    assert pair.reports("a")[0].has_failed


def test_a_target_without_room_fetches_nothing_and_the_request_stays() -> None:
    pair = Pair(num_blocks=12)
    pair.rigs["b"].add(make_request(40, max_tokens=5))
    pair.rigs["b"].step()
    request = make_request(20, max_tokens=20)
    pair.rigs["a"].add(request)
    pair.send(request, "b")
    sent_tokens(pair, "a", request, 20)
    assert pair.fetch("b", request) == 0
    pair.rigs["a"].run()
    assert pair.rigs["a"].outputs(request) == alone(make_request(request.prompt_token_ids, max_tokens=20), VOCAB)
    pair.check_idle()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), depth=st.sampled_from([1, 2]), windows=st.sampled_from([(None,), (None, 8)]))
def test_requests_move_to_and_fro_and_nothing_is_lost_repeated_or_different(
    seed: int, depth: int, windows: tuple[int | None, ...]
) -> None:
    """Connections tear, blocks come that are not what they should be, inboxes forget, and memory is short."""
    rng = random.Random(seed)
    pair = Pair(depth=depth, windows=windows, num_blocks=60, transfer_steps=rng.randrange(3), max_num_batched_tokens=24)
    where: dict[str, tuple[str, Request]] = {}
    prompts: dict[str, tuple[list[int], int, int]] = {}
    had: dict[str, dict[int, list[int]]] = {}
    head = [rng.randrange(VOCAB) for _ in range(13)]
    for i in range(rng.randrange(2, 6)):
        prompt = head[: rng.randrange(len(head))] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        request = make_request(prompt, max_tokens=rng.randrange(1, 30), n=rng.choice((1, 1, 1, 2)), seed=i)
        name = rng.choice("ab")
        pair.rigs[name].add(request)
        where[request.request_id] = name, request
        prompts[request.request_id] = prompt, request.max_tokens, request.n
    for _ in range(rng.randrange(20, 120)):
        chance = rng.random()
        request_id = rng.choice(list(where))
        name, request = where[request_id]
        other = "ab".replace(name, "")
        if chance < 0.15 and request.sequences and not request.is_finished:
            pair.send(request, other, rng.randrange(3))
        elif chance < 0.25 and request.sequences and not request.is_finished:
            seq = rng.choice(request.sequences)
            pair.rigs[other].scheduler.traffic.fetch(1, seq.token_ids, request.salt, request.adapter)
        elif chance < 0.35 and any(seq.num_output_tokens for seq in request.sequences) and not request.is_finished:
            ended = {seq.index: seq.output_token_ids for seq in request.sequences if seq.finish_reason is not None}
            had.setdefault(request_id, {}).update(ended)
            where[request_id] = other, pair.hand_over(request, name)
        elif chance < 0.4:
            pair.inboxes[name].is_torn = True
        elif chance < 0.45 and pair.inboxes[name].blocks:
            inbox, key = pair.inboxes[name], rng.choice(list(pair.inboxes[name].blocks))
            if rng.random() < 0.5:
                inbox.lost.add(key)  # a lie: found out when it is loaded
            else:
                inbox.forget([key])
        else:
            pair.rigs[rng.choice("ab")].step()
        pair.reports(name)
    for name in ("a", "b"):
        while pair.rigs[name].scheduler.has_work:
            pair.rigs[name].step()
            pair.reports(name)
    for number, (request_id, (_, request)) in enumerate(where.items()):
        prompt, max_tokens, n = prompts[request_id]
        expected = alone(make_request(prompt, max_tokens=max_tokens, n=n, seed=number), VOCAB)
        found = had.get(request_id, {}) | {seq.index: seq.output_token_ids for seq in request.sequences}
        assert [found[index] for index in range(n)] == expected
    for rig in pair.rigs.values():
        rig.check_idle()


def test_who_asks_again_is_told_again_and_nothing_is_sent_twice() -> None:
    """As where a request comes with the order to send it, before anybody listens to how far its blocks have come."""
    pair = Pair()
    request = make_request(30, max_tokens=20)
    pair.rigs["a"].add(request)
    pair.send(request, "b")
    for _ in range(3):
        pair.rigs["a"].step()
    assert pair.reports("a")[-1].num_tokens == 28
    pair.send(request, "b")
    assert sent_tokens(pair, "a", request, 28).num_tokens >= 28
    keys = [key for plan in pair.rigs["a"].history for move in plan.keyed_moves for _, key in move.pairs]
    assert len(keys) == len(set(keys))
    pair.check_idle()


def test_another_request_with_the_id_of_one_that_ended_is_sent_too() -> None:
    pair = Pair()
    for _ in range(2):
        request = make_request(30, max_tokens=5, request_id="same")
        pair.rigs["a"].add(request)
        pair.send(request, "b")
        assert sent_tokens(pair, "a", request, 28).num_tokens == 28
        pair.rigs["a"].abort("same")
    pair.check_idle()
