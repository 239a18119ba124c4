"""Compression inside the backward pass of `DistributedDataParallel`.

In people's own code:

    model = DistributedDataParallel(module)
    state = HookState(PowerSGD(rank=4), model)
    model.register_comm_hook(state, compression_hook)

and in Lightning, `DDPStrategy(ddp_comm_state=HookState(PowerSGD(4), module), ddp_comm_hook=compression_hook)`.

DDP fills its buckets, and fills them anew after the first step and after a resume. What is compressed together is
therefore chosen here, by the order of the module's parameters alone: equal runs give equal bits.
"""

# No postponed annotations here: DDP compares those of a hook with its classes.
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.lanes import Lane, lane_for
from lightning_parallel.compression.reducer import Reducer
from lightning_parallel.compression.transaction import Transaction, fill

__all__ = ["HookState", "compression_hook"]


@dataclass(eq=False)
class _Bucket:
    """A bucket of DDP: finished when all the portions that hold a gradient of it are."""

    buffer: Tensor
    future: Future[Tensor]
    waits_for: set[int] = field(default_factory=set)


class HookState:
    """What `compression_hook` needs to know, and keeps between steps.

    One backward pass with synchronization is one step of the compressor; inside `no_sync()` DDP calls no hook.

    Args:
        compressor: Reduces the gradients; its state is keyed by the module's parameter names.
        module: The module whose gradients come, wrapped in DDP or not. Only its names are used.
        process_group: The group of the DDP module; all ranks when omitted.
        scaler: A `torch.amp.GradScaler` in use: residuals are kept without its scale.
        unused_parameters: Ask the other ranks which parameters have a gradient at all, and keep the residuals of the
            others as they are. None: as DDP's `find_unused_parameters` or `static_graph` says, if `module` is DDP.
        bucket_bytes: About how much is compressed together.
        timeout: Deadline of each collective on CPU; that of torch when omitted.
    """

    def __init__(
        self,
        compressor: Reducer,
        module: nn.Module,
        process_group: Optional[dist.ProcessGroup] = None,
        scaler: Optional[Any] = None,
        unused_parameters: Optional[bool] = None,
        bucket_bytes: int = 25 << 20,
        timeout: Optional[timedelta] = None,
    ) -> None:
        if isinstance(module, DistributedDataParallel):
            if unused_parameters is None:
                unused_parameters = bool(module.find_unused_parameters or module.static_graph)
            module = module.module
        self.compressor = compressor
        self._transaction = Transaction(compressor, scaler)
        self._module = module
        self._process_group, self._timeout = process_group, timeout
        self._unused_parameters, self._bucket_bytes = bool(unused_parameters), bucket_bytes
        self._lane: Lane | None = None
        self._group: Group | None = None
        self._owned: dist.ProcessGroup | None = None
        self._names: dict[int, str] = {}
        self._portions: list[list[str]] = []
        self._portion_of: dict[str, int] = {}
        self._plain = False
        self._arrived: dict[int, dict[str, Tensor]] = {}
        self._buckets: list[_Bucket] = []

    def __deepcopy__(self, memo: object) -> "HookState":
        return self  # it belongs to one DDP module, whose copies share its process group as well

    # ------------------------------------------------------------------------------------------------ called by DDP

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Take a bucket; the future holds its means."""
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                f"expected a bucket of DDP's reducer, found {type(bucket).__name__}: gradients cannot be compressed "
                "under torch._dynamo.config.optimize_ddp='python_reducer'; choose another mode"
            )
        buffer = bucket.buffer()
        lane = self._open(buffer.device)
        named = {self._name(p): gradient for p, gradient in zip(bucket.parameters(), bucket.gradients())}
        future: Future[Tensor] = Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])
        first, last = bucket.index() == 0, bucket.is_last()
        if first:
            self._plain = self.compressor.plain  # equal on all ranks, and settled by the end of a step
        if self._plain:
            lane.submit(lambda: self._average(buffer, future, last))
            return future
        lane.submit(lambda: self._take(_Bucket(buffer, future), named, first, last))
        return future

    def _average(self, buffer: Tensor, future: Future[Tensor], last: bool) -> None:
        """What DDP does without a hook."""
        assert self._group is not None
        try:
            comm.all_reduce_(buffer.div_(self._group.size), self._group)
        except BaseException as error:
            failure: Any = RuntimeError(f"{type(error).__name__}: {error}")
            future.set_exception(failure)
            raise
        if last:
            self.compressor.pass_by()
        future.set_result(buffer)

    def _take(self, bucket: _Bucket, named: Mapping[str, Tensor], first: bool, last: bool) -> None:
        if first:
            self._transaction.finish()
            self._arrived, self._buckets = {}, []
        self._buckets.append(bucket)
        try:
            self._launch(named, bucket, last)
        except BaseException as error:
            self._transaction.abandon()
            for waiting in self._buckets:
                failure: Any = RuntimeError(f"{type(error).__name__}: {error}")
                waiting.future.set_exception(failure)
            self._buckets = []
            raise

    def _launch(self, named: Mapping[str, Tensor], bucket: _Bucket, last: bool) -> None:
        assert self._group is not None
        assert self._lane is not None
        for name, gradient in named.items():
            portion = self._portion_of[name]
            self._arrived.setdefault(portion, {})[name] = gradient
            bucket.waits_for.add(portion)
        # With the last bucket also those of which DDP was told to leave out a parameter.
        ready = [p for p, found in self._arrived.items() if last or len(found) == len(self._portions[p])]
        for portion in sorted(ready):
            gradients = self._arrived.pop(portion)
            used = self._used(gradients, self._group) if self._unused_parameters else gradients
            self._transaction.step(self._group).reduce_(used)
            for waiting in self._buckets:
                waiting.waits_for.discard(portion)
        if last and self._lane.beside_host:
            self._transaction.finish()
        for done in [waiting for waiting in self._buckets if not waiting.waits_for]:
            self._buckets.remove(done)
            done.future.set_result(done.buffer)

    @staticmethod
    def _used(gradients: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
        """Gradients that are not zero everywhere: DDP sends zeros for parameters that were not used."""
        flags = torch.stack([gradient.any() for gradient in gradients.values()]).to(torch.uint8)
        shared = comm.all_reduce_(flags, group, "max").tolist()
        return {name: gradient for (name, gradient), flag in zip(gradients.items(), shared) if flag}

    # ------------------------------------------------------------------------------------------------------- names

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
            self._names = {id(p): name for name, p in named.items()}
            sizes = {name: p.numel() * p.element_size() for name, p in named.items()}
            self._portions = fill(reversed(sizes), sizes, self._bucket_bytes)
            self._portion_of = {name: index for index, names in enumerate(self._portions) for name in names}
        if id(parameter) not in self._names:
            raise RuntimeError(
                f"DDP brought the gradient of a parameter of shape {tuple(parameter.shape)} that "
                f"{type(self._module).__name__} does not have; give `HookState` the module that DDP wraps"
            )
        return self._names[id(parameter)]

    def _open(self, device: torch.device) -> Lane:
        if self._lane is None:
            group = Group.of(self._process_group, axis="data_parallel")
            self._lane = lane_for(device)
            if self._lane.beside_host and group.size > 1:
                group = self._another(group)
            self._group = group
        return self._lane

    def _another(self, group: Group) -> Group:
        """A group of the same ranks with messages of its own: those of the main thread must not come between."""
        settings: dict[str, Any] = {"timeout": self._timeout, "backend": dist.get_backend(group.process_group)}
        if group.size == dist.get_world_size():
            made = self._owned = dist.new_group(list(group.ranks), **settings)
        else:
            # Made by its members alone, such a group must not be destroyed: the next would find its old addresses.
            made = dist.new_group(list(group.ranks), use_local_synchronization=True, **settings)
        return Group.of(made, axis=group.axis)

    # -------------------------------------------------------------------------------------------- between the steps

    def finish(self) -> bool:
        """Wait for the last step; False if it did not count, because a gradient was not finite on some rank.

        Raises:
            Exception: What went wrong in it.
        """
        if self._lane is not None:
            self._lane.wait()
        return self._transaction.finish()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, after the last step."""
        self.finish()
        return self.compressor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of the same rank, or from the compressor's `gather_state()`."""
        self.finish()
        self.compressor.load_state_dict(state, self._process_group)

    def close(self) -> None:
        """End the thread and leave the group that compression used."""
        if self._lane is not None:
            self._lane.close()
        if self._owned is not None:
            dist.destroy_process_group(self._owned)
        self._lane, self._group, self._owned = None, None, None


def compression_hook(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """A communication hook of `DistributedDataParallel`; see `HookState`."""
    return state.reduce(bucket)
