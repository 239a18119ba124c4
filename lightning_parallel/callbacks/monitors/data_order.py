"""The order of training samples: promises of a sampler, and an order that can resume within an epoch.

The user's samplers draw from generators whose state dies with the process, and know only their replica's part.
`ResumableSampler` takes the order of an epoch under generators seeded by (seed, epoch). This order is the same for any
number of replicas, which share it in the way of `DistributedSampler`. So a batch of all replicas together holds the
same samples for any number of replicas, and one number identifies the samples already read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_parallel.compat.chance import seeded
from lightning_parallel.compat.lightning import wrapped_sampler
from lightning_parallel.compat.twins import is_a, kinds_of
from lightning_parallel.pipeline.random_streams import OwnGenerators

__all__ = ["LoaderFacts", "ResumableBatches", "ResumableSampler"]

# Added to the seed in each further pass within an epoch, such as the repetition of a loader beside a longer loader.
_PASS = 1_000_003


class LoaderFacts(NamedTuple):
    """Promises of a loader's sampler on the samples of an epoch.

    Attributes:
        size: Number of samples, if each comes exactly once; None if the sampler does not promise that.
        shuffled: True if torch itself shuffles these samples by the seed; False for ascending order; None for any
            other order.
        replaced: Whether the sampler draws with replacement, so that each sample may come any number of times.
        divides: Whether the sampler gives each replica its part, so that equal indices are the same sample.
        may_drop: Number of samples that a rank may leave out.
    """

    size: int | None = None
    shuffled: bool | None = None
    replaced: bool = False
    divides: bool = False
    may_drop: int = 0

    @classmethod
    def of(cls, loader: object) -> LoaderFacts:
        """Return the promises of a loader's sampler; none for a loader of another class or an iterable data set."""
        # The sampler of an iterable data set gives no indices, so its class promises nothing.
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return cls()
        batches = loader.batch_sampler
        if isinstance(batches, ResumableBatches):
            batches = batches.source
        # With a batch sampler of the user, the loader has a default sampler that it does not use.
        inner: Any = getattr(batches, "sampler", None)
        facts = cls.of_sampler(inner if isinstance(inner, Sampler) else loader.sampler)
        facts = facts._replace(divides=facts.divides or hasattr(batches, "num_replicas"))
        if batches is not None and not isinstance(batches, BatchSampler):
            return facts._replace(size=None)
        if not getattr(batches, "drop_last", False):
            return facts
        batch_size = getattr(batches, "batch_size", 1) or 1
        return facts._replace(may_drop=facts.may_drop + batch_size - 1)

    @classmethod
    def of_sampler(cls, sampler: Any) -> LoaderFacts:
        """Return the promises of a sampler of samples.

        The comparison is by method, not by class: a subclass that inherits the method makes the same promise.
        """
        method = type(sampler).__iter__ if hasattr(type(sampler), "__iter__") else None
        drops = int(bool(getattr(sampler, "drop_last", False)))
        divides = hasattr(sampler, "num_replicas")
        if method is ResumableSampler.__iter__:
            source = cls.of_sampler(sampler.source)
            return source._replace(divides=source.divides or sampler.num_replicas > 1, may_drop=drops)
        if any(method is vars(wrapper)["__iter__"] for wrapper in kinds_of(DistributedSamplerWrapper)):
            return cls.of_sampler(wrapped_sampler(sampler))._replace(shuffled=None, divides=True, may_drop=drops)
        if is_a(sampler, DistributedSamplerWrapper):
            return cls(replaced=cls.of_sampler(wrapped_sampler(sampler)).replaced, divides=True)
        # With a subclass, or a generator with the user's seed, the order may differ from torch's order.
        if method is RandomSampler.__iter__ and not sampler.replacement and isinstance(sampler.data_source, Sized):
            size = len(sampler.data_source)
            is_plain = type(sampler) is RandomSampler and sampler.generator is None
            all_of_them = cls(size, True if is_plain else None, divides=divides)
            return all_of_them if sampler.num_samples == size else cls(divides=divides)
        if method is SequentialSampler.__iter__ and isinstance(sampler.data_source, Sized):
            is_plain = type(sampler) is SequentialSampler
            return cls(len(sampler.data_source), False if is_plain else None, divides=divides)
        if method is DistributedSampler.__iter__ and isinstance(sampler.dataset, Sized):
            shuffled = bool(sampler.shuffle) if type(sampler) is DistributedSampler else None
            return cls(len(sampler.dataset), shuffled, divides=divides, may_drop=drops)
        replaced = isinstance(sampler, (RandomSampler, WeightedRandomSampler)) and sampler.replacement
        return cls(replaced=replaced, divides=divides)


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
        # The state from the user's script: a restarted script creates the generators in the same state.
        self._initial = self._own.states()

    def __call__(self, epoch: int, repetition: int) -> list[Any]:
        # The first pass has the seed of `DistributedSampler`: seed + epoch.
        key = self.seed + epoch + repetition * _PASS
        source = self.source
        facts = LoaderFacts.of_sampler(source)
        if facts.shuffled is not None and facts.size is not None:
            if not facts.shuffled:
                return list(range(facts.size))
            # Shuffle like `DistributedSampler`, which Lightning uses for several replicas.
            return torch.randperm(facts.size, generator=torch.Generator().manual_seed(key)).tolist()
        for sampler in (source, getattr(source, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        # A restarted script creates these generators in their initial state, so each epoch begins and ends there.
        self._own.restore(self._initial)
        with seeded(key), self._own.kept():
            self._own.seed(key)
            found = list(source)
        self._own.restore(self._initial)
        return found


def _digest(order: list[Any]) -> str:
    try:
        data = numpy.asarray(order, dtype=numpy.int64).tobytes()
    except (TypeError, ValueError):  # indices are no numbers, or batches differ in size
        data = repr(order).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class ResumableSampler(Sampler[Any]):
    """Gives a replica its part of an order that does not depend on the number of replicas.

    Args:
        source: The user's sampler, of all samples.
        seed: Seed of the run.
        num_replicas: Number of replicas that share the samples.
        rank: Position of this replica.
        drop_last: Leave out samples at the end instead of repeating some, so that all replicas get equally many.
    """

    def __init__(self, source: Any, seed: int, num_replicas: int = 1, rank: int = 0, drop_last: bool = False) -> None:
        self.source = source
        # `DistributedSampler` orders by its own seed, which the user may have chosen.
        self.seed = source.seed if type(source) is DistributedSampler else seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        self.epoch = 0
        self._seeded = _SeededOrder(source, self.seed)
        self._known: tuple[tuple[int, int], list[Any]] | None = None
        self.begin(0)

    def begin(self, epoch: int, skipped: int = 0, repetition: int = 0) -> None:
        """Begin an epoch after its first `skipped` samples; they count over all replicas together."""
        self.epoch = epoch
        self._skipped = skipped
        self._repetition = repetition

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, unless it runs already."""
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
        """Identifies the order of the samples."""
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
            # Like `DistributedSampler`, fill up with the first samples, so that all replicas take equally many steps.
            missing = self.num_replicas - surplus
            rest += (order * (missing // len(order) + 1))[:missing]
        self._skipped = 0
        # Interleaved: a batch of all replicas together holds neighbours of the order, for any number of replicas.
        yield from rest[self.rank :: self.num_replicas]
        # Count only a finished pass: after a dropped iterator, the next iterator repeats the same pass.
        self._repetition += 1


class ResumableBatches:
    """Replaces the user's batch sampler; can skip the first batches of an epoch without reading them.

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
        """Identifies the order of the batches; empty if their number is unknown."""
        order = self._order()
        return "" if order is None else _digest(order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` asks before `source` exists
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        skipped, self._skipped = self._skipped, 0
        return islice(self.source if order is None else order, skipped, None)
