"""Compressed gradients under DeepSpeed, through the Trainer, on CPU."""

import functools

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning_utilities.core.imports import RequirementCache
from torch import nn

from lightning_parallel import CompressedDDPStrategy, CompressedDeepSpeedStrategy, PowerSGD, Quantize, TopK, comm
from lightning_parallel.compression import Dense
from lightning_parallel.strategies.compressed import deepspeed as compressed_deepspeed
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for
from tests.strategies.test_compressed_ddp import COMPRESSORS, SMALL, Equal

pytest.importorskip("deepspeed")


def computes_in_float16():
    """Whether DeepSpeed does on this device: on CPU, oneDNN needs AVX-512 FP16 for it."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


MANY_BUCKETS = {"reduce_bucket_size": 100}  # elements; the largest parameters have more


def call(check, kind, arguments):
    """Call what `test_compressed` checks, as a job of this module: its ranks serve no other one."""
    check(kind, **arguments)


def fit(module, strategy, group, ckpt_path=None, **kwargs):
    trainer = trainer_for(strategy, group.size, **kwargs)
    trainer.fit(module, loader(group.size, group.rank, dtype=torch.float32), ckpt_path=ckpt_path)
    return trainer


def weights(trainer):
    """The parameters, put together from all ranks under ZeRO 3."""
    import deepspeed

    module = trainer.lightning_module
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=trainer.strategy.zero_stage_3):
        return {name: parameter.detach().float().clone() for name, parameter in module.named_parameters()}


def one_process(module=None, **kwargs):
    trainer = trainer_for(**kwargs)
    trainer.fit(module or Net(), loader(dtype=torch.float32))
    return {name: parameter.detach().clone() for name, parameter in trainer.lightning_module.named_parameters()}


def assert_close(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_runs_on_cpu_as_one_process(stage, group):
    assert_close(weights(fit(Net(), CompressedDeepSpeedStrategy(stage=stage), group)), one_process())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"stage": 0}, "topk_int8"),
        ({"stage": 1, **MANY_BUCKETS}, "topk_int8"),
        ({"stage": 1, "overlap_comm": False}, "powersgd"),
        ({"stage": 2, **MANY_BUCKETS}, "powersgd"),
        ({"stage": 2, "overlap_comm": False}, "topk_int8"),
    ],
)
@distributed(world_size=2)
def test_compresses_as_under_ddp(options, name, group):
    """Parameters that ZeRO gathers would be equal even if the means were not: so they are compared with DDP's."""
    expected = _under_ddp(name)
    watch = Equal(group)
    strategy = CompressedDeepSpeedStrategy(COMPRESSORS[name](), **options)
    found = weights(fit(Net(), strategy, group, callbacks=[watch]))
    assert watch.steps == 8
    assert_close(found, expected)
    assert strategy.compression.residual_norm > 0


@functools.cache  # on all ranks alike
def _under_ddp(name):
    module = Net()
    fit(module, CompressedDDPStrategy(COMPRESSORS[name]()), comm.Group.of())
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


PRECISIONS = {
    "bf16": ("bf16-mixed", {}),
    "bf16 summed in fp32": ("bf16-mixed", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16": ("16-mixed", {"fp16": {"enabled": True, "initial_scale_power": 8}}),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stage", "name"), [(0, "bf16"), (1, "bf16 summed in fp32"), (1, "fp16"), (2, "bf16"), (2, "fp16")]
)
@distributed(world_size=2)
def test_half_precision(stage, name, group):
    precision, extra = PRECISIONS[name]
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, **extra}
    if name == "fp16" and not computes_in_float16():
        with pytest.raises(ValueError, match="must compute in float16"):
            fit(Net(), CompressedDeepSpeedStrategy(Dense(), config=config), group, precision=precision)
        return
    found = {}
    for compressor in (None, Dense(), PowerSGD(2, **SMALL)):
        strategy = CompressedDeepSpeedStrategy(compressor, config=dict(config))
        found[compressor] = weights(fit(Net(), strategy, group, precision=precision))
    before = {name: parameter.detach() for name, parameter in Net().named_parameters()}
    deepspeed, dense, compressed = (
        torch.cat([(named[name] - before[name]).flatten() for name in before]) for named in found.values()
    )
    assert (dense - deepspeed).norm() < 0.02 * deepspeed.norm()
    assert (compressed - deepspeed).norm() < 0.5 * deepspeed.norm()
    assert [compressor.step for compressor in found if compressor] == [8, 8]


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_residuals_are_free_of_the_loss_scale(stage, group):
    if not computes_in_float16():
        pytest.skip("this processor has no float16, and DeepSpeed no other way to scale losses")
    norms = []
    for power in (2, 10):
        strategy = CompressedDeepSpeedStrategy(PowerSGD(2, **SMALL), stage=stage, initial_scale_power=power)
        fit(Net(), strategy, group, precision="16-mixed")
        norms.append(strategy.compression.residual_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


class Awkward(LightningModule):
    """Tied, frozen and unused parameters, in two groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.unused, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.head(self.second(self.first(self.frozen(x)).relu())), y)

    def configure_optimizers(self):
        biases = [p for p in self.parameters() if p.requires_grad and p.ndim == 1]
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        return torch.optim.SGD([{"params": matrices, "lr": 0.1}, {"params": biases, "lr": 0.2}], momentum=0.9)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_awkward_parameters(stage, group):
    strategy = CompressedDeepSpeedStrategy(Dense(), stage=stage)
    assert_close(weights(fit(Awkward(), strategy, group)), one_process(Awkward()))
    strategy = CompressedDeepSpeedStrategy(TopK(0.2, **SMALL), stage=stage)
    expected = Awkward()
    fit(expected, CompressedDDPStrategy(TopK(0.2, **SMALL), find_unused_parameters=True), group)
    assert_close(
        weights(fit(Awkward(), strategy, group)), {name: p.detach() for name, p in expected.named_parameters()}
    )
    assert not [name for name in strategy.compression.state_dict()["residual"] if "frozen" in name]


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_deepspeeds_own_communication_dtype(stage, group):
    strategy = CompressedDeepSpeedStrategy(stage=stage, communication_data_type="bf16")
    found = weights(fit(Net(), strategy, group))
    assert strategy.deepspeed_engine.communication_data_type == torch.bfloat16
    assert_close(found, one_process(), tolerance=1e-2)


def test_what_cannot_be_combined_is_refused():
    for options, message in (
        ({"stage": 3}, "got stage 3"),
        ({"config": {"zero_optimization": {"stage": 3}}}, "got stage 3"),
        ({"communication_data_type": "bf16"}, "got both"),
        ({"quantized_gradients": True, "stage": 2}, "under ZeRO 3 only"),
    ):
        with pytest.raises(ValueError, match=message):
            CompressedDeepSpeedStrategy(PowerSGD(4), **options)


@distributed(world_size=2)
def test_engines_that_cannot_be_compressed_are_refused(group):
    for options, trainer, message in (
        ({"stage": 2}, {"accumulate_grad_batches": 2}, "after every batch"),
        ({"contiguous_gradients": False}, {}, "contiguous_gradients"),
        ({"stage": 0}, {"precision": "16-mixed"}, "loss scale" if computes_in_float16() else "must compute in float16"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(Net(), CompressedDeepSpeedStrategy(Quantize(8), **options), group, **trainer)
    with pytest.raises(RuntimeError, match="CUDA only"):
        fit(Net(), CompressedDeepSpeedStrategy(stage=3, quantized_gradients=True), group)


@pytest.mark.parametrize("run", ["fit", "validate"])
@pytest.mark.parametrize(
    ("precision", "config", "message"),
    [
        (
            "16-mixed",
            {},
            "float16, as precision='16-mixed' asks; got a CPU, .* Use precision='bf16-mixed' or '32-true'",
        ),
        ("16-true", {}, "float16, as precision='16-true' asks"),
        ("32-true", {"fp16": {"enabled": True}}, "float16, as the configuration's `fp16` asks"),
        (
            "bf16-mixed",
            {},
            "bfloat16, as precision='bf16-mixed' asks; got a CPU, .* Use precision='16-mixed' or '32-true'",
        ),
        ("32-true", {"fp16": {"enabled": False}}, None),
    ],
)
def test_a_type_that_the_device_does_not_have_is_refused_at_the_start(run, precision, config, message, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    class Reached(Exception):
        """Where processes would meet."""

    def meet(strategy):
        raise Reached

    for name in ("is_fp16_supported", "is_bf16_supported"):
        monkeypatch.setattr(type(get_accelerator()), name, lambda self: False)
    monkeypatch.setattr(CompressedDeepSpeedStrategy, "setup_distributed", meet)
    strategy = CompressedDeepSpeedStrategy(Dense(), config={"zero_optimization": {"stage": 1}, **config})
    with pytest.raises(ValueError if message else Reached, match=message):
        getattr(trainer_for(strategy, precision=precision), run)(Net(), loader(dtype=torch.float32))


def test_without_deepspeed_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compressed_deepspeed, "_SUPPORTED", RequirementCache("deepspeed>=99"))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-parallel\[deepspeed\]'"):
        CompressedDeepSpeedStrategy(PowerSGD(4))
