"""Shards state over the replicas (ZeRO), inside each pipeline stage and tensor shard: `zero_stage` of the strategies.

    stage   optimizer state     gradients                parameters
    0       full                full                     full
    1       a slice             full, averaged           full; a slice while the optimizer steps
    2       a slice             a slice                  full; a slice from the end of backward to the end of the step
    3       a slice             a slice                  a slice; full while a layer computes

After a step, each replica gathers the parameters that other replicas updated. Stage 1 leaves `.grad` unchanged.
Stage 2 frees gradients as it sends their buckets. Torch's optimizers step on slices with the same number of dimensions.
The user's hooks, and optimizers of the user that compute with full tensors, see full parameters, gradients and states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Optional, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import ParallelState, Patches
from lightning_parallel.compat.torch import compiled_call_of, has_compiled_calls
from lightning_parallel.compression import Reducer
from lightning_parallel.data_parallel import ParameterShards, ParameterSlices, check_divisible, put_data
from lightning_parallel.pipeline.layer_stack import find_layer_stacks
from lightning_parallel.strategies.checks import check_parameters
from lightning_parallel.strategies.optimizers.checks import Needs, check_sliced, steps_in_turns
from lightning_parallel.strategies.options import check_choice
from lightning_parallel.strategies.ranks.replicas import equalize
from lightning_parallel.tensor.sharded import CompiledLayer

__all__ = [
    "Reshard",
    "UnitSharding",
    "ZeroStage",
    "begin_shards",
    "check_on_host",
    "check_zero_stage",
    "divide_optimizers",
    "follow_other_steps",
    "gather_late",
    "make_slices",
    "refuse_zero_stage",
    "settle_before_graphs",
]

ZeroStage = Literal[0, 1, 2, 3]
"""0 shards nothing, 1 shards the optimizer state, 2 also the gradients, 3 also the parameters."""


Reshard = Literal["auto", "layer", "step"]
"""How long full parameters stay, with `zero_stage=3`."""


def check_zero_stage(stage: Any, reshard: Any, compression: Optional[Reducer]) -> None:
    """Check the arguments of a strategy, before any process is started.

    Raises:
        ValueError: If there is no such stage, or an argument does not go with another one.
    """
    # `True` equals 1, but a flag is most likely a misplaced argument.
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in get_args(ZeroStage):
        raise ValueError(f"`zero_stage` must be 0, 1, 2 or 3; got {stage!r}")
    if stage in (2, 3) and compression is not None:
        raise ValueError(
            f"`compression` gives every replica the full mean gradient, but `zero_stage={stage}` keeps only a slice of"
            " it. Use `zero_stage=1`, which shards only the optimizer state, or no compression"
        )
    check_choice("reshard", reshard, Reshard)
    if reshard != "auto" and stage != 3:
        raise ValueError(
            f"`reshard` needs `zero_stage=3`, which gathers full parameters and frees them again; got {reshard!r} with"
            f" zero_stage={stage}. Set `zero_stage=3`, or leave out `reshard`"
        )


def refuse_zero_stage(stage: Any) -> None:
    """Refuse any stage but 0, for replicas that step independently.

    Raises:
        ValueError: If another one is given.
    """
    if stage != 0:
        raise ValueError(
            f"`zero_stage` must be 0 with LocalSGDStrategy; got {stage!r}. Each replica takes its own steps and"
            " needs the full optimizer state. HybridParallelStrategy shards the optimizer state"
        )


def make_slices(
    stage: ZeroStage,
    module: LightningModule,
    groups: MeshGroups,
    last: ParameterSlices | None = None,
) -> ParameterSlices | None:
    """Return the slices of a module's parameters for a `fit`; None without ZeRO or with one replica.

    Args:
        stage: The ZeRO stage.
        module: The module.
        groups: The mesh's groups.
        last: The slices of the last run, or the shards of this run.

    Raises:
        ValueError: On every rank, if a parameter cannot be divided, or the module trains in a way that needs full
            gradients.
    """
    if stage == 0 or groups.gradients.size == 1:
        return None
    with comm.failing_together(groups.world):
        if stage >= 2:
            _check_gradients_unneeded(module, stage)
        if last is not None and last.keeps_slices:
            last.adopt(dict(module.named_parameters()))
            slices = last
        else:
            slices = ParameterSlices(dict(module.named_parameters()), groups.gradients)
        if stage >= 2:
            # From backward on, parameters are narrow, and a hook may save the module before the step.
            slices.keep_states_whole(module)
        if not slices.keeps_slices:
            gather_late(slices, module)
    return slices


def gather_late(slices: ParameterSlices, module: nn.Module) -> None:
    """Let the replicas gather the slices of a step under the next forward, if compiled code goes with it."""
    slices.gather_late(module)
    compiled = [each for each in module.modules() if has_compiled_calls(each)]
    # Layers of `compile_layers` gather before they run. Other compiled code would leave its graph at each parameter.
    slices.gathers_late = all(isinstance(compiled_call_of(each), CompiledLayer) for each in compiled)


def settle_before_graphs(slices: ParameterSlices, patches: Patches) -> None:
    """Wait for all parameters before a CUDA graph is recorded or runs, until `patches` are undone."""
    for name in ("capture_begin", "replay"):
        own = getattr(torch.cuda.CUDAGraph, name)

        def settled(graph: Any, *args: Any, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
            slices.settle()  # a graph reads memory without a function of the parameter
            return own(graph, *args, **kwargs)

        patches.replace(torch.cuda.CUDAGraph, name, settled)


def begin_shards(
    stage: ZeroStage,
    module: LightningModule,
    groups: MeshGroups,
    gate: Callable[[str], None],
    last: ParameterSlices | None,
) -> ParameterSlices | None:
    """Return the object that keeps slices of a module's parameters, for a run of stage 3; else the slices given.

    Args:
        stage: The ZeRO stage.
        module: The module, whose parameters may lack data.
        groups: The mesh's groups.
        gate: Called before each message that gathers parameters.
        last: The slices of the last run.

    Raises:
        ValueError: On every rank, if a parameter cannot be divided, or the module trains in a way that needs full
            gradients.
    """
    if stage != 3 or groups.gradients.size == 1:
        return last
    has_shards = last is not None and last.keeps_slices
    with comm.failing_together(groups.world):
        if module.trainer.state.fn == TrainerFn.FITTING:
            _check_gradients_unneeded(module, stage)
        check_divisible(dict(module.named_parameters()))
        if not has_shards:
            check_parameters(module)
    return last if has_shards else ParameterShards(groups.gradients, gate)


def take_shards(
    state: ParallelState, stage: ZeroStage, groups: MeshGroups, last: ParameterSlices | None
) -> ParameterSlices | None:
    """Return the slices with which a run begins; every rank must call it.

    Args:
        state: The state of the module, whose parameters an earlier run may have left sharded.
        stage: The ZeRO stage.
        groups: The mesh's groups.
        last: The slices of the last run.

    Raises:
        ValueError: On every rank, if the earlier run had other replicas.
    """
    shards = state.parameter_shards
    if shards is None or not shards.keeps_slices:
        return last
    with comm.failing_together(groups.world):
        shards.reopen(groups.gradients, state.replica_order or (lambda operation: None))
    if stage == 3:
        return shards
    shards.restore()
    return last


class UnitSharding:
    """Shards the parameters of a module over the replicas, each unit as soon as its parameters have data.

    So a rank holds its slices and one unit in full, at most. Every rank must make the parameters in the same order.

    Args:
        module: The module, with its shards of the tensor axis; parameters may lack data.
        groups: The mesh's groups.
        device: The device of the slices.
        shards: Takes the units; it may have some of them.
        holds: Whether this rank, as a pipeline stage, holds any of a parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: MeshGroups,
        device: torch.device,
        shards: ParameterSlices,
        holds: Callable[[Tensor], bool] = lambda parameter: True,
    ) -> None:
        self._state = ParallelState.of(module)
        self._replicas = groups.gradients
        self._device = device
        self._shards = shards
        self._waiting: list[tuple[dict[str, nn.Parameter], set[int]]] = []
        for unit in units_of(module):
            mine = {name: p for name, p in unit.items() if holds(p) and not shards.divides(p)}
            without_data = {id(p) for p in mine.values() if p.is_meta}
            if without_data:
                self._waiting.append((mine, without_data))
            elif mine:
                self._shard(mine)

    def made(self, parameter: nn.Parameter, is_lost: bool) -> bool:
        """Note that a parameter has data; shards its units that are complete.

        Args:
            parameter: The parameter.
            is_lost: Whether this rank has failed, so that the parameter has no data.

        Returns:
            Whether any replica has failed.
        """
        for unit, without_data in self._waiting:
            if id(parameter) in without_data:
                without_data.remove(id(parameter))
                if not without_data:
                    is_lost = comm.on_any_rank([is_lost], self._replicas)[0]
                    if not is_lost:
                        self._shard(unit)
        return is_lost

    def _shard(self, unit: Mapping[str, nn.Parameter]) -> None:
        for parameter in unit.values():
            gradient = parameter.grad
            moved = None if gradient is None else gradient.to(self._device)
            put_data(parameter, parameter.data.to(self._device), moved)
        # Each replica has built its model, perhaps from other random numbers.
        equalize(unit, self._replicas)
        self._shards.adopt(unit)
        self._state.parameter_shards = self._shards


def units_of(module: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return the parameters that are gathered together: each repeated layer, and runs of other parameters."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    try:
        layers = find_layer_stacks(module, 1)[0].layers
    except ValueError:  # no repeated layers
        layers = ()
    units = [{names[p]: p for p in layer.parameters()} for layer in dict.fromkeys(layers)]
    inside = {name for unit in units for name in unit}
    limit = max([_UNIT_BYTES, *(sum(p.nbytes for p in unit.values()) for unit in units)])
    rest: list[dict[str, nn.Parameter]] = []
    size = 0
    for parameter, name in names.items():
        if name in inside:
            size = limit  # parameters before and after the layers are used at other times
        elif rest and size + parameter.nbytes <= limit:
            rest[-1][name] = parameter
            size += parameter.nbytes
        else:
            rest.append({name: parameter})
            size = parameter.nbytes
    return [unit for unit in (*units, *rest) if unit]


_UNIT_BYTES = 1 << 20


def _check_gradients_unneeded(module: LightningModule, stage: int) -> None:
    """Refuse modules that need full gradients; `hook_watch` watches hooks that read them."""
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"`{kind}` optimizes manually and may need its gradients for several steps, but `zero_stage={stage}` frees"
            " them after the backward pass. Use `zero_stage=1`"
        )
    if is_overridden("optimizer_zero_grad", module):
        raise ValueError(
            f"`{kind}` overrides `optimizer_zero_grad`, but `zero_stage={stage}` keeps no gradient after a step. Use"
            " `zero_stage=1`, and `accumulate_grad_batches` to add up gradients"
        )


def divide_optimizers(
    optimizers: Sequence[Optimizer],
    slices: ParameterSlices,
    patches: Patches,
    shown: Callable[[Optimizer], AbstractContextManager[None]] | None = None,
) -> None:
    """Let each replica's optimizers update slices, until `patches` are undone; every rank must call it.

    Args:
        optimizers: The optimizers.
        slices: The slices of the replicas.
        patches: Undo the change.
        shown: Runs around the step of an optimizer, to show full tensors to it.
    """
    for optimizer in optimizers:
        # This function runs again when optimizers change. A second wrapper of `step` would gather twice.
        if not slices.has_divided(optimizer):
            slices.divide(optimizer, patches, shown, slices.host is not None and steps_in_turns(optimizer))


def check_on_host(needs: Mapping[Optimizer, Needs]) -> None:
    """Refuse optimizers that cannot step in host memory.

    Args:
        needs: The needs of each optimizer.

    Raises:
        ValueError: If an optimizer needs the full model, several evaluations of its closure, or CUDA graphs.
    """
    for optimizer, need in needs.items():
        name = type(optimizer).__name__
        if any(base.__name__ == "LBFGS" for base in type(optimizer).__mro__):
            raise ValueError(
                f"`{name}` evaluates its closure several times in a step. The closure needs the parameters on the"
                " device, but `cpu_offload` steps in host memory. Use an optimizer with one evaluation (SGD, Adam,"
                " AdamW, ...), or leave out 'optimizer'"
            )
        if need is Needs.MODEL:
            raise ValueError(
                f"`{name}` computes with all full tensors at once, which ranks gather on their devices, but"
                " `cpu_offload` steps in host memory. Use an optimizer that updates each tensor by itself (AdamW, Muon,"
                " Adafactor, ...), or leave out 'optimizer'"
            )
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise ValueError(f"`{name}` must have capturable=False with `cpu_offload`: it steps in host memory")


def follow_other_steps(slices: ParameterSlices, world: Group, patches: Patches) -> None:
    """Divide the steps of optimizers that the module's own `optimizer_step` brings, once a closure made them narrow.

    The first step of such an optimizer has updated slices, which no other code would gather.
    """

    def take(optimizer: Optimizer) -> None:
        # The step has already run with slices, so it is too late to show full tensors.
        with comm.failing_together(world):
            check_sliced([optimizer], slices.group.size)
        divide_optimizers([optimizer], slices, patches)
        slices.gather_step(optimizer)

    slices.watch_steps(take)
