"""`Scheduler`: what all embedded schedulers share, from the ring to the batch, and the loop around it.

Owns: continuous batching on a `SchedulerPort`. A scheduler is a plain object: `step()` does one step of work and never waits
for a request; `run()` is the driver around it, and `start()`/`stop()` put that on a thread named ``headrace-sched``. Rules:

* Requests join and leave between steps. At most `max_batch` run; the rest wait in order. More than `max_waiting` in that
  queue are refused with an abort of status 503: a scheduler that stopped draining instead would never see the aborts that
  stand behind them in the ring.
* An abort drops its request without an answer, wherever it is. Every other request gets exactly one finish reason.
* A request that cannot be read fails alone, with an ERROR frame; a control request always gets an answer.
* A scheduler that ends, by `stop()` or by a fault, closes its port, so that nothing waits for it any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codec.encode import encode_batch_cols
from ..codec.ingress import AbortMessage, BadMessage, ControlMessage, GenerateMessage, decode_ingress
from ..codec.limits import default

if TYPE_CHECKING:
    from .port import SchedulerPort

_log = logging.getLogger("headrace.scheduler")
_IDLE_WAIT_S: Final = 1.0  # only a safety net: a request, a close and stop() all end the wait
NO_IDS: Final = np.empty(0, dtype=np.int64)


class Scheduler:
    """What all embedded schedulers share: taking requests, waiting line, aborts, control requests, the loop and its thread.

    `max_batch` requests run at once, `max_waiting` wait. `step_interval_s` > 0 spaces the steps of `run()` so far apart, by
    `clock()` (seconds, monotonic) and `wait(seconds)`. `threads` provides Thread and Event.
    `counters` holds requests, tokens, steps, aborts, refused, unreadable; one thread writes it, any may read.
    """

    def __init__(
        self,
        port: SchedulerPort,
        *,
        max_batch: int = 256,
        max_waiting: int = default("max_live_requests"),
        step_interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
        threads: Any = threading,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch!r}")
        if max_waiting < 0:
            raise ValueError(f"max_waiting must be at least 0, not {max_waiting!r}")
        self.port = port
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.counters = dict.fromkeys(("requests", "tokens", "steps", "aborts", "refused", "unreadable"), 0)
        self.failure: BaseException | None = None
        self._schema = port.schema
        self._interval = step_interval_s
        self._clock = clock
        self._threads = threads
        self._stopping = threads.Event()
        self._wait = wait if wait is not None else self._stopping.wait
        self._thread: Any = None
        self._waiting: dict[str, GenerateMessage] = {}
        self._header: bytes | None = None

    # ---- the loop and its thread

    def step(self) -> bool:
        """One step: take what the ring holds, let requests join, give each running request its next token.

        True if anything was done. Never waits for requests; parks only while the egress ring is full.
        """
        took = self._take()
        joined = self._admit()
        return self._produce() or took or joined

    def run(self) -> None:
        """Steps until the port closes or `stop()` is called, then closes the port. A fault ends it the same way and is raised."""
        try:
            while not self._stopping.is_set() and not self.port.closed:
                began = self._clock() if self._interval > 0 else 0.0
                if not self.step():
                    self.port.wait_request(_IDLE_WAIT_S)
                elif self._interval > 0:
                    rest = began + self._interval - self._clock()
                    if rest > 0:
                        self._wait(rest)
        finally:
            self.port.close()

    def start(self) -> Self:
        """Runs on a thread of its own from now on. A scheduler starts once."""
        if self._thread is not None:
            raise RuntimeError("the scheduler was already started")
        self._thread = self._threads.Thread(target=self._main, name="headrace-sched", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout_s: float = float(default("join_timeout_s"))) -> bool:
        """Ends the loop, closes the port, joins the thread; True if it is gone. Idempotent, from any thread."""
        self._stopping.set()
        self.port.close()  # also wakes a step that is parked on a full egress ring
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _main(self) -> None:
        try:
            self.run()
        except Exception as error:
            self.failure = error
            _log.exception("the scheduler died; its port is closed")

    # ---- what comes in

    def _take(self) -> bool:
        columns = self.port.recv_requests()
        if not columns.headers:
            return False
        for message in decode_ingress(columns, self._schema):
            if isinstance(message, GenerateMessage):
                self._accept(message)
            elif isinstance(message, AbortMessage):
                self._abort(message)
            elif isinstance(message, ControlMessage):
                payload = self._control_answer(message)
                if payload is not None:
                    self.port.push_control_result(str(message.rid), payload)
            else:
                self._unreadable(message)
        return True

    def _accept(self, message: GenerateMessage) -> None:
        self.counters["requests"] += 1
        room = self.max_batch - self.running + self.max_waiting
        if len(self._waiting) < room:
            self._waiting[str(message.rid)] = message
            return
        self.counters["refused"] += 1
        reason = {
            "type": "abort",
            "message": "the scheduler's queue is full",
            "status_code": 503,
            "err_type": "queue_full",
        }
        self._push([str(message.rid)], [reason], [len(message.input_ids)], [0], NO_IDS)

    def _abort(self, message: AbortMessage) -> None:
        if message.abort_all:
            self.counters["aborts"] += len(self._waiting) + self.running
            self._waiting.clear()
            self._drop(None)
            return
        rid = str(message.rid)
        if self._waiting.pop(rid, None) is not None or self._drop(rid):
            self.counters["aborts"] += 1

    def _control_answer(self, message: ControlMessage) -> bytes | None:
        if message.tag == "GetInternalStateReq":
            state = {
                "running": self.running,
                "waiting": len(self._waiting),
                "max_batch": self.max_batch,
                **self.counters,
            }
            return msgspec.json.encode(state)
        if message.tag == "FlushCacheReqInput":
            return msgspec.json.encode({"success": True, "message": "there is no cache"})
        return msgspec.json.encode({"success": False, "message": f"{type(self).__name__} does not know {message.tag}"})

    def _unreadable(self, message: BadMessage) -> None:
        self.counters["unreadable"] += 1
        if message.rid is None:
            _log.error("a request without a readable rid was dropped: %s", message.message)
        else:
            self.port.push_error(str(message.rid), message.message)

    def _admit(self) -> bool:
        """Lets requests join while there is room; True if one did (it may have ended at once, so that none runs)."""
        room = self.max_batch - self.running
        joining = list(self._waiting)[:room] if room > 0 and self._waiting else []
        for rid in joining:
            self._join(rid, self._waiting.pop(rid))
        return bool(joining)

    # ---- what goes out

    def _push(
        self,
        rids: Sequence[str],
        finishes: Sequence[dict[str, Any] | None],
        prompt_tokens: Sequence[int],
        lens: Sequence[int],
        ids: NDArray[Any],
    ) -> bytes:
        """One BATCH frame; returns its header, which may be used again while none of these columns but `ids` changes."""
        # Ready msgpack where the encoder would otherwise look at every entry; the counts stay numbers, to be checked against `ids`.
        header, cols = encode_batch_cols(
            self._schema,
            rids=_raw(rids),
            finish_reasons=_raw(finishes),
            prompt_tokens=_raw(prompt_tokens),
            tok_lens=np.array(lens, dtype=np.int64),
            token_ids=ids,
        )
        self.port.push_batch(header, cols)
        self.counters["tokens"] += len(ids)
        return header

    # ---- what a scheduler adds

    @property
    def running(self) -> int:
        """How many requests are in the batch."""
        raise NotImplementedError

    def _join(self, rid: str, message: GenerateMessage) -> None:
        raise NotImplementedError

    def _drop(self, rid: str | None) -> bool:
        """Forgets a running request (None: all); False if it does not run."""
        raise NotImplementedError

    def _produce(self) -> bool:
        raise NotImplementedError


def _raw(column: Sequence[Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(column))
