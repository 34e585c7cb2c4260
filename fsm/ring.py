"""One boundary ring between the manager and the scheduler, in either direction.

**The state is three facts.** How full: EMPTY, PARTIAL, FULL. Which ends are there: OPEN, PRODUCER_GONE, CONSUMER_GONE,
CLOSED (both gone). And whether `wait` has taken an item that `drain` has not given yet: STASHED. The stash is part of
the ring: its item counts against the capacity and against emptiness, so EMPTY is never STASHED, and the next drain
gives it first. It holds one item; any drain that takes something takes it.

**The event is what happened, after counting.** A ring knows its counts when it holds its lock, so it says PUSH or
PUSH_FILLS, DRAIN (something is left) or DRAIN_EMPTIES. That makes the table deterministic without numbers in it. An
operation that changed nothing has no event: a drain of an empty ring, a `wait` that timed out, a push that parked.

**What a parked caller sees.** A parked `push` wakes when an event leaves the FULL states and then is accepted (PUSH or
PUSH_FILLS), or when either end closes, and then returns False (REFUSED_CLOSED). A parked `wait` wakes at PUSH or
PUSH_FILLS with True (WAIT_HIT), or when either end closes with False: a waiter is parked only while EMPTY. Both
closes wake every parked caller of both kinds.

**What was accepted can be drained.** A close refuses new items and leaves the old ones: DRAIN, DRAIN_EMPTIES and
WAIT_HIT stay legal after any close, also for a consumer that closed its own end to refuse more and now empties the
ring. So the one terminal state is EMPTY_CLOSED, and a ring that is dropped before that has lost what was accepted.

**REFUSED_FULL is legal in every open state.** A push of many is all or nothing, and the egress ring counts bytes too,
so a ring that is not FULL may refuse; a batch larger than the whole ring is refused even by an empty one. PUSH into a
FULL ring is illegal: the capacity has been overrun. REFUSED_CLOSED is illegal while both ends are there.
"""

from enum import auto

from .machine import FastEnum, Machine, absorb, illegal, move


class RingState(FastEnum):
    """Fill, stash and ends of a ring."""

    EMPTY_OPEN = 0
    PARTIAL_OPEN = auto()
    FULL_OPEN = auto()
    PARTIAL_STASHED_OPEN = auto()
    FULL_STASHED_OPEN = auto()
    EMPTY_PRODUCER_GONE = auto()
    PARTIAL_PRODUCER_GONE = auto()
    FULL_PRODUCER_GONE = auto()
    PARTIAL_STASHED_PRODUCER_GONE = auto()
    FULL_STASHED_PRODUCER_GONE = auto()
    EMPTY_CONSUMER_GONE = auto()
    PARTIAL_CONSUMER_GONE = auto()
    FULL_CONSUMER_GONE = auto()
    PARTIAL_STASHED_CONSUMER_GONE = auto()
    FULL_STASHED_CONSUMER_GONE = auto()
    EMPTY_CLOSED = auto()
    PARTIAL_CLOSED = auto()
    FULL_CLOSED = auto()
    PARTIAL_STASHED_CLOSED = auto()
    FULL_STASHED_CLOSED = auto()


class RingEvent(FastEnum):
    """What happened, after counting."""

    PUSH = 0
    PUSH_FILLS = auto()
    DRAIN = auto()
    DRAIN_EMPTIES = auto()
    WAIT_HIT = auto()
    REFUSED_FULL = auto()
    REFUSED_CLOSED = auto()
    CLOSE_PRODUCER = auto()
    CLOSE_CONSUMER = auto()


_S, _E = RingState, RingEvent
_ENDS = ("OPEN", "PRODUCER_GONE", "CONSUMER_GONE", "CLOSED")
_FILLS = ("EMPTY", "PARTIAL", "FULL", "PARTIAL_STASHED", "FULL_STASHED")
_TAKES = (_E.DRAIN, _E.DRAIN_EMPTIES, _E.WAIT_HIT)


def _at(end: str, *fills: str) -> tuple[RingState, ...]:
    return tuple(_S[f"{fill}_{end}"] for fill in fills or _FILLS)


_rules = []
for _end in _ENDS:
    _empty, _partial, _full, _partial_stashed, _full_stashed = _at(_end)
    _rules += [
        move(
            (_partial, _full, _partial_stashed, _full_stashed),
            _E.DRAIN,
            _partial,
            "took some, the stash first; something is left",
        ),
        move((_partial, _full, _partial_stashed, _full_stashed), _E.DRAIN_EMPTIES, _empty, "took all"),
        move(_partial, _E.WAIT_HIT, _partial_stashed, "the item stays in the ring's account"),
        move(_full, _E.WAIT_HIT, _full_stashed, "the item stays in the ring's account: still full"),
        absorb((_partial_stashed, _full_stashed), _E.WAIT_HIT, "the stash already answers"),
        illegal(_empty, _TAKES, "there is nothing to take"),
    ]
_open = _at("OPEN")
_rules += [
    move(_S.EMPTY_OPEN, _E.PUSH, _S.PARTIAL_OPEN, "a parked wait wakes with True"),
    move(_S.EMPTY_OPEN, _E.PUSH_FILLS, _S.FULL_OPEN, "a parked wait wakes with True"),
    move(_S.PARTIAL_OPEN, _E.PUSH, _S.PARTIAL_OPEN, "behind what is there"),
    move(_S.PARTIAL_OPEN, _E.PUSH_FILLS, _S.FULL_OPEN, "behind what is there"),
    move(_S.PARTIAL_STASHED_OPEN, _E.PUSH, _S.PARTIAL_STASHED_OPEN, "behind the stash"),
    move(_S.PARTIAL_STASHED_OPEN, _E.PUSH_FILLS, _S.FULL_STASHED_OPEN, "behind the stash, which counts"),
    illegal((_S.FULL_OPEN, _S.FULL_STASHED_OPEN), (_E.PUSH, _E.PUSH_FILLS), "the capacity would be overrun"),
    absorb(_open, _E.REFUSED_FULL, "no room for all of it; nothing was accepted"),
    illegal(_open, _E.REFUSED_CLOSED, "both ends are there"),
]
for _end in ("PRODUCER_GONE", "CONSUMER_GONE", "CLOSED"):
    _rules += [
        illegal(_at(_end), (_E.PUSH, _E.PUSH_FILLS), "a closed ring accepts nothing"),
        illegal(_at(_end), _E.REFUSED_FULL, "a closed ring says closed, so that the caller does not retry"),
        absorb(_at(_end), _E.REFUSED_CLOSED, "refused at once; a parked push wakes with this"),
    ]
for _before, _event, _after in (
    ("OPEN", _E.CLOSE_PRODUCER, "PRODUCER_GONE"),
    ("OPEN", _E.CLOSE_CONSUMER, "CONSUMER_GONE"),
    ("PRODUCER_GONE", _E.CLOSE_CONSUMER, "CLOSED"),
    ("CONSUMER_GONE", _E.CLOSE_PRODUCER, "CLOSED"),
):
    _rules += [
        move(_from, _event, _to, "wakes every parked caller; what was accepted stays")
        for _from, _to in zip(_at(_before), _at(_after), strict=True)
    ]
_rules += [
    absorb(_at("PRODUCER_GONE"), _E.CLOSE_PRODUCER, "closing is idempotent"),
    absorb(_at("CONSUMER_GONE"), _E.CLOSE_CONSUMER, "closing is idempotent"),
    absorb(_at("CLOSED"), (_E.CLOSE_PRODUCER, _E.CLOSE_CONSUMER), "closing is idempotent"),
]

RING = Machine(
    "ring",
    1,
    RingState,
    RingEvent,
    initial=_S.EMPTY_OPEN,
    terminal=(_S.EMPTY_CLOSED,),
    groups={"open": _open, **{_end.lower().replace("_", " "): _at(_end) for _end in _ENDS[1:]}},
    about="Fill, stash and ends of one ring between the manager and the scheduler.",
    rules=_rules,
)
