"""A selection of the tests on one version of torch: `make test-torch TORCH=2.9.1`, or `make test-torches` for each.

    python -m tests.torch_versions [--record] [OPTION OF PYTEST ...]

The selection has tests of every part that calls torch in a way of its own: the private names, collectives, sharded
layers, pipelines, ZeRO, compression and checkpoints. With `--record` the counts go to `benchmarks/results.json`, and
the table in `docs/compatibility.md` is written from there; `tests/test_figures.py` compares the two.
"""

import json
import platform
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
BENCHMARK = "torch_versions"
SUPPORTED = [f"2.{minor}" for minor in range(6, 14)]
SELECTION = {
    "": ("test_compat", "test_gradient_session", "test_mesh", "test_scattering_reducer"),
    "callbacks": ("test_collective_tracer",),
    "checkpoint": ("test_distributed", "test_sharded_files"),
    "comm": ("test_collectives", "test_groups", "test_rendezvous", "test_work"),
    "compression": ("test_ddp", "test_fsdp"),
    "pipeline": ("test_engine", "test_runtime"),
    "step_trace": ("test_record",),
    "strategies": ("test_experts", "test_fabric", "test_pipeline", "test_pipeline_checkpoint", "test_zero"),
    "tensor": ("test_autograd", "test_compiled", "test_context_attention", "test_layers", "test_loss"),
}
BEGIN, END = "<!-- from the runs: make test-torches -->\n", "<!-- end of the runs -->\n"


class Outcomes:
    """What came of each test, from the reports of pytest."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            # Reasons name the version, which the table does.
            self.skipped[re.sub(r"\btorch \d\S+", "this torch", reason.removeprefix("Skipped: "))] += 1
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that cannot be imported is a failure, not a file without tests
            self.failed.add(report.nodeid)


def run(options: list[str]) -> dict[str, Any]:
    """Run the selection; tests that failed beside others run once more, alone. Return the counts and the reasons."""
    outcomes, again = Outcomes(), Outcomes()
    paths = [str(ROOT / "tests" / folder / f"{name}.py") for folder, names in SELECTION.items() for name in names]
    common = ["-q", "--continue-on-collection-errors", "-m", "not (gpu or ray or browser or more)", *options]
    ended = pytest.main([*common, *paths], plugins=[outcomes])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # the crash of a worker, for one
        sys.exit(int(ended))
    if outcomes.failed:
        pytest.main([*common, "-n", "0", *(str(ROOT / name) for name in sorted(outcomes.failed))], plugins=[again])
    failed = outcomes.failed - (again.passed - again.failed)
    return {
        "failed": sorted(failed),
        "passed": len((outcomes.passed | again.passed) - failed),
        "skipped": dict(sorted(outcomes.skipped.items())),
    }


def table(runs: dict[str, Any]) -> str:
    """Return the part of the page on the compatibility that the runs decide, as Markdown."""
    lines = ["| torch | Python | passed | skipped | failed |", "|---|---|---|---|---|"]
    reasons: dict[str, list[str]] = {}
    for version in SUPPORTED:
        found = [name for name in runs if name.rpartition(".")[0] == version]
        lines += [] if found else [f"| {version} | | not run | | |"]
        for name in found:
            run = runs[name]
            counts = run["passed"], sum(run["skipped"].values()), len(run["failed"])
            lines.append(f"| {name} | {run['measured']['python']} | " + " | ".join(map(str, counts)) + " |")
            for reason, count in run["skipped"].items():
                reasons.setdefault(f"skipped: {reason}", []).append(f"{name} ({count})")
            for test in run["failed"]:
                reasons.setdefault(f"failed: `{test}`", []).append(name)
    told = [f"* {reason}: {', '.join(names)}" for reason, names in sorted(reasons.items())]
    return "\n".join([*lines, "", *told]) + "\n"


def write_page(runs: dict[str, Any]) -> None:
    """Write the table between its two marks in the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"(?s)(?<={BEGIN}).*(?={END})", lambda _: f"\n{table(runs)}\n", page), encoding="utf-8")


def main(arguments: list[str]) -> int:
    options = [argument for argument in arguments if argument != "--record"]
    import torch

    version = torch.__version__.partition("+")[0]
    counts = run(options)
    skipped = sum(counts["skipped"].values())
    print(f"\ntorch {version}, Python {platform.python_version()}:")
    print(f"{counts['passed']} passed, {len(counts['failed'])} failed, {skipped} skipped")
    for reason, count in counts["skipped"].items():
        print(f"  skipped {count}: {reason}")
    for name in counts["failed"]:
        print(f"  failed: {name}")
    if "--record" in arguments:
        from benchmarks.results import RESULTS, record

        record(BENCHMARK, {version: counts})
        write_page(json.loads(RESULTS.read_text(encoding="utf-8"))[BENCHMARK])
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
