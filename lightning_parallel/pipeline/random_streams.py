"""Random numbers of a step in stages: seeds for each microbatch, and the generators that modules keep.

Every stage runs the user's step on every microbatch. A mask that the step draws before the layers must be the same on
all stages, so each microbatch has a seed, and so has what follows each call of a module before the layers, which draws
on the stage that has it and nowhere else. Each layer has a seed, too: wherever the stages are cut, which may be
elsewhere in the next run, it draws the same numbers.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = [
    "OwnGenerators",
    "call_seed",
    "layer_seed",
    "random_state_kept",
    "seed_all",
    "seed_torch",
    "seeded",
]


# 2^64 divided by the golden ratio, whose multiples are spread evenly over 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15
_PRIME = 0xC2B2AE3D27D4EB4F  # another odd number with bits as mixed, so that seeds of calls are not those of layers


def layer_seed(seed: int, layer: int) -> int:
    """Return another seed for each layer, by its number."""
    return (seed ^ (_GOLDEN * (layer + 1))) & (2**63 - 1)


def call_seed(seed: int, number: int) -> int:
    """Return another seed for what follows each call of a module outside of the layers; 0 is before the first."""
    return (seed ^ (_PRIME * number)) & (2**63 - 1)


def seed_torch(seed: int) -> None:
    """Seed torch's generators, those of CUDA if it is in use."""
    # `torch.manual_seed` takes a millisecond if CUDA is available but not initialized, and this runs for each action.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed every global generator."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global generators after the block. Takes as long as seeding ten times: not for every action."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    # Asking for the state would initialize CUDA, in a process that may compute on the CPU only.
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from `seed` inside the block, and restore the generators after it."""
    with random_state_kept():
        seed_all(seed)
        yield


_Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class OwnGenerators:
    """The generators that modules, or samplers, keep as attributes, besides the global ones.

    In a step each of them gives one number, from which it is seeded for each microbatch. So a microbatch draws the same
    numbers on all stages, however often each of them runs the step, and a generator that the user seeds still decides.

    Args:
        modules: Where to look.
    """

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        places = (vars(module).values() for module in modules if hasattr(module, "__dict__"))
        found = {id(value): value for values in places for value in _generators(values)}
        self._generators = list(found.values())
        self._seeds: list[int] = []

    @property
    def generators(self) -> list[_Generator]:
        """The generators, in the order in which they were found."""
        return list(self._generators)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Take a number from each, and restore its state after the block."""
        self._seeds = [_draw(generator) for generator in self._generators]
        states = [_state(generator) for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states):
                _restore(generator, state)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the state of each after the block."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)

    def states(self) -> list[bytes]:
        """Return the state of each, in a form that can be compared."""
        return [pickle.dumps(_state(generator)) for generator in self._generators]

    def restore(self, states: Sequence[bytes]) -> None:
        """Set the state of each to one that `states` gave."""
        for generator, state in zip(self._generators, states):
            _restore(generator, pickle.loads(state))

    def seed(self, key: int) -> None:
        """Seed each by its number and `key`."""
        for generator, seed in zip(self._generators, self._seeds):
            _seed(generator, (seed ^ key) & (2**63 - 1))


def _generators(values: Iterable[Any]) -> Iterator[_Generator]:
    """Find generators among attributes, and in lists, tuples and dicts among these."""
    for value in values:
        entries = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for entry in entries:
            if isinstance(entry, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
                yield entry


def _draw(generator: _Generator) -> int:
    if isinstance(generator, torch.Generator):
        # Its state is on the CPU; to read the number from a GPU would wait for all that was launched there before.
        state = generator.get_state().numpy().tobytes()
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
