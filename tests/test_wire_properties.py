"""The codec against the naive per-request decoder, on frames that are valid, lying or hostile; and decoders with a rule missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import wire_helpers as wire
from headrace.codec import ChunkEvent, FrameError, encode_batch, load_schema, strategies
from headrace.codec.decode import REASONS
from headrace.codec.lies import LIES
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from wire_helpers import batch_of

SCHEMAS = [load_schema("v1"), load_schema("v2")]
schemas = pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: s.name)


@schemas
@given(data=st.data())
def test_what_is_encoded_is_what_is_decoded(schema: Any, data: st.DataObject) -> None:
    events = data.draw(st.lists(strategies.chunk_events(schema), max_size=4))
    frame = batch_of(encode_batch(events, schema), schema)
    assert list(frame) == events
    assert frame.rids == [e.rid for e in events]
    assert frame.finished == [i for i, e in enumerate(events) if e.finish_reason is not None]
    assert frame.token_ids.tolist() == [t for e in events for t in e.token_ids.tolist()]
    assert frame.lengths.tolist() == [len(e.token_ids) for e in events]
    assert frame.prompt_tokens.tolist() == [e.prompt_tokens for e in events]


@schemas
@given(data=st.data())
def test_valid_frames_read_as_the_naive_decoder_reads_them(schema: Any, data: st.DataObject) -> None:
    frame = data.draw(strategies.frames(schema))
    got = wire.ours(frame, schema)
    assert got[0] == "batch"
    assert wire.same(got, wire.oracle(frame, schema))


@schemas
@given(data=st.data())
def test_encoding_a_decoded_frame_again_keeps_every_chunk(schema: Any, data: st.DataObject) -> None:
    first = list(batch_of(data.draw(strategies.frames(schema)), schema))
    assert list(batch_of(encode_batch(first, schema), schema)) == first


@schemas
@given(data=st.data())
def test_one_lie_is_rejected_under_its_own_name(schema: Any, data: st.DataObject) -> None:
    frame, rule = data.draw(strategies.one_lie_frames(schema))
    with pytest.raises(FrameError) as caught:
        batch_of(frame, schema)
    assert caught.value.reason == rule
    assert wire.oracle(frame, schema) == ("reject", rule)


@schemas
@given(data=st.data())
def test_hostile_bytes_get_the_naive_verdict_and_no_foreign_exception(schema: Any, data: st.DataObject) -> None:
    frame = data.draw(strategies.hostile_frames(schema))
    got = wire.ours(frame, schema)
    try:
        expected = wire.oracle(frame, schema)
    except RecursionError:
        expected = ("reject", "header")  # the oracle recurses; what is that deep the codec refuses as well
        if got[0] != "reject":
            return
    assert wire.same(got, expected)


@schemas
@given(data=st.data())
def test_a_rejected_frame_names_its_rids_whatever_broke(schema: Any, data: st.DataObject) -> None:
    rules = (
        "column_length",
        "column_type",
        "data_length",
        "finish_reason",
        "ragged_sum",
        "unknown_columns",
        "too_large",
    )
    events = data.draw(st.lists(strategies.chunk_events(schema), min_size=2, max_size=4))
    from headrace.codec.lies import lie

    def pick(n: int) -> int:
        return data.draw(st.integers(0, n - 1))

    frame = lie(encode_batch(events, schema), data.draw(st.sampled_from(rules)), schema, pick)
    if frame is None:
        return
    with pytest.raises(FrameError) as caught:
        batch_of(frame, schema)
    assert caught.value.rids == [e.rid for e in events]
    assert caught.value.rids_complete


@given(frame=strategies.control_frames())
def test_result_and_error_frames_read_as_the_naive_decoder_reads_them(frame: bytes) -> None:
    assert wire.same(wire.ours(frame, SCHEMAS[0]), wire.oracle(frame, SCHEMAS[0]))
    assert wire.ours(frame, SCHEMAS[0])[0] in ("result", "error")


@schemas
@given(data=st.data())
def test_a_stream_folds_to_the_concatenation_of_its_deltas(schema: Any, data: st.DataObject) -> None:
    chunks = data.draw(strategies.chunk_streams(schema))
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    read = [batch_of(encode_batch([c], schema), schema)[0] for c in chunks]
    ids = np.concatenate([c.token_ids for c in read]).tolist()
    assert ids == [t for c in chunks for t in c.token_ids.tolist()]


def test_every_reason_has_a_lie_and_every_lie_a_reason() -> None:
    assert set(LIES) == set(REASONS) - {"buffer"}


# ---- decoders with a rule missing --------------------------------------------------------------------------------------------

_MUTABLE = (
    "arity",
    "column_length",
    "column_type",
    "data_length",
    "finish_reason",
    "header",
    "header_length",
    "ragged_sum",
    "rids",
    "unknown_columns",
    "unknown_tag",
)


def _hits(strategy: st.SearchStrategy[Any], wrong: Callable[[Any], bool], examples: int) -> int:
    """How many of the examples are wrong. Not `find`: it would print what it found, and hostile frames are long."""
    hits = 0

    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Any) -> None:
        nonlocal hits
        hits += wrong(case)

    run()
    return hits


@schemas
@pytest.mark.parametrize("rule", _MUTABLE)
def test_a_decoder_without_a_rule_is_caught_by_the_one_lie_frames(rule: str, schema: Any) -> None:
    """The property "every one-lie frame is rejected" must fail for each mutant, or the property is worth nothing."""

    def passes(case: tuple[bytes, str]) -> bool:
        try:
            return bool(wire.oracle(case[0], schema, {rule})[0] != "reject")
        except Exception:
            return True  # a decoder without the rule may also fall over, which is as bad

    assert _hits(strategies.one_lie_frames(schema, (rule,)), passes, 25)


@schemas
def test_the_shipped_decoder_with_any_one_rule_switched_off_is_caught(schema: Any) -> None:
    """For each rule, the shipped decoder except that what breaks the rule passes: some one-lie frame must tell it."""
    rejected: set[str] = set()

    def note(case: tuple[bytes, str]) -> bool:
        verdict = wire.ours(case[0], schema)
        rejected.add(verdict[1])
        return bool(verdict[0] != "reject")

    for rule in LIES:  # each in its turn: a draw over all of them may leave one out
        assert not _hits(strategies.one_lie_frames(schema, (rule,)), note, 12)
    assert rejected == set(LIES), "a decoder without one of the missing rules would pass every case"


# Faults seen in real decoders, each as a wrapper or a patch of the shipped one.


def _patched(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from headrace.codec import decode

    cells, numbers, finish, batch = decode._cells, decode._numbers, decode._finish, decode._batch
    if fault == "short column accepted":

        def short(blob: bytes, column: Any, n: int, optional: bool) -> Any:
            head = cells(blob, column, -1, optional)
            if head[0] > n >= 0:
                return cells(blob, column, n, optional)
            return head

        monkeypatch.setattr(decode, "_cells", short)
    elif fault == "data too long accepted":
        monkeypatch.setattr(decode, "_batch", lambda data, s, m: _retry(batch, data, s, m, (4, 8)))
    elif fault == "off by one in the data length":
        monkeypatch.setattr(decode, "_batch", lambda data, s, m: _retry(batch, data, s, m, (1,)))
    elif fault == "counts clamped":

        def clamp(raw: Any, column: Any, n: int, optional: bool) -> Any:
            try:
                return numbers(raw, column, n, optional)
            except decode.Broken as broken:
                if broken.reason != "column_type" or raw[0:1] == b"":
                    raise
                return bytes(max(n, 0))

        monkeypatch.setattr(decode, "_numbers", clamp)
    elif fault == "finish reasons not looked at":
        monkeypatch.setattr(
            decode, "_finish", lambda raw, c, n: (b"", 0) if cells(bytes(raw), c, n, False) else finish(raw, c, n)
        )


def _retry(batch: Any, data: Any, schema: Any, max_header: int, cuts: tuple[int, ...]) -> Any:
    try:
        return batch(data, schema, max_header)
    except Exception:
        for cut in cuts:
            try:
                return batch(bytes(data)[:-cut], schema, max_header)
            except Exception:
                continue
        raise


@pytest.mark.parametrize(
    "fault",
    [
        "short column accepted",
        "data too long accepted",
        "off by one in the data length",
        "counts clamped",
        "finish reasons not looked at",
    ],
)
def test_a_planted_fault_in_the_shipped_decoder_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _patched(monkeypatch, fault)
    schema = SCHEMAS[0]

    def wrong(case: tuple[bytes, str]) -> bool:
        try:
            return bool(wire.ours(case[0], schema)[0] != "reject")
        except Exception:
            return True

    rules = ("column_length", "column_type", "data_length", "finish_reason")
    assert _hits(strategies.one_lie_frames(schema, rules), wrong, 100)


def test_the_alarm_is_not_always_on() -> None:
    schema = SCHEMAS[0]
    assert not _hits(strategies.one_lie_frames(schema), lambda case: wire.ours(case[0], schema)[0] != "reject", 100)


def test_events_print_without_their_content() -> None:
    assert "1234567" not in repr(ChunkEvent(rid="r", token_ids=[1234567]))
