"""What compression costs a device besides arithmetic: launches of kernels, and waits of the host for it.

The ways of a device are taken on the CPU, where every operation is seen, and the numbers are those of the CPU's own.
"""

from contextlib import ExitStack

import pytest
import torch

from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.compression import (
    BlockTopK,
    Cast,
    Dense,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TopK,
    quantizers,
    reducer,
    rowwise,
    sparsifiers,
    thin_products,
    wire,
)
from lightning_parallel.compression.compressor import hashed_integers
from tests.harness import distributed
from tests.launches import Launches, Reads

CPU = torch.device("cpu")
WAYS = (wire, quantizers, reducer, rowwise, sparsifiers, thin_products)  # they have one way for CPUs, one for devices


@pytest.fixture
def device_ways(monkeypatch):
    """Have launches said to be expensive; in groups without processes all ranks bring the same."""
    for module in WAYS:
        monkeypatch.setattr(module, "launches_kernels", lambda tensor: not tensor.is_meta)
    monkeypatch.setattr(wire, "_Phase", PhaseOfEqualRanks)


class PhaseOfEqualRanks:
    seconds = 0.0

    def __init__(self, requests, group):
        self.answers = {}
        for index, request in requests.items():
            tensor = request.tensor
            if isinstance(request, wire.AllReduceRequest):
                self.answers[index] = tensor * group.size
            elif isinstance(request, wire.ReduceScatterRequest):
                self.answers[index] = tensor[0] * group.size
            else:
                row = tensor if isinstance(request, wire.AllGatherRequest) else tensor[0]
                self.answers[index] = row.expand(group.size, -1).contiguous()

    def wait(self):
        pass


def group_of(world_size):
    return Group("data_parallel", tuple(range(world_size)), 0, None)


def gradients(shapes, step=0, dtype=torch.float32):
    draws = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=draws, dtype=dtype) for name, shape in shapes.items()}


SHAPES = {**{f"layer{index}": (64, 256) for index in range(6)}, "wide": (320, 640), "bias": (77,)}


def take_steps(reducer, world_size, shapes=SHAPES, steps=3):
    """Return what was counted in the last step, and its means."""
    for number in range(steps):
        named, seen = gradients(shapes, number), Launches()
        with seen, Reads(seen), reducer.begin(group_of(world_size)) as step:
            step._agree = lambda *_: None  # of Python objects, in the first step only
            step.reduce_(named)
            assert step.commit()
    return seen, named


COMPRESSORS = {
    "dense": Dense,
    "cast": lambda: Cast("bf16", feedback="classic"),
    "int8": lambda: Quantize(8),
    "int4": lambda: Quantize(4, feedback=None),
    "int4_stochastic": lambda: Quantize(4, stochastic=True),
    "int8_ef21": lambda: Quantize(8, feedback="ef21"),
    "sign": Sign,
    "topk": lambda: TopK(0.01),
    "topk_int8": lambda: TopK(0.01) | Quantize(8),
    "randomk": RandomK,
    "blocktopk": BlockTopK,
    "powersgd": lambda: PowerSGD(4),
    "powersgd_int8": lambda: PowerSGD(4) | Quantize(8),
    "alternating": lambda: PowerSGD(4, alternate=True),
}
by_compressor = pytest.mark.parametrize("name", COMPRESSORS)


@by_compressor
def test_the_host_waits_once_in_a_step(name, device_ways):
    seen, _ = take_steps(COMPRESSORS[name](), 4)
    assert +seen.waited == {"_local_scalar_dense": 1}


# From three ranks on: two send each other everything in one phase. PowerSGD's small factors are padded for some numbers
# of ranks.
@pytest.mark.parametrize("name", sorted(COMPRESSORS.keys() - {"topk", "topk_int8", "powersgd_int8"}))
def test_launches_do_not_grow_with_the_ranks(name, device_ways):
    (few, _), (many, _) = (take_steps(COMPRESSORS[name](), size) for size in (4, 8))
    assert few.launched == many.launched


def test_a_rank_more_costs_top_k_one_launch_per_block(device_ways):
    """It adds up the ranks' elements one rank after the other, so that all ranks get the same bits."""
    (few, _), (many, _) = (take_steps(TopK(0.01), size) for size in (2, 8))
    assert many.launched - few.launched == {"index_add_": 6 * 2}, "blocks of six tensors, and of one"


# Of eight tensors in three blocks.
LAUNCHES = {"cast": 60, "int8": 140, "int4": 170, "sign": 150, "topk": 110, "randomk": 110, "blocktopk": 80}
LAUNCHES |= {"powersgd": 330, "alternating": 220}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_step_are_few(name, device_ways):
    seen, _ = take_steps(COMPRESSORS[name](), 8)
    assert sum(seen.launched.values()) <= LAUNCHES[name], seen.launched


@distributed(world_size=2)
def _steps_both_ways(name, shapes, group):
    reducers = COMPRESSORS[name](), COMPRESSORS[name]()
    for number in range(3):
        means = []
        for one, is_device in zip(reducers, (False, True)):
            named = gradients(shapes, 10 * number + group.rank, torch.float64)
            with ExitStack() as stack:
                for module in WAYS:
                    stack.enter_context(patched(module, "launches_kernels", lambda tensor, way=is_device: way))
                assert one.reduce_(named, group)
            means.append(named)
        for key in shapes:
            torch.testing.assert_close(means[1][key], means[0][key], rtol=1e-9, atol=1e-9)


@pytest.mark.sweep
@by_compressor
@pytest.mark.parametrize("shapes", [SHAPES, {"odd": (101, 103), "tiny": (33, 35)}], ids=["even", "odd"])
def test_the_ways_of_a_device_give_the_numbers_of_the_cpu(name, shapes):
    _steps_both_ways(name=name, shapes=shapes)


# ------------------------------------------------------------------------------------------------ numbers of a device


def test_hashed_integers_are_those_of_the_definition():
    """In Python's integers: any device that computes otherwise would draw other positions than its peers."""
    seed = 0x9E3779B97F4A7C15
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lightning_parallel.compression.compressor._seed", lambda purpose: seed)
        found = hashed_integers([("any",)], 3000, CPU)
    mask, expected = (1 << 32) - 1, []
    for position in range(3000):
        bits = position ^ (seed & mask)
        bits = (bits ^ bits >> 16) * 0x7FEB352D & mask
        bits = (bits + (seed >> 32)) & mask
        bits = (bits ^ bits >> 15) * 0x846CA68B & mask
        expected.append((bits ^ bits >> 16) & mask >> 1)
    assert found.tolist() == [expected]


def test_hashed_integers_are_uniform_and_independent():
    numbers = hashed_integers([(0, step, "w") for step in range(30)], 50_000, CPU).double() / 2**31
    assert (numbers.mean(1) - 0.5).abs().max() < 5 * 12**-0.5 / 50_000**0.5
    assert numbers.var().item() == pytest.approx(1 / 12, rel=0.01)
    between = torch.corrcoef(numbers) - torch.eye(30)
    assert between.abs().max() < 0.025
    assert torch.corrcoef(torch.stack([numbers[0, 1:], numbers[0, :-1]]))[0, 1].abs() < 0.025


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 2, 8, 16])
def test_reflections_give_an_orthonormal_basis_of_any_rows(rank, dtype):
    draws = torch.Generator().manual_seed(0)
    rows = torch.randn(6, rank, 90, generator=draws, dtype=dtype)
    rows[1] = 0
    rows[2] *= 1e-30
    rows[3, -1] = rows[3, 0]
    rows[4] = torch.outer(torch.arange(rank, dtype=dtype), rows[4, 0])
    rows[5, 0] = 0
    basis = thin_products._reflected(rows)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(basis @ basis.mT, torch.eye(rank, dtype=dtype).expand(6, -1, -1), rtol=0, atol=20 * eps)
    rest = (rows - rows @ basis.mT @ basis).norm(dim=(1, 2))
    assert (rest <= 20 * eps * rows.norm(dim=(1, 2))).all(), "the space of the rows"
    expected = torch.linalg.qr(rows[:1].mT).Q.mT
    torch.testing.assert_close(basis[:1].abs(), expected.abs(), rtol=0, atol=50 * eps)


@by_compressor
def test_nothing_lacks_a_deterministic_form(name, device_ways):
    """`Trainer(deterministic=True)`: none of the operations that raise on CUDA then."""
    seen, _ = take_steps(COMPRESSORS[name](), 4)
    refused = {"scatter_add_", "scatter_add", "bincount", "histc", "kthvalue", "median", "put_", "cumsum"}
    assert not refused & seen.launched.keys()
