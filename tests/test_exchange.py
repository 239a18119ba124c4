"""The exchange between two ranks gives what the backend's all-reduce gives."""

import pytest
import torch
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import exchange
from tests.harness import distributed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@distributed(world_size=2)
def test_equals_the_backend(group, dtype):
    ops = {
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT,
    }
    torch.manual_seed(group.rank)
    for shape in [(), (0,), (3, 5), (700_000,)]:
        for op, reference in ops.items():
            mine = (torch.randn(shape) * 10).to(dtype)
            expected = mine.clone()
            dist.all_reduce(expected, reference)
            assert torch.equal(comm.all_reduce(mine, group, op), expected)
            assert exchange.Exchange.suits(mine, group) == (mine.nbytes <= exchange.MAX_BYTES)


@distributed(world_size=2)
def test_several_in_flight_keep_their_order(group):
    tensors = [torch.full((10 * (i % 3) + 1,), float(i)) for i in range(20)]
    with comm.record() as records:
        pending = [comm.all_reduce_(tensor, group, async_op=True) for tensor in tensors]
        for i in reversed(range(20)):
            assert pending[i].wait() is tensors[i]
            assert pending[i].wait().eq(2 * i).all(), "waiting again changes nothing"
    assert [record.op for record in records] == ["all_reduce"] * 20


@distributed(world_size=3)
def test_larger_groups_use_the_backend(group):
    assert not exchange.Exchange.suits(torch.ones(1), group)
    assert comm.all_reduce(torch.ones(2), group).tolist() == [3.0, 3.0]
