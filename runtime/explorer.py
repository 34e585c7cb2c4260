"""Breadth-first search over every interleaving of a small world, by hashing what steers its future.

Owns: the search, and how a world is copied. It knows nothing of pipelines: a world offers `moves()` (names of what could happen
next), `do(name)` (which raises where a property breaks) and `key()` (hashable; equal keys must behave equally). Rules it keeps:

* States are copied by pickling. What never changes (engines, schemas, requests, messages, errors, classes, functions) is shared.
* Breadth first, so the first counterexample is a shortest one; it is a list of move names that `replay` takes.
* A result says `complete`: True only if the frontier ran empty. A search that stopped at a bound proves nothing beyond it.
* Does the key say enough? `audit=True` expands states that were reached again, too, and compares the keys of their successors.
"""

from __future__ import annotations

import io
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from types import FunctionType
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from ..codec.errors import HeadraceError

_PARENT = tuple[int, str]  # number of the state it was reached from, and the move


class WorldLike(Protocol):
    """What can be explored."""

    def moves(self) -> Sequence[str]: ...
    def do(self, name: str) -> None: ...
    def key(self) -> Any: ...


class Result(msgspec.Struct, frozen=True):
    """What a search found. `states` are unique; `script` is the shortest way to `failure`, where there is one."""

    name: str
    complete: bool
    states: int
    transitions: int
    depth: int
    seconds: float
    failure: str | None = None
    script: tuple[str, ...] = ()
    ends: int = 0

    def lines(self) -> list[str]:
        """For people: one line of counts; where a property broke, the script that shows it."""
        word = "true" if self.complete else "false"
        head = (
            f"{self.name}: complete={word} states={self.states} transitions={self.transitions} "
            f"depth={self.depth} ends={self.ends} {self.seconds:.1f} s"
        )
        if self.failure is None:
            return [head]
        steps = [f"  {at:>3}. {move}" for at, move in enumerate(self.script, 1)]
        return [head, f"  broken: {self.failure}", *steps]


class Unsound(AssertionError):
    """Two states with equal keys behave differently: the key leaves something out."""


class Copier:
    """Worlds as bytes and back; what is immutable is shared by every copy. `shared`: further types that are."""

    def __init__(self, shared: tuple[type, ...] = ()) -> None:
        self._shared: Final = (HeadraceError, Enum, FunctionType, *shared)
        self.kinds: dict[type, bool] = {}
        self.kept: dict[int, Any] = {}
        _COPIERS[id(self)] = self.kept

    def _is_shared(self, kind: type) -> bool:
        frozen = issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen
        return frozen or issubclass(kind, (type, *self._shared))

    def dump(self, world: Any) -> bytes:
        stream = io.BytesIO()
        _Pickler(stream, self).dump(world)
        return stream.getvalue()

    def load(self, state: bytes) -> Any:
        return pickle.loads(state)  # its own dump, never anybody else's bytes

    def close(self) -> None:
        _COPIERS.pop(id(self), None)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, copier: Copier) -> None:
        super().__init__(stream, protocol=5)
        self._copier = copier

    def reducer_override(self, item: Any) -> Any:
        copier, kind = self._copier, type(item)
        if kind is np.ndarray and item.ndim == 1 and not item.dtype.hasobject:
            return _array, (item.tobytes(), item.dtype.str)  # several times cheaper than an array's own way
        known = copier.kinds.get(kind)
        if known is None:
            known = copier.kinds[kind] = copier._is_shared(kind)
        if not known or item is _shared or item is _array:
            return NotImplemented
        copier.kept[id(item)] = item
        return _shared, (id(copier), id(item))


_COPIERS: dict[int, dict[int, Any]] = {}


def _shared(copier: int, item: int) -> Any:
    return _COPIERS[copier][item]


def _array(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype).copy()


def explore(
    name: str,
    make: Callable[[], WorldLike],
    *,
    shared: tuple[type, ...] = (),
    most: int = 2_000_000,
    seconds: float | None = None,
    audit: bool = False,
) -> Result:
    """Every state that `make()` can reach, at most `most` of them and for at most `seconds`; stops at the first broken property."""
    began = time.monotonic()
    copier = Copier(shared)
    try:
        return _Search(name, copier, most, None if seconds is None else began + seconds, audit, began).run(make())
    finally:
        copier.close()


class _Search:
    def __init__(self, name: str, copier: Copier, most: int, deadline: float | None, audit: bool, began: float) -> None:
        self._name = name
        self._copier = copier
        self._most = most
        self._deadline = deadline
        self._audit = audit
        self._began = began
        self._numbers: dict[Any, int] = {}
        self._parents: list[_PARENT] = [(-1, "")]
        self._successors: dict[int, tuple[tuple[str, int], ...]] = {}
        self._transitions = 0
        self._ends = 0

    def run(self, world: WorldLike) -> Result:
        self._numbers[hash(world.key())] = 0
        frontier: deque[tuple[int, int, bytes]] = deque([(0, 0, self._copier.dump(world))])
        again: list[tuple[int, bytes]] = []  # states that were reached once more, for the audit
        depth = 0
        while frontier:
            number, depth, state = frontier.popleft()
            if len(self._numbers) > self._most or (self._deadline is not None and time.monotonic() > self._deadline):
                return self._result(depth, complete=False)
            found: list[tuple[str, int]] = []
            world = self._copier.load(state)
            moves = world.moves()
            self._ends += not moves
            for at, move in enumerate(moves):
                if at:
                    world = self._copier.load(state)
                self._transitions += 1
                try:
                    world.do(move)
                    key = hash(world.key())
                except Exception as fault:  # a broken property, or a stage that raises, which would kill its driver
                    kind = "" if isinstance(fault, AssertionError) else f"{type(fault).__name__}: "
                    return self._result(depth + 1, complete=False, failure=f"{kind}{fault}", at=number, move=move)
                seen = self._numbers.get(key)
                if seen is None:
                    seen = self._numbers[key] = len(self._parents)
                    self._parents.append((number, move))
                    frontier.append((seen, depth + 1, self._copier.dump(world)))
                elif self._audit:
                    again.append((seen, self._copier.dump(world)))
                found.append((move, seen))
            if self._audit:
                self._successors[number] = tuple(found)
        for seen, state in again:
            self._compare(seen, state)
        return self._result(depth, complete=True)

    def _compare(self, seen: int, state: bytes) -> None:
        """Does `state` behave like the one that had the same key first?"""
        way = " / ".join(self._path(seen))
        moves = self._copier.load(state).moves()
        if tuple(moves) != tuple(move for move, _ in self._successors[seen]):
            raise Unsound(f"{way}: other moves from a state with the same key: {moves}")
        for move, after in self._successors[seen]:
            world = self._copier.load(state)
            world.do(move)
            if self._numbers.get(hash(world.key())) != after:
                raise Unsound(f"{way}: {move!r} leads elsewhere from a state with the same key")

    def _path(self, number: int) -> list[str]:
        path = []
        while number > 0:
            number, move = self._parents[number]
            path.append(move)
        return path[::-1]

    def _result(self, depth: int, *, complete: bool, failure: str | None = None, at: int = 0, move: str = "") -> Result:
        script = (*self._path(at), move) if failure is not None else ()
        seconds = time.monotonic() - self._began
        return Result(
            self._name, complete, len(self._numbers), self._transitions, depth, seconds, failure, script, self._ends
        )


def replay(make: Callable[[], WorldLike], script: Sequence[str]) -> WorldLike:
    """The world after `script`; raises what the last move of a counterexample raises."""
    world = make()
    for move in script:
        world.do(move)
    return world
