"""Loops of the user's own, under `Fabric` with strategies of a mesh, beside the same loop on one process."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    ContextParallelStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    PowerSGD,
    TensorParallelStrategy,
    comm,
)
from tests.harness import distributed

VOCABULARY, STEPS = 32, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, ids, index=0):
        return loss_of(self.net(ids), ids)


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def size_of(tensors):
    return float(sum(tensor.detach().double().pow(2).sum() for tensor in tensors) ** 0.5)


def train(fabric, path, loaded):
    """Train with accumulated gradients, read weights and gradients in the loop, save, spoil, and load a file."""
    fabric.launch()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    ids = torch.randint(VOCABULARY, (16, 5), generator=torch.Generator().manual_seed(1))
    found = []
    halves = fabric.setup_dataloaders(DataLoader(ids, 8 // getattr(fabric.strategy, "num_replicas", 1)))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for index, half in enumerate(halves):
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(loss_of(model(half), half) / 2)
        found.append(size_of(parameter.grad for parameter in model.parameters()))
        found.append(float(model.module.blocks[0].linear1.weight.grad.abs().sum()))
        found.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.3)))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(float(loss_of(model(ids), ids)))
            model.module.head.weight.mul_(0.999)
        model.train()
        found.append(size_of(model.state_dict().values()))
    state = {"model": model, "optimizer": optimizer, "steps": STEPS}
    fabric.save(path, state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    optimizer.zero_grad()
    state["steps"] = 0
    fabric.load(loaded or path, state)
    found.append(float(state["steps"]))
    mine = next(iter(halves))
    fabric.backward(loss_of(model(mine), mine))
    optimizer.step()
    found.append(size_of(model.parameters()))
    fabric.strategy.teardown()
    return found


@functools.cache
def expected(folder):
    path = Path(folder) / "one.ckpt"
    return train(Fabric(accelerator="cpu", devices=1), path, None), path


LAYOUTS = {
    "tensor": {"tensor_parallel_size": 2},
    "replicas, stage 1": {"zero_stage": 1},
    "tensor x replicas, stage 1": {"tensor_parallel_size": 2, "zero_stage": 1},
}


def check_layout(group, layout, folder):
    one, saved = expected(folder)
    comm.barrier(group)
    strategy = HybridParallelStrategy(**LAYOUTS[layout])
    fabric = Fabric(accelerator="cpu", devices=group.size, strategy=strategy)
    path = Path(folder) / "ranks.ckpt"
    found = train(fabric, path, saved)
    assert found == pytest.approx(one, abs=1e-9)
    assert strategy.verify == "auto", "a Trainer that gets the strategy later checks its steps"
    if group.rank == 0:
        mine, theirs = torch.load(path), torch.load(saved)
        assert mine["model"].keys() == theirs["model"].keys()
        for name, value in theirs["model"].items():
            torch.testing.assert_close(mine["model"][name], value, rtol=0, atol=1e-10)
        assert mine["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
        for index, state in theirs["optimizer"]["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(mine["optimizer"]["state"][index][key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", ["tensor", "replicas, stage 1"])
@distributed(world_size=2)
def test_a_loop_equals_one_process(group, layout, tmp_path):
    check_layout(group, layout, comm.broadcast_object(str(tmp_path), group))


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_a_loop_equals_one_process_on_four_ranks(group, tmp_path):
    check_layout(group, "tensor x replicas, stage 1", comm.broadcast_object(str(tmp_path), group))


@distributed(world_size=2)
def test_a_lightning_module_and_a_name_for_the_strategy(group):
    losses = []
    for devices, strategy in ((1, "auto"), (2, "tensor_parallel")):
        fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        fabric.launch()
        module = Lit()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        ids = torch.arange(12).view(3, 4)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model.training_step(ids)
            fabric.backward(loss)
            optimizer.step()
        losses.append(float(loss))
        fabric.strategy.teardown()
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@distributed(world_size=2)
def test_what_ranks_do_apart_is_refused(group):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=TensorParallelStrategy(tensor_parallel_size=2))
    fabric.launch()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match=r"fabric.setup\(module, optimizer\)"):
        fabric.setup_optimizers(optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    with pytest.raises(RuntimeError, match="divides one module; got a second"):
        fabric.setup(nn.Linear(2, 2))
    ids = torch.full((2, 4), group.rank)
    with pytest.raises(TypeError, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="must get the same batch"):
        model(ids)
    fabric.strategy.teardown()


@distributed(world_size=2)
def test_later_batches_that_differ_in_a_replica_are_refused(group):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=TensorParallelStrategy(tensor_parallel_size=2))
    fabric.launch()
    model = Net()
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="must get the same batches"):
        model(torch.full((2, 4), group.rank))
    fabric.strategy.teardown()


class Averages:
    def __init__(self, model):
        self.values = {name: value.clone() for name, value in model.state_dict().items()}

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = dict(values)


@distributed(world_size=2)
def test_states_of_the_user_are_whole_on_all_ranks(group, tmp_path):
    path = Path(comm.broadcast_object(str(tmp_path), group)) / "averages.ckpt"
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(8).view(2, 4)
    loss_of(model(ids), ids).backward()
    optimizer.step()  # its state is there before the set-up, in full
    expected = optimizer.state_dict()["state"]
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    fabric = Fabric(accelerator="cpu", devices=2, strategy=TensorParallelStrategy(tensor_parallel_size=2))
    fabric.launch()
    fitted, optimizer = fabric.setup(model, optimizer)
    found = optimizer.state_dict()["state"]
    for index, state in expected.items():
        for key, value in state.items():
            torch.testing.assert_close(found[index][key], value, rtol=0, atol=0)
    averages = Averages(fitted)
    fabric.save(path, {"model": fitted, "averages": averages}, filter={"model": lambda _, value: value.sum() > -1e9})
    saved = torch.load(path)
    assert {name: value.shape for name, value in saved["averages"].items()} == shapes
    assert saved["model"].keys() == shapes.keys()
    fabric.strategy.teardown()


@distributed(world_size=2)
def test_a_module_without_optimizers_does_not_train(group):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=HybridParallelStrategy(data_parallel_size=2))
    fabric.launch()
    model = fabric.setup_module(Net())
    ids = torch.arange(8).view(2, 4)
    with pytest.raises(RuntimeError, match="set up together with its optimizers"):
        fabric.backward(loss_of(model(ids), ids))
    fabric.strategy.teardown()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: PipelineParallelStrategy(pipeline_parallel_size=2), "a pipeline runs a step once for each microbatch"),
        (lambda: HybridParallelStrategy(pipeline_parallel_size="auto"), "a pipeline"),
        (lambda: ContextParallelStrategy(context_parallel_size=2), "a context axis"),
        (lambda: HybridParallelStrategy(zero_stage=2), "frees gradients"),
        (lambda: HybridParallelStrategy(checkpoint_format="sharded"), "written by the Trainer"),
        (lambda: HybridParallelStrategy(tiled="auto"), "need the record of a step"),
        (lambda: TensorParallelStrategy(verify="always"), "compares steps"),
        (lambda: LocalSGDStrategy(), "made for the loops of the Trainer"),
        (lambda: AutoParallelStrategy(), "made for the loops of the Trainer"),
        (lambda: CompressedDDPStrategy(PowerSGD()), "made for the loops of the Trainer"),
    ],
)
def test_strategies_that_need_a_step_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        Fabric(accelerator="cpu", devices=1, strategy=make())
