"""Column- and row-parallel linear layers as autograd functions, with the communication overlapped where possible.

Backward of column-parallel layers that share one input x (..., in), such as queries, keys and values:

    g_q -> dx  = g_q W_q      then dW_q
    g_k -> dx += g_k W_k      then dW_k
    g_v -> dx += g_v W_v ---> all-reduce(dx) in flight, then dW_v
                              wait

There is one all-reduce for all layers that share x, and the last weight gradient is computed while it runs. A layer
that has been the only reader of x in a backward pass takes no part in this: it sums dx over the ranks itself. Pipeline
schedules that split the backward put dW off (`comm.weight_gradients`). Until then x and g are kept, with sequence
parallelism the gathered ones.

With sequence parallelism, large tensors travel in spans of positions. A product runs on one span while the next one
arrives, and a span of its result leaves while the next one is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending, group_labelled
from lightning_parallel.comm.kept import kept, running_results
from lightning_parallel.comm.weight_gradients import put_off, weight_gradient_queue
from lightning_parallel.compat.torch import (
    apply_of,
    current_graph_task_id,
    is_any_autocast_enabled,
    is_traced_now,
    transforms_active,
    unsafe_view,
    version_of,
    views_unseen,
)
from lightning_parallel.tensor.autograd import (
    all_gather_to_group,
    copy_to_group,
    no_view,
    reduce_from_group,
    reduce_scatter_to_group,
)
from lightning_parallel.tensor.sharding import balanced

__all__ = [
    "SequenceLengths",
    "Reader",
    "SharedInputs",
    "column_in_graph",
    "column_linear",
    "compute_dtype",
    "row_in_graph",
    "row_linear",
    "shared_inputs",
]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes on `x`: autocast's dtype where autocast applies."""
    # Autocast never casts double precision.
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: SharedInputs,
    transposed: bool = False,
    reader: Reader | None = None,
) -> Tensor:
    """Compute this rank's output features of a linear layer.

        x (..., in)  @  weight_r^T (in, out / ranks)  ->  y_r (..., out / ranks)

    Args:
        x: (..., in), equal on all ranks; with sequence parallelism this rank's part of the sequence.
        weight: This rank's rows, (out / ranks, in); (in, out / ranks) if `transposed`.
        bias: (out / ranks,).
        inputs: The object that all layers of the group share.
        transposed: Whether the weight is stored as (in, out), as in transformers' `Conv1D`.
        reader: The layer, if the same object is given in each call of it.
    """
    shared, node, gradient, part = inputs.enter(x, reader)
    apply = _ColumnLinearFunction.apply if transforms_active() else _apply_column
    return apply(shared, weight, bias, gradient, transposed, part, node)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    lengths: SequenceLengths | None = None,
    transposed: bool = False,
) -> Tensor:
    """Compute the output of a linear layer; this rank holds some of its input features.

        sum over ranks of  x_r (..., in / ranks)  @  weight_r^T (in / ranks, out)  + bias  ->  y (..., out)

    Args:
        x: (..., in / ranks), this rank's input features.
        weight: This rank's columns, (out, in / ranks); (in / ranks, out) if `transposed`.
        bias: (out,), the full bias; added once, after the sum.
        group: The tensor-parallel group.
        lengths: With sequence parallelism, how sequences are sharded; y is then this rank's part of the sequence.
        transposed: Whether the weight is stored as (in, out).
    """
    # Cast here: gradients of gradients need the graph of the input that the function keeps.
    apply = _RowLinearFunction.apply if transforms_active() else _apply_row
    dtype = compute_dtype(x) if is_any_autocast_enabled() else x.dtype
    return apply(x if x.dtype is dtype else x.to(dtype), weight, bias, group, lengths, transposed)


# Each is one node of a compiled graph. The compiler runs its code once, with tensors without data, and records the
# operators of forward and backward. Layers that read one tensor share its gradient there as well.


@torch.compiler.allow_in_graph
def column_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: str, transposed: bool) -> Tensor:
    """Compute `column_linear` in compiled code, given the label of `inputs`."""
    return column_linear(x, weight, bias, _inputs_labelled[inputs], transposed)


@torch.compiler.allow_in_graph
def row_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, transposed: bool) -> Tensor:
    """Compute `row_linear` without lengths in compiled code, given the label of the group."""
    return row_linear(x, weight, bias, group_labelled(group), None, transposed)


class SequenceLengths:
    """Lengths of the sequences that are sharded along `dim`: as evenly as possible, the first ranks take one more.

    The full length does not follow from a part's length (5 and 6 both give rank 0 of 2 a part of 3). So the layer that
    shards a sequence records its length here, and the layer that gathers it looks it up. If several full lengths have
    equal parts on this rank, the latest one counts. A recomputation in backward comes later, so it asks all ranks.

    Attributes:
        suspended: Whether layers compute on full sequences for now. Evaluation does: it keeps no activations, and may
            have one position only.
        stream: Shape of this rank's part of the hidden states, if known. A layer may get them with samples and
            positions in one dimension.
        in_block: Whether a block of a region runs.
        outside: The module of a block that code calls outside the block, while this call runs.
    """

    def __init__(self, group: Group, dim: int) -> None:
        self.group = group
        self.dim = dim
        self.suspended = False
        self.in_block = False
        self.outside: nn.Module | None = None
        self.stream: torch.Size | None = None
        self._full: dict[int, int] = {}
        self._seen: set[int] = set()
        self._is_ambiguous = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceLengths:
        return self  # layers that exchange lengths must go on sharing one object, also in a copied model

    def divide(self, length: int) -> list[int]:
        """Return the length of each rank's part of a sequence of `length`, and record `length`."""
        sizes = balanced(length, self.group.size)
        self._full[sizes[self.group.rank]] = length
        if length not in self._seen:
            # Based on full lengths, which are equal on all ranks: either all ranks ask, or none does.
            self._is_ambiguous |= any(abs(length - other) < self.group.size for other in self._seen)
            self._seen.add(length)
        return sizes

    def parts(self, local: int) -> list[int]:
        """Return the length of each rank's part of a sequence, given the `local` positions of this rank.

        Raises:
            RuntimeError: If no sequence with such a part has been sharded.
        """
        # Kept in each run, since a second run would ask all ranks for lengths that the first run knew.
        return kept(lambda: self._parts(local))

    def _parts(self, local: int) -> list[int]:
        if self._is_ambiguous and current_graph_task_id() != -1:
            return comm.all_gather_object(local, self.group)
        if local not in self._full:
            raise RuntimeError(
                "The input of a sequence-parallel layer must be a part of a sequence that an earlier layer sharded;"
                f" got {local} positions in dimension {self.dim} (full lengths so far:"
                f" {sorted(self._full.values()) or 'none'})"
            )
        return balanced(self._full[local], self.group.size)

    def is_full(self, length: int) -> bool:
        """Return whether a sequence of `length` positions can only be a full one."""
        return length in self._seen and length not in self._full

    def is_flat(self, x: Tensor) -> bool:
        """Return whether samples and positions are one dimension of `x`, unlike in the hidden states."""
        return self.stream is not None and x.dim() < len(self.stream)

    def takes(self, place: int, x: Tensor) -> bool:
        """Return whether the layers expect the positions of `x` in dimension `place`."""
        return place == (0 if self.is_flat(x) else self.dim)

    def of_piece(self, x: Tensor) -> tuple[int, list[int]]:
        """Return the dimension along which `x` is this rank's part, and the extent of each rank's part."""
        if not self.is_flat(x):
            return self.dim, self.parts(x.shape[self.dim])
        return 0, self._of_flat()

    def of_whole(self, y: Tensor) -> tuple[int, list[int]]:
        """Return the dimension along which to shard the full `y`, and the extent of each rank's part."""
        if not self.is_flat(y):
            return self.dim, self.divide(y.shape[self.dim])
        return 0, self._of_flat()

    def _of_flat(self) -> list[int]:
        # A function of flat positions treats each position alone, so their order does not matter.
        assert self.stream is not None
        samples = self.stream[:-1].numel() // max(self.stream[self.dim], 1)
        return [samples * size for size in self.parts(self.stream[self.dim])]


_inputs_labelled: WeakValueDictionary[str, SharedInputs] = WeakValueDictionary()


class SharedInputs:
    """Remembers the last input of a group's column-parallel layers, so that all layers that read it share its gradient.

    Args:
        group: The tensor-parallel group.
        lengths: With sequence parallelism, how the inputs are sharded.

    Attributes:
        label: The name by which compiled code finds this object.
    """

    def __init__(self, group: Group, lengths: SequenceLengths | None = None) -> None:
        self.group = group
        self.lengths = lengths
        self._source: Callable[[], Tensor | None] | None = None
        self._key: tuple[int, torch.dtype, int] | None = None
        self.label = f"{group.label}/{'' if lengths is None else lengths.dim}"
        _inputs_labelled[self.label] = self
        self._entry: tuple[Tensor, Tensor | None, _InputGradient, Tensor | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInputs:
        return self  # layers of a copied model must go on sharing one object

    def enter(
        self, x: Tensor, reader: Reader | None = None
    ) -> tuple[Tensor, Tensor | None, _InputGradient | None, Tensor | None]:
        """Return the tensor to compute on, its node, the collector of its gradient, and the part to keep for backward.

        The node has the tensor's sizes and place in autograd's graph, but no memory. The collector is None if no
        gradient is needed. The part and the node are None if backward keeps the tensor itself.

        Args:
            x: The input.
            reader: The layer that reads it; None if it is unknown.
        """
        dtype = compute_dtype(x) if is_any_autocast_enabled() else x.dtype
        layout = None if self.lengths is None or self.lengths.suspended else self.lengths.of_piece(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            own = x.to(dtype)
            if layout is not None and not torch.is_grad_enabled() and running_results() is None:
                spans = _spans(own, own.shape, layout, self.group)
                if spans is not None:
                    gradient = _InputGradient(self, layout, spans)  # only for its spans: no backward follows
                    return own.new_empty(_whole_shape(own, layout)), None, gradient, own
            return kept(lambda: self.whole(own, layout)), None, None, None
        # The same tensor object is a new input after an in-place change (version). It also is one if activation
        # checkpointing recomputes during backward (graph task), with a separate graph and its own gradient.
        key = (version_of(x), dtype, current_graph_task_id())
        entry, first = self._entry, None
        if entry is not None and self._source is not None and self._source() is x and self._key == key:
            first = entry[2]
            if not first.is_alone:
                first.expected += 1  # each layer that reads the input adds a part in backward
                return entry
            assert first.reader is not None
            first.reader.is_alone = False  # from now on, the first layer shares a message with this one
        # A rank keeps its part of a sharded sequence, and backward gathers the sequence again.
        part = None if layout is None else x.detach().to(dtype)
        spans = None if part is None or layout is None else _spans(part, part.shape, layout, self.group)
        gradient = _InputGradient(self, layout, spans, reader)
        # Weakly: this cache must not keep an activation alive that the model has dropped.
        # The copy is held until `x` is gone, its gradient is known, or another input comes.
        self._source, self._key = weakref.ref(x, self._forget), key
        if first is None and reader is not None and reader.is_alone and layout is None and x.dtype is dtype:
            gradient.is_alone = True
            self._entry = _NOTHING, None, gradient, None  # without `x`, as the cache must not keep it alive
            return x, None, gradient, None
        apply = _ColumnInputFunction.apply if transforms_active() else _apply_input
        self._entry = *apply(x, dtype, gradient), gradient, part
        return self._entry

    def whole(self, x: Tensor, layout: tuple[int, list[int]] | None) -> Tensor:
        return x if layout is None else no_view(comm.all_gather(x, self.group, *layout))

    def _forget(self, source: object) -> None:
        if source is self._source:
            self._source = self._entry = None

    def release(self, gradient: _InputGradient) -> None:
        """Drop the reference to the input of `gradient`, once that gradient is complete."""
        if self._entry is not None and self._entry[2] is gradient:
            self._source = self._entry = None


# Cached, because layers that read one input share its gradient only through one object.
@cache
def shared_inputs(group: Group, sequence_dim: int | None) -> SharedInputs:
    """Return the `SharedInputs` of all column-parallel layers of `group` that shard the same sequence dimension."""
    return SharedInputs(group, None if sequence_dim is None else SequenceLengths(group, sequence_dim))


class Reader:
    """What a layer knows of the other layers that read its inputs.

    Attributes:
        is_alone: Whether no other layer has read an input of this layer; None until a backward pass tells.
    """

    __slots__ = ("is_alone",)

    def __init__(self) -> None:
        self.is_alone: bool | None = None


_NOTHING = torch.empty(0)


class _InputGradient:
    """Gradient of one shared input, summed over the layers that read it and then over the ranks.

    The layers add their part here, outside autograd, and `_ColumnInputFunction` collects the result. Autograd's graph
    determines when all have contributed. The count only starts the all-reduce before the last weight gradient.

    With `create_graph=True` the gradient has a graph, so the layers return it to autograd instead.

    Attributes:
        spans: While the input is memory without values: the spans in which the first product gathers it.
        reader: The first layer that reads the input, if it is known.
        is_alone: Whether this layer collects the result itself. A function of autograd takes as much time as a small
            kernel, so a layer whose inputs no other layer has read makes do with one.
        expected: The number of layers that read the input.
    """

    # As after `_clear`. Not set by `__init__`, as each column-parallel layer of a step makes such an object.
    seen, task = 0, -1
    total: Tensor | None = None
    pending: Pending | None = None
    gathering: Pending | None = None
    gathered: Tensor | None = None
    expected = 1
    is_alone = False

    def __init__(
        self,
        inputs: SharedInputs,
        layout: tuple[int, list[int]] | None,
        spans: comm.Spans | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.inputs = inputs
        self.layout = layout
        self.spans = spans
        self.reader = reader

    def _clear(self) -> None:
        self.seen, self.task = 0, -1
        self.total = self.pending = self.gathering = self.gathered = None

    def _begin(self) -> None:
        """Drop the rest of an earlier backward pass that did not need this gradient."""
        task = current_graph_task_id()
        if task != self.task:
            # A message in flight writes into memory that must not be freed.
            for pending in (self.pending, self.gathering):
                if pending is not None:
                    pending.wait()
            if self.task != -1:
                self._clear()
            self.task = task

    def gather(self, part: Tensor) -> None:
        """Start to gather the input again from the kept `part`; once for all layers that share it."""
        self._begin()
        if self.gathering is None and self.gathered is None and self.layout is not None:
            self.gathering = comm.all_gather(part, self.inputs.group, *self.layout, async_op=True)

    def whole(self) -> Tensor:
        """Return the input that `gather` gathers, in the backward of a layer after its `add`."""
        if self.gathering is not None:
            self.gathered = self.gathering.wait()
            self.gathering = None
        whole = self.gathered
        assert whole is not None
        # The last layer that needs the gathered input lets it go.
        if self.seen == self.expected:
            self.gathered = None
        return whole

    def add(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> None:
        """Add grad (n, out) @ weight (out, in); the last layer of a backward pass starts the reduction."""
        self._begin()
        self.seen += 1
        is_last = self.seen == self.expected
        if is_last and self.layout is not None:
            spans = _spans(grad, shape, self.layout, self.inputs.group)
            if spans is not None:
                self.pending = self._start_in_spans(grad, weight, shape, spans)
                return
        if self.total is None:
            self.total = torch.mm(grad, weight)
        else:
            self.total.addmm_(grad, weight)  # in place, instead of one more tensor of the input's size per layer
        if is_last:
            self.pending = self._start(self.total.view(shape))

    def _start(self, total: Tensor) -> Pending:
        group = self.inputs.group
        if self.layout is None:
            return comm.all_reduce_(total, group, async_op=True)
        # With sequence parallelism a rank needs the gradient of its part of the sequence only.
        return comm.reduce_scatter(total, group, *self.layout, async_op=True)

    def _start_in_spans(self, grad: Tensor, weight: Tensor, shape: torch.Size, spans: comm.Spans) -> Pending:
        dim, whole, total = spans.dim, grad.view(*shape[:-1], grad.shape[-1]), self.total
        self.total = None

        def compute(start: int, stop: int) -> Tensor:
            span = whole.narrow(dim, start, stop - start)
            rows = span.reshape(-1, span.shape[-1])
            if total is None:
                product = rows @ weight
            else:
                before = total.view(shape).narrow(dim, start, stop - start)
                product = torch.addmm(before.reshape(-1, shape[-1]), rows, weight)
            return product.view(*span.shape[:-1], shape[-1])

        return comm.reduce_scatter_in_turns(compute, self.inputs.group, spans)

    def collect(self, shape: torch.Size) -> Tensor | None:
        """Return the full gradient; None if no layer has contributed."""
        pending = self.pending
        if pending is None:
            if self.total is None:
                return None
            # Some layer that read the input got no gradient, so the count was never reached and nothing was started.
            pending = self._start(self.total.view(shape))
        self._clear()
        self.inputs.release(self)
        reader = self.reader
        if reader is not None and reader.is_alone is None and not comm.skips_communication():
            reader.is_alone = self.expected == 1
        return pending.wait()


class _ColumnInputFunction(Function):
    """Input of column-parallel layers, in their dtype; its gradient arrives through `_InputGradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, gradient: _InputGradient) -> tuple[Tensor, Tensor | None]:
        # The layers return None as the gradient of their input; autograd would otherwise make and add zeros.
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        ctx.dtype = x.dtype
        if gradient.layout is not None and (results := running_results()) is not None and results.is_again:
            # The product was kept, so nothing reads the gathered input. One expanded element has the shape.
            whole = x.new_empty((), dtype=dtype).expand(_whole_shape(x, gradient.layout))
            gradient.spans = None
        elif gradient.layout is not None and gradient.spans is not None:
            # The first product that reads it gathers it.
            whole = x.new_empty(_whole_shape(x, gradient.layout), dtype=dtype)
        else:
            whole = x if x.dtype is dtype else x.to(dtype)
            if gradient.layout is not None:
                whole = gradient.inputs.whole(whole, gradient.layout)
        ctx.shape = whole.shape
        node = None if gradient.layout is None else whole.new_empty(()).expand(whole.shape)
        return x.detach() if whole is x else whole, node  # shares the version of `x`, but does not keep it alive

    @staticmethod
    def backward(ctx: Any, with_graph: Tensor | None, of_node: Tensor | None) -> tuple[Any, ...]:
        grad = ctx.gradient.collect(ctx.shape)
        if of_node is not None:
            with_graph = of_node if with_graph is None else with_graph + of_node
        if with_graph is not None:
            group, layout = ctx.gradient.inputs.group, ctx.gradient.layout
            if layout is None:
                total = reduce_from_group(with_graph, group)
            else:
                total = reduce_scatter_to_group(with_graph, group, *layout)
            grad = total if grad is None else grad + total
        if grad is not None and grad.dtype is not ctx.dtype:
            grad = grad.to(ctx.dtype)
        return grad, None, None


class _ColumnLinearFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient: _InputGradient | None,
        transposed: bool,
        part: Tensor | None,
        node: Tensor | None,
    ) -> Tensor:
        matrix = weight if weight.dtype is x.dtype else weight.to(x.dtype)
        # A frozen weight needs no gradient, and its layer no input in backward.
        ctx.save_for_backward((x if part is None else part) if ctx.needs_input_grad[1] else None, matrix, node)
        ctx.keeps_part = part is not None and ctx.needs_input_grad[1]
        ctx.cast_from = None if matrix is weight else weight
        ctx.shape = x.shape
        ctx.gradient = gradient
        ctx.transposed = transposed
        ctx.parameters = weight, bias
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        results = running_results()
        if results is None and (gradient is None or gradient.spans is None):
            return _linear(x, matrix, bias, transposed)

        def compute() -> Tensor:
            if part is not None and gradient is not None:
                # `_ColumnInputFunction` has not gathered the input, because this product was kept.
                if results is not None and results.is_again:
                    return _linear(gradient.inputs.whole(part, gradient.layout), matrix, bias, transposed)
                if gradient.spans is not None:
                    spans, gradient.spans = gradient.spans, None
                    factor = matrix if transposed else matrix.t()
                    return _gathered_product(part, x, factor, bias, gradient.inputs.group, spans)
            return _linear(x, matrix, bias, transposed)

        return kept(compute)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, matrix, node = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        gradient, dx = ctx.gradient, None
        is_alone = gradient is not None and gradient.is_alone
        # Autograd enables gradients inside a backward only for `create_graph=True`.
        if torch.is_grad_enabled():
            if ctx.keeps_part:
                x = _AtNode.apply(node, comm.all_gather(x, gradient.inputs.group, *gradient.layout))
            elif is_alone and x is not None:
                x = copy_to_group(x, gradient.inputs.group)
            if gradient is not None:
                of_part = _input_gradient(ctx, rows, matrix)
                dx = reduce_from_group(of_part, gradient.inputs.group) if is_alone else of_part
            return dx, *_parameter_gradients(ctx, x, rows, rows, grad), None, None, None, None
        if ctx.keeps_part:
            gradient.gather(x)  # in flight during the product below
        # The input gradient goes first: its reduction runs while the weight gradient below is computed.
        factor = matrix.t() if ctx.transposed else matrix
        if is_alone:
            pending = comm.all_reduce_(torch.mm(rows, factor).view(ctx.shape), gradient.inputs.group, async_op=True)
            of_weight, of_bias = _parameter_gradients(ctx, x, rows, rows, grad)
            gradient.inputs.release(gradient)
            return pending.wait(), of_weight, of_bias, None, None, None, None
        if gradient is not None:
            gradient.add(rows, factor, ctx.shape)
        if ctx.keeps_part:
            x = gradient.whole()
        return None, *_parameter_gradients(ctx, x, rows, rows, grad), None, None, None, None


class _RowLinearFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        lengths: SequenceLengths | None,
        transposed: bool,
    ) -> Tensor:
        matrix = weight if weight.dtype is x.dtype else weight.to(x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, matrix)
        ctx.cast_from = None if matrix is weight else weight
        ctx.shape = x.shape
        ctx.group = group
        ctx.lengths = lengths
        ctx.transposed = transposed
        ctx.parameters = weight, bias
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

        if running_results() is None:
            y, ctx.layout = _row_product(x, matrix, bias, group, lengths, transposed)
        else:
            y, ctx.layout = kept(partial(_row_product, x, matrix, bias, group, lengths, transposed))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, matrix = ctx.saved_tensors
        # Without sequence parallelism the gradient of y is equal on all ranks already: no communication.
        local = rows = grad.reshape(-1, grad.shape[-1])
        # For gradients of gradients, each rank does a part of the work with the gradient of y.
        has_graph = torch.is_grad_enabled()
        dx = None
        if ctx.lengths is not None:
            is_plain = ctx.needs_input_grad[0] and not has_graph
            spans = _spans(grad, grad.shape, ctx.layout, ctx.group) if is_plain else None
            if spans is not None:
                whole = grad.new_empty(_whole_shape(grad, ctx.layout))
                dx = _gathered_product(grad, whole, matrix.t() if ctx.transposed else matrix, None, ctx.group, spans)
            else:
                gather = all_gather_to_group if has_graph else comm.all_gather
                whole = gather(grad, ctx.group, *ctx.layout)
            rows = whole.reshape(-1, grad.shape[-1])
        elif has_graph:
            rows = copy_to_group(local, ctx.group)
        # First, because the layer before waits for it, and nothing waits for the weight gradient.
        if dx is None and ctx.needs_input_grad[0]:
            dx = _input_gradient(ctx, rows, matrix)
        # The bias was added to this rank's positions only; see `Row.partial`.
        return dx, *_parameter_gradients(ctx, x, rows, local, grad), None, None, None


# ----------------------------------------------------------------------------- products under their own communication

MIN_SPAN_BYTES = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Bytes of a message, by device type, from which a product and its communication are cut into spans of positions.

A shorter message takes its time for the start, and a smaller product does not fill a GPU.
"""
_MOST_TURNS = 4


def _spans(x: Tensor, shape: Sequence[int], layout: tuple[int, list[int]], group: Group) -> comm.Spans | None:
    """Return the spans of positions in which a tensor travels while a product runs; None if it is not cut.

    The answer is the same on all ranks.

    Args:
        x: A tensor of the product, on the device and in the dtype of the message.
        shape: The shape of the message; its extent along the sequence does not count.
        layout: The dimension of the positions, and the number of positions of each rank.
        group: The group.
    """
    dim, sizes = layout
    least = min(sizes)
    if least == 0:
        return None
    num_bytes = prod(shape) // shape[dim] * least * x.element_size()
    min_bytes = MIN_SPAN_BYTES.get(x.device.type, num_bytes + 1)
    if num_bytes < min_bytes or group.process_group is None or comm.skips_communication():
        return None
    if type(x) is not Tensor or transforms_active() or is_traced_now():
        return None
    count = min(num_bytes // min_bytes, max(1, _MOST_TURNS // (group.size - 1)), least)
    of_ranks, start = [], 0
    for size in sizes:
        ends = [start + size * (number + 1) // count for number in range(count)]
        of_ranks.append(list(zip([start, *ends], ends)))
        start += size
    return comm.Spans(dim, of_ranks)


def _row_product(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    group: Group,
    lengths: SequenceLengths | None,
    transposed: bool,
) -> tuple[Tensor, tuple[int, list[int]] | None]:
    """Return the output of a row-parallel layer, and how it is sharded along the sequence."""
    layout = None
    if lengths is None:
        y = comm.all_reduce_(_linear(x, matrix, None, transposed), group)
    else:
        layout = lengths.of_whole(x)
        y = no_view(_reduce_scattered_product(x, matrix, transposed, group, layout))
    # After the sum: each rank holds the full bias, and an earlier addition would count it once per rank.
    if bias is not None:
        y.add_(bias if bias.dtype is y.dtype else bias.to(y.dtype))
    return y, layout


def _reduce_scattered_product(
    x: Tensor, matrix: Tensor, transposed: bool, group: Group, layout: tuple[int, list[int]]
) -> Tensor:
    """Return this rank's positions of the sum of x (..., in / ranks) @ weight over the ranks."""
    spans = _spans(x, (*x.shape[:-1], matrix.shape[1 if transposed else 0]), layout, group)
    if spans is None:
        return comm.reduce_scatter(_linear(x, matrix, None, transposed), group, *layout)
    dim = spans.dim
    return comm.reduce_scatter_in_turns(
        lambda start, stop: _linear(x.narrow(dim, start, stop - start), matrix, None, transposed), group, spans
    ).wait()


def _gathered_product(
    part: Tensor, whole: Tensor, factor: Tensor, bias: Tensor | None, group: Group, spans: comm.Spans
) -> Tensor:
    """Fill `whole` (..., k) with the parts of all ranks, and return whole @ factor (k, m) + bias."""
    dim = spans.dim
    y = part.new_empty((*whole.shape[:-1], factor.shape[1]))
    if bias is not None and bias.dtype is not part.dtype:
        bias = bias.to(part.dtype)
    # Products write to their place in y, also where each sample has some of the span.
    samples, inner = prod(y.shape[:dim]), prod(y.shape[dim + 1 : -1])
    places, factors = y.view(samples, y.shape[dim] * inner, y.shape[-1]), factor.expand(samples, *factor.shape)
    for start, stop, values in comm.all_gather_in_turns(part, whole, group, spans):
        place = places[:, start * inner : stop * inner]
        rows = values.reshape(*place.shape[:-1], values.shape[-1])
        if bias is None:
            torch.bmm(rows, factors, out=place)
        elif samples == 1:
            torch.addmm(bias, rows[0], factor, out=place[0])  # on a GPU, the product adds the bias by itself
        else:
            torch.baddbmm(bias, rows, factors, out=place)
    return y


def _whole_shape(part: Tensor, layout: tuple[int, list[int]]) -> list[int]:
    """Return the shape of the full tensor of which a rank holds a part."""
    dim, sizes = layout
    shape = list(part.shape)
    shape[dim] = sum(sizes)
    return shape


# Transforms of `torch.func` need what `Function.apply` does around it.
_apply_input, _apply_column, _apply_row = map(
    apply_of, (_ColumnInputFunction, _ColumnLinearFunction, _RowLinearFunction)
)


class _AtNode(Function):
    """Data that a backward has gathered again, at their place in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, node: Tensor, data: Tensor) -> Tensor:
        return no_view(data)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


def _input_gradient(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
    """Return the gradient of a layer's input, given the gradient of its output; a part of autograd's graph."""
    # A cast inside forward has left the graph.
    matrix = matrix if ctx.cast_from is None or not torch.is_grad_enabled() else ctx.cast_from.to(matrix.dtype)
    return torch.mm(rows, matrix.t() if ctx.transposed else matrix).view(ctx.shape)


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    # The result of a custom function must be no view, or the model could not change it in place.
    if not transposed:
        if bias is None:
            return F.linear(x, matrix)
        with views_unseen():
            return F.linear(x, matrix, bias)
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
    return unsafe_view(y, (*x.shape[:-1], matrix.shape[1]))


def _parameter_gradients(
    ctx: Any, x: Tensor | None, rows: Tensor, local: Tensor, grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias; a gradient that is not needed, or is put off, is None.

    Args:
        ctx: The context of a layer's function.
        x: Its input; None if the weight needs no gradient.
        rows: The gradient of its output, (n, out).
        local: The same for the positions to which this rank adds the bias.
        grad: The same as backward got it. A gradient that is put off keeps it unchanged until then.
    """
    # A product that is put off has no place in autograd's graph.
    is_now = weight_gradient_queue() is None or torch.is_grad_enabled()
    of_weight = of_bias = None
    if x is not None:
        inputs, transposed, dtype = x.reshape(-1, x.shape[-1]), ctx.transposed, ctx.weight_dtype
        if is_now:
            of_weight = torch.mm(inputs.t(), rows) if transposed else torch.mm(rows.t(), inputs)
            if of_weight.dtype is not dtype:
                of_weight = of_weight.to(dtype)
        else:
            of_weight = put_off(
                ctx.parameters[0],
                lambda: (inputs.t() @ rows if transposed else rows.t() @ inputs).to(dtype),
                *(x, rows, grad),
            )
    if ctx.needs_input_grad[2]:
        bias_dtype = ctx.bias_dtype
        if is_now:
            of_bias = local.sum(0)
            if of_bias.dtype is not bias_dtype:
                of_bias = of_bias.to(bias_dtype)
        else:
            of_bias = put_off(ctx.parameters[1], lambda: local.sum(0).to(bias_dtype), local, grad)
    return of_weight, of_bias
