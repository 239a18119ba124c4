"""Starts the processes of a mesh, connects them, and lets the Trainer communicate between them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, Optional, Union
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import ApartError, Group, MeshGroups, RollCall, start_heartbeat
from lightning_parallel.compat import Patches, is_read_by_user, patched
from lightning_parallel.compat.default_group import all_processes_as_default, check_connected, default_group_kept
from lightning_parallel.compat.lightning import (
    FunctionLauncher,
    ScriptLauncher,
    agree_on_loaders,
    agree_on_sigterm,
    init_process_group,
    is_end_of_tuning,
    set_device_mesh,
    strategy_of,
    sync_tensor,
)
from lightning_parallel.compat.ray import ray_device
from lightning_parallel.mesh import AXES, CONTEXT, DATA, TENSOR, Axis, Mesh, Size
from lightning_parallel.strategies.checkpoints.files import SavesFiles
from lightning_parallel.strategies.deferred.init import deferred_init
from lightning_parallel.strategies.options import check_launch
from lightning_parallel.strategies.ranks.chance import SharedChance
from lightning_parallel.strategies.ranks.order import describe_apart
from lightning_parallel.strategies.ranks.replicas import seed_workers, share_random_state

__all__ = [
    "EndingLauncher",
    "MeshProcesses",
    "SpawnLauncher",
    "StartMethod",
    "announce_rank",
    "connect",
    "discard_groups",
    "process_groups",
    "start_method_here",
]


class _CachedGroups(NamedTuple):
    token: str
    world: dist.ProcessGroup | None
    groups: MeshGroups
    device_mesh: DeviceMesh


# Groups hold threads and sockets until the process ends, so fits of one process share them.
_cached_groups: dict[tuple[Mesh, str, timedelta | None], _CachedGroups] = {}


def _as_run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a method of the Trainer, and restore the default group of all processes afterwards."""
    with default_group_kept():
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if is_end_of_tuning(error):
                raise
            told = comm.explained(error)
            # Report at once: the next callback that gets the error may wait for other ranks.
            comm.report_failure(told)
            if told is error:
                raise
            raise told from error


class RunLauncher(ScriptLauncher):
    """Starts processes by running the script again."""

    # Only the launcher sees the end of a run: hooks such as `on_fit_end` come after the teardown of the strategy.
    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Optional[Trainer] = None, **kwargs: Any) -> Any:
        return super().launch(partial(_as_run, function), *args, trainer=trainer, **kwargs)


class _Ended(NamedTuple):
    """Describes the end of a process without results: by Ctrl-C, or with a status, as after SIGTERM."""

    is_interrupted: bool
    code: Any


def _as_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return _as_run(function, *args, **kwargs)
    except (KeyboardInterrupt, SystemExit) as end:
        return _Ended(isinstance(end, KeyboardInterrupt), getattr(end, "code", None))


class EndingLauncher(FunctionLauncher):
    """Starts processes as functions, and ends when they end. Lightning's launcher would wait forever for results."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Optional[Trainer] = None, **kwargs: Any) -> Any:
        try:
            return super().launch(partial(_as_function, function), *args, trainer=trainer, **kwargs)
        except NotImplementedError as error:  # of the launcher itself; errors of processes have another type
            raise RuntimeError(
                "A Trainer can run `fit` only once where it starts processes as functions, as in a notebook; got a"
                " second call. Create a new Trainer for it. To continue, pass `ckpt_path=` with a checkpoint of the"
                " first one. [LP006]"
            ) from error

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        return results if isinstance(results, _Ended) else super()._collect_rank_zero_results(trainer, results)

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        if isinstance(worker_output, _Ended):
            raise KeyboardInterrupt if worker_output.is_interrupted else SystemExit(worker_output.code)
        super()._recover_results_in_main_process(worker_output, trainer)


class SpawnLauncher(EndingLauncher):
    """Returns the full state dict to the main process instead of the shards of rank 0."""

    # Lightning copies `module.state_dict()` of rank 0 here, and gives a strategy no hook to change that.
    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        if isinstance(results, _Ended):
            return results
        # Every rank must gather, since the gather is a collective, though only rank 0 returns the result.
        full = strategy_of(self).full_state_dict()  # type: ignore[attr-defined]
        module = trainer.lightning_module
        with patched(module, "state_dict", lambda *_, **__: full):
            return super()._collect_rank_zero_results(trainer, results)


def announce_rank(rank: int) -> None:
    """Set the rank of this process in both copies of `rank_zero_only`."""
    # Lightning's loggers and warnings use one copy, its utilities use the other.
    for decorator in (rank_zero_only, utilities_rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]


def connect(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta | None
) -> None:
    """Start the default process group, if there is none.

    Args:
        environment: Source of rank, world size and address.
        device: Device of this rank.
        backend: Backend of torch.distributed; None for the default of the device.
        timeout: Deadline of collectives.

    Raises:
        RuntimeError: If the processes cannot connect.
    """
    if backend is None:
        # Add gloo for objects and flags: through a GPU, they would wait for its queued kernels.
        of_device = dist.Backend.default_device_backend_map.get(device.type, "gloo")
        backend = "gloo" if of_device == "gloo" else f"cpu:gloo,{device.type}:{of_device}"
    store = None
    # The launcher's store may hold addresses of an earlier attempt, whose processes are gone.
    if comm.may_outlive_attempts() and not dist.is_initialized():
        store = _store_of_attempt(environment, timeout or default_pg_timeout)
    # NCCL needs the device before the first collective. With a device, gloo would try to split groups like NCCL, and
    # fail.
    try:
        init_process_group(environment, backend, timeout, device if "nccl" in backend else None, store)
    except RuntimeError as error:
        if "gloo" not in backend or "connect" not in str(error).lower():
            raise
        # gloo uses the address of the host's name, which on some systems is a loopback address.
        raise RuntimeError(
            f"{error}\n"
            "gloo could not connect the processes. If hosts have several networks, or their names resolve to"
            " 127.0.0.1 or 127.0.1.1, name the network between them in GLOO_SOCKET_IFNAME (see `ip addr`) [LP002]"
        ) from error


def _store_of_attempt(environment: ClusterEnvironment, timeout: timedelta) -> dist.Store:
    """Return a store without keys of an earlier attempt, though the launcher keeps one store for all attempts."""
    rank, world_size = environment.global_rank(), environment.world_size()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    # As in `init_process_group`, which sets no timeout on a given store.
    store.set_timeout(timeout)
    return comm.attempt_store(store, rank, world_size, timeout)


def process_groups(mesh: Mesh, device_type: str, timeout: timedelta | None) -> tuple[MeshGroups, DeviceMesh]:
    """Return the groups of `mesh`. Groups of an earlier fit are reused if every rank still has them.

    Every rank must call it at the same point, after `connect`.
    """
    settings = (mesh, device_type, timeout)
    world = Group.of()
    known = _cached_groups.get(settings)
    if known is not None and known.world is not world.process_group:
        known = None  # torch.distributed was restarted
    # All ranks reuse their groups, or none does: to make groups is a collective. A rank that failed in the last fit has
    # discarded its groups. The token distinguishes groups with the same settings.
    views = comm.all_gather_object((known.token if known else None, uuid4().hex), world)
    tokens = {token for token, _ in views}
    if known is None or tokens != {known.token}:
        groups = MeshGroups(mesh, timeout=timeout)
        device_mesh = init_device_mesh(device_type, mesh.shape, mesh_dim_names=AXES)
        known = _CachedGroups(views[0][1], world.process_group, groups, device_mesh)
        _cached_groups[settings] = known
    return known.groups, known.device_mesh


def discard_groups(groups: MeshGroups | None) -> None:
    """Let later fits make new groups: after an error, messages may still be under way in `groups`.

    Groups of other meshes and deadlines are discarded, too: the heartbeat of a failed run aborts all groups.
    """
    # A run that failed before it had groups leaves the groups of earlier runs intact.
    if any(cached.groups is groups for cached in _cached_groups.values()):
        _cached_groups.clear()


StartMethod = Literal["auto", "popen", "spawn", "fork", "forkserver"]
"""How Lightning starts processes without a launcher."""


def start_method_here(asked: StartMethod) -> Literal["popen", "spawn", "fork", "forkserver"]:
    """Return the start method: the user's, or by default the best one for this session."""
    if asked != "auto":
        return asked
    # The same test as in Lightning. A notebook is no script to run again, and no process can import its classes.
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return "fork" if is_interactive and "fork" in multiprocessing.get_all_start_methods() else "popen"


class MeshProcesses(SavesFiles):
    """Starts the processes of a mesh and lets the Trainer, loggers and callbacks communicate over it.

    Args:
        sizes: Ranks along each axis, or `"auto"`.
        process_group_backend: See `MeshStrategy`.
        timeout: See `MeshStrategy`.
        start_method: See `MeshStrategy`.
        kwargs: All arguments of `ParallelStrategy`.
    """

    def __init__(
        self,
        sizes: Mapping[Axis, Size],
        process_group_backend: Optional[str],
        timeout: Optional[timedelta],
        start_method: StartMethod,
        **kwargs: Any,
    ) -> None:
        Mesh(**{axis: size for axis, size in sizes.items() if size != "auto"})  # checks each size
        check_launch(process_group_backend, timeout, start_method, StartMethod)
        super().__init__(**kwargs)
        self._plugins = {name: value for name, value in kwargs.items() if name != "precision_plugin"}
        self.num_nodes = 1
        # Keep the user's `auto`: the next Trainer may have another number of processes.
        self._sizes = dict(sizes)
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method_here(start_method)
        self._mesh: Mesh | None = None
        self._groups: MeshGroups | None = None
        self._device_mesh: DeviceMesh | None = None
        self._built_apart = False
        self._batches: RollCall | None = None
        self._ends: RollCall | None = None
        self._chance = SharedChance(Group.alone("replica"))
        # Hash of the batches so far, see `content_of`.
        self._content = 0

    # ---------------------------------------------------------------------------------- processes, ranks, groups

    @property
    def module(self) -> LightningModule:
        """The user's module.

        Raises:
            RuntimeError: If the Trainer has not connected one yet.
        """
        if self.lightning_module is None:
            raise RuntimeError("The strategy has no module yet; it gets one from `Trainer.fit`, `validate`, ...")
        return self.lightning_module

    @property
    def mesh(self) -> Mesh:
        """The mesh of all processes.

        Raises:
            ValueError: If the axis sizes do not multiply to the number of processes.
        """
        if self._mesh is None:
            self._mesh = self.mesh_for(self.world_size, self.num_nodes)
        return self._mesh

    def mesh_for(self, num_processes: int, num_nodes: int = 1) -> Mesh:
        """Return the mesh of this strategy for a number of processes.

        Raises:
            ValueError: If the axis sizes do not multiply to the number of processes.
        """
        sizes = dict(self._sizes)
        inner = [axis for axis in (CONTEXT, TENSOR) if sizes.get(axis) == "auto"]
        if inner and sizes.get(DATA) == "auto" and num_nodes > 1:
            sizes[DATA] = num_nodes  # tensor or context parallelism inside each node, replicas across nodes
        return Mesh.resolve(num_processes, sizes)

    @property
    def groups(self) -> MeshGroups:
        """This rank's process groups.

        Raises:
            RuntimeError: Before the processes have met.
        """
        if self._groups is None:
            raise RuntimeError("The process groups exist only while the Trainer runs; there is none yet")
        return self._groups

    @property
    @override
    def every_rank(self) -> Group:
        return self._groups.world if self._groups is not None else Group.alone("world")

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as torch's `DeviceMesh`, with the names of the axes."""
        if self._device_mesh is None:
            raise RuntimeError("The device mesh exists only while the Trainer runs; there is none yet")
        return self._device_mesh

    @property
    def is_distributed(self) -> bool:
        """True if there are several replicas, between which Lightning then divides the data."""
        return self.mesh.data_parallel > 1

    @property
    @override
    def root_device(self) -> torch.device:
        device = ray_device(self.cluster_environment)
        if device is not None:
            return device
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes on this node; for the user's code, the replicas there, which divide batches."""
        count = len(self.parallel_devices) if self.parallel_devices is not None else 0
        if not is_read_by_user():
            return count
        return max(1, count * self.mesh.data_parallel // self.mesh.world_size)

    @property
    @override
    def world_size(self) -> int:
        """Number of processes. The user's code gets the number of replicas, here and in `Trainer.world_size`.

        The user's code scales learning rates and shards data by this number, as under DDP.
        """
        return self.mesh.data_parallel if is_read_by_user() else super().world_size

    @property
    def process_group_backend(self) -> Optional[str]:
        """The user's backend of torch.distributed; None for the default of the device."""
        return self._process_group_backend

    def forget_processes(self) -> None:
        """Forget the mesh of the last Trainer, which may have had another number of processes."""
        self._mesh = None
        self._groups = None
        self._device_mesh = None
        self._batches = None
        self._ends = None

    def set_world_ranks(self) -> None:
        """Set the rank of this process in the cluster environment and in both copies of `rank_zero_only`."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        announce_rank(self.global_rank)

    def meet(self) -> None:
        """Connect the processes before the mesh is known. `choose_mesh` sets the mesh afterwards."""
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        connect(self.cluster_environment, self.root_device, self._process_group_backend, self._timeout)

    def has_axis(self, axis: Axis) -> bool:
        """Tell whether the user has asked for more than one rank along an axis, or for `"auto"`."""
        return self._sizes.get(axis, 1) != 1

    def arguments_of_processes(self) -> dict[str, Any]:
        """Return the arguments that a strategy of Fabric takes as well."""
        return {
            **self._plugins,
            "process_group_backend": self._process_group_backend,
            "timeout": self._timeout,
            "start_method": self._start_method,
        }

    def choose_mesh(self, sizes: Mapping[Axis, Size]) -> None:
        """Set the sizes of the axes, equal on all ranks, before the groups of the mesh exist."""
        self._sizes = dict(sizes)
        self._mesh = None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = RunLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = SpawnLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        # Check first: with too few processes, the Trainer would look up a device that does not exist.
        check_connected(self.cluster_environment)
        super().setup_environment()
        self.set_world_ranks()
        mesh = self.mesh
        if mesh.world_size == 1 and "auto" in self._sizes.values():
            rank_zero_warn(
                f"`{type(self).__name__}` runs on one device, so the model is neither sharded nor split; set"
                " `devices` (and `num_nodes`) of the Trainer [LP003]"
            )
        if mesh.data_parallel > 1:
            reset_seed()  # as in Lightning's DDP: every process starts from the global seed
        if self._groups is None:
            assert self.cluster_environment is not None
            connect(self.cluster_environment, self.root_device, self._process_group_backend, self._timeout)
            # A hook of another run may have started this run, and have another default group.
            with all_processes_as_default():
                self._groups, self._device_mesh = process_groups(mesh, self.root_device.type, self._timeout)
        start_heartbeat()
        # A new name for each run: ranks must not compare their calls with calls of an earlier run.
        comm.name_run(comm.broadcast_object(uuid4().hex, self.groups.world))
        if 1 < self.groups.replica.size <= RollCall.MOST_RANKS:
            self._batches = RollCall(self.groups.replica, "batches", comm.shared_key(self.groups.replica))
        if 1 < self.groups.world.size <= RollCall.MOST_RANKS:
            self._ends = RollCall(self.groups.world, "ends of runs", comm.shared_key(self.groups.world))
        # Before the user's `setup` and `configure_model`, which draw initial values.
        share_random_state(self.groups.replica)
        self._chance = SharedChance(self.groups.replica)
        set_device_mesh(self.module, self.device_mesh)
        # Last: from here on the user's code runs, for which the default group means the replicas.
        self.groups.make_data_default()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: Optional[bool] = None) -> Generator[None, None, None]:
        """Build modules without data. `setup` gives data to the part of this rank, equal to one process with the seed.

        Args:
            empty_init: Without effect, since large tensors get no memory anyway.
        """
        if self._groups is None:
            # `trainer.init_module()` runs before the groups exist, so ranks may draw different numbers.
            self._built_apart = True
        # A rank whose `configure_model` fails would leave the other ranks waiting in the next collective.
        with (
            comm.failing_together(self.every_rank),
            deferred_init(self.root_device),
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    @override
    def on_exception(self, exception: BaseException) -> None:
        discard_groups(self._groups)
        # Report before the teardown, which ends the heartbeat: peers that miss this rank read the reason in the store.
        comm.report_failure(exception)
        comm.wait_until_heard()
        super().on_exception(exception)

    def keep_together(self, trainer: Trainer, patches: Patches) -> Callable[[], None]:
        """Let all ranks end together on a signal or a failed loader of one rank; see `agree_on_sigterm`."""
        agree_on_loaders(trainer, self._raise_on_all, patches)
        if self.groups.replica.size > 1:
            self._chance.follow(trainer, self.module, self.groups.pipeline_parallel.size == 1, patches)
            # Meet before loaders draw the order of an epoch, since unequal generators would give other orders.
            for loop, name in ((trainer.fit_loop, "setup_data"), (trainer.fit_loop.epoch_loop, "on_run_start")):
                patches.replace(loop, name, self._met("the start of an epoch (train)", getattr(loop, name)))
        return agree_on_sigterm(trainer, self.begin_batch, patches)

    def _met(self, place: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._meet_replica(place, False)
            return method(*args, **kwargs)

        return call

    @property
    def replicas_meet(self) -> bool:
        """Whether replicas wait for each other before the next batch."""
        return True

    def _raise_on_all(self, failure: Exception | None) -> None:
        if isinstance(failure, ValueError) and "rank should be in the interval" in str(failure):
            failure = ValueError(
                f"{failure} {self.groups.replica.size} ranks hold one replica of the model and read the same data,"
                " so the sampler must not use the global rank. Give it the coordinate along the data axis:"
                " `DistributedSampler(dataset, **trainer.strategy.distributed_sampler_kwargs)`"
            )
        comm.raise_together(failure, self.groups.world)

    def begin_batch(self, flag: bool) -> bool:
        """Begin a batch on all ranks together; tell whether any rank has the flag.

        Raises:
            RuntimeError, ValueError: See `_meet_replica`.
        """
        trainer = self.module.trainer
        assert trainer.state.stage is not None
        flag = self._meet_replica(f"a batch of epoch {trainer.current_epoch} ({trainer.state.stage.value})", flag)
        # In evaluation, replicas may have different numbers of batches, so replicas do not meet.
        group = self.groups.replica
        if trainer.training and self.groups.data_parallel.size > 1:
            if not self.replicas_meet:
                return False  # a rank with the flag asks again before the next batch
            # The roll call has shared the flag inside each replica, so one message between replicas reaches all ranks.
            flag, group = comm.on_any_rank([flag], self.groups.data_parallel)[0], self.groups.world
        if flag:
            # The store ends with the first process, which must wait until the other ranks have read their notes.
            comm.barrier(group)
        return flag

    def _meet_replica(self, place: str, flag: bool) -> bool:
        """Wait for the other ranks of the replica before a batch; tell whether any rank of the replica has the flag.

        Raises:
            RuntimeError: If another rank is not about to begin a batch at this place.
            ValueError: If another rank has read other batches so far.
        """
        replica = self.groups.replica
        if replica.size == 1:
            return flag
        if self._batches is None:
            return self._meet_many(flag)
        try:
            patience = self._timeout or default_pg_timeout
            note = f"{int(flag)} {self._content} {self._chance.note()}"
            notes = self._batches.meet(place, patience.total_seconds(), note)
        except ApartError as error:
            raise error.told(describe_apart(error)) from None
        # All ranks read the same notes in the same order, so all raise the same error.
        flags, contents, *_ = zip(*(note.split() for note in notes))
        if len(set(contents)) > 1:
            different = [str(rank) for rank, other in zip(replica.ranks, contents) if other != contents[0]]
            raise ValueError(
                f"The ranks {list(replica.ranks)} hold one replica and must get the same batches; got other data on"
                f" rank {', '.join(different)} than on rank {replica.ranks[0]} at {place}. Shard data by the"
                " data-parallel coordinate (`trainer.strategy.distributed_sampler_kwargs`), not by the global rank."
                " Use the same seed and the same files on every rank [LP007]"
            )
        self._chance.compare([note.split()[2:] for note in notes])
        return "1" in flags

    def meet_at_end(self) -> None:
        """Wait for all ranks at the end of a run, before its last collectives.

        Raises:
            RuntimeError: If a hook has failed on another rank, or ranks are at different places.
        """
        if self._ends is None:
            return
        patience = self._timeout or default_pg_timeout
        try:
            self._ends.meet("the end of the run", patience.total_seconds())
        except ApartError as error:
            raise error.told(describe_apart(error)) from None

    def _meet_many(self, flag: bool) -> bool:
        """Meet by a collective, for replicas with too many ranks for the store; batches are not compared."""
        note = self._chance.note()
        # The collective computes OR. A bit that is set on one rank and clear on another shows different notes.
        bits = [bool(zlib.crc32(note.encode()) >> place & 1) for place in range(32)]
        flag, *found = comm.on_any_rank([flag, *bits, *(not bit for bit in bits)], self.groups.replica)
        if any(one and zero for one, zero in zip(found[:32], found[32:])):
            self._chance.compare([other.split() for other in comm.all_gather_object(note, self.groups.replica)])
        return flag

    # ------------------------------------------------------------------------------------------------ collectives

    @override
    def reduce(
        self,
        tensor: Union[Tensor, Any],
        group: Optional[Any] = None,
        reduce_op: Optional[Union[ReduceOp, str]] = "mean",
    ) -> Union[Tensor, Any]:
        """Reduce over the replicas, unless `group` is given: the ranks of a replica hold the same value."""
        if not isinstance(tensor, Tensor):
            return tensor
        if group is None and self.groups.data_parallel.process_group is None:
            return tensor
        return sync_tensor(tensor, group or self.groups.data_parallel.process_group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Communicate between hosts: a message through devices would wait for their queued kernels.
        # For `all`, ask whether any rank has the negated decision, and negate the answer.
        return comm.on_any_rank([decision != all], self.groups.world)[0] != all

    @override
    def all_gather(self, tensor: Tensor, group: Optional[Any] = None, sync_grads: bool = False) -> Tensor:
        """Gather over the replicas, unless `group` is given; returns the shape (replicas, *shape)."""
        group = None if group is dist.group.WORLD else group  # the default of `LightningModule.all_gather`
        if group is None and self.groups.data_parallel.process_group is None:
            return tensor.unsqueeze(0) if self.groups.world.size > 1 else tensor
        return super().all_gather(tensor, group or self.groups.data_parallel.process_group, sync_grads)

    @override
    def barrier(self, name: Optional[str] = None) -> None:
        if self._groups is not None:
            comm.barrier(self.groups.world)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return comm.broadcast_object(obj, self.groups.world, src) if self._groups is not None else obj

    # --------------------------------------------------------------------------------------------------- the data

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        coordinate = self.mesh.coordinate(self.global_rank)
        return {"num_replicas": self.mesh.data_parallel, "rank": coordinate.data_parallel}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return seed_workers(dataloader, self.mesh.coordinate(self.global_rank).data_parallel)
