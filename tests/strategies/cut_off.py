"""Trains on one of two hosts, network namespaces, and saves after each step.

Arguments: NAMESPACE ADDRESS PORT RANK FOLDER STEPS.
"""

import ctypes
import os
import sys
from datetime import timedelta
from pathlib import Path

namespace, address, port, rank, folder, steps = sys.argv[1:]
# Before threads begin: it is theirs too, then.
if ctypes.CDLL(None, use_errno=True).setns(os.open(f"/var/run/netns/{namespace}", os.O_RDONLY), 0x40000000):
    raise OSError(ctypes.get_errno(), "setns")
os.environ.update(MASTER_ADDR=address, MASTER_PORT=port, NODE_RANK=rank, LOCAL_RANK="0", WORLD_SIZE="2")
os.environ.update(GLOO_SOCKET_IFNAME="eth0")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from lightning_parallel import PipelineParallelStrategy  # noqa: E402
from lightning_parallel.comm import presence  # noqa: E402
from tests.strategies.models import loader, trainer_for  # noqa: E402
from tests.strategies.test_pipeline import Deep  # noqa: E402

presence.SILENT_S = 6.0
strategy = PipelineParallelStrategy(num_microbatches=2, checkpoint_format="sharded", timeout=timedelta(seconds=8))
saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
trainer = trainer_for(
    strategy,
    1,
    num_nodes=2,
    enable_checkpointing=True,
    callbacks=[saves],
    max_epochs=-1,
    max_steps=int(steps),
    limit_val_batches=0,
)
trainer.fit(Deep(), loader(), ckpt_path=folder if (Path(folder) / "latest.json").exists() else None)
