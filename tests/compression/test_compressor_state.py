"""States that are damaged, of another compressor, or of a model cut otherwise."""

import copy
import warnings

import pytest
import torch

from lightning_parallel import Policy, PowerSGD, Quantize, Sign, TopK, comm
from lightning_parallel.compression import Cast, Reducer
from tests.harness import distributed

SMALL = {"min_numel": 1}
ALONE = comm.Group.alone("alone")


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(24, 16, generator=generator) for name in ("a", "b")}


def trained(compressor: Reducer, steps=3):
    for step in range(steps):
        compressor.reduce_(gradients(step), ALONE)
    return compressor


def state_of(compressor: Reducer):
    return trained(compressor).state_dict()


def with_entry(state, slot, name, change):
    changed = copy.deepcopy(state)
    changed[slot][name] = change(changed[slot][name])
    return changed


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


STATE = state_of(PowerSGD(2, **SMALL))
DAMAGED = {
    "none": (None, "compression state must have version 1; got None"),
    "version": ({**STATE, "version": 7}, "have version 1; got 7"),
    "no step": (without(STATE, "step"), "must have `step`"),
    "nan": (
        with_entry(STATE, "residual", "a", lambda tensor: tensor * float("nan")),
        "`residual` of `a`.*must be finite",
    ),
    "no tensor": (with_entry(STATE, "residual", "b", lambda _: {}), "`residual` of `b`.*must be finite"),
    "no states": ([], r"have version 1; got \[\]"),
    "ranks": ([STATE, STATE], "ranks must be 1, .*got 2 states"),
    "one of two": ([STATE, with_entry(STATE, "residual", "a", lambda tensor: tensor * float("nan"))], "must be finite"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_states_are_refused(case):
    state, message = DAMAGED[case]
    compressor = trained(PowerSGD(2, **SMALL))
    before = compressor.state_dict()
    with pytest.raises(ValueError, match=message):
        compressor.load_state_dict(state, ALONE)
    assert compressor.step == before["step"]
    assert all(
        torch.equal(before["residual"][name], tensor) for name, tensor in compressor.state_dict()["residual"].items()
    )


@pytest.mark.parametrize("slot", ["residual", "right"])
def test_shapes_of_another_model_are_named(slot):
    compressor = PowerSGD(2, **SMALL)
    compressor.load_state_dict(with_entry(STATE, slot, "a", lambda tensor: tensor[..., 1:]), ALONE)
    with pytest.raises(ValueError, match=f"`{slot}` of `a`.*24x16; got 24x15" if slot == "residual" else slot):
        compressor.reduce_(gradients(0), ALONE)


def test_another_compressor_takes_what_it_understands():
    residual = STATE["residual"]["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (TopK(0.1, **SMALL), Policy({"*": Quantize(4, feedback="classic", **SMALL)})):
            other.load_state_dict(STATE, ALONE)
            assert set(other.state_dict()) & {"residual", "right"} == {"residual"}
            assert torch.equal(other.state_dict()["residual"]["a"], residual)
    for other in (TopK(0.1, feedback="ef21", **SMALL), Cast("bf16")):
        with pytest.warns(UserWarning, match="`residual`, which this compressor does not use"):
            other.load_state_dict(STATE, ALONE)
        assert other.residual_norm == 0


def test_both_residuals_of_signs_go_into_one():
    state = state_of(Sign(**SMALL))
    other = TopK(0.1, **SMALL)
    other.load_state_dict(state, ALONE)
    server = state["server_residual"]["a"].flatten()[: 24 * 16].view(24, 16)
    assert server.any()
    torch.testing.assert_close(other.state_dict()["residual"]["a"], state["residual"]["a"] + server)


@pytest.mark.parametrize("make", [lambda: TopK(0.1, momentum=0.5), lambda: PowerSGD(2, alternate=True), Sign])
def test_memory_that_left_the_device_goes_on_bit_for_bit(make):
    reducers = make(), make()
    for step in range(6):
        draws = [torch.Generator().manual_seed(step) for _ in reducers]
        named = [{name: torch.randn(40, 50, generator=one) for name in "ab"} for one in draws]
        for reducer, gradients in zip(reducers, named):
            assert reducer.reduce_(gradients, ALONE)
        assert all(torch.equal(named[0][name], named[1][name]) for name in "ab")
        before = reducers[1].memory.num_bytes
        reducers[1].leave_device()
        assert reducers[1].memory.num_bytes <= before
    assert reducers[1].memory.num_bytes < reducers[0].memory.num_bytes, "no second buffers"


@distributed(world_size=2)
def test_other_ranks_and_compressors_go_on_from_the_mean_with_the_chunks_of_all_ranks(group):
    signs = Sign(**SMALL)
    for step in range(2):
        signs.reduce_(gradients(10 * step + group.rank), group)
    states = comm.all_gather_object(signs.state_dict(), group)
    mean = {}
    for name in ("a", "b"):
        chunks = torch.cat([state["server_residual"][name] for state in states]).flatten()[: 24 * 16]
        mean[name] = sum(state["residual"][name] for state in states) / 2 + chunks.view(24, 16)
    alone = Sign(**SMALL)
    alone.load_state_dict(states, ALONE)
    torch.testing.assert_close(alone.state_dict()["residual"], mean)
    assert "server_residual" not in alone.state_dict()
    # Among as many ranks each keeps its own, and a compressor without chunks takes them into its residuals.
    for saved in (states[group.rank], states):
        same, other = Sign(**SMALL), TopK(0.1, **SMALL)
        same.load_state_dict(saved, group)
        assert same.state_dict().keys() == signs.state_dict().keys()
        torch.testing.assert_close(same.state_dict()["residual"], states[group.rank]["residual"], rtol=0, atol=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(saved, group)
        for name, residual in other.state_dict()["residual"].items():
            torch.testing.assert_close(comm.all_reduce(residual, group) / 2, mean[name])


@distributed(world_size=2)
def test_a_mean_without_residuals_forgets_the_chunks(group):
    compressor, alone = Sign(feedback="ef21", **SMALL), Sign(feedback="ef21", **SMALL)
    compressor.reduce_(gradients(group.rank), group)
    alone.load_state_dict(comm.all_gather_object(compressor.state_dict(), group), ALONE)
    assert {"estimate", "mean_estimate"} <= alone.state_dict().keys()
    assert "server_residual" not in alone.state_dict()
