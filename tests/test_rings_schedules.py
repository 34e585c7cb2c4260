"""Every schedule of the rings, channels, bells and sinks in small scenarios: no deadlock, no lost wake-up, no wrong order, no
unguarded touch. Each scenario runs to `complete=true`, with one wake-up for no reason; the counts are pinned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interleave_helpers import CHANNEL_SCENARIOS, SINK_SCENARIOS, ring_scenarios

from headrace.runtime.interleave import Scenario, explore, sample

# scenario: (states, schedules that ran to an end). A change here needs its reason in the commit.
PINNED: dict[str, tuple[int, int]] = {}

SCENARIOS: dict[str, Scenario] = {**ring_scenarios(), **CHANNEL_SCENARIOS, **SINK_SCENARIOS}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_schedule_keeps_to_the_specification(name: str) -> None:
    report = explore(SCENARIOS[name], spurious=1)
    print(report)
    report.check()
    assert (report.states, report.schedules) == PINNED[name]


def test_the_pins_are_of_these_scenarios() -> None:
    assert set(PINNED) == set(SCENARIOS)


def test_six_threads_on_one_ring_are_sampled_and_the_report_does_not_claim_completeness() -> None:
    from interleave_helpers import RingModel, calls, egress

    threads = {f"p{at}": calls(f"push {letter}", f"push {letter.upper()}") for at, letter in enumerate("abcd")}
    threads["c"] = calls(*["wait", "drain 1"] * 8)
    threads["x"] = calls("after p0 p1 p2 p3", "close_producer")
    report = sample(Scenario("six threads", egress(2), threads, RingModel(2)), schedules=300, seed=5)
    print(report)
    report.check()
    assert report.schedules == 300
    assert not report.complete
