"""Decoding a stream of frames: the same as `decode_frame` one by one, faster where a header repeats.

Owns: what is remembered of the last frame of one stream. While a batch runs, a plain step's header (rids, no finishes, counts) is the
same bytes as the last one's and only the token ids differ, so it need not be read again: comparing it is a hundred times cheaper than
decoding it. Whatever differs in one byte takes the whole way through `decode_frame`. Frames that wait one behind the other with the
same header are a *run*: one frame, and a matrix of ids with a line for each step. Belongs to one consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .batch import BatchFrame
from .decode import ControlResult, RequestFailure, RidCache, decode_frame
from .schema import WireSchema

MAX_RUN_IDS: Final = 1 << 17
"""Ids of one run, unless a single frame has more. Bounds what is worked on at once: a few megabytes, and some milliseconds."""


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
            return last.with_data(frame, self._start)
        decoded = decode_frame(frame, self._schema, seen=self._seen)
        self._last = None
        if isinstance(decoded, BatchFrame):
            self._last = decoded
            self._size, self._count = len(frame), len(decoded.token_ids)
            self._start = self._size - decoded.data_bytes
            self._prefix = frame[: self._start]
        return decoded

    def decode_run(
        self, frames: Sequence[bytes], at: int = 0
    ) -> tuple[BatchFrame | ControlResult | RequestFailure, NDArray[Any] | None, int]:
        """The frame at `at`, together with those behind it that only differ in their ids.

        Returns (the decoded first frame, ids of all of them [steps, ids of a frame] or None for one alone, index behind the last).
        Raises what `decode_frame` raises, for the first one; then `at` alone is used up.
        """
        decoded = self.decode(frames[at])
        end = at + 1
        if not isinstance(decoded, BatchFrame) or decoded.has_extras:
            return decoded, None, end
        count, size, start, prefix = self._count, self._size, self._start, self._prefix
        stop = min(len(frames), at + max(1, MAX_RUN_IDS // max(1, count)))
        while end < stop and len(frames[end]) == size and frames[end].startswith(prefix):
            end += 1
        if end - at == 1:
            return decoded, None, end
        data = b"".join([frame[start:] for frame in frames[at:end]])
        return decoded, np.frombuffer(data, self._dtype).reshape(end - at, count), end
