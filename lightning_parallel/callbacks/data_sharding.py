"""Does every replica read its own part of the data, all of it once an epoch, and do the ranks of one read the same?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Optional

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich import box
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback
from lightning_parallel.callbacks.reading import NOTHING, EpochEnd, KnownBy, Loader, Reader, Reading
from lightning_parallel.recorder import Window

__all__ = ["DataShardingMonitor", "ShardingAccumulator"]

MIN_SHARE = 0.01
"""Share of the samples from which equal contents are no longer taken for repetitions in the data themselves."""


class ShardingAccumulator(Accumulator):
    """Findings, from what all ranks read.

    Args:
        known_by: Whether samples are known by their `place` in the data set, by their `content`, or not at all.

    Attributes:
        findings: What was found, each kind once.
    """

    def __init__(self, known_by: KnownBy = "place") -> None:
        self.known_by = known_by
        self.findings: list[dict[str, Any]] = []
        self.epoch = -1
        self._read: dict[int, list[Tensor]] = {}
        self._before, self._unknown = NOTHING, 0
        self._orders: dict[int, int | None] = {}
        self._told: set[str] = set()

    @override
    def add(self, window: Window) -> None:
        """Steps are not looked at."""

    @override
    def share(self) -> list[dict[str, Any]]:
        return list(self.findings)

    @override
    def summarize(self, shared: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
        return {"findings": shared[0], **({"known_by": self.known_by} if self.known_by else {})}

    @override
    def scalars(self) -> dict[str, float]:
        return {"data_sharding/findings": float(len(self.findings))}

    def state_dict(self, epoch: int, pending: Tensor, unknown: int) -> dict[str, Any]:
        """What was read of `epoch` so far, with `pending`, and of how many more samples nothing is known."""
        read = [self._before, *(part for parts in self._read.values() for part in parts)] if epoch == self.epoch else []
        samples = torch.cat([*read, pending])
        packed = _pack(samples) if self.known_by == "place" else samples.unique()
        return {"epoch": epoch, "known_by": self.known_by, "samples": packed, "unknown": unknown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an epoch."""
        if state["known_by"] == self.known_by:
            self.epoch, self._unknown = state["epoch"], state["unknown"]
            self._before = _unpack(state["samples"]) if self.known_by == "place" else state["samples"]

    # ------------------------------------------------------------------------------------------------------- auditing

    def audit(self, epoch: int, readings: Sequence[Reading]) -> list[dict[str, Any]]:
        """Take in what the ranks, in their order, have read in `epoch`; returns what is found for the first time."""
        if epoch != self.epoch:
            self.epoch, self._read, self._before, self._unknown = epoch, {}, NOTHING, 0
        known = len(self.findings)
        step = next((reading.steps[0] for reading in readings if reading.steps), 0)
        ranks: dict[int, list[int]] = {}
        for rank, reading in enumerate(readings):
            ranks.setdefault(reading.replica, []).append(rank)
        self._audit_peers(ranks, readings)
        parts = {replica: readings[members[0]].samples for replica, members in ranks.items()}
        if self.known_by:
            self._audit_overlap(step, ranks, parts)
            self._audit_resume(step, ranks, parts)
        for replica, samples in parts.items():
            self._read.setdefault(replica, []).append(samples)
        ends = [reading.end for reading in readings if reading.end is not None]
        if len(ends) == len(readings):
            last = max((reading.steps[-1] for reading in readings if reading.steps), default=step)
            self._audit_order(last, ends)
            if self.known_by:
                self._audit_epoch(last, ranks, ends)
            self._read, self._before, self._unknown = {}, NOTHING, 0
        return self.findings[known:]

    def _tell(self, name: str, step: int, ranks: Sequence[int], detail: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self.findings.append({"step": step, "name": name, "ranks": sorted(ranks), "detail": detail})

    def _audit_peers(self, ranks: Mapping[int, list[int]], readings: Sequence[Reading]) -> None:
        for replica, members in ranks.items():
            batches = list(zip(*(readings[rank].contents for rank in members)))
            different = [index for index, hashes in enumerate(batches) if len(set(hashes)) > 1]
            if different:
                detail = (
                    f"ranks of replica {replica} read different batches, in {len(different)} of {len(batches)} steps"
                )
                self._tell("peers", readings[members[0]].steps[different[0]], members, detail)

    def _audit_overlap(self, step: int, ranks: Mapping[int, list[int]], parts: Mapping[int, Tensor]) -> None:
        distinct = {replica: samples.unique() for replica, samples in parts.items()}
        values, counts = torch.cat(list(distinct.values())).unique(return_counts=True)
        shared = values[counts > 1]
        allowed = len(ranks) - 1  # what is added so that all replicas get as many
        if self.known_by == "content":
            repeated = [_repeated(samples) for samples in parts.values()]
            shared = shared[~torch.isin(shared, torch.cat(repeated))]
            allowed = max(allowed, int(MIN_SHARE * len(values)))
        if len(shared) > allowed:
            who = [
                rank for replica, part in distinct.items() if torch.isin(shared, part).any() for rank in ranks[replica]
            ]
            detail = (
                f"{len(shared)} of {len(values)} samples were read by several replicas; at most {allowed} should be"
            )
            self._tell("overlap", step, who, detail)

    def _audit_resume(self, step: int, ranks: Mapping[int, list[int]], parts: Mapping[int, Tensor]) -> None:
        samples = torch.cat(list(parts.values()))
        again = int(torch.isin(samples, self._before).sum()) if len(self._before) else 0
        if again >= len(ranks):
            detail = f"{again} of {len(samples)} samples were read once more after the resume, in the same epoch"
            self._tell("resume", step, [rank for members in ranks.values() for rank in members], detail)

    def _audit_order(self, step: int, ends: Sequence[EpochEnd]) -> None:
        orders = {rank: end.order for rank, end in enumerate(ends)}
        same = [rank for rank, order in orders.items() if order is not None and order == self._orders.get(rank)]
        if same:
            detail = "the same shuffled order as in the epoch before: is `set_epoch` called on the sampler?"
            self._tell("order", step, same, detail)
        self._orders = orders

    def _audit_epoch(self, step: int, ranks: Mapping[int, list[int]], ends: Sequence[EpochEnd]) -> None:
        parts = {replica: torch.cat(samples) for replica, samples in self._read.items()}
        self._audit_overlap(step, ranks, parts)
        promised = {end.samples for end in ends}
        if self.known_by != "place" or len(promised) != 1 or None in promised:
            return
        everyone = [rank for members in ranks.values() for rank in members]
        repeats = {replica: len(_repeated(samples)) for replica, samples in parts.items()}
        if sum(repeats.values()) >= len(ranks):
            who = [rank for replica, count in repeats.items() if count for rank in ranks[replica]]
            self._tell("repetition", step, who, f"{sum(repeats.values())} samples were read twice in one epoch")
        total = next(end.samples for end in ends if end.samples is not None)
        missing = total - len(torch.cat([self._before, *parts.values()]).unique())
        may_miss = self._unknown + sum(ends[members[0]].may_drop for members in ranks.values())
        if all(end.is_whole for end in ends) and missing > may_miss:
            self._tell("missing", step, everyone, f"{missing} of {total} samples were not read in a whole epoch")


def _repeated(samples: Tensor) -> Tensor:
    values, counts = samples.unique(return_counts=True)
    return values[counts > 1]


def _pack(places: Tensor) -> Tensor:
    """One bit for each place up to the last."""
    bits = numpy.zeros(int(places.max()) + 1 if len(places) else 0, dtype=bool)
    bits[places.numpy()] = True
    return torch.from_numpy(numpy.packbits(bits))


def _unpack(packed: Tensor) -> Tensor:
    return torch.from_numpy(numpy.flatnonzero(numpy.unpackbits(packed.numpy())))


class DataShardingMonitor(MeasuringCallback):
    """Watches which samples are read by whom.

    | finding | what |
    |---|---|
    | `overlap` | several replicas read the same samples |
    | `missing` | samples that nobody read in a whole epoch, though the sampler takes all |
    | `repetition` | one replica read samples twice in an epoch, though the sampler takes each once |
    | `peers` | ranks of one replica, such as a tensor-parallel group, read different batches |
    | `order` | the same shuffled order in two epochs running |
    | `resume` | samples of the epoch in which training was resumed come once more |

    A sample is known by its place in the data set where the sampler of a `DataLoader` divides it (`num_replicas`), or
    there is one replica only; otherwise by a hash of its tensors, up to about 256 elements of each. By contents nothing
    is said of what is missing, and random augmentation hides what overlaps. With several loaders, and where samples are
    drawn with replacement, only peers and orders are compared. What fills up the last batch, and what `drop_last`
    leaves out, is expected.

    `report()` has, besides the common keys:

        findings: [{step, name, ranks, detail}]     each kind once, with the first `trainer.global_step`
        known_by: `place` or `content`

    Logged: `data_sharding/findings`, their number so far. The checkpoint holds which samples of the epoch were read.

    Args:
        every_n_steps: Batches between two exchanges; there is one at the end of each epoch, too.
        dirpath, show_table: See `MeasuringCallback`.

    Raises:
        ValueError: If `every_n_steps` is not positive.
    """

    def __init__(self, every_n_steps: int = 50, dirpath: Optional[str] = None, show_table: bool = True) -> None:
        super().__init__(dirpath=dirpath, show_table=show_table)
        if every_n_steps < 1:
            raise ValueError(f"expected every_n_steps >= 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._loaders: list[Loader] = []
        self._reader: Reader | None = None
        self._epoch, self._replicas = -1, 1
        self._resumed: dict[str, Any] = {}
        self._undo = ExitStack()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        process = trainer.strategy.process_dataloader

        def noted(dataloader: object) -> object:
            dataloader = process(dataloader)
            if trainer.training:
                self._add(Loader(dataloader))
            return dataloader

        # Between the making of a loader and the first pass over it there is no hook.
        trainer.strategy.process_dataloader = noted  # type: ignore[method-assign]
        self._undo.callback(delattr, trainer.strategy, "process_dataloader")

    def _add(self, loader: Loader) -> None:
        if self._reader is not None and self._reader.loader is not None:  # a new one for the next epoch
            self._reader.loader.release()
            self._loaders.clear()
            self._reader.loader = loader
        self._loaders.append(loader)

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> ShardingAccumulator:
        return ShardingAccumulator()

    @property
    def _audit(self) -> ShardingAccumulator:
        assert isinstance(self._accumulator, ShardingAccumulator)
        return self._accumulator

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self.session is not None
        kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replica, replicas = kwargs.get("rank", trainer.global_rank), kwargs.get("num_replicas", trainer.world_size)
        self._replicas = replicas
        loader = self._loaders[0] if len(self._loaders) == 1 else None
        known_by: KnownBy = "" if loader is None or loader.draws_again else "content"
        if known_by and loader is not None and loader.tells_places and (loader.divides or replicas == 1):
            known_by = "place"
        everyone = self.session.gather(known_by)
        # The least that all ranks can do, as the words are in that order.
        self._audit.known_by = known_by = min(everyone) if everyone is not None else ""
        self._reader = Reader(loader, replica, known_by, compares=replicas < trainer.world_size)
        if self._resumed:
            self._audit.load_state_dict(self._resumed)
            self._resumed = {}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        assert self._reader is not None
        self._epoch = trainer.current_epoch
        self._reader.note(trainer.global_step, batch)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._reader is not None
        if self._reader.batches >= self.every_n_steps:
            self._exchange(trainer, self._reader.take())
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._reader is not None
        self._exchange(trainer, self._reader.take(epoch_is_over=True))
        super().on_train_epoch_end(trainer, pl_module)

    def _exchange(self, trainer: Trainer, reading: Reading) -> None:
        assert self.session is not None
        readings = self.session.gather(reading)
        if readings is None or self.session.rank != 0:
            return
        for finding in self._audit.audit(trainer.current_epoch, readings):
            ranks = ", ".join(map(str, finding["ranks"]))
            where = f"optimizer step {finding['step']}, ranks {ranks}"
            rank_zero_warn(f"Data, {where}: {finding['name']}: {finding['detail']}")

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._reader is None or self._accumulator is None:
            return {}
        pending = self._reader.pending
        return self._audit.state_dict(self._epoch, pending, unknown=len(pending) * (self._replicas - 1))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = dict(state_dict)

    @override
    def _leave(self) -> None:
        self._undo.close()
        for loader in self._loaders:
            loader.release()
        self._loaders, self._reader = [], None
        super()._leave()

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        if not report["findings"]:
            return None
        header = "optimizer step", "finding", "ranks", "detail"
        table = Table(*header, title="How the data are divided", box=box.SIMPLE_HEAD)
        for one in report["findings"]:
            table.add_row(str(one["step"]), one["name"], ", ".join(map(str, one["ranks"])), one["detail"])
        return table

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(report["findings"])
