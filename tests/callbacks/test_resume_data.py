"""Where training data go on: kinds of loaders, places in an epoch, checkpoints that are damaged or of others."""

import contextlib
import os
import shutil
import signal

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_parallel import AutoResume, DataShardingMonitor, callbacks
from lightning_parallel.callbacks.monitors.data_order import LoaderFacts, ResumableSampler
from lightning_parallel.callbacks.monitors.global_batch import GlobalBatch
from lightning_parallel.callbacks.resume.folder import ResumeFolder
from lightning_parallel.callbacks.resume.point import ResumePoint, TrainingData
from lightning_parallel.checkpoint.place import new_key
from tests.callbacks.test_auto_resume import Dropping, Interrupt, Interruption, assert_equal_weights, fit, loader_of
from tests.strategies.models import Samples, trainer_for


class Stream(IterableDataset):
    def __init__(self):
        self.data = Samples(length=36)

    def __iter__(self):
        return iter(self.data[index] for index in range(36))


class NoLoader:
    """Gives batches, and is no `DataLoader`."""

    def __iter__(self):
        return iter(loader_of(shuffle=False))

    def __len__(self):
        return 9


class OwnBatches(BatchSampler):
    """A batch sampler of the user's, with batches of several sizes in an order of its own."""

    def __iter__(self):
        order = torch.randperm(36).tolist()
        return iter([order[start : start + 4] for start in range(0, 36, 4)])


class OwnSampler(RandomSampler):
    pass


LOADERS = {
    "own generator": lambda: loader_of(generator=torch.Generator().manual_seed(4)),
    "weighted": lambda: loader_of(
        shuffle=False, sampler=WeightedRandomSampler([1.0] * 18 + [3.0] * 18, 36, generator=torch.Generator())
    ),
    "own sampler": lambda: loader_of(shuffle=False, sampler=OwnSampler(range(36))),
    "own batches": lambda: DataLoader(Samples(length=36), batch_sampler=OwnBatches(range(36), 4, False)),
    "stream": lambda: DataLoader(Stream(), 4),
    "no loader": NoLoader,
    "unequal": lambda: loader_of(5),
    "several": lambda: [loader_of(), loader_of(4, 12)],
}


class OfSeveral(Dropping):
    def training_step(self, batch, index):
        return super().training_step([torch.cat(parts) for parts in zip(*batch)], index)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", LOADERS)
def test_kinds_of_loaders_go_on_bit_for_bit(kind, tmp_path):
    make, project = LOADERS[kind], OfSeveral if kind == "several" else Dropping
    expected, _ = fit(tmp_path / "whole", make(), module=project())
    cut, _ = fit(tmp_path / "cut", make(), 14, module=project(), every=1)
    loader = make()
    module, _ = fit(tmp_path / "cut", loader, module=project())
    assert cut.seen[:13] + module.seen == expected.seen
    assert_equal_weights(module, expected)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, Stream):
        assert not isinstance(loader.sampler, ResumableSampler), "the user's loader has its own sampler again"


@pytest.mark.parametrize("step", [2, 4, 5])
def test_accumulated_batches_and_validation_within_the_epoch(step, tmp_path):
    class Validating(Dropping):
        def validation_step(self, batch, index):
            # What a scheduler on a validated value does depends on each validation.
            self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
            return [optimizer], [
                {"scheduler": plateau, "monitor": "val_loss", "interval": "step", "frequency": 4, "strict": False}
            ]

        def val_dataloader(self):
            return loader_of(shuffle=False)

    options = {"accumulate_grad_batches": 2, "val_check_interval": 4, "every": 1}
    expected, whole = fit(tmp_path / "whole", loader_of(), module=Validating(), **options)
    fit(tmp_path / "cut", loader_of(), step, module=Validating(), **options)
    module, trainer = fit(tmp_path / "cut", loader_of(), module=Validating(), **options)
    assert_equal_weights(module, expected)
    assert trainer.global_step == whole.global_step == 15
    assert trainer.optimizers[0].param_groups[0]["lr"] == whole.optimizers[0].param_groups[0]["lr"] < 0.5


@pytest.mark.parametrize("where", ["within accumulated batches", "between steps", "in validation"])
def test_a_signal_is_waited_for_until_the_step_is_over(where, tmp_path):
    class Signal(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if trainer.current_epoch == 1 and index == {"within accumulated batches": 2, "between steps": 3}.get(where):
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_start(self, trainer, module):
            if where == "in validation" and trainer.current_epoch == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    class Validating(Dropping):
        def validation_step(self, batch, index):
            self.net(batch[0])

        def val_dataloader(self):
            return loader_of(shuffle=False)

    options = {"accumulate_grad_batches": 2, "val_check_interval": 6, "every": 100}
    expected, _ = fit(tmp_path / "whole", loader_of(), module=Validating(), **options)
    with patched_signals(), pytest.raises(SystemExit) as caught:
        fit(tmp_path / "cut", loader_of(), module=Validating(), callbacks=[Signal()], **options)
    assert caught.value.code == AutoResume.EXIT_PREEMPTED
    step = 8 if where == "in validation" else 7
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [f"step-{step:08d}.ckpt"]
    module, _ = fit(tmp_path / "cut", loader_of(), module=Validating(), **options)
    assert_equal_weights(module, expected)


@contextlib.contextmanager
def patched_signals():
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    expected, _ = fit(tmp_path / "whole", loader_of())
    fit(tmp_path / "cut", loader_of(), 9)
    newest = tmp_path / "cut" / "step-00000008.ckpt"
    newest.write_bytes(newest.read_bytes()[:2000])
    (tmp_path / "cut" / f".partial-{dead_key()}.ckpt").write_text("half")
    with pytest.warns(UserWarning, match="step-00000008.ckpt CANNOT BE READ"):
        module, _ = fit(tmp_path / "cut", loader_of(), every=100)
    assert len(module.seen) == 27 - 6
    assert_equal_weights(module, expected)
    names = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert names == ["damaged-step-00000008.ckpt", "step-00000006.ckpt", "step-00000027-end.ckpt"]


def dead_key():
    """The key of a process that had this one's number before."""
    return new_key().rpartition("-")[0] + "-1"


def test_what_lives_in_the_folder_stays(tmp_path):
    """A sharded save and another run write under hidden names too, as long as their processes live."""
    other = ResumeFolder(tmp_path)
    elsewhere = "0123456789ab-00000000-1-1"  # on another machine, now
    living = [
        other.aside(other.place(8, False)),
        tmp_path / f".partial-{new_key()}",
        tmp_path / f".partial-{elsewhere}",
    ]
    dead = [tmp_path / f".partial-{dead_key()}", tmp_path / f".partial-{dead_key()}.ckpt"]
    dead.append(tmp_path / "rank-state" / f".partial-{dead_key()}")
    for path in (*living, *dead):
        path.mkdir(parents=True)
        (path / "some.file").write_text("half")
    ResumeFolder(tmp_path).create()
    assert [path.name for path in living if not (path / "some.file").exists()] == []
    assert [path.name for path in dead if path.exists()] == []
    living[0].joinpath("some.file").rename(living[0] / "weights")
    other.commit(other.place(8, False), keep=1, is_aside=True)
    assert (other.place(8, False) / "weights").exists()


def test_if_all_are_damaged_nothing_begins_anew(tmp_path):
    fit(tmp_path, loader_of(), 9)
    for path in tmp_path.iterdir():
        path.write_text("nothing")
    with pytest.raises(RuntimeError, match="must be readable; got none, down to the oldest, step-00000006"):
        fit(tmp_path, loader_of())


def test_a_run_that_has_ended_stays_ended(tmp_path):
    expected, _ = fit(tmp_path, loader_of())
    with pytest.raises(ValueError, match="Give each `fit` a folder"):
        fit(tmp_path, loader_of())
    copied = tmp_path / "copied"  # as another process would find it
    shutil.copytree(tmp_path, copied)
    module, trainer = fit(copied, loader_of())
    assert (module.seen, trainer.global_step) == ([], 27)
    assert_equal_weights(module, expected)


def test_a_run_that_a_callback_has_stopped_stays_stopped(tmp_path):
    stopping = EarlyStopping("loss", patience=0, mode="max", check_on_train_epoch_end=True)
    _, trainer = fit(tmp_path / "whole", loader_of(), callbacks=[stopping], max_epochs=10)
    assert trainer.global_step == 18
    shutil.copytree(tmp_path / "whole", tmp_path / "copied")
    module, trainer = fit(tmp_path / "copied", loader_of(), max_epochs=10)
    assert (module.seen, trainer.global_step) == ([], 18)


def test_the_users_checkpoint_is_for_the_first_start(tmp_path):
    _, trainer = fit(tmp_path / "earlier", loader_of(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "given.ckpt")
    for number in range(2):
        module = Dropping()
        trainer = trainer_for(callbacks=[AutoResume(str(tmp_path / "own"), every_n_train_steps=2)], max_epochs=3)
        if number == 0:
            trainer.callbacks.append(Interrupt(15))
            with pytest.raises(Interruption):
                trainer.fit(module, loader_of(), ckpt_path=tmp_path / "given.ckpt")
            assert len(module.seen) == 15 - 9
        else:
            trainer.fit(module, loader_of(), ckpt_path=tmp_path / "given.ckpt")
            assert len(module.seen) == 27 - 14


def test_minutes_between_checkpoints_and_how_many_are_kept(tmp_path):
    class Names(Callback):
        def __init__(self):
            self.names = set()

        def on_train_batch_end(self, *_):
            self.names |= {path.name for path in tmp_path.iterdir()}

    names = Names()
    fit(tmp_path, loader_of(), resume=AutoResume(str(tmp_path), every_n_minutes=1e-9, keep=1), callbacks=[names])
    assert len(names.names) == 26, "in each step but the last, which has one of the end"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000027-end.ckpt"]
    names.names.clear()
    fit(tmp_path / "long", loader_of(), resume=AutoResume(str(tmp_path / "long"), every_n_minutes=60.0))
    assert [path.name for path in (tmp_path / "long").iterdir()] == ["step-00000027-end.ckpt"]


def test_data_that_have_changed_are_refused(tmp_path):
    fit(tmp_path, loader_of(), 5)
    with pytest.raises(ValueError, match="must be that of the interrupted run"):
        fit(tmp_path, loader_of(length=40))


@pytest.mark.parametrize("is_same", [True, False])
def test_loaders_that_are_made_anew_in_each_epoch(is_same, tmp_path):
    class Reloading(Dropping):
        kept = None

        def train_dataloader(self):
            self.kept = self.kept if is_same and self.kept else loader_of()
            return self.kept

    options = {"reload_dataloaders_every_n_epochs": 1}
    expected, _ = fit(tmp_path / "whole", None, module=Reloading(), **options)
    assert len({str(batch) for batch in expected.seen}) == 27, "each epoch has an order of its own"
    fit(tmp_path / "cut", None, 14, module=Reloading(), **options)
    module, _ = fit(tmp_path / "cut", None, module=Reloading(), **options)
    assert_equal_weights(module, expected)
    assert module.seen == expected.seen[12:]


def test_folders_that_cannot_rename_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got s3://bucket/run. Give a folder"):
        fit(tmp_path, loader_of(), resume=AutoResume("s3://bucket/run"))


def test_the_order_is_that_of_a_distributed_sampler_for_any_number_of_replicas():
    data = Samples(length=22)
    for replicas in (1, 2, 4):
        read = []
        for rank in range(replicas):
            expected = DistributedSampler(data, replicas, rank, seed=7)
            sampler = ResumableSampler(RandomSampler(data), 7, replicas, rank)
            for epoch in (0, 3):
                expected.set_epoch(epoch)
                sampler.set_epoch(epoch)
                assert list(sampler) == list(expected)
            assert len(sampler) == len(expected)
            sampler.begin(3, skipped=8)
            read.append(list(sampler))
        together = [sample for group in zip(*read) for sample in group]
        whole = ResumableSampler(RandomSampler(data), 7)
        whole.set_epoch(3)
        assert together[:14] == list(whole)[8:]


PROMISES = {
    "shuffled": (lambda data: RandomSampler(data), LoaderFacts(22, True)),
    "ascending": (lambda data: SequentialSampler(data), LoaderFacts(22, False)),
    "own generator": (lambda data: RandomSampler(data, generator=torch.Generator()), LoaderFacts(22)),
    "own sampler": (lambda data: OwnSampler(data), LoaderFacts(22)),
    "a part": (lambda data: RandomSampler(data, num_samples=9), LoaderFacts()),
    "with replacement": (lambda data: RandomSampler(data, replacement=True), LoaderFacts(replaced=True)),
    "weighted": (lambda data: WeightedRandomSampler(torch.rand(22), 22), LoaderFacts(replaced=True)),
    "of a replica": (
        lambda data: DistributedSampler(data, 2, 0, shuffle=False, drop_last=True),
        LoaderFacts(22, False, divides=True, may_drop=1),
    ),
}


@pytest.mark.parametrize("kind", PROMISES)
def test_promises_of_a_sampler_hold_for_the_resumable_one(kind):
    make, promised = PROMISES[kind]
    data = Samples(length=22)
    for drop_last in (False, True):
        loader = DataLoader(data, 4, sampler=make(data), drop_last=drop_last)
        expected = promised._replace(may_drop=promised.may_drop + 3 * drop_last)
        assert LoaderFacts.of(loader) == expected
        added = TrainingData(0, (2, 1)).add(loader, True, lambda: loader)  # noqa: B023
        assert isinstance(added.order, ResumableSampler)
        assert LoaderFacts.of(loader) == expected._replace(divides=True)
        added.undo()


def test_promises_of_batch_samplers():
    data = Samples(length=22)
    drawn = BatchSampler(RandomSampler(data, replacement=True), 4, False)
    assert LoaderFacts.of(DataLoader(data, batch_sampler=drawn)) == LoaderFacts(replaced=True)
    of_a_replica = BatchSampler(DistributedSampler(data, 2, 1), 4, False)
    assert LoaderFacts.of(DataLoader(data, batch_sampler=of_a_replica)).divides
    loader = DataLoader(data, batch_sampler=OwnBatches(range(22), 4, False))
    before = LoaderFacts.of(loader)
    TrainingData(0, (1, 0)).add(loader, False, lambda: loader)
    assert LoaderFacts.of(loader) == before == LoaderFacts(22, False)
    assert LoaderFacts.of(DataLoader(Stream(), 4)) == LoaderFacts.of([1, 2]) == LoaderFacts()


def test_a_replica_that_reads_all_samples_goes_on_after_its_own_batches(tmp_path):
    data, loader = TrainingData(0, (2, 1)), loader_of()
    point = ResumePoint(Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), data, False)
    place = {"kind": "local", "batch_size": 4, "order": ""}
    batch = {"replicas": 2, "batch_size": 4, "accumulate": 1}
    saved = {"epoch": 0, "batches": 3, "samples": 24, "batch": batch, "first": batch, "seed": 0, "should_stop": False}
    point.restore({**saved, "loaders": [place]})
    assert point.prepare(loader, False, lambda: loader) is loader
    assert data.loaders[0].kind == "local"
    # 36 samples in batches of 4: 6 are left after 3, whatever the other replica has read.
    assert len(list(loader)) == 6


def test_samples_of_a_step_are_kept_by_others():
    batch = GlobalBatch(4, 2, 1)
    assert batch.kept_by(2, 2) == GlobalBatch(2, 2, 2)
    assert batch.kept_by(1, 8) == GlobalBatch(1, 8, 1)
    with pytest.raises(ValueError, match="together 6 samples, which does not divide 8"):
        batch.kept_by(3, 2)


def test_samples_are_watched_at_the_same_time(tmp_path):
    monitor = DataShardingMonitor(every_n_batches=3)
    fit(tmp_path, loader_of(), 14, callbacks=[monitor])
    monitor = DataShardingMonitor(every_n_batches=3)
    fit(tmp_path, loader_of(), callbacks=[monitor])
    assert monitor.report()["findings"] == []


@pytest.mark.parametrize("arguments", [{"every_n_train_steps": 0}, {"every_n_minutes": -1.0}, {"keep": 0}])
def test_numbers_that_mean_nothing_are_refused(arguments):
    with pytest.raises(ValueError, match="must be .*; got "):
        callbacks.AutoResume(**arguments)
