from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import ConfigError, WeightsError
from quire.weights import open as opening
from quire.weights import open_checkpoint, resolve_model
from quire.weights.gguf_checkpoint import GGUFCheckpoint
from quire.weights.open import DummyCheckpoint
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint


def test_by_what_is_there(write_safetensors, small_tensors, write_gguf, tmp_path):
    assert isinstance(open_checkpoint(write_safetensors(small_tensors)), SafetensorsCheckpoint)
    path = write_gguf(name="blob-without-suffix")
    assert isinstance(open_checkpoint(path), GGUFCheckpoint)
    directory = tmp_path / "dir"
    directory.mkdir()
    path.rename(directory / "only.gguf")
    opened = open_checkpoint(directory)
    assert isinstance(opened, GGUFCheckpoint)
    assert opened.path == directory / "only.gguf"


def test_dummy_needs_a_config_only(tmp_path, write_gguf):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    for path in (tmp_path, tmp_path / "config.json"):
        checkpoint = open_checkpoint(path, load_format="dummy", hf_overrides={"x": 1})
        assert isinstance(checkpoint, DummyCheckpoint)
        assert checkpoint.config == {"hidden_size": 4, "x": 1}
        assert checkpoint.path == tmp_path
    checkpoint = open_checkpoint(write_gguf(), load_format="dummy")
    assert isinstance(checkpoint, DummyCheckpoint)
    assert checkpoint.config["hidden_size"] == 32
    assert checkpoint.gguf_metadata is not None


def test_refusals(tmp_path, write_gguf, write_safetensors, small_tensors):
    with pytest.raises(ConfigError, match="load_format must be one of auto, safetensors, gguf, dummy, got 'pt'"):
        open_checkpoint(tmp_path, load_format="pt")
    with pytest.raises(WeightsError, match="no such file or directory"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=r"config.json: missing"):
        open_checkpoint(tmp_path / "empty")
    with pytest.raises(WeightsError, match=r"no .gguf file is there: give a directory that holds a model"):
        open_checkpoint(tmp_path / "empty")
    directory = write_safetensors(small_tensors)
    with pytest.raises(WeightsError, match="give the directory"):
        open_checkpoint(directory / "model.safetensors")
    with pytest.raises(WeightsError, match=r"expected one .gguf file, there are 0 \(none\)"):
        open_checkpoint(directory, load_format="gguf")
    write_gguf(name="a.gguf")
    write_gguf(name="b.gguf")
    with pytest.raises(WeightsError, match=r"there are 2 \(a.gguf, b.gguf\): give the file's path"):
        open_checkpoint(tmp_path)


def test_the_package_imports_neither_torch_nor_numpy():
    code = "import sys, quire.weights; print([m for m in ('torch', 'numpy', 'gguf') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def randomized(recorder, names, seed):
    recorded = recorder(dict.fromkeys(names, (2,)))
    DummyCheckpoint(Path("x"), {}).load_into(recorded.slots, lambda name: False, seed=seed)
    return recorded.randomized


def test_each_slot_has_its_own_seed_whatever_the_order(recorder):
    first = randomized(recorder, ["a", "b"], 0)
    assert first == randomized(recorder, ["b", "a"], 0)
    assert first["a"] != first["b"]
    assert first != randomized(recorder, ["a", "b"], 1)
    assert {std for std, _ in first.values()} == {0.02}


def test_progress(recorder):
    recorded = recorder({"a": (1,), "b": (1,)})
    calls = []
    checkpoint = DummyCheckpoint(Path("x"), {})
    checkpoint.load_into(recorded.slots, lambda name: False, progress=lambda *args: calls.append(args))
    assert calls == [(1, 2), (2, 2)]


@pytest.fixture
def hub(monkeypatch):
    calls = []

    def fetch(repo, **options):
        calls.append((repo, options))
        return Path("/hub") / repo

    monkeypatch.setattr(opening, "fetch_from_hub", fetch)
    return calls


def test_paths_that_exist_are_themselves(tmp_path, hub, monkeypatch):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/x.gguf") == file
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("owner/name") == Path("owner/name")
    assert hub == []


@pytest.mark.parametrize(
    "model", ["./x", "/no/such", "a/b/c", "~/x", "x.gguf", "dir/x.safetensors", "../absent", "C:\\x"]
)
def test_what_looks_like_a_path_must_exist(model, hub):
    with pytest.raises(WeightsError, match="no such file or directory"):
        resolve_model(model)
    assert hub == []


@pytest.mark.parametrize("model", ["owner/name", "Qwen/Qwen3-0.6B", "gpt2"])
def test_the_rest_are_hub_ids(model, hub):
    assert resolve_model(model, revision="v1") == Path("/hub") / model
    assert resolve_model(model, load_format="dummy") == Path("/hub") / model
    assert hub == [
        (model, {"revision": "v1", "config_only": False, "cache_dir": None}),
        (model, {"revision": None, "config_only": True, "cache_dir": None}),
    ]


def test_a_file_of_a_repository_and_short_names(hub, monkeypatch, tmp_path):
    chosen = []
    monkeypatch.setattr(opening, "fetch_gguf", lambda repo, wanted, **_: chosen.append((repo, wanted)) or Path("/x"))
    for model in ("owner/name-GGUF:Q4_K_M", "owner/name:sub/file-q8_0.gguf"):
        resolve_model(model)
    assert chosen == [("owner/name-GGUF", "Q4_K_M"), ("owner/name", "sub/file-q8_0.gguf")]
    assert resolve_model("qwen3-0.6b", revision="v1") == Path("/hub/Qwen/Qwen3-0.6B")
    # A folder of the same name is not what is meant by an alias.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-0.6b").mkdir()
    assert resolve_model("qwen3-0.6b") == Path("/hub/Qwen/Qwen3-0.6B")
    for model in ("owner/name:", "name:Q4_K_M", "owner/name:a b"):
        with pytest.raises(WeightsError, match="no such file or directory"):
            resolve_model(model)


def test_a_use_is_noted(hub, monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"x")
    os.utime(tmp_path / "model.gguf", (0, 0))
    monkeypatch.setattr(opening, "fetch_from_hub", lambda repo, **_: tmp_path)
    resolve_model("owner/name", load_format="dummy")
    assert (tmp_path / "model.gguf").stat().st_atime == 0
    resolve_model("owner/name")
    stat = (tmp_path / "model.gguf").stat()
    assert stat.st_atime > 1e9 and stat.st_mtime == 0


def test_aliases_are_pulled(monkeypatch, hub, tmp_path):
    pulled = []
    monkeypatch.setattr(
        opening, "pull_alias", lambda alias, **options: pulled.append((alias.name, options)) or tmp_path
    )
    progress = lambda done, total: None  # noqa: E731
    assert resolve_model("smollm2", on_progress=progress) == tmp_path
    assert pulled == [("smollm2", {"home": None, "on_progress": progress})]
    # A folder of the caller's is used for both kinds of what is fetched.
    monkeypatch.setenv("HOME", str(tmp_path))
    resolve_model("smollm2", download_dir="~/models", on_progress=progress)
    resolve_model("owner/name", download_dir="~/models")
    assert pulled[1] == ("smollm2", {"home": tmp_path / "models", "on_progress": progress})
    assert hub[0][1]["cache_dir"] == tmp_path / "models"


def test_names_that_are_refused(tmp_path, hub):
    with pytest.raises(ConfigError, match="model is empty"):
        resolve_model("")
    with pytest.raises(ConfigError, match="load_format"):
        resolve_model("owner/name", load_format="npz")
    for model in ("smollm2", str(tmp_path)):
        with pytest.raises(ConfigError, match="revision='v1' is for hub ids"):
            resolve_model(model, revision="v1")
