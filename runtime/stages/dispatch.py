"""The egress dispatcher: a frame in, one message for each shard it concerns out.

Owns: the decoding of frames and the split by shard; nothing between steps but counters. Rules it keeps:

* A rejected frame delivers nothing to anyone. Every request it names is failed; where its rids could not all be read, every live
  entry of every shard is, because any of them may have lost data.
* One message per shard and frame, so the lane to a shard needs one free place for a step (gated).
* Bytes that name nobody (empty, unknown tag, a RESULT or ERROR without a readable rid) are counted and logged and fail nobody.
* A frame's views live only as long as the shards' steps on it.
"""

from __future__ import annotations

from typing import Any

from ...codec import BatchFrame, ControlResult, FrameError, RequestFailure, WireSchema
from ...codec.errors import InternalError
from ...codec.rid import shard_of
from ...codec.stream import FrameDecoder
from .life import Fail, Message, extras_key


class Batch(Message):
    """Dispatcher -> shard: `rows` of `frame` are this shard's (None: all of them)."""

    __slots__ = ("frame", "rows")

    def __init__(self, frame: BatchFrame, rows: list[int] | None) -> None:
        self.frame = frame
        self.rows = rows

    def key(self) -> tuple[Any, ...]:
        frame = self.frame
        return (
            "Batch",
            tuple(frame.rids),
            frame.token_ids.tobytes(),
            frame.offsets.tobytes(),
            repr(frame.finish_reasons),
            frame.prompt_tokens.tobytes(),
            repr(frame.scalars),
            extras_key([frame.extras(row) for row in range(len(frame.rids))]) if frame.has_extras else (),
            None if self.rows is None else tuple(self.rows),
        )


class Result(Message):
    """Dispatcher -> shard: the answer to the control request `rid`."""

    __slots__ = ("payload", "rid")

    def __init__(self, rid: str, payload: bytes) -> None:
        self.rid = rid
        self.payload = payload


class Failure(Message):
    """Dispatcher -> shard: the scheduler could not read the request `rid`."""

    __slots__ = ("message", "rid")

    def __init__(self, rid: str, message: str) -> None:
        self.rid = rid
        self.message = message


class Dispatcher:
    """See the module's head. `activity` counts accepted BATCH frames (the health probe watches it)."""

    __slots__ = ("_decoder", "_seed", "_shards", "activity", "counts", "fault")

    def __init__(self, schema: WireSchema, *, shards: int = 1, seed: int = 0) -> None:
        self._shards = shards
        self._seed = seed
        self._decoder = FrameDecoder(schema)
        self.activity = 0
        self.counts: dict[str, int] = {}
        self.fault = ""  # of the last step, for the driver's log

    def key(self) -> tuple[()]:
        """Counters and what the decoder remembers steer nothing, so they are no part of the state."""
        return ()

    def step(self, frame: bytes) -> list[tuple[int, Message]]:
        """(shard, message) pairs, at most one for each shard."""
        self.fault = ""
        try:
            decoded = self._decoder.decode(frame)
        except FrameError as error:
            return self._rejected(error)
        if isinstance(decoded, BatchFrame):
            self.activity += 1
            if decoded.unknown_columns:
                self._count("frames_with_unknown_columns")
            if self._shards == 1:
                return [(0, Batch(decoded, None))] if decoded.rids else []
            return [(shard, Batch(decoded, rows)) for shard, rows in self._split(decoded.rids).items()]
        if isinstance(decoded, ControlResult):
            return [(self._shard(decoded.rid), Result(decoded.rid, decoded.payload))]
        assert isinstance(decoded, RequestFailure)
        return [(self._shard(decoded.rid), Failure(decoded.rid, decoded.message))]

    def _rejected(self, error: FrameError) -> list[tuple[int, Message]]:
        self._count("frames_rejected")
        self.fault = f"a frame was rejected: {error.reason}"
        told = InternalError("the scheduler sent a malformed frame")
        if error.reason in ("empty", "unknown_tag") or error.names_nobody:
            return []
        if not error.rids_complete:
            return [(shard, Fail(None, told, owed=True)) for shard in range(self._shards)]
        return [
            (shard, Fail([error.rids[row] for row in rows], told, owed=True))
            for shard, rows in self._split(error.rids).items()
        ]

    def _split(self, rids: list[str]) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {}
        for row, rid in enumerate(rids):
            rows.setdefault(self._shard(rid), []).append(row)
        return rows

    def _shard(self, rid: str) -> int:
        return 0 if self._shards == 1 else shard_of(rid, self._shards, self._seed)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
