"""Measure the cost of each layer on one microbatch, or count it in parameters.

No rank needs the full model for it. The step runs with one layer of each kind, whose output also stands for the outputs
of all other layers of that kind. A layer is on the device only while it runs.
"""

from __future__ import annotations

import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.chance import seeded
from lightning_parallel.compat.torch import pytree, random_values, storage_address
from lightning_parallel.pipeline.layer_stack import LayerStack, outer_modules
from lightning_parallel.pipeline.module_use import copies_of_layers
from lightning_parallel.pipeline.recomputation import Recomputation, Recomputed, layers_to_recompute
from lightning_parallel.pipeline.search import Costs
from lightning_parallel.pipeline.simulate import Cost
from lightning_parallel.pipeline.stage import InterceptedModel
from lightning_parallel.pipeline.weight_gradients import WeightGradients, deferring, shared_parameters, split_linears
from lightning_parallel.step_trace.attributes import replaced
from lightning_parallel.step_trace.interception import Call, data_of, has_listeners
from lightning_parallel.step_trace.stubs import autocast_dtype, copy_args

__all__ = ["STATE_COPIES", "TruncatedModel", "count_parameters", "is_large", "measure", "measure_step"]

T = TypeVar("T")
Step = Callable[[Any], Any]
_REPEATS, _LARGE_REPEATS = 3, 2
LARGE_BYTES = 64 << 20
"""Models with more bytes of parameters run fewer times before the first step: the runs take seconds."""

STATE_COPIES = 4
"""Bytes held per byte of a trained parameter if the optimizer is unknown: itself, its gradient, two moments."""


def is_large(module: nn.Module, group: Group | None) -> bool:
    """Tell whether the parameters take more than `LARGE_BYTES` on any rank of `group`, whose ranks all call this."""
    mine = sum(parameter.nbytes for parameter in module.parameters()) > LARGE_BYTES
    # Shards may differ in size, but all ranks run equally often and in the same precision.
    return mine if group is None else comm.on_any_rank([mine], group)[0]


def count_parameters(
    module: nn.Module, stack: LayerStack, use: Mapping[str, set[int]], copies: float = STATE_COPIES
) -> Costs:
    """Count the bytes that each part holds: parameters, gradients and optimizer state.

    Args:
        module: The model.
        stack: Its layers.
        use: For each parameter, by name, the layers whose stages compute with it.
        copies: Bytes for each byte of a trained parameter: itself, its gradient, the state.
    """

    def held(parameters: Iterable[Tensor]) -> Cost:
        sizes = (parameter.nbytes * (copies if parameter.requires_grad else 1) for parameter in parameters)
        return Cost(resident_bytes=sum(sizes))

    layers = tuple(held(layer.parameters()) for layer in stack.layers)
    inside = {id(parameter) for layer in stack.layers for parameter in layer.parameters()}
    outside = {name: value for name, value in module.named_parameters() if id(value) not in inside}
    first = [value for name, value in outside.items() if 0 in use[name]]
    last = [value for name, value in outside.items() if len(layers) - 1 in use[name]]
    return Costs(layers, held(first), held(last))


def measure(
    module: nn.Module,
    stack: LayerStack,
    use: Mapping[str, set[int]],
    step: Step,
    microbatch: Any,
    device: torch.device,
    copies: float = STATE_COPIES,
    recomputation: str | int = "off",
    is_needed: bool = False,
    is_brief: bool = False,
) -> Costs:
    """Measure a microbatch, see `measure_step`, and count parameters; only count if the layers cannot be measured.

    Args:
        module, stack, step, device, recomputation: See `measure_step`.
        use: For each parameter, by name, the layers whose stages compute with it.
        microbatch: The input of the step.
        copies: See `count_parameters`.
        is_needed: Whether to raise the error of layers that cannot be measured.
        is_brief: Whether two runs of each part are enough; equal on all ranks, because sharded layers communicate.
    """
    held = count_parameters(module, stack, use, copies)
    try:
        repeats = _LARGE_REPEATS if is_brief else _REPEATS
        costs = measure_step(module, stack, step, microbatch, device, repeats=repeats, recomputation=recomputation)
    except ValueError as error:
        if is_needed:
            raise
        # Random data may take a branch that true data would not. A fault of the step itself shows in the dry run.
        warnings.warn(f"{error}. The split points depend on their numbers of parameters instead", stacklevel=2)
        return held
    return costs.mapped(lambda cost, part: replace(cost, resident_bytes=part.resident_bytes), held)


def measure_step(
    module: nn.Module,
    stack: LayerStack | None,
    step: Step,
    batch: Any,
    device: torch.device,
    now: Callable[[], float] | None = None,
    repeats: int = _REPEATS,
    typical: bool = False,
    recomputation: str | int = "off",
) -> Costs:
    """Measure the prologue, a layer of each kind, and the epilogue, without changing the model.

    Parameters without data get random values for it. Seconds are the least of a few runs. A W is the time that a
    backward pass takes beyond its I, so it covers only work that the runtime can put off.

    Args:
        module: The model.
        stack: Its layers; None measures the full step, as a prologue.
        step: The user's step.
        batch: The input of the step.
        device: Where to run.
        now: The clock, in seconds; by default the host's clock, when the device is idle.
        repeats: Runs of each part.
        typical: Take the median of the runs instead of the least.
        recomputation: The layers whose activations backward computes again; see `layers_to_recompute`.

    Raises:
        ValueError: If the step cannot run with one layer at a time on the device.
    """
    if stack is None:
        return _CostMeter(module, LayerStack("", (), (), ()), device, now, repeats, typical).measure(step, batch)
    recomputed = layers_to_recompute(stack, recomputation)
    failure = ""
    # A model may notice that a layer did not run. Then all layers run in a second try.
    for runs_all in (False, True):
        meter = _CostMeter(module, stack, device, now, repeats, typical, recomputed)
        meter.runs_all = runs_all
        try:
            return meter.measure(step, batch)
        except Exception as error:
            failure = repr(error)  # the error itself would keep the tensors of its frames
    raise ValueError(f"The layers could not be measured ({failure})")


class TruncatedModel:
    """Runs a step with one layer of each kind, as a handler of calls.

    All layers of one kind return the output of the first one, as long as their inputs have the same shapes. Parameters
    of a layer, or of a copy of the model, are on the device while it runs, all other parameters during the step.
    Parameters without data get random values, the same in every run.

    Args:
        module: The model; it is not changed.
        stack: Its layers; without any, the full model runs.
        device: Where to run.

    Attributes:
        runs_all: Whether every layer runs, one after the other, for a model that notices otherwise.
        dtype: The dtype of floating-point parameters on the device; None to keep each one's dtype.
    """

    def __init__(self, module: nn.Module, stack: LayerStack, device: torch.device) -> None:
        self.stack = stack
        self.device = device
        self.runs_all = False
        self.dtype: torch.dtype | None = None
        self._module = module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._intercepted = InterceptedModel(module, stack)
        self._when_called = {child for layer in stack.layers for child in layer.modules()}
        # A copy of the model, such as a moving average, is as large as the model, and may never be called.
        copies = copies_of_layers(module, stack).keys()
        for _, outer in outer_modules(module, stack):
            inside = set(outer.modules())
            if copies.isdisjoint(inside):
                self._when_called -= inside
            else:
                self._when_called |= inside
        self._outputs: dict[Any, Any] = {}
        self._is_first = True

    def run(self, step: Step, batch: Any, seed: int | None = 0) -> Any:
        """Run `step` on `batch` and return its result; random numbers come from `seed`, or from outside if None."""
        self._is_first = True
        # Outputs of another batch have other shapes, and would keep its graph alive.
        self._outputs.clear()

        def data(_: str, child: nn.Module) -> dict[str, Any]:
            return {} if child in self._when_called else self._data(child)

        # The parameters are unloaded inside, because they are no attributes to be restored.
        with self._intercepted.handled_by(self, seed), replaced(self._module, data):
            self.begin()
            return step(batch)

    def begin(self) -> None:
        """Do nothing; called before the step, for subclasses that measure."""

    def leave_prologue(self, call: Call) -> Call:
        """Return the call of the first layer, unchanged here."""
        return call

    def enter_epilogue(self) -> None:
        """Do nothing; called after the last layer."""

    def run_layer(self, key: Any, call: Call) -> Any:
        """Run the first layer of a kind; `key` tells kinds and shapes of inputs apart."""
        return call.run()

    def outer_module(self, call: Call) -> Any:
        """Run a module outside the layers."""
        if call.module not in self._when_called:
            return call.run()
        with self.loaded(call.module):
            return call.run()

    def layer(self, call: Call) -> Any:
        """Run the layer if it is the first of its kind, otherwise return the first one's output."""
        if self._is_first:
            self._is_first = False
            call = self.leave_prologue(call)
        key = (call.site.kind, _shapes((call.args, call.kwargs)))
        # Hooks collect the outputs of layers, so a layer with hooks has to run.
        if key in self._outputs and not self.runs_all and not has_listeners(list(call.module.modules())):
            output = self._outputs[key]
        else:
            with self.loaded(call.module):
                output = self.run_layer(key, call)
            # A layer's graph holds its parameters: it ends here, so that one layer is all that is ever held.
            self._outputs[key] = output = pytree.tree_map_only(Tensor, cut_off, output)
        # Each layer gets a separate copy, which the model may write into.
        output = pytree.tree_map_only(Tensor, cut_off, output)
        if call.layer_index == len(self.stack.layers) - 1:
            self.enter_epilogue()
        return output

    @contextmanager
    def loaded(self, module: nn.Module) -> Iterator[None]:
        """Put parameters and buffers of `module` on the device inside the block."""
        with replaced(module, lambda _, child: self._data(child)):
            yield

    def _data(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's own tensors, without its children's, on the device."""
        return data_of(
            module, lambda value, is_buffer: _copied(value, self.device) if is_buffer else self._parameter(value)
        )

    def _parameter(self, parameter: Tensor) -> Tensor:
        if parameter.is_meta:
            value = _random(self._names[id(parameter)], parameter, self.device)
        else:
            value = parameter.detach().to(self.device)
        value = value.to(self.dtype) if self.dtype is not None and value.is_floating_point() else value
        # Another parameter with the same data: gradients must not reach the model's parameters.
        loaded = nn.Parameter(value, parameter.requires_grad)
        if loaded.requires_grad:
            # The gradients are not used: drop each before the next one arrives.
            loaded.register_post_accumulate_grad_hook(_drop_gradient)
        return loaded


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _random(name: str, parameter: Tensor, device: torch.device) -> Tensor:
    """Return the same random values for a parameter each time, small enough that half precision stays finite."""
    # Not `hash`, which differs from process to process: all ranks must draw the same values.
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return random_values(parameter.shape, parameter.dtype, device, 0.02, generator)


def _copied(buffer: Tensor, device: torch.device) -> Tensor:
    """Return a copy on `device`, which a forward pass may write into; zeros if there are no data."""
    if buffer.is_meta:
        return torch.zeros_like(buffer, device=device)
    return buffer.to(device, copy=True)


def _shapes(value: Any) -> tuple[Any, ...]:
    leaves = pytree.tree_leaves(value)
    return tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


@dataclass
class _NotedCall:
    """A layer with the arguments of its call, to be run again."""

    call: Call
    autocast: torch.dtype | None
    default: torch.dtype


class _CostMeter(TruncatedModel):
    """Measures the prologue and the epilogue while the step runs, and afterwards a layer of each kind by itself."""

    def __init__(
        self,
        module: nn.Module,
        stack: LayerStack,
        device: torch.device,
        clock: Callable[[], float] | None,
        repeats: int,
        typical: bool,
        recomputed: Mapping[str, Recomputed] | None = None,
    ) -> None:
        super().__init__(module, stack, device)
        # Aligned with the calls of the layers.
        self.recomputed = [(recomputed or {}).get(name) for name in stack.names]
        self.clock = clock
        self.repeats = repeats
        self.typical = typical
        self.keys: dict[int, Any] = {}
        self.noted: dict[Any, _NotedCall] = {}
        self.prologues: list[Cost] = []
        self.epilogues: list[Cost] = []
        self.begun_s = 0.0
        self.counts = True
        # Sizes of the tensors that autograd saves, and parameters on the device, by the addresses of their storages.
        self.saved: dict[int, int] = {}
        self.loaded_parameters: dict[int, weakref.ref[Tensor]] = {}

    def measure(self, step: Step, microbatch: Any) -> Costs:
        """Time a few steps, then each kind of layer."""
        with torch.enable_grad():
            for index in range(self.repeats):
                self.counts = index == 0
                self.time_step(step, microbatch)
            ends = [self.chosen(runs) if runs else Cost() for runs in (self.prologues, self.epilogues)]
            return Costs(tuple(self.layer_costs()), *ends)

    def time_step(self, step: Step, microbatch: Any) -> None:
        """Run the step once, and differentiate the part after the last layer."""
        with self._counting():
            result = self.run(step, microbatch)
        forward_s = self.now() - self.begun_s
        activation_bytes = self._activation_bytes()
        # Without layers, the step is a prologue to its end.
        part = self.epilogues if self.stack.layers else self.prologues
        part.append(Cost(forward_s, 0.0, self._backward_s(_differentiable(result)), activation_bytes))

    def begin(self) -> None:
        """Start the clock of the prologue."""
        self.saved.clear()
        self.begun_s = self.now()

    def leave_prologue(self, call: Call) -> Call:
        """Clock the prologue and its backward; the layers' arguments have no history from here on."""
        forward_s = self.now() - self.begun_s
        arguments = (call.args, call.kwargs)
        # Keep the graph: the epilogue may use outputs of the prologue, and is differentiated later.
        activation_bytes = self._activation_bytes()
        backward_s = self._backward_s(_differentiable(arguments), keep=True)
        self.prologues.append(Cost(forward_s, 0.0, backward_s, activation_bytes))
        return call.with_arguments(pytree.tree_map_only(Tensor, cut_off, arguments))

    def enter_epilogue(self) -> None:
        """Start the clock of the epilogue."""
        self.saved.clear()
        self.begun_s = self.now()

    def layer(self, call: Call) -> Any:
        """Note the kind of each layer."""
        arguments = (call.args, call.kwargs)
        key = self.keys[call.layer_index] = (call.site.kind, _shapes(arguments))
        noted = self.noted.get(key)
        # The first layer of a model without embedding takes the batch, which needs no gradient. Other layers tell more.
        if (
            noted is not None
            and _differentiable(arguments)
            and not _differentiable((noted.call.args, noted.call.kwargs))
        ):
            self.noted[key] = self._note_of(call)
        return super().layer(call)

    def _note_of(self, call: Call) -> _NotedCall:
        arguments = pytree.tree_map_only(Tensor, cut_off, copy_args((call.args, call.kwargs), {}))
        # The precision too: the layer runs again after the step, outside the context that sets it.
        return _NotedCall(call.with_arguments(arguments), autocast_dtype(self.device), torch.get_default_dtype())

    def run_layer(self, key: Any, call: Call) -> Any:
        """Note the first call of each kind with its arguments, before the layer may change them."""
        if key not in self.noted:
            self.noted[key] = self._note_of(call)
        return super().run_layer(key, call)

    def layer_costs(self) -> list[Cost]:
        """Run a layer of each kind alone, so that code that listens to the layers cannot take it for the step."""
        known: dict[Any, Cost] = {}
        wanted = [(self.keys.get(index), how) for index, how in enumerate(self.recomputed)]
        with seeded(0):
            for key, noted in self.noted.items():
                with self.loaded(noted.call.module):
                    known[key, None] = cost = self._timed_runs(noted)
                    # Not a set, whose order differs between ranks: sharded layers communicate.
                    for how in dict.fromkeys(how for kind, how in wanted if kind == key):
                        if how is not None:
                            known[key, how] = self._with_second_run(noted, how, cost)
        return [known.get(each, Cost()) for each in wanted]

    def _with_second_run(self, noted: _NotedCall, how: Recomputed, cost: Cost) -> Cost:
        """Return the cost of a layer whose activations backward computes again, from its cost without that."""
        # Only the second run is timed: noise in forward and backward must not decide between the choices.
        around = Recomputation(noted.call.site.name, noted.call.module, how)
        times: list[float] = []
        around.around_again = partial(self._clocked, times)
        for _ in range(self.repeats + 1):
            # The first run shows the results that backward needs. Later runs keep no others, and count.
            self.counts = bool(times)
            found = self._run(noted, around=around)
        again_bytes = max(0.0, cost.activation_bytes - found.activation_bytes)
        again_s = self._chosen(times[1:] or times) if times else 0.0
        return replace(
            cost,
            input_gradient_s=cost.input_gradient_s + again_s,
            activation_bytes=found.activation_bytes,
            again_s=again_s,
            again_bytes=again_bytes,
            largest_again_bytes=again_bytes,
            input_bytes=found.input_bytes,
        )

    @contextmanager
    def _clocked(self, times: list[float]) -> Iterator[None]:
        begun_s = self.now()
        try:
            yield
        finally:
            times.append(self.now() - begun_s)

    def _timed_runs(self, noted: _NotedCall) -> Cost:
        # First the full backward, then the backward with deferred weight gradients: W is the difference.
        whole = []
        # As often on each rank, because sharded layers communicate.
        for index in range(self.repeats):
            self.counts = index == 0
            whole.append(self._run(noted))
        self.counts = False
        with _splitting(noted.call.module):
            at_once = shared_parameters(noted.call.module)
            put_off = [self._run(noted, WeightGradients(at_once)) for _ in range(max(1, self.repeats - 1))]
        # The first run is left out: it also allocates and counts.
        later = whole[1:] or whole
        forward_s = self._chosen([run.forward_s for run in later])
        backward_s = self._chosen([run.input_gradient_s for run in later])
        # Noise may make the shorter backward the longer one, and a W must not take negative time.
        input_s = min(backward_s, self._chosen([run.input_gradient_s for run in put_off]))
        return replace(whole[0], forward_s=forward_s, input_gradient_s=input_s, weight_gradient_s=backward_s - input_s)

    def chosen(self, runs: list[Cost]) -> Cost:
        """Return the seconds of one run, and the bytes of the first run, which counted them."""
        ordered = sorted(runs[1:] or runs, key=lambda cost: cost.total_s)
        found = ordered[(len(ordered) - 1) // 2 if self.typical else 0]
        return replace(found, activation_bytes=runs[0].activation_bytes)

    def _chosen(self, seconds: list[float]) -> float:
        # Other programs can only make a run longer.
        ordered = sorted(seconds)
        return ordered[(len(ordered) - 1) // 2 if self.typical else 0]

    def _counting(self) -> AbstractContextManager[Any]:
        """Note the tensors that autograd saves, in one of the runs: in each it would take a part of the seconds."""
        return saved_tensors_hooks(self._note_saved, lambda tensor: tensor) if self.counts else nullcontext()

    def _run(
        self, noted: _NotedCall, later: WeightGradients | None = None, around: Recomputation | None = None
    ) -> Cost:
        """Time forward and backward, noted as an I, without work that can be put off until `later`."""
        call = noted.call
        args, kwargs = pytree.tree_map_only(Tensor, cut_off, copy_args((call.args, call.kwargs), {}))
        self.saved.clear()
        autocast = torch.autocast(self.device.type, noted.autocast, enabled=noted.autocast is not None)
        before = torch.get_default_dtype()
        torch.set_default_dtype(noted.default)
        inputs: list[Tensor] = []
        kept: list[Tensor] = []
        try:
            with autocast, self._counting():
                if around is None:
                    forward_s, result = self._timed(lambda: call.function(*args, **kwargs))
                else:
                    begin = partial(around.begin, call.function, args, kwargs)
                    forward_s, (result, layer_call) = self._timed(begin)
                    inputs, kept = layer_call.inputs(), layer_call.kept()
        finally:
            torch.set_default_dtype(before)
        for tensor in inputs if self.counts else []:
            self._note_saved(tensor)
        input_bytes = self._activation_bytes() if inputs else 0
        for tensor in kept if self.counts else []:
            self._note_saved(tensor)
        activation_bytes = self._activation_bytes()
        sent = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        with nullcontext() if later is None else deferring(later):
            backward_s = self._backward_s(_differentiable(result))
        return Cost(forward_s, backward_s, 0.0, activation_bytes, _bytes(sent), input_bytes=input_bytes)

    def _parameter(self, parameter: Tensor) -> Tensor:
        loaded = super()._parameter(parameter)
        address = storage_address(loaded.untyped_storage())
        # A layer may share data with a module outside the layers, which stays longer.
        if not self._is_parameter(address):
            self.loaded_parameters[address] = weakref.ref(loaded)
        return loaded

    def _is_parameter(self, address: int) -> bool:
        # Activations may now lie at the address of a parameter that was freed.
        known = self.loaded_parameters.get(address)
        return known is not None and known() is not None

    def _note_saved(self, tensor: Tensor) -> Tensor:
        # By storage: several views of one tensor may be saved, and memory is held once.
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        if not self._is_parameter(address):
            self.saved[address] = storage.nbytes()
        return tensor.detach()  # an output would keep the node that saves it, and with it a graph that never runs

    def _activation_bytes(self) -> int:
        """Sum up the tensors saved for backward; parameters are saved without a copy, and counted as resident."""
        return sum(self.saved.values())

    def _backward_s(self, roots: Sequence[Tensor], keep: bool = False) -> float:
        """Time the differentiation of `roots`, as far back as their graph goes, in seconds."""
        if not roots:
            return 0.0
        # Only the time counts, so any gradient will do.
        ones = [torch.ones_like(root) for root in roots]
        return self._timed(lambda: torch.autograd.backward(roots, ones, retain_graph=keep))[0]

    def _timed(self, call: Callable[[], T]) -> tuple[float, T]:
        begun_s = self.now()
        result = call()
        return self.now() - begun_s, result

    def now(self) -> float:
        """Return the seconds of the clock: by default the host's clock, when the device is idle."""
        if self.clock is not None:
            return self.clock()
        # A call returns once its kernels are launched, so wait until they end.
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def _differentiable(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def cut_off(tensor: Tensor) -> Tensor:
    """Return a copy without history, which is no leaf, so that the model may write into it."""
    return tensor.detach().requires_grad_() * 1 if tensor.requires_grad else tensor.clone()


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _splitting(module: nn.Module) -> Iterator[None]:
    """Apply `split_linears` inside the block only."""
    before = [child for child in module.modules() if type(child) is nn.Linear]
    split_linears(module)
    try:
        yield
    finally:
        # The measured layer is the user's: its plan may still be discarded, or its schedule may not split the backward.
        for child in before:
            child.__class__ = nn.Linear
