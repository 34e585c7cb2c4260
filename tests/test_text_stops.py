"""Stop strings: what is held back, what is cut, and that streamed and whole text are the same."""

from __future__ import annotations

import itertools

import pytest
from headrace.codec.finish import Length, Stop, Unknown
from headrace.runtime.text import stops as stops_module
from headrace.runtime.text.engine import TextEngine, TextOptions
from headrace.runtime.text.stops import StopSet, StopSets, cut, without_stop_token
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import FFFD, chunkings, cut_at, stream, tb, tb_engine


def held_by_definition(text: str, stops: tuple[str, ...]) -> int:
    """The longest suffix of `text` that is a proper prefix of a stop, found by trying all of them."""
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


def model(chunks: list[str], stops: tuple[str, ...], matched: object, trim: bool = True) -> list[str]:
    """The rules read literally, on texts: deltas of a request whose last chunk is the terminal one."""
    deltas, text, sent = [], "", 0
    for chunk in chunks[:-1]:
        text += chunk
        end = max(sent, len(text) - held_by_definition(text, stops))
        deltas.append(text[sent:end])
        sent = end
    before, text = len(text), text + chunks[-1]
    end = len(text)
    if isinstance(matched, str) and matched:
        longest = max(map(len, (*stops, matched)))
        place = text.find(matched, max(sent, before - longest + 1))
        if place >= 0:
            end = place if trim else place + len(matched)
    assert end >= sent
    return [*deltas, text[sent:end]]


def run(
    chunks: list[str], stops: tuple[str, ...], finish: object, *, trim: bool = True, regexes: tuple[str, ...] = ()
) -> list[str]:
    """The same through the engine, one byte a token; checks the whole text against the streamed one."""
    options = TextOptions(stops=stops, stop_regexes=regexes, no_stop_trim=not trim)
    engine = tb_engine()
    ids = [list(chunk.encode()) for chunk in chunks]
    deltas = stream(engine, ids, finish, options)
    flat = list(itertools.chain(*ids))
    assert engine.whole(options, flat, len(flat) - len(ids[-1]), finish) == "".join(deltas)
    return deltas


def first_completed(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """(end, stop) of the stop that completes first, ties by list order: what a scheduler that checks every character names."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text.endswith(stop, 0, end):
                return end, stop
    return None


@pytest.mark.parametrize("streamed", [True, False])
def test_b40_a_stop_spread_over_chunks_is_held_back_and_never_shown(streamed):
    stop = " two three four"
    assert run([" one", " two", " three", " four"], (stop,), Stop(matched=stop)) == [" one", "", "", ""]
    assert run(["x<", "|e", "nd|>"], ("<|end|>",), Stop(matched="<|end|>")) == ["x", "", ""]
    if not streamed:
        engine = tb_engine(" one", " two", " three", " four")
        assert engine.whole(TextOptions(stops=(stop,)), [256, 257, 258, 259], 3, Stop(matched=stop)) == " one"


def test_b40_held_text_is_released_as_soon_as_it_cannot_become_a_stop():
    assert run(["x<", "|e", "xt", "ra"], ("<|end|>",), Length(4)) == ["x", "", "<|ext", "ra"]
    assert run(["ab", "ab", "ac", ""], ("ababac!",), None) == ["", "", "", "ababac"]
    assert run(["aab", ""], ("aac", "b!", "ab?"), None) == ["a", "ab"]


@pytest.mark.parametrize(
    "finish", [Length(3), None, Stop(matched=None), Unknown({"type": "tool_calls"}), Stop(matched=7), Stop(matched=[])]
)
def test_b40_held_text_is_released_at_a_finish_for_another_reason(finish):
    assert run(["x<", "|e"], ("<|end|>",), finish) == ["x", "<|e"]


def test_b42_the_leftmost_hit_in_the_unsearched_part_is_cut():
    assert run(["Done;;"], (";",), Stop(matched=";")) == ["Done"]
    assert run(["plan: END. ", "answer ", "END"], ("END",), Stop(matched="END")) == ["plan: END. ", "answer ", ""]
    assert run(["plan: END. ", "answer ", "EN", "D. END"], ("END",), Stop(matched="END")) == [
        "plan: END. ",
        "answer ",
        "",
        "",
    ]


def test_b42_the_stop_that_the_scheduler_names_is_the_one_that_is_cut():
    assert run(["abcd"], ("abcd", "bc"), Stop(matched="bc")) == ["a"]
    assert run(["abcd"], ("abcd", "bc"), Stop(matched="abcd")) == [""]
    assert run(["a", "b", "c"], ("abc", "bc"), Stop(matched="abc")) == ["", "", ""]
    assert run(["a", "b", "c"], ("bc", "abc"), Stop(matched="bc")) == ["", "", "a"]


def test_b42_a_stop_that_the_text_does_not_contain_changes_nothing():
    assert run(["ab", "cd"], ("xyz",), Stop(matched="xyz")) == ["ab", "cd"]
    assert run(["ab", "cd"], (), Stop(matched="bc")) == ["ab", "cd"]  # never held, so its beginning was sent
    assert run(["ab", "cde"], (), Stop(matched="d")) == ["ab", "c"]


def test_b42_a_stop_regex_finish_cuts_and_holds_nothing():
    assert run(["a|b", "\\d+", "12"], (), Stop(matched="\\d+"), regexes=("\\d+",)) == ["a|b", "\\d+", "12"]
    assert run(["x\\d+"], ("y",), Stop(matched="\\d+"), regexes=("\\d+",)) == ["x\\d+"]
    assert run(["xEND"], ("END",), Stop(matched="END"), regexes=("END",)) == ["x"]


def test_b17_an_empty_matched_stop_is_a_no_op():
    assert run(["ab", "cd"], (), Stop(matched="")) == ["ab", "cd"]
    assert StopSet(("",)).held("abc") == 0


@pytest.mark.parametrize("trim", [True, False])
def test_b45_text_beyond_the_stop_is_cut_and_a_matched_token_is_removed(trim):
    engine = TextEngine(tb(["STOP", "five", "six"], ["</s>"]))
    options = TextOptions(stops=("STOP",), no_stop_trim=not trim)
    assert stream(engine, [[97, 256, 98]], Stop(matched="STOP"), options) == ["a" if trim else "aSTOP"]
    five, six, end = 257, 258, 259
    for finish in (Stop(matched=end), Stop(matched=[end]), Stop(matched=six)):
        last = finish.matched if isinstance(finish.matched, int) else end
        shown = "fivesix" if last == end else "five"
        ids = [five, six, end] if last == end else [five, six]
        for skip in (True, False):
            keep = TextOptions(no_stop_trim=not trim, skip_special_tokens=skip)
            for chunks in chunkings(ids):
                assert "".join(stream(engine, chunks, finish, keep)) == shown
    assert stream(engine, [[five], [six, 98]], Stop(matched=[six, 98]), TextOptions()) == ["five", ""]
    assert stream(engine, [[five, six], [98]], Stop(matched=[six, 98]), TextOptions()) == ["fivesix", ""]


def test_b45_token_zero_is_a_match_and_ids_beyond_a_stop_token_have_no_text():
    assert without_stop_token([5, 0], 0) == [5]
    assert without_stop_token([5, 2, 6], 2) == [5]
    assert without_stop_token([2, 5, 2], 2) == [2, 5]
    assert without_stop_token([5, 6], 2) == [5, 6]
    assert without_stop_token([], 2) == []
    assert without_stop_token([5, 6, 7, 8], [6, 7]) == [5]
    assert without_stop_token([7], [6, 7]) == []
    assert without_stop_token([5, 6, 7], []) == [5, 6, 7]


def test_a_stop_can_end_in_what_the_flush_writes():
    engine = tb_engine()
    options = TextOptions(stops=("x" + FFFD,))
    assert stream(engine, [[*b"ax"], [0xE2]], Stop(matched="x" + FFFD), options) == ["a", ""]


def test_a_stop_inside_characters_split_over_tokens_is_held_by_characters():
    engine = tb_engine()
    options = TextOptions(stops=("한글",))
    ids = list("가한글".encode())
    for chunks in chunkings(ids[:6]):
        assert "".join(stream(engine, [*chunks, ids[6:]], Stop(matched="한글"), options)) == "가"


alphabet = st.sampled_from("ab")
words = st.text(alphabet, min_size=1, max_size=4)


@given(st.lists(words, min_size=1, max_size=4).map(tuple), st.text(alphabet, max_size=14), st.data())
def test_held_text_is_exactly_the_longest_proper_prefix_at_every_step(stops, text, data):
    chunks = [
        "".join(map(chr, chunk))
        for chunk in cut_at([*text.encode()], data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    ]
    assert run(chunks, stops, None) == model(chunks, stops, None)


@given(st.lists(words, min_size=1, max_size=4).map(tuple), st.text(alphabet, max_size=14), st.booleans(), st.data())
def test_any_named_stop_is_cut_as_the_rules_say_under_every_chunking(stops, text, trim, data):
    matched = data.draw(st.one_of(st.sampled_from(stops), words, st.just("")))
    chunks = [
        "".join(map(chr, chunk))
        for chunk in cut_at([*text.encode()], data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    ]
    assert run(chunks, stops, Stop(matched=matched), trim=trim) == model(chunks, stops, matched, trim)


@given(st.lists(words, min_size=1, max_size=4).map(tuple), st.text(alphabet, min_size=1, max_size=9), st.booleans())
def test_the_text_is_the_same_for_every_chunking_in_which_the_stop_completes_in_the_last_chunk(stops, text, trim):
    found = first_completed(text, stops)
    if found is None:
        assert {"".join(run(_texts(chunks), stops, Length(1))) for chunks in chunkings(text.encode())} == {text}
        return
    end, matched = found
    place = text.find(matched)
    assert place + len(matched) == end
    for beyond in ("", "a", "ba"):
        for chunks in chunkings(text[:end].encode()):
            got = _texts(chunks)
            got[-1] += beyond
            assert "".join(run(got, stops, Stop(matched=matched), trim=trim)) == (text[:place] if trim else text[:end])


def _texts(chunks: list[list[int]]) -> list[str]:
    return [bytes(chunk).decode() for chunk in chunks]


def test_every_text_over_two_letters_against_every_pair_of_short_stops():
    short = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("ab", repeat=size)]
    texts = ["".join(letters) for size in range(6) for letters in itertools.product("ab", repeat=size)]
    for stops in itertools.combinations(short, 2):
        stop_set = StopSet(stops)
        for text in texts:
            assert stop_set.held(text) == held_by_definition(text, stops)


def test_the_work_is_linear_in_the_text(monkeypatch):
    looked = 0

    def counting(ordered, suffix):
        nonlocal looked
        looked += 1
        return real(ordered, suffix)

    real = stops_module.bisect_right
    monkeypatch.setattr(stops_module, "bisect_right", counting)
    stop_set = StopSet(("a" * 1000 + "b", "a" * 500 + "c"))
    held, length = "", 0
    for text in (["a"] * 3000 + ["x"]) * 2:
        held += text
        size = stop_set.held(held)
        held, length = held[len(held) - size :], length + len(text)
    assert looked <= 2 * length
    looked = 0
    stop_set.held("a" * 1_000_000)
    assert looked <= 1001  # only the end of a long chunk can matter


def test_the_cache_of_stop_sets_is_bounded_and_what_it_drops_keeps_working():
    sets = StopSets(size=4)
    first = sets.get(("ab",))
    assert sets.get(("ab",)) is first
    assert sets.get(()) is None
    first.held_of_fresh("xa")
    assert first.memo
    for n in range(10):
        sets.get((f"stop{n}",))
        assert len(sets._sets) <= 4
    assert not first.memo
    assert first.held_of_fresh("xa") == 1
    assert not first.memo


def test_the_memory_of_a_stop_set_is_bounded():
    stop_set = StopSet(("ab",))
    for n in range(stops_module.MEMO_SIZE + 10):
        stop_set.held_of_fresh(f"{n}a")
    stop_set.held_of_fresh("x" * 1000 + "a")
    assert len(stop_set.memo) == stops_module.MEMO_SIZE


def test_mutant_hold_back_one_too_short_is_noticed(monkeypatch):
    real = StopSet.held
    monkeypatch.setattr(StopSet, "held", lambda self, text: max(0, real(self, text) - 1))
    with pytest.raises(AssertionError):
        test_b40_a_stop_spread_over_chunks_is_held_back_and_never_shown(True)


def test_mutant_hold_back_one_too_long_is_noticed(monkeypatch):
    real = StopSet.held
    monkeypatch.setattr(StopSet, "held", lambda self, text: min(len(text), real(self, text) + 1))
    with pytest.raises(AssertionError):
        test_b40_a_stop_spread_over_chunks_is_held_back_and_never_shown(True)


def test_mutant_the_rightmost_stop_is_noticed(monkeypatch):
    def rightmost(text, matched, stops, stop_regexes, no_stop_trim):
        return text[: text.rfind(matched)]

    monkeypatch.setattr("headrace.runtime.text.engine.cut", rightmost)
    with pytest.raises(AssertionError):
        test_b42_the_leftmost_hit_in_the_unsearched_part_is_cut()


def test_mutant_a_search_of_the_whole_text_is_noticed(monkeypatch):
    real = TextEngine._hold

    def mutant(self, state, stops, new):
        sent = real(self, state, stops, new)
        state.held = sent + state.held  # as if nothing had been sent
        return sent

    monkeypatch.setattr(TextEngine, "_hold", mutant)
    with pytest.raises(AssertionError):
        test_b42_the_leftmost_hit_in_the_unsearched_part_is_cut()


def test_cut_leaves_a_text_alone_that_does_not_hold_the_stop():
    assert cut("abc", "x", ("x",), (), False) == "abc"
    assert cut("abc", "b", ("b",), (), True) == "ab"
