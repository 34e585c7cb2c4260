"""The table of live requests: who is in the house, counted and bounded, from admission to the terminal item.

Owns: the booking of slots and bytes, the way from a client-facing rid to the requests that carry it, and the rule that a request
is asked to abort at most once. Rules it keeps:

* Locking protocol. One lock guards everything here, and no other lock is taken under it.
* A slot is booked before a request is put anywhere, and given back at its terminal. Every lane between stages that has no capacity
  of its own holds at most a fixed number of messages for each booked slot, so this table bounds them all.
* Admission closes here and nowhere else: after `close_admission` no new entry appears, so waiting for the table to be empty ends.
* It holds lives (and through them sinks), never handles: a dropped handle must be collectable.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..codec.errors import HeadraceError, QueueFullError, ShuttingDownError
from .channel import DEFAULT_PRIMITIVES, Primitives
from .stages.life import Life


class LiveTable:
    """Bounded by `max_live` requests and `max_bytes` of admitted requests that the ring has not taken yet."""

    def __init__(self, max_live: int, max_bytes: int, primitives: Primitives = DEFAULT_PRIMITIVES) -> None:
        self._lock = primitives.Lock()
        self._empty = primitives.Condition(self._lock)
        self._max_live = max_live
        self._max_bytes = max_bytes
        self._lives: dict[str, Life] = {}
        self._shown: dict[str, dict[str, None]] = {}
        self._asked: set[str] = set()
        self._owed: set[str] = set()
        self._bytes: dict[str, int] = {}
        self._nbytes = 0
        self._in_ring = 0  # bytes in the ring, or more: what it has given since it was last asked is not known here
        self._pushed = 0  # bytes that have ever reached the ring
        self._refused: dict[str, int] = {}
        self._refusal: HeadraceError | None = ShuttingDownError("the manager is not started")

    def open_admission(self) -> None:
        """Admit from now on."""
        with self._lock:
            self._refusal = None

    def close_admission(self, refusal: HeadraceError) -> None:
        """Refuse every later `book` with `refusal`. The first reason is kept."""
        with self._lock:
            if self._refusal is None or isinstance(refusal, type(self._refusal)):
                self._refusal = refusal

    def book(self, lives: Sequence[Life]) -> bool:
        """A slot and the bytes for each of `lives`, or for none: raises QueueFullError or the refusal.

        False, and nothing is booked, if the bytes may be too many: what has left the ring since it was last asked is not known
        here. Then `book_exactly` decides.
        """
        nbytes = 0
        for life in lives:
            nbytes += life.nbytes
        with self._lock:
            if self._refusal is not None or len(self._lives) + len(lives) > self._max_live:
                self._check_slots(lives)
            if self._nbytes + self._in_ring + nbytes > self._max_bytes:
                return False
            self._enter(lives, nbytes)
            return True

    def mark(self) -> int:
        """For `book_exactly`: how many bytes had reached the ring when it was asked."""
        with self._lock:
            return self._pushed

    def book_exactly(self, lives: Sequence[Life], ring_bytes: int, mark: int) -> None:
        """`book`, knowing that the ring held `ring_bytes` at some moment after `mark` was taken."""
        nbytes = sum(life.nbytes for life in lives)
        with self._lock:
            self._in_ring = min(self._in_ring, ring_bytes + self._pushed - mark)
            self._check_slots(lives)
            if self._nbytes + self._in_ring + nbytes > self._max_bytes:
                self._refuse("admitted_bytes", len(lives))
                raise QueueFullError(
                    f"{self._max_bytes} bytes of requests are waiting, which is the limit; try again later"
                )
            self._enter(lives, nbytes)

    def _check_slots(self, lives: Sequence[Life]) -> None:
        if self._refusal is not None:
            raise type(self._refusal)(self._refusal.message)
        if len(self._lives) + len(lives) > self._max_live:
            self._refuse("max_live_requests", len(lives))
            raise QueueFullError(f"{self._max_live} requests are live, which is the limit; try again later")

    def _enter(self, lives: Sequence[Life], nbytes: int) -> None:
        for life in lives:
            rid = life.rid
            self._lives[rid] = life
            self._bytes[rid] = life.nbytes
            if life.shown_rid is not None and life.shown_rid != rid:
                self._shown.setdefault(life.shown_rid, {})[rid] = None
        self._nbytes += nbytes

    def refused(self, limit: str, count: int) -> None:
        """`count` requests were refused on the caller's thread, at the limit of this name."""
        with self._lock:
            self._refuse(limit, count)

    def _refuse(self, limit: str, count: int) -> None:
        self._refused[limit] = self._refused.get(limit, 0) + count

    def refusals(self) -> dict[str, int]:
        """Refused requests by the name of the limit, so far."""
        with self._lock:
            return dict(self._refused)

    def pushed(self, lives: Sequence[Life], nbytes: int) -> None:
        """The ring counts the bytes of `lives` from now on: `nbytes`."""
        with self._lock:
            for life in lives:
                self._nbytes -= self._bytes.pop(life.rid, 0)
            self._in_ring += nbytes
            self._pushed += nbytes

    def end(self, rid: str) -> None:
        """The terminal item of `rid` is out: give its slot back."""
        with self._lock:
            life = self._lives.pop(rid, None)
            if life is None:
                return
            self._nbytes -= self._bytes.pop(rid, 0)
            self._asked.discard(rid)
            if life.shown_rid is not None and life.shown_rid != rid:
                mates = self._shown[life.shown_rid]
                del mates[rid]
                if not mates:
                    del self._shown[life.shown_rid]
            if not self._lives:
                self._empty.notify_all()

    def owe(self, rid: str) -> None:
        """An abort message for `rid` is owed to the ring. Called before `end`, so that one of the two tables always has it."""
        with self._lock:
            self._owed.add(rid)

    def settled(self, rid: str) -> None:
        """The abort of `rid` is in the ring, or can never be."""
        with self._lock:
            self._owed.discard(rid)
            if not self._owed:
                self._empty.notify_all()

    def wait_settled(self, timeout: float | None) -> bool:
        """True as soon as no abort is owed; False when `timeout` seconds pass first."""
        with self._lock:
            return bool(self._empty.wait_for(lambda: not self._owed, timeout))

    def claim_abort(self, rid: str) -> Life | None:
        """The life to abort, the first time it is asked for while it is live; None for an unknown rid and any later time."""
        with self._lock:
            life = self._lives.get(rid)
            if life is None or rid in self._asked:
                return None
            self._asked.add(rid)
            return life

    def named(self, shown_rid: str) -> list[str]:
        """The live requests whose client-facing rid is exactly `shown_rid`."""
        with self._lock:
            found = list(self._shown.get(shown_rid, ()))
            life = self._lives.get(shown_rid)  # a rid that headrace made is shown as it is
            if life is not None and life.shown_rid == shown_rid:
                found.append(shown_rid)
            return found

    def find(self, rid: str) -> Life | None:
        """The live request with the internal rid `rid`."""
        with self._lock:
            return self._lives.get(rid)

    def lives(self) -> list[Life]:
        """Every live request."""
        with self._lock:
            return list(self._lives.values())

    def wait_empty(self, timeout: float | None) -> bool:
        """True as soon as nothing is live; False when `timeout` seconds pass first."""
        with self._lock:
            return bool(self._empty.wait_for(lambda: not self._lives, timeout))

    @property
    def nbytes(self) -> int:
        """Bytes of admitted requests that the ring has not taken yet."""
        with self._lock:
            return self._nbytes

    def __len__(self) -> int:
        with self._lock:
            return len(self._lives)

    def __contains__(self, rid: object) -> bool:
        with self._lock:
            return rid in self._lives
