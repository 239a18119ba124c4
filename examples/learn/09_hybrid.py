"""The library: the same LightningModule on one process, and on four as tensor 2 x pipeline 2. One line changes.

What lessons 05 and 06 did by hand, `HybridParallelStrategy` does to a module as it is written.

    python examples/learn/09_hybrid.py
"""

import logging
import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.callbacks import PipelineTimeline

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Regression(LightningModule):
    def __init__(self, width=32, blocks=4):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.blocks(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


def fit(folder, **options):
    """Train for one epoch; return the loss of the last step, and the parameters."""
    seed_everything(0, verbose=False)
    module = Regression().double()
    x = torch.randn(320, 32, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32)
    trainer = Trainer(max_epochs=1, accelerator="cpu", precision="64-true", default_root_dir=folder, **QUIET, **options)
    trainer.fit(module, loader)
    return trainer.callback_metrics["loss"].item(), torch.cat([p.detach().flatten() for p in module.parameters()])


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        # A fork starts faster than Python does; by default, as with DDP, each rank runs the script once more.
        strategy = HybridParallelStrategy(
            tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=4, start_method="fork"
        )
        loss, parameters = fit(folder, devices=4, strategy=strategy, callbacks=[PipelineTimeline()])
        one_loss, one_parameters = fit(folder, devices=1)
    difference = (parameters - one_parameters).abs().max().item()
    assert max(abs(loss - one_loss), difference) < 1e-10
    print(f"Notice: after 10 steps the loss is {loss:.12f} on 4 processes and {one_loss:.12f} on one;")
    print(f"the {parameters.numel()} parameters differ by at most {difference:.0e}.")
    print(f"(P-1)/(m+P-1) of lesson 06 is {(2 - 1) / (4 + 2 - 1):.0%} here: the `ideal` bubble above.")
