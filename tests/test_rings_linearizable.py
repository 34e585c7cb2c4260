"""Linearizability of both rings against the list model and the table: tiny random scenarios over every schedule, and histories of
real threads as an overlap (they prove nothing, but run on the interpreter that there is)."""

from __future__ import annotations

import os
import random
from collections import Counter

import interleave_faulty as faulty
import pytest
from headrace.runtime.interleave import Called, Raised, Scenario, explain, explore, linearize, record
from interleave_helpers import RingModel, calls, egress, ingress

SCENARIOS = 400 if os.environ.get("HEADRACE_PROFILE") == "deep" else 60
REAL_RUNS = 2000 if os.environ.get("HEADRACE_PROFILE") == "deep" else 60


def tiny(seed: int, *, core: object = None) -> Scenario:
    """Two or three threads with up to three calls each, drawn by the seed; which kinds of call there are is drawn first."""
    rng = random.Random(seed)
    capacity = rng.randint(1, 3)
    letters = iter("abcdefghi")
    kind = rng.choice(["egress", "ingress", "bytes"])
    max_bytes = rng.randint(1, 4) if kind == "bytes" else None
    producing = [name for name in ("push", "push 1", "try_push", "many", "close_producer") if rng.random() < 0.6] or [
        "try_push"
    ]
    consuming = [name for name in ("wait", "wait 1", "drain 1", "drain 2", "close_consumer") if rng.random() < 0.6] or [
        "drain 1"
    ]
    threads = {}
    for at in range(rng.randint(2, 3)):
        texts = []
        for _ in range(rng.randint(1, 3)):
            text = rng.choice(consuming if at == 0 or rng.random() < 0.2 else producing)
            if text.startswith("push"):
                timeout = text[4:]
                text = (
                    f"push {next(letters) * (rng.randint(1, 3) if max_bytes else 1)}{timeout}"
                    if kind != "ingress"
                    else "try_push"
                )
            if text == "try_push":
                text = f"try_push {next(letters)}"
            if text == "many":
                text = f"many {next(letters)}{next(letters)}" if kind == "ingress" else f"try_push {next(letters)}"
            texts.append(text)
            if sum(len(one.split()) > 1 for one in texts) > 2:
                break
        threads[f"t{at}"] = calls(*texts)
    build = ingress(capacity, core) if kind == "ingress" else egress(capacity, max_bytes, core)
    return Scenario(
        f"tiny {seed}",
        build,
        threads,
        RingModel(capacity, max_bytes or (None if kind == "ingress" else 1 << 30)),
        (TimeoutError,),
    )


def test_every_schedule_of_tiny_random_scenarios_is_linearizable() -> None:
    total: Counter[str] = Counter()
    for seed in range(SCENARIOS):
        report = explore(tiny(seed), spurious=seed % 2).check()
        assert report.complete
        total.update(scenarios=1, schedules=report.schedules, states=report.states, sleeping=report.sleeping)
    print(
        f"complete=true scenarios={total['scenarios']} seeds=0..{SCENARIOS - 1} schedules={total['schedules']} states={total['states']}"
    )
    assert total["schedules"] > 5 * SCENARIOS
    assert total["sleeping"], "no scenario ended with a sleeper that may sleep"


@pytest.mark.parametrize(
    "core",
    [faulty.DropWhenFull, faulty.LostWakeUp, faulty.Reorder, faulty.HalfABatch, faulty.LostStash],
    ids=lambda core: core.__name__,
)
def test_tiny_random_scenarios_find_the_faulty_rings(core: type) -> None:
    assert any(
        (failure := explore(tiny(seed, core=core), max_schedules=300).failure) and failure.kind in ("order", "asleep")
        for seed in range(60)
    )


def hot(seed: int) -> Scenario:
    """Three producers and a consumer that closes at the end, so that every call ends."""
    rng = random.Random(seed)
    capacity = rng.randint(1, 3)
    threads = {
        name: calls(*(rng.choice(["push", "try_push"]) + f" {letter}" for letter in letters))
        for name, letters in (("p", "abc"), ("q", "de"), ("r", "fg"))
    }
    threads["c"] = calls(
        *(rng.choice(["drain 1", "drain 2", "wait 0.001"]) for _ in range(5)), "close_consumer", "drain 9"
    )
    return Scenario(f"hot {seed}", egress(capacity), threads, RingModel(capacity, 1 << 30), (TimeoutError,))


def test_histories_of_real_threads_are_linearizable() -> None:
    overlaps = 0
    for seed in range(REAL_RUNS):
        scenario = hot(seed)
        history = record(scenario)
        assert scenario.model is not None
        assert linearize(history, scenario.model) is not None, f"seed {seed}:\n{explain(history)}"
        overlaps += sum(
            not one.before >> at & 1 and not other.before >> here & 1
            for here, one in enumerate(history)
            for at, other in enumerate(history)
            if here < at
        )
    print(f"{REAL_RUNS} real histories, {overlaps} pairs of calls overlapped")
    assert overlaps > REAL_RUNS, "the threads hardly met: this layer saw nothing"


def test_real_threads_would_notice_a_lost_item() -> None:
    model = RingModel(1)
    lost = [
        Called("p", "push", (b"a",), True, 0, True),
        Called("c", "drain", (1,), (), 1, True),
    ]
    assert linearize(lost, model) is None
    overlapping = [lost[0], lost[1]._replace(before=0)]
    assert linearize(overlapping, model) == [1, 0]
    refused = [lost[0], Called("q", "push", (b"b", 1.0), Raised("TimeoutError"), 1, True)]
    assert linearize(refused, model) == [0, 1]
