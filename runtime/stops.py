"""Where a generated sequence ends: stop tokens, stop strings and stop patterns, seen one token at a time.

Owns: the scheduler's side of stops, for the embedded schedulers (the detokenizer only cuts what a scheduler says it matched).
Rules it keeps:

* The first stop to complete wins: a stop token when its id appears; of strings and patterns that complete within one token's
  text the one that ends first, ties in list order, strings before patterns.
* Nothing ends a request before `min_new_tokens` tokens, and a stop that was completed before that is not found again later.
* `ignore_eos` switches off the model's own end-of-sequence ids, not the stop tokens a client asked for.
* Text is made by the same engine that the detokenizer uses, so a stop that a client would see is the stop that is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from ..codec.sampling import NormalizedSamplingParams
from ..codec.stop_regex import compile_stop_regex
from .text.engine import TextEngine, TextOptions

_KEPT: Final = 1 << 16  # characters of text that a pattern of unbounded width may look back over


def stop(matched: int | str | None) -> dict[str, Any]:
    """The finish reason of a sequence that ended by itself (None) or with `matched`."""
    return {"type": "stop", "matched": matched}


def length(tokens: int) -> dict[str, Any]:
    """The finish reason of a sequence that used up its `tokens`."""
    return {"type": "length", "length": tokens}


class StopWatch:
    """Watches one request. `needed` is False where nothing can ever match, so that its owner need not call `see` at all."""

    __slots__ = ("_engine", "_least", "_patterns", "_seen", "_state", "_strings", "_tail", "_window", "ids", "needed")

    def __init__(self, sampling: NormalizedSamplingParams, eos: Iterable[int], engine: TextEngine | None) -> None:
        self.ids = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else frozenset(eos))
        self._least = sampling.min_new_tokens
        self._seen = 0
        self._strings: tuple[str, ...] = ()
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        self._engine = engine
        self._state = None
        self._tail = ""
        self._window = 0
        if engine is not None and (sampling.stop_strs or sampling.stop_regex_strs):
            self._strings = tuple(sampling.stop_strs or ())
            self._patterns = [(p, compile_stop_regex(p)[0]) for p in sampling.stop_regex_strs or ()]
            # Both windows bound a match in UTF-8 bytes or characters, so either way at most so many characters.
            self._window = min(max(sampling.stop_str_max_len, sampling.stop_regex_max_len), _KEPT)
            self._state = engine.open(
                TextOptions(
                    stops=(),
                    stop_regexes=(),
                    skip_special_tokens=sampling.skip_special_tokens,
                    spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                    no_stop_trim=True,
                )
            )
        self.needed = bool(self.ids or self._strings or self._patterns)

    def banned(self) -> frozenset[int]:
        """The ids that must not come next, because `min_new_tokens` is not reached and they would end the request."""
        return self.ids if self._seen + 1 < self._least else frozenset()

    def see(self, token: int) -> dict[str, Any] | None:
        """The finish reason if `token` completes a stop, else None. Call it once for every token, in order."""
        self._seen += 1
        early = self._seen < self._least
        if token in self.ids and not early:
            return stop(token)
        if self._engine is None or self._state is None:
            return None
        deltas, _ = self._engine.feed([self._state], np.array([token], dtype=np.int64), [0, 1])
        if not deltas[0]:
            return None
        text = self._tail + deltas[0]
        new = len(self._tail)  # a match that ends here or before was complete, and judged, at an earlier token
        self._tail = text[-self._window :]
        return None if early else self._first(text, new)

    def _first(self, text: str, new: int) -> dict[str, Any] | None:
        best: tuple[int, str] | None = None
        for string in self._strings:
            at = text.find(string, max(0, new - len(string) + 1))
            if at >= 0 and (best is None or at + len(string) < best[0]):
                best = (at + len(string), string)
        for source, pattern in self._patterns:
            for match in pattern.finditer(text):
                if match.end() > new and match.end() > match.start():
                    if best is None or match.end() < best[0]:
                        best = (match.end(), source)
                    break
        return None if best is None else stop(best[1])
