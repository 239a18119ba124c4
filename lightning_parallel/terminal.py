"""Tables for people."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

__all__ = ["show"]

WIDTH_OF_FILES = 120


def show(renderable: Any) -> None:
    """Print a table; in a log file it may be wider than the 80 columns that `rich` takes for granted."""
    console = Console(highlight=False)
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = WIDTH_OF_FILES
    console.print(renderable)
