"""One client's stream: what may be put into it, and that it ends exactly once.

The shard is the only writer, the client's handle the only reader. OPEN takes chunks (PUT) until one terminal item:
PUT_FINAL (the finish), PUT_ERROR (a failure), or OVERFLOW, when the reader is too slow and the stream ends with an
error, never looking like a success. The slot of the terminal item is reserved at admission, so it cannot be refused.

CLOSE is the reader's: its handle was closed, dropped or cancelled. It may come at any time, also after the end, and is
absorbed there. After CLOSED the writer may not know yet; whatever it still puts is late output of a client that left,
and is absorbed. After DONE, FAILED or OVERFLOWED the writer does know, because it put that item itself: another item
would be a second terminal, or one behind it, and is illegal.
"""

from enum import auto

from .machine import FastEnum, Machine, absorb, illegal, move


class SinkState(FastEnum):
    """States of a sink; all but OPEN are terminal."""

    OPEN = 0
    DONE = auto()
    FAILED = auto()
    OVERFLOWED = auto()
    CLOSED = auto()


class SinkEvent(FastEnum):
    """Four of the writer, and the reader's CLOSE."""

    PUT = 0
    PUT_FINAL = auto()
    PUT_ERROR = auto()
    OVERFLOW = auto()
    CLOSE = auto()


_S, _E = SinkState, SinkEvent
_WRITES = (_E.PUT, _E.PUT_FINAL, _E.PUT_ERROR, _E.OVERFLOW)
_ENDED = (_S.DONE, _S.FAILED, _S.OVERFLOWED)

SINK = Machine(
    "sink",
    1,
    SinkState,
    SinkEvent,
    initial=_S.OPEN,
    terminal=(*_ENDED, _S.CLOSED),
    groups={"egress": SinkState},
    about="One client's stream: exactly one terminal item, and it is the last.",
    rules=[
        move(_S.OPEN, _E.PUT, _S.OPEN, "one chunk"),
        move(_S.OPEN, _E.PUT_FINAL, _S.DONE, "the finish, in the reserved slot"),
        move(_S.OPEN, _E.PUT_ERROR, _S.FAILED, "the failure, in the reserved slot"),
        move(_S.OPEN, _E.OVERFLOW, _S.OVERFLOWED, "the reader is too slow: an error, never a success"),
        move(_S.OPEN, _E.CLOSE, _S.CLOSED, "the client left"),
        absorb(_ENDED, _E.CLOSE, "the client closes after the end"),
        illegal(_ENDED, _WRITES, "the writer put the terminal item itself; nothing may follow it"),
        absorb(_S.CLOSED, (*_WRITES, _E.CLOSE), "late output of a client that left"),
    ],
)
