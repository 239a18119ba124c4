"""What cannot be run in stages: one clear error on every rank, and no hang; lost ranks are named."""

import copy
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, comm
from lightning_parallel.compat.default_group import all_processes
from tests.harness import RankError, distributed, run
from tests.strategies.models import Samples, loader, trainer_for
from tests.strategies.test_pipeline import Deep, assert_same, fit


class Manual(Deep):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Deep):
    def backward(self, loss):
        loss.backward()


class Collecting(Deep):
    """What a hook collects inside a layer is on another stage."""

    def forward(self, x):
        inner = []
        handle = self.blocks[0].register_forward_hook(lambda module, args, output: inner.append(output.mean()))
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        handle.remove()
        return self.head(x) + inner[0]


class Untrunked(Deep):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity()])


class LossOfNothing(Deep):
    def training_step(self, batch, index):
        self(batch[0])


class Averaging(Deep):
    """A teacher that the step calls and updates itself; at first it equals its student, so that nothing changes."""

    def __init__(self, way="data"):
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        self.way = way

    def average(self):
        for mine, theirs in zip(self.teacher.parameters(), self.blocks.parameters()):
            if self.way == "foreach":
                torch._foreach_lerp_([mine.data], [theirs.data], 0.1)
            elif self.way == "data":
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            else:
                mine.data.lerp_(theirs.data, 0.1)

    def training_step(self, batch, index):
        if self.way != "late" or self.global_step > 2:
            self.average()
        loss = super().training_step(batch, index)["loss"]
        wanted = self.embed(batch[0]).detach()
        for block in self.teacher:
            wanted = block(wanted)
        return {"loss": loss + wanted.square().mean(), "logits": wanted}


class Bounded(Deep):
    """Keeps parameters within bounds: later stages would do so to stand-ins."""

    def training_step(self, batch, index):
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Manual, ValueError, "optimizes manually.*automatic_optimization = True.*TensorParallelStrategy"),
        (OwnBackward, ValueError, "overrides `backward`"),
        (Collecting, ValueError, "on an earlier pipeline stage"),
        (Untrunked, ValueError, "layers"),
        (LossOfNothing, ValueError, "The step must return its loss"),
        (Bounded, ValueError, "writes into the parameter `head.weight` in `training_step`.*on_train_batch_start"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@distributed(world_size=2)
def test_modules(kind, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        fit(kind(), PipelineParallelStrategy(pipeline_parallel_size=2), 2)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["data", "foreach", "lerp", "late"])
@distributed(world_size=2)
def test_a_step_that_averages_parameters(way):
    with pytest.raises(
        (ValueError, RuntimeError),
        match=r"(writes into the parameter|got a write into) `teacher\..*on_train_batch_start",
    ):
        fit(Averaging(way), PipelineParallelStrategy(pipeline_parallel_size=2, layers="blocks"), 2)


@distributed(world_size=2)
def test_a_module_compiled_as_a_whole():
    whole, inside = Deep(), Deep()
    whole.compile()
    inside.blocks = torch.compile(nn.Sequential(*inside.blocks), backend="eager")
    for module, name in ((whole, "Deep"), (inside, "blocks")):
        with pytest.raises(ValueError, match=f"`{name}` was compiled as a whole.*compile_layers=True"):
            fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"schedule": "2f2b"},
        {"num_microbatches": 0},
        {"virtual_stages": -1},
        {"num_microbatches": 2.5},
        {"layers": 3},
        {"layers": ""},
        {"balance": 4},
        {"balance": "evenly"},
        {"balance": [1.5, 2.5]},
        {"memory_limit_bytes": "10"},
        {"memory_limit_bytes": 0},
        {"split_batch": 3},
        {"split_batch": "os.path"},
        {"microbatch_weight": 3},
        {"pipeline_plan": {"version": 1}},
    ],
    ids=str,
)
def test_arguments_are_checked_at_once(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        HybridParallelStrategy(pipeline_parallel_size=2, **arguments)


class CannotBeJoined(Deep):
    """What fails on the last stage only, after the schedule has run."""

    def training_step(self, batch, index):
        return {"loss": F.cross_entropy(self(batch[0]), batch[1]), "note": lambda: None}


@distributed(world_size=2)
def test_what_cannot_be_sent_to_the_other_stages_fails_on_all():
    with pytest.raises(Exception, match="(?i)pickle|lambda"):
        fit(CannotBeJoined(), PipelineParallelStrategy(pipeline_parallel_size=2), 2)


class OddError(Exception):
    """Cannot be made from its text."""

    def __init__(self, code, where):
        super().__init__(f"code {code} in {where}")


class _Exploding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("exploded")


class Failing(Deep):
    """Fails in one stage of a step, from a batch on."""

    def __init__(self, way, step="training_step", since=0):
        super().__init__()
        self.way, self.step, self.since = way, step, since
        if way == "item":  # with a hook, the step does not run again with the parameter
            self.embed.weight.register_hook(lambda gradient: None)

    def _run(self, batch, index, step):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        if index < self.since or step != self.step:
            return loss
        if self.way == "none":
            return None
        if self.way == "item":
            return loss * self.embed.weight.sum().item()
        if self.way == "key":
            return {"a": loss}["b"]
        if self.way == "odd":
            raise OddError(3, "the loss")
        return loss

    def training_step(self, batch, index):
        return self._run(batch, index, "training_step")

    def validation_step(self, batch, index):
        return self._run(batch, index, "validation_step")

    def test_step(self, batch, index):
        return self._run(batch, index, "test_step")

    def predict_step(self, batch, index):
        return self._run(batch, index, "predict_step")

    def on_train_batch_start(self, batch, index):
        if self.way == "backward" and index == self.since:
            self.blocks[1].register_forward_hook(lambda module, given, output: _Exploding.apply(output))

    def on_train_batch_end(self, outputs, batch, index):
        pass

    def on_validation_epoch_end(self):
        pass


_FAILURES = [
    (("none", "training_step", 2), "MissingLossError", "The step must return its loss"),
    (("item", "training_step", 2), "PlaceholderError", "parameter `embed.weight`.*A loss term"),
    (("odd", "training_step", 0), "OddError", "code 3 in the loss"),
    (("key", "training_step", 1), "KeyError", "'b'"),
    (("backward", "training_step", 1), "ZeroDivisionError", "exploded"),
    (("odd", "validation_step", 1), "OddError", "code 3 in the loss"),
    (("odd", "test_step", 1), "OddError", "code 3 in the loss"),
    (("key", "predict_step", 0), "KeyError", "'b'"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "schedule",
    [{"schedule": "1f1b"}, {"schedule": "interleaved_zb", "virtual_stages": 2, "num_microbatches": 4}],
    ids=str,
)
@distributed(world_size=2, deadline_s=120)
def test_what_fails_on_one_stage_is_raised_by_all(group, schedule):
    # With several stages per rank: a failure in a forward, in a backward, and in evaluation.
    for case, kind, text in _FAILURES if schedule["schedule"] == "1f1b" else _FAILURES[1::3]:
        module = Failing(*case)
        trainer = trainer_for(PipelineParallelStrategy(pipeline_parallel_size=2, **schedule), 2, max_epochs=1)
        data = loader()
        run = {"test_step": trainer.test, "predict_step": trainer.predict}.get(case[1])
        with pytest.raises(Exception, match=f"(?s){text}") as raised:
            trainer.fit(module, data, data) if run is None else run(module, data)
        assert raised.type.__name__ == kind, case
        texts = comm.all_gather_object(str(raised.value).partition("\n(found on rank")[0], group)
        assert texts[0] == texts[1], case


class Differentiating(Deep):
    """Asks for gradients in its step."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def training_step(self, batch, index):
        if self.way == "balance":
            first, second = (F.cross_entropy(self(inputs), batch[1]) for inputs in (batch[0], batch[0].flip(1)))
            norms = [
                torch.autograd.grad(each, self.head.weight, retain_graph=True)[0].norm() for each in (first, second)
            ]
            return first + second * norms[0] / norms[1]
        x = batch[0].clone().requires_grad_()
        embedded = hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(self.head(hidden), batch[1])
        if self.way == "trained parameters":
            return loss + 0.01 * sum(p.square().sum() for p in self.parameters() if p.requires_grad)
        mine = [p for p in self.parameters() if p.requires_grad]
        inputs = {"input": [x], "embedding": [embedded], "parameters": mine, "last": [hidden]}[self.way]
        found = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        return loss + sum(gradient.square().sum() for gradient in found if gradient is not None)

    def on_train_batch_end(self, outputs, batch, index):
        pass


@distributed(world_size=2)
def test_gradients_that_would_pass_through_earlier_stages():
    for way, what in (("input", "an input"), ("embedding", "the output of `embed`"), ("parameters", "the parameter")):
        with pytest.raises(RuntimeError, match=f"asks for the gradient of {what}"):
            fit(Differentiating(way), PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1), 2)
    with pytest.raises(RuntimeError, match="The step differentiates .* by `autograd.grad` in .*test_pipeline_refusals"):
        fit(Differentiating("balance"), PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1), 2)
    for way in ("last", "trained parameters"):
        expected, module = Differentiating(way), Differentiating(way)
        fit(expected, "auto", 1)
        trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=1), 2)
        full = trainer.strategy.lightning_module_state_dict()
        for name, value in expected.state_dict().items() if trainer.is_global_zero else ():
            torch.testing.assert_close(full[name], value, rtol=1e-10, atol=1e-12)


class Leaving(Deep):
    """One rank does not come to the second step."""

    def __init__(self, leaves):
        super().__init__()
        self.leaves = leaves

    def training_step(self, batch, index):
        if self.global_rank == 1 and index == 1:
            if self.leaves:
                os._exit(3)
            time.sleep(4)
        return super().training_step(batch, index)


def _lose_a_rank(leaves):
    strategy = PipelineParallelStrategy(pipeline_parallel_size=3, num_microbatches=4, timeout=timedelta(seconds=2))
    fit(Leaving(leaves), strategy, 3, num_sanity_val_steps=0)


@pytest.mark.sweep
@pytest.mark.parametrize("leaves", [True, False], ids=["dead", "late"])
def test_a_rank_that_does_not_come_is_named_with_stage_and_action(leaves):
    with pytest.raises(RankError) as failure:
        run(_lose_a_rank, 3, deadline_s=60, leaves=leaves)
    text = str(failure.value)
    waited = "Rank 0, pipeline stage 0, waited in vain at 0B0 for 1B0 of rank 1"
    could_not_send = re.search(r"Rank 0, pipeline stage 0, could not send 0F\d to rank 1", text)
    assert waited in text or (leaves and could_not_send)  # whichever it comes to first
    assert "Rank 2, pipeline stage 2, waited in vain at 2F0 for 1F0 of rank 1" in text
    if leaves:
        assert "rank 1: died" in text
        assert "rank 1 is gone" in text


class BuiltLate(Deep):
    """Fails on one rank, before the model is built."""

    def configure_model(self):
        if self.global_rank == 1:
            raise ValueError("no such file")


def _splits_on_rank_0(batch, parts):
    if all_processes().rank() == 1:
        raise ValueError("no such key")
    return [batch]


def _infinite(batch):
    return float("inf")


def _nothing(batch, parts):
    return None


def _no_parts(batch, parts):
    return []


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (BuiltLate, {}, "no such file"),
        (Deep, {"split_batch": _splits_on_rank_0}, "no such key"),
        (Deep, {"split_batch": _nothing}, "`split_batch` must return a list"),
        (Deep, {"split_batch": _no_parts}, "`split_batch` must return a list"),
        (Deep, {"microbatch_weight": _infinite}, "positive in sum"),
    ],
    ids=["configure_model", "split_batch", "no list", "empty", "weight"],
)
@distributed(world_size=2, deadline_s=60)
def test_code_of_the_user_that_fails_on_one_rank_or_returns_nonsense(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit(kind(), PipelineParallelStrategy(pipeline_parallel_size=2, **arguments), 2, max_epochs=1)


@distributed(world_size=2, deadline_s=60)
def test_plans_that_differ_between_ranks(group):
    arguments = {"pipeline_parallel_size": 2, "num_microbatches": 2 + group.rank, "balance": "uniform"}
    with pytest.raises(ValueError, match="The pipeline plan must be the same on all ranks"):
        fit(Deep(), PipelineParallelStrategy(**arguments), 2, max_epochs=1)


class Loss(Deep):
    """Computes the loss of a batch from `loss_of`; its hooks read nothing."""

    def training_step(self, batch, index):
        return self.loss_of(*batch)

    def on_train_batch_end(self, outputs, batch, index):
        pass


class Hardest(Loss):
    def loss_of(self, x, y):
        return F.cross_entropy(self(x), y, reduction="none").topk(5).values.mean()


class EverySecond(Loss):
    def loss_of(self, x, y):
        mask = torch.arange(8) % 2 == 0
        return F.cross_entropy(self(x)[mask], y[mask])


class Normalised(Loss):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.BatchNorm1d(8)).double()

    def loss_of(self, x, y):
        return F.cross_entropy(self(x), y)


class SizedByHook(Loss):
    size = None

    def on_train_batch_start(self, batch, index):
        self.size = len(batch[0])

    def loss_of(self, x, y):
        return F.cross_entropy(self(x.view(self.size, 12)), y)


class WithClasses(Loss):
    def training_step(self, batch, index):
        if len(batch["classes"]) != 8:
            raise RuntimeError("another number of classes")
        return F.cross_entropy(self(batch["x"]), batch["y"])


class OfPairs(Loss):
    def training_step(self, batch, index):
        x, y = zip(*batch)
        return F.cross_entropy(self(torch.stack(x)), torch.stack(y))


class OfColumns(Loss):
    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(torch.stack(x)), torch.stack(y))


def split_pairs(batch, parts):
    size = -(-len(batch) // parts)
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def split_columns(batch, parts):
    count = len(batch[0])
    size = -(-count // parts)
    return [tuple(column[start : start + size] for column in batch) for start in range(0, count, size)]


def collated(kind):
    def collate(samples):
        x, y = zip(*samples)
        if kind is OfColumns:
            return x, y
        return samples if kind is OfPairs else {"x": torch.stack(x), "y": torch.stack(y), "classes": [*"abcdefgh"]}

    return DataLoader(Samples(), batch_size=8, collate_fn=collate)


def fit_loss(kind, data=None, microbatches=2, **arguments):
    strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=microbatches, **arguments)
    module = kind()
    trainer = trainer_for(strategy, 2, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    trainer.fit(module, data or loader())
    return {name: value.detach().clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


@distributed(world_size=2, deadline_s=120)
def test_what_fails_in_microbatches_only_says_so():
    whole = "num_microbatches=1"
    cases = [
        (Hardest, f"out of range.*microbatch: 4 of the 8 samples.*{whole}", 2),
        (EverySecond, f"mask.*microbatch: 4 of the 8 samples.*{whole}", 2),
        (Normalised, f"more than 1 value per channel.*one microbatch of the first batch.*{whole}", 8),
        (SizedByHook, "`on_train_batch_start` of `SizedByHook` had not run yet.*`__init__` or `setup`", 2),
    ]
    for kind, message, microbatches in cases:
        with pytest.raises((ValueError, RuntimeError, IndexError), match=f"(?s){message}"):
            fit_loss(kind, microbatches=microbatches)


@distributed(world_size=2, deadline_s=120)
def test_lists_with_an_entry_per_sample_are_named_with_functions_that_split_them(group):
    expected = fit_loss(OfPairs, collated(OfPairs), 1)
    cases = [
        (WithClasses, "list `classes` has as many entries as the batch has samples", None),
        (OfPairs, r"one entry per sample in the batch.*split_batch=split, microbatch_weight=len\)", split_pairs),
        (OfColumns, r"one entry per sample in `\[0\]` and `\[1\]`.*split_batch=split", split_columns),
    ]
    for kind, message, split in cases:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            fit_loss(kind, collated(kind))
        if split is not None:
            weight = len if kind is OfPairs else lambda batch: len(batch[0])
            found = fit_loss(kind, collated(kind), split_batch=split, microbatch_weight=weight)
            for name, value in found.items() if group.rank == 0 else ():
                torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


@distributed(world_size=2, deadline_s=60)
def test_what_is_refused_on_one_rank_before_the_ranks_have_met_is_raised_on_all(group):
    pruning = [ModelPruning("l1_unstructured", amount=0.2)] if group.rank == 1 else []
    with pytest.raises(ValueError, match="`ModelPruning` is not supported"):
        fit(Deep(), PipelineParallelStrategy(pipeline_parallel_size=2), 2, callbacks=pruning)
    module = Manual() if group.rank == 1 else Deep()
    with pytest.raises(ValueError, match="optimizes manually"):
        fit(module, PipelineParallelStrategy(pipeline_parallel_size=2), 2)


class StackingHook(Deep):
    def on_after_backward(self):
        torch.stack([p.grad.norm() for p in self.blocks[0].parameters() if p.grad is not None]).norm()


class ForeachHook(Deep):
    def on_after_backward(self):
        torch._foreach_mul_([p.grad for p in self.blocks[0].parameters() if p.grad is not None], 0.5)


class LeavingOut(Deep):
    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if self.global_step == 0 or number < 2 else x
        return self.head(x)


@distributed(world_size=2, deadline_s=120)
def test_hooks_read_gradients_of_other_stages_and_stages_raise_one_text(group):
    for kind in (StackingHook, ForeachHook):  # the gradients of a layer of another stage
        expected, module = kind(), kind()
        expected_trainer = fit(expected, "auto", 1)
        trainer = fit(module, PipelineParallelStrategy(pipeline_parallel_size=2, balance="uniform"), 2)
        assert_same(trainer, module, expected_trainer, expected)
    with pytest.raises(RuntimeError, match="`head` is called after the first layer of pipeline stage 0"):
        fit(LeavingOut(), PipelineParallelStrategy(pipeline_parallel_size=2, balance="uniform"), 2)
