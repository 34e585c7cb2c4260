"""`TokenizerManager`: the pipeline on threads, and the ways in and out of it.

Owns: the life cycle (through the table `LIFECYCLE`), admission on the caller's thread, and shutdown. Everything that decides what
happens to a request is in the stages; this module only puts requests in and hands handles out. Rules it keeps:

* Refused before anything is touched: shape, rid, ids, parameters, inbox, live table and life cycle are checked on the caller's
  thread, and a refusal leaves no trace. What needs the tokenizer, the length or room in the ring ends the handle with that error.
* `shutdown` is idempotent, may be called from any thread (also from a callback on one of the manager's own), ends within its bounds,
  and afterwards every submit is refused and no thread is left.
* A stage that dies, or a scheduler that goes, ends everything live and moves the life cycle to FAILED. Nothing hangs.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ..codec import GenerateBody, GenerateRequest, Rid, SamplingParams, WireSchema, admit, encode_control
from ..codec.admission import NormalizedRequest
from ..codec.body import batch_rids
from ..codec.errors import (
    HeadraceError,
    InternalError,
    QueueFullError,
    SchedulerGoneError,
    ShuttingDownError,
    ValidationError,
    show,
)
from ..fsm import LIFECYCLE, AbortSource, LifecycleEvent, LifecycleState, RequestState, Trace
from .channel import PushResult
from .closing import Closing, Until
from .config import RuntimeConfig
from .faults import FaultLog, describe, where
from .handle import RequestHandle, arrival, join_extras
from .pipeline import Pipeline, StepEvent, merged
from .port import SchedulerPort
from .ring import RingFacts
from .sink import EgressItem, Sink
from .stages.life import Group, Kind, Life
from .text.engine import TextEngine
from .text.tokenize import TokenizersBackend, load_tokenizer, max_token_bytes
from .threads import DriverThread, dead_stage
from .waits import seconds

_LOG = logging.getLogger("headrace.manager")
_NOT_CONTROL = ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "AbortReq")
_LONGEST_WAIT_S = 3600.0  # the reaper looks again at least that often; a lock cannot wait for any number of seconds
_LOOK_S = 5.0  # how long `stats` waits for a stage to look at itself between two steps


class RingStats(msgspec.Struct, frozen=True):
    """A ring at one moment: `fill` and `capacity` in items, `nbytes` in bytes, `state` by name."""

    fill: int
    capacity: int
    nbytes: int
    state: str


class Stats(msgspec.Struct, frozen=True):
    """What the manager can say of itself. `live` counts requests by state name; an empty dict means that nothing is live."""

    state: str
    live: dict[str, int]
    ingress_ring: RingStats
    egress_ring: RingStats
    counters: dict[str, int]
    activity: int
    decoder: str
    decoder_reason: str
    tokenizer_backend: str | None
    waiting_bytes: int


class StepBatch(msgspec.Struct, frozen=True, eq=False):
    """What one scheduler step produced on one shard for requests with ``sink="step"``, in columns.

    Row i belongs to `handles[i]`: its delta `texts[i]`, its ids ``token_ids[offsets[i]:offsets[i+1]]`` (int64), and
    `finish_reasons[i]` or `errors[i]` where it ended. `extras[i]` holds its logprob columns of this step by name.
    """

    step: int
    shard: int
    handles: list[RequestHandle]
    texts: list[str]
    token_ids: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any]
    finish_reasons: list[Any]
    errors: list[HeadraceError | None]
    extras: list[Mapping[str, np.ndarray[Any, Any]]]


class TokenizerManager:
    """The front half of an LLM server: text in, a scheduler in the middle, text out.

    Usable as a context manager, or with `start()` and `shutdown()`. Construction checks the config and loads the tokenizer;
    it raises and leaves nothing behind when either fails. Give `tm.scheduler` to a scheduler, then `generate`.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config.checked()
        if config.log_level is not None:
            logging.getLogger("headrace").setLevel(config.log_level.upper())
        self._schema: WireSchema = config.schema()
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer)
        self._engine = TextEngine(tokenizer)
        self._backend = None if tokenizer is None else TokenizersBackend(tokenizer)
        vocab_size = config.vocab_size if config.vocab_size is not None else self._engine.vocab_limit
        self._rules = config.rules(
            vocab_size, max_token_bytes=None if tokenizer is None else max_token_bytes(tokenizer)
        )
        self.trace: Trace | None = Trace(config.trace_capacity) if config.trace else None
        self._pipeline = Pipeline(
            self.config, self._schema, self._rules, self._engine, self._backend, record=self.trace
        )
        self.scheduler = SchedulerPort(self._schema, self._pipeline.ring_in_consumer, self._pipeline.ring_out_producer)

        self._lock = threading.Lock()
        self._state: int = LIFECYCLE.initial
        self._failure: HeadraceError | None = None
        self._over = threading.Condition(self._lock)  # start or shutdown has come to its end
        self._starting = False
        self._shutting_down = False
        self._shut_down = False
        self._from_callback: threading.Thread | None = None  # the shutdown that one of our own threads asked for
        self._pid = os.getpid()
        self._activity = 0
        self._active = threading.Condition()
        self._step_callback: Callable[[StepBatch], None] | None = None
        self._forgotten: queue.SimpleQueue[tuple[str, float] | str | None] = queue.SimpleQueue()
        self._deadlines: list[tuple[float, str]] = []  # a heap; the reaper's own
        self._threads: list[DriverThread] = []
        self._reaper = threading.Thread(target=self._reap, name="headrace-reaper", daemon=True)
        self._faults = FaultLog()
        self._cut_off = False  # a stage has died or the threads are gone: ends are told past the shards
        self._step_locks = [threading.Lock() for _ in self._pipeline.shards]
        self._pipeline.on_fault = self._faults.report
        self._pipeline.on_activity = self._count_activity
        self._pipeline.on_scheduler_gone = self._scheduler_gone
        self._pipeline.on_step = self._deliver_step

    # -- life cycle -----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> TokenizerManager:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> TokenizerManager:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await self.ashutdown()

    @property
    def state(self) -> LifecycleState:
        """Where the manager is in its life."""
        with self._lock:
            return LifecycleState(self._state)

    def _step(self, event: LifecycleEvent) -> LifecycleState:
        """Under the lock: one event of the life cycle."""
        before = self._state
        self._state = LIFECYCLE.next(LifecycleState(before), event)
        if self.trace is not None:
            self.trace.record("lifecycle", "", before, event, self._state, "manager")
        return LifecycleState(self._state)

    def start(self) -> TokenizerManager:
        """Start the threads. Raises, with nothing left running, if one cannot be started; a second start raises too.

        A shutdown that comes meanwhile waits for the threads to be there and then ends them; every submit is then refused.
        """
        self._check_usable()
        with self._lock:
            if LifecycleState(self._state) is not LifecycleState.CREATED:
                raise ShuttingDownError(f"a manager is started once; this one is {LifecycleState(self._state).name}")
            self._step(LifecycleEvent.START)
            self._starting = True
        try:
            self._threads = self._build_threads()
            for thread in self._threads:
                thread.start()
            self._reaper.start()
        except BaseException:
            with self._lock:
                self._step(LifecycleEvent.FAULT)
            self._stop_threads(self.config.join_timeout_s)
            raise
        else:
            with self._lock:
                if self._step(LifecycleEvent.STARTED) is LifecycleState.RUNNING:
                    self._pipeline.live.open_admission()
        finally:
            with self._lock:
                self._starting = False
                self._over.notify_all()
        return self

    def _build_threads(self) -> list[DriverThread]:
        pipeline = self._pipeline
        cores = self.config.cores or ()
        shards = [_bound(pipeline.move_shard, index) for index in range(len(pipeline.shards))]
        plan: list[tuple[str, Any, Callable[[], bool]]] = [
            ("headrace-ingress", pipeline.ingress_bell, pipeline.move_ingress),
        ]
        if self.config.fused:
            plan.append(("headrace-egress", pipeline.egress_bell, pipeline.move_egress))
        else:
            plan.append(("headrace-egress", pipeline.egress_bell, pipeline.move_dispatch))
            plan.extend((f"headrace-detok-{i}", pipeline.shard_bells[i], move) for i, move in enumerate(shards))
        for index, bell in enumerate(pipeline.worker_bells):
            plan.append((f"headrace-tok-{index}", bell, _bound(pipeline.move_worker, index)))
        return [
            DriverThread(name, bell, pump, self._on_death, core=cores[at % len(cores)] if cores else None)
            for at, (name, bell, pump) in enumerate(plan)
        ]

    def shutdown(self, drain_timeout: float | None = None) -> None:
        """Stop admitting, let live requests finish for `drain_timeout` seconds, abort the rest, close the rings, join the threads.

        Idempotent and callable from any thread. A second caller waits for the first one's end, and if its own deadline comes
        earlier, that one counts. On one of the manager's own threads (a callback) it starts the shutdown and returns, because it
        could not wait for itself. An exception that interrupts the drain (KeyboardInterrupt) ends the drain, not the shutdown.
        Raises InternalError naming a thread that did not end within the join bound.
        """
        self._check_usable()
        drain = seconds("drain_timeout", self.config.drain_timeout_s if drain_timeout is None else drain_timeout)
        if self._own_thread():
            with self._lock:
                if self._from_callback is None:
                    self._from_callback = threading.Thread(
                        target=self._shutdown_logged, args=(drain,), name="headrace-shutdown", daemon=True
                    )
                    self._from_callback.start()
            return
        try:
            self._shutdown(drain)
        finally:
            helper = self._from_callback
            if helper is not None and helper is not threading.current_thread():
                helper.join(self.config.join_timeout_s)

    def _shutdown_logged(self, drain: float) -> None:
        try:
            self._shutdown(drain)
        except HeadraceError as error:
            _LOG.error("a shutdown that a callback asked for: %s", error.message)

    def _shutdown(self, drain: float) -> None:
        live, bound = self._pipeline.live, self.config.join_timeout_s
        with self._lock:
            self._step(LifecycleEvent.DRAIN)
            first, self._shutting_down = not self._shutting_down, True
            if first and not self._over.wait_for(lambda: not self._starting, bound):
                self._shutting_down = False
                raise InternalError("the start of this manager has not come to its end")
            state = LifecycleState(self._state)
            refusal = self._failure or ShuttingDownError("the manager is shutting down")
        if not first:
            live.wait_empty(drain)
            for life in live.lives():
                self._pipeline.abort(life.rid, AbortSource.SHUTDOWN)
            with self._lock:
                if not self._over.wait_for(lambda: self._shut_down, 4 * bound):
                    raise InternalError("another thread's shutdown has not come to its end")
            return
        served = bool(self._threads) and state is not LifecycleState.FAILED  # a dead stage settles nothing any more
        left: list[str] = []
        interrupted: BaseException | None = None
        for wait in Closing(
            self._pipeline,
            refusal,
            drain=drain if state is LifecycleState.DRAINING else None,
            settle=bound if served else None,
            join=bound,
        ):
            try:
                if wait.until is Until.EMPTY:
                    live.wait_empty(wait.timeout)
                elif wait.until is Until.SETTLED:
                    live.wait_settled(wait.timeout)
                elif wait.until is Until.DRAINED:
                    with self._lock:
                        self._step(LifecycleEvent.DRAINED)
                else:
                    left = self._stop_threads(wait.timeout)
                    self._cut_off = True
            except BaseException as stop:  # an impatient user ends the wait, not the shutdown
                interrupted = stop
        self._faults.flush()
        with self._lock:
            self._step(LifecycleEvent.FAULT if left else LifecycleEvent.JOINED)
            self._shut_down = True
            self._over.notify_all()
        if interrupted is not None:
            raise interrupted
        if left:
            raise InternalError(f"shutdown left threads behind: {', '.join(left)}")

    async def ashutdown(self, drain_timeout: float | None = None) -> None:
        """`shutdown` without blocking the event loop."""
        await asyncio.to_thread(self.shutdown, drain_timeout)

    def _own_thread(self) -> bool:
        current = threading.current_thread()
        return current is self._reaper or any(thread.is_current() for thread in self._threads)

    def _thread(self, name: str) -> DriverThread | None:
        return next((thread for thread in self._threads if thread.name == name), None)

    def _stop_threads(self, timeout: float) -> list[str]:
        """Stop and join all; the names of those that did not end in time."""
        for thread in self._threads:
            thread.stop()
        self._forgotten.put(None)
        deadline = time.monotonic() + timeout
        left = [thread.name for thread in self._threads if not thread.join(max(0.0, deadline - time.monotonic()))]
        if self._reaper.ident is not None and self._reaper is not threading.current_thread():
            self._reaper.join(max(0.0, deadline - time.monotonic()))
            if self._reaper.is_alive():
                left.append(self._reaper.name)
        return left

    def _on_death(self, name: str, fault: BaseException) -> None:
        self._fail(dead_stage(name))

    def _scheduler_gone(self) -> None:
        """Called on the egress thread when the scheduler has closed its side: what is live is being failed, nothing new comes in.

        The manager itself is sound, so this is the start of its orderly end and not FAILED (which means a dead stage).
        """
        error = SchedulerGoneError("the scheduler has gone")
        with self._lock:
            self._failure = self._failure or error
            stopping = self._shutting_down
            self._step(LifecycleEvent.DRAIN)
        lost = len(self._pipeline.live)
        if lost and not stopping:
            self._faults.report("headrace.manager", f"the scheduler has gone; {lost} live requests are failed")
        self._pipeline.live.close_admission(error)
        with self._active:
            self._active.notify_all()  # a health probe need not wait any longer

    def _fail(self, error: HeadraceError) -> None:
        """A stage has died: end everything live directly, since its lanes are not served any more."""
        with self._lock:
            self._failure = error
            self._step(LifecycleEvent.FAULT)
            self._cut_off = True
        self._pipeline.live.close_admission(ShuttingDownError(error.message))
        self._pipeline.close_channels()
        with self._active:
            self._active.notify_all()
        for thread in self._threads:
            thread.stop()
        self._pipeline.fail_everything(error)

    # -- ways in --------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int] | np.ndarray[Any, Any],
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        rid: str | None = None,
        stream: bool = True,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] | None = None,
        return_text_in_logprobs: bool = False,
        return_hidden_states: bool = False,
        add_special_tokens: bool = True,
        deadline_s: float | None = None,
        wire_fields: Mapping[str, Any] | None = None,
        media: Mapping[str, Any] | None = None,
        sink: str = "handle",
    ) -> RequestHandle:
        """Submit one request; `prompt` is text or token ids (ints in [0, vocab_size)), `media` goes to the config's encoder.

        Raises at once (ValidationError, QueueFullError, ShuttingDownError) what can be judged without the tokenizer; the rest
        ends the handle with its error. `deadline_s` seconds from now the request is aborted. ``sink="step"`` delivers to the
        callback of `on_step` instead of the handle.
        """
        request = _request(
            prompt,
            params,
            rid=rid,
            stream=stream,
            return_logprob=return_logprob,
            logprob_start_len=-1 if logprob_start_len is None else logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            return_text_in_logprobs=return_text_in_logprobs,
            return_hidden_states=return_hidden_states,
            add_special_tokens=add_special_tokens,
            wire_fields=wire_fields,
            media=media,
        )
        return self._submit([request], sink, deadline_s)[0]

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        stream: bool = True,
        deadline_s: float | None = None,
        sink: str = "handle",
        **options: Any,
    ) -> list[RequestHandle]:
        """Submit several requests, admitted all or none: each is tokenised and checked before any is pushed.

        `params` is one for all or a list; rid "r" becomes r_0, r_1, …; a list gives each its own. `options` as in `generate`.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise ValidationError(f"prompts must be a list of prompts, not {show(prompts)}", field="prompts")
        many = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(many) != len(prompts):
            raise ValidationError(f"{len(prompts)} prompts but {len(many)} sampling parameters", field="params")
        rids = batch_rids(rid, len(prompts), self._rules.limits.max_rid_bytes)
        requests = [
            _request(prompt, one, rid=name, stream=stream, **options)
            for prompt, one, name in zip(prompts, many, rids, strict=True)
        ]
        return self._submit(requests, sink, deadline_s, batch=True)

    def submit(
        self,
        body: GenerateBody | bytes | str | Mapping[str, Any],
        *,
        deadline_s: float | None = None,
        sink: str = "handle",
    ) -> list[RequestHandle]:
        """Submit a `/generate`-shaped body (JSON text, an object, or a `GenerateBody`): one request or a batch, all or none."""
        if not isinstance(body, GenerateBody):
            body = GenerateBody.from_json(
                body,
                max_batch_items=self.config.max_batch_items,
                max_broadcast_bytes=self.config.max_broadcast_bytes,
                max_rid_bytes=self._rules.limits.max_rid_bytes,
            )
        return self._submit(body.requests(), sink, deadline_s, batch=body.is_batch)

    def _submit(
        self, requests: Sequence[GenerateRequest], sink: str, deadline_s: float | None, *, batch: bool = False
    ) -> list[RequestHandle]:
        self._check_usable()
        if sink not in ("handle", "step"):
            raise ValidationError(f"sink must be 'handle' or 'step', not {show(sink)}", field="sink")
        if sink == "step" and self._step_callback is None:
            raise ValidationError("sink='step' needs a callback: register it with on_step first", field="sink")
        if deadline_s is not None and (
            isinstance(deadline_s, bool)
            or not isinstance(deadline_s, (int, float))
            or not 0 <= deadline_s < float("inf")
        ):
            raise ValidationError(
                f"deadline_s must be a finite number of at least 0, not {show(deadline_s)}", field="deadline_s"
            )
        if batch:
            self._check_batch(requests)
        admitted = [admit(request, self._rules, self._schema) for request in requests]
        handles, lives = [], []
        for request in admitted:
            life, handle = self._make(request, sink)
            lives.append(life)
            handles.append(handle)
        try:
            self._put(lives)
        except BaseException:
            for handle in handles:
                handle.forget()
            raise
        if deadline_s is not None:
            when = time.monotonic() + deadline_s
            for life in lives:
                self._forgotten.put((life.rid, when))
        return handles

    def _check_batch(self, requests: Sequence[GenerateRequest]) -> None:
        most = min(self.config.max_batch_items, self.config.ingress_ring_capacity)
        if not requests:
            raise ValidationError("a batch must hold at least one prompt", field="prompts")
        if len(requests) > most:
            raise ValidationError(f"a batch may hold at most {most} prompts, not {len(requests)}", field="prompts")

    def _make(self, request: NormalizedRequest, sink: str) -> tuple[Life, RequestHandle]:
        rid = request.rid
        life = self._life(
            rid, Kind.GENERATE, request=request, ids=request.input_ids, stream=request.stream, nbytes=request.nbytes
        )
        if sink == "step":
            life.sink = None
        handle = RequestHandle(
            str(rid),
            rid.client_facing,
            life.sink,
            self._pipeline.abort,
            self._forgotten.put,
            cumulative=not self.config.incremental_streaming_output,
        )
        life.token = handle if sink == "step" else None
        return life, handle

    def _life(self, rid: Rid, kind: Kind, **fields: Any) -> Life:
        shard = rid.shard(len(self._pipeline.shards), seed=self.config.shard_seed)
        sink = Sink(self._pipeline.hubs[shard], self.config.sink_capacity, str(rid))
        return Life(str(rid), kind, sink, shown_rid=rid.client_facing, shard=shard, **fields)

    def _put(self, lives: list[Life]) -> None:
        result = self._pipeline.submit(Group(lives))
        if result is PushResult.FULL:
            raise QueueFullError("too many requests are waiting to be taken; try again later")
        if result is PushResult.CLOSED:
            raise ShuttingDownError("the manager is shutting down")

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise InternalError(
                "this manager was made in another process; threads do not survive a fork, so make one here"
            )

    def _check_may_wait(self) -> None:
        self._check_usable()
        if self._own_thread():
            raise InternalError(
                "a callback on one of the manager's own threads cannot wait for an answer: it would wait for itself"
            )

    # -- control, decode, health ----------------------------------------------------------------------------------------------

    def control(self, tag: str, *fields: Any, timeout: float | None = None) -> bytes:
        """Send a control request and return the scheduler's answer, verbatim.

        `tag` names it (``"FlushCacheReqInput"``), `fields` are its own fields. TimeoutError after `timeout` seconds (default
        from the config); a late answer is then absorbed.
        """
        life, bound = self._control(tag, fields, timeout)
        return _payload(self._answer(life, bound, f"the control request {show(tag)}"))

    async def acontrol(self, tag: str, *fields: Any, timeout: float | None = None) -> bytes:
        """`control` in asyncio."""
        life, bound = self._control(tag, fields, timeout)
        return _payload(await self._aanswer(life, bound, f"the control request {show(tag)}"))

    def _control(self, tag: str, fields: Sequence[Any], timeout: float | None) -> tuple[Life, float]:
        self._check_may_wait()
        if not isinstance(tag, str) or tag in _NOT_CONTROL:
            raise ValidationError(f"{show(tag)} is not the tag of a control request", field="tag")
        bound = self._bound(timeout)
        rid = Rid.mint()
        life = self._life(rid, Kind.CONTROL, message=encode_control(self._schema, tag, rid, *fields))
        self._put([life])
        return life, bound

    def _bound(self, timeout: float | None) -> float:
        return seconds("timeout", self.config.control_timeout_s if timeout is None else timeout)

    def decode(self, ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids (at most context_len of them), made on a detokenizer's thread; special tokens are skipped."""
        bound = self._bound(timeout)
        return _text(self._answer(self._decoding(ids), bound, "decode"))

    async def adecode(self, ids: Sequence[int], *, timeout: float | None = None) -> str:
        """`decode` in asyncio."""
        bound = self._bound(timeout)
        return _text(await self._aanswer(self._decoding(ids), bound, "decode"))

    def _decoding(self, ids: Sequence[int]) -> Life:
        self._check_may_wait()
        if self._engine.kind == "none":
            raise ValidationError("decode needs a tokenizer, and this manager runs without one", field="ids")
        life = self._life(Rid.mint(), Kind.DETOKENIZE, ids=decode_ids(ids, self.config.context_len))
        self._put([life])
        return life

    def _answer(self, life: Life, timeout: float, what: str) -> EgressItem.Control | EgressItem.Data:
        assert life.sink is not None
        try:
            taken = life.sink.wait(timeout)
        except BaseException:  # an interrupted caller does not come back for the answer
            self._give_up(life)
            raise
        if taken is None:
            self._give_up(life)
            raise TimeoutError(f"{what} was not answered within {timeout} s")
        return _one(taken.terminal)

    async def _aanswer(self, life: Life, timeout: float, what: str) -> EgressItem.Control | EgressItem.Data:
        assert life.sink is not None
        try:
            async with asyncio.timeout(timeout):
                await arrival(life.sink)
        except TimeoutError:
            self._give_up(life)
            raise TimeoutError(f"{what} was not answered within {timeout} s") from None
        except asyncio.CancelledError:
            self._give_up(life)
            raise
        except GeneratorExit:
            self._forgotten.put(life.rid)  # the collector closes us: no lock here
            raise
        return _one(life.sink.take().terminal)

    def _give_up(self, life: Life) -> None:
        assert life.sink is not None
        life.sink.close()
        self._pipeline.abort(life.rid, AbortSource.GUARD)

    def health(self, timeout_s: float = 20.0) -> bool:
        """Whether the scheduler gives signs of life within `timeout_s` seconds: output for any request, or for a probe.

        One probe of one token is sent. A full ring with recent output is alive. The probe is removed in every case. False at once
        when the manager is not running, when a stage has died, and when the scheduler goes.
        """
        self._check_may_wait()
        timeout_s = seconds("timeout_s", timeout_s)
        with self._active:
            before = self._activity
        probe: Life | None = None
        try:
            request = GenerateRequest(
                input_ids=[0],
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                rid=Rid.health_check(),
                stream=False,
            )
            probe, _handle = self._make(admit(request, self._rules, self._schema), "handle")
            _handle.forget()
            try:
                self._put([probe])
            except QueueFullError:
                probe = None  # a full house may still be alive: watch for output
            except (ShuttingDownError, SchedulerGoneError):
                probe = None
                return False
            with self._active:
                self._active.wait_for(lambda: self._activity != before or self._failure is not None, timeout_s)
                return self._activity != before
        finally:
            if probe is not None:
                self._give_up(probe)

    async def ahealth(self, timeout_s: float = 20.0) -> bool:
        """`health` without blocking the event loop."""
        return await asyncio.to_thread(self.health, timeout_s)

    def _count_activity(self) -> None:
        with self._active:
            self._activity += 1
            self._active.notify_all()

    # -- aborts ---------------------------------------------------------------------------------------------------------------

    def abort(self, rid: str) -> int:
        """Abort every live request whose client-facing rid is exactly `rid`; returns how many. Unknown or empty: 0."""
        self._check_usable()
        return sum(self._pipeline.abort(name, AbortSource.API) for name in self._pipeline.live.named(rid))

    def abort_all(self) -> int:
        """Abort everything that is live; returns how many."""
        self._check_usable()
        return sum(self._pipeline.abort(life.rid, AbortSource.API) for life in self._pipeline.live.lives())

    def _reap(self) -> None:
        """The reaper thread: requests whose handle was collected, and deadlines."""
        try:
            while self._reap_one():
                pass
        except BaseException as fault:
            # Without it dropped handles would run on for ever, unseen: as bad as a dead stage, and told the same way.
            _LOG.error("headrace-reaper died: %s\n%s", describe(fault), where(fault))
            self._fail(dead_stage("headrace-reaper"))

    def _reap_one(self) -> bool:
        """One piece of news or one deadline; False at the end."""
        due = self._deadlines
        wait = min(max(0.0, due[0][0] - time.monotonic()), _LONGEST_WAIT_S) if due else None
        try:
            news = self._forgotten.get(timeout=wait)
        except queue.Empty:
            if due[0][0] <= time.monotonic():
                self._pipeline.abort(heapq.heappop(due)[1], AbortSource.API)
            return True
        if news is None:
            return False
        if isinstance(news, str):
            self._pipeline.abandon(news)
            return True
        rid, when = news
        heapq.heappush(due, (when, rid))
        if len(due) > 2 * len(self._pipeline.live) + 1024:  # mostly requests that have ended long before their deadline
            due[:] = [entry for entry in due if entry[1] in self._pipeline.live]
            heapq.heapify(due)
        return True

    # -- step sink --------------------------------------------------------------------------------------------------------------

    def on_step(self, callback: Callable[[StepBatch], None]) -> None:
        """Call `callback` once for each scheduler step and shard, with all that it produced for requests with ``sink="step"``.

        It runs on the shard's driver thread, so it must be short. It may call generate, abort and shutdown. If it raises, the
        requests of that batch are aborted and it is logged. A second registration is an error.
        """
        with self._lock:
            if self._step_callback is not None:
                raise InternalError("on_step has a callback already; there is one for a manager")
            self._step_callback = callback

    def _deliver_step(self, event: StepEvent) -> None:
        with self._lock:
            callback = self._step_callback
        if callback is None:
            return
        # One call at a time for each shard; only when a stage has died is there a second caller (see `Pipeline.fail_everything`).
        with self._step_locks[event.shard]:
            first = [row for row in event.rows if row.ends and row.token.claim_end()]
            if self._cut_off:  # every request has been told its end, or is told it here
                event = event._replace(columns=[], rows=first)
                if not first:
                    return
            batch = step_batch(event)
            try:
                callback(batch)
            except BaseException as fault:
                # A user's code on our thread: the stage lives on, and what the callback may have lost is ended. Also for what is
                # no Exception (a CancelledError out of a future, sys.exit): here it would end the stage, and with it everybody.
                told = f"the on_step callback failed with {describe(fault)}; its requests are aborted"
                self._faults.report("headrace.manager", told, where(fault))
                for handle in batch.handles:
                    handle.abort()

    # -- looking ----------------------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """A snapshot, taken between two steps of each stage: live requests by state, rings, counters, decoder.

        A request that is on its way from one stage to the next at that moment counts as QUEUED, so `live` is empty only when
        nothing is live.
        """
        self._check_usable()
        pipeline = self._pipeline
        live: dict[str, int] = {}
        counters: list[Any] = []

        def look_at_ingress() -> tuple[dict[str, int], dict[str, int]]:
            states = Counter(RequestState(life.state).name for life in pipeline.ingress.entries.values())
            return dict(states), dict(pipeline.ingress_counts)

        looks = [("headrace-ingress", look_at_ingress)]
        for index, shard in enumerate(pipeline.shards):
            name = "headrace-egress" if self.config.fused else f"headrace-detok-{index}"
            looks.append((name, _look(shard, pipeline.shard_counts[index])))
        looks.append(("headrace-egress", lambda: ({}, dict(pipeline.dispatcher.counts))))
        for name, look in looks:
            thread = self._thread(name)
            states, counts = look() if thread is None else thread.call(look, _LOOK_S)
            live = merged([live, states])
            counters.append(counts)
        waiting = len(pipeline.inbox)
        if waiting:
            live[RequestState.RECEIVED.name] = live.get(RequestState.RECEIVED.name, 0) + waiting
        between = len(pipeline.live) - sum(live.values())
        if between > 0:
            live[RequestState.QUEUED.name] = live.get(RequestState.QUEUED.name, 0) + between
        with self._active:
            activity = self._activity
        return Stats(
            state=self.state.name,
            live=live,
            ingress_ring=_ring_stats(pipeline.ring_in.facts()),
            egress_ring=_ring_stats(pipeline.ring_out.facts()),
            counters=merged(counters),
            activity=activity,
            decoder=self._engine.kind,
            decoder_reason=self._engine.reason,
            tokenizer_backend=None if self._backend is None else self._backend.name,
            waiting_bytes=pipeline.live.nbytes,
        )


def step_batch(event: StepEvent) -> StepBatch:
    """The columns and single rows of one step as one batch, columns first."""
    rows = event.rows
    handles = [token for column in event.columns for token in column.tokens] + [row.token for row in rows]
    texts = [text for column in event.columns for text in column.texts] + [row.text for row in rows]
    singles = sum(len(column.ids) for column in event.columns)
    offsets = np.arange(len(handles) + 1, dtype=np.int64)
    if rows:
        offsets[singles + 1 :] = singles + np.cumsum([len(row.token_ids) for row in rows])
    parts = [column.ids for column in event.columns] + [row.token_ids for row in rows]
    errors: list[HeadraceError | None] = [None] * singles
    errors.extend(row.error for row in rows)
    extras: list[Mapping[str, np.ndarray[Any, Any]]] = []
    for column in event.columns:
        extras.extend(column.extras or [{}] * len(column.ids))
    extras.extend(join_extras(row.extras) for row in rows)
    return StepBatch(
        step=event.step,
        shard=event.shard,
        handles=handles,
        texts=texts,
        token_ids=parts[0] if len(parts) == 1 else np.concatenate(parts),
        offsets=offsets,
        finish_reasons=[None] * singles + [row.finish_reason for row in rows],
        errors=errors,
        extras=extras,
    )


def _request(prompt: Any, params: Any, **fields: Any) -> GenerateRequest:
    is_text = isinstance(prompt, str)
    return GenerateRequest(
        text=prompt if is_text else None, input_ids=None if is_text else prompt, sampling_params=params, **fields
    )


def decode_ids(ids: Any, most: int) -> np.ndarray[Any, Any]:
    """Ids of a detokenize request as int64: ints in [0, 2**32), no vocabulary bound, at most `most`."""
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise ValidationError(f"ids must be a list of token ids, not {show(ids)}", field="ids")
    if len(ids) > most:
        raise ValidationError(f"at most {most} ids can be decoded at once, not {len(ids)}", field="ids")
    for value in ids:
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise ValidationError(f"a token id must be an integer in [0, 2**32), not {show(value)}", field="ids")
    return np.array(ids, dtype=np.int64)


def _one(terminal: Any) -> EgressItem.Control | EgressItem.Data:
    if isinstance(terminal, EgressItem.Error):
        raise terminal.error
    if not isinstance(terminal, (EgressItem.Control, EgressItem.Data)):
        raise InternalError("a request for one answer ended without it")
    return terminal


def _payload(item: EgressItem.Control | EgressItem.Data) -> bytes:
    assert isinstance(item, EgressItem.Control)
    return item.payload


def _text(item: EgressItem.Control | EgressItem.Data) -> str:
    assert isinstance(item, EgressItem.Data)
    return item.text


def _bound(move: Callable[[int], bool], index: int) -> Callable[[], bool]:
    return lambda: move(index)


def _look(shard: Any, counts: Mapping[str, int]) -> Callable[[], tuple[dict[str, int], dict[str, int]]]:
    return lambda: (shard.live(), dict(counts))


def _ring_stats(facts: RingFacts) -> RingStats:
    return RingStats(facts.fill, facts.capacity, facts.nbytes, facts.state.name)
