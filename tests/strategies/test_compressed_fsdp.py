"""Compressed gradients under FSDP1, through the Trainer."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_parallel import CompressedFSDPStrategy, Quantize, TopK, comm
from lightning_parallel.compression import Dense, compress_fsdp
from lightning_parallel.compression.fsdp import _rows, plain_name
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_compressed_ddp import COMPRESSORS, SMALL, fit

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


@distributed(world_size=4)
def test_another_division_forgets_what_was_not_sent_and_says_so(group, tmp_path):
    first = fit(Net(), CompressedFSDPStrategy(TopK(0.1, **SMALL), **HYBRID), group, max_epochs=1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    comm.barrier(group)
    entry = torch.load(tmp_path / "first.ckpt", weights_only=True)["compression"]
    assert [place[:2] for place in entry["places"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert entry["step"] == 4
    strategy = CompressedFSDPStrategy(TopK(0.1, **SMALL))
    if group.rank == 0:
        with pytest.warns(UserWarning, match="another sharding or split. Residuals"):
            fit(Net(), strategy, group, ckpt_path=tmp_path / "first.ckpt")
    else:
        fit(Net(), strategy, group, ckpt_path=tmp_path / "first.ckpt")
    assert strategy.compression.step == 8


@pytest.mark.sweep
@pytest.mark.parametrize(("precision", "options"), [("bf16-mixed", HYBRID), ("16-mixed", {}), ("bf16-true", {})])
@distributed(world_size=4)
def test_other_precisions(precision, options, group):
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


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "options"), [("powersgd", {}), ("int8", HYBRID)])
@distributed(world_size=4)
def test_an_overflow_of_scaled_losses_is_skipped_alike(name, options, group):
    seen, compression = Weights(), COMPRESSORS[name]()
    plugin = FSDPPrecision("16-mixed")
    plugin.scaler = ShardedGradScaler("cpu", init_scale=2.0**8)
    strategy = CompressedFSDPStrategy(compression, auto_wrap_policy={nn.Linear}, **options)
    train(Overflow(), strategy, group, plugins=[plugin], callbacks=[seen])
    assert compression.step == 7
    assert_close(seen.after[2], seen.after[1], 0)
    assert all(weight.isfinite().all() for weight in seen.after[-1].values())


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, HYBRID])
@distributed(world_size=4)
def test_flat_parameters(options, group):
    """`use_orig_params=False`: optimizers then own the shards of whole units."""

    class Flat(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.trainer.model.parameters(), lr=self.lr, momentum=self.momentum)

    single = Net()
    trainer_for().fit(single, loader(dtype=torch.float32))
    strategy = CompressedFSDPStrategy(TopK(1.0, **SMALL), use_orig_params=False, **options)
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
