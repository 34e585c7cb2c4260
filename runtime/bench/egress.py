"""Frame to text: the CPU that turning scheduler frames into deltas costs, per output token.

Owns: the workloads (the same frames for every peer) and the three ways to run them. What is counted for headrace: everything from the
push of a frame's bytes into the egress ring to the delta in the request's own list (or the step sink's callback), driven on the calling
thread with the same move as the thread driver's; taking out of the sinks is outside. Flooded, as the peer is: `burst` steps are pushed
at once, and then served until nothing is left. Not counted on either side: HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ...codec import WireSchema, encode_batch_cols, frame_egress_batch_cols
from ..config import RuntimeConfig
from ..manager import TokenizerManager

BURST = 64  # steps that are pushed at once; after each burst all sinks are read, outside the clock


class Workload(NamedTuple):
    """`requests` concurrent requests; `ids[r]` is what request r produces, `per_step` ids of it in each frame."""

    name: str
    ids: np.ndarray[Any, Any]  # int64 [requests, tokens]
    per_step: int = 1
    stream: bool = True
    stops: tuple[str, ...] = ()
    top_logprobs: int = 0
    step_sink: bool = False

    @property
    def requests(self) -> int:
        return int(self.ids.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.ids.size)


def workload(tokenizer: Tokenizer, text: str, name: str, requests: int, tokens: int, **options: Any) -> Workload:
    """Ids of `text`, cut into one stretch for each request (wrapping around where the text is too short)."""
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
    return Workload(name, np.resize(ids, (requests, tokens)), **options)


def frames(work: Workload, schema: WireSchema, rids: Sequence[str]) -> Iterator[tuple[bytes, list[Any]]]:
    """(header, data columns) of each step; the last one finishes every request with `length`."""
    count, total = work.ids.shape
    for start in range(0, total, work.per_step):
        part = work.ids[:, start : start + work.per_step]
        last = start + work.per_step >= total
        columns: dict[str, Any] = {}
        if schema.name == "v2":
            columns |= {"cached_tokens": [0] * count, "reasoning_tokens": [0] * count}
        if work.top_logprobs:
            columns |= _top(count, part.shape[1], work.top_logprobs)
        yield encode_batch_cols(
            schema,
            rids=rids,
            finish_reasons=[{"type": "length", "length": int(total)} if last else None] * count,
            prompt_tokens=[4] * count,
            tok_lens=[part.shape[1]] * count,
            token_ids=part.ravel(),
            **columns,
        )


def _top(requests: int, ids: int, top: int) -> dict[str, Any]:
    rows = requests * ids
    return {
        "out_lp_lens": [ids] * requests,
        "out_lp_val": np.full(rows, -0.5, np.float32),
        "out_lp_idx": np.full(rows, 7, np.int32),
        "out_top_reqlens": [ids] * requests,
        "out_top_poslens": [top] * rows,
        "out_top_val": np.full(rows * top, -1.5, np.float32),
        "out_top_idx": np.full(rows * top, 9, np.int32),
    }


def decode_stream(tokenizer: Tokenizer, work: Workload, *, most: int = 20_000) -> float:
    """CPU µs per token of one `DecodeStream.step` per token, over at most `most` tokens of the workload."""
    done = 0
    began = time.thread_time()
    for row in work.ids:
        stream = DecodeStream(skip_special_tokens=True)
        for token in row.tolist():
            stream.step(tokenizer, token)
        done += len(row)
        if done >= most:
            break
    return (time.thread_time() - began) / done * 1e6


def headrace(
    tokenizer: Tokenizer, work: Workload, *, wire: str = "v1", trace: bool = False, burst: int = BURST
) -> float:
    """CPU µs per token of headrace on this workload (this thread only: a peer may run beside it in the same process)."""
    vocab = max(tokenizer.get_vocab_size(with_added_tokens=True), int(work.ids.max()) + 1)
    manager = TokenizerManager(
        RuntimeConfig(tokenizer=tokenizer, context_len=1 << 20, vocab_size=vocab, wire=wire, trace=trace)
    )
    pipeline = manager._pipeline
    pipeline.live.open_admission()
    seen = [0]
    if work.step_sink:
        manager.on_step(lambda batch: seen.__setitem__(0, seen[0] + len(batch.token_ids)))
    handles = [
        manager.generate(
            [1, 2, 3, 4],
            {"max_new_tokens": None, "ignore_eos": True, "stop": list(work.stops) or None},
            stream=work.stream,
            sink="step" if work.step_sink else "handle",
        )
        for _ in range(work.requests)
    ]
    while pipeline.move_ingress() or pipeline.move_shard(0):
        pass
    rids = list(pipeline.shards[0]._rows)
    steps = (frame_egress_batch_cols(*step) for step in frames(work, manager._schema, rids))
    sinks = [handle._sink for handle in handles if handle._sink is not None and work.stream]
    spent = 0.0
    push, move = pipeline.ring_out_producer.push, pipeline.move_egress
    while waiting := list(islice(steps, burst)):  # just made, as a scheduler's are
        began = time.thread_time()
        for frame in waiting:
            push(frame)
        while move():
            pass
        pipeline.hubs[0].hand_out()  # into each request's own list: what a reader would make it do
        spent += time.thread_time() - began
        for sink in sinks:
            sink.take()
    if len(manager._pipeline.live):
        raise RuntimeError(f"{len(manager._pipeline.live)} requests have not ended")
    if work.step_sink and seen[0] != work.tokens:
        raise RuntimeError(f"the step sink saw {seen[0]} of {work.tokens} ids")
    return spent / work.tokens * 1e6
