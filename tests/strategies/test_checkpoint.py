"""One ordinary checkpoint: from any layout to any other, and to stock Lightning and back."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_parallel import comm
from tests.harness import distributed
from tests.strategies.models import Net, fit_parallel, fit_single


class Tied(Net):
    """With a parameter under two names, and a choice of optimizer."""

    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.optimizer = optimizer
        self.net.insert(2, nn.Linear(18, 18))
        self.net.insert(3, nn.Linear(18, 18))
        self.net[3].weight = self.net[2].weight

    def configure_optimizers(self):
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _folder(group):
    return Path(comm.broadcast_object(tempfile.mkdtemp(), group))


def _resumed(path, optimizer, world, tensor):
    """Losses of the second epoch, continued from `path`."""
    module = Tied(optimizer).double()
    options = {"ckpt_path": path, "max_epochs": 2}
    trainer = fit_single(module, **options) if world == 1 else fit_parallel(module, world, tensor, **options)
    return trainer.callback_metrics["train_loss"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@distributed(world_size=4)
def test_every_layout_resumes_every_other(group, optimizer):
    """Stock Lightning on one device is a layout too."""
    folder = _folder(group)
    expected = fit_single(Tied(optimizer).double()).callback_metrics["train_loss"]
    for saved in (1, 2, 4):
        path = folder / f"{saved}.ckpt"
        module = Tied(optimizer).double()
        if saved == 1:
            trainer = fit_single(module, max_epochs=1)
            if group.rank == 0:
                trainer.save_checkpoint(path)
        else:
            trainer = fit_parallel(module, 4, saved, max_epochs=1)
            trainer.save_checkpoint(path)
        comm.barrier(group)
        for resumed in (1, 2, 4) if optimizer == "sgd" else (saved % 4 * 2 or 1,):
            if resumed == 1 and group.rank > 0:
                continue
            found = _resumed(path, optimizer, 1 if resumed == 1 else 4, resumed)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=f"{saved} -> {resumed}")


@distributed(world_size=4)
def test_the_file_is_that_of_one_process(group):
    path = _folder(group) / "full.ckpt"
    fit_parallel(Tied().double(), 4, 2).save_checkpoint(path)
    comm.barrier(group)
    expected = Tied().double()
    fit_single(expected)
    checkpoint = torch.load(path, weights_only=False)
    state = checkpoint["state_dict"]
    assert list(state) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
    assert state["net.2.weight"].data_ptr() == state["net.3.weight"].data_ptr(), "a tied parameter is saved once"
    (optimizer,) = checkpoint["optimizer_states"]
    shapes = [tuple(entry["momentum_buffer"].shape) for entry in optimizer["state"].values()]
    assert shapes == [tuple(parameter.shape) for parameter in expected.parameters()]
    loaded = Tied.load_from_checkpoint(path)
    torch.testing.assert_close(loaded.net[0].weight.double(), state["net.0.weight"], rtol=1e-6, atol=1e-6)


@distributed(world_size=2)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(group):
    path = _folder(group) / "small.ckpt"
    if group.rank == 0:
        fit_single(Net(hidden=10).double(), max_epochs=1).save_checkpoint(path)
    comm.barrier(group)
    with pytest.raises(ValueError, match=r"net.0.weight: expected \(18, 12\), found \(10, 12\)"):
        fit_parallel(Net().double(), 2, 2, ckpt_path=path)
