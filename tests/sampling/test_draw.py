"""Draws follow the exact distributions, and every method draws what the oracle draws."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.params import SamplingSpec
from quire.sampling import reference
from quire.sampling.draw import NO_TOP_P, DrawParams, Method, Workspace, choose_method, draw
from quire.sampling.noise import sequence_words, step_keys
from quire.sampling.select import max_top_k, row_max

CPU = torch.device("cpu")


def params_of(specs: list[SamplingSpec], vocab_size: int) -> DrawParams:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[:, None]

    return DrawParams(
        temperature=column([s.temperature for s in specs], torch.float32),
        min_p=column([s.min_p for s in specs], torch.float32),
        top_p=column([s.top_p if s.top_p < 1 else NO_TOP_P for s in specs], torch.float64),
        top_k=column([s.top_k or vocab_size for s in specs], torch.int64),
        any_min_p=any(s.min_p for s in specs),
        any_top_p=any(s.top_p < 1 for s in specs),
        max_top_k=max(s.top_k for s in specs),
    )


def draw_all(method: Method, logits: Tensor, specs: list[SamplingSpec], positions: list[int]) -> list[int]:
    words = np.stack([sequence_words(s.seed, s.index) for s in specs])
    keys = torch.from_numpy(step_keys(words, np.array(positions)))
    largest = row_max(logits)[0][:, None]
    vocab_size = logits.shape[1]
    return draw(method, logits, largest, keys, params_of(specs, vocab_size), Workspace(vocab_size, CPU)).tolist()


def methods_for(spec: SamplingSpec, vocab_size: int) -> list[Method]:
    methods = [Method.SORTED]
    if not spec.top_k:
        methods.append(Method.DENSE)
        if not spec.min_p and spec.top_p >= 1:
            methods.append(Method.PLAIN)
        if spec.top_p < 1 and max_top_k(vocab_size) >= 64:
            methods.append(Method.NUCLEUS)
    elif spec.top_k <= max_top_k(vocab_size):
        methods.append(Method.TOP_K)
    return methods


def chi_square_bound(degrees: int) -> float:
    """Exceeded by chance once in about 30,000 (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.0 * math.sqrt(2 / (9 * degrees))) ** 3


FILTERS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 3": {"temperature": 3.0},
    "top_k 5": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_p 0.7": {"top_p": 0.7},
    "top_p 0.1": {"top_p": 0.1},
    "top_p tiny": {"top_p": 1e-9},
    "min_p 0.2": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "all": {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    "min_p and top_p": {"temperature": 2.0, "top_p": 0.6, "min_p": 0.1},
}


@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_match_exact_probabilities(name: str) -> None:
    num_draws, vocab_size = 6_000, 24
    line = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5)) * 1.5
    line[7] = line[3]  # equal logits
    # Half of the draws vary the seed, half the position.
    specs = [SamplingSpec(seed=99 + max(0, i - num_draws // 2), **FILTERS[name]) for i in range(num_draws)]
    positions = [min(i, num_draws // 2) for i in range(num_draws)]
    exact = reference.distribution(line.tolist(), specs[0])
    for method in methods_for(specs[0], vocab_size):
        counts = Counter(draw_all(method, line.expand(num_draws, -1).contiguous(), specs, positions))
        assert set(counts) <= set(exact)
        likely = [token for token, p in exact.items() if p * num_draws >= 5]
        statistic = sum((counts[t] - num_draws * exact[t]) ** 2 / (num_draws * exact[t]) for t in likely)
        if len(likely) > 1:
            assert statistic < chi_square_bound(len(likely) - 1), method
        else:
            assert counts[likely[0]] > num_draws * 0.99


SPECS = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.1, 0.8, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.25, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 2, 10, 30]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 3),
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=5),
    vocab_size=st.sampled_from([2, 40, 700, 8192, 8300]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 9.0]),
    position=st.integers(0, 100_000),
    is_coarse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_method_draws_what_the_oracle_draws(
    specs: list[SamplingSpec], vocab_size: int, spread: float, position: int, is_coarse: bool, seed: int
) -> None:
    logits = torch.randn(len(specs), vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    if is_coarse:  # many equal logits, as bfloat16 gives them
        logits = (logits * 2).round() / 2
    logits[:, seed % vocab_size] += 1.0
    for row, spec in enumerate(specs):
        expected = reference.sample(logits[row].tolist(), spec, [0] * position, 0)
        for method in methods_for(spec, vocab_size):
            assert draw_all(method, logits[row : row + 1].clone(), [spec], [position]) == [expected], method
    # And all rows at once, by a method that takes every spec.
    together = draw_all(Method.SORTED, logits.clone(), specs, [position] * len(specs))
    alone = [draw_all(Method.SORTED, logits[i : i + 1], [spec], [position])[0] for i, spec in enumerate(specs)]
    assert together == alone


def test_top_p_splits_equal_tokens_by_id() -> None:
    # Of twenty equal tokens, the smallest set whose mass reaches 0.95 has nineteen: all but the last.
    spec = SamplingSpec(top_p=0.95)
    logits = torch.zeros(4000, 20)
    specs = [SamplingSpec(top_p=0.95, seed=i) for i in range(4000)]
    assert set(reference.distribution([0.0] * 20, spec)) == set(range(19))
    for method in (Method.DENSE, Method.SORTED):
        assert set(draw_all(method, logits.clone(), specs, [0] * 4000)) == set(range(19))


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    specs = [SamplingSpec(top_k=3, seed=i) for i in range(300)]
    logits = torch.zeros(300, 1000)
    for method in (Method.TOP_K, Method.SORTED):
        assert set(draw_all(method, logits.clone(), specs, [0] * 300)) == {0, 1, 2}


def test_nucleus_mixes_peaked_and_flat_rows() -> None:
    specs = [SamplingSpec(top_p=0.8, seed=i) for i in range(6)]
    logits = torch.randn(6, 9000, generator=torch.Generator().manual_seed(1)) * 0.1
    logits[::2, 123] += 30.0
    drawn = draw_all(Method.NUCLEUS, logits.clone(), specs, [3] * 6)
    assert drawn[::2] == [123] * 3
    assert drawn == draw_all(Method.SORTED, logits.clone(), specs, [3] * 6)


@pytest.mark.parametrize("method", [Method.DENSE, Method.NUCLEUS, Method.TOP_K, Method.SORTED])
def test_tiny_temperature_is_the_argmax(method: Method) -> None:
    logits = torch.randn(8, 9000, generator=torch.Generator().manual_seed(3)) * 50
    specs = [SamplingSpec(temperature=1e-30, top_p=0.9, top_k=5 if method is Method.TOP_K else 0)] * 8
    assert draw_all(method, logits.clone(), specs, list(range(8))) == logits.argmax(1).tolist()


@pytest.mark.parametrize("method", [Method.DENSE, Method.NUCLEUS, Method.TOP_K, Method.SORTED])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_rows_without_finite_logits_end_and_stay_in_range(method: Method, bad: float) -> None:
    logits = torch.randn(3, 9000, generator=torch.Generator().manual_seed(4))
    specs = [SamplingSpec(top_p=0.9, seed=i, top_k=5 if method is Method.TOP_K else 0) for i in range(3)]
    expected = draw_all(method, logits.clone(), specs, [0] * 3)
    logits[1] = bad
    drawn = draw_all(method, logits, specs, [0] * 3)
    assert 0 <= drawn[1] < 9000
    assert [drawn[0], drawn[2]] == [expected[0], expected[2]]


def test_methods_are_chosen_by_what_a_spec_asks() -> None:
    def chosen(vocab_size: int = 32_000, device: str = "cpu", **fields: float) -> Method:
        return choose_method(SamplingSpec(**fields), vocab_size, torch.device(device))

    assert chosen(temperature=0.0, top_p=0.5) is Method.GREEDY
    assert chosen() is Method.PLAIN
    assert chosen(min_p=0.1) is Method.DENSE
    assert chosen(top_k=32_000) is Method.PLAIN
    assert chosen(top_k=50) is Method.TOP_K
    assert chosen(top_k=10_000) is Method.SORTED
    assert chosen(top_p=0.9) is Method.NUCLEUS
    assert chosen(100, top_p=0.9) is Method.DENSE
    assert chosen(device="meta", top_p=0.9) is Method.SORTED
    assert chosen(device="meta", top_k=5) is Method.SORTED
    assert chosen(device="meta", min_p=0.1) is Method.DENSE
