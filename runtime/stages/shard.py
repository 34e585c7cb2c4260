"""A detokenizer shard: its requests' columns, and what a message does to them.

Owns: the entry point of the stage, alone and without locks (the table is in `rows`, frames in `frames` and `single`). Rules it keeps:

* **Two halves of a step.** `step` computes; the driver offers the deltas to the sinks; `settle` is told which were refused and ends
  what has to end. So a sink that is full ends its own request and no other, and the terminal state is entered only when the
  terminal item is in the reader's hands.
* **Registration before frames.** The driver gives this stage no frame while its registration lane holds something.
* A result for a generate request is a scheduler fault; the kind is looked at before the table, which does not know kinds.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...codec.errors import ClientClosedError, DetokenizeError, EncodeError, HeadraceError
from ...fsm import AbortEvent, AbortSource, RequestEvent, RequestState
from ..sink import EgressItem, SinkError, Terminal
from ..text.engine import TextOptions
from .dispatch import Batch, Failure, Result
from .frames import Frames
from .ingress import own_error
from .life import Fail, Forward, Kind, Life, Register, StepTerminal, advance, advance_abort, extras_key, want_abort
from .plan import ShardOut, StepRow

# A member's look-up through its class costs as much as a step of a machine (CPython 3.11), and these are met for every request.
_FINALIZING, _FINISHED = RequestState.FINALIZING, AbortEvent.FINISHED
_FULL, _GENERATE = SinkError.FULL, Kind.GENERATE
_NO_IDS = np.empty(0, dtype=np.int64)


class Shard(Frames):
    """See the module's head."""

    def key(self) -> tuple[Any, ...]:
        """The whole state, hashable: equal keys behave equally from here on."""
        self._count_due()
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

    # -- the entry point -------------------------------------------------------------------------------------------------

    def step(self, message: Any, sure: int = 1, into: ShardOut | None = None) -> ShardOut:
        """One message of the registration lane or of the frame lane. Of a run at most `sure` steps are taken together: that many
        chunks fit into every sink of `reach(message)`. `into`: messages of the registration lane may share one outbox."""
        out = ShardOut() if into is None else into
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

    def _register(self, life: Life, out: ShardOut) -> None:
        if life.kind is Kind.DETOKENIZE:
            self._detokenize(life, out)
            return
        row = self._free.pop()  # cannot be empty: a slot was booked for every live request at admission
        self._rows[life.rid] = row
        if not self._plan.all_fast:  # it may name this request, and not know it
            self._changes += 1
        self._lives[row] = life
        if life.sink is not None:
            self._waiting[row] = life.sink.waiting()
        self._states[row] = life.state  # handed over: from here on the column is the request's state
        self._produced[row] = 0
        if life.kind is _GENERATE:
            assert life.request is not None
            sampling = life.request.sampling
            if sampling is self._known[0]:  # requests with the same parameters have the very same normal form
                options = self._known[1]
            else:
                options = TextOptions(
                    stops=tuple(sampling.stop_strs),
                    stop_regexes=tuple(sampling.stop_regex_strs),
                    skip_special_tokens=sampling.skip_special_tokens,
                    spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                    no_stop_trim=sampling.no_stop_trim,
                )
                self._known = sampling, options
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
