"""The session: phases of Lightning's actions, and what is left of it after a `fit`: nothing."""

from importlib import import_module
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from lightning_parallel import (
    CommunicationProfiler,
    CompressedDDPStrategy,
    CompressionMonitor,
    DataShardingMonitor,
    HangWatchdog,
    MemoryProfiler,
    PipelineTimeline,
    ProfileReport,
    ReplicaDriftMonitor,
    StepBreakdown,
    StragglerMonitor,
    Throughput,
    TopK,
    tracing,
)
from lightning_parallel.callbacks.recording.session import phase_of
from tests.callbacks.conftest import place_rank
from tests.harness import run
from tests.strategies.models import Net, Samples, loader, trainer_for


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "data_wait"),
        ("[Strategy]DDPStrategy.training_step", "forward"),
        ("[LightningModule]Net.optimizer_step", "optimizer"),
        ("save_checkpoint", "checkpoint"),
        ("[Callback]Mine.backward", None),
        ("[Strategy]DDPStrategy.validation_step", None),
    ],
)
def test_phases_of_lightnings_actions(action, phase):
    assert phase_of(action) == phase


# ------------------------------------------------------------------------------------------------------ nothing stays


class Metered(Net):
    """Keeps a metric; fails in a step if it is told to."""

    def __init__(self, fails):
        super().__init__()
        self.mean = MeanMetric()
        self.fails = fails

    def training_step(self, batch, index):
        if self.fails and index == 2:
            raise OSError("no disk")
        loss = super().training_step(batch, index)
        self.log("mean", self.mean(loss))
        return loss


def described(value):
    """A value as far as it must not change: functions by name, containers by length, everything else by type."""
    if callable(value) and not isinstance(value, torch.nn.Module | type):
        return getattr(value, "__qualname__", type(value).__name__)
    if isinstance(value, (dict, list, tuple, set)):
        return type(value).__name__, len(value)
    return type(value).__name__


def snapshot(objects):
    return {
        f"{name}: {attribute}": described(value)
        for name, target in objects.items()
        for attribute, value in {**vars(target), "__class__": type(target).__qualname__}.items()
        if attribute != "recorded_durations"  # of Lightning's profiler, which counts the hooks of all callbacks
    }


def kernels_before_backends():
    names = [name for name in torch._C._dispatch_get_all_op_names() if "c10d" in name]
    return [name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect")]


def is_patched(method):
    return type(method) is FunctionType  # pybind's are no functions of Python


class Look(Callback):
    """Notes what everything is like when `fit` begins, or when it is over."""

    def __init__(self, data, found, kept):
        self.data, self.found, self.kept = data, found, kept

    def look(self, trainer, pl_module):
        objects = {f"module {name}": module for name, module in pl_module.named_modules()}
        objects |= {f"optimizer {index}": optimizer for index, optimizer in enumerate(trainer.optimizers)}
        objects |= {
            "wrapper": self.kept["wrapper"],
            "sampler": self.data.sampler,
            "batch_sampler": self.data.batch_sampler,
            "loader": self.data,
            "strategy": trainer.strategy,
            "precision": trainer.precision_plugin,
            "profiler": trainer.profiler,
            "torch.distributed": SimpleNamespace(**{k: v for k, v in vars(dist).items() if type(v) is FunctionType}),
            "dispatcher": SimpleNamespace(kernels=kernels_before_backends(), wait=[0] * is_patched(dist.Work.wait)),
            "torch.optim": import_module("torch.optim.optimizer"),
        }
        if hasattr(trainer.strategy, "compression"):
            reducer = trainer.strategy.compression
            # The last comparison stays: it is a result of the reducer, for its user.
            objects["compression"] = SimpleNamespace(observers=reducer.observers, sampled=[1] * reducer.sample_every)
        self.found.append(snapshot(objects))

    @property
    def state_key(self):
        return f"Look {id(self)}"


class LookFirst(Look):
    def on_fit_start(self, trainer, pl_module):
        self.kept["wrapper"] = trainer.strategy.model
        self.look(trainer, pl_module)


class LookLast(Look):
    def teardown(self, trainer, pl_module, stage):
        self.look(trainer, pl_module)
        if not hasattr(trainer.strategy, "compression"):
            self.kept["wrapper"].register_comm_hook(None, own_hook)

    def on_exception(self, trainer, pl_module, exception):
        self.teardown(trainer, pl_module, "fit")


def own_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def all_callbacks(folder, compresses):
    callbacks = [
        StepBreakdown(show_table=False),
        CommunicationProfiler(show_table=False),
        PipelineTimeline(show_table=False),
        Throughput(show_table=False, peak_flops=1e12),
        MemoryProfiler(show_table=False, every_n_steps=1),
        StragglerMonitor(show_table=False),
        ReplicaDriftMonitor(show_table=False, every_n_steps=2),
        DataShardingMonitor(show_table=False),
        HangWatchdog(dirpath=folder),
        ProfileReport(folder, show_diagnosis=False),
    ]
    return [*callbacks, CompressionMonitor(show_table=False)] if compresses else callbacks


def changes_in_fit(folder, compresses, fails, profiler, profiles):
    """What `fit` changes in all that the user can reach: attributes, by their values before and after."""
    _, size = place_rank()
    data = Samples()
    sampler = DistributedSampler(data, size, dist.get_rank())
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    kind = {"process_group_backend": "gloo"}
    strategy = CompressedDDPStrategy(TopK(0.1), **kind) if compresses else DDPStrategy(**kind)
    found, kept = [], {}
    callbacks = all_callbacks(folder, compresses) if profiles else []
    trainer = trainer_for(
        strategy,
        size,
        callbacks=[LookFirst(loader, found, kept), *callbacks, LookLast(loader, found, kept)],
        profiler=SimpleProfiler() if profiler else None,
        use_distributed_sampler=False,
        max_epochs=1,
    )
    module = Metered(fails).double()
    if fails:
        with pytest.raises(OSError, match="no disk"):
            trainer.fit(module, loader)
    else:
        trainer.fit(module, loader)
    assert tracing.active() is None
    before, after = found
    return {
        name: (before.get(name, "-"), after.get(name, "-"))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


class Latest(Callback):
    """Looks at what a rank knows of the others while it trains, and at what stands before the backends."""

    def __init__(self, monitor):
        self.monitor, self.known, self.kernels = monitor, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.known.append(len(self.monitor.session.latest))
        self.kernels = kernels_before_backends()


def exchange_often():
    _, size = place_rank()
    monitor = StragglerMonitor(show_table=False, every_n_batches=2, warmup_batches=0)
    latest = Latest(monitor)
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer_for(strategy, size, callbacks=[monitor, latest], max_epochs=8).fit(Net().double(), loader(size, 0))
    return monitor.report(), latest.known, bool(latest.kernels)


def test_the_first_rank_alone_knows_the_others_until_the_end():
    (report, _, sees), (other, known, _) = run(exchange_often, 2)
    assert sees
    assert set(known) == {0}
    assert report == other
    assert len(report["ranks"]) == 2
    assert report["steps"] > 20


@pytest.mark.parametrize("compresses", [False, True])
@pytest.mark.parametrize(("fails", "profiler"), [(False, False), (True, True)])
def test_nothing_is_left_behind(tmp_path, compresses, fails, profiler):
    options = {"folder": str(tmp_path), "compresses": compresses, "fails": fails, "profiler": profiler}
    for expected, found in zip(
        run(changes_in_fit, 2, profiles=False, **options), run(changes_in_fit, 2, profiles=True, **options)
    ):
        assert found == expected
