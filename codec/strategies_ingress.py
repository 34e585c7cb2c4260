"""Hypothesis strategies for the way in: rids, sampling parameters, requests, bodies, messages, and hostile headers.

Owns: the ingress half of `headrace.codec.strategies`, which re-exports it. Rules it keeps:

* ``valid`` strategies draw only what admission accepts, at every boundary of every rule; ``wild`` ones draw what a client might
  send, mostly near a boundary, and nothing can be told of the verdict but that it is an acceptance or a ValidationError.
* No randomness but Hypothesis's own: a drawn rid has its suffix drawn too.
"""

from __future__ import annotations

from typing import Any, Final

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import DrawFn, SearchStrategy
except ModuleNotFoundError as missing:  # pragma: no cover - the message is the point
    raise ModuleNotFoundError(
        "headrace.codec.strategies needs Hypothesis: pip install 'headrace[testing]'"
    ) from missing

import msgspec
import numpy as np

from .admission import AdmissionRules, GenerateRequest, NormalizedRequest, admit
from .ingress import IngressColumns, IngressMessage, encode_abort, encode_control, encode_generate
from .rid import HEALTH_PREFIX, Rid
from .sampling import INT32_MAX, SamplingParams
from .schema import WireSchema

VOCAB_SIZE: Final = 100
"""The vocabulary that `valid` strategies draw ids for, unless told otherwise."""

TEXTS: Final = ("", "a", "</s>", "字", "\U0001f600", "a\x00b", "�", "#0123456789abcdef", "\n\n", "é" * 64)
NOT_TEXT: Final = ("\ud800", "a\udfffb", "\ud83d")  # lone surrogates: str values that UTF-8 cannot hold
_PATTERNS: Final = (r"\d{6}", r"\d+", r"[ab]{2,5}", r"\<END\>", ".*x", r"(?i)stop", "字+", r"(foo|bar)+x", r"^User:")
_BAD_PATTERNS: Final = ("(a+)+b", "(", r"\p{L}", "a{4294967295}", "", "a*", ".*.*x", "a" * 257)
_EDGES: Final = (0, 1, -1, 2, 127, 128, 255, 256, 32767, INT32_MAX, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 64, 10**20)  # fmt: skip
_FLOATS: Final = (0.0, -0.0, 1e-7, 1e-6, 0.5, 1.0, 1.0000000000000002, 2.0, 2.0000000000000004, -2.0, -2.1, 1e38, 3.5e38, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))  # fmt: skip


def _text(limit: int = 40) -> SearchStrategy[str]:
    return st.one_of(st.sampled_from(TEXTS), st.text(st.characters(codec="utf-8"), max_size=limit))


def _hex(digits: int) -> SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=digits, max_size=digits)


def client_rids() -> SearchStrategy[str]:
    """Rids that a client may use: 1 to 128 bytes, some that look minted or suffixed, some with NUL or beyond ASCII."""
    odd = st.sampled_from(
        ("r", "x#0123456789abcdef", "a" * 128, "字" * 42, "\x00", "#", "health_check", "r_0", "\U0001f600" * 32)
    )
    free = st.text(st.characters(codec="utf-8"), min_size=1, max_size=32).filter(
        lambda s: not s.startswith(HEALTH_PREFIX)
    )
    return st.one_of(odd, _hex(32), st.builds("{}#{}".format, _hex(4), _hex(16)), free)


def rids() -> SearchStrategy[Rid]:
    """Rids of all three kinds in their internal form: minted, health probes, clients' with a suffix."""
    internal = st.one_of(
        _hex(32), st.builds("HEALTH_CHECK_{}".format, _hex(32)), st.builds("{}#{}".format, client_rids(), _hex(16))
    )
    return internal.map(Rid.from_wire)


@st.composite
def sampling_fields(draw: DrawFn, vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Some sampling parameters as a client's JSON object, all within the rules, many on a boundary."""
    top_token = vocab_size - 1
    least = draw(st.sampled_from((0, 1, 7)))
    longest = draw(st.sampled_from((None, least, least + 1, 128, INT32_MAX)))
    token = st.one_of(st.sampled_from((0, top_token)), st.integers(0, top_token))
    unit = st.floats(0, 1)
    penalty = st.one_of(st.sampled_from((-2, -2.0, 0, 2.0)), st.floats(-2, 2))
    scalar = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        _text(),
    )
    custom = st.dictionaries(
        _text(),
        st.one_of(scalar, st.lists(scalar, max_size=4), st.dictionaries(_text(), scalar, max_size=3)),
        max_size=3,
    )
    free: dict[str, SearchStrategy[Any]] = {
        "stop": st.one_of(
            st.none(), st.just([]), st.just("x"), st.lists(_text().filter(len), max_size=4), st.just(["s"] * 32)
        ),
        "stop_token_ids": st.lists(token, max_size=4),
        "stop_regex": st.one_of(
            st.none(), st.sampled_from(_PATTERNS), st.lists(st.sampled_from(_PATTERNS), max_size=4)
        ),
        "temperature": st.one_of(st.sampled_from((0, 0.0, -0.0, 1e-7, 1e-6, 1, 1e308)), st.floats(0, 10)),
        "top_p": st.one_of(st.sampled_from((5e-324, 1, 1.0)), unit.filter(bool)),
        "top_k": st.one_of(st.sampled_from((-1, 1, 1 << 30, INT32_MAX)), st.integers(1, INT32_MAX)),
        "min_p": st.one_of(st.sampled_from((0, 1)), unit),
        "frequency_penalty": penalty,
        "presence_penalty": penalty,
        "repetition_penalty": st.one_of(st.sampled_from((5e-324, 1, 2)), st.floats(0, 2, exclude_min=True)),
        "n": st.sampled_from((None, 1)),
        "beam_width": st.sampled_from((None, 1)),
        "ignore_eos": st.sampled_from((None, True, False)),
        "skip_special_tokens": st.sampled_from((None, True, False)),
        "spaces_between_special_tokens": st.sampled_from((None, True, False)),
        "no_stop_trim": st.sampled_from((None, True, False)),
        "stream_interval": st.sampled_from((None, 1, 4, INT32_MAX)),
        "logit_bias": st.dictionaries(token.map(str), st.floats(-3.4e38, 3.4e38), max_size=4),
        "sampling_seed": st.one_of(
            st.sampled_from((None, (1 << 63) - 1, -(1 << 63))), st.integers(-(1 << 63), (1 << 63) - 1)
        ),
        "custom_params": custom,
    }
    fields: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=free))
    if draw(st.booleans()):
        fields |= {"max_new_tokens": longest, "min_new_tokens": least}
    grammar = draw(st.sampled_from((None, "json_schema", "regex", "ebnf", "structural_tag")))
    if grammar is not None:
        fields[grammar] = draw(_text())
    return fields


def sampling_params(vocab_size: int = VOCAB_SIZE) -> SearchStrategy[SamplingParams]:
    """`SamplingParams` that normalise with this vocabulary, at every boundary."""
    return sampling_fields(vocab_size).map(SamplingParams.from_json)


def wild_values() -> SearchStrategy[Any]:
    """Values of every JSON type (and a few beyond), mostly at a boundary of some rule."""
    leaf = st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(_EDGES),
        st.sampled_from(_FLOATS),
        st.sampled_from(TEXTS + NOT_TEXT + _PATTERNS + _BAD_PATTERNS),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
        max_leaves=8,
    )


_SAMPLING_KEYS: Final = tuple(SamplingParams.__slots__)


@st.composite
def wild_sampling_fields(draw: DrawFn) -> dict[str, Any]:
    """Sampling parameters of which one or a few are anything at all."""
    fields = draw(sampling_fields())
    keys = st.one_of(
        st.sampled_from(_SAMPLING_KEYS), st.sampled_from(("is_normalized", "temprature", "stop_strs", "\ud800"))
    )
    fields.update(draw(st.dictionaries(keys, wild_values(), min_size=1, max_size=3)))
    return fields


@st.composite
def generate_requests(draw: DrawFn, vocab_size: int = VOCAB_SIZE) -> GenerateRequest:
    """Requests that admission accepts with `enable_return_hidden_states`; text that is not empty, or ids."""
    token = st.one_of(st.sampled_from((0, vocab_size - 1)), st.integers(0, vocab_size - 1))
    text = draw(st.booleans())
    return GenerateRequest(
        text=draw(_text().filter(len)) if text else None,
        input_ids=None if text else draw(st.lists(token, min_size=1, max_size=8)),
        sampling_params=draw(st.one_of(st.none(), sampling_params(vocab_size))),
        rid=draw(st.one_of(st.none(), client_rids())),
        stream=draw(st.booleans()),
        return_logprob=draw(st.booleans()),
        logprob_start_len=draw(st.sampled_from((None, -1, 0, 1))),
        top_logprobs_num=draw(st.sampled_from((None, 0, 2, min(vocab_size, 1024)))),
        token_ids_logprob=draw(st.one_of(st.none(), st.lists(token, max_size=4))),
        return_text_in_logprobs=draw(st.booleans()),
        return_hidden_states=draw(st.booleans()),
        add_special_tokens=draw(st.sampled_from((None, True, False))),
    )


def admission_rules(vocab_size: int = VOCAB_SIZE) -> AdmissionRules:
    """Rules under which `generate_requests` are admitted."""
    return AdmissionRules(context_len=4096, vocab_size=vocab_size, enable_return_hidden_states=True)


def normalized_requests(schema: WireSchema, vocab_size: int = VOCAB_SIZE) -> SearchStrategy[NormalizedRequest]:
    """Admitted requests."""
    rules = admission_rules(vocab_size)
    return generate_requests(vocab_size).map(lambda request: admit(request, rules, schema))


@st.composite
def ingress_messages(draw: DrawFn, schema: WireSchema) -> IngressMessage:
    """Messages of all kinds: generate requests with their ids, aborts, control requests."""
    kind = draw(st.sampled_from(("generate", "generate", "abort", "control")))
    if kind == "abort":
        return encode_abort(schema, draw(rids()), draw(st.booleans()))
    if kind == "control":
        tag = draw(st.sampled_from(("FlushCacheReqInput", "GetInternalStateReq", "字")))
        return encode_control(
            schema, tag, draw(rids()), *draw(st.lists(st.one_of(st.none(), st.floats(), _text()), max_size=3))
        )
    request = draw(normalized_requests(schema))
    ids = (
        draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6))
        if request.input_ids is None
        else request.input_ids
    )
    return encode_generate(schema, request, ids)


@st.composite
def hostile_headers(draw: DrawFn, schema: WireSchema) -> bytes:
    """Headers that are wrong in one way (cut, a slot of another type, another arity) or in every way (any msgpack, any bytes)."""
    whole = draw(ingress_messages(schema)).header
    how = draw(st.sampled_from(("cut", "slot", "sampling", "longer", "flip", "any", "bytes", "bomb")))
    if how == "cut":
        return whole[: draw(st.integers(0, len(whole) - 1))]
    if how == "flip":
        at = draw(st.integers(0, len(whole) - 1))
        return whole[:at] + bytes([draw(st.integers(0, 255))]) + whole[at + 1 :]
    if how == "bytes":
        return draw(st.binary(max_size=64))
    if how == "bomb":
        return draw(st.sampled_from((b"\x91", b"\x81\x01", b"\xdc\x00\x01"))) * draw(st.sampled_from((100, 5000)))
    value = wild_values().filter(_packs)
    if how == "any":
        return msgspec.msgpack.encode(draw(value))
    header = msgspec.msgpack.decode(whole)
    if how == "longer":
        header += draw(st.lists(value, min_size=1, max_size=4))
    elif how == "sampling" and len(header) > 8 and isinstance(header[8], list):
        at = draw(st.integers(0, len(header[8]) - 1))
        header[8][at : at + 1] = draw(st.sampled_from(([], [None], [None, None], [draw(value)])))
    else:
        header[draw(st.integers(0, len(header) - 1))] = draw(value)
    return msgspec.msgpack.encode(header)


def _packs(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError):
        return False
    return True


@st.composite
def hostile_columns(draw: DrawFn, schema: WireSchema) -> tuple[IngressColumns, list[bool]]:
    """A drain in which some headers are hostile, with a list that says which are not."""
    messages, sound = [], []
    for _ in range(draw(st.integers(1, 5))):
        message = draw(ingress_messages(schema))
        good = draw(st.booleans())
        if not good:
            ids = np.arange(draw(st.integers(0, 5)), dtype=np.int64)
            message = IngressMessage(message.rid, draw(hostile_headers(schema)), ids, message.cells)
        messages.append(message)
        sound.append(good)
    return IngressColumns.from_messages(messages), sound


@st.composite
def wild_bodies(draw: DrawFn) -> dict[str, Any]:
    """Bodies of a `/generate` call: a prompt or a batch, with keys that may hold anything."""
    prompt: SearchStrategy[dict[str, Any]] = st.one_of(
        st.fixed_dictionaries({"text": st.one_of(_text(), st.lists(_text(), max_size=3))}),
        st.fixed_dictionaries(
            {
                "input_ids": st.one_of(
                    st.lists(st.integers(-1, VOCAB_SIZE), max_size=4),
                    st.lists(st.lists(st.integers(0, 99), max_size=2), max_size=3),
                )
            }
        ),
        st.just({}),
    )
    keys = (
        "text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num",
        "token_ids_logprob", "return_text_in_logprobs", "return_hidden_states", "add_special_tokens", "wire_fields", "priority",
        "lora_id", "image_data", "is_normalized", "unknown", "session_params",
    )  # fmt: skip
    value = st.one_of(wild_values(), client_rids(), wild_sampling_fields(), st.lists(sampling_fields(), max_size=3))
    body: dict[str, Any] = draw(prompt)
    body.update(draw(st.dictionaries(st.sampled_from(keys), value, max_size=4)))
    if draw(st.booleans()):
        body["sampling_params"] = draw(wild_sampling_fields())
    return body
