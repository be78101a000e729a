"""The noise follows its specification bit by bit, and is as random as it must be."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling import noise, reference
from quire.sampling.scratch import Scratch

CPU = torch.device("cpu")
VOCAB = 4096
TOKEN_WORDS = noise.token_words(VOCAB, CPU)


def uniforms(seeds: list[int], indices: list[int], positions: list[int]) -> np.ndarray:
    """The v of the specification, for all tokens: [rows, vocab]."""
    words = np.stack([noise.sequence_words(s, i) for s, i in zip(seeds, indices, strict=True)])
    keys = torch.from_numpy(noise.step_keys(words, np.array(positions)))
    return -torch.expm1(-noise.exponentials(keys, TOKEN_WORDS[None], Scratch(CPU)).double()).numpy()


def chi_square_sigmas(counts: np.ndarray) -> float:
    """How many standard deviations the counts' chi-square lies above that of a uniform distribution."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def joint_sigmas(a: np.ndarray, b: np.ndarray, bins: int = 16) -> float:
    cells = np.floor(a * bins).astype(np.int64) * bins + np.floor(b * bins).astype(np.int64)
    return chi_square_sigmas(np.bincount(cells.ravel(), minlength=bins * bins))


@settings(derandomize=True, max_examples=200)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    index=st.integers(0, 10_000),
    position=st.integers(0, 2**31 - 1),
    token=st.integers(0, VOCAB - 1),
)
def test_noise_is_what_the_specification_says(seed: int, index: int, position: int, token: int) -> None:
    keys = torch.from_numpy(noise.step_keys(noise.sequence_words(seed, index)[None], np.array([position])))
    e = noise.exponentials(keys, TOKEN_WORDS[None, token : token + 1], Scratch(CPU)).item()
    assert math.isclose(-math.log(e), reference.gumbel(seed, index, position, token), rel_tol=1e-5, abs_tol=1e-6)


def test_known_values() -> None:
    # Pinned, so that a change of the noise, which changes every seeded output, cannot pass unseen.
    assert [reference.noise_bits(0, 0, 0, token) for token in range(3)] == [1377359691, 1858989495, 2108944402]
    assert reference.noise_bits(-1, 3, 1000, 49151) == 1657204926


def test_extreme_bits_give_finite_noise() -> None:
    for bits in (0, 1, 2**31 - 1):
        v = np.float32(np.float32(bits) * np.float32(noise.UNIFORM_SCALE)) + np.float32(noise.UNIFORM_OFFSET)
        assert 0 < v < 1
        e = -math.log1p(-float(v))
        assert 2**-33 < e < 17


def test_negative_seed_is_its_residue() -> None:
    assert (noise.sequence_words(-5, 1) == noise.sequence_words(2**64 - 5, 1)).all()


def test_no_two_positions_of_a_sequence_share_keys() -> None:
    words = np.repeat(noise.sequence_words(7, 0)[None], 200_000, axis=0)
    keys = noise.step_keys(words, np.arange(200_000))
    assert len(np.unique(keys[:, 0])) == len(np.unique(keys[:, 1])) == 200_000


def test_uniform_over_tokens_and_over_positions() -> None:
    v = uniforms([11] * 256, [0] * 256, list(range(256)))
    assert abs(v.mean() - 0.5) < 4 / math.sqrt(12 * v.size)
    assert abs(v.var() * 12 - 1) < 0.01
    assert abs(chi_square_sigmas(np.bincount((v * 1024).astype(int).ravel(), minlength=1024))) < 4
    # Each position alone, each token alone: sixteen cells, then all those statistics must spread as they should.
    for lines in (v, v.T[::16]):
        sigmas = [chi_square_sigmas(np.bincount((x * 16).astype(int), minlength=16)) for x in lines]
        assert abs(np.mean(sigmas)) < 4 / math.sqrt(len(sigmas))
        assert 0.8 < np.std(sigmas) < 1.2
    # The smallest values decide the races.
    tail = (v < 1e-3).sum()
    assert abs(tail - v.size * 1e-3) < 4 * math.sqrt(v.size * 1e-3)


def test_neighbours_are_independent() -> None:
    n, run = 128, list(range(128))
    same = [3] * n
    by_position = uniforms(same, same, run)
    by_seed = uniforms(run, same, same)
    by_high_seed = uniforms([s << 32 for s in run], same, same)
    by_index = uniforms(same, run, same)
    pairs = {
        "tokens": (by_position[:, :-1], by_position[:, 1:]),
        "far tokens": (by_position[:, :-1024], by_position[:, 1024:]),
        "positions": (by_position[:-1], by_position[1:]),
        "seeds": (by_seed[:-1], by_seed[1:]),
        "high seeds": (by_high_seed[:-1], by_high_seed[1:]),
        "indices": (by_index[:-1], by_index[1:]),
        "index and position": (by_index, np.roll(by_position, 1, axis=0)),
        "index swapped with position": (uniforms(same, [5] * n, run)[6:], uniforms(same, run, [5] * n)[6:]),
    }
    for name, (a, b) in pairs.items():
        assert abs(joint_sigmas(a, b)) < 4, name
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.size), name


def test_winners_of_even_races_are_uniform() -> None:
    v = np.concatenate([uniforms([seed] * 128, [0] * 128, list(range(128))) for seed in range(16)])
    winners = v.argmin(axis=1)
    assert abs(chi_square_sigmas(np.bincount(winners // 128, minlength=32))) < 4
    # The minimum of n uniforms has mean 1 / (n + 1) and about the same deviation.
    assert abs(v.min(axis=1).mean() * (VOCAB + 1) - 1) < 4 / math.sqrt(len(v))
