"""A server with replicas: one port, one page of metrics, streams that outlive a replica, and replicas on demand."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from observing_fakes import eventually
from server_harness import Server, running
from sim_engine import SimSettings, sim_options

from quire.config import EngineConfig
from quire.engine.api import EngineLoad
from quire.router.replicas import ReplicaSet
from quire.router.scaling import ScalingTargets, desired_replicas
from quire.server.settings import ApiKey

NUM_STREAMS = 6


def group_of(model: Path) -> ReplicaSet:
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu", block_size=4)
    return ReplicaSet(config, 2, sim_options(SimSettings(step_s=0.02)))


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with running(group_of(tiny_model), served_model_names=("tiny",)) as server:
        yield server


def post_body(index: int, stream: bool) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"{index} is the number of this prompt",
        "max_tokens": 150,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": stream,
    }


def read_stream(server: Server, index: int, on_chunk: Any) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        body = json.dumps(post_body(index, True))
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        text, is_done = "", False
        for raw in response:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
                on_chunk(index, text)
        assert is_done
        return text
    finally:
        connection.close()


def test_streams_do_not_notice_that_a_replica_is_killed(server: Server) -> None:
    def ask(index: int) -> str:
        return str(server.post("/v1/completions", post_body(index, False)).json()["choices"][0]["text"])

    seen: set[int] = set()
    all_begun, lock = threading.Event(), threading.Lock()

    def on_chunk(index: int, text: str) -> None:
        with lock:
            if len(text) >= 3:
                seen.add(index)
            if len(seen) == NUM_STREAMS:
                all_begun.set()

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        expected = list(pool.map(ask, range(2)))
        streams = [pool.submit(read_stream, server, i, on_chunk) for i in range(NUM_STREAMS)]
        assert all_begun.wait(60)
        victim = next(one for one in server.get("/debug/replicas").json()["replicas"] if one["num_sequences"])
        os.kill(victim["pid"], signal.SIGKILL)
        texts = [stream.result(60) for stream in streams]
        assert texts[:2] == expected
        assert texts == list(pool.map(ask, range(NUM_STREAMS)))
    report = server.get("/debug/replicas").json()
    assert report["num_moved_requests"] > 0
    assert server.get("/health").status == 200
    wait_until_ready(server, 2)


def wait_until_ready(server: Server, count: int) -> None:
    def states() -> list[str]:
        return [one["state"] for one in server.get("/debug/replicas").json()["replicas"]]

    eventually(lambda: states() == ["ready"] * count)


def test_metrics_say_which_engine(server: Server) -> None:
    wait_until_ready(server, 2)
    server.post("/v1/completions", post_body(1, False))
    page = server.get("/metrics").text
    assert {f'engine="{name}"' in page for name in ("0", "1", "all")} == {True}
    states = [line for line in page.splitlines() if line.startswith("quire:engine_state{") and line.endswith(" 1.0")]
    assert len(states) == 2 and all('state="ready"' in line for line in states)
    assert page.count("# TYPE vllm:kv_cache_usage_perc gauge") == 1
    requests = [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
    assert requests and all('engine="all"' in line for line in requests)


def test_the_page_and_the_inspections_look_at_one_replica(server: Server) -> None:
    wait_until_ready(server, 2)
    for name in ("0", "1"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", f"/live?engine={name}")
        response = connection.getresponse()
        hello, status = (json.loads(response.readline()) for _ in range(2))
        connection.close()
        assert (hello["type"], hello["engine"]) == ("hello", name)
        assert (status["type"], status["engines"]) == ("status", ["0", "1"])
        assert server.get(f"/debug/kv/map?engine={name}").status == 200
    assert server.get("/live?engine=9").status == server.get("/debug/kv?engine=9").status == 404


def test_replicas_come_and_go_while_it_serves(tiny_model: Path) -> None:
    with running(group_of(tiny_model), served_model_names=("tiny",)) as server:
        added = server.post("/debug/replicas", {"action": "add"})
        assert (added.status, added.json()["engine"]) == (200, "2"), added.text
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(read_stream, server, 0, lambda *_: begun.set())
            assert begun.wait(60)
            for name in ("0", "1"):
                assert server.post("/debug/replicas", {"action": "remove", "engine": name}).status == 200
            text = stream.result(60)
        assert text == server.post("/v1/completions", post_body(0, False)).json()["choices"][0]["text"]
        assert [one["engine"] for one in server.get("/debug/replicas").json()["replicas"]] == ["2"]
        wrong = [
            {"action": "remove", "engine": "2"},
            {"action": "drain", "engine": "7"},
            {"action": "drain"},
            {"action": "add", "engine": "3"},
            {"action": "stop"},
            {},
        ]
        for body in wrong:
            reply = server.post("/debug/replicas", body)
            assert reply.status == 400, (body, reply.text)
        assert server.request("POST", "/debug/replicas", b"{}").status == 415


def test_only_an_admin_changes_replicas(tiny_model: Path) -> None:
    keys = (ApiKey("a", "key-a", False), ApiKey("b", "key-b", True))
    with running(group_of(tiny_model), api_keys=keys) as server:
        drain = {"action": "drain", "engine": "1"}
        assert server.post("/debug/replicas", drain, authorization="Bearer key-a").status == 403
        assert server.post("/debug/replicas", drain).status == 401
        reply = server.post("/debug/replicas", drain, authorization="Bearer key-b")
        assert reply.status == 200 and reply.json()["replicas"][1]["draining"]
        undrain = server.post("/debug/replicas", drain | {"action": "undrain"}, authorization="Bearer key-b")
        assert undrain.status == 200 and not undrain.json()["replicas"][1]["draining"]


def test_the_number_of_replicas_that_a_load_wants() -> None:
    idle = EngineLoad()
    busy = EngineLoad(num_running=8, num_waiting_tokens=4_000, prefill_tokens_per_s=1_000.0, decode_step_s=0.05)
    slow = EngineLoad(num_running=8, prefill_tokens_per_s=1_000.0, decode_step_s=0.3)
    full = EngineLoad(num_running=8, kv_usage=0.99)
    assert desired_replicas([]) == desired_replicas([idle]) == desired_replicas([idle] * 4) == 1
    assert desired_replicas([busy]) == 4 and desired_replicas([busy, busy]) == 8
    assert desired_replicas([busy, idle]) == 2 * 2
    assert desired_replicas([slow]) == 3 and desired_replicas([full] * 3) == 4
    assert desired_replicas([EngineLoad(num_waiting_tokens=10)]) == 2
    assert desired_replicas([busy] * 9, ScalingTargets(max_replicas=12)) == 12
    steady = EngineLoad(num_running=8, decode_step_s=0.105)
    assert desired_replicas([steady] * 3) == 3  # near enough to its target
