"""Spans, phases and windows, with clocks that the test turns."""

import itertools
import threading
import time
import weakref

import pytest

from lightning_parallel import tracing
from lightning_parallel.tracing import InFlight, Ledger, Recorder, Span


class Device:
    """A device clock whose marks are passed when the test says so."""

    def __init__(self):
        self.times = itertools.count(1_000_000_000_000, 10)
        self.done = 0

    def mark(self):
        return next(self.times)

    def is_on_main_stream(self):
        return True

    def is_main(self, stream):
        return stream is None

    def completion(self, work, lane):
        return self.mark()

    def passed(self, mark):
        return mark <= self.done

    def read(self, mark):
        return mark

    def synchronize(self):
        self.done = float("inf")


def test_phases_are_exclusive_and_add_up():
    ledger = Ledger(100)
    ledger.enter("optimizer", 110)
    ledger.enter("forward", 120)
    ledger.enter("communication_exposed", 150)
    ledger.leave(170)
    ledger.leave(180)
    ledger.leave(200)
    phases = ledger.close(1000)
    assert phases == {"other": 10 + 800, "optimizer": 30, "forward": 40, "communication_exposed": 20}
    ledger.enter("forward", 1010)
    assert ledger.close(1100) == {"other": 10, "forward": 90}  # an open phase goes on in the next window
    assert ledger.close(1150) == {"forward": 50}


def test_time_can_be_moved_to_a_phase_that_is_known_later_but_never_more_than_there_is():
    ledger = Ledger(0)
    ledger.enter("backward", 10)
    assert ledger.reassign("communication_exposed", 5, 35, 50) == 30
    assert ledger.reassign("communication_exposed", 5, 35, 50) == 10
    assert ledger.close(50) == {"other": 10, "backward": 0, "communication_exposed": 40}


def test_an_absorbing_phase_keeps_the_time_of_what_runs_in_it():
    ledger = Ledger(0, absorbing=("validation",))
    ledger.enter("validation", 10)
    ledger.enter("forward", 20)
    ledger.leave(50)
    ledger.leave(60)
    ledger.enter("forward", 60)
    assert ledger.close(70) == {"other": 10, "validation": 50, "forward": 10}


def test_a_leave_too_many_does_not_lose_time():
    ledger = Ledger(0)
    ledger.leave(10)
    assert ledger.close(30) == {"other": 30}


def test_windows_hold_the_spans_that_ended_in_them():
    recorder = Recorder()
    with tracing.activate(recorder):
        with tracing.span("1F0", phase="forward", category="pipeline", stage=1, microbatch=0) as opened:
            time.sleep(0.01)
            opened.restart()
        (first,) = recorder.close_step()
        (second,) = recorder.close_step()
    (span,) = first.spans
    assert (span.category, span.name, span.step, span.stage, span.microbatch) == ("pipeline", "1F0", 0, 1, 0)
    assert span.end_ns - span.start_ns < first.phases["forward"] - 0.01e9
    assert (second.step, second.spans, second.start_ns) == (1, [], first.end_ns)
    assert sum(first.phases.values()) == first.wall_ns


def test_nothing_is_recorded_without_a_recorder():
    recorder = Recorder()
    assert tracing.active() is None
    with tracing.span("x", phase="forward") as opened:
        opened.restart()
    with tracing.activate(recorder):
        pass
    with tracing.span("x"):
        pass
    assert not recorder.spans


def test_the_ring_keeps_the_last_spans():
    recorder = Recorder(capacity=3)
    with tracing.activate(recorder):
        for index in range(5):
            with tracing.span(str(index)):
                pass
            recorder.close_step()
    assert [span.name for span in recorder.spans] == ["2", "3", "4"]
    assert [span.name for span in recorder.last_steps(2)] == ["4"]


def test_a_communication_is_in_flight_until_it_lands():
    recorder = Recorder()
    flight = InFlight(recorder, "all_reduce", "data_parallel", (0, 1), 8, "float32", None)
    assert list(recorder.in_flight.values()) == [flight]
    time.sleep(0.01)
    flight.complete = recorder.now()
    time.sleep(0.02)
    with flight:
        time.sleep(0.01)
    flight.finish()
    (window,) = recorder.close_step()
    (span,) = window.spans
    assert not recorder.in_flight
    assert span.start_ns + 0.01e9 < span.complete_ns < span.end_ns - 0.03e9
    assert span.blocked_ns == window.phases["communication_exposed"]
    assert 0.01e9 < span.blocked_ns < span.end_ns - span.start_ns - 0.03e9


def test_calls_of_a_group_are_numbered_and_compared_by_digest():
    def issue(*ops):
        recorder = Recorder()
        for op in ops:
            InFlight(recorder, op, "world", (0, 1), 4, "float32", None).finish()
        return recorder.calls_of("world", (0, 1)), [span.sequence for span in recorder.spans]

    same, numbers = issue("all_reduce", "broadcast")
    assert numbers == [0, 1]
    assert issue("all_reduce", "broadcast")[0].digest == same.digest
    assert issue("broadcast", "all_reduce")[0].digest != same.digest


def test_messages_to_different_peers_and_of_different_tags_are_numbered_apart():
    recorder = Recorder()
    for op, peer, tag in (("send", 1, 0), ("recv", 1, 0), ("send", 1, 0), ("send", 2, 0), ("send", 1, 7)):
        InFlight(recorder, op, "pipeline_parallel", (0, 1, 2), 4, "float32", peer, tag).finish()
    assert [(span.sequence, span.tag) for span in recorder.spans] == [(0, 0), (0, 0), (1, 0), (0, 0), (0, 7)]
    assert recorder.calls_of("pipeline_parallel", (0, 1, 2)).count == 0


def test_times_of_a_device_are_read_when_it_has_got_there():
    device = Device()
    recorder = Recorder(clock=device)
    with tracing.activate(recorder):
        with tracing.span("F", phase="forward"):
            pass
        assert recorder.close_step() == []
        with tracing.span("B", phase="backward"):
            pass
        device.done = 1_000_000_000_000 + 30
        (first,) = recorder.close_step()
        assert [span.name for span in first.spans] == ["F"]
        (second, third) = recorder.close_step(wait=True)
    assert first.phases["forward"] == 10
    assert first.spans[0] == Span("phase", "F", 10**12, 10**12 + 10, 0, thread=first.spans[0].thread)
    assert (second.step, second.phases["backward"], third.step) == (1, 10, 2)
    for window in (first, second, third):
        assert sum(window.phases.values()) == window.wall_ns


@pytest.mark.parametrize("held", [0, 2])
def test_held_times_of_a_device_are_device_times(held):
    recorder = Recorder(clock=Device())
    flight = InFlight(recorder, "all_reduce", "world", (0, 1), 4, "float32", None)
    for _ in range(held):
        with flight:
            pass
    flight.complete = recorder.clock.completion(None, None)
    flight.finish()
    (window,) = recorder.close_step(wait=True)
    assert window.spans[0].blocked_ns == 10 * held
    assert window.phases.get("communication_exposed", 0) == 10 * held


def test_tensors_stay_until_the_device_has_passed_the_end_of_their_communication():
    class Numbers:
        pass

    device = Device()
    recorder, numbers = Recorder(clock=device), Numbers()
    alive = weakref.ref(numbers)
    flight = InFlight(recorder, "all_reduce", "data_parallel", (0, 1), 8, "float32", None)
    flight.tensors = [numbers]
    flight.complete = device.mark()
    flight.finish(flight.complete)
    del flight, numbers
    recorder.close_step()
    assert alive() is not None
    recorder.close_step(wait=True)
    assert alive() is None


def test_what_another_stream_does_is_not_charged():
    device = Device()
    recorder = Recorder(clock=device)
    for is_main in (True, False):
        device.is_on_main_stream = lambda is_main=is_main: is_main
        flight = InFlight(recorder, "all_reduce", "data_parallel", (0, 1), 8, "float32", None)
        with flight:
            device.mark()
        flight.finish()
    (window,) = recorder.close_step(wait=True)
    here, beside = window.spans
    assert (here.blocked_ns, here.exposed_ns, window.phases["communication_exposed"]) == (20, 20, 20)
    assert (beside.blocked_ns, beside.exposed_ns) == (20, 0)


def test_a_call_of_another_thread_is_exposed_as_far_as_the_training_thread_waits_for_it():
    recorder, done = Recorder(), []
    recorder.on_submit = lambda: True
    with tracing.activate(recorder):
        note_done = recorder.submitted()

        def call():
            flight = InFlight(recorder, "all_reduce", "data_parallel", (0, 1), 8, "float32", None)
            with flight:
                time.sleep(0.03)
            flight.finish()
            note_done()

        thread = threading.Thread(target=call)
        thread.start()
        while recorder.num_beside and not recorder.in_flight:
            time.sleep(0.0001)
        with tracing.waiting("results"):
            thread.join()
        done += recorder.beside
    (window,) = recorder.close_step()
    call, wait = window.spans
    assert (call.category, wait.category, len(done), recorder.num_beside) == ("communication", "wait", 1, 0)
    assert 0 < call.exposed_ns <= min(call.blocked_ns, wait.end_ns - wait.start_ns)
    assert window.phases["communication_exposed"] == wait.end_ns - wait.start_ns


def test_communication_in_validation_is_apart():
    recorder = Recorder(absorbing=("validation",))
    for phase in ("forward", "validation", "forward"):
        recorder.enter(phase)
        recorder.enter("backward")
        InFlight(recorder, "all_reduce", "data_parallel", (0, 1), 8, "float32", None).finish()
        recorder.leave()
        recorder.leave()
    (window,) = recorder.close_step()
    assert [span.apart for span in window.spans] == [None, "validation", None]
