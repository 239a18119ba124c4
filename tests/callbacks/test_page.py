"""The page in a browser: it renders without an error, its bars are as long as the numbers, it works by keyboard."""

import shutil

import pytest

from lightning_parallel.callbacks.memory import HELD
from lightning_parallel.callbacks.report.comparison import render_comparison
from lightning_parallel.callbacks.report.diagnosis import diagnose
from lightning_parallel.callbacks.report.page import PHASE_LABELS, render
from lightning_parallel.callbacks.session import PHASES
from lightning_parallel.pipeline.schedule import build_schedule
from lightning_parallel.pipeline.simulate import Cost, Timeline, simulate
from lightning_parallel.tracing.spans import bytes_text
from tests.callbacks.sample import sample_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with driver.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except driver.Error as error:
            pytest.skip(f"no browser: `playwright install chromium` or put one on PATH ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open HTML in a tab of its own; whatever the browser complains about or fetches fails the test."""
    complaints, tabs = [], []

    def open_page(html, **options):
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
        page = browser.new_page(**options)
        tabs.append(page)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith("http") and complaints.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for page in tabs:
        page.close()
    assert not complaints


def full_report(**options):
    report = sample_report(**options)
    report["diagnosis"] = [advice.to_dict() for advice in diagnose(report)]
    return report


def widths(page, row, marks="i"):
    """Share of the track's width that each mark of a row takes."""
    return page.evaluate(
        """([row, marks]) => {
            const track = row.querySelector(".track").getBoundingClientRect().width;
            return [...row.querySelectorAll(marks)].map(
                (mark) => [mark.className, mark.getBoundingClientRect().width / track]);
        }""",
        [row, marks],
    )


def test_the_bars_of_a_step_are_as_long_as_its_phases(show):
    report = full_report()
    page = show(render(report))
    ranks = report["reports"]["StepBreakdown"]["ranks"]
    longest = max(rank["wall"] for rank in ranks)
    rows = page.query_selector_all("section[aria-labelledby=steps] .bars .row")
    assert len(rows) == len(ranks)
    for row, rank in zip(rows, ranks):
        expected = [(phase, rank[phase] / longest) for phase in PHASE_LABELS if rank.get(phase)]
        found = widths(page, row, ".bar i")
        assert [kind for kind, _ in found] == [kind for kind, _ in expected]
        assert [share for _, share in found] == pytest.approx([share for _, share in expected], abs=2e-3)
        (strip,) = widths(page, row, ".strip i")
        assert strip[1] == pytest.approx(rank["communication_hidden"] / longest, abs=2e-3)


def test_the_bars_of_memory_hold_everything_and_name_nothing_that_is_not_there(show):
    report = full_report()
    ranks = report["reports"]["MemoryProfiler"]["ranks"]
    for rank in ranks:
        rank["buffers"] = 20_000_000
        del rank["compression"]
    section = show(render(report)).query_selector("section[aria-labelledby=memory]")
    totals = [sum(rank[name] for name in HELD if name in rank) for rank in ranks]
    assert [total.inner_text() for total in section.query_selector_all(".total")] == list(map(bytes_text, totals))
    assert section.query_selector(".bar i.buffers").get_attribute("data-tip") == "buffers: 19.1 MiB"
    words = section.text_content()
    assert "buffers" in words
    assert "compression" not in words


def test_every_phase_is_drawn():
    assert set(PHASE_LABELS) == set(PHASES)


def test_planned_and_measured_pipeline_share_one_time_axis(show):
    report = full_report()
    page = show(render(report))
    timelines = [
        Timeline.from_dict(report["reports"]["PipelineTimeline"]["timeline"][name]) for name in ("planned", "measured")
    ]
    spans = [row for timeline in timelines for row in timeline.spans]
    drawn = page.evaluate(
        """() => [...document.querySelectorAll(".drawing .row")].map((row) =>
            [...row.querySelectorAll(".action")].map((action) => action.getBoundingClientRect().width))"""
    )
    assert [len(row) for row in drawn] == [len(row) for row in spans]
    scales = [
        width / (end - start) for widths, row in zip(drawn, spans) for width, (start, end) in zip(widths, row.values())
    ]
    assert scales == pytest.approx([scales[0]] * len(scales), rel=0.03)  # blocks end a pixel before the next


def with_chunks(report):
    """The same run with two stages per rank, and backwards in two halves."""
    drawn = report["reports"]["PipelineTimeline"]["timeline"]
    for name in ("planned", "measured"):
        drawn[name] = simulate(build_schedule("zbv", 2, 4), Cost(0.004, 0.004, 0.004)).to_dict()
    return report


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("change", [lambda report: report, with_chunks], ids=["1f1b", "zbv"])
def test_the_page_fits_its_window_and_text_can_be_read(show, scheme, width, change):
    page = show(render(change(full_report())), viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = "[...document.querySelectorAll('.drawing, .scroll')].map(box => box.scrollHeight - box.clientHeight)"
    assert set(page.evaluate(boxes)) == {0}, "what scrolls sideways does not scroll up and down as well"
    assert page.evaluate(CONTRASTS) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_long_names_break(show, width):
    name = "model.decoder.layers.11.self_attn.q_proj.lora_A.default.weight"
    report = sample_report()
    report["run"] |= {"model": "Module" * 12, "error": "x" * 300}
    drift = {"step": 8, "name": name, "ranks": [0, 1, 2, 3], "detail": "differs from rank 0: 1 of 128 elements " * 3}
    report["reports"]["ReplicaDriftMonitor"] = {"findings": [drift]}
    report["diagnosis"] = [advice.to_dict() for advice in diagnose(report)]
    page = show(render(report), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    row = page.query_selector("section[aria-labelledby=findings] table:has(caption:text('differ')) tbody tr")
    assert row.bounding_box()["height"] < 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_comparison_too(show, scheme, width):
    first, second = full_report(), full_report()
    second["run"]["num_microbatches"] = 8
    for rank in second["reports"]["StepBreakdown"]["ranks"]:
        rank["forward"], rank["backward"] = rank["forward"] * 1.5, rank["backward"] * 0.5
    page = show(
        render_comparison(first, second, ("a", "b")), viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRASTS) == []
    assert "num microbatches" in page.inner_text("section[aria-labelledby=settings]")
    assert [cell.inner_text().split()[2] for cell in page.query_selector_all("td.slower, td.faster")] == [
        "more",
        "less",
    ]


@pytest.mark.parametrize("width", [390, 700, 1000])
def test_a_label_is_whole_or_not_shown(show, width):
    page = show(render(full_report()), viewport={"width": width, "height": 800})
    cut = page.evaluate(
        """() => [...document.querySelectorAll(".bar b")].filter((label) => {
            const [a, b] = [label.getBoundingClientRect(), label.parentElement.getBoundingClientRect()];
            return a.top < b.bottom - 1 && (a.right > b.right + 0.5 || label.scrollWidth > label.clientWidth);
        }).map((label) => label.textContent)"""
    )
    assert cut == []


CONTRASTS = """() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const light = (colour) => {
        canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (node) => {
        if (node.closest(".action")) return getComputedStyle(node.closest(".action").querySelector("rect")).fill;
        for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (!colour.endsWith(", 0)") && colour !== "transparent") return colour;
        }
        return "white";
    };
    const poor = [];
    for (const node of document.querySelectorAll("h1,h2,p,li,td,th,.bar b,.row .label,.total,figcaption,summary," +
            ".drawing text")) {
        if (!node.textContent.trim() || node.id === "tip") continue;
        const style = getComputedStyle(node);
        const [a, b] = [light(node.closest("svg") ? style.fill : style.color), light(ground(node))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.push([node.tagName, node.textContent.slice(0, 20), ratio]);
    }
    return poor;
}"""


def test_arrow_keys_walk_through_a_chart_and_say_what_is_shown(show):
    page = show(render(full_report()))
    page.focus("section[aria-labelledby=steps] .bars")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("forward: ")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("backward: ")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#spoken").startswith("rank 1")
    page.keyboard.press("Escape")
    assert page.inner_text("#tip") == ""
    page.focus(".drawing")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#tip").startswith("1F0: forward of microbatch 0 in stage 1, ")
    assert page.inner_text("#spoken").startswith("p1, 1F0")


def test_absent_signals_are_named_and_never_drawn_as_zero(show):
    run = sample_report()["run"]
    page = show(render({"version": 1, "run": run, "reports": {}, "diagnosis": []}))
    assert "Nothing was measured" in page.inner_text("section[aria-labelledby=diagnosis]")
    missing = page.inner_text("section[aria-labelledby=missing]")
    assert "StepBreakdown()" in missing
    assert "PipelineTimeline()" in missing
    assert page.query_selector(".bars") is None


def test_which_steps_are_counted_is_said(show):
    report = full_report()
    report["reports"]["DataShardingMonitor"] = {
        "findings": [{"step": 25, "name": "overlap", "ranks": [0], "detail": ""}]
    }
    page = show(render(report))
    assert "Steps are batches of this run" in page.inner_text("section[aria-labelledby=course]")
    assert "optimizer step" in page.inner_text("section[aria-labelledby=findings]")


def test_only_what_is_wrong_is_red(show):
    report = full_report()
    report["series"]["loss"][-1][1] = None
    report["diagnosis"] = [
        {"kind": kind, "title": kind, "text": "", "gain": None, "figures": {}} for kind in ("wrong", "note", "good")
    ]
    page = show(render(report))
    colours = "node => [...node.querySelectorAll('.gain, strong')].map(n => getComputedStyle(n).color)"
    wrong, ink, *others = page.query_selector(".advice").evaluate(colours)
    assert wrong != ink
    assert set(others) == {ink}
    assert page.query_selector("figcaption .gap").evaluate("node => getComputedStyle(node).color") == wrong


def test_a_curve_has_gaps_and_keeps_its_axis(show):
    report = full_report()
    loss = report["series"]["loss"]
    report["series"]["loss"] = [[step, None if 50 <= step < 60 or step >= 100 else value] for step, value in loss]
    figure = show(render(report)).query_selector("figure.lines")
    assert "not finite from step 100 on" in figure.inner_text()
    assert figure.query_selector(".steps i:last-child").inner_text() == "150"
    pieces = figure.query_selector("path.curve").get_attribute("d").split("M")[1:]
    assert [piece.split("L")[-1].split()[0] for piece in pieces] == ["24.62", "49.75"]


def test_ranks_that_could_not_be_compared_have_no_clean_bill(show):
    report, clean = full_report(), "No rank is slower"
    report["reports"]["StragglerMonitor"] = {"stragglers": []}
    assert clean in show(render(report)).inner_text("section[aria-labelledby=findings]")
    report["reports"]["StragglerMonitor"]["missing"] = ["Waits are not seen."]
    page = show(render(report))
    assert clean not in page.inner_text("body")
    assert "Waits are not seen." in page.inner_text("section[aria-labelledby=missing]")


def test_an_error_that_ended_the_run_is_on_top(show):
    report = full_report()
    report["run"]["error"] = "ValueError: <b>not markup</b>"
    page = show(render(report))
    assert "ValueError: <b>not markup</b>" in page.inner_text("header")


def test_the_page_of_eight_ranks_and_200_steps_is_small():
    assert len(render(full_report(num_ranks=8, steps=200)).encode()) < 1_000_000
