"""World size 1 under every strategy and compressor: on a GPU with NCCL as stock Lightning trains there.

What is not marked `gpu` is the same on a CPU, so that the test itself is tested.
"""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torchmetrics import MeanMetric

from lightning_parallel import (
    CompressedDDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_parallel.comm import Group
from lightning_parallel.compression import BlockTopK, Cast, Dense, PowerSGD, Quantize, RandomK, Sign, TopK
from tests.strategies.models import loader, trainer_for
from tests.strategies.test_pipeline import Deep

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
on_devices = pytest.mark.parametrize("device", ["cpu", CUDA])

STRATEGIES = {
    "tensor": TensorParallelStrategy,
    "pipeline": lambda: PipelineParallelStrategy(num_microbatches=1),
    "virtual": lambda: PipelineParallelStrategy(num_microbatches=2, schedule="interleaved_1f1b", virtual_stages=2),
    "split": lambda: PipelineParallelStrategy(num_microbatches=2, schedule="zb_h1"),
    "hybrid": HybridParallelStrategy,
    "offload": lambda: HybridParallelStrategy(
        activation_checkpointing="full", cpu_offload=("optimizer", "activations")
    ),
    "ddp": lambda: CompressedDDPStrategy(Dense()),
}
COMPRESSORS = [Cast("bf16"), Quantize(8), Sign(), TopK(0.1), RandomK(0.1), BlockTopK(0.1), PowerSGD(2)]


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Overflows(Callback):
    """Puts an infinity into the gradients of one step."""

    def __init__(self, step):
        self.step = step

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == self.step:
            self.step = -1
            pl_module.head.weight.grad[0, 0] = float("inf")


def fit(strategy, device, precision="32-true", callbacks=(), module=None):
    module = module or Deep(momentum=0.0).float()
    trainer = trainer_for(
        strategy,
        1,
        accelerator="gpu" if device == "cuda" else "cpu",
        precision=precision,
        callbacks=list(callbacks),
        max_epochs=1,
    )
    trainer.fit(module, loader(dtype=torch.float32), loader(dtype=torch.float32))
    metrics = trainer.validate(module, loader(dtype=torch.float32), verbose=False)
    weights = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    weights["val_loss"] = torch.tensor(metrics[0]["val_loss"])
    if dist.is_initialized():
        dist.destroy_process_group()
    return trainer, weights


@on_devices
@pytest.mark.parametrize("name", STRATEGIES)
def test_full_precision_is_bit_for_bit_that_of_one_process(name, device):
    _, expected = fit("auto", device)
    _, found = fit(STRATEGIES[name](), device)
    # Sums over microbatches, and steps on another processor, round differently.
    exact = name not in ("virtual", "split") and (name, device) != ("offload", "cuda")
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, msg=key)


@pytest.mark.parametrize(
    ("precision", "device"),
    [("bf16-mixed", "cpu"), *(pytest.param(p, "cuda", marks=CUDA.marks) for p in ("bf16-mixed", "16-mixed"))],
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_mixed_precision_and_an_overflow_are_as_in_one_process(name, precision, device):
    steps = [Overflows(1)] if precision == "16-mixed" else []
    _, expected = fit("auto", device, precision, steps)
    _, found = fit(STRATEGIES[name](), device, precision, [Overflows(1)] if steps else [])
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=2e-2, atol=2e-3, msg=key)


@on_devices
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_compressors_train(compressor, device):
    trainer, weights = fit(CompressedDDPStrategy(compressor), device)
    assert all(value.isfinite().all() for value in weights.values())
    assert trainer.global_step == 4


@on_devices
@pytest.mark.parametrize("name", ["tensor", "pipeline", "hybrid"])
def test_one_module_is_fitted_evaluated_and_fitted_again(name, device):
    found = []
    for strategy in ("auto", STRATEGIES[name]):
        module = Deep(momentum=0.0).float()
        for _ in range(2):
            module.mean = MeanMetric()  # evaluation has left tensors of inference mode in it, on which stock fails
            _, weights = fit(strategy if strategy == "auto" else strategy(), device, module=module)
        found.append(weights)
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_objects_and_flags_travel_between_hosts():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    group = Group("world", (0,), 0, dist.group.WORLD)
    assert group.host_device == "cpu"
    assert group.is_ordered
    found = [None]
    dist.all_gather_object(found, {"a": 1})
    assert found == [{"a": 1}]
