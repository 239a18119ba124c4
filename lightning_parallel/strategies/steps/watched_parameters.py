"""Refuses training steps of a pipeline that write into parameters: a stage holds other parameters than the next one.

Parameters are compared by hashes of their bits. The host waits for the hashes, so a few steps of a run are checked.
"""

from __future__ import annotations

from torch import nn

from lightning_parallel import comm
from lightning_parallel.compat import is_power_of_two
from lightning_parallel.pipeline.engine import PipelineEngine

__all__ = ["FrozenParameters", "WatchedCopies"]


class WatchedCopies:
    """Refuses a run that changes a copy of the model, such as a teacher, if the copy is split in another way.

    Args:
        engine: The pipeline.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._steps = 0
        self._before: dict[str, list[int]] = {}

    @property
    def looks(self) -> bool:
        """Whether to check this step: often at first, then rarely, since an average may begin late."""
        # Steps in pairs: 1 and 2, 2 and 3, 4 and 5, 8 and 9, ...
        return self._steps < 2 or is_power_of_two(self._steps) or is_power_of_two(self._steps - 1)

    def check(self) -> None:
        """Look at the copies before a step.

        Raises:
            RuntimeError: On every rank of the pipeline, if one has changed.
        """
        self._steps += 1
        if not self._engine.unpaired or not self.looks:
            return
        failure = None
        for path, original in self._engine.unpaired.items():
            both = [self._engine.module.get_submodule(name) for name in (path, original)]
            # By bits, since a write into `.data` leaves the version. The optimizer changes trained parameters.
            frozen = [value for each in both for value in each.parameters() if not value.requires_grad]
            found = comm.fingerprints(frozen)
            before, self._before[path] = self._before.get(path, found), found
            if before != found:
                failure = failure or RuntimeError(
                    f"`{path}` is a copy of `{original}` and has changed between two steps. The training step calls"
                    f" it, so it is not split into stages like `{original}`. A loop over the parameters of both pairs"
                    " others than in a single process. Use TensorParallelStrategy, which shards both alike; or call"
                    f" `{path}` only outside `training_step`"
                )
        comm.raise_together(failure, self._engine.group)


class FrozenParameters:
    """Finds steps that write into frozen parameters, such as the parameters of a teacher.

    The dry run has seen the writes of the first batch. An average may begin later.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._values = {name: value for name, value in module.named_parameters() if not value.requires_grad}
        self._before = comm.fingerprints(self._values.values())

    def failure(self) -> RuntimeError | None:
        """Return the error for a step that wrote into a frozen parameter; None if it wrote into none."""
        for name, before, after in zip(self._values, self._before, comm.fingerprints(self._values.values())):
            if before != after:
                return RuntimeError(
                    f"`training_step` must not write into a parameter in a pipeline; got a write into `{name}`. A"
                    " pipeline runs the step once per microbatch, and each stage has other parameters. Write in a"
                    " hook, such as `on_train_batch_start`; or use TensorParallelStrategy, whose ranks run a step once"
                )
        return None
