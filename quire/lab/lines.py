"""Line and area charts."""

from __future__ import annotations

from html import escape

from quire.lab.result import Chart, Series
from quire.lab.scales import Scale, linear_scale, log_scale
from quire.lab.svg import WIDTH, Canvas, Plot, colour, text_px, value_axis_x, value_axis_y
from quire.lab.wording import number, short

_HEIGHT = 290
_MOST_DOTS = 16  # more points than that are a curve, and so is anything over time
_MOST_MARKS = 12


def draw_lines(chart: Chart, width: float = WIDTH) -> str:
    points = [_points(series, chart) for series in chart.series]
    xs = [x for each in points for x, _ in each]
    ys = [y for each in points for _, y in each]
    canvas = Canvas(chart.title, _HEIGHT, width)
    if not xs:
        canvas.text(width / 2, _HEIGHT / 2, "nothing was measured")
        return canvas.to_svg()
    top, bottom = 34.0, _HEIGHT - 48.0
    y_scale = log_scale(ys, bottom, top, tight=False) if chart.log_y else linear_scale(ys, bottom, top, from_zero=True)
    left = 18 + max(text_px(short(tick)) for tick in y_scale.ticks())
    plot = Plot(left, top, width - 16.0, bottom)
    x_scale = _x_scale(chart, xs, plot)
    value_axis_y(canvas, plot, y_scale, chart.y_label)
    distinct = sorted(set(xs))
    own_marks = chart.log_x and len(distinct) <= _MOST_MARKS
    value_axis_x(canvas, plot, x_scale, chart.x_label, distinct if own_marks else None)
    for index, (series, each) in enumerate(zip(chart.series, points, strict=True)):
        _draw_series(canvas, chart, series, each, x_scale, y_scale, colour(index))
    return canvas.to_svg()


def _points(series: Series, chart: Chart) -> list[tuple[float, float]]:
    """Those that can be drawn: a value may be missing, and a logarithm needs more than nothing."""
    found = []
    for x, y in zip(series.x, series.y, strict=True):
        if isinstance(x, str) or x is None or y is None:
            continue
        if (chart.log_x and x <= 0) or (chart.log_y and y <= 0):
            continue
        found.append((float(x), float(y)))
    return found


def _x_scale(chart: Chart, xs: list[float], plot: Plot) -> Scale:
    if chart.log_x:
        return log_scale(xs, plot.left, plot.right, tight=True)
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - 1, high + 1
    # Time begins at 0; other measures begin where they do.
    low = 0.0 if 0 <= low < 0.25 * high else low
    return Scale(low, high, plot.left, plot.right)


def _draw_series(
    canvas: Canvas,
    chart: Chart,
    series: Series,
    points: list[tuple[float, float]],
    x_scale: Scale,
    y_scale: Scale,
    stroke: str,
) -> None:
    if not points:
        return
    places = [(x_scale(x), y_scale(y)) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    name = escape(series.name)
    if chart.kind == "area":
        floor = y_scale.start
        around = f"{places[0][0]:.1f},{floor:.1f} {path} {places[-1][0]:.1f},{floor:.1f}"
        canvas.add(f'<polygon class="area" points="{around}" fill="{stroke}"/>')
    canvas.add(f'<polyline class="curve" points="{path}" stroke="{stroke}"><title>{name}</title></polyline>')
    if len(points) > _MOST_DOTS or "second" in chart.x_label:
        return
    for (x, y), (px, py) in zip(points, places, strict=True):
        tip = f"{series.name}: {number(y)} at {number(x)}"
        place = f'cx="{px:.1f}" cy="{py:.1f}" r="4"'
        canvas.add(f'<circle class="dot" {place} fill="{stroke}"><title>{escape(tip)}</title></circle>')
