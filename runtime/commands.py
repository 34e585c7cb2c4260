"""The small commands of the command line: ``inspect`` (a frame, in words) and ``spec`` (the machines and the wire, as data).

Owns: what they print. Rules it keeps: a frame's text of any kind is shown through `show`, which makes it harmless and short; a
broken frame is an answer, not a mistake of the user, and has the exit status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

import numpy as np

from .. import specs
from ..codec.batch import BatchFrame
from ..codec.decode import REASONS, ControlResult, decode_frame
from ..codec.errors import FrameError, ValidationError, show
from ..codec.schema import WireSchema, load_schema, schema_names
from ..fsm import MACHINES, export
from ..fsm.exports import FORMATS

_ROWS: Final = 20  # requests of a frame that are listed; the rest is counted


# ---- inspect


def inspect_file(file: str, wire: str, is_hex: bool, out: IO[str]) -> int:
    """Describes the frame in `file` ("-": standard input) on `out`; 0, or 1 for a broken frame."""
    schema = load_schema(wire)
    frame = _read(file, schema.max_frame_bytes + 1)
    if is_hex:
        try:
            frame = bytes.fromhex(frame.decode("ascii"))
        except ValueError:
            raise ValidationError(f"{show(file)} does not hold hexadecimal digits only") from None
    broken = False
    for line in describe(frame, schema):
        broken = broken or line.startswith("broken rule")
        out.write(line + "\n")
    return 1 if broken else 0


def _read(file: str, most: int) -> bytes:
    try:
        if file == "-":
            return sys.stdin.buffer.read(most)
        with open(file, "rb") as source:
            return source.read(most)
    except OSError as error:
        raise ValidationError(f"{show(file)} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValidationError(f"{show(file)} is not the name of a file") from None


def describe(frame: bytes, schema: WireSchema) -> Iterator[str]:
    """The lines of a description of `frame`, read by `schema`."""
    yield f"frame         {len(frame)} bytes, read as wire {schema.name}"
    if frame:
        names = {1: "RESULT", 2: "BATCH", 3: "ERROR"}
        yield f"tag           {frame[0]} ({names.get(frame[0], 'unknown')})"
    try:
        decoded = decode_frame(frame, schema)
    except FrameError as error:
        if len(frame) >= 5 and frame[0] == 2:
            yield f"header        announced: {int.from_bytes(frame[1:5], 'little')} bytes"
        yield f"broken rule   {error.reason}: {REASONS.get(error.reason, '')}"
        yield f"found         {error.message.removeprefix(f'{error.reason}: ')}"
        yield f"requests      {_some(error.rids)}{'' if error.rids_complete else '; the list could not be read whole'}"
        return
    if isinstance(decoded, BatchFrame):
        yield from _batch(frame, decoded, schema)
    elif isinstance(decoded, ControlResult):
        yield f"rid           {show(decoded.rid)}"
        yield f"payload       {len(decoded.payload)} bytes: {show(decoded.payload)}"
    else:
        yield f"rid           {show(decoded.rid)}"
        yield f"message       {show(decoded.message)}"


def _batch(frame: bytes, batch: BatchFrame, schema: WireSchema) -> Iterator[str]:
    header = int.from_bytes(frame[1:5], "little")
    ids = np.dtype(schema.id_dtype)
    at = 5 + header
    yield f"header        {header} bytes at offset 5, {batch.unknown_columns} unknown positions skipped"
    yield f"requests      {len(batch)}, of which {len(batch.finished)} end here"
    yield f"token ids     {len(batch.token_ids)} of {ids.name} at offset {at}"
    at += batch.token_ids.nbytes
    for family in schema.egress.families:
        for suffix, kind in (("val", family.values), ("idx", family.indices)):
            arrays = [batch.extras(i).get(f"{family.name}_{suffix}") for i in range(len(batch))] if kind else []
            count = sum(len(array) for array in arrays if array is not None)
            if count:
                yield f"{family.name + '_' + suffix:<13} {count} of {kind} at offset {at} ({family.meaning})"
                at += 4 * count
    for i in range(min(len(batch), _ROWS)):
        chunk = batch[i]
        low, high = int(batch.offsets[i]), int(batch.offsets[i + 1])
        reason = "goes on" if chunk.finish_reason is None else f"ends: {show(chunk.finish_reason.to_map())}"
        scalars = "".join(
            f", {name} {show(value)}" for name, value in chunk.scalars.items() if value not in (None, 0, False)
        )
        yield f"  {show(chunk.rid)}: prompt {chunk.prompt_tokens} tokens, ids {low}..{high}{_ids(chunk.token_ids.tolist())}, {reason}{scalars}"
    if len(batch) > _ROWS:
        yield f"  … and {len(batch) - _ROWS} more requests"


def _ids(ids: list[int]) -> str:
    return f" [{', '.join(map(str, ids[:8]))}{', …' if len(ids) > 8 else ''}]" if ids else ""


def _some(rids: list[str]) -> str:
    if not rids:
        return "none could be read"
    return ", ".join(map(show, rids[:_ROWS])) + (f" and {len(rids) - _ROWS} more" if len(rids) > _ROWS else "")


# ---- spec


def names() -> list[str]:
    """What can be exported: ``machine/NAME`` and ``wire/NAME``."""
    return [f"machine/{name}" for name in MACHINES] + [f"wire/{name}" for name in schema_names()]


def export_text(name: str, format: str | None) -> str:
    """`name` (as in `names`) in `format`; None is the normative one: json for a machine, toml for a wire revision."""
    kind, _, which = name.partition("/")
    if name not in names():
        raise ValidationError(f"there is no {show(name)}; known: {', '.join(names())}")
    formats: dict[str, Callable[[], str]]
    if kind == "machine":
        formats = {known: lambda known=known: export(MACHINES[which], known) for known in FORMATS}  # type: ignore[misc]
    else:
        formats = {
            "toml": lambda: specs.path("wire", f"{which}.toml").read_text("utf-8"),
            "json": lambda: _wire_json(which),
        }
    chosen = format if format is not None else next(iter(formats))
    if chosen not in formats:
        raise ValidationError(f"{name} has no format {show(chosen)}; known: {', '.join(formats)}")
    return formats[chosen]()


def _wire_json(which: str) -> str:
    return json.dumps(asdict(load_schema(which)), indent=2) + "\n"


def stale(folder: Path | None = None) -> list[str]:
    """What the files in `folder` (default: the shipped machines) disagree about with the declarations; empty: up to date."""
    folder = folder if folder is not None else specs.path("machines")
    problems = []
    known = {f"{name}.json" for name in MACHINES}
    for name, machine in MACHINES.items():
        file = folder / f"{name}.json"
        if not file.is_file():
            problems.append(f"machines/{name}.json is missing")
        elif file.read_text("utf-8") != export(machine, "json"):
            problems.append(f"machines/{name}.json is not what fsm/{name}.py declares; export it again")
    for file in sorted(folder.glob("*.json")):
        if file.name not in known and not file.name.endswith(".schema.json"):
            problems.append(f"machines/{file.name} belongs to no machine")
    for name in schema_names():
        try:
            load_schema(name)
        except ValidationError as error:
            problems.append(f"wire/{name}.toml: {error.message}")
    return problems
