"""The memory of a rank: the most bytes alive in a step beside the prediction of the planner and of the stage table."""

import gc
import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy, MemoryProfiler
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline import analysis
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.planner import hardware
from lightning_parallel.planner.layouts import LayoutSearch
from lightning_parallel.planner.rank_memory import optimizer_copies, planned_memory
from lightning_parallel.planner.rehearsal import Rehearsal
from tests.harness import distributed
from tests.planner.test_planner import cluster
from tests.strategies.models import trainer_for
from tests.strategies.test_recomputation import Block

WIDTH, SAMPLES, TOKENS, CLASSES = 64, 8, 32, 64
STEPS = 3


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block(width=WIDTH) for _ in range(4))

    def training_step(self, batch, index):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Watch(MemoryProfiler):
    """Keeps the most bytes of the last step, and the prediction of the stage table."""

    def __init__(self, live):
        super().__init__(every_n_steps=1, activations=False, show_table=False)
        self.live = live
        self.table, self.peak = None, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        gc.collect()
        self.live.forget_peak()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.peak = self.live.peak
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # On a processor, all bytes are in one memory.
        self.host = self.accumulator.scalars().get("memory/host", 0)
        self.peak -= self.host
        strategy = trainer.strategy
        engine = strategy.run.engine
        if isinstance(engine, PipelineEngine):
            copies = optimizer_copies(trainer.optimizers)
            replicas = strategy.mesh.data_parallel
            offloads = strategy.steps_on_host
            self.table = planned_memory(
                engine.plan, engine.stages, copies, replicas, strategy.zero_stage, True, offloads
            )


DATA, PIPELINE, TENSOR = (2, 1, 1), (1, 2, 1), (1, 1, 2)
TWO = [
    (DATA, 0, "off", ()),
    (DATA, 1, "off", ("optimizer",)),
    (DATA, 2, "selective", ()),
    (DATA, 3, "full", ()),
    (PIPELINE, 0, "full", ("optimizer",)),
    (TENSOR, 0, "selective", ()),
]
FOUR = [
    ((2, 1, 2), 3, "off", ()),
    ((2, 2, 1), 2, "full", ()),
    ((1, 2, 2), 0, "selective", ()),
]


def ratios(group, shape, zero_stage, recomputation, offload):
    """Train; return the predictions of the planner and the stage table over the most bytes alive; and of the host."""
    data, pipeline, tensor = shape
    mesh = Mesh(data, pipeline, tensor_parallel=tensor)
    staged = mesh.pipeline_parallel > 1
    batches = torch.zeros(STEPS * SAMPLES * mesh.data_parallel, TOKENS, dtype=torch.long)
    only = {"schedules": ["1f1b"], "microbatches": [4]} if staged else {}
    search = LayoutSearch(
        Rehearsal(Model(), batches[:SAMPLES], cluster()),
        copies=4.0,
        zero_stages=(zero_stage,),
        offloads=bool(offload),
        recomputation=recomputation,
        **only,
    )
    layout = search.best(mesh)
    planned = layout.memories[mesh.coordinate(group.rank).pipeline_parallel]
    sizes = dict(zip(("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"), shape))
    options = {"num_microbatches": 4, "schedule": "1f1b"} if staged else {}
    strategy = HybridParallelStrategy(
        zero_stage=zero_stage, cpu_offload=offload, activation_checkpointing=recomputation, **sizes, **options
    )
    with pytest.MonkeyPatch.context() as patch, importlib.import_module("sleeping").LiveBytes() as live:
        # Measured seconds would decide the cut of the run.
        patch.setattr(analysis, "cut_layers", lambda *_, **__: layout.layers_per_stage)
        watch = Watch(live)
        trainer_for(strategy, group.size, max_epochs=1, callbacks=[watch]).fit(Model(), DataLoader(batches, SAMPLES))
    found = [memory.total / watch.peak for memory in (planned, watch.table) if memory is not None]
    return [*found, planned.host / watch.host] if offload else found


def assert_planned(group, combinations):
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        ratios(group, *combinations[0])  # the first fit of a process makes tensors that stay for later ones
        found = {combination: ratios(group, *combination) for combination in combinations}
    off = {
        combination: some for combination, some in found.items() if some != pytest.approx([1.0] * len(some), abs=0.1)
    }
    assert not off, off


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_two_ranks_hold_what_was_planned(group):
    assert_planned(group, TWO)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_four_ranks_hold_what_was_planned(group):
    assert_planned(group, FOUR)


def test_the_memory_of_a_container_counts(monkeypatch):
    cpu = torch.device("cpu")
    assert hardware.free_memory(cpu) > 0
    assert hardware.free_memory(torch.device("meta")) == 0
    monkeypatch.setattr(hardware, "_container_limits", lambda: iter([(1 << 62, 0), (1000, 400), (900, 100)]))
    assert hardware.free_memory(cpu) == 600
    assert hardware.memory_here(cpu, 2) == 450
    monkeypatch.setattr(hardware, "_container_limits", lambda: iter([(1000, 1400)]))
    assert hardware.free_memory(cpu) == 0
