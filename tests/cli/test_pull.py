from __future__ import annotations

import json

import pytest

from quire.cli import pull
from quire.cli.main import main


@pytest.fixture
def pulled(monkeypatch, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 2_000_000)
    calls = []
    monkeypatch.setattr(pull, "pull_alias", lambda alias, **options: calls.append((alias.name, options)) or path)
    return path, calls


def test_the_default_model_is_checked_again(pulled, capsys):
    path, calls = pulled
    assert main(["pull"]) == 0
    assert calls[0][0] == "smollm2"
    assert calls[0][1]["verify"]
    out, err = capsys.readouterr()
    assert out == f"smollm2: 2 MB in {path}\n"
    assert err == ""


def test_json(pulled, capsys):
    path, _ = pulled
    assert main(["pull", "smollm2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": "smollm2", "path": str(path), "bytes": 2_000_000}


def test_hub_ids_and_errors_go_through_resolve(monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    calls = []
    monkeypatch.setattr(pull, "resolve_model", lambda model, **options: calls.append((model, options)) or tmp_path)
    assert main(["pull", "owner/name", "--revision", "v1"]) == 0
    assert calls == [("owner/name", {"revision": "v1"})]
    assert capsys.readouterr().out == f"owner/name: 2 B in {tmp_path}\n"


def test_a_path_that_is_not_there(capsys):
    assert main(["pull", "./absent"]) == 1
    assert "no such file or directory" in capsys.readouterr().err
