"""Streams that another server can go on with: the headers and comments that a server and `quire router` exchange.

    router → server    x-quire-resumable: 1
    server → router    x-quire-seed: 42                  of a stream that can be resumed
                       data: {…}⏎⏎: tokens 17 4⏎⏎        after the events of every output, its tokens
    router → another   the same body with "seed": 42, "continued_token_ids": [17, 4]

The other one turns those tokens into text as the first had done, sends nothing of it, and goes on with the next token.
The router takes the comments out, and hands on only events whose tokens it knows: so nothing is lost or sent twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.api import EngineInfo, PreparedRequest
from quire.outputs import RequestOutput
from quire.server.errors import bad_request
from quire.server.protocol import GenerationBody

RESUMABLE_HEADER, SEED_HEADER = "x-quire-resumable", "x-quire-seed"
RESUMABLE_PATHS = ("/v1/completions", "/v1/chat/completions")
_CONTINUED = "continued_token_ids"


def why_not(body: GenerationBody, prepared: Sequence[PreparedRequest]) -> str | None:
    """Why another server cannot go on with a request; None if it can."""
    params = prepared[0].params
    if not body.stream:
        return "stream is not set: its answer comes in one piece"
    if len(prepared) > 1 or prepared[0].request.n > 1:
        return "it has several answers"
    if params.logprobs is not None or params.prompt_logprobs is not None:
        return "it has logprobs, which are not computed again"
    return None


def seed_of(prepared: PreparedRequest) -> str:
    """The seed as a body's `seed` has it: in 64 bits, with a sign."""
    seed = prepared.request.spec.seed
    return str(seed - (1 << 64) if seed >= 1 << 63 else seed)


def continue_after(body: GenerationBody, prepared: Sequence[PreparedRequest], info: EngineInfo) -> None:
    """Have a request go on after the tokens that its client has."""
    token_ids = body.continued_token_ids
    if not token_ids:
        return
    if (reason := why_not(body, prepared)) is not None:
        raise bad_request(f"a request cannot go on after {_CONTINUED}: {reason}", _CONTINUED)
    request = prepared[0].request
    room = min(request.max_tokens, info.max_model_len - request.num_prompt_tokens)
    if len(token_ids) >= room or max(token_ids) >= info.vocab_size:
        raise bad_request(
            f"{_CONTINUED} must be fewer than the {room} tokens that this answer may have, each below "
            f"{info.vocab_size}, got {len(token_ids)} up to {max(token_ids)}",
            _CONTINUED,
        )
    request.continued = {0: token_ids}


def check_goes_on(*, ended: bool) -> None:
    """Whether there is something left to say after those tokens."""
    if ended:
        raise bad_request(f"the answer ends within {_CONTINUED}, with a stop string", _CONTINUED)


def tokens_comment(outputs: Sequence[tuple[int, RequestOutput]]) -> bytes:
    return b": tokens %b\n\n" % b" ".join(b"%d" % token for _, one in outputs for token in one.outputs[0].token_ids)
