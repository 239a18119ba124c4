"""Ray Train: its worker group as the processes of a run. This module uses Ray only if the user has imported it.

Ray starts the processes, connects them by `torch.distributed`, and calls the user's function in a thread of each
process. The Trainer gets `plugins=[RayLightningEnvironment()]`, which knows the ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lightning_parallel.compat import Patches

__all__ = ["accept_strategies", "is_ray_environment", "ray_device"]

# Stays for the process, which is Ray's worker.
_patches = Patches()
_accepted: tuple[type, ...] = ()


def _ray_lightning() -> Any:
    """Return Ray's module for Lightning if it is already imported; an import here would take seconds."""
    return sys.modules.get("ray.train.lightning")


def is_ray_environment(environment: object) -> bool:
    """Tell whether `environment` is the environment of a worker of Ray Train."""
    module = _ray_lightning()
    return module is not None and isinstance(environment, module.RayLightningEnvironment)


def ray_device(environment: object) -> torch.device | None:
    """Return the device that Ray gives this worker; None if `environment` is not Ray's.

    The Trainer in a worker knows one CPU, or all GPUs of the host. It does not know the GPU of this worker.
    """
    if not is_ray_environment(environment):
        return None
    from ray.train.torch import get_device

    device: torch.device = get_device()
    return device


def accept_strategies(environment: object, kind: type) -> None:
    """Let Ray's `prepare_trainer` accept strategies of `kind`, if `environment` is Ray's.

    `prepare_trainer` changes nothing in the Trainer. It only checks that the strategy is one of Ray's three strategies,
    which take devices and samplers from Ray. The strategies of this library do the same.
    """
    global _accepted
    if not is_ray_environment(environment) or kind in _accepted:
        return
    # Patched once for the process: the replacement reads `_accepted` at each call.
    first, _accepted = not _accepted, (*_accepted, kind)
    if first:
        # `replace_function` replaces the code: users import `prepare_trainer` by name.
        _patches.replace_function(_ray_lightning().prepare_trainer, _accepting)


def _accepting(prepare: Any) -> Any:
    def prepare_trainer(trainer: Any) -> Any:
        strategy = trainer.strategy
        is_accepted = isinstance(strategy, _accepted)
        if is_accepted and is_ray_environment(strategy.cluster_environment):
            return trainer
        return prepare(trainer)

    return prepare_trainer
