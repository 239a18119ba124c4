"""What gradient compression saves, costs and loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any, Optional

from lightning.pytorch import LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback
from lightning_parallel.callbacks.units import bytes_text, count_text, percent, seconds_text
from lightning_parallel.compression import Reducer
from lightning_parallel.compression.arguments import check_integer
from lightning_parallel.compression.method import Method, Outcome
from lightning_parallel.recorder import Window

__all__ = ["CompressionAccumulator", "CompressionMonitor"]

Numbers = dict[str, float]
TIMES = ("encode", "wire", "decode")
LOSSES = ("relative_error", "cosine")


class CompressionAccumulator(Accumulator):
    """What a reducer has done, in the steps seen so far.

    Args:
        reducer: Whom to watch, until `close`.
        warmup_steps: First steps that are not counted.
    """

    def __init__(self, reducer: Reducer, warmup_steps: int = 0) -> None:
        self._reducer = reducer
        self._new: deque[Outcome] = deque()
        self._to_warm_up = warmup_steps
        self._asked = -inf  # steps that had been counted when a comparison was last asked for
        self._steps = self._timed = 0
        self._seconds = dict.fromkeys(TIMES, 0.0)
        self._labels: dict[Method, str] = {}
        self._bytes: dict[str, Numbers] = {}  # by label
        self._names: dict[str, set[str]] = {}
        self._losses: dict[str, list[Numbers]] = {}
        self._residuals: dict[str, float] = {}  # by parameter
        self._latest: Numbers = {}
        reducer.observers.append(self._notice)

    def close(self) -> None:
        """Watch no longer, and ask for no comparison."""
        self._reducer.observers.remove(self._notice)
        self._reducer.sample_every = 0

    def _notice(self, outcome: Outcome) -> None:
        self._new.append(outcome)

    @override
    def add(self, window: Window) -> None:
        """Nothing: `look` has seen the steps when they ended; windows come late where a device is behind the host."""

    def ask(self, every_n_steps: int) -> None:
        """Have steps compared with the true mean until the next call, if the last such are `every_n_steps` ago."""
        due = every_n_steps and not self._to_warm_up and not 0 < self._steps - self._asked < every_n_steps
        self._reducer.sample_every = int(bool(due))
        if due:
            self._asked = self._steps

    def look(self) -> None:
        """Take notice of the steps that the reducer has committed since the last look."""
        rows, compared = [], False
        while self._new:
            outcome = self._new.popleft()
            if self._to_warm_up:
                self._to_warm_up -= 1
                continue
            rows.append(self._count(outcome))
            compared |= outcome.compression_error is not None
        if rows:
            self._latest.update(_mean(rows))
        if compared:
            self._residuals = self._reducer.residual_norms
            self._latest.update(_norm_of(self._residuals, self._residuals))

    def _count(self, outcome: Outcome) -> Numbers:
        """Add up one step; its own numbers."""
        self._steps += 1
        # Plain means that DDP takes by itself are not timed.
        passed = outcome.seconds is None
        seconds = {} if passed else {key: getattr(outcome.seconds, key) for key in TIMES}
        self._timed += not passed
        for key, value in seconds.items():
            self._seconds[key] += value
        sent: Numbers = {"dense_bytes": 0, "sent_bytes": 0}
        for block in outcome.blocks:
            label = self._labels.get(block.method) or self._labels.setdefault(block.method, repr(block.method))
            row = {"dense_bytes": block.dense_bytes, "sent_bytes": block.dense_bytes if passed else block.sent_bytes}
            total = self._bytes.setdefault(label, dict.fromkeys(row, 0.0))
            self._names.setdefault(label, set()).update(block.names)
            for key, value in row.items():
                total[key] += value
                sent[key] += value
        if outcome.compression_error is None:
            return {**sent, **seconds}
        for label, names in [("", None), *self._names.items()]:
            if loss := outcome.compression_error.report(names):
                self._losses.setdefault(label, []).append(loss)
        return {**sent, **seconds, **outcome.compression_error.report()}

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
                **_mean([rank["compressors"].get(label, {}) for rank in ranks]),
            }
            for label in labels
        ]
        total = _mean([rank["total"] for rank in ranks])
        slowest = {key: max(rank["total"][key] for rank in ranks) for key in TIMES if key in total}
        return {"steps": ranks[0]["steps"], **total, **slowest, "compressors": rows}

    @override
    def scalars(self) -> Numbers:
        latest, self._latest = self._latest, {}
        return {f"compression/{key}": value for key, value in latest.items()}


class CompressionMonitor(MeasuringCallback):
    r"""Measures what compression of the gradients saves, costs and loses, under every strategy with `compression`.

    `report()` has, besides the common keys, means over the steps that the compressor has counted, after the first
    `warmup_steps`: one for each optimizer step, so several in a batch where several optimizers step, and none where
    gradients are accumulated.

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

    Logged: `compression/<key>` of rank 0, means over the steps of the last batch that had some; the losses and the norm
    after a comparison.

    Args:
        every_n_steps: Steps from one comparison with the true mean to the next, which costs a dense all-reduce; 0 for
            no comparison. All steps of a batch are compared.
        exchange_every: Steps between two exchanges with the other ranks.
        warmup_steps: First steps that are not counted.
        dirpath: Where rank 0 writes `CompressionMonitor.json` and `.csv` at the end of training; nowhere when omitted.
        show_table: Print a table at the end of training, on rank 0.

    Raises:
        ValueError: If the strategy has no `compression`, a number of steps is too small, or `every_n_steps` differs
            between ranks.
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
        check_integer("every_n_steps", every_n_steps, least=0)
        self.every_n_steps = every_n_steps
        self._watching: CompressionAccumulator | None = None

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> CompressionAccumulator:
        reducer = getattr(trainer.strategy, "compression", None)
        if not isinstance(reducer, Reducer):
            raise ValueError(
                f"expected a strategy with `compression`, found {type(trainer.strategy).__name__} without; give the "
                "strategy a compressor, or leave `CompressionMonitor` out"
            )
        assert self.session is not None
        comm.agree("`every_n_steps` of CompressionMonitor", self.every_n_steps, self.session.group)
        self._watching = CompressionAccumulator(reducer, self.warmup_steps)
        return self._watching

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._watching is not None
        self._watching.ask(self.every_n_steps)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._watching is not None
        self._watching.look()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self._watching is not None:
            self._watching.close()
            self._watching = None

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


def _mean(rows: Sequence[Numbers]) -> Numbers:
    """The mean of each number over the rows that have it; the ratio is that of the means."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return _with_ratio({key: fmean(row[key] for row in rows if key in row) for key in keys})
