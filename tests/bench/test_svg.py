"""Charts: scales by hand, and that every kind draws all of its data as well-formed SVG."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from quire.bench.charts import Chart, Series, Span
from quire.bench.svg import (
    Scale,
    draw,
    figure,
    figures,
    linear_scale,
    linear_ticks,
    log_scale,
    log_ticks,
    span_colours,
)


def svg(chart: Chart) -> str:
    return draw(chart).to_svg()


def elements(text: str, tag: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(text).iter() if each.tag == tag]


# -- scales


def test_a_scale_maps_its_ends() -> None:
    scale = Scale(0.0, 50.0, 100.0, 200.0)
    assert (scale(0.0), scale(25.0), scale(50.0)) == (100.0, 150.0, 200.0)
    log = Scale(1.0, 100.0, 0.0, 10.0, is_log=True)
    assert (log(1.0), log(10.0), log(100.0)) == pytest.approx((0.0, 5.0, 10.0))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-5, 5, [-4, -2, 0, 2, 4])],
)
def test_linear_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(expected)


def test_log_ticks() -> None:
    assert log_ticks(1, 20) == [1, 2, 5, 10, 20]
    assert log_ticks(1, 1e8) == [10.0**p for p in range(9)]


def test_scales_hold_all_values_and_start_at_zero() -> None:
    scale = linear_scale([3.0, 97.0], 0.0, 1.0, from_zero=True)
    assert scale.low == 0 and scale.high == 100
    below = linear_scale([-3.0, 4.0], 0.0, 1.0, from_zero=True)
    assert below.low <= -3 and below.high >= 4
    log = log_scale([0.03, 700.0], 0.0, 1.0, tight=False)
    assert (log.low, log.high) == pytest.approx((0.02, 1000.0))


@pytest.mark.parametrize("values", [[], [0.0], [7.0], [7.0, 7.0], [-2.0]])
def test_one_value_or_none_is_no_division_by_zero(values: list[float]) -> None:
    scale = linear_scale(values, 0.0, 1.0, from_zero=True)
    assert all(math.isfinite(scale(value)) for value in values)
    log = log_scale(values, 0.0, 1.0, tight=True)
    assert math.isfinite(log(1.0))


# -- kinds


def bars(kind: str, *columns: list[float], names: list[float | str] | None = None) -> Chart:
    names = names or ["a", "b"]
    return Chart(kind, "t", "", "y", [Series(f"s{i}", names, column) for i, column in enumerate(columns)])  # type: ignore[arg-type]


def test_bars_are_as_high_as_their_values() -> None:
    rects = elements(svg(bars("bar", [10.0, 5.0])), "rect")
    heights = [float(each.get("height", 0)) for each in rects]
    assert heights[0] == pytest.approx(2 * heights[1], rel=0.01)


def test_grouped_bars_stand_side_by_side_and_stacked_ones_on_each_other() -> None:
    grouped = elements(svg(bars("grouped_bar", [1.0, 2.0], [3.0, 4.0])), "rect")
    assert len({each.get("x") for each in grouped}) == 4
    stacked = elements(svg(bars("stacked_bar", [1.0, 2.0], [3.0, 4.0])), "rect")
    assert len({each.get("x") for each in stacked}) == 2
    lower, upper = stacked[0], stacked[2]
    assert float(upper.get("y", 0)) + float(upper.get("height", 0)) == pytest.approx(float(lower.get("y", 0)), abs=0.1)


def test_long_names_make_bars_lie() -> None:
    names: list[float | str] = ["a name that is far too long to stand", "another one that is as long as that"] * 2
    text = svg(bars("bar", [10.0, 5.0, 1.0, 2.0], names=names))
    widths = [float(each.get("width", 0)) for each in elements(text, "rect")]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)


def test_lines_leave_out_what_is_missing() -> None:
    chart = Chart("line", "t", "x", "y", [Series("s", [1, 2, 4, 8], [1.0, None, 0.0, 3.0])], log_x=True, log_y=True)  # type: ignore[list-item]
    text = svg(chart)
    assert len(elements(text, "circle")) == 2  # nothing at None, and no logarithm of 0
    assert len(elements(text, "polyline")) == 1


def test_areas_are_closed_at_the_floor() -> None:
    text = svg(Chart("area", "t", "seconds", "y", [Series("s", [0.0, 1.0], [1.0, 2.0])]))
    points = elements(text, "polygon")[0].get("points", "").split()
    assert len(points) == 4
    assert points[0].split(",")[1] == points[-1].split(",")[1]


def test_an_empty_chart_says_so() -> None:
    assert "nothing was measured" in svg(Chart("line", "t", "x", "y"))
    assert "nothing was measured" in svg(Chart("bar", "t", "x", "y"))


def test_a_timeline_has_a_lane_a_slot_and_waste_is_no_colour() -> None:
    spans = [Span(0, 0, 4, "1", "decode"), Span(0, 4, 8, "", "wasted"), Span(1, 0, 8, "2", "decode")]
    chart = Chart("timeline", "t", "step", "slot", spans=spans)
    rects = elements(svg(chart), "rect")
    assert len({each.get("y") for each in rects}) == 2
    widths = [float(each.get("width", 0)) for each in rects]
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.02)
    assert span_colours(chart) == {"decode": "var(--s1)", "wasted": "var(--waste)"}


def test_text_is_escaped() -> None:
    html = figure(Chart("bar", "<b>&", "", "y", [Series("<s>", ["<x>"], [1.0])], note="<n>"))
    assert "<b>" not in html and "<x>" not in html and "<n>" not in html
    assert "&lt;b&gt;&amp;" in html


def test_a_figure_has_a_legend_only_where_it_helps() -> None:
    assert "legend" not in figure(bars("bar", [1.0, 2.0]))
    html = figure(bars("grouped_bar", [1.0, 2.0], [3.0, 4.0]), is_wide=True)
    assert html.count("<li>") == 2 and 'class="wide"' in html


def test_ranges_are_drawn_and_have_room() -> None:
    for chart in (
        Chart("bar", "t", "", "y", [Series("s", ["a", "b"], [1.0, 2.0], [(0.5, 40.0), None])]),
        Chart("line", "t", "x", "y", [Series("s", [1.0, 2.0], [1.0, 2.0], [(0.5, 40.0), None])]),
    ):
        (line,) = [each for each in elements(svg(chart), "line") if each.get("class") == "range"]
        assert 0 < float(line.get("y2", 0)) < float(line.get("y1", 0))


def test_a_chart_without_a_partner_gets_the_row() -> None:
    html = figures([bars("bar", [1.0, 2.0])] * 2 + [bars("bar", [3.0, 4.0])])
    assert html.count("<figure") == 3 and html.count('class="wide"') == 1
