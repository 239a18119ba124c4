"""At the end of training: one page with pictures, the same as data, and a trace of all ranks."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from rich.console import Console
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.clocks import ClockOffset, clock_id, compare_clocks
from lightning_parallel.callbacks.diagnosis import diagnose
from lightning_parallel.callbacks.kineto import add_kineto
from lightning_parallel.callbacks.measuring import (
    VERSION,
    Accumulator,
    MeasuringCallback,
    create_folder,
    errors_as_warnings,
    finite,
    rank_info,
)
from lightning_parallel.callbacks.page import render
from lightning_parallel.callbacks.run_facts import run_facts
from lightning_parallel.callbacks.session import Session
from lightning_parallel.callbacks.trace import TraceAccumulator, chrome_trace, read_json, read_trace, write_trace
from lightning_parallel.tracing import StepSampler

__all__ = ["PAGE", "REPORT", "TRACE", "ProfileReport", "read_report", "rebuild"]

PAGE, REPORT, TRACE = "report.html", "report.json", "trace.json.gz"
LOSSES = 1000
"""Steps whose losses are drawn at most; they are read from the device when training has ended."""
NOT_WRITTEN = "the profile could not be written"
PATIENCE_S = 5.0
"""How long rank 0 waits for the others' part of the trace after an error."""


class ProfileReport(MeasuringCallback):
    """Gathers what the other measuring callbacks found, and writes it down when training ends, also with an error.

        report.html     one page with pictures and the diagnosis on top; needs no network
        report.json     the same as data: `run`, `reports` by callback, `series`, `diagnosis`, `trace`
        trace.json.gz   the last steps of all ranks for https://ui.perfetto.dev

    It shows what was measured: add `StepBreakdown`, `CommunicationProfiler`, `PipelineTimeline` and others to the
    Trainer's callbacks, in any order. `lightning-parallel report DIR` makes the page again, and compares two runs.

    After an error, or if the ranks could not exchange something before, figures are those of the last exchange, and the
    ranks leave their part of the trace in files, which rank 0 reads as far as they are there after 5 s. Where there is
    nothing to train, as after the resume of a run that is over, nothing is written.

    Args:
        dirpath: Where to write; by default `profile` in the trainer's log folder.
        trace_steps: Last steps that the trace holds; 0 for no trace.
        every_n_steps, warmup_steps: See `MeasuringCallback`.
        show_diagnosis: Print the diagnosis and the paths at the end of training.

    `report()` is what `report.json` holds, on rank 0.

    Raises:
        ValueError: If `trace_steps` is negative.
    """

    def __init__(
        self,
        dirpath: Optional[str] = None,
        trace_steps: int = 20,
        every_n_steps: int = 50,
        warmup_steps: int = 1,
        show_diagnosis: bool = True,
    ) -> None:
        if trace_steps < 0:
            raise ValueError(f"expected trace_steps >= 0, got {trace_steps}")
        super().__init__(every_n_steps, warmup_steps, dirpath, show_table=False)
        self.trace_steps, self.show_diagnosis = trace_steps, show_diagnosis
        self.folder = Path()
        self._run: dict[str, Any] = {}
        self._loss = StepSampler[Tensor](LOSSES)
        self._parts: Sequence[Mapping[str, Any]] = ()
        self._clock: ClockOffset | None = None
        self._began_s = 0.0
        self._step = 0

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> Accumulator:
        assert self.session is not None
        folder = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "profile")
        self.folder = create_folder(folder, self.session.group)
        started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        started = comm.all_gather_object(started, self.session.group)[0]
        self._run = {"started": started}
        self._loss, self._parts = StepSampler(LOSSES), ()
        self._clock = compare_clocks(self.session.group, clock_id())
        return TraceAccumulator(rank_info(self.session), self.trace_steps)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self.session is not None
        self._began_s = time.perf_counter()
        self._run |= run_facts(trainer, pl_module, self.session.mesh)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.session is not None
        assert self.session.recorder is not None
        self._step = self.session.recorder.step  # at the end of the batch another callback may have begun the next

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        loss = _loss(outputs)
        if loss is not None:
            self._loss.add(self._step, loss.detach().clone())  # it may be written to, or a piece of something large

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        assert self.session is not None
        assert isinstance(self._accumulator, TraceAccumulator)
        if self.session.failure is None:
            try:
                self._clock = compare_clocks(self.session.group, clock_id())
            except RuntimeError as error:  # a rank does not answer; training has ended well nevertheless
                self.session.failure = str(error)
            self._parts = self.session.gather(self._accumulator.part(self._clock)) or ()
        if not self._parts:
            with errors_as_warnings(NOT_WRITTEN):
                self._leave_part(self._accumulator.part(self._clock))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.session is not None
        if self.session.recorder is None:
            rank_zero_info(f"nothing was trained: {self.folder / PAGE} is left as it is")
            return
        with errors_as_warnings(NOT_WRITTEN):
            self._finish(trainer, self.session)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        session = self.session
        super().on_exception(trainer, pl_module, exception)
        if session is None or session.recorder is None:
            return  # before training began, or not in `fit`
        assert isinstance(self._accumulator, TraceAccumulator)
        part = self._accumulator.part(self._clock, session.recorder.last_steps(1))
        self._run["error"] = f"{type(exception).__name__}: {exception}"
        part |= {"error": self._run["error"], "failed_ns": time.perf_counter_ns()}
        with errors_as_warnings(NOT_WRITTEN):  # a failure must not take the place of `exception`
            self._leave_part(part)
            self._finish(trainer, session)

    def _leave_part(self, part: Mapping[str, Any]) -> None:
        """Leave this rank's part of the trace to rank 0, where the ranks cannot exchange it."""
        write_part(self.folder / f"part{part['rank']}.json.gz", {**part, "run": self._run["started"]})

    @rank_zero_only
    def _finish(self, trainer: Trainer, session: Session) -> None:
        if not self._parts:
            self._parts = read_parts(self.folder, trainer.world_size, self._run["started"], PATIENCE_S)
            self._run |= first_error(self._parts)
        self._run |= {"seconds": time.perf_counter() - self._began_s, "steps": session.steps}
        reports = _reports(trainer, self)
        trace = chrome_trace(self._parts, self._run["mesh"]) if any(part["steps"] for part in self._parts) else None
        if trace is None:
            (self.folder / TRACE).unlink(missing_ok=True)  # of another run
        loss = [(step, value.item()) for step, value in self._loss.values.items()]
        self._report = report = build_report(self._run, reports, loss, trace)
        write_files(self.folder, report, trace)
        if self.show_diagnosis:
            self._show(report)

    def _show(self, report: Mapping[str, Any]) -> None:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for advice in report["diagnosis"][:3]:
            console.print(f"- {advice['title']}. {advice['text']}")
        console.print(f"profile: {self.folder / PAGE}")
        if "trace" in report:
            console.print(f"trace:   {self.folder / TRACE} (open it at https://ui.perfetto.dev)")

    @override
    def report(self) -> dict[str, Any]:
        if self._report is None:
            raise RuntimeError("`ProfileReport.report()` tells of a finished `fit`; there was none yet")
        return self._report


def build_report(
    run: Mapping[str, Any],
    reports: Mapping[str, Mapping[str, Any]],
    loss: Sequence[Sequence[float]],
    trace: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What `report.json` holds."""
    series = dict(reports.get("Throughput", {}).get("series", {}))
    report: dict[str, Any] = {"version": VERSION, "run": run, "reports": reports, "series": series}
    if loss:
        series["loss"] = loss
    if trace is not None:
        clocks = trace["otherData"]["clocks"]
        report["trace"] = {
            "file": TRACE,
            "ranks": [clock["rank"] for clock in clocks],
            "left_out": trace["otherData"]["left_out"],
            "steps": len({event["name"] for event in trace["traceEvents"] if event.get("cat") == "step"}),
            "uncertainty": max((clock["uncertainty_ns"] for clock in clocks), default=0) / 1e9,
        }
    report = finite(report)
    report["diagnosis"] = [advice.to_dict() for advice in diagnose(report)]
    return report


def write_files(folder: Path, report: Mapping[str, Any], trace: Mapping[str, Any] | None) -> None:
    """Write page, data and trace."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT).write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
    (folder / PAGE).write_text(render(report), encoding="utf-8")
    if trace is not None:
        write_trace(trace, folder / TRACE)


def read_report(path: Path) -> tuple[Path, dict[str, Any]]:
    """The report of a run, and the folder in which it lies.

    Args:
        path: That folder, or one with it inside as `profile`, such as the trainer's log folder.

    Raises:
        ValueError: If there is none, or one that this version cannot read.
    """
    for folder in (path, path / "profile"):
        file = folder / REPORT
        if file.is_file():
            report = read_json(file)
            if not isinstance(report, dict) or report.get("version") != VERSION or "run" not in report:
                raise ValueError(f"expected a report of version {VERSION} in {file}, as `ProfileReport` writes it")
            return folder, report
    raise ValueError(f"expected the folder of a profiled run, with `{REPORT}` or `profile/{REPORT}`, got {path}")


def rebuild(path: Path, kineto: Sequence[Path] = ()) -> Path:
    """Make the page of a run again, with the diagnosis of today; returns where it is.

    Of a run that ended with an error, parts of the trace that came too late for rank 0 are added.

    Args:
        path: See `read_report`.
        kineto: Traces of `torch.profiler` to add to the run's own.

    Raises:
        ValueError: If there is no report, or a trace cannot be added.
    """
    folder, report = read_report(path)
    run, trace = report["run"], None
    parts = read_parts(folder, run["world_size"], run["started"], patience_s=0)
    if parts:
        trace, run = chrome_trace(parts, run["mesh"]), {**run, **first_error(parts)}
    elif kineto:
        trace = read_trace(folder / TRACE)
    for file in kineto:
        assert trace is not None
        add_kineto(trace, read_trace(file))
    loss = report["series"].get("loss", [])
    rebuilt = build_report(run, report["reports"], loss, trace)
    write_files(folder, rebuilt if trace is not None else {**report, **rebuilt}, trace)
    return folder / PAGE


def _loss(outputs: Any) -> Tensor | None:
    """The loss among what a step returned, if it is one number that this rank knows by itself."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, DTensor):
        loss = loss.to_local() if all(place.is_replicate() for place in loss.placements) else None
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _reports(trainer: Trainer, this: ProfileReport) -> dict[str, dict[str, Any]]:
    """What the trainer's other callbacks report, by their names."""
    reports = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, MeasuringCallback) and callback is not this and callback.has_report:
            reports[callback.name] = callback.report()
    return reports


def first_error(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The earliest error among the ranks, to which those of the others are the echo; empty if there is none."""
    failed = [(part["failed_ns"] + part["clock"]["offset_ns"], part) for part in parts if "error" in part]
    if not failed:
        return {}
    _, first = min(failed, key=lambda one: one[0])
    return {"error": first["error"], "error_rank": first["rank"]}


def write_part(path: Path, part: Mapping[str, Any]) -> None:
    """Leave one rank's part of a trace for others, who see it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    with gzip.open(partial, "wt", encoding="utf-8") as file:
        json.dump(part, file)
    partial.replace(path)


def read_parts(folder: Path, world_size: int, run: str, patience_s: float) -> list[dict[str, Any]]:
    """The parts that ranks of this run leave within `patience_s`; files that are not whole are no parts."""
    until = time.monotonic() + patience_s
    found: dict[int, dict[str, Any]] = {}
    while len(found) < world_size:
        for rank in set(range(world_size)) - found.keys():
            path = folder / f"part{rank}.json.gz"
            with suppress(ValueError, FileNotFoundError):
                part = read_json(path)
                if isinstance(part, dict) and part.pop("run", None) == run:
                    found[rank] = part
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return [found[rank] for rank in sorted(found)]
