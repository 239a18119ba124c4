"""Chooses the layers that backward computes again, for a module without stages (`activation_checkpointing="auto"`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.lightning import tell
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.recomputation import Recomputed
from lightning_parallel.pipeline.search import MemoryLimitError
from lightning_parallel.planner.hardware import memory_here
from lightning_parallel.planner.plans import state_copies
from lightning_parallel.planner.rank_memory import Held, RankMemory
from lightning_parallel.step_trace.record import StepTrace
from lightning_parallel.strategies.checks import first_batch, positional_arguments
from lightning_parallel.strategies.steps.effects import changes_undone, side_effects_discarded
from lightning_parallel.strategies.steps.pipeline import step_context
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["layers_within_limit", "least_memory", "tell_recomputed"]


def layers_within_limit(
    module: LightningModule,
    precision: Precision,
    device: torch.device,
    world: Group,
    *,
    layers: str = "auto",
    limit_bytes: float | None = None,
    replicas: int = 1,
    zero_stage: int = 0,
    offloads: bool = False,
    offloads_inputs: bool = False,
    trace: StepTrace | None = None,
) -> dict[str, Recomputed]:
    """Return the cheapest layers to recompute with which the step stays within a limit; every rank must call it.

    A model in one stage is a pipeline of one rank, whose plan knows time and activations of each layer.

    Args:
        module: The module; its training loader gives the batch.
        precision: The plugin whose context the step needs.
        device: Where the step runs.
        world: All ranks. The measurements of its first rank count.
        layers: See `HybridParallelStrategy`.
        limit_bytes: Most bytes of a rank; None takes the memory of the device.
        replicas, zero_stage, offloads: See `RankMemory.of`.
        offloads_inputs: See `analyze`.
        trace: The record of the step, if there is one.

    Raises:
        ValueError: On every rank, if the layers cannot be measured, or the step does not fit even if all layers are
            computed again.
    """
    trainer = module.trainer
    with comm.failing_together(world):
        example = _example(module, precision)
    if limit_bytes is None:
        limit_bytes = least_memory(trainer, device, world)
    sizes = {"replicas": replicas, "zero_stage": zero_stage, "offloads": offloads}
    most, beside = _held(module, limit_bytes, world, sizes)
    if most >= limit_bytes:
        raise MemoryLimitError(
            f"A rank must stay within {bytes_text(limit_bytes)}; got {bytes_text(most)} for parameters, gradients and"
            " optimizer alone, which `activation_checkpointing` does not change. Set `zero_stage` to 1, 2 or 3, use"
            " more ranks, or set cpu_offload=('optimizer',)",
            most,
        )
    planned = partial(analyze, module, 1, num_microbatches=1, example=example, trace=trace, layers=layers)
    with comm.failing_together(world), side_effects_discarded(module), changes_undone(module):
        room = limit_bytes - beside
        try:
            plan = planned(
                memory_limit_bytes=room,
                copies=0,
                device=device,
                sync_group=world,
                recomputation="auto",
                offloads_inputs=offloads_inputs,
            )
        except MemoryLimitError as error:
            raise MemoryLimitError(
                f"The activations must fit in {bytes_text(room)}, which parameters, gradients and optimizer leave of"
                f" {bytes_text(limit_bytes)}; got {bytes_text(error.least_bytes)} with all repeated layers computed"
                " again. Use smaller batches with `accumulate_grad_batches`, a higher `zero_stage`, or more ranks in"
                " tensor and pipeline parallelism",
                max(most, beside + error.least_bytes),
            ) from error
    return dict(plan.recomputed)


def least_memory(trainer: Trainer, device: torch.device, world: Group) -> float:
    """Return the memory of the device with the least; every rank must call it, and all get the same limit."""
    mine = memory_here(device, trainer.strategy.num_processes)  # type: ignore[attr-defined]
    return min(comm.all_gather_object(mine, world))


def _held(module: LightningModule, limit_bytes: float, world: Group, sizes: Mapping[str, Any]) -> tuple[float, float]:
    """Return the most bytes of a rank for parameters, gradients and optimizer: in all, and beside activations."""
    accumulates = (module.trainer.accumulate_grad_batches or 1) > 1
    memory = partial(
        RankMemory.of, Held.of(module.parameters()), state_copies(module), accumulates=accumulates, **sizes
    )
    # Buckets travel when backward has freed activations, so beside activations there is less than without.
    found = memory().total, memory(activations=limit_bytes).total - limit_bytes
    # All ranks decide the same, because each holds other parameters.
    every = comm.all_gather_object(found, world)
    return max(total for total, _ in every), max(beside for _, beside in every)


def _example(module: LightningModule, precision: Precision) -> tuple[Callable[[Any], Any], Any]:
    """Return the training step and its first batch."""
    batch = first_batch(module.trainer, "training_step")
    if batch is None:
        raise ValueError(
            "activation_checkpointing='auto' measures the layers on the first batch; got data that can be read only"
            " once. Set activation_checkpointing='selective' or 'full'"
        )
    index = (0,)[: positional_arguments(module.training_step) - 1]

    def step(part: Any) -> Any:
        with step_context(precision, "training_step"):
            return module.training_step(part, *index)

    return step, batch


def tell_recomputed(recomputed: Mapping[str, Recomputed], count: int) -> None:
    """Say how many of the `count` layers backward computes again."""
    found = [*recomputed.values()]
    kinds = [f"{found.count(how)} {how}" for how in ("selective", "full") if how in found]
    tell(
        f"activation_checkpointing='auto' computes {len(found)} of {count} layers again in backward"
        + (f" ({', '.join(kinds)})." if kinds else ".")
    )
