"""Drawings: what the terminal shows, and pictures that other programs can open."""

from xml.etree import ElementTree

import pytest

from lightning_parallel.pipeline.draw import draw_picture, draw_text, legend_text
from lightning_parallel.pipeline.picture import Picture, Rect, Text, write_picture
from lightning_parallel.pipeline.schedule import build_schedule, forward_only
from lightning_parallel.pipeline.simulate import Cost, Link, Timeline, simulate

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


def test_svg_has_a_box_for_every_action():
    played = timeline("interleaved_zb", 3, 6)
    root = ElementTree.fromstring(draw_picture([("Planned & <simulated>", played)]).to_svg())
    hints = [title.text for title in root.iter(f"{SVG}title")]
    assert len(hints) == sum(map(len, played.spans))
    assert "0F0  forward, 500 µs" not in hints
    assert "0F0  forward, 1 ms" in hints
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "Planned & <simulated>" in texts
    assert any("18 microbatches" in text or "6 microbatches" in text for text in texts)


def test_boxes_do_not_overlap_and_share_one_scale():
    short, long = timeline(), timeline("1f1b", 2, 6)
    picture = draw_picture([("short", short), ("long", long)])
    boxes = [shape for shape in picture.shapes if isinstance(shape, Rect) and shape.hint]
    assert len({round(box.width, 6) for box in boxes if "forward" in box.hint}) == 1
    assert max(box.x + box.width for box in boxes) < picture.width
    lanes = {}
    for box in boxes:
        lanes.setdefault(box.y, []).append(box)
    assert len(lanes) == 4
    for lane in lanes.values():
        assert all(a.x + a.width <= b.x + 1e-6 for a, b in zip(lane, lane[1:]))


def test_a_measured_timeline_starts_at_its_own_zero():
    late = Timeline(build_schedule("1f1b", 1, 1))
    for action, (start, end) in zip(late.schedule.rows[0], [(1000.0, 1001.0), (1001.5, 1003.0)]):
        late.record(0, action, start, end)
    boxes = [shape for shape in draw_picture([("late", late)]).shapes if isinstance(shape, Rect) and shape.hint]
    assert all(0 < box.x < 1200 for box in boxes)
    assert draw_text(late, 80)[0].plain.startswith("rank 0  F0")


def test_forward_only_and_empty_timelines_are_drawn():
    schedule = forward_only(build_schedule("1f1b", 2, 3))
    for played in (simulate(schedule, Cost(1)), Timeline(schedule)):
        ElementTree.fromstring(draw_picture([("evaluation", played)]).to_svg())
        assert len(draw_text(played, 60)) == 2


def test_pictures_are_written_in_the_format_of_their_name(tmp_path):
    picture = draw_picture([("latency", simulate(build_schedule("zb_h1", 2, 3), Cost(1, 1, 1), Link(0.2)))])
    write_picture(picture, tmp_path / "a.svg")
    ElementTree.parse(tmp_path / "a.svg")
    with pytest.raises(ValueError, match=r"\.svg or \.png, got `a\.jpg`"):
        write_picture(picture, tmp_path / "a.jpg")


def test_png_has_the_size_and_colours_of_the_picture(tmp_path):
    image = pytest.importorskip("PIL.Image")
    picture = Picture(40, 20, [Rect(0, 0, 20, 20, "#3b70d6"), Text(1, 15, "0")])
    write_picture(picture, tmp_path / "a.png")
    with image.open(tmp_path / "a.png") as pixels:
        assert pixels.size == (80, 40)
        assert pixels.getpixel((30, 4)) == (0x3B, 0x70, 0xD6)
        assert pixels.getpixel((70, 4)) == (255, 255, 255)
