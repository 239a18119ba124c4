"""Drawings of timelines: text for the terminal, and SVG that other programs can open."""

from xml.etree import ElementTree

import pytest

from lightning_parallel.pipeline.plot import draw_svg, draw_text, legend_text, round_ticks
from lightning_parallel.pipeline.schedule import build_schedule, forward_only
from lightning_parallel.pipeline.simulate import Cost, Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name="1f1b", ranks=2, microbatches=2, **options):
    return simulate(build_schedule(name, ranks, microbatches, **options), Cost(1e-3, 1e-3, 1e-3))


def test_text_of_two_ranks():
    lines = [line.plain for line in draw_text(timeline(), 80)]
    assert lines == [
        "rank 0  F0=F1=······B0----···B1----",
        "rank 1  ···F0=B0----F1=B1----······",
    ]


def test_text_fits_the_width_and_keeps_the_order():
    for width in (200, 100, 60, 30):
        lines = draw_text(timeline("zbv", 4, 8), width)
        assert len({len(line.plain) for line in lines}) == 1
        assert len(lines[0].plain) <= width


def test_no_letters_where_there_is_no_room():
    line = draw_text(timeline("1f1b", 2, 4), 8 + 16)[0].plain
    assert line.startswith("rank 0  01")


def test_colours_tell_kind_chunk_and_microbatch():
    line = draw_text(timeline("interleaved_1f1b", 2, 2), 200)[0]
    grounds = {str(span.style) for span in line.spans if "on #" in str(span.style)}
    assert len(grounds) == 2 * 2 * 2


def test_the_legend_names_what_there_is():
    assert legend_text(timeline("zbv", 2, 4)).plain == (
        "F0== forward   I0-- input gradient   W0++ weight gradient   lighter: later chunk   ···· waiting"
    )
    assert "gradient" not in legend_text(timeline()).plain


def boxes_of(svg):
    """Of each row, left and right end of every action, by the words of its hint."""
    rows = []
    for row in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if row.get("class") == "row":
            boxes = {}
            for action in row.iter(f"{SVG}g"):
                if "action" in action.get("class").split():
                    box = action.find(f"{SVG}rect")
                    left = float(box.get("x"))
                    boxes[action.find(f"{SVG}title").text] = (left, left + float(box.get("width")))
            rows.append(boxes)
    return rows


def test_svg_has_a_box_for_every_action():
    played = timeline("interleaved_zb", 3, 6)
    svg = draw_svg([("Planned & <simulated>", played)])
    hints = [hint for row in boxes_of(svg) for hint in row]
    assert len(hints) == sum(map(len, played.spans))
    assert "0F0: forward of microbatch 0 in stage 0, 1 ms from 0" in hints
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "Planned & <simulated>" in texts
    assert any("3 ranks, 6 stages, 6 microbatches" in text for text in texts)


def test_boxes_do_not_overlap_and_share_one_scale():
    rows = boxes_of(draw_svg([("short", timeline()), ("long", timeline("1f1b", 2, 6))], width=1000))
    assert len(rows) == 4
    widths = {round(right - left) for row in rows for hint, (left, right) in row.items() if "forward" in hint}
    assert len(widths) == 1
    for row in rows:
        ends = list(row.values())
        assert all(right <= left + 0.02 for (_, right), (left, _) in zip(ends, ends[1:]))
        assert max(right for _, right in ends) < 1000


def test_a_measured_timeline_starts_at_its_own_zero():
    late = Timeline(build_schedule("1f1b", 1, 1))
    for action, (start, end) in zip(late.schedule.rows[0], [(1000.0, 1001.0), (1001.5, 1003.0)]):
        late.record(0, action, start, end)
    (row,) = boxes_of(draw_svg([("late", late)]))
    assert all(0 < left < right < 1200 for left, right in row.values())
    assert draw_text(late, 80)[0].plain.startswith("rank 0  F0")


def test_later_chunks_are_lighter_and_marked_for_the_style_sheet():
    root = ElementTree.fromstring(draw_svg([("two chunks", timeline("zbv", 2, 4))]))
    fills = {}
    for action in root.iter(f"{SVG}g"):
        if (action.get("class") or "").startswith("action F"):
            fills.setdefault(action.get("class"), set()).add(action.find(f"{SVG}rect").get("fill"))
    assert fills == {"action F": {"#3b70d6"}, "action F later": {"#b1c6ef"}}


def test_forward_only_and_empty_timelines_are_drawn():
    schedule = forward_only(build_schedule("1f1b", 2, 3))
    for played in (simulate(schedule, Cost(1)), Timeline(schedule)):
        ElementTree.fromstring(draw_svg([("evaluation", played)]))
        assert len(draw_text(played, 60)) == 2


@pytest.mark.parametrize(
    ("low", "high", "most", "ticks"),
    [
        (0, 28.5, 13, [0, 5, 10, 15, 20, 25]),
        (1.84, 5.24, 5, [2, 3, 4, 5]),
        (0, 0.06, 13, [0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.055, 0.06]),
        (3, 3, 5, [3]),
    ],
)
def test_ticks_are_round_numbers(low, high, most, ticks):
    assert round_ticks(low, high, most) == pytest.approx(ticks)
