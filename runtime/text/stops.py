"""Stop strings: what may be sent, and where the text ends.

Owns: the hold-back rule and the cut. Rules it keeps:

* Held back is exactly the longest suffix of the text that is a proper prefix of one of the request's stops. It depends on
  the text alone, not on the chunks it came in.
* The work is linear in the text whatever the stops: a start of the held suffix only ever moves forward, and a position that
  was given up is never looked at again. No automaton is built, because 32 stops of 1024 bytes in each of 16 384 requests
  would be some 50 GB of nodes; the sorted stops answer "is this a proper prefix of one of them" with one bisection.
* The cut follows the stop that the finish reason names, at its leftmost place in the text that has not been sent, which is
  what the terminal chunk adds and what was held before it. Text that was sent is never shortened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

CACHE_SIZE: Final = 256
MEMO_SIZE: Final = 512
MEMO_CHARS: Final = 64
"""Sets, remembered texts of each, characters of a text: some 40 MB where clients send as many stops as they can."""


class StopSet:
    """All stop strings of a request, ready for the hold-back rule. Shared by every request with the same stops."""

    __slots__ = ("_first", "_sorted", "memo", "memo_size", "reach", "strings")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.strings = stops
        self._sorted = sorted({stop for stop in stops if stop})
        self._first = frozenset(stop[0] for stop in self._sorted)
        self.reach = max(map(len, self._sorted), default=1) - 1
        """The most characters that can ever be held."""
        self.memo: dict[str, int] = {}
        """Text -> characters of it that are held, for texts that came while nothing was held: tokens recur."""
        self.memo_size = MEMO_SIZE

    def held(self, text: str) -> int:
        """How many characters at the end of `text` must be held back.

        `text` is what was held before plus what is new; characters before it cannot matter, because a start that was
        given up can never become a stop again.
        """
        end = len(text)
        ordered, first = self._sorted, self._first
        for start in range(max(0, end - self.reach), end):
            if text[start] not in first:
                continue
            suffix = text[start:]
            place = bisect_right(ordered, suffix)  # an extension of `suffix` sorts directly behind it
            if place < len(ordered) and ordered[place].startswith(suffix):
                return end - start
        return 0

    def held_of_fresh(self, text: str) -> int:
        """`held(text)` for a text that nothing was held before, remembered."""
        known = self.memo.get(text)
        if known is None:
            known = self.held(text)
            if len(self.memo) < self.memo_size and len(text) <= MEMO_CHARS:
                self.memo[text] = known
        return known


class StopSets:
    """A bounded cache of stop sets by their strings; full, it is cleared whole. Sets in use live on, without their memo."""

    def __init__(self, size: int = CACHE_SIZE) -> None:
        self._size = size
        self._sets: dict[tuple[str, ...], StopSet] = {}

    def get(self, stops: tuple[str, ...]) -> StopSet | None:
        """The set for `stops`; None where there is nothing to hold."""
        if not stops:
            return None
        found = self._sets.get(stops)
        if found is None:
            found = StopSet(stops)
            if len(self._sets) >= self._size:
                evicted, self._sets = self._sets, {}
                for old in evicted.values():
                    old.memo_size = 0
                    old.memo = {}
            self._sets[stops] = found
        return found


def cut(text: str, matched: str, stops: tuple[str, ...], stop_regexes: tuple[str, ...], no_stop_trim: bool) -> str:
    """The unsent text of a request that ended with `matched`: up to the stop, or through it with `no_stop_trim`.

    A stop_regex finish carries the pattern in `matched`; then nothing is cut. Unchanged also where the text does not
    contain `matched`, or `matched` is empty (it would be found everywhere).
    """
    if not matched or (matched in stop_regexes and matched not in stops):
        return text
    place = text.find(matched)
    if place < 0:
        return text
    return text[: place + len(matched)] if no_stop_trim else text[:place]


def without_stop_token(ids: list[int], matched: int | Sequence[int]) -> list[int]:
    """The ids of the terminal chunk whose text is shown: up to the matched stop token or sequence of tokens.

    It stands at the end, where schedulers cut; what a scheduler sent beyond it is not shown either. Of a sequence that
    began in an earlier chunk only the part in this chunk can still be taken back.
    """
    pattern = [matched] if isinstance(matched, int) else list(matched)
    size = len(pattern)
    if not size or not ids:
        return ids
    tail = min(size, len(ids))
    if ids[-tail:] == pattern[-tail:]:
        return ids[:-tail]
    for start in range(len(ids) - size + 1):
        if ids[start : start + size] == pattern:
            return ids[:start]
    return ids
