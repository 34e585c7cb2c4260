"""What a client holds: the handle of one request, its chunks, and its completion.

Owns: the reader's side of a request. Rules it keeps:

* Iterating gives deltas: text, ids and extras are disjoint, and their concatenation is the whole. Chunks that wait are merged for a
  slow reader; none is dropped. A cumulative view is a fold over them (`Completion` is one).
* Leaving aborts. The generator behind `for`/`async for` aborts in its `finally` unless it saw the terminal item; so does `close`,
  the end of `with handle:`, a cancelled task, and the collector.
* Nothing that the collector can run takes a lock, because it can run inside any critical section, also one of its own thread. That
  is `__del__`, and just as much the `finally` of a generator or coroutine that died in a reference cycle. They only store a flag
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
from .sink import EgressItem, Sink, Taken, Terminal
from .waits import seconds

Ids = np.ndarray[Any, np.dtype[np.int64]]
_Iterator = TypeVar("_Iterator")


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request: `prompt_tokens` as the scheduler says, `completion_tokens` as delivered."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """One delta of a stream.

    `text` and `token_ids` (int64) are this delta's own; `completion_tokens` counts all ids up to and including it.
    `finish_reason` is None while running, never an empty string. `extras` holds logprob columns and hidden states by name
    (``out_lp_val`` …), concatenated over what was merged; `meta` the per-request scalars of the wire where it has them.
    """

    text: str
    token_ids: Ids
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    extras: Mapping[str, np.ndarray[Any, Any]]
    meta: Mapping[str, Any]


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
        self._pid = os.getpid()
        self._reader: Callable[[], object] | None = None  # tells whether somebody reads; a dead weak reference says no
        self._left = False
        self._told = False
        self._terminal: Terminal | None = None
        self._texts: list[str] = []
        self._ids: list[Ids] = []
        self._extras: list[Mapping[str, np.ndarray[Any, Any]]] = []
        self._count = 0
        self._prompt_tokens = 0
        self._meta: Mapping[str, Any] = {}

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
                taken = sink.wait()
                assert taken is not None
                chunk = self._absorb(taken)
                if chunk is not None:
                    yield chunk
            self._raise_error()
        finally:
            self._end_reading()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._begin(acumulative(self._achunks()) if self._cumulative else self._achunks())

    async def _achunks(self) -> AsyncIterator[Chunk]:
        sink = self._readable()
        try:
            while self._terminal is None:
                await arrival(sink)
                chunk = self._absorb(sink.take())
                if chunk is not None:
                    yield chunk
            self._raise_error()
        finally:
            self._end_reading()

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
                taken = sink.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if taken is None:
                    raise TimeoutError(
                        f"request {self._shown!a} has not finished within {timeout} s; it goes on running"
                    )
                self._absorb(taken)
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

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

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
        if os.getpid() != self._pid:
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
        if os.getpid() != self._pid:
            return  # its locks may be held for ever by threads that do not exist here
        with self._lock:
            first, self._left = not self._left, True
        if first and self._terminal is None:
            if self._sink is not None:
                self._sink.close()
            self._abort(self._rid, source)

    def _closed(self) -> EgressItem.Error:
        return EgressItem.Error(ClientClosedError("the handle was closed", rid=self._shown))

    def _absorb(self, taken: Taken) -> Chunk | None:
        """Fold what was taken into the running totals; the chunk of it, or None where there is nothing to show."""
        if self._left and taken.terminal is None:  # closed by another thread: what is still there belongs to nobody
            self._terminal = self._closed()
            return None
        self._count += len(taken.token_ids)
        self._prompt_tokens = taken.prompt_tokens or self._prompt_tokens
        if taken.meta is not None:
            self._meta = taken.meta
        self._terminal = taken.terminal
        if self._terminal is None and not taken.chunks:
            return None
        self._texts.append(taken.text)
        self._ids.append(taken.token_ids)
        self._extras.extend(taken.extras)
        if isinstance(self._terminal, EgressItem.Error) and not taken.chunks:
            return None
        finish = self._terminal.finish_reason if isinstance(self._terminal, EgressItem.Done) else None
        return Chunk(
            taken.text, taken.token_ids, finish, self._prompt_tokens, self._count, join_extras(taken.extras), self._meta
        )

    def _raise_error(self) -> None:
        if isinstance(self._terminal, EgressItem.Error):
            raise self._terminal.error.with_traceback(None)  # asked again, it would carry every earlier call's frames

    def _completion(self) -> Completion:
        assert isinstance(self._terminal, EgressItem.Done)
        return Completion(
            rid=self._shown,
            text="".join(self._texts),
            token_ids=np.concatenate(self._ids) if self._ids else np.empty(0, dtype=np.int64),
            finish_reason=self._terminal.finish_reason,
            usage=Usage(self._prompt_tokens, self._count),
            extras=join_extras(self._extras),
            meta=self._meta,
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
        return msgspec.structs.replace(chunk, text=text, token_ids=ids, extras=extras)


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
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


async def arrival(sink: Sink) -> None:
    """Return when `sink` has something. A cancelled wait did not happen: the sink forgets the waiter."""
    future = sink.park_async(asyncio.get_running_loop())
    if future is not None:
        try:
            await future
        except asyncio.CancelledError:
            # Not `finally`: a coroutine that the collector closes (its loop is gone) must not take the sink's lock.
            sink.unpark_async(future)
            raise


def join_extras(parts: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
    """Extras of several chunks as one: rows in order, each name concatenated over the chunks that have it."""
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([part[name] for part in parts if name in part]) for name in names}


def _this_call() -> object:
    """Stands for `result` and `aresult`, which read until they return."""
    return True
