"""Requests for one answer: control, decode, and the health probe.

Owns: how a caller waits for an answer that is no stream. Rules it keeps: a caller that gives up (timeout, interrupt, cancelled task)
leaves no entry behind, and none of these waits on one of the manager's own threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codec import GenerateRequest, IngressMessage, Rid, WireSchema, encode_control
from ..codec.admission import Admission, AdmissionRules, NormalizedRequest
from ..codec.errors import InternalError, QueueFullError, SchedulerGoneError, ShuttingDownError, ValidationError, show
from ..fsm import AbortSource, Trace
from .channel import PushResult
from .config import RuntimeConfig
from .handle import arrival
from .pipeline import Pipeline
from .service import Service
from .sink import EgressItem, Sink
from .stages.life import Group, Kind, Life
from .text.engine import TextEngine
from .waits import seconds

_OK = PushResult.OK  # a member's look-up through its class costs as much as a whole hand-over
_NOT_CONTROL = ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "AbortReq")


class Asking(Service):
    """A service that can be asked."""

    def __init__(
        self,
        config: RuntimeConfig,
        pipeline: Pipeline,
        trace: Trace | None,
        *,
        schema: WireSchema,
        rules: AdmissionRules,
        engine: TextEngine,
    ) -> None:
        super().__init__(config, pipeline, trace)
        self._schema = schema
        self._rules = rules
        self._admission = Admission(rules, schema)
        self._hubs = pipeline.hubs
        self._shard_seed = config.shard_seed
        self._sink_capacity = config.sink_capacity
        self._engine = engine

    def _life(
        self,
        rid: Rid,
        kind: Kind,
        *,
        request: NormalizedRequest | None = None,
        ids: np.ndarray[Any, Any] | None = None,
        message: IngressMessage | None = None,
        stream: bool = True,
        nbytes: int = 0,
    ) -> Life:
        name = str(rid)
        shard = rid.shard(len(self._hubs), self._shard_seed)
        return Life(
            name,
            kind,
            Sink(self._hubs[shard], self._sink_capacity, name),
            shown_rid=rid.client_facing,
            shard=shard,
            request=request,
            ids=ids,
            message=message,
            stream=stream,
            nbytes=nbytes,
        )

    def _put(self, lives: list[Life]) -> None:
        result = self._pipeline.submit(Group(lives))
        if result is _OK:
            return
        if result is PushResult.FULL:
            raise QueueFullError("too many requests are waiting to be taken; try again later")
        raise ShuttingDownError("the manager is shutting down")

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
            admitted = self._admission.admit(request)
            probe = self._life(
                admitted.rid,
                Kind.GENERATE,
                request=admitted,
                ids=admitted.input_ids,
                stream=False,
                nbytes=admitted.nbytes,
            )
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
