"""The two boundary rings between the manager and the scheduler.

Owns: the bounded queues that the scheduler's threads meet the manager's on. Rules they keep:

* Locking protocol. One lock per ring guards items, byte count, both "gone" flags and the state. Two conditions share that lock:
  `_arrived` (a consumer may be parked on it) and `_room` (producers may be). They are two because one condition for both
  directions loses wake-ups: notify() may pick a thread that waits for the other thing. Bells of drivers are rung after the lock
  is released.
* Blocking is "try, else wait", and every way out has a name: OK, FULL (only for try_), CLOSED, TimeoutError (nothing was
  accepted). A wait that timed out or was interrupted did not happen.
* What was accepted is never lost, reordered or dropped. `wait` takes nothing out, so there is nothing it could lose: what it saw
  is what the next `drain` gives first. Items count against the capacity until they are drained.
* Close is explicit, idempotent, and wakes everyone (notify_all: each parked caller has to learn it). What was accepted before
  the producer closed can still be drained; after the consumer closed nothing is accepted any more.
* The ring owns its bytes: a scheduler may reuse its buffers as soon as push returns.
* State moves only through the table `RING` (fsm/ring.py); counts are resolved to an event before the table is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ..codec import IngressColumns, IngressMessage, frame_egress_batch_cols
from ..codec.limits import default
from ..fsm import RING, RingEvent, RingState
from .channel import DEFAULT_PRIMITIVES, Bell, Primitives, PushResult

if TYPE_CHECKING:
    from .stages.life import Recorder

T = TypeVar("T")

# The table again, as nested tuples (None: illegal): most pushes and drains leave the state as it is, and a look at a tuple is cheaper than
# a call. Whatever moves goes through `RING.next`.
_MOVES: tuple[tuple[RingState | None, ...], ...] = tuple(
    tuple(None if RING.outcome(state, event) == "illegal" else RING.next(state, event) for event in RingEvent)
    for state in RingState
)
# A member's look-up through its class costs as much as half of a push.
_OK = PushResult.OK
_columns = IngressColumns.owning
_PUSH, _PUSH_FILLS = RingEvent.PUSH, RingEvent.PUSH_FILLS
_DRAIN, _DRAIN_EMPTIES = RingEvent.DRAIN, RingEvent.DRAIN_EMPTIES

Buffer = Any  # bytes, bytearray, memoryview or a contiguous ndarray: anything with the buffer protocol


class RingFacts(NamedTuple):
    """What a ring looks like at one moment: fill and capacity in items, `nbytes`, its state, and which side is gone."""

    fill: int
    capacity: int
    nbytes: int
    state: RingState
    producer_gone: bool
    consumer_gone: bool


class _Core(Generic[T]):
    """A bounded queue of items and bytes with a producer's side and a consumer's side, each of which can go.

    The items stand in two lists. Producers append to `_in`. The consumer takes from the end of `_out`, which is in reverse, and when
    that does not do, the whole of `_in` is turned over at once; so a push and a drain cost the same however full the ring is. An item
    counts against the capacity until a drain has given it.

    Most pushes and drains are *plain*: the table leaves the state as it is, nobody is parked, nobody traces. Two fields say so in
    advance, so that a plain one costs a lock and an append or pop: `_plain_pushes` is how many pushes of one item surely are, and
    `_heed_drains` is set when some drain that leaves something may not be. Whatever is not plain recomputes both. On these ways the
    lock is taken by `acquire` and not by `with`, which costs as much again as all the rest; an interrupt that hits the moment between
    the two lines is as bad as it is in `with condition:` everywhere in the standard library.
    """

    def __init__(
        self,
        capacity: int,
        max_bytes: int | None,
        size_of: Callable[[T], int],
        primitives: Primitives = DEFAULT_PRIMITIVES,
    ) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"a ring's capacity must be an integer of at least 1, not {capacity!r}")
        self.lock = primitives.Lock()
        self._arrived = primitives.Condition(self.lock)
        self._room = primitives.Condition(self.lock)
        self._capacity = capacity
        self._bounded = max_bytes is not None
        self._max_bytes = sys.maxsize if max_bytes is None else max_bytes
        self._size_of = size_of
        self._in: list[T] = []
        self._out: list[T] = []
        self._nbytes = (
            0  # of the `_counted` oldest items; a ring that is bounded by bytes counts every push, another when asked
        )
        self._counted = 0
        self._state: RingState = RING.initial
        self._producer_gone = False
        self._consumer_gone = False
        self._gone = False  # either of the two
        self._parked_consumers = 0
        self._parked_producers = 0
        self._room_wanted = False  # since the last drain somebody was refused, parked or told 0 for want of room
        self._plain_pushes = 0
        self._heed_drains = True
        self.consumer_bell: Bell | None = None
        self.producer_bell: Bell | None = None
        self.record: Recorder | None = None
        self.name = ""

    # -- the state ------------------------------------------------------------------------------------------------------

    def _step(self, event: RingEvent) -> None:
        before = self._state
        after = self._state = RING.next(before, event)
        fill = len(self._in) + len(self._out)
        if self.record is not None:
            self.record.record("ring", self.name, before, event, after, "ring")
            self.record.record_fill(self.name, fill)
            self._plain_pushes, self._heed_drains = 0, True  # nothing is plain: every event is told
            return
        moves = _MOVES[after]
        self._plain_pushes = self._capacity - 1 - fill if moves[_PUSH] is after else 0
        self._heed_drains = moves[_DRAIN] is not after or self._room_wanted or (not self._bounded and self._counted > 0)

    def _want_room(self) -> None:
        self._room_wanted = self._heed_drains = True

    def _fits(self, count: int, nbytes: int) -> bool:
        fill = len(self._in) + len(self._out)
        if fill + count > self._capacity:
            return False
        # An empty frame counts as a byte here: bytes that are used up are FULL, and the table lets nothing into a ring that is.
        return not fill or self._nbytes + (nbytes or 1) <= self._max_bytes

    def _may_go_on(self, count: int, nbytes: int) -> bool:
        """Whether a producer need not park: what it waits for is there, or can never be."""
        if self._gone or self._fits(count, nbytes):
            return True
        self._want_room()
        return False

    @property
    def _closed(self) -> bool:
        return self._gone

    @property
    def _items(self) -> list[T]:
        """What is in the ring, oldest first."""
        return [*reversed(self._out), *self._in]

    # -- producer -------------------------------------------------------------------------------------------------------

    def push_all(self, items: Sequence[T], timeout: float | None = 0.0) -> PushResult:
        """All of `items` in order, or none. `timeout` 0: never wait (FULL). None: wait for room as long as it takes."""
        nbytes = sum(map(self._size_of, items)) if self._bounded else 0
        news = False  # a plain push never meets an empty ring
        self.lock.acquire()
        try:
            count = len(items)
            # Below the limit, and not at it: where the bytes are used up not even an empty frame is taken, see `_fits`.
            if 0 < count <= self._plain_pushes and self._nbytes + nbytes < self._max_bytes:
                self._plain_pushes -= count
                self._in.extend(items)
                self._nbytes += nbytes
            else:
                told = self._push(items, nbytes, timeout)
                news = told is _OK
                if not news and told is not None:
                    return told
        finally:
            self.lock.release()
        if news and self.consumer_bell is not None:
            self.consumer_bell.ring()
        return _OK

    def _push(self, items: Sequence[T], nbytes: int, timeout: float | None) -> PushResult | None:
        """None when all of `items` are in the ring, OK when it was empty before, or else why not."""
        count = len(items)
        if self._gone or not self._fits(count, nbytes):
            refused = self._refuse_or_park(count, nbytes, timeout)
            if refused is not None:
                return refused
        if not count:
            return None
        was_empty = not self._in and not self._out
        self._in.extend(items)
        self._nbytes += nbytes
        full = len(self._in) + len(self._out) >= self._capacity or self._nbytes >= self._max_bytes
        self._step(_PUSH_FILLS if full else _PUSH)
        # A waiter is parked only while the ring is empty. All of them are told: `wait` takes nothing, so whoever wakes first has not
        # used up what a second one waits for.
        if was_empty and self._parked_consumers:
            self._arrived.notify_all()
        return _OK if was_empty else None

    def _refuse_or_park(self, count: int, nbytes: int, timeout: float | None) -> PushResult | None:
        """What a push that does not go through at once returns, or None when it may go on after a wait."""
        if not self._gone and (timeout == 0.0 or count > self._capacity):
            self._want_room()
            self._step(RingEvent.REFUSED_FULL)
            return PushResult.FULL
        self._parked_producers += 1
        try:
            self._room.wait_for(lambda: self._may_go_on(count, nbytes), timeout)
        finally:
            self._parked_producers -= 1
        if self._gone:
            self._step(RingEvent.REFUSED_CLOSED)
            return PushResult.CLOSED
        if not self._fits(count, nbytes):
            self._step(RingEvent.REFUSED_FULL)
            raise TimeoutError(f"the ring stayed full for {timeout} s; nothing was accepted")
        return None

    def room(self) -> tuple[int, bool]:
        """(free places, closed). A producer that is told 0 places has its bell rung at the next drain."""
        with self.lock:
            free = self._capacity - len(self._in) - len(self._out)
            if free <= 0:
                self._want_room()
            return free if free > 0 else 0, self._gone

    # -- consumer -------------------------------------------------------------------------------------------------------

    def drain_some(self, most: int, most_bytes: int) -> list[T]:
        """The oldest items, at most `most`, ending with the one that reaches `most_bytes`. Never waits. One consumer only.

        The bound is for what is taken out of the ring's account at once: items of a hostile size come one by one.
        """
        with self.lock:
            fill = len(self._in) + len(self._out)
            if fill > 1 and self._nbytes >= most_bytes:
                nbytes = 0
                for count, item in enumerate(islice(chain(reversed(self._out), self._in), most), 1):
                    nbytes += self._size_of(item)
                    if nbytes >= most_bytes:
                        most = count
                        break
        return self.drain(most)

    def drain(self, max: int = 256) -> list[T]:
        """Up to `max` items, oldest first. Never waits."""
        self.lock.acquire()
        try:
            out = self._out
            if 0 < max < len(out) and not self._heed_drains:
                if max == 1:
                    item = out.pop()
                    if self._bounded:
                        self._nbytes -= len(item)  # type: ignore[arg-type]
                    return [item]
                taken = out[-max:]
                del out[-max:]
                taken.reverse()
                if self._bounded:
                    self._nbytes -= sum(map(self._size_of, taken))
                return taken
            taken = self._take(max)
            if not taken:
                return taken
            self._discount(taken)
            wanted, self._room_wanted = self._room_wanted, False
            self._step(_DRAIN if self._in or self._out else _DRAIN_EMPTIES)
            if wanted and self._parked_producers:
                self._room.notify_all()
        finally:
            self.lock.release()
        if wanted and self.producer_bell is not None:
            self.producer_bell.ring()
        return taken

    def _take(self, most: int) -> list[T]:
        if most < 1:
            return []
        out, arrived = self._out, self._in
        if len(out) < most and arrived:
            if not out and len(arrived) <= most:
                self._in = []
                return arrived
            arrived.reverse()
            arrived.extend(out)
            out = self._out = arrived
            self._in = []
        taken = out[-most:]
        del out[-most:]
        taken.reverse()
        return taken

    def _discount(self, taken: list[T]) -> None:
        if self._bounded:
            self._nbytes -= sum(map(self._size_of, taken))
        elif self._counted:
            counted = taken[: self._counted]
            self._nbytes -= sum(map(self._size_of, counted))
            self._counted -= len(counted)

    def _count(self) -> int:
        """The bytes in the ring."""
        if not self._bounded:
            left = (
                len(self._in) + len(self._out) - self._counted
            )  # the newest so many are not counted yet; the rest is not copied
            newest = self._in[-left:] if 0 < left <= len(self._in) else self._items[self._counted :]
            self._nbytes += sum(map(self._size_of, newest))
            self._counted += len(newest)
            self._heed_drains = self._heed_drains or self._counted > 0
        return self._nbytes

    def wait(self, timeout: float | None) -> bool:
        """True when something can be drained; False when `timeout` passed or nothing can come any more."""
        with self.lock:
            if not (self._in or self._out or self._gone):
                self._parked_consumers += 1
                try:
                    self._arrived.wait_for(lambda: self._in or self._out or self._gone, timeout)
                finally:
                    self._parked_consumers -= 1
            if not (self._in or self._out):
                return False
            self._step(RingEvent.WAIT_HIT)
            return True

    def has_more(self) -> bool:
        """Whether there is anything to look at: items, or a side that is gone. If not, the next item rings the consumer's bell."""
        with self.lock:
            return bool(self._in or self._out or self._gone)

    # -- both -----------------------------------------------------------------------------------------------------------

    def close_producer(self) -> None:
        """No more will come: refuse pushes, wake everyone; what was accepted can still be drained."""
        self._close(producer=True)

    def close_consumer(self) -> None:
        """Nothing will be taken any more: refuse pushes, wake everyone."""
        self._close(producer=False)

    def _close(self, *, producer: bool) -> None:
        with self.lock:
            self._gone = True
            if producer:
                self._producer_gone = True
                self._step(RingEvent.CLOSE_PRODUCER)
            else:
                self._consumer_gone = True
                self._step(RingEvent.CLOSE_CONSUMER)
            self._arrived.notify_all()
            self._room.notify_all()
        for bell in (self.consumer_bell, self.producer_bell):
            if bell is not None:
                bell.ring()

    def facts(self) -> RingFacts:
        with self.lock:
            return RingFacts(
                len(self._in) + len(self._out),
                self._capacity,
                self._count(),
                self._state,
                self._producer_gone,
                self._consumer_gone,
            )


class _End(Generic[T]):
    """What all four ends have."""

    def __init__(self, core: _Core[T]) -> None:
        self._core = core

    def facts(self) -> RingFacts:
        """Fill, capacity, bytes and state at this moment."""
        return self._core.facts()

    def __len__(self) -> int:
        return self._core.facts().fill


class IngressProducer(_End[IngressMessage]):
    """The manager's side of the ingress ring. Never waits."""

    def try_push(self, message: IngressMessage) -> PushResult:
        """OK, FULL or CLOSED; only OK is truthy. Anything but OK left the ring as it was."""
        return self._core.push_all((message,))

    def try_push_many(self, messages: Sequence[IngressMessage]) -> PushResult:
        """All of `messages` in order, or none."""
        return self._core.push_all(messages)

    def room(self) -> tuple[int, bool]:
        """(free places, closed). As the only producer the caller can rely on the places; only the consumer changes them."""
        return self._core.room()

    def trace(self, record: Recorder, name: str) -> None:
        """Record every transition of the ring, and its fill, under `name`. Before any use."""
        self._core.record, self._core.name = record, name

    def ring_bell_on_room(self, bell: Bell) -> None:
        """Ring `bell` at the first drain after `room` said 0 or a push was refused as FULL, and at a close. Before any use."""
        self._core.producer_bell = bell

    def close(self) -> None:
        """No more will come. Idempotent; what was accepted can still be drained."""
        self._core.close_producer()


class IngressConsumer(_End[IngressMessage]):
    """The scheduler's side of the ingress ring."""

    def drain(self, max: int = 256) -> IngressColumns:
        """Up to `max` messages as columns, oldest first. Never waits; zero messages are empty columns."""
        return _columns(self._core.drain(max))

    def wait(self, timeout: float | None = None) -> bool:
        """Park until something can be drained (True); False after `timeout` seconds or when nothing can come any more."""
        return self._core.wait(timeout)

    def close(self) -> None:
        """The scheduler goes: every later push is refused as CLOSED. Idempotent."""
        self._core.close_consumer()


class EgressProducer(_End[bytes]):
    """The scheduler's side of the egress ring. Output that is committed is never dropped, so a push waits for room."""

    def push(self, frame: Buffer, timeout: float | None = None) -> bool:
        """Hand over one frame, waiting while the ring is full. False only when the manager is gone.

        With a `timeout` in seconds, running out of it raises TimeoutError and nothing was accepted.
        """
        if type(frame) is not bytes:
            frame = _owned(frame)
        core, nbytes = self._core, len(frame)
        core.lock.acquire()
        try:
            # the plain push of `_Core.push_all`, here because it is what a scheduler does at every step
            if core._plain_pushes > 0 and core._nbytes + nbytes < core._max_bytes:
                core._plain_pushes -= 1
                core._in.append(frame)
                core._nbytes += nbytes
                return True
            # a timeout of 0 would mean "do not wait" one floor down, which says FULL and does not raise
            told = core._push((frame,), nbytes, timeout if timeout is None or timeout > 0 else 1e-9)
        finally:
            core.lock.release()
        if told is None:
            return True
        if told is _OK and core.consumer_bell is not None:
            core.consumer_bell.ring()
        return told is _OK

    def try_push(self, frame: Buffer) -> PushResult:
        """OK, FULL or CLOSED, at once."""
        return self._core.push_all((_owned(frame),))

    def push_frame(self, frame: Buffer, timeout: float | None = None) -> bool:
        """The same as `push`: `bytes` are kept as they are, any other buffer is copied."""
        return self.push(frame, timeout)

    def push_batch(self, header: bytes, data_cols: Sequence[Buffer], timeout: float | None = None) -> bool:
        """A BATCH frame from its msgpack header and its data columns, which are copied once into the frame."""
        return self.push(frame_egress_batch_cols(header, data_cols), timeout)

    def close(self) -> None:
        """The scheduler goes. Idempotent; frames already accepted are still delivered."""
        self._core.close_producer()


class EgressConsumer(_End[bytes]):
    """The manager's side of the egress ring."""

    def __init__(self, core: _Core[bytes]) -> None:
        self._core = core
        self.drain = core.drain  # type: ignore[method-assign]  # one call less for every frame; the method below tells about it
        self.drain_some = core.drain_some
        self.has_more = core.has_more

    def drain(self, max: int = 256) -> list[bytes]:
        """Up to `max` frames, oldest first. Never waits."""
        return self._core.drain(max)

    def wait(self, timeout: float | None = None) -> bool:
        """Park until a frame can be drained (True); False after `timeout` seconds or when none can come any more."""
        return self._core.wait(timeout)

    def trace(self, record: Recorder, name: str) -> None:
        """Record every transition of the ring, and its fill, under `name`. Before any use."""
        self._core.record, self._core.name = record, name

    def ring_bell_on_arrival(self, bell: Bell) -> None:
        """Ring `bell` whenever a frame arrives in an empty ring, and at a close. Before any use.

        So whoever waits for it drains until nothing comes first: behind a frame that was left, the next one is no news."""
        self._core.consumer_bell = bell

    def close(self) -> None:
        """The manager goes: parked and later pushes return False. Idempotent."""
        self._core.close_consumer()


def _owned(frame: Buffer) -> bytes:
    """`bytes` are immutable and kept; whatever else may be reused by its owner as soon as push returns, so it is copied."""
    # Through a view: bytes(5) would be five zero bytes, and bytes(2**40) a terabyte of them.
    return frame if type(frame) is bytes else memoryview(frame).tobytes()


def _message_bytes(message: IngressMessage) -> int:
    return message.nbytes


def ingress_ring(
    capacity: int = default("ingress_ring_capacity"), *, primitives: Primitives = DEFAULT_PRIMITIVES
) -> tuple[IngressProducer, IngressConsumer]:
    """The ring manager -> scheduler, bounded in messages (bytes are bounded at admission)."""
    core: _Core[IngressMessage] = _Core(capacity, None, _message_bytes, primitives)
    return IngressProducer(core), IngressConsumer(core)


def egress_ring(
    capacity: int = default("egress_ring_capacity"),
    *,
    max_bytes: int = default("egress_ring_bytes"),
    primitives: Primitives = DEFAULT_PRIMITIVES,
) -> tuple[EgressProducer, EgressConsumer]:
    """The ring scheduler -> manager, bounded in frames and bytes; one larger frame passes when the ring is empty."""
    core: _Core[bytes] = _Core(capacity, max_bytes, len, primitives)
    return EgressProducer(core), EgressConsumer(core)
