"""LARS and LAMB: the norm of a parameter, divided by the norm of its step, scales this step (the trust ratio)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat.torch import each, is_flattened

__all__ = [
    "LAMB",
    "LARS",
    "TrustRatioOptimizer",
    "WholeNorms",
    "local_part",
]


def local_part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a `DTensor`, sharded like `like`; return a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert isinstance(like, DTensor)
    # The gradient of a `DTensor` may still be a partial sum on each rank.
    if tensor.placements != like.placements:
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return tensor.to_local()


class WholeNorms:
    """Takes 2-norms of full parameters, and of tensors that are sharded like them.

    Knows plain parameters and `DTensor`s (FSDP2 and torch's tensor parallelism). A strategy that shards parameters
    itself gives optimizers a subclass. Its `groups` returns the ranks over which a parameter is sharded. Its `part`
    returns the elements that a rank counts, so that the ranks together count each element once.
    """

    def groups(self, parameter: Tensor) -> tuple[Group, ...]:
        """Return the groups over which a parameter is sharded, the same on all their ranks; empty if replicated."""
        if not isinstance(parameter, DTensor):
            return ()
        mesh = parameter.device_mesh
        return tuple(
            Group.of(mesh.get_group(dim), f"dimension {dim} of a DTensor")
            for dim, placement in enumerate(parameter.placements)
            # Not `is_shard`, which is False for the strided shards of FSDP2 over torch's tensor parallelism.
            if not placement.is_replicate() and mesh.size(dim) > 1
        )

    def part(self, parameter: Tensor, shard: Tensor) -> Tensor:
        """Return the elements that this rank counts in its `shard` of a tensor that is sharded like `parameter`."""
        return shard

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], *kinds: Sequence[Tensor | None]) -> Tensor:
        """Return the norm of each full tensor; every rank with a shard of any must call it, with all parameters.

        Args:
            parameters: The parameters.
            kinds: Each kind gives one tensor per parameter, such as its gradient, as this rank's shard; None counts as
                zero.

        Returns:
            Norms in double precision, `[kinds, parameters]`.
        """
        if not parameters:
            return torch.zeros(len(kinds), 0, dtype=torch.float64)
        device = parameters[0].device
        parts = [
            None if shard is None else self.part(parameter, shard)
            for shards in kinds
            for parameter, shard in zip(parameters, shards)
        ]
        found = [part for part in parts if part is not None]
        # 16 bits would leave three digits of a norm.
        wide = torch.float64 if any(part.dtype == torch.float64 for part in found) else torch.float32
        norms = iter(each("norm", found, 2.0, dtype=wide) if found else [])
        zero = torch.zeros((), dtype=wide, device=device)
        # Squares in double precision: they are summed over ranks, and a square may overflow 32 bits.
        squares = torch.stack([zero if part is None else next(norms).to(device) for part in parts]).double().square()
        squares = squares.view(len(kinds), len(parameters))
        self._sum(squares, parameters)
        return squares.sqrt()

    def _sum(self, squares: Tensor, parameters: Sequence[Tensor]) -> None:
        """Sum the squares of sharded parameters over their ranks, in place, with one message per group."""
        columns: dict[object, tuple[Group, list[int]]] = {}
        for column, parameter in enumerate(parameters):
            for group in self.groups(parameter):
                if group.size > 1:
                    # By name: `groups` may return new objects for the same ranks.
                    key = group.name or id(group)
                    columns.setdefault(key, (group, []))[1].append(column)
        for group, chosen in columns.values():
            index = torch.tensor(chosen, device=squares.device)
            squares[:, index] = comm.all_reduce_(squares[:, index], group)


@dataclass(frozen=True)
class _Held:
    """This rank's shards of one parameter and its gradient, as plain tensors; None for a missing gradient."""

    parameter: Tensor
    group: dict[str, Any]
    value: Tensor
    gradient: Tensor | None


class TrustRatioOptimizer(Optimizer):
    """Base class of optimizers that use norms of full parameters.

    Attributes:
        norms: Takes these norms, also of `DTensor`s; a strategy that shards parameters replaces it.

    Raises:
        ValueError: From the constructor and from `step`, on every rank, for parts of flattened parameters (FSDP1,
            DeepSpeed ZeRO), whose full norms are unknown.
        TypeError: From `step`, for sparse or complex gradients.
    """

    norms: WholeNorms = WholeNorms()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._given: set[int] = set()
        self._shapes: set[torch.Size] = set()
        for name in ("lr", "weight_decay"):
            if not float(defaults[name]) >= 0.0:
                raise ValueError(f"`{name}` must be at least 0; got {defaults[name]}")
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Copied and unpickled optimizers hold only state and groups.
        self.__dict__.setdefault("_given", set())
        self.__dict__.setdefault("_shapes", set())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if is_flattened(parameter):
                raise ValueError(
                    f"`{type(self).__name__}` needs the norms of full parameters, but FSDP1 has flattened them. Use"
                    " FSDP2 (`ModelParallelStrategy`), DDP, or a tensor- or pipeline-parallel strategy; or AdamW or"
                    " SGD"
                )
            self._given.add(id(parameter))
            self._shapes.add(parameter.shape)

    def _check_given(self, parameter: Tensor) -> None:
        # DeepSpeed gives the user's optimizer a flat vector of all parameters of a group, or a part of the vector.
        if self._given and id(parameter) not in self._given and parameter.shape not in self._shapes:
            raise ValueError(
                f"`{type(self).__name__}` needs the norms of full parameters; got an unknown parameter of shape"
                f" {tuple(parameter.shape)}. DeepSpeed's ZeRO flattens parameters in this way. Use DDP, FSDP2"
                " (`ModelParallelStrategy`), or a tensor- or pipeline-parallel strategy. Or use DeepSpeed's own LAMB"
                " (`optimizer: {type: Lamb}` in its configuration, without ZeRO), AdamW or SGD"
            )

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Take a step; every rank that holds a shard of the parameters must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [self._hold(parameter, group) for group in self.param_groups for parameter in group["params"]]
        self._step(held)
        return loss

    def _hold(self, parameter: Tensor, group: dict[str, Any]) -> _Held:
        self._check_given(parameter)
        gradient = parameter.grad
        if gradient is not None:
            if gradient.layout != torch.strided or parameter.is_complex():
                raise TypeError(f"`{type(self).__name__}` supports neither sparse gradients nor complex parameters")
            gradient = local_part(gradient, parameter)
        return _Held(parameter, group, local_part(parameter, parameter), gradient)

    @abstractmethod
    def _step(self, held: list[_Held]) -> None:
        """Update the parameters that have gradients."""

    def _ratios(self, held: list[_Held], steps: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return (norm of the parameter, norm of `steps`) by `id` of the adapted parameters."""
        # Also for parameters without a gradient here: all ranks must send messages of one layout.
        adapted = [one for one in held if one.group["adapt_vectors"] or one.parameter.dim() > 1]
        norms = self.norms(
            [one.parameter for one in adapted],
            [one.value for one in adapted],
            [steps.get(id(one.parameter)) for one in adapted],
        )
        return {id(one.parameter): pair for one, pair in zip(adapted, norms.unbind(1))}

    def _add_steps(
        self, targets: list[Tensor], steps: list[Tensor], mine: list[_Held], norms: dict[int, Tensor], sign: float
    ) -> None:
        """Add the steps of parameters of one group, times trust ratio, learning rate and `sign`, to `targets`."""
        plain: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
        # Once for all parameters, because each number costs a copy to the device.
        rate = torch.as_tensor(mine[0].group["lr"], dtype=torch.float64, device=steps[0].device)
        for target, step, one in zip(targets, steps, mine):
            factor = rate.to(step.device)
            pair = norms.get(id(one.parameter))
            if pair is not None:
                # On the device and without a branch, so that the host does not wait for the norms.
                weight, other = pair.to(step.device).unbind()
                is_known = (weight > 0) & (other > 0)
                factor = torch.where(is_known, self._trust_ratio(weight, other, one.group), 1.0) * factor
            if step.dtype.itemsize < 4:
                # In 16 bits the factor itself could round to zero.
                target.add_(step * factor, alpha=sign)
                continue
            for values, value in zip(plain, (target, step, factor.to(step.dtype))):
                values.append(value)
        if plain[0]:
            each("addcmul_", *plain, sign)

    @abstractmethod
    def _trust_ratio(self, weight: Tensor, step: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the trust ratio from the norms of a parameter and of its step."""

    def _remembered(self, one: _Held, key: str) -> Tensor:
        """Return this rank's shard of a state tensor with the parameter's shape; zeros at first."""
        state = self.state[one.parameter]
        if key not in state:
            # Like the parameter, not like its shard: checkpoints of `DTensor`s need the full shape.
            state[key] = torch.zeros_like(one.parameter, memory_format=torch.preserve_format)
        return local_part(state[key], one.parameter)


class LARS(TrustRatioOptimizer):
    """Scales the learning rate of SGD with momentum for each parameter (layer-wise adaptive rate scaling).

    With parameter `w`, gradient `g`, learning rate `lr`, momentum `m`, weight decay `d`, trust coefficient `c`:

        ratio = c |w| / (|g| + d |w|)          1 if a norm is zero, and for biases and norms (`adapt_vectors`)
        v     = m v + lr ratio (g + d w)
        w     = w - v

    The norms cover full parameters, also if the strategies of this library shard them, or if they are
    `DTensor`s. One all-reduce per group of ranks covers all parameters.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import LARS

        class MyLargeBatchModule(MyModule):
            def configure_optimizers(self):
                return LARS(self.parameters(), lr=1.0, weight_decay=1e-4)

        trainer = Trainer(max_epochs=1)
        trainer.fit(MyLargeBatchModule(), MyData())
        ```

    Args:
        params: Parameters, or parameter groups. A group may set every other argument.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay.
        trust_coefficient: How far a step may change a parameter, relative to its norm, at `lr=1`.
        adapt_vectors: Also scale parameters of one dimension (biases, gains of norms). Published recipes leave them
            out.

    Raises:
        ValueError: If an argument is negative, or parameters are flattened (FSDP1, DeepSpeed).

    Source: You et al., https://arxiv.org/abs/1708.03888, algorithm 1
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Union[float, Tensor] = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        adapt_vectors: bool = False,
    ) -> None:
        if not momentum >= 0.0 or not trust_coefficient > 0.0:
            raise ValueError(
                f"`momentum` must be at least 0 and `trust_coefficient` positive; got {momentum} and"
                f" {trust_coefficient}"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "adapt_vectors": adapt_vectors,
            },
        )

    def _step(self, held: list[_Held]) -> None:
        norms = self._ratios(held, {id(one.parameter): one.gradient for one in held if one.gradient is not None})
        for group in self.param_groups:
            mine = [one for one in held if one.group is group and one.gradient is not None]
            if not mine:
                continue
            values = [one.value for one in mine]
            steps = [one.gradient for one in mine if one.gradient is not None]
            if group["weight_decay"]:
                steps = each("add", steps, values, alpha=group["weight_decay"])
            if not group["momentum"]:
                self._add_steps(values, steps, mine, norms, -1.0)
                continue
            # The momentum sums scaled steps, as in the paper, so a later learning rate does not rescale earlier steps.
            buffers = [self._remembered(one, "momentum_buffer") for one in mine]
            each("mul_", buffers, group["momentum"])
            self._add_steps(buffers, steps, mine, norms, 1.0)
            each("sub_", values, buffers)

    def _trust_ratio(self, weight: Tensor, step: Tensor, group: dict[str, Any]) -> Tensor:
        return group["trust_coefficient"] * weight / (step + group["weight_decay"] * weight)


class LAMB(TrustRatioOptimizer):
    """Scales the step of AdamW for each parameter (layer-wise adaptive moments).

    With parameter `w`, the step `r` of Adam with bias correction, learning rate `lr`, weight decay `d`:

        u     = r + d w
        ratio = min(|w|, max_weight_norm) / |u|    1 if a norm is zero, and for biases and norms (`adapt_vectors`)
        w     = w - lr ratio u

    The norms cover full parameters, also if the strategies of this library shard them, or if they are
    `DTensor`s. One all-reduce per group of ranks covers all parameters.

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import LAMB

        class MyLargeBatchModule(MyModule):
            def configure_optimizers(self):
                return LAMB(self.parameters(), lr=2e-3, weight_decay=0.01)

        trainer = Trainer(max_epochs=1)
        trainer.fit(MyLargeBatchModule(), MyData())
        ```

    Args:
        params: Parameters, or parameter groups. A group may set every other argument.
        lr: Learning rate.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Number added to the square root of the second mean.
        weight_decay: Weight decay.
        adapt_vectors: Also scale parameters of one dimension (biases, gains of norms). Published recipes leave them
            out.
        max_weight_norm: Upper limit of `|w|` in the ratio. None sets no limit.

    Raises:
        ValueError: If an argument is out of range, or parameters are flattened (FSDP1, DeepSpeed).

    Source: You et al., https://arxiv.org/abs/1904.00962, algorithm 2
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Union[float, Tensor] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt_vectors: bool = False,
        max_weight_norm: Optional[float] = None,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas) or not eps >= 0.0:
            raise ValueError(f"`betas` must be at least 0 and less than 1, and `eps` at least 0; got {betas} and {eps}")
        if max_weight_norm is not None and not max_weight_norm > 0.0:
            raise ValueError(f"`max_weight_norm` must be positive; got {max_weight_norm}")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "adapt_vectors": adapt_vectors,
                "max_weight_norm": max_weight_norm,
            },
        )

    def _step(self, held: list[_Held]) -> None:
        steps: dict[int, Tensor] = {}
        for group in self.param_groups:
            mine = [one for one in held if one.group is group and one.gradient is not None]
            steps.update(zip([id(one.parameter) for one in mine], self._adam(mine, group) if mine else []))
        # One call for all parameter groups, because each call costs a message per group of ranks.
        norms = self._ratios(held, steps)
        for group in self.param_groups:
            mine = [one for one in held if one.group is group and one.gradient is not None]
            if mine:
                mine_steps = [steps[id(one.parameter)] for one in mine]
                self._add_steps([one.value for one in mine], mine_steps, mine, norms, -1.0)

    def _trust_ratio(self, weight: Tensor, step: Tensor, group: dict[str, Any]) -> Tensor:
        return weight.clamp(max=group["max_weight_norm"] or torch.inf) / step

    def _adam(self, mine: list[_Held], group: dict[str, Any]) -> list[Tensor]:
        """Return the steps of AdamW, with weight decay, at learning rate 1."""
        first, second = group["betas"]
        gradients = [one.gradient for one in mine if one.gradient is not None]
        means = [self._remembered(one, "exp_avg") for one in mine]
        squares = [self._remembered(one, "exp_avg_sq") for one in mine]
        counts = []
        for one in mine:
            # As in torch's Adam: on the CPU, and for each parameter, because a parameter may lack a gradient in a step.
            count = self.state[one.parameter].setdefault("step", torch.zeros((), dtype=torch.float32))
            count += 1
            counts.append(float(count))
        each("lerp_", means, gradients, 1 - first)
        each("mul_", squares, second)
        each("addcmul_", squares, gradients, gradients, 1 - second)
        roots = each("sqrt", squares)
        each("div_", roots, [(1 - second**count) ** 0.5 for count in counts])
        each("add_", roots, group["eps"])
        # Not in place: `means` is state, and the step is scaled below.
        steps = each("div", means, [1 - first**count for count in counts])
        each("div_", steps, roots)
        if group["weight_decay"]:
            each("add_", steps, [one.value for one in mine], alpha=group["weight_decay"])
        return list(steps)
