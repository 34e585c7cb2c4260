"""Golden vectors of the way in: bodies and the exact bytes they become, and headers that must be refused.

Owns: what stands in ``specs/vectors/ingress-*.json``. ``python -m headrace.codec.vectors_ingress`` writes the files; a test
compares them on every run. Rules it keeps:

* The first four v2 cases are messages of a real server (SGLang 0.5.23); the others were made here.
* A case holds its own rid, so its bytes are the same everywhere.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from .. import specs
from .admission import AdmissionRules, admit
from .body import GenerateBody
from .ingress import IngressMessage, encode_abort, encode_control, encode_generate
from .rid import Rid
from .schema import WireSchema, load_schema

Case = dict[str, Any]

_RULES: Final = AdmissionRules(context_len=4096, vocab_size=1 << 20, enable_return_hidden_states=True)
_FULL: Final[Case] = {
    "max_new_tokens": None, "stop": ["a", "字"], "stop_token_ids": [9], "top_p": 0.9, "top_k": -1, "min_p": 0.1,
    "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1, "min_new_tokens": 2, "regex": "a+",
    "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True,
    "stream_interval": 4, "logit_bias": {"7": 1.5}, "sampling_seed": 42, "custom_params": {"k": [1, "x", None]},
    "stop_regex": "\\d{6}",
}  # fmt: skip
_EDGES: Final[Case] = {
    "max_new_tokens": 0, "stop": ["</s>"] * 32, "stop_token_ids": [0, 1048575], "temperature": 1e-06, "top_p": 5e-324,
    "top_k": 2147483647, "frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 2, "beam_width": 1,
    "sampling_seed": -9223372036854775808, "logit_bias": {"0": -1, "1048575": 0.1}, "ebnf": 'root ::= "é"',
    "custom_params": {"max": 18446744073709551615, "min": -9223372036854775808, "o": {"t": True, "n": None, "f": 0.5}},
}  # fmt: skip
_BODIES: Final[tuple[tuple[str, Case, list[int]], ...]] = (
    ("03d3a373a8c54512a38c09d17553e654", {"text": "Hello world"}, [19923, 2058]),
    ("36b4b23208fb4a3daffe1e518c6a202a", {"input_ids": [1, 2, 3], "stream": True, "sampling_params": {"temperature": 0}}, [1, 2, 3]),
    (
        "mine#bfdfec2e00000000",
        {
            "input_ids": [1, 2], "rid": "mine", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
            "token_ids_logprob": [5, 6], "sampling_params": _FULL,
        },
        [1, 2],
    ),
    (
        "bd45b504a04f41a19a95622cb135c340",
        {"text": "x", "sampling_params": {"stop_regex": ["\\d+", "[ab]{2,5}"], "json_schema": "{}"}},
        [90],
    ),
    ("x#0123456789abcdef#00000000ffffffff", {"text": "\x00字\U0001f600", "rid": "x#0123456789abcdef", "return_hidden_states": True}, [0]),
    ("HEALTH_CHECK_" + "0" * 32, {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}, [0]),
    ("f" * 32, {"input_ids": [1048575, 0], "sampling_params": _EDGES}, [1048575, 0]),
)  # fmt: skip
_WIRE_FIELDS: Final[Case] = {
    "lora_id": "l", "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 9223372036854775807, "routed_dp_rank": 2,
    "disagg_prefill_dp_rank": 3, "routing_key": "k", "require_reasoning": True, "priority": -4, "extra_key": "e", "no_logs": True,
    "session_params": {"id": "s", "offset": 0},
}  # fmt: skip


def message_of(schema: WireSchema, case: Case) -> IngressMessage:
    """The message of one generate case: its body, admitted under the case's own rid, with the ids it names."""
    [request] = GenerateBody.from_json(case["body"]).requests()
    request.rid = Rid.from_wire(case["rid"])
    return encode_generate(schema, admit(request, _RULES, schema), case["buffers"]["input_ids"])


def _case(message: IngressMessage, **origin: Any) -> Case:
    cells = {name: cell.tolist() for name, cell in message.cells.items()}
    return {
        **origin,
        "header_hex": message.header.hex(),
        "header": msgspec.msgpack.decode(message.header),
        "buffers": {"input_ids": message.ids.tolist(), **cells},
    }


def _good(schema: WireSchema) -> list[Case]:
    bodies = list(_BODIES)
    if any(field.name == "priority" for field in schema.ingress_fields):
        bodies.append(("e" * 32, {"text": "a", **_WIRE_FIELDS}, [97]))
    cases = []
    for rid, body, ids in bodies:
        case = {"rid": rid, "body": body, "buffers": {"input_ids": ids}}
        cases.append(_case(message_of(schema, case), rid=rid, body=body))
    cases += [
        _case(encode_abort(schema, "mine#bfdfec2e00000000"), rid="mine#bfdfec2e00000000", abort={"abort_all": False}),
        _case(encode_abort(schema, "", abort_all=True), rid="", abort={"abort_all": True}),
        _case(
            encode_control(schema, "FlushCacheReqInput", "c", 0.0),
            rid="c",
            control={"tag": "FlushCacheReqInput", "fields": [0.0]},
        ),
        _case(
            encode_control(schema, "GetInternalStateReq", "c"),
            rid="c",
            control={"tag": "GetInternalStateReq", "fields": []},
        ),
    ]
    return cases


def _bad(schema: WireSchema) -> list[Case]:
    rid = "0" * 32
    whole = encode_generate(
        schema, admit(GenerateBody.from_json({"text": "a", "rid": "a"}).requests()[0], _RULES, schema), [97]
    )
    header = msgspec.msgpack.decode(whole.header)
    header[1] = rid
    slots = header[8]

    def changed(at: int, value: object) -> bytes:
        return msgspec.msgpack.encode([*header[:at], value, *header[at + 1 :]])

    def slot(name: str, value: object) -> bytes:
        at = schema.sampling_slots.index(name)
        return changed(8, [*slots[:at], value, *slots[at + 1 :]])

    intact = msgspec.msgpack.encode(header)
    faults: list[tuple[str, str | None, bytes]] = [
        ("a list where logprob_start_len is an integer", rid, changed(10, [1])),
        ("two sampling slots more, before the last", rid, changed(8, [*slots[:-1], None, None, slots[-1]])),
        ("one sampling slot less", rid, changed(8, slots[:-1])),
        ("a map where the sampling array is due", rid, changed(8, dict(zip(schema.sampling_slots, slots, strict=True)))),
        ("temperature is a string", rid, slot("temperature", "1")),
        ("top_k is a bool", rid, slot("top_k", True)),
        ("is_normalized is false", rid, slot("is_normalized", False)),
        ("stop is not nil: the client's form", rid, slot("stop", "x")),
        ("rid is an integer", None, changed(1, 5)),
        ("the header is cut behind the sampling array", rid, intact[:-4]),
        ("the header is cut within the rid", None, intact[:40]),
        ("a byte follows the header", rid, intact + b"\xc0"),
        ("nesting beyond any parser's stack", rid, b"\x94" + msgspec.msgpack.encode(header[0]) + msgspec.msgpack.encode(rid) + b"\x91" * 3000),
        ("a map instead of an array", None, msgspec.msgpack.encode({"rid": rid})),
        ("no bytes", None, b""),
    ]  # fmt: skip
    return [{"wire": schema.name, "why": why, "rid": found, "header_hex": data.hex()} for why, found, data in faults]


def vectors() -> dict[str, list[Case]]:
    """Every ingress vector file by name (without ``.json``), as its JSON reads."""
    v1, v2 = load_schema("v1"), load_schema("v2")
    made = {"ingress-v1": _good(v1), "ingress-v2": _good(v2), "ingress-bad": _bad(v1) + _bad(v2)}
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


def write() -> None:
    """Write the files into the source tree this module was loaded from."""
    for name, cases in vectors().items():
        specs.path("vectors", f"{name}.json").write_text(
            json.dumps(cases, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )


if __name__ == "__main__":
    write()
