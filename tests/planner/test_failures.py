"""Checkpoint intervals and productive shares beside a simulation of failures, one after the other."""

import math
import random

import pytest

from lightning_parallel.planner.failures import Failures, SiteLink

HOUR = 3600.0


def simulated_share(failures, interval_s, segments=20_000):
    """Run segments of training and checkpoint with exponential failures, as a clock would show them."""
    draw = random.Random(0).expovariate
    clock, until = 0.0, draw(1 / failures.mtbf_s)
    for _ in range(segments):
        while until < interval_s + failures.stall_s:
            clock += until
            until = draw(1 / failures.mtbf_s)
            while until < failures.restart_s:  # a restart may fail as well
                clock += until
                until = draw(1 / failures.mtbf_s)
            clock += failures.restart_s
            until -= failures.restart_s
        clock += interval_s + failures.stall_s
        until -= interval_s + failures.stall_s
    return segments * interval_s / clock


@pytest.mark.parametrize(
    ("devices", "stall_s", "restart_s"), [(64, 1.0, 60.0), (10_000, 10.0, 300.0), (10_000, 600.0, 1800.0)]
)
def test_the_share_equals_a_simulation(devices, stall_s, restart_s):
    failures = Failures(devices, 50_000 * HOUR, stall_s, restart_s)
    for interval_s in (failures.interval_s, 4 * failures.interval_s):
        expected = simulated_share(failures, interval_s)
        assert failures.productive_share(interval_s) == pytest.approx(expected, abs=0.01)


def test_no_other_interval_is_better():
    failures = Failures(10_000, 50_000 * HOUR, 60.0, 300.0)
    best = failures.productive_share()
    assert all(failures.productive_share(failures.interval_s * factor) < best for factor in (0.5, 0.8, 1.25, 2.0))
    # Young's formula is the limit of cheap checkpoints.
    cheap = Failures(10_000, 50_000 * HOUR, 0.01, 300.0)
    assert cheap.interval_s == pytest.approx(math.sqrt(2 * 0.01 * cheap.mtbf_s), rel=0.01)


def test_extremes():
    assert Failures(10_000_000, HOUR, 100.0, 100.0).productive_share() == 0.0
    assert Failures(1, 1e12, 1e-3, 1.0).productive_share() == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ValueError, match="`restart_s` must be positive; got -1"):
        Failures(1, 1.0, 1.0, -1.0)


def test_two_sites():
    link = SiteLink(parameters=70e9, bits=4, bytes_per_s=10e9 / 8)
    assert link.average_s == pytest.approx(28.0)
    steps = link.local_steps(step_s=5.0)
    assert link.share(5.0, steps) <= 0.05 < link.share(5.0, steps - 1)
