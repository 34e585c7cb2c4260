"""The step sink: everything that one scheduler step produced on one shard, in one call.

Owns: `StepBatch`, what the callback of `TokenizerManager.on_step` is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ..codec.errors import HeadraceError
from .handle import RequestHandle, join_extras
from .pipeline import StepEvent


class StepBatch(msgspec.Struct, frozen=True, eq=False):
    """What one scheduler step produced on one shard for requests with ``sink="step"``, in columns.

    Row i belongs to `handles[i]`: its delta `texts[i]`, its ids ``token_ids[offsets[i]:offsets[i+1]]`` (int64), and
    `finish_reasons[i]` or `errors[i]` where it ended. `extras[i]` holds its logprob columns of this step by name.
    """

    step: int
    shard: int
    handles: list[RequestHandle]
    texts: list[str]
    token_ids: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any]
    finish_reasons: list[Any]
    errors: list[HeadraceError | None]
    extras: list[Mapping[str, np.ndarray[Any, Any]]]


def step_batch(event: StepEvent) -> StepBatch:
    """The columns and single rows of one step as one batch, columns first."""
    rows = event.rows
    handles = [token for column in event.columns for token in column.tokens] + [row.token for row in rows]
    texts = [text for column in event.columns for text in column.texts] + [row.text for row in rows]
    singles = sum(len(column.ids) for column in event.columns)
    offsets = np.arange(len(handles) + 1, dtype=np.int64)
    if rows:
        offsets[singles + 1 :] = singles + np.cumsum([len(row.token_ids) for row in rows])
    parts = [column.ids for column in event.columns] + [row.token_ids for row in rows]
    errors: list[HeadraceError | None] = [None] * singles
    errors.extend(row.error for row in rows)
    extras: list[Mapping[str, np.ndarray[Any, Any]]] = []
    for column in event.columns:
        extras.extend(column.extras or [{}] * len(column.ids))
    extras.extend(join_extras(row.extras) for row in rows)
    return StepBatch(
        step=event.step,
        shard=event.shard,
        handles=handles,
        texts=texts,
        token_ids=parts[0] if len(parts) == 1 else np.concatenate(parts),
        offsets=offsets,
        finish_reasons=[None] * singles + [row.finish_reason for row in rows],
        errors=errors,
        extras=extras,
    )
