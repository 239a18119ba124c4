"""Models as their authors wrote them, on sequences that are split over ranks: every number of one process."""

import os

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.data import DataLoader

from lightning_parallel import ContextParallelStrategy, HybridParallelStrategy, comm
from lightning_parallel.compat import Patches
from lightning_parallel.strategies import mesh_strategy
from lightning_parallel.tensor.pieces import GATHERS, without_pieces
from tests.harness import distributed
from tests.strategies.models import trainer_for
from tests.strategies.test_pipeline_models import NanoBlock, expect_equal, on_one_process, train
from tests.tensor.test_context import with_flex_attention

# Gemma computes norms in single precision, whatever the precision of the model.
IN_SINGLE_PRECISION = {"gemma3"}
# A rank needs the row of the first position, or a table of relative positions, or a tensor in another graph.
GATHERING = {"vit", "deberta", "mixed_gpt"}


class Gathers(Callback):
    """Counts the gathers of the steps; before them, a pipeline measures its layers on full sequences."""

    def on_train_start(self, trainer, module):
        self.before = GATHERS.total()

    def on_train_end(self, trainer, module):
        self.count = GATHERS.total() - self.before


def check(name, replicas=1, devices=2, **options):
    expected, gathers = on_one_process(name), Gathers()
    module, trainer = train(name, HybridParallelStrategy(**options), devices, replicas, callbacks=[gathers])
    # Blocks that are sharded along the sequence hand out full sequences; gradients of sharded weights are read below.
    is_whole = name not in GATHERING and "sequence_parallel" not in options and "zero_stage" not in options
    assert not is_whole or gathers.count == 0
    if name not in IN_SINGLE_PRECISION:
        expect_equal(module, trainer, expected, replicas)
        return
    for found, truth in zip(module.gradients, expected.gradients):
        for parameter, gradient in found.items():
            torch.testing.assert_close(without_pieces(gradient), truth[parameter], rtol=1e-5, atol=1e-7)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gpt2", "auto"),
        ("llama", "ring"),
        ("qwen3", "ulysses"),
        ("gemma3", "ring"),
        ("bert", "gather"),
        ("t5", "auto"),
        ("vit", "ring"),
        ("odd_gpt", "ring"),  # its length changes from step to step
        ("mixed_gpt", "auto"),
        ("deberta", "auto"),
    ],
)
@distributed(world_size=2)
def test_two_ranks(name, method):
    check(name, context_parallel_size=2, context_parallel_method=method)


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [
        ("t5", 1, {"context_parallel_size": 4, "zero_stage": 3}),
        ("gpt2", 1, {"context_parallel_size": 4, "activation_checkpointing": "full", "tiled": "auto"}),
        ("llama", 1, {"context_parallel_size": 4, "activation_checkpointing": "selective"}),
        ("bert", 2, {"context_parallel_size": 2, "zero_stage": 1}),
        ("llama", 1, {"context_parallel_size": 2, "tensor_parallel_size": 2, "context_parallel_method": "ring"}),
        ("gpt2", 1, {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}),
        ("gpt2", 1, {"context_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 3}),
        ("odd_gpt", 1, {"context_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 3}),
    ],
    ids=str,
)
@distributed(world_size=4)
def test_four_ranks(name, replicas, options):
    check(name, replicas, 4, **options)


class Squared(torch.autograd.Function):
    """Saves a hidden state, and has a gradient for a parameter."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad * x * weight, (grad * x * x).sum((0, 1))


class Own(LightningModule):
    """A transformer with a function of its own, which `spoil` changes."""

    def __init__(self, spoil=lambda module: None):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = torch.nn.ModuleList(NanoBlock(16) for _ in range(2)).double()
        self.weight = torch.nn.Parameter(torch.rand(16, dtype=torch.float64))
        self.spoil, self.seen = spoil, []
        spoil(self)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x + Squared.apply(x, self.weight)
        return x

    def training_step(self, batch, index):
        x = batch.clone().requires_grad_()
        self.kept = self(x)
        self.asks = getattr(self, "asks", None) or (lambda y, x: 0.0)
        return self.kept.square().mean() + self.asks(self.kept, x)

    def predict_step(self, batch, index):
        return self(batch)

    def on_predict_batch_end(self, outputs, batch, index):
        if self.trainer.is_global_zero:
            self.seen.append(outputs.sum().item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def own(strategy="auto", devices=1, spoil=lambda module: None, predicts=False):
    rank = comm.Group.of().rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    module = Own(spoil)
    trainer = trainer_for(strategy, devices, max_epochs=1, use_distributed_sampler=False)
    data = DataLoader(
        torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), batch_size=2
    )
    if predicts:
        return module, trainer.predict(module, data)
    trainer.fit(module, data)
    return module, module.state_dict()


@distributed(world_size=2)
def test_functions_of_the_user_that_save_hidden_states(group):
    _, expected = own()
    _, found = own(ContextParallelStrategy(), 2)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@distributed(world_size=4)
def test_too_few_heads_are_refused_before_the_first_step(group):
    with pytest.raises(ValueError, match="'ulysses' cannot split `blocks.0`: 2 heads cannot be sharded over 4 ranks"):
        own(ContextParallelStrategy(context_parallel_method="ulysses"), 4)


@distributed(world_size=2)
def test_results_of_evaluation_are_full_on_every_rank(group):
    _, expected = own(predicts=True)
    module, found = own(ContextParallelStrategy(), 2, predicts=True)
    # One rank reads alone.
    assert group.rank or module.seen == [pytest.approx(expected[0].sum().item(), rel=1e-10)]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def _hooked(module):
    module.blocks[1].register_full_backward_hook(lambda *_: None)


HANDLES = []  # of hooks of all modules, which outlive a test


def _hooked_all(module):
    HANDLES.append(register_module_full_backward_hook(lambda *_: None))


def _differentiates(module):
    module.asks = lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().mean()


def _watches(module):
    module.blocks[0].register_forward_hook(lambda module, args, output: output.register_hook(print) and None)


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (_hooked, ValueError, "backward hooks.* `blocks.1`"),
        (_hooked_all, ValueError, "backward hooks.* all modules"),
        (_differentiates, RuntimeError, r"torch\.autograd\.grad"),
        (_watches, RuntimeError, "full gradient"),
    ],
)
@distributed(world_size=2)
def test_shares_of_gradients_are_not_shown(group, spoil, error, text):
    try:
        with pytest.raises(error, match=text):
            own(ContextParallelStrategy(), 2, spoil)
    finally:
        while HANDLES:
            HANDLES.pop().remove()


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_a_hugging_face_model_with_flex_attention(group):
    flex, eager = pytest.importorskip("transformers.integrations.flex_attention"), Patches()
    split, plans = mesh_strategy.split_sequences, []
    eager.replace(mesh_strategy, "split_sequences", lambda *args: plans.append(args[1]) or split(*args))
    # Torch's compiled kernel for CPUs has no backward.
    eager.replace(flex.WrappedFlexAttention, "__call__", lambda self: flex.flex_attention)
    with with_flex_attention():
        try:
            expected, gathers = on_one_process("llama_flex"), Gathers()
            module, trainer = train("llama_flex", ContextParallelStrategy(), 2, callbacks=[gathers])
        finally:
            eager.undo()
    expect_equal(module, trainer, expected, 1)
    assert gathers.count > 0
    assert [*plans[0].dims] == [f"model.model.layers.{index}" for index in range(4)]
