"""A drawing as a list of shapes, written as SVG (text, any zoom) or PNG (pixels)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, Union

__all__ = ["Line", "Picture", "Polygon", "Rect", "Text", "write_picture"]

_FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"
_PNG_SCALE = 2


@dataclass(frozen=True)
class Rect:
    """A filled rectangle with rounded corners; `hint` is shown under the mouse."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    radius: float = 0
    hint: str = ""


@dataclass(frozen=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str
    width: float = 1


@dataclass(frozen=True)
class Polygon:
    """A filled area inside the given corners."""

    points: Sequence[tuple[float, float]]
    fill: str


@dataclass(frozen=True)
class Text:
    """One line of text; (x, y) is on its baseline."""

    x: float
    y: float
    text: str
    size: float = 12
    fill: str = "#1f2933"
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Union[Rect, Line, Polygon, Text]


@dataclass
class Picture:
    """Shapes on a white ground, later ones on top. Sizes in pixels."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Put shapes on top."""
        self.shapes.extend(shapes)

    def to_svg(self) -> str:
        """Give the picture as one self-contained SVG document."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        style = f'font-family="{_FONT}" style="font-variant-numeric: tabular-nums"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="#fff"/>'
        )
        return "\n".join([head, *map(_svg, self.shapes), "</svg>\n"])

    def save_png(self, path: Path) -> None:
        """Write the picture as pixels, two for each unit.

        Raises:
            RuntimeError: If Pillow is not installed.
        """
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise RuntimeError(f"writing {path.name} needs Pillow: `pip install pillow`, or write an .svg") from error
        image = Image.new("RGB", (round(self.width * _PNG_SCALE), round(self.height * _PNG_SCALE)), "white")
        canvas = ImageDraw.Draw(image)
        for shape in self.shapes:
            _paint(canvas, shape)
        image.save(path)


def write_picture(picture: Picture, path: Path) -> None:
    """Write a picture in the format that the file's name asks for.

    Raises:
        ValueError: If the name ends neither in .svg nor in .png.
    """
    if path.suffix == ".svg":
        path.write_text(picture.to_svg(), encoding="utf-8")
    elif path.suffix == ".png":
        picture.save_png(path)
    else:
        raise ValueError(f"expected a file name ending in .svg or .png, got `{path.name}`")


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rect):
        box = _attributes(x=shape.x, y=shape.y, width=shape.width, height=shape.height)
        corner = _attributes(rx=shape.radius) if shape.radius else ""
        if not shape.hint:
            return f'<rect{box}{corner} fill="{shape.fill}"/>'
        return f'<rect{box}{corner} fill="{shape.fill}"><title>{escape(shape.hint)}</title></rect>'
    if isinstance(shape, Line):
        ends = _attributes(x1=shape.x1, y1=shape.y1, x2=shape.x2, y2=shape.y2)
        return f'<line{ends} stroke="{shape.stroke}" stroke-width="{shape.width:g}"/>'
    if isinstance(shape, Polygon):
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
        return f'<polygon points="{points}" fill="{shape.fill}"/>'
    weight = ' font-weight="600"' if shape.bold else ""
    place = _attributes(x=shape.x, y=shape.y, font_size=shape.size)
    # A label must not take the mouse from the shape under it, which has the hint.
    rest = f'fill="{shape.fill}" text-anchor="{shape.anchor}"{weight} pointer-events="none"'
    return f"<text{place} {rest}>{escape(shape.text)}</text>"


def _attributes(**values: float) -> str:
    return "".join(f' {name.replace("_", "-")}="{value:.2f}"' for name, value in values.items())


def _paint(canvas: Any, shape: Shape) -> None:
    if isinstance(shape, Rect):
        box = _scaled((shape.x, shape.y, shape.x + max(shape.width, 0.5), shape.y + shape.height))
        canvas.rounded_rectangle(box, radius=shape.radius * _PNG_SCALE, fill=shape.fill)
    elif isinstance(shape, Line):
        ends = _scaled((shape.x1, shape.y1, shape.x2, shape.y2))
        canvas.line(ends, fill=shape.stroke, width=max(1, round(shape.width * _PNG_SCALE)))
    elif isinstance(shape, Polygon):
        canvas.polygon(_scaled(value for point in shape.points for value in point), fill=shape.fill)
    else:
        _paint_text(canvas, shape)


def _paint_text(canvas: Any, text: Text) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(text.size * _PNG_SCALE)
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[text.anchor]
    canvas.text(
        _scaled((text.x, text.y)), text.text, fill=text.fill, font=font, anchor=anchor, stroke_width=0.4 * text.bold
    )


def _scaled(values: Iterable[float]) -> list[float]:
    return [value * _PNG_SCALE for value in values]
