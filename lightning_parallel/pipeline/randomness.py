"""Random numbers that all stages draw alike, and layers that draw each their own.

Every stage runs the user's step on every microbatch. A mask that the step draws before the layers must be the same on
all stages, so each microbatch has a seed; once a stage is entered it goes on from another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["mixed", "random_state_kept", "seed_all", "seed_torch", "seeded"]

_GOLDEN = 0x9E3779B97F4A7C15


def mixed(seed: int, stage: int) -> int:
    """Another seed for each stage."""
    return (seed ^ (_GOLDEN * stage)) & (2**63 - 1)


def seed_torch(seed: int) -> None:
    """As `torch.manual_seed`, which takes a millisecond where CUDA is there and was never used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed every global generator."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the global generators back to where they were. Costs as much as ten seeds do: not for every action."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from `seed` inside the block."""
    with random_state_kept():
        seed_all(seed)
        yield
