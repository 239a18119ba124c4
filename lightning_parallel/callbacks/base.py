"""What every measuring callback is made of: an accumulator that knows no Lightning, and a thin callback around it.

A callback of one's own takes three methods:

    class Steps(Accumulator):
        count = 0
        def add(self, window): self.count += 1                       # each step, on every rank
        def share(self): return self.count                           # what other ranks get to know
        def summarize(self, shared): return {"counts": shared}       # by rank -> keys of the report

    class CountSteps(MeasuringCallback):
        def accumulate(self, trainer, pl_module): return Steps()     # a new one for each `fit`
"""

from __future__ import annotations

import csv
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Optional

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.table import Table
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.session import Session
from lightning_parallel.comm import Group
from lightning_parallel.mesh import AXES
from lightning_parallel.recorder import Window
from lightning_parallel.terminal import show

__all__ = ["VERSION", "Accumulator", "MeasuringCallback", "errors_as_warnings", "finite", "made_folder", "place"]

VERSION = 1
"""Of the keys of all reports; changes when the meaning of a key does."""


class Accumulator(ABC):
    """What one callback measures on one rank. Holds plain numbers only, and communicates nothing."""

    @abstractmethod
    def add(self, window: Window) -> None:
        """Take notice of a step."""

    def end(self, window: Window) -> None:  # noqa: B027 few have a use for it
        """Take notice of what came after the last step: its validation, its checkpoint."""

    @abstractmethod
    def share(self) -> Any:
        """What the other ranks need to know so far: picklable, and small."""

    @abstractmethod
    def summarize(self, shared: Sequence[Any]) -> dict[str, Any]:
        """The callback's own keys of the report, from what the ranks shared; a signal nobody has is left out."""

    def scalars(self) -> dict[str, float]:
        """Values to log, of this rank, over the steps since the last call."""
        return {}


class MeasuringCallback(Callback, ABC):
    """Measures a `fit` and reports on it.

    All measuring callbacks of a Trainer share one recorder and one exchange between ranks, off the training thread.

    Args:
        exchange_every: Steps between two exchanges; the last one is at the end of training. The smallest value of all
            callbacks counts.
        warmup_steps: First steps that are not counted, because things are set up in them. The largest value counts.
        dirpath: Where rank 0 writes `<name>.json` and `<name>.csv` at the end of training; nowhere when omitted.
        show_table: Print a table at the end of training, on rank 0.

    Attributes:
        session: Shared with the other measuring callbacks; None outside of `fit`.

    Raises:
        ValueError: If a number of steps is too small.
    """

    def __init__(
        self,
        exchange_every: int = 50,
        warmup_steps: int = 1,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        if exchange_every < 1 or warmup_steps < 0:
            raise ValueError(
                f"expected exchange_every >= 1 and warmup_steps >= 0, got {exchange_every} and {warmup_steps}"
            )
        self.exchange_every, self.warmup_steps = exchange_every, warmup_steps
        self.dirpath, self.show_table = dirpath, show_table
        self.session: Session | None = None
        self._accumulator: Accumulator | None = None
        self._report: dict[str, Any] | None = None

    # --------------------------------------------------------------------------------------------------- to override

    @abstractmethod
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> Accumulator:
        """The accumulator of one `fit`; called on every rank when training begins."""

    def table(self, report: Mapping[str, Any]) -> Table | None:
        """The report as a table for the terminal; None where there is nothing to show."""
        return None

    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The report as rows of a CSV file."""
        return list(report.get("ranks", []))

    # -------------------------------------------------------------------------------------------------------- report

    @property
    def name(self) -> str:
        """Of the callback in reports and files: that of its class."""
        return type(self).__name__

    def report(self) -> dict[str, Any]:
        """What was measured, of all ranks as of their last exchange; complete from the end of training on.

        Keys of every report: `version` of the keys; `steps` counted; `world_size`; `mesh`, `{axis: size}`;
        `incomplete`, why ranks are missing, only if they are. The others are described on each callback.

        Raises:
            RuntimeError: If nothing was trained yet.
        """
        if self._report is None:
            if not self.has_report:
                raise RuntimeError(f"`{self.name}.report()` tells of a `fit`; there was none yet")
            assert self.session is not None
            return self._summarize(self.session)
        return self._report

    @property
    def has_report(self) -> bool:
        """Whether `report()` can be called."""
        return self._report is not None or (self.session is not None and self._accumulator is not None)

    def _summarize(self, session: Session) -> dict[str, Any]:
        assert self._accumulator is not None
        position = session.members.index(self._accumulator)
        shared = [values[position] for values in session.latest] or [self._accumulator.share()]
        report = {
            "version": VERSION,
            "steps": session.steps,
            "world_size": session.mesh.world_size,
            "mesh": {axis: session.mesh.size(axis) for axis in AXES},
        }
        if session.failure is not None:
            report["incomplete"] = session.failure
        found: dict[str, Any] = finite({**report, **self._accumulator.summarize(shared)})
        return found

    def write(self, dirpath: str | Path) -> None:
        """Write the report to `<name>.json` and `<name>.csv`."""
        folder, report = Path(dirpath), self.report()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(report, indent=1, allow_nan=False))
        rows = [_flat(row) for row in self.rows(report)]
        with (folder / f"{self.name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)

    # --------------------------------------------------------------------------------------------------------- hooks

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.session, self._report, self._accumulator = Session.of(trainer), None, None
        if self.dirpath is not None:
            made_folder(Path(self.dirpath), self.session.group)
        self._accumulator = self.accumulate(trainer, pl_module)
        self.session.join(self._accumulator, self.exchange_every, self.warmup_steps)

    @property
    def _led(self) -> Session | None:
        """The session, on the callback that leads it."""
        return self.session if self.session is not None and self.session.is_led_by(self._accumulator) else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._led is not None:
            self._led.begin(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._led is not None and self._led.recorder is not None:
            self._led.recorder.enter("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._led is not None and self._led.recorder is not None:
            self._led.recorder.leave()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._led is not None:
            self._led.after_backward()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._led is not None:
            self._led.end_step()
        if trainer.loggers and trainer._logger_connector.should_update_logs:
            assert self._accumulator is not None
            scalars = self._accumulator.scalars()
            for logger in trainer.loggers if scalars else ():
                logger.log_metrics(scalars, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._led is not None:
            self._led.end()
        assert self.session is not None
        self._report = self._summarize(self.session)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with errors_as_warnings(f"the report of {self.name} could not be written"):
            self._publish()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.session is not None and self._accumulator is not None and self._report is None:
            self._report = self._summarize(self.session)  # training ended with an error
        if self._led is not None:
            self._led.close()
        self.session = None

    @rank_zero_only
    def _publish(self) -> None:
        if self.dirpath is not None:
            self.write(self.dirpath)
        table = self.table(self.report()) if self.show_table else None
        if table is not None:
            show(table)


@contextmanager
def errors_as_warnings(what: str) -> Iterator[None]:
    """For what is done after training, on one rank alone: its failure must not end a run that went well.

    Args:
        what: Has failed then.
    """
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {error!r}", stacklevel=3)


def made_folder(path: Path, group: Group) -> Path:
    """`path` as the first rank of `group` has it, made there; every rank must call it.

    Raises:
        ValueError: If that rank cannot write to it; RuntimeError on the others.
    """

    def make() -> Path:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path):
                return path
        except OSError as error:
            raise ValueError(f"expected a folder that can be written to for profiles, got {path}: {error}") from error

    return comm.broadcast_from(make, group)


def finite(value: Any) -> Any:
    """Nested dicts and lists as JSON can hold them, which knows no NaN and no infinity.

    Of a dict, entries that are not finite are left out, as signals that are absent; in a list None takes their place.

    >>> finite({"cosine": float("nan"), "loss": [(0, 0.5), (1, float("inf"))]})
    {'loss': [[0, 0.5], [1, None]]}
    """
    if isinstance(value, Mapping):
        return {key: item for key, entry in value.items() if (item := finite(entry)) is not None or entry is None}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def place(session: Session) -> dict[str, Any]:
    """Who this process is, as reports say it: `rank`, and `coordinate` as `{axis: index}`."""
    return {"rank": session.rank, "coordinate": session.mesh.coordinate(session.rank)._asdict()}


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values as columns of their own: `coordinate.data_parallel`."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        inner = {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
        flat.update(inner)
    return flat
