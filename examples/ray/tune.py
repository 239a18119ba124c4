"""Try learning rates with Ray Tune, each on a worker group of its own: `python examples/ray/tune.py`."""

import tempfile
from collections.abc import Callable

import ray.tune
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from train import train


def trial(config: dict) -> None:
    """Drive one worker group; it takes a CPU beside those of its two workers."""
    TorchTrainer(
        config["loop"],
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        # What the last stage has logged is on every rank, so also on the first one, whose metrics Tune takes.
        run_config=RunConfig(
            name=f"trial-{ray.tune.get_context().get_trial_id()}",
            storage_path=config["storage"],
            failure_config=FailureConfig(max_failures=1),
            callbacks=[TuneReportCallback()],
        ),
    ).fit()


def sweep(storage: str, loop: Callable[[dict], None] = train, **space: object) -> ray.tune.ResultGrid:
    """Run one trial of `loop` per value of `space`; returns their results."""
    return ray.tune.Tuner(
        trial,
        param_space={"storage": storage, "loop": loop, **space},
        tune_config=ray.tune.TuneConfig(metric="train_loss", mode="min", max_concurrent_trials=1),
        run_config=ray.tune.RunConfig(storage_path=storage, name="sweep"),
    ).fit()


if __name__ == "__main__":
    found = sweep(tempfile.mkdtemp(), learning_rate=ray.tune.grid_search([0.01, 0.05]))
    best = found.get_best_result()
    print(best.config["learning_rate"], best.metrics["train_loss"], best.metrics["checkpoint_path"])
