"""Schemas are data: the shipped ones say what the page says, a new revision is a new file, a broken file is one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire_helpers as wire
from headrace import specs
from headrace.codec import ChunkEvent, ValidationError, encode_batch, load_schema, strategies
from headrace.codec.lies import entries, join_frame, split_frame
from headrace.codec.schema import parse_schema, schema_names
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_helpers import batch_of

PAGE = {
    "v1": "rids finish_reasons prompt_tokens tok_lens",
    "v2": "rids finish_reasons prompt_tokens tok_lens cached_tokens reasoning_tokens",
}
FAMILIES = (
    "out_lp_lens in_lp_lens out_top_reqlens out_top_poslens in_top_reqlens in_top_poslens out_tid_reqlens out_tid_poslens"
    " in_tid_reqlens in_tid_poslens hidden_reqlens hidden_poslens"
)
TAIL = {"v1": "", "v2": " weight_versions image_tokens audio_tokens video_tokens decode_latencies ended_outside_stream"}


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_the_columns_stand_in_the_positions_of_the_page(name: str) -> None:
    egress = load_schema(name).egress
    assert " ".join(c.name for c in egress.columns) == f"{PAGE[name]} {FAMILIES}{TAIL[name]}"
    assert egress.required == len(PAGE[name].split())
    assert [f.name for f in egress.families] == ["out_lp", "in_lp", "out_top", "in_top", "out_tid", "in_tid", "hidden"]
    assert [f.name for f in egress.families if f.indices is None] == ["hidden"]
    assert [f.name for f in egress.families if not f.ragged] == ["out_lp", "in_lp"]


def test_the_revisions_differ_where_the_page_says() -> None:
    v1, v2 = load_schema("v1"), load_schema("v2")
    assert (v1.id_dtype, v2.id_dtype) == ("<i4", "<i8")
    assert (len(v1.ingress_fields), len(v2.ingress_fields)) == (16, 47)
    assert (len(v1.sampling_slots), len(v2.sampling_slots)) == (31, 33)
    assert v1.cells == ("input_ids",)
    assert v2.cells == ("input_ids", "token_ids_logprob")
    assert v1.ingress_fields[15].name == "return_hidden_states"
    assert v2.ingress_fields[15].name == "return_flat_raw_top_logprobs"
    defaults = {f.name: f.default for f in v2.ingress_fields if f.default is not None}
    assert defaults["logprob_start_len"] == -1
    assert defaults["tag"] == "TokenizedGenerateReqInput"
    assert set(v2.sampling_slots) - set(v1.sampling_slots) == {"watermark", "ebnf_full_assistant"}


def v3_text() -> str:
    """v2 and one more optional flat family and one more trailing scalar, as a file; no code knows of it."""
    text = specs.path("wire", "v2.toml").read_text("utf-8")
    text = text.replace('name = "v2"', 'name = "v3"', 1)
    text = text.replace(
        '"ended_outside_stream", type = "bool", per = "request", role = "scalar" },\n',
        '"ended_outside_stream", type = "bool", per = "request", role = "scalar" },\n'
        '  { at = 24, name = "draft_lp_lens", type = "u32", per = "request", role = "lens", family = "draft_lp" },\n'
        '  { at = 25, name = "energy", type = "f64?", per = "request", role = "scalar" },\n',
    )
    hidden = '  { name = "hidden", kind = "ragged"'
    extra = (
        '  { name = "draft_lp", kind = "flat", values = "f32", indices = "i32", once = false, meaning = "draft" },\n'
    )
    at = text.index("\n", text.index(hidden)) + 1
    return text[:at] + extra + text[at:]


@pytest.fixture
def v3(tmp_path: Path) -> Any:
    path = tmp_path / "v3.toml"
    path.write_text(v3_text(), "utf-8")
    return load_schema(path)


def test_a_made_up_revision_works_from_its_file_alone(v3: Any) -> None:
    extras = {"draft_lp_val": np.array([0.5, 1.5], "<f4"), "draft_lp_idx": np.array([3, 4], "<i4")}
    event = ChunkEvent(rid="a", token_ids=[2**40], extras=extras, energy=1.25, cached_tokens=9)
    frame = encode_batch([event, ChunkEvent(rid="b")], v3)
    read = batch_of(frame, v3)
    assert read[0] == event
    assert read[0].energy == 1.25
    assert read[1].energy is None
    assert read.unknown_columns == 0


def test_an_older_reader_skips_the_new_scalar_and_refuses_the_new_family(v3: Any) -> None:
    v2 = load_schema("v2")
    event = ChunkEvent(rid="a", token_ids=[7], energy=1.25)
    read = batch_of(encode_batch([event], v3), v2)
    assert read.unknown_columns == 2
    assert read[0].token_ids.tolist() == [7]
    extras = {"draft_lp_val": np.array([0.5], "<f4"), "draft_lp_idx": np.array([3], "<i4")}
    answer = wire.ours(encode_batch([ChunkEvent(rid="a", extras=extras)], v3), v2)
    assert answer == ("reject", "unknown_columns")


V3 = parse_schema(v3_text(), "v3")


@settings(max_examples=40)
@given(data=st.data())
def test_the_strategies_and_the_oracle_work_for_a_made_up_revision(data: st.DataObject) -> None:
    frame = data.draw(strategies.frames(V3))
    assert wire.same(wire.ours(frame, V3), wire.oracle(frame, V3))
    lying, rule = data.draw(strategies.one_lie_frames(V3))
    assert wire.ours(lying, V3) == ("reject", rule)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("format = 1", "format = 2", "format"),
        ("at = 3,", "at = 4,", "count up"),
        ('role = "rids"', 'role = "scalar"', "role"),
        ('type = "u32", per = "request", role = "tok_lens"', 'type = "f64", per = "request", role = "tok_lens"', "u32"),
        ("required = 4", "required = 3", "required"),
        ("required = 4", "required = 5", "required"),
        ("required = 4", 'required = "4"', "required"),
        ('kind = "flat"', 'kind = "round"', "round"),
        ('name = "hidden", kind', 'name = "hid", kind', "hid"),
        ('name = "in_lp_lens"', 'name = "out_lp_lens"', "twice"),
        ('values = "f32"', 'values = "f64"', "f32"),
        ('token_ids = "i32"', 'token_ids = "u8"', "u8"),
        ('frame = "max_frame_bytes"', 'frame = "no_such"', "no_such"),
        ("batch = 2", "batch = 3", "tags"),
        ('cells = ["input_ids"]', "cells = []", "input_ids"),
        ("[egress]", "[egress", "v1.toml"),
        ('per = "position"', 'per = "request"', "per"),
        ("[ingress]", "[outgress]", "ingress"),
        ('"is_normalized",', '"is_normalized", "n",', "twice"),
    ],
)
def test_a_mistake_in_a_schema_file_is_one_clear_line(old: str, new: str, says: str) -> None:
    text = specs.path("wire", "v1.toml").read_text("utf-8")
    assert old in text
    with pytest.raises(ValidationError) as caught:
        parse_schema(text.replace(old, new, 1), "v1.toml")
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert "v1.toml" in caught.value.message


@pytest.mark.parametrize("which", ["v9", "", "no/such.toml", "x\0.toml", "/"])
def test_a_schema_that_is_not_there_is_a_validation_error(which: str) -> None:
    with pytest.raises(ValidationError):
        load_schema(which)


def test_a_schema_is_loaded_once_and_passed_through() -> None:
    v1 = load_schema("v1")
    assert load_schema("v1") is v1
    assert load_schema(v1) is v1
    assert load_schema(specs.path("wire", "v1.toml")) == v1
    assert schema_names() == ["v1", "v2"]


def test_taking_a_frame_apart_and_putting_it_together_changes_nothing() -> None:
    frame = encode_batch([ChunkEvent(rid="a", token_ids=[1], cached_tokens=3)], load_schema("v2"))
    cells, data = split_frame(frame)
    assert join_frame(cells, data) == frame
    assert entries(cells[0]) == [b"\xa1a"]
