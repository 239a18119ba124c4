"""Random numbers: the same on all stages before the layers, different ones in the layers of each stage.

Every stage runs the user's step on every microbatch. A mask that the step draws before the layers must be the same on
all stages, so each microbatch has a seed; from the first layer of a stage on, numbers come from the stage's own seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["mixed", "random_state_kept", "seed_all", "seed_torch", "seeded"]

# 2^64 divided by the golden ratio, whose multiples are spread evenly over 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15


def mixed(seed: int, stage: int) -> int:
    """Return another seed for each stage."""
    return (seed ^ (_GOLDEN * stage)) & (2**63 - 1)


def seed_torch(seed: int) -> None:
    """Seed torch's generators, those of CUDA if it is in use.

    `torch.manual_seed` takes a millisecond if CUDA is available but not initialized, and this runs for each action.
    """
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
