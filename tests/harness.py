"""Run test functions on several gloo processes.

    @distributed(world_size=2)
    def test_sum(group):            # runs on both ranks; `group` is the `Group` of all ranks
        ...

Workers are forked per world size from a server that has already imported what takes long, and are reused for a while.
They meet through a file, never a port. Every job has a deadline: a pool that misses it shows every rank's stack, is
killed, and the next job gets a new one. `run` returns the ranks' results, for tests whose oracle lives in the parent.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

__all__ = ["distributed", "run"]

DEADLINE_S = 90.0
JOBS_PER_POOL = 100  # the process groups of a fit stay, with their threads, as long as the process does
TestFunction = Callable[..., None]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_parallel", "transformers"])


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lightning_parallel_test_"))
        pipes = [_context.Pipe() for _ in range(world_size)]
        self.pipes = [parent for parent, _ in pipes]
        self.jobs = 0
        self.workers = [
            _context.Process(target=_work, args=(rank, world_size, str(self.folder), child), daemon=True)
            for rank, (_, child) in enumerate(pipes)
        ]
        for worker, (_, child) in zip(self.workers, pipes):
            worker.start()
            child.close()

    def run(self, module: str, name: str, kwargs: dict[str, Any], deadline_s: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((module, name, kwargs))
        until = time.monotonic() + deadline_s
        outcomes: dict[int, tuple[str, Any]] = {}
        while len(outcomes) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in outcomes}
            failed = any(kind != "result" for kind, _ in outcomes.values())
            left = min(until - time.monotonic(), 10.0 if failed else deadline_s)  # peers of a failed rank may hang
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(left, 0))
            if not ready:
                outcomes.update({rank: ("hang", self._stack(rank)) for rank in waiting.values()})
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    outcomes[waiting[pipe]] = pipe.recv()
                except EOFError:
                    self.workers[waiting[pipe]].join(5)
                    outcomes[waiting[pipe]] = ("died", f"exit code {self.workers[waiting[pipe]].exitcode}")
        return self._results(outcomes, deadline_s)

    def _results(self, outcomes: dict[int, tuple[str, Any]], deadline_s: float) -> list[Any]:
        bad = {rank: outcome for rank, outcome in sorted(outcomes.items()) if outcome[0] not in ("result", "skip")}
        if bad:
            raise RankError("\n".join(f"--- rank {rank}: {kind}\n{text}" for rank, (kind, text) in bad.items()))
        for kind, text in outcomes.values():
            if kind == "skip":
                pytest.skip(text)
        return [outcomes[rank][1] for rank in range(len(outcomes))]

    def _stack(self, rank: int) -> str:
        process = self.workers[rank]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return (self.folder / f"stack{rank}").read_text()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join(5)
        shutil.rmtree(self.folder, ignore_errors=True)


class RankError(AssertionError):
    """A distributed test failed; the text holds every failing rank's traceback."""


_pools: dict[int, _Pool] = {}


def run(function: Callable[..., Any], world_size: int, deadline_s: float = DEADLINE_S, **kwargs: Any) -> list[Any]:
    """Call the module-level `function(**kwargs)` on `world_size` ranks and return their results by rank.

    A parameter called `group` receives the `Group` of all ranks; arguments and results must be picklable.
    """
    if world_size in _pools and _pools[world_size].jobs >= JOBS_PER_POOL:
        _pools.pop(world_size).kill()
    if world_size not in _pools:
        _pools[world_size] = _Pool(world_size)
    _pools[world_size].jobs += 1
    try:
        return _pools[world_size].run(function.__module__, function.__qualname__, kwargs, deadline_s)
    except RankError:
        _pools.pop(world_size).kill()
        raise


def distributed(
    world_size: int, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a module-level test function into one that runs on `world_size` ranks; combines with `parametrize`."""

    def decorate(function: TestFunction) -> TestFunction:
        @functools.wraps(function)
        def test(**kwargs: Any) -> None:
            run(function, world_size, deadline_s, **kwargs)

        signature = inspect.signature(function)
        visible = [parameter for name, parameter in signature.parameters.items() if name != "group"]
        test.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
        return test

    return decorate


def _work(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    with open(f"{folder}/stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/rendezvous", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            # What a launcher would have set; Lightning's teardown removes some of it.
            os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
            pipe.send(_outcome(*job))


def _outcome(module: str, name: str, kwargs: dict[str, Any]) -> tuple[str, Any]:
    import torch

    from lightning_parallel.comm import Group

    torch.manual_seed(0)
    try:
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        function = inspect.unwrap(function)  # type: ignore[arg-type]
        if "group" in inspect.signature(function).parameters:
            kwargs["group"] = Group.of()
        return "result", function(**kwargs)
    except pytest.skip.Exception as skip:
        return "skip", str(skip)
    except BaseException:
        return "error", "".join(traceback.format_exception(*sys.exc_info(), chain=True))


@atexit.register
def _stop() -> None:
    for pool in _pools.values():
        pool.kill()
