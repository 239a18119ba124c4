"""Compression between the replicas of a mesh: the same training, its checkpoints, its overflows."""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy, PowerSGD, Quantize, TensorParallelStrategy, TopK, comm
from lightning_parallel.compression import Compressor, Dense
from tests.harness import distributed
from tests.strategies.models import Net, fit_parallel, fit_single, loader, trainer_for
from tests.strategies.test_pipeline import Deep


def _compressor(kind) -> Compressor:
    return PowerSGD(2, min_numel=1) if kind == "powersgd" else TopK(0.25, min_numel=1)


def _fit(module, tensor, compression, plugins=None, callbacks=None, **options):
    strategy = {"compression": compression}
    if plugins is not None:
        strategy["precision_plugin"] = plugins
    return fit_parallel(module, 4, tensor, strategy_kwargs=strategy, callbacks=callbacks, **options)


def _weights(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def _path(group):
    return Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "compressed.ckpt"


@pytest.mark.parametrize("tensor", [1, 2])
@distributed(world_size=4)
def test_a_compressor_that_loses_nothing_trains_as_one_process(tensor):
    """Matrices of rank at most 5, sent with rank 12 or as they are."""
    expected = Net().double()
    fit_single(expected)
    for compression in (Dense(), PowerSGD(12, min_numel=1)):
        module = Net().double()
        trainer = _fit(module, tensor, compression)
        full = trainer.strategy.lightning_module_state_dict()
        if trainer.global_rank == 0:
            torch.testing.assert_close(full, dict(expected.state_dict()), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("tensor", "kind", "accumulate"), [(1, "powersgd", 2), (1, "topk", 1), (2, "powersgd", 1), (2, "topk", 2)]
)
@distributed(world_size=4)
def test_training_resumes_bit_for_bit(group, tensor, kind, accumulate):
    path = _path(group)
    options = {"accumulate_grad_batches": accumulate}
    whole, compression = Net().double(), _compressor(kind)
    _fit(whole, tensor, compression, **options)
    assert compression.step == 8 // accumulate, "optimizer steps, not backward passes"
    first = Net().double()
    _fit(first, tensor, _compressor(kind), max_epochs=1, **options).save_checkpoint(path)
    comm.barrier(group)
    checkpoint = torch.load(path, weights_only=True)
    assert "compression" in checkpoint
    resumed, compression = Net().double(), _compressor(kind)
    _fit(resumed, tensor, compression, ckpt_path=path, **options)
    assert compression.step == 8 // accumulate
    torch.testing.assert_close(_weights(resumed), _weights(whole), rtol=0, atol=0)


@distributed(world_size=4)
def test_another_division_of_the_model_forgets_what_was_not_sent_and_says_so(group):
    path = _path(group)
    _fit(Net().double(), 2, _compressor("topk"), max_epochs=1).save_checkpoint(path)
    comm.barrier(group)
    for tensor in (1, 4):
        compression = _compressor("topk")
        with pytest.warns(UserWarning, match="1 pipeline x 2 tensor") if group.rank == 0 else nullcontext():
            _fit(Net().double(), tensor, compression, ckpt_path=path)
        assert compression.step == (8 if tensor == 1 else 4), "one replica has nothing to compress"
    single = Net().double()
    fit_single(single, ckpt_path=path)  # stock Lightning does not mind


class Overflow(Net):
    """The loss of one batch is infinite, on the ranks that are told so."""

    def __init__(self, at, ranks):
        super().__init__()
        self.at, self.ranks, self.seen = at, ranks, 0

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.seen += 1
        return loss * (torch.inf if self.seen == self.at and self.global_rank in self.ranks else 1.0)


class Weights(Callback):
    """The weights after each batch."""

    def __init__(self):
        self.after = []

    def on_train_batch_end(self, trainer, module, *_):
        self.after.append(_weights(module))


@pytest.mark.parametrize("tensor", [1, 2])
@distributed(world_size=4)
def test_a_step_with_an_overflow_leaves_no_trace(tensor):
    ranks = {0} if tensor == 1 else {0, 1}  # the ranks of one replica compute the same loss
    weights, compression = Weights(), _compressor("powersgd")
    module = Overflow(3, ranks).double()
    _fit(module, tensor, compression, callbacks=[weights])
    assert compression.step == 7
    torch.testing.assert_close(weights.after[2], weights.after[1], rtol=0, atol=0)
    assert all(weight.isfinite().all() for weight in weights.after[-1].values())


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
        module, compression = Net(), _compressor("topk")
        plugin = None
        if scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
            plugin = MixedPrecision("16-mixed", "cpu", scaler)
            plugin.forward_context = nullcontext  # whole precision: only the scale differs
        strategy = TensorParallelStrategy(tensor_parallel_size=1, compression=compression, precision_plugin=plugin)
        data = loader(2, group.rank, dtype=torch.float32)
        trainer_for(strategy, 2).fit(module, data)
        without_scaler = TensorParallelStrategy(tensor_parallel_size=1, compression=compression)
        trainer_for(without_scaler, 2).fit(module, data)
        return _weights(module), {n: t.clone() for n, t in compression.state_dict()["residual"].items()}

    torch.testing.assert_close(final(True), final(False), rtol=1e-6, atol=1e-7)


def fit_stages(module, compression, group, ckpt_path=None, **kwargs):
    """Two replicas of two stages."""
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, compression=compression, num_microbatches=2)
    trainer = trainer_for(strategy, 4, use_distributed_sampler=False, **kwargs)
    trainer.fit(module, loader(2, group.rank // 2), ckpt_path=ckpt_path)
    return trainer


def whole_state(trainer, group):
    return comm.broadcast_object(trainer.strategy.lightning_module_state_dict(), group)


@distributed(world_size=4)
def test_stages_with_a_compressor_that_loses_nothing_train_as_one_process(group):
    expected = Deep()
    trainer_for().fit(expected, loader())
    for compression in (Dense(), PowerSGD(16, min_numel=1)):
        found = whole_state(fit_stages(Deep(), compression, group), group)
        for name, weight in expected.named_parameters():
            torch.testing.assert_close(found[name], weight.detach(), rtol=1e-9, atol=1e-10)
        assert compression.step == 8


@pytest.mark.parametrize("kind", [PowerSGD, TopK])
@distributed(world_size=4)
def test_stages_resume_bit_for_bit(kind, group, tmp_path):
    def make():
        return kind(1 if kind is PowerSGD else 0.2, min_numel=1)

    whole = fit_stages(Deep(), make(), group)
    fit_stages(Deep(), make(), group, max_epochs=1).save_checkpoint(tmp_path / "first.ckpt")
    comm.barrier(group)
    compression = make()
    again = fit_stages(Deep(), compression, group, ckpt_path=tmp_path / "first.ckpt")
    found, expected = whole_state(again, group), whole_state(whole, group)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert compression.step == 8
    assert sum(comm.all_gather_object(compression.residual_norm, group)) > 0


class LastStageOverflow(Deep):
    """The third batch has an infinite loss on the second replica, in the last stage's computation only."""

    def training_step(self, batch, index):
        result = super().training_step(batch, index)
        bad = index == 2 and self.global_rank >= 2
        return {**result, "loss": result["loss"] * (torch.inf if bad else 1.0)}


@distributed(world_size=4)
def test_an_overflow_in_one_replica_is_forgotten_by_all_stages_of_all(group):
    compression = PowerSGD(1, min_numel=1)
    trainer = fit_stages(LastStageOverflow(), compression, group, max_epochs=1)
    assert compression.step == 3
    assert all(weight.isfinite().all() for weight in whole_state(trainer, group).values() if weight.is_floating_point())
