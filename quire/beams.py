"""BeamSearchParams and what a beam search gives back, under the names that vLLM's users write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.errors import BadRequestError
from quire.outputs import Logprob
from quire.params import OutputKind, SamplingParams, check_integer, check_number
from quire.refusals import BEAMS, reads_arguments, sift
from quire.request import BeamSpec

if TYPE_CHECKING:
    from quire.lora.request import LoRARequest

MAX_BEAM_WIDTH = 128
# So many candidates are ranked for each end token and beam that enough are left to go on with.
MAX_BEAM_END_TOKENS = 15


def _understood(given: dict[str, Any]) -> dict[str, Any]:
    return sift(given, BEAMS, BeamSearchParams.__dataclass_fields__)


@reads_arguments(_understood)
@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """The `beam_width` most likely continuations, searched for as transformers' `generate(num_beams=...)` does.

    `temperature`: 0 and 1 rank by the model's own logprobs, others by those of the logits divided by it.
    `early_stopping`: True ends when `beam_width` continuations have ended; False when none that runs on looks better;
    "never" when none can become better.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0  # a score is the logprob divided by the length raised to this
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False
    stop_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_integer(self.beam_width, "beam_width", at_least=1)
        if self.beam_width > MAX_BEAM_WIDTH:
            raise BadRequestError(f"beam_width must be <= {MAX_BEAM_WIDTH}, got {self.beam_width}", param="beam_width")
        check_number(self.length_penalty, "length_penalty", -10.0, 10.0)
        if self.early_stopping not in (True, False, "never"):
            raise BadRequestError(
                f'early_stopping must be True, False or "never", got {self.early_stopping!r}', param="early_stopping"
            )
        ends = self.to_sampling().stop_token_ids or ()  # which checks the other fields
        if len(ends) > MAX_BEAM_END_TOKENS:
            raise BadRequestError(
                f"beam search takes at most {MAX_BEAM_END_TOKENS} stop_token_ids, and this has {len(ends)}",
                param="stop_token_ids",
            )

    def to_sampling(self) -> SamplingParams:
        """How the request's text and logprobs are shown."""
        return SamplingParams(
            n=self.beam_width,
            temperature=self.temperature or 1.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
            output_kind=OutputKind.FINAL_ONLY,
        )

    def to_spec(self) -> BeamSpec:
        return BeamSpec(length_penalty=float(self.length_penalty), early_stopping=self.early_stopping)


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation. As vLLM has it, `tokens` and `text` begin with the prompt, and end before the end token unless
    `include_stop_str_in_output`."""

    tokens: list[int]
    logprobs: Sequence[dict[int, Logprob]]  # of the generated tokens, the end token too: the token's own alone
    text: str | None = None
    cum_logprob: float = 0.0
    score: float = 0.0  # what it was ranked by: cum_logprob divided by its length raised to length_penalty
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = field(default=None, repr=False)


@dataclass(slots=True)
class BeamSearchOutput:
    """The continuations of one prompt, the best first."""

    sequences: list[BeamSearchSequence]
