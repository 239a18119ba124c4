"""Random numbers that depend on what they are for, and on nothing else."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["generator"]


def generator(device: torch.device, *purpose: object) -> torch.Generator:
    """A generator seeded by `purpose` (seed, step, parameter name, ...): equal wherever and whenever it is asked for.

    The global generators are not touched, and nothing needs to be saved but the step.
    """
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
