"""What a step costs, as ratios measured in one run (a machine's clock speed then cancels out).

    python benchmarks/bench_fsm.py [--rounds N]

- `next` against a dict lookup of the same pair: at most 4;
- `apply_batch` at 4096 events against a dict lookup per event: at most 1/5;
- `transitions` per event against `apply_batch` per event: at least 500;
- `Trace.record` against `next`: what tracing adds to a step (no bound here; the end-to-end benchmark has it).

Best of N rounds, because the least disturbed round is the one that measures the code.
"""

from __future__ import annotations

import argparse
import timeit

import numpy as np
from headrace.fsm import REQUEST, RequestEvent, RequestState, Trace, reference

EVENTS = 4096


def measure(rounds: int) -> dict[str, float]:
    """Nanoseconds per event, by name."""
    table = {
        (int(state), int(event)): REQUEST.next(state, event)
        for state in RequestState
        for event in RequestEvent
        if REQUEST.outcome(state, event) != "illegal"
    }
    state, event = RequestState.STREAMING, RequestEvent.CHUNK
    pair_state, pair_event = int(state), int(event)
    rng = np.random.default_rng(1)
    legal = np.argwhere(REQUEST.outcomes != 2)
    picked = legal[rng.integers(0, len(legal), EVENTS)]
    states, events = picked[:, 0].astype(np.uint8), picked[:, 1].astype(np.uint8)
    slow = reference(REQUEST)
    slow.set_state("STREAMING")
    trace = Trace(10**9)
    names = {
        "REQUEST": REQUEST, "table": table, "s": state, "e": event, "i": pair_state, "j": pair_event,
        "states": states, "events": events, "trigger": slow.trigger, "record": trace.record, "next_": REQUEST.next,
    }  # fmt: skip

    def best(statement: str, number: int, per: int = 1) -> float:
        return min(timeit.repeat(statement, globals=names, number=number, repeat=rounds)) / number / per * 1e9

    return {
        "dict lookup": best("table[i, j]", 100_000),
        "next": best("next_(s, e)", 100_000),
        "apply_batch, 4096 events": best("REQUEST.apply_batch(states, events)", 300, EVENTS),
        "apply_batch, 4096 rows, one event": best("REQUEST.apply_batch(states, e)", 300, EVENTS),
        "transitions": best("trigger('CHUNK')", 1_000),
        "Trace.record": best("record('request', 'r', s, e, s, 'shard')", 20_000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    ns = measure(parser.parse_args().rounds)
    for name, value in ns.items():
        print(f"{name:<36}{value:>12.1f} ns per event")
    batch = ns["apply_batch, 4096 events"]
    rows = (
        ("next / dict lookup", ns["next"] / ns["dict lookup"], "at most", 4.0),
        ("apply_batch / dict lookup", batch / ns["dict lookup"], "at most", 0.2),
        ("transitions / apply_batch", ns["transitions"] / batch, "at least", 500.0),
    )
    print()
    for name, ratio, word, bound in rows:
        good = ratio <= bound if word == "at most" else ratio >= bound
        print(f"{name:<36}{ratio:>12.2f}    {word} {bound:g}: {'holds' if good else 'DOES NOT HOLD'}")


if __name__ == "__main__":
    main()
