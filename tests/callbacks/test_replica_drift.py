"""Flipped bits and other differences between ranks, named by parameter, ranks and step."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel import (
    CompressedDDPStrategy,
    CompressedFSDPStrategy,
    HybridParallelStrategy,
    PowerSGD,
    Quantize,
    TensorParallelStrategy,
    TopK,
    comm,
)
from lightning_parallel.callbacks.monitors.replica_drift import (
    DriftAccumulator,
    ReplicaDriftMonitor,
    StateKey,
    disagreements,
    option_values,
    shared_classes,
)
from lightning_parallel.compression import Dense
from tests.callbacks.conftest import place_rank
from tests.harness import distributed, needs_fully_shard
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_pipeline import Deep


def flip(tensor, bit=30):
    tensor.detach().view(-1).view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)


class Spoil(Callback):
    """Calls `change(module, optimizer)` on some ranks after a step; placed before the monitor."""

    def __init__(self, step, ranks, change):
        self.step, self.ranks, self.change = step, ranks, change

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            self.change(module, trainer.optimizers[0])


def fit(module, strategy, callbacks, replicas, **options):
    rank, size = place_rank()
    trainer = trainer_for(strategy, size, callbacks=callbacks, **options)
    trainer.fit(module, loader(replicas, rank // (size // replicas), dtype=next(module.parameters()).dtype))
    return trainer


def names(monitor):
    return [(one["step"], one["name"], one["ranks"]) for one in monitor.report()["findings"]]


# ------------------------------------------------------------------------------------------------- without processes


def test_classes_are_what_the_same_ranks_hold():
    a, b, c = (StateKey("parameter", name) for name in "abc")
    assert shared_classes([[a, b], [a, b], [a, c]]) == {(0, 1, 2): [a], (0, 1): [b]}


def test_the_majority_is_right_and_without_one_all_are_named():
    a, b = StateKey("parameter", "a"), StateKey("parameter", "b")
    (one,) = disagreements([{a: 1, b: 1}, {a: 2, b: 1}, {a: 1}])
    assert (one.key.name, one.reference, one.different, one.ranks, one.is_certain) == ("a", 0, (1,), (1,), True)
    (one,) = disagreements([{a: 2}, {a: 1}, {a: 1}])
    assert (one.reference, one.different, one.ranks) == (1, (0,), (0,))
    (one,) = disagreements([{}, {a: 1}, {a: 2}])
    assert (one.reference, one.different, one.ranks, one.is_certain) == (1, (2,), (1, 2), False)


def test_likely_causes_come_first():
    """Who is wrong about what is certain, then options, parameters, state of optimizers."""
    certain, lr, weight, state = (StateKey(kind, kind) for kind in ("buffer", "option", "parameter", "optimizer"))
    hashes = [{certain: 1, lr: rank % 2, weight: rank % 2, state: rank % 2} for rank in range(4)]
    hashes[3][certain] = 2
    found = disagreements([dict(reversed(each.items())) for each in hashes])
    assert [one.key for one in found] == [certain, lr, weight, state]


def test_several_groups_of_different_stages_are_not_the_same():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    per_layer = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1 / (1 + i)} for i, layer in enumerate(model)])
    stages = [
        {key for key, _ in option_values(optimizer, "", stage)} for optimizer in (one, per_layer) for stage in "ab"
    ]
    assert stages[0] == stages[1]
    assert StateKey("option", "lr of group 0") in stages[0]
    assert stages[2].isdisjoint(stages[3])
    assert StateKey("option", "lr of group 1", "a") in stages[2]


@pytest.mark.parametrize("arguments", [{"every_n_steps": 0}, {"action": "panic"}])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="must be .*; got "):
        ReplicaDriftMonitor(**arguments)


def test_one_process_has_nothing_to_compare():
    monitor = ReplicaDriftMonitor(every_n_steps=1)
    trainer_for(callbacks=[monitor]).fit(Net().double(), loader())
    assert (monitor.report()["findings"], monitor.report()["checks"]) == ([], 0)


# --------------------------------------------------------------------------------------------------- the accumulator


@distributed(world_size=4)
def test_values_are_compared(group):
    def held():
        found = {
            StateKey("parameter", "weight"): weight,
            StateKey("parameter", "piece", str(group.rank % 2)): torch.full((3,), float(group.rank % 2)),
            StateKey("option", "lr of group 0"): options["lr"],
        }
        return found | ({StateKey("parameter", "own"): torch.randn(2) + group.rank} if group.rank == 1 else {})

    weight, options = torch.arange(6.0), {"lr": 0.1}
    audit = DriftAccumulator(group, lambda value: comm.all_gather_object(value, group))
    for step in range(3):
        assert audit.check(step, held()) == []
    assert audit.classes == {
        (0, 1, 2, 3): [StateKey("option", "lr of group 0"), StateKey("parameter", "weight")],
        (0, 2): [StateKey("parameter", "piece", "0")],
        (1, 3): [StateKey("parameter", "piece", "1")],
    }
    if group.rank == 2:
        weight[4] = 4.5
    if group.rank in (1, 3):
        options["lr"] = 0.2 if group.rank == 1 else 0.3
    lr, drifted = audit.check(7, held())
    assert (drifted["step"], drifted["name"], drifted["ranks"]) == (7, "weight", [2])
    assert "differs from rank 0: 1 of 6 elements, by up to 0.5" in drifted["detail"]
    assert (lr["name"], lr["ranks"]) == ("lr of group 0", [1, 3])
    assert "0.2 instead of 0.1" in lr["detail"] or "0.3 instead of 0.1" in lr["detail"]
    assert torch.equal(weight[:4], torch.arange(4.0)), "nothing is changed"
    assert audit.check(8, held()) == []
    assert len(audit.findings) == 2


@distributed(world_size=2)
def test_what_stays_different_is_told_once(group):
    weight = torch.zeros(2, dtype=torch.bfloat16)
    audit = DriftAccumulator(group, lambda value: comm.all_gather_object(value, group))
    held = {StateKey("parameter", "w"): weight}
    audit.check(0, held)
    if group.rank == 1:
        weight[1] = -0.0
    (finding,) = audit.check(1, held)
    assert finding["ranks"] == [0, 1]
    assert "do not change the value" in finding["detail"]
    assert "no majority" in finding["detail"]
    assert audit.check(2, held) == []
    assert len(audit.findings) == 1


@distributed(world_size=2)
def test_large_differences_come_first(group):
    audit = DriftAccumulator(group, lambda value: comm.all_gather_object(value, group))
    drifts = {"p0": 0.1, "p1": 3.0, "p2": 0.0}
    held = {StateKey("parameter", name): torch.ones(2) + by * group.rank for name, by in drifts.items()}
    assert [one["name"] for one in audit.check(1, held)] == ["p1", "p0"]


@distributed(world_size=2)
def test_without_an_answer_nothing_is_decided(group):
    audit = DriftAccumulator(group, lambda value: None)
    assert audit.check(0, {StateKey("parameter", "w"): torch.randn(2) + group.rank}) == []
    assert audit.checks == 0


# ------------------------------------------------------------------------------------------------------- in training


@distributed(world_size=2)
def test_a_flipped_bit_under_ddp_is_named():
    monitor = ReplicaDriftMonitor(every_n_steps=2, show_table=False)
    spoil = Spoil(3, [1], lambda module, optimizer: flip(module.net[2].weight))
    fit(Net().double(), DDPStrategy(), [spoil, monitor], 2)
    report = monitor.report()
    assert (4, "net.2.weight", [0, 1]) in names(monitor)
    assert all(one["step"] == 4 for one in report["findings"] if one["name"] == "net.2.weight")
    assert (report["compared"]["parameter"], report["compared"]["optimizer"]) == (8, 8)
    assert report["compared"]["option"] >= 3
    assert "buffer" not in report["compared"]
    assert report["checks"] == 5


class Tied(Deep):
    """The head is the embedding, transposed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 8, bias=False).double()

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight[:, :5]


def flip_bias(module, optimizer):
    flip(module.net[3].bias)


LAYOUTS = {
    "tensor": (Net, lambda: TensorParallelStrategy(tensor_parallel_size=4), 1, flip_bias, "net.3.bias"),
    "tensor x data": (
        Net,
        lambda: TensorParallelStrategy(tensor_parallel_size=2),
        2,
        lambda module, optimizer: flip(module.net[0].weight),
        "net.0.weight",
    ),
    "tied stages": (
        Tied,
        lambda: HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2),
        2,
        lambda module, optimizer: flip(module.embed.weight),
        "embed.weight",
    ),
    "all": (
        Deep,
        lambda: HybridParallelStrategy(
            data_parallel_size=1, pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=2
        ),
        1,
        lambda module, optimizer: flip(module.constant),
        "constant",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=4)
def test_a_layout_is_clean_until_one_rank_changes(layout):
    """The change comes on rank 3 in step 6 of 8: a parameter on several ranks, a shard, a tied weight, a buffer."""
    kind, strategy, replicas, change, name = LAYOUTS[layout]
    module = kind().double()
    module.register_buffer("constant", torch.arange(3.0), persistent=False)
    monitor = ReplicaDriftMonitor(every_n_steps=1, show_table=False)
    trainer = fit(module, strategy(), [Spoil(6, [3], change), monitor], replicas)
    report, found = monitor.report(), names(monitor)
    assert found[0][:2] == (6, name)
    assert 3 in found[0][2]
    if layout == "tied stages":
        assert found[0][2] == [3], "three of four are right"
    assert all(step >= 6 for step, _, _ in found)
    assert report["checks"] == trainer.global_step + 1
    assert report["compared"]["parameter"] >= 3
    assert report["compared"]["option"] >= 3


@distributed(world_size=4)
def test_raise_stops_every_rank():
    monitor = ReplicaDriftMonitor(every_n_steps=1, action="raise", show_table=False)
    spoil = Spoil(5, [2], lambda module, optimizer: flip(module.net[0].weight))
    strategy = CompressedDDPStrategy(PowerSGD(2, min_numel=16))
    with pytest.raises(RuntimeError, match=r"step 5:\n  net.0.weight, ranks \[2\]: differs from rank 0: 1 of"):
        fit(Net().double(), strategy, [spoil, monitor], 4)


class Normalized(Net):
    """Its replicas hold different statistics; those of `average` DDP would have to share."""

    def __init__(self, averages):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
        self.averages = averages
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch, index):
        if self.averages:
            self.average.add_(batch[0].mean())
        return super().training_step(batch, index)


@pytest.mark.parametrize("broadcast", [True, False])
@distributed(world_size=2)
def test_statistics_of_each_rank_are_not_compared(broadcast):
    monitor = ReplicaDriftMonitor(every_n_steps=1, action="raise", show_table=False)
    strategy = DDPStrategy(broadcast_buffers=broadcast)
    fit(Normalized(averages=broadcast).double(), strategy, [monitor], 2, max_epochs=1)
    compared = monitor.report()["compared"]
    assert compared["parameter"] == 6
    assert compared.get("buffer", 0) == (0 if broadcast else 1)


class PlainFSDP(CompressedFSDPStrategy):
    """Without compression, as `FSDPStrategy`, which does not run on CPU."""

    def __init__(self, **kwargs):
        super().__init__(Dense(), **kwargs)

    def _compress(self, wrapped):
        return None


@pytest.mark.sweep
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
@distributed(world_size=4)
def test_pieces_under_fsdp(sharding):
    options = {"device_mesh": (2, 2)} if sharding == "HYBRID_SHARD" else {}
    monitor = ReplicaDriftMonitor(every_n_steps=1, show_table=False)
    spoil = Spoil(2, [3], lambda module, optimizer: flip(module.net[4].bias) if module.net[4].bias.numel() else None)
    strategy = PlainFSDP(sharding_strategy=sharding, auto_wrap_policy={nn.Linear}, **options)
    fit(Net(), strategy, [spoil, monitor], 4, max_epochs=1)
    report = monitor.report()
    assert report["compared"]["option"] >= 3
    if sharding == "FULL_SHARD":
        assert "parameter" not in report["compared"]
        assert report["findings"] == []
    else:
        assert report["compared"]["parameter"] == 8 * (2 if sharding == "HYBRID_SHARD" else 1)
        step, name, ranks = names(monitor)[0]
        assert (step, name) == (2, "net.4.bias")
        assert ranks == ([3] if sharding == "NO_SHARD" else [1, 3])


class WithDTensors(Net):
    """As people write it for Lightning's `ModelParallelStrategy`."""

    def configure_model(self):
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], styles)
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@distributed(world_size=4)
def test_pieces_of_dtensors():
    needs_fully_shard()
    monitor = ReplicaDriftMonitor(every_n_steps=1, show_table=False)
    spoil = Spoil(2, [1], lambda module, optimizer: flip(module.net[3].weight.to_local()))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    fit(WithDTensors(), strategy, [spoil, monitor], 2, max_epochs=1)
    # Two halves of what the tensor axis does not divide: the norm, the bias after it, and the last layer.
    assert monitor.report()["compared"]["parameter"] == 2 * 5
    assert names(monitor)[0] == (2, "net.3.weight", [0, 1])
    assert all(step >= 2 for step, _, _ in names(monitor))


@distributed(world_size=2)
def test_forty_lossy_steps_are_clean(group):
    model, compressor = nn.Linear(12, 8), TopK(0.1, min_numel=16) | Quantize(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    audit = DriftAccumulator(group, lambda value: comm.all_gather_object(value, group))
    torch.manual_seed(group.rank)
    for step in range(40):
        optimizer.zero_grad()
        model(torch.randn(4, 12)).square().mean().backward()
        compressor.reduce_({name: parameter.grad for name, parameter in model.named_parameters()}, group)
        optimizer.step()
        if step % 10 == 9:
            held = {StateKey("parameter", name): parameter for name, parameter in model.named_parameters()}
            assert audit.check(step, held) == []
    assert audit.checks == 4
