from __future__ import annotations

from types import SimpleNamespace

from observing_fakes import ToldEngine
from starlette.applications import Starlette
from starlette.testclient import TestClient

from quire.engine.api import EngineLoad
from quire.server.app import make_route
from quire.server.paths import Operation
from quire.server.status import show_load


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
