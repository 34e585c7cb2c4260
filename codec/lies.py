"""Frames taken apart, put together again, and made to lie in exactly one place.

Owns: the one-lie frames that the strategies, the fuzzer, the golden vectors and the conformance kit share: for each rule of the
wire, ways to break that rule and no other. Needs neither Hypothesis nor a random generator: `pick(n)` (an index below n) is
given by whoever draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from .encode import EGRESS_TAG_BATCH, EGRESS_TAG_ERROR, EGRESS_TAG_RESULT
from .frame_walk import array_head, skip
from .schema import Column, WireSchema

Pick = Callable[[int], int]
T = TypeVar("T")
_INTS: Final = msgspec.msgpack.Decoder(list[int])
_pack: Final = msgspec.msgpack.encode


def array(cells: list[bytes]) -> bytes:
    """The msgpack array of ready-made `cells`."""
    return array_start(len(cells)) + b"".join(cells)


def array_start(n: int) -> bytes:
    """The shortest msgpack array head for `n` entries."""
    if n < 16:
        return bytes((0x90 | n,))
    return b"\xdc" + n.to_bytes(2, "big") if n < 1 << 16 else b"\xdd" + n.to_bytes(4, "big")


def entries(blob: bytes) -> list[bytes]:
    """The entries of the msgpack array `blob`, each as its bytes."""
    head = array_head(blob, 0, len(blob))
    if head is None:
        raise ValueError("not a msgpack array")
    at, found = head[1], []
    for _ in range(head[0]):
        after = skip(blob, at, len(blob))
        found.append(blob[at:after])
        at = after
    return found


def split_frame(frame: bytes) -> tuple[list[bytes], bytes]:
    """(header positions as msgpack bytes, data) of a valid BATCH frame."""
    end = 5 + int.from_bytes(frame[1:5], "little")
    return entries(frame[5:end]), frame[end:]


def join_frame(cells: list[bytes], data: bytes) -> bytes:
    """The BATCH frame with these header positions and this data."""
    header = array(cells)
    return bytes((EGRESS_TAG_BATCH,)) + len(header).to_bytes(4, "little") + header + data


class _NoRoom(Exception):
    """This frame has no place for this lie."""


def _pad(cells: list[bytes], position: int) -> list[bytes]:
    return cells + [b"\x90"] * (position + 1 - len(cells))


def _choose(options: Sequence[T], pick: Pick) -> T:
    if not options:
        raise _NoRoom
    return options[pick(len(options))]


def _replace(cells: list[bytes], position: int, row: int, entry: bytes) -> list[bytes]:
    column = entries(cells[position])
    column[row] = entry
    return [*cells[:position], array(column), *cells[position + 1 :]]


_NOT_U32: Final = (
    b"\xc0",
    b"\xc2",
    b"\xff",
    b"\xa1x",
    b"\x90",
    b"\x91\x01",
    b"\xcf\0\0\0\x01\0\0\0\0",
    b"\xcb?\xf0\0\0\0\0\0\0",
    b"\xcf" + b"\xff" * 8,
    b"\xd3" + b"\xff" * 8,
)
_NOT_FOR: Final = {
    "u32": _NOT_U32,
    "u32?": _NOT_U32[1:],
    "f64": (b"\xc0", b"\x01", b"\xa1x", b"\xc3"),
    "f64?": (b"\x01", b"\xa1x", b"\xc3", b"\x90"),
    "bool": (b"\xc0", b"\x01", b"\xa1x"),
    "bool?": (b"\x01", b"\xa1x"),
    "str": (b"\xc0", b"\x01", b"\xa1\xff"),
    "str?": (b"\x01", b"\xa1\xff"),
}


def _lie_column_type(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    columns: list[Column] = [c for c in schema.egress.columns if c.position < len(cells) and c.position > 0]
    if pick(4) == 0:  # no array at all
        column = _choose(columns, pick)
        cells = list(cells)
        cells[column.position] = _choose([b"\xc0", b"\x05", b"\xa1x", b"\x80", b"\xc4\x00"], pick)
        return join_frame(cells, data)
    typed = [c for c in columns if c.type in _NOT_FOR and entries(cells[c.position])]
    column = _choose(typed, pick)
    row = pick(len(entries(cells[column.position])))
    return join_frame(_replace(cells, column.position, row, _choose(_NOT_FOR[column.type], pick)), data)


def _lie_column_length(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    columns = [c for c in schema.egress.columns if 0 < c.position < len(cells) and c.per == "request"]
    column = _choose(columns, pick)
    column_entries = entries(cells[column.position])
    required = column.position < schema.egress.required
    if column_entries and pick(2) and (required or len(column_entries) > 1):
        del column_entries[pick(len(column_entries))]
    elif column_entries:
        column_entries.append(column_entries[-1])
    else:
        filler = {"map?": b"\xc0", "bool": b"\xc2", "str": b"\xa0"}.get(
            column.type, b"\x00" if column.type == "u32" else b"\xc0"
        )
        n = len(entries(cells[0]))
        column_entries = [filler] * (n + 1 if pick(2) or n < 2 else n - 1)
    cells = list(cells)
    cells[column.position] = array(column_entries)
    return join_frame(cells, data)


def _lie_finish(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    rows = len(entries(cells[1]))
    if not rows:
        raise _NoRoom
    wrong = _choose([b"\x01", b"\xa4stop", b"\x90", b"\x91\x80", b"\xc3", b"\xc4\x01\x80", b"\xa0"], pick)
    return join_frame(_replace(cells, 1, pick(rows), wrong), data)


def _lie_rids(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    rows = len(entries(cells[0]))
    if not rows or pick(4) == 0:
        wrong = _choose([b"\xc0", b"\xa1a", b"\x80", b"\x05"], pick)
        return join_frame([wrong, *cells[1:]], data)
    wrong = _choose([b"\x01", b"\xc0", b"\xa2\xff\xfe", b"\xc4\x01a", b"\x91\xa1a", b"\xa3\xed\xa0\x80"], pick)
    return join_frame(_replace(cells, 0, pick(rows), wrong), data)


def _lie_ragged_sum(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    ragged = [(f.lens.position, f.poslens.position) for f in schema.egress.families if f.poslens is not None]
    lens, poslens = _choose(ragged, pick)
    cells = _pad(cells, poslens)
    positions = entries(cells[poslens])
    counts = _INTS.decode(cells[lens])
    if counts and pick(2):  # one row claims one position more
        counts[pick(len(counts))] += 1
        cells[lens] = _pack(counts)
    else:  # one position more than any row claims; empty, so the data is as long as before
        cells[poslens] = array([*positions, b"\x00"])
    return join_frame(cells, data)


def _lie_data_length(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    way = pick(3)
    counts = _INTS.decode(cells[3])
    if way == 0 and counts:
        row = pick(len(counts))
        counts[row] = _choose([counts[row] + 1, 2**32 - 1, 2**31], pick)
        return join_frame([*cells[:3], _pack(counts), *cells[4:]], data)
    if way == 1 and data:
        return join_frame(cells, data[: len(data) - 1 - pick(min(8, len(data)))])
    return join_frame(cells, data + bytes(1 + pick(8)))


def _lie_unknown_columns(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    known = len(schema.egress.columns)
    more = [_choose([b"\x90", b"\x91\x01", b"\xc0", b"\x80"], pick) for _ in range(1 + pick(3))]
    return join_frame(_pad(cells, known - 1) + more, data + bytes(4 * (1 + pick(3))))


def _lie_arity(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    return join_frame(cells[: pick(schema.egress.required)], data)


def _lie_header(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    header = array(cells)
    wrong = _choose(
        [
            header + b"\x00",
            header[:-1],
            b"\x80",
            b"",
            b"\xc1",
            b"\xa1x",
            array_start(len(cells) + 1) + header[len(array_start(len(cells))) :],
        ],
        pick,
    )
    return bytes((EGRESS_TAG_BATCH,)) + len(wrong).to_bytes(4, "little") + wrong + data


def _lie_header_length(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    frame = join_frame(cells, data)
    if pick(2):
        return frame[: 1 + pick(4)]
    more = len(frame) - 5 + 1 + pick(1 << 16)
    return frame[:1] + more.to_bytes(4, "little") + frame[5:]


def _lie_too_large(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    frame = join_frame(cells, data)
    more = _choose([schema.max_header_bytes + 1, 2**31, 2**32 - 1], pick)
    return frame[:1] + more.to_bytes(4, "little") + frame[5:]


def _lie_unknown_tag(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    return bytes((_choose([0, 4, 5, 0x7F, 0x92, 0xFF], pick),)) + join_frame(cells, data)[1:]


def _lie_empty(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    return b""


def _lie_result(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    bodies = [
        b"",
        b"\x90",
        b"\x91\xa1r",
        b"\x92\xa1r\x05",
        b"\x92\x05\xc4\x00",
        b"\x92\xa1r\xc0",
        b"\x92\xa1r\xc4\x02a",
        b"\x92\xa1\xff\xc4\x00",
        b"\x82\xa1r\xc4\x00\x01\x02",
        b"\x92\xa1r\xc4\x00\x00",
    ]
    return bytes((EGRESS_TAG_RESULT,)) + _choose(bodies, pick)


def _lie_error(cells: list[bytes], data: bytes, schema: WireSchema, pick: Pick) -> bytes:
    bodies = [
        b"",
        b"\x90",
        b"\x91\xa1r",
        b"\x92\xa1r\x05",
        b"\x92\x05\xa1m",
        b"\x92\xa1r\xc4\x01m",
        b"\x92\xa1r\xa1\xff",
        b"\x92\xa1r\xa2m",
        b"\xa1r",
    ]
    return bytes((EGRESS_TAG_ERROR,)) + _choose(bodies, pick)


LIES: Final[dict[str, Callable[[list[bytes], bytes, WireSchema, Pick], bytes]]] = {
    "arity": _lie_arity,
    "column_length": _lie_column_length,
    "column_type": _lie_column_type,
    "data_length": _lie_data_length,
    "empty": _lie_empty,
    "error": _lie_error,
    "finish_reason": _lie_finish,
    "header": _lie_header,
    "header_length": _lie_header_length,
    "ragged_sum": _lie_ragged_sum,
    "result": _lie_result,
    "rids": _lie_rids,
    "too_large": _lie_too_large,
    "unknown_columns": _lie_unknown_columns,
    "unknown_tag": _lie_unknown_tag,
}
"""Rule (a `FrameError.reason`) -> how to break it in a valid frame. ``buffer`` has no bytes, so no lie."""


def lie(frame: bytes, rule: str, schema: WireSchema, pick: Pick) -> bytes | None:
    """`frame` (a valid BATCH frame without unknown positions) with `rule` broken; None where it has no place for that lie."""
    cells, data = split_frame(frame)
    try:
        return LIES[rule](cells, data, schema, pick)
    except _NoRoom:
        return None
