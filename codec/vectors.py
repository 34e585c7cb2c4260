"""Golden vectors of the egress wire: frames in hex beside what they mean, for decoders in any language.

Owns: `specs/vectors/egress-*.json` and the README there. `python -m headrace.codec.vectors` writes them; every test run compares
them with what would be written now, and decodes each. Rules: deterministic, no clock, no random source but a written-down
generator; floats stand as their bits, because JSON cannot hold NaN and no decimal is bit-exact everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from .batch import BatchFrame
from .chunk import ChunkEvent
from .decode import REASONS, ControlResult, decode_frame
from .encode import encode_batch, frame_egress_error, frame_egress_result
from .errors import FrameError
from .finish import FinishReason, Stop, Unknown
from .lies import LIES, array, join_frame, lie, split_frame
from .schema import WireSchema, load_schema, schema_names

FOLDER: Final = "specs/vectors"


class Lcg:
    """A generator that anybody can rewrite: x = x * 6364136223846793005 + 1442695040888963407 mod 2^64; the top 31 bits, mod n."""

    def __init__(self, seed: int) -> None:
        self.x = seed

    def __call__(self, n: int) -> int:
        self.x = (self.x * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.x >> 33) % n


def full_event(schema: WireSchema, rid: str, first: int, finish: FinishReason | None = None) -> ChunkEvent:
    """A chunk that uses every column of `schema`; numbers count up from `first`, so that a swap of columns shows."""
    number = iter(range(first, first + 10_000))
    extras: dict[str, Any] = {}
    for at, family in enumerate(schema.egress.families):
        total = positions = 2 + at % 2
        if family.ragged:
            lens = [(at + k) % 3 for k in range(positions)]
            extras[family.name + "_lens"] = np.array(lens, np.int64)
            total = sum(lens)
        extras[family.name + "_val"] = np.array([-(next(number) + 0.5) for _ in range(total)], "<f4")
        if family.indices is not None:
            extras[family.name + "_idx"] = np.array([next(number) for _ in range(total)], "<i4")
    scalars: dict[str, Any] = {}
    for column in schema.egress.scalars:
        n = next(number)
        scalars[column.name] = {"f64": n + 0.25, "bool": True, "str": f"s{n}", "opaque": [[n, n + 1]]}.get(
            column.type.rstrip("?"), n
        )
    ids = np.array([next(number) for _ in range(3)], schema.id_dtype)
    return ChunkEvent(
        rid=rid, token_ids=ids, finish_reason=finish, prompt_tokens=next(number), extras=extras, **scalars
    )


def valid_frames(schema: WireSchema) -> Iterator[tuple[str, bytes]]:
    """(name, frame) of frames to accept."""
    two = [ChunkEvent(rid="a", token_ids=[5], prompt_tokens=3), ChunkEvent(rid="b", token_ids=[6], prompt_tokens=3)]
    plain = encode_batch(two, schema)
    yield "no requests", encode_batch([], schema)
    yield "two requests (case B27)", plain
    cells, data = split_frame(plain)
    known = schema.egress.columns
    padded = cells + [b"\x90"] * (len(known) - len(cells))
    yield "two requests, every optional column empty", join_frame(padded, data)
    zeros = [array([b"\x00"] * 2) if c.role in ("lens", "reqlens") else padded[c.position] for c in known]
    yield "two requests, counts of zero", join_frame(zeros, data)
    yield (
        "two requests, integers in longer forms",
        join_frame(
            [
                cells[0],
                cells[1],
                b"\x92\xcd\x00\x03\xce\x00\x00\x00\x03",
                b"\xdc\x00\x02\xcc\x01\xd3" + bytes(7) + b"\x01",
                *cells[4:],
            ],
            data,
        ),
    )
    yield (
        "two requests, three unknown trailing positions",
        join_frame([*padded, b"\xc0", b"\x92\x01\x02", b"\x81\xa1a\xa1\xff"], data),
    )
    yield "one rid twice", encode_batch([two[0], ChunkEvent(rid="a", token_ids=[7], finish_reason=Stop(7))], schema)
    yield (
        "a terminal chunk without ids (case B32)",
        encode_batch([ChunkEvent(rid="a", finish_reason={"type": "length", "length": 0})], schema),
    )
    yield (
        "every column, no value twice",
        encode_batch(
            [
                full_event(schema, "first", 1000),
                full_event(schema, "second", 2000, Stop("END")),
                ChunkEvent(rid="bare", token_ids=[9]),
            ],
            schema,
        ),
    )
    edges = np.iinfo(schema.id_dtype)
    yield (
        "ids at the ends of their type",
        encode_batch([ChunkEvent(rid="a", token_ids=[edges.min, -1, 0, edges.max])], schema),
    )
    yield (
        "prompt_tokens at every width",
        encode_batch(
            [ChunkEvent(rid=str(n), prompt_tokens=n) for n in (0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1)], schema
        ),
    )
    bits = np.array([0xFF800000, 0x7F800000, 0x7FC00001, 0x80000000, 0x00000001], "<u4")
    extras = {"out_lp_val": bits.view("<f4"), "out_lp_idx": np.arange(5, dtype="<i4")}
    yield (
        "infinities, NaN, minus zero, the smallest number (case B48)",
        encode_batch([ChunkEvent(rid="a", extras=extras)], schema),
    )
    top = {
        "out_top_lens": np.array([0, 2, 0]),
        "out_top_val": np.array([-1, -2], "<f4"),
        "out_top_idx": np.array([7, 8], "<i4"),
    }
    yield "ragged positions without a value", encode_batch([two[0], ChunkEvent(rid="b", extras=top)], schema)
    yield (
        "rids of every width",
        encode_batch(
            [ChunkEvent(rid=r) for r in ("", "é", "字", "😀", "r" * 31, "r" * 32, "r#0123456789abcdef")], schema
        ),
    )
    reasons: list[Any] = [
        {"type": "stop"},
        {"type": "stop", "matched": None},
        {"type": "stop", "matched": 0},
        {"type": "stop", "matched": "END"},
        {"type": "stop", "matched": [1, 2]},
        {"type": "stop", "matched": True},
        {"type": "stop", "matched": 5, "new": {"x": [1, None]}},
        {"type": "length", "length": 8},
        {"type": "length", "length": "8"},
        {"type": "abort", "message": "m", "status_code": None, "err_type": None},
        {"type": "abort", "message": "m", "status_code": 503, "err_type": "e", "retry": 1},
        {"type": "abort", "status_code": "503"},
        {"type": "tool_calls", "name": "s"},
        {},
        {"type": None},
    ]
    yield (
        "finish reasons, known and not (case B30)",
        encode_batch([ChunkEvent(rid=str(i), finish_reason=r) for i, r in enumerate(reasons)], schema),
    )
    lossy = (
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\x91\x01\x02",
        b"\x81\xa1t\xd4\x05\x01",
        b"\x81\xa1t\xd6\xff\x00\x00\x00\x01",
        b"\x81\xa4type\xa1\xff",
    )
    yield (
        "finish reasons that many languages cannot hold",
        encode_batch([ChunkEvent(rid=str(i), finish_reason=Unknown(r)) for i, r in enumerate(lossy)], schema),
    )
    yield "a result", frame_egress_result("r", b"\x00\xff")
    yield (
        "a result with a str payload and further positions",
        b"\x01" + msgspec.msgpack.encode(["r", "ok", None, {"a": 1}]),
    )
    yield "an error", frame_egress_error("r", "cannot read position 8")
    yield "an error with further positions", b"\x03" + msgspec.msgpack.encode(["r", "m", 7])


def one_lie(schema: WireSchema, ways: int = 12) -> Iterator[tuple[str, str, bytes]]:
    """(name, rule, frame): up to `ways` different frames for each rule that break just that rule."""
    base = encode_batch([full_event(schema, "first", 1000), full_event(schema, "second", 2000, Stop("END"))], schema)
    for at, rule in enumerate(LIES):
        seen: set[bytes] = set()
        for way in range(ways):
            frame = lie(base, rule, schema, Lcg(at * 1000 + way))
            if frame is not None and frame not in seen:
                seen.add(frame)
                yield f"{rule} {len(seen)}", rule, frame


def _finish(reason: FinishReason | None) -> dict[str, Any] | None:
    if reason is None:
        return None
    found: dict[str, Any] = {
        "class": type(reason).__name__,
        "matched": reason.matched,
        "abort_status": reason.abort_status,
    }
    if reason.raw is not None:
        return {**found, "msgpack": reason.raw.hex()}
    return {**found, "map": reason.to_map()}


def meaning(frame: bytes, schema: WireSchema) -> dict[str, Any]:
    """What a decoder must make of `frame`, as JSON-able data."""
    try:
        decoded = decode_frame(frame, schema)
    except FrameError as error:
        return {"verdict": "reject", "reason": error.reason, "rids": error.rids, "rids_complete": error.rids_complete}
    if not isinstance(decoded, BatchFrame):
        if isinstance(decoded, ControlResult):
            return {"verdict": "accept", "kind": "result", "rid": decoded.rid, "payload_hex": decoded.payload.hex()}
        return {"verdict": "accept", "kind": "error", "rid": decoded.rid, "message": decoded.message}
    requests = []
    for chunk in decoded:
        extras = {}
        for name, values in chunk.extras.items():
            extras[name + "_bits" if name.endswith("_val") else name] = (
                values.view("<u4") if name.endswith("_val") else values
            ).tolist()
        requests.append(
            {
                "rid": chunk.rid,
                "token_ids": chunk.token_ids.tolist(),
                "finish_reason": _finish(chunk.finish_reason),
                "prompt_tokens": chunk.prompt_tokens,
                "scalars": chunk.scalars,
                "extras": extras,
            }
        )
    return {"verdict": "accept", "kind": "batch", "unknown_columns": decoded.unknown_columns, "requests": requests}


README: Final = """# Golden vectors

Frames and what a decoder must make of them. You need no Python: each file is a JSON array, and each entry has

| key | what |
|---|---|
| `name` | what the frame shows |
| `frame_hex` | the whole frame, tag byte first |
| `verdict` | `accept` or `reject` |
| `kind` | accepted only: `batch`, `result` or `error` |
| `requests` | batch: one object per request, in order: `rid`, `token_ids`, `prompt_tokens`, `finish_reason`, `scalars`, `extras` |
| `unknown_columns` | batch: trailing header positions to skip and count |
| `reason` | rejected only: the broken rule (see `docs/wire.md`) |
| `rids`, `rids_complete` | rejected only: the requests that must be failed; when not complete, every live request must be |

- `egress-v1.json`, `egress-v2.json`: the two revisions (`specs/wire/v1.toml`, `v2.toml`).
- `ingress-*.json`: messages the other way (written by `python -m headrace.codec.vectors_ingress`): for each, the client's `body`,
  the `header` in JSON and in hex, and the cells; in `ingress-bad.json` headers to reject, with why and the rid to answer.
- Integers may need 64 bits. Float columns stand as the 32 bits of each value (`out_lp_val_bits`): JSON has no NaN.
- `finish_reason` is null while running, else `class` (Stop, Length, Abort, Unknown), `matched`, `abort_status`, and the `map` as it
  came, key order included; or `msgpack` (hex) for maps that many languages cannot hold (a key twice, an array as a key, extension
  types, text that is not UTF-8), which must reach the other side unchanged and fail nobody.
- `extras` has, for each family the request has values of: `F_lens` (values per position, ragged families), `F_val_bits`, `F_idx`.
- A frame to reject delivers nothing to anyone. Whether your reasons have the same names is up to you; the verdict, the rids and
  `rids_complete` are not.

A test in your language: read the array, decode each `frame_hex`, compare. In pseudo code

    for v in json: got = decode(unhex(v.frame_hex)); assert got.ok == (v.verdict == "accept"); if got.ok: assert got == v.requests

Written by `python -m headrace.codec.vectors`; the lies are picked by the generator x = x * 6364136223846793005 +
1442695040888963407 mod 2^64 (top 31 bits, modulo the number of choices).
"""


def _pretty(entries: list[dict[str, Any]]) -> str:
    """One entry per line: a diff shows which vector changed."""
    return "[\n" + ",\n".join(json.dumps(e, ensure_ascii=True, separators=(", ", ": ")) for e in entries) + "\n]\n"


def generated() -> dict[str, str]:
    """Path in the repository -> content of every vector file."""
    files = {f"{FOLDER}/README.md": README}
    for name in schema_names():
        schema = load_schema(name)
        entries = [
            {"name": what, "frame_hex": frame.hex(), **meaning(frame, schema)} for what, frame in valid_frames(schema)
        ]
        for what, rule, frame in one_lie(schema):
            entry = {"name": f"{what}: {REASONS[rule]}", "frame_hex": frame.hex(), **meaning(frame, schema)}
            if entry.get("reason") != rule:
                raise AssertionError(f"{what} was to break {rule}, not {entry.get('reason')}")
            entries.append(entry)
        files[f"{FOLDER}/egress-{name}.json"] = _pretty(entries)
    return files


def main(root: Path) -> None:
    for path, content in generated().items():
        (root / path).write_text(content, "utf-8")


if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent)
