"""A small n-gram language model over token ids: what `MarkovScheduler` runs in place of a network.

Owns: counting a text into tables, and drawing one next token. Rules it keeps:

* The longest known context decides, if at least two different tokens follow it in the text; otherwise one token less of
  context is tried, down to two. A model that always takes the longest context recites its text word for word, and one that
  falls back to a single token talks nonsense; between the two it says new things that still read.
* Sampling is a function of (context, parameters, the request's own random numbers) and of nothing else: the same seed gives
  the same text in any batch and beside any neighbour.
* The model is immutable after construction and may be shared between threads; a `Random` belongs to one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Random = np.random.Generator

_LEAST_CONTEXT: Final = 2  # the shortest context that is preferred over a longer one with a single way on


class Sampling(NamedTuple):
    """How to draw. `temperature` > 0; `top_k` 1 is greedy, at least the vocabulary's size means all; `top_p` in (0, 1]."""

    temperature: float = 1.0
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0


class _Table(NamedTuple):
    """All contexts of one length: sorted keys, and for key i its followers at ``starts[i]:starts[i+1]``, most frequent first."""

    keys: Ids
    starts: Ids
    followers: Ids
    counts: NDArray[np.float64]


class NgramModel:
    """Counts of what follows each run of up to `order` tokens in `ids` (int64 [n], any values, n >= 2).

    Raises ValueError for fewer than two ids or an `order` outside 1..3.
    """

    def __init__(self, ids: Sequence[int] | NDArray[Any], order: int = 3) -> None:
        text = np.ascontiguousarray(ids, dtype=np.int64)
        if text.ndim != 1 or text.size < 2:
            raise ValueError("an n-gram model needs a text of at least two tokens")
        if not 1 <= order <= 3:
            raise ValueError(f"order must be in 1..3, not {order!r}")
        self.order = min(order, text.size - 1)
        # Ids are renumbered densely, so that three of them fit one 64-bit key whatever the vocabulary's size.
        self._ids, dense = np.unique(text, return_inverse=True)
        self._base = int(self._ids.size)
        if self._base >= 1 << 21:
            raise ValueError("an n-gram model takes at most 2 097 151 different tokens")
        dense = dense.astype(np.int64).reshape(-1)
        self._tables = [self._count(dense, n) for n in range(self.order + 1)]
        self._number = {int(token): i for i, token in enumerate(self._ids)}

    def _count(self, text: Ids, n: int) -> _Table:
        keys = np.zeros(text.size - n, dtype=np.int64)
        for i in range(n):
            keys = keys * self._base + text[i : i + keys.size]
        nexts = text[n:]
        order = np.lexsort((nexts, keys))
        keys, nexts = keys[order], nexts[order]
        new = np.concatenate(([True], (keys[1:] != keys[:-1]) | (nexts[1:] != nexts[:-1])))
        at = np.flatnonzero(new)
        counts = np.diff(at, append=keys.size)
        keys, nexts = keys[at], nexts[at]
        order = np.lexsort((nexts, -counts, keys))  # within a context: most frequent first, ties by id
        keys, nexts, counts = keys[order], nexts[order], counts[order]
        first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        return _Table(keys[first], np.append(first, keys.size), nexts, counts.astype(np.float64))

    def _row(self, context: Sequence[int]) -> tuple[int, int, _Table] | None:
        table = self._tables[len(context)]
        key = 0
        for token in context:
            number = self._number.get(token)
            if number is None:
                return None
            key = key * self._base + number
        i = int(table.keys.searchsorted(key))
        if i == table.keys.size or table.keys[i] != key:
            return None
        return int(table.starts[i]), int(table.starts[i + 1]), table

    def followers(self, context: Sequence[int]) -> tuple[Ids, NDArray[np.float64]]:
        """The tokens that may follow `context` (its last `order` ids count) and how often each did, most frequent first.

        Never empty: a context that the text does not know gives the text's own token frequencies.
        """
        longest: tuple[int, int, _Table] | None = None
        for n in range(min(self.order, len(context)), -1, -1):
            found = self._row(context[len(context) - n :])
            if found is None:
                continue
            if longest is None:
                longest = found
            if found[1] - found[0] > 1:
                if n >= _LEAST_CONTEXT:
                    longest = found
                break
        assert longest is not None  # n = 0 always finds the whole text's frequencies
        low, high, table = longest
        return self._ids[table.followers[low:high]], table.counts[low:high]

    def sample(
        self, context: Sequence[int], how: Sampling, random: Random, banned: frozenset[int] = frozenset()
    ) -> int:
        """One next token id. `banned` tokens are not drawn, except where the text holds no other token at all."""
        tokens, weights = self.followers(context)
        for n in range(self.order, -1, -1) if banned else ():
            tokens, weights = self.followers(context[-n:] if n else ())
            keep = np.array([token not in banned for token in tokens.tolist()], dtype=bool)
            if keep.any():
                tokens, weights = tokens[keep], weights[keep]
                break
        draw = (
            random.random()
        )  # drawn also where there is no choice: the stream of numbers then depends on the position alone
        n = tokens.size
        if n > how.top_k:
            n = how.top_k  # most frequent first, and no temperature changes that order
            tokens, weights = tokens[:n], weights[:n]
        if n == 1:
            return int(tokens[0])
        if how.temperature != 1.0:
            logs = np.log(weights) / how.temperature
            weights = np.exp(logs - logs[0])  # the first is the largest: no overflow at a temperature close to 0
        if how.min_p > 0.0:
            weights = weights[: int(np.count_nonzero(weights >= how.min_p * weights[0]))]
        sums = np.cumsum(weights)
        last = weights.size
        if how.top_p < 1.0:
            last = min(int(sums.searchsorted(how.top_p * sums[-1])) + 1, last)
        return int(tokens[min(int(sums.searchsorted(draw * sums[last - 1], side="right")), last - 1)])


def join_paragraphs(paragraphs: Sequence[Sequence[int]], eos: int | None, newline: Sequence[int] = ()) -> Ids:
    """The training text of a list of tokenised paragraphs: each ends with `eos`, and a `newline` stands before the next.

    A request that honours `eos` ends with its paragraph; one that ignores it goes on in a new line.
    """
    end = [] if eos is None else [eos]
    flat: list[int] = list(end)
    for paragraph in paragraphs:
        if len(paragraph):
            flat += [*newline, *paragraph, *end]
    return np.array(flat, dtype=np.int64)
