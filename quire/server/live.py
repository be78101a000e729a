"""`/live`: the stream of lines that the page at `/` draws from. Any client may read it:

curl -N -H "Authorization: Bearer KEY" http://127.0.0.1:8000/live
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import quire
from quire.params import for_chat
from quire.server import page
from quire.server.errors import bad_request
from quire.server.feed import LiveFeed

if TYPE_CHECKING:
    from quire.server.context import ServerContext


_MEDIA_TYPE = "application/x-ndjson"


def routes(context: ServerContext) -> list[Route]:
    """The feed, and the page that shows it."""
    feed = LiveFeed(context.engine, context.metrics, context.life, hello=lambda: hello(context))

    async def live(request: HttpRequest) -> Response:
        for name in request.query_params:
            raise bad_request(f"/live has no parameter {name}", param=name)
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


def hello(context: ServerContext) -> dict[str, Any]:
    info = context.engine.info
    sampling = for_chat(context.engine.default_sampling)
    return {
        "version": quire.__version__,
        "model": (*context.settings.served_model_names, info.model)[0],
        "device": info.device,
        "dtype": info.dtype,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "num_host_blocks": info.num_host_blocks,
        "block_bytes": info.block_bytes,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "enable_prefix_caching": info.enable_prefix_caching,
        "chat": {"temperature": sampling.temperature, "top_p": sampling.top_p},
    }
