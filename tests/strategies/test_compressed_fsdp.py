"""Compressed gradients under FSDP, through the Trainer."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_parallel import comm
from lightning_parallel.compression import Dense
from lightning_parallel.strategies.compressed_fsdp import CompressedFSDPStrategy
from tests.harness import distributed
from tests.strategies.models import Net
from tests.strategies.test_compressed_ddp import COMPRESSORS, fit


class PlainFSDP(CompressedFSDPStrategy):
    """Lightning's strategy, which refuses to run on CPU under its own name."""

    def __init__(self, **kwargs):
        super().__init__(Dense(), **kwargs)

    def _compress(self, wrapped):
        return None


def weights(module, trainer):
    with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=2)
def test_plain_means_equal_fsdp(sharding, group):
    options = {"sharding_strategy": sharding, "auto_wrap_policy": {nn.Linear}}
    expected, module = Net().double(), Net().double()
    wanted = weights(expected, fit(expected, PlainFSDP(**options), group))
    strategy = CompressedFSDPStrategy(Dense(), **options)
    found = weights(module, fit(module, strategy, group))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-14)
    assert strategy.compression.step == 8


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("layout", ["sharded", "full"])
@distributed(world_size=2)
def test_resumes_bit_for_bit(layout, name, group, tmp_path):
    def strategy():
        return CompressedFSDPStrategy(COMPRESSORS[name](), auto_wrap_policy={nn.Linear}, state_dict_type=layout)

    whole, first, second = Net().double(), Net().double(), Net().double()
    wanted = weights(whole, fit(whole, strategy(), group))
    fit(first, strategy(), group, max_epochs=1).save_checkpoint(tmp_path / "first.ckpt")
    comm.barrier(group)
    found = weights(second, fit(second, strategy(), group, ckpt_path=tmp_path / "first.ckpt"))
    for tensor in wanted:
        assert torch.equal(found[tensor], wanted[tensor]), tensor
