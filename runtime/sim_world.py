"""The world of a simulation: the shipped pipeline, the drivers around it, and what clients and everybody else can do.

Owns: one action at a time (`_act_…`), each of which draws what it needs from its own number, and the watching of the moves so that
the oracle knows what a shard is given. What is done when, and what must hold, is `simulation.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from ..codec import GenerateRequest, Rid, WireSchema, admit, encode_control, load_schema
from ..codec.errors import QueueFullError, SchedulerGoneError, ShuttingDownError
from ..fsm import LIFECYCLE, AbortSource, LifecycleEvent, LifecycleState, Trace
from ..specs import path
from .channel import PushResult, signal
from .closing import Closing, Until, Wait
from .config import RuntimeConfig
from .pipeline import Pipeline, StepEvent
from .sim_oracle import Broken, Client, Oracle, room_of
from .sim_parts import Driver, SimLock, SimOptions, SimPrimitives
from .sim_scheduler import SimScheduler
from .sink import Sink
from .stages.life import Group, Kind, Life
from .text.engine import TextEngine
from .text.tokenize import TokenizersBackend, load_tokenizer
from .threads import dead_stage

Action = tuple[str, int]
"""The name of an action, and the number that it draws from."""
BOOM = "\x00the tokenizer raises\x00"
SETTLING = 20_000  # rounds of the fair end; more is a livelock
_WORDS = " the river carries wörds, 🎉 and ünfinished 漢字 to the mill"


class Common:
    """What every run uses and none changes: the tokenizer, the engine, the schemas."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(str(path("data", "tokenizer.json")))
        self.engine = TextEngine(tokenizer)
        self.backend = TokenizersBackend(tokenizer)
        self.schemas: dict[str, WireSchema] = {name: load_schema(name) for name in ("v1", "v2")}
        self.vocabulary: list[int] = tokenizer.encode(_WORDS, add_special_tokens=False).ids
        self.decode: Callable[[list[int]], str] = lambda ids: str(tokenizer.decode(ids)) if ids else ""


@cache
def common() -> Common:
    return Common()


class RaisingBackend:
    """The tokenizer, which raises on the texts that ask for it."""

    name = "simulated"

    def __init__(self, backend: TokenizersBackend) -> None:
        self._backend = backend

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        if any(BOOM in text for text in texts):
            raise RuntimeError("the tokenizer raised")
        return self._backend.encode_batch(texts, add_special_tokens)


class _SimTrace(Trace):
    """A trace that also knows where each request is."""

    def __init__(self, states: dict[str, int]) -> None:
        super().__init__(1 << 20)
        self._where = states

    def record(self, machine: str, rid: str, from_: int, event: int, to: int, stage: str) -> None:
        if machine == "request":
            self._where[rid] = to
        super().record(machine, rid, from_, event, to, stage)


class World:
    """Everything that a run consists of. `do` is one action; False where it was not enabled."""

    def __init__(
        self,
        seed: int,
        options: SimOptions | None = None,
        *,
        pipeline: Callable[..., Pipeline] = Pipeline,
    ) -> None:
        self.seed = seed
        self._rng = random.Random(seed)
        drawn = SimOptions.draw(self._rng)
        self.options = drawn if options is None else options
        self._make = pipeline
        self.oracle: Oracle
        self._build()

    def _build(self) -> None:
        options, shared = self.options, common()
        config = RuntimeConfig(
            tokenizer="simulated",
            context_len=options.context_len,
            wire=options.wire,
            detokenizer_shards=options.shards,
            tokenizer_workers=options.workers,
            fused=options.fused,
            ingress_ring_capacity=options.ring_in,
            egress_ring_capacity=options.ring_out,
            sink_capacity=options.sink,
            channel_capacity=options.channel,
            max_live_requests=options.max_live,
        )
        self._schema = shared.schemas[options.wire]
        self._rules = config.rules(shared.engine.vocab_limit)
        self.oracle = Oracle(
            shared.decode,
            limit=shared.engine.vocab_limit,
            output_limit=options.context_len,
            sink_capacity=options.sink,
            shards=options.shards,
        )
        self.trace = _SimTrace(self.oracle.states)
        self.pipeline = self._make(
            config,
            self._schema,
            self._rules,
            shared.engine,
            RaisingBackend(shared.backend),
            primitives=SimPrimitives,
            record=self.trace,
        )
        if not options.traced_rings:
            self.pipeline.ring_in._core.record = self.pipeline.ring_out._core.record = None
        self.pipeline.on_step = self._on_step
        self.pipeline.on_scheduler_gone = self._on_scheduler_gone
        self.scheduler = SimScheduler(
            self.pipeline, self._schema, self.oracle, options, shared.vocabulary, shared.engine.vocab_limit + 5
        )
        self.drivers = self._drivers()
        self.now = 0
        self._rids = 0
        self._names: list[str] = []
        self._closing: Closing | None = None
        self._wait: Wait | None = None
        self._deadline = 0
        self._state: int = LIFECYCLE.initial
        self._parked: dict[int, SimLock] = {}
        self.stopped = False
        self._life(LifecycleEvent.START)
        self._life(LifecycleEvent.STARTED)
        self.pipeline.live.open_admission()

    def _drivers(self) -> list[Driver]:
        pipeline = self.pipeline
        self._watch_shards()
        shards = [partial(pipeline.move_shard, index) for index in range(len(pipeline.shards))]
        drivers = [Driver("ingress", pipeline.ingress_bell, [self._ingress_move])]
        if self.options.fused and self.options.straight:
            drivers.append(Driver("egress", pipeline.egress_bell, [pipeline.move_egress]))
        elif self.options.fused:
            drivers.append(Driver("egress", pipeline.egress_bell, [*shards, pipeline.move_dispatch]))
        else:
            drivers.append(Driver("egress", pipeline.egress_bell, [pipeline.move_dispatch]))
            drivers += [Driver(f"detok-{i}", pipeline.shard_bells[i], [move]) for i, move in enumerate(shards)]
        for index, bell in enumerate(pipeline.worker_bells):
            drivers.append(Driver(f"tok-{index}", bell, [lambda index=index: pipeline.move_worker(index)]))  # type: ignore[misc]
        return drivers

    def _life(self, event: LifecycleEvent) -> None:
        before = self._state
        self._state = LIFECYCLE.next(LifecycleState(before), event)
        self.trace.record("lifecycle", "", before, event, self._state, "manager")

    # -- moves, watched ----------------------------------------------------------------------------------------------------------

    def _ingress_move(self) -> bool:
        pipeline = self.pipeline
        facts = pipeline.facts()
        if pipeline.ingress.owed and not facts.ring_room and not facts.ring_closed:
            self.oracle.seen["an abort waits for a full ring"] += 1
        moved = pipeline.move_ingress()
        self.oracle.room = room_of(pipeline)
        return moved

    def _watch_shards(self) -> None:
        """The oracle learns of every message just before its shard does."""
        pipeline, serve, offer = self.pipeline, self.pipeline._serve, self.pipeline._offer
        register = pipeline._register

        def watched(index: int, message: Any) -> None:
            self.oracle.given(index, message)
            serve(index, message)
            self.oracle.look(pipeline.live._lives)  # a move may hold several messages

        def registered(index: int, messages: Any) -> None:
            for message in messages:
                self.oracle.given(index, message)
            register(index, messages)
            self.oracle.look(pipeline.live._lives)

        def offered(index: int, out: Any) -> Any:
            self.oracle.seen["several steps at once"] += bool(out.run) or any(part.steps > 1 for part in out.columns)
            return offer(index, out)

        # On the instance, because the pipeline may be any faulty subclass, whose own methods are to be watched.
        pipeline._serve, pipeline._register, pipeline._offer = watched, registered, offered  # type: ignore[method-assign]

    def _on_step(self, event: StepEvent) -> None:
        for column in event.columns:
            for client, text, token in zip(column.tokens, column.texts, column.ids.tolist(), strict=True):
                if not self._told_of_death(client):
                    self.oracle.got_row(client, text, [token], None, None)
        for row in event.rows:
            if not self._told_of_death(row.token):
                self.oracle.got_row(row.token, row.text, row.token_ids.tolist(), row.finish_reason, row.error)

    def _told_of_death(self, client: Client) -> bool:
        """A stage died and everybody was told; what another stage still gives is for the receiver to ignore."""
        return self.oracle.died and client.terminal is not None

    def _on_scheduler_gone(self) -> None:
        self.oracle.gone = True
        self._life(LifecycleEvent.DRAIN)
        self.pipeline.live.close_admission(SchedulerGoneError("the scheduler has gone"))

    # -- actions of clients ------------------------------------------------------------------------------------------------------

    def _rid(self, rng: random.Random) -> Rid:
        self._rids += 1
        if rng.randrange(100) >= 50:
            return Rid.from_wire(f"{self._rids:032x}")
        if self._names and rng.randrange(100) < self.options.reused_rid:
            name = rng.choice(self._names[-8:])
        else:
            name = f"r{self._rids}"
            self._names.append(name)
        return Rid.from_wire(f"{name}#{self._rids:016x}")

    def _generate(self, rng: random.Random, stream: bool, stepping: bool) -> Client:
        options, rules = self.options, self._rules
        rid, boom = self._rid(rng), rng.randrange(100) < options.raising
        too_long = rng.randrange(100) < options.too_long
        asked = options.context_len if too_long and rng.random() < 0.5 else rng.choice((0, 1, 4))
        words = rng.randint(1, 5)
        prompt: dict[str, Any]
        if rng.randrange(100) < options.text or boom:
            text = "mill " * (words * (options.context_len if too_long else 1))
            prompt = {"text": text + BOOM if boom else text}
            count = len(common().backend.encode_batch([text], True)[0])
        else:
            count = words
            prompt = {"input_ids": [rng.choice(common().vocabulary) for _ in range(count)]}
        stops = rng.choice(((), (), (" the mill", "zzz")))
        request = admit(
            GenerateRequest(
                rid=rid, stream=stream, sampling_params={"max_new_tokens": asked, "stop": list(stops)}, **prompt
            ),
            rules,
            self._schema,
        )
        fits = count < rules.context_len and count + asked <= rules.context_len
        life = self._make_life(
            rid,
            Kind.GENERATE,
            stepping,
            request=request,
            ids=request.input_ids,
            stream=stream,
            nbytes=request.nbytes,
        )
        return Client(len(self.oracle.clients), life, fits=fits or boom, boom=boom)

    def _make_life(self, rid: Rid, kind: Kind, stepping: bool = False, **fields: Any) -> Life:
        shard = rid.shard(len(self.pipeline.shards))
        sink = None if stepping else Sink(self.pipeline.hubs[shard], self.options.sink, str(rid))
        return Life(str(rid), kind, sink, shown_rid=rid.client_facing, shard=shard, **fields)

    def _submit(self, clients: list[Client]) -> bool:
        for at, client in enumerate(clients):
            client.index = len(self.oracle.clients) + at
            client.life.token = client if client.stepping else None
        try:
            result = self.pipeline.submit(Group([client.life for client in clients]))
        except (QueueFullError, ShuttingDownError, SchedulerGoneError) as refusal:
            self.oracle.seen[f"refused at once: {refusal.code}"] += 1
            return True
        if result is not PushResult.OK:
            self.oracle.seen[f"inbox {result.value}"] += 1
        else:
            self.oracle.submitted(clients)
        return True

    def _act_submit(self, rng: random.Random) -> bool:
        if len(self.oracle.open) >= self.options.clients:
            return False
        options = self.options
        stream, stepping = rng.randrange(100) < options.streaming, rng.randrange(100) < options.stepping
        return self._submit([self._generate(rng, stream, stepping)])

    def _act_batch(self, rng: random.Random) -> bool:
        if len(self.oracle.open) >= self.options.clients:
            return False
        stream, stepping = rng.randrange(100) < self.options.streaming, rng.randrange(100) < self.options.stepping
        count = min(rng.randint(2, 4), self.options.ring_in)
        return self._submit([self._generate(rng, stream, stepping) for _ in range(count)])

    def _act_control(self, rng: random.Random) -> bool:
        rid = self._rid(rng)
        message = encode_control(self._schema, "FlushCacheReqInput", rid, 0.0)
        return self._submit([Client(0, self._make_life(rid, Kind.CONTROL, message=message))])

    def _act_decode(self, rng: random.Random) -> bool:
        shared = common()
        ids = [rng.choice(shared.vocabulary) for _ in range(rng.randint(0, 4))]
        life = self._make_life(self._rid(rng), Kind.DETOKENIZE, ids=np.array(ids, dtype=np.int64))
        return self._submit([Client(0, life, expected=shared.decode(ids))])

    def _pick(self, rng: random.Random) -> Client | None:
        return rng.choice(list(self.oracle.open.values())) if self.oracle.open else None

    def _act_read(self, rng: random.Random) -> bool:
        """A reader takes what there is, or parks; a parked one goes on only when it was woken."""
        clients = [c for c in self.oracle.clients[-80:] if c.sink is not None and not c.left and not c.read_end]
        if not clients:
            return False
        return self._read(rng.choice(clients))

    def _read(self, client: Client) -> bool:
        sink = client.sink
        assert sink is not None
        parked = self._parked.get(client.index)
        if parked is not None:
            if parked.held:
                return False
            del self._parked[client.index]
        waiter = signal(SimPrimitives)
        if sink.park(waiter):
            self._parked[client.index] = waiter
        else:
            self.oracle.got(client, sink.take())
        return True

    def _abort(self, client: Client, source: AbortSource) -> None:
        taken = client.life.taken
        if self.pipeline.abort(client.rid, source):
            client.asked = True
            self.oracle.seen["an abort before ingress took the request"] += not taken

    def _act_leave(self, rng: random.Random) -> bool:
        client = self._pick(rng)
        if client is None or client.sink is None or client.left:
            return False
        client.left = True
        client.sink.close()
        self._abort(client, AbortSource.GUARD)
        return True

    def _act_forget(self, rng: random.Random) -> bool:
        client = self._pick(rng)
        if client is None or client.sink is None or client.left:
            return False
        client.left = client.asked = True
        self.pipeline.abandon(client.rid)
        return True

    def _act_abort(self, rng: random.Random) -> bool:
        client = self._pick(rng)
        if client is None:
            return False
        self._abort(client, AbortSource.API)
        return True

    def _act_abort_named(self, rng: random.Random) -> bool:
        name = rng.choice(self._names[-12:]) if self._names else ""
        named = [client for client in self.oracle.open.values() if client.shown == name]
        rids = self.pipeline.live.named(name)
        if sorted(rids) != sorted(client.rid for client in named):
            raise Broken(4, f"{name!r} names {rids}, and live are {named}")
        self.oracle.seen["one client rid names two live requests"] += len(rids) > 1
        for client in named:
            self._abort(client, AbortSource.API)
        return bool(rids)

    def _act_abort_all(self, rng: random.Random) -> bool:
        for client in list(self.oracle.open.values()):
            self._abort(client, AbortSource.API)
        return True

    # -- actions of everybody else -----------------------------------------------------------------------------------------------

    def _act_drive(self, rng: random.Random) -> bool:
        drivers = [driver for driver in self.drivers if driver.enabled()]
        return bool(drivers) and rng.choice(drivers).run(rng.randrange(8))

    def _act_scheduler(self, rng: random.Random) -> bool:
        scheduler = self.scheduler
        if not scheduler.enabled(self.now):
            return False
        if rng.randrange(100) < self.options.stall:
            scheduler.stalled_until = self.now + rng.randint(10, 150)
            return True
        if not scheduler.step(rng) and scheduler.idle():
            scheduler.park()
        return True

    def _act_die(self, rng: random.Random) -> bool:
        if self.scheduler.dead:
            return False
        self.oracle.seen["the scheduler dies with live requests"] += bool(self.oracle.open)
        self.scheduler.die()
        self.oracle.gone = True
        return True

    def _act_stage_dies(self, rng: random.Random) -> bool:
        """A driver ends by a fault, as `TokenizerManager` handles it."""
        if self.stopped or self.oracle.died or self._closing is not None:
            return False
        driver = rng.choice(self.drivers)
        driver.ended = self.oracle.died = True
        self.oracle.seen["a stage dies with live requests"] += bool(self.oracle.open)
        error = dead_stage(driver.name)
        self._life(LifecycleEvent.FAULT)
        self.pipeline.live.close_admission(ShuttingDownError(error.message))
        self.pipeline.close_channels()
        self.pipeline.fail_everything(error)
        for other in self.drivers:
            other.stopping = True
        return True

    def _act_shutdown(self, rng: random.Random) -> bool:
        """The next step of a shutdown: the script that the manager follows, with virtual waits."""
        if self._closing is None:
            running = LifecycleState(self._state) is LifecycleState.RUNNING
            self._life(LifecycleEvent.DRAIN)
            self.oracle.seen["a shutdown with live requests"] += bool(self.oracle.open)
            refusal = ShuttingDownError("the manager is shutting down")
            self._closing = Closing(
                self.pipeline, refusal, drain=self.options.drain if running else None, settle=400.0, join=400.0
            )
        elif self.stopped or not self._waited():
            return False
        live = {rid for rid in self.oracle.open if rid not in self.pipeline.live._asked}
        self._wait = next(self._closing, None)
        for rid in live:  # those that the deadline aborted just now
            if rid in self.pipeline.live._asked or rid not in self.pipeline.live:
                self.oracle.open[rid].asked = True
                self.oracle.seen["a drain deadline passes"] += self.options.drain > 0
        if self._wait is None:
            self.stopped = True
            self._life(LifecycleEvent.JOINED)
        else:
            self._deadline = self.now + int(self._wait.timeout)
            if self._wait.until is Until.STOPPED:
                for driver in self.drivers:
                    driver.stopping = True
        return True

    def _waited(self) -> bool:
        """Whether the shutdown's present wait is over."""
        assert self._wait is not None
        until, live = self._wait.until, self.pipeline.live
        if until is Until.EMPTY:
            done = not live._lives
        elif until is Until.SETTLED:
            done = not live._owed
        elif until is Until.STOPPED:
            if all(driver.ended for driver in self.drivers):
                self.oracle.stopped = True
                return True
            if self.now >= self._deadline + SETTLING:
                raise Broken(10, f"these do not stop: {[d.name for d in self.drivers if not d.ended]}")
            return False
        else:
            self._life(LifecycleEvent.DRAINED)
            done = True
        return done or self.now >= self._deadline

    def act(self, action: Action) -> bool:
        """One action; False where it was not enabled. Raises `Broken`."""
        name, number = action
        self.now += 1
        self.oracle.tick = self.now
        done: bool = getattr(self, f"_act_{name}")(random.Random(number))
        return done
