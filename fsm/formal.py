"""Running the formal models in `specs/promela/` with SPIN.

The models are written by hand at the granularity of stages and monitors; the transition relation of every machine in
them is generated from its table at the moment of the run (`machines.pml`), so a model cannot drift from the code.
`specs/promela/runs.toml` lists the runs with their bounds and the number of states each must find (a smaller space is
a model that lost behaviour), the mutants, each of which must fail in the named way, and the reach runs, which show
that a condition the properties talk about does occur.

Safety (assertions, invalid end states) and liveness (LTL under weak fairness) are separate runs, because an LTL claim
switches the check for deadlocks off. A run that was cut (depth, memory, time) is never reported as holding.

    python -m headrace.fsm.formal [--only TEXT] [--mutants] [--deep] [--bound N=3] [--jobs 2]

What a run that holds means: all interleavings of the model, at the stated sizes. It says nothing about the Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

from . import MACHINES
from .exports import export

HOW_TO_GET: Final = (
    "SPIN and a C compiler are needed: `apt-get install spin gcc` (Debian, Ubuntu) or https://spinroot.com; "
    "the formal models were not run"
)
Kind = Literal["run", "mutant", "reach"]
DEPTH: Final = 400_000
MEMORY_MB: Final = 3_000


class FormalUnavailable(RuntimeError):
    """SPIN or a C compiler is not installed; the message says how to get them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One verification: a model, its bounds, and what is expected of it."""

    name: str
    model: str
    says: str
    kind: Kind = "run"
    ltl: str = ""
    bounds: Mapping[str, int] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    states: int | None = None
    fails: str = ""
    deep: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What SPIN said. `holds`: no violation in a complete search; `ok`: as expected; `trail`: the violation in words."""

    job: Job
    states: int
    transitions: int
    depth: int
    seconds: float
    complete: bool
    violation: str
    trail: tuple[str, ...]
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.complete and not self.violation

    @property
    def ok(self) -> bool:
        if self.job.kind == "run":
            return self.holds and not self.note
        return self.violation.startswith(self.job.fails)

    def lines(self) -> list[str]:
        """The result for a person: one line, and the trail where a run does not hold."""
        job = self.job
        if job.kind == "run":
            verdict = "holds" if self.ok else self.note or self.violation or "NOT COMPLETE"
        else:
            verdict = f"{'caught' if job.kind == 'mutant' else 'reached'}: {self.violation}" if self.ok else "NOT FOUND"
        bounds = " ".join([*(f"{k}={v}" for k, v in job.bounds.items()), *job.flags])
        head = (
            f"{'ok  ' if self.ok else 'FAIL'} {job.name:<40} {self.states:>9} states  depth {self.depth:>5}  "
            f"{self.seconds:>5.1f} s  complete={str(self.complete).lower():<5}  {verdict}  [{bounds}]"
        )
        if self.ok or job.kind != "run":
            return [head]
        return [head, f"     {job.says}", *(f"     {line}" for line in self.trail)]


def missing() -> str | None:
    """None if the models can be run here, else how to get what is missing."""
    return None if shutil.which("spin") and shutil.which("gcc") else HOW_TO_GET


def jobs(*, mutants: bool = False, deep: bool = False) -> list[Job]:
    """The jobs in `runs.toml`: the runs, and with `mutants` also the mutants and the reach runs."""
    text = (_folder() / "runs.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    runs = {
        row["name"]: Job(
            row["name"], row["model"], row["says"], "run", row.get("ltl", ""), row.get("bounds", {}),
            tuple(row.get("flags", ())), row["states"], "", row.get("deep", False),
        )
        for row in data["run"]
    }  # fmt: skip
    found = [job for job in runs.values() if deep or not job.deep]
    if mutants:
        for kind in ("mutant", "reach"):
            for row in data[kind]:
                of = runs[row["of"]]
                found.append(
                    Job(
                        f"{of.model}/{row['define'].lower()}", of.model, row["says"], kind, of.ltl, of.bounds,
                        (*of.flags, row["define"]), None, row.get("fails", "assertion violated"),
                    )
                )  # fmt: skip
    return found


def run_formal(
    *,
    only: str = "",
    mutants: bool = False,
    deep: bool = False,
    bounds: Mapping[str, int] | None = None,
    workers: int | None = None,
    timeout_s: float = 600.0,
    report: Callable[[str], None] | None = print,
) -> list[Result]:
    """Run the models and report as they finish; all is well if every `Result.ok`.

    `only`: jobs whose name contains this text; `bounds`: values for the models' bounds, for the models that have them
    (state counts are then not compared); `report`: takes the lines. Raises FormalUnavailable where SPIN is absent.
    """
    if reason := missing():
        raise FormalUnavailable(reason)
    chosen = [job for job in jobs(mutants=mutants, deep=deep) if only in job.name]
    if not chosen:
        raise ValueError(f"no formal model is called {only!r}")
    if bounds:
        chosen = [_with(job, bounds) for job in chosen]
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        results = []
        for result in pool.map(lambda job: verify(job, timeout_s=timeout_s), chosen):
            results.append(result)
            for line in result.lines() if report else ():
                report(line)  # type: ignore[misc]
    if report:
        good = sum(result.ok for result in results)
        total = sum(result.states for result in results)
        report(f"{good} of {len(results)} as expected, {total} states in all")
    return results


def verify(job: Job, *, timeout_s: float = 600.0) -> Result:
    """Generate, compile and run one verifier in a temporary folder."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-formal-") as name:
        folder = Path(name)
        for entry in _folder().iterdir():
            if entry.name.endswith(".pml"):
                (folder / entry.name).write_text(entry.read_text(encoding="utf-8"), encoding="utf-8")
        (folder / "machines.pml").write_text(machines_pml(), encoding="utf-8")
        defines = [*(f"-D{key}={value}" for key, value in job.bounds.items()), *(f"-D{flag}" for flag in job.flags)]
        if job.ltl:
            defines.append(f"-DLTL_{job.ltl}")
        kind = ["-DNFAIR=3"] if job.ltl else ["-DSAFETY", "-DNOCLAIM"]
        _tool(["spin", "-a", *defines, f"{job.model}.pml"], folder, timeout_s)
        # A mutant stops early; compiling it costs more than running it.
        _tool(
            ["gcc", "-w", "-O1" if job.kind == "run" else "-O0", f"-DMEMLIM={MEMORY_MB}", *kind, "-o", "pan", "pan.c"],
            folder,
            timeout_s,
        )
        # -A: a liveness run is about its claim; the assertions have their own runs.
        pan = ["./pan", f"-m{DEPTH}", "-n", *(["-a", "-f", "-A"] if job.ltl else [])]
        try:
            out = _tool(pan, folder, timeout_s)
        except subprocess.TimeoutExpired:
            return Result(job, 0, 0, 0, time.monotonic() - started, False, "", (), f"cut after {timeout_s:g} s")
        violation = re.search(r"^pan:\d+: (.+?)(?: \(at depth \d+\))?$", out, re.M)
        trail: tuple[str, ...] = ()
        if violation:
            replay = _tool(["spin", "-t", "-T", *defines, f"{job.model}.pml"], folder, timeout_s)
            trail = tuple(_words(replay))
    states = _number(r"(\d+) states, stored", out)
    complete = "Search not completed" not in out and "max search depth too small" not in out and "errors:" in out
    note = ""
    if job.states is not None and not violation and complete and states != job.states:
        note = f"{states} states where {job.states} are pinned"
    return Result(
        job, states, _number(r"(\d+) transitions", out), _number(r"depth reached (\d+)", out),
        time.monotonic() - started, complete, violation[1] if violation else "", trail, note,
    )  # fmt: skip


def machines_pml() -> str:
    """All machines in Promela, as the models include them."""
    return "\n".join(export(machine, "promela") for machine in MACHINES.values())


def _with(job: Job, bounds: Mapping[str, int]) -> Job:
    own = {key: bounds.get(key, value) for key, value in job.bounds.items()}
    states = job.states if own == dict(job.bounds) else None
    return Job(job.name, job.model, job.says, job.kind, job.ltl, own, job.flags, states, job.fails, job.deep)


def _folder() -> Any:
    return resources.files(f"{__package__.rsplit('.', 1)[0]}.specs") / "promela"


def _tool(command: Sequence[str], folder: Path, timeout_s: float) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    out = done.stdout + done.stderr
    if done.returncode and command[0] != "./pan" and "-t" not in command:
        raise RuntimeError(f"{command[0]} failed: {out.strip()[:2000]}")
    return out


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _words(replay: str) -> list[str]:
    """The replayed trail: what the models print, with the machines' numbers turned into names."""
    lines = []
    for raw in replay.splitlines():
        line = raw.strip()
        if line.startswith(("spin: trail ends", "#processes")):
            break
        if step := re.fullmatch(r"@(\w+) (\d+) (\d+) (\d+) (\d+)", line):
            machine = MACHINES[step[1]]
            before, event, after = (
                machine.states(int(step[3])),
                machine.events(int(step[4])),
                machine.states(int(step[5])),
            )
            outcome = machine.outcome(before, event)
            tail = after.name if outcome == "move" else outcome.upper() if outcome == "illegal" else "absorbed"
            lines.append(f"  {step[1]} {step[2]}: {before.name} --{event.name}--> {tail}")
        elif line and not line.startswith(("spin: ", "ltl ", "Never claim moves")):
            lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.fsm.formal", description="Run the formal models with SPIN."
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs whose name contains TEXT")
    parser.add_argument("--mutants", action="store_true", help="also the mutants, which must fail, and the reach runs")
    parser.add_argument("--deep", action="store_true", help="also the runs that take minutes and gigabytes")
    parser.add_argument("--bound", action="append", default=[], metavar="NAME=VALUE", help="another bound, e.g. N=3")
    parser.add_argument("--jobs", type=int, default=None)
    given = parser.parse_args(arguments)
    bounds = {}
    for item in given.bound:
        key, _, value = item.partition("=")
        if not re.fullmatch(r"[A-Z_]+", key) or not value.isdecimal():
            parser.error(f"a bound is NAME=VALUE, not {item!r}")
        bounds[key] = int(value)
    try:
        results = run_formal(only=given.only, mutants=given.mutants, deep=given.deep, bounds=bounds, workers=given.jobs)
    except (FormalUnavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
