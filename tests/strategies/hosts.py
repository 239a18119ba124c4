"""Trains over two hosts with two processes each, a stage of a pipeline on each host, its layers divided inside.

Arguments: FOLDER DEVICES, for a process that SLURM has started; FOLDER NAMESPACE ADDRESS RENDEZVOUS NODE, to start the
processes of a host by torchrun's own launcher, which forks this one: from the command line each would import torch.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__" and len(sys.argv) > 3:
    # Before threads begin: it is theirs too, then.
    namespace = os.open(f"/var/run/netns/{sys.argv[2]}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_parallel import HybridParallelStrategy
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep

SHORT = {"limit_train_batches": 2, "limit_val_batches": 1}


class Slow(Deep):
    """Tells that its third step begins; the last rank goes on when it may, and the others wait for its messages."""

    def training_step(self, batch, index):
        folder, rank = Path(self.trainer.default_root_dir), self.trainer.global_rank
        if self.trainer.global_step == 2:
            (folder / f"at{rank}").touch()
            until = time.monotonic() + 100
            while rank == 3 and (folder / "wait").exists() and time.monotonic() < until:
                time.sleep(0.02)
        return super().training_step(batch, index)


def train(folder, devices=2):
    torch.set_num_threads(1)
    strategy = HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=2)
    trainer = trainer_for(strategy, devices, num_nodes=2, default_root_dir=folder, **SHORT)
    module = Slow()
    trainer.fit(module, loader(), loader())
    groups, rank = strategy.mesh.coordinate(trainer.global_rank), trainer.global_rank
    told = {
        "node": trainer.node_rank,
        "stage": groups.pipeline_parallel,
        "shard": groups.tensor_parallel,
        "environment": type(strategy.cluster_environment).__name__,
        "address": os.environ["MASTER_ADDR"],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    if rank == 0:
        torch.save((module.state_dict(), dict(trainer.callback_metrics)), folder / "trained.pt")


def launch(folder, address, rendezvous, node):
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous,
        # The name of the machine is that of both hosts: say which has the rendezvous, and what each one's address is.
        rdzv_configs={"is_host": node == "0"},
        local_addr=address,
        run_id="hosts",
        start_method="fork",
        monitor_interval=0.1,
    )
    elastic_launch(config, train)(folder)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) > 3:
        launch(folder, *sys.argv[3:])
    else:
        train(folder, int(sys.argv[2]))
