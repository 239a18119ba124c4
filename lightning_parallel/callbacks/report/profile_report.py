"""At the end of training: one page with pictures, the same as data, and a trace of all ranks.

After an error each rank writes its part of the trace to a file. The first rank gathers the files, and does without
missing ones. `rebuild` makes the page again from the files of a run that was killed.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import torch
from jinja2 import TemplateError
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.monitors.learning_rate import LearningRateScaling
from lightning_parallel.callbacks.recording.measuring import (
    VERSION,
    MeasuringCallback,
    create_folder,
    errors_as_warnings,
    finite,
    rank_info,
)
from lightning_parallel.callbacks.recording.session import Session
from lightning_parallel.callbacks.report.diagnosis import diagnose, verdict
from lightning_parallel.callbacks.report.page import render
from lightning_parallel.callbacks.report.trace import (
    TraceAccumulator,
    add_kineto,
    chrome_trace,
    read_json,
    read_trace,
    write_trace,
)
from lightning_parallel.checkpoint.place import put_file
from lightning_parallel.checkpoint.writer import installed_versions
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compression.compressor import check_integer
from lightning_parallel.mesh import AXES
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.tracing import StepSampler
from lightning_parallel.tracing.spans import seconds_text

__all__ = [
    "PAGE",
    "ProfileReport",
    "REPORT",
    "TRACE",
    "build_report",
    "first_error",
    "part_path",
    "read_parts",
    "read_report",
    "reading_report",
    "rebuild",
    "write_files",
    "write_part",
]


PAGE, REPORT, TRACE = "report.html", "report.json", "trace.json.gz"
_MOST_RANKS = 1 << 17


def build_report(
    run: Mapping[str, Any],
    reports: Mapping[str, Mapping[str, Any]],
    loss: Sequence[Sequence[float]],
    trace: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Build the contents of `report.json`, with the diagnosis.

    Args:
        run: Facts of the run.
        reports: Reports of the other callbacks, by name.
        loss: (step, loss).
        trace: Trace of `chrome_trace`, if there is one.
    """
    series = dict(reports.get("Throughput", {}).get("series", {}))
    report: dict[str, Any] = {"version": VERSION, "run": run, "reports": reports, "series": series}
    if loss:
        series["loss"] = loss
    if trace is not None:
        # The trace may be large, so keep its facts in the report: the page then need not read the trace.
        clocks = trace["otherData"]["clocks"]
        report["trace"] = {
            "file": TRACE,
            "ranks": [clock["rank"] for clock in clocks],
            "left_out": trace["otherData"]["left_out"],
            "steps": len({event["name"] for event in trace["traceEvents"] if event.get("cat") == "step"}),
            "uncertainty": max((clock["uncertainty_ns"] for clock in clocks), default=0) / 1e9,
        }
    # Before the diagnosis, so that it sees the figures of a report that was written and read again.
    report = finite(report)
    report["diagnosis"] = [advice.to_dict() for advice in diagnose(report)]
    return report


def write_files(folder: Path, report: Mapping[str, Any], trace: Mapping[str, Any] | None) -> None:
    """Write page, data and trace."""
    folder.mkdir(parents=True, exist_ok=True)
    # JSON has no NaN, and browsers refuse files with it: `finite` has left none.
    for name, text in ((REPORT, json.dumps(report, indent=1, allow_nan=False)), (PAGE, render(report))):
        put_file(folder / name, text.encode("utf-8"))
    if trace is not None:
        write_trace(trace, folder / TRACE)


def read_report(path: Path) -> tuple[Path, dict[str, Any]]:
    """Read the report of a run; returns the folder in which it lies, and the report.

    Args:
        path: That folder, or one that contains it as `profile`, such as the trainer's log folder.

    Raises:
        ValueError: If there is none, or one that this version cannot read.
    """
    for folder in (path, path / "profile"):
        file = folder / REPORT
        if file.is_file():
            report = read_json(file)
            if not isinstance(report, dict) or report.get("version") != VERSION or not _is_run(report.get("run")):
                raise ValueError(f"{file} must hold a report of `ProfileReport`, of version {VERSION}")
            return folder, report
    raise ValueError(f"The folder of a profiled run must hold `{REPORT}` or `profile/{REPORT}`; got {path}")


def _is_run(run: Any) -> bool:
    size = run.get("world_size", 1) if isinstance(run, dict) else None
    return type(size) is int and 1 <= size <= _MOST_RANKS


@contextmanager
def reading_report(path: Path) -> Iterator[None]:
    """Name the file whose values cannot be drawn: another program may have written it."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, TemplateError) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} must hold a report of `ProfileReport`; got other values: {what}") from error


def rebuild(path: Path, kineto: Sequence[Path] = ()) -> Path:
    """Make the page of a run again with the rules of this version; returns its path.

    After an error, parts of the trace that came too late for rank 0 are added.

    Args:
        path: See `read_report`.
        kineto: Traces of `torch.profiler` to add to the run's own.

    Raises:
        ValueError: If there is no report, or a trace cannot be added.
    """
    folder, report = read_report(path)
    with reading_report(folder):
        return _rebuilt(folder, report, kineto)


def _rebuilt(folder: Path, report: Mapping[str, Any], kineto: Sequence[Path]) -> Path:
    run = report["run"]
    trace = None
    parts = read_parts(folder, run["world_size"], run["started"], patience_s=0)
    if parts:
        trace = chrome_trace(parts, run["mesh"])
        run = {**run, **first_error(parts)}
    if kineto:
        trace = read_trace(folder / TRACE) if trace is None else trace
        for file in kineto:
            add_kineto(trace, read_trace(file))
    rebuilt = build_report(run, report["reports"], report["series"].get("loss", []), trace)
    # Without a trace to write, an earlier trace stays, and so do its facts in the report.
    write_files(folder, rebuilt if trace is not None else {**report, **rebuilt}, trace)
    return folder / PAGE


def first_error(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Find the earliest error among the ranks, the cause of later errors; empty without any."""
    # Compare on one clock: a failed rank makes other ranks fail a little later.
    failed = [(part["failed_ns"] + part["clock"]["offset_ns"], part) for part in parts if "error" in part]
    if not failed:
        return {}
    _, first = min(failed, key=lambda one: one[0])
    return {"error": first["error"], "error_rank": first["rank"]}


def part_path(folder: Path, rank: int) -> Path:
    """Return the file for a rank's part of the trace."""
    return folder / f"part{rank}.json.gz"


def write_part(path: Path, part: Mapping[str, Any]) -> None:
    """Write one rank's part of a trace atomically: rank 0 sees the complete file or no file."""
    # Rank 0 may look for the file during the write.
    write_trace(part, path)


def read_parts(folder: Path, world_size: int, run: str, patience_s: float) -> list[dict[str, Any]]:
    """Read the parts that ranks of this run leave within `patience_s` seconds; skip incomplete files."""
    until = time.monotonic() + patience_s
    found: dict[int, dict[str, Any]] = {}
    while len(found) < world_size:
        for rank in set(range(world_size)) - found.keys():
            with suppress(ValueError, FileNotFoundError):
                part = read_json(part_path(folder, rank))
                if isinstance(part, dict) and part.pop("run", None) == run:
                    found[rank] = part
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return [found[rank] for rank in sorted(found)]


LOSSES = 1000
"""Steps whose losses are drawn at most; they are read from the device when training has ended."""
NOT_WRITTEN = "the profile could not be written"
PATIENCE_S = 5.0
"""Seconds that rank 0 waits for the trace of other ranks after an error."""


class ProfileReport(MeasuringCallback):
    """Collects the reports of the other measuring callbacks and writes them when training ends, also after an error.

    | file | contents |
    |---|---|
    | `report.html` | one page with the diagnosis on top, and pictures; needs no network |
    | `report.json` | the same as data: `run`, `reports` by callback, `series`, `diagnosis`, `trace` |
    | `trace.json.gz` | the last steps of all ranks, for https://ui.perfetto.dev |

    The page shows only signals that were measured. Add `StepBreakdown`, `CommunicationProfiler`, `PipelineTimeline` and
    other callbacks to the Trainer, in any order. `lightning-parallel report DIR` makes the page again, and compares two
    runs.

    After an error, or if an exchange between the ranks failed before, the figures come from the last exchange. Each
    rank then leaves its part of the trace in a file. Rank 0 reads the files that exist after 5 s. If there is nothing
    to train, nothing is written: for example, when you resume a finished run.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CommunicationProfiler, ProfileReport, StepBreakdown

        trainer = Trainer(callbacks=[StepBreakdown(), CommunicationProfiler(), ProfileReport(dirpath="profile")])
        trainer.fit(MyModule(), MyData())  # writes profile/report.html
        ```

    Args:
        dirpath: Folder where rank 0 writes the files. None selects `profile` in the trainer's log folder.
        trace_steps: Number of last steps in the trace; 0 writes no trace.
        every_n_batches: Number of batches between two exchanges of results among the ranks. The smallest value of all
            callbacks counts.
        warmup_batches: Number of first batches that are not counted. The largest value of all callbacks counts.
        show_diagnosis: Print the diagnosis and the paths at the end of training.

    `report()` returns the contents of `report.json`, on rank 0.

    Raises:
        ValueError: If `trace_steps` is negative.
    """

    def __init__(
        self,
        dirpath: Optional[str] = None,
        trace_steps: int = 20,
        every_n_batches: int = 50,
        warmup_batches: int = 1,
        show_diagnosis: bool = True,
    ) -> None:
        check_integer("trace_steps", trace_steps, least=0)
        super().__init__(every_n_batches, warmup_batches, dirpath, show_table=False)
        self.trace_steps = trace_steps
        self.show_diagnosis = show_diagnosis
        self.folder = Path()
        self._run: dict[str, Any] = {}
        self._loss = StepSampler[Tensor](LOSSES)
        self._parts: Sequence[Mapping[str, Any]] = ()
        self._began_s = 0.0
        self._step = 0

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> TraceAccumulator:
        session = self.open_session
        folder = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "profile")
        self.folder = create_folder(folder, session.group)
        # Rank 0's time names the run on all ranks, so parts of an earlier run in the folder do not mix in.
        started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        self._run = {"started": comm.all_gather_object(started, session.group)[0]}
        self._loss = StepSampler(LOSSES)
        self._parts = ()
        return TraceAccumulator(rank_info(session), self.trace_steps)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began_s = time.perf_counter()
        self._run |= _run_facts(trainer, pl_module, self.open_session)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        recorder = self.open_session.recorder
        # Not at the end of the batch: by then, another callback may have begun the next step.
        self._step = recorder.step if recorder is not None else 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        loss = _loss(outputs)
        # Copy the loss on the device: other code may write to it, or it may be a view of a large tensor.
        if loss is not None:
            self._loss.add(self._step, loss.detach().clone())

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        session = self.open_session
        # The last exchange has compared clocks of several hosts near the last steps, which the trace holds.
        part = self.accumulator.part(session.clock)
        self._parts = session.gather(part) or ()
        if not self._parts:
            with errors_as_warnings(NOT_WRITTEN):
                self._leave_part(part)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.open_session.recorder is None:
            tell(f"nothing was trained: {self.folder / PAGE} is left as it is")
            return
        with errors_as_warnings(NOT_WRITTEN):
            self._finish(trainer, self.open_session)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Before `super`, which drops the session.
        session = self.session
        super().on_exception(trainer, pl_module, exception)
        if session is None or session.recorder is None:
            return  # before training began, or not in `fit`
        part = self.accumulator.part(session.clock, session.recorder.last_steps(1))
        self._run["error"] = f"{type(exception).__name__}: {exception}"
        part |= {"error": self._run["error"], "failed_ns": time.perf_counter_ns()}
        with errors_as_warnings(NOT_WRITTEN):  # a failure here must not hide `exception`
            self._leave_part(part)
            self._finish(trainer, session)

    def _leave_part(self, part: Mapping[str, Any]) -> None:
        """Leave this rank's part of the trace to rank 0 in a file, because the ranks can no longer exchange it."""
        write_part(part_path(self.folder, part["rank"]), {**part, "run": self._run["started"]})

    @rank_zero_only
    def _finish(self, trainer: Trainer, session: Session) -> None:
        if not self._parts:
            self._parts = read_parts(self.folder, trainer.world_size, self._run["started"], PATIENCE_S)
            self._run |= first_error(self._parts)
        self._run |= {"seconds": time.perf_counter() - self._began_s, "steps": session.steps}
        reports = _reports(trainer, self)
        trace = chrome_trace(self._parts, self._run["mesh"]) if any(part["steps"] for part in self._parts) else None
        if trace is None:
            (self.folder / TRACE).unlink(missing_ok=True)  # from another run
        loss = [(step, value.item()) for step, value in self._loss.values.items()]
        self._report = report = build_report(self._run, reports, loss, trace)
        write_files(self.folder, report, trace)
        if self.show_diagnosis:
            self._show(report)

    def _show(self, report: Mapping[str, Any]) -> None:
        # Titles hold names and errors of the run, whose brackets are no markup.
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for sentence in (verdict(report), _against_prediction(report)):
            if sentence:
                console.print(sentence)
        for advice in report["diagnosis"][:3]:
            console.print(f"- {advice['title']}. {advice['text']}")
        console.print(f"profile: {self.folder / PAGE}")
        if "trace" in report:
            console.print(f"trace:   {self.folder / TRACE} (open it at https://ui.perfetto.dev)")

    @override
    def report(self) -> dict[str, Any]:
        if self._report is None:
            raise RuntimeError(
                "`ProfileReport.report()` needs a finished `fit`; there was none yet. Call `trainer.fit` first"
            )
        return self._report


def _against_prediction(report: Mapping[str, Any]) -> str:
    """Compare the measured step of a pipeline with its prediction; empty if either is unknown."""
    seconds = report["reports"].get("PipelineTimeline", {}).get("seconds", {})
    predicted, measured = seconds.get("predicted"), seconds.get("measured")
    if not predicted or not measured:
        return ""
    return (
        f"Pipeline step time: {seconds_text(measured)} measured, {seconds_text(predicted)} predicted"
        f" ({measured / predicted - 1:+.0%})."
    )


def _commit() -> str | None:
    """Return the commit of the working directory, with a `+` if files differ from it; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _run_facts(trainer: Trainer, pl_module: LightningModule, session: Session) -> dict[str, Any]:
    """Describe a run at the start of its training; leave out unknown facts."""
    strategy, mesh = trainer.strategy, session.mesh
    engine = getattr(getattr(strategy, "run", None), "engine", None)
    schedule = engine.schedule if isinstance(engine, PipelineEngine) else None
    compression = getattr(strategy, "compression", None)
    samples = getattr(trainer.train_dataloader, "batch_size", None)
    device = strategy.root_device
    scales = any(isinstance(one, LearningRateScaling) for one in trainer.callbacks)  # type: ignore[attr-defined]
    facts = {
        "model": type(pl_module).__name__,
        "strategy": type(strategy).__name__,
        "world_size": trainer.world_size,
        "mesh": {axis: mesh.size(axis) for axis in AXES},
        "replicas": mesh.data_parallel,
        "precision": str(trainer.precision),
        "host": socket.gethostname(),
        "cores": session.cores,
        "threads": torch.get_num_threads(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": _commit() if session.rank == 0 else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "schedule": schedule and schedule.name,
        "num_microbatches": schedule and schedule.num_microbatches,
        "compression": None if compression is None else repr(compression),
        "replica_batch": samples,
        "global_batch": samples and samples * mesh.data_parallel * trainer.accumulate_grad_batches,
        "learning_rate": _learning_rate(trainer),
        "scales_learning_rate": scales or None,
        "versions": installed_versions("lightning-parallel", "lightning", "torch"),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _learning_rate(trainer: Trainer) -> float | None:
    """Read the learning rate of the first parameter group, before a schedule changes it."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return float(groups[0].get("initial_lr", groups[0]["lr"])) if groups else None


def _loss(outputs: Any) -> Tensor | None:
    """Find the loss in the outputs of a step; None unless it is one number that this rank knows by itself."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, DTensor):
        # Without communication, which would need all ranks, only a replicated value is known.
        loss = loss.to_local() if all(place.is_replicate() for place in loss.placements) else None
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _reports(trainer: Trainer, this: ProfileReport) -> dict[str, dict[str, Any]]:
    """Gather the reports of the trainer's other callbacks, by their names."""
    reports = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, MeasuringCallback) and callback is not this and callback.has_report:
            reports[callback.name] = callback.report()
    return reports
