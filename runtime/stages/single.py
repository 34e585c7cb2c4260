"""Output that is looked at row by row: first and terminal chunks of more than one id, faults, and whatever is not alike.

Owns: the general path of a frame. Rules it keeps:

* All of a request's output goes through its table. A late chunk of a request that is gone is dropped and counted. A duplicate behind a
  terminal in one frame is absorbed by FINALIZING. A chunk for a control request is a scheduler fault: the table does not know kinds, so
  the kind is looked at first.
* A fault of one row's output, or of the foreign code that decodes it, ends that row and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...codec import Abort, BatchFrame, FinishReason
from ...codec.errors import AbortedByScheduler, DetokenizeError, InternalError
from ...fsm import REQUEST, IllegalTransition, RequestEvent, RequestState
from ..sink import EgressItem, Extras
from .life import Kind
from .plan import HELD, PLAIN, QUIET, STEP, ShardOut, StepRow
from .rows import BAD_ID, Rows

# A member's look-up through its class costs as much as a step of a machine (CPython 3.11), and these are met for every request.
_QUEUED, _GENERATE = RequestState.QUEUED, Kind.GENERATE
_CHUNK, _FINAL_CHUNK, _PICKED = RequestEvent.CHUNK, RequestEvent.FINAL_CHUNK, RequestEvent.SCHEDULER_PICKED
_outcome: Any = REQUEST.outcome  # also of states that are plain ints


class OneByOne(Rows):
    """See the module's head."""

    def _text(self, row: int, frame: BatchFrame, index: int, out: ShardOut) -> None:
        """The general text path of one row whose states and counts are already moved."""
        ids = frame.token_ids[frame.offsets[index] : frame.offsets[index + 1]]
        self._feed([(row, index, ids)], frame, out)

    def _general(
        self, frame: BatchFrame, indices: Sequence[int], rows: Sequence[int], out: ShardOut, *, together: bool
    ) -> None:
        """One row after the other; the text of all running chunks is fed in one call where no request is named twice."""
        offsets, token_ids = frame.offsets, frame.token_ids
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
            ids = token_ids[offsets[index] : offsets[index + 1]]
            produced = self._produced[row] = int(self._produced[row]) + len(ids)
            if produced > self._output_limit:
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
                self._set_lane(row, QUIET)
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
            self._give(life, EgressItem.Frame(deltas[at], _owned_ids(ids), *self._with(row, frame, index)), out)
            # A row that has once held something back stays HELD: text of many scripts would change its lane at every token.
            plain = self._texts[row].plain and self._lanes[row] != HELD
            if life.sink is None:
                self._set_lane(row, STEP)
                self._changes += 1  # a plan knows which rows of this lane are not plain
            else:
                self._set_lane(row, PLAIN if plain else HELD)

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
            out.faults.append(BAD_ID)
            self._fail(row, error, out, owed=False)
            return
        except Exception as fault:
            # Text is made by foreign code on a model's output; whatever it raises ends this request and nobody else's.
            out.faults.append(f"decoding failed with {type(fault).__name__}")
            self._fail(row, DetokenizeError(f"decoding failed: {type(fault).__name__}"), out, owed=False)
            return
        extras, prompt_tokens, meta = self._with(row, frame, index)
        if life.sink is None:
            out.steps.append(StepRow(life.token, text, all_ids, finish, None, extras))
            out.items.append((life, None))  # `settle` completes a request when its terminal item is out
        else:
            out.items.append(
                (life, EgressItem.Done(finish, EgressItem.Frame(text, all_ids, extras, prompt_tokens, meta)))
            )

    def _with(self, row: int, frame: BatchFrame, index: int) -> tuple[tuple[Extras, ...], int, Any]:
        """(extras, prompt_tokens, meta) of a chunk, with the extras that were kept before."""
        extras: tuple[Extras, ...] = ()
        if frame.has_extras:
            self._keep_extras(row, frame, index)
        if self._extras[row] is not None:
            extras, self._extras[row] = tuple(self._extras[row]), None
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


def _owned_ids(ids: Any) -> np.ndarray[Any, Any]:
    """A copy: no view on a frame outlives the step that decoded it."""
    return np.array(ids, dtype=np.int64)
