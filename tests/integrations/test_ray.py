"""Ray on this machine: Train's worker group with a worker that dies, a sweep of Tune, and a model behind Serve."""

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_parallel import load_weights
from lightning_parallel.checkpoint import SavedCheckpoint
from tests.harness import free_port

pytest.importorskip("ray.train", reason="ray is not installed; `make test-ray` installs it, 600 MB")
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray"
sys.path.append(str(EXAMPLE))
import serve as serve_example  # noqa: E402
import train as train_example  # noqa: E402
import tune as tune_example  # noqa: E402

pytestmark = pytest.mark.timeout(500)
EPOCHS = 3


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE)]),
        "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        ray.init(
            num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20, runtime_env={"env_vars": variables}
        )
        yield
        ray.shutdown()


class Dies(Callback):
    """Notes the metrics of each rank; rank 1 is killed once, when two checkpoints are in the storage."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_train_epoch_start(self, trainer, module):
        killed = self.folder / "killed"
        if trainer.current_epoch == EPOCHS - 1 and trainer.global_rank == 1 and not killed.exists():
            assert len(ray.train.get_all_reported_checkpoints()) == EPOCHS - 1  # it waits until they are
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_end(self, trainer, module):
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        with open(self.folder / f"rank{trainer.global_rank}", "a") as stream:
            stream.write(json.dumps([trainer.current_epoch, metrics]) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two stages whose second worker was killed, and the lines that each rank has noted."""
    folder = tmp_path_factory.mktemp("ray")
    result = TorchTrainer(
        train_example.train,
        train_loop_config={"epochs": EPOCHS, "callbacks": [Dies(folder)]},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo", timeout_s=120),
        run_config=RunConfig(storage_path=str(folder), name="run", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    noted = [[json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()] for rank in (0, 1)]
    return result, noted


@pytest.fixture(scope="module")
def whole():
    """The module that one process trains, without Ray."""
    seed_everything(1)
    net = train_example.Net()
    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, train_example.batches())
    return net, trainer.callback_metrics["train_loss"].item()


def checkpoint_of(result):
    return Path(result.checkpoint.path, RayTrainReportCallback.CHECKPOINT_NAME)


def test_a_killed_worker_is_replaced_and_the_run_ends_as_one_process_does(trained, whole):
    result, noted = trained
    net, loss = whole
    assert [epoch for epoch, _ in noted[0]] == list(range(EPOCHS)), "it went on from the last checkpoint"
    assert noted[0] == noted[1], "what the last stage logs is on every rank"
    assert result.metrics["train_loss"] == pytest.approx(loss, abs=1e-5)
    assert result.metrics["epoch"] == EPOCHS - 1
    saved = SavedCheckpoint.open(str(checkpoint_of(result)))
    parts = [name for name in saved.manifest.files if (checkpoint_of(result) / name).stat().st_size > 1000]
    assert len(parts) == 2, "each worker's part is in the storage"
    found = train_example.Net(learning_rate=9.0)
    load_weights(found, checkpoint_of(result))
    for name, value in net.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, atol=1e-5, rtol=1e-5)


def test_prepare_trainer_refuses_what_is_not_in_its_environment():
    with pytest.raises(RuntimeError, match="Invalid strategy class"):
        prepare_trainer(Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))


def test_tune_sees_the_metrics_of_each_trial(tmp_path):
    rates = [0.0, 0.05]
    found = tune_example.sweep(
        str(tmp_path),
        learning_rate=ray.tune.grid_search(rates),
        epochs=1,
        pipeline=1,
        tensor=2,
        checkpoint_format="full",
    )
    assert not found.errors
    losses = {one.config["learning_rate"]: one.metrics["train_loss"] for one in found}
    assert set(losses) == set(rates)
    assert losses[0.05] < losses[0.0]
    best = found.get_best_result()
    stored = torch.load(Path(best.metrics["checkpoint_path"], "checkpoint.ckpt"), weights_only=False)
    assert stored["hyper_parameters"]["learning_rate"] == 0.05
    train_example.Net().load_state_dict(stored["state_dict"])  # whole, though each worker had half of the features


def test_a_model_trained_in_parts_answers_requests(trained, whole):
    serve, port = pytest.importorskip("ray.serve", reason="ray[serve] is not installed"), free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    try:
        serve.run(serve_example.Predictor.bind(str(checkpoint_of(trained[0]))))
        rows = torch.randn(3, train_example.WIDTH, generator=torch.Generator().manual_seed(4))
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps({"x": rows.tolist()}).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            outputs = torch.tensor(json.load(answer))
    finally:
        serve.shutdown()
    torch.testing.assert_close(outputs, whole[0](rows).detach(), atol=1e-4, rtol=1e-4)
