from __future__ import annotations

import pytest
import torch

from quire.params import SamplingSpec
from quire.sampling import reference
from quire.sampling.penalties import Penalties, has_penalties
from quire.sampling.scratch import Scratch

VOCAB = 60
SCRATCH = Scratch(torch.device("cpu"))


def new_penalties(num_rows: int = 8, max_model_len: int = 100) -> Penalties:
    return Penalties(num_rows=num_rows, vocab_size=VOCAB, device=torch.device("cpu"), max_model_len=max_model_len)


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


SPECS = [
    SamplingSpec(presence_penalty=0.7),
    SamplingSpec(frequency_penalty=-1.3),
    SamplingSpec(repetition_penalty=1.4),
    SamplingSpec(repetition_penalty=0.6, presence_penalty=-0.5, frequency_penalty=0.25),
]
HISTORY = [3, 3, 4, 5, 9, 3, 4, 4, 4, 20]


def test_penalties_are_the_oracles() -> None:
    penalties = new_penalties()
    for row, spec in enumerate(SPECS):
        penalties.add(row, spec, HISTORY, 4)
    logits = random_logits(4)
    logits[:, 4] = -torch.inf
    expected = [reference.edited_logits(x.tolist(), spec, HISTORY, 4) for x, spec in zip(logits, SPECS, strict=True)]
    batch = penalties.batch([0, 1, 2, 3])
    assert batch is not None
    batch.apply(logits, SCRATCH)
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-5, rtol=1e-6)


def test_only_penalised_rows_change_and_sampled_tokens_count() -> None:
    penalties = new_penalties()
    penalties.add(6, SPECS[3], HISTORY[:4], 4)
    history = HISTORY[:4]
    for step, token in enumerate([7, 7, 3, 59]):
        logits = random_logits(3)
        before = logits.clone()
        batch = penalties.batch([2, 6, 0])
        assert batch is not None
        batch.apply(logits, SCRATCH)
        assert torch.equal(logits[[0, 2]], before[[0, 2]])
        expected = reference.edited_logits(before[1].tolist(), SPECS[3], history, 4)
        assert logits[1].tolist() == pytest.approx(expected, abs=1e-5), step
        batch.follow(torch.tensor([1, token, 2]))
        history.append(token)


def test_a_batch_without_penalties_needs_nothing() -> None:
    penalties = new_penalties()
    penalties.add(0, SPECS[0], HISTORY, 4)
    assert penalties.batch([1, 2]) is None


def test_lines_are_allocated_when_first_used_and_reused() -> None:
    penalties = new_penalties()
    assert penalties.num_bytes == 0
    penalties.add(0, SPECS[0], HISTORY, 4)
    first = penalties.num_bytes
    assert 0 < first < penalties.max_num_bytes
    for row in range(1, 8):
        penalties.add(row, SPECS[0], HISTORY, 4)
    assert penalties.num_bytes == penalties.max_num_bytes == 8 * VOCAB * 2
    penalties.release(3)
    penalties.add(3, SPECS[0], [], 0)
    assert penalties.num_bytes == penalties.max_num_bytes
    logits = random_logits(1)
    batch = penalties.batch([3])
    assert batch is not None
    batch.apply(logits, SCRATCH)
    assert torch.equal(logits, random_logits(1))  # nothing of the row's last user is left


def test_growing_keeps_the_counts() -> None:
    penalties = new_penalties()
    penalties.add(0, SPECS[3], HISTORY, 4)
    for row in range(1, 8):
        penalties.add(row, SPECS[0], [1], 1)
    logits = random_logits(1)
    expected = reference.edited_logits(logits[0].tolist(), SPECS[3], HISTORY, 4)
    batch = penalties.batch([0])
    assert batch is not None
    batch.apply(logits, SCRATCH)
    assert logits[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_fork_copies_the_history_and_goes_its_own_way() -> None:
    penalties = new_penalties()
    penalties.add(0, SPECS[3], HISTORY, 4)
    penalties.fork(0, 5, SPECS[3])
    logits = random_logits(2)
    batch = penalties.batch([0, 5])
    assert batch is not None
    batch.follow(torch.tensor([11, 12]))
    expected = [reference.edited_logits(logits[i].tolist(), SPECS[3], [*HISTORY, 11 + i], 4) for i in range(2)]
    batch.apply(logits, SCRATCH)
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(("max_model_len", "dtype"), [(16_383, torch.int16), (16_384, torch.int32)])
def test_counts_hold_the_longest_history(max_model_len: int, dtype: torch.dtype) -> None:
    penalties = new_penalties(num_rows=1, max_model_len=max_model_len)
    spec = SamplingSpec(frequency_penalty=1.0)
    penalties.add(0, spec, [8] * max_model_len, 0)
    batch = penalties.batch([0])
    assert batch is not None and batch.counts.dtype is dtype
    logits = torch.zeros(1, VOCAB)
    batch.apply(logits, Scratch(torch.device("cpu")))
    assert logits[0, 8] == -max_model_len


def test_prompt_tokens_without_a_logit_are_no_harm() -> None:
    penalties = new_penalties()
    penalties.add(0, SPECS[2], [VOCAB + 5, 3], 2)
    batch = penalties.batch([0])
    assert batch is not None
    logits = torch.ones(1, VOCAB)
    batch.apply(logits, SCRATCH)
    assert logits[0, 3] == pytest.approx(1 / 1.4) and (logits[0] == 1).sum() == VOCAB - 1


def test_which_specs_have_penalties() -> None:
    assert not has_penalties(SamplingSpec())
    assert all(has_penalties(spec) for spec in SPECS)
