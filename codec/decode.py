"""Egress frames, manager side: from bytes to a `BatchFrame`, or one FrameError.

Owns: every rule of reading a frame. Rules it keeps (the page on the wire, "Decoding rules"):

* All or nothing. Whatever can be wrong is found here; a `BatchFrame` that exists never raises when indexed or iterated.
* Lengths are compared for equality. Longer is as wrong as shorter: the field's worst fault was a frame four bytes too long,
  accepted, with every later column read at an offset.
* A rejected frame still names its requests: the rids are read by a reader of their own, from the bytes, because the fault may
  sit anywhere in the header.
* No foreign exception and no outsized allocation. Columns are decoded one at a time and typed, so that a nested bomb is refused
  before it is built; one-byte integers stay one byte each; rids come last, when the transients of the numbers are gone.
* The work is the header's msgpack decode plus a fixed number of array operations; nothing is made per request.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .batch import BatchFrame, Packed, Part, running_sum, unpack
from .encode import EGRESS_TAG_BATCH, EGRESS_TAG_ERROR, EGRESS_TAG_RESULT
from .errors import FrameError, show
from .frame_walk import array_head, read_str, recover_rids, skip
from .schema import ELEMENT_TYPES, Column, WireSchema

_INT_LIST: Final = msgspec.msgpack.Decoder(list[int])
_STR_LIST: Final = msgspec.msgpack.Decoder(list[str])
_STR: Final = msgspec.msgpack.Decoder(str)
_ABSENT: Final = msgspec.Raw(b"\x90")
# What the library raises for bad bytes; nothing else is caught, so that a fault of ours is seen.
_BAD: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)
_MIN_RIDS_READ: Final = 16_384

REASONS: Final[dict[str, str]] = {
    "buffer": "what was given is not a readable buffer of bytes",
    "empty": "there is no byte at all",
    "unknown_tag": "the first byte is none of the tags",
    "too_large": "the frame or its header is larger than the limit",
    "header_length": "the frame ends before the header its length field announces",
    "header": "the header is not one msgpack array",
    "arity": "the header has fewer positions than the required core",
    "rids": "position 0 is not an array of UTF-8 strings",
    "column_type": "a column is not an array of its element type",
    "column_length": "a per-request column is neither empty (where that is allowed) nor exactly one entry per rid",
    "finish_reason": "a finish reason is neither a map nor nil",
    "ragged_sum": "a family's per-request counts do not sum to the length of its per-position column",
    "data_length": "the data is not exactly as long as the header says",
    "unknown_columns": "the header has positions the schema does not know, and the data length disagrees",
    "result": "a RESULT body is not [rid, payload]",
    "error": "an ERROR body is not [rid, message]",
}
"""Every value of `FrameError.reason`, with the rule it stands for."""


class ControlResult(NamedTuple):
    """A RESULT frame: the answer to one control request, `payload` verbatim."""

    rid: str
    payload: bytes


class RequestFailure(NamedTuple):
    """An ERROR frame: the scheduler could not read the request `rid`; its client gets 400."""

    rid: str
    message: str


class Broken(Exception):
    """A rule is broken; becomes a FrameError once the rids are recovered."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def flat_bytes(buffer: object) -> bytes | memoryview:
    """`buffer` as contiguous read-only bytes: itself or a view where possible, a copy where it is strided."""
    if type(buffer) is bytes:
        return buffer
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
        return view.cast("B").toreadonly() if view.c_contiguous else view.tobytes()
    except (TypeError, ValueError, BufferError, NotImplementedError) as fault:
        raise FrameError("buffer", f"{type(buffer).__name__}: {fault}", names_nobody=True) from None


class _Plan(NamedTuple):
    """What a schema means for decoding, worked out once: the header's decoder, and its columns by role."""

    split: Callable[[Any], Any]
    known: int
    required: int
    core_scalars: tuple[Column, ...]
    optional_scalars: tuple[Column, ...]
    families: tuple[tuple[str, Column, Column | None, str, str | None], ...]


@lru_cache(maxsize=16)
def _plan(schema: WireSchema) -> _Plan:
    egress = schema.egress
    # array_like: shorter arrays read with defaults, longer ones skip their tail without building it.
    fields = [(f"f{c.position}", msgspec.Raw, _ABSENT) for c in egress.columns]
    header = msgspec.defstruct("Header", fields, array_like=True)
    return _Plan(
        split=msgspec.msgpack.Decoder(header).decode,
        known=len(egress.columns),
        required=egress.required,
        core_scalars=tuple(c for c in egress.scalars if c.position < egress.required),
        optional_scalars=tuple(c for c in egress.scalars if c.position >= egress.required),
        families=tuple(
            (f.name, f.lens, f.poslens, ELEMENT_TYPES[f.values], f.indices and ELEMENT_TYPES[f.indices])
            for f in egress.families
        ),
    )


class RidCache:
    """The rids column of the last frame of one stream of frames, raw and decoded: a running batch seldom changes between two
    steps, and its rids are most of a plain header. Belongs to one consumer; holds one column of at most a header's size.
    """

    __slots__ = ("raw", "rids")

    def __init__(self) -> None:
        self.raw = b""
        self.rids: list[str] = []


def decode_frame(
    buffer: object,
    schema: WireSchema,
    *,
    max_frame_bytes: int | None = None,
    max_header_bytes: int | None = None,
    seen: RidCache | None = None,
) -> BatchFrame | ControlResult | RequestFailure:
    """One egress frame. `buffer`: anything with the buffer protocol, whole frame, tag included.

    Returns a `BatchFrame` whose arrays are views on `buffer` (copy what must outlive it), a `ControlResult` or a
    `RequestFailure`. Raises FrameError, and nothing else, whatever the bytes; `REASONS` lists its reasons. The limits
    default to the schema's. With `seen`, a rids column with the same bytes as the last one gives the same list object, which must
    then not be changed. Specification: `specs/wire/`, `docs/wire.md`.
    """
    data = flat_bytes(buffer)
    size = len(data)
    if not size:
        raise FrameError("empty", REASONS["empty"], names_nobody=True)
    tag = data[0]
    limit = schema.max_frame_bytes if max_frame_bytes is None else max_frame_bytes
    try:
        if size > limit:
            raise Broken("too_large", f"a frame of {size} bytes; the limit is {limit}")
        if tag == EGRESS_TAG_BATCH:
            return _batch(data, schema, schema.max_header_bytes if max_header_bytes is None else max_header_bytes, seen)
        if tag == EGRESS_TAG_RESULT:
            return _result(data)
        if tag == EGRESS_TAG_ERROR:
            return _error(data)
    except Broken as fault:
        rids, complete = named_requests(data)
        nobody = tag != EGRESS_TAG_BATCH and not rids
        raise FrameError(fault.reason, fault.message, rids=rids, rids_complete=complete, names_nobody=nobody) from None
    raise FrameError("unknown_tag", f"the first byte is {tag}; tags are 1, 2 and 3", names_nobody=True)


def named_requests(data: bytes | memoryview) -> tuple[list[str], bool]:
    """(the rids a frame names as far as they can be read, whether they are all)."""
    if data[0] == EGRESS_TAG_BATCH:
        # The header starts at byte 5 whatever its length field says. One rid per 6 bytes is denser than any real frame.
        return recover_rids(data, 5, len(data), max(_MIN_RIDS_READ, len(data) // 6))
    if data[0] in (EGRESS_TAG_RESULT, EGRESS_TAG_ERROR):
        head = array_head(data, 1, len(data))
        rid = read_str(data, head[1], len(data)) if head is not None and head[0] else None
        return ([rid], True) if rid is not None else ([], False)
    return [], False


class _Pair(msgspec.Struct, array_like=True):
    rid: msgspec.Raw
    body: msgspec.Raw


_PAIR: Final = msgspec.msgpack.Decoder(_Pair)


def _pair(data: bytes | memoryview, reason: str) -> tuple[str, bytes]:
    try:
        pair = _PAIR.decode(memoryview(data)[1:])
        return _STR.decode(pair.rid), bytes(pair.body)
    except _BAD as fault:
        raise Broken(reason, f"{REASONS[reason]}: {_words(fault)}") from None


def _result(data: bytes | memoryview) -> ControlResult:
    rid, body = _pair(data, "result")
    first = body[0]
    start = {0xC4: 2, 0xC5: 3, 0xC6: 5, 0xD9: 2, 0xDA: 3, 0xDB: 5}.get(first, 1 if 0xA0 <= first < 0xC0 else 0)
    if not start:
        raise Broken("result", f"{REASONS['result']}: the payload is neither bin nor str")
    return ControlResult(rid, body[start:])


def _error(data: bytes | memoryview) -> RequestFailure:
    rid, body = _pair(data, "error")
    try:
        return RequestFailure(rid, _STR.decode(body))
    except _BAD as fault:
        raise Broken("error", f"{REASONS['error']}: {_words(fault)}") from None


def _words(fault: BaseException) -> str:
    return "nested too deeply" if isinstance(fault, RecursionError) else show(str(fault)).strip("'\"")


def _cells(blob: bytes, column: Column, n: int, optional: bool) -> tuple[int, int]:
    """(entries, start of the first) of a column, its length checked against `n` (-1: any)."""
    first = blob[0]
    if 0x90 <= first < 0xA0:
        count, start = first - 0x90, 1
    elif first == 0xDC:
        count, start = blob[1] << 8 | blob[2], 3
    elif first == 0xDD:
        count, start = int.from_bytes(blob[1:5], "big"), 5
    else:
        raise Broken("column_type", f"position {column.position} ({column.name}) is not an array")
    if count != n and n >= 0 and (count or not optional):
        message = f"position {column.position} ({column.name}) has {count} entries for {n} requests"
        raise Broken("column_length", message)
    return count, start


def _numbers(raw: Any, column: Column, n: int, optional: bool) -> Packed:
    """A u32 column, packed: bytes where every entry is one byte, uint32 otherwise."""
    blob = bytes(raw)
    count, start = _cells(blob, column, n, optional)
    body = len(blob) - start
    if body == count:
        packed = blob[start:]
        if packed.isascii():  # one byte each and below 0x80: positive fixints, all of them
            return packed
    elif count and not body % count and (wide := _WIDE.get(body // count)) and blob[start] == wide[0]:
        # One width throughout (a column of prompt lengths is often that): read in place if every entry has the tag.
        cells = np.frombuffer(blob, wide[1], count, start)
        if cells["tag"].tobytes().count(wide[0]) == count:
            return cells["value"].astype(np.uint32)
    try:
        # array("I") refuses what is below 0 or above 32 bits, and costs less than half of np.fromiter.
        return np.frombuffer(array("I", _INT_LIST.decode(blob)), np.uint32)
    except _BAD as fault:
        message = f"position {column.position} ({column.name}) holds u32: {_words(fault)}"
        raise Broken("column_type", message) from None


_WIDE: Final[dict[int, tuple[int, np.dtype[Any]]]] = {
    2: (0xCC, np.dtype([("tag", "u1"), ("value", "u1")])),
    3: (0xCD, np.dtype([("tag", "u1"), ("value", ">u2")])),
    5: (0xCE, np.dtype([("tag", "u1"), ("value", ">u4")])),
}
assert array("I").itemsize == 4

# What an optional scalar column may hold, entry by entry. Possessive, so that matching keeps no state per entry. The values are
# decoded when asked for; a column that matches cannot fail then.
_UINT: Final = rb"[\x00-\x7f]|\xcc.|\xcd..|\xce....|\xcf\0\0\0\0....|\xd0[\x00-\x7f]|\xd1[\x00-\x7f].|\xd2[\x00-\x7f]...|\xd3\0\0\0\0...."
_ENTRY: Final = {"u32": _UINT, "f64": rb"\xca.{4}|\xcb.{8}", "bool": rb"[\xc2\xc3]"}
_SCALARS: Final = {
    base + nil: re.compile(rb"(?:" + entry + (rb"|\xc0" if nil else rb"") + rb")*+", re.DOTALL)
    for base, entry in _ENTRY.items()
    for nil in ("", "?")
}


def _scalar(raw: Any, column: Column, n: int, optional: bool) -> tuple[Packed, bool]:
    """A checked scalar column: (packed numbers, False), or (its whole msgpack array, True); empty when it has no entries."""
    if column.type == "u32":
        return _numbers(raw, column, n, optional), False
    blob = bytes(raw)
    count, start = _cells(blob, column, n, optional)
    if not count:
        return b"", False
    pattern = _SCALARS.get(column.type)
    if pattern is not None:
        good = pattern.fullmatch(blob, start) is not None
    elif column.type in ("str", "str?"):
        try:
            (_STR_LIST if column.type == "str" else _MAYBE_STR_LIST).decode(blob)
            good = True
        except _BAD:
            good = False
    else:
        good = True  # opaque: the split has walked it, so each entry is well-formed
    if not good:
        message = f"position {column.position} ({column.name}) has an entry that is not {column.type}"
        raise Broken("column_type", message)
    return blob, True


_MAYBE_STR_LIST: Final = msgspec.msgpack.Decoder(list[str | None])
_NOT_NIL: Final = re.compile(rb"[^\xc0]")
# A finish column of nils and maps of up to four scalars, as schedulers write them; the common strings stand first. What does not
# match (nested values, longer strings, lies) is walked entry by entry.
_TOKEN: Final = (
    rb"(?:[\x00-\x7f\xe0-\xff\xc0\xc2\xc3]|\xcc.|\xcd..|\xce....|\xa4....|\xa6.{6}|\xa7.{7}|"
    + b"|".join(bytes((0xA0 + n,)) + b".{%d}" % n for n in range(32) if n not in (4, 6, 7))
    + b")"
)
_FLAT_FINISH: Final = re.compile(
    rb"(?:\xc0++|" + b"|".join(bytes((0x80 + n,)) + _TOKEN + b"{%d}+" % (2 * n) for n in (2, 4, 1, 3)) + b")*+",
    re.DOTALL,
)


def _finish(raw: Any, column: Column, n: int) -> tuple[bytes, int]:
    """The finish column's bytes and where its entries start; (b"", 0) when all are nil."""
    blob = bytes(raw)
    at = _cells(blob, column, n, False)[1]
    end = len(blob)
    if blob.count(b"\xc0") == n == end - at:
        return b"", 0
    start = at
    if _FLAT_FINISH.fullmatch(blob, at) is not None:
        return blob, start
    while (hit := _NOT_NIL.search(blob, at)) is not None:
        at = hit.start()
        if not (0x80 <= blob[at] < 0x90 or blob[at] in (0xDE, 0xDF)):
            raise Broken(
                "finish_reason", f"position {column.position} ({column.name}): an entry is neither a map nor nil"
            )
        at = skip(blob, at, end)
    return blob, start


def _sum(values: Packed) -> int:
    # Below 2^24 entries of 32 bits: no overflow in 64.
    if not isinstance(values, bytes):
        return int(values.sum(dtype=np.int64))
    if not values:
        return 0
    if values.count(values[0]) == len(values):
        return values[0] * len(values)
    return sum(values) if len(values) < 512 else int(unpack(values).sum(dtype=np.int64))


def _batch(data: bytes | memoryview, schema: WireSchema, max_header: int, seen: RidCache | None) -> BatchFrame:
    size = len(data)
    if size < 5:
        raise Broken("header_length", f"a BATCH frame of {size} bytes has no header length")
    length = int.from_bytes(data[1:5], "little")
    if length > max_header:
        raise Broken("too_large", f"a header of {length} bytes; the limit is {max_header}")
    start = 5 + length
    if start > size:
        raise Broken("header_length", f"a header of {length} bytes where {size - 5} are left")
    plan = _plan(schema)
    view = memoryview(data)[5:start]
    outer = array_head(view, 0, length)
    if outer is None:
        raise Broken("header", f"{REASONS['header']}: it does not start with an array head")
    if outer[0] < plan.required:
        raise Broken("arity", f"{outer[0]} positions where {plan.required} are required")
    try:
        cells: tuple[Any, ...] = msgspec.structs.astuple(plan.split(view))
    except _BAD as fault:
        raise Broken("header", f"{REASONS['header']}: {_words(fault)}") from None
    unknown = max(0, outer[0] - plan.known)
    columns = schema.egress.columns

    first = memoryview(cells[0])
    head = array_head(first, 0, len(first))
    if head is None:
        raise Broken("rids", f"{REASONS['rids']}: it is not an array")
    n = head[0]
    finish = _finish(cells[1], columns[1], n)
    prompt_tokens = _numbers(cells[2], columns[2], n, False)
    lengths = _numbers(cells[3], columns[3], n, False)
    offsets = running_sum(lengths)
    scalars: dict[str, tuple[Packed, bool]] = {}
    for column in plan.core_scalars:
        scalars[column.name] = _scalar(cells[column.position], column, n, False)

    # The data columns, in order: (dtype, count). Python ints, so no sum can overflow.
    tokens = int(offsets[n])
    at = start + tokens * (8 if schema.id_dtype == "<i8" else 4)
    layout: list[tuple[str, Packed, Packed | None, int, str, str | None]] = []
    if outer[0] > plan.required:
        for name, lens, poslens, values, indices in plan.families:
            counts = _numbers(cells[lens.position], lens, n, True)
            positions = None
            total = _sum(counts)
            if poslens is not None:
                positions = _numbers(cells[poslens.position], poslens, -1, True)
                if total != len(positions):
                    raise Broken(
                        "ragged_sum",
                        f"position {lens.position} ({lens.name}) sums to {total}, "
                        f"position {poslens.position} ({poslens.name}) has {len(positions)} entries",
                    )
                if not total:
                    continue
                total = _sum(positions)
            elif not total:
                continue
            layout.append((name, counts, positions, total, values, indices))
            at += total * (4 if indices is None else 8)
        for column in plan.optional_scalars:
            values_of = _scalar(cells[column.position], column, n, True)
            if len(values_of[0]):
                scalars[column.name] = values_of
    if at != size:
        if unknown:
            raise Broken(
                "unknown_columns",
                f"the header has {outer[0]} positions, schema {schema.name} knows {plan.known}, and the data is "
                f"{size - start} bytes where the known ones account for {at - start}: a newer schema file is needed",
            )
        raise Broken("data_length", f"{size - start} bytes of data where the header says {at - start}")

    token_ids: NDArray[Any] = np.frombuffer(data, schema.id_dtype, tokens, start)
    at = start + token_ids.nbytes
    parts: dict[str, Part] = {}
    for name, counts, positions, total, values, indices in layout:
        vals: NDArray[Any] = np.frombuffer(data, values, total, at)
        at += vals.nbytes
        idx: NDArray[Any] | None = None
        if indices is not None:
            idx = np.frombuffer(data, indices, total, at)
            at += idx.nbytes
        parts[name] = Part(counts, positions, vals, idx)
    return BatchFrame(schema, _rids(cells[0], seen), token_ids, offsets, finish, prompt_tokens, scalars, parts, unknown)


def _rids(cell: msgspec.Raw, seen: RidCache | None) -> list[str]:
    raw = b"" if seen is None else bytes(cell)
    if seen is not None and raw == seen.raw:
        return seen.rids
    try:
        rids: list[str] = _STR_LIST.decode(cell)
    except _BAD as fault:
        raise Broken("rids", f"{REASONS['rids']}: {_words(fault)}") from None
    if seen is not None:
        seen.raw, seen.rids = raw, rids
    return rids
