"""Decoding a stream of frames: the same as `decode_frame` one by one, faster where a header repeats.

Owns: what is remembered of the last frame of one stream. While a batch runs, a plain step's header (rids, no finishes, counts) is the
same bytes as the last one's and only the token ids differ, so it need not be read again: comparing it is a hundred times cheaper than
decoding it. Whatever differs in one byte takes the whole way through `decode_frame`. Belongs to one consumer.
"""

from __future__ import annotations

import numpy as np

from .batch import BatchFrame
from .decode import ControlResult, RequestFailure, RidCache, decode_frame
from .schema import WireSchema


class FrameDecoder:
    """Frames of one stream, in order. Remembers one header (at most the schema's bound) and its decoded columns."""

    __slots__ = ("_count", "_dtype", "_last", "_prefix", "_schema", "_seen", "_size", "_start")

    def __init__(self, schema: WireSchema) -> None:
        self._schema = schema
        self._dtype = np.dtype(schema.id_dtype)
        self._seen = RidCache()
        self._last: BatchFrame | None = None
        self._prefix = b""
        self._size = self._start = self._count = 0

    def decode(self, frame: bytes) -> BatchFrame | ControlResult | RequestFailure:
        """As `decode_frame`. Frames with equal headers share `BatchFrame.layout`, and their lists must not be changed."""
        last = self._last
        if last is not None and len(frame) == self._size and frame.startswith(self._prefix):
            return last.with_ids(np.frombuffer(frame, self._dtype, self._count, self._start))
        decoded = decode_frame(frame, self._schema, seen=self._seen)
        self._last = None
        if isinstance(decoded, BatchFrame) and not decoded.has_extras:
            self._last = decoded
            self._size, self._count = len(frame), len(decoded.token_ids)
            self._start = self._size - self._count * self._dtype.itemsize
            self._prefix = frame[: self._start]
        return decoded
