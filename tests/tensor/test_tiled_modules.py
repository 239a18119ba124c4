"""Modules in tiles of positions: output and gradients equal to the whole module, with no whole inner tensor."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel.compat import patched
from lightning_parallel.compat.torch import CALLS, AroundCalls
from lightning_parallel.step_trace.record import record_step
from lightning_parallel.tensor import tiled_modules
from lightning_parallel.tensor.tile_plan import find_tiles
from lightning_parallel.tensor.tiled_modules import TiledModule
from tests.tensor.test_tiled_logits import Largest, assert_close, small_tiles

SAMPLES, LENGTH, FEATURES, INNER = 2, 12, 4, 16


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(FEATURES, INNER, bias=False), nn.Linear(FEATURES, INNER)
        self.down, self.norm = nn.Linear(INNER, FEATURES), nn.LayerNorm(INNER)

    def forward(self, x):
        return self.down(self.norm(F.silu(self.gate(x)) * self.up(x)))


class Fused(Gated):
    def forward(self, x):
        one, two = F.linear(x, torch.cat([self.gate.weight, self.up.weight])).chunk(2, -1)
        return self.down(F.gelu(one) * two)


class Positional(Gated):
    """Adds a position, which a record of shapes does not show."""

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * torch.arange(x.shape[1], dtype=x.dtype)[:, None])


class Mixing(Gated):
    def forward(self, x):
        return self.down(self.up(x).roll(1, 1))


class Drawing(Gated):
    def forward(self, x):
        return self.down(F.dropout(self.up(x), 0.5))


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.double()

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def planned(kind):
    module = Model(kind)
    x = torch.randn(SAMPLES, LENGTH, FEATURES, dtype=torch.float64)
    return find_tiles(record_step(module, lambda batch: module(batch).sum(), x, torch.device("cpu")))


@pytest.mark.parametrize(
    ("kind", "why"), [(Mixing, "`roll` joins positions"), (Drawing, "it draws random numbers")], ids=str
)
def test_modules_that_join_positions_or_draw_are_told(kind, why):
    found = planned(kind)
    assert not found.mlps
    assert all(reason.startswith(why) for reason in found.no_mlps.values())
    assert [*found.no_mlps] == ["layers.0", "layers.1"]


def results(kind, tiled, with_graph=False, dtype=torch.float64):
    module = Model(kind).to(dtype)
    if tiled:
        for path, width in planned(kind).mlps.items():
            layer = module.get_submodule(path)
            vars(layer)[CALLS] = AroundCalls(layer, TiledModule(path, layer, width))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, LENGTH, FEATURES, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    wanted = [x, *module.parameters()]
    with small_tiles(), patched(tiled_modules, "_FEW", 4), Largest() as largest:
        y = module(x)
        gradients = torch.autograd.grad(y.square().sum(), wanted, create_graph=with_graph, allow_unused=True)
        if with_graph:
            gradients = torch.autograd.grad(sum(each.square().sum() for each in gradients), wanted)
    return largest.size, [y, *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("kind", [Gated, Fused])
def test_tiles_equal_the_whole_module(kind):
    assert [*planned(kind).mlps.items()] == [
        (f"layers.{index}", 2 * INNER if kind is Fused else INNER) for index in (0, 1)
    ]
    largest, found = results(kind, True)
    assert_close(found, results(kind, False)[1])
    assert largest < SAMPLES * LENGTH * INNER / 2


def test_gradients_of_gradients():
    assert_close(results(Gated, True, with_graph=True)[1], results(Gated, False, with_graph=True)[1])


def test_a_module_that_depends_on_the_position_runs_whole():
    assert_close(results(Positional, True)[1], results(Positional, False)[1])


def test_sums_over_tiles_are_as_exact_as_one_product():
    exact = results(Gated, False)[1]
    errors = [
        [
            (one.double() - two).norm() / two.norm()
            for one, two in zip(results(Gated, tiled, dtype=torch.bfloat16)[1], exact)
        ]
        for tiled in (False, True)
    ]
    assert all(one <= 1.5 * other for other, one in zip(*errors))


def test_hooks_see_the_whole_module_and_parameters_once():
    module = Model(Gated)
    seen, shapes = [], []
    for layer in module.layers:
        vars(layer)[CALLS] = AroundCalls(layer, TiledModule("", layer, INNER))
        layer.down.weight.register_hook(seen.append)
    copied = copy.deepcopy(module)
    module.layers[0].up.register_forward_hook(lambda layer, args, output: shapes.append(output.shape[1]))
    x = torch.randn(SAMPLES, LENGTH, FEATURES, dtype=torch.float64)
    with small_tiles():
        module(x).sum().backward()
    assert len(seen) == 2
    assert shapes == [LENGTH]
    assert vars(copied.layers[0]).get(CALLS) is None
