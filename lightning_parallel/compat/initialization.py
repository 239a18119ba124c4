"""Initial values for models that were built on the meta device, without ever holding the full model.

    for each module that has tensors on the meta device, in the order of `named_modules()`:
        allocate its full tensors -> run its initialiser -> keep this rank's shards -> free the rest

Every rank runs every initialiser on full tensors. So each parameter gets the values that it has in one process with the
same seed, and the random generators end in the same state as in one process. At any time, only the tensors that the
rank keeps and the full tensors of one module are allocated.

An initialiser is the `reset_parameters` of the module, or the function by which the Hugging Face model around it
initialises modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_parallel.compat.torch import buffers_of, move_tensor_hooks, parameters_of, swap_tensor_impl

__all__ = [
    "initializer_of",
    "initialize_tensors",
    "set_data",
    "tensor_parallel_plan_of",
    "weight_initializer_of",
]


def tensor_parallel_plan_of(model: nn.Module) -> dict[str, str]:
    """Return the tensor-parallel plan of a model, from module pattern to style name; empty if it has none.

    The public `supports_tp_plan` only tells whether there is a plan.
    """
    plan = getattr(model, "_tp_plan", None)
    return dict(plan) if isinstance(plan, dict) else {}


def weight_initializer_of(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """Return the function by which a model initialises each module inside it; None if it has none.

    The public `init_weights` initialises the full model at once, which would then have to be in memory.
    """
    initialize = getattr(model, "_init_weights", None)
    return initialize if callable(initialize) else None


def initializer_of(root: nn.Module, path: str) -> Callable[[], object] | None:
    """Return the function that gives the module at `path` its initial values, in place; None if there is none.

    The function fills only the parameters and buffers of that module, not of its submodules. It expects full tensors.
    """
    module = root.get_submodule(path)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        return reset
    parts = path.split(".")
    # From the inside out: a model inside another model has its own initialiser.
    for depth in range(len(parts) - 1, -1, -1):
        initialize = weight_initializer_of(root.get_submodule(".".join(parts[:depth])))
        if initialize is not None:
            return partial(initialize, module)
    return None


def initialize_tensors(
    root: nn.Module,
    device: torch.device,
    *,
    wanted: Callable[[Tensor], bool] = lambda tensor: True,
    full_shape: Callable[[Tensor], torch.Size] = lambda tensor: tensor.shape,
    keep: Callable[[Tensor, Tensor], Tensor | None] = lambda tensor, full: full,
    made: Callable[[nn.Parameter], object] = lambda parameter: None,
) -> None:
    """Give the parameters and buffers on the meta device their initial values, module by module.

    Parameters stay the same objects, so tied parameters stay tied. They get their values in the first module that has
    them. Tensors that are not on the meta device keep their values. Without meta tensors nothing happens.

    Args:
        root: The model.
        device: Device of the new tensors.
        wanted: Tells whether a tensor on the meta device gets values. Modules without such a tensor are skipped, and
            draw no random numbers.
        full_shape: Returns the full shape of a parameter on the meta device that is already sharded.
        keep: Called with each tensor on the meta device and its full initial value. Returns the shard of this rank,
            without the memory of the rest, or None for a tensor that stays on the meta device.
        made: Called with each wanted parameter on the meta device, once `keep` has chosen its data.

    Raises:
        ValueError: If a module with wanted tensors has no initialiser. No tensor has changed then.
    """
    # In the order of `named_modules`, as in one process: the random numbers of a module depend on the order.
    todo = _modules_to_initialize(root, wanted)
    missing = [f"`{path}` ({type(root.get_submodule(path)).__name__})" for path, call in todo if call is None]
    if missing:
        raise ValueError(
            f"Modules on the meta device must have `reset_parameters`; got {', '.join(missing)} without it. Define"
            " that method, or build them on a real device"
        )
    for path, initialize in todo:
        if initialize is not None:
            _initialize_module(root.get_submodule(path), initialize, device, wanted, full_shape, keep, made)


def _modules_to_initialize(
    root: nn.Module, wanted: Callable[[Tensor], bool]
) -> list[tuple[str, Callable[[], object] | None]]:
    """Return the modules that are the first with some wanted tensor on the meta device, and their initialisers."""
    seen: set[int] = set()
    found = []
    for path, owner in root.named_modules():
        tensors = {id(tensor) for tensor in _tensors(owner) if tensor.is_meta and wanted(tensor)}
        if tensors - seen:
            found.append((path, initializer_of(root, path)))
        seen |= tensors
    return found


def _tensors(owner: nn.Module) -> list[Tensor]:
    return [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]


def _initialize_module(
    owner: nn.Module,
    initialize: Callable[[], object],
    device: torch.device,
    wanted: Callable[[Tensor], bool],
    full_shape: Callable[[Tensor], torch.Size],
    keep: Callable[[Tensor, Tensor], Tensor | None],
    made: Callable[[nn.Parameter], object],
) -> None:
    parameters = {name: value for name, value in parameters_of(owner).items() if value is not None}
    buffers = {name: value for name, value in buffers_of(owner).items() if value is not None and value.is_meta}
    # Parameters with values get a temporary tensor too: the initialiser draws numbers for all parameters, and would
    # overwrite these values.
    for name, parameter in parameters.items():
        empty = _empty(parameter, full_shape(parameter), device)
        parameters_of(owner)[name] = nn.Parameter(empty, parameter.requires_grad)
    for name, buffer in buffers.items():
        buffers_of(owner)[name] = _empty(buffer, buffer.shape, device)
    try:
        # Initialisers write into parameters in place, which autograd forbids for parameters that require gradients.
        with torch.no_grad():
            initialize()
    finally:
        # Looked up again, because the initialiser may have assigned new tensors.
        full_parameters = {name: parameters_of(owner)[name] for name in parameters}
        full_buffers = {name: buffers_of(owner)[name] for name in buffers}
        parameters_of(owner).update(parameters)
        buffers_of(owner).update(buffers)
    for name, parameter in parameters.items():
        # Popped, so that each full tensor is freed before the next one is sharded.
        full = full_parameters.pop(name)
        if full is None or not parameter.is_meta or not wanted(parameter):
            continue
        local = keep(parameter, full.detach())
        if local is not None:
            set_data(parameter, local)
        del full, local  # `made` may free the parameter
        made(parameter)
    for name, buffer in buffers.items():
        full_buffer = full_buffers.pop(name)
        local = keep(buffer, full_buffer) if full_buffer is not None and wanted(buffer) else None
        if local is not None:
            buffers_of(owner)[name] = local


def _empty(tensor: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    if tensor.shape == shape:
        return torch.empty_like(tensor, device=device, requires_grad=False)  # keeps the memory format
    return torch.empty(shape, dtype=tensor.dtype, device=device)


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Move a parameter from the meta device: torch refuses `parameter.data = data` between kinds of devices."""
    moved = nn.Parameter(data, parameter.requires_grad)
    # `torch.utils.swap_tensors` refuses parameters with weak references, which recurrent layers keep of their weights.
    move_tensor_hooks(parameter, moved)
    swap_tensor_impl(parameter, moved)
