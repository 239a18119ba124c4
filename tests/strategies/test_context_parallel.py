"""The context axis: its ranks read the same samples, hold the same parameters and average their gradients."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import ContextParallelStrategy, HybridParallelStrategy, LocalSGDStrategy, SelfCheckError, comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import ParallelState, patched
from lightning_parallel.compression import Dense
from lightning_parallel.strategies import mesh_strategy
from lightning_parallel.strategies.self_check import proof
from lightning_parallel.strategies.setup import positions
from tests.harness import distributed
from tests.strategies.models import Samples, trainer_for
from tests.strategies.test_pipeline import Deep, fit
from tests.strategies.test_pipeline_checkpoint import Tied, resume_in_a_ring
from tests.strategies.test_zero import Varied

# Sizes of the axes, and how many replicas they make of four ranks.
LAYOUTS = {
    "context 4": ({"context_parallel_size": 4}, 1),
    "context 2, data 2": ({"context_parallel_size": 2}, 2),
    "context 2, tensor 2": ({"context_parallel_size": 2, "tensor_parallel_size": 2}, 1),
    "pipeline 2, context 2": (
        {"pipeline_parallel_size": 2, "context_parallel_size": 2, "num_microbatches": 2},
        1,
    ),
}
OPTIONS = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "limit_val_batches": 0}


def place(module):
    return module.trainer.strategy.mesh.coordinate(module.trainer.global_rank).context_parallel


def scaled(loss, factor):
    """The same value, with another gradient."""
    return loss.detach() + factor * (loss - loss.detach())


class Partial(Varied):
    """Each rank of the context axis has another part of the gradient: the mean of the parts is the gradient."""

    def training_step(self, batch, index):
        output = super().training_step(batch, index)
        if isinstance(self.trainer.strategy, HybridParallelStrategy):
            size, rank = self.trainer.strategy.mesh.context_parallel, place(self)
            output["loss"] = scaled(output["loss"], 2 * rank / (size - 1))
        return output


def whole_sequences():
    """Leave the modules of these tests whole: they have no positions, and the tests are about the axis alone."""
    return patched(mesh_strategy, "plan_sequences", lambda *_: None)


def run(layout, module, **options):
    sizes, replicas = LAYOUTS[layout]
    known = {"zero_stage", "checkpoint_format", "compression"}
    of_strategy = {name: options.pop(name) for name in known & options.keys()}
    with whole_sequences():
        return fit(module, HybridParallelStrategy(**sizes, **of_strategy), 4, replicas, **options)


make = functools.partial(SGD, lr=0.1, momentum=0.9)


@functools.cache
def on_one_process():
    module = Partial(make)
    fit(module, "auto", 1, **OPTIONS)
    return {**module.state_dict(), **dict(enumerate(module.read))}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("layout", "ways"),
    [
        ("context 4", [{}, {"zero_stage": 2}]),
        ("context 2, data 2", [{}, {"zero_stage": 1}, {"zero_stage": 3}, {"compression": Dense()}]),
        ("context 2, tensor 2", [{}, {"zero_stage": 3}]),
        ("pipeline 2, context 2", [{}, {"zero_stage": 2}]),
    ],
)
@distributed(world_size=4)
def test_it_trains_like_one_process(group, layout, ways):
    for way in ways:
        module = Partial(make)
        trainer = run(layout, module, **way, **OPTIONS)
        for name, value in {**module.state_dict(), **dict(enumerate(module.read))}.items():
            torch.testing.assert_close(value, on_one_process()[name], rtol=1e-10, atol=1e-12, msg=f"{way}: {name}")
        if "zero_stage" in way:
            shards = trainer.strategy.groups.gradients.size
            for owner, state in trainer.optimizers[0].state.items():
                if "momentum_buffer" in state:
                    assert state["momentum_buffer"].numel() < owner.numel() / shards + 8


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_every_layout_resumes_every_other(group):
    def run_in(name, optimizer, **options):
        if name == "stock":
            return fit(Tied(optimizer), "auto", 1, **options)
        layout, _, is_sharded = name.partition(" as ")
        stage, _, layout = layout.partition(":")
        if is_sharded:
            options["checkpoint_format"] = "sharded"
        return run(layout, Tied(optimizer), zero_stage=int(stage), **options)

    names = ["1:context 2, data 2 as sharded", "0:pipeline 2, context 2 as sharded", "3:context 2, tensor 2"]
    resume_in_a_ring(run_in, ["stock", *names], "adam", group)  # stock Lightning reads one file


class Attending(nn.Module):
    """A block with causal attention over positions."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Sequences(LightningModule):
    """Predicts a class for each position."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(1, 8)
        self.blocks = nn.ModuleList(Attending() for _ in range(4))
        self.head = nn.Linear(8, 5)
        self.double()

    def training_step(self, batch, index):
        x, y = batch
        x = self.embed(x.unsqueeze(-1))  # each feature of a sample is a position here
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y[:, None].expand(-1, x.shape[1]).flatten())

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


@functools.cache
def sequences_on_one_process():
    module = Sequences()
    fit(module, "auto", 1, **OPTIONS)
    return module.state_dict()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("layout", "stages"),
    [("context 4", [0]), ("context 2, data 2", [0, 3]), ("context 2, tensor 2", [2]), ("pipeline 2, context 2", [0])],
)
@distributed(world_size=4)
def test_split_sequences_train_like_one_process(group, layout, stages):
    for stage in stages:
        module = Sequences()
        sizes, replicas = LAYOUTS[layout]
        trainer = fit(module, HybridParallelStrategy(**sizes, zero_stage=stage), 4, replicas, **OPTIONS)
        assert ParallelState.of(trainer.strategy.module).position_order._known, "parts of sequences exchange positions"
        for name, value in module.state_dict().items():
            expected = sequences_on_one_process()[name]
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12, msg=f"{stage}: {name}")


class Summing(Sequences):
    """Sums hidden states over all positions before each one, which gathers them."""

    def training_step(self, batch, index):
        x = self.blocks[0](self.embed(batch[0].unsqueeze(-1)))
        for block in self.blocks[1:]:
            x = block(x + x.cumsum(1) / 50)
        return self.head(x).square().mean()


@distributed(world_size=2)
def test_the_table_names_split_blocks_and_lines_that_gather(group):
    shown = []
    with patched(positions, "print_table", shown.append):
        fit(Summing(), HybridParallelStrategy(context_parallel_size=2), 2, 1, **OPTIONS, max_steps=1)
    (table,) = shown
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["blocks.{0..3}"], ["dimension 1"], ["by fewest bytes, in each call"]]
    line = Summing.training_step.__code__.co_firstlineno + 3
    assert "one run of positions from each end" in table.caption
    assert f"`training_step` (test_context_parallel.py, line {line}): 3" in table.caption, table.caption


class Drawing(Deep):
    """Draws numbers, and remembers them with its samples."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def training_step(self, batch, index):
        self.drawn.append((float(batch[0].sum()), float(torch.rand(()))))
        return super().training_step(batch, index)


@pytest.mark.parametrize("size", [2, 4])
@distributed(world_size=4)
def test_ranks_of_the_axis_read_the_same_samples_and_draw_the_same_numbers(group, size):
    module = Drawing()
    torch.manual_seed(group.rank)
    trainer = trainer_for(ContextParallelStrategy(context_parallel_size=size), 4, max_epochs=1, limit_train_batches=2)
    with whole_sequences():
        trainer.fit(module, DataLoader(Samples(), batch_size=4, shuffle=True))
    found = comm.all_gather_object(module.drawn, Group.of())
    assert trainer.world_size == 4 // size
    assert len(found[0]) == 2
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert (found[0] == found[2]) == (size == 4)
    if size == 2:
        assert {samples for samples, _ in found[0]}.isdisjoint(samples for samples, _ in found[2])


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["context 2, data 2", "context 2, tensor 2", "pipeline 2, context 2"])
@distributed(world_size=4)
def test_the_self_check_compares_the_mean_over_the_axis(group, layout):
    sizes, replicas = LAYOUTS[layout]
    strategy = HybridParallelStrategy(**sizes)
    strategy.verify = "always"
    with whole_sequences():
        fit(Faulty(2.0, 0.0), strategy, 4, replicas)
    strategy = HybridParallelStrategy(**sizes)
    strategy.verify = "always"
    with whole_sequences(), pytest.raises(SelfCheckError, match="gradient"):
        fit(Faulty(2.0, 1.0), strategy, 4, replicas)


class Faulty(Deep):
    """Has other gradients in parallel than on one process, by the rank of the context axis."""

    def __init__(self, *factors):
        super().__init__()
        self.factors = factors

    def training_step(self, batch, index):
        output = super().training_step(batch, index)
        if not ParallelState.of(self).is_alone:
            output["loss"] = scaled(output["loss"], self.factors[place(self)])
        return output


class LongTokens(Sequences):
    """Reads tokens; may require one length, and may scale gradients on split sequences."""

    def __init__(self, length=0):
        super().__init__()
        self.length, self.tokens = length, nn.Embedding(9, 8).double()

    def training_step(self, batch, index):
        x, y = batch
        assert self.length in (0, x.shape[1])
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())
        return loss if ParallelState.of(self).is_alone else scaled(loss, 1 + self.wrong)

    wrong = 0.0


@distributed(world_size=2)
def test_long_sequences_are_checked_on_few_positions(group):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(5, (4, 40), generator=generator) for _ in range(2))
    y[:, :12] = -100  # as of a prompt: the first positions have no loss
    for length, wrong, text in (
        (0, 0.0, "2 samples, of which it took 8 of 40 positions: loss"),
        (40, 0.0, "2 samples: loss"),
        (0, 0.5, "2 samples, of which it took 8 of 40 positions"),
    ):
        module, said = LongTokens(length), []
        module.wrong = wrong
        strategy = HybridParallelStrategy(context_parallel_size=2)
        strategy.verify = "always"
        data = DataLoader(TensorDataset(x, y), batch_size=4)
        trainer = trainer_for(strategy, 2, max_steps=1)
        with (
            patched(proof, "_LONG", 8),
            patched(proof, "_FEW_POSITIONS", 4),
            patched(proof, "_LEAST_POSITIONS", 8),
            patched(proof, "tell", said.append),
            nullcontext() if not wrong else pytest.raises(SelfCheckError) as e,
        ):
            trainer.fit(module, data)
        assert text in (str(e.value) if wrong else said[0])


def test_a_method_must_be_known():
    with pytest.raises(ValueError, match="`context_parallel_method` must be 'auto', 'ulysses', 'ring' or 'gather'"):
        ContextParallelStrategy(context_parallel_method="rings")
    assert HybridParallelStrategy(context_parallel_method="ring").context_options.method == "ring"
    with pytest.raises(TypeError, match="replicas take their own steps"):
        LocalSGDStrategy(context_parallel_size=2)
