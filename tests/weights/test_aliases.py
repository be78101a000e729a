from __future__ import annotations

import re
from pathlib import Path

from quire.weights.aliases import ALIASES, HUB_ALIASES, alias_names, quire_home


def test_home(monkeypatch):
    monkeypatch.setenv("QUIRE_HOME", "~/elsewhere")
    assert quire_home() == Path("~/elsewhere").expanduser()
    monkeypatch.delenv("QUIRE_HOME")
    assert quire_home() == Path("~/.cache/quire").expanduser()


def test_every_alias_is_pinned():
    for name, alias in ALIASES.items():
        assert name == alias.name
        assert alias.file_name.endswith(".gguf")
        assert len(alias.wheel_sha256) == len(alias.member_sha256) == 64
        assert alias.licence


def test_short_names_of_the_hub():
    assert all(alias.name == name and alias.licence for name, alias in HUB_ALIASES.items())
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", alias.repo) for alias in HUB_ALIASES.values())
    assert len({alias.repo for alias in HUB_ALIASES.values()}) == len(HUB_ALIASES)
    assert len(set(alias_names())) == len(alias_names())


def test_only_a_file_of_the_right_size_counts(tmp_path):
    alias = ALIASES["smollm2"]
    assert not alias.is_cached(tmp_path)
    path = alias.path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"partial")
    assert not alias.is_cached(tmp_path)
    with path.open("r+b") as file:
        file.truncate(alias.member_bytes)
    assert alias.is_cached(tmp_path)
