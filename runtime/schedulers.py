"""The embedded schedulers: `EchoScheduler` gives prompts back, `MarkovScheduler` continues them. `scripted.py` has a third.

Owns: what each of them puts into the next step. What they share is in `scheduler_base.py`. The rule kept here: while nothing
joins or leaves, the header of the batch frame does not change from step to step, so it is encoded once and kept.
`EchoScheduler` then spends a handful of array operations per step, whatever the size of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ..codec.ingress import GenerateMessage
from .markov import NgramModel, Random, Sampling
from .scheduler_base import NO_IDS, Scheduler
from .stops import StopWatch, length, stop
from .text.engine import TextEngine

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .port import SchedulerPort

__all__ = ["EchoScheduler", "MarkovScheduler", "Scheduler"]

_MASK: Final = (1 << 64) - 1


class EchoScheduler(Scheduler):
    """Gives each prompt back, one token per step.

    Ends with `length` at max_new_tokens and otherwise with ``stop``, ``matched: null`` where the prompt ends. A prompt shorter
    than min_new_tokens, or than max_new_tokens under ignore_eos, starts over. Stop tokens, `eos_token_ids` and, with a
    `tokenizer`, stop strings and patterns are honoured.
    """

    def __init__(
        self,
        port: SchedulerPort,
        *,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | TextEngine | None = None,
        **options: Any,
    ) -> None:
        super().__init__(port, **options)
        self._eos = frozenset(eos_token_ids)
        self._engine = _engine(tokenizer)
        self._dtype = np.dtype(self._schema.id_dtype)
        # Row i of the batch: its rid, its prompt in the arena at begin[i]:end[i], the next token's place, tokens left to give.
        self._rids: list[str] = []
        self._prompts: list[int] = []
        self._reasons: list[dict[str, Any]] = []
        self._watches: list[StopWatch | None] = []
        self._watched: list[int] = []
        self._begin, self._end, self._at, self._left = (np.empty(0, dtype=np.int64) for _ in range(4))
        self._until = 0  # steps until some row comes to the end of its prompt or of its tokens
        self._joining: list[tuple[int, int, int]] = []  # begin, end, total of rows not yet in the arrays
        self._arena = np.empty(4096, dtype=self._dtype)
        self._used = 0

    @property
    def running(self) -> int:
        return len(self._rids)

    def _join(self, rid: str, message: GenerateMessage) -> None:
        prompt, sampling = message.input_ids, message.sampling
        n = len(prompt)
        if n == 0:
            self.port.push_error(rid, "a prompt without tokens cannot be echoed")
            return
        cap = sampling.max_new_tokens
        total = max(n, sampling.min_new_tokens)
        reason = stop(None)
        if cap is not None and (cap <= total or sampling.ignore_eos):
            total, reason = cap, length(cap)
        if total == 0:
            self._push([rid], [reason], [n], [0], NO_IDS)
            return
        watch = StopWatch(sampling, self._eos, self._engine)
        begin, end = self._store(prompt)  # may settle and move the rows that are there, so the row is added after it
        self._rids.append(rid)
        self._prompts.append(n)
        self._reasons.append(reason)
        self._watches.append(watch if watch.needed else None)
        self._joining.append((begin, end, min(total, 1 << 62)))

    def _store(self, prompt: NDArray[Any]) -> tuple[int, int]:
        n = len(prompt)
        if self._used + n > len(self._arena):
            self._compact(n)
        begin, self._used = self._used, self._used + n
        self._arena[begin : self._used] = prompt
        return begin, self._used

    def _compact(self, more: int) -> None:
        """Room for `more` ids: the prompts still in use move together, into an arena of at least twice their size."""
        self._settle()
        kept = [self._arena[b:e] for b, e in zip(self._begin.tolist(), self._end.tolist(), strict=True)]
        size = sum(map(len, kept))
        arena = np.empty(max(4096, 2 * (size + more)), dtype=self._dtype)
        if kept:
            np.concatenate(kept, out=arena[:size])
        ends = np.cumsum(self._end - self._begin)
        moved = ends - self._end
        self._begin, self._end, self._at = self._begin + moved, ends, self._at + moved
        self._arena, self._used = arena, size

    def _settle(self) -> None:
        """Puts the rows that joined into the arrays."""
        if not self._joining:
            return
        new = np.array(self._joining, dtype=np.int64)
        self._joining = []
        self._begin = np.concatenate((self._begin, new[:, 0]))
        self._end = np.concatenate((self._end, new[:, 1]))
        self._at = np.concatenate((self._at, new[:, 0]))
        self._left = np.concatenate((self._left, new[:, 2]))
        self._changed()

    def _changed(self) -> None:
        self._header = None
        self._watched = [i for i, watch in enumerate(self._watches) if watch is not None]
        self._until = self._next_event() if self._rids else 0

    def _next_event(self) -> int:
        return int(np.minimum(self._end - self._at, self._left).min())

    def _drop(self, rid: str | None) -> bool:
        self._settle()
        if rid is None:
            self._keep([False] * len(self._rids))
            return True
        if rid not in self._rids:
            return False
        self._keep([other != rid for other in self._rids])
        return True

    def _keep(self, keep: list[bool]) -> None:
        rows = np.flatnonzero(keep)
        self._begin, self._end, self._at, self._left = (
            self._begin[rows],
            self._end[rows],
            self._at[rows],
            self._left[rows],
        )
        at = rows.tolist()
        self._rids = [self._rids[i] for i in at]
        self._prompts = [self._prompts[i] for i in at]
        self._reasons = [self._reasons[i] for i in at]
        self._watches = [self._watches[i] for i in at]
        self._changed()

    def _produce(self) -> bool:
        self._settle()
        n = len(self._rids)
        if n == 0:
            return False
        self.counters["steps"] += 1
        ids = self._arena[self._at]
        self._at += 1
        self._left -= 1
        self._until -= 1
        finishes: list[dict[str, Any] | None] | None = None
        for i in self._watched:
            watch = self._watches[i]
            if watch is not None and (reason := watch.see(int(ids[i]))) is not None:
                finishes = finishes if finishes is not None else [None] * n
                finishes[i] = reason
        if self._until == 0:
            for i in np.flatnonzero(self._left == 0).tolist():
                finishes = finishes if finishes is not None else [None] * n
                # A limit reached by this token outranks a stop that it completes; that outranks the prompt's end.
                if finishes[i] is None or self._reasons[i]["type"] == "length":
                    finishes[i] = self._reasons[i]
            over = self._at == self._end
            self._at[over] = self._begin[over]
        if finishes is not None:
            self._push(self._rids, finishes, self._prompts, [1] * n, ids)
            self._keep([finish is None for finish in finishes])
            return True
        if self._until == 0:
            self._until = self._next_event()
        if self._header is None:
            self._header = self._push(self._rids, [None] * n, self._prompts, [1] * n, ids)
        else:
            self.port.push_batch(self._header, [ids])
            self.counters["tokens"] += n
        return True


class _Sequence:
    """One running request of the n-gram scheduler."""

    __slots__ = ("cap", "context", "given", "how", "prompt_tokens", "random", "rid", "watch")

    def __init__(self, rid: str, message: GenerateMessage, random: Random, watch: StopWatch, order: int) -> None:
        sampling = message.sampling
        self.rid = rid
        self.prompt_tokens = len(message.input_ids)
        self.context: list[int] = message.input_ids[-order:].tolist()
        self.cap = sampling.max_new_tokens
        self.how = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self.random = random
        self.watch = watch
        self.given = 0


class MarkovScheduler(Scheduler):
    """Continues each prompt from an n-gram `model`: text that a person can read, without a network.

    Honours max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, sampling_seed, stop tokens, `eos_token_ids`,
    ignore_eos and, with a `tokenizer`, stop strings and patterns. Penalties, logit_bias and grammars are not. A request without
    a seed draws from `seed` and its place in the order of arrival, so a run can be repeated.
    """

    def __init__(
        self,
        port: SchedulerPort,
        model: NgramModel,
        *,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | TextEngine | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(port, **options)
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self._engine = _engine(tokenizer)
        self._seed = seed
        self._arrived = 0
        self._batch: dict[str, _Sequence] = {}

    @property
    def running(self) -> int:
        return len(self._batch)

    def _join(self, rid: str, message: GenerateMessage) -> None:
        self._arrived += 1
        cap, seed = message.sampling.max_new_tokens, message.sampling.sampling_seed
        if cap == 0:
            self._push([rid], [length(0)], [len(message.input_ids)], [0], NO_IDS)
            return
        # Signed seeds of 64 bits are allowed on the wire; a seed sequence takes only what is not negative.
        entropy = [self._seed & _MASK, self._arrived] if seed is None else [seed & _MASK]
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
        watch = StopWatch(message.sampling, self._eos, self._engine)
        self._batch[rid] = _Sequence(rid, message, random, watch, self._model.order)
        self._header = None

    def _drop(self, rid: str | None) -> bool:
        self._header = None
        if rid is None:
            self._batch.clear()
            return True
        return self._batch.pop(rid, None) is not None

    def _produce(self) -> bool:
        if not self._batch:
            return False
        self.counters["steps"] += 1
        order = self._model.order
        rows = list(self._batch.values())
        tokens: list[int] = []
        finishes: list[dict[str, Any] | None] = []
        for row in rows:
            token = self._model.sample(row.context, row.how, row.random, row.watch.banned())
            row.context = [*row.context[1 - order :], token] if order > 1 else [token]
            row.given += 1
            reason = row.watch.see(token) if row.watch.needed else None
            tokens.append(token)
            finishes.append(length(row.given) if row.given == row.cap else reason)
        ids = np.array(tokens, dtype=self._schema.id_dtype)
        ended = any(finish is not None for finish in finishes)
        if ended or self._header is None:
            header = self._push([r.rid for r in rows], finishes, [r.prompt_tokens for r in rows], [1] * len(rows), ids)
            self._header = None if ended else header
        else:
            self.port.push_batch(self._header, [ids])
            self.counters["tokens"] += len(ids)
        for row, finish in zip(rows, finishes, strict=True):
            if finish is not None:
                del self._batch[row.rid]
        return True


def _engine(tokenizer: Tokenizer | TextEngine | None) -> TextEngine | None:
    return tokenizer if tokenizer is None or isinstance(tokenizer, TextEngine) else TextEngine(tokenizer)
