"""A recorded trace as a file that the Perfetto UI and chrome://tracing open.

One track per request, with a slice per state and a mark for every step of its abort and its sink; one track per ring
with its states, and a counter with its fill; one for the manager. Times are the trace's clock in microseconds; a trace
without a clock is drawn by sequence number, one microsecond each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from .trace import Fill, Trace, TraceEvent

_PROCESSES: Final = {"request": (1, "requests"), "ring": (2, "rings"), "lifecycle": (3, "manager")}
_MARKS: Final = ("abort", "sink")


def to_perfetto(trace: Trace | Iterable[TraceEvent | Fill]) -> str:
    """The trace in the Trace Event Format (JSON)."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in _PROCESSES.values()
    ]
    tracks: dict[tuple[int, str], int] = {}
    open_slices: dict[tuple[str, str], tuple[str, float]] = {}
    start: float | None = None
    now = 0.0

    def track(pid: int, name: str) -> int:
        if (pid, name) not in tracks:
            tracks[pid, name] = len(tracks) + 1
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tracks[pid, name], "args": {"name": name}}
            )
        return tracks[pid, name]

    def close(machine: str, rid: str, at: float) -> None:
        if (machine, rid) in open_slices:
            state, since = open_slices.pop((machine, rid))
            pid = _PROCESSES[machine][0]
            events.append(
                {"ph": "X", "name": state, "pid": pid, "tid": track(pid, rid), "ts": since, "dur": at - since}
            )

    for item in trace:
        if item.t is None:
            now = float(item.seq)
        else:
            start = item.t if start is None else start
            # Threads read the clock before they take the buffer's lock, so times may step back a little.
            now = max(now, (item.t - start) * 1e6)
        if isinstance(item, Fill):
            events.append({"ph": "C", "name": f"{item.ring} fill", "pid": 2, "ts": now, "args": {"items": item.fill}})
        elif item.machine in _MARKS:
            name = f"{item.machine}: {item.event}" + ("" if item.before != item.after else " (same state)")
            tid = track(1, item.rid)
            events.append({"ph": "i", "s": "t", "name": name, "pid": 1, "tid": tid, "ts": now, "args": _args(item)})
        elif item.machine in _PROCESSES:
            if (item.machine, item.rid) not in open_slices:
                open_slices[item.machine, item.rid] = (item.before, now)
            if item.before != item.after:
                close(item.machine, item.rid, now)
                open_slices[item.machine, item.rid] = (item.after, now)
            pid = _PROCESSES[item.machine][0]
            tid = track(pid, item.rid)
            events.append(
                {"ph": "i", "s": "t", "name": item.event, "pid": pid, "tid": tid, "ts": now, "args": _args(item)}
            )
    for machine, rid in list(open_slices):
        close(machine, rid, now)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _args(item: TraceEvent) -> dict[str, Any]:
    return {"seq": item.seq, "from": item.before, "to": item.after, "stage": item.stage}
