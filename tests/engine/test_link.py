"""Where the sockets between server and engine lie. What goes through them is test_client.py's."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from quire.engine.link import EngineLink


async def folder_of_a_link() -> Path:
    link = EngineLink(asyncio.get_running_loop(), lambda news: None, lambda error: None)
    link.close()
    return Path(link.news_address.removeprefix("ipc://")).parent


def test_the_folder_is_a_temporary_one_and_goes_with_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = asyncio.run(folder_of_a_link())
    assert folder.parent == tmp_path
    assert not folder.exists()


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = asyncio.run(folder_of_a_link())
    assert folder.parent == Path("/tmp")
    assert not folder.exists()
