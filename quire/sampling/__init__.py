"""Sampling: from logits to tokens and logprobs, on the logits' device, with counter-based randomness."""

from __future__ import annotations

from quire.sampling.beams import RankedBatch, rank_beams
from quire.sampling.logprobs import PendingLogprobs, compute_logprobs, prompt_logprobs
from quire.sampling.masks import TokenMasks
from quire.sampling.processors import BatchUpdate, LogitsProcessor, MoveDirectionality, load_plugins
from quire.sampling.sampler import SampledBatch, Sampler
from quire.sampling.verification import VerifiedBatch, verify_drafts

__all__ = [
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "PendingLogprobs",
    "RankedBatch",
    "SampledBatch",
    "Sampler",
    "TokenMasks",
    "VerifiedBatch",
    "compute_logprobs",
    "load_plugins",
    "prompt_logprobs",
    "rank_beams",
    "verify_drafts",
]
