"""Makes a module parallel, in this order.

    shard_tensors    plan -> shards each layer over the tensor axis
    cut_stages       first batch -> costs -> schedule -> `PipelinePlan` -> splits the layers over the pipeline axis
    materialize      gives memory on the device, and initial values, to the parameters that this rank owns

A module that has been split stays split. The result is stored with the module, where the next run finds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_parallel import comm
from lightning_parallel.checkpoint import ModelNames, rules_by_name
from lightning_parallel.checkpoint.place import put_file
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.compat import ParallelState, patched
from lightning_parallel.compat.lightning import checkpoint_of_run, tell
from lightning_parallel.compat.torch import buffers_of
from lightning_parallel.mesh import PIPELINE
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.measure import STATE_COPIES
from lightning_parallel.pipeline.microbatch import (
    WHOLE_BATCHES,
    add_to_text,
    num_samples,
    split_by,
    split_lists,
)
from lightning_parallel.pipeline.microbatch import split_batch as split_samples
from lightning_parallel.pipeline.p2p import MessageGroups
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.pipeline.plot import choice_table
from lightning_parallel.pipeline.schedule import SCHEDULES, Kind, Schedule, build_schedule
from lightning_parallel.pipeline.search import (
    Choice,
    Costs,
    MemoryLimitError,
    Workload,
    choose_schedule,
    microbatch_counts,
)
from lightning_parallel.pipeline.stage import CutError
from lightning_parallel.planner.links import measure_link
from lightning_parallel.planner.plans import state_copies
from lightning_parallel.planner.rank_memory import Held, copies_held
from lightning_parallel.planner.rehearsal import most_microbatches
from lightning_parallel.step_trace.record import StepTrace, record_step
from lightning_parallel.strategies.checks import first_batch, positional_arguments, steps_of_run
from lightning_parallel.strategies.options import PipelineOptions, TensorOptions
from lightning_parallel.strategies.ranks import replicas
from lightning_parallel.strategies.ranks.order import MessageOrder
from lightning_parallel.strategies.setup.tables import print_table
from lightning_parallel.strategies.steps.effects import changes_undone, side_effects_discarded
from lightning_parallel.strategies.steps.pipeline import step_context
from lightning_parallel.strategies.steps.recomputed import least_memory
from lightning_parallel.strategies.steps.weights import find_microbatch_weight
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.head import gathered_heads
from lightning_parallel.tensor.plan import Sharding, apply_plan
from lightning_parallel.tensor.plan_table import repeated_work, sharding_table
from lightning_parallel.tracing.spans import bytes_text

__all__ = [
    "PLAN_FILE",
    "cut_stages",
    "message_groups",
    "records_of_run",
    "save_plan",
    "shard_tensors",
]

PLAN_FILE = ".pipeline_plan.json"
"""File in the folder of a checkpoint with the plan for a resumed run; hidden from code that lists checkpoints."""

Records = Callable[[], list[StepTrace]]
"""Returns the records of the steps of the run; empty if its batches can be read only once."""

_MOST_REPEATS = 4
"""The calls of modules in the record of validation, relative to the calls in training."""

_MOST_TIED = 0.5
"""Share of the parameters that may be on several stages without a warning."""


def shard_tensors(
    module: LightningModule, options: TensorOptions, groups: MeshGroups, records: Records
) -> Sharding | None:
    """Shard the layers of `module` over the tensor axis, once. Parameters without data stay without data.

    Args:
        module: The user's full module.
        options: The strategy's arguments.
        groups: The mesh's groups.
        records: Gives the records of the steps of the run.

    Raises:
        ValueError: On every rank: see `make_plan` and `apply_plan`; also if the module was sharded for other ranks.
    """
    group = groups.tensor_parallel
    state = ParallelState.of(module)
    if state.sharding is not None:
        # The full tensors are gone, so the module cannot be sharded in another way.
        if state.tensor_ranks != group.ranks:
            raise ValueError(
                f"An earlier run sharded this module over the ranks {state.tensor_ranks}, so it cannot be sharded"
                f" over {group.ranks}. Build the module anew and load a checkpoint"
            )
        state.order.begin_run()
        return state.sharding
    if group.size == 1:
        return None
    # Make ranks equal before the plan, whose trials compare ranks. Shards of different models would not fit together.
    replicas.start_equal(module, groups.world)
    with comm.failing_together(groups.world):
        record = cache(partial(_of_all_steps, records, group))
        found = make_plan(module, options.plan, group, options.sequence_parallel, record)
    if groups.pipeline_parallel.size > 1:
        found.sequence_regions = [replace(region, sends_pieces=True) for region in found.sequence_regions]
    if options.gather_logits:
        found.styles |= (heads := gathered_heads(found.styles))
        for path in heads:
            found.notes.pop(path, None)
    # Replicas have recorded different batches.
    comm.agree("the tensor plan", {path: type(style).__name__ for path, style in found.styles.items()}, groups.world)
    state.order = MessageOrder(group)
    # Layers send through a guarded group: `order` holds a roll call before a message that may be alone.
    state.sharding = sharding = apply_plan(module, found, group.guarded_by(state.order))
    state.tensor_ranks, state.rules = group.ranks, rules_by_name(module, sharding.shards)
    print_table(sharding_table(module, sharding, group.size, groups.pipeline_parallel.size))
    if advice := repeated_work(sharding):
        rank_zero_warn(advice)
    return sharding


def _of_all_steps(records: Records, group: Group) -> StepTrace | None:
    """Return one record of all steps if all ranks of `group` have the same calls in it, else None."""
    with comm.failing_together(group):
        traces = records()
    trace = reduce(StepTrace.followed_by, traces) if traces else None
    calls = None if trace is None else [(call.path, call.signature) for call in trace.calls]
    # Ranks that see different calls, as of batches of different lengths, would try different blocks and wait.
    return trace if len({*comm.all_gather_object(repr(calls), group)}) == 1 else None


def records_of_run(module: LightningModule, precision: Precision, device: torch.device) -> list[StepTrace]:
    """Record the steps of the run that begins, the main step first; empty if its batches can be read only once.

    A `fit` also validates. Code in `validation_step` may read other weights, and call other layers, than training.
    """
    found: list[StepTrace] = []
    for name in steps_of_run(module.trainer):
        try:
            batch = first_batch(module.trainer, name)
        except Exception:
            if not found:
                raise
            # A loader of validation may need objects that the run makes later. Any other error arises again in the run.
            continue
        if batch is None:
            break
        # A step that generates text in validation calls the layers once for each token.
        most_calls = _MOST_REPEATS * len(found[0].calls) if found and found[0].error is None else None
        found.append(_record_of_step(module, name, batch, precision, device, most_calls))
    return found


def _record_of_step(
    module: LightningModule, name: str, batch: Any, precision: Precision, device: torch.device, most_calls: int | None
) -> StepTrace:
    """Record a step on two samples of its first batch."""
    method = getattr(module, name)
    index = (0,)[: positional_arguments(method) - 1]
    state = module.trainer.state
    stage = RunningStage.VALIDATING if name == "validation_step" else state.stage
    # The calls of a batch of two samples tell as much as the calls of more, and trials of blocks repeat them with data.
    with suppress(ValueError):
        batch = split_samples(batch, max(1, num_samples(batch) // 2))[0]

    def step(part: Any) -> Any:
        with step_context(precision, name), torch.set_grad_enabled(name == "training_step"):
            if name != "training_step":
                # As Lightning does before an evaluation. `record_step` restores the mode.
                module.eval()
            return method(part, *index)

    with side_effects_discarded(module), changes_undone(module), patched(state, "stage", stage):
        return record_step(module, step, batch, device, shorten=True, most_calls=most_calls)


def cut_stages(
    module: LightningModule,
    options: PipelineOptions,
    groups: MeshGroups,
    device: torch.device,
    example: Callable[[], tuple[Callable[[Any], Any], Any] | None],
    materialize: Callable[[PipelinePlan], None],
    is_verified: bool = True,
    zero_stage: int = 0,
    trace: StepTrace | None = None,
    recomputation: str | int = "off",
    offloads_inputs: bool = False,
) -> PipelineEngine:
    """Split `module` over the pipeline axis, once; only the part of this rank is moved to the device.

    Args:
        module: The user's full module.
        options: The strategy's arguments.
        groups: The mesh's groups.
        device: Device of the stages.
        example: Returns a step and its first batch; None without a batch.
        materialize: Gives memory to the part of this rank in a plan.
        is_verified: Whether the self-check runs, which needs batches of copied samples.
        zero_stage: ZeRO stage over the replicas.
        trace: The record of the step, if the tensor plan needed one.
        recomputation, offloads_inputs: See `analyze`.

    Raises:
        ValueError: On every rank: see `analyze`; also if the module was split for other ranks.
    """
    group = groups.pipeline_parallel
    state = ParallelState.of(module)
    if state.engine is not None:
        # The layers of other stages are gone.
        if state.engine.group.ranks != group.ranks:
            raise ValueError(
                f"An earlier run split this module into stages for the ranks {state.engine.group.ranks}, so it"
                f" cannot run on {group.ranks}. Build the module anew and load a checkpoint"
            )
        return state.engine
    # Take the names while the model is full, since checkpoints have their order.
    state.names = ModelNames.of(module)
    # With tensor parallelism, `shard_tensors` has made all ranks equal, and now they hold different shards.
    replicas.start_equal(module, groups.gradients if groups.tensor_parallel.size > 1 else groups.world)
    _move_buffers(module, device)
    recomputed = {"recomputation": recomputation, "offloads_inputs": offloads_inputs}
    planned = partial(_plan, module, options, groups, device, zero_stage, trace, recomputed)
    plan, weight = _agreed_plan(module, options, groups, device, example, is_verified, planned)
    # Materialize before the engine frees other stages: initial values are drawn in the order of the full model.
    materialize(plan)
    state.engine = PipelineEngine(
        module,
        plan,
        group,
        device=device,
        split_batch=options.split_batch,
        microbatch_weight=weight,
        message_groups=message_groups(groups, plan.schedule),
        seed_group=groups.replica,
    )
    state.engine.model.split = state.positions
    # Move after the engine has freed other stages, so that only the part of this rank moves.
    with nullcontext() if state.parameter_shards is None else state.parameter_shards.shown():
        module.to(device)
    _check_cut(state.engine)
    return state.engine


def message_groups(groups: MeshGroups, schedule: Schedule) -> MessageGroups | None:
    """Return a group for each channel of this rank, if a group carries its messages in order (NCCL); None otherwise."""
    if not groups.pipeline_parallel.is_ordered:
        return None
    found = {}
    for kind, is_up in ((kind, is_up) for kind in (Kind.F, Kind.I) for is_up in (True, False)):
        # Make groups only for used channels, since a communicator takes device memory.
        pairs = sorted((s, r) for s, r, way in schedule.channels if way is kind and (r > s) is is_up)
        between = groups.between(PIPELINE, pairs, f"{kind.name} {pairs}")
        found.update({(sender, receiver, kind): group for (sender, receiver), group in between.items()})
    return found


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers to the device of the first batch, because steps compute masks and positions from both."""
    for child in module.modules():
        buffers = buffers_of(child)
        for name, value in buffers.items():
            if value is not None and not value.is_meta:
                buffers[name] = value.to(device)


def _check_cut(engine: PipelineEngine) -> None:
    # Gather the counts, so that every rank raises, not only the rank without a parameter.
    held = comm.all_gather_object(sum(1 for _ in engine.module.parameters()), engine.group)
    if 0 in held:
        raise ValueError(
            f"Every pipeline rank must hold a parameter; got none on rank {held.index(0)} with"
            f" {engine.plan.layers_per_stage} layers per stage. Use fewer stages or give the layers per stage:"
            " balance=[...]"
        )
    if len(engine.tied) > _MOST_TIED * len(engine.plan.parameters):
        rank_zero_warn(
            f"{len(engine.tied)} of {len(engine.plan.parameters)} parameters are on several stages, because the step"
            f" computes with them outside their layers (`{next(iter(engine.tied))}`, ...). For a penalty on all"
            " parameters, use the optimizer's `weight_decay`. For norms to log, use the full tensors of"
            " `self.state_dict()` in a hook such as `on_train_batch_end` [LP025]"
        )


# ---------------------------------------------------------------------------------------------------------- the plan

_ONE_VALUE = "Expected more than 1 value per channel"  # torch, of batch normalisation on a single sample


def _agreed_plan(
    module: LightningModule,
    options: PipelineOptions,
    groups: MeshGroups,
    device: torch.device,
    example: Callable[[], tuple[Callable[[Any], Any], Any] | None],
    is_verified: bool,
    planned: Callable[[tuple[Callable[[Any], Any], Any] | None, int | None], PipelinePlan],
) -> tuple[PipelinePlan, Callable[[Any], float]]:
    """Return the plan of all ranks and the weight of microbatches; an error on one rank raises on every rank."""
    # Read the user's data before the plan: ranks communicate while they plan, and a failed loader would leave them
    # waiting.
    with comm.failing_together(groups.world):
        found = example()
        samples = None if found is None else _samples(split_by(options.split_batch, found[1], 1))
    with comm.failing_together(groups.world), _circumstances_told(module, options, found, samples):
        plan = planned(found, samples)
        plan.check_fits(module, groups.pipeline_parallel.size)
        weight = options.microbatch_weight
        if found is not None and plan.schedule.num_microbatches > 1 and (samples or 2) > 1:
            weight = find_microbatch_weight(
                module, plan, device, *found, options.split_batch, weight, groups.world, tries_copies=is_verified
            )
    # Ranks may have got different plans or arguments from the user.
    comm.agree("the pipeline plan", plan.outline(), groups.pipeline_parallel)
    return plan, weight


@contextmanager
def _circumstances_told(
    module: LightningModule,
    options: PipelineOptions,
    found: tuple[Callable[[Any], Any], Any] | None,
    samples: int | None,
) -> Iterator[None]:
    """Explain errors of the user's step inside the block, where it runs on the first batch.

    Raises:
        ValueError: If batch normalization got too few samples.
    """
    try:
        yield
    except Exception as error:
        if found is not None:
            _tell_circumstances(error, module, options, found[1])
        if _ONE_VALUE in str(error) and samples is not None and samples > 1:
            raise ValueError(
                f"Batch normalization needs two samples in each microbatch, so a batch of {samples} samples must"
                f" have at most {samples // 2} microbatches; got num_microbatches={options.num_microbatches!r}. Set"
                f" `num_microbatches` to at most {samples // 2}, or to 'auto' ({error}) [LP010]"
            ) from error
        raise


def _tell_circumstances(error: Exception, module: LightningModule, options: PipelineOptions, batch: Any) -> None:
    """Explain in an error of the first batch how this step differs from a step on one process."""
    reasons = list(_causes(error))
    if any(isinstance(reason, CutError) for reason in reasons):
        return
    text = "\n".join(map(str, reasons))
    late = [name for name in _LATE_HOOKS if is_overridden(name, module)]
    if late and ("NoneType" in text or any(isinstance(each, (AttributeError, LookupError)) for each in reasons)):
        add_to_text(
            error,
            f"The strategy inspects the first batch before the run, when {', '.join(f'`{name}`' for name in late)}"
            f" of `{type(module).__name__}` had not run yet. Set the inputs of the step in `__init__` or `setup`, or"
            " compute them from the batch in the step itself.",
        )
    if options.num_microbatches != 1:
        hint = split_lists(batch) if options.split_batch is split_samples else ""
        hint = "" if hint in text else hint
        is_raw = any(type(reason).__module__ == "builtins" for reason in reasons[1:]) or "per channel" in text
        if hint or is_raw:
            add_to_text(error, f"The strategy ran the step on one microbatch of the first batch. {WHOLE_BATCHES}{hint}")


_LATE_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _plan(
    module: LightningModule,
    options: PipelineOptions,
    groups: MeshGroups,
    device: torch.device,
    zero_stage: int,
    trace: StepTrace | None,
    recomputed: Mapping[str, Any],
    example: tuple[Callable[[Any], Any], Any] | None,
    samples: int | None,
) -> PipelinePlan:
    if options.plan is not None:
        return options.plan
    ranks = groups.pipeline_parallel.size
    if samples is not None:
        samples = most_microbatches(module, samples)
    limit = options.memory_limit_bytes
    if limit is None and recomputed["recomputation"] == "auto":
        limit = least_memory(module.trainer, device, groups.world)
    request = {**_request(module, options, groups, samples), **recomputed, "memory_limit_bytes": limit}
    known = _plan_of_checkpoint(module, request, groups.world)
    if known is not None:
        return known
    wanted = options.num_microbatches
    counts = microbatch_counts(ranks, samples) if wanted == "auto" else [wanted]
    microbatches = [] if example is None else split_by(options.split_batch, example[1], counts[0])
    # Measure now, while all ranks are here and idle.
    link = measure_link(groups.pipeline_parallel, device, groups.world)

    is_limited = limit is not None or options.schedule == "auto"
    # Of one rank: tensor-parallel ranks may hold shards of other sizes, but must compute the same layers again.
    copies, spare_bytes = comm.broadcast_object(_state_held(module, is_limited, groups, zero_stage), groups.world)
    if counts == [1]:
        spare_bytes = 0
    choices: list[Choice] = []

    def choose(costs: Costs, passes: int) -> Schedule:
        parts = costs.layers, costs.prologue, costs.epilogue
        workload = Workload(*parts, measured_microbatches=counts[0], link=link, passes=passes, spare_bytes=spare_bytes)
        choices.append(choose_schedule(workload, ranks, counts, memory_limit_bytes=limit))
        return choices[-1].best.schedule

    schedule: Schedule | Callable[[Costs, int], Schedule] = choose
    if options.schedule != "auto":
        schedule = build_schedule(options.schedule, ranks, counts[0], options.stages_per_rank, options.warmup)
    planned = partial(
        analyze,
        module,
        ranks,
        schedule,
        layers=options.layers,
        balance=options.balance,
        memory_limit_bytes=limit and max(0.0, limit - spare_bytes),
        copies=copies,
        device=device,
        link=link,
        sync_group=groups.world,
        trace=trace,
        **recomputed,
    )
    traced = None if example is None else (example[0], microbatches[0])
    with _spare_told(limit, spare_bytes):
        plan = planned(example=traced) if module.trainer.training else _plan_for_evaluation(planned, traced)
    # `auto` chooses a schedule for each option, and the plan has one of these schedules.
    for choice in [each for each in choices if each.best.schedule == plan.schedule][-1:]:
        print_table(choice_table(choice))
    return replace(plan, request=request)


@contextmanager
def _spare_told(limit: float | None, spare_bytes: float) -> Iterator[None]:
    """Add the bytes of the largest gradient, which the search subtracts from the limit, to its error."""
    try:
        yield
    except MemoryLimitError as error:
        if limit is None or not spare_bytes:
            raise
        raise MemoryLimitError(
            f"`memory_limit_bytes` must be at least {bytes_text(error.least_bytes + spare_bytes)}, of which the sum of"
            f" the largest gradient takes {bytes_text(spare_bytes)}; got {bytes_text(limit)}. {error}",
            error.least_bytes + spare_bytes,
        ) from error


def _state_held(module: LightningModule, is_limited: bool, groups: MeshGroups, zero_stage: int) -> tuple[float, int]:
    """Return the bytes held for each byte of a trained parameter, and the bytes of the largest gradient."""
    if not module.trainer.training:
        return 1.0, 0
    # Only the optimizers tell how much state they hold; to ask them runs `configure_optimizers` on a copy.
    state = state_copies(module) if is_limited else STATE_COPIES
    held = Held.of(module.parameters())
    return copies_held(state, groups.gradients.size, zero_stage, held.half_share), held.largest_bytes


def _plan_for_evaluation(planned: Callable[..., PipelinePlan], example: tuple[Callable[[Any], Any], Any] | None) -> Any:
    """Return a plan in which each layer is called once, if possible.

    A step that generates text calls the layers any number of times. Every rank runs such a step on the full model, so
    the plan need not follow its calls.
    """
    plan = None
    try:
        plan = planned(example=example)
        if example is None or len(set(plan.layers)) == len(plan.layers):
            return plan
        return planned()
    except ValueError:
        if example is None:
            raise
        return planned() if plan is None else plan  # the model calls one layer for all


def _request(
    module: LightningModule, options: PipelineOptions, groups: MeshGroups, samples: int | None
) -> dict[str, Any]:
    """Return the inputs of a plan besides the model, in types that JSON preserves."""
    trainer = module.trainer
    return {
        "run": str(trainer.state.fn and trainer.state.fn.value),
        "layers": options.layers,
        "schedule": options.schedule,
        "num_microbatches": options.num_microbatches,
        "virtual_stages": options.virtual_stages,
        "warmup": options.warmup,
        "balance": options.balance if isinstance(options.balance, str) else list(options.balance),
        "memory_limit_bytes": options.memory_limit_bytes,
        "pipeline_ranks": groups.pipeline_parallel.size,
        "tensor_ranks": groups.tensor_parallel.size,
        "samples": samples,
    }


def _plan_of_checkpoint(module: LightningModule, request: dict[str, Any], world: Group) -> PipelinePlan | None:
    """Return the plan beside the checkpoint to resume from, if its request is the same; None otherwise."""

    def found() -> dict[str, Any] | None:
        path = checkpoint_of_run(module.trainer)
        file = Path(path).parent / PLAN_FILE if path else None
        if file is None or not file.is_file():
            return None
        try:
            data = json.loads(file.read_text())
            plan = PipelinePlan.from_dict(data)
            plan.check_fits(module, request["pipeline_ranks"])
        except Exception:  # for another model or version, or damaged: make a new plan
            return None
        return data if dict(plan.request) == request else None

    # Rank 0 reads, since the folder may be local to its node, and all ranks need the same plan.
    data = comm.broadcast_object(found() if world.rank == 0 else None, world)
    if data is None:
        return None
    tell(f"The pipeline uses the plan of the checkpoint ({PLAN_FILE}).")
    return PipelinePlan.from_dict(data)


def save_plan(plan: PipelinePlan, checkpoint: str | Path) -> None:
    """Write the plan into the folder of a checkpoint on a local disk, for a run that resumes from it."""
    folder = Path(checkpoint).parent
    # A loaded plan builds its schedule by name, so a custom schedule cannot be saved.
    if plan.schedule.name in SCHEDULES and folder.is_dir():
        # `save` writes by name. `put_file` flushes the file afterwards.
        put_file(folder / PLAN_FILE, lambda file: plan.save(file.path))


def _samples(parts: Sequence[Any]) -> int | None:
    """Return the number of samples in a batch; None if they cannot be counted."""
    try:
        return sum(num_samples(part) for part in parts)
    except ValueError:
        return None
