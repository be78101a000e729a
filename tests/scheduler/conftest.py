from __future__ import annotations

import itertools

import pytest
from scheduler import harness


@pytest.fixture(autouse=True)
def _same_prompts_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are made from a number: without this, how often a test preempts would depend on the tests before it."""
    monkeypatch.setattr(harness, "_ids", itertools.count())
