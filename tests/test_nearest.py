from __future__ import annotations

from quire.nearest import did_you_mean, nearest


def test_the_nearest_name_or_nothing() -> None:
    assert did_you_mean("prot", ["host", "port"]) == ": did you mean port?"
    assert did_you_mean("prot", ["host", "port"], prefix="--") == ": did you mean --port?"
    assert did_you_mean("colour", ["host", "port"]) == ""
    assert did_you_mean("n", ["min-p"], prefix="--") == ""


def test_names_that_go_on_after_the_word_come_first() -> None:
    names = ["system", "temperature", "max-num-seqs", "max-num-batched-tokens"]
    assert did_you_mean("temp", names) == ": did you mean temperature?"
    assert nearest("max-num", names, 2) == ["max-num-seqs", "max-num-batched-tokens"]


def test_a_word_of_a_megabyte_is_not_indexed_whole() -> None:
    near = nearest("x" * 200 + "y" * 1_000_000, ["x" * 200, "port"])
    assert near == ["x" * 200]
