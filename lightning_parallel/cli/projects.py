"""A user's project for `plan` and `inspect`: the module, a batch, and the arguments of the Trainer. Nothing is trained.

    captured_script("main.py", ["fit", "--config", "base.yaml"])     # any script that calls `Trainer.fit`
    captured_config(["base.yaml"])                                   # class_path entries for model and data

The script runs up to `Trainer.fit`. Its Trainer is built for one processor: the devices of the script need not exist
here.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_parallel.compat import patched
from lightning_parallel.planner.rehearsal import PRECISIONS, PrecisionName
from lightning_parallel.strategies.auto_parallel import first_of_loaders

__all__ = [
    "Project",
    "batch_of",
    "captured_config",
    "captured_script",
    "parsed_batch",
    "precision_of",
    "project_of",
    "project_of_class",
]

_PRECISIONS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class Project:
    """A user's project.

    Attributes:
        module: The model of the project.
        batch: The first batch of its loader; None without a loader.
        trainer: The arguments of the Trainer: `devices`, `num_nodes`, `accelerator`, `precision`, ...
    """

    module: nn.Module
    batch: Any = None
    trainer: Mapping[str, Any] = field(default_factory=dict)


class _Captured(BaseException):
    """Ends a script at `Trainer.fit`; no `except Exception` of the user can catch it."""

    def __init__(self, trainer: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.trainer = trainer
        self.arguments = arguments


# Arguments that replace the arguments of the script's Trainer, so that it needs no device of the script.
_HERE = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "logger": False,
    "enable_checkpointing": False,
    "callbacks": None,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "plugins": None,
    "profiler": None,
    "precision": None,
    "sync_batchnorm": False,
    "fast_dev_run": False,
    "barebones": False,
}


def _with_here() -> list[str]:
    """Return Python's path with the working directory last, so that its files cannot shadow installed packages."""
    return [*(entry for entry in sys.path if entry), ""]


def project_of(options: argparse.Namespace) -> Project:
    """Build the project from the arguments of a command.

    Args:
        options: `script`, `config`, `script_args`, `model`, `model_args`.

    Raises:
        ValueError: If they name no project, or two.
    """
    if options.model is not None:
        if options.script is not None or options.config:
            raise ValueError("`--model` must be given without `--script` and `--config`; got both; remove one of them")
        return project_of_class(options.model, options.model_args)
    if options.script is not None:
        words = [word for path in options.config for word in ("--config", path)]
        return captured_script(options.script, [*(["fit", *words] if words else []), *options.script_args])
    if options.config:
        return captured_config(options.config)
    raise ValueError(
        "A model must be given: `--script main.py [--config my.yaml]`, `--config my.yaml`, or `--model package:Class`"
    )


def batch_of(project: Project, options: argparse.Namespace) -> Any:
    """Return the batch of `--batch`, or the first batch of the project's loader.

    Raises:
        ValueError: If there is no batch.
    """
    batch = parsed_batch(options.batch) if options.batch else project.batch
    if batch is None:
        raise ValueError("A batch must be given: `--batch input_ids=8x2048:int64`, or a project with a data loader")
    return batch


def precision_of(project: Project, options: argparse.Namespace) -> PrecisionName:
    """Return the precision of `--precision`, or of the project's Trainer, as Lightning names it.

    Raises:
        ValueError: If a plan does not support this precision.
    """
    given = str(options.precision or project.trainer.get("precision") or "32-true")
    found = _PRECISIONS.get(given, given)
    if found not in PRECISIONS:
        raise ValueError(f"`--precision` must be one of {', '.join(PRECISIONS)}; got `{given}`")
    return found  # type: ignore[return-value]


def captured_script(path: str, arguments: Sequence[str]) -> Project:
    """Run a script up to `Trainer.fit`.

    Args:
        path: The script.
        arguments: The arguments of the script.

    Raises:
        ValueError: If it ends without a call of `Trainer.fit`.
    """
    if not Path(path).is_file():
        raise ValueError(f"`--script` must be a file; got `{path}`, which does not exist")

    def run() -> None:
        # As Python does for a script: its arguments, and its folder first in the path.
        with patched(sys, "argv", [path, *arguments]), patched(sys, "path", [str(Path(path).parent), *sys.path]):
            runpy.run_path(path, run_name="__main__")

    return _captured(run, f"`{path}`")


def captured_config(paths: Sequence[str]) -> Project:
    """Build the model and the data that LightningCLI's YAML files name by `class_path`.

    Raises:
        ValueError: If the files name no model or no data.
    """
    arguments = [word for path in paths for word in ("--config", path)]

    def run() -> None:
        with patched(sys, "path", _with_here()):
            LightningCLI(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                save_config_callback=None,
                args=["fit", *arguments],
            )

    return _captured(
        run, f"{', '.join(paths)} (give your script with `--script` if the YAML has no `class_path` of the model)"
    )


def _captured(run: Any, what: str) -> Project:
    given: dict[str, Any] = {}
    with ExitStack() as stack:
        # The script may use either package of Lightning.
        for kind in _trainer_classes():
            stack.enter_context(_stopped_at_fit(kind, given))
        try:
            run()
        except _Captured as captured:
            return _project(captured, given)
        except SystemExit as error:  # from argparse, which has already printed the mistake in the arguments
            raise ValueError(
                f"The project must call `Trainer.fit`; {what} ended before, with exit status {error.code}"
            ) from error
    raise ValueError(f"The project must call `Trainer.fit`; {what} ended without a call of it")


def _trainer_classes() -> Iterator[type]:
    yield Trainer
    other = sys.modules.get("pytorch_lightning") or (
        importlib.import_module("pytorch_lightning") if importlib.util.find_spec("pytorch_lightning") else None
    )
    if other is not None:
        yield other.Trainer


@contextmanager
def _stopped_at_fit(kind: type, given: dict[str, Any]) -> Iterator[None]:
    build: Any = kind.__init__  # type: ignore[misc]

    # Keep the signature: LightningCLI reads the Trainer's arguments from it.
    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        names = [name for name in inspect.signature(build).parameters if name != "self"]
        given.update(zip(names, args), **kwargs)
        # `_HERE` comes last, because it must win over the arguments of the script.
        build(self, **{**dict(zip(names, args)), **kwargs, **_HERE})

    whole: Any = kind.fit  # type: ignore[attr-defined]

    @functools.wraps(whole)
    def fit(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Captured(self, inspect.signature(whole).bind(self, *args, **kwargs).arguments)

    with patched(kind, "__init__", init), patched(kind, "fit", fit):
        yield


def _project(captured: _Captured, given: Mapping[str, Any]) -> Project:
    trainer, module = captured.trainer, captured.arguments["model"]
    data, loaders = captured.arguments.get("datamodule"), captured.arguments.get("train_dataloaders")
    if hasattr(loaders, "train_dataloader"):
        data, loaders = loaders, None
    # `setup`, `configure_model` and the loaders may read the Trainer.
    module.trainer = trainer
    source = data if data is not None else module
    if loaders is None:
        if data is not None:
            data.trainer = trainer
        source.prepare_data()
        source.setup("fit")
    # Otherwise `source` is the module, whose `setup` has run above.
    if data is not None or loaders is not None:
        module.setup("fit")
    with torch.device("meta") if _is_configured_late(module) else nullcontext():
        module.configure_model()
    loaders = source.train_dataloader() if loaders is None else loaders
    return Project(module, first_of_loaders(loaders), dict(given))


def _is_configured_late(module: Any) -> bool:
    owner = next(base for base in type(module).__mro__ if "configure_model" in vars(base))
    return not owner.__module__.startswith(_LIGHTNING)


_LIGHTNING = ("lightning.", "pytorch_lightning.")


# ------------------------------------------------------------------------------------------------ a class by its path


def project_of_class(path: str, arguments: str = "{}") -> Project:
    """Build a module by its class, without data if possible.

    Args:
        path: `package.module:Class`.
        arguments: JSON with the arguments of its constructor.

    Raises:
        ValueError: If there is no such class, or it cannot be built so.
    """
    name, _, attribute = path.partition(":")
    with patched(sys, "path", _with_here()):
        try:
            kind = getattr(importlib.import_module(name), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"The class must be given as `package.module:Class`; got `{path}`: {error}") from error
    try:
        given = json.loads(arguments)
    except ValueError as error:
        raise ValueError(f"The arguments of `{path}` must be JSON; got `{arguments}`: {error}") from error
    try:
        try:
            with torch.device("meta"):
                module = kind(**given)
        except (NotImplementedError, RuntimeError):  # its constructor reads values of its parameters
            module = kind(**given)
    except Exception as error:  # the user's code
        raise ValueError(f"`{path}` cannot be built with {given}: {type(error).__name__}: {error}") from error
    if isinstance(module, LightningModule):
        with torch.device("meta"):
            module.configure_model()
    return Project(module, getattr(module, "example_input_array", None))


def parsed_batch(texts: Sequence[str]) -> Any:
    """Create a batch of zeros from descriptions of its tensors: `8x2048:int64`, or `input_ids=8x2048:int64 ...`.

    Raises:
        ValueError: If a description is malformed, if only some tensors have names, or if two names are equal.
    """
    named: list[tuple[str, torch.Tensor]] = []
    for text in texts:
        name, _, described = text.rpartition("=")
        shape, _, kind = described.partition(":")
        dtype = getattr(torch, kind or "float32", None)
        if not isinstance(dtype, torch.dtype) or not all(part.isdigit() for part in shape.split("x")):
            raise ValueError(f"A tensor must be given as 8x2048:int64 or input_ids=8x2048:int64; got `{text}`")
        named.append((name, torch.zeros([int(part) for part in shape.split("x")], dtype=dtype)))
    names = {name for name, _ in named}
    if names == {""}:
        return named[0][1] if len(named) == 1 else tuple(tensor for _, tensor in named)
    if "" in names or len(names) < len(named):
        raise ValueError(f"Each tensor must have its own name, or none a name; got `{' '.join(texts)}`")
    return dict(named)
