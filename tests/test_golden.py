"""The communication of a step in each layout: as recorded, as torch's own tools see it, and as files hold it.

    python -m tests.test_golden         # rewrites tests/golden/*.txt; read the differences before you commit them

A line of a file is a call: operation, axis of the group, dtype, elements, and the peer of a message. The tools of torch
know nothing of this library:

    DebugMode           all operators of the training thread, in order
    CommDebugMode       numbers of collectives of the training thread, without messages between two ranks
    flight recorder     the collectives that gloo starts in all threads, in order, without messages between two ranks
"""

import difflib
import math
import re
from collections import Counter
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

from lightning_parallel import HybridParallelStrategy
from lightning_parallel.comm.collectives import PAIRWISE_MAX_BYTES
from lightning_parallel.compat.torch import flight_recorder_entries
from lightning_parallel.tracing import Recorder, activate
from tests.harness import run
from tests.strategies.models import trainer_for

GOLDEN = Path(__file__).parent / "golden"
WIDTH, TOKENS, CLASSES, BATCH = 16, 6, 18, 8
STEP = 5  # a step like all later ones: in earlier ones, ranks also agree on what they see for the first time


class Block(nn.Module):
    """Attention and an MLP, or experts."""

    def __init__(self, experts):
        super().__init__()
        self.norm, self.again = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        if experts:
            self.mlp = Experts(experts)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.again(x))


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 20) / 4)
        self.down = nn.Parameter(torch.randn(count, 20, WIDTH) / 4)

    def forward(self, x):
        hidden = torch.einsum("btd,edh->bteh", x, self.up).relu()
        return torch.einsum("bteh,ehd,bte->btd", hidden, self.down, self.router(x).softmax(-1))


class Model(LightningModule):
    def __init__(self, experts=0, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def training_step(self, batch, index):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "1f1b"}
# Layout: number of ranks, arguments of the strategy, number of experts.
LAYOUTS = {
    "tensor 2": (2, {"tensor_parallel_size": 2}, 0),
    "sequence 2": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}, 0),
    "context 2": (2, {"context_parallel_size": 2}, 0),
    "experts 2": (2, {"tensor_parallel_size": 2}, 3),
    "pipeline 2": (2, PIPELINE, 0),
    "zero1 2": (2, {"zero_stage": 1}, 0),
    "zero2 2": (2, {"zero_stage": 2}, 0),
    "zero3 2": (2, {"zero_stage": 3}, 0),
    "tensor 2 x data 2": (4, {"tensor_parallel_size": 2}, 0),
}


OPERATORS = {"all_gather": "allgather_", "all_reduce": "allreduce_", "all_to_all": "alltoall_base_", "recv": "recv_"}


class Call(NamedTuple):
    """A call as recorded; `ranks` is the number of ranks of its group."""

    op: str
    axis: str
    dtype: str
    bytes: int
    peer: int | None
    ranks: int

    def __str__(self):
        elements = self.bytes // getattr(torch, self.dtype).itemsize
        return f"{self.op} {self.axis} {self.dtype} {elements}" + ("" if self.peer is None else f" peer {self.peer}")

    @property
    def operations(self):
        """The operators of torch that make the call on CPUs, with their bytes."""
        # Two ranks send each other what a collective would reduce.
        if self.op == "all_reduce" and self.ranks == 2 and self.bytes <= PAIRWISE_MAX_BYTES:
            return [("recv_", self.bytes), ("send", self.bytes)]
        if self.op == "reduce_scatter" and self.ranks == 2:
            return [("recv_", self.bytes // 2), ("send", self.bytes // 2)]
        names = {
            "all_gather": "allgather_",
            "all_reduce": "allreduce_",
            "all_to_all": "alltoall_base_",
            "recv": "recv_",
        }
        return [(names.get(self.op, self.op), self.bytes)]


class NoModules:
    """Takes the place of CommDebugMode's table of modules, which fails if the step does not call the root module."""

    name, is_bw, activation_checkpointing = "Global", False, False

    def __init__(self):
        self.module_parents_dict = {"Global": frozenset()}

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


class Witnesses(Callback):
    """Watches training from one batch to the next."""

    def __init__(self):
        self.recorder, self.counting, self.ordering = Recorder(), CommDebugMode(), debug_mode()
        self.counting.advanced_module_tracker = NoModules()
        self.flights = []
        self.period = ExitStack()

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == STEP:
            self.flights = flight_recorder_entries()
            self.period.enter_context(activate(self.recorder))
            self.period.enter_context(self.counting)
            if self.ordering is not None:
                self.period.enter_context(self.ordering)
        elif index == STEP + 1:
            self.period.close()
            before = {flight["record_id"] for flight in self.flights}
            self.flights = [one for one in flight_recorder_entries() if one["record_id"] not in before]

    def seen(self):
        """Return the calls, and what each tool of torch has seen; None for a tool that this torch does not have."""
        spans = [span for span in self.recorder.spans if span.category == "communication"]
        calls = [
            Call(span.op, span.axis, span.dtype, span.bytes, span.peer, len(span.ranks))
            for span in sorted(spans, key=lambda span: span.start_ns)
        ]
        counts = {str(op).removeprefix("c10d."): count for op, count in self.counting.get_comm_counts().items()}
        in_order = None if self.ordering is None else operations_in(self.ordering)
        flights = [one["profiling_name"].removeprefix("gloo:") for one in self.flights]
        return calls, counts, in_order, flights if flight_recorder_entries() else None


def debug_mode():
    """Return torch's recorder of operators, whose text `operations_in` reads; None for other versions of torch."""
    if torch.__version__ < "2.13":
        return None
    from torch.utils._debug_mode import DebugMode

    return DebugMode()


def operations_in(mode):
    """Return the operators of c10d with the bytes of their payloads."""
    found = []
    for line in map(str, mode.operators):
        match = re.match(r"c10d::(\w+)\((.*?)\)  ->", line)
        if match is None:
            continue
        op, arguments = match.groups()
        sizes = [
            math.prod(int(size) for size in shape.split(", ") if size) * int(bits) // 8
            for bits, shape in re.findall(r"t: [a-z]+(\d+)\[([\d, ]*)\]", arguments)
        ]
        # The tensors that hold all parts; the other argument is the part of this rank.
        payload = sum(
            {"allgather_": sizes[:-1], "alltoall_base_": sizes[1:], "reduce_scatter_": sizes[1:]}.get(op, sizes)
        )
        # Activations are sent together with four integers that describe them.
        if found and found[-1][0] == op in ("send", "recv_") and "i64[4]" in arguments:
            op, payload = op, payload + found.pop()[1]
        found.append((op, payload))
    return found


def step_of(layout):
    """Train on this rank; return what the witnesses have seen of a step."""
    ranks, options, experts = LAYOUTS[layout]
    strategy = HybridParallelStrategy(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **options})
    witnesses = Witnesses()
    samples = torch.randint(CLASSES, (16 * STEP, TOKENS), generator=torch.Generator().manual_seed(1))
    trainer = trainer_for(strategy, ranks, max_epochs=1, callbacks=[witnesses], limit_train_batches=STEP + 2)
    trainer.fit(Model(experts), DataLoader(samples, batch_size=4))
    return witnesses.seen()


def text_of(calls_of_ranks):
    """Return the text of a golden file: neighbouring ranks with equal calls are listed once."""
    lines = []
    for calls, ranks in groupby(enumerate(calls_of_ranks), key=lambda pair: list(map(str, pair[1]))):
        lines += [f"ranks {' '.join(str(rank) for rank, _ in ranks)}", *calls, ""]
    return "\n".join(lines)


def file_of(layout):
    return GOLDEN / f"{layout.replace(' ', '_')}.txt"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_sends_what_its_golden_file_holds_and_torch_sees(layout):
    everyone = run(step_of, LAYOUTS[layout][0], layout=layout)
    for calls, counts, in_order, flights in everyone:
        assert calls
        operations = [operation for call in calls for operation in call.operations]
        collectives = [op for op, _ in operations if op not in ("send", "recv_")]
        assert counts == Counter(collectives)
        assert in_order is None or in_order == operations
        assert flights is None or flights == [call.op for call in calls if call.operations[0][0] in collectives]
    path = file_of(layout)
    before, now = (text.splitlines() for text in (path.read_text(), text_of([calls for calls, *_ in everyone])))
    changes = "\n".join(difflib.unified_diff(before, now, path.name, "this run", lineterm="", n=2))
    if changes:
        pytest.fail(f"The calls have changed; `python -m tests.test_golden` rewrites them.\n{changes}", pytrace=False)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for layout, (ranks, _, _) in LAYOUTS.items():
        file_of(layout).write_text(text_of([calls for calls, *_ in run(step_of, ranks, layout=layout)]))
