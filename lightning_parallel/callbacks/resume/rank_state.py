"""State of a rank beside weights and optimizers, as plain values: a resumed run needs it to equal an undisturbed run.

The state covers random generators, torchmetrics of the module, and the means that the running epoch logs. Generators
are the global generators, the generators of modules, and the shared seeds of pipeline stages. Nothing is pickled:
reading a checkpoint must not run code.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.compat.interrupted import epoch_values
from lightning_parallel.compat.lightning import set_update_count, states_of, update_count_of
from lightning_parallel.pipeline.random_streams import OwnGenerators

__all__ = ["rank_state", "restore_metrics", "restore_random"]

_MOST_METRIC_BYTES = 1 << 24
"""Largest metric to save. Each checkpoint holds the metrics of all ranks; a metric of all predictions is too large."""


def rank_state(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return the state of this rank; draws no random number."""
    engine = getattr(getattr(trainer.strategy, "run", None), "engine", None)
    values, metrics = epoch_values(trainer)
    return {
        "torch": torch.get_rng_state(),
        # Only if CUDA is in use: a run on CPUs must not create a context on a GPU.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": _packed_python(random.getstate()),
        "numpy": _packed_numpy(numpy.random.get_state()),
        "own": [_packed(generator) for generator in OwnGenerators(module.modules()).generators],
        "stages": None if engine is None else _packed_seeds(engine.seeds),
        "metrics": _metric_states(module),
        "epoch": {name: [_copy(value) for value in listed] for name, listed in values.items()},
        "callback_metrics": {name: _copy(value) for name, value in metrics.items()},
    }


def _copy(value: Tensor) -> Tensor:
    # A clone: for a tensor on the CPU, `cpu()` returns the tensor itself, which the run goes on to update.
    return value.detach().cpu().clone()


def restore_random(state: dict[str, Any], trainer: Trainer, module: LightningModule) -> None:
    """Continue all generators from a state that `rank_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(_unpacked_python(state["python"]))
    numpy.random.set_state(_unpacked_numpy(state["numpy"]))
    own = OwnGenerators(module.modules()).generators
    # With other generators than at the save, no state belongs to a known generator.
    for generator, packed in zip(own, state["own"] if len(own) == len(state["own"]) else ()):
        _unpack_into(generator, packed)
    engine = getattr(getattr(trainer.strategy, "run", None), "engine", None)
    if engine is not None and state["stages"] is not None:
        seeds, shared = state["stages"]
        engine.seeds = (None if seeds is None else _unpacked_python(seeds), shared)


# ---------------------------------------------------------------------------------------------------- random generators


def _packed_python(state: Any) -> list[Any]:
    version, numbers, gauss = state
    return [version, torch.tensor(numbers, dtype=torch.int64), gauss]


def _unpacked_python(packed: Any) -> Any:
    version, numbers, gauss = packed
    return version, tuple(numbers.tolist()), gauss


def _packed_numpy(state: Any) -> list[Any]:
    name, keys, position, has_gauss, gauss = state
    # As int64, because torch hardly supports uint32.
    return [str(name), torch.from_numpy(keys.astype(numpy.int64)), int(position), int(has_gauss), float(gauss)]


def _unpacked_numpy(packed: Any) -> Any:
    name, keys, position, has_gauss, gauss = packed
    return name, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss


def _packed_seeds(seeds: tuple[Any, int]) -> list[Any]:
    return [None if seeds[0] is None else _packed_python(seeds[0]), seeds[1]]


def _packed(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return _packed_python(generator.getstate())
    if isinstance(generator, numpy.random.RandomState):
        return _packed_numpy(generator.get_state())
    return _plain(generator.bit_generator.state)


def _unpack_into(generator: Any, packed: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(packed)
    elif isinstance(generator, random.Random):
        generator.setstate(_unpacked_python(packed))
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(_unpacked_numpy(packed))
    else:
        generator.bit_generator.state = _arrays(packed)


def _plain(value: Any) -> Any:
    """Replace numpy's values in the state of a bit generator by plain values."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, numpy.ndarray):
        # As text: torch's integers are signed, but keys may use all 64 bits.
        return {"dtype": value.dtype.str, "values": [str(entry) for entry in value.tolist()]}
    return value.item() if isinstance(value, numpy.generic) else value


def _arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return numpy.array([int(entry) for entry in value["values"]], dtype=value["dtype"])
    return {key: _arrays(entry) for key, entry in value.items()}


# -------------------------------------------------------------------------------------------------------------- metrics


def _metric_states(module: LightningModule) -> dict[str, Any]:
    """Return, by name, the states of the module's metrics with an update since their last reset."""
    found: dict[str, Any] = {}
    for name, metric in module.named_modules():
        if not isinstance(metric, Metric) or not update_count_of(metric):
            continue
        states = {key: _copied_state(value) for key, value in states_of(metric).items()}
        if sum(map(_num_bytes, states.values())) <= _MOST_METRIC_BYTES:
            found[name] = [update_count_of(metric), states]
    return found


def _copied_state(value: Any) -> Any:
    return [_copy(entry) for entry in value] if isinstance(value, list) else _copy(value)


def _num_bytes(value: Any) -> int:
    return sum(entry.numel() * entry.element_size() for entry in (value if isinstance(value, list) else [value]))


def restore_metrics(state: dict[str, Any], module: LightningModule) -> None:
    """Continue the module's metrics from a state that `rank_state` returned."""
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for name, (count, states) in state["metrics"].items():
        metric = metrics.get(name)
        if metric is None or states.keys() != states_of(metric).keys():
            continue
        device = metric.device
        for key, value in states.items():
            on_device = [entry.to(device) for entry in value] if isinstance(value, list) else value.to(device)
            setattr(metric, key, on_device)
        set_update_count(metric, count)
