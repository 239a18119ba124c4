"""The planner with `tiled="auto"`: what MLPs and the head keep, and what the second run of MLPs takes."""

import torch
from torch import nn

from lightning_parallel.planner.context_costs import total_s
from lightning_parallel.planner.plan_report import strategy_arguments
from lightning_parallel.planner.plans import plan
from lightning_parallel.planner.rehearsal import Rehearsal
from tests.planner.test_planner import WIDTH, Model, cluster
from tests.tensor.test_tiled_logits import small_tiles

SAMPLES, LENGTH, CLASSES = 2, 512, 640
ROWS = SAMPLES * LENGTH


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.mlp(x)


class Layers(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)


def test_tiles_keep_the_input_of_mlps_and_a_tile_of_logits():
    batch = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    for tensor in (1, 2):
        whole, tiled = (Rehearsal(Layers(), batch, cluster(), tiled=option) for option in ("off", "auto"))
        before = whole.costs(tensor, 1).compute
        with small_tiles():
            after = tiled.costs(tensor, 1).compute
        for layer, in_tiles in zip(before.layers, after.layers, strict=True):
            inner = ROWS * 4 * WIDTH // tensor * 4
            # The product and the result of GELU.
            assert layer.activation_bytes - in_tiles.activation_bytes == 2 * inner
            assert in_tiles.total_s > 1.2 * layer.total_s
        classes = CLASSES // tensor
        # Tiles of as many bytes as the hidden states.
        rows = -(-ROWS // -(-ROWS * classes // (ROWS * WIDTH)))
        expected = 4 * (3 * ROWS * WIDTH + 3 * rows * classes)
        assert after.epilogue.activation_bytes == expected < before.epilogue.activation_bytes
        assert tiled.head_gradient_bytes(tensor) == 4 * classes * WIDTH
        assert total_s(after) > total_s(before)


def test_a_layout_runs_with_the_tiles_of_its_plan():
    batch = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    for option in ("off", "auto"):
        best = plan(Layers(), batch, cluster(2, 2, memory_bytes=1 << 30), measured=False, tiled=option).best[0]
        assert strategy_arguments(best).get("tiled", "off") == option
