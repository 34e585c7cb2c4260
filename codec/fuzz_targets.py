"""What can be fuzzed: targets by name, each a callable bytes -> None, with its strategy and its seeds.

Owns: the targets of headrace itself. A target returns for an input that is fine, raises `Rejected` for one that is refused with
the codec's own error, and anything else it raises is a finding. Beyond "no foreign exception" each target checks what it can:
an accepted frame is read whole, encoded again and compared; a normalised request is normalised again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

try:
    from hypothesis import strategies as st
except ImportError:
    raise ImportError("headrace.codec.fuzz needs Hypothesis: pip install 'headrace[testing]'") from None

from . import strategies
from .batch import BatchFrame
from .body import GenerateBody
from .decode import decode_frame
from .encode import encode_batch
from .errors import FrameError, HeadraceError, ValidationError
from .finish import decode_plain, parse_finish_reason
from .ingress import BadMessage, IngressColumns, decode_ingress
from .inspect import describe, render
from .sampling import SamplingParams
from .schema import WireSchema, load_schema, parse_schema
from .stop_regex import compile_stop_regex
from .vectors import one_lie, valid_frames


class Rejected(Exception):
    """The target refused the input in the way it is meant to."""


class Target(NamedTuple):
    """One target: `run`, the strategy its inputs are drawn from, `seeds` (name -> bytes), and what it checks in words."""

    name: str
    run: Callable[[bytes], None]
    inputs: st.SearchStrategy[bytes]
    seeds: Callable[[], dict[str, bytes]]
    checks: str


def frame_inputs(schema: WireSchema) -> st.SearchStrategy[bytes]:
    """Frames of every kind: valid, with one lie, hostile, control; the lies are a third, because they find most."""
    lies = strategies.one_lie_frames(schema).map(lambda case: case[0])
    return st.one_of(lies, strategies.hostile_frames(schema), strategies.frames(schema), strategies.control_frames())


def frame_seeds(schema: WireSchema) -> dict[str, bytes]:
    """The valid golden frames and a few of each lie."""
    seeds = {f"valid-{at:02}": frame for at, (_, frame) in enumerate(valid_frames(schema))}
    seeds.update({f"lie-{name.replace(' ', '-')}": frame for name, _, frame in one_lie(schema, 3)})
    return seeds


def _frame(schema: WireSchema) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        try:
            frame = decode_frame(data, schema)
        except FrameError as error:
            error.to_dict()
            raise Rejected(error.reason) from None
        if isinstance(frame, BatchFrame):
            chunks = list(frame)
            if list(decode_frame(encode_batch(chunks, schema), schema)) != chunks and not _has_nan(chunks):
                raise AssertionError("a frame that is encoded again reads differently")

    return run


def _has_nan(chunks: list[Any]) -> bool:
    # NaN in a scalar, or somewhere in an opaque value or a finish map, is not equal to itself.
    return "nan" in repr([(c.scalars, c.finish_reason and c.finish_reason.to_map()) for c in chunks])


def _ingress(schema: WireSchema) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        ids = np.arange(3)
        columns = IngressColumns([data, b"\x90"], ids, np.array([2, 1]), {})
        messages = decode_ingress(columns, schema)
        if len(messages) != 2:
            raise AssertionError("one message for each header")
        if isinstance(messages[0], BadMessage):
            raise Rejected(messages[0].message)

    return run


def _headers(schema: WireSchema) -> st.SearchStrategy[bytes]:
    from .strategies_ingress import hostile_headers, ingress_messages

    return st.one_of(
        hostile_headers(schema), ingress_messages(schema).map(lambda m: m.header), strategies.hostile_msgpack()
    )


def _header_seeds(schema: WireSchema) -> dict[str, bytes]:
    from .. import specs

    found = json.loads(specs.path("vectors", f"ingress-{schema.name}.json").read_text("utf-8"))
    return {f"valid-{at:02}": bytes.fromhex(entry["header_hex"]) for at, entry in enumerate(found)}


def _guarded(call: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        try:
            call(data)
        except HeadraceError as error:
            json.dumps(error.to_dict()).encode("utf-8")
            raise Rejected(error.code) from None

    return run


def _finish(data: bytes) -> None:
    reason = parse_finish_reason(data)
    if reason.raw is not None:
        if reason.to_map() != data:
            raise AssertionError("a raw reason is not what it was made from")
        return
    again = parse_finish_reason(reason.to_map())
    if type(again) is not type(reason) or repr(again.to_map()) != repr(decode_plain(data)):
        raise AssertionError("a finish reason does not echo its map")


def _sampling(data: bytes) -> None:
    normal = SamplingParams.from_json(data).normalize(vocab_size=32000)
    if normal.normalize() is not normal:
        raise AssertionError("normalising twice is not normalising once")
    for name in ("v1", "v2"):
        schema = load_schema(name)
        wire = msgspec.msgpack.encode(normal.to_wire(schema))
        if len(msgspec.msgpack.decode(wire)) != len(schema.sampling_slots):
            raise AssertionError("a slot is missing")


def _body(data: bytes) -> None:
    GenerateBody.from_json(data).requests()


def _regex(data: bytes) -> None:
    try:
        pattern = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Rejected("not text") from None
    _, width = compile_stop_regex(pattern)
    if width < 1:
        raise AssertionError("a pattern without a window never fires")


def _inspect(data: bytes) -> None:
    for name in ("v1", "v2"):
        report = describe(data, load_schema(name))
        json.dumps(report)
        render(report)


def _schema(data: bytes) -> None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Rejected("not text") from None
    parse_schema(text, "fuzz")


def _json(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    def dump(value: Any) -> bytes:
        try:
            return json.dumps(value).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError):
            return repr(value).encode("utf-8", "surrogatepass")

    return values.map(dump)


def _sampling_inputs() -> st.SearchStrategy[bytes]:
    from .strategies_ingress import sampling_fields, wild_sampling_fields

    return st.one_of(_json(sampling_fields()), _json(wild_sampling_fields()), st.binary(max_size=60))


def _body_inputs() -> st.SearchStrategy[bytes]:
    from .strategies_ingress import wild_bodies

    return st.one_of(_json(wild_bodies()), st.binary(max_size=60))


def _regex_inputs() -> st.SearchStrategy[bytes]:
    atoms = st.sampled_from(
        [
            "a",
            "b",
            ".",
            r"\d",
            r"\w",
            r"\s",
            "[ab]",
            "[^a]",
            "(",
            ")",
            "(?:",
            "|",
            "*",
            "+",
            "?",
            "{2}",
            "{1,3}",
            "{4294967295}",
            "^",
            "$",
            r"\b",
            r"\1",
            "(?i)",
            "(?<n>a)",
            r"\p{L}",
            "é",
        ]
    )
    return st.one_of(st.lists(atoms, max_size=12).map("".join), st.text(max_size=20)).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )


def _schema_inputs() -> st.SearchStrategy[bytes]:
    from .. import specs

    text = specs.path("wire", "v1.toml").read_bytes()
    cut = st.builds(
        lambda at, n, new: text[:at] + new + text[at + n :],
        st.integers(0, len(text)),
        st.integers(0, 40),
        st.binary(max_size=12),
    )
    return st.one_of(cut, st.binary(max_size=60))


def _texts(*texts: str) -> Callable[[], dict[str, bytes]]:
    return lambda: {f"seed-{at:02}": text.encode("utf-8") for at, text in enumerate(texts)}


def _finish_seeds() -> dict[str, bytes]:
    return {f"seed-{at:02}": raw for at, raw in enumerate(strategies.LOSSY_MAPS)}


def _toml_seed() -> dict[str, bytes]:
    from .. import specs

    return {"v1": specs.path("wire", "v1.toml").read_bytes()}


def _make() -> dict[str, Target]:
    made = []
    for name in ("v1", "v2"):
        schema = load_schema(name)
        made += [
            Target(
                f"frame-{name}",
                _frame(schema),
                frame_inputs(schema),
                lambda schema=schema: frame_seeds(schema),  # type: ignore[misc]
                "decode_frame: FrameError or a frame that reads whole and survives encoding again",
            ),
            Target(
                f"ingress-{name}",
                _ingress(schema),
                _headers(schema),
                lambda schema=schema: _header_seeds(schema),  # type: ignore[misc]
                "decode_ingress: one message for each header, a bad one failing alone",
            ),
        ]
    made += [
        Target(
            "finish",
            _finish,
            st.one_of(strategies.hostile_msgpack(), strategies.finish_maps().map(msgspec.msgpack.encode)),
            _finish_seeds,
            "parse_finish_reason: total, echoes its map",
        ),
        Target(
            "inspect",
            _inspect,
            st.one_of(frame_inputs(load_schema("v2")), strategies.hostile_msgpack()),
            lambda: frame_seeds(load_schema("v1")),
            "describe and render: total, JSON-able",
        ),
        Target(
            "sampling",
            _guarded(_sampling),
            _sampling_inputs(),
            _texts(
                '{"temperature": 0}',
                '{"stop": ["a"], "top_p": 0.9, "logit_bias": {"7": 1.5}}',
                '{"max_new_tokens": null, "n": 2}',
                '{"temperature": NaN}',
                '{"sampling_seed": 18446744073709551616}',
            ),
            "SamplingParams.from_json and normalize: ValidationError or idempotent, on the wire whole",
        ),
        Target(
            "body",
            _guarded(_body),
            _body_inputs(),
            _texts(
                '{"text": "hi"}',
                '{"input_ids": [[1], [2]], "rid": "r"}',
                '{"text": ["a", "b"], "rid": ["x", "x"]}',
                '{"text": "a\\ud800b"}',
            ),
            "GenerateBody: ValidationError or requests",
        ),
        Target(
            "stop-regex",
            _guarded(_regex),
            _regex_inputs(),
            _texts(r"\d+", "(a+)+b", r"\<END\>", "a{4294967295}", "(", r"[^\n]{1,20}"),
            "compile_stop_regex: ValidationError or a pattern with a window",
        ),
        Target("schema", _guarded(_schema), _schema_inputs(), _toml_seed, "parse_schema: ValidationError or a schema"),
    ]
    return {target.name: target for target in made}


TARGETS: Final[dict[str, Target]] = _make()


def target_named(name: str) -> Target:
    """The target called `name`; ValidationError that lists them for any other."""
    if name not in TARGETS:
        raise ValidationError(f"no fuzz target {name!a}: known are {', '.join(TARGETS)}", field="target")
    return TARGETS[name]


def digest(data: bytes) -> str:
    """Twelve hex digits that name an input."""
    return hashlib.sha256(data).hexdigest()[:12]
