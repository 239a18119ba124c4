"""Compressed gradients of modules sharded in `configure_model`, through the Trainer."""

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel import CompressedModelParallelStrategy, Quantize, TopK, comm
from lightning_parallel.compression import Dense, compress_fully_shard
from tests.harness import distributed
from tests.strategies.models import Net, Samples, loader, trainer_for
from tests.strategies.test_compressed_ddp import COMPRESSORS, SMALL

SIZES = {
    "sharded": {"data_parallel_size": 4, "tensor_parallel_size": 1},
    "hybrid": {"data_parallel_size": 2, "tensor_parallel_size": 2},
    "tensor": {"data_parallel_size": 2, "tensor_parallel_size": 2},
}


class Project(Net):
    """Divides itself, as people do."""

    def __init__(self, layout, compressor=None):
        super().__init__()
        self.layout, self.compressor = layout, compressor

    def configure_model(self):
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


LAYOUTS = pytest.mark.parametrize("layout", SIZES)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("sharded", {}),
        ("sharded", {"accumulate_grad_batches": 2}),
        ("hybrid", {"accumulate_grad_batches": 2}),
        ("hybrid", {"gradient_clip_val": 0.3}),  # not "tensor": Lightning's takes no parameters of several meshes
        ("tensor", {}),
        ("tensor", {"accumulate_grad_batches": 2}),
    ],
)
@distributed(world_size=4)
def test_plain_means_equal_one_process(layout, options, group):
    single, module, compression = Net(), Project(layout), Dense()
    trainer_for(**options).fit(single, loader(dtype=torch.float32))
    fit(module, strategy(layout, compression), **options)
    found = weights(module)
    for name, expected in single.named_parameters():
        torch.testing.assert_close(found[name], expected.detach(), rtol=1e-5, atol=1e-5)
    assert compression.step == (4 if "accumulate_grad_batches" in options else 8)


@pytest.mark.parametrize(
    ("layout", "name", "distributed_checkpoint"),
    [("sharded", "powersgd", False), ("hybrid", "topk_int8", True), ("tensor", "powersgd", True)],
)
@distributed(world_size=4)
def test_resumes_bit_for_bit(layout, name, distributed_checkpoint, group, tmp_path):
    def make():
        return strategy(layout, COMPRESSORS[name](), save_distributed_checkpoint=distributed_checkpoint)

    whole, first, second = Project(layout), Project(layout), Project(layout)
    fit(whole, make())
    fit(first, make(), max_epochs=1).save_checkpoint(tmp_path / "first.ckpt")
    comm.barrier(group)
    trainer = fit(second, make(), ckpt_path=tmp_path / "first.ckpt")
    found, expected = weights(second), weights(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert trainer.strategy.compression.step == 8


class Overflow(Project):
    """The loss of one batch is infinite on one rank."""

    seen = 0

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.seen += 1
        return loss * (torch.inf if self.seen == 8 and self.global_rank == 1 else 1.0)


@pytest.mark.parametrize("layout", ["sharded", "hybrid"])
@distributed(world_size=4)
def test_overflow_on_one_rank_is_skipped_alike(layout, group):
    runs = []
    for kind, limit in ((Project, 7), (Overflow, 8)):
        module, compression = kind(layout), TopK(0.1, **SMALL)
        fit(module, strategy(layout, compression), max_steps=limit)
        assert compression.step == 7
        runs.append(weights(module))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


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


@pytest.mark.parametrize("layout", ["sharded", "hybrid"])
@distributed(world_size=4)
def test_fit_validate_and_fit_again(layout, group):
    class Once(Project):
        def configure_model(self):
            if not any(isinstance(module, FSDPModule) for module in self.modules()):
                super().configure_model()

    module, parallel = Once(layout), strategy(layout, TopK(0.1, **SMALL))
    trainer = trainer_for(parallel, 4, max_epochs=1, use_distributed_sampler=False)
    batches = loader(4, group.rank, dtype=torch.float32)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, batches, batches)
        trainer.validate(module, batches, verbose=False)
    assert parallel.compression.step == 8


@distributed(world_size=4)
def test_hybrid_meshes_of_torch_are_refused(group):
    class Native(Project):
        def configure_model(self):
            fully_shard(self.net, mesh=self.device_mesh)

    with pytest.raises(ValueError, match="sums over the replicas before"):
        fit(Native("hybrid"), strategy("hybrid", Dense()))


@distributed(world_size=4)
def test_modules_that_are_not_sharded_are_refused(group):
    class Whole(Project):
        def configure_model(self):
            pass

    with pytest.raises(ValueError, match="found none"):
        fit(Whole("sharded"), strategy("sharded", Dense()))
