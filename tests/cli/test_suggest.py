from __future__ import annotations

from quire.cli.suggest import did_you_mean


def test_the_nearest_name_or_nothing() -> None:
    assert did_you_mean("prot", ["host", "port"]) == ": did you mean port?"
    assert did_you_mean("prot", ["host", "port"], prefix="--") == ": did you mean --port?"
    assert did_you_mean("colour", ["host", "port"]) == ""
    assert did_you_mean("n", ["min-p"], prefix="--") == ""
