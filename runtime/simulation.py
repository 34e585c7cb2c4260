"""The deterministic driver: the shipped pipeline on one thread, in virtual time, with every choice drawn from a seed.

Owns: a run. It is a list of actions, each a name and a number from which the action draws what it needs; so a run can be replayed,
cut short and shrunk by leaving actions out. Rules it keeps:

* The stages, channels, rings, sinks, the table of live requests and the shutdown are the shipped ones; only threads are replaced.
* After every action the properties are checked (`sim_oracle`), at the end all of them, and the run's own trace is validated by
  code that shares nothing with the stages.
* Chaos first, then a fair end: clients read, the scheduler finishes what it has, nothing may be left over, and a shutdown ends.
* A failure prints the one command that replays it, and a short script of the same failure.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec

from ..fsm import validate
from .closing import Until
from .pipeline import _FRAMES, Pipeline
from .sim_oracle import Broken
from .sim_parts import SimOptions
from .sim_world import SETTLING, Action, World

_RARE = ("die", "stage_dies", "shutdown", "abort_all")  # once in a run, at a step drawn beforehand


class Report(msgspec.Struct, frozen=True):
    """What one run did: its seed, steps, requests, what happened how often, and the failure (None: all properties held)."""

    seed: int
    steps: int
    requests: int
    seen: dict[str, int]
    failure: str | None
    script: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that replays the run."""
        return f"headrace simulate --seed {self.seed} --steps {self.steps}"


class Simulation(World):
    """One run. `Simulation(seed).run(steps)` raises nothing and returns a `Report`.

    `options` default to those that the seed draws. `pipeline` makes the pipeline (default: the shipped one), so that a test can
    give a broken one. After `run`, `actions` holds what was done.
    """

    def __init__(
        self, seed: int, options: SimOptions | None = None, *, pipeline: Callable[..., Pipeline] = Pipeline
    ) -> None:
        super().__init__(seed, options, pipeline=pipeline)
        self.actions: list[Action] = []

    # -- a run -----------------------------------------------------------------------------------------------------------------------

    def do(self, action: Action) -> bool:
        """One action and the checks after it; False where it was not enabled. Raises `Broken`."""
        done = self.act(action)
        self.oracle.look(self.pipeline.live._lives)
        self._check()
        return done

    def _chaos(self, steps: int) -> Iterator[Action]:
        options, rng = self.options, self._rng
        names = [name[5:] for name in dir(self) if name.startswith("_act_") and name[5:] not in _RARE]
        totals = list(accumulate(getattr(options, name) for name in names))
        planned = {rng.randrange(steps): name for name in _RARE if getattr(options, name)}
        after = 0
        for step in range(steps):
            if step in planned:
                yield planned[step], rng.getrandbits(32)
            elif self._closing is not None and rng.random() < 0.2:
                yield "shutdown", 0
            else:
                yield names[bisect(totals, rng.random() * totals[-1])], rng.getrandbits(32)
            after += self.stopped
            if after > 40:
                return

    def run(self, steps: int = 1500, *, actions: Sequence[Action] | None = None) -> Report:
        """Chaos for `steps` actions (or exactly `actions`), then the fair end. Never raises; see the report."""
        failure: str | None = None
        try:
            for action in self._chaos(steps) if actions is None else actions:
                self.actions.append(action)
                self.do(action)
            self._settle()
        except Broken as broken:
            failure = str(broken)
        except Exception as fault:  # whatever a stage raises on one thread is a finding, as it would kill a driver
            failure = f"{type(fault).__name__}: {fault}"
        return Report(self.seed, steps, len(self.oracle.clients), dict(self.oracle.seen), failure)

    def _settle(self) -> None:
        """The fair end: everybody does what he can; then nothing may be left; then a shutdown, which must end."""
        rng = random.Random(self.seed)
        self.scheduler.stalled_until = -1
        self._until_quiet(rng)
        if not self.stopped:
            if self._closing is None:
                self._expect_quiet()
                self._start_or_go_on()
            while not self.stopped:
                self._until_quiet(rng)
                if not self.stopped:
                    self.now = max(self.now, self._deadline)  # nobody can move: time passes
                    if not self.do(("shutdown", 0)):
                        raise Broken(10, f"a shutdown that waits until {self._wait} does not end")
        self._until_quiet(rng)
        self._finish()

    def _start_or_go_on(self) -> None:
        self.do(("shutdown", 0))

    def _until_quiet(self, rng: random.Random) -> None:
        for _ in range(SETTLING):
            self.now += 1
            self.oracle.tick = self.now
            moved = sum(driver.run(0) for driver in self.drivers if driver.enabled()) > 0
            self.oracle.look(self.pipeline.live._lives)
            for client in self.oracle.clients[-200:]:
                if client.sink is not None and not client.left and not client.read_end:
                    moved |= self._read(client)
            self._check()
            scheduler = self.scheduler
            if scheduler.enabled(self.now):
                if scheduler.step(rng, honest=True):
                    moved = True
                elif scheduler.idle() and not scheduler.dead:
                    scheduler.park()
            if self._closing is not None and not self.stopped and self._waited_quietly():
                moved |= self.do(("shutdown", 0))
            if not moved and not any(driver.enabled() for driver in self.drivers):
                self._expect_sleepers()
                return
        raise Broken(9, "the end is not reached: something goes round for ever")

    def _waited_quietly(self) -> bool:
        assert self._wait is not None
        return self._wait.until is not Until.DRAINED and self._wait_is_met()

    def _wait_is_met(self) -> bool:
        assert self._wait is not None
        live = self.pipeline.live
        return {
            Until.EMPTY: not live._lives,
            Until.SETTLED: not live._owed,
            Until.STOPPED: all(driver.ended for driver in self.drivers),
            Until.DRAINED: True,
        }[self._wait.until]

    # -- checks ----------------------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """What must hold between any two steps."""
        pipeline, options, lives = self.pipeline, self.options, self.pipeline.live._lives
        if len(lives) > options.max_live:
            raise Broken(4, f"{len(lives)} requests are live, and {options.max_live} is the limit")
        if (
            len(pipeline.ring_in._core._items) > options.ring_in
            or len(pipeline.ring_out._core._items) > options.ring_out
        ):
            raise Broken(8, "a ring holds more than its capacity")
        if any(len(channel._items) > _FRAMES for channel in pipeline.frames):
            raise Broken(8, "a shard's lane holds more than its capacity")
        if self.oracle.died:
            return  # what a dead stage held is nobody's
        entries = pipeline.ingress.entries
        known = len(entries)
        for rid in entries:
            if rid not in lives:
                raise Broken(4, f"{rid!r} is in ingress and not in the table")
        for shard in pipeline.shards:
            known += len(shard._rows)
            for rid in shard._rows:
                if rid not in lives or rid in entries:
                    raise Broken(
                        4, f"{rid!r} is in a shard and {'in ingress' if rid in entries else 'not in the table'}"
                    )
        for rid in pipeline.ingress.owed:
            if rid not in pipeline.live._owed:
                raise Broken(11, f"the abort of {rid!r} is owed and not in the table of what is owed")
        if known < len(lives):
            elsewhere = {life.rid for group in pipeline.inbox._groups for life in group.members}
            for lane in pipeline.registrations:
                elsewhere.update(message.life.rid for message in lane._items if hasattr(message, "life"))
            for rid in lives:
                if (
                    rid not in entries
                    and rid not in elsewhere
                    and not any(rid in shard._rows for shard in pipeline.shards)
                ):
                    raise Broken(9, f"{rid!r} is live and nobody has it")

    def _expect_sleepers(self) -> None:
        """Every driver sleeps, so none may have an enabled move: nobody would ever make it."""
        for driver in self.drivers:
            if not driver.ended and any(move() for move in driver.moves):
                raise Broken(9, f"{driver.name} sleeps, and has an enabled move: a wake-up was lost")

    def _expect_quiet(self) -> None:
        """Nobody can move, the scheduler and all clients did what they could: nothing may be left anywhere."""
        oracle, pipeline = self.oracle, self.pipeline
        if oracle.died:
            return
        if oracle.open:
            raise Broken(9, f"these never end: {list(oracle.open.values())}")
        if pipeline.live._owed:
            raise Broken(11, f"aborts are owed, and nobody sends them: {pipeline.live._owed}")
        oracle.quiet()
        self._expect_empty()

    def _expect_empty(self) -> None:
        pipeline = self.pipeline
        left = {
            "live": pipeline.live._lives,
            "names": pipeline.live._shown,
            "asked": pipeline.live._asked,
            "bytes": pipeline.live._nbytes,
            "bytes by rid": pipeline.live._bytes,
            "ingress": pipeline.ingress.entries,
            "owed": pipeline.ingress.owed,
            "inbox": pipeline.inbox._groups,
            "places in the inbox": len(pipeline.inbox),
            **{f"shard {at}": shard._rows for at, shard in enumerate(pipeline.shards)},
            **{f"lane {at}": channel._items for at, channel in enumerate(pipeline.registrations)},
            **{f"jobs {at}": channel._items for at, channel in enumerate(pipeline.jobs)},
        }
        for name, what in left.items():
            if what:
                raise Broken(4, f"nothing is live, and {name} holds {what!r:.200}")
        for at, shard in enumerate(pipeline.shards):
            if sorted(shard._free) != list(range(shard._capacity)):
                raise Broken(4, f"shard {at} has lost rows")

    def _finish(self) -> None:
        pipeline, oracle = self.pipeline, self.oracle
        parked = self.scheduler.parked
        if parked is not None and not parked.woken:
            raise Broken(10, "the scheduler is parked for ever")
        for index, waiter in self._parked.items():
            if waiter.held:
                raise Broken(10, f"the reader of client {index} is parked for ever")
        self.scheduler.read_ring(pipeline.ring_in_consumer.drain(1 << 20))
        if not oracle.died:
            self._expect_empty()
        undeliverable = pipeline.ingress_counts["aborts_undeliverable"]
        oracle.finish(undeliverable)
        oracle.seen["an abort is undeliverable"] += undeliverable
        oracle.seen["an abort overtakes a tokenisation"] += pipeline.ingress_counts["late_tokenised"]
        oracle.seen["the ring is full"] += pipeline.ingress_counts["refused_ring_full"]
        oracle.seen["the tokenizer's queue is full"] += pipeline.ingress_counts["refused_pool_full"]
        violations = validate(self.trace, ended=not oracle.died)
        if violations:
            raise Broken(3, f"the trace does not conform: {violations[0]}")
