"""What an execution is made of: calls, choices, failures, and the operating-system threads that are kept over many executions.

Owns: one controlled thread's state, and the batons. Rule it keeps: a baton is a lock that its thread waits on, so exactly the thread
that was handed its baton runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from .linear import Called


class Unwind(BaseException):
    """Ends a thread of an execution that is over. Not for catching."""


class Op(NamedTuple):
    """One call of a scenario's thread: see `op` and `after`."""

    name: str
    args: tuple[Any, ...]
    function: Callable[..., Any] | None
    follows: tuple[str, ...] = ()


class Choice(NamedTuple):
    """What may happen next: `kind` is go, time (its timeout fires), wake (for no reason), notify, or end (everybody sleeps on)."""

    kind: str
    actor: Actor | None


class Failure(NamedTuple):
    """What went wrong in one execution. `kind` is one word; see docs/interleave.md."""

    kind: str
    message: str
    steps: tuple[str, ...]
    history: tuple[Called, ...]
    replay: str = ""


class Actor:
    """One controlled thread's state in one execution."""

    def __init__(self, index: int, name: str, ops: list[Op], baton: threading.Lock, first_bit: int) -> None:
        self.index = index
        self.name = name
        self.ops = ops
        self.baton = baton
        self.first_bit = first_bit
        self.at = 0
        self.results: list[Any] = []
        self.result_keys: list[Any] = []
        self.before: list[int] = []
        self.stamped = False
        self.pending: tuple[str, Any] = ("idle", None)  # idle, go, lock, try, parked, after, done
        self.deadline: float | None = None
        self.timed_out = False
        self.known: list[Any] = []
        self.step_touched: set[tuple[int, str]] = set()
        self.aliases: dict[int, Any] = {}
        self.primitives_made = 0
        self.inside = False

    def key(self, now: float) -> tuple[Any, ...]:
        kind, target = self.pending
        left = None if self.deadline is None else self.deadline - now
        number = getattr(target, "number", None)
        return (
            kind,
            number,
            left,
            self.timed_out,
            self.stamped,
            self.at,
            tuple(self.known),
        )

    def doing(self) -> str:
        where = f" in {self.ops[self.at].name}" if self.at < len(self.ops) else ""
        return VERBS.get(self.pending[0], self.pending[0]).format(self.pending[1]) + where


VERBS = {
    "lock": "takes {}",
    "try": "waits for {}",
    "parked": "is parked on {}",
    "after": "waits for {}",
    "go": "goes on",
    "time": "runs out of time",
    "wake": "wakes for no reason",
    "notify": "notifies {}",
}


class Crew:
    """Operating-system threads, kept over many executions."""

    def __init__(self, size: int) -> None:
        self.batons = [threading.Lock() for _ in range(size)]
        self.control = threading.Lock()
        self.task: Callable[[int], None] | None = None
        for lock in (*self.batons, self.control):
            lock.acquire()
        self.threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"interleave-{index}", daemon=True)
            for index in range(size)
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, index: int) -> None:
        while True:
            self.batons[index].acquire()
            task = self.task
            if task is None:
                return
            task(index)

    def close(self) -> None:
        self.task = None
        for baton, thread in zip(self.batons, self.threads, strict=True):
            baton.release()
            thread.join()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
