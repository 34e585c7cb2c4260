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

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ..codec import IngressColumns, IngressMessage, frame_egress_batch_cols
from ..codec.errors import InternalError
from ..codec.limits import default
from ..fsm import RING, RingEvent, RingState
from .channel import DEFAULT_PRIMITIVES, Bell, Primitives, PushResult

if TYPE_CHECKING:
    from .stages.life import Recorder

T = TypeVar("T")
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
    """A bounded queue of items and bytes with a producer's side and a consumer's side, each of which can go."""

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
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._items: deque[T] = deque()
        self._nbytes = 0
        self._state: RingState = RING.initial
        self._producer_gone = False
        self._consumer_gone = False
        self._parked_consumers = 0
        self._parked_producers = 0
        self._room_wanted = False
        self.consumer_bell: Bell | None = None
        self.producer_bell: Bell | None = None
        self.record: Recorder | None = None
        self.name = ""

    # -- the state ------------------------------------------------------------------------------------------------------

    def _step(self, event: RingEvent) -> None:
        before = self._state
        self._state = RING.next(before, event)
        if self.record is not None:
            self.record.record("ring", self.name, before, event, self._state, "ring")
            self.record.record_fill(self.name, len(self._items))

    def _fits(self, count: int, nbytes: int) -> bool:
        items = len(self._items)
        if items + count > self._capacity:
            return False
        return self._max_bytes is None or not items or self._nbytes + nbytes <= self._max_bytes

    @property
    def _full(self) -> bool:
        return len(self._items) >= self._capacity or (self._max_bytes is not None and self._nbytes >= self._max_bytes)

    # -- producer -------------------------------------------------------------------------------------------------------

    def push_all(self, items: Sequence[T], timeout: float | None = 0.0) -> PushResult:
        """All of `items` in order, or none. `timeout` 0: never wait (FULL). None: wait for room as long as it takes."""
        nbytes = sum(map(self._size_of, items))
        with self.lock:
            if not self._closed and not self._fits(len(items), nbytes):
                if timeout == 0.0 or len(items) > self._capacity:
                    self._room_wanted = True
                    self._step(RingEvent.REFUSED_FULL)
                    return PushResult.FULL
                self._parked_producers += 1
                try:
                    self._room.wait_for(lambda: self._closed or self._fits(len(items), nbytes), timeout)
                finally:
                    self._parked_producers -= 1
            if self._closed:
                self._step(RingEvent.REFUSED_CLOSED)
                return PushResult.CLOSED
            if not self._fits(len(items), nbytes):
                self._step(RingEvent.REFUSED_FULL)
                raise TimeoutError(f"the ring stayed full for {timeout} s; nothing was accepted")
            if items:
                self._items.extend(items)
                self._nbytes += nbytes
                self._step(RingEvent.PUSH_FILLS if self._full else RingEvent.PUSH)
                if self._parked_consumers:
                    # all of them: `wait` takes nothing, so whoever woke first has not used up what a second waiter waits for
                    self._arrived.notify_all()
        if items and self.consumer_bell is not None:
            self.consumer_bell.ring()
        return PushResult.OK

    @property
    def _closed(self) -> bool:
        return self._producer_gone or self._consumer_gone

    def room(self) -> tuple[int, bool]:
        """(free places, closed). A producer that is told 0 places has its bell rung at the next drain."""
        with self.lock:
            free = self._capacity - len(self._items)
            if free <= 0:
                self._room_wanted = True
            return max(0, free), self._closed

    # -- consumer -------------------------------------------------------------------------------------------------------

    def drain(self, most: int) -> list[T]:
        """Up to `most` items, oldest first. Never waits."""
        if most < 1:
            return []
        with self.lock:
            items = self._items
            if not items:
                return []
            if len(items) <= most:
                taken = list(items)
                items.clear()
                self._nbytes = 0
                self._step(RingEvent.DRAIN_EMPTIES)
            else:
                taken = [items.popleft() for _ in range(most)]
                self._nbytes -= sum(map(self._size_of, taken))
                self._step(RingEvent.DRAIN)
            if self._parked_producers:
                self._room.notify_all()
            wanted, self._room_wanted = self._room_wanted, False
        if wanted and self.producer_bell is not None:
            self.producer_bell.ring()
        return taken

    def wait(self, timeout: float | None) -> bool:
        """True when something can be drained; False when `timeout` passed or nothing can come any more."""
        with self.lock:
            if not self._items and not self._closed:
                self._parked_consumers += 1
                try:
                    self._arrived.wait_for(lambda: self._items or self._closed, timeout)
                finally:
                    self._parked_consumers -= 1
            if not self._items:
                return False
            self._step(RingEvent.WAIT_HIT)
            return True

    # -- both -----------------------------------------------------------------------------------------------------------

    def close_producer(self) -> None:
        """No more will come: refuse pushes, wake everyone; what was accepted can still be drained."""
        self._close(producer=True)

    def close_consumer(self) -> None:
        """Nothing will be taken any more: refuse pushes, wake everyone."""
        self._close(producer=False)

    def _close(self, *, producer: bool) -> None:
        with self.lock:
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
                len(self._items),
                self._capacity,
                self._nbytes,
                self._state,
                self._producer_gone,
                self._consumer_gone,
            )


class IngressProducer:
    """The manager's side of the ingress ring. Never waits."""

    def __init__(self, core: _Core[IngressMessage]) -> None:
        self._core = core

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

    def facts(self) -> RingFacts:
        """Fill, capacity, bytes and state at this moment."""
        return self._core.facts()

    def __len__(self) -> int:
        return self._core.facts().fill


class IngressConsumer:
    """The scheduler's side of the ingress ring."""

    def __init__(self, core: _Core[IngressMessage]) -> None:
        self._core = core

    def drain(self, max: int = 256) -> IngressColumns:
        """Up to `max` messages as columns, oldest first. Never waits; zero messages are empty columns."""
        return IngressColumns.from_messages(self._core.drain(max))

    def wait(self, timeout: float | None = None) -> bool:
        """Park until something can be drained (True); False after `timeout` seconds or when nothing can come any more."""
        return self._core.wait(timeout)

    def close(self) -> None:
        """The scheduler goes: every later push is refused as CLOSED. Idempotent."""
        self._core.close_consumer()

    def facts(self) -> RingFacts:
        """Fill, capacity, bytes and state at this moment."""
        return self._core.facts()

    def __len__(self) -> int:
        return self._core.facts().fill


class EgressProducer:
    """The scheduler's side of the egress ring. Output that is committed is never dropped, so a push waits for room."""

    def __init__(self, core: _Core[bytes]) -> None:
        self._core = core

    def push(self, frame: Buffer, timeout: float | None = None) -> bool:
        """Hand over one frame, waiting while the ring is full. False only when the manager is gone.

        With a `timeout` in seconds, running out of it raises TimeoutError and nothing was accepted.
        """
        owned = _owned(frame)
        result = self._core.push_all((owned,), timeout if timeout is None or timeout > 0 else 1e-9)
        if result is PushResult.FULL:  # one frame always fits an empty ring of capacity >= 1, so this cannot be
            raise InternalError("the egress ring refused a single frame as too many")
        return bool(result)

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

    def facts(self) -> RingFacts:
        """Fill, capacity, bytes and state at this moment."""
        return self._core.facts()

    def __len__(self) -> int:
        return self._core.facts().fill


class EgressConsumer:
    """The manager's side of the egress ring."""

    def __init__(self, core: _Core[bytes]) -> None:
        self._core = core

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
        """Ring `bell` whenever a frame arrives, and at a close. Before any use."""
        self._core.consumer_bell = bell

    def close(self) -> None:
        """The manager goes: parked and later pushes return False. Idempotent."""
        self._core.close_consumer()

    def facts(self) -> RingFacts:
        """Fill, capacity, bytes and state at this moment."""
        return self._core.facts()

    def __len__(self) -> int:
        return self._core.facts().fill


def _owned(frame: Buffer) -> bytes:
    """`bytes` are immutable and kept; whatever else may be reused by its owner as soon as push returns, so it is copied."""
    return frame if type(frame) is bytes else bytes(frame)


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
