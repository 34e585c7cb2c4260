"""Rings, bells and channels with one known fault each. The kill matrix says which layer must see it."""

from __future__ import annotations

from typing import Any

from headrace.fsm import RingEvent
from headrace.runtime import PushResult
from headrace.runtime.channel import Bell, Channel, signal
from headrace.runtime.ring import _Core
from headrace.runtime.sink import Sink


class LostWakeUp(_Core[Any]):
    """A push does not wake the parked consumer."""

    def _push(self, items: Any, nbytes: int, timeout: Any) -> Any:
        parked, self._parked_consumers = self._parked_consumers, 0
        try:
            return super()._push(items, nbytes, timeout)
        finally:
            self._parked_consumers += parked


class OneCondition(_Core[Any]):
    """One condition for both directions, and `notify` as if it knew whom it wakes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._room = self._arrived
        self._arrived.notify_all = self._arrived.notify


class NotifyAtClose(_Core[Any]):
    """A close wakes one parked caller of each kind."""

    def _close(self, *, producer: bool) -> None:
        saved = self._arrived.notify_all, self._room.notify_all
        self._arrived.notify_all, self._room.notify_all = self._arrived.notify, self._room.notify
        try:
            super()._close(producer=producer)
        finally:
            self._arrived.notify_all, self._room.notify_all = saved


class CloseForgetsProducers(_Core[Any]):
    """A close wakes the consumers only."""

    def _close(self, *, producer: bool) -> None:
        saved = self._room.notify_all
        self._room.notify_all = lambda: None
        try:
            super()._close(producer=producer)
        finally:
            self._room.notify_all = saved


class CheckOutsideTheLock(_Core[Any]):
    """A drain looks whether there is something before it takes the lock."""

    def drain(self, max: int = 256) -> list[Any]:
        if not (self._in or self._out):
            return []
        return super().drain(max)


class IfInsteadOfWhile(_Core[Any]):
    """A wake-up is taken for a reason: the consumer does not look again."""

    def wait(self, timeout: float | None) -> bool:
        with self.lock:
            if not (self._in or self._out or self._gone):
                self._parked_consumers += 1
                woken = self._arrived.wait(timeout)
                self._parked_consumers -= 1
                return bool(woken)
            return bool(self._in or self._out)


class LostStash(_Core[Any]):
    """`wait` takes the first item out, and a second `wait` forgets it."""

    def wait(self, timeout: float | None) -> bool:
        there = super().wait(timeout)
        if there:
            with self.lock:
                before = getattr(self, "_stash", None)
                items = self._items
                self._in, self._out = items[1:], []
                if before is None:
                    self._in = items
                self._stash = items[0]
        return there


class DropWhenFull(_Core[Any]):
    """A push into a full ring says OK."""

    def _push(self, items: Any, nbytes: int, timeout: Any) -> Any:
        if not self._gone and not self._fits(len(items), nbytes):
            return None
        return super()._push(items, nbytes, timeout)


class Reorder(_Core[Any]):
    """The list is not turned over when it is taken whole."""

    def _take(self, most: int) -> list[Any]:
        if not self._out and self._in:
            self._out, self._in = self._in, []
        return super()._take(most)


class HalfABatch(_Core[Any]):
    """A batch that does not fit is taken as far as it fits, and refused."""

    def push_all(self, items: Any, timeout: Any = 0.0) -> PushResult:
        with self.lock:
            room = self._capacity - len(self._in) - len(self._out)
            if not self._gone and 0 < room < len(items):
                self._in.extend(items[:room])
                self._step(RingEvent.PUSH_FILLS)
                return PushResult.FULL
        return super().push_all(items, timeout)


class BytesNotGivenBack(_Core[Any]):
    """A drain forgets to give its bytes back."""

    def _discount(self, taken: list[Any]) -> None:
        return None


class EmptyIsFree(_Core[Any]):
    """An empty item is let into a ring whose bytes are used up."""

    def _fits(self, count: int, nbytes: int) -> bool:
        fill = len(self._in) + len(self._out)
        return fill + count <= self._capacity and (not fill or self._nbytes + nbytes <= self._max_bytes)


class TimeoutAccepts(_Core[Any]):
    """A push whose time ran out leaves its item behind."""

    def _refuse_or_park(self, count: int, nbytes: int, timeout: Any) -> Any:
        try:
            return super()._refuse_or_park(count, nbytes, timeout)
        except TimeoutError:
            self._capacity += count  # the item is let in later, when nobody asks for it any more
            raise


class MoreThanAsked(_Core[Any]):
    """A drain after a wait gives what the wait saw on top of `max`."""

    def drain(self, max: int = 256) -> list[Any]:
        return super().drain(max + 1 if max else 0)


class DrainWakesOne(_Core[Any]):
    """A drain that makes room for several wakes one producer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._room.notify_all = self._room.notify

    def _close(self, *, producer: bool) -> None:
        super()._close(producer=producer)
        with self.lock:
            self._room.notify(99)


class ForgetfulBell(Bell):
    """A ring that nobody waits for is not remembered."""

    __slots__ = ()

    def ring(self) -> None:
        with self._lock:
            waiter, self._waiter = self._waiter, None
            self._rung = waiter is not None
        if waiter is not None:
            waiter.release()


class RungTooEarly(Channel[Any]):
    """The bell is rung before the item is there."""

    def put_all(self, items: Any) -> PushResult:
        self._bell.ring()
        with self._lock:
            self._items.extend(items)
        return PushResult.OK


class SilentClose(Channel[Any]):
    """A close does not ring."""

    def close(self) -> None:
        with self._lock:
            self._closed = True


class RoomUntold(Channel[Any]):
    """A take does not tell that there is room."""

    def room(self) -> int | None:
        free = super().room()
        with self._lock:
            self._room_wanted = False
        return free


class BlindReader(Sink):
    """A reader that has found nothing parks without looking again."""

    def next(self, timeout: float | None = None) -> Any:
        found = self.get(None)
        if found is None:
            waiter = signal(self._hub.primitives)
            with self._hub.lock:
                self._park(waiter)
            self._sleep(waiter, timeout)
            found = self.get(None)
        return found


class StillOnTheBooks(Sink):
    """A reader whose time has run out does not say so, and its next wait finds the books taken."""

    def unpark(self, waiter: Any) -> bool:
        return True


class DeafToTheClose(Sink):
    """A reader that leaves does not tell the thread that waits."""

    def close(self) -> bool:
        with self._hub.lock:
            kept, self._hub.parked = self._hub.parked, {}
        was_open = super().close()
        with self._hub.lock:
            self._hub.parked = kept
        return was_open
