"""The order of training samples as a function of seed and epoch, so that an epoch can go on in its middle.

The samplers of a run draw from generators whose state is lost with the process, and know only their own replica's
part. Here the order of an epoch is taken under generators seeded by (seed, epoch), is the same for any number of
replicas, and is divided among them as `DistributedSampler` does: a batch of all replicas together holds the same
samples however many they are. What was read is then told by one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_parallel.pipeline.random_streams import OwnGenerators, seeded

__all__ = ["LoaderKind", "ResumableBatches", "ResumableSampler", "TrainingData", "TrainingLoader"]

# Further passes over a loader within one epoch, as where it is cycled through beside a longer one.
_PASS = 1_000_003


class _SeededOrder:
    """Takes the order of an epoch from the user's sampler, under generators seeded by seed, epoch and pass.

    Args:
        source: A sampler of samples or of batches.
        seed: Seed of the run.
    """

    def __init__(self, source: Any, seed: int) -> None:
        self.source = source
        self.seed = seed
        self._own = OwnGenerators([source, getattr(source, "sampler", None)])
        # As the user's script has made them: it makes them again when it starts again.
        self._initial = self._own.states()

    def __call__(self, epoch: int, repetition: int) -> list[Any]:
        key = self.seed + epoch + repetition * _PASS
        source = self.source
        size = _shuffled_size(source)
        if size is not None:
            # As `DistributedSampler` does, which Lightning takes for several replicas.
            return torch.randperm(size, generator=torch.Generator().manual_seed(key)).tolist()
        if type(source) in (SequentialSampler, DistributedSampler):
            return list(range(len(source.data_source if type(source) is SequentialSampler else source.dataset)))
        for sampler in (source, getattr(source, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        self._own.restore(self._initial)
        with seeded(key), self._own.kept():
            self._own.seed(key)
            found = list(source)
        self._own.restore(self._initial)
        return found


def _shuffled_size(sampler: Any) -> int | None:
    """Return the number of samples that a sampler shuffles, each once; None if it does something else."""
    if type(sampler) is DistributedSampler and sampler.shuffle:
        return len(sampler.dataset)  # type: ignore[arg-type]
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None:
        size = len(sampler.data_source)
        return size if sampler.num_samples == size else None
    return None


def _digest(order: list[Any]) -> str:
    try:
        data = numpy.asarray(order, dtype=numpy.int64).tobytes()
    except (TypeError, ValueError):  # indices that are no numbers, or batches of several sizes
        data = repr(order).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class ResumableSampler(Sampler[Any]):
    """Gives a replica its part of an order that does not depend on the number of replicas.

    Args:
        source: The user's sampler, of all samples.
        seed: Seed of the run.
        num_replicas: How many replicas share the samples.
        rank: Which of them this is.
        drop_last: Leave out samples at the end rather than repeat some, so that all replicas get as many.
    """

    def __init__(self, source: Any, seed: int, num_replicas: int = 1, rank: int = 0, drop_last: bool = False) -> None:
        self.source = source
        self.seed = source.seed if type(source) is DistributedSampler else seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        self.epoch = 0
        self._seeded = _SeededOrder(source, self.seed)
        self._known: tuple[tuple[int, int], list[Any]] | None = None
        self.begin(0)

    def begin(self, epoch: int, skipped: int = 0, repetition: int = 0) -> None:
        """Begin an epoch after its first `skipped` samples, of all replicas together."""
        self.epoch = epoch
        self._skipped = skipped
        self._repetition = repetition

    def set_epoch(self, epoch: int) -> None:
        """Take note of the epoch; of one that has begun nothing is read again."""
        if epoch != self.epoch:
            self.begin(epoch)

    def order(self) -> list[Any]:
        """Return the samples of all replicas in this pass over the epoch."""
        key = self.epoch, self._repetition
        if self._known is None or self._known[0] != key:
            self._known = key, self._seeded(*key)
        return self._known[1]

    @property
    def digest(self) -> str:
        """Tells orders apart."""
        return _digest(self.order())

    def __len__(self) -> int:
        source: Any = self.source
        data: Any = source.dataset if type(source) is DistributedSampler else source
        size = len(data)
        return size // self.num_replicas if self.drop_last else -(-size // self.num_replicas)

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        rest = order[self._skipped :]
        surplus = len(rest) % self.num_replicas
        if surplus and self.drop_last:
            del rest[-surplus:]
        elif surplus:
            missing = self.num_replicas - surplus
            rest += (order * (missing // len(order) + 1))[:missing]
        self._skipped = 0
        yield from rest[self.rank :: self.num_replicas]
        self._repetition += 1


class ResumableBatches:
    """Stands in for the user's batch sampler; can leave out the first batches of an epoch without reading them.

    Args:
        source: The user's batch sampler.
        seed: Seed of the run.
    """

    def __init__(self, source: Any, seed: int) -> None:
        self.source = source
        self._seeded = _SeededOrder(source, seed)
        self._known: tuple[int, list[Any]] | None = None
        self.begin(0)

    def begin(self, epoch: int, skipped: int = 0) -> None:
        """Begin an epoch after its first `skipped` batches."""
        self.epoch = epoch
        self._skipped = skipped

    def _order(self) -> list[Any] | None:
        if not hasattr(self.source, "__len__"):
            return None  # it may have no end
        if self._known is None or self._known[0] != self.epoch:
            self._known = self.epoch, self._seeded(self.epoch, 0)
        return self._known[1]

    @property
    def digest(self) -> str:
        """Tells orders apart, where the end is known."""
        order = self._order()
        return "" if order is None else _digest(order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by `copy`, before there is a source
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        skipped, self._skipped = self._skipped, 0
        return islice(self.source if order is None else order, skipped, None)


LoaderKind = Literal["samples", "local", "batches", "read", "stateful"]
"""How a loader goes on: by samples of all replicas, by those of its own, by batches, by reading again, by itself."""


@dataclass
class TrainingLoader:
    """A training loader, and what decides its order."""

    loader: Any
    kind: LoaderKind
    order: ResumableSampler | ResumableBatches | None
    undo: Callable[[], None]

    @property
    def batch_size(self) -> int:
        """Samples of a batch; 1 where batches are made by a batch sampler of the user's, or elsewhere."""
        return getattr(self.loader, "batch_size", None) or 1

    @property
    def num_replicas(self) -> int:
        """Replicas among which its samples are divided."""
        return self.order.num_replicas if isinstance(self.order, ResumableSampler) else 1

    @property
    def digest(self) -> str:
        """Tells orders apart, where the order is known."""
        return "" if self.order is None else self.order.digest


class TrainingData:
    """The training loaders of a run, with samplers of this module in place of the user's.

    Args:
        seed: Seed of the run, equal on all ranks.
        replicas: How many replicas there are, and which of them this is.
    """

    def __init__(self, seed: int, replicas: tuple[int, int]) -> None:
        self.seed = seed
        self.num_replicas, self.replica = replicas
        self.loaders: list[TrainingLoader] = []

    def add(self, loader: Any, divides: bool, default: Callable[[], Any]) -> TrainingLoader:
        """Give a loader a sampler that can go on within an epoch.

        Args:
            loader: The user's loader.
            divides: Whether its samples are to be divided among the replicas.
            default: Prepares it as Lightning does.
        """
        known = next((added for added in self.loaders if added.loader is loader), None)
        if known is not None:
            return known  # it was asked for anew, for another epoch
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            added = TrainingLoader(default(), "stateful", None, _nothing)
        elif not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            added = TrainingLoader(default(), "read", None, _nothing)
        elif type(loader.batch_sampler) not in (BatchSampler, type(None)):
            loader = default()
            added = self._replace(loader, "batches", ResumableBatches(loader.batch_sampler, self.seed))
        else:
            added = self._by_samples(loader, divides, default)
        self.loaders.append(added)
        return added

    def _by_samples(self, loader: DataLoader, divides: bool, default: Callable[[], Any]) -> TrainingLoader:
        source: Any = loader.sampler
        if type(source) is DistributedSampler:
            order = ResumableSampler(source, self.seed, source.num_replicas, source.rank, source.drop_last)
            return self._replace(loader, "samples", order)
        if not hasattr(source, "__len__"):
            return TrainingLoader(default(), "read", None, _nothing)
        if isinstance(source, DistributedSampler) or (self.num_replicas > 1 and not divides):
            return self._replace(loader, "local", ResumableSampler(source, self.seed))
        place = (self.num_replicas, self.replica) if divides else (1, 0)
        return self._replace(loader, "samples", ResumableSampler(source, self.seed, *place))

    def _replace(self, loader: Any, kind: LoaderKind, order: ResumableSampler | ResumableBatches) -> TrainingLoader:
        # In the loader itself: to build another one of a class of the user's may fail. It forbids to set these.
        own, name = vars(loader), "batch_sampler" if kind == "batches" else "sampler"
        before, batches = own[name], None if kind == "batches" else own.get("batch_sampler")
        own[name] = order
        if batches is not None:
            batches.sampler = order

        def undo() -> None:
            own[name] = before
            if batches is not None:
                batches.sampler = before

        return TrainingLoader(loader, kind, order, undo)

    def begin_epoch(self, epoch: int, loaders: list[Any]) -> None:
        """Begin an epoch at its first batch, in the loaders that are in use; the others are let go."""
        in_use = {id(loader) for loader in loaders}
        for loader in [added for added in self.loaders if id(added.loader) not in in_use]:
            self.loaders.remove(loader)
            loader.undo()
        for loader in self.loaders:
            if loader.order is not None and loader.order.epoch != epoch:
                loader.order.begin(epoch)

    def of(self, loaders: list[Any]) -> list[TrainingLoader]:
        """Return what was added for the loaders that are in use."""
        known = {id(added.loader): added for added in self.loaders}
        return [known.get(id(loader)) or TrainingLoader(loader, "read", None, _nothing) for loader in loaders]

    def release(self) -> None:
        """Give all loaders their own samplers again."""
        while self.loaders:
            self.loaders.pop().undo()


def _nothing() -> None:
    pass
