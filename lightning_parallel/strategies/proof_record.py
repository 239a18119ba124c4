"""What has been verified: in this process, and in a file beside the checkpoints; by all that decides about it."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_parallel.compat.lightning import checkpoint_of_run
from lightning_parallel.compat.torch import pytree
from lightning_parallel.strategies.checkpoint_files import replace_file
from lightning_parallel.strategies.step_runs import StepRuns

__all__ = ["PROOF_FILE", "forget", "record", "recorded", "save_proofs", "step_key"]

PROOF_FILE = "proof.json"
"""Name of the file, in the folder of checkpoints, that says what has been verified."""

_proven: dict[str, dict[str, Any]] = {}
"""What has been verified in this process, and beside its checkpoints: `text` and `attributes` by key."""


def recorded(key: str, trainer: Trainer) -> dict[str, str] | None:
    """Return what was learned when a step was verified, in this process or beside the run's checkpoints; else None."""
    for folder in _folders(trainer):
        _proven.update(_read(folder / PROOF_FILE))
    return _proven[key]["attributes"] if key in _proven else None


def record(key: str, text: str, attributes: dict[str, str]) -> None:
    """Remember that a step was verified.

    Args:
        key: See `step_key`.
        text: What was compared.
        attributes: See `ParallelState.attributes`.
    """
    _proven[key] = {"text": text, "attributes": dict(attributes)}


def forget() -> None:
    """Remember nothing of this process any more; what is beside checkpoints stays."""
    _proven.clear()


def save_proofs(checkpoint: str | Path) -> None:
    """Write what has been verified into the folder of a checkpoint on a local disk."""
    folder = Path(checkpoint).parent
    if _proven and folder.is_dir():
        replace_file(folder / PROOF_FILE, lambda file: file.write(json.dumps(_proven, indent=1).encode()))


def _folders(trainer: Trainer) -> list[Path]:
    """Return where this run's checkpoints are, and the one it resumes from."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]  # type: ignore[attr-defined]
    paths = [Path(callback.dirpath) for callback in callbacks if callback.dirpath]
    resumed = checkpoint_of_run(trainer)
    return [*paths, *([Path(resumed).parent] if resumed else [])]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text()).items()
        return {key: {"text": str(entry["text"]), "attributes": dict(entry["attributes"])} for key, entry in found}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):  # none, or not ours: verified anew
        return {}


def step_key(runs: StepRuns, name: str, batch: Any) -> str:
    """Hash all that decides whether a step computes the same divided: code, plan, sizes, versions."""
    leaves, tree = pytree.tree_flatten(batch)
    kinds = [(str(leaf.dtype), leaf.dim()) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    tensors = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in runs.module.named_parameters()]
    facts = (
        [_version(package) for package in ("torch", "lightning", "pytorch-lightning", "lightning-parallel")],
        (name, str(tree), kinds),
        runs.skeleton.fingerprint(),
        tensors,
        runs.groups.mesh,
        type(runs.precision).__name__,
        runs.device.type,
        sorted((path, repr(rule)) for path, rule in runs.rules.items()),
        None if runs.engine is None else runs.engine.plan.outline(),
        # Splitting functions of the user's decide what a microbatch is.
        None if runs.steps is None else runs.steps.options.split_batch.__qualname__,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
