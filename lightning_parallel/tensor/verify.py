"""Verification before sharding: does a sharded block compute the same as the full one, on the real ranks?"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import pytree, random_values, seed_torch
from lightning_parallel.tensor.inspection import copy_of, is_linear, sizes_of, structure_of
from lightning_parallel.tensor.plan import Plan, apply_plan
from lightning_parallel.tensor.sharding import reduce_partial_

__all__ = ["BlockCall", "DropoutOff", "PlanVerifier", "chance_kept", "copy_in_double", "inputs_of", "possible_inputs"]

# Of the largest value, by the precision of the trial; code that computes in single precision inside stays below the
# first.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 6e-2}
SMALL = 1e-4  # a gradient this far below the largest one is compared as if it were this large
LONGEST = 1024
_ABOUT_PRECISION = re.compile(r"dtype|float64|double|fp16|bf16|float16|half", re.IGNORECASE)
MOST_INPUTS = 6
INPUT_SHAPE = (2, 6)  # samples and positions of the input with which a block is run

_Result = tuple[list[Tensor], dict[str, Tensor]]
"""Outputs and input gradient, and the gradients of the parameters by name."""


class PlanVerifier:
    """Compares sharded blocks with the original on the ranks of `group`; blocks of equal structure are run once.

    Both copies compute in double precision, without dropout, on a random input of shape (2, 6, features). The random
    state of the process and the original block are not changed. If the model is on the meta device, only the block is
    materialised, with random values.

    Args:
        group: The tensor-parallel group; all its ranks must call the methods in the same order.

    Attributes:
        failure: Why the last block that failed did not run, in a line; the same on all ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lacks_precision = False  # whether the last failure was about precision
        self.failure = ""
        self._known: dict[object, Plan | None] = {}
        self._refused: set[object] = set()
        self._verdicts: dict[object, bool | None] = {}

    def first_verified(
        self,
        block: nn.Module,
        given: Plan,
        candidates: Iterable[Plan],
        source: str = "",
        call: BlockCall | None = None,
    ) -> Plan | None:
        """Return the first candidate that does not change the results of `block`; None if all change them.

        Args:
            block: The full module.
            given: A plan that is applied in addition to each candidate.
            candidates: Plans for the block, the likeliest first.
            source: How the plans were found: a block that refused plans of one source may accept plans of another.
            call: How the model calls the block, if that is known; otherwise it is called with one tensor.
        """
        candidates = list(candidates)
        kind = (type(block), source, tuple(candidates[0].styles) if candidates else ())
        described = [(plan.styles, plan.attributes, plan.sequence_regions) for plan in candidates]
        key = (structure_of(block), source, repr(given.styles), repr(described))
        if key not in self._known:
            self._known[key] = None if kind in self._refused else self._run_all(block, given, candidates, call)
        if self._known[key] is None:
            # Blocks of one kind may feed each other, so a plan that is wrong for one block is used for none.
            self._refused.add(kind)
        return self._known[key]

    def verify(self, block: nn.Module, plan: Plan, call: BlockCall | None = None) -> bool | None:
        """Return whether the results of `block` stay the same with `plan`; None if the block cannot run alone.

        Args:
            block: The full module.
            plan: How it is sharded.
            call: How the model calls the block, if that is known; otherwise it is called with one tensor.
        """
        key = (structure_of(block), repr(plan.styles), repr(plan.attributes), call is None)
        if key not in self._verdicts:
            # First without a plan: a block that cannot run alone shows nothing about a plan.
            runs = self.first_verified(block, Plan(), [Plan()], "" if call is None else "called", call) is not None
            self._verdicts[key] = (
                (self._run_all(block, Plan(), [plan], call, all_outputs=False) is not None) if runs else None
            )
        return self._verdicts[key]

    def _run_all(
        self,
        block: nn.Module,
        given: Plan,
        candidates: list[Plan],
        call: BlockCall | None,
        all_outputs: bool = True,
    ) -> Plan | None:
        if any(parameter.is_meta for parameter in block.parameters()):
            block = _with_random_values(block)
        with chance_kept():
            seed_torch(0)
            # Some attention kernels only compute in half precision; a wrong plan differs by more than its rounding.
            for dtype in TOLERANCES:
                with _computing_in(dtype):
                    for x in _trial_inputs(block, call):
                        expected = self._run_together(partial(_run_copy, block, x))
                        if expected is not None:
                            return self._first_right(block, given, candidates, all_outputs, x, expected)
                        if self._lacks_precision:
                            break
                if not self._lacks_precision:
                    break
        return None

    def _first_right(
        self,
        block: nn.Module,
        given: Plan,
        candidates: list[Plan],
        all_outputs: bool,
        x: _TrialInput,
        expected: _Result,
    ) -> Plan | None:
        # A branch on `self.training` shows only there. None where the block itself draws random numbers.
        trained = self._run_together(lambda: _run_without_chance(copy_in_double(block).train(), x))
        draws = trained is not None and self._run_together(lambda: _run_with_chance(block, x)) is not None
        for plan in candidates:
            both = Plan(
                {**given.styles, **plan.styles},
                {**given.attributes, **plan.attributes},
                sequence_regions=plan.sequence_regions,
            )
            agrees = self._agrees(block, both, x, expected, all_outputs, training=False)
            if agrees and trained is not None:
                agrees = self._agrees(block, both, x, trained, all_outputs, training=True)
                agrees = agrees and (not draws or self._draws_alike(block, both, x))
            if agrees:
                return plan
        return None

    def _agrees(
        self, block: nn.Module, plan: Plan, x: _TrialInput, expected: _Result, all_outputs: bool, training: bool
    ) -> bool:
        try:
            divided = copy_in_double(block)
            sharding = apply_plan(divided, plan, self.group)
        except ValueError:  # raised on every rank
            return False
        divided.train(training)
        with DropoutOff():
            # Wrong shapes show in a run without communication, before one rank could be left waiting in a collective.
            # On a copy: a run in training may change attributes, and buffers such as the vectors of a spectral norm.
            with comm.skip_communication():
                if self._run_together(lambda: _run(copy_of(divided), x)) is None:
                    return False
            if self.group.is_pretended:
                return True  # the shapes fit; only real ranks could compare values
            outputs, gradients = _run(divided, x)
        full_outputs, full_gradients = expected
        right = not all_outputs or len(outputs) == len(full_outputs)
        # The first two are the main output and the gradient of the input.
        compared = len(full_outputs) if all_outputs else 2
        right = right and all(map(_close, outputs[:compared], full_outputs[:compared]))
        # Sorted: `partial` is a set, and all ranks must reduce in the same order.
        names = sorted(sharding.partial & gradients.keys())
        reduce_partial_({name: gradients[name] for name in names}, sharding.shards, self.group)
        # Some gradients are zero up to rounding, such as the gradient of a bias of attention keys.
        largest = max((float(full.abs().max()) for full in full_gradients.values() if full.numel()), default=0.0)
        right = right and gradients.keys() == full_gradients.keys()
        for name, gradient in gradients.items() if right else ():
            rule = sharding.shards.get(name)
            full = full_gradients[name]
            mine = full if rule is None else rule.split(full, self.group.rank)
            right = right and _close(gradient, mine, SMALL * largest)
        return all(comm.all_gather_object(right, self.group))

    def _draws_alike(self, block: nn.Module, plan: Plan, x: _TrialInput) -> bool:
        """Return whether, with dropout, all ranks have the same values of full tensors.

        Where each rank draws for its own features, full tensors must not depend on the draws.
        """
        if self.group.is_pretended:
            return True
        divided = copy_in_double(block)
        sharding = apply_plan(divided, plan, self.group)
        # All ranks start alike, as the replicated stream of a run does.
        seed_torch(0)
        result = self._run_together(lambda: _run(divided.train(), x))
        if result is None:
            return False
        outputs, gradients = result
        reduced = {name: gradients[name] for name in sorted(sharding.partial & gradients.keys())}
        reduce_partial_(reduced, sharding.shards, self.group)
        whole = [*outputs[:2], *(gradient for name, gradient in gradients.items() if name not in sharding.shards)]
        # A random projection of each tensor: a single number shows any difference.
        numbers = [float((tensor * torch.randn_like(tensor.cpu()).to(tensor)).sum()) for tensor in whole]
        sizes = [float(tensor.norm()) for tensor in whole]
        everywhere = comm.all_gather_object((numbers, sizes), self.group)
        return all(
            abs(mine - first) <= TOLERANCES[_computing] * max(size, 1e-12)
            for mine_of_all, _ in everywhere
            for mine, first, size in zip(mine_of_all, *everywhere[0])
        )

    def _run_together(self, run: Callable[[], _Result]) -> _Result | None:
        """Return the result of `run`, or None on every rank if it failed on any."""
        error = ""
        try:
            result = run()
        except Exception as failure:  # the user's code on an input it may not be made for
            result, error = None, str(failure) or type(failure).__name__
        line = next(iter(error.splitlines()), "")[:160]
        # Exchanged in any case: a rank that failed must not leave the other ranks in their next run.
        found = comm.all_gather_object((result is not None, bool(_ABOUT_PRECISION.search(error)), line), self.group)
        self._lacks_precision = any(is_about for _, is_about, _ in found)
        self.failure = next((line for is_there, _, line in found if not is_there), self.failure)
        return result if all(is_there for is_there, *_ in found) else None


@dataclass(frozen=True)
class BlockCall:
    """How a model calls one of its blocks.

    Attributes:
        args: The positional arguments, with tensors of any values.
        kwargs: The arguments by name.
        hidden: The tensor among them that holds the hidden states.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor

    def __call__(self, block: nn.Module, hidden: Tensor) -> Any:
        """Call `block` in the same way with other hidden states."""

        def adapted(leaf: Any) -> Any:
            if leaf is self.hidden:
                return hidden
            if not isinstance(leaf, Tensor):
                return copy.deepcopy(leaf)  # a cache, which a call fills
            return leaf.to(hidden.device, hidden.dtype if leaf.is_floating_point() else leaf.dtype, copy=True)

        args, kwargs = pytree.tree_map(adapted, (self.args, self.kwargs))
        return block(*args, **kwargs)


@dataclass(frozen=True)
class _TrialInput:
    hidden: Tensor
    call: Callable[[nn.Module, Tensor], Any]


def _trial_inputs(block: nn.Module, call: BlockCall | None) -> Iterator[_TrialInput]:
    if call is not None:
        for x in inputs_of(call):
            yield _TrialInput(x, call)
    for x in possible_inputs(block):
        yield _TrialInput(x, lambda module, hidden: module(hidden))


def inputs_of(call: BlockCall) -> Iterator[Tensor]:
    """Yield random hidden states for a block that is called by `call`."""
    yield torch.randn(call.hidden.shape, dtype=torch.float64).to(_device(), _computing)


def possible_inputs(block: nn.Module) -> Iterator[Tensor]:
    """Yield random inputs (2, length, features) that `block` may be made for, the likeliest first."""
    sizes = [sizes_of(child)[0] for child in block.modules() if is_linear(child)]
    # Without a linear layer: the size that most weights have in common.
    weights = [parameter.shape for parameter in block.parameters() if parameter.dim() > 1]
    sizes = sizes or [size for shape in weights for size in reversed(shape)]
    # The first layer may read another size than most layers, such as the size of a projected input.
    features = list(dict.fromkeys([sizes[0], max(sizes, key=sizes.count)]))
    # Tables of positions fix the length of the sequence: the length of a window, or of an image.
    others = [child for child in block.modules() if not is_linear(child)]
    tables = [table for child in others for table in (*child.buffers(False), *child.parameters(False))]
    fixed = [size for table in tables for size in table.shape if table.dim() > 1 and 1 < size <= LONGEST]
    lengths = list(dict.fromkeys([INPUT_SHAPE[1], *fixed]))
    for length, size in islice(((length, size) for length in lengths for size in features), MOST_INPUTS):
        yield torch.randn(INPUT_SHAPE[0], length, size, dtype=torch.float64).to(_device(), _computing)


# Changed while a block is tried that cannot run in double precision.
_computing = torch.float64


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    global _computing
    before, _computing = _computing, dtype
    try:
        yield
    finally:
        _computing = before


def copy_in_double(block: nn.Module) -> nn.Module:
    """Return a copy of `block` in double precision, in evaluation and without dropout, on a device to compute on.

    A block that fails in double precision is copied in the precision of the trial, see `TOLERANCES`.
    """
    if any(parameter.is_meta for parameter in block.parameters()):
        block = _with_random_values(block)
    # Double precision tells rounding from a wrong plan; `eval` switches off dropout, which would differ.
    # Frozen parameters get gradients, too, so that all gradients can be compared.
    copied = copy_of(block).to(_device(), _computing).eval().requires_grad_(True)
    for module in copied.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0  # in training torch applies it where `DropoutOff` does not see it
    return copied


@contextmanager
def chance_kept() -> Iterator[None]:
    """Restore the global generators after the block: a trial must not move the generators of the run."""
    python, others = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices_in_use()):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(others)


def devices_in_use() -> list[int]:
    """Return the GPUs whose random state a trial changes; torch would take all GPUs, and warn if they are many."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def _device() -> torch.device:
    """Return a device on which the ranks can communicate: NCCL does not take tensors on the CPU."""
    on_gpu = torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _run_copy(block: nn.Module, x: _TrialInput) -> _Result:
    with DropoutOff():  # a function may be told to drop in evaluation as well
        return _run(copy_in_double(block), x)


def _run(block: nn.Module, x: _TrialInput) -> _Result:
    """Run forward and backward, from a random weighting of the outputs; the first outputs are the main one and dx.

    All outputs with a gradient take part, also a loss beside the main output, such as a router's.
    """
    hidden = x.hidden.clone().requires_grad_(True)
    # Numbers that a block draws for full samples, also in evaluation, are the same in both copies.
    seed_torch(0)
    random.seed(0)
    numpy.random.seed(0)
    outputs = [leaf for leaf in pytree.tree_leaves(x.call(block, hidden)) if isinstance(leaf, Tensor)]
    floating = [leaf for leaf in outputs if leaf.is_floating_point()]
    # The same weights in every run, so that gradients can be compared.
    generator = torch.Generator().manual_seed(1)
    main = floating[0]
    torch.stack(
        [_weighted(leaf, generator) for leaf in floating if leaf is main or leaf.requires_grad]
    ).sum().backward()
    if hidden.grad is None:
        raise ValueError("the output of the block does not depend on its input")
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    others = [leaf.detach().to(torch.float64) for leaf in outputs if leaf is not main]
    return [main.detach(), hidden.grad, *others], {**gradients}


def _weighted(output: Tensor, generator: torch.Generator) -> Tensor:
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return (output * weights.to(output)).sum().double()


def _run_without_chance(block: nn.Module, x: _TrialInput) -> _Result:
    """Run a block in training without its dropout.

    Raises:
        ValueError: If it draws other random numbers, because a sharded block would draw different ones.
    """
    with DropoutOff():
        before = torch.get_rng_state(), torch.cuda.get_rng_state() if x.hidden.is_cuda else torch.empty(0)
        result = _run(block, x)
        after = torch.get_rng_state(), torch.cuda.get_rng_state() if x.hidden.is_cuda else torch.empty(0)
    if not all(map(torch.equal, before, after)):
        raise ValueError("the block draws random numbers")
    return result


def _run_with_chance(block: nn.Module, x: _TrialInput) -> _Result:
    """Run a block in training with its dropout.

    Raises:
        ValueError: If it draws no random numbers.
    """
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if x.hidden.is_cuda else torch.empty(0)
    result = _run(copy_in_double(block).train(), x)
    after = torch.get_rng_state(), torch.cuda.get_rng_state() if x.hidden.is_cuda else torch.empty(0)
    if all(map(torch.equal, before, after)):
        raise ValueError("the block draws no random numbers")
    return result


class DropoutOff(TorchFunctionMode):
    """Makes dropout return its input, in functions and modules of torch: ranks draw different numbers in a region.

    Attributes:
        found: Whether any dropout was active.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUTS or func is _ATTENTION or func is F.multi_head_attention_forward:
            return self._without(func, func, args, dict(kwargs or {}))
        # Called from this frame: `whole_gradients` looks for the caller behind frames with this function's name.
        return func(*args, **(kwargs or {}))

    def replace_functions(self, patches: Patches) -> None:
        """Do the same where no mode is active: during backward, in which activation checkpoints compute again."""

        def without(func: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            return lambda own: lambda *args, **kwargs: self._without(func, own, args, kwargs)

        for func in (*_DROPOUTS, F.multi_head_attention_forward):
            if isinstance(func, FunctionType):
                patches.replace_function(func, without(func))
        patches.replace(F, "scaled_dot_product_attention", without(_ATTENTION)(_ATTENTION))

    def _without(self, func: Any, own: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `own`, which is or was `func`, without dropout."""
        if func in _DROPOUTS:
            # `F.dropout` names it `training`, `torch.dropout` names it `train`.
            training = kwargs.get("training", args[2] if len(args) > 2 else kwargs.get("train", True))
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            self.found |= bool(training) and p > 0
            return args[0] if args else kwargs["input"]
        if func is _ATTENTION:
            self.found |= (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])  # `is_causal` follows
            else:
                kwargs["dropout_p"] = 0.0
        elif func is F.multi_head_attention_forward:
            # Called by position up to `dropout_p`, the eleventh.
            self.found |= args[10] > 0 and kwargs.get("training", True)
            args = (*args[:10], 0.0, *args[11:])
        return own(*args, **kwargs)


_ATTENTION = F.scaled_dot_product_attention
_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.alpha_dropout,
    torch.feature_alpha_dropout,
}


def _close(found: Tensor, expected: Tensor, floor: float = 0.0) -> bool:
    """Compare within the tolerance, relative to the largest expected value or to `floor` if that is larger."""
    if found.shape != expected.shape or not found.numel():
        return found.shape == expected.shape
    scale = max(float(expected.abs().max()), floor, 1e-12)
    return bool((found.double() - expected.double()).abs().max() <= TOLERANCES[_computing] * scale)


def _with_random_values(block: nn.Module) -> nn.Module:
    """Return a copy on the CPU of a block on the meta device, with random values."""
    block = copy_of(block).to_empty(device="cpu")
    with torch.random.fork_rng(), torch.no_grad():
        seed_torch(0)
        for tensor in [*block.parameters(), *block.buffers()]:
            tensor.copy_(random_values(tensor.shape, tensor.dtype, "cpu", 0.1))
    return block
