"""The n-gram model: counts against a plain dictionary, and what each sampling parameter does."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from headrace.runtime.markov import NgramModel, Sampling, join_paragraphs
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.lists(st.integers(0, 5), min_size=2, max_size=60)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def reference(text: list[int], context: list[int], order: int) -> Counter:
    """What the model's rule says, from a dictionary of all contexts."""
    tables: list[dict] = [defaultdict(Counter) for _ in range(order + 1)]
    for n in range(order + 1):
        for i in range(n, len(text)):
            tables[n][tuple(text[i - n : i])][text[i]] += 1
    known = [tables[n][tuple(context[len(context) - n :])] for n in range(min(order, len(context)), -1, -1)]
    lengths = list(range(min(order, len(context)), -1, -1))
    there = [(n, c) for n, c in zip(lengths, known, strict=True) if c]
    for n, counts in there:
        if n >= 2 and len(counts) > 1:
            return counts
    return there[0][1]


@given(TEXTS, st.lists(st.integers(0, 6), max_size=4), st.integers(1, 3))
def test_followers_are_the_counts_of_the_longest_context_that_has_a_choice(text, context, order):
    tokens, counts = NgramModel(text, order).followers(context)
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == dict(reference(text, context, order))
    assert sorted(counts.tolist(), reverse=True) == counts.tolist()


@given(TEXTS, st.lists(st.integers(0, 6), max_size=4), st.integers(0, 2**32))
def test_every_draw_is_a_follower_and_the_same_seed_draws_the_same(text, context, seed):
    model = NgramModel(text)
    drawn = model.sample(context, Sampling(), random(seed))
    assert drawn in model.followers(context)[0]
    assert drawn == model.sample(context, Sampling(), random(seed))


def test_ids_of_any_size_are_kept_apart():
    ids = [2**40, -1, 2**40, 7, 2**40, -1]
    tokens, counts = NgramModel(ids).followers([2**40])
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == {-1: 2.0, 7: 1.0}


def draws(how: Sampling, n: int = 4000, text: tuple[int, ...] = (1,) * 60 + (2,) * 30 + (3,) * 10) -> Counter:
    """Draws without context from tokens with these frequencies."""
    model, numbers = NgramModel(text, 1), random()
    return Counter(model.sample([], how, numbers) for _ in range(n))


def test_frequencies_follow_the_counts():
    seen = draws(Sampling())
    assert seen[1] / 4000 == pytest.approx(0.6, abs=0.04)
    assert seen[3] / 4000 == pytest.approx(0.1, abs=0.03)


def test_a_low_temperature_sharpens_and_a_high_one_flattens():
    assert draws(Sampling(temperature=0.5))[1] > draws(Sampling())[1] > draws(Sampling(temperature=5.0))[1]
    assert set(draws(Sampling(temperature=1e-6), 50)) == {1}
    assert draws(Sampling(temperature=1e6))[3] / 4000 == pytest.approx(1 / 3, abs=0.04)


def test_top_k_top_p_and_min_p_cut_the_tail():
    assert set(draws(Sampling(top_k=1), 50)) == {1}
    assert set(draws(Sampling(top_k=2))) == {1, 2}
    assert set(draws(Sampling(top_p=0.6), 200)) == {1}
    assert set(draws(Sampling(top_p=0.61))) == {1, 2}
    assert set(draws(Sampling(top_p=1e-9), 50)) == {1}
    assert set(draws(Sampling(min_p=0.4))) == {1, 2}
    assert set(draws(Sampling(min_p=1.0), 50)) == {1}


def test_banned_tokens_are_not_drawn_while_there_is_any_other():
    model = NgramModel([1, 2, 1, 2, 3, 3])
    assert model.sample([1], Sampling(), random(), frozenset({2})) in (1, 3)
    assert model.sample([1], Sampling(), random(), frozenset({1, 2})) == 3
    assert model.sample([1], Sampling(), random(), frozenset({1, 2, 3})) in (1, 2, 3)


@pytest.mark.parametrize(("ids", "order"), [([], 3), ([1], 3), ([1, 2], 0), ([1, 2], 4)])
def test_a_text_or_an_order_that_makes_no_model_is_refused(ids, order):
    with pytest.raises(ValueError, match=r"n-gram|order"):
        NgramModel(ids, order)


def test_paragraphs_end_with_eos_and_a_new_one_begins_on_a_new_line():
    assert join_paragraphs([[1, 2], [], [3]], 0, [9]).tolist() == [0, 9, 1, 2, 0, 9, 3, 0]
    assert join_paragraphs([[1, 2], [3]], None, [9]).tolist() == [9, 1, 2, 9, 3]
