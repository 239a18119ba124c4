"""Build a model without holding it, then give memory and initial values to the tensors that this rank owns.

    with deferred_init("cuda"):
        model = Model()                  # large tensors have a shape, a dtype and a device, but no data
    held = move_to_meta(model, device)   # moves the same parameters to the meta device, to be planned and sharded
    materialize_owned(model, ...)        # makes each tensor that this rank owns, keeps its shard, and drops the rest

Every bit is equal to a build without this module, and so are the states of all random generators after the build. A
random operation therefore also runs when it is recorded, on temporaries. The record holds the state of the generator
before the operation.

    empty(4096, 4096)        -> recorded
    kaiming_uniform_(w)      -> recorded with the state; runs on a temporary, so that the generator moves on
    w[padding] = 0           -> recorded
    w[0, 0].item()           -> the data are made, and kept until `w` is written
    w.numpy()                -> the data are made and kept, because code may write into the array

Small tensors are made at once. Data of the user (numpy arrays, checkpoints) stay unchanged.
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
from lightning_parallel.compat.chance import random_state_kept
from lightning_parallel.compat.initialization import initialize_tensors, set_data
from lightning_parallel.compat.torch import (
    TRUNC_NORMAL,
    buffers_of,
    mark_as_parameter,
    move_tensor_hooks,
    swap_tensor_impl,
)
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
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

__all__ = [
    "THRESHOLD",
    "PendingInitialization",
    "deferred_init",
    "held_by_stage",
    "move_to_meta",
    "materialize_owned",
    "replace_data",
]

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@contextmanager
def deferred_init(device: torch.device | str | None = None, threshold: int = THRESHOLD) -> Iterator[None]:
    """Record the operations that make large tensors inside the block, instead of making the tensors.

    Tensors that the code itself puts on the meta device (`torch.device("meta")`, `skip_init`) have no record and stay
    there. You may enter the context again for a deferred model, for example to change its dtype. After the block,
    changes in place are still recorded. All other operations on deferred tensors run at once, and the data are kept
    until the tensor is written or replaced.

    Tensors are deferred in this thread only. Subclasses of `nn.Parameter` get their data at once.

    Args:
        device: The default device of new tensors, as by `with torch.device(device)`.
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
        else:  # classes such as lazy parameters change their class afterwards
            target.data = materialize(value)
        return None


@contextmanager
def _parameter_subclasses_made() -> Iterator[None]:
    """Make the data of a deferred tensor at once if a subclass of `nn.Parameter` wraps it.

    A deferred parameter has the class `DeferredTensor` and later becomes an `nn.Parameter`, which loses the subclass.
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
    """Give `target` the data and the class of `value`; `target` stays the same Python object."""
    is_parameter = isinstance(target, nn.Parameter)
    before = type(target)
    if is_parameter:
        value = nn.Parameter(value, target.requires_grad)
    after = type(value)
    # Before the swap, which also exchanges the hooks of the tensors.
    move_tensor_hooks(target, value)
    swap_tensor_impl(target, value)
    # The swap does not exchange the classes of the Python objects.
    target.__class__ = after
    value.__class__ = before
    mark_as_parameter(target, is_parameter and after is DeferredTensor)


# ------------------------------------------------------------------------------------------ the tensors of one rank


@dataclass
class PendingInitialization:
    """Holds the deferred tensors between `move_to_meta` and `materialize_owned`, which gives them their values.

    Attributes:
        parameters: By `id` of a parameter now on the meta device: the parameter, and its deferred tensor.
        buffers: The user's buffers on the meta device, as (module, name, buffer). The modules hold values instead now.
    """

    parameters: dict[int, tuple[nn.Parameter, Tensor]] = field(default_factory=dict)
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)


def move_to_meta(module: nn.Module, device: torch.device) -> PendingInitialization:
    """Move deferred parameters to the meta device, to be planned and sharded; they stay the same objects.

    Buffers get values at once: the analysis of a pipeline computes masks and positions with buffers.

    Returns:
        The argument `held` of `materialize_owned`. It includes tensors from an earlier call, if the run was refused.
    """
    state = ParallelState.of(module)
    state.pending = held = state.pending or PendingInitialization()
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            if is_deferred(parameter):
                # A second tensor on the same storage keeps the record after the parameter has left the storage.
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
        # These values serve the plan only. `materialize_owned` later draws the values of all tensors of a module
        # together, in the order of the model, so the generators must not move here.
        with random_state_kept():
            initialize_tensors(module, device, wanted=lambda tensor: not isinstance(tensor, nn.Parameter))
    return held


def materialize_owned(
    module: LightningModule,
    device: torch.device,
    groups: MeshGroups,
    sharding: Sharding | None,
    holds: Callable[[Tensor], bool],
    held: PendingInitialization,
    is_shared: bool,
    made: Callable[[nn.Parameter, bool], bool] = lambda parameter, is_lost: is_lost,
) -> None:
    """Allocate and initialise the parameters without data that this rank owns.

    Args:
        module: The sharded or split module, before the parameters of other stages are freed.
        device: The device of the parameters.
        groups: The mesh's groups.
        sharding: The sharding of its layers.
        holds: The result of `held_by_stage`.
        held: The result of `move_to_meta`; emptied.
        is_shared: Broadcast the values of rank 0, because ranks may have drawn different random numbers.
        made: Called with each parameter once this rank has made its part, or has left it to other stages. It may take
            the data away. The flag tells that this rank has failed before. Returns whether a replica has failed.
    """
    # Before `_make_parameters`, which empties it.
    were_deferred = set(held.parameters)
    _make_parameters(held, groups, holds, is_shared, made)

    # Tensors that the user put on the meta device: every module initialises itself, in the order of one process.
    def wanted(tensor: Tensor) -> bool:
        return id(tensor) not in were_deferred

    for owner, name, buffer in held.buffers:
        # Back on meta, to be initialised together with the parameters of the module.
        buffers_of(owner)[name] = buffer
    held.buffers.clear()

    def complete(parameter: nn.Parameter) -> bool:
        return made(parameter, False)

    if sharding is not None:
        group = groups.tensor_parallel
        materialize_shards(module, device, sharding, group, wanted=wanted, holds=holds, made=complete)
    else:

        def keep(tensor: Tensor, full: Tensor) -> Tensor | None:
            return full if holds(tensor) else None

        initialize_tensors(module, device, wanted=wanted, keep=keep, made=complete)


def held_by_stage(module: nn.Module, group: Group, plan: PipelinePlan | None) -> Callable[[Tensor], bool]:
    """Return a function that tells whether this rank, as a pipeline stage, holds any of a parameter or buffer.

    Args:
        module: The module, before the parameters of other stages are freed.
        group: The pipeline group.
        plan: The plan of its stages; None without a pipeline.
    """
    if plan is None:
        return lambda tensor: True
    mine = set(plan.schedule.stages_of(group.rank))
    owned = {id(value) for name, value in module.named_parameters() if mine & set(plan.parameters[name].stages)}
    return lambda tensor: not isinstance(tensor, nn.Parameter) or id(tensor) in owned


def _make_parameters(
    held: PendingInitialization,
    groups: MeshGroups,
    holds: Callable[[Tensor], bool],
    is_shared: bool,
    made: Callable[[nn.Parameter, bool], bool],
) -> None:
    failure: Exception | None = None
    is_lost = False  # on any replica: the rest is not made
    for key in list(held.parameters):
        # Removed one by one, so that each record is freed before the next tensor is made.
        parameter, deferred = held.parameters.pop(key)
        # Even if this rank holds no part of the parameter: the broadcast needs all ranks.
        if is_shared:
            full, error = _shared(deferred, groups)
            failure = failure or error
            if holds(parameter):
                _set_part(parameter, full, groups.tensor_parallel)
            del full
        elif holds(parameter) and failure is None and not is_lost:
            try:
                _make_part(parameter, deferred, groups.tensor_parallel)
            except Exception as error:
                failure = error
        del deferred
        is_lost = made(parameter, is_lost or failure is not None)
    # A file may be damaged, or missing on one host. All ranks raise, after all have left the loop.
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
    # A view of the shard would keep the full tensor alive.
    set_data(parameter, local.clone() if local.untyped_storage().nbytes() > _num_bytes(local) else local)


def _shared(deferred: Tensor, groups: MeshGroups) -> tuple[Tensor, Exception | None]:
    """Return the full tensor of the first rank, and its error there; every rank calls it for each tensor, in order."""
    full, failure = None, None
    if groups.world.rank == 0:
        try:
            full = materialize(deferred).contiguous()
        except Exception as error:  # the other ranks wait in the broadcast
            failure = error
    if full is None:
        full = torch.empty(deferred.shape, dtype=deferred.dtype, device=deferred.device)
    return comm.broadcast_(full, groups.world), failure


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
