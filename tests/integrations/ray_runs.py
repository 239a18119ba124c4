"""What the tests of Ray run on its workers: several fits in one group, whose start takes longest."""

import json
import os
import shutil
import signal
from pathlib import Path

import ray.train
import torch
import train as train_example
from lightning.pytorch import Callback, Trainer, seed_everything
from ray.train.lightning import RayLightningEnvironment, prepare_trainer

from lightning_parallel import CompressedDDPStrategy, HybridParallelStrategy, TopK

EPOCHS = 3


class Dies(Callback):
    """Notes the metrics of each rank; rank 1 is killed once, when two checkpoints are in the storage."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_train_epoch_start(self, trainer, module):
        killed = self.folder / "killed"
        if trainer.current_epoch == EPOCHS - 1 and trainer.global_rank == 1 and not killed.exists():
            assert len(ray.train.get_all_reported_checkpoints()) == EPOCHS - 1  # it waits until they are
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_end(self, trainer, module):
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        with open(self.folder / f"rank{trainer.global_rank}", "a") as stream:
            stream.write(json.dumps([trainer.current_epoch, trainer.strategy.mesh.shape, metrics]) + "\n")


def fits(config):
    """Run on each worker: an epoch in shards, the others in stages, from Ray's checkpoints; before, compressed fits."""
    folder = Path(config["folder"])
    if ray.train.get_checkpoint() is None:
        for name, strategy in STRATEGIES.items():
            resume_from_folders_of_each_worker(folder / name, strategy)
        shards = {"tensor": 2, "pipeline": 1, "checkpoint_format": "full", "epochs": 1}
        train_example.train({**config, **shards, "callbacks": [Dies(folder)]})
    train_example.train({**config, "epochs": EPOCHS, "callbacks": [Dies(folder)]})


STRATEGIES = {
    "ddp": lambda: CompressedDDPStrategy(TopK(0.1)),
    "mesh": lambda: HybridParallelStrategy(compression=TopK(0.1)),
}


def resume_from_folders_of_each_worker(folder, strategy):
    """Save as Ray's callback does, and go on from what its storage makes of it."""
    rank, reported = ray.train.get_context().get_world_rank(), folder / "reported"
    straight = compressed_fit(strategy(), 2).lightning_module
    mine = folder / f"worker{rank}" / "checkpoint.ckpt"  # of another host's disk, maybe
    mine.parent.mkdir(parents=True)
    compressed_fit(strategy(), 1).save_checkpoint(mine)
    files = sorted(str(path.relative_to(mine.parent)) for path in mine.parent.rglob("*") if path.is_file())
    shutil.copytree(mine.parent, reported, dirs_exist_ok=True)
    torch.distributed.barrier()
    resumed = compressed_fit(strategy(), 2, reported / "checkpoint.ckpt")
    equal = all(
        torch.equal(value, straight.state_dict()[name]) for name, value in resumed.lightning_module.state_dict().items()
    )
    noted = {"files": files, "equal": equal, "steps": resumed.global_step, "world": resumed.strategy.world_size}
    (folder / f"rank{rank}").write_text(json.dumps(noted))


def compressed_fit(strategy, epochs, saved=None):
    seed_everything(1)
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", devices="auto", strategy=strategy, plugins=[RayLightningEnvironment()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    prepare_trainer(trainer).fit(train_example.Net(), train_example.batches(), ckpt_path=saved)
    return trainer
