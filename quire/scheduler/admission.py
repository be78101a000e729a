"""Who can be admitted: requests that could never run are refused, and a head of the queue that did not fit is looked at
again only when something has changed."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import BadRequestError
from quire.kv import KVManager, PrefixMatch
from quire.request import Request, Sequence
from quire.scheduler.config import SchedulerConfig
from quire.scheduler.types import SchedulerStats


def refuse_if_it_never_fits(request: Request, config: SchedulerConfig, kv: KVManager) -> None:
    """Raise BadRequestError if the request could not be served even alone."""
    num_prompt = request.num_prompt_tokens
    if not num_prompt:
        raise BadRequestError("the prompt is empty: it needs at least one token", param="prompt")
    request.check_limits(config.max_model_len, config.max_num_seqs)
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        instead = "set enable_chunked_prefill=True" if kv.windows else "shorten it: an encoder computes it in one step"
        raise BadRequestError(
            f"the prompt has {num_prompt} tokens and a step computes at most max_num_batched_tokens="
            f"{config.max_num_batched_tokens}: raise it, or {instead}",
            param="prompt",
        )
    # The last token that is sampled needs no KV.
    num_tokens = max(num_prompt, min(num_prompt + request.max_tokens, config.max_model_len) - 1)
    if request.beams is not None:
        num_blocks = kv.num_blocks_for_beams(num_prompt, num_tokens, request.n)
        if num_blocks > kv.num_blocks:
            raise BadRequestError(
                f"{request.n} beams of {num_prompt} prompt tokens and max_tokens={request.max_tokens} may need "
                f"{num_blocks} blocks of {kv.block_size} tokens, the KV cache has {kv.num_blocks}: lower beam_width or "
                f"max_tokens",
                param="beam_width",
            )
    elif not kv.can_ever_fit(num_tokens):
        param = "max_tokens" if kv.can_ever_fit(num_prompt) else "prompt"
        raise BadRequestError(
            f"{num_prompt} prompt tokens with max_tokens={request.max_tokens} need {kv.num_blocks_for(num_tokens)} "
            f"blocks of {kv.block_size} tokens, the KV cache has {kv.num_blocks}: lower {param}",
            param=param,
        )


@dataclass(slots=True, frozen=True)
class BlockedHead:
    """Who did not fit, and what was so then. Kept so that a long prompt is not looked up in vain at every step."""

    seq_id: int
    match: PrefixMatch | None
    num_free_blocks: int
    num_prefill_tokens: int

    @property
    def num_matched_blocks(self) -> int:
        return len(self.match.block_ids) if self.match is not None else 0

    def lacks_blocks(self, seq: Sequence, kv: KVManager) -> bool:
        """True while it is this sequence that waits, and no more blocks are free than when it did not fit."""
        return self.seq_id == seq.seq_id and kv.num_free_blocks <= self.num_free_blocks

    def holds(self, seq: Sequence, kv: KVManager, stats: SchedulerStats) -> bool:
        """True while it lacks blocks and no prompt has filled any that it could share: no need to look again."""
        return (
            self.lacks_blocks(seq, kv)
            and bool(kv.tables)  # someone runs, whose end will change things
            and stats.num_prefill_tokens == self.num_prefill_tokens
        )
