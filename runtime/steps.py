"""The step sink: everything that one scheduler step produced on one shard, in one call.

Owns: `StepBatch`, what the callback of `TokenizerManager.on_step` is given. What most steps do not need (where a request ended, extras,
offsets of more than one id) is put together when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..codec.errors import HeadraceError
from .handle import RequestHandle, join_extras
from .pipeline import StepEvent
from .stages.plan import StepColumns, StepRow


class StepBatch:
    """What one scheduler step produced on one shard for requests with ``sink="step"``, in columns.

    Row i belongs to `handles[i]`: its delta `texts[i]`, its ids ``token_ids[offsets[i]:offsets[i+1]]`` (int64), and
    `finish_reasons[i]` or `errors[i]` where it ended; `ended` are those rows. `extras[i]` holds its logprob columns of this step by
    name. `step` counts the calls of this `shard` from 1. The lists are the receiver's own; changing one changes no other column.
    """

    __slots__ = ("_columns", "_offsets", "_rows", "_singles", "handles", "shard", "step", "texts", "token_ids")

    def __init__(self, event: StepEvent) -> None:
        columns, rows = event.columns, event.rows
        self.step: int = event.step
        self.shard: int = event.shard
        self._columns: Sequence[StepColumns] = columns
        self._rows: Sequence[StepRow] = rows
        self._offsets: np.ndarray[Any, Any] | None = None
        self.handles: list[RequestHandle]
        self.texts: list[str]
        self.token_ids: np.ndarray[Any, Any]
        if not rows and len(columns) == 1:  # the common step: nothing to join
            self.handles = list(columns[0].tokens)
            self.texts = columns[0].texts
            self.token_ids = columns[0].ids
            self._singles = len(self.handles)
            return
        self.handles = [token for column in columns for token in column.tokens] + [row.token for row in rows]
        self._singles = len(self.handles) - len(rows)  # rows of the columns stand first, with one id each
        self.texts = [text for column in columns for text in column.texts] + [row.text for row in rows]
        parts = [column.ids for column in columns] + [row.token_ids for row in rows]
        self.token_ids = parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def offsets(self) -> np.ndarray[Any, Any]:
        """Where each row's ids begin in `token_ids`, and where the last one's end: int64 [rows + 1]."""
        if self._offsets is None:
            singles = self._singles
            self._offsets = np.arange(singles + len(self._rows) + 1, dtype=np.int64)
            if self._rows:
                self._offsets[singles + 1 :] = singles + np.cumsum([len(row.token_ids) for row in self._rows])
        return self._offsets

    @property
    def ended(self) -> list[int]:
        """The rows whose request ended in this step."""
        return [self._singles + at for at, row in enumerate(self._rows) if row.ends]

    @property
    def finish_reasons(self) -> list[Any]:
        """For each row its finish reason, or None while it runs or where it ended with an error."""
        return self._column([row.finish_reason for row in self._rows])

    @property
    def errors(self) -> list[HeadraceError | None]:
        """For each row the error that it ended with, or None."""
        return self._column([row.error for row in self._rows])

    @property
    def extras(self) -> list[Mapping[str, np.ndarray[Any, Any]]]:
        """For each row its logprob columns and hidden states of this step by name; an empty mapping where there are none."""
        found: list[Mapping[str, np.ndarray[Any, Any]]] = []
        for column in self._columns:
            found.extend(map(dict, column.extras) if column.extras else [{}] * len(column.ids))
        found.extend(join_extras(row.extras) for row in self._rows)
        return found

    def _column(self, tail: list[Any]) -> list[Any]:
        """`tail` behind a None for each row of the columns, where nothing ends."""
        column: list[Any] = [None] * self._singles
        column += tail
        return column

    def __repr__(self) -> str:
        return f"StepBatch(step={self.step}, shard={self.shard}, {self._singles + len(self._rows)} rows)"
