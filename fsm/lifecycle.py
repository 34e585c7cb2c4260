"""The life of one manager, from its construction to the join of its last thread.

CREATED has no threads. STARTING brings the parts up; a part that fails makes `start` raise and leaves nothing running
(FAILED). RUNNING admits requests. DRAINING admits none and lets live ones finish until the deadline; DRAINED says that
none is live any more, by finishing or by being aborted. STOPPING closes the rings and joins the threads; STOPPED is
the end, and every later submit is refused.

DRAIN is `shutdown()`, which is idempotent and may come from any thread at any time: absorbed where it is under way or
over, straight to STOPPED where nothing was started, and during STARTING it goes to STOPPING, where the late STARTED of
the starting thread is absorbed. FAULT is a stage that died: everything live fails and the manager is FAILED; the
threads are joined from there too, so JOINED and the rest are absorbed in the terminal states. Only START is illegal
after the end: a manager is started once.
"""

from enum import auto

from .machine import FastEnum, Machine, absorb, illegal, move


class LifecycleState(FastEnum):
    """States of a manager; the last two are terminal."""

    CREATED = 0
    STARTING = auto()
    RUNNING = auto()
    DRAINING = auto()
    STOPPING = auto()
    STOPPED = auto()
    FAILED = auto()


class LifecycleEvent(FastEnum):
    """Events of a manager. DRAIN is the call of `shutdown`."""

    START = 0
    STARTED = auto()
    FAULT = auto()
    DRAIN = auto()
    DRAINED = auto()
    JOINED = auto()


_S, _E = LifecycleState, LifecycleEvent
_TERMINAL = (_S.STOPPED, _S.FAILED)

LIFECYCLE = Machine(
    "lifecycle",
    1,
    LifecycleState,
    LifecycleEvent,
    initial=_S.CREATED,
    terminal=_TERMINAL,
    groups={
        "up": (_S.CREATED, _S.STARTING, _S.RUNNING),
        "down": (_S.DRAINING, _S.STOPPING),
        "terminal": _TERMINAL,
    },
    about="The life of one manager.",
    rules=[
        move(_S.CREATED, _E.START, _S.STARTING, "threads come up"),
        move(_S.CREATED, _E.DRAIN, _S.STOPPED, "nothing was started, nothing to join"),
        illegal(_S.CREATED, (_E.STARTED, _E.FAULT, _E.DRAINED, _E.JOINED), "nothing runs that could say so"),
        move(_S.STARTING, _E.STARTED, _S.RUNNING, "every part is up; requests are admitted"),
        move(_S.STARTING, _E.FAULT, _S.FAILED, "`start` raises and leaves nothing running"),
        move(_S.STARTING, _E.DRAIN, _S.STOPPING, "shutdown came during start; nothing was admitted"),
        illegal(_S.STARTING, (_E.START, _E.DRAINED, _E.JOINED), "a manager is started once, and nothing drains yet"),
        move(_S.RUNNING, _E.DRAIN, _S.DRAINING, "no more admissions; live requests go on until the deadline"),
        move(_S.RUNNING, _E.FAULT, _S.FAILED, "a stage died; everything live fails"),
        illegal(_S.RUNNING, (_E.START, _E.STARTED, _E.DRAINED, _E.JOINED), "already up, and nothing drains"),
        move(_S.DRAINING, _E.DRAINED, _S.STOPPING, "nothing is live: finished, or aborted at the deadline"),
        move(_S.DRAINING, _E.FAULT, _S.FAILED, "a stage died; everything live fails"),
        absorb(_S.DRAINING, _E.DRAIN, "shutdown is idempotent"),
        illegal(_S.DRAINING, (_E.START, _E.STARTED, _E.JOINED), "started before; threads end after the drain"),
        move(_S.STOPPING, _E.JOINED, _S.STOPPED, "the last thread is joined"),
        move(_S.STOPPING, _E.FAULT, _S.FAILED, "a thread did not end within the bound, or a stage died"),
        absorb(_S.STOPPING, _E.DRAIN, "shutdown is idempotent"),
        absorb(_S.STOPPING, (_E.STARTED, _E.DRAINED), "shutdown came first: the start, or the drain, ends late"),
        illegal(_S.STOPPING, _E.START, "a manager is started once"),
        absorb(_TERMINAL, (_E.STARTED, _E.FAULT, _E.DRAIN, _E.DRAINED, _E.JOINED), "late: it is over"),
        illegal(_TERMINAL, _E.START, "a manager is started once"),
    ],
)
