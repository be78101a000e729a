"""A hub on loopback: as much of its API as fetching needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """`repos`: each one's files by name. Gives the address, for HF_ENDPOINT, and the paths as they are asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            asked.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in repos:
                return self._info("/".join(parts[2:4]), parts[4:], with_body)
            if "/".join(parts[:2]) in repos and parts[2:3] == ["resolve"]:
                data = repos["/".join(parts[:2])].get("/".join(parts[4:]))
                if data is not None:
                    return self._send(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'}, with_body)
                return self._refuse("EntryNotFound", with_body)
            return self._refuse("RepoNotFound", with_body)

        def _info(self, repo: str, rest: list[str], with_body: bool) -> None:
            files = [
                {
                    "type": "file",
                    "path": name,
                    "rfilename": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in repos[repo].items()
            ]
            answer = files if rest[:1] == ["tree"] else {"id": repo, "sha": _COMMIT, "siblings": files}
            self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"}, with_body)

        def _refuse(self, code: str, with_body: bool) -> None:
            self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, with_body, status=404)

        def _send(self, data: bytes, headers: Mapping[str, str], with_body: bool, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "X-Repo-Commit": _COMMIT, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
