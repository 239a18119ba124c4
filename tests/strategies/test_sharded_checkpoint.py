"""Sharded checkpoints: from every layout, for every layout; what is damaged, does not fit, or was not finished."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_parallel import HybridParallelStrategy, PowerSGD, TopK, comm
from lightning_parallel.checkpoint import SavedCheckpoint
from lightning_parallel.strategies.setup.divide import PLAN_FILE
from tests.harness import distributed
from tests.strategies.test_pipeline import fit
from tests.strategies.test_pipeline_checkpoint import Tied, resume_in_a_ring

LAYOUTS = {
    "one process": ({}, 1),
    "data 4": ({}, 4),
    "tensor 4": ({"tensor_parallel_size": 4}, 1),
    "pipeline 4": ({"pipeline_parallel_size": 4}, 1),
    "pipeline 2 x 2 stages, data 2": ({"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b"}, 2),
    "pipeline 2, tensor 2": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 1),
    "tensor 2, data 2": ({"tensor_parallel_size": 2}, 2),
}


def run(layout, optimizer="sgd", module=None, **options):
    sizes, replicas = LAYOUTS[layout]
    strategy = HybridParallelStrategy(
        num_microbatches=2, checkpoint_format="sharded", **sizes, **options.pop("strategy", {})
    )
    return fit(module or Tied(optimizer), strategy, 4, replicas, **options)


def shared_folder(group):
    return Path(comm.broadcast_object(tempfile.mkdtemp(), group))


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@distributed(world_size=4)
def test_every_layout_resumes_every_other(group, optimizer):
    # What differs between optimizers is their state: with Adam each axis is seen once.
    names = [name for name in LAYOUTS if name not in ("one process", "tensor 2, data 2")]
    resume_in_a_ring(run, names if optimizer == "sgd" else ["tensor 4", "pipeline 2, tensor 2"], optimizer, group)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_it_holds_what_one_process_would_save(group):
    path = shared_folder(group) / "saved.ckpt"
    run("pipeline 2, tensor 2").save_checkpoint(path)
    one = fit(Tied(), "auto", 1)
    saved = SavedCheckpoint.open(str(path), group)
    checkpoint = saved.checkpoint()
    expected = one.lightning_module.state_dict()
    assert list(checkpoint["state_dict"]) == list(expected)
    for name, tensor in expected.items():
        found = checkpoint["state_dict"][name]
        assert found.shape == tensor.shape
        torch.testing.assert_close(found + 0, tensor, rtol=1e-10, atol=1e-12, msg=name)
    assert checkpoint["state_dict"]["head.weight"] is checkpoint["state_dict"]["out.weight"]
    (found,), (mine,) = checkpoint["optimizer_states"], [one.optimizers[0].state_dict()]
    assert found["param_groups"] == mine["param_groups"]
    for index, entry in mine["state"].items():
        torch.testing.assert_close(found["state"][index]["momentum_buffer"] * 1, entry["momentum_buffer"])
    assert {child.name for child in path.parent.iterdir() if child.name.startswith(".")} <= {PLAN_FILE}


@pytest.mark.sweep(kept=None)
@pytest.mark.parametrize(
    ("layout", "compression"),
    [("tensor 2, data 2", PowerSGD(1, min_numel=16)), ("pipeline 2 x 2 stages, data 2", TopK(0.1, min_numel=16))],
    ids=["tensor", "pipeline"],
)
@distributed(world_size=4)
def test_compression_goes_on_bit_for_bit(group, layout, compression):
    path = shared_folder(group) / "saved.ckpt"
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0}

    def trained(**more):
        strategy = {"compression": copy.deepcopy(compression)}
        return run(layout, strategy=strategy, **{**options, **more}).lightning_module.state_dict()

    expected = trained()
    strategy = {"compression": copy.deepcopy(compression)}
    run(layout, strategy=strategy, max_epochs=1, **options).save_checkpoint(path)
    for name, tensor in trained(ckpt_path=path).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_residuals_go_on_in_another_layout(group):
    path = shared_folder(group) / "saved.ckpt"
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0}
    first = run("data 4", strategy={"compression": TopK(0.1, min_numel=16)}, max_epochs=1, **options)
    first.save_checkpoint(path)
    residuals = first.strategy.compression.state_dict()["residual"]
    mean = {name: comm.all_reduce(tensor, group) / 4 for name, tensor in residuals.items()}

    class Read(Callback):
        def on_train_start(self, trainer, pl_module):
            self.found = trainer.strategy.compression.state_dict()["residual"]

    read = Read()
    second = {"compression": TopK(0.1, min_numel=16), "gather_after_fit": "off"}
    trainer = run("tensor 2, data 2", strategy=second, ckpt_path=path, callbacks=[read], **options)
    names = dict(trainer.lightning_module.named_parameters())
    assert read.found.keys() == mean.keys()
    assert any(name in trainer.strategy.run.rules for name in names)
    for name, tensor in read.found.items():
        rule = trainer.strategy.run.rules.get(name)
        full = mean[name] if rule is None else rule.split(mean[name], trainer.strategy.groups.tensor_parallel.rank)
        torch.testing.assert_close(tensor, full, rtol=1e-12, atol=1e-14)
