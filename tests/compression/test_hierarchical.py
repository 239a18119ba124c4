"""Compression between two nodes of two ranks: each rank of a node does half of what a rank does without nodes."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import comm
from lightning_parallel.comm import GradientSession, NodeGroups
from lightning_parallel.compression import (
    Cast,
    Dense,
    HierarchicalReducer,
    HookState,
    Policy,
    PowerSGD,
    Quantize,
    TopK,
    compression_hook,
)
from lightning_parallel.compression.compressor_state import joined
from lightning_parallel.compression.hierarchical import assign_owners
from tests.compression.test_ddp import Odd, tokens, train
from tests.harness import distributed, recorded_communication

SMALL = {"min_numel": 16}
SHAPES = {"a": (24, 16), "b": (24, 16), "c": (40, 10), "d": (10, 40), "e": (24, 16), "f": (30, 12), "g": (7,), "h": ()}
COMPRESSORS = {
    "powersgd": lambda: PowerSGD(2, **SMALL),
    "alternating": lambda: PowerSGD(2, alternate=True, **SMALL),
    "topk_int8": lambda: TopK(0.1, **SMALL) | Quantize(8),
    "int8": lambda: Quantize(8, **SMALL),
    "policy": lambda: Policy({"a": None, "*": PowerSGD(1, feedback="ef21", **SMALL)}),
}


def gradients(step, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def in_buckets(session, named):
    for names in ("ab", "cdefg", "h"):
        session.add({name: named[name] for name in names if name in named})
    return session.finish()


@pytest.mark.sweep
@pytest.mark.parametrize("name", COMPRESSORS)
@distributed(world_size=4)
def test_equals_compression_of_the_means_of_nodes(name, group):
    """The oracle compresses all of a node's mean on each of its ranks."""
    nodes = NodeGroups.of({}, 2)
    ours, oracle = COMPRESSORS[name](), COMPRESSORS[name]()
    session = GradientSession(HierarchicalReducer(ours, nodes), group)
    flat = GradientSession(oracle, nodes.across)
    for step in range(3):
        found, expected = gradients(step, group.rank), gradients(step, group.rank)
        expected = {name: comm.all_reduce(tensor, nodes.inside) / 2 for name, tensor in expected.items()}
        assert in_buckets(session, found)
        assert in_buckets(flat, expected)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-10, msg=key)
            assert torch.equal(comm.all_gather(found[key][None], group), found[key].expand(4, *tensor.shape)), key
    assert ours.step == 3
    slots = [{key for slot, key, _ in reducer.memory.items()} for reducer in (ours, oracle)]
    assert slots[0] < slots[1]
    held = comm.all_gather_object(slots[0], nodes.inside)
    assert held[0] | held[1] == slots[1]
    assert not held[0] & held[1]
    nodes.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@distributed(world_size=4)
def test_exact_means_are_those_of_all_ranks(dtype, group):
    nodes = NodeGroups.of({}, 2)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for compressor in (Dense(), Cast("fp32", **SMALL)):
        found = gradients(0, group.rank, dtype)
        found["c"] = found["c"].t().contiguous().t()  # laid out by columns
        everyone = [gradients(0, rank, dtype) for rank in range(4)]
        assert in_buckets(GradientSession(HierarchicalReducer(compressor, nodes), group), found)
        for name, tensor in found.items():
            expected = sum(one[name].double() for one in everyone) / 4
            bound = max(tolerance, 0 if isinstance(compressor, Dense) else 1e-6)
            torch.testing.assert_close(tensor.double(), expected, rtol=bound, atol=bound, msg=name)
            assert tensor.dtype == dtype
        assert {block.dtype for block in compressor.blocks} == {dtype}
    nodes.close()


def sent(calls, nodes):
    """Bytes of the payloads that crossed nodes, and of the others."""
    across = sum(span.bytes for span in calls if {rank // 2 for rank in span.ranks} == {0, 1})
    return across, sum(span.bytes for span in calls) - across


@distributed(world_size=4)
def test_memory_and_what_is_sent_between_nodes_are_halved(group):
    nodes = NodeGroups.of({}, 2)
    names = list("abcdefgh")
    found = []
    for hierarchical in (False, True):
        compressor = PowerSGD(4, **SMALL)
        reducer = HierarchicalReducer(compressor, nodes) if hierarchical else compressor
        session = GradientSession(reducer, nodes.across)
        for _ in range(2):  # in the first one ranks agree on the gradients
            named = dict(zip(names, torch.randn(8, 64, 64).unbind()))
            with recorded_communication() as calls:
                session.add(named)
                session.finish()
        blocks = sum(block.sent_bytes for block in compressor.blocks)
        dense = sum(block.dense_bytes for block in compressor.blocks)
        found.append((sent(calls, nodes)[0], blocks, dense, compressor.memory.num_bytes))
    assert all(flat == 2 * half > 0 for flat, half in zip(*found)), found
    assert {
        len(held) for held in comm.all_gather_object([key for key, at in compressor.owners.items() if at], group)
    } == {4}
    nodes.close()


@distributed(world_size=4)
def test_an_overflow_on_one_rank_leaves_no_trace(group):
    """Also on ranks that own nothing of what is not finite."""
    nodes = NodeGroups.of({}, 2)
    results = []
    for bad in (False, True):
        compressor = COMPRESSORS["topk_int8"]()
        session = GradientSession(HierarchicalReducer(compressor, nodes), group)
        for step in range(4):
            named = gradients(step, group.rank)
            if step == 2:
                named["a"][0, 0] = torch.nan if group.rank == 3 else 0
                if not bad:
                    continue
            assert in_buckets(session, named) == (step != 2)
        results.append(named)
        assert compressor.step == 3
    assert all(torch.equal(results[0][name], results[1][name]) for name in SHAPES)
    nodes.close()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["alternating", "int8", "policy"])
@distributed(world_size=4)
def test_goes_on_from_a_checkpoint_bit_for_bit_and_at_other_sizes(name, group):
    nodes = NodeGroups.of({}, 2)

    def trained(reducer, steps):
        session, named = GradientSession(reducer, group), {}
        for step in steps:
            named = gradients(step, group.rank)
            # Some are not used in the first steps, so that owners are not those of a new run.
            assert in_buckets(session, named if step > 1 else {key: named[key] for key in "bdf"})
        return named

    expected = trained(whole := HierarchicalReducer(COMPRESSORS[name](), nodes), range(5))
    trained(first := HierarchicalReducer(COMPRESSORS[name](), nodes), range(3))
    parts = comm.all_gather_object(first.state_dict(), group)
    states = [joined(parts[:2]), joined(parts[2:])]
    again = HierarchicalReducer(COMPRESSORS[name](), nodes)
    again.load_state_dict(states)
    found = trained(again, range(3, 5))
    assert all(torch.equal(found[key], expected[key]) for key in SHAPES)
    assert again.reducer.owners == whole.reducer.owners
    local = HierarchicalReducer(COMPRESSORS[name](), nodes)
    local.load_state_dict(first.state_dict())
    assert all(torch.equal(tensor, expected[key]) for key, tensor in trained(local, range(3, 5)).items())
    # Among other ranks the mean of the residuals is kept.
    alone = COMPRESSORS[name]()
    alone.load_state_dict(states, group)
    assert alone.step == 3
    back = HierarchicalReducer(COMPRESSORS[name](), nodes)
    back.load_state_dict(comm.all_gather_object(alone.state_dict(), group))
    for slot in states[0].keys() & {"residual"}:
        mean = {key: (states[0][slot][key] + states[1][slot][key]) / 2 for key in states[0][slot]}
        for key, tensor in back.reducer.state_dict()[slot].items():
            torch.testing.assert_close(tensor, alone.state_dict()[slot][key])
            if "server_residual" not in states[0]:
                torch.testing.assert_close(tensor, mean[key])
    nodes.close()


@distributed(world_size=4)
def test_under_ddp_with_parameters_that_are_not_always_used(group):
    def trained(hierarchical):
        model = DistributedDataParallel(Odd().double(), bucket_cap_mb=0.0005, find_unused_parameters=True)
        nodes = NodeGroups.of({}, 2)
        reducer = HierarchicalReducer(Dense(), nodes) if hierarchical else Dense()
        state = HookState(reducer, model, bucket_bytes=600)
        model.register_comm_hook(state, compression_hook)
        found = train(model, group, state, num_steps=5, idle=lambda step: step > 0 and (step != 2 or group.rank == 3))
        with model.no_sync():
            model(tokens(7, group.rank)).square().mean().backward()
        state.close()
        nodes.close()
        return found

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-10, atol=1e-12)


@distributed(world_size=4)
def test_an_owner_that_fails_fails_with_all_ranks(group):
    class Broken(TopK):
        def compress(self, work, block, step):
            raise ArithmeticError("no")
            yield

    nodes = NodeGroups.of({}, 2)
    session = GradientSession(HierarchicalReducer(Broken(0.1, **SMALL), nodes), group)
    with pytest.raises((ArithmeticError, RuntimeError), match="no"):
        session.add({"a": torch.ones(20, 20)})
    with pytest.raises(ValueError, match=r"(?s)gradients' names.*rank 3"):
        session.add({"bc"[group.rank == 3]: torch.ones(20, 20)})
    nodes.close()


@distributed(world_size=4)
def test_one_node_compresses_nothing(group):
    compressor, nodes = TopK(0.01, **SMALL), NodeGroups.of(dict.fromkeys(range(4), "here"))
    found = gradients(0, group.rank)
    assert in_buckets(GradientSession(HierarchicalReducer(compressor, nodes), group), found)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, sum(gradients(0, rank)[name] for rank in range(4)) / 4)
    assert compressor.step == 1
    nodes.close()


@distributed(world_size=4)
def test_nodes_of_different_sizes_are_refused(group):
    with pytest.raises(ValueError, match="got 3 on one, 1 on other"):
        NodeGroups.of(dict(enumerate(["one", "one", "other", "one"])))
    with pytest.raises(ValueError, match="must be a multiple of 3, the size of a node; got 4"):
        NodeGroups.of({}, 3)
    nodes = NodeGroups.of(dict(enumerate(["one", "other", "one", "other"])))
    assert nodes.inside.ranks == ((0, 2), (1, 3))[group.rank % 2]
    assert nodes.across.ranks == ((0, 1), (2, 3))[group.rank // 2]
    nodes.close()


def test_owners_are_balanced_and_stay():
    owners: dict = {}
    total = [0, 0, 0]
    assign_owners({"a": 9, "b": 5, "c": 4, "d": 8, "e": 1}, owners, total)
    assert total == [9, 9, 9]
    before = dict(owners)
    assign_owners({"f": 6, "a": 9, "g": 6}, owners, total)
    assert {name: owners[name] for name in before} == before
    assert total[before["a"]] == 9


def test_owners_of_buckets_of_one_large_matrix_alternate():
    owners, total = {}, [0, 0]
    for index in range(4):
        assign_owners({f"{index}.weight": 100, f"{index}.bias": 1}, owners, total)
    assert total == [202, 202]
