"""Does a recorded trace conform? A second reading of the tables, sharing no code with the first.

The tables come from the exports in `specs/machines/*.json`, not from the declarations, and nothing here calls
`Machine`: a fault in the compiled tables cannot hide itself.

Rules, per machine and rid
- `sequence`: records are numbered 0, 1, 2, …;
- `unknown`: the machine, state and event exist;
- `initial`: the first from-state is the machine's initial state;
- `chain`: every later from-state is the last to-state;
- `table`: the pair moves to exactly this state, or is absorbed and stays; an illegal pair is never there;
- `one_terminal`: a terminal state is entered once.

Rules across machines, per rid
- `checks_before_queue`: QUEUED is entered by PRE_SEND_VALIDATED, once;
- `registration_before_ring`: the ring takes a request only after it is QUEUED, that is registered with its shard;
- `abort_after_request`, `one_abort`: the ring takes an abort only behind its request, and at most one;
- `no_abort_after_final`: no abort enters the ring after the final chunk was seen;
- `terminals_agree`: a request whose abort was notified, undeliverable or local did not complete;
- `before_start`, `after_stop`: no request starts before the manager runs, or moves after it has stopped.

At the end of a trace that has one (`ended`: written to its end, nothing dropped, and the manager has stopped)
- `unfinished`: every request, abort and sink is in a terminal state;
- `output_without_ring`: every request the scheduler picked had entered the ring.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Final

from .trace import Fill, Trace, TraceEvent

CONTEXT: Final = 8
"""How many earlier records of the same rid a violation shows."""

_PER_REQUEST: Final = ("request", "abort", "sink")


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: its name, the record it was seen at, and what went before for the same rid."""

    rule: str
    seq: int
    machine: str
    rid: str
    message: str
    context: tuple[TraceEvent, ...] = ()

    def __str__(self) -> str:
        head = f"{self.rule} at {self.seq}: {self.machine} of {self.rid[:80]!r}: {self.message}"
        lines = [f"  {e.seq:>6} {e.machine:<9} {e.before} --{e.event}--> {e.after}  [{e.stage}]" for e in self.context]
        return "\n".join([head, *lines])


@dataclass(slots=True)
class _Life:
    """What is known about one rid so far."""

    states: dict[str, str] = field(default_factory=dict)
    terminals: dict[str, int] = field(default_factory=dict)
    recent: list[TraceEvent] = field(default_factory=list)
    queued: int = 0
    pushed: int = 0
    aborted: int = 0
    final: bool = False
    picked_at: int = -1
    last: int = 0


@cache
def _tables() -> dict[str, Any]:
    folder = resources.files(f"{__package__.rsplit('.', 1)[0]}.specs") / "machines"
    tables = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".json") and entry.name != "machine.schema.json":
            machine = json.loads(entry.read_text(encoding="utf-8"))
            tables[machine["name"]] = machine
    return tables


def validate(trace: Trace | Iterable[TraceEvent | Fill], *, ended: bool | None = None) -> list[Violation]:
    """Check a trace against the tables and the rules across machines; an empty list means that it conforms.

    The violations are in order of their records; the first one is the one to read, later ones may follow from it.
    `ended` says whether everything in the trace must be over by its end; by default it must if nothing was cut or
    dropped and the manager's own records end in a terminal state.
    """
    checker = _Checker()
    for item in trace:
        checker.take(item)
    if ended is None:
        whole = isinstance(trace, Trace) and trace.ended and not trace.full
        ended = whole and checker.manager in ("STOPPED", "FAILED")
    if ended:
        checker.finish()
    return sorted(checker.violations, key=lambda violation: violation.seq)


class _Checker:
    def __init__(self) -> None:
        self.tables = _tables()
        self.lives: dict[str, _Life] = {}
        self.violations: list[Violation] = []
        self.expected = 0
        self.manager: str | None = None

    def take(self, item: TraceEvent | Fill) -> None:
        if item.seq != self.expected:
            self._say("sequence", item, f"numbered {item.seq} where {self.expected} was due")
        self.expected = item.seq + 1
        if isinstance(item, Fill):
            return
        life = self.lives.setdefault(item.rid, _Life())
        life.last = item.seq
        life.recent = [*life.recent[-CONTEXT + 1 :], item]
        if self._own_rules(item, life):
            if item.machine == "request":
                self._request(item, life)
            elif item.machine == "abort":
                self._abort(item, life)
            elif item.machine == "lifecycle":
                self.manager = item.after

    def _say(self, rule: str, item: TraceEvent | Fill, message: str) -> None:
        if isinstance(item, Fill):
            self.violations.append(Violation(rule, item.seq, "ring", item.ring, message))
        else:
            life = self.lives.get(item.rid)
            context = tuple(life.recent) if life else ()
            self.violations.append(Violation(rule, item.seq, item.machine, item.rid, message, context))

    def _own_rules(self, item: TraceEvent, life: _Life) -> bool:
        """The rules of one machine. False if the record does not even name known things."""
        machine = self.tables.get(item.machine)
        if machine is None:
            self._say("unknown", item, "no such machine")
            return False
        states, events = machine["states"], machine["events"]
        if item.before not in states or item.after not in states or item.event not in events:
            self._say("unknown", item, f"no such state or event: {item.before} {item.event} {item.after}")
            return False
        last = life.states.get(item.machine)
        if last is None and item.before != machine["initial"]:
            self._say("initial", item, f"starts in {item.before}, not in {machine['initial']}")
        elif last is not None and item.before != last:
            self._say("chain", item, f"steps from {item.before}, but was in {last}")
        row, column = states.index(item.before), events.index(item.event)
        outcome = machine["outcomes"][row][column]
        if outcome == 2:
            self._say("table", item, f"{item.event} is illegal in {item.before}")
        elif states[machine["table"][row][column]] != item.after:
            right = states[machine["table"][row][column]]
            self._say("table", item, f"{item.event} in {item.before} leads to {right}, not to {item.after}")
        if item.after in machine["terminal"] and item.before != item.after:
            life.terminals[item.machine] = life.terminals.get(item.machine, 0) + 1
            if life.terminals[item.machine] > 1:
                self._say("one_terminal", item, f"enters a terminal state for time {life.terminals[item.machine]}")
        life.states[item.machine] = item.after
        return True

    def _request(self, item: TraceEvent, life: _Life) -> None:
        if self.manager in ("CREATED", "STARTING"):
            self._say("before_start", item, f"a request moves while the manager is {self.manager}")
        if self.manager == "STOPPED" and item.before != item.after:
            self._say("after_stop", item, "a request moves after the manager has stopped")
        if item.after == "QUEUED" and item.before != "QUEUED":
            life.queued += 1
            if item.event != "PRE_SEND_VALIDATED" or life.queued > 1:
                self._say("checks_before_queue", item, f"enters QUEUED by {item.event}, time {life.queued}")
        if item.event == "SCHEDULER_PICKED" and life.picked_at < 0:
            life.picked_at = item.seq
        if item.after == "FINALIZING":
            life.final = True

    def _abort(self, item: TraceEvent, life: _Life) -> None:
        if item.event == "RING_TOOK_REQUEST":
            life.pushed += 1
            if not life.queued:
                self._say("registration_before_ring", item, "the ring took a request that is not QUEUED yet")
        elif item.event == "RING_TOOK_ABORT":
            life.aborted += 1
            if not life.pushed:
                self._say("abort_after_request", item, "the ring took an abort before its request")
            if life.aborted > 1:
                self._say("one_abort", item, f"abort number {life.aborted} of one request")
            if life.final:
                self._say("no_abort_after_final", item, "an abort after the final chunk was seen")

    def finish(self) -> None:
        for rid, life in self.lives.items():

            def say(rule: str, machine: str, message: str, rid: str = rid, life: _Life = life) -> None:
                self.violations.append(Violation(rule, life.last, machine, rid, message, tuple(life.recent)))

            for machine in _PER_REQUEST:
                state = life.states.get(machine)
                if state is not None and state not in self.tables[machine]["terminal"]:
                    say("unfinished", machine, f"is still {state} at the end")
            abort = life.states.get("abort")
            if (
                abort in ("NOTIFIED", "UNDELIVERABLE", "CANCELLED_LOCALLY")
                and life.states.get("request") == "COMPLETED"
            ):
                say("terminals_agree", "abort", f"ended {abort}, but its request COMPLETED")
            if life.picked_at >= 0 and abort is not None and not life.pushed:
                say("output_without_ring", "request", "has output, but the ring never took it")
