"""Shared by the tests of rings, channels and the scheduler: the ring's specification as a list and a table, and guarded subjects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from headrace.codec import IngressMessage, Length
from headrace.codec.errors import InternalError
from headrace.fsm import RING, RingEvent, RingState, SinkState
from headrace.runtime import PushResult
from headrace.runtime.channel import Bell, Channel
from headrace.runtime.interleave import Op, Raised, Scenario, World, after, op
from headrace.runtime.ring import (
    EgressConsumer,
    EgressProducer,
    IngressConsumer,
    IngressProducer,
    _Core,
    egress_ring,
    ingress_ring,
)
from headrace.runtime.sink import Columns, EgressItem, Hub, Sink, as_array

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
        return len(item)

    def fits(self, items: tuple[Any, ...], more: Sequence[Any]) -> bool:
        if len(items) + len(more) > self.capacity:
            return False
        if self.max_bytes is None or not items:
            return True
        # what is empty does not go into a ring whose bytes are used up, for such a ring is FULL
        return sum(map(self.size, items)) + max(1, sum(map(self.size, more))) <= self.max_bytes

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

    def __init__(self, capacity: int, max_bytes: int | None, primitives: Any, core: Any = None) -> None:
        most = 1 << 30 if max_bytes is None else max_bytes
        if core is None:
            self.producer, self.consumer = egress_ring(capacity, max_bytes=most, primitives=primitives)
        else:
            made = core(capacity, most, len, primitives)
            self.producer, self.consumer = EgressProducer(made), EgressConsumer(made)

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

    def __init__(self, capacity: int, primitives: Any, core: Any = None) -> None:
        if core is None:
            self.producer, self.consumer = ingress_ring(capacity, primitives=primitives)
        else:
            made = core(capacity, None, lambda one: one.nbytes, primitives)
            self.producer, self.consumer = IngressProducer(made), IngressConsumer(made)

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


def egress(capacity: int = 1, max_bytes: int | None = None, core: Any = None) -> Any:
    def build(world: World) -> Egress:
        ring = Egress(capacity, max_bytes, world.primitives, core)
        guard_core(world, ring.core)
        return ring

    return build


def ingress(capacity: int = 1, core: Any = None) -> Any:
    def build(world: World) -> Ingress:
        ring = Ingress(capacity, world.primitives, core)
        guard_core(world, ring.core)
        return ring

    return build


def guard_bell(world: World, bell: Bell) -> Bell:
    return world.guard(bell, bell._lock, constants=("_primitives",))


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


def ring_scenarios(core: Any = None) -> dict[str, Scenario]:
    """Scenarios that every schedule of the rings is run through; of rings with a faulty `core` too. `RingModel` judges."""

    def egress_of(name: str, capacity: int, max_bytes: int | None = None, **threads: list[str]) -> Scenario:
        return _scenario(name, egress(capacity, max_bytes, core), RingModel(capacity, max_bytes or 1 << 30), threads)

    def ingress_of(name: str, capacity: int, **threads: list[str]) -> Scenario:
        return _scenario(name, ingress(capacity, core), RingModel(capacity), threads)

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
        egress_of(
            "both close at any time",
            1,
            p=["push a", "push b", "close_producer"],
            c=["wait", "close_consumer", "drain 2"],
        ),
        egress_of(
            "close only after all puts",
            1,
            p=["push a", "push b"],
            q=["push c"],
            c=["wait", "drain 1", "wait", "drain 1", "wait", "drain 1", "wait"],
            x=["after p q", "close_producer"],
        ),
        egress_of(
            "parked producers and one close",
            1,
            p=["push a", "push b"],
            q=["push c"],
            r=["push d"],
            x=["close_consumer"],
        ),
        egress_of("two waiters, one arrival", 2, p=["try_push a"], c=["wait"], d=["wait", "drain 1"]),
        egress_of("two waiters, one close", 1, c=["wait"], d=["wait"], x=["close_producer"]),
        egress_of(
            "two producers, two consumers",
            1,
            p=["push a", "push b"],
            q=["push c"],
            c=["wait", "drain 1"],
            d=["wait", "drain 1"],
        ),
        egress_of("timeouts", 1, p=["push a 1", "push b 1"], c=["wait 1", "drain 2", "wait 1"]),
        egress_of(
            "bytes",
            3,
            4,
            p=["push aaa", "push bb", "push cccccc"],
            c=["wait", "drain 1", "wait", "drain 2", "wait", "drain 3"],
        ),
        egress_of(
            "one drain makes room for two", 2, p=["push a"], q=["push b"], r=["push c", "push d"], c=["wait", "drain 2"]
        ),
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


# -- bells and channels -------------------------------------------------------------------------------------------------------


class Lanes:
    """A bell with two channels, as a stage has them: a bounded one with a bell for room, and an unbounded one."""

    def __init__(self, world: World, capacity: int, bell: type[Bell], channel: type[Channel[Any]]) -> None:
        self.world = world
        primitives = world.primitives
        self.bell = guard_bell(world, bell(primitives))
        self.room = guard_bell(world, bell(primitives))
        self.data: Channel[Any] = guard_channel(world, channel(capacity, self.bell, primitives, room_bell=self.room))
        self.aborts: Channel[Any] = guard_channel(world, channel(None, self.bell, primitives))


def drive(subject: Lanes, enough: int) -> tuple[Any, ...]:
    """The driver's loop: take from every source, and wait only when none had anything. Ends with `enough` items or at the close."""
    got: list[Any] = []
    while len(got) < enough:
        subject.world.loop(*got)
        # closed is read first: what was accepted before the close is then still seen
        closed = subject.data.closed and subject.aborts.closed
        taken = subject.aborts.take() or subject.data.take(2)
        got += taken
        if not taken:
            if closed:
                break
            subject.bell.wait()
    return tuple(got)


def drive_with_timeout(subject: Lanes, enough: int) -> tuple[Any, ...]:
    got: list[Any] = []
    while len(got) < enough:
        subject.world.loop(*got)
        taken = subject.data.take(1)
        got += taken
        if not taken and not subject.bell.wait(1.0):
            got.append("timeout")
    return tuple(got)


def gated_put(subject: Lanes, item: Any) -> PushResult:
    """The dispatcher's way: not enabled until there is room, told by its bell when there is."""
    while subject.data.room() == 0:
        subject.world.loop()
        subject.room.wait()
    return subject.data.put(item)


def put(subject: Lanes, lane: str, *items: Any) -> PushResult:
    channel: Channel[Any] = getattr(subject, lane)
    return channel.put_all(items)


def close(subject: Lanes, *names: str) -> None:
    for name in names:
        getattr(subject, name).close()


def _all_came_in_order(subject: Lanes, results: dict[str, tuple[Any, ...]]) -> None:
    """What was accepted has been taken or is still there, each lane in its own order."""
    got = [item for result in results["driver"] for item in result if item != "timeout"]
    for lane, mark in (("data", "d"), ("aborts", "a")):
        left = list(getattr(subject, lane)._items)
        came = [item for item in got if item[0] == mark] + left
        assert len(came) == len(set(came)), f"an item of {lane} came twice: {came}"
        for thread in ("p", "q"):
            mine = [item for item in came if item[1] == thread]
            assert mine == sorted(mine), f"{lane} gave {came}"
    accepted = sum(1 for name, made in results.items() if name in "pq" for result in made if result is PushResult.OK)
    assert accepted <= len(got) + len(subject.data._items) + len(subject.aborts._items) <= 2 * accepted


def channel_scenarios(bell: type[Bell] = Bell, channel: type[Channel[Any]] = Channel) -> dict[str, Scenario]:
    """The same for bells and channels; there is no model, so nobody may sleep at the end and `_all_came_in_order` judges."""

    def made(name: str, capacity: int, **threads: list[Op]) -> Scenario:
        return Scenario(name, lambda world: Lanes(world, capacity, bell, channel), threads, final=_all_came_in_order)

    scenarios = [
        made(
            "a driver waits on two sources",
            2,
            driver=[op(drive, 3)],
            p=[op(put, "data", "dp1"), op(put, "data", "dp2")],
            q=[op(put, "aborts", "aq1")],
        ),
        made(
            "sources close at any time",
            1,
            driver=[op(drive, 9)],
            p=[op(put, "aborts", "ap1")],
            x=[op(close, "data", "aborts")],
        ),
        made(
            "sources close only after all puts",
            2,
            driver=[op(drive, 9)],
            p=[op(put, "data", "dp1", "dp2")],
            q=[op(put, "aborts", "aq1")],
            x=[after("p", "q"), op(close, "aborts", "data")],
        ),
        made(
            "a gated producer hears of room",
            1,
            driver=[op(drive, 3)],
            p=[op(gated_put, "dp1"), op(gated_put, "dp2"), op(gated_put, "dp3")],
        ),
        made(
            "a driver's wait runs out of time",
            1,
            driver=[op(drive_with_timeout, 2)],
            p=[op(put, "data", "dp1")],
            q=[op(put, "data", "dq1")],
        ),
    ]
    return {scenario.name: scenario for scenario in scenarios}


# -- sinks --------------------------------------------------------------------------------------------------------------------


class Stream:
    """One sink and its hub."""

    def __init__(self, world: World, capacity: int, sink: type[Sink] = Sink) -> None:
        self.hub = Hub(world.primitives)
        self.sink = sink(self.hub, capacity)
        constants = [name for name in ("primitives", "record", "name") if hasattr(self.hub, name)]
        world.guard(self.hub, self.hub.lock, constants=constants)
        # the list of waiting chunks stays the same object for the sink's life, and the shard holds on to it
        waiting = self.sink.waiting()
        constants = [
            name for name in Sink.__slots__ if not name.startswith("__") and getattr(self.sink, name) is waiting
        ]
        world.guard(self.sink, self.hub.lock, constants=["_capacity", "_hub", "_rid", *constants])
        self.world = world


def stream(capacity: int = 8, sink: type[Sink] = Sink) -> Any:
    return lambda world: Stream(world, capacity, sink)


def frame(text: str) -> EgressItem.Frame:
    return EgressItem.Frame(text, np.frombuffer(text.encode(), np.uint8).astype(np.int64))


def give(subject: Stream, *texts: str) -> tuple[Any, ...]:
    return tuple(why for _, why in subject.hub.put_items([(subject.sink, frame(text)) for text in texts]))


def give_columns(subject: Stream, text: str) -> tuple[int, ...]:
    columns = Columns([0], [subject.sink], [subject.sink.waiting()], [(text, ord(text))])
    return tuple(subject.hub.put_columns(columns, 8))


def finish(subject: Stream, text: str) -> tuple[Any, ...]:
    return tuple(why for _, why in subject.hub.put_items([(subject.sink, EgressItem.Done(Length(1), frame(text)))]))


def fail(subject: Stream) -> None:
    subject.hub.fail_open(subject.sink, InternalError("a part of the server has failed"))


def leave(subject: Stream) -> bool:
    return subject.sink.close()


def ids_of(ids: Any) -> str:
    return bytes(as_array(ids).astype(np.uint8)).decode()


def read(subject: Stream, timeout: float | None = None) -> tuple[Any, ...]:
    """Read until the end: the text in pieces, and how it ended."""
    pieces: list[str] = []
    while True:
        subject.world.loop(*pieces)
        found = subject.sink.next(timeout)
        if found is None:
            assert timeout is not None, "a wait without a bound came back with nothing"
            continue
        if isinstance(found, tuple):
            pieces.append(found[0])
            assert ids_of(found[1]) == found[0], "text and ids went apart"
            continue
        assert ids_of(found.ids) == found.text, "text and ids went apart"
        pieces.append(found.text)
        if found.terminal is not None:
            return (*pieces, type(found.terminal).__name__)
        if subject.sink.state is SinkState.CLOSED:
            return (*pieces, "closed")


def _read_all(text: str, *ends: str) -> Any:
    def final(subject: Stream, results: dict[str, tuple[Any, ...]]) -> None:
        *pieces, end = results["reader"][0]
        got = "".join(pieces)
        assert end in ends, f"the stream ended as {end}"
        assert text.startswith(got), f"{got!r} is not a beginning of {text!r}"
        assert end != "Done" or got == text, f"a stream that lost text ended like a success: {got!r}"

    return final


def sink_scenarios(sink: type[Sink] = Sink) -> dict[str, Scenario]:
    def _sink(name: str, final: Any, **threads: list[Op]) -> Scenario:
        return Scenario(name, stream(sink=sink), threads, final=final)

    made = (
        _sink(
            "a parked reader is woken by each step",
            _read_all("abc", "Done"),
            reader=[op(read)],
            shard=[op(give, "a"), op(give_columns, "b"), op(finish, "c")],
        ),
        _sink(
            "a reader's wait runs out of time",
            _read_all("ab", "Done"),
            reader=[op(read, 1.0)],
            shard=[op(give, "a"), op(finish, "b")],
        ),
        _sink(
            "the client leaves while it is parked",
            _read_all("ab", "Done", "closed"),
            reader=[op(read)],
            shard=[op(give, "a"), op(finish, "b")],
            guard=[op(leave)],
        ),
        _sink(
            "a stage dies while the client is parked",
            _read_all("ab", "Done", "Error"),
            reader=[op(read)],
            shard=[op(give, "a"), op(finish, "b")],
            owner=[op(fail)],
        ),
    )
    return {scenario.name: scenario for scenario in made}
