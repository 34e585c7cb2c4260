"""Sampling parameters: every rule with both sides of its boundary, defaults, idempotence, and the array on the wire."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from headrace.codec import NormalizedSamplingParams, SamplingParams, ValidationError, strategies_ingress
from headrace.codec.checks import RequestLimits
from headrace.codec.limits import default
from hypothesis import given
from ingress_helpers import V1, V2, normalize, refusal

NAN, INF = float("nan"), float("inf")


def body(text: str) -> NormalizedSamplingParams:
    return SamplingParams.from_json(text).normalize(vocab_size=100)


# ---- B12 -------------------------------------------------------------------------------------------------------------

NUMBERS = ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 10**400], ids=["nan", "inf", "-inf", "huge"])
def test_b12_nan_and_infinities_are_refused_for_every_number(key: str, value: float) -> None:
    error = refusal(normalize, **{key: value})
    assert error.field == key
    assert key in str(error)


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("word", ["1e400", "NaN", "Infinity", "-Infinity"])
def test_b12_json_that_python_would_read_as_infinite_or_nan_is_refused(key: str, word: str) -> None:
    assert "JSON" in str(refusal(body, f'{{"{key}": {word}}}'))


def test_b12_nan_in_logit_bias_and_custom_params_is_refused() -> None:
    assert "logit_bias[7]" in str(refusal(normalize, logit_bias={"7": NAN}))
    refusal(normalize, custom_params={"x": NAN})
    refusal(normalize, custom_params={"x": [INF]})
    refusal(normalize, custom_params={"x": {"y": -INF}})


# ---- B14 -------------------------------------------------------------------------------------------------------------


def test_b14_absent_null_and_zero_are_three_values_of_max_new_tokens() -> None:
    assert body("{}").max_new_tokens == 128
    assert body('{"max_new_tokens": null}').max_new_tokens is None
    assert body('{"max_new_tokens": 0}').max_new_tokens == 0


def test_b14_negative_and_less_than_the_minimum_are_refused() -> None:
    assert refusal(normalize, max_new_tokens=-1).field == "max_new_tokens"
    error = refusal(normalize, max_new_tokens=4, min_new_tokens=5)
    assert "4" in str(error)
    assert "5" in str(error)
    assert normalize(max_new_tokens=5, min_new_tokens=5).min_new_tokens == 5


def test_b14_no_cap_goes_with_any_minimum() -> None:
    assert body('{"max_new_tokens": null, "min_new_tokens": 4096}').min_new_tokens == 4096


def test_null_means_the_default_for_every_other_field() -> None:
    nulls = {name: None for name in SamplingParams.__slots__ if name != "max_new_tokens"}
    assert SamplingParams.from_json(nulls).normalize(vocab_size=100) == normalize()


def test_the_defaults_are_those_of_the_specification() -> None:
    assert msgspec.structs.asdict(normalize()) == {
        "max_new_tokens": 128, "stop_token_ids": None, "temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "n": 1,
        "beam_width": None, "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "ignore_eos": False,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False, "stream_interval": None,
        "logit_bias": None, "sampling_seed": None, "custom_params": None, "stop_strs": (), "stop_regex_strs": (),
        "stop_str_max_len": 0, "stop_regex_max_len": 0,
    }  # fmt: skip


# ---- B15 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0, -1])
def test_b15_seeds_within_64_signed_bits_pass(seed: int) -> None:
    assert normalize(sampling_seed=seed).sampling_seed == seed


@pytest.mark.parametrize(
    "seed",
    [2**63, -(2**63) - 1, 2**64, 10**20, 10**5000, "100", True, 1.0],
    ids=lambda v: ascii(v) if not isinstance(v, int) or v < 2**70 else "huge",
)
def test_b15_seeds_beyond_and_of_another_type_are_refused(seed: Any) -> None:
    assert refusal(normalize, sampling_seed=seed).field == "sampling_seed"


def test_b15_a_float_and_a_number_beyond_32_bits_are_no_max_new_tokens() -> None:
    refusal(normalize, max_new_tokens=1e18)
    refusal(normalize, max_new_tokens=2**31)
    assert normalize(max_new_tokens=2**31 - 1).max_new_tokens == 2**31 - 1


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63)])
def test_b15_custom_integers_within_msgpack_pass_and_encode(value: int) -> None:
    normal = normalize(custom_params={"x": value, "y": [value], "z": {"w": value}})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(normal.custom_params))["x"] == value


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_b15_custom_integers_beyond_msgpack_are_refused(value: int) -> None:
    for custom in ({"x": value}, {"x": [value]}, {"x": {"y": value}}):
        assert refusal(normalize, custom_params=custom).field == "custom_params"


@pytest.mark.parametrize(
    "key",
    ["max_new_tokens", "min_new_tokens", "top_k", "n", "beam_width", "stream_interval", "sampling_seed", *NUMBERS],
)
@pytest.mark.parametrize("value", [True, False, "1", [1], {}, b"1"], ids=ascii)
def test_bools_strings_and_containers_are_not_numbers(key: str, value: Any) -> None:
    error = refusal(normalize, **{key: value})
    assert error.field == key
    assert key in str(error)


@pytest.mark.parametrize("key", ["ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"])
@pytest.mark.parametrize("value", [0, 1, "true", [], 1.0], ids=ascii)
def test_flags_are_true_or_false_and_nothing_like_it(key: str, value: Any) -> None:
    assert refusal(normalize, **{key: value}).field == key


# ---- ranges ----------------------------------------------------------------------------------------------------------

RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 0.0, -0.0, 1e-6, 2, 1e308], [-5e-324, -1e-7, -1]),
    ("top_p", [5e-324, 1, 1.0], [0, -0.1, 1.0000000000000002]),
    ("min_p", [0, 1.0], [-5e-324, 1.0000000000000002]),
    ("top_k", [-1, 1, 2**30, 2**31 - 1], [0, -2, 2**31]),
    ("frequency_penalty", [-2, 2.0], [-2.0000000000000004, 2.0000000000000004]),
    ("presence_penalty", [-2, 2.0], [-2.0000000000000004, 2.0000000000000004]),
    ("repetition_penalty", [5e-324, 2], [0, -1, 2.0000000000000004]),
    ("min_new_tokens", [0, 128], [-1, 129]),
    ("n", [1], [0, -1, 2]),
    ("beam_width", [None, 1], [0, 2, -1]),
    ("stream_interval", [None, 1], [0, -1, 2**31]),
    ("stop_token_ids", [[0], [99], (1,), []], [[-1], [100], [True], [1.0], ["1"], [2**32 + 5], 5, "5", {"a": 1}, [None]]),
    ("logit_bias", [{"0": 1, "99": -1.5}, {}, {"007": 1}, {"1": 3.4028234e38}], [{"100": 1}, {"-1": 1}, {"a": 1}, {"": 1}, {"٣": 1}, {"²": 1}, {"1": "1"}, {"1": True}, {"1": 3.5e38}, {5: 1.0}, [], {"9" * 5000: 1}, {" 1": 1}]),
    ("stop", ["x", ["x"], [], None, "\x00", "a" * 1024, ("x",)], ["", ["", "x"], ["x"] * 33, [5], 5, "a" * 1025, "字" * 342, {"a": 1}, [["x"]], b"x", ["\ud800"]]),
    ("json_schema", ["", "{}"], [{}, 5, "\ud800", True]),
    ("regex", ["a+", "("], [["a"]]),
    ("custom_params", [{}, {"a": None}, {"a": "x"}, {"a": [1, None]}, {"a": {"b": 1.5}}], [[], 5, {"a": [[1]]}, {"a": {"b": [1]}}, {"a": b"x"}, {1: 2}, {"a": {1: 2}}, {"\ud800": 1}, {"a": "\ud800"}, {"a": {"\ud800": 1}}]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "good", "bad"), RANGES, ids=[key for key, *_ in RANGES])
def test_both_sides_of_every_boundary(key: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        normalize(**{key: value})
    for value in bad:
        error = refusal(normalize, **{key: value})
        assert error.field == key, value
        assert key in str(error)


def test_a_refusal_names_the_value_cut_and_escaped() -> None:
    assert "1.5" in str(refusal(normalize, top_p=1.5))
    assert "\\u5b57" in str(refusal(normalize, temperature="字"))
    assert len(str(refusal(normalize, temperature="x" * 10**6))) < 300


@pytest.mark.parametrize(("key", "limit"), [("stop_token_ids", "max_stop_token_ids"), ("logit_bias", "max_logit_bias")])
def test_lists_end_at_their_limit(key: str, limit: str) -> None:
    n = default(limit)
    make: Any = (lambda k: list(range(k))) if key == "stop_token_ids" else (lambda k: {str(i): 1.0 for i in range(k)})
    normalize(vocab_size=10**6, **{key: make(n)})
    assert str(n) in str(refusal(normalize, vocab_size=10**6, **{key: make(n + 1)}))


def test_grammars_and_custom_params_end_at_their_limit_in_bytes() -> None:
    size = default("max_grammar_bytes")
    normalize(ebnf="a" * size)
    refusal(normalize, ebnf="a" * (size + 1))
    refusal(normalize, ebnf="字" * (size // 3 + 1))
    room = default("max_custom_params_bytes") - len(msgspec.msgpack.encode({"k": "x" * 60000})) + 60000
    normalize(custom_params={"k": "x" * room})
    refusal(normalize, custom_params={"k": "x" * (room + 1)})


def test_at_most_one_grammar_and_an_empty_one_counts_as_absent() -> None:
    assert normalize(json_schema="{}", regex="", ebnf=None).json_schema == "{}"
    assert normalize(json_schema="").json_schema is None
    error = refusal(normalize, json_schema="{}", regex="a")
    assert "json_schema and regex" in str(error)
    refusal(normalize, ebnf="a", structural_tag="b")


def test_the_greedy_rewrite_and_the_top_k_sentinel_come_before_the_range_checks() -> None:
    for temperature in (0, 0.0, 9.9e-7):
        greedy = normalize(temperature=temperature, top_k=0)
        assert (greedy.temperature, greedy.top_k) == (1.0, 1)
    assert normalize(temperature=1e-6).top_k == 1 << 30
    assert normalize(top_k=-1).top_k == 1 << 30
    refusal(normalize, top_k=0)


# ---- B17 -------------------------------------------------------------------------------------------------------------


def test_b17_empty_stop_strings_are_refused_and_an_empty_list_means_no_stops() -> None:
    assert refusal(normalize, stop="").field == "stop"
    assert refusal(normalize, stop=["", "x"]).field == "stop"
    assert normalize(stop=[]).stop_strs == normalize(stop=None).stop_strs == ()


def test_b17_33_stop_strings_are_refused_and_32_admitted() -> None:
    assert "at most 32" in str(refusal(normalize, stop=["x"] * 33))
    assert len(normalize(stop=["x"] * 32).stop_strs) == 32


def test_the_stop_window_is_the_longest_in_utf8_bytes() -> None:
    assert normalize(stop=["a", "字", "bb"]).stop_str_max_len == 3


# ---- B19 -------------------------------------------------------------------------------------------------------------


def test_b19_an_absent_stop_is_an_empty_list() -> None:
    assert normalize().stop_strs == ()
    assert normalize().to_wire(V2)[V2.sampling_slots.index("stop_strs")] == ()


@pytest.mark.parametrize(
    "key",
    [
        "is_normalized",
        "stop_strs",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_regex_max_len",
        "watermark",
        "ebnf_full_assistant",
    ],
)
def test_b19_internal_fields_cannot_be_set_by_a_client(key: str) -> None:
    error = refusal(body, json.dumps({key: True, "temperature": 0}))
    assert key in str(error)
    assert "internal" in str(error)
    refusal(SamplingParams, **{key: True})


def test_b19_an_unknown_key_is_named_with_the_known_ones() -> None:
    for error in (refusal(body, '{"temprature": 1}'), refusal(SamplingParams, temprature=1)):
        assert "'temprature'" in str(error)
        assert "temperature" in str(error)
        assert error.field == "temprature"
    refusal(SamplingParams.from_json, {5: 1})
    refusal(SamplingParams.from_json, {"\ud800": 1})


@given(strategies_ingress.sampling_params())
def test_b19_normalising_twice_is_normalising_once(params: SamplingParams) -> None:
    once = params.normalize(vocab_size=100)
    assert once.normalize() is once
    assert once.normalize(vocab_size=1, skip_tokenizer_init=True) is once
    again = {name: value for name, value in msgspec.structs.asdict(once).items() if name in SamplingParams.__slots__}
    again |= {"stop": list(once.stop_strs), "stop_regex": list(once.stop_regex_strs)}
    assert SamplingParams(**again).normalize(vocab_size=100) == once


def test_b19_the_two_types_are_different_and_the_normalised_one_is_frozen() -> None:
    assert not isinstance(normalize(), SamplingParams)
    assert not issubclass(NormalizedSamplingParams, SamplingParams)
    with pytest.raises(AttributeError):
        normalize().temperature = 0


def test_a_normalised_form_shares_no_container_with_its_client() -> None:
    stop, bias, custom = ["a"], {"1": 1.0}, {"k": [1], "o": {"p": 1}}
    normal = normalize(stop=stop, logit_bias=bias, custom_params=custom)
    stop.append("")
    bias["9999"] = NAN
    custom["k"].append(NAN)  # type: ignore[attr-defined]
    custom["o"]["p"] = NAN  # type: ignore[index]
    assert (normal.stop_strs, normal.logit_bias, normal.custom_params) == (
        ("a",),
        {"1": 1.0},
        {"k": [1], "o": {"p": 1}},
    )


# ---- B21 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 0, -1, 10**30])
def test_b21_n_other_than_one_is_refused_before_dispatch(n: int) -> None:
    assert refusal(normalize, n=n).field == "n"


# ---- without a tokenizer, and on the wire ----------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"stop": "x"}, {"stop_regex": "x"}, {"min_new_tokens": 1}], ids=str)
def test_without_a_tokenizer_what_needs_text_is_refused(fields: dict[str, Any]) -> None:
    [key] = fields
    assert refusal(normalize, skip_tokenizer_init=True, **fields).field == key
    normalize(skip_tokenizer_init=True, stop=[], stop_regex=None, min_new_tokens=0, stop_token_ids=[5])


def test_to_wire_has_every_slot_of_the_schema_in_its_order() -> None:
    normal = normalize(stop="ab", stop_regex="c+", max_new_tokens=7, temperature=0.5, top_k=3, stream_interval=9)
    for schema, arity in ((V1, 31), (V2, 33)):
        slots = dict(zip(schema.sampling_slots, normal.to_wire(schema), strict=True))
        assert len(slots) == arity
        assert {key: slots[key] for key in ("stop", "stop_regex", "is_normalized", "stop_strs", "stop_regex_max_len")} == {
            "stop": None, "stop_regex": None, "is_normalized": True, "stop_strs": ("ab",), "stop_regex_max_len": 1 << 30
        }  # fmt: skip
        for name in NormalizedSamplingParams.__struct_fields__:
            assert slots[name] == getattr(normal, name)


@given(strategies_ingress.sampling_params())
def test_whatever_is_admitted_can_be_encoded_for_both_revisions(params: SamplingParams) -> None:
    normal = params.normalize(vocab_size=100)
    for schema in (V1, V2):
        slots = msgspec.msgpack.decode(msgspec.msgpack.encode(normal.to_wire(schema)))
        assert len(slots) == len(schema.sampling_slots)
        assert all(type(x) is float for x in slots[4:6])


@given(strategies_ingress.wild_sampling_fields())
def test_no_value_escapes_acceptance_or_validation_error(fields: dict[str, Any]) -> None:
    try:
        normal = SamplingParams.from_json(fields).normalize(vocab_size=100)
    except ValidationError as error:
        str(error).encode("utf-8")
        json.dumps(error.to_dict(), allow_nan=False).encode("utf-8")
    else:
        msgspec.msgpack.encode(normal.to_wire(V2))


def test_equality_repr_and_round_trip_of_the_clients_type() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"])
    assert params == SamplingParams.from_json(json.dumps(params.to_dict()))
    assert params != SamplingParams()
    assert repr(params) == "SamplingParams(stop=['x'], temperature=0.5)"
    assert repr(SamplingParams()) == "SamplingParams()"


@pytest.mark.parametrize(
    ("limit", "small", "fields"),
    [
        ("max_stop_strings", 2, {"stop": ["a"] * 3}),
        ("max_stop_bytes", 2, {"stop": "abc"}),
        ("max_stop_regexes", 2, {"stop_regex": ["a"] * 3}),
        ("max_stop_regex_bytes", 2, {"stop_regex": "abc"}),
        ("max_stop_token_ids", 2, {"stop_token_ids": [1, 2, 3]}),
        ("max_logit_bias", 2, {"logit_bias": {"1": 1, "2": 2, "3": 3}}),
        ("max_grammar_bytes", 2, {"regex": "abc"}),
        ("max_custom_params_bytes", 4, {"custom_params": {"a": 1, "b": 2}}),
    ],
)
def test_every_size_is_configurable(limit: str, small: int, fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    params.normalize(vocab_size=100)
    assert str(small) in str(refusal(params.normalize, vocab_size=100, limits=RequestLimits(**{limit: small})))


def test_larger_limits_admit_more() -> None:
    wide = RequestLimits(max_stop_regex_bytes=1000, max_stop_strings=40)
    params = SamplingParams(stop_regex="a" * 300, stop=["x"] * 33)
    assert params.normalize(vocab_size=100, limits=wide).stop_regex_max_len == 300


def test_float32_ends_where_rounding_gives_infinity() -> None:
    end = 3.4028235677973366e38
    refusal(normalize, logit_bias={"1": end})
    refusal(normalize, logit_bias={"1": -end})
    normalize(logit_bias={"1": math.nextafter(end, 0)})


def test_logit_bias_keys_have_at_most_twenty_digits() -> None:
    normalize(logit_bias={"1".zfill(20): 1})
    refusal(normalize, logit_bias={"1".zfill(21): 1})


@pytest.mark.parametrize("source", ["[]", "5", b"null", '"x"', "{"], ids=ascii)
def test_parameters_are_an_object(source: Any) -> None:
    refusal(SamplingParams.from_json, source)
