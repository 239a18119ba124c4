"""Random numbers in regions between sharded layers, where the ranks hold different parts of the activations.

They are equal on all ranks where activations are replicated, and different where these are sharded. Between a
column-parallel layer and the row-parallel layer that follows it, each rank uses a separate random stream:

    replicated  |  region                          |  replicated
    state S     |  seed(S, rank)  dropout, ...     |  S, advanced by one draw if the region drew anything

The stream derives from the replicated state alone. So code that restores this state (activation checkpointing before
it recomputes, a resumed run) reproduces the region as well. A region that draws nothing does not change the state.

Some code inside a region draws for full samples: stochastic depth, one mask for all positions or features. Such draws
come from the replicated stream. A draw is for this rank's part only if its shape has the part's extent. In doubt it is
replicated: equal masks on all ranks are still random, but different masks for the same sample are wrong.

After `QUIET` passes without a draw a region stays closed, which saves the switch, until code draws inside it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.comm import Group
from lightning_parallel.compat import hook_after, hook_before
from lightning_parallel.compat.torch import (
    current_function_mode,
    current_graph_task_id,
    dispatch_modes_suspended,
    has_compiled_parts,
    is_same_memory,
    num_dispatch_modes,
    pytree,
)

__all__ = [
    "DividedExtent",
    "RandomRegion",
    "connect_random_regions",
    "is_off",
    "is_quiet_in_graph",
    "is_same_state",
    "own_stream",
    "random_state",
]

QUIET = 32

# The increment of SplitMix64, 2^64 over the golden ratio: it keeps the seeds of neighbouring ranks far apart.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class DividedExtent:
    """How activations are sharded in a region, to tell draws for a rank's part from draws for full samples.

    Attributes:
        shape: The shape of this rank's part.
        dim: The sharded dimension.
        parts: The extents of all ranks' parts in that dimension.
        whole_features: The number of input features, if the region is sharded by features.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...]
    whole_features: int = 0

    @property
    def is_even(self) -> bool:
        """Whether all parts have the same extent."""
        return len(set(self.parts)) == 1

    def verdict(self, name: str, size: Sequence[int]) -> str:
        """Return `"part"`, `"whole"` or `"doubt"` for a draw of numbers of that `size` by the function `name`."""
        # Positions come before the features, which are the last dimension.
        if self.dim < len(self.shape) - 1:
            return self._by_positions(size)
        return "part" if name in _OF_HEADS else self._by_features(name, size)

    def _by_positions(self, size: Sequence[int]) -> str:
        mine, features = self.shape[self.dim], self.shape[-1]
        samples = math.prod(self.shape[:-1]) // max(mine, 1)
        # The first dimension holds samples, and their number may equal the number of positions.
        rest = size[1:] if self.dim and len(size) == len(self.shape) and size[0] == self.shape[0] else size
        # Without an extent of a part, the numbers are for full samples or for features.
        if set(rest) <= {1, samples, features} - {*self.parts}:
            return "whole"
        # A part of one position cannot be told from a dimension of extent one.
        if 1 in self.parts:
            return "doubt"
        is_in_place = len(size) >= len(self.shape) and size[self.dim] == mine
        is_flat = samples > 1 and size[0] == samples * mine
        if is_in_place or is_flat:
            return "part"
        # A mask of positions, unless as many samples or features make it ambiguous.
        return "part" if mine in size and not {samples, features} & {*self.parts} else "doubt"

    def _by_features(self, name: str, size: Sequence[int]) -> str:
        lead = {1, *self.shape[:-1], math.prod(self.shape[:-1])}
        # Fused projections: gate and up; query, key and value.
        fused = [count for count in (1, 2, 3) if all(part % count == 0 for part in self.parts)]
        widths = {part // count for part in self.parts for count in fused}
        if name in _DROPOUTS:  # a dropout gets an activation
            is_full = len(size) >= len(self.shape) and 1 not in size[1:]
            if size and size[-1] == self.whole_features and self.whole_features not in widths:
                return "whole"
            return "part" if is_full or not set(size) <= lead else "whole" if not widths & {*size} else "doubt"
        rest = size[1:] if len(size) == len(self.shape) > 1 and size[0] == self.shape[0] else size
        if set(rest) <= lead - widths:
            return "whole"
        is_certain = bool(size) and size[-1] in widths and not widths & (lead | {self.whole_features})
        return "part" if is_certain else "doubt"


class RandomRegion:
    """Random stream of the sharded part of a computation; the layers that share it open and close it.

    The region counts as open only while the generator still has its seed. It counts as closed once other code has
    restored or reseeded the generator (the end of a recomputation, an exception).

    Args:
        group: The ranks.
        is_quiet: Whether its blocks are known to draw nothing.

    Attributes:
        draws: How many regions of this process have drawn numbers for a rank's part.
        is_quiet: Whether its blocks are known to draw nothing, so that compiled code need not open it.
        label: The name by which compiled code finds this object.
    """

    draws = 0
    _current: ClassVar[RandomRegion | None] = None

    def __init__(self, group: Group, is_quiet: bool = False) -> None:
        self.group = group
        self.is_quiet = is_quiet
        self.label = f"{group.label}/{next(_numbers)}"
        _labelled[self.label] = self
        self._generator: torch.Generator | None = None
        self._seed = 0
        self._state_before: Any = None
        self._state_opened: Any = None
        self._extent: DividedExtent | None = None
        self._make_extent: Callable[[], DividedExtent] | None = None
        self._around: RandomRegion | None = None
        self._is_left = False  # left closed, because earlier passes drew nothing
        self._quiet = QUIET if is_quiet else 0
        # Quiet modules without hooks, with their models and with the numbers among their attributes.
        self._unwatched: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module], list[float]]] = []
        self._left: list[Any] = []
        self._drew_outside = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomRegion:
        return self  # there is one generator per device, also for a copied model

    @property
    def is_open(self) -> bool:
        """True if the generator is on this rank's stream."""
        return not self._is_left and self._generator is not None and self._generator.initial_seed() == self._seed

    def open(self, device: torch.device, extent: Callable[[], DividedExtent] | None = None) -> None:
        """Switch the default generator of `device` to this rank's stream; do nothing inside an open region.

        Args:
            device: Where the activations are.
            extent: Returns how they are sharded; without it all draws in the region are for this rank's part.

        Raises:
            RuntimeError: In a recomputation of a part of a block that has drawn numbers for full samples.
        """
        kind = device.type
        if kind == "meta" or self.group.size == 1:
            return
        # Each sharded layer of a step comes here, so the usual way makes few calls.
        generator = torch.default_generator if kind == "cpu" else _default_generator(device)
        if self._generator is not None:
            if self._generator is generator if self._is_left else self.is_open:
                return
            self._is_left = False
        before = _state(generator)
        if self._quiet >= QUIET and RandomRegion._current is None:
            self._generator, self._state_before, self._is_left = generator, before, True
            # Read at the end, if code has drawn inside.
            self._make_extent, self._around = extent, None
            return
        current = RandomRegion._current
        # A region may open inside another region, such as attention inside a sequence-parallel block.
        self._around = current if current is not None and current is not self and current.is_open else None
        if self._drew_outside and self._around is None and current_graph_task_id() != -1:
            raise RuntimeError(_RECOMPUTED)
        self._generator, self._state_before = generator, before
        self._extent, self._make_extent = None, extent
        # A recomputation of a pass with a closed region starts from the same state, and must find it closed.
        if self._quiet >= QUIET or any(is_same_state(before, state) for state in self._left):
            self._is_left = True
            return
        self._extent = None if extent is None else extent()
        # Drawn from the replicated state, then made different by rank: restoring that state restores all streams.
        self._seed = _mix(_draw(generator) + (self.group.rank + 1) * _GOLDEN)
        generator.manual_seed(self._seed)
        self._state_opened = _state(generator)
        RandomRegion._current = self

    def close(self) -> None:
        """Switch back to the replicated stream; do nothing outside a region."""
        if self._generator is None:
            return
        generator, before, is_left = self._generator, self._state_before, self._is_left
        is_open = not is_left and self.is_open
        self._generator, self._is_left = None, False
        if is_left:
            if not is_same_state(_state(generator), before):
                extent = None if self._make_extent is None else self._make_extent()
                # Open it from now on. A recomputation of this pass must draw as this pass did, so keep its state.
                self._left.append(before)
                self._quiet, self.is_quiet = -1, False
                self._watch_all()
                # Uneven parts drew different counts, so all ranks return to one state and advance alike.
                if extent is not None and not extent.is_even:
                    _restore(generator, before)
                    _draw(generator)
            return
        if RandomRegion._current is self:
            RandomRegion._current = self._around
        if is_open:
            drew = not is_same_state(_state(generator), self._state_opened)
            _restore(generator, before)
            # Without this draw the next region would derive the same stream. Ranks with uneven shards may draw
            # different counts, but all draw or none does, so the replicated state stays equal.
            if drew:
                RandomRegion.draws += 1
                _draw(generator)
            # -1: a region that has drawn once is never left closed.
            self._quiet = -1 if drew or self._quiet < 0 else self._quiet + 1

    @contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        """Run a block inside the region; the outermost block closes it."""
        if self.is_open:
            yield
            return
        self.open(device)
        try:
            yield
        finally:
            self.close()

    # -------------------------------------------------------------------------------------- draws for full samples

    def watch(self, module: nn.Module, root: nn.Module) -> None:
        """Take the draws of `module` for full samples from the replicated stream while the region is open.

        Args:
            module: A module whose forward opens and closes the region.
            root: The full model: the draws of a compiled model cannot be watched.
        """
        if self.is_quiet:
            # Hooks take time in each pass, and differ between equal blocks, which then need compiled code of their own.
            self._unwatched.append((weakref.ref(module), weakref.ref(root), _numbers_in(module)))
            return
        mode = _DrawMode(self)
        model = weakref.ref(root)

        def enter(module: nn.Module, args: Any) -> None:
            # First: compiled code must not depend on the state of the region.
            if torch.compiler.is_dynamo_compiling() or not module.training or self._quiet >= QUIET:
                return
            if not _is_compiled(model()):
                mode.__enter__()
                mode.is_entered = True

        def leave(*_: Any) -> None:
            # Usually the last layer has closed the region, and no mode was entered.
            if torch.compiler.is_dynamo_compiling() or (self._generator is None and not mode.is_entered):
                return
            self.close()
            mode.is_entered = False
            if current_function_mode() is mode:
                mode.__exit__(None, None, None)

        hook_before(module, enter, prepend=True)
        # Always called: a region that an exception left open would make later draws differ between the ranks.
        hook_after(module, leave, always_call=True)

    def _watch_all(self) -> None:
        for module, root in ((module(), root()) for module, root, _ in self._unwatched):
            if module is not None and root is not None:
                self.watch(module, root)
        self._unwatched.clear()

    def look(self) -> bool:
        """Return whether its blocks still draw nothing, as far as their attributes tell: a dropout may have changed."""
        blocks = ((module(), numbers) for module, _, numbers in self._unwatched)
        if self.is_quiet and any(module is not None and _numbers_in(module) != numbers for module, numbers in blocks):
            self.is_quiet, self._quiet = False, 0
            self._watch_all()
        return self.is_quiet

    def draw(self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function that draws, with the stream that its numbers belong to."""
        if RandomRegion._current is not self or not self.is_open or self._extent is None:
            return function(*args, **kwargs)
        size = _drawn_size(name, args, kwargs)
        verdict = self._extent.verdict(name, size)
        # With uneven parts ranks may draw different counts, or judge a size differently. So each takes one number.
        is_one = verdict != "whole" and not self._extent.is_even
        own = kwargs.get("generator")
        if own is not None:
            if verdict == "part" or is_one:
                seed = _mix(_draw(own) + (self.group.rank + 1) * _GOLDEN)
                kwargs = {**kwargs, "generator": torch.Generator(own.device).manual_seed(seed)}
            return function(*args, **kwargs)
        if verdict == "part" and not is_one:
            return function(*args, **kwargs)
        return self._draw_outside(function, args, kwargs, size, is_one, verdict == "part")

    def _draw_outside(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        size: tuple[int, ...],
        is_one: bool,
        is_part: bool,
    ) -> Any:
        """Draw from the replicated stream; if `is_one`, advance it by one draw, whatever the rank's own count."""
        assert self._generator is not None
        generator, mine = self._generator, _state(self._generator)
        outermost = self
        # Recomputed without the region around it, an inner region could not draw these numbers again.
        while outermost._around is not None:
            outermost._drew_outside = True
            outermost = outermost._around
        _restore(generator, outermost._state_before)
        try:
            if is_one:
                # Without the term of the rank, all ranks draw the same numbers for full samples.
                seed = _mix(_draw(generator) + (self.group.rank + 1) * _GOLDEN * is_part)
                moved = _state(generator)
                generator.manual_seed(seed)
                seeded = _state(generator)
                result = function(*args, **kwargs)
                # A layer may draw nothing, as an argument of the call says; a rank with an empty part cannot tell.
                if not is_same_state(_state(generator), seeded) or 0 in size:
                    outermost._state_before = moved
                return result
            result = function(*args, **kwargs)
            outermost._state_before = _state(generator)
            return result
        finally:
            self._quiet = -1
            RandomRegion.draws += is_part
            _restore(generator, mine)


def _numbers_in(module: nn.Module) -> list[float]:
    """Return the attributes of a module that may be probabilities."""
    return [value for child in module.modules() for value in vars(child).values() if type(value) is float]


_numbers = count()
_labelled: weakref.WeakValueDictionary[str, RandomRegion] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result
def is_quiet_in_graph(label: str) -> bool:
    """Return whether code that is compiled need not open a region, given its label.

    The compiler calls it once for each graph, and makes a new graph if a dropout of a module has changed.
    """
    return _labelled[label].look()


_RECOMPUTED = (
    "Activation checkpointing must recompute the full block here; got a part that draws random numbers for whole"
    " samples (stochastic depth, one mask for all positions). Each rank has other positions or features there."
    " Recompute the full block, or draw these numbers outside the recomputed part"
)


class _DrawMode(TorchFunctionMode):
    """Sees the functions that draw random numbers in a region."""

    def __init__(self, region: RandomRegion) -> None:
        super().__init__()
        self._region = region
        self.is_entered = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DRAWS and not is_off(name, args, kwargs or {}):
            return self._region.draw(name, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_OF_HEADS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_BY_CHANNEL = {"dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_", "feature_alpha_dropout"}
_DROPOUTS = {"dropout", "dropout_", "native_dropout", "alpha_dropout", "alpha_dropout_", "rrelu", "rrelu_"}
_DROPOUTS |= _BY_CHANNEL | _OF_HEADS
_FACTORIES = {"rand", "randn", "randint", "randperm"}
_DRAWS = _DROPOUTS | _FACTORIES | {"rand_like", "randn_like", "randint_like", "gumbel_softmax"}
_DRAWS |= {"bernoulli", "normal", "multinomial", "poisson", "binomial", "trunc_normal_"}
_DRAWS |= {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_"}


def _drawn_size(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the size of the numbers that a function draws."""
    if name in _FACTORIES or "size" in kwargs:
        size = kwargs.get("size")
        if size is None and name == "randperm":
            size = args[:1]
        if size is None:
            size = next((value for value in args if isinstance(value, (tuple, list))), args)
        return (size,) if isinstance(size, int) else tuple(int(extent) for extent in size)
    tensor = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    if tensor is None:  # `torch.normal(0.0, 1.0, size)`
        return tuple(next((value for value in args if isinstance(value, (tuple, list))), ()))
    # The dropout of an input that reads as a full sequence draws for this rank's positions.
    shape = tuple((getattr(tensor, "part", tensor) if name in _DROPOUTS else tensor).shape)
    # One number for each channel of each sample.
    return (*shape[:2], *[1] * (len(shape) - 2)) if name in _BY_CHANNEL else shape


def is_off(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of a dropout, or of an attention with dropout, make it draw nothing."""

    def argument(key: str, position: int, default: Any) -> Any:
        return kwargs.get(key, args[position] if len(args) > position else default)

    if name == "scaled_dot_product_attention":
        return bool(argument("dropout_p", 4, 0.0) == 0)
    if name == "multi_head_attention_forward":
        return bool(argument("dropout_p", 10, 0.0) == 0) or not kwargs.get("training", True)
    if name in ("rrelu", "rrelu_"):
        return not argument("training", 3, False)
    if name in _DROPOUTS:
        is_on = kwargs.get("train", argument("training", 2, True))
        return bool(argument("p", 1, 0.5) == 0) or not is_on
    return False


def _is_compiled(module: nn.Module | None) -> bool:
    if module is None:
        return False
    if id(module) not in _compiled:
        _compiled[id(module)] = has_compiled_parts(module)
        # Another module may get the `id` later.
        weakref.finalize(module, _compiled.pop, id(module), None)
    return _compiled[id(module)]


_compiled: dict[int, bool] = {}


def connect_random_regions(root: nn.Module, group: Group, quiet: Collection[str] = ()) -> None:
    """Give the sharded layers of `root` their random region. Call it once, after all layers have been sharded.

    A row-parallel layer closes the region that the column-parallel layers in the smallest module around it open. That
    module also closes the region when its forward ends, even by an exception.

    Args:
        root: The model.
        group: The ranks.
        quiet: Paths of modules that are known to draw nothing.
    """
    if group.size > 1:
        silent = {id(child) for path in quiet for child in root.get_submodule(path).modules()}
        _connect(root, (RandomRegion(group), RandomRegion(group, is_quiet=True)), silent, root)


def _connect(
    module: nn.Module, regions: tuple[RandomRegion, RandomRegion], silent: Collection[int], root: nn.Module
) -> list[nn.Module]:
    """Connect the regions inside `module`; return the layers that have no counterpart yet."""
    region = regions[id(module) in silent]
    end = getattr(module, "region_end", None)
    # Attention opens and closes the region by itself, around its dropout.
    if end == "inside":
        module.region = region  # type: ignore[assignment]
        return []
    if end is not None:
        return [module]  # a layer with low-rank terms manages the region for the layers inside it
    layers: list[nn.Module] = []
    for child in module.children():
        layers += _connect(child, regions, silent, root)
    if {layer.region_end for layer in layers} != {"opens", "closes"}:
        return layers
    for layer in layers:
        layer.region = region  # type: ignore[assignment]
    region.watch(module, root)
    return []


# -------------------------------------------------------------------------------------------- one generator per device


@contextmanager
def own_stream(group: Group, device: torch.device) -> Iterator[None]:
    """Draw other random numbers on each rank inside the block; the generators of all ranks advance alike.

    The stream derives from the state before the block. So a second run from this state draws the same numbers.

    Args:
        group: The ranks.
        device: Where the numbers are drawn.
    """
    if device.type == "meta":
        yield
        return
    generator = _default_generator(device)
    seed = _mix(_draw(generator) + (group.rank + 1) * _GOLDEN)
    after = _state(generator)
    generator.manual_seed(seed)
    try:
        yield
    finally:
        _restore(generator, after)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def random_state(device: torch.device) -> Any:
    """Return the state of the default generator of a device, for `is_same_state`."""
    return _state(_default_generator(device))


def _state(generator: torch.Generator) -> Any:
    """Return the state for `_restore`; on CUDA without waiting for the device, unlike `get_state`."""
    # Asked for twice by each region, mostly on a CPU.
    if generator is torch.default_generator and not num_dispatch_modes():
        return generator.get_state()
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    with dispatch_modes_suspended():  # a mode may count operations on tensors without data, but the state is real
        return generator.get_state()


def _restore(generator: torch.Generator, state: Any) -> None:
    if generator.device.type == "cuda":
        generator.manual_seed(state[0])
        generator.set_offset(state[1])
    else:
        generator.set_state(state)


def is_same_state(state: Any, other: Any) -> bool:
    """Return whether a generator has drawn nothing between two states."""
    if isinstance(state, tuple):
        return bool(state == other)
    return is_same_memory(state, other)


def _draw(generator: torch.Generator) -> int:
    """Draw an integer, which depends on the state, and advance the state."""
    if generator.device.type == "cuda":
        seed = generator.initial_seed()
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # Philox makes four numbers at a time: offsets must be multiples of 4
        return _mix(seed + _mix(offset))
    with dispatch_modes_suspended():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def _mix(value: int) -> int:
    """Spread every bit of `value` over 64 bits (the finaliser of SplitMix64, doi:10.1145/2714064.2660195)."""
    value &= _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
