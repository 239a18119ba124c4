"""Compressors: reducers with one method for all tensors, and the plain mean for small tensors.

This module also holds helpers for compressors: checks of numbers, values by step, and random numbers.
"""

from __future__ import annotations

import abc
import copy
import hashlib
import inspect
import math
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar, Optional, Union, get_args

import torch
from torch import Tensor

from lightning_parallel.compression.feedback import Feedback, FeedbackName, GradientBlock, Method
from lightning_parallel.compression.reducer import Reducer
from lightning_parallel.compression.wire import (
    AllReduceRequest,
    Codec,
    Exact,
    ReduceScatterRequest,
    Requests,
    StepContext,
    split_by_rank,
)

__all__ = [
    "Compressor",
    "Dense",
    "StepValue",
    "all_values",
    "check_flag",
    "check_fraction",
    "check_integer",
    "check_number",
    "check_ratio",
    "hashed_integers",
    "seeded_generator",
    "value_at",
]


def check_integer(name: str, value: object, least: Optional[int] = None) -> None:
    """Check that `value` is an integer, of at least `least`."""
    expected = f"`{name}` must be an integer{'' if least is None else f' of at least {least}'}"
    # True and False are integers too, but never meant as such here.
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{expected}; got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{expected}; got {value!r}")


def check_number(name: str, value: object) -> float:
    """Check that `value` is a number, and return it as a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number; got {value!r}")
    return float(value)


def check_fraction(name: str, value: object) -> None:
    """Check that `value` is a number in [0, 1)."""
    # Comparisons with NaN are False, so this order of the test refuses NaN as well. `check_ratio` does the same.
    if not 0 <= check_number(name, value) < 1:
        raise ValueError(f"`{name}` must be in [0, 1); got {value!r}")


def check_ratio(name: str, value: object) -> None:
    """Check that `value` is a number in (0, 1]."""
    if not 0 < check_number(name, value) <= 1:
        raise ValueError(f"`{name}` must be in (0, 1]; got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Check that `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False; got {value!r}")


class StepValue:
    """Changes a ratio or a rank during training: each value holds from its step until the next one.

        StepValue({0: 0.25, 100: 0.05, 200: 0.01})
        StepValue.warm_up(0.01, steps=200)

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CompressedDDPStrategy, StepValue, TopK

        ratio = StepValue({0: 0.25, 100: 0.05, 200: 0.01})
        trainer = Trainer(devices=2, strategy=CompressedDDPStrategy(TopK(ratio)))
        trainer.fit(MyModule(), MyData())
        ```

    Args:
        values: Value by the first optimizer step that uses it. Step 0 is required.

    Raises:
        TypeError: If `values` is not a mapping of integers to numbers.
        ValueError: If `values` has no step 0, or a negative step.
    """

    def __init__(self, values: Mapping[int, Union[int, float]]) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f"`values` of `StepValue` must be a mapping such as {{0: 0.25, 100: 0.01}}; got {values!r}")
        for step, value in values.items():
            check_integer("step", step)
            check_number(f"values[{step}]", value)
        if not values or min(values) != 0:
            raise ValueError(f"`values` of `StepValue` must begin at step 0; got the steps {sorted(values)}")
        self.values = dict(sorted(values.items()))

    @classmethod
    def warm_up(
        cls, value: Union[int, float], steps: int, start: Union[int, float] = 0.25, stages: int = 4
    ) -> StepValue:
        """Return a schedule from `start` to `value` within `steps` steps, by equal factors.

        If both are integers (ranks), all values are.

        Source: Deep Gradient Compression, section 3.3 (25 %, 6.25 %, 1.6 %, 0.4 %, 0.1 %), arXiv 1712.01887.
        """
        check_integer("steps", steps, least=0)
        check_integer("stages", stages, least=1)
        if check_number("value", value) <= 0 or check_number("start", start) <= 0:
            raise ValueError(f"`value` and `start` must be positive; got {value!r} and {start!r}")
        factor = (value / start) ** (1 / stages)
        found = {steps * stage // stages: start * factor**stage for stage in range(stages)}
        if isinstance(value, Integral) and isinstance(start, Integral):
            found = {step: round(rank) for step, rank in found.items()}
        # The last value as given, since a product of factors is rounded; without warm-up it replaces `start`.
        return cls({**found, steps: value})

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        return next(value for begin, value in reversed(self.values.items()) if begin <= step)

    def __repr__(self) -> str:
        return f"StepValue({self.values})"


def value_at(value: Union[float, StepValue], step: int) -> float:
    """Return a constant, or the value of a `StepValue` at `step`."""
    return value(step) if isinstance(value, StepValue) else value


def all_values(value: Union[float, StepValue]) -> list[float]:
    """Return all values that `value` takes, the last one last."""
    return list(value.values.values()) if isinstance(value, StepValue) else [value]


def seeded_generator(device: torch.device, *purpose: object) -> Optional[torch.Generator]:
    """Return a generator seeded by `purpose` (seed, step, parameter name, ...): equal wherever and whenever it is made.

    The global generators stay unchanged, and a resumed run draws the same numbers without a saved generator state.
    None on the meta device, which draws nothing. CPU and CUDA draw different numbers: see `hashed_integers`.
    """
    return None if device.type == "meta" else torch.Generator(device).manual_seed(_seed(purpose) >> 1)


def _seed(purpose: Sequence[object]) -> int:
    # `hash` of a string differs from process to process, and the ranks must draw the same numbers.
    return int.from_bytes(hashlib.blake2b(repr(tuple(purpose)).encode(), digest_size=8).digest(), "little")


def hashed_integers(purposes: Sequence[Sequence[object]], count: int, device: torch.device) -> Tensor:
    """Return `count` random integers in [0, 2^31) per purpose, (purposes, count): the same on every device.

    The integers are hashes of positions. Every device computes their multiplications and shifts exactly. Numbers of a
    torch generator depend on the kind of device, and on CUDA also on its size.

    Source: the finalizer `lowbias32` of C. Wellons' hash prospector, keyed before and inside.
    """
    bits = torch.empty(len(purposes), count, dtype=torch.int32, device=device)
    positions = torch.arange(count, dtype=torch.int32, device=device)
    mixed = torch.empty_like(bits)

    def fold(distance: int) -> None:
        torch.bitwise_right_shift(bits, distance, out=mixed)
        bits.bitwise_xor_(mixed.bitwise_and_((1 << 32 - distance) - 1))  # the shift has copied the sign

    seeds = [_seed(purpose) for purpose in purposes]
    # Seeds travel as arguments of kernels. A copy to the device would block the host until the device is done.
    for row, seed in zip(bits, seeds):
        torch.bitwise_xor(positions, _signed(seed), out=row)
    fold(16)
    # int32 multiplication wraps modulo 2^32 on every device, as the hash requires.
    bits.mul_(_signed(0x7FEB352D))
    for row, seed in zip(bits, seeds):
        row.add_(_signed(seed >> 32))
    fold(15)
    bits.mul_(_signed(0x846CA68B))
    fold(16)
    # Without the sign bit, the 31 bits times a run length stay below 2^63 (see `RandomK`).
    return bits.bitwise_and_((1 << 31) - 1).long()


def _signed(number: int) -> int:
    """Return the signed 32-bit integer that equals `number` modulo 2^32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


_DECAYS = {"decayed": 0.5, "fading": 0.95}
_OUTER_ARGUMENTS = {"feedback", "decay", "start_step", "min_numel"}  # without effect on an encoding of values

# `repr` shows them last, in this order.
_LAST_ARGUMENTS = ("feedback", "decay", "momentum", "start_step", "min_numel", "seed")


class Compressor(Reducer, Method):
    """Treats all tensors the same way: the base class of the compressors.

    `a | b` encodes the values that `a` selects with `b`. `a` sets the error feedback.

    Args:
        feedback: Error feedback. `classic` adds the unsent part (the residual) to the next gradient, and suits most
            cases. `decayed` adds a running mean of the residuals, for encodings with much noise. `fading` reduces the
            weight of old residuals, for drifts of local steps. `ef21` sends the change since the last step, for
            replicas with different data. None drops the unsent part, needs no memory and suits unbiased methods.
        decay: Share of the old residual that `decayed` and `fading` keep, in [0, 1). By default 0.5 for `decayed` and
            0.95 for `fading`.
        start_step: Steps with full gradients before compression begins.
        min_numel: Tensors with fewer elements, or with less than two dimensions, are averaged uncompressed.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, or arguments do not fit each other.
    """

    # By name, since the classes of encodings are derived from this one.
    codecs: ClassVar[tuple[str, ...]] = ()  # names of the classes allowed after `|`
    method_slots: ClassVar[frozenset[str]] = frozenset()  # of the method, besides the slots of the feedback
    # Where it does not suit optimizers that scale each element by its own history: the loss of the example GPT after
    # 600 steps of AdamW, see `benchmarks/convergence.py`.
    loss_under_adam: ClassVar[str] = ""

    def __init__(
        self,
        *,
        feedback: Optional[FeedbackName] = "classic",
        decay: Optional[float] = None,
        start_step: int = 0,
        min_numel: int = 1024,
    ) -> None:
        super().__init__()
        if feedback not in (None, *get_args(FeedbackName)):
            names = ", ".join(map(repr, get_args(FeedbackName)))
            raise ValueError(f"`feedback` must be None or one of {names}; got {feedback!r}")
        if decay is not None:
            check_fraction("decay", decay)
            if feedback not in _DECAYS:
                names = " and ".join(map(repr, _DECAYS))
                raise ValueError(f"`decay` needs feedback {names}; got decay={decay} with feedback={feedback!r}")
        check_integer("start_step", start_step, least=0)
        check_integer("min_numel", min_numel, least=0)
        self.start_step = start_step
        self.min_numel = min_numel
        self.decay = decay
        self.feedback = Feedback(feedback, _DECAYS.get(feedback or "", 0.0) if decay is None else decay)
        self.values: Codec = Exact()
        # One object for all small gradients: gradients with the same method object share a block.
        self._dense = Dense()

    @abc.abstractmethod
    def compress(self, work: Tensor, block: GradientBlock, step: StepContext) -> Requests:
        """Send `work` M, (names, *shape), and write the mean into `block.outputs`; turn M into M - C(M)."""

    @property
    def slots(self) -> frozenset[str]:
        """The slots of memory that the compressor uses."""
        return self.method_slots | self.feedback.slots | self._dense.slots

    @property
    def separate(self) -> bool:
        """True if the encoding of values draws random numbers."""
        return self.values.stochastic

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return whether a gradient of `shape` is worth compressing."""
        # At least one element: an empty tensor has no element to select.
        return len(shape) >= 2 and math.prod(shape) >= max(self.min_numel, 1)

    def phase(self, step: int) -> Optional[Hashable]:
        """Return whether compression has begun; None for classes that choose their methods otherwise."""
        return step >= self.start_step if type(self).method is Compressor.method else None

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        """Return this compressor, or the plain mean for small tensors and the first steps."""
        return self if step >= self.start_step and self.accepts(shape) else self._dense

    def requests(self, block: GradientBlock, step: StepContext) -> Requests:
        """Replace the block's gradients by their mean, with error feedback around `compress`."""
        work = self.feedback.apply(block, step.memory, step.scale)
        yield from self.compress(work, block, step)
        self.feedback.update(block, step.memory, work, step.scale)

    def __or__(self, values: Codec) -> Compressor:
        # A copy: the user may also use the first compressor alone.
        composed = copy.deepcopy(self)
        composed._encode_values(values)
        return composed

    def _encode_values(self, values: Codec) -> None:
        """Send the selected values encoded by `values`."""
        allowed = f"one of {', '.join(self.codecs)}" if self.codecs else "nothing"
        # Compressors that cannot encode values pass here: the next check names the classes that may follow.
        if not isinstance(values, (Codec, Compressor)):
            raise TypeError(f"`{type(self).__name__} | ...` must be followed by {allowed}; got {values!r}")
        if type(values).__name__ not in self.codecs:
            raise ValueError(
                f"`{type(self).__name__} | ...` must be followed by {allowed}; got {type(values).__name__}"
            )
        if not isinstance(self.values, Exact):
            raise ValueError(
                f"`{type(self).__name__}` must have one encoding of values; got {self.values!r} and {values!r}"
            )
        settings = values._settings() if isinstance(values, Compressor) else {}
        useless = {name: value for name, value in settings.items() if name in _OUTER_ARGUMENTS and value is not None}
        if useless:
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in useless)} must be given to {type(self).__name__}; got {values!r},"
                " where it has no effect on the encoding of values"
            )
        self.values = values

    def _correct_momentum(self, momentum: float) -> None:
        """Apply momentum before the selection, and to the plain means."""
        check_fraction("momentum", momentum)
        averages = self.feedback.kind == "ef21"
        if momentum and self.feedback.kind not in ("classic", "ef21"):
            raise ValueError(
                f"`momentum` needs feedback 'classic' or 'ef21'; got momentum={momentum} with"
                f" feedback={self.feedback.kind!r}"
            )
        self.feedback = Feedback(self.feedback.kind, self.feedback.decay, momentum, averages)
        self._dense = Dense(momentum, averages)

    def _settings(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults, without the encoding of values."""
        held = {**vars(self), "feedback": self.feedback.kind, "momentum": self.feedback.momentum}
        return {
            name: held[name]
            for name, default in _defaults(type(self)).items()
            if name != "values" and name in held and held[name] != default
        }

    def _main(self) -> dict[str, str]:
        """Return the argument that `repr` always shows, and how."""
        return {}

    def __repr__(self) -> str:
        main = self._main()
        others = [f"{name}={value!r}" for name, value in self._settings().items() if name not in main]
        alone = f"{type(self).__name__}({', '.join([*main.values(), *others])})"
        return alone if isinstance(self.values, Exact) else f"{alone} | {self.values!r}"


def _defaults(compressor: type[Compressor]) -> dict[str, Any]:
    """Return the default of each constructor argument; the arguments of all compressors come last."""
    found = {name: parameter.default for name, parameter in inspect.signature(compressor).parameters.items()}
    first = [name for name in found if name not in _LAST_ARGUMENTS]
    return {name: found[name] for name in (*first, *_LAST_ARGUMENTS) if name in found}


class Dense(Reducer, Method):
    """The plain mean, by all-reduce. Exact, linear and unbiased.

    Gradients are sent and summed in their own dtype, as by `DistributedDataParallel` without a hook. Gradients of 16
    bits are divided before the sum, so the sum stays in range. Compressors use this method for small gradients, and for
    all gradients before their `start_step`.

    Args:
        momentum: Momentum to apply to the mean, for an optimizer without momentum (momentum correction).
        averages: Whether the velocity is a running mean of gradients, rather than a sum.
    """

    def __init__(self, momentum: float = 0.0, averages: bool = False) -> None:
        super().__init__()
        check_fraction("momentum", momentum)
        self.feedback = Feedback(momentum=momentum, averages=averages)

    def phase(self, step: int) -> Optional[Hashable]:
        """Return 0: all steps belong to one phase."""
        return 0

    def method(self, name: str, shape: Sequence[int], step: int) -> Method:
        """Return this method for all parameters."""
        return self

    @property
    def slots(self) -> frozenset[str]:
        """The velocity, with momentum."""
        return self.feedback.slots

    @property
    def scatters(self) -> bool:
        """True without momentum: the velocity needs the full mean."""
        return not self.feedback.momentum

    def requests(self, block: GradientBlock, step: StepContext) -> Requests:
        """Replace the block's gradients by their mean."""
        block.allocate_outputs()
        if block.shard is not None:
            yield from self._shard_requests(block, block.shard, step)
            return
        # A lone contiguous gradient is summed in its own memory, without a copy.
        if len(block.names) == 1 and block.outputs[0] is block.gradients[0]:
            total = yield AllReduceRequest(block.outputs[0].unsqueeze(0))
        else:
            stacked = torch.stack(block.gradients)
            if stacked.dtype == block.dtype:
                total = yield AllReduceRequest(stacked)
            else:
                # Divided before the sum: a sum of 16-bit gradients over many ranks may overflow.
                mean = yield AllReduceRequest(stacked.div_(step.group.size))
                step.watch(mean)
                total = mean.to(block.dtype)
        # The 16-bit branch above has divided and watched its mean already.
        if block.gradients[0].dtype == block.dtype:
            step.average_(total)
        self.feedback.apply_momentum(total, block, step.memory, step.scale)
        block.write(total)
        # The gradients were summed with the loss scale on them, so their mean has it already.
        block.write_gradients(scale=1.0)

    @staticmethod
    def _shard_requests(block: GradientBlock, shard: int, step: StepContext) -> Requests:
        rows = torch.stack(block.gradients).flatten(1)
        is_short = rows.dtype != block.dtype
        if is_short:
            # Divided before the sum, as in `requests`, so that 16 bits do not overflow.
            rows.div_(step.group.size)
        mine = yield ReduceScatterRequest(split_by_rank(rows, step.group.size, shard).flatten(1))
        step.watch(mine)
        mean = mine.to(block.dtype) if is_short else mine.div_(step.group.size)
        block.write_shard(mean.view(-1, shard), shard, step.group.rank)
        block.write_gradients(scale=1.0)

    def __repr__(self) -> str:
        return f"Dense(momentum={self.feedback.momentum})" if self.feedback.momentum else "Dense()"
