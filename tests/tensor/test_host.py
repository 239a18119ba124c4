"""The host's work for a block stays within its budget of Python calls."""

from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the budgets count torch's own calls too")
def test_calls_of_python_functions(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import host

    plain = host.counted(host.runs()["plain"])
    for name, budget in host.BUDGETS.items():
        counts = host.counted(host.runs()[name])
        assert counts.forward > plain.forward  # it counts
        assert all(made <= most for made, most in zip(counts, budget)), (name, counts, budget)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the budgets count torch's own calls too")
def test_calls_that_a_pipeline_adds_to_a_block(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import host

    found = host.calls_of_stages()
    assert all(found.values())  # it counts
    assert all(found[name] <= most for name, most in host.STAGE_BUDGETS.items()), found
