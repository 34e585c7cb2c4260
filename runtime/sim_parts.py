"""What a simulation is made of: threading primitives for one thread, drivers that sleep and are woken, and the options of a run.

Owns: the difference between a simulated thread and a real one. Rules it keeps:

* Nothing waits. A lock that is taken twice and a wait that could not return at once are faults (`WouldBlock`), because on real
  threads they would be a deadlock or an endless sleep.
* A simulated thread that has no enabled move sleeps and is woken only by its bell; a parked caller only by its condition. So a
  wake-up that the code forgets is a wake-up that does not happen, as on threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .channel import Bell


class WouldBlock(RuntimeError):
    """On real threads this call would never return."""


class SimLock:
    """A lock for one thread: taking it twice is a deadlock with itself."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.held:
            if timeout >= 0:
                return False
            raise WouldBlock("a lock is taken twice by one thread")
        self.held = True
        return True

    def release(self) -> None:
        self.held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.held = False


class SimCondition:
    """A condition that counts its notifications, so that a parked caller knows whether it was woken."""

    __slots__ = ("lock", "notified")

    def __init__(self, lock: Any = None) -> None:
        self.lock = SimLock() if lock is None else lock
        self.notified = 0

    def __enter__(self) -> Any:
        return self.lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self.lock.__exit__()

    def notify(self, n: int = 1) -> None:
        self.notified += 1

    def notify_all(self) -> None:
        self.notified += 1

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        result = predicate()
        if not result and timeout is None:
            raise WouldBlock("a wait without a bound")
        return result


class SimPrimitives:
    """The `threading` of a simulation."""

    Lock = SimLock
    Condition = SimCondition


class Driver:
    """A simulated driver thread: some moves, a bell, and sleep."""

    def __init__(self, name: str, bell: Bell, moves: Sequence[Callable[[], bool]]) -> None:
        self.name = name
        self.bell = bell
        self.moves = list(moves)
        self.awake = True
        self.stopping = False
        self.ended = False

    def enabled(self) -> bool:
        """Whether this thread could be scheduled: it is awake, or its bell has been rung."""
        return not self.ended and (self.awake or self.bell._rung or self.stopping)

    def run(self, first: int) -> bool:
        """One move, looked for from number `first` on; when there is none the thread goes to sleep (or ends)."""
        if not self.awake:
            self.bell.wait(0)
            self.awake = True
        count = len(self.moves)
        for at in range(count):
            if self.moves[(first + at) % count]():
                return True
        self.awake = False
        self.ended = self.stopping
        return False


class Parked:
    """A caller that is parked in a ring's blocking call: it is woken by a notification and by nothing else."""

    def __init__(self, core: Any, *, producer: bool) -> None:
        self._core = core
        self._condition = core._room if producer else core._arrived
        self._producer = producer
        self._seen = self._condition.notified
        self._count(1)

    def _count(self, change: int) -> None:
        if self._producer:
            self._core._parked_producers += change
        else:
            self._core._parked_consumers += change

    @property
    def woken(self) -> bool:
        return bool(self._condition.notified != self._seen)

    def leave(self) -> None:
        self._count(-1)


class SimOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run derives from its seed before the first step. Weights are relative frequencies; 0 is off.

    Times are in steps. `wild` is how often (per cent) a scheduler's step holds an injected fault of the kinds that are on.
    """

    wire: str = "v1"
    shards: int = 1
    workers: int = 1
    fused: bool = True
    ring_in: int = 8
    ring_out: int = 4
    sink: int = 8
    channel: int = 16
    max_live: int = 32
    context_len: int = 64
    clients: int = 8
    # weights; those of die, stage_dies, abort_all and shutdown only say whether it happens, once
    submit: int = 10
    batch: int = 0
    control: int = 0
    decode: int = 0
    read: int = 30
    leave: int = 0
    forget: int = 0
    abort: int = 0
    abort_named: int = 0
    abort_all: int = 0
    scheduler: int = 30
    drive: int = 80
    die: int = 0
    stage_dies: int = 0
    shutdown: int = 0
    # shares in per cent
    text: int = 50
    streaming: int = 70
    stepping: int = 0
    reused_rid: int = 0
    too_long: int = 0
    raising: int = 0
    final: int = 25
    plain: int = 30
    wild: int = 0
    stall: int = 0
    faults: tuple[str, ...] = ()
    drain: int = 200
    traced_rings: bool = True  # a ring that is traced takes no short cuts
    straight: bool = False  # fused, and frames go straight through in one move, as the thread driver makes it

    @classmethod
    def draw(cls, rng: random.Random) -> SimOptions:
        """Options of one run. Each fault is off in about half of the runs: what never happens together is never seen apart."""

        def some(*values: int) -> int:
            return rng.choice(values) if rng.random() < 0.5 else 0

        faults = tuple(name for name in FAULTS if rng.random() < 0.4)
        workers = rng.choice((1, 1, 2))
        return cls(
            wire=rng.choice(("v1", "v2")),
            shards=rng.choice((1, 1, 2, 3)),
            workers=workers,
            fused=rng.random() < 0.6,
            ring_in=rng.choice((1, 2, 4, 16, 64, 64)),
            ring_out=rng.choice((1, 1, 2, 4, 16)),
            sink=rng.choice((1, 1, 2, 4, 64, 4096)),
            channel=rng.choice((1, 2, 8, 64, 64)),
            max_live=rng.choice((2, 8, 32, 64)),
            context_len=rng.choice((12, 32, 200)),
            clients=rng.choice((2, 4, 12, 24, 40)),
            submit=rng.choice((5, 10, 30)),
            batch=some(2, 8),
            control=some(2, 5),
            decode=some(2, 5),
            read=rng.choice((3, 30, 80)),
            leave=some(1, 6),
            forget=some(1, 3),
            abort=some(1, 8),
            abort_named=some(1, 3),
            abort_all=1 if rng.random() < 0.2 else 0,
            scheduler=rng.choice((10, 40, 80)),
            drive=rng.choice((30, 120, 240)),
            die=1 if rng.random() < 0.12 else 0,
            stage_dies=1 if rng.random() < 0.04 else 0,
            shutdown=1 if rng.random() < 0.5 else 0,
            text=rng.choice((0, 50, 100)),
            streaming=rng.choice((0, 70, 100)),
            stepping=rng.choice((0, 0, 0, 30, 100)),
            reused_rid=some(30, 100),
            too_long=some(5),
            raising=some(5),
            final=rng.choice((5, 25, 60)),
            plain=rng.choice((0, 30, 80)),
            wild=some(3, 15, 40),
            stall=some(1, 5),
            faults=faults,
            drain=rng.choice((0, 5, 30, 300)),
            traced_rings=rng.random() < 0.5,
            straight=rng.random() < 0.5,
        )


FAULTS = (
    "malformed",
    "malformed_list",
    "duplicate",
    "unknown",
    "late",
    "result_for_generate",
    "chunk_for_control",
    "error",
    "bad_id",
    "too_many",
    "aborts",
)
"""What a wild scheduler does; see `SimScheduler`."""
