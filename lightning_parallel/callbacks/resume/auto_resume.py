"""A run that continues by itself after a restart: after a crash, after a pre-emption, or on other machines."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Optional, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.callbacks.resume.folder import ResumeFolder, SaveClock
from lightning_parallel.callbacks.resume.point import ResumePoint, TrainingData
from lightning_parallel.callbacks.resume.rank_state import rank_state, restore_metrics, restore_random
from lightning_parallel.checkpoint.place import touched
from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.default_group import all_processes
from lightning_parallel.compat.interrupted import (
    announce_checkpoint,
    before_each_batch,
    hold_sigterm,
    ignore_sigterm,
    prepare_loader_by,
    restore_by,
    restore_epoch_values,
)
from lightning_parallel.compat.lightning import agree_on_sigterm, tell
from lightning_parallel.compat.twins import Callback, is_a

__all__ = ["AutoResume"]

_KEY = "auto_resume"

_UNREADABLE = (ValueError, RuntimeError, OSError, EOFError, KeyError, pickle.UnpicklingError)
"""Errors that a read of a damaged checkpoint raises."""

_ended: set[Path] = set()
"""Folders of the successful `fit` calls of this process."""


class AutoResume(Callback):
    """Continues an interrupted `fit` when you start the same script again.

    Use `AutoResume` with `torchrun --max-restarts`, or with any other program that starts a script again. The callback
    saves checkpoints into a separate folder. `trainer.fit(...)` continues from the newest checkpoint in this folder.
    The `ckpt_path` that you pass to `fit` counts for the first start only.

    With the same number of processes, the final weights equal the weights of an undisturbed run bit for bit. Dropout is
    included. Two conditions hold: `num_workers=0`, and an iterable data set of unknown length must draw no random
    numbers while it is read.

    * **Within an epoch**, no sample is read twice or left out. The training loader gets a sampler whose order depends
      only on the seed and the epoch. The callback skips your own batch sampler, and reads an iterable data set, up to
      the place of the checkpoint. Both need the same number of replicas. Loaders with a `state_dict` restore
      themselves.
    * **On another number of processes**, the samples of an optimizer step stay the same. The callback changes
      `accumulate_grad_batches` and the batch counts of the Trainer. Sizes of `"auto"` follow the new mesh.
    * **On SIGTERM** to one process or to all, every rank ends after the same optimizer step. The ranks save one
      checkpoint and exit with status 75 (`AutoResume.EXIT_PREEMPTED`). Until then, another SIGTERM is ignored.
    * **A damaged checkpoint** is skipped on all ranks with a warning. The checkpoint before it is used instead.

    The folder must be on a file system that all processes share. Use one folder for one `fit`. A finished run is not
    continued: to train anew, remove the folder or pass another one.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import AutoResume

        trainer = Trainer(max_epochs=3, callbacks=[AutoResume(dirpath="resume", every_n_train_steps=500)])
        trainer.fit(MyModule(), MyData())  # started again, it continues from the newest checkpoint
        ```

    Args:
        dirpath: Folder of the checkpoints. None selects `auto_resume` under the trainer's `default_root_dir`.
        every_n_train_steps: Number of optimizer steps between two checkpoints.
        every_n_minutes: Minutes between two checkpoints. The default is 10 if you pass neither interval.
        keep: Number of checkpoints to keep. Older ones are removed when a new one is complete.
        rescale_learning_rate: Whether to keep `accumulate_grad_batches` when the number of replicas changes. The
            learning rates are then multiplied by the ratio of the samples in an optimizer step.

    Raises:
        ValueError: If a number is too small.
    """

    EXIT_PREEMPTED: ClassVar[int] = 75
    """Exit status of processes that were told to end: the run is to be started again (`EX_TEMPFAIL`)."""

    def __init__(
        self,
        dirpath: Optional[str] = None,
        every_n_train_steps: Optional[int] = None,
        every_n_minutes: Optional[float] = None,
        keep: int = 2,
        rescale_learning_rate: bool = False,
    ) -> None:
        for name, value in (("every_n_train_steps", every_n_train_steps), ("every_n_minutes", every_n_minutes)):
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be greater than 0; got {value}")
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1; got {keep}")
        if every_n_train_steps is None and every_n_minutes is None:
            every_n_minutes = 10.0
        self.dirpath = dirpath
        self.every_n_train_steps = every_n_train_steps
        self.every_n_minutes = every_n_minutes
        self.keep = keep
        self.rescale_learning_rate = rescale_learning_rate
        self._undo: list[Callable[[], object]] = []
        self._forget()

    def _forget(self) -> None:
        self._folder = ResumeFolder(Path())
        self._found: list[Path] = []
        self._damaged: list[Path] = []
        self._state: dict[str, Any] | None = None
        self._epoch_values: dict[str, Any] = {}
        self._point: ResumePoint | None = None
        self._clock = SaveClock(None, Group.alone("none"))
        self._saved_step = 0
        self._is_saving = False

    # ----------------------------------------------------------------------------------------------- begin and end

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._leave()
        self._forget()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if sum(isinstance(callback, AutoResume) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("A Trainer must have one `AutoResume`; got several, but a run resumes from one checkpoint")
        # Only after the process group exists: all processes take the checkpoints that the first process finds.
        self._folder, self._found = comm.broadcast_from(lambda: self._look(trainer), _world())
        path = self._folder.path
        if path.resolve() in _ended and self._found:
            raise ValueError(
                f"Each `fit` must have its own folder of `AutoResume`; got {path}, which an earlier `fit` of this"
                " process used. Give each `fit` a folder: `AutoResume(dirpath=...)`"
            )
        replicas = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        place = replicas.get("num_replicas", 1), replicas.get("rank", 0)
        # From the first rank: replicas share one order of the samples, which the seed decides.
        seed = comm.broadcast_object(int(os.environ.get("PL_GLOBAL_SEED", 0)), _world())
        self._point = ResumePoint(trainer, TrainingData(seed, place), self.rescale_learning_rate)
        self._clock = SaveClock(self.every_n_minutes, _world())
        self._patch(trainer)

    def _look(self, trainer: Trainer) -> tuple[ResumeFolder, list[Path]]:
        base = str(self.dirpath or trainer.default_root_dir)
        if "://" in base:
            raise ValueError(
                f"The folder of `AutoResume` must be on a file system, because checkpoints are renamed when they are"
                f" complete; got {base}. Give a folder that all processes share: `AutoResume(dirpath=...)`"
            )
        folder = ResumeFolder(Path(base if self.dirpath else Path(base) / "auto_resume").absolute())
        folder.create()
        return folder, folder.found()

    def _patch(self, trainer: Trainer) -> None:
        assert self._point is not None
        patches = Patches()
        self._undo = [patches.undo, self._point.release, lambda: announce_checkpoint(trainer, None)]
        restore_by(trainer, self._restore_modules, self._restore_training, patches)
        if self._found:
            # Strategies look for a plan beside the checkpoint, before they read the checkpoint.
            announce_checkpoint(trainer, self._found[0])
        prepare_loader_by(trainer, self._point.prepare, patches)
        before_each_batch(trainer, lambda fetcher: self._between_batches(trainer, fetcher), patches)
        # Hold it back in evaluation, where each replica ends by itself, and within a step: checkpoints lack accumulated
        # gradients.
        self._undo.append(hold_sigterm(trainer, lambda: self._may_save))
        if not hasattr(trainer.strategy, "begin_batch"):  # strategies of this package agree by themselves
            agree = trainer.strategy.reduce_boolean_decision
            agree_on_sigterm(trainer, lambda flag: agree(flag, all=False), patches)
        # `ResumePoint` moves the loaders to their place. Lightning does not know that, and would warn.
        self._undo.append(_ignore_warning("You're resuming from a checkpoint that ended before the epoch ended"))

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop(0)()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    # ----------------------------------------------------------------------------------------------------- restore

    @property
    def _path(self) -> Path | None:
        return self._found[0] if self._found else None

    def _restore_modules(self, restore: Callable[[Any], None], given: Any) -> None:
        """Restore modules and callbacks from the newest readable checkpoint; without one, from the user's path."""
        # Kept for `_restore_training`, which may begin again with an older checkpoint.
        self._restore = restore
        self._given = given
        while True:
            # None also after a failed attempt, whose `on_load_checkpoint` may have run.
            self._state = None
            failure = self._attempt(lambda: restore(self._path or given))
            if failure is None:
                return
            self._pass_over(failure)

    def _restore_training(self, restore: Callable[[], None]) -> None:
        while failure := self._attempt(restore):
            self._pass_over(failure)
            self._restore_modules(self._restore, self._given)
        if self._path is not None:
            tell(f"AutoResume: the run goes on from {self._path}")
            self._set_aside_damaged()
        assert self._point is not None
        if self._state is not None:
            self._point.restore(self._state["data"])
        self._saved_step = self._point.trainer.global_step
        self._clock.restart(self._saved_step)

    def _attempt(self, restore: Callable[[], None]) -> Exception | None:
        """Restore; return, on all ranks, the error of any rank."""
        assert self._point is not None
        strategy = self._point.trainer.strategy
        load = strategy.load_checkpoint

        def load_together(*args: Any, **kwargs: Any) -> Any:
            found, failure = None, None
            try:
                found = load(*args, **kwargs)
            except _UNREADABLE as error:
                failure = error
            # If one rank cannot read its file, other ranks must not wait for it in the restore of modules.
            comm.raise_together(failure, _world())
            return found

        failure = None
        try:
            with patched(strategy, "load_checkpoint", load_together):
                restore()
        except _UNREADABLE as error:
            failure = error
        try:
            comm.raise_together(failure, _world())
        except _UNREADABLE as error:
            return error
        return None

    def _pass_over(self, failure: Exception) -> None:
        if self._path is None:  # the user's checkpoint: there is no older one
            raise failure
        if len(self._found) == 1:
            raise RuntimeError(
                f"One of the checkpoints in {self._folder.path} must be readable; got none, down to the oldest,"
                f" {self._path.name}. If you changed the model or versions, undo that. To start from the beginning,"
                " remove the folder"
            ) from failure
        damaged = self._found.pop(0)
        self._damaged.append(damaged)
        rank_zero_warn(
            f"AutoResume: {damaged} CANNOT BE READ ({type(failure).__name__}: {failure}); the run goes on from the one"
            f" before it, {self._found[0].name}, and repeats the steps between them"
        )
        assert self._point is not None
        announce_checkpoint(self._point.trainer, self._found[0])

    def _set_aside_damaged(self) -> None:
        def rename() -> None:
            for path in self._damaged:
                path.rename(path.with_name(f"damaged-{path.name}"))

        if self._damaged:
            comm.broadcast_from(rename, _world())

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Only in a `fit`: an evaluation of a checkpoint also calls this hook.
        if self._undo:
            self._state = checkpoint.get(_KEY)

    # ------------------------------------------------------------------------------------------------- each batch

    def _between_batches(self, trainer: Trainer, fetcher: Any) -> None:
        """Resume before the first batch, and save if a checkpoint is due; the previous batch is over."""
        assert self._point is not None
        if self not in trainer.callbacks:  # type: ignore[attr-defined]
            return  # a callback runs trial batches, such as a search for learning rates
        if self._state is not None:
            self._go_on(trainer, fetcher, self._state)
            self._state = None
        step = trainer.global_step
        if self._may_save and step > self._saved_step and self._is_due(step):
            self._save(trainer)

    @property
    def _may_save(self) -> bool:
        """Whether the run trains, and holds no accumulated gradients; valid between batches."""
        return self._point is not None and self._point.trainer.training and self._point.is_between_steps

    def _is_due(self, step: int) -> bool:
        every = self.every_n_train_steps
        # Ask the clock first, as it communicates: all ranks must ask it at the same steps.
        is_time = self._clock.is_due(step)
        return is_time or (every is not None and step // every > self._saved_step // every)

    def _go_on(self, trainer: Trainer, fetcher: Any, state: dict[str, Any]) -> None:
        assert self._point is not None
        self._point.go_on(fetcher, state["data"])
        is_same = _with_context(state["layout"]) == _layout(trainer)
        # In another layout, all ranks take the state of rank 0: at a first start, too, all begin with equal numbers.
        mine = state["ranks"][_world().rank if is_same else 0]
        if is_same:
            restore_metrics(mine, trainer.lightning_module)
            self._epoch_values = dict(mine["epoch"])
            trainer.callback_metrics.update(mine["callback_metrics"])
        # Last, because the calls above may draw random numbers.
        restore_random(mine, trainer, trainer.lightning_module)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._point is not None:
            self._point.begin_epoch()
        self._epoch_values = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._epoch_values:
            restore_epoch_values(trainer, self._epoch_values)

    # -------------------------------------------------------------------------------------------------------- save

    def _save(self, trainer: Trainer, is_end: bool = False) -> None:
        """Save a checkpoint, and remove old ones; every rank must call it."""
        place = self._folder.place(trainer.global_step, is_end)
        strategy = trainer.strategy
        # An asynchronous checkpoint is complete only later. The write of a sharded checkpoint is atomic already.
        is_async = is_a(strategy.checkpoint_io, AsyncCheckpointIO) or getattr(strategy, "async_saves", False)
        is_aside = not is_async and not getattr(strategy, "is_sharded", False)
        written = self._folder.aside(place) if is_aside else place
        self._is_saving = True
        try:
            # Another host removes a hidden checkpoint that no process touches, so a long save must touch it.
            with touched(written) if is_aside else nullcontext():
                trainer.save_checkpoint(written)
        finally:
            self._is_saving = False
        if is_async:
            self._drop_later(trainer, place)
        else:
            comm.broadcast_from(lambda: self._folder.commit(place, self.keep, is_aside), _world())
        self._saved_step = trainer.global_step
        self._clock.restart(self._saved_step)

    def _drop_later(self, trainer: Trainer, place: Path) -> None:
        """Remove old checkpoints after the write to `place`; strategies run their tasks in order."""
        if not trainer.is_global_zero:
            return
        older = [path for path in self._folder.found() if path != place]
        for path in older[self.keep - 1 :]:
            trainer.strategy.remove_checkpoint(path)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Other callbacks save at other places of the loop. Lightning alone restores their checkpoints.
        if self._is_saving:
            assert self._point is not None
            ranks = comm.all_gather_object(rank_state(trainer, pl_module), _world())
            checkpoint[_KEY] = {"data": self._point.state(), "layout": _layout(trainer), "ranks": ranks}

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Without this checkpoint, a script that fails after `fit` would repeat the last steps.
        if self._point is not None:
            self._save(trainer, is_end=True)
            _ended.add(self._folder.path.resolve())

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if is_a(exception, SIGTERMException) and self._undo:
            # The error is a `SystemExit`: the interpreter reads its `code` at the very end.
            exception.code = self.EXIT_PREEMPTED
            # Another signal must not interrupt the save below.
            ignore_sigterm(trainer)
            if self._may_save:
                if trainer.global_step > self._saved_step:
                    self._save(trainer)
                comm.barrier(_world())
                tell(
                    f"AutoResume: told to end, after step {trainer.global_step}; start the script again to go on from"
                    f" {self._folder.path}"
                )
        self._leave()


def _ignore_warning(message: str) -> Callable[[], None]:
    """Ignore warnings that begin with `message`; return a function that removes only this filter."""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=message)
    added = warnings.filters[0]

    def undo() -> None:
        if added not in before and added in warnings.filters:
            cast(list[Any], warnings.filters).remove(added)

    return undo


def _layout(trainer: Trainer) -> list[int]:
    """Return the sizes of the mesh, or the number of processes."""
    mesh = getattr(trainer.strategy, "mesh", None)
    return [_world().size] if mesh is None else list(mesh.shape)


def _with_context(layout: Sequence[int]) -> list[int]:
    """Return saved sizes of a mesh; a mesh of three axes was saved before there was a context axis."""
    if len(layout) == 3:
        data, pipeline, tensor = layout
        return [data, pipeline, 1, tensor]
    return list(layout)


def _world() -> Group:
    """Return the group of all processes, even while the group of the replicas is torch's default group."""
    return Group.of(all_processes())
