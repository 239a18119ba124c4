"""One ordinary checkpoint from every layout, for every layout and for stock Lightning."""

import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_parallel import HybridParallelStrategy, comm
from lightning_parallel.compat import patched
from lightning_parallel.strategies.setup import divide as setup
from tests.harness import distributed
from tests.strategies.test_pipeline import Deep, fit

LAYOUTS = {
    "stock": None,
    "pipeline 4": ({"pipeline_parallel_size": 4}, 1),
    "pipeline 2 x 2 stages, data 2": ({"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b"}, 2),
    "pipeline 2, tensor 2": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 1),
    "tensor 2, data 2": ({"tensor_parallel_size": 2}, 2),
}


class Tied(Deep):
    """The embedding's matrix is the head's too; parameters in two groups, sorted by name."""

    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.embed, self.head = nn.Linear(12, 8, bias=False).double(), nn.Linear(8, 12, bias=False).double()
        self.head.weight = nn.Parameter(self.embed.weight.detach().T.clone())
        self.out = nn.Linear(8, 12, bias=False).double()
        self.out.weight = self.head.weight
        self.optimizer = optimizer

    def forward(self, x):
        x = self.embed(x) + nn.functional.linear(x, self.out.weight.T)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :5]

    def configure_optimizers(self):
        named = sorted(self.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() < 2]},
        ]
        if self.optimizer == "adam":
            optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
        else:
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def run(layout, optimizer="sgd", **options):
    module = Tied(optimizer)
    if LAYOUTS[layout] is None:
        return fit(module, "auto", 1, **options)
    sizes, replicas = LAYOUTS[layout]
    return fit(module, HybridParallelStrategy(num_microbatches=2, **sizes), 4, replicas, **options)


class Epochs(Callback):
    """Keeps the metrics of each epoch."""

    def __init__(self):
        self.found = []

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch:
            self.found.append(dict(trainer.callback_metrics))

    def on_train_end(self, trainer, pl_module):
        self.found.append(dict(trainer.callback_metrics))


def resume_in_a_ring(run, names, optimizer, group):
    """Train `Tied` an epoch in each layout, from the checkpoint of the layout before; compare the losses.

    Args:
        run: Trains in a layout, with options of the trainer.
        names: The layouts.
        optimizer: Passed to `run`.
        group: All ranks.
    """
    folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
    ring, path, expected = [*names, names[0]], None, Epochs()  # each is saved and resumed
    fit(Tied(optimizer), "auto", 1, max_epochs=len(ring), callbacks=[expected])
    for epoch, layout in enumerate(ring):
        trainer = run(layout, optimizer, max_epochs=epoch + 1, ckpt_path=path)
        for name in ("train_loss", "val_loss"):
            torch.testing.assert_close(
                trainer.callback_metrics[name],
                expected.found[epoch][name],
                rtol=1e-6,
                atol=1e-7,
                msg=f"{name}: {ring[epoch - 1] if epoch else 'begun'} -> {layout}",
            )
        path = folder / f"{epoch}.ckpt"
        if layout != "stock" or group.rank == 0:
            trainer.save_checkpoint(path)
        comm.barrier(group)


@distributed(world_size=4)
def test_every_layout_resumes_every_other(group):
    # The state of Adam has the kinds of SGD, tensors of the shape of a parameter, and a number.
    resume_in_a_ring(run, list(LAYOUTS), "adam", group)


@distributed(world_size=4)
def test_the_file_is_that_of_one_process(group):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "full.ckpt"
    run("pipeline 2, tensor 2").save_checkpoint(path)
    comm.barrier(group)
    one = run("stock")
    checkpoint = torch.load(path, weights_only=False)
    expected = one.lightning_module.state_dict()
    assert list(checkpoint["state_dict"]) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(checkpoint["state_dict"][name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    assert checkpoint["state_dict"]["head.weight"].data_ptr() == checkpoint["state_dict"]["out.weight"].data_ptr()
    (found,), (mine,) = checkpoint["optimizer_states"], [one.optimizers[0].state_dict()]
    assert [entry["params"] for entry in found["param_groups"]] == [entry["params"] for entry in mine["param_groups"]]
    for index, entry in mine["state"].items():
        torch.testing.assert_close(found["state"][index]["momentum_buffer"], entry["momentum_buffer"])
    loaded = Tied.load_from_checkpoint(path)
    torch.testing.assert_close(loaded.blocks[0].up.weight, expected["blocks.0.up.weight"])


class Ordered(Deep):
    """Its optimizer has the parameters in an order of its own, as parts that are trained at different rates do."""

    def __init__(self, kind="sgd", is_named=False):
        super().__init__()
        self.kind, self.is_named = kind, is_named

    def configure_optimizers(self):
        modules = [self.head, self.blocks[3], self.embed, *self.blocks[:3]]
        assert len(list(self.blocks[1].parameters())) == 6, "the module is shown whole on every stage"
        if self.is_named:
            modules = [list(self.named_parameters())[::-1]]
            return torch.optim.SGD(modules[0], lr=0.1, momentum=0.9)
        groups = [{"params": [p for m in part for p in m.parameters()]} for part in (modules[:3], modules[3:])]
        groups[1]["params"].insert(1, groups[0]["params"].pop(0))
        if self.kind == "adagrad":
            return torch.optim.Adagrad(groups, lr=0.01)
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "is_named"), [("sgd", True), ("adagrad", False)])
@distributed(world_size=2)
def test_optimizers_keep_their_own_order(group, kind, is_named):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "ordered.ckpt"
    sizes = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    trainer = fit(Ordered(kind, is_named), HybridParallelStrategy(**sizes), 2, max_epochs=1)
    trainer.save_checkpoint(path)
    assert all(not parameter.is_meta for g in trainer.optimizers[0].param_groups for parameter in g["params"])
    comm.barrier(group)
    (found,) = torch.load(path, weights_only=False)["optimizer_states"]
    one = fit(Ordered(kind, is_named), "auto", 1, max_epochs=1).optimizers[0].state_dict()
    assert found["param_groups"] == one["param_groups"]
    assert found["state"].keys() == one["state"].keys()
    for index, entry in one["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(found["state"][index][name], value, msg=f"{index} {name}")
    expected = fit(Ordered(kind, is_named), "auto", 1).callback_metrics["train_loss"]
    resumed = fit(Ordered(kind, is_named), HybridParallelStrategy(**sizes, gather_after_fit="off"), 2, ckpt_path=path)
    torch.testing.assert_close(resumed.callback_metrics["train_loss"], expected, rtol=1e-6, atol=1e-7)
    held = {id(parameter) for parameter in resumed.lightning_module.parameters()}
    assert {id(p) for g in resumed.optimizers[0].param_groups for p in g["params"]} == held


@distributed(world_size=2)
def test_a_group_that_is_added_later_is_in_the_order_of_the_model(group):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "added.ckpt"

    class Thaw(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if not trainer.current_epoch:
                rest = [p for name, p in pl_module.named_parameters() if name.startswith(("embed", "head"))]
                trainer.optimizers[0].add_param_group({"params": rest})

    class Partial(Deep):
        def configure_optimizers(self):
            return torch.optim.SGD(self.blocks.parameters(), lr=0.1, momentum=0.9)

    strategy = HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2)
    fit(Partial(), strategy, 2, max_epochs=1, callbacks=[Thaw()]).save_checkpoint(path)
    comm.barrier(group)
    (found,) = torch.load(path, weights_only=False)["optimizer_states"]
    one = fit(Partial(), "auto", 1, max_epochs=1, callbacks=[Thaw()]).optimizers[0].state_dict()
    assert found["param_groups"] == one["param_groups"]
    for index, entry in one["state"].items():
        torch.testing.assert_close(found["state"][index]["momentum_buffer"], entry["momentum_buffer"])


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_a_run_that_resumes_takes_the_plan_of_the_checkpoint_and_measures_nothing(group):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "planned.ckpt"
    # The five features of the head are divided unevenly.
    options = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 2}
    first = fit(Deep(), HybridParallelStrategy(**options), 4, max_epochs=1)
    first.save_checkpoint(path)
    comm.barrier(group)

    def measured(*args, **kwargs):
        raise AssertionError("measured again")

    with patched(setup, "analyze", measured):
        resumed = fit(Deep(), HybridParallelStrategy(**options), 4, ckpt_path=path)
        assert resumed.strategy.run.engine.plan.outline() == first.strategy.run.engine.plan.outline()
        with pytest.raises(AssertionError, match="measured again"):
            fit(Deep(), HybridParallelStrategy(**options, schedule="gpipe"), 4, ckpt_path=path)
        # Code that lists checkpoints does not find the plan.
        names = [one.name for one in path.parent.iterdir() if not one.name.startswith(".")]
        comm.barrier(group)
        assert names == ["planned.ckpt"]


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(axis, group):
    path = Path(comm.broadcast_object(tempfile.mkdtemp(), group)) / "other.ckpt"
    if group.rank == 0:
        state = Tied().state_dict()
        state["blocks.3.up.bias"] = torch.zeros(7)
        torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.0"}, path)
    comm.barrier(group)
    with pytest.raises(ValueError, match=r"blocks.3.up.bias must have the shape \(16,\); got \(7,\)"):
        fit(Tied(), HybridParallelStrategy(**{f"{axis}_parallel_size": 2}), 2, ckpt_path=path)
