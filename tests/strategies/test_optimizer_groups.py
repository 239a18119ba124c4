"""Optimizers whose groups name, measure or add parameters: as on one process, and in its checkpoints."""

import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn

from lightning_parallel import HybridParallelStrategy, comm
from tests.harness import distributed
from tests.strategies.test_pipeline import Deep, assert_same, fit

LAYOUTS = {
    "tensor": ({"tensor_parallel_size": 2}, 2),
    "pipeline": ({"pipeline_parallel_size": 2, "num_microbatches": 2}, 2),
    "pipeline x tensor": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 2}, 4),
}


class Measured(Deep):
    """Learning rates by the width of a matrix, as in muP; the head by name, before the embedding."""

    def configure_optimizers(self):
        groups = [{"params": [self.head.weight], "lr": 0.3}]
        for name, parameter in self.named_parameters():
            if name != "head.weight":
                width = parameter.shape[1] + parameter.size(1) if parameter.ndim > 1 else parameter.numel()
                groups.append({"params": [parameter], "lr": 0.5 / width + len(parameter) / 1000})
        return torch.optim.SGD(groups, momentum=0.9)


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=4)
def test_groups_by_name_and_shape(layout, group):
    _train_and_compare(layout, group)


def _train_and_compare(layout, group):
    sizes, ranks = LAYOUTS[layout]
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "measured.ckpt"
    expected, module = Measured(), Measured()
    expected_trainer = fit(expected, "auto", 1)
    trainer = fit(module, HybridParallelStrategy(data_parallel_size=4 // ranks, **sizes), 4, 4 // ranks)
    if ranks == 4:
        assert_same(trainer, module, expected_trainer, expected)
    kinds = {type(parameter) for parameter in module.parameters()}
    assert kinds == {nn.Parameter}
    trainer.save_checkpoint(path)
    comm.barrier(group)
    (found,) = torch.load(path, weights_only=False)["optimizer_states"]
    one = expected_trainer.optimizers[0].state_dict()
    assert found["param_groups"] == one["param_groups"]
    for index, entry in one["state"].items():
        torch.testing.assert_close(found["state"][index]["momentum_buffer"], entry["momentum_buffer"])


class Finetuned(Deep):
    @property
    def backbone(self):
        return nn.ModuleList([self.embed, *self.blocks[:2]])

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)


def _thaw():
    return [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.05, should_align=False)]


@distributed(world_size=2)
def test_groups_that_finetuning_adds(group):
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    sizes = {"pipeline_parallel_size": 2, "num_microbatches": 2, "balance": "uniform"}

    def stages():
        return HybridParallelStrategy(**sizes)

    one = fit(Finetuned(), "auto", 1, max_epochs=2, callbacks=_thaw())
    cut = fit(Finetuned(), stages(), 2, max_epochs=2, callbacks=_thaw())
    cut.save_checkpoint(folder / "cut.ckpt")
    if group.rank == 0:
        one.save_checkpoint(folder / "one.ckpt")
    comm.barrier(group)
    (found,) = torch.load(folder / "cut.ckpt", weights_only=False)["optimizer_states"]
    expected = one.optimizers[0].state_dict()
    assert len(expected["param_groups"]) == 2
    assert found["param_groups"] == expected["param_groups"]
    for index, entry in expected["state"].items():
        torch.testing.assert_close(found["state"][index]["momentum_buffer"], entry["momentum_buffer"])
    # Not a run without a break: stock Lightning freezes the backbone again where it resumes.
    expected = {}
    for name in ("one", "cut"):
        module = Finetuned()
        fit(module, "auto", 1, max_epochs=4, callbacks=_thaw(), ckpt_path=folder / f"{name}.ckpt")
        for key, value in module.state_dict().items():
            torch.testing.assert_close(value, expected.setdefault(key, value), rtol=1e-9, atol=1e-11)
    for name in ("one", "cut"):
        resumed = fit(Finetuned(), stages(), 2, max_epochs=4, callbacks=_thaw(), ckpt_path=folder / f"{name}.ckpt")
        full = resumed.strategy.lightning_module_state_dict()
        if group.rank == 0:
            for key, value in expected.items():
                torch.testing.assert_close(full[key], value, rtol=1e-9, atol=1e-11, msg=f"{name}: {key}")


class Thaws(BaseFinetuning):
    """Lightning compares each parameter with those of the optimizer, by their numbers."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.05)


@distributed(world_size=2)
def test_groups_that_a_callback_of_the_users_adds(group):
    sizes = {"pipeline_parallel_size": 2, "num_microbatches": 2, "balance": "uniform"}
    one = Finetuned()
    fit(one, "auto", 1, max_epochs=2, callbacks=[Thaws()])
    for strategy in (HybridParallelStrategy(tensor_parallel_size=2), HybridParallelStrategy(**sizes)):
        cut = Finetuned()
        trainer = fit(cut, strategy, 2, max_epochs=2, callbacks=[Thaws()])
        assert len(trainer.optimizers[0].param_groups) == 2
        for key, value in cut.state_dict().items():
            torch.testing.assert_close(value, one.state_dict()[key], rtol=1e-10, atol=1e-12, msg=key)


class Odd(torch.optim.SGD):
    """Treats each element by itself, and keeps a flat copy of each parameter."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["flat"] = parameter.detach().reshape(-1).clone()
        return loss


@distributed(world_size=2)
def test_state_that_cannot_be_merged_is_refused_before_training():
    class Project(Deep):
        def configure_optimizers(self):
            return Odd(self.parameters(), lr=0.1)

        def training_step(self, batch, index):
            raise AssertionError("it trains")

    with pytest.raises(ValueError, match=r"`Odd` keeps `flat`.*cannot be merged"):
        fit(Project(), HybridParallelStrategy(tensor_parallel_size=2), 2, num_sanity_val_steps=0)
