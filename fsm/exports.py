"""One table in other people's languages: JSON, Mermaid, DOT, SCXML, Promela, and a `transitions` machine.

JSON is normative and checked in under `specs/machines/` (schema: `specs/machines/machine.schema.json`); everything
else is a view of it. What each view can say about the three outcomes:

| format | move | absorb | illegal |
|---|---|---|---|
| json | `table`, `outcomes` 0 | `outcomes` 1 | `outcomes` 2, `table` 255 |
| promela | `oc = 0` | `oc = 1` | `oc = 2`, the state is kept |
| scxml | a transition with a target | a transition without one | no transition (SCXML then discards the event) |
| mermaid, dot | an edge | not drawn | not drawn |
| `transitions` | a transition | an internal transition | `transitions.MachineError` |

An SCXML `final` state has no transitions, so absorb and illegal look alike once a machine is over; a reader that must
know takes the JSON. Output is deterministic: the same declaration gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from .machine import Machine

if TYPE_CHECKING:
    import transitions

AnyMachine = Machine[Any, Any]


def export(machine: AnyMachine, format: str) -> str:
    """The machine as text in `format`: "json", "mermaid", "dot", "scxml" or "promela". ValueError for another name."""
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    return FORMATS[format](machine)


def edges(machine: AnyMachine) -> dict[tuple[Any, Any], list[Any]]:
    """The moves as (from, to) -> events, in table order."""
    found: dict[tuple[Any, Any], list[Any]] = {}
    for state in machine.states:
        for event in machine.events:
            if machine.outcomes[state, event] == 0:
                to = machine.states(int(machine.table[state, event]))
                found.setdefault((state, to), []).append(event)
    return found


def _names(members: Any) -> list[str]:
    return [member.name for member in members]


def _json(machine: AnyMachine) -> str:
    head = {
        "$schema": "machine.schema.json",
        "name": machine.name,
        "revision": machine.revision,
        "about": machine.about,
        "states": _names(machine.states),
        "events": _names(machine.events),
        "initial": machine.initial.name,
        "terminal": sorted(_names(machine.terminal), key=_names(machine.states).index),
        "groups": {group: _names(members) for group, members in machine.groups.items()},
    }
    rules = [
        {
            "outcome": rule.outcome,
            "states": _names(rule.states),
            "events": _names(rule.events),
            "to": None if rule.to is None else rule.to.name,
            "why": rule.why,
        }
        for rule in machine.rules
    ]
    # One table row or rule per line, so that a change is a readable diff.
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    blocks: tuple[tuple[str, list[Any]], ...] = (
        ("table", machine.table.tolist()),
        ("outcomes", machine.outcomes.tolist()),
        ("rules", rules),
    )
    for key, rows in blocks:
        body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        lines.append(f"  {json.dumps(key)}: [\n{body}\n  ]{'' if key == 'rules' else ','}")
    return "{\n" + "\n".join(lines) + "\n}\n"


def _mermaid(machine: AnyMachine) -> str:
    lines = ["stateDiagram-v2", "  direction LR"]
    for group, members in machine.groups.items():
        lines.append(f'  state "{group}" as group_{group.replace(" ", "_")} {{')
        lines += [f"    {state.name}" for state in members]
        lines.append("  }")
    lines.append(f"  [*] --> {machine.initial.name}")
    for (state, to), events in edges(machine).items():
        lines.append(f"  {state.name} --> {to.name}: {', '.join(_names(events))}")
    lines += [f"  {state.name} --> [*]" for state in machine.states if state in machine.terminal]
    return "\n".join(lines) + "\n"


def _dot(machine: AnyMachine) -> str:
    lines = [f"digraph {machine.name} {{", "  rankdir=LR;", "  node [shape=box, style=rounded];"]
    for index, (group, members) in enumerate(machine.groups.items()):
        lines.append(f"  subgraph cluster_{index} {{")
        lines.append(f'    label="{group}";')
        for state in members:
            lines.append(f"    {state.name}{' [peripheries=2]' if state in machine.terminal else ''};")
        lines.append("  }")
    lines.append(f'  start [shape=point, label=""]; start -> {machine.initial.name};')
    for (state, to), events in edges(machine).items():
        lines.append(f'  {state.name} -> {to.name} [label="{", ".join(_names(events))}"];')
    return "\n".join([*lines, "}"]) + "\n"


def _scxml(machine: AnyMachine) -> str:
    note = "A transition without a target absorbs the event; an event without a transition is illegal."
    root = f'version="1.0" datamodel="null" name={quoteattr(machine.name)} initial="{machine.initial.name}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<!-- {machine.name}/{machine.revision}. {note} -->",
        f'<scxml xmlns="http://www.w3.org/2005/07/scxml" {root}>',
    ]
    for state in machine.states:
        if state in machine.terminal:
            lines.append(f'  <final id="{state.name}"/>')
            continue
        lines.append(f'  <state id="{state.name}">')
        for event in machine.events:
            outcome = machine.outcome(state, event)
            if outcome == "move":
                lines.append(f'    <transition event="{event.name}" target="{machine.next(state, event).name}"/>')
            elif outcome == "absorb":
                lines.append(f'    <transition event="{event.name}"/>')
        lines.append("  </state>")
    return "\n".join([*lines, "</scxml>"]) + "\n"


def _promela(machine: AnyMachine) -> str:
    name = machine.name.upper()

    def constant(member: IntEnum) -> str:
        return f"{name}_{'S' if isinstance(member, machine.states) else 'E'}_{member.name}"

    width = machine.table.shape[1]
    ends = " || ".join(f"(st) == {constant(state)}" for state in machine.states if state in machine.terminal)
    lines = [
        f"/* {machine.name}/{machine.revision}, generated from its table. oc: 0 move, 1 absorb, 2 illegal. */",
        *(f"#define {constant(state)} {state.value}" for state in machine.states),
        *(f"#define {constant(event)} {event.value}" for event in machine.events),
        f"#define {name}_TERMINAL(st) ({ends})",
        f"#define {name}_AT(st, ev) ((st) * {width} + (ev))",
        f"hidden byte {name}_to[{machine.table.size}], {name}_oc[{machine.table.size}];",
        f"inline {name}_step(st, ev, oc) {{",
        f"  oc = {name}_oc[{name}_AT(st, ev)];",
        f"  st = {name}_to[{name}_AT(st, ev)]",
        "}",
        f"inline {name}_tables() {{ /* once, before anything else; an illegal event keeps the state */",
        "  d_step {",
    ]
    for state in machine.states:
        for event in machine.events:
            code = int(machine.outcomes[state, event])
            to = machine.next(state, event) if code == 0 else state
            at = f"{name}_AT({constant(state)}, {constant(event)})"
            lines.append(f"    {name}_to[{at}] = {constant(to)}; {name}_oc[{at}] = {code};")
    return "\n".join([*lines, "  }", "}"]) + "\n"


FORMATS: dict[str, Callable[[AnyMachine], str]] = {
    "json": _json,
    "mermaid": _mermaid,
    "dot": _dot,
    "scxml": _scxml,
    "promela": _promela,
}


def reference(machine: AnyMachine) -> transitions.Machine:
    """The same machine for the `transitions` library: the slow interpreter that the fast readings are compared with.

    `m = reference(REQUEST); m.trigger("VALIDATED"); m.state` is then "VALIDATING". An absorbed event is an internal
    transition; an illegal one raises `transitions.MachineError` and keeps the state.
    """
    import transitions

    rows: list[dict[str, Any]] = []
    for state in machine.states:
        for event in machine.events:
            outcome = machine.outcome(state, event)
            if outcome != "illegal":
                to = machine.next(state, event).name if outcome == "move" else None
                rows.append({"trigger": event.name, "source": state.name, "dest": to})
    return transitions.Machine(
        states=_names(machine.states),
        initial=machine.initial.name,
        transitions=rows,
        auto_transitions=False,
        name=machine.name,
    )
