"""Private names of Lightning and torchmetrics that the library cannot do without, each with the reason."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from inspect import signature
from types import FrameType
from typing import Any, Optional, Union

import torch
from lightning.fabric.connector import _Connector
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.fabric.utilities.distributed import (
    DistributedSamplerWrapper,
    _destroy_dist_connection,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device

# The type of paths in the signatures of Lightning's hooks, which LightningCLI reads.
from lightning.fabric.utilities.types import _PATH as PathLike
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as FunctionLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as ScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.torch import compiled_call_of
from lightning_parallel.tracing.spans import is_verbose

__all__ = [
    "BackwardSyncControl",
    "FunctionLauncher",
    "PathLike",
    "ScriptLauncher",
    "agree_on_loaders",
    "agree_on_sigterm",
    "asynchronous_io",
    "averaged_model",
    "adds_up",
    "batch_value_of",
    "checkpoint_of_run",
    "ddp_hook_state",
    "early_optimizers",
    "finish_saves",
    "follow_sigterm",
    "grad_norm_functions",
    "init_deepspeed_distributed",
    "init_process_group",
    "innermost_io",
    "is_compiled",
    "is_end_of_tuning",
    "log_without_advice",
    "logged_step",
    "has_sums",
    "held_by",
    "metric_state_of",
    "own_numbers_of",
    "move_optimizers",
    "open_fabric",
    "prepared_batch",
    "process_group_backend_of",
    "reset_optimizers",
    "synchronizes_layers",
    "restore_metric_state",
    "restore_swapped_scheduler",
    "run_after_saves",
    "set_batch_value",
    "set_default_io",
    "set_device_mesh",
    "set_update_count",
    "should_update_logs",
    "state_dict_type_of",
    "states_of",
    "strategy_of",
    "sync_tensor",
    "take_first_entry",
    "tell",
    "timeout_of",
    "train_dataloader_of",
    "update_count_of",
    "wrapped_sampler",
    "at_end_of_epochs",
    "value_of_batches",
]


def tell(text: str) -> None:
    """Print a line on rank zero, if the library is verbose."""
    if is_verbose():
        rank_zero_info(text)


# -- strategies: launching, processes ----------------------------------------------------------------------------------


def init_process_group(
    environment: ClusterEnvironment,
    backend: str,
    timeout: timedelta | None,
    device: torch.device | None,
    store: torch.distributed.Store | None = None,
) -> None:
    """Start the default process group, if there is none, as Lightning's own strategies do, with its log line.

    `torch.distributed.init_process_group` would miss the settings of Lightning for each cluster environment.

    Args:
        environment, backend, timeout, device: See `connect` in `strategies.ranks.processes`.
        store: The store in which the processes meet; None for torch's default.
    """
    is_new = not torch.distributed.is_initialized()
    options: dict[str, Any] = {} if store is None else {"store": store}
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device, **options)
    if is_new and backend != "nccl" and "nccl" in backend:
        # Lightning registers this only for the backend `nccl`. torch warns of groups that are left at exit.
        atexit.register(_destroy_dist_connection)


def process_group_backend_of(strategy: ParallelStrategy) -> str:
    """Return the backend with which a strategy of Lightning will start its process group."""
    return strategy._get_process_group_backend()  # type: ignore[attr-defined]


def strategy_of(launcher: FunctionLauncher) -> Strategy:
    """Return the strategy of a launcher; the constructor takes it, and no getter returns it."""
    return launcher._strategy


def sync_tensor(tensor: Tensor, group: Any, reduce_op: Optional[Union[ReduceOp, str]]) -> Tensor:
    """Reduce `tensor` over `group`, with Lightning's names of operations and its casts: metrics expect its results."""
    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


def set_device_mesh(module: LightningModule, device_mesh: DeviceMesh) -> None:
    """Set `LightningModule.device_mesh`, which has no setter: Lightning's own strategy writes the attribute as well."""
    module._device_mesh = device_mesh


def agree_on_loaders(trainer: Trainer, agree: Callable[[Exception | None], None], patches: Patches) -> None:
    """Let a hook for loaders that fails on one rank fail on all ranks, until `patches` are undone.

    Otherwise the other ranks would wait for that rank in the barrier after the hook, or in the next collective.

    Args:
        trainer: The trainer.
        agree: Called on all ranks after each such hook, with its error; raises on all ranks if there is an error.
        patches: Undoes it.
    """

    def agreed(dataloader: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loaders, failure = None, None
            try:
                loaders = dataloader()
            except Exception as error:
                failure = error
            agree(failure)
            return loaders

        return call

    evaluation = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in (trainer.fit_loop, *evaluation, trainer.predict_loop):
        source = loop._data_source
        patches.replace(source, "dataloader", agreed(source.dataloader))


def agree_on_sigterm(trainer: Trainer, agree: Callable[[bool], bool], patches: Patches) -> Callable[[], None]:
    """End a run on SIGTERM between two steps, before the same step on all ranks, until `patches` are undone.

    Lightning's handler broadcasts at any place where the signal interrupts the rank. If every rank gets the signal, as
    from `timeout` or SLURM, this message meets messages of the step, and all ranks wait forever. The handler here only
    notes the signal.

    Args:
        trainer: The trainer, before it has registered its handlers.
        agree: Tells on every rank whether any rank got a signal; called on all ranks before each step.
        patches: Undoes it.

    Returns:
        A function to call before each step of validation, test and prediction. In training, Lightning calls it.

    Raises:
        SIGTERMException: In the returned function and in the training loop, if a rank got a signal.
    """
    connector = trainer._signal_connector
    received = False
    requeue = _Requeue(trainer, patches)

    def note(signum: Any, frame: FrameType | None) -> None:
        nonlocal received
        # As in Lightning's handler: the signal may have reached only the launching process. Passed on once.
        launcher = trainer.strategy.launcher
        if launcher is not None and not received:
            launcher.kill(signum)
        received = True

    def end_together() -> None:
        nonlocal received
        # Every rank gets the same answer from `agree`, so all ranks take the same branches below.
        if agree(received or requeue.is_due):
            # After a requeue the run goes on, unless a rank has also got SIGTERM.
            if requeue.happens(agree) and not agree(received):
                return
            received = True
            if getattr(connector, "may_end", _always)():
                connector.received_sigterm = True
                raise SIGTERMException

    patches.replace(connector, "_sigterm_notifier_fn", note)
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer.world_size > 1 and hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
        patches.replace(epoch_loop, "_broadcast_sigterm_tensor", end_together)
        return end_together
    # With one process, and in some supported versions, the training loop does not call `_broadcast_sigterm_tensor`.
    advance = epoch_loop.advance

    def ask_first(data_fetcher: Any) -> None:
        end_together()
        advance(data_fetcher)

    patches.replace(epoch_loop, "advance", ask_first)
    return end_together


def follow_sigterm(trainer: Trainer, agree: Callable[[bool], bool], patches: Patches) -> None:
    """Let a strategy of Lightning end on all ranks when one rank gets SIGTERM, until `patches` are undone.

    Lightning's handler broadcasts from the rank with the signal. Before each batch, all ranks receive from the first
    rank. If another rank gets the signal, these messages do not meet. Here all ranks ask all ranks, which takes no
    longer. Versions of Lightning without the question end only the rank with the signal.
    """
    if trainer.world_size > 1 and hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        agree_on_sigterm(trainer, agree, patches)


class _Requeue:
    """SLURM's signal before the end of a job's time: all ranks together call Lightning's handler, which requeues."""

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        environment = getattr(trainer.strategy, "cluster_environment", None)
        self._trainer, self._signal = trainer, None
        self._is_held = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        if self._is_held:
            note = lambda signum, _: vars(self).update(_signal=signum)  # noqa: E731
            self._save = patches.replace(trainer._signal_connector, "_slurm_sigusr_handler_fn", note)

    @property
    def is_due(self) -> bool:
        # Not in evaluation, where replicas may be at different places.
        return self._signal is not None and self._trainer.training

    def happens(self, agree: Callable[[bool], bool]) -> bool:
        """Save and requeue if any rank got the signal, and return whether one did; called on all ranks."""
        # The first two conditions are equal on all ranks, so either all ranks ask or none does.
        if not self._is_held or not self._trainer.training or not agree(self.is_due):
            return False
        signum, self._signal = self._signal, None
        self._save(signum, None)
        return True


def _always() -> bool:
    return True


def move_optimizers(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the state of optimizers to `device`; torch has no public function for it."""
    _optimizers_to_device(optimizers, device)


def is_end_of_tuning(error: BaseException) -> bool:
    """Tell whether an exception only ends a successful run of Lightning's `Tuner`."""
    return isinstance(error, _TunerExitException)


def is_compiled(module: LightningModule) -> bool:
    """Tell whether the full module was compiled, by `torch.compile(module)` or `module.compile()`."""
    return getattr(module, "_compiler_ctx", None) is not None or compiled_call_of(module) is not None


def reset_optimizers(strategy: Strategy) -> None:
    """Forget the optimizers and schedulers of an earlier run: `setup_optimizers` adds to them under some plugins."""
    strategy._reset_optimizers_and_schedulers()


class _Early(list[Any]):
    """A list that is filled at the first access."""

    def __init__(self, fill: Callable[[], Sequence[Any]]) -> None:
        super().__init__()
        self._fill: Callable[[], Sequence[Any]] | None = fill

    def _filled(self) -> list[Any]:
        # Cleared first, so that an access by `fill` itself does not fill the list again.
        fill, self._fill = self._fill, None
        if fill is not None:
            self.extend(fill())
        return self

    def __len__(self) -> int:
        return list.__len__(self._filled())

    def __iter__(self) -> Iterator[Any]:
        return list.__iter__(self._filled())

    def __getitem__(self, index: Any) -> Any:
        return list.__getitem__(self._filled(), index)


@contextmanager
def early_optimizers(strategy: Strategy, module: LightningModule) -> Iterator[None]:
    """Give steps in the block, before the set-up of the optimizers, optimizers that are made at the first access.

    Private attributes hold them, because the setter of the public attribute makes wrappers at once. No optimizer steps.
    """
    made: list[Any] = []

    # Optimizers and schedulers come from one call of the user's `configure_optimizers`.
    def make() -> list[Any]:
        if not made:
            made.extend(_init_optimizers_and_lr_schedulers(module))
        return made

    def wrapped() -> list[Any]:
        return [LightningOptimizer._to_lightning_optimizer(each, strategy) for each in make()[0]]

    with (
        patched(strategy, "_optimizers", _Early(lambda: make()[0])),
        patched(strategy, "_lightning_optimizers", _Early(wrapped)),
        patched(strategy, "lr_scheduler_configs", _Early(lambda: make()[1])),
    ):
        yield


def synchronizes_layers(strategy: ParallelStrategy) -> bool:
    """Tell whether the Trainer got `sync_batchnorm=True`, which reaches strategies only as a private plugin."""
    return strategy._layer_sync is not None


# -- strategies: checkpoints -------------------------------------------------------------------------------------------


def set_default_io(strategy: Strategy, make: Callable[[], CheckpointIO]) -> None:
    """Give a strategy its default checkpoint plugin, also inside wrappers, unless the user gave a plugin.

    The getter of the strategy does the same with another class. The public attribute means a plugin of the user.
    """
    io = strategy._checkpoint_io
    if io is None:
        strategy._checkpoint_io = make()
    elif isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = make()  # without effect if there is one


def innermost_io(io: CheckpointIO | None) -> CheckpointIO | None:
    """Return the plugin that reads and writes, inside its wrappers, whose base class is private."""
    while isinstance(io, _WrappingCheckpointIO):
        io = io.checkpoint_io
    return io


def asynchronous_io(io: CheckpointIO | None) -> AsyncCheckpointIO | None:
    """Return the plugin that saves in a thread: `io` or a plugin inside it; None without such a plugin."""
    while isinstance(io, _WrappingCheckpointIO) and not isinstance(io, AsyncCheckpointIO):
        io = io.checkpoint_io
    return io if isinstance(io, AsyncCheckpointIO) else None


def run_after_saves(io: AsyncCheckpointIO, function: Callable[[], None]) -> None:
    """Run `function` after all earlier saves of `io`, unless a save has failed; the thread of `io` is private."""

    def run() -> None:
        if io._error is not None:
            return
        try:
            function()
        except Exception as error:
            io._error = error

    # The executor has one thread, so `run` starts after all earlier saves.
    if io._executor is None:
        function()
    else:
        io._executor.submit(run)


def finish_saves(io: AsyncCheckpointIO) -> BaseException | None:
    """Wait for the saves of `io`; return the error of the last failed save, once.

    `teardown` would raise this error each time, also in place of the error that has ended a run.
    """
    try:
        io.teardown()
    except BaseException as error:
        # Any other error, such as an interrupt during the wait, is no failed save.
        if error is not io._error:
            raise
    failure, io._error = io._error, None
    return failure


# -- strategies: DDP, FSDP ---------------------------------------------------------------------------------------------


def ddp_hook_state(strategy: Strategy) -> Any:
    """Return the state of `DDPStrategy`'s communication hook, or None; no getter returns this argument."""
    return getattr(strategy, "_ddp_comm_state", None)


# -- strategies with compression -----


def timeout_of(strategy: DDPStrategy) -> timedelta | None:
    """Return the timeout of a strategy's collectives: further groups must have the same timeout."""
    return strategy._timeout


def state_dict_type_of(strategy: FSDPStrategy) -> str:
    """Return the type of checkpoints, `full` or `sharded`; no getter returns this argument."""
    return strategy._state_dict_type


def init_deepspeed_distributed(strategy: DeepSpeedStrategy) -> None:
    """Start the process group by DeepSpeed, the part of `setup_distributed` that does not require CUDA."""
    strategy._init_deepspeed_distributed()


def open_fabric(names: Mapping[str, Callable[[], Any]], enter: Callable[[Any], Any]) -> None:
    """Let Fabric turn strategies of this library, or their names, into its own by `enter`; in this process, forever.

    Args:
        names: Makes a strategy for each name.
        enter: Returns a strategy of Fabric for a strategy of the Trainer; it returns other objects unchanged.
    """
    init = _Connector.__init__

    # The constructor refuses strategies of the Trainer, and no registry holds objects.
    @wraps(init)
    def init_with_mesh(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature(init).bind(self, *args, **kwargs)
        given = bound.arguments.get("strategy")
        if isinstance(given, str) and given in names and given not in STRATEGY_REGISTRY:
            given = names[given]()
        if isinstance(given, Strategy):
            bound.arguments["strategy"] = enter(given)
        init(*bound.args, **bound.kwargs)

    # Not one of `Patches`: the constructor stays replaced for the process.
    _Connector.__init__ = init_with_mesh  # type: ignore[method-assign]


# -- loops and connectors ----------------------------------------------------------------------------------------------


def train_dataloader_of(trainer: Trainer) -> Any | None:
    """Return the training loader of the user; None if there is none. Lightning sets `train_dataloader` later."""
    source = trainer.fit_loop._data_source
    return source.dataloader() if source.is_defined() else None


class _ReadOnceError(Exception):
    """Says that the loaders can be read only once."""


def take_first_entry(loop: Any, copied: Callable[[Any], Any | None]) -> Any:
    """Set up a loop's data, take its first entry (batch, index, loader), and restore the loop.

    Args:
        loop: The loop.
        copied: Returns a copy of the loaders to read from; None if they can be read only once.

    Returns:
        The entry; None if there is none, or if the data can be read only once.
    """
    source = loop._data_source
    if source.instance is None:
        return None  # under Fabric, the user's own loop reads the data
    given = source.dataloader

    def dataloader() -> Any:
        loaders = copied(given())
        if loaders is None:
            raise _ReadOnceError
        return loaders

    try:
        # Copied before the set-up, which itself reads ahead if the length is unknown.
        with patched(source, "dataloader", dataloader):
            loop.setup_data()
    except _ReadOnceError:
        return None
    # Otherwise the run would go on with the copied loaders.
    loader, loop._combined_loader = loop._combined_loader, None
    return None if loader is None else next(iter(loader), None)


def prepared_batch(trainer: Trainer, batch: Any) -> Any:
    """Convert and move a batch as loops do, hooks included, by functions that are private to loops."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


def wrapped_sampler(wrapper: DistributedSamplerWrapper) -> Any:
    """Return the user's sampler; Lightning's wrapper only keeps a data set made from it."""
    return wrapper.dataset._sampler  # type: ignore[attr-defined]


# -- loggers, callbacks, profiler --------------------------------------------------------------------------------------


def should_update_logs(trainer: Trainer) -> bool:
    """Return whether loggers are due in this step; Lightning decides this from private counters of its loops."""
    return trainer._logger_connector.should_update_logs


def log_without_advice(patches: Patches) -> None:
    """Keep Lightning from recommending `sync_dist` to code that passes it, until `patches` are undone.

    This is for a run of one replica, whose processes log equal values. The strategy is not distributed, so Lightning
    clears the flag. It then recommends the flag, because `torch.distributed` is initialized.
    """
    patches.replace(result, "_distributed_is_initialized", lambda: False)


def logged_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs: `global_step` counts each of several optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def averaged_model(callback: Callback) -> nn.Module | None:
    """Return the copy with the averages of `WeightAveraging` or `StochasticWeightAveraging`, if there is one."""
    return callback._average_model  # type: ignore[attr-defined]


def restore_swapped_scheduler(callback: StochasticWeightAveraging, trainer: Trainer, patches: Patches) -> None:
    """Let a callback that has swapped the scheduler resume from checkpoints that are restored after `on_fit_start`.

    In `on_fit_start`, a resumed callback removes the user's scheduler, because the saved state belongs to the swapped
    scheduler. Here the callback has no state yet at that point, so the patch removes the scheduler at the load.
    """
    own = callback.load_state_dict

    def load_state_dict(state: dict[str, Any]) -> None:
        own(state)
        if callback._scheduler_state is not None:
            callback._clear_schedulers(trainer)

    patches.replace(callback, "load_state_dict", load_state_dict)


def grad_norm_functions() -> list[Any]:
    """Return `grad_norm` of each imported package of Lightning."""
    # Not by an import, which would load a package that the user does not use.
    modules = [sys.modules.get(f"{package}.utilities.grads") for package in ("lightning.pytorch", "pytorch_lightning")]
    return [module.grad_norm for module in modules if module is not None]


def checkpoint_of_run(trainer: Trainer) -> PathLike | None:
    """Return the checkpoint that the run in progress restores.

    `trainer.ckpt_path` holds it only after the restore, which for split or sharded modules follows the strategy's
    `setup`. Until then it is an argument of `Trainer._run`.
    """
    chosen: PathLike | None = getattr(trainer, "chosen_checkpoint", None)
    if chosen is not None:
        return chosen
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer:
            return frame.f_locals["ckpt_path"]
        frame = frame.f_back
    return trainer.ckpt_path


# -- torchmetrics ------------------------------------------------------------------------------------------------------


def states_of(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric by name; `metric_state` returns copies, and only in some supported versions."""
    return {name: getattr(metric, name) for name in metric._defaults}


def update_count_of(metric: Metric) -> int:
    """Return the number of updates of a metric; the public `update_count` has no setter."""
    return metric._update_count


def set_update_count(metric: Metric, count: int) -> None:
    """Set the number of updates of a metric, and forget its computed value."""
    metric._update_count = count
    # Otherwise `compute` would return its cached value.
    metric._computed = None


def batch_value_of(metric: Metric) -> Any:
    """Return the value of the last batch, which Lightning logs for a metric object."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Any) -> None:
    """Set the value of the last batch."""
    metric._forward_cache = value


def metric_state_of(metric: Metric) -> Sequence[Any]:
    """Return the values of a metric other than its states, for `restore_metric_state`."""
    return metric._update_count, metric._computed, metric._forward_cache


def restore_metric_state(metric: Metric, state: Sequence[Any]) -> None:
    """Restore the values of `metric_state_of`, which updates have changed."""
    metric._update_count, metric._computed, metric._forward_cache = state


class _Bare(Metric):
    """A minimal metric, which has only the attributes of every metric."""

    def update(self) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Do nothing."""


_NAMES_OF_ALL = frozenset(vars(_Bare()))
_CHANGING = {"_update_count", "_computed", "_forward_cache"}
_NAMES_OF_DICTS = frozenset(vars(nn.ModuleDict()))


def held_by(metric: Metric | MetricCollection) -> dict[str, Any]:
    """Return the values of a metric, or of a collection, that its calls may change: states, counts, the result."""
    if isinstance(metric, MetricCollection):
        # The values say which metrics of the collection share their states.
        return {name: value for name, value in vars(metric).items() if name not in _NAMES_OF_DICTS}
    kept = _CHANGING | own_numbers_of(metric).keys()
    return {name: value for name, value in vars(metric).items() if name in kept}


def own_numbers_of(metric: Metric) -> dict[str, Any]:
    """Return the states, numbers, tensors and lists that only this metric has, such as a wrapper's batch count."""
    kinds = (Tensor, int, float, list, type(None))
    own = {
        name: value for name, value in vars(metric).items() if name not in _NAMES_OF_ALL and isinstance(value, kinds)
    }
    return {**own, **states_of(metric)}


def adds_up(metric: Metric | MetricCollection) -> bool:
    """Tell whether a metric has the same states after several batches as after one batch of all their samples."""
    if isinstance(metric, MetricCollection):
        # After the first batch, a collection compares states to find the metrics that share them.
        is_open = metric._enable_compute_groups and not metric._groups_checked
        return not is_open and all(adds_up(each) for each in metric.children() if isinstance(each, Metric))
    kind = type(metric).__module__
    known = kind.startswith("torchmetrics.") and not kind.startswith(
        ("torchmetrics.wrappers", "torchmetrics.aggregation")
    )
    return known and has_sums(metric)


def has_sums(metric: Metric) -> bool:
    """Tell whether all states of a metric are sums, extremes and lists, which accumulate from batch to batch."""
    return all(
        isinstance(metric._defaults[name], list) if rule is None else rule in _ADDING
        for name, rule in metric._reductions.items()
    )


_ADDING = (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)


def value_of_batches(metric: Metric, batches: Sequence[dict[str, Any]]) -> Any:
    """Return the value of several batches together, from the states of each batch; None if states cannot give it.

    The public `merge_state` exists only in some supported versions, and refuses metrics whose `forward` updates twice.
    """
    lists = {name for name, state in batches[0].items() if isinstance(state, list)}
    if isinstance(metric, BaseAggregator) or any(
        metric._reductions[name] is None for name in batches[0].keys() - lists
    ):
        return None  # a mean of means, or states that only the metric itself can merge
    own, states = metric_state_of(metric), states_of(metric)
    try:
        with torch.no_grad():
            for count, batch in enumerate(batches, 1):
                before = states_of(metric)
                for name, state in batch.items():
                    setattr(metric, name, state)
                metric._update_count = count
                if count > 1:
                    metric._reduce_states(before)
            # The method of the class, because the wrapper in the object caches the value and includes other ranks.
            value = type(metric).compute(metric)
    finally:
        for name, state in states.items():
            setattr(metric, name, state)
        restore_metric_state(metric, own)
    return value.squeeze() if isinstance(value, Tensor) and value.numel() == 1 else value


def at_end_of_epochs(
    trainer: Trainer, function: Callable[[], object], patches: Patches, is_first: bool = False
) -> None:
    """Call a function on every rank at the end of an epoch, before any hook, until `patches` are undone.

    In these hooks, progress bars ask for the values of metrics on rank zero alone. With `is_first`, the function runs
    before Lightning computes values of the epoch, and in `predict`, too.
    """

    def call(own: Callable[[], Any]) -> Any:
        if is_first:
            function()
        result = own()
        if not is_first:
            function()
        return result

    connector, loop = trainer._logger_connector, trainer.predict_loop
    patches.replace(connector, "epoch_end_reached", partial(call, connector.epoch_end_reached))
    if is_first:
        # `predict` computes no values, so it does not call the connector.
        patches.replace(loop, "on_run_end", partial(call, loop.on_run_end))
