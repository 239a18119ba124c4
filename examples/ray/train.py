"""Train in Ray Train's worker group: `python examples/ray/train.py --workers 4 --tensor 2` (tensor 2 x pipeline 2).

What differs from a script without Ray: the function `train` around it, Ray's environment as a plugin, and Ray's report
callback, by which metrics and checkpoints reach Ray's storage. A worker that dies is replaced: the group starts again,
from the last checkpoint there.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 16


class Net(LightningModule):
    """A stack of MLPs: it divides into stages by its layers, and into shards by their features."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate, momentum=0.9)


def batches() -> DataLoader:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sin().sum(dim=1, keepdim=True)), batch_size=16)


def train(config: dict) -> None:
    """Run on each worker."""
    import ray.train
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_parallel import HybridParallelStrategy

    seed_everything(1)
    strategy = HybridParallelStrategy(
        tensor_parallel_size=config.get("tensor", 1),
        pipeline_parallel_size=config.get("pipeline", 2),
        num_microbatches=2,
        # Each worker reports a folder with its part, and Ray puts them together, also from hosts without a shared disk.
        checkpoint_format=config.get("checkpoint_format", "sharded"),
    )
    trainer = Trainer(
        max_epochs=config.get("epochs", 2),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto",
        strategy=strategy,
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), *config.get("callbacks", [])],
        logger=False,
        enable_checkpointing=False,  # the callback saves
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    before = ray.train.get_checkpoint()
    if before is None:
        trainer.fit(Net(config.get("learning_rate", 0.05)), batches())
    else:
        with before.as_directory() as folder:
            path = Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.fit(Net(config.get("learning_rate", 0.05)), batches(), ckpt_path=path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--storage", default=str(Path.home() / "ray_results"), help="shared by all hosts, or s3://...")
    options = parser.parse_args()

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    result = TorchTrainer(
        train,
        train_loop_config={"tensor": options.tensor, "pipeline": options.workers // options.tensor},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=options.storage, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(result.metrics, result.checkpoint.path, sep="\n")
