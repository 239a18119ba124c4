"""Compression under `DistributedDataParallel`, inside its backward pass.

In a training loop:

    model = DistributedDataParallel(module)
    state = HookState(PowerSGD(rank=4), model)
    model.register_comm_hook(state, compression_hook)

In Lightning: `DDPStrategy(ddp_comm_state=HookState(PowerSGD(4), module), ddp_comm_hook=compression_hook)`. Lightning
registers communication hooks on CUDA only; on CPU use `CompressedDDPStrategy`.

DDP rebuilds its buckets after the first step and after a resume. This module therefore chooses the gradients to
compress together, by the order of the module's parameters alone. Equal runs then give equal bits:

    DDP's buckets     [ f e d ][ c b ][ a ]        in the order of the first backward pass
    our buckets       [ f e ][ d c ][ b a ]        in reverse order of the parameters

The hook compresses a bucket of ours as soon as all its gradients have arrived. It gives a bucket of DDP back as soon
as our buckets with its gradients are done.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with its own classes.

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_parallel import comm
from lightning_parallel.comm import GradientSession, Group, fill_buckets, overlapping_executor
from lightning_parallel.compat.default_group import all_processes
from lightning_parallel.compat.torch import ddp_ignored_names
from lightning_parallel.compression.compressor_state import SavedStates
from lightning_parallel.compression.hierarchical import HierarchicalReducer
from lightning_parallel.compression.reducer import Reducer, check_reducer, scale_reader

__all__ = ["HookState", "compression_hook"]


class _DdpBucket:
    """A bucket of DDP: done when our buckets that hold its gradients are done.

    Attributes:
        is_last: Whether it is the last bucket of the backward pass; it is done when the step has ended, too.
        waits_for: The indices of our buckets that hold its gradients.
        future: Holds `buffer` when the bucket is done, or raises the error.
    """

    def __init__(self, buffer: Tensor, names: list[str], is_last: bool) -> None:
        self.buffer = buffer
        self.names = names
        self.is_last = is_last
        self.waits_for: set[int] = set()
        self._error: BaseException | None = None
        self._end: Future[Tensor] = Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])
        # DDP reads an error only from a future of `then`; with `set_exception` it fails on the exception object itself.
        self.future: Future[Tensor] = self._end.then(self._result)

    def end(self, error: Optional[BaseException] = None) -> None:
        """Give the buffer back to DDP."""
        self._error = error
        self._end.set_result(self.buffer)

    def _result(self, end: Future[Tensor]) -> Tensor:
        if self._error is not None:
            raise self._error
        return end.value()


class _BackwardPass:
    """One backward pass on its way through the hook.

    Attributes:
        seen: The parameters in the buckets of DDP so far. The thread of backward writes it; the executor writes the
            other attributes.
        arrived: The gradients of our buckets that are not full, by index and name.
        waiting: The buckets of DDP that were not given back.
        failure: The error that has ended the pass.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.arrived: dict[int, dict[str, Tensor]] = {}
        self.waiting: list[_DdpBucket] = []
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """End all buckets that wait, with the error."""
        # All futures must end, or DDP would wait forever. Each future carries the error to the user.
        self.failure = error
        for bucket in self.waiting:
            bucket.end(error)
        self.waiting = []

    def is_reduced(self, index: int) -> None:
        """Note that our bucket `index` is reduced."""
        for bucket in self.waiting:
            bucket.waits_for.discard(index)
        self.give_back(with_last=False)

    def give_back(self, with_last: bool) -> None:
        """Give finished buckets back to DDP; the last bucket only `with_last`, after the step has ended."""
        for done in [one for one in self.waiting if not one.waits_for and (with_last or not one.is_last)]:
            self.waiting.remove(done)
            done.end()


class HookState:
    """Holds the state of `compression_hook`: the compressor and its steps.

    One backward pass with synchronization is one step of the compressor. Inside `no_sync()`, DDP does not call the
    hook.

    Example:
        ```py
        from lightning_parallel import HookState, PowerSGD, compression_hook
        from torch.nn.parallel import DistributedDataParallel

        replica = DistributedDataParallel(MyModel())  # in your own loop, after `init_process_group`
        state = HookState(PowerSGD(rank=4), replica)
        replica.register_comm_hook(state, compression_hook)
        ```

    Args:
        compressor: Compressor of the gradients. Its state is keyed by the module's parameter names. A
            `HierarchicalReducer` has its own groups of the ranks of `process_group`.
        module: Module that computes the gradients, wrapped in DDP or not. `HookState` uses only its names.
        process_group: Process group of the DDP module. By default all ranks.
        scaler: The `torch.amp.GradScaler`, if you use one. Residuals are kept without its scale.
        unused_parameters: Find parameters without a gradient on every rank, and leave their residuals unchanged. None
            follows `find_unused_parameters` or `static_graph` of DDP, if `module` is DDP.
        bucket_bytes: Approximate bytes of the gradients that a rank compresses together. 25 MiB by default.
        timeout: Deadline of each collective on CPU. By default torch's.

    Raises:
        TypeError: If `compressor` is not a compressor.

    Attributes:
        reduced: Parameters that got a gradient in the last backward pass.
    """

    def __init__(
        self,
        compressor: Union[Reducer, HierarchicalReducer],
        module: nn.Module,
        process_group: Optional[dist.ProcessGroup] = None,
        scaler: Optional[Any] = None,
        unused_parameters: Optional[bool] = None,
        bucket_bytes: int = 25 << 20,
        timeout: Optional[timedelta] = None,
    ) -> None:
        if isinstance(compressor, HierarchicalReducer):
            bucket_bytes *= compressor.nodes.inside.size  # each rank compresses its part
        else:
            check_reducer(compressor)
        self._trainable: dict[str, int] = {}
        if isinstance(module, DistributedDataParallel):
            if unused_parameters is None:
                unused_parameters = bool(module.find_unused_parameters or module.static_graph)
            module = module.module
            # The names at the time of wrapping: DDP still brings parameters that are frozen later, as zeros.
            self._trainable = _trainable(module)
        self.compressor = compressor
        self._module = module
        self._scaler = scaler
        self._process_group = process_group
        self._timeout = timeout
        self._unused_parameters = bool(unused_parameters)
        self._bucket_bytes = bucket_bytes
        self._session: GradientSession | None = None
        self._owned_groups: list[dist.ProcessGroup] = []
        self._names: dict[int, str] = {}
        self._buckets: list[list[str]] = []
        self._bucket_of: dict[str, int] = {}
        # The thread of backward uses these two.
        self._arriving: _BackwardPass | None = None
        self._with_gradient: set[str] = set()
        # The executor uses the rest.
        self._reducing: _BackwardPass | None = None
        self._used: set[str] = set()
        self.reduced: set[str] = set()
        self._gradient_hooks: list[RemovableHandle] = []
        if self._unused_parameters:
            self._watch_gradients(module)

    def __deepcopy__(self, memo: object) -> "HookState":
        return self  # it belongs to one DDP module, whose copies share its process group as well

    # ------------------------------------------------------------------------------------------------------- backward

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Reduce a bucket of DDP. The future holds the bucket with the averaged gradients."""
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                f"`torch._dynamo.config.optimize_ddp` must not be 'python_reducer' with compression; got a"
                f" {type(bucket).__name__} instead of a bucket of DDP. Choose another mode"
            )
        buffer = bucket.buffer()
        # Names are checked before the session creates its group, together with all ranks. A later error on one rank
        # would leave its peers connecting.
        names = [self._name(parameter) for parameter in bucket.parameters()]
        backward = self._arriving
        # A parameter that arrives again begins a new pass: an error has ended the old pass before its last bucket.
        if backward is None or not backward.seen.isdisjoint(names):
            backward = _BackwardPass()
        backward.seen.update(names)
        # DDP does not count its buckets if it reduces all at once, as in the first step of a static graph.
        is_last = bucket.is_last() or (bucket.index() == 0 and backward.seen >= self._bucket_of.keys())
        self._arriving = None if is_last else backward
        session = self._open_session(buffer.device)
        taken = _DdpBucket(buffer, names, is_last)
        gradients: dict[str, Tensor] = {}
        for name, gradient, parameter in zip(names, bucket.gradients(), bucket.parameters()):
            gradients[name] = _with_layout_of(parameter, gradient)
        with_gradient = self._with_gradient & gradients.keys()
        self._with_gradient -= with_gradient
        # One executor runs the buckets in their order of arrival, which DDP keeps equal on all ranks.
        session.executor.submit(partial(self._process, session, backward, taken, gradients, with_gradient))
        return taken.future

    @torch.no_grad()
    def _process(
        self,
        session: GradientSession,
        backward: _BackwardPass,
        bucket: _DdpBucket,
        gradients: Mapping[str, Tensor],
        with_gradient: set[str],
    ) -> None:
        is_first = self._reducing is not backward
        self._reducing = backward
        backward.waiting.append(bucket)
        try:
            if backward.failure is not None:
                raise backward.failure
            if is_first:
                session.end_step()  # of the last pass, if `finish` was not called
                self.reduced = set()
            self._compress(session, backward, bucket, gradients, with_gradient)
        except BaseException as error:
            session.discard()
            backward.fail(error)
            raise

    def _compress(
        self,
        session: GradientSession,
        backward: _BackwardPass,
        bucket: _DdpBucket,
        gradients: Mapping[str, Tensor],
        with_gradient: set[str],
    ) -> None:
        if bucket.buffer.layout != torch.strided:  # no compressor takes it, and DDP shows none of its gradients
            # Collectives of started buckets must not interleave with this all-reduce on the same group.
            session.drain()
            comm.all_reduce_(bucket.buffer.div_(session.group.size), session.group)
            session.step.watch(bucket.buffer)
            self.reduced |= set(bucket.names)
        for name, gradient in gradients.items():
            index = self._bucket_of[name]
            backward.arrived.setdefault(index, {})[name] = gradient
            bucket.waits_for.add(index)
        self._used |= with_gradient
        # Sorted: all ranks must start the buckets, and so their collectives, in one order.
        for index in sorted(backward.arrived):
            # The last bucket also completes our buckets with a parameter that DDP was told to ignore.
            if not bucket.is_last and len(backward.arrived[index]) < len(self._buckets[index]):
                continue
            arrived = backward.arrived.pop(index)
            used = self._used_anywhere(arrived, session) if self._unused_parameters else arrived
            session.start(used, partial(self._take_means, backward, index))
        if bucket.is_last and session.executor.overlaps_host:
            session.end_step()  # on a stream the verdict would block the host until the kernels are done
        backward.give_back(with_last=bucket.is_last)

    def _take_means(
        self, backward: _BackwardPass, index: int, means: Mapping[str, Tensor], error: Optional[BaseException]
    ) -> None:
        if error is not None:
            return  # it is raised at the end of the step
        self.reduced |= means.keys()
        backward.is_reduced(index)

    def _used_anywhere(self, gradients: Mapping[str, Tensor], session: GradientSession) -> dict[str, Tensor]:
        """Return the gradients that came on some rank since the last step."""
        # For other parameters DDP brings zeros or an old mean, and error feedback would spend its residuals on them.
        # The started buckets finish first, because this exchange uses their group.
        session.drain()
        shared = comm.on_any_rank([name in self._used for name in gradients], session.group)
        self._used -= gradients.keys()
        return {name: gradient for (name, gradient), flag in zip(gradients.items(), shared) if flag}

    def _watch_gradients(self, module: nn.Module) -> None:
        """Register which parameters get a gradient in a backward pass: DDP does not tell."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                # This hook runs before the hook of DDP, and does not run for `torch.autograd.grad`.
                self._gradient_hooks.append(
                    parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
                )

    def _note_gradient(self, name: str, parameter: Tensor) -> None:
        self._with_gradient.add(name)

    # ----------------------------------------------------------------------------------------- names, group, executor

    def _name(self, parameter: Tensor) -> str:
        if not self._names:
            sizes = self._trainable or _trainable(self._module)
            self._names = {id(p): name for name, p in self._module.named_parameters()}
            self._buckets = fill_buckets(dict(reversed(sizes.items())), self._bucket_bytes)
            self._bucket_of = {name: index for index, names in enumerate(self._buckets) for name in names}
        if id(parameter) not in self._names:
            raise RuntimeError(
                f"DDP passed the gradient of a parameter of shape {tuple(parameter.shape)} that "
                f"{type(self._module).__name__} does not have; give `HookState` the module that DDP wraps"
            )
        name = self._names[id(parameter)]
        if name not in self._bucket_of:  # frozen since DDP wrapped it; DDP brings it on all ranks at this point
            self._bucket_of[name] = len(self._buckets)
            self._buckets.append([name])
        return name

    def _open_session(self, device: torch.device) -> GradientSession:
        if self._session is None:
            group = Group.of(self._process_group, axis="data_parallel")
            executor = overlapping_executor(device)
            second = None
            if executor.overlaps_host and group.size > 1:
                # Where buckets overlap, see `GradientSession` and `HierarchicalStep`.
                if device.type == "cpu" and not isinstance(self.compressor, HierarchicalReducer):
                    second = self._extra_group(group)
                group = self._extra_group(group)
            self._session = GradientSession(
                self.compressor, group, executor, loss_scale=scale_reader(self._scaler), second_group=second
            )
        return self._session

    def _extra_group(self, group: Group) -> Group:
        """Create a second group of the same ranks, so that messages of the main thread cannot interleave with ours."""
        settings: dict[str, Any] = {"timeout": self._timeout, "backend": dist.get_backend(group.process_group)}
        if group.size == all_processes().size():
            made = dist.new_group(list(group.ranks), **settings)
            self._owned_groups.append(made)
        else:
            # The members alone create this group, and it is never destroyed: the next group would find its old
            # addresses in the store.
            made = dist.new_group(list(group.ranks), use_local_synchronization=True, **settings)
        return Group.of(made, axis=group.axis)

    # -------------------------------------------------------------------------------------------- between the steps

    def finish(self) -> bool:
        """Wait for the last step. Return False if a gradient was not finite on some rank, so that the step was skipped.

        Raises:
            Exception: The error of the compressor, if there was one.
        """
        return self._session is None or self._session.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, after the last step."""
        self.finish()
        return self.compressor.state_dict()

    def load_state_dict(self, state: SavedStates) -> None:
        """Continue from `state_dict()` of the same rank, or from a list with the states of all ranks."""
        self.finish()
        self.compressor.load_state_dict(state, self._process_group)

    def close(self) -> None:
        """End the thread and destroy the group that compression used."""
        if self._session is not None:
            self._session.close()
            self._session = None
        for hook in self._gradient_hooks:
            hook.remove()
        for group in self._owned_groups:
            dist.destroy_process_group(group)
        self._owned_groups = []


def _with_layout_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Restore the strides of a gradient: DDP stores it laid out like its parameter, but shows it as contiguous."""
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient
    return gradient.as_strided(parameter.size(), parameter.stride())


def _trainable(module: nn.Module) -> dict[str, int]:
    """Return the bytes of the parameters whose gradients DDP would reduce if it wrapped `module` now, by name."""
    ignored = ddp_ignored_names(module)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in ignored}
    return {name: p.numel() * p.element_size() for name, p in named.items()}


def compression_hook(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Reduce a bucket with a compressor, as a communication hook of `DistributedDataParallel`. See `HookState`.

    Example:
        ```py
        from lightning_parallel import HookState, Quantize, compression_hook
        from torch.nn.parallel import DistributedDataParallel

        replica = DistributedDataParallel(MyModel())  # in your own loop, after `init_process_group`
        replica.register_comm_hook(HookState(Quantize(8), replica), compression_hook)
        ```

    Args:
        state: The compressor, and its steps so far.
        bucket: The gradients, from `DistributedDataParallel`.

    Returns:
        A future with the reduced bucket.
    """
    return state.reduce(bucket)
