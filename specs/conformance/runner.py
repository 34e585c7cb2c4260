"""Running the kit: cases on a target, known failures, and what comes out.

Owns: the verdicts. Rules it keeps:

* "not applicable" is never "passed": a case whose capability or wire revision the target does not claim is listed as such.
* A crash, a fault or silence fails the case at hand; the target is then started anew for the next one.
* An entry of the known-failures file whose case passes is an error, and so is one that names no case: a list that only grows stops
  saying anything. An entry marked ``"sometimes": true`` (a race on the target's side) may also pass.
* `ok` only if every applicable MUST holds or is a known failure.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from ... import specs
from .cases import Case
from .lines import HELLO_LIMIT_S, Caller
from .protocol import KitError, TargetFault, check_hello
from .steps import Mismatch, Session

PASSED: Final = "passed"
FAILED: Final = "failed"
KNOWN: Final = "known failure"
SURPRISE: Final = "passes, though known to fail"
NOT_APPLICABLE: Final = "not applicable"
STEP_LIMIT_S: Final = 5.0
KNOWN_LIMIT_S: Final = 1.0


@dataclass(frozen=True)
class Outcome:
    """What became of one case on one wire revision. `frames`: what was pushed, for `headrace inspect`."""

    case: Case
    wire: str
    status: str
    message: str = ""
    step: int = -1
    seconds: float = 0.0
    frames: tuple[bytes, ...] = ()
    known: str = ""

    @property
    def id(self) -> str:
        return f"{self.case.id}[{self.wire}]"

    @property
    def bad(self) -> bool:
        """Whether this alone makes the run fail."""
        return self.status == SURPRISE or (self.status == FAILED and self.case.must)


@dataclass
class Report:
    """A whole run."""

    hello: Mapping[str, Any]
    target: str
    outcomes: list[Outcome] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.stale and not any(outcome.bad for outcome in self.outcomes) and bool(self.counts[PASSED])

    @property
    def counts(self) -> Counter[str]:
        return Counter(outcome.status for outcome in self.outcomes)


@dataclass(frozen=True)
class Known:
    """One known failure: the case (an id, or ``ID/*`` for all of an `each`), why, and whether it only fails sometimes."""

    case: str
    why: str
    sometimes: bool = False

    def fits(self, case_id: str) -> bool:
        return case_id == self.case or (self.case.endswith("/*") and case_id.startswith(self.case[:-1]))


def load_known(path: Path | str | None) -> list[Known]:
    """The known-failures file: a JSON array of ``{"case", "why", "sometimes"?}``, or an object with numbered `differences`."""
    if path is None:
        return []
    try:
        entries = json.loads(Path(path).read_text("utf-8"))
        if isinstance(entries, dict):  # a list of numbered differences, as in specs/cases/differences.json
            return [
                Known(case, f"{entry['id']} {entry['title']}", bool(entry.get("sometimes", False)))
                for entry in entries["differences"]
                for case in entry["cases"]
            ]
        return [Known(entry["case"], entry["why"], bool(entry.get("sometimes", False))) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise KitError(f"known failures {path}: {fault}") from None


def missing(case: Case, hello: Mapping[str, Any]) -> str:
    """Why `case` is not applicable to a target with this hello; empty where it is."""
    absent = [need for need in case.needs if need not in hello["capabilities"]]
    if absent:
        return f"the target has no {', '.join(absent)}"
    for step in case.steps:
        name = step.get("machine")
        if name is not None and hello["machines"].get(name) != machine_revision(name):
            claimed = hello["machines"].get(name)
            return (
                f"the target has no machine {name}" if claimed is None else f"its machine {name} is revision {claimed}"
            )
    return ""


@cache
def machine_revision(name: str) -> int:
    """The revision of the exported machine `name`."""
    revision: int = json.loads(specs.path("machines", f"{name}.json").read_text("utf-8"))["revision"]
    return revision


def run_case(
    caller: Caller,
    case: Case,
    wire: str,
    limit_s: float = STEP_LIMIT_S,
    clock: Callable[[str], float] | None = None,
) -> Outcome:
    """One case on a target that can run it. `clock`: the time, told what is about to be called (a transcript has its own)."""
    started = time.monotonic()
    session = Session(caller, case, wire, limit_s, clock)
    status, message = FAILED, ""
    try:
        session.run()
        status = PASSED
    except Mismatch as fault:
        message = f"step {session.at}: {fault}"
    except TargetFault as fault:
        message = f"step {session.at}: {fault}"
        caller.restart()
    return Outcome(case, wire, status, message, session.at, time.monotonic() - started, tuple(session.frames))


def run(
    caller: Caller,
    cases: Iterable[Case],
    *,
    target: str = "",
    known: Sequence[Known] = (),
    wires: Sequence[str] | None = None,
    limit_s: float = STEP_LIMIT_S,
    tell: Callable[[Outcome], object] | None = None,
) -> Report:
    """All `cases` on the target behind `caller`. KitError where the target cannot even say hello."""
    started = time.monotonic()
    try:
        hello = check_hello(caller.call("hello", {}, max(limit_s, HELLO_LIMIT_S)))
    except TargetFault as fault:
        raise KitError(f"the target does not say hello: {fault}") from None
    report = Report(hello, target)
    for case in cases:
        reason = missing(case, hello)
        spoken = [wire for wire in case.wires if wire in hello["wires"] and (wires is None or wire in wires)]
        if not spoken:
            reason = reason or f"the target does not speak {', '.join(case.wires)}"
        listed = next((entry for entry in known if entry.fits(case.id)), None)
        for wire in spoken if not reason else case.wires[:1]:
            if reason:
                outcome = Outcome(case, wire, NOT_APPLICABLE, reason)
            else:
                # a case known to fail, perhaps by silence, need not be waited for as long as one that should pass
                patience = limit_s if listed is None or listed.sometimes else min(limit_s, KNOWN_LIMIT_S)
                outcome = run_case(caller, case, wire, patience)
                if listed is not None:
                    outcome = _with_known(outcome, listed)
            report.outcomes.append(outcome)
            if tell is not None:
                tell(outcome)
    ran = [outcome.case.id for outcome in report.outcomes]
    report.stale = [entry.case for entry in known if not any(entry.fits(case_id) for case_id in ran)]
    report.seconds = time.monotonic() - started
    return report


def _with_known(outcome: Outcome, listed: Known) -> Outcome:
    status = outcome.status
    if status == FAILED:
        status = KNOWN
    elif status == PASSED and not listed.sometimes:
        status = SURPRISE
    return Outcome(
        outcome.case,
        outcome.wire,
        status,
        outcome.message,
        outcome.step,
        outcome.seconds,
        outcome.frames,
        listed.why,
    )


def replay_command(report: Report, outcome: Outcome) -> str:
    """One command that runs this case again and keeps its frames as files for `headrace inspect`."""
    target = report.target if report.target.startswith("--exec ") else shlex.quote(report.target)
    return f"headrace conform {target} --case {shlex.quote(outcome.case.id)} --wire {outcome.wire} --save-frames frames"
