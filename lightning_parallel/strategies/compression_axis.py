"""Gradient compression between the replicas of a mesh: its groups, its loss scale, its part of a checkpoint.

Every rank of a replica compresses the gradients it holds, so there is one state per position in the replica. In a
checkpoint, under `compression`, is the state of the only position as `gather_state()` gives it, or

    {"layout": "mesh", "model": [pipeline, tensor], "step": int, "positions": [state, ...]}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_parallel import comm
from lightning_parallel.compression import bind_to_module
from lightning_parallel.mesh import DATA
from lightning_parallel.strategies.skipping import skip

if TYPE_CHECKING:
    from lightning_parallel.strategies.base import MeshStrategy

__all__ = ["KEY", "follow_scale", "reducer_options", "restore", "save", "drop_nonfinite_gradients"]

KEY = "compression"


def reducer_options(strategy: MeshStrategy) -> dict[str, Any]:
    """What the strategy's `GradientReducer` has to know about compression; every rank of the mesh must ask."""
    if strategy.compression is None:
        return {}
    if strategy.groups.data_parallel.size == 1:
        rank_zero_warn("`compression` has nothing to do: it works between replicas, and there is one.")
        return {}
    assert strategy.lightning_module is not None
    bind_to_module(strategy.lightning_module, strategy.compression)
    return {
        "compression": strategy.compression,
        "side_group": strategy.groups.extra(DATA, "compression"),
        "replica_group": strategy.groups.replica,
    }


def follow_scale(strategy: MeshStrategy) -> None:
    """Tell the compressor what gradients will be multiplied by, as it remembers them without that."""
    if strategy.compression is not None:
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        strategy.compression.scale = 1.0 if scaler is None else float(scaler.get_scale())


def drop_nonfinite_gradients(strategy: MeshStrategy) -> None:
    """Leave no gradient of a forgotten step to the optimizer, unless a gradient scaler skips the step by itself."""
    reducer, scaled = strategy._reducer, getattr(strategy.precision_plugin, "scaler", None) is not None
    if reducer is None or reducer.applied or scaled:
        return
    assert strategy.lightning_module is not None
    skip(strategy.lightning_module, reducer.reduced)


def save(strategy: MeshStrategy, checkpoint: dict[str, Any]) -> None:
    """Add the compressor's state to a checkpoint that holds more than weights; every rank must call it."""
    if strategy.compression is None or "optimizer_states" not in checkpoint:
        return
    groups = strategy.groups
    state = strategy.compression.gather_state(groups.data_parallel)
    if groups.replica.size > 1:
        state = pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), state)
        positions = comm.all_gather_object(state, groups.replica)
        step = strategy.compression.step
        state = {"layout": "mesh", "model": _model(strategy), "step": step, "positions": positions}
    checkpoint[KEY] = state


def restore(strategy: MeshStrategy, checkpoint: dict[str, Any]) -> None:
    """Continue from the compressor's state in `checkpoint`, if it has one and a fit begins."""
    assert strategy.lightning_module is not None
    fitting = strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING
    if strategy.compression is None or KEY not in checkpoint or not fitting:
        return
    state, group = checkpoint[KEY], strategy.groups.data_parallel
    saved = state["model"] if state.get("layout") == "mesh" else [1, 1]
    if saved == _model(strategy):
        mine = state["positions"][strategy.groups.replica.rank] if state["layout"] == "mesh" else state
        strategy.compression.load_state_dict(mine, group)
        return
    rank_zero_warn(
        f"The checkpoint's compression state is that of {saved[0]} pipeline x {saved[1]} tensor ranks per replica, "
        f"there are {' x '.join(map(str, _model(strategy)))} now: what was not sent yet is forgotten."
    )
    strategy.compression.step = int(state["step"])


def _model(strategy: MeshStrategy) -> list[int]:
    return [strategy.mesh.pipeline_parallel, strategy.mesh.tensor_parallel]
