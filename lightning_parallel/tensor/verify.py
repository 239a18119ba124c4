"""Verification: does a divided module compute what the full one does?

`PlanVerifier`    before the division: runs one block with and without a plan, on the real ranks, and compares.
`StepAudit`       afterwards, in the first step: refuses code outside of the divided layers that uses their parameters
                  or activations. A regulariser over `self.parameters()`, or a weight passed to a function, would use
                  one rank's shard and give other numbers than one process, without an error.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import has_compiled_call, pytree
from lightning_parallel.tensor.inspection import is_linear, sizes_of, structure_of
from lightning_parallel.tensor.plan import Plan, Sharding, apply_plan
from lightning_parallel.tensor.sharding import reduce_partial_

__all__ = ["PlanVerifier", "StepAudit"]

TOLERANCE = 1e-6  # of the largest value; blocks that compute in single precision inside stay below it
SMALL = 1e-4  # a gradient this far below the largest one is compared as if it were this large
INPUT_SHAPE = (2, 6)  # samples and positions of the input with which a block is run

P = ParamSpec("P")
R = TypeVar("R")
_Result = tuple[list[Tensor], dict[str, Tensor]]
"""Outputs and input gradient, and the gradients of the parameters by name."""


class PlanVerifier:
    """Compares divided blocks with the original on the ranks of `group`; blocks of equal structure are run once.

    Both copies compute in double precision, without dropout, on a random input of shape (2, 6, features). The random
    state of the process and the original block are not changed. Of a model on the meta device only the block is
    materialised, with random values.

    Args:
        group: The tensor-parallel group; all its ranks must call the methods in the same order.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._known: dict[object, Plan | None] = {}
        self._refused: set[object] = set()
        self._verdicts: dict[object, bool | None] = {}

    def first_verified(self, block: nn.Module, given: Plan, candidates: Iterable[Plan]) -> Plan | None:
        """Return the first candidate that does not change the results of `block`; None if there is none.

        Args:
            block: The full module.
            given: What is divided in addition to each candidate.
            candidates: Plans for the block, the likeliest first.
        """
        candidates = list(candidates)
        kind = (type(block), tuple(candidates[0].styles) if candidates else ())
        described = [(plan.styles, plan.attributes) for plan in candidates]
        key = (structure_of(block), repr(given.styles), repr(described))
        if key not in self._known:
            self._known[key] = None if kind in self._refused else self._run_all(block, given, candidates)
        if self._known[key] is None:
            # Blocks of one kind may feed each other, so a division that is wrong for one is used for none.
            self._refused.add(kind)
        return self._known[key]

    def verify(self, block: nn.Module, plan: Plan) -> bool | None:
        """Return whether the results of `block` stay the same with `plan`; None if the block cannot be run alone."""
        key = (structure_of(block), repr(plan.styles), repr(plan.attributes))
        if key not in self._verdicts:
            runs = self.first_verified(block, Plan(), [Plan()]) is not None
            self._verdicts[key] = (
                (self._run_all(block, Plan(), [plan], all_outputs=False) is not None) if runs else None
            )
        return self._verdicts[key]

    def _run_all(self, block: nn.Module, given: Plan, candidates: list[Plan], all_outputs: bool = True) -> Plan | None:
        if any(parameter.is_meta for parameter in block.parameters()):
            block = _with_random_values(block)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            features = sizes_of(next(child for child in block.modules() if is_linear(child)))[0]
            x = torch.randn(*INPUT_SHAPE, features, dtype=torch.float64).to(_device())
            expected = self._run_together(lambda: _run(_copy(block), x))
            if expected is None:
                return None
            # A branch on `self.training` shows only there. None where the block draws random numbers of its own.
            trained = self._run_together(lambda: _run_without_chance(_copy(block).train(), x))
            for plan in candidates:
                both = Plan(
                    {**given.styles, **plan.styles},
                    {**given.attributes, **plan.attributes},
                    sequence_regions=plan.sequence_regions,
                )
                agrees = self._agrees(block, both, x, expected, all_outputs, training=False)
                if agrees and (trained is None or self._agrees(block, both, x, trained, all_outputs, training=True)):
                    return plan
        return None

    def _agrees(
        self, block: nn.Module, plan: Plan, x: Tensor, expected: _Result, all_outputs: bool, training: bool
    ) -> bool:
        try:
            divided = _copy(block)
            sharding = apply_plan(divided, plan, self.group)
        except ValueError:  # raised on every rank
            return False
        divided.train(training)
        with _NoDropout():
            # Wrong shapes show in a run without communication, before one rank could be left waiting in a collective.
            with comm.skip_communication():
                if self._run_together(lambda: _run(divided, x)) is None:
                    return False
            divided.zero_grad()
            outputs, gradients = _run(divided, x)
        full_outputs, full_gradients = expected
        right = not all_outputs or len(outputs) == len(full_outputs)
        compared = len(full_outputs) if all_outputs else 2
        right = right and all(map(_close, outputs[:compared], full_outputs[:compared]))
        # Sorted: `partial` is a set, and all ranks must reduce in the same order.
        names = sorted(sharding.partial & gradients.keys())
        reduce_partial_({name: gradients[name] for name in names}, sharding.shards, self.group)
        # Some gradients are zero up to rounding, such as that of a bias of attention keys.
        largest = max((float(full.abs().max()) for full in full_gradients.values() if full.numel()), default=0.0)
        right = right and gradients.keys() == full_gradients.keys()
        for name, gradient in gradients.items() if right else ():
            rule = sharding.shards.get(name)
            full = full_gradients[name]
            mine = full if rule is None else rule.split(full, self.group.rank)
            right = right and _close(gradient, mine, SMALL * largest)
        return all(comm.all_gather_object(right, self.group))

    def _run_together(self, run: Callable[[], _Result]) -> _Result | None:
        """Return the result of `run`, or None on every rank if it failed on any."""
        try:
            result = run()
        except Exception:  # the user's code on an input it may not be made for
            result = None
        return result if all(comm.all_gather_object(result is not None, self.group)) else None


def _copy(block: nn.Module) -> nn.Module:
    # Double precision tells rounding from a wrong division; `eval` switches off dropout, which would differ.
    copied = copy.deepcopy(block).to(_device(), torch.float64).eval().requires_grad_(True)
    for module in copied.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0  # in training torch applies it where `_NoDropout` does not see it
    return copied


def _device() -> torch.device:
    """Return a device on which the ranks can communicate: NCCL does not take tensors on the CPU."""
    on_gpu = torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _run(block: nn.Module, x: Tensor) -> _Result:
    """Run forward and backward, from a random weighting of the outputs; the first outputs are the main one and dx."""
    x = x.clone().requires_grad_(True)
    outputs = [leaf for leaf in pytree.tree_leaves(block(x)) if isinstance(leaf, Tensor)]
    floating = [leaf for leaf in outputs if leaf.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    main = floating[0]
    total = (main * torch.randn(main.shape, generator=generator, dtype=main.dtype).to(main.device)).sum()
    total.backward()
    if x.grad is None:
        raise ValueError("the output of the block does not depend on its input")
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    others = [leaf.detach().to(torch.float64) for leaf in outputs if leaf is not main]
    return [main.detach(), x.grad, *others], {**gradients}


def _run_without_chance(block: nn.Module, x: Tensor) -> _Result:
    """Run a block in training without its dropout.

    Raises:
        ValueError: If it draws other random numbers, of which a divided block would draw others.
    """
    with _NoDropout():
        before = torch.get_rng_state(), torch.cuda.get_rng_state() if x.is_cuda else torch.empty(0)
        result = _run(block, x)
        after = torch.get_rng_state(), torch.cuda.get_rng_state() if x.is_cuda else torch.empty(0)
    if not all(map(torch.equal, before, after)):
        raise ValueError("the block draws random numbers")
    return result


class _NoDropout(TorchFunctionMode):
    """Runs torch's dropout, and that of its attention, with probability zero: in a region ranks draw different ones."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else (kwargs or {})["input"]
        if name == "scaled_dot_product_attention":
            kwargs = {**(kwargs or {}), "dropout_p": 0.0}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) > 4:
                del kwargs["dropout_p"]
        return func(*args, **(kwargs or {}))


def _close(found: Tensor, expected: Tensor, floor: float = 0.0) -> bool:
    """Compare within the tolerance, relative to the largest expected value or to `floor` if that is larger."""
    if found.shape != expected.shape or not found.numel():
        return found.shape == expected.shape
    scale = max(float(expected.abs().max()), floor, 1e-12)
    return bool((found - expected).abs().max() <= TOLERANCE * scale)


def _with_random_values(block: nn.Module) -> nn.Module:
    """Return a copy on the CPU of a block on the meta device, with random values."""
    block = copy.deepcopy(block).to_empty(device="cpu")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for tensor in [*block.parameters(), *block.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(std=0.1)
            else:
                tensor.zero_()
    return block


# -------------------------------------------------------------------------------------------------- the user's step

# With the parameter as a later argument these functions take its dtype and device only.
CASTS = {"to", "type_as"}

# Backward nodes of the functions in `linear`, `autograd` and `loss`, by what they make of an activation: whole on every
# rank from parts, this rank's part from a whole one, or another part from a part.
JOINS = {
    "_RowLinearFunctionBackward",
    "_ReduceFromGroupBackward",
    "_GatherFromGroupBackward",
    "_CrossEntropyBackward",
}
DIVIDES = {"_ColumnLinearFunctionBackward", "_ScatterToGroupBackward", "_CopyToGroupBackward"}
STAYS_DIVIDED = {"_AllGatherToGroupBackward", "_ReduceScatterToGroupBackward"}
LEAF = "torch::autograd::AccumulateGrad"
RECEIVED = "_ReceivedBackward"  # what a pipeline stage got from the stage before
LEAVE_WHOLE = "keep the layers of that region whole with plan={..., '<their path>': 'replicate'}"


class StepAudit:
    """Refuses a step that uses divided parameters or activations outside of the layers that know of the division.

        audit = StepAudit(module, sharding)
        output = audit.wrap(step)(batch)        # raises where one process would get other numbers

    It needs nothing but the module and the facts of its division, so each pipeline stage can audit its own part: there
    `watch` goes around the stage's computation, and `check_output` takes what the stage sends to the next one.
    Compiled modules cannot be watched: with one of them inside `module`, only outputs are checked.

    Args:
        module: The divided module; after a pipeline cut, with the parameters of this stage.
        sharding: The result of `apply_plan`.
    """

    def __init__(self, module: nn.Module, sharding: Sharding) -> None:
        self._watched = not any(
            type(inner).__name__ == "OptimizedModule" or has_compiled_call(inner) for inner in module.modules()
        )
        self._users = _users_of_divided_parameters(module, sharding)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._divided = sharding.shards.keys() | sharding.partial
        self._has_divided_sequences = bool(sharding.plan.sequence_regions)

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
        """Run a block in which divided parameters may be used by their own layers only.

        Raises:
            RuntimeError: Inside the block, at a computation with a divided parameter outside of its layer.
        """
        if not self._watched:
            yield
            return
        with _ParameterUseMode(self._users, self.check_output):
            yield

    def check_sent(self, tensor: Tensor) -> None:
        """Check what a pipeline stage sends: as `check_output`, but it may be this rank's part of the sequence.

        Raises:
            RuntimeError: See `check_output`.
        """
        name = "what this stage sends"
        try:
            self.check_output(tensor, name)
        except RuntimeError:
            # The cut may lie inside of a stack of blocks that is divided along the sequence.
            if not self._has_divided_sequences:
                raise
            self._check_graph(tensor, name, inside=True)

    def check_output(self, output: Tensor, name: str) -> None:
        """Check that `output` depends on divided activations only through operations that join them.

        And the other way round: what is whole on every rank (a parameter, a joined activation) may enter a divided
        region only through an operation that sums its gradient over the ranks.

        Args:
            output: A result of the step that must be equal on all tensor-parallel ranks, such as the loss.
            name: The name of the output in the message, such as "the loss".

        Raises:
            RuntimeError: If it depends on this rank's part of an activation, or on a gradient that stays a part.
        """
        self._check_graph(output, name, inside=False)

    def _check_graph(self, output: Tensor, name: str, inside: bool) -> None:
        # (node, whether its output is divided): from the output back, joined -> divided -> whole again.
        todo: list[tuple[Any, bool]] = [(output.grad_fn, inside)]
        seen: set[tuple[Any, bool]] = set()
        while todo:
            node, inside = todo.pop()
            if node is None or (node, inside) in seen:
                continue
            seen.add((node, inside))
            kind = node.name()
            if kind == LEAF:
                self._check_leaf(node.variable, inside, name)
            elif kind == RECEIVED and (not inside or self._has_divided_sequences):
                continue  # checked by the stage that sent it; behind it is only what keeps it in the graph
            elif not (inside and kind.startswith("CompiledFunction")):
                # A compiled piece is one node for all of its results, whole and divided ones.
                before = _divided_before(node, kind, inside, name, self._names)
                todo += [(following, divided) for (following, _), divided in zip(node.next_functions, before)]

    def _check_leaf(self, leaf: Tensor, inside: bool, name: str) -> None:
        """Check that the gradient of a leaf of the graph is complete, or completed later, where it is used."""
        known = self._names.get(id(leaf))
        if known is not None and not inside and known in self._divided:
            raise RuntimeError(_used_outside(known, name))
        if inside and known not in self._divided:
            what = "a tensor that requires a gradient (an input?)" if known is None else f"`{known}`"
            raise RuntimeError(
                f"{name} depends on {what} inside of a region where each rank computes a part only (some heads, hidden"
                " features, positions), so each rank would have a part of its gradient, and the ranks would drift"
                f" apart. Use it outside of the region, or {LEAVE_WHOLE}"
            )


def _divided_before(node: Any, kind: str, inside: bool, name: str, names: Mapping[int, str]) -> list[bool]:
    """Return for each input of a backward node's operation if it is divided, where its output is if `inside`.

    With sequence parallelism the row-parallel layers divide (along the sequence) and the column-parallel ones join.

    Raises:
        RuntimeError: If a divided output reaches `name` undivided, or a whole one enters a region without a reduction
            of its gradient.
    """
    edges = len(node.next_functions)
    along_sequence = kind == "_RowLinearFunctionBackward" and node.lengths is not None
    if not inside and (kind in DIVIDES or kind in STAYS_DIVIDED or along_sequence) and kind != "_CopyToGroupBackward":
        raise RuntimeError(
            f"{name} depends on an activation of which each rank holds only a piece (hidden features, attention"
            f" weights; met at {kind.removesuffix('Backward')}{_layer_of(node, kind, names)}), so it would differ from"
            " that of one process. Let the layer that makes it gather its output: plan={..., '<its path>':"
            " 'column_gather'}"
        )
    if kind == "_ColumnLinearFunctionBackward":
        gradient = node.gradient
        # Input, weight, bias: the gradient of the input alone is summed over the ranks.
        return [gradient is not None and gradient.inputs.lengths is not None, *[True] * (edges - 1)]
    if kind in JOINS and not along_sequence:
        if inside:
            raise RuntimeError(
                f"{name} depends on an activation that is whole on every rank (the output of"
                f" {kind.removesuffix('Backward')}{_layer_of(node, kind, names)}) inside of a region where each rank"
                " computes a part only (some heads, hidden features, positions), so its gradient would be a part, too."
                f" Use it outside of the region, or {LEAVE_WHOLE}"
            )
        # The bias of a row-parallel layer is added to the whole output.
        return [True, True, *[False] * (edges - 2)] if kind == "_RowLinearFunctionBackward" else [True] * edges
    return [False if kind in DIVIDES else inside] * edges


def _layer_of(node: Any, kind: str, names: Mapping[int, str]) -> str:
    """Return the path of the layer that a node of a linear layer belongs to, for messages."""
    weight = node.next_functions[1][0] if "LinearFunction" in kind else None
    name = names.get(id(getattr(weight, "variable", None)))
    return "" if name is None else f" of `{name.rpartition('.')[0]}`"


def _used_outside(parameter: str, name: str) -> str:
    """Return the message about a divided parameter that `name` depends on outside of its layer."""
    return (
        f"{name} computes with `{parameter}` outside of its layer, but each rank holds only a piece of it or of its"
        f" gradient, so the result would differ from that of one process. Keep that layer whole with plan={{...,"
        f" {parameter.rpartition('.')[0]!r}: 'replicate'}}, or leave what uses the parameter out of the step (the"
        " optimizer's `weight_decay` stands for a squared norm)"
    )


class _Users:
    """Who may use one divided parameter: its name, and the ids of its owner and of the divided modules around it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.modules: set[int] = set()


def _users_of_divided_parameters(module: nn.Module, sharding: Sharding) -> dict[int, _Users]:
    """Return the users of each divided parameter that `module` holds, by the parameter's id."""
    modules = dict(module.named_modules(remove_duplicate=False))
    divided = sharding.shards.keys() | sharding.partial
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    users: dict[int, _Users] = {}
    for alias, parameter in module.named_parameters(remove_duplicate=False):
        name = names[id(parameter)]
        if name in divided:
            known = users.setdefault(id(parameter), _Users(name))
            known.modules |= {id(modules[path]) for path in _around(alias, sharding.plan.styles)}
    return users


def _around(name: str, styled: Iterable[str]) -> list[str]:
    """Return the paths of the module that owns a parameter, and of the divided modules around it."""
    owner = name.rpartition(".")[0]
    return [owner, *(path for path in styled if owner == path or owner.startswith(f"{path}."))]


class _ParameterUseMode(TorchFunctionMode):
    """Sees every torch function that is called, and refuses those that differentiate through a divided parameter."""

    def __init__(self, users: dict[int, _Users], check_loss: Callable[[Tensor, str], None]) -> None:
        super().__init__()
        self._users = users
        self._check_loss = check_loss

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:  # under manual optimization a step may do so without the strategy
            self._check_loss(args[0], "the loss")
        result = func(*args, **kwargs)
        # A result without gradient is a look at the parameter (its norm, for a log), not a part of the loss.
        if torch.is_grad_enabled() and any(_requires_grad(leaf) for leaf in pytree.tree_leaves(result)):
            name = getattr(func, "__name__", str(func))
            inputs = args[:1] if name in CASTS else (args, kwargs)
            for leaf in pytree.tree_leaves(inputs):
                if id(leaf) in self._users and leaf is not result:
                    self._check(self._users[id(leaf)], name)
        return result

    @staticmethod
    def _check(users: _Users, function: str) -> None:
        # Who calls shows in the stack only: a function on a plain tensor does not say which module it works for.
        frame = inspect.currentframe()
        while frame is not None:
            if id(frame.f_locals.get("self")) in users.modules:
                return
            frame = frame.f_back
        raise RuntimeError(_used_outside(users.name, f"the step (`{function}`)"))


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
