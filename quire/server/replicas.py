"""`/debug/replicas`: the engines behind this server, and how to have more or fewer of them while it serves.

    GET   every replica with its load, and how many the load wants
    POST  {"action": "add"}, or {"action": "drain" | "undrain" | "remove", "engine": "1"}

Who may see everybody's requests may read it: an admin's key, or the only key. To change something takes a key at all,
unless the server listens on this machine alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from quire.engine.api import is_replicated, replicas_of
from quire.router.replicas import ReplicaSet
from quire.router.scaling import desired_replicas
from quire.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from quire.server.context import ServerContext

_MAX_REPLICAS = 64
_Body = TypeVar("_Body")


class ReplicasBody(msgspec.Struct, forbid_unknown_fields=True):
    action: Literal["add", "drain", "undrain", "remove"]
    engine: str | None = None


def routes(context: ServerContext) -> list[Route]:
    def report() -> dict[str, Any]:
        engine = context.first.engine
        loads = [replica.load() for replica in replicas_of(engine).values()]
        shown = engine.describe() if isinstance(engine, ReplicaSet) else [{"engine": "0"}]
        moved = engine.num_moved if isinstance(engine, ReplicaSet) else 0
        return {"replicas": shown, "num_moved_requests": moved, "desired_replicas": desired_replicas(loads)}

    async def read(request: HttpRequest) -> JSONResponse:
        check_admin(request)
        return JSONResponse(report(), headers={"cache-control": "no-store"})

    async def change(request: HttpRequest) -> JSONResponse:
        check_admin(request)
        check_may_change(context, "replicas are changed")
        engine = context.first.engine
        if not is_replicated(engine):
            raise bad_request("this server has one engine: start it with -dp 2 or more", code="one_engine")
        assert isinstance(engine, ReplicaSet)
        body = await read_json(request, ReplicasBody, "{'action': 'drain', 'engine': '1'}")
        return JSONResponse({"engine": await _change(engine, body), **report()})

    return [
        Route("/debug/replicas", read, methods=["GET"]),
        Route("/debug/replicas", change, methods=["POST"]),
    ]


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


def check_admin(request: HttpRequest) -> None:
    if request.scope["state"]["sees"] is not None:
        raise ApiError(403, "this is for an admin's key: see --api-key-file", code="admin_only")


def check_may_change(context: ServerContext, what: str) -> None:
    settings = context.settings
    if not settings.api_keys and not settings.is_local:
        raise ApiError(403, f"{what} with an API key: start the server with one", code="no_key")


async def read_json(request: HttpRequest, kind: type[_Body], example: str) -> _Body:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "send JSON with the header Content-Type: application/json", code="unsupported_media_type")
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body must be like {example}: {error}") from None
