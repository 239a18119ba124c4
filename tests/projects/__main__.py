"""Existing projects with one line changed, against one process: `make test-projects`.

    python -m tests.projects [PROJECT ...]

Each project runs in one process, and under tensor, pipeline and hybrid parallelism. Compared are, on every rank, the
loss of each step, what was logged after it, and the state dict after the run; and the final checkpoint.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from tests.projects.catalog import CATALOG, Entry, unavailable
from tests.projects.train import DEADLINE_S, LAYOUTS, train

# What a checkpoint holds of the model and its training; the rest is about versions and loops.
IN_CHECKPOINT = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")


class Outcome(NamedTuple):
    """What came of a project in a layout."""

    text: str
    is_expected: bool


def results(folder: Path, rank: int = 0) -> dict[str, Any]:
    """Return what a rank recorded, and the checkpoint."""
    recorded = torch.load(folder / f"rank{rank}.pt", weights_only=False)
    checkpoint = torch.load(folder / "final.ckpt", weights_only=False)
    return recorded | {"checkpoint": {name: checkpoint[name] for name in IN_CHECKPOINT}}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all numbers of nested dicts and sequences, with the path to each."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{path}/{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    elif isinstance(value, (torch.Tensor, int, float)):
        yield path, torch.as_tensor(value)


def difference(expected: dict[str, Any], found: dict[str, Any]) -> tuple[float, str]:
    """Return the largest difference, relative to a tensor's largest number where that is above 1, and where it is."""
    left, right = dict(leaves(expected)), dict(leaves(found))
    if left.keys() != right.keys():
        return float("inf"), f"only one of them has {sorted(left.keys() ^ right.keys())[:3]}"
    largest, where = 0.0, ""
    for path, tensor in left.items():
        if tensor.shape != right[path].shape:
            return float("inf"), f"{path}: {tuple(tensor.shape)} and {tuple(right[path].shape)}"
        if tensor.numel() == 0:
            continue
        a, b = tensor.double(), right[path].double()
        apart = float((a - b).abs().max() / a.abs().max().clamp(min=1))
        if not apart <= largest:  # also if it is not a number
            largest, where = apart, path
    return largest, where


def judge(entry: Entry, layout: str, status: bool | None, expected: dict[str, Any], folder: Path) -> Outcome:
    """Compare a run with that of one process."""
    wanted = entry.refused.get(layout)
    refusals = [torch.load(path) for path in sorted(folder.glob("rank*.refused"))]
    if refusals:
        text = max(refusals, key=len)
        return Outcome(f"refused: {text}", wanted is not None and wanted in text)
    if status is None:
        return Outcome(f"hangs: killed after {DEADLINE_S:.0f} s", False)
    if not status:
        lines = [line for log in sorted(folder.glob("rank*.log")) for line in log.read_text().splitlines()]
        return Outcome(
            "failed: " + next((line for line in lines if re.match(r"[\w.]+Error:", line)), str(folder)), False
        )
    apart = max(difference(expected, results(folder, rank)) for rank in range(LAYOUTS[layout][0]))
    if apart[0] <= entry.tolerance:
        return Outcome(f"equal ({apart[0]:.0e})", wanted is None)
    return Outcome(f"different ({apart[0]:.0e} in {apart[1]})", False)


def run(project: str, folder: Path) -> dict[str, Outcome]:
    """Run a project in all layouts."""
    entry = CATALOG[project]
    layouts = [layout for layout in LAYOUTS if layout != "one process"]
    reason = unavailable(entry)
    if reason:
        return {layout: Outcome(f"skipped: {reason}", True) for layout in layouts}
    alone = folder / project / "one process"
    if not train(project, "one process", alone):
        return {layout: Outcome(f"does not run in one process, see {alone}", False) for layout in layouts}
    outcomes = {}
    for layout in layouts:
        there = folder / project / layout
        outcomes[layout] = judge(entry, layout, train(project, layout, there), results(alone), there)
        print(f"{project}, {layout}: {outcomes[layout].text}", flush=True)
    return outcomes


def main(projects: list[str]) -> int:
    torch.set_num_threads(1)  # ranks are forks: a pool of threads would not be in them
    folder = Path(tempfile.mkdtemp(prefix="projects-"))
    print(f"Logs of every run are in {folder}")
    layouts = [layout for layout in LAYOUTS if layout != "one process"]
    table = Table("project", *layouts, title="Existing projects, one line changed, against one process")
    all_expected = True
    for project in projects or CATALOG:
        outcomes = run(project, folder)
        all_expected &= all(outcome.is_expected for outcome in outcomes.values())
        cells = (f"{'' if outcome.is_expected else 'UNEXPECTED '}{outcome.text}" for outcome in outcomes.values())
        table.add_row(project, *cells, end_section=True)
    Console(markup=False, width=None if sys.stdout.isatty() else 160).print(table)
    return 0 if all_expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
