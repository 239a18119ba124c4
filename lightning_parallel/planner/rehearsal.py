"""The costs of a model on one of t tensor-parallel ranks, found by sharding it for a group with one real rank.

    rehearsal = Rehearsal(module, batch, cluster)
    rehearsal.costs(tensor=4, microbatches=8)       # seconds and bytes of prologue, layers and epilogue

The sharded copy of the module has no data; its parts get random data while they run. If the device is this machine's
processor, the part of a rank runs for real, and its time is measured. Otherwise the part runs on tensors without data,
and the roofline model gives the time. The alpha-beta model gives the time of messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import BatchNormalization, FakeTensorMode, copy_of
from lightning_parallel.mesh import TENSOR
from lightning_parallel.pipeline.layer_stack import LayerStack, find_layer_stacks
from lightning_parallel.pipeline.measure import measure_step
from lightning_parallel.pipeline.microbatch import loss_of, map_tensors, num_samples, split_batch, split_by
from lightning_parallel.pipeline.module_use import ModuleUse, trace_in_order
from lightning_parallel.pipeline.search import Costs
from lightning_parallel.pipeline.simulate import Cost
from lightning_parallel.planner.collective_costs import collective_s
from lightning_parallel.planner.context_costs import PHASES, AttentionCosts, AttentionSizes, AttentionWork, ContextAxis
from lightning_parallel.planner.hardware import Cluster, clock_here
from lightning_parallel.planner.roofline import Roofline
from lightning_parallel.planner.tile_costs import HeadBytes, tile_for_plan
from lightning_parallel.step_trace.record import StepTrace, record_step
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import Plan, Sharding, UserPlan, apply_plan

__all__ = ["PRECISIONS", "Divided", "PartCosts", "PrecisionName", "Rehearsal", "most_microbatches", "without_data"]

PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
PRECISIONS: tuple[str, ...] = get_args(PrecisionName)
_DTYPES = {"32": torch.float32, "64": torch.float64, "bf16": torch.bfloat16, "16": torch.float16}
_CPU = torch.device("cpu")

Quantity = Literal["seconds", "flops", "messages", "message_bytes", "attention"]
"""Quantity that the clock of a rehearsal counts; `attention` has the fields of `AttentionWork`, in both directions."""


def without_data(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of `module` with parameters on the meta device; buffers keep their values, or become zeros.

    Args:
        module: The model; unchanged. The copy shares its Trainer, which cannot be copied.
        dtype: Dtype of the copy's floating-point parameters; None keeps their dtypes.
    """
    known: dict[int, Any] = {}
    for parameter in module.parameters():
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        hollow = torch.empty_like(parameter, dtype=kind, device="meta")
        known[id(parameter)] = nn.Parameter(hollow, parameter.requires_grad)
    for buffer in module.buffers():
        if buffer.is_meta:
            known[id(buffer)] = torch.zeros_like(buffer, device="cpu")  # steps compute masks and positions from it
    for shared in (getattr(module, "_trainer", None), getattr(module, "_fabric", None)):
        known[id(shared)] = shared
    copied = copy_of(module, known)
    # Outside a run, a Trainer has no results to log into.
    for name in ("log", "log_dict"):
        if hasattr(copied, name):
            setattr(copied, name, lambda *_, **__: None)
    return copied


@dataclass(frozen=True)
class PartCosts:
    """Costs of a microbatch on one rank.

    Attributes:
        compute: Seconds of computation, activations and boundaries of prologue, layers and epilogue.
        messages: Seconds of their messages along the tensor axis.
        context: Seconds of their messages along the context axis; None with one rank.
    """

    compute: Costs
    messages: Costs
    context: Costs | None = None

    @cached_property
    def together(self) -> Costs:
        """Computation and messages, one after the other."""
        both = self.compute.mapped(_added, self.messages)
        return both if self.context is None else both.mapped(_added, self.context)

    def with_context(self, axis: ContextAxis, attention: AttentionCosts, share: float) -> PartCosts:
        """Return the costs of a rank of the context axis, from the costs of its share of the positions.

        Args:
            axis: The axis.
            attention: The model's attention, for the batch of a loader.
            share: The part of that batch in a microbatch, of all ranks of the axis together.
        """
        return replace(self, compute=axis.held(self.compute, attention, share), context=axis.messages(attention, share))

    def with_end(self, most_bytes: float) -> PartCosts:
        """Return the costs with at most so many bytes in the epilogue."""
        end = self.compute.epilogue
        end = replace(end, activation_bytes=min(end.activation_bytes, most_bytes))
        return replace(self, compute=replace(self.compute, epilogue=end))

    def scaled(self, factor: float) -> PartCosts:
        """Return the costs of a microbatch `factor` times as large."""
        return PartCosts(*(costs.mapped(lambda cost: cost.scaled(factor)) for costs in (self.compute, self.messages)))

    def towards(self, other: PartCosts, share: float) -> PartCosts:
        """Return the costs on the line from these costs (share 0) to `other` (share 1), or beyond."""

        def between(one: Cost, two: Cost) -> Cost:
            # Beyond the two points, the line may become negative.
            values = {key: max(0.0, value + share * (getattr(two, key) - value)) for key, value in vars(one).items()}
            return Cost(**values)

        return PartCosts(self.compute.mapped(between, other.compute), self.messages.mapped(between, other.messages))

    def in_runs(self, sizes: Sequence[int]) -> PartCosts:
        """Add up the layers of each entry of the stack: no split point lies inside a nested list."""
        return PartCosts(self.compute.in_runs(sizes), self.messages.in_runs(sizes))

    @classmethod
    def of(cls, costs: Costs) -> PartCosts:
        """Separate computation and messages in costs that a clock of `_Amounts` measured."""
        return cls(*(costs.mapped(partial(_taken, which=which)) for which in (0, 1)))


class _Amounts(float):
    """Sum of several amounts, such as the seconds of computation and of messages, with all of them kept."""

    parts: tuple[float, ...]

    def __new__(cls, *parts: float) -> _Amounts:
        made = super().__new__(cls, sum(parts))
        made.parts = parts
        return made

    # `measure` compares, adds and subtracts times, so no other operation has to keep the parts.
    def __sub__(self, other: float) -> _Amounts:
        theirs = getattr(other, "parts", (other,))
        return _Amounts(*(mine - one for mine, one in zip_longest(self.parts, theirs, fillvalue=0.0)))

    def __add__(self, other: float) -> _Amounts:
        theirs = getattr(other, "parts", (other,))
        return _Amounts(*(mine + one for mine, one in zip_longest(self.parts, theirs, fillvalue=0.0)))


def _taken(cost: Cost, which: int) -> Cost:
    """Return one of the amounts: for seconds, computation (0) or messages (1)."""
    values = {}
    for name in PHASES:
        found = getattr(cost, name)
        values[name] = dict(enumerate(getattr(found, "parts", (found,)))).get(which, 0.0)
    # Noise may assign a message to either half of a split backward, so a difference may be negative: use 0 then.
    return replace(cost, **{name: max(0.0, value) for name, value in values.items()})


def _added(one: Cost, other: Cost) -> Cost:
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in PHASES})


@dataclass(frozen=True)
class Divided:
    """A copy of the model without data, sharded for t ranks.

    Attributes:
        module: The copy.
        sharding: The sharding of the copy; None for one rank.
        stack: Its repeated layers; None if no pipeline can split the model.
        use: Uses of its parameters by its layers.
        uncut: Reason why no pipeline can split the model.
    """

    module: nn.Module
    sharding: Sharding | None
    stack: LayerStack | None
    use: ModuleUse | None
    uncut: str = ""


class Rehearsal:
    """Finds the costs of a sharded model without other ranks, and without its data.

    Args:
        module: The full model; unchanged. Its parameters may be on the meta device.
        batch: The batch of one replica for a step.
        cluster: The devices of the planned run.
        step: Runs the step of a module on a batch; by default its `training_step`.
        precision: As Lightning names it.
        plan, sequence_parallel: See `TensorParallelStrategy`.
        layers: See `PipelineParallelStrategy`.
        measured: Whether the parts run for real on this machine's processor.
        tiled: See `HybridParallelStrategy`.

    Attributes:
        has_guessed: Whether the step asked for the value of a tensor without data; see `Roofline`.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        cluster: Cluster,
        *,
        step: Callable[[nn.Module, Any], Any] | None = None,
        precision: PrecisionName = "32-true",
        plan: UserPlan = "auto",
        sequence_parallel: bool = False,
        layers: str = "auto",
        measured: bool = False,
        tiled: Literal["auto", "off"] = "off",
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"`precision` must be one of {', '.join(PRECISIONS)}; got {precision!r}")
        self.module = module
        self.batch = batch
        self.cluster = cluster
        self.precision: PrecisionName = precision
        self.measured = measured
        self.tiled = tiled
        self.has_guessed = False
        self._step = step or training_step
        self._plan: UserPlan = plan
        self._sequence_parallel = sequence_parallel
        self._layers = layers
        self._divided: dict[int, Divided | ValueError] = {}
        self._heads: dict[int, HeadBytes] = {}
        self._trace: StepTrace | None = None
        self._costs: dict[tuple[int, int, str | int], PartCosts] = {}
        self._attention: dict[tuple[int, str | int], AttentionCosts] = {}
        self._attended = AttentionSizes()
        self._notes: list[tuple[str, int]] = []

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return _DTYPES[self.precision.partition("-")[0]]

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return sum(num_samples(part) for part in split_by(split_batch, self.batch, 1))

    def divided(self, tensor: int) -> Divided:
        """Return the part of the model on one of `tensor` ranks.

        Raises:
            ValueError: If the model cannot be sharded over this number of ranks, with the reason.
        """
        found = self._divided.get(tensor)
        if found is None:
            try:
                found = self._divide(tensor)
                if self.tiled == "auto":
                    self._heads[tensor] = tile_for_plan(found.module, self._trace)
            except ValueError as error:
                # Kept as well: the search asks for each number of ranks many times.
                found = error
            self._divided[tensor] = found
        if isinstance(found, ValueError):
            raise found
        return found

    def _divide(self, tensor: int) -> Divided:
        dtype = self.compute_dtype if self.precision.endswith("true") else None
        module = without_data(self.module, None if dtype is torch.float32 else dtype)
        if (trainer := getattr(self.module, "_trainer", None)) is not None:
            module.trainer = trainer  # steps use it, and copies of a LightningModule lose it
        sharding = None
        if tensor > 1:
            group = Group.pretended(TENSOR, tensor, lambda op, num_bytes: self._notes.append((op, num_bytes)))
            sharding = apply_plan(module, self._tensor_plan(module, group), group)
            # Sharding does not change the use of the parts, so reuse the trace of the full model.
            whole = self.divided(1)
            stack = None if whole.stack is None else LayerStack.at(module, whole.stack.path)
            return Divided(module, sharding, stack, whole.use, whole.uncut)
        try:
            failure: ValueError | None = None
            self._trace = trace = self._recorded(module)
            for stack in find_layer_stacks(module, 1, self._layers):
                try:
                    stack, use = trace_in_order(module, stack, trace)
                    return Divided(module, sharding, stack, use)
                except ValueError as error:
                    failure = failure or error
            assert failure is not None
            raise failure
        except ValueError as error:
            return Divided(module, sharding, None, None, str(error))

    def _recorded(self, module: nn.Module) -> StepTrace:
        """Record the step on two samples, or on the batch if it cannot be split or its step needs more samples."""
        with suppress(ValueError):
            # Trials of blocks repeat the recorded calls with data, for each number of tensor ranks.
            few = self.microbatch(max(1, self.samples // 2))
            trace = record_step(module, self._of(module), few, _CPU, shorten=True)
            if trace.error is None:
                return trace
        return record_step(module, self._of(module), self.microbatch(1), _CPU, shorten=True)

    def _tensor_plan(self, module: nn.Module, group: Group) -> Plan:
        # The record of the full model shows how the step calls the blocks.
        self.divided(1)
        return make_plan(module, self._plan, group, self._sequence_parallel, lambda: self._trace)

    def microbatch(self, count: int) -> Any:
        """Return the first, and largest, of `count` parts of the batch."""
        return split_by(split_batch, self.batch, count)[0]

    def step_of(self, tensor: int) -> Callable[[Any], Any]:
        """Return the step of the model's part on one of `tensor` ranks.

        Raises:
            ValueError: See `divided`.
        """
        return self._of(self.divided(tensor).module)

    def costs(self, tensor: int, microbatches: int, recomputation: str | int = "off") -> PartCosts:
        """Return the costs of one of `microbatches` microbatches on one of `tensor` ranks.

        Args:
            tensor: Ranks along the tensor axis.
            microbatches: Parts of the batch.
            recomputation: See `layers_to_recompute`.

        Raises:
            ValueError: If the model cannot be sharded over this number of ranks, or its step fails.
        """
        key = (tensor, microbatches, recomputation)
        if key not in self._costs:
            found = PartCosts.of(self.count("seconds", tensor, microbatches, recomputation))
            stack = self.divided(tensor).stack
            head = self._heads.get(tensor)
            if head is not None and head.of_positions is not None:
                found = found.with_end(head.of_positions)
            self._costs[key] = found if stack is None else found.in_runs(stack.blocks)
        return self._costs[key]

    def attention(self, tensor: int, recomputation: str | int = "off") -> AttentionCosts:
        """Return the attention of the batch on one of `tensor` ranks.

        Args:
            tensor: Ranks along the tensor axis.
            recomputation: See `layers_to_recompute`.

        Raises:
            ValueError: See `costs`.
        """
        key = (tensor, recomputation)
        if key not in self._attention:
            counted = self.count("attention", tensor, 1, recomputation)
            fields = range(2 * len(AttentionWork._fields))
            costs = [counted.mapped(partial(_taken, which=which)) for which in fields]
            stack = self.divided(tensor).stack
            costs = costs if stack is None else [each.in_runs(stack.blocks) for each in costs]
            self._attention[key] = AttentionCosts(tuple(costs), self._attended)
        return self._attention[key]

    def head_gradient_bytes(self, tensor: int) -> float:
        """Return the bytes of the gradient of the head's weight that a loss in tiles holds from forward on."""
        head = self._heads.get(tensor)
        return 0.0 if head is None else head.of_weight

    def forget(self) -> None:
        """Drop the costs, so that the next call of `costs` measures again."""
        self._costs.clear()

    def count(self, quantity: Quantity, tensor: int, microbatches: int = 1, recomputation: str | int = "off") -> Costs:
        """Count a quantity in F, I and W of a microbatch; the seconds of `Costs` hold this quantity.

        Raises:
            ValueError: See `costs`.
        """
        # Shard first: sharding sends messages, too, which must not count.
        self.divided(tensor)
        self._notes.clear()
        with ExitStack() as context:
            is_real = self.measured and quantity == "seconds"
            batch = self.microbatch(microbatches)
            if not is_real:
                # Buffers keep their values, so operations mix them with tensors without data.
                mode = context.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                batch = map_tensors(batch, mode.from_tensor)
            now, repeats = self._clock(quantity, tensor, context)
            return self._run(tensor, batch, now, repeats, recomputation)

    def _clock(self, quantity: Quantity, tensor: int, context: ExitStack) -> tuple[Callable[[], float], int]:
        """Return the clock to read before and after each part, and the number of runs of each part."""
        if quantity == "seconds" and self.measured:
            clock = clock_here()
            return lambda: _Amounts(clock(), self._message_s(tensor)), 9
        roofline = context.enter_context(Roofline(self.cluster.device))
        context.callback(lambda: setattr(self, "has_guessed", self.has_guessed or roofline.has_guessed))
        context.callback(lambda: setattr(self, "_attended", roofline.attended))
        clocks: dict[str, Callable[[], float]] = {
            "seconds": lambda: _Amounts(roofline.seconds, self._message_s(tensor)),
            "flops": lambda: float(roofline.flops),
            "messages": lambda: float(len(self._notes)),
            "message_bytes": lambda: float(sum(num_bytes for _, num_bytes in self._notes)),
            "attention": lambda: _Amounts(*roofline.attention[0], *roofline.attention[1]),
        }
        return clocks[quantity], 1

    def _message_s(self, tensor: int) -> float:
        return sum(collective_s(op, num_bytes, 1, tensor, self.cluster) for op, num_bytes in self._notes)

    def _run(self, tensor: int, batch: Any, now: Callable[[], float], repeats: int, recomputation: str | int) -> Costs:
        divided = self.divided(tensor)
        step = self._of(divided.module)
        typical = repeats > 1
        if divided.stack is not None:
            try:
                return measure_step(
                    divided.module, divided.stack, step, batch, _CPU, now, repeats, typical, recomputation
                )
            except ValueError as error:
                uncut = str(error)
        # If the step itself fails, this raises its error.
        costs = measure_step(divided.module, None, step, batch, _CPU, now, repeats, typical)
        if divided.stack is not None:
            # Kept, so that no layout splits a model whose layers cannot be measured.
            self._divided[tensor] = replace(divided, stack=None, use=None, uncut=uncut)
        return costs

    def _of(self, module: nn.Module) -> Callable[[Any], Any]:
        kind = self.compute_dtype

        def step(batch: Any) -> Any:
            with torch.autocast("cpu", kind, enabled=self.precision.endswith("mixed")):
                return self._step(module, batch)

        return step


def most_microbatches(module: nn.Module, samples: int) -> int:
    """Return the most microbatches of a batch of so many samples."""
    # Batch normalization needs two samples in each microbatch.
    return samples // 2 if any(isinstance(child, BatchNormalization) for child in module.modules()) else samples


def training_step(module: nn.Module, batch: Any) -> Tensor:
    """Run the `training_step` of a LightningModule, or call any other module; return the loss."""
    function = getattr(module, "training_step", module)
    if function is module:
        return loss_of(module(**batch) if isinstance(batch, dict) else module(batch))
    takes_index = len(inspect.signature(function).parameters) > 1
    return loss_of(function(batch, 0) if takes_index else function(batch))
