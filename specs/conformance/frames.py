"""Frames and messages as a case writes them: rows, honest frames, and frames that lie in one place.

Owns: how a case's words become bytes, and how the scheduler's side reads what it receives. Rules it keeps: request ids inside are
opaque (a case names a client's *key*, and the kit puts in whatever rid the target gave that request); a lie changes one thing of an
honest frame, so that a rejection has one reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ...codec import ChunkEvent, IngressColumns, IngressMessage, WireSchema, decode_ingress, encode_batch
from ...codec.errors import HeadraceError
from ...codec.frame_walk import array_head, skip
from .protocol import KitError, TargetFault

LIES = ("columns", "append", "drop", "header_length", "header_hex", "data_append_hex", "data_cut", "cut_to")


def row_ids(row: Mapping[str, Any]) -> list[int]:
    """The ids of a row: `ids`, or the bytes of `text` (or of `hex`) for the byte-level tokenizer."""
    if "text" in row:
        return list(row["text"].encode("utf-8"))
    if "hex" in row:
        return list(bytes.fromhex(row["hex"]))
    return list(row.get("ids", ()))


def batch_frame(rows: list[Mapping[str, Any]], rids: Mapping[str, str], schema: WireSchema) -> bytes:
    """The honest BATCH frame of `rows`; ``{"to": key}`` is replaced by that request's rid, ``{"rid": …}`` stands as it is."""
    events = []
    for row in rows:
        extras = {
            name: np.array(
                [float("nan") if value is None else value for value in values],
                dtype="<f4" if name.endswith("_val") else "<i4" if name.endswith("_idx") else "<i8",
            )
            for name, values in row.get("extras", {}).items()
        }
        events.append(
            ChunkEvent(
                rid=row["rid"] if "rid" in row else _rid(row.get("to"), rids),
                token_ids=row_ids(row),
                finish_reason=row.get("finish"),
                prompt_tokens=row.get("prompt_tokens", 1),
                extras=extras,
                **row.get("scalars", {}),
            )
        )
    return encode_batch(events, schema)


def _rid(key: object, rids: Mapping[str, str]) -> str:
    if key not in rids:
        raise KitError(f"the case speaks of {key!r}, which the scheduler has not received")
    return rids[str(key)]


def with_lie(frame: bytes, lie: Mapping[str, Any], schema: WireSchema) -> bytes:
    """`frame` with one thing changed: see `LIES`.

    ``columns`` {name: value} replaces header cells; ``append`` [cells] adds trailing ones; ``drop`` n takes the last n away;
    ``header_length`` states another length; ``header_hex`` is another header; ``data_append_hex``, ``data_cut`` change the data's
    length; ``cut_to`` keeps so many bytes of the whole.
    """
    unknown = set(lie) - set(LIES)
    if unknown:
        raise KitError(f"unknown lie {sorted(unknown)}; known: {', '.join(LIES)}")
    size = int.from_bytes(frame[1:5], "little")
    header, data = frame[5 : 5 + size], frame[5 + size :]
    if lie.keys() & {"columns", "append", "drop"}:
        cells = _cells(header)
        if "append" in lie:  # a further column can only stand behind all those that are known
            cells += [msgspec.Raw(b"\x90")] * (len(schema.egress.columns) - len(cells))
        for name, value in lie.get("columns", {}).items():
            cells[schema.egress.by_name[name].position] = msgspec.Raw(msgspec.msgpack.encode(value))
        cells += [msgspec.Raw(msgspec.msgpack.encode(value)) for value in lie.get("append", ())]
        if "drop" in lie:
            del cells[len(cells) - lie["drop"] :]
        header = msgspec.msgpack.encode(cells)
    if "header_hex" in lie:
        header = bytes.fromhex(lie["header_hex"])
    if "data_append_hex" in lie:
        data += bytes.fromhex(lie["data_append_hex"])
    if "data_cut" in lie:
        data = data[: len(data) - lie["data_cut"]]
    whole: bytes = frame[:1] + lie.get("header_length", len(header)).to_bytes(4, "little") + header + data
    return whole[: lie.get("cut_to", len(whole))]


def _cells(header: bytes) -> list[msgspec.Raw]:
    head = array_head(header, 0, len(header))
    assert head is not None  # our own frame
    at, cells = head[1], []
    for _ in range(head[0]):
        after = skip(header, at, len(header))
        cells.append(msgspec.Raw(header[at:after]))
        at = after
    return cells


class Received:
    """One message of a drain as the scheduler's side reads it."""

    __slots__ = ("cells", "header", "message", "rid", "tag", "values")

    def __init__(self, raw: Mapping[str, Any], schema: WireSchema) -> None:
        self.header: bytes = raw["header"]
        self.cells = {name: np.frombuffer(cell, dtype="<i8").astype(np.int64) for name, cell in raw["cells"].items()}
        try:
            self.values: list[Any] = msgspec.msgpack.decode(self.header)
            self.tag, self.rid = str(self.values[0]), str(self.values[1])
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError):
            raise TargetFault("drain: a header that is not a msgpack array with a tag and a rid") from None
        ids = self.cells.get("input_ids", np.empty(0, dtype=np.int64))
        more = {name: cell for name, cell in self.cells.items() if name != "input_ids"}
        try:
            columns = IngressColumns.from_messages([IngressMessage(self.rid, self.header, ids, more)])
            self.message: Any = decode_ingress(columns, schema)[0]
        except (HeadraceError, ValueError) as fault:
            raise TargetFault(f"drain: a message that does not decode: {fault}") from None


def seen(message: Any) -> dict[str, Any]:
    """What a case can expect of a generate message, as JSON-able data."""
    told: dict[str, Any] = {}
    for name in (
        "text",
        "stream",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "return_hidden_states",
    ):
        told[name] = getattr(message, name, None)
    told["input_ids"] = message.input_ids.tolist()
    asked = message.token_ids_logprob
    told["token_ids_logprob"] = None if asked is None else asked.tolist()
    told["sampling"] = msgspec.to_builtins(message.sampling)
    told["fields"] = dict(message.fields)
    return told


def agrees(want: Any, got: Any) -> bool:
    """Whether `got` is what a case wants: equal, floats as 32 bit numbers, and an object may have keys that are not spoken of."""
    if isinstance(want, dict):
        return isinstance(got, dict) and all(key in got and agrees(value, got[key]) for key, value in want.items())
    if isinstance(want, list):
        return (
            isinstance(got, (list, tuple))
            and len(want) == len(got)
            and all(agrees(a, b) for a, b in zip(want, got, strict=True))
        )
    if isinstance(want, bool) or isinstance(got, bool) or want is None or got is None:
        return want is got
    if isinstance(want, float) or isinstance(got, float):
        return isinstance(want, (int, float)) and isinstance(got, (int, float)) and np.float32(want) == np.float32(got)
    return bool(want == got)
