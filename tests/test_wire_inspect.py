"""`describe` and `render`: total, JSON-able, right about offsets, and the verdict is the decoder's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from headrace.codec import FrameError, decode_frame, encode_batch, load_schema, strategies
from headrace.codec.inspect import describe, render
from headrace.codec.lies import lie, split_frame
from headrace.codec.vectors import full_event
from hypothesis import given
from hypothesis import strategies as st

V1, V2 = load_schema("v1"), load_schema("v2")
GOOD = bytes.fromhex("020f0000009492a161a16292c0c092030392010105000000" + "06000000")


@given(data=st.data())
def test_any_bytes_get_a_report_with_the_decoders_own_verdict(data: st.DataObject) -> None:
    schema = data.draw(st.sampled_from([V1, V2]))
    frame = data.draw(
        st.one_of(strategies.hostile_frames(schema), strategies.frames(schema), strategies.hostile_msgpack())
    )
    report = describe(frame, schema)
    json.dumps(report)
    lines = render(report)
    assert all("\n" not in line for line in lines)
    if report["kind"] == "INGRESS":
        return
    reason = None
    try:
        decode_frame(frame, schema)
    except FrameError as error:
        reason = error.reason
    assert report["ok"] == (reason is None)
    assert (report["broken"] or {}).get("reason") == reason
    assert report["broken"] is None or 0 <= report["broken"]["at"] <= len(frame)


@given(data=st.data())
def test_the_parts_of_a_valid_frame_cover_it_without_gap_or_overlap(data: st.DataObject) -> None:
    frame = data.draw(strategies.frames(V2))
    at = 0
    for part in describe(frame, V2)["parts"]:
        assert part["at"] == at, part
        at += part["size"]
    assert at == len(frame)


def test_the_good_frame_in_words() -> None:
    assert render(describe(GOOD, V1)) == [
        "BATCH, 28 bytes, schema v1",
        "       0        1 B  tag             2 (BATCH)",
        "       1        4 B  header length   15",
        "       5        1 B  array           4 positions",
        "       6        5 B  rids            ['a', 'b']",
        "      11        3 B  finish_reasons  [None, None]",
        "      14        3 B  prompt_tokens   [3, 3]",
        "      17        3 B  tok_lens        [1, 1]",
        "      20        8 B  data token_ids  2 x <i4: 5, 6",
        "request 0: rid 'a', 1 ids [5], running, prompt_tokens 3",
        "request 1: rid 'b', 1 ids [6], running, prompt_tokens 3",
        "valid",
    ]


@pytest.mark.parametrize(
    ("frame", "reason", "at"),
    [
        (b"", "empty", 0),
        (b"\x07abc", "unknown_tag", 0),
        (GOOD[:3], "header_length", 1),
        (GOOD[:1] + b"\xff" * 4 + GOOD[5:], "too_large", 1),
        (GOOD[:5] + b"\xc1" + GOOD[6:], "header", 5),
        (GOOD[:14] + b"\x92\x03\xc0" + GOOD[17:], "column_type", 16),
        (GOOD[:11] + b"\x92\xc0\x05" + GOOD[14:], "finish_reason", 13),
        (GOOD[:6] + b"\x92\xa1a\x05" + GOOD[10:], "header", 17),
        (GOOD[:6] + b"\x92\xa1a\xa1\xff" + GOOD[11:], "rids", 9),
        (b"\x02\x01\x00\x00\x00\x90", "arity", 5),
        (GOOD + b"\0", "data_length", 20),
        (GOOD[:-1], "data_length", 20),
        (b"\x01\x91\xa1r", "result", 1),
        (b"\x03\x91\xa1r", "error", 1),
    ],
)
def test_a_broken_frame_says_which_rule_and_where(frame: bytes, reason: str, at: int) -> None:
    report = describe(frame, V1)
    assert (report["broken"]["reason"], report["broken"]["at"]) == (reason, at)
    assert any(line.startswith(f"broken at byte {at}: {reason}: ") for line in render(report))


@pytest.mark.parametrize("rule", ["column_length", "column_type", "finish_reason", "ragged_sum", "rids"])
def test_the_place_of_a_lie_lies_in_the_column_that_lies(rule: str) -> None:
    frame = encode_batch([full_event(V2, "a", 100), full_event(V2, "b", 3000)], V2)
    honest, _ = split_frame(frame)
    for way in range(20):
        lying = lie(frame, rule, V2, lambda n, way=way: (way * 7 + 3) % n)  # type: ignore[misc]
        assert lying is not None
        cells, _ = split_frame(lying)
        changed = next(i for i, (a, b) in enumerate(zip(honest, cells, strict=True)) if a != b)
        start = lying.index(b"\xdc\x00\x18", 5) + 3 + sum(map(len, cells[:changed]))
        at = describe(lying, V2)["broken"]["at"]
        ragged = rule == "ragged_sum" and at < start  # the count column before the changed one is named for both
        assert start <= at < start + len(cells[changed]) or ragged, (way, changed)


def test_an_ingress_header_is_read_by_the_schemas_names() -> None:
    import msgspec

    slots: list[Any] = list(range(len(V2.sampling_slots)))
    header: list[Any] = ["TokenizedGenerateReqInput", "r1", None, "text", None, None, None, None, slots, False, -1]
    report = describe(msgspec.msgpack.encode(header), V2)
    parts = {part["name"]: part["value"] for part in report["parts"]}
    assert report["kind"] == "INGRESS"
    assert parts["rid"] == "'r1'"
    assert parts["logprob_start_len"] == "-1"
    assert parts["sampling_params.max_new_tokens"] == "0"
    assert parts["sampling_params.ebnf_full_assistant"] == str(len(slots) - 1)
    abort = describe(msgspec.msgpack.encode(["AbortReq", "r", None, False, None, None]), V1)
    assert {"name": "abort_all", "value": "False"}.items() <= abort["parts"][4].items()
    broken = describe(b"\x93\x01", V1)
    assert not broken["ok"]
    assert render(broken)


def test_a_large_frame_gives_a_short_report() -> None:
    from headrace.codec import ChunkEvent

    frame = encode_batch([ChunkEvent(rid=f"r{i}", token_ids=list(range(50))) for i in range(500)], V1)
    lines = render(describe(frame, V1))
    assert len(lines) < 60
    assert max(map(len, lines)) < 400
    assert any("468 further requests not shown" in line for line in lines)
