"""The small commands: ``inspect`` (a frame or message, in words), ``trace`` (validate a recording), ``spec`` (machines and wire, as data).

Owns: files, formats and exit statuses; what a frame is said to be comes from `codec/inspect.py`. A broken frame is an answer, not
a mistake of the user, and has the exit status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from .. import specs
from ..codec.errors import ValidationError, show
from ..codec.export import export_wire
from ..codec.inspect import describe, render
from ..codec.schema import load_schema, schema_names
from ..fsm import MACHINES, Trace, TraceError, export, validate
from ..fsm.exports import FORMATS
from ..fsm.perfetto import to_perfetto
from .demo_view import printable

# ---- inspect


def inspect_file(file: str, wire: str, is_hex: bool, as_json: bool, out: IO[str]) -> int:
    """Describes the frame or message in `file` ("-": standard input) on `out`; 0, or 1 for a broken one."""
    schema = load_schema(wire)
    data = _read(file, schema.max_frame_bytes + 1)
    if is_hex:
        try:
            data = bytes.fromhex(data.decode("ascii"))
        except ValueError:
            raise ValidationError(f"{show(file)} does not hold hexadecimal digits only") from None
    report = describe(data, schema)
    lines = [json.dumps(report)] if as_json else render(report)
    out.write("".join(f"{line}\n" for line in lines))
    return 0 if report["ok"] else 1


def _read(file: str, most: int) -> bytes:
    try:
        if file == "-":
            if sys.stdin is None:
                raise ValidationError("standard input is closed")
            return sys.stdin.buffer.read(most)
        with open(file, "rb") as source:
            return source.read(most)
    except OSError as error:
        raise ValidationError(f"{show(file)} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValidationError(f"{show(file)} is not the name of a file") from None


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, "utf-8")
    except OSError as error:
        raise ValidationError(f"{show(file)} cannot be written: {error.strerror}") from None
    except ValueError:
        raise ValidationError(f"{show(file)} is not the name of a file") from None


# ---- trace


def trace_file(file: str, perfetto: str | None, out: IO[str]) -> int:
    """Validates the recorded trace in `file` on `out`; 0, or 1 where it breaks a rule. `perfetto`: a file for a trace viewer, too."""
    try:
        trace = Trace.read(file)
    except TraceError as error:
        raise ValidationError(f"{show(file)}: {error}") from None
    except OSError as error:
        raise ValidationError(f"{show(file)} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValidationError(f"{show(file)} is not the name of a file") from None
    violations = validate(trace)
    if perfetto is not None:
        _write(perfetto, to_perfetto(trace))
    for violation in violations:
        out.write("".join(f"{printable(line)}\n" for line in str(violation).splitlines()))
    if not trace.ended:
        out.write("the file was cut: its last line is missing\n")
    if trace.full:
        out.write(f"the recorder was full: {trace.dropped} later records are not here\n")
    out.write(f"{len(trace)} records, {len(violations)} violations\n")
    return 1 if violations else 0


# ---- spec


def names() -> list[str]:
    """What can be exported: ``machine/NAME`` and ``wire/NAME``."""
    return [f"machine/{name}" for name in MACHINES] + [f"wire/{name}" for name in schema_names()]


def export_text(name: str, format: str | None) -> str:
    """`name` (as in `names`) in `format`; None: json for a machine; for a wire revision a table with
    the byte layout (its normative form is toml)."""
    kind, _, which = name.partition("/")
    if name not in names():
        raise ValidationError(f"there is no {show(name)}; known: {', '.join(names())}")
    formats: dict[str, Callable[[], str]]
    if kind == "machine":
        formats = {known: lambda known=known: export(MACHINES[which], known) for known in FORMATS}  # type: ignore[misc]
    else:
        formats = {
            "table": lambda: export_wire(load_schema(which)),
            "toml": lambda: specs.path("wire", f"{which}.toml").read_text("utf-8"),
            "json": lambda: _wire_json(which),
        }
    chosen = format if format is not None else next(iter(formats))
    if chosen not in formats:
        raise ValidationError(f"{name} has no format {show(chosen)}; known: {', '.join(formats)}")
    return formats[chosen]()


def _wire_json(which: str) -> str:
    return json.dumps(asdict(load_schema(which)), indent=2) + "\n"


def stale(root: Path | None = None) -> list[str]:
    """What the generated files below `root` (default: the shipped `specs/`) disagree about with the code; empty: up to date."""
    from ..codec import vectors, vectors_ingress

    root = root if root is not None else specs.path()
    made = {f"machines/{name}.json": export(machine, "json") for name, machine in MACHINES.items()}
    made |= {path.removeprefix("specs/"): content for path, content in vectors.generated().items()}
    problems = []
    for path, content in made.items():
        file = root / path
        if not file.is_file():
            problems.append(f"{path} is missing")
        elif file.read_text("utf-8") != content:
            problems.append(f"{path} is not what the code declares; generate it again")
    for name, cases in vectors_ingress.vectors().items():
        file = root / "vectors" / f"{name}.json"
        if not file.is_file():
            problems.append(f"vectors/{name}.json is missing")
        elif json.loads(file.read_text("utf-8")) != cases:
            problems.append(f"vectors/{name}.json is not what the code makes; generate it again")
    known = {f"{name}.json" for name in MACHINES}
    problems += [
        f"machines/{file.name} belongs to no machine"
        for file in sorted((root / "machines").glob("*.json"))
        if file.name not in known and not file.name.endswith(".schema.json")
    ]
    return problems
