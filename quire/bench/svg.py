"""Charts drawn, for the lab's report and for `quire bench --plot` alike.

`figure` gives an HTML figure whose colours and fonts are CSS variables of the page (`CHART_STYLE`), so that it fits
both of its themes. Hovering over a bar or a point shows its value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quire.bench.canvas import DARK, LIGHT, Canvas, colour, text_px
from quire.bench.charts import Chart, Series
from quire.bench.units import number, short

WIDTH, WIDE = 540, 1090  # a chart in a row of two, and one that has a row to itself
_HEIGHT = 290
_MAX_BAR_LABELS = 18  # with more bars than this, none carries its value
_MAX_DOTS = 16  # a line with more points than this is a curve, and so is every line over time
_MAX_TICKS = 12  # with at most so many distinct x, a logarithmic axis is labelled at the points themselves
_UNUSED_KINDS = ("wasted", "idle", "free")  # spans of a timeline that are nobody's work


def _read_style(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _variables(colours: Sequence[str]) -> str:
    return " ".join(f"--s{i}: {colour};" for i, colour in enumerate(colours, 1))


CHART_STYLE = f"""{_read_style("charts.css")}:root {{ {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
"""


# -- scales


@dataclass(slots=True, frozen=True)
class Scale:
    """Values from `low` to `high`, mapped to pixels from `start` to `end`, linearly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, self.low * 1e-3)), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else linear_ticks(self.low, self.high)


def linear_scale(values: Iterable[float], start: float, end: float, *, from_zero: bool) -> Scale:
    """A scale whose ends are ticks, so that nothing sticks out of the grid."""
    found = list(values)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (min(low, 0.0), max(low, 0.0))
    step = _nice_step(high - low)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, end)


def log_scale(values: Iterable[float], start: float, end: float, *, tight: bool) -> Scale:
    """`tight`, for x, ends a little beyond the values themselves; otherwise at 1, 2 or 5 times a power of ten."""
    found = [value for value in values if value > 0]
    low, high = min(found, default=1.0), max(found, default=10.0)
    if low == high:
        low, high = low / 2, high * 2
    if tight:
        margin = (high / low) ** 0.03
        return Scale(low / margin, high * margin, start, end, is_log=True)
    return Scale(_round_log(low, up=False), _round_log(high, up=True), start, end, is_log=True)


def linear_ticks(low: float, high: float) -> list[float]:
    step = _nice_step(high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times every power of ten, or fewer where there are many powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low * 0.999 <= d * 10.0**p <= high * 1.001]
        if len(found) <= 9:
            return found
    return found[:: math.ceil(len(found) / 9)]


def _nice_step(span: float) -> float:
    """A round step that makes about five ticks."""
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if rough <= digit * power * (1 + 1e-9))


def _round_log(value: float, *, up: bool) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    digits = (1, 2, 5, 10)
    if up:
        return next(d * power for d in digits if value <= d * power * (1 + 1e-9))
    return next(d * power for d in reversed(digits) if d * power <= value * (1 + 1e-9))


# -- drawing


@dataclass(slots=True, frozen=True)
class Plot:
    """The field inside the axes, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def _y_axis(canvas: Canvas, plot: Plot, scale: Scale, label: str) -> None:
    for tick in scale.ticks():
        y = scale(tick)
        canvas.line(plot.left, y, plot.right, y, "zero" if tick == 0 else "grid")
        canvas.text(plot.left - 8, y + 4, short(tick), anchor="end")
    canvas.text(plot.left, plot.top - 10, label, "label", anchor="start")


def _x_axis(canvas: Canvas, plot: Plot, scale: Scale, label: str, marks: Sequence[float] | None = None) -> None:
    """`marks`: the values to write instead of round ones, as far as they have room."""
    last_end = -1e9
    for tick in scale.ticks() if marks is None else marks:
        x, text = scale(tick), short(tick)
        canvas.line(x, plot.top, x, plot.bottom, "zero" if tick == 0 and not scale.is_log else "grid")
        if x - text_px(text) / 2 > last_end + 4:
            canvas.text(x, plot.bottom + 18, text)
            last_end = x + text_px(text) / 2
    canvas.text((plot.left + plot.right) / 2, plot.bottom + 38, label, "label")


def draw(chart: Chart, width: float = WIDTH, until: float | None = None) -> Canvas:
    """`until`: where a timeline's axis ends, for timelines that are to be compared."""
    if chart.kind == "timeline":
        return _draw_timeline(chart, until)
    has_points = any(y is not None for series in chart.series for y in series.y)
    if not has_points:
        canvas = Canvas(chart.title, 80, width)
        canvas.text(width / 2, 40, "nothing was measured")
        return canvas
    return _draw_lines(chart, width) if chart.kind in ("line", "area") else _draw_bars(chart, width)


# -- bars: beside each other or stacked; horizontal where their names are too long to stand under them


@dataclass(slots=True)
class _Bar:
    group: int  # index of the category
    place: int  # index within the category
    low: float
    high: float
    fill: str
    tip: str
    label: str
    range: tuple[float, float] | None


def _bars(chart: Chart) -> list[_Bar]:
    found = []
    is_stacked, has_names = chart.kind == "stacked_bar", len(chart.series) > 1
    tops = [0.0] * len(chart.series[0].x)
    for index, series in enumerate(chart.series):
        for group, (name, value) in enumerate(zip(series.x, series.y, strict=True)):
            if value is None or (is_stacked and not value):
                continue
            tip = f"{name}, {series.name}: {number(value)}" if has_names else f"{name}: {number(value)}"
            place, low = (0, tops[group]) if is_stacked else (index, 0.0)
            reach = series.ranges[group] if series.ranges else None
            found.append(_Bar(group, place, low, low + value, colour(index), tip, number(value), reach))
            tops[group] += value
    return found


def _draw_bars(chart: Chart, width: float) -> Canvas:
    names = [str(x) for x in chart.series[0].x]
    bars = _bars(chart)
    num_places = 1 if chart.kind == "stacked_bar" else len(chart.series)
    values = [v for bar in bars for v in (bar.low, bar.high, *(bar.range or ()))]
    is_stacked = chart.kind == "stacked_bar"
    if not is_stacked:
        values.append(1.04 * max(values))  # room for the number above the highest bar
    if max(text_px(name) for name in names) > (width - 70) / len(names) - 6:
        return _horizontal_bars(chart, names, bars, values, num_places, width)
    canvas = Canvas(chart.title, _HEIGHT, width)
    top, bottom = 34.0, _HEIGHT - (48.0 if chart.x_label else 30.0)
    scale = _value_scale(chart, values, bottom, top)
    left = 18 + max(text_px(short(tick)) for tick in scale.ticks())
    plot = Plot(left, top, width - 12.0, bottom)
    _y_axis(canvas, plot, scale, chart.y_label)
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
        top_y = min(y1, y2)
        if bar.range is not None:
            canvas.line(x + thick / 2, scale(bar.range[0]), x + thick / 2, scale(bar.range[1]), "range")
            top_y = min(top_y, scale(bar.range[1]))
        if is_stacked:
            if abs(y1 - y2) >= 16 and thick >= text_px(bar.label):
                canvas.text(x + thick / 2, (y1 + y2) / 2 + 4, bar.label, "inside")
        elif len(bars) <= _MAX_BAR_LABELS and thick >= text_px(bar.label) * 0.8:
            canvas.text(x + thick / 2, top_y - 5, bar.label, "value")
    return canvas


def _horizontal_bars(
    chart: Chart, names: list[str], bars: list[_Bar], values: list[float], num_places: int, width: float
) -> Canvas:
    thick = 24.0 if num_places == 1 else 19.0
    lane = thick * num_places + 10
    top = 12.0
    bottom = top + lane * len(names)
    canvas = Canvas(chart.title, bottom + 50, width)
    left = min(0.4 * width, 14 + max(text_px(name) for name in names))
    plot = Plot(left, top, width - 44.0, bottom)
    scale = _value_scale(chart, values, plot.left, plot.right)
    _x_axis(canvas, plot, scale, chart.y_label)
    floor = scale.low if chart.log_y else 0.0
    for index, name in enumerate(names):
        canvas.text(plot.left - 8, top + (index + 0.5) * lane + 4, name, anchor="end")
    for bar in bars:
        y = top + (bar.group + 0.5) * lane + (bar.place - num_places / 2) * thick
        x1, x2 = scale(bar.low if bar.high < 0 else max(bar.low, floor)), scale(bar.high)
        canvas.rect(min(x1, x2), y + 1, abs(x2 - x1), thick - 2, bar.fill, bar.tip)
        right = max(x1, x2)
        if bar.range is not None:
            canvas.line(scale(bar.range[0]), y + thick / 2, scale(bar.range[1]), y + thick / 2, "range")
            right = max(right, scale(bar.range[1]))
        if chart.kind != "stacked_bar":
            canvas.text(right + 5, y + thick / 2 + 4, bar.label, "value", anchor="start")
        elif bar.range is None and abs(x2 - x1) >= text_px(bar.label) + 4:
            canvas.text((x1 + x2) / 2, y + thick / 2 + 4, bar.label, "inside")
    return canvas


def _value_scale(chart: Chart, values: list[float], start: float, end: float) -> Scale:
    if chart.log_y:
        return log_scale(values, start, end, tight=False)
    return linear_scale(values, start, end, from_zero=True)


# -- lines and areas


def _draw_lines(chart: Chart, width: float) -> Canvas:
    points = [_points(series, chart) for series in chart.series]
    xs = [x for each in points for x, _ in each]
    ys = [y for each in points for _, y in each]
    canvas = Canvas(chart.title, _HEIGHT, width)
    if not xs:
        canvas.text(width / 2, _HEIGHT / 2, "nothing was measured")
        return canvas
    ys += [y for series in chart.series for reach in series.ranges if reach for y in reach]
    top, bottom = 34.0, _HEIGHT - 48.0
    y_scale = _value_scale(chart, ys, bottom, top)
    left = 18 + max(text_px(short(tick)) for tick in y_scale.ticks())
    plot = Plot(left, top, width - 16.0, bottom)
    x_scale = _line_x_scale(chart, xs, plot)
    _y_axis(canvas, plot, y_scale, chart.y_label)
    distinct = sorted(set(xs))
    _x_axis(canvas, plot, x_scale, chart.x_label, distinct if chart.log_x and len(distinct) <= _MAX_TICKS else None)
    for index, (series, each) in enumerate(zip(chart.series, points, strict=True)):
        if each:
            _draw_series(canvas, chart, series, each, x_scale, y_scale, colour(index))
    return canvas


def _points(series: Series, chart: Chart) -> list[tuple[float, float]]:
    """The points that can be drawn: a value may be missing, and a logarithm needs a positive one."""
    return [
        (float(x), float(y))
        for x, y in zip(series.x, series.y, strict=True)
        if not isinstance(x, str) and y is not None and (x > 0 or not chart.log_x) and (y > 0 or not chart.log_y)
    ]


def _line_x_scale(chart: Chart, xs: list[float], plot: Plot) -> Scale:
    if chart.log_x:
        return log_scale(xs, plot.left, plot.right, tight=True)
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - 1, high + 1
    # Time begins at 0; other measures begin where they do.
    return Scale(0.0 if 0 <= low < 0.25 * high else low, high, plot.left, plot.right)


def _draw_series(
    canvas: Canvas,
    chart: Chart,
    series: Series,
    points: list[tuple[float, float]],
    x_scale: Scale,
    y_scale: Scale,
    stroke: str,
) -> None:
    places = [(x_scale(x), y_scale(y)) for x, y in points]
    if chart.kind == "area":
        canvas.area([(places[0][0], y_scale.start), *places, (places[-1][0], y_scale.start)], stroke)
    canvas.curve(places, stroke, series.name)
    for x, reach in zip(series.x, series.ranges, strict=False):
        if reach and not isinstance(x, str):
            canvas.line(x_scale(x), y_scale(reach[0]), x_scale(x), y_scale(reach[1]), "range")
    if len(points) > _MAX_DOTS or "second" in chart.x_label:
        return
    for (x, y), place in zip(points, places, strict=True):
        canvas.dot(place, stroke, f"{series.name}: {number(y)} at {number(x)}")


# -- timelines: a lane for each slot, a bar for each stretch of time in which something held it


def span_colours(chart: Chart) -> dict[str, str]:
    """The colour of each kind of span, in order of appearance; waste has none of its own."""
    kinds: dict[str, str] = {}
    for span in chart.spans:
        if span.kind not in kinds:
            num_coloured = sum(kind not in _UNUSED_KINDS for kind in kinds)
            kinds[span.kind] = "var(--waste)" if span.kind in _UNUSED_KINDS else colour(num_coloured)
    return kinds


def _draw_timeline(chart: Chart, until: float | None) -> Canvas:
    num_lanes = 1 + max((span.lane for span in chart.spans), default=0)
    top, lane_px = 8.0, 24
    bottom = top + num_lanes * lane_px
    canvas = Canvas(chart.title, bottom + 46, width=WIDE)
    plot = Plot(58.0, top, WIDE - 14.0, bottom)
    start = min((span.start for span in chart.spans), default=0.0)
    end = max((span.end for span in chart.spans), default=1.0) if until is None else until
    scale = Scale(start, end, plot.left, plot.right)
    _x_axis(canvas, plot, scale, chart.x_label)
    kinds = span_colours(chart)
    for lane in range(num_lanes):
        canvas.text(plot.left - 8, top + (lane + 0.5) * lane_px + 4, f"{chart.y_label} {lane + 1}", anchor="end")
    for span in chart.spans:
        x1, x2, y = scale(span.start), scale(span.end), top + span.lane * lane_px
        tip = f"{chart.y_label} {span.lane + 1}, {number(span.start)} to {number(span.end)}: {span.kind} {span.label}"
        canvas.rect(x1 + 0.5, y + 2, x2 - x1 - 1, lane_px - 4, kinds[span.kind], tip.strip())
        if span.label and x2 - x1 >= text_px(span.label) + 5:
            canvas.text((x1 + x2) / 2, y + lane_px / 2 + 4, span.label, "inside")
    return canvas


# -- a figure of a page


def legend(chart: Chart) -> list[tuple[str, str]]:
    """Names and colours; empty where there is only one."""
    if chart.kind == "timeline":
        return list(span_colours(chart).items())
    names = [(series.name, colour(index)) for index, series in enumerate(chart.series)]
    return names if len(names) > 1 else []


def figure(chart: Chart, *, is_wide: bool = False, until: float | None = None) -> str:
    """A chart with its title, legend and note, as an HTML figure. A timeline is always wide."""
    picture = draw(chart, WIDE if is_wide else WIDTH, until).to_svg()
    items = "".join(f'<li><i style="background:{fill}"></i>{escape(name)}</li>' for name, fill in legend(chart))
    names = f'<ul class="legend">{items}</ul>' if items else ""
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    wide = ' class="wide"' if is_wide or chart.kind == "timeline" else ""
    return f"<figure{wide}><figcaption>{escape(chart.title)}</figcaption>{names}{picture}{note}</figure>"


def figures(charts: Sequence[Chart]) -> str:
    """Two in a row. One that would stand alone gets the row: the first over time, if there is one, else the last."""
    narrow = [chart for chart in charts if chart.kind != "timeline"]
    alone = None
    if len(narrow) % 2:
        alone = next((chart for chart in narrow if "second" in chart.x_label), narrow[-1])
    # Wide ones go last, so that the pairs before them stay pairs.
    ordered = [chart for chart in charts if chart is not alone] + ([] if alone is None else [alone])
    # Timelines beside each other are there to be compared: one step is as wide in all of them.
    until = max((span.end for chart in charts for span in chart.spans), default=None)
    drawn = "".join(figure(chart, is_wide=chart is alone, until=until) for chart in ordered)
    return f'<div class="charts">{drawn}</div>'


def page(title: str, body: str) -> str:
    """A whole HTML page that needs nothing else, in light and dark."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CHART_STYLE}{_read_style('page.css')}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
