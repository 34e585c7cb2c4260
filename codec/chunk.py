"""`ChunkEvent`: one request's share of one egress frame.

Owns: the shape of a chunk, in both directions. Rules it keeps:

* A chunk is a delta: its ids, its logprob rows, nothing cumulative. The scheduler's counters (prompt_tokens, cached_tokens) are
  totals as the scheduler states them.
* Arrays of a decoded chunk are views on the frame; copy what must outlive it.
* Equality is bit-exact: NaN equals the same NaN, because a codec that cannot compare them cannot be tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .finish import FinishReason, parse_finish_reason

Ids = NDArray[np.signedinteger[Any]]
# What a scalar means when it is absent; every other scalar of a schema is nil then.
SCALAR_DEFAULTS: Final[Mapping[str, object]] = {
    "cached_tokens": 0,
    "reasoning_tokens": 0,
    "weight_versions": None,
    "image_tokens": None,
    "audio_tokens": None,
    "video_tokens": None,
    "decode_latencies": None,
    "ended_outside_stream": False,
}


def same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Floats: equal type and bytes (so NaN equals itself, and 0.0 is not -0.0). Integers: equal values, of any width."""
    if left.dtype.kind in "iu" and right.dtype.kind in "iu":
        return bool(left.tolist() == right.tolist())
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


class ChunkEvent:
    """One request's chunk.

    `rid` str; `token_ids` int array [t] (i32 in v1, i64 in v2 when decoded; any ints when built by hand);
    `finish_reason` FinishReason or None while running; `prompt_tokens` int; `extras` float32/int32 arrays by name:
    for each family F of the schema ``F_val`` [v], ``F_idx`` [v] (pair families) and, for ragged families, ``F_lens`` int64 [p]
    (values per position; 0 means "no value"). Further keywords are the schema's scalars (v2: cached_tokens,
    reasoning_tokens, weight_versions, image_tokens, audio_tokens, video_tokens, decode_latencies,
    ended_outside_stream); each reads as an attribute, with its absent value when it is not there.
    """

    __slots__ = ("extras", "finish_reason", "prompt_tokens", "rid", "scalars", "token_ids")

    def __init__(
        self,
        *,
        rid: str,
        token_ids: Sequence[int] | NDArray[Any] = (),
        finish_reason: FinishReason | Mapping[Any, Any] | None = None,
        prompt_tokens: int = 0,
        extras: Mapping[str, NDArray[Any]] | None = None,
        **scalars: Any,
    ) -> None:
        self.rid = rid
        self.token_ids: NDArray[Any] = (
            token_ids if isinstance(token_ids, np.ndarray) else np.asarray(token_ids, dtype=np.int64)
        )
        self.finish_reason: FinishReason | None = (
            parse_finish_reason(finish_reason) if finish_reason is not None else None
        )
        self.prompt_tokens = prompt_tokens
        self.extras: Mapping[str, NDArray[Any]] = extras if extras is not None else {}
        self.scalars: dict[str, Any] = scalars

    @property
    def completion_tokens(self) -> int:
        """Ids in this chunk (not a running total)."""
        return len(self.token_ids)

    @property
    def text(self) -> str:
        """Always ``""``: text is made by a detokenizer, not by the codec."""
        return ""

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are no slot; `scalars` itself may be missing while unpickling or copying.
        if name != "scalars":
            if name in self.scalars:
                return self.scalars[name]
            if name in SCALAR_DEFAULTS:
                return SCALAR_DEFAULTS[name]
        raise AttributeError(f"ChunkEvent has no {name}")

    def _told(self) -> dict[str, Any]:
        return {k: v for k, v in self.scalars.items() if v is not None and v != SCALAR_DEFAULTS.get(k)}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkEvent):
            return NotImplemented
        return (
            self.rid == other.rid
            and self.prompt_tokens == other.prompt_tokens
            and self.finish_reason == other.finish_reason
            and self.token_ids.tolist() == other.token_ids.tolist()
            and self._told() == other._told()
            and self.extras.keys() == other.extras.keys()
            and all(same_bits(self.extras[k], other.extras[k]) for k in self.extras)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        # Ids and rids are shown by count and by name only: prompt and output content stay out of logs.
        more = "".join(f", {k}={v!r}" for k, v in self._told().items())
        names = f", extras={sorted(self.extras)}" if self.extras else ""
        return f"ChunkEvent(rid={self.rid!r}, {len(self.token_ids)} ids, finish_reason={self.finish_reason!r}{more}{names})"
