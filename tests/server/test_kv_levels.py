"""Levels of the KV cache through a whole server: an operator looks, warms, pins and expires; restarts find prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from observing_fakes import eventually
from server_harness import Server, running

from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.server.metric_names import NAMES
from quire.server.settings import ApiKey

PROMPT = "You are the librarian of a small library by the sea, and you answer in few words."
KEYS = (ApiKey("one", "key-of-one-1"), ApiKey("ops", "key-of-ops-3", is_admin=True))


@contextmanager
def serving(model: Path, disk: Path, **settings: Any) -> Iterator[Server]:
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        device="cpu",
        num_threads=1,
        block_size=4,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=4 << 20,
        kv_disk_path=str(disk),
        kv_disk_size=8 << 20,
    )
    with running(EngineClient(config), served_model_names=("tiny",), **settings) as server:
        yield server


def post(server: Server, **body: Any) -> Any:
    reply = server.post("/debug/kv/levels", body)
    assert reply.status == 200, reply.text
    return reply.json()


def level(server: Server, name: str) -> dict[str, Any]:
    levels = server.get("/debug/kv/levels").json()["levels"]
    return next(entry for entry in levels if entry["level"] == name)


def test_an_operators_day(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tiny_model, tmp_path) as server:
        warmed = post(server, action="warm", prompt=PROMPT)
        assert warmed["num_cached_tokens"] == 0 and warmed["num_tokens"] > 40
        num_blocks = warmed["num_tokens"] // 4
        eventually(lambda: level(server, "disk")["num_blocks"] >= num_blocks)
        assert level(server, "disk")["moved_bytes"] > 0 and level(server, "device")["num_blocks"] >= num_blocks
    with serving(tiny_model, tmp_path) as server:
        reply = server.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= (num_blocks - 1) * 4
        names = {line.split("{")[0] for line in server.get("/metrics").text.splitlines() if "kv_level_" in line}
        assert {name for name in names if not name.startswith("#")} <= NAMES.keys()
        metrics = server.get("/metrics").text
        assert "vllm:external_prefix_cache_hits_total{" in metrics and 'level="disk"' in metrics
        assert post(server, action="pin", prompt=PROMPT)["num_tokens"] == num_blocks * 4
        assert post(server, action="unpin", prompt=PROMPT)["num_tokens"] == num_blocks * 4
        assert post(server, action="expire", prompt=PROMPT)["num_tokens"] == num_blocks * 4
        assert post(server, action="warm", prompt=PROMPT)["num_cached_tokens"] == 0
        url = ["--url", f"http://127.0.0.1:{server.port}"]
        assert main(["kv", "levels", *url]) == 0
        assert "disk: " in capsys.readouterr().out
        assert main(["kv", "warm", "--prompt", PROMPT, *url]) == 0
        assert json.loads(capsys.readouterr().out)["num_tokens"] == warmed["num_tokens"]
        assert main(["kv", "expire", "--older-than", "1e9", *url]) == 0
        assert json.loads(capsys.readouterr().out) == {"num_blocks": 0}
        assert main(["kv", "warm", *url]) == 1
        assert "prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"action": "warm"}, "prompt"),
        ({"action": "warm", "prompt": ""}, "prompt"),
        ({"action": "pin", "prompt": [1, 10**9]}, "prompt"),
        ({"action": "warm", "older_than_s": 3}, "older_than_s"),
        ({"action": "expire", "older_than_s": -1}, "older_than_s"),
        ({"action": "warm", "prompt": "a", "tenant": "nobody"}, "tenant"),
        ({"action": "melt"}, None),
    ],
)
def test_what_is_refused(real: Server, body: dict[str, Any], param: str | None) -> None:
    reply = real.post("/debug/kv/levels", body)
    assert reply.status == 400
    assert param is None or reply.json()["error"]["param"] == param


@pytest.fixture(scope="module")
def real(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_model, tmp_path_factory.mktemp("levels")) as server:
        yield server


def test_it_is_for_admins(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, api_keys=KEYS) as server:
        for key, status in (("key-of-one-1", 403), ("key-of-ops-3", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert server.request("GET", "/debug/kv/levels", **headers).status == status
            body = {"action": "warm", "prompt": "a b c", "tenant": "one"}
            assert server.post("/debug/kv/levels", body, **headers).status == status
