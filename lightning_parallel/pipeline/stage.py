"""One stage of a model: the user's own step runs, and the stage decides about each intercepted call.

    stage 1 of 3 owns layers 2 and 3
    embed, 0, 1     of stage 0: stubs return placeholders
    2               first owned: the placeholders among its arguments are received, then it runs
    3               runs
    4               of stage 2: its arguments have to be sent; the step ends here

`PipelineStages` keeps the parts of a model that the stages of one rank need. Names in `state_dict` stay the names of
the full model. A parameter of several stages, such as an embedding matrix that is also the head, stays on each
("tied").
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from lightning_parallel.compat import Patches, innermost_users_line
from lightning_parallel.compat.torch import (
    buffers_of,
    function_modes_kept,
    graph_position,
    non_persistent_buffers_of,
    parameters_of,
    position_in_graph,
    pytree,
)
from lightning_parallel.pipeline.layer_stack import LayerStack, layer_kinds, outer_modules
from lightning_parallel.pipeline.p2p import line_of_step
from lightning_parallel.pipeline.pipeline_plan import PipelinePlan, TiedParameter
from lightning_parallel.pipeline.skips import NO_SKIPS, StageSkips
from lightning_parallel.step_trace.attributes import SavedForwards
from lightning_parallel.step_trace.interception import (
    ActiveHandler,
    Call,
    CallHandler,
    CallSite,
    intercept,
)
from lightning_parallel.step_trace.placeholder import (
    PARAMETERS_ELSEWHERE,
    PlaceholderError,
    PlaceholderTensor,
    UnknownValue,
    missing,
    reveal,
    step_of_stage,
)
from lightning_parallel.step_trace.record import state_kept
from lightning_parallel.step_trace.stubs import StubOutputs, free_parameters

__all__ = [
    "REENTRANT",
    "CutError",
    "InterceptedModel",
    "PipelineStages",
    "StageEnd",
    "StageExit",
    "StageForward",
    "are_tensors",
    "in_whole_model",
    "positions_to_receive",
]

REENTRANT = (
    "The pipeline is split at a layer that runs without gradients, so no gradient reaches the stage before. In a"
    " reentrant activation checkpoint, call `checkpoint(..., use_reentrant=False)`. For layers in `torch.no_grad()`,"
    " such as a teacher: name the trained layers with `layers=...`, and call the teacher before or after them"
)


_REGISTERED = (
    "The parameters must stay those of the start of the run, because each pipeline stage holds its own; got the"
    " parameter `{}` registered as `{}` in {}, as by `torch.nn.utils.prune` or `parametrize`. Change the model before"
    " `fit`, in `__init__` or `configure_model`. Or multiply `p.data` by a mask in a hook, or use"
    " TensorParallelStrategy"
)


class CutError(PlaceholderError):
    """The model cannot be split, or not here: a connection skips the split point, or a layer runs twice."""


@dataclass(frozen=True)
class StageEnd:
    """Where a stage ends: the call of the first layer of a later one.

    Attributes:
        index: The layer.
        leaves, tree: Its arguments, flattened.
        line: The line of the step that calls it.
    """

    index: int
    leaves: list[Any]
    tree: pytree.TreeSpec
    line: str = ""


class StageExit(BaseException):
    """Ends a step at the first layer of a later stage."""

    # Not an `Exception`, so that no handler in the model stops it.
    def __init__(self, end: StageEnd) -> None:
        self.end = end


Receive = Callable[[int, list[Any], list[int]], list[Tensor]]
"""(layer, leaves of its arguments, positions of the placeholders among them) -> their data."""


class StageForward:
    """The forward of one stage on one microbatch, as a handler of calls.

    Args:
        stage: The stage.
        stage_of: The stage of each layer.
        stubs: Outputs of modules of other stages.
        receive: Called once, at the first layer that does not belong to an earlier stage.
        on_entry: Called just before that.
        after_outer_call: Called with the number of calls of outer modules so far, until the first layer is called.
        before_layer: Called with the index of each layer, except layers of later stages.
        skips: The tensors that this stage gets and gives besides the arguments of layers.

    Attributes:
        entered: Whether the stage has its inputs.
        last: The last layer that was called, -1 before the first.
        ran: If a list: for each module that ran, the range of its nodes in autograd's graph, by number.
    """

    def __init__(
        self,
        stage: int,
        stage_of: tuple[int, ...],
        stubs: StubOutputs,
        receive: Receive,
        on_entry: Callable[[], None] = lambda: None,
        after_outer_call: Callable[[int], None] = lambda number: None,
        skips: StageSkips = NO_SKIPS,
        before_layer: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.stage = stage
        self.stage_of = stage_of
        self.stubs = stubs
        self.receive = receive
        self.on_entry = on_entry
        self.after_outer_call = after_outer_call
        self.before_layer = before_layer
        self.skips = skips
        self._has_skips = skips.has_any
        self.outer_calls = 0
        # The first stage receives nothing: its inputs are in the batch.
        self.entered = stage == 0
        self.last = -1
        self.ran: list[tuple[int, int]] | None = None

    def layer(self, call: Call) -> Any:
        """Infer the call, receive and run it, run it, or leave the step, according to the layer's stage."""
        index = call.layer_index
        # Before anything else: a second call of a layer would receive again, but the neighbour sends once.
        self._require_order(call.site, index)
        stage = self.stage_of[index]
        if stage < self.stage:
            # The step's draws between layers must be the same here as on the stage that runs them.
            self.before_layer(index)
            return self.skips.call(call, self._infer)
        if not self.entered:
            arguments = self._enter(index, call)
        else:
            arguments = reveal(call.args), reveal(call.kwargs)
        if stage > self.stage:
            # Entered above even so: a tensor that only passes through this stage must be received to be sent on.
            leaves, tree = pytree.tree_flatten(arguments)
            raise StageExit(StageEnd(index, leaves, tree, line_of_step()))
        _require_data(call.site.name, arguments)
        self.before_layer(index)
        return self.skips.call(call.with_arguments(arguments), self._run)

    def quick(
        self, site: CallSite, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Do the same as `layer` for a usual call: of a stub that looks as the last one, or of an owned layer.

        Returns:
            `NotImplemented` for any other call: the first layer, a layer of a later stage, a call out of order.
        """
        index = site.places[0]
        stage = self.stage_of[index]
        if index <= self.last or self._has_skips or stage > self.stage:
            return NotImplemented
        if stage < self.stage:
            output = self.stubs.repeated(site, module, args, kwargs)
            if output is None:
                return NotImplemented
            site.active.last = self.last = index
            self.before_layer(index)
            return output
        if not self.entered:
            return NotImplemented
        for value in (*args, *kwargs.values()):
            if type(value) not in _WITH_DATA:
                args, kwargs = reveal(args), reveal(kwargs)
                _require_data(site.name, (args, kwargs))
                break
        site.active.last = self.last = index
        self.before_layer(index)
        if self.ran is None:
            return function(*args, **kwargs)
        begin = graph_position()
        output = function(*args, **kwargs)
        self.ran.append((begin, graph_position()))
        return output

    def outer_module(self, call: Call) -> Any:
        """Infer the call before the stage is entered, run it afterwards."""
        result = self._outer_result(call)
        # Only before the first layer: from there on, each layer sets a seed.
        if self.last < 0:
            self.outer_calls += 1
            self.after_outer_call(self.outer_calls)
        return result

    def _outer_result(self, call: Call) -> Any:
        if not self.entered:
            return self.skips.call(call, self._infer)
        if not call.site.present:
            raise CutError(
                f"`{call.site.name}` is called after the first layer of pipeline stage {self.stage}, and this stage"
                " does not hold it. The first step called it before the layers, or not at all (like a moving"
                f" average). Call `{call.site.name}` at the same place in every step, or between steps. If it is the"
                " largest part of the model, such as an LSTM, use `TensorParallelStrategy` or plain data parallelism:"
                " a pipeline has little to split there"
            )
        arguments = reveal(call.args), reveal(call.kwargs)
        _require_data(call.site.name, arguments)
        return self.skips.call(call.with_arguments(arguments), self._run)

    def _infer(self, call: Call) -> Any:
        if _seen_stages is not None:
            leaves = pytree.tree_leaves((call.args, call.kwargs))
            # A part of the gradient of such a tensor comes from another stage: see `_differentiated`.
            _seen_stages.given_to_others += [leaf for leaf in leaves if type(leaf) is Tensor and leaf.requires_grad]
        return self.stubs.infer(call)

    def _run(self, call: Call) -> Any:
        begin = graph_position()
        output = call.run()
        if self.ran is not None:
            self.ran.append((begin, graph_position()))
        return output

    def _require_order(self, site: CallSite, index: int) -> None:
        if index <= self.last:
            again = "again" if index == self.last else f"after layer {self.last}"
            raise CutError(
                f"`{site.name}` is called {again} in this step; a pipeline must run the layers as often and in the"
                " same order in every step as in the first step"
            )
        self.last = index

    def _enter(self, index: int, call: Call) -> tuple[Any, Any]:
        # From here on, parameters that the step reads directly are this stage's own.
        self.on_entry()
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        positions = positions_to_receive(leaves)
        for position, value in zip(positions, self.receive(index, leaves, positions)):
            # The placeholder stays the object that the model holds, so lists that hold it see its data as well.
            leaves[position].receive(value)
        self.entered = True
        return reveal(call.args), reveal(call.kwargs)


_WITH_DATA = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype))
"""Types of arguments that are no placeholders and hold none."""


def positions_to_receive(leaves: list[Any]) -> list[int]:
    """Return the positions of placeholders among `leaves`; for a placeholder that occurs twice, the first position."""
    seen: set[int] = set()
    positions = []
    for position, leaf in enumerate(leaves):
        # One tensor passed twice travels once, and stays one tensor on the other side.
        if missing(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            positions.append(position)
    return positions


def are_tensors(leaves: list[Any]) -> tuple[bool, ...]:
    """Return for each leaf whether it is a tensor."""
    return tuple([isinstance(leaf, Tensor) for leaf in leaves])


_seen_stages: PipelineStages | None = None


def _differentiated(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `autograd.grad` that refuses, in a step, tensors that also reach the loss through other stages."""

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for value in [inputs] if isinstance(inputs, Tensor) else inputs if _seen_stages is not None else ():
            if _seen_stages is None:
                break
            is_given = any(value is other for other in _seen_stages.given_to_others)
            if is_given or isinstance(value, PlaceholderTensor):
                what = value.provenance if isinstance(value, PlaceholderTensor) else "an input of the model"
                raise PlaceholderError(
                    f"The step asks for the gradient of {what} by `autograd.grad` in {innermost_users_line()}. This"
                    " gradient would pass through earlier pipeline stages, which have not begun their backward pass"
                    " by then. Use TensorParallelStrategy, whose ranks run the full step"
                )
        for value in [outputs] if isinstance(outputs, Tensor) else outputs if _seen_stages is not None else ():
            if isinstance(value, PlaceholderTensor) and _seen_stages is not None and missing(value):
                raise PlaceholderError(
                    f"The step differentiates {value.provenance} by `autograd.grad` in {innermost_users_line()}. This"
                    " value is on another pipeline stage, with the graph behind it. A step that calls the layers twice"
                    " has its first results there. Use TensorParallelStrategy, whose ranks run the full step"
                )
        return original(outputs, inputs, *args, **kwargs)

    return grad


def in_whole_model(patches: Patches) -> None:
    """Let `parameters()` include parameters of other stages, in a step of a stage, until `patches` are undone.

    These are placeholders, which refuse computations. Otherwise a loop over parameters would omit them silently.
    """
    named_parameters, get_parameter = nn.Module.named_parameters, nn.Module.get_parameter

    def seen(
        self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        if _seen_stages is None:
            # The patch holds for every module of the process, so it does nothing outside a step.
            return named_parameters(self, prefix, recurse, remove_duplicate)
        return _seen_stages.parameters_seen(self, prefix, recurse, remove_duplicate)

    def seen_one(self: nn.Module, target: str) -> Any:
        path, _, key = target.rpartition(".")
        # A freed parameter is a plain attribute, which torch's `get_parameter` refuses.
        value = vars(self.get_submodule(path)).get(key)
        return value if type(value) is PlaceholderTensor else get_parameter(self, target)

    register_parameter = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: Any) -> None:
        if type(param) is PlaceholderTensor and param.parameter:
            raise PlaceholderError(_REGISTERED.format(param.parameter, name, innermost_users_line()))
        register_parameter(self, name, param)

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def parametrized(module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
            value = vars(module).get(tensor_name)
            if type(value) is PlaceholderTensor and value.parameter:
                raise PlaceholderError(_REGISTERED.format(value.parameter, tensor_name, innermost_users_line()))
            return own(module, tensor_name, *args, **kwargs)

        return parametrized

    patches.replace(nn.Module, "register_parameter", registered)
    patches.replace_function(register_parametrization, make)
    patches.replace(nn.Module, "named_parameters", seen)
    patches.replace(nn.Module, "get_parameter", seen_one)
    patches.replace_function(torch.autograd.grad, _differentiated)


def _leaves_of(loss: Tensor, ran: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the leaves that reach a loss through nodes that were not made while modules `ran`."""
    begins = [begin for begin, _ in ran]
    seen, waiting, found = set(), [loss.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)  # type: ignore[attr-defined]
            continue
        number = position_in_graph(node)
        # Modules also pass on tensors that are no outputs, such as losses that they append to a list.
        index = bisect(begins, number) - 1
        if index < 0 or number >= ran[index][1]:
            waiting += [function for function, _ in node.next_functions]
    return found


def _is_freed(module: nn.Module, name: str) -> bool:
    value = vars(module)[name]
    return type(value) is PlaceholderTensor and bool(value.parameter)


def _require_data(name: str, arguments: Any) -> None:
    placeholder = _first_missing(arguments)
    if placeholder is not None:
        raise CutError(
            f"`{name}` needs {placeholder.provenance}, which is on an earlier pipeline stage and is not among the"
            " arguments of this stage's first layer: this connection skips the split point. Move it (such as a"
            " residual addition) into the layers, pass it to them as an argument, or choose another split point"
            " (`balance`) [LP024]",
            [placeholder],
        )


def _first_missing(value: Any) -> PlaceholderTensor | None:
    # Written out instead of `pytree`, which flattens everything first: this runs at each call and rarely finds any.
    if type(value) is PlaceholderTensor:
        return value if missing(value) else None
    if type(value) is UnknownValue and not value.available:
        value.refuse()
    items: Any = ()
    if isinstance(value, (tuple, list)):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    for item in items:
        found = _first_missing(item)
        if found is not None:
            return found
    return None


class InterceptedModel:
    """A model whose layers and outer modules are intercepted.

    Args:
        module: The model.
        stack: Its layers.
        is_here: Tells whether this rank holds a layer (by its index) or an outer module (by its name).

    Attributes:
        module: The model.
        active: The handler in use.
        outer: The call sites of the modules outside the layers.
        site_of: The call sites of all intercepted modules.
    """

    def __init__(
        self, module: nn.Module, stack: LayerStack, is_here: Callable[[int | str], bool] = lambda _: True
    ) -> None:
        self.module = module
        self.active = ActiveHandler()
        self.outer: list[CallSite] = []
        places, kinds = stack.places(), layer_kinds(stack)
        self.site_of: dict[nn.Module, CallSite] = {}
        for layer, mine in places.items():
            name, kind = stack.names[mine[0]], kinds[mine[0]]
            self.site_of[layer] = CallSite(self.active, name, kind, mine, any(map(is_here, mine)))
        for name, child in outer_modules(module, stack):
            self.outer.append(CallSite(self.active, name, name, present=is_here(name)))
            self.site_of[child] = self.outer[-1]
        for child, site in self.site_of.items():
            intercept(child, site)

    @contextmanager
    def handled_by(self, handler: CallHandler, seed: int | None = 0) -> Iterator[None]:
        """Let `handler` decide about calls inside the block, with the same random numbers each time.

        Args:
            handler: The handler.
            seed: The seed of the random numbers; None continues the outer state.
        """
        with state_kept(self.module, seed), self.active.use(handler):
            yield


class PipelineStages:
    """A model on one rank, with only the stages that a plan gives this rank.

    Args:
        module: The model, with the same structure on all ranks. Parameters of other stages are freed, in place.
        plan: The stage of each part.
        rank: This rank's position in the pipeline group.
        device: Where stages compute.

    Attributes:
        stages: The stages of this rank.
        stage_of: The stage of each layer.
        num_stages: Stages of the full pipeline.
        tied: The names, stages and ranks of each parameter that several ranks hold, by its first name.
        stubs: Outputs of modules of other stages.
        sites: The intercepted modules.
        outside_of_layers: All modules except the layers and the modules inside them.
    """

    def __init__(self, module: nn.Module, plan: PipelinePlan, rank: int, device: torch.device) -> None:
        self.module = module
        self.plan = plan
        self.device = device
        self.stages = plan.schedule.stages_of(rank)
        self.stage_of = plan.stage_of
        self.num_stages = plan.num_stages
        self.stubs = StubOutputs(device)
        stack = LayerStack.at(module, plan.container)
        inside = {child for layer in stack.layers for child in layer.modules()}
        self._modules = list(module.modules())
        self.outside_of_layers = [child for child in self._modules if child not in inside]
        # Before parameters are freed, because ties are found by identity.
        self.tied = self._find_tied()
        self._keys = {id(child): list(parameters_of(child)) for child in module.modules() if parameters_of(child)}
        # Weak, because an `id` is reused: an entry must vanish with its parameter.
        self._known = WeakValueDictionary[int, Tensor]()
        self._names: dict[int, str] = {}
        self.note_parameters()
        # Set where a parameter of this stage is itself sharded over other ranks.
        self.full_parameter: Callable[[str, Tensor], Tensor] = lambda name, value: value
        # How sequences are split over other ranks, for the pieces that stages send each other.
        self.split: Any = None
        # The parameters that the step computes with directly, see `check_direct`.
        self.direct = {*(plan.direct or ())}
        # Tensors with gradients that the step passes to modules of earlier stages.
        self.given_to_others: list[Tensor] = []
        self.is_first_step = True
        # Before freeing as well: a module without its parameters is recognized by its site.
        self.sites = InterceptedModel(module, stack, self._holds)
        self._free(stack)
        # After freeing: only parameters that are still registered have to be hidden.
        self._hidden = self._stand_ins(stack)
        self._freed = [(child, key) for child in self.outside_of_layers for key in vars(child) if _is_freed(child, key)]
        self._freed_in_layers = [(child, key) for child in inside for key in vars(child) if _is_freed(child, key)]

    @property
    def active(self) -> ActiveHandler:
        """The object that decides about calls; it has a handler while a stage runs a step."""
        return self.sites.active

    @property
    def outer_names(self) -> list[str]:
        """Names of the intercepted modules outside the layers, which draw from separate streams."""
        return [site.name for site in self.sites.outer]

    @contextmanager
    def handled_by(self, handler: Any) -> Iterator[None]:
        """Let `handler` decide about calls; until its stage is entered, parameters outside modules are hidden."""
        # Received data belong to one microbatch, so each gets separate placeholders.
        places = [] if handler.entered else list(self._freed)
        # Placeholders in layers receive data only as skips, because their layers do not run here.
        places += self._freed_in_layers if handler.skips.with_parameters else []
        freed = [(child, name, child.__dict__[name]) for child, name in places]
        # At the start of each step, because hooks may replace a `forward` between steps.
        forwards = SavedForwards(self._modules)
        for child, name, placeholder in freed:
            child.__dict__[name] = placeholder.again()
        if not handler.entered:
            self._hide()
        try:
            if handler.skips.with_parameters:
                # First: a received parameter is passed on as it came, in place of this rank's own.
                handler.skips.receive_parameters(self._lacking_parameters())
                handler.skips.keep_parameters(dict(self.module.named_parameters()), self.full_parameter)
            with function_modes_kept(), self.sites.active.use(handler), self.seen_whole():
                yield
        finally:
            for child, name, placeholder in freed:
                child.__dict__[name] = placeholder
            # `StageExit` or an error may have ended the step early.
            forwards.restore()
            self.show()
            self.stubs.forget_arguments()

    @contextmanager
    def seen_whole(self) -> Iterator[None]:
        """Let a step inside the block find the parameters of all stages in `parameters()`."""
        global _seen_stages
        before, _seen_stages = _seen_stages, self
        try:
            with step_of_stage():
                yield
        finally:
            _seen_stages = before
            # The list would keep activations alive.
            self.given_to_others.clear()

    @contextmanager
    def other_precision(self, dtype: torch.dtype) -> Iterator[None]:
        """Let placeholders stand for floating-point tensors of `dtype` inside the block."""
        patches = Patches()
        placeholders: list[tuple[nn.Module, str, PlaceholderTensor]] = []
        for child in self.module.modules():
            for key, value in vars(child).items():
                if isinstance(value, PlaceholderTensor) and value.dtype.is_floating_point:
                    placeholders.append((child, key, value))
        stack = LayerStack.at(self.module, self.plan.container)
        patches.replace(self, "stubs", StubOutputs(self.device))
        patches.replace(self, "_hidden", self._stand_ins(stack))
        for child, key, value in placeholders:
            vars(child)[key] = value.again(dtype)
        try:
            yield
        finally:
            patches.undo()
            for child, key, value in placeholders:
                vars(child)[key] = value

    def note_parameters(self) -> None:
        """Note the current parameters, in addition to the parameters noted before."""
        self._known.update({id(value): value for value in self.module.parameters()})
        self._names.update({id(value): name for name, value in self.module.named_parameters()})

    def parameters_seen(
        self, module: nn.Module, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of a module in the order of the full model, with placeholders for other stages."""
        known: set[Any] = set()
        children = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate) if recurse else None
        for path, child in [(prefix, module)] if children is None else children:
            own, attributes = parameters_of(child), vars(child)
            # A copy of a module has placeholders as well.
            lacking = [key for key, value in attributes.items() if _is_freed(child, key)]
            # The order before parameters were freed: the registry has lost the freed ones.
            for key in self._keys.get(id(child)) or dict.fromkeys([*own, *lacking]):
                value = attributes.get(key)
                value = own.get(key) if value is None else value
                if value is None:
                    continue
                mark: Any = value.parameter if type(value) is PlaceholderTensor else self._names.get(id(value))
                mark = mark or id(value)
                if not remove_duplicate or mark not in known:
                    known.add(mark)
                    yield (f"{path}.{key}" if path else key), value

    def check_direct(self, loss: Tensor, ran: Sequence[tuple[int, int]]) -> None:
        """Refuse a loss that uses parameters of layers directly, if the step did not do so before.

        A loop over all parameters, kept by hooks or lists of the user, finds the parameters of this stage only.

        Args:
            loss: The loss of a microbatch, on the last stage.
            ran: For each module that ran, the range of its nodes in the graph, by number.

        Raises:
            PlaceholderError: If there is such a parameter; names it.
        """
        found = [leaf for leaf in _leaves_of(loss, ran) if self._known.get(id(leaf)) is leaf]
        if not found:
            return
        here = {id(value) for value in self.module.parameters()}
        inside = tuple(f"{layer}." for layer in self.plan.layers)
        for leaf in found:
            name = self._names[id(leaf)]
            if id(leaf) in here and (name in self.direct or not name.startswith(inside)):
                continue
            # The trace did not reach the loss, so the first step shows the parameters that it uses.
            if id(leaf) in here and self.is_first_step and self.plan.direct is None:
                self.direct.add(name)
                continue
            reason = f" The step could not be followed to its end before the first batch ({self.plan.stopped})."
            raise PlaceholderError(
                f"The loss uses the parameter `{name}` outside its module, but did not do so before the first batch."
                " This stage may lack parameters of other stages in the same term."
                f"{reason if self.plan.stopped else ''} {PARAMETERS_ELSEWHERE}"
            )

    def show(self) -> None:
        """Undo the hiding of parameters from a stage that is not entered yet."""
        for module, name, _ in self._hidden:
            module.__dict__.pop(name, None)

    def _hide(self) -> None:
        """Hide the parameters that the step reads directly behind placeholders, as if this stage lacked them."""
        # The previous stage sees the same in its dry run, by which it finds the tensors to send to this stage.
        for module, name, placeholder in self._hidden:
            module.__dict__[name] = placeholder.again()

    def _lacking_parameters(self) -> dict[str, list[PlaceholderTensor]]:
        """Return the current placeholders of parameters, by name."""
        found: dict[str, list[PlaceholderTensor]] = {}
        for child in self.module.modules():
            for value in vars(child).values():
                if type(value) is PlaceholderTensor and value.parameter is not None:
                    found.setdefault(value.parameter, []).append(value)
        return found

    def _find_tied(self) -> dict[str, TiedParameter]:
        names: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        tied = {}
        for name, parameter in self.module.named_parameters():
            stages = self.plan.parameters[name].stages
            # A rank with several of the stages holds the parameter once, and needs no exchange for it.
            ranks = tuple(dict.fromkeys(self.plan.schedule.stage_ranks[stage] for stage in stages))
            if len(ranks) > 1:
                tied[name] = TiedParameter(tuple(names[id(parameter)]), stages, ranks)
        return tied

    def _is_here(self, stages: tuple[int, ...]) -> bool:
        return any(stage in self.stages for stage in stages)

    def _holds(self, module: int | str) -> bool:
        if isinstance(module, int):
            return self.stage_of[module] in self.stages
        return self._is_here(self.plan.module_stages[module])

    def _free(self, stack: LayerStack) -> None:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        # By identity: a parameter may be registered under names that no stage here uses.
        freed = {key for key, name in names.items() if not self._is_here(self.plan.parameters[name].stages)}
        for child in self.module.modules():
            free_parameters(child, freed, self.device, names)
        for layer, places in stack.places().items():
            # A layer with several calls is freed only if none of them is on this rank.
            if not any(map(self._holds, places)):
                self._free_buffers(layer, stack.names[places[0]], keep_constants=False)
        for name, module in outer_modules(self.module, stack, with_parameters=False):
            if self.plan.module_stages.get(name) and not self._is_here(self.plan.module_stages[name]):
                self._free_buffers(module, name, keep_constants=True)

    def _free_buffers(self, module: nn.Module, name: str, keep_constants: bool) -> None:
        """Free the buffers of a module, with `keep_constants` only the buffers of its checkpoints."""
        # Buffers outside checkpoints are constants, such as inverse frequencies, and any stage may read them.
        for path, child in module.named_modules(prefix=name):
            buffers = buffers_of(child)
            for key, value in list(buffers.items()):
                if value is not None and not (keep_constants and key in non_persistent_buffers_of(child)):
                    del buffers[key]
                    provenance = f"the buffer `{path}.{key}`"
                    child.__dict__[key] = PlaceholderTensor.like(value, provenance, self.device)

    def _stand_ins(self, stack: LayerStack) -> list[tuple[nn.Module, str, PlaceholderTensor]]:
        """Return placeholders for this rank's parameters outside the layers, which a step may read directly."""
        inside = {id(child) for layer in stack.layers for child in layer.modules()}
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        stand_ins = []
        for child in self.module.modules():
            if id(child) in inside:
                continue
            for name, parameter in parameters_of(child).items():
                if parameter is not None:
                    full = names[id(parameter)]
                    placeholder = PlaceholderTensor.like(parameter, f"the parameter `{full}`", self.device, full)
                    stand_ins.append((child, name, placeholder))
        return stand_ins
