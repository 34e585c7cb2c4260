"""A bounded msgpack walker: steps over values and reads strict ones, without recursion and without building what it skips.

Owns: everything that looks at msgpack bytes where the library's decoder cannot be used: finding the rids of a broken header,
the boundaries of finish reasons, byte offsets for `inspect`, and maps that Python cannot hold without loss. Rules it keeps:

* Time and memory are bounded by the bytes that are there; a count in the data never sizes an allocation.
* No recursion, so a depth bomb is just a long walk.
"""

from __future__ import annotations

import struct
from typing import Final

Buffer = bytes | bytearray | memoryview


class Malformed(Exception):
    """The bytes at `at` are not msgpack, or end too early."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(f"byte {at}: {what}")
        self.at = at


class Lossy(Exception):
    """Well-formed msgpack that cannot become a Python value without loss."""


# For each first byte: (bytes of the token including the first, or 0 where a length field follows).
_FIXED: Final = tuple(
    1
    if b < 0xA0 or b >= 0xE0 or b in (0xC0, 0xC2, 0xC3)
    else 1 + (b & 31)
    if b < 0xC0
    else {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.get(b, 0)
    or {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}.get(b, 0)
    for b in range(256)
)
# Length field: bytes of it, and bytes after it that belong to the token besides the payload (an ext's type).
_SIZED: Final = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # length field, values per entry


def token(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    """Step over one token at `at`: (position after it, how many values follow inside it). Raises Malformed."""
    if at >= end:
        raise Malformed(at, "ends where a value should start")
    first = buffer[at]
    inside = 0
    size = _FIXED[first]
    if size:
        if 0x90 <= first < 0xA0:
            inside = first & 15
        elif 0x80 <= first < 0x90:
            inside = (first & 15) * 2
    elif first in _SIZED:
        width, extra = _SIZED[first]
        if at + 1 + width > end:
            raise Malformed(at, "ends inside a length")
        size = 1 + width + extra + int.from_bytes(buffer[at + 1 : at + 1 + width], "big")
    elif first in _COUNTED:
        width, per = _COUNTED[first]
        if at + 1 + width > end:
            raise Malformed(at, "ends inside a length")
        size = 1 + width
        inside = per * int.from_bytes(buffer[at + 1 : at + 1 + width], "big")
    else:
        raise Malformed(at, f"0x{first:02x} starts no msgpack value")
    if at + size > end:
        raise Malformed(at, f"a value of {size} bytes where {end - at} are left")
    return at + size, inside


def skip(buffer: Buffer, at: int, end: int) -> int:
    """The position after the whole value at `at`. Raises Malformed. Time: the bytes stepped over."""
    left = 1
    while left:
        at, inside = token(buffer, at, end)
        left += inside - 1
    return at


def array_head(buffer: Buffer, at: int, end: int) -> tuple[int, int] | None:
    """(entries, position of the first) of the array at `at`; None when there is no readable array head."""
    if at >= end:
        return None
    first = buffer[at]
    if 0x90 <= first < 0xA0:
        return first & 15, at + 1
    if first == 0xDC and at + 3 <= end:
        return int.from_bytes(buffer[at + 1 : at + 3], "big"), at + 3
    if first == 0xDD and at + 5 <= end:
        return int.from_bytes(buffer[at + 1 : at + 5], "big"), at + 5
    return None


def _str_start(first: int) -> int:
    """Bytes before the text of a str whose first byte is `first`; 0 when it is no str."""
    if 0xA0 <= first < 0xC0:
        return 1
    return {0xD9: 2, 0xDA: 3, 0xDB: 5}.get(first, 0)


def read_str(buffer: Buffer, at: int, end: int) -> str | None:
    """The str at `at`; None when there is none, or not whole, or not UTF-8."""
    try:
        after = skip(buffer, at, end)
        text = _str_start(buffer[at])
        return str(buffer[at + text : after], "utf-8") if text else None
    except (Malformed, UnicodeDecodeError):
        return None


def recover_rids(buffer: Buffer, start: int, end: int, limit: int) -> tuple[list[str], bool]:
    """The str entries of position 0 of the header at `start`, and whether they are all of them.

    Reads nothing but position 0, whatever the header's arity and whatever follows. At most `limit` entries are read (a hostile
    frame must not turn one byte into one Python string each for ever); beyond it the list counts as incomplete.
    """
    rids: list[str] = []
    head = array_head(buffer, start, end)
    if head is None or head[0] == 0:
        return rids, False
    column = array_head(buffer, head[1], end)
    if column is None:
        return rids, False
    entries, at = column
    complete = True
    for read in range(entries):
        if read >= limit:
            return rids, False
        try:
            after = skip(buffer, at, end)
        except Malformed:
            return rids, False
        text = _str_start(buffer[at])
        if text:
            try:
                rids.append(str(buffer[at + text : after], "utf-8"))
            except UnicodeDecodeError:
                complete = False
        else:
            complete = False
        at = after
    return rids, complete


_NUMBERS: Final = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
MAX_DEPTH: Final = 64


def read_strict(buffer: Buffer, at: int, end: int, depth: int = 0) -> tuple[object, int]:
    """(value, position after it) of the value at `at`, in plain Python types only.

    Raises Lossy for what they cannot hold: extension types and timestamps, map keys that are unhashable or equal to an
    earlier one, text that is not UTF-8, nesting deeper than 64. Raises Malformed for bytes that are no msgpack.
    """
    if depth > MAX_DEPTH:
        raise Lossy(f"nested deeper than {MAX_DEPTH}")
    after, inside = token(buffer, at, end)
    first = buffer[at]
    if first < 0x80:
        return first, after
    if first >= 0xE0:
        return first - 256, after
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], after
    if first in _NUMBERS:
        return struct.unpack_from(_NUMBERS[first], buffer, at + 1)[0], after
    text = _str_start(first)
    if text:
        try:
            return str(buffer[at + text : after], "utf-8"), after
        except UnicodeDecodeError:
            raise Lossy("text that is not UTF-8") from None
    if first in (0xC4, 0xC5, 0xC6):
        return bytes(buffer[at + 1 + _SIZED[first][0] : after]), after
    if 0x90 <= first < 0xA0 or first in (0xDC, 0xDD):
        items: list[object] = []
        for _ in range(inside):
            item, after = read_strict(buffer, after, end, depth + 1)
            items.append(item)
        return items, after
    if 0x80 <= first < 0x90 or first in (0xDE, 0xDF):
        table: dict[object, object] = {}
        for _ in range(inside // 2):
            key, after = read_strict(buffer, after, end, depth + 1)
            if isinstance(key, (list, dict)):
                raise Lossy("a map key that is not hashable")
            if key in table:
                raise Lossy("a map key that is there twice")
            table[key], after = read_strict(buffer, after, end, depth + 1)
        return table, after
    raise Lossy("an extension type")
