"""Private names of PyTorch that the library cannot do without, each with the reason.

They exist under these names in torch 2.6 to 2.13; `tests/test_compat.py` says which one an update has moved.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

# -- used by tensor: imports -----
# The id of the backward pass that is running, -1 outside of one: no public function tells two passes apart.
from torch._C import _current_graph_task_id as current_graph_task_id

# Walks nested containers of tensors; `torch.utils.pytree` is not there in all supported versions.
from torch.utils import _pytree as pytree

__all__ = [
    "buffers_of",
    "current_graph_task_id",
    "default_store",
    "has_compiled_call",
    "parameters_of",
    "pytree",
    "unsafe_view",
    "version_of",
]

# -- torch.nn: modules, parameters, hooks ------------------------------------------------------------------------------

# -- used by tensor -----


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that belong to the module itself, by name, to read or replace.

    `named_parameters` leaves out entries that are None and repeated ones, and setting an attribute instead would run
    the `__setattr__` of the module's class.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers that belong to the module itself, by name, to read or replace; see `parameters_of`."""
    return module._buffers


def has_compiled_call(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called; `torch.compile(module)` has a public class instead."""
    return getattr(module, "_compiled_call_impl", None) is not None


# -- torch.nn.parallel, FSDP: gradient hooks ---------------------------------------------------------------------------

# -- torch.distributed: stores, groups, flight recorder ----------------------------------------------------------------


def default_store() -> dist.Store:
    """Return the rendezvous store of the default process group.

    No public function does, and with `init_method="env://"` torch creates the store by itself.
    """
    return dist.distributed_c10d._get_default_store()


# -- autograd and dispatch ---------------------------------------------------------------------------------------------

# -- used by tensor -----

# A reshape that autograd does not treat as a view: the result of a custom function may then be changed in place.
unsafe_view = torch.ops.aten._unsafe_view.default


def version_of(tensor: Tensor) -> int:
    """Return the counter of in-place changes, which autograd checks too: no public name says if a tensor changed."""
    return tensor._version


# -- torch.amp, torch.optim --------------------------------------------------------------------------------------------
