"""What a step of a pipeline leaves out for the sake of devices: casts, copies of outputs, waits at its end."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback, TQDMProgressBar
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel import HybridParallelStrategy, PipelineParallelStrategy
from lightning_parallel.strategies.checks import output_is_read
from tests.harness import distributed, recorded_communication
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep, assert_same, fit

STAGES = {"num_microbatches": 4, "gather_after_fit": "off"}


class Casts(TorchDispatchMode):
    """Counts casts of parameters."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        return func(*args, **(kwargs or {}))


class CountCasts(Callback):
    def __init__(self):
        self.counts = []

    def on_train_batch_start(self, *args):
        self.mode = Casts().__enter__()

    def on_before_backward(self, *args):
        self.mode.__exit__(None, None, None)
        self.counts.append(self.mode.count)


@distributed(world_size=2)
def test_a_parameter_is_cast_once_in_a_step(group):
    seen = {}
    for microbatches in (1, 4):
        counter = CountCasts()
        strategy = PipelineParallelStrategy(num_microbatches=microbatches, gather_after_fit="off", balance="uniform")
        trainer = trainer_for(strategy, 2, precision="bf16-mixed", max_epochs=1, callbacks=[counter])
        module = Deep().float()
        trainer.fit(module, loader(dtype=torch.float32))
        seen[microbatches] = counter.counts[-1], [loss.item() for loss in module.losses]
    assert seen[4][0] == seen[1][0] > 0, f"{seen}"
    torch.testing.assert_close(seen[4][1], seen[1][1], rtol=2e-2, atol=2e-2)


class Counts(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.count = batch_idx


@pytest.mark.parametrize(
    ("callback", "is_read"),
    [
        (None, False),
        (TQDMProgressBar(), False),
        (Counts(), True),
        (LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: print(outputs)), True),
    ],
)
def test_who_reads_what_a_step_returns(callback, is_read):
    module = LightningModule()
    module.trainer = trainer_for(callbacks=[] if callback is None else [callback], enable_progress_bar=True)
    assert output_is_read(module, "training_step") == is_read
    assert not output_is_read(module, "validation_step")
    assert output_is_read(module, "predict_step")
    module.on_validation_batch_end = lambda outputs, batch, batch_idx: outputs.sum()
    assert output_is_read(module, "validation_step")


class Returns(Deep):
    """Returns much, in training and in evaluation."""

    def training_step(self, batch, index):
        output = super().training_step(batch, index)
        return {**output, "states": torch.ones(len(batch[0]), 1 << 14, dtype=torch.float64)}

    def validation_step(self, batch, index):
        super().validation_step(batch, index)
        return torch.ones(len(batch[0]), 1 << 14, dtype=torch.float64)

    # The hook of `Deep` would count as a reader.
    on_train_batch_end = LightningModule.on_train_batch_end


class Keeps(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.states = outputs["states"]


@distributed(world_size=2)
def test_outputs_are_brought_to_all_ranks_only_where_somebody_reads_them(group):
    sent = {}
    for asks in (True, False):
        keeper = Keeps()
        module = Returns()
        trainer = trainer_for(
            PipelineParallelStrategy(**STAGES), 2, max_epochs=1, limit_train_batches=2, callbacks=[keeper] * asks
        )
        with recorded_communication() as records:
            trainer.fit(module, loader(), loader())
        sent[asks] = sum(record.bytes for record in records if record.op == "broadcast")
        if asks:
            assert keeper.states.shape == (8, 1 << 14)
            assert (keeper.states == 1).all()
        assert len(module.losses) == 2
    assert sent[True] >= 2 * 8 * (1 << 14) * 8, "as tensors, and not pickled"
    assert sent[False] < 1 << 14


class SeesBuckets(Deep):
    """Notes how many buckets are being reduced before `backward`."""

    def __init__(self):
        super().__init__()
        self.buckets = []

    def on_before_backward(self, loss):
        reducer = self.trainer.strategy.run.reducer
        self.buckets.append((sum(bucket.launched for bucket in reducer._buckets), len(reducer._buckets)))


@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "batches"), [("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 1), ("1f1b", 2)])
@distributed(world_size=4)
def test_replicas_reduce_gradients_while_the_last_backwards_run(group, schedule, batches):
    strategy = HybridParallelStrategy(
        pipeline_parallel_size=2, data_parallel_size=2, num_microbatches=2, schedule=schedule, gather_after_fit="off"
    )
    module = SeesBuckets()
    trainer = trainer_for(strategy, 4, max_epochs=1, limit_train_batches=2, accumulate_grad_batches=batches)
    trainer.fit(module, loader(2, group.rank // 2))
    # Of two batches the first only accumulates; the sum of both is reduced after `training_step`.
    assert module.buckets
    assert all(launched == (total if batches == 1 else 0) for launched, total in module.buckets), module.buckets
    assert strategy.run.reducer is None or strategy.run.reducer._next == 0


class NeverZero(Deep):
    """Adds the gradients of all steps."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


@distributed(world_size=4)
def test_gradients_that_are_added_to_after_their_reduction_began_are_reduced_again(group):
    expected = NeverZero()
    single = fit(expected, "auto", 1)
    module = NeverZero()
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, data_parallel_size=2, num_microbatches=2)
    assert_same(fit(module, strategy, 4, 2), module, single, expected)
