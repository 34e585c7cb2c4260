"""Layer 0: the tables as data, the checks at declaration, and four readings of one table in lockstep."""

from __future__ import annotations

import itertools
import json
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import transitions
from fsm_helpers import ALL, pairs, path
from headrace.fsm import (
    ABORT,
    ABORT_EVENTS,
    MACHINES,
    REQUEST,
    RING,
    SINK,
    AbortEvent,
    AbortSource,
    AbortState,
    DeclarationError,
    IllegalTransition,
    Machine,
    RequestEvent,
    RequestState,
    RingEvent,
    RingState,
    export,
    reference,
)
from headrace.fsm.machine import Rule, absorb, illegal, move
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

every_machine = pytest.mark.parametrize("machine", ALL, ids=lambda m: m.name)

COUNTS = {
    "request": {"move": 32, "absorb": 31, "illegal": 117},
    "abort": {"move": 14, "absorb": 36, "illegal": 13},
    "ring": {"move": 66, "absorb": 48, "illegal": 66},
    "sink": {"move": 5, "absorb": 8, "illegal": 12},
    "lifecycle": {"move": 11, "absorb": 14, "illegal": 17},
}


@every_machine
def test_the_count_of_moves_absorbs_and_illegals_is_pinned(machine: Machine[Any, Any]) -> None:
    assert machine.counts() == COUNTS[machine.name]


@every_machine
def test_every_pair_moves_absorbs_or_is_illegal(machine: Machine[Any, Any]) -> None:
    for state, event in pairs(machine):
        outcome = machine.outcome(state, event)
        entry, code = machine.table[state, event], machine.outcomes[state, event]
        assert machine.why(state, event)
        if outcome == "illegal":
            assert (entry, code) == (255, 2)
            with pytest.raises(IllegalTransition) as caught:
                machine.next(state, event)
            assert (caught.value.machine, caught.value.state, caught.value.event) == (machine.name, state, event)
            assert state.name in str(caught.value)
            assert event.name in str(caught.value)
        else:
            assert machine.next(state, event) == entry
            assert isinstance(machine.next(state, event), machine.states)
            assert code == (0 if outcome == "move" else 1)
            if outcome == "absorb":
                assert entry == state


@every_machine
def test_terminal_states_never_move_and_every_state_is_on_a_way_to_one(machine: Machine[Any, Any]) -> None:
    for state in machine.terminal:
        assert all(machine.outcome(state, event) != "move" for event in machine.events)
    for state in machine.states:
        path(machine, state)  # KeyError: not reachable


def test_tables_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        REQUEST.table[0, 0] = 1


# ---- what the tables mean -------------------------------------------------------------------------------------------


def test_every_branch_reaches_the_ring_through_pre_send_checks() -> None:
    ways_in = [
        (s, e)
        for s, e in pairs(REQUEST)
        if REQUEST.outcome(s, e) == "move" and REQUEST.next(s, e) == RequestState.QUEUED
    ]
    assert ways_in == [(RequestState.PRE_SEND_VALIDATING, RequestEvent.PRE_SEND_VALIDATED)]


def test_request_states_and_events_are_numbered_as_the_wire_of_traces_expects() -> None:
    assert [s.name for s in RequestState] == [
        "RECEIVED", "VALIDATING", "NORMALIZING", "ENCODING", "TOKENIZING", "PRE_SEND_VALIDATING", "QUEUED",
        "STREAMING", "FINALIZING", "COMPLETED", "FAILED", "ABORTED",
    ]  # fmt: skip
    assert [e.name for e in RequestEvent] == [
        "VALIDATED", "NEEDS_NORMALIZE", "ALREADY_TOKENIZED", "HAS_MULTIMODAL", "NEEDS_TOKENIZE", "ENCODE_DONE",
        "TOKENIZE_DONE", "PRE_SEND_VALIDATED", "SCHEDULER_PICKED", "RESULT", "CHUNK", "FINAL_CHUNK",
        "FINAL_FRAME_SENT", "ERROR", "DISCONNECT",
    ]  # fmt: skip


def test_any_live_request_can_fail_and_can_be_left() -> None:
    for state in set(RequestState) - REQUEST.terminal:
        assert REQUEST.next(state, RequestEvent.ERROR) == RequestState.FAILED
        assert REQUEST.next(state, RequestEvent.DISCONNECT) == RequestState.ABORTED


def test_an_abort_in_the_ring_always_stands_behind_its_request_and_alone() -> None:
    took = (AbortEvent.RING_TOOK_REQUEST, AbortEvent.RING_TOOK_ABORT)
    for length in range(1, 6):
        for word in itertools.product(AbortEvent, repeat=length):
            state, on_ring = ABORT.initial, []
            for event in word:
                if ABORT.outcome(state, event) == "illegal":
                    break
                state = ABORT.next(state, event)
                on_ring += [event] if event in took else []
            assert on_ring in ([], [took[0]], list(took))
            if state == AbortState.NOTIFIED:
                assert on_ring == list(took)
            if state == AbortState.CANCELLED_LOCALLY:
                assert on_ring == []


def test_every_abort_source_has_its_own_event() -> None:
    assert set(ABORT_EVENTS) == set(AbortSource)
    assert len(set(ABORT_EVENTS.values())) == len(AbortSource)
    assert all(ABORT_EVENTS[source].name == f"ABORT_{source.name}" for source in AbortSource)


def test_the_ring_table_agrees_with_a_counted_ring() -> None:
    """A ring with numbers in it, capacity 3, walked to every state: the event it names is legal, and the table's next
    state is the ring's own."""

    def name(items: int, stash: bool, producer: bool, consumer: bool) -> RingState:
        fill = "EMPTY" if items == 0 else "FULL" if items == 3 else "PARTIAL"
        end = {(True, True): "OPEN", (False, True): "PRODUCER_GONE", (True, False): "CONSUMER_GONE"}.get(
            (producer, consumer), "CLOSED"
        )
        return RingState[f"{fill}{'_STASHED' if stash else ''}_{end}"]

    start = (0, False, True, True)
    seen, todo, hit = {start}, [start], set()
    while todo:
        items, stash, producer, consumer = todo.pop()
        here = name(items, stash, producer, consumer)
        moves: list[tuple[RingEvent, tuple[int, bool, bool, bool]]] = [
            (RingEvent.CLOSE_PRODUCER, (items, stash, False, consumer)),
            (RingEvent.CLOSE_CONSUMER, (items, stash, producer, False)),
        ]
        for many in (1, 2, 3, 4):
            if not (producer and consumer):
                moves.append((RingEvent.REFUSED_CLOSED, (items, stash, producer, consumer)))
            elif items + many > 3:
                moves.append((RingEvent.REFUSED_FULL, (items, stash, producer, consumer)))
            else:
                event = RingEvent.PUSH_FILLS if items + many == 3 else RingEvent.PUSH
                moves.append((event, (items + many, stash, producer, consumer)))
            taken = min(many, items)
            if taken:
                event = RingEvent.DRAIN_EMPTIES if taken == items else RingEvent.DRAIN
                moves.append((event, (items - taken, False, producer, consumer)))
        if items:
            moves.append((RingEvent.WAIT_HIT, (items, True, producer, consumer)))
        for event, after in moves:
            assert RING.outcome(here, event) != "illegal", (here, event)
            assert RING.next(here, event) == name(*after), (here, event)
            hit.add((here, event))
            if after not in seen:
                seen.add(after)
                todo.append(after)
    legal = {pair for pair in pairs(RING) if RING.outcome(*pair) != "illegal"}
    assert legal - hit == set(), "the table allows what no counted ring does"


def test_a_sink_takes_one_terminal_item_and_nothing_behind_it() -> None:
    writes = [event for event in SINK.events if event.name != "CLOSE"]
    for state in SINK.terminal:
        outcomes = {SINK.outcome(state, event) for event in writes}
        assert outcomes == ({"absorb"} if state.name == "CLOSED" else {"illegal"})


# ---- declarations that must not pass --------------------------------------------------------------------------------


class Light(IntEnum):
    RED = 0
    GREEN = 1
    BROKEN = 2


class Press(IntEnum):
    GO = 0
    HIT = 1


GOOD: list[Rule[Light, Press]] = [
    move(Light.RED, Press.GO, Light.GREEN, "why"),
    move(Light.GREEN, Press.GO, Light.RED, "why"),
    move((Light.RED, Light.GREEN), Press.HIT, Light.BROKEN, "why"),
    absorb(Light.BROKEN, Press.HIT, "why"),
    illegal(Light.BROKEN, Press.GO, "why"),
]


def declare(rules: list[Rule[Light, Press]], **changes: Any) -> Machine[Light, Press]:
    arguments: dict[str, Any] = {"initial": Light.RED, "terminal": {Light.BROKEN}, "rules": rules, **changes}
    return Machine("light", 1, Light, Press, **arguments)


def test_a_good_declaration_passes() -> None:
    assert declare(GOOD).counts() == {"move": 4, "absorb": 1, "illegal": 1}


class Gap(IntEnum):
    RED = 1
    GREEN = 2


def test_every_broken_rule_of_a_declaration_is_caught_and_names_the_pair() -> None:
    bad: dict[str, tuple[list[Rule[Light, Press]], dict[str, Any]]] = {
        r"\(BROKEN, GO\) is not declared": (GOOD[:-1], {}),
        r"\(RED, GO\) is declared twice": ([*GOOD, move(Light.RED, Press.GO, Light.RED, "x")], {}),
        r"\(RED, HIT\) is declared twice": ([*GOOD, illegal(Light.RED, Press.HIT, "x")], {}),
        r"\(BROKEN, GO\) leaves a terminal state": ([*GOOD[:-1], move(Light.BROKEN, Press.GO, Light.RED, "x")], {}),
        r"GREEN is not reachable": ([move(Light.RED, Press.GO, Light.RED, "x"), *GOOD[1:]], {}),
        r"GREEN is a dead end": (
            [
                *GOOD[:1],
                move(Light.GREEN, Press.GO, Light.GREEN, "x"),
                move(Light.RED, Press.HIT, Light.BROKEN, "x"),
                absorb(Light.GREEN, Press.HIT, "x"),
                *GOOD[3:],
            ],
            {},
        ),
        r"no terminal state": (GOOD, {"terminal": ()}),
        r"BROKEN is in 0 groups": (GOOD, {"groups": {"a": (Light.RED, Light.GREEN)}}),
        r"RED is in 2 groups": (GOOD, {"groups": {"a": Light, "b": (Light.RED,)}}),
    }
    for message, (rules, changes) in bad.items():
        with pytest.raises(DeclarationError, match=message):
            declare(rules, **changes)
    with pytest.raises(DeclarationError, match="numbered"):
        Machine("gap", 1, Gap, Press, initial=Gap.RED, terminal={Gap.GREEN}, rules=[])
    with pytest.raises(DeclarationError, match="not a pair of this machine"):
        declare([*GOOD[:-1], illegal(Gap.RED, Press.GO, "x")])  # type: ignore[list-item, arg-type]


@every_machine
def test_removing_or_doubling_any_rule_of_the_real_machines_is_caught(machine: Machine[Any, Any]) -> None:
    def again(rules: list[Rule[Any, Any]]) -> None:
        Machine(
            machine.name, 1, machine.states, machine.events,
            initial=machine.initial, terminal=machine.terminal, rules=rules,
        )  # fmt: skip

    rules = list(machine.rules)
    again(rules)
    for index in range(len(rules)):
        with pytest.raises(DeclarationError, match="is not declared"):
            again(rules[:index] + rules[index + 1 :])
        with pytest.raises(DeclarationError, match="declared twice"):
            again([*rules, rules[index]])


# ---- a whole batch --------------------------------------------------------------------------------------------------


@every_machine
def test_a_batch_over_all_uint8_pairs_equals_the_scalar_reading_or_is_illegal(machine: Machine[Any, Any]) -> None:
    grid_states, grid_events = (g.ravel().astype(np.uint8) for g in np.meshgrid(np.arange(256), np.arange(256)))
    kept = grid_states.copy()
    after, bad = machine.apply_batch(grid_states, grid_events)
    assert (after.dtype, bad.dtype) == (np.uint8, np.bool_)
    assert (grid_states == kept).all()
    legal = {(int(s), int(e)): int(machine.next(s, e)) for s, e in pairs(machine) if machine.outcome(s, e) != "illegal"}
    for s, e, to, wrong in zip(grid_states.tolist(), grid_events.tolist(), after.tolist(), bad.tolist(), strict=True):
        assert (to, wrong) == (legal.get((s, e), s), (s, e) not in legal)
    for event in machine.events:
        one_after, one_bad = machine.apply_batch(grid_states, event)
        two_after, two_bad = machine.apply_batch(grid_states, np.full_like(grid_states, event))
        assert (one_after == two_after).all()
        assert (one_bad == two_bad).all()


def test_a_batch_refuses_what_would_wrap_or_disagree() -> None:
    ok = np.zeros(3, np.uint8)
    with pytest.raises(TypeError, match="int64"):
        REQUEST.apply_batch(np.zeros(3, np.int64), ok)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int64"):
        REQUEST.apply_batch(ok, np.full(3, 256))
    with pytest.raises(ValueError, match="not a uint8"):
        REQUEST.apply_batch(ok, 256)
    with pytest.raises(ValueError, match="not a uint8"):
        REQUEST.apply_batch(ok, -1)
    with pytest.raises(ValueError, match=r"\(3,\) states but \(2,\) events"):
        REQUEST.apply_batch(ok, np.zeros(2, np.uint8))


def test_an_empty_batch_is_an_empty_batch() -> None:
    after, bad = REQUEST.apply_batch(np.zeros(0, np.uint8), RequestEvent.ERROR)
    assert (len(after), len(bad)) == (0, 0)


@given(st.data())
def test_the_rows_of_a_batch_do_not_influence_each_other(data: st.DataObject) -> None:
    rows = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=30)
    batch = data.draw(rows)
    order = data.draw(st.permutations(range(len(batch))))
    states = np.array([s for s, _ in batch], np.uint8)
    events = np.array([e for _, e in batch], np.uint8)
    after, bad = REQUEST.apply_batch(states, events)
    picked = np.array(order, np.intp)
    moved_after, moved_bad = REQUEST.apply_batch(states[picked], events[picked])
    assert (after[picked] == moved_after).all()
    assert (bad[picked] == moved_bad).all()


# ---- lockstep -------------------------------------------------------------------------------------------------------


class Lockstep(RuleBasedStateMachine):
    """The scalar reading, the batch reading, `transitions` and the JSON export step together on the same events."""

    REFERENCES = {name: reference(machine) for name, machine in MACHINES.items()}  # noqa: RUF012
    EXPORTS = {name: json.loads(export(machine, "json")) for name, machine in MACHINES.items()}  # noqa: RUF012

    @initialize(name=st.sampled_from(sorted(MACHINES)), width=st.integers(1, 5))
    def choose(self, name: str, width: int) -> None:
        self.machine = MACHINES[name]
        self.reference = self.REFERENCES[name]
        self.export = self.EXPORTS[name]
        self.scalar = [self.machine.initial] * width
        self.batch = np.full(width, self.machine.initial, np.uint8)
        self.slow = [self.machine.initial.name] * width
        self.json = [self.export["states"].index(self.export["initial"])] * width

    @rule(data=st.data())
    def step_each_its_own(self, data: st.DataObject) -> None:
        members = list(self.machine.events)
        self._step([data.draw(st.sampled_from(members)) for _ in self.scalar], same=False)

    @rule(data=st.data())
    def step_all_the_same(self, data: st.DataObject) -> None:
        self._step([data.draw(st.sampled_from(list(self.machine.events)))] * len(self.scalar), same=True)

    @rule(data=st.data())
    def step_on(self, data: st.DataObject) -> None:
        """Only legal events, so that walks get deep."""
        events = []
        for state in self.scalar:
            legal = [e for e in self.machine.events if self.machine.outcome(state, e) != "illegal"]
            events.append(data.draw(st.sampled_from(legal)))
        self._step(events, same=False)

    def _step(self, events: list[Any], *, same: bool) -> None:
        legal = []
        for row, event in enumerate(events):
            before = self.scalar[row]
            try:
                self.scalar[row] = self.machine.next(before, event)
                legal.append(True)
            except IllegalTransition:
                legal.append(False)
            assert (self.machine.outcome(before, event) != "illegal") is legal[-1]
            self.reference.set_state(self.slow[row])
            try:
                self.reference.trigger(event.name)
                assert legal[-1]
            except transitions.MachineError:
                assert not legal[-1]
            self.slow[row] = self.reference.state
            at, column = self.json[row], self.export["events"].index(event.name)
            assert (self.export["outcomes"][at][column] != 2) is legal[-1]
            if legal[-1]:
                self.json[row] = self.export["table"][at][column]
        self.batch, bad = self.machine.apply_batch(self.batch, events[0] if same else np.array(events, np.uint8))
        assert (~bad).tolist() == legal

    @invariant()
    def all_readings_agree(self) -> None:
        if hasattr(self, "machine"):
            assert self.batch.tolist() == [int(state) for state in self.scalar] == self.json
            assert self.slow == [state.name for state in self.scalar]


TestLockstep = Lockstep.TestCase


@every_machine
def test_the_reference_interpreter_agrees_on_every_pair(machine: Machine[Any, Any]) -> None:
    slow = reference(machine)
    for state, event in pairs(machine):
        slow.set_state(state.name)
        if machine.outcome(state, event) == "illegal":
            with pytest.raises(transitions.MachineError):
                slow.trigger(event.name)
            assert slow.state == state.name
        else:
            slow.trigger(event.name)
            assert slow.state == machine.next(state, event).name
