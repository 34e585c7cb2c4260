"""The rows of `headrace bench`: what each one runs, and which target of the specification it is held against.

Owns: the list of workloads, their peers and targets. A row is a number of headrace and the numbers of its peers, in the same unit, each the
least of several rounds in which they took turns: what disturbs a run only ever adds to it. A ratio is headrace over peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
from tokenizers import Tokenizer

from ...codec import frame_egress_batch_cols, load_schema
from ..text.tokenize import CORPUS
from .egress import BURST, Workload, decode_stream, frames, headrace, workload
from .paced import bare_events, bare_hops, paced, readers
from .textin import text_in

RUST: Final = "Rust server, two threads"
STREAM: Final = "DecodeStream.step"
PLAIN: Final = "headrace, plain"
EVENT: Final = "bare asyncio.Event"
LIMIT: Final = "limit"
HOPS: Final = "two bare hand-overs"

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

    def egress(load: Workload, targets: dict[str, float], *, burst: int = BURST) -> Row:
        peers: dict[str, Peer] = {STREAM: lambda: decode_stream(tokenizer, load)}
        if rust is not None:
            peers[RUST] = lambda: rust.egress(load._replace(step_sink=False))
        # wire v2, because that is what the Rust server reads: the same frames for both
        return Row(
            load.name, "CPU µs per token", lambda: headrace(tokenizer, load, wire="v2", burst=burst), peers, targets
        )

    def against_plain(load: Workload, plain: Workload, most: float) -> Row:
        peers: dict[str, Peer] = {PLAIN: lambda: headrace(tokenizer, plain)}
        return Row(load.name, "CPU µs per token", lambda: headrace(tokenizer, load), peers, {PLAIN: most})

    def plain(requests: int, tokens: int) -> Workload:
        return work("plain", requests, tokens)

    scripts = "\n".join(CORPUS[10:22]) * 8
    stops = ("\n\nUser:", "### End", "<|end|>")
    return [
        egress(work("handles, 256 requests", 256, 1024), {RUST: 1 / 10, STREAM: 1 / 6}),
        egress(work("handles, 256 requests, step by step", 256, 1024), {}, burst=1),
        egress(work("step sink, 256 requests", 256, 1024, step_sink=True), {RUST: 1 / 25}),
        egress(work("ten scripts, 256 requests", 256, 1024, scripts), {RUST: 1 / 5}),
        egress(work("handles, 16 requests", 16, 4096), {RUST: 1 / 4}),
        egress(work("handles, 1 request", 1, 8192), {STREAM: 2.5}),
        egress(work("handles, 1 request, step by step", 1, 2048), {}, burst=1),
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
            lambda: paced(tokenizer, plain(1, 256)) * 1e3,
            {LIMIT: lambda: 1.0, HOPS: lambda: bare_hops() * 1e3}, {LIMIT: 0.15},
        ),
        Row(
            "256 asyncio readers, flooded", "CPU µs per token", lambda: readers(tokenizer, plain(256, 256), period_s=None),
            {EVENT: lambda: bare_events(plain(256, 256), period_s=None)}, {EVENT: 1.3},
        ),
        Row(
            "256 asyncio readers, paced 5 ms", "CPU µs per token", lambda: readers(tokenizer, plain(256, 256)),
            {EVENT: lambda: bare_events(plain(256, 256))}, {EVENT: 1.3},
        ),
        *(Row(*line) for line in text_in(tokenizer, text, rust)),
    ]  # fmt: skip


def measure(found: Iterable[Row], rounds: int, say: Callable[[str], None]) -> Iterator[Measured]:
    """Each row, `rounds` times in turn with its peers; the least of each."""
    for row in found:
        say(row.name)
        ours, peers = float("inf"), dict.fromkeys(row.peers, float("inf"))
        # a time that is no ratio has nobody who is disturbed with it, so its least takes more tries
        for _ in range(rounds * (4 if LIMIT in row.peers else 1)):
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
