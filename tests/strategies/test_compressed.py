"""What compression keeps to under every strategy: the training of one process, its checkpoints, its overflows."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader

from lightning_parallel import (
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressionMonitor,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PowerSGD,
    Quantize,
    TensorParallelStrategy,
    TopK,
    comm,
)
from lightning_parallel.comm import Group
from lightning_parallel.compression import Dense
from tests.harness import distributed, needs_fully_shard, run
from tests.strategies import test_compressed_fsdp as fsdp
from tests.strategies import test_compressed_model_parallel as model_parallel
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_compressed_ddp import COMPRESSORS, TWO_BUCKETS
from tests.strategies.test_pipeline import Deep


class Kind(NamedTuple):
    """A strategy, the ranks it takes, how many of them read data of their own, and what it trains."""

    world_size: int
    replicas: int
    strategy: Callable
    module: Callable = Net


def _fsdp(world_size, **options):
    return Kind(world_size, world_size, partial(CompressedFSDPStrategy, auto_wrap_policy={nn.Linear}, **options))


def _fully_shard(layout, replicas, **options):
    strategy = partial(model_parallel.strategy, layout, **options)
    return Kind(4, replicas, strategy, partial(model_parallel.Project, layout))


def _double():
    return Net().double()


KINDS = {
    "ddp": Kind(2, 2, partial(CompressedDDPStrategy, **TWO_BUCKETS), _double),
    "fsdp": _fsdp(2, state_dict_type="full"),
    "fsdp in files of its own": _fsdp(2, state_dict_type="sharded"),
    "fsdp SHARD_GRAD_OP": _fsdp(2, sharding_strategy="SHARD_GRAD_OP"),
    "fsdp NO_SHARD": _fsdp(2, sharding_strategy="NO_SHARD"),
    "fsdp hybrid": _fsdp(4, **fsdp.HYBRID),
    "fsdp hybrid zero2": _fsdp(4, sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, device_mesh=(2, 2)),
    "fully_shard": _fully_shard("sharded", 4, save_distributed_checkpoint=False),
    "fully_shard hybrid": _fully_shard("hybrid", 4),
    "fully_shard tensor": _fully_shard("tensor", 2),
    "replicas": Kind(4, 4, partial(TensorParallelStrategy, tensor_parallel_size=1), _double),
    "ddp in nodes": Kind(4, 4, partial(CompressedDDPStrategy, hierarchical=2, **TWO_BUCKETS), _double),
    "replicas in nodes": Kind(4, 4, partial(TensorParallelStrategy, tensor_parallel_size=1, hierarchical=2), _double),
    "replicas in nodes, sharded": Kind(
        4,
        4,
        partial(TensorParallelStrategy, tensor_parallel_size=1, hierarchical=2, checkpoint_format="sharded"),
        _double,
    ),
    "tensor": Kind(4, 2, partial(TensorParallelStrategy, tensor_parallel_size=2), _double),
    "pipeline": Kind(4, 2, partial(HybridParallelStrategy, pipeline_parallel_size=2, num_microbatches=2), Deep),
    **{
        f"deepspeed {stage}": Kind(2, 2, partial(CompressedDeepSpeedStrategy, stage=stage, reduce_bucket_size=100))
        for stage in (0, 1, 2)
    },
}


def on_ranks(check, kind, **arguments):
    """Run `check` on the ranks of `kind`; DeepSpeed changes torch, so its ranks are not those of the others."""
    if "fully_shard" in kind:
        needs_fully_shard(compressed=True)
    if "deepspeed" in kind:
        pytest.importorskip("deepspeed")
        from tests.strategies.test_compressed_deepspeed import call

        run(call, KINDS[kind].world_size, check=check, kind=kind, arguments=arguments)
    else:
        run(check, KINDS[kind].world_size, kind=kind, **arguments)


def data(kind, module):
    peers = KINDS[kind].world_size // KINDS[kind].replicas
    return loader(KINDS[kind].replicas, Group.of().rank // peers, dtype=next(module.parameters()).dtype)


def fit(kind, compression, batches=None, ckpt_path=None, **options):
    given = KINDS[kind]
    module = given.module()
    trainer = trainer_for(
        given.strategy(compression=compression), given.world_size, use_distributed_sampler=False, **options
    )
    batches = data(kind, module) if batches is None else DataLoader(batches, batch_size=None)
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    return trainer


def held(trainer):
    """The parameters of this rank, whole where the strategy divides each of them."""
    module = trainer.lightning_module
    if isinstance(trainer.strategy, FSDPStrategy):
        return fsdp.weights(module, trainer)
    return model_parallel.weights(module)


def whole(trainer):
    if isinstance(trainer.strategy, (TensorParallelStrategy, HybridParallelStrategy)):
        return comm.broadcast_object(trainer.strategy.lightning_module_state_dict(), Group.of())
    return held(trainer)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fsdp", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
        ("fsdp SHARD_GRAD_OP", {}),
        ("fsdp NO_SHARD", {}),
        ("fsdp hybrid", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
        ("fsdp hybrid zero2", {}),
        ("fully_shard", {}),
        # Not for "tensor" as well: Lightning clips no parameters of several meshes.
        ("fully_shard hybrid", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
        ("fully_shard tensor", {"accumulate_grad_batches": 2}),
        ("replicas", {}),
        ("ddp in nodes", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
        ("replicas in nodes", {"gradient_clip_val": 0.3}),
        ("tensor", {"accumulate_grad_batches": 2}),
        ("pipeline", {}),
        ("deepspeed 0", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ("deepspeed 1", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ("deepspeed 2", {"gradient_clip_val": 0.1}),
    ],
)
def test_what_loses_nothing_trains_as_one_process(kind, options):
    on_ranks(trains_as_one_process, kind, options=options)


def trains_as_one_process(kind, options):
    module = KINDS[kind].module()
    expected = Net() if isinstance(module, model_parallel.Project) else module
    dtype = next(expected.parameters()).dtype
    trainer_for(**options, max_epochs=1).fit(expected, loader(dtype=dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    # Vectors and the smallest matrix are averaged as they are, as all are by `Dense`.
    compression = TopK(1.0, min_numel=64)
    found = whole(fit(kind, compression, max_epochs=1, **options))
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), rtol=tolerance, atol=tolerance, msg=name)
    assert compression.step == 4 // options.get("accumulate_grad_batches", 1), "optimizer steps, not backward passes"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("ddp", "topk_int8", {}),
        ("ddp", "alternating", {}),
        ("ddp", "policy", {}),
        ("fsdp", "sign", {}),
        ("fsdp in files of its own", "powersgd", {}),
        ("fsdp hybrid", "topk_int8", {}),
        ("fully_shard", "powersgd", {}),
        ("fully_shard tensor", "powersgd", {}),
        ("replicas", "powersgd", {"accumulate_grad_batches": 2}),
        ("ddp in nodes", "powersgd", {}),
        ("replicas in nodes", "topk_int8", {}),
        ("replicas in nodes, sharded", "powersgd", {}),
        ("tensor", "topk_int8", {}),
        ("pipeline", "powersgd", {}),
        ("deepspeed 0", "sign", {}),
        ("deepspeed 2", "powersgd", {"precision": "bf16-mixed"}),
    ],
)
def test_training_resumes_bit_for_bit(kind, name, options, tmp_path):
    on_ranks(resumes, kind, name=name, options=options, path=tmp_path / "first.ckpt")


def resumes(kind, name, options, path):
    options = {"limit_train_batches": 2, **options}  # in each of two epochs
    expected = held(fit(kind, COMPRESSORS[name](), **options))
    fit(kind, COMPRESSORS[name](), max_epochs=1, **options).save_checkpoint(path)
    comm.barrier(Group.of())
    compression = COMPRESSORS[name]()
    trainer = fit(kind, compression, ckpt_path=path, **options)
    assert_equal(held(trainer), expected)
    assert compression.step == 4 // options.get("accumulate_grad_batches", 1)
    assert sum(comm.all_gather_object(compression.residual_norm, Group.of())) > 0
    assert path.is_dir() or "compression" in torch.load(path, weights_only=True)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "name", "precision"),
    [
        ("fsdp", "int8", "32-true"),
        ("fsdp hybrid", "topk_int8", "32-true"),
        ("replicas", "powersgd", "32-true"),
        ("ddp in nodes", "topk_int8", "32-true"),
        ("replicas in nodes", "powersgd", "32-true"),
        ("fully_shard hybrid", "sign", "32-true"),
        ("tensor", "powersgd", "32-true"),
        ("pipeline", "powersgd", "32-true"),
        ("deepspeed 0", "powersgd", "32-true"),
        ("deepspeed 2", "powersgd", "bf16-mixed"),
    ],
)
def test_an_overflow_in_one_replica_leaves_no_trace(kind, name, precision):
    on_ranks(forgets_an_overflow, kind, name=name, precision=precision)


def forgets_an_overflow(kind, name, precision):
    rank, peers = Group.of().rank, KINDS[kind].world_size // KINDS[kind].replicas
    batches = list(data(kind, KINDS[kind].module()))

    def trained(batches):
        compression = COMPRESSORS[name]()
        compression.expects_rollback = True
        trainer = fit(kind, compression, batches, max_epochs=1, precision=precision)
        assert compression.step == 3
        return held(trainer)

    expected = trained([batches[0], *batches[2:]])
    if rank // peers == 1:
        batches[1] = [batches[1][0] * torch.inf, batches[1][1]]
    found = trained(batches)
    assert_equal(found, expected)
    for replica in comm.all_gather_object(found, Group.of())[rank % peers :: peers]:
        assert_equal(replica, found)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind",
    ["ddp", "ddp in nodes", "replicas in nodes", "fsdp", "fully_shard", "deepspeed 2"],
)
def test_fit_validate_and_fit_again(kind):
    on_ranks(fits_again, kind)


def fits_again(kind):
    given, compression = KINDS[kind], TopK(0.1, min_numel=16)
    module = given.module()
    batches = data(kind, module)
    strategy = given.strategy(compression=compression)
    short = {"limit_train_batches": 2, "limit_val_batches": 1}
    trainer = trainer_for(strategy, given.world_size, max_epochs=1, use_distributed_sampler=False, **short)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, batches, batches)
        trainer.validate(module, batches, verbose=False)
    assert compression.step == 4
    assert not [t for t in threading.enumerate() if "compression" in t.name], "threads end with their fit"


# ---------------------------------------------------------------------------------------------------------- meshes


@distributed(world_size=4)
def test_another_division_of_the_model_forgets_what_was_not_sent_and_says_so(group, tmp_path):
    path = tmp_path / "divided.ckpt"
    fit("tensor", COMPRESSORS["topk_int8"](), max_epochs=1).save_checkpoint(path)
    comm.barrier(group)
    for tensor in (1, 4):
        compression = COMPRESSORS["topk_int8"]()
        strategy = TensorParallelStrategy(tensor_parallel_size=tensor, compression=compression)
        batches = loader(4 // tensor, group.rank // tensor)
        trainer = trainer_for(strategy, 4, use_distributed_sampler=False)
        with (
            pytest.warns(UserWarning, match="the model now has another sharding or split")
            if group.rank == 0
            else nullcontext()
        ):
            trainer.fit(_double(), batches, ckpt_path=path)
        assert compression.step == (8 if tensor == 1 else 4), "one replica has nothing to compress"
    trainer_for().fit(_double(), loader(), ckpt_path=path)  # stock Lightning does not mind


@distributed(world_size=4)
def test_nodes_are_found_and_what_is_sent_between_them_is_shown(group):
    reports = []
    for kind in ("replicas in nodes", "ddp in nodes"):
        monitor = CompressionMonitor(every_n_steps=2, show_table=False)
        fit(kind, PowerSGD(2, min_numel=16), max_epochs=1, callbacks=[monitor])
        reports.append(monitor.report())
    # Of 3 matrices and 6 vectors, mean of the two ranks of a node: without nodes every rank sends all of it.
    sizes = {"0": (18, 12), "2": (12, 18), "4": (5, 12)}
    vectors = 18 + 12 + 12 + 12 + 5
    numbers = sum(2 * (m + n) for m, n in sizes.values()) + vectors
    dense = sum(m * n for m, n in sizes.values()) + vectors
    for report in reports:
        assert report["sent_bytes"] == 8 * numbers / 2
        assert report["dense_bytes"] == 8 * dense / 2
        assert report["inside_bytes"] == 8 * dense
        assert 0 < report["relative_error"] < 1.5
    if group.rank == 0:
        with pytest.warns(UserWarning, match="all 4 replicas are on one node"):
            _fit_in_nodes(group, CompressedDDPStrategy, True)
    else:
        _fit_in_nodes(group, CompressedDDPStrategy, True)
    for strategy in (CompressedDDPStrategy, HybridParallelStrategy):
        with pytest.raises(ValueError, match="must be a multiple of 3, the size of a node; got 4"):
            _fit_in_nodes(group, strategy, 3)
    local = partial(LocalSGDStrategy, every_n_steps=2)
    torch.testing.assert_close(_fit_in_nodes(group, local, 2), _fit_in_nodes(group, local, False), rtol=1e-9, atol=1e-9)


class Begins(Callback):
    """The residuals with which a fit begins."""

    def on_train_start(self, trainer, module):
        self.residuals = trainer.strategy.compression.state_dict().get("residual", {})


@distributed(world_size=4)
def test_residuals_of_nodes_go_on_among_ranks_and_back(group, tmp_path):
    ddp, mesh, means = CompressedDDPStrategy, HybridParallelStrategy, []
    for epochs, (kind, hierarchical) in enumerate([(ddp, 2), (ddp, False), (mesh, 2), (mesh, False), (mesh, 2)], 1):
        begins, strategy = Begins(), kind(compression=TopK(0.25, min_numel=16), hierarchical=hierarchical)
        options = {"limit_train_batches": 1, "callbacks": [begins], "use_distributed_sampler": False}
        trainer = trainer_for(strategy, 4, max_epochs=epochs, **options)
        path = None if epochs == 1 else tmp_path / f"{epochs - 1}.ckpt"
        trainer.fit(_double(), loader(4, group.rank), ckpt_path=path)
        before = comm.all_gather_object(begins.residuals, group)
        after = comm.all_gather_object(strategy.compression.state_dict()["residual"], group)
        if epochs > 1:
            torch.testing.assert_close(_mean(before), means[-1])
        means.append(_mean(after))
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        comm.barrier(group)


def _mean(residuals):
    """By name, over the ranks that have one."""
    found = {name: [one[name] for one in residuals if name in one] for one in residuals for name in one}
    return {name: torch.stack(found[name]).mean(0) for name in sorted(found)}


def _fit_in_nodes(group, strategy, hierarchical):
    module = _double()
    strategy = strategy(compression=Dense(), hierarchical=hierarchical)
    trainer_for(strategy, 4, max_epochs=1, use_distributed_sampler=False).fit(module, loader(4, group.rank))
    return model_parallel.weights(module)


def test_hierarchical_needs_compression_and_more_than_one_replica():
    with pytest.raises(ValueError, match="`hierarchical` needs `compression`"):
        TensorParallelStrategy(tensor_parallel_size=1, hierarchical=True)
    for wrong, error in ((1, ValueError), ("2", TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="`hierarchical` must be an integer of at least 2"):
            CompressedDDPStrategy(Dense(), hierarchical=wrong)


class Tied(LightningModule):
    """The embedding is the head as well, and so is on the first pipeline stage and on the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head.weight = self.embed.weight

    def training_step(self, batch, index):
        x = self.embed(batch)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@distributed(world_size=4)
def test_copies_of_a_tied_parameter_stay_equal(group):
    """Rounded at random, the two would get different means of equal gradients."""
    compression = Quantize(4, stochastic=True, feedback=None, min_numel=1)
    strategy = HybridParallelStrategy(
        data_parallel_size=2, pipeline_parallel_size=2, compression=compression, num_microbatches=2, balance="uniform"
    )
    module, generator = Tied(), torch.Generator().manual_seed(group.rank // 2)
    batches = [torch.randint(8, (4, 6), generator=generator) for _ in range(4)]
    trainer_for(strategy, 4, use_distributed_sampler=False).fit(module, DataLoader(batches, batch_size=None))
    everywhere = comm.all_gather(module.embed.weight.detach()[None].clone(), group)
    assert all(torch.equal(weight, everywhere[0]) for weight in everywhere)


@distributed(world_size=2)
def test_residuals_do_not_carry_the_loss_scale(group):
    """Under a scaler whose scale grows with every step, in a precision in which scaling is exact."""

    def final(scaled):
        module, compression = Net(), TopK(0.25, min_numel=1)
        plugin = None
        if scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
            plugin = MixedPrecision("16-mixed", "cpu", scaler)
            plugin.forward_context = nullcontext  # whole precision: only the scale differs
        strategy = TensorParallelStrategy(tensor_parallel_size=1, compression=compression, precision_plugin=plugin)
        batches = loader(2, group.rank, dtype=torch.float32)
        trainer_for(strategy, 2).fit(module, batches)
        without_scaler = TensorParallelStrategy(tensor_parallel_size=1, compression=compression)
        trainer_for(without_scaler, 2).fit(module, batches)
        return model_parallel.weights(module), dict(compression.state_dict()["residual"])

    torch.testing.assert_close(final(True), final(False), rtol=1e-6, atol=1e-7)
