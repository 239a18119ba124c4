"""The record of a user's own step, made once, without data, before anything is divided.

    trace = record_step(module, step, batch, device)

    step(batch)                       the user's code, on the true batch and on placeholders for all parameters
      model(ids)                      call 0, made by the step itself
        embed(ids)                    call 1, made by call 0
        layers.0(x, mask=mask)        call 2: `x` is a placeholder, `mask` is made from the batch, so it has values
          attn(x)                     call 3, made by call 2
        layers.1(x, mask=mask)        call 4

Nothing is computed from parameters, so it takes neither memory nor arithmetic. Values that depend on the batch alone
are real. A module whose code reads other values, such as a router, runs once on random data instead.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import is_
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.compat import innermost_users_line, patched
from lightning_parallel.compat.chance import seeded
from lightning_parallel.compat.torch import (
    DispatchMode,
    buffers_of,
    function_modes_kept,
    is_backward_running,
    parameters_of,
    pytree,
    schema_of,
)
from lightning_parallel.step_trace.attributes import SavedAttributes
from lightning_parallel.step_trace.interception import ActiveHandler, Call, CallSite, run_on_random_data
from lightning_parallel.step_trace.placeholder import (
    PlaceholderTensor,
    UnknownValue,
    nothing_written,
    watch_operations,
    written_by,
)
from lightning_parallel.step_trace.stubs import (
    PLAIN,
    copy_args,
    named_placeholders,
    note_tensor,
    shards_shown,
    write_back,
)

__all__ = [
    "ModuleCall",
    "Operation",
    "Record",
    "StepTrace",
    "call_signature",
    "no_record",
    "record_step",
    "sequence_length",
    "shortened",
    "state_kept",
]

_MOST_POSITIONS = 256
"""Length of the sequences in the record of a step; a longer record would tell nothing more."""

_IGNORED = -100
"""Label that torch's losses ignore."""

_MOST_WITH_DATA = 0.75
"""Share of the model's parameters up to which a module may run on random data, which take memory."""


@dataclass
class ModuleCall:
    """One call of a module in the step.

    Attributes:
        path: First name of the module in the model.
        module: The module.
        number: Position among the calls, in the order in which they begin.
        parent: Number of the call that makes this call; -1 for the step itself.
        args, kwargs: The arguments, before the call could change them; placeholders for all that parameters decide.
        output: The result; None until the call has returned.
        has_data: Whether it ran on random data, because its code reads values.
    """

    path: str
    module: nn.Module
    number: int
    parent: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    has_data: bool = False

    @cached_property
    def signature(self) -> str:
        """See `call_signature`."""
        return call_signature(self.args, self.kwargs)


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the shapes of tensors and the other values: equal for calls that a block answers by the same code."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    # By its class: the address of an object would differ between the ranks.
    described = [
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else (leaf if isinstance(leaf, PLAIN) else type(leaf).__name__)
        for leaf in leaves
    ]
    return f"{described} {tree}"


@dataclass(frozen=True)
class Operation:
    """One operation on placeholders.

    Attributes:
        function: The operator; None where code needs the data of the inputs, as a value that it logs or writes.
        inputs: The placeholders among its arguments.
        output: Its result.
        call: Number of the innermost call that makes it; -1 for the step itself.
        after: How many calls have begun before it.
        line: The user's line, if it takes a parameter outside the module that registers the parameter; empty if no
            code of the user runs, None for all other operations.
        place: The user's line of any operation, in a record with `places`.
    """

    function: Any
    inputs: tuple[PlaceholderTensor, ...]
    output: Any
    call: int
    after: int
    line: str | None = None
    place: str = ""


@dataclass
class StepTrace:
    """What a step does, in order.

    Attributes:
        calls: The calls of modules.
        operations: The operations on placeholders, in modules and between them.
        error: Why the step was not followed to its end; None if it was.
        output: The result of the step.
        draws: The modules, and the user's lines outside modules, that draw random numbers.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    error: Exception | None = None
    output: Any = None
    draws: list[str] = field(default_factory=list)

    def followed_by(self, other: StepTrace) -> StepTrace:
        """Return one record of both steps, for questions about calls and readers in any of them."""
        count = len(self.calls)
        calls = [
            replace(call, number=call.number + count, parent=call.parent if call.parent < 0 else call.parent + count)
            for call in other.calls
        ]
        operations = [
            replace(each, call=each.call if each.call < 0 else each.call + count, after=each.after + count)
            for each in other.operations
        ]
        return StepTrace(
            [*self.calls, *calls],
            [*self.operations, *operations],
            self.error or other.error,
            (self.output, other.output),
            [*self.draws, *other.draws],
        )

    def calls_of(self, path: str) -> list[ModuleCall]:
        """Return the calls of the module at `path`, in order; only after the record is complete."""
        return self._by_path.get(path, [])

    @cached_property
    def _by_path(self) -> dict[str, list[ModuleCall]]:
        found: dict[str, list[ModuleCall]] = {}
        for call in self.calls:
            found.setdefault(call.path, []).append(call)
        return found

    @cached_property
    def computing(self) -> set[int]:
        """Numbers of the calls that compute with parameters themselves, not only in calls that they make."""
        return {each.call for each in self.operations if any(value.view_of for value in each.inputs)}

    def places_outside(self) -> list[str]:
        """Return the user's lines that compute outside modules; with parameters only, if some do."""
        found = [each for each in self.operations if each.place and (each.call < 0 or not self.calls[each.call].path)]
        reading = [each for each in found if any(value.view_of for value in each.inputs)]
        return [*dict.fromkeys(each.place for each in reading or found)]

    def places_around(self, call: ModuleCall) -> tuple[list[str], list[str]]:
        """Return the lines of the code around a call that make its arguments, and that take its output.

        The arguments of the calls around it count as well: it may compute with them, and code around may pass them on.
        """
        calls = [call]
        while calls[-1].parent >= 0:
            calls.append(self.calls[calls[-1].parent])
        given = {id(leaf) for each in calls for leaf in pytree.tree_leaves((each.args, each.kwargs))}
        made = {id(leaf) for leaf in pytree.tree_leaves(call.output)}
        around = {each.parent for each in calls}
        beside = [each for each in self.operations if each.call in around and each.place]
        makers = (each.place for each in beside if any(id(leaf) in given for leaf in pytree.tree_leaves(each.output)))
        users = (each.place for each in beside if any(id(value) in made for value in each.inputs))
        return [*dict.fromkeys(makers)], [*dict.fromkeys(users)]

    def outermost(self, modules: set[nn.Module]) -> Iterator[ModuleCall]:
        """Yield the calls of `modules`, except calls inside calls of `modules`."""
        for call in self.calls:
            if call.module in modules and not self.is_inside(call.parent, modules):
                yield call

    def paths_around(self, number: int) -> Iterator[str]:
        """Yield the paths of the modules that run during call `number`, the innermost first."""
        while number >= 0:
            yield self.calls[number].path
            number = self.calls[number].parent

    def is_inside(self, number: int, modules: set[nn.Module]) -> bool:
        """Return whether call `number`, or a call that leads to it, is a call of one of `modules`."""
        while number >= 0:
            if self.calls[number].module in modules:
                return True
            number = self.calls[number].parent
        return False

    def read_outside(self, modules: set[nn.Module]) -> set[str]:
        """Return the names of the parameters with which code outside calls of `modules` computes."""
        outside = (operation for operation in self.operations if not self.is_inside(operation.call, modules))
        return {value.parameter for each in outside for value in each.inputs if value.parameter is not None}


Record = Callable[[], StepTrace | None]
"""Returns the record of the step, made when it is asked for the first time; None if there is no batch."""


def no_record() -> None:
    """Return no record."""


def record_step(
    module: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    device: torch.device,
    shorten: bool = False,
    most_calls: int | None = None,
    places: bool = False,
) -> StepTrace:
    """Run `step` once on placeholders and record it.

    The module is not changed. Its parameters may be on the meta device. Random numbers come from a fixed seed.

    Args:
        module: The full model.
        step: Runs the user's step on a batch.
        batch: The batch.
        device: Where the step will compute.
        shorten: Take few positions of a batch of tokens, if the step runs to its end on these.
        most_calls: Where to end the record of a step that calls modules very often.
        places: Whether to note the user's line of each operation, which takes time.

    Returns:
        The record, up to the error if the step stops early.
    """
    short = shortened(batch, _MOST_POSITIONS) if shorten else batch
    if short is not batch:
        trace = record_step(module, step, short, device, most_calls=most_calls, places=places)
        if trace.error is None:
            return trace
    recorder = _Recorder(module, device, most_calls, places)
    with ExitStack() as stack:
        for context in (comm.skip_communication(), state_kept(module), named_placeholders(module, device)):
            stack.enter_context(context)
        # A compiled module would compile for placeholders.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(patched(nn.Module, "__call__", recorder.recording(nn.Module.__call__)))
        stack.enter_context(watch_operations(recorder.note))
        stack.enter_context(_RealOperations(recorder.note_draw))
        try:
            recorder.trace.output = step(batch)
        except _RecordFull:
            recorder.trace.error = RuntimeError(f"it calls modules more than {most_calls} times")
        except Exception as error:
            recorder.trace.error = error
    return recorder.trace


def sequence_length(batch: Any) -> int:
    """Return the length of the sequences in a batch of tokens; 0 for another batch."""
    lengths = {leaf.shape[1] for leaf in _tokens_of(batch)}
    return lengths.pop() if len(lengths) == 1 else 0


def shortened(batch: Any, positions: int) -> Any:
    """Return a batch of tokens with fewer positions; a shorter or another batch as it is.

    Trials of blocks repeat the recorded calls in double precision, where the memory of attention grows with the square
    of the length. The batch keeps its first positions, or later ones if the labels of the first are all ignored.

    Args:
        batch: The batch.
        positions: The number of positions.
    """
    length = sequence_length(batch)
    if length <= positions:
        return batch
    tokens = [leaf for leaf in _tokens_of(batch) if not leaf.is_meta]
    starts = range(0, length - positions + 1, positions)
    # A mean over no label is not a number.
    is_used = [(leaf != _IGNORED).any(0).tolist() for leaf in tokens]
    start = next((at for at in starts if all(any(used[at : at + positions]) for used in is_used)), 0)

    def few(leaf: Tensor) -> Tensor:
        # Also both dimensions of positions of a mask.
        for dim in range(1, leaf.dim()):
            if leaf.shape[dim] == length:
                leaf = leaf.narrow(dim, start, positions)
        return leaf

    return pytree.tree_map_only(Tensor, few, batch)


def _tokens_of(batch: Any) -> list[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.dim() == 2 and not leaf.is_floating_point()]


class _RealOperations(DispatchMode):
    """Sees all operations in the block: restores real tensors that they write, and notes operations that draw.

    A step may write into tensors that no snapshot of the module knows, such as an average of its weights elsewhere.

    Args:
        note_draw: Notes that an operation draws random numbers.
    """

    def __init__(self, note_draw: Callable[[], None]) -> None:
        super().__init__()
        self._note_draw = note_draw
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _draws(func, args, kwargs or {}):
            self._note_draw()
        # Operations on placeholders write no real tensor. To call them here spares a second way through the dispatcher.
        if PlaceholderTensor in types:
            return PlaceholderTensor.__torch_dispatch__(func, types, args, kwargs)
        for value in written_by(func, args, kwargs or {}):
            if not value.is_meta:
                self._before.append((value.detach(), value.detach().clone()))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        # The last write first: each restores the contents before it.
        for value, before in reversed(self._before):
            if value.shape == before.shape:
                value.copy_(before)
        self._before.clear()


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operator that may draw does: attention and dropout draw nothing for the probability zero."""
    given = dict(zip((argument.name for argument in schema_of(func).arguments), args)) | kwargs
    probability = given.get("dropout_p", given.get("p"))
    return isinstance(probability, Tensor) or probability != 0


class _ArgumentCopies:
    """Copies objects among the arguments of calls, such as a key-value cache.

    Layers pass one object on, and each layer changes little of it. Parts that are unchanged since the last copy share
    this copy: otherwise the time of a record would grow with the square of the number of layers.
    """

    def __init__(self) -> None:
        # The parts by `id`: part, contents, copy. They keep the parts alive, so that no other object gets the `id`.
        self._known: dict[int, tuple[Any, list[Any], Any]] = {}

    def of(self, arguments: Any) -> Any:
        """Return `arguments`, of any structure, with copies of all objects except tensors and plain values."""
        return pytree.tree_map(self._copied, arguments)

    def _copied(self, leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, UnknownValue, *PLAIN)):
            return leaf
        memo: dict[int, Any] = {}
        parts: dict[int, tuple[Any, list[Any]]] = {}
        self._note(leaf, memo, parts)
        try:
            duplicate = copy.deepcopy(leaf, memo)
        except Exception:
            # An object that cannot be copied, such as a lock or a generator, is passed on itself.
            return leaf
        self._known.update({key: (*part, memo[key]) for key, part in parts.items() if key in memo})
        return duplicate

    def _note(self, value: Any, memo: dict[int, Any], parts: dict[int, tuple[Any, list[Any]]]) -> bool:
        """Add the known copies of parts of `value` to `memo`, and return whether all of `value` is unchanged."""
        if isinstance(value, Tensor):
            note_tensor(value, memo, shares_placeholders=True)
            # An operation writes into a tensor without a trace here. Placeholders have no contents.
            return type(value) is PlaceholderTensor
        if id(value) in memo or id(value) in parts:
            return id(value) in memo
        contents = _contents(value)
        if contents is None:
            return False
        parts[id(value)] = value, contents
        known = self._known.get(id(value))
        is_unchanged = known is not None and len(known[1]) == len(contents) and all(map(is_, known[1], contents))
        for part in contents:
            if type(part) not in _UNCHANGING:
                is_unchanged &= self._note(part, memo, parts)
        if known is not None and is_unchanged:
            memo[id(value)] = known[2]
        return is_unchanged


_UNCHANGING = {*PLAIN, torch.device, type, FunctionType}


# Most bytes of an object whose `__dict__` holds all of its state: slots and state in C need more.
_PLAIN_SIZE = type("Plain", (), {}).__basicsize__


def _contents(value: Any) -> list[Any] | None:
    """Return all objects that `value` refers to; None if Python cannot see all of its state."""
    kind = type(value)
    if kind is dict:
        return [*value, *value.values()]
    if kind in (list, tuple, set):
        return [*value]
    if hasattr(value, "__dict__") and kind.__basicsize__ <= _PLAIN_SIZE:
        return [*vars(value), *vars(value).values()]
    return None


class _RecordFull(BaseException):
    """Ends a step; no `except Exception` of the user's code catches it."""


class _Recorder:
    """Fills a `StepTrace` while a step runs."""

    def __init__(self, module: nn.Module, device: torch.device, most_calls: int | None, places: bool) -> None:
        self.trace = StepTrace()
        self._most_calls = most_calls
        self._notes_places = places
        self._device = device
        self._paths = {child: path for path, child in module.named_modules()}
        self._owners: dict[str, set[str]] = {}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for child, path in self._paths.items():
            for parameter in child.parameters(recurse=False):
                self._owners.setdefault(names[id(parameter)], set()).add(path)
        self._most = _MOST_WITH_DATA * _size(module)
        self._open = [-1]
        self._has_data = False
        # The running calls of modules outside the model, such as a copy of it, which holds copies of the placeholders.
        self._elsewhere = 0
        self._failure: Exception | None = None
        self._thread = threading.get_ident()
        self._copies = _ArgumentCopies()

    def recording(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `__call__` of modules that records the call."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._has_data or threading.get_ident() != self._thread:
                return own(module, *args, **kwargs)
            if module not in self._paths:
                self._elsewhere += 1
                try:
                    return own(module, *args, **kwargs)
                finally:
                    self._elsewhere -= 1
            return self._call(module, partial(own, module), args, kwargs)

        return call

    def note(self, function: Any, inputs: list[PlaceholderTensor], output: Any) -> None:
        """Note an operation on placeholders."""
        if self._has_data:
            return
        number = self._open[-1]
        read = {value.view_of for value in inputs if value.view_of is not None}
        line = None
        # A backward inside the step takes the weights of all layers, also of sharded ones.
        if read and not self._elsewhere and not is_backward_running():
            running = {self.trace.calls[each].path for each in self._open[1:]}
            owners = [self._owners.get(name, set()) for name in read]
            if any(running.isdisjoint(paths) and not self._runs_method_of(paths) for paths in owners):
                line = innermost_users_line()
        place = innermost_users_line() if self._notes_places else ""
        self.trace.operations.append(
            Operation(function, tuple(inputs), output, number, len(self.trace.calls), line, place)
        )

    def note_draw(self) -> None:
        """Note that an operation draws random numbers, except for the random data of a module that reads values."""
        path = "" if self._open[-1] < 0 else self.trace.calls[self._open[-1]].path
        place = f"`{path}`" if path else innermost_users_line()
        if place and not self._has_data and place not in self.trace.draws:
            self.trace.draws.append(place)

    def _runs_method_of(self, paths: set[str]) -> bool:
        """Return whether a method of one of these modules runs, such as a `forward` that code calls directly."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and self._paths.get(owner) in paths:
                return True
            frame = frame.f_back
        return False

    def _call(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls, operations = self.trace.calls, self.trace.operations
        number, done = len(calls), len(operations)
        if number == self._most_calls:
            raise _RecordFull
        # Before the call, which may fill a list or a cache among its arguments.
        before = self._copies.of((args, kwargs))
        record = ModuleCall(self._paths[module], module, number, self._open[-1], *before)
        calls.append(record)
        saved = SavedAttributes(module)
        self._open.append(number)
        try:
            with shards_shown(module):
                output = own(*args, **kwargs)
        except Exception as error:
            # The innermost module that fails is the module whose code reads values. An outer one would hide its calls.
            if error is self._failure or _size(module) > self._most:
                raise
            saved.restore()
            del calls[number + 1 :], operations[done:]
            try:
                output = self._on_data(record, own, (args, kwargs))
            except Exception:
                self._failure = error
                raise error from None
        finally:
            self._open.pop()
        given = {id(leaf) for leaf in pytree.tree_leaves(before)}
        for leaf in pytree.tree_leaves(output):
            if type(leaf) is PlaceholderTensor and leaf.parameter is None and id(leaf) not in given:
                leaf.provenance = f"the output of `{record.path}`"
        record.output = pytree.tree_map(lambda leaf: leaf, output)
        return output

    def _on_data(self, record: ModuleCall, own: Callable[..., Any], arguments: Any) -> Any:
        """Run a module on random data; its output and the changes of its arguments become placeholders."""
        site = CallSite(ActiveHandler(), record.path, record.path)
        call = Call(site, record.module, own, record.args, record.kwargs)
        self._has_data = record.has_data = True
        try:
            output, changed = run_on_random_data(
                call, lambda: copy_args((record.args, record.kwargs), {}), self._device, available=False
            )
        finally:
            self._has_data = False
        write_back(arguments, changed, lambda leaf: leaf)
        return output


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def state_kept(module: nn.Module, seed: int | None = 0) -> Iterator[None]:
    """Restore attributes, buffers, hooks and the function modes after the block, in which a step runs without data.

    Args:
        module: The model.
        seed: The seed of the random numbers inside the block; None continues the outer state.
    """
    attributes = SavedAttributes(module)
    # A step may toggle parameters for one of several optimizers.
    registered = [parameter for child in module.modules() for parameter in parameters_of(child).values()]
    trained = [(parameter, parameter.requires_grad) for parameter in registered if parameter is not None]
    buffers = {id(buffer): buffer for child in module.modules() for buffer in buffers_of(child).values()}
    held = [buffer for buffer in buffers.values() if type(buffer) is Tensor and not buffer.is_meta]
    values = [(buffer, buffer.detach().clone()) for buffer in held]
    try:
        with (
            _no_collections(),
            function_modes_kept(),
            nothing_written(),
            nullcontext() if seed is None else seeded(seed),
        ):
            yield
    finally:
        attributes.restore()
        for parameter, requires_grad in trained:
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)
        with torch.no_grad():
            for buffer, value in values:
                # A write raises the version, which autograd may have noted.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's collector of reference cycles from running inside the block.

    A step without data makes many small objects, and nearly all of them live as long as the block. They would start
    collections that look at all objects of the process.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
