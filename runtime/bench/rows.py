"""The rows of `headrace bench`: what each one runs, and which target of the specification it is held against.

Owns: the list of workloads, their peers and targets. A row is a number of headrace and the numbers of its peers, in the same unit, each the
least of several rounds in which they took turns: what disturbs a run only ever adds to it. A ratio is headrace over peer.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from tokenizers import Tokenizer

from ...codec import decode_ingress, frame_egress_batch_cols, load_schema
from ..config import RuntimeConfig
from ..manager import TokenizerManager
from ..steps import StepBatch
from ..text.tokenize import CORPUS, choose_backend
from .egress import Workload, decode_stream, frames, headrace, workload

RUST: Final = "Rust server, two threads"
RUST_IN: Final = "Rust server, text-in threads"
STREAM: Final = "DecodeStream.step"
PLAIN: Final = "headrace, plain"
TOKENIZING: Final = "encode_batch_fast"
EVENT: Final = "bare asyncio.Event"
LIMIT: Final = "limit"

Peer = Callable[[], float]


class Row(NamedTuple):
    """One line. `targets`: peer -> the largest ratio that the specification asks for; a peer without one is only shown."""

    name: str
    unit: str
    ours: Peer
    peers: dict[str, Peer]
    targets: dict[str, float]


class Measured(NamedTuple):
    name: str
    unit: str
    ours: float
    peers: dict[str, float]
    targets: dict[str, float]

    def ratio(self, peer: str) -> float:
        return self.ours / self.peers[peer]


def rows(tokenizer: Tokenizer, text: str, rust: Any | None, *, scale: float = 1.0) -> list[Row]:
    """Every row that can be measured here. `rust`: a running `RustPeer`; `scale`: tokens per request, relative to the full run."""

    def work(name: str, requests: int, tokens: int, source: str = text, **options: Any) -> Workload:
        per_step = options.get("per_step", 1)
        return workload(
            tokenizer, source, name, requests, max(per_step * 2, int(tokens * scale) // per_step * per_step), **options
        )

    def egress(load: Workload, targets: dict[str, float], *, stream: bool = True) -> Row:
        peers: dict[str, Peer] = {STREAM: lambda: decode_stream(tokenizer, load)} if stream else {}
        if rust is not None:
            peers[RUST] = lambda: rust.egress(load._replace(step_sink=False))
        # wire v2, because that is what the Rust server reads: the same frames for both
        return Row(load.name, "CPU µs per token", lambda: headrace(tokenizer, load, wire="v2"), peers, targets)

    def against_plain(load: Workload, plain: Workload, most: float) -> Row:
        peers: dict[str, Peer] = {PLAIN: lambda: headrace(tokenizer, plain)}
        return Row(load.name, "CPU µs per token", lambda: headrace(tokenizer, load), peers, {PLAIN: most})

    def plain(requests: int, tokens: int) -> Workload:
        return work("plain", requests, tokens)

    scripts = "\n".join(CORPUS[10:22]) * 8
    stops = ("\n\nUser:", "### End", "<|end|>")
    return [
        egress(work("handles, 256 requests", 256, 1024), {RUST: 1 / 10, STREAM: 1 / 6}),
        egress(work("step sink, 256 requests", 256, 1024, step_sink=True), {RUST: 1 / 25}),
        egress(work("ten scripts, 256 requests", 256, 1024, scripts), {RUST: 1 / 5}),
        egress(work("handles, 16 requests", 16, 4096), {RUST: 1 / 4}),
        egress(work("handles, 1 request", 1, 8192), {STREAM: 2.5}),
        egress(work("not streaming, 50 ids a frame", 256, 2000, per_step=50, stream=False), {RUST: 1 / 8}),
        against_plain(work("stops on every request", 256, 512, stops=stops), plain(256, 512), 2.0),
        against_plain(work("top-5 logprobs on every request", 256, 256, top_logprobs=5), plain(256, 256), 10.0),
        against_plain(work("4096 requests, beside 256", 4096, 256), plain(256, 256), 1.25),
        against_plain(work("32k tokens each, beside 1k", 16, 32_000), plain(16, 1000), 1.25),
        Row(
            "paced 25 ms, 256 requests, last delta", "ms from push", lambda: paced(tokenizer, plain(256, 256)) * 1e3,
            {LIMIT: lambda: 1.0}, {LIMIT: 0.5},
        ),
        Row(
            "paced 25 ms, 1 request, to a thread", "ms from push",
            lambda: paced(tokenizer, plain(1, 256)) * 1e3, {LIMIT: lambda: 1.0}, {LIMIT: 0.15},
        ),
        Row(
            "256 asyncio readers, paced 5 ms", "CPU µs per token", lambda: readers(tokenizer, plain(256, 256)),
            {EVENT: lambda: bare_events(plain(256, 256))}, {EVENT: 1.3},
        ),
        *text_in(tokenizer, text, rust),
    ]  # fmt: skip


def measure(found: Iterable[Row], rounds: int, say: Callable[[str], None]) -> Iterator[Measured]:
    """Each row, `rounds` times in turn with its peers; the least of each."""
    for row in found:
        say(row.name)
        ours, peers = float("inf"), dict.fromkeys(row.peers, float("inf"))
        for _ in range(rounds):
            ours = min(ours, row.ours())
            for name, peer in row.peers.items():
                peers[name] = min(peers[name], peer())
        yield Measured(row.name, row.unit, ours, peers, row.targets)


# ---- floors


def floors(tokenizer: Tokenizer, text: str) -> dict[str, float]:
    """CPU µs per token that nobody can do without, for 256 requests with one id each per frame."""
    load = workload(tokenizer, text, "floor", 256, 8)
    schema = load_schema("v1")
    header, columns = next(iter(frames(load, schema, [f"{at:032x}" for at in range(256)])))
    frame = frame_egress_batch_cols(header, columns)
    wake, woken = threading.Event(), threading.Event()

    def wakes() -> None:
        for _ in range(200):
            wake.wait()
            wake.clear()
            woken.set()

    def bare_wakes() -> float:
        thread = threading.Thread(target=wakes)
        began = time.process_time()
        thread.start()
        for _ in range(200):
            wake.set()
            woken.wait()
            woken.clear()
        thread.join()
        return (time.process_time() - began) / 200 / 256 * 1e6

    def timed(run: Callable[[], object]) -> float:
        began = time.thread_time()
        for _ in range(200):
            run()
        return (time.thread_time() - began) / 200 / 256 * 1e6

    return {
        "memory copy of the frame": min(timed(lambda: bytearray(frame)) for _ in range(20)),
        "msgpack decode of the header": min(timed(lambda: msgspec.msgpack.decode(header)) for _ in range(20)),
        "bare wake of a thread, once a step": min(bare_wakes() for _ in range(10)),
    }


# ---- over the real threads


@contextmanager
def _running(
    tokenizer: Tokenizer, load: Workload, *, step: Callable[[StepBatch], None] | None = None
) -> Iterator[tuple[TokenizerManager, list[Any], list[tuple[bytes, list[Any]]]]]:
    vocab = max(tokenizer.get_vocab_size(with_added_tokens=True), int(load.ids.max()) + 1)
    with TokenizerManager(RuntimeConfig(tokenizer=tokenizer, context_len=1 << 20, vocab_size=vocab)) as manager:
        if step is not None:
            manager.on_step(step)
        params = {"max_new_tokens": None, "ignore_eos": True}
        handles = [
            manager.generate([1, 2, 3, 4], params, sink="step" if step is not None else "handle")
            for _ in range(load.requests)
        ]
        port, rids = manager.scheduler, list[str]()
        while len(rids) < load.requests and port.wait_request(10):
            rids += [message.rid for message in decode_ingress(port.recv_requests(4096), port.schema)]  # type: ignore[misc]
        yield manager, handles, list(frames(load, port.schema, rids))


def paced(tokenizer: Tokenizer, load: Workload, *, period_s: float = 0.025, steps: int = 60) -> float:
    """Seconds from the push of a step to its last delta, median: in the step sink's hands, or for one request in the hands of the
    thread that iterates its handle."""
    pushed: list[float] = []
    taken: list[float] = []
    one = load.requests == 1
    load = load._replace(ids=load.ids[:, :steps])
    callback = None if one else lambda _: taken.append(time.perf_counter())
    with _running(tokenizer, load, step=callback) as (manager, handles, batches):
        reader = threading.Thread(target=lambda: taken.extend(time.perf_counter() for _ in handles[0]) if one else None)
        reader.start()
        pause = threading.Event()
        for batch in batches:
            pause.wait(period_s)
            pushed.append(time.perf_counter())
            manager.scheduler.push_batch(*batch)
        reader.join()
        manager.shutdown(drain_timeout=5.0)  # the last step's callback has returned
    return float(np.median(np.array(taken[: len(pushed)]) - np.array(pushed[: len(taken)])))


def readers(tokenizer: Tokenizer, load: Workload, *, period_s: float = 0.005, steps: int = 60) -> float:
    """CPU µs of the whole process per token, each request read by an asyncio task of its own."""
    load = load._replace(ids=load.ids[:, :steps])
    with _running(tokenizer, load) as (manager, handles, batches):

        async def read(handle: Any) -> None:
            async for _ in handle:
                pass

        async def run() -> None:
            tasks = [asyncio.ensure_future(read(handle)) for handle in handles]
            await asyncio.sleep(0)
            feeder = threading.Thread(target=_feed, args=(manager.scheduler.push_batch, batches, period_s))
            feeder.start()
            await asyncio.gather(*tasks)
            await asyncio.to_thread(feeder.join)

        return _process_cpu(lambda: asyncio.run(run())) / load.tokens * 1e6


def _feed(push: Callable[..., object], batches: Sequence[tuple[Any, ...]], period_s: float) -> None:
    pause = threading.Event()
    for batch in batches:
        pause.wait(period_s)
        push(*batch)


def bare_events(load: Workload, *, period_s: float = 0.005, steps: int = 60) -> float:
    """The same wakes without any work: one task per request waits for an asyncio.Event that a thread has set, step by step.

    Where the loop is late, two steps are one wake, as two steps are one chunk for a reader that is late.
    """
    over = False

    async def wait(event: asyncio.Event) -> None:
        while not over:
            await event.wait()
            event.clear()

    async def run() -> None:
        loop, events = asyncio.get_running_loop(), [asyncio.Event() for _ in range(load.requests)]
        tasks = [asyncio.ensure_future(wait(event)) for event in events]
        await asyncio.sleep(0)

        def wake() -> None:
            for event in events:
                event.set()

        def end() -> None:
            nonlocal over
            over = True
            wake()

        batches = [*[(wake,)] * (steps - 1), (end,)]
        feeder = threading.Thread(target=_feed, args=(loop.call_soon_threadsafe, batches, period_s))
        feeder.start()
        await asyncio.gather(*tasks)
        await asyncio.to_thread(feeder.join)

    return _process_cpu(lambda: asyncio.run(run())) / (load.requests * steps) * 1e6


def _process_cpu(run: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    run()
    return time.process_time() - began


# ---- text in


def text_in(tokenizer: Tokenizer, text: str, rust: Any | None, *, requests: int = 64, tokens: int = 500) -> list[Row]:
    """Text to the scheduler's columns, batches of 16 requests of about 500 tokens; per request."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    prompts = [tokenizer.decode(ids[at * tokens : (at + 1) * tokens]) for at in range(requests)]
    unit = "CPU µs per request"

    def encode() -> float:
        return _process_cpu(
            lambda: [tokenizer.encode_batch_fast(prompts[at : at + 16]) for at in range(0, requests, 16)]
        )

    def through(fast: bool) -> float:
        return into_columns(tokenizer, prompts, fast) / requests * 1e6

    peers: dict[str, Peer] = {TOKENIZING: lambda: encode() / requests * 1e6}
    found = [Row("text in, tokenizers", unit, lambda: through(False), peers, {TOKENIZING: 1.1})]
    if choose_backend(tokenizer).name == "fastokens":
        fast: dict[str, Peer] = dict(peers)
        if rust is not None:
            fast[RUST_IN] = lambda: rust.text_in(prompts)
        found.append(Row("text in, fastokens", unit, lambda: through(True), fast, {RUST_IN: 1 / 10}))
    return found


def into_columns(tokenizer: Tokenizer, prompts: Sequence[str], fast: bool) -> float:
    """CPU seconds (the tokenizer library's own threads included) from `generate` to what the scheduler drains."""
    manager = TokenizerManager(RuntimeConfig(tokenizer=tokenizer, tokenizer_workers=1, context_len=1 << 16))
    pipeline = manager._pipeline
    pipeline.live.open_admission()
    for worker in pipeline.workers:
        worker._backend = choose_backend(tokenizer, fast=fast)
    drained, handles = 0, []
    gc.collect()
    began = time.process_time()
    for at in range(0, len(prompts), 16):
        handles += [manager.generate(prompt, {"max_new_tokens": 8}) for prompt in prompts[at : at + 16]]
        while pipeline.move_ingress() or pipeline.move_worker(0) or pipeline.move_shard(0):
            pass
        drained += len(manager.scheduler.recv_requests(256).headers)
    spent = time.process_time() - began
    if drained != len(prompts):
        raise RuntimeError(f"{drained} of {len(prompts)} requests reached the scheduler")
    return spent
