"""Admission of one request: prompt, ids, flags, wire fields, and how a prompt fits the context."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from headrace.codec import (
    AdmissionRules,
    Fit,
    GenerateRequest,
    NormalizedRequest,
    Rid,
    SamplingParams,
    ValidationError,
    admit,
    encode_generate,
    fit_length,
    strategies_ingress,
)
from headrace.codec.admission import _wire_value
from headrace.codec.checks import RequestLimits
from headrace.codec.schema import IngressField
from hypothesis import given
from hypothesis import strategies as st
from ingress_helpers import RULES, V1, V2, admit_body, refusal


def request(**fields: Any) -> NormalizedRequest:
    rules = fields.pop("rules", RULES)
    schema = fields.pop("schema", V2)
    return admit(GenerateRequest(**({"input_ids": [1]} | fields)), rules, schema)


def text_request(**fields: Any) -> NormalizedRequest:
    return request(input_ids=None, **({"text": "a"} | fields))


# ---- prompts and ids -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"text": "a"}, {"text": None, "input_ids": None}], ids=["both", "neither"])
def test_exactly_one_of_text_and_ids(fields: dict[str, Any]) -> None:
    assert "exactly one" in str(refusal(request, **fields))


def test_b03_an_empty_list_of_ids_is_refused_at_once() -> None:
    assert refusal(request, input_ids=[]).field == "input_ids"
    assert refusal(request, input_ids=np.zeros(0, np.int64)).field == "input_ids"


def test_b03_empty_text_is_judged_by_its_tokens_after_tokenising() -> None:
    empty = text_request(text="")
    assert "empty" in str(refusal(fit_length, 0, empty, RULES))
    assert fit_length(1, empty, RULES) == Fit(1, 128)


V32K = AdmissionRules(context_len=4096, vocab_size=32000)


@pytest.mark.parametrize(
    "bad", [-1, 32000, 200000, 2**32 + 5, 2**63, 2**64 + 5, -(2**63), 10**30, True, 1.0, "1", None, [1]], ids=ascii
)
def test_b04_ids_outside_the_vocabulary_are_refused_wherever_they_stand(bad: Any) -> None:
    for ids in ([bad], [0, bad], [0] * 1000 + [bad, 1]):
        error = refusal(request, input_ids=ids, rules=V32K)
        assert error.field == "input_ids"
        assert f"[{len(ids) - 1 if len(ids) < 3 else 1000}]" in str(error)


@pytest.mark.parametrize("good", [0, 31999])
def test_b04_ids_at_both_ends_of_the_vocabulary_are_accepted(good: int) -> None:
    admitted = request(input_ids=[good], rules=V32K).input_ids
    assert admitted is not None
    assert admitted.dtype == np.int64
    assert admitted.tolist() == [good]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16, np.uint64])
def test_b04_arrays_of_any_integer_type_are_judged_before_they_are_converted(dtype: Any) -> None:
    assert request(input_ids=np.array([0, 99], dtype)).input_ids.tolist() == [0, 99]  # type: ignore[union-attr]
    refusal(request, input_ids=np.array([0, 100], dtype))
    refusal(request, input_ids=np.array([2**64 - 1], np.uint64))
    refusal(request, input_ids=np.array([-1], np.int32))


@pytest.mark.parametrize(
    "value", ["1 2", b"12", {"a": 1}, 5, np.array([1.0]), np.array([[1]]), np.array([True]), {1, 2}], ids=repr
)
def test_what_is_no_row_of_integers_is_refused(value: Any) -> None:
    assert refusal(request, input_ids=value).field == "input_ids"


def test_numpy_integers_in_a_list_are_ids() -> None:
    assert request(input_ids=[np.int64(5), 6]).input_ids.tolist() == [5, 6]  # type: ignore[union-attr]
    refusal(request, input_ids=[np.int64(100)])


def test_an_admitted_prompt_is_its_own_copy() -> None:
    for ids in ([1, 2], np.array([1, 2], np.int64)):
        admitted = request(input_ids=ids).input_ids
        ids[0] = -1
        assert admitted is not None
        assert admitted.tolist() == [1, 2]


@pytest.mark.parametrize("return_logprob", [True, False])
@pytest.mark.parametrize("value", [[[0]], [-1], [100], [True], 5, "5", [2**32], {"a": 1}], ids=ascii)
def test_b05_token_ids_logprob_of_a_wrong_shape_or_range_is_refused(value: Any, return_logprob: bool) -> None:
    error = refusal(request, token_ids_logprob=value, return_logprob=return_logprob)
    assert error.field == "token_ids_logprob"
    assert "token_ids_logprob" in str(error)


@pytest.mark.parametrize("return_logprob", [True, False])
def test_b05_ids_of_the_vocabulary_are_accepted_and_an_empty_list_is_absent(return_logprob: bool) -> None:
    assert request(token_ids_logprob=[99], return_logprob=return_logprob).token_ids_logprob == (99,)
    assert request(token_ids_logprob=[], return_logprob=return_logprob).token_ids_logprob is None


def test_limits_on_logprobs() -> None:
    wide = AdmissionRules(context_len=4096, vocab_size=5000)
    assert request(rules=wide, token_ids_logprob=list(range(1024)), top_logprobs_num=1024).top_logprobs_num == 1024
    refusal(request, rules=wide, token_ids_logprob=list(range(1025)))
    refusal(request, rules=wide, top_logprobs_num=1025)
    assert request(top_logprobs_num=100).top_logprobs_num == 100  # the vocabulary's size where that is smaller
    refusal(request, top_logprobs_num=101)
    refusal(request, top_logprobs_num=-1)


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", 5, b"a", ["a"], True], ids=ascii)
def test_text_must_be_an_encodable_string(text: Any) -> None:
    assert refusal(text_request, text=text).field == "text"


def test_nul_is_an_ordinary_character_everywhere() -> None:
    admitted = text_request(
        text="a\x00b", rid="r\x00", sampling_params=SamplingParams(stop="\x00", custom_params={"\x00": "\x00"})
    )
    assert (admitted.text, admitted.rid.client_facing, admitted.sampling.stop_strs) == ("a\x00b", "r\x00", ("\x00",))


def test_text_beyond_the_bound_is_refused_before_it_is_tokenised_and_counted_in_bytes() -> None:
    rules = msgspec.structs.replace(RULES, max_prompt_bytes=6)
    text_request(text="字字", rules=rules)
    for text in ("字字a", "a" * 7, "." * 5_000_000):
        assert refusal(text_request, text=text, rules=rules).field == "text"


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    rules = msgspec.structs.replace(RULES, skip_tokenizer_init=True)
    assert "skip_tokenizer_init" in str(refusal(text_request, rules=rules))
    request(rules=rules)
    for params in (SamplingParams(stop="x"), SamplingParams(stop_regex="x"), SamplingParams(min_new_tokens=1)):
        refusal(request, rules=rules, sampling_params=params)


# ---- flags, rid, sampling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["stream", "return_logprob", "return_text_in_logprobs", "return_hidden_states", "add_special_tokens"]
)
def test_flags_are_bools_and_null_is_the_default(key: str) -> None:
    assert getattr(request(**{key: None}), key) is (key == "add_special_tokens")
    for value in (0, 1, "true", [True]):
        assert refusal(request, **{key: value}).field == key


def test_hidden_states_need_the_servers_flag_and_the_message_names_it() -> None:
    rules = msgspec.structs.replace(RULES, enable_return_hidden_states=False)
    assert "enable_return_hidden_states" in str(refusal(request, rules=rules, return_hidden_states=True))
    assert request(return_hidden_states=True).return_hidden_states is True


@pytest.mark.parametrize("value", [-2, 2**63, True, 1.0, "1"], ids=ascii)
def test_logprob_start_len_is_an_int_from_minus_one(value: Any) -> None:
    assert refusal(request, logprob_start_len=value).field == "logprob_start_len"


def test_logprob_start_len_ends_at_the_input_length() -> None:
    assert fit_length(3, request(logprob_start_len=3), RULES)
    assert refusal(fit_length, 3, request(logprob_start_len=4), RULES).field == "logprob_start_len"


def test_rids_are_minted_made_unique_or_taken_as_they_are() -> None:
    assert len(request().rid) == 32
    assert request(rid="mine").rid.client_facing == "mine"
    probe = Rid.health_check()
    assert request(rid=probe).rid is probe
    for rid in ("a" * 129, "", "HEALTH_CHECK_1", ["a"], 5, "\ud800"):
        assert refusal(request, rid=rid).field == "rid"


def test_sampling_parameters_may_be_an_object_the_clients_type_or_normalised() -> None:
    normal = SamplingParams(temperature=0).normalize(vocab_size=100)
    for params in ({"temperature": 0}, SamplingParams(temperature=0), normal):
        assert request(sampling_params=params).sampling == normal
    wrong: tuple[Any, ...] = (5, "x", [], True)
    for bad in wrong:
        assert refusal(request, sampling_params=bad).field == "sampling_params"
    refusal(request, sampling_params={"is_normalized": True})


def test_b19_nothing_but_an_admitted_request_can_be_encoded() -> None:
    for forged in (GenerateRequest(input_ids=[1]), {"input_ids": [1]}, None, SamplingParams()):
        with pytest.raises(TypeError):
            encode_generate(V2, forged, [1])  # type: ignore[arg-type]
    refusal(admit, {"input_ids": [1]}, RULES, V2)


def test_nbytes_counts_what_a_client_can_make_large() -> None:
    small = request().nbytes
    assert request(input_ids=[1] * 1001).nbytes == small + 8000
    assert text_request(text="字" * 1000).nbytes >= 3000
    for params in (
        SamplingParams(ebnf="a" * 5000),
        SamplingParams(custom_params={"k": "a" * 5000}),
        SamplingParams(stop=["a" * 1000] * 5),
    ):
        assert request(sampling_params=params).nbytes >= small + 5000
    assert request(wire_fields={"lora_id": "a" * 5000}).nbytes >= small + 5000


# ---- wire fields -----------------------------------------------------------------------------------------------------


def test_wire_fields_of_the_schema_are_checked_by_type_and_null_is_the_default() -> None:
    fields = {
        "priority": 3,
        "lora_id": "x",
        "session_params": {"id": "s", "offset": 1},
        "routed_dp_rank": 0,
        "no_logs": True,
    }
    assert request(wire_fields=fields).wire_fields == fields
    assert request(wire_fields={"priority": None, "no_logs": None}).wire_fields == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", "3"), ("priority", True), ("priority", 1.0), ("priority", 2**64), ("lora_id", 5), ("lora_id", "\ud800"), ("no_logs", 1), ("bootstrap_room", [1]), ("session_params", object()), ("session_params", {"a": "\ud800"}), ("session_params", {"a": 2**64}), ("session_params", "a" * 70_000), ("extra_key", "a" * 70_000)],
    ids=lambda v: ascii(v)[:20],
)  # fmt: skip
def test_wire_fields_of_another_type_are_refused(name: str, value: Any) -> None:
    error = refusal(request, wire_fields={name: value})
    assert error.field == name
    assert name in str(error)


@pytest.mark.parametrize(
    "name", ["rid", "tag", "sampling_params", "reserved_39", "input_ids", "nope", "\ud800", 5], ids=ascii
)
def test_fields_that_headrace_owns_or_does_not_know_cannot_be_set(name: Any) -> None:
    assert "priority" in str(refusal(request, wire_fields={name: 1}))


def test_wire_fields_belong_to_a_revision() -> None:
    assert "v1" in str(refusal(request, schema=V1, wire_fields={"priority": 1}))
    refusal(request, wire_fields=[1])


# ---- length ----------------------------------------------------------------------------------------------------------

CTX8 = AdmissionRules(context_len=8, vocab_size=100)


def fit(n: int, rules: AdmissionRules = CTX8, **params: Any) -> Fit:
    return fit_length(n, request(sampling_params=SamplingParams(**params)), rules)


@pytest.mark.parametrize(("n", "asked"), [(7, 1), (5, 3), (1, 7), (7, 0)])
def test_b08_exactly_filling_the_window_is_admitted_and_every_token_may_be_produced(n: int, asked: int) -> None:
    assert fit(n, max_new_tokens=asked) == Fit(n, asked)


@pytest.mark.parametrize(("n", "asked"), [(8, 1), (7, 2), (8, 0), (9, None), (8, None)])
def test_b08_one_token_more_is_refused(n: int, asked: int | None) -> None:
    refusal(fit, n, max_new_tokens=asked)


def test_b08_the_message_names_both_halves() -> None:
    text = str(refusal(fit, 7, max_new_tokens=2))
    assert all(word in text for word in ("7 tokens", "max_new_tokens is 2", "8"))
    assert "9 tokens" in str(refusal(fit, 9, max_new_tokens=0))


def test_b15_the_sum_is_bounded_and_does_not_overflow() -> None:
    refusal(fit, 3, rules=RULES, max_new_tokens=2**31 - 1)


def test_reserved_tokens_count_as_input() -> None:
    rules = msgspec.structs.replace(CTX8, num_reserved_tokens=2)
    assert fit(5, rules, max_new_tokens=1) == Fit(5, 1)
    assert "2 are reserved" in str(refusal(fit, 6, rules, max_new_tokens=0))
    refusal(fit, 5, rules, max_new_tokens=2)


def test_no_cap_does_not_switch_off_the_input_check() -> None:
    assert fit(7, max_new_tokens=None) == Fit(7, None)
    refusal(fit, 8, max_new_tokens=None)


AUTO = msgspec.structs.replace(CTX8, allow_auto_truncate=True)


def test_b09_a_truncated_prompt_keeps_its_head_and_leaves_room_for_what_was_asked() -> None:
    assert fit(12, AUTO, max_new_tokens=3) == Fit(5, 3)
    assert fit(8, AUTO, max_new_tokens=3) == Fit(5, 3)


@pytest.mark.parametrize(
    ("n", "asked", "kept", "budget"),
    [(12, 7, 1, 7), (12, 8, 1, 7), (12, 1000, 1, 7), (12, None, 7, None), (12, 0, 7, 0), (12, 1, 7, 1), (7, 3, 7, 1), (5, 4, 5, 3), (5, 3, 5, 3), (1, 100, 1, 7), (7, None, 7, None)],
)  # fmt: skip
def test_b09_truncation_leaves_one_token_of_each_half_and_never_makes_the_budget_zero(
    n: int, asked: int | None, kept: int, budget: int | None
) -> None:
    assert fit(n, AUTO, max_new_tokens=asked) == Fit(kept, budget)


def test_a_lowered_budget_below_the_minimum_is_refused() -> None:
    assert fit(5, AUTO, max_new_tokens=4, min_new_tokens=3) == Fit(5, 3)
    assert refusal(fit, 6, AUTO, max_new_tokens=4, min_new_tokens=3).field == "min_new_tokens"
    assert refusal(fit, 12, AUTO, max_new_tokens=9, min_new_tokens=8).field == "min_new_tokens"


def test_a_truncated_prompt_without_a_cap_leaves_room_for_its_minimum() -> None:
    assert fit(12, AUTO, max_new_tokens=None, min_new_tokens=3) == Fit(5, None)


def test_a_window_too_small_for_one_token_of_each_is_refused_also_when_truncating() -> None:
    refusal(fit, 1, msgspec.structs.replace(AUTO, context_len=1), max_new_tokens=1)


@given(
    st.integers(0, 40),
    st.one_of(st.none(), st.integers(0, 40)),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(0, 3),
    st.booleans(),
)
def test_whatever_fits_fits_and_nothing_is_clipped_without_the_flag(
    n: int, asked: int | None, least: int, context: int, reserved: int, auto: bool
) -> None:
    if asked is not None and least > asked:
        least = asked
    rules = AdmissionRules(context_len=context, vocab_size=100, num_reserved_tokens=reserved, allow_auto_truncate=auto)
    try:
        kept, budget = fit(n, rules, max_new_tokens=asked, min_new_tokens=least)
    except ValidationError:
        assert (
            auto is False
            or n == 0
            or context - reserved < 2
            or least > context - reserved - min(n, 1)
            or n < context - reserved
        )
        return
    assert 1 <= kept <= n
    assert kept + reserved < context
    assert budget is None if asked is None else budget is not None and least <= budget <= asked
    assert kept + reserved + (budget or 0) <= context
    assert auto or (kept, budget) == (n, asked)
    if asked:
        assert budget
    if budget != asked and asked is not None:
        assert kept + reserved + (budget or 0) == context


def test_b10_a_refused_item_refuses_the_batch_before_anything_is_made() -> None:
    """The pure part: a list of admitted requests exists only if every item was admitted."""
    bodies = [{"input_ids": [[1], [100]]}, {"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}]
    for body in bodies:
        for _ in range(100):
            refusal(admit_body, body)
    assert len(admit_body({"input_ids": [[1], [2]]})) == 2


@given(strategies_ingress.generate_requests())
def test_valid_requests_are_admitted_and_encode_for_both_revisions(made: GenerateRequest) -> None:
    for schema in (V1, V2):
        admitted = admit(made, strategies_ingress.admission_rules(), schema)
        message = encode_generate(schema, admitted, [1] if admitted.input_ids is None else admitted.input_ids)
        assert len(msgspec.msgpack.decode(message.header)) == len(schema.ingress_fields)
        assert admitted.nbytes > 0


def test_the_sizes_of_rid_and_logprobs_are_configurable() -> None:
    small = msgspec.structs.replace(
        RULES, limits=RequestLimits(max_rid_bytes=3, max_token_ids_logprob=1, max_top_logprobs=2)
    )
    request(rules=small, rid="abc", token_ids_logprob=[1], top_logprobs_num=2)
    for fields in ({"rid": "abcd"}, {"token_ids_logprob": [1, 2]}, {"top_logprobs_num": 3}):
        refusal(request, rules=small, **fields)


def test_a_refusal_carries_the_clients_own_rid_and_nobody_elses() -> None:
    error = refusal(request, rid="mine", input_ids=[-1])
    assert error.rid == "mine"
    assert error.to_dict() == {"error": {"code": "validation", "message": str(error), "status": 400, "rid": "mine"}}
    assert refusal(request, input_ids=[-1]).rid is None
    assert refusal(request, rid="\ud800").rid is None
    assert refusal(fit_length, 5000, request(rid="mine"), RULES).rid == "mine"


def test_a_wire_field_may_be_as_large_as_custom_params_and_no_larger() -> None:
    tight = msgspec.structs.replace(RULES, limits=RequestLimits(max_custom_params_bytes=5))
    request(rules=tight, wire_fields={"lora_id": "abcd"})
    assert "5" in str(refusal(request, rules=tight, wire_fields={"lora_id": "abcde"}))


def test_the_smallest_window_holds_one_token_of_each_half() -> None:
    assert fit(5, msgspec.structs.replace(AUTO, context_len=2), max_new_tokens=9) == Fit(1, 1)


def test_the_first_bad_id_of_an_array_is_named() -> None:
    assert "input_ids[2] is 100" in str(refusal(request, input_ids=np.array([0, 99, 100, -1])))
    assert "input_ids[2] is -1" in str(refusal(request, input_ids=np.array([0, 99, -1, 100])))


def test_a_list_of_integers_is_a_type_that_a_schema_may_use() -> None:
    field = IngressField("x", 50, None, "ints?", False)
    assert _wire_value(field, (1, 2), 100) == [1, 2]
    for value in (5, "12", [1.0], [2**63], [True]):
        assert "x" in str(refusal(_wire_value, field, value, 100))
