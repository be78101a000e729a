from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from quire.server.guards import Gate
from quire.server.life import ServerLife


class Bench:
    def __init__(self) -> None:
        self.life = ServerLife()
        self.refused: list[str] = []

        async def answer(request: Request) -> JSONResponse:
            return JSONResponse(self.life.num_in_flight)

        paths = ("/", "/health", "/metrics", "/v1/completions")
        app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in paths])
        self.client = TestClient(Gate(app, self.life, self.refused.append))


def test_a_serving_server_counts_the_work_under_way() -> None:
    bench = Bench()
    bench.life.ready()
    assert bench.client.post("/v1/completions").json() == 1
    assert bench.client.get("/metrics").json() == 0
    assert bench.life.num_in_flight == 0


@pytest.mark.parametrize("state", ["starting", "dead"])
def test_starting_and_dead_serve_health_and_the_page_alone(state: str) -> None:
    bench = Bench()
    if state == "dead":
        bench.life.died("reason")
    assert bench.client.get("/health").status_code == 200
    assert bench.client.get("/").status_code == 200
    for answer in (bench.client.get("/metrics"), bench.client.post("/v1/completions")):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == state
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["connection"] == "close"
    assert bench.refused == [state, state]


def test_draining_serves_gets_and_takes_no_work() -> None:
    bench = Bench()
    bench.life.ready()
    bench.life.begin_drain()
    assert bench.client.get("/metrics").status_code == 200
    assert bench.client.post("/v1/completions").json()["error"]["code"] == "draining"
