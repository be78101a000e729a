"""Adapters over HTTP: loaded, listed, chosen by the model field, and unloaded while somebody uses them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter_files
import pytest
from observing_fakes import eventually
from server_harness import Server, running

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.errors import ConfigError
from quire.server.settings import LoraModule, ServerSettings


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    model = adapter_files.write_model(root / "model")
    for number, name in enumerate("abc", 1):
        adapter_files.write_adapter(root / name, model, rank=3 * number, seed=number)
        adapter_files.write_merged(root / f"merged-{name}", model, root / name)
    return root


def settings(files: Path) -> dict[str, Any]:
    return {"model": str(files / "model"), "dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "device": "cpu"}


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[Server]:
    config = EngineConfig(**settings(files), enable_lora=True, max_loras=2, max_cpu_loras=2)
    with running(EngineClient(config), served_model_names=("base",)) as server:
        yield server


@pytest.fixture(scope="module")
def expected(files: Path) -> dict[str, str]:
    """What each model answers, with its adapter in its weights."""
    found = {}
    for name, folder in (("base", "model"), *((name, f"merged-{name}") for name in "abc")):
        llm = LLM(**settings(files) | {"model": str(files / folder)})
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, skip_special_tokens=False)
        found[name] = llm.generate("Hello there", params, use_tqdm=False)[0].outputs[0].text
    return found


def load(server: Server, files: Path, name: str, **more: Any) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(files / name), **more})


def unload(server: Server, name: str) -> Any:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def ask(server: Server, name: str, **more: Any) -> Any:
    body = {"model": name, "prompt": "Hello there", "temperature": 0, "max_tokens": 10, "ignore_eos": True}
    return server.post("/v1/completions", body | {"skip_special_tokens": False} | more)


def names(server: Server) -> list[str]:
    return [model["id"] for model in server.get("/v1/models").json()["data"]]


def test_loaded_listed_used_and_unloaded(server: Server, files: Path, expected: dict[str, str]) -> None:
    for name in "abc":
        reply = load(server, files, name)
        assert (reply.status, reply.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    assert names(server) == ["base", "a", "b", "c"]
    shown = server.get("/v1/models/a").json()
    assert (shown["parent"], shown["root"]) == ("base", str(files / "a"))

    answers: dict[str, Any] = {}

    def one(key: str, name: str) -> None:
        answers[key] = ask(server, name).json()

    threads = [threading.Thread(target=one, args=(f"{name}{i}", name)) for i in range(3) for name in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 12  # of three adapters, of which two at a time have a slot, and of none
    for key, answer in answers.items():
        assert (answer["model"], answer["choices"][0]["text"]) == (key[:-1], expected[key[:-1]])

    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6}
    plain = server.post("/v1/chat/completions", chat | {"model": "base"}).json()["choices"][0]["message"]["content"]
    for path, body in {
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "hi", "temperature": 0, "max_output_tokens": 16},
    }.items():
        reply = server.post(path, body | {"model": "a"})
        assert reply.status == 200 and reply.json()["model"] == "a", path
        assert plain not in reply.text

    for name in "abc":
        assert unload(server, name).text == f"Success: LoRA adapter '{name}' removed successfully."
    assert names(server) == ["base"]
    gone = ask(server, "a")
    assert gone.status == 404 and "'base'" in gone.json()["error"]["message"]


def test_one_in_use_finishes_what_it_has_begun(server: Server, files: Path, expected: dict[str, str]) -> None:
    load(server, files, "a")
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask(server, "a", max_tokens=200, n=8, temperature=0.01)))
    thread.start()
    eventually(lambda: server.get("/load").json()["num_running"] or answers)
    assert unload(server, "a").status == 200
    assert load(server, files, "b").status == 200
    assert ask(server, "b").json()["choices"][0]["text"] == expected["b"]
    thread.join()
    assert answers[0].status == 200 and answers[0].json()["choices"][7]["text"].startswith(expected["a"])
    unload(server, "b")


def test_another_of_the_same_name(server: Server, files: Path, expected: dict[str, str], tmp_path: Path) -> None:
    for name in "ab":
        reply = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(files / name)})
        assert reply.status == 200
        assert ask(server, "x").json()["choices"][0]["text"] == expected[name]
        unload(server, "x")
    load(server, files, "a")
    again = load(server, files, "a")
    assert again.status == 400 and "has already been loaded" in again.json()["error"]["message"]
    assert load(server, files, "a", load_inplace=True).status == 200
    unload(server, "a")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_name": "x"}, 400, "must be provided"),
        ({"lora_name": "x", "lora_path": "/nowhere/at/all"}, 400, "no such folder"),
        ({"lora_name": "x", "lora_path": "model"}, 400, "holds no adapter_config.json"),
        ({"lora_name": "base", "lora_path": "a"}, 400, "is the name of a model"),
        ({"lora_name": "x", "lora_path": "a", "base_model_name": "other"}, 404, "'other' is not here"),
        ({"lora_name": "x", "lora_path": "a", "color": "red"}, 400, "color"),
        ({"lora_name": "x", "lora_path": "wide"}, 400, "has rank 17, and max_lora_rank is 16"),
    ],
)
def test_what_is_refused(server: Server, files: Path, body: dict[str, Any], status: int, words: str) -> None:
    if body.get("lora_path") == "wide" and not (files / "wide").exists():
        adapter_files.write_adapter(files / "wide", files / "model", rank=17)
    if "lora_path" in body and not body["lora_path"].startswith("/"):
        body = body | {"lora_path": str(files / body["lora_path"])}
    reply = server.post("/v1/load_lora_adapter", body)
    assert reply.status == status and words in reply.json()["error"]["message"]
    assert names(server) == ["base"] and ask(server, "base").status == 200
    missing = unload(server, "x")
    assert missing.status == 404 and "cannot be found" in missing.json()["error"]["message"]


def test_a_model_that_is_split_among_ranks(files: Path, expected: dict[str, str]) -> None:
    config = EngineConfig(**settings(files), enable_lora=True, max_loras=2, tensor_parallel_size=2, num_threads=1)
    with running(EngineClient(config), served_model_names=("base",)) as server:
        for name in "abc":
            assert load(server, files, name).status == 200
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(files / "model")})
        assert refused.status == 400 and "holds no adapter_config.json" in refused.json()["error"]["message"]
        for name, text in expected.items():
            assert ask(server, name).json()["choices"][0]["text"] == text
        assert unload(server, "b").status == 200 and names(server) == ["base", "a", "c"]
        assert ask(server, "b").status == 404 and ask(server, "c").json()["choices"][0]["text"] == expected["c"]


def test_a_server_without_adapters(files: Path) -> None:
    with running(EngineClient(EngineConfig(**settings(files)))) as server:
        reply = load(server, files, "a")
        assert reply.status == 400 and "--enable-lora" in reply.json()["error"]["message"]


def test_modules_of_the_operator() -> None:
    chosen = ServerSettings(lora_modules=("a=/p=q", {"name": "b", "path": "/r", "base_model_name": "m"}))  # type: ignore[arg-type]
    assert chosen.lora_modules == (LoraModule("a", "/p=q"), LoraModule("b", "/r", "m"))
    for wrong in ("a", "=b", {"name": "a"}, {"name": "a", "path": 3}, {"name": "a", "path": "b", "c": "d"}):
        with pytest.raises(ConfigError, match="lora_modules must be NAME=PATH"):
            ServerSettings(lora_modules=(wrong,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two adapters are named 'a'"):
        ServerSettings(lora_modules=("a=b", "a=c"))  # type: ignore[arg-type]
