"""Pipelines with one fault each, for the tests of the simulation and of the explorer: each must be caught."""

from __future__ import annotations

from typing import Any

from headrace.codec import encode_abort
from headrace.fsm import AbortSource
from headrace.runtime import EgressItem
from headrace.runtime.pipeline import Pipeline
from headrace.runtime.ring import EgressConsumer, IngressConsumer
from headrace.runtime.stages.dispatch import Batch, Dispatcher
from headrace.runtime.stages.ingress import Facts, Ingress, Outbox
from headrace.runtime.stages.life import Ended, Fail, Forward, Message, Register


class AbortBeforeRequest(Pipeline):
    """An abort goes straight to the ring, wherever its request is."""

    def abort(self, rid: str, source: AbortSource) -> bool:
        if self.live.find(rid) is not None:
            self.ring_in.try_push(encode_abort(self.config.schema(), rid))
        return super().abort(rid, source)


class AbortOvertakesRegistration(Pipeline):
    """Forwarded aborts jump the queue of the registration lane."""

    def _commit_ingress(self, out: Outbox) -> None:
        for shard, message in [pair for pair in out.shard if isinstance(pair[1], Forward)]:
            self.registrations[shard]._items.appendleft(message)
            self.shard_bells[shard].ring()
        out.shard = [pair for pair in out.shard if not isinstance(pair[1], Forward)]
        super()._commit_ingress(out)


class RegisteredLate(Pipeline):
    """The ring gets the request first, and the shard hears of it at the next step of ingress."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.late: list[tuple[int, Message]] = []

    def move_ingress(self) -> bool:
        late, self.late = self.late, []
        for shard, message in late:
            self.registrations[shard].put(message)
        return super().move_ingress() or bool(late)

    def _commit_ingress(self, out: Outbox) -> None:
        self.late += [pair for pair in out.shard if isinstance(pair[1], Register)]
        out.shard = [pair for pair in out.shard if not isinstance(pair[1], Register)]
        super()._commit_ingress(out)
        if self.late:
            self.ingress_bell.ring()


class TerminalTwice(Pipeline):
    """Every terminal item is offered again."""

    def _offer(self, index: int, out: Any) -> Any:
        answer = super()._offer(index, out)
        ends = [(life.sink, item) for life, item in out.items if life.sink and not hasattr(item, "text")]
        self.hubs[index].put_items(ends)
        return answer


class HalfDispatcher(Dispatcher):
    __slots__ = ()

    def step(self, *frames: bytes) -> list[tuple[int, Message]]:
        out = super().step(*frames)
        for _, message in out:
            if isinstance(message, Batch):
                rows = list(range(len(message.frame.rids))) if message.rows is None else message.rows
                message.rows = rows[: max(1, len(rows) // 2)]
        return out


class HalfFrame(Pipeline):
    """Only half of a frame's requests hear of it."""

    def __init__(self, config: Any, schema: Any, *args: Any, **fields: Any) -> None:
        super().__init__(config, schema, *args, **fields)
        self.dispatcher = HalfDispatcher(schema, shards=config.detokenizer_shards, seed=config.shard_seed)


class BlamingDispatcher(Dispatcher):
    __slots__ = ()

    def _rejected(self, error: Any) -> list[tuple[int, Message]]:
        return [
            (shard, Fail(None, message.error, owed=True))
            for shard, message in super()._rejected(error)
            if isinstance(message, Fail)
        ]


class EverybodyFails(Pipeline):
    """A malformed frame fails every request of the shard, also those that it does not name."""

    def __init__(self, config: Any, schema: Any, *args: Any, **fields: Any) -> None:
        super().__init__(config, schema, *args, **fields)
        self.dispatcher = BlamingDispatcher(schema, shards=config.detokenizer_shards, seed=config.shard_seed)


class SilentDispatcher(Dispatcher):
    __slots__ = ()

    def _rejected(self, error: Any) -> list[tuple[int, Message]]:
        super()._rejected(error)
        return []


class RejectionSwallowed(Pipeline):
    """A malformed frame is logged, and nobody is failed."""

    def __init__(self, config: Any, schema: Any, *args: Any, **fields: Any) -> None:
        super().__init__(config, schema, *args, **fields)
        self.dispatcher = SilentDispatcher(schema, shards=config.detokenizer_shards, seed=config.shard_seed)


class ForgetfulIngress(Ingress):
    __slots__ = ()

    def _abort(self, message: Any, out: Outbox, facts: Facts) -> None:
        if isinstance(message, Ended) and not facts.ring_room and not facts.ring_closed:
            out.settled.append(message.life.rid)
            return
        super()._abort(message, out, facts)


class UncheckedIngress(Ingress):
    __slots__ = ()

    def _tokenised(self, done: Any, out: Outbox, facts: Facts) -> None:
        done.ids = None if done.ids is None else done.ids[:2]
        super()._tokenised(done, out, facts)


def _with_ingress(kind: type[Ingress]) -> type[Pipeline]:
    class WithIngress(Pipeline):
        def __init__(self, config: Any, schema: Any, rules: Any, *args: Any, **fields: Any) -> None:
            super().__init__(config, schema, rules, *args, **fields)
            self.ingress = kind(
                schema, rules, shards=config.detokenizer_shards, seed=config.shard_seed, record=fields.get("record")
            )

    return WithIngress


AbortDroppedWhenFull = _with_ingress(ForgetfulIngress)
PromptCutSilently = _with_ingress(UncheckedIngress)


class LossyConsumer(IngressConsumer):
    def wait(self, timeout: float | None = None) -> bool:
        there = super().wait(timeout)
        if there:
            self._core.drain(1)
        return there


class StashDropped(Pipeline):
    """What `wait` saw is lost."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.ring_in_consumer = LossyConsumer(self.ring_in_consumer._core)


class QuietClose(EgressConsumer):
    def close(self) -> None:
        before = self._core._room.notified
        self._core.drain(1 << 20)
        super().close()
        self._core._room.notified = before


class ProducerForgotten(Pipeline):
    """The shutdown empties and closes the egress ring and wakes no parked producer."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        core = self.ring_out._core
        self.ring_out = QuietClose(core)


class RoomNotTold(Pipeline):
    """A drain of the ingress ring does not wake ingress, which has an abort for it."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.ring_in._core.producer_bell = None


class ReaderNotWoken(Pipeline):
    """Readers are not woken by an end."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        for hub in self.hubs:
            hub._wake = lambda touched: ()  # type: ignore[method-assign]


class SlotLeaked(Pipeline):
    """The slot of a request that a shard ended is not given back."""

    def _commit_shard(self, index: int, *outs: Any) -> None:
        for out in outs:
            if out.owed:
                out.ended.clear()
        super()._commit_shard(index, *outs)


class GroupTornApart(Pipeline):
    """A batch is pushed as far as the ring has room, instead of all or none: the rest is lost."""

    def _commit_ingress(self, out: Outbox) -> None:
        out.requests = out.requests[:1]
        super()._commit_ingress(out)


class CrossTalk(Pipeline):
    """Two requests of one step get each other's chunks."""

    def _offer(self, index: int, out: Any) -> Any:
        at = [number for number, (_, item) in enumerate(out.items) if isinstance(item, EgressItem.Frame)][:2]
        if len(at) == 2:
            (one, first), (two, second) = (out.items[number] for number in at)
            out.items[at[0]], out.items[at[1]] = (one, second), (two, first)
        return super()._offer(index, out)


class ColumnsCrossed(Pipeline):
    """The same for what is put in columns."""

    def _offer(self, index: int, out: Any) -> Any:
        for columns in out.columns:
            columns.pairs = list(columns.pairs)[::-1]
        return super()._offer(index, out)


class ChunkLost(Pipeline):
    """A step's first chunk is not put into its sink."""

    def _offer(self, index: int, out: Any) -> Any:
        frames = [pair for pair in out.items if isinstance(pair[1], EgressItem.Frame)]
        if len(frames) > 1:
            out.items.remove(frames[0])
        return super()._offer(index, out)
