"""The egress dispatcher: a frame in, one message for each shard it concerns out.

Owns: the decoding of frames and the split by shard; nothing between steps but counters. Rules it keeps:

* A rejected frame delivers nothing to anyone. Every request it names is failed; where its rids could not all be read, every live
  entry of every shard is, because any of them may have lost data.
* At most one message per shard and frame, so the lane to a shard needs as many free places as frames are given (gated). Frames that
  differ in nothing but their ids become one message.
* Bytes that name nobody (empty, unknown tag, a RESULT or ERROR without a readable rid) are counted and logged and fail nobody.
* A frame's views live only as long as the shards' steps on it.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ...codec import BatchFrame, ControlResult, FrameError, RequestFailure, WireSchema
from ...codec.errors import InternalError
from ...codec.rid import shard_of
from ...codec.stream import FrameDecoder
from .life import Fail, Message, extras_key


class Batch(Message):
    """Dispatcher -> shard: `rows` of `frame` are this shard's (None: all of them).

    `run` are the ids of several steps whose frames are alike but for them, [steps, ids of a frame], beginning with `frame`'s own.
    """

    __slots__ = ("frame", "rows", "run")

    def __init__(self, frame: BatchFrame, rows: list[int] | None, run: NDArray[Any] | None = None) -> None:
        self.frame = frame
        self.rows = rows
        self.run = run

    def behind(self, steps: int) -> Batch | None:
        """What is left of the run behind its first `steps`."""
        if self.run is None or steps >= len(self.run):
            return None
        left = self.run[steps:]
        return Batch(self.frame.with_ids(left[0]), self.rows, left if len(left) > 1 else None)

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
            None if self.run is None else self.run.tobytes(),
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

    __slots__ = ("_decoder", "_seed", "_shards", "activity", "counts", "faults")

    def __init__(self, schema: WireSchema, *, shards: int = 1, seed: int = 0) -> None:
        self._shards = shards
        self._seed = seed
        self._decoder = FrameDecoder(schema)
        self.activity = 0
        self.counts: dict[str, int] = {}
        self.faults: list[str] = []  # of the last step, for the driver's log

    def key(self) -> tuple[()]:
        """Counters and what the decoder remembers steer nothing, so they are no part of the state."""
        return ()

    def step(self, *frames: bytes) -> list[tuple[int, Message]]:
        """(shard, message) pairs in the order of the frames, at most one for each shard and frame."""
        self.faults = []
        messages: list[tuple[int, Message]] = []
        at = 0
        while at < len(frames):
            try:
                decoded, run, end = self._decoder.decode_run(frames, at)
            except FrameError as error:
                messages += self._rejected(error)
                at += 1
                continue
            self._decoded(decoded, run, end - at, messages)
            at = end
        return messages

    def _decoded(
        self,
        decoded: BatchFrame | ControlResult | RequestFailure,
        run: NDArray[Any] | None,
        count: int,
        messages: list[tuple[int, Message]],
    ) -> None:
        if isinstance(decoded, BatchFrame):
            self.activity += count
            if decoded.unknown_columns:
                self._count("frames_with_unknown_columns", count)
            if self._shards > 1:
                messages += [(shard, Batch(decoded, rows, run)) for shard, rows in self._split(decoded.rids).items()]
            elif decoded.rids:
                messages.append((0, Batch(decoded, None, run)))
        elif isinstance(decoded, ControlResult):
            messages.append((self._shard(decoded.rid), Result(decoded.rid, decoded.payload)))
        else:
            messages.append((self._shard(decoded.rid), Failure(decoded.rid, decoded.message)))

    def _rejected(self, error: FrameError) -> list[tuple[int, Message]]:
        self._count("frames_rejected")
        self.faults.append(f"a frame was rejected: {error.reason}")
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

    def _count(self, name: str, times: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + times
