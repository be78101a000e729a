"""What a simulated step costs, and the clock that it moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from quire.step_costs import StepLoad


class StepCost(ABC):
    """Seconds of one step. `kv_token_s` is what one more token of context adds to a step that only decodes."""

    kv_token_s: float

    @abstractmethod
    def load_s(self, load: StepLoad) -> float: ...

    def step_s(self, counts: Sequence[int], starts: Sequence[int], num_moved_blocks: int = 0) -> float:
        return self.load_s(StepLoad.of(counts, starts, num_moved_blocks))


@dataclass(slots=True, frozen=True, kw_only=True)
class CostModel(StepCost):
    """A few straight lines. The defaults are near Llama-3.1-8B in bf16 on one H200.

    Small steps are bound by reading the weights, large ones by arithmetic; attention comes on top.
    """

    overhead_s: float = 0.5e-3  # of a step, whatever it holds
    weights_s: float = 4.0e-3  # reading the weights once
    token_s: float = 24e-6  # matrix products of one token, where arithmetic is the limit
    kv_token_s: float = 31e-9  # reading one token's keys and values
    pair_s: float = 1.0e-9  # one query against one key, where a chunk makes arithmetic the limit
    block_copy_s: float = 40e-6  # one block between device and host

    def load_s(self, load: StepLoad) -> float:
        moved_s = self.block_copy_s * load.num_moved_blocks
        if not load.num_tokens:
            return moved_s
        return (
            self.overhead_s
            + max(self.weights_s, self.token_s * load.num_tokens)
            + self.kv_token_s * (load.num_decode_kv_tokens + load.num_prompt_kv_tokens)
            + self.pair_s * load.num_pairs
            + moved_s
        )


class SimClock:
    """Time that passes only when someone says so. Call it for the seconds now."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, then_s: float) -> None:
        self.now_s = max(self.now_s, then_s)
