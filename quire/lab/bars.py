"""Bars: single, side by side, or stacked. They lie where their names are too long to stand under them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.lab.result import Chart
from quire.lab.scales import Scale, linear_scale, log_scale
from quire.lab.svg import WIDTH, Canvas, Plot, colour, text_px, value_axis_x, value_axis_y
from quire.lab.wording import number, short

_HEIGHT = 290
_LANE_PX = 30  # of a lying bar
_MOST_VALUES = 18  # more bars than that carry no numbers


@dataclass(slots=True)
class _Bar:
    group: int  # which category
    place: int  # beside which others of it
    low: float
    high: float
    fill: str
    tip: str
    label: str


def draw_bars(chart: Chart, width: float = WIDTH) -> str:
    names = [str(x) for x in chart.series[0].x] if chart.series else []
    if not names:
        canvas = Canvas(chart.title, 80, width)
        canvas.text(width / 2, 40, "nothing was measured")
        return canvas.to_svg()
    bars = _stacked(chart) if chart.kind == "stacked_bar" else _beside(chart)
    num_places = 1 if chart.kind == "stacked_bar" else len(chart.series)
    room = (width - 70) / len(names)
    if max(text_px(name) for name in names) > room - 6:
        return _lying(chart, names, bars, num_places, width)
    return _standing(chart, names, bars, num_places, width)


def _beside(chart: Chart) -> list[_Bar]:
    found = []
    many = len(chart.series) > 1
    for place, series in enumerate(chart.series):
        for group, (name, value) in enumerate(zip(series.x, series.y, strict=True)):
            if value is None:
                continue
            tip = f"{name}, {series.name}: {number(value)}" if many else f"{name}: {number(value)}"
            found.append(_Bar(group, place, 0.0, float(value), colour(place), tip, number(value)))
    return found


def _stacked(chart: Chart) -> list[_Bar]:
    found = []
    tops = [0.0] * max(len(series.x) for series in chart.series)
    for index, series in enumerate(chart.series):
        for group, (name, value) in enumerate(zip(series.x, series.y, strict=True)):
            if not value:
                continue
            tip = f"{name}, {series.name}: {number(value)}"
            found.append(_Bar(group, 0, tops[group], tops[group] + value, colour(index), tip, number(value)))
            tops[group] += value
    return found


def _value_scale(chart: Chart, bars: list[_Bar], start: float, end: float) -> Scale:
    values = [bar.high for bar in bars]
    if chart.kind != "stacked_bar":
        values.append(1.04 * max(values))  # room for the number above it
    if chart.log_y:
        return log_scale(values, start, end, tight=False)
    return linear_scale([*values, *(bar.low for bar in bars)], start, end, from_zero=True)


def _standing(chart: Chart, names: list[str], bars: list[_Bar], num_places: int, width: float) -> str:
    canvas = Canvas(chart.title, _HEIGHT, width)
    top, bottom = 34.0, _HEIGHT - (48.0 if chart.x_label else 30.0)
    scale = _value_scale(chart, bars, bottom, top)
    left = 18 + max(text_px(short(tick)) for tick in scale.ticks())
    plot = Plot(left, top, width - 12.0, bottom)
    value_axis_y(canvas, plot, scale, chart.y_label)
    band = (plot.right - plot.left) / len(names)
    thick = min(64.0, 0.76 * band / num_places)
    floor = scale.low if chart.log_y else 0.0
    for index, name in enumerate(names):
        canvas.text(plot.left + (index + 0.5) * band, plot.bottom + 18, name)
    if chart.x_label:
        canvas.text((plot.left + plot.right) / 2, plot.bottom + 38, chart.x_label, "label")
    for bar in bars:
        x = plot.left + (bar.group + 0.5) * band + (bar.place - num_places / 2) * thick
        y1, y2 = scale(max(bar.low, floor)), scale(bar.high)
        canvas.rect(x + 1, min(y1, y2), thick - 2, abs(y1 - y2), bar.fill, bar.tip)
        if chart.kind == "stacked_bar":
            if abs(y1 - y2) >= 16 and thick >= text_px(bar.label):
                canvas.text(x + thick / 2, (y1 + y2) / 2 + 4, bar.label, "inside")
        elif len(bars) <= _MOST_VALUES and thick >= text_px(bar.label) * 0.8:
            canvas.text(x + thick / 2, min(y1, y2) - 5, bar.label, "value")
    return canvas.to_svg()


def _lying(chart: Chart, names: list[str], bars: list[_Bar], num_places: int, width: float) -> str:
    thick = _LANE_PX * 0.8 if num_places == 1 else 19.0
    lane = thick * num_places + 10
    top = 12.0
    bottom = top + lane * len(names)
    canvas = Canvas(chart.title, bottom + 50, width)
    left = min(0.4 * width, 14 + max(text_px(name) for name in names))
    plot = Plot(left, top, width - 44.0, bottom)
    scale = _value_scale(chart, bars, plot.left, plot.right)
    value_axis_x(canvas, plot, scale, chart.y_label)
    floor = scale.low if chart.log_y else 0.0
    for index, name in enumerate(names):
        canvas.text(plot.left - 8, top + (index + 0.5) * lane + 4, name, anchor="end")
    for bar in bars:
        y = top + (bar.group + 0.5) * lane + (bar.place - num_places / 2) * thick
        x1, x2 = scale(max(bar.low, floor)), scale(bar.high)
        canvas.rect(min(x1, x2), y + 1, abs(x2 - x1), thick - 2, bar.fill, bar.tip)
        if chart.kind == "stacked_bar":
            if abs(x2 - x1) >= text_px(bar.label) + 4:
                canvas.text((x1 + x2) / 2, y + thick / 2 + 4, bar.label, "inside")
        else:
            canvas.text(max(x1, x2) + 5, y + thick / 2 + 4, bar.label, "value", anchor="start")
    return canvas.to_svg()
