"""`BatchFrame`: a decoded BATCH frame, columnar; a chunk of one request is a view, made when asked for.

Owns: what a frame looks like to its reader. Rules it keeps:

* Everything was checked by `decode_frame`; nothing here can fail on the frame's content.
* Arrays are views on the frame's buffer or on its packed columns. Nothing here is per request until it is asked for, and what
  is derived (offsets of families, parsed finish reasons, integer lists) is made once. Racing readers would make it twice, which
  is harmless: each result is complete before it is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .chunk import ChunkEvent
from .finish import FinishReason, decode_plain, parse_finish_reason
from .frame_walk import array_head, skip
from .schema import WireSchema

_SHARED_BYTES: Final = 1 << 18
_NO_EXTRAS: Final[Mapping[str, NDArray[Any]]] = {}
_NOT_NIL: Final = re.compile(rb"[^\xc0]")


Packed = bytes | NDArray[np.uint32]
"""A u32 column as it is kept: one byte per entry where all are below 128, else uint32."""


def unpack(values: Packed) -> NDArray[Any]:
    """A packed column as an array (uint8 or uint32); a view."""
    return np.frombuffer(values, np.uint8) if isinstance(values, bytes) else values


def running_sum(counts: Packed) -> NDArray[np.int64]:
    """int64 [n+1]: 0, then the running sums of `counts`."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.add.accumulate(unpack(counts), dtype=np.int64, out=offsets[1:])
    return offsets


class Part(NamedTuple):
    """One family's share of a frame: counts per request [n], per position [p] or None, values [v], indices [v] or None."""

    counts: Packed
    positions: Packed | None
    values: NDArray[Any]
    indices: NDArray[Any] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def owned(self) -> Part:
        """The same on arrays of its own."""
        return self._replace(values=self.values.copy(), indices=None if self.indices is None else self.indices.copy())


Offsets = dict[str, tuple[NDArray[np.int64], NDArray[np.int64] | None]]
"""Where each request's share of a family starts: in its counts, and in its values where it is ragged."""


def _extras_of(parts: Mapping[str, Part], offsets: Offsets, row: int) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name, part in parts.items():
        bounds, inner = offsets[name]
        start, end = int(bounds[row]), int(bounds[row + 1])
        if start == end:
            continue
        if part.positions is not None and inner is not None:
            found[name + "_lens"] = unpack(part.positions)[start:end].astype(np.int64)
            start, end = int(inner[start]), int(inner[end])
        found[name + "_val"] = part.values[start:end]
        if part.indices is not None:
            found[name + "_idx"] = part.indices[start:end]
    return found


class KeptExtras(NamedTuple):
    """The extras of a frame, on arrays of their own; `some`: which rows have any."""

    parts: dict[str, Part]
    offsets: Offsets
    some: list[bool]
    all_have: bool


class RowExtras(Mapping[str, NDArray[Any]]):
    """The extras of one request in one frame, as copies; made when they are first looked at."""

    __slots__ = ("_columns", "_found", "_row")

    def __init__(self, columns: KeptExtras, row: int) -> None:
        # Let go once it was read: who keeps one row must not keep the others'.
        self._columns: KeptExtras | None = columns
        self._row = row
        self._found: dict[str, NDArray[Any]] = {}

    def _read(self) -> dict[str, NDArray[Any]]:
        columns = self._columns
        if columns is not None:  # two readers at once make it twice, which is harmless
            found = _extras_of(columns.parts, columns.offsets, self._row)
            self._found = {name: values.copy() for name, values in found.items()}
            self._columns = None
        return self._found

    def __bool__(self) -> bool:
        return True  # made only for rows that have some

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class BatchFrame(Sequence[ChunkEvent]):
    """A decoded BATCH frame of `len(frame)` requests. Made by `decode_frame` only.

    `rids` list[str] [n]; `token_ids` int32/int64 view [t] of all requests; `offsets` int64 [n+1]: request i has
    ``token_ids[offsets[i]:offsets[i + 1]]``; `unknown_columns`: trailing header positions the schema does not know, skipped.
    A rid may be there twice; then the rows are separate chunks, in order.
    """

    __slots__ = (
        "_all_have",
        "_finish",
        "_finish_cache",
        "_lengths",
        "_parts",
        "_prompt_array",
        "_prompt_tokens",
        "_row_offsets",
        "_rows",
        "_scalar_cache",
        "_scalars",
        "_with_extras",
        "layout",
        "offsets",
        "rids",
        "schema",
        "token_ids",
        "unknown_columns",
    )

    def __init__(
        self,
        schema: WireSchema,
        rids: list[str],
        token_ids: NDArray[Any],
        offsets: NDArray[np.int64],
        finish: tuple[bytes, int],
        prompt_tokens: Packed,
        scalars: dict[str, tuple[Packed, bool]],
        parts: dict[str, Part],
        unknown_columns: int,
    ) -> None:
        self.schema = schema
        self.rids = rids
        self.token_ids = token_ids
        self.offsets = offsets
        self.unknown_columns = unknown_columns
        self._finish = finish
        self._prompt_tokens = prompt_tokens
        self._prompt_array: NDArray[np.int64] | None = None
        self._scalars = scalars
        self._parts = parts
        self._rows: list[int] | None = None if finish[0] else []
        self._finish_cache: list[FinishReason | None] | None = None
        self._lengths: NDArray[np.int64] | None = None
        self._scalar_cache: dict[str, list[Any]] | None = None
        self._row_offsets: Offsets = {}
        self._with_extras: list[bool] | None = None
        self._all_have = False
        self.layout = self
        """Frames with the same layout object have equal headers (see `FrameDecoder`)."""

    def with_ids(self, token_ids: NDArray[Any]) -> BatchFrame:
        """A frame with the same header and other ids (as many); everything but them is shared."""
        frame = BatchFrame.__new__(BatchFrame)
        # one by one: this runs at every step, and a loop over the names or copy() costs more than the rest of the decode
        frame.schema = self.schema
        frame.rids = self.rids
        frame.token_ids = token_ids
        frame.offsets = self.offsets
        frame.unknown_columns = self.unknown_columns
        frame._finish = self._finish
        frame._prompt_tokens = self._prompt_tokens
        frame._prompt_array = self._prompt_array
        frame._scalars = self._scalars
        frame._parts = self._parts
        frame._rows = self._rows
        frame._finish_cache = self._finish_cache
        frame._lengths = self._lengths
        frame._scalar_cache = self._scalar_cache
        frame._row_offsets = self._row_offsets
        frame._with_extras = self._with_extras
        frame._all_have = self._all_have
        frame.layout = self.layout
        return frame

    def with_data(self, data: bytes | memoryview, start: int) -> BatchFrame:
        """A frame with the same header and other data columns, which begin at `start` of `data`."""
        ids = np.frombuffer(data, self.token_ids.dtype, len(self.token_ids), start)
        frame = self.with_ids(ids)
        if self._parts:
            at = start + ids.nbytes
            parts = frame._parts = {}
            for name, part in self._parts.items():
                values = np.frombuffer(data, part.values.dtype, len(part.values), at)
                at += values.nbytes
                indices = part.indices
                if indices is not None:
                    indices = np.frombuffer(data, indices.dtype, len(indices), at)
                    at += indices.nbytes
                parts[name] = Part(part.counts, part.positions, values, indices)
        return frame

    def __len__(self) -> int:
        return len(self.rids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Ids of each request in this frame, int64 [n]."""
        if self._lengths is None:
            self._lengths = np.diff(self.offsets)
        return self._lengths

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """Prompt tokens of each request as the scheduler states them, int64 [n]."""
        if self._prompt_array is None:
            self._prompt_array = unpack(self._prompt_tokens).astype(np.int64)
        return self._prompt_array

    @property
    def finished(self) -> list[int]:
        """The rows that have a finish reason, ascending; empty in the common step."""
        if self._rows is None:
            self._read_finish()
        assert self._rows is not None  # set by the line above
        return self._rows

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """One entry per request: its finish reason, or None while it runs."""
        if self._finish_cache is None:
            self._read_finish()
        assert self._finish_cache is not None  # set by the line above
        return self._finish_cache

    def _read_finish(self) -> None:
        blob, at = self._finish
        reasons: list[FinishReason | None] = [None] * len(self.rids)
        rows: list[int] = []
        # Nil is one byte, so between two maps the row moves on by the distance.
        row, last = 0, at
        raw = b""
        while blob and (hit := _NOT_NIL.search(blob, last)) is not None:
            at = hit.start()
            row += at - last
            if raw and blob.startswith(raw, at):  # no msgpack value is the beginning of another
                last = at + len(raw)
            else:
                last = skip(blob, at, len(blob))
                raw = blob[at:last]
            reasons[row] = parse_finish_reason(raw)
            rows.append(row)
            row += 1
        self._finish_cache = reasons
        self._rows = rows

    @property
    def has_extras(self) -> bool:
        """Whether any request of this frame has logprobs or hidden states."""
        return bool(self._parts)

    @property
    def data_bytes(self) -> int:
        """Bytes of the data columns: the ids, and the extras."""
        return self.token_ids.nbytes + sum(part.nbytes for part in self._parts.values())

    @property
    def scalars(self) -> dict[str, list[Any]]:
        """The per-request scalar columns that are present, name -> list [n]; opaque entries in plain Python types."""
        if self._scalar_cache is None:
            types = self.schema.egress.by_name
            self._scalar_cache = {
                name: _scalar_list(data, encoded, types[name].type) for name, (data, encoded) in self._scalars.items()
            }
        return self._scalar_cache

    def extras(self, row: int) -> dict[str, NDArray[Any]]:
        """The logprob and hidden-state arrays of request `row` by name (see `ChunkEvent`); families it has none of are absent."""
        return _extras_of(self._parts, self._offsets_of_parts(), self._row(row))

    def kept_extras(self, rows: Sequence[int]) -> list[Mapping[str, NDArray[Any]]]:
        """`extras` of many rows, good for longer than the frame's buffer; an empty mapping for a row that has none.

        The columns are copied once and shared by all rows, and a row's arrays are made when they are looked at. Large columns
        (hidden states) are copied row by row instead: who keeps one row must not keep much of the others'.
        """
        kept = self.keep_extras()
        if kept is None:
            return list(self.owned_extras(rows))
        return [RowExtras(kept, row) if kept.some[row] else _NO_EXTRAS for row in rows]

    def keep_extras(self) -> KeptExtras | None:
        """The columns behind `kept_extras`; None where they are too large to be shared."""
        if sum(part.nbytes for part in self._parts.values()) > _SHARED_BYTES:
            return None
        offsets = self._offsets_of_parts()
        if self._with_extras is None:
            some = np.zeros(len(self.rids), dtype=bool)
            for bounds, _ in offsets.values():
                some |= bounds[1:] > bounds[:-1]
            self._with_extras = some.tolist()
            self._all_have = all(self._with_extras)
        owned = {name: part.owned() for name, part in self._parts.items()}
        return KeptExtras(owned, offsets, self._with_extras, self._all_have)

    def _offsets_of_parts(self) -> Offsets:
        for name, part in self._parts.items():
            self._bounds(name, part)
        return self._row_offsets

    def owned_extras(self, rows: Sequence[int]) -> list[dict[str, NDArray[Any]]]:
        """`extras` of many rows, as copies that may outlive the frame's buffer."""
        owned: list[dict[str, NDArray[Any]]] = [{} for _ in rows]
        for name, part in self._parts.items():
            counts, inner = self._bounds(name, part)
            counts_at = counts.tolist()
            inner_at = None if inner is None else inner.tolist()
            lens = None if part.positions is None else unpack(part.positions).astype(np.int64)
            val, idx, lens_name, val_name, idx_name = (
                part.values,
                part.indices,
                f"{name}_lens",
                f"{name}_val",
                f"{name}_idx",
            )
            for found, row in zip(owned, rows, strict=True):
                start, end = counts_at[row], counts_at[row + 1]
                if start == end:
                    continue
                if lens is not None and inner_at is not None:
                    found[lens_name] = lens[start:end].copy()
                    start, end = inner_at[start], inner_at[end]
                found[val_name] = val[start:end].copy()
                if idx is not None:
                    found[idx_name] = idx[start:end].copy()
        return owned

    def _bounds(self, name: str, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Where each request's share of a family starts: in its counts, and in its values where it is ragged."""
        bounds = self._row_offsets.get(name)
        if bounds is None:
            inner = None if part.positions is None else running_sum(part.positions)
            bounds = self._row_offsets[name] = (running_sum(part.counts), inner)
        return bounds

    def _row(self, row: int) -> int:
        if not -len(self.rids) <= row < len(self.rids):
            raise IndexError(f"row {row} of a frame of {len(self.rids)} requests")
        return row % len(self.rids)

    def __getitem__(self, row: int) -> ChunkEvent:  # type: ignore[override]
        row = self._row(row)
        start, end = self.offsets[row], self.offsets[row + 1]
        return ChunkEvent(
            rid=self.rids[row],
            token_ids=self.token_ids[start:end],
            finish_reason=self.finish_reasons[row],
            prompt_tokens=int(self._prompt_tokens[row]),
            extras=self.extras(row) if self._parts else {},
            **{name: column[row] for name, column in self.scalars.items()},
        )

    def __iter__(self) -> Iterator[ChunkEvent]:
        return (self[row] for row in range(len(self.rids)))

    def __repr__(self) -> str:
        return f"BatchFrame({len(self.rids)} requests, {len(self.token_ids)} ids, schema {self.schema.name})"


def _scalar_list(data: Packed, encoded: bool, kind: str) -> list[Any]:
    if not encoded:
        values: list[Any] = list(data) if isinstance(data, bytes) else data.tolist()
        return values
    assert isinstance(data, bytes)  # encoded columns are
    if kind != "opaque?":
        decoded: list[Any] = msgspec.msgpack.decode(data)
        return decoded
    head = array_head(data, 0, len(data))
    assert head is not None  # checked by decode_frame
    at, items = head[1], []
    for _ in range(head[0]):
        start, at = at, skip(data, at, len(data))
        items.append(decode_plain(data[start:at]))
    return items
