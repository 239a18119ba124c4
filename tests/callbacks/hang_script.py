"""Two processes, one of which does not come: `python hang_script.py FOLDER (stop|skip)`."""

import os
import signal
import sys

import torch

from lightning_parallel import TensorParallelStrategy, comm
from lightning_parallel.callbacks import HangWatchdog
from tests.strategies.models import Net, loader, trainer_for

torch.set_num_threads(1)
FOLDER, WAY = sys.argv[1:]


class Stuck(Net):
    """The second rank misbehaves in the third step."""

    def training_step(self, batch, index):
        rank = int(self.trainer.global_rank)
        if rank == 1 and index == 2 and WAY == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if not (rank == 1 and index == 2 and WAY == "skip"):
            comm.all_reduce(torch.ones(3), self.trainer.strategy.groups.world)
        return super().training_step(batch, index)


rank = int(os.environ.get("LOCAL_RANK", "0"))
strategy = TensorParallelStrategy(tensor_parallel_size=1, data_parallel_size=2)
trainer = trainer_for(strategy, 2, callbacks=[HangWatchdog(4.0, FOLDER)], use_distributed_sampler=False)
print("pid", os.getpid(), flush=True)
trainer.fit(Stuck().double(), loader(2, rank))
print("the end", flush=True)
