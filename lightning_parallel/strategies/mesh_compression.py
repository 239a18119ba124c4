"""Gradient compression between the replicas of a mesh: its groups, its loss scale, its part of a checkpoint.

Every rank of a replica compresses the gradients it holds, so there is one state per position in the replica. In a
checkpoint, under `compression`, is the state of the only position as `gather_state()` gives it, or

    {"layout": "mesh", "model": [pipeline, tensor], "step": int, "positions": [state, ...]}
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Optional

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_parallel import comm
from lightning_parallel.comm import MeshGroups
from lightning_parallel.compat import ParallelState
from lightning_parallel.compat.torch import pytree
from lightning_parallel.compression import Reducer, bind_to_module
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.mesh import DATA

__all__ = ["KEY", "MeshCompression", "drop_gradients", "warn_of_dropped_step"]

KEY = "compression"


@dataclass
class MeshCompression:
    """A compressor at work between the replicas of a mesh.

    Args:
        reducer: The user's compressor.
        module: The user's module.
        groups: The mesh's groups.
    """

    reducer: Reducer
    module: LightningModule
    groups: MeshGroups

    @classmethod
    def of(cls, reducer: Optional[Reducer], module: LightningModule, groups: MeshGroups) -> MeshCompression | None:
        """Return None without a compressor; every rank of the mesh must ask."""
        if reducer is None:
            return None
        if groups.data_parallel.size == 1:
            rank_zero_warn("`compression` has nothing to do: it works between replicas, and there is one.")
        else:
            bind_to_module(module, reducer)
        return cls(reducer, module, groups)

    def reducer_options(self) -> dict[str, Any]:
        """Return what a `GradientReducer` has to know; every rank of the mesh must ask."""
        if self.groups.data_parallel.size == 1:
            return {}
        return {
            "compression": self.reducer,
            "side_group": self.groups.extra(DATA, "compression"),
            "replica_group": self.groups.replica,
        }

    def follow_scale(self, precision: Precision) -> None:
        """Tell the compressor what gradients will be multiplied by: what it remembers is not scaled."""
        scaler = getattr(precision, "scaler", None)
        self.reducer.scale = 1.0 if scaler is None else float(scaler.get_scale())

    def drop_nonfinite_gradients(self, reducer: GradientReducer, precision: Precision) -> None:
        """Drop the gradients of a step that was rolled back, unless a gradient scaler will skip it anyway."""
        if not reducer.applied and getattr(precision, "scaler", None) is None:
            drop_gradients(self.module, reducer.reduced)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the compressor's state to a checkpoint that holds more than weights; every rank must call it."""
        if "optimizer_states" not in checkpoint:
            return
        state = self.reducer.gather_state(self.groups.data_parallel)
        if self.groups.replica.size > 1:
            state = pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), state)
            positions = comm.all_gather_object(state, self.groups.replica)
            state = {"layout": "mesh", "model": self._sizes, "step": self.reducer.step, "positions": positions}
        checkpoint[KEY] = state

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Continue from the compressor's state in `checkpoint`, if it has one."""
        if KEY not in checkpoint:
            return
        state = checkpoint[KEY]
        is_mesh = state.get("layout") == "mesh"
        saved = state["model"] if is_mesh else [1, 1]
        if saved == self._sizes:
            mine = state["positions"][self.groups.replica.rank] if is_mesh else state
            self.reducer.load_state_dict(mine, self.groups.data_parallel)
            return
        rank_zero_warn(
            f"The checkpoint's compression state is that of {saved[0]} pipeline x {saved[1]} tensor ranks per replica, "
            f"there are {' x '.join(map(str, self._sizes))} now: what was not sent yet is forgotten."
        )
        self.reducer.step = int(state["step"])

    @property
    def _sizes(self) -> list[int]:
        return [self.groups.pipeline_parallel.size, self.groups.tensor_parallel.size]


def drop_gradients(module: LightningModule, names: Optional[Collection[str]]) -> None:
    """Take the gradients of `names`, or all, away from the optimizers: the step changes nothing."""
    for name, parameter in module.named_parameters():
        if names is None or name in names:
            parameter.grad = None
    warn_of_dropped_step(module)


def warn_of_dropped_step(module: LightningModule) -> None:
    """Warn of a step that changes nothing, the 1st, 2nd, 4th, 8th, ... time."""
    state = ParallelState.of(module)
    state.skipped_steps += 1
    count = state.skipped_steps
    if count & (count - 1) == 0:
        rank_zero_warn(
            "A gradient was not finite on some rank, or not once encoded (fp16 ends at 65504, bf16 at 3e38): its step "
            f"changes nothing. So far this has happened {count} time{'s' if count > 1 else ''}."
        )
