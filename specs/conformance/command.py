"""`headrace conform`: a run of the kit from the command line.

Owns: the options and the exit status (0: every applicable MUST holds; 1: not; 2: a mistake). Rules it keeps: one line per case that
does not simply pass, and a summary that counts what was not applicable.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...codec.errors import ValidationError
from .cases import SUITES, load_cases
from .lines import Caller, Process, python_target
from .protocol import KitError
from .report import details, junit, line, page, summary
from .runner import FAILED, NOT_APPLICABLE, PASSED, STEP_LIMIT_S, SURPRISE, Outcome, load_known, run


@dataclass(frozen=True)
class Options:
    """What was asked on the command line; see the help of `headrace conform`."""

    target: str | None = None
    exec_: str | None = None
    suite: str | None = None
    case: tuple[str, ...] = ()
    wire: str | None = None
    files: tuple[str, ...] = ()
    known: str | None = None
    junit: str | None = None
    html: str | None = None
    save_frames: str | None = None
    limit_s: float = STEP_LIMIT_S
    list_: bool = False


def conform(options: Options, out: IO[str] = sys.stdout) -> int:
    """Run the kit; the exit status."""
    try:
        return _conform(options, out)
    except KitError as fault:
        raise ValidationError(str(fault)) from None
    except OSError as fault:
        raise ValidationError(f"{fault.filename or ''}: {fault.strerror or fault}") from None


def _conform(options: Options, out: IO[str]) -> int:
    suites = tuple(options.suite.split(",")) if options.suite else SUITES
    cases = load_cases([Path(name) for name in options.files] or None, suites)
    if options.case:
        chosen = [case for case in cases if any(_fits(case.id, asked) for asked in options.case)]
        if not chosen:
            raise KitError(f"no case is called {', '.join(options.case)}; --list shows them all")
        cases = chosen
    if options.list_:
        for case in cases:
            out.write(f"{case.id:<48} {case.level:<6} {case.clause:<9} {case.about}\n")
        return 0
    caller, name = _caller(options)
    known = load_known(options.known)
    if options.case or options.suite:  # of the known failures, those that are run at all
        known = [entry for entry in known if any(entry.fits(case.id) for case in cases)]

    def tell(outcome: Outcome) -> None:
        if outcome.status not in (PASSED, NOT_APPLICABLE):
            out.write(line(outcome).encode("ascii", "backslashreplace").decode() + "\n")
            out.flush()

    try:
        wires = None if options.wire is None else [options.wire]
        report = run(caller, cases, target=name, known=known, wires=wires, limit_s=options.limit_s, tell=tell)
    finally:
        caller.end()
    for outcome in report.outcomes:
        if outcome.status in (FAILED, SURPRISE):
            out.write(f"\n{outcome.id}\n" + "".join(f"{part}\n" for part in details(report, outcome)))
        if options.save_frames is not None:
            _save(outcome, Path(options.save_frames), out)
    out.write("\n" + "".join(f"{part}\n" for part in summary(report)))
    if options.junit is not None:
        Path(options.junit).write_text(junit(report), "utf-8")
    if options.html is not None:
        Path(options.html).write_text(page(report), "utf-8")
    return 0 if report.ok else 1


def _fits(case_id: str, asked: str) -> bool:
    return case_id == asked or case_id.startswith((asked + "/", asked + "."))


def _caller(options: Options) -> tuple[Caller, str]:
    if (options.target is None) == (options.exec_ is None):
        raise KitError("give a target: MODULE:FACTORY, or --exec with a program that speaks JSON lines")
    if options.exec_ is not None:
        return Process(shlex.split(options.exec_)), f"--exec {shlex.quote(options.exec_)}"
    assert options.target is not None
    return python_target(options.target), options.target


def _save(outcome: Outcome, folder: Path, out: IO[str]) -> None:
    for at, frame in enumerate(outcome.frames):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{outcome.case.id.replace('/', '_')}-{outcome.wire}-{at:03d}.bin"
        (folder / name).write_bytes(frame)
        out.write(f"kept {folder / name}; headrace inspect --wire {outcome.wire} {folder / name}\n")
