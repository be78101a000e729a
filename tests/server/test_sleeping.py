"""Two models in one server, in real processes: names, sleep, turns, a killed engine, loading and unloading."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
from serve_fakes import Server, running
from server_harness import ScriptedEngine
from server_harness import running as in_process

from quire.server.settings import ApiKey

FLAGS = ("--load-format", "dummy", "--max-model-len", "128", "--kv-cache-memory-bytes", "2MiB", "--num-threads", "1")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.write_tiny_model(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def server(tiny_model: Path, other_model: Path) -> Iterator[Server]:
    names = ("--served-model-name", "a", "b", "--seed", "5")
    command = ["-m", "quire", "serve", str(tiny_model), str(other_model), "--port", "0", *FLAGS, *names]
    with running(command) as server:
        server.wait_for("ready at .* as b")
        yield server
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


def ask(server: Server, model: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": [*range(60)], "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    status, answer, _ = server.post("/v1/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]


def states(server: Server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.get("/v1/models")[1]["data"]}


def child_pids(server: Server) -> set[int]:
    found = set()
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in found if b"quire.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_models_are_changed_by_an_admin_alone(tiny_model: Path) -> None:
    keys = (ApiKey("team", "sk-team"), ApiKey("ops", "sk-ops", is_admin=True))
    with in_process(ScriptedEngine(tiny_model), api_keys=keys) as server:
        for path in ("/sleep", "/wake_up", "/v1/models/load", "/v1/models/unload"):
            reply = server.post(path, {"model": "tiny"}, authorization="Bearer sk-team")
            assert (reply.status, reply.json()["error"]["code"]) == (403, "admin_only")
            assert server.post(path, {"model": "tiny"}, authorization="Bearer sk-ops").status == 400  # not this engine


def test_each_answers_under_its_name_and_is_shown(server: Server) -> None:
    assert states(server) == {"a": "ready", "b": "ready"}
    assert ask(server, "a")[0] == ask(server, "b")[0] == 200
    status, error = ask(server, "c")
    assert (status, error["code"]) == (404, "model_not_found") and "'a' or 'b'" in error["message"]
    load = server.get("/load")[1]
    assert set(load["models"]) == {"a", "b"} and "kv_usage" in load["models"]["b"]
    assert server.get("/load?model=b")[1]["state"] == "ready"
    assert server.get("/load?model=c")[0] == 404
    for path in ("/debug/kv", "/debug/kv/map", "/debug/kv/levels"):
        assert server.get(f"{path}?model=b")[0] == 200
        assert server.get(f"{path}?model=c")[0] == 404
    message = {"model": "b", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    assert server.post("/v1/messages", message)[1]["model"] == "b"
    assert server.post("/v1/responses", {"model": "b", "input": "x", "max_output_tokens": 4})[1]["model"] == "b"


@pytest.mark.parametrize("query", ["level=1", "level=1&keep_kv=true"])
def test_a_request_wakes_a_sleeping_model_and_has_the_same_answer(server: Server, query: str) -> None:
    before = ask(server, "a")
    assert before[0] == 200
    assert server.post(f"/sleep?model=a&{query}", {})[1] == {"models": {"a": "sleeping"}}
    assert server.get("/is_sleeping?model=a")[1] == {"is_sleeping": True}
    assert server.get("/is_sleeping")[1] == {"is_sleeping": False}  # not all of them
    assert states(server) == {"a": "sleeping", "b": "ready"}
    assert server.post("/tokenize", {"model": "a", "prompt": "x"})[0] == 200  # which wakes nobody
    assert states(server)["a"] == "sleeping" and server.get("/health")[0] == 200
    assert ask(server, "a") == before
    assert states(server)["a"] == "ready"


def test_waking_by_hand_and_what_is_refused(server: Server) -> None:
    assert server.post("/sleep", {})[1]["models"] == {"a": "sleeping", "b": "sleeping"}
    assert server.get("/is_sleeping")[1] == {"is_sleeping": True}
    assert server.post("/wake_up?model=b", {})[1]["models"] == {"b": "ready"}
    assert states(server) == {"a": "sleeping", "b": "ready"}
    for path in ("/sleep?level=3", "/sleep?level=2&keep_kv=true", "/sleep?tags=weights", "/wake_up?level=1"):
        assert server.post(path, {})[0] == 400
    assert server.post("/sleep?model=c", {})[0] == 404
    assert server.post("/wake_up", {})[1]["models"] == {"a": "ready", "b": "ready"}


def test_a_killed_engine_takes_no_other_down(server: Server) -> None:
    before = child_pids(server)
    expected = ask(server, "b")
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.extend(ask(server, "a", max_tokens=60) for _ in range(5)))
    asking.start()
    victim = max(before)  # b's was started last
    os.kill(victim, signal.SIGKILL)
    began_s = time.monotonic()
    while (found := ask(server, "b"))[0] != 200:
        assert found[0] == 503 and found[1]["code"] in ("model_unavailable", "engine_dead"), found
        assert server.get("/health")[0] == 200
        assert time.monotonic() - began_s < 60.0
        time.sleep(0.05)
    asking.join()
    assert [status for status, _ in answers] == [200] * 5
    assert ask(server, "b") == expected
    assert states(server) == {"a": "ready", "b": "ready"}
    assert victim not in child_pids(server)


def test_models_come_and_go_while_it_serves(server: Server, tiny_model: Path) -> None:
    full = server.post("/v1/models/load", {"model": str(tiny_model), "name": "c"})
    assert full[0] == 400 and "memory_share" in full[1]["error"]["message"]
    twice = server.post("/v1/models/load", {"model": str(tiny_model), "name": "b", "memory_share": 0.5})
    assert twice[0] == 400 and "two models are named 'b'" in twice[1]["error"]["message"]
    loaded = server.post("/v1/models/load", {"model": str(tiny_model), "name": "c", "memory_share": 0.9})
    assert loaded[1] == {"id": "c", "state": "ready"}
    assert list(states(server).values()).count("ready") == 1, "the others had to make room"
    assert ask(server, "c")[0] == ask(server, "a")[0] == 200
    assert server.post("/v1/models/unload", {"model": "c"})[1]["state"] == "unloaded"
    assert ask(server, "c")[0] == 404 and ask(server, "a")[0] == 200
    assert len(child_pids(server)) == 2
