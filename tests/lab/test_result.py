"""Results as data: there and back, and nothing in between that JSON does not have."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from quire.bench.charts import Chart, Series, Span
from quire.lab.result import Finding, Result, Table


def example() -> Result:
    return Result(
        key="k",
        title="t",
        question="q?",
        tables=[Table("a", ["x", "y"], [["one", 1], ["two", 2.5]], note="n")],
        charts=[
            Chart("line", "l", "x", "y", [Series("s", [1, 2.0, "three"], [0.5, 1.0, 2.0])], log_x=True),
            Chart("timeline", "l", "x", "y", spans=[Span(0, 1.0, 2.0, "r", "decode")]),
        ],
        findings=[Finding("e", "o", None), Finding("e", "o", False)],
        explanation=["because"],
        data={"a": {"b": [1, None]}},
        seconds=1.5,
    )


def test_there_and_back() -> None:
    assert Result.from_json(example().to_json()) == example()


def test_numpy_and_what_is_not_finite_become_json() -> None:
    result = example()
    result.data = {"array": np.arange(3), "nan": math.nan, 5: [np.float64(0.5), math.inf]}
    assert json.loads(result.to_json())["data"] == {"array": [0, 1, 2], "nan": None, "5": [0.5, None]}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": "k"}', "not json"])
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Result.from_json(text)


def test_ragged_tables_and_series_are_our_bugs() -> None:
    with pytest.raises(AssertionError):
        Table("a", ["x", "y"], [[1]])
    with pytest.raises(AssertionError):
        Series("s", [1.0], [])
