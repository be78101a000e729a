"""Filtered draws equal those of the plain Python sampler, wherever no rounding can decide."""

from __future__ import annotations

import itertools
import math
from array import array

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels.triton.sampling_filter import sample_rows
from quire.params import SamplingSpec
from quire.sampling import Sampler, noise, reference

OFF = 2.0


def params_of(specs, vocab_size, device):
    rows = [(s.temperature, s.min_p, s.top_p if s.top_p < 1 else OFF, s.top_k or vocab_size) for s in specs]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def keys_of(specs, position, device):
    words = np.stack([noise.sequence_words(s.seed, s.index) for s in specs])
    return torch.from_numpy(noise.step_keys(words, np.full(len(specs), position))).to(device)


def sample_all(logits, specs, position, *, chunk=512, filters=True):
    vocab_size = logits.shape[1]
    keys = keys_of(specs, position, logits.device)
    params = params_of(specs, vocab_size, logits.device)
    tokens, codes = sample_rows(logits, params, keys, filters=filters, chunk=chunk)
    assert ((tokens >= 0) & (tokens < vocab_size)).all()
    assert torch.equal(tokens[codes >= 0], codes[codes >= 0])
    return codes.tolist()


def is_clear(line, spec, position, slack=1e-5):
    """Whether rounding cannot change the draw: the kept tokens and the winner stay when parameters move a little."""
    if spec.temperature == 0:
        return True
    nearby = [SamplingSpec(temperature=spec.temperature, top_k=spec.top_k,
                           top_p=min(spec.top_p * (1 + sign * slack), 1.0) if spec.top_p < 1 else 1.0,
                           min_p=min(spec.min_p * (1 + other * slack), 1.0))
              for sign, other in itertools.product((-1, 1), (-1, 1))]  # fmt: skip
    kept = reference.distribution(line, spec)
    if any(set(reference.distribution(line, s)) != set(kept) for s in nearby):
        return False
    scores = sorted((math.log(p) + reference.gumbel(spec.seed, spec.index, position, t) for t, p in kept.items()))
    return len(scores) < 2 or scores[-1] - scores[-2] > slack


def check(logits, specs, position, **options):
    """Returns how many rows were clear, so that a test can demand some."""
    drawn = sample_all(logits, specs, position, **options)
    num_clear = 0
    for row, spec in enumerate(specs):
        line = logits[row].tolist()
        if is_clear(line, spec, position):
            num_clear += 1
            assert drawn[row] == reference.sample(line, spec, [0] * position, 0), (row, spec)
        else:
            assert drawn[row] in reference.distribution(line, SamplingSpec(temperature=max(spec.temperature, 1e-30)))
    return num_clear


FILTERS = {
    "greedy": {"temperature": 0.0, "top_p": 0.5},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "top_p and temperature": {"temperature": 0.8, "top_p": 0.95},
    "small top_p": {"top_p": 0.2},
    "tiny top_p": {"top_p": 1e-9},
    "top_p near 1": {"top_p": 0.9995},
    "top_p just below 1": {"top_p": 1 - 1e-7},
    "top_k of the vocabulary": {"top_k": 1025},
    "top_k 1": {"top_k": 1},
    "top_k 2": {"top_k": 2},
    "top_k 50": {"top_k": 50},
    "large top_k": {"top_k": 700},
    "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "min_p and top_p": {"temperature": 2.0, "top_p": 0.6, "min_p": 0.1},
    "min_p and top_k": {"top_k": 7, "min_p": 0.02},
    "top_k and top_p": {"top_k": 40, "top_p": 0.9},
    "large top_k and top_p": {"top_k": 600, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    "tiny temperature": {"temperature": 1e-30, "top_p": 0.9},
    "low temperature": {"temperature": 0.05, "top_k": 20, "top_p": 0.9},
    "high temperature": {"temperature": 50.0, "top_p": 0.9},
}


def specs_of_all_kinds():
    return [SamplingSpec(seed=31 * i, index=i % 3, **fields) for i, fields in enumerate(FILTERS.values())]


def make_logits(kind, rows, vocab_size):
    logits = torch.randn(rows, vocab_size)
    if kind == "peaked":
        logits = logits * 2 + torch.where(torch.rand(rows, vocab_size) < 20 / vocab_size, 12.0, 0.0)
    elif kind == "flat":
        logits *= 0.3
    elif kind == "coarse":  # many equal logits, as bfloat16 gives them
        logits = (logits * 4).round() / 2
    elif kind == "equal":
        logits.fill_(-0.0)
    elif kind == "banned":
        logits[:, torch.randperm(vocab_size)[: vocab_size * 9 // 10]] = -torch.inf
        logits[:, vocab_size // 2] = 1.0
    elif kind == "far apart":
        logits = logits.sign() * torch.exp(logits.clamp(-4, 4) * 20)
    return logits


@pytest.mark.parametrize(
    ("number", "kind"), list(enumerate(["normal", "peaked", "flat", "coarse", "equal", "banned", "far apart"]))
)
def test_rows_of_many_kinds_in_one_batch(number, kind, device):
    specs = specs_of_all_kinds()[number % 2 :: 2]
    logits = make_logits(kind, len(specs), 1025).to(device)
    assert check(logits, specs, 3) > len(specs) // 2


@pytest.mark.parametrize("vocab_size", [1, 2, 130])
def test_small_vocabularies(vocab_size, device):
    specs = [spec for spec in specs_of_all_kinds()[::2] if spec.top_k < vocab_size]
    check(torch.randn(len(specs), vocab_size, device=device), specs, 5, chunk=128)


@pytest.mark.parametrize(("kind", "first"), [("normal", 0), ("peaked", 1)])
def test_tokens_do_not_depend_on_the_chunks(kind, first, device):
    specs = specs_of_all_kinds()[first::2]
    logits = make_logits(kind, len(specs), 1100).to(device)
    assert sample_all(logits, specs, 9, chunk=256) == sample_all(logits, specs, 9, chunk=2048)


def test_tokens_do_not_depend_on_the_batch(device):
    specs = specs_of_all_kinds()[::2]
    logits = make_logits("normal", len(specs), 900).to(device)
    together = sample_all(logits, specs, 2)
    assert [sample_all(logits[i : i + 1], [spec], 2)[0] for i, spec in enumerate(specs)] == together


def test_equal_tokens_are_split_by_id(device):
    num = 12
    specs = [SamplingSpec(seed=i, top_p=0.95) for i in range(num)] + [SamplingSpec(seed=i, top_k=3) for i in range(num)]
    drawn = sample_all(torch.zeros(2 * num, 20, device=device), specs, 0, chunk=128)
    assert set(drawn[:num]) <= set(range(19)) and len(set(drawn[:num])) > 5
    assert set(drawn[num:]) == {0, 1, 2}
    wide = sample_all(torch.zeros(num, 700, device=device), specs[num:], 0, chunk=1024)  # more equal tokens than slots
    assert set(wide) == {0, 1, 2}


def test_candidates_that_stand_together_fit(device):
    logits = torch.randn(4, 4096, device=device) - 30
    logits[:, 256:300] += 30
    specs = [SamplingSpec(seed=i, top_p=0.9, top_k=i * 10) for i in range(4)]
    assert check(logits, specs, 1, chunk=512) > 0


def test_failures_are_told_apart_and_leave_other_rows_alone(device):
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}]
    specs = [SamplingSpec(seed=i, **kinds[i % 4]) for i in range(20)]
    logits = torch.randn(20, 700, device=device)
    expected = sample_all(logits, specs, 0)
    for first, bad, code in ((4, math.nan, -1), (8, math.inf, -1)):
        logits[range(first, first + 4), [0, 130, 500, 699]] = bad
        expected[first : first + 4] = [code] * 4
    logits[12:16] = -torch.inf
    expected[12:16] = [-2] * 4
    assert sample_all(logits, specs, 0) == expected
    unfiltered = [i for i in range(20) if i % 4 < 2]
    some = sample_all(logits[unfiltered], [specs[i] for i in unfiltered], 0, filters=False)
    assert some == [expected[i] for i in unfiltered]


SPECS = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.0, 0.1, 0.8, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.25, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 2, 10, 30, 300]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 3),
)


@settings(derandomize=True, max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    vocab_size=st.sampled_from([301, 640, 1500]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 9.0]),
    position=st.integers(0, 1000),
    is_coarse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_mix_draws_what_the_oracle_draws(specs, vocab_size, spread, position, is_coarse, seed, device):
    logits = torch.randn(len(specs), vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    if is_coarse:
        logits = (logits * 2).round() / 2
    logits[:, seed % vocab_size] += 1.0
    check(logits.to(device), specs, position)


def test_the_sampler_draws_the_same_with_the_kernels(device):
    fields = [*FILTERS.values(), {"repetition_penalty": 2.0, "top_p": 0.9}, {"logit_bias": {5: 9.0}, "logprobs": 2}]
    specs = [SamplingSpec(seed=i, **chosen) for i, chosen in enumerate(fields)]
    specs.append(SamplingSpec(allowed_token_ids=array("i", (4,)), bad_words=((4,),), top_k=3))
    options = {"num_rows": len(specs), "vocab_size": 500, "max_model_len": 99}
    samplers = [
        Sampler(device=device, kernel=sample_rows, **options),
        Sampler(device=torch.device("cpu"), **options),
    ]
    logits = make_logits("normal", len(specs), 500) * 2
    logits[1, 77] = math.nan
    lists = []
    for sampler, where in zip(samplers, (device, torch.device("cpu")), strict=True):
        for row, spec in enumerate(specs):
            sampler.admit(row, spec, [1, 2, 3], 3)
        lists.append(sampler.sample(logits.to(where), range(len(specs)), [3] * len(specs)).to_lists())
    (tokens, logprobs, failed), (expected, expected_logprobs, expected_failed) = lists
    assert failed == expected_failed and set(failed) == {1, len(specs) - 1}
    assert logprobs.keys() == expected_logprobs.keys()
    for row, spec in enumerate(specs[: len(FILTERS)]):
        if row not in failed and is_clear(logits[row].tolist(), spec, 3):
            assert tokens[row] == expected[row], spec
