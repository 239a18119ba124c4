"""Recomputation (`activation_checkpointing`): equal to the same run without it, and to one process."""

import copy
import functools
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_parallel import (
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PowerSGD,
)
from lightning_parallel.compat import Patches, patched
from lightning_parallel.compat.torch import current_graph_task_id
from lightning_parallel.compression import Dense
from lightning_parallel.pipeline.recomputation import recompute
from lightning_parallel.pipeline.search import MemoryLimitError
from lightning_parallel.strategies.steps import recomputed
from tests.harness import distributed
from tests.strategies.test_pipeline import fit


class Block(nn.Module):
    """A transformer layer that counts its runs and draws from dropout."""

    runs, runs_again = 0, 0

    def __init__(self, dropout=0.0, width=16):
        super().__init__()
        self.heads, self.dropout = 2, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def attend(self, x):
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))

    def forward(self, x):
        Block.runs += 1
        Block.runs_again += current_graph_task_id() != -1
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(LightningModule):
    def __init__(self, make=Block, layers=4, lr=0.1):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(2, 16)
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(16, 5)
        self.lr = lr
        self.losses = []
        self.double()

    def on_train_start(self):
        Block.runs = Block.runs_again = 0  # plans run the layers, too

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.run(self.embed(x.view(-1, 6, 2))).mean(1))

    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


EVEN = {"balance": "uniform"}  # measured split points differ from run to run
LAYOUTS = {
    "one": ({}, 1, 1),
    "data": ({}, 2, 2),
    "tensor": ({"tensor_parallel_size": 2}, 2, 1),
    "sequence": ({"tensor_parallel_size": 2, "sequence_parallel": True}, 2, 1),
    "gpipe": ({"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "gpipe", **EVEN}, 2, 1),
    "1f1b": ({"pipeline_parallel_size": 2, "num_microbatches": 4, **EVEN}, 2, 1),
    "interleaved": ({"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "interleaved_1f1b", **EVEN}, 2, 1),
    "zb_h1": ({"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "zb_h1", **EVEN}, 2, 1),
    "interleaved_zb": (
        {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "interleaved_zb", **EVEN},
        2,
        1,
    ),
    "zbv": ({"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "zbv", **EVEN}, 2, 1),
    "tensor x pipeline": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}, 4, 1),
    "sequence x pipeline": (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2, "sequence_parallel": True},
        4,
        1,
    ),
    "tensor x data": ({"tensor_parallel_size": 2}, 4, 2),
    "zero 2": ({"zero_stage": 2}, 2, 2),
    "zero 3": ({"zero_stage": 3}, 2, 2),
}


def train(module, layout="one", option="off", **options):
    """Train; returns the module with the number of runs of its blocks, and the trainer."""
    sizes, devices, replicas = LAYOUTS[layout]
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    strategy = "auto" if layout == "one" else HybridParallelStrategy(activation_checkpointing=option, **sizes)
    trainer = fit(module, strategy, devices, replicas, **{"limit_val_batches": 0, "max_epochs": 1, **options})
    module.runs, module.runs_again = Block.runs, Block.runs_again
    return module, trainer


def assert_equal(module, expected, tolerance=1e-10):
    assert list(module.state_dict()) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=tolerance, atol=1e-12, msg=name)


@functools.cache
def on_one_process():
    return train(Model())[0]


TWO = [
    "data",
    "tensor",
    "sequence",
    "gpipe",
    "1f1b",
    "interleaved",
    "zb_h1",
    "interleaved_zb",
    "zbv",
    "zero 2",
    "zero 3",
]


@pytest.mark.sweep
@pytest.mark.parametrize("layout", TWO)
@distributed(world_size=2)
def test_two_ranks_equal_one_process(group, layout):
    module, _ = train(Model(), layout, "selective")
    assert_equal(module, on_one_process())
    module, _ = train(Model(), layout, "full")
    assert_equal(module, on_one_process())
    # Each block runs once more for each microbatch. In a pipeline, a stage runs it once to see the shapes.
    plain, _ = train(Model(), layout)
    assert plain.runs_again == 0
    assert module.runs - module.runs_again == plain.runs
    assert plain.runs - 4 <= module.runs_again <= plain.runs


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", ["tensor x pipeline", "sequence x pipeline", "tensor x data"])
@distributed(world_size=4)
def test_four_ranks_equal_one_process(group, layout):
    for option in ("full", "selective"):
        module, _ = train(Model(), layout, option, verifies=True)
        assert_equal(module, on_one_process())


def train_within(limit, layout):
    sizes = LAYOUTS[layout][0]
    sizes["memory_limit_bytes"] = limit
    try:
        return train(Model(), layout, "auto")
    finally:
        sizes.pop("memory_limit_bytes")


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["data", "tensor", "zero 3"])
@distributed(world_size=2)
def test_auto_computes_as_few_layers_again_as_fit(group, layout):
    with pytest.raises(MemoryLimitError, match="gradients and optimizer alone") as held:
        train_within(1.0, layout)
    least = held.value.least_bytes + 1
    if layout == "tensor":  # replicas have room, because the buckets of gradients travel later than activations exist
        with pytest.raises(MemoryLimitError, match="with all repeated layers computed again") as error:
            train_within(least, layout)
        least = 1.05 * error.value.least_bytes
    module, _ = train_within(least, layout)
    assert_equal(module, on_one_process())
    assert module.runs_again <= module.runs - module.runs_again
    assert module.runs_again > 0 or layout != "tensor"
    module, _ = train(Model(), layout, "auto")
    assert module.runs_again == 0
    # The device with the least memory decides for all ranks.
    least = patched(recomputed, "memory_here", lambda *_: 1e9 if group.rank == 0 else 1.0)
    with least, pytest.raises(MemoryLimitError, match="gradients and optimizer alone"):
        train(Model(), layout, "auto")


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["1f1b", "zb_h1"])
@distributed(world_size=2)
def test_auto_keeps_each_stage_within_the_limit(group, layout):
    plan = train_within(1e9, layout)[1].strategy.run.engine.plan
    assert not plan.recomputed
    most = max(plan.peak_bytes(rank) for rank in range(2))
    with pytest.raises(MemoryLimitError, match="layers computed again") as least:
        train_within(1.0, layout)
    largest = max(parameter.nbytes for parameter in Model().parameters())
    limit = (most + least.value.least_bytes) / 2 + largest
    module, trainer = train_within(limit, layout)
    assert_equal(module, on_one_process())
    plan = trainer.strategy.run.engine.plan
    # A split backward holds what it computes again until W, which may save nothing.
    assert plan.recomputed or (layout == "zb_h1" and most <= limit)
    assert max(plan.peak_bytes(rank) for rank in range(2)) + largest <= limit


class PartlyFrozen(Model):
    """Trains adapters: the weights of a frozen layer are saved without a gradient."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        next(self.blocks[2].parameters()).requires_grad_(False)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tensor", "sequence", "zero 3"])
@distributed(world_size=2)
def test_frozen_layers(group, layout):
    expected = train(PartlyFrozen())[0]
    for option in ("full", "selective"):
        assert_equal(train(PartlyFrozen(), layout, option)[0], expected)


def with_dropout():
    return Model(functools.partial(Block, dropout=0.2))


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["data", "tensor", "sequence", "1f1b", "zbv"])
@distributed(world_size=2)
def test_dropout_draws_the_same_numbers_as_without(group, layout):
    expected, _ = train(with_dropout(), layout)
    after = torch.get_rng_state()
    for option in ("full", "selective"):
        module, _ = train(with_dropout(), layout, option)
        assert torch.equal(torch.get_rng_state(), after)
        assert_equal(module, expected, 1e-12)
        torch.testing.assert_close(module.losses, expected.losses, rtol=1e-12, atol=0)


class Odd(Block):
    """Takes keywords with names of torch's options, returns a dict, draws from all generators, and keeps statistics."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(16)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("steps", torch.zeros(()))
        self.seen, self.calls = [], 0

    def forward(self, x, *, debug, context_fn=None):
        self.calls += 1
        self.seen.append(float(x.detach().mean()))
        context_fn.append(1)
        self.steps.add_(1)
        x = super().forward(x["x"] if isinstance(x, dict) else x)
        x = self.batch_norm(x.flatten(0, 1)).view_as(x) * float(self.steps)
        noise = random.random() + np.random.rand() + torch.rand((), generator=self.generator)
        return {"x": x * debug * noise, "mean": x.detach().mean(), "name": "odd"}


class OddModel(Model):
    def __init__(self):
        super().__init__(Odd, 2)
        self.given = []

    def run(self, x):
        for block in self.blocks:
            found = block(x, debug=0.5, context_fn=self.given)
            x = found["x"] + found["mean"]
        # A layer that is called twice.
        return self.blocks[0](x, debug=0.3, context_fn=self.given)["x"]


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["data", "tensor"])
@distributed(world_size=2)
def test_a_second_run_of_a_layer_leaves_no_trace(group, layout):
    expected, _ = train(OddModel(), layout)
    for option in ("full", "selective"):
        module, _ = train(OddModel(), layout, option)
        assert module.runs_again == 6
        assert_equal(module, expected, 1e-12)
        assert module.given == expected.given
        for block, plain in zip(module.blocks, expected.blocks):
            assert (block.calls, block.seen) == (plain.calls, plain.seen)
            assert torch.equal(block.generator.get_state(), plain.generator.get_state())
        torch.testing.assert_close(module.losses, expected.losses, rtol=1e-12, atol=0)


class Watched(Model):
    """Looks at its layers during the run, and counts the calls of hooks."""

    def on_train_start(self):
        super().on_train_start()
        self.before = [copy.deepcopy(self.blocks[0])]
        is_whole = self.trainer.strategy.mesh.data_parallel > 1
        self.kept = pickle.dumps(self.blocks[0]) if is_whole else b""
        self.names = list(self.state_dict())
        self.hooked = 0

        def count(*_):
            self.hooked += 1

        self.blocks[0].register_forward_hook(count)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["data", "tensor", "1f1b"])
@distributed(world_size=2)
def test_names_copies_pickles_and_hooks_stay(group, layout):
    plain, _ = train(Watched(), layout)
    module, trainer = train(Watched(), layout, "full")
    assert module.names == plain.names
    assert module.hooked == plain.hooked
    assert "_compiled_call_impl" not in vars(module.before[0])
    if module.kept:
        assert vars(pickle.loads(module.kept)).get("_compiled_call_impl") is None
    # After the run, layers are the user's again.
    assert all(vars(block).get("_compiled_call_impl") is None for block in module.blocks)
    assert type(module.blocks[0]) is Block


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_the_layers_may_change_between_runs(group):
    for layout in ("data", "tensor", "1f1b"):
        module, counts = Model(), []
        for option in ("full", 2, "off", 3):
            train(module, layout, option, limit_train_batches=1)
            counts.append(module.runs_again)
        # Of four layers: all, the first and third, none, the first and last. A stage holds two.
        assert counts == ([8, 4, 0, 4] if layout == "1f1b" else [4, 2, 0, 2]), (layout, counts)


@distributed(world_size=2)
def test_evaluation_keeps_one_run(group):
    train(Model(), "data", "full", limit_train_batches=1, limit_val_batches=1)
    assert (Block.runs, Block.runs_again) == (12, 4)


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps, by storage, at the end of a forward."""

    def __init__(self):
        self.sizes = {}
        super().__init__(self.pack, lambda held: held)

    def pack(self, tensor):
        if type(tensor) in (torch.Tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


class Measured(Model):
    def training_step(self, batch, index):
        parameters = {value.untyped_storage().data_ptr() for value in self.parameters()}
        with (saved := Saved()):
            loss = super().training_step(batch, index)
        self.kept = sum(size for place, size in saved.sizes.items() if place not in parameters)
        return loss


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["data", "tensor"])
@distributed(world_size=2)
def test_autograd_keeps_the_inputs_of_layers_only(group, layout):
    expected, _ = train(Measured(layers=8), layout, limit_train_batches=1)
    full, _ = train(Measured(layers=8), layout, "full", limit_train_batches=1)
    # The checkpoint keeps the inputs itself: autograd's own part is the embedding, the head and the loss.
    assert full.kept < 0.1 * expected.kept


class Counting(Model):
    """Counts the messages of its second step."""

    def on_train_batch_start(self, batch, index):
        if index == 1:
            self.patches, self.sent = Patches(), Counter()
            names = ("all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "isend")
            for name in names:
                self.patches.replace(dist, name, functools.partial(self.count, name, getattr(dist, name)))

    def count(self, name, function, *args, **kwargs):
        self.sent[name] += 1
        return function(*args, **kwargs)

    def on_train_batch_end(self, outputs, batch, index):
        if index == 1:
            self.patches.undo()


class Activated(Block):
    """Changes outputs of products in place; `linear` does so, too, for inputs that are not contiguous."""

    def attend(self, x):
        x = x + self.out(x.transpose(0, 1).contiguous().transpose(0, 1)).sigmoid()
        return super().attend(x) + self.up(x).mul_(0.5).add_(0.1).sigmoid_().sum(-1, keepdim=True)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tensor", "sequence"])
@distributed(world_size=2)
def test_selective_sends_nothing_twice(group, layout):
    plain, _ = train(Counting(), layout)
    full, _ = train(Counting(), layout, "full")
    selective, _ = train(Counting(), layout, "selective")
    assert selective.sent == plain.sent, (selective.sent, plain.sent)
    assert full.sent.total() > plain.sent.total()


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["data", "tensor", "sequence"])
@distributed(world_size=2)
def test_selective_computes_a_product_again_that_changed_in_place(group, layout):
    plain, _ = train(Model(Activated), layout)
    selective, _ = train(Model(Activated), layout, "selective")
    assert_equal(selective, plain, 1e-12)


@distributed(world_size=1)
def test_selective_computes_no_product_twice(group):
    layer = nn.ModuleList([Block(), Block()])
    recompute(layer, "selective")
    x = torch.randn(2, 6, 16, requires_grad=True)

    def flops(call):
        x.grad = None
        with FlopCounterMode(display=False) as counter:
            y = call(x).square().sum()
            y.backward(retain_graph=True)
            first = x.grad.clone()
            y.backward()
        torch.testing.assert_close(x.grad, 2 * first)
        return first, counter.get_total_flops()

    for _ in range(2):
        expected, count = flops(layer[0].forward)
        found, same_count = flops(layer[0])
        assert torch.equal(found, expected)
        assert same_count == count


class Plain(Model):
    def __init__(self):
        super().__init__(layers=1)
        self.blocks = Block().double()

    def run(self, x):
        return self.blocks(x)


class InPlace(Model):
    def run(self, x):
        for block in self.blocks:
            y = block(x)
            x.mul_(1.5)
            x = x + y
        return x


@distributed(world_size=2)
def test_what_cannot_be_recomputed_is_refused(group):
    with pytest.raises(ValueError, match="`activation_checkpointing` needs repeated layers; got no `ModuleList`"):
        train(Plain(), "data", "full")
    # A stage counts the layers of all stages.
    train(Model(), "1f1b", 4)
    with pytest.raises(ValueError, match="`activation_checkpointing` must be at most 4, .* `blocks`; got 5"):
        train(Model(), "1f1b", 5)


@distributed(world_size=2)
def test_inputs_that_change_are_refused(group):
    with pytest.raises(RuntimeError, match=r"The inputs of `blocks\.\d` must not change in place"):
        train(InPlace(functools.partial(FirstSquared)), "data", "full")


class FirstSquared(nn.Module):
    """Saves nothing of its input, so that autograd would not notice a change of it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x + 1) * self.scale


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("layout", ["data", "tensor", "tensor x data"])
@distributed(world_size=4)
def test_with_other_features(group, layout):
    """Compression, local steps, accumulation, clipping."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    sizes, _, replicas = LAYOUTS[layout]
    if layout == "data":
        replicas = 4
    if layout == "tensor":
        sizes, replicas = {"tensor_parallel_size": 4}, 1

    def trained(strategy):
        torch.manual_seed(11)
        module = with_dropout()
        fit(module, strategy, 4, replicas, limit_val_batches=0, **options)
        return module

    for kind, arguments in ((HybridParallelStrategy, {"compression": PowerSGD(2)}), (LocalSGDStrategy, {})):
        if replicas == 1 and kind is LocalSGDStrategy:
            continue
        made = functools.partial(kind, **sizes, **arguments)
        assert_equal(trained(made(activation_checkpointing=2)), trained(made()), 1e-12)


class ByHand(Model):
    """Checkpoints its layers by itself, in one of two ways."""

    def __init__(self, reentrant=False, make=Block):
        super().__init__(make)
        self.reentrant = reentrant

    def run(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["data", "tensor", "sequence", "1f1b"])
@distributed(world_size=2)
def test_together_with_checkpoints_of_the_model(group, layout):
    for reentrant in (False, True) if layout in ("data", "tensor") else (False,):
        module, _ = train(ByHand(reentrant), layout, "full")
        assert_equal(module, on_one_process())


class Twice(Block):
    """Attention by products, since torch's own kernel has no second derivative on a CPU."""

    def attend(self, x):
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Penalty(Model):
    """Takes gradients of gradients, through its layers."""

    def __init__(self):
        super().__init__(Twice)

    def training_step(self, batch, index):
        x = batch[0].requires_grad_()
        loss = F.cross_entropy(self(x), batch[1])
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["data", "tensor"])
@distributed(world_size=2)
def test_gradients_of_gradients(group, layout):
    expected, _ = train(Penalty(), layout)
    module, _ = train(Penalty(), layout, "full")
    assert_equal(module, expected)


class FullySharded(Model):
    def configure_model(self):
        if not isinstance(self.blocks[0], FSDPModule):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


COMPRESSED = {
    "ddp": (CompressedDDPStrategy, {}),
    "fsdp": (CompressedFSDPStrategy, {"auto_wrap_policy": {Block}}),
    "fully_shard": (CompressedModelParallelStrategy, {"data_parallel_size": 2, "tensor_parallel_size": 1}),
    "deepspeed 3": (CompressedDeepSpeedStrategy, {"stage": 3}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", COMPRESSED)
@distributed(world_size=2)
def test_strategies_with_compressed_gradients(group, name):
    kind, options = COMPRESSED[name]
    if name == "deepspeed 3":
        pytest.importorskip("deepspeed")
    losses = {}
    for option in ("off", "full", "selective", 2):
        torch.manual_seed(11)
        module = (FullySharded if name == "fully_shard" else Model)(functools.partial(Block, dropout=0.2))
        arguments = {} if name.startswith("deepspeed") else {"compression": Dense()}
        fit(
            module.float() if name.startswith("deepspeed") else module,
            kind(**arguments, **options, activation_checkpointing=option),
            2,
            2,
            limit_val_batches=0,
            use_distributed_sampler=False,
        )
        losses[option] = torch.stack(module.losses)
        assert Block.runs_again == {"off": 0, 2: 8}.get(option, 16), (option, Block.runs_again)
    for option in losses:
        torch.testing.assert_close(
            losses[option],
            losses["off"],
            rtol=1e-10,
            atol=0,
            msg=lambda text, option=option: f"{option}: {text} {losses}",
        )


@distributed(world_size=2)
def test_a_run_resumes_with_another_option_and_layout(group, tmp_path):
    path = str(tmp_path / "first.ckpt")
    _, trainer = train(Model(), "tensor", "selective")
    trainer.save_checkpoint(path)
    module, _ = train(Model(), "1f1b", "full", max_epochs=2, ckpt_path=path)
    expected, _ = train(Model(), max_epochs=2)
    assert_equal(module, expected)


class Skipping(Model):
    """Passes outputs over later layers, by a list."""

    def run(self, x):
        kept = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index < 2:
                kept.append(x)
            else:
                x = x + kept.pop()
        return x


@pytest.mark.sweep
@pytest.mark.parametrize("option", ["full", "selective"])
@distributed(world_size=2)
def test_connections_that_skip_stages(group, option):
    expected, _ = train(Skipping())
    for layout in ("1f1b", "zbv"):
        module, _ = train(Skipping(), layout, option)
        assert_equal(module, expected)
