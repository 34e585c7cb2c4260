"""The naive egress decoder: per request, element by element, slow and obvious. The oracle of the wire tests.

It shares no code with the codec but the schema: its msgpack reader is its own, it builds one dict per request, and it checks the
rules of the wire in the order in which the page lists them. Mutants are made by switching one of its rules off (`skip`).
"""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from headrace.codec import (
    BatchFrame,
    ControlResult,
    FinishReason,
    FrameError,
    RequestFailure,
    WireSchema,
    decode_frame,
    parse_finish_reason,
)


class Reject(Exception):
    """The naive decoder's refusal; `reason` is the name of the rule."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Item:
    """One msgpack value: kind, value (arrays: list of Items; maps: list of pairs), and its bytes."""

    kind: str
    value: Any
    raw: bytes


class _Bad(Exception):
    pass


def _take(data: bytes, at: int, n: int) -> bytes:
    if at + n > len(data):
        raise _Bad
    return data[at : at + n]


def read_item(data: bytes, at: int) -> tuple[Item, int]:
    """One msgpack value at `at`, and where it ends."""
    start = at
    b = _take(data, at, 1)[0]
    at += 1

    def sized(n: int, kind: str) -> tuple[Item, int]:
        return Item(kind, _take(data, at, n), data[start : at + n]), at + n

    def length(width: int) -> int:
        nonlocal at
        n = int.from_bytes(_take(data, at, width), "big")
        at += width
        return n

    def many(n: int, kind: str) -> tuple[Item, int]:
        nonlocal at
        found = []
        for _ in range(n if kind == "array" else 2 * n):
            item, at = read_item(data, at)
            found.append(item)
        return Item(kind, found, data[start:at]), at

    if b < 0x80 or b >= 0xE0:
        return Item("int", b if b < 0x80 else b - 256, data[start:at]), at
    if b < 0x90:
        return many(b & 15, "map")
    if b < 0xA0:
        return many(b & 15, "array")
    if b < 0xC0:
        return sized(b & 31, "str")
    if b == 0xC0:
        return Item("nil", None, data[start:at]), at
    if b in (0xC2, 0xC3):
        return Item("bool", b == 0xC3, data[start:at]), at
    for first, kind, widths in (
        ("c4", "bin", (1, 2, 4)),
        ("d9", "str", (1, 2, 4)),
        ("dc", "array", (2, 4)),
        ("de", "map", (2, 4)),
    ):
        code = int(first, 16)
        if code <= b < code + len(widths):
            n = length(widths[b - code])
            return many(n, kind) if kind in ("array", "map") else sized(n, kind)
    if 0xC7 <= b <= 0xC9:
        return sized(length((1, 2, 4)[b - 0xC7]) + 1, "ext")
    if 0xD4 <= b <= 0xD8:
        return sized((1 << (b - 0xD4)) + 1, "ext")
    numbers = {
        0xCA: ">f",
        0xCB: ">d",
        0xCC: ">B",
        0xCD: ">H",
        0xCE: ">I",
        0xCF: ">Q",
        0xD0: ">b",
        0xD1: ">h",
        0xD2: ">i",
        0xD3: ">q",
    }
    if b not in numbers:
        raise _Bad
    form = numbers[b]
    raw = _take(data, at, struct.calcsize(form))
    at += len(raw)
    return Item("float" if form in (">f", ">d") else "int", struct.unpack(form, raw)[0], data[start:at]), at


def _is_text(item: Item) -> bool:
    if item.kind != "str":
        return False
    try:
        item.value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _fits(item: Item, kind: str) -> bool:
    if item.kind == "nil":
        return kind.endswith("?")
    base = kind.rstrip("?")
    return {
        "u32": item.kind == "int" and 0 <= item.value < 2**32,
        "f64": item.kind == "float",
        "bool": item.kind == "bool",
        "str": _is_text(item),
        "opaque": True,
    }[base]


def naive_decode(frame: bytes, schema: WireSchema, skip: frozenset[str] | set[str] = frozenset()) -> Any:
    """What the frame says, as plain data: ("result", rid, payload), ("error", rid, message), or ("batch", [request, …]).

    Raises Reject. `skip`: names of rules not to check (a mutant); a mutant may raise anything or answer nonsense.
    """

    def check(rule: str, good: bool) -> None:
        if not good and rule not in skip:
            raise Reject(rule)

    check("empty", len(frame) > 0)
    if not frame:
        return ("batch", [])
    check("too_large", len(frame) <= schema.max_frame_bytes)
    tag = frame[0]
    if tag in (1, 3):
        rule = "result" if tag == 1 else "error"
        try:
            body, end = read_item(frame, 1)
        except _Bad:
            raise Reject(rule) from None
        if end != len(frame) or body.kind != "array" or len(body.value) < 2:
            raise Reject(rule)
        rid, value = body.value[:2]
        good = value.kind in ("bin", "str") if tag == 1 else _is_text(value)
        if not _is_text(rid) or not good:
            raise Reject(rule)
        return (rule, rid.value.decode(), value.value if tag == 1 else value.value.decode())
    check("unknown_tag", tag == 2)
    if len(frame) < 5:
        raise Reject("header_length")
    header_len = int.from_bytes(frame[1:5], "little")
    check("too_large", header_len <= schema.max_header_bytes)
    check("header_length", 5 + header_len <= len(frame))
    header_bytes, data = frame[5 : 5 + header_len], frame[5 + header_len :]
    if not header_bytes or not (0x90 <= header_bytes[0] < 0xA0 or header_bytes[0] in (0xDC, 0xDD)):
        raise Reject("header")
    try:
        header, end = read_item(header_bytes, 0)
    except _Bad:
        raise Reject("header") from None
    check("header", end == len(header_bytes))
    cells: list[Item] = header.value
    check("arity", len(cells) >= schema.egress.required)
    if cells[0].kind != "array":
        raise Reject("rids")
    check("rids", all(_is_text(item) for item in cells[0].value))
    rids = [item.value.decode("utf-8", "replace") if item.kind == "str" else None for item in cells[0].value]
    n = len(rids)

    columns: dict[str, list[Any]] = {}
    for column in schema.egress.columns[1:]:
        if column.position >= len(cells):
            columns[column.name] = []
            continue
        cell = cells[column.position]
        if cell.kind != "array":
            raise Reject("column_type")
        items: list[Item] = cell.value
        if column.per == "request" and not (
            len(items) == n or (not items and column.position >= schema.egress.required)
        ):
            check("column_length", False)
        if column.role == "finish_reasons":
            check("finish_reason", all(item.kind in ("nil", "map") for item in items))
            columns[column.name] = [None if item.kind == "nil" else item.raw for item in items]
        else:
            check("column_type", all(_fits(item, column.type) for item in items))
            columns[column.name] = [item.raw if column.type == "opaque?" else item.value for item in items]

    at = 0
    unknown = max(0, len(cells) - len(schema.egress.columns))

    def row(column: str, i: int) -> Any:
        values = columns[column]
        return values[i] if i < len(values) else 0

    def take(count: int, form: str) -> list[Any]:
        nonlocal at
        size = struct.calcsize("<" + form)
        check("unknown_columns" if unknown else "data_length", at + count * size <= len(data))
        end = min(at + count * size, len(data))
        found = [struct.unpack_from("<" + form, data, k)[0] for k in range(at, end - size + 1, size)]
        at += count * size
        return found

    requests: list[dict[str, Any]] = [
        {
            "rid": rids[i],
            "finish": columns["finish_reasons"][i] if i < len(columns["finish_reasons"]) else None,
            "prompt_tokens": row("prompt_tokens", i),
            "scalars": {c.name: columns[c.name][i] for c in schema.egress.scalars if i < len(columns[c.name])},
            "extras": {},
        }
        for i in range(n)
    ]
    total = sum(columns["tok_lens"])
    check("unknown_columns" if unknown else "data_length", total * 4 <= len(data))
    ids = take(total, "q" if schema.egress.id_type == "i64" else "i")
    start = 0
    for i, request in enumerate(requests):
        request["ids"] = ids[start : start + row("tok_lens", i)]
        start += row("tok_lens", i)
    for family in schema.egress.families:
        if family.poslens is not None:
            positions = columns[family.poslens.name]
            check("ragged_sum", sum(columns[family.lens.name]) == len(positions))
            total = sum(positions)
        else:
            total = sum(columns[family.lens.name])
        check("unknown_columns" if unknown else "data_length", total * 4 <= len(data))
        values = take(total, "I")  # the bits of the f32, so that NaN compares
        indices = take(total, "i") if family.indices is not None else None
        first = value = 0
        for i, request in enumerate(requests):
            count = row(family.lens.name, i)
            if not count:
                continue
            if family.poslens is not None:
                lens = columns[family.poslens.name][first : first + count]
                request["extras"][family.name + "_lens"] = lens
                first += count
                count = sum(lens)
            request["extras"][family.name + "_val"] = values[value : value + count]
            if indices is not None:
                request["extras"][family.name + "_idx"] = indices[value : value + count]
            value += count
    check("unknown_columns" if unknown else "data_length", at == len(data))
    return ("batch", requests)


def flatten(decoded: BatchFrame | ControlResult | RequestFailure) -> Any:
    """The codec's answer in the naive decoder's form."""
    if isinstance(decoded, ControlResult):
        return ("result", decoded.rid, decoded.payload)
    if isinstance(decoded, RequestFailure):
        return ("error", decoded.rid, decoded.message)
    opaque = {c.name for c in decoded.schema.egress.scalars if c.type == "opaque?"}
    requests = []
    for chunk in decoded:
        extras = {
            name: (values.view("<u4") if name.endswith("_val") else values).tolist()
            for name, values in chunk.extras.items()
        }
        requests.append(
            {
                "rid": chunk.rid,
                "ids": chunk.token_ids.tolist(),
                "finish": chunk.finish_reason and chunk.finish_reason.to_map(),
                "prompt_tokens": chunk.prompt_tokens,
                "scalars": {k: v for k, v in chunk.scalars.items() if k not in opaque},
                "extras": extras,
            }
        )
    return ("batch", requests)


def oracle(frame: bytes, schema: WireSchema, skip: frozenset[str] | set[str] = frozenset()) -> Any:
    """The naive decoder's answer in comparable form, or ("reject", reason)."""
    try:
        kind, *rest = naive_decode(frame, schema, skip)
    except Reject as fault:
        return ("reject", fault.reason)
    if kind != "batch":
        return (kind, *rest)
    opaque = {c.name for c in schema.egress.scalars if c.type == "opaque?"}
    for request in rest[0]:
        if request["finish"] is not None:
            request["finish"] = parse_finish_reason(request["finish"]).to_map()
        request["scalars"] = {k: v for k, v in request["scalars"].items() if k not in opaque}
    return (kind, rest[0])


def ours(frame: bytes, schema: WireSchema) -> Any:
    """The codec's answer in the same form."""
    try:
        return flatten(decode_frame(frame, schema))
    except FrameError as fault:
        return ("reject", fault.reason)


def same(left: Any, right: Any) -> bool:
    """Equality of two answers; a rejection equals any other. By repr of the leaves, so that NaN equals NaN and 1 is not True."""
    if left[0] == right[0] == "reject":
        return True
    return bool(_frozen(left) == _frozen(right))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {repr(k): _frozen(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_frozen(v) for v in value]
    return repr(value)


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes `call` had allocated at once; what it raises of the codec's own errors is dropped."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with contextlib.suppress(FrameError):
            call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def per_request_decode(frame: bytes, schema: WireSchema) -> list[dict[str, Any]]:
    """The decoder one would write first: a generic decode, then one object per request. Trusts the frame; for the benchmark."""
    end = 5 + int.from_bytes(frame[1:5], "little")
    header = msgspec.msgpack.decode(frame[5:end])
    header += [[] for _ in range(len(schema.egress.columns) - len(header))]
    ids = np.frombuffer(frame, schema.id_dtype, sum(header[3]), end)
    at, start, requests = end + ids.nbytes, 0, []
    for i, rid in enumerate(header[0]):
        count = header[3][i]
        requests.append(
            {
                "rid": rid,
                "ids": ids[start : start + count],
                "finish": header[1][i],
                "prompt_tokens": header[2][i],
                "extras": {},
                **{c.name: header[c.position][i] for c in schema.egress.scalars if header[c.position]},
            }
        )
        start += count
    for family in schema.egress.families:
        counts = header[family.lens.position]
        positions = None if family.poslens is None else header[family.poslens.position]
        total = sum(counts if positions is None else positions)
        vals = np.frombuffer(frame, "<f4", total, at)
        at += vals.nbytes
        idx = None if family.indices is None else np.frombuffer(frame, "<i4", total, at)
        at += 0 if idx is None else idx.nbytes
        first = value = 0
        for request, count in zip(requests, counts, strict=False):
            width = count
            if positions is not None:
                request["extras"][family.name + "_lens"] = positions[first : first + count]
                width = sum(positions[first : first + count])
                first += count
            request["extras"][family.name + "_val"] = vals[value : value + width]
            if idx is not None:
                request["extras"][family.name + "_idx"] = idx[value : value + width]
            value += width
    return requests


def batch_of(buffer: object, schema: WireSchema, **limits: Any) -> BatchFrame:
    """`decode_frame` where a BATCH frame is expected."""
    frame = decode_frame(buffer, schema, **limits)
    assert isinstance(frame, BatchFrame)
    return frame


def reason_of(frame: BatchFrame, row: int) -> FinishReason:
    """The finish reason of a row that has one."""
    reason = frame.finish_reasons[row]
    assert reason is not None
    return reason
