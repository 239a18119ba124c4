"""Parameters without data, whose first function waits until they have data.

No module is wrapped: the tensor itself knows that it is absent. So weights that code reads outside their layer, copies
or saves are there as well. Until then the parameter has NaN in each place, so that a leak is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_parallel.compat.torch import (
    WITHOUT_VALUES,
    DisableTorchFunctionSubclass,
    forbid_data_access,
    parameters_of,
    pytree,
)

__all__ = ["AbsentParameter", "Arrivals", "hollow_data", "is_foreign", "mark_absent", "mark_present"]

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


def is_foreign(module: nn.Module) -> bool:
    """Return whether a class of modules is neither of torch nor of this package."""
    return not type(module).__module__.startswith(("torch.nn.", "lightning_parallel."))


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


class Arrivals:
    """Parameters that are absent until their data have arrived; the first function of one of them waits.

    Attributes:
        watches_calls: Whether a call of a module outside torch waits for its own parameters first. Kernels of other
            libraries take the address of a parameter without a function.
        order: The parameters in the order in which code has waited for them first, by `id`; one for each message.
    """

    def __init__(self) -> None:
        self.watches_calls = False
        self.order: dict[int, None] = {}
        self._watch: RemovableHandle | None = None
        self._by_id: dict[int, _Arrival] = {}
        self._hollow: dict[Any, Tensor] = {}
        # Threads of the user may read parameters at the same time.
        self._lock = threading.RLock()

    def expect(self, parameters: Sequence[nn.Parameter], wait: Callable[[], None]) -> None:
        """Make parameters absent that have their memory already.

        Args:
            parameters: Parameters of the class `nn.Parameter`, all on one device.
            wait: Waits until their values are in the memory.
        """
        arrival = _Arrival(parameters, wait)
        with self._lock, DisableTorchFunctionSubclass():
            if self.watches_calls and self._watch is None:
                # For all modules: a hook of a module would travel with its copies, and into files.
                self._watch = register_module_forward_pre_hook(self._before_call)
            for parameter in parameters:
                self._by_id[id(parameter)] = arrival
                mark_absent(parameter, self.take)
                # The gradient stays, as the shape does.
                parameter.data = self._hollow_of(parameter)

    def _hollow_of(self, parameter: nn.Parameter) -> Tensor:
        key = parameter.shape, parameter.dtype, parameter.device
        if key not in self._hollow:
            self._hollow[key] = hollow_data(parameter)
        return self._hollow[key]

    def take(self, values: Any) -> None:
        """Wait for the parameters among values that are on their way, and for those that arrive with them."""
        for leaf in pytree.tree_leaves(values) if self._by_id else ():
            if id(leaf) in self._by_id:
                self._take(leaf)

    def take_all(self) -> None:
        """Wait for all parameters that are on their way."""
        while self._by_id:
            self._take(next(iter(self._by_id.values())).parameters[0])

    def _take(self, parameter: nn.Parameter) -> None:
        with self._lock, torch.no_grad(), torch.inference_mode(False), DisableTorchFunctionSubclass():
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
            if self._watch is not None and not self._by_id:
                self._watch.remove()
                self._watch = None

    def _before_call(self, module: nn.Module, _: Any) -> None:
        if is_foreign(module):
            self.take(list(parameters_of(module).values()))
