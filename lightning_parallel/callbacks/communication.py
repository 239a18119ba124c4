"""What the ranks send each other: how often, how much, how fast, and who waits."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.table import Table
from typing_extensions import override

from lightning_parallel.callbacks.base import Accumulator, MeasuringCallback
from lightning_parallel.recorder import Calls, Span, Window

__all__ = ["CommunicationAccumulator", "CommunicationProfiler", "bus_factor", "wire_factor"]

SAMPLES = 16
"""Calls of each kind whose times the ranks compare at every exchange."""

RECENT = 64
"""Calls of each group that are shared, to find the one in which ranks differ."""


class Kind(NamedTuple):
    """Calls that are alike. `peer` is the rank at the other end of a message."""

    axis: str
    op: str
    ranks: tuple[int, ...]
    group: str
    peer: int | None
    dtype: str | None
    bytes: int | None


class Sample(NamedTuple):
    """One call, waited for since `waiting_ns`; `duration_ns` is None where nothing told when it was over."""

    sequence: int
    tag: int | None
    start_ns: int
    end_ns: int
    waiting_ns: int
    duration_ns: int | None


class Tally:
    """Calls of one kind: how many, how long they held this rank up, and the last ones."""

    __slots__ = ("blocked_ns", "count", "last")

    def __init__(self) -> None:
        self.count = self.blocked_ns = 0
        self.last: deque[Span] = deque(maxlen=SAMPLES)


class CommunicationAccumulator(Accumulator):
    """Calls of this rank by kind.

    Args:
        rank: Global rank of this process.
        one_clock: Whether the times of all ranks can be compared.
        calls: What was issued in each group, see `Recorder.calls`.
        missing: What is not seen, in sentences; may grow until `summarize`.
    """

    def __init__(self, rank: int, one_clock: bool, calls: Mapping[tuple[Any, ...], Calls], missing: list[str]) -> None:
        self._rank, self._one_clock, self._calls, self._missing = rank, one_clock, calls, missing
        self._steps = 0
        self._tallies: dict[Kind, Tally] = {}
        self._logged: Counter[str] = Counter()
        self._steps_logged = 0

    @override
    def add(self, window: Window) -> None:
        self._steps += 1
        for span in window.spans:
            if span.category == "communication":
                key = span.axis, span.op, span.ranks, span.group, span.peer, span.dtype, span.bytes
                tally = self._tallies.get(key)  # type: ignore[call-overload]  # equal to the `Kind` of these
                if tally is None:
                    kind = Kind(*key)  # type: ignore[arg-type]
                    tally = self._tallies[kind] = Tally()
                tally.count += 1
                tally.blocked_ns += span.blocked_ns
                tally.last.append(span)

    @override
    def share(self) -> dict[str, Any]:
        kinds = {
            kind: (tally.count, tally.blocked_ns, [_sample(span) for span in tally.last])
            for kind, tally in self._tallies.items()
        }
        calls = {
            key: (calls.count, calls.digest, list(calls.recent)[-RECENT:])
            for key, calls in list(self._calls.items())
            if len(key) == 3
        }
        return {"rank": self._rank, "steps": self._steps, "kinds": kinds, "calls": calls}

    @override
    def summarize(self, shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if not any(rank["steps"] for rank in shared):
            return {"records": [], "desynchronised": []}
        groups: defaultdict[tuple[Any, ...], list[tuple[dict[str, Any], Kind]]] = defaultdict(list)
        for rank in shared:
            for kind in rank["kinds"]:
                groups[kind.axis, kind.op, len(kind.ranks), kind.dtype, kind.bytes].append((rank, kind))
        arrivals = _message_times(shared) if self._one_clock else {}
        records = [_record(key, found, len(shared), self._one_clock, arrivals) for key, found in groups.items()]
        records.sort(key=lambda record: (record["axis"], record["op"], -(record.get("payload_bytes") or 0)))
        report: dict[str, Any] = {"records": records, "desynchronised": list(_desynchronised(shared))}
        missing = [*self._missing]
        if not self._one_clock:
            missing.append("The ranks run on several hosts, whose clocks differ: skew is left out.")
        return {**report, "missing": missing} if missing else report

    @override
    def scalars(self) -> dict[str, float]:
        steps, self._steps_logged = self._steps - self._steps_logged, self._steps
        if steps == 0:
            return {}
        totals: Counter[str] = Counter()
        for kind, tally in self._tallies.items():
            totals[f"communication/{kind.axis}/exposed"] += tally.blocked_ns
            if kind.bytes is not None:
                sent = tally.count * kind.bytes * wire_factor(kind.op, len(kind.ranks))
                totals[f"communication/{kind.axis}/wire_bytes"] += round(sent)
        recent = {key: (value - self._logged[key]) / steps for key, value in totals.items()}
        self._logged = totals
        return {key: value / 1e9 if key.endswith("exposed") else value for key, value in recent.items()}


class CommunicationProfiler(MeasuringCallback):
    """Measures every kind of communication: along which axis, which operation, of which size.

    `report()` has, besides the common keys:

        records: [{axis, op, group_size, dtype, count, payload_bytes, wire_bytes, latency, skew, exposed,
                   algorithm_bandwidth, bus_bandwidth}]
        desynchronised: [{axis, group: [rank], ranks: [rank], detail}]
        missing: [sentence]

    `count` is the number of calls per step and rank, the mean over all ranks: `count * steps * world_size` calls were
    made. All else is per call: `payload_bytes` (the full tensor for all_reduce and broadcast, the gathered total for
    all_gather and reduce_scatter, what a rank sends for all_to_all, the message for send and recv); `wire_bytes`, what
    one rank sends, in the ring form of the operation; seconds of `latency`, from the last rank's call to the end, so
    without the waiting for late ones; of `skew`, from the first rank that called to the last; of `exposed`, for which
    the calling thread was held up, mean over the ranks. Bandwidths are bytes per second, payload / latency, and that
    times the factor of the operation in a group of `group_size` (2(n-1)/n for all_reduce), which compares with the
    link's. Keys that could not be observed are left out: the latency of messages that were there before they were
    waited for, the bytes of Python objects.

    `desynchronised` names the `ranks` that issued other collectives in a group than most of it did.

    Logged: `communication/<axis>/exposed` (seconds) and `communication/<axis>/wire_bytes`, per step of rank 0, mean
    over the steps since the last logging.

    Source: nccl-tests, PERFORMANCE.md (bandwidths).
    """

    @override
    def accumulate(self, trainer: Trainer, pl_module: LightningModule) -> Accumulator:
        assert self.session is not None
        session = self.session
        return CommunicationAccumulator(session.rank, session.one_clock, session.calls, session.missing)

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
                _shown(record.get("payload_bytes"), 1, ".0f"),
                _shown(record.get("latency"), 1e3, ".3f"),
                _shown(record.get("skew"), 1e3, ".3f"),
                _shown(record.get("exposed"), 1e3, ".3f"),
                _shown(record.get("bus_bandwidth"), 1e-6, ".1f"),
            )
        return table


def bus_factor(op: str, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth in a group of `size` ranks."""
    if op == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def wire_factor(op: str, size: int) -> float:
    """Bytes that one rank sends, mean over the group, over the payload."""
    if op in ("broadcast", "reduce"):
        return (size - 1) / size
    return 0.0 if op == "recv" else bus_factor(op, size)


# --------------------------------------------------------------------------------------------------------- one record


def _sample(span: Span) -> Sample:
    length = span.end_ns - span.start_ns
    waits_throughout = span.blocked_ns > 0.8 * length
    duration = length if span.in_flight is None and waits_throughout else span.in_flight
    assert span.sequence is not None
    return Sample(span.sequence, span.tag, span.start_ns, span.end_ns, span.end_ns - span.blocked_ns, duration)


def _record(
    key: tuple[Any, ...],
    found: Sequence[tuple[dict[str, Any], Kind]],
    num_ranks: int,
    one_clock: bool,
    arrivals: Mapping[tuple[int, Kind], list[int]],
) -> dict[str, Any]:
    axis, op, size, dtype, payload = key
    count = sum(rank["kinds"][kind][0] for rank, kind in found)
    blocked_ns = sum(rank["kinds"][kind][1] for rank, kind in found)
    steps = max(rank["steps"] for rank, _ in found)
    record = {"axis": axis, "op": op, "group_size": size, "dtype": dtype, "count": count / steps / num_ranks}
    if payload is not None:
        record |= {"payload_bytes": payload, "wire_bytes": payload * wire_factor(op, size)}
    if op in ("send", "recv"):
        times = [time for rank, kind in found for time in arrivals.get((rank["rank"], kind), ())]
        skews: list[int] = []
    else:
        calls = [call for call in _matched(found) if len(call) == size]
        times = [time for call in calls if (time := _latency(call, one_clock)) is not None]
        skews = [_last_start(call) - min(sample.start_ns for sample in call) for call in calls if one_clock]
    if times:
        record["latency"] = fmean(times) / 1e9
    if skews:
        record["skew"] = fmean(skews) / 1e9
    record["exposed"] = blocked_ns / count / 1e9
    if times and payload is not None:
        record["algorithm_bandwidth"] = payload / record["latency"]
        record["bus_bandwidth"] = record["algorithm_bandwidth"] * bus_factor(op, size)
    return record


def _matched(found: Iterable[tuple[dict[str, Any], Kind]]) -> list[list[Sample]]:
    """The samples of each collective, from the ranks that still have them."""
    calls: defaultdict[tuple[Any, ...], list[Sample]] = defaultdict(list)
    for rank, kind in found:
        for sample in rank["kinds"][kind][2]:
            calls[kind.ranks, kind.group, sample.sequence].append(sample)
    return list(calls.values())


def _last_start(call: Sequence[Sample]) -> int:
    return max(sample.start_ns for sample in call)


def _latency(call: Sequence[Sample], one_clock: bool) -> int | None:
    """From the last call to the end, or the shortest duration: that of the rank which waited for nobody."""
    if one_clock:
        began = _last_start(call)
        ends = [sample.start_ns + sample.duration_ns for sample in call if sample.duration_ns is not None]
        return min((end - began for end in ends if end > began), default=None)  # a source may end before others call
    durations = [sample.duration_ns for sample in call if sample.duration_ns is not None]
    return min(durations) if len(durations) == len(call) else None


def _message_times(shared: Sequence[dict[str, Any]]) -> dict[tuple[int, Kind], list[int]]:
    """Nanoseconds from the sending to the arrival, where the receiver was already waiting when it was sent."""
    sent = {
        (rank["rank"], kind.peer, kind.ranks, kind.group, sample.tag, sample.sequence): (kind, sample.start_ns)
        for rank in shared
        for kind, (_, _, samples) in rank["kinds"].items()
        if kind.op == "send"
        for sample in samples
    }
    times: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for rank in shared:
        for kind, (_, _, samples) in rank["kinds"].items():
            for sample in samples if kind.op == "recv" else ():
                match = sent.get((kind.peer, rank["rank"], kind.ranks, kind.group, sample.tag, sample.sequence))
                if match is not None and sample.waiting_ns < match[1]:
                    times[rank["rank"], kind].append(sample.end_ns - match[1])
                    times[kind.peer or 0, match[0]].append(sample.end_ns - match[1])
    return times


# --------------------------------------------------------------------------------------------------------- agreement


def _desynchronised(shared: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The groups whose ranks did not issue the same collectives, and the ranks that differ from most of them."""
    issued: defaultdict[tuple[Any, ...], dict[int, tuple[int, int, list[Any]]]] = defaultdict(dict)
    for rank in shared:
        for key, calls in rank["calls"].items():
            issued[key][rank["rank"]] = calls
    for (axis, group, _), by_rank in issued.items():
        verdicts = {rank: (0, 0) if rank not in by_rank else by_rank[rank][:2] for rank in group}
        present = {rank["rank"] for rank in shared}
        if not present.issuperset(group) or len(set(verdicts.values())) == 1:
            continue
        (usual, _), *_ = Counter(verdicts.values()).most_common(1)
        odd = [rank for rank in group if verdicts[rank] != usual]
        reference = next(rank for rank in group if verdicts[rank] == usual)
        detail = "; ".join(_difference(rank, reference, by_rank) for rank in odd)
        yield {"axis": axis, "group": list(group), "ranks": odd, "detail": detail}


def _difference(rank: int, reference: int, by_rank: Mapping[int, tuple[int, int, list[Any]]]) -> str:
    """Say in which call `rank` first differs from `reference`."""
    (mine, _, my_recent), (theirs, _, their_recent) = (by_rank.get(r, (0, 0, [])) for r in (rank, reference))
    head = f"rank {rank} issued {mine} collectives, rank {reference} {theirs}"
    first = max(mine - len(my_recent), theirs - len(their_recent))
    aligned = zip_longest(
        my_recent[first - mine + len(my_recent) :], their_recent[first - theirs + len(their_recent) :]
    )
    for number, (own, other) in enumerate(aligned, start=first):
        if first <= min(mine, theirs) and own != other:
            return f"{head}; call {number} is {_call(own)} on rank {rank}, {_call(other)} on rank {reference}"
    return f"{head}; they differ in a call that lies further back than the last {RECENT}"


def _call(call: tuple[str, int | None, str | None] | None) -> str:
    if call is None:
        return "none"
    op, num_bytes, dtype = call
    return op if num_bytes is None else f"{op} of {num_bytes} bytes {dtype}"


def _shown(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else format(value * factor, form)
