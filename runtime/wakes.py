"""How readers that are parked on a sink are woken: threads by a signal, asyncio tasks all at once in one call of their loop.

Owns: what a parked reader leaves in the hub. Rules it keeps:

* Whoever takes a thread's signal off the hub's books, under the hub's lock, gives it back exactly once with `wake`, after the lock.
* One wake for each event loop and step, and none while one is on its way. The writer only leaves word of which sinks it put to; the
  loop finds out who of its tasks waits for them, because what a task needs next should be in the cache of its own core.
* The loop's one call goes on with every task whose output has come, directly: a future per task would send each of them through the
  loop's queue once more, which costs more than all the rest of a delivery.
* A `Turn` is a future to asyncio's tasks, by the protocol that asyncio itself looks for (`_asyncio_future_blocking`), and is used for
  one wait after another. Everything in it belongs to the loop's thread. It takes no lock, also when its task is cancelled.
* A cancelled wait did not happen: nothing is taken for a reader who could come back. (An iterator that is cancelled has left.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import Context
from itertools import repeat
from typing import Any


class Book:
    """The tasks of one event loop that wait for sinks of one hub. Guarded by the hub's lock.

    `touched`: word of sinks that were put to since the loop last looked, a sequence for each put; the loop is called, or about to be,
    exactly while there is some.
    """

    __slots__ = ("loop", "touched", "turns")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.turns: dict[Any, Turn] = {}
        self.touched: list[Sequence[Any]] = []

    def leave_word(self, touched: Sequence[Any]) -> bool:
        """Somebody has put to the sinks `touched`, a sequence that will not change. True if the loop is to be called for it."""
        turns, words = self.turns, self.touched
        if not turns or (len(turns) <= _FEW and not any(sink._ready() for sink in turns)):
            return False
        if not words:
            words.append(touched)
            return True
        if self.loop.is_closed():  # it was called, and closed before it looked: whoever calls it again learns that
            return True
        if words[-1] is not touched:
            if len(words) >= _WORDS:  # a loop that is far behind asks every sink
                words[:] = [list(turns)]
            words.append(touched)
        return False

    def called(self) -> deque[Turn]:
        """The loop looks: the turns of the sinks that were put to, taken out."""
        found: deque[Turn] = deque()
        turns = self.turns
        for touched in self.touched:
            if len(touched) <= 8 * len(turns):
                found.extend(filter(None, map(turns.pop, touched, repeat(None))))
            else:
                found.extend([turns.pop(sink) for sink in [sink for sink in turns if sink._ready()]])
        self.touched.clear()
        return found


_FEW = 8  # so many readers are asked whether they have something before their loop is called
_WORDS = 64  # sequences that wait for a loop


class Turn:
    """One asyncio reader's place to wait, for one wait after another. A wake for no reason is possible.

    `armed`: it stands in its book, or its wake has begun; a reader may wait here exactly as long as it is set. `found`: a
    plain chunk that the wake has taken out of `sink` for the reader, who is about to go on; it comes before whatever the sink holds.
    `callback`: the task that waits here now. `cancelled`: a task that waited here was cancelled and does not know it yet.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_loop",
        "_message",
        "armed",
        "book",
        "callback",
        "cancelled",
        "context",
        "found",
        "loop",
        "sink",
    )

    def __init__(self, book: Book, sink: Any = None) -> None:
        self.loop = self._loop = book.loop  # asyncio looks for the second name
        self.book = book.turns
        self._asyncio_future_blocking = False
        self.callback: Callable[[Any], object] | None = None
        self.context: Any = None
        self.cancelled = False
        self._message: object = None
        self.armed = False
        self.sink = sink  # None: the reader takes for itself
        self.found: Any = None

    def __await__(self) -> Generator[Turn, None, None]:
        # The task is given the turn, once. A generator would do the same at twice the cost.
        self._asyncio_future_blocking = True
        return iter((self,))  # type: ignore[return-value]

    # -- what a task calls ---------------------------------------------------------------------------------------------

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context) -> None:
        """A task waits here now."""
        self.callback = callback
        self.context = context

    def cancel(self, msg: object = None) -> bool:
        """The task is cancelled: it is called back, through the loop, and then finds `CancelledError` here."""
        callback, self.callback = self.callback, None
        if callback is None:
            return False
        self.cancelled, self._message = True, msg
        self._loop.call_soon(callback, self, context=self.context)
        return True

    def result(self) -> None:
        """None, or `CancelledError` after `cancel`."""
        if self.cancelled:
            self.cancelled = False
            raise asyncio.CancelledError() if self._message is None else asyncio.CancelledError(self._message)


def wake(woken: Iterable[Any]) -> None:
    """Wake what a hub gave out for waking: (hub, book of a loop), or the signal of a thread."""
    for who in woken:
        if type(who) is not tuple:
            who.release()
            continue
        hub, book = who
        try:
            book.loop.call_soon_threadsafe(_look, hub, book)
        except RuntimeError:
            # The loop is closed: its readers are gone for good, and their handles' finalisers abort the requests.
            hub.close_book(book)


def _look(hub: Any, book: Book) -> None:
    """On the loop: somebody has put to sinks that tasks may wait for."""
    _go_on(hub, book.loop, hub.called(book), deque())


def _go_on(hub: Any, loop: asyncio.AbstractEventLoop, turns: deque[Turn], ready: deque[Turn]) -> None:
    """Go on with each task that waits at one of `turns`; `ready`: those that were taken for.

    What a task does may raise through here (an interrupt) or run the loop inside itself (as notebooks do); the rest is then served by
    the second call, which otherwise finds nothing left.
    """
    if len(turns) + len(ready) > 1:
        loop.call_soon(_go_on, hub, loop, turns, ready)
    done = loop.create_future()  # what the tasks are called back with, of the kind that they know best
    done.set_result(None)
    while ready or turns:
        if not ready:
            hub.take_for(turns, ready, _SLICE)
        while ready:
            turn = ready.popleft()
            callback = turn.callback
            if callback is not None:  # else it was cancelled
                turn.callback = None
                turn.context.run(callback, done)


_SLICE = 64  # turns that are taken for under one lock: the writer waits no longer than that
