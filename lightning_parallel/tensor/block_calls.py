"""How a model calls its blocks: seen in a run of its forward without data, up to the first block or through all.

A copy of the model on the meta device computes shapes only, so that it costs neither memory nor time. Several kinds of
input are tried (tokens, hidden states, an image). The model's code makes further arguments of the block, such as
rotations and masks. Their values do not matter to a comparison: they are random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import (
    BUFFERS,
    MODULES,
    PARAMETERS,
    buffers_of,
    children_of,
    parameters_of,
    pytree,
    seed_torch,
    version_of,
)
from lightning_parallel.tensor.inspection import copy_of, is_linear, sizes_of
from lightning_parallel.tensor.verify import INPUT_SHAPE, LONGEST, BlockCall, chance_kept

__all__ = ["block_call", "joined_blocks"]

SIDES = (32, 64, 224)  # of images
MOST_CHANNELS = 16
_LINE = 160  # of the reason of a failure
# Attributes that are the same for a part of the positions and for all of them, so reading them shows no use.
_HARMLESS = {"dtype", "device", "is_cuda", "is_meta", "layout", "requires_grad", "ndim", "dim", "is_floating_point"}

# Answers to code that asks a tensor without data for its value. They only decide about the way to the blocks.
_VALUES: dict[str, Any] = {
    "__bool__": False,
    "__contains__": False,
    "item": 0,
    "__int__": 0,
    "__index__": 0,
    "__float__": 0.0,
}


class _CalledError(Exception):
    """The block is called; carries the call's arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


def block_call(root: nn.Module, path: str, group: Group, outermost: bool = False) -> BlockCall | str:
    """Return how the modules of `root` call the block at `path`; if no call is seen, the reason in a few words.

    Args:
        root: The full model.
        path: Path of the block, in a container.
        group: The tensor-parallel group; all its ranks must call this.
        outermost: Whether to ask the full model first: the module next to the block may omit optional arguments.
    """
    found: Any = ""
    parts = path.split(".")
    owners = [".".join(parts[:depth]) for depth in range(len(parts))]
    with chance_kept():
        for around in owners if outermost else reversed(owners):
            owner = root.get_submodule(around)
            if isinstance(found, str) and not isinstance(owner, (nn.ModuleList, nn.ModuleDict)):
                found = _call_by(owner, path.removeprefix(f"{around}.").lstrip("."))
        seed_torch(0)
        call = found if isinstance(found, str) else _with_values(*found)
    leaves = [call] if isinstance(call, str) else pytree.tree_leaves((call.args, call.kwargs))
    described = [(leaf.shape, str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    # Ranks that try different calls would wait for each other.
    everywhere = comm.all_gather_object((described, call if isinstance(call, str) else ""), group)
    return (
        call
        if all(other == described for other, _ in everywhere)
        else next(filter(None, (w for _, w in everywhere)), "")
    )


def _call_by(owner: nn.Module, path: str) -> tuple[tuple[Any, ...], dict[str, Any]] | str:
    """Return the arguments that the forward of `owner` gives to the block at `path`; if none, the reason in brief.

    First without data; then, for code that looks at values or uses numpy, with the model's values and some tokens.
    """
    reason = ""
    possible = list(_possible_arguments(owner, owner.get_submodule(path)))
    has_values = not any(tensor.is_meta for tensor in owner.parameters())
    for given, with_values in [(given, with_values) for with_values in (False, True) for given in possible]:
        if with_values and not has_values:
            break
        run = _shell(owner, {}, _own_value if with_values else _meta)

        def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _CalledError(*copy.deepcopy((args, kwargs)))

        run.get_submodule(path).register_forward_pre_hook(called, with_kwargs=True)
        try:
            # Code that creates a mask without naming a device gets the default device, so set it to the model's.
            with torch.no_grad(), torch.device(_device_of(owner) if with_values else "meta"):
                run(_example(given, owner) if with_values else given)
            reason = reason or f"`{type(owner).__name__}` does not call it"
        except _CalledError as call:
            if _hidden(call.arguments) is not None:
                return call.arguments
        except Exception as error:  # the user's code on an input it may not be made for
            if given is possible[0]:  # the last run has values, so its error comes from the user's code
                line = next(iter(str(error).splitlines()), "")[:_LINE] or type(error).__name__
                reason = f"`{type(owner).__name__}` stops before it: {line}"
    return reason


def _device_of(owner: nn.Module) -> torch.device:
    return next((parameter.device for parameter in owner.parameters()), torch.device("cpu"))


def _example(given: Tensor, owner: nn.Module) -> Tensor:
    """Return an argument with values, in the shape and dtype of `given`."""
    if given.is_floating_point():
        return torch.randn(given.shape, dtype=torch.float64).to(_device_of(owner), given.dtype)
    tables = [child.num_embeddings for child in owner.modules() if isinstance(child, nn.Embedding)]
    # Tokens that every table of the model holds.
    return (torch.arange(given.numel()).view(given.shape) % min(tables, default=2)).to(_device_of(owner), given.dtype)


def _meta(tensor: Tensor) -> Tensor:
    found = tensor.detach().to("meta")
    return nn.Parameter(found, found.is_floating_point()) if isinstance(tensor, nn.Parameter) else found


def _own_value(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _shell(module: nn.Module, known: dict[int, Any], tensor_for: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of `module` without its hooks, with `tensor_for(tensor)` for each of its tensors."""
    # `known` keeps ties: a module or tensor that is registered twice gets one replacement.
    if id(module) in known:
        return known[id(module)]
    # Not by `copy.copy`: modules with a parametrization, such as a weight norm, refuse it.
    hollow = known[id(module)] = object.__new__(type(module))
    vars(hollow).update(vars(module))
    for name in [name for name in vars(hollow) if name.endswith("_hooks")]:
        vars(hollow)[name] = type(vars(hollow)[name])()

    def other(tensor: Tensor | None) -> Tensor | None:
        if tensor is not None and id(tensor) not in known:
            known[id(tensor)] = tensor_for(tensor)
        return None if tensor is None else known[id(tensor)]

    for name, value in vars(hollow).items():
        if isinstance(value, Tensor):  # a mask, a pruned weight
            vars(hollow)[name] = other(value)
    vars(hollow)[PARAMETERS] = {name: other(tensor) for name, tensor in parameters_of(module).items()}
    vars(hollow)[BUFFERS] = {name: other(tensor) for name, tensor in buffers_of(module).items()}
    children = {name: child and _shell(child, known, tensor_for) for name, child in children_of(module).items()}
    vars(hollow)[MODULES] = children
    return hollow


def _possible_arguments(owner: nn.Module, block: nn.Module) -> Iterator[Tensor]:
    """Yield tensors without data that the forward of `owner` may take, the likeliest first."""
    dtype = next((parameter.dtype for parameter in owner.parameters() if parameter.is_floating_point()), None)
    if any(isinstance(child, nn.Embedding) for child in owner.modules()):
        tables = [table for table in owner.parameters(False) if table.dim() > 1]  # of positions: code may want them all
        for length in dict.fromkeys([INPUT_SHAPE[1], *(size for table in tables for size in table.shape[:-1])]):
            yield torch.zeros(INPUT_SHAPE[0], min(length, LONGEST), dtype=torch.long, device="meta")
    widths = [sizes_of(child)[0] for child in block.modules() if is_linear(child)]
    if widths:
        yield torch.empty(*INPUT_SHAPE, widths[0], dtype=dtype, device="meta")
    for child in owner.modules():
        if isinstance(child, nn.Conv2d) and child.in_channels <= MOST_CHANNELS:
            told = [getattr(getattr(owner, "config", None), "image_size", None)]
            for side in [side for side in told if isinstance(side, int)] or SIDES:
                yield torch.empty(INPUT_SHAPE[0], child.in_channels, side, side, dtype=dtype, device="meta")
            return


def _hidden(arguments: Any) -> Tensor | None:
    leaves = pytree.tree_leaves(arguments)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def _with_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
    """Give values to arguments that have none; the values of the hidden states do not matter."""
    values: dict[int, Tensor] = {}

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        return values.setdefault(id(leaf), _values_of(leaf))

    hidden = _hidden((args, kwargs))
    args, kwargs = pytree.tree_map(filled, (args, kwargs))
    assert hidden is not None
    return BlockCall(args, kwargs, values.get(id(hidden), hidden))


def _values_of(like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=torch.float64).to(like.dtype)
    if like.dtype == torch.bool:
        is_square = like.dim() > 1 and like.shape[-1] == like.shape[-2]
        # No row of the mask is empty: its softmax would be NaN.
        mask = torch.ones(like.shape, dtype=torch.bool)
        return mask.tril() if is_square else mask
    return torch.arange(like.shape[-1] if like.dim() else 1, dtype=like.dtype).expand(like.shape).clone()


# --------------------------------------------------------------------------------------------------- through all blocks


def joined_blocks(root: nn.Module, blocks: Sequence[str], group: Group) -> set[tuple[str, str]]:
    """Return the pairs of neighbours in which the first passes its output unchanged to the second, and nowhere else.

    Args:
        root: The full model.
        blocks: Paths of the blocks of one container, in their order.
        group: The tensor-parallel group; all its ranks must call this.

    Returns:
        Only pairs that were seen: code between other blocks may change the output.
    """
    found = None
    stack = blocks[0].rpartition(".")[0]
    around = stack
    with chance_kept():
        while found is None:
            owner = root.get_submodule(around)
            # Code of the model may go through the modules of a `Sequential` one by one.
            is_list = isinstance(owner, (nn.ModuleList, nn.ModuleDict)) or (around == stack and around != "")
            if not is_list:
                found = _joined_by(owner, [path.removeprefix(f"{around}.").lstrip(".") for path in blocks])
            if not around:
                break
            around = around.rpartition(".")[0]
    pairs = [] if found is None else [pair for number, pair in enumerate(zip(blocks, blocks[1:])) if number in found]
    # Only pairs that all ranks saw: ranks with different regions would wait for each other.
    return set(pairs).intersection(*comm.all_gather_object(pairs, group))


def _joined_by(owner: nn.Module, blocks: Sequence[str]) -> set[int] | None:
    """Return which blocks are joined to the next one in the forward of `owner`; None if it does not run so far."""
    for given in _possible_arguments(owner, owner.get_submodule(blocks[0])):
        hollow = _shell(owner, {}, _meta)
        uses = _BlockUses()
        for number, path in enumerate(blocks):
            uses.watch(number, hollow.get_submodule(path), owner.get_submodule(path))
        try:
            with torch.no_grad(), uses, torch.device("meta"):
                output = hollow(given)
            uses.read(output)
        except Exception:  # the user's code on an input it may not be made for, or after the blocks
            pass
        if len({number for number, _ in uses.calls}) == len(blocks):
            return uses.joined()
    return None


class _BlockUses(TorchFunctionMode):
    """Watches which code uses the outputs of blocks.

    Attributes:
        calls: For each call, the number of its block, and the number of the call whose output it got; else -1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []
        self._outputs: dict[int, tuple[Tensor, int, int]] = {}  # held, so that no other tensor gets their ids
        self._used: set[int] = set()
        self._depth = 0

    def watch(self, number: int, hollow: nn.Module, block: nn.Module) -> None:
        """Watch the calls of `block` on `hollow`, its copy without data."""
        own = hollow.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            before = copy.deepcopy((args, kwargs))  # the failed call may fill a cache among its arguments
            try:
                return own(*args, **kwargs)
            except Exception:  # the block reads values, so run a copy of it with data
                with torch.device("cpu"):
                    call = _with_values(*before)
                    output = call(copy_of(block), call.hidden)
                return pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), output)

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._depth += 1
            hidden = _hidden((args, kwargs))
            known, version, call = self._outputs.get(id(hidden), (None, -1, -1))
            is_same = hidden is not None and hidden is known and version_of(hidden) == version
            self.read([leaf for leaf in pytree.tree_leaves((args, kwargs)) if leaf is not hidden])
            self.calls.append((number, call if is_same else -1))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            hidden = _hidden(output)
            if hidden is not None:
                self._outputs[id(hidden)] = hidden, version_of(hidden), len(self.calls) - 1
            self._depth -= 1

        vars(hollow)["forward"] = forward
        hollow.register_forward_pre_hook(enter, with_kwargs=True)
        hollow.register_forward_hook(leave)

    def read(self, values: Any) -> None:
        """Take note of outputs of blocks that are used by other code than blocks."""
        leaves = pytree.tree_leaves(values)
        self._used |= {self._outputs[id(leaf)][2] for leaf in leaves if id(leaf) in self._outputs}

    def joined(self) -> set[int]:
        """Return the blocks each of whose outputs goes into the next block, in the next call, and nowhere else."""
        numbers = [number for number, _ in self.calls]
        broken = {number for call, number in enumerate(numbers) if call in self._used}
        for call, (number, given) in enumerate(self.calls):
            if given < 0 or given != call - 1 or numbers[given] != number - 1:
                broken.add(number - 1)
            if call + 1 == len(numbers) or numbers[call + 1] != number + 1:
                broken.add(number)
        return set(numbers) - broken

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _VALUES and isinstance(args[0], Tensor) and args[0].is_meta:
            return _VALUES[name]  # such as a test for packed sequences, which decides about a mask
        result = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if not self._depth and name not in _HARMLESS:
            # A conversion that has nothing to do returns the tensor itself, which is no use of it.
            self.read([leaf for leaf in pytree.tree_leaves((args, kwargs)) if leaf is not result])
        return result
