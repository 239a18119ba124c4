"""Compression between replicas that are cut into pipeline stages: every stage compresses its own layers."""

import pytest
import torch

from lightning_parallel import HybridParallelStrategy, PowerSGD, TopK, comm
from lightning_parallel.compression import Dense
from tests.harness import distributed
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep


def fit(module, compression, group, ckpt_path=None, **kwargs):
    """Two replicas of two stages."""
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, compression=compression, num_microbatches=2)
    trainer = trainer_for(strategy, 4, use_distributed_sampler=False, **kwargs)
    trainer.fit(module, loader(2, group.rank // 2), ckpt_path=ckpt_path)
    return trainer


def state(trainer, group):
    return comm.broadcast_object(trainer.strategy.lightning_module_state_dict(), group)


@distributed(world_size=4)
def test_what_loses_nothing_trains_as_one_process(group):
    expected = Deep()
    trainer_for().fit(expected, loader())
    for compression in (Dense(), PowerSGD(16, min_numel=1)):
        found = state(fit(Deep(), compression, group), group)
        for name, weight in expected.named_parameters():
            torch.testing.assert_close(found[name], weight.detach(), rtol=1e-9, atol=1e-10)
        assert compression.step == 8


@pytest.mark.parametrize("kind", [PowerSGD, TopK])
@distributed(world_size=4)
def test_resumes_bit_for_bit(kind, group, tmp_path):
    def make():
        return kind(1 if kind is PowerSGD else 0.2, min_numel=1)

    whole = fit(Deep(), make(), group)
    fit(Deep(), make(), group, max_epochs=1).save_checkpoint(tmp_path / "first.ckpt")
    comm.barrier(group)
    compression = make()
    again = fit(Deep(), compression, group, ckpt_path=tmp_path / "first.ckpt")
    found, expected = state(again, group), state(whole, group)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert compression.step == 8
    assert sum(comm.all_gather_object(compression.residual_norm, group)) > 0


class Overflow(Deep):
    """The third batch has an infinite loss on the second replica, in the last stage's computation only."""

    def training_step(self, batch, index):
        result = super().training_step(batch, index)
        bad = index == 2 and self.global_rank >= 2
        return {**result, "loss": result["loss"] * (torch.inf if bad else 1.0)}


@distributed(world_size=4)
def test_an_overflow_in_one_replica_is_forgotten_by_all_stages_of_all(group):
    compression = PowerSGD(1, min_numel=1)
    trainer = fit(Overflow(), compression, group, max_epochs=1)
    assert compression.step == 3
    assert all(weight.isfinite().all() for weight in state(trainer, group).values() if weight.is_floating_point())
