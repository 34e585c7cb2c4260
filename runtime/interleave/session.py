"""Two ways to run calls one by one: on controlled threads that park, and on real threads.

Owns: `Session`, for stateful tests that need callers who are parked while others go on; `solo`, for tests with no thread at all;
`record`, which runs a scenario on real threads and gives back its history.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from .actors import Choice, Crew, Op
from .linear import Called, Raised
from .primitives import Primitives
from .search import Scenario
from .world import World

T = TypeVar("T")


def _first_that_goes(world: World, choices: Sequence[Choice], prunable: bool) -> int:
    return 0  # "go" stands before "time"


def solo() -> Primitives:
    """Primitives for one thread: what would wait raises `WouldBlock`, and a wait with a timeout runs out of it at once."""
    return World().primitives


class Session:
    """Controlled threads that are given calls one at a time; each call ends, or parks until another one wakes it.

    `start` gives a thread a call and lets everything run until nothing can move. `result` tells whether a thread's call has ended.
    Timeouts fire only in `expire`. Close it, or use it as a context manager.
    """

    def __init__(
        self, build: Callable[[Any], Any], threads: Iterable[str], *, raises: tuple[type[BaseException], ...] = ()
    ) -> None:
        names = list(threads)
        self._crew = Crew(len(names))
        self.world = World(max_steps=1_000_000)
        self.world.interactive = True
        self.world.timeouts_left = 0
        self.world.raises = raises
        self.world.asleep = lambda world: None
        self.subject = self.world.subject = build(self.world)
        self.world.man(self._crew, {name: [] for name in names})
        self._actors = {actor.name: actor for actor in self.world.actors}

    def start(self, thread: str, call: Op) -> None:
        """Give `thread` a call. It must not be in one."""
        actor = self._actors[thread]
        if actor.pending[0] != "idle":
            raise ValueError(f"{thread} is still in {actor.ops[actor.at].name}")
        actor.ops.append(call)
        self._settle()

    def expire(self, thread: str) -> None:
        """Let virtual time pass until the timeout of `thread` has fired."""
        actor = self._actors[thread]
        if actor.deadline is None:
            raise ValueError(f"{thread} is not parked with a timeout")
        while actor.deadline is not None and actor.pending[0] in ("parked", "try"):
            self.world.timeouts_left = 1
            self._settle()
            self.world.timeouts_left = 0

    def _settle(self) -> None:
        self.world.run(_first_that_goes)
        if self.world.failure is not None:
            raise AssertionError(f"{self.world.failure.kind}: {self.world.failure.message}")

    def parked(self) -> list[str]:
        """The threads whose call has not ended."""
        return [name for name, actor in self._actors.items() if actor.pending[0] != "idle"]

    def result(self, thread: str) -> Any:
        """What the last call of `thread` returned (`Raised` for an exception that is an outcome). It must have ended."""
        actor = self._actors[thread]
        if actor.pending[0] != "idle":
            raise ValueError(f"{thread} is still in {actor.ops[actor.at].name}")
        return actor.results[-1]

    def close(self) -> None:
        self.world.close()
        self._crew.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RealWorld:
    """What `build` is given by `record`: the `threading` module, and guards that do nothing."""

    primitives: Any = threading

    def guard(self, target: T, lock: Any, constants: Iterable[str] = ()) -> T:
        return target

    def watch(self, state: Callable[[], Any]) -> None:
        return None

    def loop(self, *state: Any) -> None:
        return None


def record(scenario: Scenario, *, switch_interval: float = 1e-6, timeout: float = 60.0) -> list[Called]:
    """The history of one run on real threads, which change as often as the interpreter can be made to.

    Every thread must be able to end: let the last call close what others may be parked on. TimeoutError after `timeout` seconds.
    It proves nothing; it runs on the interpreter that there is.
    """
    subject = scenario.build(RealWorld())
    stamp = threading.Lock()
    returned = 0
    calls: list[list[Called]] = [[] for _ in scenario.threads]
    faults: list[BaseException] = []
    ended = {name: threading.Event() for name in scenario.threads}
    gate = threading.Barrier(len(scenario.threads))

    def work(index: int, name: str, ops: list[Op], first_bit: int) -> None:
        nonlocal returned
        try:
            gate.wait()
            for at, task in enumerate(ops):
                if task.function is None:
                    for other in task.follows:
                        ended[other].wait()
                    continue
                with stamp:
                    before = returned
                try:
                    result = task.function(subject, *task.args)
                except scenario.raises as fault:
                    result = Raised(type(fault).__name__)
                with stamp:
                    returned |= 1 << (first_bit + at)
                calls[index].append(Called(name, task.name, task.args, result, before, True))
        except BaseException as fault:
            faults.append(fault)
        finally:
            ended[name].set()

    threads, bit, bits = [], 0, []
    for index, (name, ops) in enumerate(scenario.threads.items()):
        threads.append(threading.Thread(target=work, args=(index, name, list(ops), bit), daemon=True))
        bits += [bit + at for at, task in enumerate(ops) if task.function is not None]
        bit += len(ops)
    old = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise TimeoutError(f"{scenario.name}: a thread did not end within {timeout} s")
    finally:
        sys.setswitchinterval(old)
    if faults:
        raise faults[0]
    history = [call for thread in calls for call in thread]
    return [
        call._replace(before=sum(1 << index for index, bit in enumerate(bits) if call.before >> bit & 1))
        for call in history
    ]
