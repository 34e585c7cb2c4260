"""The simulation catches each planted fault within a few seeds, replays it from its seed, and shrinks it to a short script."""

import io

import pytest
import sim_helpers as bad
from headrace.runtime import Simulation
from headrace.runtime import simulate as module
from headrace.runtime.pipeline import Pipeline
from headrace.runtime.sim_parts import SimOptions
from headrace.runtime.simulate import campaign, lines, replayed, simulate

PLANTED = {
    "abort sent before its request": (bad.AbortBeforeRequest, ("property 5",)),
    "deregister before registered": (bad.AbortOvertakesRegistration, ("property 5",)),
    "registered after the push": (bad.RegisteredLate, ("property 8", "property 5", "property 9")),
    "terminal sent twice": (bad.TerminalTwice, ("IllegalTransition",)),
    "frame delivered half": (bad.HalfFrame, ("property 8", "property 9")),
    "abort dropped on a full ring": (bad.AbortDroppedWhenFull, ("property 5",)),
    "stash dropped": (bad.StashDropped, ("property 9", "property 5", "property 10")),
    "malformed frame swallowed": (bad.RejectionSwallowed, ("property 6",)),
    "malformed frame fails everybody": (bad.EverybodyFails, ("property 7", "property 6")),
    "prompt cut silently": (bad.PromptCutSilently, ("property 3",)),
    "room is not told": (bad.RoomNotTold, ("property 9", "property 11")),
    "reader is not woken": (bad.ReaderNotWoken, ("property 10",)),
    "slot not given back": (bad.SlotLeaked, ("property 4", "property 9")),
    "two requests get each other's chunks": (bad.CrossTalk, ("property 2",)),
    "columns crossed": (bad.ColumnsCrossed, ("property 2",)),
    "a chunk is lost": (bad.ChunkLost, ("property 2",)),
    "batch torn apart": (bad.GroupTornApart, ("property 9", "property 5")),
}
BUSY = SimOptions(ring_in=1, scheduler=2, abort=20, leave=5, clients=8, channel=64, ring_out=16)
"""A ring of one place, a slow scheduler and many aborts: what a lost wake-up of ingress needs."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_caught_within_a_few_seeds(name: str) -> None:
    pipeline, says = PLANTED[name]
    options = BUSY if name == "room is not told" else None
    for seed in range(60):
        report = Simulation(seed, options, pipeline=pipeline).run(800)
        if report.failure is not None:
            assert report.failure.startswith(says), report.failure
            assert Simulation(seed, options, pipeline=pipeline).run(800) == report
            return
    pytest.fail("60 seeds did not find it")


def test_a_failure_prints_the_command_that_replays_it_and_a_script_shorter_than_the_run() -> None:
    suite = campaign(range(60), 800, pipeline=bad.AbortBeforeRequest)
    report = suite.failed
    assert report is not None
    assert report.command == f"headrace simulate --seed {report.seed} --steps 800"
    assert any(report.command in line for line in lines(report))
    assert 0 < len(report.script) <= 12, report.script
    again = replayed(report.seed, report.script, pipeline=bad.AbortBeforeRequest)
    assert again.failure is not None
    assert again.failure.startswith("property 5")
    assert replayed(report.seed, report.script).failure is None


def test_the_command_of_a_failing_run_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "simulate", lambda seed, steps: simulate(seed, steps, pipeline=bad.AbortBeforeRequest))
    out = io.StringIO()
    assert module.run_command(0, 800, 30, out) == 1
    assert "replay: headrace simulate --seed" in out.getvalue()


def test_the_shipped_pipeline_is_not_blamed() -> None:
    assert campaign(range(3), 300, pipeline=Pipeline).failed is None
