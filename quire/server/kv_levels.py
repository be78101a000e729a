"""`/debug/kv/levels`: the KV cache's levels, and what an operator may do with a prompt in them.

    GET   by level: blocks, what was stored, loaded and rejected, bytes moved, age
    POST  {"action": "warm" | "pin" | "unpin" | "expire", "prompt": text or token ids}
          {"action": "expire", "older_than_s": 86400}

Nobody has to do any of it: what is not used sinks and goes by itself. `warm` computes a prompt, or loads it, before a
user asks; `pin` does so and keeps it on the device; `expire` forgets it in every level. As with replicas, reading is
for whoever may see everybody's requests, and changing takes a key unless the server listens on this machine alone.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from quire.engine.api import PreparedRequest, ServingEngine
from quire.params import SamplingParams
from quire.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from quire.server.context import ServerContext


class LevelsBody(msgspec.Struct, forbid_unknown_fields=True):
    action: Literal["warm", "pin", "unpin", "expire"]
    prompt: str | list[int] | None = None
    cache_salt: str | None = None
    tenant: str = ""  # the name of the key whose requests it is for, where there are several
    older_than_s: float | None = None


async def show_levels(context: ServerContext, request: HttpRequest) -> Response:
    """The device and the levels below it: blocks, what moved, what was found there. For an admin."""
    _, engine = context.choose(request).find_engine(request.query_params.get("engine"))
    return JSONResponse(await engine.call("kv_levels"), headers={"cache-control": "no-store"})


async def change_levels(context: ServerContext, request: HttpRequest, body: LevelsBody) -> Response:
    """Warm, pin, unpin or expire a prompt; or expire what was not used for some time. For an admin."""
    _, engine = context.choose(request).find_engine(request.query_params.get("engine"))
    known = context.settings.tenants
    if body.tenant and (len(known) < 2 or body.tenant not in known):
        raise bad_request("there is no such key: give the name of one of several, or leave it out", param="tenant")
    return JSONResponse(await _change(engine, body))


async def _change(engine: ServingEngine, body: LevelsBody) -> dict[str, Any]:
    if body.older_than_s is not None:
        if body.action != "expire" or body.prompt is not None or not 0 <= body.older_than_s < 1e12:
            raise bad_request("older_than_s is a time in seconds, for expire without a prompt", param="older_than_s")
        return {"num_blocks": await engine.call("expire_unused", older_than_s=body.older_than_s)}
    if body.prompt is None:
        raise bad_request(f"which prompt? Send prompt with {body.action}", param="prompt")
    if not engine.info.enable_prefix_caching:
        raise ApiError(400, "this server caches no prefixes: start it with prefix caching", code="no_cache")
    prepared = await asyncio.to_thread(_prepare, engine, body)
    request = prepared.request
    names = {"token_ids": request.prompt_token_ids, "salt": request.salt}
    if body.action == "unpin":
        return {"num_tokens": await engine.call("unpin_prefix", **names)}
    if body.action == "expire":
        return {"num_tokens": await engine.call("expire_prefix", **names)}
    async for _ in engine.stream(prepared):
        pass
    if body.action == "pin":
        return {"num_tokens": await engine.call("pin_cached", **names)}
    return {"num_tokens": prepared.num_prompt_tokens, "num_cached_tokens": prepared.num_cached_tokens}


def _prepare(engine: ServingEngine, body: LevelsBody) -> PreparedRequest:
    prompt: dict[str, Any] = {"prompt" if isinstance(body.prompt, str) else "prompt_token_ids": body.prompt}
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return engine.prepare(f"kv-{uuid.uuid4().hex}", prompt, params, tenant=body.tenant)
