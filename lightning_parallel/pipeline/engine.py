"""The pipeline of a model: what a strategy, or a training loop of one's own, talks to.

engine = PipelineEngine(model, group, build_schedule("1f1b", group.size, 8), example=(step, microbatch))
optimizer = SGD(model.parameters())                          # those of this rank's stages
result = engine.forward_backward(step, batch)                # fills `.grad`
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.pipeline.actions import Kind, Schedule, activations_held, forward_only
from lightning_parallel.pipeline.cut import Cut, TiedParameter
from lightning_parallel.pipeline.linear import split_linears
from lightning_parallel.pipeline.measure import Costs, count_parameters, measure
from lightning_parallel.pipeline.microbatch import Split, num_samples, split_batch
from lightning_parallel.pipeline.observe import Observation, Step, observe, read_off, try_stages
from lightning_parallel.pipeline.p2p import Agreements, Channels
from lightning_parallel.pipeline.partition import Balance, cut_layers, stage_costs
from lightning_parallel.pipeline.runtime import Run, StepResult
from lightning_parallel.pipeline.schedule import SCHEDULES, build_schedule
from lightning_parallel.pipeline.simulate import Cost
from lightning_parallel.pipeline.stage import Demand
from lightning_parallel.pipeline.trunk import Trunk, find_trunk, find_trunks, pieces
from lightning_parallel.pipeline.validate import validate

__all__ = ["PipelineEngine"]


class PipelineEngine:
    """Cuts a model over the ranks of `group` and runs steps through it.

    Every rank constructs it with the same arguments and the same model; afterwards the model holds the parameters of
    this rank's stages only.

    Args:
        module: The model, whole, with equal parameters on all ranks; may be on the meta device.
        group: The pipeline group.
        schedule: For as many ranks as the group has, or a function that makes one, given the costs of the layers. A
            batch with fewer samples than it has microbatches runs a schedule of the same name with fewer.
        example: A step and a microbatch for it, from which the cut learns where each module belongs. Without it,
            modules registered before the layers are taken for used before them.
        layers: Dotted name of the repeated layers, or `auto`; several that follow each other are joined by commas.
        balance: How to divide the layers, see `cut_layers`. `auto` measures where there is an `example` and the model
            is not on the meta device, and counts parameters otherwise.
        memory_cap_bytes: Most bytes that a stage may hold, for a measured cut.
        device: Where the stages compute; by default where the parameters are.
        split: Splits a batch into microbatches; by default along the sample dimension.
        weigh: Gives the weight of a microbatch in the loss; by default its number of samples. To weight by tokens,
            count them here, and return the mean over tokens from the step.
        channels: Groups of the same ranks, for a backend that cannot tell messages apart by tag (NCCL).
        alike: The ranks whose models must be cut alike, the world in a mesh of several axes; by default `group`.

    Raises:
        ValueError: If the layers cannot be found or cut, or the schedule is not valid or for another number of ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        schedule: Schedule | Callable[[Costs], Schedule],
        *,
        example: tuple[Step, Any] | None = None,
        layers: str = "auto",
        balance: Balance = "auto",
        memory_cap_bytes: float | None = None,
        device: torch.device | None = None,
        split: Split = split_batch,
        weigh: Callable[[Any], float] = num_samples,
        channels: Channels | None = None,
        alike: Group | None = None,
    ) -> None:
        self.module, self.group, self.channels = module, group, channels
        self.split, self.weigh = split, weigh
        self.device = device or next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        num_stages = group.size if callable(schedule) else schedule.num_stages
        if example is None:
            trunks = [find_trunk(module, num_stages, layers)]
        else:
            trunks = find_trunks(module, num_stages, layers)
        failure: ValueError | None = None
        for trunk in trunks:
            try:
                seen, counts = self._planned(trunk, schedule, example, balance, memory_cap_bytes, alike or group)
                break
            except ValueError as error:
                failure = failure or error
        else:
            assert failure is not None
            raise failure
        self._warn_of_batch_norm()
        sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
        self.cut = Cut(module, trunk, seen, counts, self.schedule.stage_ranks, group.rank, self.device)
        if any(action.kind is Kind.I for row in self.schedule.rows for action in row):
            split_linears(module)
        self.stage_parameters = [
            sum(size for name, size in sizes.items() if stage in self.cut.parameter_stages[name])
            for stage in range(self.schedule.num_stages)
        ]
        self._agreements = Agreements()
        self._demands: dict[int, list[Demand]] = {}
        self._schedules = {self.schedule.num_microbatches: self.schedule}

    def _planned(
        self,
        trunk: Trunk,
        schedule: Schedule | Callable[[Costs], Schedule],
        example: tuple[Step, Any] | None,
        balance: Balance,
        memory_cap_bytes: float | None,
        alike: Group,
    ) -> tuple[Observation, tuple[int, ...]]:
        """Where everything belongs if it is `trunk` that is cut, and how many layers each stage gets."""
        module, device = self.module, self.device
        seen = read_off(module, trunk) if example is None else observe(module, trunk, *example, device)
        self.costs = count_parameters(module, trunk, seen)
        if balance in ("auto", "measured") or callable(schedule):
            is_meta = any(parameter.is_meta for parameter in module.parameters())
            if example is not None and not is_meta:
                measured = measure(module, trunk, seen, *example, device)
                self.costs = comm.broadcast_object(measured, alike)
            elif balance == "measured" or callable(schedule):
                raise ValueError(
                    "a measured balance or schedule needs a model with data and an example batch; use "
                    "balance='parameters' and name a schedule"
                )
            else:
                balance = "parameters"
        if callable(schedule):
            in_pieces = _in_pieces(self.costs, pieces(trunk))
            enough = len(in_pieces.layers) >= self.group.size
            schedule = schedule(in_pieces if enough else _in_pieces(self.costs, trunk.entries))
        self.schedule = self._checked(schedule)
        counts = self._divided(trunk, balance, memory_cap_bytes)
        if example is not None:
            stage_of = tuple(stage for stage, count in enumerate(counts) for _ in range(count))
            try_stages(module, trunk, seen, stage_of, *example, device)
        return seen, counts

    def _divided(self, trunk: Trunk, balance: Balance, memory_cap_bytes: float | None) -> tuple[int, ...]:
        """Layers of each stage. A cut by cost gives every stage parameters, where there are enough layers with some."""
        num_stages, runs = self.schedule.num_stages, pieces(trunk)
        if len(runs) < num_stages or balance not in ("auto", "measured", "parameters"):
            runs = trunk.entries
        costs = _in_pieces(self.costs, runs)
        counts = cut_layers(
            costs.layers,
            num_stages,
            balance,
            prologue=costs.prologue,
            epilogue=costs.epilogue,
            memory_cap_bytes=memory_cap_bytes,
            in_flight=_in_flight(self.schedule) if memory_cap_bytes is not None else None,
        )
        ends = [0, *accumulate(counts)]
        return tuple(sum(runs[start:stop]) for start, stop in pairwise(ends))

    def _checked(self, schedule: Schedule) -> Schedule:
        if schedule.num_ranks != self.group.size:
            raise ValueError(
                f"expected a schedule for the {self.group.size} ranks of the pipeline group, "
                f"got one for {schedule.num_ranks}"
            )
        validate(schedule)
        return schedule

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.cut.stages

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """How many of the repeated layers each stage has."""
        return self.cut.layers_per_stage

    @property
    def stage_costs(self) -> list[Cost]:
        """The cost of each stage for a microbatch as large as the example; without seconds if none was measured."""
        costs = self.costs
        return stage_costs(costs.layers, self.layers_per_stage, prologue=costs.prologue, epilogue=costs.epilogue)

    @property
    def last_rank(self) -> int:
        """Position in the group of the rank that holds the last stage: it has losses and outputs."""
        return self.cut.stage_ranks[-1]

    @property
    def parameter_stages(self) -> dict[str, tuple[int, ...]]:
        """The stages of every parameter of the model, by name."""
        return self.cut.parameter_stages

    @property
    def tied(self) -> dict[str, TiedParameter]:
        """Parameters that several ranks hold, by name."""
        return self.cut.tied

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters of this rank that another rank counts in norms and saves: all but the first home of tied ones."""
        rank = self.group.rank
        return frozenset(name for name, tied in self.tied.items() if rank in tied.ranks[1:])

    def forward_backward(
        self, step: Step, batch: Any, *, scale: float | Tensor = 1.0, synchronize: bool = True
    ) -> StepResult:
        """Add the gradients of the mean loss over `batch` to `.grad`.

        Args:
            step: Runs the user's training step on a microbatch and returns its mean loss, or a dict with it.
            batch: The whole batch, the same on all ranks.
            scale: Multiplies the gradients, as a gradient scaler wants; the reported loss is not scaled.
            synchronize: Sum the gradients of tied parameters. While gradients accumulate over several batches, only
                the last may do so.

        Raises:
            ValueError: If the batch cannot be split.
            RuntimeError: If the model cannot be run in stages, or a rank is lost.
        """
        with torch.enable_grad():
            result = self._run(step, batch, training=True, scale=scale)
        if synchronize:
            self.reduce_tied_gradients()
        return result

    def forward(self, step: Step, batch: Any) -> StepResult:
        """Run `step` on the microbatches of `batch` without gradients: the forward actions of the schedule."""
        # Ghosts outlive the block, and views of inference tensors cannot be made outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return self._run(step, batch, training=False)

    @torch.no_grad()
    def reduce_tied_gradients(self) -> None:
        """Sum the gradients of tied parameters over the ranks that hold them."""
        parameters = dict(self.module.named_parameters())
        for tag, (name, tied) in enumerate(self.tied.items()):
            if self.group.rank in tied.ranks and parameters[name].requires_grad:
                self._reduce_tied(parameters[name], tied, _TIED_TAG + tag)

    def _reduce_tied(self, parameter: nn.Parameter, tied: TiedParameter, tag: int) -> None:
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        others = [rank for rank in tied.ranks if rank != self.group.rank]
        pieces = {rank: torch.empty_like(mine) for rank in others}
        pending = [comm.irecv(piece, self.group, rank, tag) for rank, piece in pieces.items()]
        pending += [comm.isend(mine, self.group, rank, tag) for rank in others]
        for work in pending:
            work.wait()
        pieces[self.group.rank] = mine
        # In the order of the ranks, so that all get the same bits.
        parameter.grad = torch.stack([pieces[rank] for rank in tied.ranks]).sum(0)

    def _run(self, step: Step, batch: Any, training: bool, scale: float | Tensor = 1.0) -> StepResult:
        microbatches = self.split(batch, self.schedule.num_microbatches)
        if not 0 < len(microbatches) <= self.schedule.num_microbatches:
            raise ValueError(
                f"expected `split` to give 1 to {self.schedule.num_microbatches} microbatches, got {len(microbatches)}"
            )
        schedule = self._schedule_for(len(microbatches))
        sizes = [float(self.weigh(microbatch)) for microbatch in microbatches]
        if not sum(sizes) > 0:
            raise ValueError(f"expected microbatches of a positive weight, got {sizes}")
        run = Run(
            self.cut,
            self.group,
            schedule if training else forward_only(schedule),
            step,
            microbatches,
            [size / sum(sizes) for size in sizes],
            self._agreements,
            self._demands,
            scale,
            seed=int(torch.randint(2**62, ()).item()),
            channels=self.channels,
        )
        return run()

    def _schedule_for(self, num_microbatches: int) -> Schedule:
        known, schedule = self._schedules, self.schedule
        if num_microbatches not in known:
            if schedule.name not in SCHEDULES:
                raise ValueError(
                    f"the schedule `{schedule.name}` is for {schedule.num_microbatches} microbatches, but a batch gave "
                    f"{num_microbatches}; drop the last batch, or use a schedule that can be built for any number"
                )
            known[num_microbatches] = build_schedule(
                schedule.name, schedule.num_ranks, num_microbatches, schedule.virtual_stages, schedule.warmup
            )
        return known[num_microbatches]

    def _warn_of_batch_norm(self) -> None:
        if self.schedule.num_microbatches > 1 and any(isinstance(m, _BatchNorm) for m in self.module.modules()):
            warnings.warn(
                "the model has batch normalisation, which sees one microbatch at a time in a pipeline: its statistics, "
                "and so the gradients, differ from those of the whole batch. Use group or layer normalisation for "
                "equal results, or larger microbatches",
                stacklevel=3,
            )


def _in_pieces(costs: Costs, runs: Sequence[int]) -> Costs:
    """Add up the costs of the layers of each run."""
    ends = [0, *accumulate(runs)]
    layers = tuple(Cost.in_sequence(costs.layers[start:stop]) for start, stop in pairwise(ends))
    return replace(costs, layers=layers)


def _in_flight(schedule: Schedule) -> list[int]:
    """The most microbatches that each stage holds at once."""
    peaks = []
    for stage, rank in enumerate(schedule.stage_ranks):
        row = [action for action in schedule.rows[rank] if action.stage == stage]
        peaks.append(max(activations_held(row), default=0))
    return peaks


_TIED_TAG = 1000
