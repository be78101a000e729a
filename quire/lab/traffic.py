"""Traffic as lengths: how many blocks a kind of request holds at its end, and on average while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.plan import max_window_blocks

Windows = Sequence[int | None]  # the window of each KV group


@dataclass(slots=True, frozen=True)
class Kind:
    """Requests of one length. `share` is of all requests that arrive; shares need not add up to 1."""

    prompt_len: int
    output_len: int
    share: float = 1.0

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that have KV when a request ends. The last token that is sampled needs none."""
        return self.prompt_len + self.output_len - 1

    def blocks_at_end(self, block_size: int, windows: Windows = (None,)) -> int:
        num = -(-self.num_kv_tokens // block_size)
        return sum(num if most is None else min(num, most) for most in _limits(windows, block_size))

    def block_steps(self, block_size: int, windows: Windows = (None,)) -> int:
        """Blocks held, summed over the steps in which it runs: one for the prompt, then one for each further token."""
        first, last = self.prompt_len - 1, self.num_kv_tokens
        limits = _limits(windows, block_size)
        return sum(_ceil_sum(last, block_size, most) - _ceil_sum(first, block_size, most) for most in limits)

    def token_steps(self) -> int:
        """Tokens held, summed over the same steps."""
        return self.output_len * (2 * self.prompt_len + self.output_len - 1) // 2


def _limits(windows: Windows, block_size: int) -> list[int | None]:
    """Blocks that a sequence has at most in each KV group."""
    return [None if window is None else max_window_blocks(window, block_size) for window in windows]


def _ceil_sum(n: int, size: int, most: int | None = None) -> int:
    """The sum of ceil(k / size), or of `most` where that is less, for k = 1 .. n."""
    if most is not None and n > most * size:
        return _ceil_sum(most * size, size) + most * (n - most * size)
    full, rest = divmod(n, size)
    return size * full * (full + 1) // 2 + rest * (full + 1)


@dataclass(slots=True, frozen=True)
class MixNeeds:
    """What a mix asks of blocks of one size.

    Means are over sequences that run at a random moment. Long answers run for longer, so there are more of them at
    any moment than among arrivals: each kind is weighed by share x output length.
    """

    mean_blocks: float
    max_blocks: int  # blocks of the longest kind at its end
    waste_percent: float  # the part of the blocks' slots that is empty ends of last blocks


def mix_needs(mix: Sequence[Kind], block_size: int, windows: Windows = (None,)) -> MixNeeds:
    steps = sum(kind.share * kind.output_len for kind in mix)
    block_steps = sum(kind.share * kind.block_steps(block_size, windows) for kind in mix)
    block_steps_whole = sum(kind.share * kind.block_steps(block_size) for kind in mix)
    token_steps = sum(kind.share * kind.token_steps() for kind in mix)
    return MixNeeds(
        mean_blocks=block_steps / steps,
        max_blocks=max(kind.blocks_at_end(block_size, windows) for kind in mix),
        waste_percent=100.0 * (1.0 - token_steps / (block_steps_whole * block_size)),
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
