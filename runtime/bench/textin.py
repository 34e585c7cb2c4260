"""Text in: the CPU from `generate` to the columns that a scheduler drains, per request.

Owns: the workload (batches of 64 prompts), its two ways in, and what each is held against. The manager's moves are made on the calling
thread, with one worker; what is counted is the whole process, so the tokenizer library's own threads are in it on both sides.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from ..config import RuntimeConfig
from ..manager import TokenizerManager
from ..text.tokenize import TokenizerBackend, TokenizersBackend, choose_backend

RUST_IN: Final = "Rust server, text-in threads"
TOKENIZING: Final = "encode_batch_fast"
LIMIT: Final = "limit"

Peer = Callable[[], float]
Line = tuple[str, str, Peer, dict[str, Peer], dict[str, float]]
"""The fields of a `Row`: name, unit, ours, peers, targets."""

_BATCH: Final = 64
_UNIT: Final = "CPU µs per request"


def text_in(tokenizer: Tokenizer, text: str, rust: Any | None, *, requests: int = 256, tokens: int = 500) -> list[Line]:
    """Prompts of about `tokens` tokens, each way in with each back end that there is.

    A back end lives as long as the rows do, as in a server (and as the peers do): what a library works out once for each thread or
    each word is not a cost of a request.
    """
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    prompts = [tokenizer.decode(ids[at * tokens : (at + 1) * tokens]) for at in range(requests)]
    plain = front(tokenizer, TokenizersBackend(tokenizer))
    best = front(tokenizer, choose_backend(tokenizer))

    def through(manager: TokenizerManager, batch: bool) -> Peer:
        return lambda: into_columns(manager, prompts, batch=batch) / requests * 1e6

    peers: dict[str, Peer] = {TOKENIZING: lambda: tokenising(plain, prompts) / requests * 1e6}
    fast_peers = dict(peers)
    if rust is not None:
        fast_peers[RUST_IN] = lambda: rust.text_in(prompts)
    lines: list[Line] = []
    for name, batch in (("generate", False), ("generate_batch", True)):
        lines.append((f"text in, tokenizers, {name}", _UNIT, through(plain, batch), peers, {TOKENIZING: 1.1}))
        if _backend(best).name == "fastokens":
            lines.append((f"text in, fastokens, {name}", _UNIT, through(best, batch), fast_peers, {RUST_IN: 1 / 10}))

        def over(batch: bool = batch) -> float:
            return overhead(best, prompts, batch=batch) / requests * 1e6

        lines.append(
            (f"text in, beside {_backend(best).name} itself, {name}", _UNIT, over, {LIMIT: lambda: 1.0}, {LIMIT: 25.0})
        )
    return lines


def front(tokenizer: Tokenizer, backend: TokenizerBackend) -> TokenizerManager:
    """A manager that admits, with one worker on `backend`; its moves are the caller's to make."""
    manager = TokenizerManager(
        RuntimeConfig(tokenizer=tokenizer, tokenizer_workers=1, context_len=1 << 16, fast_tokenizer=False)
    )
    manager._pipeline.live.open_admission()
    manager._pipeline.workers[0]._backend = backend
    return manager


def _backend(manager: TokenizerManager) -> Any:
    return manager._pipeline.workers[0]._backend


def overhead(manager: TokenizerManager, prompts: Sequence[str], *, batch: bool, rounds: int = 20) -> float:
    """CPU seconds beside the library's own call with the same texts; both are the least of `rounds`, in turn."""
    whole = alone = float("inf")
    for _ in range(rounds):
        whole = min(whole, into_columns(manager, prompts, batch=batch))
        alone = min(alone, tokenising(manager, prompts))
    return whole - alone


def tokenising(manager: TokenizerManager, prompts: Sequence[str]) -> float:
    """CPU seconds of the library's batch call alone, its result in the library's own form."""
    backend = _backend(manager)
    library = backend._tokenizer
    call: Callable[[list[str]], object] = (
        library.encode_batch_flat if backend.name == "fastokens" else library.encode_batch_fast
    )
    gc.collect()
    began = time.process_time()
    for at in range(0, len(prompts), _BATCH):
        call(list(prompts[at : at + _BATCH]))
    return time.process_time() - began


def into_columns(manager: TokenizerManager, prompts: Sequence[str], *, batch: bool = False) -> float:
    """CPU seconds from `generate` (or `generate_batch`) to the columns that the scheduler drains. The requests are then aborted."""
    pipeline = manager._pipeline
    drained, handles, params = 0, [], {"max_new_tokens": 8}
    gc.collect()
    began = time.process_time()
    for at in range(0, len(prompts), _BATCH):
        some = prompts[at : at + _BATCH]
        if batch:
            handles += manager.generate_batch(some, params)
        else:
            handles += [manager.generate(prompt, params) for prompt in some]
        while pipeline.move_ingress() or pipeline.move_worker(0) or pipeline.move_shard(0):
            pass
        columns = manager.scheduler.recv_requests(256)
        drained += len(columns.headers) if columns.ids.size else 0
    spent = time.process_time() - began
    if drained != len(prompts):
        raise RuntimeError(f"{drained} of {len(prompts)} requests reached the scheduler")
    manager.abort_all()
    while pipeline.move_ingress() or pipeline.move_shard(0):
        manager.scheduler.recv_requests(256)
    if len(pipeline.live):
        raise RuntimeError(f"{len(pipeline.live)} requests are still live")
    return spent
