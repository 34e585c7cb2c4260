"""stop_regex: which patterns are admitted, how wide they match, and the compiled form.

Owns: the verdict on a client's pattern and the cache of compiled ones. A stop pattern is searched again at every step, on a
backtracking engine that cannot be interrupted, so one bad pattern stops the scheduler for everyone. The verdict comes from
the parse tree of Python's own engine, the one that will run it; an analyser of another dialect admits patterns this engine
cannot compile and sizes windows for matches it does not make.

THE RULE. From any one starting position, a failing match may take at most C * (n + 1) steps on a text of length n, where C
depends on the pattern and the limits below and not on the text. (A *search* tries every position; that factor is the
scheduler's and the same for every pattern.) In the words of the code:

* A *choice* is an alternation or a repetition whose count may vary. It is *decided* when the next character alone tells which
  way can succeed (the sets of first characters are disjoint), or when nothing that could fail comes after it. Otherwise it is
  *open*: on a failure the engine comes back and tries the other ways.
* A repetition is *long* if it is unbounded or can match more than 64 characters. At most one open choice may be long on any
  path through the pattern, and after it nothing long may follow that could still fail: ``.*x`` is admitted, ``.*.*x``,
  ``a*a*b`` and ``.*a+b`` are not.
* The body of a long repetition must match at least one character and hold no open choice, or the ways multiply: ``(a+)+b``,
  ``(a|aa)+b`` and ``(a*)*b`` are refused. Nothing long may hide in a lookaround inside one either.
* Open choices that are not long multiply to at most 256 ways: ``(a?){20}`` is refused.
* A back-reference may be followed by anything, so what stands before it is open; to a long group it counts as long.
* A pattern that matches nothing but the empty string, or matches the empty text, would stop a request at once: refused.

The rule is an upper bound: it refuses some harmless patterns. `tests/test_ingress_stop_regex.py` runs a backtracking matcher
that counts its steps over a corpus of bad patterns and over random admitted ones.
"""

from __future__ import annotations

import re
import threading
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple

from .clientjson import check_text
from .errors import ValidationError, show
from .limits import default
from .regex_atoms import Atoms

UNBOUNDED: Final = 1 << 30
"""The window of a pattern without a maximal width."""

_LONG: Final = 64
_WAYS: Final = 256

_cache: dict[str, tuple[re.Pattern[str], int]] = {}
_cache_lock: Final = threading.Lock()


def compile_stop_regex(pattern: object) -> tuple[re.Pattern[str], int]:
    """The compiled pattern and its window in characters: the maximal width of a match and of what lookarounds see beside it.

    2^30 when that is unbounded.

    ValidationError (field ``stop_regex``) when it is not a string, does not compile, or breaks the rule above; how long it may
    be is for `SamplingParams.normalize` to say.
    Only successes are cached; a full cache is cleared whole, because clients choose the keys.
    """
    if isinstance(pattern, str):
        hit = _cache.get(pattern)  # a dict read is safe beside a locked writer, with or without the GIL
        if hit is not None:
            return hit
    entry = _judge(pattern)
    with _cache_lock:
        if len(_cache) >= default("regex_cache_size"):
            _cache.clear()
        _cache[entry[0].pattern] = entry
    return entry


def _refuse(pattern: object, why: str) -> ValidationError:
    return ValidationError(f"stop_regex {show(pattern)} {why}", field="stop_regex")


def _judge(pattern: object) -> tuple[re.Pattern[str], int]:
    if not isinstance(pattern, str):
        raise _refuse(pattern, "is not a string")
    if not pattern:
        raise _refuse(pattern, "is empty")
    check_text("stop_regex", pattern)
    if _ambiguous_set(pattern):
        raise _refuse(
            pattern,
            "holds a character set that Python may read differently one day ('[[', '--', '&&', '~~' or '||'); escape it",
        )
    try:
        tree = sre_parser.parse(pattern)
        compiled = re.compile(pattern)
        width = int(tree.getwidth()[1])
        window = width + sum(_context(tree))
    except Exception as error:  # re.error, OverflowError, RecursionError: whatever is raised, the pattern is at fault
        words = str(error) or type(error).__name__
        words = words if words.isprintable() else ascii(words)[1:-1]
        raise _refuse(pattern, f"does not compile: {words[:200]}") from None
    try:
        _Analysis(tree).run()
    except _Inadmissible as why:
        raise _refuse(pattern, f"may backtrack too much: {why}") from None
    except RecursionError:
        raise _refuse(pattern, "is nested too deeply") from None
    if width == 0 or compiled.search("") is not None:  # only now: a bad pattern can hang on the empty text too
        raise _refuse(pattern, "matches the empty string, so it would stop every request at once")
    return compiled, min(window, UNBOUNDED)


def _context(tree: Any) -> tuple[int, int]:
    """How far lookarounds look before and behind a match: text that a window must hold too, or the pattern never matches."""
    behind = ahead = 0
    for op, arg in tree.data:
        for body in [arg[2]] if op in _REPEATS else _parts(op, arg):
            inner = _context(body)
            if op in (sre.ASSERT, sre.ASSERT_NOT):
                reach = sum(inner) + int(body.getwidth()[1])
                inner = (reach, 0) if arg[0] < 0 else (0, reach)
            behind, ahead = max(behind, inner[0]), max(ahead, inner[1])
    return behind, ahead


def _ambiguous_set(pattern: str) -> bool:
    """True where the parser would issue a FutureWarning, which would print a client's pattern on our standard error."""
    inside, i = False, 0
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            i += 1
        elif not inside and c == "[":
            if pattern.startswith("[", i + 1):
                return True
            inside = True
            i += pattern.startswith("^", i + 1)
            i += pattern.startswith("]", i + 1)  # a bracket that comes first is a member
        elif inside and c == "]":
            inside = False
        elif inside and c in "-&~|" and pattern.startswith(c, i + 1):
            return True
        i += 1
    return False


class _Inadmissible(Exception):
    """Why a pattern is refused, in words that follow "may backtrack too much"."""


class _Cost(NamedTuple):
    """At most ``factor * n ** long`` of something (`long` is 0 or 1)."""

    long: int
    factor: int


_ONE: Final = _Cost(0, 1)
_ITEMS: Final = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
_REPEATS: Final = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)


class _Next(NamedTuple):
    """A piece of the pattern together with everything after it."""

    first: int
    """Atoms that the next character may be (or the end of the text) if this is to succeed; any other fails in O(1) steps."""
    sure: bool
    """It cannot fail."""
    cost: _Cost
    """Steps until it has failed."""
    ways: _Cost
    """How many ends the piece itself has, from one start."""


def _product(a: _Cost, b: _Cost, what: str) -> _Cost:
    if a.long + b.long > 1:
        raise _Inadmissible(what)
    if a.factor * b.factor > _WAYS:
        raise _Inadmissible(f"its choices multiply to more than {_WAYS} ways")
    return _Cost(a.long + b.long, a.factor * b.factor)


_TWO_LONG: Final = "after an unbounded (or long) choice that what follows can overlap, another long repetition follows"
_LONG_BODY: Final = "a long repetition repeats something that can match in more than one way"


class _Analysis:
    """One walk over the parse tree, from the right to the left, each piece knowing what comes after it."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.flags = int(tree.state.flags)
        self.widths = tree.state.groupwidths
        self.atoms = Atoms(tree)
        # Every level of nesting asks for what its insides begin with; the tree lives as long as these, so ids are names.
        self._firsts: dict[tuple[int, int, int], int] = {}
        self._long: dict[int, bool] = {}

    def run(self) -> None:
        self.walk(self.tree, self.flags, _Next(self.atoms.all, True, _ONE, _ONE), False)

    # ---- first characters -----------------------------------------------------------------------------------------

    def first(self, seq: Any, flags: int, after: int) -> int:
        """First atoms of `seq` with something behind it whose first atoms are `after`."""
        key = (id(seq), flags, after)
        mask = self._firsts.get(key)
        if mask is None:
            mask = after
            for op, arg in reversed(seq.data):
                mask = self.first_of(op, arg, flags, mask)
            self._firsts[key] = mask
        return mask

    def first_of(self, op: Any, arg: Any, flags: int, after: int) -> int:
        if op in _ITEMS:
            return self.atoms.of(op, arg, flags)
        if op is sre.SUBPATTERN:
            return self.first(arg[3], (flags | arg[1]) & ~arg[2], after)
        if op is sre.ATOMIC_GROUP:
            return self.first(arg, flags, after)
        if op is sre.BRANCH:
            mask = 0
            for body in arg[1]:
                mask |= self.first(body, flags, after)
            return mask
        if op in _REPEATS:
            low, high, body = arg
            return (self.first(body, flags, after) if high else 0) | (0 if low else after)
        if op is sre.AT and arg is sre.AT_END:
            return after & (self.atoms.newline | self.atoms.end)
        if op is sre.AT and arg is sre.AT_END_STRING:
            return after & self.atoms.end
        if op in (sre.ASSERT, sre.ASSERT_NOT):
            if self.is_long(arg[1]):
                return self.atoms.all  # it runs before the first character is judged, so failing there is not cheap
            return after & self.first(arg[1], flags, self.atoms.all) if op is sre.ASSERT and arg[0] > 0 else after
        if op is sre.FAILURE:
            return 0
        return after if op is sre.AT else self.atoms.all

    def is_long(self, seq: Any) -> bool:
        """Whether anything in `seq`, however deep, can look further than the limit."""
        if id(seq) not in self._long:
            self._long[id(seq)] = any(self._item_is_long(op, arg) for op, arg in seq.data)
        return self._long[id(seq)]

    def _item_is_long(self, op: Any, arg: Any) -> bool:
        if op in _REPEATS:
            _, high, body = arg
            return (int(high) > 1 and int(high) * max(1, int(body.getwidth()[1])) > _LONG) or self.is_long(body)
        if op is sre.GROUPREF:
            return self.long_group(arg)
        return any(self.is_long(part) for part in _parts(op, arg))

    def long_group(self, group: int) -> bool:
        return self.widths[group] is None or int(self.widths[group][1]) > _LONG

    # ---- cost -----------------------------------------------------------------------------------------------------

    def walk(self, seq: Any, flags: int, after: _Next, looped: bool) -> _Next:
        """`seq` with `after` behind it. `looped`: inside a long repetition, where nothing may be explored in vain."""
        ways = _ONE
        for op, arg in reversed(seq.data):
            after = self.item(op, arg, flags, after, looped)
            ways = _product(ways, after.ways, _TWO_LONG)
        return after._replace(ways=ways)

    def item(self, op: Any, arg: Any, flags: int, after: _Next, looped: bool) -> _Next:
        first = self.first_of(op, arg, flags, after.first)
        if op in _ITEMS or op is sre.AT:
            return _Next(first, False, after.cost, _ONE)
        if op is sre.SUBPATTERN:
            return self.walk(arg[3], (flags | arg[1]) & ~arg[2], after, looped)
        if op is sre.BRANCH:
            return self.choice([self.walk(body, flags, after, looped) for body in arg[1]], after, looped)
        if op in _REPEATS:
            low, high, body = int(arg[0]), int(arg[1]), arg[2]
            if high == 0:
                return after._replace(ways=_ONE)
            if high == 1 and op is not sre.POSSESSIVE_REPEAT:
                once = self.walk(body, flags, after, looped)
                return once if low else self.choice([once, after._replace(ways=_ONE)], after, looped)
            return self.repeat(op, low, high, body, flags, after, looped, first)
        if op is sre.ATOMIC_GROUP and looped:
            return self.walk(arg, flags, after, looped)
        if op in (sre.ASSERT, sre.ASSERT_NOT, sre.ATOMIC_GROUP):
            inner = self.walk(
                arg if op is sre.ATOMIC_GROUP else arg[1], flags, _Next(self.atoms.all, True, _ONE, _ONE), looped
            )
            if looped and inner.cost.long:
                raise _Inadmissible("a lookaround inside a long repetition looks arbitrarily far")
            return _Next(first, False, _max(inner.cost, after.cost), _ONE)
        if op is sre.GROUPREF:
            return _Next(first, False, _max(_Cost(int(self.long_group(arg)), 1), after.cost), _ONE)
        if op is sre.GROUPREF_EXISTS:
            arms = [self.walk(body, flags, after, looped) for body in arg[1:] if body is not None]
            return self.choice([*arms, after._replace(ways=_ONE)], after, looped)._replace(first=first)
        if op is sre.FAILURE:
            return _Next(0, False, _ONE, _ONE)
        raise _Inadmissible(f"{op} is not known to the analysis")

    def choice(self, arms: list[_Next], after: _Next, looped: bool) -> _Next:
        """An alternation: arms that share a first character are rivals, and on a failure all of them are tried."""
        first, cost, ways = 0, _ONE, _ONE
        for arm in arms:
            rivals = [other for other in arms if other.first & arm.first]
            cost = _max(cost, _sum([r.cost for r in rivals]))
            ways = _max(ways, _sum([r.ways for r in rivals]))
            first |= arm.first
        if looped and ways != _ONE:
            raise _Inadmissible(_LONG_BODY)
        return _Next(first, any(arm.sure for arm in arms), cost, _ONE if after.sure else ways)

    def repeat(
        self, op: Any, low: int, high: int, body: Any, flags: int, after: _Next, looped: bool, first: int
    ) -> _Next:
        least, most = (int(width) for width in body.getwidth())
        long = high * max(1, most) > _LONG
        if long and least == 0:
            raise _Inadmissible("a long repetition repeats something that can match the empty string")
        again = self.first(body, flags, after.first)
        follow = _Next(again | (0 if after.sure else after.first), False, _ONE, _ONE)
        inner = self.walk(body, flags, follow, looped or long)
        if inner.ways.long or (long and inner.ways != _ONE):
            raise _Inadmissible(_LONG_BODY)
        if (
            op is sre.POSSESSIVE_REPEAT
            or after.sure
            or (inner.ways == _ONE and least > 0 and (low == high or not again & after.first))
        ):
            exits = _ONE
        elif long and low != high:
            exits = _Cost(1, 1)
        else:
            exits = _powers(inner.ways.factor, low, high)
        if looped and exits != _ONE:
            raise _Inadmissible(_LONG_BODY)
        own = _Cost(1, inner.cost.factor) if long else _times(inner.cost, inner.ways, high)
        if least == 0:  # empty rounds take steps without using up text, and nested they multiply
            own = _product(own, _Cost(0, high), _TWO_LONG)
        then = after.cost if after.sure else _product(exits, after.cost, _TWO_LONG)
        return _Next(first, after.sure and low == 0, _max(own, then), exits)


def _parts(op: Any, arg: Any) -> list[Any]:
    """The sub-patterns of an item that is no repetition."""
    if op is sre.SUBPATTERN:
        return [arg[3]]
    if op is sre.BRANCH:
        return list(arg[1])
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        return [arg[1]]
    if op is sre.ATOMIC_GROUP:
        return [arg]
    if op is sre.GROUPREF_EXISTS:
        return [body for body in arg[1:] if body is not None]
    return []


def _times(cost: _Cost, ways: _Cost, high: int) -> _Cost:
    """Steps of up to `high` copies of something that takes `cost` steps and ends in `ways` ways."""
    if ways == _ONE:
        return cost
    return _Cost(cost.long, max(cost.factor, _powers(ways.factor, 0, high).factor))


def _max(a: _Cost, b: _Cost) -> _Cost:
    """Steps of one and then the other, neither inside the other, or of either: the order counts, not the sum."""
    return _Cost(max(a.long, b.long), max(a.factor, b.factor))


def _sum(costs: list[_Cost]) -> _Cost:
    factor = sum(c.factor for c in costs)
    if factor > _WAYS:
        raise _Inadmissible(f"its choices multiply to more than {_WAYS} ways")
    return _Cost(max((c.long for c in costs), default=0), factor)


def _powers(ways: int, low: int, high: int) -> _Cost:
    """Ways to match `low` to `high` copies of something that matches in `ways` ways."""
    total, power = 0, 1
    for count in range(high + 1):
        total += power if count >= low else 0
        power *= ways
        if total > _WAYS or power > _WAYS:
            raise _Inadmissible(f"its choices multiply to more than {_WAYS} ways")
    return _Cost(0, total)
