"""Gradient compression: the bytes it saves, the time it takes, and its error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any, Optional

from lightning.pytorch import LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback
from lightning_parallel.compression import Reducer
from lightning_parallel.compression.compressor import check_integer
from lightning_parallel.compression.feedback import Method, Outcome
from lightning_parallel.tracing.spans import bytes_text, count_text, percent, seconds_text

__all__ = ["CompressionAccumulator", "CompressionMonitor"]

Numbers = dict[str, float]
TIMES = ("encode", "wire", "decode")
ERRORS = ("relative_error", "cosine")


class CompressionAccumulator(Accumulator):
    """Adds up the steps of a reducer.

    The reducer itself reports its steps. Windows of the recorder do not suffice: they come late with a device, and a
    batch may have several optimizer steps.

    Args:
        reducer: Observed until `close`.
        warmup_steps: First optimizer steps that are not counted.
        replaced: Returns the number of gradient reductions that a step of the reducer replaces; above 1 under local
            SGD.
    """

    def __init__(self, reducer: Reducer, warmup_steps: int = 0, replaced: Callable[[], float] = lambda: 1.0) -> None:
        self._reducer = reducer
        self._replaced = replaced
        # The reducer's thread appends, and the training thread pops: a deque is safe without a lock.
        self._new: deque[Outcome] = deque()
        self._to_warm_up = warmup_steps
        self._requested_at = -inf  # steps that had been counted when a comparison was last requested
        self._steps = 0
        self._timed = 0
        self._seconds = dict.fromkeys(TIMES, 0.0)
        self._labels: dict[Method, str] = {}
        self._bytes: dict[str, Numbers] = {}  # by label
        self._inside = 0  # bytes, sent inside the node
        self._names: dict[str, set[str]] = {}
        self._errors: dict[str, list[Numbers]] = {}
        self._residuals: dict[str, float] = {}  # by parameter
        self._latest: Numbers = {}
        reducer.observers.append(self._new.append)

    def close(self) -> None:
        """Stop observing, and request no further comparison."""
        self._reducer.observers.remove(self._new.append)
        self._reducer.sample_every = 0

    def request_comparison(self, every_n_steps: int) -> None:
        """Compare steps with the true mean until the next call, if the last request is `every_n_steps` steps old."""
        # Count steps of the reducer: with accumulated gradients, these are fewer than batches.
        is_due = every_n_steps > 0 and not self._to_warm_up
        # Without a step since the last request, that request is still open.
        if is_due and 0 < self._steps - self._requested_at < every_n_steps:
            is_due = False
        # Compare all steps of a batch: several optimizers have separate gradients.
        self._reducer.sample_every = int(is_due)
        if is_due:
            self._requested_at = self._steps

    def count_new_steps(self) -> None:
        """Add the steps that the reducer has committed since the last call."""
        rows: list[Numbers] = []
        compared = False
        while self._new:
            outcome = self._new.popleft()
            if self._to_warm_up:
                self._to_warm_up -= 1
                continue
            rows.append(self._count(outcome))
            compared |= outcome.compression_error is not None
        if rows:
            self._latest.update(_mean(rows))
        # Norms need a pass over all residuals, so compute them only with the rare comparisons.
        if compared:
            self._residuals = self._reducer.residual_norms
            self._latest.update(_norm_of(self._residuals, self._residuals))

    def _count(self, outcome: Outcome) -> Numbers:
        """Add one step; return its numbers."""
        self._steps += 1
        seconds = {key: getattr(outcome.seconds, key) for key in TIMES} if outcome.seconds.counts else {}
        self._timed += outcome.seconds.counts
        for key, value in seconds.items():
            self._seconds[key] += value
        sent: Numbers = {"dense_bytes": 0, "sent_bytes": 0}
        for block in outcome.blocks:
            if block.method not in self._labels:
                self._labels[block.method] = repr(block.method)
            label = self._labels[block.method]
            row = {"dense_bytes": block.dense_bytes, "sent_bytes": block.sent_bytes}
            total = self._bytes.setdefault(label, dict.fromkeys(row, 0.0))
            self._names.setdefault(label, set()).update(block.names)
            for key, value in row.items():
                total[key] += value
                sent[key] += value
        sent["dense_bytes"] *= self._replaced()
        self._inside += outcome.inside_bytes
        if outcome.inside_bytes:
            sent["inside_bytes"] = outcome.inside_bytes
        if outcome.compression_error is None:
            return {**sent, **seconds}
        # The empty label stands for all parameters together.
        for label, names in [("", None), *self._names.items()]:
            error = outcome.compression_error.report(names)
            if error:
                self._errors.setdefault(label, []).append(error)
        return {**sent, **seconds, **outcome.compression_error.report()}

    @override
    def share(self) -> dict[str, Any]:
        if not self._steps:
            return {}
        rows = {}
        for label, total in self._bytes.items():
            num_bytes = {key: value / self._steps for key, value in total.items()}
            num_bytes["dense_bytes"] *= self._replaced()
            rows[label] = {**num_bytes, **self._error(label), **_norm_of(self._residuals, self._names[label])}
        sent = {key: sum(row[key] for row in rows.values()) for key in ("dense_bytes", "sent_bytes")}
        if self._inside:
            sent["inside_bytes"] = self._inside / self._steps
        times = {key: value / self._timed for key, value in self._seconds.items()} if self._timed else {}
        overall = {**sent, **self._error(""), **_norm_of(self._residuals, self._residuals), **times}
        names = {label: sorted(names) for label, names in self._names.items()}
        return {"steps": self._steps, "total": overall, "compressors": rows, "names": names}

    def _error(self, label: str) -> Numbers:
        errors = self._errors.get(label, [])
        return {key: fmean(error[key] for error in errors) for key in ERRORS} if errors else {}

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
        # Ranks wait for the slowest rank, so a mean of times would be too small.
        slowest = {key: max(rank["total"][key] for rank in ranks) for key in TIMES if key in total}
        return {"steps": ranks[0]["steps"], **total, **slowest, "compressors": rows}

    @override
    def scalars(self) -> Numbers:
        latest = self._latest
        self._latest = {}
        return {f"compression/{key}": value for key, value in latest.items()}


class CompressionMonitor(MeasuringCallback[CompressionAccumulator]):
    r"""Measures the bytes, the time and the error of gradient compression, under every strategy with `compression`.

    `report()` returns the common keys and these. The values are means over the compressor's steps after the first
    `warmup_steps`. The compressor takes one step for each optimizer step. Several optimizers give several steps in a
    batch; a batch that only accumulates gradients gives none.

    | key | meaning, unit |
    |---|---|
    | `dense_bytes` | bytes that one rank would send for plain means in a bandwidth-optimal all-reduce |
    | `sent_bytes` | bytes that one rank sends |
    | `inside_bytes` | bytes that one rank sends inside its node, with `hierarchical` |
    | `ratio` | `dense_bytes / sent_bytes` |
    | `encode`, `wire`, `decode` | time before, in and after collectives, of the slowest rank, seconds; on a CPU only |
    | `relative_error` | \|compressed mean - true mean\| / \|true mean\|, mean over the comparisons |
    | `cosine` | cosine of the angle between the two means, mean over the comparisons |
    | `residual_norm` | Euclidean norm of the residual of error feedback, at the last comparison |
    | `compressors` | for each one in use: `compressor`, its number of `parameters`, and all keys but the seconds |

    * With `hierarchical`, `dense_bytes` and `sent_bytes` count the bytes between nodes.
    * Under `LocalSGDStrategy`, a step of the compressor is an exchange. `dense_bytes` then covers all optimizer steps
      since the last exchange.
    * Bytes are payloads, without the headers of messages.
    * If ranks differ (shards of a model), bytes, errors and norms are means over the ranks that have them.
    * Compressors share their collectives, so seconds are not given per compressor.
    * On a GPU there are no seconds, because the host only launches the work.
    * A step is not counted if one of its gradients was not finite.
    * Without a residual there is no `residual_norm`. Without a comparison there is no `relative_error` and no `cosine`.
      One replica sends nothing, so there is no `ratio`.

    Logged: `compression/<key>` of rank 0, means over the steps of the last batch with a step. The errors and the norm
    are logged after each comparison.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedDDPStrategy, CompressionMonitor, PowerSGD

        strategy = CompressedDDPStrategy(PowerSGD(rank=4))
        trainer = Trainer(devices=2, strategy=strategy, callbacks=[CompressionMonitor(every_n_steps=100)])
        trainer.fit(MyModule(), MyData())  # prints bytes, times and errors after training
        ```

    Args:
        every_n_steps: Number of optimizer steps (of exchanges, under `LocalSGDStrategy`) between two comparisons with
            the true mean; 0 compares nothing. Each
            comparison costs a dense all-reduce. All steps of a batch are compared.
        warmup_steps: Number of first optimizer steps that are not counted.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If the strategy has no `compression`, a number of steps is too small, or `every_n_steps` differs
            between ranks.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        warmup_steps: int = 1,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(warmup_batches=warmup_steps, dirpath=dirpath, show_table=show_table)
        check_integer("every_n_steps", every_n_steps, least=0)
        self.every_n_steps = every_n_steps

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> CompressionAccumulator:
        reducer = getattr(trainer.strategy, "compression", None)
        if not isinstance(reducer, Reducer):
            raise ValueError(
                "`CompressionMonitor` needs a strategy with `compression`; got"
                f" `{type(trainer.strategy).__name__}` without it. Give the strategy a compressor, or remove"
                " `CompressionMonitor`"
            )
        # A comparison is a collective, so all ranks must request it in the same steps.
        comm.agree("`every_n_steps` of CompressionMonitor", self.every_n_steps, self.open_session.group)
        strategy: Any = trainer.strategy
        return CompressionAccumulator(
            reducer, self.warmup_batches, lambda: getattr(strategy, "steps_per_exchange", 1.0)
        )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.accumulator.request_comparison(self.every_n_steps)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.accumulator.count_new_steps()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def _leave(self) -> None:
        # The reducer belongs to the strategy, and lives on after this `fit`.
        if self.session is not None and self._accumulator is not None:
            self._accumulator.close()
        super()._leave()

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
        columns = rows if len(rows) > 2 else rows[-1:]  # a single compressor is the total
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
    "inside_bytes": bytes_text,
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
    squares = [norms[name] ** 2 for name in names if name in norms]
    return {"residual_norm": sum(squares) ** 0.5} if squares else {}


def _mean(rows: Sequence[Numbers]) -> Numbers:
    """Average each number over the rows that have it; the ratio is the ratio of the means."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return _with_ratio({key: fmean(row[key] for row in rows if key in row) for key in keys})
