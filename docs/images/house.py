"""Draw the picture of the house, `house.svg`, from the packages and rooms that the code has.

A box holds the name of a package, a room or a door file, and the first sentence of its docstring. Run it after a room
has come or gone: `python docs/images/house.py`. `tests/test_architecture.py` compares the picture with a new drawing.
"""

import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

PACKAGE = Path(__file__).parents[2] / "lightning_parallel"
PICTURE = Path(__file__).with_name("house.svg")
# From the roof down. A package imports packages of lower floors only.
FLOORS = [
    ["cli"],
    ["strategies", "callbacks"],
    ["checkpoint", "planner"],
    ["tensor", "pipeline", "compression", "data_parallel", "optim"],
    ["step_trace"],
    ["comm"],
    ["compat", "mesh", "tracing"],
]
SHARES = {"strategies": 0.66, "callbacks": 0.34, "tensor": 0.25, "pipeline": 0.27, "compression": 0.22}
SHARES |= {"data_parallel": 0.14, "optim": 0.12}
WIDTH, MARGIN, GAP, LINE = 1080, 20, 12, 15
COLOURS = ["#ede9fe", "#dbeafe", "#dcfce7", "#fef9c3", "#ffedd5", "#fce7f3", "#f3f4f6"]
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2937}.n{font:600 13px ui-monospace,Menlo,Consolas,monospace}"
    ".m{font-size:11px;fill:#6b7280}.f{stroke:#9ca3af}"
    ".r,.d{fill:#fff;stroke:#9ca3af}.d{stroke-dasharray:4 3}"
)


def sentence(path: Path) -> str:
    """Return the first sentence of the docstring of a module or a package."""
    text = ast.get_docstring(ast.parse((path / "__init__.py" if path.is_dir() else path).read_text())) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".").replace("`", "") + "."


def modules(path: Path) -> str:
    """Return the names of the modules in a folder; nothing for a module or a package with rooms."""
    found = [] if any(path.glob("*/__init__.py")) else sorted(path.glob("*.py"))
    return ", ".join(module.stem for module in found if module.stem != "__init__")


def boxes_of(package: str) -> tuple[list[Path], list[Path]]:
    """Return the rooms of a package, each after the rooms that it imports, and its door files."""
    rooms = [path.parent for path in sorted((PACKAGE / package).glob("*/__init__.py"))]
    known: dict[str, set[str]] = {}
    for room in rooms:
        text = "".join(path.read_text() for path in room.glob("*.py"))
        known[room.name] = {other.name for other in rooms if f".{package}.{other.name}" in text} - {room.name}

    def floor(name: str) -> int:
        return 1 + max(map(floor, known[name]), default=0)

    rooms.sort(key=lambda room: floor(room.name))
    doors = sorted(path for path in (PACKAGE / package).glob("*.py") if rooms and path.stem != "__init__")
    return rooms, doors


def wrapped(text: str, width: float) -> list[str]:
    """Break a text into lines for a box of so many pixels."""
    return textwrap.wrap(text, int((width - 16) / 6.5), break_on_hyphens=False) if text else []


def texts(name: str, lines: list[str], x: float, y: float, small: Sequence[str] = ()) -> list[str]:
    """Return the name of a box, the lines below it, and the names of its modules below them."""
    found = [f'<text class="n" x="{x:.0f}" y="{y:.0f}">{escape(name)}</text>']
    for number, line in enumerate([*lines, *small], 1):
        kind = ' class="m"' if number > len(lines) else ""
        found.append(f'<text{kind} x="{x:.0f}" y="{y + number * LINE:.0f}">{escape(line)}</text>')
    return found


def grid(paths: list[Path], kind: str, x: float, y: float, width: float) -> tuple[list[str], float]:
    """Draw boxes in rows from `y` down; return them and where they end."""
    columns = max(1, int(width // 215))
    size = (width - GAP * (columns - 1)) / columns
    drawn: list[str] = []
    for start in range(0, len(paths), columns):
        row = [
            (path, wrapped(sentence(path), size), wrapped(modules(path), size))
            for path in paths[start : start + columns]
        ]
        height = 30 + LINE * max(len(lines) + len(small) for _, lines, small in row)
        for number, (path, lines, small) in enumerate(row):
            left = x + number * (size + GAP)
            drawn.append(
                f'<rect class="{kind}" x="{left:.0f}" y="{y:.0f}" width="{size:.0f}" height="{height:.0f}" rx="4"/>'
            )
            drawn += texts(path.name if path.suffix else f"{path.name}/", lines, left + 8, y + 19, small)
        y += height + GAP
    return drawn, y


def package_box(package: str, x: float, y: float, width: float) -> tuple[list[str], float]:
    """Draw what a package holds; return it and where it ends."""
    path = PACKAGE / package
    path = path if path.is_dir() else path.with_suffix(".py")
    lines, small = wrapped(sentence(path), width), wrapped(modules(path), width)
    drawn = texts(package, lines, x + 10, y + 20, small)
    end = y + 30 + LINE * len([*lines, *small])
    rooms, doors = boxes_of(package)
    for paths, kind, label in (
        (doors, "d", "Doors, and files that all rooms may import"),
        (rooms, "r", "Rooms: each imports rooms before it"),
    ):
        if paths:
            drawn.append(f'<text x="{x + 10:.0f}" y="{end + 8:.0f}">{label}</text>')
            more, end = grid(paths, kind, x + 10, end + 16, width - 20)
            drawn += more
    return drawn, end


def picture() -> str:
    """Return the whole drawing as SVG."""
    drawn: list[str] = []
    y = MARGIN
    for floor, colour in zip(FLOORS, COLOURS):
        space = WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)
        x, ends, packages = MARGIN, [], []
        for package in floor:
            width = space * SHARES.get(package, 1 / len(floor))
            inside, end = package_box(package, x, y, width)
            packages.append((x, width, inside))
            ends.append(end)
            x += width + GAP
        height = max(ends) - y + 4
        for left, width, inside in packages:
            drawn.append(
                f'<rect class="f" fill="{colour}" x="{left:.0f}" y="{y:.0f}" width="{width:.0f}" '
                f'height="{height:.0f}" rx="6"/>'
            )
            drawn += inside
        y += height + GAP
    title = "<title>The packages of lightning_parallel, the rooms in them, and what each one holds</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - GAP + MARGIN:.0f}" role="img">'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", background, *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
