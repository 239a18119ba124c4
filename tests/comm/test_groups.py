"""Process groups of a mesh."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.strategies.setup.divide import message_groups
from tests.harness import distributed, recorded_communication


@distributed(world_size=4)
def test_groups_of_a_mesh():
    groups = MeshGroups(Mesh(data_parallel=2, tensor_parallel=2))
    assert groups.tensor_parallel.ranks == ((0, 1), (0, 1), (2, 3), (2, 3))[groups.world.rank]
    assert groups.data_parallel.ranks == ((0, 2), (1, 3), (0, 2), (1, 3))[groups.world.rank]
    assert groups.pipeline_parallel.size == 1
    assert groups.replica is groups.tensor_parallel
    with recorded_communication() as calls:
        pending = comm.all_reduce_(torch.zeros(7), groups.data_parallel, async_op=True)
        comm.all_reduce(torch.zeros(5), groups.tensor_parallel)
        pending.wait()
        comm.all_reduce(torch.zeros(7), groups.pipeline_parallel)
    assert [(call.op, call.axis, call.bytes, len(call.ranks)) for call in calls] == [
        ("all_reduce", "tensor_parallel", 20, 2),
        ("all_reduce", "data_parallel", 28, 2),
    ]
    extra = groups.extra("tensor_parallel", "test")
    assert extra is groups.extra("tensor_parallel", "test")
    assert extra.ranks == groups.tensor_parallel.ranks
    assert extra.name != groups.tensor_parallel.name


@distributed(world_size=4)
def test_a_replica_spans_the_axes_that_divide_a_model():
    groups = MeshGroups(Mesh(pipeline_parallel=2, tensor_parallel=2))
    assert groups.replica.ranks == groups.world.ranks
    assert MeshGroups(Mesh(data_parallel=2, pipeline_parallel=2)).replica.axis == "pipeline_parallel"


@distributed(world_size=8)
def test_ranks_of_the_context_axis_hold_the_same_parameters_and_samples():
    groups = MeshGroups(Mesh(data_parallel=2, context_parallel=2, tensor_parallel=2))
    rank = groups.world.rank
    assert groups.context_parallel.ranks == ((0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7))[rank]
    assert groups.gradients.ranks == ((0, 2, 4, 6), (1, 3, 5, 7))[rank % 2]
    assert groups.extra(comm.GRADIENTS, "test").ranks == groups.gradients.ranks
    assert groups.replica.ranks == ((0, 1, 2, 3), (4, 5, 6, 7))[rank // 4]
    assert groups.model is groups.tensor_parallel
    nodes = groups.nodes({rank: str(rank // 2) for rank in range(8)}, None, "test")
    assert nodes.whole is groups.gradients
    assert nodes.inside.size == 1
    assert nodes.across.ranks == groups.gradients.ranks


@distributed(world_size=4)
def test_one_group_serves_axes_that_it_spans():
    groups = MeshGroups(Mesh(data_parallel=2, tensor_parallel=2))
    assert groups.gradients is groups.data_parallel
    assert groups.model is groups.replica
    groups = MeshGroups(Mesh(pipeline_parallel=2, context_parallel=2))
    assert groups.model is groups.pipeline_parallel
    # Gradients overlap with the messages of attention, so they have their own group.
    assert groups.gradients.ranks == groups.context_parallel.ranks
    assert groups.gradients.name != groups.context_parallel.name


def test_a_group_of_one_needs_no_processes():
    group = Group.alone("tensor_parallel")
    tensor = torch.ones(3)
    assert comm.all_reduce(tensor, group) is tensor
    assert comm.all_gather(tensor, group) is tensor
    assert comm.all_reduce_(tensor, group, async_op=True).wait() is tensor
    comm.agree("x", 1, group)


class Splits:
    """Counts the calls that make groups, as NCCL's, without making communicators."""

    def __init__(self):
        self.made = []

    def __call__(self, world, split_ranks, **options):
        self.made.append((len(split_ranks), options.get("pg_options")))
        mine = next((ranks for ranks in split_ranks if 0 in ranks), None)
        return None if mine is None else dist.new_group(mine, use_local_synchronization=True)


@pytest.mark.parametrize(("layout", "channels"), [({"tensor": 8, "pipeline": 16}, 4), ({"pipeline": 64}, 4)])
def test_groups_of_1024_ranks_are_made_by_a_few_calls(layout, channels, monkeypatch):
    """Each call of NCCL's involves all ranks: what counts is their number, not that of the groups."""
    tensor, pipeline = layout.get("tensor", 1), layout.get("pipeline", 1)
    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    splits = Splits()
    monkeypatch.setattr(dist, "split_group", splits)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=dict), raising=False)
    monkeypatch.setattr("lightning_parallel.comm.groups.splits_groups", lambda world: True)
    try:
        groups = MeshGroups(Mesh(1024 // tensor // pipeline, pipeline, tensor_parallel=tensor))
        axes = len(splits.made)
        found = message_groups(groups, build_schedule("1f1b", pipeline, pipeline))
    finally:
        dist.destroy_process_group()
    assert axes == sum(size > 1 for size in (1024 // tensor // pipeline, pipeline, tensor)) + (tensor > 1 < pipeline)
    assert len(splits.made) - axes <= channels
    # The layers wait for the tensor axis alone.
    assert [options for _, options in splits.made if options] == [{"is_high_priority_stream": True}] * (tensor > 1)
    assert all(group.size == 2 for group in found.values())
    assert groups.pipeline_parallel.size == pipeline
