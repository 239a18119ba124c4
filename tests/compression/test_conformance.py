"""What every compressor promises: the core on every one, the rest on those that meet each option with each family."""

import contextlib
import io
import random
from functools import partial

import numpy as np
import pytest
import torch

from lightning_parallel import comm
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
    thin_products,
)
from tests.harness import distributed, recorded_communication, run

SMALL = {"min_numel": 16}
COMPRESSORS = {
    "dense": Dense,
    "cast": lambda: Cast("bf16", **SMALL),
    "cast_feedback": lambda: Cast(torch.float16, feedback="classic", **SMALL),
    "topk": lambda: TopK(0.1, **SMALL),
    "topk_int8": lambda: TopK(0.1, **SMALL) | Quantize(8),
    "topk_chunks_int2": lambda: TopK(0.2, chunk=48, feedback="fading", **SMALL) | Quantize(2),
    "topk_bf16": lambda: TopK(0.1, **SMALL) | Cast("bf16"),
    "topk_ef21": lambda: TopK(0.1, feedback="ef21", **SMALL),
    "topk_ef21_momentum": lambda: TopK(0.1, feedback="ef21", momentum=0.9, **SMALL),
    "topk_fading": lambda: TopK(0.1, feedback="fading", **SMALL),
    "topk_decayed": lambda: TopK(0.1, feedback="decayed", **SMALL),
    "dgc": lambda: TopK(StepValue.warm_up(0.05, 3), momentum=0.9, **SMALL),
    "randomk": lambda: RandomK(0.1, **SMALL),
    "randomk_plain": lambda: RandomK(0.1, feedback=None, **SMALL),
    "randomk_int4": lambda: RandomK(0.3, **SMALL) | Quantize(4),
    "blocktopk": lambda: BlockTopK(0.2, block=8, **SMALL),
    "blocktopk_int8": lambda: BlockTopK(0.2, block=5, **SMALL) | Quantize(8),
    "int8": lambda: Quantize(8, **SMALL),
    "int4": lambda: Quantize(4, **SMALL),
    "int2": lambda: Quantize(2, **SMALL),
    "int4_stochastic": lambda: Quantize(4, stochastic=True, feedback=None, **SMALL),
    "sign": lambda: Sign(**SMALL),
    "powersgd": lambda: PowerSGD(2, **SMALL),
    "powersgd_ef21": lambda: PowerSGD(2, feedback="ef21", **SMALL),
    "powersgd_ranks": lambda: PowerSGD(StepValue({0: 4, 2: 1, 3: 3}), **SMALL),
    "powersgd_int8": lambda: PowerSGD(2, **SMALL) | Quantize(8),
    "alternating": lambda: PowerSGD(2, alternate=True, **SMALL),
    "alternating_bf16": lambda: PowerSGD(2, alternate=True, **SMALL) | Cast("bf16"),
    "late": lambda: TopK(0.1, start_step=2, **SMALL),
    "policy": lambda: Policy(
        {"conv": None, "a.*": Sign(**SMALL), "odd": Quantize(8, **SMALL), "*": PowerSGD(1, **SMALL) | Cast("bf16")}
    ),
}
# The result is a linear function of the gradients, so it does not depend on how the ranks share them.
LINEAR = {"dense", "randomk", "randomk_plain", "powersgd", "powersgd_ranks", "alternating"}
REPRESENTATIVES = (
    *("dense", "cast_feedback", "topk_int8", "topk_ef21", "dgc", "late", "randomk_int4", "blocktopk"),
    *("int4_stochastic", "sign", "powersgd_ranks", "powersgd_ef21", "alternating_bf16", "policy"),
)
every_compressor = pytest.mark.parametrize("name", COMPRESSORS)
representatives = pytest.mark.parametrize("name", REPRESENTATIVES)
SHAPES = {"a.weight": (12, 10), "b.weight": (12, 10), "bias": (12,), "conv": (6, 4, 3, 3), "scalar": (), "odd": (7, 9)}


def gradients(step, rank, dtype=torch.float32, shapes=SHAPES):
    draws = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def mean_gradients(step, world_size, dtype=torch.float32):
    everyone = [gradients(step, rank, dtype) for rank in range(world_size)]
    return {name: sum(g[name] for g in everyone) / world_size for name in SHAPES}


def memory_of(reducer, slot, like):
    held = reducer.state_dict().get(slot, {})
    return {name: held.get(name, torch.zeros_like(tensor)) for name, tensor in like.items()}


def mean_memory(reducer, like, group):
    """The mean of the residuals over the ranks, with what owners of parts of the mean hold."""
    held = memory_of(reducer, "residual", like)
    mean = comm.all_reduce(torch.cat([value.flatten() for value in held.values()]), group) / group.size
    parts = mean.split([value.numel() for value in held.values()])
    means = {name: part.view_as(value) for (name, value), part in zip(held.items(), parts)}
    for name, part in reducer.state_dict().get("server_residual", {}).items():
        whole = comm.all_gather(part, group).flatten()[: means[name].numel()]
        means[name] = means[name] + whole.view_as(means[name])
    return means


def steps_of(reducer, steps, group, start=0):
    outputs = []
    for step in range(start, start + steps):
        grads = gradients(step, group.rank)
        with reducer.begin(group) as transaction:
            transaction.reduce_(grads)
            assert transaction.commit()
        outputs.append(grads)
    return outputs


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# --------------------------------------------------------------------------------------------------- the mean


def _conserves(name, group):
    """Inputs + old residual = sent + new residual, in the mean over ranks; in fp64, hence no rounding of the sum."""
    reducer = COMPRESSORS[name]()
    summed_in_half = "cast" in name or "bf16" in name or name == "policy"
    new = mean_memory(reducer, gradients(0, 0, torch.float64), group)
    for step in range(5):
        grads, old = gradients(step, group.rank, torch.float64), new
        reducer.reduce_(grads, group)
        new = mean_memory(reducer, grads, group)
        inputs = mean_gradients(step, group.size, torch.float64)
        for key in SHAPES:
            error = (inputs[key] + old[key] - grads[key] - new[key]).abs().max()
            assert error < (0.1 if summed_in_half else 1e-12), (key, step, error)


LOSSY = {
    "topk_ef21_momentum",
    "topk_fading",
    "topk_chunks_int2",
    "cast",
    "topk_ef21",
    "powersgd_ef21",
    "topk_decayed",
    "dgc",
    "randomk_plain",
    "int4_stochastic",
}


@pytest.mark.parametrize("name", sorted(COMPRESSORS.keys() - LOSSY))
@distributed(world_size=2)
def test_nothing_is_lost(name, group):
    _conserves(name, group)


@distributed(world_size=3)
def test_nothing_is_lost_in_two_phases(group):
    for name in ("int8", "int4", "sign"):
        _conserves(name, group)


@pytest.mark.parametrize("name", sorted(LINEAR))
@distributed(world_size=2)
def test_linear_ones_do_not_see_how_gradients_are_spread(name, group):
    reducer, alone = COMPRESSORS[name](), COMPRESSORS[name]()
    for step in range(5):
        grads, means = gradients(step, group.rank, torch.float64), mean_gradients(step, group.size, torch.float64)
        reducer.reduce_(grads, group)
        alone.reduce_(means, comm.Group.alone("alone"))
        for key in SHAPES:
            torch.testing.assert_close(grads[key], means[key], rtol=0, atol=1e-10)


@representatives
@distributed(world_size=2)
def test_buckets_of_a_step_equal_one_call(name, group):
    whole, parts = COMPRESSORS[name](), COMPRESSORS[name]()
    for step in range(4):
        expected, grads = gradients(step, group.rank), gradients(step, group.rank)
        whole.reduce_(expected, group)
        names = list(grads)[:: -1 if step % 2 else 1]
        with parts.begin(group) as transaction:
            for bucket in (names[:2], names[2:3], names[3:]):
                transaction.reduce_({key: grads[key] for key in bucket})
            assert transaction.commit()
        if isinstance(whole, PowerSGD):  # batched and single products may differ in the last bit
            for key in SHAPES:
                torch.testing.assert_close(grads[key], expected[key], rtol=1e-4, atol=1e-4)
        elif name not in ("int4_stochastic", "policy"):
            assert_equal(grads, expected)


# --------------------------------------------------------------------------------------------------- the wire


OTHER_DTYPES = [
    *((name, torch.float64) for name in ("dense", "topk_int8", "randomk", "alternating")),
    *((name, torch.bfloat16) for name in ("cast", "topk", "blocktopk", "sign")),
]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in COMPRESSORS), *OTHER_DTYPES])
@distributed(world_size=3)
def test_bytes_told_are_bytes_sent_and_replicas_stay_bitwise_equal(name, dtype, group):
    reducer = COMPRESSORS[name]()
    for step in range(4):
        told, grads = reducer.wire_bytes(SHAPES, group.size, step, dtype), gradients(step, group.rank, dtype)
        with recorded_communication() as records, reducer.begin(group) as transaction:
            transaction.reduce_(grads)
            assert transaction.commit()
        counted = sent_by_ring(records)
        if group.rank == 0:  # others may send a padding less
            assert told == counted
            assert sum(block.sent_bytes for block in reducer.blocks) == pytest.approx(counted, abs=4)
        whole = torch.cat([gradient.flatten() for gradient in grads.values()])
        assert torch.equal(comm.all_gather(whole[None], group), whole.expand(group.size, -1))


def sent_by_ring(records):
    """Bytes that one rank sends for recorded collectives, whose bytes are those of the whole result."""
    passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
    return round(
        sum(passes[record.op] * record.bytes * (len(record.ranks) - 1) / len(record.ranks) for record in records)
    )


@distributed(world_size=2)
def test_a_bucket_takes_no_more_collectives_than_its_method_has_phases(group):
    phases = {"dense": 1, "topk": 2, "randomk": 1, "blocktopk": 2, "int8": 2, "powersgd": 2, "alternating": 1}
    for name, count in phases.items():
        reducer = COMPRESSORS[name]()
        steps_of(reducer, 1, group)
        with recorded_communication() as records:
            steps_of(reducer, 1, group, start=1)
        assert len(records) == count, (name, records)


MANY_SHAPES = {f"w{n}": (17 + n, 40 - n) if n % 4 else (9 + n, 2, 3, 4) for n in range(12)}
FILLED_UP = {
    "plain": {},
    "alternating": {"alternate": True},
    "rank 1 without feedback": {"rank": 1, "feedback": None},
    "decayed, cast": {"feedback": "decayed", "values": Cast("fp32")},
}


@pytest.mark.parametrize("is_device", [False, True])
@distributed(world_size=2)
def test_small_matrices_filled_up_with_zeros_equal_each_matrix_alone(is_device, group):
    for name, options in FILLED_UP.items():
        in_pieces = patched(thin_products, "_PRODUCTS", 1 << (10 if name == "alternating" else 18))
        with in_pieces, patched(thin_products, "launches_kernels", lambda tensor: is_device and not tensor.is_meta):
            _assert_filled_up_equals_alone(partial(PowerSGD, **{"rank": 2, **SMALL, **options}), name, group)


def _assert_filled_up_equals_alone(make, name, group):
    together, resumed, alone = make(), make(), make()
    # A dropped step leaves no trace, also not in the zeros.
    together.expects_rollback = True
    for step in range(4):
        grads = gradients(step, group.rank, torch.float64, MANY_SHAPES)
        single = {key: tensor.clone() for key, tensor in grads.items()}
        bad = {key: tensor.clone().fill_(torch.nan) for key, tensor in grads.items()}
        assert not together.reduce_(bad, group)
        told = together.wire_bytes(MANY_SHAPES, group.size, step, torch.float64)
        with together.begin(group) as transaction, recorded_communication() as records:
            transaction.reduce_(grads)
            assert transaction.commit()
        assert step == 0 or sent_by_ring(records) == told
        assert len(together.blocks) < 5
        with alone.begin(group) as transaction:
            for key, tensor in single.items():
                transaction.reduce_({key: tensor})
            assert transaction.commit()
        for key, tensor in single.items():
            torch.testing.assert_close(grads[key], tensor, rtol=1e-10, atol=1e-11, msg=f"{name}, {key}, step {step}")
        if step > 1:  # from the state by name, which holds no zeros
            copy = gradients(step, group.rank, torch.float64, MANY_SHAPES)
            assert resumed.reduce_(copy, group)
            assert_equal(copy, grads)
        elif step == 1:
            resumed.load_state_dict(together.state_dict(), group)
    expected = alone.state_dict()
    for slot, held in together.state_dict().items():
        for key, value in held.items() if isinstance(held, dict) else ():
            torch.testing.assert_close(value, expected[slot][key], rtol=1e-9, atol=1e-10)


# -------------------------------------------------------------------------------------------------- the state


@every_compressor
@distributed(world_size=2)
def test_resumes_bit_for_bit(name, group):
    straight, first = COMPRESSORS[name](), COMPRESSORS[name]()
    expected = steps_of(straight, 6, group)
    steps_of(first, 3, group)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = COMPRESSORS[name]()
    resumed.load_state_dict(torch.load(file, weights_only=True), group)
    assert resumed.step == 3
    for ours, theirs in zip(steps_of(resumed, 3, group, start=3), expected[3:]):
        assert_equal(ours, theirs)
    again = COMPRESSORS[name]()
    again.load_state_dict(comm.all_gather_object(first.state_dict(), group), group)
    for ours, theirs in zip(steps_of(again, 3, group, start=3), expected[3:]):
        assert_equal(ours, theirs)


def _states_after(name, group):
    reducer = COMPRESSORS[name]()
    for step in range(3):
        reducer.reduce_(gradients(step, group.rank, torch.float64), group)
    state = reducer.state_dict()
    outputs = [gradients(step, group.rank, torch.float64) for step in range(3, 6)]
    for grads in outputs:
        reducer.reduce_(grads, group)
    return state, outputs


@representatives
def test_resumes_at_another_world_size(name):
    (first, expected), (second, _) = run(_states_after, 2, name=name)
    reducer = COMPRESSORS[name]()
    reducer.load_state_dict([first, second])
    assert reducer.step == 3
    for step, theirs in zip(range(3, 6), expected):
        ours = mean_gradients(step, 2, torch.float64)
        assert reducer.reduce_(ours)
        if name in LINEAR:
            for key in SHAPES:
                torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-10)
    held = reducer.state_dict().get("residual", {})
    assert all(tensor.shape == SHAPES[key] for key, tensor in held.items())


@distributed(world_size=2)
def test_one_ranks_state_is_refused_at_another_world_size(group):
    reducer = TopK(0.1, **SMALL)
    steps_of(reducer, 1, group)
    with pytest.raises(ValueError, match=r"must be 2, .*got 1.*the states of all ranks"):
        TopK(0.1).load_state_dict(reducer.state_dict(), comm.Group.alone("alone"))
    with pytest.raises(ValueError, match="version"):
        reducer.load_state_dict({}, group)


@representatives
def test_global_generators_are_untouched(name):
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    steps_of(COMPRESSORS[name](), 3, comm.Group.alone("alone"))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


# -------------------------------------------------------------------------------------------- the transaction


@every_compressor
@distributed(world_size=2)
def test_one_bad_gradient_leaves_no_trace(name, group):
    straight, hit = COMPRESSORS[name](), COMPRESSORS[name]()
    expected = steps_of(straight, 6, group)
    hit.expects_rollback = True
    steps_of(hit, 3, group)
    for where, value in (("a.weight", torch.inf), ("bias", torch.nan), ("conv", -torch.inf), ("odd", torch.nan)):
        grads = gradients(99, group.rank)
        if group.rank == 1:
            grads[where].view(-1)[5] = value
        names = list(grads)
        with hit.begin(group) as step:  # the first bucket is fine and must be rolled back too
            step.reduce_({key: grads[key] for key in names if key != where})
            step.reduce_({where: grads[where]})
            assert not step.commit()
        assert not grads[where].isfinite().all()
        assert not hit.reduce_({where: torch.full(SHAPES[where], value)}, group)
    assert hit.step == 3
    for ours, theirs in zip(steps_of(hit, 3, group, start=3), expected[3:], strict=True):
        assert_equal(ours, theirs)


@distributed(world_size=2)
def test_residuals_changed_in_place_begin_anew_after_a_dropped_step(group):
    """Those of the dropped step's parameters, on all ranks alike; what the last steps have left is not rolled back."""
    for name in ("powersgd", "alternating", "powersgd_int8"):
        reducer, exact = COMPRESSORS[name](), COMPRESSORS[name]()
        exact.expects_rollback = True
        for number, ours in enumerate(steps_of(reducer, 3, group)):
            assert_equal(ours, steps_of(exact, 1, group, start=number)[0])
        held = reducer.state_dict()["residual"]
        assert_equal(held, exact.state_dict()["residual"])
        assert reducer.memory.num_bytes < 0.8 * exact.memory.num_bytes
        grads = gradients(99, group.rank)
        if group.rank == 1:
            grads["a.weight"][5, 5] = torch.nan
        del grads["conv"]
        assert not reducer.reduce_(grads, group)
        left = reducer.state_dict()["residual"]
        for key, value in left.items():
            assert torch.equal(value, held[key] if key == "conv" else torch.zeros_like(value)), key
        for side in ("left", "right"):
            assert_equal(reducer.state_dict().get(side, {}), exact.state_dict().get(side, {}))
        mean = mean_memory(reducer, gradients(0, 0), group)
        for step in range(3, 6):
            inputs, [ours] = mean_gradients(step, group.size), steps_of(reducer, 1, group, start=step)
            old, mean = mean, mean_memory(reducer, ours, group)
            for key in SHAPES:
                torch.testing.assert_close(inputs[key] + old[key], ours[key] + mean[key], rtol=0, atol=1e-4)


@representatives
@distributed(world_size=2)
def test_a_changing_loss_scale_changes_nothing(name, group):
    plain, scaled = COMPRESSORS[name](), COMPRESSORS[name]()
    for step, scale in enumerate([65536.0, 65536.0, 32768.0, 1.0, 2.0**20]):
        expected, grads = gradients(step, group.rank), gradients(step, group.rank)
        plain.reduce_(expected, group)
        scaled.scale = scale
        for gradient in grads.values():
            gradient.mul_(scale)
        scaled.reduce_(grads, group)
        for key in SHAPES:
            assert torch.equal(grads[key] / scale, expected[key]), key


def test_a_step_left_early_is_rolled_back():
    reducer = TopK(0.1, **SMALL)
    steps_of(reducer, 1, comm.Group.alone("alone"))
    before = reducer.state_dict()
    with contextlib.suppress(KeyError), reducer.begin() as step:
        step.reduce_(gradients(1, 0))
        raise KeyError
    assert_equal(reducer.state_dict()["residual"], before["residual"])
    with pytest.raises(RuntimeError, match="Call `begin` for the next step"):
        step.reduce_(gradients(1, 0))


# ------------------------------------------------------------------------------------------ odd kinds of input


@representatives
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_layouts(name, dtype):
    reducer, reference = COMPRESSORS[name](), COMPRESSORS[name]()
    for step in range(3):
        grads = gradients(step, 0, dtype)
        expected = {
            key: value.to(torch.float64 if dtype == torch.float64 else torch.float32) for key, value in grads.items()
        }
        grads["conv"] = grads["conv"].to(memory_format=torch.channels_last)
        grads["odd"] = grads["odd"].t().contiguous().t()
        assert reducer.reduce_(grads)
        assert reference.reduce_(expected)
        for key, gradient in grads.items():
            assert gradient.dtype == dtype
            assert torch.equal(gradient, expected[key].to(dtype)), key


@representatives
def test_empty_unused_and_tied_gradients(name):
    reducer, reference = COMPRESSORS[name](), COMPRESSORS[name]()
    for step in range(5):
        expected = gradients(step, 0)
        grads = gradients(step, 0) | {"empty": torch.empty(0, 5)}
        grads["tied.weight"] = grads["odd"]
        if step == 2:  # unused in this step: what it owes is kept
            held = memory_of(reducer, "residual", expected)["a.weight"]
            del grads["a.weight"], expected["a.weight"]
        reducer.reduce_(grads)
        reference.reduce_(expected)
        for key, gradient in expected.items():
            torch.testing.assert_close(gradient, grads[key])
        if step == 2:
            assert torch.equal(memory_of(reducer, "residual", gradients(0, 0))["a.weight"], held)


def test_what_cannot_be_averaged_is_refused():
    for wrong in (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.complex64), torch.eye(3).to_sparse()):
        with pytest.raises(TypeError, match="floating-point dtype.*weight"):
            TopK(0.1).reduce_({"weight": wrong})


@distributed(world_size=2)
def test_different_gradients_are_refused_on_all_ranks(group):
    grads = {"x": torch.ones(4, 4), "y": torch.ones(2)}
    if group.rank:
        del grads["y"]
    with pytest.raises(ValueError, match="names, shapes"):
        PowerSGD(1).reduce_(grads, group)


def test_the_group_may_be_torchs_or_left_out():
    for result in run(_reduce_over_the_world, 2):
        assert result == [0.5] * 3


def _reduce_over_the_world(group):
    results = []
    for given in (None, torch.distributed.group.WORLD, group):
        grads = {"bias": torch.tensor([float(group.rank)])}
        Cast().reduce_(grads, given)
        results.append(grads["bias"].item())
    return results
