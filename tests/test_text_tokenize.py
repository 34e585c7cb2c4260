"""Text to ids: loading, the back ends, the self-check of the fast one, and the bound on bytes per token."""

from __future__ import annotations

import logging
import os
import sys
import types
import unicodedata

import numpy as np
import pytest
from headrace.codec.errors import TokenizeError, ValidationError
from headrace.runtime.text import tokenize
from headrace.runtime.text.tokenize import (
    CORPUS,
    NFC_SHRINKS,
    FastokensBackend,
    TokenizersBackend,
    choose_backend,
    differs,
    load_tokenizer,
    max_token_bytes,
    self_check_texts,
)
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import SCRIPTS, tb, texts, tf
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers


def test_a_tokenizer_is_loaded_from_a_file_or_a_directory(tmp_path):
    tb(["né"]).save(str(tmp_path / "tokenizer.json"))
    for source in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert load_tokenizer(source).decode([256]) == "né"


def test_what_is_no_tokenizer_is_refused_in_one_clear_line(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for source in (
        tmp_path / "bad.json",
        tmp_path / "empty",
        tmp_path / "missing.json",
        "no/such",
        "",
        "a\0b",
        "x\ud800",
    ):
        with pytest.raises(ValidationError) as caught:
            load_tokenizer(source)
        assert caught.value.field == "tokenizer"
        assert "\n" not in str(caught.value)
        str(caught.value).encode()


def test_truncation_and_padding_of_a_tokenizer_file_are_switched_off_without_touching_the_users_object(tmp_path):
    clipped = tb()
    clipped.enable_truncation(2)
    clipped.enable_padding(length=5)
    clipped.save(str(tmp_path / "tokenizer.json"))
    for source in (clipped, tmp_path):
        assert TokenizersBackend(load_tokenizer(source)).encode_batch(["abcd", "a"], True)[0].tolist() == [
            97,
            98,
            99,
            100,
        ]
    assert clipped.truncation is not None
    plain = tb()
    assert load_tokenizer(plain) is plain


def test_a_batch_gives_int64_ids_in_order_with_special_tokens_as_asked():
    tokenizer = tb(specials=["<s>"])
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend = TokenizersBackend(tokenizer)
    for special, head in ((True, [256]), (False, [])):
        got = backend.encode_batch(["ab", "", "é\0"], special)
        assert [ids.tolist() for ids in got] == [[*head, 97, 98], head, [*head, 0xC3, 0xA9, 0]]
        assert {ids.dtype for ids in got} == {np.dtype(np.int64)}
    assert backend.encode_batch([], True) == []
    assert backend.name == "tokenizers"


@pytest.mark.parametrize("most", [0, 2, 1 << 16])
def test_ids_of_a_batch_are_the_librarys_own_whatever_the_lengths(monkeypatch, most):
    monkeypatch.setattr(tokenize, "_PACKED", most)
    rows = [[], [(1 << 32) - 1, 0], [5], [], [1, 2, 3], []]
    found = tokenize._cut(rows)
    assert [ids.tolist() for ids in found] == rows
    assert all(ids.dtype == np.int64 and ids.flags.c_contiguous for ids in found)
    assert tokenize._cut([]) == []


def test_a_text_that_cannot_be_encoded_is_a_tokenize_error():
    with pytest.raises(TokenizeError):
        TokenizersBackend(tb()).encode_batch(["ok", "\ud800"], True)
    with pytest.raises(TokenizeError):
        FastokensBackend(None).encode_batch(["ok"], True)


class FakeFast:
    """Looks like a fastokens tokenizer; may answer wrongly."""

    fault: object = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_json_str(cls, text: str) -> FakeFast:
        if cls.fault == "load":
            raise ValueError("unsupported")
        return cls(Tokenizer.from_str(text))

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        if self.fault == "raise":
            raise RuntimeError("no")
        ids = [
            encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        ]
        if self.fault == "script":
            ids = [[0] if "हं" in text or "ऋ" in text else row for row, text in zip(ids, texts, strict=True)]
        elif self.fault == "together" and len(ids) > 1:
            ids.reverse()
        elif self.fault == "short":
            ids = ids[:-1]
        bounds = np.cumsum([0, *map(len, ids)]).astype("<u8")
        return np.array([i for row in ids for i in row], dtype="<u4").tobytes(), bounds.tobytes()


@pytest.fixture
def fake_fast(monkeypatch):
    kind = type("FakeFastHere", (FakeFast,), {})
    monkeypatch.setitem(sys.modules, "fastokens", types.SimpleNamespace(Tokenizer=kind))
    return kind


def test_the_fast_back_end_is_used_where_its_ids_are_equal(fake_fast):
    tokenizer = tb(["né", "क"], ["<T>"])
    backend = choose_backend(tokenizer)
    assert backend.name == "fastokens"
    assert [ids.tolist() for ids in backend.encode_batch(["ab", "", "<T>é"], True)] == [
        [97, 98],
        [],
        [257 + 1, 0xC3, 0xA9],
    ]
    assert backend.encode_batch(["ab"], True)[0].dtype == np.int64
    assert choose_backend(tokenizer, fast=False).name == "tokenizers"


@pytest.mark.parametrize("fault", ["load", "raise", "script", "together", "short"])
def test_mutant_a_fast_back_end_with_other_ids_is_refused_with_a_logged_reason(fake_fast, fault, caplog):
    fake_fast.fault = fault
    with caplog.at_level(logging.WARNING, "headrace"):
        assert choose_backend(tb(["né"])).name == "tokenizers"
    assert len(caplog.records) == 1
    assert "fastokens" in caplog.text


@pytest.mark.parametrize("own", [None, "3"])
def test_the_fast_library_works_on_the_workers_thread_unless_somebody_says_otherwise(monkeypatch, fake_fast, own):
    if own is None:
        monkeypatch.delenv("FASTOKENS_BPE_THREADS", raising=False)
    else:
        monkeypatch.setenv("FASTOKENS_BPE_THREADS", own)
    assert choose_backend(tb()).name == "fastokens"
    assert os.environ["FASTOKENS_BPE_THREADS"] == (own or "1")


def test_without_the_fast_package_there_is_nothing_to_say(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert choose_backend(tb()).name == "tokenizers"
    assert not caplog.records


def test_the_self_check_covers_many_scripts_the_added_tokens_and_the_vocabulary():
    tokenizer = tb(["né"], ["<T>"])
    check = self_check_texts(tokenizer)
    assert check == self_check_texts(tokenizer)
    scripts = {unicodedata.name(char).split()[0] for text in CORPUS for char in text if char.isalpha()}
    assert len(scripts) >= 15
    assert any("<T>" in text for text in check)
    assert any("né" in text for text in check[len(CORPUS) :])
    sure = TokenizersBackend(tokenizer)
    assert differs(sure, sure, check) == ""


# ---- the bound ------------------------------------------------------------------------------------------------------------


def nfc_worst() -> float:
    """The most bytes that can become one byte of NFC: each decomposed character replaced by the longest that decomposes to it."""
    longest: dict[str, int] = {}
    for point in range(0x110000):
        if 0xD800 <= point < 0xE000:
            continue
        char = chr(point)
        full = unicodedata.normalize("NFD", char)
        if len(full) == 1:
            longest[full] = max(longest.get(full, 0), len(char.encode()))
    worst = 0.0
    for point in range(0x110000):
        if 0xD800 <= point < 0xE000:
            continue
        char = chr(point)
        if unicodedata.normalize("NFC", char) == char:
            parts = unicodedata.normalize("NFD", char)
            worst = max(worst, sum(longest[part] for part in parts) / len(char.encode()))
    return worst


def test_nfc_never_shrinks_a_text_by_more_than_the_factor_that_the_bound_allows():
    assert 1 < nfc_worst() <= NFC_SHRINKS


def nfc_tokenizer() -> Tokenizer:
    tokenizer = tb(["né", "    "])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def llama_like() -> Tokenizer:
    tokenizer = tf(["▁▁▁▁", "▁a", "né"], ["<s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@pytest.mark.parametrize(("make", "bound"), [(lambda: tb(["né", "    "]), 4), (nfc_tokenizer, 16), (llama_like, 12)])
def test_no_text_has_fewer_tokens_than_its_bytes_divided_by_the_bound(make, bound):
    tokenizer = make()
    assert max_token_bytes(tokenizer) == bound

    @given(st.one_of(texts, st.text(alphabet=" né<s>\u1fbe\u0308\u0301\u212a", max_size=40)))
    def check(text):
        for special in (True, False):
            assert len(tokenizer.encode(text, add_special_tokens=special).ids) * bound >= len(text.encode())

    check()
    for text in SCRIPTS:
        assert len(tokenizer.encode(text).ids) * bound >= len(text.encode())


def _with(**parts: object) -> Tokenizer:
    tokenizer = tb()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _with_added(**flags: bool) -> Tokenizer:
    tokenizer = tb()
    tokenizer.add_tokens([AddedToken("new", **flags)])
    return tokenizer


def _holed(byte: int) -> Tokenizer:
    tokenizer = tb()
    vocab = {token: i for token, i in tokenizer.get_vocab().items() if i != byte}
    holed = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    holed.pre_tokenizer = tokenizer.pre_tokenizer
    return holed


def _truncating() -> Tokenizer:
    tokenizer = tb()
    tokenizer.enable_truncation(4)
    return tokenizer


UNBOUNDED = {
    "lowercase shrinks": lambda: _with(normalizer=normalizers.Lowercase()),
    "strip drops": lambda: _with(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "nfkc shrinks": lambda: _with(normalizer=normalizers.NFKC()),
    "replace by less": lambda: _with(normalizer=normalizers.Replace("aa", "a")),
    "replace by pattern": lambda: _with(normalizer=normalizers.Replace(Regex("a+"), "a")),
    "whitespace is dropped": lambda: _with(pre_tokenizer=pre_tokenizers.Whitespace()),
    "a split that removes": lambda: _with(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()])
    ),
    "no byte level": lambda: _with(pre_tokenizer=pre_tokenizers.Digits()),
    "an added token swallows spaces": lambda: _with_added(lstrip=True),
    "or those behind it": lambda: _with_added(rstrip=True),
    "a byte without a token is dropped": lambda: _holed(65),
    "words become one unknown": lambda: Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    "truncation": _truncating,
}


@pytest.mark.parametrize("why", sorted(UNBOUNDED))
def test_where_one_token_may_stand_for_any_text_there_is_no_bound(why):
    assert max_token_bytes(UNBOUNDED[why]()) is None


def test_a_normaliser_written_in_python_has_no_bound():
    class Custom:
        def normalize(self, normalized):
            normalized.clear()

    tokenizer = tb()
    tokenizer.normalizer = normalizers.Normalizer.custom(Custom())
    assert max_token_bytes(tokenizer) is None
    assert tokenize.max_token_bytes is max_token_bytes
