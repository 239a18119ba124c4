"""How a model calls its blocks, and which blocks pass their output unchanged to the next: read in the recorded step.

Without a record of the user's step, the forward of the model, or of a module around the block, is recorded on an input
that it may take: tokens, hidden states, an image.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.chance import random_state_kept
from lightning_parallel.compat.torch import pytree, random_values, seed_torch
from lightning_parallel.step_trace.placeholder import PlaceholderTensor
from lightning_parallel.step_trace.record import ModuleCall, Operation, Record, StepTrace, no_record, record_step
from lightning_parallel.tensor.inspection import is_linear, sizes_of, structure_of
from lightning_parallel.tensor.verify import INPUT_SHAPE, LONGEST, BlockCall

__all__ = ["BlockCalls"]

SIDES = (32, 64, 224)  # of images
MOST_CHANNELS = 16
MOST_POSITIONS = 4096  # of all samples together, in the trial of a block
_LINE = 160  # of the reason of a failure


class BlockCalls:
    """How a model calls its blocks.

    Args:
        root: The full model.
        group: The tensor-parallel group; all its ranks must ask for the same blocks in the same order.
        record: Gives the record of the user's step.
    """

    def __init__(self, root: nn.Module, group: Group, record: Record = no_record) -> None:
        self._root = root
        self._group = group
        self._record = record
        self._guessed: dict[str, list[StepTrace]] = {}
        self._known: dict[object, BlockCall | str] = {}
        self._readers: dict[str, dict[int, str]] = {}
        self._allows_readers = False

    def allow_readers(self) -> None:
        """Let the plan shard weights that other code of the step computes with: this code then sees full weights."""
        self._allows_readers = True
        self._readers.clear()

    def of(self, path: str) -> BlockCall | str:
        """Return how the model calls the block at `path`; if no call is seen, the reason in a few words."""
        structure = structure_of(self._root.get_submodule(path))
        call, reason = _first_call(self._record(), path)
        # A record may stop in the first of equal blocks, which then shows how all are called.
        key = structure if call is None else (structure, call.signature)
        if key not in self._known:
            guess = None
            # The planner records full batches, whose trials would take the memory of a run.
            if call is None or _positions(call) > MOST_POSITIONS:
                guess, reason = self._guess(path, reason)
            self._known[key] = self._agreed(guess or call, reason)
            if not isinstance(self._known[key], str):
                self._known.setdefault(structure, self._known[key])
        return self._known[key]

    def is_called_apart(self, path: str, layer: str) -> bool:
        """Return whether code outside the module at `path` calls a layer in it directly: `self.mlp.up(x)`.

        In that case the module's own forward does not show how its layer is used.
        """
        record = self._record()
        name = f"{path}.{layer}".lstrip(".")
        for trace in self._traces("", path) if record is None else [record]:
            # By path: the record may be made on another copy of the model.
            if any(path not in trace.paths_around(call.number) for call in trace.calls_of(name)):
                return True
        return False

    def reader_of(self, path: str) -> str | None:
        """Return the line of code outside the module at `path` that computes with its weights; None if none was seen.

        The line is empty if it is not in the user's code.
        """
        around, _, name = path.rpartition(".")
        if isinstance(self._root.get_submodule(around), nn.MultiheadAttention) and name == "out_proj":
            return ""  # torch passes its weight to a function
        for around, traces in self._seen(path):
            if around not in self._readers:
                self._readers[around] = self._read_by_hand(around, traces)
            for parameter in self._root.get_submodule(path).parameters():
                if id(parameter) in self._readers[around]:
                    return self._readers[around][id(parameter)]
        return None

    def use_of(self, path: str) -> object | None:
        """Return a key that is equal for modules which the step uses in the same way; None without a record.

        The key holds all that this class tells about calls and readers of the modules inside.
        """
        record = self._record()
        if record is None:
            return None
        module, start = self._root.get_submodule(path), f"{path}."
        calls = []
        for name, _ in module.named_modules(prefix=path):
            for call in record.calls_of(name):
                around = [outer for outer in record.paths_around(call.number) if f"{outer}.".startswith(start)]
                relative = tuple(outer.removeprefix(path) for outer in around)
                calls.append((relative, call.signature))
        if "" not in self._readers:
            self._readers[""] = self._read_by_hand("", [record])
        readers = self._readers[""]
        inside = [(name, readers[id(each)]) for name, each in module.named_parameters() if id(each) in readers]
        return (*calls,), (*inside,)

    def computes_with_parameters(self, path: str) -> bool:
        """Return False if the module at `path` only registers its parameters, and the modules that it calls use them.

        True if no call of the module was seen.
        """
        for around, traces in self._seen(path):
            for trace in traces:
                calls = trace.calls_of(_inside(path, around))
                own = {call.number for call in calls}
                if calls and not any(call.has_data for call in calls):
                    return not own.isdisjoint(trace.computing)
        return True

    def is_stack(self, blocks: Sequence[str]) -> bool:
        """Return whether a block takes a value that is made of the output of another block; False without a record.

        Experts take the same values, and code adds their outputs.
        """
        record = self._record()
        if record is None:
            return False
        calls = [call for path in blocks for call in record.calls_of(path)]
        made = {id(leaf) for call in calls for leaf in pytree.tree_leaves(call.output)}
        for operation in record.operations:
            # In order, so that values made of such values count as well.
            if any(id(value) in made for value in operation.inputs):
                made.update(map(id, pytree.tree_leaves(operation.output)))
        return any(
            id(leaf) in made and isinstance(leaf, PlaceholderTensor)
            for call in calls
            for leaf in pytree.tree_leaves((call.args, call.kwargs))
        )

    def used_outside(self, blocks: Collection[str]) -> dict[str, str]:
        """Return the parameters of modules that the step calls outside the calls of `blocks`.

        Returns:
            By name of the parameter, the reason in a few words. Empty without a record.
        """
        record = self._record()
        if record is None:
            return {}
        found: dict[str, str] = {}
        named = {id(parameter): name for name, parameter in self._root.named_parameters()}
        # A call begins after the call that makes it, so the verdict about the outer call is known.
        outside: list[bool] = []
        for call in record.calls:
            outside.append(call.path not in blocks and (call.parent < 0 or outside[call.parent]))
            if outside[-1] and call.has_data:
                inside = self._root.get_submodule(call.path).parameters()
                found |= {named[id(parameter)]: f"code outside its block calls `{call.path}`" for parameter in inside}
        for operation in record.operations:
            if operation.call >= 0 and outside[operation.call]:
                path = record.calls[operation.call].path
                # Code that reads weights of other modules computes for full gradients; see `ShardPlace.is_partial`.
                own = {named[id(one)] for one in self._root.get_submodule(path).parameters(recurse=False)}
                read = own.intersection(value.view_of for value in operation.inputs)
                found |= dict.fromkeys(read, f"code outside its block calls `{path}`")
        # Every rank keeps the same modules on full sequences.
        for other in reversed(comm.all_gather_object(found, self._group)):
            found = {**found, **other}
        return found

    def joined(self, blocks: Sequence[str]) -> set[tuple[str, str]]:
        """Return the pairs of neighbours whose first block passes its output unchanged to the second, and nowhere else.

        Args:
            blocks: Paths of the blocks of one container, in their order.

        Returns:
            Only pairs that were seen: code between other blocks may change the output.
        """
        record = self._record()
        found = None if record is None else _joined(record, blocks)
        for around in reversed([*_owners(blocks[0])]):
            owner = self._root.get_submodule(around)
            # Code of the model may go through the modules of a `Sequential` one by one.
            is_list = isinstance(owner, (nn.ModuleList, nn.ModuleDict)) or around == blocks[0].rpartition(".")[0] != ""
            if found is None and not is_list:
                inner = [_inside(path, around) for path in blocks]
                seen = (_joined(trace, inner) for trace in self._traces(around, inner[0]))
                found = next((numbers for numbers in seen if numbers is not None), None)
        pairs = [pair for number, pair in enumerate(zip(blocks, blocks[1:])) if number in (found or ())]
        # Only pairs that all ranks saw: ranks with different regions would wait for each other.
        return set(pairs).intersection(*comm.all_gather_object(pairs, self._group))

    def _guess(self, path: str, reason: str) -> tuple[ModuleCall | None, str]:
        """Return the call in a record of the forward of the outermost module around that runs as far as the block."""
        for around, traces in self._around(path):
            for trace in traces:
                call, why = _first_call(trace, _inside(path, around))
                if call is not None:
                    return call, ""
                reason = reason or why
        return None, reason

    def _traces(self, around: str, inner: str) -> list[StepTrace]:
        """Return records of the forward of the module at `around`, made for the first block in it that is asked for."""
        if around not in self._guessed:
            owner = self._root.get_submodule(around)
            self._guessed[around] = list(_guessed(owner, owner.get_submodule(inner)))
        return self._guessed[around]

    def _seen(self, path: str) -> Iterator[tuple[str, list[StepTrace]]]:
        """Yield the record; without one, records of the modules around `path`, from the model to one that runs."""
        record = self._record()
        for around, traces in self._around(path) if record is None else [("", [record])]:
            yield around, traces
            if any(trace.error is None for trace in traces):
                return

    def _around(self, path: str) -> Iterator[tuple[str, list[StepTrace]]]:
        """Yield the modules around a module that may have a forward, from the model inwards, and records of them."""
        for around in _owners(path):
            if not isinstance(self._root.get_submodule(around), (nn.ModuleList, nn.ModuleDict)):
                yield around, self._traces(around, _inside(path, around))

    def _read_by_hand(self, around: str, traces: Sequence[StepTrace]) -> dict[int, str]:
        """Return the parameters that code outside their modules computes with, by `id`, and the lines of this code."""
        if self._allows_readers:
            return {}
        found: dict[str, str] = {}
        for trace in traces:
            found |= _read_by_hand(trace)
        # Every rank keeps the same layers whole, also if the step of one rank alone logs a norm.
        for other in comm.all_gather_object(found, self._group):
            found = {**other, **found}
        named = self._root.get_submodule(around).named_parameters()
        return {id(parameter): found[name] for name, parameter in named if name in found}

    def _agreed(self, call: ModuleCall | None, reason: str) -> BlockCall | str:
        with random_state_kept():
            seed_torch(0)
            made = reason if call is None else _with_values(call.args, call.kwargs)
        # Ranks that try different calls would wait for each other.
        everywhere = comm.all_gather_object(made if isinstance(made, str) else made.signature, self._group)
        if isinstance(made, str) or len({*everywhere}) == 1:
            return made
        return "the ranks call it in different ways"


def _owners(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module, from the model inwards."""
    parts = path.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts)))


def _inside(path: str, around: str) -> str:
    """Return the path of a module from the module at `around`."""
    return path.removeprefix(f"{around}.") if around else path


def _first_call(trace: StepTrace | None, path: str) -> tuple[ModuleCall | None, str]:
    """Return the first call of a block that takes hidden states, or the reason why the record has none."""
    if trace is None:
        return None, ""
    for call in trace.calls_of(path):
        if _hidden((call.args, call.kwargs)) is not None:
            return call, ""
    if trace.error is None:
        return None, "no code calls it"
    line = next(iter(str(trace.error).splitlines()), "")[:_LINE] or type(trace.error).__name__
    return None, f"the step stops before it: {line}"


def _positions(call: ModuleCall) -> int:
    hidden = _hidden((call.args, call.kwargs))
    return 0 if hidden is None else math.prod(hidden.shape[:-1])


# ------------------------------------------------------------------------------------------ without the user's own step


def _guessed(owner: nn.Module, block: nn.Module) -> Iterator[StepTrace]:
    """Yield records of the forward of `owner` on inputs that it may take, up to the first that runs to its end."""
    for given in _possible_arguments(owner, block):
        trace = record_step(owner, owner, given, given.device)
        yield trace
        if trace.error is None:
            return


def _given(shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Return an input without data."""
    meta = torch.empty(*shape, dtype=dtype, device="meta")
    return PlaceholderTensor(meta, torch.device("cpu"), "the input of the model")


def _possible_arguments(owner: nn.Module, block: nn.Module) -> Iterator[Tensor]:
    """Yield tensors without data that the forward of `owner` may take, the likeliest first."""
    dtype = next((parameter.dtype for parameter in owner.parameters() if parameter.is_floating_point()), None)
    if any(isinstance(child, nn.Embedding) for child in owner.modules()):
        tables = [table for table in owner.parameters(False) if table.dim() > 1]  # of positions: code may want them all
        for length in dict.fromkeys([INPUT_SHAPE[1], *(size for table in tables for size in table.shape[:-1])]):
            # Tokens that every table of the model holds.
            yield torch.zeros(INPUT_SHAPE[0], min(length, LONGEST), dtype=torch.long)
    # A block of stacked weights has no linear layer, but its router is one.
    widths = [sizes_of(child)[0] for child in (*block.modules(), *owner.modules()) if is_linear(child)]
    if widths:
        yield _given((*INPUT_SHAPE, widths[0]), dtype)
    for child in owner.modules():
        if isinstance(child, nn.Conv2d) and child.in_channels <= MOST_CHANNELS:
            told = [getattr(getattr(owner, "config", None), "image_size", None)]
            for side in [side for side in told if isinstance(side, int)] or SIDES:
                yield _given((INPUT_SHAPE[0], child.in_channels, side, side), dtype)
            return


def _hidden(values: Any) -> Tensor | None:
    """Return the first tensor of numbers that is computed from parameters, else the first tensor of numbers."""
    found = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point]
    return next((leaf for leaf in found if type(leaf) is PlaceholderTensor), found[0] if found else None)


def _with_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
    """Give values to arguments that have none; the values of the hidden states do not matter."""
    values: dict[int, Tensor] = {}

    def filled(leaf: Any) -> Any:
        if type(leaf) is not PlaceholderTensor:
            return leaf
        value = values.setdefault(id(leaf), random_values(*leaf.signature, "cpu"))
        # Computed from parameters, so it may have a gradient in the run.
        return value.requires_grad_(value.is_floating_point())

    hidden = _hidden((args, kwargs))
    args, kwargs = pytree.tree_map(filled, (args, kwargs))
    assert hidden is not None
    return BlockCall(args, kwargs, values.get(id(hidden), hidden))


# ------------------------------------------------------------------------------------------------------ read by hand


def _read_by_hand(trace: StepTrace) -> dict[str, str]:
    """Return the parameters that code outside their modules computes with, by name, and the lines of this code.

    Operations that treat each number alike, such as a moving average of the weights, are right on shards. So a
    parameter is read where another operation takes it, or takes a result of such operations.

    Args:
        trace: The record.
    """
    found: dict[str, str] = {}
    # By the `id` of results, which the trace keeps alive.
    alike: dict[int, dict[str, str]] = {}
    for operation in trace.operations:
        read: dict[str, str] = {}
        for value in operation.inputs:
            if value.view_of is not None and operation.line is not None:
                read[value.view_of] = operation.line
            read |= alike.get(id(value), {})
        outputs = [value for value in pytree.tree_leaves(operation.output) if isinstance(value, PlaceholderTensor)]
        # None: the data are written or logged, at the end of operations that are in the trace.
        if not read or operation.function is None or operation.function.name() in _WITHOUT_VALUES:
            continue
        # A view of a parameter, or a parameter that is written, is read where it is used.
        if any(value.view_of is not None for value in outputs):
            continue
        if _treats_alike(operation, outputs):
            alike |= {id(value): read for value in outputs}
        else:
            found |= read
    return found


def _treats_alike(operation: Operation, outputs: Sequence[PlaceholderTensor]) -> bool:
    """Return whether an operation computes each number from the numbers at the same place."""
    name = operation.function.name()
    if name.startswith("aten::_foreach_"):
        return "norm" not in name
    shapes = {value.shape for value in (*operation.inputs, *outputs) if value.dim()}
    return len(shapes) <= 1 and (torch.Tag.pointwise in operation.function.tags or name in _COPIES)


_COPIES = {"aten::_to_copy", "aten::copy_", "aten::zero_"}
# Operations that take a dtype, a device or a shape from a tensor.
_WITHOUT_VALUES = {f"aten::{name}_like" for name in ("zeros", "ones", "empty", "full")}
_WITHOUT_VALUES |= {f"aten::new_{name}" for name in ("zeros", "ones", "empty", "full")}


# --------------------------------------------------------------------------------------------------- through all blocks


def _joined(trace: StepTrace, blocks: Sequence[str]) -> set[int] | None:
    """Return which blocks pass all outputs to the next block and nowhere else; None if the trace does not show it."""
    modules = {call.module for call in trace.calls if call.path in blocks}
    calls = list(trace.outermost(modules))
    # A step that runs to its end may leave out a block. An earlier end hides the calls after it.
    if not calls or (trace.error is not None and {call.path for call in calls} != {*blocks}):
        return None
    order = [blocks.index(call.path) for call in calls]
    outputs = [_hidden(call.output) for call in calls]
    broken: set[int] = set()
    for position, (call, number) in enumerate(zip(calls, order)):
        before = outputs[position - 1] if position else None
        hidden = _hidden((call.args, call.kwargs))
        if before is None or hidden is not before or order[position - 1] != number - 1:
            broken.add(number - 1)
        # The next call is missing in a record that stops early, so the end of this record tells nothing.
        if order[position + 1 : position + 2] != [number + 1] and (position + 1 < len(order) or trace.error is None):
            broken.add(number)
        others = {id(leaf) for leaf in pytree.tree_leaves((call.args, call.kwargs)) if leaf is not hidden}
        broken |= {order[index] for index, output in enumerate(outputs) if id(output) in others}
    for operation in trace.operations:
        if not trace.is_inside(operation.call, modules):
            used = {id(value) for value in operation.inputs}
            broken |= {order[index] for index, output in enumerate(outputs) if id(output) in used}
    returned = {id(leaf) for leaf in pytree.tree_leaves(trace.output)}
    broken |= {order[index] for index, output in enumerate(outputs) if id(output) in returned}
    return {*order} - broken
