"""What an experiment hands back: tables, charts, findings and an explanation, as plain data that goes to JSON and back.

Nothing here knows how a result is drawn.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.bench.charts import Chart, Series, Span


@dataclass(slots=True)
class Table:
    """Rows of text and numbers under column heads; `note` says how to read it."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{self.title!r}: {len(row)} cells under {len(self.columns)} heads"


@dataclass(slots=True)
class Finding:
    """What was expected, what was seen, and whether they agree. `holds` is None where the run cannot tell: `observed`
    says why."""

    expected: str
    observed: str
    holds: bool | None


@dataclass(slots=True)
class Result:
    """One experiment's outcome. `data` holds the raw numbers, for scripts."""

    key: str
    title: str
    question: str
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    explanation: list[str] = field(default_factory=list)  # paragraphs
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> str:
        """A JSON text that `from_json` reads back. NaN and infinities become null: JSON has none."""
        return json.dumps(_finite(asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """The Result that `to_json` wrote. Raises ValueError if the text is not one."""
        try:
            return cls._from_fields(json.loads(text))
        except (KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(f"not a lab result: {error!r}") from None

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Result:
        charts = []
        for chart in values["charts"]:
            series = [Series(**each) for each in chart["series"]]
            charts.append(Chart(**{**chart, "series": series, "spans": [Span(**each) for each in chart["spans"]]}))
        return cls(
            **{
                **values,
                "tables": [Table(**each) for each in values["tables"]],
                "charts": charts,
                "findings": [Finding(**each) for each in values["findings"]],
            }
        )


def _finite(value: Any) -> Any:
    """`value` with plain JSON types only: numpy's scalars and arrays as Python's, no NaN, keys as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
