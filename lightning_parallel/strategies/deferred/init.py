"""Build a model without holding it, then give memory and initial values to the tensors that this rank owns.

    with deferred_init("cuda"):
        model = Model()                  # large tensors have a shape, a dtype and a device, but no data
    held = move_to_meta(model, device)   # the same parameters on the meta device: planned and divided as these
    materialize_owned(model, ...)        # makes each tensor that this rank owns, keeps its shard, and drops the rest

Every bit is the same as without this module, and after the build all random generators stand where they would stand
then. A random operation therefore also runs when it is recorded, on temporaries that are dropped, and the
state of the generator before it is part of the record.

    empty(4096, 4096)        -> recorded
    kaiming_uniform_(w)      -> recorded with the state; runs on a temporary, so that the generator moves on
    w[padding] = 0           -> recorded
    w[0, 0].item()           -> the data are made, and kept until `w` is written
    w.numpy()                -> the data are made and kept: others may write them

Small tensors are made at once, and data that the user brings (numpy arrays, checkpoints) stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import ParallelState, Patches, patched
from lightning_parallel.compat.initialization import initialize_tensors, set_data
from lightning_parallel.compat.torch import (
    TRUNC_NORMAL,
    buffers_of,
    mark_as_parameter,
    move_tensor_hooks,
    swap_tensor_impl,
)
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.random_streams import random_state_kept
from lightning_parallel.strategies.deferred.chain import META, StorageLayout, contents_of, read_part, scratch_reused
from lightning_parallel.strategies.deferred.files import files_deferred
from lightning_parallel.strategies.deferred.tensor import (
    THRESHOLD,
    BuildMode,
    DeferredTensor,
    is_deferred,
    materialize,
    record_initializer,
)
from lightning_parallel.tensor.plan import Sharding, materialize_shards

__all__ = ["THRESHOLD", "PendingInitialization", "deferred_init", "move_to_meta", "materialize_owned", "replace_data"]

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@contextmanager
def deferred_init(device: torch.device | str | None = None, threshold: int = THRESHOLD) -> Iterator[None]:
    """Record how large tensors are made inside the block, instead of making them.

    Tensors that the code itself puts on the meta device (`torch.device("meta")`, `skip_init`) have no record and stay
    there. The context may be entered again for a model that is still deferred, such as to change its dtype. Outside of
    it changes in place are still recorded. All other operations on deferred tensors run at once, and the data are kept
    until the tensor is written or replaced.

    Tensors are deferred in this thread only. Subclasses of `nn.Parameter` get their data at once.

    Args:
        device: Where tensors are made for which the code gives no device, as by `with torch.device(device)`.
        threshold: Number of elements above which a tensor is deferred.
    """
    with (
        scratch_reused(),
        _parameter_subclasses_made(),
        _initializers_recorded(),
        files_deferred(threshold),
        _AssignmentMode(),
        BuildMode(threshold),
    ):
        if device is None:
            yield
        else:
            with torch.device(device):
                yield


# ---------------------------------------------------------------------------------- what does not reach the dispatcher


class _AssignmentMode(TorchFunctionMode):
    """Handles `tensor.data = value`, which never reaches the dispatcher, if only one of the two is deferred."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != _SET_DATA or is_deferred(args[0]) == is_deferred(args[1]):
            return func(*args, **(kwargs or {}))
        target, value = args
        if type(target) in (Tensor, nn.Parameter, DeferredTensor):
            replace_data(target, value.detach())
        else:  # lazy parameters and the like give themselves another class afterwards
            target.data = materialize(value)
        return None


@contextmanager
def _parameter_subclasses_made() -> Iterator[None]:
    """Make the data at once that a subclass of `nn.Parameter` is constructed from.

    A deferred parameter has the class `DeferredTensor` and becomes an `nn.Parameter` later: the subclass would be lost.
    """

    def construct(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is not nn.Parameter and is_deferred(data):
            data = materialize(data)
        return before(cls, data, *args, **kwargs)

    with patched(nn.Parameter, "__new__", staticmethod(construct)) as before:
        yield


@contextmanager
def _initializers_recorded() -> Iterator[None]:
    """Record each initializer that reads or combines its random numbers as one operation."""
    patches = Patches()

    def recorded(initialize: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not is_deferred(tensor):
                return initialize(tensor, *args, **kwargs)
            record_initializer(initialize, tensor, *args, **kwargs)
            return tensor

        return call

    for name in (TRUNC_NORMAL, "orthogonal_"):
        patches.replace(nn.init, name, recorded(getattr(nn.init, name)))
    try:
        yield
    finally:
        patches.undo()


def replace_data(target: Tensor, value: Tensor) -> None:
    """Give `target` the data of `value` and the class that goes with it; it stays the same object everywhere."""
    is_parameter = isinstance(target, nn.Parameter)
    before = type(target)
    if is_parameter:
        value = nn.Parameter(value, target.requires_grad)
    after = type(value)
    # Before the swap, which exchanges the hooks together with the tensors.
    move_tensor_hooks(target, value)
    swap_tensor_impl(target, value)
    # The swap leaves the classes of the Python objects as they were.
    target.__class__ = after
    value.__class__ = before
    mark_as_parameter(target, is_parameter and after is DeferredTensor)


# ------------------------------------------------------------------------------------------ the tensors of one rank


@dataclass
class PendingInitialization:
    """What `move_to_meta` took out of a model, until `materialize_owned` gives its tensors their values.

    Attributes:
        parameters: By `id` of a parameter that is on the meta device now: it, and the deferred tensor that it was.
        buffers: The user's buffers on the meta device, as (module, name, buffer), which have values now.
    """

    parameters: dict[int, tuple[nn.Parameter, Tensor]] = field(default_factory=dict)
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)


def move_to_meta(module: nn.Module, device: torch.device) -> PendingInitialization:
    """Move deferred parameters to the meta device, as which they are planned and divided; they stay the same objects.

    Buffers get values at once: the analysis of a pipeline computes masks and positions with them.

    Returns:
        What `materialize_owned` needs, with what an earlier call has moved for a run that was refused since.
    """
    state = ParallelState.of(module)
    state.pending = held = state.pending or PendingInitialization()
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            if is_deferred(parameter):
                # A second tensor on the same storage, which keeps the record when the parameter leaves it.
                deferred = parameter.detach()
                contents_of(deferred).forget()
                replace_data(parameter, StorageLayout.of(parameter).empty(META))
                held.parameters[id(parameter)] = (parameter, deferred)
        buffers = buffers_of(child)
        for name, buffer in buffers.items():
            if buffer is not None and is_deferred(buffer):
                buffers[name] = materialize(buffer).to(device)
            elif buffer is not None and buffer.is_meta:
                held.buffers.append((child, name, buffer))
    if held.buffers:
        # For the plan alone: in the end all tensors of a module draw their numbers together, in the model's order.
        with random_state_kept():
            initialize_tensors(module, device, wanted=lambda tensor: not isinstance(tensor, nn.Parameter))
    return held


def materialize_owned(
    module: LightningModule,
    device: torch.device,
    groups: MeshGroups,
    sharding: Sharding | None,
    plan: PipelinePlan | None,
    held: PendingInitialization,
    is_shared: bool,
) -> None:
    """Allocate and initialise the parameters without data that this rank owns.

    Args:
        module: The divided module, before the parameters of other stages are freed.
        device: Where the parameters are allocated.
        groups: The mesh's groups.
        sharding: How its layers are divided.
        plan: How it is cut into stages.
        held: What `move_to_meta` returned; emptied.
        is_shared: Take the values of the first rank of all, where ranks may have built the model from other random
            numbers.
    """
    owned: set[int] | None = None
    if plan is not None:
        mine = set(plan.stages_of_rank(groups.pipeline_parallel.rank))
        owned = {id(value) for name, value in module.named_parameters() if mine & set(plan.parameters[name].stages)}

    def holds(tensor: Tensor) -> bool:
        return owned is None or not isinstance(tensor, nn.Parameter) or id(tensor) in owned

    were_deferred = set(held.parameters)
    _make_parameters(held, groups, holds, is_shared)

    # The user's own tensors on the meta device: every module initialises itself, in the order of one process.
    def wanted(tensor: Tensor) -> bool:
        return id(tensor) not in were_deferred

    for owner, name, buffer in held.buffers:
        # Back on meta, to be initialised together with the parameters of their module.
        buffers_of(owner)[name] = buffer
    held.buffers.clear()
    if sharding is not None:
        materialize_shards(module, device, sharding, groups.tensor_parallel, wanted=wanted, holds=holds)
    else:
        initialize_tensors(module, device, wanted=wanted, keep=lambda tensor, full: full if holds(tensor) else None)


def _make_parameters(
    held: PendingInitialization, groups: MeshGroups, holds: Callable[[Tensor], bool], is_shared: bool
) -> None:
    failure: Exception | None = None
    for key in list(held.parameters):
        # Taken out one by one, so that each record is freed before the next tensor is made.
        parameter, deferred = held.parameters.pop(key)
        # Also if this rank holds no part of it: the broadcast needs all ranks.
        if is_shared:
            full = _shared(deferred, groups)
            if holds(parameter):
                _set_part(parameter, full, groups.tensor_parallel)
            del full
        elif holds(parameter) and failure is None:
            try:
                _make_part(parameter, deferred, groups.tensor_parallel)
            except Exception as error:
                failure = error
    # A file may be damaged, or missing on one host.
    comm.raise_together(failure, groups.world)


def _make_part(parameter: nn.Parameter, deferred: Tensor, group: Group) -> None:
    """Give a parameter the part that this rank holds, from a file or from recorded operations."""
    part = read_part(deferred, getattr(parameter, "shard_rule", None), group.rank)
    if part is None:
        _set_part(parameter, materialize(deferred), group)
    else:
        set_data(parameter, part)


def _set_part(parameter: nn.Parameter, full: Tensor, group: Group) -> None:
    rule: Any = getattr(parameter, "shard_rule", None)
    local = full if rule is None else rule.split(full, group.rank)
    # A slice would keep the full tensor alive.
    set_data(parameter, local.clone() if local.untyped_storage().nbytes() > _num_bytes(local) else local)


def _shared(deferred: Tensor, groups: MeshGroups) -> Tensor:
    """Return the full tensor of the first rank; every rank must call it for each tensor, in the same order."""
    if groups.world.rank == 0:
        full = materialize(deferred).contiguous()
    else:
        full = torch.empty(deferred.shape, dtype=deferred.dtype, device=deferred.device)
    return comm.broadcast_(full, groups.world)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
