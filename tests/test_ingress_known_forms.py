"""What admission remembers, and what is put together from pieces, is never another thing than what is worked out anew."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from headrace.codec import (
    GenerateRequest,
    NormalizedSamplingParams,
    Rid,
    SamplingParams,
    ValidationError,
    admit,
    encode_generate,
    sampling,
    strategies_ingress,
)
from headrace.codec.checks import DEFAULT_LIMITS
from headrace.codec.rid import _drawn
from headrace.codec.sampling import Normaliser
from hypothesis import given
from hypothesis import strategies as st
from ingress_helpers import RULES, V1, V2
from msgspec.structs import replace

VOCAB = 100
BOTH = pytest.mark.parametrize("schema", [V1, V2], ids=["v1", "v2"])
WARM = Normaliser(
    VOCAB, False, DEFAULT_LIMITS, V2
)  # shared by all examples: what one leaves behind must not show in another


def normaliser() -> Normaliser:
    return Normaliser(VOCAB, False, DEFAULT_LIMITS, V2)


def outcome(call: Any, *args: Any, **options: Any) -> Any:
    """What came out, to the last bit: a normal form on the wire, or the words of its refusal."""
    try:
        found = call(*args, **options)
    except ValidationError as error:
        return error.message
    found = getattr(found, "sampling", found)
    assert type(found) is NormalizedSamplingParams
    return msgspec.msgpack.encode(found.to_wire(V2)), found.stop_strs, found.stop_regex_strs


def anew(fields: Any) -> Any:
    return outcome(lambda: SamplingParams.from_json(fields).normalize(vocab_size=VOCAB))


# -- normal forms -------------------------------------------------------------------------------------------------------------


@given(st.one_of(strategies_ingress.sampling_fields(VOCAB), strategies_ingress.wild_sampling_fields()))
def test_what_is_remembered_is_what_would_be_worked_out_anew(fields: dict[str, Any]) -> None:
    expected = anew(fields)
    for _ in range(2):
        assert outcome(WARM, fields) == expected
    try:
        params = SamplingParams.from_json(fields)
    except ValidationError:
        return
    for _ in range(2):
        assert outcome(WARM, params) == expected


class Text(str):
    pass


@pytest.mark.parametrize(
    ("known", "asked"),
    [
        ({"n": 1}, {"n": True}),
        ({"n": 1}, {"n": 1.0}),
        ({"max_new_tokens": 1}, {"max_new_tokens": 1.0}),
        ({"ignore_eos": True}, {"ignore_eos": 1}),
        ({"min_p": 0.0}, {"min_p": -0.0}),
        ({"stop_token_ids": [1]}, {"stop_token_ids": [True]}),
        ({"stop_token_ids": [1]}, {"stop_token_ids": [1.0]}),
        ({"stop_token_ids": bytearray(b"\1")}, {"stop_token_ids": b"\1"}),
        ({"temperature": np.float64(0.5)}, {"temperature": np.float64(0.5).tobytes()}),
        ({"stop": ["a"]}, {"stop": {"a"}}),
        ({"stop": ["a"]}, {"stop": [b"a"]}),
        ({Text("n"): 1}, {b"n": 1}),
        ({"max_new_tokens": None}, {}),
        ({"stop": "ab"}, {"stop": ["a", "b"]}),
    ],
    ids=repr,
)
def test_values_that_only_compare_equal_are_not_taken_for_each_other(known: Any, asked: Any) -> None:
    normalise = normaliser()
    for _ in range(2):
        assert outcome(normalise, known) == anew(known)
        assert outcome(normalise, asked) == anew(asked)


def test_a_client_may_change_its_parameters_between_two_requests() -> None:
    normalise = normaliser()
    params, fields = SamplingParams(stop=["a"], max_new_tokens=5), {"stop_token_ids": [1], "max_new_tokens": 5}
    for _ in range(2):
        normalise(params), normalise(fields)
    params.stop.append("bcd")
    params.max_new_tokens = 6
    fields["stop_token_ids"].append(2)
    changed = normalise(params).sampling
    assert (changed.stop_strs, changed.stop_str_max_len, changed.max_new_tokens) == (("a", "bcd"), 3, 6)
    assert normalise(fields).sampling.stop_token_ids == (1, 2)


def test_a_change_in_the_middle_of_an_admission_leaves_no_wrong_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread changes the object after its values were looked up and before they are normalised."""
    normalise = normaliser()
    fields = {"max_new_tokens": 5}
    look = sampling._fingerprint

    def and_then_change(params: Any) -> bytes | None:
        key = look(params)
        params["max_new_tokens"] = 6
        return key

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "_fingerprint", and_then_change)
        normalise(fields)
    assert normalise({"max_new_tokens": 5}).sampling.max_new_tokens == 5
    assert normalise({"max_new_tokens": 6}).sampling.max_new_tokens == 6


def test_what_is_remembered_is_bounded_in_number_and_size() -> None:
    normalise = normaliser()
    for at in range(3 * sampling._KNOWN_FORMS):
        normalise({"max_new_tokens": at})
        assert len(normalise._known) <= sampling._KNOWN_FORMS
    normalise = normaliser()
    for large in (
        {"regex": "a" * 5000},
        {"stop_token_ids": [1] * 1000},
        {"custom_params": {"a": 1}},
        {"logit_bias": {"1": 1.0}},
    ):
        normalise(large)
    with pytest.raises(ValidationError):
        normalise({"top_p": 2})
    assert normalise._known == {}


def test_rules_do_not_share_what_they_remember() -> None:
    params = {"stop_token_ids": [99]}
    request = GenerateRequest(input_ids=[1], sampling_params=params)
    admit(request, RULES, V1)
    with pytest.raises(ValidationError, match="stop_token_ids"):
        admit(request, replace(RULES, vocab_size=50), V1)


# -- headers ------------------------------------------------------------------------------------------------------------------


@BOTH
@given(data=st.data())
def test_a_header_of_pieces_is_the_header_written_whole(schema: Any, data: st.DataObject) -> None:
    request = data.draw(strategies_ingress.normalized_requests(schema))
    fitted = data.draw(st.sampled_from([..., request.sampling.max_new_tokens, 1, None]))
    pieces, whole = (encode_generate(schema, one, [1], fitted) for one in (request, replace(request, form=None)))
    assert pieces.header == whole.header
    assert set(pieces.cells) == set(whole.cells)


@BOTH
def test_the_usual_request_is_put_together_from_pieces(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would compare one way with itself."""

    def never(self: Any, schema: Any) -> Any:
        raise AssertionError("written whole")

    for stream in (False, True):
        params = {"max_new_tokens": 8, "stop": ["\n"]}
        request = admit(GenerateRequest(text="mill", sampling_params=params, stream=stream), RULES, schema)
        with monkeypatch.context() as patch:
            patch.setattr(NormalizedSamplingParams, "to_wire", never)
            encode_generate(schema, request, [1], 8)
            with pytest.raises(AssertionError, match="whole"):
                encode_generate(schema, request, [1], 7)


@pytest.mark.parametrize(
    "fields",
    [
        {"wire_fields": {"return_sampling_mask": True}},
        {"token_ids_logprob": [1, 2]},
        {"return_logprob": True, "top_logprobs_num": 2},
        {"logprob_start_len": 0},
        {"return_hidden_states": True},
    ],
    ids=repr,
)
@BOTH
def test_what_is_not_usual_is_on_the_wire(schema: Any, fields: Any) -> None:
    request = admit(GenerateRequest(text="mill", sampling_params={"max_new_tokens": 8}, **fields), RULES, schema)
    pieces, whole = (encode_generate(schema, one, [1]) for one in (request, replace(request, form=None)))
    assert (pieces.header, set(pieces.cells)) == (whole.header, set(whole.cells))


def test_parameters_that_were_replaced_are_the_ones_on_the_wire() -> None:
    request = admit(GenerateRequest(text="mill", sampling_params={"max_new_tokens": 8}), RULES, V1)
    other = replace(request, sampling=replace(request.sampling, max_new_tokens=9, top_k=3))
    assert encode_generate(V1, other, [1]).header == encode_generate(V1, replace(other, form=None), [1]).header
    # and another schema's request is written by that schema's slots
    assert encode_generate(V2, request, [1]).header == encode_generate(V2, replace(request, form=None), [1]).header


# -- rids ---------------------------------------------------------------------------------------------------------------------


def test_minted_rids_of_many_threads_are_all_different() -> None:
    found: list[list[str]] = [[] for _ in range(8)]

    def mint(mine: list[str]) -> None:
        mine.extend(Rid.mint() for _ in range(500))

    threads = [threading.Thread(target=mint, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({rid for mine in found for rid in mine}) == 8 * 500


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_draws_its_own_rids() -> None:
    Rid.mint()
    assert _drawn._left  # there is something to inherit
    reader, writer = os.pipe()
    with _drawn._lock:  # and a lock that nobody will release over there
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)  # a child that hangs is ended, and then it has written nothing
            try:
                os.write(writer, "".join(Rid.mint() for _ in range(100)).encode())
            finally:
                os._exit(0)
    os.close(writer)
    theirs = b""
    while part := os.read(reader, 1 << 16):
        theirs += part
    os.close(reader)
    os.waitpid(pid, 0)
    assert len(theirs) == 3200
    assert not {theirs[at : at + 32].decode() for at in range(0, 3200, 32)} & {Rid.mint() for _ in range(100)}
