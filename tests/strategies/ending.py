"""A run that ends in one of many ways: `python ending.py KIND END`, on each rank of two or by any launcher."""

import contextlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    PowerSGD,
    TensorParallelStrategy,
    TopK,
    comm,
)
from lightning_parallel.compression import HookState, compression_hook

SMALL = {"bucket_cap_mb": 0.002}  # several buckets, so that two are in flight
STRATEGIES = {
    "ddp powersgd": lambda: CompressedDDPStrategy(PowerSGD(2), **SMALL),
    "ddp topk": lambda: CompressedDDPStrategy(TopK(0.1), **SMALL),
    "ddp plain": lambda: CompressedDDPStrategy(PowerSGD(2, start_step=100), **SMALL),
    "fsdp": lambda: CompressedFSDPStrategy(TopK(0.1)),
    "model parallel": lambda: CompressedModelParallelStrategy(TopK(0.1), data_parallel_size=2, tensor_parallel_size=1),
    "deepspeed": lambda: CompressedDeepSpeedStrategy(TopK(0.1), stage=1),
    "local": lambda: LocalSGDStrategy(every_n_steps=2, overlap_steps=1),
    "tensor": lambda: TensorParallelStrategy(tensor_parallel_size=2),
    "pipeline": lambda: PipelineParallelStrategy(pipeline_parallel_size=2),
    "data": lambda: HybridParallelStrategy(data_parallel_size=2, compression=TopK(0.1)),
    "zero 1": lambda: HybridParallelStrategy(data_parallel_size=2, zero_stage=1),
    "zero 2": lambda: HybridParallelStrategy(data_parallel_size=2, zero_stage=2),
    "auto": lambda: AutoParallelStrategy(),
    "stock": lambda: "ddp",
}
LOOPS = ("hook", "reduce")
ENDS = ("fit", "twice", "dropped", "fails", "setup", "alone", "term", "term one", "killed")


class Failure(Exception):
    """What the module raises."""


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise Failure("as rank 1 ends")


class Middle(nn.Module):
    """Fails in the backward pass, when half of the gradients have come."""

    fails = False

    def forward(self, x):
        return _FailsBackward.apply(x) if Middle.fails else x


class Ending(LightningModule):
    def __init__(self, end, kind=""):
        super().__init__()
        torch.manual_seed(1)
        self.end, self.kind = end, kind
        layers = [nn.Linear(16, 16) for _ in range(12)]
        self.net = nn.Sequential(*layers[:6], Middle(), *layers[6:])

    def configure_model(self):
        if self.kind == "model parallel" and self.device_mesh is not None and not hasattr(self, "is_sharded"):
            from torch.distributed.fsdp import fully_shard

            self.is_sharded = fully_shard(self.net, mesh=self.device_mesh["data_parallel"]) is not None

    def setup(self, stage):
        if self.end == "setup":
            raise Failure("as all ranks end")

    def training_step(self, batch, index):
        rank = int(os.environ["LOCAL_RANK"])
        if index == 2:
            if self.end in ("fails", "dropped"):
                raise Failure("as all ranks end")
            if self.end == "killed" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.end == "term" or (self.end == "term one" and rank == 1):
                os.kill(os.getpid(), signal.SIGTERM)
        Middle.fails = self.end == "alone" and rank == 1 and index == 2
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(kind, end):
    data = DataLoader(TensorDataset(torch.randn(24, 16)), batch_size=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for _ in range(2 if end == "twice" else 1):
        strategy = STRATEGIES[kind]()
        if hasattr(strategy, "verify"):
            strategy.verify = "off"
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **quiet)
        trainer.fit(Ending(end, kind), data)


def loop(kind):
    """A training loop of its own, which closes and destroys nothing."""
    dist.init_process_group("gloo")
    group, module = comm.Group.of(), Ending("fit")
    compressor = PowerSGD(2)
    model = module
    if kind == "hook":
        model = DistributedDataParallel(module.net, bucket_cap_mb=0.002)
        model.register_comm_hook(HookState(compressor, model, bucket_bytes=2000), compression_hook)
    else:
        model = module.net
    for _ in range(4):
        model(torch.randn(2, 16)).square().mean().backward()
        if kind == "reduce":
            compressor.reduce_({name: p.grad for name, p in model.named_parameters()}, group)
        model.zero_grad()


if __name__ == "__main__":
    signal.alarm(150)  # not for ever if the test itself is ended
    torch.set_num_threads(1)
    kind, end = sys.argv[1:]
    if kind in LOOPS:
        loop(kind)
    elif end == "dropped":
        with contextlib.suppress(Failure):
            train(kind, end)
    else:
        train(kind, end)
