"""The formal models hold at their stated sizes, with the pinned number of states; every mutant of them fails.

Needs SPIN and gcc; without them the tests skip and say how to get them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import headrace.specs
import pytest
from fsm_helpers import ALL
from headrace.fsm import Machine, export, formal

NEEDS_SPIN = pytest.mark.skipif(formal.missing() is not None, reason=formal.HOW_TO_GET)
FOLDER = Path(headrace.specs.__file__).parent / "promela"
MODELS = ("ring", "request", "abort")
# The request model is the large one: `python -m headrace.fsm.formal --mutants` runs all of it in CI.
SIZED = ("ring", pytest.param("request", marks=pytest.mark.slow), "abort")


def _failures(results: list[formal.Result]) -> list[str]:
    return [line for result in results if not result.ok for line in result.lines()]


@NEEDS_SPIN
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", SIZED)
def test_the_model_holds_in_a_complete_search_of_the_pinned_size(model: str) -> None:
    results = formal.run_formal(only=f"{model}/", report=None)
    assert _failures(results) == []
    assert all(result.complete and result.states == result.job.states for result in results)


@NEEDS_SPIN
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", SIZED)
def test_every_mutant_of_the_model_fails_as_named_and_its_sometimes_conditions_occur(model: str) -> None:
    results = [
        result
        for word in ("mutant", "reach")
        if any(job.name.startswith(f"{model}/{word}") for job in formal.jobs(mutants=True))
        for result in formal.run_formal(only=f"{model}/{word}", mutants=True, report=None)
    ]
    assert results
    assert _failures(results) == []
    assert all(result.trail for result in results)


@NEEDS_SPIN
@pytest.mark.parametrize("machine", ALL, ids=lambda m: m.name)
def test_spin_and_a_python_search_count_the_same_states_of_the_same_table(
    machine: Machine[Any, Any], tmp_path: Path
) -> None:
    """All walks of at most six events: (steps, state, absorbed, illegal)."""
    name, length = machine.name.upper(), 6
    choices = " ".join(f":: ev = {event.value}" for event in machine.events)
    (tmp_path / "walk.pml").write_text(
        export(machine, "promela")
        + f"byte s = {int(machine.initial)}, n, absorbed, illegal;\nhidden byte ev, oc;\n"
        + f"init {{ atomic {{ {name}_tables() }};\nend: do :: atomic {{ n < {length} -> n++; if {choices} fi;\n"
        + f"{name}_step(s, ev, oc); if :: oc == 1 -> absorbed++ :: oc == 2 -> illegal++ :: else fi;\n"
        # read as well as written, or SPIN leaves the counters out of the state
        + "assert(absorbed + illegal <= n) } od }\n"
    )
    subprocess.run(["spin", "-a", "walk.pml"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["gcc", "-w", "-DSAFETY", "-o", "pan", "pan.c"], cwd=tmp_path, check=True, capture_output=True)
    out = subprocess.run(["./pan"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    seen = {(0, machine.initial, 0, 0)}
    todo = list(seen)
    for n, state, absorbed, illegal in todo:
        for event in machine.events if n < length else ():
            outcome = machine.outcome(state, event)
            to = machine.next(state, event) if outcome != "illegal" else state
            after = (n + 1, to, absorbed + (outcome == "absorb"), illegal + (outcome == "illegal"))
            if after not in seen:
                seen.add(after)
                todo.append(after)
    stored = re.search(r"(\d+) states, stored", out)
    assert stored is not None
    assert "errors: 0" in out
    assert int(stored[1]) == len(seen) + 1  # and the state before the tables are filled


@NEEDS_SPIN
def test_a_violation_is_told_in_the_words_of_the_machines() -> None:
    [result] = formal.run_formal(only="abort/mutant_overtakes", mutants=True, report=None)
    assert any(re.search(r"abort 0: NOT_PUSHED --ABORT_\w+--> CANCELLED_LOCALLY", line) for line in result.trail)
    assert not any("@" in line for line in result.trail)


@NEEDS_SPIN
def test_another_bound_searches_another_size_and_a_changed_count_is_noticed() -> None:
    said: list[str] = []
    [result] = formal.run_formal(only="abort/open", bounds={"CAPACITY": 1}, report=said.append)
    assert result.ok
    assert result.states != next(job.states for job in formal.jobs() if job.name == "abort/open")
    assert "CAPACITY=1" in said[0]
    assert "complete=true" in said[0]
    job = next(job for job in formal.jobs() if job.name == "abort/open")
    off = formal.verify(formal.Job(job.name, job.model, job.says, bounds=job.bounds, flags=job.flags, states=1))
    assert not off.ok
    assert "are pinned" in off.note


@NEEDS_SPIN
def test_a_search_that_was_cut_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formal, "DEPTH", 20)
    job = next(job for job in formal.jobs() if job.name == "abort/open")
    result = formal.verify(job)
    assert not result.complete
    assert not result.holds
    assert not result.ok


def test_without_spin_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert formal.missing() is not None
    with pytest.raises(formal.FormalUnavailable, match="apt-get install spin"):
        formal.run_formal(report=None)
    assert formal.main([]) == 2


def test_a_name_or_bound_that_does_not_exist_is_refused() -> None:
    if formal.missing() is None:
        with pytest.raises(ValueError, match="nonsense"):
            formal.run_formal(only="nonsense", report=None)
    with pytest.raises(SystemExit):
        formal.main(["--bound", "N=x"])


def test_every_mutant_in_the_models_is_run_and_every_run_has_one() -> None:
    """A mutant that the list forgot proves nothing; a property that no mutant breaks may be vacuous."""
    everything = formal.jobs(mutants=True, deep=True)
    for model in MODELS:
        text = (FOLDER / f"{model}.pml").read_text()
        written = set(re.findall(r"\b((?:MUTANT|REACH)_\w+)", text))
        listed = {job.flags[-1] for job in everything if job.model == model and job.kind != "run"}
        assert listed == written
        claims = set(re.findall(r"ifdef LTL_(\w+)", text))
        assert {job.ltl for job in everything if job.model == model and job.ltl and job.kind == "run"} == claims
        assert {job.ltl for job in everything if job.model == model and job.ltl and job.kind == "mutant"} == claims


def test_the_transition_relations_in_the_models_are_generated() -> None:
    for model in MODELS:
        text = (FOLDER / f"{model}.pml").read_text()
        assert '#include "machines.pml"' in text
        # A machine's state variable is written by its generated step and nowhere else.
        for variable in {"ring": ["rs"], "abort": ["ab"], "request": ["rq", "ab", "sk", "lc"]}[model]:
            assert re.findall(rf"\b{variable}(?:\[\w+\])?\s*=[^=]", text) == []
    assert "REQUEST_step" in formal.machines_pml()
