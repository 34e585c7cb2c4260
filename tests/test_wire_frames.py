"""The fixed battery of the frame codec: field cases, round trips, prefixes, slots, buffers, named requests."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from headrace.codec import (
    ChunkEvent,
    ControlResult,
    EncodeError,
    FrameError,
    RequestFailure,
    Stop,
    decode_frame,
    encode_batch,
    encode_batch_cols,
    frame_egress_batch_cols,
    frame_egress_error,
    frame_egress_result,
    load_schema,
)
from headrace.codec.lies import array as mp_array
from headrace.codec.lies import entries, join_frame, split_frame
from wire_helpers import batch_of, reason_of

V1, V2 = load_schema("v1"), load_schema("v2")
schemas = pytest.mark.parametrize("schema", [V1, V2], ids=lambda s: s.name)

GOOD = bytes.fromhex("02 0f000000 94 92a161a162 92c0c0 920303 920101 05000000 06000000".replace(" ", ""))


def rejected(frame: object, schema: Any = V1, **limits: int) -> FrameError:
    with pytest.raises(FrameError) as caught:
        batch_of(frame, schema, **limits)
    return caught.value


def full_event(schema: Any, rid: str, seed: int, finish: Any = None) -> ChunkEvent:
    """A chunk that uses every column of `schema`, with no value twice."""
    count = itertools.count(seed)
    extras: dict[str, Any] = {}
    for at, family in enumerate(schema.egress.families):
        positions = 2 + at % 2
        total = positions
        if family.ragged:
            lens = [(at + k) % 3 for k in range(positions)]
            extras[family.name + "_lens"] = np.array(lens, np.int64)
            total = sum(lens)
        extras[family.name + "_val"] = np.array([next(count) + 0.5 for _ in range(total)], "<f4")
        if family.indices:
            extras[family.name + "_idx"] = np.array([next(count) for _ in range(total)], "<i4")
    kinds: dict[str, Callable[[], Any]] = {
        "u32": lambda: next(count),
        "f64": lambda: next(count) + 0.25,
        "bool": lambda: True,
        "opaque": lambda: [[next(count), "w"]],
    }
    scalars = {c.name: kinds[c.type.rstrip("?")]() for c in schema.egress.scalars}
    ids = np.array([next(count) for _ in range(3)], schema.id_dtype)
    return ChunkEvent(rid=rid, token_ids=ids, finish_reason=finish, prompt_tokens=next(count), extras=extras, **scalars)


# ---- field cases -------------------------------------------------------------------------------------------------------------


def test_b27_the_good_frame_gives_each_request_its_token() -> None:
    frame = batch_of(GOOD, V1)
    assert [(c.rid, c.token_ids.tolist(), c.finish_reason, c.prompt_tokens) for c in frame] == [
        ("a", [5], None, 3),
        ("b", [6], None, 3),
    ]
    assert encode_batch(list(frame), V1) == GOOD


def test_b27_short_finish_column_rejects_whole_frame() -> None:
    error = rejected(bytes.fromhex("020e0000009492a161a16291c0920303920101" + "0500000006000000"))
    assert (error.reason, error.rids, error.rids_complete) == ("column_length", ["a", "b"], True)


def test_b27_short_length_column_rejects_whole_frame() -> None:
    error = rejected(bytes.fromhex("020e0000009492a161a16292c0c09203039101" + "05000000"))
    assert (error.reason, error.rids, error.rids_complete) == ("column_length", ["a", "b"], True)


def _v1_frame(*cells: object, data: bytes = b"", arity: int | None = None) -> bytes:
    header = msgspec.msgpack.encode(list(cells))
    return b"\x02" + len(header).to_bytes(4, "little") + header + data


_CORE = (["a", "b"], [None, None], [3, 3], [1, 1])
_IDS = bytes.fromhex("0500000006000000")
_B28 = {
    "a_body_of_3_bytes": (GOOD[:4], "header_length", [], False),
    "b_header_length_ffffffff": (GOOD[:1] + b"\xff" * 4 + GOOD[5:], "too_large", ["a", "b"], True),
    "c_header_is_not_msgpack": (GOOD[:5] + b"\xc1" + GOOD[6:], "header", [], False),
    "d_data_4_short": (GOOD[:-4], "data_length", ["a", "b"], True),
    "e_data_4_long": (GOOD + bytes(4), "data_length", ["a", "b"], True),
    "f_two_positions_counted_one_there": (
        _v1_frame(*_CORE, [], [], [2, 0], [1], data=_IDS + bytes(8)),
        "ragged_sum",
        ["a", "b"],
        True,
    ),
    "g_one_position_counted_two_there": (
        _v1_frame(*_CORE, [], [], [1, 0], [1, 1], data=_IDS + bytes(16)),
        "ragged_sum",
        ["a", "b"],
        True,
    ),
    "h_extras_column_of_1_for_2_rids": (
        _v1_frame(*_CORE, [1], data=_IDS + bytes(8)),
        "column_length",
        ["a", "b"],
        True,
    ),
    "i_a_length_of_2_32_minus_1": (
        _v1_frame(*_CORE[:3], [1, 2**32 - 1], data=_IDS),
        "data_length",
        ["a", "b"],
        True,
    ),
}


@pytest.mark.parametrize("case", _B28)
def test_b28_header_and_data_disagree_rejects_and_names(case: str) -> None:
    frame, reason, rids, complete = _B28[case]
    error = rejected(frame)
    assert (error.reason, error.rids, error.rids_complete) == (reason, rids, complete)


def test_b28_sums_beyond_32_and_64_bits_are_rejected() -> None:
    for count, rows in ((2**31, 2), (2**32 - 1, 4000)):
        rids = [f"r{i}" for i in range(rows)]
        frame = _v1_frame(rids, [None] * rows, [0] * rows, [count] * rows, data=_IDS)
        assert rejected(frame).reason == "data_length"
    frame = _v1_frame(*_CORE, [], [], [1, 1], [2**32 - 1, 2**32 - 1], data=_IDS)
    assert rejected(frame).reason == "data_length"


def test_b26_a_column_in_the_wrong_slot_is_a_type_error_not_a_reinterpretation() -> None:
    frame = _v1_frame(["a"], [3], [None], [1], data=_IDS[:4])  # finish_reasons and prompt_tokens swapped
    assert rejected(frame).reason == "finish_reason"
    assert rejected(_v1_frame(["a"], [None], [None], [1], data=_IDS[:4])).reason == "column_type"
    assert rejected(b"\x02" + (6).to_bytes(4, "little") + b"\x82\x00\x01\x02\x03\x04"[:6] + b"\x00").reason == "header"


@schemas
def test_b26_a_different_value_in_every_slot_comes_back_from_its_own_slot(schema: Any) -> None:
    events = [full_event(schema, "a", 100), full_event(schema, "b", 3000, Stop(matched=7))]
    frame = encode_batch(events, schema)
    read = batch_of(frame, schema)
    assert list(read) == events
    cells, _ = split_frame(frame)
    assert len(cells) == len(schema.egress.columns)
    for left, right in itertools.combinations(schema.egress.columns[1:], 2):
        swapped = list(cells)
        swapped[left.position], swapped[right.position] = cells[right.position], cells[left.position]
        if cells[left.position] == cells[right.position]:
            continue
        try:
            got = list(batch_of(join_frame(swapped, frame[5 + int.from_bytes(frame[1:5], "little") :]), schema))
        except FrameError:
            continue
        assert got != events, f"{left.name} and {right.name} can be swapped unseen"


def test_b30_an_unknown_finish_reason_reaches_a_alone_and_unchanged() -> None:
    told = {"type": "tool_calls", "name": "s"}
    abort = {"type": "abort", "message": "m", "status_code": None, "err_type": None}
    frame = batch_of(_v1_frame(["a", "b", "c"], [told, None, abort], [1, 1, 1], [1, 1, 0], data=_IDS), V1)
    assert reason_of(frame, 0).to_map() == told
    assert reason_of(frame, 0).matched is None
    assert reason_of(frame, 0).abort_status is None
    assert frame.finish_reasons[1] is None
    assert reason_of(frame, 2).to_map() == abort
    assert reason_of(frame, 2).abort_status is None
    assert frame.finished == [0, 2]


def test_b30_an_empty_string_is_no_finish_reason() -> None:
    assert rejected(_v1_frame(["a"], [""], [1], [0])).reason == "finish_reason"


def test_b32_a_terminal_chunk_without_ids_is_a_chunk() -> None:
    frame = batch_of(encode_batch([ChunkEvent(rid="r", finish_reason={"type": "length", "length": 0})], V1), V1)
    assert len(frame) == 1
    assert frame[0].completion_tokens == 0
    assert frame.finished == [0]


@schemas
def test_b47_chunks_are_deltas_and_their_concatenation_is_the_whole(schema: Any) -> None:
    chunks = []
    for i in range(3):
        extras = {"out_lp_val": np.array([-0.5 - i], "<f4"), "out_lp_idx": np.array([10 + i], "<i4")}
        chunks.append(ChunkEvent(rid="r", token_ids=[10 + i], extras=extras))
    read = [batch_of(encode_batch([c], schema), schema)[0] for c in chunks]
    assert np.concatenate([c.token_ids for c in read]).tolist() == [10, 11, 12]
    assert np.concatenate([c.extras["out_lp_val"] for c in read]).tolist() == [-0.5, -1.5, -2.5]


@schemas
def test_b48_infinite_and_nan_logprobs_come_back_bit_for_bit(schema: Any) -> None:
    bits = np.array([0xFF800000, 0x7FC00001, 0xBF000000], "<u4")
    extras = {
        "out_lp_val": bits.view("<f4"),
        "out_lp_idx": np.array([1, 2, 3], "<i4"),
        "in_lp_val": np.array([np.nan, -1], "<f4"),
        "in_lp_idx": np.array([4, 5], "<i4"),
    }
    read = batch_of(encode_batch([ChunkEvent(rid="a", extras=extras)], schema), schema)[0].extras
    assert read["out_lp_val"].view("<u4").tolist() == bits.tolist()
    assert np.isnan(read["in_lp_val"][0])
    assert read["in_lp_idx"].tolist() == [4, 5]


def test_b48_an_empty_ragged_position_is_no_value_and_shifts_nothing() -> None:
    extras = {
        "in_top_lens": np.array([0, 2]),
        "in_top_val": np.array([-1, -2], "<f4"),
        "in_top_idx": np.array([7, 8], "<i4"),
    }
    read = batch_of(encode_batch([ChunkEvent(rid="a", extras=extras)], V1), V1)[0].extras
    assert read["in_top_lens"].tolist() == [0, 2]
    assert read["in_top_idx"].tolist() == [7, 8]


# ---- the battery -------------------------------------------------------------------------------------------------------------


@schemas
def test_no_prefix_of_a_frame_is_a_frame(schema: Any) -> None:
    frame = encode_batch([full_event(schema, "a", 100), full_event(schema, "b", 3000, Stop())], schema)
    for end in range(len(frame)):
        assert rejected(frame[:end], schema).reason in ("empty", "header_length", "data_length")


@schemas
def test_a_readable_header_without_rids_is_a_valid_empty_frame(schema: Any) -> None:
    frame = batch_of(encode_batch([], schema), schema)
    assert len(frame) == 0
    assert list(frame) == []
    assert frame.finished == []
    assert frame.offsets.tolist() == [0]


@schemas
def test_absent_empty_and_zero_columns_mean_the_same(schema: Any) -> None:
    events = [ChunkEvent(rid="a", token_ids=[1]), ChunkEvent(rid="b", token_ids=[2, 3])]
    cells, data = split_frame(encode_batch(events, schema))
    assert len(cells) == schema.egress.required
    padded = cells + [b"\x90"] * (len(schema.egress.columns) - len(cells))
    zeros = [
        mp_array([b"\x00"] * 2) if c.role in ("lens", "reqlens") else padded[c.position] for c in schema.egress.columns
    ]
    for variant in (cells, padded, zeros):
        frame = batch_of(join_frame(variant, data), schema)
        assert list(frame) == events
        assert not frame.has_extras


@schemas
def test_unknown_trailing_positions_are_skipped_and_counted(schema: Any) -> None:
    event = full_event(schema, "a", 100)
    cells, data = split_frame(encode_batch([event], schema))
    more = [b"\x91\xa1\xff", b"\xc7\x0c\xff" + b"\xff" * 12, b"\x91" * 200 + b"\xc0"]
    frame = batch_of(join_frame(cells + more, data), schema)
    assert frame.unknown_columns == 3
    assert list(frame) == [event]
    error = rejected(join_frame(cells + more, data + bytes(4)), schema)
    assert error.reason == "unknown_columns"
    assert str(len(schema.egress.columns)) in error.message
    assert "newer schema" in error.message
    assert error.rids == ["a"]


def test_ids_outside_i32_are_data_in_v2_and_cannot_be_encoded_in_v1() -> None:
    event = ChunkEvent(rid="a", token_ids=[-(2**63), 2**63 - 1])
    assert batch_of(encode_batch([event], V2), V2)[0].token_ids.tolist() == [-(2**63), 2**63 - 1]
    with pytest.raises(EncodeError):
        encode_batch([event], V1)


def test_a_duplicate_rid_gives_two_rows_in_order() -> None:
    frame = batch_of(_v1_frame(["a", "a"], [{"type": "stop"}, None], [1, 1], [1, 1], data=_IDS), V1)
    assert [c.token_ids.tolist() for c in frame] == [[5], [6]]


@pytest.mark.parametrize("cells", range(1, 7))
def test_rids_are_recovered_at_any_arity_and_past_broken_neighbours(cells: int) -> None:
    header = mp_array([mp_array([b"\xa1a", b"\xa1b"]), *[b"\xc1"] * (cells - 1)])
    error = rejected(b"\x02" + len(header).to_bytes(4, "little") + header)
    assert (error.rids, error.rids_complete) == (["a", "b"], True)


@pytest.mark.parametrize(
    ("column", "rids"),
    [
        (b"\x93\xa1a\xa2\xff\xfe\xa1b", ["a", "b"]),
        (b"\x93\xa1a\x05\xa1b", ["a", "b"]),
        (b"\x93\xa1a\x91\xa1x\xa1b", ["a", "b"]),
        (b"\x93\xa1a\xa1b", ["a", "b"]),
        (b"\x93\xa1a\xc1\xa1b", ["a"]),
        (b"\xdd\xff\xff\xff\xff\xa1a", ["a"]),
        (b"\xc0", []),
        (b"\xa1a", []),
    ],
)
def test_a_list_of_rids_with_a_bad_entry_is_incomplete(column: bytes, rids: list[str]) -> None:
    header = b"\x91" + column
    error = rejected(b"\x02" + len(header).to_bytes(4, "little") + header)
    assert (error.rids, error.rids_complete) == (rids, False)


def test_a_bad_string_elsewhere_does_not_hide_the_rids() -> None:
    finish = b"\x92\x81\xa4type\xa1\xff\xc0"  # not UTF-8: this request's reason is Unknown, nobody fails
    header = mp_array([b"\x92\xa1a\xa1b", finish, b"\x92\x01\x01", b"\x92\x00\x00"])
    frame = batch_of(join_frame(entries(header), b""), V1)
    assert reason_of(frame, 0).raw == b"\x81\xa4type\xa1\xff"
    error = rejected(join_frame([*entries(header)[:3], b"\x92\x00\xa1\xff"], b""))
    assert (error.reason, error.rids, error.rids_complete) == ("column_type", ["a", "b"], True)


def test_result_and_error_frames_carry_further_positions_that_are_skipped() -> None:
    assert decode_frame(frame_egress_result("r", b"\x00\xff"), V1) == ControlResult("r", b"\x00\xff")
    assert decode_frame(b"\x01" + msgspec.msgpack.encode(["r", "text", {"a": 1}]), V1) == ControlResult("r", b"text")
    assert decode_frame(frame_egress_error("r", "why"), V2) == RequestFailure("r", "why")
    assert decode_frame(b"\x03" + msgspec.msgpack.encode(["r", "why", 1, [2]]), V1) == RequestFailure("r", "why")


def test_a_broken_result_or_error_names_its_rid_or_nobody() -> None:
    for tag in (b"\x01", b"\x03"):
        error = rejected(tag + b"\x92\xa1r\x05")
        assert (error.rids, error.rids_complete, error.names_nobody) == (["r"], True, False)
        error = rejected(tag + b"\x92\x05\xa1m")
        assert (error.rids, error.rids_complete, error.names_nobody) == ([], False, True)
        assert rejected(tag + b"\xdd\xff\xff\xff\xff").names_nobody
    assert rejected(b"").names_nobody
    assert rejected(b"\x00\x01").names_nobody


def test_limits_are_judged_at_limit_and_one_past_it() -> None:
    header = int.from_bytes(GOOD[1:5], "little")
    assert len(batch_of(GOOD, V1, max_frame_bytes=len(GOOD), max_header_bytes=header)) == 2
    for limits in ({"max_frame_bytes": len(GOOD) - 1}, {"max_header_bytes": header - 1}):
        error = rejected(GOOD, **limits)
        assert (error.reason, error.rids, error.rids_complete) == ("too_large", ["a", "b"], True)
    assert rejected(frame_egress_result("r", bytes(99)), max_frame_bytes=50).rids == ["r"]


# ---- buffers -----------------------------------------------------------------------------------------------------------------


def _buffers() -> dict[str, object]:
    mutable = bytearray(GOOD)
    padded = b"xx" + GOOD + b"yy"
    spread = bytearray(2 * len(GOOD))
    spread[::2] = GOOD
    whole = GOOD + bytes(-len(GOOD) % 4)
    return {
        "bytes": GOOD,
        "bytearray": mutable,
        "memoryview": memoryview(GOOD),
        "slice": memoryview(padded)[2:-2],
        "read_only": memoryview(mutable).toreadonly(),
        "strided": memoryview(spread)[::2],
        "backwards": memoryview(bytes(GOOD[::-1]))[::-1],
        "signed": memoryview(GOOD).cast("b"),
        "chars": memoryview(GOOD).cast("c"),
        "array": array.array("B", GOOD),
        "numpy": np.frombuffer(GOOD, np.uint8),
        "wide": memoryview(whole).cast("I") if len(whole) == len(GOOD) else np.frombuffer(GOOD, np.uint8),
    }


@pytest.mark.parametrize("kind", _buffers())
def test_every_kind_of_buffer_reads_the_same(kind: str) -> None:
    frame = batch_of(_buffers()[kind], V1)
    assert [c.token_ids.tolist() for c in frame] == [[5], [6]]
    with pytest.raises(ValueError, match="read-only"):
        frame.token_ids[0] = 1


@pytest.mark.parametrize("value", [None, 5, "text", [2, 0], object()])
def test_what_is_no_buffer_is_a_frame_error_too(value: object) -> None:
    assert rejected(value).reason == "buffer"


def test_a_released_view_is_a_frame_error_too() -> None:
    view = memoryview(GOOD)
    view.release()
    assert rejected(view).reason == "buffer"


def test_token_ids_and_floats_are_views_on_the_buffer() -> None:
    data = bytearray(encode_batch([full_event(V1, "a", 100)], V1))
    frame = batch_of(data, V1)
    base = np.frombuffer(data, np.uint8)
    assert np.shares_memory(frame.token_ids, base)
    assert np.shares_memory(frame[0].token_ids, base)
    assert np.shares_memory(frame.extras(0)["hidden_val"], base)


def test_what_is_not_a_view_survives_a_change_of_the_buffer() -> None:
    data = bytearray(_v1_frame(["a"], [{"type": "tool", "x": [1]}], [3], [0]))
    frame = batch_of(data, V1)
    data[:] = bytes(len(data))
    assert reason_of(frame, 0).to_map() == {"type": "tool", "x": [1]}
    assert frame[0].prompt_tokens == 3


def test_rows_are_indexed_like_a_list() -> None:
    frame = batch_of(GOOD, V1)
    assert frame[-1] == frame[1]
    for row in (2, -3):
        with pytest.raises(IndexError):
            frame[row]
        with pytest.raises(IndexError):
            frame.extras(row)


# ---- encoding ----------------------------------------------------------------------------------------------------------------


def test_columns_and_chunks_give_the_same_bytes() -> None:
    header, cols = encode_batch_cols(
        V1,
        rids=["a", "b"],
        finish_reasons=[None, None],
        prompt_tokens=np.array([3, 3]),
        tok_lens=[1, 1],
        token_ids=np.array([5, 6]),
    )
    assert frame_egress_batch_cols(header, cols) == GOOD


def test_a_ready_made_column_is_put_in_as_it_is() -> None:
    raw = msgspec.Raw(msgspec.msgpack.encode(["a", "b"]))
    header, cols = encode_batch_cols(
        V1, rids=raw, finish_reasons=[None, None], prompt_tokens=[3, 3], tok_lens=[1, 1], token_ids=[5, 6]
    )
    assert frame_egress_batch_cols(header, cols) == GOOD


@pytest.mark.parametrize(
    "change",
    [
        {"tok_lens": [1, 2]},
        {"tok_lens": [1]},
        {"tok_lens": [-1, 3]},
        {"prompt_tokens": [1, 2**32]},
        {"prompt_tokens": [1, True]},
        {"finish_reasons": [None]},
        {"finish_reasons": [{"type": object()}, None]},
        {"rids": ["a", "\ud800"]},
        {"token_ids": [5, 2**31]},
        {"token_ids": [5.5, 6.5]},
        {"out_lp_lens": [1, 0], "out_lp_val": [0.5]},
        {"out_top_reqlens": [1, 1], "out_top_poslens": [1]},
        {"cached_tokens": [1, 1]},
        {"nonsense": [1, 1]},
    ],
)
def test_what_does_not_fit_is_an_encode_error_and_no_bytes(change: dict[str, Any]) -> None:
    columns: dict[str, Any] = {
        "rids": ["a", "b"],
        "finish_reasons": [None, None],
        "prompt_tokens": [3, 3],
        "tok_lens": [1, 1],
        "token_ids": [5, 6],
    }
    with pytest.raises(EncodeError):
        encode_batch_cols(V1, **{**columns, **change})


def test_a_scalar_the_schema_does_not_have_is_an_encode_error() -> None:
    with pytest.raises(EncodeError, match="cached_tokens"):
        encode_batch([ChunkEvent(rid="a", cached_tokens=3)], V1)
    assert batch_of(encode_batch([ChunkEvent(rid="a", cached_tokens=0)], V1), V1)[0].cached_tokens == 0


def test_extras_that_disagree_are_an_encode_error() -> None:
    one, two = np.array([1], "<f4"), np.array([1, 2], "<i4")
    for extras in (
        {"out_lp_val": one, "out_lp_idx": two},
        {"out_top_val": one, "out_top_idx": two[:1]},
        {"out_top_val": one, "out_top_idx": two[:1], "out_top_lens": np.array([2])},
        {"nonsense": one},
    ):
        with pytest.raises(EncodeError):
            encode_batch([ChunkEvent(rid="a", extras=extras)], V1)


@pytest.mark.parametrize("value", [False, 0, "", [], {}, 0.0])
def test_an_opaque_entry_that_is_false_is_an_entry(value: Any) -> None:
    schema = load_schema("v2")
    events = [ChunkEvent(rid="r", token_ids=[1], weight_versions=value), ChunkEvent(rid="s", token_ids=[2])]
    frame = batch_of(encode_batch(events, schema), schema)
    assert [chunk.weight_versions for chunk in frame] == [value, None]
    assert type(frame[0].weight_versions) is type(value)
