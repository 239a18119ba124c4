"""Communication by kind of call: number, bytes, speed, and the waits of the ranks."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.table import Table
from typing_extensions import override

from lightning_parallel.callbacks.recording.clocks import NOT_COMPARED, ClockOffset, on_one_clock
from lightning_parallel.callbacks.recording.measuring import Accumulator, MeasuringCallback
from lightning_parallel.tracing import CallCounter, Span, Window

__all__ = ["CommunicationAccumulator", "CommunicationProfiler", "bus_factor", "wire_factor"]

SAMPLES = 16
"""Number of latest calls of each kind whose times the ranks compare at every exchange."""

RECENT = 64
"""Number of latest calls of each group that the ranks share, to find the first difference."""


class CallKind(NamedTuple):
    """Common facts of the calls of one kind. `peer` is the rank at the other end of a message."""

    axis: str
    op: str
    ranks: tuple[int, ...]
    group: str
    peer: int | None
    dtype: str | None
    bytes: int | None


class CallSample(NamedTuple):
    """One call. Its wait began at `waiting_ns`; `duration_ns` is None if its completion is unknown."""

    sequence: int
    tag: int | None
    start_ns: int
    end_ns: int
    waiting_ns: int
    duration_ns: int | None


class CallTotals:
    """Calls of one kind: their number, bytes and waits, and the latest spans."""

    __slots__ = ("blocked_ns", "bytes", "count", "exposed_ns", "last")

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self.blocked_ns = 0
        self.exposed_ns = 0
        self.last: deque[Span] = deque(maxlen=SAMPLES)


class CommunicationAccumulator(Accumulator):
    """Adds up the calls of this rank by kind.

    Args:
        rank: Global rank of this process.
        clocks: See `Session.clocks`; None if all ranks read one clock.
        calls: Collectives issued in each group, see `Recorder.calls`.
        missing: Communication that is not recorded, in sentences; may grow until `summarize`.
    """

    def __init__(
        self,
        rank: int,
        clocks: Mapping[int, ClockOffset] | None,
        calls: Mapping[tuple[Any, ...], CallCounter],
        missing: list[str],
    ) -> None:
        self._rank = rank
        self._clocks = clocks
        self._calls = calls
        self._missing = missing
        self._steps = 0
        self._totals: dict[CallKind, CallTotals] = {}
        self._apart: Counter[tuple[Any, ...]] = Counter()
        self._logged: Counter[str] = Counter()
        self._steps_logged = 0

    @override
    def add(self, window: Window) -> None:
        self._steps += 1
        for span in window.spans:
            if span.category != "communication":
                continue
            if span.apart is not None:
                self._add_apart(span)
                continue
            # Python objects have another size each time, so their kind has no size. A plain tuple equals its
            # `CallKind` as a key, and takes a fraction of the time to create.
            size = None if span.dtype is None else span.bytes
            key = span.axis, span.op, span.ranks, span.group, span.peer, span.dtype, size
            totals = self._totals.get(key)  # type: ignore[call-overload]
            if totals is None:
                kind = CallKind(*key)  # type: ignore[arg-type]
                totals = self._totals[kind] = CallTotals()
            totals.count += 1
            totals.bytes += span.bytes or 0
            totals.blocked_ns += span.blocked_ns
            totals.exposed_ns += span.exposed_ns
            totals.last.append(span)

    @override
    def end(self, window: Window) -> None:
        for span in window.spans:
            if span.category == "communication" and span.apart is not None:
                self._add_apart(span)

    def _add_apart(self, span: Span) -> None:
        kind = span.apart or "", span.axis or "", span.op or ""
        self._apart[kind, "calls"] += 1
        self._apart[kind, "bytes"] += span.bytes or 0

    @override
    def share(self) -> dict[str, Any]:
        kinds = {
            kind: (one.count, one.bytes, one.blocked_ns, one.exposed_ns, [_sample(span) for span in one.last])
            for kind, one in self._totals.items()
        }
        # Keys of length three are groups. Longer keys are messages, which only two ranks know.
        calls = {
            key: (calls.count, calls.digest, list(calls.recent)[-RECENT:])
            # A list, since other threads may add groups meanwhile.
            for key, calls in list(self._calls.items())
            if len(key) == 3
        }
        return {"rank": self._rank, "steps": self._steps, "kinds": kinds, "calls": calls, "apart": dict(self._apart)}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if not any(rank["steps"] for rank in shared):
            return {"records": [], "apart": [], "desynchronised": []}
        shared, uncertainty_ns = on_one_clock(shared, self._clocks, _shifted)
        # One record for each axis, not for each group: the groups of an axis do the same on other data.
        groups: defaultdict[tuple[Any, ...], list[tuple[dict[str, Any], CallKind]]] = defaultdict(list)
        for rank in shared:
            for kind in rank["kinds"]:
                groups[kind.axis, kind.op, len(kind.ranks), kind.dtype, kind.bytes].append((rank, kind))
        # Send and arrival happen on different ranks: without a common clock, the time between them is unknown.
        arrivals = {} if uncertainty_ns is None else _message_times(shared)
        records = [_record(key, found, len(shared), uncertainty_ns, arrivals) for key, found in groups.items()]
        records.sort(key=lambda record: (record["axis"], record["op"], -(record.get("payload_bytes") or 0)))
        report: dict[str, Any] = {"records": records, "apart": _apart(shared)}
        report["desynchronised"] = list(_desynchronised(shared))
        missing = [*self._missing]
        if uncertainty_ns is None:
            missing.append(f"{NOT_COMPARED} Skew is left out.")
        return {**report, "missing": missing} if missing else report

    @override
    def scalars(self) -> dict[str, float]:
        steps = self._steps - self._steps_logged
        self._steps_logged = self._steps
        if steps == 0:
            return {}
        sums: Counter[str] = Counter()
        for kind, totals in self._totals.items():
            sums[f"communication/{kind.axis}/exposed"] += totals.exposed_ns
            sent = totals.bytes * wire_factor(kind.op, len(kind.ranks))
            sums[f"communication/{kind.axis}/wire_bytes"] += round(sent)
        recent = {key: (value - self._logged[key]) / steps for key, value in sums.items()}
        self._logged = sums
        return {key: value / 1e9 if key.endswith("exposed") else value for key, value in recent.items()}


class CommunicationProfiler(MeasuringCallback[CommunicationAccumulator]):
    """Measures each kind of communication call: its axis, operation, size, bandwidth and waiting times.

    `report()` returns the common keys and these:

        records: [{axis, op, group_size, dtype, count, payload_bytes, wire_bytes, latency, skew, blocked, exposed,
                   algorithm_bandwidth, bus_bandwidth}]
        apart: [{phase, axis, op, calls, payload_bytes}]
        desynchronised: [{axis, group: [rank], ranks: [rank], detail}]
        missing: [sentence]

    | key of `records` | meaning, unit |
    |---|---|
    | `count` | calls per step and rank, mean over all ranks |
    | `payload_bytes` | size of the tensor or message, bytes per call |
    | `wire_bytes` | bytes per call that one rank sends in the ring form of the operation |
    | `latency` | time from the last rank's call to the end of the operation, seconds per call |
    | `skew` | time from the first rank's call to the last rank's call, seconds per call |
    | `blocked` | time for which the call blocked its thread, mean over the ranks, seconds per call |
    | `exposed` | time for which the training thread stood still for the call, seconds per call |
    | `algorithm_bandwidth` | payload / latency, bytes per second |
    | `bus_bandwidth` | `algorithm_bandwidth` times the factor of the operation, bytes per second |

    * `count`: the run made `count * steps * world_size` calls.
    * `payload_bytes` depends on the operation. For all_reduce and broadcast it is the size of the tensor. For
      all_gather and reduce_scatter it is the total that is gathered. For all_to_all it counts the bytes that a rank
      sends. For send and recv it is the size of the message.
    * `latency` excludes the time of waiting for late ranks.
    * `skew`: clocks of several hosts differ. There, the value may be off by `skew_uncertainty`.
    * `exposed` equals `blocked` if the training thread made the call. If another thread made the call, the key counts
      the time in which the training thread waited for that thread. On CUDA, the compute stream takes the place of the
      training thread.
    * `bus_bandwidth`: among n ranks the factor is, for example, 2(n-1)/n for all_reduce. Compare the result with the
      bandwidth of the link.

    A key is left out if its value could not be observed. An example is the latency of a message that arrived before a
    rank waited for it. Records without a `dtype` are collectives of Python objects, such as `all_gather_object`. In
    torch, these send first the sizes, then the contents: two calls. Their bytes are means.

    `apart` lists the communication in validation and in checkpoints: all calls and bytes of the run, mean over the
    ranks. The records cover the steps without validation and checkpoints.

    `desynchronised` lists groups in which some ranks issued other collectives than most of the group. `ranks` holds
    these ranks.

    `CommunicationProfiler` sees all process groups of torch, from Python and from C++, also under
    `torch.inference_mode`. It does not see communication inside your own kernels.

    Logged: `communication/<axis>/exposed` (seconds) and `communication/<axis>/wire_bytes`. Both are values per step of
    rank 0, mean over the steps since the last logging.

    Source: nccl-tests, PERFORMANCE.md (bandwidths).

    Example:
        ```py
        from lightning.pytorch import Trainer
        from lightning_parallel import CommunicationProfiler

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[CommunicationProfiler()])
        trainer.fit(MyModule(), MyData())  # prints a table after training
        ```

    Args:
        every_n_batches: Number of batches between two exchanges of results among the ranks. The smallest value of all
            callbacks counts.
        warmup_batches: Number of first batches that are not counted. The largest value of all callbacks counts.
        dirpath: Folder where rank 0 writes `<name>.json` and `<name>.csv` after training. None writes nothing.
        show_table: Print a table after training, on rank 0.

    Raises:
        ValueError: If a number of steps is too small.
    """

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> CommunicationAccumulator:
        session = self.open_session
        return CommunicationAccumulator(session.rank, session.clocks, session.calls, session.missing)

    @override
    def rows(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(report["records"])

    @override
    def table(self, report: Mapping[str, Any]) -> Table | None:
        if not report["records"]:
            return None
        table = Table(title="Communication per call", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for header in ("axis", "op", "ranks", "calls/step", "bytes", "ms", "skew ms", "exposed ms", "bus MB/s"):
            table.add_column(header, justify="left" if header in ("axis", "op") else "right")
        for record in report["records"]:
            table.add_row(
                record["axis"],
                record["op"],
                str(record["group_size"]),
                f"{record['count']:.4g}",
                _cell(record.get("payload_bytes"), 1, ".0f"),
                _cell(record.get("latency"), 1e3, ".3f"),
                _cell(record.get("skew"), 1e3, ".3f"),
                _cell(record.get("exposed"), 1e3, ".3f"),
                _cell(record.get("bus_bandwidth"), 1e-6, ".1f"),
            )
        return table


def bus_factor(op: str, size: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth in a group of `size` ranks."""
    op = op.removesuffix("_object")
    # In a ring, each rank sends its share n - 1 times to reduce it, and n - 1 times to gather the result.
    if op == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def wire_factor(op: str, size: int) -> float:
    """Return the ratio of the bytes that one rank sends, mean over the group, to the payload."""
    op = op.removesuffix("_object")
    if op in ("broadcast", "reduce", "gather", "scatter"):
        return (size - 1) / size
    return 0.0 if op == "recv" else bus_factor(op, size)


# --------------------------------------------------------------------------------------------------------- one record


def _sample(span: Span) -> CallSample:
    length = span.end_ns - span.start_ns
    duration = span.in_flight
    # If the completion is unknown, a rank that waited nearly all the time saw it: the end of its wait.
    if duration is None and span.blocked_ns > 0.8 * length:
        duration = length
    waiting_ns = span.end_ns - span.blocked_ns
    return CallSample(span.sequence or 0, span.tag, span.start_ns, span.end_ns, waiting_ns, duration)


def _record(
    key: tuple[Any, ...],
    found: Sequence[tuple[dict[str, Any], CallKind]],
    num_ranks: int,
    uncertainty_ns: int | None,
    arrivals: Mapping[tuple[int, CallKind], list[int]],
) -> dict[str, Any]:
    axis, op, size, dtype, payload = key
    # Counts come from the totals of a kind, which are exact. Times come from samples of the latest calls.
    count, num_bytes, blocked_ns, exposed_ns = (sum(rank["kinds"][kind][i] for rank, kind in found) for i in range(4))
    steps = max(rank["steps"] for rank, _ in found)
    record = {"axis": axis, "op": op, "group_size": size, "dtype": dtype, "count": count / steps / num_ranks}
    if payload is None and num_bytes:
        payload = num_bytes / count
    if payload is not None:
        record |= {"payload_bytes": payload, "wire_bytes": payload * wire_factor(op, size)}
    # A message has no last rank to call: its latency is the time from send to arrival.
    if op in ("send", "recv"):
        times = [time for rank, kind in found for time in arrivals.get((rank["rank"], kind), ())]
        skews: list[int] = []
    else:
        # Ranks keep only their latest samples. A call without the samples of all ranks has no known last rank.
        calls = [call for call in _matched(found) if len(call) == size]
        # A call is shorter than the possible error between clocks of several hosts, so then use durations.
        latencies = [_latency(call, uncertainty_ns == 0) for call in calls]
        times = [latency for latency in latencies if latency is not None]
        known = () if uncertainty_ns is None else calls
        skews = [_last_start(call) - min(sample.start_ns for sample in call) for call in known]
    if times:
        record["latency"] = fmean(times) / 1e9
    if skews:
        record["skew"] = fmean(skews) / 1e9
        if uncertainty_ns:
            record["skew_uncertainty"] = uncertainty_ns / 1e9
    record["blocked"] = blocked_ns / count / 1e9
    record["exposed"] = exposed_ns / count / 1e9
    if times and payload is not None:
        record["algorithm_bandwidth"] = payload / record["latency"]
        record["bus_bandwidth"] = record["algorithm_bandwidth"] * bus_factor(op, size)
    return record


def _matched(found: Iterable[tuple[dict[str, Any], CallKind]]) -> list[list[CallSample]]:
    """Group the samples by collective; ranks that no longer have a call are left out of its group."""
    calls: defaultdict[tuple[Any, ...], list[CallSample]] = defaultdict(list)
    for rank, kind in found:
        for sample in rank["kinds"][kind][-1]:
            calls[kind.ranks, kind.group, sample.sequence].append(sample)
    return list(calls.values())


def _shifted(rank: dict[str, Any], offset_ns: int) -> dict[str, Any]:
    """Move the times of a rank to another clock."""
    kinds = {
        kind: (
            *sums,
            [
                one._replace(
                    start_ns=one.start_ns + offset_ns,
                    end_ns=one.end_ns + offset_ns,
                    waiting_ns=one.waiting_ns + offset_ns,
                )
                for one in samples
            ],
        )
        for kind, (*sums, samples) in rank["kinds"].items()
    }
    return {**rank, "kinds": kinds}


def _last_start(call: Sequence[CallSample]) -> int:
    return max(sample.start_ns for sample in call)


def _latency(call: Sequence[CallSample], one_clock: bool) -> int | None:
    """Return the nanoseconds from the last rank's call to the end; without a common clock, the shortest duration."""
    if one_clock:
        began = _last_start(call)
        ends = [sample.start_ns + sample.duration_ns for sample in call if sample.duration_ns is not None]
        # The source of a broadcast may end before other ranks call, so skip earlier ends.
        return min((end - began for end in ends if end > began), default=None)
    durations = [sample.duration_ns for sample in call if sample.duration_ns is not None]
    # The rank that called last waited for no rank, so its duration is the shortest and holds no waiting.
    return min(durations) if len(durations) == len(call) else None


def _message_times(shared: Sequence[dict[str, Any]]) -> dict[tuple[int, CallKind], list[int]]:
    """Return the nanoseconds from send to arrival, by rank and kind, if the receiver already waited at the send."""
    # Sender, receiver, group, tag and sequence number identify a message at both ends.
    sent: dict[tuple[Any, ...], tuple[CallKind, int]] = {}
    for rank, kind, sample in _samples_of(shared, "send"):
        sent[rank, kind.peer, kind.ranks, kind.group, sample.tag, sample.sequence] = (kind, sample.start_ns)
    times: defaultdict[tuple[int, CallKind], list[int]] = defaultdict(list)
    for rank, kind, sample in _samples_of(shared, "recv"):
        message = (kind.peer, rank, kind.ranks, kind.group, sample.tag, sample.sequence)
        if message not in sent:
            continue
        send_kind, send_ns = sent[message]
        # For a later receiver, the time of arrival is unknown.
        if sample.waiting_ns < send_ns:
            times[rank, kind].append(sample.end_ns - send_ns)
            times[kind.peer or 0, send_kind].append(sample.end_ns - send_ns)
    return times


def _samples_of(shared: Sequence[dict[str, Any]], op: str) -> Iterator[tuple[int, CallKind, CallSample]]:
    """Yield rank, kind and sample of every call of one operation."""
    for report in shared:
        for kind, (*_, samples) in report["kinds"].items():
            if kind.op == op:
                yield from ((report["rank"], kind, sample) for sample in samples)


def _apart(shared: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the communication outside the steps: calls and bytes of a rank, mean over the ranks."""
    sums: Counter[tuple[Any, ...]] = Counter()
    for rank in shared:
        sums.update(rank["apart"])
    return [
        {
            **dict(zip(("phase", "axis", "op"), kind)),
            "calls": sums[kind, "calls"] / len(shared),
            "payload_bytes": sums[kind, "bytes"] / len(shared),
        }
        for kind in sorted({kind for kind, _ in sums})
    ]


# --------------------------------------------------------------------------------------------------------- agreement


def _desynchronised(shared: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Find the groups whose ranks issued different collectives, and the ranks that differ from the majority."""
    issued: defaultdict[tuple[Any, ...], dict[int, tuple[int, int, list[Any]]]] = defaultdict(dict)
    for rank in shared:
        for key, calls in rank["calls"].items():
            issued[key][rank["rank"]] = calls
    for (axis, group, _), by_rank in issued.items():
        # A rank without a call in a group has no counter for it.
        verdicts = {rank: (0, 0) if rank not in by_rank else by_rank[rank][:2] for rank in group}
        present = {rank["rank"] for rank in shared}
        # Do not accuse a rank that did not answer.
        if not present.issuperset(group) or len(set(verdicts.values())) == 1:
            continue
        (usual, _), *_ = Counter(verdicts.values()).most_common(1)
        odd = [rank for rank in group if verdicts[rank] != usual]
        reference = next(rank for rank in group if verdicts[rank] == usual)
        detail = "; ".join(_difference(rank, reference, by_rank) for rank in odd)
        yield {"axis": axis, "group": list(group), "ranks": odd, "detail": detail}


def _difference(rank: int, reference: int, by_rank: Mapping[int, tuple[int, int, list[Any]]]) -> str:
    """Say in which call `rank` first differs from `reference`."""
    mine, _, my_recent = by_rank.get(rank, (0, 0, []))
    theirs, _, their_recent = by_rank.get(reference, (0, 0, []))
    head = f"rank {rank} issued {mine} collectives, rank {reference} {theirs}"
    # Both lists end with the latest call. Compare from the first call that both ranks still have.
    first = max(mine - len(my_recent), theirs - len(their_recent))
    my_first = first - mine + len(my_recent)
    their_first = first - theirs + len(their_recent)
    aligned = zip_longest(my_recent[my_first:], their_recent[their_first:])
    for number, (own, other) in enumerate(aligned, start=first):
        if first <= min(mine, theirs) and own != other:
            return f"{head}; call {number} is {_call(own)} on rank {rank}, {_call(other)} on rank {reference}"
    return f"{head}; the first difference is older than the last {RECENT} calls"


def _call(call: tuple[str, int | None, str | None] | None) -> str:
    if call is None:
        return "none"
    op, num_bytes, dtype = call
    return op if num_bytes is None else f"{op} of {num_bytes} bytes {dtype}"


def _cell(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else format(value * factor, form)
