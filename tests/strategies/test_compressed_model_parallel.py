"""Compressed gradients of modules sharded in `configure_model`, through the Trainer."""

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel import CompressedModelParallelStrategy, Quantize, TopK, comm
from lightning_parallel.compression import Dense, compress_fully_shard
from tests.harness import distributed, needs_fully_shard
from tests.strategies.models import Net, Samples, loader, trainer_for
from tests.strategies.test_compressed_ddp import SMALL

SIZES = {
    "sharded": {"data_parallel_size": 4, "tensor_parallel_size": 1},
    "hybrid": {"data_parallel_size": 2, "tensor_parallel_size": 2},
    "tensor": {"data_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.fixture(autouse=True)
def fully_shard_of_torch():
    needs_fully_shard(compressed=True)


class Project(Net):
    """Divides itself, once, as people do."""

    def __init__(self, layout, compressor=None):
        super().__init__()
        self.layout, self.compressor = layout, compressor

    def configure_model(self):
        if isinstance(self.net, FSDPModule):
            return
        if self.layout == "tensor":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        mesh = self.device_mesh["tensor_parallel" if self.layout == "hybrid" else "data_parallel"]
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        if self.compressor is not None:
            compress_fully_shard(self.net, self.compressor)


def strategy(layout, compression, **options):
    return CompressedModelParallelStrategy(compression, **SIZES[layout], **options)


def fit(module, strategy, ckpt_path=None, **kwargs):
    """Ranks along the tensor axis see the same data only where they divide layers."""
    trainer = trainer_for(strategy, 4, use_distributed_sampler=False, **kwargs)
    replicas, rank = 4, torch.distributed.get_rank()
    if module.layout == "tensor":
        replicas, rank = 2, rank // 2
    trainer.fit(module, loader(replicas, rank, dtype=torch.float32), ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in module.named_parameters()
    }


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@distributed(world_size=4)
def test_half_precision(precision, group):
    plain, module = Project("hybrid"), Project("hybrid")
    fit(plain, strategy("hybrid", Dense()), precision=precision)
    fit(module, strategy("hybrid", Quantize(8, **SMALL)), precision=precision)
    found, expected = weights(module), weights(plain)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=5e-2, atol=5e-2)


@distributed(world_size=4)
def test_the_function_alone_under_lightnings_own_strategy(group):
    compressor = TopK(0.1, **SMALL)
    fit(Project("sharded", compressor), ModelParallelStrategy(**SIZES["sharded"]))
    assert compressor.step == 7, "the last step is ended by whoever asks for it"


@pytest.mark.sweep
@pytest.mark.parametrize(("layout", "readers"), [("sharded", 4), ("hybrid", 4), ("tensor", 2)])
@distributed(world_size=4)
def test_ranks_that_share_parameters_out_read_different_data(layout, readers, group):
    class Reads(Project):
        seen = ()

        def training_step(self, batch, index):
            self.seen += tuple(batch[0][:, 0].tolist())
            return super().training_step(batch, index)

    module = Reads(layout)
    trainer = trainer_for(strategy(layout, Dense()), 4, max_epochs=1)
    trainer.fit(module, torch.utils.data.DataLoader(Samples(dtype=torch.float32), batch_size=2))
    assert len(module.seen) == 32 // readers
    assert len({value for seen in comm.all_gather_object(module.seen, group) for value in seen}) == 32


@distributed(world_size=4)
def test_hybrid_meshes_of_torch_are_refused(group):
    class Native(Project):
        def configure_model(self):
            fully_shard(self.net, mesh=self.device_mesh)

    with pytest.raises(ValueError, match="sum over the replicas before"):
        fit(Native("hybrid"), strategy("hybrid", Dense()))


@distributed(world_size=4)
def test_modules_that_are_not_sharded_are_refused(group):
    class Whole(Project):
        def configure_model(self):
            pass

    with pytest.raises(ValueError, match="got none"):
        fit(Whole("sharded"), strategy("sharded", Dense()))
