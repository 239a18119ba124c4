"""A run goes on with another number of processes: the same samples in each step, or other learning rates."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import BatchSampler, SequentialSampler

from lightning_parallel import AutoResume, HybridParallelStrategy, LearningRateScaling
from tests.callbacks.test_auto_resume import DeepDropping, fit, loader_of
from tests.harness import RankError, run

STRATEGIES = {
    "tensor": lambda: HybridParallelStrategy(tensor_parallel_size=2),
    "pipeline": lambda: HybridParallelStrategy(pipeline_parallel_size=2, balance="uniform"),
    "sharded hybrid": lambda: HybridParallelStrategy(
        tensor_parallel_size=2, pipeline_parallel_size=2, balance="uniform", checkpoint_format="sharded"
    ),
    "sharded": lambda: HybridParallelStrategy(checkpoint_format="sharded"),
    "ddp": DDPStrategy,
    "one": lambda: "auto",
}


class Rates(Callback):
    def __init__(self):
        self.rates, self.accumulated, self.batches = [], 0, []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.accumulated = trainer.accumulate_grad_batches
        self.batches.append(trainer.fit_loop.total_batch_idx)


def _train(
    strategy, folder, batch_size, accumulate=1, interrupt=None, rescale=False, loader=None, scaling=(), **options
):
    """Train on these ranks; returns what the first of them has in the end."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    resume, rates = AutoResume(str(folder), every_n_train_steps=2, rescale_learning_rate=rescale), Rates()
    module, trainer = fit(
        folder,
        (loader or loader_of)(batch_size, 32),
        interrupt,
        STRATEGIES[strategy](),
        world,
        DeepDropping(dropout=0.0),
        resume=resume,
        accumulate_grad_batches=accumulate,
        callbacks=[rates, *(LearningRateScaling() for _ in scaling)],
        **options,
    )
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return weights, trainer.global_step, rates.accumulated, rates.rates, module.seen


def _batches_of_sampler(batch_size, length):
    order = SequentialSampler(range(length))
    return loader_of(1, length, batch_sampler=type("Own", (BatchSampler,), {})(order, batch_size, False), shuffle=False)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("attempts", "accumulated"),
    [
        ([("tensor", 2, 4, 2), ("tensor", 4, 4, 2), ("one", 1, 4, 2)], 2),
        ([("ddp", 2, 4, 1), ("pipeline", 4, 2, 1)], 2),
        ([("sharded hybrid", 4, 4, 2), ("sharded", 2, 4, 2), ("sharded", 1, 4, 2)], 2),
    ],
)
def test_the_samples_of_a_step_stay_the_same(attempts, accumulated, tmp_path):
    expected, steps, *_ = _train("one", tmp_path / "whole", 8)
    for number, (strategy, world, batch_size, accumulate) in enumerate(attempts):
        interrupt = None if number == len(attempts) - 1 else 5 + 2 * number
        arguments = {"strategy": strategy, "folder": tmp_path / "cut", "batch_size": batch_size}
        arguments |= {"accumulate": accumulate, "interrupt": interrupt}
        # A mesh of one process starts a process group, too.
        found = _train(**arguments) if strategy == "one" else run(_train, world, **arguments)[0]
    weights, reached, last, *_ = found
    assert (reached, last) == (steps, accumulated)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_what_does_not_divide_is_refused_or_scaled(tmp_path):
    run(_train, 4, strategy="ddp", folder=tmp_path, batch_size=2, interrupt=5)
    with pytest.raises(ValueError, match="must have 8 samples, .*.4 replicas x batches of 2 x 1 accumulated.; got 1"):
        _train("one", tmp_path, 3)
    *_, rates, _ = _train("one", tmp_path, 4, rescale=True)
    # After four steps of a rate that falls by 3 % in each: half of it, with half of the samples.
    assert rates[0] == pytest.approx(0.5 * 0.02 * 0.97**4, rel=1e-12)
    assert rates[1] == pytest.approx(0.5 * 0.02 * 0.97**5, rel=1e-12)


def test_learning_rates_are_scaled_by_one_callback(tmp_path):
    """Two replicas have twice the rate; one goes on with the rate for one, which `AutoResume` leaves as it is."""
    options = {"folder": tmp_path, "batch_size": 4, "rescale": True, "scaling": (1,)}
    *_, rates, _ = run(_train, 2, strategy="ddp", interrupt=5, **options)[0]
    assert rates[:2] == pytest.approx([2 * 0.02, 2 * 0.02 * 0.97])
    *_, rates, _ = _train("one", **options)
    assert rates[0] == pytest.approx(0.02 * 0.97**4, rel=1e-12)


def test_batches_of_a_batch_sampler_cannot_be_divided_anew(tmp_path):
    options = {"strategy": "ddp", "folder": tmp_path, "batch_size": 2, "loader": _batches_of_sampler}
    run(_train, 2, **options, interrupt=5)
    with pytest.raises(ValueError, match="The interrupted run had 2 replicas, and this run has 1"):
        _train(**options | {"strategy": "one"})
    with pytest.raises(RankError, match="training data must be read by .'batches'., as in the interrupted run; got"):
        run(_train, 2, **options | {"loader": None})
