"""The proof: the user's own step, whole and as it is about to be run, before the first batch of a run.

    reference   the first rank runs the step on the first samples with the module as it was (see `reference`)
    divided     all ranks run it on the same samples as the run will: in shards and stages, in two microbatches
    compared    loss, gradients by name, logged values, outputs, attributes and buffers that changed

Both runs leave nothing behind: parameters, buffers, attributes, generators and gradients are put back.

Dropout is off in the first comparison, since the ranks draw other numbers in divided layers than one process does. With
dropout, a pipeline is compared once more, by the streams of its stages; of divided layers the ranks are compared with
each other. A step that draws numbers by itself runs as one microbatch, so that both runs draw the same.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import BatchNormalization, pytree
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.microbatch import split_batch as default_split
from lightning_parallel.pipeline.microbatch import (
    OwnGenerators,
    call_seed,
    num_samples,
    random_state_kept,
    seed_all,
    seed_torch,
    split_by,
    stage_seed,
    take_samples,
)
from lightning_parallel.pipeline.runtime import loss_of
from lightning_parallel.strategies.pipeline_steps import LogCall, PipelineSteps, log_recorded
from lightning_parallel.strategies.reference import Owners, Reference, Skeleton, run_reference
from lightning_parallel.tensor.plan import Sharding
from lightning_parallel.tensor.regions import RandomRegion
from lightning_parallel.tensor.sharding import Shard, reduce_partial_

__all__ = ["ProofError", "StepProof", "Verify"]

Verify = Literal["auto", "always", "off"]

_SAMPLES = 2
_SEED = 20_240_229

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the largest value, by the precision in which a step computes; what is less precise has `_HALF`."""
_HALF = 5e-2
_MIXED = 1e-5
"""In double precision with single precision somewhere inside, as in the norms of many transformers."""
_SMALL = 1e-4
"""A gradient this far below the largest one is compared as if it were this large: zero up to rounding."""

_COPY_BYTES = 1 << 30
"""Parameters up to this size are copied, so that a step that writes into them is undone."""


class ProofError(RuntimeError):
    """A step computes something else divided than on one process."""


# ----------------------------------------------------------------------------------------- what a step leaves


@dataclass
class StepEffects:
    """What one run of a step gave.

    Attributes:
        loss: None where it returned none, and in evaluation.
        logged: Name and value of each call of `self.log`.
        output: Numbers and tensors among what it returned, by key.
        attributes: Those of the module that it changed.
    """

    loss: float | None = None
    logged: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def _numbers(value: Any, name: str) -> dict[str, Any]:
    """Return the tensors and numbers in `value`, by key, detached and on the CPU."""
    found: dict[str, Any] = {}
    leaves, _ = pytree.tree_flatten_with_path(value)
    for path, leaf in leaves:
        key = name + pytree.keystr(path)
        if isinstance(leaf, Tensor):
            found[key] = leaf.detach().cpu().clone()
        elif isinstance(leaf, np.ndarray):
            found[key] = torch.as_tensor(leaf).clone()
        elif isinstance(leaf, (bool, int, float)):
            found[key] = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    return found


class _KeptState:
    """All that a step may change in a module, to put it back: every module's attributes, buffers, parameters.

    Attributes that are containers, and objects of the user's classes, are followed inside.
    """

    def __init__(self, module: nn.Module) -> None:
        self._objects: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._seen: set[int] = set()
        parameters = list(module.parameters())
        skipped = {id(value) for value in parameters}
        if sum(value.numel() * value.element_size() for value in parameters) <= _COPY_BYTES:
            skipped = set()
        self._skipped = skipped
        for child in module.modules():
            self._keep(vars(child))

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            if type(value) in (Tensor, nn.Parameter) and id(value) not in self._skipped:
                self._seen.add(id(value))
                self._tensors.append((value, value.detach().clone()))
            return
        if isinstance(value, (dict, list, set, deque)):
            self._seen.add(id(value))
            self._objects.append((value, copy.copy(value)))
            for item in list(value.values() if isinstance(value, dict) else value):
                self._keep(item)
        elif _is_users(value):
            self._seen.add(id(value))
            self._keep(vars(value))

    def restore(self) -> None:
        """Put everything back, in place."""
        with torch.no_grad(), torch.inference_mode(False):
            for tensor, before in self._tensors:
                if tensor.shape != before.shape:
                    tensor.data = before
                elif not torch.equal(tensor, before):
                    tensor.data.copy_(before)
        for value, before in self._objects:
            value.clear()
            if isinstance(value, (dict, set)):
                value.update(before)
            else:
                value.extend(before)


_FOREIGN = ("torch", "lightning", "pytorch_lightning", "builtins", "torchmetrics", "lightning_parallel", "numpy")


def _is_users(value: Any) -> bool:
    """Tell whether an object is of a class of the user's, with attributes."""
    kind = type(value)
    is_plain = hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value)
    return is_plain and kind.__module__.partition(".")[0] not in _FOREIGN


def _followed(module: nn.Module) -> dict[str, Any]:
    """Return the attributes in which a module keeps what its steps found, without their history."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, (str, nn.Module)):
            continue
        if type(value) is Tensor:
            found[name] = value.detach().clone()
        elif isinstance(value, (bool, int, float)):
            found[name] = value
        elif isinstance(value, list):
            found[name] = list(value)
    return found


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and tensors that are new or other than before; of lists, the entries that were added."""
    changed: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, list):
            start = len(old) if isinstance(old, list) else 0
            changed.update(_numbers(value[start:], name))
        elif isinstance(value, Tensor):
            if not isinstance(old, Tensor) or old.shape != value.shape or not torch.equal(old, value):
                changed[name] = value.cpu()
        elif type(value) is not type(old) or value != old:
            changed.update(_numbers(value, name))
    return changed


# ------------------------------------------------------------------------------------------------- random numbers


class _NoDropout(TorchFunctionMode):
    """Lets dropout pass its input on, in functions and modules of torch.

    Attributes:
        found: Whether there was any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            training = kwargs.get("training", args[2] if len(args) > 2 else kwargs.get("train", True))
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            self.found |= bool(training) and p > 0
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args, kwargs["dropout_p"] = args[:4], args[4]
            self.found |= kwargs.get("dropout_p", 0.0) > 0
            kwargs["dropout_p"] = 0.0
        elif func is F.multi_head_attention_forward:
            # Called by position up to `dropout_p`, the eleventh.
            self.found |= args[10] > 0 and kwargs.get("training", True)
            args = (*args[:10], 0.0, *args[11:])
        return func(*args, **kwargs)


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


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[_NoDropout]:
    """Turn dropout off inside the block; recurrent layers have theirs in C."""
    patches = Patches()
    mode = _NoDropout()
    for child in module.modules():
        if isinstance(child, nn.RNNBase) and child.dropout:
            mode.found |= child.training
            patches.replace(child, "dropout", 0.0)
    try:
        with mode:
            yield mode
    finally:
        patches.undo()


class _Draws:
    """Tells whether random numbers were drawn, though generators may be seeded in between.

    Attributes:
        found: Whether there were any, up to the last `check`.
    """

    def __init__(self, generators: OwnGenerators) -> None:
        self.found = False
        self._generators = generators
        self.mark()

    def mark(self) -> None:
        """Note the states from which numbers would be drawn."""
        self._state = self._states()

    def check(self) -> None:
        """See whether the states have moved since `mark`."""
        self.found |= self._states() != self._state

    def _states(self) -> Any:
        numpy_state = np.random.get_state(legacy=False)
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b""
        return (
            torch.get_rng_state().numpy().tobytes(),
            cuda,
            random.getstate(),
            repr(numpy_state),
            self._generators.states(),
        )


class _Streams:
    """Seeds a step on the whole model as a pipeline seeds one microbatch: see `microbatch` and `runtime`."""

    def __init__(self, engine: PipelineEngine, draws: _Draws) -> None:
        self._engine = engine
        self._draws = draws
        self._calls = 0
        self._is_inside = False
        self._held: Any = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Seed inside the block."""
        plan = self._engine.plan
        module = self._engine.module
        hooks = []
        first: dict[int, str] = {}
        for name, stage in zip(plan.layers, plan.stage_of):
            first.setdefault(stage, name)
        for stage, name in first.items():
            enter = self._entering(stage)
            hooks.append(module.get_submodule(name).register_forward_pre_hook(enter, prepend=True))
        for name in self._engine.model.outer_names:
            hooks.append(module.get_submodule(name).register_forward_hook(self._after_outer_call))
        try:
            with self._engine.generators.kept():
                self._seed(0)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _seed(self, number: int) -> None:
        self._draws.check()
        seed_all(call_seed(_SEED, number))
        self._engine.generators.seed(call_seed(0, number))
        self._draws.mark()

    def _after_outer_call(self, *_: Any) -> None:
        if not self._is_inside:
            self._calls += 1
            self._seed(self._calls)

    def _entering(self, stage: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._draws.check()
            if stage == 0:
                self._held = random.getstate(), np.random.get_state(), self._engine.generators.states()
            elif self._held is not None:
                # Each stage has come here by itself, with the numbers before the layers and no others.
                random.setstate(self._held[0])
                np.random.set_state(self._held[1])
                self._engine.generators.restore(self._held[2])
                seed_torch(stage_seed(_SEED, stage))
            self._is_inside = True
            self._draws.mark()

        return enter


# --------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Difference:
    """A value that is not what one process computes.

    Attributes:
        kind: `loss`, `gradient`, `logged value`, `output`, `attribute` or `buffer`.
        name: Its name.
        relative: Largest difference, in terms of the largest expected value; infinite for another shape.
        detail: The values themselves, if they are short.
    """

    kind: str
    name: str
    relative: float
    detail: str = ""

    def __str__(self) -> str:
        by = "has another shape" if math.isinf(self.relative) else f"differs by {self.relative:.2g} of its largest value"
        what = self.kind if self.kind == "loss" else f"{self.kind} `{self.name}`"
        return f"{what} {self.detail or by}"


def _difference(found: Tensor, expected: Tensor, floor: float) -> float:
    """Return the largest difference, relative to the largest expected value or `floor`."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    if not (found.is_floating_point() or found.is_complex()):
        return float((found != expected.to(found.dtype)).double().mean())
    kind = torch.complex128 if found.is_complex() else torch.float64
    one, two = found.detach().to(kind), expected.detach().to(found.device, kind)
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return 0.0
    difference = torch.where(same, torch.zeros_like(one), one - two).abs().max()
    scale = max(float(two.abs().nan_to_num().max()), floor, 1e-30)
    return math.inf if difference.isnan() else float(difference) / scale


def _compared(kind: str, found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> list[Difference]:
    """Compare small values by name."""
    differences = []
    for name, value in expected.items():
        if name not in found:
            differences.append(Difference(kind, name, math.inf, "is missing"))
            continue
        mine = found[name]
        if isinstance(value, float) or not isinstance(value, Tensor):
            value, mine = torch.as_tensor(value), torch.as_tensor(mine)
        is_exact = not (value.is_floating_point() or value.is_complex())
        if is_exact != (not (mine.is_floating_point() or mine.is_complex())):
            # A mean over microbatches may be a float where one process has a count.
            value, mine, is_exact = value.double(), mine.double(), False
        relative = _difference(mine, value, 1e-2)
        if relative > (0.0 if is_exact and tolerance < _HALF else tolerance):
            short = value.numel() == 1 and mine.numel() == 1
            detail = f"is {mine.item():.6g}, but {value.item():.6g} on one process" if short else ""
            if mine.shape != value.shape:
                detail = f"has shape {tuple(mine.shape)}, but {tuple(value.shape)} on one process"
            differences.append(Difference(kind, name, relative, detail))
    differences += [
        Difference(kind, name, math.inf, "is not there on one process") for name in found if name not in expected
    ]
    return differences


# ---------------------------------------------------------------------------------------------------- the proof


@dataclass(frozen=True)
class _Way:
    """How both steps are run.

    Attributes:
        dropout: Whether it is on.
        splits: Whether a pipeline cuts the samples into microbatches.
    """

    dropout: bool = False
    splits: bool = True


@dataclass
class _Divided:
    """What the divided step gave on this rank."""

    effects: StepEffects
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


class StepProof:
    """Compares a step of a divided module with the same step on the whole module.

    All ranks of all replicas construct it, and call `prove`, at the same points.

    Args:
        skeleton: The module as it was.
        groups: The mesh's groups.
        rules: How tensors are sharded over the tensor axis, by name.
        sharding: What was divided how.
        steps: The module's steps in a pipeline; None without one.
        reducer: Of the gradients over the replicas, during `fit`.
        precision: Gives the context in which Lightning runs each step.
        device: Where this rank computes.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        groups: MeshGroups,
        rules: Mapping[str, Shard],
        sharding: Sharding | None,
        steps: PipelineSteps | None,
        reducer: GradientReducer | None,
        precision: Precision,
        device: torch.device,
    ) -> None:
        assert isinstance(skeleton.module, LightningModule)
        self.skeleton = skeleton
        self.module = skeleton.module
        self.groups = groups
        self.rules = rules
        self.sharding = sharding
        self.steps = steps
        self.reducer = reducer
        self.precision = precision
        self.device = device

    def prove(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the step `name` on the first samples of its first batch; prints what was verified.

        Args:
            name: `training_step`, `validation_step`, `test_step` or `predict_step`.
            args, kwargs: Of the step.

        Raises:
            ProofError: On every rank, if it differs from that of one process.
        """
        begun_s = time.perf_counter()
        batch, *rest = args
        samples = _num_samples(batch)
        with self._nothing_left():
            verdict = self._prove_on(name, self._first_samples(batch), tuple(rest), kwargs)
            if verdict.failure and samples > _SAMPLES:
                # Some steps are made for one size of batch.
                verdict = self._prove_on(name, batch, tuple(rest), kwargs)
        seconds = time.perf_counter() - begun_s
        self._report(name, verdict, seconds)

    def _report(self, name: str, verdict: _Verdict, seconds: float) -> None:
        everyone = comm.all_gather_object((verdict.failure, verdict.differences), self.groups.world)
        differences = [difference for _, found in everyone for difference in found]
        failure = next((found for found, _ in everyone if found), "")
        of = "" if name == "training_step" else f"`{name}` "
        if differences:
            raise ProofError(self._message(name, differences, verdict))
        if failure:
            rank_zero_warn(
                f"{of}was not verified against one process, since it could not be run on one rank by itself ({failure})"
            )
            return
        rank_zero_info(f"{of}verified on {verdict.summary} ({seconds:.1f} s)")

    def _message(self, name: str, differences: list[Difference], verdict: _Verdict) -> str:
        unique = list({(difference.kind, difference.name): difference for difference in differences}.values())
        order = ["loss", "logged value", "output", "attribute", "gradient", "buffer"]
        unique.sort(key=lambda difference: order.index(difference.kind))
        lines = [f"  {difference}" for difference in unique[:_SHOWN]]
        if len(unique) > _SHOWN:
            lines.append(f"  and {len(unique) - _SHOWN} more")
        return (
            f"`{name}` does not compute the same divided as on one process. Both were run on {verdict.samples}, and"
            " differ in:\n" + "\n".join(lines) + f"\n{verdict.hint}"
        )

    # --------------------------------------------------------------------------------------------- the two runs

    def _prove_on(self, name: str, batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Verdict:
        way = _Way()
        reference, facts = self._reference(name, batch, rest, kwargs, way)
        verdict = _Verdict(samples=_described(batch))
        if reference.failure:
            verdict.failure = reference.failure
            return verdict
        engine = None if self.steps is None else self.steps.engine
        if engine is not None and (facts.draws or self._has_batch_norm()):
            way = _Way(splits=False)
        divided = self._divided(name, batch, rest, kwargs, way)
        verdict.differences = self._differences(reference, divided)
        verdict.summary = self._summary(name, batch, reference, divided)
        return verdict

    def _reference(
        self, name: str, batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], way: _Way
    ) -> tuple[Reference, _Facts]:
        owners = Owners(self.module, self.rules, self.groups, self.device)
        engine = None if self.steps is None else self.steps.engine

        def run() -> tuple[StepEffects, _Facts]:
            generators = OwnGenerators(self.module.modules()) if engine is None else engine.generators
            draws = _Draws(generators)
            with ExitStack() as stack:
                quiet = None if way.dropout else stack.enter_context(_without_dropout(self.module))
                if engine is None:
                    seed_all(_SEED)
                    draws.mark()
                else:
                    stack.enter_context(_Streams(engine, draws).followed())
                effects = self._run_step(name, copied(batch), rest, kwargs)
                draws.check()
            return effects, _Facts(draws.found, quiet is not None and quiet.found)

        with self._state_kept():
            reference = run_reference(self.skeleton, owners, run)
        effects, facts = reference.result or (StepEffects(), _Facts())
        reference.result = effects
        return reference, facts

    def _run_step(self, name: str, batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> StepEffects:
        """Run the module's own step on this rank, as it is now, with its backward pass."""
        module = self.module
        before = _followed(module)
        calls: list[LogCall] = []
        with log_recorded(module, calls), self._manual(), self._context(name)():
            output = getattr(module, name)(batch, *rest, **kwargs)
        loss = None
        if name == "training_step" and module.automatic_optimization and output is not None:
            loss = loss_of(output)
        # Before backward, which may free what they refer to.
        effects = self._effects(calls, output, loss, before)
        if loss is not None:
            module.backward(loss)
        return effects

    def _effects(
        self, calls: Sequence[LogCall], output: Any, loss: Tensor | None, before: Mapping[str, Any]
    ) -> StepEffects:
        logged: dict[str, Any] = {}
        for name, value, _ in calls:
            value = getattr(value, "cache", value)
            for key, number in _numbers(value, name).items():
                while key in logged:
                    key += "'"
                logged[key] = number
        return StepEffects(
            None if loss is None else float(loss.detach()),
            logged,
            {} if isinstance(output, Tensor) and loss is not None else _numbers(output, ""),
            _changed(before, _followed(self.module)),
        )

    def _divided(
        self, name: str, batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], way: _Way
    ) -> _Divided:
        parameters = dict(self.module.named_parameters())
        buffers = {key: value.clone() for key, value in self.module.named_buffers() if type(value) is Tensor}
        with self._state_kept(), ExitStack() as stack:
            if not way.dropout:
                stack.enter_context(_without_dropout(self.module))
            if self.steps is None:
                seed_all(_SEED)
                effects = self._run_step(name, copied(batch), rest, kwargs)
            else:
                effects = self._run_stages(name, copied(batch), rest, kwargs, way)
            self._complete_gradients(parameters)
            gradients = {key: p.grad for key, p in parameters.items() if p.requires_grad}
            changed = {
                key: value.clone()
                for key, value in self.module.named_buffers()
                if key in buffers and not torch.equal(value, buffers[key])
            }
        return _Divided(effects, gradients, changed)

    def _run_stages(
        self, name: str, batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], way: _Way
    ) -> StepEffects:
        steps = self.steps
        assert steps is not None
        before = _followed(self.module)
        calls: list[LogCall] = []
        patches = Patches()
        patches.replace(steps.engine, "next_seed", lambda: _SEED)
        patches.replace(steps, "gradient_scale", lambda: 1.0)
        if not way.splits:
            patches.replace(steps.engine, "split_batch", lambda whole, _: [whole])
        try:
            with log_recorded(self.module, calls):
                if name == "training_step":
                    output = steps.training_step((batch, *rest), kwargs, None)
                    steps.restore_gradients()
                else:
                    output = steps.evaluate(name, (batch, *rest), kwargs)
        finally:
            patches.undo()
        loss = loss_of(output) if name == "training_step" else None
        return self._effects(calls, output, loss, before)

    def _complete_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum partial gradients over the tensor axis, and those of tied parameters over the stages."""
        group = self.groups.tensor_parallel
        if self.sharding is not None:
            mine = [name for name, p in parameters.items() if name in self.sharding.partial and p.grad is not None]
            names = sorted({name for found in comm.all_gather_object(mine, group) for name in found})
            for name in names:
                if parameters[name].grad is None:
                    parameters[name].grad = torch.zeros_like(parameters[name])
            gradients = {name: parameters[name].grad for name in names}
            with torch.no_grad():
                reduce_partial_(gradients, self.rules, group)  # type: ignore[arg-type]
        if self.steps is not None:
            self.steps.engine.reduce_tied_gradients()

    # ----------------------------------------------------------------------------------------------- comparison

    def _differences(self, reference: Reference, divided: _Divided) -> list[Difference]:
        tolerance = _tolerance(reference.precisions)
        expected, found = reference.result, divided.effects
        differences: list[Difference] = []
        if (expected.loss is None) != (found.loss is None):
            differences.append(Difference("loss", "loss", math.inf, "is there on one side only"))
        elif expected.loss is not None:
            differences += _compared("loss", {"loss": found.loss}, {"loss": expected.loss}, tolerance)
        differences += _compared("logged value", found.logged, expected.logged, tolerance)
        differences += _compared("output", found.output, expected.output, tolerance)
        differences += _compared("attribute", found.attributes, expected.attributes, tolerance)
        differences += self._gradient_differences(reference, divided, tolerance)
        differences += self._buffer_differences(reference, divided, tolerance)
        return differences

    def _gradient_differences(self, reference: Reference, divided: _Divided, tolerance: float) -> list[Difference]:
        replica = self.groups.replica
        mine = max((float(g.abs().nan_to_num().max()) for g in reference.gradients.values() if g.numel()), default=0.0)
        largest = max(comm.all_gather_object(mine, replica))
        differences = []
        for name, found in divided.gradients.items():
            expected = reference.gradients.get(name)
            if expected is None and found is None:
                continue
            # One that is not there and one of zeros are compared as zeros.
            some = expected if found is None else found
            assert some is not None
            one = torch.zeros_like(some) if found is None else found.to_dense() if found.is_sparse else found
            two = torch.zeros_like(some) if expected is None else expected
            relative = _difference(one, two, _SMALL * largest)
            if relative > tolerance:
                differences.append(Difference("gradient", name, relative))
        return differences

    def _buffer_differences(self, reference: Reference, divided: _Divided, tolerance: float) -> list[Difference]:
        """Compare buffers that changed; where several stages hold one, one of them has to be right."""
        found: dict[str, float] = {}
        held = dict(self.module.named_buffers())
        for name in {*reference.buffers, *divided.buffers}:
            expected = reference.buffers.get(name, held[name])
            found[name] = _difference(divided.buffers.get(name, held[name]), expected, 1e-2)
        everyone = comm.all_gather_object(found, self.groups.replica)
        best: dict[str, float] = {}
        for theirs in everyone:
            for name, relative in theirs.items():
                best[name] = min(relative, best.get(name, math.inf))
        return [Difference("buffer", name, relative) for name, relative in best.items() if relative > tolerance]

    def _summary(self, name: str, batch: Any, reference: Reference, divided: _Divided) -> str:
        names = comm.all_gather_object(list(reference.gradients), self.groups.replica)
        gradients = len({name for found in names for name in found})
        effects: StepEffects = reference.result
        parts = [] if effects.loss is None else ["loss"]
        parts += [f"{gradients} gradients"] if gradients else []
        parts += [_counted(len(effects.logged), "logged value")] if effects.logged else []
        parts += ["the output"] if effects.output else []
        parts += [_counted(len(effects.attributes), "attribute")] if effects.attributes else []
        parts += [_counted(len(reference.buffers), "buffer")] if reference.buffers else []
        text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + (parts[-1] if parts else "nothing")
        return f"{_described(batch)}: {text} {'equals' if len(parts) == 1 else 'equal'} one process"

    # --------------------------------------------------------------------------------------------------- the frame

    def _first_samples(self, batch: Any) -> Any:
        split = None if self.steps is None else self.steps.options.split_batch
        engine = None if self.steps is None else self.steps.engine
        try:
            if split is None or split is default_split:
                return take_samples(batch, _SAMPLES)
            assert engine is not None
            # A function of the user's: what it makes two microbatches of.
            return split_by(split, batch, max(1, engine.schedule.num_microbatches // 2))[0]
        except ValueError:
            return batch

    def _has_batch_norm(self) -> bool:
        return any(isinstance(child, BatchNormalization) and child.training for child in self.module.modules())

    def _context(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        if isinstance(self.precision, MixedPrecision):
            return nullcontext
        contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "training_step": self.precision.train_step_context,
            "validation_step": self.precision.val_step_context,
            "test_step": self.precision.test_step_context,
            "predict_step": self.precision.predict_step_context,
        }
        return contexts[name]

    @contextmanager
    def _manual(self) -> Iterator[None]:
        """Let a module that optimizes manually compute its gradients, but no step."""
        if self.module.automatic_optimization:
            yield
            return
        optimizers = self.module.optimizers()
        inert = [_Inert(each) for each in optimizers] if isinstance(optimizers, list) else _Inert(optimizers)
        patches = Patches()
        patches.replace(self.module, "optimizers", lambda *_, **__: inert)
        patches.replace(self.module, "lr_schedulers", lambda: _Inert(None))
        patches.replace(self.module, "manual_backward", lambda loss, *args, **kwargs: loss.backward(*args, **kwargs))
        try:
            yield
        finally:
            patches.undo()

    @contextmanager
    def _state_kept(self) -> Iterator[None]:
        """Put back what a run of the step changes, gradients included."""
        state = _KeptState(self.module)
        gradients = {parameter: parameter.grad for parameter in self.module.parameters()}
        for parameter in gradients:
            parameter.grad = None
        try:
            with OwnGenerators(self.module.modules()).preserved():
                yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            state.restore()

    @contextmanager
    def _nothing_left(self) -> Iterator[None]:
        patches = Patches()
        if isinstance(self.precision, MixedPrecision):
            # Single precision throughout: what autocast rounds would hide differences.
            patches.replace(self.precision, "forward_context", nullcontext)
        paused = nullcontext() if self.reducer is None else self.reducer.paused()
        try:
            with random_state_kept(), paused:
                yield
        finally:
            patches.undo()


@dataclass(frozen=True)
class _Facts:
    """What the reference saw: whether random numbers were drawn, and whether there was dropout to turn off."""

    draws: bool = False
    dropout: bool = False


@dataclass
class _Verdict:
    """The outcome of one comparison."""

    samples: str = ""
    failure: str = ""
    differences: list[Difference] = field(default_factory=list)
    summary: str = ""
    hint: str = ""


class _Inert:
    """An optimizer, or scheduler, whose steps do nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> Any:
        """Only compute what the closure does."""
        if callable(closure):
            with torch.enable_grad():
                return closure()
        return None

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Let gradients add up over the whole step."""


_SHOWN = 8


def _tolerance(precisions: set[torch.dtype]) -> float:
    found = {kind for kind in precisions if kind.is_floating_point}
    if found - _TOLERANCES.keys():
        return _HALF
    if found == {torch.float64}:
        return _TOLERANCES[torch.float64]
    return _MIXED if torch.float64 in found else _TOLERANCES[torch.float32]


def copied(batch: Any) -> Any:
    """Return a copy of a batch, which a step may write into."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # an object of the user's that cannot be copied
        return pytree.tree_map_only(Tensor, torch.clone, batch)


def _num_samples(batch: Any) -> int:
    try:
        return num_samples(batch)
    except ValueError:
        return 0


def _described(batch: Any) -> str:
    samples = _num_samples(batch)
    return _counted(samples, "sample") if samples else "the first batch"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
