"""A run that ends in one of many ways: `python ending.py KIND END [HOW]`, on each rank or by any launcher.

HOW is how processes are started that no launcher has: `popen` runs the script again, `spawn` and `fork` call functions,
`cli` is LightningCLI with the strategy's name, which runs the script again.
"""

import contextlib
import faulthandler
import importlib
import os
import signal
import sys

import torch
import torch.distributed as dist
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

_lightning = importlib.import_module(os.environ.get("ENDING_PACKAGE", "lightning.pytorch"))
LightningModule, Trainer = _lightning.LightningModule, _lightning.Trainer

SMALL = {"bucket_cap_mb": 0.002}  # several buckets, so that two are in flight
STRATEGIES = {
    "ddp powersgd": lambda **how: CompressedDDPStrategy(PowerSGD(2), **SMALL, **how),
    "ddp topk": lambda **how: CompressedDDPStrategy(TopK(0.1), **SMALL, **how),
    "ddp plain": lambda **how: CompressedDDPStrategy(PowerSGD(2, start_step=100), **SMALL, **how),
    "fsdp": lambda: CompressedFSDPStrategy(TopK(0.1)),
    "model parallel": lambda: CompressedModelParallelStrategy(TopK(0.1), data_parallel_size=2, tensor_parallel_size=1),
    "deepspeed": lambda: CompressedDeepSpeedStrategy(TopK(0.1), stage=1),
    "local": lambda **how: LocalSGDStrategy(every_n_steps=2, overlap_steps=1, **how),
    "tensor": lambda **how: TensorParallelStrategy(tensor_parallel_size=2, **how),
    "pipeline": lambda **how: PipelineParallelStrategy(pipeline_parallel_size=2, **how),
    "hybrid": lambda **how: HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2, **how),
    "data": lambda **how: HybridParallelStrategy(data_parallel_size=2, compression=TopK(0.1), **how),
    "zero 1": lambda **how: HybridParallelStrategy(data_parallel_size=2, zero_stage=1, **how),
    "zero 2": lambda **how: HybridParallelStrategy(data_parallel_size=2, zero_stage=2, **how),
    "auto": lambda **how: AutoParallelStrategy(**how),
    "stock": lambda **how: _lightning.strategies.DDPStrategy(**how),
}
SCRIPTS_ONLY = ("fsdp", "model parallel", "deepspeed")  # Lightning starts functions for DDP alone
COMPRESSION = "init_args: {{compression: {{class_path: lightning_parallel.TopK}}}}"
BY_CLASS = "{{class_path: lightning_parallel.Compressed{}Strategy, " + COMPRESSION + "}}"
NAMES = {
    "ddp powersgd": "ddp_powersgd",
    "ddp topk": BY_CLASS.format("DDP"),
    "fsdp": BY_CLASS.format("FSDP"),
    "deepspeed": BY_CLASS.format("DeepSpeed"),
    "local": "local_sgd",
    "tensor": "tensor_parallel",
    "pipeline": "pipeline_parallel",
    "auto": "auto_parallel",
    "stock": "ddp",
}
LOOPS = ("hook", "reduce")
SUCCEED = ("fit", "twice", "dropped", "again", "term", "term one")
FAIL = ("fails", "setup", "alone", "int", "int one", "killed")
ENDS = (*SUCCEED, *FAIL)


def ranks_of(kind):
    return 4 if kind == "hybrid" else 2


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
    """Fails in the backward pass, when some of the gradients have come; one is on each of two stages."""

    fails = False

    def forward(self, x):
        return _FailsBackward.apply(x) if Middle.fails else x


class Ending(LightningModule):
    def __init__(self, end, kind=""):
        super().__init__()
        torch.manual_seed(1)
        self.end, self.kind = end, kind
        layers = [nn.Linear(16, 16) for _ in range(12)]
        self.net = nn.Sequential(*layers[:3], Middle(), *layers[3:9], Middle(), *layers[9:])

    def configure_model(self):
        if self.kind == "model parallel" and self.device_mesh is not None and not hasattr(self, "is_sharded"):
            from torch.distributed.fsdp import fully_shard

            self.is_sharded = fully_shard(self.net, mesh=self.device_mesh["data_parallel"]) is not None

    def setup(self, stage):
        if self.end == "setup":
            raise Failure("as all ranks end")

    def training_step(self, batch, index):
        rank = self.trainer.strategy.local_rank
        if index == 2:
            if self.end in ("fails", "dropped", "again"):
                raise Failure("as all ranks end")
            if self.end == "killed" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.end == "term" or (self.end == "term one" and rank == 1):
                os.kill(os.getpid(), signal.SIGTERM)
            if self.end == "int" or (self.end == "int one" and rank == 1):
                os.kill(os.getpid(), signal.SIGINT)
        Middle.fails = self.end == "alone" and rank == 1 and index == 2
        return self.net(batch[0]).square().mean()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(24, 16)), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}


def train(kind, end, how):
    strategy = STRATEGIES[kind](**({} if kind in SCRIPTS_ONLY else {"start_method": how}))
    if hasattr(strategy, "verify") and kind != "hybrid":
        strategy.verify = "off"
    trainer = Trainer(strategy=strategy, devices=ranks_of(kind), max_epochs=1, **QUIET)
    trainer.fit(Ending(end, kind))


def by_cli(kind, end):
    options = {**QUIET, "strategy": NAMES[kind], "devices": ranks_of(kind), "max_epochs": 1}
    words = [f"--trainer.{name}={value}" for name, value in options.items()]
    cli = importlib.import_module(f"{_lightning.__name__}.cli").LightningCLI
    cli(Ending, args=["fit", *words, f"--model.end={end}", f"--model.kind={kind}"], save_config_callback=None)


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


def main(kind, end, how="popen"):
    if kind in LOOPS:
        loop(kind)
        return
    # Functions fail with an error of `torch.multiprocessing` in the first process.
    caught = contextlib.suppress(Exception) if end in ("dropped", "again") else contextlib.nullcontext()
    with caught:
        by_cli(kind, end) if how == "cli" else train(kind, end, how)
    if end in ("twice", "again"):
        by_cli(kind, "fit") if how == "cli" else train(kind, "fit", how)
    print("the end of the script", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which commands in the background ignore
    signal.alarm(150)  # not for ever if the test itself is ended
    torch.set_num_threads(1)
    main(*sys.argv[1:])
