"""Decoding an egress frame, as ratios to msgspec decoding its header into plain lists, in one run.

    python benchmarks/bench_codec.py [--json] [--check]

`--check` exits with 1 when a ratio is above its target (1.5 for a plain frame of 4096 requests, 3 for all families on 64).
Each number is the best of many rounds, the contenders taking turns, so that a busy machine hurts all of them alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import wire_helpers
from headrace.codec import (
    ChunkEvent,
    WireSchema,
    decode_frame,
    encode_batch,
    encode_batch_cols,
    frame_egress_batch_cols,
    load_schema,
)

ROUNDS = 300


def plain(schema: WireSchema, prompts: list[int], finished: int = 0) -> bytes:
    """One token for each request; `finished` of them end."""
    n = len(prompts)
    reasons: list[Any] = [None] * n
    for row in range(0, n, n // finished) if finished else ():
        reasons[row] = {"type": "stop", "matched": 151645}
    header, cols = encode_batch_cols(
        schema,
        rids=[f"{i * 2654435761 % 2**128:032x}" for i in range(n)],
        finish_reasons=reasons,
        prompt_tokens=prompts,
        tok_lens=[1] * n,
        token_ids=np.arange(n),
    )
    return frame_egress_batch_cols(header, cols)


def families(schema: WireSchema, n: int, positions: int = 3, width: int = 5) -> bytes:
    """Every family and every scalar on each of `n` requests."""
    rng = np.random.default_rng(1)
    kinds: dict[str, Any] = {"u32": 300, "f64": 0.5, "bool": True, "opaque": [[0, 1]]}
    events = []
    for i in range(n):
        extras: dict[str, Any] = {}
        for family in schema.egress.families:
            total = positions * width if family.ragged else positions
            extras[family.name + "_val"] = rng.random(total).astype("<f4")
            if family.indices:
                extras[family.name + "_idx"] = rng.integers(0, 150_000, total).astype("<i4")
            if family.ragged:
                extras[family.name + "_lens"] = np.full(positions, width)
        scalars: dict[str, Any] = {c.name: kinds[c.type.rstrip("?")] for c in schema.egress.scalars}
        ids = rng.integers(0, 150_000, positions)
        events.append(ChunkEvent(rid=f"{i:032x}", token_ids=ids, prompt_tokens=100 * i, extras=extras, **scalars))
    return encode_batch(events, schema)


def best(calls: list[Callable[[], object]]) -> list[float]:
    """Microseconds of each call: the best of the rounds, taken in turns."""
    found = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for at, call in enumerate(calls):
            start = time.perf_counter()
            call()
            found[at] = min(found[at], time.perf_counter() - start)
    return [f * 1e6 for f in found]


def measure() -> list[dict[str, Any]]:
    """One row per frame: microseconds of the header alone, of `decode_frame`, of the naive decoder, and the ratios."""
    n = 4096
    rng = np.random.default_rng(0)
    prompts = {
        "short prompts": rng.integers(1, 128, n).tolist(),
        "prompts of mixed length": np.minimum(rng.lognormal(6, 2, n).astype(int) + 1, 100_000).tolist(),
        "long prompts": rng.integers(256, 60_000, n).tolist(),
    }
    cases: list[tuple[str, WireSchema, bytes, float]] = []
    for name in ("v1", "v2"):
        schema = load_schema(name)
        for what, lens in prompts.items():
            cases.append((f"{name} 4096 requests, {what}", schema, plain(schema, lens), 1.5))
        mixed = prompts["prompts of mixed length"]
        cases.append((f"{name} 4096 requests, 16 finish", schema, plain(schema, mixed, 16), 1.5))
        cases.append((f"{name} 64 requests, all families", schema, families(schema, 64), 3.0))
    rows = []
    for what, schema, frame, target in cases:
        header = frame[5 : 5 + int.from_bytes(frame[1:5], "little")]
        base, ours, naive = best(
            [
                lambda header=header: msgspec.msgpack.decode(header),  # type: ignore[misc]
                lambda frame=frame, schema=schema: decode_frame(frame, schema),  # type: ignore[misc]
                lambda frame=frame, schema=schema: wire_helpers.per_request_decode(frame, schema),  # type: ignore[misc]
            ]
        )
        rows.append(
            {
                "frame": what,
                "header_us": round(base, 1),
                "decode_us": round(ours, 1),
                "naive_us": round(naive, 1),
                "ratio": round(ours / base, 2),
                "naive_ratio": round(naive / base, 2),
                "target": target,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows = measure()
    if args.json:
        print(json.dumps(rows))
    else:
        print(f"{'frame':<44}{'header':>10}{'decode':>10}{'naive':>10}{'ratio':>8}{'naive':>8}{'target':>8}")
        for row in rows:
            print(
                f"{row['frame']:<44}{row['header_us']:>8} us{row['decode_us']:>7} us{row['naive_us']:>7} us"
                f"{row['ratio']:>7}x{row['naive_ratio']:>7}x{row['target']:>7}x"
            )
    return int(args.check and any(row["ratio"] > row["target"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
