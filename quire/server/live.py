"""`/live`: the stream of lines that the page at `/` draws from. Any client may read it:

curl -N -H "Authorization: Bearer KEY" "http://127.0.0.1:8000/live?model=NAME&engine=0"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from quire.server import page
from quire.server.errors import bad_request

if TYPE_CHECKING:
    from quire.server.context import ServerContext


_MEDIA_TYPE = "application/x-ndjson"


def routes(context: ServerContext) -> list[Route]:
    """The feed, and the page that shows it."""

    async def live(request: HttpRequest) -> Response:
        for name in request.query_params:
            if name not in ("engine", "model"):
                raise bad_request(f"/live has no parameter {name}: it has model and engine", param=name)
        feed = context.choose(request).feed_of(request.query_params.get("engine"), context.states)
        if request.method == "HEAD":
            return Response(media_type=_MEDIA_TYPE)
        state = request.scope["state"]
        feed.check_room(state["tenant"])
        return StreamingResponse(
            feed.view(state["sees"], state["tenant"]),
            media_type=_MEDIA_TYPE,
            # A proxy that collects the stream before passing it on would show the past.
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    return [*page.routes(), Route("/live", live, methods=["GET"])]
