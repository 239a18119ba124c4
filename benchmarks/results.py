"""The figures that README, pages and docstrings repeat: benchmarks write `results.json`, a test compares.

With `--record` a benchmark replaces its own figures there. `tests/test_figures.py` names the places that repeat them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results.json")


def record(benchmark: str, figures: Mapping[str, Mapping[str, float]]) -> None:
    """Write the figures of a benchmark, by name, with the commit and the machine; figures with other names are kept."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    measured = _measured()
    for name, values in figures.items():
        results.setdefault(benchmark, {})[name] = {**values, "measured": measured}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _measured() -> dict[str, Any]:
    git = ("git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD")
    return {
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
