"""The kill matrix: each known fault is seen by the layer named for it, in the smallest scenario that shows it.

Layers: `guard` (unguarded touch), `sleep` (all schedules: a deadlock or lost wake-up), `order` (all schedules: no order of the calls
explains what they returned), `model` (Hypothesis against the model).
"""

from __future__ import annotations

from typing import Any

import interleave_faulty as faulty
import pytest
from headrace.runtime.channel import Bell, Channel
from headrace.runtime.interleave import ScheduleFailure, explore, replay
from headrace.runtime.sink import Sink
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from interleave_helpers import channel_scenarios, ring_scenarios, sink_scenarios
from test_rings_stateful import IngressMachine, RingMachine

KINDS = {"guard": {"unguarded"}, "sleep": {"asleep", "deadlock"}, "order": {"order"}}


def _name(part: Any) -> str:
    return str(getattr(part, "__name__", part))


RINGS: list[tuple[type[Any], str, str]] = [
    (faulty.LostWakeUp, "sleep", "close only after all puts"),
    (faulty.OneCondition, "sleep", "two producers, two consumers"),
    (faulty.NotifyAtClose, "sleep", "two waiters, one close"),
    (faulty.CloseForgetsProducers, "sleep", "parked producers and one close"),
    (faulty.CheckOutsideTheLock, "guard", "producer closes at any time"),
    (faulty.IfInsteadOfWhile, "order", "producer closes at any time"),
    (faulty.DropWhenFull, "order", "close only after all puts"),
    (faulty.DrainWakesOne, "sleep", "one drain makes room for two"),
    (faulty.LostStash, "model", "egress"),
    (faulty.Reorder, "model", "egress"),
    (faulty.HalfABatch, "model", "ingress"),
    (faulty.BytesNotGivenBack, "model", "egress"),
    (faulty.EmptyIsFree, "model", "egress"),
    (faulty.TimeoutAccepts, "model", "egress"),
    (faulty.MoreThanAsked, "model", "egress"),
]


@pytest.mark.parametrize(("core", "layer", "where"), [row for row in RINGS if row[1] != "model"], ids=_name)
def test_every_schedule_finds_the_faulty_ring_and_its_string_finds_it_again(core: Any, layer: str, where: str) -> None:
    scenario = ring_scenarios(core)[where]
    report = explore(scenario, spurious=1)
    assert report.failure is not None, f"the {layer} layer stays green: {report}"
    assert report.failure.kind in KINDS[layer], report.failure
    assert not report.complete
    again = replay(scenario, report.failure.replay)
    assert again.failure == report.failure
    with pytest.raises(ScheduleFailure, match="again with: replay"):
        report.check()


@pytest.mark.parametrize(("core", "layer", "where"), [row for row in RINGS if row[1] == "model"], ids=_name)
def test_the_model_finds_the_faulty_ring(core: Any, layer: str, where: str) -> None:
    base = IngressMachine if where == "ingress" else RingMachine
    machine = type("Faulty", (base,), {"core": core})
    options = settings(
        max_examples=500,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the machine raises on the first broken example
        run_state_machine_as_test(machine, settings=options)


CHANNELS: list[tuple[type[Bell], type[Channel[Any]], str]] = [
    (faulty.ForgetfulBell, Channel, "a driver waits on two sources"),
    (Bell, faulty.RungTooEarly, "a driver waits on two sources"),
    (Bell, faulty.SilentClose, "sources close at any time"),
    (Bell, faulty.RoomUntold, "a gated producer hears of room"),
]


@pytest.mark.parametrize(("bell", "channel", "where"), CHANNELS, ids=_name)
def test_every_schedule_finds_the_faulty_bell_or_channel(bell: Any, channel: Any, where: str) -> None:
    report = explore(channel_scenarios(bell, channel)[where], spurious=1)
    assert report.failure is not None, f"the sleep layer stays green: {report}"
    assert report.failure.kind == "asleep", report.failure


SINKS: list[tuple[type[Sink], str, str]] = [
    (faulty.BlindReader, "asleep", "a parked reader is woken by each step"),
    (faulty.StillOnTheBooks, "raised", "a reader's wait runs out of time"),
    (faulty.DeafToTheClose, "asleep", "the client leaves while it is parked"),
]


@pytest.mark.parametrize(("sink", "kind", "where"), SINKS, ids=_name)
def test_every_schedule_finds_the_faulty_reader(sink: type[Sink], kind: str, where: str) -> None:
    report = explore(sink_scenarios(sink)[where], spurious=1)
    assert report.failure is not None, f"the {kind} layer stays green: {report}"
    assert report.failure.kind == kind, report.failure


def test_a_close_at_any_time_hides_the_lost_wake_up_that_a_close_after_all_puts_shows() -> None:
    """Why both kinds of scenario are run."""
    assert explore(ring_scenarios(faulty.LostWakeUp)["two waiters, one close"], spurious=1).failure is None


def test_the_matrix_holds_a_dozen_faults_and_every_layer() -> None:
    assert len(RINGS) + len(CHANNELS) >= 12
    assert {layer for _, layer, _ in RINGS} == {"guard", "sleep", "order", "model"}
    for core, layer, where in RINGS:
        print(f"{core.__name__:22} {layer:6} {where}")
