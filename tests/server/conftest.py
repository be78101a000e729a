from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_harness import ScriptedEngine, Server, running


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """A server over a ScriptedEngine, shared by a module's tests: those that change the engine set it back."""
    with running(ScriptedEngine(tiny_model)) as server:
        yield server
