"""The session through which all gradients go: buckets, steps, verdicts, errors, and where it runs."""

import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import (
    GradientSession,
    Group,
    InlineExecutor,
    StreamExecutor,
    ThreadExecutor,
    fill_buckets,
    overlapping_executor,
)
from lightning_parallel.compat import patched
from lightning_parallel.compression import Policy, PowerSGD, Quantize, TopK, thin_products
from tests.compression.test_launches import Launches, Reads
from tests.harness import distributed

ALONE = Group.alone("data_parallel")
CPU = torch.device("cpu")


def _gradient(value=1.0):
    return {"w": torch.full((8, 8), value)}


@pytest.fixture(params=["inline", "thread"])
def executor(request):
    made = InlineExecutor() if request.param == "inline" else ThreadExecutor(CPU)
    yield made
    made.close()


def test_calls_run_in_order_and_give_their_results(executor):
    order = []
    results = [executor.submit(lambda index=index: order.append(index) or index) for index in range(20)]
    assert [result() for result in results] == list(range(20)) == order
    executor.close()
    executor.wait()  # returns after the end as well


def test_a_thread_keeps_the_first_error_until_it_is_waited_for():
    executor = overlapping_executor(CPU)
    assert executor.submit(threading.get_ident)() != threading.get_ident()
    first = executor.submit(lambda: 1 / 0)
    executor.submit(lambda: {}["second"])
    with pytest.raises(ZeroDivisionError):
        executor.wait()
    executor.wait()
    with pytest.raises(ZeroDivisionError):
        first()
    executor.close()


def test_all_buckets_until_finish_are_one_step(executor):
    compressor = TopK(0.1, min_numel=1)
    session = GradientSession(compressor, ALONE, executor)
    for _ in range(2):
        for name in ("a", "b"):
            session.add({name: torch.ones(8, 8)})
        assert session.finish()
    assert compressor.step == 2
    assert session.finish(), "nothing was added: the last verdict stands"
    assert compressor.step == 2


def test_a_gradient_that_comes_again_begins_the_next_step(executor):
    compressor = TopK(0.1, min_numel=1)
    session = GradientSession(compressor, ALONE, executor)
    session.add(_gradient(torch.inf))
    session.add(_gradient())
    assert not session.finish(), "the first of the two steps was dropped"
    assert compressor.step == 1
    session.add(_gradient())
    assert session.finish()


def test_copies_leave_the_gradients_alone(executor):
    session = GradientSession(TopK(0.1, min_numel=1), ALONE, executor)
    gradients = _gradient()
    means = session.add(gradients, copy=True)
    session.wait()
    assert torch.equal(gradients["w"], torch.ones(8, 8))
    assert torch.count_nonzero(means()["w"]) == 6
    assert session.finish()


def test_a_step_that_is_discarded_or_fails_leaves_no_trace(executor):
    compressor = TopK(0.1, min_numel=1)
    session = GradientSession(compressor, ALONE, executor)
    session.add(_gradient())
    session.wait()
    session.discard()
    assert compressor.state_dict()["step"] == 0
    assert compressor.residual_norm == 0

    def fail():
        session.add({"w": torch.ones(3, dtype=torch.int64)})
        session.finish()

    with pytest.raises(TypeError, match="floating-point"):
        fail()
    session.add(_gradient())
    assert session.finish()
    assert compressor.step == 1


def test_the_loss_scale_is_read_when_a_step_begins():
    compressor, scales = TopK(0.1, min_numel=1), iter([2.0, 8.0])
    session = GradientSession(compressor, ALONE, loss_scale=lambda: next(scales))
    for expected in (2.0, 8.0):
        session.add({"a": torch.ones(8, 8)})
        session.add({"b": torch.ones(8, 8)})
        assert session.finish()
        assert compressor.scale == expected


@distributed(world_size=2)
def test_ranks_with_other_parts_of_the_model_agree_on_the_verdict(group):
    compressor = TopK(0.1, min_numel=1)
    session = GradientSession(compressor, ALONE, ThreadExecutor(CPU), verdict_group=Group.of(dist.new_group()))
    for step, value in enumerate((1.0, torch.inf, 1.0)):
        session.add(_gradient(value if group.rank == 0 else 1.0))
        assert session.finish() == (step != 1)
    assert compressor.step == 2
    session.close()


def _twin_groups(timeout_s=60):
    """Two more groups of all ranks, and the order of the collectives that each carries."""
    orders = [[], []]
    made = [dist.new_group(timeout=timedelta(seconds=timeout_s)) for _ in orders]
    return [Group.of(one).guarded_by(order.append) for one, order in zip(made, orders)], orders


def _buckets(count, *seed):
    generator = torch.Generator().manual_seed(hash(seed))
    return [{f"{'abc'[index % 3]}{index}": torch.randn(24, 16, generator=generator)} for index in range(count)]


def _assert_same_means(session, found, oracle, expected):
    assert session.finish() == oracle.finish()
    for means, true in zip(found, expected, strict=True):
        assert all(torch.equal(mean, true()[name]) for name, mean in means().items())


@distributed(world_size=3)
def test_two_buckets_in_flight_give_the_bits_of_one_whatever_is_ready_first(group):
    def compressor():
        small = {"min_numel": 1}
        return Policy({"a*": PowerSGD(2, **small), "b*": Quantize(8, **small), "*": TopK(0.1, **small)})

    (first, second), orders = _twin_groups()
    session = GradientSession(compressor(), first, ThreadExecutor(CPU), second_group=second)
    oracle = GradientSession(compressor(), group)
    for step in range(5):
        buckets = _buckets(7, step, group.rank)
        if (step, group.rank) == (3, 1):
            buckets[5]["c5"][0, 0] = torch.inf
        expected = [oracle.add(bucket, copy=True) for bucket in buckets]
        found = []
        for index, bucket in enumerate(buckets):
            found.append(session.add(bucket, copy=True))
            # A rank that brings the next bucket when this one is done, one that brings them by twos, and by threes.
            if index % (group.rank + 1) == 0:
                found[-1]()
        _assert_same_means(session, found, oracle, expected)
        assert session.applied == (step != 3)
    for slot, values in oracle.reducer.state_dict().items():
        mine = session.reducer.state_dict()[slot]
        assert all(torch.equal(mine[name], value) for name, value in values.items()) if slot == "residual" else True
    assert all(len(set(order)) == 3 for order in orders), "both groups carry messages of several kinds"
    assert all(found == orders for found in comm.all_gather_object(orders, group))
    session.close()


@distributed(world_size=2)
def test_a_bucket_is_sent_while_the_one_before_waits_for_its_messages(group):
    (first, second), orders = _twin_groups()
    compressor = PowerSGD(2, min_numel=1)
    session = GradientSession(compressor, first, ThreadExecutor(CPU), second_group=second)
    for step in range(2):  # in the first one ranks compare what is new, bucket by bucket
        buckets = _buckets(2, step, group.rank)
        if (step, group.rank) == (1, 1):
            comm.broadcast_object(None, group)  # until the other one has sent its second bucket
        before = len(orders[1])
        found = [session.add(bucket) for bucket in buckets]
        if (step, group.rank) == (1, 0):
            deadline_s = time.monotonic() + 60
            while len(orders[1]) == before and time.monotonic() < deadline_s:
                time.sleep(1e-3)
            was_sent = len(orders[1]) > before
            comm.broadcast_object(None, group)
            assert was_sent, "the second bucket waits for the end of the first"
        assert session.finish()
        assert all(means() for means in found)
    assert compressor.step == 2
    session.close()


class Failing(PowerSGD):
    fails = False

    def requests(self, block, step):
        yield from super().requests(block, step)
        if self.fails and "a0" in block.names:
            raise ArithmeticError("here")


@distributed(world_size=2)
def test_a_failure_in_flight_is_raised_at_the_end_of_the_step_and_leaves_no_trace(group):
    (first, second), _ = _twin_groups()
    compressor = Failing(2, min_numel=1, exact_rollback=True)
    session = GradientSession(compressor, first, ThreadExecutor(CPU), second_group=second)
    oracle = GradientSession(PowerSGD(2, min_numel=1), group)
    for step in range(4):
        buckets = _buckets(3, step, group.rank)
        compressor.fails = step == 2
        found = [session.add(bucket, copy=True) for bucket in buckets]
        if compressor.fails:
            for call in (session.finish, found[0]):
                with pytest.raises(ArithmeticError, match="here"):
                    call()
            continue
        _assert_same_means(session, found, oracle, [oracle.add(bucket, copy=True) for bucket in buckets])
    assert compressor.step == 3
    session.close()


class FailingMidway(PowerSGD):
    fails = False

    def requests(self, block, step):
        found = super().requests(block, step)
        answer = None
        with suppress(StopIteration):
            while True:
                answer = yield found.send(answer)
                if self.fails and "a0" in block.names:
                    raise ArithmeticError("here")


@pytest.mark.sweep(kept=None)
@distributed(world_size=2)
def test_a_failure_on_one_rank_sends_nothing_in_place_of_what_the_other_waits_for(group):
    (first, second), orders = _twin_groups(timeout_s=4)
    compressor = FailingMidway(2, min_numel=1)
    session = GradientSession(compressor, first, ThreadExecutor(CPU), second_group=second)
    for bucket in _buckets(6, 0, group.rank):
        session.add(bucket, copy=True)
    assert session.finish(), "what comes for the first time is agreed on, a bucket at a time"
    for order in orders:
        order.clear()
    compressor.fails = group.rank == 1
    found = [session.add(bucket, copy=True) for bucket in _buckets(6, 1, group.rank)]
    # The other rank ends by the deadline of the group, as it would by the end of the connection.
    with pytest.raises(ArithmeticError if group.rank == 1 else RuntimeError):
        session.finish()
    assert [len(order) for order in comm.all_gather_object(orders, group)[1]] == [1, len(orders[1])]
    assert found[1]() is not None, "the bucket beside it is not disturbed"
    for index in {0, *range(2, 6)} if group.rank == 1 else ():
        with pytest.raises(ArithmeticError, match="here"):
            found[index]()
    session.close()


def test_buckets_are_filled_in_order_by_kind_and_the_first_is_small():
    sizes = dict.fromkeys("abcdefg", 1 << 20)
    assert fill_buckets(sizes, 2 << 20) == [["a"], ["b", "c"], ["d", "e"], ["f", "g"]]
    by_kind = fill_buckets(sizes, 2 << 20, kind=lambda name: name in "bd")
    assert by_kind == [["a"], ["b", "d"], ["c", "e"], ["f", "g"]]
    assert fill_buckets({}, 1) == []


class Stream:
    """Notes what a CUDA stream is told, in one list for all streams."""

    device = torch.device("cuda", 0)

    def __init__(self, name, told):
        self.name, self.told, self.events = name, told, 0

    def record_event(self):
        self.events += 1
        return f"{self.name} {self.events}"

    def wait_event(self, event):
        self.told.append(f"{self.name} waits for {event}")

    def wait_stream(self, other):
        self.told.append(f"{self.name} waits for all of {other.name}")


@pytest.mark.parametrize("executor", [ThreadExecutor, StreamExecutor])
def test_who_takes_a_result_waits_for_its_call_alone(executor, monkeypatch):
    told = []
    main = Stream("main", told)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    made = executor(torch.device("cuda", 0))
    first, second = made.submit(lambda: {"w": torch.ones(2)}), made.submit(lambda: 2)
    assert second() == 2
    told.clear()
    assert first()["w"].sum() == 2
    assert told == ["main waits for side 1"]
    told.clear()
    made.wait()
    assert told == ["main waits for all of side"]
    made.close()


@distributed(world_size=2)
def test_a_verdict_is_read_once_after_all_ranks_have_agreed(group):
    compressor = PowerSGD(1, min_numel=1)
    session = GradientSession(compressor, group, verdict_group=group)
    for step, value in enumerate((1.0, torch.inf, 1.0)):
        gradients, seen = _gradient(value if group.rank == 0 else 1.0), Launches()
        session.reduce(_gradient())  # the first step of a reducer exchanges Python objects
        session.discard()
        # As on a device, where products are not numpy's.
        with seen, Reads(seen), patched(thin_products, "launches_kernels", lambda tensor: True):
            session.add(gradients)
            assert session.finish() == (step != 1)
        assert +seen.waited == {"_local_scalar_dense": 1}
    assert compressor.step == 2
