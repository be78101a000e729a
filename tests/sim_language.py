"""A stand-in for a model: the next token is a pure function of all tokens before it and of the sampling spec."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from quire.params import SamplingSpec
from quire.plan import TokenLogprobs

_MASK = (1 << 64) - 1


@dataclass(slots=True, frozen=True)
class ToyLanguage:
    """Tokens 0..vocab_size-1. Whatever changes the history changes what follows, so that no mistake stays hidden."""

    vocab_size: int = 1000

    def root(self, adapter: str | None) -> int:
        """The fingerprint before the first token."""
        return 0 if adapter is None else zlib.crc32(adapter.encode()) + 1

    def extend(self, fingerprints: list[int], root: int, token_ids: list[int]) -> None:
        """Append a fingerprint of the prefix that ends in each token which has none yet."""
        last = fingerprints[-1] if fingerprints else root
        for token in token_ids[len(fingerprints) :]:
            last = _mix(last ^ _mix(token + 1))
            fingerprints.append(last)

    def next_token(self, fingerprint: int, spec: SamplingSpec, num_output_tokens: int) -> int:
        """The token after a prefix. Greedy ones depend on the prefix alone, others on seed and index too."""
        key = fingerprint
        if spec.temperature > 0:
            key = _mix(key ^ _mix(spec.seed * 1_000_003 + spec.index + 1))
        token = key % self.vocab_size
        if num_output_tokens < spec.min_tokens:
            while token in spec.end_token_ids:
                token = (token + 1) % self.vocab_size
        return token

    def logprobs(self, fingerprint: int, token: int, num_top: int) -> TokenLogprobs:
        """Numbers that are as deterministic as the tokens, and as meaningless."""
        num_top = self.vocab_size if num_top < 0 else num_top
        top = [_mix(fingerprint + i) % self.vocab_size for i in range(num_top)]
        rank = _mix(fingerprint ^ token) % self.vocab_size + 1
        return TokenLogprobs(token, -float(rank), rank, top, [-float(i + 1) for i in range(num_top)])

    def likeliest(self, fingerprint: int, count: int) -> list[tuple[int, float]]:
        """Different tokens after a prefix, as many as asked for, with logprobs that fall."""
        first, step = fingerprint % self.vocab_size, 0.2 + _mix(fingerprint) / 2**64
        return [((first + i) % self.vocab_size, -step * (i + 1)) for i in range(min(count, self.vocab_size))]


def _mix(value: int) -> int:
    """A 64-bit finalizer: every bit of the input moves about half the bits of the output."""
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    value = (value ^ (value >> 29)) * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ (value >> 32)
