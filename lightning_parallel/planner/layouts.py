"""Every layout of a cluster: its memory, the time of a step, and the reason if it is impossible.

Two passes find the time of a layout. A closed form ranks the schedules of each layout, and the layouts:

    makespan = work of the busiest rank + work of other ranks before its first and after its last microbatch / V

A simulation runs the schedules of the best layouts, for three rounds of the pipeline at most. Each further microbatch
adds the work of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.pipeline_plan import Costs
from lightning_parallel.pipeline.schedule import Schedule, build_schedule
from lightning_parallel.pipeline.search import WITH_CHUNKS, cut_layers, stage_costs
from lightning_parallel.pipeline.simulate import Cost, Link, simulate
from lightning_parallel.planner.collective_costs import collective_s
from lightning_parallel.planner.hardware import Cluster
from lightning_parallel.planner.rank_memory import Held, ModelParts, RankMemory
from lightning_parallel.planner.rehearsal import PartCosts, Rehearsal
from lightning_parallel.planner.shared_cores import shared_makespan_s
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["Layout", "LayoutSearch", "StepTime"]

SCHEDULE_CHOICES: dict[str, tuple[int, ...]] = {
    "1f1b": (1,),
    "gpipe": (1,),
    "zb_h1": (1,),
    "interleaved_1f1b": (2, 4),
    "interleaved_zb": (2, 4),
    "zbv": (2,),
}
"""Schedules to try, with their stages per rank; the first of equally fast schedules wins."""

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
MOST_ACTIONS = 6000
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
        tensor: Messages of the tensor axis, between its computations.
        pipeline: Waits of the busiest rank: the bubble and transfers.
        cores: Waits for cores while other ranks use them.
        reduction: Gradient all-reduce over the replicas, as far as backward does not hide it.
        optimizer: Update of the parameters.
        overhead: Work of the Trainer and the strategy around these kinds.
    """

    compute: float = 0.0
    tensor: float = 0.0
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
        schedule, microbatches, virtual_stages: The pipeline.
        layers_per_stage: Number of layers of each stage.
        accumulated: Batches of each replica in an optimizer step.
        samples: Samples of an optimizer step, of all replicas.
        zero_stage: The lowest stage that fits: 1 shards the optimizer's state over the replicas; 2 gradients, too.
        memory: Bytes of the rank with the highest memory.
        memories: Bytes of each rank of the pipeline.
        step: Seconds of an optimizer step.
        processor_s: Seconds of computation and communication in that step, all ranks together.
        compressed_reduction_s: Seconds of the reduction with `Quantize(8)`, including its kernels; None if replicas
            reduce no full gradients.
        refusal: Reason why the layout cannot run; empty if it can.
        warnings: Common rules that the layout breaks.
    """

    mesh: Mesh
    schedule: str = "1f1b"
    microbatches: int = 1
    virtual_stages: int = 1
    layers_per_stage: tuple[int, ...] = ()
    accumulated: int = 1
    samples: int = 0
    zero_stage: int = 0
    memory: RankMemory = field(default_factory=RankMemory)
    memories: tuple[RankMemory, ...] = ()
    step: StepTime = field(default_factory=StepTime)
    processor_s: float = 0.0
    compressed_reduction_s: float | None = None
    refusal: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all replicas together; 0 for an impossible layout."""
        return self.samples / self.step.total if self.step.total and not self.refusal else 0.0

    @property
    def name(self) -> str:
        """Sizes of the axes, such as `data 2 x pipeline 2 x tensor 2`; axes of one rank are left out."""
        data, pipeline, tensor = self.mesh.shape
        sizes = {"data": data, "pipeline": pipeline, "tensor": tensor}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


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
        schedules: Sequence[str] = tuple(SCHEDULE_CHOICES),
        microbatches: Sequence[int] | None = None,
        action_s: float | None = None,
        step_s: float | None = None,
        zero_stages: Sequence[int] = (0, 1, 2),
        larger_batches: bool = False,
    ) -> None:
        self.rehearsal = rehearsal
        self.zero_stages = zero_stages
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
        # By (tensor ranks, stages, samples): the split points do not depend on the schedule.
        self._cuts: dict[tuple[int, int, int], tuple[int, ...]] = {}

    # --------------------------------------------------------------------------------------------------- one layout

    def candidates(self, mesh: Mesh) -> list[Layout]:
        """Return the possible layouts of a mesh by the closed form, best first; or one layout with a refusal."""
        if mesh.world_size > MOST_RANKS_TRIED and not self.cluster.is_inside_node(1, mesh.tensor_parallel):
            return [Layout(mesh, refusal="not tried, because tensor parallelism would span nodes")]
        try:
            divided = self.rehearsal.divided(mesh.tensor_parallel)
        except ValueError as error:
            return [Layout(mesh, refusal=_first_line(error))]
        layers = 0 if divided.stack is None else len(divided.stack.blocks)
        if mesh.pipeline_parallel > 1 and divided.uncut:
            return [Layout(mesh, refusal=divided.uncut.partition("\n")[0])]
        if mesh.pipeline_parallel > max(layers, 1):
            return [Layout(mesh, refusal=f"{layers} layers are too few for {mesh.pipeline_parallel} stages")]
        try:
            batches = self._batches(mesh)
        except ValueError as error:
            return [Layout(mesh, refusal=str(error))]
        found = []
        passes = 1 if divided.stack is None else divided.stack.passes_over(mesh.pipeline_parallel)
        for per_replica, accumulated in batches:
            for schedule in self._schedules(mesh, per_replica, layers, passes):
                try:
                    found.append(self._predicted(mesh, schedule, per_replica, accumulated, plays=False))
                except ValueError as error:
                    found.append(Layout(mesh, refusal=_first_line(error)))
        if not found:
            return [Layout(mesh, refusal="no schedule can be built for this layout")]
        # If no layout fits, the layout that needs the least memory tells most.
        return sorted(found, key=lambda one: (bool(one.refusal), one.memory.total if one.refusal else one.step.total))

    def simulated(self, layout: Layout) -> Layout:
        """Return the layout with the time from a simulation of its schedule."""
        if layout.refusal or layout.mesh.pipeline_parallel == 1:
            return layout
        pipeline = layout.mesh.pipeline_parallel
        schedule = build_schedule(layout.schedule, pipeline, layout.microbatches, layout.virtual_stages)
        per_replica = layout.samples // (layout.mesh.data_parallel * layout.accumulated)
        return self._predicted(layout.mesh, schedule, per_replica, layout.accumulated, plays=True)

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

    def _schedules(self, mesh: Mesh, samples: int, layers: int, passes: int) -> Iterator[Schedule]:
        pipeline = mesh.pipeline_parallel
        if pipeline == 1:
            yield build_schedule("1f1b", 1, 1)
            return
        counts = self.microbatches or [pipeline * factor for factor in (1, 2, 4, 8)]
        # With fewer samples than the least count, each sample is a microbatch.
        fitting = [count for count in counts if count <= samples] or [max(1, samples)]
        seen = set()
        for name in self.schedules:
            for chunks in _chunks_of(name, passes):
                for count in fitting:
                    if chunks * pipeline > layers:
                        continue
                    try:
                        schedule = build_schedule(name, pipeline, count, chunks)
                    except ValueError:
                        continue  # such as a number of microbatches that its chunks cannot alternate
                    # Several names may give the same actions. To hash the rows of a long schedule takes too long.
                    key = hash(schedule) if len(schedule.rows[0]) < MOST_ACTIONS else (name, chunks, count)
                    if key not in seen:
                        seen.add(key)
                        yield schedule

    def _predicted(self, mesh: Mesh, schedule: Schedule, samples: int, accumulated: int, plays: bool) -> Layout:
        tensor = mesh.tensor_parallel
        costs = self._costs(tensor, samples, schedule.num_microbatches)
        counts = self._cut(tensor, samples, schedule, costs)
        together = _with_repeated_prologue(_stages(costs.together, counts), costs.compute.prologue)
        # Neighbouring stages are as many ranks apart as the tensor axis has ranks.
        link = self.cluster.link_of(tensor, mesh.pipeline_parallel)
        makespan_s = self._makespan_s(schedule, together, link, plays)
        crowd = self._crowd(mesh)
        shared_s = makespan_s if crowd == 1 else self._shared_s(mesh, schedule, together, link, plays, makespan_s)
        work = self._work(schedule, together)
        busiest = max(range(len(work)), key=work.__getitem__)
        # The kinds of a step follow the busiest rank alone, because the other ranks wait for it.
        messages = _stages(costs.messages, counts)
        tensor_s = schedule.num_microbatches * sum(c.total_s for c in _of_rank(schedule, messages, busiest))
        busy_s = schedule.num_microbatches * work[busiest]
        held = self._parts_of(tensor).held(counts, schedule.stage_ranks)
        zero_stage, memories = self._memories(mesh, schedule, together, costs.compute.epilogue, held, accumulated)
        # With more ranks than cores, all ranks reduce and update at the same time, so the crowd counts in full.
        # At least half of the work is backward, behind which messages can hide.
        reduction_s = crowd * max(self._reduction_s(mesh, one, busy_s / 2, zero_stage) for one in held)
        optimizer_s = crowd * max(self._update_s(mesh, one, zero_stage) for one in held)
        step = StepTime(
            accumulated * (busy_s - tensor_s),
            accumulated * tensor_s,
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
            counts if mesh.pipeline_parallel > 1 else (),
            accumulated,
            samples * mesh.data_parallel * accumulated,
            zero_stage,
            max(memories, key=lambda memory: memory.total),
            memories,
            step,
            self._processor_s(mesh, schedule.num_microbatches * sum(work), held, accumulated, zero_stage),
        )
        if mesh.data_parallel > 1 and zero_stage < 2:
            compressed_s = crowd * max(self._compressed_s(mesh, one, busy_s / 2, zero_stage) for one in held)
            found = replace(found, compressed_reduction_s=compressed_s)
        return replace(found, refusal=self._over(found), warnings=tuple(self._warnings(found)))

    # --------------------------------------------------------------------------------------------------------- time

    def _costs(self, tensor: int, samples: int, microbatches: int) -> PartCosts:
        """Return the costs of a microbatch.

        Parts that run for real are measured at this size, because caches and threads decide their time. Predicted costs
        are interpolated between one sample and the loader's batch.
        """
        loaded = self.rehearsal.samples
        wanted = samples / microbatches
        if not self.rehearsal.measured:
            whole, one = self.rehearsal.costs(tensor, 1), self.rehearsal.costs(tensor, loaded)
            return one.towards(whole, (wanted - 1) / (loaded - 1)) if loaded > 1 else one.scaled(wanted)
        # Only full parts of the batch can run: the nearest size is measured, and its costs are scaled.
        count = max(1, min(loaded, round(loaded / wanted)))
        costs = self.rehearsal.costs(tensor, count)
        return costs if loaded / count == wanted else costs.scaled(wanted * count / loaded)

    def _cut(self, tensor: int, samples: int, schedule: Schedule, costs: PartCosts) -> tuple[int, ...]:
        if not costs.compute.layers:
            return ()
        stages = schedule.num_stages
        # Without a pipeline, one stage has all layers for any number of samples.
        key = (tensor, stages, samples if stages > 1 else 0)
        if key not in self._cuts:
            stack = self.rehearsal.divided(tensor).stack
            assert stack is not None
            passes = stack.passes_over(schedule.num_ranks) if stages > 1 else 1
            whole = costs.together.of_one_pass(passes)
            counts = cut_layers(whole.layers, stages // passes, prologue=whole.prologue, epilogue=whole.epilogue)
            # Every pass through the layers has the same split points.
            self._cuts[key] = counts * passes
        return self._cuts[key]

    def _makespan_s(self, schedule: Schedule, stages: list[Cost], link: Link, plays: bool) -> float:
        """Return the seconds of forward and backward with one device per rank."""
        count, ranks = schedule.num_microbatches, schedule.num_ranks
        if ranks == 1:
            return sum(cost.total_s for cost in stages)
        work = self._work(schedule, stages)
        played = _played(schedule)
        if plays and played is not None:
            return simulate(played, stages, link, self.action_s).makespan_s + max(work) * (
                count - played.num_microbatches
            )
        # Zero-bubble schedules fill the bubble with weight gradients.
        rest = sum(work) - max(work)
        if schedule.name in ("zb_h1", "interleaved_zb", "zbv"):
            rest -= 2 * sum(cost.weight_gradient_s for cost in stages) * (ranks - 1) / ranks
        return count * max(work) + max(0.0, rest) / schedule.virtual_stages + 2 * (ranks - 1) * link.latency_s

    def _shared_s(
        self, mesh: Mesh, schedule: Schedule, stages: list[Cost], link: Link, plays: bool, alone_s: float
    ) -> float:
        """Return the seconds of forward and backward with fewer cores than ranks."""
        copies = mesh.data_parallel * mesh.tensor_parallel
        count = schedule.num_microbatches
        each_s = sum(self._work(schedule, stages)) * copies / self._cores  # of a microbatch, with all cores busy
        played = _played(schedule)
        if schedule.num_ranks == 1 or not plays or played is None:
            return max(alone_s, count * each_s)
        makespan_s = shared_makespan_s(played, stages, link, self._cores, copies, self.action_s)
        return max(alone_s, makespan_s + (count - played.num_microbatches) * each_s)

    def _processor_s(self, mesh: Mesh, work_s: float, held: list[Held], accumulated: int, zero_stage: int) -> float:
        """Return the seconds of all ranks together in a step; `work_s` is a batch on one rank of each stage."""
        copies = mesh.data_parallel * mesh.tensor_parallel
        ends_s = sum(self._reduction_s(mesh, one, 0.0, zero_stage) for one in held)
        ends_s += sum(self._update_s(mesh, one, zero_stage) for one in held)
        return copies * (accumulated * (work_s + len(held) * self.step_s) + ends_s)

    def _work(self, schedule: Schedule, stages: list[Cost]) -> list[float]:
        """Return the seconds of work of each rank on a microbatch."""
        # A row repeats its actions for each microbatch.
        actions_s = self.action_s * len(schedule.rows[0]) / schedule.num_microbatches if schedule.num_ranks > 1 else 0.0
        ranks = range(schedule.num_ranks)
        return [actions_s + sum(cost.total_s for cost in _of_rank(schedule, stages, rank)) for rank in ranks]

    @property
    def _cores(self) -> float:
        cores = self.cluster.cores
        return float("inf") if cores is None else cores * self.cluster.num_nodes / self.cluster.threads

    def _crowd(self, mesh: Mesh) -> float:
        """Return the number of ranks that share the cores of one rank."""
        return max(1.0, mesh.world_size / self._cores)

    def _reduction_s(self, mesh: Mesh, held: Held, backward_s: float, zero_stage: int) -> float:
        """Return the seconds of the gradient reduction that backward does not hide, and of the parameter gather."""
        if mesh.data_parallel == 1 or not held.trained_bytes:
            return 0.0
        # Replicas of a rank are as many ranks apart as a replica has ranks.
        stride = mesh.pipeline_parallel * mesh.tensor_parallel
        buckets = ceil(held.trained_bytes / BUCKET_BYTES)

        def bucket_s(op: str) -> float:
            return collective_s(op, held.trained_bytes / buckets, stride, mesh.data_parallel, self.cluster)

        each_s = bucket_s("reduce_scatter" if zero_stage == 2 else "all_reduce")
        # Nothing is hidden in a pipeline, where a stage sends after its last backward, nor on shared cores, where
        # messages take time from computation.
        hidden = 0.0 if mesh.pipeline_parallel > 1 or self.cluster.cores is not None else backward_s
        gathered_s = buckets * bucket_s("all_gather") if zero_stage else 0.0
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
        share = 1 / mesh.data_parallel if zero_stage else 1.0
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

        def memory(rank: int, zero_stage: int) -> RankMemory:
            mine = [stage for stage, owner in enumerate(schedule.stage_ranks) if owner == rank]
            # The limit counts pairs of a stage and a microbatch, over all stages of the rank.
            flight = schedule.max_in_flight[rank] / len(mine)
            activations = flight * sum(stages[stage].activation_bytes for stage in mine)
            logits = flight * epilogue.activation_bytes if schedule.num_stages - 1 in mine else 0.0
            return RankMemory.of(
                held[rank],
                self.copies,
                accumulates=schedule.num_microbatches > 1 or accumulated > 1,
                activations=activations - logits,
                logits=logits,
                replicas=mesh.data_parallel,
                zero_stage=zero_stage,
                reserved=self.cluster.device.reserved_bytes,
            )

        found: tuple[RankMemory, ...] = ()
        zero_stage = 0
        for zero_stage in self.zero_stages if mesh.data_parallel > 1 else (0,):
            found = tuple(memory(rank, zero_stage) for rank in range(len(held)))
            if max(one.total for one in found) <= self.cluster.memory_bytes:
                break
        return zero_stage, found

    def _over(self, layout: Layout) -> str:
        limit = self.cluster.memory_bytes
        if layout.memory.total <= limit:
            return ""
        largest = max(layout.memory.by_kind().items(), key=lambda item: item[1])
        return (
            f"needs {bytes_text(layout.memory.total)} on a rank, {bytes_text(layout.memory.total - limit)} more than"
            f" there is; the largest part is {largest[0]} ({bytes_text(largest[1])})"
        )

    def _warnings(self, layout: Layout) -> Iterator[str]:
        data, pipeline, tensor = layout.mesh.shape
        cluster = self.cluster
        if tensor > 1 and cluster.num_nodes > 1 and not cluster.is_inside_node(1, tensor):
            yield "tensor parallelism spans nodes; its all-reduces delay every layer and cross the slow link"
        if pipeline > 1 and layout.step.pipeline > 0.25 * layout.step.total:
            samples = layout.samples // (data * layout.accumulated)
            more = "a larger batch, with more microbatches" if layout.microbatches >= samples else "more microbatches"
            yield (
                f"ranks are idle for {layout.step.pipeline / layout.step.total:.0%} of the step; try {more}, or fewer"
                " stages"
            )
        if layout.memory.total > 0.9 * cluster.memory_bytes and not layout.refusal:
            yield "less than a tenth of the memory is free; memory fragmentation may use it up"


def _played(schedule: Schedule) -> Schedule | None:
    """Return the schedule with few microbatches for a simulation; None if it still has too many actions."""
    count = min(schedule.num_microbatches, ROUNDS * schedule.num_ranks)
    if count * len(schedule.rows[0]) // schedule.num_microbatches * schedule.num_ranks > MOST_ACTIONS:
        return None
    if count == schedule.num_microbatches:
        return schedule
    return build_schedule(schedule.name, schedule.num_ranks, count, schedule.virtual_stages, schedule.warmup)


def _chunks_of(name: str, passes: int) -> tuple[int, ...]:
    """Return the numbers of stages per rank to try; with repeated passes over the layers, multiples of the passes."""
    choices = SCHEDULE_CHOICES[name]
    if passes == 1:
        return choices
    return () if name in WITH_CHUNKS else tuple(passes * max(1, chunks // 2) for chunks in choices)


def _first_line(error: ValueError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if len(lines) == 1 else " ".join(line.strip() for line in lines[:2])


def _stages(costs: Costs, counts: Sequence[int]) -> list[Cost]:
    if not counts:
        return [Cost.in_sequence([costs.prologue, *costs.layers, costs.epilogue])]
    return stage_costs(costs.layers, counts, prologue=costs.prologue, epilogue=costs.epilogue)


def _with_repeated_prologue(stages: list[Cost], prologue: Cost) -> list[Cost]:
    """Add the prologue's forward to later stages: they recompute masks and positions from the batch."""
    later = (replace(stage, forward_s=stage.forward_s + prologue.forward_s) for stage in stages[1:])
    return [*stages[:1], *later]


def _of_rank(schedule: Schedule, stages: list[Cost], rank: int) -> list[Cost]:
    return [stages[stage] for stage, owner in enumerate(schedule.stage_ranks) if owner == rank]
