"""Layouts of a model on a cluster, best first.

    plan(module, batch, Cluster(device_named("H100"), 16, 8)) -> LayoutPlan
    plan.best[0].mesh, plan.yaml(plan.best[0])

Planning needs no communication, and the model may be on the meta device. Samples per second rank the layouts: each
replica gets a batch of the size of `batch`, or its share of `global_batch`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.layer_stack import LayerStack
from lightning_parallel.pipeline.measure import STATE_COPIES
from lightning_parallel.pipeline.recomputed_set import OPTIONS
from lightning_parallel.planner.hardware import Cluster, clock_here, cores_busy
from lightning_parallel.planner.layouts import Layout, LayoutSearch
from lightning_parallel.planner.rank_memory import optimizer_copies
from lightning_parallel.planner.rehearsal import PrecisionName, Rehearsal, without_data
from lightning_parallel.tensor.plan import UserPlan
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["LayoutPlan", "optimizers_of", "plan", "state_copies"]

MEASURABLE_S = 2.0
"""Most seconds of a batch, by the roofline model, for which parts of the model run here."""


@dataclass(frozen=True)
class LayoutPlan:
    """Layouts of a model on a cluster.

    Attributes:
        model: Class of the model.
        cluster: The devices of the planned run.
        precision: As Lightning names it.
        layouts: The best schedule of each mesh: possible layouts by samples per second, then impossible layouts.
        alone: The model on one device.
        measured: Whether the parts of the model ran here.
        notes: Assumptions of the plan.
        accumulated: Batches of each replica in an optimizer step of the project.
    """

    model: str
    cluster: Cluster
    precision: PrecisionName
    layouts: tuple[Layout, ...]
    alone: Layout
    measured: bool
    notes: tuple[str, ...] = ()
    accumulated: int = 1

    @property
    def possible(self) -> tuple[Layout, ...]:
        """Layouts that can run."""
        return tuple(layout for layout in self.layouts if not layout.refusal)

    @property
    def best(self) -> tuple[Layout, ...]:
        """The three layouts with the most samples per second."""
        return self.possible[:3]

    @property
    def obstacle(self) -> str:
        """Say why no layout can run, and suggest a remedy; empty if a layout can run."""
        if self.possible:
            return ""
        cluster = self.cluster
        remedy = "The reason of each layout is listed under `impossible`"
        over = [layout for layout in self.layouts if layout.memory.total > cluster.memory_bytes]
        if over:
            least = min(over, key=lambda layout: layout.memory.total)
            remedy = (
                f"`{least.name}` comes closest: it needs {bytes_text(least.memory.total)} on a rank,"
                f" {bytes_text(least.memory.total - cluster.memory_bytes)} more than there is. Use more devices,"
                " devices with more memory, smaller batches, or a lower precision"
            )
        return (
            f"No layout of {cluster.num_devices} x {cluster.device.name} can run `{self.model}`"
            f" ({len(self.layouts)} layouts tried). {remedy}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert the plan to values for JSON."""
        rows = []
        for layout in self.layouts:
            row = {**asdict(layout), "mesh": layout.mesh.shape, "samples_per_s": layout.samples_per_s}
            rows.append(row)
        limit = self.cluster.memory_bytes
        return {
            "model": self.model,
            "device": self.cluster.device.name,
            "devices": self.cluster.num_devices,
            "memory_bytes": limit,
            "precision": self.precision,
            "measured": self.measured,
            "accumulate_grad_batches": self.accumulated,
            "layouts": rows,
            "notes": list(self.notes),
        }


def _check_numbers(global_batch: int | None, accumulated: int) -> None:
    if global_batch is not None and global_batch < 1:
        raise ValueError(f"`global_batch` must be at least 1 sample; got {global_batch}")
    if accumulated < 1:
        raise ValueError(f"`accumulated` must be at least 1 batch in an optimizer step; got {accumulated}")


def plan(
    module: nn.Module,
    batch: Any,
    cluster: Cluster,
    *,
    precision: PrecisionName = "32-true",
    step: Callable[[nn.Module, Any], Any] | None = None,
    optimizers: Sequence[Optimizer] | None = None,
    global_batch: int | None = None,
    accumulated: int = 1,
    tensor_plan: UserPlan = "auto",
    sequence_parallel: bool = False,
    layers: str = "auto",
    measured: bool | None = None,
    tiled: Literal["auto", "off"] = "off",
    recomputations: Sequence[str | int] = OPTIONS,
    **search: Any,
) -> LayoutPlan:
    """Predict every layout of `cluster`, and sort the layouts.

    Args:
        module: The full model; unchanged. Its parameters may be on the meta device.
        batch: A batch of one replica's loader.
        cluster: Devices and links.
        precision: As Lightning names it.
        step: Runs the step of a module on a batch; by default its `training_step`.
        optimizers: The optimizers; by default from `configure_optimizers`, or Adam if that method fails.
        global_batch: Samples of an optimizer step; None means `accumulated` batches of each loader.
        accumulated: Batches of each replica in an optimizer step, the project's `accumulate_grad_batches`.
        tensor_plan, sequence_parallel, layers, tiled: See `HybridParallelStrategy`.
        measured: Whether to run parts of the model here. None runs small parts on a cluster of processors like this.
        recomputations: Values of `activation_checkpointing` to try, by rising time, until a layout fits.
        search: Further arguments of `LayoutSearch`.

    Raises:
        ValueError: If the step fails on the batch, `layers` names no module, or a number of samples is below 1.
    """
    _check_numbers(global_batch, accumulated)
    if layers != "auto":
        LayerStack.at(module, layers)
    options: dict[str, Any] = {
        "step": step,
        "precision": precision,
        "plan": tensor_plan,
        "layers": layers,
        "tiled": tiled,
    }
    rehearsal = Rehearsal(module, batch, cluster, sequence_parallel=sequence_parallel, **options)
    _check_step(rehearsal, module)
    rehearsal.measured = _is_measurable(rehearsal) if measured is None else measured
    if rehearsal.measured:
        # The costs so far come from the roofline model, which has decided that the parts are small enough to run.
        rehearsal.forget()
    notes = _notes(rehearsal)
    if optimizers is None:
        optimizers, note = optimizers_of(module)
        notes += [note] if note else []
    copies = optimizer_copies(optimizers) if optimizers else float(STATE_COPIES)
    # Keep the other cores busy, as in the run: neighbours slow a core down.
    with cores_busy(_busy_cores(cluster)) if rehearsal.measured else nullcontext():
        if rehearsal.measured and optimizers:
            search.setdefault("optimizer_s", _update_s(optimizers))
        made = partial(LayoutSearch, rehearsal, copies, accumulated=accumulated, **search)
        layouts = [made(global_batch=global_batch, recomputation=option) for option in recomputations]
        found = list(_tried(layouts, cluster))
        found.sort(key=lambda one: (bool(one.refusal), -one.samples_per_s))
        alone = _cheapest([made(recomputation=option) for option in recomputations], Mesh())
    return LayoutPlan(
        _name(module), cluster, precision, tuple(found), alone, rehearsal.measured, tuple(notes), accumulated
    )


def _cheapest(searches: Sequence[LayoutSearch], mesh: Mesh) -> Layout:
    """Return the fastest layout of a mesh over all ways to recompute, or the one that needs the least memory."""
    found = []
    for search in searches:
        layout = search.best(mesh)
        found.append(layout)
        # Other reasons than memory stay. And where nothing has to be sharded, second runs only take time.
        if not layout.memory.total or (not layout.refusal and layout.zero_stage == search.zero_stages[0]):
            break
    return min(found, key=lambda one: (bool(one.refusal), one.memory.total if one.refusal else -one.samples_per_s))


def _notes(rehearsal: Rehearsal) -> list[str]:
    """Return the assumptions of the plan."""
    cluster: Cluster = rehearsal.cluster
    notes = [f"assumed links: {cluster.assumed_links}"] if cluster.assumed_links else []
    if rehearsal.has_guessed and not rehearsal.measured:
        notes.append(
            "the step reads values of tensors, but tensors have no values in a plan. The step got False, or 1. If these"
            " values decide which layers run, the real run may differ"
        )
    return notes


def _busy_cores(cluster: Cluster) -> int:
    """Return the number of cores that other ranks use while one rank computes."""
    return 0 if cluster.cores is None else min(cluster.ranks_per_node - 1, cluster.cores // cluster.threads - 1)


def _check_step(rehearsal: Rehearsal, module: nn.Module) -> None:
    """Refuse a step that fails in every layout."""
    try:
        rehearsal.costs(1, 1)
    except Exception as error:  # the user's code
        raise ValueError(
            f"The step of `{_name(module)}` must run on the batch; got {type(error).__name__}: {error}"
        ) from error
    if rehearsal.samples < 1:
        raise ValueError("The batch to plan by must hold at least 1 sample; got none")


def _tried(searches: Sequence[LayoutSearch], cluster: Cluster) -> Iterator[Layout]:
    """Yield a layout of each mesh, with a context axis where it may be of use.

    Replicas of a batch each are faster than ranks that share its positions, because attention then sends nothing. So
    more ranks share them only if replicas lack memory, or their number does not divide the samples.
    """
    for mesh in meshes(cluster):
        best = 0.0
        for context in _divisors(mesh.data_parallel):
            mesh_of = replace(mesh, data_parallel=mesh.data_parallel // context, context_parallel=context)
            if context > 1 and searches[0].obstacle(mesh_of):
                break
            layout = _cheapest(searches, mesh_of)
            yield layout
            is_easy = not layout.refusal and layout.recomputation == searches[0].recomputation
            if is_easy or layout.samples_per_s < best:
                break
            best = layout.samples_per_s


def meshes(cluster: Cluster) -> Iterator[Mesh]:
    """Yield the meshes of a cluster without a context axis, and without tensor axes longer than two nodes."""
    ranks = cluster.num_devices
    for tensor in _divisors(ranks):
        if tensor <= 2 * cluster.ranks_per_node:
            for pipeline in _divisors(ranks // tensor):
                yield Mesh(ranks // tensor // pipeline, pipeline, tensor_parallel=tensor)


def _divisors(number: int) -> Iterable[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _is_measurable(rehearsal: Rehearsal) -> bool:
    costs = rehearsal.costs(1, 1).compute
    return rehearsal.cluster.device.name == "CPU" and sum(cost.total_s for cost in costs.parts) < MEASURABLE_S


class _PlannedTrainer:
    """Stands in for a Trainer in `configure_optimizers`, without touching a loader.

    Its numbers only affect learning-rate schedules, which cost nothing. Any other attribute comes from the real
    Trainer, if there is one.
    """

    estimated_stepping_batches = num_training_batches = 1000
    max_steps, max_epochs, global_step, current_epoch, world_size, accumulate_grad_batches = 1000, 1, 0, 0, 1, 1

    def __init__(self, trainer: Any) -> None:
        self._own = trainer

    def __getattr__(self, name: str) -> Any:
        if self._own is None:
            raise AttributeError(f"a plan has no `trainer.{name}`")
        return getattr(self._own, name)


def optimizers_of(module: nn.Module) -> tuple[list[Optimizer], str]:
    """Return the optimizers of a LightningModule, on a copy without data; or none, and the reason to assume Adam."""
    try:
        copied = without_data(module)
    except Exception as error:  # `deepcopy` runs the user's code
        return [], f"the optimizer is assumed to be Adam: the model cannot be copied ({error})"
    configure = getattr(copied, "configure_optimizers", None)
    if configure is None:
        return [], "the optimizer is assumed to be Adam: the model has no `configure_optimizers`"
    # Only a LightningModule has the property. Another model may use the name for itself.
    if isinstance(getattr(type(copied), "trainer", None), property):
        try:
            own = module.trainer
        except RuntimeError:  # Lightning raises it outside a run
            own = None
        copied.trainer = _PlannedTrainer(own)  # type: ignore[assignment]
    try:
        found = list(_optimizers(configure()))
    except Exception as error:  # the user's code, which runs outside a `fit` here
        return [], f"the optimizer is assumed to be Adam: `configure_optimizers` raised an error in the plan ({error})"
    return found, "" if found else "the optimizer is assumed to be Adam: `configure_optimizers` returned none"


def state_copies(module: nn.Module) -> float:
    """Return the bytes held for each byte of a trained parameter, by the optimizers of a module; Adam's if unknown."""
    # A method that draws random numbers must not change the numbers of the run.
    with torch.random.fork_rng(devices=[]):
        optimizers, _ = optimizers_of(module)
    return optimizer_copies(optimizers) if optimizers else float(STATE_COPIES)


def _optimizers(value: Any) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, dict):
        yield from _optimizers(value.get("optimizer"))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _optimizers(entry)


def _update_s(optimizers: Sequence[Optimizer]) -> tuple[float, float]:
    """Measure an optimizer update here: seconds per byte of trained parameters, and per tensor."""
    parameters = [value for one in optimizers for group in one.param_groups for value in group["params"]]
    # Tensors of one element cost only the calls. The rest of the time is proportional to the bytes.
    full_s = _timed_update(optimizers[0], [torch.zeros(value.shape, dtype=value.dtype) for value in parameters])
    small_s = _timed_update(optimizers[0], [torch.zeros(1, dtype=value.dtype) for value in parameters])
    num_bytes = sum(value.nbytes for value in parameters)
    return max(0.0, full_s - small_s) / max(1, num_bytes), small_s / max(1, len(parameters))


def _timed_update(optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> float:
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    # A shallow copy with other groups and state, so that the user's optimizer takes no step. A scheduler may have
    # wrapped `step` of the original: drop that attribute.
    probe = copy.copy(optimizer)
    probe.__dict__.pop("step", None)
    probe.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    probe.state = defaultdict(dict)
    clock = clock_here()
    fastest = float("inf")
    for _ in range(4):  # the first update creates the state
        begun = clock()
        type(probe).step(probe)
        fastest = min(fastest, clock() - begun)
    return fastest
