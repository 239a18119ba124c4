"""What the documentation site takes from the code: pages of public names, drawings, and the command line.

A hook of mkdocs (https://www.mkdocs.org/user-guide/configuration/#hooks): `make docs` calls `on_config`, `on_files`
and `on_page_content`.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import Strategy
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from torch.optim import Optimizer

import lightning_parallel
from lightning_parallel.compression import Reducer
from lightning_parallel.pipeline.plot import draw_svg, schedule_title
from lightning_parallel.pipeline.schedule import SCHEDULES, build_schedule
from lightning_parallel.pipeline.simulate import Cost, simulate
from lightning_parallel.tensor.context_methods import balanced_rows
from lightning_parallel.tensor.sharding import Shard
from lightning_parallel_cli import build_parser

# ----------------------------------------------------------------------------------------------- a page for each name

KINDS: dict[str, Any] = {
    "Strategies": lambda value: inspect.isclass(value) and issubclass(value, Strategy),
    "Callbacks": lambda value: inspect.isclass(value) and issubclass(value, Callback),
    "Compressors": lambda value: inspect.isclass(value) and issubclass(value, Reducer),
    "Optimizers": lambda value: inspect.isclass(value) and issubclass(value, Optimizer),
    "Errors": lambda value: inspect.isclass(value) and issubclass(value, Exception),
    "Functions and values": lambda value: True,
}


def public_names() -> dict[str, list[str]]:
    """Return the names that users import, by kind, in the order of the alphabet."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted(lightning_parallel.__all__):
        value = getattr(lightning_parallel, name)
        found[next(kind for kind, belongs in KINDS.items() if belongs(value))].append(name)
    return {kind: names for kind, names in found.items() if names}


MEMBERS = {"MeasuringCallback": "report", "PipelinePlan": "load, save", "StepValue": "warm_up"}
"""Methods that users call, which are no hooks of Lightning."""


def reference_page(name: str) -> str:
    """Return the page of a public name: import line, signature and docstring.

    mkdocstrings (https://mkdocstrings.github.io/python/) fills it from the module that defines the name.
    """
    value = getattr(lightning_parallel, name)
    path = f"{value.__module__}.{value.__qualname__}"
    return (
        f"# {name}\n\n```py\nfrom lightning_parallel import {name}\n```\n\n"
        f"::: {path}\n    options:\n      heading_level: 2\n      show_root_toc_entry: false\n"
        f"      members: [{MEMBERS.get(name, '')}]\n\n{_yours(value)}"
    )


def _yours(value: Any) -> str:
    """Return the sentence on the names of the reader's own code in the example."""
    meanings = {"MyModule": "your `LightningModule`", "MyData": "your `LightningDataModule`", "MyModel": "your model"}
    used = [f"`{name}` is {meaning}" for name, meaning in meanings.items() if f"{name}(" in inspect.getdoc(value)]
    return f"In the example, {' and '.join(used)}.\n" if used else ""


TYPES = {
    "strategies": (
        "compressed.memory.KeptState",
        "compressed.nodes.Hierarchical",
        "optimizers.zero.ZeroStage",
        "parallel.ScheduleName",
        "local_sgd.OuterOptimizer",
        "options.CheckpointFormat",
        "whole.between_runs.GatherAfterFit",
        "self_check.proof.Verify",
        "ranks.processes.StartMethod",
    ),
    "compression": (
        "reducer.Reducer",
        "compressor.Compressor",
        "hierarchical.HierarchicalReducer",
        "wire.Codec",
        "feedback.FeedbackName",
    ),
    "pipeline": (
        "pipeline_plan.Costs",
        "pipeline_plan.PlannedParameter",
        "pipeline_plan.TensorLayout",
        "schedule.Schedule",
        "simulate.Link",
    ),
    "callbacks": ("monitors.nonfinite.NonFiniteAction",),
}


def types_page() -> str:
    """Return the page of the types that signatures name, so that these link to it."""
    lines = ["# Types", "", "Signatures use these types. You pass the values; you need not import the types.", ""]
    for package, paths in TYPES.items():
        attributes = str(package == "pipeline").lower()
        options = f"{{heading_level: 2, show_labels: false, show_docstring_attributes: {attributes}}}"
        lines += [f"::: lightning_parallel.{package}.{path}\n    options: {options}\n" for path in paths]
    return "\n".join(lines)


CODE = re.compile(r"<(a|h\d|pre|summary)\b.*?</\1>|<code>(\w+)(?:\([^<]*\))?</code>", re.DOTALL)


def linked(html: str, urls: dict[str, str]) -> str:
    """Link the names in code to their pages, except in links, headings and blocks of code."""
    return CODE.sub(lambda found: f'<a href="{urls[found[2]]}">{found[0]}</a>' if found[2] in urls else found[0], html)


# -------------------------------------------------------------------------------------------------------- drawings

BEFORE_AND_AFTER: dict[str, tuple[list[list[str]], list[list[str]], str]] = {
    # Ranks are rows, blocks of their tensors are columns; `a` is rank 0's, `+` a sum over the ranks.
    "broadcast": ([["a0 a1"], [""], [""]], [["a0 a1"]] * 3, "reduce"),
    "reduce": ([["a0 a1"], ["b0 b1"], ["c0 c1"]], [["+0 +1"], [""], [""]], "broadcast"),
    "all_reduce": ([["a0 a1"], ["b0 b1"], ["c0 c1"]], [["+0 +1"]] * 3, "all_reduce"),
    "all_gather": ([["a0"], ["b0"], ["c0"]], [["a0 b0 c0"]] * 3, "reduce_scatter"),
    "reduce_scatter": ([["a0 a1 a2"], ["b0 b1 b2"], ["c0 c1 c2"]], [["+0"], ["+1"], ["+2"]], "all_gather"),
    "gather": ([["a0"], ["b0"], ["c0"]], [["a0 b0 c0"], [""], [""]], "scatter"),
    "scatter": ([["a0 a1 a2"], [""], [""]], [["a0"], ["a1"], ["a2"]], "gather"),
    "all_to_all": (
        [["a0 a1 a2"], ["b0 b1 b2"], ["c0 c1 c2"]],
        [["a0 b0 c0"], ["a1 b1 c1"], ["a2 b2 c2"]],
        "all_to_all",
    ),
    "send, receive": ([["a0"], [""], [""]], [["a0"], ["a0"], [""]], "receive, send"),
}
COLOURS = {"a": "#3b70d6", "b": "#1f9d6b", "c": "#d98a1f", "+": "#7d4fc4"}
RANKS = 4  # of the drawings of attention, where colours mean ranks
CELL, ROW, LEFT = 34, 40, 64


def draw_collective(name: str) -> str:
    """Draw what three ranks hold before and after a collective, as SVG."""
    before, after, _ = BEFORE_AND_AFTER[name]
    width, height = LEFT + 7 * CELL + 40, 3 * ROW + 28
    parts = [_head(width, height, name)]
    second = LEFT + 3 * CELL + 50
    for x, heading in ((LEFT, "before"), (second, "after")):
        parts.append(_label(x, 14, heading))
    for rank, (held, gets) in enumerate(zip(before, after)):
        y = 24 + rank * ROW
        parts.append(_label(0, y + 20, f"rank {rank}"))
        parts.extend(_cells(LEFT, y, held[0].split()))
        parts.append(_label(second - 34, y + 20, "→"))
        parts.extend(_cells(second, y, gets[0].split()))
    return "\n".join((*parts, "</svg>"))


def _cells(left: int, top: int, blocks: list[str]) -> Iterator[str]:
    for index, block in enumerate(blocks):
        x = left + index * CELL
        yield f'<rect x="{x}" y="{top}" width="{CELL - 4}" height="30" rx="4" fill="{COLOURS[block[0]]}" />'
        text = block.replace("+", "Σ")
        yield f'<text x="{x + (CELL - 4) / 2}" y="{top + 20}" text-anchor="middle" fill="#fff">{text}</text>'


def _head(width: int, height: int, name: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img" aria-label="{name}" font-family="Inter, Helvetica, Arial, sans-serif" font-size="13">'
    )


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#6b7785">{text}</text>'


# Attention whose positions are sharded. A square is a grid of heads and positions, or of queries and keys.
SIDE = 18


def _square(left: int, top: int, rows: int, colours: dict[tuple[int, int], str]) -> Iterator[str]:
    """Draw a grid of cells; those without a colour are empty."""
    for row in range(rows):
        for column in range(rows):
            fill = colours.get((row, column), "none")
            where = f'x="{left + column * SIDE}" y="{top + row * SIDE}" width="{SIDE - 2}" height="{SIDE - 2}"'
            yield f'<rect {where} rx="3" fill="{fill}" stroke="#9aa5b1" stroke-opacity="0.5" />'


def draw_ulysses() -> str:
    """Draw the parts of queries, keys and values that each rank holds before, during and after attention."""
    colours, every = [*COLOURS.values()], range(RANKS)
    width, step = 640, RANKS * SIDE
    parts = [_head(width, RANKS * (step + 16) + 30, "ulysses")]
    headings = ("its positions, all heads", "all positions, its heads", "its positions, all heads")
    for stage, heading in enumerate(headings):
        left = LEFT + 10 + stage * 195
        parts.append(_label(left, 14, heading))
        for rank in every:
            top = 26 + rank * (step + 16)
            if stage == 0:
                parts.append(_label(0, top + step / 2 + 4, f"rank {rank}"))
            if stage < 2:
                parts.append(_label(left + step + 58, top + step / 2 + 4, "all-to-all →", "middle"))
            cells = [(rank, at) if stage == 1 else (at, rank) for at in every]
            # Colours tell from which rank the positions are.
            parts.extend(_square(left, top, RANKS, {cell: colours[cell[1]] for cell in cells}))
    return "\n".join((*parts, _label(LEFT + 10, RANKS * (step + 16) + 26, "rows: heads; columns: positions"), "</svg>"))


def draw_gather() -> str:
    """Draw the keys and values that each rank holds before and after the all-gather, and its scores."""
    colours, step = [*COLOURS.values()], RANKS * SIDE
    parts = [_head(640, RANKS * (step + 16) + 30, "gather")]
    for left, heading in (
        (LEFT + 10, "its keys and values"),
        (260, "those of all ranks"),
        (455, "scores of its queries"),
    ):
        parts.append(_label(left, 14, heading))
    for rank in range(RANKS):
        top = 26 + rank * (step + 16)
        middle = top + step // 2
        parts.append(_label(0, middle + 4, f"rank {rank}"))
        parts.extend(_blocks(LEFT + 10, middle - 15, [rank]))
        parts.append(_label(195, middle + 4, "all-gather →", "middle"))
        parts.extend(_blocks(260, middle - 15, range(RANKS)))
        parts.append(_label(425, middle + 4, "→"))
        parts.extend(_square(455, top, RANKS, {(rank, column): colours[column] for column in range(RANKS)}))
    return "\n".join((*parts, _label(455, RANKS * (step + 16) + 26, "rows: queries; columns: keys"), "</svg>"))


def draw_ring() -> str:
    """Draw which keys and values each rank holds in each turn, and the scores that it computes from them."""
    colours, step = [*COLOURS.values()], RANKS * SIDE
    parts = [_head(700, RANKS * (step + 16) + 30, "ring")]
    for turn in range(RANKS):
        left = LEFT + 10 + turn * 158
        parts.append(_label(left, 14, f"turn {turn}"))
        for rank in range(RANKS):
            top, owner = 26 + rank * (step + 16), (rank - turn) % RANKS
            if turn == 0:
                parts.append(_label(0, top + step / 2 + 4, f"rank {rank}"))
            parts.extend(_blocks(left, top + step // 2 - 15, [owner]))
            parts.extend(_square(left + 46, top, RANKS, {(rank, owner): colours[owner]}))
            if turn < RANKS - 1:
                parts.append(_label(left + 46 + step + 18, top + step / 2 + 4, "↘", "middle"))
    note = "keys and values go to the next rank, the last rank's to rank 0, while a turn computes"
    return "\n".join((*parts, _label(LEFT + 10, RANKS * (step + 16) + 26, note), "</svg>"))


def _blocks(left: int, top: int, owners: Iterable[int]) -> Iterator[str]:
    for index, owner in enumerate(owners):
        x, fill = left + index * (CELL + 2), [*COLOURS.values()][owner]
        yield f'<rect x="{x}" y="{top}" width="{CELL}" height="30" rx="4" fill="{fill}" />'
        yield f'<text x="{x + CELL / 2}" y="{top + 20}" text-anchor="middle" fill="#fff">kv{owner}</text>'


def draw_positions() -> str:
    """Draw the causal scores of each rank: with consecutive positions, and with one chunk from head and tail."""
    colours, chunks = [*COLOURS.values()], 2 * RANKS
    parts = [_head(640, chunks * SIDE + 110, "positions")]
    for left, heading, rule in (
        (10, "consecutive positions", Shard.even(0, chunks, RANKS)),
        (330, "a chunk from the head and one from the tail", balanced_rows(chunks, RANKS)),
    ):
        parts.append(_label(left, 14, heading))
        owners = {row: rank for rank, held in enumerate(rule.ranges) for run in held for row in range(*run)}
        cells = {(row, column): colours[owners[row]] for row in owners for column in range(row + 1)}
        parts.extend(_square(left, 26, chunks, cells))
        for rank in range(RANKS):
            share = sum(row + 1 for row, owner in owners.items() if owner == rank)
            y = chunks * SIDE + 38 + rank * 18
            parts.append(f'<rect x="{left}" y="{y}" width="{share * 8}" height="14" rx="3" fill="{colours[rank]}" />')
            parts.append(_label(left + share * 8 + 8, y + 12, f"rank {rank}: {share}"))
    return "\n".join((*parts, "</svg>"))


def draw_schedule(name: str) -> str:
    """Draw a schedule on four ranks, eight microbatches, where F, I and W take as long as each other."""
    schedule = build_schedule(name, 4, 8)
    share = 1e-3 / schedule.virtual_stages
    timeline = simulate(schedule, Cost(share, share, share))
    return draw_svg([(schedule_title(schedule), timeline)])


# ------------------------------------------------------------------------------------------------- the command line


def command_line_page() -> str:
    """Return the page of all subcommands, from their parsers."""
    lines = [
        "# Command line",
        "",
        "`lightning-parallel --version` prints the version.",
        "`lightning-parallel COMMAND --help` prints a section below.",
        "A command exits with 0, with 1 if it found a problem, and with 2 for invalid arguments.",
        "Amounts have a unit: `80GiB`, `400Gbit/s`, `10us`.",
    ]
    for name, parser in _commands(build_parser()):
        lines += ["", f"## {name}", "", str(parser.description)]
        if parser.epilog:
            lines += ["", "```bash", _wrapped(parser.epilog.removeprefix("example: ")), "```"]
        for action, nested in _commands(parser):
            lines += ["", f"### {name} {action}", *_arguments(nested)]
        lines += _arguments(parser)
    return "\n".join(lines) + "\n"


def _wrapped(command: str) -> str:
    """Break a command before its options, so that it fits on a page."""
    words, *options = command.split(" --")
    lines = [words]
    for option in options:
        if len(lines[-1]) + len(option) > 80:
            lines[-1] += " \\"
            lines.append("    --" + option)
        else:
            lines[-1] += " --" + option
    return "\n".join(lines)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
        if action.option_strings and action.nargs != 0:
            names += f" `{action.metavar or action.dest.upper()}`"
        text = (action.help or "") % {"default": action.default}
        rows.append(f"| {names} | {text.replace('|', chr(92) + '|')} |")
    return ["", "| argument | meaning |", "|---|---|", *rows] if rows else []


# ------------------------------------------------------------------------------------------------------- mkdocs' hooks


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made here into the navigation."""
    reference = [{kind: [{name: f"reference/{name}.md"} for name in names]} for kind, names in public_names().items()]
    assert config.nav is not None
    config.nav.append({"Reference": [*reference, {"Types": "reference/types.md"}, {"Command line": "command_line.md"}]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and drawings that are made here."""
    made = {f"reference/{name}.md": reference_page(name) for names in public_names().values() for name in names}
    made["reference/types.md"] = types_page()
    made["command_line.md"] = command_line_page()
    for name in BEFORE_AND_AFTER:
        made[f"images/collectives/{name.split(',')[0]}.svg"] = draw_collective(name)
    for name in SCHEDULES:
        made[f"images/schedules/{name}.svg"] = draw_schedule(name)
    for draw in (draw_ulysses, draw_ring, draw_gather, draw_positions):
        made[f"images/attention/{draw.__name__.removeprefix('draw_')}.svg"] = draw()
    root = Path(config.config_file_path).parent
    for source, target in (("CHANGELOG.md", "changelog.md"), ("CONTRIBUTING.md", "contributing.md")):
        made[target] = (root / source).read_text(encoding="utf-8").replace("](docs/", "](")
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link public names to their pages."""
    targets = {name: f"reference/{name}/" for name in lightning_parallel.__all__ if name != page.title}
    for package, paths in TYPES.items():
        targets.update((path.split(".")[1], f"reference/types/#lightning_parallel.{package}.{path}") for path in paths)
    return linked(html, {name: get_relative_url(target, page.url) for name, target in targets.items()})
