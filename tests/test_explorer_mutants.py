"""The explorer catches each known-bad pipeline, with a counterexample that replays to the same failure."""

from functools import partial

import pytest
import sim_helpers as bad
from headrace.runtime.checks import explored
from headrace.runtime.explorer import replay
from headrace.runtime.explorer_world import Setup, SmallWorld
from headrace.runtime.pipeline import Pipeline

ABORT = Setup(name="abort", requests=("stream", "stream"), abort=(0, "GUARD"))
ONE = Setup(name="one", requests=("stream",), abort=(0, "API"))
TWO = Setup(name="two", requests=("stream", "stream"))

PLANTED = {
    "abort sent before its request": (bad.AbortBeforeRequest, ONE, "property 5"),
    "deregister before registered": (bad.AbortOvertakesRegistration, ONE, "property 5"),
    "registered after the push": (bad.RegisteredLate, ONE, "property 8"),
    "terminal sent twice": (bad.TerminalTwice, TWO, "IllegalTransition"),
    "frame delivered half": (bad.HalfFrame, TWO, "property"),
    "abort dropped on a full ring": (bad.AbortDroppedWhenFull, ABORT, "property 5"),
    "stash dropped": (bad.StashDropped, TWO, "property 9"),
    "shutdown forgets a parked producer": (
        bad.ProducerForgotten,
        Setup(name="parked", requests=("stream",), shutdown=True),
        "property 10",
    ),
    "malformed frame swallowed": (
        bad.RejectionSwallowed,
        Setup(name="malformed", requests=("stream",), fault="malformed"),
        "property 6",
    ),
    "malformed frame fails everybody": (
        bad.EverybodyFails,
        Setup(name="malformed", requests=("stream", "stream"), fault="malformed"),
        "property 7",
    ),
    "slot not given back": (bad.SlotLeaked, ONE, "property"),
    "batch torn apart": (
        bad.GroupTornApart,
        Setup(name="batch", requests=("stream", "stream"), batch=True, ring_in=2),
        "property 9",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_with_a_script_that_replays(name: str) -> None:
    pipeline, setup, says = PLANTED[name]
    result = explored(setup, pipeline)
    assert result.failure is not None, result.lines()
    assert says in result.failure
    assert not result.complete
    assert len(result.script) < 40
    with pytest.raises(Exception, match=r".") as raised:
        replay(partial(SmallWorld, setup, pipeline), result.script)
    assert str(raised.value) in result.failure


def test_the_shipped_pipeline_passes_where_the_planted_faults_were_found() -> None:
    for setup in (ONE, TWO):
        result = explored(setup, Pipeline)
        assert result.failure is None, result.lines()
        assert result.complete
