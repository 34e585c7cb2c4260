"""The tokenizer worker: a batch of texts in, their ids out.

Owns nothing between steps. Whatever is waiting is taken as one batch, because tokenizers are several times cheaper per text that
way. A tokenizer that raises fails the request it raised on and nobody else: the batch is then done again one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...codec.errors import HeadraceError, TokenizeError
from ..text.tokenize import TokenizerBackend
from ..text.vocabulary import is_foreign_fault
from .life import Job, Tokenised


class TokenizerWorker:
    """Stateless: the back end is shared, immutable and safe to call from several threads."""

    __slots__ = ("_backend",)

    def __init__(self, backend: TokenizerBackend) -> None:
        self._backend = backend

    def key(self) -> tuple[()]:
        return ()

    def step(self, jobs: Sequence[Job]) -> list[Tokenised]:
        """One answer for each job, in order. Never raises for a text's fault."""
        done: list[Tokenised | None] = [None] * len(jobs)
        for special in (True, False):
            rows = [row for row, job in enumerate(jobs) if job.add_special_tokens is special]
            if rows:
                for row, answer in zip(rows, self._encode([jobs[row] for row in rows], special), strict=True):
                    done[row] = answer
        return [answer for answer in done if answer is not None]

    def _encode(self, jobs: list[Job], special: bool) -> list[Tokenised]:
        try:
            encoded = self._backend.encode_batch([job.text for job in jobs], special)
            return [Tokenised(job.rid, ids) for job, ids in zip(jobs, encoded, strict=True)]
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
