"""Every interleaving of every small configuration of the shipped stages: nothing breaks, nothing is cut, the counts are known."""

import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
from headrace.fsm import formal
from headrace.runtime import checks
from headrace.runtime.checks import DEEP, STATES, explored, run_command, tables
from headrace.runtime.explorer import Result
from headrace.runtime.explorer_world import Setup

ALL = {**STATES, **(DEEP if os.environ.get("HEADRACE_PROFILE") == "deep" else {})}
AUDITED = ("chunk for control", "decode, abort", "tokenizer raises", "batch, tokenizer raises", "control, abort")


@pytest.fixture(scope="module")
def searches() -> Iterator[dict[Setup, Future[Result]]]:
    """All searches, on two processes; the longest first, so that none of them is waited for alone."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield {setup: pool.submit(explored, setup) for setup in sorted(ALL, key=ALL.__getitem__, reverse=True)}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setup", ALL, ids=lambda setup: setup.name)
def test_every_interleaving_holds_and_the_number_of_states_is_known(
    setup: Setup, searches: dict[Setup, Future[Result]]
) -> None:
    result = searches[setup].result()
    print(result.lines()[0])
    assert result.failure is None, "\n".join(result.lines())
    assert result.complete
    assert result.states == ALL[setup], f"{result.lines()[0]}: a count changes only with a reason in the commit"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setup", [s for s in STATES if s.name in AUDITED], ids=lambda setup: setup.name)
def test_states_with_equal_keys_behave_equally(setup: Setup) -> None:
    result = explored(setup, audit=True)
    assert result.complete, result.lines()
    assert result.states == STATES[setup]


def test_there_is_a_configuration_for_each_kind_fault_and_end() -> None:
    kinds = {request for setup in STATES for request in setup.requests}
    assert kinds == {"stream", "whole", "text", "raising", "control", "decode"}
    faults = {setup.fault for setup in STATES}
    assert faults == {None, "malformed", "malformed_list", "duplicate", "error", "bad_id", "die", "wrong"}
    assert {setup.abort[1] for setup in STATES if setup.abort} == {"GUARD", "API"}
    assert any(setup.shutdown for setup in STATES)
    assert any(setup.shards == 2 for setup in STATES)
    assert any(setup.batch for setup in STATES)
    assert all(setup.ring_in == 1 or setup.batch for setup in STATES)


def test_names_are_distinct_because_a_report_names_them() -> None:
    names = [setup.name for setup in {**STATES, **DEEP}]
    assert len(set(names)) == len(names)


def test_the_command_checks_tables_and_worlds_and_ends_with_0() -> None:
    out = io.StringIO()
    assert run_command(out, only="chunk for control") == 0
    text = out.getvalue()
    assert text.count("table ") == len(tables()) == 5
    assert "chunk for control: complete=true" in text
    assert text.endswith("all hold: true\n")


def test_a_count_that_changed_ends_the_command_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    small = next(setup for setup in STATES if setup.name == "chunk for control")
    monkeypatch.setitem(STATES, small, 1)
    out = io.StringIO()
    assert run_command(out, only=small.name) == 1
    assert "a count changes only with a reason" in out.getvalue()


def test_formal_models_are_run_by_their_own_module_and_their_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(formal, "missing", lambda: "SPIN is needed")
    assert checks.run_command(out, only="no such", formal=True) == 0
    assert "formal models: not run: SPIN is needed" in out.getvalue()
    monkeypatch.setattr(formal, "missing", lambda: None)
    assert checks.run_command(out, only="no such", formal=True) == 0
    assert "none has 'no such' in its name" in out.getvalue()
    asked: list[dict[str, Any]] = []

    def run_formal(**given: Any) -> list[Any]:
        asked.append(given)
        return [SimpleNamespace(ok=given["bounds"] != {"N": 9})]

    monkeypatch.setattr(formal, "run_formal", run_formal)
    chosen = {"only": "ring", "formal": True, "mutants": True}
    monkeypatch.setattr(checks, "STATES", {})
    assert checks.run_command(out, **chosen, bounds={"N": 3}) == 0
    assert checks.run_command(out, **chosen, bounds={"N": 9}) == 1
    assert [(g["only"], g["mutants"], g["bounds"]) for g in asked] == [
        ("ring", True, {"N": 3}),
        ("ring", True, {"N": 9}),
    ]


def test_bounds_are_read_and_refused_by_name() -> None:
    assert checks.bounds_of(["N=3", "RING=1"]) == {"N": 3, "RING": 1}
    for wrong in ("N", "N=", "n=3", "N=three", "=3"):
        with pytest.raises(ValueError, match="NAME=NUMBER"):
            checks.bounds_of([wrong])
