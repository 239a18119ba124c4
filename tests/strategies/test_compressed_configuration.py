"""Strategies with compression by name and from the YAML of a LightningCLI."""

import inspect
import re
from pathlib import Path

import docstring_parser
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import lightning_parallel
from lightning_parallel import (
    AutoParallelStrategy,
    CompressedDDPStrategy,
    CompressedDeepSpeedStrategy,
    CompressedFSDPStrategy,
    CompressedModelParallelStrategy,
    ContextParallelStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    PowerSGD,
    Quantize,
    TensorParallelStrategy,
)
from tests.harness import distributed
from tests.strategies.models import Net, loader, trainer_for

KINDS = (
    AutoParallelStrategy,
    ContextParallelStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
NAMES = {"tensor_parallel", "pipeline_parallel", "context_parallel", "hybrid_parallel", "auto_parallel", "local_sgd"}
NAMES |= {"ddp_powersgd", "ddp_int8"}


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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CompressedDDPStrategy, "bucket_cap_mb: 5, static_graph: true"),
        (CompressedFSDPStrategy, "sharding_strategy: SHARD_GRAD_OP, state_dict_type: sharded"),
        (CompressedModelParallelStrategy, "data_parallel_size: 2, tensor_parallel_size: 1"),
        (CompressedDeepSpeedStrategy, "stage: 2"),
        (TensorParallelStrategy, "tensor_parallel_size: 1, hierarchical: 2"),
        (ContextParallelStrategy, "context_parallel_size: 2, context_parallel_method: ring"),
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


def test_names(tmp_path):
    makers = {name: StrategyRegistry[name]["strategy"].__module__ for name in StrategyRegistry}
    ours = {name for name, module in makers.items() if module.startswith("lightning_parallel")}
    assert ours == NAMES | {f"lightning_parallel.{kind.__name__}".lower() for kind in KINDS}
    for name, compressor in (("ddp_powersgd", PowerSGD), ("ddp_int8", Quantize)):
        strategy = parse(tmp_path, name)
        assert type(strategy) is CompressedDDPStrategy
        assert type(strategy.compression) is compressor
        assert StrategyRegistry.get(name).compression is not strategy.compression, "compressors remember"


def test_names_are_those_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs/which_strategy.md").read_text("utf-8").split("## Names")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == NAMES


def test_yaml_of_the_documentation_needs_no_import():
    root = Path(__file__).parents[2]
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.yaml")]
    for page in pages:
        assert not re.search(rf"strategy: *[\"']?({'|'.join(NAMES)})\b", page.read_text("utf-8")), page


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
    kinds = [kind for kind in kinds if not issubclass(kind, Exception)]
    assert HybridParallelStrategy in kinds
    missing = {}
    for kind in kinds:
        given = inspect.signature(kind).parameters.values()
        names = {one.name for one in given if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
        missing[kind.__name__] = sorted(names - documented(kind))
    assert {name: names for name, names in missing.items() if names} == {}
