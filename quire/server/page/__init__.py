"""The live page's files, as they are: no build step, nothing fetched from elsewhere. They hold no data, so that they
can be served without a key; the page asks for one and sends it with what it asks of the server."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

HERE = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Only our own files run and only our own server is asked, whatever text a model or a user brings onto the page.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, but asked for again: an upgraded server brings its own page
}


@dataclass(slots=True, frozen=True)
class PageFile:
    body: bytes
    media_type: str
    etag: str


def read_files() -> dict[str, PageFile]:
    """Read everything that the page is made of, by name."""
    return {
        path.name: PageFile(body, TYPES[path.suffix], f'"{blake2b(body, digest_size=10).hexdigest()}"')
        for path in sorted(HERE.iterdir())
        if path.suffix in TYPES
        for body in (path.read_bytes(),)
    }


def routes() -> list[Route]:
    files = read_files()

    async def serve(request: HttpRequest) -> Response:
        file = files.get(request.path_params.get("name", "index.html"))
        if file is None:
            raise HTTPException(404)
        headers = HEADERS | {"etag": file.etag}
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if file.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    async def icon(request: HttpRequest) -> Response:
        request.path_params["name"] = "icon.svg"
        return await serve(request)

    return [
        Route("/", serve, methods=["GET"], include_in_schema=False),
        Route("/favicon.ico", icon, methods=["GET"], include_in_schema=False),
        Route("/static/{name}", serve, methods=["GET"], include_in_schema=False),
    ]
