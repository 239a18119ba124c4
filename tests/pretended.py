"""One process as one rank of many: the groups are real among the processes that exist, and pretended otherwise.

    with pretended_world(mesh, rank=1000):              # alone: all other ranks are pretended
        ...
    with pretended_world(mesh, real=[3, 19], index=i, store=store):     # process i of two plays `real[i]`
        ...

A pretended rank gives what the real rank of its pipeline stage gives. So schedules, messages between stages, tables and
numbers of calls are those of all ranks; the values are those of a run whose replicas and shards are copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.comm import Group
from lightning_parallel.comm.presence import RollCall
from lightning_parallel.compat import Patches
from lightning_parallel.mesh import PIPELINE, Mesh
from tests.lockstep import EmulatedGroup, Finished, Results, write

__all__ = ["pretended_world"]

TIMEOUT = timedelta(seconds=60)


class _World:
    """The ranks that processes play, and the rank that each other rank copies."""

    def __init__(self, mesh: Mesh, real: Sequence[int]) -> None:
        stages = {getattr(mesh.coordinate(rank), PIPELINE): rank for rank in real}
        self.real = set(real)
        # Alone, a process stands for all stages.
        self.copied = [stages.get(getattr(mesh.coordinate(rank), PIPELINE), real[0]) for rank in range(mesh.world_size)]


_worlds: list[_World] = []


class _Pretended(EmulatedGroup):
    """A group with members that do not exist."""

    def __init__(self, place: int, members: Sequence[int], store: dist.Store, name: str) -> None:
        super().__init__(place, members)
        world, self.name = _worlds[-1], name
        real = [rank for rank in members if rank in world.real]
        # For each member, the one that exists and gives its tensors.
        copied = [world.copied[rank] for rank in members]
        self._sources = [real.index(rank if rank in real else members[place]) for rank in copied]
        self._between = None
        if len(real) > 1:
            self._between = dist.ProcessGroupGloo(store, real.index(members[place]), len(real), timeout=TIMEOUT)
        self._letters: dict[int, list[Tensor]] = defaultdict(list)

    def getBackendName(self) -> str:
        return "pretended"

    @property
    def group_name(self) -> str:
        return self.name

    def exchanged(self, op: str, like: Any, given: list[Tensor], into: list[Tensor], results: Results) -> dist.Work:
        with torch.no_grad():
            everyone = [given] if self._between is None else self._gathered(given)
            found = results([everyone[source] for source in self._sources])(self.place)
            for tensor, value in zip(into, found):
                # The part of a copied rank may have another size.
                write([tensor], [value if value.numel() == tensor.numel() else torch.zeros_like(tensor)])
        return Finished()

    def _gathered(self, given: list[Tensor]) -> list[list[Tensor]]:
        assert self._between is not None
        columns = []
        for tensor in given:
            # As bytes: gloo knows few dtypes.
            mine = tensor.contiguous().view(-1).view(torch.uint8)
            rows = [torch.empty_like(mine) for _ in range(self._between.size())]
            self._between.allgather([rows], [mine]).wait()
            columns.append([row.view(tensor.dtype).view(tensor.shape) for row in rows])
        return [list(row) for row in zip(*columns)] or [[]] * self._between.size()

    def barrier(self, opts: Any = None) -> dist.Work:
        if self._between is not None:
            self._between.barrier().wait()
        return Finished()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        self._letters[tag].append(tensors[0].detach().clone())
        return Finished()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive what this rank sends: the other ranks of the group are its copies."""

        def finish() -> None:
            letters = self._letters[tag]
            if letters and letters[0].numel() == tensors[0].numel():
                write(tensors, [letters.pop(0)])
            else:
                tensors[0].detach().zero_()

        return Finished(finish)


def _from_one_that_exists(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Let a rank keep its own objects where they would come from a rank that does not exist."""

    @wraps(broadcast)
    def call(objects: list[Any], source: int, group: Any = None, **kwargs: Any) -> Any:
        world = _worlds[-1]
        if not isinstance(group, _Pretended) or source in world.real:
            return broadcast(objects, source, group=group, **kwargs)
        return None

    return call


def _of_those_that_exist(meet: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Let a roll call wait for the ranks that exist."""

    @wraps(meet)
    def call(self: RollCall, *args: Any, **kwargs: Any) -> list[str]:
        world, everyone = _worlds[-1], self._ranks
        self._ranks = tuple(rank for rank in everyone if rank in world.real)
        try:
            notes = dict(zip(self._ranks, meet(self, *args, **kwargs)))
        finally:
            self._ranks = everyone
        return [notes.get(world.copied[rank], notes[self._rank]) for rank in everyone]

    return call


def _create(options: Any, _: Any) -> Any:
    members = options.global_ranks_in_group or range(options.group_size)
    if all(rank in _worlds[-1].real for rank in members):
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=TIMEOUT)
    return _Pretended(options.group_rank, members, options.store, options.group_id)


@contextmanager
def pretended_world(mesh: Mesh, real: Sequence[int], index: int = 0, store: dist.Store | None = None) -> Iterator[None]:
    """Make this process the global rank `real[index]` of `mesh`; the processes of `real` share `store`."""
    if "PRETENDED" not in dist.Backend._plugins:
        dist.Backend.register_backend("pretended", _create, extended_api=True, devices=["cpu"])
    patches = Patches()

    def without_backend(new_group: Any) -> Any:
        @wraps(new_group)
        def make(*args: Any, **kwargs: Any) -> Any:
            return new_group(*args, **{**kwargs, "backend": None})

        return make

    _worlds.append(_World(mesh, real))
    dist.init_process_group(
        "pretended", rank=real[index], world_size=mesh.world_size, store=store or dist.HashStore(), timeout=TIMEOUT
    )
    patches.replace_function(dist.new_group, without_backend)
    # Values in such a group prove nothing about a plan.
    patches.replace(Group, "is_pretended", property(lambda group: isinstance(group.process_group, _Pretended)))
    patches.replace(RollCall, "meet", _of_those_that_exist(RollCall.meet))
    patches.replace_function(dist.broadcast_object_list, _from_one_that_exists)
    try:
        yield
    finally:
        patches.undo()
        if dist.is_initialized():
            dist.destroy_process_group()
        _worlds.pop()
