"""Samples that a rank reads: by their index in the data set where the sampler tells it, by a hash otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_parallel.comm import fingerprint, fingerprints, row_fingerprints
from lightning_parallel.compat import Patches
from lightning_parallel.compat.lightning import wrapped_sampler
from lightning_parallel.compat.torch import pytree
from lightning_parallel.compat.twins import is_a, kinds_of

__all__ = ["NO_SAMPLES", "EpochEnd", "KnownBy", "ReadReport", "SampleTracker", "TrackedLoader", "sample_hashes"]

KnownBy = Literal["place", "content", ""]
"""Way to tell samples apart: by their place in the data set, by their content, or not at all."""

NO_SAMPLES = torch.zeros(0, dtype=torch.int64)

MIN_ORDER = 8
"""Samples below which the orders of two epochs may be equal by chance."""


@dataclass(frozen=True)
class EpochEnd:
    """Facts of one rank about an epoch that has ended.

    Attributes:
        is_whole: Whether the loader was read to its end.
        order: Hash of the order of its samples, if that looks shuffled.
        samples: Number of samples of which each should come once; None if the sampler does not promise that.
        may_drop: How many of them this rank may leave out.
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
        contents: A hash of each batch; empty where no other rank should read the same.
        end: Set at the end of an epoch.
    """

    replica: int
    steps: list[int] = field(default_factory=list)
    samples: Tensor = NO_SAMPLES
    contents: list[int] = field(default_factory=list)
    end: EpochEnd | None = None


def sample_hashes(batch: Any) -> Tensor | None:
    """Hash each sample of a batch: (samples,), from the tensors that have one row per sample.

    None if there is no such tensor. The first one determines the number of samples.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        return None
    rows = [row_fingerprints(tensor) for tensor in tensors if len(tensor) == len(tensors[0])]
    hashes = torch.zeros_like(rows[0])
    # An order of tensors is part of the sample: exchanged inputs and labels must not be equal.
    for row in rows:
        hashes = hashes * 31 + row.to(hashes.device)
    return hashes


class TrackedLoader:
    """A training loader whose sampler is observed while it is read, until `release`.

    Args:
        loader: As the Trainer uses it.

    Attributes:
        divides: Whether its sampler gives each replica its part, so that equal indices are the same sample.
    """

    def __init__(self, loader: object) -> None:
        self._issued: deque[list[Any]] = deque()
        self._sampler: Any = None
        self._kind: Any = None
        self._patches = Patches()
        self._loader = loader
        self._taken = 0
        self.divides = False
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return
        # A loader with a state may resume in the middle of a pass, so that batches no longer match the sampler's.
        if not hasattr(loader, "load_state_dict"):
            samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
            self.divides = any(hasattr(sampler, "num_replicas") for sampler in samplers)
            self._observe(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)

    def _observe(self, sampler: Any) -> None:
        kind = type(sampler)

        def iterate(sampler: Any) -> Iterator[Any]:
            return self.track(kind.__iter__(sampler))

        # A subclass, since a wrapper would hide attributes such as `set_epoch`, and others look at the type.
        tracked = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": iterate})
        try:
            self._patches.replace(sampler, "__class__", tracked)
        except TypeError:  # not possible for builtin types, such as a list of batches
            return
        self._sampler = sampler
        self._kind = kind

    def release(self) -> None:
        """Give the sampler its class back."""
        if self._sampler is not None:
            self._patches.undo()
            self._sampler = None

    @property
    def knows_indices(self) -> bool:
        """Whether the indices of samples in the data set are known."""
        return self._sampler is not None

    def track(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Begin a pass, and keep the indices that the sampler yields in it."""
        # Workers prefetch: the sampler is ahead of training, and a pass that was stopped leaves indices behind. Hence a
        # new queue for each pass, which iterators of earlier passes do not write to.
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

    # ------------------------------------------------------------------------------------------- the sampler's promises

    @property
    def has_replacement(self) -> bool:
        """Whether samples are drawn with replacement, so that each may come any number of times."""
        sampler = getattr(self._loader, "sampler", None)
        # Lightning wraps samplers to divide them; how they draw is up to the one inside.
        if is_a(sampler, DistributedSamplerWrapper):
            sampler = wrapped_sampler(sampler)
        return isinstance(sampler, (RandomSampler, WeightedRandomSampler)) and sampler.replacement

    def coverage(self) -> tuple[int, int] | None:
        """Return the number of samples that should each come once per epoch, and how many of them this rank may drop.

        None if the sampler does not promise that.
        """
        loader = self._loader
        if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, Sized):
            return None
        batches = loader.batch_sampler
        # The observed sampler has a class made here, which is none of those known.
        kind = self._kind if loader.sampler is self._sampler else type(loader.sampler)
        if (batches is not None and not isinstance(batches, BatchSampler)) or not _takes_all(loader.sampler, kind):
            return None
        drops_batch = batches is not None and batches.drop_last
        drops_rest = bool(getattr(loader.sampler, "drop_last", False))
        size = getattr(batches, "batch_size", 1) or 1
        return len(loader.dataset), (size - 1 if drops_batch else 0) + (1 if drops_rest else 0)


def _takes_all(sampler: Any, kind: Any) -> bool:
    """Return whether a sampler, whose class was `kind` before it was observed, yields each sample once.

    Compared by method: a subclass may yield something else, but need not.
    """
    if any(kind.__iter__ is vars(wrapper)["__iter__"] for wrapper in kinds_of(DistributedSamplerWrapper)):
        wrapped = wrapped_sampler(sampler)
        return _takes_all(wrapped, type(wrapped))
    if kind.__iter__ is RandomSampler.__iter__:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return kind.__iter__ in (SequentialSampler.__iter__, DistributedSampler.__iter__)


class SampleTracker:
    """Collects the samples that this rank reads, until they are reported.

    Args:
        loader: The training loader, if there is just one.
        replica: The replica whose part of the data is read.
        known_by: How all ranks tell samples apart.
        has_peers: Whether other ranks should read the same batches.

    Attributes:
        loader: As given; may be replaced between two epochs.
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
        return torch.cat([NO_SAMPLES, *(samples.cpu() for samples in self._samples)])

    def add(self, step: int, batch: Any) -> None:
        """Add a batch."""
        self._steps.append(step)
        indices = None if self.loader is None else self.loader.next_indices()
        self._has_gaps |= indices is None
        if indices is not None:
            self._order.append(indices)
        # Hashes read the whole batch, on its device; they are taken only where they are needed.
        needs_hashes = self._has_peers or self._known_by == "content"
        hashes = sample_hashes(batch) if needs_hashes else None
        samples = indices if self._known_by == "place" else hashes
        if self._known_by and samples is not None:
            self._samples.append(samples)
        # Peers need an entry for each batch, also for one without tensors, to be compared step by step.
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
        # An order that is filled up from its beginning goes back once without being shuffled.
        is_shuffled = len(indices) >= MIN_ORDER and int((indices.diff() < 0).sum()) > 1
        order = fingerprint(indices) if is_shuffled and not self._has_gaps else None
        is_whole = self.loader is not None and self.loader.is_exhausted and not self._has_gaps
        coverage = None if self.loader is None else self.loader.coverage()
        samples, may_drop = (None, 0) if coverage is None else coverage
        self._order = []
        self._has_gaps = False
        return EpochEnd(is_whole, order, samples, may_drop)
