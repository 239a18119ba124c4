"""Attention of sharded sequences against one process that holds all positions."""

import pytest
import torch
import torch.nn.functional as F

from lightning_parallel import comm
from lightning_parallel.tensor.context_attention import attend, balanced_rows, ulysses_reason
from lightning_parallel.tensor.sharding import Shard, balanced
from tests.harness import distributed, run

METHODS = ("gather", "ulysses")


def consecutive(length, ranks):
    return Shard.of_sizes(tuple(balanced(length, ranks)))


def masks(kind, heads, rows, columns):
    """A mask of each kind for 2 samples, and whether torch's own causal order applies."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    if kind == "bool":
        mask = torch.rand(2, 1, rows, columns) > 0.4
        mask[0, :, 1], mask[..., 0] = False, mask[..., 0] | (torch.rand(2, 1, rows) > 0.5)  # a row without columns
        return mask
    if kind == "window":
        return (j <= i) & (j > i - 3)
    if kind == "documents":
        return (j <= i) & (i // 5 == j // 5)
    if kind == "float":
        mask = torch.randn(heads, rows, columns, dtype=torch.double)
        mask[:, 2] = torch.finfo(torch.double).min  # as padding does: the row attends to all columns alike
        mask[:, 3, :2], mask[:, 4] = -torch.inf, -torch.inf
        return mask.requires_grad_()
    return None


CASES = [
    # mask, lengths of queries and keys, heads, key heads
    ("", (11, 11), 4, 4),
    ("causal", (16, 16), 4, 4),
    ("causal", (13, 13), 6, 2),
    ("causal", (11, 7), 4, 1),
    ("causal", (5, 9), 5, 5),
    ("causal", (2, 2), 4, 2),
    ("", (3, 8), 4, 2),
    ("bool", (9, 12), 4, 4),
    ("window", (17, 17), 4, 2),
    ("documents", (15, 15), 4, 4),
    ("float", (10, 9), 4, 2),
    ("float", (7, 1), 4, 4),
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_one_process(world):
    run(equals_one_process, world)


def equals_one_process(group):
    for divide in (balanced_rows, consecutive):
        for kind, lengths, heads, kv_heads in CASES:
            for method in METHODS:
                case = f"{divide.__name__} {kind} {lengths} {heads}/{kv_heads} {method}"
                equals(group, [divide(length, group.size) for length in lengths], kind, heads, kv_heads, method, case)


def equals(group, rules, kind, heads, kv_heads, method, case):
    rows, columns = rules
    torch.manual_seed(0)
    shapes = [(heads, rows, 4), (kv_heads, columns, 4), (kv_heads, columns, 4 if kind else 6)]
    whole = [torch.randn(2, h, rule.full_size, e, dtype=torch.double, requires_grad=True) for h, rule, e in shapes]
    mine = [rule.along(-2).split(x.detach(), group.rank).requires_grad_() for x, (_, rule, _) in zip(whole, shapes)]
    mask = masks(kind, heads, rows.full_size, columns.full_size)
    own_mask = None if mask is None else mask.detach().clone().requires_grad_(mask.requires_grad)
    options = {"is_causal": kind == "causal", "scale": 0.7, "enable_gqa": heads != kv_heads}
    expected = F.scaled_dot_product_attention(*whole, mask, **options)
    y = attend(*mine, rows, columns, group, mask=own_mask, method=method, **options)
    factor = torch.randn(expected.shape, dtype=torch.double)
    say = lambda text: f"{case}: {text}"  # noqa: E731
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=say)  # noqa: E731
    close(y, rows.along(-2).split(expected, group.rank))
    (y * rows.along(-2).split(factor, group.rank)).sum().backward()
    (expected * factor).sum().backward()
    for x, full, (_, rule, _) in zip(mine, whole, shapes):
        close(x.grad, rule.along(-2).split(full.grad, group.rank))
    if mask is not None and mask.requires_grad:
        close(comm.all_reduce(own_mask.grad, group), mask.grad)


def test_causal_work_is_balanced():
    for length, ranks in ((64, 4), (61, 3), (7, 4)):
        rule = balanced_rows(length, ranks)
        assert sum(rule.sizes) == length
        work = [sum(row + 1 for start, stop in ranges for row in range(start, stop)) for ranges in rule.ranges]
        assert max(work) - min(work) <= (0 if length == 64 else length + 1)  # consecutive ranges: length^2 / ranks
    assert balanced_rows(3, 4).sizes == (1, 1, 1, 0)


def test_ulysses_tells_why_heads_do_not_fit():
    assert ulysses_reason(5, 5, 3) is None
    assert ulysses_reason(8, 2, 4) is None
    assert "3 heads cannot be sharded over 4 ranks" in ulysses_reason(3, 3, 4)
    assert "no multiple" in ulysses_reason(8, 3, 2)


@distributed(world_size=2)
def test_what_cannot_be_computed_is_refused(group):
    rule = consecutive(5, 2)
    length = rule.sizes[group.rank]
    q, k, v = (torch.randn(2, 2, length, 4) for _ in range(3))

    def refused(match, *tensors, **options):
        with pytest.raises(ValueError, match=match):
            attend(*tensors, rule, rule, group, **options)

    refused("no dropout; got 0.1", q, k, v, dropout=0.1)
    refused("`method` must be", q, k, v, method="rings")
    refused("`ulysses` cannot be used: 1 heads", q[:, :1], k[:, :1], v[:, :1])
    refused("must have . positions; got 1", q[:, :, :1], k, v)
    refused("broadcastable to", q, k, v, mask=torch.ones(length + 9, 5, dtype=torch.bool))
    refused("got both", q, k, v, mask=torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    refused("2 query heads must be a multiple", q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
