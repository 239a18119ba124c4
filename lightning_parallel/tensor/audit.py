"""The audit of a step: it checks that only sharding-aware layers use sharded parameters and activations.

A regulariser over `self.parameters()`, or a weight passed to a function, would use one rank's shard. The result would
differ from one process, without an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.compat import innermost_users_line
from lightning_parallel.compat.torch import has_compiled_parts, pytree
from lightning_parallel.tensor.autograd import RECEIVED
from lightning_parallel.tensor.per_head import MADE_FOR_HEADS
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.sharded import ShardedTensor

__all__ = ["StepAudit"]

P = ParamSpec("P")
R = TypeVar("R")

# With the parameter as a later argument these functions take its dtype and device only.
CASTS = {"to", "type_as"}

# Backward nodes of the functions in `linear`, `autograd`, `pieces` and `loss`, by their effect on an activation:
# JOINS makes the full one from parts, DIVIDES a part from the full one, STAYS_DIVIDED another part from a part.
JOINS = {
    "_RowLinearFunctionBackward",
    "_ReduceFromGroupBackward",
    "_GatherFromGroupBackward",
    "_WholeFromGroupBackward",
    "_WholeOfPartBackward",
    "_ChangedBackward",
    "_CrossEntropyBackward",
}
DIVIDES = {"_ColumnLinearFunctionBackward", "_ScatterToGroupBackward", "_CopyToGroupBackward", "_PartOfWholeBackward"}
STAYS_DIVIDED = {"_AllGatherToGroupBackward", "_ReduceScatterToGroupBackward"}
LEAF = "torch::autograd::AccumulateGrad"
_TERMS = 32
WITHOUT_WEIGHTS = (
    "Or take this computation out of the step: for a penalty, use the optimizer's `weight_decay`; for norms to log, use"
    " the full tensors of `self.state_dict()` in a hook such as `on_train_batch_end`, on every rank"
)
LEAVE_WHOLE = "keep the layers of that region replicated with tensor_plan={..., '<their path>': 'replicate'}"


class StepAudit:
    """Refuses a step that uses sharded parameters or activations outside the sharding-aware layers.

        audit = StepAudit(module, sharding)
        output = audit.wrap(step)(batch)        # raises where one process would get other numbers

    It needs only the module and the result of `apply_plan`, so each pipeline stage can audit its own part. A stage runs
    its computation inside `watch`, and passes each tensor that it sends to `check_sent`.
    Compiled modules cannot be watched: if `module` contains one, the audit checks outputs only.

    Args:
        module: The sharded module; with pipeline parallelism, the module with the parameters of this stage.
        sharding: The result of `apply_plan`.
        cuts_are_proven: Whether pipeline stages may send pieces to each other. Set it only if a self-check compared
            the step with one process: a stage cannot see how the next stage uses the pieces.
    """

    def __init__(self, module: nn.Module, sharding: Sharding, cuts_are_proven: bool = False) -> None:
        self._watched = not has_compiled_parts(module)
        self._users = _users_of_divided_parameters(module, sharding)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._divided = sharding.shards.keys() | sharding.partial
        # Blocks of a sequence region pass pieces to each other by design, also over a split point.
        self._may_send_pieces = cuts_are_proven or bool(sharding.plan.sequence_regions)
        self._count, self._epoch = 0, -1
        self._known: set[tuple[str, ...]] = set()

    def wrap(self, step: Callable[P, R]) -> Callable[P, R]:
        """Return `step` with the audit around it: its loss is checked too, a tensor or the `"loss"` of a mapping.

        Raises:
            RuntimeError: From the returned function; see `watch` and `check_output`.
        """

        @wraps(step)
        def audited(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.watch():
                output = step(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):
                self.check_output(loss, "the loss")
            return output

        return audited

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Run a block in which only their own layers may use sharded parameters.

        Raises:
            RuntimeError: Inside the block, at a computation with a sharded parameter outside its layer.
        """
        if not self._watched:
            yield
            return
        with _ParameterUseMode(self._users, self.check_output):
            yield

    def check_sent(self, tensor: Tensor) -> None:
        """Check a tensor that a pipeline stage sends, like `check_output`, but allow this rank's piece.

        Raises:
            RuntimeError: See `check_output`.
        """
        name = "the output of this stage"
        try:
            self.check_output(tensor, name)
        except RuntimeError as error:
            # The split point may lie inside a stack of blocks that is sharded along the sequence. It may also lie
            # between a column-parallel layer and its row-parallel layer.
            if not self._may_send_pieces:
                raise RuntimeError(
                    f"{error}. Or leave `verify` at 'auto': with the self-check stages may send such pieces"
                ) from error
            self._check_graph(tensor, name, inside=True)

    def check_loss(self, loss: Tensor, epoch: int) -> None:
        """Check a loss before its backward: losses number 1, 2, 4, 8, ..., the first of each epoch, and any new one.

        A loss is new if no earlier loss combined its terms by the same operations. A term may join after a warmup, or
        for some batches only.

        Raises:
            RuntimeError: See `check_output`.
        """
        self._count += 1
        terms = _terms(loss)
        # Powers of two: a walk through the graph takes time, so it becomes rare once the loss is known.
        is_due = not self._count & (self._count - 1) or epoch != self._epoch
        if is_due or terms not in self._known:
            self.check_output(loss, "the loss")
            self._known.add(terms)
            self._epoch = epoch

    def check_output(self, output: Tensor, name: str) -> None:
        """Check that `output` depends on sharded activations only through operations that join them.

        Also check the opposite direction. A replicated tensor (a parameter, a joined activation) may enter a sharded
        region only through an operation that sums its gradient.

        Args:
            output: A result of the step that must be equal on all tensor-parallel ranks, such as the loss.
            name: The name of the output in the message, such as "the loss".

        Raises:
            RuntimeError: If it depends on this rank's part of an activation, or on a partial gradient.
        """
        self._check_graph(output, name, inside=False)

    def _check_graph(self, output: Tensor, name: str, inside: bool) -> None:
        # (node, whether its output is sharded): from the output back, joined -> sharded -> full again.
        todo: list[tuple[Any, bool]] = [(output.grad_fn, inside)]
        seen: set[tuple[Any, bool]] = set()
        while todo:
            node, inside = todo.pop()
            if node is None or (node, inside) in seen:
                continue
            # Both belong to the key: a node may be reached from a sharded and from a full tensor.
            seen.add((node, inside))
            kind = node.name()
            if kind == LEAF:
                self._check_leaf(node.variable, inside, name)
            elif kind == RECEIVED and (not inside or self._may_send_pieces):
                continue  # the sending stage checked it; behind it are only nodes that keep it in the graph
            elif not (inside and kind.startswith("CompiledFunction")):
                # A compiled piece is one node for all its results, full and sharded alike, so its inputs are unknown.
                before = _divided_before(node, kind, inside, name, self._names)
                todo += [(following, divided) for (following, _), divided in zip(node.next_functions, before)]

    def _check_leaf(self, leaf: Tensor, inside: bool, name: str) -> None:
        """Check that the gradient of a leaf of the graph is complete, or is completed later."""
        known = self._names.get(id(leaf))
        if known is not None and not inside and known in self._divided:
            raise RuntimeError(_used_outside(self._users[id(leaf)], name))
        if inside and known not in self._divided and not hasattr(leaf, MADE_FOR_HEADS):
            what = "A tensor that requires a gradient (an input?)" if known is None else f"`{known}`"
            raise RuntimeError(
                f"{name} depends on {what} inside a region where each rank computes only a part (some heads, hidden"
                " features, positions). Each rank would have a part of its gradient, and the ranks would drift apart."
                f" Use it outside the region, or {LEAVE_WHOLE}"
            )


def _terms(loss: Tensor) -> tuple[str, ...]:
    """Return the kinds of the operations nearest to a loss, in breadth-first order."""
    nodes: list[Any] = [loss.grad_fn]
    kinds: list[str] = []
    # The list grows while it is read, so the order is breadth-first.
    for node in nodes:
        if node is not None and len(kinds) < _TERMS:
            kinds.append(node.name())
            nodes += [following for following, _ in node.next_functions]
    return tuple(kinds)


def _divided_before(node: Any, kind: str, inside: bool, name: str, names: Mapping[int, str]) -> list[bool]:
    """Return for each input of a backward node's operation whether it is sharded; `inside` says this of its output.

    With sequence parallelism the row-parallel layers shard along the sequence and the column-parallel layers join.

    Raises:
        RuntimeError: If a sharded output reaches `name` without a join, or a replicated tensor enters a region without
            a reduction of its gradient.
    """
    edges = len(node.next_functions)
    # The node of a custom function has the attributes that its forward set in `ctx`.
    along_sequence = kind == "_RowLinearFunctionBackward" and node.lengths is not None
    if not inside and (kind in DIVIDES or kind in STAYS_DIVIDED or along_sequence) and kind != "_CopyToGroupBackward":
        raise RuntimeError(
            f"{name} depends on an activation of which each rank holds only a piece (hidden features, attention"
            f" weights; met at {kind.removesuffix('Backward')}{_layer_of(node, kind, names)}). It would differ from its"
            " value in one process. Let the layer that makes it gather its output:"
            " tensor_plan={..., '<its path>': 'column_gather'}"
            " [LP015]"
        )
    if kind == "_ColumnLinearFunctionBackward":
        gradient = node.gradient
        # Input, weight, bias: the gradient of the input alone is summed over the ranks.
        return [gradient is not None and gradient.layout is not None, *[True] * (edges - 1)]
    if kind in JOINS and not along_sequence:
        if inside:
            raise RuntimeError(
                f"{name} depends on a replicated activation (the output of"
                f" {kind.removesuffix('Backward')}{_layer_of(node, kind, names)}) inside a region where each rank"
                " computes only a part (some heads, hidden features, positions). Its gradient would be only a part as"
                f" well. Use it outside the region, or {LEAVE_WHOLE}"
            )
        if kind == "_ChangedBackward":
            # The full tensor before the change, and the part after it.
            return [False, True]
        # A row-parallel layer adds its bias after the reduction, to the full output.
        return [True, True, *[False] * (edges - 2)] if kind == "_RowLinearFunctionBackward" else [True] * edges
    return [False if kind in DIVIDES else inside] * edges


def _layer_of(node: Any, kind: str, names: Mapping[int, str]) -> str:
    """Return the path of the layer that a node of a linear layer belongs to, for messages."""
    weight = node.next_functions[1][0] if "LinearFunction" in kind else None
    name = names.get(id(getattr(weight, "variable", None)))
    return "" if name is None else f" of `{name.rpartition('.')[0]}`"


def _used_outside(users: _Users, name: str) -> str:
    """Return the message about a sharded parameter that `name` depends on outside its layer."""
    # The plan keeps a part of a block on full sequences if the recorded steps use the part outside the block.
    way = "Let the step do so in its first batch too, which decides the plan, or set `sequence_parallel=False`"
    if not users.see_positions:
        layer = users.name.rpartition(".")[0]
        way = f"Keep that layer replicated with tensor_plan={{..., {layer!r}: 'replicate'}}"
    return (
        f"{name} computes with `{users.name}` outside its layer, but each rank holds only a piece of it or of its"
        f" gradient. The result would differ from the result of one process. {way}. {WITHOUT_WEIGHTS} [LP014]"
    )


class _Users:
    """The permitted users of one sharded parameter.

    Attributes:
        name: Name of the parameter.
        modules: Its owner and the sharded modules around it, by `id`.
        see_positions: Whether they use it, in full, on some of the positions of each sequence.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.modules: set[int] = set()
        self.see_positions = False


def _users_of_divided_parameters(module: nn.Module, sharding: Sharding) -> dict[int, _Users]:
    """Return the permitted users of each sharded parameter that `module` holds, by the parameter's `id`."""
    modules = dict(module.named_modules(remove_duplicate=False))
    divided = sharding.shards.keys() | sharding.partial
    blocks = [path for region in sharding.plan.sequence_regions for path in region.blocks if path in modules]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    users: dict[int, _Users] = {}
    # With duplicates: a tied parameter may be used by each module that registers it.
    for alias, parameter in module.named_parameters(remove_duplicate=False):
        name = names[id(parameter)]
        if name in divided:
            known = users.setdefault(id(parameter), _Users(name))
            known.modules |= {id(modules[path]) for path in _around(alias, sharding.plan.styles)}
            if name not in sharding.shards:
                # Full, in a block on some of the positions: a trial has proven all uses in the block.
                around = _around(alias, blocks)
                known.modules |= {id(modules[path]) for path in around}
                known.see_positions |= len(around) > 1
    return users


def _around(name: str, styled: Iterable[str]) -> list[str]:
    """Return the path of the module that owns a parameter, and the paths of the sharded modules around it."""
    owner = name.rpartition(".")[0]
    return [owner, *(path for path in styled if owner == path or owner.startswith(f"{path}."))]


class _ParameterUseMode(TorchFunctionMode):
    """Sees every torch function call, and refuses a call that differentiates through a sharded parameter."""

    def __init__(self, users: dict[int, _Users], check_loss: Callable[[Tensor, str], None]) -> None:
        super().__init__()
        self._users = users
        self._check_loss = check_loss

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:  # under manual optimization, a step calls it without the strategy
            self._check_loss(args[0], "the loss")
        result = func(*args, **kwargs)
        # A result without gradient only reads the parameter (its norm, for a log); it is not a part of the loss.
        if torch.is_grad_enabled() and any(_requires_grad(leaf) for leaf in pytree.tree_leaves(result)):
            name = getattr(func, "__name__", str(func))
            inputs = args[:1] if name in CASTS else (args, kwargs)
            for leaf in pytree.tree_leaves(inputs):
                if id(leaf) in self._users and leaf is not result and not isinstance(leaf, ShardedTensor):
                    self._check(self._users[id(leaf)], name)
        return result

    @staticmethod
    def _check(users: _Users, function: str) -> None:
        # Only the stack shows the caller: a function on a plain tensor does not say which module it works for.
        frame = inspect.currentframe()
        while frame is not None:
            if id(frame.f_locals.get("self")) in users.modules:
                return
            frame = frame.f_back
        place = innermost_users_line()
        raise RuntimeError(_used_outside(users, f"the step (`{function}`{place and f' in {place}'})"))


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
