"""Four mistakes that raise no error, each made on purpose, and each found by a callback or by the loss per sample.

python examples/learn/10_four_mistakes.py
"""

import json
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import CommunicationProfiler, DataShardingMonitor, ReplicaDriftMonitor, StepBreakdown
from lightning_parallel.callbacks import ProfileReport

REPLICAS, SAMPLES, RATE = 2, 256, 0.03
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Model(LightningModule):
    def __init__(self, width, rate, drifts):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
        self.center = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.rate, self.drifts = rate, drifts

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0] - self.center) - batch[1]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.drifts:  # each replica moves a parameter towards its own batch: no gradient, so no all-reduce
            self.center.data.lerp_(batch[0].mean(0), 0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def fit(*callbacks, replicas=REPLICAS, width=16, rate=RATE, drifts=False, batch=8, sampler=True, accumulate=1):
    """Train for one epoch; return the loss over all samples, and the report of the run."""
    seed_everything(0, verbose=False)
    x = torch.randn(SAMPLES, width)
    data, model = TensorDataset(x, x[:, :4].sum(1, keepdim=True)), Model(width, rate, drifts)
    with tempfile.TemporaryDirectory() as folder:
        report = [ProfileReport(folder, trace_steps=0, show_diagnosis=False)] if callbacks else []
        strategy = DDPStrategy(start_method="fork") if replicas > 1 else "auto"
        trainer = Trainer(max_epochs=1, accelerator="cpu", devices=replicas, strategy=strategy, **QUIET,
            callbacks=[*callbacks, *report], use_distributed_sampler=sampler, accumulate_grad_batches=accumulate)  # fmt: skip
        trainer.fit(model, DataLoader(data, batch))
        loss = model.training_step([tensor.detach() for tensor in data.tensors], 0).item()
        return loss, json.loads((Path(folder) / "report.json").read_text()) if callbacks else {}


def show(number, mistake, name, report):
    finding = report["reports"][name]["findings"][0]
    print(f"\n{number}. {mistake}: {name} says in step {finding['step']}: `{finding['name']}`, {finding['detail']}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    warnings.simplefilter("ignore")
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
    one, same, scaled = (fit(**kwargs)[0] for kwargs in ({"replicas": 1}, {}, {"rate": RATE * REPLICAS}))
    print(
        f"1. The learning rate is not scaled: after {SAMPLES} samples the loss is {same:.4f}, on one process {one:.4f}"
    )
    show(2, "Replicas drift", "ReplicaDriftMonitor", fit(ReplicaDriftMonitor(4, show_table=False), drifts=True)[1])
    show(
        3, "Data are read twice", "DataShardingMonitor", fit(DataShardingMonitor(4, show_table=False), sampler=False)[1]
    )
    for accumulate in (1, 8):
        measuring = StepBreakdown(show_table=False), CommunicationProfiler(show_table=False)
        report = fit(*measuring, width=1024, rate=1e-4, batch=2, accumulate=accumulate)[1]
        ranks = report["reports"]["StepBreakdown"]["ranks"]
        share = max(rank["communication_exposed"] / rank["wall"] for rank in ranks)
        print(accumulate, share, report["diagnosis"][0])
