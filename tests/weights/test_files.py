"""A pipe or a device in the place of a model's file is refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.errors import WeightsError
from quire.weights import open_checkpoint
from quire.weights.files import open_regular
from quire.weights.safetensors_checkpoint import list_tensors


def test_files_and_links_to_files(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as opened:
            assert opened.read() == b"abc"


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "endless", tmp_path):
        with pytest.raises(WeightsError, match="neither a file nor a link to one"):
            open_regular(path)
    with pytest.raises(WeightsError, match="missing"):
        open_regular(tmp_path / "absent")
    with pytest.raises(WeightsError, match="cannot be read"):
        open_regular(Path("a\0b"))


def test_a_pipe_in_a_models_directory(tmp_path, write_safetensors, small_tensors):
    directory = write_safetensors(small_tensors)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(WeightsError, match="neither a file"):
        open_checkpoint(pipe)
    for name in ("config.json", "model.safetensors"):
        (directory / name).rename(tmp_path / "kept")
        os.mkfifo(directory / name)
        with pytest.raises(WeightsError, match="neither a file"):
            list_tensors(open_checkpoint(directory).path)
        (directory / name).unlink()
        (tmp_path / "kept").rename(directory / name)
    only_gguf = tmp_path / "gguf"
    only_gguf.mkdir()
    os.mkfifo(only_gguf / "x.gguf")
    with pytest.raises(WeightsError, match="neither a file"):
        open_checkpoint(only_gguf)
