"""The orderly end of a pipeline, as a script that any driver can follow.

Owns: the order of a shutdown. It waits for nothing itself: it yields what has to be waited for, and whoever drives it (the
manager with threads, the simulation in virtual time) waits and goes on. So the shutdown that is simulated is the one that ships.

The order, and why: admission closes first, so that the table of live requests can only get smaller. Live requests may then finish
until the deadline. Whoever is left is aborted through the same lane as any other abort, so each gets exactly one terminal item and
the scheduler hears of it. Only when nothing is owed to the ring any more, or the bound has passed, are the rings closed, which
wakes every parked caller. What no stage could end by then is ended directly, last.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..codec.errors import HeadraceError, ShuttingDownError
from ..fsm import AbortSource

if TYPE_CHECKING:
    from .pipeline import Pipeline


class Until(enum.Enum):
    """What the driver of a shutdown has to wait for, or to do."""

    EMPTY = "no request is live"
    SETTLED = "no abort is owed to the ring"
    DRAINED = "nothing: the life cycle moves on"
    STOPPED = "every driver has been told to stop and has run out of moves"


class Wait(NamedTuple):
    """One wait: for what, and for at most how many seconds."""

    until: Until
    timeout: float = 0.0


class Closing:
    """The steps of a shutdown: iterate, and wait for what is yielded. Plain data, like a stage (`phase`, and what it was told).

    `drain` seconds for live requests to finish (None: no drain), `settle` seconds for each of the two waits after the deadline
    (None: no stage runs, so nothing can change), `join` seconds for the drivers to end.
    """

    __slots__ = ("_drain", "_join", "_pipeline", "_refusal", "_settle", "phase")

    def __init__(
        self, pipeline: Pipeline, refusal: HeadraceError, *, drain: float | None, settle: float | None, join: float
    ) -> None:
        self._pipeline = pipeline
        self._refusal = refusal
        self._drain = drain
        self._settle = settle
        self._join = join
        self.phase = 0

    def __iter__(self) -> Iterator[Wait]:
        return self

    def __next__(self) -> Wait:
        """Do what comes now, and say what has to be waited for before the next call."""
        pipeline = self._pipeline
        self.phase += 1
        if self.phase == 1:
            pipeline.live.close_admission(self._refusal)
            if self._drain is not None:
                return Wait(Until.EMPTY, self._drain)
            self.phase += 1
        if self.phase == 2:
            for life in pipeline.live.lives():
                pipeline.abort(life.rid, AbortSource.SHUTDOWN)
            if self._settle is not None:
                return Wait(Until.EMPTY, self._settle)
            self.phase += 2
        if self.phase == 3:
            return Wait(Until.SETTLED, self._settle or 0.0)
        if self.phase == 4:
            return Wait(Until.DRAINED)
        if self.phase == 5:
            pipeline.close_channels()
            return Wait(Until.STOPPED, self._join)
        if self.phase == 6:
            pipeline.fail_everything(ShuttingDownError("the manager was shut down"))
        raise StopIteration
