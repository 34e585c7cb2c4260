"""Any frame or message in words, byte offsets included; a broken one with the broken rule and where.

Owns: the report behind `headrace inspect`. Rules it keeps:

* The verdict is `decode_frame`'s own, never a second opinion; this module only finds the place.
* Nothing is trusted and nothing is long: values are cut, at most `max_requests` requests and 16 entries of a column are shown.
* `describe` gives JSON-able data, `render` plain lines; colour and files belong to the command line.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from . import decode
from .batch import BatchFrame
from .errors import FrameError, show
from .finish import decode_plain
from .frame_walk import Malformed, array_head, skip, token
from .schema import ELEMENT_TYPES, Column, WireSchema

_TAGS: Final = {1: "RESULT", 2: "BATCH", 3: "ERROR"}
_SHOWN_ENTRIES: Final = 16
Report = dict[str, Any]


def describe(data: bytes, schema: WireSchema, *, max_requests: int = 32) -> Report:
    """What `data` is, as JSON-able data.

    Keys: ``schema``, ``size`` (bytes), ``kind`` (BATCH, RESULT, ERROR, INGRESS, empty, unknown), ``ok``, ``broken`` (None, or
    ``reason``, ``rule``, ``message``, ``at`` (byte offset), ``rids``, ``rids_complete``), ``parts`` (every piece in order:
    ``at``, ``size``, ``name``, ``value``), ``requests`` (BATCH: one per request), ``notes``.
    """
    data = bytes(data)
    report: Report = {
        "schema": schema.name,
        "size": len(data),
        "kind": _TAGS.get(data[0], "unknown") if data else "empty",
        "ok": True,
        "broken": None,
        "parts": [],
        "requests": [],
        "notes": [],
    }
    if data and (0x90 <= data[0] < 0xA0 or data[0] in (0xDC, 0xDD)):
        _ingress(data, schema, report)
        return report
    if data:
        _part(report, 0, 1, "tag", f"{data[0]} ({report['kind']})")
    if report["kind"] == "BATCH":
        _batch_parts(data, schema, report)
    elif report["kind"] in ("RESULT", "ERROR"):
        _cells(data, 1, len(data), report, ["rid", "payload" if data[0] == 1 else "message"])
    try:
        decoded = decode.decode_frame(data, schema)
    except FrameError as error:
        report["ok"] = False
        report["broken"] = {
            "reason": error.reason,
            "rule": decode.REASONS[error.reason],
            "message": error.message.removeprefix(f"{error.reason}: "),
            "at": _where(data, schema, error.reason),
            "rids": [show(rid) for rid in error.rids[:max_requests]],
            "rids_complete": error.rids_complete,
        }
        return report
    if isinstance(decoded, BatchFrame):
        _requests(decoded, report, max_requests)
    return report


def _part(report: Report, at: int, size: int, name: str, value: str) -> None:
    report["parts"].append({"at": at, "size": size, "name": name, "value": value})


def _value(raw: bytes, depth: int = 0) -> str:
    """One msgpack value in words. Nesting is shown four deep: a bomb must not become our own recursion."""
    head = array_head(raw, 0, len(raw))
    if head is None or head[0] == 0 or depth == 4:
        value = decode_plain(raw)
        return f"msgpack {show(raw[:40].hex())}" if isinstance(value, msgspec.Raw) else show(value)
    count, at = head
    words = []
    for _ in range(min(count, _SHOWN_ENTRIES)):
        after = skip(raw, at, len(raw))
        words.append(_value(raw[at:after], depth + 1))
        at = after
    text = ", ".join(words) + (", ..." if count > _SHOWN_ENTRIES else "")
    return f"[{text if len(text) <= 160 else text[:157] + '...'}]" + (f" ({count} entries)" if count > 4 else "")


def _cells(data: bytes, start: int, end: int, report: Report, names: list[str]) -> None:
    """The positions of the msgpack array at `start`, as far as they can be walked."""
    head = array_head(data, start, end)
    if head is None:
        _part(report, start, end - start, "header", "no array")
        return
    count, at = head
    _part(report, start, at - start, "array", f"{count} positions")
    for position in range(count):
        try:
            after = skip(data, at, end)
        except Malformed as fault:
            _part(
                report, at, end - at, names[position] if position < len(names) else f"position {position}", str(fault)
            )
            return
        name = names[position] if position < len(names) else f"unknown position {position}"
        _part(report, at, after - at, name, _value(data[at:after]))
        at = after
        if position > 256:
            report["notes"].append(f"{count - position - 1} further positions not shown")
            return
    if at != end:
        _part(report, at, end - at, "surplus", f"{end - at} bytes after the array")


def _batch_parts(data: bytes, schema: WireSchema, report: Report) -> None:
    if len(data) < 5:
        return
    length = int.from_bytes(data[1:5], "little")
    _part(report, 1, 4, "header length", str(length))
    end = min(5 + length, len(data))
    _cells(data, 5, end, report, [c.name for c in schema.egress.columns])
    try:
        frame = decode.decode_frame(data, schema)
    except FrameError:
        if end < len(data):
            _part(report, end, len(data) - end, "data", f"{len(data) - end} bytes")
        return
    if not isinstance(frame, BatchFrame):
        return
    at = end
    columns: list[tuple[str, str, int, Any]] = [("token_ids", schema.id_dtype, len(frame.token_ids), frame.token_ids)]
    for family in schema.egress.families:
        part = frame._parts.get(family.name)
        if part is not None:
            columns.append((family.name + "_val", ELEMENT_TYPES[family.values], len(part.values), part.values))
            if part.indices is not None:
                columns.append((family.name + "_idx", "<i4", len(part.indices), part.indices))
    for name, dtype, count, values in columns:
        size = count * int(dtype[2])
        shown = ", ".join(str(v) for v in values[:_SHOWN_ENTRIES].tolist()) + (
            ", ..." if count > _SHOWN_ENTRIES else ""
        )
        _part(report, at, size, f"data {name}", f"{count} x {dtype}: {shown}" if count else "none")
        at += size
    if frame.unknown_columns:
        report["notes"].append(
            f"{frame.unknown_columns} trailing positions that schema {schema.name} does not know, skipped"
        )


def _requests(frame: BatchFrame, report: Report, limit: int) -> None:
    for row in range(min(len(frame), limit)):
        chunk = frame[row]
        report["requests"].append(
            {
                "row": row,
                "rid": show(chunk.rid),
                "ids": chunk.token_ids[:_SHOWN_ENTRIES].tolist(),
                "id_count": len(chunk.token_ids),
                "finish_reason": None if chunk.finish_reason is None else show(chunk.finish_reason.to_json()),
                "prompt_tokens": chunk.prompt_tokens,
                "scalars": {name: show(value) for name, value in chunk.scalars.items()},
                "extras": {name: len(values) for name, values in chunk.extras.items()},
            }
        )
    if len(frame) > limit:
        report["notes"].append(f"{len(frame) - limit} further requests not shown")


def _ingress(data: bytes, schema: WireSchema, report: Report) -> None:
    """An ingress header: generate (by the schema's fields), abort, or another control request."""
    report["kind"] = "INGRESS"
    try:
        end = skip(data, 0, len(data))
        if end != len(data):
            raise Malformed(end, f"{len(data) - end} bytes after the array")
    except Malformed as fault:
        report["ok"] = False
        report["broken"] = {
            "reason": "header",
            "rule": "the header is one msgpack array",
            "message": str(fault),
            "at": fault.at,
            "rids": [],
            "rids_complete": False,
        }
    head = array_head(data, 0, len(data))
    tag = data[head[1] : head[1] + 40] if head is not None else b""
    fields = [f.name for f in schema.ingress_fields]
    if b"TokenizedGenerateReqInput" not in tag:
        fields = ["tag", "rid", "http_worker_ipc"] + (["abort_all"] if b"AbortReq" in tag else [])
        fields += [f"position {i}" for i in range(len(fields), 64)]
    _cells(data, 0, len(data), report, fields)
    for part in list(report["parts"]):
        if part["name"] == "sampling_params":
            at = report["parts"].index(part) + 1
            inner: Report = {"parts": [], "notes": []}
            _cells(data, part["at"], part["at"] + part["size"], inner, list(schema.sampling_slots))
            for found in inner["parts"]:
                found["name"] = f"sampling_params.{found['name']}"
            report["parts"][at:at] = inner["parts"]
            slots = array_head(data, part["at"], len(data))
            if slots is not None and slots[0] != len(schema.sampling_slots):
                report["notes"].append(
                    f"{slots[0]} sampling slots where schema {schema.name} has {len(schema.sampling_slots)}"
                )


def _where(data: bytes, schema: WireSchema, reason: str) -> int:
    """The byte offset that `reason` is about."""
    if reason in ("empty", "unknown_tag", "buffer"):
        return 0
    if reason in ("header_length", "too_large", "result", "error"):
        return 1 if len(data) > 1 else 0
    start = 5 + int.from_bytes(data[1:5], "little")
    if reason == "arity":
        return 5
    try:
        if reason == "header":
            end = skip(data, 5, start)
            return end if end < start else 5
        spans = _spans(data, start)
        if reason == "rids":
            return _bad_entry(data, spans[0], schema.egress.columns[0], reason, 1)
        if reason in ("data_length", "unknown_columns"):
            return start
        n = array_head(data, spans[0][0], start)
        rows = n[0] if n is not None else 0
        for column in schema.egress.columns[1 : len(spans)]:
            found = _check(
                data[slice(*spans[column.position])], column, rows, column.position >= schema.egress.required
            )
            if found == reason:
                return _bad_entry(data, spans[column.position], column, reason, rows)
        if reason == "ragged_sum":
            for family in schema.egress.families:
                if family.poslens is not None and family.poslens.position <= len(spans):
                    counts = _total(data, spans, family.lens)
                    positions = (
                        array_head(data, spans[family.poslens.position][0], start)
                        if family.poslens.position < len(spans)
                        else (0, 0)
                    )
                    if positions is not None and counts != positions[0]:
                        return spans[family.lens.position][0]
    except Malformed as fault:
        return fault.at
    return 5


def _total(data: bytes, spans: list[tuple[int, int]], column: Column) -> int:
    values: Any = decode_plain(data[slice(*spans[column.position])])
    return sum(values) if isinstance(values, list) else -1


def _spans(data: bytes, end: int) -> list[tuple[int, int]]:
    at, count = token(data, 5, end)
    spans = []
    for _ in range(min(count, 256)):
        after = skip(data, at, end)
        spans.append((at, after))
        at = after
    return spans


def _check(blob: bytes, column: Column, n: int, optional: bool) -> str | None:
    """The rule that this column alone breaks, by the decoder's own functions."""
    try:
        if column.role == "finish_reasons":
            decode._finish(blob, column, n)
        elif column.role == "scalar":
            decode._scalar(blob, column, n, optional)
        elif column.role != "rids":
            decode._numbers(blob, column, -1 if column.per == "position" else n, optional)
        elif array_head(blob, 0, len(blob)) is None:
            return "rids"
        else:
            decode._STR_LIST.decode(blob)
    except decode.Broken as fault:
        return fault.reason
    except decode._BAD:
        return "rids"
    return None


def _bad_entry(data: bytes, span: tuple[int, int], column: Column, reason: str, n: int) -> int:
    """The offset of the first entry that breaks `reason` by itself; the column's own where none does."""
    head = array_head(data, *span)
    if head is None or reason == "column_length":
        return span[0]
    at = head[1]
    for _ in range(head[0]):
        after = skip(data, at, span[1])
        if _check(b"\x91" + data[at:after], column, 1, False) == reason:
            return at
        at = after
    return span[0]


def render(report: Report) -> list[str]:
    """The report as plain lines: one per piece (offset, size, name, value), then the requests, then what is wrong."""
    lines = [f"{report['kind']}, {report['size']} bytes, schema {report['schema']}"]
    width = max((len(part["name"]) for part in report["parts"]), default=0)
    lines += [
        f"{part['at']:>8}  {part['size']:>7} B  {part['name']:<{width}}  {part['value']}" for part in report["parts"]
    ]
    for request in report["requests"]:
        more = "".join(f", {name} {value}" for name, value in request["scalars"].items())
        more += "".join(f", {name} [{count}]" for name, count in request["extras"].items())
        ids = ", ".join(map(str, request["ids"])) + (", ..." if request["id_count"] > len(request["ids"]) else "")
        state = "running" if request["finish_reason"] is None else f"finished {request['finish_reason']}"
        lines.append(
            f"request {request['row']}: rid {request['rid']}, {request['id_count']} ids [{ids}], {state}, "
            f"prompt_tokens {request['prompt_tokens']}{more}"
        )
    lines += [f"note: {note}" for note in report["notes"]]
    broken = report["broken"]
    if broken is None:
        lines.append("valid" if report["kind"] != "INGRESS" else "well-formed")
        return lines
    lines.append(f"broken at byte {broken['at']}: {broken['reason']}: {broken['message']}")
    lines.append(f"the rule: {broken['rule']}")
    if report["kind"] == "BATCH":
        named = ", ".join(broken["rids"]) or "nobody"
        lines.append(
            f"it names {named} ({'all of them' if broken['rids_complete'] else 'the list could not be read whole'})"
        )
    return lines
