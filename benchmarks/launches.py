"""Operations and waits of the host in one step, counted: what a GPU would launch, and for what it would be waited.

    python benchmarks/launches.py

Counted on a CPU, where every operation is seen, with ranks of a group of one (compressors), or one process (the rest);
`benchmarks/gpu.py` names the lines on a GPU. What only a CPU is waited for counts here, too: seeds, `tolist` of flags
between hosts, the check of tokens in a divided embedding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_models import GPT
from gpu_sections import fake_ranks
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightning_parallel.comm import Group
from lightning_parallel.compat import Patches
from lightning_parallel.compression import (
    BlockTopK,
    Cast,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TopK,
    powersgd,
    quantizers,
    sparsifiers,
    wire,
)
from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.pipeline.analysis import analyze
from lightning_parallel.pipeline.engine import PipelineEngine
from lightning_parallel.tensor.auto_plan import make_plan
from lightning_parallel.tensor.plan import apply_plan
from tests.launches import Launches, Reads


def steps() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield steps that are ready to run; those of fake ranks end with the group they are in."""
    with fake_ranks(8, "cpu") as group:
        for name, ranks in (("one process", None), ("tensor parallel 8, one rank", group)):
            model = GPT(width=64, layers=4)
            if ranks is not None:
                apply_plan(model, make_plan(model, "auto", ranks), ranks)
            batch = model.batch(4, 8)
            yield name, lambda model=model, batch=batch: model.loss(batch).backward()
        model = GPT(width=64, layers=4)
        reducer = GradientReducer(dict(model.named_parameters()), group)
        yield "data-parallel reducer, 8 ranks, with its step", lambda: (model.loss(batch).backward(), reducer.reduce())
        reducer.remove()
    model = GPT(width=64, layers=4)
    plan = analyze(model, 1, "1f1b", num_microbatches=1, example=(model.loss, batch), balance="uniform")
    engine = PipelineEngine(model, plan, Group.alone("pipeline_parallel"))
    yield "pipeline engine, one stage and microbatch", lambda: engine.forward_backward(model.loss, batch)
    layers = [nn.Linear(64, 64) for _ in range(8)]
    for compressor in (Cast("bf16"), Quantize(8), Sign(), TopK(0.1), RandomK(0.1), BlockTopK(0.1), PowerSGD(2)):
        gradients = {f"w{number}": torch.randn_like(layer.weight) for number, layer in enumerate(layers)}
        yield (
            f"{compressor}, 8 matrices",
            lambda compressor=compressor, gradients=gradients: compressor.reduce_(gradients, Group.alone("alone")),
        )


def main() -> None:
    """Print the table."""
    table = Table(title="one step, counted on a CPU")
    for header in ("step", "operations", "waits", "for"):
        table.add_column(header, justify="left" if header in ("step", "for") else "right")
    patches = Patches()
    for module in (wire, quantizers, sparsifiers, powersgd):  # the ways of a device
        patches.replace(module, "launches_kernels", lambda tensor: not tensor.is_meta)
    for name, step in steps():
        step()
        step()
        with Launches() as seen, Reads(seen):
            step()
        waits = {kind: count for kind, count in seen.waited.items() if count}
        told = ", ".join(f"{kind} x{count}" for kind, count in waits.items())
        table.add_row(name, f"{sum(seen.launched.values()):,}", str(sum(waits.values())), told)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
