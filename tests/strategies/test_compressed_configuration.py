"""Strategies with compression by name and from the YAML of a LightningCLI."""

import inspect

import docstring_parser
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import lightning_parallel
from lightning_parallel import (
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PowerSGD,
    TensorParallelStrategy,
)
from lightning_parallel.strategies.compressed import NAMED_COMPRESSORS
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
        (CompressedDeepSpeedStrategy, "stage: 2"),
        (TensorParallelStrategy, "tensor_parallel_size: 1, hierarchical: 2"),
        (HybridParallelStrategy, "data_parallel_size: 2"),
        (LocalSGDStrategy, "every_n_steps: 5, outer_optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.7}}"),
    ],
)
def test_class_path_and_arguments(tmp_path, kind, options):
    compression = "{class_path: lightning_parallel.PowerSGD, init_args: {rank: 2, alternate: true}}"
    text = f"{{class_path: lightning_parallel.{kind.__name__}, init_args: {{compression: {compression}, {options}}}}}"
    strategy = parse(tmp_path, text)
    assert type(strategy) is kind
    assert isinstance(strategy.compression, PowerSGD)
    assert strategy.compression.rank == 2
    if kind is CompressedDeepSpeedStrategy:
        assert strategy.config["zero_optimization"]["stage"] == 2


@distributed(world_size=2)
def test_trains_from_yaml(group, tmp_path):
    compression = "{class_path: lightning_parallel.TopK, init_args: {ratio: 0.1, min_numel: 16}}"
    arguments = f"{{compression: {compression}, sharding_strategy: SHARD_GRAD_OP}}"
    text = f"{{class_path: lightning_parallel.CompressedFSDPStrategy, init_args: {arguments}}}"
    folder = tmp_path / str(group.rank)
    folder.mkdir()
    cli = build(folder, text)
    cli.trainer.fit_loop.max_epochs = 2
    cli.trainer.fit(cli.model, loader(2, group.rank, dtype=torch.float32))
    assert cli.trainer.strategy.compression.step == 8
    assert cli.trainer.strategy.compression.residual_norm > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_names(tmp_path, family):
    assert type(parse(tmp_path, f"{family}_topk")) is FAMILIES[family]
    for ending, make in NAMED_COMPRESSORS.items():
        name = f"{family}_{ending}"
        strategy = StrategyRegistry.get(name)
        assert type(strategy) is FAMILIES[family]
        assert repr(strategy.compression) == repr(make())
        assert name == name.lower()
        assert StrategyRegistry.get(name).compression is not strategy.compression, "compressors remember"


@distributed(world_size=2)
def test_names_train(group):
    trainer = trainer_for("ddp_powersgd", 2, use_distributed_sampler=False)
    trainer.fit(Net(hidden=96), loader(2, group.rank, dtype=torch.float32))
    assert trainer.strategy.compression.step == 8
    assert trainer.strategy.compression.residual_norm > 0


def documented(kind):
    texts = (text for base in kind.__mro__ for text in (base.__doc__, base.__init__.__doc__))
    return {found.arg_name for text in texts for found in docstring_parser.parse(text or "").params}


def test_help_of_a_project_describes_every_argument():
    """`--help` takes one argument a line from docstrings: of `a, b: See ...` it takes none."""
    kinds = [kind for kind in vars(lightning_parallel).values() if inspect.isclass(kind)]
    assert HybridParallelStrategy in kinds
    missing = {}
    for kind in kinds:
        given = inspect.signature(kind).parameters.values()
        names = {one.name for one in given if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
        missing[kind.__name__] = sorted(names - documented(kind))
    assert {name: names for name, names in missing.items() if names} == {}
