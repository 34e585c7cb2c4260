"""Stops as a scheduler sees them: which one wins, when none may, and the same over every kind of token boundary."""

import re

import pytest
from headrace import specs
from headrace.codec.sampling import SamplingParams
from headrace.runtime.markov import NgramModel, join_paragraphs
from headrace.runtime.schedulers import EchoScheduler, MarkovScheduler
from headrace.runtime.stops import StopWatch
from headrace.runtime.text.engine import TextEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from schedulers_helpers import VOCAB, FakePort, run_dry
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(specs.path("data", "tokenizer.json")))
ENGINE = TextEngine(TOKENIZER)


def watch(eos=(), **params) -> StopWatch:
    return StopWatch(SamplingParams(**params).normalize(vocab_size=VOCAB), eos, ENGINE)


def first(ids, eos=(), **params):
    """(how many tokens were seen, the finish reason) of the first stop in `ids`."""
    watcher = watch(eos, **params)
    for n, token in enumerate(ids, 1):
        if (reason := watcher.see(token)) is not None:
            return n, reason["matched"]
    return len(ids), None


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def reference(pieces: list[str], stops: list[str], least: int):
    """The first stop to complete in the text of `pieces`, judged piece by piece."""
    text = ""
    for n, piece in enumerate(pieces, 1):
        old, text = len(text), text + piece
        found = []
        for order, stop in enumerate(stops):
            ends = [i + len(stop) for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > old]
            if ends:
                found.append((min(ends), order))
        if found and n >= least:
            return n, stops[min(found)[1]]
    return len(pieces), None


@settings(max_examples=200)
@given(
    st.text("ab ", max_size=20),
    st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
)
def test_of_stop_strings_the_first_to_complete_wins_and_ties_go_by_list_order(text, stops, least):
    ids = encode(text)
    pieces = [TOKENIZER.decode([i]) for i in ids]
    assert first(ids, stop=stops, min_new_tokens=least) == reference(pieces, stops, least)


def test_within_one_token_the_stop_that_ends_first_wins_whatever_the_list_order():
    ids = encode("Is there")
    assert [TOKENIZER.decode([i]) for i in ids] == ["Is", " there"]
    assert first(ids, stop=["here", "th"]) == (2, "th")
    assert first(ids, stop=["th", "here"]) == (2, "th")
    assert first(ids, stop=["re", "ere"]) == (2, "re")


def test_a_stop_spread_over_tokens_and_over_the_bytes_of_a_character_is_found_when_it_completes():
    ids = encode("It is 日本 now")
    n, matched = first(ids, stop=["s 日本"])
    assert matched == "s 日本"
    assert TOKENIZER.decode(ids[:n]).endswith("日本")
    assert "本" not in TOKENIZER.decode(ids[: n - 1])


def test_a_stop_pattern_matches_over_token_boundaries_and_names_itself():
    ids = encode("The year was 1813, and so on")
    n, matched = first(ids, stop_regex=[r"\d{4}"])
    assert matched == r"\d{4}"
    assert TOKENIZER.decode(ids[:n]).endswith("1813")


def test_an_unbounded_pattern_looks_back_over_the_whole_text():
    ids = encode("<" + " word" * 50 + ">")
    assert first(ids, stop_regex=["<[^>]+>"]) == (len(ids), "<[^>]+>")


def test_a_string_wins_over_a_pattern_that_ends_at_the_same_place():
    assert first(encode("abc"), stop=["abc"], stop_regex=["[a-c]{3}"])[1] == "abc"


@pytest.mark.parametrize(
    ("params", "stops_at"),
    [
        ({"stop_token_ids": [7]}, 3),
        ({"stop_token_ids": [7], "min_new_tokens": 4, "ignore_eos": True}, 5),
        ({"stop_token_ids": [7], "ignore_eos": True}, 3),
        ({}, 4),
        ({"ignore_eos": True}, None),
        ({"min_new_tokens": 6}, 6),
    ],
)
def test_stop_tokens_and_eos_heed_the_minimum_and_ignore_eos_only_means_eos(params, stops_at):
    n, matched = first([5, 6, 7, 9, 7, 9], eos=(9,), **params)
    assert (n if matched is not None else None) == stops_at


def test_without_any_stop_nothing_is_watched():
    assert not watch().needed
    assert watch(stop=["x"]).needed
    assert watch(eos=(1,)).needed
    assert not watch(eos=(1,), ignore_eos=True).needed


def test_without_a_tokenizer_stop_strings_cannot_be_seen_but_stop_tokens_can():
    params = SamplingParams(stop=["a"], stop_token_ids=[3]).normalize(vocab_size=VOCAB)
    watcher = StopWatch(params, (), None)
    assert watcher.see(TOKENIZER.token_to_id("a")) is None
    assert watcher.see(3) == {"type": "stop", "matched": 3}


def test_an_id_that_is_no_token_has_no_text_and_breaks_nothing():
    watcher = watch(stop=["ab"])
    assert watcher.see(VOCAB + 5) is None


# ---- in the schedulers


def test_echo_stops_at_a_stop_string_and_a_limit_outranks_it():
    port = FakePort()
    ids = encode("It is a truth universally acknowledged")
    stopped = port.generate("a", ids, stop="truth")
    limited = port.generate("b", ids, stop="truth", max_new_tokens=4)
    other = port.generate("c", ids)
    run_dry(EchoScheduler(port, tokenizer=TOKENIZER))
    assert TOKENIZER.decode(port.ids(stopped)) == "It is a truth"
    assert port.ends(stopped) == [{"type": "stop", "matched": "truth"}]
    assert port.ends(limited) == [{"type": "length", "length": 4}]
    assert port.ids(other) == ids


@pytest.fixture(scope="module")
def model():
    paragraphs = [
        e.ids for e in TOKENIZER.encode_batch(specs.path("data", "text.txt").read_text("utf-8").splitlines()[:400])
    ]
    return NgramModel(join_paragraphs(paragraphs, 0, encode("\n")))


def continued(model, prompts, **params):
    """What a MarkovScheduler gives for `prompts` in one batch: (ids, finish reasons) per prompt."""
    port = FakePort()
    rids = [port.generate(f"r{n}", encode(prompt), **params) for n, prompt in enumerate(prompts)]
    run_dry(MarkovScheduler(port, model, tokenizer=TOKENIZER, eos_token_ids=(0,), max_batch=3))
    return [(port.ids(rid), port.ends(rid)) for rid in rids]


def test_markov_is_a_function_of_prompt_and_seed_whatever_else_runs(model):
    alone = continued(model, ["Mr. Darcy"], sampling_seed=5, max_new_tokens=40)[0]
    beside = continued(model, ["Elizabeth", "Mr. Darcy", "Jane", "Mr. Darcy"], sampling_seed=5, max_new_tokens=40)
    assert beside[1] == beside[3] == alone
    assert continued(model, ["Mr. Darcy"], sampling_seed=6, max_new_tokens=40)[0] != alone
    assert continued(model, ["Mr. Darcy"], sampling_seed=-5, max_new_tokens=40)[0] != alone


def test_markov_without_a_seed_can_be_repeated_and_gives_equal_prompts_different_answers(model):
    one, two = continued(model, ["Mr. Darcy"] * 2, max_new_tokens=40)
    assert one != two
    assert continued(model, ["Mr. Darcy"] * 2, max_new_tokens=40) == [one, two]


def test_markov_greedy_needs_no_seed(model):
    one, two = continued(model, ["Mr. Darcy"] * 2, temperature=0, max_new_tokens=20)
    assert one == two


def test_markov_ends_at_eos_at_the_limit_or_at_a_stop_string_and_never_before_the_minimum(model):
    for ids, ends in continued(
        model, ["It is a", "Mr.", "She was"] * 10, max_new_tokens=30, min_new_tokens=10, stop=[",", "."]
    ):
        assert 10 <= len(ids) <= 30
        assert 0 not in ids[:9], "the end of the text is not even drawn before the minimum"
        (end,) = ends
        if end["type"] == "length":
            assert len(ids) == 30
        elif end["matched"] == 0:
            assert ids[-1] == 0
        else:
            assert end["matched"] in TOKENIZER.decode(ids[-1:])
    seen = {
        str(ends[0].get("matched"))
        for _, ends in continued(model, ["It is a", "Mr."] * 10, max_new_tokens=8, stop=["."])
    }
    assert {"None", "."} <= seen


def test_markov_ignoring_eos_goes_on_with_a_new_paragraph(model):
    (ids, ends), *_ = continued(model, ["He made no answer."], ignore_eos=True, max_new_tokens=200)
    assert len(ids) == 200
    assert ends == [{"type": "length", "length": 200}]
    assert re.search(r".\n.", TOKENIZER.decode(ids))
