"""Messages to the scheduler: golden vectors, columns, and reading whatever bytes a header holds."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from headrace import specs
from headrace.codec import (
    AbortMessage,
    BadMessage,
    ControlMessage,
    EncodeError,
    GenerateMessage,
    GenerateRequest,
    IngressColumns,
    IngressMessage,
    NormalizedRequest,
    Rid,
    WireSchema,
    admit,
    decode_ingress,
    encode_abort,
    encode_control,
    encode_generate,
    strategies_ingress,
)
from headrace.codec.ingress import read_front
from headrace.codec.schema import parse_schema
from headrace.codec.vectors_ingress import vectors
from hypothesis import given
from hypothesis import strategies as st
from ingress_helpers import RULES, V1, V2, refusal

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
BOTH = pytest.mark.parametrize("schema", [V1, V2], ids=["v1", "v2"])


def made(schema: WireSchema, ids: list[int] | None = None, **fields: Any) -> IngressMessage:
    request = admit(GenerateRequest(**({"input_ids": ids or [1]} | fields)), RULES, schema)
    return encode_generate(schema, request, ids or [1])


def read(schema: WireSchema, *messages: IngressMessage) -> list[Any]:
    return decode_ingress(IngressColumns.from_messages(messages), schema)


def read_header(schema: WireSchema, header: Any) -> Any:
    data = header if isinstance(header, bytes) else pack(header)
    [message] = read(schema, IngressMessage("r", data, np.array([7, 8], np.int64)))
    return message


# ---- golden vectors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ingress-v1", "ingress-v2", "ingress-bad"])
def test_the_golden_vectors_in_the_repository_are_what_this_build_makes(name: str) -> None:
    """After a wanted change: python -m headrace.codec.vectors_ingress"""
    assert json.loads(specs.path("vectors", f"{name}.json").read_text("utf-8")) == vectors()[name]


def test_the_v2_vectors_begin_with_the_four_messages_of_the_real_server_byte_for_byte() -> None:
    cases = vectors()["ingress-v2"][:4]
    assert [case["header"][1] for case in cases] == [
        "03d3a373a8c54512a38c09d17553e654", "36b4b23208fb4a3daffe1e518c6a202a", "mine#bfdfec2e00000000", "bd45b504a04f41a19a95622cb135c340"
    ]  # fmt: skip
    assert [hashlib.sha256(bytes.fromhex(case["header_hex"])).hexdigest()[:16] for case in cases] == REAL
    assert [case["buffers"] for case in cases] == [
        {"input_ids": [19923, 2058]}, {"input_ids": [1, 2, 3]}, {"input_ids": [1, 2], "token_ids_logprob": [5, 6]}, {"input_ids": [90]}
    ]  # fmt: skip


REAL = ["62a2e70f01342ded", "e22efc66943df1f7", "443cd607d70e2697", "48d2ae91abd597f4"]


def test_every_bad_vector_is_a_bad_message_with_the_rid_it_names() -> None:
    for case in vectors()["ingress-bad"]:
        message = read_header({"v1": V1, "v2": V2}[case["wire"]], bytes.fromhex(case["header_hex"]))
        assert isinstance(message, BadMessage), case["why"]
        assert message.rid == case["rid"]


# ---- round trip ------------------------------------------------------------------------------------------------------


@BOTH
@given(data=st.data())
def test_reading_gives_back_what_was_admitted(schema: WireSchema, data: st.DataObject) -> None:
    requests: list[NormalizedRequest] = data.draw(st.lists(strategies_ingress.normalized_requests(schema), max_size=4))
    ids = [np.arange(at, 2 * at + 1, dtype=np.int64) for at in range(len(requests))]
    sent = [encode_generate(schema, request, row) for request, row in zip(requests, ids, strict=True)]
    for message, request, row in zip(read(schema, *sent), requests, ids, strict=True):
        assert isinstance(message, GenerateMessage)
        assert message.input_ids.tolist() == row.tolist()
        assert message.sampling == request.sampling
        assert message.rid == str(request.rid)
        assert Rid.from_wire(message.rid).client_facing == request.rid.client_facing
        asked = None if message.token_ids_logprob is None else tuple(message.token_ids_logprob.tolist())
        assert asked == request.token_ids_logprob
        for name in (
            "text",
            "stream",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "return_hidden_states",
        ):
            assert getattr(message, name) == getattr(request, name)
        assert (message.fields, message.unknown_fields) == ({}, 0)


def test_b26_a_different_value_in_every_slot_arrives_in_its_own_slot() -> None:
    """A length test cannot see two neighbours of one type swapped."""
    params = {
        "max_new_tokens": 11, "min_new_tokens": 12 - 5, "stop": ["s1", "s22"], "stop_regex": ["r1"], "stop_token_ids": [13],
        "temperature": 0.14, "top_p": 0.15, "top_k": 16, "min_p": 0.17, "frequency_penalty": 0.18, "presence_penalty": 0.19,
        "repetition_penalty": 0.2, "beam_width": 1, "regex": "g", "stream_interval": 21, "logit_bias": {"22": 0.22},
        "sampling_seed": 23, "custom_params": {"c": 24}, "ignore_eos": True, "skip_special_tokens": True,
        "spaces_between_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    slots = dict(zip(V2.sampling_slots, unpack(made(V2, sampling_params=params).header)[8], strict=True))
    expected = {key: value for key, value in params.items() if key not in ("stop", "stop_regex")}
    expected |= {
        "stop": None,
        "stop_regex": None,
        "stop_strs": ["s1", "s22"],
        "stop_regex_strs": ["r1"],
        "stop_str_max_len": 3,
    }
    expected |= {
        "stop_regex_max_len": 2,
        "is_normalized": True,
        "watermark": None,
        "ebnf_full_assistant": False,
        "n": 1,
    }
    expected |= dict.fromkeys(("json_schema", "ebnf", "structural_tag"))
    assert slots == expected
    for grammar in ("json_schema", "regex", "ebnf", "structural_tag"):
        assert unpack(made(V2, sampling_params={grammar: "g"}).header)[8][V2.sampling_slots.index(grammar)] == "g"


@BOTH
def test_every_flag_and_number_of_the_header_arrives_in_its_own_field(schema: WireSchema) -> None:
    """One at a time, against a message without it: exactly that position differs."""
    plain = unpack(made(schema, rid=Rid.from_wire("r")).header)
    values: dict[str, Any] = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "stream": True,
        "return_hidden_states": True,
    }
    for name, value in values.items():
        header = unpack(made(schema, rid=Rid.from_wire("r"), **{name: value}).header)
        [at] = [at for at in range(len(plain)) if header[at] != plain[at]]
        assert schema.ingress_fields[at].name == name


def test_every_wire_field_arrives_in_its_own_position() -> None:
    samples = {"bool": True, "int": 5, "int?": 6, "str?": "s", "any?": {"k": [1]}}
    plain = unpack(made(V2, rid=Rid.from_wire("r")).header)
    for field in V2.ingress_fields:
        if not field.owned:
            message = made(V2, rid=Rid.from_wire("r"), wire_fields={field.name: samples[field.type]})
            header = unpack(message.header)
            assert [at for at in range(47) if header[at] != plain[at]] == [field.position]
            assert read(V2, message)[0].fields == {field.name: samples[field.type]}


@BOTH
def test_all_positions_and_slots_are_always_emitted(schema: WireSchema) -> None:
    header = unpack(made(schema).header)
    assert (len(header), len(header[8])) == {"v1": (16, 31), "v2": (47, 33)}[schema.name]


def test_token_ids_logprob_is_a_cell_in_v2_and_inline_in_v1() -> None:
    inline, cell = made(V1, token_ids_logprob=[5, 6]), made(V2, token_ids_logprob=[5, 6])
    assert unpack(inline.header)[12] == [5, 6]
    assert inline.cells == {}
    assert unpack(cell.header)[12] is None
    assert cell.cells["token_ids_logprob"].tolist() == [5, 6]
    for schema, message in ((V1, inline), (V2, cell)):
        assert [m.token_ids_logprob is None for m in read(schema, made(schema), message, made(schema))] == [
            True,
            False,
            True,
        ]


def test_the_budget_that_fits_replaces_the_one_asked_for_null_included() -> None:
    request = admit(GenerateRequest(input_ids=[1]), RULES, V2)
    for budget in (5, None, 0):
        [message] = read(V2, encode_generate(V2, request, [1], max_new_tokens=budget))
        assert message.sampling.max_new_tokens == budget
    assert read(V2, encode_generate(V2, request, [1]))[0].sampling.max_new_tokens == 128


def test_ids_are_not_copied_on_the_way_into_the_message_and_are_views_on_the_way_out() -> None:
    request = admit(GenerateRequest(input_ids=[1, 2, 3]), RULES, V2)
    assert request.input_ids is not None
    message = encode_generate(V2, request, request.input_ids)
    assert np.shares_memory(message.ids, request.input_ids)
    columns = IngressColumns.from_messages([message, message])
    for read_back in decode_ingress(columns, V2):
        assert isinstance(read_back, GenerateMessage)
        assert np.shares_memory(read_back.input_ids, columns.ids)


@BOTH
def test_abort_and_control_messages_have_the_bytes_of_the_specification(schema: WireSchema) -> None:
    assert unpack(encode_abort(schema, "r").header) == ["AbortReq", "r", None, False, None, None]
    assert unpack(encode_abort(schema, None, abort_all=True).header) == ["AbortReq", "", None, True, None, None]
    assert encode_control(schema, "FlushCacheReqInput", "r", 0.0).header == pack(["FlushCacheReqInput", "r", None, 0.0])
    assert unpack(encode_control(schema, "GetInternalStateReq", Rid.from_wire("r")).header) == [
        "GetInternalStateReq",
        "r",
        None,
    ]
    assert read(
        schema, encode_abort(schema, "r"), encode_abort(schema, "", True), encode_control(schema, "T", "r", 1, "x")
    ) == [
        AbortMessage(rid="r", abort_all=False),
        AbortMessage(rid="", abort_all=True),
        ControlMessage(tag="T", rid="r", fields=(1, "x")),
    ]


@pytest.mark.parametrize(
    "tag",
    ["TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "AbortReq", "BatchTokenizedGenerateReqInput", "", 5],
)
def test_control_refuses_the_tags_of_other_requests(tag: Any) -> None:
    refusal(encode_control, V2, tag, "r")


@pytest.mark.parametrize(
    "field", [object(), 2**64, "\ud800", {"a": {1, object}}], ids=["object", "too wide", "surrogate", "set"]
)
def test_a_control_field_that_cannot_be_encoded_is_an_encode_error(field: Any) -> None:
    with pytest.raises(EncodeError) as caught:
        encode_control(V2, "T", "r", field)
    assert caught.value.http_status == 400
    str(caught.value).encode()


def test_an_empty_drain_has_empty_columns() -> None:
    columns = IngressColumns.from_messages([])
    assert (columns.headers, columns.ids.tolist(), columns.lengths.tolist(), columns.cells) == ([], [], [], {})
    assert columns.ids.dtype == columns.lengths.dtype == np.int64
    assert decode_ingress(columns, V2) == []


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [2, 1], [-1, 3], [2**62, 2**62], [1, -(2**63)]])
def test_columns_that_disagree_are_the_callers_mistake(lengths: list[int]) -> None:
    header = made(V2).header
    columns = IngressColumns([header, header], np.array([1, 2], np.int64), np.array(lengths, np.int64), {})
    with pytest.raises(ValueError, match="disagree"):
        decode_ingress(columns, V2)
    good = IngressColumns(
        [header, header],
        np.array([1, 2], np.int64),
        np.array([1, 1], np.int64),
        {"token_ids_logprob": (columns.ids, columns.lengths)},
    )
    with pytest.raises(ValueError, match="disagree"):
        decode_ingress(good, V2)


# ---- B24, B26: headers that cannot be read ---------------------------------------------------------------------------


def test_b24_a_bad_header_fails_only_its_own_request_and_its_ids_are_stepped_over() -> None:
    messages = [made(V2, ids, rid=Rid.from_wire(f"r{at}")) for at, ids in enumerate(([1, 2], [3, 4, 5], [6]))]
    header = unpack(messages[1].header)
    header[10] = [1]
    messages[1] = IngressMessage("r1", pack(header), messages[1].ids)
    first, bad, third = read(V2, *messages)
    assert (first.input_ids.tolist(), third.input_ids.tolist()) == ([1, 2], [6])
    assert isinstance(bad, BadMessage)
    assert bad.rid == "r1"
    assert "logprob_start_len" in bad.message


def test_b24_a_bad_header_steps_over_its_cell_too() -> None:
    messages = [made(V2, token_ids_logprob=[at, at + 1]) for at in range(3)]
    messages[1] = IngressMessage("r", b"\xc1", messages[1].ids, messages[1].cells)
    first, bad, third = read(V2, *messages)
    assert isinstance(bad, BadMessage)
    assert bad.rid is None
    assert (first.token_ids_logprob.tolist(), third.token_ids_logprob.tolist()) == ([0, 1], [2, 3])


@BOTH
@pytest.mark.parametrize("change", [-1, 1, 2, -31])
def test_b26_a_sampling_array_of_another_arity_is_an_error_that_names_it(schema: WireSchema, change: int) -> None:
    header = unpack(made(schema).header)
    slots = header[8]
    header[8] = slots[:change] if change < 0 else [*slots[:-1], *[None] * change, slots[-1]]
    message = read_header(schema, header)
    assert isinstance(message, BadMessage)
    assert "sampling_params" in message.message
    assert message.rid == header[1]


@BOTH
def test_b26_a_map_instead_of_an_array_is_an_error(schema: WireSchema) -> None:
    header = unpack(made(schema).header)
    header[8] = dict(zip(schema.sampling_slots, header[8], strict=True))
    assert "sampling_params" in read_header(schema, header).message
    fields = {
        field.name: value for field, value in zip(schema.ingress_fields, unpack(made(schema).header), strict=True)
    }
    assert isinstance(read_header(schema, fields), BadMessage)


WRONG: dict[str, list[Any]] = {
    "int": ["x", 1.5, True, None, [1], {}],
    "float": ["x", True, None, [1.0]],
    "bool": [0, 1, "true", None, []],
    "str": [5, None, b"x", ["x"]],
}


@BOTH
def test_b26_a_wrong_type_in_any_slot_is_an_error_that_names_the_slot(schema: WireSchema) -> None:
    plain = unpack(made(schema).header)
    for field in schema.ingress_fields:
        if field.position in (0, 1, 8) or field.type == "any?":
            continue
        kind = field.type.removesuffix("?")
        for wrong in WRONG.get(kind, ["x", 5, {}]):
            if wrong is None and field.type.endswith("?"):
                continue
            header = [*plain[: field.position], wrong, *plain[field.position + 1 :]]
            message = read_header(schema, header)
            assert isinstance(message, BadMessage), (field, wrong)
            assert f"({field.name})" in message.message
            assert message.rid == plain[1]


SLOT_WRONG: dict[str, Any] = {
    "max_new_tokens": "5", "stop": "x", "stop_token_ids": [1.5], "stop_regex": ["x"], "temperature": "1", "top_p": True,
    "top_k": 1.5, "min_p": None, "frequency_penalty": [], "presence_penalty": "0", "repetition_penalty": None,
    "min_new_tokens": None, "n": "1", "beam_width": 1.0, "json_schema": {}, "regex": 5, "ebnf": [], "structural_tag": True,
    "ignore_eos": 0, "skip_special_tokens": None, "spaces_between_special_tokens": 1, "no_stop_trim": "x", "stream_interval": 1.5,
    "logit_bias": [1], "sampling_seed": "1", "custom_params": [], "stop_strs": None, "stop_regex_strs": [1],
    "stop_str_max_len": None, "stop_regex_max_len": "1", "is_normalized": None, "ebnf_full_assistant": None,
}  # fmt: skip


@BOTH
def test_b26_a_wrong_type_in_any_sampling_slot_is_an_error_that_names_the_slot(schema: WireSchema) -> None:
    for at, slot in enumerate(schema.sampling_slots):
        if slot == "watermark":  # opaque
            continue
        header = unpack(made(schema).header)
        header[8][at] = SLOT_WRONG[slot]
        message = read_header(schema, header)
        assert isinstance(message, BadMessage), slot
        assert f"sampling_params.{slot}" in message.message


def test_parameters_that_are_not_marked_normalised_are_not_read() -> None:
    header = unpack(made(V2).header)
    header[8][V2.sampling_slots.index("is_normalized")] = False
    assert "is_normalized" in read_header(V2, header).message


@BOTH
def test_a_longer_header_is_read_and_its_unknown_tail_counted(schema: WireSchema) -> None:
    header = [*unpack(made(schema).header), "new", {"deep": [1]}, None]
    message = read_header(schema, header)
    assert isinstance(message, GenerateMessage)
    assert message.unknown_fields == 3
    assert message.input_ids.tolist() == [7, 8]


@BOTH
def test_a_shorter_header_is_read_with_the_schemas_defaults(schema: WireSchema) -> None:
    whole = unpack(made(schema).header)
    for n in range(9, len(whole)):
        message = read_header(schema, whole[:n])
        assert isinstance(message, GenerateMessage), n
        assert (message.logprob_start_len, message.stream, message.fields) == (-1, False, {})
    for n in range(9):
        assert isinstance(read_header(schema, whole[:n]), BadMessage), n


@BOTH
def test_every_prefix_of_a_header_is_a_bad_message_with_its_rid_once_that_is_whole(schema: WireSchema) -> None:
    rid = "mine#0123456789abcdef"
    for message in (
        made(schema, rid=Rid.from_wire(rid)),
        encode_abort(schema, rid),
        encode_control(schema, "T", rid, 0.0),
    ):
        whole = message.header.index(rid.encode()) + len(rid)
        for n in range(len(message.header)):
            bad = read_header(schema, message.header[:n])
            assert isinstance(bad, BadMessage)
            assert bad.rid == (rid if n >= whole else None)
        assert isinstance(read_header(schema, message.header + b"\x00"), BadMessage)


@pytest.mark.parametrize(
    "header",
    [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 10_000, b"\x81\x01" * 10_000, pack([]), pack({}), pack(None), pack(5), pack([None, "r"]), pack(["T"]), pack(["T", None]), pack(["T", 5, None]), pack(["AbortReq", "r", None, 1]), pack(["TokenizedEmbeddingReqInput", "r"]), b"\xdc\x00", b"\x92\xa1\xffx", b"\x93\xa1T\xa1\xff\xc0", b"\x94\xa1T\xa1r\xc0\xd7\xff" + b"\xff" * 8, b"\x94\xa1T\xa1r\xc0\x81\x90\xc1"],
    ids=lambda b: b[:12].hex(),
)  # fmt: skip
def test_what_is_no_message_is_a_bad_message(header: bytes) -> None:
    for schema in (V1, V2):
        assert isinstance(read_header(schema, header), BadMessage)


def test_depth_bombs_behind_a_readable_rid_are_bad_messages_with_that_rid() -> None:
    for tag in ("T", "AbortReq", "TokenizedGenerateReqInput"):
        header = b"\x94" + pack(tag) + pack("r") + b"\xc0" + b"\x91" * 20_000
        assert read_header(V2, header) == BadMessage(rid="r", message=read_header(V2, header).message)


def test_v1_token_ids_beyond_64_bits_are_a_bad_message() -> None:
    header = unpack(made(V1, token_ids_logprob=[1]).header)
    header[12] = [2**64 - 1]
    assert isinstance(read_header(V1, header), BadMessage)


@BOTH
@given(data=st.data())
def test_hostile_headers_never_raise_and_never_disturb_the_others(schema: WireSchema, data: st.DataObject) -> None:
    columns, sound = data.draw(strategies_ingress.hostile_columns(schema))
    messages = decode_ingress(columns, schema)
    assert len(messages) == len(columns)
    ends = np.cumsum(columns.lengths).tolist()
    for at, (message, good) in enumerate(zip(messages, sound, strict=True)):
        assert not (good and isinstance(message, BadMessage))
        if isinstance(message, GenerateMessage):
            assert message.input_ids.tolist() == columns.ids[ends[at] - columns.lengths[at] : ends[at]].tolist()
        if isinstance(message, BadMessage):
            message.message.encode("utf-8")
            assert len(message.message) < 500


@given(st.one_of(st.binary(max_size=40), strategies_ingress.hostile_headers(V2)))
def test_the_front_of_any_bytes_is_read_as_the_library_reads_it(data: bytes) -> None:
    count, tag, rid = read_front(data)
    try:
        value = unpack(data)
    except (msgspec.DecodeError, RecursionError):
        return
    if isinstance(value, list):
        assert count == len(value)
        assert tag == (value[0] if value and isinstance(value[0], str) else None)
        if tag is not None:
            assert rid == (value[1] if len(value) > 1 and isinstance(value[1], str) else None)
    else:
        assert (count, tag, rid) == (None, None, None)


@pytest.mark.parametrize("prefix", [b"\xd9\x01", b"\xda\x00\x01", b"\xdb\x00\x00\x00\x01"])
def test_every_width_of_a_string_is_read(prefix: bytes) -> None:
    assert read_front(b"\x92\xa1T" + prefix + b"r") == (2, "T", "r")
    assert read_front(b"\xdd\x00\x00\x00\x02\xa1T" + prefix + b"r") == (2, "T", "r")
    for n in range(len(prefix) + 1):
        assert read_front((b"\x92\xa1T" + prefix + b"r")[: 3 + n]) == (2, "T", None)


# ---- the schema decides ----------------------------------------------------------------------------------------------


def test_a_third_revision_works_from_its_file_alone() -> None:
    text = specs.path("wire", "v2.toml").read_text("utf-8").replace('name = "v2"', 'name = "v3"', 1)
    text = text.replace(
        '  { at = 46, name = "reserved_46", type = "nil", owned = true },',
        '  { at = 46, name = "reserved_46", type = "nil", owned = true },\n  { at = 47, name = "tenant", type = "str?", owned = false },',
    )
    text = text.replace('  "ebnf_full_assistant",\n', '  "ebnf_full_assistant",\n  "future_slot",\n')
    v3 = parse_schema(text, "v3")
    message = made(v3, wire_fields={"tenant": "t"})
    header = unpack(message.header)
    assert (len(header), header[47], len(header[8]), header[8][33]) == (48, "t", 34, None)
    [again] = read(v3, message)
    assert again.fields == {"tenant": "t"}
    [older] = read(V2, IngressMessage("r", pack([*header[:8], header[8][:33], *header[9:]]), message.ids))
    assert older.unknown_fields == 1
