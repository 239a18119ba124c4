"""Memory of a rank by kind: parameters, gradients, optimizer state, activations, and communication buffers.

Adam in single precision holds 16 bytes for each trained parameter: 4 for itself, 4 for its gradient, 8 for two moments.
Mixed precision holds the same bytes; its casts count among the activations. True half precision holds half. A frozen
parameter has neither gradient nor state.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_parallel.comm.gradient_sums import HALF_DTYPES
from lightning_parallel.data_parallel.bucketed_reducer import BUCKET_BYTES
from lightning_parallel.data_parallel.parameter_slices import MOST_IN_FLIGHT, MOST_LATE
from lightning_parallel.pipeline.measure import STATE_COPIES
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan
from lightning_parallel.planner.rehearsal import Divided

__all__ = ["Held", "ModelParts", "RankMemory", "copies_held", "optimizer_copies", "planned_memory", "state_variants"]


@dataclass(frozen=True)
class Held:
    """The parameters of a part of the model that one rank holds.

    Attributes:
        trained_bytes: Bytes of the parameters with a gradient.
        frozen_bytes: Bytes of the frozen parameters.
        largest_bytes: Bytes of the largest trained parameter.
        count: Number of trained parameters.
        half_bytes: Bytes of the trained parameters of 16 bits whose gradients are added in fp32
            (`gradient_sum_dtype`).
        unit_bytes: Bytes of the largest layer, or of a larger parameter outside the layers: a rank holds two of them in
            full with `zero_stage=3`.
    """

    trained_bytes: int = 0
    frozen_bytes: int = 0
    largest_bytes: int = 0
    count: int = 0
    half_bytes: int = 0
    unit_bytes: int = 0

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], layers: Iterable[Sequence[nn.Parameter]] = ()) -> Held:
        """Add up parameters; each distinct parameter counts once. The sums have the default dtype.

        Args:
            parameters: The parameters.
            layers: Parameters among them that are gathered together, with `zero_stage=3`.
        """
        distinct = {id(parameter): parameter for parameter in parameters}.values()
        trained = [parameter.nbytes for parameter in distinct if parameter.requires_grad]
        frozen = sum(parameter.nbytes for parameter in distinct if not parameter.requires_grad)
        half = sum(one.nbytes for one in distinct if one.requires_grad and one.dtype in HALF_DTYPES)
        unit = max([one.nbytes for one in distinct] + [sum(one.nbytes for one in layer) for layer in layers], default=0)
        return cls(sum(trained), frozen, max(trained, default=0), len(trained), half, unit)

    def __add__(self, other: Held) -> Held:
        return Held(
            self.trained_bytes + other.trained_bytes,
            self.frozen_bytes + other.frozen_bytes,
            max(self.largest_bytes, other.largest_bytes),
            self.count + other.count,
            self.half_bytes + other.half_bytes,
            max(self.unit_bytes, other.unit_bytes),
        )

    @property
    def half_share(self) -> float:
        """The part of the trained bytes whose gradients are added in fp32."""
        return self.half_bytes / self.trained_bytes if self.trained_bytes else 0.0

    @property
    def parameter_bytes(self) -> int:
        return self.trained_bytes + self.frozen_bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank, by kind: the fields but `overlap`.

    Attributes:
        parameters: Trained and frozen parameters.
        gradients: Gradients, their sums in fp32, and the largest new gradient before its addition to the sum.
        optimizer: State of the optimizer.
        activations: Tensors that layers keep from forward to backward, of all microbatches in flight.
        logits: Tensors that the head and the loss keep from forward to backward.
        buckets: Gradients on their way between replicas.
        reserved: Memory of the device's runtime and its communicators.
        host: Tensors in host memory, with `cpu_offload`; not part of `total`.
        overlap: Bytes that two kinds hold one after the other: the buckets of gradients travel when backward has freed
            activations.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buckets: float = 0.0
    reserved: float = 0.0
    host: float = 0.0
    overlap: float = 0.0

    @classmethod
    def of(
        cls,
        held: Held,
        copies: float = STATE_COPIES,
        *,
        accumulates: bool = False,
        activations: float = 0.0,
        logits: float = 0.0,
        replicas: int = 1,
        zero_stage: int = 0,
        reserved: float = 0.0,
        offloads: bool = False,
        host_activations: float = 0.0,
    ) -> RankMemory:
        """Add up the bytes of a rank; without a gradient if `copies` is 1.

        Args:
            held: The parameters of the rank.
            copies: Bytes for each byte of a trained parameter: itself, its gradient, the state. See `optimizer_copies`.
            accumulates: Whether several microbatches add to one gradient.
            activations, logits, reserved: See the attributes.
            replicas: Number of replicas.
            zero_stage: 1 shards the optimizer's state over the replicas; 2 gradients, too; 3 also parameters.
            offloads: Whether the optimizer steps in host memory.
            host_activations: Bytes of activations in host memory.
        """
        # A sum in fp32 holds twice the bytes of a 16-bit parameter, beside its rounded value.
        sums = 2 * held.half_bytes if accumulates else 0
        gradients: float = held.trained_bytes + (held.largest_bytes + sums if accumulates else 0) if copies > 1 else 0
        optimizer = held.trained_bytes * max(0.0, copies - 2)
        # Buckets are copies, and all buckets may be in flight when backward ends.
        buckets: float = held.trained_bytes + sums / 2 if replicas > 1 else 0
        if zero_stage > 0 and replicas > 1:
            optimizer /= replicas
            # Buckets of updated parameters: this rank's slices, and all slices.
            most = MOST_IN_FLIGHT if zero_stage == 3 else MOST_LATE
            few = min(held.trained_bytes, (most + 1) * BUCKET_BYTES)
            buckets = max(buckets if zero_stage == 1 else 0, few * (1 + 1 / replicas))
            if zero_stage >= 2 and not accumulates:
                # Sending frees the full gradients bucket by bucket. In the end only slices remain.
                gradients = max(min(held.trained_bytes, BUCKET_BYTES), held.trained_bytes / replicas)
        # All activations exist at the end of forward, beside earlier gradients; all buckets exist at the end of
        # backward. The step frees gradients of stage 2 and 3, so forward begins without any.
        is_freed = zero_stage >= 2 and replicas > 1 and not accumulates
        overlap = min(activations + logits, buckets + (gradients if is_freed else 0))
        parameters: float = held.parameter_bytes
        if zero_stage == 3 and replicas > 1:
            parameters /= replicas
            # A full layer, and the slices of the next one, which all replicas send.
            buckets += held.unit_bytes * (2 + 1 / replicas)
        host = host_activations
        if offloads and copies > 1:
            # Beside the state, the host has copies of the trained parameters and gradients on which it steps.
            host += optimizer + 2 * held.trained_bytes / (replicas if zero_stage > 0 else 1)
            optimizer = 0.0
        return cls(parameters, gradients, optimizer, activations, logits, buckets, reserved, host, overlap)

    @property
    def total(self) -> float:
        """The most bytes on the device at once."""
        return sum(self.by_kind().values()) - self.host

    def most_by_kind(self) -> dict[str, float]:
        """Return the most bytes of each kind, by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "overlap"}

    def by_kind(self) -> dict[str, float]:
        """Return the bytes that add up to the total, by kind: buckets and gradients without the overlap."""
        found = self.most_by_kind()
        found["buckets"] -= self.overlap
        if found["buckets"] < 0:
            found["gradients"] += found["buckets"]
            found["buckets"] = 0.0
        return found


def planned_memory(
    plan: PipelinePlan,
    stages: Sequence[int],
    copies: float,
    replicas: int = 1,
    zero_stage: int = 0,
    sums_in_fp32: bool = True,
    offloads: bool = False,
) -> RankMemory:
    """Predict the memory of pipeline stages of one rank, without parameters that its earlier stages already hold.

    Args:
        plan: The plan.
        stages: The stages.
        copies, replicas, zero_stage: As for `RankMemory.of`.
        sums_in_fp32: Whether gradients of 16-bit parameters are added in fp32.
        offloads: Whether the optimizer steps in host memory.
    """
    mine = [parameter for stage in stages for parameter in plan.held_parameters(stage)]
    trained = [parameter.num_bytes for parameter in mine if parameter.is_trained]
    half = [one.num_bytes for one in mine if one.is_trained and one.num_bytes == 2 * one.count]
    frozen = sum(parameter.num_bytes for parameter in mine if not parameter.is_trained)
    units = [one.num_bytes for one in mine]
    units += [
        sum(one.num_bytes for name, one in plan.parameters.items() if name.startswith(f"{layer}."))
        for layer, stage in zip(plan.layers, plan.stage_of)
        if stage in stages
    ]
    halves = sum(half) if sums_in_fp32 else 0
    return RankMemory.of(
        Held(sum(trained), frozen, max(trained, default=0), len(trained), halves, max(units, default=0)),
        copies,
        accumulates=plan.schedule.num_microbatches > 1,
        activations=plan.activation_bytes(stages),
        host_activations=plan.host_bytes(stages),
        replicas=replicas,
        zero_stage=zero_stage,
        offloads=offloads,
    )


def copies_held(copies: float, replicas: int, zero_stage: int, half_share: float = 0.0) -> float:
    """Return the bytes that a rank of a pipeline holds for each byte of its trained parameters.

    Args:
        copies, replicas, zero_stage: As for `RankMemory.of`.
        half_share: The part of these bytes whose gradients are added in fp32.
    """
    # So many bytes that the size of a bucket does not count.
    held = Held(trained_bytes=1 << 50, half_bytes=int(half_share * (1 << 50)))
    memory = RankMemory.of(held, copies, accumulates=True, replicas=replicas, zero_stage=zero_stage)
    return memory.total / held.trained_bytes


def state_variants(memory: RankMemory, width: int, replicas: int) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer in each alternative precision and ZeRO stage.

    Args:
        memory: Memory of one rank that holds the full model.
        width: Bytes of one element of a parameter.
        replicas: Number of replicas. By ZeRO (https://arxiv.org/abs/1910.02054), stage 1 shards the optimizer's state
            over them, stage 2 the gradients, too, and stage 3 (FSDP) also the parameters.
    """
    parameters, gradients, optimizer = memory.parameters, memory.gradients, memory.optimizer
    whole = parameters + gradients + optimizer
    found = {"now": whole}
    # Mixed precision keeps these bytes in single precision; its casts are among the activations.
    for name, other in {"single or mixed precision": 4, "true half precision": 2}.items():
        if other != width:
            found[f"in {name}"] = whole * other / width
    if replicas > 1:
        shares = {1: optimizer, 2: optimizer + gradients, 3: whole}
        found |= {f"ZeRO {stage}": whole - share * (1 - 1 / replicas) for stage, share in shares.items()}
    return found


@dataclass(frozen=True)
class ModelParts:
    """Parameters of a sharded model: before, in and after its layers."""

    prologue: list[nn.Parameter]
    layers: list[list[nn.Parameter]]
    epilogue: list[nn.Parameter]
    # Many schedules share the layers of stages and ranks.
    _held: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Held]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, divided: Divided) -> ModelParts:
        if divided.stack is None or divided.use is None:
            return cls(list(divided.module.parameters()), [], [])
        last = len(divided.stack.layers) - 1
        inside = {id(parameter) for layer in divided.stack.layers for parameter in layer.parameters()}
        outside = [(name, value) for name, value in divided.module.named_parameters() if id(value) not in inside]
        used = divided.use.parameters
        layers = [list(layer.parameters()) for layer in divided.stack.layers]
        # Uses by the first and the last layer count as prologue and epilogue below.
        for name, value in outside:
            for index in used[name] - {0, last}:
                layers[index].append(value)
        first = [value for name, value in outside if 0 in used[name]]
        ends = [0, *accumulate(divided.stack.blocks)]
        layers = [[value for layer in layers[start:stop] for value in layer] for start, stop in pairwise(ends)]
        # With one layer, `first` holds the uses of the last layer already.
        return cls(first, layers, [value for name, value in outside if last in used[name] and last > 0])

    def held(self, counts: Sequence[int], ranks: Sequence[int]) -> list[Held]:
        """Return the parameters of each rank of a pipeline; each parameter counts once per rank.

        Args:
            counts: Number of layers of each stage.
            ranks: Rank of each stage.
        """
        key = (*counts,), (*ranks,)
        if key not in self._held:
            self._held[key] = self._held_by_ranks(counts, ranks)
        return self._held[key]

    def _held_by_ranks(self, counts: Sequence[int], ranks: Sequence[int]) -> list[Held]:
        if not self.layers:
            return [Held.of(self.prologue)]
        found: list[list[nn.Parameter]] = [[] for _ in range(max(ranks) + 1)]
        layers: list[list[list[nn.Parameter]]] = [[] for _ in found]
        start = 0
        for stage, count in enumerate(counts):
            for layer in self.layers[start : start + count]:
                found[ranks[stage]] += layer
                layers[ranks[stage]].append(layer)
            start += count
        # If one rank has both ends, `Held.of` counts a tied parameter once.
        found[ranks[0]] += self.prologue
        found[ranks[-1]] += self.epilogue
        return [Held.of(parameters, units) for parameters, units in zip(found, layers)]


def optimizer_copies(optimizers: Sequence[Optimizer]) -> float:
    """Return the bytes held for each byte of a trained parameter: itself, its gradient, and the optimizer's state.

    A copy of the optimizer takes a step on a small parameter to measure its state. If the step fails, the result
    assumes two moments.
    """
    sizes = [sum(value.nbytes for group in each.param_groups for value in group["params"]) for each in optimizers]
    states = sum(size * _state_copies(each) for size, each in zip(sizes, optimizers))
    return 2 + (states / sum(sizes) if any(sizes) else 0.0)


_PROBE_SIZE = 256
"""Largest extent of the parameter that measures the state of an optimizer."""


def _state_copies(optimizer: Optimizer) -> float:
    options = optimizer.param_groups[0] if optimizer.param_groups else {"params": []}
    if not options["params"] or _keeps_tensors_elsewhere(optimizer):
        return 2.0
    first = options["params"][0]
    parameter = nn.Parameter(
        torch.zeros(_probe_shape(options["params"]), dtype=first.dtype, device=_real(first.device))
    )
    parameter.grad = torch.ones_like(parameter)
    # A shallow copy keeps the user's options: the arguments of the constructor are unknown. It gets a new state below.
    probe = copy.copy(optimizer)
    # Schedulers set a `step` attribute that is bound to the original optimizer.
    probe.__dict__.pop("step", None)
    probe.param_groups = [{**options, "params": [parameter]}]
    # A defaultdict, like in the constructor of `Optimizer`: optimizers read missing entries of a parameter.
    probe.state = defaultdict(dict)
    try:
        type(probe).step(probe)
    except Exception:
        return 2.0
    # Without counts of steps, which are small in any model.
    held = [value for value in probe.state[parameter].values() if isinstance(value, Tensor) and value.numel() > 1]
    return sum(value.nbytes for value in held) / parameter.nbytes


def _probe_shape(parameters: Sequence[Tensor]) -> list[int]:
    """Return a small shape with the proportions of the largest parameter."""
    largest = max(parameters, key=Tensor.numel)
    # Optimizers whose state depends on the shape get whole tensors, also of sharded parameters.
    rule = getattr(largest, "shard_rule", None)
    shape = largest.shape if rule is None else rule.full_shape(largest.shape)
    # Proportions count. A factor of a matrix has far fewer elements than the matrix, and a product of long rows more.
    scale = min(1.0, _PROBE_SIZE / max(shape, default=1))
    return [max(2, round(size * scale)) for size in shape] or [2]


def _keeps_tensors_elsewhere(optimizer: Optimizer) -> bool:
    """Return whether a step of a shallow copy could change the original, such as weights in a list."""
    usual = vars(SGD([nn.Parameter(torch.zeros(1))])).keys() | {"step"}
    own = vars(optimizer)
    return bool(usual - {"step"} - own.keys()) or not all(
        isinstance(value, (bool, int, float, str, tuple, type(None))) for key, value in own.items() if key not in usual
    )


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
