"""Parameters in slices, one per replica: only this replica updates its slice and keeps its optimizer state (ZeRO).

    parameter   [ replica 0 | replica 1 | ... ]     its elements in order; the last slices may be smaller, or empty

A parameter is *narrow* while its data and gradient are this replica's slice, and *whole* otherwise. It stays the same
object, so parameter groups, schedulers and clipping work without a change. An elementwise optimizer sees no difference.
When parameters become whole again, the replicas gather the updated slices. With `gathers_late` they do so while the
next forward runs: a parameter is *absent* until its message has arrived, and its first function waits.

    step       [ optimizer ][ begin all gathers ]
    forward                                      [ layer 0 ][ layer 1 ] ... each waits for its own parameters
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending, Traffic, fill_buckets
from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import global_step_hooks, step_hooks_of, storage_address, tensors_of_memory
from lightning_parallel.data_parallel.absent_parameters import Arrivals
from lightning_parallel.data_parallel.bucketed_reducer import BUCKET_BYTES
from lightning_parallel.data_parallel.host_steps import HostSteps, put_data

__all__ = [
    "MOST_IN_FLIGHT",
    "MOST_LATE",
    "ParameterSlices",
    "check_divisible",
    "padded_to",
    "wrap_step",
    "write_columns",
]


MOST_IN_FLIGHT = 2  # buckets under way while another one is made
MOST_LATE = 8  # the same for buckets of parameters that arrive while the next forward runs


class ParameterSlices:
    """Divides the parameters of a module over the replicas during optimizer steps.

    Args:
        parameters: The module's parameters on this rank, by name; scalars are not divided.
        group: The data-parallel group.
        bucket_bytes: Approximate size of a message that gathers slices.

    Attributes:
        traffic: Buckets of parameters in flight.
        holds_gradients: Whether gradients are slices now, after the reduction; the same on all ranks.
        stays_for_step: Whether gathered parameters stay full until the end of the step.
        gathers_late: Whether the replicas gather the slices of a step while the next forward runs.
        host: Runs the steps of optimizers in host memory; None on the device.

    Raises:
        ValueError: If a parameter is complex.

    Source: ZeRO, https://arxiv.org/abs/1910.02054
    """

    keeps_slices = False
    """Whether a replica holds only its slices between steps; see `ParameterShards`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.group = group
        self._bucket_bytes = bucket_bytes
        self.host: HostSteps | None = None
        self._arrivals = Arrivals()
        self.adopt(parameters)
        self.traffic = Traffic()
        self.holds_gradients = False
        self.stays_for_step = False
        self.gathers_late = False
        # By narrow parameter: its full data, and its full gradient if `widen` must restore the gradient.
        self._whole: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        self._freed: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._divided: list[Optimizer] = []
        self._step_hooks: list[RemovableHandle] = []

    def offload(self, device: torch.device) -> None:
        """Let optimizers step in host memory on copies of the slices, and keep their state there, from now on."""
        if self.host is None:
            self.host = HostSteps(device)

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Divide these parameters from now on; call it while no parameter is narrow.

        Raises:
            ValueError: If a parameter is complex.
        """
        self.settle()
        if self.group.size > 1:
            check_divisible(parameters)
        self._parameters = {id(p): p for p in parameters.values() if p.dim() > 0}
        self._late_steps = 0
        self._read: dict[int, int] = {}
        self._arrivals.order.clear()
        self._position = {key: index for index, key in enumerate(self._parameters)}
        if self.host is not None:
            self.host.keep(self._parameters)

    # ------------------------------------------------------------------------------------------------ which elements

    def divides(self, parameter: Tensor) -> bool:
        """Return whether a parameter is divided."""
        return id(parameter) in self._parameters

    def width(self, numel: int) -> int:
        """Return the number of elements in each slice, except the last slices, of a tensor of `numel` elements."""
        width = -(-numel // self.group.size)
        # Aligned, because kernels read several elements at once. The width depends only on the size, because optimizer
        # state may have another dtype or device, and needs the same slices.
        return width if width < _LARGE else -(-width // _ALIGNED) * _ALIGNED

    def size(self, numel: int) -> int:
        """Return the number of elements in this replica's slice of a tensor of `numel` elements."""
        return self.sizes(numel)[self.group.rank]

    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the number of elements in the slice of each replica of a tensor of `numel` elements."""
        width = self.width(numel)
        return tuple(max(0, min(width, numel - rank * width)) for rank in range(self.group.size))

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this replica's slice of a full tensor, with as many dimensions; a view if the tensor is contiguous."""
        if self.group.size == 1:
            return tensor
        start = min(self.group.rank * self.width(tensor.numel()), tensor.numel())
        part = tensor.reshape(-1).narrow(0, start, self.size(tensor.numel()))
        # The dimensions stay: some optimizers decay or scale matrices, but not vectors.
        return part.view(-1, *[1] * (tensor.dim() - 1))

    def merge(self, mine: Tensor, shape: torch.Size) -> Tensor:
        """Return the full tensor from the slices of all replicas; every replica must call it."""
        rows: Tensor = comm.all_gather(padded_to(self.width(shape.numel()), mine), self.group)
        return rows[: shape.numel()].view(shape)

    # ----------------------------------------------------------------------------------------------- narrow and whole

    def is_narrow(self, parameter: Tensor) -> bool:
        """Return whether a parameter's data are this replica's slice now."""
        return parameter in self._whole

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of a parameter that may be narrow now."""
        return self._whole[parameter][0].shape if parameter in self._whole else parameter.shape

    def whole_data(self, parameter: Tensor) -> Tensor | None:
        """Return the full data of a parameter that is narrow now."""
        return self._whole[parameter][0] if parameter in self._whole else None

    def begin(self) -> None:
        """Note that gradients are slices until `widen`; every rank must call it."""
        self.settle()
        self.holds_gradients = True
        self._freed.clear()

    def kept(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that this replica keeps between its uses."""
        return parameter

    @property
    def gathered_together(self) -> Sequence[Sequence[nn.Parameter]]:
        """The parameters of which a replica keeps slices, by unit."""
        return ()

    def has_freed(self, parameter: Tensor) -> bool:
        """Return whether the last step held only a slice of a parameter's gradient, which is now freed."""
        return id(parameter) in self._freed

    @torch.no_grad()
    def narrow(self, parameter: nn.Parameter, gradient: Tensor | None = None) -> None:
        """Make a whole parameter narrow.

        Args:
            parameter: A parameter for which `divides` is true.
            gradient: Slice of its gradient. None takes the slice from `.grad`, which `widen` restores.
        """
        self.settle()
        whole = parameter.data
        kept = None
        if gradient is None and parameter.grad is not None:
            kept, gradient = parameter.grad, self.cut(parameter.grad)
        self._whole[parameter] = whole, kept
        mine = self.cut(whole)
        put_data(parameter, mine, None if gradient is None else gradient.view(mine.shape))

    @torch.no_grad()
    def widen(self, gathered: Iterable[nn.Parameter] = ()) -> None:
        """Make all narrow parameters whole again.

        Args:
            gathered: Parameters whose slices the replicas gather, the same on all replicas; narrow or not.
        """
        self._gather(list(gathered), self._restore())

    def _restore(self) -> dict[Tensor, Tensor]:
        """Give narrow parameters their full data; return their slices, as the last step has left them."""
        # A function of its own, so that no variable of `widen` holds the full data; see `_may_be_late`.
        updated = {parameter: parameter.data for parameter in self._whole}
        for parameter, (whole, gradient) in self._whole.items():
            if gradient is None and parameter.grad is not None:
                self._freed.add(id(parameter))
            put_data(parameter, whole, gradient)
        self._whole = {}
        self.holds_gradients = False
        return updated

    def in_pass(self, is_last: bool = True) -> AbstractContextManager[None]:
        """Run a pass of the model inside the block; `is_last` unless a backward pass follows."""
        return nullcontext()

    def held(self) -> AbstractContextManager[None]:
        """Keep the full data of all parameters inside the block; every replica must call it."""
        return nullcontext()

    def shown(self) -> AbstractContextManager[None]:
        """Show slices to code in the block that would otherwise gather parameters, such as `state_dict`."""
        return nullcontext()

    def show(self) -> None:
        """Prepare the parameters for code that sees them in full, until `hide`."""
        self.settle()

    def gather_late(self, module: nn.Module) -> None:
        """Gather the slices of each step while the next forward runs, from now on."""
        self.gathers_late = True
        self._arrivals.hold(module)

    def settle(self) -> None:
        """Wait for all parameters that are on their way; no message."""
        self._arrivals.take_all()

    def hide(self) -> None:
        """End what `show` began."""

    def _gather(self, parameters: Sequence[nn.Parameter], updated: Mapping[Tensor, Tensor]) -> None:
        if self.group.size == 1 or not parameters:
            return  # alone, the slice is the parameter
        if self.gathers_late:
            self._agree_on_order()
        waits: list[Callable[[], None]] = []
        buckets: list[tuple[Callable[[], None], bool]] = []  # under way; whether they may arrive late
        for members in self._messages_of(parameters):
            # Before the message, which holds their memory as well.
            is_late = self.gathers_late and all(self._may_be_late(p, updated) for p in members)
            is_bucket = not self._is_in_rows(members[0])
            wait = self._send_bucket(members, updated) if is_bucket else self._send_rows(members[0], updated)
            if is_late:
                self._arrivals.expect(members, wait)
                wait = partial(self._arrivals.take, members)
            if is_bucket:
                buckets.append((wait, is_late))
            elif not is_late:
                waits.append(wait)
            # A limit for memory: each bucket in flight holds the slices of all replicas.
            if len(buckets) > (MOST_LATE if self.gathers_late else MOST_IN_FLIGHT):
                buckets.pop(0)[0]()
        for wait in [*waits, *(wait for wait, is_late in buckets if not is_late)]:
            wait()

    def _messages_of(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the parameters that travel together, in the order of their reads; the same on all replicas."""
        ordered = sorted(set(parameters), key=lambda parameter: self._position[id(parameter)])
        small = {str(self._position[id(p)]): p for p in ordered if not self._is_in_rows(p)}
        sizes = {name: p.numel() * p.element_size() for name, p in small.items()}
        buckets = fill_buckets(sizes, self._bucket_bytes, lambda name: (small[name].dtype, small[name].device))
        messages = [[small[name] for name in names] for names in buckets]
        messages += [[parameter] for parameter in ordered if self._is_in_rows(parameter)]
        # As the first forward has waited for them.
        return sorted(messages, key=lambda members: self._rank_in_forward(self._position[id(members[0])]))

    def _rank_in_forward(self, position: int) -> tuple[int, int]:
        return self._read.get(position, len(self._read)), position

    def _agree_on_order(self) -> None:
        """Take the order in which the first replica has read its parameters, in the second step; a message, once."""
        self._late_steps += 1
        if self._late_steps == 2:
            mine = [self._position[key] for key in self._arrivals.order if key in self._position]
            self._read = {position: rank for rank, position in enumerate(comm.broadcast_object(mine, self.group))}

    def _may_be_late(self, parameter: nn.Parameter, updated: Mapping[Tensor, Tensor]) -> bool:
        """Return whether code can read the memory of a parameter only through the parameter.

        Call it where the parameter is whole, and nothing but `updated` has its slice.
        """
        own = 1 if parameter not in updated or not _shares_memory(parameter, updated[parameter]) else 2
        return type(parameter) is nn.Parameter and tensors_of_memory(parameter) == own

    def _is_in_rows(self, parameter: nn.Parameter) -> bool:
        """Return whether the slices of a large parameter are the rows of its memory; the same on all replicas."""
        numel = parameter.numel()
        is_large = numel * parameter.element_size() >= _DIRECT_BYTES * self.group.size
        return is_large and parameter.is_contiguous() and self.width(numel) * self.group.size == numel

    def _send_rows(self, parameter: nn.Parameter, updated: Mapping[Tensor, Tensor]) -> Callable[[], None]:
        """Begin to gather a parameter into its own memory; return the function that waits."""
        # The slices are already in their rows of the full parameter, so this needs no copy and no further memory.
        rows = parameter.data.view(self.group.size, -1)
        mine = rows[self.group.rank]
        if parameter in updated and updated[parameter].data_ptr() != mine.data_ptr():
            mine.copy_(updated[parameter].view(-1))  # the optimizer has put another tensor into its place
        return comm.all_gather_(rows, self.group, async_op=True).wait

    def _send_bucket(self, members: Sequence[nn.Parameter], updated: Mapping[Tensor, Tensor]) -> Callable[[], None]:
        """Begin to gather small parameters; return the function that waits and writes them."""
        slices = [updated[p] if p in updated else self.cut(p.data) for p in members]
        row = torch.cat([padded_to(self.width(p.numel()), mine) for p, mine in zip(members, slices)])
        self.traffic.add(row.nbytes * (1 + self.group.size))
        pending = comm.all_gather(row, self.group, async_op=True)
        return partial(self._land, [p.data for p in members], pending)

    def _land(self, members: Sequence[Tensor], pending: Pending) -> None:
        """Wait for a bucket, and write it into the full data of its parameters."""
        rows = pending.wait().view(self.group.size, -1)
        for whole, columns in zip(members, rows.split([self.width(each.numel()) for each in members], 1)):
            write_columns(whole, columns)
        self.traffic.remove(rows.nbytes // self.group.size * (1 + self.group.size))

    def restore(self) -> None:
        """Give all parameters their full data for good; every replica must call it."""
        self.widen()

    def close(self) -> None:
        """Make parameters whole, with their values before a failed step, and remove all hooks.

        A parameter whose message failed stays absent, and a read of it raises the error of the message.
        """
        self.gathers_late = False
        self.widen()
        with suppress(RuntimeError):
            self.settle()
        for hook in (*self._hooks, *self._step_hooks):
            hook.remove()
        self._hooks.clear()
        self._step_hooks.clear()
        if self.host is not None:
            self.host.keep(())

    # -------------------------------------------------------------------------------------------------- state dicts

    def keep_states_whole(self, module: nn.Module) -> None:
        """Make state dicts hold and load full parameters, with the values before the step, until `close`.

        Otherwise a hook between backward and step would save or load this replica's slice of a narrow parameter.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for owner in module.modules():
            if any(self.divides(parameter) for parameter in owner.parameters(recurse=False)):
                self._watch(owner)

    def _watch(self, owner: nn.Module) -> None:
        shown: list[tuple[Tensor, Tensor, Tensor | None]] = []

        # Functions instead of methods, because torch sets an attribute on its hooks. Copies of a module have the hooks
        # too, but no narrow parameters.
        def before(module: nn.Module, *_: Any) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter in self._whole:
                    shown.append((parameter, parameter.data, parameter.grad))
                    put_data(parameter, self._whole[parameter][0], None)

        def after(module: nn.Module, *_: Any) -> None:
            while shown:
                put_data(*shown.pop())

        self._hooks.append(owner.register_state_dict_pre_hook(before))
        self._hooks.append(owner.register_state_dict_post_hook(after))
        # The slice is a view of the full data, so it has the loaded values.
        self._hooks.append(owner.register_load_state_dict_pre_hook(before))
        self._hooks.append(owner.register_load_state_dict_post_hook(after))

    # --------------------------------------------------------------------------------------------------- optimizers

    def divide(
        self,
        optimizer: Optimizer,
        patches: Patches,
        shown: Callable[[Optimizer], AbstractContextManager[None]] | None = None,
        in_turns: bool = False,
    ) -> None:
        """Make an optimizer update slices, and keep the state of slices, until `patches` are undone.

        The closure runs before parameters become narrow. Hooks of the step see whole parameters.

        Args:
            optimizer: The optimizer.
            patches: Undo the change.
            shown: Runs around the step, with the parameters narrow; it may show full tensors.
            in_turns: Whether its step may be called for one bucket of parameters after another.
        """
        self._cut_state(optimizer)
        self._divided.append(optimizer)
        is_first = True
        if self.host is not None and in_turns:
            self.host.in_turns.add(optimizer)

        def narrowed(_: Optimizer) -> Iterator[None]:
            nonlocal is_first
            if is_first:
                self._cut_state(optimizer)  # a step that ran during `divide` may have made state of full parameters
                is_first = False
            self.settle()
            parameters = self._trained(optimizer)
            for parameter in parameters:
                if parameter.grad is not None and not self.is_narrow(parameter):
                    self.narrow(parameter)
            gathered: list[nn.Parameter] = []
            try:
                with nullcontext() if shown is None else shown(optimizer):
                    yield from self._turns(optimizer, parameters)
                gathered = parameters
            finally:
                # After an error this gathers nothing: parameters return to their values before the step.
                self.widen(gathered)

        wrap_step(optimizer, patches, narrowed)

    def _turns(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Yield for each call of a step, in host memory with `offload`."""
        if self.host is None:
            yield
            return
        narrow = [parameter for parameter in parameters if self.is_narrow(parameter)]
        # Such as parameters without dimensions, whose state is on the host as well.
        whole = [p for p in _parameters_of(optimizer) if p.grad is not None and not self.divides(p)]
        yield from self.host.turns(optimizer, [*narrow, *whole])

    @contextmanager
    def taken_off(self, optimizer: Optimizer) -> Iterator[None]:
        """Show the parameters of an optimizer as tensors of the CPU without values, inside the block."""
        held = [(p, p.data, p.grad) for p in self._trained(optimizer) if not self.keeps_slices]
        for parameter, data, _ in held:
            # One element, expanded: it has the shape and takes no memory.
            put_data(parameter, torch.empty((), dtype=data.dtype).expand(data.shape), None)
        try:
            yield
        finally:
            for entry in held:
                put_data(*entry)

    def watch_steps(self, take: Callable[[Optimizer], None]) -> None:
        """Call `take` after a step that has made parameters narrow and has left them narrow, until `close`."""
        began_whole: dict[int, bool] = {}

        def before(optimizer: Optimizer, *_: Any) -> None:
            began_whole[id(optimizer)] = not self._whole

        def after(optimizer: Optimizer, *_: Any) -> None:
            if began_whole.pop(id(optimizer), False) and self._whole:
                take(optimizer)

        self._step_hooks += [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def gather_step(self, optimizer: Optimizer) -> None:
        """Make parameters whole after a step of an optimizer that has updated slices; every replica must call it."""
        self.widen(self._trained(optimizer))

    def _trained(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [parameter for parameter in _parameters_of(optimizer) if self._is_trained(parameter)]

    def _is_trained(self, parameter: nn.Parameter) -> bool:
        # Even without a gradient: replicas may have gradients for different parameters, but must gather the same.
        return self.divides(parameter) and (parameter.requires_grad or parameter.grad is not None)

    def has_divided(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer updates slices."""
        return any(known is optimizer for known in self._divided)

    @torch.no_grad()
    def _cut_state(self, optimizer: Optimizer) -> None:
        """Reduce the state of full parameters to slices; some optimizers make state in their constructor."""
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if self.divides(parameter) else ():
                state[key] = self.part_of_state(value, parameter)

    def part_of_state(self, value: Any, parameter: Tensor) -> Any:
        """Return this replica's part of a value in the state of a full parameter: a copy of the slice, or the value."""
        if not self.divides(parameter) or not isinstance(value, Tensor) or value.shape != self.whole_shape(parameter):
            return value  # such as the count of steps
        part = self.cut(value)
        # A clone: the slice is a view, which would keep the full state in memory.
        return part.clone() if self.host is None else part.cpu().clone()


def check_divisible(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that cannot be divided into slices.

    Raises:
        ValueError: If a parameter is complex.
    """
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(f"`{name}` is complex, which `zero_stage` does not shard; use `zero_stage=0`")


def wrap_step(optimizer: Optimizer, patches: Patches, turns: Callable[[Optimizer], Iterator[None]]) -> None:
    """Run each step of an optimizer in the turns of a generator, until `patches` are undone.

    The closure and the hooks of the step run outside the generator, with the ordinary parameters.

    Args:
        optimizer: The optimizer.
        patches: Undo the change.
        turns: Changes the parameters for the step, and yields for each call of it; a failed step closes the generator.
    """
    own = optimizer.step

    @functools.wraps(own)  # schedulers read attributes of `step`
    def step(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        given = (optimizer,) if closure is None else (optimizer, closure)
        given, kwargs = _run_before(optimizer, given, kwargs)
        closure = given[1] if len(given) > 1 else None
        loss: Any = None
        result: Any = None
        if closure is not None:
            with torch.enable_grad():
                # The closure needs the ordinary parameters, for forward and backward. `step` gets its loss only.
                loss = closure()
        with _hooks_put_off(optimizer), closing(turns(optimizer)) as calls:  # type: ignore[type-var]
            for _turn in calls:
                result = own(**kwargs) if closure is None else own(_Replay(loss), **kwargs)
        for hook in (*step_hooks_of(optimizer)[1].values(), *global_step_hooks()[1].values()):
            hook(optimizer, given, kwargs)
        return result

    # A method, because schedulers created during training wrap `step` as a method.
    patches.replace(optimizer, "step", MethodType(step, optimizer))


def _run_before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """Run the hooks before a step as the optimizer does, and return the arguments after them."""
    for hook in (*global_step_hooks()[0].values(), *step_hooks_of(optimizer)[0].values()):
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    return args, kwargs


@contextmanager
def _hooks_put_off(optimizer: Optimizer) -> Iterator[None]:
    """Keep the hooks of an optimizer's step from running inside the block."""
    registries = (*step_hooks_of(optimizer), *global_step_hooks())
    held = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(registries, held):
            hooks.update(own)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return storage_address(one.untyped_storage()) == storage_address(other.untyped_storage())


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_LARGE, _ALIGNED = 1024, 16  # elements
_DIRECT_BYTES = 1 << 18  # of a slice that is sent by itself


class _Replay:
    """Takes the place of an evaluated closure: returns its loss, once."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._is_called = False

    def __call__(self) -> Any:
        if self._is_called:
            raise RuntimeError(
                "The optimizer evaluates its closure several times in a step. Steps on sharded parameters, or in host"
                " memory, do not support this. Use a layout without tensor parallelism, `zero_stage=0`, and"
                " `cpu_offload` without 'optimizer'"
            )
        self._is_called = True
        return self._loss


def padded_to(width: int, tensor: Tensor) -> Tensor:
    """Flatten a tensor, and append zeros up to `width` elements."""
    flat = tensor.reshape(-1)
    return flat if flat.numel() == width else torch.cat([flat, flat.new_zeros(width - flat.numel())])


def write_columns(whole: Tensor, columns: Tensor) -> None:
    """Copy the slices of all replicas, one per row, into a full tensor."""
    if whole.numel() == columns.numel() and whole.is_contiguous():
        whole.view(columns.shape).copy_(columns)
    else:
        whole.copy_(columns.reshape(-1)[: whole.numel()].view(whole.shape))
