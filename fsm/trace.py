"""A recording of every step of every machine, and its file form.

Who records: the owner of the state, while it owns it, directly after the step; so the records of one machine and one
rid are in the order of their steps. `seq` is the order in which records entered the buffer. What a record holds: the
machine, the rid (for a ring or a manager: its name), the state before, the event, the state after, the stage. Never
text, ids or payload.

The buffer is bounded and keeps the *beginning*: when it is full it takes nothing more, counts what it refused
(`dropped`) and says so in the file's last line. A gap in the middle would make every later step look like a broken
chain; a prefix can be validated. Switched off there is no Trace, and the owner's `if trace is not None` is the cost.

One lock guards the buffer. Time comes in as an argument (`clock`), because this floor has none; it is only for display.

File: JSON Lines in UTF-8. First line: format, version, the machines' revisions. Then one line per record. Last line:
`{"end": true, "events": n, "dropped": n}`; a file without it was cut, and reads as such.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .machine import Machine

DEFAULT_CAPACITY: Final = 65_536
VERSION: Final = 1


class TraceEvent(NamedTuple):
    """One step. `before`, `event`, `after` are names; `t` is the clock's value, or None."""

    seq: int
    machine: str
    rid: str
    before: str
    event: str
    after: str
    stage: str
    t: float | None = None


class Fill(NamedTuple):
    """One reading of a ring's fill, for display beside the steps."""

    seq: int
    ring: str
    fill: int
    t: float | None = None


class TraceError(ValueError):
    """A file is not a trace; the message names the line."""


_Raw = tuple[str, str, int, int, int, str, float | None]


class _Many(NamedTuple):
    """One event of several rids, as it was recorded."""

    machine: str
    rids: Sequence[str]
    before: Sequence[int]
    event: int
    after: Sequence[int]
    stage: str
    t: float | None


def _single(raw: Iterable[_Raw | _Many]) -> Iterator[_Raw]:
    for row in raw:
        if isinstance(row, _Many):
            for rid, before, after in zip(row.rids, row.before, row.after, strict=True):
                yield (row.machine, rid, before, row.event, after, row.stage, row.t)
        else:
            yield row


class Trace:
    """A bounded, thread-safe recorder. Iterating gives `TraceEvent`s and `Fill`s in order.

    `capacity`: records kept; `clock`: a callable that gives seconds, or None; `machines`: the machines by name
    (default: headrace's five).
    """

    def __init__(
        self,
        capacity: int = DEFAULT_CAPACITY,
        *,
        clock: Callable[[], float] | None = None,
        machines: dict[str, Machine[Any, Any]] | None = None,
        lock: Any = None,
    ) -> None:
        from . import MACHINES

        self.capacity = capacity
        self.dropped = 0
        self.ended = True
        """False for a file that was cut: its last line is missing."""
        self._clock = clock
        self._machines = MACHINES if machines is None else machines
        self._lock = threading.Lock() if lock is None else lock
        self._raw: list[_Raw | _Many] = []
        self._count = 0
        self._read: list[TraceEvent | Fill] | None = None

    @property
    def full(self) -> bool:
        """Whether something was refused: the trace is then a prefix of what happened."""
        return self.dropped > 0

    def record(self, machine: str, rid: str, from_: int, event: int, to: int, stage: str) -> None:
        """Record one step; states and events as ints or members of the machine's enums. Never raises, never blocks
        beyond the buffer's lock; when full it only counts."""
        t = self._clock() if self._clock is not None else None
        with self._lock:
            if self._count < self.capacity:
                self._raw.append((machine, rid, from_, event, to, stage, t))
                self._count += 1
            else:
                self.dropped += 1

    def record_many(
        self, machine: str, rids: Sequence[str], before: Sequence[int], event: int, after: Sequence[int], stage: str
    ) -> None:
        """Record the same event for several rids; `before` and `after` are per rid. The sequences are kept, not copied, so they must
        not be changed afterwards: a step over hundreds of requests then costs one record."""
        t = self._clock() if self._clock is not None else None
        with self._lock:
            room = max(0, self.capacity - self._count)
            if room < len(rids):
                self.dropped += len(rids) - room
                rids, before, after = rids[:room], before[:room], after[:room]
            if rids:
                self._raw.append(_Many(machine, rids, before, event, after, stage, t))
                self._count += len(rids)

    def record_fill(self, ring: str, fill: int) -> None:
        """Record how many items a ring holds, for display."""
        t = self._clock() if self._clock is not None else None
        with self._lock:
            if self._count < self.capacity:
                self._raw.append(("", ring, fill, 0, 0, "", t))
                self._count += 1
            else:
                self.dropped += 1

    def __len__(self) -> int:
        if self._read is not None:
            return len(self._read)
        with self._lock:
            return self._count

    def __iter__(self) -> Iterator[TraceEvent | Fill]:
        if self._read is not None:
            return iter(self._read)
        with self._lock:
            raw = self._raw[:]
        return (self._name(seq, row) for seq, row in enumerate(_single(raw)))

    def _name(self, seq: int, row: _Raw) -> TraceEvent | Fill:
        machine, rid, before, event, after, stage, t = row
        if machine == "":
            return Fill(seq, rid, before, t)
        known = self._machines.get(machine)
        if known is None:
            return TraceEvent(seq, machine, rid, str(int(before)), str(int(event)), str(int(after)), stage, t)
        states, events = known.states, known.events
        return TraceEvent(
            seq, machine, rid, _member(states, before), _member(events, event), _member(states, after), stage, t
        )

    def write(self, path: str | Path) -> None:
        """Write the trace as JSON Lines."""
        Path(path).write_text("".join(f"{line}\n" for line in self.lines()), encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """The lines of the file, without line ends."""
        revisions = {name: machine.revision for name, machine in self._machines.items()}
        yield json.dumps({"trace": "headrace", "version": VERSION, "machines": revisions})
        count = 0
        for item in self:
            count += 1
            line: dict[str, Any]
            if isinstance(item, Fill):
                line = {"seq": item.seq, "ring": item.ring, "fill": item.fill}
            else:
                line = {
                    "seq": item.seq,
                    "machine": item.machine,
                    "rid": item.rid,
                    "from": item.before,
                    "event": item.event,
                    "to": item.after,
                    "stage": item.stage,
                }
            if item.t is not None:
                line["t"] = item.t
            yield json.dumps(line)
        if self.ended:
            yield json.dumps({"end": True, "events": count, "dropped": self.dropped})

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a file that `write` wrote. Raises TraceError naming the line, or OSError."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(f"not a trace: not UTF-8 ({error.reason} at byte {error.start})") from None
        return cls.parse(text.splitlines())

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Trace:
        """Read a trace from its lines. Raises TraceError naming the line."""
        trace = cls()
        trace.ended = False
        found: list[TraceEvent | Fill] = []
        number = 0
        for number, line in enumerate(lines, 1):
            item = _object(line, number)
            if number == 1:
                if item.get("trace") != "headrace" or item.get("version") != VERSION:
                    raise TraceError(f"line 1: not a headrace trace of version {VERSION}")
                revisions = item.get("machines") or {}
                if not isinstance(revisions, dict):
                    raise TraceError("line 1: machines is not an object")
                for name, revision in revisions.items():
                    if name in trace._machines and trace._machines[name].revision != revision:
                        raise TraceError(f"line 1: {name}/{revision} is not the known revision")
            elif trace.ended:
                raise TraceError(f"line {number}: something stands behind the end")
            elif item.get("end") is True:
                if item.get("events") != len(found) or not isinstance(item.get("dropped"), int):
                    raise TraceError(f"line {number}: the end counts {item.get('events')!r} records, not {len(found)}")
                trace.ended = True
                trace.dropped = item["dropped"]
            else:
                found.append(_item(item, number))
        if number == 0:
            raise TraceError("line 1: the file is empty")
        trace._read = found
        return trace


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(f"line {number}: not JSON") from None
    if not isinstance(item, dict):
        raise TraceError(f"line {number}: not an object")
    return item


def _item(item: dict[str, Any], number: int) -> TraceEvent | Fill:
    seq, t = item.get("seq"), item.get("t")
    if not isinstance(seq, int) or not (t is None or isinstance(t, (int, float))):
        raise TraceError(f"line {number}: seq or t is not a number")
    if "ring" in item:
        if not isinstance(item["ring"], str) or not isinstance(item.get("fill"), int):
            raise TraceError(f"line {number}: ring or fill has the wrong type")
        return Fill(seq, item["ring"], item["fill"], t)
    fields = [item.get(key) for key in ("machine", "rid", "from", "event", "to", "stage")]
    if not all(isinstance(field, str) for field in fields):
        raise TraceError(f"line {number}: machine, rid, from, event, to and stage must be strings")
    machine, rid, before, event, after, stage = map(str, fields)
    return TraceEvent(seq, machine, rid, before, event, after, stage, t)


def _member(enum: Any, value: int) -> str:
    try:
        return str(enum(value).name)
    except ValueError:
        return str(int(value))
