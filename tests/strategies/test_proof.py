"""The proof: steps are compared with those of one process before their first batch."""

import copy
import dataclasses
import gc
import logging
import re
import tempfile
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy, comm
from lightning_parallel.checkpoint import Inventory
from lightning_parallel.compat import ParallelState, Patches, patched
from lightning_parallel.strategies.self_check import proof
from lightning_parallel.strategies.self_check.observed import ModuleTrace, compare
from lightning_parallel.strategies.self_check.proof import SelfCheckError
from lightning_parallel.strategies.self_check.runs import StepRuns
from lightning_parallel.strategies.whole import reference
from lightning_parallel.strategies.whole.reference import Owners, WholeModel, run_reference
from lightning_parallel.strategies.whole.skeleton import Skeleton
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Tokens(LightningModule):
    """Blocks on three tokens of 16 features, from 12 features."""

    def __init__(self, block=Mlp, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(12, 48)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(16, 5)
        self.to(dtype)

    def hidden(self, x):
        return self.embed(x.to(self.embed.weight.dtype)).view(-1, 3, 16)

    def forward(self, x):
        hidden = self.hidden(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    def training_step(self, batch, index):
        return self.loss(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def strategy(layout, **options):
    if layout == "tensor":
        return TensorParallelStrategy(tensor_parallel_size=2, **options)
    if layout == "pipeline":
        return PipelineParallelStrategy(pipeline_parallel_size=2, **options)
    axis = "data" if layout == "replicas" else "pipeline"
    return HybridParallelStrategy(**{f"{axis}_parallel_size": 2}, tensor_parallel_size=2, **options)


def fit(module, layout, verify="always", num_microbatches=None, layout_options=None, data=None, **options):
    """Train for a step; returns what was said about the self-check."""
    pipeline = {} if num_microbatches is None else {"num_microbatches": num_microbatches}
    said = []

    class Listener(logging.Handler):
        def emit(self, entry):
            said.append(entry.getMessage())

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    listener = Listener()
    logger.addHandler(listener)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            devices = 4 if layout in ("hybrid", "replicas") else 2
            made = strategy(layout, verify=verify, **pipeline, **(layout_options or {}))
            trainer = trainer_for(made, devices, True, **{"max_steps": 1, **options})
            trainer.fit(module, data or loader(), data or loader())
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    said += [str(warning.message) for warning in caught]
    words = ("Self-check", "compared", "batch normali")
    return [text for text in said if any(word in text for word in words)]


# -- steps that are right ----------------------------------------------------------------------------------------------


class Logging(Tokens):
    """Logs, returns, keeps and counts."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.seen_losses, self.samples, self.classes = [], 0, 0

    def training_step(self, batch, index):
        loss = self.loss(*batch)
        self.log("loss", loss)
        self.log("time", time.perf_counter())
        self.seen_losses.append(loss.item())
        self.samples += len(batch[0])
        self.classes = self.head.out_features
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.loss(*batch))


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_what_is_verified_is_said(group, layout):
    module = Logging()
    said = fit(module, layout, limit_val_batches=1, max_epochs=1, val_check_interval=1)
    if group.rank == 0:
        assert said[0].startswith(
            "Self-check passed on 2 samples: loss, 20 gradients, 1 logged metric and 3 "
            "attributes match a single-process run"
        )
        assert "; not compared: logged value `time`, because two single-process runs differ (" in said[0]
        assert said[1].startswith(
            "Self-check of `validation_step` passed on 2 samples: 1 logged metric matches a single-process run"
        )
    # The proof's own runs leave nothing, and what microbatches leave in attributes is that of one step.
    assert (len(module.seen_losses), module.samples, module.classes) == (1, 8, 5)


class Dropout(Tokens):
    """Dropout before, in and after the layers, and noise that the step draws itself."""

    def __init__(self, **kwargs):
        super().__init__(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True), **kwargs)

    def hidden(self, x):
        return F.dropout(super().hidden(x), 0.2, self.training)

    def loss(self, x, y):
        noise = torch.randn_like(x)
        return F.cross_entropy(F.dropout(self(x + noise), 0.1), y) + noise.pow(2).mean()


class Recurrent(Tokens):
    """A layer that keeps its parameters in a list, and a penalty on parameters read one by one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rnn = nn.LSTM(12, 12, 2, batch_first=True, dropout=0.1).to(self.head.weight.dtype)

    def forward(self, x):
        return super().forward(self.rnn(x[:, None].to(self.head.weight.dtype))[0][:, 0])


class Causal(Tokens):
    """Attention with a mask that torch hands on as a hint."""

    def __init__(self, **kwargs):
        super().__init__(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), **kwargs)

    def forward(self, x):
        hidden = self.hidden(x)
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        return self.head(hidden.mean(1))


class Checkpointed(Tokens):
    def forward(self, x):
        hidden = self.hidden(x)
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden.mean(1))


class Tied(Tokens):
    """Computes with the weights of the embedding in the head, and leaves a parameter unused."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        hidden = self.hidden(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1)) + (hidden.flatten(1) @ self.embed.weight)[:, :5]


class CheckpointedDropout(Dropout):
    """Dropout inside of what is computed again in backward."""

    def forward(self, x):
        hidden = self.hidden(x)
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
        return self.head(F.dropout(hidden, 0.1, self.training).mean(1))


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@pytest.mark.parametrize("kind", [Dropout, Recurrent, Causal, Checkpointed, CheckpointedDropout])
@distributed(world_size=2)
def test_steps_that_are_right_are_not_refused(group, layout, kind):
    said = fit(kind(), layout)
    assert group.rank > 0 or said[0].startswith("Self-check passed on 2 samples: loss"), said


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_low_precision_is_compared_in_double(group, layout, dtype):
    module = Tokens(dtype=dtype)
    said = fit(module, layout)
    assert group.rank > 0 or said[0].startswith("Self-check passed on 2 samples: loss and 20 gradients match")
    assert all(parameter.dtype == dtype for parameter in module.parameters())


@distributed(world_size=2)
def test_parameters_on_several_stages(group):
    said = fit(Tied(), "pipeline")
    assert group.rank > 0 or said[0].startswith("Self-check passed on 2 samples: loss and 20 gradients match")


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_a_run_after_the_first_knows_what_other_stages_hold(group):
    """On both axes."""
    module = Logging()
    fit(module, "hybrid", verify="off")
    said = fit(module, "hybrid")
    # The first run has set `classes`, so that the step changes two attributes.
    assert group.rank > 0 or said[0].startswith(
        "Self-check passed on 2 samples: loss, 20 gradients, 1 logged metric and 2 attributes match"
    )


class Manual(Tokens):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def objective(self, batch):
        return self.loss(*batch)

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.objective(batch))
            optimizer.step()


class Sharpness(Manual):
    """Climbs along the gradient, of the norm of the whole one, before it takes a step."""

    def training_step(self, batch, index):
        self.manual_backward(self.objective(batch))
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()
            for parameter in self.parameters():
                parameter.add_(parameter.grad, alpha=float(0.05 / norm))


@distributed(world_size=2)
def test_a_manual_step_takes_the_norm_of_full_gradients(group):
    length = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 2}
    alone, module = Sharpness(), Sharpness()
    trainer_for(devices=1, **length).fit(alone, loader(), loader())
    fit(module, "tensor", **length)
    torch.testing.assert_close(dict(module.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_compiled_submodules_are_proven(group):
    module = Tokens()
    for block in module.blocks:
        block.compile(backend="eager")
    said = fit(module, "tensor")
    assert group.rank > 0 or said[0].startswith("Self-check passed on 2 samples: loss and 20 gradients")
    listed = Tokens()
    listed.blocks = torch.nn.ModuleList(torch.compile(block, backend="eager") for block in listed.blocks)
    for compiled in (recompiled(), listed):
        with pytest.raises(
            ValueError, match=r"cannot run compiled blocks: the modules in `blocks` must be plain, but `bl"
        ):
            fit(compiled, "tensor", layout_options={"sequence_parallel": True})


def recompiled():
    module = Tokens()
    module.blocks[0].compile(backend="eager")
    return module


@distributed(world_size=2)
def test_manual_optimization(group):
    module = Manual()
    said = fit(module, "tensor")
    assert group.rank > 0 or said[0].startswith(
        "Self-check passed on 2 samples: 20 gradients match a single-process run"
    )
    assert module.trainer.global_step == 2


# -- steps that are not ------------------------------------------------------------------------------------------------


class Pieces(Manual):
    """Matches hidden features, of which each rank has a part."""

    def objective(self, batch):
        return super().objective(batch) + self.blocks[0].up(self.hidden(batch[0])).pow(2).mean()


class LogsPieces(Tokens):
    def loss(self, x, y):
        self.log("hidden", self.blocks[0].up(self.hidden(x)).abs().mean())
        return super().loss(x, y)


class RanksDiffer(Tokens):
    def loss(self, x, y):
        return super().loss(x, y) * (1 + self.global_rank)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "named"),
    [(Pieces, "gradient `embed.weight`"), (LogsPieces, "logged value `hidden` is"), (RanksDiffer, "loss is")],
)
@distributed(world_size=2)
def test_steps_that_compute_with_pieces_are_refused_on_every_rank(kind, named):
    module = kind()
    # The automatic plan would keep the layers whole, since the record shows their use.
    plan = {"tensor_plan": {"*.up": "column", "*.down": "row"}}
    with pytest.raises((SelfCheckError, RuntimeError), match=named):
        fit(module, "tensor", layout_options=plan)
    assert module.trainer.global_step == 0


class SumLoss(Tokens):
    def loss(self, x, y):
        return F.cross_entropy(self(x), y, reduction="sum")


class Contrast(Tokens):
    def loss(self, x, y):
        logits = self(x)
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def noisy(x):
    return x + 0.1 * torch.randn_like(x)


class NoisySum(SumLoss):
    def forward(self, x):
        return super().forward(noisy(x))


class Views(Contrast):
    """Two augmented views of each sample, against each other (SimCLR)."""

    def loss(self, x, y):
        features = F.normalize(self(torch.cat([noisy(x), noisy(x)])), dim=1)
        alike = features @ features.T - 9 * torch.eye(len(features))
        return F.cross_entropy(alike, torch.arange(len(features)).roll(len(x)))


class NumpyViews(Contrast):
    def forward(self, x):
        return super().forward(x + torch.from_numpy(np.random.randn(*x.shape)))


class Mixup(Tokens):
    def order(self, x):
        return torch.randperm(len(x))

    def loss(self, x, y):
        share, other = np.random.beta(1, 1), self.order(x)
        logits = self(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])


class SortedMixup(Mixup):
    def order(self, x):
        return torch.rand(len(x)).argsort()


class DrawnMask(Tokens):
    """A mean over features that are drawn, of which samples have different numbers."""

    def loss(self, x, y):
        mask = torch.rand(x.shape) < 0.3
        losses = F.cross_entropy(self(x * ~mask), y, reduction="none")
        return (losses * mask.sum(1)).sum() / mask.sum()


class OtherPadding(Tokens):
    """A mean over labels of which some are left out: not the usual label, so that it is not searched for."""

    def loss(self, x, y):
        return F.cross_entropy(self(x), y, ignore_index=0)


class Selected(Tokens):
    """A mean over samples that are chosen: as many in both microbatches of the first four, but not in later ones."""

    def loss(self, x, y):
        mask = x[:, 0] > 0
        return F.cross_entropy(self(x)[mask], y[mask]) if mask.any() else 0 * self(x).sum()


class Reduced(Tokens):
    """Reduces the losses of samples, or of some of them, in a way of its own."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def loss(self, x, y):
        return self.reduce(F.cross_entropy(self(x), y, reduction="none"))


class ReducedCheckpointed(Reduced, Checkpointed):
    """Of which no sketch can be run."""


class ReducedNoisy(Reduced):
    def loss(self, x, y):
        return super().loss(noisy(x), y)


# Those of the first samples are equal by chance: of each microbatch as many are chosen.
SELECTIONS = {
    "top half": lambda losses: losses.topk(len(losses) // 2).values.mean(),
    "over the median": lambda losses: losses[losses > losses.median()].mean(),
    "no outliers": lambda losses: losses[losses <= losses.detach().mean() + 2 * losses.detach().std()].mean(),
}


class NormedMlp(Mlp):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return super().forward(self.norm(x))


class NormedViews(Views):
    def __init__(self):
        super().__init__(block=NormedMlp)


CHANGED_BY_MICROBATCHES = (
    SumLoss,
    Contrast,
    NoisySum,
    Views,
    NumpyViews,
    Mixup,
    SortedMixup,
    DrawnMask,
    OtherPadding,
    Selected,
    NormedViews,
)


@pytest.mark.sweep
@pytest.mark.parametrize("microbatches", [4, 8])
@distributed(world_size=2)
def test_steps_that_microbatches_change_are_refused(microbatches):
    # With one sample in each, permutations are not seen, and many a weight is right by chance.
    for kind in CHANGED_BY_MICROBATCHES if microbatches == 4 else (Mixup, Selected):
        with pytest.raises(SelfCheckError, match="(?s)loss .*not a mean.*`microbatch_weight`.*num_microbatches=1"):
            fit(kind(), "pipeline", num_microbatches=microbatches)


@distributed(world_size=2)
def test_losses_of_some_samples_of_a_batch_are_refused():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(8, 12, generator=generator), torch.randint(5, (8,), generator=generator)
    data = DataLoader(TensorDataset(*samples), 8)
    kinds = [(Reduced, name) for name in SELECTIONS] + [
        (kind, "top half") for kind in (ReducedCheckpointed, ReducedNoisy)
    ]
    for kind, name in kinds:
        with pytest.raises(SelfCheckError, match="(?s)loss is .*not a mean over samples.*num_microbatches=1"):
            fit(kind(SELECTIONS[name]), "pipeline", num_microbatches=2, data=data)


@distributed(world_size=2)
def test_steps_that_microbatches_would_change_are_right_as_one(group):
    for kind in (Views, Mixup, DrawnMask, Selected, NormedViews):
        said = fit(kind(), "pipeline", num_microbatches=1)
        assert group.rank > 0 or ["passed on" in text for text in said] == [True], (kind, said)


class Noisy(Tokens):
    def loss(self, x, y):
        return super().loss(noisy(x), y)


class NoisyMlp(Mlp):
    def forward(self, x):
        return noisy(super().forward(x))


class NoisyBlocks(Tokens):
    """Which are recomputed in the backward pass."""

    def __init__(self):
        super().__init__(block=NoisyMlp)

    def forward(self, x):
        x = self.hidden(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


class Paired(Tokens):
    """Two views of each sample, of which each has a loss of its own (SimSiam)."""

    def loss(self, x, y):
        one, two = self(noisy(torch.cat([x, x]))).chunk(2)
        return -F.cosine_similarity(one, two.detach()).mean()


class Diffusion(Tokens):
    def loss(self, x, y):
        share, noise = torch.randint(100, (len(x), 1)) / 100, torch.randn_like(x)
        return F.mse_loss(self(share.sqrt() * x + (1 - share).sqrt() * noise), noise[:, :5])


class EpochMetric(Tokens):
    """A metric that is no mean over batches; only that of the epoch is logged."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(5, average="macro")

    def training_step(self, batch, index):
        logits = self(batch[0])
        self.accuracy(torch.where(batch[0][:, 0] > 0, batch[1], 0), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])


class NumpyNoise(Tokens):
    def loss(self, x, y):
        return super().loss(x + torch.from_numpy(np.random.randn(*x.shape)), y)


class SampleByItself(Tokens):
    def loss(self, x, y):
        return super().loss(torch.stack([noisy(row) for row in x]), y)


class NormedNoise(Noisy):
    def __init__(self):
        super().__init__(block=NormedMlp)


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_steps_that_draw_for_each_sample_are_verified_in_microbatches(group):
    x, y = next(iter(loader()))
    y = y.masked_fill(y == 0, -100)
    ignored = DataLoader(TensorDataset(x, y), 8)
    for kind, data in ((Noisy, ignored), (NoisyBlocks, None), (Paired, None), (Diffusion, None)):
        module = kind()
        module.blocks = module.blocks[:2]
        said = fit(module, "pipeline", num_microbatches=4, data=data)
        assert group.rank > 0 or "match a single-process run, with the same random numbers" in said[0], (kind, said)
    said = fit(EpochMetric(), "pipeline", num_microbatches=4)
    assert group.rank > 0 or said[0].startswith("Self-check passed on 4 samples: loss and 20 gradients match"), said
    # What is drawn for samples cannot be told, or statistics differ: no word of verification.
    for kind in (NumpyNoise, SampleByItself, NormedNoise):
        said = fit(kind(), "pipeline", num_microbatches=4)
        assert group.rank > 0 or said[0].startswith("Self-check passed without microbatches on 4 samples"), (kind, said)
        places = "random draws in `" if kind is SampleByItself else "random draws depends"
        assert group.rank > 0 or kind is NormedNoise or places in said[0], (kind, said)
        warned = [text for text in said if text.startswith("The model has batch normalization")]
        assert len(warned) == (group.rank == 0 and kind is NormedNoise), (kind, said)
        assert not any("passed on" in text for text in said)


@distributed(world_size=2)
def test_the_first_module_that_differs_is_named():
    module, patches = Tokens(), Patches()

    def break_it(trainer, module):
        down = module.blocks[2].down
        whole = type(down).forward
        patches.replace(type(down), "forward", lambda self, x: whole(self, x) * (1.01 if self is down else 1))

    with pytest.raises(
        SelfCheckError, match=r"(?s)first module that differs is `blocks\.2\.down`.*plan=.*'blocks\.\*\*'"
    ):
        fit(module, "tensor", callbacks=[LambdaCallback(on_train_start=break_it)])
    patches.undo()


class ByHand(Tokens):
    """Computes with a weight between calls of its blocks, or for a log only; with `differs`, otherwise in shards."""

    def __init__(self, between, differs):
        super().__init__()
        self.between = between
        self.differs = differs

    def factor(self):
        return 1.1 if self.differs and hasattr(self.blocks[0].up, "feature_rule") else 1.0

    def forward(self, x):
        hidden = self.hidden(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self.between:
            hidden = self.blocks[0](self.scaled(hidden))
        return self.head(hidden.mean(1))

    def scaled(self, hidden):
        return hidden * self.blocks[0].up.weight.detach().norm() * self.factor()

    def training_step(self, batch, index):
        if not self.between:
            self.log("norm", self.blocks[0].up.weight.detach().norm() * self.factor())
        return super().training_step(batch, index)


@distributed(world_size=2)
def test_lines_that_compute_with_shards_are_named(group):
    plan = {"blocks.*.up": "column", "blocks.*.down": "row"}
    expected = {
        False: r"outside modules, where .* in `training_step` \(test_proof.py, line \d+\)",
        True: r"`blocks\.0\.down` \(call 2 of 2\), .* made in .*`scaled` \(test_proof.py, line \d+\)",
    }
    for between, text in expected.items():
        with pytest.raises(SelfCheckError, match=text):
            fit(ByHand(between, differs=True), "tensor", layout_options={"tensor_plan": plan})
        said = fit(ByHand(between, differs=False), "tensor", layout_options={"tensor_plan": plan})
        assert group.rank > 0 or said[0].startswith("Self-check passed")


# -- what cannot be compared -------------------------------------------------------------------------------------------


class Communicating(Tokens):
    def loss(self, x, y):
        loss = super().loss(x, y)
        torch.distributed.all_reduce(loss.detach())
        return loss


@distributed(world_size=2)
def test_a_step_that_communicates_with_no_other_replica_is_proven(group):
    said = fit(Communicating(), "tensor")
    assert group.rank > 0 or said[0].startswith("Self-check passed on 2 samples: loss and 20 gradients")


@distributed(world_size=4)
def test_a_step_that_communicates_is_not_compared_and_says_so(group):
    said = fit(Communicating(), "replicas")
    if group.rank == 0:
        assert "the step communicates by itself (`torch.distributed.all_reduce`, in `loss`" in said[0]
        assert "The run continues without it; the tensor-parallel ranks agree" in said[0]
        assert not any("passed on" in text for text in said)


RUNS = [0]


class Unsteady(Tokens):
    """Reads state outside the module, which each run of the step changes."""

    def loss(self, x, y):
        RUNS[0] += 1
        return super().loss(x, y) * (1 + RUNS[0])


@distributed(world_size=2)
def test_a_loss_that_differs_from_run_to_run_is_not_called_verified(group):
    said = fit(Unsteady(), "pipeline")
    if group.rank == 0:
        assert "Self-check of `training_step` incomplete: " in said[0]
        assert not any("passed on" in text for text in said)
    # The first rank is ahead of the others by the runs that it has made alone.
    module = Unsteady()
    with pytest.raises(SelfCheckError, match="(?s)differs between tensor-parallel ranks.*state outside the module"):
        fit(module, "tensor")
    assert module.trainer.global_step == 0


class NeverAlone(Tokens):
    """Fails where one rank runs it by itself, for a reason that the exception does not tell."""

    def loss(self, x, y):
        if ParallelState.of(self).is_alone:
            raise ValueError("no answer")
        return super().loss(x, y)


@distributed(world_size=2)
def test_a_failure_of_the_self_check_is_an_error_on_all_ranks(group):
    def fail(*_):
        raise KeyError("ours")

    def fail_on_last(*args):
        if group.rank == group.size - 1:
            fail()
        return joined(*args)

    with pytest.raises(
        SelfCheckError, match="must run the step on the full model; that run failed, although the step runs in shards"
    ):
        fit(NeverAlone(), "tensor")
    joined = reference._joined
    broken = {
        "noting": patched(StepRuns, "_effects", fail),
        "fetching": patched(reference.WholeModel, "_full", fail),
        "sending": patched(reference, "_joined", fail_on_last),
        "delivering": patched(reference, "_deliver", fail),
        "comparing": patched(proof, "compare_gradients", fail if group.rank else proof.compare_gradients),
    }
    for what, patch in broken.items():
        module = Tokens()
        with patch, pytest.raises((SelfCheckError, RuntimeError, KeyError), match="ours"):
            fit(module, "tensor")
        assert module.trainer.global_step == 0, what


@distributed(world_size=2)
def test_the_argument():
    with pytest.raises(ValueError, match="`verify` must be 'auto', 'always' or 'off'; got 'no'"):
        TensorParallelStrategy(verify="no")
    assert fit(LogsPieces(), "tensor", verify="off") == []


@distributed(world_size=2)
def test_each_run_checks_itself_whatever_lies_beside_its_checkpoints(group):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    for _ in range(2):
        callback = ModelCheckpoint(folder, every_n_train_steps=1)
        said = fit(Tokens(), "tensor", "auto", callbacks=[callback], enable_checkpointing=True)
        assert group.rank > 0 or said[0].startswith("Self-check passed on 2 samples")
    assert all(path.suffix == ".ckpt" for path in folder.iterdir())


def test_numbers_that_differ_are_shown_to_differ():
    for found, expected in ((0.46005512, 0.46005498), (1.0, 1.0 + 1e-15), (3.0, 4.0)):
        (difference,) = compare("logged value", {"a": found}, {"a": expected}, 1e-16)
        one, two = re.findall(r"(?:is|but) ([\d.]+)", str(difference))
        assert one != two


# -- steps that look at what is sharded --------------------------------------------------------------------------------


class Own:
    def __init__(self, logits):
        self.logits, self.again = logits, {"logits": logits}


@dataclasses.dataclass(frozen=True)
class Record:
    logits: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    labels: torch.Tensor


class Entries(dict):
    pass


RETURNS = {
    "logits": lambda loss, logits, y: {"loss": loss, "logits": logits},
    "detached": lambda loss, logits, y: {"loss": loss, "pred": logits.detach()},
    "nested": lambda loss, logits, y: {"loss": loss, "a": [{"b": (logits, logits.softmax(-1))}]},
    "named tuple": lambda loss, logits, y: {"loss": loss, "pair": Pair(logits, y)},
    "dataclass": lambda loss, logits, y: {"loss": loss, "record": Record(logits)},
    "object": lambda loss, logits, y: {"loss": loss, "own": Own(logits)},
    "dict of its own": lambda loss, logits, y: Entries(loss=loss, logits=logits),
    "Hugging Face": lambda loss, logits, y: SequenceClassifierOutput(loss=loss, logits=logits),
    "kept": lambda loss, logits, y: loss,
}


class Returning(Tokens):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.seen, self.kept = kind, [], None

    def training_step(self, batch, index):
        logits = self(batch[0])
        if self.kind == "kept":
            self.kept = logits
        return RETURNS[self.kind](F.cross_entropy(logits, batch[1]), logits, batch[1])


class ReadsOutputs(Callback):
    """Adds up all logits that a step returned or kept, on the first rank only."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.is_global_zero:
            module.seen.append(self.total(outputs) + self.total(module.kept))

    def total(self, value):
        if isinstance(value, torch.Tensor):
            return float(value.detach().square().sum())
        if isinstance(value, (Own, Record)):
            value = vars(value)
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return sum(self.total(item) for item in items)


@pytest.mark.sweep
@pytest.mark.parametrize("verify", ["auto", "off"])
@distributed(world_size=2)
def test_what_a_step_returns_is_whole_for_who_looks_on_one_rank(group, verify):
    # Without the self-check the outputs come by the same way: a few kinds show that nothing waits for the check.
    kinds = RETURNS if verify == "auto" else ("nested", "object", "kept")
    for kind, layout in [*((kind, "tensor") for kind in kinds), ("dataclass", "pipeline")]:
        alone, module = Returning(kind), Returning(kind)
        trainer_for(devices=1, max_steps=1, callbacks=[ReadsOutputs()]).fit(alone, loader())
        said = fit(module, layout, verify, callbacks=[ReadsOutputs()])
        if group.rank == 0:
            assert module.seen == pytest.approx(alone.seen, rel=1e-12), kind
            assert verify == "off" or said[0].startswith("Self-check passed on 2 samples: loss, 20 gradients"), kind


class Weighed(Tokens):
    """Losses weighed by the norms of their gradients with respect to some tensors."""

    def terms(self, batch):
        logits = self(batch[0])
        return logits, F.cross_entropy(logits, batch[1]), logits.square().mean()

    def training_step(self, batch, index):
        logits, one, two = self.terms(batch)
        norms = [self.norm(torch.autograd.grad(loss, self.of(logits), retain_graph=True)) for loss in (one, two)]
        return one + two * (norms[0] / (norms[1] + 1e-4)).detach()

    def norm(self, gradients):
        return torch.sqrt(sum(gradient.pow(2).sum() for gradient in gradients))


class ByLastWeight(Weighed):
    def of(self, logits):
        return self.blocks[-1].down.weight

    def norm(self, gradients):
        return gradients[0].norm()


class ByAll(Weighed):
    def of(self, logits):
        return list(self.parameters())


class ByLogits(Weighed):
    def of(self, logits):
        return logits


class ByAngle(ByAll):
    def norm(self, gradients):
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        return F.cosine_similarity(flat, torch.ones_like(flat), dim=0)


class LaterByAll(ByAll):
    def training_step(self, batch, index):
        return self.loss(*batch) if index == 0 else super().training_step(batch, index)


class Projected(Weighed):
    """Gradients of two losses, of which one is made orthogonal to the other."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        parameters = list(self.parameters())
        ones, twos = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in self.terms(batch)[1:])
        share = sum((a * b).sum() for a, b in zip(ones, twos)) / sum(b.square().sum() for b in twos)
        for parameter, a, b in zip(parameters, ones, twos):
            parameter.grad = a - share * b
        self.optimizers().step()


class Clipping(Manual):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(10 * self.objective(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05))
        optimizer.step()


class Adversaries(Tokens):
    """Two optimizers that are toggled, both with clipping, as generative adversarial networks have them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 1)).double()

    def configure_optimizers(self):
        maker = [*self.embed.parameters(), *self.blocks.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(own, lr=0.1) for own in (maker, self.judge.parameters())]

    def training_step(self, batch, index):
        for optimizer, aim in zip(self.optimizers(), (1.0, 0.0)):
            self.toggle_optimizer(optimizer)
            verdict = self.judge(self(batch[0])).sigmoid()
            optimizer.zero_grad()
            self.manual_backward((verdict - aim).square().mean())
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
@distributed(world_size=2)
def test_gradients_that_a_step_asks_for_are_whole(group, options):
    kinds = [ByLastWeight, ByAll, ByLogits, ByAngle, LaterByAll, Projected, Clipping, Adversaries]
    for kind in kinds if not options else [ByAll, Clipping]:
        alone = kind()
        trainer_for(devices=1, max_steps=2).fit(alone, loader())
        # The self-check changes nothing of the steps: a kind of each way to ask shows that nothing waits for the check.
        for verify in ("auto", "off") if kind in (ByAll, LaterByAll, Clipping) and not options else ("auto",):
            module = kind()
            said = fit(module, "tensor", verify, layout_options=options, max_steps=2)
            for name, value in module.state_dict().items():
                torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-10, atol=1e-12)
            assert group.rank > 0 or verify == "off" or said[0].startswith("Self-check passed on 2 samples"), (
                kind,
                said,
            )


class FrozenCopy(Tokens):
    """The head is used by name only: its gradient is one number, expanded."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.key = copy.deepcopy(self.blocks).requires_grad_(False)

    def training_step(self, batch, index):
        hidden = self.hidden(batch[0])
        for block in self.key:
            hidden = block(hidden)
        return hidden.square().mean() + 0.0 * self.head.weight.sum()


class Moving(Tokens):
    """A copy that follows the blocks, in the step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.key = copy.deepcopy(self.blocks).requires_grad_(False)

    def training_step(self, batch, index):
        query = key = self.hidden(batch[0])
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.blocks.parameters()):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            for block in self.key:
                key = block(key)
        for block in self.blocks:
            query = block(query)
        return F.cross_entropy(self.head(query.mean(1)), batch[1]) + (query - key).square().mean()


class Elsewhere(Tokens):
    """A copy that is no submodule: made in a hook, moved in the step, called in both steps."""

    def on_fit_start(self):
        self.teacher = [AveragedModel(self, avg_fn=lambda mine, theirs, _: 0.5 * (mine + theirs)).requires_grad_(False)]

    def training_step(self, batch, index):
        for parameter in self.teacher[0].parameters():
            parameter.mul_(0.9)
        return self.loss(*batch) + (self(batch[0]) - self.teacher[0](batch[0])).square().mean()

    def on_train_batch_end(self, *_):
        self.teacher[0].update_parameters(self)

    def validation_step(self, batch, index):
        self.log("validation", F.cross_entropy(self.teacher[0](batch[0]), batch[1]))


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
@distributed(world_size=2)
def test_copies_elsewhere_are_whole_in_the_check_and_put_back(group, options):
    alone, module = Elsewhere(), Elsewhere()
    length = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 3}
    trainer_for(devices=1, **length).fit(alone, loader(), loader())
    said = fit(module, "tensor", layout_options=options, **length)
    assert len([text for text in said if "passed on 2 samples" in text]) == 2 * (group.rank == 0), said
    for mine, expected in ((module, alone), (module.teacher[0], alone.teacher[0])):
        torch.testing.assert_close(dict(mine.state_dict()), dict(expected.state_dict()), rtol=1e-10, atol=1e-12)


class Registered(Elsewhere):
    """A copy that becomes a submodule in a hook, or in the first step, and follows by its parameters."""

    def __init__(self, is_late=False, is_trained=False):
        super().__init__()
        self.is_late, self.is_trained = is_late, is_trained

    def on_fit_start(self):
        if not self.is_late:
            self.take()

    def take(self):
        self.average = copy.deepcopy(self).requires_grad_(self.is_trained)

    def training_step(self, batch, index):
        if self.is_late and index == 0 and not hasattr(self, "average"):
            self.take()
        return self.loss(*batch) + (self(batch[0]) - self.average(batch[0])).square().mean()

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for name, theirs in self.blocks.named_parameters():
                self.average.blocks.get_parameter(name).mul_(0.9).add_(theirs, alpha=0.1)

    def validation_step(self, batch, index):
        self.log("validation", F.cross_entropy(self.average(batch[0]), batch[1]))


class StateDicts(Moving):
    """The same, but the copy follows by state dicts, in which sharded tensors are gathered."""

    def training_step(self, batch, index):
        with torch.no_grad():
            for mine, theirs in zip(self.key.state_dict().values(), self.blocks.state_dict().values()):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        return self.loss(*batch)


@distributed(world_size=2)
def test_copies_that_hooks_register_are_sharded_like_their_originals(group):
    length = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 3}
    for kind, verify, options in (
        ({}, "auto", {}),
        ({"is_trained": True}, "off", {"sequence_parallel": True}),
        ({"is_late": True}, "off", {}),
    ):
        alone, module = Registered(**kind), Registered(**kind)
        trainer_for(devices=1, **length).fit(alone, loader(), loader())
        fit(module, "tensor", verify, layout_options=options, **length)
        torch.testing.assert_close(dict(module.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_a_step_that_writes_into_state_dicts(group):
    length = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 3}
    alone, module = StateDicts(), StateDicts()
    trainer_for(devices=1, **length).fit(alone, loader(), loader())
    fit(module, "tensor", **length)
    torch.testing.assert_close(dict(module.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-12)


class Caching(Tokens):
    """Masks that are made anew for a batch of another size, one of them for the first time in the first step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = -1
        self.register_buffer("mask", torch.ones(8, 3, 1, dtype=torch.float64))
        self.register_buffer("late", None)

    def hidden(self, x):
        hidden = super().hidden(x)
        if len(x) != self.size:
            self.size = len(x)
            self.mask, self.late = torch.ones(len(x), 3, 1, dtype=hidden.dtype), torch.zeros(len(x), dtype=hidden.dtype)
        return hidden * self.mask

    def validation_step(self, batch, index):
        self.log("validation", self.loss(*batch))


@distributed(world_size=2)
def test_gradients_parameters_and_buffers_of_all_kinds_travel(group):
    for kind, layout in (
        (FrozenCopy, "pipeline"),
        (FrozenCopy, "tensor"),
        (Moving, "tensor"),
        (Caching, "tensor"),
        (Caching, "pipeline"),
    ):
        alone, module = kind(), kind()
        options = {"max_epochs": 1, "val_check_interval": 1, "limit_val_batches": 1}
        trainer_for(devices=1, max_steps=1, **options).fit(alone, loader(), loader())
        said = fit(module, layout, **options)
        assert group.rank > 0 or all(
            text.startswith(("Self-check passed on", "Self-check of `validation_step` passed on")) for text in said
        ), said
        assert module.state_dict().keys() == alone.state_dict().keys()
        for name, value in module.state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-10, atol=1e-12)


# -- the whole model ---------------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_the_reference_never_holds_the_whole_model(group):
    held, left = [], []

    class Watched(WholeModel):
        def _make_room(self, kept):
            super()._make_room(kept)
            held.append(sum(value.numel() for value in self._data.values()))

    def live():
        gc.collect()
        tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor and value.is_floating_point()]
        return sum({value.data_ptr(): value.numel() for value in tensors}.values())

    def whole(runs, call, way):
        before = live()
        result = run_whole(runs, call, way)
        left.append((live() - before, sum(gradient.numel() for gradient in result.gradients.values())))
        return result

    run_whole = StepRuns.whole
    # As if one layer were a large part of a device.
    with ExitStack() as stack:
        stack.enter_context(patched(reference, "_CACHE_SHARE", 0))
        for name in ("_CHUNK_BYTES", "_CACHE_BYTES", "_ROOM_BYTES", "_SPOOLED_BYTES"):
            stack.enter_context(patched(reference, name, 1))
        stack.enter_context(patched(reference, "WholeModel", Watched))
        stack.enter_context(patched(StepRuns, "whole", whole))
        said = fit(Checkpointed(), "pipeline")
    for live_more, gradients in left:
        assert live_more < gradients / 4, "the gradients wait in a file, while the sharded step computes its own"
    if group.rank == 0:
        assert said[0].startswith("Self-check passed on 2 samples: loss and 20 gradients match")
        largest = 12 * 48
        assert max(held) <= 2 * largest, "a few tensors at a time"


@distributed(world_size=2)
def test_parameters_that_backward_fetches_again_were_not_written(group):
    trims = []
    with ExitStack() as stack:
        # A few parameters travel together. In backward the last of them come back for autograd alone.
        for name, num_bytes in {
            "_CHUNK_BYTES": 13000,
            "_CACHE_BYTES": 1,
            "_CACHE_SHARE": 0,
            "_ROOM_BYTES": 1,
            "_KEPT_FREE_BYTES": 1,
        }.items():
            stack.enter_context(patched(reference, name, num_bytes))
        stack.enter_context(patched(reference, "return_free_memory", trims.append))
        said = fit(Net(hidden=64).double(), "tensor")
    if group.rank == 0:
        assert said[0].startswith("Self-check passed on 2 samples"), said
        assert trims, "free memory goes back while the step runs"


@distributed(world_size=2)
def test_a_failure_on_the_first_rank_is_known_on_all(group):
    from lightning_parallel.comm import MeshGroups
    from lightning_parallel.mesh import Mesh

    module = nn.Sequential(nn.Linear(3, 3))
    skeleton = Skeleton(module)
    skeleton.close()
    groups = MeshGroups(Mesh(pipeline_parallel=2))
    with patched(reference, "free_memory", lambda device: (80 if group.rank == 0 else 8) << 30):
        owners = Owners(module, Inventory.of(module, {}, groups.pipeline_parallel), groups, torch.device("cpu"))
    assert owners.cache_bytes == 1 << 30, "an eighth of the smaller memory, on both ranks"

    def fail(model):
        raise KeyError("lost")

    found = run_reference(skeleton, owners, fail, double=False)
    assert (found.failure, found.blame) == ("KeyError: 'lost'", "unknown")


class _Cut(torch.autograd.Function):
    """Gives its input no gradient at all, not one of zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_an_output_without_a_gradient_is_traced_without_one():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trace = ModuleTrace(net)
    with trace.recording():
        y = net(torch.ones(1, 2))
        (_Cut.apply(y).sum() + net[0].weight.sum()).backward()
    assert set(trace.outputs) == {("0", 0), ("1", 0)}
    assert not trace.gradients
