"""The arithmetic of column- and row-parallel linear layers, with the communication hidden where it can be.

Backward of column-parallel layers that read one input x (..., in), such as queries, keys and values:

    g_q -> dx  = g_q W_q      then dW_q
    g_k -> dx += g_k W_k      then dW_k
    g_v -> dx += g_v W_v ---> all-reduce(dx) in flight, then dW_v
                              wait

so that however many layers share x there is one all-reduce, and a weight gradient is computed while it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_parallel import comm
from lightning_parallel.comm import Group, Pending
from lightning_parallel.tensor.collectives import no_view
from lightning_parallel.tensor.sharding import balanced

__all__ = ["Inputs", "SequenceLengths", "column_linear", "compute_dtype", "row_linear"]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer computes on `x`: that of autocast where it applies."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Inputs, transposed: bool = False) -> Tensor:
    """This rank's output features of a linear layer.

        x (..., in)  @  weight_r^T (in, out / ranks)  ->  y_r (..., out / ranks)

    Args:
        x: The same on every rank; with sequence parallelism this rank's part of the sequence.
        weight: This rank's rows, (out / ranks, in); (in, out / ranks) when `transposed`.
        inputs: Shared by all layers of the group.
    """
    shared, gradient = inputs.enter(x)
    return _Column.apply(shared, weight, bias, gradient, transposed)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    lengths: SequenceLengths | None = None,
    transposed: bool = False,
) -> Tensor:
    """The output of a linear layer of which this rank holds some input features.

        sum over ranks of  x_r (..., in / ranks)  @  weight_r^T (in / ranks, out)  + bias  ->  y (..., out)

    Args:
        weight: This rank's columns, (out, in / ranks); (in / ranks, out) when `transposed`.
        bias: The whole bias, added once.
        lengths: With sequence parallelism, y is this rank's part of the sequence.
    """
    return _Row.apply(x, weight, bias, group, lengths, transposed)


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses to be differentiated itself, instead of leaving out a term."""
    plain = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients (`create_graph=True`) through layers that are divided over ranks are not"
                " supported; keep those layers whole with plan={...: 'replicate'}"
            )
        return plain(ctx, *gradients)

    return checked


class SequenceLengths:
    """How sequences are divided along `dim`: as evenly as possible, the first ranks take one more.

    The full length cannot be told from a part of it, so whoever divides a sequence notes it here and whoever puts it
    together again looks it up. Of several full lengths with equal parts on this rank, the one divided last counts.
    """

    def __init__(self, group: Group, dim: int) -> None:
        self.group, self.dim = group, dim
        self._full: dict[int, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceLengths:
        return self

    def divide(self, length: int) -> list[int]:
        """The part of each rank of a sequence of `length`."""
        sizes = balanced(length, self.group.size)
        self._full[sizes[self.group.rank]] = length
        return sizes

    def parts(self, local: int) -> list[int]:
        """The part of each rank of the sequence of which this rank holds `local`.

        Raises:
            RuntimeError: If no sequence with such a part has been divided.
        """
        if local not in self._full:
            raise RuntimeError(
                f"a sequence-parallel layer got a sequence of {local} in dimension {self.dim}, but no layer before it"
                f" divided a sequence into such parts (divided so far: {sorted(self._full.values()) or 'none'})"
            )
        return balanced(self._full[local], self.group.size)


class Inputs:
    """The input of the last column-parallel layers of a group, so that those that share an input share its gradient.

    Args:
        group: The tensor-parallel group.
        lengths: With sequence parallelism, how the inputs are divided.
    """

    def __init__(self, group: Group, lengths: SequenceLengths | None = None) -> None:
        self.group, self.lengths = group, lengths
        self._source: Callable[[], Tensor | None] | None = None
        self._key: tuple[int, torch.dtype, int] | None = None
        self._entry: tuple[Tensor, _InputGradient] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Inputs:
        return self

    def enter(self, x: Tensor) -> tuple[Tensor, _InputGradient | None]:
        """The tensor to compute on, and where its gradient is collected; None when no gradient is needed."""
        dtype = compute_dtype(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._whole(x.to(dtype)), None
        # A recomputation during backward builds a graph of its own, even from the same input.
        key = (x._version, dtype, torch._C._current_graph_task_id())
        if self._entry is None or self._source is None or self._source() is not x or self._key != key:
            gradient = _InputGradient(self, self._sizes(x))
            # The copy is held until `x` is gone, its gradient is known, or another input comes.
            self._source, self._key = weakref.ref(x, self._forget), key
            self._entry = _Enter.apply(x, dtype, gradient), gradient
        self._entry[1].expected += 1
        return self._entry

    def _sizes(self, x: Tensor) -> list[int] | None:
        return None if self.lengths is None else self.lengths.parts(x.shape[self.lengths.dim])

    def _whole(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            return x
        return no_view(comm.all_gather(x, self.group, self.lengths.dim, self._sizes(x)))

    def _forget(self, source: object) -> None:
        if source is self._source:
            self._source = self._entry = None

    def done(self, gradient: _InputGradient) -> None:
        if self._entry is not None and self._entry[1] is gradient:
            self._source = self._entry = None


class _InputGradient:
    """The gradient of one shared input, summed over the layers that read it and then over the ranks.

    The layers hand their part over here, outside of autograd, and `_Enter` collects the result. Autograd's graph says
    when all have contributed; the count only lets the all-reduce start earlier, before the last weight gradient.
    """

    def __init__(self, inputs: Inputs, sizes: list[int] | None) -> None:
        self.inputs, self.sizes = inputs, sizes
        self.expected = 0
        self._clear()

    def _clear(self) -> None:
        self.seen = 0
        self.task = -1
        self.total: Tensor | None = None
        self.pending: Pending | None = None

    def add(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> None:
        """Add grad (n, out) @ weight (out, in); the last layer of a backward pass starts the reduction."""
        task = torch._C._current_graph_task_id()
        if task != self.task:  # an earlier pass that did not need this gradient left its part behind
            if self.pending is not None:
                self.pending.wait()
            self._clear()
            self.task = task
        if self.total is None:
            self.total = grad @ weight
        else:
            self.total.addmm_(grad, weight)
        self.seen += 1
        if self.seen == self.expected:
            self.pending = self._start(self.total.view(shape))

    def _start(self, total: Tensor) -> Pending:
        group, lengths = self.inputs.group, self.inputs.lengths
        if lengths is None:
            return comm.all_reduce_(total, group, async_op=True)
        return comm.reduce_scatter(total, group, lengths.dim, self.sizes, async_op=True)

    def collect(self, shape: torch.Size) -> Tensor | None:
        """The whole gradient; None when no layer has contributed."""
        if self.total is None:
            return None
        pending = self.pending if self.pending is not None else self._start(self.total.view(shape))
        self._clear()
        self.inputs.done(self)
        return pending.wait()


class _Enter(Function):
    """The input of column-parallel layers, in their dtype; its gradient arrives through `_InputGradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, gradient: _InputGradient) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.dtype = gradient, x.dtype
        whole = gradient.inputs._whole(x.to(dtype))
        ctx.shape = whole.shape
        return x.detach() if whole is x else whole  # shares the version of `x`, but does not keep it alive

    @staticmethod
    @_once
    def backward(ctx: Any, *_: None) -> tuple[Any, ...]:
        grad = ctx.gradient.collect(ctx.shape)
        return None if grad is None else grad.to(ctx.dtype), None, None


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: _InputGradient | None, transposed: bool
    ) -> Tensor:
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, matrix)
        ctx.shape = x.shape
        ctx.gradient, ctx.transposed, ctx.weight_dtype = gradient, transposed, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _linear(x, matrix, bias, transposed)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, matrix = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.gradient is not None:
            ctx.gradient.add(rows, matrix.t() if ctx.transposed else matrix, ctx.shape)
        return None, *_parameter_gradients(ctx, x, rows), None, None


class _Row(Function):
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
        ctx.input_dtype = x.dtype
        x = x.to(compute_dtype(x))
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, matrix)
        ctx.shape = x.shape
        ctx.group, ctx.lengths, ctx.transposed, ctx.weight_dtype = group, lengths, transposed, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = _linear(x, matrix, None, transposed)
        if lengths is None:
            y = comm.all_reduce_(y, group)
        else:
            ctx.sizes = lengths.divide(y.shape[lengths.dim])
            y = no_view(comm.reduce_scatter(y, group, lengths.dim, ctx.sizes))
        return y if bias is None else y.add_(bias.to(y.dtype))

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, matrix = ctx.saved_tensors
        local = grad.reshape(-1, grad.shape[-1])
        rows = local
        if ctx.lengths is not None:
            rows = comm.all_gather(grad, ctx.group, ctx.lengths.dim, ctx.sizes).reshape(-1, grad.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (rows @ (matrix.t() if ctx.transposed else matrix)).view(ctx.shape).to(ctx.input_dtype)
        dw, _ = _parameter_gradients(ctx, x, rows, bias=False)
        db = local.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    factor = matrix if transposed else matrix.t()
    y = rows @ factor if bias is None else torch.addmm(bias.to(x.dtype), rows, factor)
    return no_view(y, (*x.shape[:-1], factor.shape[1]))


def _parameter_gradients(
    ctx: Any, x: Tensor | None, rows: Tensor, bias: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    dw = None
    if x is not None:
        inputs = x.reshape(-1, x.shape[-1])
        dw = (inputs.t() @ rows if ctx.transposed else rows.t() @ inputs).to(ctx.weight_dtype)
    db = rows.sum(0).to(ctx.bias_dtype) if bias and ctx.needs_input_grad[2] else None
    return dw, db
