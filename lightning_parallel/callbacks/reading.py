"""Which samples a rank reads: their places in the data set where the loader tells, their contents otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils import _pytree as pytree
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

__all__ = ["NOTHING", "EpochEnd", "KnownBy", "Loader", "Reader", "Reading", "sample_hashes"]

KnownBy = Literal["place", "content", ""]
"""How samples are told apart; empty where they are not."""

NOTHING = torch.zeros(0, dtype=torch.int64)

MIN_ORDER = 8
"""Shorter orders may well be equal by chance."""


@dataclass(frozen=True)
class EpochEnd:
    """What a rank knows of an epoch when it is over.

    Attributes:
        is_whole: Whether the loader was read to its end.
        order: Hash of the order of its samples, if that looks shuffled.
        samples: How many samples the epoch should have; None if nothing promises that each comes once.
        may_drop: How many of them this rank may leave out.
    """

    is_whole: bool
    order: int | None
    samples: int | None
    may_drop: int


@dataclass(frozen=True)
class Reading:
    """What a rank has read since it told last.

    Attributes:
        replica: Whose part of the data this is.
        steps: Of each batch.
        samples: Places in the data set, or hashes of contents.
        contents: A hash of each batch; empty where no other rank should read the same.
        end: At the end of an epoch.
    """

    replica: int
    steps: list[int] = field(default_factory=list)
    samples: Tensor = NOTHING
    contents: list[int] = field(default_factory=list)
    end: EpochEnd | None = None


def sample_hashes(batch: Any) -> Tensor | None:
    """A hash of each sample of a batch, (samples,), from the tensors that have one row per sample.

    None if there is no such tensor. The first one says how many samples there are.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        return None
    rows = [row_fingerprints(tensor) for tensor in tensors if len(tensor) == len(tensors[0])]
    hashes = torch.zeros_like(rows[0])
    for row in rows:
        hashes = hashes * 31 + row.to(hashes.device)
    return hashes


class Loader:
    """A training loader whose order is noted while it is read.

    Args:
        loader: As the Trainer uses it.

    Attributes:
        divides: Whether its sampler gives each replica its own part, so that a place in the data set is one sample.
    """

    def __init__(self, loader: object) -> None:
        self._issued: deque[list[Any]] = deque()
        self._sampler: Any = None
        self._kind: Any = None
        self._loader = loader
        self._taken = 0
        self.divides = False
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return
        if not hasattr(loader, "load_state_dict"):  # one with a state may start in the middle of what is handed out
            samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
            self.divides = any(hasattr(sampler, "num_replicas") for sampler in samplers)
            self._watch(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)

    def _watch(self, sampler: Any) -> None:
        kind = type(sampler)

        def passes(sampler: Any) -> Iterator[Any]:
            return self.note(kind.__iter__(sampler))

        try:
            # A subclass, since a wrapper would hide attributes such as `set_epoch`, and others look at the type.
            sampler.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": passes})
        except TypeError:  # such as a list of batches
            return
        self._sampler, self._kind = sampler, kind

    def release(self) -> None:
        """Let the sampler be what it was."""
        if self._sampler is not None:
            self._sampler.__class__ = self._kind
            self._sampler = None

    @property
    def tells_places(self) -> bool:
        """Whether the places of samples in the data set are known."""
        return self._sampler is not None

    def note(self, batches: Iterable[Any]) -> Iterator[Any]:
        """A pass begins: note what is handed out in it."""
        issued = self._issued = deque[list[Any]]()
        self._taken = 0

        def passed_on() -> Iterator[Any]:
            for batch in batches:
                issued.append(list(batch) if isinstance(batch, (list, tuple)) else [batch])
                yield batch

        return passed_on()

    def next_places(self) -> Tensor | None:
        """The places of the samples of the next batch; loaders hand batches out in the order in which they asked."""
        places = self._issued.popleft() if self._issued else [None]
        self._taken += 1
        if not all(isinstance(place, Integral) for place in places):
            return None
        return torch.tensor(places, dtype=torch.int64)

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches of a pass were taken."""
        return isinstance(self._sampler, Sized) and self._taken == len(self._sampler)

    # --------------------------------------------------------------------------------------------------- what it owes

    @property
    def draws_again(self) -> bool:
        """Whether samples are drawn with replacement, so that any may come any number of times."""
        sampler = getattr(self._loader, "sampler", None)
        if isinstance(sampler, DistributedSamplerWrapper):
            sampler = sampler.dataset._sampler  # type: ignore[attr-defined]
        return isinstance(sampler, (RandomSampler, WeightedRandomSampler)) and sampler.replacement

    def coverage(self) -> tuple[int, int] | None:
        """Number of samples of which each should come once per epoch, and how many of them this rank may drop.

        None where the sampler promises no such thing.
        """
        loader = self._loader
        if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, Sized):
            return None
        batches = loader.batch_sampler
        kind = self._kind if loader.sampler is self._sampler else type(loader.sampler)
        if (batches is not None and not isinstance(batches, BatchSampler)) or not _takes_all(loader.sampler, kind):
            return None
        drops_batch = batches is not None and batches.drop_last
        drops_rest = bool(getattr(loader.sampler, "drop_last", False))
        size = getattr(batches, "batch_size", 1) or 1
        return len(loader.dataset), (size - 1 if drops_batch else 0) + (1 if drops_rest else 0)


def _takes_all(sampler: Any, kind: Any) -> bool:
    """Whether a sampler that was of `kind` takes each sample once."""
    if kind.__iter__ is DistributedSamplerWrapper.__iter__:
        return _takes_all(sampler.dataset._sampler, type(sampler.dataset._sampler))
    if kind.__iter__ is RandomSampler.__iter__:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return kind.__iter__ in (SequentialSampler.__iter__, DistributedSampler.__iter__)


class Reader:
    """What this rank has read since it told last.

    Args:
        loader: The training loader, if there is just one.
        replica: Whose part of the data is read.
        known_by: How all ranks tell samples apart.
        compares: Whether other ranks should read the same.

    Attributes:
        loader: As given; may be exchanged between two epochs.
    """

    def __init__(self, loader: Loader | None, replica: int, known_by: KnownBy, compares: bool) -> None:
        self.loader, self._replica, self._known_by, self._compares = loader, replica, known_by, compares
        self._steps: list[int] = []
        self._samples: list[Tensor] = []
        self._contents: list[Tensor] = []
        self._order: list[Tensor] = []
        self._has_gaps = False

    @property
    def batches(self) -> int:
        """How many were read."""
        return len(self._steps)

    @property
    def pending(self) -> Tensor:
        """Their samples."""
        return torch.cat([NOTHING, *(samples.cpu() for samples in self._samples)])

    def note(self, step: int, batch: Any) -> None:
        """Take notice of a batch."""
        self._steps.append(step)
        places = None if self.loader is None else self.loader.next_places()
        self._has_gaps |= places is None
        if places is not None:
            self._order.append(places)
        needs_hashes = self._compares or self._known_by == "content"
        hashes = sample_hashes(batch) if needs_hashes else None
        samples = places if self._known_by == "place" else hashes
        if self._known_by and samples is not None:
            self._samples.append(samples)
        if self._compares:
            self._contents.append(NOTHING if hashes is None else hashes)

    def take(self, epoch_is_over: bool = False) -> Reading:
        """Hand over what was read."""
        end = self._end() if epoch_is_over else None
        reading = Reading(self._replica, self._steps, self.pending, fingerprints(self._contents), end)
        self._steps, self._samples, self._contents = [], [], []
        return reading

    def _end(self) -> EpochEnd:
        places = torch.cat([NOTHING, *self._order])
        is_shuffled = len(places) >= MIN_ORDER and int((places.diff() < 0).sum()) > 1
        order = fingerprint(places) if is_shuffled and not self._has_gaps else None
        is_whole = self.loader is not None and self.loader.is_exhausted and not self._has_gaps
        owed = None if self.loader is None else self.loader.coverage()
        self._order, self._has_gaps = [], False
        return EpochEnd(is_whole, order, *((None, 0) if owed is None else owed))
