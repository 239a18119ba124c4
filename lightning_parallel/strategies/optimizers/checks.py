"""Optimizers over a mesh: parameter groups of the full model, and a test for optimizers that can be divided.

A rank has shards of tensors, or the tensors of some stages. An optimizer that treats each element separately steps
there as on one process. An optimizer that takes norms, factors or projections over several parts does not. The classes
of torch are known by name. The name of a user's class proves nothing. So fresh optimizers of the same class and options
train a small problem whose gradient does not couple elements, once in one piece and once in several pieces.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.checkpoint import remove_dummy_parameters
from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState, Patches, is_users
from lightning_parallel.compat.torch import seed_torch
from lightning_parallel.optim import TrustRatioOptimizer
from lightning_parallel.strategies.hooks.views import FullViews
from lightning_parallel.strategies.optimizers.dummies import DummyPositions, take_parts
from lightning_parallel.strategies.optimizers.norms import ShardNorms
from lightning_parallel.tensor.sharding import Shard

__all__ = [
    "Needs",
    "WholeGroups",
    "check_flattened",
    "check_optimizers",
    "check_sliced",
    "steps_in_turns",
]


class Needs(IntEnum):
    """What the step of an optimizer needs on this rank to equal one process."""

    PARTS = 0
    """The parts of tensors: the optimizer treats each element by itself."""
    TENSOR = 1
    """Whole tensors, each on one rank, one after another: the optimizer keeps nothing but the state of each tensor."""
    TENSORS = 2
    """Whole tensors, each on one rank: the optimizer treats each tensor by itself, but counts its steps."""
    MODEL = 3
    """All tensors of the rank in full at once."""


class WholeGroups:
    """Shows the full model to code that groups parameters, and records the groups that one process would have.

    Args:
        module: The user's module, of which this rank holds a part.
        group: The pipeline group.

    Attributes:
        recorded: Names in the parameter groups over all stages, by optimizer.
        kept: Parts that optimizers keep in their attributes, each with the rule and the group of the full tensor.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._module = module
        self._group = group
        self.recorded: dict[Optimizer, list[list[str]]] = {}
        self.kept: list[tuple[Tensor, Shard, Group]] = []

    @contextmanager
    def built(self, optimizers: Callable[[], Sequence[Optimizer]], views: FullViews) -> Iterator[None]:
        """Show all parameters in full inside the block, and leave this rank's parts to the optimizers of the block.

        Args:
            optimizers: Returns the optimizers that the block has made.
            views: Shows the parameters.
        """
        dummies = {parameter: name for name, parameter in views.remote.items()}
        with views.shown():
            yield
            found = optimizers()
            # Before the removal, while the groups still show the place of each dummy.
            positions = DummyPositions(self._module, dummies, found)
            self._record(found, dummies)
        self.kept = take_parts(self._module, dummies, found, positions)

    @contextmanager
    def _changed(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Show all parameters in full to code that adds parameter groups inside the block."""
        watch = ParallelState.of(self._module).watch
        if watch is None:
            yield
            return
        with watch.views.shown():
            yield
            self._record(optimizers, {parameter: name for name, parameter in watch.views.remote.items()})

    def _record(self, optimizers: Sequence[Optimizer], dummies: Mapping[nn.Parameter, str]) -> None:
        if self._group.size > 1:
            self.recorded = {each: remove_dummy_parameters(each, dummies, self._module) for each in optimizers}

    def follow(self, trainer: Trainer, patches: Patches) -> None:
        """Let Lightning's finetuning callbacks add equal groups on all stages, until `patches` are undone."""
        for callback in finetuning_callbacks(trainer):
            own = callback.on_train_epoch_start

            # The default argument binds `own`, which changes with the loop.
            def hook(trainer: Trainer, module: LightningModule, own: Callable[..., None] = own) -> None:
                with self._changed(trainer.optimizers):
                    own(trainer, module)

            patches.replace(callback, "on_train_epoch_start", hook)

    def restore(self, trainer: Trainer) -> None:
        """Add the groups that finetuning callbacks had added before the checkpoint was saved."""
        found = finetuning_callbacks(trainer)
        if not found:
            return
        with self._changed(trainer.optimizers):
            for callback in found:
                # Lightning calls this hook before it restores callbacks, if it restores them after `setup`.
                callback.on_fit_start(trainer, trainer.lightning_module)


def finetuning_callbacks(trainer: Trainer) -> list[BaseFinetuning]:
    """Return the callbacks that add parameter groups while a model trains."""
    return [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------- known optimizers

# Classes of torch by the input of the update of one element: the element itself, or its tensor. `SparseAdam` is in
# neither set: it takes only sparse gradients, which no reducer divides. Options (`foreach`, `fused`, `capturable`, ...)
# choose a kernel, never another formula.
ELEMENTWISE_OPTIMIZERS = {
    *("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop"),
}
TENSORWISE_OPTIMIZERS = {"Adafactor", "Muon"}

# Some optimizers factor or project only matrices with 128 rows or more; some take matrices only.
_SIZE = 160
_SHAPES = [(_SIZE, _SIZE), (_SIZE, _SIZE)]
# Enough steps to show an effect of norms or distances, which may be absent in the first step.
_STEPS = 12
# Number of the loss evaluation at which trials are first compared; the first two belong to the start.
_EARLY = 3
# Relative to the largest update. An optimizer may keep its state in single precision.
_TOLERANCE = 1e-4
_PLAIN = (bool, int, float, str, tuple, list, type(None), type)

Split = Callable[[list[Tensor]], list[list[Tensor]]]


class _GroupDivision(NamedTuple):
    """A way to divide the tensors of a parameter group, and the errors about an optimizer that it changes.

    Attributes:
        splits: Divide the tensors of a trial in the same way.
        keeps_tensors: Whether each tensor stays in one piece.
        coupled: Ends the error about an optimizer whose update needs more than one piece.
        untried: Ends the error about an optimizer without a trial; None if a warning is enough.
        unmerged: Ends the error about state that cannot be merged into a checkpoint; None if no state is merged.
        trusted: The package whose optimizers need no trial to succeed.
        may_show: Whether an optimizer may see full tensors, if its update needs more than one piece.
    """

    splits: Sequence[Split]
    keeps_tensors: bool
    coupled: str
    untried: str | None = None
    unmerged: str | None = None
    trusted: str = ""
    may_show: bool = False


def check_optimizers(
    optimizers: Sequence[Optimizer],
    names: Mapping[int, str],
    rules: Mapping[str, Shard],
    is_cut: bool,
    world: Group,
    may_show: bool = True,
) -> dict[Optimizer, Needs]:
    """Refuse optimizers whose updates would differ from one process.

    Args:
        optimizers: The optimizers of this rank's parameters.
        names: Name of each parameter, by `id`.
        rules: How parameters are sharded, by name.
        is_cut: Whether each pipeline stage holds only some of the parameters.
        world: All ranks; every rank must call this function.
        may_show: Whether the step of an optimizer can see full tensors.

    Returns:
        The tensors that each optimizer must see in its step.

    Raises:
        ValueError: On every rank, with the optimizer and one of its parameters.
    """

    def sharded(group: Mapping[str, Any]) -> _GroupDivision | None:
        found = [name for name in (names.get(id(value), "") for value in group["params"]) if name in rules]
        if not found:
            return None
        replicate = "keep them replicated with `tensor_plan={'...': 'replicate'}`"
        return _GroupDivision(
            (_row_halves, _column_halves),
            keeps_tensors=False,
            coupled=(
                f"computes with full tensors, but `{found[0]}` and {len(found) - 1} other parameters are sharded over"
                " tensor-parallel ranks. Use an optimizer that updates each"
                f" {'tensor by itself (AdamW, Muon, Adafactor, LAMB, ...)' if may_show else 'element by itself (SGD)'},"
                f" or {replicate} [LP017]"
            ),
            unmerged=(
                f"So the parts of `{found[0]}` and other parameters on other ranks cannot be merged into a checkpoint."
                f" Use another optimizer for them, or {replicate}"
            ),
            may_show=may_show,
        )

    staged = _GroupDivision(
        (_single_tensors,),
        keeps_tensors=True,
        coupled=(
            "computes with all parameters at once, but they are on several pipeline stages. Use an optimizer that"
            " updates each parameter by itself (SGD, Adam, AdamW, ...)"
        ),
    )
    # A stage without sharded parameters refuses no optimizer, and would wait for stages that raise.
    with comm.failing_together(world):
        needs = _check(optimizers, sharded)
        if is_cut:
            _check(optimizers, lambda group: staged)
    return needs


def check_flattened(optimizers: Sequence[Any], flattener: str) -> None:
    """Refuse optimizers that need full tensors where each rank has a part of all parameters in one vector.

    Raises:
        ValueError: On every rank alike: all ranks have the same options.
    """
    flattened = _GroupDivision(
        (_row_halves, _column_halves),
        keeps_tensors=False,
        coupled=(
            f"computes with full tensors, but {flattener} flattens parameters and gives each rank a part. Use an"
            " elementwise optimizer (SGD, Adam, AdamW, ...), DDP, or `lightning_parallel.LARS` or `LAMB` under a"
            " tensor- or pipeline-parallel strategy or FSDP2 (`CompressedModelParallelStrategy`) [LP017]"
        ),
        # DeepSpeed made its optimizers for flat vectors. Some take only half precision, which no trial has.
        trusted="deepspeed",
    )
    _check(optimizers, lambda group: flattened)


def check_sliced(optimizers: Sequence[Optimizer], replicas: int, may_show: bool = False) -> dict[Optimizer, Needs]:
    """Refuse optimizers whose updates would differ with slices of parameters (`zero_stage`).

    Args:
        optimizers: The optimizers.
        replicas: The number of replicas.
        may_show: Whether the step of an optimizer can see full tensors.

    Returns:
        The tensors that each optimizer must see in its step.

    Raises:
        ValueError: On every rank alike: all ranks have the same optimizers.
    """
    way_out = (
        "Use an optimizer that updates each tensor by itself (AdamW, Muon, Adafactor, LAMB, ..., also fused), or"
        " `zero_stage=0`"
    )
    sliced = _GroupDivision(
        # Halves first: products of a slice with itself would be far larger than the tensor.
        (_row_halves, _column_halves, _slices),
        keeps_tensors=False,
        coupled=(
            f"computes with full tensors, but with `zero_stage` each of {replicas} replicas updates a slice of every"
            f" parameter. {way_out} [LP017]"
        ),
        untried=f"It may not support updates of a slice of each parameter (1 of {replicas}). {way_out}",
        unmerged=f"So the slices of {replicas} replicas cannot be merged into a checkpoint. {way_out}",
        may_show=may_show,
    )
    needs: dict[Optimizer, Needs] = {}
    for optimizer in optimizers:
        needs |= _check([optimizer], lambda group: sliced if group["params"] else None)
        is_elementwise = needs[optimizer] is Needs.PARTS and not _has_shard_norms(optimizer)
        kept = _kept_elsewhere(optimizer) if is_elementwise else ""
        if kept and may_show:
            needs[optimizer] = Needs.MODEL
        elif kept:
            raise ValueError(
                f"`{type(optimizer).__name__}` keeps tensors in `{kept}`, but with `zero_stage` each of {replicas}"
                " replicas updates a slice of every parameter. Keep tensors of a parameter in the optimizer's"
                f" `state`, which is sharded into slices as well. {way_out}"
            )
    return needs


def steps_in_turns(optimizer: Optimizer) -> bool:
    """Return whether the step of an elementwise optimizer may be called for some of its tensors after others.

    Some optimizers count their steps in a parameter group or an attribute, and some take norms over all tensors.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is kind:
        return kind.__name__ in ELEMENTWISE_OPTIMIZERS | TENSORWISE_OPTIMIZERS
    if _has_shard_norms(optimizer) or _other_steps(optimizer) or _kept_elsewhere(optimizer):
        return False

    def takes_turns(group: Mapping[str, Any]) -> bool:
        with isolate_rng(include_cuda=torch.cuda.is_initialized()):
            try:
                values, targets = _drawn(_SHAPES, _trial_device(group))
                whole = _train(optimizer, group, values, targets)
                is_plain = whole[3] <= 2 * _STEPS and _steps_without_tensors(optimizer, group)
                return is_plain and _takes_turns(optimizer, group, values, targets, whole)
            # As in `_tried`.
            except Exception:
                return False

    tried = set[str]()
    return all(takes_turns(group) for group in optimizer.param_groups if _is_new(group, tried))


def _check(
    optimizers: Sequence[Any], division_of: Callable[[Mapping[str, Any]], _GroupDivision | None]
) -> dict[Optimizer, Needs]:
    """Refuse optimizers that a division changes.

    Args:
        optimizers: The optimizers.
        division_of: Returns how a parameter group is divided; None for a group in one piece.

    Returns:
        The tensors that each optimizer must see in its step.

    Raises:
        ValueError: With the optimizer.
    """
    needs = dict.fromkeys(optimizers, Needs.PARTS)
    for optimizer in optimizers:
        if _has_shard_norms(optimizer):
            continue
        tried = set[str]()
        for group in optimizer.param_groups:
            division = division_of(group)
            if division is not None and _is_new(group, tried):
                # One step updates all groups, so the group with the largest needs decides.
                needs[optimizer] = max(needs[optimizer], _needs_of(optimizer, group, division))
    return needs


def _needs_of(optimizer: Any, group: Mapping[str, Any], division: _GroupDivision) -> Needs:
    """Return the tensors that the step of an optimizer must see for one of its parameter groups.

    Raises:
        ValueError: If the step would not equal one process.
    """
    name = f"`{type(optimizer).__name__}`"
    known = _known(optimizer, division)
    if known is not None:
        return known
    trial = _tried(optimizer, group, division.splits)
    if division.may_show and trial.keeps_to_tensors and not _kept_elsewhere(optimizer):
        return Needs.TENSOR if trial.takes_turns else Needs.TENSORS
    found = Needs.PARTS
    # Without a trial, full tensors are right for any update; `_other_steps` run where none are shown.
    is_unproven = trial.is_same is None and division.untried is not None and not _other_steps(optimizer)
    if division.may_show and is_users(type(optimizer)) and (trial.is_same is False or is_unproven):
        found = Needs.MODEL
    elif trial.is_same is False:
        raise ValueError(f"{name} {division.coupled}")
    elif trial.is_same is None and division.untried is not None:
        raise ValueError(f"{_no_trial(optimizer)} {division.untried}")
    elif trial.is_same is None and type(optimizer).__module__.partition(".")[0] != division.trusted:
        _tell_untried(optimizer, division.keeps_tensors)
    if trial.odd_state is not None and division.unmerged is not None:
        raise ValueError(
            f"{name} keeps `{trial.odd_state}`, which has neither the parameter's shape nor one element."
            f" {division.unmerged}"
        )
    return found


def _has_shard_norms(optimizer: Any) -> bool:
    """Return whether the optimizer takes its norms over all parts of a parameter."""
    return isinstance(optimizer, TrustRatioOptimizer) and isinstance(optimizer.norms, ShardNorms)


def _known(optimizer: Any, division: _GroupDivision) -> Needs | None:
    """Return the needs of a known class; None if a trial has to tell.

    Raises:
        ValueError: If the division changes the updates of the class.
    """
    kind = type(optimizer)
    # A subclass may override the step, so a name of torch counts only for the class of torch.
    if getattr(torch.optim, kind.__name__, None) is kind:
        if kind.__name__ in ELEMENTWISE_OPTIMIZERS or (
            division.keeps_tensors and kind.__name__ in TENSORWISE_OPTIMIZERS
        ):
            return Needs.PARTS
        if division.may_show and kind.__name__ in TENSORWISE_OPTIMIZERS:
            return Needs.TENSOR
    is_whole = division.keeps_tensors or division.may_show
    refused = {"LBFGS"} if is_whole else {"LBFGS", *TENSORWISE_OPTIMIZERS}
    # Compare the names of the bases, which include subclasses and implementations outside torch. No trial follows: the
    # first step of an LBFGS imports torch's compiler.
    if any(base.__name__ in refused for base in kind.__mro__):
        raise ValueError(f"`{kind.__name__}` {division.coupled}")
    return None


def _kept_elsewhere(optimizer: Optimizer) -> str:
    """Return the attribute in which an optimizer holds tensors besides parameters and their state; empty if none."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # Groups and state are divided with the parameters. Other objects may refer to each other, so visit each once.
    seen = {id(optimizer.param_groups), id(optimizer.state), id(optimizer.defaults)}

    def finds(value: Any) -> bool:
        if isinstance(value, Tensor):
            # A tensor of one element is a count or a rate. Every slice can use it.
            return value.numel() > 1 and id(value) not in known
        if isinstance(value, (str, bytes, bool, int, float, type(None), type)) or id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, Mapping):
            return any(finds(each) for each in value.values())
        if isinstance(value, (list, tuple, set, deque)):
            return any(finds(each) for each in value)
        is_holder = isinstance(value, Optimizer) or is_users(type(value))
        return is_holder and any(finds(each) for each in getattr(value, "__dict__", {}).values())

    if not is_users(type(optimizer)):
        return ""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params" and finds(value):
                return key
    return next((name for name, value in vars(optimizer).items() if finds(value)), "")


def _is_new(group: Mapping[str, Any], tried: set[str]) -> bool:
    """Return whether a parameter group differs in more than its learning rate from the groups `tried`, and add it."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr", "initial_lr")}
    if not all(isinstance(value, _PLAIN) for value in options.values()):
        return True
    # A user may make a group for each parameter, and each trial takes a twentieth of a second.
    kind = f"{sorted({str(parameter.device) for parameter in group['params']})} {sorted(options.items())}"
    is_new = kind not in tried
    tried.add(kind)
    return is_new


def _no_trial(optimizer: Optimizer) -> str:
    return (
        f"`{type(optimizer).__name__}` could not be tried on a small problem, because its constructor cannot create"
        " another instance."
    )


def _tell_untried(optimizer: Optimizer, keeps_tensors: bool) -> None:
    """Warn about an optimizer that no trial judges; refuse such an optimizer with several steps.

    Raises:
        ValueError: On every rank alike, or within `failing_together`, for steps as of a SAM, which take a norm of all
            gradients.
    """
    text = _no_trial(optimizer)
    elements = "single elements, not with norms or products of full tensors"
    expected = "each parameter by itself" if keeps_tensors else elements
    if others := [method.__name__ for method in _other_steps(optimizer)]:
        raise ValueError(
            f"{text} The optimizer must compute with {expected}; got further steps ({', '.join(others)}), as in SAM."
            " Give it a constructor that takes `(params, lr=..., ...)`. Each argument must stay an option of its"
            " groups or an attribute of that name. Otherwise use an optimizer of torch, or replicas only"
        )
    rank_zero_warn(
        f"{text} Make sure that it computes with {expected}; otherwise training differs from a single-process run"
    )


# --------------------------------------------------------------------------------------------------------------- trials


def _row_halves(tensors: list[Tensor]) -> list[list[Tensor]]:
    matrix, *others = tensors
    return [[matrix[: _SIZE // 2], *others], [matrix[_SIZE // 2 :], *others]]


def _column_halves(tensors: list[Tensor]) -> list[list[Tensor]]:
    matrix, *others = tensors
    return [[matrix[:, : _SIZE // 2], *others], [matrix[:, _SIZE // 2 :], *others]]


def _single_tensors(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[tensor] for tensor in tensors]


def _slices(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Cut tensors like `ParameterSlices`, and also into few elements: some optimizers depend on the tensor's size."""
    flat = [(tensor.reshape(-1), (-1, *[1] * (tensor.dim() - 1))) for tensor in tensors]
    bounds = [0, 2, _SIZE // 2 - 1]  # not between rows
    return [
        [one[start:stop].view(shape) for one, shape in flat] for start, stop in zip(bounds, [*bounds[1:], _SIZE**2])
    ]


_Trained = tuple[list[Tensor], list[Tensor], Optimizer, int]
"""Early values, the final values, the fresh optimizer, and the number of evaluations of the closure."""


class _Trial(NamedTuple):
    """The result of a trial.

    Attributes:
        is_same: Whether pieces train as in one problem; None if no fresh optimizer can be made or stepped.
        odd_state: Name of a state tensor that is neither a scalar nor in the shape of its parameter.
        keeps_to_tensors: Whether only whole tensors, each by itself, train as in one problem.
        takes_turns: Whether one optimizer may step on one tensor after another.
    """

    is_same: bool | None
    odd_state: str | None = None
    keeps_to_tensors: bool = False
    takes_turns: bool = False


def _tried(optimizer: Optimizer, group: Mapping[str, Any], splits: Sequence[Split]) -> _Trial:
    """Train a small problem with fresh optimizers of the same class and options: in one piece, and in pieces.

    Args:
        optimizer: The user's optimizer, which is only read.
        group: A parameter group of the optimizer.
        splits: Cut the tensors of the problem into pieces.
    """
    odd_state = None
    # The trial seeds generators and draws numbers; the user's generators must keep their state.
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # else a run on the CPU would set up CUDA
        try:
            values, targets = _drawn(_SHAPES, _trial_device(group))
            # The reference, with all tensors in one optimizer.
            whole = _train(optimizer, group, values, targets)
            early, late, fresh, evaluations = whole
            odd_state = _odd_state(fresh)

            def agrees(split: Split) -> bool:
                return _agrees(optimizer, group, values, targets, (early, late), split)

            is_same = all(map(agrees, splits))
            is_whole = not is_same or odd_state is not None
            # Owners run the closure once, before they get their tensors, and no further steps as of a SAM.
            is_plain = evaluations <= 2 * _STEPS and not _other_steps(optimizer) and not _kept_elsewhere(fresh)
            owns = is_whole and is_plain and agrees(_single_tensors) and _steps_without_tensors(optimizer, group)
            if not owns:
                return _Trial(is_same, odd_state)
            return _Trial(is_same, odd_state, True, _takes_turns(optimizer, group, values, targets, whole))
        # The class of the user may raise anything, and a failed trial must not end the run.
        except Exception:
            return _Trial(None, odd_state)


def _takes_turns(
    optimizer: Optimizer, group: Mapping[str, Any], values: list[Tensor], targets: list[Tensor], whole: _Trained
) -> bool:
    """Return whether an optimizer that steps on one tensor after another ends as it did with all tensors."""
    _, late, fresh, evaluations = whole
    _, found, other, _ = _train(optimizer, group, values, targets, evaluations // _STEPS)
    return all(map(torch.equal, found, late)) and _options(other) == _options(fresh)


def _options(optimizer: Optimizer) -> list[Any]:
    """Return the options of all groups, among which some optimizers count their steps."""
    return [[value for key, value in group.items() if key != "params"] for group in optimizer.param_groups]


def _steps_without_tensors(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer steps without tensors, as on a rank that owns none of them."""
    fresh = _fresh(optimizer, group, [nn.Parameter(torch.zeros(_SHAPES[0]))])
    for made in fresh.param_groups:
        made["params"].clear()
    try:
        _step(fresh, lambda: torch.zeros(()))
    except Exception:
        return False  # such as for the device of the first tensor
    return True


def _step(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    """Take a step; some optimizers of users take no closure."""
    takes_closure = bool(inspect.signature(optimizer.step).parameters)
    optimizer.step(closure) if takes_closure else optimizer.step()  # type: ignore[arg-type]


def _odd_state(optimizer: Optimizer) -> str | None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                return key
    return None


def _trial_device(group: Mapping[str, Any]) -> torch.device:
    """Return the device for the trial of an optimizer: the device of its parameters, or the host without data."""
    device: torch.device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _drawn(shapes: Sequence[tuple[int, ...]], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters and their targets, equal in each call."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        # Parts have different magnitudes, so that the norm of a part differs from the norm of all parts.
        for tensor in tensors:
            tensor[: _SIZE // 2].mul_(4.0)
            if tensor.dim() > 1:
                tensor[:, : _SIZE // 4].mul_(3.0)
        tensors[-1].mul_(5.0)
        return [tensor.to(device) for tensor in tensors]

    return drawn(), drawn()


def _agrees(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: list[Tensor],
    targets: list[Tensor],
    trained: tuple[list[Tensor], list[Tensor]],
    split: Split,
) -> bool:
    """Return whether the parts of a split, each trained alone, end like the tensors that trained together."""
    # The ascent step of a SAM is small compared with the norm of all gradients.
    tolerance = _TOLERANCE / 100 if _other_steps(optimizer) else _TOLERANCE
    starts = [start for part in split(values) for start in part]
    pieces = [_train(optimizer, group, part, aims)[:2] for part, aims in zip(split(values), split(targets))]
    compared = [
        (start, expected, found)
        for stop, tensors in enumerate(trained)
        for start, expected, found in zip(
            starts,
            [tensor for part in split(tensors) for tensor in part],
            [tensor for piece in pieces for tensor in piece[stop]],
        )
    ]
    for start, expected, found in compared:
        largest = (expected - start).abs().max()
        # A comparison with NaN is False: NaN is a fault of the problem, not of the split.
        if bool((expected - found).abs().max() > tolerance * largest):
            return False
    return True


def _train(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    targets: Sequence[Tensor],
    in_turns: int = 0,
) -> _Trained:
    """Train `values` towards `targets`.

    Args:
        optimizer, group: See `_tried`.
        values, targets: The tensors.
        in_turns: Evaluations of the closure, after which each step is called for one tensor after another; 0 calls the
            step once, and lets it evaluate the closure.

    Returns:
        The result, see `_Trained`.
    """
    seed_torch(0)
    # Clones: splits are views of `values`, which the next trial needs again.
    parameters = [nn.Parameter(value.clone()) for value in values]
    # Curvatures differ: with equal curvatures, one step could reach the target under any estimate.
    curvatures = [1.0 + torch.sigmoid(target) for target in targets]
    fresh = _fresh(optimizer, group, parameters)
    seen: list[list[Tensor]] = []

    def closure() -> Tensor:
        # The loss is separable: the gradient of an element depends only on the element, for every split.
        # An optimizer with many evaluations in a step, such as LBFGS, reaches the target in one step on any path, so
        # compare early values, too.
        seen.append([parameter.detach().clone() for parameter in parameters] if len(seen) == _EARLY else [])
        loss = torch.zeros((), dtype=torch.float64, device=values[0].device)
        for parameter, target, curvature in zip(parameters, targets, curvatures):
            distance = parameter.detach() - target
            # Signs change, since some optimizers count the elements that keep the direction of their momentum.
            parameter.grad = curvature * distance + 3.0 * target * torch.cos((len(seen) - 1) * target)
            loss = loss + (curvature * distance.square()).sum() / 2
        return loss

    others = _other_steps(fresh)
    for _ in range(_STEPS):
        for other in others:
            closure()
            other()
        closure()  # some optimizers ignore the closure in `step`
        for _ in range(in_turns - 1):
            closure()
        for parameter in parameters if in_turns else ():
            fresh.param_groups[0]["params"][:] = [parameter]
            _step(fresh, lambda: torch.zeros(()))
        if not in_turns:
            _step(fresh, closure)
    return seen[_EARLY], [parameter.detach() for parameter in parameters], fresh, len(seen)


def _other_steps(optimizer: Optimizer) -> list[Callable[[], Any]]:
    """Return further steps of an optimizer, in order, such as `first_step` and `second_step` of a SAM."""
    own = [kind for kind in reversed(type(optimizer).__mro__) if is_users(kind)]
    names = dict.fromkeys(name for kind in own for name in vars(kind) if name.endswith("_step") and name[0] != "_")
    found: list[Callable[[], Any]] = []
    for name in names:
        method = getattr(optimizer, name)
        if not inspect.ismethod(method):
            continue
        needed = [each for each in inspect.signature(method).parameters.values() if each.default is each.empty]
        if all(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in needed):
            found.append(method)
    return found


def _fresh(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Make an optimizer of the same class and options for other parameters.

    Raises:
        Exception: Whatever its constructor raises.
    """
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    # A scheduler with warmup may have set the learning rate to zero, with which no trial changes a value.
    rate = float(options["lr"]) if "lr" in options else None
    if rate is not None:
        options["lr"] = rate if rate > 0 and math.isfinite(rate) else float(optimizer.defaults.get("lr") or 1e-2)
    taken = inspect.signature(type(optimizer).__init__).parameters
    known = {**vars(optimizer), **optimizer.defaults, **options}
    arguments = {name: known[name] for name in list(taken)[2:] if name in known and isinstance(known[name], _PLAIN)}
    kind = type(optimizer)
    inner = next((each for each in vars(optimizer).values() if isinstance(each, Optimizer)), None)
    groups = [{**options, "params": parameters}]
    try:
        fresh = kind(groups, **arguments)
    except Exception:
        if inner is None or inner is optimizer:
            fresh = kind(parameters, **arguments)
        else:
            fresh = _fresh_around(kind, inner, group, parameters, arguments)
    # A constructor that took the parameters alone has given the group its defaults.
    for made in fresh.param_groups:
        made.update(options)
    return fresh


def _fresh_around(
    kind: Callable[..., Any],
    inner: Optimizer,
    group: Mapping[str, Any],
    parameters: list[nn.Parameter],
    arguments: dict[str, Any],
) -> Any:
    """Make an optimizer whose constructor takes another optimizer or its class, such as Lookahead or SAM."""
    try:
        return kind(_fresh(inner, group, parameters), **arguments)
    except Exception:
        return kind(parameters, type(inner), **arguments)
