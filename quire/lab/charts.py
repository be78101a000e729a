"""Charts as SVG text that stands in a page: colours and fonts are the page's, by CSS variables, so both of its themes
fit. Hovering over a bar or a point tells its value."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from quire.lab.bars import draw_bars
from quire.lab.lines import draw_lines
from quire.lab.result import Chart
from quire.lab.svg import WIDE, WIDTH, colour
from quire.lab.timeline import draw_timeline, span_kinds


def figure(chart: Chart, *, is_wide: bool = False, until: float | None = None) -> str:
    """A chart with its title, legend and note, as an HTML figure. A timeline is always wide."""
    width = WIDE if is_wide else WIDTH
    if chart.kind == "timeline":
        picture = draw_timeline(chart, until)
        legend = _legend(list(span_kinds(chart).items()))
    else:
        draw = draw_lines if chart.kind in ("line", "area") else draw_bars
        picture = draw(chart, width)
        names = [(series.name, colour(index)) for index, series in enumerate(chart.series)]
        legend = _legend(names) if len(names) > 1 else ""
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    wide = ' class="wide"' if is_wide or chart.kind == "timeline" else ""
    return f"<figure{wide}><figcaption>{escape(chart.title)}</figcaption>{legend}{picture}{note}</figure>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i style="background:{fill}"></i>{escape(name)}</li>' for name, fill in entries)
    return f'<ul class="legend">{items}</ul>'
