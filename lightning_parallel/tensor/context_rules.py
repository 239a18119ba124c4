"""The rules of functions that join positions, for tensors that are split along positions; see `context`.

| function         | own positions       | from the other ranks                                         |
|------------------|---------------------|--------------------------------------------------------------|
| attention        | queries             | keys and values, as the method says; see `context_attention` |
| `flex_attention` | rows of the result  | queries, keys and values                                     |
| products         | rows                | the other factor, or sums of products over positions         |
| losses           | terms of the sum    | one sum                                                      |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from lightning_parallel.compat import Patches
from lightning_parallel.compat.torch import pytree
from lightning_parallel.tensor.context import Positions
from lightning_parallel.tensor.piece_rules import computed_on_parts
from lightning_parallel.tensor.pieces import Piece, piece_with
from lightning_parallel.tensor.sharding import Shard

__all__ = ["POSITION_RULES", "attend_flexibly"]

Arguments = tuple[Any, ...]


def _part_and_place(value: Any) -> tuple[Tensor, int, Positions] | None:
    """Return the part, the place from the end, and the facts of a piece along positions; None for other values."""
    if not isinstance(value, Piece) or not isinstance(value.family, Positions):
        return None
    part = value.valid_part
    return None if part is None else (part, value.place - value.dim(), value.family)


def _full(value: Any) -> Any:
    return value.whole() if isinstance(value, Piece) else value


# ----------------------------------------------------------------------------------------------------------- attention


def _attended(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args)) | kwargs
    query = _part_and_place(given["query"])
    if query is None or query[1] != -2 or not query[2].is_plain:
        return _on_full(func, args, kwargs)
    q, _, rows = query
    keys = [_part_and_place(given[each]) for each in ("key", "value")]
    is_split = all(each is not None and each[1] == -2 and each[2].is_plain for each in keys)
    is_split = is_split and keys[0][2].is_like(keys[1][2])  # type: ignore[index]
    mask, is_causal = _full(given.get("attn_mask")), bool(given.get("is_causal", False))
    if is_split:
        k, v, columns = keys[0][0], keys[1][0], keys[0][2].positions  # type: ignore[index]
    else:
        # Keys and values that every rank has, such as those of a short encoder.
        k, v = _full(given["key"]), _full(given["value"])
        columns = Shard(0, (((0, k.shape[-2]),),) * rows.group.size)
    found = rows.split.attend(
        q,
        k,
        v,
        rows.positions,
        columns,
        mask,
        is_causal,
        given.get("dropout_p", 0.0),
        given.get("scale"),
        bool(given.get("enable_gqa", False)),
    )
    return piece_with(found, found.dim() - 2, rows)


def _on_full(func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Compute on full tensors."""
    return func(*map(_full, args), **{name: _full(value) for name, value in kwargs.items()})


def attend_flexibly(patches: Patches) -> None:
    """Let `flex_attention` take sequences that are split along positions, until `patches` are undone.

    Its functions of scores and its block mask refer to positions of the full sequence. So each rank gathers queries,
    keys and values, computes all rows, and keeps its own.
    """
    # It is no operator, and does not ask the class of its tensors. Compiled code leaves its graph at a piece. It enters
    # another graph for the computation, which stays compiled.
    enter, leave = torch.compiler.disable(_full_heads), torch.compiler.disable(_own_rows)

    def with_pieces(compute: Callable[..., Any]) -> Callable[..., Any]:
        def attend_to_pieces(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not (isinstance(query, Piece) or isinstance(key, Piece) or isinstance(value, Piece)):
                return compute(query, key, value, *args, **kwargs)
            tensors = enter(query, key, value)
            return leave(compute(*tensors, *args, **kwargs), query)

        return attend_to_pieces

    patches.replace_function(flex_attention, with_pieces)


def _full_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mine = _part_and_place(query)
    if mine is not None and mine[1] == -2:
        mine[2].split.note(query.shape[-3], key.shape[-3])
    # Copies, because compiled code cannot take views of pieces.
    query, key, value = (x.whole().clone() if isinstance(x, Piece) else x for x in (query, key, value))
    return query, key, value


def _own_rows(results: Any, query: Tensor) -> Any:
    """Cut the output (B, H, L, E_v), and statistics of the scores (B, H, L)."""
    mine = _part_and_place(query)
    if mine is None or mine[1] != -2:
        return results
    family = mine[2]

    def own(full: Tensor) -> Piece:
        place = -2 if full.dim() == query.dim() else -1
        return _as_piece(family.cut(full, place), place, family)

    return pytree.tree_map_only(Tensor, own, results)


# ------------------------------------------------------------------------------------------------------------ products


def _product_of(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return _on_full(func, args, kwargs)
    if name == "__rmatmul__":
        args = (args[1], args[0])
    left, right = args
    # A vector is a row on the left, and a column on the right.
    if left.dim() == 1:
        return torch.matmul(left.unsqueeze(0), right).squeeze(-2 if right.dim() > 1 else 0)
    if right.dim() == 1:
        return torch.matmul(left, right.unsqueeze(-1)).squeeze(-1)
    mine, theirs = _part_and_place(left), _part_and_place(right)
    if mine is not None and theirs is not None and mine[1] == -1 and theirs[1] == -2 and mine[2].is_like(theirs[2]):
        # Sums over positions: each rank sums over its own.
        return mine[2].summed(torch.matmul(mine[0], theirs[0]))
    if mine is not None and mine[1] == -2:
        if theirs is not None and theirs[1] == -1:
            mine[2].split.note()  # queries and keys
        other = _full(right)
        return _as_piece(torch.matmul(mine[0], other), -2, mine[2])
    if theirs is not None and theirs[1] == -1:
        return _as_piece(torch.matmul(_full(left), theirs[0]), -1, theirs[2])
    for at, found in enumerate((mine, theirs)):
        if found is not None and found[1] < -2:
            other = _along(args[1 - at], found[1], found[2])
            factors = (found[0], other) if at == 0 else (other, found[0])
            return _as_piece(torch.matmul(*factors), found[1], found[2])
    return _on_full(torch.matmul, (left, right), {})


def _along(operand: Any, place: int, family: Positions) -> Tensor:
    """Return the part of an operand with the same positions at a place from the end; all of it if it broadcasts."""
    own = _part_and_place(operand)
    if own is not None and own[1] == place and own[2].is_like(family):
        return own[0]
    full = _full(operand)
    return full if full.dim() < -place or full.shape[place] < family.extent else family.cut(full, place)


def _as_piece(part: Tensor, place: int, family: Positions) -> Piece:
    return piece_with(part, part.dim() + place, family)


def _added_product(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Compute `addmm` and `baddbmm`: the product, and a term that is added to it."""
    names = ("input", "mat1", "mat2") if name == "addmm" else ("input", "batch1", "batch2")
    given = dict(zip(names, args)) | kwargs
    if len(args) > len(names) or not given.keys() <= {*names, "alpha", "beta"}:
        return _on_full(func, args, kwargs)
    term, left, right = (given[each] for each in names)
    alpha, beta = given.get("alpha", 1), given.get("beta", 1)
    product = torch.matmul(left, right)
    product = product if alpha == 1 else product * alpha
    # With a factor of zero, torch ignores the term, which may be uninitialized.
    return product if beta == 0 else product + (term if beta == 1 else term * beta)


def _einsum(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    equation = args[0]
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return _on_full(func, (equation, *map(_full, operands)), kwargs)
    inputs, result = equation.replace(" ", "").split("->")
    letters = inputs.split(",")
    found = [_part_and_place(operand) for operand in operands]
    # The first operand whose positions are in the result keeps its part.
    for mine, own_letters in zip(found, letters):
        if mine is None or (letter := own_letters[mine[1]]) not in result:
            continue
        family = mine[2]
        places = [theirs.index(letter) - len(theirs) if letter in theirs else None for theirs in letters]
        sizes = {operand.shape[place] for operand, place in zip(operands, places) if place is not None}
        # A letter twice in one operand takes a diagonal, for which a rank lacks the rows or the columns.
        if sizes - {1, family.extent} or any(theirs.count(letter) > 1 for theirs in letters):
            continue
        if sum(each is not None for each in found) > 1:
            family.split.note()
        parts = [
            _full(operand) if place is None else _along(operand, place, family)
            for operand, place in zip(operands, places)
        ]
        return _as_piece(torch.einsum(equation, *parts), result.index(letter) - len(result), family)
    return _on_full(func, (equation, *map(_full, operands)), kwargs)


# -------------------------------------------------------------------------------------------------------------- losses


def _class_loss(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Compute `cross_entropy` or `nll_loss` of the own positions, and sum over the ranks."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args)) | kwargs
    logits, target, weight = given.pop("input"), given.pop("target"), given.pop("weight", None)
    reduction = given.pop("reduction", "mean")
    outdated = given.pop("size_average", None), given.pop("reduce", None)
    mine = _part_and_place(logits)
    classes = 1 if logits.dim() > 1 else 0
    if mine is None or logits.place == classes or outdated != (None, None) or isinstance(weight, Piece):
        return _on_full(func, args, kwargs)
    part, _, family = mine
    is_soft = target.is_floating_point()
    place = logits.place - (logits.place > classes and not is_soft)
    own_target = _along(target, place - target.dim(), family)
    # Logits in tiles give the gradients of a sum at once.
    own = func(part, own_target, weight=weight, reduction="none" if reduction == "none" else "sum", **given)
    place = logits.place - (logits.place > classes)
    if reduction == "none":
        return piece_with(own, place, family)
    total = family.summed(own.sum())
    if reduction == "sum":
        return total
    if is_soft:
        return total / (logits.numel() / logits.shape[classes])
    return total / _counted(target, own_target, weight, given.get("ignore_index", -100), family, own)


def _counted(target: Any, own: Tensor, weight: Tensor | None, ignored: int, family: Positions, like: Tensor) -> Tensor:
    """Return the sum of the weights of all targets that count."""
    given = own if isinstance(target, Piece) else target
    counts = given != ignored
    if weight is None:
        found = counts.sum().to(like.dtype)
    else:
        found = (weight.detach()[given.where(counts, 0)] * counts).sum().to(like.dtype)
    return family.summed(found) if isinstance(target, Piece) else found


def _elementwise_loss(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Compute a loss with a term for each element."""
    reduction = kwargs.get("reduction", "mean")
    if len(args) != 2 or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return _on_full(func, args, kwargs)
    weights = {each: value for each, value in kwargs.items() if isinstance(value, Tensor)}
    options = {each: value for each, value in kwargs.items() if each not in weights} | {"reduction": "none"}
    terms = computed_on_parts(partial(func, **options), "mul", args, weights)
    if terms is None:
        return _on_full(func, args, kwargs)
    if reduction == "mean" and "weight" in weights and name in ("mse_loss", "l1_loss"):
        return terms.sum() / weights["weight"].sum()  # these losses divide by the weights
    return terms if reduction == "none" else terms.mean() if reduction == "mean" else terms.sum()


# ---------------------------------------------------------------------------------------------------------- sequences


def _concatenated(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Concatenate along a dimension that is not split."""
    tensors = list(args[0]) if args else list(kwargs["tensors"])
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    # An empty cache of keys takes part as a tensor without elements.
    full = [each for each in tensors if not (each.dim() == 1 and each.numel() == 0)]
    if len(full) == 1:
        return full[0]
    found = next(filter(None, map(_part_and_place, full)), None)
    if found is None:
        return func([*map(_full, tensors)], dim)
    _, place, family = found
    count = full[0].dim()
    place_of_dim = dim % (count + (name == "stack")) - (count + (name == "stack"))
    if name != "stack" and place_of_dim == place:
        return func([*map(_full, tensors)], dim)
    parts = [_along(each, place, family) for each in full]
    joined = func(parts, dim)
    # A new dimension after positions moves them.
    at = place - 1 if name == "stack" and place_of_dim > place - 1 else place
    return _as_piece(joined, at, family)


def _expanded(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    piece, own = args[0], _part_and_place(args[0])
    sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list, torch.Size)) else args[1:]
    if name == "expand_as":
        sizes = args[1].shape
        if not isinstance(piece, Piece):
            return piece.expand(sizes)  # the other tensor gives its sizes only
    if own is None or kwargs or len(sizes) < piece.dim() or sizes[own[1]] not in (-1, piece.shape[own[1]]):
        return _on_full(func, args, kwargs)
    part, place, family = own
    sizes = [*sizes]
    sizes[place] = part.shape[place]
    return _as_piece(part.expand(*sizes), place, family)


def _like(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Compute functions that take the shape or the type of another tensor."""
    if kwargs or len(args) != 2:
        return _on_full(func, args, kwargs)
    return args[0].to(args[1].dtype) if name == "type_as" else getattr(args[0], name.removesuffix("_as"))(args[1].shape)


def _repeated(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    piece, own = args[0], _part_and_place(args[0])
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    is_known = own is not None and isinstance(dim, int) and dim % piece.dim() - piece.dim() != own[1]
    if not is_known or any(isinstance(each, Piece) for each in (*args[1:], *kwargs.values())):
        return _on_full(func, args, kwargs)
    assert own is not None
    return _as_piece(func(own[0], *args[1:], **kwargs), own[1], own[2])


def _picked(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Pick elements by index along a dimension that is not split, such as the log-probabilities of labels."""
    names = ("input", "dim", "index") if name == "gather" else ("input", "indices", "dim")
    given = dict(zip(names, args)) | kwargs
    own = _part_and_place(given.get("input"))
    if own is None or given.keys() != {*names} or given["dim"] is None:
        return _on_full(func, args, kwargs)
    part, place, family = own
    dim, index = given["dim"] % part.dim() - part.dim(), given["index" if name == "gather" else "indices"]
    if dim == place or index.dim() != part.dim() or index.shape[place] != family.extent:
        return _on_full(func, args, kwargs)
    own_index = _along(index, place, family)
    found = part.gather(dim, own_index) if name == "gather" else part.take_along_dim(own_index, dim)
    return _as_piece(found, place, family)


_OF_HEADS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask"),
    *("need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    *("static_k", "static_v", "average_attn_weights", "is_causal"),
)


def _multi_head(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Compute `F.multi_head_attention_forward` out of functions that have rules."""
    given = dict(zip(_OF_HEADS, args)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    unusual = any(given.get(each) is not None for each in ("bias_k", "bias_v", "static_k", "static_v"))
    if unusual or given["add_zero_attn"] or query.dim() != 3:
        return _on_full(func, args, kwargs)
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{each}_proj_weight"] for each in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    heads = given["num_heads"]
    # (L, B, H E) -> (B, H, L, E)
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        for x, weight, bias in zip((query, key, value), weights, biases)
    )
    mask = _additive_mask(_full(given.get("attn_mask")), _full(given.get("key_padding_mask")), q, heads)
    dropout = given["dropout_p"] if given.get("training", True) else 0.0
    is_causal = bool(given.get("is_causal")) and given.get("key_padding_mask") is None
    found_weights = None
    if given.get("need_weights", True):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        found_weights = (scores if mask is None else scores + mask).softmax(-1)
        found_weights = F.dropout(found_weights, dropout, training=dropout > 0)
        mixed = found_weights @ v
        found_weights = found_weights.mean(1) if given.get("average_attn_weights", True) else found_weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, None if is_causal else mask, dropout, is_causal)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    return F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"]), found_weights


def _additive_mask(mask: Tensor | None, padding: Tensor | None, q: Tensor, heads: int) -> Tensor | None:
    """Combine masks of `nn.MultiheadAttention`, in which True excludes, into a term of scores (B, H, L, S)."""
    found = None
    for each in (mask, padding):
        if each is None:
            continue
        if each.dtype == torch.bool:
            each = torch.zeros_like(each, dtype=q.dtype).masked_fill_(each, float("-inf"))
        if each is not mask:
            each = each[:, None, None, :]
        elif each.dim() == 3:
            each = each.unflatten(0, (-1, heads))
        found = each if found is None else found + each
    return found


POSITION_RULES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attended,
    "multi_head_attention_forward": _multi_head,
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv"), _product_of),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    "einsum": _einsum,
    **dict.fromkeys(("cross_entropy", "nll_loss"), _class_loss),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), _elementwise_loss),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), _elementwise_loss),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _concatenated),
    **dict.fromkeys(("expand", "expand_as"), _expanded),
    **dict.fromkeys(("type_as", "view_as", "reshape_as"), _like),
    "repeat_interleave": _repeated,
    **dict.fromkeys(("gather", "take_along_dim"), _picked),
}
Positions.rules = POSITION_RULES
