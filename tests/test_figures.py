"""Figures that README, pages, docstrings and messages repeat are those of `benchmarks/results.json`."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import torch_versions

ROOT = Path(__file__).parents[1]
RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
CONVERGENCE, SLOW_LINK = "convergence", "slow_link_gpt"
COMPRESSION, LOCAL = "docs/guides/compression.md", "docs/guides/local_steps.md"
POWER, SPARSE, QUANT = (
    f"lightning_parallel/compression/{name}.py" for name in ("powersgd", "sparsifiers", "quantizers")
)
LOCAL_20, LOCAL_30 = (f"local {steps}, nesterov, Quantize(4)" for steps in (20, 30))
RELATIVE = "{loss:.3f} | 1/{fewer_bytes:.0f} |"
BOLD = "**{loss:.3f}** | **1/{fewer_bytes:.0f}** |"


class Place(NamedTuple):
    """A text of a file, with the fields of the figures in it; of several figures the fields end in their number."""

    path: str
    text: str
    benchmark: str
    names: tuple[str, ...]

    def __str__(self):
        return f"{Path(self.path).stem}, {self.names[0]}"


def place(path, text, *names, benchmark=CONVERGENCE):
    return Place(path, text, benchmark, names)


PLACES = [
    place("README.md", "1/{fewer_bytes:.0f} of its traffic", "local SGD, 4 bits", benchmark=SLOW_LINK),
    place("docs/benchmarks.md", "1/{fewer_bytes:.0f} of its bytes", "local SGD, 4 bits", benchmark=SLOW_LINK),
    place("docs/benchmarks.md", "{loss:.3f} of the loss, 1/{fewer_bytes:.0f} of the bytes", LOCAL_20),
    place(COMPRESSION, "In that time DDP completes {steps} steps.", "DDP", benchmark=SLOW_LINK),
    place(COMPRESSION, "4-bit updates completes {steps}.", "local SGD, 4 bits", benchmark=SLOW_LINK),
    place(COMPRESSION, "it has sent 1/{fewer_bytes:.0f} of DDP's bytes", "local SGD, 4 bits", benchmark=SLOW_LINK),
    place(COMPRESSION, "validation loss is {below:.1f} % below DDP's", "local SGD, 4 bits", benchmark=SLOW_LINK),
    *(
        place(COMPRESSION, f"| `{name}` | + {{above:.1f}} % |", name)
        for name in ("Quantize(8)", "Quantize(4)", "PowerSGD(4)", "PowerSGD(8)", "PowerSGD(16)")
    ),
    place(LOCAL, f"| `PowerSGD(4)` in every step | {RELATIVE}", "PowerSGD(4)"),
    place(
        LOCAL,
        "torch's post-local SGD | {loss0:.3f}; {loss1:.3f} | 1/{fewer_bytes0:.0f} |",
        "local 10",
        "local 10, torch's post-local SGD",
    ),
    place(LOCAL, f"average, `Quantize(4)` | {RELATIVE}", "local 10, Quantize(4)"),
    place(LOCAL, f"**20 local steps, `nesterov`, `Quantize(4)`** | {BOLD}", LOCAL_20),
    place(LOCAL, f"30 local steps, `nesterov`, `Quantize(4)` | {RELATIVE}", LOCAL_30),
    place(LOCAL, f"2 fragments, 5 overlapping steps | {RELATIVE}", "the same, 2 fragments, overlap 5"),
    place(LOCAL, f"the same, asynchronous | {RELATIVE}", "the same, late"),
    place(LOCAL, f'feedback="fading") \\| Quantize(2)` | {RELATIVE}', "local 20, SparseLoCo(0.1)"),
    place(LOCAL, f"the same with `TopK(0.03, ...)` | {RELATIVE}", "local 20, SparseLoCo(0.03)"),
    place("docs/benchmarks.md", "`Quantize(4)` | 1.65 | {loss:.3f} |", LOCAL_20),
    place("docs/benchmarks.md", "Quantize(2)` | 0.60 | {loss:.3f} |", "local 20, SparseLoCo(0.1)"),
    place("docs/benchmarks.md", "| 0.22 | {loss:.3f} |", "local 20, SparseLoCo(0.03)"),
    place(
        POWER,
        "{above0:.1f} % above at rank 4, {above1:.1f} % at rank 8, {above2:.1f} % at rank 16. The alternating form"
        " was {above3:.0f} % and {above4:.1f} % above at ranks 4 and 16",
        *("PowerSGD(4)", "PowerSGD(8)", "PowerSGD(16)", "PowerSGD(4, alternate=True)", "PowerSGD(16, alternate=True)"),
    ),
    place(SPARSE, "still {above0:.0f} % above at 2 % and {above1:.1f} % at 20 %", "TopK(0.02)", "TopK(0.2)"),
    place(
        SPARSE,
        '"{above0:.0f} % higher than with uncompressed gradients at 2 % of the elements, {above1:.1f} % at 20 %"',
        *("TopK(0.02)", "TopK(0.2)"),
    ),
    place(SPARSE, "under AdamW was then {above:.0f} % above", "RandomK(0.25)"),
    place(SPARSE, '"{above:.0f} % higher than with uncompressed gradients at 25 % of the elements"', "RandomK(0.25)"),
    place(SPARSE, "was {above0:.0f} % above at 10 % and {above1:.1f} % at 50 %", "BlockTopK()", "BlockTopK(0.5)"),
    place(
        SPARSE,
        '"{above0:.0f} % higher than with uncompressed gradients at 10 % of the blocks, {above1:.1f} % at 50 %"',
        *("BlockTopK()", "BlockTopK(0.5)"),
    ),
    place(
        QUANT,
        "ended {above0:.0f} % above, with dense embeddings and `start_step=50` {above1:.0f} %",
        *("Sign()", "Sign(start_step=50), no embeddings"),
    ),
    place(
        QUANT,
        '"{above0:.0f} % higher than with uncompressed gradients,'
        ' {above1:.0f} % with dense embeddings and `start_step=50`"',
        *("Sign()", "Sign(start_step=50), no embeddings"),
    ),
]
# Figures that are no result: the bits of `Sign`, and of a small CNN in `tests/compression/test_convergence.py`.
GIVEN = ("| `Sign()` | 1/32 |", "the loss ended 1.3 % above the uncompressed loss")


def text_of(path):
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def filled(place):
    """The text with its figures: `loss` relative to plain means, `above` and `below` them in per cent."""
    fields = {}
    for index, name in enumerate(place.names):
        figures = dict(RESULTS[place.benchmark][name])
        if "loss" in figures:
            # Not -0.0
            above = round(100 * (figures["loss"] - 1), 2) + 0.0
            figures |= {"above": max(above, 0.0) if above > -0.05 else above, "below": -above}
        fields |= figures | {f"{key}{index}": value for key, value in figures.items()}
    return place.text.format(**fields)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_figure_is_that_of_its_benchmark(place):
    assert filled(place) in text_of(place.path)


def test_no_figure_stands_elsewhere():
    paths = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    paths += [str(path.relative_to(ROOT)) for path in (ROOT / "lightning_parallel").rglob("*.py")]
    found = []
    for path in paths:
        text = text_of(path)
        for known in (*(filled(place) for place in PLACES if place.path == path), *GIVEN):
            text = text.replace(known, "")
        found += [
            f"{path}: {match}"
            for match in re.findall(r".{30}(?:\b1/\d\d+\b|\d % (?:above|below|higher|lower)\b)", text)
        ]
    assert not found, "add these to PLACES, or take them from there"


def test_a_warning_recommends_compressors_that_are_within_one_per_cent():
    text = text_of("lightning_parallel/strategies/compressed/advice.py").replace('" "', "")
    named = re.findall(r"`(\w+\(\d+\))`", re.search(r"(.{100})which were within 1 %", text)[1])
    assert len(named) == 3
    assert all(RESULTS[CONVERGENCE][name]["loss"] < 1.01 for name in named)


def test_each_result_names_the_commit_that_it_is_from():
    assert all(entry["measured"]["commit"] for entries in RESULTS.values() for entry in entries.values())


def test_the_table_of_versions_is_that_of_the_runs():
    page = torch_versions.PAGE.read_text(encoding="utf-8")
    written = page.partition(torch_versions.BEGIN)[2].partition(torch_versions.END)[0]
    assert written.strip() == torch_versions.table(RESULTS[torch_versions.BENCHMARK]).strip(), "make test-torches"
