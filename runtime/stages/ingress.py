"""The ingress stage: from a taken request to its place in the ring, and every abort on its way.

Owns: each request from the moment it is taken from the inbox until it is registered with its shard, and each abort that is owed
to the ring. It is the only writer of the ingress ring, for requests and for aborts; that is what makes the two rules below
provable instead of probable.

* **The last step is indivisible.** For a request (or a batch, all or none) that has its ids: no room left over after pending
  aborts, then 503 and nothing was registered; else QUEUED, `Register` to the shard, then the push. As the only producer it cannot
  lose room it has seen, so a push that is refused all the same means closed, and a `Fail` follows down the same lane.
* **On the ring an abort never stands before its own request.** An abort for a request that ingress still owns cancels it here and
  the scheduler hears nothing; any other goes to the shard, which answers with `Ended` for a request it had, and only then is an
  abort owed. By then the request was pushed.

Lanes, in the order the driver takes them: `abort` (client aborts and shards' Ended), `tokenised`, `pending` (enabled while an abort
is owed and the ring has room or is closed), `fresh`. A step serves what waits in `tokenised` or in `fresh` together, message by
message: each sees what those before it have used of the room, and all that they give is committed at once. Every lane but `fresh` has a slot booked for each live request, so its writers
never wait; one bounded inbox shared by fresh and tokenised requests deadlocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...codec import Fit, IngressMessage, WireSchema, encode_abort, encode_generate, fit_length
from ...codec.admission import AdmissionRules
from ...codec.errors import (
    ClientClosedError,
    HeadraceError,
    InternalError,
    QueueFullError,
    SchedulerGoneError,
    ValidationError,
)
from ...codec.rid import shard_of
from ...fsm import AbortEvent, AbortSource, IllegalTransition, RequestEvent, RequestState
from ..sink import EgressItem
from .life import (
    Ended,
    Fail,
    Forward,
    Group,
    Job,
    Kind,
    Life,
    Message,
    Recorder,
    Register,
    StepTerminal,
    Tokenised,
    WantAbort,
    Way,
    advance,
    advance_abort,
    advance_along,
    want_abort,
)

STAGE = "ingress"

# How requests get from the inbox to their ids.
_OF_TEXT = Way(RequestEvent.VALIDATED, RequestEvent.NEEDS_NORMALIZE, RequestEvent.NEEDS_TOKENIZE)
_OF_MEDIA = Way(RequestEvent.VALIDATED, RequestEvent.NEEDS_NORMALIZE, RequestEvent.HAS_MULTIMODAL)
_OF_IDS = Way(RequestEvent.VALIDATED, RequestEvent.NEEDS_NORMALIZE, RequestEvent.ALREADY_TOKENIZED)
_OF_OTHERS = Way(RequestEvent.VALIDATED, RequestEvent.ALREADY_TOKENIZED)

# By short names: looking a member up through its class costs as much as a step.
_GENERATE = Kind.GENERATE
_ENCODING = RequestState.ENCODING
_TOKENIZE_DONE, _PRE_SEND_VALIDATED = RequestEvent.TOKENIZE_DONE, RequestEvent.PRE_SEND_VALIDATED
_RING_TOOK_REQUEST = AbortEvent.RING_TOOK_REQUEST


class Facts(NamedTuple):
    """What the driver saw of the gated and refusing ports before the step: free places, and whether the ring is closed."""

    ring_room: int
    ring_closed: bool
    pool_room: int


class Outbox:
    """What one step gives to its ports; the driver commits it after the step, in the order of the fields below."""

    __slots__ = ("aborts", "counts", "ended", "faults", "jobs", "requests", "settled", "shard", "terminals")

    def __init__(self) -> None:
        self.shard: list[tuple[int, Message]] = []
        self.jobs: list[Job] = []
        self.requests: list[tuple[Life, IngressMessage]] = []
        self.aborts: list[tuple[Life, IngressMessage]] = []
        self.terminals: list[tuple[Life, EgressItem.Error]] = []
        self.ended: list[str] = []
        self.settled: list[str] = []  # owed aborts that are over
        self.counts: list[str] = []
        self.faults: list[str] = []  # server faults in words that name no data, for the driver's log


class Ingress:
    """See the module's head. State: `entries` (owned requests by rid), `owed` (aborts that want the ring, oldest first)."""

    __slots__ = ("_record", "_rules", "_schema", "_seed", "_shards", "entries", "owed")

    def __init__(
        self,
        schema: WireSchema,
        rules: AdmissionRules,
        *,
        shards: int = 1,
        seed: int = 0,
        record: Recorder | None = None,
    ) -> None:
        self._schema = schema
        self._rules = rules
        self._shards = shards
        self._seed = seed
        self._record = record
        self.entries: dict[str, Life] = {}
        self.owed: dict[str, Life] = {}

    def key(self) -> tuple[Any, ...]:
        """The whole state, hashable: equal keys behave equally from here on."""
        return (tuple(life.key() for life in self.entries.values()), tuple(life.key() for life in self.owed.values()))

    def wants_ring(self, facts: Facts) -> bool:
        """Whether the `pending` lane is enabled."""
        return bool(self.owed) and (facts.ring_room > 0 or facts.ring_closed)

    def step(self, lane: str, message: Any, facts: Facts) -> Outbox:
        """One message of one lane, or several of `tokenised` or `fresh` (a list). Never raises for a request's fault: that request
        gets its error in the outbox."""
        out = Outbox()
        if lane == "tokenised":
            for done in message:
                self._tokenised(done, out, facts)
        elif lane == "fresh":
            for group in message:
                self._fresh(group, out, facts)
        elif lane == "abort":
            self._abort(message, out, facts)
        elif lane == "pending":
            self._pay(out, facts)
        elif lane == "refused":
            self._refused(message, out)
        elif lane == "paid":
            life, took = message
            self._paid(life, took, out)
        else:
            raise ValueError(f"ingress has no lane {lane!r}")
        return out

    # -- lanes ----------------------------------------------------------------------------------------------------------

    def _fresh(self, group: Group, out: Outbox, facts: Facts) -> None:
        """Take a group over: its members passed admission on the caller's thread, which their types certify."""
        for life in group.members:
            if life.withdrawn:
                group.members = [life for life in group.members if not life.withdrawn]
                break
        jobs = []
        record = self._record
        for life in group.members:
            self.entries[life.rid] = life
            request = life.request
            media = None if request is None else request.media
            if life.kind is not _GENERATE:
                way = _OF_OTHERS
            elif media is not None:
                way = _OF_MEDIA
            else:
                way = _OF_TEXT if life.ids is None else _OF_IDS
            try:
                advance_along(life, way, STAGE, record)
            except IllegalTransition as fault:
                out.faults.append(f"illegal transition: {fault}")
                self._fail_group(group, InternalError(f"illegal transition: {fault}"), out)
                return
            if way is _OF_IDS or way is _OF_OTHERS:
                continue
            assert request is not None
            jobs.append(Job(life.rid, request.text, request.add_special_tokens, ids=life.ids, media=media))
        if len(jobs) > facts.pool_room - len(out.jobs):
            out.counts.append("refused_pool_full")
            self._fail_group(group, QueueFullError("the tokenizer pool's queue is full; try again later"), out)
            return
        out.jobs += jobs
        group.waiting = len(jobs)
        if not jobs:
            self._send(group, out, facts)

    def _tokenised(self, done: Tokenised, out: Outbox, facts: Facts) -> None:
        life = self.entries.get(done.rid)
        if life is None:  # cancelled while it was being tokenised
            out.counts.append("late_tokenised")
            return
        group = life.group
        assert group is not None
        if done.error is not None:
            self._fail_group(group, done.error, out, cause=life)
            return
        life.ids = done.ids
        life.highest = done.highest
        try:
            event = RequestEvent.ENCODE_DONE if life.state is _ENCODING else _TOKENIZE_DONE
            advance(life, event, STAGE, self._record)
        except IllegalTransition as fault:
            out.faults.append(f"illegal transition: {fault}")
            self._fail_group(group, InternalError(f"illegal transition: {fault}"), out)
            return
        group.waiting -= 1
        if not group.waiting:
            self._send(group, out, facts)

    def _abort(self, message: WantAbort | Ended, out: Outbox, facts: Facts) -> None:
        if isinstance(message, Ended):
            self.owed[message.life.rid] = message.life
            return
        life = self.entries.get(message.rid)
        if life is None:
            shard = shard_of(message.rid, self._shards, self._seed)
            out.shard.append((shard, Forward(message.rid, message.source)))
            return
        group = life.group
        assert group is not None
        was_waiting = life.state in (RequestState.TOKENIZING, RequestState.ENCODING)
        self._cancel(life, message.source, out)
        group.members.remove(life)
        if was_waiting:
            group.waiting -= 1
        if group.members and not group.waiting:
            self._send(group, out, facts)

    def _pay(self, out: Outbox, facts: Facts) -> None:
        """Offer owed aborts to the ring while it has room; a closed ring can never take them."""
        if facts.ring_closed:
            for life in list(self.owed.values()):
                self._paid(life, False, out)
            return
        for rid in list(self.owed)[: facts.ring_room]:
            out.aborts.append((self.owed[rid], encode_abort(self._schema, rid)))

    def _paid(self, life: Life, took: bool, out: Outbox) -> None:
        """The driver's answer: the ring took the abort, or it is closed."""
        del self.owed[life.rid]
        advance_abort(life, AbortEvent.RING_TOOK_ABORT if took else AbortEvent.RING_CLOSED, STAGE, self._record)
        out.settled.append(life.rid)
        out.counts.append("aborts_sent" if took else "aborts_undeliverable")

    def _refused(self, lives: Sequence[Life], out: Outbox) -> None:
        """The ring closed between the look and the push: the lives are their shards' already, so the news follows them."""
        for life in lives:
            error = SchedulerGoneError("the scheduler has gone; the request was not handed over", rid=life.shown_rid)
            out.shard.append((life.shard, Fail([life.rid], error, owed=False)))

    def fail_all(self, error: HeadraceError) -> Outbox:
        """End everything that ingress owns (the scheduler has gone, or the stage is ending)."""
        out = Outbox()
        for life in list(self.entries.values()):
            self._fail(life, error, out)
        return out

    # -- the way to the ring --------------------------------------------------------------------------------------------

    def _send(self, group: Group, out: Outbox, facts: Facts) -> None:
        """The indivisible last step: length checks, room, QUEUED, Register, push; for all members or none."""
        if facts.ring_closed and any(life.kind is not Kind.DETOKENIZE for life in group.members):
            self._fail_group(group, SchedulerGoneError("the scheduler has gone"), out)
            return
        messages: list[IngressMessage | None] = []
        needed = 0
        for life in group.members:
            try:
                message = self._message(life)
            except HeadraceError as error:
                self._fail_group(group, error, out, cause=life)
                return
            messages.append(message)
            needed += message is not None
        if needed and needed > facts.ring_room - len(self.owed) - len(out.requests):
            out.counts.append("refused_ring_full")
            self._fail_group(group, QueueFullError("the scheduler's queue is full; try again later"), out)
            return
        record = self._record
        for life, message in zip(group.members, messages, strict=True):
            try:
                advance(life, _PRE_SEND_VALIDATED, STAGE, record)
                if message is not None:
                    advance_abort(life, _RING_TOOK_REQUEST, STAGE, record)
            except IllegalTransition as fault:
                out.faults.append(f"illegal transition: {fault}")
                self._fail(life, InternalError(f"illegal transition: {fault}"), out)
                continue
            del self.entries[life.rid]
            life.group = None
            out.shard.append((life.shard, Register(life)))
            if message is not None:
                life.ids = None  # they are in the message; a life outlasts the ring, and its ids would be in no budget
                out.requests.append((life, message))

    def _message(self, life: Life) -> IngressMessage | None:
        """The ring's message for `life`, after the length checks that every branch passes; None for a detokenize request."""
        if life.kind is not _GENERATE:
            message: IngressMessage | None = life.message  # None for a detokenize request
            return message
        request, ids = life.request, life.ids
        assert request is not None
        assert ids is not None
        fit: Fit = fit_length(len(ids), request, self._rules)
        if fit.n_input < len(ids):
            ids = ids[: fit.n_input]
            life.ids = ids
        vocab_size = self._rules.vocab_size
        if request.text is not None and (life.highest is None or life.highest >= vocab_size):
            # A client's own ids were judged at admission. A tokenizer can know tokens that the model has no row for (added ones),
            # and such an id kills the engine whoever made it.
            highest = int(ids.max())
            if highest >= vocab_size:
                raise ValidationError(
                    f"the prompt has the token id {highest}, but the model's ids are in [0, {vocab_size})", field="text"
                )
        return encode_generate(self._schema, request, ids, max_new_tokens=fit.max_new_tokens)

    # -- ends -----------------------------------------------------------------------------------------------------------

    def _advance(self, life: Life, event: RequestEvent) -> None:
        advance(life, event, STAGE, self._record)

    def _cancel(self, life: Life, source: AbortSource, out: Outbox) -> None:
        want_abort(life, source, STAGE, self._record)
        self._advance(life, RequestEvent.DISCONNECT)
        self._finish(life, ClientClosedError(f"the request was aborted ({source.name.lower()})"), out)

    def _fail(self, life: Life, error: HeadraceError, out: Outbox) -> None:
        self._advance(life, RequestEvent.ERROR)
        advance_abort(life, AbortEvent.FINISHED, STAGE, self._record)
        self._finish(life, error, out)

    def _fail_group(self, group: Group, error: HeadraceError, out: Outbox, *, cause: Life | None = None) -> None:
        """All or none: the member at fault gets its own error, its siblings learn that the batch was refused."""
        for life in group.members:
            if cause is None or life is cause:
                self._fail(life, error, out)
            else:
                kind = ValidationError if error.http_status < 500 else type(error)
                self._fail(
                    life,
                    kind(f"not admitted, because another item of the same batch was refused: {error.message}"),
                    out,
                )

    def _finish(self, life: Life, error: HeadraceError, out: Outbox) -> None:
        self.entries.pop(life.rid, None)
        life.group = None
        told = own_error(error, life.shown_rid)
        if life.sink is None:
            out.shard.append((life.shard, StepTerminal(life.token, EgressItem.Error(told))))
        else:
            out.terminals.append((life, EgressItem.Error(told)))
        out.ended.append(life.rid)


def own_error(error: HeadraceError, shown_rid: str | None) -> HeadraceError:
    """`error` as this client's own: each client gets an object of its own, because raising one changes it (traceback, rid)."""
    copy = error.__class__.__new__(error.__class__)
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    copy.rid = shown_rid
    return copy
