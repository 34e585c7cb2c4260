"""The scheduler of a simulation: one thread's worth of it, mostly honest, wild where the options say so.

Owns: the scheduler's side of both rings, and what it has been asked to do. It tells the oracle what each ring accepted or gave, so
that the oracle knows what every client is due. A push into a full ring parks it, and only a wake-up brings it back.
"""

from __future__ import annotations

import random
from typing import Any

from ..codec import (
    Abort,
    ChunkEvent,
    FinishReason,
    FrameError,
    IngressColumns,
    Length,
    Stop,
    WireSchema,
    decode_frame,
    decode_ingress,
    encode_batch,
    frame_egress_error,
    frame_egress_result,
)
from ..codec.ingress import AbortMessage, BadMessage, ControlMessage, GenerateMessage
from ..codec.lies import LIES, lie
from .channel import PushResult
from .pipeline import Pipeline
from .sim_oracle import Broken, Oracle
from .sim_parts import Parked, SimOptions

_LIES = sorted(LIES)
Row = tuple[str, list[int], FinishReason | None]


class SimScheduler:
    """See the module's head. `vocabulary` are ids that it may produce; `bad_id` is one that it may not."""

    def __init__(
        self,
        pipeline: Pipeline,
        schema: WireSchema,
        oracle: Oracle,
        options: SimOptions,
        vocabulary: list[int],
        bad_id: int | None,
    ) -> None:
        self._pipeline = pipeline
        self._schema = schema
        self._oracle = oracle
        self._options = options
        self._vocabulary = vocabulary
        self._bad_id = bad_id
        self.running: dict[str, int] = {}  # rid -> its prompt's length
        self.asked: list[str] = []  # rids of control requests
        self.over: list[str] = []  # rids that ended; late output is made for these
        self.dead = False
        self.stalled_until = -1
        self.parked: Parked | None = None
        self._waiting: tuple[bytes, Any] | None = None  # the frame that waits for room, and how to tell the oracle

    def enabled(self, now: int) -> bool:
        """Whether it could be scheduled."""
        return not self.dead and now >= self.stalled_until and (self.parked is None or self.parked.woken)

    def idle(self) -> bool:
        """Whether it has nothing to do but wait."""
        return self._waiting is None and not self.running and not self.asked

    # -- one step --------------------------------------------------------------------------------------------------------------

    def step(self, rng: random.Random, *, honest: bool = False) -> bool:
        """One step: receive, wait, or push one frame. `honest`: finish what there is, without faults. False: nothing to do."""
        if self.parked is not None:
            self.parked.leave()
            self.parked = None
        if self._waiting is not None:
            frame, tell = self._waiting
            self._waiting = None
            self._push(frame, tell)
            return True
        if self._receive(rng, honest):
            return True
        if honest:
            return self._finish_something(rng)
        if rng.randrange(100) < self._options.wild and self._options.faults and self._wild(rng):
            return True
        if self.asked and rng.random() < 0.3:
            self._answer(self.asked.pop(0), rng)
            return True
        if self.running:
            self._push_rows(self._rows(rng), rng)
            return True
        return False

    def park(self) -> None:
        """Wait for a request, as `wait_request` does: not at all if there is one, or if none can come any more."""
        core = self._pipeline.ring_in_consumer._core
        if core._items:
            return
        if core._closed:
            self.dead = True
            return
        self.parked = Parked(core, producer=False)

    def die(self) -> None:
        """Go, as a scheduler's port does when it closes."""
        if self.parked is not None:
            self.parked.leave()
            self.parked = None
        self.dead = True
        self._waiting = None
        self._pipeline.ring_in_consumer.close()
        self._pipeline.ring_out_producer.close()

    def read_ring(self, columns: IngressColumns) -> None:
        """Take over what was drained, and tell the oracle."""
        for message in decode_ingress(columns, self._schema):
            if isinstance(message, BadMessage):
                raise Broken(8, f"the ring holds a message that cannot be read: {message.message}")
            self._oracle.on_ring(message.rid, isinstance(message, AbortMessage))
            if isinstance(message, AbortMessage):
                if self.running.pop(message.rid, None) is not None:
                    self.over.append(message.rid)
                if message.rid in self.asked:
                    self.asked.remove(message.rid)
            elif isinstance(message, GenerateMessage):
                self.running[message.rid] = len(message.input_ids)
            else:
                assert isinstance(message, ControlMessage)
                self.asked.append(message.rid)

    def _receive(self, rng: random.Random, honest: bool) -> bool:
        consumer = self._pipeline.ring_in_consumer
        if not honest and rng.random() < 0.6:
            return False
        if rng.random() < 0.5 and consumer.wait(0):
            self._oracle.seen["a stash is used"] += 1
        most = 64 if honest else rng.choice((1, 1, 2, 64))
        columns = consumer.drain(most)
        if len(columns) > most:
            raise Broken(8, f"drain({most}) gave {len(columns)}")
        self.read_ring(columns)
        return len(columns) > 0

    # -- frames ------------------------------------------------------------------------------------------------------------------

    def _ids(self, rng: random.Random, most: int = 3) -> list[int]:
        return [rng.choice(self._vocabulary) for _ in range(rng.choice((1, 1, 1, 0, rng.randint(0, most))))]

    def _finish(self, rng: random.Random) -> FinishReason:
        return rng.choice((Length(4), Stop(None), Stop(7), Length(1)))

    def _rows(self, rng: random.Random) -> list[Row]:
        few = len(self.running) <= 1 or rng.random() < 0.3
        if rng.randrange(100) < self._options.plain:  # the common step: one id for everybody
            return [(rid, [rng.choice(self._vocabulary)], None) for rid in self.running]
        rids = [rid for rid in self.running if few or rng.random() < 0.8]
        return [
            (rid, self._ids(rng), self._finish(rng) if rng.randrange(100) < self._options.final else None)
            for rid in rids
        ]

    def _frame(self, rows: list[Row]) -> bytes:
        return encode_batch(
            [
                ChunkEvent(rid=rid, token_ids=ids, finish_reason=finish, prompt_tokens=self.running.get(rid, 1))
                for rid, ids, finish in rows
            ],
            self._schema,
        )

    def _push_rows(self, rows: list[Row], rng: random.Random) -> None:
        frame = self._frame(rows)
        for rid, _, finish in rows:
            if finish is not None and self.running.pop(rid, None) is not None:
                self.over.append(rid)
        self._push(frame, lambda: self._oracle.pushed(rows))

    def _push(self, frame: bytes, tell: Any) -> None:
        result = self._pipeline.ring_out_producer.try_push(frame)
        if result is PushResult.OK:
            tell()
        elif result is PushResult.FULL:
            self._oracle.seen["a producer is parked"] += 1
            self._waiting = frame, tell
            self.parked = Parked(self._pipeline.ring_out_producer._core, producer=True)
        else:
            self.dead = True  # the manager has gone, and a scheduler that is told so ends

    def _answer(self, rid: str, rng: random.Random) -> None:
        payload = bytes(rng.randrange(256) for _ in range(3))
        self._push(frame_egress_result(rid, payload), lambda: self._oracle.pushed_answer(rid, "result", payload))

    def _finish_something(self, rng: random.Random) -> bool:
        if self.asked:
            self._answer(self.asked.pop(0), rng)
        elif self.running:
            self._push_rows([(rid, self._ids(rng), Length(1)) for rid in list(self.running)], rng)
        else:
            return False
        return True

    # -- faults --------------------------------------------------------------------------------------------------------------------

    def _wild(self, rng: random.Random) -> bool:
        """One fault. False where there is nothing to commit it on."""
        fault = rng.choice(self._options.faults)
        rows = self._rows(rng)
        if fault in ("malformed", "malformed_list"):
            return self._broken_frame(rows, fault == "malformed_list", rng)
        if fault == "unknown":
            self._push_rows([*rows, (f"{rng.getrandbits(128):032x}", self._ids(rng), None)], rng)
        elif fault == "late" and self.over:
            self._push_rows([(rng.choice(self.over), self._ids(rng), rng.choice((None, Length(1)))), *rows], rng)
        elif fault == "duplicate" and rows:
            rid = rows[0][0]
            for _ in range(rng.randint(1, 3)):
                rows.insert(rng.randrange(len(rows) + 1), (rid, self._ids(rng), rng.choice((None, self._finish(rng)))))
            self._push_rows(rows, rng)
        elif fault == "result_for_generate" and self.running:
            rid = rng.choice(list(self.running))
            self._answer(rid, rng)
        elif fault == "chunk_for_control" and self.asked:
            self._push_rows([(rng.choice(self.asked), self._ids(rng), None), *rows], rng)
        elif fault == "error" and (self.running or self.asked):
            rid = rng.choice([*self.running, *self.asked])
            told = "this request cannot be read"
            self._push(frame_egress_error(rid, told), lambda: self._oracle.pushed_answer(rid, "failure", told))
        elif fault == "bad_id" and rows and self._bad_id is not None:
            at = rng.randrange(len(rows))
            rid, ids, finish = rows[at]
            rows[at] = rid, [*ids, self._bad_id], finish
            self._push_rows(rows, rng)
        elif fault == "too_many" and rows:
            at = rng.randrange(len(rows))
            rid, _, finish = rows[at]
            rows[at] = rid, [rng.choice(self._vocabulary)] * (self._options.context_len - rng.randint(-1, 2)), finish
            self._push_rows(rows, rng)
        elif fault == "aborts" and rows:
            at = rng.randrange(len(rows))
            finish = Abort("out of memory", rng.choice((None, 500, 503)), None)
            rows[at] = rows[at][0], rows[at][1], finish
            self._push_rows(rows, rng)
        else:
            return False
        return True

    def _broken_frame(self, rows: list[Row], hide_rids: bool, rng: random.Random) -> bool:
        rule = "rids" if hide_rids else rng.choice(_LIES)
        frame = lie(self._frame(rows), rule, self._schema, rng.randrange)
        if frame is None:
            return False
        try:
            decode_frame(frame, self._schema)
        except FrameError as error:
            if error.reason in ("empty", "unknown_tag") or error.names_nobody:
                self._push(frame, lambda: None)
            else:
                named, complete = list(error.rids), error.rids_complete
                saw = "a malformed frame" if complete else "a malformed frame that hides its rids"
                self._oracle.seen[saw] += 1
                self._push(frame, lambda: self._oracle.pushed_broken(named, complete))
            return True
        return False
