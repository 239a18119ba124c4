"""What the ranks of one replica read: the same batches from every loader, and no sample of a stream less."""

import copy
import multiprocessing
import os
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, seed_everything
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, random_split

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_parallel.strategies.checks import check_same_batch
from tests.harness import distributed
from tests.strategies.models import Net, Samples, loader, trainer_for
from tests.strategies.test_pipeline import Deep


class EveryStep(Net):
    def validation_step(self, batch, index, dataloader_idx=0):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch):
        self.log("test", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch, index, dataloader_idx=0):
        return self.net(batch[0])


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
@distributed(world_size=2)
def test_the_second_loader_differs_between_peers(group, method):
    loaders = [loader(), loader(2, group.rank)]
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), 2, max_epochs=1)
    module = EveryStep().double()
    if method == "test":
        loaders = loaders[1]  # without an index of the loader
    with pytest.raises(ValueError, match="must get the same batch.*on rank 1 than on rank 0"):
        trainer.fit(module, loader(), loaders) if method == "fit" else getattr(trainer, method)(module, loaders)


class Boxed:
    def __init__(self, x, y):
        self.x, self.y = x, y


@distributed(world_size=2)
def test_batches_in_objects_of_the_user_are_compared(group):
    class Opens(Net):
        def training_step(self, batch, index):
            return super().training_step((torch.from_numpy(batch.x), torch.tensor(batch.y)), index)

    boxes = [Boxed(x.numpy(), y.tolist()) for x, y in loader(2, group.rank)]
    batches = DataLoader(boxes, batch_size=None, collate_fn=lambda box: box)
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), 2, max_epochs=1)
    with pytest.raises(ValueError, match="must get the same batch"):
        trainer.fit(Opens().double(), batches)


class Locked:
    """Without a pickle, and with a reference to itself."""

    def __init__(self, x):
        self.x, self.lock, self.me = x, threading.Lock(), self


def strange(number, name):
    """Return a batch of what does not equal itself, or is another object in each process, by its number."""
    nothing = float("nan")
    pd = pytest.importorskip("pandas")
    return {
        "ages": [nothing, float(number), {"deep": (nothing, np.float64("nan"))}],
        "tensor": torch.tensor([nothing, number]),
        "array": np.array([nothing, number], dtype=object),
        "index": pd.Index([f"{name} {number}", None], dtype="str"),
        "frame": pd.DataFrame({"a": [nothing, number], "b": ["x", name]}),
        "set": {f"{name} {letter}" for letter in "abcdefgh"},
        "own": Locked(torch.tensor([nothing, number])),
        "names": [name, "".join(name)],  # one object, or two
        "function": lambda: number,
        "device": torch.device("cpu"),
    }


@distributed(world_size=2)
def test_batches_are_compared_by_bits(group):
    name = "name" if group.rank else "".join(["na", "me"])
    check_same_batch(strange(1, name), group)
    check_same_batch(copy.deepcopy(np.array([float("nan")])), group)
    for key, value in strange(1 + group.rank, "name").items():
        if key in ("set", "names", "function", "device"):
            continue
        with pytest.raises(ValueError, match="must get the same batch.*on rank 1 than on rank 0"):
            check_same_batch({key: value}, group)
    for other in (
        {"set": {"a", f"b {group.rank}"}},
        {"names": ["a"] * (1 + group.rank)},
        {"zero": (0.0, -0.0)[group.rank]},
    ):
        with pytest.raises(ValueError, match="must get the same batch"):
            check_same_batch(other, group)


class OfLength(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        data = Samples()
        yield from (data[number] for number in range(self.length))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "longer"),
    [
        (TensorParallelStrategy, "training"),
        (TensorParallelStrategy, "validation"),
        (PipelineParallelStrategy, "training"),
    ],
)
@distributed(world_size=2)
def test_loaders_of_different_lengths_are_refused_on_all(kind, longer, group):
    size = {"tensor_parallel_size" if kind is TensorParallelStrategy else "pipeline_parallel_size": 2}
    loaders = [DataLoader(OfLength(24), 8), DataLoader(OfLength(24), 8)]
    if group.rank == 0:
        loaders[longer == "validation"] = DataLoader(OfLength(32), 8)
    trainer = trainer_for(kind(**size), 2, max_epochs=2)
    module = Net().double() if kind is TensorParallelStrategy else Deep()
    places = "train.* on rank 0, .*validate" if longer == "training" else "validate.* on rank 0, .*train"
    with pytest.raises(RuntimeError, match=f"at the same place; got .*{places}.* on rank 1"):
        trainer.fit(module, *loaders)
    assert trainer.global_step == 3


class Drifting(IterableDataset):
    """Gives each rank other samples after a while."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        x, y = Samples().x, Samples().y
        yield from zip(x[:24], y[:24])
        yield from zip(x[24:] + self.rank, y[24:])


@pytest.mark.parametrize("step", ["training", "validation"])
@distributed(world_size=2)
def test_batches_that_differ_later_are_refused(step, group):
    batches = DataLoader(Drifting(group.rank), 8)
    loaders = (batches, loader()) if step == "training" else (loader(), batches)
    trainer = trainer_for(TensorParallelStrategy(tensor_parallel_size=2), 2, max_epochs=1)
    with pytest.raises(
        ValueError, match=r"must get the same batches; got other data on rank 1 than on rank 0 at a batch of epoch 0"
    ):
        trainer.fit(Net().double(), *loaders)


class GoingOn(IterableDataset):
    """Goes on where it was, as one that reads a connection does."""

    def __init__(self, is_generator):
        data = Samples()
        self.samples = [data[number] for number in range(len(data))]
        self.at = iter(self.samples) if not is_generator else (sample for sample in self.samples)

    def __iter__(self):
        yield from self.at


@pytest.mark.parametrize("is_generator", [True, False])
@distributed(world_size=2)
def test_a_stream_loses_no_samples(is_generator):
    seen = []

    class Sees(Deep):
        def on_train_batch_start(self, batch, index):
            seen.append(batch[0].clone())

    strategy = PipelineParallelStrategy(pipeline_parallel_size=2)
    trainer_for(strategy, 2, max_epochs=1).fit(Sees(), DataLoader(GoingOn(is_generator), batch_size=8))
    torch.testing.assert_close(torch.cat(seen), Samples().x)


class Shuffled(IterableDataset):
    """Draws its order from the global generator, anew in each epoch."""

    def __iter__(self):
        data = Samples()
        yield from (data[int(number)] for number in torch.randperm(len(data)))


def _epochs(strategy, devices, kind):
    order, losses = [], []

    class Watches(Deep):
        def on_train_batch_start(self, batch, index):
            order.append(batch[0][:, 0].clone())

        def on_train_epoch_end(self):
            losses.append(torch.rand(()))  # drawn by the user, between epochs

    seed_everything(11, verbose=False)
    options = {
        "global generator": {"shuffle": True},
        "own generator": {"shuffle": True, "generator": torch.Generator().manual_seed(7)},
        "sampler": {"sampler": RandomSampler(Samples(), generator=torch.Generator().manual_seed(8))},
        "workers": {"shuffle": True, "num_workers": 1, "persistent_workers": True},
        "stream": {},
    }[kind]
    data = Shuffled() if kind == "stream" else Samples()
    if kind == "workers":
        options["multiprocessing_context"] = "fork"
        multiprocessing.current_process()._config["daemon"] = False  # ranks of the harness may have no children
    short = {"max_epochs": 2, "num_sanity_val_steps": 1, "limit_val_batches": 2}
    trainer = trainer_for(strategy, devices, use_distributed_sampler=False, **short)
    trainer.fit(Watches(), DataLoader(data, batch_size=8, **options), DataLoader(Samples(), batch_size=5, shuffle=True))
    return torch.cat(order), torch.stack(losses)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("axis", "kind"),
    [
        *(("pipeline", kind) for kind in ("global generator", "own generator", "sampler", "workers", "stream")),
        ("tensor", "global generator"),
        ("tensor", "stream"),
    ],
)
@distributed(world_size=2)
def test_every_epoch_reads_what_one_process_reads(axis, kind, group):
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="1")
    expected = _epochs("auto", 1, kind)
    os.environ.update(LOCAL_RANK=str(group.rank), NODE_RANK="0", WORLD_SIZE="2")
    pipeline = axis == "pipeline"
    strategy = HybridParallelStrategy(**{f"{axis}_parallel_size": 2}, **({"num_microbatches": 2} if pipeline else {}))
    found = _epochs(strategy, 2, kind)
    assert len(expected[0]) == 64
    for mine, one in zip(found, expected):
        assert torch.equal(mine, one), (mine == one).flatten().long()


class Augmenting(Deep):
    """Mixes the samples of each batch before its steps, with numbers of the global generators and of its own."""

    def __init__(self):
        super().__init__()
        self.generator, self.drawn = np.random.default_rng(5), 0

    def on_after_batch_transfer(self, batch, index):
        x, y = batch
        self.drawn += 1
        first = self.generator.normal() if self.drawn == 1 else 0.0
        return x + (first + np.random.normal()) * x[torch.randperm(len(x))], y


class Counted(LightningDataModule):
    """Splits its data by a generator of its own, and counts how often it is asked."""

    def __init__(self):
        super().__init__()
        self.generator, self.calls, self.asked, self.known = torch.Generator().manual_seed(3), 0, [], {"sizes": None}

    def train_dataloader(self):
        self.calls += 1
        self.asked.append(self.trainer.current_epoch)
        self.known["sizes"] = self.known["sizes"] or [24, 8]
        self.last = self.calls
        data, _ = random_split(Samples(), self.known["sizes"], generator=self.generator)
        return DataLoader(data, batch_size=8)


@distributed(world_size=2)
def test_hooks_and_data_modules_draw_and_count_what_one_process_does():
    losses, asked = [], []
    for kind, size in ((lambda: "auto", 1), (PipelineParallelStrategy, 2)):
        seed_everything(11, verbose=False)
        module = Augmenting()
        trainer_for(kind(), size, max_epochs=1, limit_val_batches=0).fit(module, loader())
        other, data = Deep(), Counted()
        short = {"max_epochs": 2, "limit_val_batches": 0, "reload_dataloaders_every_n_epochs": 1}
        trainer_for(kind(), size, use_distributed_sampler=False, **short).fit(other, datamodule=data)
        losses.append([float(loss) for loss in (*module.losses, *other.losses)])
        asked.append((data.calls, data.asked, data.last, data.known))
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert asked[1] == asked[0] == (2, [0, 1], 2, {"sizes": [24, 8]})
