"""Verified drafts against plain sampling: the same distribution, whatever is drafted and whatever was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.params import SamplingSpec
from quire.sampling import Sampler, verify_drafts

VOCAB, NUM_DRAWS, ROWS = 12, 20_000, 500  # two draws a row
PROMPT = [3, 4, 5, 3]

SPECS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "logit bias": {"logit_bias": {2: 1.5, 7: -2.0}},
    "bad words": {"bad_words": ((6,), (8, 9))},
}


def logits_after(tokens: np.ndarray) -> torch.Tensor:
    """A model of which a token's logits depend on the one before it. tokens: [rows] -> [rows, vocab]."""
    table = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(1))
    return table[torch.from_numpy(tokens)].contiguous()


def sampler_of(spec: dict[str, Any], seed: int) -> Sampler:
    sampler = Sampler(num_rows=ROWS, vocab_size=VOCAB, device=torch.device("cpu"), max_model_len=32)
    for row in range(ROWS):
        sampler.admit(row, SamplingSpec(seed=seed * ROWS + row, **spec), PROMPT, len(PROMPT))
    return sampler


def drawn(spec: dict[str, Any], *, has_drafts: bool) -> np.ndarray:
    """How often each pair of first tokens came. [vocab, vocab]; with drafts, half of them likely and half not."""
    counts = np.zeros((VOCAB, VOCAB))
    rng = np.random.default_rng(0)
    rows, last = list(range(ROWS)), np.full(ROWS, PROMPT[-1])
    for seed in range(NUM_DRAWS // (2 * ROWS)):
        sampler = sampler_of(spec, seed + (10_000 if has_drafts else 0))
        if has_drafts:
            guesses = np.where(
                rng.random(ROWS) < 0.5, logits_after(last).argmax(1).numpy(), rng.integers(VOCAB, size=ROWS)
            )
            logits = torch.stack([logits_after(last), logits_after(guesses)], dim=1).flatten(0, 1).contiguous()
            verified = verify_drafts(sampler, logits, rows, [len(PROMPT)] * ROWS, [[int(guess)] for guess in guesses])
            lines, _, _ = verified.to_lists()
            # Those that were not accepted take their second token in a step of their own.
            late = [row for row, line in enumerate(lines) if len(line) == 1]
            first = np.array([line[0] for line in lines])
            second = sampler.sample(logits_after(first[late]), late, [len(PROMPT) + 1] * len(late)).token_ids.numpy()
            for row, token in zip(late, second.tolist(), strict=True):
                lines[row].append(token)
            assert 0 < len(late) < ROWS
        else:
            first = sampler.sample(logits_after(last), rows, [len(PROMPT)] * ROWS).token_ids.numpy()
            second = sampler.sample(logits_after(first), rows, [len(PROMPT) + 1] * ROWS).token_ids.numpy()
            lines = np.stack([first, second], axis=1).tolist()
        for a, b in lines:
            counts[a, b] += 1
    return counts


@pytest.mark.parametrize("kind", SPECS)
def test_twenty_thousand_draws_have_the_distribution_of_plain_sampling(kind: str) -> None:
    plain, drafted = drawn(SPECS[kind], has_drafts=False), drawn(SPECS[kind], has_drafts=True)
    assert plain.sum() == drafted.sum() == NUM_DRAWS / 2
    # Pairs that hardly ever come are one class, so that the test's assumption holds.
    common = plain + drafted >= 20
    a, b = ([*counts[common], counts[~common].sum()] for counts in (plain, drafted))
    used = [(x, y) for x, y in zip(a, b, strict=True) if x + y]
    statistic = sum((x - y) ** 2 / (x + y) for x, y in used)
    freedom = len(used) - 1
    # Wilson and Hilferty: the cube root is nearly normal. 4 deviations are one case in 30,000, and the seeds are fixed.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert freedom > 15 and abs(deviation) < 4
    assert ((plain == 0) == (drafted == 0))[common].all()


def test_a_wrong_distribution_would_be_seen() -> None:
    plain, other = drawn(SPECS["temperature"], has_drafts=False), drawn({"temperature": 1.0}, has_drafts=True)
    common = plain + other >= 20
    statistic = ((plain - other) ** 2 / (plain + other).clip(1))[common].sum()
    assert statistic > 2 * common.sum()


@pytest.mark.parametrize("kind", SPECS)
def test_with_the_same_seed_the_tokens_are_the_same(kind: str) -> None:
    rows, last = list(range(ROWS)), np.full(ROWS, PROMPT[-1])
    plain, drafted = sampler_of(SPECS[kind], 3), sampler_of(SPECS[kind], 3)
    first = plain.sample(logits_after(last), rows, [len(PROMPT)] * ROWS).token_ids.numpy()
    second = plain.sample(logits_after(first), rows, [len(PROMPT) + 1] * ROWS).token_ids.numpy()
    guesses = np.where(np.arange(ROWS) % 2, first, (first + 1) % VOCAB)
    logits = torch.stack([logits_after(last), logits_after(guesses)], dim=1).flatten(0, 1).contiguous()
    lines, _, failed = verify_drafts(drafted, logits, rows, [4] * ROWS, [[int(g)] for g in guesses]).to_lists()
    assert not failed
    expected = [[a, b] if i % 2 else [a] for i, (a, b) in enumerate(zip(first.tolist(), second.tolist(), strict=True))]
    assert lines == expected
