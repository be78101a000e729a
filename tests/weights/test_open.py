from __future__ import annotations

import json
import subprocess
import sys

import pytest

from quire.errors import ConfigError, WeightsError
from quire.weights import open_checkpoint
from quire.weights.dummy import DummyCheckpoint
from quire.weights.gguf_checkpoint import GGUFCheckpoint
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
