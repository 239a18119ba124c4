"""Private names of Lightning's loops and connectors that an interrupted run needs; only callbacks use them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Optional

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_parallel.compat import Patches
from lightning_parallel.compat.lightning import PathLike

__all__ = [
    "announce_checkpoint",
    "batches_done",
    "before_each_batch",
    "epoch_values",
    "fetch_again",
    "go_on_training",
    "hold_sigterm",
    "ignore_sigterm",
    "loaders_of",
    "prepare_loader_by",
    "restore_by",
    "restore_epoch_values",
    "set_batches_done",
]


def hold_sigterm(trainer: Trainer, may_end: Callable[[], bool]) -> Callable[[], None]:
    """Let a run of `agree_on_sigterm` go on after a signal until `may_end`; return a function that undoes this."""
    connector = trainer._signal_connector
    connector.may_end = may_end  # type: ignore[attr-defined]
    return lambda: vars(connector).pop("may_end", None)


def ignore_sigterm(trainer: Trainer) -> None:
    """Ignore SIGTERM from the trainer's teardown on, which restores the signal handlers from before the run.

    After a signal, the process ends with a chosen status. The next signal must not kill it before that.
    """
    handlers = trainer._signal_connector._original_handlers
    if signal.SIGTERM in handlers:
        handlers[signal.SIGTERM] = signal.SIG_IGN


def before_each_batch(trainer: Trainer, function: Callable[[Any], None], patches: Patches) -> None:
    """Call `function` with the loop's data fetcher before each batch is read, where Lightning calls no hook.

    The previous batch is complete by then, with any validation after it.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def called_first(data_fetcher: Any) -> None:
        function(data_fetcher)
        advance(data_fetcher)

    patches.replace(loop, "advance", called_first)


def go_on_training(trainer: Trainer) -> None:
    """Clear the flag by which the loop of batches restarts, after its counters are set.

    With the flag, and with validation after the last batch, the loop would count that batch again and step schedulers.
    """
    trainer.fit_loop.epoch_loop.restarting = False


def fetch_again(data_fetcher: Any, count: int) -> None:
    """Read and drop `count` batches, which the loop has counted already."""
    for _ in range(count):
        next(data_fetcher)
    data_fetcher.fetched -= count


def prepare_loader_by(
    trainer: Trainer, prepare: Callable[[Any, bool, Callable[[], Any]], Any], patches: Patches
) -> None:
    """Let `prepare` give training loaders their samplers instead of Lightning.

    Args:
        trainer: The trainer.
        prepare: Called with a loader, whether Lightning would divide its samples among replicas, and the function of
            Lightning that prepares the loader.
        patches: Undoes it.
    """
    connector = trainer._data_connector
    default = connector._prepare_dataloader

    def prepared(dataloader: Any, shuffle: bool, mode: Any) -> Any:
        # By its value, because each package of Lightning has another class for modes.
        if mode.value != "train":
            return default(dataloader, shuffle, mode)
        divides = hasattr(dataloader, "sampler") and connector._requires_distributed_sampler(dataloader)
        return prepare(dataloader, divides, lambda: default(dataloader, shuffle, mode))

    patches.replace(connector, "_prepare_dataloader", prepared)


def loaders_of(trainer: Trainer) -> tuple[list[Any], str]:
    """Return the training loaders after their set-up, and the mode that combines several loaders."""
    combined = trainer.fit_loop._combined_loader
    return ([], "") if combined is None else (list(combined.flattened), combined._mode)


def restore_by(
    trainer: Trainer,
    modules: Callable[[Callable[[Any], None], Any], None],
    training: Callable[[Callable[[], None]], None],
    patches: Patches,
) -> None:
    """Let other functions restore a run from a checkpoint, in the two steps of Lightning.

    Args:
        trainer: The trainer.
        modules: Called with a function and the user's path. The function restores modules and callbacks from a path;
            from None, it restores nothing.
        training: Called with a function that restores loops, optimizers and schedulers from the same checkpoint.
        patches: Undoes it.
    """
    connector = trainer._checkpoint_connector
    of_modules, of_training = connector._restore_modules_and_callbacks, connector.restore_training_state

    def restore(path: Any = None, weights_only: Optional[bool] = None) -> None:
        modules(lambda chosen: of_modules(chosen, weights_only), path)

    patches.replace(connector, "_restore_modules_and_callbacks", restore)
    patches.replace(connector, "restore_training_state", lambda: training(of_training))


def announce_checkpoint(trainer: Trainer, path: Optional[PathLike]) -> None:
    """Let `checkpoint_of_run` return `path`; None ends this."""
    vars(trainer).pop("chosen_checkpoint", None)
    if path is not None:
        trainer.chosen_checkpoint = path  # type: ignore[attr-defined]


def epoch_values(trainer: Trainer) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Return the logged values of the running epoch: sums and weights of its means, and metrics for callbacks."""
    found = {}
    for name, result in trainer.fit_loop.epoch_loop._results.items():
        if result.is_tensor and result.meta.on_epoch and not result.has_reset:
            weight = [result.cumulated_batch_size] if result.meta.is_mean_reduction else []
            found[name] = [result.value, *weight]
    metrics = trainer._logger_connector._callback_metrics
    return found, {name: value for name, value in metrics.items() if isinstance(value, Tensor)}


def restore_epoch_values(trainer: Trainer, values: dict[str, list[Tensor]]) -> None:
    """Add the values of `epoch_values` to the means of the running epoch; remove the added entries from `values`."""
    for name, result in trainer.fit_loop.epoch_loop._results.items():
        if name not in values or not result.is_tensor:
            continue
        value, *weight = (tensor.to(result.value.device) for tensor in values.pop(name))
        if result.meta.is_max_reduction or result.meta.is_min_reduction:
            result.value = result.meta.reduce_fx(value, result.value)
        else:
            result.value = value + result.value
        if weight and result.meta.is_mean_reduction:
            result.cumulated_batch_size = weight[0] + result.cumulated_batch_size


def batches_done(trainer: Trainer) -> int:
    """Return the number of finished batches of the epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.completed


def set_batches_done(trainer: Trainer, count: int, ratio: float) -> None:
    """Set the number of finished batches of the epoch; batches of earlier epochs count `ratio` times."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    earlier = round((progress.total.completed - progress.current.completed) * ratio)
    for tracker, value in ((progress.total, earlier + count), (progress.current, count)):
        tracker.ready = tracker.started = tracker.processed = tracker.completed = value  # type: ignore[attr-defined]
