"""Numbers as people read them."""

import pytest

from lightning_parallel.tracing.spans import bytes_text, count_text, gap_text, percent, rank_label, seconds_text, show


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (1.5, "1.5 s"),
        (0.033, "33 ms"),
        (4.2e-5, "42 us"),
        (1e-7, "0.1 us"),
        (1234.0, "1,234 s"),
        (-0.25, "-250 ms"),
    ],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1_572_864, "1.5 MiB"), (3.25 * 2**30, "3.25 GiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


def test_counts_and_shares():
    assert [count_text(value) for value in (0.01234, 12.34, 1234.5)] == ["0.0123", "12.3", "1,234"]
    assert [percent(share) for share in (0.0734, 0.0996, 0.5, -0.02)] == ["7.3 %", "10 %", "50 %", "-2.0 %"]


def test_gaps_of_curves():
    assert gap_text([(0, 0.5), (1, 0.4)]) == ""
    assert gap_text([(0, 0.5), (1, None), (2, 0.4)]) == "not finite at 1 of 3 points, first at step 1"
    assert gap_text([(0, None), (1, None)]) == "not finite from step 0 on"


def test_ranks_are_labelled_by_the_axes_of_several_ranks():
    entry = {"rank": 3, "coordinate": {"data_parallel": 1, "pipeline_parallel": 0, "tensor_parallel": 1}}
    mesh = {"data_parallel": 2, "pipeline_parallel": 1, "tensor_parallel": 2}
    assert rank_label(entry, mesh) == "rank 3 · d1 t1"
    assert rank_label({"rank": 0}, mesh) == "rank 0"


def test_tables_in_files_are_wide(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    show("x" * 100)
    assert capsys.readouterr().out == "x" * 100 + "\n"
