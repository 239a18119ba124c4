"""Base classes of the measuring callbacks: an accumulator free of Lightning, and a thin callback around it.

A new callback takes three methods:

    class Steps(Accumulator):
        count = 0
        def add(self, window): self.count += 1                       # each step, on every rank
        def share(self): return self.count                           # sent to the other ranks
        def summarize(self, shared): return {"counts": shared}       # by rank -> keys of the report

    class CountSteps(MeasuringCallback[Steps]):
        def accumulate(self, trainer, pl_module): return Steps()     # a new one for each `fit`
"""

from __future__ import annotations

import csv
import io
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Generic, Optional, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.table import Table
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.recording.session import Accumulator, Session
from lightning_parallel.checkpoint.place import put_file
from lightning_parallel.comm import Group
from lightning_parallel.compat.lightning import logged_step, should_update_logs
from lightning_parallel.compat.twins import Callback
from lightning_parallel.compression.compressor import check_integer
from lightning_parallel.mesh import AXES
from lightning_parallel.tracing.spans import show

__all__ = [
    "VERSION",
    "Accumulator",
    "MeasuringCallback",
    "create_folder",
    "errors_as_warnings",
    "finite",
    "rank_info",
]

VERSION = 1
"""Version of the keys of all reports; changes when the meaning of a key changes."""


A = TypeVar("A", bound=Accumulator)


class MeasuringCallback(Callback, ABC, Generic[A]):
    """Measures a `fit` and reports on it.

    All measuring callbacks of a Trainer share one recorder and one exchange between ranks. The exchange does not run on
    the training thread. One more exchange runs at the end of training.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import MeasuringCallback, StepBreakdown, Throughput

        trainer = Trainer(callbacks=[StepBreakdown(), Throughput()])
        trainer.fit(MyModule(), MyData())
        for callback in trainer.callbacks:
            if isinstance(callback, MeasuringCallback):
                print(callback.report())
        ```

    Args:
        every_n_batches: Number of batches between two exchanges of results among the ranks. The smallest value of all
            callbacks counts.
        warmup_batches: Number of first batches that are not counted. The largest value of all callbacks counts.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Attributes:
        session: Session that the measuring callbacks of a Trainer share. None outside `fit`.

    Raises:
        ValueError: If a number of steps is too small.
    """

    def __init__(
        self,
        every_n_batches: int = 50,
        warmup_batches: int = 1,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        check_integer("every_n_batches", every_n_batches, least=1)
        check_integer("warmup_batches", warmup_batches, least=0)
        # `DataShardingMonitor` sets the public name to its own interval. The ranks still exchange at the private one.
        self.every_n_batches = every_n_batches
        self._every_n_batches = every_n_batches
        self.warmup_batches = warmup_batches
        self.dirpath = dirpath
        self.show_table = show_table
        self.session: Session | None = None
        self._accumulator: A | None = None
        self._report: dict[str, Any] | None = None

    # --------------------------------------------------------------------------------------------------- to override

    @abstractmethod
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> A:
        """Create the accumulator of one `fit`. The callback calls it on every rank when the `fit` begins."""

    def table(self, report: Mapping[str, Any]) -> Table | None:
        """Format the report as a table for the terminal, or return None if there is nothing to show."""
        return None

    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Format the report as rows of a CSV file."""
        return list(report.get("ranks", []))

    def bar_items(self, report: Mapping[str, Any]) -> dict[str, str]:
        """Format figures of the report for the progress bar. The default formats none."""
        return {}

    # --------------------------------------------------------------------------------------------------- within `fit`

    @property
    def open_session(self) -> Session:
        """Return the session of the running `fit`.

        Raises:
            RuntimeError: If no `fit` runs.
        """
        if self.session is None:
            raise RuntimeError(f"`{self.name}` measures only during `fit`")
        return self.session

    @property
    def accumulator(self) -> A:
        """Return the accumulator of the running `fit`, or of the last one.

        Raises:
            RuntimeError: If no `fit` has run yet.
        """
        if self._accumulator is None:
            raise RuntimeError(f"`{self.name}` has measured nothing yet")
        return self._accumulator

    # -------------------------------------------------------------------------------------------------------- report

    @property
    def name(self) -> str:
        """Return the callback's name in reports and files: the name of its class."""
        return type(self).__name__

    def report(self) -> dict[str, Any]:
        """Return the results of all ranks as of their last exchange.

        The report is complete when training has ended. Until then, only the first rank knows the results of all ranks.
        Each of the other ranks reports on itself.

        Every report has these keys:

        * `version`: version of the keys
        * `steps`: number of steps that were counted
        * `world_size`: number of processes
        * `mesh`: `{axis: size}`
        * `incomplete`: the reason why ranks are missing, only if ranks are missing

        Each callback describes its own keys.

        Raises:
            RuntimeError: If nothing was trained yet.
        """
        if self._report is None:
            if not self.has_report:
                raise RuntimeError(f"`{self.name}.report()` reports on a `fit`; there was none yet")
            return self._summarize(self.open_session)
        return self._report

    @property
    def has_report(self) -> bool:
        """Return whether you can call `report()`."""
        return self._report is not None or (self.session is not None and self._accumulator is not None)

    def _summarize(self, session: Session) -> dict[str, Any]:
        session.hand_out()
        accumulator = self.accumulator
        position = session.members.index(accumulator)
        # Before the first exchange, and after a failed one, this rank reports its own figures.
        shared = [values[position] for values in session.latest] or [accumulator.share()]
        report = {
            "version": VERSION,
            "steps": session.steps,
            "world_size": session.mesh.world_size,
            "mesh": {axis: session.mesh.size(axis) for axis in AXES},
        }
        if session.failure is not None:
            report["incomplete"] = session.failure
        found: dict[str, Any] = finite({**report, **accumulator.summarize(shared)})
        return found

    def write(self, dirpath: str | Path) -> None:
        """Write the report to `<name>.json` and `<name>.csv`."""
        folder = Path(dirpath)
        report = self.report()
        folder.mkdir(parents=True, exist_ok=True)
        # `allow_nan=False`: Python would write NaN, which is not JSON; browsers cannot parse it.
        text = json.dumps(report, indent=1, allow_nan=False)
        put_file(folder / f"{self.name}.json", text.encode())
        rows = [_flat(row) for row in self.rows(report)]
        columns = dict.fromkeys(key for row in rows for key in row)  # in the order of their first row
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(columns))
        writer.writeheader()
        writer.writerows(rows)
        put_file(folder / f"{self.name}.csv", table.getvalue().encode())

    # --------------------------------------------------------------------------------------------------------- hooks

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A callback may measure one `fit` after another. Results of an earlier `fit` must not pass for new results.
        self._report = None
        self._accumulator = None
        self.session = session = Session.of(trainer)
        if self.dirpath is not None:
            create_folder(Path(self.dirpath), self.session.group)
        # Creating the accumulator may communicate, so all ranks must get here in the order of their callbacks.
        self._accumulator = self.accumulate(trainer, pl_module)
        session.join(self._accumulator, self._every_n_batches, self.warmup_batches)

    @property
    def _led(self) -> Session | None:
        """Return the session if this callback leads it: the callback of the first member, or any without a member."""
        # While the session has no member, a callback that fails in `on_fit_start` has to close the session.
        session = self.session
        return session if session is not None and session.is_led_by(self._accumulator) else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._led is not None:
            self._led.begin(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's profiler has no action for validation as a whole. No recorder exists in the sanity check.
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
        # The step must end before the scalars are read, because they include this step.
        if self._led is not None:
            self._led.end_step()
        session = self.open_session
        has_items = type(self).bar_items is not MeasuringCallback.bar_items
        if has_items and session.bar is not None and session.updates_bar:
            session.bar |= self.bar_items(self._summarize(session))
        if trainer.loggers and should_update_logs(trainer):
            session.hand_out()
            # Not through `log` of the module: its values would become metrics that other callbacks monitor.
            scalars = self.accumulator.scalars()
            for logger in trainer.loggers if scalars else ():
                logger.log_metrics(scalars, step=logged_step(trainer))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._led is not None:
            self._led.end()
        self._report = self._summarize(self.open_session)

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
        # After an error Lightning skips `on_train_end`. The report then holds the values exchanged so far.
        if self.session is not None and self._accumulator is not None and self._report is None:
            self._report = self._summarize(self.session)
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
    """Turn errors of the block into warnings: work after training must not fail a successful run.

    Args:
        what: The failed action, as the beginning of the warning.
    """
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {error!r}", stacklevel=3)


def create_folder(path: Path, group: Group) -> Path:
    """Create the folder `path` of the first rank of `group`, and return it on all; every rank must call it.

    Raises:
        ValueError: If the first rank cannot write to it; RuntimeError on other ranks.
    """

    def make() -> Path:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path):  # permissions alone do not show a full or read-only file system
                return path
        except OSError as error:
            raise ValueError(f"The folder for profiles must be writable; got {path}: {error}") from error

    # An error of the first rank must reach all ranks: otherwise they would wait for it until the deadline.
    return comm.broadcast_from(make, group)


def finite(value: Any) -> Any:
    """Convert nested dicts and lists for JSON, which has no NaN and no infinity.

    A dict loses its entries that are not finite, like a signal that no rank has. In a list, None takes their place.

    >>> finite({"cosine": float("nan"), "loss": [(0, 0.5), (1, float("inf"))]})
    {'loss': [[0, 0.5], [1, None]]}
    """
    if isinstance(value, Mapping):
        return {key: item for key, entry in value.items() if (item := finite(entry)) is not None or entry is None}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def rank_info(session: Session) -> dict[str, Any]:
    """Identify this process in reports: `rank`, and `coordinate` as `{axis: index}`."""
    return {"rank": session.rank, "coordinate": session.mesh.coordinate(session.rank)._asdict()}


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested values into columns, such as `coordinate.data_parallel`."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            flat[key] = value
    return flat
