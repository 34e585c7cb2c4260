"""The table of a shard: its requests' columns, and how a row moves and ends.

Owns: every request from `Register` to its terminal item. Rules it keeps:

* A row's state moves through the table only, one by one in `_advance` or in columns in `_move`.
* At most one abort is owed for a request, and only if it was pushed and its final chunk has not been seen.
* Terminal means absent: `_drop` frees the row, gives the slot back, and sends an abort that is owed to ingress.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...codec.errors import HeadraceError, InternalError, SlowClientError
from ...fsm import REQUEST, AbortEvent, AbortSource, AbortState, RequestEvent, RequestState
from ..sink import EgressItem, Terminal
from ..text.engine import TextEngine, bad_id
from .ingress import own_error
from .life import Ended, Life, Recorder, advance_abort, want_abort
from .plan import GENERAL, NO_PLAN, Lane, ShardOut, StepRow

SMALL = 16  # below this many rows the fixed cost of the array operations is more than a plain loop's
BAD_ID = "the scheduler sent a token id that cannot be decoded"
_NO_IDS = np.empty(0, dtype=np.int64)

# A member's look-up through its class costs as much as a step of a machine (CPython 3.11), and these are met for every request.
_FINALIZING = RequestState.FINALIZING
_CHUNK, _FINAL_SENT, _ERROR = RequestEvent.CHUNK, RequestEvent.FINAL_FRAME_SENT, RequestEvent.ERROR
_FINISHED, _REQUESTED = AbortEvent.FINISHED, AbortState.REQUESTED
_next: Any = REQUEST.next  # also of states that are plain ints, as a column gives them


class Rows:
    """See the module's head. `capacity` is the most requests that can be live (rows of the columns)."""

    def __init__(
        self, engine: TextEngine, *, capacity: int, output_limit: int, index: int = 0, record: Recorder | None = None
    ) -> None:
        self._engine = engine
        self._capacity = capacity
        self._output_limit = output_limit
        self._index = index
        self._stage = f"detok-{index}"
        self._record = record
        self._rows: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        # Row `capacity` stands for "no such request": index -1 of every column, never fast.
        self._states = bytearray(capacity + 1)
        self._state_column = np.frombuffer(self._states, dtype=np.uint8)  # the same memory: Python ints and columns
        # A Lane; only RUNNING and STREAMING rows have one but GENERAL.
        self._lanes = np.zeros(capacity + 1, dtype=np.uint8)
        self._produced = np.zeros(capacity + 1, dtype=np.int64)
        self._lives: list[Any] = [None] * (capacity + 1)
        self._waiting: list[Any] = [None] * (capacity + 1)  # the waiting list of the row's sink
        self._texts: list[Any] = [None] * (capacity + 1)
        self._options: list[Any] = [None] * (capacity + 1)
        self._ids: list[Any] = [None] * (capacity + 1)  # array("q") of a non-streaming request's ids so far
        self._extras: list[Any] = [None] * (capacity + 1)
        self._known: tuple[Any, Any] = (None, None)  # the last normal form of sampling parameters, and its text options
        # How the last batch was served, good while neither its rids nor the table have changed. A cache: no part of the state.
        self._changes = 0
        self._planned_rows = np.zeros(capacity + 1, dtype=bool)  # those of the plan
        self._plan = NO_PLAN

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, rid: object) -> bool:
        return rid in self._rows

    def live(self) -> dict[str, int]:
        """Live requests by state name."""
        rows = list(self._rows.values())
        counts: list[int] = np.bincount(self._state_column[rows]).tolist() if rows else []
        return {RequestState(state).name: count for state, count in enumerate(counts) if count}

    # -- moves and ends ------------------------------------------------------------------------------------------------------

    def _advance(self, row: int, event: RequestEvent) -> None:
        before = self._states[row]
        after = self._states[row] = _next(before, event)
        if self._record is not None:
            self._record.record("request", self._lives[row].rid, before, event, after, self._stage)

    def _move(self, column: Any, rids: list[str], steps: int = 1, tokens: Any = None) -> None:
        """A CHUNK for each of these rows and steps, and as many tokens produced (or `tokens`, for each row). The rows are RUNNING or
        STREAMING, and stay what the first CHUNK makes them: the table is asked once for all steps (a test pins that cell)."""
        if self._record is not None:
            self._record_chunks(column, rids, steps)
        if len(column) < SMALL:
            states = self._states
            for row in column.tolist():
                states[row] = _next(states[row], _CHUNK)
        else:
            after, illegal = REQUEST.apply_batch(self._state_column[column], _CHUNK)
            if np.count_nonzero(illegal):
                # cannot be: only RUNNING and STREAMING rows have a lane. A stage that finds it can be must stop.
                raise InternalError("a row that is not streaming was taken for one that is")
            self._state_column[column] = after
        self._produced[column] += steps if tokens is None else tokens

    def _count_due(self) -> None:
        """Bring the column of produced tokens up to date. Before anybody looks at it, and before the plan is let go."""
        plan = self._plan
        if plan.due:
            self._produced[plan.column] += plan.due
            plan.due = 0

    def _record_chunks(self, column: Any, rids: list[str], steps: int) -> None:
        assert self._record is not None
        before = self._state_column[column]
        after = REQUEST.apply_batch(before, _CHUNK)[0].tobytes()  # bytes: the collector does not look inside
        told = before.tobytes()
        for _ in range(steps):
            self._record.record_many("request", rids, told, _CHUNK, after, self._stage)
            told = after

    def _fault(self, row: int, told: str, out: ShardOut) -> None:
        """A fault of the scheduler, or of ours: told in full to the client and the log, because it names nobody's data."""
        out.faults.append(told)
        self._fail(row, InternalError(told), out, owed=True)

    def _fail_bad_id(self, row: int, token: int, out: ShardOut) -> None:
        out.faults.append(BAD_ID)
        self._fail(row, bad_id(token), out, owed=True)

    def _overflow(self, row: int, out: ShardOut) -> None:
        """The reader is too slow. If the final chunk was the one that did not fit, the scheduler is done: nothing is owed."""
        owed = self._states[row] != _FINALIZING
        out.count("sinks_overflowed")
        self._fail(row, SlowClientError("the client did not read its stream in time; output was lost"), out, owed=owed)

    def _complete(self, row: int, out: ShardOut) -> None:
        self._advance(row, _FINAL_SENT)
        advance_abort(self._lives[row], _FINISHED, self._stage, self._record)
        self._drop(row, out)

    def _fail(self, row: int, error: HeadraceError, out: ShardOut, *, owed: bool) -> None:
        life = self._lives[row]
        self._advance(row, _ERROR)
        if owed:
            want_abort(life, AbortSource.DETOK, self._stage, self._record)
        else:
            advance_abort(life, _FINISHED, self._stage, self._record)
        self._end(row, EgressItem.Error(own_error(error, life.shown_rid)), out)

    def _end(self, row: int, item: Terminal, out: ShardOut) -> None:
        life = self._lives[row]
        self._give(life, item, out)
        self._drop(row, out)

    def _drop(self, row: int, out: ShardOut) -> None:
        """Terminal means absent: the row is free, the slot goes back, and an abort that is owed goes to ingress."""
        life = self._lives[row]
        del self._rows[life.rid]
        if self._planned_rows[row]:
            self._changes += 1
            self._count_due()
            self._plan = NO_PLAN  # it is out of date, and would keep the sink
        self._lives[row] = self._waiting[row] = self._texts[row] = self._options[row] = self._ids[row] = self._extras[
            row
        ] = None
        self._lanes[row] = GENERAL
        self._free.append(row)
        if life.abort == _REQUESTED:
            out.owed.append(Ended(life))
        out.ended.append(life.rid)

    def _give(self, life: Life, item: EgressItem.Frame | Terminal, out: ShardOut) -> None:
        """Route a running chunk, or an end without output: to the request's sink, or as a row of the step sink (which is never full)."""
        if life.sink is not None:
            out.items.append((life, item))
        elif isinstance(item, EgressItem.Error):
            out.steps.append(StepRow(life.token, "", _NO_IDS, None, item.error))
        else:
            assert isinstance(item, EgressItem.Frame)
            out.steps.append(StepRow(life.token, item.text, item.token_ids, None, None, item.extras))

    def _set_lane(self, row: int, lane: Lane) -> None:
        if self._lanes[row] != lane:
            self._lanes[row] = lane
            self._changes += 1
