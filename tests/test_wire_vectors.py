"""Golden vectors and generated pages: what is checked in is what would be written now, and each vector decodes as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import wire_helpers as wire
from headrace import specs
from headrace.codec import docs, load_schema, vectors
from headrace.codec.errors import ERRORS, HeadraceError
from headrace.codec.export import export_wire
from headrace.codec.lies import LIES
from headrace.codec.limits import LIMITS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", vectors.generated())
def test_the_vectors_are_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text("utf-8") == vectors.generated()[path], "run python -m headrace.codec.vectors"


@pytest.mark.parametrize("path", docs.generated())
def test_the_generated_pages_are_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text("utf-8") == docs.generated()[path], "run python -m headrace.codec.docs"


def _entries(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(specs.path("vectors", f"egress-{name}.json").read_text("utf-8"))
    return found


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_every_vector_means_what_it_says_to_the_codec_and_to_the_naive_decoder(name: str) -> None:
    schema = load_schema(name)
    for entry in _entries(name):
        frame = bytes.fromhex(entry["frame_hex"])
        naive = wire.oracle(frame, schema)
        assert wire.same(wire.ours(frame, schema), naive), entry["name"]
        told = json.loads(json.dumps(vectors.meaning(frame, schema)))
        assert told == {k: v for k, v in entry.items() if k not in ("name", "frame_hex")}, entry["name"]
        if entry["verdict"] == "reject":
            assert naive == ("reject", entry["reason"]), entry["name"]


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_the_vectors_cover_every_rule_every_kind_and_every_column(name: str) -> None:
    found = _entries(name)
    assert {e["reason"] for e in found if e["verdict"] == "reject"} == set(LIES)
    assert {e["kind"] for e in found if e["verdict"] == "accept"} == {"batch", "result", "error"}
    classes = {r["finish_reason"]["class"] for e in found for r in e.get("requests", ()) if r["finish_reason"]}
    assert classes == {"Stop", "Length", "Abort", "Unknown"}
    seen = {k for e in found for r in e.get("requests", ()) for k in (*r["scalars"], *r["extras"])}
    schema = load_schema(name)
    assert {c.name for c in schema.egress.scalars} <= seen
    assert {f.name + "_val_bits" for f in schema.egress.families} <= seen


def test_every_error_class_is_in_the_table() -> None:
    def below(cls: type[HeadraceError]) -> set[type[HeadraceError]]:
        return {cls}.union(*(below(c) for c in cls.__subclasses__() if c.__module__.startswith("headrace.")))

    assert below(HeadraceError) - {HeadraceError} == set(ERRORS)
    assert len({e.code for e in ERRORS}) == len(ERRORS)
    page = docs.generated()["docs/errors.md"]
    assert all(f"`{e.code}`" in page for e in ERRORS)


def test_every_limit_and_every_rule_is_on_its_page() -> None:
    pages = docs.generated()
    assert all(f"`{name}`" in pages["docs/limits.md"] for name in LIMITS)
    assert all(f"| `{rule}` |" in pages["docs/wire.md"] for rule in LIES)


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_the_export_names_every_column_field_slot_and_data_column(name: str) -> None:
    schema, text = load_schema(name), export_wire(load_schema(name))
    for column in schema.egress.columns:
        assert f"| {column.position} | {column.name} |" in text
    for field in schema.ingress_fields:
        assert f"| {field.position} | {field.name} |" in text
    for at, slot in enumerate(schema.sampling_slots):
        assert f"| {at} | {slot} |" in text
    for family in schema.egress.families:
        assert f"| {family.name}_val | f32 |" in text
    assert f"| token_ids | {schema.egress.id_type} |" in text
