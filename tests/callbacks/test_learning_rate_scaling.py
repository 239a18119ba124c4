"""Scaled learning rates: by replicas and accumulation only, once, with any scheduler, and after a resume."""

import tempfile
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import lr_scheduler

from lightning_parallel import (
    LARS,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    HybridParallelStrategy,
    LearningRateScaling,
    LocalSGDStrategy,
    comm,
)
from lightning_parallel.compression import Dense
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_refusals import LayerScaled


class Absolute(lr_scheduler.LRScheduler):
    """A warm-up that knows its rates by itself."""

    def get_lr(self):
        return [0.001 * (self.last_epoch + 1) for _ in self.optimizer.param_groups]


class LateFloor(lr_scheduler.LRScheduler):
    """Falls to a rate that it knows by itself, after many steps."""

    def get_lr(self):
        return [max(rate * (1 - self.last_epoch / 4000), 0.03) for rate in self.base_lrs]


SCHEDULERS = {
    "none": None,
    "one cycle": lambda one: lr_scheduler.OneCycleLR(one, max_lr=0.4, total_steps=40),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, base_lr=0.1, max_lr=0.3, step_size_up=2),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, T_max=4, eta_min=0.05),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, T_0=3, eta_min=0.05),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
    "sequential": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.CosineAnnealingLR(one, 4, eta_min=0.01)], milestones=[2]
    ),
    "chained": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(one, total_iters=2), lr_scheduler.ExponentialLR(one, gamma=0.9)]
    ),
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0, factor=0.1, min_lr=0.05),
    "absolute": Absolute,
    "late floor": LateFloor,
}


class Scheduled(Net):
    def __init__(self, kind="none", as_tensor=False):
        super().__init__(lr=0.1)
        self.kind, self.as_tensor, self.rates = kind, as_tensor, []

    def training_step(self, batch, index):
        (group,) = self.trainer.optimizers[0].param_groups
        self.rates.append(float(group["lr"]))
        return super().training_step(batch, index)

    def configure_optimizers(self):
        lr = torch.tensor(self.lr) if self.as_tensor else self.lr
        optimizer = torch.optim.Adam(self.parameters(), lr=lr, capturable=False, foreach=not self.as_tensor)
        if SCHEDULERS[self.kind] is None:
            return optimizer
        scheduler = {"scheduler": SCHEDULERS[self.kind](optimizer), "interval": "step"}
        return [optimizer], [{**scheduler, "monitor": "worse"} if self.kind == "plateau" else scheduler]


class ByHand(Scheduled):
    def on_train_batch_start(self, batch, index):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * 0.9**self.global_step


class OwnWarmUp(Scheduled):
    def optimizer_step(self, epoch, index, optimizer, closure):
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 4)


class Late(Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.01})


def rates_of_steps(module, others=(), **scaling):
    """Train with two accumulated batches; returns the rates of the optimizer's groups in each step."""
    found = []

    class Watched(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            found.append([group["lr"] for group in optimizer.param_groups])

    options = {"max_epochs": 3, "limit_train_batches": 4, "accumulate_grad_batches": 2}
    callbacks = [LearningRateScaling(**scaling)] if scaling else []
    trainer_for(callbacks=[*callbacks, *others, Watched()], **options).fit(module.double(), loader())
    return found


@pytest.mark.parametrize(
    ("make", "others"),
    [
        (OwnWarmUp, lambda: []),
        (Net, lambda: [Late()]),
        (Scheduled, lambda: [StochasticWeightAveraging(0.01, 1)]),
    ],
)
def test_rates_that_are_set_between_steps_are_multiplied(make, others):
    plain = rates_of_steps(make(), others())
    scaled = rates_of_steps(make(), others(), base_replicas=1)
    assert len(plain[-1]) == (2 if make is Net else 1)
    assert scaled == [[2 * rate for rate in step] for step in plain]


@pytest.mark.parametrize("ramp_steps", [0, 3])
def test_rates_that_are_set_within_a_step_are_told(ramp_steps):
    """They are used as they are, whatever was printed at the start."""
    plain = rates_of_steps(ByHand())
    with pytest.warns(UserWarning, match="was set to .* not multiplied") as told:
        scaled = rates_of_steps(ByHand(), base_replicas=1, ramp_steps=ramp_steps)
    assert sum("LearningRateScaling" in str(one.message) for one in told) == 1
    assert scaled == plain


def test_a_rate_that_follows_from_the_present_one_is_multiplied_once():
    class Decayed(Scheduled):
        def training_step(self, batch, index):
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
            return super().training_step(batch, index)

    plain = rates_of_steps(Decayed())
    with pytest.warns(UserWarning, match="compute them from the present rates"):
        scaled = rates_of_steps(Decayed(), base_replicas=1)
    assert scaled == [[2 * rate for rate in step] for step in plain]


def test_groups_that_share_a_rate():
    class Shared(Scheduled):
        seen: ClassVar[list[float]] = []

        def configure_optimizers(self):
            rate, (first, *rest) = torch.tensor(0.1), self.parameters()
            groups = [{"params": [first], "lr": rate}, {"params": rest, "lr": rate}]
            return torch.optim.Adam(groups, foreach=False)

        def training_step(self, batch, index):
            self.seen.append(float(self.trainer.optimizers[0].param_groups[1]["lr"]))
            return Net.training_step(self, batch, index)

    module = Shared().double()
    trainer_for(callbacks=[LearningRateScaling(base_batch_size=4)], limit_train_batches=2, max_epochs=1).fit(
        module, loader()
    )
    assert module.seen == pytest.approx([0.2, 0.2])
    assert float(module.trainer.optimizers[0].param_groups[1]["lr"]) == pytest.approx(0.1)


def test_a_checkpoint_within_a_step_has_plain_rates(tmp_path):
    class Saving(Scheduled):
        def training_step(self, batch, index):
            self.trainer.save_checkpoint(tmp_path / "within.ckpt")
            return super().training_step(batch, index)

    module = Saving().double()
    rates = rates_of_steps(module, base_replicas=1)
    assert rates == [[0.2]] * 6
    (state,) = torch.load(tmp_path / "within.ckpt", weights_only=True)["optimizer_states"]
    assert state["param_groups"][0]["lr"] == 0.1


def test_a_schedule_that_is_a_method():
    class Own(Scheduled):
        def decayed(self, step):
            return 0.9**step

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [lr_scheduler.LambdaLR(optimizer, self.decayed)]

    module = Own().double()
    trainer_for(callbacks=[LearningRateScaling(base_batch_size=4)], limit_train_batches=1).fit(module, loader())
    assert module.rates == pytest.approx([0.2, 0.18])


def test_an_epoch_that_ends_early_in_warm_up():
    class Ending(Scheduled):
        def on_train_batch_start(self, batch, index):
            return -1 if index == 2 else None

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.5)]

    rates = []
    for callbacks in ([], [LearningRateScaling(base_batch_size=4, ramp_steps=4)]):
        module = Ending().double()
        trainer_for(callbacks=callbacks, max_epochs=3).fit(module, loader())
        rates.append(module.rates)
    assert rates[1] == pytest.approx([rate * line for rate, line in zip(rates[0], [1.0, 1.25, 1.5, 1.75, 2.0, 2.0])])


class Worse(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        trainer.callback_metrics["worse"] = torch.tensor(float(trainer.global_step))


def train(kind="none", callbacks=(), strategy="auto", devices=1, ckpt_path=None, save=None, as_tensor=False, **options):
    """Train; returns the rate of each batch, as the training step sees it."""
    module = Scheduled(kind, as_tensor).double()
    options = {"max_epochs": -1, "max_steps": 8, "limit_train_batches": 4, "use_distributed_sampler": False, **options}
    trainer = trainer_for(strategy, devices, callbacks=[*callbacks, Worse()], **options)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.rates


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_all_that_a_scheduler_does_is_multiplied(kind):
    plain = train(kind, accumulate_grad_batches=2, max_steps=4)
    scaling, as_tensor = [LearningRateScaling(base_batch_size=4)], kind == "none"
    scaled = train(kind, scaling, accumulate_grad_batches=2, max_steps=4, as_tensor=as_tensor)
    assert scaled == pytest.approx([4 * rate for rate in plain], rel=1e-6)


def test_what_would_be_scaled_wrongly_is_refused():
    scaling = LearningRateScaling(base_replicas=2)
    with pytest.raises(ValueError, match="remove one of them"):
        train(callbacks=[scaling, LearningRateFinder()])
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        train(callbacks=[scaling, LearningRateScaling()])
    for wrong in ({"rule": "cubic"}, {"base_batch_size": 8, "base_replicas": 1}, {"ramp_steps": -1}):
        with pytest.raises(ValueError, match="; got "):
            LearningRateScaling(**wrong)


def test_an_optimizer_of_an_earlier_fit_and_accumulation_that_changes():
    class Kept(Scheduled):
        def configure_optimizers(self):
            self.kept = getattr(self, "kept", None) or torch.optim.SGD(self.parameters(), lr=0.1)
            return self.kept

    module = Kept().double()
    for _ in range(2):
        callbacks = [LearningRateScaling(rule="sqrt"), GradientAccumulationScheduler({0: 1, 1: 4})]
        trainer_for(callbacks=callbacks, limit_train_batches=4).fit(module, loader())
    assert module.rates == pytest.approx([*[0.1] * 4, *[0.2] * 4] * 2)


@distributed(world_size=2)
def test_replicas_and_a_resume_among_others(group):
    """Two replicas, then one process, then two again; with a warm-up in which the first run is interrupted."""
    path = comm.broadcast_object(tempfile.mkdtemp(), group)
    warm = lambda: [LearningRateScaling(ramp_steps=4)]  # noqa: E731
    whole = train("cosine", warm(), DDPStrategy(), 2)
    plain = train("cosine", (), DDPStrategy(), 2)
    line = [1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 2.0, 2.0]
    assert whole == pytest.approx([rate * factor for rate, factor in zip(plain, line)])
    first = train("cosine", warm(), DDPStrategy(), 2, max_steps=2, save=f"{path}/2.ckpt")
    rest = train("cosine", warm(), DDPStrategy(), 2, f"{path}/2.ckpt")
    assert first + rest == whole  # to the bit
    # Ranks of one replica do not count; local steps are of one replica's samples.
    assert train(callbacks=warm(), strategy=HybridParallelStrategy(tensor_parallel_size=2), devices=2) == [0.1] * 8
    assert train(callbacks=[LearningRateScaling()], strategy=LocalSGDStrategy(4), devices=2) == [0.1] * 8
    # Mesh strategies read checkpoints of others: one replica goes on with the rates for one.
    tensor = HybridParallelStrategy(tensor_parallel_size=2)
    assert train("cosine", warm(), tensor, 2, f"{path}/2.ckpt") == pytest.approx(plain[2:])
    # A checkpoint without the callback has rates for one replica.
    train("cosine", (), DDPStrategy(), 2, max_steps=2, save=f"{path}/plain.ckpt")
    found = train("cosine", [LearningRateScaling()], DDPStrategy(), 2, f"{path}/plain.ckpt")
    assert found == pytest.approx([2 * rate for rate in plain[2:]])


@pytest.mark.sweep
@pytest.mark.parametrize("make", [CompressedFSDPStrategy, CompressedDeepSpeedStrategy])
@distributed(world_size=2)
def test_sharded_strategies(make, group):
    """DeepSpeed wraps optimizers; both flatten parameters, whose norms nobody knows."""
    options = {"stage": 1} if make is CompressedDeepSpeedStrategy else {}
    seen = []

    def final(lr, *callbacks):
        class Watched(Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, index):
                seen.append(trainer.optimizers[0].param_groups[0]["lr"])

        class Simple(Net):
            def configure_optimizers(self):
                optimizer = torch.optim.SGD(self.trainer.model.parameters(), lr=lr)
                return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        module = Simple()
        trainer = trainer_for(make(Dense(), **options), 2, callbacks=[*callbacks, Watched()], limit_train_batches=2)
        trainer.fit(module, loader(2, group.rank, dtype=torch.float32))
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    torch.testing.assert_close(final(0.05, LearningRateScaling()), final(0.1), rtol=0.0, atol=1e-7)
    # The scheduler steps before the hook, where rates are plain.
    assert seen == pytest.approx([0.05, 0.025, 0.025, 0.0125, 0.1, 0.05, 0.05, 0.025])

    for kind in (LARS, LayerScaled):

        class Large(Net):
            def configure_optimizers(self, kind=kind):
                return kind(self.trainer.model.parameters(), lr=0.1)

        trainer = trainer_for(make(Dense(), **options), 2)
        with pytest.raises(ValueError, match="has flattened them|flattens parameters and gives each rank a part"):
            trainer.fit(Large(), loader(2, group.rank, dtype=torch.float32))
