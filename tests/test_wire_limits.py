"""Hostile input: no foreign exception, and the peak of a decode is at most 16 x the frame plus 1 MiB."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import wire_helpers as wire
from headrace.codec import FrameError, decode_frame, load_schema, strategies
from headrace.codec.lies import array_start
from hypothesis import given, settings
from hypothesis import strategies as st

V1, V2 = load_schema("v1"), load_schema("v2")
MIB = 1 << 20


def frame_of(*cells: bytes, data: bytes = b"") -> bytes:
    header = array_start(len(cells)) + b"".join(cells)
    return b"\x02" + len(header).to_bytes(4, "little") + header + data


def many(unit: bytes, n: int) -> bytes:
    return array_start(n) + unit * n


def distinct(n: int, form: Any) -> bytes:
    return array_start(n) + b"".join(form(i) for i in range(n))


def two(i: int) -> bytes:
    return b"\xa2" + bytes((33 + i % 90, 33 + i // 90 % 90))


def wide(i: int) -> bytes:
    return b"\xa2" + chr(0x100 + i % 1500).encode()


N = 60_000


def plain(
    rid: bytes, n: int = N, finish: bytes = b"\xc0", prompt: bytes = b"\x00", lens: bytes = b"\x00"
) -> list[bytes]:
    return [rid, many(finish, n), many(prompt, n), many(lens, n)]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty rids": lambda: frame_of(*plain(many(b"\xa0", N))),
    "rids of two characters": lambda: frame_of(*plain(distinct(N, two))),
    "rids of one wide character": lambda: frame_of(*plain(distinct(N, wide))),
    "rids of one emoji in much text": lambda: frame_of(*plain(many(b"\xbf" + "\U0001f600".encode() + b"a" * 27, N))),
    "every finish an empty map": lambda: frame_of(*plain(distinct(N, wide), finish=b"\x80")),
    "every finish a map of maps": lambda: frame_of(*plain(many(b"\xa0", N), finish=b"\x81\xa0\x81\xa0\x80")),
    "numbers of three bytes": lambda: frame_of(*plain(many(b"\xa0", N), prompt=b"\xcd\x01\x01")),
    "numbers of mixed width": lambda: frame_of(
        many(b"\xa0", N), many(b"\xc0", N), array_start(N) + b"\xcd\x01\x01\x00" * (N // 2), many(b"\x00", N)
    ),
    "positions without values": lambda: frame_of(
        many(b"\xa1a", 1),
        many(b"\xc0", 1),
        many(b"\x00", 1),
        many(b"\x00", 1),
        b"\x90",
        b"\x90",
        b"\x91\xce" + N.to_bytes(4, "big"),
        many(b"\x00", N),
    ),
    "counts of zero everywhere": lambda: frame_of(
        *plain(many(b"\xa0", N)), *[many(b"\x00", N) if i % 2 == 0 or i < 2 else b"\x90" for i in range(12)]
    ),
    "nested in a column of numbers": lambda: frame_of(
        many(b"\xa0", N), many(b"\xc0", N), many(b"\x80", N), many(b"\x00", N)
    ),
    "deep in a column of numbers": lambda: frame_of(b"\x91\xa1a", b"\x91\xc0", b"\x91" * 900 + b"\x00", b"\x91\x00"),
    "a bomb of depth": lambda: frame_of(b"\x91\xa1a", b"\x91\xc0", b"\x91" * 300_000 + b"\x00", b"\x91\x00"),
    "a bomb behind the schema": lambda: frame_of(
        *plain(many(b"\xa1a", 1), 1), *[b"\x90"] * 12, b"\x91" * 300_000 + b"\x00"
    ),
    "a bomb in a finish reason": lambda: frame_of(
        b"\x91\xa1a", b"\x91" + b"\x81\xa0" * 150_000 + b"\x00", b"\x91\x00", b"\x91\x00"
    ),
    "a great arity": lambda: frame_of(*plain(many(b"\xa1a", 1), 1), *[b"\x90"] * 12, *[b"\xc0"] * N),
    "a count of 2^32 - 1": lambda: frame_of(b"\xdd\xff\xff\xff\xff", b"\x90", b"\x90", b"\x90"),
    "counts in counts": lambda: frame_of(b"\x91\xa1a", b"\x91\xc0", b"\xdd\x00\xff\xff\xff" * 2000, b"\x91\x00"),
    "an arity of 2^32 - 1": lambda: b"\x02\x05\x00\x00\x00\xdd\xff\xff\xff\xff",
    "only rids, broken": lambda: frame_of(distinct(N, wide)),
    "only empty rids, broken": lambda: frame_of(many(b"\xa0", 10 * N)),
    "a result of much text": lambda: b"\x01\x92\xa1r\xc6" + (10 * N).to_bytes(4, "big") + bytes(10 * N),
    "an error of wide text": lambda: (
        b"\x03\x92\xa1r\xdb" + (3 * N + 4).to_bytes(4, "big") + b"a" * (3 * N) + "\U0001f600".encode()
    ),
    "a result with a bomb": lambda: b"\x01\x93\xa1r\xc4\x00" + b"\x91" * 300_000 + b"\x00",
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("kind", [bytes, bytearray], ids=["bytes", "bytearray"])
def test_no_frame_costs_more_than_its_share_of_memory(case: str, kind: type) -> None:
    frame = kind(HOSTILE[case]())
    peak = wire.peak_of(lambda: decode_frame(frame, V1))
    assert peak <= 16 * len(frame) + MIB, f"{peak / len(frame):.1f} x the frame of {len(frame)} bytes"


SCALARS = {
    "ints": (19, b"\x05"),
    "nils": (19, b"\xc0"),
    "latencies of one byte are refused": (22, b"\x05"),
    "latencies": (22, b"\xca\x3f\x80\x00\x00"),
    "flags": (23, b"\xc3"),
    "opaque": (18, b"\x80"),
}


@pytest.mark.parametrize("case", SCALARS)
def test_no_scalar_column_costs_more_than_its_share_of_memory(case: str) -> None:
    position, unit = SCALARS[case]
    cells = [*plain(many(b"\xa0", N)), many(b"\x00", N), many(b"\x00", N), *[b"\x90"] * 18]
    cells[position] = many(unit, N)
    frame = frame_of(*cells)
    peak = wire.peak_of(lambda: decode_frame(frame, V2))
    assert peak <= 16 * len(frame) + MIB


def test_the_measure_of_memory_sees_what_a_generic_decode_costs() -> None:
    frame = HOSTILE["every finish an empty map"]()
    assert wire.peak_of(lambda: msgspec.msgpack.decode(frame[5:])) > 16 * len(frame) + MIB


@given(data=st.data())
def test_no_hostile_frame_costs_more_than_its_share_of_memory(data: st.DataObject) -> None:
    frame = data.draw(strategies.hostile_frames(V2))
    assert wire.peak_of(lambda: decode_frame(frame, V2)) <= 16 * len(frame) + MIB


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_frames_give_a_frame_or_a_frame_error(case: str) -> None:
    for schema in (V1, V2):
        try:
            decoded = decode_frame(HOSTILE[case](), schema)
        except FrameError as error:
            error.to_dict()
        else:
            assert decoded is not None


def test_a_deep_stack_turns_a_frame_into_a_frame_error_at_worst() -> None:
    """The library's recursion guard counts the caller's frames too; near the limit it may refuse, never raise something else."""
    frame = frame_of(b"\x91\xa1a", b"\x91\x81\xa1x" + b"\x91" * 60 + b"\xc0", b"\x91\x00", b"\x91\x00")

    def at(depth: int) -> str:
        if depth:
            return at(depth - 1)
        try:
            decode_frame(frame, V1)
        except FrameError as error:
            return error.reason
        return "accepted"

    assert {at(depth) for depth in (0, 200, 400, 600)} <= {"accepted", "header"}


@settings(max_examples=30)
@given(st.binary(max_size=300), st.sampled_from([V1, V2]), st.sampled_from([1, 2, 3]))
def test_noise_after_a_tag_is_a_frame_or_a_frame_error(noise: bytes, schema: Any, tag: int) -> None:
    with contextlib.suppress(FrameError):
        decode_frame(bytes((tag,)) + noise, schema)


def test_rids_beyond_the_bound_of_the_recovery_are_incomplete_not_unbounded() -> None:
    frame = frame_of(many(b"\xa0", 200_000))
    with pytest.raises(FrameError) as caught:
        decode_frame(frame, V1)
    assert caught.value.rids_complete is False
    assert len(caught.value.rids) < 40_000


def test_a_real_frame_of_many_requests_still_names_them_all() -> None:
    rids = [f"{i:032x}" for i in range(20_000)]
    header = msgspec.msgpack.encode([rids, [None], [], []])
    with pytest.raises(FrameError) as caught:
        decode_frame(b"\x02" + len(header).to_bytes(4, "little") + header, V1)
    assert caught.value.rids == rids
    assert caught.value.rids_complete
    assert np.array(caught.value.rids).shape == (20_000,)
