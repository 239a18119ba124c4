"""A data-parallel training step: the gradient reducer against torch's DistributedDataParallel, as ratios.

    python benchmarks/data_parallel.py [MLP] [transformer] [200] [--ranks 2] [--threads 1] [--rounds 12]

Both sides train equal copies of a model in one process group, in turn, a few steps each; which of them begins
alternates. A step is forward, backward with its reduction, and SGD. Ratios, ours / torch's: of medians over all steps,
of the best step of each, the range of the rounds, and of the most bytes alive besides the parameters.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sleeping import LiveBytes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel.comm import Group
from lightning_parallel.data_parallel import GradientReducer

STEPS = 4
Build = Callable[[], tuple[nn.Module, Tensor]]
Report = Callable[[str, Build, Group, int], None]


def mlp() -> tuple[nn.Module, Tensor]:
    """Few large weights."""
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(64, 1024)


def transformer(width: int, depth: int, tokens: int) -> tuple[nn.Module, Tensor]:
    """Encoder blocks as torch has them, norms and biases included."""
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), torch.randn(tokens // 64, 64, width)


def deep() -> tuple[nn.Module, Tensor]:
    """Very many small weights."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(200))), torch.randn(64, 64)


MODELS: dict[str, Build] = {
    "MLP, 8 x 1024": mlp,
    "transformer, 8 x 256, 256 tokens": lambda: transformer(256, 8, 256),
    "transformer, 8 x 512, 256 tokens": lambda: transformer(512, 8, 256),
    "transformer, 8 x 512, 1024 tokens": lambda: transformer(512, 8, 1024),
    "200 layers of 64": deep,
}


def sides(build: Build, group: Group) -> list[Callable[[], None]]:
    """One step of ours, one step of torch's."""
    torch.manual_seed(0)
    module, x = build()
    peer, _ = build()
    peer.load_state_dict(module.state_dict())
    return [ours(module, x, group), torchs(peer, x)]


def ours(module: nn.Module, x: Tensor, group: Group) -> Callable[[], None]:
    """A step with the gradient reducer."""
    reducer = GradientReducer(dict(module.named_parameters()), group)
    return stepper(module, x, reducer.reduce)


def torchs(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """A step with DistributedDataParallel."""
    return stepper(DistributedDataParallel(module), x, lambda: None)


def stepper(called: nn.Module, x: Tensor, reduce: Callable[[], None]) -> Callable[[], None]:
    """A training step."""
    optimizer = torch.optim.SGD(called.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        called(x).square().mean().backward()
        reduce()
        optimizer.step()

    return step


def peaks(build: Build, group: Group) -> list[int]:
    """Most bytes alive besides the parameters, of ours and of torch's."""
    found = []
    for side in (lambda module, x: ours(module, x, group), torchs):
        module, x = build()
        with LiveBytes() as live:
            step = side(module, x)
            for _ in range(3):
                step()
        found.append(live.peak)
    return found


def compare(steps: list[Callable[[], None]], rounds: int) -> list[list[list[float]]]:
    """Seconds of each step by side and round; every step begins together on all ranks."""
    times: list[list[list[float]]] = [[], []]
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            taken = []
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                steps[side]()
                taken.append(time.perf_counter() - start)
            times[side].append(taken)
    return [side[1:] for side in times]  # the first round is for warming up


def report(name: str, build: Build, group: Group, rounds: int) -> None:
    """Measure a model, and print its row on the first rank."""
    ours_s, peer_s = compare(sides(build, group), rounds)
    flat = [sum(side, []) for side in (ours_s, peer_s)]
    median, best = ([reduce(side) for side in flat] for reduce in (statistics.median, min))
    by_round = [statistics.median(a) / statistics.median(b) for a, b in zip(ours_s, peer_s)]
    bytes_held = peaks(build, group)
    if group.rank == 0:
        print(
            f"{name:36} {median[0] / median[1]:8.3f} {best[0] / best[1]:8.3f}   {min(by_round):.2f} .. "
            f"{max(by_round):.2f} {bytes_held[0] / bytes_held[1]:8.2f}",
            flush=True,
        )


def work(rank: int, report: Report, options: argparse.Namespace, file: str) -> None:
    """Report on every model whose name is asked for."""
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=options.ranks)
    group = Group.of(axis="data_parallel")
    for name, build in MODELS.items():
        if any(word in name for word in options.words):
            report(name, build, group, options.rounds)
    dist.barrier()
    dist.destroy_process_group()


def start(description: str, title: str, report: Report) -> None:
    """Read the options, print the title, and start the ranks."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("words", nargs="*", default=[""], help="models whose names have one of these in them")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="computing threads of each rank")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    print(f"{options.ranks} ranks, gloo, {options.threads} threads each; {title}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(report, options, f"{folder}/ranks"), nprocs=options.ranks)


if __name__ == "__main__":
    start(__doc__ or "", f"target: <= 1.05\n{'':36} {'medians':>8} {'minima':>8}   {'rounds':12} {'memory':>8}", report)
