"""Decoders with a planted fault, to test the fuzzer with. Each accepts by returning and rejects with `Refused`."""

from __future__ import annotations

import time

import wire_helpers as wire
from headrace.codec import FrameError, decode_frame, load_schema
from headrace.codec.lies import array, entries, join_frame, split_frame

V1 = load_schema("v1")


class Refused(Exception):
    """How these decoders say no."""


def right(data: bytes) -> None:
    """No fault at all."""
    try:
        decode_frame(data, V1)
    except FrameError as error:
        raise Refused(error.reason) from None


def off_by_one(data: bytes) -> None:
    """The data may be one byte longer than the header says."""
    try:
        right(data)
    except Refused as error:
        if str(error) != "data_length":
            raise
        right(data[:-1])


def clamp(data: bytes) -> None:
    """Data that is too long is cut to what the header says, instead of being rejected."""
    try:
        right(data)
    except Refused as error:
        if str(error) != "data_length":
            raise
        if wire.oracle(data, V1, {"data_length"})[0] == "reject":
            raise
        needs = next((n for n in range(len(data), 0, -1) if wire.oracle(data[:n], V1)[0] != "reject"), None)
        if needs is None:
            raise


def short_column(data: bytes) -> None:
    """A finish column that is too short is filled up with nil."""
    try:
        right(data)
    except Refused as error:
        if str(error) != "column_length":
            raise
        cells, rest = split_frame(data)
        n, finish = len(entries(cells[0])), entries(cells[1])
        right(join_frame([cells[0], array(finish + [b"\xc0"] * (n - len(finish))), *cells[2:]], rest))


def foreign(data: bytes) -> None:
    """An index outside the header escapes as IndexError."""
    right(data)
    cells, _ = split_frame(data) if data[0] == 2 else ([b"", b"", b"", b"", b""], b"")
    cells[4]


def hang(data: bytes) -> None:
    """A RESULT frame is never finished with."""
    right(data)
    while data[0] == 1:
        time.sleep(0.001)


def greedy(data: bytes) -> None:
    """Memory is taken by what a length field says."""
    if len(data) > 5 and data[0] == 2 and int.from_bytes(data[1:5], "little") > 2**31:
        kept = bytearray(300 << 20)
        kept[::4096] = b"x" * len(kept[::4096])
    right(data)
