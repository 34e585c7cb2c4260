"""The pipeline: stages, the channels between them, and how one step's output is committed. No waiting and no threads.

Owns: the wiring, and the moves. A *move* takes at most one message from the first enabled lane of one stage, steps the stage, and
commits what it gave. The thread driver calls each stage's moves on its thread and waits on its bell when there is none; the
simulation picks the next move by a seeded choice. Both run this very code.

Ports and their policies (the most a step emits in brackets):

| port | policy | if there is no room |
|---|---|---|
| inbox -> ingress | bounded | the caller gets 503 |
| ingress -> pool | refusing [the jobs of one group] | that group gets 503 |
| pool -> ingress | reserved [1 per job] | cannot be: one slot for each live request |
| ingress -> ring | refusing for requests, retained for aborts | 503; an abort waits in `owed` |
| ingress -> shard | reserved [1 per request, 1 per abort] | cannot be |
| dispatcher -> shard | gated [1 per frame] | the dispatcher is not enabled |
| shard -> sink | refusing, one slot reserved for the terminal | the request ends with `slow_client` |
| shard -> ingress | reserved [1 per request] | cannot be |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..codec import WireSchema
from ..codec.admission import AdmissionRules
from ..codec.errors import ClientClosedError, HeadraceError, SchedulerGoneError
from ..fsm import AbortSource
from .channel import DEFAULT_PRIMITIVES, Bell, Channel, Inbox, Primitives, PushResult
from .config import RuntimeConfig
from .live import LiveTable
from .ring import EgressConsumer, EgressProducer, IngressConsumer, IngressProducer, egress_ring, ingress_ring
from .sink import EgressItem, Hub, Sink, SinkError
from .stages.dispatch import Batch, Dispatcher
from .stages.ingress import Facts, Ingress, Outbox, own_error
from .stages.life import Fail, Group, Job, Life, Message, Recorder, StepTerminal, Tokenised, WantAbort
from .stages.plan import ShardOut, StepColumns, StepRow
from .stages.shard import Shard
from .stages.tokenize import TokenizerWorker
from .text.engine import TextEngine
from .text.tokenize import TokenizerBackend

_LONG_TEXT = 1 << 16  # characters; a text this long takes tens of milliseconds, and one at the limit minutes
_BATCH = 64  # texts that a tokenizer worker takes at once
_FRAMES = 4  # frames on the way to one shard; more would only move the back-pressure away from the ring
_RUN = 64  # frames that are taken from the ring at once, so that those that are alike can be served at once
_RUN_BYTES = 4 << 20  # and their size, which is out of the ring's account while they are served

_NO_IDS = np.empty(0, dtype=np.int64)
_OK = PushResult.OK


class Gone(Message):
    """-> ingress: the scheduler has gone; end everything that ingress owns."""

    __slots__ = ()


class StepEvent(NamedTuple):
    """What one step of one shard produced for the step sink: the shard, the step's number there, columns, and single rows."""

    shard: int
    step: int
    columns: list[StepColumns]
    rows: list[StepRow]


class Pipeline:
    """See the module's head. Everything public here is called by a driver, except `submit` and `abort` (any thread)."""

    def __init__(
        self,
        config: RuntimeConfig,
        schema: WireSchema,
        rules: AdmissionRules,
        engine: TextEngine,
        backend: TokenizerBackend | None,
        *,
        primitives: Primitives = DEFAULT_PRIMITIVES,
        record: Recorder | None = None,
    ) -> None:
        self.config = config
        shards = config.detokenizer_shards
        self.ingress_bell = Bell(primitives)
        self.egress_bell = Bell(primitives)
        self.worker_bells = [
            Bell(primitives) for _ in range(config.tokenizer_workers if backend or config.encoder else 0)
        ]
        self.shard_bells = [self.egress_bell if config.fused else Bell(primitives) for _ in range(shards)]

        self.live = LiveTable(config.max_live_requests, config.admitted_bytes, primitives)
        self.inbox = Inbox(config.channel_capacity, self.ingress_bell, primitives)
        self.aborts: Channel[Any] = Channel(None, self.ingress_bell, primitives)
        self.tokenised: Channel[Tokenised] = Channel(None, self.ingress_bell, primitives)
        # bounded together, by `Facts.pool_room`, so that any job can go to any worker
        self.jobs: list[Channel[Any]] = [Channel(None, bell, primitives) for bell in self.worker_bells]
        self.registrations: list[Channel[Message]] = [Channel(None, bell, primitives) for bell in self.shard_bells]
        self.frames: list[Channel[Message]] = [
            Channel(_FRAMES, bell, primitives, room_bell=self.egress_bell) for bell in self.shard_bells
        ]
        self.hubs = [
            Hub(primitives, record=record, name=f"sinks-{index}", pairs_of=engine.columns) for index in range(shards)
        ]

        self.ring_in: IngressProducer
        self.ring_in_consumer: IngressConsumer
        self.ring_in, self.ring_in_consumer = ingress_ring(config.ingress_ring_capacity, primitives=primitives)
        self.ring_out_producer: EgressProducer
        self.ring_out: EgressConsumer
        self.ring_out_producer, self.ring_out = egress_ring(
            config.egress_ring_capacity, max_bytes=config.egress_ring_bytes, primitives=primitives
        )
        self.ring_in.ring_bell_on_room(self.ingress_bell)
        self.ring_out.ring_bell_on_arrival(self.egress_bell)
        if record is not None:
            self.ring_in.trace(record, "ingress")
            self.ring_out.trace(record, "egress")

        self.ingress = Ingress(schema, rules, shards=shards, seed=config.shard_seed, record=record)
        self.workers = [TokenizerWorker(backend, config.encoder, rules.vocab_size) for _ in self.worker_bells]
        self.dispatcher = Dispatcher(schema, shards=shards, seed=config.shard_seed)
        self.shards = [
            Shard(
                engine, capacity=config.max_live_requests, output_limit=config.context_len, index=index, record=record
            )
            for index in range(shards)
        ]
        self._scheduler_gone = False
        self._steps = [0] * shards
        # counters are written by one thread each: ingress, each shard, the dispatcher (its own dict)
        self.ingress_counts: Counter[str] = Counter()
        self.shard_counts: list[Counter[str]] = [Counter() for _ in range(shards)]
        self.on_step: Callable[[StepEvent], None] | None = None
        self.on_fault: Callable[[str, str], None] | None = None  # (logger, a server fault in words that name no data)
        self.on_activity: Callable[[int], None] | None = None  # so many frames were accepted
        self.on_scheduler_gone: Callable[[], None] | None = None

    # -- from any thread --------------------------------------------------------------------------------------------------

    def submit(self, group: Group) -> PushResult:
        """Book and leave a group in the inbox: OK, FULL or CLOSED. Raises what `LiveTable.book` raises. All or none."""
        members = group.members
        if not self.live.book(members):
            # Near the limit the ring is asked. The mark is taken first: what reaches the ring later is counted twice, never not at all.
            mark = self.live.mark()
            self.live.book_exactly(members, self.ring_in.facts().nbytes, mark)
        result = self.inbox.put(group)
        if result is not _OK:
            if result is PushResult.FULL:
                self.live.refused("channel_capacity", len(members))
            for life in members:
                self.live.end(life.rid)
        return result

    def abort(self, rid: str, source: AbortSource) -> bool:
        """Ask for the abort of `rid` once. False for a rid that is not live or was asked before."""
        life = self.live.claim_abort(rid)
        if life is None:
            return False
        if self.inbox.withdraw(life):
            error = own_error(ClientClosedError(f"the request was aborted ({source.name.lower()})"), life.shown_rid)
            self._tell(life, EgressItem.Error(error))
            self.live.end(rid)
        else:
            self.aborts.put(WantAbort(rid, source))
        return True

    def abandon(self, rid: str) -> None:
        """The handle of `rid` was collected: nobody will read its output."""
        life = self.live.find(rid)
        if life is not None and life.sink is not None:
            life.sink.close()
            self.abort(rid, AbortSource.GUARD)

    # -- moves --------------------------------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """What ingress may rely on for one step."""
        room, closed = self.ring_in.room()
        queued = sum(map(len, self.jobs))
        return Facts(room, closed, max(0, self.config.channel_capacity - queued) if self.jobs else 0)

    def move_ingress(self) -> bool:
        """What waits in the first enabled lane: one abort; else tokenised requests; else owed aborts; else fresh requests."""
        facts = self.facts()
        if taken := self.aborts.take():
            if isinstance(taken[0], Gone):
                error = SchedulerGoneError("the scheduler has gone")
                self._commit_ingress(self.ingress.fail_all(error))
            else:
                self._commit_ingress(self.ingress.step("abort", taken[0], facts))
        elif done := self.tokenised.take(_BATCH):
            self._commit_ingress(self.ingress.step("tokenised", done, facts))
        elif self.ingress.wants_ring(facts):
            self._commit_ingress(self.ingress.step("pending", None, facts))
        elif groups := self._take_fresh():
            self._commit_ingress(self.ingress.step("fresh", groups, facts))
        else:
            return False
        return True

    def _take_fresh(self) -> list[Group]:
        """Groups that wait in the inbox, oldest first, until they hold about as many requests as a worker takes at once."""
        groups: list[Group] = []
        count = 0
        while count < _BATCH and (group := self.inbox.take()) is not None:
            groups.append(group)
            count += len(group.members)
        return groups

    def move_worker(self, index: int) -> bool:
        """Everything that waits for worker `index` (at most 64 texts), as one batch."""
        jobs = self.jobs[index].take(_BATCH)
        if not jobs:
            return False
        answers = self.workers[index].step(jobs)
        for done in answers:
            if done.error is not None and done.error.http_status >= 500:
                self._report("tokenize", (done.error.message,))
        self.tokenised.put_all(answers)
        return True

    def move_dispatch(self) -> bool:
        """As many frames as every shard has room for, whatever they become."""
        most = _FRAMES
        for channel in self.frames:
            most = min(most, channel.room() or 0)
            if not most:
                return False
        frames = self.ring_out.drain_some(most, _RUN_BYTES)
        if not frames:
            return self._notice_scheduler_gone()
        before = self.dispatcher.activity
        for shard, message in self._dispatch(frames):
            self.frames[shard].put(message)
        self._tell_activity(before)
        return True

    def move_egress(self) -> bool:
        """Dispatcher and all shards on one thread: waiting frames straight through, behind everything that waits in the lanes.

        False when nothing was left to do at some moment since the call began, although something may have been done.
        """
        moved = False
        for index in range(len(self.shards)):
            while self.move_shard(index):
                moved = True
        frames = self.ring_out.drain_some(_RUN, _RUN_BYTES)
        if not frames:
            return self._notice_scheduler_gone() or moved
        before = self.dispatcher.activity
        for index, message in self._dispatch(frames):
            # What this frame answers was registered before the scheduler could see it, so it is in the lane by now: asked after the
            # frame was taken, the lane cannot be found empty too early.
            while registrations := self.registrations[index].take(_BATCH):
                self._register(index, registrations)
            self._serve(index, message)
        self._tell_activity(before)
        # A ring that is empty now rings the bell for whatever comes, and so do the lanes. After a sleep a second look for nothing would
        # cost as much as the frame did, in front of the readers who have just been woken.
        return self.ring_out.has_more()

    def _dispatch(self, frames: Sequence[bytes]) -> list[tuple[int, Message]]:
        messages = self.dispatcher.step(*frames)
        if self.dispatcher.faults:
            self._report("egress", self.dispatcher.faults)
        return messages

    def _tell_activity(self, before: int) -> None:
        """Behind the output of the frames, for which somebody waits more often than for this."""
        if self.dispatcher.activity != before and self.on_activity is not None:
            self.on_activity(self.dispatcher.activity - before)

    def _notice_scheduler_gone(self) -> bool:
        """If the ring's producer has gone and left nothing in it, nothing will come any more: everything live ends now, once."""
        if self._scheduler_gone:
            return False
        facts = self.ring_out.facts()  # both under one lock: a last frame may have come since the ring was found empty
        if not facts.producer_gone or facts.fill:
            return False
        self._scheduler_gone = True
        self.ring_in_consumer.close()
        if self.on_scheduler_gone is not None:
            self.on_scheduler_gone()
        # Down the frame lane, behind the frames that the scheduler still gave. Registrations of requests that the ring took
        # before it closed are in their lane by now, and that lane goes first.
        for channel in self.frames:
            channel.put(Fail(None, SchedulerGoneError("the scheduler has gone"), owed=True))
        self.aborts.put(Gone())
        return True

    def move_shard(self, index: int) -> bool:
        """The registrations that wait, or else one frame.

        Whether a frame is there is asked before the registration lane is: what a frame answers was registered before the scheduler
        could see it. The other way round, both could arrive between the two looks, and the frame would find nobody.
        """
        has_frame = len(self.frames[index]) > 0
        if registrations := self.registrations[index].take(_BATCH):
            self._register(index, registrations)
            return True
        taken = self.frames[index].take() if has_frame else []
        if not taken:
            return False
        self._serve(index, taken[0])
        return True

    def _register(self, index: int, messages: Sequence[Message]) -> None:
        """What waits in the registration lane of one shard, in its order and as one step."""
        shard, out = self.shards[index], ShardOut()
        for message in messages:
            shard.step(message, into=out)
        self._give_out(index, out)

    def _serve(self, index: int, message: Message) -> None:
        """One message of the frame lane through one shard, and what comes of it to its ports."""
        shard, left = self.shards[index], message
        while True:
            sure = 1
            if isinstance(left, Batch) and left.run is not None:
                reached = shard.reach(left)
                if reached is not None:
                    sure = self.hubs[index].sure(reached, self.config.sink_capacity, len(left.run))
            out = shard.step(left, sure)
            self._give_out(index, out)
            if out.rest is None:
                return
            left = out.rest

    def _give_out(self, index: int, out: ShardOut) -> None:
        """What one step of a shard gave, to the sinks and to everybody else."""
        refused_rows, refused = self._offer(index, out)
        if refused_rows or out.items:
            after = self.shards[index].settle(out, refused_rows, refused)
            self._offer(index, after)  # errors only, into reserved slots
            self._commit_shard(index, out, after)
        elif not out.plain:
            self._commit_shard(index, out)

    def _offer(self, index: int, out: ShardOut) -> tuple[list[int], dict[int, SinkError]]:
        hub = self.hubs[index]
        refused_rows: list[int] = []
        if out.begun:
            hub.begin(out.begun)
        for columns in out.columns:
            refused_rows.extend(columns.rows[at] for at in hub.put_columns(columns, self.config.sink_capacity))
        refused: dict[int, SinkError] = {}
        pairs: list[tuple[Sink, Any]] = []
        where: list[int] = []
        for at, (life, item) in enumerate(out.items):
            if life.sink is not None:
                pairs.append((life.sink, item))
                where.append(at)
        if pairs:
            refused = {where[at]: why for at, why in hub.put_items(pairs)}
        return refused_rows, refused

    def _commit_shard(self, index: int, *outs: ShardOut) -> None:
        steps = [row for out in outs for row in out.steps]
        for out in outs:
            for ended in out.owed:
                self.live.owe(ended.life.rid)
                self.aborts.put(ended)
            for rid in out.ended:
                self.live.end(rid)
            if out.counts:
                self.shard_counts[index].update(out.counts)
            if out.faults:
                self._report("detok", out.faults)
        columns = [column for out in outs for column in out.step_columns]
        if steps or columns:
            self._give_steps(index, columns, steps)
        for out in outs:
            for column in out.run:
                self._give_steps(index, [column], [])

    def _give_steps(self, index: int, columns: list[StepColumns], rows: list[StepRow]) -> None:
        if self.on_step is not None:
            self._steps[index] += 1
            self.on_step(StepEvent(index, self._steps[index], columns, rows))

    def _report(self, part: str, faults: Sequence[str]) -> None:
        if self.on_fault is not None:
            for fault in faults:
                self.on_fault(f"headrace.{part}", fault)

    def _commit_ingress(self, out: Outbox) -> None:
        if out.shard:
            if len(self.registrations) == 1:
                self.registrations[0].put_all([message for _, message in out.shard])
            else:
                for shard, message in out.shard:
                    self.registrations[shard].put(message)
        if out.jobs:
            if len(self.jobs) == 1:
                self.jobs[0].put_all(out.jobs)
            else:
                for job in out.jobs:
                    self._lane_of(job).put(job)
        if out.requests:
            messages = [message for _, message in out.requests]
            result = self.ring_in.try_push_many(messages)
            lives = [life for life, _ in out.requests]
            self.live.pushed(lives, sum([message.nbytes for message in messages]))
            if not result:
                # the only producer saw this room before the step, so the ring can only have been closed since
                self._commit_ingress(self.ingress.step("refused", lives, self.facts()))
        for life, abort in out.aborts:
            took = bool(self.ring_in.try_push(abort))  # there was room, so a refusal means closed
            if took:
                self.live.pushed((), abort.nbytes)
            self._commit_ingress(self.ingress.step("paid", (life, took), self.facts()))
        for life, item in out.terminals:
            self._tell(life, item)
        for rid in out.ended:
            self.live.end(rid)
        for rid in out.settled:
            self.live.settled(rid)
        if out.counts:
            self.ingress_counts.update(out.counts)
        if out.faults:
            self._report("ingress", out.faults)

    def _lane_of(self, job: Job) -> Channel[Any]:
        """Long texts queue behind one another on the first worker, so that they never stand before anybody else's."""
        if len(self.jobs) == 1 or (job.text is not None and len(job.text) > _LONG_TEXT):
            return self.jobs[0]
        return min(self.jobs[1:], key=len)

    def _tell(self, life: Life, item: EgressItem.Error) -> None:
        """A terminal item for a request that no shard has."""
        if life.sink is None:
            self.registrations[life.shard].put(StepTerminal(life.token, item))
        else:
            self.hubs[life.shard].put_items([(life.sink, item)])

    # -- ends ---------------------------------------------------------------------------------------------------------------

    def close_channels(self) -> None:
        """Refuse what would come from now on: inbox and both rings, every parked caller woken. Idempotent."""
        self.inbox.close()
        self.ring_in.close()
        self.ring_out.close()

    def fail_everything(self, error: HeadraceError) -> None:
        """A stage has died and its lanes are not served any more: tell every live client directly, once.

        Requests of the step sink are told through `on_step` on the caller's thread, since their shard's may be gone. What a stage
        that still runs gives for them afterwards is for the receiver to ignore (as the sinks do, see `Hub.fail_open`).
        """
        rows: dict[int, list[StepRow]] = {}
        for life in self.live.lives():
            told = own_error(error, life.shown_rid)
            if life.sink is not None:
                self.hubs[life.shard].fail_open(life.sink, told)
            else:
                rows.setdefault(life.shard, []).append(StepRow(life.token, "", _NO_IDS, None, told))
            self.live.end(life.rid)
        for index, lane in enumerate(self.registrations):
            # ends that ingress told and no shard has delivered: their requests are in no table any more
            for message in lane.take(len(lane)):
                if isinstance(message, StepTerminal):
                    row = StepRow(message.token, "", _NO_IDS, None, message.item.error)
                    rows.setdefault(index, []).append(row)
        for index, ends in rows.items():
            self._give_steps(index, [], ends)


def merged(counters: Sequence[Counter[str] | dict[str, int]]) -> dict[str, int]:
    """The sum of counters kept by several threads."""
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(dict(counter))
    return dict(total)
