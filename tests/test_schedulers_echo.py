"""EchoScheduler against the plain meaning of "give the prompt back", for random prompts, parameters and arrivals."""

import itertools

import numpy as np
from headrace.runtime.schedulers import EchoScheduler
from hypothesis import given
from hypothesis import strategies as st
from schedulers_helpers import VOCAB, FakePort, run_dry

IDS = st.integers(0, 9)


@st.composite
def requests(draw):
    cap = draw(st.none() | st.integers(0, 12))
    return {
        "ids": draw(st.lists(IDS, min_size=1, max_size=8)),
        "max_new_tokens": cap,
        "min_new_tokens": draw(st.integers(0, 12 if cap is None else cap)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.lists(IDS, max_size=2)),
        "arrives": draw(st.integers(0, 12)),
    }


def expected(request, eos=frozenset()):
    """(ids, finish reason): the rule as a loop."""
    ids, cap, least = request["ids"], request["max_new_tokens"], request["min_new_tokens"]
    stops = set(request["stop_token_ids"]) | (set() if request["ignore_eos"] else set(eos))
    natural = max(len(ids), least)
    if request["ignore_eos"] and cap is not None:
        natural = cap
    out = []
    for token in itertools.cycle(ids):
        if cap is not None and len(out) == cap:
            return out, {"type": "length", "length": cap}
        if len(out) == natural:
            return out, {"type": "stop", "matched": None}
        out.append(token)
        if cap is not None and len(out) == cap:
            return out, {"type": "length", "length": cap}
        if token in stops and len(out) >= least:
            return out, {"type": "stop", "matched": token}
    raise AssertionError


@given(st.lists(requests(), max_size=8), st.integers(1, 4), st.sampled_from(["v1", "v2"]), st.sets(IDS, max_size=1))
def test_every_request_gets_its_own_prompt_back_as_far_as_its_parameters_allow(specs, max_batch, wire, eos):
    port = FakePort(wire)
    scheduler = EchoScheduler(port, max_batch=max_batch, eos_token_ids=eos)
    rids = {}
    for step in range(14):
        for n, spec in enumerate(specs):
            if spec["arrives"] == step:
                params = {key: value for key, value in spec.items() if key not in ("ids", "arrives")}
                rids[n] = port.generate(f"r{n}", spec["ids"], **params)
        scheduler.step()
    run_dry(scheduler)
    for n, spec in enumerate(specs):
        ids, reason = expected(spec, eos)
        assert port.ids(rids[n]) == ids
        assert port.ends(rids[n]) == [reason]
        assert all(length == 1 for length in port.lens(rids[n])) or reason == {"type": "length", "length": 0}


def test_prompt_tokens_are_the_prompts_length():
    port = FakePort()
    port.generate("a", [1, 2, 3])
    run_dry(EchoScheduler(port))
    assert {int(n) for frame in port.frames for n in frame.prompt_tokens} == {3}


def test_a_prompt_far_shorter_than_a_huge_minimum_costs_no_memory_and_goes_on():
    port = FakePort()
    rid = port.generate("a", [1, 2], max_new_tokens=None, min_new_tokens=2**31 - 1)
    scheduler = EchoScheduler(port)
    for _ in range(5):
        scheduler.step()
    assert port.ids(rid) == [1, 2, 1, 2, 1]
    assert scheduler._arena.nbytes < 1 << 16


def test_prompts_move_together_when_the_arena_is_full():
    port = FakePort()
    scheduler = EchoScheduler(port, max_batch=3)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 1200, 20)]
    rids = [port.generate(f"r{n}", prompt, max_new_tokens=None) for n, prompt in enumerate(prompts)]
    run_dry(scheduler)
    assert [port.ids(rid) for rid in rids] == prompts
    assert len(scheduler._arena) < 15_000, "what nobody uses any more is not kept"


def test_while_nobody_joins_or_leaves_the_header_is_made_once(monkeypatch):
    port = FakePort()
    made = []
    original = EchoScheduler._push
    monkeypatch.setattr(EchoScheduler, "_push", lambda *a: made.append(1) or original(*a))
    port.generate("a", range(1000), max_new_tokens=None)
    port.generate("b", range(1000), max_new_tokens=None)
    run_dry(EchoScheduler(port))
    assert len(port.frames) == 1000
    assert len(made) == 2, "the first step and the one with the ends"


def test_a_prompt_without_tokens_is_an_error_of_that_request():
    port = FakePort()
    rid = port.generate("a", [1])
    port.inbox[0] = type(port.inbox[0])(rid=rid, header=port.inbox[0].header, ids=np.zeros(0, np.int64))
    other = port.generate("b", [1])
    run_dry(EchoScheduler(port))
    assert list(port.errors) == [rid]
    assert port.ids(other) == [1]
