"""Run test functions on several gloo processes.

    @distributed(world_size=2)
    def test_sum(group):            # runs on both ranks; `group` is the `Group` of all ranks
        ...

Workers are forked per world size from a server that has already imported what takes long, and are reused until they
hold many process groups, as fits leave theirs behind. They meet through a file, never a port. Every job has a deadline:
a pool that misses it shows every rank's stack, is killed, and the next job gets a new one. `run` returns the ranks'
results, for tests whose oracle lives in the parent.

`run_script` runs a script as the interpreter would, in a fork of the same server: most of its time would be imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

__all__ = [
    "DurationError",
    "Ended",
    "RankError",
    "Started",
    "alone",
    "distributed",
    "free_port",
    "needs_fully_shard",
    "recorded_communication",
    "run",
    "run_script",
    "start_script",
]

DEADLINE_S = 240.0  # long, as a loaded machine may be slow; what waits for a failed rank ends sooner
JOBS_PER_POOL = 400  # what leaks in some test ends with its processes
GROUPS_PER_WORKER = 200
TestFunction = Callable[..., None]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lightning_parallel_test_"))
        pipes = [_context.Pipe() for _ in range(world_size)]
        self.pipes = [parent for parent, _ in pipes]
        self.jobs = self.groups = 0
        self.module, self.is_patched = "", False
        self.workers = [
            _context.Process(target=_work, args=(rank, world_size, str(self.folder), child), daemon=True)
            for rank, (_, child) in enumerate(pipes)
        ]
        for worker, (_, child) in zip(self.workers, pipes):
            worker.start()
            child.close()

    def is_worn_out(self, module: str) -> bool:
        """Whether a job of `module` is to have new workers."""
        is_spoiled = self.is_patched and module != self.module
        has_lost = not all(worker.is_alive() for worker in self.workers)
        return has_lost or is_spoiled or self.jobs >= JOBS_PER_POOL or self.groups > GROUPS_PER_WORKER

    def run(self, module: str, name: str, kwargs: dict[str, Any], deadline_s: float) -> list[Any]:
        self.module = module
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
                    outcomes[waiting[pipe]], groups, is_patched = pipe.recv()
                    self.groups, self.is_patched = max(self.groups, groups), self.is_patched or is_patched
                except EOFError:
                    self.workers[waiting[pipe]].join(5)
                    outcomes[waiting[pipe]] = ("died", f"exit code {self.workers[waiting[pipe]].exitcode}")
        return self._results(outcomes, deadline_s)

    def _results(self, outcomes: dict[int, tuple[str, Any]], deadline_s: float) -> list[Any]:
        bad = {rank: outcome for rank, outcome in sorted(outcomes.items()) if outcome[0] not in ("result", "skip")}
        if any(kind == "spoiled" for kind, _ in bad.values()):
            raise _SpoiledError
        if bad:
            text = "\n".join(f"--- rank {rank}: {kind}\n{text}" for rank, (kind, text) in bad.items())
            raise RankError(text, {kind for kind, _ in bad.values()})
        for kind, text in outcomes.values():
            if kind == "skip":
                pytest.skip(text)
        return [outcomes[rank][1] for rank in range(len(outcomes))]

    def _stack(self, rank: int) -> str:
        process, stack = self.workers[rank], self.folder / f"stack{rank}"
        if not stack.exists():
            return "not started yet"
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
            until = time.monotonic() + 5  # a busy machine writes it late
            while not stack.stat().st_size and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(0.3)  # thread after thread
        return stack.read_text()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join(5)
        shutil.rmtree(self.folder, ignore_errors=True)


class DurationError(AssertionError):
    """A duration is not what it should be, which on a busy machine proves nothing."""


class _SpoiledError(Exception):
    """An earlier job has left connections broken, as a refusal that one rank raises alone does."""


class RankError(AssertionError):
    """A distributed test failed; the text holds every failing rank's traceback, `kinds` how they failed."""

    def __init__(self, text: str, kinds: set[str]) -> None:
        super().__init__(text)
        self.kinds = kinds


_pools: dict[int, _Pool] = {}


def run(function: Callable[..., Any], world_size: int, deadline_s: float = DEADLINE_S, **kwargs: Any) -> list[Any]:
    """Call the module-level `function(**kwargs)` on `world_size` ranks and return their results by rank.

    A parameter called `group` receives the `Group` of all ranks; arguments and results must be picklable.
    """
    known = _pools.get(world_size)
    if known is not None and known.is_worn_out(function.__module__):
        _pools.pop(world_size).kill()
    if world_size not in _pools:
        _pools[world_size] = _Pool(world_size)
    _pools[world_size].jobs += 1
    try:
        with _turn(fcntl.LOCK_SH):
            return _pools[world_size].run(function.__module__, function.__qualname__, kwargs, deadline_s)
    except pytest.skip.Exception:
        raise
    except _SpoiledError:
        is_new = _pools[world_size].jobs == 1
        _pools.pop(world_size).kill()
        if is_new:
            raise
        return run(function, world_size, deadline_s, **kwargs)
    except BaseException:  # its answers would reach the next job
        _pools.pop(world_size).kill()
        raise


_is_alone = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let the ranks of no other pytest worker run during the block."""
    global _is_alone
    with _turn(fcntl.LOCK_EX):
        _is_alone = True
        try:
            yield
        finally:
            _is_alone = False


@contextlib.contextmanager
def _turn(kind: int) -> Iterator[None]:
    """Hold a lock of this checkout: shared by those that run ranks, exclusive to one that must be alone."""
    if "PYTEST_XDIST_WORKER" not in os.environ or _is_alone:
        yield
        return
    with open(__file__) as gate, Path(__file__).with_name("timing.py").open() as file:  # any two files of this checkout
        fcntl.flock(gate, fcntl.LOCK_EX)  # else those that share the lock would leave no gap
        fcntl.flock(file, kind)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


_scripts: list[Any] = []


class Ended(NamedTuple):
    """What a script left behind."""

    returncode: int
    stdout: str
    stderr: str


class Started:
    """A script that runs; to call it waits for its end.

    A script that misses its deadline is killed; its return code is then that of SIGKILL.
    """

    def __init__(self, process: Any, folder: Path, deadline_s: float) -> None:
        self.process, self.folder, self.deadline_s = process, folder, deadline_s

    def send(self, signum: int, to_group: bool = True) -> None:
        """Send a signal to the script, and to the processes that it started unless those left its group."""
        (os.killpg if to_group else os.kill)(self.process.pid, signum)

    def __call__(self, deadline_s: float | None = None) -> Ended:
        self.process.join(deadline_s or self.deadline_s)
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.process.join()
        out, err = ((self.folder / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self.folder)
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, out, err)


def start_script(
    *command: object, cwd: Path | None = None, deadline_s: float = DEADLINE_S, **environment: str
) -> Started:
    """Start `command`, a path and its arguments, like `python PATH ...`."""
    folder = Path(tempfile.mkdtemp(prefix="lightning_parallel_script_"))
    words = [str(word) for word in command]
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = _context.Process(target=_interpret, args=(words, str(cwd or Path.cwd()), whole, str(folder)))
    process.start()
    _scripts.append(process)
    return Started(process, folder, deadline_s)


def run_script(*command: object, cwd: Path | None = None, deadline_s: float = DEADLINE_S, **environment: str) -> Ended:
    """Run `command`, a path and its arguments, like `python PATH ...`."""
    return start_script(*command, cwd=cwd, deadline_s=deadline_s, **environment)()


def free_port() -> str:
    """A port of this machine that nobody listens at, for processes that are started one by one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def needs_fully_shard(compressed: bool = False) -> None:
    """Skip a test where torch has no FSDP2 that runs on CPUs, as 2.6 has, or none with hooks for its gradients."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip(f"`fully_shard` of torch {torch.__version__} runs on GPUs only")
    if compressed and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        pytest.skip(f"`fully_shard` of torch {torch.__version__} has no hooks for gradients")


def _interpret(command: list[str], cwd: str, environment: dict[str, str], folder: str) -> None:
    os.setsid()
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(d), "w", buffering=1, encoding="utf-8") for d in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _share_cores()  # gloo's threads in a script spin as long as those of a rank
    import torch

    torch.set_num_threads(1)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    _exit_as_interpreter(_status_of(command[0]))


def _status_of(path: str) -> int:
    """Run a script as the main module, and return the status that the interpreter would end with."""
    try:
        # As in an interpreter, what is global there lives until the very end.
        sys.modules["__main__"].__dict__.update(runpy.run_path(path, run_name="__main__"))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        traceback.print_exc()
        return 1
    return 0


def _exit_as_interpreter(status: int) -> NoReturn:
    """End the process as an interpreter does, with all that happens then; `multiprocessing` would by `os._exit`."""
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("it does not return")


def distributed(
    world_size: int, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a module-level test function into one that runs on `world_size` ranks; combines with `parametrize`."""

    def decorate(function: TestFunction) -> TestFunction:
        @functools.wraps(function)
        def test(**kwargs: Any) -> None:
            run(function, world_size, deadline_s, **kwargs)

        test.on_ranks = function  # type: ignore[attr-defined]
        signature = inspect.signature(function)
        visible = [parameter for name, parameter in signature.parameters.items() if name != "group"]
        test.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
        return test

    return decorate


@contextlib.contextmanager
def recorded_communication() -> Iterator[list[Any]]:
    """Collect the spans of the tensors' communication that ends inside the block, into a list filled at its end.

    Python objects, whose size is not known, are left out.
    """
    from lightning_parallel.tracing import Recorder, activate

    calls: list[Any] = []
    with activate(Recorder()) as recorder:
        yield calls
    calls.extend(span for span in recorder.spans if span.category == "communication" and span.bytes is not None)


def _work(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    with open(f"{folder}/stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        torch.set_num_threads(1)
        # A fit makes many objects and drops them, so that collections of garbage took a tenth of its time.
        gc.set_threshold(50_000, 10, 10)
        _share_cores()
        _share_device()
        store = dist.FileStore(f"{folder}/rendezvous", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            # What a launcher would have set; Lightning's teardown removes some of it.
            os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
            outcome = _outcome(*job) if _are_connected() else ("spoiled", "the ranks are not connected")
            groups = len(dist.distributed_c10d._world.pg_map)
            is_patched = "deepspeed" in sys.modules  # it replaces functions of torch, and leaves them so
            pipe.send((outcome, groups, is_patched))


def _are_connected() -> bool:
    import torch.distributed as dist

    try:
        dist.barrier()
    except (RuntimeError, ValueError):  # a connection is broken, or the group is gone
        return False
    return True


def _share_cores() -> None:
    """Keep to the core of this pytest worker, and do not interrupt the process that runs there when woken.

    The ranks or scripts of a worker fill its core. Processes that run on any core, several to each, hold locks of
    gloo's while they wait for a core, for which its threads then spin on another: a third of the time.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _share_device() -> None:
    """Let all gloo groups of this process use one device: each has a thread that wakes 100 times a second.

    While another thread holds the lock of a connection, that thread asks for it over and over (`Pair::handleEvents`
    only tries it): it gets a lower priority, so that the other one goes on.
    """
    import torch.distributed as dist

    gloo = dist.ProcessGroupGloo
    create, device = gloo.__init__, gloo.create_default_device()
    for thread in Path("/proc/self/task").glob("*"):  # none where there is no such folder
        if (thread / "comm").read_text().startswith("gloo_tcp"):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)

    def create_on_device(self: Any, store: Any, rank: int, size: int, timeout: Any = timedelta(minutes=30)) -> None:
        options = timeout
        if isinstance(timeout, timedelta):
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
        create(self, store, rank, size, options)

    gloo.__init__ = create_on_device


def _outcome(module: str, name: str, kwargs: dict[str, Any]) -> tuple[str, Any]:
    import torch

    from lightning_parallel.comm import Group
    from lightning_parallel.compat.torch import current_function_mode

    torch.manual_seed(0)
    environment, folder, dtype = dict(os.environ), Path.cwd(), torch.get_default_dtype()
    try:
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        function = getattr(function, "on_ranks", function)
        if "group" in inspect.signature(function).parameters:
            kwargs["group"] = Group.of()
        result = function(**kwargs)
        # One that stays would change what later steps of a process compute, such as without dropout.
        assert current_function_mode() is None, "a function mode was not left"
        return "result", result
    except pytest.skip.Exception as skip:
        return "skip", str(skip)
    except BaseException as error:
        kind = "duration" if isinstance(error, DurationError) else "error"
        return kind, "".join(traceback.format_exception(*sys.exc_info(), chain=True))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_default_dtype(dtype)


@atexit.register
def _stop() -> None:
    for pool in _pools.values():
        pool.kill()
    for script in _scripts:  # those that nobody waits for; the interpreter would, without end
        script.kill()
