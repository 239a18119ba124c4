"""The diagnosis says the right thing about a run, in order of gain, and nothing without a figure."""

import copy
import re

import pytest

from lightning_parallel.callbacks.report.diagnosis import diagnose
from tests.callbacks.sample import sample_report


def rank(number, wall=0.1, coordinate=None, **phases):
    rest = wall - sum(phases.values())
    place = {"rank": number, "coordinate": coordinate or {}}
    return {**place, "wall": wall, "forward": rest / 3, "backward": rest * 2 / 3, **phases}


def report(ranks=None, run=None, least=None, **reports):
    """`least` is how long all ranks of a stage are held up at once; by default the same ranks wait in each step."""
    found = dict(reports)
    if ranks is not None:
        waits = {}
        for one in ranks:
            stage = one["coordinate"].get("pipeline_parallel", 0)
            if "communication_exposed" in one:
                waits.setdefault(stage, []).append(one["communication_exposed"])
        always = [min(waits[stage]) for stage in sorted(waits)]
        found["StepBreakdown"] = {"ranks": ranks, "communication_least": least or always}
    return {"run": {"world_size": len(ranks or [0]), **(run or {})}, "reports": found}


def bubble(ideal, simulated, measured):
    return {"bubble": {"ideal": ideal, "simulated": simulated, "measured": measured}}


def test_nothing_measured_gives_no_advice():
    assert diagnose({"run": {}, "reports": {}}) == []


def test_a_run_without_losses_is_told_so():
    (advice,) = diagnose(report([rank(0), rank(1)]))
    assert advice.kind == "good"
    assert "100 % of the time is forward and backward" in advice.title


@pytest.mark.parametrize(
    ("losses", "kind", "title"),
    [
        ([0.5, None, 0.4, None, None], "wrong", "The loss is not finite from step 3 on"),
        ([0.5, None, 0.4, None, 0.3], "note", "The loss is not finite at 2 of 5 points, first at step 1"),
        ([None, None], "wrong", "The loss is not finite from step 0 on"),
    ],
)
def test_a_loss_that_is_not_finite_comes_first(losses, kind, title):
    series = {"loss": [[step, loss] for step, loss in enumerate(losses)]}
    found = diagnose(report([rank(0, data_wait=0.03)]) | {"series": series})
    (advice,) = [advice for advice in found if advice.title == title]
    assert advice.kind == kind
    assert kind == "note" or found[0] is advice


def test_waiting_for_data():
    (advice,) = diagnose(report([rank(0, data_wait=0.03), rank(1, data_wait=0.04)]))
    assert advice.title == "Waiting for data takes 40 ms of a 100 ms step (40 %, rank 1)"
    assert "num_workers" in advice.text
    assert advice.gain == pytest.approx(0.4)


def test_communication_counts_as_far_as_every_rank_waits_for_it():
    """Rank 1 waits 30 ms longer, for a late rank: no larger batch would help."""
    records = [{"axis": "data_parallel", "op": "all_reduce", "count": 2, "exposed": 0.01}]
    ranks = [rank(0, communication_exposed=0.02), rank(1, communication_exposed=0.05)]
    (advice, _) = diagnose(report(ranks, CommunicationProfiler={"records": records}))
    assert advice.gain == pytest.approx(0.2)
    assert "20 ms of a 100 ms step (20 %, most of it along data parallel)" in advice.title
    assert "accumulate_grad_batches" in advice.text
    assert "PowerSGD" in advice.text


def test_ranks_that_share_cores_are_told_that_a_wait_may_be_for_a_core():
    ranks = [rank(index, communication_exposed=0.03) for index in range(2)]
    (shared,), (own,) = (diagnose(report(ranks, run={"cores": cores}, least=[0.03])) for cores in (0.5, 1.0))
    reason = "The ranks share cores (0.5 per rank), so part of this time they wait for a core. "
    assert shared.text == reason + own.text


def test_compression_is_advised_in_the_words_of_the_strategy():
    ranks = [rank(r, communication_exposed=0.02) for r in range(2)]
    assert "`compression=Cast('bf16')`" in diagnose(report(ranks, {"strategy": "HybridParallelStrategy"}))[0].text
    assert "`CompressedDDPStrategy(Cast('bf16'))`" in diagnose(report(ranks, {"strategy": "DDPStrategy"}))[0].text


def test_compression_is_not_advised_where_there_is_some():
    ranks = [rank(r, communication_exposed=0.02) for r in range(2)]
    (advice,) = diagnose(report(ranks, {"compression": "Cast('bf16')"}))
    assert "PowerSGD" not in advice.text


def test_communication_in_the_layers_has_other_remedies():
    records = [
        {"axis": "tensor_parallel", "op": "all_reduce", "count": 8, "exposed": 0.002},
        {"axis": "pipeline_parallel", "op": "recv", "count": 8, "exposed": 0.02},
    ]
    ranks = [rank(r, communication_exposed=0.02) for r in range(2)]
    (advice,) = diagnose(report(ranks, CommunicationProfiler={"records": records}))
    assert "tensor_parallel_size" in advice.text


def test_the_bubble_of_the_schedule():
    """p 4, m 8: (p-1)/(m+p-1) = 3/11, with 16 microbatches 3/19; a step of 16/8 + 3 = 5 becomes one of 4.75 units."""
    run = {"schedule": "1f1b", "num_microbatches": 8, "replica_batch": 32}
    (advice,) = diagnose(report(run=run, PipelineTimeline=bubble(3 / 11, 3 / 11, 3 / 11)))
    assert "(now 8): twice as many lower the bubble of the schedule to 16 %" in advice.text
    assert "zb_h1" in advice.text
    assert advice.gain == pytest.approx(1 - (16 / 2 + 3 / 2) / (8 + 3))


def test_a_batch_that_cannot_be_split_further_has_to_grow():
    run = {"schedule": "zbv", "num_microbatches": 8, "replica_batch": 8}
    (advice,) = diagnose(report(run=run, PipelineTimeline=bubble(0.2, 0.2, 0.2)))
    assert "A larger batch" in advice.text
    assert "zb_h1" not in advice.text


def test_waits_for_stages_that_were_not_looked_into():
    (advice,) = diagnose(report([rank(0, pipeline_wait=0.02), rank(1, pipeline_wait=0.04)]))
    assert advice.title == "Ranks wait for other pipeline stages for 30 % of a step"
    assert "PipelineTimeline()" in advice.text


@pytest.mark.parametrize("phase", ["data_wait", "optimizer", "other"])
def test_what_makes_a_rank_late_is_said_once(phase):
    ranks = [rank(0, **{phase: 0.002}), rank(1, **{phase: 0.032})]
    (advice,) = diagnose(report(ranks, StragglerMonitor={"stragglers": [{"rank": 1, "cause": phase, "excess": 0.03}]}))
    assert advice.title.startswith("Rank 1 is 30 ms later than its peers")
    assert len(diagnose(report([*ranks[1:], {**ranks[1], "rank": 0}], StragglerMonitor={"stragglers": []}))) == 1


def test_ranks_that_wait_for_each_other_without_a_straggler():
    ranks = [rank(0, communication_exposed=0.001), rank(1, communication_exposed=0.021)]
    (advice,) = diagnose(report(ranks))
    assert advice.title == (
        "Ranks wait for each other for 10 ms of a 100 ms step: rank 1 waits 21 ms, rank 0 1 ms, and all ranks"
        " at once 1 ms"
    )
    assert advice.gain == pytest.approx(0.1)
    assert "StragglerMonitor()" in advice.text
    (advice,) = diagnose(report(ranks, StragglerMonitor={"stragglers": []}))
    assert advice.text.startswith("No rank is slow in most steps. Look for inputs of unequal length")
    (advice,) = diagnose(report(ranks, StragglerMonitor={"stragglers": [], "missing": ["Not all is known."]}))
    assert advice.text.startswith("Not all is known. Look for")


def test_lateness_that_changes_sides_is_not_communication():
    ranks = [rank(r, communication_exposed=0.05) for r in range(2)]
    (advice,) = diagnose(report(ranks, least=[0.002], StragglerMonitor={"stragglers": []}))
    assert advice.title.startswith("Ranks wait for each other for 48 ms of a 100 ms step")
    assert "unequal length" in advice.text


def test_stages_that_communicate_more_than_others_do_not_wait_for_them():
    ranks = [rank(r, communication_exposed=0.02 + 0.02 * r, coordinate={"pipeline_parallel": r}) for r in range(2)]
    assert not any("wait for each other" in advice.title for advice in diagnose(report(ranks)))


def test_ranks_that_are_not_known_are_not_guessed_at():
    (advice,) = diagnose(report([rank(0, communication_exposed=0.05)], {"world_size": 4}))
    assert advice.kind == "note"
    assert "Only 1 of 4 ranks reported (0)" in advice.title


def test_unequal_stages_and_messages_are_told_apart():
    stages, messages = diagnose(report(PipelineTimeline=bubble(0.02, 0.3, 0.4)))
    assert stages.title.startswith("Unequal stages add 28 % to the pipeline's bubble (2.0 % to 30 %)")
    assert messages.title.startswith("Communication between stages and varying run times add 10 %")
    assert stages.gain == pytest.approx(1 - 0.7 / 0.98)


def test_gains_in_the_pipeline_are_shares_of_the_whole_step():
    ranks = [rank(0, optimizer=0.05)]
    (optimizer, stages) = diagnose(report(ranks, PipelineTimeline=bubble(0.0, 0.3, 0.3)))
    assert optimizer.gain == pytest.approx(0.5)
    assert stages.gain == pytest.approx(0.5 * 0.3)


def test_a_slow_rank_is_named_with_its_cause():
    stragglers = [{"rank": 3, "cause": "data_wait", "excess": 0.03}]
    (advice,) = diagnose(report([rank(0), rank(3)], StragglerMonitor={"stragglers": stragglers}))
    assert advice.title == "Rank 3 is 30 ms later than its peers in every step (30 %; cause: data wait)"
    assert "DataLoader" in advice.text


def test_what_is_wrong_comes_before_what_is_slow():
    findings = [{"step": 7, "name": "net.0.weight", "ranks": [1], "detail": "differs by 0.5"}]
    found = diagnose(report([rank(0, data_wait=0.05)], ReplicaDriftMonitor={"findings": findings}))
    assert [advice.kind for advice in found] == ["wrong", "slow"]
    assert "`net.0.weight`, optimizer step 7, rank 1: differs by 0.5" in found[0].title


def test_collectives_that_differ_are_wrong():
    group = {"axis": "world", "group": [0, 1], "ranks": [1], "detail": "rank 1 issued 14 collectives, rank 0 13"}
    advice = diagnose(report([rank(0)], CommunicationProfiler={"records": [], "desynchronised": [group]}))[0]
    assert advice.kind == "wrong"
    assert "rank 1 issued 14 collectives" in advice.title


def test_compressing_that_takes_longer_than_sending():
    monitor = {"encode": 0.02, "decode": 0.01, "wire": 0.005}
    (advice,) = diagnose(report([rank(0)], CompressionMonitor=monitor))
    assert "30 ms" in advice.title
    assert "5 ms" in advice.title


def test_a_learning_rate_that_does_not_follow_the_batch_is_remarked():
    run = {"replicas": 8, "global_batch": 256, "learning_rate": 0.1}
    advice = diagnose(report([rank(0)], run))[-1]
    assert (advice.kind, advice.gain) == ("note", None)
    assert "0.8" in advice.text
    assert "0.283" in advice.text
    assert not any("scaled" in one.title for one in diagnose(report([rank(0)], run | {"scales_learning_rate": True})))


def test_the_fullest_rank_is_remarked():
    held = [{"rank": r, "parameters": size} for r, size in enumerate((2**30, 2**28, 2**28, 2**28))]
    advice = diagnose(report([rank(0)], MemoryProfiler={"ranks": held}))[-1]
    assert advice.title.startswith("Rank 0 holds 1 GiB, 2.29 times the mean")


def test_advice_is_in_order_of_gain_and_every_sentence_has_its_figure():
    found = diagnose(sample_report())
    gains = [advice.gain for advice in found if advice.kind == "slow"]
    assert gains == sorted(gains, reverse=True)
    assert all(0 < gain < 1 for gain in gains)
    for advice in found:
        assert advice.figures
        assert re.search(r"\d", advice.title)


@pytest.mark.parametrize("callback", list(sample_report()["reports"]))
def test_an_absent_signal_takes_only_advice_away(callback):
    whole = sample_report()
    less = copy.deepcopy(whole)
    del less["reports"][callback]
    kinds = {advice.title.split()[0] for advice in diagnose(whole)}
    others = {advice.title.split()[0] for advice in diagnose(less) if "Add `" not in advice.text}
    assert others <= kinds


def test_validation_is_a_part_of_the_run_and_not_of_a_step():
    ranks = [rank(0, wall=0.2, validation=0.1, data_wait=0.02)]
    found = report(ranks)
    found["reports"]["StepBreakdown"]["steps"] = 50
    pause, data = diagnose(found)
    assert pause.title == "Validation took 5 s of 10 s in training (50 %, rank 0)"
    assert data.title.startswith("Waiting for data takes 20 ms of a 100 ms step (20 %")
