"""Analyze a model for a pipeline: where each part is used, its cost, and the best split.

    analyze(module, num_ranks, example=(step, microbatch)) -> PipelinePlan

The user's step runs on placeholders, so nothing is computed and the parameters may be on the meta device. A parameter
used before the first layer belongs to the first stage, and one used after the last layer to the last stage. Between two
layers it belongs to the stage of the first of the two. Then every stage runs alone, also without data. So a model that
cannot be split is refused before anything is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.dry_runs import Boundaries, dry_run_stages
from lightning_parallel.pipeline.layer_stack import (
    LayerStack,
    cut_units,
    find_layer_stack,
    find_layer_stacks,
    with_enough_layers,
)
from lightning_parallel.pipeline.measure import STATE_COPIES, count_parameters, is_large, measure
from lightning_parallel.pipeline.module_use import ModuleUse, Step, trace_in_order, use_by_registration
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan, PlannedParameter, device_of
from lightning_parallel.pipeline.recomputation import layers_to_recompute
from lightning_parallel.pipeline.recomputed_set import OPTIONS, cheapest_set, mixed_costs, recomputed_layers
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, activations_held, build_schedule
from lightning_parallel.pipeline.search import Balance, Costs, MemoryLimitError, cut_layers
from lightning_parallel.pipeline.simulate import Cost, Link, simulate, validate
from lightning_parallel.pipeline.skips import Places, Skips, find_skips
from lightning_parallel.pipeline.stage import InterceptedModel
from lightning_parallel.step_trace.record import StepTrace, record_step
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["analyze"]


def analyze(
    module: nn.Module,
    num_ranks: int,
    schedule: str | Schedule | Callable[[Costs, int], Schedule] = "1f1b",
    *,
    num_microbatches: int | None = None,
    virtual_stages: int | None = None,
    example: tuple[Step, Any] | None = None,
    trace: StepTrace | None = None,
    layers: str = "auto",
    balance: Balance = "auto",
    memory_limit_bytes: float | None = None,
    copies: float = STATE_COPIES,
    device: torch.device | None = None,
    link: Link | None = None,
    sync_group: Group | None = None,
    recomputation: str | int = "off",
    offloads_inputs: bool = False,
) -> PipelinePlan:
    """Decide how `module` is split over `num_ranks` ranks; every rank with the same arguments decides the same.

    Args:
        module: The full model; its parameters may be on the meta device. It is not changed.
        num_ranks: Ranks of the pipeline.
        schedule: A schedule for as many ranks, or its name. Or a function that makes one from the costs of the layers
            and the number of times the stages follow each other.
        num_microbatches: For a schedule by name; by default four per rank.
        virtual_stages: For a schedule by name.
        example: A step and a microbatch for it, to trace where each module is used. Without it, modules registered
            before the layers are assumed to be used before them.
        trace: The record of that step, if there is one; else the step is recorded.
        layers: Dotted name of the repeated layers, or `auto`; commas join several that follow each other.
        balance: How to split the layers, see `cut_layers`. `auto` measures if there is an `example`, and counts
            parameters otherwise.
        memory_limit_bytes: Most bytes that a stage may hold, for measured split points.
        copies: Bytes for each byte of a trained parameter: itself, its gradient, the state.
        device: Where the stages will compute; by default the device of the parameters.
        link: Between neighbouring ranks, for predictions.
        sync_group: The ranks that must decide the same although each measures for itself; the measurements of its
            first rank count.
        recomputation: The layers whose activations backward computes again; see `layers_to_recompute`. `auto` takes
            the cheapest layers with which each rank stays within `memory_limit_bytes`.
        offloads_inputs: Whether the inputs of these layers wait in host memory.

    Raises:
        ValueError: If the layers cannot be found or split, or the schedule is invalid or for another number of ranks.
        MemoryLimitError: If no layers can be recomputed so that all ranks stay within the limit.
    """
    if isinstance(schedule, str):
        schedule = build_schedule(schedule, num_ranks, num_microbatches or 4 * num_ranks, virtual_stages)
    if device is None:
        device = device_of(module)
    # A schedule that is chosen later has at least one stage per rank.
    num_stages = num_ranks if callable(schedule) else schedule.num_stages
    # Only a trace can tell whether several containers follow each other, and how often layers are called. Without one,
    # the user has to name them.
    if example is None:
        trace = None
        stacks = [find_layer_stack(module, num_stages, layers)]
    else:
        stacks = find_layer_stacks(module, num_stages, layers, traced=True)
        trace = trace or record_step(module, *example, device)
    analysis = _Analysis(
        module,
        num_ranks,
        schedule,
        example,
        trace,
        balance,
        memory_limit_bytes,
        copies,
        device,
        sync_group,
        recomputation,
        offloads_inputs,
    )
    return analysis.first_plan(stacks, link or Link())


@dataclass
class _Analysis:
    """The arguments of `analyze`, and its steps."""

    module: nn.Module
    num_ranks: int
    schedule: Schedule | Callable[[Costs, int], Schedule]
    example: tuple[Step, Any] | None
    trace: StepTrace | None
    balance: Balance
    memory_limit_bytes: float | None
    copies: float
    device: torch.device
    sync_group: Group | None
    recomputation: str | int
    offloads_inputs: bool

    def first_plan(self, stacks: list[LayerStack], link: Link) -> PipelinePlan:
        """Return the plan of the first stack that can be split."""
        # Report the first failure: it is about the most likely layers, and the rest are further attempts.
        failure: ValueError | None = None
        for stack in stacks:
            try:
                return self.plan_for(stack, link)
            except ValueError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def plan_for(self, stack: LayerStack, link: Link) -> PipelinePlan:
        """Return the plan that splits `stack`."""
        module = self.module
        # Only a trace shows repeated calls and the order of the calls; without one, trust the registration.
        if self.trace is None:
            use = use_by_registration(module, stack)
        else:
            stack, use = trace_in_order(module, stack, self.trace)
            # Only after the trace, which shows how often layers are called.
            stack = with_enough_layers(stack, self.num_ranks)
        if self.recomputation == "auto":
            return self._within_limit(stack, use, link)
        return self._plan_with(self._costs(stack, use, self.recomputation), stack, use, link, self.recomputation)

    def _within_limit(self, stack: LayerStack, use: ModuleUse, link: Link) -> PipelinePlan:
        """Return the plan that recomputes the cheapest layers with which each rank stays within the limit."""
        limit = self.memory_limit_bytes
        if limit is None:
            raise ValueError("recomputation='auto' needs `memory_limit_bytes`; got none")
        costs: dict[str, Costs] = {}
        best: tuple[float, PipelinePlan] | None = None
        failure: MemoryLimitError | None = None
        # The split and the schedule fit with one option for all layers. Then each rank returns to cheaper options.
        for option in OPTIONS:
            costs[option] = self._costs(stack, use, option)
            all_layers = mixed_costs(costs, stack.names, dict.fromkeys(stack.names, option))
            try:
                plan = self._plan_with(all_layers, stack, use, link, option)
                self._check_limit(plan, limit)
            except MemoryLimitError as error:
                if failure is None or error.least_bytes < failure.least_bytes:
                    failure = error
                continue
            plan = self._with_cheaper_options(plan, stack, costs, limit)
            step_s = simulate(plan.schedule, plan.stage_costs, plan.link).makespan_s
            # Uneven stages may take more time than a second run of some layers.
            if best is not None and step_s >= best[0]:
                break
            best = step_s, plan
        if best is None:
            assert failure is not None
            raise failure
        return best[1]

    def _check_limit(self, plan: PipelinePlan, limit: float) -> None:
        most = max(plan.peak_bytes(rank) for rank in range(self.num_ranks))
        if most > limit:
            raise MemoryLimitError(
                f"Each rank must stay within {bytes_text(limit)}; got {bytes_text(most)},"
                f" {bytes_text(most - limit)} more, with {len(plan.recomputed)} of {len(set(plan.layers))} layers"
                " computed again. Use more stages, smaller microbatches, or a schedule that holds fewer activations,"
                " such as `1f1b`",
                most,
            )

    def _with_cheaper_options(
        self, plan: PipelinePlan, stack: LayerStack, costs: dict[str, Costs], limit: float
    ) -> PipelinePlan:
        passes = stack.passes_over(self.num_ranks)
        if passes > 1:
            costs = {name: _held_once(each, passes) for name, each in costs.items()}
        chosen: dict[str, str] = {}
        for rank in range(self.num_ranks):
            mine = dict.fromkeys(
                name for name, stage in zip(plan.layers, plan.stage_of) if plan.schedule.stage_ranks[stage] == rank
            )
            chosen |= cheapest_set(costs, stack.names, mine, partial(plan.peak_bytes, rank), limit)
        mixed = mixed_costs(costs, stack.names, chosen)
        # Ranks may share layers, and the last of them has chosen for all.
        if any(plan.peak_bytes(rank, mixed) > limit for rank in range(self.num_ranks)):
            return plan
        return replace(plan, costs=mixed, recomputed=recomputed_layers(chosen))

    def _plan_with(
        self, costs: Costs, stack: LayerStack, use: ModuleUse, link: Link, recomputation: str | int
    ) -> PipelinePlan:
        """Return the plan for the given costs of the layers."""
        module = self.module
        passes = stack.passes_over(self.num_ranks)
        if passes > 1:
            # A rank holds a layer once, however often the layer is called.
            costs = _held_once(costs, passes)
        schedule = self._schedule_for(stack, costs, passes)
        one_pass = stack.first_pass() if passes > 1 else stack
        # All passes are split alike, so that a rank holds the same layers in each.
        layers_per_stage = self._layers_per_stage(one_pass, costs.of_one_pass(passes), schedule, passes) * passes
        stage_of = tuple(stage for stage, count in enumerate(layers_per_stage) for _ in range(count))

        def stages(layers: set[int]) -> tuple[int, ...]:
            return tuple(sorted({stage_of[layer] for layer in layers}))

        parameters = {
            name: PlannedParameter(
                stages(use.parameters[name]),
                parameter.numel(),
                parameter.numel() * parameter.element_size(),
                parameter.requires_grad,
            )
            for name, parameter in module.named_parameters()
        }
        module_stages = {name: stages(layers) for name, layers in use.modules.items()}
        boundaries: Boundaries = ()
        skips: Skips = ()
        if self.example is not None:
            places = Places(stage_of, {name: found.stages for name, found in parameters.items()}, module_stages)
            assert self.trace is not None
            sites = InterceptedModel(module, stack)
            skips = find_skips(self.trace, sites.site_of, places)
            boundaries = dry_run_stages(sites, places, skips, *self.example, self.device)
        return PipelinePlan(
            model=type(module).__name__,
            container=stack.path,
            layers=stack.names,
            layers_per_stage=layers_per_stage,
            schedule=schedule,
            parameters=parameters,
            buffer_stages=_buffer_stages(module, stack, stage_of, module_stages),
            module_stages=module_stages,
            costs=costs,
            boundaries=boundaries,
            skips=skips,
            link=link,
            direct=None if use.direct is None else tuple(sorted(use.direct)),
            stopped=use.stopped,
            recomputed=layers_to_recompute(stack, recomputation),
        )

    def _costs(self, stack: LayerStack, use: ModuleUse, recomputation: str | int) -> Costs:
        is_auto = self.recomputation == "auto"
        is_needed = self.balance == "measured" or callable(self.schedule) or is_auto
        failure: Exception | None = None
        costs = count_parameters(self.module, stack, use.parameters, self.copies)
        if self.example is not None and (is_needed or self.balance == "auto"):
            args = self.module, stack, use.parameters, *self.example, self.device, self.copies, recomputation
            is_brief = is_large(self.module, self.sync_group)
            try:
                costs = measure(*args, is_needed=is_auto, is_brief=is_brief)
            except ValueError as error:
                failure = error  # the other ranks wait for costs
            if self.offloads_inputs:
                costs = costs.mapped(Cost.offloaded)
            if self.sync_group is not None:
                # Measured times differ from rank to rank, but all ranks must split at the same points.
                costs = comm.broadcast_object(costs, self.sync_group)
        if is_auto and not costs.are_measured:
            raise ValueError(
                "activation_checkpointing='auto' runs the layers by themselves on the first batch, to measure them; got"
                f" {failure or 'no batch'}. Set activation_checkpointing='selective' or 'full'"
            ) from failure
        if is_needed and not costs.are_measured:
            raise ValueError(
                "A measured balance or schedule needs an example batch that the layers can run; use"
                " balance='parameters' and name a schedule"
            )
        return costs

    def _schedule_for(self, stack: LayerStack, costs: Costs, passes: int) -> Schedule:
        schedule = self.schedule
        if callable(schedule):
            # The layers limit the number of stages, so the choice gets the costs of the parts that can be split.
            in_units = costs.in_runs(cut_units(stack))
            has_enough = len(in_units.layers) >= self.num_ranks
            schedule = schedule(in_units if has_enough else costs.in_runs(stack.blocks), passes)
        if schedule.num_ranks != self.num_ranks:
            raise ValueError(
                f"`schedule` must be for the {self.num_ranks} ranks of the pipeline group; got one for"
                f" {schedule.num_ranks}"
            )
        if passes > 1:
            schedule = _for_passes(schedule, passes)
        validate(schedule)
        return schedule

    def _layers_per_stage(
        self, stack: LayerStack, costs: Costs, schedule: Schedule, passes: int = 1
    ) -> tuple[int, ...]:
        """Split by cost; every stage gets parameters if there are enough layers with some.

        Args:
            stack, costs: Of one pass.
            schedule: Of all passes.
            passes: How often the stages of a pass are repeated.
        """
        num_stages = schedule.num_stages // passes
        balance = "parameters" if self.balance == "auto" and not costs.are_measured else self.balance
        if not isinstance(balance, str) and list(balance) == list(balance[:num_stages]) * passes:
            balance = balance[:num_stages]  # a plan lists the layers of all passes
        runs = cut_units(stack)
        # Layers without parameters are split off alone only if there are too few others, or the user counted.
        if len(runs) < num_stages or balance not in ("auto", "measured", "parameters"):
            runs = stack.blocks
        in_runs = costs.in_runs(runs)
        counts = cut_layers(
            in_runs.layers,
            num_stages,
            balance,
            prologue=in_runs.prologue,
            epilogue=in_runs.epilogue,
            memory_cap_bytes=self.memory_limit_bytes,
            in_flight=_in_flight(schedule, num_stages) if self.memory_limit_bytes is not None else None,
        )
        ends = [0, *accumulate(counts)]
        return tuple(sum(runs[start:stop]) for start, stop in pairwise(ends))


def _in_flight(schedule: Schedule, num_stages: int) -> list[int]:
    """Return the most activations of microbatches, over all passes, that each stage of a pass holds at once."""
    peaks = []
    for stage in range(num_stages):
        # Stages are numbered on from pass to pass, so the remainder is the stage of a pass.
        row = [action for action in schedule.rows[schedule.stage_ranks[stage]] if action.stage % num_stages == stage]
        peaks.append(max(activations_held(row), default=0))
    return peaks


def _for_passes(schedule: Schedule, passes: int) -> Schedule:
    """Return the schedule in which the stages follow each other as often as the layers are called.

    Every rank then holds the same layers in each pass. Stages are numbered on from pass to pass, like the stages of
    chunks. A schedule with a multiple of that many stages on each rank has them already.

    Raises:
        ValueError: If it is a table of actions with other stages.
    """
    virtual_stages = schedule.virtual_stages
    chunks = virtual_stages if virtual_stages % passes == 0 else virtual_stages * passes
    ranks = schedule.stage_ranks
    if chunks == virtual_stages and ranks == ranks[: len(ranks) // passes] * passes:
        return schedule
    if schedule.name not in SCHEDULES:
        raise ValueError(
            f"The step calls the layers {passes} times, so the schedule must pass through the ranks as often in the"
            f" same order; got stages on the ranks {list(ranks)}"
        )
    name = SCHEDULES[schedule.name].with_chunks or schedule.name
    return build_schedule(name, schedule.num_ranks, schedule.num_microbatches, chunks)


def _held_once(costs: Costs, passes: int) -> Costs:
    """Return costs that count the memory held by layers in the first pass alone."""
    count = len(costs.layers) // passes
    later = (replace(cost, resident_bytes=0.0) for cost in costs.layers[count:])
    return replace(costs, layers=(*costs.layers[:count], *later))


def _buffer_stages(
    module: nn.Module, stack: LayerStack, stage_of: tuple[int, ...], module_stages: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each buffer; buffers of modules that contain the layers are on all stages."""
    places = {stack.names[mine[0]]: {stage_of[index] for index in mine} for mine in stack.places().values()}
    owners = {name: tuple(sorted(stages)) for name, stages in places.items()} | module_stages
    everywhere = tuple(range(stage_of[-1] + 1))
    found = {}
    for name, _ in module.named_buffers():
        owner = next((owner for owner in owners if name.startswith(f"{owner}.")), None)
        # A copy that no stage calls has an owner with no stages, so its buffers are on all stages as well.
        found[name] = (owner is not None and owners[owner]) or everywhere
    return found
