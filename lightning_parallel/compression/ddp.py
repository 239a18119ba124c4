"""Compression inside the backward pass of `DistributedDataParallel`.

In people's own code:

    model = DistributedDataParallel(module)
    state = HookState(PowerSGD(rank=4), model)
    model.register_comm_hook(state, compression_hook)

and in Lightning `DDPStrategy(ddp_comm_state=HookState(PowerSGD(4), module), ddp_comm_hook=compression_hook)`, on CUDA:
elsewhere Lightning passes over hooks, but not `CompressedDDPStrategy`.

DDP fills its buckets, and fills them anew after the first step and after a resume. What is compressed together is
therefore chosen here, by the order of the module's parameters alone: equal runs give equal bits.
"""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compression.lanes import Lane, lane_for
from lightning_parallel.compression.reducer import Reducer, check_reducer
from lightning_parallel.compression.transaction import Transaction, fill

__all__ = ["HookState", "compression_hook"]


class _DdpBucket:
    """A bucket of DDP: finished when all the portions that hold a gradient of it are.

    Attributes:
        future: Holds `buffer` when it is finished, or raises what went wrong. DDP can read an error only from what
            `then` returns: `set_exception` makes it fail on the exception object.
    """

    def __init__(self, buffer: Tensor, names: list[str], last: bool) -> None:
        self.buffer, self.names, self.last = buffer, names, last
        self.waits_for: set[int] = set()
        self._error: BaseException | None = None
        self._end: Future[Tensor] = Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])
        self.future: Future[Tensor] = self._end.then(self._result)

    def end(self, error: Optional[BaseException] = None) -> None:
        """Give the buffer back to DDP."""
        self._error = error
        self._end.set_result(self.buffer)

    def _result(self, end: Future[Tensor]) -> Tensor:
        if self._error is not None:
            raise self._error
        return end.value()


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

    Attributes:
        reduced: Parameters that the last backward pass brought a gradient of.
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
        check_reducer(compressor)
        if isinstance(module, DistributedDataParallel):
            if unused_parameters is None:
                unused_parameters = bool(module.find_unused_parameters or module.static_graph)
            trainable = _trainable(module.module)  # as DDP saw it; what is frozen later still comes, as zeros
            module = module.module
        else:
            trainable = None
        self.compressor = compressor
        self._transaction = Transaction(compressor, scaler)
        self._module, self._trainable = module, trainable
        self._process_group, self._timeout = process_group, timeout
        self._unused_parameters, self._bucket_bytes = bool(unused_parameters), bucket_bytes
        self._lane: Lane | None = None
        self._group: Group | None = None
        self._owned: dist.ProcessGroup | None = None
        self._names: dict[int, str] = {}
        self._portions: list[list[str]] = []
        self._portion_of: dict[str, int] = {}
        self._plain = False
        self._seen: set[str] = set()  # of the backward pass that runs
        self._arrived: dict[int, dict[str, Tensor]] = {}
        self._buckets: list[_DdpBucket] = []
        self._failure: BaseException | None = None
        self.reduced: set[str] = set()
        self._touched: set[str] = set()
        self._used: set[str] = set()  # the same, in the lane
        self._watches: list[RemovableHandle] = []
        if self._unused_parameters:
            self._watch(module)

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
        names = [self._name(parameter) for parameter in bucket.parameters()]
        first = not self._seen.isdisjoint(names) or not self._seen
        self._seen = set(names) if first else self._seen.union(names)
        # DDP does not count its buckets where it reduces all at once, as in the first step of a static graph.
        last = bucket.is_last() or (bucket.index() == 0 and self._seen >= self._portion_of.keys())
        if first:
            self._plain = self.compressor.is_plain  # equal on all ranks, and settled by the end of a step
        if last:
            self._seen = set()
        taken = _DdpBucket(buffer, names, last)
        pairs = zip(bucket.gradients(), bucket.parameters())
        gradients = dict(zip(names, (_laid_out(gradient, parameter) for gradient, parameter in pairs)))
        touched = self._touched & gradients.keys()
        self._touched -= touched
        lane.submit(lambda: self._take(taken, gradients, touched, first))
        return taken.future

    def _take(self, bucket: _DdpBucket, gradients: Mapping[str, Tensor], touched: set[str], first: bool) -> None:
        if first:
            self._arrived, self._buckets, self._failure, self.reduced = {}, [], None, set()
        self._buckets.append(bucket)
        try:
            if self._failure is not None:
                raise self._failure
            if first:
                self._transaction.finish()
            if self._plain:
                self._average(bucket)
            else:
                self._launch(gradients, touched, bucket)
        except BaseException as error:
            self._failure = error
            self._transaction.abandon()
            for waiting in self._buckets:
                waiting.end(error)
            self._buckets = []
            raise

    def _average(self, bucket: _DdpBucket) -> None:
        """What DDP does without a hook."""
        assert self._group is not None
        comm.all_reduce_(bucket.buffer.div_(self._group.size), self._group)
        if bucket.last:
            self.compressor.count_plain_step()
        self._buckets.remove(bucket)
        bucket.end()

    def _launch(self, gradients: Mapping[str, Tensor], touched: set[str], bucket: _DdpBucket) -> None:
        assert self._group is not None
        assert self._lane is not None
        if bucket.buffer.layout != torch.strided:  # no compressor takes it, and DDP shows none of its gradients
            comm.all_reduce_(bucket.buffer.div_(self._group.size), self._group)
            self._transaction.step(self._group).watch(bucket.buffer)
            self.reduced |= set(bucket.names)
        for name, gradient in gradients.items():
            portion = self._portion_of[name]
            self._arrived.setdefault(portion, {})[name] = gradient
            bucket.waits_for.add(portion)
        self._used |= touched
        # With the last bucket also those of which DDP was told to leave out a parameter.
        ready = [p for p, found in self._arrived.items() if bucket.last or len(found) == len(self._portions[p])]
        for portion in sorted(ready):
            arrived = self._arrived.pop(portion)
            used = self._used_anywhere(arrived, self._group) if self._unused_parameters else arrived
            self._transaction.step(self._group).reduce_(used)
            self.reduced |= used.keys()
            for waiting in self._buckets:
                waiting.waits_for.discard(portion)
        if bucket.last and self._lane.beside_host:
            self._transaction.finish()
        for done in [waiting for waiting in self._buckets if not waiting.waits_for]:
            self._buckets.remove(done)
            done.end()

    def _used_anywhere(self, gradients: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
        """Gradients that came on some rank since the last step; for the others DDP brings zeros, or an old mean."""
        device = next(iter(gradients.values())).device
        flags = torch.tensor([name in self._used for name in gradients], dtype=torch.uint8, device=device)
        self._used -= gradients.keys()
        shared = comm.all_reduce_(flags, group, "max").tolist()
        return {name: gradient for (name, gradient), flag in zip(gradients.items(), shared) if flag}

    def _watch(self, module: nn.Module) -> None:
        """Notice which parameters a backward brings a gradient of, which DDP does not tell."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                # Before the hook of DDP, and not for `torch.autograd.grad`.
                self._watches.append(parameter.register_post_accumulate_grad_hook(partial(self._notice, name)))

    def _notice(self, name: str, parameter: Tensor) -> None:
        self._touched.add(name)

    # ------------------------------------------------------------------------------------------------------- names

    def _name(self, parameter: Tensor) -> str:
        if not self._names:
            sizes = self._trainable or _trainable(self._module)
            self._names = {id(p): name for name, p in self._module.named_parameters()}
            self._portions = fill(reversed(sizes), sizes, self._bucket_bytes)
            self._portion_of = {name: index for index, names in enumerate(self._portions) for name in names}
        if id(parameter) not in self._names:
            raise RuntimeError(
                f"DDP brought the gradient of a parameter of shape {tuple(parameter.shape)} that "
                f"{type(self._module).__name__} does not have; give `HookState` the module that DDP wraps"
            )
        name = self._names[id(parameter)]
        if name not in self._portion_of:  # frozen since DDP wrapped it; DDP brings it on all ranks at this point
            self._portion_of[name] = len(self._portions)
            self._portions.append([name])
        return name

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
        for watch in self._watches:
            watch.remove()
        if self._owned is not None:
            dist.destroy_process_group(self._owned)
        self._lane, self._group, self._owned = None, None, None


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """DDP lays gradients out as their parameters, where those are dense, but shows them as if contiguous."""
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient
    return gradient.as_strided(parameter.size(), parameter.stride())


def _trainable(module: nn.Module) -> dict[str, int]:
    """Bytes of the parameters whose gradients DDP would reduce if it wrapped `module` now, by name."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in ignored}
    return {name: p.numel() * p.element_size() for name, p in named.items()}


def compression_hook(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """A communication hook of `DistributedDataParallel`; see `HookState`."""
    return state.reduce(bucket)
