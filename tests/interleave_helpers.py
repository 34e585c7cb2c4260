"""Shared by the tests of rings, channels and the scheduler: the ring's specification as a list and a table, and guarded subjects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.codec import IngressMessage
from headrace.fsm import RING, RingEvent, RingState
from headrace.runtime import PushResult
from headrace.runtime.channel import Bell, Channel
from headrace.runtime.interleave import Op, Raised, Scenario, World, after, op
from headrace.runtime.ring import _Core, egress_ring, ingress_ring

CORE_CONSTANTS = ("_bounded", "_capacity", "_max_bytes", "consumer_bell", "producer_bell", "record", "name")


class RingModel:
    """A ring as a list. Its second half is the table RING: an event that the table calls illegal raises here.

    Calls: try_push(x), try_push_many(xs), push(x, timeout), drain(most), wait(timeout), close_producer(), close_consumer(). Results are
    those of the ring's ends; drain gives a tuple. Bytes: `max_bytes` of `size(x)`, and one larger item passes when it is empty.
    """

    def __init__(self, capacity: int, max_bytes: int | None = None) -> None:
        self.capacity = capacity
        self.max_bytes = max_bytes

    def start(self) -> tuple[tuple[Any, ...], RingState]:
        return (), RING.initial

    def size(self, item: Any) -> int:
        return len(item) or 1

    def fits(self, items: tuple[Any, ...], more: Sequence[Any]) -> bool:
        if len(items) + len(more) > self.capacity:
            return False
        if self.max_bytes is None or not items:
            return True
        return sum(map(self.size, (*items, *more))) <= self.max_bytes

    def full(self, items: tuple[Any, ...]) -> bool:
        return len(items) >= self.capacity or (
            self.max_bytes is not None and sum(map(self.size, items)) >= self.max_bytes
        )

    def step(self, state: Any, name: str, args: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        return list(getattr(self, name)(*state, *args))

    @staticmethod
    def closed(ring: RingState) -> bool:
        return not ring.name.endswith("_OPEN")

    def _push(self, items: Any, ring: RingState, more: Any, ok: Any, closed: Any, full: Any) -> list[Any]:
        if self.closed(ring):
            return [(closed, (items, RING.next(ring, RingEvent.REFUSED_CLOSED)))]
        if self.fits(items, more):
            if not more:
                return [(ok, (items, ring))]
            items = (*items, *more)
            event = RingEvent.PUSH_FILLS if self.full(items) else RingEvent.PUSH
            return [(ok, (items, RING.next(ring, event)))]
        if full is None:
            return []
        return [(full, (items, RING.next(ring, RingEvent.REFUSED_FULL)))]

    def try_push(self, items: Any, ring: RingState, item: Any) -> list[Any]:
        return self._push(items, ring, (item,), PushResult.OK, PushResult.CLOSED, PushResult.FULL)

    def try_push_many(self, items: Any, ring: RingState, more: Any) -> list[Any]:
        return self._push(items, ring, more, PushResult.OK, PushResult.CLOSED, PushResult.FULL)

    def push(self, items: Any, ring: RingState, item: Any, timeout: float | None = None) -> list[Any]:
        return self._push(items, ring, (item,), True, False, None if timeout is None else Raised("TimeoutError"))

    def drain(self, items: Any, ring: RingState, most: int) -> list[Any]:
        taken, left = items[: max(0, most)], items[max(0, most) :]
        if not taken:
            return [((), (items, ring))]
        event = RingEvent.DRAIN if left else RingEvent.DRAIN_EMPTIES
        return [(taken, (left, RING.next(ring, event)))]

    def wait(self, items: Any, ring: RingState, timeout: float | None = None) -> list[Any]:
        if items:
            return [(True, (items, RING.next(ring, RingEvent.WAIT_HIT)))]
        if timeout is not None or self.closed(ring):
            return [(False, (items, ring))]
        return []

    def close_producer(self, items: Any, ring: RingState) -> list[Any]:
        return [(None, (items, RING.next(ring, RingEvent.CLOSE_PRODUCER)))]

    def close_consumer(self, items: Any, ring: RingState) -> list[Any]:
        return [(None, (items, RING.next(ring, RingEvent.CLOSE_CONSUMER)))]


class Egress:
    """Both ends of an egress ring under the names of `RingModel`."""

    def __init__(self, capacity: int, max_bytes: int | None, primitives: Any) -> None:
        self.producer, self.consumer = egress_ring(
            capacity, max_bytes=1 << 30 if max_bytes is None else max_bytes, primitives=primitives
        )

    @property
    def core(self) -> _Core[Any]:
        return self.producer._core

    def push(self, frame: bytes, timeout: float | None = None) -> bool:
        return self.producer.push(frame, timeout)

    def try_push(self, frame: bytes) -> PushResult:
        return self.producer.try_push(frame)

    def drain(self, most: int) -> tuple[bytes, ...]:
        return tuple(self.consumer.drain(most))

    def wait(self, timeout: float | None = None) -> bool:
        return self.consumer.wait(timeout)

    def close_producer(self) -> None:
        self.producer.close()

    def close_consumer(self) -> None:
        self.consumer.close()


class Ingress:
    """The same for the ingress ring; an item is the header of a message, which carries one id per byte of it."""

    def __init__(self, capacity: int, primitives: Any) -> None:
        self.producer, self.consumer = ingress_ring(capacity, primitives=primitives)

    @property
    def core(self) -> _Core[Any]:
        return self.producer._core

    def try_push(self, header: bytes) -> PushResult:
        return self.producer.try_push(message(header))

    def try_push_many(self, headers: Sequence[bytes]) -> PushResult:
        return self.producer.try_push_many([message(header) for header in headers])

    def drain(self, most: int) -> tuple[bytes, ...]:
        columns = self.consumer.drain(most)
        assert bytes(columns.ids.astype(np.uint8)) == b"".join(columns.headers), "ids went astray from their headers"
        assert list(columns.lengths) == list(map(len, columns.headers))
        return tuple(columns.headers)

    def wait(self, timeout: float | None = None) -> bool:
        return self.consumer.wait(timeout)

    def close_producer(self) -> None:
        self.producer.close()

    def close_consumer(self) -> None:
        self.consumer.close()


def message(header: bytes) -> IngressMessage:
    return IngressMessage("r", header, np.frombuffer(header, np.uint8).astype(np.int64))


def guard_core(world: World, core: Any) -> None:
    world.guard(core, core.lock, constants=CORE_CONSTANTS)


def egress(capacity: int = 1, max_bytes: int | None = None) -> Any:
    def build(world: World) -> Egress:
        ring = Egress(capacity, max_bytes, world.primitives)
        guard_core(world, ring.core)
        return ring

    return build


def ingress(capacity: int = 1) -> Any:
    def build(world: World) -> Ingress:
        ring = Ingress(capacity, world.primitives)
        guard_core(world, ring.core)
        return ring

    return build


def guard_bell(world: World, bell: Bell) -> Bell:
    return world.guard(bell, bell._cond)


def guard_channel(world: World, channel: Channel[Any]) -> Channel[Any]:
    return world.guard(channel, channel._lock, constants=("_capacity", "_bell", "_room_bell"))


def calls(*texts: str) -> list[Op]:
    """Calls from short texts: "push a", "drain 2", "wait", "many ab", "close_producer", "after p q", "push a 1" (a timeout of 1 s)."""
    made = []
    for text in texts:
        name, *rest = text.split()
        if name == "after":
            made.append(after(*rest))
        elif name == "many":
            made.append(op("try_push_many", tuple(bytes([byte]) for byte in rest[0].encode())))
        elif name in ("push", "try_push"):
            made.append(op(name, rest[0].encode(), *map(float, rest[1:])))
        elif name == "drain":
            made.append(op(name, int(rest[0])))
        else:
            made.append(op(name, *map(float, rest)))
    return made


def ring_scenarios() -> dict[str, Scenario]:
    """Scenarios that every schedule of the rings is run through, and every faulty ring meets. Ends are judged by `RingModel`."""

    def egress_of(name: str, capacity: int, max_bytes: int | None = None, **threads: list[str]) -> Scenario:
        return _scenario(name, egress(capacity, max_bytes), RingModel(capacity, max_bytes or 1 << 30), threads)

    def ingress_of(name: str, capacity: int, **threads: list[str]) -> Scenario:
        return _scenario(name, ingress(capacity), RingModel(capacity), threads)

    made = [
        egress_of(
            "producer closes at any time",
            1,
            p=["push a", "push b"],
            c=["wait", "drain 1", "wait", "drain 1"],
            x=["close_producer"],
        ),
        egress_of(
            "consumer closes at any time",
            1,
            p=["push a", "push b"],
            q=["push c", "push d"],
            c=["wait", "drain 1", "close_consumer"],
        ),
        egress_of("both close at any time", 1, p=["push a", "push b", "close_producer"], c=["wait", "close_consumer", "drain 2"]),
        egress_of(
            "close only after all puts",
            1,
            p=["push a", "push b"],
            q=["push c"],
            c=["wait", "drain 1", "wait", "drain 1", "wait", "drain 1", "wait"],
            x=["after p q", "close_producer"],
        ),
        egress_of(
            "parked producers and one close", 1, p=["push a", "push b"], q=["push c"], r=["push d"], x=["close_consumer"]
        ),
        egress_of("two waiters, one arrival", 2, p=["try_push a"], c=["wait"], d=["wait", "drain 1"]),
        egress_of("two waiters, one close", 1, c=["wait"], d=["wait"], x=["close_producer"]),
        egress_of(
            "two producers, two consumers",
            1,
            p=["push a", "push b"],
            q=["push c"],
            c=["wait", "drain 1", "wait", "drain 1"],
            d=["wait", "drain 1"],
        ),
        egress_of("timeouts", 1, p=["push a 1", "push b 1"], q=["push c 2"], c=["wait 1", "drain 2", "wait 1"]),
        egress_of(
            "bytes", 3, 4, p=["push aaa", "push bb", "push cccccc"], c=["wait", "drain 1", "wait", "drain 2", "wait", "drain 3"]
        ),
        egress_of("one drain makes room for two", 2, p=["push a"], q=["push b"], r=["push c", "push d"], c=["wait", "drain 2"]),
        ingress_of(
            "many or none",
            2,
            p=["many ab", "try_push c", "many de"],
            c=["wait", "drain 1", "wait", "drain 2", "drain 2"],
            x=["close_consumer"],
        ),
        ingress_of(
            "ingress: the manager closes after its pushes",
            2,
            p=["try_push a", "try_push b", "try_push c", "close_producer"],
            c=["wait 1", "drain 1", "wait", "drain 1", "wait", "drain 9", "wait"],
        ),
    ]
    return {scenario.name: scenario for scenario in made}


def _scenario(name: str, build: Any, model: RingModel, threads: dict[str, list[str]]) -> Scenario:
    return Scenario(name, build, {thread: calls(*texts) for thread, texts in threads.items()}, model, (TimeoutError,))
