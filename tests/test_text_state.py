"""The state of a request's text as data, and the ways into the engine agreeing with each other."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
from headrace.runtime.text.engine import TextEngine, TextOptions, TextState
from headrace.runtime.text.stops import StopSet
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import tb, tb_engine, tf_engine

CHANGED = {
    "options": TextOptions(no_stop_trim=True),
    "plain": "other",
    "pending": b"\xe2",
    "held": "x",
    "lead": 7,
    "window": ((1,), 0),
    "stops": StopSet(("zz",)),
}


def test_every_attribute_of_the_state_changes_its_key():
    assert set(CHANGED) == set(TextState.__slots__)
    for engine in (tb_engine(), tf_engine(), TextEngine(None)):
        state = engine.open(TextOptions(stops=("ab",)))
        for name, value in CHANGED.items():
            before, kept = state.key(), getattr(state, name)
            setattr(state, name, value)
            assert state.key() != before, name
            setattr(state, name, kept)
            assert state.key() == before
            hash(before)


def test_every_option_changes_the_key():
    changed = {
        "stops": ("a",),
        "stop_regexes": ("a",),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    assert set(changed) == {field.name for field in dataclasses.fields(TextOptions)}
    engine = tb_engine()
    base = engine.open(TextOptions()).key()
    for name, value in changed.items():
        assert engine.open(TextOptions(**{name: value})).key() != base, name


def test_restore_gives_back_what_key_described_and_refuses_other_options():
    engine = tb_engine()
    options = TextOptions(stops=("END",))
    state = engine.open(options)
    assert engine.feed([state], np.array([*b"xEN", 0xE2]), [0, 4]) == (["x"], [])
    again = engine.restore(options, state.key())
    assert again.key() == state.key()
    assert again is not state
    for one in (state, again):
        assert engine.finish(one, [0x82, 0xAC], None) == "EN€"
    with pytest.raises(ValueError, match="other options"):
        engine.restore(TextOptions(), state.key())


def test_plain_tells_that_the_next_delta_is_the_tokens_own_text():
    engine = tb_engine()
    state = engine.open(TextOptions())
    assert state.plain
    engine.feed([state], np.array([0xE2]), [0, 1])
    assert not state.plain
    engine.feed([state], np.array([0x82, 0xAC]), [0, 2])
    assert state.plain
    assert not engine.open(TextOptions(stops=("x",))).plain
    state = tf_engine("a").open(TextOptions())
    assert not state.plain  # a leading space may still have to go
    tf_engine("a").feed([state], np.array([256]), [0, 1])
    assert state.plain


ROW = st.tuples(
    st.sampled_from(
        [
            TextOptions(),
            TextOptions(skip_special_tokens=False),
            TextOptions(stops=("ab", "b\u20ac")),
            TextOptions(stops=("<T>x",), skip_special_tokens=False),
        ]
    ),
    st.lists(st.sampled_from([97, 98, 60, 0xE2, 0x82, 0xAC, 0xFF, 256, 257, 258, -1, 999]), min_size=6, max_size=6),
)


@given(st.sampled_from(["byte-level", "byte-fallback"]), st.lists(ROW, min_size=1, max_size=20), st.data())
def test_batch_mates_and_the_way_in_never_change_a_text(kind, rows, data):
    engine = tb_engine("<T", "né") if kind == "byte-level" else tf_engine("<T", "▁né")
    together = [engine.open(options) for options, _ in rows]
    alone = [engine.open(options) for options, _ in rows]
    order = data.draw(st.permutations(range(len(rows))))
    for step in range(6):
        column = [ids[step] for _, ids in rows]
        deltas, bad = engine.feed(
            [together[i] for i in order], np.array([column[i] for i in order], np.int32), list(range(len(rows) + 1))
        )
        wrong = dict(bad)
        plain = engine.feed_plain(column)
        for place, i in enumerate(order):
            was_plain = alone[i].plain
            texts, own = engine.feed([alone[i]], np.array([97, column[i], 97])[1:2], np.array([0, 1]))
            assert deltas[place] == texts[0]
            assert wrong.get(place) == (own[0][1] if own else None)
            assert together[i].key() == alone[i].key()
            if was_plain and plain[i] is not None:
                assert texts[0] == plain[i]
                assert alone[i].plain


def test_many_ids_in_a_row_equal_one_at_a_time():
    engine = tb_engine()
    options = TextOptions(stops=("xyz",))
    ids = [*"a€xy\x00한xyz".encode(), 0xE2, *b"xyx"]
    one, many = engine.open(options), engine.open(options)
    single = "".join(engine.feed([one], np.array([i]), [0, 1])[0][0] for i in ids)
    other = engine.open(options)
    deltas, _ = engine.feed(
        [many, other, engine.open(options)], np.array([*ids, *ids[:3]]), [0, len(ids), len(ids), len(ids) + 3]
    )
    assert deltas == [single, "", "a"]
    assert one.key() == many.key()
    rows = [engine.open(TextOptions()) for _ in range(3)]
    for offsets, texts in (([0, 2, 2, 3], ["ab", "", "c"]), ([0, 0, 0, 3], ["", "", "abc"])):
        assert engine.feed(rows, np.array([*b"abc"]), np.array(offsets)) == (
            texts,
            [],
        )  # as many ids as rows, but not one each


def test_ids_may_be_lists_arrays_or_views_of_any_integer_type():
    engine = tb_engine()
    for ids in (
        [97, 98],
        (97, 98),
        np.array([97, 98], np.int32),
        np.array([97, 0, 98, 0])[::2],
        np.array([97, 98], np.uint8),
    ):
        assert engine.finish(engine.open(TextOptions()), ids, None) == "ab"
        assert engine.whole(TextOptions(), ids, 1, None) == "ab"
        assert engine.decode(ids) == "ab"


def test_token_texts_are_the_tokenizers_own_and_only_tokens_are_remembered():
    engine = TextEngine(tb(["né"], ["<T>"]))
    assert [engine.token_text(i) for i in (97, 0xE2, 256, 257, 258, -1)] == ["a", "\ufffd", "né", "<T>", "", ""]
    assert set(engine._token_texts) == {97, 0xE2, 256, 257}


def test_a_state_holds_no_reference_to_its_engine():
    engine = TextEngine(tb())
    state, seen = engine.open(TextOptions(stops=("a",))), weakref.ref(engine)
    del engine
    gc.collect()
    assert seen() is None
    assert state.key()
