"""The page in a browser, where layout, colours and keys are the subject; everything else in its HTML."""

import re
import shutil
from html import unescape

import pytest

from lightning_parallel.callbacks.monitors.memory import HELD
from lightning_parallel.callbacks.recording.session import PHASES
from lightning_parallel.callbacks.report.comparison import render_comparison
from lightning_parallel.callbacks.report.diagnosis import diagnose
from lightning_parallel.callbacks.report.page import PHASE_LABELS, render
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


@pytest.mark.browser
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


def test_every_phase_is_drawn():
    assert set(PHASE_LABELS) == set(PHASES)


@pytest.mark.browser
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


def page_with_long_names():
    report = sample_report()
    report["run"] |= {"model": "Module" * 12, "error": "x" * 300}
    name = "model.decoder.layers.11.self_attn.q_proj.lora_A.default.weight"
    drift = {"step": 8, "name": name, "ranks": [0, 1, 2, 3], "detail": "differs from rank 0: 1 of 128 elements " * 3}
    report["reports"]["ReplicaDriftMonitor"] = {"findings": [drift]}
    report["diagnosis"] = [advice.to_dict() for advice in diagnose(report)]
    return render(report)


def comparison():
    first, second = full_report(), full_report()
    second["run"]["num_microbatches"] = 8
    for rank in second["reports"]["StepBreakdown"]["ranks"]:
        rank["forward"], rank["backward"] = rank["forward"] * 1.5, rank["backward"] * 0.5
    return render_comparison(first, second, ("a", "b"))


PAGES = {
    "1f1b": lambda: render(full_report()),
    "zbv": lambda: render(with_chunks(full_report())),
    "long names": page_with_long_names,
    "comparison": comparison,
}


@pytest.mark.browser
@pytest.mark.parametrize("kind", PAGES)
def test_the_page_fits_every_window_and_text_can_be_read(show, kind):
    page = show(PAGES[kind]())
    for width in (1280, 1000, 700, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = "[...document.querySelectorAll('.drawing, .scroll')].map(box => box.scrollHeight - box.clientHeight)"
        assert set(page.evaluate(boxes)) <= {0}, "what scrolls sideways does not scroll up and down as well"
        assert page.evaluate(CUT_LABELS) == [], "a label is whole or not shown"
        if kind == "long names":
            row = page.query_selector("section[aria-labelledby=findings] table:has(caption:text('differ')) tbody tr")
            assert row.bounding_box()["height"] < 400
        for scheme in ("light", "dark") if width in (1280, 390) else ():
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRASTS) == []


def test_the_comparison_names_settings_and_differences():
    html = comparison()
    assert "num microbatches" in words(html, "settings")
    verdicts = re.findall(r'<td class="(?:slower|faster)"[^>]*>(.*?)</td>', html)
    assert [verdict.split()[2] for verdict in verdicts] == ["more", "less"]


CUT_LABELS = """() => [...document.querySelectorAll(".bar b")].filter((label) => {
    const [a, b] = [label.getBoundingClientRect(), label.parentElement.getBoundingClientRect()];
    return a.top < b.bottom - 1 && (a.right > b.right + 0.5 || label.scrollWidth > label.clientWidth);
}).map((label) => label.textContent)"""

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


@pytest.mark.browser
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


@pytest.mark.browser
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


# ---------------------------------------------------------------------------------------------- without a browser


def words(html, section):
    """The text of one section of the page."""
    (found,) = re.findall(rf'<section aria-labelledby="{section}">.*?</section>', html, re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", " ", found))


def test_the_bars_of_memory_hold_everything_and_name_nothing_that_is_not_there():
    report = full_report()
    ranks = report["reports"]["MemoryProfiler"]["ranks"]
    for rank in ranks:
        rank["buffers"] = 20_000_000
        del rank["compression"]
    html = render(report)
    section = html[html.index('<section aria-labelledby="memory">') :]
    totals = [bytes_text(sum(rank[name] for name in HELD if name in rank)) for rank in ranks]
    assert re.findall(r'<span class="total">(.*?)</span>', section)[: len(ranks)] == totals
    assert re.search(r'<i class="buffers"[^>]* data-tip="buffers: 19.1 MiB"', section)
    assert "buffers" in words(html, "memory")
    assert "compression" not in words(html, "memory")


def test_absent_signals_are_named_and_never_drawn_as_zero():
    html = render({"version": 1, "run": sample_report()["run"], "reports": {}, "diagnosis": []})
    assert "measured too little" in words(html, "diagnosis")
    assert "StepBreakdown()" in words(html, "missing")
    assert "PipelineTimeline()" in words(html, "missing")
    assert 'class="bars"' not in html


def test_which_steps_are_counted_is_said():
    report = full_report()
    finding = {"step": 25, "name": "overlap", "ranks": [0], "detail": ""}
    report["reports"]["DataShardingMonitor"] = {"findings": [finding]}
    html = render(report)
    assert "A step is a batch of this run" in words(html, "course")
    assert "optimizer step" in words(html, "findings")


def test_a_curve_has_gaps_and_keeps_its_axis():
    report = full_report()
    loss = report["series"]["loss"]
    report["series"]["loss"] = [[step, None if 50 <= step < 60 or step >= 100 else value] for step, value in loss]
    (figure,) = re.findall(r'<figure class="lines".*?</figure>', render(report), re.DOTALL)[:1]
    assert "not finite from step 100 on" in figure
    assert re.findall(r"<i[^>]*>(\d+)</i>", figure)[-1] == "150"
    pieces = re.search(r'<path class="curve[^>]* d="([^"]*)"', figure)[1].split("M")[1:]
    assert [piece.split("L")[-1].split()[0] for piece in pieces] == ["24.62", "49.75"]


@pytest.mark.parametrize(
    ("replicas", "compared", "expected"),
    [
        (2, {"parameter": 3}, "All values that must be equal between replicas were equal."),
        (1, {}, "There is one replica, so there was nothing to compare"),
        (1, {"parameter": 3, "option": 1}, "The 4 values that several of its ranks hold were equal."),
    ],
)
def test_one_replica_is_not_said_to_equal_others(replicas, compared, expected):
    report = full_report()
    report["run"]["replicas"] = replicas
    report["reports"] |= {"ReplicaDriftMonitor": {"findings": [], "compared": compared}}
    report["reports"] |= {"DataShardingMonitor": {"findings": []}}
    found = words(render(report), "findings")
    assert expected in found
    assert ("between replicas were equal" in found) == (replicas > 1)
    assert ("Each sample went to one replica" in found) == (replicas > 1)


def test_ranks_that_could_not_be_compared_have_no_clean_bill():
    report, clean = full_report(), "No rank is slower"
    report["reports"]["StragglerMonitor"] = {"stragglers": []}
    assert clean in words(render(report), "findings")
    report["reports"]["StragglerMonitor"]["missing"] = ["Waits are not seen."]
    html = render(report)
    assert clean not in html
    assert "Waits are not seen." in words(html, "missing")


def test_an_error_that_ended_the_run_is_on_top():
    report = full_report()
    report["run"]["error"] = "ValueError: <b>not markup</b>"
    html = render(report)
    header = html[html.index("<header>") : html.index("</header>")]
    assert "ValueError: &lt;b&gt;not markup&lt;/b&gt;" in header


def test_the_page_of_eight_ranks_and_200_steps_is_small():
    assert len(render(full_report(num_ranks=8, steps=200)).encode()) < 1_000_000
