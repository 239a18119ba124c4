"""Random numbers of a step in stages: seeds for each microbatch, and the generators that modules keep.

Every stage runs the user's step on every microbatch. A mask that the step draws before the layers must be the same on
all stages, so each microbatch has a seed. A module before the layers draws on its own stage only, so the code after
each call of such a module has a seed, too. Each layer has a seed: it draws the same numbers wherever the model is
split.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_parallel.compat.torch import TorchDispatchMode

__all__ = [
    "DrawRecorder",
    "OwnGenerators",
    "RecordedDraws",
    "ReplayedDraws",
    "call_seed",
    "layer_seed",
    "layer_seeds",
]


# 2^64 divided by the golden ratio, whose multiples are spread evenly over 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15
_PRIME = 0xC2B2AE3D27D4EB4F  # another odd number with well-mixed bits, so that seeds of calls and layers differ


def layer_seed(seed: int, layer: int) -> int:
    """Return another seed for each layer, by its number."""
    # 63 bits: a seed must be a positive number that fits into a signed integer.
    return (seed ^ (_GOLDEN * (layer + 1))) & (2**63 - 1)


def layer_seeds(seed: int, count: int) -> list[int]:
    """Return `layer_seed` of each of the first layers."""
    seed &= 2**63 - 1
    return [seed ^ key for key in _layer_keys(count)]


@lru_cache
def _layer_keys(count: int) -> tuple[int, ...]:
    return tuple([layer_seed(0, layer) for layer in range(count)])


def call_seed(seed: int, number: int) -> int:
    """Return a seed for the code after each call of a module outside the layers; 0 is before the first call."""
    return (seed ^ (_PRIME * number)) & (2**63 - 1)


_Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class OwnGenerators:
    """The generators that modules, or samplers, keep as attributes.

    At each step a generator gives one number, which seeds it for each microbatch. So a microbatch draws the same
    numbers on all stages, however often a stage runs the step, and the user's seed still decides.

    Args:
        modules: The objects whose attributes are searched.
    """

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        places = (vars(module).values() for module in modules if hasattr(module, "__dict__"))
        # By `id`: modules may share a generator, which gives one number for all of them.
        found = {id(value): value for values in places for value in _generators(values)}
        self._generators = list(found.values())
        self._seeds: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._generators)

    @property
    def generators(self) -> list[_Generator]:
        """The generators, in the order in which they were found."""
        return list(self._generators)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Take a number from each generator, and restore its state after the block."""
        # Before the states are read: so the next step gets another number.
        self._seeds = [_draw(generator) for generator in self._generators]
        states = [_state(generator) for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states):
                _restore(generator, state)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the state of each generator after the block."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)

    def states(self) -> list[bytes]:
        """Return the state of each generator, in a form that can be compared between processes."""
        states = (_state(generator) for generator in self._generators)
        # A pickled tensor contains an address, so pickle the bytes.
        return [pickle.dumps(state.numpy().tobytes() if isinstance(state, Tensor) else state) for state in states]

    def restore(self, states: Sequence[bytes]) -> None:
        """Set the state of each generator to its entry of `states`."""
        for generator, data in zip(self._generators, states):
            state = pickle.loads(data)
            is_torchs = isinstance(generator, torch.Generator)
            _restore(generator, torch.frombuffer(bytearray(state), dtype=torch.uint8) if is_torchs else state)

    def seed(self, key: int) -> None:
        """Seed each generator by its number and `key`."""
        for generator, seed in zip(self._generators, self._seeds):
            _seed(generator, (seed ^ key) & (2**63 - 1))


def _generators(values: Iterable[Any]) -> Iterator[_Generator]:
    """Find generators among attributes, and in the lists, tuples and dicts among them."""
    for value in values:
        entries = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for entry in entries:
            kind: Any = type(entry)
            if _is_generator(kind):
                yield entry


# Asked for every attribute of a model, whenever a step runs; `torch.Generator` has a slow `__instancecheck__`.
@lru_cache(maxsize=1024)
def _is_generator(kind: type) -> bool:
    return issubclass(kind, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def _draw(generator: _Generator) -> int:
    if isinstance(generator, torch.Generator):
        # Its state is on the CPU; reading a drawn number from a GPU would wait for all kernels launched before.
        state = generator.get_state().numpy().tobytes()
        # Reading the state does not advance the generator. This draw does, so that the next step has another seed.
        torch.rand((), generator=generator, device=generator.device)
        return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 2
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(2**62))
    if isinstance(generator, np.random.RandomState):
        return int(generator.randint(2**62, dtype=np.int64))
    return generator.getrandbits(62)


def _seed(generator: _Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        # numpy's generator has no `seed`: it takes over the state of a new one.
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


def _state(generator: _Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _restore(generator: _Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


# ------------------------------------------------------------------------------------------------------ pinned draws


_DRAWN = (
    "_sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy cauchy_ exponential exponential_ geometric "
    "geometric_ log_normal log_normal_ multinomial normal normal_ poisson rand rand_like randint randint_like randn "
    "randn_like random random_ randperm uniform uniform_"
)
_DRAWING = frozenset(f"aten::{name}" for name in _DRAWN.split())
"""Operators of torch whose result is drawn; operators that also compute, such as dropout, are not among them."""

_MOST_BYTES = 64 << 20


@dataclass
class RecordedDraws:
    """The random numbers of a step on all its samples.

    Attributes:
        values: By stream and number of the draw: the numbers, and the range of a draw of integers.
        is_complete: Whether all draws were recorded.
    """

    values: dict[tuple[str, int], tuple[Tensor, tuple[Any, ...]]] = field(default_factory=dict)
    is_complete: bool = True

    def shapes(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Return the shape of each draw."""
        return {key: tuple(value.shape) for key, (value, _) in self.values.items()}

    def counts(self) -> dict[str, int]:
        """Return how many draws there were in each stream."""
        found: dict[str, int] = {}
        for stream, number in self.values:
            found[stream] = max(found.get(stream, 0), number + 1)
        return found


class _Draws(TorchDispatchMode):
    """Sees draws while it is entered, from the generators in the state that `enter` found, or from a module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter("")

    def enter(self, stream: str, microbatch: int = 0) -> None:
        """Count the draws that follow in `stream`, which has just been seeded."""
        self.stream = stream
        self.number = 0
        self.microbatch = microbatch
        self.seeds = _seeds()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "name") or func.name().partition(".")[0] not in _DRAWING:
            return func(*args, **kwargs)
        # A draw from a separate stream, as inside sharded layers, does not belong to the step's streams.
        is_ours = kwargs.get("generator") is not torch.default_generator and _seeds() == self.seeds
        before = self.state(kwargs.get("generator")) if is_ours else ""
        value = func(*args, **kwargs)
        # Not on the meta device: modules of other stages are run there for the shapes of their outputs.
        # Tensors of other classes, such as placeholders, hold no numbers.
        if isinstance(value, Tensor) and type(value).__module__.startswith("torch") and not value.is_meta:
            if is_ours:
                self.drawn(value, _among(func.name(), args, kwargs), before)
            else:
                self.drawn_apart()
        elif is_ours and self.state(kwargs.get("generator")) != before:
            self.passed_over()  # a placeholder draws only to advance the generator; its numbers are not used
        return value

    def state(self, generator: torch.Generator | None) -> str:
        """Return a key of a draw, the same when the draw is made again; empty if no key is needed."""
        return ""

    def drawn(self, value: Tensor, among: tuple[Any, ...], before: str) -> None:
        """Take note of a draw."""
        raise NotImplementedError

    def drawn_apart(self) -> None:
        """Take note of a draw from another stream."""

    def passed_over(self) -> None:
        """Take note of a draw on the meta device, which has no values."""
        self.number += 1


def _seeds() -> tuple[int, int]:
    # The seed tells which stream it is, however many numbers were drawn from it.
    return torch.initial_seed(), torch.cuda.initial_seed() if torch.cuda.is_initialized() else 0


def _among(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the range of a draw of integers."""
    if name.startswith(("aten::randint", "aten::random", "aten::randperm")):
        return tuple(value for value in (*args, *kwargs.values()) if type(value) is int)
    return (args[0].shape[-1],) if name.startswith("aten::multinomial") else ()


class DrawRecorder(_Draws):
    """Records the random numbers of a step on all samples.

    Attributes:
        found: The numbers.
    """

    def __init__(self) -> None:
        self.found = RecordedDraws()
        self._bytes = 0
        super().__init__()

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that is recorded."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return step(*args, **kwargs)

        return recorded

    def drawn(self, value: Tensor, among: tuple[Any, ...], before: str) -> None:
        """Keep a copy."""
        self._bytes += value.nbytes
        if self._bytes > _MOST_BYTES:
            self.found.is_complete = False
        else:
            # `clone`, because `cpu` copies nothing on the CPU, and the step may write into its tensor.
            self.found.values[self.stream, self.number] = (value.detach().cpu().clone(), among)
        self.number += 1

    def drawn_apart(self) -> None:
        """Note that a draw cannot be repeated for a part of the samples."""
        self.found.is_complete = False


class ReplayedDraws(_Draws):
    """Gives each microbatch its rows of the random numbers of a step on all samples.

    Args:
        recorded: The numbers.
        sizes: The number of samples in each microbatch; empty if the samples cannot be counted.
        by_views: The order of several rows per sample. True: all samples of a view follow each other, as in two
            concatenated views. False: all rows of a sample follow each other.

    Attributes:
        missed: Whether a draw could not be given.
        has_views: Whether a draw had several rows per sample.
    """

    def __init__(self, recorded: RecordedDraws, sizes: Sequence[int], by_views: bool = False) -> None:
        self._recorded = recorded
        self._sizes = sizes
        self._by_views = by_views
        self._starts = list(accumulate(sizes, initial=0))
        self._given: dict[Any, Tensor] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._is_backward = False
        self.missed = not recorded.is_complete
        self.has_views = False
        # Last, because it calls `enter`.
        super().__init__()

    def enter(self, stream: str, microbatch: int = 0) -> None:
        """Count the next draws in `stream`, which has just been seeded, as draws of a microbatch."""
        super().enter(stream, microbatch)
        self._is_backward = False

    def enter_backward(self, microbatch: int) -> None:
        """Give draws of recomputed layers the same numbers as in the forward pass."""
        self.microbatch = microbatch
        self._is_backward = True
        self.seeds = _seeds()

    def counts(self) -> dict[tuple[str, int], int]:
        """Return how many draws there were, by stream and microbatch."""
        return dict(self._counts)

    def state(self, generator: torch.Generator | None) -> str:
        """Return the generator state before a draw: a recomputation begins with the same state."""
        states = [torch.get_rng_state() if generator is None else generator.get_state()]
        if generator is None and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())
        return hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states), digest_size=8).hexdigest()

    def drawn(self, value: Tensor, among: tuple[Any, ...], before: str) -> None:
        """Replace a draw by the rows of the draw in the same place of the step on all samples."""
        # Backward recomputes layers in another order than forward. Only the state before a draw tells which draw it is.
        again = (self.microbatch, before, value.shape, value.dtype)
        if self._is_backward:
            rows = self._given.get(again)
        else:
            recorded = self._recorded.values.get((self.stream, self.number))
            rows = None if recorded is None or recorded[1] != among else self._rows(recorded[0], value)
            self.number += 1
            self._counts[self.stream, self.microbatch] = self.number
        if rows is None:
            self.missed = True
            return
        self._given[again] = rows
        value.copy_(rows)

    def drawn_apart(self) -> None:
        """Note that a draw has no counterpart in the step on all samples."""
        self.missed = True

    def _rows(self, whole: Tensor, value: Tensor) -> Tensor | None:
        if whole.shape == value.shape:
            return whole  # one draw for all samples
        # Exactly one dimension may differ: the dimension of the samples.
        other = [dim for dim, size in enumerate(value.shape) if dim < whole.dim() and whole.shape[dim] != size]
        if whole.dim() != value.dim() or len(other) != 1 or not self._sizes:
            return None
        dim, size, samples = other[0], self._sizes[self.microbatch], self._starts[-1]
        views, rest = divmod(value.shape[dim], size)
        if rest or whole.shape[dim] != views * samples:
            return None
        start = self._starts[self.microbatch]
        self.has_views |= views > 1
        if views == 1 or not self._by_views:
            return whole.narrow(dim, start * views, size * views)
        index = torch.cat([torch.arange(start, start + size) + view * samples for view in range(views)])
        return whole.index_select(dim, index)
