"""Shared by the tests of the machines: walks over tables, and traces written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.fsm import MACHINES, Machine, TraceEvent

ALL = tuple(MACHINES.values())


def pairs(machine: Machine[Any, Any]) -> list[tuple[Any, Any]]:
    return [(state, event) for state in machine.states for event in machine.events]


def steps(*rows: str) -> list[TraceEvent]:
    """A trace from lines such as "request r1 VALIDATED": machine, rid, event. The states follow from the tables.

    "machine rid FROM EVENT TO" writes a step as it stands, right or wrong; the next short line goes on from TO.
    """
    at: dict[tuple[str, str], str] = {}
    found = []
    for seq, row in enumerate(rows):
        machine, rid, *rest = row.split()
        known = MACHINES[machine]
        if len(rest) == 1:
            before = at.get((machine, rid), known.initial.name)
            event = rest[0]
            after = known.next(known.states[before], known.events[event]).name
        else:
            before, event, after = rest
        at[machine, rid] = after
        found.append(TraceEvent(seq, machine, rid, before, event, after, "test"))
    return found


def path(machine: Machine[Any, Any], target: Any) -> list[Any]:
    """The events of a shortest way from the initial state to `target`."""
    ways: dict[Any, list[Any]] = {machine.initial: []}
    todo = [machine.initial]
    for state in todo:
        for event in machine.events:
            if machine.outcome(state, event) == "move":
                to = machine.next(state, event)
                if to not in ways:
                    ways[to] = [*ways[state], event]
                    todo.append(to)
    return ways[target]


UP = ("lifecycle m START", "lifecycle m STARTED")
DOWN = ("lifecycle m DRAIN", "lifecycle m DRAINED", "lifecycle m JOINED")


def to_queue(rid: str) -> list[str]:
    ways = ("VALIDATED", "NEEDS_NORMALIZE", "NEEDS_TOKENIZE", "TOKENIZE_DONE", "PRE_SEND_VALIDATED")
    return [f"request {rid} {event}" for event in ways]


def stream(
    rid: str, events: Iterable[str] = ("SCHEDULER_PICKED", "CHUNK", "FINAL_CHUNK", "FINAL_FRAME_SENT")
) -> list[str]:
    return [f"request {rid} {event}" for event in events]
