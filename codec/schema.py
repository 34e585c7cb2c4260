"""Wire schemas: the normative data of `specs/wire/*.toml`, read, checked and given names.

Owns: `WireSchema` and how a file becomes one. Rules it keeps:

* The codec knows no position and no column by itself; a further revision is a further file. Only the *roles* of the core
  (rids, finish_reasons, prompt_tokens, tok_lens) and the shapes (flat and ragged families, scalars) are code.
* A schema file is input like any other: a mistake in it is one ValidationError that names the file, never a KeyError later.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from .. import specs
from .errors import ValidationError, show
from .limits import LIMITS, default

TAGS: Final = {"result": 1, "batch": 2, "error": 3}
ELEMENT_TYPES: Final = {"i32": "<i4", "i64": "<i8", "f32": "<f4"}
COLUMN_TYPES: Final = frozenset({"str", "map?", "u32", "u32?", "f64", "f64?", "bool", "bool?", "str?", "opaque?"})
FIELD_TYPES: Final = frozenset(
    {"nil", "str", "str?", "bool", "bool?", "int", "int?", "float", "float?", "ints?", "any?", "sampling"}
)
CORE_ROLES: Final = ("rids", "finish_reasons", "prompt_tokens", "tok_lens")
_ROLES: Final = frozenset({*CORE_ROLES, "scalar", "lens", "reqlens", "poslens"})


@dataclass(frozen=True)
class Column:
    """One header position of a BATCH frame. `type` ends with ``?`` where nil is allowed; `family` for count columns."""

    name: str
    position: int
    type: str
    per: str
    role: str
    family: str | None = None

    @property
    def nil(self) -> object:
        """The value a scalar has when its column is absent."""
        return None if self.type.endswith("?") else {"u32": 0, "f64": 0.0, "bool": False, "str": ""}.get(self.type)


@dataclass(frozen=True)
class Family:
    """A family of data columns: f32 `values` and, for pair families, i32 `indices`.

    A flat family has one count per request (`lens`). A ragged one has two header columns: positions per request
    (`reqlens`) and values per position (`poslens`).
    """

    name: str
    ragged: bool
    values: str
    indices: str | None
    once: bool
    meaning: str
    lens: Column
    poslens: Column | None

    @property
    def itemsize(self) -> int:
        """Bytes of data per value, its index included."""
        return 4 if self.indices is None else 8


@dataclass(frozen=True)
class Egress:
    """The BATCH frame: header `columns` by position, how many are `required`, and the `families` in data order."""

    required: int
    columns: tuple[Column, ...]
    families: tuple[Family, ...]
    id_type: str

    @cached_property
    def scalars(self) -> tuple[Column, ...]:
        """The per-request columns that are delivered as they are, in header order."""
        return tuple(c for c in self.columns if c.role == "scalar")

    @cached_property
    def by_name(self) -> Mapping[str, Column]:
        return {c.name: c for c in self.columns}


@dataclass(frozen=True)
class IngressField:
    """One header position of a generate request; `default` is what a receiver reads when the array is shorter.

    `owned`: headrace fills it from the request; the others can be set through `wire_fields`.
    """

    name: str
    position: int
    default: object
    type: str
    owned: bool


@dataclass(frozen=True, repr=False)
class WireSchema:
    """One revision of the wire. Made by `load_schema`; compared and hashed by content."""

    name: str
    title: str
    egress: Egress
    ingress_fields: tuple[IngressField, ...]
    sampling_slots: tuple[str, ...]
    cells: tuple[str, ...]
    max_frame_bytes: int
    max_header_bytes: int

    def __hash__(self) -> int:
        # kept: plans are looked up by schema at every frame, and hashing the whole tree anew costs more than a small decode
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.name, self.egress, self.ingress_fields, self.sampling_slots, self.cells, self.max_frame_bytes)
        )

    def __repr__(self) -> str:
        return f"WireSchema({self.name})"

    @property
    def id_dtype(self) -> str:
        """numpy dtype of the token ids column: ``"<i4"`` or ``"<i8"``."""
        return ELEMENT_TYPES[self.egress.id_type]


class _Fault(Exception):
    pass


def _need(table: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = table.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise _Fault(f"{where}: {key} must be {names}, not {show(value)}")
    return value


def _one_of(value: str, allowed: object, where: str) -> str:
    if value not in allowed:  # type: ignore[operator]
        raise _Fault(f"{where}: {show(value)} is not one of {', '.join(sorted(allowed))}")  # type: ignore[call-overload]
    return value


def _rows(table: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = _need(table, key, list, where)
    for at, row in enumerate(rows):
        if not isinstance(row, dict):
            raise _Fault(f"{where}: {key}[{at}] must be a table")
    return rows


def _unique(names: list[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise _Fault(f"{where}: the name {show(name)} is used twice")


def _egress(table: Mapping[str, Any]) -> Egress:
    columns = []
    for at, row in enumerate(_rows(table, "columns", "egress")):
        where = f"egress column {at}"
        if _need(row, "at", int, where) != at:
            raise _Fault(f"{where}: at = {show(row['at'])}; positions must count up from 0")
        role = _one_of(_need(row, "role", str, where), _ROLES, where)
        per = _one_of(_need(row, "per", str, where), ("request", "position"), where)
        kind = _one_of(_need(row, "type", str, where), COLUMN_TYPES, where)
        if role not in ("rids", "finish_reasons", "scalar") and kind != "u32":
            raise _Fault(f"{where}: a column with role {role} holds u32, not {kind}")
        if (per == "position") != (role == "poslens"):
            raise _Fault(f"{where}: per = {show(per)} does not go with role {role}")
        columns.append(Column(_need(row, "name", str, where), at, kind, per, role, row.get("family")))
    _unique([c.name for c in columns], "egress columns")
    for at, role in enumerate(CORE_ROLES):
        if at >= len(columns) or columns[at].role != role:
            raise _Fault(f"egress column {at}: must have role {role}")
    required = _need(table, "required", int, "egress")
    if not 4 <= required <= len(columns) or any(c.role not in (*CORE_ROLES, "scalar") for c in columns[:required]):
        raise _Fault(f"egress: required = {required} must cover the core and scalars only")
    by_role = {(c.family, c.role): c for c in columns if c.family is not None}
    families = []
    for row in _rows(table, "families", "egress"):
        name = _need(row, "name", str, "egress family")
        where = f"egress family {show(name)}"
        ragged = _one_of(_need(row, "kind", str, where), ("flat", "ragged"), where) == "ragged"
        lens = by_role.pop((name, "reqlens" if ragged else "lens"), None)
        poslens = by_role.pop((name, "poslens"), None) if ragged else None
        if lens is None or (ragged and poslens is None):
            raise _Fault(f"{where}: its count columns are missing")
        values, indices = _need(row, "values", str, where), row.get("indices")
        if values != "f32" or indices not in (None, "i32"):
            raise _Fault(f"{where}: values must be f32 and indices i32 or absent")
        once, meaning = _need(row, "once", bool, where), _need(row, "meaning", str, where)
        families.append(Family(name, ragged, values, indices, once, meaning, lens, poslens))
    _unique([f.name for f in families], "egress families")
    if by_role:
        raise _Fault(f"egress: count columns without a family: {', '.join(c.name for c in by_role.values())}")
    ids = _one_of(_need(table, "token_ids", str, "egress"), ("i32", "i64"), "egress token_ids")
    return Egress(required, tuple(columns), tuple(families), ids)


def _ingress(table: Mapping[str, Any]) -> tuple[tuple[IngressField, ...], tuple[str, ...], tuple[str, ...]]:
    fields = []
    for at, row in enumerate(_rows(table, "fields", "ingress")):
        where = f"ingress field {at}"
        if _need(row, "at", int, where) != at:
            raise _Fault(f"{where}: at = {show(row['at'])}; positions must count up from 0")
        kind = _one_of(_need(row, "type", str, where), FIELD_TYPES, where)
        name, owned = _need(row, "name", str, where), _need(row, "owned", bool, where)
        fields.append(IngressField(name, at, row.get("default"), kind, owned))
    _unique([f.name for f in fields], "ingress fields")
    slots = tuple(str(s) for s in _need(table, "sampling_slots", list, "ingress"))
    cells = tuple(str(c) for c in _need(table, "cells", list, "ingress"))
    _unique(list(slots), "ingress sampling_slots")
    if not cells or cells[0] != "input_ids":
        raise _Fault("ingress: the first cell must be input_ids")
    return tuple(fields), slots, cells


def _limit(table: Mapping[str, Any], key: str) -> int:
    name = _need(table, key, str, "limits")
    if name not in LIMITS:
        raise _Fault(f"limits: {show(name)} is not a limit of headrace")
    return default(name)


def parse_schema(text: str, origin: str) -> WireSchema:
    """The schema in the toml `text`; `origin` names it in errors. Raises ValidationError."""
    try:
        table = tomllib.loads(text)
        if table.get("format") != 1:
            raise _Fault(f"format = {show(table.get('format'))}; this build reads format 1")
        if table.get("tags") != TAGS:
            raise _Fault(f"tags must be {TAGS}, not {show(table.get('tags'))}")
        limits = _need(table, "limits", dict, "file")
        fields, slots, cells = _ingress(_need(table, "ingress", dict, "file"))
        return WireSchema(
            name=_need(table, "name", str, "file"),
            title=_need(table, "title", str, "file"),
            egress=_egress(_need(table, "egress", dict, "file")),
            ingress_fields=fields,
            sampling_slots=slots,
            cells=cells,
            max_frame_bytes=_limit(limits, "frame"),
            max_header_bytes=_limit(limits, "header"),
        )
    except (_Fault, tomllib.TOMLDecodeError) as fault:
        raise ValidationError(f"wire schema {origin}: {fault}", field="wire") from None


def schema_names() -> list[str]:
    """The revisions that ship with headrace, sorted."""
    return sorted(p.stem for p in specs.path("wire").glob("*.toml"))


@lru_cache(maxsize=16)
def _shipped(name: str) -> WireSchema:
    return parse_schema(specs.path("wire", f"{name}.toml").read_text("utf-8"), name)


def load_schema(which: str | os.PathLike[str] | WireSchema) -> WireSchema:
    """``"v1"``, ``"v2"``, or the path of a toml file of the same shape (see `specs/wire/`). Raises ValidationError."""
    if isinstance(which, WireSchema):
        return which
    if isinstance(which, str) and which in schema_names():
        return _shipped(which)
    path = Path(which)
    if path.suffix != ".toml":
        raise ValidationError(
            f"no wire schema {show(str(which))}: known are {', '.join(schema_names())}, or the path of a .toml file",
            field="wire",
        )
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as fault:
        raise ValidationError(f"wire schema {show(str(which))} cannot be read: {fault}", field="wire") from None
    return parse_schema(text, show(str(which)))
