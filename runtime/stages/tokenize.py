"""The tokenizer worker: a batch of texts in, their ids out.

Owns nothing between steps. Whatever is waiting is taken as one batch, because tokenizers are several times cheaper per text that
way. A tokenizer that raises fails the request it raised on and nobody else: the batch is then done again one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ...codec.admission import prompt_ids
from ...codec.errors import HeadraceError, TokenizeError
from ..text.tokenize import TokenizerBackend
from ..text.vocabulary import is_foreign_fault
from .life import Job, Tokenised


class Encoder(Protocol):
    """What turns a prompt with media into its final token ids; given as `RuntimeConfig.encoder`, called on the workers' threads.

    `text` or `ids` (int64) is the prompt, `media` what the client sent under `image_data`, `audio_data`, `video_data` and
    `modalities`. Returns ids in [0, vocab_size). Whatever it raises ends that request with code `tokenize`.
    """

    def encode(self, text: str | None, ids: Any, media: Mapping[str, Any]) -> Any: ...


class TokenizerWorker:
    """Stateless: the back end is shared, immutable and safe to call from several threads."""

    __slots__ = ("_backend", "_encoder", "_vocab_size")

    def __init__(self, backend: TokenizerBackend | None, encoder: Encoder | None = None, vocab_size: int = 0) -> None:
        self._backend = backend
        self._encoder = encoder
        self._vocab_size = vocab_size

    def key(self) -> tuple[()]:
        return ()

    def step(self, jobs: Sequence[Job]) -> list[Tokenised]:
        """One answer for each job, in order. Never raises for a prompt's fault."""
        if not jobs:
            return []
        if all(job.add_special_tokens and job.media is None for job in jobs):
            return self._encode(jobs, True)
        done: list[Tokenised | None] = [None if job.media is None else self._media(job) for job in jobs]
        for special in (True, False):
            rows = [row for row, job in enumerate(jobs) if job.media is None and job.add_special_tokens is special]
            if rows:
                for row, answer in zip(rows, self._encode([jobs[row] for row in rows], special), strict=True):
                    done[row] = answer
        return [answer for answer in done if answer is not None]

    def _media(self, job: Job) -> Tokenised:
        """One prompt with media: the encoder makes the final ids, which are judged like a client's."""
        assert self._encoder is not None  # admission lets media in only where there is one
        assert job.media is not None
        try:
            return Tokenised(job.rid, prompt_ids(self._encoder.encode(job.text, job.ids, job.media), self._vocab_size))
        except BaseException as fault:
            if not is_foreign_fault(fault):
                raise
            # foreign code on one client's media: whatever it raises ends this request and nobody else's
            return Tokenised(job.rid, None, TokenizeError(f"the encoder failed: {type(fault).__name__}"))

    def _encode(self, jobs: Sequence[Job], special: bool) -> list[Tokenised]:
        assert self._backend is not None  # admission lets text in only where there is one
        try:
            encoded = self._backend.encode_batch([job.text or "" for job in jobs], special)
            highest = _highest(encoded)
            return [Tokenised(job.rid, ids, None, highest) for job, ids in zip(jobs, encoded, strict=True)]
        except BaseException as fault:
            if not is_foreign_fault(fault):
                raise
            # A tokenizer is foreign code; whatever it raises belongs to one text of the batch and must end only that request.
            if len(jobs) > 1:
                return [self._encode([job], special)[0] for job in jobs]
            error = (
                fault
                if isinstance(fault, HeadraceError)
                else TokenizeError(f"the tokenizer failed: {type(fault).__name__}")
            )
            return [Tokenised(jobs[0].rid, None, error)]


_JOINED = 1 << 18  # ids of a batch that are joined for it; in a larger one texts are so long that each can be looked at


def _highest(encoded: Sequence[np.ndarray[Any, Any]]) -> int | None:
    """A bound on the ids of a batch. One look at all of them instead of one for each text, which costs more than a text's ids do."""
    first = encoded[0]
    whole = first.base
    if type(whole) is np.ndarray and whole.dtype == first.dtype and all(ids.base is whole for ids in encoded):
        return int(whole.max()) if whole.size else -1  # a batch that is not large is cut out of one array
    if sum(map(len, encoded)) > _JOINED:
        return None
    whole = np.concatenate(encoded)
    return int(whole.max()) if whole.size else -1
