"""Compressors where each rank needs its shard of the mean only, as under `fully_shard`."""

import math

import pytest
import torch

from lightning_parallel import comm
from lightning_parallel.compression import Dense, Quantize
from tests.compression.test_conformance import (
    COMPRESSORS,
    REPRESENTATIVES,
    SHAPES,
    assert_equal,
    gradients,
    mean_gradients,
    mean_memory,
    sent_by_ring,
    steps_of,
)
from tests.harness import distributed, recorded_communication

SCATTERING = ["dense", "cast", "cast_feedback", "int8", "int4", "int4_stochastic", "sign"]
CONSERVING = ["dense", "topk_int8", "int8", "int4", "sign", "powersgd"]


def rows_of(size):
    """Elements of a rank's rows, where the rows are divided as evenly as they can be from the first rank on."""
    return {name: math.ceil(s[0] / size) * math.prod(s[1:]) for name, s in SHAPES.items() if s}


def scattered(reducer, grads, group):
    """The means, put together from the shards of all ranks."""
    shards = rows_of(group.size)
    with reducer.begin(group) as step:
        step.reduce_(grads, shards)
        assert step.commit()
    for name, shard in shards.items():
        flat = grads[name].flatten()
        padded = torch.nn.functional.pad(flat, (0, group.size * shard - len(flat)))
        mine = padded[group.rank * shard : (group.rank + 1) * shard]
        grads[name] = comm.all_gather(mine, group)[: len(flat)].view(SHAPES[name])
    return grads


@pytest.mark.parametrize("name", CONSERVING)
@distributed(world_size=4)
def test_nothing_is_lost(name, group):
    """Mean input + old residual = output + new residual, summed over the steps."""
    reducer = COMPRESSORS[name]()
    lost = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    for step in range(5):
        means = scattered(reducer, gradients(step, group.rank, torch.float64), group)
        true = mean_gradients(step, group.size, torch.float64)
        lost = {key: value + true[key] - means[key] for key, value in lost.items()}
    held = mean_memory(reducer, lost, group)
    for key, value in lost.items():
        torch.testing.assert_close(held[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted({*REPRESENTATIVES} - {*SCATTERING, "policy"}))  # whose rules scatter
@distributed(world_size=2)
def test_methods_that_need_the_whole_mean_do_as_ever(name, group):
    whole, parts = COMPRESSORS[name](), COMPRESSORS[name]()
    for step, expected in enumerate(steps_of(whole, 3, group)):
        found = scattered(parts, gradients(step, group.rank), group)
        for key in SHAPES:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-6)


@distributed(world_size=3)
def test_plain_shards_are_those_of_the_plain_mean(group):
    found = scattered(Dense(), gradients(0, group.rank, torch.float64), group)
    for key, expected in mean_gradients(0, group.size, torch.float64).items():
        torch.testing.assert_close(found[key], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in SCATTERING), ("dense", torch.float64), ("dense", torch.bfloat16)],
)
@distributed(world_size=3)
def test_bytes_told_are_bytes_sent(name, dtype, group):
    reducer = COMPRESSORS[name]()
    scattered(reducer, gradients(0, group.rank, dtype), group)
    with recorded_communication() as records, reducer.begin(group) as step:
        step.reduce_(gradients(1, group.rank, dtype), rows_of(group.size))
        step.commit()
    assert sum(block.sent_bytes for block in reducer.blocks) == pytest.approx(sent_by_ring(records), abs=4)


@distributed(world_size=4)
def test_eight_bits_are_a_quarter_of_a_reduce_scatter(group):
    reducer, weight = Quantize(8), torch.randn(64, 64)
    with reducer.begin(group) as step:
        step.reduce_({"w": weight}, {"w": 16 * 64})
        step.commit()
    [block] = reducer.blocks
    assert 3.9 < block.dense_bytes / block.sent_bytes < 4


@pytest.mark.parametrize("name", SCATTERING)
@distributed(world_size=2)
def test_resumes_bit_for_bit_at_another_division(name, group):
    """Residuals are those of whole parameters, whatever the shards were."""
    first = COMPRESSORS[name]()
    for step in range(2):
        scattered(first, gradients(step, group.rank), group)
    second = COMPRESSORS[name]()
    second.load_state_dict(first.state_dict(), group)
    assert_equal(scattered(first, gradients(2, group.rank), group), scattered(second, gradients(2, group.rank), group))
    assert second.reduce_(gradients(3, group.rank), group)
