"""The ledgers: promises, checks with the results of their last run, the kill matrix, defects; and the page that shows them.

    python docs/tools/ledger.py run [CHECK …]   # runs checks (default: those whose result is stale or bad) and keeps the results
    python docs/tools/ledger.py page            # writes docs/verification.md
    python docs/tools/ledger.py                 # what is stale; exit status 1 if anything is

A result says what a command printed: states and cases counted, whether its searches were complete, when, and on which Python. It is
stale when the command, the files it names, or the list of what it must find (configurations and their pinned states, formal models,
cases of the kit) are not those of the last run. The kill matrix is read out of the tests themselves, so it cannot name a test that
is not there.
"""

from __future__ import annotations

import ast
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
LEDGER = ROOT / "docs" / "ledger"
PAGE = ROOT / "docs" / "verification.md"
RESULTS = LEDGER / "results.json"

LAYERS = {
    "tables": ("plain enumeration", "deterministic, total, terminal closed, reachable, can end", "that the table is the one we want"),
    "formal model": ("SPIN, models in `specs/promela/`", "model-checked at these sizes: all interleavings and liveness (weak fairness) of the model", "anything about the Python"),
    "explorer": ("breadth-first search by state key over the shipped stages", "every transition of the shipped stages explored within these bounds; a shortest counterexample", "threads and blocking; what happens inside one move"),
    "schedules": ("a deterministic thread scheduler over injected primitives, with a lock guard", "every schedule of these scenarios at synchronisation points", "finer steps where the guard is not installed; C extensions; free-threaded builds"),
    "linearizability": ("Wing–Gong/Lowe over recorded histories", "tiny scenarios: linearizable in every schedule", "with real threads: nothing, but it runs on the real interpreter"),
    "stateful": ("Hypothesis, with plain models and oracles", "depth, call sequences, payloads, limits at n − 1, n, n + 1", "that rare joint conditions were reached, unless counted"),
    "simulation": ("the shipped pipeline in virtual time, seeded, with faults", "these seeds; every client judged by an oracle", "other seeds; threads"),
    "threads": ("the production driver under test", "these runs, on the real interpreter", "other interleavings"),
    "traces": ("a validator that shares no code with the runtime", "that the recorded runs conform", "other runs"),
    "fuzzing": ("atheris, or Hypothesis where that is not installed", "no foreign exception, hang or outsized allocation in N executions", "absence"),
    "conformance": ("the kit, on headrace and on others", "agreement with the clauses up to a written equivalence", "who is right"),
}  # fmt: skip
"""Layer -> with what, what a green run says, what it does not."""


def load(name: str) -> dict[str, Any]:
    """`promises` or `defects`."""
    return tomllib.loads((LEDGER / f"{name}.toml").read_text("utf-8"))


def results() -> dict[str, Any]:
    """Check id -> what its last run said."""
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    return found


# ---- staleness


def pins(check: dict[str, Any]) -> list[str]:
    """What a run of the check must have looked at."""
    command = check["command"]
    if command.startswith("pytest "):
        return list(map(str, command.split()[1:]))
    if command.startswith("headrace check"):
        from headrace.runtime.checks import STATES

        return [f"{setup.name}: {states} states" for setup, states in STATES.items()]
    if "fsm.formal" in command:
        from headrace.fsm.formal import jobs

        return [f"{job.name}: {job.states or job.kind}" for job in jobs(mutants="--mutants" in command)]
    if command.startswith("headrace conform"):
        from headrace.specs.conformance.cases import SUITES, load_cases

        return sorted(case.id for case in load_cases(None, SUITES))
    return []


def stale() -> list[str]:
    """One line for each result that does not fit its check, and for a page that does not show the results."""
    known = results()
    checks = load("promises")["check"]
    found = []
    for check in checks:
        result = known.get(check["id"])
        if result is None:
            found.append(f"{check['id']}: has never run")
        elif result["command"] != check["command"]:
            found.append(f"{check['id']}: the command is another one than that of the last run")
        elif result["pins"] != pins(check):
            other = sorted(set(result["pins"]) ^ set(pins(check)))
            found.append(f"{check['id']}: what it looks at has changed since the last run: {', '.join(other[:3])}")
    found += [f"{name}: is no check" for name in known if name not in {check["id"] for check in checks}]
    if not found and PAGE.read_text("utf-8") != page():
        found.append("docs/verification.md: is not what the ledgers say; run python docs/tools/ledger.py page")
    return found


# ---- running


def run(check: dict[str, Any]) -> dict[str, Any]:
    """Runs the check's command and reads its output."""
    words = check["command"].split()
    if words[0] == "pytest":
        words = ["-m", *words, "-q", "-rs", "-p", "no:cacheprovider", "--hypothesis-show-statistics"]
    elif words[0] == "headrace":
        words = ["-m", *words]
    else:
        words = words[1:]
    began = time.monotonic()
    environment = {**os.environ, "HEADRACE_PROFILE": "ci"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return {
        "command": check["command"],
        "pins": pins(check),
        **read(check["command"], done.stdout, done.returncode),
        "seconds": round(time.monotonic() - began, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
    }


def read(command: str, out: str, status: int) -> dict[str, Any]:
    """Numbers out of what a command printed. `complete`: it ended well and said of no search that it was cut or left out."""

    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, out))

    cut = len(re.findall(r"complete=false", out))
    if command.startswith("pytest"):
        skipped = re.findall(r"SKIPPED \[\d+\] [^:]+:\d+: (.+)", out)
        return {
            "ok": status == 0,
            "complete": status == 0 and not skipped,
            "tests": total(r"(\d+) passed"),
            "examples": total(r"- (\d+) passing"),
            "skipped": skipped,
        }
    if command.startswith("headrace simulate"):
        runs = re.search(r"(\d+) runs", out)
        return {"ok": status == 0, "complete": status == 0, "cases": int(runs[1]) if runs else 0}
    if command.startswith("headrace conform"):
        return {"ok": status == 0, "complete": status == 0, "cases": total(r"cases +(\d+) passed")}
    mutants = len(re.findall(r" caught: ", out))
    expected = mutants + len(re.findall(r" reached: ", out))  # these are meant to stop at what they look for
    return {
        "ok": status == 0,
        "complete": status == 0 and cut <= expected,
        "searches": len(re.findall(r"complete=true", out)) + cut - expected,
        "states": total(r"states=(\d+)") or total(r"(\d+) states  depth"),
        **({"mutants": mutants} if mutants else {}),
    }


# ---- kill matrix


class Kill(NamedTuple):
    """A fault that the tests keep, the layer that must see it, and where."""

    fault: str
    layer: str
    test: str


def kills() -> list[Kill]:
    """The kill matrix, out of the tests and the formal models' list."""
    sys.path.insert(0, str(ROOT / "tests"))
    import interleave_faulty
    import kit_helpers
    import test_explorer_mutants
    import test_rings_faults
    import test_sim_planted
    import wire_planted
    from headrace.fsm.formal import jobs

    seen_by = {"guard": "schedules (lock guard)", "sleep": "schedules", "order": "linearizability", "model": "stateful"}
    found = [
        Kill(f"`{job.name}`: {_line(job.says)}", "formal model", "specs/promela/runs.toml")
        for job in jobs(mutants=True)
        if job.kind == "mutant"
    ]
    for core, layer, where in test_rings_faults.RINGS:
        found.append(Kill(_says(core), seen_by[layer], f"tests/test_rings_faults.py, *{where}*"))
    for bell, channel, where in test_rings_faults.CHANNELS:
        faulty = bell if bell.__module__ == interleave_faulty.__name__ else channel
        found.append(Kill(_says(faulty), "schedules", f"tests/test_rings_faults.py, *{where}*"))
    found += [Kill(name, "explorer", "tests/test_explorer_mutants.py") for name in test_explorer_mutants.PLANTED]
    found += [Kill(name, "simulation", "tests/test_sim_planted.py") for name in test_sim_planted.PLANTED]
    for variant, case in kit_helpers.BROKEN.items():
        found.append(Kill(_says(variant), "conformance", f"case {case}"))
    for name in _parameters(
        ROOT / "tests/test_wire_fuzz.py", "test_a_planted_fault_is_found_within_the_ci_budget_and_replays"
    ):
        found.append(Kill(_says(getattr(wire_planted, name)), "fuzzing", "tests/test_wire_fuzz.py"))
    for name in _parameters(
        ROOT / "tests/test_wire_properties.py", "test_a_planted_fault_in_the_shipped_decoder_is_caught"
    ):
        found.append(Kill(f"decoder: {name}", "stateful", "tests/test_wire_properties.py"))
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        for name in re.findall(r"(?m)^def test_mutant_(\w+?)(?:_is_noticed)?\(", file.read_text("utf-8")):
            found.append(Kill(name.replace("_", " "), "stateful", f"tests/{file.name}"))
    together: dict[str, list[Kill]] = {}
    for kill in found:
        together.setdefault(kill.fault, []).append(kill)
    return [
        Kill(fault, *("; ".join(dict.fromkeys(kill[at] for kill in same)) for at in (1, 2)))
        for fault, same in together.items()
    ]


def _says(part: Any) -> str:
    """What a planted fault does: the first line of its docstring, or its name in words."""
    own = part.__dict__.get("__doc__") if isinstance(part, type) else part.__doc__
    if own:
        return _line(own)
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", part.__name__).lower()
    return words.replace("na n ", "NaN ")


def _line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).rstrip(".").replace("|", "\\|")


def _parameters(file: Path, test: str) -> list[str]:
    """The first values of a test's parametrize list."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == test:
            values = ast.literal_eval(node.decorator_list[0].args[1])  # type: ignore[attr-defined]
            return [value if isinstance(value, str) else value[0] for value in values]
    raise LookupError(f"{file.name} has no {test}")


# ---- the page


def page() -> str:
    """docs/verification.md."""
    known, data = results(), load("promises")
    out = [
        "# How it is verified",
        "",
        "Written from `docs/ledger/` by `python docs/tools/ledger.py page`; do not edit. What headrace promises is listed with the checks",
        "that try to break it, their bounds, and what they said when they last ran. Each layer sees what the others cannot; none of them",
        "is a proof about the Python, and the third column of the first table says what a green run does *not* show.",
        "",
        "[Layers](#layers) · [Promises](#promises) · [Checks](#checks-and-their-last-runs) · [Kill matrix](#kill-matrix) · [Defects](#defects)",
        "",
        "## Layers",
        "",
        "| layer | with | a green run says | it does not say |",
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(says)} |" for name, says in LAYERS.items()),
        "",
        "## Promises",
        "",
        "| promise | specified in | checks |",
        "|---|---|---|",
    ]
    for promise in data["promise"]:
        checks = ", ".join(f"[{name}](#check-{name})" for name in promise["checks"])
        out.append(f"| {promise['says']} | {', '.join(_spec(place) for place in promise['spec'])} | {checks} |")
    out += [
        "",
        "## Checks and their last runs",
        "",
        "`complete` is false where a search was cut or something was left out; then it is said what. `python docs/tools/ledger.py run`",
        "runs those that are stale or did not hold; with names behind it, those.",
        "",
    ]
    for check in data["check"]:
        out += [
            f"### {check['id']} {{ #check-{check['id']} }}",
            "",
            f"Layer: {check['layer']}. Bounds: {check['bounds']}.",
            "",
        ]
        result = known.get(check["id"])
        command = check["command"] if not check["command"].startswith("pytest") else f"python -m {check['command']}"
        out += [f"    {command}", "", _result(result), ""]
    faults = kills()
    layers = {name: sum(name in kill.layer for kill in faults) for name in LAYERS}
    counts = ", ".join(f"{name} {count}" for name, count in layers.items() if count)
    out += [
        "## Kill matrix",
        "",
        f"{len(faults)} faults are kept as tests: each is built on every run, and the layer named for it must see it ({counts}).",
        "",
        "| fault | layer that must see it | where |",
        "|---|---|---|",
        *(f"| {kill.fault} | {kill.layer} | {kill.test} |" for kill in faults),
        "",
        "## Defects",
        "",
        "Found in headrace itself after the part was believed to be right. *Not recorded*: the commit does not say who found it.",
        "",
        "| defect | found by | why the others had not | fixed in | held by |",
        "|---|---|---|---|---|",
    ]
    for defect in load("defects")["defect"]:
        test = defect["test"].replace("::", " ").replace("tests/", "")
        what = defect["what"].replace("|", "\\|")
        out.append(f"| {what} | {defect['found_by']} | {defect['missed']} | {defect['fix']} | `{test}` |")
    return "\n".join([*out, ""])


def _spec(place: str) -> str:
    if place.endswith(".md"):
        return f"[{place.removesuffix('.md')}]({place})"
    pages = {
        "abort": "aborts",
        "adm": "admission",
        "err": "errors",
        "mach": "machines",
        "samp": "sampling",
        "shut": "shutdown",
    }
    kind = place.partition("-")[0]
    return f"[{place}](spec/{pages.get(kind, kind)}.md)"


def _result(result: dict[str, Any] | None) -> str:
    if result is None:
        return "Has not run yet."
    numbers = [
        f"{result[name]:,} {name}".replace(",", " ")
        for name in ("searches", "states", "mutants", "cases", "tests", "examples")
        if result.get(name)
    ]
    verdict = "holds" if result["ok"] else "**does not hold**"
    skipped = f" Left out: {'; '.join(sorted(set(result['skipped'])))}." if result.get("skipped") else ""
    return (
        f"{verdict.capitalize()}, `complete={str(result['complete']).lower()}`: {', '.join(numbers)}, {result['seconds']:.0f} s, "
        f"{result['date']}, Python {result['python']}.{skipped}"
    )


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        known = results()
        old = {line.partition(":")[0] for line in stale()} | {name for name, last in known.items() if not last["ok"]}
        for check in load("promises")["check"]:
            if check["id"] in arguments[1:] or (len(arguments) == 1 and check["id"] in old):
                print(f"{check['id']}: {check['command']}", flush=True)
                known[check["id"]] = result = run(check)
                print(f"  {_result(result)}", flush=True)
                order = [entry["id"] for entry in load("promises")["check"]]
                kept = {name: known[name] for name in order if name in known}
                RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")
        PAGE.write_text(page(), "utf-8")
        return 0 if all(result["ok"] for result in known.values()) else 1
    if arguments == ["page"]:
        PAGE.write_text(page(), "utf-8")
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    problems = stale()
    print("\n".join(problems) or "the ledgers are up to date")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
