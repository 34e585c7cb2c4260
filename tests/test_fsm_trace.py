"""Traces: the bounded recorder, its file, and a validator that finds every planted fault."""

from __future__ import annotations

import ast
import contextlib
import json
import threading
from pathlib import Path

import headrace.fsm.validator as validator_module
import pytest
from fsm_helpers import DOWN, UP, steps, stream, to_queue
from headrace.fsm import MACHINES, Trace, TraceError, TraceEvent, to_perfetto, validate
from headrace.fsm.trace import Fill
from hypothesis import given
from hypothesis import strategies as st


def recorded(rows: list[TraceEvent], capacity: int = 1000) -> Trace:
    trace = Trace(capacity)
    for row in rows:
        machine = MACHINES[row.machine]
        states, events = machine.states, machine.events
        trace.record(row.machine, row.rid, states[row.before], events[row.event], states[row.after], row.stage)
    return trace


GOOD = steps(
    *UP,
    "sink a PUT",
    *to_queue("a"),
    "abort a RING_TOOK_REQUEST",
    "ring ingress PUSH",
    "ring ingress WAIT_HIT",
    "ring ingress DRAIN_EMPTIES",
    *to_queue("b")[:3],
    "abort b ABORT_GUARD",
    "request b DISCONNECT",
    "request b TOKENIZE_DONE",
    *to_queue("c"),
    "abort c RING_TOOK_REQUEST",
    *stream("a"),
    "sink a PUT_FINAL",
    "abort a FINISHED",
    *stream("c", ["SCHEDULER_PICKED", "CHUNK"]),
    "abort c ABORT_DETOK",
    "request c ERROR",
    "abort c RING_FULL",
    "abort c RING_TOOK_ABORT",
    "request c CHUNK",
    *DOWN,
)


def test_a_conforming_trace_has_no_violations() -> None:
    assert validate(GOOD) == []
    assert validate(recorded(GOOD)) == []


FAULTS: dict[str, list[str]] = {
    "initial": ["request r VALIDATING NEEDS_NORMALIZE NORMALIZING"],
    "chain": ["request r VALIDATED", "request r RECEIVED VALIDATED VALIDATING"],
    "table": ["request r RECEIVED VALIDATED QUEUED"],
    "table ": ["request r RECEIVED CHUNK RECEIVED"],
    "one_terminal": [
        "request r ERROR",
        "request r QUEUED ERROR FAILED",
    ],
    "checks_before_queue": [*to_queue("r"), "request r PRE_SEND_VALIDATING PRE_SEND_VALIDATED QUEUED"],
    "registration_before_ring": ["abort r RING_TOOK_REQUEST", *to_queue("r")],
    "abort_after_request": ["abort r REQUESTED RING_TOOK_ABORT NOTIFIED"],
    "one_abort": [
        *to_queue("r"),
        "abort r RING_TOOK_REQUEST",
        "abort r ABORT_API",
        "abort r RING_TOOK_ABORT",
        "abort r REQUESTED RING_TOOK_ABORT NOTIFIED",
    ],
    "no_abort_after_final": [
        *to_queue("r"),
        "abort r RING_TOOK_REQUEST",
        *stream("r", ["SCHEDULER_PICKED", "FINAL_CHUNK"]),
        "abort r ABORT_GUARD",
        "abort r RING_TOOK_ABORT",
    ],
    "before_start": ["lifecycle m START", "request r VALIDATED"],
    "after_stop": [*to_queue("r"), *UP, *DOWN, "request r ERROR"],
    "unfinished": [*UP, *to_queue("r"), *DOWN],
    "unfinished ": [*UP, "sink r PUT", *DOWN],
    "terminals_agree": [
        *UP,
        *to_queue("r"),
        "abort r RING_TOOK_REQUEST",
        *stream("r"),
        "abort r ABORT_GUARD",
        "abort r RING_CLOSED",
        *DOWN,
    ],
    "output_without_ring": [*UP, *to_queue("r"), *stream("r"), "abort r FINISHED", *DOWN],
}


@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: rule.replace(" ", "_2"))
def test_every_broken_rule_is_found_and_named_with_its_context(rule: str) -> None:
    found = validate(recorded(steps(*FAULTS[rule])))
    assert rule.strip() in {violation.rule for violation in found}
    assert all(violation.rid in ("r", "m") for violation in found)
    first = next(violation for violation in found if violation.rule == rule.strip())
    assert first.context[-1].rid == first.rid
    assert rule.strip() in str(first)
    assert first.context[-1].event in str(first)


def test_a_lost_record_and_a_foreign_name_are_found() -> None:
    assert {v.rule for v in validate([row for row in GOOD if row.seq != 5])} >= {"sequence", "chain"}
    strange = TraceEvent(0, "turnstile", "r", "A", "B", "C", "x")
    assert [v.rule for v in validate([strange])] == ["unknown"]
    assert [v.rule for v in validate([strange._replace(machine="sink")])] == ["unknown"]


def test_every_rule_in_the_validators_list_is_broken_by_a_test() -> None:
    tree = ast.parse(Path(validator_module.__file__).read_text())
    said = {
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, "attr", getattr(call.func, "id", "")) in ("_say", "say")
        and isinstance(call.args[0], ast.Constant)
    }
    assert said == {rule.strip() for rule in FAULTS} | {"sequence", "unknown"}
    documented = validator_module.__doc__ or ""
    assert all(f"`{rule}`" in documented for rule in said)


def test_the_validator_shares_no_code_with_the_runtime() -> None:
    tree = ast.parse(Path(validator_module.__file__).read_text())
    inside = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
    assert inside == {"trace"}
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not called & {"next", "outcome", "apply_batch"}


def test_changing_any_one_step_of_a_good_trace_is_noticed() -> None:
    for row in GOOD:
        machine = MACHINES[row.machine]
        for state in machine.states:
            if state.name != row.after:
                changed = [row._replace(after=state.name) if other is row else other for other in GOOD]
                assert validate(changed), (row, state)


def test_an_unended_trace_may_have_live_requests() -> None:
    rows = steps(*UP, *to_queue("r"))
    assert validate(rows) == []
    assert {v.rule for v in validate(rows, ended=True)} == {"unfinished"}


# ---- the buffer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_full_trace_keeps_the_beginning_and_says_so(extra: int) -> None:
    trace = recorded(GOOD, capacity=len(GOOD) - extra)
    assert (len(trace), trace.dropped) == (min(len(GOOD), len(GOOD) - extra), max(0, extra))
    assert trace.full is (extra > 0)
    assert validate(trace) == []
    assert json.loads(list(trace.lines())[-1]) == {"end": True, "events": len(trace), "dropped": trace.dropped}
    trace.record("request", "late", 0, 0, 1, "x")
    trace.record_many("request", ["x", "y"], [0, 0], 0, [1, 1], "x")
    trace.record_fill("ingress", 3)
    assert len(trace) == len(GOOD) - extra if extra >= 0 else len(GOOD) + 1


def test_many_records_under_one_lock_are_the_same_records() -> None:
    one, many = Trace(), Trace()
    for rid in "abc":
        one.record("sink", rid, 0, 0, 0, "shard")
    many.record_many("sink", list("abc"), [0, 0, 0], 0, [0, 0, 0], "shard")
    assert list(one) == list(many)
    small = Trace(2)
    small.record_many("sink", list("abc"), [0, 0, 0], 0, [0, 0, 0], "shard")
    assert (len(small), small.dropped) == (2, 1)


def test_records_of_several_threads_are_all_there_and_in_each_threads_order() -> None:
    trace = Trace(10_000)
    barrier = threading.Barrier(4)

    def work(rid: str) -> None:
        barrier.wait()
        for _ in range(500):
            trace.record("sink", rid, 0, 0, 0, "shard")

    threads = [threading.Thread(target=work, args=(f"r{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = list(trace)
    assert [row.seq for row in rows] == list(range(2000))
    assert validate(trace) == []


def test_a_trace_file_reads_back_as_it_was(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    trace = Trace(clock=lambda: float(next(ticks)))
    trace.record("request", "ä\n\u2028", 0, 0, 1, "ingress")
    trace.record_fill("ingress", 7)
    trace.record("nonsense", "r", 3, 4, 5, "x")
    trace.write(tmp_path / "t.jsonl")
    again = Trace.read(tmp_path / "t.jsonl")
    assert list(again) == list(trace)
    assert isinstance(list(again)[1], Fill)
    assert (again.ended, again.full) == (True, False)
    assert list(again.lines()) == list(trace.lines())
    assert [v.rule for v in validate(again)] == ["unknown"]


def test_a_cut_file_reads_as_cut(tmp_path: Path) -> None:
    lines = list(recorded(GOOD).lines())
    again = Trace.parse(lines[:-1])
    assert not again.ended
    assert validate(again) == []
    live = Trace.parse([*recorded(steps(*FAULTS["unfinished"])).lines()][:-1])
    assert validate(live) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: the file is empty"),
        (["x"], "line 1: not JSON"),
        (["[" * 100_000], "line 1: not JSON"),
        (["[]"], "line 1: not an object"),
        (["{}"], "line 1: not a headrace trace"),
        (['{"trace": "headrace", "version": 1, "machines": {"request": 2}}'], "request/2 is not the known"),
        (['{"trace": "headrace", "version": 1}', '{"seq": 0}'], "line 2: machine, rid"),
        (['{"trace": "headrace", "version": 1}', '{"seq": "0"}'], "line 2: seq"),
        (['{"trace": "headrace", "version": 1}', '{"seq": 0, "ring": 1, "fill": 1}'], "line 2: ring or fill"),
        (['{"trace": "headrace", "version": 1}', '{"end": true, "events": 1, "dropped": 0}'], "line 2: the end counts"),
        (['{"trace": "headrace", "version": 1}', '{"end": true, "events": 0, "dropped": 0}', "{}"], "line 3: something"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_with_the_line(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Trace.parse(lines)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="not UTF-8"):
        Trace.read(tmp_path / "t")


@given(st.lists(st.text(max_size=20)))
def test_no_lines_of_text_raise_anything_but_a_trace_error(lines: list[str]) -> None:
    with contextlib.suppress(TraceError):
        Trace.parse(['{"trace": "headrace", "version": 1}', *lines])


# ---- for a trace viewer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [False, True])
def test_perfetto_has_a_track_per_request_with_its_states_and_one_per_ring_with_its_fill(timed: bool) -> None:
    ticks = iter(range(10, 10_000))
    trace = Trace(clock=(lambda: next(ticks) / 1000) if timed else None)
    for row in GOOD:
        machine = MACHINES[row.machine]
        states, events = machine.states, machine.events
        trace.record(row.machine, row.rid, states[row.before], events[row.event], states[row.after], row.stage)
        trace.record_fill("ingress", row.seq)
    drawn = json.loads(to_perfetto(trace))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in drawn if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(names.values()) == ["a", "b", "c", "ingress", "m"]
    slices = [e for e in drawn if e["ph"] == "X"]
    for rid in "abc":
        mine = [e for e in slices if names[e["pid"], e["tid"]] == rid]
        moves = [row for row in GOOD if row.rid == rid and row.machine == "request" and row.before != row.after]
        assert [e["name"] for e in mine] == ["RECEIVED", *(row.after for row in moves)]
        ends = [e["ts"] + e["dur"] for e in mine]
        assert [e["ts"] for e in mine[1:]] == pytest.approx(ends[:-1])
    assert [e["args"]["items"] for e in drawn if e["ph"] == "C"] == list(range(len(GOOD)))
    marks = [e["name"] for e in drawn if e["ph"] == "i"]
    assert "abort: RING_TOOK_ABORT" in marks
    assert all(e["dur"] >= 0 for e in slices)
    assert to_perfetto([])
