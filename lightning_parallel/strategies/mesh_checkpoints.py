"""Checkpoints of the mesh strategies: the hooks by which the Trainer saves and loads.

`full` is one file, gathered on rank zero, which stock Lightning also reads. `sharded` is a folder to which each rank
writes its part; no rank ever holds more than its part and one tensor. Any layout loads either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Optional, get_args

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.checkpoint import (
    Checkpoints,
    DistributedCheckpoint,
    Folder,
    ModelNames,
    SavedCheckpoint,
    ShardedWriter,
    as_parts,
    is_distributed_checkpoint,
    is_sharded_checkpoint,
)
from lightning_parallel.compat import FOREIGN, ParallelState
from lightning_parallel.compat.default_group import all_processes_as_default
from lightning_parallel.compat.lightning import PathLike, move_optimizers
from lightning_parallel.compat.twins import is_a
from lightning_parallel.data_parallel import ParameterSlices
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.strategies.compressed.mesh import MeshCompression
from lightning_parallel.strategies.compressed.state_files import remove_compression
from lightning_parallel.strategies.optimizers.checks import WholeGroups
from lightning_parallel.strategies.ranks.processes import MeshProcesses
from lightning_parallel.strategies.setup.divide import save_plan
from lightning_parallel.strategies.whole.between_runs import EVERYWHERE_BYTES, share_tensors
from lightning_parallel.strategies.whole.saved_modules import holds_modules, put_whole_copies, weakly
from lightning_parallel.tensor.sharding import Shard

__all__ = ["CheckpointFormat", "MeshCheckpoints"]

CheckpointFormat = Literal["full", "sharded"]
"""One ordinary Lightning checkpoint, or a folder with a file of each rank."""


class MeshCheckpoints(MeshProcesses):
    """Saves and loads what a mesh of processes holds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine: PipelineEngine | None = None
        self._rules: dict[str, Shard] = {}
        self._compression: MeshCompression | None = None
        self._whole: WholeGroups | None = None
        self._slices: ParameterSlices | None = None
        self._is_restored = False
        self._last_state = weakly({})
        self._writer: ShardedWriter | None = None
        self._opened: SavedCheckpoint | DistributedCheckpoint | None = None

    def set_checkpoint_format(self, checkpoint_format: CheckpointFormat, async_save: bool) -> None:
        """Set how checkpoints are written.

        Raises:
            ValueError: If there is no such format, or it cannot be written in the background.
        """
        if checkpoint_format not in get_args(CheckpointFormat):
            raise ValueError(f"`checkpoint_format` must be 'full' or 'sharded'; got {checkpoint_format!r}")
        if async_save and checkpoint_format == "full":
            raise ValueError(
                "`async_save` writes only sharded checkpoints; set `checkpoint_format='sharded'` as well, or give"
                " Lightning's `AsyncCheckpointIO` as a plugin of the Trainer"
            )
        self.checkpoint_format, self.async_save = checkpoint_format, async_save

    @property
    def is_sharded(self) -> bool:
        """Whether checkpoints are written as folders."""
        return self.checkpoint_format == "sharded"

    @property
    def async_saves(self) -> bool:
        """Whether training goes on while checkpoints are written."""
        return self.is_sharded and (self.async_save or isinstance(self.checkpoint_io, AsyncCheckpointIO))

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def slices(self) -> ParameterSlices | None:
        """The slices of parameters that replicas update; None unless `zero_stage` divides something."""
        return self._slices

    @property
    def differing(self) -> frozenset[str]:
        """What may differ between replicas now: none, or some of `parameter`, `buffer` and `optimizer`."""
        return frozenset() if self._slices is None else frozenset({"optimizer"})

    @property
    def checkpoints(self) -> Checkpoints:
        """Gathers what a checkpoint holds from the ranks of a replica, and scatters it again."""
        return Checkpoints(
            self.module,
            self._rules,
            self.groups.tensor_parallel,
            self.groups.pipeline_parallel,
            ParallelState.of(self.module).names or ModelNames.of(self.module),
            self.root_device,
            is_saved=self.groups.data_parallel.rank == 0,
            last_rank=0 if self.engine is None else self.engine.last_rank,
            replicas=self.groups.data_parallel,
            slices=self._slices,
        )

    @property
    def _saved(self) -> Checkpoints:
        return replace(self.checkpoints, as_parts=self.is_sharded)

    # ------------------------------------------------------------------------------------------------------- the model

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict; called on every rank.

        Returns:
            Values on rank zero only. For a sharded checkpoint tensors without data, which know what this rank writes.
        """
        if not self._is_restored:
            self.agree_on_changes()
        if not self.is_sharded:
            state = self.full_state_dict()
            self._last_state = weakly(state)
            self._share_with_hooks(state)
            return state
        if self._is_restored:
            return as_parts(self.module.state_dict(), self.is_global_zero)
        return self._saved.gather_state()

    def full_state_dict(self) -> dict[str, Any]:
        """Return the full state dict, values on rank zero only; called on every rank."""
        return self.module.state_dict() if self._is_restored else self.checkpoints.gather_state()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        failure: Exception | None = None
        state = checkpoint["state_dict"]
        try:
            source = "file" if self._opened is None else str(self._opened.folder)
            part = self.checkpoints.scatter_state(state, source, strict)
            with ParallelState.of(self.module).own_parts():
                self.module.load_state_dict(part, strict=strict)
        except Exception as error:  # of a damaged file nearly any
            failure = error
        # A rank whose part does not fit must not leave the others waiting in the next collective.
        comm.raise_together(failure, self.groups.world)
        self._check_shared_parts()

    def _check_shared_parts(self) -> None:
        if self._opened is None:
            return
        failure: Exception | None = None
        try:
            self._opened.check_shared_parts(self.groups.tensor_parallel)
        except ValueError as error:
            failure = error
        comm.raise_together(failure, self.groups.world)

    # -------------------------------------------------------------------------------------------------- the optimizers

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of `optimizer` with full tensors, see `lightning_module_state_dict`."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = self._saved.gather_optimizer(inner, self._recorded_groups(inner))
        if "state" not in state:
            return state  # of one that has other keys; every rank has it whole
        values = {(index, key): value for index, entry in state["state"].items() for key, value in entry.items()}
        if not self.is_sharded and self._share_with_hooks(values):
            for (index, key), value in values.items():
                state["state"][index][key] = value
        return state

    def _share_with_hooks(self, values: dict[Any, Any]) -> bool:
        """Give every rank what rank zero has gathered, if hooks look at it and it is not large; tell whether it did."""
        trainer = self.module.trainer
        callbacks = [one for one in trainer.callbacks if is_a(one, Callback)]  # type: ignore[attr-defined]
        owners = [(self.module, LightningModule), *((one, Callback) for one in callbacks)]
        looks = any(
            type(owner).__module__.partition(".")[0] not in FOREIGN
            and is_overridden("on_save_checkpoint", owner, parent=kind)
            for owner, kind in owners
        )
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        if not looks or sum(value.nbytes for value in tensors.values()) > EVERYWHERE_BYTES:
            return False
        share_tensors(tensors, self.groups.world, self.root_device)
        values.update(tensors)
        return True

    def _recorded_groups(self, optimizer: Optimizer) -> list[list[str]]:
        return [] if self._whole is None else self._whole.recorded.get(optimizer, [])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._whole is not None:
            self._whole.restore(self.module.trainer)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            failure: Exception | None = None
            part: dict[str, Any] = {}
            try:
                part = self.checkpoints.scatter_optimizer(state, optimizer, self._recorded_groups(optimizer))
            except Exception as error:  # of a damaged file nearly any
                failure = error
            if self._opened is not None:
                comm.raise_together(failure, self.groups.world)
            elif failure is not None:
                raise failure
            # One after the other: the next one is read when this one is where it belongs.
            optimizer.load_state_dict(part)
            move_optimizers([optimizer], self.root_device)
        self._check_shared_parts()

    # -------------------------------------------------------------------------------------------------------- the file

    def _sharded_writer(self) -> ShardedWriter:
        if self._writer is None:
            mesh = self.mesh
            layout = {
                "data_parallel": mesh.data_parallel,
                "pipeline_parallel": mesh.pipeline_parallel,
                "tensor_parallel": mesh.tensor_parallel,
            }
            group = self.groups.world
            if self.async_saves:
                with all_processes_as_default():
                    group = self.groups.between_hosts("checkpoint")
            self._writer = ShardedWriter(group, layout, self.async_saves, rank_zero_info)
        return self._writer

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None) -> None:
        self.check_saved(checkpoint)
        path, is_apart = self.path_of_parts(filepath)
        if self._compression is not None:
            # Before the file is written: all ranks gather, and rank 0 alone writes.
            self._compression.save(checkpoint, path, self._rules, self.is_sharded)
        if not self.is_sharded:
            self._put_whole_copies(checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        left_out = self._sharded_writer().save(checkpoint, path, storage_options, is_apart)
        if is_apart:
            self._sharded_writer().wait()  # the upload is next
        if left_out:
            rank_zero_warn(
                f"The checkpoint leaves out {', '.join(f'`{name}`' for name in left_out)}: a sharded checkpoint"
                " holds only numbers, text and tensors. `self.save_hyperparameters(ignore=[...])` leaves them out."
            )
        if self.module.trainer.state.status != TrainerStatus.RUNNING:
            # After a run nothing waits for it any more.
            self.end_saves()
        self.together(lambda: self.save_beside(filepath))

    def check_saved(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse what would be saved of this rank's part alone; every rank calls it.

        Raises:
            HookError: On every rank.
        """

    def _put_whole_copies(self, checkpoint: dict[str, Any]) -> None:
        """Replace modules of the hyperparameters by whole ones; every rank must call it."""
        known, self._last_state = dict(self._last_state), weakly({})
        if self._is_restored:
            return
        writes = self.is_global_zero
        found = self.together(lambda: writes and holds_modules(checkpoint, self.module))
        if self.broadcast(found):
            gather = self.checkpoints.gather_tensors
            self.together(lambda: put_whole_copies(checkpoint, self.module, known, gather, writes))

    @override
    def save_beside(self, filepath: PathLike) -> None:
        if self.is_global_zero and self.engine is not None:
            save_plan(self.engine.plan, filepath)

    @override
    def begin_batch(self, flag: bool) -> bool:
        # In evaluation replicas may have different numbers of batches: the next step of training will tell.
        is_training = self.module.trainer.training
        failed = is_training and self._writer is not None and self._writer.failure is not None
        changed = is_training and self.has_changed
        is_set = super().begin_batch(flag or failed or changed)
        if not is_set or not is_training:
            return is_set
        # Ranks learn of a failed save one after the other, and stop at the same step.
        flags, failures, changes = zip(*comm.all_gather_object((flag, failed, changed), self.groups.world))
        if any(failures):
            assert self._writer is not None
            self._writer.wait()
        if any(changes):
            self.adopt_changes()
        return any(flags)

    # ------------------------------------------------------------------------------------- what changes during a run

    @property
    def has_changed(self) -> bool:
        """Whether the model or its optimizers are not those of the step before."""
        return False

    def adopt_changes(self) -> None:
        """Go on with what the model and its optimizers have become; every rank must call it.

        Raises:
            ValueError: On every rank, if that cannot be.
        """

    def agree_on_changes(self) -> None:
        """Adopt what has changed on any rank; every rank must call it."""
        if comm.on_any_rank([self.has_changed], self.groups.world)[0]:
            self.adopt_changes()

    def end_saves(self) -> None:
        """Wait for what is being written, at the end of a run.

        Raises:
            Exception: On every rank, if it could not be written, unless another error has ended the run.
        """
        if isinstance(self._opened, SavedCheckpoint):
            self._opened.close()
        writer, self._writer, self._opened = self._writer, None, None
        if writer is None:
            return
        writer.close()
        failure = writer.failure
        if failure is None:
            return
        if self.module.trainer.state.status != TrainerStatus.INTERRUPTED:
            raise failure
        rank_zero_warn(f"A checkpoint could not be written: {failure}")

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        if not self.is_global_zero:
            return
        if self._writer is not None:
            self._writer.remove(str(filepath))
            self.remove_beside(filepath)
        else:
            super().remove_checkpoint(filepath)

    @override
    def remove_beside(self, filepath: PathLike) -> None:
        remove_compression(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        # Ranks may name the best checkpoint after their own replica's metric: all take that of rank 0.
        path = self.broadcast(checkpoint_path)
        self._opened = None
        kind = self.broadcast(_kind_of(str(path)) if self.is_global_zero else "")
        if kind:
            checkpoint = self._open_folder(str(path), is_ours=kind == "sharded")
        else:
            checkpoint = super().load_checkpoint(path, weights_only)
        if self._compression is not None:
            failure: Exception | None = None
            try:
                self._compression.restore(checkpoint, path, self._rules)
            except Exception as error:  # of a damaged file nearly any
                failure = error
            comm.raise_together(failure, self.groups.world)
            self._check_shared_parts()
        return checkpoint

    def _open_folder(self, path: str, is_ours: bool) -> dict[str, Any]:
        failure: Exception | None = None
        checkpoint: dict[str, Any] = {}
        opened: SavedCheckpoint | DistributedCheckpoint | None = None
        try:
            if is_ours:
                opened = SavedCheckpoint.open(path, self.groups.world)
            else:
                opened = DistributedCheckpoint.open(path, self.groups.world)
            checkpoint = opened.checkpoint()
        except Exception as error:
            failure = error
        comm.raise_together(failure, self.groups.world)
        self._opened = opened
        return checkpoint


def _kind_of(path: str) -> str:
    """Return what kind of folder is at `path`: "sharded", "distributed", or "" for anything else."""
    if is_distributed_checkpoint(path):
        return "distributed"
    # Also a folder that is none, to say so.
    folder = Folder.at(path)
    return "sharded" if folder.fs.isdir(folder.path) or is_sharded_checkpoint(path) else ""
