"""Verification before sharding: does a sharded block compute the same as the full one, on the real ranks?"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from types import FunctionType
from typing import Any, TypeVar

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches
from lightning_parallel.compat.chance import random_state_kept
from lightning_parallel.compat.torch import copy_of, pytree, random_values, seed_torch
from lightning_parallel.step_trace.record import call_signature
from lightning_parallel.tensor.inspection import is_linear, sizes_of, structure_of
from lightning_parallel.tensor.low_rank import layer_sizes, linear_layers
from lightning_parallel.tensor.pieces import Piece, part_along
from lightning_parallel.tensor.plan import Plan, apply_plan
from lightning_parallel.tensor.sharding import reduce_partial_

__all__ = ["BlockCall", "DropoutOff", "PlanVerifier", "Trial", "copy_in_double"]

# Of the largest value, by the precision of the trial; code that computes in single precision inside stays below the
# first.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 6e-2}
LARGE = 2**28  # parameters of a block whose copies in double precision would take too much memory
SMALL = 1e-4  # a gradient this far below the largest one is compared as if it were this large
LONGEST = 1024
_ABOUT_PRECISION = re.compile(r"dtype|float64|double|fp16|bf16|float16|half", re.IGNORECASE)
MOST_INPUTS = 6
INPUT_SHAPE = (2, 6)  # samples and positions of the input with which a block is run

V = TypeVar("V")
_Result = tuple[list[Tensor], dict[str, Tensor]]
"""Outputs and input gradient, and the gradients of the parameters by name."""


class PlanVerifier:
    """Compares sharded blocks with the original on the ranks of `group`; blocks of equal structure are run once.

    Both copies compute in double precision, without dropout, on random hidden states. The random state of the process
    and the original block are not changed. If the model is on the meta device, only the block is materialised, with
    random values.

    Args:
        group: The tensor-parallel group; all its ranks must call the methods in the same order.

    Attributes:
        failure: Why the last block that failed did not run, in a line; the same on all ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lacks_precision = False  # whether the last failure was about precision
        self.failure = ""
        self._known: dict[object, Any] = {}
        self._last: tuple[nn.Module, Trial, _Result | None] | None = None

    def once(self, key: object, find: Callable[[], V]) -> V:
        """Return the result of `find` for `key`; found once. Every rank must give equal keys in the same order."""
        if key not in self._known:
            with random_state_kept():
                # The ranks must draw the same numbers to find the same.
                seed_torch(0)
                self._known[key] = find()
        return self._known[key]

    def first_verified(
        self, block: nn.Module, given: Plan, candidates: Iterable[Plan], call: BlockCall | None = None
    ) -> Plan | None:
        """Return the first candidate that does not change the results of `block`; None if all change them.

        Args:
            block: The full module.
            given: A plan that is applied in addition to each candidate.
            candidates: Plans for the block, the likeliest first.
            call: How the model calls the block, if that is known; otherwise it is called with one tensor.
        """
        candidates = list(candidates)
        trial = self.trial(block, call)
        if trial is None or not candidates:
            return None
        described = [(plan.styles, plan.attributes, plan.sequence_regions) for plan in candidates]
        key = (structure_of(block), trial.call.signature, repr(given.styles), repr(described))
        return self.once(key, lambda: self._first_right(block, given, candidates, True, trial))

    def verify(self, block: nn.Module, plan: Plan, call: BlockCall | None = None) -> bool | None:
        """Return whether the results of `block` stay the same with `plan`; None if the block cannot run alone.

        Only the first output counts, and all gradients.

        Args:
            block: The full module.
            plan: How it is sharded.
            call: How the model calls the block, if that is known; otherwise it is called with one tensor.
        """
        trial = self.trial(block, call)
        if trial is None or self._expected(block, trial) is None:
            return None
        key = (structure_of(block), trial.call.signature, repr(plan.styles), repr(plan.attributes))
        return self.once(key, lambda: self._first_right(block, Plan(), [plan], False, trial) is not None)

    def is_quiet(self, block: nn.Module, call: BlockCall | None = None) -> bool:
        """Return whether `block` runs alone in training, and draws no random numbers there."""
        trial = self.trial(block, call) if any(map(is_linear, block.modules())) else None
        if trial is None:
            return False
        return self.once(
            ("quiet", structure_of(block), trial.call.signature),
            lambda: self._draws_nothing(block, trial),
        )

    def _draws_nothing(self, block: nn.Module, trial: Trial) -> bool:
        dropout = DropoutOff()
        with trial.precision():
            # It raises an error where the block draws without dropout. The layers of a large model would take minutes.
            run = self._run_together(lambda: _run_without_chance(copy_in_double(block, True).train(), trial, dropout))
        return run is not None and not any(comm.all_gather_object(dropout.found, self.group))

    def trial(self, block: nn.Module, call: BlockCall | None = None) -> Trial | None:
        """Return a call and a precision with which `block` runs alone; None if it runs with none."""
        key = (structure_of(block), None if call is None else call.signature)
        found, self.failure = self.once(key, lambda: (self._first_run(block, call), self.failure))
        return found

    def _first_run(self, block: nn.Module, call: BlockCall | None) -> Trial | None:
        # Some attention kernels only compute in half precision; a wrong plan differs by more than its rounding.
        is_large = sum(parameter.numel() for parameter in block.parameters()) > LARGE
        for dtype in [*TOLERANCES][is_large:]:
            for possible in [*([] if call is None else [call]), *_possible_calls(block)]:
                hidden = torch.randn(possible.hidden.shape, dtype=torch.float64)
                trial = Trial(possible, hidden.to(_device(), dtype), is_known=possible is call)
                with trial.precision():
                    if self._run_together(partial(_call_hollow, block, trial)) is not None:
                        return trial
                if self._lacks_precision:
                    break
            if not self._lacks_precision:
                break
        return None

    def _expected(self, block: nn.Module, trial: Trial) -> _Result | None:
        """Return the result of the full block; the last one is kept, because a plan for the block is tried next."""
        if self._last is None or self._last[0] is not block or self._last[1] is not trial:
            with trial.precision():
                self._last = block, trial, self._run_together(partial(_run_copy, block, trial))
        return self._last[2]

    def _first_right(
        self, block: nn.Module, given: Plan, candidates: list[Plan], all_outputs: bool, trial: Trial
    ) -> Plan | None:
        expected = self._expected(block, trial)
        if expected is None:
            return None
        block = _with_values(block)
        with trial.precision():
            dropout = DropoutOff()
            # A branch on `self.training` shows only there. None where the block itself draws random numbers.
            trained = self._run_together(lambda: _run_without_chance(copy_in_double(block).train(), trial, dropout))
            draws = any(comm.all_gather_object(dropout.found, self.group))
            for plan in candidates:
                both = Plan(
                    {**given.styles, **plan.styles},
                    {**given.attributes, **plan.attributes},
                    sequence_regions=plan.sequence_regions,
                )
                agrees = self._agrees(block, both, trial, expected, all_outputs, training=False)
                if agrees and trained is not None:
                    agrees = self._agrees(block, both, trial, trained, all_outputs, training=True)
                    agrees = agrees and (not draws or self._draws_alike(block, both, trial))
                if agrees:
                    return plan
        return None

    def _agrees(
        self, block: nn.Module, plan: Plan, x: Trial, expected: _Result, all_outputs: bool, training: bool
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
            with comm.skip_communication() as messages:
                alone = self._run_together(lambda: _run(copy_of(divided), x))
            full_outputs, full_gradients = expected
            if alone is None or [y.shape for y in alone[0]] != [y.shape for y in full_outputs]:
                return False
            # Code that chooses between positions, such as a router, sends other sizes on each rank if it has only some
            # positions. Where they are gathered it chooses alike, but not here, where gathered tensors have any values.
            if any(not region.gathered for region in plan.sequence_regions) and not self._is_equal(messages):
                return False
            if self.group.is_pretended:
                return True  # the shapes fit; only real ranks could compare values
            found = self._run_together(lambda: _run(divided, x))
        if found is None:
            return False
        outputs, gradients = found
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

    def _is_equal(self, value: object) -> bool:
        """Return whether all ranks have an equal value."""
        return len({repr(other) for other in comm.all_gather_object(value, self.group)}) == 1

    def _draws_alike(self, block: nn.Module, plan: Plan, x: Trial) -> bool:
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

    def _run_together(self, run: Callable[[], V]) -> V | None:
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
        args: The positional arguments, with tensors of any values; tensors of parameters require a gradient.
        kwargs: The arguments by name.
        hidden: The tensor among them that holds the hidden states.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor

    def __call__(self, block: nn.Module, hidden: Tensor, others: Mapping[int, Tensor] | None = None) -> Any:
        """Call `block` in the same way with other hidden states; also return the lists that it may have filled.

        Args:
            block: The module.
            hidden: The hidden states.
            others: Values for other arguments, by the `id` of the argument.
        """

        def adapted(leaf: Any) -> Any:
            if leaf is self.hidden:
                return hidden
            if others and id(leaf) in others:
                return others[id(leaf)]
            if not isinstance(leaf, Tensor):
                return copy.deepcopy(leaf)  # a cache, which a call fills
            return leaf.detach().to(hidden.device, hidden.dtype if leaf.is_floating_point() else leaf.dtype, copy=True)

        args, kwargs = pytree.tree_map(adapted, (self.args, self.kwargs))
        output = block(*args, **kwargs)
        filled = [given for given in (*args, *kwargs.values()) if type(given) is list and given]
        return [output, filled] if filled else output

    def named(self) -> list[tuple[str, Any]]:
        """Return the arguments by position or keyword."""
        return [*((str(at), value) for at, value in enumerate(self.args)), *self.kwargs.items()]

    @cached_property
    def signature(self) -> str:
        """See `call_signature`."""
        return call_signature(self.args, self.kwargs)


@dataclass(frozen=True)
class Trial:
    """One run of a block alone.

    Attributes:
        call: How the block is called.
        hidden: Random hidden states, in the precision of the run.
        is_known: Whether the model calls the block in this way; otherwise the call is a guess, with one tensor.
    """

    call: BlockCall
    hidden: Tensor
    is_known: bool

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Make `copy_in_double` copy in the precision of the run, which code may need instead of double precision."""
        global _computing
        before, _computing = _computing, self.hidden.dtype
        try:
            yield
        finally:
            _computing = before


# Changed while a block is tried that cannot run in double precision.
_computing = torch.float64


def _possible_calls(block: nn.Module) -> Iterator[BlockCall]:
    """Yield calls with one tensor (2, length, features) that `block` may be made for, the likeliest first."""
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
        hidden = torch.zeros(INPUT_SHAPE[0], length, size, dtype=torch.float64)
        yield BlockCall((hidden,), {}, hidden)


def copy_in_double(block: nn.Module, hollow: bool = False) -> nn.Module:
    """Return a copy of `block` in double precision, in evaluation and without dropout, on a device to compute on.

    A block that fails in double precision is copied in the precision of the trial, see `TOLERANCES`.

    Args:
        block: The full module.
        hollow: Whether its linear layers return random numbers; their weights then take no memory.
    """
    layers = linear_layers(block) if hollow else {}
    weights = [weight for layer in layers.values() for weight in layer.parameters()]
    # Already in the precision and on the device of the copy, because a conversion would allocate them.
    zero = torch.zeros((), dtype=_computing, device=_device())
    empty = {id(weight): nn.Parameter(zero.expand(weight.shape)) for weight in weights}
    # Double precision tells rounding from a wrong plan; `eval` switches off dropout, which would differ.
    # Frozen parameters get gradients, too, so that all gradients can be compared.
    copied = _with_values(block, empty).to(_device(), _computing).eval().requires_grad_(True)
    generator = torch.Generator(_device()).manual_seed(0)
    for path, layer in layers.items():
        answer: Any = partial(_random_output, layer_sizes(layer)[1], generator)
        copied.get_submodule(path).forward = answer
    for module in copied.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0  # in training torch applies it where `DropoutOff` does not see it
    return copied


def _random_output(features: int, generator: torch.Generator, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Not from the global generator: a block that draws is known by its draws from that one.
    drawn = torch.randn(*x.shape[:-1], features, dtype=x.dtype, device=x.device, generator=generator)
    return drawn + 0 * x[..., :1]  # backward reaches the input


def _with_values(block: nn.Module, known: Mapping[int, Tensor] | None = None) -> nn.Module:
    """Return a copy of `block` with random values for its tensors on the meta device.

    Args:
        block: The module.
        known: Other tensors for the copy, by the `id` of the tensors of `block`.
    """
    found: dict[int, Any] = {**(known or {})}
    with torch.random.fork_rng(devices_in_use()):
        seed_torch(0)
        for tensor in [*block.parameters(), *block.buffers()]:
            if tensor.is_meta and id(tensor) not in found:
                values = random_values(tensor.shape, tensor.dtype, _device(), 0.1)
                found[id(tensor)] = nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values
    return copy_of(block, found)


def devices_in_use() -> list[int]:
    """Return the GPUs whose random state a trial changes; torch would take all GPUs, and warn if they are many."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def _device() -> torch.device:
    """Return a device on which the ranks can communicate: NCCL does not take tensors on the CPU."""
    on_gpu = torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _call_hollow(block: nn.Module, x: Trial) -> bool:
    with DropoutOff():
        x.call(copy_in_double(block, hollow=True), x.hidden)
    return True


def _run_copy(block: nn.Module, x: Trial) -> _Result:
    with DropoutOff():  # a function may be told to drop in evaluation as well
        return _run(copy_in_double(block), x)


def _run(block: nn.Module, x: Trial) -> _Result:
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


def _run_without_chance(block: nn.Module, x: Trial, dropout: DropoutOff) -> _Result:
    """Run a block in training without its dropout.

    Raises:
        ValueError: If it draws other random numbers, because a sharded block would draw different ones.
    """
    with dropout:
        before = torch.get_rng_state(), torch.cuda.get_rng_state() if x.hidden.is_cuda else torch.empty(0)
        result = _run(block, x)
        after = torch.get_rng_state(), torch.cuda.get_rng_state() if x.hidden.is_cuda else torch.empty(0)
    if not all(map(torch.equal, before, after)):
        raise ValueError("the block draws random numbers")
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
    if isinstance(found, Piece):  # values of this rank's heads
        expected = part_along(expected, found.family.group, found.place, found.family.extents)
        found = found.part
    return bool((found.double() - expected.double()).abs().max() <= TOLERANCES[_computing] * scale)
