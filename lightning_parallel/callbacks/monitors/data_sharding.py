"""Checks of data sharding: replicas read each sample once per epoch, and the ranks of a replica read the same data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Optional

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich import box
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_parallel.callbacks.monitors.data_order import LoaderFacts
from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback
from lightning_parallel.comm import fingerprint, fingerprints, row_fingerprints
from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import pytree
from lightning_parallel.compression.compressor import check_integer

__all__ = ["DataShardingMonitor", "EpochEnd", "ReadReport", "ShardingAccumulator", "TrackedLoader", "sample_hashes"]

MIN_SHARE = 0.01
"""Largest share of samples with equal contents that counts as duplicates in the data set itself."""


KnownBy = Literal["place", "content", ""]
"""Way to tell samples apart: by their place in the data set, by their content, or not at all."""

NO_SAMPLES = torch.zeros(0, dtype=torch.int64)

MIN_ORDER = 8
"""Least number of samples for which equal orders of two epochs are no coincidence."""


@dataclass(frozen=True)
class EpochEnd:
    """Facts of one rank about a finished epoch.

    Attributes:
        is_whole: Whether the loader was read to its end.
        order: Hash of the order of its samples; None if the order does not look shuffled.
        samples: Number of samples, if each should come exactly once; None if the sampler does not promise that.
        may_drop: Number of samples that this rank may leave out.
    """

    is_whole: bool
    order: int | None
    samples: int | None
    may_drop: int


@dataclass(frozen=True)
class ReadReport:
    """The samples that a rank has read since its last report.

    Attributes:
        replica: The replica whose part of the data it reads.
        steps: Step of each batch.
        samples: Indices in the data set, or hashes of contents.
        contents: A hash of each batch; empty if no other rank should read the same batches.
        end: Facts of the epoch, at its end; otherwise None.
    """

    replica: int
    steps: list[int] = field(default_factory=list)
    samples: Tensor = NO_SAMPLES
    contents: list[int] = field(default_factory=list)
    end: EpochEnd | None = None


def sample_hashes(batch: Any) -> Tensor | None:
    """Hash each sample of a batch: (samples,), from the tensors that have one row per sample.

    Return None without such a tensor. The first tensor determines the number of samples.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        return None
    rows = [row_fingerprints(tensor) for tensor in tensors if len(tensor) == len(tensors[0])]
    hashes = torch.zeros_like(rows[0])
    # The order of tensors is part of the hash: a sample with swapped inputs and labels must differ.
    for row in rows:
        hashes = hashes * 31 + row.to(hashes.device)
    return hashes


class TrackedLoader:
    """A training loader with an observed sampler, until `release`.

    Args:
        loader: The loader that the Trainer uses.

    Attributes:
        loader: The same loader.
        facts: Promises of its sampler.
    """

    def __init__(self, loader: object) -> None:
        self._issued: deque[list[Any]] = deque()
        self._sampler: Any = None
        self._patches = Patches()
        self._taken = 0
        self.loader = loader
        # Before `_observe`, which changes the class of the sampler.
        self.facts = LoaderFacts.of(loader)
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return
        # A loader with a state may resume in the middle of a pass: its batches do not match the order of the sampler.
        if not hasattr(loader, "load_state_dict"):
            self._observe(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)

    def _observe(self, sampler: Any) -> None:
        kind = type(sampler)

        def iterate(sampler: Any) -> Iterator[Any]:
            return self.track(kind.__iter__(sampler))

        # A subclass, because a wrapper would hide attributes such as `set_epoch`, and fail type checks of other code.
        tracked = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": iterate})
        try:
            self._patches.replace(sampler, "__class__", tracked)
        except TypeError:  # not possible for builtin types, such as a list of batches
            return
        self._sampler = sampler

    def release(self) -> None:
        """Restore the class of the sampler."""
        if self._sampler is not None:
            self._patches.undo()
            self._sampler = None

    @property
    def knows_indices(self) -> bool:
        """Whether the indices of samples in the data set are known."""
        return self._sampler is not None

    def track(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Begin a pass over the sampler, and keep its indices."""
        # Workers prefetch, so the sampler runs ahead of training, and a stopped pass leaves indices behind. A new queue
        # for each pass keeps out the iterators of earlier passes.
        issued = self._issued = deque[list[Any]]()
        self._taken = 0

        def yield_tracked() -> Iterator[Any]:
            for batch in batches:
                issued.append(list(batch) if isinstance(batch, (list, tuple)) else [batch])
                yield batch

        return yield_tracked()

    def next_indices(self) -> Tensor | None:
        """Take the indices of the next batch: loaders return batches in the order in which the sampler yields them."""
        indices = self._issued.popleft() if self._issued else [None]
        self._taken += 1
        # Samplers may yield keys of any kind.
        if not all(isinstance(index, Integral) for index in indices):
            return None
        return torch.tensor(indices, dtype=torch.int64)

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches of a pass were taken."""
        return isinstance(self._sampler, Sized) and self._taken == len(self._sampler)


class SampleTracker:
    """Collects the samples that this rank reads, until the next report.

    Args:
        loader: The training loader; None with several loaders.
        replica: The replica whose part of the data this rank reads.
        known_by: The way in which all ranks tell samples apart.
        has_peers: Whether other ranks should read the same batches.

    Attributes:
        loader: The training loader; may change between two epochs.
    """

    def __init__(self, loader: TrackedLoader | None, replica: int, known_by: KnownBy, has_peers: bool) -> None:
        self.loader = loader
        self._replica = replica
        self._known_by = known_by
        self._has_peers = has_peers
        self._steps: list[int] = []
        self._samples: list[Tensor] = []
        self._contents: list[Tensor] = []
        self._order: list[Tensor] = []
        self._has_gaps = False

    @property
    def batches(self) -> int:
        """Number of batches since the last report."""
        return len(self._steps)

    @property
    def pending(self) -> Tensor:
        """Samples of these batches."""
        # `cat` refuses an empty list, and a report may have no samples.
        return torch.cat([NO_SAMPLES, *(samples.cpu() for samples in self._samples)])

    def add(self, step: int, batch: Any) -> None:
        """Add a batch."""
        self._steps.append(step)
        indices = None if self.loader is None else self.loader.next_indices()
        self._has_gaps |= indices is None
        if indices is not None:
            self._order.append(indices)
        # Hashes read the full batch on its device, so compute them only if needed.
        needs_hashes = self._has_peers or self._known_by == "content"
        hashes = sample_hashes(batch) if needs_hashes else None
        samples = indices if self._known_by == "place" else hashes
        if self._known_by and samples is not None:
            self._samples.append(samples)
        # Peers compare step by step, so they need an entry even for a batch without tensors.
        if self._has_peers:
            self._contents.append(NO_SAMPLES if hashes is None else hashes)

    def take_report(self, epoch_has_ended: bool = False) -> ReadReport:
        """Report the samples read since the last report."""
        end = self._end_epoch() if epoch_has_ended else None
        report = ReadReport(self._replica, self._steps, self.pending, fingerprints(self._contents), end)
        self._steps = []
        self._samples = []
        self._contents = []
        return report

    def _end_epoch(self) -> EpochEnd:
        indices = torch.cat([NO_SAMPLES, *self._order])
        # Even an unshuffled order may go back once: at the fill-up with samples from its beginning.
        is_shuffled = len(indices) >= MIN_ORDER and int((indices.diff() < 0).sum()) > 1
        order = fingerprint(indices) if is_shuffled and not self._has_gaps else None
        is_whole = self.loader is not None and self.loader.is_exhausted and not self._has_gaps
        facts = LoaderFacts() if self.loader is None else self.loader.facts
        self._order = []
        self._has_gaps = False
        return EpochEnd(is_whole, order, facts.size, facts.may_drop)


class ShardingAccumulator(Accumulator):
    """Audits the samples that all ranks read.

    Args:
        known_by: Whether samples are known by their `place` in the data set, by their `content`, or not at all.

    Attributes:
        findings: One finding of each kind, with its first step.
        epoch: The running epoch.
    """

    def __init__(self, known_by: KnownBy = "place") -> None:
        self.known_by = known_by
        self.findings: list[dict[str, Any]] = []
        self.epoch = -1
        self._read: dict[int, list[Tensor]] = {}
        self._before = NO_SAMPLES  # read in this epoch before a resume
        self._unknown = 0  # samples that may have been read before it, too
        self._orders: dict[int, int | None] = {}
        self._found: set[str] = set()

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
        """Return the samples of `epoch` read so far.

        Args:
            epoch: The running epoch.
            pending: Samples read since the last audit.
            unknown: Number of samples that other ranks may have read since then.
        """
        read: list[Tensor] = []
        if epoch == self.epoch:
            read.append(self._before)
            for parts in self._read.values():
                read += parts
        samples = torch.cat([*read, pending])
        # Pack indices as bits: the indices of millions of samples would make a large checkpoint. Hashes do not pack.
        packed = _pack(samples) if self.known_by == "place" else samples.unique()
        return {"epoch": epoch, "known_by": self.known_by, "samples": packed, "unknown": unknown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an epoch."""
        # Another loader or number of replicas may change `known_by`: indices and hashes do not compare.
        if state["known_by"] == self.known_by:
            self.epoch = state["epoch"]
            self._unknown = state["unknown"]
            self._before = _unpack(state["samples"]) if self.known_by == "place" else state["samples"]

    # ------------------------------------------------------------------------------------------------------- auditing

    def audit(self, epoch: int, readings: Sequence[ReadReport]) -> list[dict[str, Any]]:
        """Add the reports of all ranks on `epoch`, in the order of the ranks; return the new findings."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._forget_epoch()
        known = len(self.findings)
        step = next((reading.steps[0] for reading in readings if reading.steps), 0)
        ranks: dict[int, list[int]] = {}
        for rank, reading in enumerate(readings):
            ranks.setdefault(reading.replica, []).append(rank)
        # Ranks of one replica read the same samples, so its first rank represents it from here on.
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
            self._forget_epoch()
        return self.findings[known:]

    def _forget_epoch(self) -> None:
        self._read = {}
        self._before = NO_SAMPLES
        self._unknown = 0

    def _add_finding(self, name: str, step: int, ranks: Sequence[int], detail: str) -> None:
        if name not in self._found:
            self._found.add(name)
            self.findings.append({"step": step, "name": name, "ranks": sorted(ranks), "detail": detail})

    def _audit_peers(self, ranks: Mapping[int, list[int]], readings: Sequence[ReadReport]) -> None:
        for replica, members in ranks.items():
            batches = list(zip(*(readings[rank].contents for rank in members)))
            different = [index for index, hashes in enumerate(batches) if len(set(hashes)) > 1]
            if different:
                detail = (
                    f"the ranks of replica {replica} read different batches in {len(different)} of {len(batches)} steps"
                )
                self._add_finding("peers", readings[members[0]].steps[different[0]], members, detail)

    def _audit_overlap(self, step: int, ranks: Mapping[int, list[int]], parts: Mapping[int, Tensor]) -> None:
        distinct = {replica: samples.unique() for replica, samples in parts.items()}
        values, counts = torch.cat(list(distinct.values())).unique(return_counts=True)
        shared = values[counts > 1]
        allowed = len(ranks) - 1  # samplers repeat a few samples so that all replicas get equally many
        # Equal contents need not be one sample: data sets have duplicates, which also show within a replica.
        if self.known_by == "content":
            repeated = [_repeated(samples) for samples in parts.values()]
            shared = shared[~torch.isin(shared, torch.cat(repeated))]
            allowed = max(allowed, int(MIN_SHARE * len(values)))
        if len(shared) > allowed:
            who: list[int] = []
            for replica, part in distinct.items():
                if torch.isin(shared, part).any():
                    who += ranks[replica]
            detail = (
                f"{len(shared)} of {len(values)} samples were read by several replicas; at most {allowed} should be"
            )
            self._add_finding("overlap", step, who, detail)

    def _audit_resume(self, step: int, ranks: Mapping[int, list[int]], parts: Mapping[int, Tensor]) -> None:
        samples = torch.cat(list(parts.values()))
        again = int(torch.isin(samples, self._before).sum())
        if again >= len(ranks):  # fewer fill up the last batches
            detail = f"{again} of {len(samples)} samples were read again after the resume, in the same epoch"
            self._add_finding("resume", step, [rank for members in ranks.values() for rank in members], detail)

    def _audit_order(self, step: int, ends: Sequence[EpochEnd]) -> None:
        orders = {rank: end.order for rank, end in enumerate(ends)}
        # Unshuffled orders have no hash: they are meant to be the same in each epoch.
        same = [rank for rank, order in orders.items() if order is not None and order == self._orders.get(rank)]
        if same:
            detail = "the shuffled order is the same as in the epoch before; call `set_epoch` on the sampler"
            self._add_finding("order", step, same, detail)
        self._orders = orders

    def _audit_epoch(self, step: int, ranks: Mapping[int, list[int]], ends: Sequence[EpochEnd]) -> None:
        parts = {replica: torch.cat(samples) for replica, samples in self._read.items()}
        self._audit_overlap(step, ranks, parts)
        promised = {end.samples for end in ends}
        # Duplicates in the data set share a hash, so the number of hashes says nothing about missing samples.
        if self.known_by != "place" or len(promised) != 1 or None in promised:
            return
        self._audit_repetition(step, ranks, parts)
        if all(end.is_whole for end in ends):
            may_drop = sum(ends[members[0]].may_drop for members in ranks.values())
            self._audit_missing(step, ranks, parts, ends[0].samples or 0, may_drop)

    def _audit_repetition(self, step: int, ranks: Mapping[int, list[int]], parts: Mapping[int, Tensor]) -> None:
        who: list[int] = []
        count = 0
        for replica, samples in parts.items():
            repeats = len(_repeated(samples))
            if repeats:
                count += repeats
                who += ranks[replica]
        if count >= len(ranks):  # fewer fill up the last batches
            self._add_finding("repetition", step, who, f"{count} samples were read twice in one epoch")

    def _audit_missing(
        self, step: int, ranks: Mapping[int, list[int]], parts: Mapping[int, Tensor], total: int, may_drop: int
    ) -> None:
        missing = total - len(torch.cat([self._before, *parts.values()]).unique())
        if missing > self._unknown + may_drop:
            everyone = [rank for members in ranks.values() for rank in members]
            self._add_finding("missing", step, everyone, f"{missing} of {total} samples were not read in a whole epoch")


def _repeated(samples: Tensor) -> Tensor:
    """Return the samples that occur more than once."""
    values, counts = samples.unique(return_counts=True)
    return values[counts > 1]


def _pack(places: Tensor) -> Tensor:
    """Encode indices in the data set as one bit for each index up to the last."""
    bits = numpy.zeros(int(places.max()) + 1 if len(places) else 0, dtype=bool)
    bits[places.numpy()] = True
    return torch.from_numpy(numpy.packbits(bits))


def _unpack(packed: Tensor) -> Tensor:
    return torch.from_numpy(numpy.flatnonzero(numpy.unpackbits(packed.numpy())))


class DataShardingMonitor(MeasuringCallback[ShardingAccumulator]):
    """Checks how the samples of each epoch are distributed over the ranks.

    | finding | meaning |
    |---|---|
    | `overlap` | several replicas read the same samples |
    | `missing` | no rank read some samples in a full epoch, though the sampler takes all |
    | `repetition` | one replica read samples twice in an epoch, though the sampler takes each once |
    | `peers` | ranks of one replica, such as a tensor-parallel group, read different batches |
    | `order` | two consecutive epochs have the same shuffled order |
    | `resume` | after a resume, samples of the interrupted epoch are read again |

    The monitor knows a sample in one of two ways:

    * `place`: by its index in the data set. This needs one replica, or a `DataLoader` whose sampler splits the data set
      (a sampler with `num_replicas`).
    * `content`: by a hash of its tensors, of up to about 256 elements of each tensor. By content, missing samples are
      not found, and random augmentation hides overlaps.

    With several loaders, and with samples drawn with replacement, the monitor compares only peers and orders. Samples
    that fill up the last batch are no findings. Samples that `drop_last` leaves out are no findings either.

    `report()` returns the common keys and these:

        findings: [{step, name, ranks, detail}]
        known_by: `place` or `content`

    `findings` holds each kind once. Its `step` is the first `trainer.global_step` with the finding.

    Logged: `data_sharding/findings`, the number of findings so far. A checkpoint stores which samples of the epoch were
    read.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import DataShardingMonitor

        monitor = DataShardingMonitor()
        trainer = Trainer(callbacks=[monitor])
        trainer.fit(MyModule(), MyData())
        print(monitor.report()["findings"])  # [] if each sample was read once
        ```

    Args:
        every_n_batches: Number of batches between two checks. One more check runs at the end of each epoch.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If `every_n_batches` is not positive.
    """

    def __init__(self, every_n_batches: int = 50, dirpath: Optional[str] = None, show_table: bool = True) -> None:
        super().__init__(dirpath=dirpath, show_table=show_table)
        check_integer("every_n_batches", every_n_batches, least=1)
        self.every_n_batches = every_n_batches
        self._loaders: list[TrackedLoader] = []
        self._tracker: SampleTracker | None = None
        self._epoch = -1
        self._replicas = 1
        self._resumed: dict[str, Any] = {}
        self._patches = Patches()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        process = trainer.strategy.process_dataloader

        def process_and_track(dataloader: object) -> object:
            dataloader = process(dataloader)
            if trainer.training:
                self._track(dataloader)
            return dataloader

        # Lightning has no hook between the creation of a loader and the first pass over it.
        self._patches.replace(trainer.strategy, "process_dataloader", process_and_track)

    def _track(self, loader: object) -> None:
        # A module may return the same loader for each epoch. Its sampler is already observed.
        if any(known.loader is loader for known in self._loaders):
            return
        if self._tracker is not None and self._tracker.loader is not None:  # a new loader for the next epoch
            self._tracker.loader.release()
            self._loaders.clear()
            self._tracker.loader = TrackedLoader(loader)
            self._loaders.append(self._tracker.loader)
        else:
            self._loaders.append(TrackedLoader(loader))

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> ShardingAccumulator:
        return ShardingAccumulator()

    @property
    def _open_tracker(self) -> SampleTracker:
        if self._tracker is None:
            raise RuntimeError("`DataShardingMonitor` tracks samples only during training")
        return self._tracker

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # Strategies with tensor or pipeline ranks give several ranks the same part of the data.
        kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replica = kwargs.get("rank", trainer.global_rank)
        self._replicas = kwargs.get("num_replicas", trainer.world_size)
        loader = self._loaders[0] if len(self._loaders) == 1 else None
        known_by = self._agreed(self._known_by(loader))
        self.accumulator.known_by = known_by
        self._tracker = SampleTracker(loader, replica, known_by, has_peers=self._replicas < trainer.world_size)
        # Not in `load_state_dict`, which runs before `known_by` is known.
        if self._resumed:
            self.accumulator.load_state_dict(self._resumed)
            self._resumed = {}

    def _known_by(self, loader: TrackedLoader | None) -> KnownBy:
        if loader is None or loader.facts.replaced:
            return ""
        is_index_unique = loader.facts.divides or self._replicas == 1
        return "place" if loader.knows_indices and is_index_unique else "content"

    def _agreed(self, known_by: KnownBy) -> KnownBy:
        """Return the most precise way to tell samples apart that works on all ranks."""
        by_rank = self.open_session.gather(known_by)
        precision: tuple[KnownBy, ...] = ("", "content", "place")
        return "" if by_rank is None else min(by_rank, key=precision.index)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._epoch = trainer.current_epoch
        self._open_tracker.add(trainer.global_step, batch)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._open_tracker.batches >= self.every_n_batches:
            self._audit(trainer, self._open_tracker.take_report())
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._audit(trainer, self._open_tracker.take_report(epoch_has_ended=True))
        super().on_train_epoch_end(trainer, pl_module)

    def _audit(self, trainer: Trainer, reading: ReadReport) -> None:
        """Audit the reports of all ranks on rank 0; every rank must call it."""
        # Rank 0 audits for all ranks. The exchange at the end sends its findings to the other ranks.
        readings = self.open_session.gather(reading)
        if readings is None or self.open_session.rank != 0:
            return
        for finding in self.accumulator.audit(trainer.current_epoch, readings):
            ranks = ", ".join(map(str, finding["ranks"]))
            where = f"optimizer step {finding['step']}, ranks {ranks}"
            rank_zero_warn(f"Data, {where}: {finding['name']}: {finding['detail']}")

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._tracker is None or self._accumulator is None:
            return {}
        pending = self._tracker.pending
        return self.accumulator.state_dict(self._epoch, pending, unknown=len(pending) * (self._replicas - 1))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = dict(state_dict)

    @override
    def _leave(self) -> None:
        self._patches.undo()
        for loader in self._loaders:
            loader.release()
        self._loaders = []
        self._tracker = None
        super()._leave()

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        if not report["findings"]:
            return None
        header = "optimizer step", "finding", "ranks", "detail"
        table = Table(*header, title="Problems in the sharding of the data", box=box.SIMPLE_HEAD)
        for one in report["findings"]:
            table.add_row(str(one["step"]), one["name"], ", ".join(map(str, one["ranks"])), one["detail"])
        return table

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(report["findings"])
