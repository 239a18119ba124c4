"""Every layout of a cluster: its memory, the time of a step, and the reason if it is impossible.

The schedule of a layout comes from the search of `schedule="auto"` (`pipeline.search`), with the costs of this layout.
A closed form is the sieve: seconds in which a schedule cannot end. A simulation decides between the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import ceil
from typing import NamedTuple

from lightning_parallel.mesh import AXES, CONTEXT, DATA, TENSOR, Mesh
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule, peak_activation_bytes
from lightning_parallel.pipeline.search import (
    Arguments,
    Costs,
    Rank,
    Workload,
    best_first,
    microbatch_counts,
    rank_of,
    schedule_arguments,
)
from lightning_parallel.pipeline.simulate import Cost, simulate
from lightning_parallel.planner.collective_costs import gradients_s
from lightning_parallel.planner.context_costs import (
    AttentionCosts,
    ContextAxis,
    context_obstacle,
    methods_for,
    total_s,
)
from lightning_parallel.planner.hardware import Cluster
from lightning_parallel.planner.rank_memory import Held, ModelParts, RankMemory, copies_held
from lightning_parallel.planner.rehearsal import PartCosts, Rehearsal, most_microbatches
from lightning_parallel.planner.shared_cores import shared_makespan_s
from lightning_parallel.tensor.context_methods import Method
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["Layout", "LayoutSearch", "StepTime"]

STEP_OPERATIONS, ACTION_OPERATIONS = 3000, 1000
"""Host work of Trainer and strategy for each batch, and of the pipeline's runtime for each action.

The unit is a small operation of torch, whose time scales with the interpreter's speed. The values were fitted to runs
of `benchmarks/plan.py`. On GPUs, the device computes meanwhile.
"""

MOST_RANKS_TRIED = 64
"""Most ranks of a layout that is predicted although a common rule excludes it."""

MOST_BATCH_SIZES = 3
"""Most ways to try, for each pipeline, to load the samples of a step in fewer, larger batches."""

ROUNDS = 3
MOST_ACTIONS = 20_000
"""Longer schedules are simulated for the first rounds of the pipeline. Each further microbatch adds the work of the
busiest rank."""

BUCKET_BYTES = 25 << 20

COMPRESSED_SHARE = 1 / 4
"""Bytes that `Quantize(8)` sends of each byte of a gradient in single precision."""

COMPRESSION_PASSES = 10
"""Reads and writes of all gradients by `Quantize(8)` with error feedback: the residual, the range, both encodings."""


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step by kind; the fields are the kinds.

    Attributes:
        compute: Computation of the busiest rank.
        recomputation: Second runs of layers in backward, because their activations were not kept.
        tensor: Messages of the tensor axis, between its computations.
        context: Messages of the context axis for attention, as far as computation does not hide them.
        pipeline: Waits of the busiest rank: the bubble and transfers.
        cores: Waits for cores while other ranks use them.
        reduction: Gradient all-reduce over the replicas, as far as backward does not hide it.
        optimizer: Update of the parameters.
        overhead: Work of the Trainer and the strategy around these kinds.
    """

    compute: float = 0.0
    recomputation: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    cores: float = 0.0
    reduction: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def by_kind(self) -> dict[str, float]:
        """Return the seconds by the names of the kinds."""
        return dict(vars(self))


@dataclass(frozen=True)
class Layout:
    """A mesh with a schedule and its predictions, or the reason why the layout is impossible.

    Attributes:
        mesh: The axes.
        schedule, microbatches, virtual_stages, warmup: The pipeline.
        layers_per_stage: Number of layers of each stage.
        accumulated: Batches of each replica in an optimizer step.
        samples: Samples of an optimizer step, of all replicas.
        zero_stage: The lowest stage that fits: 1 shards the optimizer's state over the replicas; 2 gradients, too; 3
            also parameters.
        recomputation: The layers whose activations backward computes again; see `layers_to_recompute`.
        method: How attention reads other positions: see `context_parallel_method`; empty without a context axis.
        memory: Bytes of the rank with the highest memory.
        memories: Bytes of each rank of the pipeline.
        step: Seconds of an optimizer step.
        processor_s: Seconds of computation and communication in that step, all ranks together.
        compressed_reduction_s: Seconds of the reduction with `Quantize(8)`, including its kernels; None if replicas
            reduce no full gradients.
        refusal: Reason why the layout cannot run; empty if it can.
        warnings: Common rules that the layout breaks.
        tiled: Whether the loss and MLPs run in tiles; see `HybridParallelStrategy`.
    """

    mesh: Mesh
    schedule: str = "1f1b"
    microbatches: int = 1
    virtual_stages: int = 1
    warmup: float | None = None
    layers_per_stage: tuple[int, ...] = ()
    accumulated: int = 1
    samples: int = 0
    zero_stage: int = 0
    recomputation: str | int = "off"
    method: str = ""
    memory: RankMemory = field(default_factory=RankMemory)
    memories: tuple[RankMemory, ...] = ()
    step: StepTime = field(default_factory=StepTime)
    processor_s: float = 0.0
    compressed_reduction_s: float | None = None
    refusal: str = ""
    warnings: tuple[str, ...] = ()
    tiled: str = "off"

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all replicas together; 0 for an impossible layout."""
        return self.samples / self.step.total if self.step.total and not self.refusal else 0.0

    @property
    def name(self) -> str:
        """Sizes of the axes, such as `data 2 x pipeline 2 x tensor 2`; axes of one rank are left out."""
        sizes = {axis.removesuffix("_parallel"): self.mesh.size(axis) for axis in AXES}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


class _Setting(NamedTuple):
    """The part of a layout that precedes its schedule.

    Attributes:
        mesh: The axes.
        samples: Samples of a replica's batch.
        accumulated: Batches of a replica in a step.
        method: How attention reads other positions; None without a context axis.
    """

    mesh: Mesh
    samples: int
    accumulated: int
    method: Method | None = None


class LayoutSearch:
    """Predicts layouts of a rehearsed model.

    Args:
        rehearsal: Costs of the model's parts.
        copies: See `optimizer_copies`.
        optimizer_s: Seconds of an update, for (bytes of trained parameters, tensors).
        global_batch: Samples of an optimizer step of all replicas; None uses the batches of the replicas' loaders.
        accumulated: Batches of each replica in an optimizer step; `global_batch` overrides it.
        schedules: Names to try.
        microbatches: Values to try; None chooses by the size of the pipeline and the batch.
        action_s: Seconds of the pipeline's runtime per action; by default `ACTION_OPERATIONS` on processors.
        step_s: Seconds of the Trainer per batch; by default `STEP_OPERATIONS` on processors.
        zero_stages: Values of `zero_stage` to try, in this order, until a layout fits.
        offloads: Whether the optimizer steps in host memory.
        recomputation: See `layers_to_recompute`.
        offloads_inputs: Whether the inputs of layers that are computed again wait in host memory.
        larger_batches: Whether a pipeline's loader may merge accumulated batches into one batch. The larger batch has
            more microbatches, and so fewer bubbles.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        copies: float,
        *,
        optimizer_s: tuple[float, float] | None = None,
        global_batch: int | None = None,
        accumulated: int = 1,
        schedules: Sequence[str] = tuple(SCHEDULES),
        microbatches: Sequence[int] | None = None,
        action_s: float | None = None,
        step_s: float | None = None,
        zero_stages: Sequence[int] = (0, 1, 2, 3),
        offloads: bool = False,
        recomputation: str | int = "off",
        offloads_inputs: bool = False,
        larger_batches: bool = False,
    ) -> None:
        self.rehearsal = rehearsal
        self.zero_stages = zero_stages
        self.offloads = offloads
        self.recomputation = recomputation
        self.offloads_inputs = offloads_inputs
        self.larger_batches = larger_batches
        self.cluster: Cluster = rehearsal.cluster
        self.copies = copies
        self.global_batch = global_batch
        self.accumulated = accumulated
        self.schedules = schedules
        self.microbatches = microbatches
        small_s = 0.0 if self.cluster.cores is None else self.cluster.device.launch_s
        self.action_s = ACTION_OPERATIONS * small_s if action_s is None else action_s
        self.step_s = STEP_OPERATIONS * small_s if step_s is None else step_s
        # Adam reads a parameter, its gradient and two moments, and writes all but the gradient.
        per_byte_s = (2 * copies - 1) / self.cluster.device.bytes_per_s
        self.optimizer_s = optimizer_s or (per_byte_s, 0.0)
        self._parts: dict[int, ModelParts] = {}

    # --------------------------------------------------------------------------------------------------- one layout

    def best(self, mesh: Mesh) -> Layout:
        """Return the layout of a mesh with the fastest schedule that fits, or a layout with a refusal."""
        refusal = self.obstacle(mesh)
        if refusal:
            return Layout(mesh, refusal=refusal)
        try:
            batches = self._batches(mesh)
            methods = self._methods(mesh)
        except ValueError as error:
            return Layout(mesh, refusal=_first_line(error))
        found: list[Layout] = []
        # The fastest method first. Slower ones may need less memory.
        for method in methods:
            settings = [_Setting(mesh, *batch, method) for batch in batches]
            found += [layout for setting in settings for layout in self._with_schedules(setting)]
            if any(not layout.refusal for layout in found):
                break
        if not found:
            uncut = self.rehearsal.divided(mesh.tensor_parallel).uncut
            return Layout(mesh, refusal=uncut.partition("\n")[0] or "no schedule can be built for this layout")
        # If no layout fits, the layout that needs the least memory tells most.
        return min(found, key=lambda one: (bool(one.refusal), one.memory.total if one.refusal else one.step.total))

    def obstacle(self, mesh: Mesh) -> str:
        """Return why the model cannot be divided over a mesh, whatever the batch and the memory; empty if it can."""
        if mesh.world_size > MOST_RANKS_TRIED and not self.cluster.is_inside_node(1, mesh.tensor_parallel):
            return "not tried, because tensor parallelism would span nodes"
        try:
            divided = self.rehearsal.divided(mesh.tensor_parallel)
            # The search tries a context axis only where the same mesh without it can be divided.
            attention = self._attention(mesh) if mesh.context_parallel > 1 else AttentionCosts()
        except ValueError as error:
            return _first_line(error)
        layers = 0 if divided.stack is None else len(divided.stack.blocks)
        if mesh.pipeline_parallel > 1 and divided.uncut:
            return divided.uncut.partition("\n")[0]
        if mesh.pipeline_parallel > max(layers, 1):
            return f"{layers} layers are too few for {mesh.pipeline_parallel} stages"
        return context_obstacle(attention, mesh.context_parallel)

    def _attention(self, mesh: Mesh) -> AttentionCosts:
        return self.rehearsal.attention(mesh.tensor_parallel, self.recomputation)

    def _methods(self, mesh: Mesh) -> list[Method | None]:
        """Return the methods of attention by the seconds of their messages, for all samples of a batch."""
        if mesh.context_parallel == 1:
            return [None]
        attention = self._attention(mesh)
        known: dict[Method | None, float] = {
            method: total_s(self._axis(mesh, method).messages(attention, 1.0))
            for method in methods_for(attention, mesh.context_parallel)
        }
        return sorted(known, key=known.__getitem__)

    def _axis(self, mesh: Mesh, method: Method) -> ContextAxis:
        return ContextAxis(method, mesh.context_parallel, mesh.tensor_parallel, self.cluster)

    def _with_schedules(self, setting: _Setting) -> list[Layout]:
        """Return the predicted layouts of a setting, best first."""
        mesh, samples, accumulated, _ = setting
        ranks = mesh.pipeline_parallel
        most = most_microbatches(self.rehearsal.module, samples)
        counts = []
        refused = []
        for count in [1] if ranks == 1 else self.microbatches or microbatch_counts(ranks, most):
            try:
                self._costs(setting, count)
            except ValueError as error:  # a step may fail for few samples
                refused.append(Layout(mesh, refusal=_first_line(error)))
            else:
                counts.append(count)
        if not counts:
            return refused
        workload = self._workload(setting, counts[0])
        predicted = partial(self._predicted, setting, workload)
        if ranks == 1:
            return best_first([("1f1b", 1, 1, 1, None)], predicted)
        arguments = schedule_arguments(ranks, counts, len(workload.layers), workload.passes, schedules=self.schedules)
        return best_first(arguments, predicted, partial(self._bound_s, mesh, workload, accumulated)) or refused

    def _workload(self, setting: _Setting, microbatches: int) -> Workload:
        mesh = setting.mesh
        tensor = mesh.tensor_parallel
        stack = self.rehearsal.divided(tensor).stack
        passes = 1 if stack is None or mesh.pipeline_parallel == 1 else stack.passes_over(mesh.pipeline_parallel)
        parts = self._parts_of(tensor)
        # The last ZeRO stage needs the least memory.
        held = [Held.of(part) for part in (parts.prologue, *parts.layers, parts.epilogue)]
        half_share = sum(held, Held()).half_share
        # In host memory, the state does not count.
        copies = 2.0 if self.offloads else self.copies
        copies = copies_held(copies, _alike(mesh), self._zero_stages(mesh)[-1], half_share)
        sizes = [copies * one.trained_bytes + one.frozen_bytes for one in held]
        # A rank holds a layer once, however often the layer is called.
        in_pass = len(parts.layers) // passes
        sizes[1 + in_pass : -1] = [0.0] * (len(parts.layers) - in_pass)

        @cache
        def rehearsed(count: int) -> Costs:
            parts = self._costs(setting, count).together.parts
            first, *layers, last = (replace(cost, resident_bytes=size) for cost, size in zip(parts, sizes))
            return Costs(tuple(layers), first, last)

        costs = rehearsed(microbatches)
        return Workload(
            costs.layers,
            costs.prologue,
            costs.epilogue,
            measured_microbatches=microbatches,
            overhead_s=self.action_s if mesh.pipeline_parallel > 1 else 0.0,
            # Neighbouring stages are as many ranks apart as a stage has ranks.
            link=self.cluster.link_of(tensor * mesh.context_parallel, mesh.pipeline_parallel),
            passes=passes,
            spare_bytes=self.cluster.device.reserved_bytes + max(one.largest_bytes for one in held),
            rehearsed=rehearsed,
        )

    def _batches(self, mesh: Mesh) -> list[tuple[int, int]]:
        """Return, for each way to load a step, a replica's samples in a batch and its number of batches."""
        samples, accumulated = self._batch(mesh)
        ways = [(samples, accumulated)]
        if self.larger_batches and mesh.pipeline_parallel > 1:
            # Divisors only, so that all batches of a step have the same size.
            fewer = [count for count in range(1, accumulated) if accumulated % count == 0]
            ways += [(samples * accumulated // count, count) for count in fewer[:MOST_BATCH_SIZES]]
        return ways

    def _batch(self, mesh: Mesh) -> tuple[int, int]:
        """Return the samples of a replica's batch, and the number of accumulated batches."""
        loaded = self.rehearsal.samples
        if self.global_batch is None:
            return loaded, self.accumulated
        share, rest = divmod(self.global_batch, mesh.data_parallel)
        if rest or not share:
            raise ValueError(f"{self.global_batch} samples cannot be shared by {mesh.data_parallel} replicas")
        if share <= loaded:
            return share, 1
        accumulated = ceil(share / loaded)
        # All batches of a step must have the same size.
        while share % accumulated:
            accumulated += 1
        return share // accumulated, accumulated

    def _bound_s(self, mesh: Mesh, workload: Workload, accumulated: int, arguments: Arguments) -> float:
        """Return seconds in which no step with these arguments of a schedule can end; see `Workload.bound_s`."""
        name, ranks, microbatches, chunks, _ = arguments
        counts, stages = workload.fastest_cut(ranks * chunks, microbatches)
        work_s = microbatches * sum(workload.work_s(name, ranks, stages))
        held = self._parts_of(mesh.tensor_parallel).held(counts, SCHEDULES[name].stage_ranks(ranks, chunks))
        ends_s = min(self._ends_s(mesh, held, 0.0, zero_stage) for zero_stage in self._zero_stages(mesh))
        shared_s = work_s * _copies(mesh) / self._cores
        step_s = max(workload.bound_s(arguments), shared_s) + self._crowd(mesh) * self.step_s
        return accumulated * step_s + sum(ends_s)

    def _predicted(self, setting: _Setting, workload: Workload, schedule: Schedule) -> tuple[Rank, Layout]:
        """Predict a layout with a schedule; a layout that fits only with other split points gets these."""
        cut = workload.cut(schedule)
        layout = self._layout(setting, workload, schedule, *cut)
        if layout.refusal and setting.mesh.pipeline_parallel > 1:
            try:
                cut = workload.cut(schedule, self.cluster.memory_bytes)
            except ValueError:
                pass  # no split fits: the layout says how much memory is missing
            else:
                layout = self._layout(setting, workload, schedule, *cut)
        return rank_of(schedule, not layout.refusal, layout.step.total, layout.memory.total), layout

    def _layout(
        self, setting: _Setting, workload: Workload, schedule: Schedule, counts: tuple[int, ...], stages: list[Cost]
    ) -> Layout:
        mesh, samples, accumulated, method = setting
        costs = self._costs(setting, schedule.num_microbatches)
        makespan_s = self._makespan_s(schedule, workload, stages)
        crowd = self._crowd(mesh)
        shared_s = makespan_s if crowd == 1 else self._shared_s(mesh, schedule, workload, stages, makespan_s)
        work = workload.work_s(schedule.name, schedule.num_ranks, stages)
        busiest = max(range(len(work)), key=work.__getitem__)
        # The kinds of a step follow the busiest rank alone, because the other ranks wait for it.

        def on_busiest_s(parts: Costs) -> float:
            of_stages = parts.per_stage(counts)
            return schedule.num_microbatches * sum(of_stages[stage].total_s for stage in schedule.stages_of(busiest))

        tensor_s = on_busiest_s(costs.messages)
        context_s = 0.0 if costs.context is None else on_busiest_s(costs.context)
        busy_s = schedule.num_microbatches * work[busiest]
        held = self._parts_of(mesh.tensor_parallel).held(counts, schedule.stage_ranks)
        zero_stage, memories = self._memories(mesh, schedule, stages, costs.compute.epilogue, held, accumulated)
        reduction_s, optimizer_s = self._ends_s(mesh, held, busy_s / 2, zero_stage)
        again = costs.compute.per_stage(counts)
        again_s = schedule.num_microbatches * sum(again[stage].again_s for stage in schedule.stages_of(busiest))
        step = StepTime(
            accumulated * (busy_s - tensor_s - context_s - again_s),
            accumulated * again_s,
            accumulated * tensor_s,
            accumulated * context_s,
            accumulated * max(0.0, makespan_s - busy_s),
            accumulated * (shared_s - makespan_s),
            reduction_s,
            optimizer_s,
            crowd * accumulated * self.step_s,
        )
        found = Layout(
            mesh,
            schedule.name,
            schedule.num_microbatches,
            schedule.virtual_stages,
            schedule.warmup,
            counts if mesh.pipeline_parallel > 1 else (),
            accumulated,
            samples * mesh.data_parallel * accumulated,
            zero_stage,
            self.recomputation,
            method or "",
            max(memories, key=lambda memory: memory.total),
            memories,
            step,
            self._processor_s(mesh, schedule.num_microbatches * sum(work), held, accumulated, zero_stage),
            tiled=self.rehearsal.tiled,
        )
        if _alike(mesh) > 1 and zero_stage < 2:
            compressed_s = crowd * max(self._compressed_s(mesh, one, busy_s / 2, zero_stage) for one in held)
            found = replace(found, compressed_reduction_s=compressed_s)
        return replace(found, refusal=self._over(found), warnings=tuple(self._warnings(found)))

    # --------------------------------------------------------------------------------------------------------- time

    def _costs(self, setting: _Setting, microbatches: int) -> PartCosts:
        """Return the costs of a microbatch."""
        mesh, samples = setting.mesh, setting.samples / microbatches
        # A share of the positions costs as much as this share of the samples: a rank computes its rows of attention.
        costs = self._rehearsed_costs(mesh.tensor_parallel, samples / mesh.context_parallel)
        if setting.method is not None:
            axis = self._axis(mesh, setting.method)
            costs = costs.with_context(axis, self._attention(mesh), samples / self.rehearsal.samples)
        if not self.offloads_inputs:
            return costs
        return replace(costs, compute=costs.compute.mapped(Cost.offloaded))

    def _rehearsed_costs(self, tensor: int, wanted: float) -> PartCosts:
        """Return the costs of so many samples with all activations on the device.

        Parts that run for real are measured at this size, because caches and threads decide their time. Predicted costs
        are interpolated between one sample and the loader's batch.
        """
        loaded = self.rehearsal.samples
        if not self.rehearsal.measured:
            whole, one = (self.rehearsal.costs(tensor, count, self.recomputation) for count in (1, loaded))
            return one.towards(whole, (wanted - 1) / (loaded - 1)) if loaded > 1 else one.scaled(wanted)
        # Only full parts of the batch can run: the nearest size is measured, and its costs are scaled.
        count = max(1, min(loaded, round(loaded / wanted)))
        costs = self.rehearsal.costs(tensor, count, self.recomputation)
        return costs if loaded / count == wanted else costs.scaled(wanted * count / loaded)

    def _makespan_s(self, schedule: Schedule, workload: Workload, stages: list[Cost]) -> float:
        """Return the seconds of forward and backward with one device per rank."""
        played = _played(schedule)
        further = schedule.num_microbatches - played.num_microbatches
        work = workload.work_s(schedule.name, schedule.num_ranks, stages)
        return simulate(played, stages, workload.link, workload.overhead_s).makespan_s + max(work) * further

    def _shared_s(
        self, mesh: Mesh, schedule: Schedule, workload: Workload, stages: list[Cost], alone_s: float
    ) -> float:
        """Return the seconds of forward and backward with fewer cores than ranks."""
        copies = _copies(mesh)
        work = workload.work_s(schedule.name, schedule.num_ranks, stages)
        each_s = sum(work) * copies / self._cores  # of a microbatch, with all cores busy
        if schedule.num_ranks == 1:
            return max(alone_s, schedule.num_microbatches * each_s)
        played = _played(schedule)
        makespan_s = shared_makespan_s(played, stages, workload.link, self._cores, copies, workload.overhead_s)
        return max(alone_s, makespan_s + (schedule.num_microbatches - played.num_microbatches) * each_s)

    def _processor_s(self, mesh: Mesh, work_s: float, held: list[Held], accumulated: int, zero_stage: int) -> float:
        """Return the seconds of all ranks together in a step; `work_s` is a batch on one rank of each stage."""
        copies = _copies(mesh)
        ends_s = sum(self._reduction_s(mesh, one, 0.0, zero_stage) for one in held)
        ends_s += sum(self._update_s(mesh, one, zero_stage) for one in held)
        return copies * (accumulated * (work_s + len(held) * self.step_s) + ends_s)

    @property
    def _cores(self) -> float:
        cores = self.cluster.cores
        return float("inf") if cores is None else cores * self.cluster.num_nodes / self.cluster.threads

    def _crowd(self, mesh: Mesh) -> float:
        """Return the number of ranks that share the cores of one rank."""
        return max(1.0, mesh.world_size / self._cores)

    def _ends_s(self, mesh: Mesh, held: list[Held], backward_s: float, zero_stage: int) -> tuple[float, float]:
        """Return the seconds of the gradient reduction and of the update at the end of a step."""
        # With more ranks than cores, all ranks reduce and update at the same time, so the crowd counts in full.
        # At least half of the work is backward, behind which messages can hide.
        crowd = self._crowd(mesh)
        reduction_s = max(self._reduction_s(mesh, one, backward_s, zero_stage) for one in held)
        return crowd * reduction_s, crowd * max(self._update_s(mesh, one, zero_stage) for one in held)

    def _reduction_s(self, mesh: Mesh, held: Held, backward_s: float, zero_stage: int) -> float:
        """Return the seconds of the gradient reduction that backward does not hide, and of the parameter gather."""
        if _alike(mesh) == 1 or not held.trained_bytes:
            return 0.0
        buckets = ceil(held.trained_bytes / BUCKET_BYTES)

        def bucket_s(op: str) -> float:
            return gradients_s(op, held.trained_bytes / buckets, mesh, self.cluster)

        each_s = bucket_s("reduce_scatter" if zero_stage >= 2 else "all_reduce")
        # Nothing is hidden in a pipeline, where a stage sends after its last backward, nor on shared cores, where
        # messages take time from computation.
        hidden = 0.0 if mesh.pipeline_parallel > 1 or self.cluster.cores is not None else backward_s
        gathered_s = buckets * bucket_s("all_gather") if zero_stage else 0.0
        if zero_stage == 3:
            # Once in forward and once in backward, which hide the gathering of all layers but the first.
            gathered_s = max(2 * bucket_s("all_gather"), 2 * gathered_s - 1.5 * hidden)
        # The last bucket is complete only when backward ends, so nothing hides its reduction.
        return max(each_s, buckets * each_s - hidden * (buckets - 1) / buckets) + gathered_s

    def _compressed_s(self, mesh: Mesh, held: Held, backward_s: float, zero_stage: int) -> float:
        """Return the seconds of `_reduction_s` with gradients compressed by `Quantize(8)`."""
        sent = replace(held, trained_bytes=ceil(held.trained_bytes * COMPRESSED_SHARE))
        # Compression applies to gradients only: the gather of parameters stays at full size.
        gathered_s = self._reduction_s(mesh, held, 0.0, zero_stage) - self._reduction_s(mesh, held, 0.0, 0)
        kernels_s = COMPRESSION_PASSES * held.trained_bytes / self.cluster.device.bytes_per_s
        return kernels_s + self._reduction_s(mesh, sent, backward_s, 0) + gathered_s

    def _update_s(self, mesh: Mesh, held: Held, zero_stage: int) -> float:
        per_byte_s, per_tensor_s = self.optimizer_s
        share = 1 / _alike(mesh) if zero_stage else 1.0
        return share * held.trained_bytes * per_byte_s + held.count * per_tensor_s

    # ------------------------------------------------------------------------------------------------------- memory

    def _parts_of(self, tensor: int) -> ModelParts:
        if tensor not in self._parts:
            self._parts[tensor] = ModelParts.of(self.rehearsal.divided(tensor))
        return self._parts[tensor]

    def _memories(
        self, mesh: Mesh, schedule: Schedule, stages: list[Cost], epilogue: Cost, held: list[Held], accumulated: int
    ) -> tuple[int, tuple[RankMemory, ...]]:
        """Return the first `zero_stage` that fits, or else the last, and the bytes of each rank."""
        logits = stages[-1].activation_bytes - epilogue.activation_bytes
        without_logits = [*stages[:-1], replace(stages[-1], activation_bytes=logits)]
        last = schedule.stage_ranks[-1]

        def memory(rank: int, zero_stage: int) -> RankMemory:
            row = schedule.rows[rank]
            layers = Cost.peak_activation_bytes(row, without_logits)
            of_weight = self.rehearsal.head_gradient_bytes(mesh.tensor_parallel) if rank == last else 0.0
            return RankMemory.of(
                held[rank],
                self.copies,
                accumulates=schedule.num_microbatches > 1 or accumulated > 1,
                activations=layers,
                logits=Cost.peak_activation_bytes(row, stages) - layers + of_weight,
                host_activations=peak_activation_bytes(row, [stage.host_bytes for stage in stages]),
                replicas=_alike(mesh),
                zero_stage=zero_stage,
                reserved=self.cluster.device.reserved_bytes,
                offloads=self.offloads,
            )

        found: tuple[RankMemory, ...] = ()
        zero_stage = 0
        for zero_stage in self._zero_stages(mesh):
            found = tuple(memory(rank, zero_stage) for rank in range(len(held)))
            if max(one.total for one in found) <= self.cluster.memory_bytes:
                break
        return zero_stage, found

    def _zero_stages(self, mesh: Mesh) -> Sequence[int]:
        return self.zero_stages if _alike(mesh) > 1 else (0,)

    def _over(self, layout: Layout) -> str:
        limit = self.cluster.memory_bytes
        if layout.memory.total <= limit:
            return ""
        on_device = {kind: size for kind, size in layout.memory.by_kind().items() if kind != "host"}
        largest = max(on_device.items(), key=lambda item: item[1])
        return (
            f"needs {bytes_text(layout.memory.total)} on a rank, {bytes_text(layout.memory.total - limit)} more than"
            f" there is; the largest part is {largest[0]} ({bytes_text(largest[1])})"
        )

    def _warnings(self, layout: Layout) -> Iterator[str]:
        data, pipeline, context, tensor = layout.mesh.shape
        cluster = self.cluster
        if tensor > 1 and cluster.num_nodes > 1 and not cluster.is_inside_node(1, tensor):
            yield "tensor parallelism spans nodes; its all-reduces delay every layer and cross the slow link"
        is_wide = context > 1 and cluster.num_nodes > 1 and not cluster.is_inside_node(tensor, context)
        if is_wide and layout.method != "ring":
            yield "context parallelism spans nodes; its messages delay every attention and cross the slow link"
        if pipeline > 1 and layout.step.pipeline > 0.25 * layout.step.total:
            samples = layout.samples // (data * layout.accumulated)
            more = "a larger batch, with more microbatches" if layout.microbatches >= samples else "more microbatches"
            yield (
                f"ranks are idle for {layout.step.pipeline / layout.step.total:.0%} of the step; try {more}, or fewer"
                " stages"
            )
        if layout.memory.total > 0.9 * cluster.memory_bytes and not layout.refusal:
            yield "less than a tenth of the memory is free; memory fragmentation may use it up"


def _alike(mesh: Mesh) -> int:
    """Return the number of ranks that hold the same parameters."""
    return mesh.size(DATA, CONTEXT)


def _copies(mesh: Mesh) -> int:
    """Return the number of ranks that run each stage."""
    return mesh.size(DATA, CONTEXT, TENSOR)


def _played(schedule: Schedule) -> Schedule:
    """Return the part of the schedule to simulate: all of it, or the first rounds of a long schedule."""
    count = ROUNDS * schedule.num_ranks
    if sum(map(len, schedule.rows)) <= MOST_ACTIONS or count >= schedule.num_microbatches:
        return schedule
    return build_schedule(schedule.name, schedule.num_ranks, count, schedule.virtual_stages, schedule.warmup)


def _first_line(error: ValueError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if len(lines) == 1 else " ".join(line.strip() for line in lines[:2])
