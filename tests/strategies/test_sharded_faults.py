"""Sharded checkpoints in runs: with Lightning's callbacks, in the background, on full disks, and what does not fit."""

import os
import subprocess
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from lightning_parallel import HybridParallelStrategy, LocalSGDStrategy, comm
from lightning_parallel.checkpoint import SavedCheckpoint, reader, staging, writer
from lightning_parallel.compat import patched
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from tests.harness import distributed
from tests.strategies.models import loader
from tests.strategies.test_deferred_init import PeakMemory
from tests.strategies.test_pipeline import Deep, fit

QUICK = {"num_sanity_val_steps": 0, "limit_val_batches": 0}


def strategy(axis="pipeline", **options):
    return HybridParallelStrategy(
        **{f"{axis}_parallel_size": 2}, num_microbatches=2, checkpoint_format="sharded", **options
    )


def shared_folder(group):
    return Path(comm.broadcast_object(tempfile.mkdtemp(), group))


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix != ".json")


@pytest.mark.sweep
@pytest.mark.parametrize("async_save", [False, True])
@distributed(world_size=2)
def test_callbacks_of_lightning_save_and_find_them(group, async_save):
    folder = shared_folder(group)
    expected = fit(Deep(), "auto", 1, limit_val_batches=2, max_epochs=3).callback_metrics

    def checkpointing():
        return ModelCheckpoint(folder, "{step}", monitor="val_loss", save_top_k=1, save_last=True)

    options = {"enable_checkpointing": True, "limit_val_batches": 2}
    first = checkpointing()
    fit(Deep(), strategy(async_save=async_save), 2, callbacks=[first], **{**options, "max_epochs": 2})
    comm.barrier(group)
    assert names_in(folder) == ["last.ckpt", Path(first.best_model_path).name]
    second = checkpointing()
    options |= {"callbacks": [second], "max_epochs": 3}
    resumed = fit(Deep(), strategy(async_save=async_save), 2, ckpt_path="last", **options)
    for name in ("train_loss", "val_loss"):
        torch.testing.assert_close(resumed.callback_metrics[name], expected[name], rtol=1e-6, atol=1e-7)
    comm.barrier(group)
    assert names_in(folder) == ["last.ckpt", Path(second.best_model_path).name]
    (found,) = resumed.validate(resumed.lightning_module, loader(1, 0), ckpt_path="best", verbose=False)
    assert found["val_loss"] == pytest.approx(float(expected["val_loss"]), rel=1e-6)


class SaveAt(Callback):
    """Saves after a batch, and notes what is raised."""

    def __init__(self, *paths):
        self.paths, self.errors, self.steps = list(paths), [], []

    def on_train_batch_end(self, trainer, *_):
        self.steps.append(trainer.global_step)
        if self.paths:
            try:
                trainer.save_checkpoint(self.paths.pop(0))
            except Exception as error:
                self.errors.append(error)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
@distributed(world_size=2)
def test_a_full_disk_fails_on_every_rank_and_spoils_nothing(group):
    folder = shared_folder(group)
    if group.rank == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], check=True)
    comm.barrier(group)
    try:
        save = SaveAt(folder / "a.ckpt", folder / "a.ckpt")

        class Fill(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                if group.rank == 0 and batch_idx == 1:
                    free = os.statvfs(folder)
                    (folder / "filler").write_bytes(b"1" * (free.f_bavail * free.f_bsize - 8192))
                comm.barrier(group)

        fit(Deep(), strategy(), 2, callbacks=[Fill(), save], max_epochs=1, **QUICK)
        (error,) = save.errors
        assert "No space left on device" in str(error)
        assert names_in(folder) == ["a.ckpt", "filler"]
        saved = SavedCheckpoint.open(str(folder / "a.ckpt"))
        assert saved.manifest.step == 1
        assert all(torch.isfinite(tensor).all() for tensor in saved.checkpoint()["state_dict"].values())
        saved.close()
    finally:
        comm.barrier(group)
        if group.rank == 0:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("fails", ["early", "late"])
@distributed(world_size=2)
def test_an_error_of_one_rank_in_the_background_ends_the_run_at_one_step(group, fails):
    folder = shared_folder(group)
    save, over = SaveAt(folder / "a.ckpt"), threading.Event()

    def broken(*args, **kwargs):
        if fails == "late":
            over.wait(30)
        raise OSError(5000, "the storage is gone")

    class Wait(Callback):
        """Lets the second step begin when the save has failed; or the save fail when the steps are over."""

        def on_train_batch_end(self, trainer, *_):
            if fails == "early":
                trainer.strategy._writer._pending[0].result()

        def on_train_end(self, *_):
            over.set()

    gone = pytest.raises((OSError, RuntimeError), match="the storage is gone")
    with patched(writer, "write_file", broken if group.rank == 1 else writer.write_file), gone:
        fit(Deep(), strategy(async_save=True), 2, callbacks=[save, Wait()], max_epochs=1, **QUICK)
    assert save.steps == ([1, 2] if fails == "late" else [1]), "the rank that fails and the others stop alike"
    comm.barrier(group)
    assert names_in(folder) == []


@distributed(world_size=2)
def test_a_save_in_the_background_holds_the_step_at_which_it_was_asked_for(group):
    folder = shared_folder(group)
    go_on, prepared = threading.Event(), []
    real, prepare = writer.write_file, staging.Staging.prepare

    def slow(*args, **kwargs):
        go_on.wait(30)
        return real(*args, **kwargs)

    def noted(self, size, on_device):
        prepared.append(size)
        prepare(self, size, on_device)

    class Release(Callback):
        def on_train_end(self, trainer, *_):
            # The memory was made once, after the first step, and was large enough for the copy.
            assert [memory.size for memory in trainer.strategy._writer._staging._memories] == [*prepared, 0]
            assert not (folder / "a.ckpt").exists()
            go_on.set()

    with patched(writer, "write_file", slow), patched(staging.Staging, "prepare", noted):
        callbacks = [SaveAt(folder / "a.ckpt"), Release(), ModelCheckpoint(save_top_k=0)]
        options = {"plugins": [AsyncCheckpointIO()], "enable_checkpointing": True, "max_epochs": 1, **QUICK}
        trainer = fit(Deep(), strategy("tensor"), 2, callbacks=callbacks, **options)
    found = SavedCheckpoint.open(str(folder / "a.ckpt"))
    assert found.manifest.step == 1
    assert trainer.global_step == 2
    expected = fit(Deep(), "auto", 1, max_epochs=1, limit_train_batches=1, **QUICK).lightning_module.state_dict()
    for name, tensor in found.checkpoint()["state_dict"].items():
        torch.testing.assert_close(tensor * 1, expected[name], rtol=1e-10, atol=1e-12)


@distributed(world_size=2)
def test_memory_made_after_the_first_step_changes_no_local_step(group):
    """Replicas exchange drifts in their turn, and not for the size of a checkpoint."""
    states = []
    for is_async in (False, True):
        local = LocalSGDStrategy(3, average_first=0, checkpoint_format="sharded", async_save=is_async)
        options = {"callbacks": [ModelCheckpoint(save_top_k=0)], "enable_checkpointing": True, "max_epochs": 2}
        states.append(fit(Deep(), local, 2, **options, **QUICK).lightning_module.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=0)


@distributed(world_size=2)
def test_what_is_no_checkpoint_is_said_to_be_none(group):
    folder = shared_folder(group)
    with pytest.raises((FileNotFoundError, RuntimeError), match=r"a folder without `manifest\.json`"):
        fit(Deep(), strategy(), 2, ckpt_path=folder, **QUICK)
    # Of a run that wrote files.
    (folder / "file.ckpt").touch()
    comm.barrier(group)
    save = SaveAt(folder / "a.ckpt")

    class Remove(Callback):
        def on_train_end(self, trainer, pl_module):
            trainer.strategy.remove_checkpoint(folder / "file.ckpt")

    fit(Deep(), strategy(), 2, callbacks=[save, Remove()], max_epochs=1, **QUICK)
    comm.barrier(group)
    assert names_in(folder) == ["a.ckpt"]


@distributed(world_size=2)
def test_buffers_are_those_of_the_first_replica_and_a_save_after_the_run_is_waited_for(group):
    path = shared_folder(group) / "a.ckpt"

    class Buffered(Deep):
        def __init__(self):
            super().__init__()
            for name in "abc":
                self.register_buffer(name, torch.zeros(2))

        def on_train_end(self):
            for name in "abc":
                getattr(self, name).fill_(1.0 + group.rank)
            self.trainer.save_checkpoint(path)

    data = HybridParallelStrategy(checkpoint_format="sharded", async_save=True)
    trainer = fit(Buffered(), data, 2, 2, max_epochs=1, **QUICK)
    found = SavedCheckpoint.open(str(path)).checkpoint()["state_dict"]
    assert [(found[name] * 1).tolist() for name in "abc"] == [[1.0, 1.0]] * 3
    real = writer.write_file

    def slow(*args, **kwargs):
        time.sleep(0.01)
        return real(*args, **kwargs)

    with patched(writer, "write_file", slow):
        trainer.save_checkpoint(path.with_name("b.ckpt"))
    assert SavedCheckpoint.open(str(path.with_name("b.ckpt"))).manifest.step == 2


class Wider(Deep):
    """Has one layer of another width."""

    def __init__(self):
        super().__init__()
        self.blocks[3].up = nn.Linear(8, 20).double()
        self.blocks[3].down = nn.Linear(20, 8).double()


def _single():
    return Deep().float()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Wider, r"blocks\.3\.up\.bias must have the shape \(20,\); got"),
        (_single, r"must be torch\.float32; got torch\.float64"),
    ],
    ids=["shape", "dtype"],
)
@distributed(world_size=2)
def test_what_does_not_fit_is_listed_on_every_rank(group, other, expected):
    path = shared_folder(group) / "a.ckpt"
    fit(Deep(), strategy(), 2, max_epochs=1, **QUICK).save_checkpoint(path)
    with pytest.raises(ValueError, match=expected):
        fit(other(), strategy(), 2, ckpt_path=path, **QUICK)


@distributed(world_size=2)
def test_hooks_of_the_user_see_names_and_may_remove_entries(group):
    path = shared_folder(group) / "a.ckpt"

    class Hooked(Deep):
        seen = None
        strict_loading = False

        def on_save_checkpoint(self, checkpoint):
            assert checkpoint["state_dict"]["embed.weight"].shape == self.embed.weight.shape
            del checkpoint["state_dict"]["embed.weight"]
            checkpoint["mine"] = {"x": torch.arange(3), "t": (1, 2)}

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["mine"]["t"] == (1, 2)
            self.seen = checkpoint["state_dict"]["blocks.0.up.weight"].norm()
            checkpoint["state_dict"]["embed.weight"] = torch.zeros(8, 12).double()

    trainer = fit(Hooked(), strategy("tensor"), 2, max_epochs=1, **QUICK)
    trainer.save_checkpoint(path)
    module = Hooked()
    fit(module, strategy("tensor", gather_after_fit="off"), 2, ckpt_path=path, max_epochs=1, **QUICK)
    torch.testing.assert_close(module.seen, trainer.lightning_module.blocks[0].up.weight.norm())
    assert module.embed.weight.abs().sum() == 0

    class Computed(Deep):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["half"] = checkpoint["state_dict"]["embed.weight"].half()

    with pytest.raises(ValueError, match="`half` was computed from a tensor of the model"):
        fit(Computed(), strategy("tensor"), 2, callbacks=[SaveAll(path)], max_epochs=1, **QUICK)


class SaveAll(Callback):
    """Saves after the first batch."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.path)


class Broad(Deep):
    """Its blocks are large beside what the rest of a run needs."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(8, 20_000).double(), nn.Linear(20_000, 8).double()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_no_rank_holds_more_than_its_part_and_one_tensor(group):
    path = shared_folder(group) / "a.ckpt"
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    largest = 20_000 * 8 * 8

    class Measured(Callback):
        saving = None

        def on_train_batch_end(self, trainer, *_):
            if self.saving is None:
                with PeakMemory() as memory:
                    trainer.save_checkpoint(path)
                self.saving = memory.peak

    def trained(**options):
        divided = HybridParallelStrategy(
            **sizes, num_microbatches=2, checkpoint_format="sharded", gather_after_fit="off", balance="uniform"
        )
        options = {"max_epochs": 1, **QUICK, **options}
        trainer = fit(Broad(), divided, 4, **options)
        return sum(parameter.nbytes for parameter in trainer.lightning_module.parameters())

    measured = Measured()
    own = trained(callbacks=[measured])
    assert own < 1.1 * 4 * 2 * largest / 4
    assert own * 1.9 < measured.saving < 2 * own + 0.6 * largest, "parameters and momenta, and no copies"
    peaks = []
    load, load_optimizers = MeshStrategy.load_model_state_dict, MeshStrategy.load_optimizer_state_dict

    def watched(function):
        def call(*args, **kwargs):
            with PeakMemory() as memory:
                function(*args, **kwargs)
            peaks.append(memory.peak)

        return call

    of_model = patched(MeshStrategy, "load_model_state_dict", watched(load))
    seen = patched(reader, "dispatch_modes_suspended", nullcontext)  # of which the counter is one
    with seen, of_model, patched(MeshStrategy, "load_optimizer_state_dict", watched(load_optimizers)):
        trained(ckpt_path=path)
    # What is counted are storages that operations return: those of the parameters are among them.
    assert own * 0.9 < peaks[0] < own + 0.6 * largest, "the parameters, and a part of a tensor at a time"
    assert own * 0.9 < peaks[1] < own + 0.6 * largest, "the optimizer's part, and a part of a tensor"
