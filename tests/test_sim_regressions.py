"""Defects that the simulation found, each as the shortest test of the part that had it."""

import msgspec
import numpy as np
from headrace.codec import Length
from headrace.codec.errors import InternalError, SlowClientError
from headrace.fsm import SinkState
from headrace.runtime import EgressItem, Simulation, SinkError
from headrace.runtime.sim_parts import SimOptions
from headrace.runtime.sink import Columns, Hub, Sink

NOTHING = np.empty(0, dtype=np.int64)


def test_behind_a_delta_that_did_not_fit_no_end_is_taken_for_a_success() -> None:
    # A frame named a request twice: a chunk that did not fit, and an end without a delta, which found the reserved slot.
    hub = Hub()
    sink = Sink(hub, 1)
    full = EgressItem.Frame("a", np.array([1]))
    end = EgressItem.Done(Length(1), EgressItem.Frame("", NOTHING))
    assert hub.put_items([(sink, full)]) == []
    assert hub.put_items([(sink, full), (sink, end)]) == [(0, SinkError.FULL), (1, SinkError.FULL)]
    assert hub.put_items([(sink, EgressItem.Error(SlowClientError("too slow")))]) == []
    assert sink.state == SinkState.OVERFLOWED


def test_an_error_behind_a_delta_that_did_not_fit_is_told_at_once() -> None:
    hub = Hub()
    sink = Sink(hub, 1)
    full = EgressItem.Frame("a", np.array([1]))
    error = EgressItem.Error(SlowClientError("too slow"))
    assert hub.put_items([(sink, full), (sink, full), (sink, error)]) == [(1, SinkError.FULL)]


def test_a_sink_never_holds_more_than_its_capacity_when_single_puts_come_between_columns() -> None:
    hub = Hub()
    sink = Sink(hub, 3)
    columns = Columns([0], [sink], [sink.waiting()], [("a", 1)])
    single = EgressItem.Frame("b", np.array([1]))
    assert hub.put_columns(columns, 3) == []
    assert hub.put_items([(sink, single), (sink, single)]) == []
    assert hub.put_columns(columns, 3) == [0]
    assert sink.pending == 3


def test_columns_and_single_puts_in_any_mixture_keep_the_capacity() -> None:
    options = SimOptions(
        sink=3,
        clients=6,
        ring_in=64,
        channel=64,
        plain=70,
        streaming=100,
        final=5,
        context_len=200,
        submit=5,
        drive=240,
    )
    for seed in range(6):
        run = Simulation(seed, msgspec.structs.replace(options, scheduler=60 + seed))
        assert run.run(600).failure is None


def test_what_a_living_shard_gives_after_another_stage_died_does_not_stand_behind_the_end() -> None:
    hub = Hub()
    sink = Sink(hub, 3)
    columns = Columns([0], [sink], [sink.waiting()], [("a", 1)])
    assert hub.put_columns(columns, 3) == []
    hub.fail_open(sink, InternalError("a stage died"))
    assert hub.put_columns(columns, 3) == [0]
    taken = sink.take()
    assert taken.text == "a"
    assert isinstance(taken.terminal, EgressItem.Error)
    assert hub.put_items([(sink, EgressItem.Frame("b", np.array([1])))]) == [(0, SinkError.CLOSED)]
