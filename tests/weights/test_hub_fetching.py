"""Fetching from a hub as a user does it: our commands, its library, a server on loopback that speaks its API."""

from __future__ import annotations

import json

import fakes
import pytest
from huggingface_hub import constants
from weights import fake_hub

from quire.cli.main import main

GGUF = "tiny-q4_k_m.gguf"


@pytest.fixture
def use_hub(tmp_path, monkeypatch):
    """From now on, the hub is at this address."""

    def use(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return use


@pytest.fixture
def quire(capsys):
    def run(*arguments: str, fails: bool = False) -> str:
        assert (main(list(arguments)) != 0) is fails
        out, err = capsys.readouterr()
        return err if fails else out

    return run


def here(quire) -> list[dict]:
    return [row for row in json.loads(quire("models", "--json")) if row["cached"]]


def test_a_gguf_file_by_its_quantization_from_pull_to_rm(quire, use_hub, tmp_path, write_gguf):
    content = write_gguf().read_bytes()
    files = {GGUF: content, "tiny-q8_0.gguf": b"x" * 1000, "README.md": b"text"}
    with fake_hub.serve({"owner/tiny-GGUF": files}) as (address, asked):
        use_hub(address)
        pulled = json.loads(quire("pull", "owner/tiny-GGUF:Q4_K_M", "--json"))
        assert pulled["path"].endswith(GGUF) and pulled["bytes"] == len(content)
        assert not any("q8_0" in path for path in asked)
        assert "no GGUF file that is quantized as Q5_0" in quire("pull", "owner/tiny-GGUF:Q5_0", fails=True)
        assert "does not exist or is private" in quire("pull", "owner/absent:Q4_0", fails=True)
    # The hub is gone: what is here is still found by the same name, and without one.
    use_hub("http://127.0.0.1:1")
    for model in ("owner/tiny-GGUF:q4_k_m", "owner/tiny-GGUF"):
        assert json.loads(quire("pull", model, "--json"))["path"] == pulled["path"]
    assert "hub cannot be reached" in quire("pull", "owner/other:Q4_0", fails=True)
    (row,) = here(quire)
    assert (row["model"], row["bytes"]) == (f"owner/tiny-GGUF:{GGUF}", len(content))
    assert "removed owner/tiny-GGUF" in quire("rm", "owner/tiny-GGUF:Q4_K_M")
    assert not list((tmp_path / "hub").glob("models--*"))


def test_safetensors_by_an_alias(quire, use_hub, tmp_path):
    files = {"config.json": json.dumps(fakes.TINY_LLAMA).encode(), "model.safetensors": b"1" * 100, "x.bin": b"2"}
    with fake_hub.serve({"Qwen/Qwen3-0.6B": files}) as (address, asked):
        use_hub(address)
        pulled = json.loads(quire("pull", "qwen3-0.6b", "--json"))
    assert pulled["bytes"] == 100 + len(files["config.json"])
    assert not any("x.bin" in path for path in asked)
    (row,) = here(quire)
    assert (row["model"], row["licence"], row["bytes"]) == ("qwen3-0.6b", "Apache-2.0", pulled["bytes"])
    quire("rm", "Qwen/Qwen3-0.6B")
    assert not list((tmp_path / "hub").glob("models--*"))
