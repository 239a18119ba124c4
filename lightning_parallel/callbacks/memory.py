"""What training holds in memory, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from rich import box
from rich.table import Table
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback, place
from lightning_parallel.callbacks.storage import ActivationMeter, Storages, tensors_in
from lightning_parallel.callbacks.units import bytes_text
from lightning_parallel.recorder import Window

__all__ = ["HELD", "MemoryAccumulator", "MemoryProfiler", "held_bytes"]

HELD = ("parameters", "buffers", "gradients", "optimizer", "compression", "activations_peak")
"""Keys of a rank in the report that add up to what training holds at its peak."""


class MemoryAccumulator(Accumulator):
    """The most bytes that each part of training has held on this rank.

    Args:
        place: `rank` and `coordinate` of this process.
    """

    def __init__(self, place: Mapping[str, Any]) -> None:
        self._place = dict(place)
        self._now: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._stages: dict[int, dict[str, int]] = {}

    @override
    def add(self, window: Window) -> None:
        """Steps are not looked at."""

    def note(self, sizes: Mapping[str, int], now: Mapping[str, int] | None = None) -> None:
        """Keep the largest of `sizes`, and `now` as it is."""
        self._now.update(now or {})
        for key, num_bytes in sizes.items():
            self._most[key] = max(num_bytes, self._most.get(key, 0))

    def note_stage(self, stage: int, sizes: Mapping[str, int]) -> None:
        """Keep the largest `sizes` of one pipeline stage."""
        most = self._stages.setdefault(stage, {})
        most.update({key: max(num_bytes, most.get(key, 0)) for key, num_bytes in sizes.items()})

    @override
    def share(self) -> dict[str, Any]:
        return {**self._place, **self._most, **self._now, "stages": dict(self._stages)}

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


def held_bytes(parameters: Sequence[Parameter], buffers: Sequence[Tensor], states: Sequence[Any]) -> dict[str, int]:
    """Bytes of parameters, buffers, gradients and the `states` of optimizers.

    Each storage counts once, for the first of these that holds it. Gradients are left out where there are none: before
    backward, or because they are kept elsewhere.
    """
    storages = Storages()
    sizes = {"parameters": storages.add(parameters), "buffers": storages.add(buffers)}
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        sizes["gradients"] = storages.add(gradients)
    return {**sizes, "optimizer": storages.add(tensors_in(states))}


class MemoryProfiler(MeasuringCallback):
    """Counts, byte for byte, what training holds on each rank, and on each pipeline stage.

    `report()` has, besides the common keys, in bytes, the most that was seen:

        ranks: [{rank, coordinate: {axis: index}, parameters, buffers, gradients, optimizer, compression,
                 activations, activations_peak, resident, resident_peak, allocated_peak, reserved_peak}]
        stages: [{stage, rank, parameters, gradients, optimizer}]      in a pipeline

    | key | what |
    |---|---|
    | `gradients` | before the optimizer's step; left out where they are not in `.grad`, as under DeepSpeed ZeRO |
    | `optimizer` | state of the optimizers, with the copies of parameters that they work on, if they do |
    | `compression` | memory of the gradient compressor, if there is one |
    | `activations_peak` | the most that autograd kept for backward at once, without parameters and the batch itself |
    | `activations` | what it still kept after the last measured step: other than 0, something holds on to a graph |
    | `resident`, `resident_peak` | memory of the process (Linux): after that step, and the most since it started |
    | `allocated_peak`, `reserved_peak` | of the CUDA allocator, during training |

    A storage counts once, as a whole, for the first part that holds it. Under FSDP these are the rank's pieces. Of
    modules under activation checkpointing only what is kept outside of them is seen; under `fully_shard` and ZeRO-3
    activations cannot be told from gathered parameters and are left out.

    Logged: `memory/<key>` of rank 0, in bytes.

    Args:
        every_n_steps: Optimizer steps between two measured ones; the first two are measured.
        activations: Whether to look at what autograd saves. `torch.func` does not allow it; False then.
        dirpath, show_table: See `MeasuringCallback`.

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
        if every_n_steps < 1:
            raise ValueError(f"expected every_n_steps >= 1, got {every_n_steps}")
        self.every_n_steps, self.activations = every_n_steps, activations
        self._meter = ActivationMeter()
        self._watching = ExitStack()
        self._is_due = False

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> MemoryAccumulator:
        assert self.session is not None
        self._meter = ActivationMeter()
        return MemoryAccumulator(place(self.session))

    @property
    def _memory(self) -> MemoryAccumulator:
        assert isinstance(self._accumulator, MemoryAccumulator)
        return self._accumulator

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._watching.close()  # of a batch that was skipped
        self._is_due = trainer.global_step < 2 or trainer.global_step % self.every_n_steps == 0
        if self._is_due and self.activations and _tells_activations(trainer.strategy):
            assert trainer.strategy.model is not None
            held = Storages()
            for flat in _flat_parameters(trainer.strategy.model):
                held.add(value for value in vars(flat).values() if isinstance(value, Tensor))
            held.add([*pl_module.parameters(), *pl_module.buffers()])
            held.add(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
            self._watching.enter_context(self._meter.watch(held))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._is_due:
            self._count(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due:
            self._watching.close()
            self._count(trainer, pl_module)
            if self._meter.peak:
                self._memory.note({"activations_peak": self._meter.peak}, {"activations": self._meter.current})
            self._memory.note(*_process_bytes())
            self._memory.note(_allocator_bytes(trainer.strategy.root_device))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def _leave(self) -> None:
        self._watching.close()
        super()._leave()

    def _count(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        states = {owner: state for optimizer in strategy.optimizers for owner, state in optimizer.state.items()}
        copies = [optimizer.param_groups for optimizer in strategy.optimizers]  # of the parameters, if they are others
        sizes = held_bytes(list(module.parameters()), list(module.buffers()), [*states.values(), copies])
        compression = _compression_bytes(strategy)
        self._memory.note(sizes if compression is None else {**sizes, "compression": compression})
        for stage, names in _stages(strategy).items():
            mine = [parameter for name, parameter in module.named_parameters() if name in names]
            sizes = held_bytes(mine, [], [states.get(parameter) for parameter in mine])
            self._memory.note_stage(stage, {key: size for key, size in sizes.items() if key != "buffers"})

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        ranks = report["ranks"]
        shown = {key: header for key, header in _HEADERS.items() if any(rank.get(key) for rank in ranks)}
        if not shown:
            return None
        table = Table(title="Memory held, at most", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
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
    "activations_peak": "activ.",
    "activations": "graph left",
    "resident_peak": "process",
    "allocated_peak": "allocated",
    "reserved_peak": "reserved",
}
"""Columns of the table; those that are zero everywhere are left out."""


# ---------------------------------------------------------------------------------------------- what a strategy holds


def _stages(strategy: Strategy) -> dict[int, set[str]]:
    """Names of the parameters of each pipeline stage of this rank; of one on several stages, the first counts it."""
    engine = getattr(strategy, "engine", None)
    if engine is None:
        return {}
    names: dict[int, set[str]] = {stage: set() for stage in engine.stages}
    for name, stages in engine.parameter_stages.items():
        mine = [stage for stage in stages if stage in names]
        if mine:
            names[mine[0]].add(name)
    return names


def _compression_bytes(strategy: Strategy) -> int | None:
    """What gradient compression remembers, ours or that of a communication hook; None without it."""
    reducer, state = getattr(strategy, "compression", None), getattr(strategy, "_ddp_comm_state", None)
    reducer = getattr(state, "compressor", None) if reducer is None else reducer
    if reducer is not None:
        return reducer.memory.num_bytes
    return None if state is None else Storages().add(tensors_in(vars(state)))


def _tells_activations(strategy: Strategy) -> bool:
    """Whether what autograd saves can be told from parameters that are gathered for the moment."""
    if isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3:
        return False
    assert strategy.model is not None
    if any(isinstance(module, FSDPModule) for module in strategy.model.modules()):
        return False
    return all(hasattr(flat, "_full_param_padded") for flat in _flat_parameters(strategy.model))  # after the first step


def _flat_parameters(model: torch.nn.Module) -> list[Tensor]:
    """Of FSDP, if `model` is wrapped in it: each says where its parameters are gathered."""
    if not isinstance(model, FullyShardedDataParallel):
        return []
    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model)]
    return [handle.flat_param for handle in handles if handle is not None and handle.uses_sharded_strategy]


def _process_bytes() -> tuple[dict[str, int], dict[str, int]]:
    """The most and the present resident memory of this process, where the system tells."""
    status = Path("/proc/self/status")
    if not status.exists():
        return {}, {}
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status.read_text().splitlines() if line.endswith("kB")}
    return {"resident_peak": kib["VmHWM"] * 1024}, {"resident": kib["VmRSS"] * 1024}


def _allocator_bytes(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"allocated_peak": allocated, "reserved_peak": reserved}
