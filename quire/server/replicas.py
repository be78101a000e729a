"""`/debug/replicas`: the engines behind this server, and how to have more or fewer of them while it serves.

    GET   every replica with its load, and how many the load wants
    POST  {"action": "add"}, or {"action": "drain" | "undrain" | "remove", "engine": "1"}

Who may see everybody's requests may read it: an admin's key, or the only key. To change something takes a key at all,
unless the server listens on this machine alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from quire.engine.api import is_replicated, replicas_of
from quire.router.replicas import ReplicaSet
from quire.router.scaling import desired_replicas
from quire.server.errors import bad_request

if TYPE_CHECKING:
    from quire.server.context import ServerContext

_MAX_REPLICAS = 64


class ReplicasBody(msgspec.Struct, forbid_unknown_fields=True):
    action: Literal["add", "drain", "undrain", "remove"]
    engine: str | None = None


def _report(context: ServerContext) -> dict[str, Any]:
    engine = context.first.engine
    loads = [replica.load() for replica in replicas_of(engine).values()]
    shown = engine.describe() if isinstance(engine, ReplicaSet) else [{"engine": "0"}]
    moved = engine.num_moved if isinstance(engine, ReplicaSet) else 0
    return {"replicas": shown, "num_moved_requests": moved, "desired_replicas": desired_replicas(loads)}


async def show_replicas(context: ServerContext, _: HttpRequest) -> Response:
    """The engines behind this server, and how many the load wants. For an admin."""
    return JSONResponse(_report(context), headers={"cache-control": "no-store"})


async def change_replicas(context: ServerContext, _: HttpRequest, body: ReplicasBody) -> Response:
    """Add, drain or remove an engine while serving: no request is lost. For an admin."""
    engine = context.first.engine
    if not is_replicated(engine):
        raise bad_request("this server has one engine: start it with -dp 2 or more", code="one_engine")
    assert isinstance(engine, ReplicaSet)
    return JSONResponse({"engine": await _change(engine, body), **_report(context)})


async def _change(engine: ReplicaSet, body: ReplicasBody) -> str:
    if body.action == "add":
        if body.engine is not None:
            raise bad_request("a new replica is named by the server: leave engine out", param="engine")
        if len(engine.replicas) >= _MAX_REPLICAS:
            raise bad_request(f"there are {_MAX_REPLICAS} replicas already, the most that one server has")
        return await engine.add()
    if body.engine is None:
        raise bad_request(f"which replica? Send engine with {body.action}", param="engine")
    if body.action == "undrain":
        engine.undrain(body.engine)
    else:
        await (engine.drain if body.action == "drain" else engine.remove)(body.engine)
    return body.engine
