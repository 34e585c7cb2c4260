"""Simulated runs of the shipped pipeline: nothing breaks, everything that must sometimes happen happens, a run replays itself."""

import io
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from headrace.fsm import validate
from headrace.runtime import Simulation
from headrace.runtime.simulate import SOMETIMES, Suite, campaign, lines, run_command

DEEP = os.environ.get("HEADRACE_PROFILE") == "deep"
REQUESTS = 200_000 if DEEP else 20_000
WORKERS = 2


def part(which: int) -> Suite:
    """A share of the campaign: its own seeds, its share of the requests."""
    return campaign(range(which, 1 << 30, WORKERS), requests=REQUESTS // WORKERS)


@pytest.mark.timeout(1800 if DEEP else 600)
def test_twenty_thousand_simulated_requests_break_no_property_and_reach_every_sometimes() -> None:
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        suites = list(pool.map(part, range(WORKERS)))
    for suite in suites:
        print(f"simulation: complete=true runs={suite.runs} requests={suite.requests} {suite.seconds:.1f} s")
        assert suite.failed is None, "\n".join(lines(suite.failed))
    assert sum(suite.requests for suite in suites) >= REQUESTS
    never = [name for name in SOMETIMES if not any(suite.seen.get(name) for suite in suites)]
    assert not never, f"these never happened: {never}"


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_a_seed_says_everything_about_its_run(seed: int) -> None:
    first, second = Simulation(seed), Simulation(seed)
    assert first.run(500) == second.run(500)
    assert first.actions == second.actions
    assert list(first.trace) == list(second.trace)


def test_the_recorded_actions_are_the_run() -> None:
    first = Simulation(5)
    report = first.run(400)
    again = Simulation(5).run(400, actions=first.actions)
    assert again == report


def test_the_trace_of_a_run_conforms_and_is_not_empty() -> None:
    run = Simulation(1)
    assert run.run(400).failure is None
    assert len(list(run.trace)) > 200
    assert validate(run.trace) == []


def test_options_switch_some_faults_off_in_each_run_and_none_in_all_runs() -> None:
    drawn = [Simulation(seed).options for seed in range(120)]
    for name in ("leave", "abort", "batch", "control", "decode", "die", "shutdown", "wild", "raising", "stall"):
        on = sum(bool(getattr(options, name)) for options in drawn)
        assert 0 < on < len(drawn), name


def test_the_command_says_what_it_did_and_that_all_held() -> None:
    out = io.StringIO()
    assert run_command(3, 300, 1, out) == 0
    assert out.getvalue().startswith("seed 3, 300 steps, ")
    assert "all properties held" in out.getvalue()
