"""`lightning-parallel inspect`: the sharding and stage tables of one layout, without starting processes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console

from lightning_parallel.cli.projects import batch_of, precision_of, project_of
from lightning_parallel.mesh import CONTEXT, DATA
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.planner.hardware import Cluster, device_named
from lightning_parallel.planner.plans import state_copies
from lightning_parallel.planner.rehearsal import Rehearsal
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.strategies.setup.tables import stage_table
from lightning_parallel.tensor.plan_table import sharding_table

__all__ = ["run_inspect"]

_MICROBATCHES_PER_RANK = 4
_CPU = torch.device("cpu")


def run_inspect(options: argparse.Namespace) -> int:
    """Print the tables of a layout.

    Args:
        options: Options of `project_of`, and `tensor`, `pipeline`, `data`, `schedule`, `microbatches`, `zero_stage`.

    Raises:
        ValueError: If the model cannot be sharded or split so, with the reason.
    """
    project = project_of(options)
    _take_layout(options, project.trainer)
    batch, precision = batch_of(project, options), precision_of(project, options)
    # Any device will do: the tables are the same on every device, and show no times.
    ranks = options.tensor * options.pipeline * options.data
    cluster = Cluster(device_named("H100"), ranks, ranks)
    rehearsal = Rehearsal(
        project.module,
        batch,
        cluster,
        precision=precision,
        sequence_parallel=options.sequence_parallel,
        layers=options.layers,
    )
    console = Console(width=options.width, highlight=False)
    divided = rehearsal.divided(options.tensor)
    if divided.sharding is not None:
        console.print(sharding_table(divided.module, divided.sharding, options.tensor, options.pipeline))
    if options.pipeline > 1:
        console.print(_stages(project.module, rehearsal, options))
        console.print(
            "The times were measured on the CPU of this machine. `lightning-parallel plan` predicts other devices."
        )
    if options.tensor == options.pipeline == 1:
        console.print("Each rank holds the full model. Give `--tensor` or `--pipeline` a number above 1.")
    return 0


def _take_layout(options: argparse.Namespace, trainer: Mapping[str, Any]) -> None:
    """Fill in missing sizes: from the strategy of the script if no size was given, else with 1."""
    strategy, devices, nodes = trainer.get("strategy"), trainer.get("devices"), trainer.get("num_nodes") or 1
    sizes = {"tensor": 1, "pipeline": 1, "data": 1}
    is_asked = any(getattr(options, name) is not None for name in sizes)
    if not is_asked and isinstance(strategy, MeshStrategy) and isinstance(devices, int) and devices > 0:
        mesh = strategy.mesh_for(devices * nodes, nodes)
        # Ranks along the context axis hold the same parameters, too, and ZeRO divides their state.
        alike = mesh.size(DATA, CONTEXT)
        sizes = {"tensor": mesh.tensor_parallel, "pipeline": mesh.pipeline_parallel, "data": alike}
    for name, size in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    if options.zero_stage is None:
        options.zero_stage = strategy.zero_stage if isinstance(strategy, MeshStrategy) else 0


def _stages(module: torch.nn.Module, rehearsal: Rehearsal, options: argparse.Namespace) -> Any:
    microbatches = options.microbatches or _MICROBATCHES_PER_RANK * options.pipeline
    if options.microbatches is None:
        microbatches = max(1, min(microbatches, rehearsal.samples))
    if microbatches > rehearsal.samples:
        raise ValueError(
            f"`--microbatches` must be at most the samples of a batch, {rehearsal.samples}; got {microbatches}"
        )
    plan = analyze(
        rehearsal.divided(options.tensor).module,
        options.pipeline,
        build_schedule(options.schedule, options.pipeline, microbatches),
        example=(rehearsal.step_of(options.tensor), rehearsal.microbatch(microbatches)),
        layers=options.layers,
        device=_CPU,
    )
    return stage_table(plan, state_copies(module), options.data, options.zero_stage)
