"""Locks, conditions and events that a `World` controls: the same calls as `threading`, and every wait is the search's choice.

Owns: what each primitive means. Rules it keeps:

* A lock is taken when the search lets its thread go on, so `acquire` is the place where threads change. Giving it back is no such
  place: whatever another thread could do between a release and the next acquire, it could also do after that point, because the
  guard forbids touching shared state in between. `points="every"` stops at releases and notifications too; it is needed for
  `acquire(blocking=False)`, which can see that a lock is held.
* A lock may be given back by another thread than the one that took it, as in `threading`: then it is a signal, and a thread that
  waits in vain for one that it took itself is asleep and not in a deadlock. An `acquire` with a timeout runs out of it in virtual time, like `wait`.
* `wait` gives the lock back and parks. A parked thread goes on after a notification, after its timeout in virtual time, or, as often
  as the search's budget allows, for no reason at all.
* `notify` picks any of the parked threads, for nothing in its documentation promises an order ("fifo" is an option). One whose time
  has run out, but which does not hold the lock again yet, can still be picked: CPython has that window, and the notification is
  then lost to the others.
* Outside a run (while a scenario is built, or for `solo()`) nothing can wait: an operation that would park raises `WouldBlock`, and
  one with a timeout runs out of it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actors import Actor
    from .world import World


class WouldBlock(RuntimeError):
    """The call would wait, and nobody is there who could end the wait."""


class ScenarioError(RuntimeError):
    """The scenario cannot be searched as it stands; the message says why and what to change."""


class Lock:
    """A controlled `threading.Lock`."""

    is_controlled_primitive = True
    reentrant = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.number = world.number_primitive()
        self.owner: Any = None
        self.depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        world = self.world
        me = world.current
        if world.over:
            world.leave()
            return True
        if self.reentrant and self.owner is not None and self.owner is (me or world):
            self.depth += 1
            return True
        if me is None:
            if self.owner is not None:
                if timeout >= 0 or not blocking:
                    return False
                raise WouldBlock("the lock is held")
            self.owner, self.depth = world, 1
            return True
        if not blocking:
            if world.points != "every":
                raise ScenarioError('acquire(blocking=False) sees held locks: search with points="every"')
            world.pause(me)
            taken = self.owner is None
            me.known.append(("taken", taken))
            if taken:
                self.owner, self.depth = me, 1
            return taken
        if timeout >= 0:
            return world.acquire_within(me, self, timeout)
        world.acquire(me, self)
        return True

    def release(self) -> None:
        """As `threading.Lock.release`."""
        world = self.world
        if world.over:
            return
        if self.owner is None:
            raise RuntimeError("release of a lock that nobody holds")
        self.depth -= 1
        if self.depth == 0:
            self.owner = None
            if world.points == "every" and world.current is not None:
                world.pause(world.current)

    def locked(self) -> bool:
        """As `threading.Lock.locked`."""
        if self.world.current is not None and self.world.points != "every":
            raise ScenarioError('locked() sees held locks: search with points="every"')
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()} {self.number[-1]}"


class RLock(Lock):
    """A controlled `threading.RLock`."""

    reentrant = True


class Condition:
    """A controlled `threading.Condition`, on a lock of its own or one that is given."""

    is_controlled_primitive = True

    def __init__(self, world: World, lock: Lock | None = None) -> None:
        self.world = world
        self.number = world.number_primitive()
        self.lock: Lock = RLock(world) if lock is None else lock
        self.waiters: list[Actor] = []
        self.acquire = self.lock.acquire
        self.release = self.lock.release

    @property
    def owner(self) -> Any:
        return self.lock.owner

    def __enter__(self) -> bool:
        return self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def _held(self) -> Actor | None:
        me = self.world.current
        if self.lock.owner is not (me or self.world):
            raise RuntimeError("the condition's lock is not held by the caller")
        return me

    def wait(self, timeout: float | None = None) -> bool:
        """True when notified (or woken for no reason), False when `timeout` seconds of virtual time have passed."""
        world = self.world
        if world.over:
            world.leave()
            return True
        me = self._held()
        if me is None:
            if timeout is None:
                raise WouldBlock("the caller would wait for a notification")
            return False
        return world.park(me, self, timeout)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """The predicate's last value; as `threading.Condition.wait_for`."""
        world = self.world
        value = predicate()
        end = None if timeout is None else world.now + timeout
        while not value:
            if end is None:
                self.wait()
            else:
                if world.current is None or end <= world.now:
                    break
                self.wait(end - world.now)
            value = predicate()
        return value

    def notify(self, n: int = 1) -> None:
        """Let `n` of the parked threads go on; which ones is the search's choice."""
        world = self.world
        if world.over:
            return
        if self._held() is None:
            return
        world.notify(self, n)
        if world.points == "every" and world.current is not None:
            world.pause(world.current)

    def notify_all(self) -> None:
        """Let all parked threads go on."""
        self.notify(len(self.waiters))

    def __repr__(self) -> str:
        return f"condition {self.number[-1]}"


class Event:
    """A controlled `threading.Event`."""

    is_controlled_primitive = True

    def __init__(self, world: World) -> None:
        self.number = world.number_primitive()
        self._world = world
        self._cond = Condition(world, Lock(world))
        self._flag = False

    def _look(self) -> bool:
        me = self._world.current
        if me is not None:
            me.known.append(("event", self._flag))
        return self._flag

    def is_set(self) -> bool:
        with self._cond:
            return self._look()

    def set(self) -> None:
        with self._cond:
            self._flag = True
            self._cond.notify_all()

    def clear(self) -> None:
        with self._cond:
            self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._cond:
            return bool(self._cond.wait_for(self._look, timeout))

    def key(self) -> bool:
        """Its part of a search's state."""
        return self._flag


class Primitives:
    """What a `World` gives in place of the `threading` module: Lock, RLock, Condition, Event."""

    def __init__(self, world: World) -> None:
        self._world = world

    def Lock(self) -> Lock:
        return Lock(self._world)

    def RLock(self) -> RLock:
        return RLock(self._world)

    def Condition(self, lock: Any = None) -> Condition:
        return Condition(self._world, lock)

    def Event(self) -> Event:
        event = Event(self._world)
        self._world.watch(event.key)
        return event
