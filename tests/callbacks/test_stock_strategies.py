"""What strategies that are not ours communicate, and what ranks wait for: bytes by closed form, and sleeps."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel import CompressedDDPStrategy, CompressedDeepSpeedStrategy, PowerSGD
from lightning_parallel.callbacks import CommunicationProfiler, StepBreakdown, StragglerMonitor
from tests.callbacks.conftest import place_rank
from tests.harness import needs_fully_shard, run
from tests.strategies.models import Net, Samples, trainer_for
from tests.strategies.test_compressed_ddp import SMALL
from tests.timing import compares_durations, durations

STEPS, WARMUP = 25, 4  # nothing is said of slow ranks before 20 steps
LATE_S = 0.03


class Watched(Net):
    """Has buffers and a collective of its own; rank 1 is late in each forward."""

    def __init__(self, late_s=0.0):
        super().__init__(hidden=64)
        self.late_s = late_s
        self.net.insert(3, nn.BatchNorm1d(12))

    def training_step(self, batch, index):
        dist.all_reduce(torch.ones(7))
        time.sleep(self.late_s * (self.global_rank == 1))
        return super().training_step(batch, index)


class FullySharded(Watched):
    def configure_model(self):
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Divided(Watched):
    def configure_model(self):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


class CpuFSDP(FSDPStrategy):
    """Lightning refuses its own on CPU, and passes the index of a GPU."""

    def _setup_model(self, model):
        policy = self.kwargs.get("auto_wrap_policy")
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)


MODEL_PARALLEL: dict[str, Any] = {"process_group_backend": "gloo", "save_distributed_checkpoint": False}
STRATEGIES = {
    "ddp": (lambda: DDPStrategy(process_group_backend="gloo"), Watched),
    "compressed": (lambda: CompressedDDPStrategy(PowerSGD(2, **SMALL), process_group_backend="gloo"), Watched),
    "fsdp": (lambda: CpuFSDP(process_group_backend="gloo", auto_wrap_policy={nn.Linear}), Watched),
    "fully_shard": (lambda: ModelParallelStrategy(2, 1, **MODEL_PARALLEL), FullySharded),
    "dtensor": (lambda: ModelParallelStrategy(1, 2, **MODEL_PARALLEL), Divided),
    "deepspeed": (lambda: CompressedDeepSpeedStrategy(stage=2), Watched),
}


def fit(kind, late_s=0.0):
    rank, size = place_rank()
    options = {"warmup_batches": WARMUP, "show_table": False}
    callbacks = [kind(**options) for kind in (StepBreakdown, CommunicationProfiler, StragglerMonitor)]
    make, module = STRATEGIES[kind]
    data = torch.utils.data.DataLoader(Samples(length=STEPS * 4, dtype=torch.float32), batch_size=4)
    options = {"use_distributed_sampler": False, "max_epochs": 1}
    trainer_for(make(), size, callbacks=callbacks, **options).fit(module(late_s), data)
    return [callback.report() for callback in callbacks]


PARAMETERS = {"first": 12 * 64 + 64, "second": 64 * 12 + 12, "norms": 4 * 12, "head": 12 * 5 + 5}
ALL = sum(PARAMETERS.values())
FIRST, SECOND, NORMS, HEAD = PARAMETERS.values()
EVEN_HEAD = HEAD + 1  # FSDP1 pads what it flattens to equal parts

# (operation, numbers) -> calls in a step, on two ranks.
GRADIENTS = {
    "ddp": {("all_reduce", ALL): 1, ("broadcast", 2 * 12): 1, ("broadcast", 1): 1},
    "fsdp": {
        **{("all_gather", size): 2 for size in (FIRST, SECOND, EVEN_HEAD)},
        **{("reduce_scatter", size): 1 for size in (FIRST, SECOND, EVEN_HEAD, NORMS)},
        ("all_gather", NORMS): 1,
    },
    # Its head is divided by rows, five of them on two ranks; the root module is not gathered again for backward.
    "fully_shard": {
        **{("all_gather", size): 2 for size in (FIRST, SECOND)},
        **{("reduce_scatter", size): 1 for size in (FIRST, SECOND, NORMS + 6 * 12 + 6)},
        ("all_gather", NORMS + 6 * 12 + 6): 1,
    },
    "dtensor": {("all_reduce", 4 * 12): 1},
    # Parts begin at multiples of two numbers; messages of one number are about gradients that are not finite, and of
    # one byte about signals, on which compressed strategies agree.
    "deepspeed": {
        **{("all_reduce", ALL): 1, ("all_gather", -(-ALL // 4) * 4): 1, ("all_reduce", 1): 1},
        **{("all_reduce", 0): 1, ("broadcast", 1): -1},
    },
}
# A collective of the user's; Lightning asks whether rank 0 is to stop.
ALWAYS = {("all_reduce", 7): 1, ("broadcast", 1): 1}


def calls_of(report):
    """Calls in a step by operation and numbers."""
    found: dict[tuple[str, int], float] = {}
    for record in report["records"]:
        assert record["axis"] in ("data_parallel", "tensor_parallel", "world")  # the last of the agreement on signals
        size = 8 if record["dtype"] == "int64" else 4
        key = record["op"], record["payload_bytes"] // size
        found[key] = found.get(key, 0) + record["count"]
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("kind", STRATEGIES)
@compares_durations
def test_all_bytes_are_seen_and_a_late_rank(kind):
    if kind == "deepspeed":
        pytest.importorskip("deepspeed")
    if kind == "fully_shard":
        needs_fully_shard()
    breakdown, communication, stragglers = run(fit, 2, kind=kind, late_s=LATE_S)[0]
    if kind in GRADIENTS:
        expected = dict(ALWAYS)
        for key, count in GRADIENTS[kind].items():
            expected[key] = expected.get(key, 0) + count
        assert calls_of(communication) == {key: count for key, count in expected.items() if count}
    assert communication["desynchronised"] == []
    first, late = breakdown["ranks"]
    with durations():
        assert first["communication_exposed"] > 0.8 * LATE_S
        assert late["forward"] > LATE_S > 2 * max(first["forward"], first["backward"], late["backward"])
        if kind != "dtensor":  # its ranks divide the same work
            (found,) = stragglers["stragglers"]
            assert (found["rank"], found["cause"]) == (1, "forward")
            assert 0.8 * LATE_S < found["excess"] < 1.5 * LATE_S
