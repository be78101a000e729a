"""Traffic as lengths: how many blocks a kind of request holds at its end, and on average while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Kind:
    """Requests of one length. `share` is of all requests that arrive; shares need not add up to 1."""

    prompt_len: int
    output_len: int
    share: float = 1.0

    @property
    def num_kv_tokens(self) -> int:
        """At its end. The last token that is sampled needs no KV."""
        return self.prompt_len + self.output_len - 1

    def blocks_at_end(self, block_size: int) -> int:
        return -(-self.num_kv_tokens // block_size)

    def block_steps(self, block_size: int) -> int:
        """Blocks held, summed over the steps in which it runs: one for the prompt, then one for each further token."""
        return _ceil_sum(self.num_kv_tokens, block_size) - _ceil_sum(self.prompt_len - 1, block_size)

    def token_steps(self) -> int:
        """Tokens held, summed over the same steps."""
        return self.output_len * (2 * self.prompt_len + self.output_len - 1) // 2


def _ceil_sum(n: int, size: int) -> int:
    """The sum of ceil(k / size) for k = 1 .. n."""
    full, rest = divmod(n, size)
    return size * full * (full + 1) // 2 + rest * (full + 1)


@dataclass(slots=True, frozen=True)
class MixNeeds:
    """What a mix asks of blocks of one size.

    Means are over sequences that run at a random moment. Long answers run for longer, so there are more of them at
    any moment than among arrivals: each kind is weighed by share x output length.
    """

    mean_blocks: float
    max_blocks: int  # of the longest kind, at its end
    waste_percent: float  # of the slots of those blocks, the empty ends of last blocks


def mix_needs(mix: Sequence[Kind], block_size: int) -> MixNeeds:
    steps = sum(kind.share * kind.output_len for kind in mix)
    block_steps = sum(kind.share * kind.block_steps(block_size) for kind in mix)
    token_steps = sum(kind.share * kind.token_steps() for kind in mix)
    return MixNeeds(
        mean_blocks=block_steps / steps,
        max_blocks=max(kind.blocks_at_end(block_size) for kind in mix),
        waste_percent=100.0 * (1.0 - token_steps / (block_steps * block_size)),
    )


@dataclass(slots=True, frozen=True)
class Fit:
    """How many sequences of a mix a pool of blocks runs at once."""

    always: int  # whatever their timing: all at the end of the longest kind
    typical: int  # each somewhere on its way


def fit_mix(needs: MixNeeds, num_blocks: int, num_watermark_blocks: int) -> Fit:
    """The watermark stays free at admissions, so what runs shares the rest."""
    usable = num_blocks - num_watermark_blocks
    return Fit(usable // needs.max_blocks, max(usable // needs.max_blocks, int(usable / needs.mean_blocks)))
