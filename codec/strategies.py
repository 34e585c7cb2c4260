"""Hypothesis strategies for everything on the wire: valid, lying and hostile.

Owns: how random messages are drawn. For tests of headrace and for anybody who owns a decoder of these frames:

    from hypothesis import given
    from headrace.codec import load_schema, strategies

    @given(strategies.one_lie_frames(load_schema("v1")))
    def test_my_decoder_rejects_lies(case):
        frame, rule = case
        assert my_decoder_rejects(frame), rule

Shapes lean to the small and the edges (no request, one, empty deltas, 127/128, 2^16, 2^32 - 1), because a wire fault needs an
edge and not a long list.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

try:
    from hypothesis import strategies as st
except ImportError:
    raise ImportError("headrace.codec.strategies needs Hypothesis: pip install 'headrace[testing]'") from None

import msgspec
import numpy as np

from .chunk import ChunkEvent
from .encode import encode_batch
from .finish import FinishReason, Unknown, parse_finish_reason
from .lies import LIES, array, array_start, entries, join_frame, lie, split_frame
from .schema import WireSchema
from .strategies_ingress import client_rids as client_rids
from .strategies_ingress import generate_requests as generate_requests
from .strategies_ingress import hostile_columns as hostile_columns
from .strategies_ingress import hostile_headers as hostile_headers
from .strategies_ingress import ingress_messages as ingress_messages
from .strategies_ingress import normalized_requests as normalized_requests
from .strategies_ingress import rids as rids
from .strategies_ingress import sampling_fields as sampling_fields
from .strategies_ingress import sampling_params as sampling_params
from .strategies_ingress import wild_bodies as wild_bodies
from .strategies_ingress import wild_sampling_fields as wild_sampling_fields

_text = st.text(st.characters(codec="utf-8"), max_size=12)
_edges = st.sampled_from([0, 1, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1])
_u32 = st.one_of(st.integers(0, 300), _edges)
_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), _text, st.binary(max_size=8)
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3), max_leaves=8
)

# Well-formed msgpack maps that no Python dict can hold without loss.
LOSSY_MAPS = (
    b"\x82\xa1a\x01\xa1a\x02",  # one key twice
    b"\x81\x91\x01\x02",  # an array as a key
    b"\x81\x81\x01\x02\x03",  # a map as a key
    b"\x82\x01\xa1a\xc3\xa1b",  # 1 and true are one key to Python
    b"\x81\xa1t\xd4\x05\x01",  # extension type
    b"\x81\xa1t\xd6\xff\x00\x00\x00\x01",  # timestamp
    b"\x81\xa1t\xc7\x0c\xff" + b"\xff" * 12,  # timestamp out of range
    b"\x81\xa4type\xa1\xff",  # text that is not UTF-8
    b"\x82\xa4type\xa4stop\xa4type\xa4stop",
    b"\x81\xa1d" + b"\x91" * 70 + b"\xc0",  # deep
)


@lru_cache(maxsize=1)
def finish_maps() -> st.SearchStrategy[dict[Any, Any]]:
    """Finish reason maps: known ones old and new, with nils, extra keys and fields of unexpected types, and unknown ones."""
    ints = st.integers(-(2**31), 2**32)
    stop = st.fixed_dictionaries(
        {"type": st.just("stop")}, optional={"matched": st.one_of(st.none(), ints, _text, st.lists(ints, max_size=3))}
    )
    length = st.fixed_dictionaries({"type": st.just("length"), "length": st.integers(0, 2**32)})
    abort = st.fixed_dictionaries(
        {"type": st.just("abort")},
        optional={
            "message": st.none() | _text,
            "status_code": st.none() | st.integers(0, 999),
            "err_type": st.none() | _text,
        },
    )
    known = st.one_of(stop, length, abort)
    extra = st.dictionaries(_text.filter(lambda k: k != "type"), _values, max_size=2)
    wrong = st.fixed_dictionaries(
        {"type": st.sampled_from(["stop", "length", "abort"])},
        optional=dict.fromkeys(("matched", "length", "message", "status_code", "err_type"), _values),
    )
    return st.one_of(
        known,
        st.builds(lambda a, b: {**b, **a}, known, extra),
        wrong,
        st.fixed_dictionaries(
            {"type": st.sampled_from(["tool_calls", "", "STOP"]) | _values}, optional={"name": _values}
        ),
        st.dictionaries(_text | st.integers(-5, 5) | st.booleans() | st.none(), _values, max_size=3),
    )


@lru_cache(maxsize=1)
def finish_reasons() -> st.SearchStrategy[FinishReason]:
    """Finish reasons: every class, among them raw ones that no Python dict can hold."""
    return st.one_of(finish_maps().map(parse_finish_reason), st.sampled_from(LOSSY_MAPS).map(Unknown))


@lru_cache(maxsize=1)
def _rids() -> st.SearchStrategy[str]:
    return st.one_of(
        st.uuids().map(lambda u: u.hex), _text, st.sampled_from(["a", "b", "r#1", "\u0100", "\U0001f600" * 4])
    )


# Building a strategy costs more than drawing from it, so those that are needed again and again are kept.
@lru_cache(maxsize=256)
def _below(n: int) -> st.SearchStrategy[int]:
    return st.integers(0, n - 1)


_ELEMENTS = {
    "<f4": st.floats(width=32),
    "<i4": st.integers(-(2**31), 2**31 - 1) | st.integers(0, 50_000),
    "<i8": st.integers(-(2**63), 2**63 - 1) | st.integers(0, 50_000),
    "lens": st.integers(0, 3),
}


@lru_cache(maxsize=256)
def _array(kind: str, size: int) -> st.SearchStrategy[Any]:
    dtype = np.int64 if kind == "lens" else np.dtype(kind)
    return st.lists(_ELEMENTS[kind], min_size=size, max_size=size).map(lambda v: np.array(v, dtype))


@st.composite
def _extras(draw: st.DrawFn, schema: WireSchema) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    for family in schema.egress.families:
        positions = draw(_below(4))
        if not positions:
            continue
        total = positions
        if family.ragged:
            lens = extras[family.name + "_lens"] = draw(_array("lens", positions))
            total = int(lens.sum())
        extras[family.name + "_val"] = draw(_array("<f4", total))
        if family.indices is not None:
            extras[family.name + "_idx"] = draw(_array("<i4", total))
    return extras


@lru_cache(maxsize=16)
def _scalar(kind: str) -> st.SearchStrategy[Any]:
    base: st.SearchStrategy[Any] = {
        "u32": _u32,
        "f64": st.floats(allow_nan=False),
        "bool": st.booleans(),
        "str": _text,
        "opaque": _values,
    }[kind.rstrip("?")]
    return st.none() | base if kind.endswith("?") else base


_coin = st.booleans()


@lru_cache(maxsize=1)
def _maybe_finish() -> st.SearchStrategy[FinishReason | None]:
    return st.none() | finish_reasons()


@st.composite
def chunk_events(
    draw: st.DrawFn,
    schema: WireSchema,
    *,
    rid: st.SearchStrategy[str] | None = None,
    finish: st.SearchStrategy[FinishReason | None] | None = None,
) -> ChunkEvent:
    """One request's chunk, of whatever `schema` can carry; `rid` and `finish` may be given strategies of their own."""
    scalars = {c.name: draw(_scalar(c.type)) for c in schema.egress.scalars if draw(_coin)}
    return ChunkEvent(
        rid=draw(_rids() if rid is None else rid),
        token_ids=draw(_array(schema.id_dtype, draw(_below(5)))),
        finish_reason=draw(_maybe_finish() if finish is None else finish),
        prompt_tokens=draw(_u32),
        extras=draw(_extras(schema)) if draw(_coin) else {},
        **scalars,
    )


@st.composite
def chunk_streams(draw: st.DrawFn, schema: WireSchema, *, max_chunks: int = 6) -> list[ChunkEvent]:
    """All chunks of one request, in order: some without a finish reason, then one with."""
    rid = st.just(draw(_rids()))
    middle = draw(st.lists(chunk_events(schema, rid=rid, finish=st.none()), max_size=max_chunks - 1))
    return [*middle, draw(chunk_events(schema, rid=rid, finish=finish_reasons()))]


@lru_cache(maxsize=8)
def _plain_frames(schema: WireSchema) -> st.SearchStrategy[bytes]:
    return st.lists(chunk_events(schema), max_size=4).map(lambda events: encode_batch(events, schema))


def _widen(entry: bytes, way: int) -> bytes:
    """The same unsigned integer in a longer form; other encoders write these."""
    if not entry or entry[0] >= 0x80:
        return entry
    return (
        entry,
        b"\xcc" + entry,
        b"\xcd\0" + entry,
        b"\xce\0\0\0" + entry,
        b"\xd3" + bytes(7) + entry,
        b"\xd0" + entry,
    )[way]


@st.composite
def frames(draw: st.DrawFn, schema: WireSchema) -> bytes:
    """Valid BATCH frames, also in the forms that headrace's own encoder does not write.

    Empty columns spelled out, zeros instead of nothing, integers in longer forms, array32 heads, unknown trailing positions.
    """
    cells, data = split_frame(draw(_plain_frames(schema)))
    columns = schema.egress.columns
    if draw(_coin):
        cells += [b"\x90"] * (draw(st.integers(len(cells), len(columns))) - len(cells))
        n = len(entries(cells[0]))
        for column in columns[schema.egress.required : len(cells)]:
            if column.role in ("lens", "reqlens") and cells[column.position] == b"\x90" and draw(_coin):
                cells[column.position] = array([b"\x00"] * n)
    if draw(_coin):
        for column in columns[: len(cells)]:
            if column.type in ("u32", "u32?"):
                way = draw(_below(6))
                cells[column.position] = array([_widen(e, way) for e in entries(cells[column.position])])
    if draw(_coin):
        at = draw(_below(len(cells)))
        found = entries(cells[at]) if cells[at][0] != 0xC0 else None
        if found is not None:
            cells[at] = b"\xdd" + len(found).to_bytes(4, "big") + b"".join(found)
    if draw(_below(4)) == 0:
        cells += [b"\x90"] * (len(columns) - len(cells))
        cells += draw(
            st.lists(_values.map(msgspec.msgpack.encode) | st.sampled_from(LOSSY_MAPS), min_size=1, max_size=3)
        )
    return join_frame(cells, data)


@st.composite
def one_lie_frames(draw: st.DrawFn, schema: WireSchema, rules: tuple[str, ...] = tuple(LIES)) -> tuple[bytes, str]:
    """(frame, rule): a frame that breaks exactly the rule named, a `FrameError.reason`; all else in it is valid."""
    rule = rules[draw(_below(len(rules)))]
    frame = draw(_plain_frames(schema))

    def pick(n: int) -> int:
        return draw(_below(n))

    lying = lie(frame, rule, schema, pick)
    if lying is None:
        event = ChunkEvent(rid="r", token_ids=np.zeros(1, schema.id_dtype))
        lying = lie(encode_batch([event, event], schema), rule, schema, lambda n: n - 1)
    assert lying is not None  # two requests with an id have room for every lie
    return lying, rule


@lru_cache(maxsize=1)
def hostile_msgpack() -> st.SearchStrategy[bytes]:
    """msgpack meant to hurt: counts far beyond the bytes, nesting bombs, every first byte, cut-off values, reserved 0xc1."""
    big = st.sampled_from([2**16, 2**24, 2**31 - 1, 2**32 - 1])
    heads = st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
    claims = st.builds(lambda h, n, tail: h + n.to_bytes(4, "big") + tail, heads, big, st.binary(max_size=8))
    bombs = st.builds(
        lambda unit, depth: unit * depth + b"\xc0",
        st.sampled_from([b"\x91", b"\x81\xa0", b"\xdd\0\0\0\1", b"\x81\x91", b"\xdd\x00\xff\xff\xff"]),
        st.sampled_from([1, 60, 70, 500, 5_000, 12_000]),
    )
    first = st.builds(lambda b, tail: bytes((b,)) + tail, st.integers(0, 255), st.binary(max_size=20))
    many = st.builds(
        lambda n, unit: array_start(n) + unit * n,
        st.integers(0, 4096),
        st.sampled_from([b"\x80", b"\x90", b"\xa0", b"\xc0", b"\x00"]),
    )
    return st.one_of(claims, bombs, first, many, st.sampled_from(LOSSY_MAPS), st.binary(max_size=40))


@st.composite
def hostile_frames(draw: st.DrawFn, schema: WireSchema) -> bytes:
    """Arbitrary bytes that look like frames: mutated, cut, extended, with hostile msgpack in any position, or plain noise."""
    way = draw(_below(6))
    if way == 0:
        return draw(st.binary(max_size=64))
    if way == 1:
        return draw(st.sampled_from([b"\x01", b"\x03"])) + draw(hostile_msgpack())
    if way == 2:
        header = draw(hostile_msgpack())
        length = draw(st.sampled_from([len(header), len(header) + 1, 0, 2**32 - 1]))
        return b"\x02" + length.to_bytes(4, "little") + header + draw(st.binary(max_size=16))
    frame = draw(frames(schema))
    if way == 3:
        cells, data = split_frame(frame)
        cells[draw(_below(len(cells)))] = draw(hostile_msgpack())
        return join_frame(cells, data)
    if way == 4:
        return frame[: draw(_below(len(frame) + 1))] + draw(st.binary(max_size=8))
    mutable = bytearray(frame)
    for _ in range(1 + draw(_below(3))):
        at = draw(_below(len(mutable)))
        mutable[at] ^= 1 << draw(_below(8))
    return bytes(mutable)


def control_frames() -> st.SearchStrategy[bytes]:
    """Valid RESULT and ERROR frames, with further positions now and then."""
    more = st.lists(_values, max_size=2)
    result = st.builds(
        lambda r, p, m: b"\x01" + msgspec.msgpack.encode([r, p, *m]), _rids(), st.binary(max_size=40) | _text, more
    )
    error = st.builds(lambda r, p, m: b"\x03" + msgspec.msgpack.encode([r, p, *m]), _rids(), _text, more)
    return result | error
