"""Charts as plain data that goes to JSON and back. `svg.py` draws them; `plots.py` has those of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

ChartKind = Literal["bar", "grouped_bar", "stacked_bar", "line", "area", "timeline"]
CHART_KINDS = ("bar", "grouped_bar", "stacked_bar", "line", "area", "timeline")


@dataclass(slots=True)
class Series:
    """One line, or one colour of bars. The x of a bar chart are its categories, the same in every series.

    `ranges`: where a value was measured several times, its smallest and largest, drawn as a thin line.
    """

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    ranges: Sequence[tuple[float, float] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), f"series {self.name!r}: {len(self.x)} x, {len(self.y)} y"
        assert not self.ranges or len(self.ranges) == len(self.y), f"series {self.name!r}: {len(self.ranges)} ranges"


@dataclass(slots=True)
class Span:
    """A bar of a timeline: `lane` counts from 0 at the top, `kind` chooses its colour."""

    lane: int
    start: float
    end: float
    label: str
    kind: str


@dataclass(slots=True)
class Chart:
    """A picture as data. A timeline has spans, every other kind has series."""

    kind: ChartKind
    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.kind in CHART_KINDS, f"{self.title!r}: no chart is a {self.kind!r}"


def bar_chart(
    title: str,
    y_label: str,
    names: Sequence[str],
    columns: Mapping[str, Sequence[float | None]],
    *,
    x_label: str = "",
    note: str = "",
    is_stacked: bool = False,
) -> Chart:
    """`columns`: the values of each series, by its name."""
    kind: ChartKind = "stacked_bar" if is_stacked else "bar" if len(columns) == 1 else "grouped_bar"
    return Chart(kind, title, x_label, y_label, [Series(name, names, ys) for name, ys in columns.items()], note)


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    note: str = "",
    log: str = "",
    is_area: bool = False,
) -> Chart:
    """`lines`: x and y of each series, by its name. `log`: which axes are logarithmic, "x", "y" or "xy"."""
    series = [Series(name, xs, ys) for name, (xs, ys) in lines.items()]
    return Chart("area" if is_area else "line", title, x_label, y_label, series, note, "x" in log, "y" in log)
