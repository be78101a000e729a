from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from observing_fakes import ToldEngine
from starlette.applications import Starlette
from starlette.testclient import TestClient

from quire.engine.api import EngineHealth, EngineLoad, EngineState
from quire.server.app import make_route
from quire.server.life import ServerLife
from quire.server.paths import OPERATIONS, Operation
from quire.server.status import show_load


def client(state: EngineState, life: ServerLife) -> TestClient:
    engine = SimpleNamespace(health=lambda: EngineHealth(state, "see /var/dumps/secret"))
    context: Any = SimpleNamespace(models=[SimpleNamespace(engine=engine)], life=life)
    paths = [op for op in OPERATIONS["Operation"] if op.path in ("/health", "/ping")]
    return TestClient(Starlette(routes=[make_route(op, context) for op in paths]))


@pytest.fixture
def life() -> ServerLife:
    life = ServerLife()
    life.ready()
    return life


def test_200_while_the_engine_is_idle_or_makes_progress(life: ServerLife) -> None:
    answer = client(EngineState.READY, life).get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["cache-control"] == "no-store"
    assert client(EngineState.READY, life).head("/health").status_code == 200
    for method in ("GET", "POST"):
        assert client(EngineState.READY, life).request(method, "/ping").status_code == 200
        assert client(EngineState.STUCK, life).request(method, "/ping").status_code == 503


@pytest.mark.parametrize("state", [EngineState.STUCK, EngineState.DEAD])
def test_503_and_why_for_an_engine_that_is_not_well(state: EngineState, life: ServerLife) -> None:
    answer = client(state, life).get("/health")
    assert answer.status_code == 503
    assert answer.json()["status"] == state.value
    assert answer.json()["reason"]
    assert "secret" not in answer.text
    assert int(answer.headers["retry-after"]) > 0


def test_503_while_starting_draining_and_after_death() -> None:
    life = ServerLife()
    seen = []
    for change in (lambda: None, life.ready, life.begin_drain, lambda: life.died("/path")):
        change()
        answer = client(EngineState.READY, life).get("/health")
        seen.append((answer.status_code, answer.json()["status"]))
        assert "/path" not in answer.text
    assert seen == [(503, "starting"), (200, "ok"), (503, "draining"), (503, "dead")]


def test_load_says_how_busy_server_and_engine_are() -> None:
    engine = ToldEngine()
    engine.now_load = EngineLoad(num_running=3, num_waiting=2, num_waiting_tokens=90, kv_usage=0.25, brownout_level=1)
    served = SimpleNamespace(engine=engine)
    context = SimpleNamespace(models=[served], choose=lambda _: served, life=SimpleNamespace(num_in_flight=5))
    route = make_route(Operation("get", "/load", show_load), context)  # type: ignore[arg-type]
    with TestClient(Starlette(routes=[route])) as client:
        assert client.get("/load").json() == {
            "server_load": 5,
            "state": "ready",
            "num_running": 3,
            "num_waiting": 2,
            "num_waiting_tokens": 90,
            "kv_usage": 0.25,
            "tokens_per_s": 0.0,
            "brownout_level": 1,
        }
