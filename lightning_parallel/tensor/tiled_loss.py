"""A loss of logits that are computed in tiles of positions.

    forward     for each tile:  logits, their losses; of a sum also their gradients, which backward only scales
    backward    for each tile:  logits, their losses and gradients again, if each loss has its own factor

Legend: N positions, n positions of a tile, E features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.compat.lightning import tell
from lightning_parallel.compat.torch import gather_absent, gradients_here, keeps_graph, version_of
from lightning_parallel.tensor.tiles import Tiling, tiling_of, wide_zeros
from lightning_parallel.tracing.spans import bytes_text

__all__ = ["LogitsProduct", "differentiated_again", "loss_of_product"]

Tensors = Sequence["Tensor | None"]


@dataclass(frozen=True)
class LogitsProduct:
    """The product that makes logits, and the functions that follow it.

    Attributes:
        rows: The hidden states in autograd's graph, with the features in dimension `place`.
        place: The dimension of the classes.
        weight: (C, E).
        bias: (C,), or None.
        dtype: The dtype of the product.
        like: The sizes, strides and dtype of the logits after `steps`, on the meta device.
        width: The most classes of a rank, by which all ranks choose equal tiles.
        steps: The elementwise functions that were applied to the product.
        versions: The versions of the tensors at that time.
        needs_graph: Whether the logits are a part of autograd's graph.
    """

    rows: Tensor
    place: int
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    like: Tensor
    width: int
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    versions: tuple[int, ...] = ()
    needs_graph: bool = True

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.rows, self.weight, self.bias

    @property
    def flat(self) -> LogitsProduct:
        """The same product with the rows (N, E)."""
        rows = self.rows.movedim(self.place, -1)
        return replace(self, rows=rows.reshape(-1, rows.shape[-1]), place=1)

    @property
    def detached(self) -> LogitsProduct:
        """The product of logits outside autograd's graph; the weight stays, whose data may be absent between uses."""
        return replace(self, rows=self.rows.detach(), needs_graph=False)

    @property
    def graph(self) -> AbstractContextManager[Any]:
        """The context in which results belong to autograd's graph as the logits do."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.needs_graph)

    @property
    def recipe(self) -> LogitsProduct:
        """The same product without tensors, for a node of autograd's graph, which keeps these apart."""
        none: Any = None
        return replace(self, rows=none, weight=none, bias=none)

    @property
    def tiling(self) -> Tiling:
        """The tiles of a flat product."""
        positions, features = self.rows.shape
        return tiling_of(positions, features, self.width, self.rows.element_size())

    def marked(self) -> LogitsProduct:
        """Return the product with the present versions of its tensors."""
        return replace(self, versions=tuple(version_of(each) for each in self.tensors if each is not None))

    def check_unchanged(self) -> None:
        """Check that the product still gives the logits that the head would have computed.

        Raises:
            RuntimeError: If its tensors changed in place.
        """
        if self.marked().versions != self.versions:
            raise RuntimeError(
                "The input and the weight of the head must not change in place before its output is read, with"
                " tiled='auto'; got another version. Write `x = x + y` instead of `x += y`, read logits before"
                " the optimizer's step, or set tiled='off'"
            )

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product for some rows (..., E)."""
        cast = None if bias is None else bias.to(self.dtype)
        with _without_autocast(rows):  # `dtype` is what autocast made of the call
            return F.linear(rows.to(self.dtype), weight.to(self.dtype), cast)

    def finished(self, logits: Tensor) -> Tensor:
        """Apply the functions that follow the product."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def all_of(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute all logits, with features and classes in dimension `place`."""
        with _without_autocast(rows):
            return self.finished(self.of(rows.movedim(self.place, -1), weight, bias)).movedim(-1, self.place)


def _without_autocast(tensor: Tensor) -> Any:
    return torch.autocast(tensor.device.type, enabled=False)


def differentiated_again(
    function: Callable[..., Tensor], inputs: Tensors, wanted: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Run a function again and return the gradients of its inputs; with a graph in a backward that makes a graph."""
    with_graph = torch.is_grad_enabled()
    # Aliases: the hooks of a parameter run once, when autograd has its gradient.
    aliases = [
        value
        if value is None
        else value.view_as(value)
        if with_graph and needed
        else value.detach().requires_grad_(needed)
        for value, needed in zip(inputs, wanted)
    ]
    with torch.enable_grad():
        result = function(*aliases)
        of = [value for value, needed in zip(aliases, wanted) if needed and value is not None]
        grads = iter(gradients_here(result, of, grad, with_graph))
    return [next(grads) if needed and value is not None else None for value, needed in zip(aliases, wanted)]


_told: set[int] = set()


def _tell_of_tiles(flat: LogitsProduct, tiling: Tiling) -> None:
    if flat.width not in _told:
        _told.add(flat.width)
        tell(
            f"tiled='auto' computes the loss of {len(flat.rows):,} positions and {flat.width:,} classes in"
            f" {tiling.count} tiles of {tiling.rows:,} positions ({bytes_text(tiling.bytes)} of logits each)."
        )


def loss_of_product(
    product: LogitsProduct,
    target: Tensor,
    function: Callable[..., Tensor],
    reduction: str,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Compute a loss in tiles of positions.

    Args:
        product: The product that makes the logits.
        target: Class indices, (N...).
        function: The loss of each row of logits (n, C) and targets (n,), which takes `reduction`.
        reduction: As in PyTorch, also `weight` and `ignore_index`.

    Returns:
        The loss: () for `mean` and `sum`, (N...) for `none`.
    """
    flat, labels, dtype = product.flat, target.reshape(-1), product.like.dtype
    tiling = flat.tiling
    _tell_of_tiles(flat, tiling)
    gather_absent(flat.tensors)
    # The gradients of half precision need the scale of the loss, which only backward knows.
    at_once = reduction != "none" and flat.dtype != torch.float16
    with product.graph:
        work = _TileWork(flat.recipe, tiling.rows, function, at_once, torch.is_grad_enabled())
        losses = _LossesInTiles.apply(*flat.tensors, labels, work)
    if torch.is_autocast_enabled(target.device.type) and dtype != torch.float64:
        dtype = torch.float32  # as torch gives it
    if reduction == "none":
        return losses.view(target.shape).to(dtype)
    total = losses.sum()
    if reduction == "mean":
        counts = labels != ignore_index
        # An ignored target is no index into `weight`.
        counted = (counts if weight is None else weight[labels.masked_fill(~counts, 0)] * counts).sum()
        # The mean of no targets is nan, and its gradient is zero.
        total = (total / counted.masked_fill(counted == 0, 1)).masked_fill(counted == 0, torch.nan)
    return total.to(dtype)


@dataclass(frozen=True)
class _TileWork:
    """The computation of a loss in tiles.

    Attributes:
        recipe: The product.
        rows: Positions of a tile.
        function: Takes logits (n, C), targets (n,), and `reduction`.
        at_once: Whether forward returns the sum, and computes its gradients.
        wants_graph: Whether anybody needs gradients.
    """

    recipe: LogitsProduct
    rows: int
    function: Callable[..., Tensor]
    at_once: bool
    wants_graph: bool

    def losses(self, product: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row (n,) of the product (n, C)."""
        with _without_autocast(product):
            logits = self.recipe.finished(product)
            # A sum of many losses needs more digits than half precision has.
            wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
            return self.function(wide, target, reduction="none")

    def whole(self, target: Tensor) -> Callable[..., Tensor]:
        """Return the function from rows, weight and bias to the losses, computed without tiles."""

        def losses(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            found = self.losses(self.recipe.of(rows, weight, bias), target)
            return found.sum() if self.at_once else found

        return losses

    def run(
        self, tensors: Tensors, target: Tensor, wanted: Sequence[bool], grad: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the losses (N,), and the gradients of rows, weight and bias that are wanted.

        Args:
            tensors: Rows (N, E), weight (C, E), and bias (C,) or None.
            target: (N,).
            wanted: Whether each needs a gradient.
            grad: The gradients of the losses (N,); one by default.
        """
        rows, weight, bias = tensors
        assert rows is not None
        assert weight is not None
        sums = _Sums(
            torch.empty_like(rows) if wanted[0] else None,
            wide_zeros(weight) if wanted[1] else None,
            wide_zeros(bias) if wanted[2] and bias is not None else None,
        )
        # Cast once for all tiles.
        near, near_bias = (None if each is None else each.to(self.recipe.dtype) for each in (weight, bias))
        assert near is not None
        parts = [rows.new_zeros(0, dtype=torch.promote_types(self.recipe.like.dtype, torch.float32))]
        for first in range(0, len(rows), self.rows):
            part = slice(first, first + self.rows)
            product = self.recipe.of(rows[part], near, near_bias).requires_grad_(any(wanted))
            with torch.set_grad_enabled(any(wanted)):
                losses = self.losses(product, target[part])
            if any(wanted):
                (own,) = gradients_here(losses, [product], torch.ones_like(losses) if grad is None else grad[part])
                sums.add(part, own, rows[part], near)
                del own  # before the next tile
            del product
            parts.append(losses.detach())
        return torch.cat(parts), [sums.of_rows, sums.of_weight, sums.of_bias]


@dataclass(frozen=True)
class _Sums:
    """The gradients of rows, weight and bias; the tiles add to the last two."""

    of_rows: Tensor | None
    of_weight: Tensor | None
    of_bias: Tensor | None

    def add(self, part: slice, grad: Tensor, rows: Tensor, weight: Tensor) -> None:
        """Add the gradients of some rows, given the gradient (n, C) of their product."""
        if self.of_rows is not None:
            self.of_rows[part] = grad @ weight
        if self.of_weight is not None:
            if self.of_weight.dtype == grad.dtype:
                self.of_weight.addmm_(grad.t(), rows.to(grad.dtype))
            else:
                self.of_weight.add_(grad.t() @ rows.to(grad.dtype))
        if self.of_bias is not None:
            self.of_bias.add_(grad.sum(0, dtype=self.of_bias.dtype))


class _LossesInTiles(Function):
    """Rows, weight, bias, targets -> the loss of each target, or their sum with the gradients computed at once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, work: _TileWork) -> Tensor:
        wanted = [work.at_once and work.wants_graph and needed for needed in ctx.needs_input_grad[:3]]
        losses, gradients = work.run((rows, weight, bias), target, wanted)
        ctx.save_for_backward(rows, weight, bias, target, *gradients)
        ctx.work = work
        return losses.sum() if work.at_once else losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weight, bias, target, *gradients = ctx.saved_tensors
        work, tensors, wanted = ctx.work, (rows, weight, bias), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # with `create_graph=True`, whose graph needs the logits
            return *differentiated_again(work.whole(target), tensors, wanted, grad), None, None
        with _without_autocast(rows):
            if not work.at_once:
                _, gradients = work.run(tensors, target, wanted, grad)
            elif keeps_graph():
                gradients = [None if value is None else value * grad for value in gradients]
            else:
                gradients = [None if value is None else value.mul_(grad) for value in gradients]
        found = (None if value is None else value.to(like.dtype) for value, like in zip(gradients, tensors))
        return *found, None, None
