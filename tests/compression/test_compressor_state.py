"""States that are damaged, of another compressor, or of a model cut otherwise."""

import copy
import warnings

import pytest
import torch

from lightning_parallel import Policy, PowerSGD, Quantize, Sign, TopK, comm
from lightning_parallel.compression import Cast, Reducer
from lightning_parallel.compression.compressor_state import gather_states
from tests.harness import distributed, recorded_communication

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
    return trained(compressor).gather_state(ALONE)


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
    "no layout": (without(STATE, "layout"), "`layout` of local, stacked, mean; got the layout None"),
    "layout": ({**STATE, "layout": "bogus"}, "got the layout 'bogus'"),
    "no step": (without(STATE, "step"), "must have `step`"),
    "nan": (
        with_entry(STATE, "residual", "a", lambda tensor: tensor * float("nan")),
        "`residual` of `a`.*must be finite",
    ),
    "ranks": (
        with_entry(STATE, "residual", "b", lambda tensor: tensor.repeat(5, 1, 1)),
        "`residual` of `b`.*1 ranks; got 5",
    ),
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


@pytest.mark.parametrize("layout", ["mesh", "pieces"])
def test_states_of_cut_models_leave_the_step(layout):
    compressor = TopK(0.1, **SMALL)
    with pytest.warns(UserWarning, match=f"sharded or split model .`{layout}`.*are lost"):
        compressor.load_state_dict({"layout": layout, "step": 5, "positions": []}, ALONE)
    assert compressor.step == 5
    assert compressor.residual_norm == 0


def test_another_compressor_takes_what_it_understands():
    residual = STATE["residual"]["a"][0]
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
    torch.testing.assert_close(other.state_dict()["residual"]["a"], state["residual"]["a"][0] + server)


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


@pytest.mark.parametrize("exact", [True, False])
@distributed(world_size=2)
def test_a_state_is_gathered_between_hosts_tensor_by_tensor(exact, group):
    compressor = Sign(**SMALL)
    for step in range(2):
        compressor.reduce_(gradients(10 * step + group.rank), group)
    mine = compressor.state_dict()
    expected = {name: comm.all_gather(tensor[None].clone(), group) for name, tensor in mine["residual"].items()}
    parts = {name: comm.all_gather(tensor[None].clone(), group) for name, tensor in mine["server_residual"].items()}
    with recorded_communication() as calls:
        state = compressor.gather_state(group, exact)
    assert {call.name for call in calls} <= ({"send", "recv"} if exact else {"send", "recv", "all_reduce"})
    assert max(call.bytes for call in calls) == 24 * 16 * 4, "one tensor, not those of all ranks"
    if group.rank > 0:
        assert state == {}
        return
    for name in ("a", "b"):
        if exact:
            assert torch.equal(state["residual"][name], expected[name])
            assert torch.equal(state["server_residual"][name], parts[name])
        else:
            whole = parts[name].flatten()[: 24 * 16].view(24, 16)
            torch.testing.assert_close(state["residual"][name], expected[name].mean(0) + whole)


@distributed(world_size=3)
def test_states_of_different_parts_of_a_model_are_gathered_on_the_first_rank(group):
    def made(rank):
        generator = torch.Generator().manual_seed(rank)
        held = {
            f"stage{rank}": torch.randn(rank + 2, 3, generator=generator),
            "tied": torch.ones(rank + 1).double(),
        }
        return {"version": 1, "step": rank, "choice": "x", "residual": held} if rank != 1 else {}

    with recorded_communication() as calls:
        states = gather_states(made(group.rank), group)
    assert {call.name for call in calls} <= {"send", "recv"}
    if group.rank > 0:
        assert states == []
        return
    for rank, state in enumerate(states):
        expected = made(rank)
        assert {key: value for key, value in state.items() if key != "residual"} == {
            key: value for key, value in expected.items() if key != "residual"
        }
        for name, tensor in expected.get("residual", {}).items():
            assert torch.equal(state["residual"][name], tensor)
            assert state["residual"][name].dtype == tensor.dtype


@distributed(world_size=2)
def test_a_mean_state_without_residuals_forgets_what_parts_hold(group):
    compressor = Sign(feedback="ef21", **SMALL)
    compressor.reduce_(gradients(group.rank), group)
    state = compressor.gather_state(group, exact=False)
    assert group.rank > 0 or {"estimate", "mean_estimate"} <= state.keys()
    assert "server_residual" not in state
