"""Fits of one process share their process groups, for as long as every rank trusts them."""

import pytest
import torch.distributed as dist

from tests.harness import distributed
from tests.strategies.models import Net, fit_parallel


class Interrupted(Net):
    """Fails on one rank, between steps, where no peer waits for it."""

    def on_train_end(self):
        if self.global_rank == 1:
            raise ZeroDivisionError("on rank 1 alone")


@distributed(world_size=2)
def test_fits_with_the_same_mesh_use_the_same_groups():
    first = fit_parallel(Net().double(), 2, 1).strategy
    alive = len(dist.distributed_c10d._world.pg_map)
    again = fit_parallel(Net().double(), 2, 1).strategy
    assert again.groups is first.groups
    assert again.device_mesh is first.device_mesh
    assert fit_parallel(Net().double(), 2, 2).strategy.groups is not first.groups
    assert fit_parallel(Net().double(), 2, 1).strategy.groups is first.groups
    assert len(dist.distributed_c10d._world.pg_map) <= 2 * alive


@distributed(world_size=2)
def test_groups_that_one_rank_left_are_replaced_on_all(group):
    first = fit_parallel(Net().double(), 2, 1).strategy
    if group.rank == 1:
        with pytest.raises(ZeroDivisionError):
            fit_parallel(Interrupted().double(), 2, 1)
    else:
        fit_parallel(Interrupted().double(), 2, 1)
    again = fit_parallel(Net().double(), 2, 1).strategy
    assert again.groups is not first.groups
    assert fit_parallel(Net().double(), 2, 1).strategy.groups is again.groups
