"""Linearizability: whether a history of overlapping calls could have happened one call at a time.

Owns: models, histories, and the two checkers. `linearize` judges a whole history by Wing and Gong's search with Lowe's memo: take any
call that no other unfinished call precedes, ask the model for an outcome equal to what was seen, go on; a pair (calls taken, model
state) that has failed once is not tried again. `Tracker` judges a history while it grows, by keeping every configuration that could
explain it so far; what it keeps is all of the past that the verdict on the future depends on, so a search can use it as a state.

A history may end with calls that never returned, because their threads sleep. Such an end is right when *some* order of the returned
calls leaves the model in a state in which every sleeper has to wait. If there is none, somebody sleeps whom the specification would let
go on: a lost wake-up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from .guard import canon


class Raised(NamedTuple):
    """An outcome: the call raised an exception of this class (its name)."""

    error: str


class Model(Protocol):
    """A specification: plain, sequential, without threads."""

    def start(self) -> Hashable:
        """The state before anything has happened."""
        ...

    def step(self, state: Any, name: str, args: tuple[Any, ...]) -> Iterable[tuple[Any, Hashable]]:
        """All outcomes (result, next state) of the call in this state; none at all means that the caller has to wait."""
        ...


class Called(NamedTuple):
    """One call of a history. `before` is a bit mask of the calls (by index) that had returned when this one was made."""

    thread: str
    name: str
    args: tuple[Any, ...]
    result: Any
    before: int
    returned: bool

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.args))
        end = f"-> {self.result!r}" if self.returned else "sleeps"
        return f"{self.thread}: {self.name}({shown}) {end}"


History = Sequence[Called]


def linearize(history: History, model: Model) -> list[int] | None:
    """The indices of the returned calls in an order that explains the history, or None if there is none.

    Calls that did not return must all have to wait in the model's last state.
    """
    wanted = 0
    for index, call in enumerate(history):
        if call.returned:
            wanted |= 1 << index
    seen = [canon(call.result) for call in history]
    sleepers = [call for call in history if not call.returned]
    failed: set[tuple[int, Hashable]] = set()
    order: list[int] = []

    def search(done: int, state: Hashable) -> bool:
        if done == wanted:
            return all(not any(True for _ in model.step(state, call.name, call.args)) for call in sleepers)
        if (done, state) in failed:
            return False
        for index, call in enumerate(history):
            bit = 1 << index
            if not wanted & bit or done & bit or call.before & ~done:
                continue
            for result, after in model.step(state, call.name, call.args):
                if canon(result) == seen[index]:
                    order.append(index)
                    if search(done | bit, after):
                        return True
                    order.pop()
        failed.add((done, state))
        return False

    return order if search(0, model.start()) else None


class Tracker:
    """The same verdict, call by call: what the model may look like now, and which open calls would have happened by then."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._open: dict[int, tuple[str, tuple[Any, ...]]] = {}
        self._configs: set[tuple[frozenset[tuple[int, Any]], Hashable]] = {(frozenset(), model.start())}

    def call(self, thread: int, name: str, args: tuple[Any, ...]) -> None:
        """The thread is in this call from now on."""
        self._open[thread] = (name, args)

    def returned(self, thread: int, result: Any) -> bool:
        """The thread's call has returned `result` (as `canon` gives it); False if no order explains that."""
        model, kept = self._model, set()
        reached = list(self._configs)
        seen = set(reached)
        while reached:
            done, state = reached.pop()
            mine = next((one for one in done if one[0] == thread), None)
            if mine is not None:
                if mine[1] == result:
                    kept.add((done - {mine}, state))
                continue
            for other, (name, args) in self._open.items():
                if any(other == one[0] for one in done):
                    continue
                for outcome, after in model.step(state, name, args):
                    config = (done | {(other, canon(outcome))}, after)
                    if config not in seen:
                        seen.add(config)
                        reached.append(config)
        del self._open[thread]
        self._configs = kept
        return bool(kept)

    def sleepers_must_wait(
        self, without_timeout: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] | None = None
    ) -> bool:
        """Whether some order of the returned calls leaves every open call waiting.

        `without_timeout(name, args)` gives the arguments of a call that sleeps with a timeout as if it had none: while its time has
        not run out it must be waiting for what the call waits for.
        """
        calls = list(self._open.values())
        if without_timeout is not None:
            calls = [(name, without_timeout(name, args)) for name, args in calls]
        return any(
            not done and not any(True for call in calls for _ in self._model.step(state, *call))
            for done, state in self._configs
        )

    def states(self) -> set[Hashable]:
        """What the model may look like now, by the orders in which no open call has happened yet."""
        return {state for done, state in self._configs if not done}

    def key(self) -> Hashable:
        """All of the past that verdicts on the future depend on."""
        return frozenset(self._configs)


def explain(history: History) -> str:
    """A history in words, one call per line, with what it followed."""
    lines = []
    for index, call in enumerate(history):
        earlier = [str(other) for other in range(len(history)) if call.before >> other & 1]
        lines.append(f"  [{index}] {call}" + (f"   (after {', '.join(earlier)})" if earlier else ""))
    return "\n".join(lines)
