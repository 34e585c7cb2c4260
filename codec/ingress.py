"""Ingress messages: generate, abort and control requests on their way to the scheduler, encoded, drained and read back.

Owns: the header of a message and the columns of a drain. Rules it keeps:

* Fields are identified by position, so the schema file alone decides what stands where; a header is always emitted whole, and
  the sampling array must have exactly the schema's arity when it is read. A longer header's unknown tail is skipped and
  counted, a shorter one is filled with the schema's defaults.
* Only a `NormalizedRequest` is encoded as a generate request.
* Reading is total: a header that cannot be read becomes a `BadMessage` with its rid where that can be found, and the cursor
  steps over its ids all the same, so it fails nobody else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from types import EllipsisType
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from .admission import Ids, NormalizedRequest
from .errors import EncodeError, ValidationError, show
from .sampling import NormalizedSamplingParams, SamplingParams
from .schema import WireSchema

GENERATE_TAG: Final = "TokenizedGenerateReqInput"
ABORT_TAG: Final = "AbortReq"
_NOT_CONTROL: Final = frozenset(
    {
        GENERATE_TAG,
        ABORT_TAG,
        "TokenizedEmbeddingReqInput",
        "BatchTokenizedGenerateReqInput",
        "BatchTokenizedEmbeddingReqInput",
    }
)
_NO_IDS: Final[Ids] = np.zeros(0, np.int64)
_NO_IDS.flags.writeable = False
_NO_CELLS: Final[dict[str, Ids]] = {}
_INT64: Final = _NO_IDS.dtype
_pack = msgspec.msgpack.encode


class IngressMessage(msgspec.Struct, frozen=True):
    """One message: the msgpack `header`, the prompt's `ids` (int64 [tokens]), and further `cells` by name (int64 each)."""

    rid: str
    header: bytes
    ids: Ids
    cells: dict[str, Ids] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of header, ids and cells."""
        size = len(self.header) + self.ids.nbytes
        return size + sum(cell.nbytes for cell in self.cells.values()) if self.cells else size


class IngressColumns:
    """One drain in columns: `headers` (list of bytes); all `ids` back to back (int64); `lengths` of each message's part (int64 [messages]).

    `cells` maps the name of a further cell to its own (ids, lengths). Columns of messages are put together when one of them is first
    looked at, so a drain costs nothing for each id, and whoever only asks how many came pays for nothing else.
    """

    __slots__ = ("_built", "_messages")

    def __init__(
        self,
        headers: list[bytes],
        ids: Ids,
        lengths: NDArray[np.int64],
        cells: dict[str, tuple[Ids, NDArray[np.int64]]],
    ) -> None:
        self._messages: list[IngressMessage] = []
        self._built: _Built | None = _Built(headers, ids, lengths, cells)

    @classmethod
    def from_messages(cls, messages: Sequence[IngressMessage]) -> IngressColumns:
        """The columns of `messages`, in order. The ids are copied once."""
        return cls.owning(list(messages))

    @classmethod
    def owning(cls, messages: list[IngressMessage]) -> IngressColumns:
        """`from_messages` of a list that nobody else will touch any more."""
        columns = _new(cls)
        columns._messages = messages
        columns._built = None
        return columns

    def _look(self) -> _Built:
        built = self._built
        if built is None:
            messages = self._messages
            # Set before the messages are let go, and looked at again after they were read: two readers at once both see all of it.
            built = self._built or _build(messages)
            self._built = built
            self._messages = []
        return built

    @property
    def headers(self) -> list[bytes]:
        return self._look().headers

    @property
    def ids(self) -> Ids:
        return self._look().ids

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._look().lengths

    @property
    def cells(self) -> dict[str, tuple[Ids, NDArray[np.int64]]]:
        return self._look().cells

    def __len__(self) -> int:
        messages = self._messages
        built = self._built
        return len(messages) if built is None else len(built.headers)

    def __repr__(self) -> str:
        return f"<IngressColumns: {len(self)} messages>"


_new = object.__new__


class _Built(NamedTuple):
    headers: list[bytes]
    ids: Ids
    lengths: NDArray[np.int64]
    cells: dict[str, tuple[Ids, NDArray[np.int64]]]


def _build(messages: Sequence[IngressMessage]) -> _Built:
    lengths = np.array([m.ids.size for m in messages], np.int64)
    ids = np.concatenate([m.ids for m in messages]) if messages else _NO_IDS
    cells: dict[str, tuple[Ids, NDArray[np.int64]]] = {}
    for name in {name for m in messages if m.cells for name in m.cells}:
        parts = [m.cells.get(name, _NO_IDS) for m in messages]
        cells[name] = np.concatenate(parts), np.array([part.size for part in parts], np.int64)
    return _Built([m.header for m in messages], ids, lengths, cells)


class GenerateMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A generate request as a scheduler reads it. `input_ids` is a view on the drain's ids (int64).

    `fields` holds the header fields that headrace does not own and that differ from their defaults; `unknown_fields` counts
    trailing positions that the schema does not know.
    """

    rid: str
    text: str | None
    input_ids: Ids
    sampling: NormalizedSamplingParams
    stream: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Ids | None
    return_hidden_states: bool
    fields: dict[str, Any]
    unknown_fields: int = 0


class AbortMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Stop the request `rid`, or every request with `abort_all`."""

    rid: str
    abort_all: bool


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Any other request: its tag, its rid (the RESULT frame's), and its own fields."""

    tag: str
    rid: str
    fields: tuple[Any, ...]


class BadMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that cannot be read; its `rid`, where one is found, gets an ERROR frame with `message`."""

    rid: str | None
    message: str


Message = GenerateMessage | AbortMessage | ControlMessage | BadMessage


# ---- what a schema means, worked out once ----------------------------------------------------------------------------


class _Plan(NamedTuple):
    schema: WireSchema
    blank: list[Any]
    """A header with every default."""
    at: dict[str, int]
    cell: bool
    """token_ids_logprob travels as a cell and not in the header."""
    read: Callable[[bytes], Any]
    """Typed decode of a whole generate header: a struct with one attribute per field name."""
    sampling: Callable[[Any], NormalizedSamplingParams]
    """The sampling array's struct as normalised parameters."""
    free: Callable[[Any], tuple[object, ...]]
    """The fields that headrace does not own, of a decoded header."""
    free_names: tuple[str, ...]
    free_defaults: tuple[object, ...]
    front: tuple[bytes, bytes, bytes]
    """Of a header with every default, encoded: what stands before the rid, between rid and text, between text and sampling."""
    tails: dict[tuple[object, ...], bytes]
    """What stands behind the sampling parameters, by `_flags`, for the usual ones; empty if the schema has another order."""


_TYPES: Final[dict[str, Any]] = {
    "nil": None,
    "str": str,
    "bool": bool,
    "int": int,
    "float": float,
    "ints": list[int],
    "any": Any,
}
_NORMAL: Final = NormalizedSamplingParams.__struct_fields__
_DEFAULTS: Final = msgspec.structs.asdict(SamplingParams().normalize(vocab_size=1))
_SLOT_TYPES: Final[dict[str, Any]] = {
    **{name: kind for name, kind in get_type_hints(NormalizedSamplingParams).items() if name in _NORMAL},
    "stop": None,
    "stop_regex": None,
    "is_normalized": bool,
    "watermark": Any,
    "ebnf_full_assistant": bool,
}
_plans: Final[dict[int, _Plan]] = {}


def _plan(schema: WireSchema) -> _Plan:
    plan = _plans.get(id(schema))  # hashing a schema by content would cost more than an encode
    if plan is None or plan.schema is not schema:
        if len(_plans) >= 64:
            _plans.clear()
        plan = _plans[id(schema)] = _make_plan(schema)
    return plan


def _make_plan(schema: WireSchema) -> _Plan:
    slots = msgspec.defstruct(
        "SamplingSlots",
        [(slot, _SLOT_TYPES.get(slot, Any)) for slot in schema.sampling_slots],
        array_like=True,
        forbid_unknown_fields=True,  # a longer array is an error, never a value read from another field's slot
    )
    fields: list[Any] = []
    optional = False
    for field in schema.ingress_fields:
        kind = slots if field.type == "sampling" else _TYPES[field.type.removesuffix("?")]
        if field.type.endswith("?"):
            kind = kind | None
        fields.append((field.name, kind, field.default) if optional else (field.name, kind))
        optional = optional or field.type == "sampling"  # what stands behind it has a default a receiver can use
    free = [field for field in schema.ingress_fields if not field.owned]
    known = [slot for slot in schema.sampling_slots if slot in _NORMAL]
    get = attrgetter(*known)
    rest = {name: value for name, value in _DEFAULTS.items() if name not in known}

    def sampling(array: Any) -> NormalizedSamplingParams:
        return NormalizedSamplingParams(**dict(zip(known, get(array), strict=True)), **rest)

    front, tails = _pieces(schema)
    return _Plan(
        schema=schema,
        blank=[field.default for field in schema.ingress_fields],
        at={field.name: field.position for field in schema.ingress_fields},
        cell="token_ids_logprob" in schema.cells,
        read=msgspec.msgpack.Decoder(msgspec.defstruct("GenerateHeader", fields, array_like=True)).decode,
        sampling=sampling,
        free=attrgetter("rid", *(field.name for field in free)),
        free_names=tuple(field.name for field in free),
        free_defaults=tuple(field.default for field in free),
        front=front,
        tails=tails,
    )


_FLAGS: Final = ("stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_hidden_states")
_flags: Final = attrgetter(*_FLAGS)


def _pieces(schema: WireSchema) -> tuple[tuple[bytes, bytes, bytes], dict[tuple[object, ...], bytes]]:
    """`_Plan.front` and `_Plan.tails`."""
    blank = [field.default for field in schema.ingress_fields]
    at = {field.name: field.position for field in schema.ingress_fields}
    rid, text, sampling = at["rid"], at["input_text"], at["sampling_params"]
    if not rid < text < sampling < min(at[name] for name in _FLAGS):
        return (b"", b"", b""), {}

    def run(start: int, end: int) -> bytes:
        return b"".join(map(_pack, blank[start:end]))

    tails = {}
    for stream in (False, True):
        blank[at["stream"]] = stream
        tails[tuple(blank[at[name]] for name in _FLAGS)] = run(sampling + 1, len(blank))
    # an array's own first bytes, without its elements
    front = _pack([None] * len(blank))[: -len(blank)] + run(0, rid)
    return (front, run(rid + 1, text), run(text + 1, sampling)), tails


# ---- encoding --------------------------------------------------------------------------------------------------------


def encode_generate(
    schema: WireSchema,
    request: NormalizedRequest,
    input_ids: Ids | Sequence[int],
    max_new_tokens: int | EllipsisType | None = ...,
) -> IngressMessage:
    """The message of an admitted request with its prompt's `input_ids` (int64 [tokens], kept, not copied).

    `max_new_tokens` is what `fit_length` allows, where that differs from what was asked. TypeError for a request that did not
    pass `admit`: nothing else can reach the ring. See ``specs/wire/*.toml``, section ``ingress``.
    """
    if type(request) is not NormalizedRequest:
        raise TypeError(f"only a NormalizedRequest can be encoded, not {show(request)}")
    plan = _plan(schema)
    rid = str(request.rid)
    ids = input_ids
    if type(ids) is not np.ndarray or ids.dtype is not _INT64 or not ids.flags.c_contiguous:
        ids = np.ascontiguousarray(ids, np.int64)
    form, sampling, slots, tail = request.form, request.sampling, None, None
    if form is not None and form.sampling is sampling and form.schema is schema:
        slots = form.slots
    usual = slots is not None and request.token_ids_logprob is None and not request.wire_fields
    if usual and (max_new_tokens is ... or max_new_tokens == sampling.max_new_tokens):
        tail = plan.tails.get(_flags(request))
    if slots is not None and tail is not None:
        # What most requests look like: everything between rid, text and sampling parameters is as always.
        front, between, before = plan.front
        try:
            header = b"".join((front, _pack(rid), between, _pack(request.text), before, slots, tail))
        except _UNFIT as fault:
            raise _unfit(fault, request.rid.client_facing) from None
        return IngressMessage(rid, header, ids)
    shown = request.rid.client_facing
    at = plan.at
    fields = plan.blank.copy()
    values = sampling.to_wire(schema)
    if max_new_tokens is not ...:
        values[schema.sampling_slots.index("max_new_tokens")] = max_new_tokens
    fields[at["rid"]] = rid
    fields[at["input_text"]] = request.text
    fields[at["sampling_params"]] = values
    fields[at["return_logprob"]] = request.return_logprob
    fields[at["logprob_start_len"]] = request.logprob_start_len
    fields[at["top_logprobs_num"]] = request.top_logprobs_num
    fields[at["stream"]] = request.stream
    fields[at["return_hidden_states"]] = request.return_hidden_states
    for name, value in request.wire_fields.items():
        if name not in at:
            raise EncodeError(f"wire {schema.name} has no field {show(name)}", rid=shown)
        fields[at[name]] = value
    cells = _NO_CELLS
    if request.token_ids_logprob is not None:
        if plan.cell:
            cells = {"token_ids_logprob": np.array(request.token_ids_logprob, np.int64)}
        else:
            fields[at["token_ids_logprob"]] = request.token_ids_logprob
    return IngressMessage(rid, _encoded(fields, shown), ids, cells)


def encode_abort(schema: WireSchema, rid: str | None, abort_all: bool = False) -> IngressMessage:
    """The message that stops the request with this internal rid, or every request."""
    rid = "" if rid is None else str(rid)
    return IngressMessage(rid, _encoded([ABORT_TAG, rid, None, abort_all, None, None], None), _NO_IDS, _NO_CELLS)


def encode_control(schema: WireSchema, tag: str, rid: str, *fields: object) -> IngressMessage:
    """A control request: tag, rid (its RESULT frame's), nil, then its own fields.

    ValidationError for the tag of a generate, embedding or abort request, EncodeError for fields that msgpack cannot hold.
    """
    if not isinstance(tag, str) or not tag or tag in _NOT_CONTROL:
        raise ValidationError(f"{show(tag)} is not the tag of a control request", field="tag")
    return IngressMessage(str(rid), _encoded([tag, str(rid), None, *fields], None), _NO_IDS, _NO_CELLS)


_UNFIT: Final = (TypeError, ValueError, OverflowError, RecursionError)  # UnicodeError is a ValueError


def _encoded(value: Any, rid: str | None) -> bytes:
    try:
        return _pack(value)
    except _UNFIT as fault:
        raise _unfit(fault, rid) from None


def _unfit(fault: Exception, rid: str | None) -> EncodeError:
    return EncodeError(f"the request cannot be put on the wire: {show(str(fault))}", rid=rid)


# ---- decoding --------------------------------------------------------------------------------------------------------


def decode_ingress(columns: IngressColumns, schema: WireSchema) -> list[Message]:
    """The messages of a drain, in order, one for each header whatever it holds.

    ValueError if the columns disagree (a length per header, lengths that add up to the ids): that is the caller's mistake.
    """
    plan = _plan(schema)
    starts, lengths = _cursor("ids", columns.ids, columns.lengths, len(columns.headers))
    asked: tuple[list[int], list[int], Ids] | None = None
    if plan.cell and "token_ids_logprob" in columns.cells:
        cell, cell_lengths = columns.cells["token_ids_logprob"]
        asked = (*_cursor("token_ids_logprob", cell, cell_lengths, len(columns.headers)), cell)
    messages: list[Message] = []
    for at, header in enumerate(columns.headers):
        start = starts[at]
        ids = columns.ids[start : start + lengths[at]]
        extra = None
        if asked is not None and asked[1][at]:
            extra = asked[2][asked[0][at] : asked[0][at] + asked[1][at]]
        messages.append(_decode_one(header, ids, extra, plan))
    return messages


def _cursor(name: str, ids: Ids, lengths: NDArray[np.int64], n: int) -> tuple[list[int], list[int]]:
    """Start and length of each message's part. Sums are taken over Python ints, which do not wrap."""
    parts: list[int] = lengths.tolist()
    if len(parts) != n or min(parts, default=0) < 0 or sum(parts) != len(ids):
        raise ValueError(f"the columns disagree: {n} headers, {len(parts)} lengths of {name}, {len(ids)} {name}")
    starts = list(accumulate(parts, initial=0))
    return starts, parts


def _decode_one(header: bytes, ids: Ids, asked: Ids | None, plan: _Plan) -> Message:
    count, tag, rid = read_front(header)
    if tag == GENERATE_TAG:
        try:
            values = plan.read(header)
            if values.sampling_params.is_normalized is not True:
                return _bad(rid, "sampling_params.is_normalized must be true")
            sampling = plan.sampling(values.sampling_params)
        except (
            Exception
        ) as fault:  # any bytes may stand here; whatever the library raises for them is this message's alone
            return _bad(rid, _name_place(str(fault), plan.schema))
        if asked is None and values.token_ids_logprob:
            try:
                asked = np.array(values.token_ids_logprob, np.int64)
            except OverflowError:
                return _bad(rid, "token_ids_logprob holds an id beyond 64 bits")
        _, *free = plan.free(values)
        fields: dict[str, Any] = {}
        if tuple(free) != plan.free_defaults:
            pairs = zip(plan.free_names, free, plan.free_defaults, strict=True)
            fields = {name: value for name, value, usual in pairs if value != usual}
        return GenerateMessage(
            rid=values.rid,
            text=values.input_text,
            input_ids=ids,
            sampling=sampling,
            stream=values.stream,
            return_logprob=values.return_logprob,
            logprob_start_len=values.logprob_start_len,
            top_logprobs_num=values.top_logprobs_num,
            token_ids_logprob=asked,
            return_hidden_states=values.return_hidden_states,
            fields=fields,
            unknown_fields=max(0, (count or 0) - len(plan.blank)),
        )
    if tag is None:
        return _bad(rid, "the header is not an array that starts with a tag")
    if rid is None:
        return _bad(None, "position 1 (rid) is not a string")
    try:
        values = msgspec.msgpack.decode(header)
    except Exception as fault:  # as above
        return _bad(rid, str(fault))
    if tag == ABORT_TAG:
        abort_all = values[3] if len(values) > 3 else False
        if not isinstance(abort_all, bool):
            return _bad(rid, f"position 3 (abort_all) must be bool, not {show(abort_all)}")
        return AbortMessage(rid=rid, abort_all=abort_all)
    if tag in _NOT_CONTROL:
        return _bad(rid, f"{tag} is not supported")
    return ControlMessage(tag=tag, rid=rid, fields=tuple(values[3:]))


def _bad(rid: str | None, why: str) -> BadMessage:
    return BadMessage(rid=rid, message=f"the request's header cannot be read: {why[:300]}")


_PLACE: Final = re.compile(r"\$\[(\d+)\](?:\[(\d+)\])?")


def _name_place(fault: str, schema: WireSchema) -> str:
    """The library's message with the position it names in words: ``at `$[8][4]` `` is sampling_params.temperature."""
    found = _PLACE.search(fault)
    if found is None:
        return fault
    at, slot = int(found[1]), found[2]
    name = schema.ingress_fields[at].name if at < len(schema.ingress_fields) else "unknown"
    if slot is not None and schema.ingress_fields[at].type == "sampling" and int(slot) < len(schema.sampling_slots):
        name += "." + schema.sampling_slots[int(slot)]
    return f"{fault} ({name})"


def read_front(header: bytes) -> tuple[int | None, str | None, str | None]:
    """Number of positions, tag and rid of a header, each None where it cannot be read; never raises.

    Only the bytes of the first two positions are looked at, so a fault behind them cannot hide the rid.
    """
    first = header[0] if header else 0xC1
    if 0x90 <= first <= 0x9F:
        count, at = first & 0x0F, 1
    elif first in (0xDC, 0xDD):
        at = 3 if first == 0xDC else 5
        if len(header) < at:
            return None, None, None
        count = int.from_bytes(header[1:at], "big")
    else:
        return None, None, None
    tag, at = _read_str(header, at) if count > 0 else (None, -1)
    rid = _read_str(header, at)[0] if count > 1 and at >= 0 else None
    return count, tag, rid


def _read_str(data: bytes, at: int) -> tuple[str | None, int]:
    """The string at `at` and the offset behind it; (None, offset or -1) if there is none."""
    if at >= len(data):
        return None, -1
    head = data[at]
    at += 1
    if 0xA0 <= head <= 0xBF:
        size = head & 0x1F
    elif 0xD9 <= head <= 0xDB:
        width = 1 << head - 0xD9
        if at + width > len(data):
            return None, -1
        size = int.from_bytes(data[at : at + width], "big")
        at += width
    else:
        return None, at if head <= 0x7F or head >= 0xE0 or head in (0xC0, 0xC2, 0xC3) else -1
    if at + size > len(data):
        return None, -1
    try:
        return data[at : at + size].decode("utf-8"), at + size
    except UnicodeDecodeError:
        return None, at + size
