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


def closing(
    pipeline: Pipeline, refusal: HeadraceError, *, drain: float | None, settle: float | None, join: float
) -> Iterator[Wait]:
    """The steps of a shutdown. `drain` seconds for live requests to finish (None: no drain), `settle` seconds for each of the two
    waits after the deadline (None: no stage runs, so nothing can change), `join` seconds for the drivers to end."""
    live = pipeline.live
    live.close_admission(refusal)
    if drain is not None:
        yield Wait(Until.EMPTY, drain)
    for life in live.lives():
        pipeline.abort(life.rid, AbortSource.SHUTDOWN)
    if settle is not None:
        yield Wait(Until.EMPTY, settle)
        yield Wait(Until.SETTLED, settle)
    yield Wait(Until.DRAINED)
    pipeline.close_channels()
    yield Wait(Until.STOPPED, join)
    pipeline.fail_everything(ShuttingDownError("the manager was shut down"))
