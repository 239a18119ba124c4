"""Models as their authors wrote them, in stages: losses, every gradient by name, weights and norms of one process."""

import functools
import math
import os

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.comm.weight_gradients import WeightGradients
from lightning_parallel.compat import ParallelState, patched
from lightning_parallel.tensor.pieces import without_pieces
from tests.examples.test_gpt import model as gpt_example
from tests.harness import distributed
from tests.pipeline import other_models
from tests.pipeline.models import built
from tests.strategies.models import trainer_for

SIZES = {
    "pipeline 2": {"pipeline_parallel_size": 2},
    "pipeline 4": {"pipeline_parallel_size": 4},
    "pipeline 2 x data 2": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    "tensor 2 x pipeline 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


class Rows(Dataset):
    """The samples of a batch, one by one; of each, those that a replica sees."""

    def __init__(self, batch, replicas=1, replica=0):
        self.batch = tree_map(lambda tensor: tensor[replica::replicas], batch)

    def __len__(self):
        return len(tree_leaves(self.batch)[0])

    def __getitem__(self, index):
        return tree_map(lambda tensor: tensor[index], self.batch)


class Wrapped(LightningModule):
    """Trains any model by its step, and keeps the gradients."""

    def __init__(self, model, step):
        super().__init__()
        self.model, self._step = model, step
        self.losses, self.gradients = [], []

    def training_step(self, batch, index):
        result = self._step(batch)
        loss = result["loss"] if isinstance(result, dict) else result
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.losses.append(loss.detach())
        return result

    def on_train_epoch_start(self):
        self.model.epoch = self.current_epoch

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def example_gpt():
    torch.manual_seed(3)
    gpt = gpt_example.ByteGPT(layers=4, width=16, heads=2, context=12, dropout=0.0).double()
    return gpt, gpt.loss, torch.randint(256, (8, 13))


class NanoAttention(nn.Module):
    """As in nanoGPT: it takes its width from its input."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.qkv(x).split(c, dim=2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).contiguous().view(b, t, c))


class NanoBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = NanoAttention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class NanoGPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(27, width), nn.Linear(width, 27)
        self.blocks = nn.ModuleList(NanoBlock(width) for _ in range(4))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, windows):
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class ProjectedAttention(NanoAttention):
    """Queries, keys and values are layers of their own, which share the gradient of their input."""

    def __init__(self, width):
        super().__init__(width)
        del self.qkv
        self.q, self.k, self.v = (nn.Linear(width, width, bias=number > 0) for number in range(3))

    def qkv(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


class MixedBlock(NanoBlock):
    """Checkpointed by hand, if asked to."""

    def __init__(self, width, reentrant=None):
        super().__init__(width)
        self.reentrant = reentrant

    def forward(self, x):
        run = super().forward
        return run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)


def mixed_gpt():
    """Ways in which the gradient of a weight comes: fused, shared input, checkpointed, frozen, tied, called twice."""
    torch.manual_seed(3)
    gpt = NanoGPT()
    gpt.blocks = nn.ModuleList(MixedBlock(16, reentrant) for reentrant in (None, False, True, None))
    gpt.blocks[3].attention = ProjectedAttention(16)
    gpt.blocks[0].mlp[0].weight.requires_grad_(False)
    gpt.blocks[1].attention.out.bias.requires_grad_(False)
    gpt.head.weight = gpt.embed.weight
    gpt.double()
    return gpt, gpt.loss, torch.randint(27, (8, 9))


def odd_gpt():
    """Lengths that differ from step to step, 11 and 12: half of either is 6 on the first of two ranks."""
    gpt, _, windows = example_gpt()
    gpt.epoch = 0
    return gpt, lambda batch: gpt.loss(batch[:, : 12 + gpt.epoch % 2]), windows


def build(name):
    if name == "odd_gpt":
        return odd_gpt()
    if name == "mixed_gpt":
        return mixed_gpt()
    if name == "llama_flex":
        return built("llama", attention="flex_attention")
    return built(name, source=vars(other_models) if name in vars(other_models) else None)


def train(name, strategy, devices, replicas=1, verifies=True, **trainer_options):
    rank = comm.Group.of().rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    model, step, batch = build(name)
    module = Wrapped(model, step)
    batch = tree_map(lambda tensor: tensor[: len(tensor) // 2 * 2], batch)  # replicas of equal size
    rows = Rows(batch, replicas, rank // (devices // replicas))
    trainer_options = {"max_epochs": 3 if name == "odd_gpt" else 2, **trainer_options}
    loader = DataLoader(rows, batch_size=len(rows))
    trainer = trainer_for(
        strategy, devices, verifies, gradient_clip_val=0.3, use_distributed_sampler=False, **trainer_options
    )
    trainer.fit(module, loader)
    return module, trainer


def expect_equal(module, trainer, expected, replicas):
    strategy = trainer.strategy
    assert len(module.gradients) == len(expected.gradients) > 0
    for found, truth in zip(module.gradients, expected.gradients):
        for name, gradient in found.items():
            full = without_pieces(gradient)
            torch.testing.assert_close(full, truth[name], rtol=1e-9, atol=1e-11, msg=f"gradient of {name}")
    assert {n for g in comm.all_gather_object(list(module.gradients[0]), comm.Group.of()) for n in g} == set(
        expected.gradients[0]
    )
    full = strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-9, atol=1e-11, msg=name)
    if replicas == 1:
        torch.testing.assert_close(torch.stack(module.losses), torch.stack(expected.losses), rtol=1e-10, atol=1e-12)


# Four ranks, for models whose stages share more than one tensor.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "layout"),
    [("tied", "pipeline 4"), ("tied", "tensor 2 x pipeline 2"), ("two_streams", "pipeline 4")],
)
@distributed(world_size=4)
def test_models(name, layout):
    check(name, layout)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "convolutional", "siamese"),
        *("qwen2", "t5", "vit", "deberta", "hidden_states", "resnet"),
        *(
            "albert",
            "one_layer_four_times",
            "lstm",
            "encoder_decoder",
            "module_dict",
            "nested_lists",
            "losses_in_a_list",
            "a_changing_hook",
        ),
    ],
)
@distributed(world_size=2)
def test_other_models(name):
    check(name, "pipeline 2")


@functools.lru_cache(maxsize=1)  # on all ranks alike, for one layout after the other
def on_one_process(name):
    return train(name, "auto", 1)[0]


def check(name, layout):
    expected, sizes = on_one_process(name), SIZES[layout]
    strategy = HybridParallelStrategy(num_microbatches=3, **sizes)
    module, trainer = train(name, strategy, math.prod(sizes.values()))
    expect_equal(module, trainer, expected, 1)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "encoder", "odd_gpt"])
@distributed(world_size=4)
def test_a_cut_inside_of_a_divided_sequence(name):
    expected = on_one_process(name)
    strategy = HybridParallelStrategy(num_microbatches=3, sequence_parallel=True, **SIZES["tensor 2 x pipeline 2"])
    # The self-check runs on GPT-2 in `test_divided_logits.py`, on Llama in `hidden_states`, on BERT in `siamese`.
    module, trainer = train(name, strategy, 4, verifies=name in ("encoder", "odd_gpt"))
    expect_equal(module, trainer, expected, 1)
    assert has_cut_inside(module)


def has_cut_inside(module):
    """Whether a region of the sequence has several blocks, between which the stages are cut."""
    regions = ParallelState.of(module).sharding.plan.sequence_regions
    return max(len(region.blocks) for region in regions) > 1


class ReadsBetween(Wrapped):
    """Reads hidden states between blocks in the first step, or leaves out the last block in the second step."""

    kind = ""

    def training_step(self, batch, index):
        gpt, tokens = self.model, batch[:, :-1]
        x = gpt.embedding(tokens)
        for block in gpt.blocks:
            if self.kind == "later" and self.global_step and block is gpt.blocks[-1]:
                continue
            x = block(x)
            if self.kind == "at once":
                F.cross_entropy(gpt.head(x).flatten(0, 1), batch[:, 1:].flatten())
        return F.cross_entropy(gpt.head(gpt.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


def read_between(kind, strategy, devices):
    rank = comm.Group.of().rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    model, step, batch = example_gpt()
    module = ReadsBetween(model, step)
    module.kind = kind
    trainer = trainer_for(strategy, devices)
    trainer.fit(module, DataLoader(Rows(batch), batch_size=8))
    return trainer.strategy.lightning_module_state_dict()


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_code_that_reads_between_blocks_of_a_divided_sequence_is_right_or_refused_on_every_rank():
    expected = read_between("at once", "auto", 1)

    def strategy():
        return HybridParallelStrategy(
            num_microbatches=2, sequence_parallel=True, tensor_parallel_size=2, pipeline_parallel_size=2
        )

    # The record of the first step shows the reads, so each block is a region of its own.
    found = read_between("at once", strategy(), 4)
    if comm.Group.of().rank == 0:
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11, msg=name)
    with pytest.raises((RuntimeError, ValueError), match=r"test_pipeline_models.py, line \d+.*sequence_parallel=F"):
        read_between("later", strategy(), 4)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_a_divided_sequence_with_replicas():
    expected = on_one_process("qwen2")
    strategy = HybridParallelStrategy(tensor_parallel_size=2, data_parallel_size=2, sequence_parallel=True)
    module, trainer = train("qwen2", strategy, 4, 2)
    expect_equal(module, trainer, expected, 2)
    assert ParallelState.of(module).sharding.plan.sequence_regions


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize(
    ("layout", "schedule", "options"),
    [
        ("tensor 2 x pipeline 2", "zb_h1", {}),
        ("tensor 2 x pipeline 2", "zbv", {"sequence_parallel": True}),
        ("pipeline 2 x data 2", "zb_h1", {}),
    ],
)
@distributed(world_size=4)
def test_weight_gradients_of_sharded_layers_that_come_later(layout, schedule, options):
    expected = on_one_process("mixed_gpt")
    defer, deferred = WeightGradients.defer, set()

    def noted(queue, parameter, compute, *reads):
        found = defer(queue, parameter, compute, *reads)
        deferred.update([id(parameter)] if found else [])
        return found

    with patched(WeightGradients, "defer", noted):
        sizes, replicas = SIZES[layout], SIZES[layout].get("data_parallel_size", 1)
        strategy = HybridParallelStrategy(num_microbatches=4, schedule=schedule, **sizes, **options)
        module, trainer = train("mixed_gpt", strategy, 4, replicas, verifies=layout == "pipeline 2 x data 2")
    expect_equal(module, trainer, expected, replicas)
    # Of the stages of this rank.
    held = [name for name, found in module.gradients[0].items() if not getattr(found, "is_elsewhere", False)]
    weights = {name: p for name, p in module.named_parameters() if name in held and p.dim() == 2}
    assert not [name for name, p in weights.items() if "blocks" in name and id(p) not in deferred]
    assert "sequence_parallel" not in options or has_cut_inside(module)
