"""The scheduler itself: what it explores, what it calls a failure, and that it does not say "complete" when it was not."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from headrace.runtime.interleave import (
    Called,
    IncompleteSearch,
    Raised,
    Scenario,
    ScenarioError,
    ScheduleFailure,
    Tracker,
    World,
    WouldBlock,
    after,
    explore,
    linearize,
    op,
    replay,
    sample,
    search,
    solo,
)
from headrace.runtime.interleave.guard import canon
from hypothesis import given
from hypothesis import strategies as st


class Counter:
    """Adds by reading and writing in two critical sections, or in one."""

    def __init__(self, world: World, locked: bool) -> None:
        self._lock = world.primitives.Lock()
        self._other = world.primitives.Lock()
        self._event = world.primitives.Event()
        self._cond = world.primitives.Condition(self._lock)
        self._rlock = world.primitives.RLock()
        self.locked = locked
        self.value = 0
        world.guard(self, self._lock, constants=["locked"])

    def add(self) -> int:
        if self.locked:
            with self._lock:
                self.value += 1
                return self.value
        with self._lock:
            value = self.value
        with self._lock:
            self.value = value + 1
        return value + 1

    def peek(self) -> int:
        return self.value

    def rename(self) -> None:
        with self._lock:
            self.locked = not self.locked

    def forth(self) -> None:
        with self._lock, self._other:
            pass

    def back(self) -> None:
        with self._other, self._lock:
            pass

    def sleep(self, timeout: float | None = None) -> bool:
        with self._lock:
            return bool(self._cond.wait(timeout))

    def wake(self) -> None:
        with self._lock:
            self._cond.notify()

    def await_event(self, timeout: float | None = None) -> bool:
        return bool(self._event.wait(timeout))

    def set_event(self) -> None:
        self._event.set()

    def nested(self) -> int:
        with self._rlock, self._rlock, self._lock:
            self.value += 1
            return self.value

    def try_lock(self) -> bool:
        if self._other.acquire(blocking=False):
            self._other.release()
            return True
        return False

    def hold_other(self) -> None:
        with self._other:
            pass

    def read(self) -> int:
        with self._lock:
            return self.value


def counter(locked: bool = True) -> Any:
    return lambda world: Counter(world, locked)


def outcomes(scenario: Scenario, **options: Any) -> set[Any]:
    report = explore(scenario, **options).check()
    return set(report.outcomes)


ADDS = {"a": [op("add")], "b": [op("add")]}


def test_a_lost_update_is_among_the_outcomes_and_only_without_the_lock() -> None:
    values: set[int] = set()

    def final(subject: Counter, results: dict[str, tuple[Any, ...]]) -> None:
        values.add(subject.value)

    explore(Scenario("atomic", counter(True), ADDS, final=final)).check()
    assert values == {2}
    explore(Scenario("torn", counter(False), ADDS, final=final)).check()
    assert values == {1, 2}


def test_a_failing_final_check_is_a_failure_with_a_string_that_repeats_it() -> None:
    def final(subject: Counter, results: dict[str, tuple[Any, ...]]) -> None:
        value = subject.value
        assert value == 2, "an addition was lost"

    scenario = Scenario("torn", counter(False), ADDS, final=final)
    report = explore(scenario)
    assert report.failure is not None
    assert report.failure.kind == "final"
    assert report.failure.message.startswith("an addition was lost")
    assert replay(scenario, report.failure.replay).failure == report.failure
    with pytest.raises(ScheduleFailure, match="an addition was lost"):
        report.check()


@pytest.mark.parametrize("points", ["critical", "every"])
@pytest.mark.parametrize("locked", [True, False])
def test_pruning_and_finer_points_lose_no_outcome(points: str, locked: bool) -> None:
    threads = {"a": [op("add"), op("read")], "b": [op("add")], "c": [op("read"), op("add")]}
    scenario = Scenario("adders", counter(locked), threads)
    everything = outcomes(scenario, prune=False)
    assert outcomes(scenario, points=points) == everything
    assert explore(scenario).schedules < explore(scenario, prune=False).schedules


def test_parked_threads_and_timeouts_lose_no_outcome_by_pruning() -> None:
    threads = {"a": [op("sleep", 1.0), op("read")], "b": [op("sleep", 2.0)], "c": [op("add"), op("wake"), op("add")]}
    scenario = Scenario("sleepers", counter(), threads)
    assert outcomes(scenario, spurious=1) == outcomes(scenario, spurious=1, prune=False)


class Signal:
    """A lock that is taken from the start: `hear` waits until another thread gives it back with `tell`."""

    def __init__(self, world: World) -> None:
        self._lock = world.primitives.Lock()
        self._signal = world.primitives.Lock()
        self._signal.acquire()
        self.told = 0
        world.guard(self, self._lock)

    def hear(self, timeout: float = -1) -> tuple[bool, int]:
        heard = self._signal.acquire(True, timeout)
        with self._lock:
            return heard, self.told

    def tell(self) -> None:
        with self._lock:
            self.told += 1
        self._signal.release()

    def forget(self) -> None:
        with self._lock:
            self.told += 1


def test_a_lock_that_another_thread_gives_back_is_a_signal() -> None:
    heard = Scenario("heard", Signal, {"a": [op("hear")], "b": [op("tell")]})
    assert explore(heard).check().complete
    assert outcomes(heard) == outcomes(heard, prune=False)
    report = explore(Scenario("unheard", Signal, {"a": [op("hear")], "b": [op("forget")]}))
    assert report.failure is not None
    assert report.failure.kind == "asleep"
    twice = Scenario("twice", Signal, {"a": [op("hear"), op("hear")], "b": [op("tell")]})
    report = explore(twice)
    assert report.failure is not None
    assert report.failure.kind == "asleep", "a thread that waits for what it took itself waits for a signal"


def test_a_wait_for_a_lock_runs_out_of_time_at_any_moment_and_in_the_order_of_the_deadlines() -> None:
    values: set[Any] = set()

    def final(subject: Signal, results: dict[str, tuple[Any, ...]]) -> None:
        values.add(results["a"])

    threads = {"a": [op("hear", 1.0)], "b": [op("tell")]}
    scenario = Scenario("timed", Signal, threads, final=final)
    assert explore(scenario).check().complete
    assert values == {((True, 1),), ((False, 0),), ((False, 1),)}
    assert outcomes(scenario) == outcomes(scenario, prune=False)

    order: set[Any] = set()

    def both(subject: Signal, results: dict[str, tuple[Any, ...]]) -> None:
        order.add((results["a"][0][0], results["c"][0][0]))

    late = {"a": [op("hear", 1.0)], "c": [op("hear", 2.0)], "b": [after("a"), op("tell")]}
    explore(Scenario("ordered", Signal, late, final=both)).check()
    assert order == {(False, True), (False, False)}


def test_a_touch_without_the_lock_is_a_failure_and_a_constant_may_be_read_but_not_written() -> None:
    report = explore(Scenario("peek", counter(), {"a": [op("add")], "b": [op("peek")]}))
    assert report.failure is not None
    assert report.failure.kind == "unguarded"
    assert "b reads Counter.value while nobody holds its lock" in report.failure.message
    report = explore(Scenario("rename", counter(), {"a": [op("rename")]}))
    assert report.failure is not None
    assert "declared a constant" in report.failure.message


def test_locks_in_two_orders_are_a_deadlock() -> None:
    report = explore(Scenario("crossed", counter(), {"a": [op("forth")], "b": [op("back")]}))
    assert report.failure is not None
    assert report.failure.kind == "deadlock"
    assert explore(Scenario("parallel", counter(), {"a": [op("forth")], "b": [op("forth")]})).check().complete


def test_a_sleeper_is_a_failure_unless_it_may_sleep() -> None:
    threads = {"a": [op("sleep")], "b": [op("wake")]}
    report = explore(Scenario("early", counter(), threads))
    assert report.failure is not None
    assert report.failure.kind == "asleep"
    report = explore(Scenario("early", counter(), threads, may_sleep=True)).check()
    assert report.sleeping == 1
    assert report.schedules == 2


def test_time_is_virtual_and_fires_in_the_order_of_the_deadlines() -> None:
    threads = {"a": [op("sleep", 100.0), op("add")], "b": [op("sleep", 1.0), op("add")]}
    order = {tuple(result) for result in outcomes(Scenario("deadlines", counter(), threads))}
    # b parks and fires before a parks, or a parks first; a can only come first if b has not parked yet or is slow to go on
    assert len(order) == 2
    both = {"a": [op("sleep", 1.0)], "b": [op("wake")]}
    woken = {result[1][1] for result in outcomes(Scenario("either", counter(), both))}
    assert woken == {True, False}


def test_a_wake_up_for_no_reason_happens_as_often_as_allowed() -> None:
    scenario = Scenario("sleeper", counter(), {"a": [op("sleep")]}, may_sleep=True)
    assert explore(scenario).sleeping == 1
    report = explore(scenario, spurious=1)
    assert report.sleeping == 1
    assert report.schedules == 2


def test_events_and_reentrant_locks() -> None:
    threads = {
        "a": [op("await_event"), op("nested")],
        "b": [op("set_event")],
        "c": [op("await_event", 1.0), op("nested")],
    }
    seen = outcomes(Scenario("event", counter(), threads))
    assert {result[3][1] for result in seen} == {True, False}
    assert explore(Scenario("no event", counter(), {"a": [op("await_event")]})).failure is not None


def test_a_lock_that_is_tried_needs_every_point() -> None:
    threads = {"a": [op("try_lock")], "b": [op("hold_other")]}
    report = explore(Scenario("tried", counter(), threads))
    assert report.failure is not None
    assert report.failure.kind == "scenario"
    assert {result[1][1] for result in outcomes(Scenario("tried", counter(), threads), points="every")} == {True, False}


def test_after_waits_for_the_end_of_other_threads() -> None:
    threads = {"a": [op("add")], "b": [op("add")], "c": [after("a", "b"), op("add")]}
    assert {result[3][1] for result in outcomes(Scenario("after", counter(), threads))} == {3}


def test_an_exception_is_a_failure_unless_it_is_an_outcome() -> None:
    def burst(subject: Counter) -> None:
        raise KeyError("no")

    report = explore(Scenario("burst", counter(), {"a": [op(burst)]}))
    assert report.failure is not None
    assert report.failure.kind == "raised"
    assert outcomes(Scenario("burst", counter(), {"a": [op(burst)]}, raises=(KeyError,)))


def test_an_execution_without_end_is_cut_and_named() -> None:
    def spin(subject: Counter) -> None:
        while True:
            subject.add()

    report = explore(Scenario("spin", counter(), {"a": [op(spin)], "b": [op("add")]}), max_steps=50)
    assert report.failure is not None
    assert report.failure.kind == "endless"


def test_a_scenario_that_is_not_deterministic_is_told_so() -> None:
    runs = 0

    def moody(subject: Counter) -> None:
        nonlocal runs
        runs += 1
        for _ in range(runs % 3):
            subject.add()

    report = explore(Scenario("moody", counter(), {"a": [op(moody)], "b": [op("add"), op("add")]}), prune=False)
    assert report.failure is not None
    assert "not deterministic" in report.failure.message


def test_a_search_that_was_cut_short_says_so_and_fails_a_check_for_completeness() -> None:
    scenario = Scenario("cut", counter(False), {name: [op("add"), op("add")] for name in "abc"})
    report = explore(scenario, max_schedules=3)
    assert not report.complete
    assert "complete=false" in str(report)
    with pytest.raises(IncompleteSearch):
        report.check()
    assert "complete=true" in str(explore(scenario).check())


def test_the_search_above_four_threads_is_a_sample_and_its_seed_repeats_it() -> None:
    scenario = Scenario("crowd", counter(False), {name: [op("add")] for name in "abcde"})
    report = search(scenario, seed=3, schedules=50)
    assert report.mode == "sample"
    assert report.seed == 3
    assert not report.complete
    assert report.check().schedules == 50
    assert report.outcomes == search(scenario, seed=3, schedules=50).outcomes
    assert len(report.outcomes) > 5


def test_a_sample_finds_a_fault_and_its_string_repeats_it() -> None:
    threads = {"a": [op("forth")], "b": [op("back")], **{name: [op("add")] for name in "cdefg"}}
    scenario = Scenario("crossed in a crowd", counter(), threads)
    report = sample(scenario, schedules=500, seed=1)
    assert report.failure is not None
    assert report.failure.kind == "deadlock"
    assert replay(scenario, report.failure.replay).failure == report.failure


def test_a_string_of_another_scenario_or_of_other_choices_is_refused() -> None:
    report = explore(Scenario("crossed", counter(), {"a": [op("forth")], "b": [op("back")]}))
    assert report.failure is not None
    with pytest.raises(ScenarioError, match="is of scenario 'crossed'"):
        replay(Scenario("other", counter(), ADDS), report.failure.replay)
    name, options, _ = report.failure.replay.split("|")
    wrong = replay(Scenario("crossed", counter(), ADDS), f"{name}|{options}|7")
    assert wrong.failure is not None
    assert wrong.failure.kind == "scenario"


def test_a_guard_wants_a_lock_of_its_world_and_attributes_that_exist() -> None:
    world = World()
    with pytest.raises(ScenarioError, match="needs a lock of this world"):
        world.guard(Counter(world, True), object())
    plain = deque([1])

    class Holder:
        def __init__(self) -> None:
            self.items = plain

    with pytest.raises(ValueError, match="no attribute 'missing'"):
        world.guard(Holder(), world.primitives.Lock(), constants=["missing"])


def test_without_threads_a_wait_is_an_error_and_a_timeout_is_over_at_once() -> None:
    primitives = solo()
    condition = primitives.Condition()
    with condition:
        assert condition.wait(5.0) is False
        assert condition.wait_for(lambda: False, 5.0) is False
        with pytest.raises(WouldBlock):
            condition.wait()
    lock = primitives.Lock()
    with lock, pytest.raises(WouldBlock):
        lock.acquire()
    with lock:
        assert lock.acquire(timeout=5.0) is False
    with pytest.raises(RuntimeError, match="not held"):
        condition.notify()


# -- linearizability --------------------------------------------------------------------------------------------------------------


class Register:
    """A register of one value: `write(x)`, `read()`, and `take()`, which waits while it is empty."""

    def start(self) -> Any:
        return None

    def step(self, state: Any, name: str, args: tuple[Any, ...]) -> list[Any]:
        if name == "write":
            return [(None, args[0])]
        if name == "read":
            return [(state, state)]
        return [] if state is None else [(state, None)]


def test_a_history_is_judged_by_what_overlaps() -> None:
    model = Register()
    stale = [
        Called("a", "write", (1,), None, 0, True),
        Called("b", "read", (), None, 0, True),
    ]
    assert linearize(stale, model) == [1, 0]
    assert linearize([stale[0], stale[1]._replace(before=1)], model) is None
    sleeper = Called("c", "take", (), None, 0, False)
    assert linearize([stale[0], sleeper], model) is None
    assert linearize([sleeper], model) == []


@given(st.data())
def test_the_checker_that_grows_and_the_one_that_looks_back_agree(data: st.DataObject) -> None:
    """Random histories, right and wrong ones: calls begin and end in any order with any result."""
    tracker = Tracker(Register())
    open_calls: dict[int, tuple[str, tuple[Any, ...], int]] = {}
    history: list[Called] = []
    finished = 0
    alive = True
    for _ in range(data.draw(st.integers(1, 8))):
        thread = data.draw(st.integers(0, 2))
        if thread not in open_calls:
            name = data.draw(st.sampled_from(["write", "read", "take"]))
            args = (data.draw(st.integers(1, 2)),) if name == "write" else ()
            open_calls[thread] = (name, args, finished)
            tracker.call(thread, name, args)
        else:
            name, args, before = open_calls.pop(thread)
            result = None if name == "write" else data.draw(st.sampled_from([None, 1, 2]))
            finished |= 1 << len(history)
            history.append(Called(str(thread), name, args, result, before, True))
            alive = tracker.returned(thread, result)
            if not alive:
                break
    finished_order = linearize(history, Register()) if not open_calls else None
    if not open_calls:
        assert alive == (finished_order is not None)
    elif alive:
        sleeping = [
            Called(str(thread), name, args, None, before, False) for thread, (name, args, before) in open_calls.items()
        ]
        assert tracker.sleepers_must_wait() == (linearize(history + sleeping, Register()) is not None)


def test_an_outcome_that_is_an_exception_is_named_by_its_class() -> None:
    assert Raised("TimeoutError").error == "TimeoutError"


def test_values_of_one_class_are_told_apart_by_what_is_in_them() -> None:
    """Named tuples and subclasses of lists once counted as objects without attributes, and so as equal states."""

    class Pile(list[int]):
        pass

    class Slotted:
        __slots__ = ("one",)

        def __init__(self, one: int) -> None:
            self.one = one

    pairs: list[tuple[Any, Any]] = [
        (Raised("a"), Raised("b")),
        (Pile([1]), Pile([2])),
        (Slotted(1), Slotted(2)),
        ({1: 2}, {1: 3}),
        ({1}, {2}),
        (bytearray(b"a"), bytearray(b"b")),
        (KeyError("a"), KeyError("b")),
    ]
    for one, other in pairs:
        assert canon(one) == canon(one)
        assert canon(one) != canon(other)
    loop: list[Any] = []
    loop.append(Slotted(1))
    loop[0].one = loop[0]
    hash(canon(loop))
