"""The scheduler's side with the names of SGLang's compiled `Server` (0.5.23, wire v2): a scheduler loop written for it runs on headrace.

Owns: the names and shapes of that class, nothing else; every call goes to a `SchedulerPort`. What differs, because a loop must be able
to end: after a shutdown `wait_request` is False at once (theirs is true at once), and `closed` says so.

    server = Server(RuntimeConfig(tokenizer=…, wire="v2"))      # or ServerArgs, or a TokenizerManager that has been started
    while not server.closed:
        if idle:
            server.wait_request(1000)
        for request in server.recv_requests():
            request.header, request.buffers                     # msgpack bytes, [(name, int64 array), …]
        server.push_decode_result_batch(header, data_cols)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codec import encode_batch
from ..codec.errors import ValidationError
from .config import RuntimeConfig
from .manager import TokenizerManager
from .ring import Buffer
from .server_args import ServerArgs


class IngressRequest:
    """One received request. `header`: msgpack positional (bytes). `buffers`: (name, int64 array) in order; empty for control requests."""

    __slots__ = ("buffers", "header")

    def __init__(self, header: bytes, buffers: list[tuple[str, np.ndarray[Any, Any]]]) -> None:
        self.header = header
        self.buffers = buffers


class Server:
    """A running manager, seen as SGLang's scheduler process sees its Rust server. `manager` is the clients' side.

    From a `RuntimeConfig` or `ServerArgs` a manager of wire v2 is made, started, and ended by `shutdown`; a `TokenizerManager` must
    speak v2 and have been started. ValidationError for another wire.
    """

    def __init__(self, what: RuntimeConfig | ServerArgs | TokenizerManager) -> None:
        if isinstance(what, ServerArgs):
            what = RuntimeConfig.from_server_args(what, wire="v2")
        manager = TokenizerManager(what) if isinstance(what, RuntimeConfig) else what
        if manager.scheduler.schema.name != "v2":
            raise ValidationError(
                f"this port speaks wire v2, and the manager {manager.scheduler.schema.name}", field="wire"
            )
        self.manager = manager if manager is what else manager.start()
        self._port = manager.scheduler
        self._empty = encode_batch([], self._port.schema)

    @property
    def closed(self) -> bool:
        """Whether nothing can be pushed any more."""
        return self._port.closed

    def wait_request(self, timeout_ms: int = 1000) -> bool:
        """Park up to `timeout_ms` milliseconds for a request; False where none came or none can come."""
        return self._port.wait_request(timeout_ms / 1000)

    def recv_requests(self, max: int = 256) -> list[IngressRequest]:
        """Up to `max` requests, oldest first; never waits. Buffers are views on one array for all of them."""
        columns = self._port.recv_requests(max)
        ends = np.cumsum(columns.lengths).tolist()
        cells = {name: (values, np.cumsum(lengths).tolist()) for name, (values, lengths) in columns.cells.items()}
        requests = []
        for at, header in enumerate(columns.headers):
            start = ends[at - 1] if at else 0
            buffers: list[tuple[str, np.ndarray[Any, Any]]] = []
            if ends[at] > start:
                buffers.append(("input_ids", columns.ids[start : ends[at]]))
            for name, (values, cell_ends) in cells.items():
                first = cell_ends[at - 1] if at else 0
                if cell_ends[at] > first:
                    buffers.append((name, values[first : cell_ends[at]]))
            requests.append(IngressRequest(header, buffers))
        return requests

    def push_decode_result_batch(self, header: bytes, data_cols: Sequence[Buffer]) -> bool:
        """One step's output as one frame. Blocks while the ring is full; False only on shutdown."""
        return self._port.push_batch(header, data_cols)

    def push_control_result(self, rid: str, payload: bytes | str) -> bool:
        """The answer to a control request. Blocks while the ring is full; False only on shutdown."""
        return self._port.push_control_result(rid, payload.encode() if isinstance(payload, str) else payload)

    def push_error(self, rid: str, message: str) -> bool:
        """A terminal failure of the request `rid`. Blocks while the ring is full; False only on shutdown."""
        return self._port.push_error(rid, message)

    def push_health_ack(self) -> bool:
        """The scheduler is alive though it skipped a probe: a frame without requests, which counts as activity."""
        return self._port.push_frame(self._empty)

    def shutdown(self) -> None:
        """End the manager; live requests are aborted."""
        self.manager.shutdown(0)
