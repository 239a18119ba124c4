"""What steps collect in containers, count and average, and do to their batches, in a pipeline as in one process."""

import contextlib
import copy
import warnings
from array import array
from collections import Counter, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy, SelfCheckError
from lightning_parallel.compat import patched
from lightning_parallel.compat.torch import pytree
from lightning_parallel.strategies.self_check import proof
from lightning_parallel.strategies.steps.state import Snapshot
from tests.harness import distributed
from tests.pipeline.other_models import Block
from tests.strategies.models import Samples, loader, trainer_for
from tests.strategies.test_pipeline import Deep, fit

ONE_EPOCH = {"max_epochs": 1, "limit_val_batches": 2}


@dataclass
class Record:
    losses: list = field(default_factory=list)
    samples: int = 0


class Tally:
    __slots__ = ("losses", "samples")

    def __init__(self):
        self.losses = ()
        self.samples = 0

    def __call__(self, loss, count):
        self.losses += (loss,)
        self.samples += count


class Totals(NamedTuple):
    samples: int
    classes: tuple


class Collecting(Deep):
    """Collects as Lightning's tutorials do, and reads it at the end of the epoch, on every rank."""

    def __init__(self):
        super().__init__()
        self.outputs = defaultdict(list)
        self.nested = {"train": {"logits": []}}
        self.latest = deque(maxlen=3)
        self.classes = set()
        self.confusion = np.zeros((5, 5), dtype=np.int64)
        self.record = Record()
        self.labels = Counter()
        self._private = []
        self.found = []
        self.history = ()
        self.pair = ([], 0)
        self.members = frozenset()
        self.raw = bytearray()
        self.floats = array("d")
        self.tally = Tally()
        self.notes = UserDict()
        self.counts = {}
        self.share = Fraction(0)
        self.answer = "yes"

    def keep(self, logits, y, loss, loader_index):
        best = logits.argmax(-1)
        self.outputs[loader_index].append({"loss": loss.detach(), "preds": best, "labels": y})
        self.nested["train"]["logits"].append(logits.detach().numpy())
        self.latest.append(loss.item())
        self.classes.update(best.tolist())
        self.labels.update(y.tolist())
        self._private.append(loss.item())
        np.add.at(self.confusion, (y.numpy(), best.numpy()), 1)
        self.record.losses.append(loss.item())
        self.record.samples += len(y)
        self.last_logits = logits.detach()
        self.keep_anew(best, y, loss, loader_index)

    def keep_anew(self, best, y, loss, loader_index):
        """Set values that never change anew, and change containers that are no list, dict or set."""
        self.history = (*self.history, loss.item())
        self.pair[0].append(loss.item())
        self.members |= frozenset(y.tolist())
        self.recent = set(y.tolist())
        self.raw.extend(y.tolist())
        self.floats.append(loss.item())
        self.shared.append(loss.item())
        self.tally(loss.item(), len(y))
        self.notes[loader_index] = "seen"
        # Later batches keep the entries of earlier batches.
        self.counts = {**self.counts, self.global_step: y.tolist()}
        self.share += Fraction(len(y), 3)
        self.totals = Totals(len(y), tuple(best.tolist()))
        self.place = Path("kept") / str(loader_index)
        self.answer = None if self.answer == "yes" else self.answer

    def training_step(self, batch, index):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.keep(logits, batch[1], loss, "train")
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, index, dataloader_idx=0):
        logits = self(batch[0])
        self.keep(logits, batch[1], F.cross_entropy(logits, batch[1]), dataloader_idx)

    def on_validation_epoch_end(self):
        self.found.append(self.read())

    def read(self):
        found = {}
        for key, entries in self.outputs.items():
            assert len(entries) == 2
            found[f"{key} loss"] = torch.stack([entry["loss"] for entry in entries])
            for name in ("preds", "labels"):
                found[f"{key} {name}"] = torch.cat([entry[name] for entry in entries])
        self.outputs.clear()
        found["logits"] = torch.tensor(np.stack(self.nested["train"]["logits"]))
        found["latest"] = torch.tensor(list(self.latest), dtype=torch.float64)
        found["private"] = torch.tensor(self._private, dtype=torch.float64)
        found["classes"] = torch.tensor(sorted(self.classes))
        found["labels"] = torch.tensor(sorted(self.labels.items()))
        found["confusion"] = torch.tensor(self.confusion)
        found["record"] = torch.tensor([*self.record.losses, self.record.samples], dtype=torch.float64)
        found["last_logits"] = self.last_logits
        floats = (*self.history, *self.pair[0], *self.floats, *self.shared, *self.tally.losses)
        found["floats"] = torch.tensor([*floats, float(self.share)], dtype=torch.float64)
        numbers = (
            *sorted(self.members),
            *sorted(self.recent),
            *self.raw,
            self.tally.samples,
            *map(int, self.totals[1]),
        )
        found["numbers"] = torch.tensor([*numbers, self.totals.samples])
        found["counts"] = torch.tensor([[step, *labels] for step, labels in self.counts.items()])
        texts = f"{type(self.members)} {type(self.recent)} {type(self.totals)} {self.notes} {self.place} {self.answer}"
        found["texts"] = torch.tensor(list(texts.encode()))
        return found


@pytest.mark.sweep
@pytest.mark.parametrize(("verify", "schedule"), [("off", "zbv"), ("always", "1f1b")])
@distributed(world_size=2)
def test_results_in_containers(verify, schedule):
    # Each module has its own class, since the list of a class stays when a module goes.
    expected, module = (type("Sharing", (Collecting,), {"shared": []})() for _ in range(2))
    fit(expected, "auto", 1, **ONE_EPOCH)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=3, schedule=schedule, verify=verify)
    fit(module, strategy, 2, **ONE_EPOCH)
    assert len(module.found) == len(expected.found) == 1
    for mine, theirs in zip(module.found, expected.found, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-10, msg=f"{name} differs")


class Averaging(Block):
    """Updates buffers and a number of its own in each call, if asked."""

    def __init__(self, width, updates=None):
        super().__init__(width)
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.calls, self.updates = 0, updates

    def forward(self, x):
        if self.training and self.updates == "average":
            self.average.mul_(0.9).add_(0.1 * x.detach().mean())
        if self.training and self.updates == "calls":
            self.calls += 1
        return super().forward(x)


class Tracker(nn.Module):
    """Keeps what it is shown, and holds no parameters."""

    def __init__(self):
        super().__init__()
        self.values, self.shown = [], 0

    def forward(self, loss, logits):
        self.values.extend([loss.item(), 2 * loss.item()])
        self.shown += len(logits)


class Updating(Deep):
    """Counts samples, which is the same in microbatches, and changes something else with them."""

    def __init__(self, change=None):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Averaging(8, change) for _ in range(4)).double()
        self.trackers = nn.ModuleDict({"first": Tracker()})
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.counted, self.largest, self.stats, self.least = 0, -1e9, {"batches": 0, "right": 0}, []
        self.total, self.classes, self.size, self.change = np.zeros(12), 0, 0, change
        # None of the first samples counts as rare, and the first batch not as late.
        self.late, self.rare, self.shares, self.only, self.of_class = 0, 0, [], [], None

    def training_step(self, batch, index):
        x, y = batch
        self.seen += len(x)
        self.total += x.sum(0).numpy()
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.trackers["first"](loss, logits)
        self.largest = max(self.largest, logits.max().item())
        self.stats["right"] += int((logits.argmax(-1) == y).sum())
        self.classes, self.size = logits.shape[1], len(x)
        self.late += len(x) if self.global_step else 0
        is_rare = x[:, 0] > 1.2
        self.rare += int(is_rare.sum())
        self.shares.append(is_rare.double().mean())
        self.only.clear()
        self.only.append(loss.item())
        if self.of_class is None:
            self.of_class = np.zeros(2)
        self.of_class[0] += len(x)
        if callable(self.change):
            self.change(self, loss.detach())
        return {"loss": loss, "logits": logits.detach()}

    def kept(self):
        tracker = self.trackers["first"]
        kept = [self.seen, self.largest, *self.stats.values(), *self.total, *tracker.values, tracker.shown]
        kept += [self.late, self.rare, *self.shares, *self.only, *self.of_class]
        return [float(number) for number in (*kept, self.classes, self.size)]


@distributed(world_size=2)
def test_counts_of_samples():
    expected, module = Updating(), Updating()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    fit(expected, "auto", 1, **options)
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, verify="always")
    fit(module, strategy, 2, **options)
    assert module.kept() == pytest.approx(expected.kept(), rel=1e-10)


KEPT_BY_HAND = {
    "attribute `counted`": lambda self, loss: setattr(self, "counted", self.counted + 1),
    "attribute `counted` becomes 2, but keeps its value on one process": lambda self, loss: setattr(
        self, "counted", self.counted + (self.size < 4)
    ),
    "attribute `counted` keeps its value, but becomes 1 on one process": lambda self, loss: setattr(
        self, "counted", self.counted + (self.size >= 4)
    ),
    "attribute `last`": lambda self, loss: setattr(self, "last", loss.item()),
    "attribute `latest`": lambda self, loss: setattr(self, "latest", loss),
    r"attribute `stats\['batches'\]`": lambda self, loss: self.stats.update(batches=self.stats["batches"] + 1),
    "(attribute|buffer) `average`": lambda self, loss: self.average.mul_(0.9).add_(0.1 * loss),
    r"again(.|\n)*attribute `least\[0\]`": lambda self, loss: self.least.append(min([loss.item(), *self.least])),
    r"buffer `blocks\.\d\.average`": "average",
    r"buffer `blocks\.\d\.calls`": "calls",
}


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_what_microbatches_cannot_leave_is_refused():
    for named, change in KEPT_BY_HAND.items():
        strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, verify="always")
        with pytest.raises(SelfCheckError, match=named + r"(.|\n)*on_train_batch_end`(.|\n)*num_microbatches=1"):
            fit(Updating(change), strategy, 2, max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)


def has_rare(x):
    """Tell whether a batch has a rare sample: in no part of the first samples, and later in one part or in both."""
    return (x[:, 0].abs() > 1.5).any().double()


class Extremes(Deep):
    """Keeps a value that is neither a mean nor a sum over samples, or begins with it in a later batch."""

    def __init__(self, change):
        super().__init__()
        self.change, self.peaks, self.peak, self.late, self.best = change, [], 0.0, 0, 1e9

    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        found = self.change(self, batch[0], loss.detach(), index)
        return {"loss": loss, "found": torch.zeros(()) if found is None else found}

    def on_train_batch_end(self, outputs, batch, index):
        pass


LATER = "of a batch whose microbatches differ in "
REFUSED = {
    r"before the first batch(.|\n)*output `\['found'\]`": lambda self, x, loss, index: x.max(),
    r"before the first batch(.|\n)*attribute `peaks\[0\]`": lambda self, x, loss, index: self.peaks.append(
        x.max().item()
    ),
    r"before the first batch(.|\n)*attribute `peaks\[0\]` is": lambda self, x, loss, index: self.peaks.append(x.min()),
    r"before the first batch(.|\n)*attribute `peak`": lambda self, x, loss, index: setattr(self, "peak", x[:, 2].min()),
    LATER + "`self.late`": lambda self, x, loss, index: setattr(self, "late", self.late + (index > 0)),
    LATER + "`self.best`": lambda self, x, loss, index: (
        setattr(self, "best", min(self.best, loss.item())) if index else None
    ),
    # Zero in all microbatches of the first batch, as a mean or a sum would be, and one in the next batch.
    LATER + r"the result of the step at \['found'\]": lambda self, x, loss, index: has_rare(x),
    LATER + "the logged value `found`": lambda self, x, loss, index: self.log("found", has_rare(x)),
}


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_values_of_some_microbatch_are_refused_also_where_they_fit_by_chance():
    for named, change in REFUSED.items():
        strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, verify="always")
        with pytest.raises(SelfCheckError, match=named):
            fit(Extremes(change), strategy, 2, max_epochs=1, limit_train_batches=4, limit_val_batches=0)


class Remaking(Deep):
    """Sets lists, counters and shapes anew in each step, equal ones in both microbatches of some batches."""

    def __init__(self):
        super().__init__()
        self.labels, self.text, self.grown, self.window, self.counts, self.batch = [], [], [], (), Counter(), -1
        self.seen_after = []

    def training_step(self, batch, index):
        x, y = batch[0], batch[1] % 2
        loss = F.cross_entropy(self(x), y)
        self.labels = y.tolist()
        self.text = ["ab"[label] for label in y.tolist()]
        self.grown = self.grown + [int(label) for label in y if label]
        self.window = (*self.window, loss.item())
        self.counts = Counter(y.tolist())
        self.shape = x.shape
        self.batch = index
        return {"loss": loss, "logits": self.head.bias}

    def on_train_batch_end(self, outputs, batch, index):
        kept = self.labels, self.text, self.grown, dict(self.counts), self.shape, self.shape.numel(), self.batch
        self.seen_after.append(copy.deepcopy(kept))


@pytest.mark.sweep
@pytest.mark.parametrize("microbatches", [2, 4])
@distributed(world_size=2)
def test_lists_and_shapes_that_steps_set_anew(group, microbatches):
    def run(strategy, size):
        module = Remaking()
        trainer = trainer_for(strategy, size, max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0)
        trainer.fit(module, loader(batch=4))
        return module

    compared = []
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=microbatches, verify="always")
    with patched(proof, "tell", compared.append):
        module = run(strategy, 2)
    expected = run("auto", 1)
    assert module.seen_after == expected.seen_after
    assert module.window == pytest.approx(expected.window, rel=1e-10)
    assert type(module.shape) is torch.Size
    # The first comparison tells that each microbatch would set `batch`; a batch without other doubts needs no more.
    assert not any("`self.batch`" in text for text in compared), compared
    assert all("of the first batch again" in text or "whose microbatches differ" in text for text in compared[1:])


class Named(Samples):
    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index], "index": index}


class Taking(Deep):
    """Takes entries out of its batch, and puts others in."""

    def __init__(self):
        super().__init__()
        self.indices, self.figures = [], []

    def training_step(self, batch, index):
        self.indices.extend(batch.pop("index").tolist())
        batch["x"] = 2 * batch["x"]
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch.pop("y"))
        self.figures.append(loss.item())
        return {"loss": loss, "logits": logits.detach()}


@pytest.mark.parametrize("microbatches", [1, 2])
@distributed(world_size=2)
def test_batches_that_steps_take_apart(microbatches):
    found = []
    options = {"pipeline_parallel_size": 2, "num_microbatches": microbatches, "schedule": "zbv", "verify": "always"}
    for strategy, devices in (("auto", 1), (PipelineParallelStrategy(**options), 2)):
        module = Taking()
        trainer_for(strategy, devices, max_epochs=1).fit(module, DataLoader(Named(), batch_size=8))
        found.append(module)
    assert found[1].indices == found[0].indices
    assert found[1].figures == pytest.approx(found[0].figures)


class Peaks(Deep):
    """Evaluates with values that are neither means nor sums over samples, from the first batch or from a later one."""

    def __init__(self, since):
        super().__init__()
        self.since, self.peaks, self.outputs, self.count = since, [], [], 0

    def validation_step(self, batch, index):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.mean.update(loss, weight=len(x))
        self.log_dict({"val_loss": loss, "val_mean": self.mean}, sync_dist=True)
        self.outs.append(loss)
        found = logits.max() if self.since == 0 else has_rare(x)
        self.peaks.append(logits.min().item() if self.since == 0 else found.long())
        self.count += index > 1
        return {"found": found}

    def on_validation_batch_end(self, outputs, batch, index):
        self.outputs.append(outputs["found"])


@pytest.mark.sweep
@pytest.mark.parametrize("since", [0, 1])
@distributed(world_size=2)
def test_evaluation_runs_on_whole_batches_where_no_rule_holds(group, since):
    expected, module = Peaks(since), Peaks(since)
    truth = trainer_for("auto", 1, True)
    truth.validate(expected, loader(), verbose=False)
    trainer = trainer_for(PipelineParallelStrategy(num_microbatches=2, balance="uniform"), 2, True)
    with pytest.warns(UserWarning, match="runs on full batches") if group.rank == 0 else contextlib.nullcontext():
        trainer.validate(module, loader(), verbose=False)
    torch.testing.assert_close(module.peaks, expected.peaks, rtol=1e-10, atol=0)
    assert module.count == expected.count == 2
    torch.testing.assert_close(module.outputs, expected.outputs, rtol=1e-10, atol=0)
    for name, value in truth.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value, rtol=1e-10, atol=0)


class Scoring(Deep):
    """Returns flat predictions, and keeps one score per sample, some of them, or one for each batch, in lists."""

    def __init__(self, way="rows"):
        super().__init__()
        self.way, self.seen_outputs, self.scores, self.flat, self.texts = way, [], [], [], []
        self.kept = {"chosen": [], "sizes": [], "sorted": []}
        self.arrays = deque(maxlen=30)

    def validation_step(self, batch, index):
        logits = self(batch[0])
        best, top = logits.argmax(-1), logits.amax(-1)
        self.flat.append(logits.flatten())
        self.arrays.append(logits.flatten(0, 1).numpy())
        self.scores += top.tolist()
        for label, score in zip(batch[1], top):
            self.texts.append(f"{label}: {score:.3f}")
        self.kept["chosen"].extend(top[batch[1] > 1])
        self.kept["sizes"].append({"n": logits.numel(), "sum": top.sum(), "first": top[0]})
        self.kept["sorted"].extend(best.tolist())
        self.kept["sorted"].sort()
        if self.way == "whole":
            return torch.cdist(logits, logits), " ".join(self.texts)
        found = {"flat": logits.view(-1), "words": logits.repeat(1, 2).view(-1, 5), "n": logits.numel()}
        return found, [best.flatten(), (top.tolist(), logits.flatten().numpy())], list(logits), logits[batch[1] > 2]

    predict_step = validation_step

    def on_validation_batch_end(self, outputs, batch, index):
        self.seen_outputs.append(outputs)

    def on_validation_epoch_end(self):
        self.flat.clear()

    def read(self):
        return [self.scores, self.flat, list(self.arrays), self.texts, self.kept, self.seen_outputs]


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_flat_results_and_scores_of_samples_are_those_of_one_process(group):
    """By means of equal shapes they would be numbers of no sample; some were only in the last batch, unseen."""
    data = DataLoader(Samples(length=19), batch_size=5)

    def evaluated(way, strategy, devices):
        module = Scoring(way)
        trainer = trainer_for(strategy, devices, True, use_distributed_sampler=False)
        trainer.validate(module, data, verbose=False)
        found = [copy.deepcopy(module.read()), trainer.predict(module, data), module.read()]
        return pytree.tree_map_only(str, lambda text: torch.tensor([*text.encode()]), found)

    for way in ("rows", "whole"):
        expected = evaluated(way, "auto", 1)
        for microbatches in (2, 4) if way == "rows" else (2,):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = evaluated(way, PipelineParallelStrategy(num_microbatches=microbatches), 2)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
            said = [str(each.message) for each in caught if "runs on full batches" in str(each.message)]
            assert len(said) == (2 if way == "whole" and group.rank == 0 else 0), said


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_nan_that_stays_is_no_change(is_exact):
    module = nn.Module()
    module.worst = torch.tensor([1.0, float("nan")])
    snapshot = Snapshot(module, is_exact=is_exact)
    assert not snapshot.changes()
    module.worst[0] = 2
    assert snapshot.changes()
