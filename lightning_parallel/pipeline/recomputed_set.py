"""Choose the layers that backward computes again: the cheapest set whose peak fits in memory.

    layers     4, each 36 MiB;  selective keeps 22 MiB for 6 ms,  full keeps 2 MiB for 98 ms
    limit      100 MiB          selective, selective, selective, off      18 ms

Each step of the choice saves bytes and takes time. Steps with the most bytes per second come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_parallel.pipeline.recomputation import Recomputed
from lightning_parallel.pipeline.search import Costs
from lightning_parallel.pipeline.simulate import Cost

__all__ = ["OPTIONS", "cheapest_set", "mixed_costs", "recomputed_layers"]

OPTIONS = ("off", "selective", "full")
"""All options for a layer, by rising time."""


class _Step(NamedTuple):
    """A layer that takes another option, with the bytes that this saves in each second that it takes."""

    bytes_per_s: float
    name: str
    after: str


def cheapest_set(
    costs: Mapping[str, Costs],
    names: Sequence[str],
    among: Collection[str],
    peak_bytes: Callable[[Costs], float],
    limit_bytes: float,
) -> dict[str, str]:
    """Return an option for each layer, by name: the least time whose peak stays within a limit, as far as possible.

    Args:
        costs: Costs of all layers under some of `OPTIONS`, `off` included.
        names: Name of the layer of each call.
        among: Names of the layers to choose for, such as the layers of one rank.
        peak_bytes: Returns the most bytes that the rank holds under some costs.
        limit_bytes: The limit.
    """
    found = dict.fromkeys(among, "off")

    def fits() -> bool:
        return peak_bytes(mixed_costs(costs, names, found)) <= limit_bytes

    taken: list[str] = []
    steps = sorted((step for name in among for step in _steps(costs, names, name)), key=lambda step: -step.bytes_per_s)
    for step in steps:
        if fits():
            break
        found[step.name] = step.after
        taken.append(step.name)
    # The last step may have saved so much that an earlier, smaller step is not needed.
    for name in dict.fromkeys(reversed(taken)) if fits() else ():
        present = found[name]
        for option in OPTIONS[: OPTIONS.index(present)]:
            if option not in costs:
                continue
            found[name] = option
            if fits():
                break
        else:
            found[name] = present
    return found


def mixed_costs(costs: Mapping[str, Costs], names: Sequence[str], options: Mapping[str, str]) -> Costs:
    """Return the costs of the layers, each under its own option; layers without an option recompute nothing."""
    chosen = (costs[options.get(name, "off")].layers[index] for index, name in enumerate(names))
    # Measured apart, the same forward takes other times. Only the second runs may differ.
    layers = (
        replace(
            again,
            **{key: getattr(cost, key) for key in ("forward_s", "weight_gradient_s")},
            input_gradient_s=cost.input_gradient_s + again.again_s,
        )
        for cost, again in zip(costs["off"].layers, chosen)
    )
    return replace(costs["off"], layers=tuple(layers))


def recomputed_layers(options: Mapping[str, str]) -> dict[str, Recomputed]:
    """Return the layers that recompute activations, as `recompute` takes them."""
    return {name: "full" if option == "full" else "selective" for name, option in options.items() if option != "off"}


def _steps(costs: Mapping[str, Costs], names: Sequence[str], name: str) -> Iterator[_Step]:
    """Yield the steps of a layer, the step with the most bytes per second first."""

    def of(option: str) -> Cost:
        calls = [cost for other, cost in zip(names, costs[option].layers) if other == name]
        return Cost.in_sequence(calls)

    before, rest = "off", [option for option in OPTIONS[1:] if option in costs]
    while rest:
        start = of(before)
        found = []
        for option in rest:
            end = of(option)
            saved = start.activation_bytes - end.activation_bytes
            if saved > 0:
                # Noise may make a longer second run shorter.
                seconds = max(end.again_s - start.again_s, 1e-12)
                found.append(_Step(saved / seconds, name, option))
        if not found:
            return
        # Skips `selective` where `full` saves more per second.
        best = max(found, key=lambda step: step.bytes_per_s)
        yield best
        before, rest = best.after, rest[rest.index(best.after) + 1 :]
