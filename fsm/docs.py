"""Everything that is generated on this floor: the exports, the diagrams, and the blocks of `docs/machines.md`.

`generated()` maps a path relative to the repository to the content that belongs there; a check compares, a writer
writes (`python -m headrace.fsm.docs`). The page itself is written by hand, for people; between two markers

    <!-- generated: NAME -->
    <!-- end -->

stands what comes from the declarations: tables with their reasons, and the walk-throughs (`WALKS`), whose states are
computed by stepping the machines and which must pass the trace validator, so a page cannot tell a story that the
machines would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from . import MACHINES
from .diagram import pictures
from .exports import export
from .formal import jobs
from .machine import Machine, Rule
from .trace import TraceEvent
from .validator import validate

PAGE: Final = "docs/machines.md"
ROOT: Final = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)

_TEXT_TO_QUEUE: Final = (
    ("ingress", "request", "VALIDATED", "taken from the fresh lane"),
    ("ingress", "request", "NEEDS_NORMALIZE", "a generate request"),
    ("ingress", "request", "NEEDS_TOKENIZE", "the text goes to the tokenizer pool"),
)
_PUSHED: Final = (
    ("ingress", "request", "TOKENIZE_DONE", "the ids come back in the tokenised lane"),
    ("ingress", "request", "PRE_SEND_VALIDATED", "lengths fit; `Register` goes to the shard"),
    ("ingress", "abort", "RING_TOOK_REQUEST", "pushed: from here an abort has to reach the scheduler"),
)

WALKS: Final[dict[str, Sequence[tuple[str, str, str, str]]]] = {
    "walk-stream": (
        *_TEXT_TO_QUEUE,
        *_PUSHED,
        ("shard", "request", "SCHEDULER_PICKED", "the first frame that names the request"),
        ("shard", "request", "CHUNK", "ids become text"),
        ("shard", "sink", "PUT", "the client gets it"),
        ("shard", "request", "FINAL_CHUNK", "a finish reason: the scheduler is done, no abort is owed any more"),
        ("shard", "sink", "PUT_FINAL", "the terminal item, in its reserved slot"),
        ("shard", "request", "FINAL_FRAME_SENT", "the entry leaves the shard's table"),
        ("shard", "abort", "FINISHED", "nothing was asked for"),
    ),
    "walk-disconnect-tokenizing": (
        *_TEXT_TO_QUEUE,
        ("client", "sink", "CLOSE", "the handle is closed, cancelled or collected"),
        ("ingress", "abort", "ABORT_GUARD", "the abort lane is taken before all others; the request was never pushed"),
        ("ingress", "request", "DISCONNECT", "the entry leaves ingress' table; counted as 499"),
        ("ingress", "request", "TOKENIZE_DONE", "the worker answers later; absorbed"),
    ),
    "walk-disconnect-streaming": (
        *_TEXT_TO_QUEUE,
        *_PUSHED,
        ("shard", "request", "SCHEDULER_PICKED", ""),
        ("shard", "request", "CHUNK", ""),
        ("client", "sink", "CLOSE", "the client is gone"),
        ("shard", "abort", "ABORT_GUARD", "ingress does not own the request and forwards the abort to its shard"),
        ("shard", "request", "DISCONNECT", "the shard ends the request and sends one abort message back to ingress"),
        ("ingress", "abort", "RING_FULL", "no room: the message stays pending"),
        ("shard", "request", "CHUNK", "the scheduler does not know yet; absorbed"),
        ("ingress", "abort", "RING_TOOK_ABORT", "the ring has room again: exactly one message"),
    ),
    "walk-ring-full": (
        *_TEXT_TO_QUEUE,
        ("ingress", "request", "TOKENIZE_DONE", ""),
        ("ingress", "abort", "RING_FULL", "no room left over after pending aborts; nothing was registered"),
        ("ingress", "sink", "PUT_ERROR", "503, in the reserved slot"),
        ("ingress", "request", "ERROR", "the entry leaves ingress' table"),
        ("ingress", "abort", "FINISHED", "it was refused before the ring; the scheduler hears nothing"),
    ),
    "walk-scheduler-dies": (
        *_TEXT_TO_QUEUE,
        *_PUSHED,
        ("shard", "request", "SCHEDULER_PICKED", ""),
        ("shard", "request", "CHUNK", ""),
        ("shard", "abort", "ABORT_DETOK", "the egress ring closed: the shard fails every entry it holds"),
        ("shard", "sink", "PUT_ERROR", "500, in the reserved slot"),
        ("shard", "request", "ERROR", ""),
        ("ingress", "abort", "RING_CLOSED", "nobody is left to tell; counted"),
    ),
    "walk-overflow": (
        *_TEXT_TO_QUEUE,
        *_PUSHED,
        ("shard", "request", "SCHEDULER_PICKED", ""),
        ("shard", "request", "CHUNK", ""),
        ("shard", "sink", "OVERFLOW", "the sink refused a chunk: the stream ends with an error, not as a success"),
        ("shard", "abort", "ABORT_DETOK", "the scheduler would go on for nobody"),
        ("shard", "request", "ERROR", ""),
        ("ingress", "abort", "RING_TOOK_ABORT", "one message, behind its request"),
    ),
}


def generated(root: Path | None = None) -> dict[str, str]:
    """Path relative to the repository -> content, for everything generated here.

    `root` is the repository (default: the one this package stands in). Where it has no `docs/machines.md`, as in an
    installed copy, the page and the diagrams are left out. Raises ValueError for a block that nothing generates.
    """
    files = {f"specs/machines/{machine.name}.json": export(machine, "json") for machine in MACHINES.values()}
    page = (root or ROOT) / PAGE
    if page.is_file():
        for machine in MACHINES.values():
            files |= {f"docs/machines/{name}.svg": text for name, text in pictures(machine).items()}
        files[PAGE] = fill(page.read_text(encoding="utf-8"))
    return files


def stale(root: Path | None = None) -> list[str]:
    """The generated paths whose file is missing or differs."""
    base = root or ROOT
    wrong = []
    for path, content in generated(root).items():
        file = base / path
        if not file.is_file() or file.read_text(encoding="utf-8") != content:
            wrong.append(path)
    return wrong


def fill(page: str) -> str:
    """The page with its generated blocks replaced."""
    blocks = _blocks()
    names = [match[2] for match in _BLOCK.finditer(page)]
    if sorted(names) != sorted(blocks):
        wrong = sorted(set(names) ^ set(blocks)) or sorted(name for name in names if names.count(name) > 1)
        raise ValueError(f"{PAGE}: blocks that are missing, unknown or doubled: {', '.join(wrong)}")
    return _BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]}{match[3]}", page)


def _blocks() -> dict[str, str]:
    blocks = {name: _tables(machine) for name, machine in MACHINES.items()}
    blocks |= {name: _walk(steps) for name, steps in WALKS.items()}
    blocks["numbers"] = _numbers()
    blocks["formal"] = _formal()
    return blocks


def _cell(members: Sequence[Any], whole: int) -> str:
    return "any" if len(members) == whole else ", ".join(member.name for member in members)


def _rows(rules: Sequence[Rule[Any, Any]], machine: Machine[Any, Any]) -> list[str]:
    live = [state for state in machine.states if state not in machine.terminal]
    rows = []
    for rule in rules:
        states = _cell(rule.states, machine.table.shape[0])
        if len(rule.states) > 1 and set(rule.states) == set(live):
            states = "any live state"
        elif len(rule.states) > 1 and set(rule.states) == machine.terminal:
            states = "any terminal state"
        events = _cell(rule.events, machine.table.shape[1])
        to = f" | {rule.to.name}" if rule.to is not None else ""
        rows.append(f"| {states} | {events}{to} | {rule.why} |")
    return rows


def _tables(machine: Machine[Any, Any]) -> str:
    counts = machine.counts()
    by = {name: [rule for rule in machine.rules if rule.outcome == name] for name in counts}
    head = f"**{machine.name}/{machine.revision}**: {machine.table.shape[0]} states, {machine.table.shape[1]} events; of all "
    head += f"pairs {counts['move']} move, {counts['absorb']} are absorbed, {counts['illegal']} are illegal."
    drawn = [f"![{name}](machines/{name}.svg)" for name in pictures(machine)]
    parts = [
        head,
        *drawn,
        "\n".join(["| from | event | to | why |", "|---|---|---|---|", *_rows(by["move"], machine)]),
        "Late or repeated, and absorbed:",
        "\n".join(["| in | event | why |", "|---|---|---|", *_rows(by["absorb"], machine)]),
        "<details><summary>Illegal: somebody is wrong</summary>",
        "\n".join(["| in | event | why |", "|---|---|---|", *_rows(by["illegal"], machine)]),
        "</details>",
        "<details><summary>The same as Mermaid</summary>",
        f"```mermaid\n{export(machine, 'mermaid')}```",
        "</details>",
    ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def _walk(steps: Sequence[tuple[str, str, str, str]]) -> str:
    at: dict[str, Any] = {}
    trace, rows = [], ["", "| where | machine | from | event | to | |", "|---|---|---|---|---|---|"]
    for seq, (stage, name, event_name, note) in enumerate(steps):
        machine = MACHINES[name]
        before = at.get(name, machine.initial)
        event = machine.events[event_name]
        outcome, after = machine.outcome(before, event), machine.next(before, event)
        at[name] = after
        trace.append(TraceEvent(seq, name, "r", before.name, event_name, after.name, stage))
        to = after.name if outcome == "move" else "*absorbed*"
        rows.append(f"| {stage} | {name} | {before.name} | {event_name} | {to} | {note} |")
    if violations := validate(trace, ended=True):
        raise ValueError(f"a walk-through breaks a rule: {violations[0]}")
    ends = ", ".join(f"{name} {state.name}" for name, state in sorted(at.items()))
    return "\n".join(rows) + f"\n\nAt the end: {ends}.\n\n"


def _numbers() -> str:
    rows = ["", "| machine | states | events |", "|---|---|---|"]
    for machine in MACHINES.values():
        states = ", ".join(f"{state.value} {state.name}" for state in machine.states)
        events = ", ".join(f"{event.value} {event.name}" for event in machine.events)
        rows.append(f"| {machine.name}/{machine.revision} | {states} | {events} |")
    return "\n".join(rows) + "\n\n"


def _formal() -> str:
    rows = ["", "| run | what holds | bounds | states |", "|---|---|---|---|"]
    everything = jobs(mutants=True, deep=True)
    for job in everything:
        if job.kind == "run":
            bounds = ", ".join([*(f"{key} {value}" for key, value in job.bounds.items()), *job.flags])
            claim = f"{job.says} (LTL)" if job.ltl else job.says
            rows.append(f"| {job.name}{' (deep)' if job.deep else ''} | {claim} | {bounds} | {job.states:,} |")
    rows += ["", "Each of these faults, planted in the model, makes its run fail:", ""]
    for job in everything:
        if job.kind == "mutant":
            rows.append(f"- {job.model}: {job.says} ({job.fails})")
    rows += ["", "And these do occur:", ""]
    rows += [f"- {job.says}" for job in everything if job.kind == "reach"]
    return "\n".join(rows) + "\n\n"


def main() -> None:
    """Write every generated file and name those that changed."""
    outdated = stale()
    for path, content in generated().items():
        if path in outdated:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(content, encoding="utf-8")
            print(f"wrote {path}")
    print(f"{len(outdated)} files written, the rest was up to date")


if __name__ == "__main__":
    main()
