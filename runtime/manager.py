"""`TokenizerManager`: the ways in, and what they hand out.

Owns: admission on the caller's thread, handles, and the step sink's callback. Everything that decides what happens to a request is in
the stages; this module only puts requests in. Rules it keeps:

* Refused before anything is touched: shape, rid, ids, parameters, inbox, live table and life cycle are checked on the caller's
  thread, and a refusal leaves no trace. What needs the tokenizer, the length or room in the ring ends the handle with that error.
* A batch is admitted all or none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..codec import GenerateBody, GenerateRequest, Rid, SamplingParams
from ..codec.admission import NormalizedRequest
from ..codec.body import batch_rids
from ..codec.errors import InternalError, ValidationError, show
from ..fsm import AbortSource, Trace
from .asking import Asking
from .config import RuntimeConfig
from .faults import describe, where
from .handle import RequestHandle
from .pipeline import Pipeline, StepEvent
from .port import SchedulerPort
from .stages.life import Kind, Life
from .stats import Stats, collect, limits_reached, ring_stats
from .steps import StepBatch
from .text.engine import TextEngine
from .text.tokenize import choose_backend, load_tokenizer, max_token_bytes

_GENERATE = Kind.GENERATE  # looking a member up through its class costs more than handing it on


class TokenizerManager(Asking):
    """The front half of an LLM server: text in, a scheduler in the middle, text out.

    Usable as a context manager, or with `start()` and `shutdown()`. Construction checks the config and loads the tokenizer;
    it raises and leaves nothing behind when either fails. Give `tm.scheduler` to a scheduler, then `generate`.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        config = config.checked()
        if config.log_level is not None:
            logging.getLogger("headrace").setLevel(config.log_level.upper())
        schema = config.schema()
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer)
        engine = TextEngine(tokenizer)
        self._backend = None if tokenizer is None else choose_backend(tokenizer, fast=config.fast_tokenizer)
        rules = config.rules(
            config.vocab_size if config.vocab_size is not None else engine.vocab_limit,
            max_token_bytes=None if tokenizer is None else max_token_bytes(tokenizer),
        )
        trace = Trace(config.trace_capacity) if config.trace else None
        pipeline = Pipeline(config, schema, rules, engine, self._backend, record=trace)
        super().__init__(config, pipeline, trace, schema=schema, rules=rules, engine=engine)
        self.scheduler = SchedulerPort(schema, pipeline.ring_in_consumer, pipeline.ring_out_producer)
        self._abort_one = pipeline.abort
        self._cumulative = not config.incremental_streaming_output
        self._step_callback: Callable[[StepBatch], None] | None = None
        self._step_locks = [threading.Lock() for _ in pipeline.shards]
        pipeline.on_step = self._deliver_step

    def __enter__(self) -> TokenizerManager:
        return self.start()

    async def __aenter__(self) -> TokenizerManager:
        return await asyncio.to_thread(self.start)

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
        request = GenerateRequest(
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            sampling_params=params,
            rid=_own(rid),
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
        self._check_usable()
        if sink != "handle" or deadline_s is not None:
            self._check_options(sink, deadline_s)
        life, handle = self._make(self._admission.admit(request), sink)
        self._enter([life], [handle], deadline_s)
        return handle

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
        self._check_options(sink, deadline_s)
        for given in requests:
            given.rid = _own(given.rid)
        if batch:
            self._check_batch(requests)
        admit = self._admission.admit
        admitted = [admit(request) for request in requests]
        lives, handles = [], []
        for request in admitted:
            life, handle = self._make(request, sink)
            lives.append(life)
            handles.append(handle)
        self._enter(lives, handles, deadline_s)
        return handles

    def _enter(self, lives: list[Life], handles: Sequence[RequestHandle], deadline_s: float | None) -> None:
        """Put in what was admitted. Where that is refused, nobody has the handles, and nobody will."""
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

    def _check_options(self, sink: str, deadline_s: float | None) -> None:
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

    def _check_batch(self, requests: Sequence[GenerateRequest]) -> None:
        most = min(self.config.max_batch_items, self.config.ingress_ring_capacity)
        if not requests:
            raise ValidationError("a batch must hold at least one prompt", field="prompts")
        if len(requests) > most:
            raise ValidationError(f"a batch may hold at most {most} prompts, not {len(requests)}", field="prompts")

    def _make(self, request: NormalizedRequest, sink: str) -> tuple[Life, RequestHandle]:
        rid = request.rid
        life = self._life(
            rid, _GENERATE, request=request, ids=request.input_ids, stream=request.stream, nbytes=request.nbytes
        )
        if sink == "step":
            life.sink = None
        handle = RequestHandle(
            life.rid,
            rid.client_facing,
            life.sink,
            self._abort_one,
            self._forgotten.put,
            cumulative=self._cumulative,
            token_text=self._engine.token_text if request.return_text_in_logprobs and self._backend else None,
        )
        if sink == "step":
            life.token = handle
        return life, handle

    def abort(self, rid: str) -> int:
        """Abort every live request whose client-facing rid is exactly `rid`; returns how many. Unknown or empty: 0."""
        self._check_usable()
        return sum(self._pipeline.abort(name, AbortSource.API) for name in self._pipeline.live.named(rid))

    def abort_all(self) -> int:
        """Abort everything that is live; returns how many."""
        self._check_usable()
        return sum(self._pipeline.abort(life.rid, AbortSource.API) for life in self._pipeline.live.lives())

    def on_step(self, callback: Callable[[StepBatch], None]) -> None:
        """Call `callback` once for each scheduler step and shard, with all that it produced for requests with ``sink="step"``.

        It runs on the shard's driver thread, so it must be short. It may call generate, abort and shutdown. If it raises, the
        requests of that batch are aborted and it is logged. A second registration is an error.
        """
        if not callable(callback):
            raise ValidationError(f"on_step takes a function, not {show(callback)}", field="callback")
        with self._lock:
            if self._step_callback is not None:
                raise InternalError("on_step has a callback already; there is one for a manager")
            self._step_callback = callback

    def _deliver_step(self, event: StepEvent) -> None:
        callback = self._step_callback  # set once, before any request of the step sink can be submitted
        if callback is None:
            return
        # One call at a time for each shard; only when a stage has died is there a second caller (see `Pipeline.fail_everything`).
        with self._step_locks[event.shard]:
            first = [row for row in event.rows if row.ends and row.token.claim_end()] if event.rows else []
            if self._cut_off:  # every request has been told its end, or is told it here
                event = event._replace(columns=[], rows=first)
                if not first:
                    return
            batch = StepBatch(event)
            try:
                callback(batch)
            except BaseException as fault:
                # A user's code on our thread: the stage lives on, and what the callback may have lost is ended. Also for what is
                # no Exception (a CancelledError out of a future, sys.exit): here it would end the stage, and with it everybody.
                told = f"the on_step callback failed with {describe(fault)}; its requests are aborted"
                self._faults.report("headrace.manager", told, where(fault))
                for token in [token for column in event.columns for token in column.tokens]:
                    token.abort()  # asked of the event: the lists of the batch were the callback's to change
                for row in event.rows:
                    row.token.abort()

    def stats(self) -> Stats:
        """A snapshot, taken between two steps of each stage: live requests by state, rings, counters, decoder.

        A request that is on its way from one stage to the next at that moment counts as QUEUED, so `live` is empty only when
        nothing is live.
        """
        self._check_usable()
        pipeline = self._pipeline
        live, counters = collect(pipeline, self._thread)
        with self._active:
            activity = self._activity
        return Stats(
            state=self.state.name,
            live=live,
            ingress_ring=ring_stats(pipeline.ring_in.facts()),
            egress_ring=ring_stats(pipeline.ring_out.facts()),
            counters=counters,
            limits_reached=limits_reached(pipeline, counters),
            activity=activity,
            decoder=self._engine.kind,
            decoder_reason=self._engine.reason,
            tokenizer_backend=None if self._backend is None else self._backend.name,
            waiting_bytes=pipeline.live.nbytes,
        )


def _own(rid: Any) -> Any:
    """A `Rid` is one request's name inside; from a client it is a name like any other, which can come again."""
    return str(rid) if isinstance(rid, Rid) else rid


def _request(prompt: Any, params: Any, **fields: Any) -> GenerateRequest:
    is_text = isinstance(prompt, str)
    return GenerateRequest(
        text=prompt if is_text else None, input_ids=None if is_text else prompt, sampling_params=params, **fields
    )
