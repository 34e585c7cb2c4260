"""ScriptedScheduler: each action does what it says, step by step."""

import pytest
from headrace.codec.chunk import ChunkEvent
from headrace.codec.encode import encode_batch
from headrace.runtime.scripted import Close, Die, Emit, Error, Raw, Result, ScriptedScheduler, ScriptFault, Wait
from schedulers_helpers import FakePort, run_dry

END = {"type": "stop", "matched": None}


def test_all_chunks_of_a_step_travel_in_one_frame_in_the_order_of_arrival():
    port = FakePort()
    a, b = port.generate("a", [1]), port.generate("b", [2, 3])
    scripts = {"a": [[10, 11], Wait(2), Emit([12], END)], "b": [[20], Emit([], END)]}
    run_dry(ScriptedScheduler(port, scripts))
    assert [frame.rids for frame in port.frames] == [[a, b], [b], [a]]
    assert port.lens(a) == [2, 1]
    assert port.ids(b) == [20]
    assert [int(n) for n in port.frames[0].prompt_tokens] == [1, 2]
    assert port.ends(a) == port.ends(b) == [END]


def test_a_script_may_go_on_after_its_end_and_is_forgotten_when_it_is_over():
    port = FakePort()
    rid = port.generate("a", [1])
    scheduler = ScriptedScheduler(port, [Emit([1], END), Emit([2]), Emit([3], END)])
    run_dry(scheduler)
    assert port.ids(rid) == [1, 2, 3]
    assert port.ends(rid) == [END, END]
    assert scheduler.running == 0


def test_a_request_without_script_or_with_one_that_falls_silent_is_left_hanging():
    port = FakePort()
    silent, none = port.generate("silent", [1]), port.generate("none", [1])
    scheduler = ScriptedScheduler(port, {"silent": [[5]]})
    run_dry(scheduler)
    assert port.ids(silent) == [5]
    assert port.ends(silent) == port.ends(none) == []
    assert scheduler.running == 2
    port.abort(silent)
    port.abort(none)
    run_dry(scheduler)
    assert scheduler.running == 0
    assert scheduler.aborted == [silent, none]


def test_scripts_are_found_by_client_rid_star_or_callable():
    port = FakePort()
    a, b = port.generate("a", [1]), port.generate("b", [2])
    run_dry(ScriptedScheduler(port, {"a": [Emit([1], END)], "*": [Emit([2], END)]}))
    assert (port.ids(a), port.ids(b)) == ([1], [2])
    port = FakePort()
    c = port.generate("c", [7, 8])
    run_dry(ScriptedScheduler(port, lambda message: [Emit(message.input_ids.tolist(), END)]))
    assert port.ids(c) == [7, 8]


def test_frames_come_first_one_per_step():
    port = FakePort()
    rid = port.generate("a", [1])
    frames = [encode_batch([ChunkEvent(rid="x", token_ids=[n])], port.schema) for n in range(2)]
    scheduler = ScriptedScheduler(port, [Emit([1], END)], frames=frames)
    run_dry(scheduler)
    assert port.raw[:2] == frames
    assert port.ids("x") == [0, 1]
    assert port.ids(rid) == [1]


def test_raw_error_and_result_actions_reach_the_ring_as_they_are():
    port = FakePort()
    rid = port.generate("a", [1])
    whole = lambda internal: encode_batch([ChunkEvent(rid=internal, token_ids=[9])], port.schema)  # noqa: E731
    run_dry(ScriptedScheduler(port, [Raw(whole), Result(b"r"), Error("no")]))
    assert port.ids(rid) == [9]
    assert port.controls == {rid: b"r"}
    assert port.errors == {rid: "no"}


def test_extras_and_scalars_are_encoded_by_the_schema():
    import numpy as np

    port = FakePort("v2")
    rid = port.generate("a", [1])
    extras = {"out_lp_val": np.array([-0.5], np.float32), "out_lp_idx": np.array([4], np.int32)}
    run_dry(ScriptedScheduler(port, [Emit([4], END, extras, {"cached_tokens": 3})]))
    chunk = port.frames[0][0]
    assert chunk.rid == rid
    assert chunk.cached_tokens == 3
    assert chunk.extras["out_lp_idx"].tolist() == [4]


def test_die_and_close_end_the_scheduler():
    port = FakePort()
    port.generate("a", [1])
    with pytest.raises(ScriptFault):
        ScriptedScheduler(port, [Die()]).run()
    assert port.closed
    port = FakePort()
    rid = port.generate("a", [1])
    ScriptedScheduler(port, [[1], Close(), [2]]).run()
    assert port.ids(rid) == [1]


def test_aborts_can_be_ignored_but_are_recorded():
    port = FakePort()
    rid = port.generate("a", [1])
    scheduler = ScriptedScheduler(port, [[1], [2], Emit([3], END)], heeds_aborts=False)
    scheduler.step()
    port.abort(rid)
    run_dry(scheduler)
    assert port.ids(rid) == [1, 2, 3]
    assert scheduler.aborted == [rid]


def test_control_answers_can_be_given_or_withheld():
    port = FakePort()
    port.control("X", "c1")
    port.control("Y", "c2")
    scheduler = ScriptedScheduler(port, answer=lambda message: b"yes" if message.tag == "X" else None)
    run_dry(scheduler)
    assert port.controls == {"c1": b"yes"}
    assert [message.tag for message in scheduler.received] == ["X", "Y"]
