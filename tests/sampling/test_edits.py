from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.params import SamplingSpec
from quire.sampling import edits as module
from quire.sampling import reference
from quire.sampling.edits import LogitEdits

VOCAB = 40
NUM_ROWS = 6


def new_edits() -> LogitEdits:
    return LogitEdits(num_rows=NUM_ROWS, vocab_size=VOCAB, device=torch.device("cpu"))


def random_logits(num_rows: int) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0))


def check(edits: LogitEdits, rows: dict[int, tuple[SamplingSpec, list[int], int]]) -> None:
    """Each row's (spec, history, number of prompt tokens) gives what the oracle gives."""
    logits = random_logits(len(rows))
    expected = [
        reference.edited_logits(line.tolist(), *state) for line, state in zip(logits, rows.values(), strict=True)
    ]
    bans = [len(history) - num_prompt < spec.min_tokens for spec, history, num_prompt in rows.values()]
    batch = edits.batch(list(rows), bans)
    if batch is not None:
        batch.apply(logits)
    torch.testing.assert_close(logits, torch.tensor(expected))


SPECS = {
    "bias": SamplingSpec(logit_bias={3: 5.0, 39: -100.0}),
    "allowed": SamplingSpec(allowed_token_ids=array("i", (1, 2, 39, 2))),
    "bad word of one token": SamplingSpec(bad_words=((7,), (0,))),
    "bad words": SamplingSpec(bad_words=((7, 8), (5, 7, 9), (6, 7, 9), (9, 9, 9, 9, 9, 30), (7, 30))),
    "min tokens": SamplingSpec(min_tokens=3, end_token_ids=(2, 11)),
    "min tokens reached": SamplingSpec(min_tokens=2, end_token_ids=(2, 11)),
    "all": SamplingSpec(
        logit_bias={7: 2.0, 8: 1.0},
        allowed_token_ids=array("i", range(5, 20)),
        bad_words=((7, 8), (10,)),
        min_tokens=9,
        end_token_ids=(11, 8),
    ),
    "nothing": SamplingSpec(temperature=0.5, top_k=3),
}


@pytest.mark.parametrize("name", SPECS)
def test_each_edit_is_the_oracles(name: str) -> None:
    edits = new_edits()
    history = [1, 5, 7]
    edits.add(2, SPECS[name], history)
    check(edits, {2: (SPECS[name], history, 1)})


def test_rows_do_not_touch_each_other() -> None:
    edits = new_edits()
    states = {row: (spec, [1, 5, 7], 1) for row, spec in zip(range(NUM_ROWS), SPECS.values(), strict=False)}
    for row, (spec, history, _) in states.items():
        edits.add(row, spec, history)
    check(edits, dict(reversed(states.items())))


def test_bad_words_follow_sampled_tokens() -> None:
    edits = new_edits()
    words = SamplingSpec(bad_words=((4, 5, 6), (6, 7)))
    edits.add(0, words, [4])
    edits.add(3, words, [1, 2, 3, 4, 5])
    histories = {3: [1, 2, 3, 4, 5], 0: [4]}
    for sampled in ([9, 5], [4, 6], [5, 4]):
        check(edits, {row: (words, history, 1) for row, history in histories.items()})
        batch = edits.batch([3, 0], [False, False])
        assert batch is not None
        batch.follow(torch.tensor(sampled))
        for token, history in zip(sampled, histories.values(), strict=True):
            history.append(token)
    check(edits, {row: (words, history, 1) for row, history in histories.items()})


def test_a_longer_bad_word_keeps_the_others_histories() -> None:
    edits = new_edits()
    short, long = SamplingSpec(bad_words=((7, 8),)), SamplingSpec(bad_words=((1, 2, 3, 4, 5),))
    edits.add(0, short, [6, 7])
    edits.add(1, long, [1, 2, 3, 4])
    check(edits, {0: (short, [6, 7], 1), 1: (long, [1, 2, 3, 4], 1)})


def test_a_prefix_longer_than_the_history_does_not_match() -> None:
    edits = new_edits()
    spec = SamplingSpec(bad_words=((1, 1, 1, 2),))
    edits.add(0, spec, [1, 1])
    check(edits, {0: (spec, [1, 1], 1)})


def test_fork_has_the_sources_history() -> None:
    edits = new_edits()
    spec = SamplingSpec(bad_words=((5, 6),), logit_bias={1: 1.0})
    edits.add(0, spec, [5])
    edits.fork(0, 4, spec)
    batch = edits.batch([4], [False])
    assert batch is not None
    batch.follow(torch.tensor([9]))
    check(edits, {0: (spec, [5], 1), 4: (spec, [5, 9], 1)})


def test_released_rows_have_no_edits() -> None:
    edits = new_edits()
    edits.add(0, SPECS["all"], [1])
    edits.release(0)
    assert edits.batch([0], [True]) is None


def test_state_is_allocated_for_bad_words_of_several_tokens_only() -> None:
    edits = new_edits()
    edits.add(0, SPECS["bias"], [1])
    assert edits.num_bytes == 0
    edits.add(1, SPECS["bad words"], [1])
    assert edits.num_bytes == NUM_ROWS * 5 * 4


def test_a_long_bad_word_costs_the_others_nothing_and_is_given_back() -> None:
    edits = new_edits()
    short, long = SamplingSpec(bad_words=((7, 8),)), SamplingSpec(bad_words=(tuple(range(30)) * 10, (7, 9)))
    edits.add(0, short, [6, 7])
    alone = edits.num_bytes
    edits.add(1, long, [6, 7])
    batch = edits.batch([0, 1], [False, False])
    assert batch is not None and batch.phrases is not None
    assert len(batch.phrases.table.before) == 1 + 299 + 1  # what the words have, not words times the longest
    edits.release(1)
    assert edits.num_bytes == alone
    check(edits, {0: (short, [6, 7], 1)})
    edits.release(0)
    assert edits.num_bytes == 0


def test_words_stay_on_the_device_while_the_rows_that_have_them_stay() -> None:
    edits = new_edits()
    words = SamplingSpec(bad_words=((7, 8), (6, 7, 9)))
    edits.add(0, words, [6, 7])
    edits.add(2, words, [7])
    first = edits.batch([0, 2], [False, False])
    edits.add(1, SPECS["bias"], [1])
    moved = edits.batch([1, 0, 2], [False, False, False])  # another row came: theirs stand elsewhere in the batch
    assert first is not None and first.phrases is not None and moved is not None and moved.phrases is not None
    assert moved.phrases.table is first.phrases.table
    check(edits, {1: (SPECS["bias"], [1], 1), 0: (words, [6, 7], 1), 2: (words, [7], 1)})
    edits.release(2)
    edits.add(2, SamplingSpec(bad_words=((7, 5),)), [7])
    check(edits, {0: (words, [6, 7], 1), 2: (SamplingSpec(bad_words=((7, 5),)), [7], 1)})


def test_many_allowed_tokens_are_one_line_that_forks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY_ALLOWED", 3)
    edits = new_edits()
    spec = SamplingSpec(allowed_token_ids=array("i", (1, 2, 39, 2, 5)), logit_bias={5: 2.0})
    edits.add(0, spec, [1])
    edits.fork(0, 3, replace(spec, index=1))
    assert edits.num_bytes == VOCAB * 4
    edits.add(1, SPECS["allowed"], [1])
    check(edits, {3: (spec, [1], 1), 1: (SPECS["allowed"], [1], 1), 0: (spec, [1], 1)})
    edits.release(0)
    edits.release(3)
    assert edits.num_bytes == 0


def test_nan_is_not_hidden_by_a_ban() -> None:
    edits = new_edits()
    edits.add(0, SPECS["bad word of one token"], [1])
    logits = random_logits(1)
    logits[0, 7] = math.nan
    batch = edits.batch([0], [False])
    assert batch is not None
    batch.apply(logits)
    assert logits[0, 7].isnan()


def test_bans_of_tokens_without_a_logit_are_dropped() -> None:
    edits = new_edits()
    edits.add(0, SamplingSpec(bad_words=((VOCAB,), (1, VOCAB)), min_tokens=5, end_token_ids=(VOCAB + 1,)), [1])
    assert edits.batch([0], [True]) is None
