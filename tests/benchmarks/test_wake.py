from __future__ import annotations

from pathlib import Path

import fakes
import pytest

from benchmarks import wake


def test_each_sleep_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fakes.write_tiny_model(tmp_path / "model")
    settings = '{"load_format": "dummy", "num_threads": 1, "kv_cache_memory_bytes": 4000000}'
    assert wake.main(["--model", str(model), "--sleeps", "2", "--kwargs", settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["1", "2"]
    assert all(len(line.split()) == 6 for line in lines[-2:])


def test_a_bad_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wake.main(["--model", str(tmp_path / "none")]) == 2
    assert "error" in capsys.readouterr().err
