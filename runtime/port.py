"""`SchedulerPort`: what a scheduler is given, its two ring ends and nothing else of the manager.

Owns: the scheduler's view. Rules it keeps: `wait_request` and `recv_requests` belong to one consumer thread at a time, and a second
concurrent caller raises; pushes may come from any thread and are ordered per thread. After `close` (a scheduler that goes) everything
live is failed by the manager; after the manager has gone, pushes return False and waits return False.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..codec import IngressColumns, WireSchema, frame_egress_error, frame_egress_result
from ..codec.errors import InternalError
from .ring import Buffer, EgressProducer, IngressConsumer


class SchedulerPort:
    """The scheduler's side of both rings; see `docs/` for a scheduler in forty lines."""

    def __init__(self, schema: WireSchema, requests: IngressConsumer, frames: EgressProducer) -> None:
        self.schema = schema
        self._requests = requests
        self._frames = frames
        self._consuming = threading.Lock()
        self._pid = os.getpid()

    def wait_request(self, timeout_s: float | None = None) -> bool:
        """True when something can be received; False after `timeout_s` seconds, or when nothing can come any more."""
        with self._consumer():
            return self._requests.wait(timeout_s)

    def recv_requests(self, max: int = 256) -> IngressColumns:
        """Up to `max` messages as columns, oldest first. Never waits."""
        with self._consumer():
            return self._requests.drain(max)

    def push_batch(self, header: bytes, data_cols: Sequence[Buffer], timeout_s: float | None = None) -> bool:
        """One step's output: the msgpack header and the data columns. Waits while the ring is full; False: the manager is gone."""
        return self._frames.push_batch(header, data_cols, timeout_s)

    def push_frame(self, frame: Buffer, timeout_s: float | None = None) -> bool:
        """A whole frame, tag included."""
        return self._frames.push_frame(frame, timeout_s)

    def push_control_result(self, rid: str, payload: bytes, timeout_s: float | None = None) -> bool:
        """The answer to the control request `rid`, delivered verbatim."""
        return self._frames.push_frame(frame_egress_result(rid, payload), timeout_s)

    def push_error(self, rid: str, message: str, timeout_s: float | None = None) -> bool:
        """The request `rid` could not be read: a 400 to its client."""
        return self._frames.push_frame(frame_egress_error(rid, message), timeout_s)

    @property
    def closed(self) -> bool:
        """Whether either side has closed, so that nothing more can be pushed."""
        facts = self._frames.facts()
        return facts.producer_gone or facts.consumer_gone

    def close(self) -> None:
        """The scheduler goes: what it pushed is still delivered, then everything live is failed. Idempotent."""
        self._requests.close()
        self._frames.close()

    @contextmanager
    def _consumer(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise InternalError("this port belongs to another process; rings between threads do not cross a fork")
        if not self._consuming.acquire(blocking=False):
            raise RuntimeError("another thread is receiving requests on this port; it has one consumer at a time")
        try:
            yield
        finally:
            self._consuming.release()
