"""Characters: one text for every way of cutting the ids, on toy tokenizers of each kind."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.codec.errors import DetokenizeError, ValidationError
from headrace.runtime.text.engine import TextEngine, TextOptions
from headrace.runtime.text.vocabulary import EACH_BYTE
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import (
    FFFD,
    End,
    byte_fallback_oracle,
    chunkings,
    cut_at,
    stream,
    tb,
    tb_engine,
    texts,
    tf,
    tf_engine,
)
from tokenizers import Tokenizer, decoders, models

KEEP = TextOptions(skip_special_tokens=False)
BROKEN = [b"\xf0\x9f", b"\x9f\x91", b"\xff\xfe", b"\xe2\x82", b"\xac\xac", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90"]
PIECES = ["▁", "▁leading", "▁x", "a", "é", "漢字", "▁▁▁", "x▁y", "\ufffd"]


def every_chunking(engine: TextEngine, ids: list[int], options: TextOptions | None = None) -> set[str]:
    got = {"".join(stream(engine, chunks, options=options)) for chunks in chunkings(ids)}
    whole = {engine.whole(options or TextOptions(), np.array(ids), start, None) for start in range(len(ids) + 1)}
    return got | whole


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (bytes.fromhex("F09F918B"), "👋"),
        (bytes.fromhex("F09F9982F09F9982"), "🙂🙂"),
        (bytes.fromhex("ED959C"), "한"),
        ("a한🙂b".encode(), "a한🙂b"),
    ],
)
@pytest.mark.parametrize("make", [tb_engine, tf_engine])
def test_b33_a_split_character_appears_once_and_whole(make, data, text):
    assert every_chunking(make(), list(data)) == {text}


def test_b33_nothing_is_shown_before_the_last_byte_of_a_character():
    assert stream(tb_engine(), [[0xF0], [0x9F], [0x91], [0x8B], []]) == ["", "", "", "👋", ""]
    assert stream(tb_engine(), [[*bytes.fromhex("F09F9982F09F99")], [0x82], []]) == ["🙂", "🙂", ""]


@pytest.mark.parametrize(
    ("make", "ids", "finish", "text"),
    [
        (tb_engine, [*b"Hi\xf0\x9f"], None, "Hi" + FFFD),
        (tf_engine, [*b"Hi\xf0\x9f"], None, "Hi" + FFFD * 2),
        (tb_engine, [*b"Hi\xf0\x9f", 33], End(33), "Hi" + FFFD),
        (tf_engine, [*b"Hi\xf0\x9f", 33], End(33), "Hi" + FFFD * 2),
        (tb_engine, [*b"\xef\xbf\xbda"], None, FFFD + "a"),
        (tb_engine, [*b"\xef\xbf\xbd"], None, FFFD),
        (tf_engine, [*b"\xef\xbf\xbda"], None, FFFD + "a"),
    ],
)
def test_b34_the_end_inside_a_character_flushes_what_a_full_decode_gives(make, ids, finish, text):
    for chunks in chunkings(ids):
        assert "".join(stream(make(), chunks, finish)) == text


def test_b34_a_real_replacement_character_is_not_held():
    assert stream(tb_engine(), [[*b"\xef\xbf\xbd"], [97], []]) == [FFFD, "a", ""]


def test_b35_an_invalid_byte_does_not_poison_the_rest():
    engine = tb_engine(" a")
    assert every_chunking(engine, [0xFF, 256]) == {FFFD + " a"}
    engine = tf_engine("a")
    assert every_chunking(engine, [0xF0, 0x9F, 0x91, 0x8B, 0xFF, 256]) == {"👋" + FFFD + "a"}


def test_b37_the_leading_space_is_stripped_once_and_from_the_first_text_only():
    engine = tf_engine(*PIECES)
    space, leading, x = 256, 257, 258
    assert every_chunking(engine, [space, leading, x]) == {" leading x"}
    assert every_chunking(engine, [leading, x]) == {"leading x"}
    assert every_chunking(engine, [engine.vocab_limit - 1, leading, x]) == {
        "leading x"
    }  # a skipped token is no first text
    assert every_chunking(engine, [engine.vocab_limit - 1, leading, x], KEEP) == {"<T> leading x"}


def test_b37_a_byte_level_space_is_kept_wherever_it_stands():
    engine = TextEngine(tb([" a", b""], ["<T>"]))
    special = engine.vocab_limit - 1
    for before in ([], [special], [257], [257, special, 257]):
        assert every_chunking(engine, [*before, 256]) == {" a"}


@pytest.mark.parametrize("bad", [-1, -(2**31), 300, 302, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("rows", [2, 40, 100])
def test_b38_an_id_that_is_no_token_fails_its_own_row_and_is_named(bad, rows):
    engine = TextEngine(tb(size=299, specials=["<T>"]))
    assert engine.vocab_limit == 300
    states = [engine.open(TextOptions()) for _ in range(rows)]
    ids = np.full(rows, 97, dtype=np.int64)
    ids[rows - 2] = bad
    deltas, wrong = engine.feed(states, ids, list(range(rows + 1)))
    assert wrong == [(rows - 2, bad)]
    assert deltas == ["a"] * (rows - 2) + ["", "a"]
    deltas, wrong = engine.feed(states[-2:], np.array([97, bad, 97, 97]), np.array([0, 2, 4]))
    assert (deltas, wrong) == (["", "aa"], [(0, bad)])
    for call in (
        lambda: engine.finish(states[0], [97, bad], None),
        lambda: engine.whole(TextOptions(), [bad, 97], 1, None),
        lambda: engine.whole(TextOptions(), [97, bad], 1, None),
    ):
        with pytest.raises(DetokenizeError, match=f" {bad},"):
            call()
    assert engine.feed_plain([97, bad]) == ["a", None]
    assert list(engine.feed_plain([97] * 20 + [bad])) == ["a"] * 20 + [None]
    assert engine.token_text(bad) == ""


def test_b38_a_hole_in_the_vocabulary_is_no_token():
    vocab = {"a": 0, "b": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    engine = TextEngine(tokenizer)
    assert engine.feed([engine.open(TextOptions())], np.array([1]), [0, 1]) == ([""], [(0, 1)])
    assert engine.decode([0, 1, 2]) == "ab"


def test_b39_options_hold_for_their_own_row_in_any_order():
    engine = TextEngine(tb(size=301, specials=["<T>"]))
    skip, keep = TextOptions(), KEEP
    for order in ([skip, keep], [keep, skip], [keep] * 9 + [skip] * 9):
        states = [engine.open(options) for options in order]
        deltas, bad = engine.feed(states, np.full(len(order), 301, dtype=np.int32), list(range(len(order) + 1)))
        assert not bad
        assert deltas == ["<T>" if options is keep else "" for options in order]


@given(st.booleans(), st.lists(st.integers(0, 255 + len(BROKEN) + 3), max_size=12), st.data())
def test_byte_level_text_is_the_tokenizers_own_decode_under_every_chunking(skip, ids, data):
    engine = tb_engine(*BROKEN, "né")
    options = TextOptions(skip_special_tokens=skip, spaces_between_special_tokens=data.draw(st.booleans()))
    ids = [i % engine.vocab_limit for i in ids]
    chunks = cut_at(ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    expected = engine.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(engine, chunks, options=options)) == expected
    assert engine.whole(options, ids, data.draw(st.integers(0, len(ids))), None) == expected


@given(texts, st.data())
def test_valid_text_comes_out_whole_whatever_the_tokens(text, data):
    encoded = text.encode()
    cuts = data.draw(st.sets(st.integers(0, len(encoded)), max_size=8))
    for engine in (tb_engine(), tf_engine()):
        assert "".join(stream(engine, cut_at(list(encoded), cuts))) == text.removeprefix(
            " " if engine.kind == "byte-fallback" else ""
        )


@given(
    st.lists(st.one_of(st.integers(0, 255), st.integers(256, 256 + len(PIECES))), max_size=12), st.booleans(), st.data()
)
def test_byte_fallback_text_follows_the_rules_read_literally(ids, skip, data):
    engine = tf_engine(*PIECES)
    special = engine.vocab_limit - 1
    options = TextOptions(skip_special_tokens=skip)
    pieces: list[bytes | str] = []
    for i in ids:
        if i < 256:
            pieces.append(bytes([i]))
        elif i != special:
            pieces.append(PIECES[i - 256].replace("▁", " "))
        elif not skip:
            pieces.append("<T>")
    expected = byte_fallback_oracle(pieces)
    chunks = cut_at(ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    assert "".join(stream(engine, chunks, options=options)) == expected
    assert engine.whole(options, ids, 0, None) == expected
    if expected.count(FFFD) == ids.count(256 + PIECES.index(FFFD)):  # all bytes are valid: the library agrees
        assert expected == engine.decode(ids, skip_special_tokens=skip)


def fallback_tokenizers() -> dict[str, Tokenizer]:
    words = ["[UNK]", "hello", "##ing", "world", ",", ".", "n", "##'t", "▁a", "▁b", "c", "▁", "xx</w>", "y"]
    found = {}
    for name, decoder in {
        "wordpiece": decoders.WordPiece(),
        "metaspace": decoders.Metaspace(),
        "bpe-suffix": decoders.BPEDecoder(),
        "ctc": decoders.CTC(),
        "no decoder": None,
        "replace only": decoders.Replace("▁", " "),
    }.items():
        tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
        if decoder is not None:
            tokenizer.decoder = decoder
        tokenizer.add_special_tokens(["<T>"])
        found[name] = tokenizer
    return found


@pytest.mark.parametrize("name", sorted(fallback_tokenizers()))
def test_an_unknown_decoder_falls_back_says_why_and_streams_alike_under_every_chunking(name):
    tokenizer = fallback_tokenizers()[name]
    engine = TextEngine(tokenizer)
    assert engine.kind == "fallback"
    assert engine.reason

    @given(st.lists(st.integers(0, engine.vocab_limit - 1), max_size=7), st.booleans())
    def check(ids, skip):
        options = TextOptions(skip_special_tokens=skip)
        got = every_chunking(engine, ids, options)
        assert len(got) == 1
        if name not in ("wordpiece", "bpe-suffix"):  # these take back text when more follows
            assert got == {tokenizer.decode(ids, skip_special_tokens=skip)}

    check()


def test_the_fallback_holds_an_unfinished_character_and_never_for_ever():
    tokenizer = tb()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("~", "~")])
    engine = TextEngine(tokenizer)
    assert engine.kind == "fallback"
    assert every_chunking(engine, [*"é👋b".encode()]) == {"é👋b"}
    state = engine.open(TextOptions())
    for _ in range(50):
        engine.feed([state], np.array([0xFF]), [0, 1])
        assert len(state.window[0]) <= 8
    assert stream(engine, [[0xFF]] * 9 + [[97]])[-1].endswith("a")


def test_the_fallback_window_stays_bounded_where_ids_have_no_text():
    tokenizer = fallback_tokenizers()["ctc"]
    engine = TextEngine(tokenizer)
    state = engine.open(TextOptions())
    for _ in range(100):
        engine.feed([state], np.array([1]), [0, 1])
    assert len(state.window[0]) <= 17


def test_a_decoder_that_raises_ends_only_its_own_request(monkeypatch):
    engine = TextEngine(fallback_tokenizers()["metaspace"])
    good = engine._tokenizer

    class Raising:
        def decode(self, ids, skip_special_tokens):
            if 3 in ids:
                raise RuntimeError("no")
            return good.decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(engine, "_tokenizer", Raising())
    states = [engine.open(TextOptions()) for _ in range(3)]
    deltas, bad = engine.feed(states, np.array([1, 3, 1]), [0, 1, 2, 3])
    assert (deltas, bad) == (["hello", "", "hello"], [(1, 3)])
    with pytest.raises(DetokenizeError):
        engine.finish(states[0], [3], None)


def test_a_decoder_that_panics_ends_only_its_own_request():
    tokenizer = tf(["a"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    tokenizer.decoder = decoders.Sequence(
        steps
    )  # this version of the library panics when there is nothing to strip from
    engine = TextEngine(tokenizer)
    assert engine.kind == "fallback"
    with pytest.raises(DetokenizeError):
        engine.decode([])


def test_an_interrupt_inside_a_decoder_is_no_fault_of_the_request(monkeypatch):
    class Interrupted:
        def decode(self, ids, skip_special_tokens):
            raise KeyboardInterrupt

    engine = TextEngine(fallback_tokenizers()["metaspace"])
    monkeypatch.setattr(engine, "_tokenizer", Interrupted())
    for call in (
        lambda: engine.feed([engine.open(TextOptions())], np.array([1]), [0, 1]),
        lambda: engine.finish(engine.open(TextOptions()), [1], None),
        lambda: engine.decode([1]),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()


def test_b35_a_fallback_decoder_that_takes_back_text_does_not_lose_what_follows():
    tokenizer = tf(["a"])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    engine = TextEngine(tokenizer)
    assert engine.kind == "fallback"
    assert every_chunking(engine, [0xF0, 0x9F, 0x91, 0x8B, 0xFF, 256]) == {"👋" + FFFD + "a"}


def test_an_empty_piece_in_byte_fallback_ends_a_run_of_bytes_as_in_the_library():
    tokenizer = tf(["", "a"])
    engine = TextEngine(tokenizer)
    assert engine.kind == "fallback"
    assert "empty" in engine.reason
    for ids in ([0xE2, 256, 0x82, 0xAC, 257], [256, 257], [0xE2, 0x82, 0xAC, 256, 257]):
        assert every_chunking(engine, ids) == {tokenizer.decode(ids)}


def test_where_two_tokens_share_an_id_the_librarys_own_look_up_decides():
    for tokens in ("bc", "cb"):
        tokenizer = Tokenizer(models.WordLevel({"a": 0, tokens[0]: 1, tokens[1]: 1}, unk_token="a"))
        tokenizer.decoder = decoders.ByteLevel()
        engine = TextEngine(tokenizer)
        assert engine.kind == "byte-level"
        assert every_chunking(engine, [0, 1]) == {tokenizer.decode([0, 1])}


def test_decoders_that_lie_about_their_vocabulary_are_not_trusted(monkeypatch):
    monkeypatch.setattr("headrace.runtime.text.vocabulary.byte_level_bytes", lambda token: token.encode())
    engine = TextEngine(tb())
    assert engine.kind == "fallback"
    assert "otherwise" in engine.reason
    assert "".join(stream(engine, [[*"é".encode()]])) == "é"


def test_without_a_tokenizer_ids_pass_and_texts_are_empty():
    engine = TextEngine(None)
    assert (engine.kind, engine.vocab_limit) == ("none", 0)
    states = [engine.open(TextOptions()) for _ in range(20)]
    assert engine.feed(states, np.full(20, -1), list(range(21))) == ([""] * 20, [])
    assert engine.feed(states[:1], np.array([1, 2**31 - 1]), [0, 2]) == ([""], [])
    assert list(engine.feed_plain([-5] * 20)) == [""] * 20
    assert (
        engine.finish(states[0], [7], End("x"))
        == engine.whole(TextOptions(), [1], 0, None)
        == engine.token_text(1)
        == ""
    )
    with pytest.raises(ValidationError):
        engine.decode([1])


def test_added_tokens_with_foreign_characters_stand_for_themselves():
    tokenizer = tb(specials=["<｜User｜>"])
    tokenizer.add_tokens(["tool▁call", "éñ"])
    engine = TextEngine(tokenizer)
    assert engine.kind == "byte-level"
    ids = [256, 257, 258, 97]
    for skip in (True, False):
        options = TextOptions(skip_special_tokens=skip)
        assert every_chunking(engine, ids, options) == {tokenizer.decode(ids, skip_special_tokens=skip)}


def test_odd_byte_tokens_are_read_as_the_library_reads_them():
    tokenizer = tf(["<0x+5>", "<0xé>", "<0xG1>", "<0x 1>", "<0x_1>", "<0x▁1>", "<0xaF>", "a"])
    engine = TextEngine(tokenizer)
    assert engine.kind == "byte-fallback"
    for i in range(256, engine.vocab_limit):
        assert engine.token_text(i) == tokenizer.decode([i], skip_special_tokens=False)
        assert every_chunking(engine, [i, engine.vocab_limit - 1]) == {tokenizer.decode([i, engine.vocab_limit - 1])}


def test_special_is_what_the_text_of_a_token_says_as_in_the_library():
    engine = tb_engine()
    special = engine.vocab_limit - 1
    assert engine.token_text(special) == "<T>"
    assert engine.decode([special]) == ""
    assert engine.decode([special], skip_special_tokens=False) == "<T>"


def test_mutant_a_forgotten_flush_is_noticed(monkeypatch):
    monkeypatch.setattr(TextEngine, "_flush", lambda self, state: "")
    with pytest.raises(AssertionError):
        test_b34_the_end_inside_a_character_flushes_what_a_full_decode_gives(
            tb_engine, [*b"Hi\xf0\x9f"], None, "Hi" + FFFD
        )


def test_mutant_one_skip_flag_for_the_whole_batch_is_noticed(monkeypatch):
    real = TextEngine.feed_single

    def mutant(self, states, ids):
        for state in states:
            state.options = states[0].options
        return real(self, states, ids)

    monkeypatch.setattr(TextEngine, "feed_single", mutant)
    with pytest.raises(AssertionError):
        test_b39_options_hold_for_their_own_row_in_any_order()


def test_mutant_a_space_stripped_while_the_text_is_empty_is_noticed(monkeypatch):
    monkeypatch.setattr(
        "headrace.runtime.text.engine.strip_lead",
        lambda text, rules, left: (text.lstrip(" "), int(not text.strip(" "))),
    )
    with pytest.raises(AssertionError):
        test_b37_the_leading_space_is_stripped_once_and_from_the_first_text_only()


def test_mutant_one_mark_per_broken_sequence_in_byte_fallback_is_noticed(monkeypatch):
    monkeypatch.setattr(tf_engine(), "_errors", "replace")
    with pytest.raises(AssertionError):
        test_b34_the_end_inside_a_character_flushes_what_a_full_decode_gives(
            tf_engine, [*b"Hi\xf0\x9f"], None, "Hi" + FFFD * 2
        )


def test_the_error_handler_serves_decoding_only():
    assert b"\xe2\x82a\xff".decode("utf-8", EACH_BYTE) == FFFD * 2 + "a" + FFFD
    with pytest.raises(UnicodeEncodeError):
        "\ud800".encode("utf-8", EACH_BYTE)
