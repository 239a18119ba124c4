"""The programme for one GPU: every figure of it with what it should be, in ten minutes.

    python benchmarks/gpu.py [--out results/gpu] [--minutes 10] [--sections facts world_one ...] [--device cuda]

Each section runs in a process of its own with a deadline, in the order of what it is worth; one that fails or takes
too long stops none of the others. Each leaves what it has measured in `OUT/SECTION.json`; the page is `OUT/summary.md`.
With `--device cpu` all of it runs on small models, which tests the programme and not the device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import gpu_sections
import torch
from gpu_sections import Figure, Section
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Outcome:
    """A section's figures, how long it took, and why it ended early if it did."""

    section: str
    figures: list[Figure]
    seconds: float
    failure: str = ""


def run_alone(section: Section, options: argparse.Namespace, left_s: float) -> Outcome:
    """Run a section in a process of its own."""
    path = Path(options.out) / f"{section.name}.json"
    path.unlink(missing_ok=True)
    deadline_s = min(section.deadline_s, left_s)
    command = [sys.executable, __file__, "--section", section.name, "--out", options.out, "--device", options.device]
    # Its children, such as ranks, are of its session, and end with it.
    begun_s = time.monotonic()
    log = Path(options.out) / f"{section.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        failure = ""
        try:
            if process.wait(deadline_s):
                failure = next(reversed([line for line in log.read_text().splitlines() if line.strip()]), "failed")
        except subprocess.TimeoutExpired:
            failure = f"stopped after {deadline_s:.0f} s"
        finally:
            _end_session(process)
    figures = [Figure(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    if options.device == "cpu" and section.name not in gpu_sections.ABOUT_NUMBERS:
        figures = [replace(figure, is_good=None) for figure in figures]
    return Outcome(section.name, figures, time.monotonic() - begun_s, failure)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def run_here(name: str, out: Path, device: str) -> None:
    """Run a section in this process; what it has measured is written after each figure."""
    figures: list[Figure] = []
    path = out / f"{name}.json"
    for figure in gpu_sections.SECTIONS[name].measure(device):
        figures.append(figure)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps([asdict(entry) for entry in figures], indent=1))
        partial.replace(path)


def summary(outcomes: list[Outcome]) -> Table:
    """Return one row per figure, and one for each section that did not end."""
    table = Table(title=f"GPU programme: {gpu_sections.machine()}")
    for header in ("section", "figure", "value", "anchor", "verdict"):
        table.add_column(header, justify="right" if header == "value" else "left")
    for outcome in outcomes:
        for number, figure in enumerate(outcome.figures):
            table.add_row("" if number else outcome.section, figure.name, figure.text, figure.anchor, figure.verdict)
        if outcome.failure:
            table.add_row("" if outcome.figures else outcome.section, outcome.failure[:80], "", "", "did not end")
        table.add_section()
    return table


def page(outcomes: list[Outcome]) -> str:
    """Return the summary in Markdown."""
    lines = [f"# GPU programme: {gpu_sections.machine()}", ""]
    lines += ["| section | figure | value | anchor | verdict |", "|---|---|---:|---|---|"]
    for outcome in outcomes:
        rows = [(figure.name, figure.text, figure.anchor, figure.verdict) for figure in outcome.figures]
        rows += [(outcome.failure[:160].replace("|", "/"), "", "", "did not end")] if outcome.failure else []
        lines += [f"| {outcome.section} | " + " | ".join(row) + " |" for row in rows]
    lines += ["", f"Seconds: {', '.join(f'{outcome.section} {outcome.seconds:.0f}' for outcome in outcomes)}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the sections, print the table, and tell whether all of them ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/gpu")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sections", nargs="+", choices=[*gpu_sections.SECTIONS], default=[*gpu_sections.SECTIONS])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--section", choices=[*gpu_sections.SECTIONS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device was found; `--device cpu` runs the programme on small models")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.section is not None:
        run_here(options.section, out, options.device)
        return 0
    end_s = time.monotonic() + 60 * options.minutes
    outcomes: list[Outcome] = []
    for name in options.sections:
        left_s = end_s - time.monotonic()
        if left_s < 5:
            outcomes.append(Outcome(name, [], 0.0, f"left out: {options.minutes:g} minutes were over"))
            continue
        print(f"{name} ...", flush=True)
        outcomes.append(run_alone(gpu_sections.SECTIONS[name], options, left_s))
        # After each: whoever stops the programme keeps what is there.
        (out / "summary.md").write_text(page(outcomes))
    Console(width=140).print(summary(outcomes))
    print(f"written to {out / 'summary.md'}")
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
