"""Bytes held, against sums by hand."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import (
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    TopK,
)
from lightning_parallel.callbacks.monitors.memory import (
    ActivationMeter,
    MemoryProfiler,
    StorageSet,
    held_bytes,
    tensors_in,
)
from lightning_parallel.callbacks.monitors.replica_drift import ReplicaDriftMonitor
from lightning_parallel.pipeline.recomputation import recompute
from tests.callbacks.conftest import place_rank
from tests.callbacks.test_replica_drift import PlainFSDP
from tests.harness import distributed
from tests.pipeline.other_models import Block
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_pipeline import Deep


def size(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fit(module, strategy, group, replicas, monitor=None, dtype=torch.float64, callbacks=(), **options):
    place_rank()
    monitor = monitor or MemoryProfiler(every_n_steps=1, show_table=False)
    strategy.gather_after_fit = "off"  # what a rank held during the run is compared with the module
    trainer = trainer_for(strategy, group.size, callbacks=[monitor, *callbacks], max_epochs=1, **options)
    trainer.fit(module, loader(replicas, group.rank // (group.size // replicas), dtype=dtype))
    return monitor.report()


# ------------------------------------------------------------------------------------------------------------ storages


def test_storages_count_once_and_as_a_whole():
    base, storages = torch.zeros(100), StorageSet()
    assert storages.add([base[:10], base[5:], base.view(10, 10).T]) == 400
    assert storages.add([base]) == 0
    assert storages.add([torch.zeros(3, dtype=torch.float64), torch.zeros(5, device="meta")]) == 24
    assert base.untyped_storage() in storages


def test_tensors_in_nested_states():
    a, b = torch.zeros(1), torch.zeros(2)
    assert list(tensors_in([{"a": a, "n": 3}, ({"b": [b, None]}, "text")])) == [a, b]


def test_a_known_model_byte_for_byte():
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))
    module.append(nn.Linear(3, 5)).append(nn.Linear(5, 3))
    module[3].weight = module[0].weight  # tied
    module[4].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    sizes = held_bytes(list(module.parameters()), list(module.buffers()), list(optimizer.state.values()))
    trained = 15 + 5 + 10 + 15 + 5 + 3
    assert sizes == {
        "parameters": 4 * (trained + 15),
        "buffers": 4 * 10 + 8,
        "gradients": 4 * trained,
        "optimizer": 4 * 2 * trained + 4 * 7,
    }


def test_copies_that_an_optimizer_works_on_are_its_own():
    module = nn.Linear(3, 5).bfloat16()
    copies = [parameter.detach().float() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    sizes = held_bytes(list(module.parameters()), [], [*optimizer.state.values(), optimizer.param_groups])
    assert sizes == {"parameters": 40, "buffers": 0, "optimizer": 80}, "and no gradients, where there are none"


# --------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("depth", [1, 4])
def test_activations_of_a_stack(depth):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(6, 6), nn.ReLU())]
    module, x, meter = nn.Sequential(*layers), torch.randn(10, 6), ActivationMeter()
    held = StorageSet()
    held.add([*module.parameters(), x])
    with meter.measure(held):
        loss = module(x).sum()
    assert meter.current == meter.peak == depth * 10 * 6 * 4, "the output of each ReLU, which is the next one's input"
    loss.backward()
    assert (meter.current, meter.peak) == (0, depth * 10 * 6 * 4)


def test_layers_that_are_computed_again():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 6)) for _ in range(3)]
    module, x, meter = nn.Sequential(*layers), torch.randn(10, 6, requires_grad=True), ActivationMeter()
    held = StorageSet()
    held.add([*module.parameters(), x])
    # Its input and Tanh's output. The first input is the batch.
    size, inner = 10 * 6 * 4, 10 * 18 * 4
    for option, kept, again in (("off", 2 * size + 3 * inner, 0), ("full", 2 * size, inner)):
        recompute(module, option)
        meter.peak = 0
        with meter.measure(held):
            loss = module(x).sum()
            assert meter.current == kept
            loss.backward()
        assert (meter.current, meter.peak) == (0, kept + again)


def test_views_keep_all_of_their_storage():
    meter, x = ActivationMeter(), torch.randn(100, requires_grad=True)
    with meter.measure(StorageSet()):
        y = (x * 1.0)[:2].exp().sum()
        z = x[:3].sin().sum()
    assert meter.current == 400 + 8, "x behind its slice, and what exp returned"
    del y, z
    assert meter.current == 0


def test_gradients_and_errors_are_those_without_the_meter():
    def run(watched, spoil):
        torch.manual_seed(0)
        x, meter = torch.randn(5, requires_grad=True), ActivationMeter()
        with meter.measure(StorageSet()) if watched else torch.enable_grad():
            y = torch.relu_(x * 2.0).sigmoid()
            loss = (y * y).sum()
        if spoil:
            y.detach().add_(1.0)
        loss.backward()
        return x.grad

    assert torch.equal(run(True, False), run(False, False))
    for watched in (True, False):
        with pytest.raises(RuntimeError, match="modified by an inplace operation.*is at version 1; expected version 0"):
            run(watched, True)


def test_a_graph_that_is_kept_shows():
    class Keeping(Net):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.kept = torch.exp(self.net[0](batch[0])).sum()
            return loss

    kept, freed = MemoryProfiler(show_table=False), MemoryProfiler(show_table=False)
    trainer_for(callbacks=[kept], max_epochs=1).fit(Keeping().double(), loader())
    trainer_for(callbacks=[freed], max_epochs=1).fit(Net().double(), loader())
    assert kept.report()["ranks"][0]["activations"] == 8 * 18 * 8
    assert freed.report()["ranks"][0]["activations"] == 0
    assert freed.report()["ranks"][0]["activations_peak"] > 0


# --------------------------------------------------------------------------------------------------------- in training


def test_bad_arguments():
    with pytest.raises(ValueError, match="`every_n_steps` must be an integer of at least 1"):
        MemoryProfiler(every_n_steps=0)


def test_one_process(capsys):
    module, monitor = Net().double(), MemoryProfiler(activations=False)
    trainer_for(callbacks=[monitor], max_epochs=1).fit(module, loader())
    (rank,) = monitor.report()["ranks"]
    total = size(*module.parameters())
    assert (rank["parameters"], rank["gradients"], rank["optimizer"], rank["buffers"]) == (total, total, total, 0)
    assert {"activations", "compression", "allocated_peak"}.isdisjoint(rank)
    if Path("/proc/self/status").exists():
        assert rank["resident_peak"] >= rank["resident"] > total
    assert "process" in capsys.readouterr().out


LAYOUTS = {
    "ddp": (DDPStrategy, 2),
    "tensor": (lambda: TensorParallelStrategy(tensor_parallel_size=2), 1),
    "interleaved": (
        lambda: PipelineParallelStrategy(pipeline_parallel_size=2, schedule="interleaved_1f1b", virtual_stages=2),
        1,
    ),
    "compressed": (lambda: CompressedDDPStrategy(TopK(0.1, min_numel=16)), 2),
}


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=2)
def test_layouts(layout, group):
    make, replicas = LAYOUTS[layout]
    module, strategy = Deep(), make()
    report = fit(module, strategy, group, replicas)
    mine = report["ranks"][group.rank]
    total = size(*module.parameters())
    assert (mine["parameters"], mine["gradients"], mine["optimizer"]) == (total, total, total)
    assert mine["buffers"] == size(*module.buffers())
    assert mine["activations_peak"] > mine["activations"] == 0
    assert len(report["ranks"]) == 2
    if layout == "compressed":
        large = size(*(p for p in module.parameters() if p.numel() >= 16 and p.dim() > 1))
        # After the run there are no second buffers.
        assert mine["compression"] == 2 * strategy.compression.memory.num_bytes >= 2 * large
    if layout == "interleaved":
        plan = strategy.run.engine.plan
        stages = [row for row in report["stages"] if row["rank"] == group.rank]
        assert [row["stage"] for row in stages] == list(plan.schedule.stages_of(group.rank))
        assert sum(row["parameters"] for row in stages) == sum(row["optimizer"] for row in stages) == total
        assert [row["parameters"] / 8 for row in stages] == [plan.stage_parameters(row["stage"]) for row in stages]


def test_second_derivatives_pass_through():
    def run(watched):
        x, meter = torch.linspace(0.1, 1, 5, dtype=torch.float64, requires_grad=True), ActivationMeter()
        with meter.measure(StorageSet()) if watched else torch.enable_grad():
            (first,) = torch.autograd.grad((x.exp() * x.sin()).sum(), x, create_graph=True)
            (first**2).sum().backward()
        return x.grad

    assert torch.equal(run(True), run(False))


@distributed(world_size=2)
def test_schedules_hold_as_many_microbatches_as_they_should(group):
    # Per sample and block, in float64: input, mean and deviation of the norm; inputs of `up`, GELU and `down`.
    block = 8 * (8 + 1 + 1 + 8 + 16 + 16)
    for schedule, in_flight in (("gpipe", 4), ("1f1b", 2)):
        # Before the proof it is not known whether the step writes into its batch, which is copied for it.
        strategy = PipelineParallelStrategy(
            pipeline_parallel_size=2, schedule=schedule, num_microbatches=4, verify="always"
        )
        report = fit(Deep(), strategy, group, 1)
        assert (
            report["ranks"][0]["activations_peak"]
            == in_flight * 2 * strategy.run.engine.plan.layers_per_stage[0] * block
        )


@distributed(world_size=2)
def test_fsdp_pieces_and_activations_without_gathered_parameters(group):
    replicated, sharded = Net(), Net()
    ddp = fit(replicated, DDPStrategy(), group, 2, dtype=torch.float32)["ranks"][group.rank]
    fsdp = fit(sharded, PlainFSDP(auto_wrap_policy={nn.Linear}), group, 2, dtype=torch.float32)["ranks"][group.rank]
    assert fsdp["activations_peak"] == ddp["activations_peak"]
    assert fsdp["parameters"] < 0.6 * ddp["parameters"]
    assert fsdp["optimizer"] < 0.6 * ddp["optimizer"]


@distributed(world_size=4)
def test_tensor_x_pipeline(group):
    module = Deep()
    report = fit(
        module,
        HybridParallelStrategy(
            data_parallel_size=1, pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=2
        ),
        group,
        1,
    )
    assert report["ranks"][group.rank]["parameters"] == size(*module.parameters())
    assert [row["stage"] for row in report["stages"]] == [0, 0, 1, 1]
    whole = size(*Deep().parameters())
    assert sum(rank["parameters"] for rank in report["ranks"]) < 1.4 * whole


class Checkpointed(Net):
    """Keeps nothing of its first layers but their input, and computes them again in backward."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.use_reentrant = use_reentrant

    def training_step(self, batch, index):
        x, y = batch[0].requires_grad_(), batch[1]
        first, rest = self.net[:3], self.net[3:]
        h = first(x) if self.use_reentrant is None else checkpoint(first, x, use_reentrant=self.use_reentrant)
        return F.cross_entropy(rest(h), y)


def test_activation_checkpointing_keeps_less_and_trains_alike():
    peaks, plain = {}, Checkpointed().double()
    trainer_for(max_epochs=1).fit(plain, loader())
    for reentrant in (None, False, True):
        module, monitor = Checkpointed(reentrant).double(), MemoryProfiler(show_table=False)
        trainer_for(callbacks=[monitor], max_epochs=1).fit(module, loader())
        assert all(torch.equal(p, q) for p, q in zip(module.parameters(), plain.parameters()))
        peaks[reentrant] = monitor.report()["ranks"][0]["activations_peak"]
    assert peaks[False] < peaks[None]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_other_precisions(precision):
    module, monitor = Net(), MemoryProfiler(show_table=False)
    trainer_for(callbacks=[monitor], max_epochs=1, precision=precision).fit(module, loader(dtype=torch.float32))
    (rank,) = monitor.report()["ranks"]
    assert rank["parameters"] == 551 * (4 if precision == "bf16-mixed" else 2)
    assert rank["activations_peak"] > rank["activations"] == 0


@distributed(world_size=2)
def test_deepspeed(group):
    pytest.importorskip("deepspeed")
    module, strategy = Net(), CompressedDeepSpeedStrategy(stage=2)
    drift = ReplicaDriftMonitor(every_n_steps=1, action="raise", show_table=False)
    report = fit(module, strategy, group, 2, dtype=torch.float32, callbacks=[drift])
    mine, total = report["ranks"][group.rank], size(*module.parameters())
    assert total <= mine["parameters"] <= 1.1 * total, "flattened, and filled up"
    assert total <= mine["optimizer"] <= 1.1 * total, "half of the momenta, and of the parameters"
    assert "gradients" not in mine
    assert drift.report()["compared"] == {"parameter": 8}


WIDE = {
    "data 4": ({}, 4),
    "tensor x data": ({"tensor_parallel_size": 2}, 2),
    "pipeline x data": ({"pipeline_parallel_size": 2, "balance": "uniform"}, 2),
}


@pytest.mark.sweep
@pytest.mark.parametrize("layout", WIDE)
@distributed(world_size=4)
def test_what_replicas_divide_is_what_was_predicted(group, layout):
    class Wide(Deep):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(12, 64).double(), nn.Linear(64, 5).double()
            self.blocks = nn.ModuleList(Block(64) for _ in range(4)).double()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    sizes, replicas = WIDE[layout]
    whole = None
    for stage in (0, 1, 2) if layout == "data 4" else (0, 2):
        module, drift = Wide(), ReplicaDriftMonitor(every_n_steps=1, action="raise", show_table=False)
        strategy = HybridParallelStrategy(zero_stage=stage, num_microbatches=2, **sizes)
        report = fit(module, strategy, group, replicas, callbacks=[drift])
        for rank in report["ranks"]:
            kinds = rank["predicted"].keys() - {"activations_peak"}
            assert kinds == {"parameters", "gradients", "optimizer", "buckets"}
            for kind in rank["predicted"]:
                assert rank[kind] == pytest.approx(rank["predicted"][kind], rel=0.1), f"stage {stage}: {kind}"
        mine = report["ranks"][group.rank]
        whole = whole or mine
        share = 1 if stage == 0 else replicas
        assert mine["optimizer"] == pytest.approx(whole["optimizer"] / share, rel=0.05)
        assert drift.report()["compared"]["parameter"] > 0
