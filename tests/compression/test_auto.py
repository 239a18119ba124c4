"""The choice of a compressor by the time of whole steps."""

import time
from functools import partial

import pytest
import torch

from lightning_parallel import Cast, PowerSGD, Quantize, Sign, TopK, comm
from lightning_parallel.comm import GradientSession, Group, NodeGroups
from lightning_parallel.compression import Auto, Dense, HierarchicalReducer
from tests.harness import distributed

SMALL = {"min_numel": 16}
LONG_S = 0.06


class SlowDense(Dense):
    """Plain means that take long, as on a slow link."""

    def requests(self, block, step):
        time.sleep(LONG_S)
        yield from super().requests(block, step)


class SlowTopK(TopK):
    """Takes long on one rank."""

    def compress(self, work, block, step):
        time.sleep(LONG_S * (step.group.ranks[step.group.rank] == 1))
        yield from super().compress(work, block, step)


def gradients(step, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randn(24, 16, generator=generator, dtype=dtype) for name in ("a", "b")}


def measured(auto, group, begin=0, end=100):
    """Take steps until the choice is made; return what the means lack in each, in sum."""
    reducer = auto.reducer if isinstance(auto, HierarchicalReducer) else auto
    session, lacking = GradientSession(auto, group), []
    total = {name: torch.zeros(24, 16, dtype=torch.float64) for name in ("a", "b")}
    for step in range(begin, end):
        named = gradients(step, group.rank)
        session.add(named)
        assert session.finish()
        if reducer.choice is not None:
            return lacking
        for name, tensor in named.items():
            total[name] += sum(gradients(step, rank)[name] for rank in range(group.size)) / group.size - tensor
        lacking.append(max(tensor.abs().max().item() for tensor in total.values()))
    return lacking


@distributed(world_size=2)
def test_the_fastest_is_chosen_after_the_same_steps_on_all_ranks(group):
    for dense, candidates, expected in (
        (SlowDense, [SlowTopK(0.5, **SMALL), Cast("bf16", **SMALL)], "Cast('bf16', min_numel=16)"),
        (Dense, [SlowTopK(0.5, **SMALL)], "Dense()"),
    ):
        auto = Auto(candidates, steps=3)
        auto._dense = dense()
        measured(auto, group)
        assert repr(auto.choice) == expected
        assert len(set(comm.all_gather_object(auto.verdict, group))) == 1
        assert auto.step == 2 + 3 + 5 * len(candidates) + 4 + 1, "two steps to begin with, and one after the last"
        resumed = Auto(candidates)
        resumed._dense = auto._dense
        resumed.load_state_dict(auto.state_dict(), group)
        assert resumed.choice is auto.choice
        assert resumed.verdict == auto.verdict
        again = Auto([PowerSGD(3)])
        again.load_state_dict(auto.state_dict(), group)
        assert again.choice is (again._dense if dense is Dense else None)


@pytest.mark.parametrize("nodes", [False, True])
@distributed(world_size=4)
def test_nothing_that_a_candidate_did_not_send_is_lost(nodes, group):
    candidates = [TopK(0.1, **SMALL), Sign(**SMALL), PowerSGD(2, **SMALL), Quantize(4, feedback="ef21", **SMALL)]
    auto = Auto(candidates, steps=2, min_gain=0.99)
    groups = NodeGroups.of({}, 2)
    lacking = measured(HierarchicalReducer(auto, groups) if nodes else auto, group)
    for index in range(3):
        first = 2 + 2 + 4 * index
        assert min(lacking[first : first + 3]) > 0.1
        assert lacking[first + 3] < 1e-12, "the mean of what was left, in the candidate's last step"
    assert len(set(comm.all_gather_object(auto.verdict, group))) == 1
    assert auto.is_plain
    assert not list(auto.memory.items())
    assert {type(block.method) for block in auto.blocks} == {Dense}, "what a monitor counts for plain steps"
    groups.close()


@distributed(world_size=2)
def test_a_step_that_is_dropped_is_taken_again_and_a_checkpoint_pays(group):
    auto = Auto([TopK(0.1, **SMALL)], steps=2, min_gain=0.99)
    measured(auto, group, end=6)
    assert auto.residual_norm > 0
    before = auto.step
    assert not auto.reduce_({"a": torch.full((24, 16), torch.inf)}, group)
    assert auto.step == before
    state = comm.broadcast_object(auto.gather_state(group), group)
    residual = {name: rows.mean(0) for name, rows in state["residual"].items()}
    resumed = Auto([TopK(0.1, **SMALL)], steps=2, min_gain=0.99)
    resumed.load_state_dict(state, group)
    assert not resumed.is_plain
    named = gradients(6, group.rank)
    assert resumed.reduce_(named, group)
    for name, tensor in named.items():
        true = sum(gradients(6, rank)[name] for rank in range(2)) / 2
        torch.testing.assert_close(tensor, true + residual[name])
    measured(resumed, group, begin=7)
    assert resumed.choice is not None
    measured(auto, group, begin=7)
    assert auto.choice is not None


def test_candidates_are_tried_as_they_are_after_their_warm_up():
    late = PowerSGD(2, start_step=40, **SMALL)
    auto, seen = Auto([late], min_gain=0.0, steps=2), []
    auto._dense = SlowDense()
    auto.observers.append(lambda outcome: seen.append({type(block.method) for block in outcome.blocks}))
    measured(auto, Group.alone("alone"))
    assert auto.choice is late
    assert seen[4:8] == [{PowerSGD}] * 4
    for _ in range(41 - auto.step):
        assert auto.reduce_(gradients(0, 0))
    assert seen[12:] == [{Dense}] * 28 + [{PowerSGD}]


@pytest.mark.parametrize("min_gain", [0.0, 0.999])
def test_it_prints_what_it_has_measured(min_gain, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    auto = Auto([TopK(0.5) | Quantize(8), Cast("fp32")], min_gain=min_gain, steps=1)
    step = partial(auto.reduce_, group=Group.alone("alone"))
    for _ in range(12):
        step({"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(1))})
    printed = capsys.readouterr().out
    for text in (
        "Gradient compression",
        "uncompressed",
        "TopK(ratio=0.5) | Quantize(8)",
        "Cast('fp32')",
        "ms per step",
    ):
        assert text in printed
    assert printed.count("chosen") == 2, "in one row and in the caption"
    chosen = next(row for row in printed.splitlines() if " chosen" in row)
    assert ("uncompressed" if auto.is_plain else repr(auto.choice)) in chosen
    lost = next(row for row in printed.splitlines() if "TopK" in row)
    kept = next(row for row in printed.splitlines() if "Cast" in row)
    assert "0 %" in kept or "0.0" in kept
    assert any(f"{percent}" in lost for percent in range(20, 60))


def test_without_a_request_only_what_loses_little_is_tried():
    assert repr(Auto().candidates) == "[Cast('bf16'), Quantize(8)]"
