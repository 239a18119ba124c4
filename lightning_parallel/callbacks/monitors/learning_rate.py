"""Learning rates for the samples of an optimizer step, with a warm-up, under any strategy and scheduler."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, Literal, Optional

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_parallel.callbacks.monitors.global_batch import GlobalBatch
from lightning_parallel.callbacks.recording.session import mesh_of
from lightning_parallel.compat import Patches
from lightning_parallel.compat.interrupted import loaders_of
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.twins import Callback, is_a
from lightning_parallel.compression.compressor import check_integer

__all__ = ["LearningRateScaling", "StepRates"]

Rate = Any
"""A number or a tensor."""


class StepRates:
    """Multiplies the learning rates of a trainer around each optimizer step, and restores them after the step.

    Schedulers, checkpoints and other code between two steps see plain rates. So every scheduler works, even a
    scheduler that keeps a copy of its rates.

    ```
    batch starts     training_step, optimizer_step     scheduler, checkpoint     batch starts
         | hold()          multiplied rates   release() |     plain rates             | hold()
    ```

    Args:
        trainer: Its strategy takes the steps.
        factor: Returns the factor of the coming step.
        name: Class of the callback, for the warning.
    """

    def __init__(self, trainer: Trainer, factor: Callable[[], float], name: str) -> None:
        self._trainer = trainer
        self._factor = factor
        self._name = name
        # Parameter group, plain rate, multiplied rate, factor.
        self._held: list[tuple[dict[str, Any], Rate, Rate, float]] = []
        self._has_warned = False
        self._patches = Patches()
        loop = trainer.fit_loop.epoch_loop
        self._patches.replace(trainer.strategy, "optimizer_step", self._stepping(trainer.strategy.optimizer_step))
        self._patches.replace(loop, "update_lr_schedulers", self._updating(loop.update_lr_schedulers))

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def optimizer_step(*args: Any, **kwargs: Any) -> Any:
            self.hold()
            try:
                return step(*args, **kwargs)
            finally:
                self.release()

        return optimizer_step

    def _updating(self, update: Callable[..., None]) -> Callable[..., None]:
        def update_lr_schedulers(*args: Any, **kwargs: Any) -> None:
            # After a batch without a step, which only accumulated or was skipped, the rates are still multiplied.
            self.release()
            update(*args, **kwargs)

        return update_lr_schedulers

    def hold(self) -> None:
        """Multiply the rates for the coming step, unless they are already multiplied."""
        if self._held:
            return
        factor = self._factor()
        if factor == 1.0:
            return
        # Several groups may share one tensor, which must be multiplied only once.
        tensors: set[int] = set()
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                plain = group["lr"]
                if isinstance(plain, Tensor):
                    if id(plain) in tensors:
                        continue
                    tensors.add(id(plain))
                    # In place: compiled steps and CUDA graphs read this very tensor.
                    before = plain.clone()
                    plain.mul_(factor)
                    self._held.append((group, before, plain.clone(), factor))
                else:
                    group["lr"] = plain * factor
                    self._held.append((group, plain, group["lr"], factor))

    def release(self) -> bool:
        """Restore the plain rates of the optimizers; return whether the rates were multiplied."""
        held, self._held = self._held, []
        for group, plain, multiplied, factor in held:
            rate = group["lr"]
            if _differs(rate, multiplied):
                self._warn(float(multiplied), float(rate), factor)
                # The step used this rate without the factor. Without the division, the next step would multiply it.
                group["lr"] = rate.div_(factor) if isinstance(rate, Tensor) else rate / factor
            elif isinstance(rate, Tensor):
                rate.copy_(plain)
            else:
                group["lr"] = plain
        return bool(held)

    def _warn(self, multiplied: float, rate: float, factor: float) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        rank_zero_warn(
            f"{self._name}: a learning rate of {multiplied:.6g} was set to {rate:.6g} between the start of a batch and"
            f" the optimizer step. This rate is not multiplied by {factor:g}. Set rates in a scheduler or after the"
            " step, or compute them from the present rates of the optimizer"
        )

    def close(self) -> None:
        """Restore the plain rates, and stop multiplying."""
        self.release()
        self._patches.undo()


def _differs(rate: Rate, multiplied: Rate) -> bool:
    # Skip tensors on a device: to compare them, the host would wait for all queued work.
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return False
    return bool(rate != multiplied)


class LearningRateScaling(Callback):
    """Multiplies learning rates when replicas or accumulated batches add samples to an optimizer step.

    `n` is the ratio of two numbers: the samples of a step, and the samples for which you chose the learning rates. From
    the start of a batch to the end of its optimizer step, the callback multiplies the rates: by `n` (`linear`) or by
    the square root of `n` (`sqrt`). Tensor-parallel and pipeline-parallel ranks do not count, because they work on the
    same samples.

    Between two steps the rates are the plain ones. Schedulers compute from plain rates, so the callback works with any
    scheduler. It works with any optimizer, also under the strategies of Lightning. Callbacks that come before
    `LearningRateScaling` see the plain rate at the start of a batch; callbacks after it see the multiplied rate.

    Checkpoints store plain rates. A run that resumes with another number of replicas continues with the factor for that
    number. If `GradientAccumulationScheduler` changes a step, the factor follows. Beside `LearningRateScaling`,
    `AutoResume` scales no rates.

    The callback cannot see factors in your own code. It prints its changes. A rate that other code sets between the
    start of a batch and its step is not multiplied, with a warning.

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
        ramp_steps: Number of optimizer steps in which the factor rises linearly from 1 (`trainer.global_step`).

    Raises:
        ValueError: If an argument is out of range. Also on every rank before the first step, if the batch size is not
            known, or if `LearningRateFinder` searches for the rates.

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
            if value is not None:
                check_integer(name, value, least=1)
        check_integer("ramp_steps", ramp_steps, least=0)
        self.rule = rule
        self.base_batch_size = base_batch_size
        self.base_replicas = base_replicas
        self.ramp_steps = ramp_steps
        self.factor = 1.0
        # `global_step` at the first step of the warm-up.
        self._began: int | None = None
        self._rates: StepRates | None = None
        self._is_saving = False  # between the two hooks of a checkpoint inside a step

    # ---------------------------------------------------------------------------------------------------- checkpoint

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lightning asks callbacks before optimizers, so even a checkpoint inside a step holds plain rates.
        self._is_saving = self._rates is not None and self._rates.release()
        return {"began": self._began}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning has collected the states of the optimizers by now, so the step continues with multiplied rates.
        if self._is_saving and self._rates is not None:
            self._rates.hold()
        self._is_saving = False

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._began = state_dict["began"]

    # -------------------------------------------------------------------------------------------------- begin and end

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._began = None
        if any(is_a(callback, LearningRateFinder) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "`LearningRateFinder` must not be used with `LearningRateScaling`, which would scale the found rate"
                " again; got both; remove one of them"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._began is None:
            self._began = trainer.global_step
        self._adapt(trainer, is_start=True)
        self._rates = StepRates(trainer, lambda: self._factor_of_step(trainer.global_step), "LearningRateScaling")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # In each batch: `GradientAccumulationScheduler` may run after this callback at the start of an epoch.
        self._adapt(trainer)
        # The training step and later callbacks see the multiplied rate. Under manual optimization, the training step
        # also steps schedulers, which must see the plain rate.
        if self._rates is not None and pl_module.automatic_optimization:
            self._rates.hold()

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
        if self._rates is not None:
            self._rates.close()
            self._rates = None

    # ---------------------------------------------------------------------------------------------------- the factor

    def _factor_of_step(self, step: int) -> float:
        done = step - (self._began or 0)
        if done >= self.ramp_steps:
            return self.factor
        return 1.0 + (self.factor - 1.0) * done / self.ramp_steps

    def _adapt(self, trainer: Trainer, is_start: bool = False) -> None:
        now, reason = self._global_batch(trainer)
        if self.base_batch_size is None:
            ratio = now.replicas * now.accumulate / (self.base_replicas or 1)
        else:
            ratio = now.samples / self.base_batch_size
        wanted = ratio if self.rule == "linear" else sqrt(ratio)
        if is_start or wanted != self.factor:
            self.factor = wanted
            self._say(trainer, now, reason)

    def _global_batch(self, trainer: Trainer) -> tuple[GlobalBatch, str]:
        """Return the parts of a step, and a remark on the replicas."""
        replicas = mesh_of(trainer).data_parallel
        reason = ""
        if getattr(trainer.strategy, "steps_between_reductions", 1) > 1:
            reason = f"; the {replicas} replicas do not count, because each takes local steps"
            replicas = 1
        size = 1 if self.base_batch_size is None else _batch_size(trainer)
        return GlobalBatch(replicas, size, trainer.accumulate_grad_batches), reason

    def _say(self, trainer: Trainer, now: GlobalBatch, reason: str) -> None:
        if self.base_batch_size is None:
            step = f"{_replicas(now.replicas)} x {now.accumulate} accumulated"
            base = _replicas(self.base_replicas or 1)
        else:
            step, base = f"{now} = {now.samples} samples", f"{self.base_batch_size} samples"
        warm = f", in {self.ramp_steps} steps of warm-up" if self.ramp_steps else ""
        plain = list(dict.fromkeys(float(group["lr"]) for one in trainer.optimizers for group in one.param_groups))
        rates = ", ".join(f"{rate:.6g}" for rate in plain[:4])
        if self.factor != 1.0:
            rates += f" -> {', '.join(f'{self.factor * rate:.6g}' for rate in plain[:4])}"
        more = ", ..." if len(plain) > 4 else ""
        tell(
            f"LearningRateScaling: learning rates are multiplied by {self.factor:g} ({self.rule}): {step} in a step,"
            f" chosen for {base}{reason}; {rates}{more}{warm}. Do not scale them in your own code as well"
        )


def _replicas(number: int) -> str:
    return f"{number} replica{'s' if number > 1 else ''}"


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
