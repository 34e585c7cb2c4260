"""Many simulated runs, and what to do with one that fails: the command that replays it, and a short script of the same failure.

Owns: campaigns, shrinking, and the `headrace simulate` command. A run without a single request, or a suite in which something that
must sometimes happen never did, is no success: a check that cannot fail says nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, Final

import msgspec

from .pipeline import Pipeline
from .sim_world import Action
from .simulation import Report, Simulation

SOMETIMES: Final = (
    "a broken frame ends a request",
    "a chunk for a control request",
    "a drain deadline passes",
    "a late abort",
    "a duplicate behind an end",
    "a malformed frame",
    "a malformed frame that hides its rids",
    "a producer is parked",
    "a result for a generate request",
    "a shutdown with live requests",
    "a stage dies with live requests",
    "a stash is used",
    "an abort before ingress took the request",
    "an abort is undeliverable",
    "an abort overtakes a tokenisation",
    "an abort waits for a full ring",
    "an id outside the vocabulary",
    "end: aborted_by_scheduler",
    "end: client_closed",
    "end: control",
    "end: data",
    "end: detokenize",
    "end: done",
    "end: encode",
    "end: internal",
    "end: queue_full",
    "end: scheduler_gone",
    "end: slow_client",
    "end: tokenize",
    "end: validation",
    "inbox full",
    "late output",
    "more output than the limit",
    "one client rid names two live requests",
    "several steps at once",
    "refused at once: queue_full",
    "refused at once: scheduler_gone",
    "refused at once: shutting_down",
    "the final chunk did not fit",
    "the ring is full",
    "the scheduler dies with live requests",
    "the tokenizer's queue is full",
)
"""What a suite of runs must have met at least once, or its green means less than it says."""


class Suite(msgspec.Struct, frozen=True):
    """Several runs: how many, their requests and steps, what was seen how often, the first failure, and what never happened."""

    runs: int
    requests: int
    seconds: float
    seen: dict[str, int]
    failed: Report | None

    @property
    def missed(self) -> list[str]:
        """The "sometimes" properties that no run met."""
        return [name for name in SOMETIMES if not self.seen.get(name)]


def simulate(
    seed: int, steps: int = 1500, *, shrink: bool = True, pipeline: Callable[..., Pipeline] = Pipeline
) -> Report:
    """One run. A failing one is shrunk: `Report.script` then holds the fewest actions found that break the same property."""
    run = Simulation(seed, pipeline=pipeline)
    report = run.run(steps)
    if report.failure is None or not shrink:
        return report
    script = shrunk(seed, run.actions, report.failure, pipeline=pipeline)
    return msgspec.structs.replace(report, script=tuple(f"{name} {number}" for name, number in script))


def campaign(
    seeds: Iterable[int],
    steps: int = 1500,
    *,
    requests: int | None = None,
    pipeline: Callable[..., Pipeline] = Pipeline,
) -> Suite:
    """Runs from `seeds` until `requests` were simulated (default: all seeds) or one run fails."""
    began = time.monotonic()
    total, runs = 0, 0
    seen: Counter[str] = Counter()
    failed: Report | None = None
    for seed in seeds:
        report = Simulation(seed, pipeline=pipeline).run(steps)
        runs += 1
        total += report.requests
        seen.update(report.seen)
        if report.failure is not None:
            failed = simulate(seed, steps, pipeline=pipeline)
            break
        if requests is not None and total >= requests:
            break
    return Suite(runs, total, time.monotonic() - began, dict(seen), failed)


def replayed(seed: int, script: Sequence[str], *, pipeline: Callable[..., Pipeline] = Pipeline) -> Report:
    """The run of a script, as `Report.script` holds it, with the options of `seed`."""
    actions = [(name, int(number)) for name, _, number in (line.partition(" ") for line in script)]
    return Simulation(seed, pipeline=pipeline).run(actions=actions)


def shrunk(
    seed: int,
    actions: Sequence[Action],
    failure: str,
    *,
    pipeline: Callable[..., Pipeline] = Pipeline,
    seconds: float = 30.0,
) -> list[Action]:
    """The fewest of `actions` found in `seconds` that fail in the same way (by the property's number).

    Ever smaller pieces are left out, from the end first: what is done late seldom decides what is drawn early.
    """
    kind, deadline = failure.split(":")[0], time.monotonic() + seconds

    def fails(some: Sequence[Action]) -> bool:
        again = Simulation(seed, pipeline=pipeline).run(actions=some)
        return again.failure is not None and again.failure.split(":")[0] == kind

    left = list(actions)
    if not fails(left):
        return left
    size = max(1, len(left) // 2)
    while True:
        at, before = len(left), len(left)
        while at > 0 and time.monotonic() < deadline:
            fewer = left[: max(0, at - size)] + left[at:]
            if fails(fewer):
                left = fewer
            at = max(0, at - size)
        if time.monotonic() >= deadline or (size == 1 and len(left) == before):
            return left
        if len(left) == before or size > len(left):
            size = max(1, min(size, len(left)) // 2)


def lines(report: Report) -> list[str]:
    """A report for people: one line if all held; else the failure, the command that replays it, and the short script."""
    head = f"seed {report.seed}, {report.steps} steps, {report.requests} requests"
    if report.failure is None:
        return [f"{head}: all properties held"]
    text = [f"{head}: {report.failure}", f"replay: {report.command}"]
    if report.script:
        text.append(f"shortest script found ({len(report.script)} actions, each with the number it draws from):")
        text.extend(f"  {line}" for line in report.script)
    return text


def run_command(seed: int, steps: int, runs: int, out: IO[str]) -> int:
    """`headrace simulate`: `runs` runs from `seed` on; 0 if all properties held, else 1."""
    total = 0
    seen: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(seed, seed + runs):
        report = simulate(number, steps)
        total += report.requests
        seen.update(report.seen)
        if report.failure is not None or runs == 1:
            _print(lines(report), out)
        if report.failure is not None:
            return 1
    if runs > 1:
        _print([f"{runs} runs from seed {seed}, {total} requests, {time.monotonic() - began:.1f} s: all held"], out)
    never = [name for name in SOMETIMES if not seen.get(name)]
    _print([f"  {count:>8} {name}" for name, count in sorted(seen.items()) if count], out)
    if never:
        _print([f"never happened: {', '.join(never)}"], out)
    return 0


def _print(text: Iterable[Any], out: IO[str]) -> None:
    out.write("".join(f"{line}\n" for line in text))
