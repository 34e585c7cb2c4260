"""Embedded schedulers: the mill wheel behind the manager, for the demo, tests and benchmarks.

Owns: continuous batching on a `SchedulerPort`. A scheduler is a plain object: `step()` does one step of work and never waits
for a request; `run()` is the driver around it, and `start()`/`stop()` put that on a thread named ``headrace-sched``. Rules:

* Requests join and leave between steps. At most `max_batch` run; the rest wait in order. More than `max_waiting` in that
  queue are refused with an abort of status 503: a scheduler that stopped draining instead would never see the aborts that
  stand behind them in the ring.
* An abort drops its request without an answer, wherever it is. Every other request gets exactly one finish reason.
* A request that cannot be read fails alone, with an ERROR frame; a control request always gets an answer.
* A scheduler that ends, by `stop()` or by a fault, closes its port, so that nothing waits for it any more.
* While nothing joins or leaves, the header of the batch frame does not change from step to step: it is encoded once and
  kept. `EchoScheduler` then spends a handful of array operations per step, whatever the size of the batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codec.encode import encode_batch_cols
from ..codec.ingress import AbortMessage, BadMessage, ControlMessage, GenerateMessage, decode_ingress
from ..codec.limits import default
from .markov import NgramModel, Random, Sampling
from .stops import StopWatch, length, stop
from .text.engine import TextEngine

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .port import SchedulerPort

_log = logging.getLogger("headrace.scheduler")
_IDLE_WAIT_S: Final = 1.0  # only a safety net: a request, a close and stop() all end the wait
_MASK: Final = (1 << 64) - 1
_NO_IDS: Final = np.empty(0, dtype=np.int64)


class Scheduler:
    """What all embedded schedulers share: taking requests, waiting line, aborts, control requests, the loop and its thread.

    `max_batch` requests run at once, `max_waiting` wait. `step_interval_s` > 0 spaces the steps of `run()` so far apart, by
    `clock()` (seconds, monotonic) and `wait(seconds)`. `threads` provides Thread and Event.
    `counters` holds requests, tokens, steps, aborts, refused, unreadable; one thread writes it, any may read.
    """

    def __init__(
        self,
        port: SchedulerPort,
        *,
        max_batch: int = 256,
        max_waiting: int = default("max_live_requests"),
        step_interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
        threads: Any = threading,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch!r}")
        if max_waiting < 0:
            raise ValueError(f"max_waiting must be at least 0, not {max_waiting!r}")
        self.port = port
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.counters = dict.fromkeys(("requests", "tokens", "steps", "aborts", "refused", "unreadable"), 0)
        self.failure: BaseException | None = None
        self._schema = port.schema
        self._interval = step_interval_s
        self._clock = clock
        self._threads = threads
        self._stopping = threads.Event()
        self._wait = wait if wait is not None else self._stopping.wait
        self._thread: Any = None
        self._waiting: dict[str, GenerateMessage] = {}
        self._header: bytes | None = None

    # ---- the loop and its thread

    def step(self) -> bool:
        """One step: take what the ring holds, let requests join, give each running request its next token.

        True if anything was done. Never waits for requests; parks only while the egress ring is full.
        """
        took = self._take()
        joined = self._admit()
        return self._produce() or took or joined

    def run(self) -> None:
        """Steps until the port closes or `stop()` is called, then closes the port. A fault ends it the same way and is raised."""
        try:
            while not self._stopping.is_set() and not self.port.closed:
                began = self._clock() if self._interval > 0 else 0.0
                if not self.step():
                    self.port.wait_request(_IDLE_WAIT_S)
                elif self._interval > 0:
                    rest = began + self._interval - self._clock()
                    if rest > 0:
                        self._wait(rest)
        finally:
            self.port.close()

    def start(self) -> Self:
        """Runs on a thread of its own from now on. A scheduler starts once."""
        if self._thread is not None:
            raise RuntimeError("the scheduler was already started")
        self._thread = self._threads.Thread(target=self._main, name="headrace-sched", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout_s: float = float(default("join_timeout_s"))) -> bool:
        """Ends the loop, closes the port, joins the thread; True if it is gone. Idempotent, from any thread."""
        self._stopping.set()
        self.port.close()  # also wakes a step that is parked on a full egress ring
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _main(self) -> None:
        try:
            self.run()
        except Exception as error:
            self.failure = error
            _log.exception("the scheduler died; its port is closed")

    # ---- what comes in

    def _take(self) -> bool:
        columns = self.port.recv_requests()
        if not columns.headers:
            return False
        for message in decode_ingress(columns, self._schema):
            if isinstance(message, GenerateMessage):
                self._accept(message)
            elif isinstance(message, AbortMessage):
                self._abort(message)
            elif isinstance(message, ControlMessage):
                payload = self._control_answer(message)
                if payload is not None:
                    self.port.push_control_result(str(message.rid), payload)
            else:
                self._unreadable(message)
        return True

    def _accept(self, message: GenerateMessage) -> None:
        self.counters["requests"] += 1
        room = self.max_batch - self.running + self.max_waiting
        if len(self._waiting) < room:
            self._waiting[str(message.rid)] = message
            return
        self.counters["refused"] += 1
        reason = {
            "type": "abort",
            "message": "the scheduler's queue is full",
            "status_code": 503,
            "err_type": "queue_full",
        }
        self._push([str(message.rid)], [reason], [len(message.input_ids)], [0], _NO_IDS)

    def _abort(self, message: AbortMessage) -> None:
        if message.abort_all:
            self.counters["aborts"] += len(self._waiting) + self.running
            self._waiting.clear()
            self._drop(None)
            return
        rid = str(message.rid)
        if self._waiting.pop(rid, None) is not None or self._drop(rid):
            self.counters["aborts"] += 1

    def _control_answer(self, message: ControlMessage) -> bytes | None:
        if message.tag == "GetInternalStateReq":
            state = {
                "running": self.running,
                "waiting": len(self._waiting),
                "max_batch": self.max_batch,
                **self.counters,
            }
            return msgspec.json.encode(state)
        if message.tag == "FlushCacheReqInput":
            return msgspec.json.encode({"success": True, "message": "there is no cache"})
        return msgspec.json.encode({"success": False, "message": f"{type(self).__name__} does not know {message.tag}"})

    def _unreadable(self, message: BadMessage) -> None:
        self.counters["unreadable"] += 1
        if message.rid is None:
            _log.error("a request without a readable rid was dropped: %s", message.message)
        else:
            self.port.push_error(str(message.rid), message.message)

    def _admit(self) -> bool:
        """Lets requests join while there is room; True if one did (it may have ended at once, so that none runs)."""
        room = self.max_batch - self.running
        joining = list(self._waiting)[:room] if room > 0 and self._waiting else []
        for rid in joining:
            self._join(rid, self._waiting.pop(rid))
        return bool(joining)

    # ---- what goes out

    def _push(
        self,
        rids: Sequence[str],
        finishes: Sequence[dict[str, Any] | None],
        prompt_tokens: Sequence[int],
        lens: Sequence[int],
        ids: NDArray[Any],
    ) -> bytes:
        """One BATCH frame; returns its header, which may be used again while none of these columns but `ids` changes."""
        # Ready msgpack where the encoder would otherwise look at every entry; the counts stay numbers, to be checked against `ids`.
        header, cols = encode_batch_cols(
            self._schema,
            rids=_raw(rids),
            finish_reasons=_raw(finishes),
            prompt_tokens=_raw(prompt_tokens),
            tok_lens=np.array(lens, dtype=np.int64),
            token_ids=ids,
        )
        self.port.push_batch(header, cols)
        self.counters["tokens"] += len(ids)
        return header

    # ---- what a scheduler adds

    @property
    def running(self) -> int:
        """How many requests are in the batch."""
        raise NotImplementedError

    def _join(self, rid: str, message: GenerateMessage) -> None:
        raise NotImplementedError

    def _drop(self, rid: str | None) -> bool:
        """Forgets a running request (None: all); False if it does not run."""
        raise NotImplementedError

    def _produce(self) -> bool:
        raise NotImplementedError


class EchoScheduler(Scheduler):
    """Gives each prompt back, one token per step.

    Ends with `length` at max_new_tokens and otherwise with ``stop``, ``matched: null`` where the prompt ends. A prompt shorter
    than min_new_tokens, or than max_new_tokens under ignore_eos, starts over. Stop tokens, `eos_token_ids` and, with a
    `tokenizer`, stop strings and patterns are honoured.
    """

    def __init__(
        self,
        port: SchedulerPort,
        *,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | TextEngine | None = None,
        **options: Any,
    ) -> None:
        super().__init__(port, **options)
        self._eos = frozenset(eos_token_ids)
        self._engine = _engine(tokenizer)
        self._dtype = np.dtype(self._schema.id_dtype)
        # Row i of the batch: its rid, its prompt in the arena at begin[i]:end[i], the next token's place, tokens left to give.
        self._rids: list[str] = []
        self._prompts: list[int] = []
        self._reasons: list[dict[str, Any]] = []
        self._watches: list[StopWatch | None] = []
        self._watched: list[int] = []
        self._begin, self._end, self._at, self._left = (np.empty(0, dtype=np.int64) for _ in range(4))
        self._until = 0  # steps until some row comes to the end of its prompt or of its tokens
        self._joining: list[tuple[int, int, int]] = []  # begin, end, total of rows not yet in the arrays
        self._arena = np.empty(4096, dtype=self._dtype)
        self._used = 0

    @property
    def running(self) -> int:
        return len(self._rids)

    def _join(self, rid: str, message: GenerateMessage) -> None:
        prompt, sampling = message.input_ids, message.sampling
        n = len(prompt)
        if n == 0:
            self.port.push_error(rid, "a prompt without tokens cannot be echoed")
            return
        cap = sampling.max_new_tokens
        total = max(n, sampling.min_new_tokens)
        reason = stop(None)
        if cap is not None and (cap <= total or sampling.ignore_eos):
            total, reason = cap, length(cap)
        if total == 0:
            self._push([rid], [reason], [n], [0], _NO_IDS)
            return
        watch = StopWatch(sampling, self._eos, self._engine)
        begin, end = self._store(prompt)  # may settle and move the rows that are there, so the row is added after it
        self._rids.append(rid)
        self._prompts.append(n)
        self._reasons.append(reason)
        self._watches.append(watch if watch.needed else None)
        self._joining.append((begin, end, min(total, 1 << 62)))

    def _store(self, prompt: NDArray[Any]) -> tuple[int, int]:
        n = len(prompt)
        if self._used + n > len(self._arena):
            self._compact(n)
        begin, self._used = self._used, self._used + n
        self._arena[begin : self._used] = prompt
        return begin, self._used

    def _compact(self, more: int) -> None:
        """Room for `more` ids: the prompts still in use move together, into an arena of at least twice their size."""
        self._settle()
        kept = [self._arena[b:e] for b, e in zip(self._begin.tolist(), self._end.tolist(), strict=True)]
        size = sum(map(len, kept))
        arena = np.empty(max(4096, 2 * (size + more)), dtype=self._dtype)
        if kept:
            np.concatenate(kept, out=arena[:size])
        ends = np.cumsum(self._end - self._begin)
        moved = ends - self._end
        self._begin, self._end, self._at = self._begin + moved, ends, self._at + moved
        self._arena, self._used = arena, size

    def _settle(self) -> None:
        """Puts the rows that joined into the arrays."""
        if not self._joining:
            return
        new = np.array(self._joining, dtype=np.int64)
        self._joining = []
        self._begin = np.concatenate((self._begin, new[:, 0]))
        self._end = np.concatenate((self._end, new[:, 1]))
        self._at = np.concatenate((self._at, new[:, 0]))
        self._left = np.concatenate((self._left, new[:, 2]))
        self._changed()

    def _changed(self) -> None:
        self._header = None
        self._watched = [i for i, watch in enumerate(self._watches) if watch is not None]
        self._until = self._next_event() if self._rids else 0

    def _next_event(self) -> int:
        return int(np.minimum(self._end - self._at, self._left).min())

    def _drop(self, rid: str | None) -> bool:
        self._settle()
        if rid is None:
            self._keep([False] * len(self._rids))
            return True
        if rid not in self._rids:
            return False
        self._keep([other != rid for other in self._rids])
        return True

    def _keep(self, keep: list[bool]) -> None:
        rows = np.flatnonzero(keep)
        self._begin, self._end, self._at, self._left = (
            self._begin[rows],
            self._end[rows],
            self._at[rows],
            self._left[rows],
        )
        at = rows.tolist()
        self._rids = [self._rids[i] for i in at]
        self._prompts = [self._prompts[i] for i in at]
        self._reasons = [self._reasons[i] for i in at]
        self._watches = [self._watches[i] for i in at]
        self._changed()

    def _produce(self) -> bool:
        self._settle()
        n = len(self._rids)
        if n == 0:
            return False
        self.counters["steps"] += 1
        ids = self._arena[self._at]
        self._at += 1
        self._left -= 1
        self._until -= 1
        finishes: list[dict[str, Any] | None] | None = None
        for i in self._watched:
            watch = self._watches[i]
            if watch is not None and (reason := watch.see(int(ids[i]))) is not None:
                finishes = finishes if finishes is not None else [None] * n
                finishes[i] = reason
        if self._until == 0:
            for i in np.flatnonzero(self._left == 0).tolist():
                finishes = finishes if finishes is not None else [None] * n
                # A limit reached by this token outranks a stop that it completes; that outranks the prompt's end.
                if finishes[i] is None or self._reasons[i]["type"] == "length":
                    finishes[i] = self._reasons[i]
            over = self._at == self._end
            self._at[over] = self._begin[over]
        if finishes is not None:
            self._push(self._rids, finishes, self._prompts, [1] * n, ids)
            self._keep([finish is None for finish in finishes])
            return True
        if self._until == 0:
            self._until = self._next_event()
        if self._header is None:
            self._header = self._push(self._rids, [None] * n, self._prompts, [1] * n, ids)
        else:
            self.port.push_batch(self._header, [ids])
            self.counters["tokens"] += n
        return True


class _Sequence:
    """One running request of the n-gram scheduler."""

    __slots__ = ("cap", "context", "given", "how", "prompt_tokens", "random", "rid", "watch")

    def __init__(self, rid: str, message: GenerateMessage, random: Random, watch: StopWatch, order: int) -> None:
        sampling = message.sampling
        self.rid = rid
        self.prompt_tokens = len(message.input_ids)
        self.context: list[int] = message.input_ids[-order:].tolist()
        self.cap = sampling.max_new_tokens
        self.how = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self.random = random
        self.watch = watch
        self.given = 0


class MarkovScheduler(Scheduler):
    """Continues each prompt from an n-gram `model`: text that a person can read, without a network.

    Honours max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, sampling_seed, stop tokens, `eos_token_ids`,
    ignore_eos and, with a `tokenizer`, stop strings and patterns. Penalties, logit_bias and grammars are not. A request without
    a seed draws from `seed` and its place in the order of arrival, so a run can be repeated.
    """

    def __init__(
        self,
        port: SchedulerPort,
        model: NgramModel,
        *,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | TextEngine | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(port, **options)
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self._engine = _engine(tokenizer)
        self._seed = seed
        self._arrived = 0
        self._batch: dict[str, _Sequence] = {}

    @property
    def running(self) -> int:
        return len(self._batch)

    def _join(self, rid: str, message: GenerateMessage) -> None:
        self._arrived += 1
        cap, seed = message.sampling.max_new_tokens, message.sampling.sampling_seed
        if cap == 0:
            self._push([rid], [length(0)], [len(message.input_ids)], [0], _NO_IDS)
            return
        # Signed seeds of 64 bits are allowed on the wire; a seed sequence takes only what is not negative.
        entropy = [self._seed & _MASK, self._arrived] if seed is None else [seed & _MASK]
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
        watch = StopWatch(message.sampling, self._eos, self._engine)
        self._batch[rid] = _Sequence(rid, message, random, watch, self._model.order)
        self._header = None

    def _drop(self, rid: str | None) -> bool:
        self._header = None
        if rid is None:
            self._batch.clear()
            return True
        return self._batch.pop(rid, None) is not None

    def _produce(self) -> bool:
        if not self._batch:
            return False
        self.counters["steps"] += 1
        order = self._model.order
        rows = list(self._batch.values())
        tokens: list[int] = []
        finishes: list[dict[str, Any] | None] = []
        for row in rows:
            token = self._model.sample(row.context, row.how, row.random, row.watch.banned())
            row.context = [*row.context[1 - order :], token] if order > 1 else [token]
            row.given += 1
            reason = row.watch.see(token) if row.watch.needed else None
            tokens.append(token)
            finishes.append(length(row.given) if row.given == row.cap else reason)
        ids = np.array(tokens, dtype=self._schema.id_dtype)
        ended = any(finish is not None for finish in finishes)
        if ended or self._header is None:
            header = self._push([r.rid for r in rows], finishes, [r.prompt_tokens for r in rows], [1] * len(rows), ids)
            self._header = None if ended else header
        else:
            self.port.push_batch(self._header, [ids])
            self.counters["tokens"] += len(ids)
        for row, finish in zip(rows, finishes, strict=True):
            if finish is not None:
                del self._batch[row.rid]
        return True


def _raw(column: Sequence[Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(column))


def _engine(tokenizer: Tokenizer | TextEngine | None) -> TextEngine | None:
    return tokenizer if tokenizer is None or isinstance(tokenizer, TextEngine) else TextEngine(tokenizer)
