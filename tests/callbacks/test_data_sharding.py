"""Who reads which samples: right and wrong samplers."""

import os

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightning_parallel import AutoResume, HybridParallelStrategy, TensorParallelStrategy, comm
from lightning_parallel.callbacks.monitors.data_sharding import (
    DataShardingMonitor,
    EpochEnd,
    ReadReport,
    ShardingAccumulator,
    TrackedLoader,
    sample_hashes,
)
from tests.harness import distributed
from tests.strategies.models import Net, Samples, trainer_for
from tests.strategies.test_pipeline import Deep


def fit(data, group=None, strategy="auto", monitor=None, module=None, ckpt_path=None, callbacks=(), **options):
    size = 1 if group is None else group.size
    os.environ.update(LOCAL_RANK=str(group.rank if group else 0), NODE_RANK="0", WORLD_SIZE=str(size))
    monitor = monitor or DataShardingMonitor(every_n_batches=3, show_table=False)
    trainer = trainer_for(strategy, size, callbacks=[monitor, *callbacks], **options)
    trainer.fit(module or Net().double(), data, ckpt_path=ckpt_path)
    return monitor.report()


def found(report):
    return [(one["name"], one["ranks"]) for one in report["findings"]]


# ------------------------------------------------------------------------------------------------- without processes


def reading(replica, samples, steps=(0,), contents=(), end=None):
    return ReadReport(replica, list(steps), torch.tensor(samples, dtype=torch.int64), list(contents), end)


def end(samples=None, order=None, may_drop=0, is_whole=True):
    return EpochEnd(is_whole, order, samples, may_drop)


def names(findings):
    return [one["name"] for one in findings]


def test_disjoint_parts_are_clean_and_padding_is_allowed():
    audit = ShardingAccumulator()
    assert audit.audit(0, [reading(0, [0, 2, 4]), reading(1, [1, 3, 5])]) == []
    assert audit.audit(0, [reading(0, [6], end=end(7)), reading(1, [0], end=end(7))]) == [], "0 fills up the last batch"


def test_overlap_inside_a_window_and_between_windows():
    (one,) = ShardingAccumulator().audit(
        0, [reading(0, range(6), [5]), reading(1, range(3, 9)), reading(2, range(9, 15))]
    )
    assert (one["step"], one["name"], one["ranks"]) == (5, "overlap", [0, 1])
    assert one["detail"] == "3 of 15 samples were read by several replicas; at most 2 should be"
    audit = ShardingAccumulator()
    assert audit.audit(0, [reading(0, [0, 1, 2]), reading(1, [3, 4, 5])]) == []
    both = [reading(0, [3, 4, 5], end=end(6)), reading(1, [0, 1, 2], end=end(6))]
    assert names(audit.audit(0, both)) == ["overlap"]


def test_missing_and_repetition():
    audit = ShardingAccumulator()
    parts = [reading(0, [0, 0, 2, 2], end=end(8)), reading(1, [1, 3, 5, 5], end=end(8))]
    repetition, missing = audit.audit(0, parts)
    assert (repetition["ranks"], repetition["detail"]) == ([0, 1], "3 samples were read twice in one epoch")
    assert missing["detail"] == "3 of 8 samples were not read in a whole epoch"
    for parts in (
        [reading(0, [0, 2], end=end(6, may_drop=1)), reading(1, [1, 3], end=end(6, may_drop=1))],
        [reading(0, [0], end=end(6, is_whole=False)), reading(1, [1], end=end(6))],
        [reading(0, [0], end=end(None)), reading(1, [1], end=end(None))],
    ):
        assert ShardingAccumulator().audit(0, parts) == []


def test_peers_of_one_replica():
    ranks = [reading(0, [0], [4, 5], [7, 8]), reading(0, [0], [4, 5], [7, 9]), reading(1, [1], [4, 5], [1, 2])]
    (one,) = ShardingAccumulator().audit(0, [*ranks, reading(1, [1], [4, 5], [1, 2])])
    assert (one["step"], one["name"], one["ranks"]) == (5, "peers", [0, 1])
    assert "replica 0 read different batches in 1 of 2 steps" in one["detail"]


def test_the_same_order_twice():
    audit = ShardingAccumulator()
    assert audit.audit(0, [reading(0, [0], end=end(order=5)), reading(1, [1], end=end(order=6))]) == []
    (one,) = audit.audit(1, [reading(0, [0], end=end(order=5)), reading(1, [1], end=end(order=7))])
    assert (one["name"], one["ranks"]) == ("order", [0])
    assert audit.audit(2, [reading(0, [0], end=end(order=None)), reading(1, [1], end=end(order=7))]) == [], "told once"


def test_contents_that_repeat_anyway_are_no_overlap():
    audit = ShardingAccumulator("content")
    assert audit.audit(0, [reading(0, [5, 5, 6, 6, 1]), reading(1, [5, 3, 6, 5])]) == []
    assert names(audit.audit(0, [reading(0, [10, 11, 12]), reading(1, [11, 12, 13])])) == ["overlap"]
    none = ShardingAccumulator("")
    assert none.audit(0, [reading(0, [1, 2]), reading(1, [1, 2])]) == []
    assert "known_by" not in none.summarize([[]])


@pytest.mark.parametrize("known_by", ["place", "content"])
def test_resume(known_by):
    first, second = ShardingAccumulator(known_by), ShardingAccumulator(known_by)
    first.audit(3, [reading(0, [0, 2, 40]), reading(1, [1, 3, 41])])
    state = first.state_dict(3, torch.tensor([4]), unknown=1)
    assert state["samples"].dtype == (torch.uint8 if known_by == "place" else torch.int64)
    second.load_state_dict(state)
    assert second.audit(3, [reading(0, [6, 8]), reading(1, [7, 9])]) == []
    (one,) = second.audit(3, [reading(0, [4, 2], [9]), reading(1, [3, 11])])
    assert (one["step"], one["name"], one["ranks"]) == (9, "resume", [0, 1])
    assert one["detail"].startswith("3 of 4 samples")
    third = ShardingAccumulator(known_by)
    third.load_state_dict(state)
    assert third.audit(4, [reading(0, [0, 2]), reading(1, [1, 3])]) == [], "another epoch"


def test_what_was_read_before_a_resume_is_not_missing():
    audit = ShardingAccumulator()
    audit.load_state_dict({"epoch": 0, "known_by": "place", "samples": torch.tensor([0b11110000]).byte(), "unknown": 1})
    assert audit.audit(0, [reading(0, [6], end=end(7)), reading(1, [5], end=end(7))]) == [], "4 may have been read"


def test_hashes_of_samples():
    x, y = torch.randn(6, 3, 2), torch.arange(6)
    hashes = sample_hashes({"x": x, "label": [y, torch.tensor(3.0)], "name": "text"})
    assert len(set(hashes.tolist())) == 6
    order = torch.tensor([3, 1, 0, 5, 2, 4])
    assert torch.equal(sample_hashes((x[order], y[order])), sample_hashes((x, y))[order])
    assert not torch.equal(sample_hashes((x, y)), sample_hashes((x, y + 1)))
    assert not torch.equal(sample_hashes((x, y)), sample_hashes((x * 1.0001, y)))
    assert sample_hashes(["text", 3]) is None
    assert len(sample_hashes(torch.randn(4, 100_000))) == 4


def test_a_tracked_loader_yields_the_same_batches_and_is_restored():
    data = Samples(length=10)
    expected = [x for x, _ in DataLoader(data, batch_size=3)]
    loader = DataLoader(data, batch_size=3)
    watched = TrackedLoader(loader)
    assert watched.knows_indices
    assert isinstance(loader.batch_sampler, BatchSampler)
    for _ in range(2):
        places = []
        for x, other in zip(loader, expected, strict=True):
            assert torch.equal(x[0], other)
            places.append(watched.next_indices().tolist())
        assert places == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert watched.is_exhausted
    assert (watched.facts.size, watched.facts.may_drop) == (10, 0)
    watched.release()
    assert type(loader.batch_sampler) is BatchSampler
    unreadable = TrackedLoader(DataLoader(data, batch_sampler=[[0, 1], [2]]))
    assert not unreadable.knows_indices


def test_bad_arguments():
    with pytest.raises(ValueError, match="`every_n_batches` must be an integer of at least 1"):
        DataShardingMonitor(every_n_batches=0)


# ------------------------------------------------------------------------------------------------------- in training


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "drop_last": True}])
@distributed(world_size=2)
def test_correct_samplers_are_clean(options, group):
    report = fit(DataLoader(Samples(length=33), batch_size=4, **options), group, DDPStrategy())
    assert (report["findings"], report["known_by"]) == ([], "place")


OPTIONS = [
    {"max_epochs": 2},
    {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    {"limit_train_batches": 3},
    {"overfit_batches": 2},
    {"fast_dev_run": True},
    {"max_steps": 11},
    {"accumulate_grad_batches": 3},
    {"val_check_interval": 2, "limit_val_batches": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_ways_of_the_trainer_are_no_mistakes(options):
    report = fit(DataLoader(Samples(), batch_size=4, shuffle=True), **options)
    assert (report["findings"], report["known_by"]) == ([], "place")


def test_one_process_with_loading_processes_and_without_shuffling_is_clean():
    report = fit(DataLoader(Samples(), batch_size=4, num_workers=2))
    assert (report["findings"], report["known_by"]) == ([], "place")


class Reloading(Net):
    """Makes a loader whose order never changes, for each epoch anew."""

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:.*call `set_epoch` on the sampler")
def test_an_order_that_comes_back_with_each_new_loader():
    report = fit(None, module=Reloading().double(), reload_dataloaders_every_n_epochs=1, max_epochs=3)
    assert found(report) == [("order", [0])]


@distributed(world_size=2)
def test_drawing_with_replacement_is_no_mistake(group):
    wrapped, bare = WeightedRandomSampler(torch.rand(32), 32), RandomSampler(Samples(), replacement=True)
    for sampler, options in ((wrapped, {}), (bare, {"use_distributed_sampler": False})):
        report = fit(DataLoader(Samples(), batch_size=4, sampler=sampler), group, DDPStrategy(), **options)
        assert report["findings"] == []
        assert "known_by" not in report


@distributed(world_size=2)
def test_several_loaders(group):
    class Pairs(Net):
        def training_step(self, batch, index):
            return super().training_step(batch["a"], index)

    loaders = {"a": DataLoader(Samples(), batch_size=4), "b": DataLoader(Samples(), batch_size=2)}
    report = fit(loaders, group, DDPStrategy(), module=Pairs().double())
    assert report["findings"] == []
    assert "known_by" not in report


class Stuck(DistributedSampler):
    def set_epoch(self, epoch):
        pass


class Stream(IterableDataset):
    """Every rank reads all of it."""

    def __iter__(self):
        return iter([Samples()[index] for index in range(32)])


WRONG = {
    "rank": (lambda data, group: DistributedSampler(data, 2, 0), {"overlap", "missing"}, "place"),
    "set_epoch": (lambda data, group: Stuck(data, 2, group.rank), {"order"}, "place"),
    "not divided": (lambda data, group: RandomSampler(data), {"overlap"}, "content"),
    "stream": (lambda data, group: None, {"overlap"}, "content"),
}


@pytest.mark.parametrize("mistake", WRONG)
@distributed(world_size=2)
def test_mistakes_are_named(mistake, group):
    make, expected, known_by = WRONG[mistake]
    data = Stream() if mistake == "stream" else Samples()
    loader = DataLoader(data, batch_size=4, sampler=make(data, group))
    report = fit(loader, group, DDPStrategy(), use_distributed_sampler=False)
    assert {name for name, _ in found(report)} == expected
    assert all(ranks == [0, 1] for _, ranks in found(report))
    assert report["known_by"] == known_by


@distributed(world_size=2)
def test_the_findings_are_the_same_beside_auto_resume(group, tmp_path):
    """`AutoResume` puts a sampler of its own in the place of the user's, whose promises stay."""

    def watched(name, sampler):
        loader, resume = DataLoader(data, batch_size=4, sampler=sampler), AutoResume(str(tmp_path / name))
        return fit(loader, group, DDPStrategy(), callbacks=[resume])

    data = Samples()
    report = watched("wrong rank", DistributedSampler(data, 2, 0))
    assert {name for name, _ in found(report)} == {"overlap", "missing"}
    report = watched("drawn", WeightedRandomSampler(torch.rand(32), 32))
    assert report["findings"] == []
    assert "known_by" not in report


def test_a_loader_that_is_used_in_each_epoch_gets_its_sampler_back():
    class Kept(Net):
        loader = DataLoader(Samples(), batch_size=4, shuffle=True)

        def train_dataloader(self):
            return self.loader

    report = fit(None, module=Kept().double(), reload_dataloaders_every_n_epochs=1, max_epochs=3)
    assert (report["findings"], report["known_by"]) == ([], "place")
    assert type(Kept.loader.batch_sampler) is BatchSampler


class Wandering(Sampler):
    """From the second batch on, each rank of a replica reads something else."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 16

    def __iter__(self):
        return iter([*range(4), *range(4 + 4 * self.rank, 16 + 4 * self.rank)])


@distributed(world_size=2)
def test_ranks_of_one_replica_that_read_different_batches(group):
    sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 2, "num_microbatches": 2}
    loader = DataLoader(Samples(), batch_size=4, shuffle=True)
    clean = fit(loader, group, HybridParallelStrategy(**sizes), module=Deep())
    assert clean["findings"] == []
    loader = DataLoader(Samples(length=64), batch_size=4, sampler=Wandering(group.rank))
    options = {"use_distributed_sampler": False, "max_epochs": 1}
    with pytest.raises(ValueError, match="must get the same batches"):
        fit(loader, group, HybridParallelStrategy(**sizes), module=Deep(), **options)


@distributed(world_size=4)
def test_tensor_x_data(group):
    strategy = TensorParallelStrategy(tensor_parallel_size=2)
    report = fit(DataLoader(Samples(), batch_size=4, shuffle=True), group, strategy)
    assert (report["findings"], report["known_by"]) == ([], "place")
    data = Samples()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 4, group.rank, shuffle=False))
    with pytest.raises(ValueError, match="must get the same batch"):
        fit(loader, group, TensorParallelStrategy(tensor_parallel_size=2), use_distributed_sampler=False)


class SaveAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("step", [2, 4])
@distributed(world_size=2)
def test_resume_in_the_middle_and_at_the_end_of_an_epoch(step, group, tmp_path):
    def loader():
        return DataLoader(Samples(), batch_size=4, shuffle=True)

    path = tmp_path / f"{step}.ckpt"
    fit(loader(), group, DDPStrategy(), callbacks=[SaveAt(step, path)], max_epochs=1)
    comm.barrier(group)
    report = fit(loader(), group, DDPStrategy(), ckpt_path=path)
    torch.load(path, weights_only=True)
    # Lightning begins the epoch's data again, and stops where the epoch would have ended.
    assert found(report) == ([("resume", [0, 1])] if step == 2 else [])
