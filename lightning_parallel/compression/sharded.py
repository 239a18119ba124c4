"""Steps of a compressor where ranks hold different pieces of a model: what FSDP1 and FSDP2 have in common.

The gradients of a piece are averaged over one group of ranks; other groups hold other pieces. A step counts only if it
does for all of them, and a checkpoint holds one state for each piece:

    {"layout": "pieces", "step": int, "pieces": [state of `gather_state()`, ...]}

where there is more than one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.reducer import Reducer, Step
from lightning_parallel.compression.transaction import Transaction

__all__ = ["ShardedSteps", "plain_name"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class ShardedSteps(Transaction):
    """The steps of `compressor` over `group`.

    A step begins with the first gradients of a backward pass. `finish()` ends it; otherwise the next forward pass of
    the module given to `follow` does, or another gradient of the same parameter.

    Args:
        group: The ranks that hold the same piece of the model, or all of it.
        everyone: All ranks of the model.
        scaler: A gradient scaler in use: residuals are kept without its scale.
        alike: Whether all ranks of `group` receive the same means, and so know by themselves whether a step counts.
    """

    def __init__(
        self, compressor: Reducer, group: Group, everyone: Group, scaler: Optional[Any] = None, alike: bool = True
    ) -> None:
        super().__init__(compressor, scaler)
        self.group, self.everyone = group, everyone
        self._alike = alike and group.size == everyone.size
        self._device = torch.device("cpu")
        self._reduced: set[str] = set()
        self._earlier = True
        self._undo: list[Callable[[], None]] = []

    def follow(self, module: nn.Module) -> None:
        """End a step with the next forward pass of `module`, where nobody has called `finish`."""

        def finish(*_: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # not where backward computes activations once more
                self.finish()

        self.on_close(module.register_forward_pre_hook(finish).remove)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Have `close` call `undo`."""
        self._undo.append(undo)

    @torch.no_grad()
    def reduce(self, named: Mapping[str, Tensor], shards: Optional[Mapping[str, int]] = None) -> None:
        """Replace some of the gradients by their mean, in place; see `Step.reduce_`."""
        if not self._reduced.isdisjoint(named):  # another backward pass, or a module that was used twice
            self._earlier &= self._end()
        self._reduced.update(named)
        self._device = next((gradient.device for gradient in named.values()), self._device)
        self.step(self.group).reduce_(named, shards)

    @override
    def finish(self) -> bool:
        """End the step of the last backward pass; False if a step since the last call did not count, on all ranks."""
        self.counted = self._end() and self._earlier
        self._earlier = True
        return self.counted

    def _end(self) -> bool:
        self._reduced.clear()
        if self._step is not None and not self._alike and not self._agreed(self._step):
            self.abandon()
            self.counted = False
        return super().finish()

    def _agreed(self, step: Step) -> bool:
        flag = torch.tensor(int(step.finite), device=self._device)
        return bool(comm.all_reduce_(flag, self.everyone, "min"))

    def close(self) -> None:
        """Leave the module as it was before."""
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------------------------------------------- state

    def gather_state(self) -> dict[str, Any]:
        """The state of all ranks, for one checkpoint file, on the first; every rank must call it."""
        self.finish()
        state = self.compressor.gather_state(self.group)
        if self.group.size == self.everyone.size:
            return state
        pieces = comm.all_gather_object(pytree.tree_map_only(Tensor, Tensor.cpu, state), self.everyone)
        if self.everyone.rank > 0:
            return {}
        return {"layout": "pieces", "step": self.compressor.step, "pieces": [piece for piece in pieces if piece]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `gather_state()`. Where the model is cut into other pieces now, what was not sent is lost."""
        self.finish()
        firsts = sorted(set(comm.all_gather_object(self.group.ranks[0], self.everyone)))
        pieces = state["pieces"] if state.get("layout") == "pieces" else [state]
        if len(pieces) == len(firsts):
            self.compressor.load_state_dict(pieces[firsts.index(self.group.ranks[0])], self.group)
            return
        self.compressor.step = int(state["step"])
        if self.everyone.rank == 0:
            warnings.warn(
                f"The compression state is that of a model in {len(pieces)} pieces, there are {len(firsts)} now: what "
                "was not sent yet is forgotten.",
                stacklevel=2,
            )


def plain_name(name: str) -> str:
    """The name of a parameter in the module as its author wrote it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
