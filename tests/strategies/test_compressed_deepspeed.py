"""Compressed gradients under DeepSpeed, through the Trainer, on CPU."""

import pytest
import torch

from lightning_parallel import CompressedDeepSpeedStrategy
from lightning_parallel.compression import Dense
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for

pytest.importorskip("deepspeed")


def fit(module, strategy, group, ckpt_path=None, **kwargs):
    trainer = trainer_for(strategy, group.size, **kwargs)
    trainer.fit(module, loader(group.size, group.rank, dtype=torch.float32), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_plain_means_equal_one_process(stage, group):
    expected, module = Net(), Net()
    trainer_for().fit(expected, loader(dtype=torch.float32))
    strategy = CompressedDeepSpeedStrategy(Dense(), stage=stage)
    fit(module, strategy, group)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)
    assert strategy.compression.step == 8
