"""One execution of a scenario: real threads that hand one baton round, so that exactly one runs and a decider says which.

Owns: the threads, virtual time, and the state by which a search knows where it has been. Rules it keeps:

* One baton. A thread runs from one *point* to the next; at a point it asks the decider who goes on, in its own thread, and hands over
  only if that is another one. There is no sleep and no clock anywhere.
* Threads are started one by one up to their first point before anything is decided: that far they touch nothing shared.
* Time is virtual. A parked thread's timeout may fire at any moment, because every other thread may be arbitrarily slow, but in the order
  of the deadlines.
* A call counts as made when its thread is let go on for the first time in it, and as returned when its function returns. Both are the
  tightest choice that the schedule allows, so every order that real threads could show is demanded of the history.
* When an execution is cut off (a state seen before, a failure), every thread that is still inside is resumed once with `Unwind`, while
  primitives do nothing and guards are off. Threads are kept for the next execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from .actors import VERBS, Actor, Choice, Crew, Failure, Op, Unwind
from .guard import GUARDS, Guard, canon, guard_class
from .linear import Called, Raised, Tracker
from .primitives import Condition, Lock, Primitives, ScenarioError

T = TypeVar("T")


STOP = -1
"""A decider's answer: cut this execution off."""

Decider = Callable[["World", Sequence[Choice], bool], int]


class World:
    """What a scenario's `build` is given: `primitives`, `guard`, `watch`. The rest belongs to searches."""

    name = "the scenario"  # as the owner of a lock that was taken while the scenario was built

    def __init__(
        self,
        *,
        spurious: int = 0,
        notify: str = "any",
        points: str = "critical",
        max_steps: int = 5000,
    ) -> None:
        if notify not in ("any", "fifo") or points not in ("critical", "every"):
            raise ValueError('notify is "any" or "fifo", points is "critical" or "every"')
        self.primitives = Primitives(self)
        self.points = points
        self.notify_order = notify
        self.max_steps = max_steps
        self.spurious_left = spurious
        self.now = 0.0
        self.timeouts_left: int | None = None  # None: as many as come
        self.current: Actor | None = None
        self.over = False
        self.failure: Failure | None = None
        self.actors: list[Actor] = []
        self.steps: list[tuple[Actor, str, Any, int]] = []
        self.guards: list[Guard] = []
        self.tracker: Tracker | None = None
        self.results_matter = True
        self.interactive = False
        self.raises: tuple[type[BaseException], ...] = ()
        self.subject: Any = None
        self.asleep: Callable[[World], str | None] = lambda world: "sleeps and nobody will wake it"
        self.stuck = False
        self.cut = False
        self._watched: list[Callable[[], Any]] = []
        self._primitives_made = 0
        self._locks: list[Lock] = []
        self._returned = 0
        self._crew: Crew | None = None
        self._decider: Decider = lambda world, choices, prunable: 0
        self._warming = False

    # -- for `build` ------------------------------------------------------------------------------------------------------

    def guard(self, target: T, lock: Any, constants: Iterable[str] = ()) -> T:
        """Watch `target`: from now on its attributes may be touched only by the thread that holds `lock` (a Lock, RLock or Condition
        of this world). `constants` may be read by anybody and written by nobody. Returns `target`.

        Everything that the scenario's threads share has to be guarded (or its state given by `watch`), or the search must run with
        `prune=False`: states are compared by what the guards see.
        """
        if isinstance(lock, Condition):
            lock = lock.lock
        if not isinstance(lock, Lock):
            raise ScenarioError(
                f"the guard needs a lock of this world, not {lock!r}: pass world.primitives to the code under test"
            )
        guard = Guard(self, target, lock, constants, len(self.guards))
        self.guards.append(guard)
        GUARDS[id(target)] = guard
        changed: Any = target
        changed.__class__ = guard_class(type(target))
        return target

    def watch(self, state: Callable[[], Any]) -> None:
        """Count `state()` as part of the search's state: for what cannot be guarded, such as a list that threads append to."""
        self._watched.append(state)

    def loop(self, *state: Any) -> None:
        """Said by a call at the head of a loop: all that it goes on with is `state`, whatever it has read before.

        Without this a call that loops knows all that it ever read, and no two rounds are equal states. If it keeps more than it
        says, the search may leave out what it should look at.
        """
        me = self.current
        if me is not None:
            me.known[:] = [("loop", canon(state))]
            me.aliases.clear()
            me.primitives_made = 0

    def number_primitive(self) -> tuple[int, int, int]:
        """A name for a new primitive that is the same in every schedule: maker, its operation, and how many it made there."""
        me = self.current
        if me is None:
            self._primitives_made += 1
            return (-1, 0, self._primitives_made)
        me.primitives_made += 1
        return (me.index, me.at, me.primitives_made)

    # -- running ----------------------------------------------------------------------------------------------------------

    def man(self, crew: Crew, threads: dict[str, Sequence[Op]]) -> None:
        """Give the world its threads, and run each to its first point."""
        self._crew = crew
        bit = 0
        for index, (name, ops) in enumerate(threads.items()):
            self.actors.append(Actor(index, name, list(ops), crew.batons[index], bit))
            bit += len(ops)
        crew.task = self._main
        self._warming = True
        for actor in self.actors:
            if not self.over:
                self._resume(actor)
        self._warming = False

    def run(self, decider: Decider) -> None:
        """Go on until nothing can move, or the decider stops it, or a failure."""
        self._decider = decider
        if self.over:
            return
        actor = self._decide(None)
        if actor is not None:
            self._resume(actor)

    def close(self) -> None:
        """End every thread that is still inside, and take the guards off."""
        self.over = True
        for actor in self.actors:
            while actor.inside:
                self._resume(actor)
        for guard in self.guards:
            GUARDS.pop(id(guard.target), None)
        self.current = None

    def _resume(self, actor: Actor) -> None:
        assert self._crew is not None
        self.current = actor
        actor.baton.release()
        self._crew.control.acquire()
        self.current = None

    def _main(self, index: int) -> None:
        me = self.actors[index]
        me.inside = True
        try:
            self._perform(me)
        except Unwind:
            pass
        except BaseException as fault:
            if not self.over:
                self._note(Failure("raised", f"{me.name}: {type(fault).__name__}: {fault}", (), ()))
        me.inside = False
        me.pending = ("done", None)
        following = None
        if not self.over and not self._warming:
            following = self._decide(me)
        self._hand(following)

    def _hand(self, following: Actor | None) -> None:
        assert self._crew is not None
        if following is None:
            self._crew.control.release()
        else:
            following.baton.release()

    def _perform(self, me: Actor) -> None:
        while True:
            if me.at >= len(me.ops):
                if not self.interactive:
                    return
                self._point(me, ("idle", None))
                continue
            task = me.ops[me.at]
            if task.follows:
                self._point(me, ("after", task.follows))
                result: Any = None
            else:
                result = self._call(me, task)
            if not me.stamped:
                self._made(me)
            key = canon(result)
            if not task.follows:
                self._returned |= 1 << (me.first_bit + me.at)
            me.results.append(result)
            me.result_keys.append(key)
            if self.tracker is not None and not task.follows and not self.tracker.returned(me.index, key):
                self.fail("order", f"no order of the calls explains that {me.name}: {task.name} returned {result!r}")
            me.at += 1
            me.stamped = False
            me.known.clear()
            me.aliases.clear()
            me.primitives_made = 0

    def _made(self, me: Actor) -> None:
        """The thread's call counts as made from now on."""
        me.stamped = True
        me.before.append(self._returned)
        task = me.ops[me.at]
        if self.tracker is not None and not task.follows:
            self.tracker.call(me.index, task.name, task.args)

    def _call(self, me: Actor, task: Op) -> Any:
        assert task.function is not None
        try:
            return task.function(self.subject, *task.args)
        except self.raises as fault:
            return Raised(type(fault).__name__)
        except Exception as fault:
            if self.over:
                raise Unwind from None
            kind = "scenario" if isinstance(fault, ScenarioError) else "raised"
            self.fail(kind, f"{me.name}: {task.name} raised {type(fault).__name__}: {fault}")

    # -- points -----------------------------------------------------------------------------------------------------------

    def _point(self, me: Actor, pending: tuple[str, Any]) -> None:
        me.pending = pending
        following = None if self._warming else self._decide(me)
        if following is not me:
            self._hand(following)
            me.baton.acquire()
            if self.over:
                raise Unwind
        self._granted(me)

    def _granted(self, me: Actor) -> None:
        kind, target = me.pending
        if kind in ("lock", "try"):
            target.owner, target.depth = me, 1
        if not me.stamped and me.at < len(me.ops):
            self._made(me)
        me.step_touched.clear()
        for value in me.aliases.values():
            me.known.append(canon(value))
        me.pending = ("running", None)

    def acquire(self, me: Actor, lock: Lock) -> None:
        if lock not in self._locks:
            self._locks.append(lock)
        self._point(me, ("lock", lock))
        if self.points == "every":
            self.pause(me)

    def acquire_within(self, me: Actor, lock: Lock, timeout: float) -> bool:
        """The same, unless `timeout` seconds of virtual time pass first."""
        if lock not in self._locks:
            self._locks.append(lock)
        me.deadline = self.now + timeout
        me.timed_out = False
        self._point(me, ("try", lock))
        me.deadline = None
        taken, me.timed_out = not me.timed_out, False
        me.known.append(("taken", taken))
        if self.points == "every":
            self.pause(me)
        return taken

    def pause(self, me: Actor) -> None:
        """A point at which the thread can always go on."""
        self._point(me, ("go", None))

    def park(self, me: Actor, condition: Condition, timeout: float | None) -> bool:
        lock = condition.lock
        depth, lock.owner, lock.depth = lock.depth, None, 0
        me.deadline = None if timeout is None else self.now + max(0.0, timeout)
        me.timed_out = False
        condition.waiters.append(me)
        self._point(me, ("parked", condition))
        lock.depth = depth
        if me in condition.waiters:  # its time ran out, and no notification came while it took the lock again
            condition.waiters.remove(me)
        me.deadline = None
        woken, me.timed_out = not me.timed_out, False
        me.known.append(("woken", woken))
        return woken

    def _back(self, actor: Actor) -> None:
        """A parked thread wants its lock again; one whose time for a lock has run out goes on without it."""
        kind, target = actor.pending
        actor.pending = ("go", None) if kind == "try" else ("lock", target.lock)

    def notify(self, condition: Condition, count: int) -> None:
        waiters = condition.waiters
        while waiters and count > 0:
            if count >= len(waiters) or self.notify_order == "fifo":
                pick = 0
            else:
                pick = self._decider(self, [Choice("notify", actor) for actor in waiters], False)
                if pick == STOP:
                    self.leave()
            actor = waiters.pop(pick)
            if actor.pending[0] == "parked":
                self._back(actor)
            count -= 1
            if self.current is not None:
                self.steps.append((self.current, "notify", actor.name, self.current.at))

    def leave(self) -> NoReturn:
        """Out of an execution that is over."""
        self.over = True
        raise Unwind

    def _choices(self, last: Actor | None) -> list[Choice]:
        going: list[Choice] = []
        sleeping: list[Actor] = []
        timed: list[Actor] = []
        for actor in self.actors:
            kind, target = actor.pending
            if kind in ("lock", "try"):
                free = target.owner is None
                if kind == "try" and not free:
                    timed.append(actor)
            elif kind == "after":
                free = all(other.pending[0] == "done" for other in self.actors if other.name in target)
            elif kind == "parked":
                sleeping.append(actor)
                free = False
            else:
                free = kind == "go" or (kind == "idle" and actor.at < len(actor.ops))
            if free:
                if actor is last:
                    going.insert(0, Choice("go", actor))
                else:
                    going.append(Choice("go", actor))
        timed += sleeping
        first = min((actor.deadline for actor in timed if actor.deadline is not None), default=None)
        if first is not None and self.timeouts_left != 0:
            going += [Choice("time", actor) for actor in timed if actor.deadline == first]
        if sleeping and self.spurious_left > 0:
            if not going:
                going.append(Choice("end", None))
            going += [Choice("wake", actor) for actor in sleeping]
        return going

    def _decide(self, last: Actor | None) -> Actor | None:
        """Who goes on; None when this execution is at its end."""
        try:
            return self._pick(last)
        except Exception as fault:  # of the decider or of a model: it must not end a thread that holds the baton
            self._note(Failure("scenario", f"{type(fault).__name__}: {fault}", (), ()))
            return None

    def _pick(self, last: Actor | None) -> Actor | None:
        while not self.over:
            choices = self._choices(last)
            if len(self.steps) > self.max_steps:
                self.cut = True
                self._note(Failure("endless", f"no end after {self.max_steps} steps", (), ()))
                return None
            if not choices or choices[0].kind == "end":
                self._judge_sleepers()
                if self.over or not choices:
                    return None
            pick = 0 if len(choices) == 1 else self._decider(self, choices, True)
            if pick == STOP:
                self.over = True
                return None
            kind, actor = choices[pick]
            if actor is None:
                return None
            if kind == "go":
                self.steps.append((actor, *actor.pending, actor.at))
                self.current = actor
                return actor
            if kind == "time":
                assert actor.deadline is not None
                self.now = max(self.now, actor.deadline)
                actor.timed_out = True
                if self.timeouts_left is not None:
                    self.timeouts_left -= 1
                self.steps.append((actor, kind, None, actor.at))
            else:
                self.spurious_left -= 1
                actor.pending[1].waiters.remove(actor)
                self.steps.append((actor, kind, None, actor.at))
            self._back(actor)
        return None

    def _judge_sleepers(self) -> None:
        unfinished = [actor for actor in self.actors if actor.pending[0] not in ("done", "idle")]
        if not unfinished:
            return
        # who waits for a lock that it took itself waits for a signal
        stuck = [
            actor for actor in unfinished if actor.pending[0] == "lock" and actor.pending[1].owner not in (actor, self)
        ]
        if stuck:
            what = "; ".join(f"{actor.name} {actor.doing()} (held by {actor.pending[1].owner.name})" for actor in stuck)
            self._note(Failure("deadlock", what, (), ()))
            return
        wrong = self.asleep(self)
        if wrong is None:
            self.stuck = True
            return
        names = ", ".join(f"{actor.name} ({actor.doing()})" for actor in unfinished)
        self._note(Failure("asleep", f"{names}: {wrong}", (), ()))

    # -- results ----------------------------------------------------------------------------------------------------------

    def fail(self, kind: str, message: str) -> NoReturn:
        """Record a failure from inside a controlled thread and leave it."""
        self._note(Failure(kind, message, (), ()))
        raise Unwind

    def _note(self, failure: Failure) -> None:
        if self.failure is None:
            steps = tuple(
                f"{actor.name} {VERBS.get(kind, kind).format(target)}"
                + (f" in {actor.ops[at].name}" if at < len(actor.ops) else "")
                for actor, kind, target, at in self.steps
            )
            self.failure = failure._replace(steps=steps, history=tuple(self.history()))
        self.over = True

    def note(self, kind: str, message: str) -> None:
        """Record a failure found at the end of an execution."""
        self._note(Failure(kind, message, (), ()))

    def history(self) -> list[Called]:
        """Every call that was made, with what it followed. Masks are renumbered to the list's indices."""
        calls: list[tuple[int, Called]] = []
        for actor in self.actors:
            for at, task in enumerate(actor.ops[: actor.at + 1]):
                returned = at < len(actor.results)
                if task.follows or at >= len(actor.before):
                    continue
                result = actor.results[at] if returned else None
                called = Called(actor.name, task.name, task.args, result, actor.before[at], returned)
                calls.append((actor.first_bit + at, called))
        place = {bit: index for index, (bit, _) in enumerate(calls)}
        renumbered = []
        for _, called in calls:
            before = sum(1 << place[bit] for bit in place if called.before >> bit & 1)
            renumbered.append(called._replace(before=before))
        return renumbered

    def results(self) -> dict[str, tuple[Any, ...]]:
        """What each thread's calls returned, in order."""
        return {
            actor.name: tuple(
                result for result, task in zip(actor.results, actor.ops, strict=False) if not task.follows
            )
            for actor in self.actors
        }

    def key(self) -> tuple[Any, ...]:
        """Everything that decides how this execution can go on."""
        order: Any = ()
        if self.notify_order == "fifo":
            order = tuple(
                tuple(waiter.index for waiter in actor.pending[1].waiters)
                for actor in self.actors
                if actor.pending[0] == "parked"
            )
        return (
            tuple([guard.snapshot() for guard in self.guards]),
            frozenset([(lock.number, lock.owner.name) for lock in self._locks if lock.owner is not None]),
            tuple([actor.key(self.now) for actor in self.actors]),
            tuple([tuple(actor.result_keys) for actor in self.actors]) if self.results_matter else (),
            None if self.tracker is None else self.tracker.key(),
            tuple([canon(state()) for state in self._watched]),
            self.spurious_left,
            order,
        )
