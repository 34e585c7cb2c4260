"""Frame to text, the text part alone: CPU time per output token of the engine beside the library's `DecodeStream.step`.

    python benchmarks/bench_text.py TOKENIZER [--steps N] [--json]

Every row is one request with one token per step. Times are CPU time of this process, the best of several repeats, and each
ratio is taken in the same run: machines change speed within minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable

import numpy as np
from headrace.runtime.text.engine import TextEngine, TextOptions
from headrace.runtime.text.tokenize import CORPUS, choose_backend, load_tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

ENGLISH = (
    "The channel leads the water to the wheel, and the wheel turns the stone; nothing is lost on the way. "
    "If a gate is closed the water waits, and when it opens again the wheel goes on as before.\n"
)
STOPS = ("<|end|>", "\n\nUser:", "### End")
Work = Callable[[], None]


def cpu_ns(work: Work, tokens: int, repeats: int) -> float:
    """Best CPU nanoseconds per token of `work`, which handles `tokens` tokens."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time_ns()
        work()
        best = min(best, time.process_time_ns() - start)
    return best / tokens


def rows_of(tokenizer: Tokenizer, text: str, rows: int, steps: int, seed: int) -> np.ndarray:
    """int64 [steps, rows]: each row reads the ids of `text` from a place of its own."""
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
    starts = np.random.default_rng(seed).integers(0, len(ids), rows)
    return ids[(starts[None, :] + np.arange(steps)[:, None]) % len(ids)]


def engine_work(engine: TextEngine, columns: np.ndarray, options: TextOptions) -> Work:
    rows = columns.shape[1]
    offsets = list(range(rows + 1))

    def work() -> None:
        states = [engine.open(options) for _ in range(rows)]
        for column in columns:
            engine.feed(states, column, offsets)

    return work


def plain_work(engine: TextEngine, columns: np.ndarray) -> Work:
    def work() -> None:
        for column in columns:
            engine.feed_plain(column)

    return work


def stream_work(tokenizer: Tokenizer, columns: np.ndarray) -> Work:
    def work() -> None:
        streams = [DecodeStream(skip_special_tokens=True) for _ in range(columns.shape[1])]
        for column in columns:
            for stream, token in zip(streams, column.tolist(), strict=True):
                stream.step(tokenizer, token)

    return work


def measure(tokenizer: Tokenizer, tokens: int, repeats: int) -> list[dict[str, object]]:
    engine = TextEngine(tokenizer)
    scripts = "\n".join(CORPUS[5:22]) * 4
    lines = []
    for rows in (1, 16, 256, 4096):
        steps = max(8, tokens // rows)
        english = rows_of(tokenizer, ENGLISH * 8, rows, steps, 1)
        mixed = rows_of(tokenizer, scripts, rows, steps, 2)
        few = english[: max(4, 20_000 // rows)]
        peer = cpu_ns(stream_work(tokenizer, few), few.size, repeats)
        for name, work, size in (
            ("feed_plain", plain_work(engine, english), english.size),
            ("feed", engine_work(engine, english, TextOptions()), english.size),
            ("feed, many scripts", engine_work(engine, mixed, TextOptions()), mixed.size),
            ("feed, three stops", engine_work(engine, english, TextOptions(stops=STOPS)), english.size),
        ):
            spent = cpu_ns(work, size, repeats)
            lines.append({"rows": rows, "what": name, "ns": round(spent, 1), "of_stream": round(spent / peer, 4)})
        lines.append({"rows": rows, "what": "DecodeStream.step", "ns": round(peer, 1), "of_stream": 1.0})
    many = rows_of(tokenizer, ENGLISH * 8, 256, 1000, 3).T
    options = TextOptions()
    spent = cpu_ns(lambda: [engine.whole(options, row, 950, None) for row in many] and None, many.size, repeats)
    lines.append({"rows": 256, "what": "whole, 1000 ids", "ns": round(spent, 1), "of_stream": round(spent / peer, 4)})
    return lines


def measure_encoding(tokenizer: Tokenizer, repeats: int) -> list[dict[str, object]]:
    """Text in: batches of 16 texts of some 500 tokens, per token, beside the library's `encode_batch_fast`."""
    rng = random.Random(4)
    words = (ENGLISH + " ".join(CORPUS[4:14])).split()
    texts = [" ".join(rng.choices(words, k=350)) for _ in range(16)]
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts))
    floor = cpu_ns(lambda: tokenizer.encode_batch_fast(texts) and None, tokens, repeats)
    lines: list[dict[str, object]] = [{"what": "encode_batch_fast", "ns": round(floor, 1), "of_library": 1.0}]
    for fast in (False, True):
        backend = choose_backend(tokenizer, fast=fast)
        spent = cpu_ns(lambda backend=backend: backend.encode_batch(texts, True) and None, tokens, repeats)  # type: ignore[misc]
        lines.append({"what": f"back end {backend.name}", "ns": round(spent, 1), "of_library": round(spent / floor, 4)})
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tokenizer", help="a tokenizer.json, a directory with one, or a model in the local hub cache")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens per measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    result = {
        "text": measure(tokenizer, arguments.tokens, arguments.repeats),
        "encode": measure_encoding(tokenizer, arguments.repeats),
    }
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
        return 0
    for line in result["text"]:
        print(
            f"{line['rows']:>5} rows  {line['what']:<20} {line['ns']:>9} ns/token  {line['of_stream']:>8} x DecodeStream"
        )
    for line in result["encode"]:
        print(f"            {line['what']:<20} {line['ns']:>9} ns/token  {line['of_library']:>8} x encode_batch_fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
