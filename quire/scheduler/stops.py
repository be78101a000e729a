"""When a sequence ends."""

from __future__ import annotations

from quire.request import FinishReason, Sequence


def append_until_stop(seq: Sequence, new_token_ids: list[int]) -> list[int]:
    """Append sampled tokens up to and with the one that ends the sequence; returns those appended.

    Sets finish_reason and stop_reason where one ends it. An end token counts only after min_tokens others.
    """
    request = seq.request
    token_ids = seq.token_ids
    if len(new_token_ids) == 1 and len(token_ids) + 1 < seq.max_len and new_token_ids[0] not in request.end_token_ids:
        token_ids.append(new_token_ids[0])  # nearly always
        return new_token_ids
    end_token_ids = request.end_token_ids
    first_end = len(request.prompt_token_ids) + request.params.min_tokens  # position at which it may end
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
