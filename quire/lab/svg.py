"""The strokes that all charts are made of: an SVG frame, axes with their grid, and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from quire.lab.scales import Scale
from quire.lab.wording import short

WIDTH = 540
WIDE = 1090  # of a chart that has a row to itself
NUM_COLOURS = 8
CHAR_PX = 6.4  # of the axis font, about: there is no font to ask


def colour(index: int) -> str:
    return f"var(--s{index % NUM_COLOURS + 1})"


def text_px(text: str) -> float:
    return CHAR_PX * len(text)


@dataclass(slots=True)
class Canvas:
    """Elements in order of drawing."""

    title: str
    height: float
    width: float = WIDTH
    parts: list[str] = field(default_factory=list)

    def add(self, element: str) -> None:
        self.parts.append(element)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "tick", anchor: str = "middle", turn: int = 0) -> None:
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        self.add(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, fill: str, tip: str, kind: str = "bar") -> None:
        self.add(
            f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" '
            f'height="{max(height, 0.5):.2f}" fill="{fill}"><title>{escape(tip)}</title></rect>'
        )

    def to_svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(self.title)}">'
            + "".join(self.parts)
            + "</svg>"
        )


@dataclass(slots=True, frozen=True)
class Plot:
    """The field inside the axes, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def value_axis_y(canvas: Canvas, plot: Plot, scale: Scale, label: str) -> None:
    for tick in scale.ticks():
        y = scale(tick)
        canvas.line(plot.left, y, plot.right, y, "zero" if tick == 0 else "grid")
        canvas.text(plot.left - 8, y + 4, short(tick), anchor="end")
    canvas.text(plot.left, plot.top - 10, label, "label", anchor="start")


def value_axis_x(canvas: Canvas, plot: Plot, scale: Scale, label: str, marks: Sequence[float] | None = None) -> None:
    """`marks`: the values to write instead of round ones, as far as they have room."""
    last_end = -1e9
    for tick in scale.ticks() if marks is None else marks:
        x, text = scale(tick), short(tick)
        canvas.line(x, plot.top, x, plot.bottom, "zero" if tick == 0 and not scale.is_log else "grid")
        if x - text_px(text) / 2 > last_end + 4:
            canvas.text(x, plot.bottom + 18, text)
            last_end = x + text_px(text) / 2
    canvas.text((plot.left + plot.right) / 2, plot.bottom + 38, label, "label")
