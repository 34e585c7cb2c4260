"""Searches over the schedules of a scenario: all of them, a sample, or one again.

Owns: scenarios, the depth-first search, PCT sampling, replay, and the reports. Rules it keeps:

* A search that says `complete` has been through every schedule of the scenario within its bounds (wake-ups for no reason, steps), up
  to states that are equal. Anything that cut it short, a failure included, makes it say `complete=false`.
* Every failure carries a string that runs its very schedule again.
* The scenario has to be deterministic apart from its schedule; a search that meets the same prefix with other choices says so.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .actors import Choice, Crew, Failure, Op
from .guard import canon
from .linear import Model, Tracker, explain
from .primitives import ScenarioError
from .world import STOP, Decider, World

MOST_THREADS = 4
"""Up to this many threads `search` goes through all schedules, above it samples."""


def op(what: str | Callable[..., Any], *args: Any, name: str | None = None) -> Op:
    """One call: the subject's method `what`, or `what(subject, *args)`. `name` is what the model and failures call it."""
    if isinstance(what, str):
        method = what

        def function(subject: Any, *args: Any) -> Any:
            return getattr(subject, method)(*args)

        return Op(name or what, args, function)
    return Op(name or what.__name__.lstrip("_"), args, what)


def after(*threads: str) -> Op:
    """Go on when all of `threads` have ended: "close only after all puts"."""
    return Op("after", (), None, threads)


@dataclass(frozen=True)
class Scenario:
    """Some threads, each a list of calls on one subject.

    - `name`: for reports and replay strings;
    - `build(world)`: makes the subject on `world.primitives`, guards what is shared, returns it; called once for each execution;
    - `threads`: thread name -> its calls, made with `op` and `after`;
    - `model`: the specification that histories and sleepers are judged by; without one, every end with a sleeper is a failure
      unless `may_sleep` is set;
    - `raises`: exceptions that are outcomes (`Raised("TimeoutError")`), not failures;
    - `final(subject, results)`: called at the end of every execution in which all threads have ended; an AssertionError is a failure.
    """

    name: str
    build: Callable[[Any], Any]
    threads: Mapping[str, Sequence[Op]]
    model: Model | None = None
    raises: tuple[type[BaseException], ...] = ()
    final: Callable[[Any, dict[str, tuple[Any, ...]]], None] | None = None
    may_sleep: bool = False


class ScheduleFailure(AssertionError):
    """A schedule broke the scenario. `.failure` has the kind, the steps, the history and the replay string."""

    def __init__(self, scenario: str, failure: Failure) -> None:
        steps = "\n".join(f"  {index + 1:3} {step}" for index, step in enumerate(failure.steps))
        calls = f"\ncalls:\n{explain(failure.history)}" if failure.history else ""
        super().__init__(
            f"{failure.kind} in scenario {scenario!r}: {failure.message}{calls}\nschedule:\n{steps}\n"
            f"again with: replay(scenario, {failure.replay!r})"
        )
        self.failure = failure


class IncompleteSearch(AssertionError):
    """A search was cut short where completeness was asked for."""


@dataclass
class Report:
    """What a search did. `str(report)` is its one line.

    `schedules` ran to their end, `sleeping` of them with threads that sleep for good, as they may; `pruned` were cut at a state seen
    before; `states` are distinct states in which there was a choice. `outcomes` counts the results at the ends that were reached;
    for a scenario with a model and no `final` check they are a part of what is possible, because its states leave results out.
    """

    scenario: str
    mode: str
    complete: bool = False
    schedules: int = 0
    pruned: int = 0
    states: int = 0
    sleeping: int = 0
    bounds: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    seconds: float = 0.0
    failure: Failure | None = None
    outcomes: Counter[Any] = field(default_factory=Counter)

    def __str__(self) -> str:
        bounds = " ".join(f"{name}={value}" for name, value in self.bounds.items())
        verdict = "no failure" if self.failure is None else self.failure.kind
        return (
            f"{self.scenario}: {self.mode} complete={str(self.complete).lower()} schedules={self.schedules} pruned={self.pruned} "
            f"states={self.states} sleeping={self.sleeping} {bounds} seed={self.seed} seconds={self.seconds:.2f}: {verdict}"
        )

    def check(self, *, complete: bool | None = None) -> Report:
        """Raise ScheduleFailure if a schedule failed, or IncompleteSearch if the search ended early or ran nothing.

        `complete` defaults to what the mode can promise: True for all schedules, False for a sample."""
        if self.failure is not None:
            raise ScheduleFailure(self.scenario, self.failure)
        if not self.schedules or (not self.complete and (self.mode == "all" if complete is None else complete)):
            raise IncompleteSearch(str(self))
        return self


@dataclass(frozen=True)
class _Options:
    spurious: int
    notify: str
    points: str
    max_steps: int

    def world(self) -> World:
        return World(spurious=self.spurious, notify=self.notify, points=self.points, max_steps=self.max_steps)

    def text(self) -> str:
        return f"spurious={self.spurious} notify={self.notify} points={self.points} steps={self.max_steps}"

    @classmethod
    def read(cls, text: str) -> _Options:
        fields = dict(part.split("=") for part in text.split())
        return cls(int(fields["spurious"]), fields["notify"], fields["points"], int(fields["steps"]))


class _Runner:
    """Executions of one scenario, one after another."""

    def __init__(self, scenario: Scenario, options: _Options, report: Report) -> None:
        self.scenario = scenario
        self.options = options
        self.report = report
        self.crew = Crew(len(scenario.threads))

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.crew.close()

    def _asleep(self, world: World) -> str | None:
        if world.tracker is None:
            return None if self.scenario.may_sleep else "nobody will wake it"
        # A thread that waits for another thread to end sleeps with it, and is no call.
        if world.tracker.sleepers_must_wait():
            return None
        return "the specification would let it go on: a lost wake-up"

    def run(self, choose: Decider) -> tuple[World, list[int]]:
        """One execution. The picks that `choose` made come back with the world, which is closed."""
        scenario = self.scenario
        world = self.options.world()
        picks: list[int] = []

        def decide(world: World, choices: Sequence[Choice], prunable: bool) -> int:
            pick = choose(world, choices, prunable)
            if pick != STOP:
                picks.append(pick)
            return pick

        try:
            world.raises = scenario.raises
            world.tracker = None if scenario.model is None else Tracker(scenario.model)
            world.results_matter = scenario.model is None or scenario.final is not None
            world.asleep = self._asleep
            world.subject = scenario.build(world)
            world.man(self.crew, {name: list(ops) for name, ops in scenario.threads.items()})
            world.run(decide)
            self._finish(world)
        finally:
            world.close()
        if world.failure is not None:
            coded = f"{scenario.name}|{self.options.text()}|{_pack(picks)}"
            self.report.failure = world.failure._replace(replay=coded)
        return world, picks

    def _finish(self, world: World) -> None:
        report, scenario = self.report, self.scenario
        if world.failure is not None:
            report.schedules += 1
            return
        if world.over:
            report.pruned += 1
            return
        report.schedules += 1
        results = world.results()
        if world.stuck and any(actor.pending[0] != "done" for actor in world.actors):
            report.sleeping += 1
        else:
            if scenario.final is not None:
                try:
                    scenario.final(world.subject, results)
                except AssertionError as fault:
                    world.note("final", str(fault) or "the final check failed")
                    return
        report.outcomes[canon(list(results.values()))] += 1


def explore(
    scenario: Scenario,
    *,
    spurious: int = 0,
    notify: str = "any",
    points: str = "critical",
    prune: bool | None = None,
    max_schedules: int = 200_000,
    max_seconds: float | None = None,
    max_steps: int = 5000,
) -> Report:
    """Every schedule of `scenario`, depth first, by running it again for each; stops at the first failure.

    `spurious` wake-ups for no reason per execution (only into waits); `notify` "any" waiter or "fifo"; `points` "critical" or
    "every"; `prune` cuts executions that reach a state seen before (default: if the scenario guards anything). `max_seconds` is
    wall time, and like `max_schedules` it makes the report say complete=false.
    """
    options = _Options(spurious, notify, points, max_steps)
    report = Report(scenario.name, "all")
    began = time.monotonic()
    path: list[list[int]] = []  # [pick, number of choices] of each decision of the current execution
    seen: set[Any] = set()
    depth = 0

    def choose(world: World, choices: Sequence[Choice], prunable: bool) -> int:
        nonlocal depth
        depth += 1
        if depth <= len(path):
            pick, width = path[depth - 1]
            if width != len(choices):
                raise ScenarioError(
                    f"scenario {scenario.name!r} is not deterministic: decision {depth} had {width} choices, now {len(choices)}"
                )
            return pick
        if prunable and (prune if prune is not None else bool(world.guards)):
            key = world.key()
            if key in seen:
                return STOP
            seen.add(key)
        path.append([0, len(choices)])
        return 0

    with _Runner(scenario, options, report) as runner:
        while True:
            depth = 0
            runner.run(choose)
            if report.failure is None and depth < len(path):
                message = f"not deterministic: {depth} decisions where there were {len(path)}"
                report.failure = Failure("scenario", message, (), ())
            if report.failure is not None:
                break
            while path and path[-1][0] + 1 >= path[-1][1]:
                path.pop()
            if not path:
                report.complete = True
                break
            path[-1][0] += 1
            if report.schedules >= max_schedules or (
                max_seconds is not None and time.monotonic() - began > max_seconds
            ):
                break
    report.states = len(seen)
    report.bounds = {"spurious": spurious, "notify": notify, "points": points, "max_schedules": max_schedules}
    report.seconds = time.monotonic() - began
    return report


class _Pct:
    """One execution's priorities: the highest that can move does, and falls to the bottom at a few places drawn beforehand."""

    def __init__(self, rng: random.Random, depth: int, length: int) -> None:
        self._rng = rng
        self._ranks: dict[tuple[str, int], float] = {}
        self._drops = {rng.randrange(length) for _ in range(depth - 1)}
        self.at = 0

    def _rank(self, choice: Choice) -> float:
        return self._ranks.setdefault(_who(choice), self._rng.random())

    def __call__(self, world: World, choices: Sequence[Choice], prunable: bool) -> int:
        if not prunable:
            return self._rng.randrange(len(choices))
        ranks = [self._rank(choice) for choice in choices]
        best = ranks.index(max(ranks))
        if self.at in self._drops:
            ranks[best] = self._ranks[_who(choices[best])] = -self._rng.random()
            best = ranks.index(max(ranks))
        self.at += 1
        return best


def _who(choice: Choice) -> tuple[str, int]:
    return (choice.kind, -1 if choice.actor is None else choice.actor.index)


def sample(
    scenario: Scenario,
    *,
    schedules: int = 1000,
    depth: int = 3,
    seed: int = 0,
    spurious: int = 1,
    notify: str = "any",
    points: str = "critical",
    max_seconds: float | None = None,
    max_steps: int = 5000,
) -> Report:
    """`schedules` schedules by PCT: random priorities for the threads, and `depth` - 1 random places where the leader falls behind.

    A fault that needs `depth` ordering constraints among n threads and k steps is hit by one sample with a chance of at least
    1 / (n * k ** (depth - 1)). Never complete.
    """
    options = _Options(spurious, notify, points, max_steps)
    report = Report(scenario.name, "sample", seed=seed)
    began = time.monotonic()
    rng = random.Random(seed)
    length = 10
    with _Runner(scenario, options, report) as runner:
        for _ in range(schedules):
            leader = _Pct(rng, depth, length)
            runner.run(leader)
            length = max(length, leader.at)
            if report.failure is not None or (max_seconds is not None and time.monotonic() - began > max_seconds):
                break
    report.bounds = {"depth": depth, "spurious": spurious, "notify": notify, "points": points, "schedules": schedules}
    report.seconds = time.monotonic() - began
    return report


def search(scenario: Scenario, *, seed: int = 0, spurious: int = 0, schedules: int = 1000) -> Report:
    """`explore` up to four threads, `sample` above."""
    if len(scenario.threads) <= MOST_THREADS:
        return explore(scenario, spurious=spurious)
    return sample(scenario, seed=seed, spurious=spurious, schedules=schedules)


def replay(scenario: Scenario, text: str) -> Report:
    """The one schedule that a failure's replay string names, on the scenario as it is now."""
    name, options, packed = text.rsplit("|", 2)
    if name != scenario.name:
        raise ScenarioError(f"the string is of scenario {name!r}, not of {scenario.name!r}")
    picks = _unpack(packed)
    report = Report(scenario.name, "replay")
    began = time.monotonic()
    at = 0

    def choose(world: World, choices: Sequence[Choice], prunable: bool) -> int:
        nonlocal at
        pick = picks[at] if at < len(picks) else 0
        at += 1
        if pick >= len(choices):
            raise ScenarioError(
                f"decision {at} of the string picks {pick}, and the scenario now has {len(choices)} choices there"
            )
        return pick

    with _Runner(scenario, _Options.read(options), report) as runner:
        runner.run(choose)
    report.seconds = time.monotonic() - began
    return report


def _pack(picks: Sequence[int]) -> str:
    """Picks as text; runs are counted, trailing zeros are left out."""
    packed: list[str] = []
    kept = list(picks)
    while kept and kept[-1] == 0:
        kept.pop()
    index = 0
    while index < len(kept):
        end = index
        while end < len(kept) and kept[end] == kept[index]:
            end += 1
        packed.append(f"{kept[index]}" if end == index + 1 else f"{kept[index]}x{end - index}")
        index = end
    return ".".join(packed)


def _unpack(text: str) -> list[int]:
    picks: list[int] = []
    for part in text.split(".") if text else ():
        pick, _, count = part.partition("x")
        picks += [int(pick)] * int(count or 1)
    return picks
