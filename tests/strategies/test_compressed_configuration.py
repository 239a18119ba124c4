"""Strategies with compression by name and from the YAML of a LightningCLI."""

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_parallel import (
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    HybridParallelStrategy,
    Policy,
    PowerSGD,
    Quantize,
    TensorParallelStrategy,
    TopK,
)
from lightning_parallel.strategies.compressed import BUILD
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for

FAMILIES = {"ddp": CompressedDDPStrategy, "fsdp": CompressedFSDPStrategy, "deepspeed": CompressedDeepSpeedStrategy}


def build(folder, strategy):
    if "deepspeed" in strategy.lower():
        pytest.importorskip("deepspeed")
    path = folder / "config.yaml"
    path.write_text(f"""
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  use_distributed_sampler: false
  strategy: {strategy}
model:
  class_path: tests.strategies.models.Net
""")
    arguments = ["--config", str(path)]
    return LightningCLI(Net, run=False, subclass_mode_model=True, args=arguments, save_config_callback=None)


def parse(folder, strategy):
    return build(folder, strategy).trainer.strategy


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CompressedDDPStrategy, "bucket_cap_mb: 5, static_graph: true"),
        (CompressedFSDPStrategy, "sharding_strategy: SHARD_GRAD_OP, state_dict_type: sharded"),
        (CompressedModelParallelStrategy, "data_parallel_size: 2, tensor_parallel_size: 1"),
        (CompressedDeepSpeedStrategy, "stage: 1"),
        (TensorParallelStrategy, "tensor_parallel_size: 1"),
        (HybridParallelStrategy, "data_parallel_size: 2"),
    ],
)
def test_class_path_and_arguments(tmp_path, kind, options):
    compression = "{class_path: lightning_parallel.PowerSGD, init_args: {rank: 2, alternate: true}}"
    text = f"{{class_path: lightning_parallel.{kind.__name__}, init_args: {{compression: {compression}, {options}}}}}"
    strategy = parse(tmp_path, text)
    assert type(strategy) is kind
    assert isinstance(strategy.compression, PowerSGD)
    assert strategy.compression.rank == 2


@pytest.mark.parametrize(
    ("kind", "options"),
    [("DDP", "bucket_cap_mb: 1, static_graph: true"), ("FSDP", "sharding_strategy: SHARD_GRAD_OP")],
)
@distributed(world_size=2)
def test_trains_from_yaml(kind, options, group, tmp_path):
    compression = "{class_path: lightning_parallel.TopK, init_args: {ratio: 0.1, min_numel: 16}}"
    arguments = f"{{compression: {compression}, {options}}}"
    text = f"{{class_path: lightning_parallel.Compressed{kind}Strategy, init_args: {arguments}}}"
    folder = tmp_path / str(group.rank)
    folder.mkdir()
    cli = build(folder, text)
    cli.trainer.fit_loop.max_epochs = 2
    cli.trainer.fit(cli.model, loader(2, group.rank, dtype=torch.float32))
    assert cli.trainer.strategy.compression.step == 8
    assert cli.trainer.strategy.compression.residual_norm > 0


def test_compositions_and_policies(tmp_path):
    compression = """
        class_path: lightning_parallel.Policy
        init_args:
          rules:
            "*.bias": null
            "*":
              class_path: lightning_parallel.TopK
              init_args: {ratio: 0.01, values: {class_path: lightning_parallel.Quantize, init_args: {bits: 8}}}"""
    text = f"""
    class_path: lightning_parallel.CompressedDDPStrategy
    init_args:
      compression:{compression}"""
    strategy = parse(tmp_path, text)
    assert isinstance(strategy.compression, Policy)
    topk = strategy.compression.rules["*"]
    assert isinstance(topk, TopK)
    assert isinstance(topk.values, Quantize)


@pytest.mark.parametrize("ending", BUILD)
@pytest.mark.parametrize("family", FAMILIES)
def test_names(tmp_path, family, ending):
    name = f"{family}_{ending}"
    strategy = parse(tmp_path, name)
    assert type(strategy) is FAMILIES[family]
    assert type(strategy.compression) is type(BUILD[ending]())
    assert name == name.lower()
    assert StrategyRegistry.get(name).compression is not strategy.compression, "compressors remember"


@pytest.mark.parametrize("name", ["ddp_powersgd", "fsdp_topk", "fsdp_int8"])
@distributed(world_size=2)
def test_names_train(name, group):
    trainer = trainer_for(name, 2, use_distributed_sampler=False)
    trainer.fit(Net(hidden=96), loader(2, group.rank, dtype=torch.float32))
    assert trainer.strategy.compression.step == 8
    assert trainer.strategy.compression.residual_norm > 0
