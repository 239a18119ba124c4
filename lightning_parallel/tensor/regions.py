"""Regions between divided layers, where the ranks hold different parts: features, or positions of the sequence.

**Random numbers** are equal on all ranks where activations are equal, and different where these are divided. Between a
column-parallel layer and the row-parallel layer that follows it, each rank uses a separate random stream:

    replicated  |  region                          |  replicated
    state S     |  seed(S, rank)  dropout, ...     |  S, advanced by one draw if the region drew anything

The stream derives from the replicated state alone. So code that restores this state (activation checkpointing before
it recomputes, a resumed run) reproduces the region too, and a region that draws nothing does not change the state.

**Sequence parallelism** lets each rank hold a part of the sequence between the divided layers instead of all of it:

    hidden | first: keep my part | norm | Column: all-gather ... Row: reduce-scatter | last: all-gather | hidden
    (L, E) | (L / ranks, E)             | (L, E / ranks)                              | (L / ranks, E)   | (L, E)

An all-gather and a reduce-scatter send as many bytes as the all-reduce that they replace, and the activations between
the layers take 1 / ranks of the memory. Each rank computes norms and biases there for its positions only, so their
gradients are partial. The blocks must take all lengths from the outputs of their projections, not from their input.

Legend: L sequence length, E features.

Source: Korthikanti et al., https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import current_graph_task_id, dispatch_modes_suspended, pytree, version_of
from lightning_parallel.tensor.autograd import gather_from_group, scatter_to_group
from lightning_parallel.tensor.linear import SequenceLengths, shared_inputs

__all__ = ["RandomRegion", "connect_random_regions", "divide_sequence", "divide_stack"]

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
            drew = not _equal(_state(generator), self._state_opened)
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


def divide_sequence(owner: nn.Module, first: nn.Module, last: nn.Module, group: Group, dim: int = 1) -> None:
    """Divide the sequence from the input of `first` to the output of `last`, two modules inside `owner`.

    The tensor that is divided is the first positional argument of `first`; the one that is gathered is the output of
    `last` or its first element. Random numbers in between differ between the ranks.
    """
    lengths: SequenceLengths = shared_inputs(group, dim).lengths  # type: ignore[assignment]
    region = RandomRegion(group)

    def scatter_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = scatter_to_group(args[0], group, dim, lengths.divide(args[0].shape[dim]))
        if module.training:  # dropout between the layers draws for different positions on each rank
            region.open(hidden.device)
        return (hidden, *args[1:])

    def gather_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        region.close()
        hidden = output if isinstance(output, Tensor) else output[0]
        hidden = gather_from_group(hidden, group, dim, lengths.parts(hidden.shape[dim]))
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    first.register_forward_pre_hook(scatter_input)
    last.register_forward_hook(gather_output)
    # The blocks may be left by an exception, before `last` closes the region.
    owner.register_forward_hook(lambda *_: region.close(), always_call=True)


def divide_stack(modules: Mapping[str, nn.Module], region: tuple[str, str, str], group: Group) -> None:
    """Divide the sequence in one of a plan's `sequence_regions`, and watch what happens between its blocks.

    Args:
        modules: The modules of the model, by path.
        region: Paths of the module around, of the first and of the last block.
        group: The tensor-parallel group.
    """
    owner, first, last = region
    divide_sequence(modules[owner], modules[first], modules[last], group)
    if first != last:
        stack = first.rpartition(".")[0]
        _refuse_changes_between({f"{stack}.{name}": block for name, block in modules[stack].named_children()}, group)


class _LastOutput:
    """What the block of a stack that ran last has returned: the memory, the shape and the version of the tensor."""

    def __init__(self) -> None:
        self.block = ""
        self.seen: object = None
        # Held, so that its memory is not given to another tensor.
        self.tensor: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _LastOutput:
        return _LastOutput()


def _refuse_changes_between(blocks: Mapping[str, nn.Module], group: Group) -> None:
    """Let the blocks of a stack that is divided along the sequence refuse other hidden states than their neighbour's.

    Each block was verified by itself. Code between them sees this rank's positions only: it would add the positions of
    the first part to every part, take means over a part, and leave the gradients of its parameters partial.

    Args:
        blocks: The blocks in their order, by their path in the module.
        group: The tensor-parallel group.

    Raises:
        RuntimeError: From the forward of a block.
    """
    last = _LastOutput()
    names = list(blocks)
    asked: set[str] = set()

    def check(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A recomputation in backward calls blocks one by one, with what was kept of their inputs.
        if current_graph_task_id() != -1:
            return
        given = _tensors((args, kwargs))
        hidden = given[0] if given else None
        previous = last.block
        last.block = ""
        last.tensor = None
        if previous and path != names[0] and hidden is not None and last.seen != _identity(hidden):
            raise RuntimeError(
                f"the hidden states are changed between `{previous}` and `{path}`, where with `sequence_parallel=True`"
                " each rank has a part of the sequence, so the result would differ from that of one process. Do it"
                " inside of the blocks, before the first or after the last of them, or use `sequence_parallel=False`"
            )
        if given[1:] and path not in asked:
            # Once: what is given to a block besides its hidden states is made by the same code in each step.
            asked.add(path)
            if not all(comm.equal_everywhere(value >> 1, group) for value in comm.fingerprints(given[1:])):
                raise RuntimeError(
                    f"`{path}` is given a tensor besides its hidden states that differs between the ranks: it was made"
                    " from hidden states between the blocks, where with `sequence_parallel=True` each rank has a part"
                    " of the sequence. Use `sequence_parallel=False`"
                )

    def remember(path: str, output: Any) -> None:
        if current_graph_task_id() == -1:
            hidden = _tensors(output)
            if hidden and path != names[-1]:
                last.block = path
                last.seen = _identity(hidden[0])
                last.tensor = hidden[0]

    for path, block in blocks.items():
        # Before the hook that divides the input of the first block.
        block.register_forward_pre_hook(
            lambda _, args, kwargs, path=path: check(path, args, kwargs), with_kwargs=True, prepend=True
        )
        block.register_forward_hook(lambda _, args, output, path=path: remember(path, output), prepend=True)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors with data in arguments or outputs: not those that stand for what other stages hold."""
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is Tensor]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    # Not the object: checkpointing detaches a block's input. A change in place leaves another version.
    version = None if tensor.is_inference() else version_of(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), version


# -------------------------------------------------------------------------------------------- one generator per device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


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


def _equal(state: Any, other: Any) -> bool:
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
