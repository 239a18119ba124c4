"""Four mistakes that raise no error, each made on purpose, and each found by a callback or by the loss per sample.

python examples/learn/10_four_mistakes.py
"""

import json
import logging
import tempfile
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


def fit(*callbacks, replicas=REPLICAS, width=16, rate=RATE, drifts=False, batch=8, **options):
    seed_everything(0, verbose=False)
    x = torch.randn(SAMPLES, width)
    data, model = TensorDataset(x, x[:, :4].sum(1, keepdim=True)), Model(width, rate, drifts)
    with tempfile.TemporaryDirectory() as folder:
        options["callbacks"] = [*callbacks, ProfileReport(folder, trace_steps=0, show_diagnosis=False)]
        options["strategy"] = DDPStrategy(start_method="fork") if replicas > 1 else "auto"
        trainer = Trainer(max_epochs=1, accelerator="cpu", devices=replicas, **QUIET, **options)
        trainer.fit(model, DataLoader(data, batch))
        return model.training_step(data.tensors, 0).item(), json.loads(Path(folder, "report.json").read_text())


def finding(mistake, callback, **options):
    name = type(callback).__name__
    first = fit(callback, **options)[1]["reports"][name]["findings"][0]
    print(f"{mistake}. {name}, step {first['step']}:\n   {first['name']}: {first['detail']}")


def exposed(accumulate):
    callbacks = StepBreakdown(show_table=False), CommunicationProfiler(show_table=False)
    report = fit(*callbacks, width=1024, rate=1e-4, batch=4, accumulate_grad_batches=accumulate)[1]
    steps = report["reports"]["StepBreakdown"]
    return steps["communication_least"][0] / steps["ranks"][0]["wall"], report["diagnosis"][0]["title"]


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    logging.captureWarnings(True)
    logging.disable(logging.WARNING)
    (one, _), (same, _), (scaled, _) = fit(replicas=1), fit(), fit(rate=RATE * REPLICAS)
    assert scaled < same
    print(f"1. The learning rate is not scaled. After {SAMPLES} samples:\n   loss {same:.3f}, on one process {one:.3f}")
    finding("2. Replicas drift", ReplicaDriftMonitor(4, show_table=False), drifts=True)
    finding("3. Data are read twice", DataShardingMonitor(4, show_table=False), use_distributed_sampler=False)
    (share, diagnosis), (rarer, _) = exposed(accumulate=1), exposed(accumulate=8)
    print(f"4. Communication is slow. StepBreakdown: both ranks wait {share:.0%} of a step. Report:\n   {diagnosis}")
    print(f"\nNotice: no error was raised. With the linear rule (rate x {REPLICAS}), mistake 1 has loss {scaled:.3f}.")
    print(f"With 8 accumulated batches, the {share:.0%} of mistake 4 become {rarer:.0%}.")
