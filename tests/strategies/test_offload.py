"""`cpu_offload`: optimizers step in host memory, and inputs of recomputed layers wait there, with equal results."""

import gc
import re
import weakref
from contextlib import contextmanager

import pytest
import torch

from lightning_parallel import (
    HybridParallelStrategy,
    LocalSGDStrategy,
    MemoryProfiler,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_parallel.comm.host_memory import HostCopies
from lightning_parallel.compat import patched
from lightning_parallel.data_parallel import host_steps
from lightning_parallel.pipeline.recomputation import recompute
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_pipeline import Deep
from tests.strategies.test_recomputation import Model


class Scale(torch.nn.Module):
    """Has a parameter without dimensions, which no replica divides."""

    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(1.1))

    def forward(self, x):
        return x * self.value


class Adam(Net):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net.append(Scale())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class DeepAdam(Deep):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


LAYOUTS = {
    "replicas": (HybridParallelStrategy, {}, 2),
    "zero 1": (HybridParallelStrategy, {"zero_stage": 1}, 2),
    "zero 2": (HybridParallelStrategy, {"zero_stage": 2}, 2),
    "zero 3": (HybridParallelStrategy, {"zero_stage": 3}, 2),
    "tensor": (TensorParallelStrategy, {}, 1),
    "pipeline": (PipelineParallelStrategy, {"num_microbatches": 4}, 1),
    "local": (LocalSGDStrategy, {"pipeline_parallel_size": 2}, 1),
}


PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}
"""Leaves the inputs of the layers whole, as embeddings of language models do."""


def _assert_equal(module, expected):
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@contextmanager
def in_small_buckets():
    """Let steps on the host take several turns, and yield the copies in their order."""
    calls = []

    def noted(name, function):
        def note(self, *args):
            calls.append(f"{name} ")
            return function(self, *args)

        return note

    with (
        patched(host_steps, "BUCKET_BYTES", 256),
        patched(HostCopies, "to_host", noted("away", HostCopies.to_host)),
        patched(HostCopies, "arrive", noted("wait", HostCopies.arrive)),
        patched(HostCopies, "to_device", noted("back", HostCopies.to_device)),
    ):
        yield calls


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYOUTS)
@distributed(world_size=2)
def test_a_step_on_the_host_equals_one_process(name, group, tmp_path):
    kind, options, replicas = LAYOUTS[name]
    model = DeepAdam if name in ("pipeline", "local") else Adam
    alone, module = model().double(), model().double()
    clipped = {"gradient_clip_val": 0.1, "max_epochs": 1, "limit_train_batches": 4}
    stock = trainer_for(**clipped)
    stock.fit(alone, loader())
    with in_small_buckets() as calls:
        trainer = trainer_for(kind(**options, cpu_offload=("optimizer",)), 2, verifies=True, **clipped)
        trainer.fit(module, loader(replicas, group.rank * replicas // 2))
    _assert_equal(module, alone.state_dict())
    # All copies begin at once, and a bucket is on its way back before the host waits for the next one.
    assert re.fullmatch(r"((away )+(wait (back )+){2,}){4}", "".join(calls)), calls
    # The checkpoint is the ordinary one, and continues without offload and the other way round.
    path = str(tmp_path / "a.ckpt")
    trainer.save_checkpoint(path)
    more = {**clipped, "max_epochs": 2}
    alone2, module2 = model().double(), model().double()
    trainer_for(**more).fit(alone2, loader(), ckpt_path=path)
    trainer_for(kind(**options, cpu_offload=["optimizer"]), 2, **more).fit(
        module2, loader(replicas, group.rank * replicas // 2), ckpt_path=path
    )
    _assert_equal(module2, alone2.state_dict())


@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(world_size=2)
def test_the_profiler_counts_host_memory(zero_stage, group):
    profiler = MemoryProfiler(activations=False)
    strategy = HybridParallelStrategy(zero_stage=zero_stage, cpu_offload=("optimizer",))
    module = Adam(hidden=64).double()
    trainer_for(strategy, 2, max_steps=1, callbacks=[profiler]).fit(module, loader(2, group.rank))
    # Two moments, the parameters and their gradients.
    expected = 4 * sum(parameter.nbytes for parameter in module.parameters()) / (1 + zero_stage)
    for rank in profiler.report()["ranks"]:
        assert "optimizer" not in rank
        assert rank["host"] == pytest.approx(expected, rel=0.1)
        assert rank["predicted"]["host"] == pytest.approx(expected, rel=0.1)


def test_wrong_parts_are_told():
    for parts, text in (("optimizer", r"write \('optimizer',\)"), (("state",), "must be a tuple of 'optimizer' and")):
        with pytest.raises(ValueError, match=text):
            TensorParallelStrategy(cpu_offload=parts)
    with pytest.raises(ValueError, match="needs `activation_checkpointing`; got 'off'"):
        TensorParallelStrategy(cpu_offload=("activations",))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.Adam, "`Adam` must have capturable=False with `cpu_offload`"),
        (torch.optim.LBFGS, "`LBFGS` evaluates its closure several times in a step"),
    ],
)
@distributed(world_size=1)
def test_an_optimizer_that_needs_the_device_is_refused(group, kind, message):
    class Other(Net):
        def configure_optimizers(self):
            optimizer = kind(self.parameters())
            optimizer.param_groups[0]["capturable"] = True
            return optimizer

    with pytest.raises(ValueError, match=message):
        trainer_for(TensorParallelStrategy(cpu_offload=("optimizer",)), 1, max_steps=1).fit(Other().double(), loader())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TensorParallelStrategy, {"tensor_plan": PLAN, "activation_checkpointing": "full"}),
        (TensorParallelStrategy, {"tensor_plan": PLAN, "activation_checkpointing": "selective"}),
        (PipelineParallelStrategy, {"num_microbatches": 4, "activation_checkpointing": "full"}),
        (HybridParallelStrategy, {"zero_stage": 3, "activation_checkpointing": 2}),
    ],
)
@distributed(world_size=2)
def test_inputs_of_recomputed_layers_wait_in_host_memory(kind, options, group):
    replicas = 2 if kind is HybridParallelStrategy else 1
    alone, module = Model(), Model()
    short = {"max_epochs": 1, "limit_train_batches": 3}
    trainer_for(**short).fit(alone, loader())
    sent = []
    real = HostCopies.to_host

    def watched(self, tensor, into=None):
        sent.append(tensor.shape)
        return real(self, tensor, into)

    with patched(HostCopies, "to_host", watched):
        trainer = trainer_for(kind(**options, cpu_offload=("activations",)), 2, verifies=True, **short)
        trainer.fit(module, loader(replicas, group.rank * replicas // 2))
    _assert_equal(module, alone.state_dict())
    assert sent


def test_a_layer_keeps_no_input_on_the_device_and_tells_of_changes():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).relu()

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    model = Layers().double()
    recompute(model, "full", copies=HostCopies(torch.device("cpu")))
    source = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    x = source * 1.0
    held = weakref.ref(x)
    y = model.layers[0](x)
    del x
    gc.collect()
    assert held() is None
    y.sum().backward()
    torch.testing.assert_close(source.grad, torch.autograd.grad(plain(model, source).sum(), source)[0])
    # After the layer, code may write into its input: backward has a copy.
    x = source * 1.0
    y = model.layers[0](x)
    x.mul_(2)
    source.grad = None
    y.sum().backward()
    torch.testing.assert_close(source.grad, torch.autograd.grad(plain(model, source).sum(), source)[0])


def test_backward_fetches_the_inputs_of_the_layer_before():
    order = []

    class Layer(torch.nn.Linear):
        def forward(self, x):
            order.append("run")
            return super().forward(x).relu()

    model = torch.nn.Sequential(*(Layer(4, 4) for _ in range(3)))
    recompute(model, "full", copies=HostCopies(torch.device("cpu")))
    real = HostCopies.to_device

    def watched(self, *args):
        order.append("fetch")
        return real(self, *args)

    with patched(HostCopies, "to_device", watched):
        for _ in range(2):
            # In gradient accumulation, too: the calls of the first batch are over.
            loss = model(torch.randn(2, 4, requires_grad=True)).sum()
            order.clear()
            loss.backward()
            assert order == ["fetch", "fetch", "run", "fetch", "run", "run"]


def plain(model, x):
    layer = model.layers[0]
    return torch.nn.functional.linear(x, layer.linear.weight, layer.linear.bias).relu()
