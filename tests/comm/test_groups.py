"""Process groups of a mesh."""

import torch

from lightning_parallel import comm
from lightning_parallel.comm import Group, MeshGroups
from lightning_parallel.mesh import Mesh
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


def test_a_group_of_one_needs_no_processes():
    group = Group.alone("tensor_parallel")
    tensor = torch.ones(3)
    assert comm.all_reduce(tensor, group) is tensor
    assert comm.all_gather(tensor, group) is tensor
    assert comm.all_reduce_(tensor, group, async_op=True).wait() is tensor
    comm.agree("x", 1, group)
