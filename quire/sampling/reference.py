"""Sampling one row, slowly and plainly, in Python integers and float64: what the fast sampler is tested against."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from quire.params import SamplingSpec
from quire.plan import TokenLogprobs

_WORD = 0xFFFFFFFF


def edited_logits(
    logits: Sequence[float], spec: SamplingSpec, token_ids: Sequence[int], num_prompt_tokens: int
) -> list[float]:
    """The logits after everything that depends on the request and its history, before temperature."""
    edited = list(logits)
    output = list(token_ids[num_prompt_tokens:])
    if spec.allowed_token_ids is not None:
        allowed = set(spec.allowed_token_ids)
        edited = [x if token in allowed else -math.inf for token, x in enumerate(edited)]
    for *prefix, last in spec.bad_words:
        if not prefix or list(token_ids[-len(prefix) :]) == prefix:
            edited[last] = -math.inf
    if len(output) < spec.min_tokens:
        for token in spec.end_token_ids:
            edited[token] = -math.inf
    for token, bias in (spec.logit_bias or {}).items():
        edited[token] += bias
    for token in set(token_ids):
        penalty = spec.repetition_penalty
        edited[token] = edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
    for token, count in Counter(output).items():
        edited[token] -= spec.frequency_penalty * count + spec.presence_penalty
    return edited


def distribution(edited: Sequence[float], spec: SamplingSpec) -> dict[int, float]:
    """The kept tokens and their probabilities. Tokens rank by logit; of equal ones the lower id comes first."""
    ranked = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if spec.temperature == 0:
        return {ranked[0]: 1.0}
    largest = edited[ranked[0]]
    weights = {token: math.exp((edited[token] - largest) / spec.temperature) for token in ranked}
    kept = [token for token in ranked if weights[token] >= spec.min_p]
    if spec.top_k:
        kept = kept[: spec.top_k]
    if spec.top_p < 1:
        target = spec.top_p * math.fsum(weights[token] for token in kept)
        mass_before, nucleus = 0.0, []
        for token in kept:
            if mass_before >= target:
                break
            nucleus.append(token)
            mass_before += weights[token]
        kept = nucleus
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept if weights[token] > 0}


def sample(logits: Sequence[float], spec: SamplingSpec, token_ids: Sequence[int], num_prompt_tokens: int) -> int | None:
    """The next token, or None where no token can be drawn."""
    if any(math.isnan(x) or x == math.inf for x in logits):
        return None
    edited = edited_logits(logits, spec, token_ids, num_prompt_tokens)
    if max(edited) == -math.inf:
        return None
    probabilities = distribution(edited, spec)
    position = len(token_ids)
    return max(
        probabilities,
        key=lambda token: (math.log(probabilities[token]) + gumbel(spec.seed, spec.index, position, token), -token),
    )


def token_logprobs(logits: Sequence[float], token_id: int, num_top: int) -> TokenLogprobs:
    """The logprobs of unmodified logits: the token's, its rank, and the top ones (-1: all)."""
    largest = max(logits)
    log_total = largest + math.log(math.fsum(math.exp(x - largest) for x in logits))
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    top = ranked if num_top == -1 else ranked[:num_top]
    return TokenLogprobs(
        token_id=token_id,
        logprob=logits[token_id] - log_total,
        rank=1 + sum(x > logits[token_id] for x in logits),
        top_token_ids=top,
        top_logprobs=[logits[token] - log_total for token in top],
    )


def gumbel(seed: int, index: int, position: int, token: int) -> float:
    """The noise of `noise.py`, in float64."""
    v = noise_bits(seed, index, position, token) * ((1 - 2.0**-24) * 2.0**-31) + 2.0**-32
    return -math.log(-math.log1p(-v))


def noise_bits(seed: int, index: int, position: int, token: int) -> int:
    """The 31 bits of `noise.py`."""
    keys = []
    for constant in (0x243F6A88, 0x85A308D3):
        key = _mix(constant ^ (seed & _WORD))
        for word in (seed >> 32, index, position):
            key = _mix((key + word) & _WORD)
        keys.append(key)
    x = _mix(token) ^ keys[0]
    x = (x * 0x85EBCA6B + keys[1]) & _WORD
    x ^= _signed(x) >> 15 & _WORD
    x = x * 0xC2B2AE35 & _WORD
    x ^= _signed(x) >> 16 & _WORD
    return x & 0x7FFFFFFF


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & _WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & _WORD
    return x ^ (x >> 16)
