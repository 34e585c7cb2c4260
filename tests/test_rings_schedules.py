"""Every schedule of the rings, channels, bells and sinks in small scenarios: no deadlock, no lost wake-up, no wrong order, no
unguarded touch. Each scenario runs to `complete=true`, with one wake-up for no reason; the counts are pinned."""

from __future__ import annotations

import pytest
from headrace.runtime.interleave import Scenario, explore, sample
from interleave_helpers import RingModel, calls, channel_scenarios, egress, ring_scenarios, sink_scenarios

# scenario: (states, schedules that ran to an end). A change here needs its reason in the commit.
PINNED: dict[str, tuple[int, int]] = {
    "producer closes at any time": (98, 61),
    "consumer closes at any time": (398, 296),
    "both close at any time": (24, 13),
    "close only after all puts": (316, 22),
    "parked producers and one close": (327, 308),
    "two waiters, one arrival": (39, 34),
    "two waiters, one close": (28, 30),
    "two producers, two consumers": (1509, 656),
    "timeouts": (139, 104),
    "bytes": (46, 14),
    "one drain makes room for two": (390, 208),
    "many or none": (132, 82),
    "ingress: the manager closes after its pushes": (155, 80),
    "a driver waits on two sources": (1276, 516),
    "sources close at any time": (868, 374),
    "sources close only after all puts": (1253, 337),
    "a gated producer hears of room": (863, 188),
    "a driver's wait runs out of time": (365, 276),
    "a parked reader is woken by each step": (46, 34),
    "a reader's wait runs out of time": (29, 21),
    "the client leaves while it is parked": (71, 73),
    "a stage dies while the client is parked": (55, 59),
}

SCENARIOS: dict[str, Scenario] = {**ring_scenarios(), **channel_scenarios(), **sink_scenarios()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_schedule_keeps_to_the_specification(name: str) -> None:
    report = explore(SCENARIOS[name], spurious=1)
    print(report)
    report.check()
    assert (report.states, report.schedules) == PINNED[name]


def test_the_pins_are_of_these_scenarios() -> None:
    assert set(PINNED) == set(SCENARIOS)


def test_six_threads_on_one_ring_are_sampled_and_the_report_does_not_claim_completeness() -> None:
    threads = {f"p{at}": calls(f"push {letter}", f"push {letter.upper()}") for at, letter in enumerate("abcd")}
    threads["c"] = calls(*["wait", "drain 1"] * 8)
    threads["x"] = calls("after p0 p1 p2 p3", "close_producer")
    report = sample(Scenario("six threads", egress(2), threads, RingModel(2)), schedules=300, seed=5)
    print(report)
    report.check()
    assert report.schedules == 300
    assert not report.complete
