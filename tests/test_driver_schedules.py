"""The thread driver itself under every schedule: what came before the word to stop is served, calls are answered, nobody sleeps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from headrace.runtime.channel import Bell, Channel
from headrace.runtime.interleave import Scenario, ScheduleFailure, explore, op
from headrace.runtime.interleave.actors import Unwind
from headrace.runtime.threads import DriverThread


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The search leaves a schedule by an exception, which the driver logs as its death."""
    caplog.set_level(logging.CRITICAL, "headrace.threads")


class House:
    """One driver with one channel: the driver's thread runs `run`, everybody else the rest."""

    driver_class = DriverThread

    def __init__(self, world: Any) -> None:
        primitives = world.primitives
        self.world = world
        self.done: list[int] = []
        bell = Bell(primitives)
        self.channel: Channel[int] = Channel(None, bell, primitives)
        self.driver = self.driver_class("d", bell, self._pump, self._died, primitives=primitives)
        constants = [name for name in vars(self.driver) if name not in ("_calls", "_stop", "_started", "_ended")]
        world.guard(self.driver, self.driver._lock, constants=constants)
        world.guard(self.channel, self.channel._lock, constants=["_lock", "_capacity", "_bell", "_room_bell"])
        world.watch(lambda: tuple(self.done))

    def _pump(self) -> bool:
        self.world.loop(tuple(self.done))
        taken = self.channel.take()
        self.done += taken
        return bool(taken)

    def _died(self, name: str, fault: BaseException) -> None:
        if not isinstance(fault, Unwind):  # the search's own way out of a schedule that it has seen before
            raise AssertionError(f"{name} died: {fault!r}")

    def run(self) -> None:
        self.driver.run()

    def put(self, item: int) -> None:
        assert self.channel.put(item)

    def stop(self) -> None:
        self.driver.stop()

    def look(self) -> int:
        return self.driver.call(lambda: len(self.done), 1000.0)


def scenario(name: str, threads: dict[str, list[Any]], house: type[House] = House) -> Scenario:
    def final(subject: House, results: dict[str, tuple[Any, ...]]) -> None:
        assert sorted(subject.done) == sorted(
            call.args[0] for calls in threads.values() for call in calls if call.name == "put"
        )

    return Scenario(name, house, threads, raises=(TimeoutError,), final=final)


STOP_AFTER = {"d": [op("run")], "p": [op("put", 1), op("put", 2), op("stop")]}
LOOK = {"d": [op("run")], "p": [op("put", 1), op("stop")], "q": [op("look")]}


@pytest.mark.parametrize(("name", "threads"), [("stop after puts", STOP_AFTER), ("a look beside", LOOK)])
def test_what_came_before_the_word_to_stop_is_served_and_every_call_is_answered(name, threads):
    report = explore(scenario(name, threads))
    report.check()
    assert report.complete


class Hasty(DriverThread):
    """Ends as soon as it hears the word, whatever has come since its last move found nothing."""

    def _answer(self) -> bool:
        if super()._answer():
            raise SystemExit
        return False

    def run(self) -> None:
        try:
            super().run()
        except SystemExit:
            return


class HastyHouse(House):
    driver_class = Hasty

    def _died(self, name: str, fault: BaseException) -> None:
        assert isinstance(fault, (SystemExit, Unwind))


def test_a_driver_that_ends_at_once_is_caught():
    with pytest.raises(ScheduleFailure):
        explore(scenario("hasty", STOP_AFTER, HastyHouse)).check()
