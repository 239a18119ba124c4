"""Apply a pipeline plan to a model and run steps through it.

plan = analyze(model, group.size, "1f1b", num_microbatches=8, example=(step, microbatch))
engine = PipelineEngine(model, plan, group)
optimizer = SGD(model.parameters())                          # the parameters of this rank's stages
result = engine.forward_backward(step, batch)                # fills `.grad`
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.comm.gradient_sums import assign_gradient, exact_gradient, summed_dtype
from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import BatchNormalization, version_of
from lightning_parallel.pipeline.dry_runs import StageInputs, dry_run_stages
from lightning_parallel.pipeline.microbatch import (
    UNCOUNTED,
    SplitBatch,
    StepResult,
    count_samples,
    map_tensors,
    num_samples,
    own_copy,
    split_batch,
    split_by,
)
from lightning_parallel.pipeline.module_use import unpaired_copies
from lightning_parallel.pipeline.p2p import MessageGroups, MessageLayouts
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan, TiedParameter, device_of
from lightning_parallel.pipeline.random_streams import OwnGenerators, ReplayedDraws
from lightning_parallel.pipeline.runtime import ScheduleRun
from lightning_parallel.pipeline.schedule import SCHEDULES, Schedule, build_schedule, forward_only
from lightning_parallel.pipeline.skips import Places, Skips, find_skips
from lightning_parallel.pipeline.stage import PipelineStages
from lightning_parallel.pipeline.weight_gradients import shared_parameters, split_linears
from lightning_parallel.step_trace.interception import RunsAll
from lightning_parallel.step_trace.record import record_step

__all__ = ["PipelineEngine", "StepOnCopies"]

# Beyond the tags of messages between stages and of the measurement of links, with room for one per parameter.
_TIED_TAG = 1000


class StepOnCopies:
    """A step that runs on a copy of each microbatch, so that it may run several times on the same one.

    A step that changes its batch in place would change it each time: for every stage of this rank, and in dry runs. All
    microbatches are views of one batch, so the change of one tells autograd that tensors saved from others changed.

    Args:
        step: The user's step.
        copies: Whether to copy. A step that has never changed its batch runs on the microbatch itself, because a copy
            lives as long as autograd keeps it.
        is_final: Whether each microbatch runs only once.
    """

    def __init__(self, step: Callable[[Any], Any], copies: bool = True, is_final: bool = False) -> None:
        self.step = step
        self._copies = copies
        self._is_final = is_final
        self._changed: dict[int, tuple[Any, Any]] = {}

    @property
    def changes_batch(self) -> bool:
        """Whether the step has changed a copy of its batch in place."""
        return bool(self._changed)

    def __call__(self, microbatch: Any) -> Any:
        if not self._copies:
            # New containers even so: the step may take entries out of a dict, which costs nothing to allow.
            microbatch = map_tensors(microbatch, lambda tensor: tensor)
            return self.step(microbatch) if self._is_final else self._watched(microbatch)
        copies: dict[int, tuple[Any, Any]] = {}
        given = own_copy(microbatch, copies)
        try:
            return self.step(given)
        finally:
            self._changed.update({key: pair for key, pair in copies.items() if _is_changed(*pair)})

    def _watched(self, microbatch: Any) -> Any:
        tensors: list[Tensor] = []
        map_tensors(microbatch, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        # Tensors made in inference mode have no version.
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        before = list(map(version_of, tensors))
        try:
            return self.step(microbatch)
        finally:
            if list(map(version_of, tensors)) != before:
                # In `finally`, because a stage mostly leaves the step by `StageExit`.
                raise RuntimeError(
                    "The step changes its batch in place, but did not do so in its first batch. Stages of a rank run"
                    " it on the same microbatch. Change a copy (`x = x.clone()`)"
                )

    @torch.no_grad()
    def write_back(self) -> None:
        """Apply the changes of each microbatch's last run to the batch: hooks get the batch after the step."""
        for original, changed in self._changed.values():
            if isinstance(original, np.ndarray):
                original[...] = changed
            else:
                # Lightning's evaluation makes batches in inference mode, and outside it they cannot be written.
                with torch.inference_mode(original.is_inference()):
                    original.copy_(changed.detach())
        self._changed.clear()


def _is_changed(original: Any, duplicate: Any) -> bool:
    if isinstance(original, np.ndarray):
        return not np.array_equal(original, duplicate)
    # A new tensor begins at version 0. Another shape cannot be written back.
    return duplicate.shape == original.shape and version_of(duplicate) > 0


class PipelineEngine:
    """Keeps the stages of a model that a plan gives this rank, and runs steps through the pipeline.

    Every rank constructs it with the same plan and a model of the same structure. Afterwards the model holds the
    parameters of this rank's stages only. Parameters on the meta device stay there.

    Args:
        module: The full model.
        plan: The stage of each part, see `analyze`.
        group: The pipeline group.
        device: Where the stages compute; by default the device of the parameters.
        split_batch: Splits a batch into microbatches; by default along the sample dimension. A batch with fewer samples
            than the plan has microbatches runs a schedule of the same name with fewer.
        microbatch_weight: Gives the weight of a microbatch in the loss; by default its number of samples. To weight by
            tokens, count them here, and return the mean over tokens from the step.
        message_groups: A group for each channel. A backend needs it that runs the operations of a group one after the
            other (NCCL); see `MessageGroups`.
        seed_group: Ranks whose random numbers before the layers must be the same; by default `group`.

    Attributes:
        draws: The random numbers that microbatches replay while a step is compared; else None.
        unpaired: Copies of the model, and their originals, for which stages do not hold the same parameters.
        sum_dtype: The dtype in which owners of a tied parameter of 16 bits add its gradients; None for its own dtype.
        tied_are_summed: Whether the gradients of tied parameters are sums over their owners and not added to since.

    Raises:
        ValueError: If the plan is for another model, or another number of ranks; or without needed `message_groups`.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: PipelinePlan,
        group: Group,
        *,
        device: torch.device | None = None,
        split_batch: SplitBatch = split_batch,
        microbatch_weight: Callable[[Any], float] = num_samples,
        message_groups: MessageGroups | None = None,
        seed_group: Group | None = None,
    ) -> None:
        # Before any parameter is freed: a refused model stays complete.
        plan.check_fits(module, group.size)
        if group.is_ordered and not message_groups and any(group.rank in way[:2] for way in plan.schedule.channels):
            raise ValueError(
                "The pipeline group runs its communication one operation after the other, so stages would wait for"
                " each other in a circle. Pass `message_groups`, a group of two ranks for each channel of the schedule"
            )
        self.module = module
        self.plan = plan
        self.group = group
        self.message_groups = message_groups
        self.seed_group = seed_group or group
        self.split_batch = split_batch
        self.microbatch_weight = microbatch_weight
        self.device = device or device_of(module)
        self.schedule = plan.schedule
        self.unpaired = unpaired_copies(module, plan)
        self._has_norm = any(isinstance(child, BatchNormalization) for child in module.modules())
        self._warn_of_batch_norm()
        self.model = PipelineStages(module, plan, group.rank, self.device)
        # Only schedules with a W: the split costs every linear layer a custom autograd function.
        self._at_once: frozenset[int] = frozenset()
        if self.schedule.splits_backward:
            split_linears(module)
            self._at_once = shared_parameters(module)
        # Kept from step to step: unchanged layouts are not sent again, and dry runs are not repeated.
        self._layouts = MessageLayouts()
        # In training, in evaluation: their values have different forms.
        self._meetings = {
            training: comm.RepeatedBroadcast(group, self.last_rank, self.device) for training in (True, False)
        }
        self._seeds: random.Random | None = None
        self._changes_batch: dict[bool, bool] = {}  # in training, in evaluation
        self._shared_seeds = 0
        self.sum_dtype: torch.dtype | None = None
        self.tied_are_summed = False
        self.draws: ReplayedDraws | None = None
        # Keyed by the skip connections: a step for evaluation may send the same tensor as an argument.
        self._stage_inputs: dict[Skips, dict[int, list[StageInputs]]] = {}
        self._schedules = {self.schedule.num_microbatches: self.schedule}
        self.share_seed()

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.model.stages

    @property
    def last_rank(self) -> int:
        """Position in the group of the rank that holds the last stage: it has losses and outputs."""
        return self.schedule.stage_ranks[-1]

    @property
    def tied(self) -> dict[str, TiedParameter]:
        """Parameters that several ranks hold, by name."""
        return self.model.tied

    @property
    def counted_by_others(self) -> frozenset[str]:
        """This rank's parameters that another rank counts in norms and saves: tied ones with an earlier owner."""
        rank = self.group.rank
        return frozenset(name for name, tied in self.tied.items() if rank in tied.ranks[1:])

    def forward_backward(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        scale: float | Tensor = 1.0,
        synchronize: bool = True,
        skips: Skips | None = None,
        end_stage: Callable[[int], None] | None = None,
        share: Callable[[StepResult], Any] | None = None,
    ) -> StepResult:
        """Add the gradients of the mean loss over `batch` to `.grad`.

        Args:
            step: Runs the user's training step on a microbatch and returns its mean loss, or a dict with it.
            batch: The full batch, the same on all ranks.
            scale: Multiplies the gradients, as a gradient scaler wants; the reported loss is not scaled.
            synchronize: Sum the gradients of tied parameters. While gradients accumulate over several batches, only
                the last may do so.
            skips: The skip connections of this step, by default the plan's; see `find_skips`.
            end_stage: Called with each stage of this rank once the gradients of its parameters are complete.
            share: Makes `StepResult.shared` on the rank of the last stage. Its error is raised on every rank.

        Raises:
            ValueError: If the batch cannot be split.
            RuntimeError: If the model cannot be run in stages, or a rank is lost.
        """
        with torch.enable_grad():
            result = self._run(step, batch, training=True, scale=scale, skips=skips, end_stage=end_stage, share=share)
        if synchronize:
            self.reduce_tied_gradients()
        return result

    def forward(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        skips: Skips | None = None,
        is_whole: bool = False,
        share: Callable[[StepResult], Any] | None = None,
    ) -> StepResult:
        """Run `step` on the microbatches of `batch` without gradients: the forward actions of the schedule.

        Args:
            step: The user's step.
            batch: The full batch, the same on all ranks.
            skips: The skip connections of this step, by default the plan's; see `find_skips`.
            is_whole: Whether the batch is not split.
            share: See `forward_backward`.
        """
        # Placeholders outlive the block, and views of inference tensors cannot be made outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return self._run(step, batch, training=False, skips=skips, is_whole=is_whole, share=share)

    def changes_batch(self, training: bool) -> bool:
        """Tell whether a step of this kind has changed its batch in place."""
        return self._changes_batch.get(training, False)

    def find_skips(self, step: Callable[[Any], Any], batch: Any, training: bool = False) -> Skips:
        """Find the skip connections of another step than the plan's, or of another batch; the same on all ranks.

        Args:
            step: The user's step.
            batch: The batch.
            training: Whether it is the training step. Its loss may use the parameters that the record shows.

        Raises:
            ValueError: If the step cannot be run in the plan's stages.
        """
        microbatch = self._split(batch)[0]
        places = Places(self.plan.stage_of, self.plan.parameter_stages, self.plan.module_stages)

        def seen_whole(microbatch: Any) -> Any:
            # A loop over all parameters must find the parameters of all stages, as it does in the run.
            with self.model.seen_whole():
                return step(microbatch)

        with torch.inference_mode(False):
            # The modules of other stages run on placeholders as well.
            with self.model.active.use(RunsAll()):
                trace = record_step(self.module, StepOnCopies(seen_whole), microbatch, self.device)
            if training:
                self.model.direct |= trace.read_outside({*self.model.sites.site_of})
            skips = find_skips(trace, self.model.sites.site_of, places)
            dry_run_stages(self.model.sites, places, skips, StepOnCopies(seen_whole), microbatch, self.device)
        return skips

    @torch.no_grad()
    def reduce_tied_gradients(self) -> None:
        """Sum the gradients of tied parameters over the ranks that hold them."""
        self.tied_are_summed = True
        self.sum_tied(self.tied)

    @torch.no_grad()
    def sum_tied(self, names: Collection[str]) -> None:
        """Sum the gradients of some tied parameters over the ranks that hold them."""
        if not self.tied:
            return
        parameters = dict(self.module.named_parameters())
        # All ranks list the same tied parameters in the same order, so both ends use one tag.
        for tag, (name, tied) in enumerate(self.tied.items()):
            if name in names and self.group.rank in tied.ranks and parameters[name].requires_grad:
                self._reduce_tied(parameters[name], tied, _TIED_TAG + tag)

    def _reduce_tied(self, parameter: nn.Parameter, tied: TiedParameter, tag: int) -> None:
        # A stage that did not use the parameter in this step still takes part, because other stages wait for it. The
        # last element says whether it has a gradient: weight decay and momentum would not ignore one of zeros.
        # All owners send one dtype, though some of them have added no gradients.
        dtype = summed_dtype(parameter.dtype, self.sum_dtype)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else exact_gradient(parameter.grad)
        gradient = gradient.to(dtype)
        is_used = gradient.new_full((1,), float(parameter.grad is not None))
        mine = torch.cat([gradient.reshape(-1), is_used])
        others = [rank for rank in tied.ranks if rank != self.group.rank]
        gradients = {rank: torch.empty_like(mine) for rank in others}
        # One operation: if two ranks both received first, neither would send where messages wait for each other.
        received = [(gradient, rank) for rank, gradient in gradients.items()]
        comm.exchange([(mine, rank) for rank in others], received, self.group, tag).wait()
        # Read only if this stage does not know it already, because the host waits for the answer.
        if parameter.grad is None and not any(bool(gradients[rank][-1] > 0) for rank in others):
            return
        gradients[self.group.rank] = mine
        # In the order of the ranks, so that all ranks get the same bits.
        total = torch.stack([gradients[rank][:-1] for rank in tied.ranks]).sum(0)
        assign_gradient(parameter, total.view_as(parameter))

    @torch.no_grad()
    def share_tied(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the first owner's tensor of each tied parameter to the other owners, in place."""
        for tag, (name, tied) in enumerate(self.tied.items()):
            if self.group.rank not in tied.ranks or name not in tensors:
                continue
            first, *others = tied.ranks
            # The owners may keep the parameter in other strides, but both ends send and receive plain memory.
            tensor = tensors[name].contiguous()
            sent = [(tensor, rank) for rank in others] if self.group.rank == first else []
            received = [] if self.group.rank == first else [(tensor, first)]
            comm.exchange(sent, received, self.group, _TIED_TAG + tag).wait()
            tensors[name].copy_(tensor)

    def _run(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        training: bool,
        scale: float | Tensor = 1.0,
        skips: Skips | None = None,
        end_stage: Callable[[int], None] | None = None,
        is_whole: bool = False,
        share: Callable[[StepResult], Any] | None = None,
    ) -> StepResult:
        microbatches = [batch] if is_whole else self._split(batch)
        if len(microbatches) > self.schedule.num_microbatches:
            raise ValueError(
                f"`split_batch` must return 1 to {self.schedule.num_microbatches} microbatches; got {len(microbatches)}"
            )
        # The last batch of an epoch may have fewer samples than there are microbatches.
        schedule = self._schedule_for(len(microbatches))
        sizes = self._sizes_of(microbatches)
        if not 0 < sum(sizes) < math.inf or min(sizes) < 0:
            raise ValueError(
                f"The weights of microbatches must be finite, not negative, and positive in sum; got {sizes}"
            )
        skips = self.plan.skips if skips is None else skips
        step_on_copies = StepOnCopies(step, self._changes_batch.get(training, True), len(self.stages) == 1)
        run = ScheduleRun(
            self.model,
            self.group,
            schedule if training else forward_only(schedule),
            step_on_copies,
            microbatches,
            [size / sum(sizes) for size in sizes],
            self._layouts,
            self._stage_inputs.setdefault(skips, {}),
            scale,
            seed=self.next_seed(),
            generators=self.generators,
            message_groups=self.message_groups,
            skips=skips,
            end_stage=end_stage,
            draws=self.draws,
            at_once=self._at_once,
            share=share,
            meeting=self._meetings[training],
        )
        result = run()
        self.model.is_first_step &= not training
        # Known from the first batch, on which the self-check ran before; arrays have no version to tell it later.
        known = self._changes_batch.get(training, False)
        self._changes_batch[training] = known or step_on_copies.changes_batch
        step_on_copies.write_back()
        return result

    def _sizes_of(self, microbatches: Sequence[Any]) -> list[float]:
        if len(microbatches) == 1:
            return [1.0]
        try:
            return [float(self.microbatch_weight(microbatch)) for microbatch in microbatches]
        except ValueError as error:
            # With the default weight, only the user's `split_batch` makes parts that cannot be counted.
            if self.microbatch_weight is not num_samples or self.split_batch is split_batch:
                raise
            raise ValueError(UNCOUNTED.format(type(microbatches[0]).__name__)) from error

    @contextmanager
    def other_precision(self, dtype: torch.dtype) -> Iterator[None]:
        """Expect floating-point parameters, which the caller has converted, and activations of `dtype` in the block."""
        patches = Patches()
        patches.replace(self, "_layouts", MessageLayouts())
        patches.replace(self, "_stage_inputs", {})
        try:
            with self.model.other_precision(dtype):
                yield
        finally:
            patches.undo()

    def share_seed(self) -> None:
        """Let the first rank's global generator decide the random numbers of the later steps, on every rank."""
        self._seeds = None
        # Another kind of run may begin, with a step that may change its batch.
        self._changes_batch.clear()
        # Here and not in each step: modules may keep long lists, which are searched as well.
        self.generators = OwnGenerators(self.model.outside_of_layers)
        self.model.note_parameters()

    @property
    def seeds(self) -> tuple[Any, int]:
        """The state of the generator of step seeds, the same on every rank; set it to continue from there."""
        return None if self._seeds is None else self._seeds.getstate(), self._shared_seeds

    @seeds.setter
    def seeds(self, state: tuple[Any, int]) -> None:
        numbers, self._shared_seeds = state
        self._seeds = None
        if numbers is not None:
            self._seeds = random.Random()
            self._seeds.setstate(numbers)

    def next_seed(self) -> int:
        """Return the seed of the next step, the same on every rank."""
        # Drawn in each step, so that the global generator advances. Code that draws on some ranks only, such as under
        # `is_global_zero`, leaves the generators in different states, so `mine` is used only once.
        mine = int(torch.randint(2**62, ()).item())
        if self._seeds is None:
            # Code may have reset the generator since the last call; the counter still makes a new seed.
            self._shared_seeds += 1
            self._seeds = random.Random(comm.broadcast_object(mine, self.seed_group) ^ self._shared_seeds)
        return self._seeds.getrandbits(62)

    def _split(self, batch: Any) -> Sequence[Any]:
        """Return the microbatches of a batch, of at least two samples each if the plan foresaw batch normalisation."""
        count = self.schedule.num_microbatches
        if self._has_norm and (self.plan.request.get("samples") or 0) >= count:
            # The last batch of an epoch may be smaller than the planned batch.
            samples = count_samples(batch)
            count = min(count, max(1, samples // 2)) if samples > 0 else count
        return split_by(self.split_batch, batch, count)

    def _schedule_for(self, num_microbatches: int) -> Schedule:
        known, schedule = self._schedules, self.schedule
        if num_microbatches not in known:
            if schedule.name not in SCHEDULES:
                raise ValueError(
                    f"The schedule `{schedule.name}` needs {schedule.num_microbatches} microbatches; got a batch"
                    f" with {num_microbatches}. Drop the last batch, or use a schedule that works with any number"
                )
            known[num_microbatches] = build_schedule(
                schedule.name, schedule.num_ranks, num_microbatches, schedule.virtual_stages, schedule.warmup
            )
        return known[num_microbatches]

    def _warn_of_batch_norm(self) -> None:
        # On one rank: the other ranks would say the same.
        if self.seed_group.ranks[self.seed_group.rank] == 0 and self.schedule.num_microbatches > 1 and self._has_norm:
            warnings.warn(
                "The model has batch normalization, which sees one microbatch at a time in a pipeline. Its"
                " statistics, and so the gradients, differ from those of the full batch. Use group or layer"
                " normalization for equal results, or larger microbatches [LP011]",
                stacklevel=3,
            )
