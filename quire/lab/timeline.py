"""Timelines: a lane for each slot, a bar for each stretch of time in which something held it."""

from __future__ import annotations

from quire.lab.result import Chart
from quire.lab.scales import Scale
from quire.lab.svg import WIDE, Canvas, Plot, colour, text_px, value_axis_x
from quire.lab.wording import number

_LANE_PX = 24
# Kinds that are nobody's work.
_EMPTY_KINDS = ("wasted", "idle", "free")


def span_kinds(chart: Chart) -> dict[str, str]:
    """Kind -> its colour, in order of appearance; waste is not a colour."""
    kinds: dict[str, str] = {}
    for span in chart.spans:
        if span.kind not in kinds:
            num_coloured = sum(kind not in _EMPTY_KINDS for kind in kinds)
            kinds[span.kind] = "var(--waste)" if span.kind in _EMPTY_KINDS else colour(num_coloured)
    return kinds


def draw_timeline(chart: Chart, until: float | None = None) -> str:
    """`until`: where the axis ends, for pictures that are to be compared."""
    num_lanes = 1 + max((span.lane for span in chart.spans), default=0)
    top = 8.0
    bottom = top + num_lanes * _LANE_PX
    canvas = Canvas(chart.title, bottom + 46, width=WIDE)
    plot = Plot(58.0, top, WIDE - 14.0, bottom)
    scale = Scale(
        min((span.start for span in chart.spans), default=0.0),
        max((span.end for span in chart.spans), default=1.0) if until is None else until,
        plot.left,
        plot.right,
    )
    value_axis_x(canvas, plot, scale, chart.x_label)
    kinds = span_kinds(chart)
    for lane in range(num_lanes):
        canvas.text(plot.left - 8, top + (lane + 0.5) * _LANE_PX + 4, f"{chart.y_label} {lane + 1}", anchor="end")
    for span in chart.spans:
        x1, x2, y = scale(span.start), scale(span.end), top + span.lane * _LANE_PX
        tip = f"{chart.y_label} {span.lane + 1}, {number(span.start)} to {number(span.end)}: {span.kind} {span.label}"
        kind = "bar waste" if span.kind in _EMPTY_KINDS else "bar"
        canvas.rect(x1 + 0.5, y + 2, x2 - x1 - 1, _LANE_PX - 4, kinds[span.kind], tip.strip(), kind)
        if span.label and x2 - x1 >= text_px(span.label) + 5:
            canvas.text((x1 + x2) / 2, y + _LANE_PX / 2 + 4, span.label, "inside")
    return canvas.to_svg()
