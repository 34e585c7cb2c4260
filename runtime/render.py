"""JSON: chunks, completions and logprobs as plain Python that any JSON encoder takes.

Owns: the `/generate`-shaped rendering. Rules it keeps: what is no number in JSON (NaN, infinities) is null; a missing first input
logprob and a ragged row of length 0 are null; rows follow ids, so no column shifts; a candidate id that is no token has the text "",
and without a tokenizer every text is null. Work is proportional to what is rendered, and nothing here runs unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import numpy as np

Extras = Mapping[str, np.ndarray[Any, Any]]
TokenText = Callable[[int], str]

_SIDES = (("out", "output"), ("in", "input"))
_RAGGED = (("top", "top_logprobs"), ("tid", "token_ids_logprobs"))


def number(value: float) -> float | None:
    """`value`, or None where JSON has no number for it."""
    return value if isfinite(value) else None


def render_logprobs(extras: Extras, token_text: TokenText | None = None) -> dict[str, Any]:
    """The families of `extras` by their names in an answer; each candidate is ``[logprob, id, text]`` (text null without `token_text`)."""
    found: dict[str, Any] = {}
    for short, side in _SIDES:
        flat = f"{short}_lp"
        if f"{flat}_val" in extras:
            found[f"{side}_token_logprobs"] = _candidates(extras, flat, token_text)
        for kind, name in _RAGGED:
            family = f"{short}_{kind}"
            if f"{family}_lens" in extras:
                found[f"{side}_{name}"] = _rows(extras[f"{family}_lens"], _candidates(extras, family, token_text))
    if "hidden_lens" in extras:
        found["hidden_states"] = _rows(extras["hidden_lens"], [number(v) for v in extras["hidden_val"].tolist()])
    return found


def _candidates(extras: Extras, family: str, token_text: TokenText | None) -> list[list[Any]]:
    values, ids = extras.get(f"{family}_val"), extras.get(f"{family}_idx")
    if values is None or ids is None:  # only rows of length 0
        return []
    return [
        [number(value), token, None if token_text is None else token_text(token)]
        for value, token in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def _rows(lens: np.ndarray[Any, Any], flat: list[Any]) -> list[list[Any] | None]:
    rows: list[list[Any] | None] = []
    at = 0
    for length in lens.tolist():
        rows.append(flat[at : at + length] if length else None)
        at += length
    return rows


def render(
    *,
    rid: str,
    text: str,
    token_ids: np.ndarray[Any, Any],
    finish_reason: Any,
    prompt_tokens: int,
    completion_tokens: int,
    extras: Extras,
    meta: Mapping[str, Any],
    token_text: TokenText | None = None,
) -> dict[str, Any]:
    """One chunk or completion in the shape of a `/generate` answer."""
    return {
        "text": text,
        "output_ids": token_ids.tolist(),
        "meta_info": {
            "id": rid,
            "finish_reason": None if finish_reason is None else finish_reason.to_json(),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            **{name: number(value) if isinstance(value, float) else value for name, value in meta.items()},
            **render_logprobs(extras, token_text),
        },
    }
