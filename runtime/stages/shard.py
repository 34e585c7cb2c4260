"""A detokenizer shard: its requests' columns, and what a frame does to them.

Owns: every request from `Register` to its terminal item, alone and without locks. Rules it keeps:

* **Columnar.** Request states, counts and flags are columns indexed by row; a step gathers them, moves all states with one
  `apply_batch`, and runs the smallest loop per request. Rows that need more (a first chunk, a terminal chunk, a stop string being
  held back, half a character, extras) take the general path, one by one. No Python object is built per token there either.
* **Runs.** Steps that wait and differ in nothing but their ids are served at once, as one matrix, where every row of the batch has a
  lane: the same deltas, chunk by chunk, with the fixed cost of one step. As many as every sink is sure to have room for, up to the
  first id that is no token; what is left comes back in `ShardOut.rest` and is served next.
* **Two halves of a step.** `step` computes; the driver offers the deltas to the sinks; `settle` is told which were refused and ends
  what has to end. So a sink that is full ends its own request and no other, and the terminal state is entered only when the
  terminal item is in the reader's hands.
* **All of a request's output goes through its table.** A late chunk of a request that is gone is dropped and counted. A duplicate
  behind a terminal in one frame is absorbed by FINALIZING. A chunk for a control request, or a result for a generate request, is a
  scheduler fault: the table does not know kinds, so the kind is looked at first.
* **Registration before frames.** The driver gives this stage no frame while its registration lane holds something.
* At most one abort is owed for a request, and only if it was pushed and its final chunk has not been seen.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from ...codec import Abort, BatchFrame, FinishReason
from ...codec.errors import (
    AbortedByScheduler,
    ClientClosedError,
    DetokenizeError,
    EncodeError,
    HeadraceError,
    InternalError,
    SlowClientError,
)
from ...fsm import REQUEST, AbortEvent, AbortSource, AbortState, IllegalTransition, RequestEvent, RequestState
from ..sink import Columns, EgressItem, Extras, Sink, SinkError, Terminal
from ..text.engine import TextEngine, TextOptions, Token, bad_id
from .dispatch import Batch, Failure, Result
from .ingress import own_error
from .life import (
    Ended,
    Fail,
    Forward,
    Kind,
    Life,
    Recorder,
    Register,
    StepTerminal,
    advance,
    advance_abort,
    extras_key,
    want_abort,
)

_SMALL = 16  # below this many rows the fixed cost of the array operations is more than a plain loop's
_NO_IDS = np.empty(0, dtype=np.int64)
_BAD_ID = "the scheduler sent a token id that cannot be decoded"


class Lane(enum.IntEnum):
    """How a row's one-id chunk is served in columns; GENERAL is one by one."""

    GENERAL = 0  # not picked yet, or not live
    PLAIN = 1  # streams to a handle; the token's text is the delta
    HELD = 2  # streams to a handle; stops, or characters split over tokens
    QUIET = 3  # non-streaming: only its ids are kept
    STEP = 4  # streams to the step sink


# A member's look-up through its class costs as much as a step of a machine (CPython 3.11), and these are met for every request.
_GENERAL = Lane.GENERAL
_PLAIN = Lane.PLAIN
_HELD = Lane.HELD
_QUIET = Lane.QUIET
_STEP = Lane.STEP
_QUEUED, _FINALIZING = RequestState.QUEUED, RequestState.FINALIZING
_CHUNK, _PICKED = RequestEvent.CHUNK, RequestEvent.SCHEDULER_PICKED
_FINAL_CHUNK, _FINAL_SENT = RequestEvent.FINAL_CHUNK, RequestEvent.FINAL_FRAME_SENT
_FINISHED, _REQUESTED = AbortEvent.FINISHED, AbortState.REQUESTED
_UNKNOWN, _PART = Token.UNKNOWN, Token.PART
_FULL, _GENERATE = SinkError.FULL, Kind.GENERATE
_next: Any = REQUEST.next  # also of states that are plain ints, as a column gives them
_outcome: Any = REQUEST.outcome
_FAST_LANES = (_PLAIN, _HELD, _QUIET, _STEP)


class StepColumns(NamedTuple):
    """Plain deltas of one step for the step sink, one id each: what the requests are called by, texts, ids (int64, owned)."""

    tokens: Sequence[Any]
    texts: list[str]
    ids: np.ndarray[Any, Any]
    extras: Sequence[Extras] = ()


class StepRow:
    """What one step produced for one request of the step sink."""

    __slots__ = ("error", "extras", "finish_reason", "text", "token", "token_ids")

    def __init__(
        self,
        token: Any,
        text: str,
        token_ids: np.ndarray[Any, Any],
        finish_reason: FinishReason | None,
        error: HeadraceError | None,
        extras: Sequence[Extras] = (),
    ) -> None:
        self.token = token
        self.text = text
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.error = error
        self.extras = extras

    @property
    def ends(self) -> bool:
        """Whether this is the request's terminal item."""
        return self.finish_reason is not None or self.error is not None


class ShardOut:
    """What a step gives away. `columns` and `items` go to sinks and may be refused; the rest cannot be."""

    __slots__ = (
        "begun", "columns", "counts", "ended", "faults", "items", "owed", "rest", "run", "step_columns", "steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.begun: list[tuple[Sink, int, Mapping[str, Any] | None]] = []  # first output: prompt_tokens and scalars
        self.columns: list[Columns] = []
        self.items: list[tuple[Life, EgressItem.Frame | Terminal]] = []
        self.steps: list[StepRow] = []
        self.step_columns: list[StepColumns] = []
        self.run: list[StepColumns] = []  # of a run, one for each of its steps; then the two above are empty
        self.rest: Batch | None = None  # the steps of a run that were not taken; to be served next
        self.owed: list[Ended] = []
        self.ended: list[str] = []
        self.counts: dict[str, int] = {}
        self.faults: list[str] = []  # server faults in words that name no data, for the driver's log

    def count(self, name: str, times: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + times


class _Group:
    """Rows of one batch that are served alike: their positions in it (None: all), and where their output goes."""

    __slots__ = ("columns", "lane", "odd", "positions", "quiet", "rows", "states", "tokens")

    def __init__(self, lane: Lane, positions: Any, rows: Sequence[int]) -> None:
        self.lane = lane
        self.positions = positions
        self.rows = rows
        self.columns = Columns((), (), ())  # PLAIN, HELD: used again at every step of the same batch
        self.states: Sequence[Any] = ()  # HELD, STEP: text states
        self.odd: set[int] = set()  # STEP: positions of those that are not plain
        self.quiet: Sequence[array[int]] = ()  # QUIET: the ids so far
        self.tokens: Sequence[Any] = ()  # STEP: what the requests are called by


class _Plan:
    """What was looked up for one batch of rids (see `Shard._look_up`)."""

    __slots__ = (
        "all_fast", "changes", "column", "distinct", "fresh", "groups", "headroom", "layout", "lengths", "rids", "rows",
        "quiet", "single",
    )  # fmt: skip

    def __init__(self, changes: int, rids: list[str], rows: list[int], column: Any, distinct: bool) -> None:
        self.changes = changes
        self.layout: Any = (
            None  # of the last frame that was looked at, and whether it is plain: one id each, nothing ends
        )
        self.single = False
        self.lengths: Any = None  # ids of each row, where nothing ends in it
        self.rids = rids
        self.rows = rows
        self.column = column
        self.distinct = distinct  # no live request stands twice in the batch
        self.fresh: list[int] = []  # positions of requests of which nothing has come yet
        self.all_fast = False
        self.quiet = False  # all are of the lane QUIET
        self.groups: list[_Group] = []
        self.headroom = 0


_NO_PLAN = _Plan(-1, [], [], np.empty(0, dtype=np.intp), True)


class Shard:
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
        self._lanes = np.zeros(capacity + 1, dtype=np.uint8)  # a Lane; only RUNNING and STREAMING rows have one but GENERAL
        self._produced = np.zeros(capacity + 1, dtype=np.int64)
        self._lives: list[Any] = [None] * (capacity + 1)
        self._waiting: list[Any] = [None] * (capacity + 1)  # the waiting list of the row's sink
        self._texts: list[Any] = [None] * (capacity + 1)
        self._options: list[Any] = [None] * (capacity + 1)
        self._ids: list[Any] = [None] * (capacity + 1)  # array("q") of a non-streaming request's ids so far
        self._extras: list[Any] = [None] * (capacity + 1)
        # How the last batch was served, good while neither its rids nor the table have changed. A cache: no part of the state.
        self._changes = 0
        self._plan = _NO_PLAN

    def key(self) -> tuple[Any, ...]:
        """The whole state, hashable: equal keys behave equally from here on."""
        return tuple(
            (
                rid,
                self._states[row],
                int(self._lanes[row]),
                int(self._produced[row]),
                self._lives[row].key(),
                self._options[row],
                None if self._texts[row] is None else self._texts[row].key(),
                None if self._ids[row] is None else self._ids[row].tobytes(),
                None if self._extras[row] is None else extras_key(self._extras[row]),
            )
            for rid, row in self._rows.items()
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, rid: object) -> bool:
        return rid in self._rows

    def live(self) -> dict[str, int]:
        """Live requests by state name."""
        rows = list(self._rows.values())
        counts: list[int] = np.bincount(self._state_column[rows]).tolist() if rows else []
        return {RequestState(state).name: count for state, count in enumerate(counts) if count}

    # -- the entry point -------------------------------------------------------------------------------------------------

    def step(self, message: Any, sure: int = 1) -> ShardOut:
        """One message of the registration lane or of the frame lane. Of a run at most `sure` steps are taken together: that many
        chunks fit into every sink of `reach(message)`."""
        out = ShardOut()
        if isinstance(message, Batch):
            self._frame(message, sure, out)
        elif isinstance(message, Register):
            self._register(message.life, out)
        elif isinstance(message, Forward):
            self._forward(message.rid, message.source, out)
        elif isinstance(message, Result):
            self._result(message, out)
        elif isinstance(message, Failure):
            self._failure(message, out)
        elif isinstance(message, Fail):
            rids = list(self._rows) if message.rids is None else message.rids
            for rid in dict.fromkeys(rids):
                row = self._rows.get(rid)
                if row is None:
                    out.count("late_failures")
                else:
                    self._fail(row, message.error, out, owed=message.owed)
        elif isinstance(message, StepTerminal):
            out.steps.append(StepRow(message.token, "", _NO_IDS, None, message.item.error))
        else:
            raise ValueError(f"a shard has no use for {type(message).__name__}")
        return out

    def settle(self, out: ShardOut, refused_rows: Sequence[int], refused: Mapping[int, SinkError]) -> ShardOut:
        """The second half of a step: `refused_rows` are rows of `out.columns` whose sinks were full, `refused` maps indices of
        `out.items` to the reason. What was accepted and terminal is completed; what was refused is ended."""
        after = ShardOut()
        for row in refused_rows:
            self._overflow(row, after)
        for index, (life, item) in enumerate(out.items):
            row = self._rows.get(life.rid, -1)
            if row < 0 or self._lives[row] is not life:
                continue  # its end was settled by an earlier item of this step
            why = refused.get(index)
            if why is _FULL:
                self._overflow(row, after)
            elif not isinstance(item, EgressItem.Frame) and self._states[row] == _FINALIZING:
                # accepted, or closed by a client that has gone: either way the terminal item is out of our hands
                self._complete(row, after)
        return after

    # -- frames ----------------------------------------------------------------------------------------------------------

    def reach(self, batch: Batch) -> list[Columns] | None:
        """The sinks that a step of `batch` writes to in columns; None where it is not all served in columns."""
        plan, _ = self._planned(batch)
        return [group.columns for group in plan.groups if group.lane in (_PLAIN, _HELD)] if plan.all_fast else None

    def _planned(self, batch: Batch) -> tuple[_Plan, Sequence[int]]:
        """How `batch` can be served, and where its rows stand in the frame."""
        frame, selected = batch.frame, batch.rows
        indices: Sequence[int] = range(len(frame.rids)) if selected is None else selected
        rids = frame.rids if selected is None else [frame.rids[index] for index in selected]
        plan = self._plan
        if plan.changes != self._changes or (plan.rids is not rids and plan.rids != rids):
            plan = self._plan = self._look_up(rids)
        if plan.layout is not frame.layout:
            plan.layout = frame.layout
            ids, offsets, runs_on = len(frame.token_ids), frame.offsets, not frame.finished
            plan.single = runs_on and ids == len(frame.rids) and bool((offsets == _ramp(ids + 1)).all())
            plan.lengths = (frame.lengths if selected is None else frame.lengths[selected]) if runs_on else None
        return plan, indices

    def _frame(self, batch: Batch, sure: int, out: ShardOut) -> None:
        plan, indices = self._planned(batch)
        frame, selected, steps = batch.frame, batch.rows, 1
        if plan.fresh and plan.distinct:
            self._pick(plan, frame, indices, out)
        if not plan.distinct:
            self._general(frame, indices, plan.rows, out, together=plan.distinct)
        elif plan.all_fast and plan.single and self._has_headroom(plan):
            # The common step: one id for every request, nothing special anywhere.
            if batch.run is not None and sure > 1:
                run = batch.run if selected is None else batch.run[:, selected]
                steps = self._run(plan, run[: min(sure, plan.headroom)], out)
            if steps < 2:
                steps = 1
                self._single(plan, frame, selected, indices, out)
            plan.headroom -= steps
        elif plan.quiet and plan.lengths is not None and self._has_headroom(plan, longest := int(plan.lengths.max())):
            plan.headroom -= longest
            self._move(plan.column, plan.rids, tokens=plan.lengths)
            self._keep_ids(plan.groups[0], frame, indices, out)
        elif len(indices) < _SMALL:
            plan.headroom -= len(frame.token_ids)
            self._general(frame, indices, plan.rows, out, together=True)
        else:
            self._mixed(frame, selected, indices, plan, out)
        out.rest = batch.behind(steps)

    def _single(
        self, plan: _Plan, frame: BatchFrame, selected: list[int] | None, indices: Sequence[int], out: ShardOut
    ) -> None:
        """One step of a batch in which every row has a lane and one id."""
        self._move(plan.column, plan.rids)
        mine = frame.token_ids if selected is None else frame.token_ids[selected]
        for group in plan.groups:
            positions = group.positions
            where = indices if positions is None else [indices[at] for at in positions.tolist()]
            if group.lane is _QUIET:
                self._keep_ids(group, frame, where, out)
                continue
            for at in self._deliver(group, mine if positions is None else mine[positions], frame, where, out):
                self._text(group.rows[at], frame, where[at], out)

    def _run(self, plan: _Plan, ids: Any, out: ShardOut) -> int:
        """As many of these steps ([steps, rows]) as can be served at once; their number. Below 2 nothing was done."""
        classes = self._engine.classes(ids)
        if classes is None:
            return 0
        steps = _before(classes, _UNKNOWN)
        if steps < 2:
            return steps
        ids, classes = ids[:steps], classes[:steps]
        self._move(plan.column, plan.rids, steps)
        for group in plan.groups:
            at = group.positions
            if at is None:
                self._deliver_run(group, ids, classes, out)
            else:
                self._deliver_run(group, ids[:, at], classes[:, at], out)
        return steps

    def _deliver_run(self, group: _Group, ids: Any, classes: Any, out: ShardOut) -> None:
        """`_deliver` for several steps: `ids` and `classes` are [steps, rows of the group]."""
        engine, columns = self._engine, group.columns
        if group.lane is _STEP:
            texts, own = engine.feed_steps(group.states, ids, classes, group.odd), np.array(ids, dtype=np.int64)
            out.run = [StepColumns(group.tokens, line, numbers) for line, numbers in zip(texts, own, strict=True)]
            return
        if group.lane is _QUIET:
            blob, width = np.ascontiguousarray(ids.T, dtype=np.int64).tobytes(), 8 * len(ids)
            parts = [blob[start : start + width] for start in range(0, len(blob), width)]
            deque(map(array.frombytes, group.quiet, parts), 0)
            return
        part = None if group.lane is _PLAIN and not _any(classes, _PART) else classes.min(axis=0) == _PART
        if part is None:
            columns.pairs = engine.pairs(ids)
        else:
            states = group.states or [self._texts[row] for row in group.rows]
            columns.pairs = engine.feed_run(states, ids, part.tolist())
            if group.lane is _PLAIN:
                for row, state in zip(group.rows, states, strict=True):
                    if not state.plain:
                        self._set_lane(row, _HELD)
        columns.steps, columns.extras = len(ids), ()
        out.columns.append(columns)

    def _mixed(
        self, frame: BatchFrame, selected: list[int] | None, indices: Sequence[int], plan: _Plan, out: ShardOut
    ) -> None:
        """A step in which some requests are special: those one by one, the others in columns."""
        lengths = frame.lengths if selected is None else frame.lengths[selected]
        plan.headroom -= int(lengths.max())
        lanes = self._lanes[plan.column]
        fast = (lengths == 1) | (lanes == _QUIET)
        if frame.finished:
            finished = np.zeros(len(frame.rids), dtype=bool)
            finished[frame.finished] = True
            fast &= ~(finished if selected is None else finished[selected])
        # a row that comes to its limit takes the general path, which ends it with the reason
        fast &= self._produced[plan.column] + lengths <= self._output_limit
        starts = frame.offsets[:-1] if selected is None else frame.offsets[selected]
        lanes = np.where(fast, lanes, _GENERAL)
        for group in self._groups(lanes, plan):
            column = plan.column[group.positions]
            rids = [] if self._record is None else [plan.rids[at] for at in group.positions.tolist()]
            self._move(column, rids, tokens=lengths[group.positions])
            where = [indices[at] for at in group.positions.tolist()]
            if group.lane is _QUIET:
                self._keep_ids(group, frame, where, out)
                continue
            for at in self._deliver(group, frame.token_ids[starts[group.positions]], frame, where, out):
                self._text(group.rows[at], frame, where[at], out)
        left = np.flatnonzero(lanes == _GENERAL).tolist()
        if left:
            self._general(frame, [indices[at] for at in left], [plan.rows[at] for at in left], out, together=True)

    def _look_up(self, rids: list[str]) -> _Plan:
        """The rows of a batch and how each can be served. Kept while the batch and the table stay what they are."""
        rows = list(map(self._rows.get, rids, repeat(-1)))
        known = [row for row in rows if row >= 0]
        column = np.array(rows, dtype=np.intp)
        plan = _Plan(self._changes, rids, rows, column, len(set(known)) == len(known))
        plan.fresh = np.flatnonzero(self._state_column[column] == _QUEUED).tolist()
        self._lay_out(plan)
        return plan

    def _lay_out(self, plan: _Plan) -> None:
        lanes = self._lanes[plan.column]
        plan.changes = self._changes
        plan.all_fast = bool(plan.rows) and bool(lanes.all())
        if plan.all_fast:
            first = Lane(lanes[0])
            plan.groups = (
                [self._group(first, None, plan.rows)] if (lanes == first).all() else self._groups(lanes, plan)
            )
            plan.quiet = first is _QUIET and len(plan.groups) == 1

    def _pick(self, plan: _Plan, frame: BatchFrame, indices: Sequence[int], out: ShardOut) -> None:
        """The scheduler has picked the fresh requests of this batch: what comes of them goes by their lanes from now on."""
        prompt_tokens, scalars = frame.prompt_tokens, list(frame.scalars.items())
        for at in plan.fresh:
            row = plan.rows[at]
            life = self._lives[row]
            if row < 0 or life.kind is not _GENERATE:
                continue  # output for a control request is looked at one by one
            self._advance(row, _PICKED)
            text = self._texts[row]
            if text is None:
                lane = _QUIET
            elif life.sink is None:
                lane = _STEP
            else:
                # where only leading spaces are to be stripped, the first token's text ends it
                lane = _PLAIN if text.plain else _GENERAL if text.lead and text.stops is None else _HELD
                index = indices[at]
                meta = {name: column[index] for name, column in scalars} if scalars else None
                out.begun.append((life.sink, int(prompt_tokens[index]), meta))
            self._lanes[row] = lane
            self._changes += 1
        plan.fresh = []
        self._lay_out(plan)

    def _groups(self, lanes: Any, plan: _Plan) -> list[_Group]:
        """The rows of a batch by lane, without those of GENERAL."""
        return [
            self._group(lane, positions, plan.column[positions].tolist())
            for lane in _FAST_LANES
            if len(positions := np.flatnonzero(lanes == lane))
        ]

    def _group(self, lane: Lane, positions: Any, rows: list[int]) -> _Group:
        group, lives = _Group(lane, positions, rows), self._lives
        if lane is _QUIET:
            group.quiet = [self._ids[row] for row in rows]
        elif lane is _STEP:
            group.tokens = [lives[row].token for row in rows]
            group.states = [self._texts[row] for row in rows]
            group.odd = {at for at, state in enumerate(group.states) if not state.plain}
        else:
            group.columns = Columns(rows, [lives[row].sink for row in rows], [self._waiting[row] for row in rows])
            if lane is _HELD:
                group.states = [self._texts[row] for row in rows]
        return group

    def _has_headroom(self, plan: _Plan, tokens: int = 1) -> bool:
        """Whether every row may still produce so many; counted down, and looked up anew only when it runs out."""
        if plan.headroom < tokens:
            plan.headroom = self._output_limit - int(self._produced[plan.column].max())
        return plan.headroom >= tokens

    def _move(self, column: Any, rids: list[str], steps: int = 1, tokens: Any = None) -> None:
        """A CHUNK for each of these rows and steps, and as many tokens produced (or `tokens`, for each row). The rows are STREAMING, or become so with the first
        one, and stay so: the table is asked once for all steps (a test pins that cell)."""
        if self._record is not None:
            self._record_chunks(column, rids, steps)
        if len(column) < _SMALL:
            states = self._states
            for row in column.tolist():
                states[row] = _next(states[row], _CHUNK)
        else:
            after, illegal = REQUEST.apply_batch(self._state_column[column], _CHUNK)
            if np.count_nonzero(
                illegal
            ):  # cannot be: only RUNNING and STREAMING rows have a lane. A stage that finds it can be must stop.
                raise InternalError("a row that is not streaming was taken for one that is")
            self._state_column[column] = after
        self._produced[column] += steps if tokens is None else tokens

    def _deliver(
        self, group: _Group, ids: Any, frame: BatchFrame, where: Sequence[int], out: ShardOut
    ) -> Sequence[int]:
        """One id for each row of the group. Returns the positions in the group whose text needs the general path."""
        columns = group.columns
        columns.steps = 1
        extras = columns.extras = frame.kept_extras(where) if frame.has_extras else ()
        if group.lane is _HELD:
            deltas, bad = self._engine.feed_single(group.states, ids)
            columns.pairs = list(zip(deltas, ids.tolist(), strict=True))
            for at, _ in bad:
                self._fail_bad_id(group.rows[at], int(ids[at]), out)
            wrong = {at for at, _ in bad}
            out.columns.append(columns.only([at for at in range(len(deltas)) if at not in wrong]) if bad else columns)
            return ()
        if group.lane is _STEP:
            classes = self._engine.classes(ids)
            if classes is None or _any(classes, _UNKNOWN):
                texts, bad = self._engine.feed_single(group.states, ids)
                group.odd = {at for at, state in enumerate(group.states) if not state.plain}
            else:
                texts, bad = self._engine.feed_steps(group.states, ids[None], classes[None], group.odd)[0], ()
            step = StepColumns(group.tokens, texts, np.array(ids, dtype=np.int64), extras)
            if bad:
                wrong = {at for at, _ in bad}
                keep = [at for at in range(len(texts)) if at not in wrong]
                step = StepColumns(
                    [step.tokens[at] for at in keep],
                    [step.texts[at] for at in keep],
                    step.ids[keep],
                    [extras[at] for at in keep] if extras else (),
                )
                for at, _ in bad:
                    self._fail_bad_id(group.rows[at], int(ids[at]), out)
            out.step_columns.append(step)
            return ()
        pairs, clean = self._engine.feed_pairs(ids)
        columns.pairs = pairs  # type: ignore[assignment]  # None is taken out below
        if clean:
            out.columns.append(columns)
            return ()
        out.columns.append(columns.only([at for at, pair in enumerate(pairs) if pair is not None]))
        return [at for at, pair in enumerate(pairs) if pair is None]

    def _keep_ids(self, group: _Group, frame: BatchFrame, where: Sequence[int], out: ShardOut) -> None:
        """The ids of non-streaming requests, any number for each: they are kept, and that is all until the terminal chunk."""
        ids, offsets = frame.token_ids, frame.offsets
        blob = np.ascontiguousarray(ids, dtype=np.int64).tobytes()
        bounds = (offsets * 8).tolist()
        deque(map(array.frombytes, group.quiet, [blob[bounds[at] : bounds[at + 1]] for at in where]), 0)
        if frame.has_extras:
            for row, own in zip(group.rows, frame.kept_extras(where), strict=True):
                self._keep(row, own)
        if unknown := self._engine.unknown(ids):
            place = {index: row for index, row in zip(where, group.rows, strict=True)}
            told: set[int] = set()
            for at in unknown:  # of this shard or another; each row's first one names it
                index = int(np.searchsorted(offsets, at, side="right")) - 1
                if index in place and index not in told:
                    told.add(index)
                    self._fail_bad_id(place[index], int(ids[at]), out)

    def _text(self, row: int, frame: BatchFrame, index: int, out: ShardOut) -> None:
        """The general text path of one row whose states and counts are already moved."""
        ids = frame.token_ids[frame.offsets[index] : frame.offsets[index + 1]]
        self._feed([(row, index, ids)], frame, out)

    def _general(
        self, frame: BatchFrame, indices: Sequence[int], rows: Sequence[int], out: ShardOut, *, together: bool
    ) -> None:
        """One row after the other; the text of all running chunks is fed in one call where no request is named twice."""
        offsets = frame.offsets
        finishes = frame.finish_reasons if frame.finished else None
        running: list[tuple[int, int, Any]] = []
        for index, row in zip(indices, rows, strict=True):
            if row < 0 or self._lives[row] is None:
                out.count("late_chunks")
                continue
            life = self._lives[row]
            if life.kind is not _GENERATE:
                self._fault(row, "the scheduler answered a control request with output", out)
                continue
            finish = None if finishes is None else finishes[index]
            event = _CHUNK if finish is None else _FINAL_CHUNK
            if not self._advance_chunk(row, event, out):
                continue
            ids = frame.token_ids[offsets[index] : offsets[index + 1]]
            self._produced[row] += len(ids)
            if self._produced[row] > self._output_limit:
                told = (
                    f"the scheduler produced more than {self._output_limit} tokens, the context length, for one request"
                )
                out.faults.append("the scheduler produced more than the context length for one request")
                out.count("outputs_over_limit")
                self._fail(row, InternalError(told), out, owed=finish is None)
            elif finish is None:
                running.append((row, index, ids))
                if not together:
                    self._feed(running, frame, out)
                    running.clear()
            else:
                self._final(row, frame, index, ids, finish, out)
        if running:
            self._feed(running, frame, out)

    def _advance_chunk(self, row: int, event: RequestEvent, out: ShardOut) -> bool:
        """Move the row for one chunk. False when the chunk was absorbed (late) or the row was failed (illegal)."""
        try:
            if self._states[row] == _QUEUED:
                self._advance(row, _PICKED)
            if _outcome(self._states[row], event) == "absorb":
                out.count("late_chunks")
                return False
            self._advance(row, event)
        except IllegalTransition as fault:
            self._fault(row, f"illegal transition: {fault}", out)
            return False
        return True

    def _feed(self, running: Sequence[tuple[int, int, Any]], frame: BatchFrame, out: ShardOut) -> None:
        """Running chunks: streamed text out, or ids kept."""
        streamed = []
        for row, index, ids in running:
            life = self._lives[row]
            if life.stream:
                streamed.append((row, index, ids))
            else:
                self._ids[row].frombytes(np.ascontiguousarray(ids, dtype=np.int64).tobytes())
                self._keep_extras(row, frame, index)
                self._set_lane(row, _QUIET)
                if unknown := self._engine.unknown(ids):
                    self._fail_bad_id(row, int(ids[unknown[0]]), out)
        if not streamed:
            return
        lengths = [len(ids) for _, _, ids in streamed]
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        ids_column = streamed[0][2] if len(streamed) == 1 else np.concatenate([ids for _, _, ids in streamed])
        states = [self._texts[row] for row, _, _ in streamed]
        deltas, bad = self._engine.feed(states, ids_column, offsets)
        wrong = dict(bad)
        for at, (row, index, ids) in enumerate(streamed):
            if at in wrong:
                self._fail_bad_id(row, wrong[at], out)
                continue
            life = self._lives[row]
            self._give(life, EgressItem.Frame(deltas[at], _owned_ids(ids), *self._first(row, frame, index)), None, out)
            # A row that has once held something back stays HELD: text of many scripts would change its lane at every token.
            plain = self._texts[row].plain and self._lanes[row] != _HELD
            if life.sink is None:
                self._set_lane(row, _STEP)
                self._changes += 1  # a plan knows which rows of this lane are not plain
            else:
                self._set_lane(row, _PLAIN if plain else _HELD)

    def _final(self, row: int, frame: BatchFrame, index: int, ids: Any, finish: FinishReason, out: ShardOut) -> None:
        """The terminal chunk: flush, cut, and one terminal item, which `settle` turns into COMPLETED."""
        life = self._lives[row]
        if isinstance(finish, Abort) and finish.abort_status is not None:
            told = finish.message or "the scheduler aborted the request"
            error = AbortedByScheduler(told, http_status=finish.abort_status, err_type=finish.err_type)
            self._fail(row, error, out, owed=False)
            return
        try:
            if life.stream:
                text = self._engine.finish(self._texts[row], ids, finish)
                all_ids = _owned_ids(ids)
            else:
                kept = self._ids[row]
                began = len(kept)
                kept.frombytes(np.ascontiguousarray(ids, dtype=np.int64).tobytes())
                all_ids = np.frombuffer(kept, dtype=np.int64)
                text = self._engine.whole(self._options[row], all_ids, began, finish)
        except DetokenizeError as error:
            out.faults.append(_BAD_ID)
            self._fail(row, error, out, owed=False)
            return
        except Exception as fault:
            # Text is made by foreign code on a model's output; whatever it raises ends this request and nobody else's.
            out.faults.append(f"decoding failed with {type(fault).__name__}")
            self._fail(row, DetokenizeError(f"decoding failed: {type(fault).__name__}"), out, owed=False)
            return
        self._keep_extras(row, frame, index)
        extras, self._extras[row] = tuple(self._extras[row] or ()), None
        meta = {name: column[index] for name, column in frame.scalars.items()}
        item = EgressItem.Frame(text, all_ids, extras, int(frame.prompt_tokens[index]), meta or None)
        self._give(life, EgressItem.Done(finish, item), finish, out)

    def _first(self, row: int, frame: BatchFrame, index: int) -> tuple[tuple[Extras, ...], int, Any]:
        """(extras, prompt_tokens, meta) of a running chunk; the scalars are given with the first chunk that has them."""
        extras: tuple[Extras, ...] = ()
        if frame.has_extras:
            self._keep_extras(row, frame, index)
            extras, self._extras[row] = tuple(self._extras[row] or ()), None
        meta = {name: column[index] for name, column in frame.scalars.items()} if frame.scalars else None
        return extras, int(frame.prompt_tokens[index]), meta

    def _keep_extras(self, row: int, frame: BatchFrame, index: int) -> None:
        if frame.has_extras:
            self._keep(row, frame.owned_extras([index])[0])

    def _keep(self, row: int, own: Extras) -> None:
        if own:
            if self._extras[row] is None:
                self._extras[row] = []
            self._extras[row].append(own)

    def _give(self, life: Life, item: EgressItem.Frame | Terminal, finish: FinishReason | None, out: ShardOut) -> None:
        """Route one item: to the request's sink, or as a row of the step sink (which is never full)."""
        if life.sink is None:
            if isinstance(item, EgressItem.Error):
                out.steps.append(StepRow(life.token, "", _NO_IDS, None, item.error))
                return
            frame = item.frame if isinstance(item, EgressItem.Done) else item
            assert isinstance(frame, EgressItem.Frame)
            if finish is not None or life.stream:
                out.steps.append(StepRow(life.token, frame.text, frame.token_ids, finish, None, frame.extras))
        # kept in `items` for the step sink too: `settle` completes a request when its terminal item is out
        out.items.append((life, item))

    def _set_lane(self, row: int, lane: Lane) -> None:
        if self._lanes[row] != lane:
            self._lanes[row] = lane
            self._changes += 1

    # -- everything but frames ---------------------------------------------------------------------------------------------

    def _register(self, life: Life, out: ShardOut) -> None:
        if life.kind is Kind.DETOKENIZE:
            self._detokenize(life, out)
            return
        row = self._free.pop()  # cannot be empty: a slot was booked for every live request at admission
        self._rows[life.rid] = row
        self._changes += 1
        self._lives[row] = life
        if life.sink is not None:
            self._waiting[row] = life.sink.waiting()
        self._states[row] = life.state  # handed over: from here on the column is the request's state
        self._produced[row] = 0
        if life.kind is _GENERATE:
            assert life.request is not None
            sampling = life.request.sampling
            options = TextOptions(
                stops=tuple(sampling.stop_strs),
                stop_regexes=tuple(sampling.stop_regex_strs),
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                no_stop_trim=sampling.no_stop_trim,
            )
            self._options[row] = options
            if life.stream:
                self._texts[row] = self._engine.open(options)
            else:
                self._ids[row] = array("q")

    def _detokenize(self, life: Life, out: ShardOut) -> None:
        """Answered here and never by the ring; needs no row."""
        item: Terminal
        assert life.ids is not None
        try:
            item = EgressItem.Data(self._engine.decode(life.ids, skip_special_tokens=True))
            event = RequestEvent.RESULT
        except Exception as fault:
            # foreign decoder on a client's ids: the answer is a 500 for this request whatever was raised
            error = (
                fault
                if isinstance(fault, HeadraceError)
                else DetokenizeError(f"decoding failed: {type(fault).__name__}")
            )
            item, event = EgressItem.Error(own_error(error, life.shown_rid)), RequestEvent.ERROR
        advance(life, event, self._stage, self._record)
        advance_abort(life, _FINISHED, self._stage, self._record)
        out.items.append((life, item))
        out.ended.append(life.rid)

    def _forward(self, rid: str, source: AbortSource, out: ShardOut) -> None:
        row = self._rows.get(rid)
        if row is None:
            out.count("late_aborts")
            return
        if self._states[row] == _FINALIZING:
            return  # cannot be met between two steps, because `settle` ends it; kept total
        life = self._lives[row]
        self._advance(row, RequestEvent.DISCONNECT)
        want_abort(life, source, self._stage, self._record)
        error = ClientClosedError(f"the request was aborted ({source.name.lower()})")
        self._end(row, EgressItem.Error(own_error(error, life.shown_rid)), out)

    def _result(self, result: Result, out: ShardOut) -> None:
        row = self._rows.get(result.rid)
        if row is None:
            out.count("late_results")
            return
        life = self._lives[row]
        if life.kind is not Kind.CONTROL:
            self._fault(row, "the scheduler answered a generate request with a control result", out)
            return
        self._advance(row, RequestEvent.RESULT)
        advance_abort(life, _FINISHED, self._stage, self._record)
        self._end(row, EgressItem.Control(result.payload), out)

    def _failure(self, failure: Failure, out: ShardOut) -> None:
        row = self._rows.get(failure.rid)
        if row is None:
            out.count("late_failures")
            return
        self._fail(row, EncodeError(failure.message), out, owed=True)

    # -- ends --------------------------------------------------------------------------------------------------------------

    def _advance(self, row: int, event: RequestEvent) -> None:
        before = self._states[row]
        after = self._states[row] = _next(before, event)
        if self._record is not None:
            self._record.record("request", self._lives[row].rid, before, event, after, self._stage)

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
        out.faults.append(_BAD_ID)
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
        self._advance(row, RequestEvent.ERROR)
        if owed:
            want_abort(life, AbortSource.DETOK, self._stage, self._record)
        else:
            advance_abort(life, _FINISHED, self._stage, self._record)
        self._end(row, EgressItem.Error(own_error(error, life.shown_rid)), out)

    def _end(self, row: int, item: Terminal, out: ShardOut) -> None:
        life = self._lives[row]
        self._give(life, item, None, out)
        self._drop(row, out)

    def _drop(self, row: int, out: ShardOut) -> None:
        """Terminal means absent: the row is free, the slot goes back, and an abort that is owed goes to ingress."""
        life = self._lives[row]
        del self._rows[life.rid]
        self._changes += 1
        self._plan = _NO_PLAN  # it is out of date, and would keep the sink
        self._lives[row] = self._waiting[row] = self._texts[row] = self._options[row] = self._ids[row] = self._extras[
            row
        ] = None
        self._lanes[row] = _GENERAL
        self._free.append(row)
        if life.abort == _REQUESTED:
            out.owed.append(Ended(life))
        out.ended.append(life.rid)


def _owned_ids(ids: Any) -> np.ndarray[Any, Any]:
    """A copy: no view on a frame outlives the step that decoded it."""
    return np.array(ids, dtype=np.int64)


def _any(classes: Any, kind: Token) -> bool:
    return bytes((kind,)) in classes.tobytes()  # a search in C: a third of the cost of an array's any()


def _before(classes: Any, kind: Token) -> int:
    """How many lines of `classes` stand before the first one that has `kind` in it."""
    at: int = classes.tobytes().find(kind)
    return len(classes) if at < 0 else at // classes.shape[1]


_RAMP = np.arange(4097, dtype=np.int64)


def _ramp(count: int) -> np.ndarray[Any, Any]:
    """0, 1, 2, …: the offsets of a frame with one id for every request."""
    return _RAMP[:count] if count <= len(_RAMP) else np.arange(count, dtype=np.int64)
