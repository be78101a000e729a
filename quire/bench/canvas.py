"""What a chart is drawn on: a few kinds of shapes, which become SVG, or a picture (.png, .pdf) by matplotlib.

Matplotlib brings the fonts that a machine without a display may not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

LIGHT = ("#2f6fd0", "#d9622b", "#2b9a74", "#9a57c4", "#c9971c", "#c94a7c", "#4aa3c4", "#7a7f8a")
DARK = ("#6ea8ff", "#ff9a66", "#5fd0a5", "#c99af0", "#ecc35a", "#f08bb2", "#7fd0ee", "#a9b0bd")
_CHAR_PX = 6.4  # the axis font's mean width: there is no font to ask

# For matplotlib, what charts.css says of a page in light.
_INK, _SOFT, _WASTE = "#1d2129", "#5b6472", "#d9d5cb"
_LINES = {"grid": ("#ebe9e3", 1.0, 1.0), "zero": (_SOFT, 1.0, 0.6), "range": (_INK, 1.5, 0.75)}  # width, opacity
_TEXTS = {"title": (_INK, 15.0, "bold"), "value": (_INK, 11.5, "normal"), "inside": ("#ffffff", 11.0, "bold")}
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_POINTS = 72 / 96  # of a pixel

Place = tuple[float, float]


def colour(index: int) -> str:
    """The colour of a series; the page's style says what that is in light and in dark."""
    return f"var(--s{index % len(LIGHT) + 1})"


def text_px(text: str) -> float:
    return _CHAR_PX * len(text)


@dataclass(slots=True, frozen=True)
class Shape:
    """`kind` is SVG's element and `style` its class. A rectangle has two corners, a text or a circle one place."""

    kind: Literal["line", "text", "rect", "polyline", "polygon", "circle"]
    style: str
    places: Sequence[Place]
    colour: str = ""
    text: str = ""  # what stands there, or shows when the mouse is over it
    anchor: str = "middle"

    def to_svg(self) -> str:
        (x, y), (x2, y2) = self.places[0], self.places[-1]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in self.places)
        title = f"<title>{escape(self.text)}</title>"
        start = f'<{self.kind} class="{self.style}"'
        if self.kind == "line":
            return f'{start} x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
        if self.kind == "text":
            return f'{start} x="{x:.1f}" y="{y:.1f}" text-anchor="{self.anchor}">{escape(self.text)}</text>'
        if self.kind == "rect":
            size = f'width="{max(x2 - x, 0.5):.2f}" height="{max(y2 - y, 0.5):.2f}"'
            return f'{start} x="{x:.2f}" y="{y:.2f}" {size} fill="{self.colour}">{title}</rect>'
        if self.kind == "polygon":
            return f'{start} points="{path}" fill="{self.colour}"/>'
        if self.kind == "polyline":
            return f'{start} points="{path}" stroke="{self.colour}">{title}</polyline>'
        return f'{start} cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{self.colour}">{title}</circle>'

    def paint(self, axes: Any, order: int) -> None:
        """Draw it by matplotlib, over all that comes before it in the order."""
        xs, ys = zip(*self.places, strict=True)
        fill = _WASTE if self.colour == "var(--waste)" else _SOFT
        if self.colour.startswith("var(--s"):
            fill = LIGHT[int(self.colour.removeprefix("var(--s").rstrip(")")) - 1]
        if self.kind == "text":
            ink, size, weight = _TEXTS.get(self.style, (_SOFT, 12.0, "normal"))
            font = {"fontsize": size * _POINTS, "fontweight": weight, "ha": _ANCHORS[self.anchor], "zorder": order}
            axes.text(xs[0], ys[0], self.text.replace("$", r"\$"), color=ink, **font)
        elif self.kind == "rect":
            (left, right), (top, bottom) = xs, ys
            axes.fill([left, right, right, left], [top, top, bottom, bottom], color=fill, lw=0, zorder=order)
        elif self.kind == "polygon":
            axes.fill(xs, ys, color=fill, alpha=0.16, lw=0, zorder=order)
        elif self.kind == "circle":
            axes.plot(xs, ys, "o", color=fill, markersize=8 * _POINTS, markeredgecolor="white", zorder=order)
        else:
            ink, width, opacity = _LINES.get(self.style, (fill, 2.25, 1.0))
            axes.plot(xs, ys, color=ink, lw=width * _POINTS, alpha=opacity, zorder=order)


@dataclass(slots=True)
class Canvas:
    """Shapes in the order of drawing."""

    title: str
    height: float
    width: float
    shapes: list[Shape] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.shapes.append(Shape("line", style, [(x1, y1), (x2, y2)]))

    def text(self, x: float, y: float, text: str, style: str = "tick", anchor: str = "middle") -> None:
        self.shapes.append(Shape("text", style, [(x, y)], text=text, anchor=anchor))

    def rect(self, x: float, y: float, width: float, height: float, fill: str, tip: str) -> None:
        self.shapes.append(Shape("rect", "bar", [(x, y), (x + width, y + height)], fill, tip))

    def curve(self, places: Sequence[Place], stroke: str, tip: str) -> None:
        self.shapes.append(Shape("polyline", "curve", places, stroke, tip))

    def area(self, places: Sequence[Place], fill: str) -> None:
        self.shapes.append(Shape("polygon", "area", places, fill))

    def dot(self, place: Place, fill: str, tip: str) -> None:
        self.shapes.append(Shape("circle", "dot", [place], fill, tip))

    def place(self, other: Canvas, x: float, y: float) -> None:
        """Draw all that is on the other canvas, so far to the right and down."""
        for shape in other.shapes:
            self.shapes.append(replace(shape, places=[(px + x, py + y) for px, py in shape.places]))

    def to_svg(self, attributes: str = "", before: str = "") -> str:
        box = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        inner = before + "".join(shape.to_svg() for shape in self.shapes)
        return f'<svg {box} role="img" aria-label="{escape(self.title)}"{attributes}>{inner}</svg>'

    def write_picture(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width / 96, self.height / 96))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        axes.set_axis_off()
        for order, shape in enumerate(self.shapes):
            shape.paint(axes, order)
        figure.savefig(path, dpi=144)
