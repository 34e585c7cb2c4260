"""What a client holds: the handle of one request, its chunks, and its completion.

Owns: the reader's side of a request. Rules it keeps:

* Iterating gives deltas: text, ids and extras are disjoint, and their concatenation is the whole. Chunks that wait are merged for a
  slow reader; none is dropped. A cumulative view is a fold over them (`Completion` is one).
* Leaving aborts. The iterator behind `for`/`async for` aborts when it ends or is dropped before it saw the terminal item; so does
  `close`, the end of `with handle:`, a cancelled task, and the collector.
* Nothing that the collector can run takes a lock, because it can run inside any critical section, also one of its own thread. That
  is `__del__`, and just as much the way out of a generator or coroutine that died in a reference cycle. They only store a flag
  (an attribute store is atomic) and put the rid into a `queue.SimpleQueue` (documented as reentrant); a driver thread does the rest.
* A terminal item is read once and kept, so `result()` can be asked again.
* In a forked child no thread serves a handle: reading raises, leaving does nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

import msgspec
import numpy as np

from ..codec import FinishReason
from ..codec.errors import ClientClosedError, InternalError
from ..fsm import AbortSource
from .render import TokenText, render
from .sink import EgressItem, Sink, Taken, Terminal, Waiting, as_array
from .waits import seconds
from .wakes import Turn

Ids = np.ndarray[Any, np.dtype[np.int64]]
_Iterator = TypeVar("_Iterator")


_process = os.getpid()  # asking the system costs as much as all the rest of making a handle


def _in_child() -> None:
    global _process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request: `prompt_tokens` as the scheduler says, `completion_tokens` as delivered."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One delta of a stream.

    `text` and `token_ids` (int64) are this delta's own; `completion_tokens` counts all ids up to and including it.
    `finish_reason` is None while running, never an empty string. `extras` holds logprob columns and hidden states by name
    (``out_lp_val`` …), concatenated over what was merged; `meta` the per-request scalars of the wire where it has them.
    """

    # One of these is made for each token and reader. What most of them do not need (an array for one id, mappings that are empty) is
    # made when it is asked for; and with nothing in it that could lead back to it, the collector need not look at it.
    text: str
    _ids: Any  # as in `Waiting`
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    _extras: Mapping[str, np.ndarray[Any, Any]] | None = None
    _meta: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        shown = ["text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens"]
        shown += [name for name in ("extras", "meta") if getattr(self, name)]
        return f"Chunk({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def token_ids(self) -> Ids:
        """The ids of this delta, int64; the same array each time."""
        ids: Ids = as_array(self._ids)
        if ids is not self._ids:
            msgspec.structs.force_setattr(self, "_ids", ids)
        return ids

    @property
    def extras(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Arrays by name; empty where the request asked for none."""
        return self._extras if self._extras is not None else {}

    @property
    def meta(self) -> Mapping[str, Any]:
        """The wire's scalars by name; empty where it has none."""
        return self._meta if self._meta is not None else {}


class Completion(msgspec.Struct, frozen=True, eq=False):
    """A finished request: the fold of its chunks."""

    rid: str
    text: str
    token_ids: Ids
    finish_reason: FinishReason
    usage: Usage
    extras: Mapping[str, np.ndarray[Any, Any]]
    meta: Mapping[str, Any]

    @property
    def prompt_tokens(self) -> int:
        return self.usage.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self.usage.completion_tokens


class RequestHandle:
    """A request in flight. One reader at a time: a second iterator while one is live is an error.

    `for chunk in handle` in a thread, `async for chunk in handle` in asyncio; `result()` / `await aresult()` for the whole. A
    request that ended with an error raises it (a `HeadraceError` with this request's client-facing rid).
    """

    __slots__ = (
        "__weakref__",
        "_abort",
        "_count",
        "_cumulative",
        "_extras",
        "_forgotten",
        "_left",
        "_lock",
        "_meta",
        "_process",
        "_prompt_tokens",
        "_reader",
        "_rid",
        "_seen",
        "_shown",
        "_sink",
        "_terminal",
        "_token_text",
        "_told",
    )

    def __init__(
        self,
        rid: str,
        shown_rid: str,
        sink: Sink | None,
        abort: Callable[[str, AbortSource], bool],
        forgotten: Callable[[str], None],
        *,
        cumulative: bool = False,
        token_text: TokenText | None = None,
    ) -> None:
        self._rid = rid
        self._token_text = token_text
        self._shown = shown_rid
        self._sink = sink
        self._abort = abort
        self._forgotten = forgotten
        self._cumulative = cumulative
        self._lock = threading.Lock()
        self._process = _process
        self._reader: Callable[[], object] | None = None  # tells whether somebody reads; a dead weak reference says no
        self._left = False
        self._told = False
        self._terminal: Terminal | None = None
        # What has been read. Not the waiting pairs themselves: a pair that dies at once is used again for the next token, and one that is
        # kept costs five times the memory and is one more thing for the collector to look at.
        self._seen: list[Any] = []  # flat: text, ids, text, ids, …
        self._extras: list[Mapping[str, np.ndarray[Any, Any]]] | None = None
        self._count = 0
        self._prompt_tokens = 0
        self._meta: Mapping[str, Any] | None = None

    @property
    def rid(self) -> str:
        """The request id as the client knows it."""
        return self._shown

    def to_dict(self, part: Chunk | Completion) -> dict[str, Any]:
        """A chunk or the completion of this request in the shape of a `/generate` answer, ready for any JSON encoder.

        NaN and infinities are null. Logprob candidates carry their text if the request asked for it (return_text_in_logprobs).
        """
        return render(
            rid=self._shown,
            text=part.text,
            token_ids=part.token_ids,
            finish_reason=part.finish_reason,
            prompt_tokens=part.prompt_tokens,
            completion_tokens=part.completion_tokens,
            extras=part.extras,
            meta=part.meta,
            token_text=self._token_text,
        )

    def __repr__(self) -> str:
        return f"<RequestHandle {self._shown!a}>"

    # -- reading ------------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Chunk]:
        return self._begin(cumulative(self._chunks()) if self._cumulative else self._chunks())

    def _chunks(self) -> Iterator[Chunk]:
        sink = self._readable()
        try:
            while self._terminal is None:
                found = sink.next()
                if found is not None and (chunk := self._absorb(found)) is not None:
                    yield chunk
            self._raise_error()
        finally:
            self._end_reading()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        chunks = AsyncChunks(self, self._readable())
        return self._begin(acumulative(chunks) if self._cumulative else chunks)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the whole request as one completion, with what was read before.

        Raises the request's error, or TimeoutError after `timeout` seconds, which leaves the request running.
        """
        timeout = seconds("timeout", timeout)
        sink = self._readable()
        self._begin(None)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self._terminal is None:
                found = sink.next(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if found is None:
                    raise TimeoutError(
                        f"request {self._shown!a} has not finished within {timeout} s; it goes on running"
                    )
                self._absorb(found)
        finally:
            self._reader = None
        self._raise_error()
        return self._completion()

    async def aresult(self, timeout: float | None = None) -> Completion:
        """The same in asyncio. A cancelled task aborts the request; a timeout leaves it running."""
        timeout = seconds("timeout", timeout)
        sink = self._readable()
        self._begin(None)
        try:
            try:
                async with asyncio.timeout(timeout):
                    while self._terminal is None:
                        await arrival(sink)
                        self._absorb(sink.take())
            except TimeoutError:
                raise TimeoutError(
                    f"request {self._shown!a} has not finished within {timeout} s; it goes on running"
                ) from None
        except asyncio.CancelledError:
            self._leave(AbortSource.GUARD)
            raise
        finally:
            self._reader = None
        self._raise_error()
        return self._completion()

    # -- leaving ------------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Ask for the end; the stream then ends with `client_closed`. A no-op after the end or a second time."""
        self._check_process()
        self._abort(self._rid, AbortSource.API)

    def close(self) -> None:
        """Leave: no more output is kept, and the request is aborted unless it has ended. Idempotent."""
        self._leave(AbortSource.GUARD)

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(self, why: type[BaseException] | None = None, *_: object) -> None:
        if (
            why is GeneratorExit
        ):  # of a generator or coroutine that may have been collected (see the module's head): no lock
            self._end_reading()
        else:
            self.close()

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(self, why: type[BaseException] | None = None, *_: object) -> None:
        self.__exit__(why)

    def claim_end(self) -> bool:
        """True for the first caller: it tells this request's end, through `on_step`. A dead stage's end and the shard's own may race."""
        with self._lock:
            first, self._told = not self._told, True
        return first

    def forget(self) -> None:
        """The request was never submitted, or somebody else ends it: dropping this handle must not abort anything."""
        with self._lock:
            self._left = True

    def __del__(self) -> None:
        # No lock, no event, nothing that could wait: see the module's head.
        if self._sink is not None and self._terminal is None and not self._left:
            self._forgotten(self._rid)

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _readable(self) -> Sink:
        if self._sink is None:
            raise InternalError(
                "a request of the step sink is delivered to on_step and cannot be read here", rid=self._shown
            )
        return self._sink

    def _check_process(self) -> None:
        if _process != self._process:
            raise InternalError(
                "this request belongs to another process; threads do not survive a fork", rid=self._shown
            )

    def _begin(self, iterator: _Iterator) -> _Iterator:
        """Somebody starts to read: `iterator`, for as long as it is alive and not exhausted, or (None) this very call."""
        self._readable()
        self._check_process()
        with self._lock:
            reader = self._reader
            if reader is not None and reader() is not None:
                raise InternalError(
                    "this request is already being read; a handle has one reader at a time", rid=self._shown
                )
            self._reader = _this_call if iterator is None else weakref.ref(iterator)
            if self._left and self._terminal is None:
                self._terminal = self._closed()
        return iterator

    def _end_reading(self) -> None:
        # The collector may be the caller (see the module's head): no lock.
        self._reader = None
        if self._terminal is None and not self._left:
            self._left = True
            self._forgotten(self._rid)

    def _leave(self, source: AbortSource) -> None:
        if _process != self._process:
            return  # its locks may be held for ever by threads that do not exist here
        with self._lock:
            first, self._left = not self._left, True
        if first and self._terminal is None:
            if self._sink is not None:
                self._sink.close()
            self._abort(self._rid, source)

    def _closed(self) -> EgressItem.Error:
        return EgressItem.Error(ClientClosedError("the handle was closed", rid=self._shown))

    def _absorb(self, found: Taken | Waiting) -> Chunk | None:
        """Fold what was found into the running totals; the chunk of it, or None where there is nothing to show."""
        if isinstance(found, tuple):  # a plain chunk, as it is at nearly every token
            if self._left:
                self._terminal = self._closed()
                return None
            text, ids = found
            self._count = count = self._count + (1 if type(ids) is int else len(ids))
            self._seen += (text, ids)
            return Chunk(text, ids, None, self._prompt_tokens, count, None, self._meta)
        return self._absorb_all(found)

    def _absorb_all(self, taken: Taken) -> Chunk | None:
        if self._left and taken.terminal is None:  # closed by another thread: what is still there belongs to nobody
            self._terminal = self._closed()
            return None
        self._count += 1 if type(taken.ids) is int else len(taken.ids)
        self._prompt_tokens = taken.prompt_tokens or self._prompt_tokens
        if taken.meta is not None:
            self._meta = taken.meta
        self._terminal = taken.terminal
        if self._terminal is None and not taken.chunks:
            return None
        if taken.chunks:
            self._seen += (taken.text, taken.ids)
        if taken.extras:
            if self._extras is None:
                self._extras = []
            self._extras += taken.extras
        if isinstance(self._terminal, EgressItem.Error) and not taken.chunks:
            return None
        finish = self._terminal.finish_reason if isinstance(self._terminal, EgressItem.Done) else None
        extras = join_extras(taken.extras) if taken.extras else None
        return Chunk(taken.text, taken.ids, finish, self._prompt_tokens, self._count, extras, self._meta)

    def _raise_error(self) -> None:
        if isinstance(self._terminal, EgressItem.Error):
            raise self._terminal.error.with_traceback(None)  # asked again, it would carry every earlier call's frames

    def _completion(self) -> Completion:
        assert isinstance(self._terminal, EgressItem.Done)
        return Completion(
            rid=self._shown,
            text="".join(self._seen[::2]),
            token_ids=join_ids(self._seen[1::2]),
            finish_reason=self._terminal.finish_reason,
            usage=Usage(self._prompt_tokens, self._count),
            extras=join_extras(self._extras or ()),
            meta=self._meta or {},
        )


class _Fold:
    """The running totals of a stream."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[Ids] = []
        self.extras: list[Mapping[str, np.ndarray[Any, Any]]] = []

    def add(self, chunk: Chunk) -> Chunk:
        self.texts.append(chunk.text)
        self.ids.append(chunk.token_ids)
        self.extras.append(chunk.extras)
        text, ids, extras = "".join(self.texts), np.concatenate(self.ids), join_extras(self.extras)
        self.texts, self.ids, self.extras = [text], [ids], [extras]
        return msgspec.structs.replace(chunk, text=text, _ids=ids, _extras=extras)


def cumulative(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The cumulative view of a stream of deltas: text, ids and extras so far, *all* of them, in every chunk.

    The last one equals the concatenation of the deltas. Work per chunk grows with the answer, which is why deltas are the default.
    """
    fold = _Fold()
    try:
        for chunk in chunks:
            yield fold.add(chunk)
    finally:
        if isinstance(chunks, Generator):
            chunks.close()


async def acumulative(chunks: AsyncIterable[Chunk]) -> AsyncIterator[Chunk]:
    """`cumulative` in asyncio."""
    fold = _Fold()
    try:
        async for chunk in chunks:
            yield fold.add(chunk)
    finally:
        if isinstance(chunks, (AsyncGenerator, AsyncChunks)):
            await chunks.aclose()


class AsyncChunks:
    """The iterator of one reader in asyncio. Not a generator: those cost more than all the rest of a delivery.

    It ends at the terminal, at `aclose`, and whenever a wait in it ends by an exception (a cancelled task, a collected coroutine);
    dropping one that was begun is leaving. Then it gives no more.
    """

    __slots__ = ("__weakref__", "_handle", "_over", "_sink", "_turn")

    def __init__(self, handle: RequestHandle, sink: Sink) -> None:
        self._handle = handle
        self._sink = sink
        self._turn: Turn | None = None  # made when it is begun
        self._over = False

    def __aiter__(self) -> AsyncChunks:
        return self

    async def __anext__(self) -> Chunk:
        """The next delta. Raises the request's error, once, and StopAsyncIteration at the end."""
        if self._over:
            raise StopAsyncIteration
        handle, sink, turn = self._handle, self._sink, self._turn
        if turn is None:
            turn = self._turn = sink.turn(asyncio.get_running_loop(), take=True)
        elif turn.callback is not None or turn.cancelled:
            raise InternalError("this request is already being read; a handle has one reader at a time", rid=handle.rid)
        try:
            while handle._terminal is None:
                found = turn.found
                if found is not None:
                    turn.found = None
                elif turn.armed:
                    loop = asyncio.get_running_loop()
                    if turn.loop is not loop:
                        # The reader goes on in another loop: its place in the first one is given up.
                        sink.unpark(turn)
                        turn = self._turn = sink.turn(loop, take=True)
                        continue
                    await turn
                    continue
                else:
                    found = sink.get(turn)
                if type(found) is tuple and not handle._left:
                    # what `_absorb` does with it, without the call: here is nearly every token of every reader
                    text, ids = found
                    handle._count = count = handle._count + (1 if type(ids) is int else len(ids))
                    handle._seen += found
                    return Chunk(text, ids, None, handle._prompt_tokens, count, None, handle._meta)
                if found is not None and (chunk := handle._absorb(found)) is not None:
                    return chunk
            handle._raise_error()
        except asyncio.CancelledError:
            # Not in the other cases: a coroutine that the collector closes (its loop is gone) must not take the sink's lock.
            sink.unpark(turn)
            self._end()
            raise
        except BaseException:
            self._end()
            raise
        self._end()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Leave: the request is aborted unless its end was seen. Idempotent."""
        if self._turn is not None and not self._over:
            self._end()
        self._over = True

    def _end(self) -> None:
        self._over = True
        self._handle._end_reading()

    def __del__(self) -> None:
        # No lock, no event, nothing that could wait: see the module's head.
        if self._turn is not None and not self._over:
            self._end()


async def arrival(sink: Sink) -> None:
    """Return when `sink` has something. A cancelled wait did not happen: the sink forgets the waiter."""
    turn = sink.turn(asyncio.get_running_loop())
    while sink.park(turn):
        try:
            await turn
        except asyncio.CancelledError:
            # Not `finally`: a coroutine that the collector closes (its loop is gone) must not take the sink's lock.
            sink.unpark(turn)
            raise


def join_ids(parts: Sequence[Any]) -> Ids:
    """Ids of several chunks, each as in `Waiting`, as one int64 array."""
    if all(type(ids) is int for ids in parts):
        return np.fromiter(parts, np.int64, len(parts))
    return np.concatenate([as_array(ids) for ids in parts])


def join_extras(parts: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
    """Extras of several chunks as one: rows in order, each name concatenated over the chunks that have it."""
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([part[name] for part in parts if name in part]) for name in names}


def _this_call() -> object:
    """Stands for `result` and `aresult`, which read until they return."""
    return True
