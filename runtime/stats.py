"""What a manager can say of itself: a snapshot, taken between two steps of each stage.

Owns: `Stats` and how it is collected. A stage's state belongs to its thread, so it is looked at on that thread (`DriverThread.call`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..fsm import RequestState
from .pipeline import Pipeline, merged
from .ring import RingFacts
from .threads import DriverThread

_LOOK_S = 5.0  # how long to wait for a stage to look at itself


class RingStats(msgspec.Struct, frozen=True):
    """A ring at one moment: `fill` and `capacity` in items, `nbytes` in bytes, `state` by name."""

    fill: int
    capacity: int
    nbytes: int
    state: str


class Stats(msgspec.Struct, frozen=True):
    """What the manager can say of itself. `live` counts requests by state name; an empty dict means that nothing is live."""

    state: str
    live: dict[str, int]
    ingress_ring: RingStats
    egress_ring: RingStats
    counters: dict[str, int]
    limits_reached: dict[str, int]
    activity: int
    decoder: str
    decoder_reason: str
    tokenizer_backend: str | None
    waiting_bytes: int


def collect(pipeline: Pipeline, thread: Callable[[str], DriverThread | None]) -> tuple[dict[str, int], dict[str, int]]:
    """(live requests by state name, counters). `thread` gives the driver thread of a name, or None where none runs."""
    live: dict[str, int] = {}
    counters: list[Any] = []

    def look_at_ingress() -> tuple[dict[str, int], dict[str, int]]:
        states = Counter(RequestState(life.state).name for life in pipeline.ingress.entries.values())
        return dict(states), dict(pipeline.ingress_counts)

    looks = [("headrace-ingress", look_at_ingress)]
    for index, shard in enumerate(pipeline.shards):
        name = "headrace-egress" if pipeline.config.fused else f"headrace-detok-{index}"
        looks.append((name, _look(shard, pipeline.shard_counts[index])))
    looks.append(("headrace-egress", lambda: ({}, dict(pipeline.dispatcher.counts))))
    for name, look in looks:
        driver = thread(name)
        states, counts = look() if driver is None else driver.call(look, _LOOK_S)
        live = merged([live, states])
        counters.append(counts)
    waiting = len(pipeline.inbox)
    if waiting:
        live[RequestState.RECEIVED.name] = live.get(RequestState.RECEIVED.name, 0) + waiting
    between = len(pipeline.live) - sum(live.values())
    if between > 0:  # on their way from one stage to the next
        live[RequestState.QUEUED.name] = live.get(RequestState.QUEUED.name, 0) + between
    return live, merged(counters)


_COUNTED_AS = {
    "ingress_ring_capacity": ("refused_ring_full",),
    "channel_capacity": ("refused_pool_full",),
    "sink_capacity": ("sinks_overflowed",),
    "context_len": ("outputs_over_limit",),
}
"""Limits that stages meet, and the counters they are counted in; those of the caller's thread are counted by name."""


def limits_reached(pipeline: Pipeline, counters: Mapping[str, int]) -> dict[str, int]:
    """How often each limit was reached, by its name in the config; what was never reached is absent."""
    reached = Counter(pipeline.live.refusals())
    for limit, names in _COUNTED_AS.items():
        reached[limit] += sum(counters.get(name, 0) for name in names)
    return {limit: count for limit, count in reached.items() if count}


def _look(shard: Any, counts: Mapping[str, int]) -> Callable[[], tuple[dict[str, int], dict[str, int]]]:
    return lambda: (shard.live(), dict(counts))


def ring_stats(facts: RingFacts) -> RingStats:
    return RingStats(facts.fill, facts.capacity, facts.nbytes, facts.state.name)
