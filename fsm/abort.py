"""The abort of one request: who asked for it first, and whether the scheduler must hear of it.

There is one machine per request, from its admission to its end, because "was this request pushed?" is a fact of this
machine and of nothing else. "QUEUED or later" would be wrong: a detokenize request is QUEUED and never pushed.

**Sources.** GUARD: the client's handle was closed, cancelled or garbage-collected. DETOK: the shard's terminal path
(sink full or gone, decoder failure, malformed frame, the scheduler's ERROR frame). API: an explicit abort by rid.
SHUTDOWN: the drain deadline passed. The first source wins and is kept by the owner for diagnosis; later ones are
absorbed. The machine has one event per source, so that a trace shows which one won.

**Endings.** CANCELLED_LOCALLY: the request never reached the ring; the scheduler hears nothing. NOTIFIED: the ring
accepted exactly one abort message. NOT_NEEDED: the request was over first (its final chunk was seen, or it failed
before the ring). UNDELIVERABLE: the ring is closed, the scheduler is gone, or the join bound passed; counted.

**A full ring is no ending.** REQUESTED absorbs RING_FULL: the message stays pending and is offered again as soon as the
ring has room. Dropping it would leave the scheduler generating for nobody until the token limit.

**An abort never stands before its own request on the ring.** RING_TOOK_ABORT is legal only in REQUESTED, REQUESTED is
reached only from PUSHED, and PUSHED only by RING_TOOK_REQUEST. RING_TOOK_* is absorbed nowhere: a second message in
the ring is always somebody's fault.
"""

from __future__ import annotations

from enum import auto
from typing import NamedTuple

from .machine import FastEnum, Machine, absorb, illegal, move


class AbortState(FastEnum):
    """States of the abort; the last four are terminal."""

    NOT_PUSHED = 0
    PUSHED = auto()
    REQUESTED = auto()
    CANCELLED_LOCALLY = auto()
    NOTIFIED = auto()
    NOT_NEEDED = auto()
    UNDELIVERABLE = auto()


class AbortEvent(FastEnum):
    """Events of the abort: one per source, then what the ring says, then the end of the request."""

    ABORT_GUARD = 0
    ABORT_DETOK = auto()
    ABORT_API = auto()
    ABORT_SHUTDOWN = auto()
    RING_TOOK_REQUEST = auto()
    RING_TOOK_ABORT = auto()
    RING_FULL = auto()
    RING_CLOSED = auto()
    FINISHED = auto()


class AbortRequest(NamedTuple):
    """Who asked for the abort of which request: `AbortSource.GUARD(rid)`."""

    source: AbortSource
    rid: str


class AbortSource(FastEnum):
    """Who asked first. The event of a source is `ABORT_EVENTS[source]`; called with a rid it is the request to abort that."""

    GUARD = 0
    DETOK = auto()
    API = auto()
    SHUTDOWN = auto()

    def __call__(self, rid: str) -> AbortRequest:
        return AbortRequest(self, rid)

    @property
    def rid(self) -> str | None:
        """None: a bare source names no request (an `AbortRequest` does)."""
        return None


ABORT_EVENTS: dict[AbortSource, AbortEvent] = {
    AbortSource.GUARD: AbortEvent.ABORT_GUARD,
    AbortSource.DETOK: AbortEvent.ABORT_DETOK,
    AbortSource.API: AbortEvent.ABORT_API,
    AbortSource.SHUTDOWN: AbortEvent.ABORT_SHUTDOWN,
}

_S, _E = AbortState, AbortEvent
_ASKS = (_E.ABORT_GUARD, _E.ABORT_DETOK, _E.ABORT_API, _E.ABORT_SHUTDOWN)
_TOOK = (_E.RING_TOOK_REQUEST, _E.RING_TOOK_ABORT)
_TERMINAL = (_S.CANCELLED_LOCALLY, _S.NOTIFIED, _S.NOT_NEEDED, _S.UNDELIVERABLE)

ABORT = Machine(
    "abort",
    1,
    AbortState,
    AbortEvent,
    initial=_S.NOT_PUSHED,
    terminal=_TERMINAL,
    groups={
        "ingress": (_S.NOT_PUSHED, _S.CANCELLED_LOCALLY),
        "egress": (_S.PUSHED, _S.REQUESTED, _S.NOTIFIED, _S.NOT_NEEDED, _S.UNDELIVERABLE),
    },
    about="Whether an abort was asked for, and whether the scheduler must hear of it.",
    rules=[
        # before the ring
        move(_S.NOT_PUSHED, _E.RING_TOOK_REQUEST, _S.PUSHED, "from here on the scheduler has to be told"),
        move(_S.NOT_PUSHED, _ASKS, _S.CANCELLED_LOCALLY, "the scheduler never heard of the request"),
        move(_S.NOT_PUSHED, _E.FINISHED, _S.NOT_NEEDED, "answered without the ring, failed or refused before it"),
        absorb(_S.NOT_PUSHED, (_E.RING_FULL, _E.RING_CLOSED), "the ring refused the request; its failure follows"),
        illegal(_S.NOT_PUSHED, _E.RING_TOOK_ABORT, "an abort would stand before its own request"),
        # in the scheduler's hands
        move(_S.PUSHED, _ASKS, _S.REQUESTED, "the first source wins; one message is owed"),
        move(_S.PUSHED, _E.FINISHED, _S.NOT_NEEDED, "the usual end"),
        absorb(_S.PUSHED, _E.RING_CLOSED, "nothing is owed; the owner ends the request"),
        illegal(_S.PUSHED, (_E.RING_FULL, *_TOOK), "nothing of this request was offered to the ring"),
        # one message owed
        move(_S.REQUESTED, _E.RING_TOOK_ABORT, _S.NOTIFIED, "exactly one message, behind its request"),
        move(_S.REQUESTED, _E.RING_CLOSED, _S.UNDELIVERABLE, "nobody is left to tell; counted"),
        move(_S.REQUESTED, _E.FINISHED, _S.NOT_NEEDED, "the request finished first"),
        absorb(_S.REQUESTED, _ASKS, "the first source won"),
        absorb(_S.REQUESTED, _E.RING_FULL, "stays pending; offered again when the ring has room"),
        illegal(_S.REQUESTED, _E.RING_TOOK_REQUEST, "the request was pushed before"),
        # over
        absorb(_TERMINAL, (*_ASKS, _E.FINISHED, _E.RING_FULL, _E.RING_CLOSED), "late"),
        illegal(_TERMINAL, _TOOK, "a message in the ring after the abort's end would be a second one, or unowed"),
    ],
)
