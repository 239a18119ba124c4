"""Ray on this machine: a trial of Tune whose worker group loses a worker, and a model behind Serve.

One test, as each that needs the cluster would start one in its own pytest worker, and of one run, as each worker of Ray
imports for seconds what a fit needs for milliseconds.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_parallel import load_weights
from lightning_parallel.checkpoint import SavedCheckpoint
from tests.harness import free_port

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray"


def why_ray_is_missing():
    """What `make test-more` has noted when it could not install it."""
    log = ROOT / ".venv" / "ray.log"
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()] if log.exists() else []
    errors = [line for line in lines if "ERROR" in line] or lines
    return f"ray is not installed; {errors[-1] if errors else '`make test-more` installs it, 600 MB'}"


pytest.importorskip("ray.train", reason=why_ray_is_missing())
import ray  # noqa: E402
from ray.train.lightning import RayTrainReportCallback, prepare_trainer  # noqa: E402

sys.path.append(str(EXAMPLE))
import serve as serve_example  # noqa: E402
import train as train_example  # noqa: E402
import tune as tune_example  # noqa: E402

from tests.integrations.ray_runs import EPOCHS, STRATEGIES, fits  # noqa: E402

pytestmark = pytest.mark.ray
RATE = 0.04


@pytest.fixture
def cluster():
    variables = {  # its processes inherit them
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE)]),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20)
        yield
        ray.shutdown()


def one_process():
    """The module that one process trains, without Ray, and its loss."""
    seed_everything(1)
    net = train_example.Net(RATE)
    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, train_example.batches())
    return net, trainer.callback_metrics["train_loss"].item()


@pytest.mark.timeout(500)
def test_strategies_train_in_rays_workers_and_serve_what_they_trained(cluster, tmp_path, subtests):
    net, loss = one_process()
    found = tune_example.sweep(
        str(tmp_path / "storage"), fits, folder=str(tmp_path), learning_rate=ray.tune.grid_search([RATE])
    )
    assert not found.errors
    best = found.get_best_result()
    stored = Path(best.metrics["checkpoint_path"], RayTrainReportCallback.CHECKPOINT_NAME)

    with subtests.test("what compressors remember is in the folder of each worker"):
        for name in STRATEGIES:
            for rank in (0, 1):
                noted = json.loads((tmp_path / name / f"rank{rank}").read_text())
                assert (noted["equal"], noted["steps"], noted["world"]) == (True, 4, 2), name
                memory = [file for file in noted["files"] if file.startswith("rank-state/checkpoint.ckpt/")]
                assert [file[-5:] for file in memory] == [f"-{rank}.pt"], name

    with subtests.test("a killed worker is replaced, and the run ends as that of one process"):
        lines = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1)]
        first, second = ([json.loads(line) for line in told] for told in lines)
        assert (tmp_path / "killed").exists()
        assert [epoch for epoch, _, _ in first] == list(range(EPOCHS)), "it went on from the last checkpoint"
        assert [mesh for _, mesh, _ in first] == [[1, 1, 1, 2], *[[1, 2, 1, 1]] * (EPOCHS - 1)]
        assert first == second, "what the last stage logs is on every rank"

    with subtests.test("Tune sees the metrics of the last stage"):
        assert best.config["learning_rate"] == RATE
        assert best.metrics["train_loss"] == pytest.approx(loss, abs=1e-5)
        assert best.metrics["epoch"] == EPOCHS - 1

    with subtests.test("the storage has each worker's part"):
        saved = SavedCheckpoint.open(str(stored))
        assert len([name for name in saved.manifest.files if (stored / name).stat().st_size > 1000]) == 2
        trained = train_example.Net(learning_rate=9.0)
        load_weights(trained, stored)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(trained.state_dict()[name], value, atol=1e-5, rtol=1e-5)
        (full,) = sorted(stored.parents[1].glob(f"*/{RayTrainReportCallback.CHECKPOINT_NAME}"))[:1]
        whole = torch.load(full, weights_only=False)["state_dict"]  # though each worker had half of the features
        assert {name: value.shape for name, value in whole.items()} == {
            name: value.shape for name, value in net.state_dict().items()
        }

    with (
        subtests.test("Ray refuses what does not run in its environment"),
        pytest.raises(RuntimeError, match="Invalid"),
    ):
        prepare_trainer(Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))

    with subtests.test("Serve answers with the model that was trained in parts"):
        rows = torch.randn(3, train_example.WIDTH, generator=torch.Generator().manual_seed(4))
        outputs = served(stored, rows)
        torch.testing.assert_close(outputs, net(rows).detach(), atol=1e-4, rtol=1e-4)


def served(checkpoint, rows):
    from ray import serve

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    try:
        serve.run(serve_example.Predictor.bind(str(checkpoint)))
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps({"x": rows.tolist()}).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return torch.tensor(json.load(answer))
    finally:
        serve.shutdown()
