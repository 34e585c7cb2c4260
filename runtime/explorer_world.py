"""Small worlds of the shipped pipeline, for the explorer: a few requests, rings of one place, an abort, a fault, a shutdown.

Owns: what can happen in such a world, and what must hold after each move and where nothing moves any more. The stages, channels,
rings, sinks, the live table and the shutdown are the shipped ones, and the expectations are the simulation's oracle. Every move is
possible whenever it is enabled, so every driver topology and every speed is covered; bells are the simulation's part.

Where nobody but the environment could do something (an abort, a fault, the start of a shutdown, a deadline), everything that is
live must have come to its end: that is the liveness of properties 9 and 11, as a check on states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ..codec import (
    BatchFrame,
    ChunkEvent,
    FinishReason,
    GenerateRequest,
    Length,
    Rid,
    WireSchema,
    admit,
    decode_ingress,
    encode_batch,
    encode_control,
    frame_egress_error,
    frame_egress_result,
)
from ..codec.errors import SchedulerGoneError, ShuttingDownError
from ..codec.ingress import AbortMessage, ControlMessage
from ..codec.lies import lie
from ..fsm import AbortSource
from .channel import Bell, PushResult
from .closing import Closing, Until, Wait
from .config import RuntimeConfig
from .pipeline import Pipeline
from .sim_oracle import Broken, Client, Oracle, end_of, room_of
from .sim_parts import Parked, SimLock, SimPrimitives
from .sim_world import BOOM, RaisingBackend, common
from .sink import Sink
from .stages.life import Group, Kind, Life, Message
from .text.engine import TextEngine, TextOptions
from .text.stops import StopSet

SHARED = (TextEngine, WireSchema, BatchFrame, RaisingBackend, FinishReason, TextOptions, StopSet, SimLock, Bell)
"""What no move changes in a way that matters: a lock is free and a bell is not looked at between two moves."""

_FRAMES: dict[str, bytes] = {}
_ENVIRONMENT = ("abort", "fault", "shutdown", "deadline")  # what may never happen


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration. `requests`: stream, whole, text (streamed), raising (text on which the tokenizer raises), control, decode.

    `batch`: all of them are one group. `abort`: (index of the request, source). `fault`: what the scheduler does wrong, once.
    `chunks`: frames that a generate request takes, the last of them final. `reading`: clients read at any time; otherwise only when
    nothing else can happen, which is no loss where a sink holds everything, because reading then commutes with every move.
    """

    name: str
    requests: tuple[str, ...]
    shards: int = 1
    ring_in: int = 1
    ring_out: int = 1
    sink: int = 4
    reading: bool = False
    batch: bool = False
    abort: tuple[int, str] | None = None
    fault: str | None = None
    shutdown: bool = False
    chunks: int = 2


class States:
    """A recorder that only keeps where each request is."""

    def __init__(self, where: dict[str, int]) -> None:
        self.where = where

    def record(self, machine: str, rid: str, from_: int, event: int, to: int, stage: str) -> None:
        if machine == "request":
            self.where[rid] = to

    def record_many(self, machine: str, rids: Any, before: Any, event: int, after: Any, stage: str) -> None:
        if machine == "request":
            self.where.update(zip(rids, after, strict=True))

    def record_fill(self, ring: str, fill: int) -> None: ...


class SmallWorld:
    """One state of a configuration. `moves`, `do` and `key` are what the explorer uses."""

    def __init__(self, setup: Setup, pipeline: Callable[..., Pipeline] = Pipeline) -> None:
        shared = common()
        config = RuntimeConfig(
            tokenizer="simulated",
            context_len=16,
            detokenizer_shards=setup.shards,
            ingress_ring_capacity=setup.ring_in,
            egress_ring_capacity=setup.ring_out,
            sink_capacity=setup.sink,
            channel_capacity=4,
            max_live_requests=3,
        )
        self.setup = setup
        self.schema = shared.schemas["v1"]
        self.rules = config.rules(shared.engine.vocab_limit)
        limit = shared.engine.vocab_limit
        self.oracle = Oracle(shared.decode, limit=limit, output_limit=16, sink_capacity=setup.sink, shards=setup.shards)
        self.pipeline = pipeline(
            config,
            self.schema,
            self.rules,
            shared.engine,
            RaisingBackend(shared.backend),
            primitives=SimPrimitives,
            record=States(self.oracle.states),
        )
        self.pipeline.on_scheduler_gone = self._gone
        self.pipeline.live.open_admission()
        self.submitted = 0
        self.aborted = self.faulted = self.dead = self.stopped = False
        self.running: dict[str, int] = {}  # rid -> chunks given
        self.asked: list[str] = []
        self.parked: Parked | None = None
        self.frame: tuple[bytes, str, Any] | None = (
            None  # the frame that waits for room, and what the oracle is then told
        )
        self.closing: Closing | None = None
        self.wait: Wait | None = None
        self._moves = self._find_moves()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for shard in self.pipeline.shards:  # two views of one memory are two copies after pickling
            shard._state_column = np.frombuffer(shard._states, dtype=np.uint8)

    def _gone(self) -> None:
        self.pipeline.live.close_admission(SchedulerGoneError("the scheduler has gone"))

    # -- what the explorer asks -------------------------------------------------------------------------------------------------

    def moves(self) -> list[str]:
        """What could happen next."""
        return self._moves

    def do(self, name: str) -> None:
        """One move and the checks after it. Raises `Broken`, or what a stage raises."""
        oracle = self.oracle
        oracle.tick += 1
        word, _, number = name.partition(" ")
        getattr(self, f"_do_{word}")(*([int(number)] if number else []))
        oracle.look(self.pipeline.live._lives)
        self._moves = self._find_moves()
        if all(move in _ENVIRONMENT and not (move == "shutdown" and self.closing) for move in self._moves):
            self._quiet()

    def key(self) -> Any:
        """Everything that steers the future, and everything that a later check looks at."""
        pipeline, oracle = self.pipeline, self.oracle
        live = pipeline.live
        parked = None if self.parked is None else self.parked.woken
        return (
            pipeline.ingress.key(),
            tuple(shard.key() for shard in pipeline.shards),
            tuple(_lane(lane) for lane in (pipeline.aborts, pipeline.tokenised, *pipeline.jobs)),
            tuple(_lane(lane) for lane in (*pipeline.registrations, *pipeline.frames)),
            tuple(tuple(life.key() for life in group.members) for group in pipeline.inbox._groups),
            (len(pipeline.inbox), pipeline.inbox._closed),
            _ring(pipeline.ring_in._core),
            _ring(pipeline.ring_out._core),
            (tuple(live._lives), frozenset(live._asked), frozenset(live._owed), live._nbytes, repr(live._refusal)),
            (pipeline._scheduler_gone, pipeline.ingress_counts["aborts_undeliverable"]),
            tuple(self._client_key(client) for client in oracle.clients),
            (tuple(oracle.states.items()), oracle.gone, oracle.stopped, tuple(map(tuple, oracle._hidden))),
            (self.submitted, self.aborted, self.faulted, self.dead, self.stopped, parked),
            (tuple(self.running.items()), tuple(self.asked), None if self.frame is None else self.frame[0]),
            None if self.closing is None else self.closing.phase,
        )

    @staticmethod
    def _client_key(c: Client) -> Any:
        sink = c.sink
        terminal = None if c.terminal is None else (c.terminal[0], getattr(c.terminal[1], "code", repr(c.terminal[1])))
        held = None
        if sink is not None:
            sink._hub.hand_out()  # where a chunk waits is not seen by any reader
            end = None if sink._terminal is None else end_of(sink._terminal)
            held = (
                sink._state,
                tuple((text, np.asarray(ids).tobytes()) for text, ids in sink._items),
                end and (end[0], getattr(end[1], "code", repr(end[1]))),
                sink._cut_off,
            )
        flags = (c.asked, c.left, c.registered, c.final_given, c.read_end, c.over, c.life.taken, c.life.withdrawn)
        model = (repr(list(c.sent)), tuple(c.given), repr(c.natural), tuple(c.got_ids), c.got_text, terminal)
        return (flags, model, held, c.messages, c.aborts, c.life.abort)

    # -- enabled moves ---------------------------------------------------------------------------------------------------------------

    def _find_moves(self) -> list[str]:
        setup, oracle = self.setup, self.oracle
        moves = []
        if self.submitted < (1 if setup.batch else len(setup.requests)):
            moves.append("submit")
        target = oracle.clients[setup.abort[0] :][:1] if setup.abort and not self.aborted else []
        if any(not client.over for client in target):
            moves.append("abort")
        inner = self._inner()
        moves += inner
        moves += self._scheduler_moves()
        for client in oracle.clients if setup.reading or not set(moves) - set(_ENVIRONMENT) else ():
            sink = client.sink
            if sink is not None and not client.left and not client.read_end and sink._ready():
                moves.append(f"read {client.index}")
        if setup.shutdown and not self.stopped:
            met = self.closing is None or self._met(bool(inner))
            if met or (self.wait is not None and self.wait.until in (Until.EMPTY, Until.SETTLED)):
                moves.append("shutdown" if met else "deadline")
        return moves

    def _inner(self) -> list[str]:
        """The moves of the stages."""
        pipeline = self.pipeline
        moves = []
        facts = pipeline.facts()
        if (
            pipeline.aborts._items
            or pipeline.tokenised._items
            or pipeline.ingress.wants_ring(facts)
            or any(not life.withdrawn for group in pipeline.inbox._groups for life in group.members)
        ):
            moves.append("ingress")
        moves += [f"worker {at}" for at, lane in enumerate(pipeline.jobs) if lane._items]
        ring = pipeline.ring_out._core
        room = all(channel.room() != 0 for channel in pipeline.frames)
        if room and (ring._items or (ring._producer_gone and not pipeline._scheduler_gone)):
            moves.append("dispatch")
        for at in range(len(pipeline.shards)):
            if pipeline.registrations[at]._items or pipeline.frames[at]._items:
                moves.append(f"shard {at}")
        return moves

    def _scheduler_moves(self) -> list[str]:
        if self.dead:
            return []
        if self.parked is not None:
            return ["retry"] if self.parked.woken else []
        moves = []
        if self.pipeline.ring_in._core._items:
            moves.append("receive")
        if self.running or self.asked:
            moves.append("emit")
        if self.setup.fault and not self.faulted and (self.running or self.asked or self.setup.fault == "die"):
            moves.append("fault")
        return moves

    def _met(self, busy: bool) -> bool:
        """Whether the shutdown's present wait is over."""
        live = self.pipeline.live
        until = self.wait.until if self.wait is not None else Until.DRAINED
        return not {
            Until.EMPTY: bool(live._lives),
            Until.SETTLED: bool(live._owed),
            Until.STOPPED: busy,
            Until.DRAINED: False,
        }[until]

    # -- moves: clients ----------------------------------------------------------------------------------------------------------------

    def _do_submit(self) -> None:
        requests = self.setup.requests
        numbers = range(len(requests)) if self.setup.batch else [self.submitted]
        self.submitted += 1
        clients = [self._client(number) for number in numbers]
        try:
            result = self.pipeline.submit(Group([client.life for client in clients]))
        except (ShuttingDownError, SchedulerGoneError):
            return
        if result is PushResult.OK:
            self.oracle.submitted(clients)

    def _client(self, number: int) -> Client:
        """Request `number`; its rid puts it on the shard of its number."""
        kind, setup, shared = self.setup.requests[number], self.setup, common()
        shards = setup.shards
        tries = (Rid.from_wire(f"r{number}#{at:016x}") for at in range(100))
        rid = next(rid for rid in tries if rid.shard(shards) == number % shards)
        sink = Sink(self.pipeline.hubs[rid.shard(shards)], setup.sink, str(rid))
        place: dict[str, Any] = {"shown_rid": rid.client_facing, "shard": rid.shard(shards)}
        expected = None
        if kind == "control":
            message = encode_control(self.schema, "FlushCacheReqInput", rid, 0.0)
            life = Life(str(rid), Kind.CONTROL, sink, message=message, **place)
        elif kind == "decode":
            ids = np.array(shared.vocabulary[:2], dtype=np.int64)
            life = Life(str(rid), Kind.DETOKENIZE, sink, ids=ids, **place)
            expected = shared.decode(ids.tolist())
        else:
            prompt: dict[str, Any] = {"input_ids": [1, 2]}
            if kind in ("text", "raising"):
                prompt = {"text": BOOM if kind == "raising" else "mill"}
            stream = kind != "whole"
            request = admit(
                GenerateRequest(rid=rid, stream=stream, sampling_params={"max_new_tokens": 4}, **prompt),
                self.rules,
                self.schema,
            )
            life = Life(
                str(rid),
                Kind.GENERATE,
                sink,
                request=request,
                ids=request.input_ids,
                stream=stream,
                nbytes=request.nbytes,
                **place,
            )
        return Client(number, life, boom=kind == "raising", expected=expected)

    def _do_abort(self) -> None:
        assert self.setup.abort is not None
        number, source = self.setup.abort
        self.aborted = True
        client = self.oracle.clients[number]
        if source == "GUARD" and client.sink is not None:
            client.left = True
            client.sink.close()
        if self.pipeline.abort(client.rid, AbortSource[source]):
            client.asked = True

    def _do_read(self, number: int) -> None:
        client = self.oracle.clients[number]
        assert client.sink is not None
        self.oracle.got(client, client.sink.take())

    # -- moves: stages ---------------------------------------------------------------------------------------------------------------

    def _do_ingress(self) -> None:
        pipeline = self.pipeline
        self._moved(pipeline.move_ingress(), "ingress")
        self.oracle.room = room_of(pipeline)

    def _do_worker(self, index: int) -> None:
        self._moved(self.pipeline.move_worker(index), "a worker")

    def _do_dispatch(self) -> None:
        self._moved(self.pipeline.move_dispatch(), "the dispatcher")

    def _do_shard(self, index: int) -> None:
        pipeline = self.pipeline
        frame = list(pipeline.frames[index]._items)[:1]
        for message in list(pipeline.registrations[index]._items) or frame:
            self.oracle.given(index, message)
        self._moved(pipeline.move_shard(index), "a shard")

    @staticmethod
    def _moved(moved: bool, who: str) -> None:
        if not moved:
            raise Broken(9, f"{who} has something to do and does nothing")

    # -- moves: scheduler ------------------------------------------------------------------------------------------------------------

    def _do_receive(self) -> None:
        consumer = self.pipeline.ring_in_consumer
        consumer.wait(0)  # what it saw, the drain must give
        self._take(consumer.drain(1))

    def _take(self, columns: Any) -> None:
        for message in decode_ingress(columns, self.schema):
            rid = str(message.rid)
            self.oracle.on_ring(rid, isinstance(message, AbortMessage))
            if isinstance(message, AbortMessage):
                self.running.pop(rid, None)
                if rid in self.asked:
                    self.asked.remove(rid)
            elif isinstance(message, ControlMessage):
                self.asked.append(rid)
            else:
                self.running[rid] = 0

    def _do_emit(self) -> None:
        """The next chunk of everything that runs, in one frame; or else one answer to a control request."""
        if not self.running:
            rid = self.asked.pop(0)
            self._push(frame_egress_result(rid, b"done"), "answer", (rid, "result", b"done"))
            return
        rows = self._rows()
        for rid, _, finish in rows:
            self.running[rid] += 1
            if finish is not None:
                del self.running[rid]
        self._push(self._batch(rows), "rows", rows)

    def _rows(self) -> list[tuple[str, list[int], FinishReason | None]]:
        words = common().vocabulary
        return [
            (rid, [words[3 * ord(rid[1]) % 7 + at]], Length(1) if at + 1 == self.setup.chunks else None)
            for rid, at in self.running.items()
        ]

    def _batch(self, rows: Any) -> bytes:
        name = repr(rows)
        frame = _FRAMES.get(name)
        if frame is None:
            events = [ChunkEvent(rid=rid, token_ids=ids, finish_reason=finish) for rid, ids, finish in rows]
            frame = _FRAMES[name] = encode_batch(events, self.schema)
        return frame

    def _do_fault(self) -> None:
        self.faulted = True
        fault = self.setup.fault
        if fault == "die":
            self.dead = self.oracle.gone = True
            self.frame = None
            self.pipeline.ring_in_consumer.close()
            self.pipeline.ring_out_producer.close()
            return
        rows = self._rows()
        rid = rows[0][0] if rows else self.asked[0]
        if fault in ("malformed", "malformed_list"):
            rule = "data_length" if fault == "malformed" else "rids"
            frame = lie(self._batch(rows or [(rid, [1], None)]), rule, self.schema, lambda n: 0)
            assert frame is not None
            self._push(frame, "broken", ([name for name, _, _ in rows] or [rid], fault == "malformed"))
        elif fault == "error":
            self._push(frame_egress_error(rid, "unreadable"), "answer", (rid, "failure", "unreadable"))
        elif fault == "duplicate":
            rows = [*rows, (rid, [1], Length(1)), (rid, [2], Length(1))]
            self.running.pop(rid, None)
            self._push(self._batch(rows), "rows", rows)
        elif fault == "bad_id":
            rows[0] = rid, [common().engine.vocab_limit], None
            self._push(self._batch(rows), "rows", rows)
        elif fault == "wrong" and rows:
            self._push(frame_egress_result(rid, b"?"), "answer", (rid, "result", b"?"))
        elif fault == "wrong":
            rows = [(rid, [1], None)]
            self._push(self._batch(rows), "rows", rows)
        else:
            raise ValueError(f"no fault is called {fault!r}")

    def _push(self, frame: bytes, what: str, told: Any) -> None:
        result = self.pipeline.ring_out_producer.try_push(frame)
        if result is PushResult.FULL:
            self.frame = frame, what, told
            self.parked = Parked(self.pipeline.ring_out_producer._core, producer=True)
        elif result is PushResult.CLOSED:
            self.dead = True
        elif what == "rows":
            self.oracle.pushed(told)
        elif what == "answer":
            self.oracle.pushed_answer(*told)
        else:
            self.oracle.pushed_broken(*told)

    def _do_retry(self) -> None:
        assert self.parked is not None
        assert self.frame is not None
        self.parked.leave()
        frame, self.parked, self.frame = self.frame, None, None
        self._push(*frame)

    # -- moves: shutdown -------------------------------------------------------------------------------------------------------------

    def _do_shutdown(self) -> None:
        if self.closing is None:
            refusal = ShuttingDownError("the manager is shutting down")
            self.closing = Closing(self.pipeline, refusal, drain=1.0, settle=1.0, join=1.0)
        elif self.wait is not None and self.wait.until is Until.STOPPED:
            self.oracle.stopped = True
        before = set(self.pipeline.live._asked)
        live = list(self.oracle.open.values())
        self.wait = next(self.closing, None)
        for client in live:
            if client.rid not in before and (
                client.rid in self.pipeline.live._asked or client.rid not in self.pipeline.live
            ):
                client.asked = True
        self.stopped = self.wait is None

    def _do_deadline(self) -> None:
        self._do_shutdown()

    # -- where nothing moves ---------------------------------------------------------------------------------------------------------

    def _quiet(self) -> None:
        """Nobody but the environment can move: everything live has ended and nothing is left over."""
        oracle, pipeline = self.oracle, self.pipeline
        if self.parked is not None and not self.parked.woken:
            raise Broken(10 if self.closing else 9, "the scheduler is parked for ever")
        if self.closing is not None and not self.stopped and not self._moves:
            raise Broken(10, f"the shutdown waits for ever: {self.wait}")
        if oracle.open:
            raise Broken(9, f"these never end: {list(oracle.open.values())}")
        if not self.dead and pipeline.live._owed:
            raise Broken(11, f"aborts are owed, and nobody sends them: {pipeline.live._owed}")
        left = [pipeline.live._lives, pipeline.live._shown, pipeline.ingress.entries, pipeline.ingress.owed]
        left += [shard._rows for shard in pipeline.shards]
        if any(left) or pipeline.live._nbytes or len(pipeline.inbox):
            raise Broken(4, f"nothing is live, and something is left: {left!r:.200}")
        if not self._moves:
            if not self.stopped and not self.dead:
                oracle.quiet()
            self._take(pipeline.ring_in_consumer.drain(100))
            oracle.finish(pipeline.ingress_counts["aborts_undeliverable"])


def _lane(channel: Any) -> Any:
    return tuple(item.key() if isinstance(item, Message) else item for item in channel._items)


def _ring(core: Any) -> Any:
    items = tuple(item if isinstance(item, bytes) else item.header for item in core._items)
    return (items, core._producer_gone, core._consumer_gone, core._state)
