"""Memory of training on each rank: bytes of parameters, gradients, optimizer state and activations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from rich import box
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import tracing
from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback, rank_info
from lightning_parallel.compat.lightning import ddp_hook_state
from lightning_parallel.compat.torch import (
    has_unsharded_storage,
    pytree,
    sharded_flat_parameters,
    storage_address,
    version_of,
)
from lightning_parallel.compat.twins import is_a
from lightning_parallel.compression.compressor import check_integer
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.pipeline.recomputation import observed
from lightning_parallel.planner.rank_memory import Held, RankMemory, optimizer_copies
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["ActivationMeter", "HELD", "MemoryAccumulator", "MemoryProfiler", "StorageSet", "held_bytes", "tensors_in"]

HELD = ("parameters", "buffers", "gradients", "optimizer", "compression", "activations_peak")
"""Keys of a rank in the report that add up to the memory of training at its peak."""


class MemoryAccumulator(Accumulator):
    """Keeps the peak bytes of each part of training on this rank.

    Args:
        rank_info: `rank` and `coordinate` of this process.
    """

    def __init__(self, rank_info: Mapping[str, Any]) -> None:
        self._rank_info = dict(rank_info)
        self._now: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._stages: dict[int, dict[str, int]] = {}

    def note(self, sizes: Mapping[str, int], now: Mapping[str, int] | None = None) -> None:
        """Keep the maximum of `sizes`, and the latest of `now`, in bytes by key."""
        self._now.update(now or {})
        for key, num_bytes in sizes.items():
            self._most[key] = max(num_bytes, self._most.get(key, 0))

    def note_stage(self, stage: int, sizes: Mapping[str, int]) -> None:
        """Keep the maximum of `sizes` of one pipeline stage, in bytes by key."""
        most = self._stages.setdefault(stage, {})
        for key, num_bytes in sizes.items():
            most[key] = max(num_bytes, most.get(key, 0))

    @override
    def share(self) -> dict[str, Any]:
        return {**self._rank_info, **self._most, **self._now, "stages": dict(self._stages)}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ranks = [{key: value for key, value in rank.items() if key != "stages"} for rank in shared]
        stages = [
            {"stage": stage, "rank": rank["rank"], **sizes}
            for rank in shared
            for stage, sizes in sorted(rank["stages"].items())
        ]
        return {"ranks": ranks, **({"stages": stages} if stages else {})}

    @override
    def scalars(self) -> dict[str, float]:
        return {f"memory/{key}": float(value) for key, value in {**self._most, **self._now}.items()}


def held_bytes(
    parameters: Sequence[Parameter],
    buffers: Sequence[Tensor],
    states: Sequence[Any],
    kept: Callable[[Tensor], Tensor] = lambda parameter: parameter,
) -> dict[str, int]:
    """Count the bytes of parameters, buffers, gradients and the `states` of optimizers.

    `kept` returns the part of a parameter that this rank keeps between its uses.

    Each storage counts once, for the first part that holds it. The key `gradients` is missing before backward, and if
    gradients are kept outside `.grad`.
    """
    # One set for all parts, in this order: a tied or flattened tensor counts only for the first part that holds it.
    storages = StorageSet()
    sizes = {"parameters": storages.add(map(kept, parameters)), "buffers": storages.add(buffers)}
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        sizes["gradients"] = storages.add(gradients)
    return {**sizes, "optimizer": storages.add(tensors_in(states))}


class MemoryProfiler(MeasuringCallback[MemoryAccumulator]):
    """Counts the bytes that training holds on each rank and on each pipeline stage.

    `report()` returns the common keys and these. Values are bytes: the maximum that was seen.

        ranks: [{rank, coordinate: {axis: index}, parameters, buffers, gradients, optimizer, compression, buckets, host,
                 activations, activations_peak, resident, resident_peak, allocated_peak, reserved_peak, runtime,
                 predicted: {parameters, gradients, optimizer, buckets, activations_peak}}]
        stages: [{stage, rank, parameters, gradients, optimizer}]      in a pipeline

    | key | meaning, in bytes |
    |---|---|
    | `gradients` | gradients before the optimizer step |
    | `optimizer` | state of the optimizers, and the copies of parameters that they update |
    | `compression` | memory of the gradient compressor |
    | `buckets` | most bytes of gradients and parameters in transit between the replicas of a mesh strategy |
    | `host` | with `cpu_offload`: the optimizer's state, and the parameters and gradients on which it steps |
    | `activations_peak` | most bytes that autograd kept for backward at once, without parameters and the batch |
    | `activations` | bytes that are still saved after the last measured step |
    | `resident` | memory of the process after the last measured step (Linux) |
    | `resident_peak` | most memory of the process since it started (Linux) |
    | `allocated_peak`, `reserved_peak` | peaks of the CUDA allocator during training |
    | `runtime` | memory of the CUDA device beyond the allocator: context, communicators, other processes |
    | `predicted` | prediction of the planner and the stage table, under a mesh strategy |

    * `gradients`: with `zero_stage=2`, they are counted before buckets are sent, because sending frees them. The key is
      left out if gradients are not in `.grad`, as under DeepSpeed ZeRO.
    * `activations`: if the value is not zero, your code keeps a graph alive.
    * `predicted` has activations only in a pipeline.

    A storage counts once, in full, for the first key that holds it. Under FSDP, the figures count the rank's
    shards. With `activation_checkpointing`, activations include one layer that is computed again. In a module under
    another kind of checkpointing, only tensors saved around the module are seen. Under `fully_shard` and ZeRO-3,
    activations are left out, because they look like gathered parameters.

    Logged: `memory/<key>` of rank 0, in bytes.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import MemoryProfiler

        profiler = MemoryProfiler()
        trainer = Trainer(callbacks=[profiler])
        trainer.fit(MyModule(), MyData())
        print(profiler.report()["ranks"])  # bytes
        ```

    Args:
        every_n_steps: Number of optimizer steps between two measurements. The first two steps are always measured.
        activations: Whether to count the tensors that autograd saves. Set it to False for models that use `torch.func`,
            which does not work with the hooks of this count.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If `every_n_steps` is not positive.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        activations: bool = True,
        dirpath: Optional[str] = None,
        show_table: bool = True,
    ) -> None:
        super().__init__(dirpath=dirpath, show_table=show_table)
        check_integer("every_n_steps", every_n_steps, least=1)
        self.every_n_steps = every_n_steps
        self.activations = activations
        self._meter = ActivationMeter()
        self._metering = ExitStack()
        self._is_due = False

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> MemoryAccumulator:
        self._meter = ActivationMeter()
        predicted = _predicted(trainer, pl_module)
        known = {} if predicted is None else {"predicted": predicted}
        return MemoryAccumulator({**rank_info(self.open_session), **known})

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.strategy.root_device.type == "cuda":
            # Reset, so that the peak covers training without its setup.
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._metering.close()  # a skipped batch has left it open
        # Optimizer state exists only after the first step, so the second step is the first with the usual memory.
        self._is_due = trainer.global_step < 2 or trainer.global_step % self.every_n_steps == 0
        model = trainer.strategy.model
        if self._is_due and self.activations and model is not None and _tells_activations(trainer.strategy, model):
            # Autograd saves parameters and inputs, too. They exist anyway, so they do not count as activations.
            held = StorageSet()
            for flat in sharded_flat_parameters(model):
                held.add(value for value in vars(flat).values() if isinstance(value, Tensor))
            held.add([*map(_kept(trainer.strategy), pl_module.parameters()), *pl_module.buffers()])
            held.add(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
            self._metering.enter_context(self._meter.measure(held))
        if self._is_due and getattr(trainer.strategy, "zero_stage", 0) >= 2:
            self._metering.enter_context(self._watch_buckets(trainer.strategy, pl_module))

    @contextmanager
    def _watch_buckets(self, strategy: Any, module: LightningModule) -> Iterator[None]:
        """Count gradients before each bucket is sent, because sending frees them."""
        reducer = strategy.run.reducer
        before = reducer.observer

        def see(gradients: Mapping[str, Tensor]) -> None:
            whole = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            self.accumulator.note({"gradients": StorageSet().add(whole)})
            if before is not None:
                before(gradients)

        reducer.observer = see
        try:
            yield
        finally:
            reducer.observer = before

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        # All gradients exist now. After the step they may be None.
        if self._is_due:
            self._count(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due:
            self._metering.close()
            self._count(trainer, pl_module)
            # The peak is 0 if activations are not measured: leave the keys out, like every unknown value.
            if self._meter.peak:
                self.accumulator.note({"activations_peak": self._meter.peak}, {"activations": self._meter.current})
            self.accumulator.note(*_process_bytes())
            self.accumulator.note(_allocator_bytes(trainer.strategy.root_device))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def _leave(self) -> None:
        self._metering.close()
        super()._leave()

    def _count(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        states = {owner: state for optimizer in strategy.optimizers for owner, state in optimizer.state.items()}
        # In mixed precision, optimizers may update copies of the parameters. Count the copies as optimizer state.
        copies = [optimizer.param_groups for optimizer in strategy.optimizers]
        kept = _kept(strategy)
        sizes = held_bytes(list(module.parameters()), list(module.buffers()), [*states.values(), copies], kept)
        if "gradients" in sizes:
            sizes["gradients"] += _sum_bytes(strategy)
        sizes.update(_bucket_bytes(strategy))
        slices = getattr(getattr(strategy, "run", None), "host_slices", None)
        if slices is not None and slices.host is not None:
            sizes["host"] = sizes.pop("optimizer") + slices.host.nbytes
        compression = _compression_bytes(strategy)
        self.accumulator.note(sizes if compression is None else {**sizes, "compression": compression})
        # Count by stage as well: a rank with several stages then shows its largest stage.
        for stage, names in _stages(strategy).items():
            mine = [parameter for name, parameter in module.named_parameters() if name in names]
            sizes = held_bytes(mine, [], [states.get(parameter) for parameter in mine], kept)
            self.accumulator.note_stage(stage, {key: size for key, size in sizes.items() if key != "buffers"})

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        ranks = report["ranks"]
        shown = {key: header for key, header in _HEADERS.items() if any(rank.get(key) for rank in ranks)}
        if not shown:
            return None
        table = Table(title="Most memory held on each rank", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for header in ("rank", *shown.values()):
            table.add_column(header, justify="right", no_wrap=True)
        for rank in ranks:
            table.add_row(str(rank["rank"]), *(bytes_text(rank[key]) if key in rank else "-" for key in shown))
        return table


_HEADERS = {
    "parameters": "weights",
    "buffers": "buffers",
    "gradients": "grads",
    "optimizer": "optimizer",
    "compression": "compr.",
    "buckets": "buckets",
    "host": "host",
    "activations_peak": "activ.",
    "activations": "graph left",
    "resident_peak": "process",
    "allocated_peak": "allocated",
    "reserved_peak": "reserved",
    "runtime": "runtime",
}
"""Columns of the table; the table omits a column that is zero everywhere."""


# ------------------------------------------------------------------------------------------------ state of a strategy


def _stages(strategy: Strategy) -> dict[int, set[str]]:
    """Return the parameter names of each pipeline stage of this rank; one of several stages counts for the first."""
    engine = getattr(getattr(strategy, "run", None), "engine", None)
    if not isinstance(engine, PipelineEngine):
        return {}
    names: dict[int, set[str]] = {stage: set() for stage in engine.stages}
    for name, stages in engine.plan.parameter_stages.items():
        mine = [stage for stage in stages if stage in names]
        if mine:
            names[mine[0]].add(name)
    return names


def _sum_bytes(strategy: Any) -> int:
    """Return the bytes of sums of gradients in fp32, which the strategy frees before the optimizer's step."""
    return getattr(getattr(getattr(strategy, "run", None), "reducer", None), "sum_bytes", 0)


def _kept(strategy: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that gives the part of a parameter which this rank keeps between its uses."""
    slices = getattr(getattr(strategy, "run", None), "slices", None)
    return (lambda parameter: parameter) if slices is None else slices.kept


def _bucket_bytes(strategy: Any) -> dict[str, int]:
    """Return the most bytes of buckets that were under way at once; empty under strategies that do not tell."""
    run = getattr(strategy, "run", None)
    found = [getattr(getattr(run, name, None), "traffic", None) for name in ("reducer", "slices")]
    peaks = [traffic.peak for traffic in found if traffic is not None]
    # Gradients travel beside the parameters of the next layer. Buckets of an update come after all gradients.
    peak = sum(peaks) if getattr(strategy, "zero_stage", 0) == 3 else max(peaks, default=0)
    return {"buckets": peak} if peak else {}


def _predicted(trainer: Trainer, module: LightningModule) -> dict[str, int] | None:
    """Return the predicted bytes of this rank, by key; None under strategies without a mesh."""
    strategy: Any = trainer.strategy
    if not isinstance(getattr(strategy, "mesh", None), Mesh):
        return None
    engine = getattr(getattr(strategy, "run", None), "engine", None)
    plan = engine.plan if isinstance(engine, PipelineEngine) else None
    stages = engine.stages if isinstance(engine, PipelineEngine) else ()
    slices = strategy.run.slices
    units = () if slices is None else slices.gathered_together
    held = Held.of(module.parameters(), units)
    accumulates = trainer.accumulate_grad_batches > 1 or (plan is not None and plan.schedule.num_microbatches > 1)
    memory = RankMemory.of(
        # The profiler never sees a new gradient before its addition to an earlier gradient.
        replace(held, largest_bytes=0, half_bytes=held.half_bytes if strategy.adds_in_fp32 else 0),
        optimizer_copies(strategy.optimizers),
        accumulates=accumulates,
        activations=0 if plan is None else plan.activation_bytes(stages),
        host_activations=0 if plan is None else plan.host_bytes(stages),
        replicas=strategy.groups.gradients.size,
        zero_stage=strategy.zero_stage,
        offloads=strategy.steps_on_host,
    )
    sizes = {
        "activations_peak" if key == "activations" else key: int(size) for key, size in memory.most_by_kind().items()
    }
    return {key: size for key, size in sizes.items() if size}


def _compression_bytes(strategy: Strategy) -> int | None:
    """Return the bytes of the state of gradient compression, ours or a communication hook's; None without it."""
    state = ddp_hook_state(strategy)
    reducer = getattr(strategy, "compression", None)
    if reducer is None:
        reducer = getattr(state, "compressor", None)
    if reducer is not None:
        return reducer.memory.num_bytes
    # Hooks of torch, such as PowerSGD's, keep their tensors in attributes of their state.
    return None if state is None else StorageSet().add(tensors_in(vars(state)))


def _tells_activations(strategy: Strategy, model: torch.nn.Module) -> bool:
    """Return whether saved activations can be told from parameters that are gathered temporarily."""
    if is_a(strategy, DeepSpeedStrategy) and strategy.zero_stage_3:
        return False
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    # FSDP1 gathers into fixed storages, which are known from its first step on.
    return all(has_unsharded_storage(flat) for flat in sharded_flat_parameters(model))


def _process_bytes() -> tuple[dict[str, int], dict[str, int]]:
    """Return the peak and the current resident memory of this process; empty if the system does not report it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return {}, {}
    lines = [line for line in status.read_text().splitlines() if line.endswith("kB")]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    # VmHWM is the peak of VmRSS since the process started.
    return {"resident_peak": kib["VmHWM"] * 1024}, {"resident": kib["VmRSS"] * 1024}


def _allocator_bytes(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "allocated_peak": torch.cuda.max_memory_allocated(device),
        "reserved_peak": torch.cuda.max_memory_reserved(device),
        "runtime": _outside_bytes(device),
    }


def _outside_bytes(device: torch.device) -> int:
    # These figures cover the full device, with its other processes.
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


# ------------------------------------------------------------------------------------------------- storages of tensors


class StorageSet:
    """A set of storages, which counts the bytes of added storages."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Add the storages of `tensors`; return the bytes of new storages. Views of one storage count once."""
        num_bytes = 0
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None and storage not in self:
                # Keep a reference: after a free, another storage could get the same address.
                self._seen[storage_address(storage)] = storage
                num_bytes += storage.nbytes()
        return num_bytes

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage_address(storage) in self._seen


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Find the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor's data; None without data, such as on the meta device."""
    # This rank holds only its shard of a DTensor. Other subclasses may have no storage, or several.
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage()


class ActivationMeter:
    """Measures the bytes that autograd saves between forward and backward.

    Storages count once however often they are saved, and as a whole, as a view keeps all of its storage alive. Storages
    that are held anyway do not count.

    Attributes:
        current: Bytes saved now.
        peak: Most bytes saved at once.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self._held = StorageSet()
        self._kept: dict[int, list[int]] = {}  # by storage: references, bytes
        # Backward frees tensors on other threads, and garbage collection may free some within `keep` itself.
        self._lock = threading.RLock()

    @contextmanager
    def measure(self, held: StorageSet) -> Iterator[None]:
        """Measure the tensors that the block saves, without the storages in `held`."""
        self._held = held
        try:
            with saved_tensors_hooks(self._pack, _unpack), observed(self._pack):
                yield
        finally:
            self._held = StorageSet()

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        storage = _storage(tensor)
        # `_unpack` gets the value returned here, so wrap even tensors that do not count.
        if storage is None or storage in self._held or tracing.is_suspended():
            return _SavedTensor(tensor)
        return _CountedTensor(tensor, self, storage_address(storage), storage.nbytes())

    def keep(self, key: int, num_bytes: int) -> None:
        """Add a reference to a storage; its first reference adds its bytes."""
        with self._lock:
            entry = self._kept.setdefault(key, [0, num_bytes])
            entry[0] += 1
            if entry[0] == 1:
                self.current += num_bytes
                self.peak = max(self.peak, self.current)

    def release(self, key: int) -> None:
        """Drop a reference to a storage; its last reference removes its bytes."""
        with self._lock:
            entry = self._kept[key]
            entry[0] -= 1
            if entry[0] == 0:
                self.current -= entry[1]
                del self._kept[key]


class _SavedTensor:
    """A tensor that autograd saved, with its version at that time."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detach: an output that its own operation saves would keep its graph, and so itself, alive.
        self.tensor = tensor.detach()
        self.version = version_of(tensor)


class _CountedTensor(_SavedTensor):
    __slots__ = ("key", "meter")

    def __init__(self, tensor: Tensor, meter: ActivationMeter, key: int, num_bytes: int) -> None:
        super().__init__(tensor)
        self.meter = meter
        self.key = key
        meter.keep(key, num_bytes)

    # Autograd drops its saved tensors without calling a hook: freeing is the only sign.
    def __del__(self) -> None:
        self.meter.release(self.key)


def _unpack(saved: _SavedTensor) -> Tensor:
    # With hooks, autograd skips its version check. Without this check, gradients could be silently wrong.
    version = version_of(saved.tensor)
    if version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" of shape {tuple(saved.tensor.shape)} is at version {version}; expected version"
            f" {saved.version} instead. Hint: torch.autograd.set_detect_anomaly(True) finds the operation,"
            " without MemoryProfiler"
        )
    return saved.tensor
