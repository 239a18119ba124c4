import ast
import re
import sys
from pathlib import Path

import pytest

from tests.harness import run_script

LESSONS = sorted((Path(__file__).parents[2] / "examples" / "learn").glob("*.py"))
MAX_LINES = 79


def test_lessons_are_short_and_most_use_torch_alone():
    assert [int(lesson.name[:2]) for lesson in LESSONS] == list(range(1, 12))
    for lesson in LESSONS:
        text = lesson.read_text()
        assert len(text.splitlines()) <= MAX_LINES, lesson
        nodes = list(ast.walk(ast.parse(text)))
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        foreign = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
        assert "08" <= lesson.name < "11" or foreign == {"torch"}, lesson


def numbers(pattern, text):
    found = re.findall(pattern, text)
    assert found, f"{pattern} is not in\n{text}"
    return [float(number) for match in found for number in ([match] if isinstance(match, str) else match)]


def collectives(text):
    assert numbers(r"Notice: (\d+) collectives .*; (\d+) are", text) == [12, 12]


def broadcast_and_gather(text):
    assert numbers(r"at most (\d+) bytes", text) == [19200, 14400]
    assert numbers(r"mean loss is ([\d.]+)\. The mean of the ranks' means is ([\d.]+)\.", text) == [4.5, 5.25]


def data_loader(text):
    assert "order of epoch 0: True" in text
    assert numbers(r"Of 22 samples (\d+) are read twice", text) == [2]


def data_parallel_mlp(text):
    total, hidden = numbers(r"took ([\d.]+) ms in all, ([\d.]+) ms of it during backward", text)
    assert total >= hidden > 0


def tensor_parallel_mlp(text):
    assert numbers(r"Notice: (\d+) all-reduces", text) == [2]
    assert numbers(r"off by (\d+)%", text)[0] > 10


def pipeline_mlp(text):
    assert numbers(r"keeps (\d+)", text) == [8, 8, 8, 8, 4, 3, 2, 1]
    for measured, formula in zip(*[iter(numbers(r"bubble (\d+)%, by .* (\d+)%", text))] * 2):
        assert measured > 0.6 * formula  # what else runs here makes it longer


def parameter_server(text):
    (late,) = numbers(r"is ([\d.]+) versions late", text)
    assert 1.5 < late <= 2


def compression(text):
    lost, kept = numbers(r"loss is ([\d.]+) times the dense loss; with error feedback, ([\d.]+) times", text)
    assert lost > 1.3 > kept


def hybrid(text):
    assert len(set(numbers(r"loss is ([\d.]+) on 4 processes and ([\d.]+) on one", text))) == 1
    assert numbers(r"bubble: ideal ([\d.]+)%", text) == [20]


def four_mistakes(text):
    loss, one = numbers(r"loss ([\d.]+), on one process ([\d.]+)", text)
    (scaled,) = numbers(r"mistake 1 has loss ([\d.]+)\.", text)
    assert one < scaled < loss
    assert "center: differs from rank 0" in text
    assert "overlap: 32 of 32 samples were read by several replicas" in text
    share, rarer = numbers(r"the (\d+)% of mistake 4 become (\d+)%", text)
    assert 0 < share < 100  # both are times of a machine that others use, too
    assert rarer < 100


def context_parallel(text):
    assert numbers(r"(\d+) messages of (\d+) bytes", text) == [6, 8192, 6, 8192]
    assert numbers(r"busiest rank computes (\d+)%", text) == [43, 25]


HOLDS = [collectives, broadcast_and_gather, data_loader, data_parallel_mlp, tensor_parallel_mlp]
HOLDS += [pipeline_mlp, parameter_server, compression, hybrid, four_mistakes, context_parallel]


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(1, 12))
def test_a_lesson_ends_with_what_to_notice(number, tmp_path):
    ended = run_script(LESSONS[number - 1], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert LESSONS[number - 1].stem == f"{number:02}_{HOLDS[number - 1].__name__}"
    assert "Notice: " in ended.stdout
    HOLDS[number - 1](ended.stdout)
