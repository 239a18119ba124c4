"""Collectives against what they mean, and the all-reduce between two ranks against the backend's."""

import pytest
import torch
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm.collectives import DIRECT_MIN_BYTES, PAIRWISE_MAX_BYTES, swaps_all_reduce
from tests.harness import distributed, recorded_communication
from tests.strict_order import strict_order


@distributed(world_size=4)
def test_collectives(group):
    rank, size = group.rank, group.size
    mine = torch.arange(6.0).view(2, 3) + 10 * rank
    everyone = [torch.arange(6.0).view(2, 3) + 10 * other for other in range(size)]
    assert torch.equal(comm.all_reduce(mine, group), sum(everyone))
    assert torch.equal(comm.all_reduce(mine, group, "max"), everyone[-1])
    assert torch.equal(mine, everyone[rank]), "all_reduce must not change its input"
    for dim in (0, 1, -1):
        assert torch.equal(comm.all_gather(mine, group, dim), torch.cat(everyone, dim))
    assert torch.equal(comm.broadcast_(mine.clone(), group, source=2), everyone[2])
    wide = torch.arange(8.0).view(4, 2) + rank
    assert torch.equal(comm.all_to_all(wide, group)[:, 0], torch.arange(size) + 2.0 * rank)


@distributed(world_size=4)
def test_uneven_gather_and_scatter(group):
    sizes = [3, 0, 1, 2]
    full = torch.arange(12.0).view(2, 6)
    start = sum(sizes[: group.rank])
    mine = full[:, start : start + sizes[group.rank]]
    assert torch.equal(comm.all_gather(mine, group, 1, sizes), full)
    assert torch.equal(comm.reduce_scatter(full, group, 1, sizes), 4 * mine)
    assert torch.equal(comm.reduce_scatter(full.t()[:4], group, 0), 4 * full.t()[group.rank : group.rank + 1])


def _gathers_and_scatters(group):
    """In place and in parts, several in flight, small and large."""
    sums, wholes = [], []
    for number, columns in enumerate((1, DIRECT_MIN_BYTES, 3)):
        rows = torch.arange(2.0 * columns + 1).repeat(3, 1) + torch.tensor([[0.0], [1.0], [2.0]]) * group.rank
        sums.append((rows, comm.reduce_scatter(rows, group, 1, [columns + 1, columns, 0, 0][: group.size], True)))
        whole = torch.zeros(group.size, columns, 2)
        whole[group.rank] = group.rank + number
        wholes.append((whole, number, comm.all_gather_(whole, group, async_op=True)))
    for rows, pending in sums:
        part = rows.shape[1] // 2 + 1
        mine = [rows[:, :part], rows[:, part:], rows[:, :0], rows[:, :0]][group.rank]
        expected = group.size * mine + (sum(range(group.size)) - group.size * group.rank) * torch.arange(3.0)[:, None]
        assert torch.equal(pending.wait(), expected)
    for whole, number, pending in wholes:
        assert pending.wait() is whole
        assert whole.mean((1, 2)).tolist() == [rank + number for rank in range(group.size)]


@distributed(world_size=2)
def test_two_ranks_gather_in_place_and_scatter(group):
    _gathers_and_scatters(group)
    with strict_order():
        _gathers_and_scatters(group)


@distributed(world_size=4)
def test_four_ranks_gather_in_place_and_scatter(group):
    _gathers_and_scatters(group)


@distributed(world_size=2)
def test_send_and_receive(group):
    other = 1 - group.rank
    send = comm.isend(torch.full((3,), float(group.rank)), group, other)
    received = comm.irecv(torch.empty(3), group, other).wait()
    send.wait()
    assert received.tolist() == [other] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@distributed(world_size=2)
def test_two_ranks_reduce_as_the_backend_does(group, dtype):
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
            assert swaps_all_reduce(mine, group) == (mine.nbytes <= PAIRWISE_MAX_BYTES)


@distributed(world_size=2)
def test_several_in_flight_keep_their_order(group):
    tensors = [torch.full((10 * (i % 3) + 1,), float(i)) for i in range(20)]
    with recorded_communication() as records:
        pending = [comm.all_reduce_(tensor, group, async_op=True) for tensor in tensors]
        for i in reversed(range(20)):
            assert pending[i].wait() is tensors[i]
            assert pending[i].wait().eq(2 * i).all(), "waiting again changes nothing"
    assert [record.op for record in records] == ["all_reduce"] * 20


@distributed(world_size=2)
def test_gathers_in_flight_keep_their_order(group):
    # Of sizes that are sent directly, and of such that the backend gathers.
    pending = [
        comm.all_gather(torch.full((DIRECT_MIN_BYTES * (i % 3) // 4,), 100.0 * group.rank + i), group, async_op=True)
        for i in range(6)
    ]
    for i in reversed(range(6)):
        whole = pending[i].wait().view(2, -1)
        assert (whole == torch.tensor([[float(i)], [100.0 + i]])).all()
    for numel in (8, DIRECT_MIN_BYTES):
        assert not comm.all_gather(torch.ones(numel, requires_grad=True), group).requires_grad


@distributed(world_size=3)
def test_larger_groups_use_the_backend(group):
    assert not swaps_all_reduce(torch.ones(1), group)
    assert comm.all_reduce(torch.ones(2), group).tolist() == [3.0, 3.0]
