"""Compressed gradients under FSDP1, through the Trainer."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_parallel import CompressedFSDPStrategy, PowerSGD, Quantize, TopK, comm
from lightning_parallel.compression import Auto, Cast, Dense, compress_fsdp
from lightning_parallel.compression.fsdp import _rows, plain_name
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_compressed_ddp import COMPRESSORS, SMALL, fit

SOME = ("powersgd", "topk_int8", "sign")
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}


class PlainFSDP(CompressedFSDPStrategy):
    """Lightning's strategy, which refuses to run on CPU under its own name."""

    def __init__(self, **kwargs):
        super().__init__(Dense(), **kwargs)

    def _compress(self, wrapped):
        return None


def weights(module, trainer):
    with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
        return {plain_name(name): p.detach().clone() for name, p in module.named_parameters()}


def assert_close(found, wanted, tolerance=1e-5):
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=tolerance, atol=tolerance, msg=name)


def train(module, strategy, group, **kwargs):
    """Train in fp32; the weights afterwards."""
    trainer = trainer_for(strategy, group.size, use_distributed_sampler=False, **kwargs)
    trainer.fit(module, loader(group.size, group.rank, dtype=torch.float32))
    return weights(module, trainer)


@pytest.mark.parametrize(
    ("sharding", "accumulate"), [("HYBRID_SHARD", 1), ("HYBRID_SHARD", 2), ("_HYBRID_SHARD_ZERO2", 1)]
)
@distributed(world_size=4)
def test_what_loses_nothing_on_replicas_of_shards_equals_fsdp_and_one_process(sharding, accumulate, group):
    _loses_nothing(accumulate, group, sharding_strategy=ShardingStrategy[sharding], device_mesh=(2, 2))


@pytest.mark.parametrize(
    ("sharding", "accumulate"), [("FULL_SHARD", 1), ("FULL_SHARD", 2), ("SHARD_GRAD_OP", 1), ("NO_SHARD", 1)]
)
@distributed(world_size=2)
def test_what_loses_nothing_equals_fsdp_and_one_process(sharding, accumulate, group):
    _loses_nothing(accumulate, group, sharding_strategy=sharding)


def _loses_nothing(accumulate, group, **options):
    options["auto_wrap_policy"] = {nn.Linear}
    single = Net()
    trainer_for(accumulate_grad_batches=accumulate).fit(single, loader(dtype=torch.float32))
    plain = train(Net(), PlainFSDP(**options), group, accumulate_grad_batches=accumulate)
    for compression in (Cast("fp32", **SMALL), PowerSGD(12, **SMALL)):
        found = train(Net(), CompressedFSDPStrategy(compression, **options), group, accumulate_grad_batches=accumulate)
        assert_close(found, plain)
        assert_close(found, dict(single.named_parameters()))
        assert compression.step == 8 // accumulate, "optimizer steps, not backwards"


class Equal(Callback):
    """Replicas are bitwise equal after every step."""

    def __init__(self, group):
        self.group, self.steps = group, 0

    def on_train_batch_end(self, trainer, module, *_):
        for parameter in weights(module, trainer).values():
            everyone = comm.all_gather(parameter[None].clone(), self.group)
            assert all(torch.equal(parameter, other) for other in everyone)
        self.steps += 1


@pytest.mark.parametrize("name", SOME)
@distributed(world_size=4)
def test_replicas_stay_equal(name, group):
    watch, strategy = Equal(group), CompressedFSDPStrategy(COMPRESSORS[name](), **HYBRID)
    train(Net(hidden=32), strategy, group, callbacks=[watch])
    assert watch.steps == 8
    assert sum(comm.all_gather_object(strategy.compression.residual_norm, group)) > 0


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("layout", ["sharded", "full"])
@distributed(world_size=2)
def test_resumes_bit_for_bit(layout, name, group, tmp_path):
    def strategy():
        return CompressedFSDPStrategy(COMPRESSORS[name](), auto_wrap_policy={nn.Linear}, state_dict_type=layout)

    _resumes(strategy, group, tmp_path)


@distributed(world_size=4)
def test_hybrid_resumes_bit_for_bit(group, tmp_path):
    _resumes(lambda: CompressedFSDPStrategy(COMPRESSORS["topk_int8"](), **HYBRID), group, tmp_path)
    if group.rank == 0:
        state = torch.load(tmp_path / "first.ckpt", weights_only=True)["compression"]
        assert state["layout"] == "pieces"
        assert [piece["step"] for piece in state["pieces"]] == [4, 4]


def _resumes(strategy, group, folder):
    whole, first, second = Net(), Net(), Net()
    wanted = weights(whole, fit(whole, strategy(), group))
    fit(first, strategy(), group, max_epochs=1).save_checkpoint(folder / "first.ckpt")
    comm.barrier(group)
    found = weights(second, fit(second, strategy(), group, ckpt_path=folder / "first.ckpt"))
    for tensor in wanted:
        assert torch.equal(found[tensor], wanted[tensor]), tensor


@distributed(world_size=4)
def test_another_division_forgets_what_was_not_sent_and_says_so(group, tmp_path):
    first = fit(Net(), CompressedFSDPStrategy(TopK(0.1, **SMALL), **HYBRID), group, max_epochs=1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    comm.barrier(group)
    strategy = CompressedFSDPStrategy(TopK(0.1, **SMALL))
    if group.rank == 0:
        with pytest.warns(UserWarning, match="in 2 pieces, there are 1 now"):
            fit(Net(), strategy, group, ckpt_path=tmp_path / "first.ckpt")
    else:
        fit(Net(), strategy, group, ckpt_path=tmp_path / "first.ckpt")
    assert strategy.compression.step == 8


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@distributed(world_size=2)
def test_other_precisions(precision, group):
    _trains_in(precision, {}, group)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@distributed(world_size=4)
def test_other_precisions_on_replicas_of_shards(precision, group):
    _trains_in(precision, HYBRID, group)


def _trains_in(precision, options, group):
    plain = train(Net(), PlainFSDP(**options), group, precision=precision)
    strategy = CompressedFSDPStrategy(Dense(), **options)
    assert_close(train(Net(), strategy, group, precision=precision), plain, tolerance=2e-2)
    assert (strategy.precision_plugin.scaler is not None) == (precision == "16-mixed")
    strategy = CompressedFSDPStrategy(Quantize(8, **SMALL), **options)
    assert_close(train(Net(), strategy, group, precision=precision), plain, tolerance=5e-2)


class Overflow(Net):
    """The loss of one batch is infinite on one rank."""

    seen = 0

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.seen += 1
        return loss * (torch.inf if self.seen == 3 and self.global_rank == 1 else 1.0)


class Weights(Callback):
    """The weights after each batch."""

    def __init__(self):
        self.after = []

    def on_train_batch_end(self, trainer, module, *_):
        self.after.append(weights(module, trainer))


@pytest.mark.parametrize(("name", "precision"), [("powersgd", "16-mixed"), ("int8", "32-true")])
@distributed(world_size=2)
def test_overflow_on_one_rank_is_skipped_alike(name, precision, group):
    _skips_alike(name, precision, {}, group)


@pytest.mark.parametrize(("name", "precision"), [("powersgd", "32-true"), ("int8", "16-mixed")])
@distributed(world_size=4)
def test_overflow_on_one_rank_is_skipped_alike_by_replicas_of_shards(name, precision, group):
    _skips_alike(name, precision, HYBRID, group)


def _skips_alike(name, precision, options, group):
    seen, compression = Weights(), COMPRESSORS[name]()
    plugin = FSDPPrecision(precision)
    if plugin.scaler is not None:
        plugin.scaler = ShardedGradScaler("cpu", init_scale=2.0**8)
    strategy = CompressedFSDPStrategy(compression, auto_wrap_policy={nn.Linear}, **options)
    train(Overflow(), strategy, group, plugins=[plugin], callbacks=[seen])
    assert compression.step == 7
    assert_close(seen.after[2], seen.after[1], 0)
    assert all(weight.isfinite().all() for weight in seen.after[-1].values())


@pytest.mark.parametrize("options", [{}, HYBRID])
@distributed(world_size=4)
def test_clips_by_norm(options, group):
    single, module = Net(), Net()
    trainer_for(gradient_clip_val=0.3).fit(single, loader(dtype=torch.float32))
    strategy = CompressedFSDPStrategy(Dense(), auto_wrap_policy={nn.Linear}, **options)
    found = train(module, strategy, group, gradient_clip_val=0.3)
    assert_close(found, dict(single.named_parameters()))
    free = train(Net(), CompressedFSDPStrategy(Dense(), **options), group, max_epochs=1)
    assert not torch.allclose(free["net.0.weight"], found["net.0.weight"], atol=1e-3)


@pytest.mark.parametrize("options", [{}, HYBRID])
@distributed(world_size=4)
def test_flat_parameters(options, group):
    """`use_orig_params=False`: optimizers then own the shards of whole units."""

    class Flat(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.trainer.model.parameters(), lr=self.lr, momentum=self.momentum)

    single = Net()
    trainer_for().fit(single, loader(dtype=torch.float32))
    strategy = CompressedFSDPStrategy(PowerSGD(12, **SMALL), use_orig_params=False, **options)
    found = train(Flat(), strategy, group)
    assert_close(found, {name: parameter.detach() for name, parameter in single.named_parameters()})


@distributed(world_size=2)
def test_names_are_those_of_the_plain_module(group):
    """Whatever was wrapped around its layers."""
    options = {"auto_wrap_policy": {nn.Linear}, "activation_checkpointing_policy": {nn.Linear}}
    strategy = CompressedFSDPStrategy(TopK(0.1, **SMALL), **options)
    plain = CompressedFSDPStrategy(TopK(0.1, **SMALL))
    train(Net(), strategy, group)
    train(Net(), plain, group)
    found, expected = strategy.compression.state_dict(), plain.compression.state_dict()
    assert found["residual"].keys() == {"net.0.weight", "net.2.weight", "net.4.weight"}
    for name, residual in expected["residual"].items():
        torch.testing.assert_close(found["residual"][name], residual)
    assert strategy.compression.step == plain.compression.step == 8


@distributed(world_size=2)
def test_auto_measures_and_goes_on(group):
    strategy = CompressedFSDPStrategy(Auto([Quantize(8, **SMALL)]), auto_wrap_policy={nn.Linear})
    train(Net(), strategy, group)
    assert strategy.compression.step == 8
    assert strategy.compression.choice is not None


@pytest.mark.parametrize("policy", [None, {nn.Linear}])
@distributed(world_size=2)
def test_fit_validate_and_fit_again(policy, group):
    module, strategy = Net(), CompressedFSDPStrategy(TopK(0.1, **SMALL), auto_wrap_policy=policy)
    trainer = trainer_for(strategy, group.size, max_epochs=1)
    batches = loader(group.size, group.rank, dtype=torch.float32)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, batches, batches)
        trainer.validate(module, batches, verbose=False)
    assert strategy.compression.step == 8


@distributed(world_size=4)
def test_people_s_own_loop(group):
    """Without `finish()` the next forward pass ends the step; only replicas are compressed, and told so."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    steps = compress_fsdp(model, TopK(0.1, **SMALL))
    assert steps.group.size == 2
    for count in range(3):
        assert steps.compressor.step == max(count - 1, 0)
        model(torch.randn(4, 8)).square().sum().backward()
    assert steps.finish()
    assert steps.compressor.step == 3
    with pytest.raises(ValueError, match="communication hook"):
        compress_fsdp(model, Dense())


@pytest.mark.parametrize("offset", range(8))
def test_runs_of_a_parameter_are_cut_at_its_rows(offset):
    rows = torch.arange(28.0).view(7, 4)
    for length in range(1, 28 - offset):
        run = rows.flatten()[offset : offset + length]
        cut = dict(_rows("w", run, offset, 4))
        order = [cut[name].flatten() for name in ("w:head", "w", "w:tail") if name in cut]
        assert torch.equal(torch.cat(order), run)
        if "w" in cut:
            assert all((row == rows).all(1).any() for row in cut["w"])


@distributed(world_size=2)
def test_hybrid_without_a_mesh_is_refused_on_cpu(group):
    strategy = CompressedFSDPStrategy(Dense(), sharding_strategy="HYBRID_SHARD", auto_wrap_policy={nn.Linear})
    with pytest.raises(ValueError, match="device_mesh"):
        train(Net(), strategy, group)
