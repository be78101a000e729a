"""What a start on a GPU leaves for the planner."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.executor.gpu_record import GpuRecord, recall_gpu, remember_gpu

RECORD = GpuRecord(total_bytes=150_109_880_320, rest_bytes=775_000_000, key="k")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_last_record_of_each_gpu_is_kept(home: Path) -> None:
    assert recall_gpu("NVIDIA H200") is None
    remember_gpu("NVIDIA H200", GpuRecord(1, 1, "old"))
    remember_gpu("NVIDIA H200", RECORD)
    remember_gpu("NVIDIA L4", GpuRecord(24 << 30, 1 << 29, "other"))
    assert recall_gpu("NVIDIA H200") == RECORD
    assert recall_gpu("NVIDIA L4") == GpuRecord(24 << 30, 1 << 29, "other")
    assert [path.name for path in home.iterdir()] == ["gpu-memory.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"NVIDIA H200": 3}', '{"NVIDIA H200": {"total_bytes": 5}}',
             '{"NVIDIA H200": {"total_bytes": 5, "rest_bytes": 9, "key": "k"}}'],
)  # fmt: skip
def test_what_cannot_be_is_not_believed_and_is_written_over(home: Path, text: str) -> None:
    home.mkdir()
    (home / "gpu-memory.json").write_text(text)
    assert recall_gpu("NVIDIA H200") is None
    remember_gpu("NVIDIA H200", RECORD)
    assert recall_gpu("NVIDIA H200") == RECORD


def test_a_place_that_cannot_be_written_is_no_reason_to_fail(home: Path) -> None:
    home.write_text("a file where the folder should be")
    remember_gpu("NVIDIA H200", RECORD)
    assert recall_gpu("NVIDIA H200") is None
