"""The mesh is arithmetic: coordinates, groups and automatic sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.mesh import AXES, Mesh

SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES, SIZES)
def test_rank_and_coordinate_are_inverse(data, pipeline, context, tensor):
    mesh = Mesh(data, pipeline, context, tensor)
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


@given(SIZES, SIZES, SIZES, SIZES, st.sets(st.sampled_from(AXES)))
def test_peers_partition_the_ranks_and_differ_only_along_the_axes(data, pipeline, context, tensor, axes):
    mesh = Mesh(data, pipeline, context, tensor)
    groups = mesh.peers(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == mesh.size(*axes)
        for axis in set(AXES) - axes:
            assert len({getattr(mesh.coordinate(rank), axis) for rank in group}) == 1


def test_tensor_axis_varies_fastest():
    mesh = Mesh(data_parallel=2, pipeline_parallel=2, tensor_parallel=2)
    assert mesh.peers("tensor_parallel") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.peers("pipeline_parallel") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.peers("data_parallel") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_context_axis_lies_between_pipeline_and_tensor():
    mesh = Mesh(pipeline_parallel=2, context_parallel=2, tensor_parallel=2)
    assert mesh.peers("context_parallel") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert Mesh(data_parallel=2, context_parallel=2, tensor_parallel=2).peers("data_parallel", "context_parallel") == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]


@pytest.mark.parametrize(
    ("world", "sizes", "expected"),
    [
        (8, {"tensor_parallel": "auto", "data_parallel": "auto"}, (1, 1, 1, 8)),
        (8, {"tensor_parallel": 2, "data_parallel": "auto"}, (4, 1, 1, 2)),
        (8, {"tensor_parallel": "auto", "data_parallel": 4}, (4, 1, 1, 2)),
        (8, {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": "auto"}, (2, 2, 1, 2)),
        (8, {"context_parallel": "auto", "data_parallel": 2}, (2, 1, 4, 1)),
        (1, {}, (1, 1, 1, 1)),
    ],
)
def test_auto_takes_what_is_left(world, sizes, expected):
    assert Mesh.resolve(world, sizes).shape == expected


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(4, {"tensor_parallel": 3}), (4, {"tensor_parallel": 2}), (4, {"tensor_parallel": 8, "data_parallel": "auto"})],
)
def test_sizes_that_do_not_multiply_to_the_world_are_refused(world, sizes):
    with pytest.raises(ValueError, match=f"the number of processes, {world}; got"):
        Mesh.resolve(world, sizes)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "two"])
def test_a_size_must_be_a_positive_integer(size):
    with pytest.raises(ValueError, match="positive integer"):
        Mesh.resolve(4, {"tensor_parallel": size})
