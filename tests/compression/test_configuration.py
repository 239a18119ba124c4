"""Compressors from a command line or YAML, and on their way to other processes."""

import pickle

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_parallel.compression import (
    BlockTopK,
    Cast,
    Dense,
    Policy,
    PowerSGD,
    Quantize,
    RandomK,
    Reducer,
    Sign,
    StepValue,
    TopK,
)
from lightning_parallel.compression.wire import Exact

PACKAGE = "lightning_parallel.compression"


def parse(text):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Reducer, "compression")
    return parser.instantiate(parser.parse_string(f"compression: {text}")).compression


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PowerSGD", PowerSGD),
        ("{class_path: %s.PowerSGD, init_args: {rank: 2, alternate: true, feedback: ef21}}", PowerSGD),
        ("{class_path: %s.TopK, init_args: {ratio: 0.05, momentum: 0.9, start_step: 10}}", TopK),
        ("{class_path: %s.RandomK, init_args: {feedback: null}}", RandomK),
        ("{class_path: %s.BlockTopK, init_args: {block: 64}}", BlockTopK),
        ("{class_path: %s.Quantize, init_args: {bits: 4, stochastic: true}}", Quantize),
        ("{class_path: %s.Sign}", Sign),
        ("{class_path: %s.Cast, init_args: {dtype: fp16}}", Cast),
        ("{class_path: %s.Dense}", Dense),
        ("{class_path: %s.Policy, init_args: {rules: {'*.bias': null, '*': {class_path: %s.Sign}}}}", Policy),
    ],
)
def test_built_by_the_command_line(text, expected):
    assert type(parse(text.replace("%s", PACKAGE))) is expected


def test_composition_and_schedules_in_yaml():
    topk = parse(
        f"{{class_path: {PACKAGE}.TopK, init_args: {{"
        f"ratio: {{class_path: {PACKAGE}.StepValue, init_args: {{values: {{0: 0.25, 100: 0.01}}}}}}, "
        f"values: {{class_path: {PACKAGE}.Quantize, init_args: {{bits: 8}}}}}}}}"
    )
    assert isinstance(topk.values, Quantize)
    assert topk.ratio(50) == 0.25
    assert isinstance(topk.ratio, StepValue)
    ranks = f"{{class_path: {PACKAGE}.StepValue, init_args: {{values: {{0: 4, 100: 2}}}}}}"
    power = parse(f"{{class_path: {PACKAGE}.PowerSGD, init_args: {{rank: {ranks}, feedback: decayed, decay: 0.25}}}}")
    assert repr(power) == "PowerSGD(rank=StepValue({0: 4, 100: 2}), feedback='decayed', decay=0.25)"


def test_cast_takes_names_and_dtypes():
    assert Cast("bf16").dtype is Cast(torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("make", [lambda: TopK(0.1) | Quantize(8), lambda: Policy({"*": PowerSGD(2)})])
def test_compressors_travel_to_other_processes(make):
    compressor = make()
    compressor.reduce_({"w": torch.ones(64, 64)})
    copy = pickle.loads(pickle.dumps(compressor))
    ours, theirs = torch.eye(64), torch.eye(64)
    compressor.reduce_({"w": ours})
    copy.reduce_({"w": theirs})
    assert torch.equal(ours, theirs)
    assert isinstance((TopK(0.1) | Cast("bf16")).values, Cast)
    assert isinstance(TopK(0.1).values, Exact)
