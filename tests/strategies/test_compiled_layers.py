"""`compile_layers=True`: equal to one process, without graph breaks, in shards, stages and slices of parameters."""

import shutil

import pytest
import torch

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.compat import patched
from lightning_parallel.compat.torch import compiled_call_of
from lightning_parallel.tensor import sharded
from tests.harness import distributed
from tests.strategies.test_pipeline import Deep, assert_same, fit

NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
OPTIONS = {"max_epochs": 1, "limit_val_batches": 0}


def counts():
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], {**counters["graph_break"], **counters["unimplemented"]}


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"tensor_parallel_size": 2}, "aot_eager"),
        pytest.param({"tensor_parallel_size": 2}, "inductor", marks=NEEDS_COMPILER),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}, "aot_eager"),
        ({"tensor_parallel_size": 2, "zero_stage": 3}, "aot_eager"),
        ({"tensor_parallel_size": 2, "activation_checkpointing": "selective"}, "aot_eager"),
    ],
    ids=["shards", "shards, inductor", "stages", "slices", "recomputed"],
)
@distributed(world_size=4)
def test_compiled_layers_are_exact(options, backend):
    replicas = 1 if "pipeline_parallel_size" in options else 2
    expected, module = Deep(), Deep()
    expected_trainer = fit(expected, "auto", 1, **OPTIONS)
    torch.compiler.reset()
    torch._inductor.config.compile_threads = 1  # in this process
    torch._dynamo.utils.counters.clear()
    seen = []

    def on_train_start():
        seen.extend(compiled_call_of(block) is not None for block in module.blocks)

    module.on_train_start = on_train_start
    with patched(sharded, "compiler_backend", lambda device: backend):
        trainer = fit(module, HybridParallelStrategy(compile_layers=True, **options), 4, replicas, **OPTIONS)
    graphs, breaks = counts()
    assert any(seen) if "pipeline_parallel_size" in options else all(seen)
    assert not breaks
    assert 1 <= graphs <= 2, graphs  # equal layers share a graph; one more for other shapes
    assert_same(trainer, module, expected_trainer, expected)
    assert all(compiled_call_of(block) is None for block in module.blocks)  # in full after the run


@pytest.mark.parametrize("given", [{"sequence_parallel": True}, {"tiled": "auto"}, {"context_parallel_size": 2}])
def test_parts_of_sequences_cannot_be_compiled(given):
    with pytest.raises(ValueError, match="compile_layers=True. must stand without"):
        HybridParallelStrategy(compile_layers=True, **given)
