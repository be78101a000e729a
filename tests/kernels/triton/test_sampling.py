from __future__ import annotations

import numpy as np
import torch

from quire.kernels.triton.log_totals import row_log_totals
from quire.kernels.triton.sampling import sample
from quire.sampling import noise
from quire.sampling.scratch import Scratch


def make_keys(rows, position, device):
    words = np.stack([noise.sequence_words(7919 * i + 3, i) for i in range(rows)])
    return torch.from_numpy(noise.step_keys(words, np.full(rows, position))).to(device)


def test_greedy_takes_the_largest_and_of_equals_the_first(device):
    logits = torch.randn(4, 3001, device=device)
    logits[1, [5, 700, 2999]] = 50.0
    assert sample(logits, chunk=512).tolist() == [int(logits[0].argmax()), 5, *logits[2:].argmax(1).tolist()]


def test_draws_follow_the_noise_specification(device):
    rows, vocab_size = 4, 2500
    temperature = torch.tensor([0.7, 1.0, 1.4, 0.0], device=device)
    words = noise.token_words(vocab_size, device)
    for position in range(12):
        logits = torch.randn(rows, vocab_size, device=device) * 3
        keys = make_keys(rows, position, device)
        gumbel = -noise.exponentials(keys, words[None], Scratch(device)).double().log()
        race = logits.double() / temperature.clamp_min(1e-9)[:, None] + gumbel
        assert sample(logits, keys, temperature, chunk=512).tolist() == race.argmax(1).tolist()


def test_a_tiny_temperature_is_greedy_and_banned_tokens_never_win(device):
    logits = torch.randn(3, 2000, device=device)
    logits[:, 600:1500] = -torch.inf  # a whole chunk of it
    keys = make_keys(3, 9, device)
    tiny = torch.full((3,), 1e-38, device=device)
    assert torch.equal(sample(logits, keys, tiny, chunk=512), logits.argmax(1))
    only = torch.full((1, 2000), -torch.inf, device=device)
    only[0, 1234] = -3.0
    assert sample(only, keys[:1], torch.ones(1, device=device), chunk=512).tolist() == [1234]


def test_log_totals_do_not_depend_on_the_batch(device):
    logits = torch.randn(40, 5003, device=device) * 8
    logits[1, 7:] = -torch.inf
    totals = row_log_totals(logits)
    torch.testing.assert_close(totals, torch.logsumexp(logits.double(), 1, keepdim=True).float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(row_log_totals(logits[3:5]), totals[3:5])
