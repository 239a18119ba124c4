"""Callbacks that keep copies and averages of the weights do on a divided model what they do on one process."""

import copy
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
from tests.strategies.test_pipeline import Deep

LAYOUTS = {
    "tensor": lambda: TensorParallelStrategy(tensor_parallel_size=2),
    "pipeline": lambda: PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2),
}


class Scheduled(Deep):
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
        self.folder, self.seen = folder, []

    def on_validation_end(self, trainer, module):
        self.seen.append(trainer.callback_metrics["val_loss"].clone())

    def on_train_epoch_end(self, trainer, module):
        path = self.folder / f"{trainer.current_epoch}.ckpt"
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
        held = torch.load(path, weights_only=False)
        kept = ("state_dict", "current_model_state", "averaging_state", "copies", "optimizer_states", "lr_schedulers")
        self.seen.append([held[key] for key in kept if key in held])
        self.seen.append(held["callbacks"].get("StochasticWeightAveraging"))


def _fit(strategy, devices, averaging, folder, ckpt_path=None):
    folder.mkdir(exist_ok=True)
    saving = Saving(folder)
    trainer = trainer_for(strategy, devices, max_epochs=3, callbacks=[AVERAGING[averaging](), Copies(), saving])
    module = Scheduled()
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return [*saving.seen, module.state_dict()]


AVERAGING = {
    "moving": lambda: callbacks.EMAWeightAveraging(decay=0.6, update_starting_at_step=2),
    "stochastic": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2),
}


@pytest.mark.parametrize("averaging", AVERAGING)
@pytest.mark.parametrize("layout", LAYOUTS)
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
    assert_same(_fit(LAYOUTS[layout](), 2, averaging, folder / "resumed", path), expected[-4:])
    assert_same(_fit("auto", 1, averaging, single, folder / "divided" / "1.ckpt"), expected[-4:])


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, check_device=False)


class Normalized(Deep):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(12).double()

    def forward(self, x):
        return super().forward(self.norm(x))


@distributed(world_size=2)
def test_statistics_that_a_pipeline_cannot_collect_anew(group):
    trainer = trainer_for(LAYOUTS["pipeline"](), 2, callbacks=[StochasticWeightAveraging(0.02)])
    with pytest.raises(ValueError, match="use `WeightAveraging`, which averages the statistics"):
        trainer.fit(Normalized(), loader())
    comm.barrier(group)


@distributed(world_size=2)
def test_a_copy_is_not_saved_in_parts_after_the_run(group):
    own = Copies()
    trainer = trainer_for(LAYOUTS["tensor"](), 2, max_epochs=1, callbacks=[own])
    trainer.fit(Deep(), loader())
    with pytest.raises(RuntimeError, match=r"copy of `\d.up` was made during a run|copy of .* holds a part of it"):
        own.copies[1].state_dict()
