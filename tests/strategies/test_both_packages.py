"""The same strategies and callbacks under Trainers of `lightning.pytorch` and of `pytorch_lightning`."""

import copy
import functools
import importlib
import os
import pickle
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from lightning_parallel import (
    AutoResume,
    CommunicationProfiler,
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    HangWatchdog,
    HybridParallelStrategy,
    LocalSGDStrategy,
    MemoryProfiler,
    PipelineParallelStrategy,
    PipelineTimeline,
    PowerSGD,
    ProfileReport,
    StepBreakdown,
    TensorParallelStrategy,
    comm,
)
from lightning_parallel.compat import patched, twins
from lightning_parallel.strategies import parallel
from tests.harness import distributed, needs_fully_shard, run_script
from tests.pipeline.other_models import Block
from tests.strategies.models import loader

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@functools.cache
def project(package):
    """Return a project that is written for `package`."""

    class Project(importlib.import_module(package).LightningModule):
        def __init__(self, blocks: int = 4):
            super().__init__()
            torch.manual_seed(5)
            self.model = nn.Sequential(nn.Linear(12, 8), *(Block(8) for _ in range(blocks)), nn.Linear(8, 6)).double()

        def forward(self, x):
            return self.model(x)

        def training_step(self, batch, index):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch, index):
            self.log("held_out", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch, index):
            return self(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Project


def trainer_of(package, strategy, devices, group, **options):
    rank = group.rank if devices > 1 else 0
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(devices))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    given = {"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 1, **dict.fromkeys(quiet, False), **options}
    return importlib.import_module(package).Trainer(strategy=strategy, devices=devices, **given)


def life(package, strategy, devices, group, folder, callbacks=()):
    """Train, resume for another epoch, evaluate; return what came out."""
    batches, module, kind = loader(), project(package)(), type(strategy)
    first = trainer_of(package, strategy, devices, group, limit_train_batches=2)
    first.fit(module, batches, batches)
    path = folder / "first.ckpt"
    first.save_checkpoint(path)
    module, strategy = (
        project(package)(),
        copy.deepcopy(strategy) if devices == 1 else kind(verify=strategy.verify, **SIZES[devices]),
    )
    trainer = trainer_of(
        package, strategy, devices, group, limit_train_batches=2, max_epochs=2, callbacks=list(callbacks)
    )
    trainer.fit(module, batches, batches, ckpt_path=path)
    assert devices == 1 or trainer.strategy is strategy
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    found["validated"] = trainer.validate(module, batches, verbose=False)[0]["held_out"]
    found["tested"] = trainer.test(module, batches, verbose=False)[0]["held_out"]
    predicted = torch.cat(trainer.predict(module, batches))
    trainer.save_checkpoint(folder / "last.ckpt")
    return found, predicted, trainer


SIZES = {2: {"tensor_parallel_size": 2}, 4: {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}


def equals_one_process(kind, packages, group):
    devices = group.size
    for package in packages:
        folder = Path(comm.broadcast_object(tempfile.mkdtemp(), group))
        alone = Path(tempfile.mkdtemp())
        metrics, predicted, _ = life(package, "auto", 1, group, alone)
        callbacks = []
        if devices == 4:
            callbacks = [
                profiler(show_table=False) for profiler in (StepBreakdown, CommunicationProfiler, MemoryProfiler)
            ]
            callbacks += [PipelineTimeline(show_table=False), HangWatchdog(), ProfileReport(str(folder / "profile"))]
        strategy = kind(verify="auto" if devices == 2 else "off", **SIZES[devices])
        found_metrics, found, trainer = life(package, strategy, devices, group, folder, callbacks)
        assert found_metrics == pytest.approx(metrics, rel=1e-6)  # epoch means are float32
        torch.testing.assert_close(found, predicted, rtol=1e-10, atol=1e-10)
        assert isinstance(trainer.strategy, kind)
        assert isinstance(trainer.strategy, importlib.import_module(f"{package}.strategies").ParallelStrategy)
        assert not callbacks or callbacks[0].report()["world_size"] == devices
        if group.rank == 0:
            assert not callbacks or (folder / "profile" / "report.json").exists()
            states = [torch.load(path / "last.ckpt", weights_only=False)["state_dict"] for path in (folder, alone)]
            for name, value in states[1].items():
                torch.testing.assert_close(states[0][name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_tensor_parallel_runs_of_both_packages_equal_one_process(group):
    equals_one_process(TensorParallelStrategy, PACKAGES, group)


@pytest.mark.sweep(kept=None)
@distributed(world_size=4)
def test_hybrid_runs_equal_one_process(group):
    equals_one_process(HybridParallelStrategy, PACKAGES[1:], group)


@distributed(world_size=2)
def test_local_steps_of_the_other_package(group):
    whole, local = project(PACKAGES[1])(), project(PACKAGES[1])()
    trainer_of(PACKAGES[1], "auto", 1, group).fit(whole, loader())
    trainer_of(PACKAGES[1], LocalSGDStrategy(every_n_steps=1), 2, group).fit(local, loader(2, group.rank))
    for mine, theirs in zip(local.parameters(), whole.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def compressed(kind, **options):
    options = {"compression": PowerSGD(rank=1, min_numel=8), **options}
    return kind(**options)


KINDS = {
    "ddp": lambda: compressed(CompressedDDPStrategy),
    "fsdp": lambda: compressed(CompressedFSDPStrategy, auto_wrap_policy={Block}),
    "fully_shard": lambda: compressed(CompressedModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1),
    "replicas": lambda: compressed(TensorParallelStrategy, tensor_parallel_size=1),
    "name": lambda: "ddp_powersgd",
    "deepspeed": lambda: compressed(CompressedDeepSpeedStrategy, stage=1),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_compression_is_the_same_in_both_packages(kind, group):
    losses = []
    for package in PACKAGES:
        module = project(package)()
        if kind == "deepspeed":
            pytest.importorskip("deepspeed")
            module.float()
        if kind == "fully_shard":
            needs_fully_shard(compressed=True)
            from torch.distributed.fsdp import fully_shard

            module.configure_model = lambda module=module: fully_shard(module, mesh=module.device_mesh["data_parallel"])
        trainer = trainer_of(package, KINDS[kind](), 2, group, max_epochs=2)
        dtype = next(module.parameters()).dtype
        trainer.fit(module, loader(2, group.rank, dtype=dtype))
        assert trainer.strategy.compression.step == 8
        losses.append(trainer.callback_metrics["loss"].item())
    assert losses[0] == losses[1]


@pytest.mark.sweep
@pytest.mark.parametrize("package", PACKAGES)
def test_yaml(package, tmp_path):
    (tmp_path / "config.yaml").write_text("""
trainer:
  accelerator: cpu
  devices: 2
  strategy:
    class_path: lightning_parallel.HybridParallelStrategy
    init_args: {pipeline_parallel_size: 2, compression: {class_path: lightning_parallel.PowerSGD}}
  callbacks:
    - class_path: lightning_parallel.PipelineTimeline
    - {class_path: lightning_parallel.ProfileReport, init_args: {dirpath: here}}
""")
    kind = importlib.import_module(f"{package}.cli").LightningCLI
    cli = kind(project(package), run=False, args=["--config", f"{tmp_path}/config.yaml"], save_config_callback=None)
    assert isinstance(cli.trainer.strategy, HybridParallelStrategy)
    assert isinstance(cli.trainer.strategy, importlib.import_module(f"{package}.strategies").ParallelStrategy)
    assert isinstance(cli.trainer.strategy.compression, PowerSGD)
    callback = importlib.import_module(package).Callback
    assert all(isinstance(found, callback) for found in cli.trainer.callbacks)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["tensor_parallel", "lightning_parallel.TensorParallelStrategy"])
def test_strategies_by_name_from_the_command_line(package, name):
    arguments = [f"--trainer.strategy={name}", "--trainer.devices=2", "--trainer.accelerator=cpu"]
    kind = importlib.import_module(f"{package}.cli").LightningCLI
    trainer = kind(project(package), run=False, args=arguments, save_config_callback=None).trainer
    assert isinstance(trainer.strategy, TensorParallelStrategy)
    assert packages_of(trainer.strategy) <= {package.partition(".")[0], "lightning_fabric"}


class Mine(CompressedDDPStrategy):
    """A user's class: its methods name it in `super()`."""

    def setup_environment(self):
        return super().setup_environment()


@pytest.mark.parametrize("kind", [CompressedDDPStrategy, Mine])
def test_a_strategy_moves_with_what_it_holds_and_back_and_is_pickled(kind):
    strategy = kind(PowerSGD(), cluster_environment=LightningEnvironment())
    trainer = importlib.import_module("pytorch_lightning").Trainer(strategy=strategy, accelerator="cpu", devices=1)
    assert trainer.strategy is strategy
    assert isinstance(strategy, CompressedDDPStrategy)
    pickled = pickle.dumps(strategy)
    assert packages_of(strategy) == {"pytorch_lightning", "lightning_fabric"}
    twins._return(strategy)
    assert packages_of(strategy) == {"lightning"}
    # As in a process that was spawned: there the user's class has its own bases.
    assert packages_of(pickle.loads(pickled)) == {"pytorch_lightning", "lightning_fabric"}
    twins._return(kind(PowerSGD()))


def packages_of(strategy):
    kinds = [*type(strategy).__mro__, *map(type, vars(strategy).values())]
    return {kind.__module__.partition(".")[0] for kind in kinds} & {
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
    }


def test_names_of_strategies_are_those_of_both_packages():
    ours, theirs = (importlib.import_module(f"{package}.strategies").StrategyRegistry for package in PACKAGES)
    assert {name for name in ours if name not in theirs} == set()
    assert theirs["ddp_powersgd"]["description"] == ours["ddp_powersgd"]["description"]
    assert isinstance(theirs.get("pipeline_parallel"), PipelineParallelStrategy)


def test_another_version_is_refused():
    trainer = importlib.import_module("pytorch_lightning").Trainer
    with (
        patched(importlib.import_module("pytorch_lightning"), "__version__", "2.1.0"),
        pytest.raises(ImportError, match="got 2.1.0"),
    ):
        trainer(strategy=TensorParallelStrategy(), accelerator="cpu", devices=1)


@pytest.mark.parametrize("name", ["x", "x.y", "strategies.x", "lightning.x", "strategies.parallel.x"])
def test_what_is_no_twin_is_not_found(name):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"lightning_parallel.compat.pytorch_lightning.{name}")


def test_twins_are_of_the_same_lines():
    twin = importlib.import_module(f"{twins.__package__}.pytorch_lightning.strategies.parallel")
    assert twin.TensorParallelStrategy is not TensorParallelStrategy
    assert twin.__file__ == parallel.__file__
    codes = [kind.__init__.__code__ for kind in (twin.TensorParallelStrategy, TensorParallelStrategy)]
    assert codes[0].co_filename == codes[1].co_filename
    assert list(codes[0].co_lines()) == list(codes[1].co_lines())
    errors = importlib.import_module(
        f"{twins.__package__}.pytorch_lightning.strategies.self_check.proof"
    ).SelfCheckError
    assert errors is importlib.import_module("lightning_parallel.strategies.self_check.proof").SelfCheckError


SCRIPT = """
import sys

for name in [name for name in sys.modules if name.startswith(("lightning_parallel", "pytorch_lightning"))]:
    del sys.modules[name]
sys.modules["pytorch_lightning"] = None

from lightning.pytorch import Callback, Trainer
from lightning_parallel import MeasuringCallback, StepBreakdown, TensorParallelStrategy
from tests.strategies.models import Net, loader

assert MeasuringCallback.__mro__[1].__bases__ == (Callback,)
trainer = Trainer(accelerator="cpu", devices=1, strategy=TensorParallelStrategy(), max_epochs=1, logger=False,
                  enable_checkpointing=False, callbacks=[StepBreakdown()])
trainer.fit(Net().double(), loader(), loader())
print("DONE", type(trainer.strategy) is TensorParallelStrategy)
"""


def test_without_the_other_package(tmp_path):
    path = tmp_path / "project.py"
    path.write_text(SCRIPT)
    _, out, err = run_script(path)
    assert "DONE True" in out, err


LATE = """
import importlib.util
import sys

for name in [name for name in sys.modules if name.startswith(("lightning_parallel", "pytorch_lightning"))]:
    del sys.modules[name]

from lightning_parallel import StepBreakdown, TensorParallelStrategy
from lightning_parallel.compat.twins import Callback
from lightning.pytorch import Callback as OfLightning

assert "pytorch_lightning" not in sys.modules

class Own(Callback):
    pass

own = Own()
assert importlib.util.find_spec("pytorch_lightning")  # asks, and does not import
import pytorch_lightning
from tests.strategies.models import loader
from tests.strategies.test_both_packages import project

assert isinstance(own, pytorch_lightning.Callback) and isinstance(own, OfLightning)
trainer = pytorch_lightning.Trainer(accelerator="cpu", devices=1, strategy=TensorParallelStrategy(), max_epochs=1,
                                    logger=False, enable_checkpointing=False, callbacks=[own, StepBreakdown()])
trainer.fit(project("pytorch_lightning")(), loader())
print("DONE", isinstance(trainer.strategy, TensorParallelStrategy), trainer.global_step > 0)
"""


def test_the_other_package_may_come_later(tmp_path):
    path = tmp_path / "project.py"
    path.write_text(LATE)
    _, out, err = run_script(path)
    assert "DONE True True" in out, err


class _Interrupt(twins.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            raise InterruptedError


@pytest.mark.sweep
@pytest.mark.parametrize("package", PACKAGES)
@distributed(world_size=2)
def test_an_interrupted_run_goes_on(package, tmp_path, group):
    found = []
    for folder, interrupted in (("whole", False), ("cut", True), ("cut", False)):
        callbacks = [
            AutoResume(str(tmp_path / folder), every_n_train_steps=2),
            *([_Interrupt()] if interrupted else ()),
        ]
        strategy = HybridParallelStrategy(tensor_parallel_size=2, verify="off")
        trainer, module = trainer_of(package, strategy, 2, group, callbacks=callbacks), project(package)()
        with pytest.raises(InterruptedError) if interrupted else nullcontext():
            trainer.fit(module, loader())
        found.append((trainer.global_step, module.state_dict()))
    (steps, expected), _, (reached, weights) = found
    assert reached == steps > 3
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
