"""What a step's result means for sequences: where they end, and which of their prompts' logprobs are new."""

from __future__ import annotations

from quire.plan import StepResult, TokenLogprobs
from quire.request import FinishReason, Sequence, SequenceState
from quire.scheduler.step import InFlight


def append_until_stop(seq: Sequence, new_token_ids: list[int]) -> list[int]:
    """Append sampled tokens up to and with the one that ends the sequence; returns those appended.

    Sets finish_reason and stop_reason where one ends it. An end token counts only after min_tokens others.
    """
    request = seq.request
    token_ids = seq.token_ids
    if len(new_token_ids) == 1 and len(token_ids) + 1 < seq.max_len and new_token_ids[0] not in request.end_token_ids:
        token_ids.append(new_token_ids[0])  # nearly always
        return new_token_ids
    if len(token_ids) + len(new_token_ids) < seq.max_len and request.end_token_ids.isdisjoint(new_token_ids):
        token_ids += new_token_ids
        return new_token_ids
    end_token_ids = request.end_token_ids
    first_end = len(request.prompt_token_ids) + request.spec.min_tokens  # position at which it may end
    for count, token in enumerate(new_token_ids, start=1):
        token_ids.append(token)
        if token in end_token_ids and len(token_ids) > first_end:
            seq.finish_reason = FinishReason.STOP
            seq.stop_reason = None if token in request.eos_token_ids else token
        elif len(token_ids) >= seq.max_len:
            seq.finish_reason = FinishReason.LENGTH
        else:
            continue
        return new_token_ids[:count]
    return new_token_ids


class PromptLogprobs:
    """Which of the logprobs that prompts ask for have been passed on.

    A prompt that is computed again after a preemption brings the same ones. Forks leave them to the first sequence.
    """

    def __init__(self) -> None:
        self._next_position: dict[int, int] = {}  # by seq_id: the first that was not passed on yet

    def __len__(self) -> int:
        return len(self._next_position)

    def are_missing(self, seq: Sequence) -> bool:
        """True while a sequence still has to run its whole prompt for them."""
        request = seq.request
        if request.spec.prompt_logprobs is None or seq.index:
            return False
        return self._next_position.get(seq.seq_id, 1) < request.num_prompt_tokens

    def take_new(self, step: InFlight, result: StepResult) -> dict[Sequence, list[TokenLogprobs]]:
        """Those of a result that were not passed on before."""
        found: dict[Sequence, list[TokenLogprobs]] = {}
        for row, seq, start in step.prompts:
            piece = result.prompt_logprobs.get(row)
            if not piece or not self.are_missing(seq) or seq.state is SequenceState.FINISHED:
                continue
            first = start + 1
            fresh = piece[max(0, self._next_position.get(seq.seq_id, 1) - first) :]
            if fresh:
                self._next_position[seq.seq_id] = first + len(piece)
                found[seq] = fresh
        return found

    def forget(self, seq: Sequence) -> None:
        self._next_position.pop(seq.seq_id, None)
