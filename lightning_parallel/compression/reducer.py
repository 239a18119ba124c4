"""The contract of every reducer, and its step: a transaction over the buckets of one optimizer step.

step = reducer.begin(group)
step.reduce_(bucket)  ...  step.reduce_(bucket)     any number, in one order on all ranks
step.commit()                                       False, without a change of state, if a gradient was not finite
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import Group, Phases
from lightning_parallel.compression.compressor_state import Memory, SavedStates, slots_for, state_of
from lightning_parallel.compression.feedback import (
    CompressionError,
    GradientBlock,
    Method,
    Outcome,
    Padding,
    ReducedBlock,
    estimate_method,
    working_dtype,
)
from lightning_parallel.compression.wire import Seconds, goes_alone, launches_kernels, run_phases

__all__ = [
    "LATE",
    "GroupLike",
    "Reducer",
    "ReductionPlan",
    "ReductionStep",
    "Signature",
    "as_group",
    "check_reducer",
    "kind_of",
    "scale_reader",
]


Signature = tuple[tuple[str, tuple[int, ...], torch.dtype, torch.layout], ...]


class PlannedBlock(NamedTuple):
    """Gradients that one method may compute together, by their positions in the mapping of gradients."""

    method: Method
    names: tuple[str, ...]
    positions: tuple[int, ...]
    shard: Optional[int]
    padding: Optional[Padding]

    @classmethod
    def of(
        cls,
        method: Method,
        names: Sequence[str],
        shard: Optional[int],
        shapes: Mapping[str, torch.Size],
        position: Mapping[str, int],
    ) -> PlannedBlock:
        """Return a block of `names`, given the shapes and positions of all gradients."""
        mine = [shapes[name] for name in names]
        extents = method.padded(mine[0])
        # Gradients of one shape need no zeros.
        padding = None if extents is None or len(set(mine)) == 1 else Padding(mine, extents)
        return cls(method, tuple(names), tuple(position[name] for name in names), shard, padding)


class ReductionPlan(NamedTuple):
    """How to reduce gradients of one kind.

    Attributes:
        signature: Names, shapes, dtypes and layouts of the gradients, sorted by name.
        digest: 63 bits of the signature, which fit into a signed integer.
        blocks: The blocks, in an order that is equal on all ranks.
    """

    signature: Signature
    digest: int
    blocks: list[PlannedBlock]

    @classmethod
    def of(
        cls,
        named_gradients: Mapping[str, Tensor],
        shards: Mapping[str, int],
        choose: Callable[[str, Sequence[int]], Method],
    ) -> ReductionPlan:
        """Return the plan for gradients of this kind.

        Args:
            named_gradients: Gradients by parameter name.
            shards: See `ReductionStep.reduce_`.
            choose: Returns the method for a name and shape.
        """
        found: dict[Hashable, tuple[Method, Optional[int], list[str]]] = {}
        methods = {name: choose(name, gradient.shape) for name, gradient in named_gradients.items()}
        shapes = {name: gradient.shape for name, gradient in named_gradients.items()}
        padded = _padded(shapes, methods)
        seen: set[Tensor] = set()  # tensors hash by identity: a tied gradient under two names is reduced once
        # Sorted: the dictionaries of two ranks may have different orders, but their requests must pair up.
        for name in sorted(named_gradients):
            gradient = named_gradients[name]
            if gradient.numel() == 0 or gradient in seen:
                continue
            seen.add(gradient)
            method = methods[name]
            shard = shards.get(name) if method.scatters else None
            # A large gradient alone is summed in its own memory. In a block it would be copied twice.
            large = not method.batched and goes_alone(gradient)
            separate_name = name if large or method.separate else None
            key = (id(method), padded.get(name, gradient.shape), gradient.dtype, gradient.device, shard, separate_name)
            found.setdefault(key, (method, shard, []))[2].append(name)
        position = {name: index for index, name in enumerate(named_gradients)}
        blocks = [PlannedBlock.of(method, names, shard, shapes, position) for method, shard, names in found.values()]
        signature = tuple((name, tuple(g.shape), g.dtype, g.layout) for name, g in sorted(named_gradients.items()))
        digest = blake2b(repr(signature).encode(), digest_size=8).digest()
        return cls(signature, int.from_bytes(digest, "little") >> 1, blocks)

    def blocks_of(self, gradients: Sequence[Tensor], number: int, memory: Memory) -> list[tuple[Method, GradientBlock]]:
        """Return the blocks of step `number`; a block whose parameters have different step numbers is divided."""
        blocks: list[tuple[Method, GradientBlock]] = []
        for method, names, positions, shard, padding in self.blocks:
            mine = [gradients[position] for position in positions]
            numbers = method.effective_steps(names, number, memory)
            if isinstance(numbers, int):
                block = GradientBlock(names, mine, effective_step=numbers, shard=shard, padding=padding)
                blocks.append((method, block))
                continue
            for own in sorted(set(numbers)):
                some = [index for index, other in enumerate(numbers) if other == own]
                few = tuple(names[index] for index in some), [mine[index] for index in some]
                part = None if padding is None else Padding([mine[index].shape for index in some], padding.extents)
                blocks.append((method, GradientBlock(*few, effective_step=own, shard=shard, padding=part)))
        return blocks


def _padded(shapes: Mapping[str, torch.Size], methods: Mapping[str, Method]) -> dict[str, tuple[int, int]]:
    """Return the extents that zeros fill gradients up to; nothing if that would save few blocks."""
    found = {name: methods[name].padded(shape) for name, shape in shapes.items() if shape.numel()}
    padded = {name: extents for name, extents in found.items() if extents is not None}
    saved = len({shapes[name] for name in padded}) - len(set(padded.values()))
    return padded if saved >= _WORTHWHILE else {}


def kind_of(named_gradients: Mapping[str, Tensor], shards: Mapping[str, int]) -> tuple[Any, ...]:
    """Return a key that gradients with the same plan share: all inputs of `ReductionPlan.of`."""
    gradients = named_gradients.values()
    identities = [id(gradient) for gradient in gradients]
    # Tied gradients are reduced once, so the names that share a tensor are part of the key.
    tied = tuple(map(identities.index, identities)) if len(set(identities)) < len(identities) else None
    kinds = tuple([(gradient.shape, gradient.dtype, gradient.device, gradient.layout) for gradient in gradients])
    return tuple(named_gradients), kinds, tied, tuple(shards.items())


GroupLike = Union[Group, dist.ProcessGroup, None]
LATE = 1 << 40  # a step at which every warm-up and schedule has ended; even, as the alternating methods count in twos

_WORTHWHILE = 8  # saved blocks from which on small gradients are filled up with zeros: a bucket of few shapes is not
_MAX_PLANS = 1 << 12  # kept at once: one for each bucket in each phase, while the buckets do not change
_CACHED = 1 << 19  # elements that stay in a CPU's cache from one operation to the next


class Reducer(abc.ABC):
    """Replaces gradients by their (approximate) mean over a group, in place.

    Attributes:
        scale: Loss scale of the gradients. The reducer keeps its memory without it. Set it before a step.
        expects_rollback: True if the run skips steps as a routine, without a loss scale. (Under a loss scale, the
            scaler skips steps.) Compressors then keep the data to restore every bit. Set it before a step.
        step: Steps committed so far, without skipped steps.
        seconds: Times of the parts of the last step.
        blocks: Blocks of gradients that the last step reduced.
        sample_every: Steps between two measurements of the error of the means. Each costs an all-reduce. 0 measures
            nothing.
        last_error: Last measurement of the error. None before the first one.
        observers: Functions that the reducer calls with the outcome of each applied step, on the thread that ends the
            step.
        owners: Position in the node of the rank that compresses a parameter, by parameter name. See
            `HierarchicalReducer`.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self.expects_rollback = False
        self.step = 0
        self.seconds = Seconds()
        self.blocks: list[ReducedBlock] = []
        self.sample_every = 0
        self.last_error: Optional[CompressionError] = None
        self.observers: list[Callable[[Outcome], None]] = []
        self.owners: dict[str, int] = {}
        self.memory = Memory()
        self._group_size = 1
        self._agreed: set[tuple[Any, ...]] = set()
        self._plans: dict[Hashable, ReductionPlan] = {}

    @property
    def slots(self) -> Optional[frozenset[str]]:
        """The slots of memory that the reducer uses; None if unknown."""
        return None

    def leave_device(self) -> None:
        """Keep the memory on the CPU until the next step, which takes it back to the gradients' device."""
        self.memory.leave_device()

    def reset(self) -> None:
        """Return to the state before the first step."""
        self.memory = Memory()
        self.step = 0
        self.scale = 1.0
        self.seconds = Seconds()
        self.blocks = []
        self.last_error = None
        self.owners = {}
        self._agreed = set()
        self._plans = {}

    def phase(self, step: int) -> Optional[Hashable]:
        """Return a value that is the same in all steps in which `method` returns the same methods; None if unknown.

        Within a phase, a reducer plans once per set of names.
        """
        return None

    @abc.abstractmethod
    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        """Return the method for parameter `name` in step number `step`; equal on all ranks."""

    def reduce_(self, named_gradients: Mapping[str, Tensor], group: GroupLike = None) -> bool:
        """Replace each gradient by its (approximate) mean over `group`: one whole step.

        Args:
            named_gradients: Gradients by parameter name; the same names and shapes on every rank.
            group: A group of this library or of torch; None means all ranks.

        Returns:
            True if the step was applied. False if a gradient was not finite on some rank. The gradients then hold
            non-finite values on every rank, so that a check skips the step on every rank. The state of the reducer
            stays unchanged.

        Raises:
            TypeError: If a gradient is sparse, complex or of integers.
            ValueError: If the ranks bring different names, shapes or dtypes.
        """
        with self.begin(group) as step:
            step.check_equal(named_gradients)
            step.reduce_(named_gradients)
            return step.commit()

    def begin(self, group: GroupLike = None) -> ReductionStep:
        """Start a step that is reduced in several buckets: `reduce_` each, in one order on all ranks, then `commit`.

        Ranks whose buckets differ get an error only if the bucket is new to all of them.
        """
        return ReductionStep(self, as_group(group))

    def wire_bytes(
        self,
        named_shapes: Mapping[str, Sequence[int]],
        world_size: int,
        step: Optional[int] = None,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """Return the bytes that one rank sends in one step; nothing is compressed.

        The methods are run on meta tensors, which have shapes but no data, and their requests are counted.

        Args:
            step: Number of the step; None for one after all warm-up and schedules (on average, where steps alternate).
            dtype: Dtype of the gradients.
        """
        # Two steps: an alternating method sends one factor in even and the other one in odd steps.
        steps = [LATE, LATE + 1] if step is None else [step]
        known: dict[tuple[Method, tuple[int, ...], int], float] = {}
        total = 0.0
        for number in steps:
            for name, shape in named_shapes.items():
                if 0 in shape:
                    continue
                method = self.method(name, shape, number)
                key = (method, tuple(shape), number)
                if key not in known:
                    known[key] = estimate_method(method, name, shape, dtype, world_size, number)
                total += known[key]
        return round(total / len(steps))

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state: tensors by slot and parameter name, and numbers."""
        return state_of(self.memory, self.step, self._group_size)

    def load_state_dict(self, state: SavedStates, group: GroupLike = None) -> None:
        """Continue from `state_dict()` of the same rank, bit for bit, or from a list with the states of all ranks.

        As many ranks as in the list continue bit for bit, too. Any other number of ranks continues from the mean of the
        states. From the state of another compressor this takes the slots it uses, and warns about the rest.

        Raises:
            ValueError: If `state` has another version, is damaged, or is one of a different number of states.
        """
        group = as_group(group)
        self.memory.load(slots_for(state, group, self.slots))
        self.step = int((state if isinstance(state, Mapping) else state[0])["step"])
        self._group_size = group.size

    @property
    def residual_norms(self) -> dict[str, float]:
        """Euclidean norm of this rank's residual by parameter name."""
        norms = {name: tensor.norm().double() for slot, name, tensor in self.memory.items() if slot == "residual"}
        # One transfer for all, as each waits for the device.
        return dict(zip(norms, torch.stack(list(norms.values())).tolist())) if norms else {}

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of this rank's residuals."""
        return math.hypot(*self.residual_norms.values())


def as_group(group: GroupLike) -> Group:
    """Return the group of this library."""
    return group if isinstance(group, Group) else Group.of(group, axis="data_parallel")


class ReductionStep:
    """One optimizer step of a reducer, in any number of buckets; leaving it without `commit` rolls back.

    Attributes:
        number: Number of committed steps before this step.
        inside_bytes: Bytes that this rank has sent inside its node, see `HierarchicalReducer`.
    """

    def __init__(self, reducer: Reducer, group: Group) -> None:
        self.reducer = reducer
        self.group = group
        self.number = reducer.step
        self.scale = reducer.scale
        self.expects_rollback = reducer.expects_rollback or reducer.scale != 1
        self.memory = reducer.memory
        self.inside_bytes = 0
        self._watched: list[Tensor] = []
        self._planned: Optional[tuple[Mapping[str, Tensor], ReductionPlan]] = None
        self._open = True
        self._seconds = Seconds()
        self._blocks: list[ReducedBlock] = []
        sampled = reducer.sample_every > 0 and reducer.step % reducer.sample_every == 0
        self._error = CompressionError() if sampled else None
        self.memory.rollback()  # an earlier step may have been left by an exception

    def __enter__(self) -> ReductionStep:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self.rollback()

    def check_equal(self, named_gradients: Mapping[str, Tensor]) -> None:
        """Check that every rank is about to bring the same gradients.

        Raises:
            ValueError: On every rank, with the gradients in which they differ.
        """
        plan = self._plan(named_gradients, {})
        self._planned = named_gradients, plan
        # A step of one bucket checks every time, for one message of eight bytes. Steps of several buckets compare only
        # new buckets.
        if not comm.equal_everywhere(plan.digest, self.group):
            self._agree_on(plan.signature)

    def reduce_(self, named_gradients: Mapping[str, Tensor], shards: Optional[Mapping[str, int]] = None) -> None:
        """Replace a part of the gradients by their mean; each parameter comes once in a step.

        Args:
            shards: Elements of a rank's part of the flattened gradient, for parameters of which each rank needs only
                its part. The other parts then hold undefined values. Ranks see different means, so `verdict` covers the
                numbers of this rank alone.
        """
        for wait in self.phases(named_gradients, self.group, shards):
            wait()

    def overlaps(self, named_gradients: Mapping[str, Tensor]) -> bool:
        """Tell, equally on all ranks, whether the phases of these gradients may alternate with another bucket."""
        # The first step compares the gradients, and a measured step takes true means. Neither runs in phases.
        if self._error:
            return False
        plan = self._plan(named_gradients, {})
        self._planned = named_gradients, plan
        return (self.group.ranks, plan.digest) in self.reducer._agreed

    def phases(
        self, named_gradients: Mapping[str, Tensor], group: Group, shards: Optional[Mapping[str, int]] = None
    ) -> Phases:
        """Reduce like `reduce_`, in phases: yield a function that waits for the messages of the phase.

        Args:
            group: The group that carries the messages, of the same ranks; see `overlaps`.
            shards: See `reduce_`.
        """
        if not self._open:
            raise RuntimeError("This step was committed or rolled back already. Call `begin` for the next step")
        # The error is measured against the full mean, so every rank needs the full mean.
        shards = {} if self._error or shards is None else shards
        planned, self._planned = self._planned, None
        if planned is not None and planned[0] is named_gradients and not shards:
            plan = planned[1]
        else:
            plan = self._plan(named_gradients, shards)
        # Before any collective: ranks with different gradients would pair up different tensors, or wait forever.
        self._agree(named_gradients, plan)
        true = CompressionError.true_means(named_gradients, self.group) if self._error else {}
        # Autograd must not see the changes in place.
        gradients = [gradient.detach() if gradient.requires_grad else gradient for gradient in named_gradients.values()]
        blocks = plan.blocks_of(gradients, self.number, self.memory)
        sent = yield from run_phases([method.requests(block, self) for method, block in blocks], group, self._seconds)
        for (method, block), num_bytes in zip(blocks, sent):
            dtype = block.gradients[0].dtype
            self._blocks.append(
                ReducedBlock(
                    method, block.names, block.num_elements, dtype, self.group.size, round(num_bytes), block.shard
                )
            )
        if self._error:
            self._error.add(named_gradients, true)

    def watch(self, received: Tensor) -> None:
        """Check at the end of the step that `received`, which is equal on all ranks, is finite.

        A gradient that is not finite on some rank must make `received` not finite.
        """
        # Only the sum is kept, and `commit` reads it: reading it here would block the host for each bucket.
        # In the working dtype: finite numbers of 16 bits may add up to infinity.
        self._watched.append(received.detach().sum(dtype=working_dtype(received.dtype)))

    def average_(self, total: Tensor) -> Tensor:
        """Watch a contiguous sum over the ranks and divide it by their number, in place."""
        extent = _CACHED if total.device.type == "cpu" else total.numel()
        # On a CPU in pieces: sum and division read a piece while it is in the cache.
        for part in total.view(-1).split(max(extent, 1)):
            self.watch(part)
            part.div_(self.group.size)
        return total

    @property
    def verdict(self) -> Tensor:
        """Whether every gradient so far was finite on every rank, on their device: the host does not wait for it."""
        found = [torch.stack(some).isfinite().all() for some in _by_kind(self._watched)]
        if len(found) == 1:
            return found[0]
        return torch.stack([one.to(found[0].device) for one in found]).all() if found else torch.tensor(True)

    def commit(self, finite: Optional[bool] = None) -> bool:
        """End the step; False, without a change of state, if a gradient was not finite on any rank.

        Args:
            finite: The verdict, if the caller knows it. None reads `verdict`, which blocks the host.
        """
        self._open = False
        if finite is None:
            on_host = not any(map(launches_kernels, self._watched))
            finite = all(map(math.isfinite, self._watched)) if on_host else bool(self.verdict)
        if not finite:
            self.memory.rollback()
            return False
        # Not before the verdict: until this line every value of the last step is intact.
        self.memory.commit()
        self.reducer._group_size = self.group.size
        self.reducer.seconds = self._seconds
        self.reducer.blocks = self._blocks
        self.reducer.last_error = self._error or self.reducer.last_error
        self.reducer.step += 1
        outcome = Outcome(self._blocks, self._seconds, self._error, self.inside_bytes)
        for observer in self.reducer.observers:
            observer(outcome)
        return True

    def rollback(self) -> None:
        """End the step and restore the state before it."""
        self._open = False
        self.memory.rollback()

    def _plan(self, named_gradients: Mapping[str, Tensor], shards: Mapping[str, int]) -> ReductionPlan:
        """Return the plan for these gradients, which is made once in a phase of the reducer."""
        phase = self.reducer.phase(self.number)
        choose = partial(self.reducer.method, step=self.number)
        if phase is None:
            return ReductionPlan.of(named_gradients, shards, choose)
        key = (phase, *kind_of(named_gradients, shards))
        plans = self.reducer._plans
        if key not in plans:
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            plans[key] = ReductionPlan.of(named_gradients, shards, choose)
        return plans[key]

    def agree(self, named_gradients: Mapping[str, Tensor]) -> None:
        """Check gradients of a new kind with the other ranks, before a different step reduces them.

        Raises:
            TypeError, ValueError: See `Reducer.reduce_`.
        """
        self._agree(named_gradients, self._plan(named_gradients, {}))

    def _agree(self, named_gradients: Mapping[str, Tensor], plan: ReductionPlan) -> None:
        """Check gradients of a new kind with the other ranks, before the first collective on them."""
        key = (self.group.ranks, plan.digest)
        if key in self.reducer._agreed:
            return
        refused = {
            name: f"{gradient.layout} {gradient.dtype}"
            for name, gradient in named_gradients.items()
            if gradient.layout != torch.strided or not gradient.dtype.is_floating_point
        }
        # All ranks raise together: a rank that raised alone would leave its peers in the next collective.
        error = TypeError(f"Gradients must be dense and of a floating-point dtype; got {refused}")
        comm.raise_together(error if refused else None, self.group)
        # Different settings ask for different collectives, and different step numbers draw different random numbers.
        settings = {"compressor": repr(self.reducer), "step": self.number, "sample_every": self.reducer.sample_every}
        comm.agree("the compressor and its step", settings, self.group)
        self._agree_on(plan.signature)
        self.reducer._agreed.add(key)

    def _agree_on(self, signature: Signature) -> None:
        listed = {name: f"{list(shape)} {dtype} {layout}" for name, shape, dtype, layout in signature}
        comm.agree("the gradients' names, shapes and dtypes", listed, self.group)


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def scale_reader(scaler: Optional[Any]) -> Callable[[], float]:
    """Return a function that reads the loss scale of `scaler`, such as a `torch.amp.GradScaler`; 1 without one."""
    return lambda: 1.0 if scaler is None else float(scaler.get_scale())


def check_reducer(compression: object) -> None:
    """Check the argument `compression`.

    Raises:
        TypeError: If `compression` is no compressor.
    """
    if not isinstance(compression, Reducer):
        hint = f"; did you mean {compression.__name__}()?" if isinstance(compression, type) else ""
        raise TypeError(f"`compression` must be a compressor such as PowerSGD(rank=4); got {compression!r}{hint}")
