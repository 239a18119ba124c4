"""Private names of PyTorch that the library cannot do without, each with the reason.

They exist under these names in torch 2.6 to 2.13; `tests/test_compat.py` says which one an update has moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _NormBase as NormalizationBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

__all__ = [
    "CPU_FLASH_ATTENTION",
    "NormalizationBase",
    "TorchDispatchMode",
    "ddp_comm_hooks",
    "flight_recorder_entries",
    "has_unsharded_storage",
    "intercepted_all_reduce",
    "is_in_backward",
    "overload_packet",
    "sharded_flat_parameters",
    "storage_address",
    "tensor_version",
    "tree_leaves",
]

# -- torch.nn: modules, parameters, hooks ------------------------------------------------------------------------------

# -- torch.nn.parallel, FSDP: gradient hooks ---------------------------------------------------------------------------

# -- torch.distributed: stores, groups, flight recorder ----------------------------------------------------------------

# -- autograd and dispatch ---------------------------------------------------------------------------------------------

# -- torch.amp, torch.optim --------------------------------------------------------------------------------------------

# -- callbacks: what training holds, counts and communicates -----------------------------------------------------------
# `NormalizationBase` is the one base of all batch and instance normalization: their public classes would have to be
# listed, and those of users that derive from the base would be missed. `TorchDispatchMode` and `tree_leaves` are public
# names in modules that are private; no public module has them.

CPU_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attention on CPU, which is missing in torch's table of operations; it has no public name as an operator."""


def storage_address(storage: torch.UntypedStorage) -> int:
    """Identify a storage among those that are alive. `data_ptr()` is 0 for all empty ones and changes on resize."""
    return storage._cdata


def tensor_version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; `saved_tensors_hooks` leave the check of this to the hooks."""
    return tensor._version


def is_in_backward() -> bool:
    """Whether the calling thread runs a backward. Grad mode does not tell: it is off under `no_grad`, too."""
    return torch._C._current_graph_task_id() != -1


def overload_packet(op: Any) -> Any:
    """The operator that `op` is an overload of: the key in torch's table of operations."""
    return op._overloadpacket


def ddp_comm_hooks(model: DistributedDataParallel) -> list[Callable[..., Any]]:
    """The communication hooks on a DDP module, which can be registered but not asked for."""
    return [hook for hook, _ in model._comm_hooks]


def sharded_flat_parameters(model: nn.Module) -> list[Tensor]:
    """The flat parameters that FSDP1 has sharded; empty without FSDP1. `parameters()` gives views of them only."""
    if not isinstance(model, FullyShardedDataParallel):
        return []
    handles: Iterable[Any] = (unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model))
    return [handle.flat_param for handle in handles if handle is not None and handle.uses_sharded_strategy]


def has_unsharded_storage(flat_parameter: Tensor) -> bool:
    """Whether FSDP1 has allocated the storage in which it gathers a flat parameter: from the first step on."""
    return hasattr(flat_parameter, "_full_param_padded")


def flight_recorder_entries() -> list[dict[str, Any]]:
    """What torch's flight recorder keeps of the collectives of all groups; empty where it does not run.

    The public way to read it is a file that the watchdog of NCCL writes after a timeout.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    return entries


class AllReduceCall(Protocol):
    """Runs an intercepted all-reduce and returns its `Work`."""

    def __call__(self) -> dist.Work:
        """Issue it."""


_interceptors: list[Callable[[list[Tensor], dist.ProcessGroup, AllReduceCall], Any]] = []


@contextmanager
def intercepted_all_reduce(
    interceptor: Callable[[list[Tensor], dist.ProcessGroup, AllReduceCall], Any],
) -> Iterator[None]:
    """Inside the block, call `interceptor(tensors, group, call)` for each all-reduce, from C++ too; it must run `call`.

    DDP reduces its buckets in C++, out of reach of functions replaced in `torch.distributed`. Its one public hook would
    replace the reduction, and cannot be removed. All process groups go through the dispatcher, though, where a kernel
    can be put before theirs: in place of autograd's, which only warns if the result is differentiated. Tensors of
    inference mode pass it by. With several interceptors the last one is called.
    """
    library = None
    if not _interceptors:
        library = torch.library.Library("c10d", "IMPL")
        library.impl("allreduce_", _intercept_all_reduce, "Autograd")
    _interceptors.append(interceptor)
    try:
        yield
    finally:
        _interceptors.remove(interceptor)
        if library is not None:
            library._destroy()  # otherwise only garbage collection takes the kernel out again


def _intercept_all_reduce(tensors: list[Tensor], process_group: Any, *arguments: Any) -> Any:
    results: list[Any] = []

    def call() -> dist.Work:
        with torch._C._AutoDispatchBelowAutograd():  # to the kernel of the backend
            results.append(torch.ops.c10d.allreduce_(tensors, process_group, *arguments))
        return dist.Work.unbox(results[0][1])

    _interceptors[-1](tensors, dist.ProcessGroup.unbox(process_group), call)
    return results[0]
