"""Bells and channels: how stages hand messages to each other without any of them waiting.

Owns: the locking of everything between two stages. Rules it keeps:

* Locking protocol. A `Bell` belongs to one waiting thread; its lock guards one flag and the waiter. A channel has one lock that guards its
  items and its closed flag. A bell is always rung *after* the channel's lock is released, so no two of these locks are ever
  held together and no order between them can be got wrong.
* No wake-up is lost. A driver loop is: take from every source; if nothing came, `bell.wait()`. `wait` consumes the flag, and
  whatever is put after the sources were looked at sets it again, so the next `wait` returns at once. A spurious return only
  costs a look.
* Threading primitives are injected (`primitives`, the `threading` module by default), so that a deterministic scheduler or a
  single-threaded simulation can run the same code.
* Nothing here relies on the GIL: every shared field is read and written under its lock.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from .stages.life import Group, Life

T = TypeVar("T")


class Primitives(Protocol):
    """What is used of the `threading` module."""

    def Lock(self) -> Any: ...
    def Condition(self, lock: Any = None) -> Any: ...


DEFAULT_PRIMITIVES: Primitives = threading


class PushResult(enum.Enum):
    """The outcome of a push that never waits. Truthy only for OK, so a forgotten comparison fails closed."""

    OK = "ok"
    FULL = "full"
    CLOSED = "closed"

    def __bool__(self) -> bool:
        return self is PushResult.OK


def signal(primitives: Primitives = DEFAULT_PRIMITIVES) -> Any:
    """A lock that is taken already, for one wait: `acquire` waits until another thread gives it back.

    A condition does the same with several times the code on both sides of the wake-up, and a sleeping thread that is woken by another
    notices that: after a sleep no code is in any cache. The rule of every user: the waiter leaves its signal where the others look, under
    their lock; whoever takes it from there, under the lock, gives it back after the lock; and it is never used again, so one that comes
    too late for a waiter whose time had run out does no harm.
    """
    lock = primitives.Lock()
    lock.acquire()
    return lock


class Bell:
    """One thread's doorbell: rung by any source it waits for, heard by `wait`."""

    __slots__ = ("_lock", "_primitives", "_rung", "_waiter")

    def __init__(self, primitives: Primitives = DEFAULT_PRIMITIVES) -> None:
        self._primitives = primitives
        self._lock = primitives.Lock()
        self._rung = False
        self._waiter: Any = None  # the signal of the thread that waits

    def ring(self) -> None:
        """Wake the waiter, now or at its next `wait`. From any thread; never waits."""
        with self._lock:
            if self._rung:
                return
            self._rung = True
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until rung (True) or until `timeout` seconds have passed (False), and consume the ring."""
        with self._lock:
            if self._rung:
                self._rung = False
                return True
            if timeout is not None and timeout <= 0:
                return False
            waiter = self._waiter = signal(self._primitives)
        try:
            if timeout is None:
                waiter.acquire()
            else:
                waiter.acquire(True, timeout)
        finally:
            with self._lock:
                heard, self._rung, self._waiter = self._rung, False, None
        return heard


class Channel(Generic[T]):
    """A multi-producer, single-consumer queue between two stages; `put` never waits.

    `capacity` None means that the writers hold reservations (one slot for each live request, see `LiveTable`), so the number
    of items is bounded elsewhere. `bell` is the consumer's. After `close`, puts are refused and what was accepted can still
    be taken.
    """

    def __init__(
        self,
        capacity: int | None,
        bell: Bell,
        primitives: Primitives = DEFAULT_PRIMITIVES,
        *,
        room_bell: Bell | None = None,
    ) -> None:
        self._lock = primitives.Lock()
        self._items: deque[T] = deque()
        self._capacity = capacity
        self._closed = False
        self._bell = bell
        self._room_bell = room_bell
        self._room_wanted = False

    def put(self, item: T) -> PushResult:
        """Append `item`: OK, FULL (nothing changed) or CLOSED."""
        return self.put_all((item,))

    def put_all(self, items: Iterable[T]) -> PushResult:
        """Append all of `items`, in order, or none."""
        batch = tuple(items)
        with self._lock:
            if self._closed:
                return PushResult.CLOSED
            if self._capacity is not None and len(self._items) + len(batch) > self._capacity:
                return PushResult.FULL
            self._items.extend(batch)
        if batch:
            self._bell.ring()
        return PushResult.OK

    def take(self, most: int = 1) -> list[T]:
        """Up to `most` items, oldest first; an empty list when there are none. Never waits."""
        with self._lock:
            items = self._items
            if len(items) <= most:
                taken = list(items)
                items.clear()
            else:
                taken = [items.popleft() for _ in range(most)]
            wanted, self._room_wanted = self._room_wanted and bool(taken), False
        if wanted and self._room_bell is not None:
            self._room_bell.ring()
        return taken

    def room(self) -> int | None:
        """Free places, or None where the channel is bounded by reservations. A caller that is told 0 has `room_bell` rung at
        the next take."""
        with self._lock:
            if self._capacity is None:
                return None
            free = max(0, self._capacity - len(self._items))
            self._room_wanted = free == 0
            return free

    def close(self) -> None:
        """Refuse every later put and wake the consumer. Idempotent."""
        with self._lock:
            self._closed = True
        self._bell.ring()

    @property
    def closed(self) -> bool:
        with self._lock:
            return self._closed

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)


class Inbox:
    """Where callers leave groups of requests for the ingress stage: bounded in requests, and a request can be withdrawn.

    A withdrawn request was never taken, so cancelling it here leaves no trace, like a refusal. Taking and withdrawing decide under
    one lock, by two flags on the life, which of them was first.
    """

    def __init__(self, capacity: int, bell: Bell, primitives: Primitives = DEFAULT_PRIMITIVES) -> None:
        self._lock = primitives.Lock()
        self._groups: deque[Group] = deque()
        self._count = 0
        self._capacity = capacity
        self._closed = False
        self._bell = bell

    def put(self, group: Group) -> PushResult:
        """All of the group's requests, or none."""
        with self._lock:
            if self._closed or self._count + len(group.members) > self._capacity:
                # a member that was withdrawn before it came here was counted out, but will never have been counted in
                self._count += sum(life.withdrawn for life in group.members)
                return PushResult.CLOSED if self._closed else PushResult.FULL
            self._groups.append(group)
            self._count += len(group.members)
        self._bell.ring()
        return PushResult.OK

    def take(self) -> Group | None:
        """The oldest group that has a request left in it. Never waits."""
        with self._lock:
            while self._groups:
                group = self._groups.popleft()
                left = [life for life in group.members if not life.withdrawn]
                for life in left:
                    life.taken = True
                self._count -= len(left)
                if left:
                    return group
            return None

    def withdraw(self, life: Life) -> bool:
        """True if `life` was still here; it will not be taken any more and its place is free."""
        with self._lock:
            if life.taken or life.withdrawn:
                return False
            life.withdrawn = True
            self._count -= 1
            return True

    def close(self) -> None:
        """Refuse every later put and wake the consumer. Idempotent."""
        with self._lock:
            self._closed = True
        self._bell.ring()

    def __len__(self) -> int:
        with self._lock:
            return max(0, self._count)  # below zero while a request that was withdrawn first is on its way to `put`
