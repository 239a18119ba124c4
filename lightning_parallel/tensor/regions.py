"""Random numbers in regions between divided layers, where the ranks hold different parts of the activations.

They are equal on all ranks where activations are equal, and different where these are divided. Between a
column-parallel layer and the row-parallel layer that follows it, each rank uses a separate random stream:

    replicated  |  region                          |  replicated
    state S     |  seed(S, rank)  dropout, ...     |  S, advanced by one draw if the region drew anything

The stream derives from the replicated state alone. So code that restores this state (activation checkpointing before
it recomputes, a resumed run) reproduces the region too, and a region that draws nothing does not change the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import dispatch_modes_suspended

__all__ = ["RandomRegion", "connect_random_regions", "is_same_state", "random_state"]

# The increment of SplitMix64, 2^64 over the golden ratio: it keeps the seeds of neighbouring ranks far apart.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class RandomRegion:
    """Random stream of the divided part of a computation; the layers that share it open and close it.

    The region counts as open only while the generator still has its seed: when other code has restored or reseeded
    the generator (the end of a recomputation, an exception), it is closed.

    Attributes:
        draws: How many regions of this process have drawn numbers.
    """

    draws = 0

    def __init__(self, group: Group) -> None:
        self.group = group
        self._generator: torch.Generator | None = None
        self._seed = 0
        self._state_before: Any = None
        self._state_opened: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomRegion:
        return self  # there is one generator per device, also for a copied model

    @property
    def is_open(self) -> bool:
        """True if the generator is on this rank's stream."""
        return self._generator is not None and self._generator.initial_seed() == self._seed

    def open(self, device: torch.device) -> None:
        """Switch the default generator of `device` to this rank's stream; do nothing inside an open region."""
        if self.group.size == 1 or device.type == "meta" or self.is_open:
            return
        generator = _default_generator(device)
        self._state_before = _state(generator)
        # Drawn from the replicated state, then made different by rank: restoring that state restores all streams.
        self._seed = _mix(_draw(generator) + (self.group.rank + 1) * _GOLDEN)
        generator.manual_seed(self._seed)
        self._state_opened = _state(generator)
        self._generator = generator

    def close(self) -> None:
        """Switch back to the replicated stream; do nothing outside of a region."""
        if self._generator is None:
            return
        generator = self._generator
        is_open = self.is_open
        self._generator = None
        if is_open:
            drew = not is_same_state(_state(generator), self._state_opened)
            _restore(generator, self._state_before)
            # Without this draw the next region would derive the same stream. Ranks with uneven shards may draw
            # different counts, but all draw or none does, so the replicated state stays equal.
            if drew:
                RandomRegion.draws += 1
                _draw(generator)

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


def connect_random_regions(root: nn.Module, group: Group) -> None:
    """Give the divided layers of `root` their random region. Call it once, after all layers have been divided.

    A row-parallel layer closes the region that the column-parallel layers in the smallest module around it open. That
    module also closes the region when its forward ends, by an exception too.
    """
    if group.size > 1:
        _connect(root, RandomRegion(group))


def _connect(module: nn.Module, region: RandomRegion) -> list[nn.Module]:
    """Connect the regions inside `module`; return the layers that have no counterpart yet."""
    end = getattr(module, "region_end", None)
    # Attention opens and closes the region by itself, around its dropout.
    if end == "inside":
        module.region = region  # type: ignore[assignment]
        return []
    if end is not None:
        return [module]  # the layers inside of one with low-rank terms leave the region to it
    layers: list[nn.Module] = []
    for child in module.children():
        layers += _connect(child, region)
    if {layer.region_end for layer in layers} != {"opens", "closes"}:
        return layers
    for layer in layers:
        layer.region = region  # type: ignore[assignment]
    module.register_forward_hook(lambda *_: region.close(), always_call=True)
    return []


# -------------------------------------------------------------------------------------------- one generator per device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def random_state(device: torch.device) -> Any:
    """Return the state of the default generator of a device, for `is_same_state`."""
    return _state(_default_generator(device))


def _state(generator: torch.Generator) -> Any:
    """Return the state for `_restore`; on CUDA without waiting for the device, as `get_state` would."""
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    with dispatch_modes_suspended():  # where operations are counted on tensors without data, the state is real
        return generator.get_state()


def _restore(generator: torch.Generator, state: Any) -> None:
    if generator.device.type == "cuda":
        generator.manual_seed(state[0])
        generator.set_offset(state[1])
    else:
        generator.set_state(state)


def is_same_state(state: Any, other: Any) -> bool:
    """Return whether a generator has drawn nothing between two states."""
    with dispatch_modes_suspended():
        return state == other if isinstance(state, tuple) else state.numpy().tobytes() == other.numpy().tobytes()


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
