"""Private names of Lightning and torchmetrics that the library cannot do without, each with the reason."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

__all__ = ["ddp_hook_state", "logged_step", "should_update_logs", "wrapped_sampler"]

# -- strategies: launching, processes ----------------------------------------------------------------------------------

# -- strategies: DDP, FSDP ---------------------------------------------------------------------------------------------


def ddp_hook_state(strategy: Strategy) -> Any:
    """The state of the communication hook given to `DDPStrategy`, which is passed to its constructor only; or None."""
    return getattr(strategy, "_ddp_comm_state", None)


# -- loops and connectors ----------------------------------------------------------------------------------------------


def wrapped_sampler(wrapper: DistributedSamplerWrapper) -> Any:
    """The user's sampler, of which Lightning's wrapper keeps only the data set made from it."""
    return wrapper.dataset._sampler  # type: ignore[attr-defined]


# -- loggers, callbacks, profiler --------------------------------------------------------------------------------------


def should_update_logs(trainer: Trainer) -> bool:
    """Whether loggers are due in this step: Lightning decides it from counters of its loops that are private, too."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: Trainer) -> int:
    """The step under which Lightning logs: `global_step` counts each of several optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


# -- torchmetrics ------------------------------------------------------------------------------------------------------
