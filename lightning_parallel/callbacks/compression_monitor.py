"""What gradient compression saves, costs and loses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Optional

from lightning.pytorch import LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback
from lightning_parallel.callbacks.units import bytes_text, count_text, percent, seconds_text
from lightning_parallel.compression import Reducer
from lightning_parallel.recorder import Window

__all__ = ["CompressionAccumulator", "CompressionMonitor"]

Numbers = dict[str, float]
TIMES = ("encode", "wire", "decode")
LOSSES = ("relative_error", "cosine")


class CompressionAccumulator(Accumulator):
    """What a reducer has done, in the steps seen so far.

    Args:
        reducer: Whom to watch.
        warmup_steps: First steps that are not counted.
    """

    def __init__(self, reducer: Reducer, warmup_steps: int = 0) -> None:
        self._reducer = reducer
        self._seen, self._counted_after = reducer.step, reducer.step + warmup_steps
        self._compared = reducer.compared
        self._steps = self._timed = 0
        self._seconds = dict.fromkeys(TIMES, 0.0)
        self._bytes: dict[str, Numbers] = {}  # by compressor
        self._names: dict[str, set[str]] = {}
        self._losses: dict[str, list[Numbers]] = {}
        self._residuals: dict[str, float] = {}  # by parameter
        self._latest: Numbers = {}

    @override
    def add(self, window: Window) -> None:
        """Nothing: `look` has seen the step when it ended; windows come late where a device runs behind the host."""

    def look(self) -> None:
        """Take notice of the step that the reducer has committed since the last look, if there is one."""
        if self._reducer.step == self._seen:
            return
        self._seen = self._reducer.step
        if self._seen <= self._counted_after:
            return
        self._steps += 1
        # Plain means that DDP takes by itself are not timed.
        seconds = {} if self._reducer.plain else {key: getattr(self._reducer.seconds, key) for key in TIMES}
        self._timed += bool(seconds)
        for key, value in seconds.items():
            self._seconds[key] += value
        sent: Numbers = {"dense_bytes": 0, "sent_bytes": 0}
        for part in self._reducer.parts:
            label, row = repr(part.method), {"dense_bytes": part.dense_bytes, "sent_bytes": part.sent_bytes}
            total = self._bytes.setdefault(label, dict.fromkeys(row, 0.0))
            self._names.setdefault(label, set()).update(part.names)
            for key, value in row.items():
                total[key] += value
                sent[key] += value
        self._latest.update(_with_ratio({**sent, **seconds}))
        self._look_closely()

    def _look_closely(self) -> None:
        """Take notice of a comparison with the true mean, if there is a new one; measure the residuals as often."""
        compared = self._reducer.compared
        if compared is None or compared is self._compared:
            return
        self._compared, self._residuals = compared, self._reducer.residual_norms
        for label, names in [("", None), *self._names.items()]:
            if loss := compared.report(names):
                self._losses.setdefault(label, []).append(loss)
        self._latest.update({**compared.report(), **_norm_of(self._residuals, self._residuals)})

    @override
    def share(self) -> dict[str, Any]:
        if not self._steps:
            return {}
        rows = {
            label: {
                **{key: value / self._steps for key, value in total.items()},
                **self._loss(label),
                **_norm_of(self._residuals, self._names[label]),
            }
            for label, total in self._bytes.items()
        }
        sent = {key: sum(row[key] for row in rows.values()) for key in ("dense_bytes", "sent_bytes")}
        times = {key: value / self._timed for key, value in self._seconds.items()} if self._timed else {}
        total = {**sent, **self._loss(""), **_norm_of(self._residuals, self._residuals), **times}
        names = {label: sorted(names) for label, names in self._names.items()}
        return {"steps": self._steps, "total": total, "compressors": rows, "names": names}

    def _loss(self, label: str) -> Numbers:
        losses = self._losses.get(label, [])
        return {key: fmean(loss[key] for loss in losses) for key in LOSSES} if losses else {}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ranks = [rank for rank in shared if rank]
        if not ranks:
            return {"steps": 0}
        labels = dict.fromkeys(label for rank in ranks for label in rank["compressors"])
        rows = [
            {
                "compressor": label,
                "parameters": len({name for rank in ranks for name in rank["names"].get(label, ())}),
                **_mean_of_ranks([rank["compressors"].get(label, {}) for rank in ranks]),
            }
            for label in labels
        ]
        total = _mean_of_ranks([rank["total"] for rank in ranks])
        slowest = {key: max(rank["total"][key] for rank in ranks) for key in TIMES if key in total}
        return {"steps": ranks[0]["steps"], **total, **slowest, "compressors": rows}

    @override
    def scalars(self) -> Numbers:
        latest, self._latest = self._latest, {}
        return {f"compression/{key}": value for key, value in latest.items()}


class CompressionMonitor(MeasuringCallback):
    r"""Measures what compression of the gradients saves, costs and loses, under every strategy with `compression`.

    `report()` has, besides the common keys, means over the steps (those in which a compressor has counted a step, after
    the first `warmup_steps`):

    | key | meaning |
    |---|---|
    | `dense_bytes` | what one rank would send for plain means, by a bandwidth-optimal all-reduce |
    | `sent_bytes` | what one rank sends |
    | `ratio` | `dense_bytes / sent_bytes` |
    | `encode`, `wire`, `decode` | the host's seconds before, in and after collectives, of the slowest rank |
    | `relative_error` | \|compressed mean - true mean\| / \|true mean\|, mean over the comparisons |
    | `cosine` | of the angle between the two, mean over the comparisons |
    | `residual_norm` | Euclidean norm of what error feedback has kept for later, at the last comparison |
    | `compressors` | for each compressor in use its `compressor`, its number of `parameters`, and all but the seconds |

    Where ranks differ (shards of a model) bytes, losses and norms are means over the ranks that have them. Bytes are
    payloads, without the headers of messages. Compressors share their collectives, so seconds are not divided among
    them. A step in which a gradient was not finite is not counted. Without a residual there is no `residual_norm`;
    without a comparison no `relative_error` and `cosine`; with one replica nothing is sent and there is no `ratio`.

    Logged: `compression/<key>` of rank 0, of the last step, the losses and the norm in steps with a comparison.

    Args:
        every_n_steps: Steps from one comparison with the true mean to the next, which costs a dense all-reduce; 0 for
            no comparison.
        exchange_every: Steps between two exchanges with the other ranks.
        warmup_steps: First steps that are not counted.
        dirpath: Where rank 0 writes `CompressionMonitor.json` and `.csv` at the end of training; nowhere when omitted.
        show_table: Print a table at the end of training, on rank 0.

    Raises:
        ValueError: If the strategy has no `compression`, or a number of steps is too small.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        exchange_every: int = 50,
        warmup_steps: int = 1,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(exchange_every, warmup_steps, dirpath, show_table)
        if every_n_steps < 0:
            raise ValueError(f"expected every_n_steps >= 0, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._reducer: Reducer | None = None

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> CompressionAccumulator:
        reducer = getattr(trainer.strategy, "compression", None)
        if not isinstance(reducer, Reducer):
            raise ValueError(
                f"expected a strategy with `compression`, found {type(trainer.strategy).__name__} without; give the "
                "strategy a compressor, or leave `CompressionMonitor` out"
            )
        self._reducer = reducer
        reducer.sample_every = self.every_n_steps
        return CompressionAccumulator(reducer, self.warmup_steps)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(self._accumulator, CompressionAccumulator)
        self._accumulator.look()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self._reducer is not None:
            self._reducer.sample_every, self._reducer = 0, None

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        total = {key: value for key, value in report.items() if key in _WRITERS}
        return [*report.get("compressors", []), {"compressor": "total", **total}] if total else []

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        rows = self.rows(report)
        if not rows:
            return None
        table = Table("", title=f"Gradient compression: one rank, mean of {report['steps']} steps")
        columns = rows if len(rows) > 2 else rows[-1:]
        for row in columns:
            table.add_column(row["compressor"], justify="right")
        for key in (key for key in _WRITERS if any(key in row for row in columns)):
            words = key.removesuffix("_bytes").replace("_", " ")
            table.add_row(words, *(_WRITERS[key](row[key]) if key in row else "-" for row in columns))
        return table


_WRITERS = {
    "parameters": count_text,
    "dense_bytes": bytes_text,
    "sent_bytes": bytes_text,
    "ratio": count_text,
    "encode": seconds_text,
    "wire": seconds_text,
    "decode": seconds_text,
    "residual_norm": count_text,
    "relative_error": percent,
    "cosine": count_text,
}


def _with_ratio(numbers: Numbers) -> Numbers:
    sent = numbers.get("sent_bytes")
    return {**numbers, "ratio": numbers["dense_bytes"] / sent} if sent else numbers


def _norm_of(norms: Mapping[str, float], names: Iterable[str]) -> Numbers:
    found = [norms[name] ** 2 for name in names if name in norms]
    return {"residual_norm": sum(found) ** 0.5} if found else {}


def _mean_of_ranks(rows: Sequence[Numbers]) -> Numbers:
    """The mean of each number over the rows that have it."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return _with_ratio({key: fmean(row[key] for row in rows if key in row) for key in keys})
