"""The memory of a compressor in a checkpoint of one file: a file per rank beside the checkpoint, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union, get_args

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.lightning import PathLike
from lightning_parallel.compression import HierarchicalReducer, Reducer
from lightning_parallel.compression.compressor_state import without_memory
from lightning_parallel.strategies.checkpoints.files import LOCAL_STEPS
from lightning_parallel.strategies.checkpoints.rank_files import Place, RankFiles
from lightning_parallel.strategies.compressed.parts import PARTS

__all__ = ["KEY", "CompressorMemory", "KeptState", "check_kept_state", "is_memory_of"]

KeptState = Literal["local", "none"]
"""How a checkpoint of one file stores the state of the compressor."""

KEY = "compression"
"""The key of the entry in a checkpoint."""

_FILES = RankFiles("compression", "the compressors' state", "Residuals that were not sent yet are lost")


def check_kept_state(state: object) -> None:
    """Check the argument `compressor_state` of a strategy.

    Raises:
        ValueError: If `state` is unknown.
    """
    if state not in get_args(KeptState):
        names = " or ".join(map(repr, get_args(KeptState)))
        raise ValueError(
            f"`compressor_state` must be {names}; got {state!r}. Residuals are kept by rank ('local') or not at all"
        )


def is_memory_of(checkpoint: Mapping[str, Any], drifts: bool) -> bool:
    """Tell whether the compressors of a checkpoint remember `drifts` of parameters rather than gradients."""
    # Drifts are smaller than gradients by a learning rate: residuals of one kind are wrong for the other.
    is_same = (LOCAL_STEPS in checkpoint) == drifts
    if not is_same:
        found, wanted = ("gradients", "drifts of parameters") if drifts else ("drifts of parameters", "gradients")
        rank_zero_warn(
            f"The checkpoint holds the compressors' state for {found}, but this run compresses {wanted}. Residuals"
            " that were not sent yet are lost."
        )
    return is_same


@dataclass(frozen=True)
class CompressorMemory:
    """Saves and restores the memory of a compressor; every rank must call each method.

    Attributes:
        means: The compressor, or the reducer that divides its work among the replicas of a node.
        place: The position of this rank.
        replicas: The ranks that compress together; None stands for all ranks.
        world: All ranks.
        kept: The argument `compressor_state`: `local` writes files, `none` keeps the step alone.
    """

    means: Union[Reducer, HierarchicalReducer]
    place: Place
    replicas: Optional[Group]
    world: Group
    kept: KeptState = "local"

    def save(self, path: PathLike) -> dict[str, Any]:
        """Return the entry of a checkpoint at `path`; write the state of this rank beside it."""
        state = self.means.state_dict()
        if self.kept == "none":
            return without_memory(state["step"])
        # The step is in the checkpoint itself, so it survives the loss of the files beside it.
        return {**_FILES.write(state, self.place, path, self.world), "step": state["step"]}

    def restore(self, saved: Mapping[str, Any], path: PathLike) -> None:
        """Continue from an entry of a checkpoint at `path`."""
        # Schedules and warm-up continue from the saved step, even if residuals are lost.
        found: Any = saved
        if RankFiles.are_in(saved):
            found = _FILES.read(saved, self.place, path, self.world) or without_memory(saved["step"])
        elif saved.get("layout") == PARTS:
            rank_zero_warn(
                f"The compression state in {path} belongs to a sharded or split model. Residuals that were not sent yet"
                " are lost."
            )
            found = without_memory(saved["step"])
        # A state that is damaged on one rank must stop all ranks before the first step.
        with comm.failing_together(self.world):
            self.means.load_state_dict(found, self.replicas)
