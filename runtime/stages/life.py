"""One request's life, and the messages that stages send each other.

Owns: `Life`, the one state object of a request, and the vocabulary of the lanes. Rules it keeps:

* A `Life` has exactly one owner at a time: the inbox until ingress takes it, ingress until the request is registered, then its
  shard, to which it is handed over and never copied.
* `advance`, `advance_along` and `advance_abort` are the only places in the runtime's stages that change a scalar state, and both go through the
  declared tables. The shard's columns go through `apply_batch` of the same table.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...codec.admission import NormalizedRequest
from ...codec.errors import HeadraceError
from ...fsm import (
    ABORT,
    ABORT_EVENTS,
    REQUEST,
    AbortEvent,
    AbortSource,
    AbortState,
    IllegalTransition,
    RequestEvent,
    RequestState,
)
from ..sink import EgressItem, Extras, Sink


class Recorder(Protocol):
    """Where transitions are recorded while a manager traces: `headrace.fsm.Trace`, or None for off."""

    def record(self, machine: str, rid: str, from_: int, event: int, to: int, stage: str) -> None: ...
    def record_many(
        self, machine: str, rids: Sequence[str], before: Sequence[int], event: int, after: Sequence[int], stage: str
    ) -> None: ...
    def record_fill(self, ring: str, fill: int) -> None: ...


class Kind(enum.IntEnum):
    """What a request is. The request table does not know kinds; the stages check them first."""

    GENERATE = 0
    CONTROL = 1
    DETOKENIZE = 2


class Life:
    """One request from submit to its terminal item. Plain data; see the module's head for who owns it."""

    __slots__ = (
        "abort",
        "abort_source",
        "group",
        "highest",
        "ids",
        "kind",
        "message",
        "nbytes",
        "request",
        "rid",
        "shard",
        "shown_rid",
        "sink",
        "state",
        "stream",
        "taken",
        "token",
        "withdrawn",
    )

    def __init__(
        self,
        rid: str,
        kind: Kind,
        sink: Sink | None,
        *,
        shown_rid: str | None = None,
        shard: int = 0,
        request: NormalizedRequest | None = None,
        ids: np.ndarray[Any, Any] | None = None,
        message: Any = None,
        stream: bool = True,
        nbytes: int = 0,
        token: Any = None,
    ) -> None:
        self.rid = rid
        self.shown_rid = shown_rid
        self.kind = kind
        self.shard = shard
        self.sink = sink  # None: a request of the step sink, whose items leave in columns
        self.token = token  # what the step sink calls the request by
        self.request = request
        self.ids = ids
        self.highest: int | None = None  # no id is above it; None where nobody looked
        self.message = message
        self.stream = stream
        self.nbytes = nbytes
        self.group: Group | None = None
        self.state: RequestState = REQUEST.initial
        self.abort: AbortState = ABORT.initial
        self.abort_source: AbortSource | None = None
        self.taken = False  # guarded by the inbox's lock
        self.withdrawn = False  # guarded by the inbox's lock

    def key(self) -> tuple[Any, ...]:
        """Everything that steers this request's future, hashable."""
        return (
            self.rid,
            self.shown_rid,
            int(self.kind),
            self.shard,
            self.stream,
            self.nbytes,
            self.state,
            self.abort,
            self.abort_source,
            self.taken,
            self.withdrawn,
            None if self.ids is None else self.ids.tobytes(),
            self.highest,
            None if self.group is None else (self.group.waiting, tuple(m.rid for m in self.group.members)),
        )


class Group:
    """The requests of one batch: admitted all or none. A single request is a group of one."""

    __slots__ = ("members", "waiting")

    def __init__(self, members: list[Life]) -> None:
        self.members = members
        self.waiting = 0  # members that are being tokenised
        for life in members:
            life.group = self


_request_next = REQUEST.next
_abort_next = ABORT.next


def advance(life: Life, event: RequestEvent, stage: str, record: Recorder | None) -> None:
    """Move `life` by one event. Raises IllegalTransition, which the stage turns into an internal error for this request."""
    before = life.state
    life.state = _request_next(before, event)
    if record is not None:
        record.record("request", life.rid, before, event, life.state, stage)


class Way:
    """Several events in a row, and where the table leads with them: walked once for each state instead of for each request."""

    __slots__ = ("ends", "events")

    def __init__(self, *events: RequestEvent) -> None:
        self.events = events
        self.ends = [self._end(state) for state in RequestState]

    def _end(self, state: RequestState) -> RequestState | None:
        try:
            for event in self.events:
                state = REQUEST.next(state, event)
        except IllegalTransition:
            return None
        return state


def advance_along(life: Life, way: Way, stage: str, record: Recorder | None) -> None:
    """`advance` by each event of `way` in turn. Raises IllegalTransition at the first that the table has no place for."""
    end = way.ends[life.state]
    if record is not None or end is None:
        for event in way.events:
            advance(life, event, stage, record)
    else:
        life.state = end


def advance_abort(life: Life, event: AbortEvent, stage: str, record: Recorder | None) -> None:
    """The same for the request's abort machine."""
    before = life.abort
    life.abort = _abort_next(before, event)
    if record is not None:
        record.record("abort", life.rid, before, event, life.abort, stage)


def want_abort(life: Life, source: AbortSource, stage: str, record: Recorder | None) -> None:
    """An abort is asked for by `source`. The first source is kept for diagnosis."""
    if life.abort_source is None:
        life.abort_source = source
    advance_abort(life, ABORT_EVENTS[source], stage, record)


# -- messages -------------------------------------------------------------------------------------------------------------


class Message:
    """Base of what travels on the lanes: plain data with a key."""

    __slots__: tuple[str, ...] = ()

    def key(self) -> tuple[Any, ...]:
        return (type(self).__name__, *(_key(getattr(self, name)) for name in self.__slots__))


def _key(value: Any) -> Any:
    if hasattr(value, "key"):
        return value.key()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, HeadraceError):
        return (value.code, value.message)
    if isinstance(value, EgressItem.Error):
        return _key(value.error)
    return value


def extras_key(parts: Sequence[Extras]) -> tuple[Any, ...]:
    """Optional columns of several chunks, hashable."""
    return tuple(tuple((name, np.asarray(values).tobytes()) for name, values in sorted(part.items())) for part in parts)


class Job(Message):
    """Ingress -> tokenizer pool: `text` to tokenise, or with `media` text or `ids` for the encoder."""

    __slots__ = ("add_special_tokens", "ids", "media", "rid", "text")

    def __init__(
        self,
        rid: str,
        text: str | None,
        add_special_tokens: bool,
        *,
        ids: np.ndarray[Any, Any] | None = None,
        media: dict[str, Any] | None = None,
    ) -> None:
        self.rid = rid
        self.text = text
        self.add_special_tokens = add_special_tokens
        self.ids = ids
        self.media = media


class Tokenised(Message):
    """Tokenizer pool -> ingress: `ids` (int64), or the error. No id is above `highest`, where that is known."""

    __slots__ = ("error", "highest", "ids", "rid")

    def __init__(
        self,
        rid: str,
        ids: np.ndarray[Any, Any] | None,
        error: HeadraceError | None = None,
        highest: int | None = None,
    ) -> None:
        self.rid = rid
        self.ids = ids
        self.error = error
        self.highest = highest


class WantAbort(Message):
    """Client, drain deadline or deadline -> ingress: abort `rid`, wherever it is."""

    __slots__ = ("rid", "source")

    def __init__(self, rid: str, source: AbortSource) -> None:
        self.rid = rid
        self.source = source


class Ended(Message):
    """Shard -> ingress: the shard has ended `life` and its abort machine is REQUESTED; one abort message is owed to the ring."""

    __slots__ = ("life",)

    def __init__(self, life: Life) -> None:
        self.life = life


class Register(Message):
    """Ingress -> shard: `life` is queued and the shard's from now on."""

    __slots__ = ("life",)

    def __init__(self, life: Life) -> None:
        self.life = life


class Forward(Message):
    """Ingress -> shard: an abort for a request that ingress does not own."""

    __slots__ = ("rid", "source")

    def __init__(self, rid: str, source: AbortSource) -> None:
        self.rid = rid
        self.source = source


class Fail(Message):
    """-> shard: end `rids` (None: every entry) with an internal or given error; `owed` says whether the scheduler gets aborts."""

    __slots__ = ("error", "owed", "rids")

    def __init__(self, rids: list[str] | None, error: HeadraceError, *, owed: bool) -> None:
        self.rids = rids
        self.error = error
        self.owed = owed


class StepTerminal(Message):
    """Ingress -> shard: the end of a step-sink request that never reached the shard's table."""

    __slots__ = ("item", "token")

    def __init__(self, token: Any, item: EgressItem.Error) -> None:
        self.token = token
        self.item = item
