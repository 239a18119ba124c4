"""Parameters without data, whose first function waits until they have data.

The tensor itself knows that it is absent. So weights that code reads outside their layer, copies or saves are there as
well. Until then the parameter has NaN in each place, so that a leak is seen. Where waiting needs no message, as in
`Arrivals`, a read from the module waits as well, for code that no class of tensors sees.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.compat.torch import (
    PARAMETERS,
    WITHOUT_VALUES,
    DisableTorchFunctionSubclass,
    forbid_data_access,
    no_transforms,
    parameters_of,
    pytree,
)

__all__ = ["AbsentParameter", "Arrivals", "hollow_data", "mark_absent", "mark_present"]

_PROPERTIES: Any = Tensor
_GET_DATA = _PROPERTIES.data.__get__
_SET_DATA = _PROPERTIES.data.__set__
_OF_DATA = {_GET_DATA, _SET_DATA} | {
    getattr(_PROPERTIES, name).__get__ for name in ("real", "imag", "T", "mT", "H", "mH")
}


class AbsentParameter(nn.Parameter):
    """Class of a parameter without data: a function of it gathers the data first.

    Attributes:
        gather_slices: Makes parameters present.
    """

    gather_slices: Any = None  # an attribute of the class, too, by which other classes know this one

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.gather_slices(self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.gather_slices(self)
        return nn.Parameter.__reduce_ex__(self, protocol)

    @classmethod
    @torch.compiler.disable  # compiled code leaves its graph where it meets an absent parameter
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in WITHOUT_VALUES or (name in ("__get__", "__set__", "__delete__") and func not in _OF_DATA):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)).gather_slices((args, kwargs))
        return func(*args, **kwargs)


def mark_absent(parameter: nn.Parameter, gather: Callable[[Any], None]) -> None:
    """Let the first function of a parameter call `gather` with its arguments.

    Args:
        parameter: The parameter, which gets hollow data; see `hollow_data`.
        gather: Makes the parameters among its argument present; see `mark_present`.
    """
    parameter.__dict__["gather_slices"] = gather
    # A step over the tensor axis shows the parameter in another class, which looks for `gather_slices` as well.
    if type(parameter) is nn.Parameter:
        parameter.__class__ = AbsentParameter


def mark_present(parameter: Any) -> None:
    """Make a parameter an ordinary one, once it has its data: another thread may read it then."""
    parameter.__dict__.pop("gather_slices", None)
    kind: type = type(parameter)
    if kind is AbsentParameter:
        parameter.__class__ = nn.Parameter


def hollow_data(parameter: Tensor) -> Tensor:
    """Return a tensor of the shape of a parameter in the memory of one element: NaN, so that a leak is seen."""
    value = float("nan") if parameter.is_floating_point() else 0
    with torch.inference_mode(False):
        hollow = torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    # Kernels of other libraries may ignore the strides, and would read what lies behind the element.
    forbid_data_access(hollow)
    return hollow


class _Arrival:
    """Parameters that arrive together, with their data, the function that waits, and the stream on which it does."""

    def __init__(self, parameters: Sequence[nn.Parameter], wait: Callable[[], None]) -> None:
        self.parameters = parameters
        self.data = [parameter.data for parameter in parameters]
        self.wait = wait
        device = self.data[0].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def on_stream(self) -> AbstractContextManager[None]:
        """Write on the stream of the step, which all later reads of the other parameters expect."""
        if self._stream is None or (now := torch.cuda.current_stream(self._stream.device)) == self._stream:
            return nullcontext()
        return _joined(self._stream, now)


@contextmanager
def _joined(stream: Any, now: Any) -> Any:
    with torch.cuda.stream(stream):
        yield
    now.wait_stream(stream)


class _AwaitedParameters(dict[str, Any]):
    """Stands for the parameters of a module while some are absent: a read waits, and ends this.

    Code that takes a weight from its module, and gives it to a function that no class of tensors sees (TorchScript,
    transforms of `torch.func`, kernels of other libraries), has its data.

    Args:
        holder: The module.
        held: Its parameters.
        wait: Waits for the parameters among its argument.
    """

    def __init__(self, holder: nn.Module, held: dict[str, Any], wait: Callable[[Any], None]) -> None:
        super().__init__(held)
        self.held = held
        self._holder, self._wait = holder, wait

    def end(self) -> dict[str, Any]:
        """Wait for the parameters, and give the module its own dictionary again; returns it."""
        self._wait(list(self.held.values()))
        if vars(self._holder).get(PARAMETERS) is self:
            vars(self._holder)[PARAMETERS] = self.held
        return self.held

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.end(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.end()),)


def _ends(name: str) -> Callable[..., Any]:
    def method(self: _AwaitedParameters, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.end(), name)(*args, **kwargs)

    return method


def _of_names(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.held, name)(*args)


for _name in ("__contains__", "__len__", "keys"):
    setattr(_AwaitedParameters, _name, _of_names(_name))
# Also `__iter__`: without it, `dict(held)` would copy the entries without a call.
for _name in ("__getitem__", "__setitem__", "__delitem__", "__iter__", "__eq__", "__or__", "__ror__", "__ior__"):
    setattr(_AwaitedParameters, _name, _ends(_name))
for _name in ("get", "items", "values", "pop", "popitem", "copy", "update", "setdefault", "clear"):
    setattr(_AwaitedParameters, _name, _ends(_name))


class Arrivals:
    """Holds parameters without data until their messages arrive. The first read of such a parameter waits.

    Attributes:
        order: The parameters in the order in which code has waited for them first, by `id`; one for each message.
    """

    def __init__(self) -> None:
        self.order: dict[int, None] = {}
        self._by_id: dict[int, _Arrival] = {}
        self._holders: dict[int, list[nn.Module]] = {}
        self._hollow: dict[Any, Tensor] = {}
        # Threads of the user may read parameters at the same time.
        self._lock = threading.RLock()
        _all_arrivals.add(self)

    def hold(self, module: nn.Module) -> None:
        """Let reads of the parameters of a module and its submodules wait, too, if they are absent."""
        self._holders = {}
        for child in module.modules():
            for parameter in parameters_of(child).values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append(child)

    def expect(self, parameters: Sequence[nn.Parameter], wait: Callable[[], None]) -> None:
        """Make parameters absent that have their memory already.

        Args:
            parameters: Parameters of the class `nn.Parameter`, all on one device.
            wait: Waits until their values are in the memory.
        """
        arrival = _Arrival(parameters, wait)
        with self._lock, DisableTorchFunctionSubclass():
            for parameter in parameters:
                self._by_id[id(parameter)] = arrival
                mark_absent(parameter, self.take)
                # The gradient stays, as the shape does.
                parameter.data = self._hollow_of(parameter)
                for holder in self._holders.get(id(parameter), ()):
                    own = vars(holder).get(PARAMETERS)
                    if type(own) is dict:
                        vars(holder)[PARAMETERS] = _AwaitedParameters(holder, own, self.take)

    def _hollow_of(self, parameter: nn.Parameter) -> Tensor:
        key = parameter.shape, parameter.dtype, parameter.device
        if key not in self._hollow:
            self._hollow[key] = hollow_data(parameter)
        return self._hollow[key]

    def take(self, values: Any) -> None:
        """Wait for the absent parameters among values. Parameters of the same message arrive with them."""
        for leaf in pytree.tree_leaves(values) if self._by_id else ():
            if id(leaf) in self._by_id:
                self._take(leaf)

    def take_all(self) -> None:
        """Wait for all parameters that are on their way."""
        while self._by_id:
            self._take(next(iter(self._by_id.values())).parameters[0])

    def _take(self, parameter: nn.Parameter) -> None:
        # Below the transforms of `torch.func`, which would refuse to write into memory of the outside.
        with self._lock, torch.no_grad(), torch.inference_mode(False), DisableTorchFunctionSubclass(), no_transforms():
            arrival = self._by_id.get(id(parameter))
            if arrival is None:
                return  # another thread has waited
            with arrival.on_stream():
                arrival.wait()
            self.order.setdefault(id(arrival.parameters[0]))
            for each, data in zip(arrival.parameters, arrival.data):
                each.data = data
                mark_present(each)
                del self._by_id[id(each)]
            for holder in [one for each in arrival.parameters for one in self._holders.get(id(each), ())]:
                own = vars(holder).get(PARAMETERS)
                if isinstance(own, _AwaitedParameters) and not any(
                    id(value) in self._by_id for value in own.held.values()
                ):
                    own.end()


_all_arrivals: weakref.WeakSet[Arrivals] = weakref.WeakSet()


def _before_fork() -> None:
    # A child has no messages, and would wait without end: the workers of a loader may read the model.
    for arrivals in list(_all_arrivals):
        arrivals.take_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
