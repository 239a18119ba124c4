"""Each differentiable collective against the gradient of one process that holds all ranks' tensors."""

import inspect

import pytest
import torch

from lightning_parallel import tensor
from lightning_parallel.comm import Group
from lightning_parallel.tensor import autograd as c
from tests.harness import distributed, recorded_communication, run

UNEVEN = {2: [3, 1], 3: [2, 0, 3]}


def tensors(group, shapes):
    """A leaf per rank, the same list on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, dtype=torch.double, generator=generator, requires_grad=True) for shape in shapes]


def weights(shapes):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, dtype=torch.double, generator=generator) for shape in shapes]


def check(group, operation, model, shapes, ops):
    """`operation(x)` on each rank against `model(all x) -> all outputs` in one process.

    Ranks do different work with their outputs, so the whole computation is the sum over the ranks.
    """
    full = tensors(group, shapes)
    mine = full[group.rank].detach().clone().requires_grad_()
    before = mine.detach().clone()
    outputs = model(full)
    factors = weights([output.shape for output in outputs])
    with recorded_communication() as records:
        y = operation(mine)
        torch.testing.assert_close(y, outputs[group.rank])
        (y * factors[group.rank]).sum().backward()
    assert [record.op for record in records] == ops
    assert torch.equal(mine, before), "the input was changed"
    sum((output * factor).sum() for output, factor in zip(outputs, factors)).backward()
    expected = full[group.rank].grad
    torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if expected is None else expected)


@pytest.mark.parametrize("world", [2, 3])
def test_duals(world):
    run(duals, world)


def duals(group):
    n = group.size
    sizes = UNEVEN[n]
    total = sum(sizes)
    pieces = [(2, size, 2) for size in sizes]
    check(
        group,
        lambda x: c.all_gather_to_group(x, group, 1, sizes),
        lambda xs: [torch.cat(xs, 1)] * n,
        pieces,
        ["all_gather", "reduce_scatter"],
    )
    check(
        group,
        lambda x: c.reduce_scatter_to_group(x, group, -1, sizes),
        lambda xs: list(sum(xs).split(sizes, -1)),
        [(2, total)] * n,
        ["reduce_scatter", "all_gather"],
    )


@distributed(world_size=3)
def test_operations_with_equal_tensors(group):
    """Operations whose contract is that one side is the same on every rank."""
    n, rank, sizes = group.size, group.rank, UNEVEN[3]
    x = torch.randn(2, 5, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    own = torch.randn(2, 5, dtype=torch.double, generator=torch.Generator().manual_seed(4 + rank))
    every = [torch.randn(2, 5, dtype=torch.double, generator=torch.Generator().manual_seed(4 + r)) for r in range(n)]
    # copy: x is equal, the work differs; the gradient is the sum
    leaf = x.clone().requires_grad_()
    (c.copy_to_group(leaf, group) * own).sum().backward()
    torch.testing.assert_close(leaf.grad, sum(every))
    # reduce: the work after it is equal
    leaf = own.clone().requires_grad_()
    y = c.reduce_from_group(leaf, group)
    torch.testing.assert_close(y, sum(every))
    (y * x).sum().backward()
    torch.testing.assert_close(leaf.grad, x)
    # scatter: x is equal, the work differs; every rank has the whole gradient
    leaf = x.clone().requires_grad_()
    part = c.scatter_to_group(leaf, group, 1, sizes)
    start = sum(sizes[:rank])
    assert torch.equal(part, x[:, start : start + sizes[rank]])
    (part * own[:, : sizes[rank]]).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.cat([e[:, :size] for e, size in zip(every, sizes)], 1))
    # gather: the work after it is equal
    leaf = own[:, : sizes[rank]].clone().requires_grad_()
    y = c.gather_from_group(leaf, group, 1, sizes)
    torch.testing.assert_close(y, torch.cat([e[:, :size] for e, size in zip(every, sizes)], 1))
    (y * x).sum().backward()
    torch.testing.assert_close(leaf.grad, x[:, start : start + sizes[rank]])


@distributed(world_size=3)
def test_all_to_all(group):
    n, rank = group.size, group.rank
    rows, columns = [2, 1, 3], [1, 0, 4]
    full = torch.randn(6, 5, 2, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    leaf = full.split(rows, 0)[rank].clone().requires_grad_()
    y = c.all_to_all_in_group(leaf, group, split_dim=1, concat_dim=0, split_sizes=columns, concat_sizes=rows)
    assert torch.equal(y, full.split(columns, 1)[rank])
    factor = torch.randn(full.shape, dtype=torch.double, generator=torch.Generator().manual_seed(4))
    (y * factor.split(columns, 1)[rank]).sum().backward()
    assert torch.equal(leaf.grad, factor.split(rows, 0)[rank])
    even = torch.arange(9.0 * n).view(9, n) + 100 * rank
    assert c.all_to_all_in_group(even, group, 0, 1).shape == (3, 3 * n)


@distributed(world_size=2)
def test_results_may_be_changed_in_place(group):
    x = torch.ones(2, 4, requires_grad=True)
    for operation in (
        lambda x: c.gather_from_group(x, group, 1),
        lambda x: c.all_gather_to_group(x, group, 0),
        lambda x: c.reduce_scatter_to_group(x, group, 1),
        lambda x: c.scatter_to_group(x, group, 1),
    ):
        operation(x).mul_(2).sum().backward()


def test_a_group_of_one_is_free():
    group = Group.alone("tensor_parallel")
    x = torch.randn(2, 3, requires_grad=True)
    for name in c.__all__:
        operation = getattr(c, name)
        if name == "no_view":
            continue
        args = (0, 1) if name == "all_to_all_in_group" else ()
        assert operation(x, group, *args) is x


@distributed(world_size=2)
def test_bad_sizes_are_refused_before_communication(group):
    x = torch.ones(5, 2)
    with pytest.raises(ValueError, match="dimension 0 must be a multiple of the 2 ranks; got 5"):
        c.scatter_to_group(x, group, 0)
    with pytest.raises(ValueError, match=r"must add up to 5, the extent of dimension 0; got \[1, 2\]"):
        c.reduce_scatter_to_group(x, group, 0, [1, 2])
    with pytest.raises(ValueError, match="must differ"):
        c.all_to_all_in_group(x, group, 1, -1)


def test_the_package_exports_every_collective_and_says_what_both_passes_do():
    names = set(c.__all__) - {"no_view"}
    assert names <= set(tensor.__all__)
    for name in names:
        text = inspect.getdoc(getattr(tensor, name))
        assert "Forward: " in text, name
        assert "Backward: " in text, name
