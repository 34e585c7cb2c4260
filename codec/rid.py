"""Request ids: how they are made, what the client sees of them, and which shard they belong to.

Owns: the three forms of a rid and the suffix that makes a client's rid unique. Rules it keeps:

* Minted: 32 lowercase hex digits. Health probes: ``HEALTH_CHECK_`` and 32 hex digits. A client's rid gets ``#`` and 16 hex
  digits (8 random per process, 8 from a counter), so that two live requests with one client rid are two requests inside.
  Keeping state by the client's own form is what made servers deliver one request's tokens to another, or die.
* The client only ever sees its own form back. The suffix is cut exactly once, so a client's rid that already looks suffixed
  survives. Matching is exact, never by prefix.
* A client's rid that starts with ``HEALTH_CHECK`` is refused: schedulers may skip such requests without an answer.
* The shard depends on the characters of the rid, the number of shards and the seed, and on nothing of the process.
"""

from __future__ import annotations

import os
import re
import threading
import zlib
from typing import Final

from .clientjson import check_text
from .errors import ValidationError, show
from .limits import default

HEALTH_PREFIX: Final = "HEALTH_CHECK"
_SUFFIX: Final = re.compile(r"#[0-9a-f]{16}\Z")
_MASK: Final = (1 << 64) - 1
_DRAWN_AT_ONCE: Final = 64
_new = str.__new__


class _Suffixes:
    """The process's suffixes: ``#`` + 8 random hex digits + an 8 digit counter.

    `next()` of an iterator is not a documented atomic operation without the GIL, so a lock guards the counter. When it wraps,
    and in a forked child, the random half is drawn anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.redraw()

    def redraw(self) -> None:
        self._head = "#" + os.urandom(4).hex()
        self._count = 0

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # the parent's lock may have been held by a thread that does not exist here
        self.redraw()

    def take(self) -> str:
        with self._lock:
            if self._count == 1 << 32:
                self.redraw()
            suffix = f"{self._head}{self._count:08x}"
            self._count += 1
        return suffix


class _Drawn:
    """Random hex digits, 32 at a time. They are drawn for many rids at once: asking the system costs more than the rest of a rid.

    A forked child draws its own, or parent and child would hand out the same ones.
    """

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._left: list[str] = []

    def take(self) -> str:
        with self._lock:
            return (self._left or self._draw()).pop()

    def _draw(self) -> list[str]:
        digits = os.urandom(16 * _DRAWN_AT_ONCE).hex()
        self._left = [digits[at : at + 32] for at in range(0, len(digits), 32)]
        return self._left


_suffixes: Final = _Suffixes()
_drawn: Final = _Drawn()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_suffixes.after_fork)
    os.register_at_fork(after_in_child=_drawn.after_fork)


def shard_of(rid: str, n: int, seed: int = 0) -> int:
    """The shard in ``range(n)`` of an internal rid: equal in every process and on every platform for equal arguments.

    CRC-32 alone is linear (rids that differ in a counter would fill the shards in a pattern), so one multiplication mixes it.
    """
    if n == 1:
        return 0
    mixed = (
        (zlib.crc32(rid.encode("utf-8", "surrogatepass")) ^ (seed * 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93
    ) & _MASK
    mixed ^= mixed >> 32
    return ((mixed * 0xD6E8FEB86659FD93 & _MASK) >> 32) * n >> 32


class Rid(str):
    """A request id in its internal form. It *is* the internal string, so it finds itself in a table keyed by plain strings.

    `client_facing` is what the client sees. Encoders that want an exact `str` (msgspec does) take ``str(rid)``.
    The constructor takes an internal form, like `from_wire`.
    """

    __slots__ = ("client_facing",)
    client_facing: str

    def __new__(cls, internal: str) -> Rid:
        rid = super().__new__(cls, internal)
        rid.client_facing = _SUFFIX.sub("", internal)
        return rid

    @classmethod
    def mint(cls) -> Rid:
        """A new rid for a request whose client gave none: 32 lowercase hex digits."""
        digits = _drawn.take()
        rid = _new(cls, digits)
        rid.client_facing = digits
        return rid

    @classmethod
    def health_check(cls) -> Rid:
        """A new rid for a health probe."""
        return cls(f"{HEALTH_PREFIX}_{_drawn.take()}")

    @classmethod
    def from_client(cls, rid: object, max_bytes: int = default("max_rid_bytes")) -> Rid:
        """A client's rid, made unique inside. ValidationError unless it is a string of 1 to `max_bytes` bytes of UTF-8."""
        client = check_client_rid(rid, max_bytes)
        made = _new(cls, client + _suffixes.take())
        made.client_facing = client
        return made

    @classmethod
    def from_wire(cls, internal: str) -> Rid:
        """The rid that has this internal form, in whatever process it was made."""
        return cls(internal)

    def shard(self, n: int, seed: int = 0) -> int:
        """The shard in ``range(n)`` that owns this request; see `shard_of`."""
        return shard_of(self, n, seed)

    def __reduce__(self) -> tuple[object, ...]:
        return (Rid, (str(self),))


def check_client_rid(rid: object, max_bytes: int = default("max_rid_bytes")) -> str:
    """`rid` itself if a client may use it; ValidationError if not. It takes no suffix, so a batch can be judged first."""
    if not isinstance(rid, str):
        raise ValidationError(f"rid must be a string, not {show(rid)}", field="rid")
    size = check_text("rid", rid)
    if not 0 < size <= max_bytes:
        raise ValidationError(f"rid must have 1 to {max_bytes} bytes of UTF-8, not {size}", field="rid")
    if rid.startswith(HEALTH_PREFIX):
        raise ValidationError(
            f"rid must not start with {HEALTH_PREFIX}, which is kept for health probes; got {show(rid)}", field="rid"
        )
    return str(rid)
