"""What a project for replicas finds under its own names: sizes, ranks and collectives mean the data axis."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_parallel.compat.default_group import all_processes
from tests.harness import distributed
from tests.strategies.models import Net, Samples, loader, trainer_for
from tests.strategies.test_pipeline import Deep


class Contrasts(Deep):
    """Its loss compares each sample with those of all replicas, as written for DDP."""

    def training_step(self, batch, index):
        z = self(batch[0])
        everyone, rank, size = z, 0, 1
        if self.is_distributed:
            everyone, rank, size = torch.cat(all_gather(z)), dist.get_rank(), dist.get_world_size()
        mine = rank * len(z) + torch.arange(len(z))
        loss = F.cross_entropy(z @ everyone.T, mine)
        total = loss.detach().clone()
        if self.is_distributed:
            dist.all_reduce(total)
            dist.broadcast(total, src=size - 1)
        self.log("mean", total / size)
        self.losses.append(total / size)
        return loss

    def on_train_batch_end(self, *_):
        if self.is_distributed:
            strategy = self.trainer.strategy
            self.seen = dist.get_world_size(), strategy.num_processes, strategy.world_size

    def on_train_epoch_end(self):
        pass


def last_rank_is_root(group, size):
    """Whether the functions with a root, here the last rank of `group` (None: the default group), find it."""
    rank, last = dist.get_rank(group), size - 1
    sent, scattered, gathered = [f"of {rank}"], [None], [None] * size
    dist.broadcast_object_list(sent, last, group=group)
    dist.scatter_object_list(scattered, list(range(size)) if rank == last else None, last, group=group)
    dist.gather_object(rank, gathered if rank == last else None, last, group=group)
    tensors = [torch.zeros(1) for _ in range(size)]
    dist.gather(torch.full((1,), float(rank)), tensors if rank == last else None, last, group=group)
    mine = torch.zeros(1)
    dist.scatter(mine, tensors if rank == last else None, last, group=group)
    is_gathered = rank != last or gathered == list(range(size))
    return is_gathered and (sent, scattered, mine.item()) == ([f"of {last}"], [rank], rank)


class Looks(Callback):
    """Makes groups and looks at sizes in a hook; saves there, too, which is not the user's own code."""

    def __init__(self, path):
        self.path, self.found = path, {}

    def on_train_batch_end(self, trainer, *_):
        if not self.found:
            trainer.save_checkpoint(self.path)
            mesh = init_device_mesh("cpu", (trainer.strategy.mesh.world_size,))
            everyone = dist.new_group(list(range(trainer.strategy.mesh.world_size)))
            self.found = {
                "sizes": (dist.get_world_size(), trainer.world_size),
                "all": (mesh.size(), everyone.size(), all_processes().size()),
                "ranks": (dist.get_rank(everyone), mesh.get_local_rank(), mesh.get_rank(), trainer.global_rank),
                "roots": (last_rank_is_root(everyone, everyone.size()), last_rank_is_root(None, dist.get_world_size())),
            }

    def on_fit_end(self, trainer, module):
        self.found["at the end"] = dist.get_world_size()


def _contrasts(is_distributed):
    module = Contrasts()
    module.is_distributed = is_distributed
    return module


def _expect_like_ddp(strategy, replicas, path, group, **kwargs):
    alone, module, looks = _contrasts(False), _contrasts(True), Looks(path)
    trainer_for(max_epochs=1).fit(alone, loader())
    trainer = trainer_for(strategy, group.size, max_epochs=1, callbacks=[looks], **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Self-check of .* (skipped|incomplete)")
        trainer.fit(module, loader(replicas, group.rank * replicas // group.size))
    torch.testing.assert_close(module.losses, alone.losses, rtol=1e-10, atol=1e-12)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-9, atol=1e-11, msg=name)
    assert module.seen == (replicas,) * 3
    expected = {"sizes": (replicas,) * 2, "all": (group.size,) * 3, "ranks": (group.rank,) * 4, "roots": (True, True)}
    assert looks.found == {**expected, "at the end": replicas}
    assert (dist.get_world_size(), dist.get_rank()) == (group.size, group.rank)


@pytest.mark.parametrize("kind", [TensorParallelStrategy, PipelineParallelStrategy])
@distributed(world_size=2)
def test_one_replica_is_a_world_of_one(kind, group, tmp_path):
    sizes = {} if kind is TensorParallelStrategy else {"num_microbatches": 1}
    _expect_like_ddp(kind(**sizes), 1, tmp_path / "a.ckpt", group, verifies=True)


@distributed(world_size=4)
def test_a_loss_over_replicas_gathers_over_them(group, tmp_path):
    _expect_like_ddp(HybridParallelStrategy(tensor_parallel_size=2), 2, tmp_path / "a.ckpt", group)


@distributed(world_size=2)
def test_the_world_is_whole_after_a_hook_that_fails(group):
    class Fails(Net):
        def on_train_batch_start(self, *_):
            raise KeyError(dist.get_world_size())

    for _ in range(2):
        with pytest.raises(KeyError, match="1"):
            trainer_for(TensorParallelStrategy(), 2, max_epochs=1).fit(Fails().double(), loader())
        assert (dist.get_world_size(), dist.get_rank()) == (2, group.rank)


@pytest.mark.parametrize("kind", [TensorParallelStrategy, PipelineParallelStrategy])
@distributed(world_size=2)
def test_a_sampler_by_global_rank_is_refused_on_all(kind, group):
    class Samples2(Deep):
        def train_dataloader(self):
            data = Samples()
            sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank)
            return DataLoader(data, 8, sampler=sampler)

    with pytest.raises(ValueError, match=r"\*\*trainer.strategy.distributed_sampler_kwargs"):
        trainer_for(kind(), 2, max_epochs=1).fit(Samples2())


@distributed(world_size=1)
def test_one_device_is_told_that_nothing_is_divided():
    with pytest.warns(
        UserWarning, match="runs on one device, so the model is neither sharded nor split; set `devices`"
    ):
        trainer_for(TensorParallelStrategy(), 1, max_steps=1).fit(Net().double(), loader())
