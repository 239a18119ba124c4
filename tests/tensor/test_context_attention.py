"""Attention of sharded sequences against one process that holds all positions."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.comm.kept import KeptResults
from lightning_parallel.compat import patched
from lightning_parallel.tensor import attention_tiles, ring_attention
from lightning_parallel.tensor.context_attention import attend
from lightning_parallel.tensor.context_methods import (
    AttentionShape,
    attention_bytes_sent,
    attention_messages,
    balanced_rows,
    choose_method,
    ulysses_reason,
)
from lightning_parallel.tensor.ring_attention import causal_turns, masked_turns
from lightning_parallel.tensor.sharding import Shard, balanced
from tests.harness import distributed, recorded_communication, run
from tests.strict_order import strict_order

METHODS = ("gather", "ulysses", "ring")


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
    if kind == "zeros":  # learned, and without an effect so far
        return torch.zeros(rows, columns, dtype=torch.double, requires_grad=True)
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
    ("zeros", (8, 8), 4, 4),
    ("float", (7, 1), 4, 4),
]


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_one_process(world):
    run(equals_one_process, world)


def equals_one_process(group):
    with patched(ring_attention, "MASK_TILE", 2), patched(attention_tiles, "MAX_SCORES", 60):
        equals_in_all_cases(group)


@distributed(world_size=3)
def test_messages_keep_the_order_that_nccl_needs(group):
    ring_attention._connected.clear()
    with strict_order():
        for divide in (balanced_rows, consecutive):
            for kind, lengths, heads, kv_heads in CASES:
                rules = [divide(length, group.size) for length in lengths]
                equals(group, rules, kind, heads, kv_heads, "ring", f"{divide.__name__} {kind} {lengths}")
        connected = set(ring_attention._connected)
        assert connected == {group.process_group}, "a rank without messages has not met the others"


def equals_in_all_cases(group):
    for divide in (balanced_rows, consecutive):
        for kind, lengths, heads, kv_heads in CASES:
            for method in METHODS:
                case = f"{divide.__name__} {kind} {lengths} {heads}/{kv_heads} {method}"
                rules = [divide(length, group.size) for length in lengths]
                equals(group, rules, kind, heads, kv_heads, method, case)
            # Weights that dropout could drop, but does not; and keys that each rank has.
            whole = Shard(0, (((0, lengths[1]),),) * group.size)
            equals(group, rules, kind, heads, kv_heads, "gather", f"{case}, then dropout", dropout=1e-14)
            equals(group, [rules[0], whole], kind, heads, kv_heads, "gather", f"{case}, then whole keys")


def equals(group, rules, kind, heads, kv_heads, method, case, dropout=0.0):
    rows, columns = rules
    torch.manual_seed(0)
    value_size = 6 if kv_heads < heads else 4  # no fused kernel takes values of another size
    shapes = [(heads, rows, 4), (kv_heads, columns, 4), (kv_heads, columns, value_size)]
    whole = [torch.randn(2, h, rule.full_size, e, dtype=torch.double, requires_grad=True) for h, rule, e in shapes]
    mine = [rule.along(-2).split(x.detach(), group.rank).requires_grad_() for x, (_, rule, _) in zip(whole, shapes)]
    mask = masks(kind, heads, rows.full_size, columns.full_size)
    own_mask = None if mask is None else mask.detach().clone().requires_grad_(mask.requires_grad)
    options = {"is_causal": kind == "causal", "scale": 0.7, "enable_gqa": heads != kv_heads}
    expected = F.scaled_dot_product_attention(*whole, mask, **options)
    y = attend(*mine, rows, columns, group, mask=own_mask, method=method, dropout=dropout, **options)
    factor = torch.randn(expected.shape, dtype=torch.double)
    say = lambda text: f"{case}: {text}"  # noqa: E731
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=say)  # noqa: E731
    close(y, rows.along(-2).split(expected, group.rank))
    (y * rows.along(-2).split(factor, group.rank)).sum().backward()
    (expected * factor).sum().backward()
    for x, full, (_, rule, _) in zip(mine, whole, shapes):
        gradient = comm.all_reduce(x.grad, group) if rule.replicated else x.grad
        close(gradient, rule.along(-2).split(full.grad, group.rank))
    if mask is not None and mask.requires_grad:
        close(comm.all_reduce(own_mask.grad, group), mask.grad)


@distributed(world_size=2)
def test_each_rank_drops_weights_by_its_own_numbers(group):
    rule = consecutive(64, group.size)
    q, v = torch.zeros(1, 1, 32, 4), torch.ones(1, 1, 32, 4)

    def kept_weights(**options):
        torch.manual_seed(0)
        return attend(q, q, v, rule, rule, group, dropout=0.5, method="gather", **options)

    for options in ({}, {"is_causal": True}):
        found = kept_weights(**options)
        assert abs(found[..., 16:, :].mean() - 1) < 0.2
        torch.testing.assert_close(kept_weights(**options), found)
        one, other = comm.all_gather_object(found, group)
        assert options or (one != other).any()  # in causal order they differ anyway


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

    refused("`ring` must have no dropout; got 0.1", q, k, v, dropout=0.1, method="ring")
    refused("`method` must be", q, k, v, method="rings")
    refused("`ulysses` cannot be used: 1 heads", q[:, :1], k[:, :1], v[:, :1])
    refused("must have . positions; got 1", q[:, :, :1], k, v)
    refused("broadcastable to", q, k, v, mask=torch.ones(length + 9, 5, dtype=torch.bool))
    refused("got both", q, k, v, mask=torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    refused("2 query heads must be a multiple", q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def sizes(rows, columns, is_causal=False, heads=4, kv_heads=2, item_bytes=4):
    return AttentionShape(2, heads, kv_heads, 4, 6, item_bytes, rows, columns, is_causal)


@distributed(world_size=3)
def test_messages_are_those_of_the_formula(group):
    for rows, columns, is_causal in (
        (balanced_rows(12, 3), balanced_rows(12, 3), True),
        (consecutive(11, 3), consecutive(11, 3), True),
        (consecutive(5, 3), consecutive(10, 3), False),
        (balanced_rows(2, 3), balanced_rows(2, 3), False),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            shape = sizes(rows, columns, is_causal, item_bytes=dtype.itemsize)
            lengths = [rule.sizes[group.rank] for rule in (rows, columns)]
            q, k, v = (
                torch.randn(2, heads, lengths[at], size, dtype=dtype, requires_grad=True)
                for heads, at, size in ((4, 0, 4), (2, 1, 4), (2, 1, 6))
            )
            for method in METHODS:
                with recorded_communication() as records:
                    y = attend(q, k, v, rows, columns, group, is_causal=is_causal, enable_gqa=True, method=method)
                    assert y.dtype == dtype
                    y.sum().backward()
                expected = attention_messages(method, shape, group.rank)
                if method != "ring":
                    assert [(record.op, record.bytes) for record in records] == [m[:2] for m in expected]
                    continue
                # An exchange counts what a rank sends and what it receives, so both ends count a message.
                counted = torch.tensor([sum(record.bytes for record in records), sum(m.payload for m in expected)])
                counted = comm.all_reduce(counted, group)
                assert counted[0] == 2 * counted[1]
                assert expected or not counted[0]


def test_bytes_follow_the_closed_forms():
    n, length = 4, 64
    for item_bytes in (2, 4, 8):
        shape = sizes(*[balanced_rows(length, n)] * 2, item_bytes=item_bytes)
        pair, query = 2 * item_bytes * 2 * (4 + 6), 2 * item_bytes * 4 * (4 + 6)
        once = (n - 1) / n * length * pair
        assert attention_bytes_sent("gather", shape) == 2 * once
        assert attention_bytes_sent("ring", shape) == 2 * once + once * max(4, item_bytes) / item_bytes
        # Two ranks share each key head.
        assert attention_bytes_sent("ulysses", shape) == 2 * (n - 1) / n**2 * length * (2 * pair + query)


def test_the_method_follows_the_bytes_and_the_heads():
    def chosen(length, ranks=8, heads=32, kv_heads=32, has_mask=False, **options):
        rule = balanced_rows(length, ranks)
        return choose_method(AttentionShape(1, heads, kv_heads, 128, 128, 2, rule, rule, True), has_mask, **options)

    assert chosen(8192) == "ulysses"
    assert chosen(2**17) == "ring"  # its computation hides its messages
    assert chosen(2**17, flops_per_byte=1e5) == "ulysses"
    assert chosen(8192, heads=4, kv_heads=4) == "ring"  # fewer heads than ranks
    assert chosen(8192, heads=4, kv_heads=1) == "gather"  # one key head: little to gather
    assert chosen(8192, heads=4, kv_heads=4, has_mask=True) == "gather"
    assert chosen(8192, has_mask=True) == "ulysses"


def test_ranks_compute_equal_causal_work_in_each_turn_and_blocks_stop_where_none_needs_them():
    ranges = balanced_rows(64, 4).ranges
    turns = causal_turns(ranges, ranges, True)
    work = [[sum(tile.scores for tile in turns.tiles(r, owner)) for owner in range(4)] for r in range(4)]
    assert {sum(blocks) for blocks in work} == {64 * 65 / 2 / 4}
    for turn in range(1, 4):
        assert len({work[rank][(rank - turn) % 4] for rank in range(4)}) == 1
    # One call of a kernel in each turn: neighbours are joined.
    kinds = [[tile.kind for tile in turns.tiles(*pair)] for pair in product(range(4), range(4))]
    assert sorted(kinds) == [["diagonal"]] * 4 + [["full"]] * 12
    ranges = consecutive(64, 4).ranges
    assert causal_turns(ranges, ranges, True).hops == (3, 2, 1, 0)
    assert causal_turns(ranges, ranges, False).hops == (3, 3, 3, 3)
    i, j = torch.arange(64)[:, None], torch.arange(64)
    window = ((j <= i) & (j > i - 9))[None, None]
    turns = masked_turns(ranges, ranges, window)
    assert turns.hops == (1, 1, 1, 0)
    with patched(ring_attention, "MASK_TILE", 8):
        turns = masked_turns(ranges, ranges, window)
        tiles = [tile for pair in product(range(4), range(4)) for tile in turns.tiles(*pair)]
    # 8 tiles on the diagonal, 7 below it, and 6 of a single column
    assert len(tiles) == 15
    assert all(tile.kind == "masked" for tile in tiles)
    turns = masked_turns(ranges, ranges, (i // 16 == j // 16)[None, None])
    assert [len(turns.tiles(2, owner)) for owner in range(4)] == [0, 0, 1, 0]
    assert turns.tiles(2, 2)[0].kind == "full"
    # A rank plans its own tiles, also of 1,024 ranks.
    rule = balanced_rows(2048, 1024)
    turns = causal_turns(rule.ranges, rule.ranges, True)
    assert turns.sent(1000)[0] == [2] * 1023 + [0]
    assert len(turns._known) == 0
    for pair in product(range(0, 1024, 93), range(0, 1024, 93)):
        assert bool(turns.tiles(*pair)) == turns.needs(*pair)


@distributed(world_size=2)
def test_the_next_block_is_on_its_way_while_one_is_computed(group):
    order = []
    exchange, tile = comm.exchange, ring_attention.tile_attention
    rule = balanced_rows(8, 2)
    q = torch.randn(1, 2, rule.sizes[group.rank], 4)
    with (
        patched(comm, "exchange", lambda *args: order.append("send") or exchange(*args)),
        patched(ring_attention, "tile_attention", lambda *args: order.append("tile") or tile(*args)),
    ):
        attend(q, q, q, rule, rule, group, method="ring")
    assert order[0] == "send"
    assert order.count("send") == 1
    assert order.count("tile") > 1


@distributed(world_size=2)
def test_a_second_run_of_a_layer_sends_and_computes_nothing(group):
    rule = balanced_rows(8, 2)
    q = torch.randn(1, 2, rule.sizes[group.rank], 4, dtype=torch.double, requires_grad=True)
    for method in METHODS:
        results = KeptResults()
        with results:
            first = attend(q, q, q, rule, rule, group, is_causal=True, method=method)
        with recorded_communication() as records, results:
            second = attend(q, q, q, rule, rule, group, is_causal=True, method=method)
        assert not records
        torch.testing.assert_close(first, second)
        grads = [torch.autograd.grad(y.pow(2).sum(), q)[0] for y in (first, second)]
        torch.testing.assert_close(*grads)


@distributed(world_size=2)
def test_low_precision_and_autocast(group):
    rule = balanced_rows(32, 2)
    torch.manual_seed(0)
    whole = torch.randn(2, 2, 32, 8, requires_grad=True)
    mine = rule.along(-2).split(whole.detach(), group.rank).requires_grad_()
    for method in METHODS:
        with torch.autocast("cpu", torch.bfloat16):
            y = attend(mine, mine, mine, rule, rule, group, is_causal=True, method=method)
            expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        assert y.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(y, rule.along(-2).split(expected, group.rank), rtol=0.02, atol=0.02)
        grads = [torch.autograd.grad(x.sum(), leaf)[0] for x, leaf in ((y, mine), (expected, whole))]
        torch.testing.assert_close(grads[0], rule.along(-2).split(grads[1], group.rank), rtol=0.05, atol=0.05)


def test_a_pretended_group_notes_the_messages():
    notes = []
    group = Group.pretended("context_parallel", 4, lambda op, num_bytes: notes.append((op, num_bytes)))
    rule = balanced_rows(1024, 4)
    for where in ("cpu", "meta"):
        for method in METHODS:
            notes.clear()
            q = torch.empty(1, 4, rule.sizes[0], 8, device=where, requires_grad=True)
            attend(q, q, q, rule, rule, group, is_causal=True, method=method).sum().backward()
            assert q.grad.shape == q.shape
            shape = AttentionShape(1, 4, 4, 8, 8, 4, rule, rule, True)
            assert method == "ring" or notes == [m[:2] for m in attention_messages(method, shape)]
            assert len(notes) == {"gather": 2, "ulysses": 4, "ring": 9}[method]
