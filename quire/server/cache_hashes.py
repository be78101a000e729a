"""For a router in front of several servers: what this one's prefix cache holds, and the hashes of a prompt's blocks.

    GET   /debug/cache?since=      hashes that the cache gained and lost since a reader's last look, with the load
    POST  /debug/cache/hashes      the body of /tokenize, with cache_salt: the hashes that such a prompt would look for

The first lets its reader test guesses of others' prompts, so it is for an admin's key, or the only key, or without keys
for a local address. A server with several replicas routes by itself: it answers 404, and a router guesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.engine.api import is_replicated
from quire.request import cache_scope
from quire.router.hashes import prompt_hashes
from quire.server.endpoint import Exchange, json_response
from quire.server.errors import ApiError, bad_request
from quire.server.protocol import TokenizeBody
from quire.server.tokenize import tokens_of

if TYPE_CHECKING:
    from quire.server.context import ServerContext


class HashesBody(TokenizeBody, kw_only=True):
    """A prompt as a request would bring it."""

    cache_salt: str | None = None
    token_ids: list[int] | None = None  # instead of prompt and messages


class BlockHashes(msgspec.Struct, kw_only=True):
    num_tokens: int
    block_size: int
    hashes: list[str]


async def make_hashes(exchange: Exchange, body: HashesBody) -> None:
    """Hashes of the blocks that a prompt would look for in the prefix cache."""
    served = exchange.context.find(body.model).served
    token_ids = body.token_ids if body.token_ids is not None else (await tokens_of(exchange, body)).tokens
    info = served.engine.info
    if len(token_ids) > info.max_model_len or any(not 0 <= token < info.vocab_size for token in token_ids):
        raise bad_request(
            f"token_ids holds up to {info.max_model_len} numbers from 0 to {info.vocab_size - 1}", "token_ids"
        )
    isolated = exchange.context.settings.isolated_tenants
    salt = cache_scope(body.cache_salt, exchange.tenant if isolated else "")
    found = prompt_hashes(token_ids, info.block_size, salt) if info.enable_prefix_caching else []
    hashes = [one.hex() for one in found]
    await exchange.reply(BlockHashes(num_tokens=len(token_ids), block_size=info.block_size, hashes=hashes))


async def show_changes(context: ServerContext, request: HttpRequest) -> Response:
    """Hashes of blocks that the prefix cache gained and lost, for a router. For an admin."""
    engine = context.first.engine
    for name in request.query_params:
        if name != "since":
            raise bad_request(f"/debug/cache has no parameter {name}: it has since", param=name)
    info = engine.info
    if is_replicated(engine) or not info.enable_prefix_caching or len(context.models) > 1:
        raise ApiError(404, "this server's cache is not told: it has several, or none", code="no_cache")
    found: dict[str, Any] = await engine.call("cache_changes", since=request.query_params.get("since"))
    load = engine.load()
    body = {
        "since": found["since"],
        "is_snapshot": found["is_snapshot"],
        "filled": found["filled"].hex(),
        "evicted": found["evicted"].hex(),
        "block_size": info.block_size,
        "max_num_seqs": info.max_num_seqs,
        "num_queued_tokens": load.num_waiting_tokens,
        "num_running": load.num_running,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "step_s": load.decode_step_s,
    }
    return json_response(body, cache_control="no-store")
