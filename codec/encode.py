"""Egress frames, scheduler side: from columns or chunks to bytes.

Owns: how a frame is written. Rules it keeps:

* Core columns are always there; optional ones are cut from the right when nothing in the frame uses them, and are present and
  empty when only a later one is used (both forms mean the same to a reader).
* A value that does not fit its column is an EncodeError here, never a wrapped integer on the wire.
* The columns are copied once, into the frame; nothing keeps a reference to the caller's buffers.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .chunk import ChunkEvent
from .errors import EncodeError, show
from .finish import FinishReason, finish_to_wire
from .schema import ELEMENT_TYPES, TAGS, Column, Family, WireSchema

EGRESS_TAG_RESULT: Final = TAGS["result"]
EGRESS_TAG_BATCH: Final = TAGS["batch"]
EGRESS_TAG_ERROR: Final = TAGS["error"]

_U32_MAX: Final = 2**32 - 1
_EMPTY: Final = msgspec.Raw(b"\x90")
Blob = bytes | bytearray | memoryview
ColumnData = Sequence[Any] | NDArray[Any] | msgspec.Raw  # a header column: [n], or its msgpack array ready-made


def pack(value: object, what: str) -> bytes:
    """msgpack bytes of `value`; EncodeError naming `what` for values that msgpack cannot hold."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as fault:
        raise EncodeError(f"{what} cannot be put on the wire: {show(str(fault))}") from None


def frame_egress_batch_cols(header: bytes, data_cols: Sequence[Blob | NDArray[Any]]) -> bytes:
    """A whole BATCH frame: tag, u32 length, `header` (msgpack), then the data columns back to back. Copies each column once."""
    if len(header) > _U32_MAX:
        raise EncodeError(f"a header of {len(header)} bytes does not fit its u32 length")
    parts: list[Any] = [bytes((EGRESS_TAG_BATCH,)), len(header).to_bytes(4, "little"), header, *data_cols]
    return b"".join(parts)


def frame_egress_result(rid: str, payload: bytes) -> bytes:
    """A RESULT frame: the answer to a control request, `payload` verbatim."""
    return bytes((EGRESS_TAG_RESULT,)) + pack([str(rid), payload], "a RESULT frame")


def frame_egress_error(rid: str, message: str) -> bytes:
    """An ERROR frame: terminal failure of one request; its client gets 400 with `message`."""
    return bytes((EGRESS_TAG_ERROR,)) + pack([str(rid), message], "an ERROR frame")


def _check_u32(column: Column, values: Sequence[Any] | NDArray[Any]) -> None:
    if isinstance(values, np.ndarray):
        good = values.dtype.kind in "iu" and (
            not len(values) or (int(values.min()) >= 0 and int(values.max()) <= _U32_MAX)
        )
    else:
        kinds = set(map(type, values))
        good = kinds <= ({int} if column.type == "u32" else {int, type(None)})
        if good:
            try:
                # array("I") refuses what is below 0 or above 32 bits.
                array("I", values if kinds <= {int} else [v for v in values if v is not None])
            except OverflowError:
                good = False
    if not good:
        raise EncodeError(f"{column.name} holds integers from 0 to {_U32_MAX}")


_SCALAR_TYPES: Final[Mapping[str, tuple[type, ...]]] = {"f64": (float, int), "bool": (bool,), "str": (str,)}


def _check_column(column: Column, values: Sequence[Any] | NDArray[Any], n: int) -> None:
    if column.per == "request" and len(values) not in (n, 0 if column.role not in _CORE else n):
        raise EncodeError(f"{column.name} has {len(values)} entries for {n} requests")
    base = column.type.rstrip("?")
    if base == "u32":
        _check_u32(column, values)
    elif base in _SCALAR_TYPES and not isinstance(values, np.ndarray):
        for value in values:
            if value is None and column.type.endswith("?"):
                continue
            if not isinstance(value, _SCALAR_TYPES[base]) or (base == "f64" and isinstance(value, bool)):
                raise EncodeError(f"{column.name} holds {column.type}, not {show(value)}")


_CORE: Final = frozenset({"rids", "finish_reasons", "prompt_tokens", "tok_lens"})


def _cell(column: Column, values: ColumnData) -> object:
    """The header position for `values`, ready for the encoder."""
    if isinstance(values, msgspec.Raw):
        return values
    if column.role == "finish_reasons":
        reasons: Sequence[Any] = values  # type: ignore[assignment]
        if isinstance(reasons, list) and reasons.count(None) == len(reasons):
            return reasons  # the common step: nobody ends
        return [finish_to_wire(v) for v in reasons]
    if column.role == "rids":
        return values if isinstance(values, list) else [str(v) for v in values]
    if column.type.rstrip("?") == "f64" and not isinstance(values, np.ndarray):
        return [None if v is None else float(v) for v in values]
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _data(values: Any, dtype: str, what: str) -> NDArray[Any]:
    """`values` as a contiguous little-endian array of `dtype`; EncodeError where one does not fit."""
    given = np.asarray(values)
    if given.dtype == np.dtype(dtype):
        return np.ascontiguousarray(given)
    if given.size == 0:
        return np.empty(0, dtype)
    if given.dtype.kind not in ("iu" if dtype != "<f4" else "iuf"):
        raise EncodeError(f"{what} must hold {dtype} values, not {given.dtype}")
    if dtype != "<f4":
        info = np.iinfo(dtype)
        if int(given.min()) < info.min or int(given.max()) > info.max:
            raise EncodeError(f"{what} has a value outside {info.min}..{info.max}")
    return np.ascontiguousarray(given.astype(dtype))


def _total(values: ColumnData) -> int | None:
    if isinstance(values, msgspec.Raw):
        return None  # pre-encoded: whoever made the blob answers for it, and the decoder checks
    return int(values.sum(dtype=np.int64)) if isinstance(values, np.ndarray) else sum(values)


def encode_batch_cols(
    schema: WireSchema,
    *,
    rids: Sequence[str] | msgspec.Raw,
    finish_reasons: Sequence[FinishReason | Mapping[Any, Any] | None] | msgspec.Raw,
    prompt_tokens: ColumnData,
    tok_lens: ColumnData,
    token_ids: NDArray[Any] | Sequence[int],
    **columns: ColumnData,
) -> tuple[bytes, list[memoryview]]:
    """(header, data columns) of a BATCH frame, from columns: what a scheduler calls each step.

    `tok_lens` [n] u32 ids of each request in this frame; `token_ids` [sum of tok_lens]. `columns` are named as in the schema:
    count columns (``out_lp_lens``, ``out_top_reqlens``, ``out_top_poslens``, …), scalars (``cached_tokens``, …; required
    ones default to zeros), and data (``out_lp_val`` f32, ``out_lp_idx`` i32, …). Any header column may be a `msgspec.Raw` of
    its msgpack array, so that an unchanged list of rids costs nothing. Raises EncodeError.
    """
    egress = schema.egress
    given: dict[str, ColumnData] = dict(columns)
    given.update(rids=rids, finish_reasons=finish_reasons, prompt_tokens=prompt_tokens, tok_lens=tok_lens)
    sized = next((v for v in (rids, finish_reasons, prompt_tokens, tok_lens) if not isinstance(v, msgspec.Raw)), None)
    n = len(sized) if sized is not None else -1
    cells: list[object] = []
    used = egress.required
    for column in egress.columns:
        values = given.pop(column.name, None)
        if values is None:
            cells.append(_EMPTY if column.position >= egress.required else [column.nil] * max(n, 0))
            continue
        if not isinstance(values, msgspec.Raw) and n >= 0:
            _check_column(column, values, n)
        cells.append(_cell(column, values))
        if isinstance(values, msgspec.Raw) or len(values):
            used = max(used, column.position + 1)
    cols = [_data(token_ids, schema.id_dtype, "token_ids")]
    _agree("token_ids", cols[0], _total(tok_lens))
    for family in egress.families:
        counts = columns.get(family.poslens.name if family.poslens is not None else family.lens.name, ())
        total = _total(counts)
        if family.poslens is not None:
            _agree_positions(family.lens, columns.get(family.lens.name, ()), counts)
        for suffix, dtype in (("_val", family.values), ("_idx", family.indices)):
            if dtype is not None:
                name = family.name + suffix
                cols.append(_data(given.pop(name, ()), ELEMENT_TYPES[dtype], name))
                _agree(name, cols[-1], total)
    if given:
        raise EncodeError(f"{schema.name} has no column {show(min(given))}")
    header = pack(cells[:used], "a BATCH header")
    return header, [c.data.cast("B") for c in cols if len(c)]


def _agree(name: str, data: NDArray[Any], total: int | None) -> None:
    if data.ndim != 1 or (total is not None and len(data) != total):
        raise EncodeError(f"{name} has shape {data.shape} where the header says ({total},)")


def _agree_positions(lens: Column, reqlens: ColumnData, poslens: ColumnData) -> None:
    total = _total(reqlens)
    if total is not None and not isinstance(poslens, msgspec.Raw) and total != len(poslens):
        raise EncodeError(f"{lens.name} sums to {total} where {len(poslens)} positions are given")


def _family_columns(events: Sequence[ChunkEvent], family: Family, columns: dict[str, Any]) -> None:
    """The count and data columns of one family, from the extras of all chunks."""
    name = family.name
    values = [
        _data(event.extras.get(name + "_val", ()), ELEMENT_TYPES[family.values], name + "_val") for event in events
    ]
    counts = [len(part) for part in values]
    columns[name + "_val"] = np.concatenate(values)
    if family.indices is not None:
        dtype = ELEMENT_TYPES[family.indices]
        indices = [_data(event.extras.get(name + "_idx", ()), dtype, name + "_idx") for event in events]
        if [len(part) for part in indices] != counts:
            raise EncodeError(f"{name}: each chunk needs as many indices as values")
        columns[name + "_idx"] = np.concatenate(indices)
    if family.poslens is None:
        columns[family.lens.name] = counts
        return
    lens = [np.asarray(event.extras.get(name + "_lens", ())).tolist() for event in events]
    if [sum(part) for part in lens] != counts:
        raise EncodeError(f"{name}_lens of a chunk does not sum to its number of values")
    columns[family.lens.name] = [len(part) for part in lens]
    columns[family.poslens.name] = [count for part in lens for count in part]


def _is_nil(value: Any, nil: Any) -> bool:
    """Whether a column need not be there for this entry. By type and value: an opaque ``False`` or ``0`` is an entry."""
    return value is None or (type(value) is type(nil) and bool(value == nil))


def encode_batch(events: Sequence[ChunkEvent], schema: WireSchema) -> bytes:
    """A whole BATCH frame (tag included) from chunks. Raises EncodeError for what `schema` cannot carry."""
    egress = schema.egress
    columns: dict[str, Any] = {}
    known = {c.name for c in egress.scalars}
    for event in events:
        for name, value in event.scalars.items():
            if name not in known and value not in (None, 0, False):
                raise EncodeError(f"{schema.name} has no column {show(name)}")
    for column in egress.scalars:
        values = [event.scalars.get(column.name, column.nil) for event in events]
        if column.position < egress.required or not all(_is_nil(v, column.nil) for v in values):
            columns[column.name] = values
    names = {k for event in events if event.extras for k in event.extras}
    for family in egress.families:
        mine = {family.name + "_val"}
        mine |= {family.name + "_idx"} if family.indices is not None else set()
        mine |= {family.name + "_lens"} if family.ragged else set()
        if names & mine:
            names -= mine
            _family_columns(events, family, columns)
    if names:
        raise EncodeError(f"{schema.name} has no extras called {show(min(names))}")
    dtype = np.dtype(schema.id_dtype)
    ids = [
        e.token_ids if e.token_ids.dtype == dtype else _data(e.token_ids, schema.id_dtype, "token_ids") for e in events
    ]
    header, cols = encode_batch_cols(
        schema,
        rids=[str(event.rid) for event in events],
        finish_reasons=[event.finish_reason for event in events],
        prompt_tokens=[event.prompt_tokens for event in events],
        tok_lens=[len(part) for part in ids],
        token_ids=np.concatenate(ids) if ids else np.empty(0, schema.id_dtype),
        **columns,
    )
    return frame_egress_batch_cols(header, cols)
