"""Callbacks that keep copies and averages of the weights do on a divided model what they do on one process."""

import copy
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from lightning_parallel import PipelineParallelStrategy, TensorParallelStrategy, comm
from tests.harness import distributed
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Block, Deep

LAYOUTS = {
    "tensor": lambda: TensorParallelStrategy(tensor_parallel_size=2),
    "pipeline": lambda: PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2),
}


class Scheduled(Deep):
    """Its layers have a second name, as for `BackboneFinetuning`."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(self.embed, self.blocks)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Copies(Callback):
    """A moving average of one's own: a copy of the module, in single precision, and one of its layers."""

    def on_fit_start(self, trainer, module):
        self.copies = [copy.deepcopy(module).float(), copy.deepcopy(module.blocks)]

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_):
        for copied, original in zip(self.copies, (module, module.blocks)):
            for mine, theirs in zip(copied.parameters(), original.parameters()):
                mine.lerp_(theirs.to(mine.dtype), 0.3)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["copies"] = [copied.state_dict() for copied in self.copies]


class Saving(Callback):
    """Saves each epoch, and remembers what was saved and what validation found."""

    def __init__(self, folder):
        self.folder, self.seen = folder, {}

    def on_validation_end(self, trainer, module):
        self.seen[f"{trainer.current_epoch} val_loss"] = trainer.callback_metrics["val_loss"].clone()

    def on_train_epoch_end(self, trainer, module):
        path = self.folder / f"{trainer.current_epoch}.ckpt"
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
        held = torch.load(path, weights_only=False)
        state = held["callbacks"].get("StochasticWeightAveraging", {})
        held["average"] = [state.get(key) for key in ("n_averaged", "latest_update_epoch", "average_model_state")]
        held["rates"] = [scheduler["_last_lr"] for scheduler in held["lr_schedulers"]]
        for key in ("current_model_state", "averaging_state", "average", "copies", "optimizer_states", "rates"):
            self.seen[f"{trainer.current_epoch} {key}"] = held.get(key)
        self.seen[f"{trainer.current_epoch} state_dict"] = held["state_dict"]


def _fit(strategy, devices, averaging, folder, ckpt_path=None):
    folder.mkdir(exist_ok=True)
    saving = Saving(folder)
    copies = [] if ckpt_path else [Copies()]
    short = {"max_epochs": 3, "limit_train_batches": 2, "limit_val_batches": 1}
    trainer = trainer_for(strategy, devices, callbacks=[AVERAGING[averaging](), *copies, saving], **short)
    module = Scheduled()
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return {**saving.seen, "final": module.state_dict()}


AVERAGING = {
    "moving": lambda: callbacks.EMAWeightAveraging(decay=0.6, update_starting_at_step=2),
    "stochastic": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2),
}


# Below, the stochastic average is also taken in a pipeline. A moving average is a copy of the module, as `Copies` make.
@pytest.mark.sweep
@pytest.mark.parametrize(("layout", "averaging"), [("tensor", "stochastic"), ("pipeline", "moving")])
@distributed(world_size=2)
def test_averages_of_weights(layout, averaging, group):
    if averaging == "moving" and not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this version of Lightning has no such callback")
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    single = folder / f"single{group.rank}"
    expected = _fit("auto", 1, averaging, single)
    found = _fit(LAYOUTS[layout](), 2, averaging, folder / "divided")
    assert_same(found, expected)
    # In the middle of the averaging, in both directions.
    path = comm.broadcast_object(single / "1.ckpt", group)
    last = {key: value for key, value in expected.items() if key[0] in "2f"} | {"2 copies": None}
    assert_same(_fit(LAYOUTS[layout](), 2, averaging, folder / "resumed", path), last)
    assert_same(_fit("auto", 1, averaging, single, folder / "divided" / "1.ckpt"), last)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")


class Normalized(Deep):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(12).double()

    def forward(self, x):
        return super().forward(self.norm(x))


@distributed(world_size=2)
def test_statistics_that_a_pipeline_cannot_collect_anew(group):
    trainer = trainer_for(LAYOUTS["pipeline"](), 2, callbacks=[StochasticWeightAveraging(0.02)])
    with pytest.raises(ValueError, match="Use `WeightAveraging`, which also averages the statistics"):
        trainer.fit(Normalized(), loader())
    comm.barrier(group)


class Kept(Copies):
    """Copies once, and goes on with the copies in the next run; on the first rank, it makes one more."""

    def on_fit_start(self, trainer, module):
        if not hasattr(self, "copies"):
            super().on_fit_start(trainer, module)
            if trainer.is_global_zero:
                self.apart = copy.deepcopy(module.blocks)


def _copies_after_runs(strategy, devices, folder):
    """Return what copies are after one run and a second one, and what is saved then."""
    torch.manual_seed(0)
    seen, own, module = {}, Kept(), Deep()
    module.embed.weight.requires_grad_(False)
    for run in range(2):
        short = {"max_epochs": 1, "limit_train_batches": 2}
        trainer = trainer_for(strategy(), devices, callbacks=[own, StochasticWeightAveraging(0.02, 1)], **short)
        trainer.fit(module, loader())
        trainer.save_checkpoint(folder / "final.ckpt")
        trainer.strategy.barrier()
        held = torch.load(folder / "final.ckpt", weights_only=False)
        seen[f"{run} average"] = held["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
        seen[f"{run} saved"] = held["copies"]
        seen[f"{run} copies"] = [copy.deepcopy(copied.state_dict()) for copied in own.copies]
        seen[f"{run} trained"] = [[value.requires_grad for value in copied.parameters()] for copied in own.copies]
        seen[f"{run} outputs"] = own.copies[0](torch.ones(2, 12))
        again = copy.deepcopy(own.copies[1]).double()
        seen[f"{run} layers"] = again[0](torch.ones(2, again[0].up.in_features, dtype=torch.float64))
        seen[f"{run} classes"] = None if all(type(copied[0]) is Block for copied in (again, module.blocks)) else "other"
    return seen, own


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=2)
def test_copies_are_whole_after_a_run(layout, group):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    single = folder / f"single{group.rank}"
    single.mkdir()
    expected, _ = _copies_after_runs(lambda: "auto", 1, single)
    found, own = _copies_after_runs(LAYOUTS[layout], 2, folder)
    assert_same(found, expected)
    if group.rank == 0:
        with pytest.raises(RuntimeError, match="was made during a run.*make the copy on all ranks"):
            own.apart.state_dict()
    strategy = LAYOUTS[layout]()
    strategy.gather_after_fit = "off"
    trainer = trainer_for(strategy, 2, max_epochs=1, limit_train_batches=1, callbacks=[own := Kept()])
    trainer.fit(Deep(), loader())
    with pytest.raises(RuntimeError, match="was made during a run.*set `gather_after_fit='all'`"):
        own.copies[1].state_dict()


class Holding(Callback):
    """Refers to the Trainer, as a bound `log` does by way of the module, and copies itself."""

    def on_train_batch_end(self, trainer, module, *_):
        self.trainer, self.log = trainer, module.log
        copy.deepcopy({"callbacks": trainer.callbacks, "log": self.log})


@distributed(world_size=2)
def test_a_trainer_is_copied_and_its_groups_are_not_pickled(group):
    for layout in LAYOUTS.values():
        trainer = trainer_for(layout(), 2, max_epochs=1, limit_train_batches=1, callbacks=[Holding()])
        trainer.fit(Deep(), loader())
        copied = copy.deepcopy({"callbacks": trainer.callbacks})["callbacks"]
        held = next(callback for callback in copied if isinstance(callback, Holding))
        assert held.trainer.strategy is not trainer.strategy
        assert held.trainer.strategy.groups is trainer.strategy.groups
        with pytest.raises(TypeError, match="Do not pickle"):
            pickle.dumps(trainer.strategy.groups)


class Shadows(Callback):
    """Averages of one's own, by name or in a list, that are saved."""

    def __init__(self, make, place):
        self.make, self.place = make, place

    def on_fit_start(self, trainer, module):
        self.kept = self.make(module)

    def state_dict(self):
        return {"kept": self.kept} if self.place == "state" else {}

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if self.place == "checkpoint":
            checkpoint["kept"] = self.kept
        elif self.place == "hook":
            checkpoint["kept"] = {f"mine.{name}": 2 * p.detach() for name, p in module.named_parameters()}
        elif self.place == "numbers":
            checkpoint["kept"] = [float(p.norm()) for p in module.parameters()]


def by_name(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def in_a_list(module):
    return [p.detach().clone() for p in module.parameters()]


def whole(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=2)
def test_callbacks_save_full_tensors(group, layout):
    def run(make, place, sharded=False):
        strategy = LAYOUTS[layout]()
        strategy.checkpoint_format = "sharded" if sharded else "full"
        folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
        saves = callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        trainer = trainer_for(
            strategy,
            2,
            callbacks=[Shadows(make, place), saves],
            enable_checkpointing=True,
            max_epochs=1,
            limit_train_batches=2,
        )
        begun = Deep()
        trainer.fit(copy.deepcopy(begun), loader())
        trainer.save_checkpoint(folder / "end.ckpt")
        if sharded or group.rank:
            return
        for path in folder.glob("*.ckpt"):
            found = torch.load(path, weights_only=False)
            kept = found["callbacks"]["Shadows"]["kept"] if place == "state" else found["kept"]
            values = list(kept.values()) if isinstance(kept, dict) else kept
            parameters = found["state_dict"] if place in ("hook", "numbers") else dict(begun.named_parameters())
            expected = [parameters[name].detach() for name, _ in begun.named_parameters()]
            if place == "hook":
                expected = [2 * value for value in expected]
            if place == "numbers":
                expected = [float(value.norm()) for value in expected]
            else:
                assert {type(value) for value in values} == {torch.Tensor}
            torch.testing.assert_close(values, expected)

    run(whole, "state", sharded=True)
    run(by_name, "checkpoint", sharded=True)
    for make, place in ((in_a_list, "state"), (by_name, "checkpoint"), (whole, "checkpoint"), (whole, "hook")):
        run(make, place)
    run(whole, "numbers")
