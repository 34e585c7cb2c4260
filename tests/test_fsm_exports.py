"""The exports: JSON by its schema, SCXML by another reader, the drawn formats by their own grammar."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from importlib import resources
from typing import Any

import pytest
from fsm_helpers import ALL, pairs, path
from headrace.fsm import REQUEST, Machine, RequestState, export

every_machine = pytest.mark.parametrize("machine", ALL, ids=lambda m: m.name)
SCXML = "{http://www.w3.org/2005/07/scxml}"


@every_machine
def test_json_follows_its_schema_and_holds_the_table(machine: Machine[Any, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (pip install headrace[test])")
    schema = json.loads((resources.files("headrace.specs") / "machines" / "machine.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads(export(machine, "json"))
    jsonschema.validate(data, schema)
    assert data["table"] == machine.table.tolist()
    assert data["outcomes"] == machine.outcomes.tolist()
    assert data["initial"] == machine.initial.name
    for wrong in (
        {"table": "x"}, {"outcomes": [[3]]}, {"states": []}, {"revision": 0}, {"extra": 1}, {"initial": "lower"},
        {"rules": [{"outcome": "absorb", "states": ["A"], "events": ["B"], "to": "A", "why": ""}]},
    ):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, **wrong}, schema)


@every_machine
def test_scxml_is_well_formed_and_complete(machine: Machine[Any, Any]) -> None:
    root = ET.fromstring(export(machine, "scxml"))
    assert root.tag == f"{SCXML}scxml"
    assert root.get("initial") == machine.initial.name
    assert [s.get("id") for s in root] == [s.name for s in machine.states]
    assert {s.get("id") for s in root if s.tag == f"{SCXML}final"} == {s.name for s in machine.terminal}
    found = {
        (state.get("id"), step.get("event")): step.get("target")
        for state in root
        for step in state.iter(f"{SCXML}transition")
    }
    expected = {
        (s.name, e.name): machine.next(s, e).name if machine.outcome(s, e) == "move" else None
        for s, e in pairs(machine)
        if s not in machine.terminal and machine.outcome(s, e) != "illegal"
    }
    assert found == expected
    moved = {e.name for s, e in pairs(machine) if machine.outcome(s, e) == "move"}
    assert {event for _, event in found} >= moved


@every_machine
def test_another_scxml_reader_runs_the_export_as_the_table_says(machine: Machine[Any, Any]) -> None:
    io = pytest.importorskip(
        "statemachine.io", reason="python-statemachine is not installed (pip install headrace[test])"
    )
    chart = io.load(export(machine, "scxml"), format="scxml")
    for state in machine.states:
        if state in machine.terminal:
            continue
        for event in machine.events:
            run = chart()
            for step in path(machine, state):
                run.send(step.name)
            assert _where(run) == {state.name}
            run.send(event.name)
            after = state if machine.outcome(state, event) == "illegal" else machine.next(state, event)
            assert _where(run) == {after.name}


def _where(run: Any) -> set[str]:
    return {str(state.id) for state in run.configuration}


@every_machine
def test_mermaid_and_dot_draw_every_state_and_every_move(machine: Machine[Any, Any]) -> None:
    moves = {(s.name, machine.next(s, e).name, e.name) for s, e in pairs(machine) if machine.outcome(s, e) == "move"}
    mermaid, dot = export(machine, "mermaid"), export(machine, "dot")
    in_mermaid = {
        (a, b, event)
        for a, b, events in re.findall(r"^  (\w+) --> (\w+): (.+)$", mermaid, re.M)
        for event in events.split(", ")
    }
    in_dot = {
        (a, b, event)
        for a, b, events in re.findall(r'^  (\w+) -> (\w+) \[label="(.+)"\];$', dot, re.M)
        for event in events.split(", ")
    }
    assert in_mermaid == in_dot == moves
    for state in machine.states:
        assert re.search(rf"^    {state.name}$", mermaid, re.M)
        assert re.search(rf"^    {state.name}( \[peripheries=2\])?;$", dot, re.M)
    assert set(re.findall(r"(\w+) --> \[\*\]", mermaid)) == {s.name for s in machine.terminal}
    assert set(re.findall(r"(\w+) \[peripheries=2\]", dot)) == {s.name for s in machine.terminal}


@every_machine
def test_promela_holds_every_pair(machine: Machine[Any, Any]) -> None:
    text = export(machine, "promela")
    name = machine.name.upper()
    row = rf"    {name}_to\[{name}_AT\({name}_S_(\w+), {name}_E_(\w+)\)\] = {name}_S_(\w+); {name}_oc\[.*\] = (\d);"
    found = {(s, e): (to, int(code)) for s, e, to, code in re.findall(row, text)}
    expected = {
        (s.name, e.name): (
            s.name if machine.outcome(s, e) == "illegal" else machine.next(s, e).name,
            int(machine.outcomes[s, e]),
        )
        for s, e in pairs(machine)
    }
    assert found == expected
    for member in (*machine.states, *machine.events):
        kind = "S" if isinstance(member, machine.states) else "E"
        assert f"#define {name}_{kind}_{member.name} {member.value}\n" in text


@every_machine
def test_an_export_is_the_same_every_time(machine: Machine[Any, Any]) -> None:
    for format in ("json", "mermaid", "dot", "scxml", "promela"):
        assert export(machine, format) == export(machine, format)


def test_an_unknown_format_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'svg'.*json, mermaid, dot, scxml, promela"):
        export(REQUEST, "svg")


def test_request_states_in_the_export_are_grouped_by_ingress_and_egress() -> None:
    groups = json.loads(export(REQUEST, "json"))["groups"]
    assert groups["ingress"][-1] == RequestState.PRE_SEND_VALIDATING.name
    assert groups["egress"] == ["QUEUED", "STREAMING", "FINALIZING"]
