"""Batches of any structure and size, through the Trainer in stages: what one process computes."""

import os
import pickle
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed import distributed_c10d

from lightning_parallel import PipelineParallelStrategy, comm
from lightning_parallel.comm import RollCall, objects
from lightning_parallel.compat import patched
from lightning_parallel.tracing import Recorder, activate
from tests.harness import distributed
from tests.pipeline.other_models import Block
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep


@dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor
    names: list[str]


def named(count):
    return [f"sample {number}" for number in range(count)]


def checked(x, y, entries):
    assert len(entries) == len(x) == len(y)
    return x, y


KINDS = {
    "list": (lambda x, y: [x, y], tuple),
    "nested": (
        lambda x, y: {"in": [x, (x * 2, {"scale": 0.5})], "out": {"y": y, "path": "a/b", "flag": True}},
        lambda b: (b["in"][0] + b["in"][1][0] * b["in"][1][1]["scale"], b["out"]["y"]),
    ),
    "dataclass": (lambda x, y: Example(x, y, named(len(x))), lambda b: checked(b.x, b.y, b.names)),
    "targets": (
        lambda x, y: (x, [{"label": int(label)} for label in y]),
        lambda b: checked(b[0], torch.tensor([target["label"] for target in b[1]]), b[1]),
    ),
}


class Batches:
    """A last batch that does not divide evenly, one with fewer samples than microbatches, one with a single sample."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 4

    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        for samples in (7, 7, 3, 1):
            x = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
            yield self.make(x, torch.randint(3, (samples,), generator=generator))


class Classifier(LightningModule):
    def __init__(self, unpack):
        super().__init__()
        torch.manual_seed(1)
        self.unpack, self.losses = unpack, []
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 3)
        self.double()

    def training_step(self, batch, index):
        x, y = self.unpack(batch)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(make, unpack, strategy, devices):
    rank = comm.Group.of().rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    module = Classifier(unpack)
    trainer = trainer_for(strategy, devices, use_distributed_sampler=False)
    trainer.fit(module, Batches(make))
    return module, trainer


@distributed(world_size=2)
def test_batches_of_any_structure():
    for kind, (make, unpack) in KINDS.items():
        expected, reference = train(make, unpack, "auto", 1)
        module, trainer = train(
            make, unpack, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4, balance="uniform"), 2
        )
        torch.testing.assert_close(torch.stack(module.losses), torch.stack(expected.losses), rtol=1e-10, atol=1e-12)
        full = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            for name, tensor in expected.state_dict().items():
                torch.testing.assert_close(full[name], tensor, rtol=1e-10, atol=1e-12, msg=f"{kind}: {name}")
        torch.testing.assert_close(trainer.callback_metrics["loss"], reference.callback_metrics["loss"])


@distributed(world_size=2)
def test_batches_that_cannot_be_split():
    def make(x, y):
        return {"x": x, "y": y, "grid": torch.ones(9, 9)}

    with pytest.raises(ValueError, match="`x` has 7 and `grid` has 9"):
        train(make, lambda b: (b["x"], b["y"]), PipelineParallelStrategy(pipeline_parallel_size=2), 2)


@distributed(world_size=2)
def test_a_user_defined_split():
    def make(x, y):
        return {"x": x, "y": y, "scale": torch.full((9,), 2.0)}

    def split(batch, count):
        parts = zip(batch["x"].tensor_split(count), batch["y"].tensor_split(count))
        return [{"x": x, "y": y, "scale": batch["scale"]} for x, y in parts if len(x)]

    def unpack(batch):
        return batch["x"] * batch["scale"][0], batch["y"]

    expected, _ = train(make, unpack, "auto", 1)
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=4, split_batch=split, microbatch_weight=lambda batch: len(batch["x"])
    )
    module, _ = train(make, unpack, strategy, 2)
    torch.testing.assert_close(torch.stack(module.losses), torch.stack(expected.losses), rtol=1e-10, atol=1e-12)


class Graphs:
    """A batch of a class of its own: three nodes per sample, with as many labels in which some are left out."""

    def __init__(self, nodes, labels):
        self.store = {"nodes": nodes, "labels": labels}


class Hidden:
    def __init__(self, *values):
        self.values = lambda: values


def parts_of(make, values):
    def split(batch, count):
        return [make(*rows) for rows in zip(*(value.tensor_split(count) for value in values(batch))) if len(rows[0])]

    return split


@distributed(world_size=2)
def test_batches_of_unknown_classes_are_split_by_the_function_that_is_given():
    def values(graphs):
        return graphs.store["nodes"], graphs.store["labels"]

    def hidden(batch):
        return batch.values()

    kinds = [(Graphs, values, None), (Hidden, hidden, lambda batch: len(batch.values()[0]))]
    for make, unpack, weight in kinds:
        expected, _ = train(make, unpack, "auto", 1)
        for microbatches in (4, 1):
            strategy = PipelineParallelStrategy(
                pipeline_parallel_size=2,
                num_microbatches=microbatches,
                split_batch=parts_of(make, unpack),
                microbatch_weight=weight,
            )
            module, _ = train(make, unpack, strategy, 2)
            torch.testing.assert_close(torch.stack(module.losses), torch.stack(expected.losses), rtol=1e-10, atol=1e-12)
    # One microbatch needs no function.
    module, _ = train(make, unpack, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1), 2)
    torch.testing.assert_close(torch.stack(module.losses), torch.stack(expected.losses), rtol=1e-10, atol=1e-12)
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=4, split_batch=parts_of(Hidden, hidden)
    )
    with pytest.raises(ValueError, match="`split_batch` must have .* got a Hidden.*Give a `microbatch_weight`"):
        train(Hidden, hidden, strategy, 2)


class Counted(Callback):
    """Counts the calls of one steady step: what is pickled, the meetings in the store, and the operations by name."""

    def __init__(self):
        self.found = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        # From the end of a step to the end of the next one, in the second epoch.
        if trainer.current_epoch == 1 and index == 1:
            self.stack = ExitStack()
            for holder, name in (
                (pickle, "dumps"),
                (objects._Pickler, "dump"),
                (distributed_c10d, "_pickler"),
                (RollCall, "meet"),
            ):
                self.stack.enter_context(patched(holder, name, self.counted(name, getattr(holder, name))))
            self.recorder = self.stack.enter_context(activate(Recorder()))
        elif trainer.current_epoch == 1 and index == 2:
            self.stack.close()
            calls = Counter(span.name for span in self.recorder.spans if span.category == "communication")
            self.found.update({name: count for name, count in calls.items() if "barrier" not in name})

    def counted(self, name, original):
        def call(*args, **kwargs):
            self.found[name] = self.found.get(name, 0) + 1
            return original(*args, **kwargs)

        return call


@distributed(world_size=2)
def test_a_steady_step_meets_once_pickles_nothing_and_sends_one_message_for_each_activation(group):
    counted = Counted()
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4)
    trainer_for(strategy, 2, callbacks=[counted]).fit(Deep(), loader(batch=8))
    assert counted.found == {"meet": 1, "send": 4, "recv": 4, "all_reduce": 1}
