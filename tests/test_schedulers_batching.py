"""What every embedded scheduler does: continuous batching, aborts, control requests, bad requests, the loop and its thread."""

import json
import logging
import threading

import pytest
from headrace.runtime.markov import NgramModel
from headrace.runtime.schedulers import EchoScheduler, MarkovScheduler, Scheduler
from headrace.runtime.scripted import ScriptedScheduler
from schedulers_helpers import FakePort, bad_header, run_dry


def echo(port, **options):
    return EchoScheduler(port, **options)


def markov(port, **options):
    return MarkovScheduler(port, NgramModel(list(range(50)) * 3), **options)


def scripted(port, **options):
    return ScriptedScheduler(port, lambda message: [[i] for i in message.input_ids] + [_end(message)], **options)


def _end(message):
    from headrace.runtime.scripted import Emit

    return Emit((), {"type": "length", "length": len(message.input_ids)})


ALL = pytest.mark.parametrize("make", [echo, markov, scripted])


@ALL
@pytest.mark.parametrize("wire", ["v1", "v2"])
def test_every_request_gets_exactly_one_end(make, wire):
    port = FakePort(wire)
    rids = [port.generate(f"r{n}", range(1, 2 + n), max_new_tokens=2 + n) for n in range(20)]
    scheduler = make(port, max_batch=3)
    run_dry(scheduler)
    assert [len(port.ends(rid)) for rid in rids] == [1] * 20
    assert scheduler.running == 0
    assert all(frame.unknown_columns == 0 for frame in port.frames)


@ALL
def test_requests_join_and_leave_between_steps_and_at_most_max_batch_run(make):
    port = FakePort()
    scheduler = make(port, max_batch=2)
    first = [port.generate(f"a{n}", [1, 2, 3, 4, 5, 6], max_new_tokens=6) for n in range(3)]
    scheduler.step()
    late = port.generate("late", [7], max_new_tokens=1)
    run_dry(scheduler)
    assert max(len(frame.rids) for frame in port.frames) <= 2
    named = [frame.rids for frame in port.frames]
    assert set(named[0]) == set(first[:2])
    after = next(i for i, rids in enumerate(named) if first[2] in rids)
    assert not set(named[after]) & {late} or set(named[after]) == {first[2], late}
    assert len(port.ends(late)) == 1


@ALL
def test_more_than_max_waiting_is_refused_with_503_and_the_others_are_served(make):
    port = FakePort()
    rids = [port.generate(f"r{n}", [1, 2], max_new_tokens=2) for n in range(6)]
    scheduler = make(port, max_batch=2, max_waiting=2)
    run_dry(scheduler)
    ends = [port.ends(rid)[0] for rid in rids]
    assert [end["type"] == "abort" for end in ends] == [False] * 4 + [True] * 2
    assert all(end["status_code"] == 503 for end in ends[4:])
    assert scheduler.counters["refused"] == 2


@ALL
def test_an_aborted_request_is_dropped_silently_wherever_it_is(make):
    port = FakePort()
    running, waiting, other = (port.generate(name, [1, 2, 3, 4], max_new_tokens=4) for name in ("a", "b", "c"))
    scheduler = make(port, max_batch=1)
    scheduler.step()
    port.abort(running)
    port.abort(waiting)
    port.abort("nobody")
    run_dry(scheduler)
    assert port.ends(running) == port.ends(waiting) == []
    assert len(port.ids(running)) == 1
    assert port.ids(waiting) == []
    assert len(port.ends(other)) == 1
    assert scheduler.counters["aborts"] == 2


@ALL
@pytest.mark.parametrize("at", range(4))
def test_an_abort_in_the_middle_leaves_the_neighbours_alone(make, at):
    port = FakePort()
    rids = [port.generate(f"r{n}", range(10 * n, 10 * n + 6), max_new_tokens=6) for n in range(4)]
    scheduler = make(port)
    scheduler.step()
    scheduler.step()
    port.abort(rids[at])
    run_dry(scheduler)
    for n, rid in enumerate(rids):
        assert len(port.ids(rid)) == (2 if n == at else 6)
        assert len(port.ends(rid)) == (0 if n == at else 1)


@ALL
def test_abort_all_drops_everything(make):
    port = FakePort()
    rids = [port.generate(f"r{n}", [1, 2, 3], max_new_tokens=3) for n in range(4)]
    scheduler = make(port, max_batch=2)
    scheduler.step()
    port.abort("", abort_all=True)
    run_dry(scheduler)
    assert all(port.ends(rid) == [] for rid in rids)
    assert scheduler.counters["aborts"] == 4


@ALL
def test_an_abort_in_the_same_drain_as_its_request_follows_it(make):
    port = FakePort()
    rid = port.generate("a", [1, 2])
    port.abort(rid)
    run_dry(make(port))
    assert port.ids(rid) == []
    assert port.ends(rid) == []


@ALL
def test_control_requests_are_answered_with_json(make):
    port = FakePort()
    port.generate("a", [1, 2, 3])
    port.control("FlushCacheReqInput", "c1", 0.0)
    port.control("GetInternalStateReq", "c2")
    port.control("SomethingNewReq", "c3", {"x": 1})
    run_dry(make(port))
    answers = {rid: json.loads(payload) for rid, payload in port.controls.items()}
    assert answers["c1"]["success"] is True
    assert answers["c2"]["requests"] == 1
    assert answers["c2"]["max_batch"] == 256
    assert answers["c3"]["success"] is False
    assert "SomethingNewReq" in answers["c3"]["message"]


@ALL
def test_a_request_that_cannot_be_read_fails_alone(make, caplog):
    port = FakePort()
    before = port.generate("a", [1, 2], max_new_tokens=2)
    port.inbox.append(bad_header("bad"))
    after = port.generate("b", [3, 4], max_new_tokens=2)
    nobody = bad_header("x")
    port.inbox.append(type(nobody)(rid="x", header=b"\xc1", ids=nobody.ids))
    scheduler = make(port)
    with caplog.at_level(logging.ERROR, "headrace"):
        run_dry(scheduler)
    assert list(port.errors) == ["bad"]
    assert len(port.ends(before)) == len(port.ends(after)) == 1
    assert scheduler.counters["unreadable"] == 2
    assert "without a readable rid" in caplog.text


@pytest.mark.parametrize("make", [echo, markov])
def test_max_new_tokens_0_ends_with_length_and_no_token(make):
    port = FakePort()
    rid, other = port.generate("a", [1, 2], max_new_tokens=0), port.generate("b", [1, 2], max_new_tokens=1)
    run_dry(make(port))
    assert port.ids(rid) == []
    assert port.lens(rid) == [0]
    assert port.ends(rid) == [{"type": "length", "length": 0}]
    assert len(port.ids(other)) == 1


@pytest.mark.parametrize("make", [echo, markov])
def test_a_request_that_ends_at_once_does_not_put_the_waiting_ones_to_sleep(make):
    port = FakePort()
    for n in range(3):
        port.generate(f"a{n}", [1], max_new_tokens=0)
    rid = port.generate("b", [2], max_new_tokens=1)
    make(port, max_batch=1).run()  # this port closes when a scheduler with an empty ring goes to sleep
    assert len(port.ends(rid)) == 1


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"max_waiting": -1}])
def test_senseless_sizes_are_refused(options):
    with pytest.raises(ValueError, match="at least"):
        EchoScheduler(FakePort(), **options)


# ---- the loop


def test_run_ends_when_the_port_closes_and_closes_it():
    port = FakePort()
    rid = port.generate("a", [1, 2, 3])
    EchoScheduler(port).run()
    assert port.ids(rid) == [1, 2, 3]
    assert port.waits == 1
    assert port.closed


def test_steps_are_spaced_by_the_interval_with_the_clock_that_was_given():
    port = FakePort()
    port.generate("a", [1, 2, 3])
    now, slept = [100.0], []

    def wait(seconds):
        slept.append(seconds)
        now[0] += seconds

    def clock():
        now[0] += 0.001  # every look costs a millisecond, so that a step does too
        return now[0]

    EchoScheduler(port, step_interval_s=0.02, clock=clock, wait=wait).run()
    assert slept == pytest.approx([0.019] * 3)


def test_without_an_interval_no_clock_is_read_and_nothing_waits():
    port = FakePort()
    port.generate("a", [1, 2, 3])

    def never(*_):
        raise AssertionError

    EchoScheduler(port, clock=never, wait=never).run()


def test_a_fault_closes_the_port_is_kept_and_logged(caplog):
    port = FakePort()
    port.generate("a", [1])

    class Faulty(EchoScheduler):
        def _produce(self):
            raise RuntimeError("boom")

    scheduler = Faulty(port).start()
    assert scheduler.stop()
    assert port.closed
    assert str(scheduler.failure) == "boom"
    assert "the scheduler died" in caplog.text
    again = FakePort()
    again.generate("a", [1])
    with pytest.raises(RuntimeError, match="boom"):
        Faulty(again).run()


class SleepingPort(FakePort):
    """Parks an idle scheduler until the port closes."""

    def __init__(self):
        super().__init__()
        self.asleep = threading.Event()
        self.end = threading.Event()

    def wait_request(self, timeout_s=None):
        self.asleep.set()
        self.end.wait(timeout_s)
        return False

    def close(self):
        super().close()
        self.end.set()


def test_stop_wakes_an_idle_scheduler_and_joins_its_thread():
    port = SleepingPort()
    scheduler = EchoScheduler(port).start()
    assert port.asleep.wait(30)
    assert [t.name for t in threading.enumerate() if t.name == "headrace-sched"] == ["headrace-sched"]
    assert scheduler.stop()
    assert scheduler.stop(), "idempotent"
    assert not [t for t in threading.enumerate() if t.name == "headrace-sched"]
    with pytest.raises(RuntimeError, match="already started"):
        scheduler.start()


def test_stop_wakes_a_scheduler_that_is_parked_on_a_full_egress_ring():
    class FullPort(SleepingPort):
        def push_frame(self, frame, timeout_s=None):
            self.asleep.set()
            return self.end.wait() and False

    port = FullPort()
    port.generate("a", [1, 2, 3])
    scheduler = EchoScheduler(port).start()
    assert port.asleep.wait(30)
    assert scheduler.stop()


def test_stop_ends_a_paced_wait_at_once():
    port = SleepingPort()
    port.generate("a", [1] * 10)
    stepped = threading.Event()

    class Telling(EchoScheduler):
        def step(self):
            try:
                return super().step()
            finally:
                stepped.set()

    scheduler = Telling(port, step_interval_s=3600.0).start()
    assert stepped.wait(30)
    assert scheduler.stop()


def test_a_scheduler_is_a_context_manager():
    port = SleepingPort()
    with EchoScheduler(port) as scheduler:
        assert isinstance(scheduler, Scheduler)
    assert port.closed


def test_a_scheduler_that_was_never_started_stops():
    assert EchoScheduler(FakePort()).stop()
