"""Private names of PyTorch that the library cannot do without, each with the reason.

They exist under these names in torch 2.6 to 2.13; `tests/test_compat.py` says which one an update has moved.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# -- used by strategies.deferred_init: imports -----
# The documented way out of `__torch_function__` for subclasses; it has no other name.
from torch._C import DisableTorchFunctionSubclass

# Lets C++ code that asks for the address of a tensor's data raise an error instead of reading address zero.
from torch._C import _set_throw_on_mutable_data_ptr as forbid_data_access

# Exchanges what two tensor objects stand for. `torch.utils.swap_tensors` refuses tensors with weak references, which
# recurrent layers keep of their weights, and exchanges attributes too.
from torch._C import _swap_tensor_impl as swap_tensor_impl

# Walks nested containers of tensors; `torch.utils.pytree` is not there in all supported versions.
from torch.utils import _pytree as pytree

# Sees every operation that reaches the dispatcher, factories too; documented, but only under this name.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",
    "forbid_data_access",
    "make_subclass",
    "mark_as_parameter",
    "move_tensor_hooks",
    "pytree",
    "schema_of",
    "swap_tensor_impl",
]

# -- torch.nn: modules, parameters, hooks ------------------------------------------------------------------------------

# -- torch.nn.parallel, FSDP: gradient hooks ---------------------------------------------------------------------------

# -- torch.distributed: stores, groups, flight recorder ----------------------------------------------------------------

# -- autograd and dispatch ---------------------------------------------------------------------------------------------

# -- used by strategies.deferred_init -----

# Makes a tensor of another class, and lets the class answer for the device, in C++ as well: what fake tensors are made
# with. The public `as_subclass` cannot claim a device.
make_subclass = Tensor._make_subclass


def schema_of(operation: Any) -> Any:
    """Return the schema of an operator: which arguments it takes, which it writes, what it returns."""
    return operation._schema


def mark_as_parameter(tensor: Tensor, value: bool) -> None:
    """Say whether a tensor of another class than `nn.Parameter` is one: `isinstance` looks for this attribute."""
    vars(tensor).pop("_is_param", None)
    if value:
        vars(tensor)["_is_param"] = True


def move_tensor_hooks(source: Tensor, target: Tensor) -> None:
    """Register on `target` the hooks for gradients that `source` has; they can be added in public, but not read."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (source._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(hook)


# -- torch.amp, torch.optim --------------------------------------------------------------------------------------------
