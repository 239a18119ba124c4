"""Is a plan for one block right? Run a divided copy beside the original, on the real ranks, and compare."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.tensor import heads
from lightning_parallel.tensor.conversion import is_linear
from lightning_parallel.tensor.plan import Plan, apply_plan
from lightning_parallel.tensor.sharding import reduce_partial_

__all__ = ["Trials"]

TOLERANCE = 1e-6  # of the largest value; blocks that compute in single precision inside stay below it
SMALL = 1e-4  # a gradient this far below the largest one is compared as if it were this large
SHAPE = (2, 6)  # samples and positions of the trial's input

_Result = tuple[list[Tensor], dict[str, Tensor]]


class Trials:
    """Trials of plans on the ranks of `group`; blocks of equal structure are tried once.

    The copies compute in double precision, without dropout, on a random input of shape (2, 6, features). The
    generator of the process and the original block are left as they were.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._known: dict[object, Plan | None] = {}
        self._refused: set[object] = set()
        self._verdicts: dict[object, bool | None] = {}

    def first(self, block: nn.Module, given: Plan, candidates: Iterable[Plan]) -> Plan | None:
        """The first candidate that, beside what is `given`, leaves the results of `block` as they are; or None."""
        candidates = list(candidates)
        kind = (type(block), tuple(candidates[0].styles) if candidates else ())
        key = (_structure(block), repr(given.styles), repr([(plan.styles, plan.edits) for plan in candidates]))
        if key not in self._known:
            self._known[key] = None if kind in self._refused else self._try_all(block, given, candidates)
        if self._known[key] is None:
            self._refused.add(kind)  # blocks of one kind may feed each other: what fails in one is right in none
        return self._known[key]

    def confirms(self, block: nn.Module, plan: Plan) -> bool | None:
        """Whether `plan` leaves the results of `block` as they are; None if the block cannot be run by itself."""
        key = (_structure(block), repr(plan.styles), repr(plan.edits))
        if key not in self._verdicts:
            runs = self.first(block, Plan(), [Plan()]) is not None
            self._verdicts[key] = (self._try_all(block, Plan(), [plan]) is not None) if runs else None
        return self._verdicts[key]

    def _try_all(self, block: nn.Module, given: Plan, candidates: list[Plan]) -> Plan | None:
        if any(parameter.is_meta for parameter in block.parameters()):
            block = _materialized(block)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            features = heads.sizes_of(next(child for child in block.modules() if is_linear(child)))[0]
            x = torch.randn(*SHAPE, features, dtype=torch.float64).to(_device())
            expected = self._together(lambda: _run(_copy(block), x))
            if expected is None:
                return None
            for plan in candidates:
                both = Plan({**given.styles, **plan.styles}, {**given.edits, **plan.edits}, stretches=plan.stretches)
                if self._agrees(block, both, x, expected):
                    return plan
        return None

    def _agrees(self, block: nn.Module, plan: Plan, x: Tensor, expected: _Result) -> bool:
        try:
            divided = _copy(block)
            sharding = apply_plan(divided, plan, self.group)
        except ValueError:  # raised on every rank
            return False
        with comm.dry_run():  # wrong shapes show here, before a rank could be left waiting in a collective
            if self._together(lambda: _run(divided, x)) is None:
                return False
        divided.zero_grad()
        outputs, gradients = _run(divided, x)
        right = len(outputs) == len(expected[0]) and all(map(_close, outputs, expected[0]))
        reduce_partial_({name: gradients[name] for name in sorted(sharding.partial)}, sharding.shards, self.group)
        # Some gradients are zero but for rounding, such as that of a bias of attention keys.
        floor = SMALL * max((float(full.abs().max()) for full in expected[1].values() if full.numel()), default=0.0)
        for name, gradient in gradients.items():
            rule, full = sharding.shards.get(name), expected[1][name]
            right = right and _close(gradient, full if rule is None else rule.split(full, self.group.rank), floor)
        return all(comm.all_gather_object(right, self.group))

    def _together(self, run: object) -> _Result | None:
        """The result of `run`, or None on every rank if it failed on any."""
        try:
            result = run()  # type: ignore[operator]
        except Exception:
            result = None
        return result if all(comm.all_gather_object(result is not None, self.group)) else None


def _structure(block: nn.Module) -> tuple[object, ...]:
    parameters = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return (parameters, tuple((type(child), _settings(child)) for child in block.modules()))


# Attributes that number the layers of a model, and do not change what they do.
POSITIONS = {"layer_idx", "layer_id", "layer_number", "index", "idx"}


def _settings(module: nn.Module) -> tuple[object, ...]:
    """What the behaviour of a module may depend on beside its class."""
    return tuple(
        (name, getattr(value, "__code__", value))
        for name, value in sorted(vars(module).items())
        if name not in POSITIONS
        and (value is None or isinstance(value, (bool, int, float, str)) or hasattr(value, "__code__"))
    )


def _copy(block: nn.Module) -> nn.Module:
    return copy.deepcopy(block).to(_device(), torch.float64).eval().requires_grad_(True)


def _device() -> torch.device:
    """Where the ranks can communicate: NCCL knows no tensors on the CPU."""
    on_gpu = torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _run(block: nn.Module, x: Tensor) -> _Result:
    x = x.clone().requires_grad_(True)
    result = block(x)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    main = outputs[0]
    weights = torch.randn(main.shape, generator=generator, dtype=main.dtype).to(main.device)
    (main * weights).sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return [main.detach(), x.grad], {**gradients}


def _close(found: Tensor, expected: Tensor, floor: float = 0.0) -> bool:
    """Equal within the tolerance, relative to the largest expected value or to `floor` where that is larger."""
    if found.shape != expected.shape or not found.numel():
        return found.shape == expected.shape
    scale = max(float(expected.abs().max()), floor, 1e-12)
    return bool((found - expected).abs().max() <= TOLERANCE * scale)


def _materialized(block: nn.Module) -> nn.Module:
    """A copy of a block on `meta` with random values."""
    block = copy.deepcopy(block).to_empty(device="cpu")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for tensor in [*block.parameters(), *block.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(std=0.1)
            else:
                tensor.zero_()
    return block
