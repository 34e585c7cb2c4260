"""Sets of characters for the analysis of stop patterns, as bit masks over the atoms of one pattern.

Owns: what an item of a pattern (a literal, a set, a category) may match. Rules it keeps:

* The atoms are each of the first 256 code points alone; above them each interval between the pattern's own boundaries, times
  {decimal digit, other word character, space, other}; and the end of the text. A mask is exact but for intervals, where all
  four kinds are taken to occur.
* A mask is a superset of what the item matches, so that two masks that do not meet are two items that cannot either. Where case
  is ignored everything above ASCII is taken as one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any, Final

_LATIN: Final = 256


class Atoms:
    """The alphabet of one pattern, and which part of it an item of that pattern may match."""

    def __init__(self, tree: Any) -> None:
        cuts = {_LATIN, 0x110000}
        self._collect(tree, cuts)
        self._known: dict[tuple[Any, Any, int], int] = {}
        self._spans: list[tuple[int, int, int, tuple[int, int, int, int]]] = []  # lo, hi, mask, mask per kind
        bit = _LATIN
        edges = sorted(cuts)
        for lo, hi in pairwise(edges):
            kinds = (_kind(lo),) if hi == lo + 1 else (0, 1, 2, 3)
            masks = [0, 0, 0, 0]
            for kind in kinds:
                masks[kind] = 1 << bit
                bit += 1
            self._spans.append((lo, hi, sum(masks), (masks[0], masks[1], masks[2], masks[3])))
        self.end = 1 << bit
        self.chars = self.end - 1
        self.all = self.chars | self.end
        self.newline = 1 << 10
        self._above_ascii = self.chars & ~((1 << 128) - 1)

    def _collect(self, node: Any, cuts: set[int]) -> None:
        if isinstance(node, sre_parser.SubPattern):
            node = node.data
        if isinstance(node, (list, tuple)):
            if len(node) == 2 and node[0] in (sre.LITERAL, sre.NOT_LITERAL):
                cuts.update(c for c in (node[1], node[1] + 1) if c > _LATIN)
            elif len(node) == 2 and node[0] is sre.RANGE:
                cuts.update(c for c in (node[1][0], node[1][1] + 1) if c > _LATIN)
            else:
                for part in node:
                    if isinstance(part, (list, tuple, sre_parser.SubPattern)):
                        self._collect(part, cuts)

    def span(self, lo: int, hi: int) -> int:
        """Atoms of the code points in [lo, hi)."""
        mask = ((1 << min(hi, _LATIN)) - 1) & ~((1 << min(lo, _LATIN)) - 1)
        for a, b, atoms, _ in self._spans:
            if lo <= a and b <= hi:
                mask |= atoms
        return mask

    def _category(self, category: Any, flags: int) -> int:
        name = str(category).removeprefix("CATEGORY_")
        negated = name.startswith("NOT_")
        wanted = {"DIGIT": (0,), "WORD": (0, 1), "SPACE": (2,)}.get(name.removeprefix("NOT_"))
        if wanted is None:
            return self.chars
        mask = _latin(wanted, 128 if flags & re.ASCII else _LATIN)
        if not flags & re.ASCII:
            for *_, kinds in self._spans:
                mask |= sum(kinds[kind] for kind in wanted)
        return self.chars & ~mask if negated else mask

    def of(self, op: Any, arg: Any, flags: int) -> int:
        """Atoms that one consuming item may match (a superset). Worked out once: nested groups ask for it again and again."""
        key = (op, arg if op is not sre.IN else id(arg), flags)
        mask = self._known.get(key)
        if mask is None:
            mask = self._known[key] = self._of(op, arg, flags)
        return mask

    def _of(self, op: Any, arg: Any, flags: int) -> int:
        if op is sre.ANY:
            return self.chars if flags & re.DOTALL else self.chars & ~self.newline
        if op is sre.LITERAL:
            return self._fold(self.span(arg, arg + 1), flags)
        if op is sre.NOT_LITERAL:
            return self.chars & ~self._unfold(self.span(arg, arg + 1), flags)
        mask, negated = 0, False
        for item, value in arg:  # IN
            if item is sre.NEGATE:
                negated = True
            elif item is sre.LITERAL:
                mask |= self.span(value, value + 1)
            elif item is sre.RANGE:
                mask |= self.span(value[0], value[1] + 1)
            elif item is sre.CATEGORY:
                mask |= self._category(value, flags)
            else:
                return self.chars
        if negated:
            return self.chars & ~self._unfold(mask, flags)
        return self._fold(mask, flags)

    def _fold(self, mask: int, flags: int) -> int:
        """A superset of what `mask` matches without regard to case: ASCII exactly, everything above it as one."""
        if not flags & re.IGNORECASE:
            return mask
        upper, lower = mask >> 65 & 0x3FFFFFF, mask >> 97 & 0x3FFFFFF
        both = upper | lower
        folded = mask | both << 65 | both << 97
        if flags & re.ASCII:
            return folded
        if mask & self._above_ascii:  # the long s, the Kelvin sign and the dotted and dotless i fold into ASCII
            folded |= sum(1 << ord(c) for c in "sSkKiI")
        return folded | self._above_ascii if both or mask & self._above_ascii else folded

    def _unfold(self, mask: int, flags: int) -> int:
        """A subset of what `mask` matches, so that its complement is a superset."""
        if not flags & re.IGNORECASE:
            return mask
        return mask & ((1 << 128) - 1)


def _kind(code: int) -> int:
    """0 decimal digit, 1 other word character, 2 space, 3 other: as `re` sees the code point."""
    c = chr(code)
    if c.isdecimal():
        return 0
    if c.isalnum() or c == "_":
        return 1
    return 2 if c.isspace() else 3


@lru_cache
def _latin(kinds: tuple[int, ...], end: int) -> int:
    """The code points below `end` of these kinds."""
    return sum(1 << c for c in range(end) if _kind(c) in kinds)
