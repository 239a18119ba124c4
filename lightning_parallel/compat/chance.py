"""The global random generators of torch, Python and numpy: seeded together, and kept."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_parallel.compat.torch import seed_torch

__all__ = ["random_state_kept", "seed_all", "seed_nth", "seeded"]


def seed_all(seed: int) -> None:
    """Seed every global generator."""
    seed_nth((seed,), 0)


# Called for each layer and each stub of a pipeline, so it calls C functions only: `random.seed` is Python.
_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _PYTHON).seed


def seed_nth(seeds: Sequence[int], index: int) -> None:
    """Seed every global generator by an entry of `seeds`."""
    seed = seeds[index]
    torch.default_generator.manual_seed(seed)
    if torch.cuda._initialized:
        seed_torch(seed)
    _seed_python(seed)
    _PYTHON.gauss_next = None
    np.random.seed(seed % 2**32)  # numpy takes 32 bits


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global generators after the block. The block costs as much as ten seedings: keep it off hot paths."""
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
