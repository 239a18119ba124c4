"""Regions of a model in which activations are sharded along the sequence: the hooks around its blocks.

    hidden | first: keep my part | norm | Column: all-gather ... Row: reduce-scatter | last: all-gather | hidden
    (L, E) | (L / ranks, E)             | (L, E / ranks)                              | (L / ranks, E)   | (L, E)

An all-gather and a reduce-scatter send as many bytes as the all-reduce that they replace. The activations between the
layers take 1 / ranks of the memory. Each rank computes norms and biases there for its positions only, so their
gradients are partial.

A **sublayer** (attention, MLP, or the block itself) may take lengths from its input, so its input is a `Piece`,
whose sizes read as the full sequence. A module that needs all positions, without sharding itself (a router), gets them
**gathered**. Evaluation without gradients computes on full sequences: it keeps no activations, and may decode one
position a time.

Between two blocks, a `Piece` stands for the **full** hidden states. The next block takes this rank's part of
it. Any other reader (a head after each block, a block outside the region) gets it gathered. Pipeline stages send each
other their part, so there such readers are refused.

Legend: L sequence length, E features.

Source: Korthikanti et al., https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import hook_after, hook_before, innermost_users_line, module_that_asks
from lightning_parallel.compat.torch import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    current_graph_task_id,
    gathers_first,
    pytree,
    version_of,
)
from lightning_parallel.tensor.autograd import RECEIVED, gather_from_group, scatter_to_group
from lightning_parallel.tensor.linear import SequenceLengths, shared_inputs
from lightning_parallel.tensor.pieces import Piece, part_along, positions_of
from lightning_parallel.tensor.regions import DividedExtent, RandomRegion, is_same_state, random_state

__all__ = ["SequenceRegion", "divide_region", "divide_sequence", "refused_between"]


@dataclass(frozen=True)
class SequenceRegion:
    """Blocks in a row, with activations sharded along the sequence from the first to the last.

    Attributes:
        owner: Path of the module that calls them.
        blocks: Paths of the blocks, in their order.
        sublayers: Paths of the modules inside whose inputs read as full sequences.
        gathered: Paths of the modules inside that compute on full sequences.
        dim: The dimension of the sequence.
        sends_pieces: Whether pipeline stages send each other the tensor between two blocks.
    """

    owner: str
    blocks: tuple[str, ...]
    sublayers: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    dim: int = 1
    sends_pieces: bool = False


def divide_region(modules: Mapping[str, nn.Module], region: SequenceRegion, group: Group) -> None:
    """Shard the sequence in one region of a plan, and watch the code between its blocks.

    Args:
        modules: The modules of the model, by path.
        region: The region.
        group: The tensor-parallel group.
    """
    blocks = {path: modules[path] for path in region.blocks}
    divide_sequence(modules[region.owner], list(blocks.values()), group, region.dim, region.sends_pieces)
    if len(blocks) > 1 and region.sends_pieces:
        _refuse_changes_between(blocks, group, region.dim)
    lengths = _lengths(group, region.dim)
    # Last, because a sublayer may be a block, whose other hooks take plain tensors.
    for path in region.sublayers:
        _stand_for_whole(modules[path], lengths, path in blocks)
    for path in region.gathered:
        _gather_around(path, modules[path], lengths)


def divide_sequence(
    owner: nn.Module, blocks: Sequence[nn.Module], group: Group, dim: int = 1, sends_pieces: bool = False
) -> None:
    """Shard the sequence from the input of the first of `blocks` to the output of the last, modules inside `owner`.

    The sharded tensor is the first floating-point tensor among the arguments of a block. The gathered tensors are the
    first in its output, and all of its shape, such as a detached copy. The last block's output is gathered at once, and
    any other output when code reads it. Random numbers for positions differ between the ranks.
    """
    lengths = _lengths(group, dim)
    region = RandomRegion(group)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        lengths.in_block = True
        lengths.suspended = _is_evaluated(module)
        if not lengths.suspended:
            lengths.stream = _main(args, kwargs).shape

    def scatter_input(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_evaluated(module):
            return None
        hidden = _main(args, kwargs)
        if hidden.dim() <= dim + 1:  # would shard features
            raise RuntimeError(
                f"The input of a sequence-parallel `{type(module).__name__}` must be hidden states (batch, sequence,"
                f" features); got shape {tuple(hidden.shape)}. Use `sequence_parallel=False`"
            )
        sizes = lengths.divide(hidden.shape[dim])
        return _exchanged((args, kwargs), hidden, part_along(hidden, group, dim, sizes))

    # A pipeline stage after the first learns each sequence's length from this call.
    scatter_input.has_effects = True  # type: ignore[attr-defined]

    def open_region(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training:  # dropout between the layers draws for different positions on each rank
            piece = _main(args, kwargs)
            parts = tuple(lengths.parts(piece.shape[dim]))
            region.open(piece.device, partial(DividedExtent, tuple(piece.shape), dim, parts))

    def gather_output(module: nn.Module, args: Any, output: Any) -> Any:
        if _is_evaluated(module):
            return None
        parts = lengths.parts(_main(output).shape[dim])
        return _for_hidden(output, lambda piece: gather_from_group(piece, group, dim, parts))

    # Before `enter`, which notes the shape of the sharded hidden states: hooks run in this order.
    hook_before(blocks[0], scatter_input, with_kwargs=True)
    if not sends_pieces and group.size > 1:
        _hand_out_whole(blocks, scatter_input, lengths)
    for block in blocks:
        hook_before(block, enter, with_kwargs=True)
        # Once per block: activation checkpointing keeps the replicated state, from which it recomputes one block.
        hook_before(block, open_region, with_kwargs=True)
        region.watch(block, owner)
        # Before the user's hooks, which see full sequences. Always called: an exception may leave the block.
        hook_after(block, lambda *_: _leave_block(lengths), prepend=True, always_call=True)
    # Before the user's hooks, which see full sequences.
    hook_after(blocks[-1], gather_output, prepend=True)


def _hand_out_whole(blocks: Sequence[nn.Module], scatter: Callable[..., Any], lengths: SequenceLengths) -> None:
    """Let inner blocks return a stand-in for full sequences, and take that or any other full tensor."""

    def scatter_again(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return None if _is_hollow(_main(args, kwargs)) else scatter(module, args, kwargs)

    @torch.compiler.disable
    def hand_out(module: nn.Module, args: Any, output: Any) -> Any:
        piece = None if _is_evaluated(module) else _main(output)
        if piece is None or _is_hollow(piece):
            return None
        sizes = lengths.parts(piece.shape[lengths.dim])
        return _for_hidden(output, lambda leaf: Piece.of(leaf, lengths.group, lengths.dim, sizes))

    for block in blocks[1:]:
        hook_before(block, scatter_again, with_kwargs=True)
    for block in blocks[:-1]:
        # Before the user's hooks, which see full sequences.
        hook_after(block, hand_out, prepend=True)


def _is_hollow(hidden: Tensor) -> bool:
    # A run that only sees shapes does not look at the code between the blocks.
    return hidden.is_meta or isinstance(hidden, FakeTensor)


def _leave_block(lengths: SequenceLengths) -> None:
    lengths.in_block = False
    lengths.suspended = False


def _has_full_input(module: nn.Module, lengths: SequenceLengths, given: Any) -> bool:
    """Return whether `module`, which starts, computes on full sequences: in evaluation, or called outside its block."""
    if lengths.suspended or lengths.in_block:
        return lengths.suspended
    # A recomputation in backward may begin inside a block or outside, and only the length tells where.
    if current_graph_task_id() != -1 and not lengths.is_full(_main(given).shape[lengths.dim]):
        return False
    lengths.suspended = True
    lengths.outside = module
    return True


def _had_full_input(module: nn.Module, lengths: SequenceLengths) -> bool:
    """Return whether `module`, which ends, has computed on full sequences."""
    had = lengths.suspended
    if lengths.outside is module:
        lengths.suspended = False
        lengths.outside = None
    return had


def _lengths(group: Group, dim: int) -> SequenceLengths:
    return shared_inputs(group, dim).lengths  # type: ignore[return-value]


def _is_evaluated(module: nn.Module) -> bool:
    # Training counts even without gradients: reentrant checkpointing first runs a block so.
    return not (module.training or torch.is_grad_enabled())


def _stand_for_whole(sublayer: nn.Module, lengths: SequenceLengths, is_block: bool) -> None:
    """Let the input of `sublayer` read as the full sequence, and return this rank's positions of its output."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _has_full_input(module, lengths, (args, kwargs)):
            return None
        main = _main(args, kwargs)
        if not (_is_plain(args) and _is_plain(tuple(kwargs.values()))):

            def is_kept(value: Any) -> bool:
                # Lists without the hidden states stay the same objects, because a block may append to one.
                return isinstance(value, list) and all(leaf is not main for leaf in pytree.tree_leaves(value))

            args, kwargs = pytree.tree_map(_with_data, (args, kwargs), is_leaf=is_kept)
            main = _main(args, kwargs)
        return _exchanged((args, kwargs), main, positions_of(main, lengths))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if _had_full_input(module, lengths) or output is None:
            return None
        parts: list[Tensor] = []

        def own_positions(piece: Piece) -> Tensor:
            if not piece.family.in_region:  # such as values of this rank's heads
                return piece
            part = piece.part
            if not lengths.takes(piece.place, part):  # the code has moved the positions to another dimension
                return piece.whole()
            parts.append(part)
            return part

        is_piece = type(output) is Piece
        output = own_positions(output) if is_piece else pytree.tree_map_only(Piece, own_positions, output)
        main = _main(output)
        is_part = any(main is part for part in parts)
        # Otherwise it was computed from all positions, on every rank.
        return output if is_part else _exchanged(output, main, _my_part(main, lengths))

    hook_before(sublayer, enter, with_kwargs=True)
    # The hooks that hand out the output of a block take the plain tensor. Always called, without an output after an
    # exception: a recomputation ends with an exception as soon as it has all tensors.
    hook_after(sublayer, leave, prepend=is_block, always_call=True)


def _gather_around(path: str, module: nn.Module, lengths: SequenceLengths) -> None:
    """Let `module` compute on full sequences, and return this rank's positions of its output.

    Raises:
        RuntimeError: From its forward, if it draws random numbers, which differ between the ranks here.
    """
    before: list[tuple[Any, bool]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _has_full_input(module, lengths, (args, kwargs)):
            return None
        piece = _main(args, kwargs)
        wrapped = piece if isinstance(piece, Piece) else None
        before[:] = [(random_state(piece.device), wrapped is not None)]
        whole = wrapped.whole() if wrapped is not None else _whole(piece, lengths)
        return _exchanged((args, kwargs), piece, whole)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if _had_full_input(module, lengths) or output is None:
            return None
        main = _main(output)
        state, is_wrapped = before.pop()
        if not is_same_state(random_state(main.device), state):
            raise RuntimeError(
                f"`{path}` draws random numbers (dropout?) on full sequences between sequence-parallel layers, so"
                " each rank draws other numbers. Use `sequence_parallel=False`, or no dropout"
            )
        part = _my_part(main, lengths)
        return _exchanged(output, main, positions_of(part, lengths) if is_wrapped else part)

    hook_before(module, enter, with_kwargs=True)
    hook_after(module, leave, always_call=True)


def _whole(piece: Tensor, lengths: SequenceLengths) -> Tensor:
    return gather_from_group(piece, lengths.group, *lengths.of_piece(piece))


def _my_part(whole: Tensor, lengths: SequenceLengths) -> Tensor:
    return scatter_to_group(whole, lengths.group, *lengths.of_whole(whole))


def _main(*values: Any) -> Tensor:
    """Return the first floating-point tensor in arguments or outputs.

    Raises:
        TypeError: If there is no such tensor.
    """
    first = values[0]
    if type(first) is tuple and first:
        first = first[0]
    # Nearly all blocks take and return their hidden states first. A search costs many calls of Python.
    if isinstance(first, Tensor) and first.is_floating_point():
        return first
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise TypeError(
        "A sequence-parallel block must take or return hidden states; got none among its arguments or outputs"
    )


def _for_hidden(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replace the hidden states in the output of a block, and all tensors of their shape: pieces of the same kind."""
    if isinstance(output, Tensor):
        return change(output)
    main = _main(output)
    changed: dict[int, Tensor] = {}

    def replaced(leaf: Tensor) -> Tensor:
        if leaf.shape != main.shape or not leaf.is_floating_point():
            return leaf
        # One object may be returned twice, as a tensor and inside a dict.
        if id(leaf) not in changed:
            changed[id(leaf)] = change(leaf)
        return changed[id(leaf)]

    return pytree.tree_map_only(Tensor, replaced, output)


def _with_data(value: Any) -> Any:
    # In any operation, the tensor that a pipeline stage received replaces its placeholder.
    return value.view_as(value) if isinstance(value, Tensor) and type(value) is not Tensor else value


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of ordinary tensors and values that hold no tensors."""
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


_PLAIN = {Tensor, type(None), bool, int, float, str}


def _exchanged(values: Any, old: Tensor, new: Tensor) -> Any:
    """Replace one tensor in any structure of values; a list or dict without it stays the same object."""
    if values is old:
        return new
    if isinstance(values, Tensor) or type(values) in _PLAIN:
        return values
    if type(values) is tuple:
        return tuple(_exchanged(value, old, new) for value in values)
    if type(values) is dict:
        found = {name: _exchanged(value, old, new) for name, value in values.items()}
        return found if any(found[name] is not values[name] for name in values) else values

    def has_none(value: Any) -> bool:
        # Lists without it stay the same objects, because a block may append to one.
        return all(leaf is not old for leaf in pytree.tree_leaves(value))

    return pytree.tree_map(lambda leaf: new if leaf is old else leaf, values, is_leaf=has_none)


class _PartBetween(Tensor):
    """This rank's part of the hidden states behind a block, which only the next block may read."""

    _of: str  # the path of the block
    _whole: torch.Size  # the shape of the hidden states on all ranks

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(gathers_first, types)):
            return NotImplemented
        asking = module_that_asks()
        name = getattr(func, "__name__", "")
        # A property arrives as `__get__` of its slot, which knows the name.
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if not asking.startswith(_MAY_READ) and name in ("shape", "size"):
            rest = (*args[1:], *(kwargs or {}).values())
            return args[0]._whole[rest[0]] if rest and rest[0] is not None else args[0]._whole
        if not asking.startswith(_MAY_READ) and name not in _SAME_OF_PARTS:
            path = next(leaf._of for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _PartBetween))
            raise RuntimeError(refused_between(f"{innermost_users_line()} reads the output of `{path}` (`{name}`)"))
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


# Code that passes hidden states on: pipeline stages, checkpoints, hooks of modules.
_MAY_READ = ("lightning_parallel.", "torch.utils.", "torch.nn.modules.module")
# Facts that are the same for a part and the full tensor.
_SAME_OF_PARTS = {
    "device",
    "dtype",
    "requires_grad",
    "is_leaf",
    "layout",
    "is_cuda",
    "dim",
    "ndim",
    "is_floating_point",
}
_SAME_OF_PARTS |= {"is_sparse", "is_meta", "is_quantized", "is_complex", "element_size", "get_device"}


def refused_between(found: str) -> str:
    """Return the text that refuses code between blocks of a pipeline; `found` describes that code."""
    return (
        "With `sequence_parallel=True` and a pipeline, no code between the blocks may read or change their hidden"
        f" states, which are sharded along the sequence; got: {found}. Move that code into the blocks, before the"
        " first or after the last of them. Or use `sequence_parallel=False`, or no pipeline"
    )


def _mark(hidden: Tensor, path: str, lengths: SequenceLengths) -> None:
    shape = list(hidden.shape)
    shape[lengths.dim] = sum(lengths.parts(shape[lengths.dim]))
    # The same object with another class, so that its place in autograd's graph stays.
    hidden.__class__ = _PartBetween
    hidden._of, hidden._whole = path, torch.Size(shape)  # type: ignore[attr-defined]


def _unmarked(values: Any) -> Any:
    def plain(leaf: _PartBetween) -> Tensor:
        with DisableTorchFunctionSubclass():
            # A view, because the marked object must stay marked for all other code that holds it.
            return leaf.view_as(leaf)

    def has_none(value: Any) -> bool:
        return not any(isinstance(leaf, _PartBetween) for leaf in pytree.tree_leaves(value))

    # Lists without such a part stay the same objects, because a block may append to one.
    return pytree.tree_map(lambda value: value if has_none(value) else plain(value), values, is_leaf=has_none)


class _LastOutput:
    """The output of the block of a stack that ran last: the memory, the shape and the version of the tensor."""

    def __init__(self) -> None:
        self.block = ""
        self.seen: object = None
        # Held, so that its memory is not given to another tensor.
        self.tensor: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _LastOutput:
        return _LastOutput()


def _refuse_changes_between(blocks: Mapping[str, nn.Module], group: Group, dim: int) -> None:
    """Let the blocks of a stack that is sharded along the sequence refuse hidden states that are not their neighbour's.

    Each block was verified by itself. Code between them sees this rank's positions only. It would add the positions of
    the first part to every part, take means over a part, and leave the gradients of its parameters partial.

    Args:
        blocks: The blocks in their order, by their path in the module.
        group: The tensor-parallel group.
        dim: The dimension of the sequence.

    Raises:
        RuntimeError: From the forward of a block.
    """
    last = _LastOutput()
    names = list(blocks)
    asked: set[str] = set()

    def take(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check(path, args, kwargs)
        return _unmarked((args, kwargs))

    def check(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _runs_alone(blocks[path]):
            return
        given = _tensors((args, kwargs))
        hidden = given[0] if given else None
        previous = last.block
        last.block = ""
        last.tensor = None
        if previous and path != names[0] and hidden is not None and not _follows(last, hidden):
            raise RuntimeError(
                refused_between(
                    f"code changes the hidden states between `{previous}` and `{path}`, or another block runs"
                )
            )
        if given[1:] and path not in asked:
            # Once: the same code makes the further arguments of a block in each step.
            asked.add(path)
            _require_equal(path, given[1:], group)

    def remember(path: str, output: Any) -> None:
        if not _runs_alone(blocks[path]):
            hidden = _tensors(output)
            if hidden and path != names[-1]:
                last.block = path
                last.seen = _identity(hidden[0])
                last.tensor = hidden[0]
                # Before the first gets the sizes of all positions: further pieces have its shape.
                for piece in [other for other in hidden if other.shape == hidden[0].shape]:
                    _mark(piece, path, _lengths(group, dim))

    for path, block in blocks.items():
        # Before the hook that shards the input of the first block.
        hook_before(block, lambda _, args, kwargs, path=path: take(path, args, kwargs), with_kwargs=True, prepend=True)
        hook_after(block, lambda _, args, output, path=path: remember(path, output), prepend=True)


def _runs_alone(block: nn.Module) -> bool:
    # A recomputation in backward calls blocks one by one, with inputs that were kept. A stage that infers shapes
    # calls blocks of other stages on random data.
    return current_graph_task_id() != -1 or _is_evaluated(block) or comm.skips_communication()


def _follows(last: _LastOutput, hidden: Tensor) -> bool:
    # A rank with several stages may have run a block on another microbatch since.
    is_received = hidden.grad_fn is not None and hidden.grad_fn.name() == RECEIVED
    return is_received or last.seen == _identity(hidden)


def _require_equal(path: str, given: list[Tensor], group: Group) -> None:
    # A fingerprint has 64 bits, and `equal_everywhere` takes 63.
    if not all(comm.equal_everywhere(value >> 1, group) for value in comm.fingerprints(given)):
        raise RuntimeError(
            refused_between(
                f"besides its hidden states, `{path}` takes a tensor that differs between the ranks, so it was made"
                " from hidden states"
            )
        )


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors with data in arguments or outputs, without placeholders for tensors of other stages."""
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) in (Tensor, _PartBetween)]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    # Not the object: checkpointing detaches a block's input. An in-place change leaves another version.
    with DisableTorchFunctionSubclass():
        version = None if tensor.is_inference() else version_of(tensor)
        return tensor.data_ptr(), tensor.shape, tensor.stride(), version
