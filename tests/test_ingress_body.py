"""`/generate`-shaped bodies: one or a batch, rids, unknown keys, and JSON that is not usable."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from headrace.codec import GenerateBody, ValidationError, encode_generate, strategies_ingress
from headrace.codec.body import batch_rids
from hypothesis import given
from ingress_helpers import V1, V2, admit_body, refusal


def shapes(body: Any, **limits: int) -> list[Any]:
    return GenerateBody.from_json(body if isinstance(body, (str, bytes)) else json.dumps(body), **limits).requests()


# ---- B02 -------------------------------------------------------------------------------------------------------------


def test_b02_a_list_rid_on_a_single_prompt_is_refused() -> None:
    assert refusal(admit_body, {"text": "hi", "rid": ["a", "b"]}).field == "rid"
    assert refusal(admit_body, {"text": "hi", "rid": ["a"]}).field == "rid"


def test_b02_one_rid_on_a_batch_becomes_one_per_item() -> None:
    assert [r.rid.client_facing for r in admit_body({"text": ["p", "q"], "rid": "r"})] == ["r_0", "r_1"]
    assert [r.rid.client_facing for r in admit_body({"text": ["p"], "rid": "r"})] == ["r_0"]


@pytest.mark.parametrize(
    "rid",
    [
        ["a", "b"],
        ["a", "a", "b"],
        ["a"] * 3,
        ["a", "b", 5],
        5,
        {"a": 1},
        "a" * 127,
        ["a", "b", "a" * 129],
        "HEALTH_CHECK",
        True,
    ],
    ids=ascii,
)
def test_b02_rids_that_do_not_fit_the_batch_are_refused(rid: Any) -> None:
    assert refusal(admit_body, {"text": ["p", "q", "s"], "rid": rid}).field == "rid"


def test_b02_a_list_of_distinct_rids_is_taken_item_by_item() -> None:
    assert [r.rid.client_facing for r in admit_body({"text": ["p", "q"], "rid": ["b", "a"]})] == ["b", "a"]


# ---- B03 -------------------------------------------------------------------------------------------------------------


def test_b03_a_batch_with_an_empty_item_is_refused_whole() -> None:
    assert refusal(admit_body, {"input_ids": [[5], []]}).field == "input_ids"
    assert refusal(admit_body, {"input_ids": []}).field == "input_ids"
    assert refusal(admit_body, {"input_ids": [[]]}).field == "input_ids"
    refusal(admit_body, {"text": []})


# ---- B06 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        r'{"text":"a\ud800b"}',
        r'{"text":"a\ud800b","stream":true}',
        r'{"text":"x","rid":"\udfff"}',
        r'{"text":"x","sampling_params":{"stop":["a","\ud800"]}}',
        r'{"text":["x","\ud83d"]}',
        r'{"text":"x","\ud800":1}',
        r'{"text":"x","sampling_params":{"custom_params":{"k":["\ud800"]}}}',
        '{"text":"\ud800"}',
    ],
)
def test_b06_a_lone_surrogate_anywhere_is_refused_and_not_echoed(text: str) -> None:
    error = refusal(admit_body, text)
    assert "surrogate" in str(error) or "UTF-8" in str(error)
    assert "\\ud800" not in str(error)


def test_b06_a_pair_of_surrogates_is_one_character() -> None:
    [admitted] = admit_body(r'{"text":"\ud83d\ude00"}')
    assert admitted.text == "\U0001f600"


def test_b06_a_lone_surrogate_in_an_object_is_refused_like_one_in_json() -> None:
    for body in (
        {"text": "\ud800"},
        {"text": "x", "rid": "\ud800"},
        {"text": ["x", "\ud800"]},
        {"text": "x", "lora_id": "\ud800"},
    ):
        refusal(admit_body, body)


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999", "[NaN]"])
def test_numbers_that_are_not_finite_are_refused_with_the_reason(word: str) -> None:
    error = refusal(admit_body, f'{{"text": "x", "sampling_params": {{"temperature": {word}}}}}')
    assert "not a JSON number" in str(error) or "too large" in str(error)


@pytest.mark.parametrize(
    "body",
    ["", "[", "{", "nul", '{"text":"x"} x', '{"text":"x",}', "'x'", "[" * 100_000, '{"a":' * 5000, b"\xff", b'{"text":"\xff"}', b"\x00", "\ufeff{}", '{"text": 1' + "0" * 5000 + "}"],
    ids=lambda b: ascii(b)[:20],
)  # fmt: skip
def test_text_that_is_no_json_is_refused(body: Any) -> None:
    assert len(str(refusal(GenerateBody.from_json, body))) < 400


@pytest.mark.parametrize("body", ["[]", "5", '"x"', "null", "true", "[{}]", 5, None, [1]], ids=ascii)
def test_a_body_must_be_an_object(body: Any) -> None:
    refusal(GenerateBody.from_json, body)


def test_bytes_text_and_objects_are_the_same_body() -> None:
    body = {"text": "字", "sampling_params": {"temperature": 0}}
    forms: list[Any] = [json.dumps(body), json.dumps(body).encode(), bytearray(json.dumps(body).encode()), body]
    assert len({str(GenerateBody.from_json(form).requests()) for form in forms}) == 1


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["temprature", "prompt", "is_normalized", "", "max_new_tokens", "字"])
def test_an_unknown_key_is_refused_by_name_with_the_known_ones(key: str) -> None:
    error = refusal(admit_body, {"text": "x", key: 1})
    assert ascii(key) in str(error)
    assert "sampling_params" in str(error)


@pytest.mark.parametrize("key", ["image_data", "audio_data", "video_data", "modalities"])
def test_media_is_refused_and_never_ignored(key: str) -> None:
    assert "encoder" in str(refusal(admit_body, {"text": "x", key: ["http://x"]}))
    admit_body({"text": "x", key: None})


def test_null_is_absent_for_every_key() -> None:
    keys = ("rid", "sampling_params", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "return_hidden_states", "add_special_tokens", "input_ids", "wire_fields")  # fmt: skip
    [plain], [nulls] = (
        admit_body({"text": "x", "rid": "r"}),
        admit_body({"text": "x", **dict.fromkeys(keys), "rid": "r"}),
    )
    for name in plain.__struct_fields__:
        if name != "rid":
            assert getattr(plain, name) == getattr(nulls, name)


def test_fields_the_schema_leaves_to_the_client_stand_at_the_top_level_or_in_wire_fields() -> None:
    for body in ({"text": "x", "priority": 3}, {"text": "x", "wire_fields": {"priority": 3}}):
        assert admit_body(body)[0].wire_fields == {"priority": 3}
    assert refusal(admit_body, {"text": "x", "priority": 3}, schema=V1).field == "priority"
    assert "both" in str(refusal(admit_body, {"text": "x", "priority": 3, "wire_fields": {"priority": 3}}))
    assert refusal(admit_body, {"text": "x", "wire_fields": 5}).field == "wire_fields"
    assert refusal(admit_body, {"text": "x", "wire_fields": {"sampling_params": 1}}).field == "sampling_params"


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_list_of_prompts_is_a_batch_also_with_one_element() -> None:
    assert GenerateBody.from_json({"text": ["p"]}).is_batch
    assert GenerateBody.from_json({"input_ids": [[1]]}).is_batch
    assert not GenerateBody.from_json({"text": "p"}).is_batch
    assert not GenerateBody.from_json({"input_ids": [1]}).is_batch


def test_scalars_are_for_every_item_and_lists_per_item() -> None:
    made = shapes(
        {
            "input_ids": [[1], [2]], "sampling_params": [{"temperature": 0}, {}], "return_logprob": True, "stream": True,
            "logprob_start_len": [0, -1], "token_ids_logprob": [5, 6], "top_logprobs_num": 2, "priority": 4,
        }
    )  # fmt: skip
    assert [r.input_ids for r in made] == [[1], [2]]
    assert [r.sampling_params for r in made] == [{"temperature": 0}, {}]
    assert [r.logprob_start_len for r in made] == [0, -1]
    assert all(
        (r.return_logprob, r.stream, r.token_ids_logprob, r.top_logprobs_num) == (True, True, [5, 6], 2) for r in made
    )
    assert all(r.wire_fields == {"priority": 4} for r in made)


def test_token_ids_logprob_of_a_batch_is_one_list_for_all_or_one_per_item() -> None:
    assert [r.token_ids_logprob for r in shapes({"text": ["p", "q"], "token_ids_logprob": [[5], None]})] == [[5], None]
    assert [r.token_ids_logprob for r in admit_body({"text": ["p", "q"], "token_ids_logprob": []})] == [None, None]
    refusal(admit_body, {"text": ["p", "q"], "token_ids_logprob": [[5], 6]})


@pytest.mark.parametrize(
    "key",
    [
        "sampling_params",
        "stream",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "return_text_in_logprobs",
        "return_hidden_states",
        "add_special_tokens",
    ],
)
@pytest.mark.parametrize("n", [0, 1, 3])
def test_lists_of_another_length_are_refused(key: str, n: int) -> None:
    assert refusal(admit_body, {"text": ["p", "q"], key: [None] * n}).field == key


def test_a_list_where_one_value_is_due_is_refused_on_a_single_prompt() -> None:
    for key in ("sampling_params", "stream", "logprob_start_len"):
        assert refusal(admit_body, {"text": "p", key: [None]}).field == key


@pytest.mark.parametrize("ids", [[1, [2]], [[1], 2], [[1], None], [["a"]], [[[1]]], ["a"], "12", {"a": 1}], ids=ascii)
def test_prompts_of_mixed_or_deeper_shape_are_refused(ids: Any) -> None:
    assert refusal(admit_body, {"input_ids": ids}).field == "input_ids"


@pytest.mark.parametrize("text", [["a", 5], [["a"]], [None], 5, {"a": 1}, True], ids=ascii)
def test_texts_of_another_type_are_refused(text: Any) -> None:
    assert refusal(admit_body, {"text": text}).field == "text"


@pytest.mark.parametrize(
    "body", [{}, {"text": "a", "input_ids": [1]}, {"text": ["a"], "input_ids": [[1]]}, {"text": None}], ids=str
)
def test_exactly_one_kind_of_prompt(body: Any) -> None:
    assert "exactly one" in str(refusal(admit_body, body))


def test_the_number_of_items_is_bounded() -> None:
    assert len(shapes({"text": ["p"] * 4096})) == 4096
    assert "4096" in str(refusal(shapes, {"text": ["p"] * 4097}))
    assert len(shapes({"text": ["p"] * 2}, max_batch_items=2)) == 2
    refusal(shapes, {"text": ["p"] * 3}, max_batch_items=2)


def test_the_bytes_of_copies_are_bounded_but_not_those_of_lists() -> None:
    grammar = {"ebnf": "a" * 1000}
    shapes({"text": ["p"] * 5, "sampling_params": grammar}, max_broadcast_bytes=5000)
    error = refusal(shapes, {"text": ["p"] * 6, "sampling_params": grammar}, max_broadcast_bytes=5000)
    assert error.field == "sampling_params"
    shapes({"text": ["p"] * 6, "sampling_params": [grammar] * 6}, max_broadcast_bytes=5000)
    refusal(shapes, {"text": ["p"] * 6, "lora_id": "a" * 1000}, max_broadcast_bytes=5000)
    refusal(shapes, {"text": ["p"] * 4096, "sampling_params": {"ebnf": "a" * 20_000}})


@given(strategies_ingress.wild_bodies())
def test_any_body_is_admitted_and_encodes_or_is_refused_with_a_printable_400(body: dict[str, Any]) -> None:
    forms: list[Any] = [body]
    with suppress(ValueError, TypeError):
        forms.append(json.dumps(body))
    for form in forms:
        try:
            admitted = admit_body(form)
        except ValidationError as error:
            json.dumps(error.to_dict(), allow_nan=False).encode("utf-8")
            str(error).encode("utf-8")
        else:
            for item in admitted:
                encode_generate(V2, item, [1] if item.input_ids is None else item.input_ids)


def test_the_shape_is_refused_before_any_value_is_looked_at() -> None:
    for body, field in (
        ({"text": "a", "rid": ["r"]}, "rid"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ["a", "b"], "input_ids": [[1], [2]]}, "text"),
        ({}, "text"),
    ):
        assert refusal(GenerateBody.from_json, body).field == field


def test_rids_of_a_batch_can_be_had_without_a_body() -> None:
    assert batch_rids("r", 2) == ["r_0", "r_1"]
    assert batch_rids(None, 2) == [None, None]
    assert batch_rids(["a", None], 2) == ["a", None]
    for rid, n in ((["a"], 2), (["a", "b"], 1), (["a", "a"], 2), ([None, "\ud800"], 2)):
        assert refusal(batch_rids, rid, n).field == "rid"


def test_copies_are_counted_from_the_second_item_on() -> None:
    """Beside its characters every value costs 8 bytes: the map, its key, its text, and the wire fields that are empty."""
    body = {"text": ["p"] * 3, "sampling_params": {"ebnf": "a" * 1000}}
    cost = 2 * (1000 + len("ebnf") + 4 * 8)
    GenerateBody.from_json(body, max_broadcast_bytes=cost)
    refusal(GenerateBody.from_json, body, max_broadcast_bytes=cost - 1)


def test_a_body_nested_too_deeply_says_so() -> None:
    for body in ("[" * 100_000, '{"a":' * 100_000, '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"):
        assert "nested too deeply" in str(refusal(GenerateBody.from_json, body))
