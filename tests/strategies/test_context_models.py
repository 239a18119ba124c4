"""Models as their authors wrote them, on sequences that are split over ranks: every number of one process."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.tensor.pieces import GATHERS, without_pieces
from tests.harness import distributed
from tests.strategies.test_pipeline_models import expect_equal, on_one_process, train

# T5 and Gemma compute softmax or norms in single precision, whatever the precision of the model.
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
