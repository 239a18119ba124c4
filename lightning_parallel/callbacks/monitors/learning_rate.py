"""Learning rates for the samples of an optimizer step: scaled once, with warm-up, under any strategy and scheduler."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isclose, isfinite, log2, sqrt
from typing import Any, Literal, Optional
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from lightning_parallel.callbacks.monitors.global_batch import GlobalBatch
from lightning_parallel.callbacks.recording.session import mesh_of
from lightning_parallel.compat import Patches
from lightning_parallel.compat.interrupted import loaders_of
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.twins import Callback, is_a

__all__ = ["LearningRateScaling", "scale_learning_rates"]

# In parameter groups, and in schedulers: torch's, DeepSpeed's and their like.
_OPTIONS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_CAPTURED = ("base_lrs", "max_lrs", "min_lrs", "delta_lrs", "org_lrs", "eta_min", "min_lr", "max_lr", "_last_lr")

_TRIED_STEPS = 24
_LAST_TRIED_STEP = 2**22

Rate = Any
"""A number or a tensor."""

_scaled: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()
"""By how much learning rates of an optimizer of this process are multiplied: it may be used in a second `fit`."""


def scale_learning_rates(trainer: Trainer, factor: float) -> None:
    """Multiply the learning rates of all optimizers, and those that their schedulers go by, with `factor`.

    Of schedulers the rates that they start from, rise to and fall to, so that all of a schedule is multiplied.

    Raises:
        ValueError: If the rates of a scheduler would not be multiplied by it; nothing is changed then.
    """
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler in schedulers:
        follows = _follows(scheduler, factor, (trainer, trainer.lightning_module))
        if follows is False:
            raise ValueError(
                f"Learning rates cannot be multiplied by {factor:g}, because `{type(scheduler).__name__}` sets rates"
                " that do not depend on its initial rates. Give the optimizer and the scheduler the scaled rate,"
                " without `LearningRateScaling`, or use a scheduler that multiplies the optimizer's rate (`LambdaLR`)"
            )
        if follows is None:
            rank_zero_warn(
                f"The optimizer's initial rates are multiplied by {factor:g}, but `{type(scheduler).__name__}` could"
                " not be tried. Make sure that the scheduler sets multiples of these initial rates"
            )
    _scale(trainer.optimizers, schedulers, factor)


def _scale(optimizers: Iterable[Any], schedulers: Iterable[Any], factor: float) -> None:
    # A tensor may be the rate of a group and what its scheduler starts from.
    done: set[int] = set()

    def scaled(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(scaled, value))
        if isinstance(value, Tensor):
            if id(value) not in done:
                value.mul_(factor)
                done.add(id(value))
            return value
        return value * factor if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({key: scaled(group[key]) for key in _OPTIONS if key in group})
    for outer in schedulers:
        for scheduler in _parts(outer):
            state = vars(scheduler)
            state.update({key: scaled(state[key]) for key in _CAPTURED if key in state})


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and those that it is made of."""
    yield scheduler
    for inner in vars(scheduler).get("_schedulers", ()):
        yield from _parts(inner)


def _follows(scheduler: Any, factor: float, shared: Sequence[object] = ()) -> bool | None:
    """Tell whether a copy of a scheduler whose rates were multiplied sets multiplied ones; None if it cannot be tried.

    Whatever its class: everybody writes a warm-up. Copies do not copy the objects in `shared`, whose methods a
    scheduler may call.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return True  # it waits for metrics, and multiplies

    def tried(scale: float, far: bool) -> list[float]:
        optimizer = scheduler.optimizer
        groups = [
            {**copy.deepcopy({key: value for key, value in group.items() if key != "params"}), "params": [one]}
            for group in optimizer.param_groups
            for one in [nn.Parameter(torch.zeros(1))]
        ]
        stand_in = SGD(groups, lr=1.0)
        clone = copy.deepcopy(scheduler, {id(optimizer): stand_in, **{id(one): one for one in shared}})
        _scale([stand_in], [clone], scale)
        return _far_rates(stand_in, clone) if far else _next_rates(stand_in, clone)

    # By a power of two, rates are multiplied to the bit, however a scheduler computes them.
    power = 2.0 ** (round(log2(factor)) or 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the order of the copies' steps
            pairs = [(tried(1.0, far), tried(one, far), one) for one, far in ((factor, False), (power, True))]
    except Exception:
        return None
    return all(
        len(plain) == len(multiplied)
        and all(
            isclose(rate * scale, other, rel_tol=1e-5, abs_tol=1e-30)
            for rate, other in zip(plain, multiplied)
            if isfinite(rate) or isfinite(other)
        )
        for plain, multiplied, scale in pairs
    )


def _next_rates(optimizer: Optimizer, scheduler: Any) -> list[float]:
    """Return the rates of the next steps."""
    found: list[float] = []
    for _ in range(_TRIED_STEPS):
        optimizer.step()
        try:
            scheduler.step()
        except ValueError:  # a schedule of fewer steps is over
            break
        found += [float(group["lr"]) for group in optimizer.param_groups]
    return found


def _far_rates(optimizer: Optimizer, scheduler: Any) -> list[float]:
    """Return rates at steps further and further away: an absolute floor may come after a long time.

    They need not be those of a run that gets there, as many schedulers go by the rate before.
    """
    found: list[float] = []
    step = 2 * _TRIED_STEPS
    while step <= _LAST_TRIED_STEP:
        for one in _parts(scheduler):
            if isinstance(vars(one).get("last_epoch"), int):
                one.last_epoch = step
        try:
            for _ in range(2):
                optimizer.step()
                scheduler.step()
                found += [float(group["lr"]) for group in optimizer.param_groups]
        except Exception:  # the schedule is over, or a list of the user's
            break
        step *= 2
    return found


class _RateWatch:
    """Warns of rates that other code sets than the schedulers with which a run began: they are used as they are.

    Args:
        trainer: Its rates are multiplied.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._known: dict[int, float] = {}
        self._is_silent = False
        self.remember()

    def remember(self) -> None:
        """Take present rates for known."""
        self._known = dict(self._rates())

    def look(self, factor: float) -> None:
        """Warn, once, if there are others."""
        if self._is_silent:
            return
        now = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        set_by_schedulers = [rate for outer in now for one in _parts(outer) for rate in vars(one).get("_last_lr", ())]
        found = ""
        for group, rate in self._rates():
            if group not in self._known:
                found = f"A parameter group was added with a learning rate of {rate:.6g}"
            elif rate != self._known[group] and not any(isclose(rate, float(one)) for one in set_by_schedulers):
                found = f"A learning rate of {self._known[group]:.6g} was set to {rate:.6g}"
        for scheduler in now:
            if not any(scheduler is one for one in self._schedulers):
                found = f"The scheduler `{type(scheduler).__name__}` was created"
        if found:
            self._is_silent = True
            rank_zero_warn(
                f"LearningRateScaling: {found} by the module or a callback during the run. `LearningRateScaling` does"
                f" not multiply this rate by {factor:g}. Make sure that the code computes the rate from the present"
                " rates of the optimizer, or multiplies the rate itself"
            )

    def _rates(self) -> Iterator[tuple[int, float]]:
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                # Reading one from a device would wait for all that it has to do.
                if not isinstance(group["lr"], Tensor) or group["lr"].device.type == "cpu":
                    yield id(group), float(group["lr"])


class LearningRateScaling(Callback):
    """Multiplies learning rates when replicas or accumulated batches add samples to an optimizer step.

    `n` is the ratio of two numbers: the samples of a step, and the samples for which you chose the learning rates. The
    callback multiplies the rates before the first step: by `n` (`linear`) or by the square root of `n` (`sqrt`). It
    also multiplies the values that schedulers add to the rates. Tensor-parallel and pipeline-parallel ranks do not
    count, because they work on the same samples.

    The callback works with any optimizer, also under the strategies of Lightning. Schedulers must go by the rates with
    which they were made; other schedulers are not supported.

    Rates are multiplied only once: a checkpoint stores the factor of its rates. A run that resumes with another number
    of replicas continues with the rates for that number. Rates of a checkpoint without this callback count as unscaled.
    If `GradientAccumulationScheduler` changes a step, the rates follow. Beside `LearningRateScaling`, `AutoResume`
    scales no rates.

    The callback cannot see factors in your own code. It prints its changes, and warns of rates that other code sets.

    Under `LocalSGDStrategy` replicas do not count, because a local step has the samples of one replica.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import LearningRateScaling

        trainer = Trainer(accumulate_grad_batches=4, callbacks=[LearningRateScaling("sqrt", base_batch_size=8)])
        trainer.fit(MyModule(), MyData())  # prints the factor
        ```

    Args:
        rule: `linear` (for SGD), or `sqrt` (for Adam and similar optimizers).
        base_batch_size: Number of samples in the step for which you chose the learning rates.
        base_replicas: Number of replicas for which you chose the learning rates, with one batch each. Pass it instead
            of `base_batch_size`. The default is 1 if you pass neither.
        ramp_steps: Number of optimizer steps, as `trainer.global_step` counts, in which the rates rise linearly. They
            rise from your values to the multiplied values. The ramp multiplies the rates of the schedulers.

    Raises:
        ValueError: If an argument is out of range. Also on every rank before the first step, in three cases: a
            scheduler does not follow, the batch size is not known, or `LearningRateFinder` searches for the rates.

    Source: Goyal et al., https://arxiv.org/abs/1706.02677 (linear, warm-up); Krizhevsky,
    https://arxiv.org/abs/1404.5997, and Malladi et al., https://arxiv.org/abs/2205.10287 (square root)
    """

    def __init__(
        self,
        rule: Literal["linear", "sqrt"] = "linear",
        base_batch_size: Optional[int] = None,
        base_replicas: Optional[int] = None,
        ramp_steps: int = 0,
    ) -> None:
        if rule not in ("linear", "sqrt"):
            raise ValueError(f"`rule` must be 'linear' or 'sqrt'; got {rule!r}")
        if base_batch_size is not None and base_replicas is not None:
            raise ValueError("`base_batch_size` excludes `base_replicas`; got both. Give one of them")
        for name, value in (("base_batch_size", base_batch_size), ("base_replicas", base_replicas)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1; got {value}")
        if ramp_steps < 0:
            raise ValueError(f"`ramp_steps` must be at least 0; got {ramp_steps}")
        self.rule = rule
        self.base_batch_size = base_batch_size
        self.base_replicas = base_replicas
        self.ramp_steps = ramp_steps
        self.factor = 1.0
        self._began = 0
        self._restored: dict[str, Any] | None = None
        self._from_checkpoint = False
        self._patches = Patches()
        self._watch: _RateWatch | None = None
        self._held: list[tuple[dict[str, Any], Rate, Rate]] = []  # of the warm-up: group, its rate, what it has now

    # ---------------------------------------------------------------------------------------------------- checkpoint

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "began": self._began}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._from_checkpoint = True

    # -------------------------------------------------------------------------------------------------- begin and end

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._restored, self._from_checkpoint = None, False
        if any(is_a(callback, LearningRateFinder) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "`LearningRateFinder` must not be used with `LearningRateScaling`, which would scale the found rate"
                " again; got both; remove one of them"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.factor, self._began = self._applied(trainer)
        self._adapt(trainer, is_start=True)
        self._watch = _RateWatch(trainer)
        if self.ramp_steps:
            step, loop = trainer.strategy.optimizer_step, trainer.fit_loop.epoch_loop
            self._patches.replace(trainer.strategy, "optimizer_step", self._warmed(trainer, step))
            self._patches.replace(loop, "update_lr_schedulers", self._released(loop.update_lr_schedulers))

    def _applied(self, trainer: Trainer) -> tuple[float, int]:
        """Return by how much the present rates are multiplied, and the step from which on they are."""
        if self._restored is not None:
            return float(self._restored["factor"]), int(self._restored["began"])
        if self._from_checkpoint:
            return 1.0, trainer.global_step
        # An optimizer that a module keeps has the rates that an earlier `fit` has left.
        return max((_scaled.get(one, 1.0) for one in trainer.optimizers), default=1.0), trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # `GradientAccumulationScheduler` changes it at the start of an epoch, perhaps after this callback's hook.
        if not self._held:
            self._look()
            self._adapt(trainer)
            self._remember()
        # So that all see it who look at the rate of this step; but schedulers must not.
        if self.ramp_steps and pl_module.automatic_optimization:
            self._hold_back(trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._look()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()

    def _leave(self) -> None:
        self._release()
        self._watch = None
        self._patches.undo()

    def _look(self) -> None:
        if self._watch is not None:
            self._watch.look(self.factor)

    def _remember(self) -> None:
        if self._watch is not None:
            self._watch.remember()

    # -------------------------------------------------------------------------------------------------------- scaling

    def _adapt(self, trainer: Trainer, is_start: bool = False) -> None:
        now, reason = self._global_batch(trainer)
        if self.base_batch_size is None:
            ratio = now.replicas * now.accumulate / (self.base_replicas or 1)
        else:
            ratio = now.samples / self.base_batch_size
        wanted = ratio if self.rule == "linear" else sqrt(ratio)
        change = wanted / self.factor
        if wanted != self.factor:
            before = _rates(trainer)
            scale_learning_rates(trainer, change)
            self._say(trainer, now, wanted, reason, before)
        elif is_start:
            self._say(trainer, now, wanted, reason, _rates(trainer))
        self.factor = wanted
        for optimizer in trainer.optimizers if is_start or change != 1.0 else ():
            _scaled[optimizer] = wanted

    def _global_batch(self, trainer: Trainer) -> tuple[GlobalBatch, str]:
        """Return what a step is made of, and what there is to say about it."""
        replicas, reason = mesh_of(trainer).data_parallel, ""
        if getattr(trainer.strategy, "steps_between_reductions", 1) > 1:
            reason = f"; the {replicas} replicas do not count, because each takes local steps"
            replicas = 1
        size = 1 if self.base_batch_size is None else _batch_size(trainer)
        return GlobalBatch(replicas, size, trainer.accumulate_grad_batches), reason

    def _say(self, trainer: Trainer, now: GlobalBatch, wanted: float, reason: str, before: str) -> None:
        if self.base_batch_size is None:
            step = f"{_replicas(now.replicas)} x {now.accumulate} accumulated"
            base = _replicas(self.base_replicas or 1)
        else:
            step, base = f"{now} = {now.samples} samples", f"{self.base_batch_size} samples"
        had = "" if self.factor == 1.0 else f", of which {self.factor:g} was applied before"
        warm = f", in {self.ramp_steps} steps of warm-up" if self.ramp_steps else ""
        rates = before if wanted == self.factor else f"{before} -> {_rates(trainer)}"
        tell(
            f"LearningRateScaling: learning rates are multiplied by {wanted:g} ({self.rule}){had}: {step} in a step,"
            f" chosen for {base}{reason}; {rates}{warm}. Do not scale them in your own code as well"
        )

    # -------------------------------------------------------------------------------------------------------- warm-up

    def _warmed(self, trainer: Trainer, step: Callable[..., Any]) -> Callable[..., Any]:
        def optimizer_step(*args: Any, **kwargs: Any) -> Any:
            self._hold_back(trainer)
            try:
                return step(*args, **kwargs)
            finally:
                self._release()

        return optimizer_step

    def _released(self, update: Callable[..., None]) -> Callable[..., None]:
        """Let schedulers go by the rates without warm-up, and checkpoints have them.

        Also after a batch that was only accumulated, or whose `on_train_batch_start` ended the epoch.
        """

        def update_lr_schedulers(*args: Any, **kwargs: Any) -> None:
            self._release()
            update(*args, **kwargs)

        return update_lr_schedulers

    def _hold_back(self, trainer: Trainer) -> None:
        """Set the rates of the coming step."""
        done = trainer.global_step - self._began
        if self._held or done >= self.ramp_steps:
            return
        self._look()
        # A line from 1 to the factor, over the factor.
        share = (1.0 + (self.factor - 1.0) * done / self.ramp_steps) / self.factor
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                rate = group["lr"]
                if isinstance(rate, Tensor):
                    before = rate.clone()
                    rate.mul_(share)
                    self._held.append((group, before, rate.clone()))
                else:
                    group["lr"] = rate * share
                    self._held.append((group, rate, group["lr"]))
        self._remember()

    def _release(self) -> None:
        if not self._held:
            return
        self._look()
        for group, before, held in self._held:
            # A value that other code has set meanwhile stays.
            if bool(group["lr"] == held):
                if isinstance(before, Tensor):
                    group["lr"].copy_(before)
                else:
                    group["lr"] = before
        self._held.clear()
        self._remember()


def _replicas(number: int) -> str:
    return f"{number} replica{'s' if number > 1 else ''}"


def _rates(trainer: Trainer) -> str:
    found = dict.fromkeys(f"{float(group['lr']):.6g}" for one in trainer.optimizers for group in one.param_groups)
    few = list(found)[:4]
    return ", ".join(few) + (", ..." if len(found) > len(few) else "")


def _batch_size(trainer: Trainer) -> int:
    sizes = {
        getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        for loader in loaders_of(trainer)[0]
    }
    size = sizes.pop() if len(sizes) == 1 else None
    if not isinstance(size, int):
        raise ValueError(
            "`LearningRateScaling(base_batch_size=...)` needs the batch size of the training loader, which has none, or"
            " several; give `base_replicas` instead: the replicas for which the learning rates were chosen"
        )
    return size
