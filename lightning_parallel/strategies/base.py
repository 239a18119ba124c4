"""What every strategy with a mesh owes the Trainer: processes, ranks, groups, data, logging and checkpoints.

Subclasses say how the module is cut (`parallelize`) and how a step runs. `notes` beside a hook name the trap in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import checkpoint as checkpoints
from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups, heartbeat
from lightning_parallel.compression import check_reducer
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.mesh import DATA, TENSOR, Axis, Mesh, Size
from lightning_parallel.strategies import checks, compression_axis, data, replicas
from lightning_parallel.strategies.exchange import MeshCollectives
from lightning_parallel.strategies.launcher import SpawnLauncher, announce_rank, connect, forget, meet
from lightning_parallel.strategies.precision import mesh_wide_norms, span_mesh
from lightning_parallel.tensor.sharding import Shard

__all__ = ["MeshStrategy", "StartMethod"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class MeshStrategy(MeshCollectives):
    """Base of the strategies whose ranks form a mesh.

    Args:
        sizes: Ranks along each axis, or `"auto"`.
        compression: Reducer of the gradients over the data-parallel axis.
        checkpoint_format: `full`, one ordinary Lightning checkpoint.
        process_group_backend: Backend of torch.distributed; chosen by the device when omitted.
        timeout: Deadline of every collective.
        start_method: How the Trainer starts the processes when no launcher did: `popen` runs the script again, the
            others start functions (notebooks: `fork`).
    """

    def __init__(
        self,
        sizes: Mapping[Axis, Size],
        compression: Any = None,
        checkpoint_format: Literal["full"] = "full",
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = default_pg_timeout,
        start_method: StartMethod = "popen",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        if checkpoint_format != "full":
            raise ValueError(f"`checkpoint_format` must be 'full', got {checkpoint_format!r}")
        if compression is not None:
            check_reducer(compression)
        self.num_nodes = 1
        self.compression = compression
        self._sizes = dict(sizes)
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method: StartMethod = start_method
        self._mesh: Mesh | None = None
        self._groups: MeshGroups | None = None
        self._device_mesh: DeviceMesh | None = None
        self._reducer: GradientReducer | None = None
        self._epoch_checked = -1

    # ------------------------------------------------------------------------------------------- for subclasses

    @property
    def rules(self) -> Mapping[str, Shard]:
        """How the module's tensors are sharded over the tensor axis, by name."""
        return {}

    def parallelize(self, module: LightningModule) -> None:
        """Cut `module` in place; called once per module, with the full weights equal on all ranks."""

    def check_optimizers(self) -> None:
        """Refuse optimizers that would compute something else than on one process."""
        assert self.lightning_module is not None
        checks.check_optimizers(self.optimizers, self.parameter_names, self.rules)
        for group in (self.groups.tensor_parallel, self.groups.data_parallel):
            checks.check_agreement(self.lightning_module, self.optimizers, self.parameter_names, group)

    def differentiate(self, closure_loss: Tensor, optimizer: Optional[Optimizer], *args: Any, **kwargs: Any) -> None:
        """Add the gradients of the loss to `.grad`, on this rank alone."""
        assert self.lightning_module is not None
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters of this rank that another rank counts in norms."""
        return frozenset()

    def join_gradients(self) -> None:
        """Complete the gradients within the replica, after each backward pass and the means over the replicas."""

    def gradient_reducer(self, module: LightningModule) -> GradientReducer:
        """The reducer of the module's gradients, for one `fit`."""
        options = compression_axis.reducer_options(self)
        return GradientReducer(dict(module.named_parameters()), self.groups.data_parallel, **options)

    # ---------------------------------------------------------------------------------- processes, ranks, groups

    @property
    def mesh(self) -> Mesh:
        """The mesh of all processes.

        Raises:
            ValueError: If the axis sizes do not multiply to the number of processes.
        """
        if self._mesh is None:
            sizes = dict(self._sizes)
            if sizes.get(TENSOR) == "auto" and sizes.get(DATA) == "auto" and self.num_nodes > 1:
                sizes[DATA] = self.num_nodes  # tensor parallelism inside the node, replicas across nodes
            self._mesh = Mesh.resolve(self.world_size, sizes)
        return self._mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's view of the mesh, with the axes' names."""
        if self._device_mesh is None:
            raise RuntimeError("the device mesh exists only while the Trainer runs; there is none yet")
        return self._device_mesh

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning to give each replica its part of the data: a single one reads what one process would."""
        return self.mesh.data_parallel > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> Optional[str]:
        return self._process_group_backend

    def set_world_ranks(self) -> None:
        """Tell the environment and both copies of `rank_zero_only` who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        announce_rank(self.global_rank)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = SpawnLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        mesh = self.mesh
        if self.mesh.data_parallel > 1:
            reset_seed()  # replicas of one process would go on with its random numbers
        else:
            warnings.filterwarnings("ignore", ".*recommended to use `self.log.*sync_dist=True")
        if self._groups is None:
            assert self.cluster_environment is not None
            connect(self.cluster_environment, self.root_device, self._process_group_backend, self._timeout)
            self._groups, self._device_mesh = meet(mesh, self.root_device.type, self._timeout)
        heartbeat.start()
        replicas.share_random_state(self.groups.replica)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh
        checks.check_callbacks(self.lightning_module.trainer)

    # ------------------------------------------------------------------------------------------------- the model

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        module = self.lightning_module
        self.accelerator.setup(trainer)
        if self._layer_sync is not None and trainer.state.fn == TrainerFn.FITTING:
            replicas.synchronize_batch_norm(module, self.groups.data_parallel)
        self.precision_plugin.convert_module(module)
        self.parallelize(module)
        self.model_to_device()
        replicas.start_equal(module, self.groups.data_parallel)
        data.scope_metrics(module, self.groups)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self.check_optimizers()
            self._reducer = self.gradient_reducer(module)
            self._epoch_checked = -1
        self.setup_precision_plugin()
        span_mesh(self.precision_plugin, self)
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
            data.share_plateau_metrics(self.lr_scheduler_configs, self.groups.data_parallel)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        failure: Exception | None = None
        try:
            super().setup_optimizers(trainer)
        except Exception as error:
            failure = error
        comm.raise_together(failure, self.groups.world)

    @override
    def on_exception(self, exception: BaseException) -> None:
        forget(self._groups)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None
        heartbeat.stop()
        super().teardown()

    # --------------------------------------------------------------------------------------------------- the data

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        coordinate = self.mesh.coordinate(self.global_rank)
        return {"num_replicas": self.mesh.data_parallel, "rank": coordinate.data_parallel}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return data.seed_workers(dataloader, self.mesh.coordinate(self.global_rank).data_parallel)

    # -------------------------------------------------------------------------------------------------- the steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._begin_step((args, kwargs))
        with mesh_wide_norms(self):  # under manual optimization modules clip inside their step
            return super().training_step(*args, **kwargs)

    def _begin_step(self, batch: Any) -> None:
        assert self.lightning_module is not None
        if self._epoch_checked != self.lightning_module.current_epoch:
            checks.check_same_batch(batch, self.groups.replica)
            self._epoch_checked = self.lightning_module.current_epoch
        if self._reducer is not None:
            self._reducer.refresh()
        compression_axis.follow_scale(self)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optional[Optimizer], *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with nullcontext() if self._reducer is None else self._reducer.backward():
            self.differentiate(closure_loss, optimizer, *args, **kwargs)
        self.join_gradients()
        compression_axis.drop_nonfinite_gradients(self)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Optional[Union[LightningModule, nn.Module]] = None,
        **kwargs: Any,
    ) -> Any:
        if self._reducer is not None and self._reducer.in_flight:
            self._reducer.reduce()  # a module under manual optimization called `loss.backward()` by itself
            compression_axis.drop_nonfinite_gradients(self)
        with mesh_wide_norms(self):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        replicas.share_buffers(self.lightning_module, self.groups.data_parallel)
        return output

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        context: AbstractContextManager = nullcontext() if self._reducer is None else self._reducer.no_sync()
        with context:
            yield

    # ------------------------------------------------------------------------------------------------ checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def _tensor_group(self) -> Group:
        return self.groups.tensor_parallel

    @property
    def _keeps_values(self) -> bool:
        """Whether what is merged over the tensor axis is needed on this rank."""
        return self.is_global_zero

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full state dict, with values on rank 0 only; called on every rank."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return checkpoints.merge_state_dict(state, self.rules, self._tensor_group, keep=self._keeps_values)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state = checkpoint["state_dict"]
        checkpoints.check_shapes(state, self.lightning_module, self.rules, "file")
        local = checkpoints.cut_state_dict(state, self.rules, self._tensor_group.rank)
        self.lightning_module.load_state_dict(local, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of `optimizer` with full tensors, values on rank 0 only; called on every rank."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return checkpoints.merge_optimizer_state(
            inner, self.parameter_names, self.rules, self._tensor_group, keep=self._keeps_values
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        local = [
            checkpoints.cut_optimizer_state(state, optimizer, self.parameter_names, self.rules, self._tensor_group.rank)
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"])
        ]
        super().load_optimizer_state_dict({"optimizer_states": local})

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        compression_axis.save(self, checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: Optional[bool] = None) -> dict[str, Any]:
        # Ranks may name the best checkpoint after their own replica's metric: all take that of rank 0.
        checkpoint = super().load_checkpoint(self.broadcast(checkpoint_path), weights_only)
        compression_axis.restore(self, checkpoint)
        return checkpoint

    @property
    def parameter_names(self) -> dict[int, str]:
        """Name of each parameter of the module, by `id`."""
        assert self.lightning_module is not None
        return {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
