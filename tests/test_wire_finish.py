"""Finish reasons: closed set plus Unknown, echoed exactly; no map can fail a frame."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import msgspec
import pytest
from headrace.codec import (
    Abort,
    ChunkEvent,
    Length,
    Stop,
    Unknown,
    encode_batch,
    load_schema,
    parse_finish_reason,
    strategies,
)
from headrace.codec.frame_walk import Lossy, Malformed, read_strict, skip
from hypothesis import given
from hypothesis import strategies as st
from wire_helpers import batch_of

V1 = load_schema("v1")


@given(strategies.finish_maps())
def test_to_map_gives_back_any_map_key_for_key(table: dict[Any, Any]) -> None:
    told = parse_finish_reason(table).to_map()
    assert repr(told) == repr(table)  # repr: order, nils, and 1 is not True


@given(strategies.finish_reasons())
def test_any_reason_survives_the_wire(reason: Any) -> None:
    frame = batch_of(encode_batch([ChunkEvent(rid="a", finish_reason=reason), ChunkEvent(rid="b")], V1), V1)
    assert frame.finish_reasons[0] == reason
    assert frame.finish_reasons[1] is None
    assert frame.finished == [0]


@pytest.mark.parametrize(
    ("table", "cls"),
    [
        ({"type": "stop"}, Stop),
        ({"type": "stop", "matched": None}, Stop),
        ({"type": "stop", "matched": 0}, Stop),
        ({"type": "stop", "matched": ""}, Stop),
        ({"type": "stop", "matched": [1, 2]}, Stop),
        ({"type": "stop", "matched": 5, "new": {"x": [1]}}, Stop),
        ({"type": "length", "length": 8}, Length),
        ({"type": "length"}, Length),
        ({"type": "abort"}, Abort),
        ({"type": "abort", "message": None, "status_code": None, "err_type": None}, Abort),
        ({"type": "abort", "message": "m", "status_code": 503, "err_type": "e", "retry": 1}, Abort),
        ({"type": "stop", "matched": True}, Unknown),
        ({"type": "stop", "matched": [1, True]}, Unknown),
        ({"type": "stop", "matched": ["a"]}, Unknown),
        ({"type": "stop", "matched": 1.0}, Unknown),
        ({"type": "length", "length": None}, Unknown),
        ({"type": "length", "length": "8"}, Unknown),
        ({"type": "abort", "status_code": "503"}, Unknown),
        ({"type": "abort", "status_code": True}, Unknown),
        ({"type": "abort", "message": 5}, Unknown),
        ({"type": "Stop"}, Unknown),
        ({"type": None}, Unknown),
        ({"type": ["stop"]}, Unknown),
        ({}, Unknown),
        ({1: 2}, Unknown),
    ],
)
def test_each_map_has_its_class_and_is_echoed(table: dict[Any, Any], cls: type) -> None:
    reason = parse_finish_reason(table)
    assert type(reason) is cls
    assert reason.to_map() == table
    if cls is Unknown:
        assert reason.matched is None
        assert reason.abort_status is None


def test_b30_matched_zero_is_a_match_and_an_abort_with_status_is_an_error() -> None:
    assert parse_finish_reason({"type": "stop", "matched": 0}).matched == 0
    assert parse_finish_reason({"type": "abort", "status_code": 503, "new": 1}).abort_status == 503
    assert parse_finish_reason({"type": "abort", "status_code": None}).abort_status is None


LOSSY = {
    "one key twice": b"\x82\xa1a\x01\xa1a\x02",
    "one known key twice": b"\x82\xa4type\xa4stop\xa4type\xa4stop",
    "array as key": b"\x81\x91\x01\x02",
    "map as key": b"\x81\x81\x01\x02\x03",
    "keys equal to Python": b"\x82\x01\xa1a\xc3\xa1b",
    "extension": b"\x81\xa1t\xd4\x05\x01",
    "extension as key": b"\x81\xd4\x05\x01\x01",
    "timestamp": b"\x81\xa1t\xd6\xff\x00\x00\x00\x01",
    "timestamp out of range": b"\x81\xa1t\xc7\x0c\xff" + b"\xff" * 12,
    "not UTF-8": b"\x81\xa4type\xa1\xff",
    "surrogates": b"\x81\xa4type\xa3\xed\xa0\x80",
    "deep": b"\x81\xa1d" + b"\x91" * 300 + b"\xc0",
    "deep maps": b"\x81\xa0" * 300 + b"\xc0",
    "nested, one key twice": b"\x81\xa1x\x91\x82\xa1a\x01\xa1a\x02",
}


@pytest.mark.parametrize("case", LOSSY)
def test_what_a_dict_cannot_hold_is_kept_as_raw_bytes_and_fails_nobody(case: str) -> None:
    raw = LOSSY[case]
    header = msgspec.msgpack.encode([["a", "b"], msgspec.Raw(b"\x92" + raw + b"\xc0"), [1, 1], [0, 0]])
    frame = batch_of(b"\x02" + len(header).to_bytes(4, "little") + header, V1)
    reason = frame.finish_reasons[0]
    assert isinstance(reason, Unknown)
    assert reason.raw == reason.to_map() == raw
    assert frame.finish_reasons[1] is None
    assert batch_of(encode_batch(list(frame), V1), V1).finish_reasons[0] == reason
    assert parse_finish_reason(raw) == reason
    assert reason.to_json() == {"type": None, "msgpack": raw.hex()}


def test_forms_that_only_look_unusual_are_read_as_maps() -> None:
    wide = b"\x81\xd9\x04type\xda\x00\x04stop"  # longer string heads than needed
    assert parse_finish_reason(wide) == parse_finish_reason({"type": "stop"})
    single = b"\x82\xa4type\xa1x\xa1f\xca\x3f\x80\x00\x00"  # a float32
    assert parse_finish_reason(single).to_map() == {"type": "x", "f": 1.0}
    assert parse_finish_reason(b"\x81\xc4\x01k\x01").to_map() == {b"k": 1}


@pytest.mark.parametrize("value", ["stop", 5, [], [1], b"\xa4stop"[:0] or 1.5, True])
def test_what_is_no_map_is_no_finish_reason(value: Any) -> None:
    with pytest.raises(TypeError):
        parse_finish_reason(value)


def test_nil_is_still_running() -> None:
    assert parse_finish_reason(None) is None


def test_built_reasons_check_their_fields_and_spell_out_their_nils() -> None:
    assert Stop(7).to_map() == {"type": "stop", "matched": 7}
    assert Length(3).to_map() == {"type": "length", "length": 3}
    assert Abort("m").to_map() == {"type": "abort", "message": "m", "status_code": None, "err_type": None}
    assert (Abort("m", 503, "e").message, Abort("m", 503, "e").err_type, Length(3).length) == ("m", "e", 3)
    for build in (lambda: Stop(True), lambda: Length("3"), lambda: Abort(message=5), lambda: Abort(status_code="x")):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            build()


def test_reasons_are_immutable_comparable_and_copied_whole() -> None:
    for reason in (Stop(7), Length(3), Abort("m", 503), Unknown({"a": 1}), Unknown(b"\x81\xd4\x05\x01\x01")):
        assert pickle.loads(pickle.dumps(reason)) == reason == copy.deepcopy(reason)
        with pytest.raises(AttributeError):
            reason.matched = 3  # type: ignore[misc]
        with pytest.raises(TypeError):
            hash(reason)
    assert Stop(7) != Length(7)
    table = Stop(7).to_map()
    table["matched"] = 8
    assert Stop(7).matched == 7


@given(st.binary(max_size=60))
def test_the_strict_reader_and_the_walker_agree_on_where_a_value_ends(data: bytes) -> None:
    try:
        end = skip(data, 0, len(data))
    except Malformed:
        with pytest.raises((Malformed, Lossy)):
            read_strict(data, 0, len(data))
        return
    with contextlib.suppress(Lossy):
        assert read_strict(data, 0, len(data))[1] == end


@given(strategies.hostile_msgpack())
def test_the_walker_agrees_with_the_library_on_what_is_msgpack(data: bytes) -> None:
    try:
        whole = skip(data, 0, len(data)) == len(data)
    except Malformed:
        whole = False
    try:
        msgspec.msgpack.Decoder(msgspec.Raw).decode(data)
        library = True
    except msgspec.MsgspecError:
        library = False
    except RecursionError:
        return
    assert whole == library
