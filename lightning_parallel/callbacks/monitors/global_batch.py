"""A resumed run with another number of replicas: it keeps the samples of each optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_parallel.compat import Patches
from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.twins import is_a

__all__ = ["GlobalBatch", "adapt_trainer"]


@dataclass(frozen=True)
class GlobalBatch:
    """Composition of the samples of an optimizer step.

    Attributes:
        replicas: Number of replicas.
        batch_size: Samples in a batch of one replica.
        accumulate: Batches of each replica in an optimizer step.
    """

    replicas: int
    batch_size: int
    accumulate: int

    @property
    def at_once(self) -> int:
        """Samples of one batch of all replicas."""
        return self.replicas * self.batch_size

    @property
    def samples(self) -> int:
        """Samples of an optimizer step."""
        return self.at_once * self.accumulate

    def __str__(self) -> str:
        return f"{self.replicas} replicas x batches of {self.batch_size} x {self.accumulate} accumulated"

    def kept_by(self, replicas: int, batch_size: int) -> GlobalBatch:
        """Return the composition with the same samples in a step, for other replicas or another batch size.

        Raises:
            ValueError: If no number of accumulated batches gives the same samples.
        """
        at_once = replicas * batch_size
        if self.samples % at_once:
            raise ValueError(
                f"An optimizer step must have {self.samples} samples, as before the interruption ({self}); got"
                f" {replicas} replicas with batches of {batch_size}, together {at_once} samples, which does not divide"
                f" {self.samples}. Change the number of replicas or the batch size, or set"
                " `AutoResume(rescale_learning_rate=True)`, which changes the steps"
            )
        return GlobalBatch(replicas, batch_size, self.samples // at_once)


def adapt_trainer(trainer: Trainer, first: GlobalBatch, now: GlobalBatch, patches: Patches) -> None:
    """Adapt the batch counts of a Trainer so that they mean the same samples as at the first start of the run.

    Raises:
        ValueError: If a count would be no integer, or if a callback changes the number of accumulated batches.
    """
    if trainer.accumulate_grad_batches != now.accumulate:
        if any(is_a(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                f"The number of accumulated batches must change from {first} to {now}; got a"
                " `GradientAccumulationScheduler`, which sets it. Start with as many replicas as before, or without"
                " that callback"
            )
        tell(f"AutoResume: the run began with {first} and resumes with {now}")
        patches.replace(trainer, "accumulate_grad_batches", now.accumulate)
    # An exact fraction: a rounded ratio would hide a count that does not fit.
    ratio = Fraction(first.at_once, now.at_once)
    for name in ("limit_train_batches", "val_check_interval"):
        value = getattr(trainer, name)
        if isinstance(value, int) and ratio != 1:
            patches.replace(trainer, name, _scaled(f"Trainer({name}={value})", value, ratio, first, now))
    steps = Fraction(now.accumulate, first.accumulate)
    for config in trainer.lr_scheduler_configs:
        # Lightning compares this frequency with the number of batches, not of optimizer steps.
        if config.interval == "step" and config.frequency > 1 and steps != 1:
            frequency = _scaled(f"a scheduler's frequency of {config.frequency}", config.frequency, steps, first, now)
            patches.replace(config, "frequency", frequency)


def _scaled(what: str, value: int, ratio: Fraction, first: GlobalBatch, now: GlobalBatch) -> int:
    scaled = value * ratio
    if scaled.denominator != 1:
        raise ValueError(
            f"{what} must be an integer in batches of {first} and of {now}; got {float(scaled):g} for the second. Give"
            " a number that fits both, or a fraction of an epoch"
        )
    return int(scaled)
