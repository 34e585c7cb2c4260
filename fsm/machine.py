"""What a machine is, and the checks that its declaration must pass before anything can use it.

A machine is a finite table. For every (state, event) pair the declaration says exactly one of three things:

- **move**: the event is expected here and leads to a state (possibly the same one: a counted self-loop is a move);
- **absorb**: the event is late or repeated; it is harmless here and changes nothing;
- **illegal**: the event cannot happen here unless somebody is wrong. The caller must look at the outcome; an illegal
  step is never ignored.

There is no default. A pair that nobody wrote down is a `DeclarationError` at import, and so is a pair written down
twice, a state that nothing reaches, a state from which no terminal state can be reached, and a way out of a terminal
state. The error names the machine and the pair, because it is read by somebody who has just added an event.

One declaration is compiled twice: to nested tuples for a single step (`next`, `outcome`) and to one flat uint8 table
for a whole batch (`apply_batch`). The flat table spans all 65,536 pairs of uint8 values, so a state or event that is
out of range is illegal instead of another pair's entry. Both are read-only after construction and free of locks: any
thread may step any machine. A machine holds no current state; whoever owns the request holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Generic, Literal, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

ILLEGAL_CODE: Final = 255
"""The entry of `Machine.table` for an illegal pair (so a machine has at most 255 states)."""

OutcomeName = Literal["move", "absorb", "illegal"]
OUTCOMES: Final[tuple[OutcomeName, OutcomeName, OutcomeName]] = ("move", "absorb", "illegal")
"""Outcome names by their code in `Machine.outcomes`."""


class FastEnum(IntEnum):
    """An IntEnum that hashes as the int it is (Enum hashes its name through a Python call)."""

    __hash__ = int.__hash__


S = TypeVar("S", bound=IntEnum)
E = TypeVar("E", bound=IntEnum)


class IllegalTransition(RuntimeError):
    """The event cannot happen in this state. `.machine`, `.state` and `.event` say which pair."""

    def __init__(self, machine: str, state: IntEnum, event: IntEnum) -> None:
        super().__init__(f"{machine}: {event.name} is illegal in {state.name}")
        self.machine = machine
        self.state = state
        self.event = event


class DeclarationError(ValueError):
    """A machine's declaration breaks a rule; the message names the machine and the pair or state."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[S, E]):
    """One row of a declaration: what every pair of `states` x `events` does, and why."""

    outcome: OutcomeName
    states: tuple[S, ...]
    events: tuple[E, ...]
    to: S | None
    why: str


def _many(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, IntEnum) else tuple(value)


def move(states: S | Iterable[S], events: E | Iterable[E], to: S, why: str = "") -> Rule[S, E]:
    """The pairs lead to `to`."""
    return Rule("move", _many(states), _many(events), to, why)


def absorb(states: S | Iterable[S], events: E | Iterable[E], why: str = "") -> Rule[S, E]:
    """The pairs are late or repeated and change nothing."""
    return Rule("absorb", _many(states), _many(events), None, why)


def illegal(states: S | Iterable[S], events: E | Iterable[E], why: str = "") -> Rule[S, E]:
    """The pairs mean that somebody is wrong."""
    return Rule("illegal", _many(states), _many(events), None, why)


class Machine(Generic[S, E]):
    """A checked, total, deterministic machine. See the module's docstring for the rules and `fsm/*.py` for the five.

    - `name`, `revision`: a trace or a conformance target names the pair it claims, e.g. request/1;
    - `states`, `events`: the IntEnum classes, numbered from 0 without gaps; `initial`, `terminal`;
    - `next(state, event) -> state`: the state afterwards; raises `IllegalTransition`;
    - `outcome(state, event)`: "move", "absorb" or "illegal"; raises nothing for members of the enums;
    - `table`, `outcomes`: uint8 [states, events], read-only: the next state (255: illegal), and 0, 1, 2 for the outcome;
    - `rules`: the declaration as it was written, with the reasons; `groups`: the states by area, for diagrams.
    """

    next: Callable[[S, E], S]
    outcome: Callable[[S, E], OutcomeName]

    def __init__(
        self,
        name: str,
        revision: int,
        states: type[S],
        events: type[E],
        *,
        initial: S,
        terminal: Iterable[S],
        rules: Iterable[Rule[S, E]],
        groups: Mapping[str, Iterable[S]] | None = None,
        about: str = "",
    ) -> None:
        self.name = name
        self.revision = revision
        self.states = states
        self.events = events
        self.initial = initial
        self.terminal = frozenset(terminal)
        self.rules = tuple(rules)
        self.groups = {k: tuple(v) for k, v in (groups or {name: states}).items()}
        self.about = about

        self._check_numbering()
        self.table, self.outcomes = self._fill()
        self._check_graph()
        self._check_groups()
        self.table.setflags(write=False)
        self.outcomes.setflags(write=False)
        self._compile()

    def __repr__(self) -> str:
        return f"<Machine {self.name}/{self.revision}: {self.table.shape[0]} states, {self.table.shape[1]} events>"

    # ---- the readings -------------------------------------------------------------------------------------------

    def apply_batch(
        self, states: NDArray[np.uint8], events: NDArray[np.uint8] | int
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Step n distinct requests at once.

        `states`: uint8 [n]; `events`: uint8 [n], or one event for all rows. Returns the next states, uint8 [n], and
        the mask of illegal rows, bool [n]; an illegal row keeps its state. The inputs are not changed and the results
        are new arrays. Values outside the enums are illegal. Raises TypeError for another dtype (a wider integer
        would have to wrap to fit) and ValueError for shapes that disagree.
        """
        if states.dtype != np.uint8:
            raise TypeError(f"{self.name}: states must be uint8, not {states.dtype}")
        if isinstance(events, (int, np.integer)):
            if not 0 <= events <= 255:
                raise ValueError(f"{self.name}: event {int(events)} is not a uint8")
            after = self._columns[events].take(states)
        else:
            if events.dtype != np.uint8:
                raise TypeError(f"{self.name}: events must be uint8, not {events.dtype}")
            if events.shape != states.shape:
                raise ValueError(f"{self.name}: {states.shape} states but {events.shape} events")
            index = states.astype(np.intp)
            index <<= 8
            index |= events
            after = self._flat.take(index)
        bad = after == ILLEGAL_CODE
        if np.count_nonzero(bad):  # a third of the cost of bad.any()
            np.copyto(after, states, where=bad)
        return after, bad

    def counts(self) -> dict[OutcomeName, int]:
        """How many pairs move, are absorbed, are illegal. Pinned by a test, so that a change is seen."""
        return {name: int((self.outcomes == code).sum()) for code, name in enumerate(OUTCOMES)}

    def why(self, state: S, event: E) -> str:
        """The reason given in the declaration for this pair ("" if none)."""
        return self._why[state, event]

    # ---- the checks ---------------------------------------------------------------------------------------------

    def _fail(self, message: str) -> NoReturn:
        raise DeclarationError(f"machine {self.name}/{self.revision}: {message}")

    def _check_numbering(self) -> None:
        for kind, enum in (("states", self.states), ("events", self.events)):
            values = [int(member) for member in enum]
            if values != list(range(len(values))) or not 0 < len(values) < ILLEGAL_CODE:
                self._fail(f"{kind} must be numbered 0, 1, 2, … (at most 254), got {values}")
        if not self.terminal:
            self._fail("has no terminal state")

    def _fill(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        shape = (len(self.states), len(self.events))
        table = np.full(shape, ILLEGAL_CODE, np.uint8)
        outcomes = np.full(shape, ILLEGAL_CODE, np.uint8)
        self._why: dict[tuple[S, E], str] = {}
        for rule in self.rules:
            for state in rule.states:
                for event in rule.events:
                    if not isinstance(state, self.states) or not isinstance(event, self.events):
                        self._fail(f"({state!r}, {event!r}) is not a pair of this machine's enums")
                    if (state, event) in self._why:
                        self._fail(f"({state.name}, {event.name}) is declared twice")
                    self._why[state, event] = rule.why
                    outcomes[state, event] = OUTCOMES.index(rule.outcome)
                    if rule.to is not None:
                        if not isinstance(rule.to, self.states):
                            self._fail(f"({state.name}, {event.name}) leads to {rule.to!r}, which is no state")
                        table[state, event] = rule.to
                    elif rule.outcome == "absorb":
                        table[state, event] = state
        for state in self.states:
            for event in self.events:
                if (state, event) not in self._why:
                    self._fail(f"({state.name}, {event.name}) is not declared: move, absorb or illegal?")
        return table, outcomes

    def _check_graph(self) -> None:
        edges: dict[S, set[S]] = {state: set() for state in self.states}
        for state in self.states:
            for event in self.events:
                if self.outcomes[state, event] == 0:
                    to = self.states(int(self.table[state, event]))
                    if state in self.terminal:
                        self._fail(f"({state.name}, {event.name}) leaves a terminal state")
                    edges[state].add(to)
        reached = _closure({self.initial}, edges)
        for state in self.states:
            if state not in reached:
                self._fail(f"{state.name} is not reachable from {self.initial.name}")
        backwards: dict[S, set[S]] = {state: set() for state in self.states}
        for state, targets in edges.items():
            for to in targets:
                backwards[to].add(state)
        can_end = _closure(set(self.terminal), backwards)
        for state in self.states:
            if state not in can_end:
                self._fail(f"{state.name} is a dead end: no terminal state can be reached from it")

    def _check_groups(self) -> None:
        grouped = [state for members in self.groups.values() for state in members]
        for state in self.states:
            if grouped.count(state) != 1:
                self._fail(f"{state.name} is in {grouped.count(state)} groups; it must be in exactly one")

    # ---- compilation --------------------------------------------------------------------------------------------

    def _compile(self) -> None:
        flat = np.full((256, 256), ILLEGAL_CODE, np.uint8)
        flat[: len(self.states), : len(self.events)] = self.table
        self._flat = flat.ravel()
        self._columns = np.ascontiguousarray(flat.T)
        rows: tuple[tuple[S | None, ...], ...] = tuple(
            tuple(None if to == ILLEGAL_CODE else self.states(to) for to in row) for row in self.table.tolist()
        )
        names = tuple(tuple(OUTCOMES[code] for code in row) for row in self.outcomes.tolist())
        machine, states, events = self.name, self.states, self.events

        # Closures and not methods: one lookup less per step, on the path of every chunk of every request.
        def next_(state: S, event: E) -> S:
            to = rows[state][event]
            if to is None:
                raise IllegalTransition(machine, states(state), events(event))
            return to

        def outcome(state: S, event: E) -> OutcomeName:
            return names[state][event]

        self.next = next_
        self.outcome = outcome


def _closure(start: set[S], edges: Mapping[S, set[S]]) -> set[S]:
    seen, todo = set(start), list(start)
    while todo:
        for to in edges[todo.pop()] - seen:
            seen.add(to)
            todo.append(to)
    return seen
