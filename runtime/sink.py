"""Sinks: where one request's output waits for its reader, and how the reader is woken.

Owns: everything between a detokenizer shard (writer) and a client (reader). Rules it keeps:

* Locking protocol. All sinks of one shard share their `Hub`'s lock: a step writes to hundreds of sinks, and one acquisition for
  all of them is what makes a delta cheap. Readers hold it only while they swap out what is there. Whoever takes a
  parked reader off the books wakes it after the lock is released (see wakes.py), exactly once.
* The states of a sink move only through the table `SINK` (fsm/sink.py): exactly one terminal item, and it is the last. The one
  place that does not call the table per item is `put_columns`: PUT is a self-loop on OPEN and absorbed in CLOSED (a test pins
  both cells), and a shard drops a request's row at its terminal, so no other state can be met there.
* A sink owns what it holds: ids are ints or its own copies, text is an immutable str, extras are copies. No view on a frame
  outlives the step that decoded it.
* `capacity` counts chunks put in and not yet taken. One further slot is reserved for the terminal item, so a failure can
  always be told.
* At most one reader at a time. A reader that leaves (`close`) makes every later put an absorbed one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..codec.batch import KeptExtras, RowExtras
from ..codec.errors import HeadraceError, InternalError
from ..codec.finish import FinishReason
from ..fsm import SINK, SinkEvent, SinkState
from .channel import DEFAULT_PRIMITIVES, Primitives, signal
from .wakes import Book, Turn, wake

if TYPE_CHECKING:
    import asyncio

    from .stages.life import Recorder

Extras = Mapping[str, np.ndarray[Any, Any]]


class SinkError(enum.Enum):
    """Why an offer to a sink failed."""

    FULL = "full"
    CLOSED = "closed"


# A member's look-up through its class costs as much as a step of the machine (CPython 3.11).
_FULL, _CLOSED_ERROR = SinkError.FULL, SinkError.CLOSED
_CLOSED = SinkState.CLOSED
_PUT, _PUT_FINAL, _PUT_ERROR, _OVERFLOW = SinkEvent.PUT, SinkEvent.PUT_FINAL, SinkEvent.PUT_ERROR, SinkEvent.OVERFLOW


class EgressItem:
    """What a sink carries, as a closed set: Frame (a delta), Done, Control, Data, Error."""

    class Frame(msgspec.Struct, frozen=True, eq=False, gc=False):  # holds nothing that could hold it
        """A delta: `text` (str), `token_ids` (int64 array of this delta), `extras` (name -> array), scalar columns in `meta`."""

        text: str
        token_ids: np.ndarray[Any, Any]
        extras: tuple[Extras, ...] = ()
        prompt_tokens: int = 0
        meta: Mapping[str, Any] | None = None

    class Done(msgspec.Struct, frozen=True, eq=False, gc=False):
        """The end, with its finish reason; carries the terminal delta."""

        finish_reason: FinishReason
        frame: EgressItem.Frame

    class Control(msgspec.Struct, frozen=True):
        """The answer to a control request: the scheduler's bytes, verbatim."""

        payload: bytes

    class Data(msgspec.Struct, frozen=True):
        """The answer to a detokenize request."""

        text: str

    class Error(msgspec.Struct, frozen=True, eq=False):
        """The end, as a failure."""

        error: HeadraceError


Terminal = EgressItem.Done | EgressItem.Control | EgressItem.Data | EgressItem.Error


class Taken(msgspec.Struct, eq=False):
    """What a reader found: all deltas merged, and the terminal item where it has come. `ids` as in `Waiting`."""

    text: str
    ids: Any
    extras: list[Extras]
    chunks: int
    prompt_tokens: int
    meta: Mapping[str, Any] | None
    terminal: Terminal | None

    @property
    def token_ids(self) -> np.ndarray[Any, Any]:
        """The merged ids, int64."""
        return as_array(self.ids)

    @property
    def empty(self) -> bool:
        return not self.chunks and self.terminal is None


# Ids that wait for a reader; more is handed out by the writer, or the one reader would hold the lock for long.
_MOST_PUT = 1 << 16

PairsOf = Callable[[np.ndarray[Any, Any]], Sequence[Any]]
"""(text, id) of ids [steps, sinks] whose text is the delta: one for each sink where there is one step, else a list for each sink."""

Waiting = tuple[str, Any]
"""One chunk in a sink: its text and its ids, which are an int where it is a single id, else an int64 array of the sink's own."""


class Columns:
    """Deltas of one id each for many sinks: the rows of the shard, their sinks, the sinks' waiting lists, and what goes there now.

    `pairs` is one delta for each sink, or with `steps` above 1 a list of as many for each; or `ids` [steps, sinks], an array of their
    own, stands for tokens whose text is the delta.
    `sure` counts the puts that surely find room: the lists were measured, and while the hub's `version` is the same nobody else has put
    anything into them, so that only readers have changed them.
    """

    __slots__ = (
        "closes",
        "extras",
        "ids",
        "kept",
        "lists",
        "pairs",
        "rids",
        "rows",
        "sinks",
        "states",
        "steps",
        "sure",
        "version",
        "where",
    )

    def __init__(
        self, rows: Sequence[int], sinks: Sequence[Sink], lists: Sequence[list[Waiting]], pairs: Sequence[Any] = ()
    ) -> None:
        self.steps = 1
        self.ids: np.ndarray[Any, Any] | None = None
        self.rows = rows
        self.sinks = sinks
        self.lists = lists
        self.pairs = pairs
        self.sure = 0
        self.version = -1
        # of this step, where the frame has any: what is kept of it, with each position's row there, or (large ones) one for each position
        self.extras: KeptExtras | Sequence[Extras] | None = None
        self.where: Sequence[int] = ()
        self.kept: list[list[Any]] | None = None
        # for the trace: the sinks' rids, and their states while the hub has counted `closes` closes
        self.rids: list[str] = []
        self.states: Sequence[int] = b""
        self.closes = -1

    def without(self, gone: Sequence[int]) -> Columns:
        """The same sinks but for those at `gone`, ascending; nothing goes there yet. What is sure for all is sure for them."""
        rows, sinks, lists = list(self.rows), list(self.sinks), list(self.lists)
        if rows:
            for at in reversed(gone):
                del rows[at], sinks[at], lists[at]
        left = Columns(rows, sinks, lists)
        left.sure, left.version = self.sure, self.version
        return left

    def with_more(self, more: Columns, fresh: bool) -> Columns:
        """These sinks and those of `more`; nothing goes there yet. `fresh`: those of `more` hold nothing."""
        both = Columns([*self.rows, *more.rows], [*self.sinks, *more.sinks], [*self.lists, *more.lists])
        if fresh:
            both.sure, both.version = self.sure, self.version
        return both

    def only(self, keep: Sequence[int]) -> Columns:
        """The same for some of the positions."""
        rows, sinks, lists, pairs = self.rows, self.sinks, self.lists, self.pairs
        some = Columns(
            [rows[at] for at in keep],
            [sinks[at] for at in keep],
            [lists[at] for at in keep],
            [pairs[at] for at in keep] if self.ids is None else (),
        )
        some.ids = None if self.ids is None else self.ids[:, keep]
        some.extras = self.extras
        if isinstance(self.extras, KeptExtras):
            some.where = [self.where[at] for at in keep]
        elif self.extras is not None:
            some.extras = [self.extras[at] for at in keep]
        some.steps = self.steps
        return some


class Hub:
    """The lock of one shard's sinks, and the readers parked on them."""

    def __init__(
        self,
        primitives: Primitives = DEFAULT_PRIMITIVES,
        *,
        record: Recorder | None = None,
        name: str = "sink",
        pairs_of: PairsOf | None = None,
    ) -> None:
        self.primitives = primitives
        self._pairs_of = pairs_of
        # Steps that were put and have not been handed out to the sinks' lists yet, oldest first: (lists, ids or None, pairs, steps).
        self._put: list[tuple[Sequence[list[Waiting]], Any, Sequence[Any], int]] = []
        self._put_ids = 0
        self.lock = primitives.Lock()
        # who waits: threads by their signals, and the tasks of each event loop by their turns, so that a loop is woken once for all
        self.parked: dict[Sink, Any] = {}
        self.tasks: dict[asyncio.AbstractEventLoop, Book] = {}
        self.record = record
        self.name = name
        self.closes = 0  # how many sinks were closed by their readers
        self.version = 0  # counts whoever puts past the columns that were put last
        self.cut_off = False  # some sink was ended by `fail_open`

    def sure(self, parts: Sequence[Columns], capacity: int, wanted: int) -> int:
        """How many chunks, `wanted` at most and 1 at least, are sure to fit into every sink of `parts` until somebody puts into them."""
        with self.lock:
            if self.cut_off:
                return 1
            for columns in parts:
                if columns.sure < wanted or columns.version != self.version:
                    self._measure(columns, capacity)
                wanted = min(wanted, columns.sure)
        return max(1, wanted)

    def _measure(self, columns: Columns, capacity: int) -> None:
        self._hand_out()
        columns.sure = capacity - max(map(len, columns.lists), default=0)
        if columns.version < 0:  # what was measured for others does not know of these
            self.version += 1
        columns.version = self.version

    def hand_out(self) -> None:
        """Put what waits here into the sinks' lists. Whoever looks at a sink does it first."""
        with self.lock:
            self._hand_out()

    def _hand_out(self) -> None:
        """Under the lock. The loops run in C: at hundreds of requests a step this is where the time goes."""
        put = self._put
        if not put:
            return
        at = 0
        while at < len(put):
            lists, ids, pairs, steps = put[at]
            at += 1
            if ids is not None:
                assert self._pairs_of is not None
                parts = [ids]
                while at < len(put) and put[at][0] is lists and put[at][1] is not None:
                    parts.append(put[at][1])
                    at += 1
                if len(parts) > 1:
                    ids = np.concatenate(parts)
                pairs, steps = self._pairs_of(ids), len(ids)
            deque(map(list.append if steps == 1 else list.extend, lists, pairs), 0)
        put.clear()
        self._put_ids = 0

    def begin(self, begun: Sequence[tuple[Sink, int, Mapping[str, Any] | None]]) -> None:
        """What comes with the first output of these sinks: prompt_tokens, and the scalars of the wire where it has them."""
        with self.lock:
            for sink, prompt_tokens, meta in begun:
                sink._prompt_tokens, sink._meta, sink._news = prompt_tokens, meta, True

    def put_columns(self, columns: Columns, capacity: int) -> list[int]:
        """Plain deltas of one step, or of several. Returns the indices of the sinks that have no room for them; nothing was put there.

        What is put waits in columns until somebody looks at a sink: a reader's lists are then written where they are read, and what
        several steps brought at once.
        """
        steps = columns.steps
        refused: list[int] = []
        with self.lock:
            if self.cut_off:
                columns.sure = 0  # one by one: nothing may stand behind an end that the shard does not know of
            elif columns.sure < steps or columns.version != self.version:
                self._measure(columns, capacity)
            if columns.sure >= steps:
                columns.sure -= steps
                self._put.append((columns.lists, columns.ids, columns.pairs, steps))
                self._put_ids += steps * len(columns.lists)
                if self._put_ids > _MOST_PUT:
                    self._hand_out()
            else:
                self._hand_out()
                pairs: Any = columns.pairs
                if columns.ids is not None:
                    assert self._pairs_of is not None
                    pairs = self._pairs_of(columns.ids)
                put = list.append if steps == 1 else list.extend
                for at, (waiting, chunks) in enumerate(zip(columns.lists, pairs, strict=True)):
                    if len(waiting) + steps <= capacity and not columns.sinks[at]._cut_off:
                        put(waiting, chunks)
                    else:
                        refused.append(at)
            if columns.extras is not None:
                _put_extras(columns, columns.extras, set(refused))
            if self.record is not None:
                told = columns if not refused else columns.only(_others(len(columns.lists), refused))
                for _ in range(steps):
                    self._record_puts(told)
            woken = self._wake(columns.sinks) if self.parked or self.tasks else ()
        if woken:
            wake(woken)
        return refused

    def _record_puts(self, columns: Columns) -> None:
        """Trace one step's puts. PUT leaves OPEN as it is, and so does a put that a closed sink absorbs."""
        assert self.record is not None
        if columns.closes != self.closes:
            columns.rids = [sink._rid for sink in columns.sinks]
            columns.states = bytes([sink._state for sink in columns.sinks])  # bytes: the collector does not look inside
            columns.closes = self.closes
        self.record.record_many("sink", columns.rids, columns.states, _PUT, columns.states, self.name)

    def put_items(self, items: Sequence[tuple[Sink, EgressItem.Frame | Terminal]]) -> list[tuple[int, SinkError]]:
        """Deltas and terminal items in order. Returns (index, why) for those that were refused; nothing of those was stored."""
        refused = []
        # A frame may name a request twice. Behind a delta that did not fit, an end without a delta would still find the reserved
        # slot, and a stream that lost output would end like a success; only an error may follow.
        lost: set[Sink] = set()
        with self.lock:
            self._hand_out()
            # An end is the last of its sink, which leaves its columns; another delta is one that they do not know of.
            self.version += any(isinstance(item, EgressItem.Frame) for _, item in items)
            for index, (sink, item) in enumerate(items):
                if sink in lost and not isinstance(item, EgressItem.Error):
                    why: SinkError | None = _FULL
                else:
                    why = sink._offer(item)
                if why is not None:
                    refused.append((index, why))
                    if why is _FULL:
                        lost.add(sink)
            woken = self._wake([sink for sink, _ in items]) if self.parked or self.tasks else ()
        if woken:
            wake(woken)
        return refused

    def fail_open(self, sink: Sink, error: HeadraceError) -> None:
        """End `sink` with `error` unless it has ended; for a stage that died, whose own path to the sink is gone."""
        with self.lock:
            self._hand_out()
            if sink._state == SinkState.OPEN:
                sink._offer(EgressItem.Error(error))
            sink._cut_off = True
            self.cut_off = True
            woken = self._wake((sink,))
        if woken:
            wake(woken)

    def _wake(self, touched: Sequence[Sink]) -> list[Any]:
        """Under the lock: who is to be woken, after the lock and with `wake`, because these sinks were put to. The sequence must not change."""
        woken: list[Any] = []
        parked = self.parked
        if parked:
            if len(touched) <= 8 * len(parked):
                woken += filter(None, map(parked.pop, touched, repeat(None)))
            else:
                woken += [parked.pop(sink) for sink in [sink for sink in parked if sink._ready()]]
        for book in self.tasks.values():
            if book.leave_word(touched):
                woken.append((self, book))
        return woken

    def called(self, book: Book) -> deque[Turn]:
        """On the loop of `book`: whose output has come."""
        with self.lock:
            return book.called()

    def take_for(self, turns: deque[Turn], ready: deque[Turn], most: int) -> None:
        """On the loop of `turns`: move up to `most` of those that a task waits at to `ready`, with what came for them.

        Only a single plain chunk is taken here, and its turn armed again; for anything else the reader looks for itself.
        """
        self.lock.acquire()
        try:
            self._hand_out()
            for _ in range(min(most, len(turns))):
                turn = turns.popleft()
                if turn.callback is None:  # cancelled, or busy: it looks when it comes
                    turn.armed = False
                    continue
                ready.append(turn)
                sink = turn.sink
                if sink is not None and turn.found is None:
                    items = sink._items
                    if len(items) == 1 and not sink._news and not sink._extras:
                        turn.found = items.pop()
                        turn.book[sink] = turn
                        continue
                turn.armed = False
        finally:
            self.lock.release()

    def book(self, loop: asyncio.AbstractEventLoop) -> Book:
        """Where the tasks of `loop` stand while they wait."""
        with self.lock:
            book = self.tasks.get(loop)
            if book is None:
                book = self.tasks[loop] = Book(loop)
            return book

    def close_book(self, book: Book) -> None:
        """Its loop is closed: nobody waits there, and nobody will."""
        with self.lock:
            if self.tasks.get(book.loop) is book:
                del self.tasks[book.loop]


class Sink:
    """One request's output. Writers go through the `Hub`; everything a reader does is here."""

    __slots__ = (
        "__weakref__",
        "_capacity",
        "_cut_off",
        "_extras",
        "_hub",
        "_items",
        "_meta",
        "_news",
        "_prompt_tokens",
        "_rid",
        "_state",
        "_terminal",
        "_wide",
    )

    def __init__(self, hub: Hub, capacity: int, rid: str = "") -> None:
        self._hub = hub
        self._rid = rid
        self._capacity = capacity
        self._state: SinkState = SINK.initial
        self._items: list[Waiting] = []
        self._extras: list[Any] = []  # flat: (what is kept of a frame, row) or (mapping, None), one after the other
        self._prompt_tokens = 0
        self._meta: Mapping[str, Any] | None = None
        self._terminal: Terminal | None = None
        self._cut_off = False  # ended past its shard (see Hub.fail_open); what the shard still gives is refused
        # There is more to know than waiting chunks and extras: prompt_tokens, meta, a terminal, a close.
        self._news = False
        self._wide = False  # some waiting chunk holds an array of ids

    # -- writer's side, under the hub's lock ---------------------------------------------------------------------------

    def _offer(self, item: EgressItem.Frame | Terminal) -> SinkError | None:
        if self._cut_off or self._state == _CLOSED:
            return _CLOSED_ERROR
        if isinstance(item, EgressItem.Frame):
            if len(self._items) >= self._capacity:
                return _FULL
            self._store(item)
            self._step(_PUT)
            return None
        if isinstance(item, EgressItem.Error):
            self._step(_OVERFLOW if item.error.code == "slow_client" else _PUT_ERROR)
        else:
            if isinstance(item, EgressItem.Done):
                frame = item.frame
                # The reserved slot is for the terminal alone: a terminal that carries a delta needs room for that delta, or a
                # stream that lost text would end like a success.
                if (frame.text or len(frame.token_ids) or frame.extras) and len(self._items) >= self._capacity:
                    return _FULL
                self._store(frame)
            self._step(_PUT_FINAL)
        self._terminal = item
        self._news = True
        return None

    def _step(self, event: SinkEvent) -> None:
        before = self._state
        self._state = SINK.next(before, event)
        if self._hub.record is not None:
            self._hub.record.record("sink", self._rid, before, event, self._state, self._hub.name)

    def _store(self, frame: EgressItem.Frame) -> None:
        ids: Any = frame.token_ids
        if len(ids) == 1:
            ids = int(ids[0])
        else:
            self._wide = True
        self._items.append((frame.text, ids))
        for own in frame.extras:
            self._extras += (own, None)
        if frame.prompt_tokens:
            self._prompt_tokens, self._news = frame.prompt_tokens, True
        if frame.meta is not None:
            self._meta, self._news = frame.meta, True

    def waiting(self) -> list[Waiting]:
        """The list of waiting chunks, for `Hub.put_columns`; the same object for the sink's whole life."""
        return self._items

    def _ready(self) -> bool:
        self._hub._hand_out()
        return bool(self._items) or self._terminal is not None or self._state == _CLOSED

    # -- reader's side -------------------------------------------------------------------------------------------------

    def take(self) -> Taken:
        """Everything that is there, merged into one delta. Never waits."""
        with self._hub.lock:
            taken, items, wide = self._take()
        return _merged(taken, items, wide)

    def turn(self, loop: asyncio.AbstractEventLoop, *, take: bool = False) -> Turn:
        """A place to wait for a task of `loop`; `take`: for an iterator, which has left when its wait is cancelled."""
        return Turn(self._hub.book(loop), self if take else None)

    def get(self, waiter: Any) -> Taken | Waiting | None:
        """What is there; when there is nothing, None, and `waiter` (a `Turn`, a signal, or None: nobody) is parked.

        A single plain chunk is given as it is, which is what a reader finds who keeps up; anything else as `Taken`. A turn is armed after
        a plain chunk too: its reader may wait with it when it comes back for more, and need not look here before.
        """
        hub = self._hub
        hub.lock.acquire()  # not `with`, which costs as much as all the rest
        try:
            if hub._put:
                hub._hand_out()
            items = self._items
            if len(items) == 1 and not self._news and not self._extras:
                if type(waiter) is Turn:
                    self._arm(waiter)
                return items.pop()
            if not self._ready():
                if type(waiter) is Turn:
                    self._arm(waiter)
                elif waiter is not None:
                    self._park(waiter)
                return None
            taken, items, wide = self._take()
        finally:
            hub.lock.release()
        return _merged(taken, items, wide)

    def next(self, timeout: float | None = None) -> Taken | Waiting | None:
        """For a thread: what `get` gives, as soon as there is something; None when `timeout` seconds pass first."""
        found = self.get(None)
        if found is None:
            waiter = signal(self._hub.primitives)
            found = self.get(waiter)
            if found is None and self._sleep(waiter, timeout):
                found = self.get(None)
        return found

    def wait(self, timeout: float | None = None) -> Taken | None:
        """What `take` gives, as soon as there is something; None when `timeout` seconds pass first."""
        waiter = signal(self._hub.primitives)
        if self.park(waiter) and not self._sleep(waiter, timeout):
            return None
        return self.take()

    def _sleep(self, waiter: Any, timeout: float | None) -> bool:
        """The reader is parked with `waiter`: True when it was woken, False when its time ran out first."""
        try:
            if waiter.acquire() if timeout is None else waiter.acquire(True, max(0.0, timeout)):
                return True
        except BaseException:
            self.unpark(waiter)
            raise
        return not self.unpark(waiter)

    def park(self, waiter: Any) -> bool:
        """Park `waiter` if there is nothing; False when there is something now."""
        with self._hub.lock:
            if self._ready():
                return False
            if type(waiter) is Turn:
                self._arm(waiter)
            else:
                self._park(waiter)
            return True

    def unpark(self, waiter: Any) -> bool:
        """`waiter` does not wait any more. False when it has been taken off the books already, and is woken or about to be."""
        with self._hub.lock:
            book = waiter.book if type(waiter) is Turn else self._hub.parked
            if book.get(self) is not waiter:
                return False
            del book[self]
            return True

    def _arm(self, turn: Turn) -> None:
        if turn.book.get(self) is not turn:
            self._alone()
            turn.book[self] = turn
        turn.armed = True

    def _park(self, waiter: Any) -> None:
        self._alone()
        self._hub.parked[self] = waiter

    def _alone(self) -> None:
        """Nobody else waits. Whoever waits in an event loop that is closed is nobody: its coroutine was collected, which takes no lock."""
        hub = self._hub
        if hub.tasks:
            for book in [book for book in hub.tasks.values() if book.loop.is_closed()]:
                del hub.tasks[book.loop]
        if self in hub.parked or any(self in book.turns for book in hub.tasks.values()):
            raise InternalError("a request's output is already being waited for by another reader")

    def _take(self) -> tuple[Taken, list[Waiting], bool]:
        """Under the lock: what is there. Merging it is the reader's work and needs no lock."""
        self._hub._hand_out()
        # Copied out and cleared, not swapped: the shard knows these lists for as long as the request lives.
        items, extras = self._items[:], self._extras[:]
        self._items.clear()
        self._extras.clear()
        wide, self._wide = self._wide, False
        self._news = self._terminal is not None
        return Taken("", _NO_IDS, extras, len(items), self._prompt_tokens, self._meta, self._terminal), items, wide

    def close(self) -> bool:
        """The reader leaves: later output is absorbed and what is held is let go. True if that ended an open stream."""
        hub = self._hub
        with hub.lock:
            hub._hand_out()
            was_open = self._state == SinkState.OPEN
            self._step(SinkEvent.CLOSE)
            hub.closes += 1
            if was_open:
                self._items.clear()
                self._extras.clear()
            self._news = True
            # a parked reader (another thread) learns that the stream is closed
            woken = hub._wake((self,)) if was_open else ()
        if woken:
            wake(woken)
        return was_open

    @property
    def state(self) -> SinkState:
        with self._hub.lock:
            return self._state

    @property
    def pending(self) -> int:
        """Chunks put in and not yet taken."""
        with self._hub.lock:
            self._hub._hand_out()
            return len(self._items)


def _put_extras(columns: Columns, extras: KeptExtras | Sequence[Extras], refused: set[int]) -> None:
    """One step's extras: to each sink what is kept of the frame, and where it stands there."""
    if columns.kept is None:
        columns.kept = [sink._extras for sink in columns.sinks]
    if not isinstance(extras, KeptExtras):
        for at, own in enumerate(extras):
            if own and at not in refused:
                columns.kept[at] += (own, None)
    elif extras.all_have and not refused:
        deque(map(list.extend, columns.kept, zip(repeat(extras), columns.where)), 0)
    else:
        for at, row in enumerate(columns.where):
            if extras.some[row] and at not in refused:
                columns.kept[at] += (extras, row)


def _others(count: int, refused: list[int]) -> list[int]:
    gone = set(refused)
    return [at for at in range(count) if at not in gone]


def _merged(taken: Taken, items: list[Waiting], wide: bool) -> Taken:
    """`taken` with the text, ids and extras of `items`, in order; `wide`: some hold an array of ids."""
    flat: list[Any] = taken.extras
    if flat:
        pairs = zip(flat[::2], flat[1::2], strict=True)
        taken.extras = [kept if row is None else RowExtras(kept, row) for kept, row in pairs]
    if len(items) == 1:
        taken.text, taken.ids = items[0]
    elif items:
        taken.text = "".join(map(itemgetter(0), items))
        if wide:
            taken.ids = np.concatenate([as_array(ids) for _, ids in items])
        else:
            taken.ids = np.fromiter(map(itemgetter(1), items), np.int64, len(items))
    return taken


def as_array(ids: Any) -> np.ndarray[Any, Any]:
    """Ids of a waiting chunk, which are an int where it is a single id, as an int64 array."""
    return np.array([ids], dtype=np.int64) if type(ids) is int else ids


_NO_IDS = np.empty(0, dtype=np.int64)
_NO_IDS.setflags(write=False)
