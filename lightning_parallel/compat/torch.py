"""Private names of PyTorch that the library cannot do without, each with the reason.

They exist under these names in torch 2.6 to 2.13; `tests/test_compat.py` names each one that an update has moved.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import inspect
import json
import operator
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# -- used by pipeline: imports -----
# Runs operators on a tensor subclass without its `__torch_function__`: documented, but in this private module only.
from torch._C import DisableTorchFunctionSubclass

# -- used by tensor: imports -----
# Whether `torch.func` transforms the code that runs now, which changes how a `Function` has to be applied.
from torch._C import _are_functorch_transforms_active as transforms_active

# The id of the running backward pass, -1 if none runs. No public function tells two passes apart.
from torch._C import _current_graph_task_id as current_graph_task_id

# Leaves the transforms of `torch.func` inside a block.
from torch._C import _DisableFuncTorch as no_transforms
from torch._C import _EnableTorchFunction as EnableTorchFunction

# The number of dispatch modes that see operators now.
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes

# Lets C++ code that asks for the address of a tensor's data raise an error instead of reading address zero.
from torch._C import _set_throw_on_mutable_data_ptr as forbid_data_access

# Exchanges the C++ tensors behind two Python objects. `torch.utils.swap_tensors` refuses tensors with weak references,
# which recurrent layers keep of their weights, and exchanges attributes too.
from torch._C import _swap_tensor_impl as swap_tensor_impl

# Says whether `torch.compile` traces the code that runs now.
from torch._guards import TracingContext

# Tensors without data, on a device that need not exist, with torch's own shape functions; `torch.export` uses them too.
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

# Stands for a value of compiled code while its operators are made free of changes in place.
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import _engine_run_backward
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX as CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import FSDP_PREFIX

# -- used by callbacks: imports -----
# The base of all batch and instance normalization. A list of the public classes would miss the users' subclasses.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormalization
from torch.nn.modules.batchnorm import _NormBase as NormalizationBase

# Hooks of all modules and of all optimizers: they can be added in public, but neither listed nor run at another time.
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import _named_member_accessor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode

# Walks nested containers of tensors; `torch.utils.pytree` is not there in all supported versions.
from torch.utils import _pytree as pytree

# Sees every operator; a public name in a private module, and no public module has it.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Suspends all dispatch modes for a block. torch does the same for its internal operations.
from torch.utils._python_dispatch import _disable_current_modes as dispatch_modes_suspended

# The innermost dispatch mode. Leaving a mode takes away the innermost one, whichever it is: see `leave_mode`.
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode

from lightning_parallel.compat import Patches, patched

__all__ = [
    "BUFFERS",
    "apply_of",
    "no_transforms",
    "transforms_active",
    "CALLS",
    "CALL_CODE",
    "MODULES",
    "CPU_FLASH_ATTENTION",
    "CPU_FLASH_ATTENTION_BACKWARD",
    "CUDA_FLASH_ATTENTION",
    "CUDA_FLASH_ATTENTION_BACKWARD",
    "DisableTorchFunctionSubclass",
    "EnableTorchFunction",
    "DispatchMode",
    "FullyShardedGroup",
    "FullyShardedParameter",
    "AroundCalls",
    "BatchNormalization",
    "NormalizationBase",
    "PARAMETERS",
    "PRODUCTS",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "WRAPPER_PREFIXES",
    "add_all_",
    "same_memory",
    "base_name",
    "WITHOUT_VALUES",
    "base_of",
    "saved_tensors_hooks_now",
    "computes_on_parts",
    "gather_absent",
    "gathers_first",
    "buffers_of",
    "current_autograd_node",
    "current_dispatch_mode",
    "current_function_mode",
    "gradient_hooks_of",
    "children_of",
    "compiled_call_of",
    "compiler_backend",
    "copy_all_",
    "copy_of",
    "current_graph_task_id",
    "ddp_ignored_names",
    "dispatch_modes_suspended",
    "each",
    "explain_swaps",
    "flight_recorder_entries",
    "function_modes_kept",
    "functional_calls_swap",
    "graph_position",
    "forbid_data_access",
    "backward_hooks_of",
    "forward_hooks_of",
    "global_backward_hooks",
    "global_step_hooks",
    "seed_torch",
    "state_hooks_of",
    "step_hooks_of",
    "has_compiled_calls",
    "is_flattened",
    "give_data",
    "fsdp1_comm_hook",
    "fsdp1_gradient_views",
    "fsdp1_parameter_offsets",
    "fsdp1_replica_group",
    "fsdp1_synchronizes",
    "fully_sharded_groups",
    "has_compiled_parts",
    "uses_cuda_graphs",
    "has_unsharded_storage",
    "install_fsdp1_comm_hook",
    "is_backward_running",
    "make_subclass",
    "leave_mode",
    "mark_as_parameter",
    "move_tensor_hooks",
    "non_persistent_buffers_of",
    "make_wrapper_subclass",
    "map_only",
    "gradients_here",
    "has_data",
    "keeps_graph",
    "overload_packet",
    "random_values",
    "position_in_graph",
    "named_parameters_of",
    "parameters_of",
    "num_dispatch_modes",
    "pytree",
    "remove_ddp_hooks",
    "schema_of",
    "sharded_flat_parameters",
    "storage_address",
    "tensors_of_memory",
    "swap_tensor_impl",
    "to_copy",
    "uncompiled_call_of",
    "unsafe_view",
    "version_of",
    "views_unseen",
    "workers_of",
    "versions_of",
    "with_lost_weight",
    "with_versions",
    "is_any_autocast_enabled",
    "is_same_memory",
    "is_traced",
    "is_traced_now",
]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode for code that runs no compiled function.

    torch wraps the method of every mode, to keep its compiler out. The wrapper takes as long as a short method.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# -- containers -------------------------------------------------------------------------------------------------------


def map_only(kind: Any, change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with changed entries of one kind, at any depth."""
    # `pytree` takes a `torch.Size` apart and makes a tuple of its numbers.
    return pytree.tree_map_only(kind, change, value, is_leaf=lambda entry: isinstance(entry, torch.Size))


# Functions of tensors that read no values, by name.
WITHOUT_VALUES = {"__hash__", "__len__", "dim", "size", "stride", "numel", "nelement", "element_size", "ndimension"}
WITHOUT_VALUES |= {"is_complex", "is_floating_point", "is_shared", "is_contiguous", "is_same_size", "is_inference"}
WITHOUT_VALUES |= {"is_pinned", "is_signed", "get_device", "storage_offset", "requires_grad_", "retain_grad", "grad"}
WITHOUT_VALUES |= {"register_hook", "register_post_accumulate_grad_hook", "backward", "_is_view", "new_tensor"}
WITHOUT_VALUES |= {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "zeros_like", "ones_like"}
WITHOUT_VALUES |= {"empty_like", "full_like", "rand_like", "randn_like", "randint_like"}


def saved_tensors_hooks_now() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the functions that pack and unpack the tensors which autograd saves now; None without such hooks."""
    return _top_hooks(False)


def _watched_hooks() -> Callable[[bool], Any]:
    """Watch the hooks of saved tensors that each thread enters, for torch before 2.8, which does not tell them."""
    autograd, thread = torch._C._autograd, threading.local()
    push, pop = autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks

    def entered() -> list[Any]:
        return thread.__dict__.setdefault("entered", [])

    def push_watched(pack_hook: Callable[[Tensor], Any], unpack_hook: Callable[[Any], Tensor]) -> None:
        push(pack_hook, unpack_hook)
        entered().append((pack_hook, unpack_hook))

    def pop_watched() -> None:
        pop()
        del entered()[-1:]  # none, where the hooks were entered before the import

    autograd._push_saved_tensors_default_hooks = push_watched
    autograd._pop_saved_tensors_default_hooks = pop_watched
    return lambda _: entered()[-1] if entered() else None


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None) or _watched_hooks()


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which `tensor` is a view in autograd's graph; `tensor` itself if it is no view."""
    base = tensor._base
    return tensor if base is None else base


def gathers_first(kind: type) -> bool:
    """Return whether functions of a class of parameters gather their data, before any other class may compute."""
    return hasattr(kind, "gather_slices")


def computes_on_parts(kind: type) -> bool:
    """Return whether functions of a class of tensors compute on a part of the data; see `tensor.pieces`."""
    return hasattr(kind, "computed_on_parts")


def gather_absent(values: Any) -> None:
    """Gather the data of parameters of which this replica holds slices; see `data_parallel.ParameterShards`."""
    leaves = pytree.tree_leaves(values)
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter) and (gather := vars(leaf).get("gather_slices")) is not None:
            # All at once: a gathering frees the parameters of other units, as of a bias apart from its tied weight.
            gather(leaves)


# -- torch.nn: modules, parameters, hooks ------------------------------------------------------------------------------

# -- used by tensor -----

# Keys of these registries in `vars(module)`, to replace a full registry by another.
PARAMETERS = "_parameters"
BUFFERS = "_buffers"
MODULES = "_modules"


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that belong to the module itself, by name, to read or replace.

    `named_parameters` leaves out None and repeated entries. Setting an attribute would run the `__setattr__` of the
    module's class.
    """
    own: dict[str, nn.Parameter | None] = module._parameters
    return getattr(own, "held", own)  # behind a dictionary that waits for absent parameters, see `Arrivals`


def named_parameters_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what `named_parameters` yields, without a wait for absent parameters."""
    seen: set[nn.Parameter] = set()
    for path, child in module.named_modules():
        for key, parameter in parameters_of(child).items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield f"{path}.{key}" if path else key, parameter


def copy_of(module: nn.Module, known: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy; in attributes, tensors that were computed from parameters (pruned weights) are detached.

    Args:
        module: The module; unchanged.
        known: Objects of the copy, by the `id` of the objects of `module`, whose data are not copied then.
    """
    values = [value for child in module.modules() for value in vars(child).values() if type(value) not in _PLAIN]
    # A module has a dozen empty dictionaries for hooks, each of which `deepcopy` would make from its pickled form.
    memo = {id(value): type(value)() for value in values if type(value) in (OrderedDict, set) and not value}
    held = [value for value in values if id(value) not in memo and not isinstance(value, nn.Module)]
    leaves = [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    return copy.deepcopy(module, {**memo, **{id(leaf): leaf.detach().clone() for leaf in leaves}, **(known or {})})


_PLAIN = {bool, int, float, str, type(None)}


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers that belong to the module itself, by name, to read or replace; see `parameters_of`."""
    return module._buffers


def non_persistent_buffers_of(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that `state_dict` leaves out; `register_buffer` only writes them."""
    return module._non_persistent_buffers_set


# -- used by pipeline -----


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules registered in `module` itself, by name: `named_children` leaves out None and repetitions."""
    return module._modules


_HookDicts = tuple[dict[int, Any], dict[int, Any]]

# Returns the hooks that run after and before a module's `forward`, by id, to read or replace. Public functions register
# hooks, but do not list them. `attrgetter` runs in C: stubs call it for every submodule at every call.
forward_hooks_of: Callable[[nn.Module], _HookDicts] = attrgetter("_forward_hooks", "_forward_pre_hooks")
backward_hooks_of: Callable[[nn.Module], _HookDicts] = attrgetter("_backward_hooks", "_backward_pre_hooks")

# Likewise the hooks of state dicts. Copies of a module get them as well, without a handle to remove them.
state_hooks_of: Callable[[nn.Module], _HookDicts] = attrgetter("_state_dict_hooks", "_load_state_dict_pre_hooks")


def has_compiled_parts(module: nn.Module) -> bool:
    """Return whether `module` or a module inside it is compiled, by `torch.compile(part)` or `part.compile()`."""
    return any(map(has_compiled_calls, module.modules()))


CALLS = "_compiled_call_impl"
"""The attribute of a module that `__call__` calls, hooks included, if it is not None. `nn.Module.compile` sets it.

Copies and pickles of a module leave it out. A wrapper there needs no other class and keeps the names in `state_dict`.
"""


CALL_CODE = nn.Module._call_impl.__code__
"""The code of a module's call: its frame tells which module runs."""


# Returns the call of a module with its hooks, as `nn.Module.compile` compiles it.
uncompiled_call_of: Callable[[nn.Module], Callable[..., Any]] = attrgetter("_call_impl")


class AroundCalls:
    """Stands in a module's `CALLS`, and lets a function run each call.

    Args:
        module: The module.
        around: Called with a function that runs the module, and with the arguments of the call.
    """

    def __init__(self, module: nn.Module, around: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        self.compiled = vars(module).get(CALLS)
        if isinstance(self.compiled, AroundCalls):
            self.compiled = self.compiled.compiled
        self.around = around
        self._run = self.compiled or module._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self._run, args, kwargs)

    # A class may copy all attributes of its modules. A copy with this object would call the original module.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def compiler_backend(device: torch.device) -> str:
    """Return `inductor` where torch can make kernels for a device, otherwise the backend `aot_eager`."""
    if device.type == "cpu":
        # As inductor looks for it.
        has_compiler = any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))))
    else:
        has_compiler = importlib.util.find_spec("triton") is not None
    return "inductor" if has_compiler else "aot_eager"


def has_compiled_calls(module: nn.Module) -> bool:
    """Return whether calls of `module` itself are compiled."""
    return type(module).__name__ == "OptimizedModule" or compiled_call_of(module) is not None


def compiled_call_of(module: nn.Module) -> Any:
    """Return the compiled call of a module that `module.compile()` has compiled; None for other modules."""
    found = getattr(module, CALLS, None)
    return found.compiled if isinstance(found, AroundCalls) else found


def uses_cuda_graphs(module: nn.Module) -> bool:
    """Tell whether `module` was compiled to record CUDA graphs, as by `torch.compile(mode="reduce-overhead")`."""
    context = getattr(module, "dynamo_ctx", None)
    config = getattr(context, "compiler_config", None)
    if config is None:  # by `module.compile()`
        ask = getattr(compiled_call_of(module), "get_compiler_config", None)
        config = None if ask is None else ask()
    return isinstance(config, dict) and bool(config.get("triton.cudagraphs"))


# -- torch.nn.parallel, FSDP: gradient hooks ---------------------------------------------------------------------------

# compression: where DDP, FSDP1 and FSDP2 communicate gradients

WRAPPER_PREFIXES = (FSDP_PREFIX, CHECKPOINT_PREFIX, "_orig_mod.")
"""Put into parameter names by FSDP1, activation checkpointing and `torch.compile`; no public function removes them."""


def ddp_ignored_names(module: nn.Module) -> Collection[str]:
    """Return the names of parameters that DDP ignores; torch has only a setter for them, a private function."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


def remove_ddp_hooks(model: DistributedDataParallel) -> None:
    """Remove DDP's hooks from the module's parameters before it is wrapped again; deleting DDP leaves the hooks."""
    model._remove_autograd_hooks()


def fsdp1_synchronizes(model: FullyShardedDataParallel) -> bool:
    """Return whether the backward pass just run reduced gradients: False under `no_sync`, which has no getter."""
    return model._sync_gradients


def fsdp1_comm_hook(unit: FullyShardedDataParallel) -> Any:
    """Return the communication hook of an FSDP module, or None; torch registers hooks, but has no getter."""
    return unit._comm_hook


def install_fsdp1_comm_hook(unit: FullyShardedDataParallel, hook: Any, state: Any, patches: Patches) -> None:
    """Give one FSDP module, without its children, a communication hook.

    `register_comm_hook` refuses modules that shard and replicate, and gives all children the same state. No function
    removes its hook.
    """
    patches.replace(unit, "_comm_hook", hook)
    patches.replace(unit, "_comm_hook_state", state)


def fsdp1_replica_group(unit: FullyShardedDataParallel) -> Any:
    """Return the ranks that hold the same shards under a HYBRID strategy, or None; only the shards' group is public."""
    return getattr(unit, "_inter_node_pg", None)


def fsdp1_gradient_views(unit: FullyShardedDataParallel, gradient: Tensor) -> dict[str, Tensor]:
    """Return views of a flat gradient, padded to equal shards, by the parameters' names in the unit.

    A communication hook gets the flat gradient; only the private handle knows the place of each parameter in it.
    """
    handle: Any = unit._handle
    flat = handle.flat_param
    views = handle._get_unflat_views(gradient[: flat._unpadded_unsharded_size.numel()])
    return dict(zip(flat._fqns, views))


def fsdp1_parameter_offsets(unit: FullyShardedDataParallel) -> list[tuple[str, torch.Size, int]]:
    """Return name, shape and first element in the flat gradient of each parameter; padding lies between them."""
    handle: Any = unit._handle
    flat = handle.flat_param
    ends = list(accumulate(flat._numels_with_padding))
    starts = [start for start, is_padding in zip([0, *ends], flat._is_padding_mask) if not is_padding]
    return list(zip(flat._fqns, flat._shapes, starts))


@dataclass(frozen=True)
class FullyShardedParameter:
    """One parameter under `fully_shard`, and its place in FSDP2's messages, which only private classes know."""

    _parameter: Any

    @property
    def tensor(self) -> Any:
        """The parameter of the module, a DTensor."""
        return self._parameter.sharded_param

    @property
    def size(self) -> torch.Size:
        """Shape of the full parameter."""
        return self._parameter._orig_size

    @property
    def shard_size(self) -> torch.Size:
        """Shape of this rank's shard."""
        return self._parameter.sharded_size

    @property
    def padded_shard_size(self) -> torch.Size:
        """Shape of every rank's shard, padding included."""
        return self._parameter.padded_sharded_param_size

    @property
    def dim(self) -> int:
        """The dimension that is sharded."""
        return self._parameter.fsdp_placement.dim


@dataclass(frozen=True)
class FullyShardedGroup:
    """The parameters that one call of `fully_shard` communicates together."""

    _group: Any

    @property
    def parameters(self) -> list[FullyShardedParameter]:
        """The parameters, in the order of their shards in a flat gradient."""
        return [FullyShardedParameter(parameter) for parameter in self._group.fsdp_params]

    @property
    def shard_group(self) -> Any:
        """The process group over which the parameters are sharded."""
        return self._group.mesh_info.shard_process_group

    @property
    def replicates(self) -> bool:
        """True over a mesh of shards and replicas."""
        return hasattr(self._group.mesh_info, "replicate_process_group")

    @property
    def has_all_reduce_hook(self) -> bool:
        """True after `set_all_reduce_hook`, which has no getter."""
        return self._group._all_reduce_hook is not None

    @property
    def reduce_scatter(self) -> Any:
        """The function that `set_custom_reduce_scatter` replaces, which has no getter. None in old versions."""
        return getattr(self._group, "_reduce_scatter_comm", None)


def fully_sharded_groups(module: FSDPModule) -> list[FullyShardedGroup]:
    """Return the groups of one module under `fully_shard`, without the groups of its children."""
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [FullyShardedGroup(group) for group in groups if group is not None]


# -- autograd and dispatch ---------------------------------------------------------------------------------------------

# -- used by tensor -----

# A reshape that autograd does not treat as a view: the result of a custom function may then be changed in place.
unsafe_view = torch.ops.aten._unsafe_view.default

# Inside this context, autograd sees no views: the results may leave a custom function, and be changed in place.
views_unseen: Callable[[], AbstractContextManager[None]] = partial(
    torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
)


def with_lost_weight(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call, with the `weight` that torch drops for subclasses of `Tensor`.

    `F.l1_loss` drops it (seen in torch 2.13). Only the frame of the call still has it.
    """
    if func is not F.l1_loss or "weight" in kwargs:
        return kwargs
    frame = inspect.currentframe()
    while frame is not None:
        weight = frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None
        if weight is not None:
            return {**kwargs, "weight": weight}
        frame = frame.f_back
    return kwargs


# The dispatcher's operator for `tensor.to(...)`; no operator without the underscore converts a dtype.
to_copy = torch.ops.aten._to_copy


# The counter of a tensor's in-place changes, which autograd checks too: no public name tells if a tensor has changed.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")


_compare = ctypes.CDLL("msvcrt" if os.name == "nt" else None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors on the CPU have the same bytes; `torch.equal` takes twice as long."""
    size = one.nbytes
    return size == other.nbytes and not _compare(one.data_ptr(), other.data_ptr(), size)


def is_traced_now() -> bool:
    """Return whether the compiler runs this code with tensors without data, to see its operators."""
    return TracingContext.try_get() is not None


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tensor stands for a value of compiled code, which has no data yet."""
    return type(tensor) in (FakeTensor, FunctionalTensor) and is_traced_now()


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without torch's preparation for `torch.func`, which takes longer than a small kernel.

    Autograd's node then calls `function.backward` itself, without two functions in between.
    """
    vars(function)["_backward_cls"].apply = function.backward
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


# -- used by pipeline -----

# Makes a tensor without data that claims a shape, a dtype and a device. All wrapper subclasses of torch use it too.
make_wrapper_subclass = Tensor._make_wrapper_subclass


class _DataOfTensors:
    """Replaces `Tensor.data`, so that a tensor without memory can be the value of an assignment.

    `tensor.data = value` is no operator, and asks neither the dispatcher nor the class of `value`. Without this class,
    the tensor would point to the address zero, and the next read would end the process with a segmentation fault.
    """

    def __init__(self) -> None:
        self._plain: Any = Tensor.data
        # C++ and modes look these two up on the object, and so recognize the property. Tensors use the methods below.
        vars(self).update({name: getattr(self._plain, name) for name in ("__get__", "__set__")})

    def __get__(self, tensor: Tensor | None, kind: type | None = None) -> Any:
        return self if tensor is None else self._plain.__get__(tensor, kind)

    def __set__(self, tensor: Tensor, value: Any) -> None:
        if hasattr(type(value), "data_for"):
            value = value.data_for(tensor)
        if value is not None:
            self._plain.__set__(tensor, value)


def give_data(patches: Patches) -> None:
    """Let `tensor.data = value` assign `value.data_for(tensor)` if that method exists, until `patches` are undone.

    The method returns an ordinary tensor, or None for no assignment.
    """
    patches.replace(Tensor, "data", _DataOfTensors())


def explain_swaps(patches: Patches) -> None:
    """Let `torch.utils.swap_tensors` explain why it cannot exchange tensors in a run, until `patches` are undone."""

    def explained(swap: Callable[..., Any]) -> Callable[..., Any]:
        def swap_or_explain(t1: Tensor, t2: Tensor) -> Any:
            try:
                # A sharded parameter would keep the class of the other tensor after the hook.
                if any(hasattr(type(tensor), "whole") for tensor in (t1, t2)):
                    raise RuntimeError("one of them is sharded")
                return swap(t1, t2)
            except RuntimeError as error:
                if not str(error).endswith("sharded") and "weakref" not in str(error):
                    raise
                raise RuntimeError(
                    f"`torch.utils.swap_tensors` cannot exchange tensors of this model in a run: {error}. The strategy"
                    " follows its parameters and buffers by weak references. Use `tensor.data = ...` or `copy_`, or"
                    " exchange them before the run"
                ) from error

        return swap_or_explain

    patches.replace_function(torch.utils.swap_tensors, explained)


def schema_of(operation: Any) -> Any:
    """Return the schema of an operator: its arguments, the written arguments, and its results."""
    return operation._schema


# compression


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph for another one, which no public function tells."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def gradients_here(
    output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None = None, create_graph: bool = False
) -> tuple[Any, ...]:
    """Return the gradients of this rank's tensors, None for an unused tensor.

    In a run, `torch.autograd.grad` gives the gradients of full tensors, and tensor classes may answer it.
    """
    gradient = torch.ones_like(output) if gradient is None else gradient
    found: tuple[Any, ...] = _engine_run_backward(
        (output,), (gradient,), create_graph, create_graph, tuple(inputs), True, accumulate_grad=False
    )
    return found


def is_backward_running() -> bool:
    """Return whether this thread runs backward, as when activation checkpointing calls a module a second time.

    Autograd has no public function for this question.
    """
    return current_graph_task_id() != -1


# -- used by strategies.deferred_init -----

# Makes a tensor of another class, and lets the class answer for the device, in C++ as well. Fake tensors use it too.
# The public `as_subclass` cannot claim a device.
make_subclass = Tensor._make_subclass

# The function inside `nn.init.trunc_normal_` that draws. Libraries import the public function under other names.
TRUNC_NORMAL = "_no_grad_trunc_normal_"


def move_tensor_hooks(source: Tensor, target: Tensor) -> None:
    """Register the gradient hooks of `source` on `target`; public functions add hooks, but do not list them."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (source._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(hook)


def base_name(operator: Any) -> str:
    """Return the name of an operator's function, without marks for in-place or list variants."""
    name: str = overload_packet(operator).__name__
    return name if name.startswith("__") else name.removeprefix("_foreach_").strip("_")


def gradient_hooks_of(tensor: Tensor) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return the hooks of a tensor before and after its gradient is accumulated, by number.

    The dicts let the caller replace, remove or restore a hook. No public name lists the hooks.
    """
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return {} if before is None else before, {} if after is None else after


# The function mode that sees functions first; None without a mode.
current_function_mode: Callable[[], Any] = _get_current_function_mode


# -- used by strategies and data_parallel: hooks of optimizers -----


def step_hooks_of(optimizer: Optimizer) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return the hooks before and after a step of an optimizer, by number; empty if torch has not set it up."""
    own = vars(optimizer)
    return own.get("_optimizer_step_pre_hooks", {}), own.get("_optimizer_step_post_hooks", {})


def global_backward_hooks() -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return the hooks for gradients of all modules, after and before the backward of a module."""
    return _global_backward_hooks, _global_backward_pre_hooks


def global_step_hooks() -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return the hooks before and after a step of any optimizer, by number."""
    return _global_optimizer_pre_hooks, _global_optimizer_post_hooks


# -- used by callbacks: memory, operations, collectives -----

CPU_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SOFTMAX = torch.ops.aten._softmax
SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data
"""Attention on CPU, which is missing in torch's table of operations; the operator has no public name."""
CUDA_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
CUDA_FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
"""Attention on GPU with the logarithm of the sum of each row, which no public function returns."""


def same_memory(tensor: Tensor) -> Tensor:
    """Return another tensor with the same memory and the same version counter, without a graph."""
    # Below autograd, as in a dispatch mode, `detach` gives a tensor with its own counter. `torch.utils.checkpoint` has
    # this guard, too.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# By name, because versions of torch have other operators. Products of two activations are not among them: the scores of
# an attention are larger than all other activations, and cheap to compute.
_PRODUCTS = (
    "mm",
    "addmm",
    "linear",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
PRODUCTS: dict[Any, list[int]] = {
    found: [place for place, argument in enumerate(found._schema.arguments) if argument.name == "dropout_p"]
    for packet in (getattr(torch.ops.aten, name, None) for name in _PRODUCTS)
    if (found := getattr(packet, "default", None)) is not None
}
"""Operators of products with weights, and of attention, each with the place of its argument for dropout."""

# Returns the node of backward that runs in this thread; None between nodes. No public function returns it.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node


def storage_address(storage: torch.UntypedStorage) -> int:
    """Identify a storage among all living storages. `data_ptr()` is 0 for each empty storage and changes on resize."""
    return storage._cdata


def tensors_of_memory(tensor: Tensor) -> int:
    """Return the number of tensors that use the memory of a tensor, this one and saved ones of autograd included."""
    # One more than tensors: the object of Python that names the storage.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


def has_data(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def random_values(shape: Any, dtype: torch.dtype, device: Any, std: float = 1.0, generator: Any = None) -> Tensor:
    """Return normally distributed numbers; zeros for integers; for booleans True, up to the diagonal of a square.

    Zero is a valid index into any table. No row of a mask is empty, whose softmax would be NaN.
    """
    values = torch.zeros(shape, dtype=dtype, device=device)
    if dtype == torch.bool:
        values = values.logical_not()
        return values.tril() if values.dim() > 1 and values.shape[-1] == values.shape[-2] else values
    # A fake tensor takes no generator.
    if has_data(values) and (dtype.is_floating_point or dtype.is_complex):
        values.normal_(0.0, std, generator=generator)
    return values


def overload_packet(op: Any) -> Any:
    """Return the operator packet of the overload `op`: the key in torch's table of operations."""
    return op._overloadpacket


def sharded_flat_parameters(model: nn.Module) -> list[Tensor]:
    """Return the flat parameters that FSDP1 has sharded; empty without FSDP1. `parameters()` gives only views."""
    if not isinstance(model, FullyShardedDataParallel):
        return []
    handles: Iterable[Any] = (unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model))
    return [handle.flat_param for handle in handles if handle is not None and handle.uses_sharded_strategy]


def has_unsharded_storage(flat_parameter: Tensor) -> bool:
    """Return whether FSDP1 has made the storage in which it gathers a flat parameter, as it does in the first step."""
    return hasattr(flat_parameter, "_full_param_padded")


def seed_torch(seed: int) -> None:
    """Seed torch's generators, the generators of CUDA only if it is in use."""
    # `torch.manual_seed` formats and keeps a traceback for each kind of device that may be initialized later. Trials of
    # blocks and layers seed so often that these tracebacks took a sixth of a small model's set-up.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Check a boolean tensor of one element; on CUDA the kernels that follow fail, and the host does not wait."""
    torch._assert_async(condition, message)


# Their names up to torch 2.12, which are deprecated since.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def flight_recorder_entries() -> list[dict[str, Any]]:
    """Return the collectives of all groups in torch's flight recorder; empty if it does not run.

    The only public form of them is a file that the watchdog of NCCL writes after a timeout.
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    # Old versions have only the second name, in builds with NCCL.
    dump = getattr(module, "_dump_fr_trace_json", None) or getattr(module, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    return entries


def mark_as_parameter(tensor: Tensor, is_parameter: bool) -> None:
    """Let `isinstance(tensor, nn.Parameter)` hold for a tensor of another class: torch asks for this attribute."""
    vars(tensor).pop("_is_param", None)
    if is_parameter:
        tensor._is_param = True


def workers_of(loader: Any) -> Any | None:
    """Return the iterator with the workers that a loader keeps from an earlier epoch (`persistent_workers`)."""
    return getattr(loader, "_iterator", None)


def add_all_(targets: Sequence[Tensor], sources: Sequence[Tensor], factor: float = 1.0) -> None:
    """Add each source times `factor` to its target, all tensors in one call, which no public function offers."""
    torch._foreach_add_(list(targets), list(sources), alpha=factor)


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    """Copy each source to its target."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


# -- used by optim -----


def each(operation: str, *args: Any, **kwargs: Any) -> Any:
    """Run an operation such as `add_` on each of many tensors in one call, as torch's own optimizers do."""
    return getattr(torch, f"_foreach_{operation}")(*args, **kwargs)


def leave_mode(mode: Any) -> None:
    """Leave a dispatch or function mode, and stay in the modes that were entered after it.

    Private: `__exit__` of any mode leaves the mode that was entered last.
    """
    is_function = isinstance(mode, torch.overrides.TorchFunctionMode)
    stack: Any = torch.overrides if is_function else torch.utils._python_dispatch
    current: Callable[[], Any] = current_function_mode if is_function else current_dispatch_mode
    # torch removes only the last mode, so later modes are taken off and put back.
    later = []
    while current() is not mode:
        later.append(stack._pop_mode())
    mode.__exit__(None, None, None)
    for each in reversed(later):
        stack._push_mode(each)


@contextmanager
def function_modes_kept() -> Iterator[None]:
    """Leave at the end of the block the function modes that the block has entered and not left.

    `Module.__call__` runs no hooks when a `BaseException` passes, so modes that a hook enters would never end.
    """
    height = torch._C._len_torch_function_stack()
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack() > height:
            torch.overrides._pop_mode()


@contextmanager
def functional_calls_swap(swap: Callable[..., Any]) -> Iterator[None]:
    """Let `torch.func.functional_call` exchange tensors of modules by `swap(own, module, name, tensor)` in the block.

    The own function of torch exchanges registered parameters. Attributes that hide them would stay.
    """
    own = _named_member_accessor.swap_tensor
    with patched(_named_member_accessor, "swap_tensor", partial(swap, own)):
        yield


# Returns the number that the next node of autograd's graph gets in this thread. Private: no public name tells which
# nodes a function has made. Not wrapped, as a pipeline asks twice for each layer.
graph_position: Callable[[], int] = torch.autograd._get_sequence_nr


def position_in_graph(node: Any) -> int:
    """Return the number of a node of autograd's graph, which counts the nodes of a thread in order."""
    return node._sequence_nr()


def is_flattened(parameter: Tensor) -> bool:
    """Tell whether a parameter is a flat parameter of FSDP1 or a part of one; its shape may be the shape of a shard."""
    return getattr(parameter, "_fsdp_flattened", False)


def versions_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of modules in a state dict, by path; otherwise only `load_state_dict` reads them."""
    return dict(getattr(state, "_metadata", None) or {})


def with_versions(state: Mapping[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict, with the versions of modules if there are any."""
    result = OrderedDict(state)
    if versions:
        result._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return result
