"""The default group of `torch.distributed`, which a run replaces by the data axis.

In a replicated project and its libraries, `get_world_size()`, `get_rank()` and collectives without a group mean the
replicas. This library itself names its groups, and asks `all_processes` for all ranks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.profiler
from torch.distributed import device_mesh

from lightning_parallel.compat import Patches

__all__ = [
    "abort_all_groups",
    "backend_of",
    "close_connections",
    "check_connected",
    "set_timeout",
    "all_processes",
    "all_processes_as_default",
    "groups_of_run",
    "default_group_kept",
    "default_store",
    "replace_default_group",
]


def default_store() -> dist.Store:
    """Return the rendezvous store of the default process group.

    No public function returns it, and with `init_method="env://"` torch creates the store itself.
    """
    return dist.distributed_c10d._world.pg_map[all_processes()][1]


def abort_all_groups() -> None:
    """Abort all communication of this process's devices, in all groups. Waiting kernels go on with wrong results.

    `torch.distributed.destroy_process_group` would wait for the devices first.
    """
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def groups_of_run() -> list[dist.ProcessGroup]:
    """Return the groups of several ranks that this process is in, without the group of all processes."""
    found = list(dist.distributed_c10d._world.pg_map)
    return [one for one in found if one is not all_processes() and one.size() > 1]


def close_connections(process_group: dist.ProcessGroup) -> None:
    """Make all waits of hosts in `process_group` fail at once, here and on its other ranks; it is unusable afterwards.

    `abort` and `shutdown` do nothing in gloo: a waiting rank would wait until the timeout. But a message that does not
    arrive in time closes all connections of its group, and every wait in the group ends with an error.
    """
    if "gloo" not in backend_of(process_group):
        return
    peer = 1 if process_group.rank() == 0 else 0
    with suppress(RuntimeError):
        process_group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


_NEVER_SENT = (1 << 20) + 17  # the tag of a message that no rank sends


# Groups that stand in for the default group, each with the previous default group, outermost first.
_stand_ins: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []
_stand_in_patches = Patches()


def all_processes() -> Any:
    """Return the group of all processes, also while another group is the default; None without torch.distributed."""
    world = dist.group.WORLD
    # Inside `all_processes_as_default`, the default group is already the group of all processes.
    return _stand_ins[0][1] if _stand_ins and world is _stand_ins[-1][0] else world


def replace_default_group(process_group: dist.ProcessGroup) -> None:
    """Make `process_group` the default group of `torch.distributed`, until the end of `default_group_kept`.

    Sizes, ranks and collectives without a group then mean its ranks, also in other libraries. Functions that make or
    destroy groups still start from all processes.
    """
    if not _stand_ins:
        _patch_distributed()
    before = dist.group.WORLD
    assert before is not None
    _stand_ins.append((process_group, before))
    dist.GroupMember.WORLD = process_group


def check_connected(environment: Any) -> None:
    """Check that the default group has as many processes as the Trainer's cluster environment.

    Raises:
        ValueError: On every process, if the numbers differ.
    """
    if dist.is_initialized() and all_processes().size() != environment.world_size():
        raise ValueError(
            f"The Trainer must count the processes of `torch.distributed`, {all_processes().size()}; got"
            f" {environment.world_size()} by its `{type(environment).__name__}`. Give the Trainer `devices` and"
            " `num_nodes` of all processes, or the plugin of the launcher (in Ray Train: `RayLightningEnvironment()`)"
        )


def backend_of(process_group: dist.ProcessGroup) -> str:
    """Return the backend of a group, by device if it has several: `cpu:gloo,cuda:nccl`."""
    name = dist.get_backend(process_group)
    # torch returns `undefined` for a default group that was started without the name of a backend.
    return dist.get_backend_config(process_group) if name == "undefined" else name


def set_timeout(process_group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of all backends of a group: `split_group` sets it for NCCL only."""
    dist.distributed_c10d._set_pg_timeout(timeout, process_group)


def splits_groups(world: dist.ProcessGroup) -> bool:
    """Tell whether `torch.distributed.split_group` makes groups with all backends of `world`."""
    # In older versions of torch, `split_group` leaves out gloo, which carries Python objects.
    is_complete = hasattr(dist, "split_group") and "backend" in inspect.signature(dist.split_group).parameters
    return is_complete and getattr(world, "bound_device_id", None) is not None


@contextmanager
def default_group_kept() -> Iterator[None]:
    """Undo the calls of `replace_default_group` in the block at its end."""
    depth = len(_stand_ins)
    try:
        yield
    finally:
        while len(_stand_ins) > depth:
            stand_in, before = _stand_ins.pop()
            # If it is another group, the block has shut torch.distributed down: nothing to restore.
            if dist.group.WORLD is stand_in:
                dist.GroupMember.WORLD = before
        if not _stand_ins:
            _stand_in_patches.undo()


@contextmanager
def all_processes_as_default() -> Iterator[None]:
    """Make the group of all processes the default group in the block."""
    stand_in, world = dist.group.WORLD, all_processes()
    dist.GroupMember.WORLD = world
    try:
        yield
    finally:
        # Not after `destroy_process_group` in the block, which has left no default group.
        if dist.group.WORLD is world:
            dist.GroupMember.WORLD = stand_in


# In old versions of torch, these functions compare the rank in the default group with a global rank, for any `group`.
_BY_GLOBAL_RANK = ("gather", "scatter", "gather_object", "broadcast_object_list", "scatter_object_list")
# Per thread: another thread may call `get_rank` meanwhile.
_asked = threading.local()

_MAKE_GROUPS = (
    "destroy_process_group",
    "init_device_mesh",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
)


def _with_global_rank(signature: inspect.Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function` find the rank among all processes if its `group` is not the default group."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = signature.bind(*args, **kwargs).arguments.get("group")
        before = getattr(_asked, "among_all", False)
        _asked.among_all = isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD
        try:
            return function(*args, **kwargs)
        finally:
            _asked.among_all = before

    return call


def _patch_distributed() -> None:
    """Correct functions that mistake the default group for the group of all processes."""

    def get_rank_by(rank_in: Callable[..., int]) -> Callable[..., int]:
        def get_rank(group: dist.ProcessGroup | None = None) -> int:
            if group is None and getattr(_asked, "among_all", False):
                return all_processes().rank()
            # torch looks up the rank in the default group among the global ranks of `group`.
            if not isinstance(group, dist.ProcessGroup) or group is dist.group.WORLD:
                return rank_in(group)
            return group.rank()

        return get_rank

    def from_all(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with all_processes_as_default():
                return function(*args, **kwargs)

        return call

    _stand_in_patches.replace_function(dist.get_rank, get_rank_by)
    for name in _BY_GLOBAL_RANK:
        function = getattr(dist, name)
        # Versions of torch without this fault do not call `get_rank` here.
        if "get_rank" in inspect.unwrap(function).__code__.co_names:
            _stand_in_patches.replace_function(function, partial(_with_global_rank, inspect.signature(function)))
    for name in _MAKE_GROUPS:
        if hasattr(dist, name):
            _stand_in_patches.replace_function(getattr(dist, name), from_all)
    # Device meshes consist of all processes.
    for name in ("get_rank", "get_world_size"):
        _stand_in_patches.replace(device_mesh, name, from_all(getattr(device_mesh, name)))
    # A trace names the rank that wrote it.
    profile = torch.profiler.profiler._KinetoProfile
    _stand_in_patches.replace(profile, "_get_distributed_info", from_all(profile._get_distributed_info))
