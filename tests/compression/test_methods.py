"""The defining property of each method."""

import numpy as np
import pytest
import torch

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.compression import (
    BlockTopK,
    Cast,
    Dense,
    Policy,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    StepValue,
    TopK,
    rowwise,
)
from lightning_parallel.compression.sparsifiers import _pack_offsets, _unpack_offsets, largest
from tests.harness import distributed

ALONE = Group.alone("alone")


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def many(compressor, tensor, steps):
    """What several steps make of 50 parameters that have the same gradient: (50 * steps, *shape)."""
    found = []
    for _ in range(steps):
        gradients = {f"w{number}": tensor.clone() for number in range(50)}
        assert compressor.reduce_(gradients, ALONE)
        found.extend(gradients.values())
    return torch.stack(found)


def reduced(compressor, tensor, name="weight"):
    gradient = tensor.clone()
    assert compressor.reduce_({name: gradient}, ALONE)
    return gradient


# ---------------------------------------------------------------------------------------------------- PowerSGD


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_exact_on_gradients_of_its_rank(rank):
    """Several matrices of one shape: a batched normalisation that mixes them fails here."""
    exact = {f"w{i}": randn(40, rank, seed=i) @ randn(rank, 30, seed=50 + i) for i in range(5)}
    exact["conv"] = (randn(8, rank) @ randn(rank, 5 * 9)).view(8, 5, 3, 3)
    grads = {name: tensor.clone() for name, tensor in exact.items()}
    PowerSGD(rank, min_numel=0).reduce_(grads, ALONE)
    for name, tensor in exact.items():
        torch.testing.assert_close(grads[name], tensor, rtol=0, atol=1e-11)


def test_powersgd_of_zero_and_of_lower_rank():
    compressor = PowerSGD(4, min_numel=0)
    thin = randn(40, 2) @ randn(2, 30)
    for _ in range(3):
        grads = {"zero": torch.zeros(40, 30, dtype=torch.float64), "thin": thin.clone(), "one": thin.clone()}
        compressor.reduce_(grads, ALONE)
        assert torch.count_nonzero(grads["zero"]) == 0
        torch.testing.assert_close(grads["thin"], thin, rtol=0, atol=1e-11)
    recovered = [reduced(compressor, thin, "zero") for _ in range(3)]
    torch.testing.assert_close(recovered[-1], thin, rtol=0, atol=1e-11)


def test_the_rank_is_limited_by_the_matrix_and_useless_compression_avoided():
    assert isinstance(PowerSGD(4).method("w", (3, 1000), 0), Dense), "4 of 3 rows: factors are larger than the matrix"
    assert isinstance(PowerSGD(1).method("w", (3, 1000), 0), PowerSGD)
    assert isinstance(PowerSGD(1).method("b", (4096,), 0), Dense)


def test_alternating_form_finds_the_dominant_subspace():
    exact, compressor = randn(40, 2) @ randn(2, 30), PowerSGD(2, alternate=True, feedback=None, min_numel=0)
    for _ in range(6):
        last = reduced(compressor, exact)
    torch.testing.assert_close(last, exact, rtol=0, atol=1e-9)


def _resnet18_cifar():
    """Shapes of the network of the PowerSGD paper: 11 173 962 parameters."""
    shapes, channels = {"conv1": (64, 3, 3, 3), "bn1": (64,), "bn1.bias": (64,)}, 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for index in range(2):
            into, name = (channels if index == 0 else width), f"layer{stage}.{index}"
            shapes |= {f"{name}.conv1": (width, into, 3, 3), f"{name}.conv2": (width, width, 3, 3)}
            shapes |= {f"{name}.bn{i}.{kind}": (width,) for i in (1, 2) for kind in ("weight", "bias")}
            if into != width:
                shapes |= {f"{name}.short": (width, into, 1, 1), f"{name}.bns": (width,), f"{name}.bnsb": (width,)}
        channels = width
    return shapes | {"linear": (10, 512), "linear.bias": (10,)}


@pytest.mark.parametrize(("rank", "ratio"), [(1, 243.3), (2, 135.8), (4, 72.1), (7, 42.3)])
def test_published_ratios_of_resnet18(rank, ratio):
    shapes = _resnet18_cifar()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 11_173_962
    for world_size in (2, 16):
        found = Dense().wire_bytes(shapes, world_size) / PowerSGD(rank, min_numel=0).wire_bytes(shapes, world_size)
        assert found == pytest.approx(ratio, abs=0.1)
    halved = PowerSGD(rank, alternate=True, min_numel=0).wire_bytes(shapes, 16)
    assert Dense().wire_bytes(shapes, 16) / halved > 1.6 * ratio


# ------------------------------------------------------------------------------------------------ sparsifiers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 7), (1000, 1), (70_000, 700), (200_000, 150_000)])
def test_largest_is_topk(n, k, dtype):
    for rows in (randn(2, n, dtype=dtype), randn(2, n, dtype=dtype) ** 9, torch.zeros(2, n, dtype=dtype)):
        positions = largest(rows, k)
        assert positions.shape == (2, k)
        assert (positions.diff(dim=1) > 0).all()
        expected = rows.abs().topk(k, dim=1).values.sort(dim=1).values
        assert torch.equal(rows.abs().gather(1, positions).sort(dim=1).values, expected)


def test_largest_in_sorted_and_poisoned_rows():
    rows = torch.arange(100_000.0).unsqueeze(0)
    assert torch.equal(largest(rows, 10), torch.arange(99_990, 100_000).unsqueeze(0))
    rows[0, 5] = float("nan")
    assert 5 in largest(rows, 1)


@pytest.mark.parametrize("extent", [200, 3000, 4096, 60_000])
def test_offsets_in_chunks_take_few_bits(extent):
    offsets = torch.tensor([[0, 1, 7, 15, extent // 2, extent - 2, extent - 1], list(range(7))])
    packed = _pack_offsets(offsets, extent)
    assert packed.shape == (2, 7 if extent <= 256 else 12 if extent <= 4096 else 14)
    for received in (packed, packed.expand(3, -1, -1)):
        assert torch.equal(_unpack_offsets(received, 7, extent), offsets.expand(*received.shape[:-1], 7))


@pytest.mark.parametrize("rows", [1, 9])
def test_chunks_send_the_largest_of_each(rows):
    """Where the last chunk is short, too; 105 is seven chunks of fifteen, and 7 x 4 elements are sent."""
    tensors = {f"w{index}": randn(10, 10, seed=index) for index in range(rows)}
    sent = {name: tensor.clone() for name, tensor in tensors.items()}
    assert TopK(0.25, chunk=16, feedback=None, min_numel=0).reduce_(sent, ALONE)
    for name, tensor in tensors.items():
        chunks = torch.nn.functional.pad(tensor.flatten(), (0, 5)).view(7, 15)
        expected = torch.zeros_like(chunks).scatter_(1, chunks.abs().topk(4, 1).indices, 1.0).mul_(chunks)
        assert torch.equal(sent[name].flatten(), expected.flatten()[:100])


def test_two_bits_of_the_largest_take_less_than_two_bytes_each():
    elements = 4096 * 64
    compressor = TopK(1 / 64, chunk=4096) | Quantize(2)
    sent = compressor.wire_bytes({"weight": (4096, 64)}, 2)
    assert sent == elements // 64 * (2 + 12) // 8 + 8 * (elements // 64 // 512)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_topk_contracts(ratio):
    matrix = randn(300, 400, seed=3)
    sent = reduced(TopK(ratio, feedback=None), matrix)
    k = round(ratio * matrix.numel())
    assert torch.count_nonzero(sent) == k
    assert (sent - matrix).square().sum() <= (1 - k / matrix.numel()) * matrix.square().sum() + 1e-12


def test_positions_cross_spans():
    matrix = torch.zeros(300, 1000)
    places = [0, 65_535, 65_536, 131_071, 131_072, 299_999]
    matrix.view(-1)[places] = torch.arange(1.0, 7)
    sent = reduced(TopK(6 / 300_000, feedback=None), matrix)
    assert torch.equal(sent, matrix)


def test_randomk_draws_every_element_equally_often():
    counts = (many(RandomK(0.1, feedback=None, min_numel=0), torch.ones(10, 11), 40) != 0).sum(0)
    assert counts.sum() == 2000 * 11
    assert (counts - 200).abs().max() < 5 * (200 * 0.9) ** 0.5


@distributed(world_size=2)
def test_blocktopk_sends_the_blocks_that_are_largest_together(group):
    gradient = torch.zeros(4, 20)
    gradient[group.rank] = 3.0  # blocks of 10: 0, 1 on rank 0; 2, 3 on rank 1
    gradient[3, 10:] = 2.9  # largest together, though on neither rank
    BlockTopK(1 / 8, block=10, min_numel=0).reduce_({"w": gradient}, group)
    assert torch.equal(gradient.nonzero()[:, 0].unique(), torch.tensor([3]))
    torch.testing.assert_close(gradient[3, 10:], torch.full((10,), 2.9))


def test_momentum_correction_is_sgd_with_momentum_when_everything_is_sent():
    sparse = TopK(StepValue({0: 1.0}), momentum=0.9, min_numel=0)
    gradients = [{"w": randn(8, 8, seed=step), "b": randn(8, seed=step)} for step in range(6)]
    parameters = {"w": torch.zeros(8, 8, dtype=torch.float64), "b": torch.zeros(8, dtype=torch.float64)}
    optimizer = torch.optim.SGD([parameters["b"].requires_grad_()], lr=1.0, momentum=0.9)
    moved = torch.zeros(8, dtype=torch.float64)
    for step in gradients:
        parameters["b"].grad = step["b"].clone()
        optimizer.step()
        ours = {name: gradient.clone() for name, gradient in step.items()}
        sparse.reduce_(ours, ALONE)
        moved -= ours["b"]  # a vector: dense, with plain momentum
        # Sent velocity is masked, so a fully sent matrix is plain SGD (momentum factor masking).
        torch.testing.assert_close(ours["w"], step["w"], rtol=0, atol=1e-12)
    torch.testing.assert_close(moved, parameters["b"].detach(), rtol=0, atol=1e-12)


def test_momentum_accumulates_until_it_is_sent():
    sparse, m = TopK(1 / 64, momentum=0.5, min_numel=0), 0.5
    steady = torch.full((8, 8), 1.0, dtype=torch.float64)
    first = reduced(sparse, steady)
    assert first.sum() == 1
    second = reduced(sparse, steady)  # elsewhere u = 1.5, v = 2.5
    assert second.max() == 1 + (1 + m)


# ------------------------------------------------------------------------------------------------- quantizers


@pytest.mark.parametrize(
    "make",
    [
        lambda: Quantize(8, stochastic=True, feedback=None, min_numel=0),
        lambda: Quantize(4, stochastic=True, feedback=None, min_numel=0),
        lambda: RandomK(0.2, feedback=None, min_numel=0),
    ],
)
def test_unbiased_by_z_test(make):
    compressor, draws = make(), 50 * 30
    matrix = randn(6, 10, seed=5)
    samples = many(compressor, matrix, 30)
    # At least a hundredth: an element next to a level may be rounded alike in all draws.
    z = (samples.mean(0) - matrix) / (samples.std(0).clamp_min(1e-2) / draws**0.5)
    assert z.abs().max() < 4.5, "60 elements: |z| > 4.5 has probability 4e-4"
    assert z.square().mean() == pytest.approx(1, abs=0.7)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantization_error_is_within_a_level(bits):
    matrix = randn(30, 100, dtype=torch.float32) * torch.logspace(-20, 10, 30).unsqueeze(1)
    compressor = Quantize(bits, feedback=None)
    rows = matrix.view(1, -1)
    back = compressor.unpack(compressor.pack(rows), rows.shape[1], torch.float32)
    extent = 504 if bits > 2 else 512
    groups, found = (torch.nn.functional.pad(some, (0, 6 * extent - 3000)).view(6, extent) for some in (rows, back))
    level = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (2**bits - 1)
    # Scale and bias of 4 bits have 11 bits themselves.
    assert ((found - groups).abs() <= level * (0.5001 if bits == 8 else 0.52)).all()
    assert compressor.pack(rows).shape[1] == 6 * (extent * bits // 8 + 8), "with what scales each of 6 groups"


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_fused_kernels_and_single_operations_give_the_same_bits(bits):
    """On a rank that lacks the kernels, or on a device; and both see what is not finite, which the kernels may hide."""
    rows = randn(8, 512, dtype=torch.float32) * torch.logspace(-18, 30, 8).unsqueeze(1)
    rows[2] = 0
    rows[3] = 7.25
    rows[4].div_(rows[4].max() - rows[4].min()).mul_(0.99 * 2**-20)  # with 8 bits enlarged, and the next row not
    rows[5].div_(rows[5].max() - rows[5].min()).mul_(1.01 * 2**-20)
    fused, single = (torch.zeros(8, rowwise.packed_bytes(512, bits), dtype=torch.uint8) for _ in range(2))
    rest, other_rest = rows.clone(), rows.clone()
    rowwise.encode_rows(rest.view(-1), fused, bits, rest=True)
    with patched(rowwise, "_FUSED", False):
        rowwise.encode_rows(other_rest.view(-1), single, bits, rest=True)
        back = torch.empty(8 * 512)
        rowwise.decode_rows(fused, back, bits)
    assert torch.equal(fused, single)
    assert torch.equal(rest, other_rest)
    torch.testing.assert_close(rest, rows - back.view(8, 512), rtol=0, atol=0)
    assert rest[2].count_nonzero() == 0
    level = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
    assert (rest.abs().amax(1) <= level * (0.506 if bits == 8 else 0.52)).all()
    with patched(rowwise, "_TAKES_ENDS", False):  # as before torch 2.10
        rowwise.encode_rows(rows.clone().view(-1), single, bits)
    assert torch.equal(fused, single)
    for is_fused, takes_ends in ((True, rowwise._TAKES_ENDS), (True, False), (False, False)):
        for value in (torch.nan, torch.inf, -torch.inf):
            poisoned = rows.clone()
            poisoned[5, 77] = value
            with patched(rowwise, "_FUSED", is_fused), patched(rowwise, "_TAKES_ENDS", takes_ends):
                rowwise.encode_rows(poisoned.view(-1), fused, bits)
            assert not rowwise.scales(fused, bits).isfinite().all(), (is_fused, takes_ends, value)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_mean_of_what_ranks_sent_is_that_of_each_decoded(bits):
    """By one kernel for all ranks and by single operations, also where n is no multiple of a group."""
    n = 512 * 700 - 300
    for ranks in (1, 2, 3):
        packed = torch.empty(ranks, 700, rowwise.packed_bytes(512, bits), dtype=torch.uint8)
        mean, single, one, total = torch.empty(4, n)
        total.zero_()
        for rank in range(ranks):
            rowwise.encode_rows(randn(n, seed=rank, dtype=torch.float32), packed[rank], bits)
            rowwise.decode_rows(packed[rank], one, bits)
            total += one
        joined = torch.nn.functional.pad(packed.flatten(1), (4, 8))[:, 4:-8].view(packed.shape)
        with patched(rowwise, "_HOST_NUMBERS", 1 << 16):
            rowwise.decode_mean(joined, mean, bits)
            with patched(rowwise, "_FUSED", False):
                rowwise.decode_mean(packed, single, bits)
        torch.testing.assert_close(mean, total / ranks, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(single, total / ranks, rtol=1e-6, atol=1e-6)


@distributed(world_size=2)
def test_two_ranks_round_once(group):
    """Both get the mean of both encodings, in the same bits, and keep what their own encoding has lost."""
    compressor, codec = Quantize(8, min_numel=0), Quantize(8, feedback=None)
    residuals = [torch.zeros(1, 3000) for _ in range(2)]
    for number in range(3):
        inputs = [randn(1, 3000, seed=10 * number + rank, dtype=torch.float32) for rank in range(2)]
        sums = [residual + gradient for residual, gradient in zip(residuals, inputs)]
        sent = [codec.unpack(codec.pack(total), 3000, torch.float32) for total in sums]
        residuals = [total - part for total, part in zip(sums, sent)]
        named = {"weight": inputs[group.rank].clone().view(60, 50)}
        assert compressor.reduce_(named, group)
        torch.testing.assert_close(named["weight"].view(1, -1), (sent[0] + sent[1]) / 2, rtol=1e-6, atol=1e-6)
        kept = compressor.memory.read("residual", "weight", torch.device("cpu"), (60, 50))
        torch.testing.assert_close(kept.view(1, -1), residuals[group.rank], rtol=0, atol=1e-6)
        everyone = comm.all_gather(named["weight"][None], group)
        assert torch.equal(everyone[0], everyone[1])


def test_eight_bits_beat_fp32_at_any_world_size():
    shapes = {"w": (4096, 4096)}
    for world_size in (2, 8, 16, 64, 1024):
        ratio = Dense().wire_bytes(shapes, world_size) / Quantize(8).wire_bytes(shapes, world_size)
        assert ratio == pytest.approx(4, rel=0.02)
        assert Dense().wire_bytes(shapes, world_size) / Sign().wire_bytes(shapes, world_size) > 28


def test_sign_is_the_scaled_sign():
    matrix = randn(20, 33, dtype=torch.float32)
    matrix[0, 0] = 0
    sent = reduced(Sign(feedback=None, min_numel=0), matrix)
    expected = torch.where(matrix >= 0, 1.0, -1.0) * matrix.abs().mean()
    torch.testing.assert_close(sent, expected)


# ------------------------------------------------------------------------------------------- error feedback


def test_raw_vectors_leave_no_residual():
    compressor = PowerSGD(1, min_numel=0)
    for step in range(20):
        compressor.reduce_({"w": randn(8, 8, seed=step), "b": randn(8, seed=step)}, ALONE)
    assert set(compressor.state_dict()["residual"]) == {"w"}


def test_decayed_feedback_follows_its_equation():
    compressor, residual = TopK(0.1, feedback="decayed", decay=0.25, min_numel=0), torch.zeros(10, 10).double()
    for step in range(4):
        gradient = randn(10, 10, seed=step)
        sent = reduced(compressor, gradient)
        residual = 0.25 * residual + 0.75 * (gradient + residual - sent)
        torch.testing.assert_close(compressor.state_dict()["residual"]["weight"], residual)


def test_fading_feedback_follows_its_equation():
    compressor, residual = TopK(0.1, feedback="fading", decay=0.75, min_numel=0), torch.zeros(10, 10).double()
    for step in range(4):
        gradient = randn(10, 10, seed=step)
        residual = 0.75 * residual + gradient
        residual -= reduced(compressor, gradient)
        torch.testing.assert_close(compressor.state_dict()["residual"]["weight"], residual)


def test_momentum_before_ef21_is_a_running_mean_of_gradients():
    with_momentum = TopK(0.1, feedback="ef21", momentum=0.75, min_numel=0)
    without, velocity = TopK(0.1, feedback="ef21", min_numel=0), None
    for step in range(4):
        gradient = randn(10, 10, seed=step)
        velocity = gradient.clone() if velocity is None else 0.75 * velocity + 0.25 * gradient
        torch.testing.assert_close(reduced(with_momentum, gradient), reduced(without, velocity.clone()))
    small = {"b": randn(8, seed=1)}
    for _ in range(3):  # the plain mean of the same gradient is that gradient
        found = {"b": small["b"].clone()}
        with_momentum.reduce_(found, ALONE)
        torch.testing.assert_close(found, small)


@distributed(world_size=2)
def test_ef21_tracks_the_mean_of_the_ranks_estimates(group):
    compressor = TopK(0.3, feedback="ef21", min_numel=0)
    steady = randn(6, 6, seed=group.rank)
    for _ in range(4):
        gradient = steady.clone()
        compressor.reduce_({"w": gradient}, group)
    mean = (randn(6, 6, seed=0) + randn(6, 6, seed=1)) / 2
    torch.testing.assert_close(gradient, mean, rtol=0, atol=1e-12)  # 4 x 0.3 > 1: every element has been sent
    torch.testing.assert_close(compressor.state_dict()["estimate"]["w"], steady, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------- schedules, policies, composition


def test_schedule():
    assert [StepValue({0: 4, 3: 2})(step) for step in (0, 2, 3, 9)] == [4, 4, 2, 2]
    warm = StepValue.warm_up(0.001, steps=100)
    assert [round(warm(step), 4) for step in (0, 25, 50, 75, 100, 10**6)] == [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    ranks = StepValue.warm_up(4, steps=30, start=32, stages=3)
    assert ranks.values == {0: 32, 10: 16, 20: 8, 30: 4}
    assert all(isinstance(rank, int) for rank in PowerSGD(ranks).rank.values.values())
    with pytest.raises(ValueError, match="begin at step 0"):
        StepValue({1: 0.1})


def test_density_warm_up_and_start_step_count_committed_steps():
    compressor = TopK(StepValue({0: 0.5, 1: 0.1}), start_step=1, min_numel=0)
    matrix = randn(10, 10)
    assert torch.equal(reduced(compressor, matrix), matrix)
    assert not compressor.reduce_({"weight": torch.full((10, 10), float("nan"))}, ALONE)
    assert torch.count_nonzero(reduced(compressor, matrix)) == 10


def test_the_first_matching_rule_decides():
    power, topk = PowerSGD(2), TopK(0.1)
    policy = Policy({"*.bias": None, "embed*": topk, "head": None, "*": power}, min_numel=100)
    big = (100, 100)
    assert policy.method("embed.weight", big, 0) is topk
    assert policy.method("layer.weight", big, 0) is power
    assert isinstance(policy.method("head", big, 0), Dense)
    assert isinstance(policy.method("layer.bias", big, 0), Dense)
    assert isinstance(policy.method("layer.weight", (9, 9), 0), Dense)
    with pytest.raises(TypeError, match="compressors or None"):
        Policy({"*": "powersgd"})


@pytest.mark.parametrize(
    "compose",
    [
        lambda: Sign() | TopK(0.1),
        lambda: Quantize(8) | Cast("bf16"),
        lambda: TopK(0.1) | PowerSGD(1),
        lambda: TopK(0.1) | Sign(),
        lambda: TopK(0.1) | Quantize(8) | Cast("bf16"),
        lambda: TopK(0.1) | Quantize(8, start_step=3),
        lambda: TopK(0.1) | Quantize(8, feedback="ef21"),
        lambda: PowerSGD(2) | Cast("bf16", feedback="classic"),
        lambda: TopK(0.1) | Quantize(8, min_numel=10),
        lambda: TopK(0.1, values=Sign()),
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: TopK(float("nan")),
        lambda: TopK(0.1, decay=0.9),
        lambda: TopK(0.1, feedback="fading", momentum=0.9),
        lambda: TopK(0.1, feedback="decayed", decay=1.0),
        lambda: TopK(0.1, momentum=-0.1),
        lambda: Dense(momentum=1.0),
        lambda: TopK(0.1, min_numel=-1),
        lambda: Policy({"*": None}, min_numel=-1),
        lambda: StepValue.warm_up(0.1, steps=10, stages=0),
        lambda: StepValue.warm_up(0.1, steps=-1),
        lambda: StepValue.warm_up(0, steps=10),
        lambda: RandomK(StepValue({0: 0.1, 2: 2.0})),
        lambda: PowerSGD(0),
        lambda: Quantize(3),
        lambda: TopK(0.1, chunk=1),
        lambda: TopK(0.1, chunk=1 << 17),
        lambda: Cast("int8"),
        lambda: TopK(0.1, feedback="magic"),
        lambda: TopK(0.1, start_step=-1),
        lambda: BlockTopK(0.1, block=0),
    ],
)
def test_what_makes_no_sense_is_refused_at_construction(compose):
    with pytest.raises(ValueError, match="`|one encoding of values|momentum|start_step"):
        compose()


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: TopK("0.1"), "ratio"),
        (lambda: TopK(None), "ratio"),
        (lambda: TopK(True), "ratio"),
        (lambda: TopK(StepValue({0: "0.1"})), r"values\[0\]"),
        (lambda: PowerSGD("4"), "rank"),
        (lambda: PowerSGD(2.5), "rank"),
        (lambda: PowerSGD(float("inf")), "rank"),
        (lambda: PowerSGD(StepValue({0: 8, 10: 2.5})), "rank"),
        (lambda: PowerSGD(4, alternate="classic"), "alternate"),
        (lambda: PowerSGD(4, seed=None), "seed"),
        (lambda: RandomK(0.1, seed=1.5), "seed"),
        (lambda: Sign(start_step="5"), "start_step"),
        (lambda: Sign(start_step=2.5), "start_step"),
        (lambda: Sign(min_numel=None), "min_numel"),
        (lambda: Sign(feedback="decayed", decay="x"), "decay"),
        (lambda: BlockTopK(0.1, block=2.5), "block"),
        (lambda: TopK(0.1, chunk=64.0), "chunk"),
        (lambda: Quantize("8"), "bits"),
        (lambda: Quantize(8, stochastic=None), "stochastic"),
        (lambda: Cast(None), "dtype"),
        (lambda: StepValue({0: 0.5, "3": 0.2}), "step"),
        (lambda: StepValue(0.5), "`values` of `StepValue` must be a mapping"),
        (lambda: StepValue.warm_up(0.1, steps=10.0), "steps"),
        (lambda: Policy(PowerSGD(4)), "rules"),
        (lambda: Policy(None), "rules"),
        (lambda: Policy({1: PowerSGD(4)}), "rules"),
        (lambda: Policy({"*": None}, min_numel="5"), "min_numel"),
        (lambda: TopK(0.1, values="bf16"), "TopK"),
        (lambda: TopK(0.1) | None, "TopK"),
        (lambda: TopK(0.1) | Quantize, "TopK"),
    ],
)
def test_wrong_types_are_refused_by_name(make, argument):
    with pytest.raises(TypeError, match=argument + ".* got "):
        make()


def test_numbers_of_numpy_are_numbers():
    shapes = {"w": (100, 100)}
    assert TopK(np.float32(0.5)).wire_bytes(shapes, 2) == TopK(0.5).wire_bytes(shapes, 2)
    assert PowerSGD(np.int64(4)).wire_bytes(shapes, 2) == PowerSGD(4).wire_bytes(shapes, 2)


@pytest.mark.parametrize(
    "text",
    [
        "TopK(ratio=0.1) | Quantize(8)",
        "TopK(ratio=0.1, chunk=4096) | Quantize(2)",
        "TopK(ratio=0.1, feedback='decayed', decay=0.25, start_step=5, min_numel=0)",
        "RandomK(ratio=0.1, feedback=None, seed=3) | Cast('fp16')",
        "BlockTopK(ratio=0.1, block=64, momentum=0.9)",
        "PowerSGD(rank=StepValue({0: 8, 10: 2}), alternate=True, feedback='ef21') | Quantize(4, stochastic=True)",
        "PowerSGD(rank=4)",
        "Cast('bf16', feedback='classic')",
        "Quantize(4, stochastic=True, seed=1)",
        "Sign(feedback=None)",
        "Dense()",
        "Dense(momentum=0.9)",
        "Policy({'*.bias': None, '*': TopK(ratio=0.1) | Cast('bf16')}, min_numel=100)",
    ],
)
def test_shown_as_it_was_made(text):
    assert repr(eval(text)) == text


def test_composition_leaves_its_parts_alone():
    base = TopK(0.1)
    both = base | Quantize(8)
    shapes = {"w": (100, 100)}
    assert (
        both.wire_bytes(shapes, 4) == TopK(0.1, values=Quantize(8)).wire_bytes(shapes, 4) < base.wire_bytes(shapes, 4)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Quantize(4, stochastic=True, min_numel=1),
        lambda: TopK(0.5, min_numel=1) | Quantize(8, stochastic=True),
        lambda: PowerSGD(2, min_numel=1) | Quantize(8, stochastic=True),
    ],
)
def test_what_is_drawn_for_a_parameter_does_not_depend_on_its_company(make):
    """Tensor-parallel ranks that hold it alike may hold other shards beside it."""
    group, found = Group.alone("alone"), []
    for company in ({}, {"a": torch.ones(16, 12), "z": torch.ones(16, 12)}):
        gradient = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))
        make().reduce_({"m": gradient, **company}, group)
        found.append(gradient)
    assert torch.equal(*found)


# -------------------------------------------------------------------------------------------- compression error


def test_the_compression_error_is_measured_when_asked_for():
    compressor, matrix = TopK(0.1, feedback=None, min_numel=0), randn(20, 20)
    compressor.sample_every = 2
    sent = reduced(compressor, matrix)
    error = ((sent - matrix).norm() / matrix.norm()).item()
    assert compressor.last_error.report()["relative_error"] == pytest.approx(error)
    assert compressor.last_error.report()["cosine"] == pytest.approx((1 - error**2) ** 0.5)
    first = compressor.last_error
    reduced(compressor, matrix * 2)
    assert compressor.last_error is first
    assert reduced(Dense(), matrix).equal(matrix)
