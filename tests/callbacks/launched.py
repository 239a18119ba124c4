"""Runs `benchmarks/chaos.py train` on two processes by torchrun's own launcher, which forks this one: FOLDER FORMAT.

From the command line each process would import torch, at every restart.
"""

import argparse
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import chaos

folder, checkpoint_format = sys.argv[1:]
given = {"strategy": "hybrid", "steps": 16, "every": 3, "width": 32, "pause": 0.02, "seed": 0, "elastic": False}
options = argparse.Namespace(folder=folder, format=checkpoint_format, **given)
config = LaunchConfig(
    min_nodes=1,
    max_nodes=1,
    nproc_per_node=2,
    max_restarts=3,
    rdzv_backend="c10d",
    rdzv_endpoint="localhost:0",
    run_id=Path(folder).name,
    start_method="fork",
    monitor_interval=0.1,
)
elastic_launch(config, chaos.train)(options)
