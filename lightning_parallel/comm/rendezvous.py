"""The rendezvous of the processes of one attempt, in a store that earlier attempts may have used.

After the death of a process, a launcher such as torchrun starts all processes again with the same store. In this store
gloo would find the addresses of dead processes. So each attempt keeps its keys under its own prefix. Its processes
agree on the prefix in the same store, and must not mistake the keys of dead processes for answers.

    hello/r = nonce              each rank announces itself by a number that is new
    welcome/r = nonce prefix     the first rank answers each number that it has not answered yet
    <prefix>/joined/r            the rank has read the answer to its own number
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

__all__ = ["RendezvousError", "attempt_store", "may_outlive_attempts"]

_LOOK_S = 0.02
"""Seconds between two looks of a waiting rank into the store, for up to `_FEW` ranks."""
_FEW = 64


class RendezvousError(RuntimeError):
    """Reports processes that did not start in time.

    The strategy raises the error when training begins, after its `timeout`. The error names the missing ranks.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import RendezvousError, TensorParallelStrategy

        trainer = Trainer(devices=2, strategy=TensorParallelStrategy())
        try:
            trainer.fit(MyModule(), MyData())
        except RendezvousError as error:
            print(error)  # names the missing ranks
            raise
        ```
    """


def may_outlive_attempts() -> bool:
    """Tell whether the processes use the launcher's store, instead of a store that the first process makes."""
    return dist.is_torchelastic_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the part of `store` that belongs to these processes alone; each of them must call it.

    Args:
        store: A store that processes of earlier attempts may have used.
        rank: Rank of this process.
        world_size: Number of processes.
        timeout: How long to wait for the other processes.

    Raises:
        RendezvousError: If a process does not come, with its rank.
    """
    # The part of the store that all attempts share.
    hall = dist.PrefixStore("lightning_parallel/rendezvous", store)
    end_s = time.monotonic() + timeout.total_seconds()
    prefix = _welcome(hall, world_size, end_s) if rank == 0 else _enter(hall, rank, world_size, end_s)
    return dist.PrefixStore(f"lightning_parallel/attempt/{prefix}", store)


def _welcome(hall: dist.Store, world_size: int, end_s: float) -> str:
    """Answer the ranks until all have joined; the store may still hold the hellos of dead processes."""
    prefix = uuid4().hex
    missing = list(range(1, world_size))
    answered: dict[int, str] = {}
    # `joined` stands under the new prefix, so no dead process can have set it.
    while missing := [rank for rank in missing if not hall.check([f"{prefix}/joined/{rank}"])]:
        for rank in missing:
            nonce = _read(hall, f"hello/{rank}")
            # The first nonce may be a dead process's. A new nonce of the rank needs a new answer.
            if nonce and answered.get(rank) != nonce:
                hall.set(f"welcome/{rank}", f"{nonce} {prefix}")
                answered[rank] = nonce
        if time.monotonic() > end_s:
            listed = ", ".join(map(str, missing))
            raise RendezvousError(
                f"All {world_size} processes must start within `timeout` of the strategy; rank {listed} did not. Check"
                " that all hosts run, with the same MASTER_ADDR and MASTER_PORT. Raise `timeout` if they start slowly"
                " [LP001]"
            )
        time.sleep(_LOOK_S)
    return prefix


def _enter(hall: dist.Store, rank: int, world_size: int, end_s: float) -> str:
    nonce = uuid4().hex
    hall.set(f"hello/{rank}", nonce)
    while True:
        answered, _, prefix = _read(hall, f"welcome/{rank}").partition(" ")
        # Any other nonce is the answer to a dead process of this rank.
        if answered == nonce:
            hall.set(f"{prefix}/joined/{rank}", "")
            return prefix
        if time.monotonic() > end_s:
            raise RendezvousError(
                f"Rank 0 must start within `timeout` of the strategy; it did not answer rank {rank}. Check that"
                " its process runs [LP001]"
            )
        # More ranks look less often: one process answers all of them, and the first rank, which they wait for.
        time.sleep(_LOOK_S * max(1.0, world_size / _FEW))


def _read(store: dist.Store, key: str) -> str:
    # Without the check, `get` would wait for the key until the store's timeout.
    return store.get(key).decode() if store.check([key]) else ""
