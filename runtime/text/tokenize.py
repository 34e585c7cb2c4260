"""Text to token ids: loading a tokenizer, the back ends that encode a batch, and the bound that refuses huge text early.

Owns: the promise that ids are the tokenizer's own, nothing clipped and nothing padded. Rules it keeps:

* A tokenizer file may carry truncation or padding; both are switched off, on a copy, because a prompt that does not fit is
  refused and never cut silently.
* `max_token_bytes` is sound or None: text of more than n × that many bytes has more than n tokens, whatever the text is.
  Anything that could make one token out of more text (a normaliser that shrinks, a pre-tokenizer that drops, a fused unknown
  token, an added token that swallows the spaces beside it) makes it None.
* The fast back end is used only where its ids were compared at load, on texts in many scripts, and were equal.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from struct import pack_into
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from tokenizers import Tokenizer

from ...codec.errors import TokenizeError, ValidationError, show
from ..server_args import resolve_tokenizer
from .vocabulary import BYTE_OF_CHAR, is_foreign_fault, state_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOG = logging.getLogger("headrace.tokenize")


def load_tokenizer(source: str | os.PathLike[str] | Tokenizer) -> Tokenizer:
    """The tokenizer in a file, in a directory with a tokenizer.json, or of a model in the local hub cache; or `source` itself.

    Truncation and padding are off in what is returned. Raises ValidationError (field `tokenizer`) for what is not there or
    not a tokenizer; nothing is fetched.
    """
    if not isinstance(source, (str, bytes, os.PathLike, Tokenizer)):
        raise ValidationError(f"tokenizer must be a path or a Tokenizer, not {show(source)}", field="tokenizer")
    if not isinstance(source, Tokenizer):
        path = resolve_tokenizer(source, field="tokenizer")
        try:
            tokenizer = Tokenizer.from_file(os.fspath(path))
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise ValidationError(
                f"tokenizer {show(os.fspath(path))}: not a tokenizer file", field="tokenizer"
            ) from error
    elif source.truncation is None and source.padding is None:
        return source
    else:
        tokenizer = Tokenizer.from_str(source.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TokenizerBackend(Protocol):
    """What turns texts into ids. Immutable, and safe to call from several threads."""

    @property
    def name(self) -> str:
        """Which back end this is, for stats."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[NDArray[np.int64]]:
        """The ids of each text, int64, in order. Raises TokenizeError where the tokenizer fails on any of them."""


class TokenizersBackend:
    """The `tokenizers` library. Only ids are wanted, so its fast batch call, which keeps no offsets, is all that is needed."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = load_tokenizer(tokenizer)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[NDArray[np.int64]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not is_foreign_fault(error):
                raise
            raise TokenizeError("the tokenizer failed on this text") from error
        return _cut([encoding.ids for encoding in encodings])


_PACKED: Final = 1 << 16  # ids of one text that are handed to one call as its arguments
_SHARED: Final = 1 << 12  # ids of a batch whose texts share an array: a small prompt must not keep a large batch alive


def _cut(rows: list[list[int]]) -> list[NDArray[np.int64]]:
    """An array for each row, cut out of one where that is not large."""
    ends = list(accumulate(map(len, rows)))
    whole = np.empty(ends[-1] if ends else 0, dtype=np.int64)
    memory, cuts = whole.data, []
    for row, end in zip(rows, ends, strict=True):
        size = len(row)
        cut = whole[end - size : end]
        if size <= _PACKED:  # in half the time that numpy takes to look at each integer of a list
            pack_into(f"={size}q", memory, 8 * (end - size), *row)
        else:
            cut[:] = row
        cuts.append(cut)
    return cuts if whole.size <= _SHARED else [cut.copy() for cut in cuts]


class FastokensBackend:
    """The `fastokens` library, many times cheaper per token. Made by `choose_backend`, which proves its ids first."""

    name = "fastokens"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[NDArray[np.int64]]:
        try:
            flat, bounds = self._tokenizer.encode_batch_flat(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not is_foreign_fault(error):
                raise
            raise TokenizeError("the tokenizer failed on this text") from error
        ids = np.frombuffer(flat, dtype="<u4").astype(np.int64)
        edges = np.frombuffer(bounds, dtype="<u8").tolist()
        cuts = [ids[start:end] for start, end in pairwise(edges)]
        return cuts if ids.size <= _SHARED else [cut.copy() for cut in cuts]


CORPUS: Final[tuple[str, ...]] = (
    "",
    " ",
    "a",
    " a",
    "Hello, world! It's 3.14 o'clock; we'll see.",
    "  leading and   inner    spaces  ",
    "tabs\tand\nnew\r\nlines\n\n\n  \n end\n",
    "def f(x):\n    return x ** 2  # comment\n\tif x != 0 and y >= 10: pass",
    "1234567890 12 345 6789 0.001 1e-9 ½ Ⅷ ٣٤٥ १२३",
    "DON'T don't DoN'T 'S 's I'LL",
    "Grüße, café, cafe\u0301, naïve, Å A\u030a \u212b, ﬁ ﬂ",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "敏捷的棕色狐狸跳过了懒狗。春眠不覺曉",
    "いろはにほへと ちりぬるを カタカナ ﾊﾝｶｸ",
    "다람쥐 헌 쳇바퀴에 타고파 \u1112\u1161\u11ab",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "ཨོཾ་མ་ཎི་པདྨེ་ཧཱུྃ། မြန်မာ ភាសាខ្មែរ አማርኛ ქართული հայերեն",
    "👋 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 1️⃣ ☺️",
    "\x00\x01\x1b[0m\x7f\x85\u200b\u200d\u2028\ufeff\ufffd\U0010ffff",
    "<s></s><|endoftext|><|im_start|>user\n<unk><pad>[INST] [/INST]<0x41>▁x",
    "a" * 300 + "1" * 50 + " " * 70 + "\n" * 20 + "!?" * 40,
    "e\u0301\u0302\u0303" * 10 + "\u0300",
)
"""Texts that tokenizers disagree on: scripts, digits, apostrophes, runs of spaces, marks, emoji sequences, controls, specials."""


def choose_backend(tokenizer: Tokenizer, *, fast: bool = True) -> TokenizerBackend:
    """The fastest back end whose ids are equal to the tokenizer's own, compared here on `self_check_texts`.

    `fast=False`, or the package `fastokens` missing, gives `tokenizers`; so do any difference and any exception, with
    the reason in the log.
    """
    tokenizer = load_tokenizer(tokenizer)
    sure = TokenizersBackend(tokenizer)
    if not fast:
        return sure
    try:
        from fastokens import Tokenizer as Fast  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return sure
    # Its own pool would only hand work between threads: the workers are the threads here, and a batch of theirs costs it a wake-up of
    # each of its own, which is more than the batch. It reads this once, when it is first used; who has set it knows better.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    try:
        candidate = FastokensBackend(Fast.from_json_str(tokenizer.to_str()))
    except BaseException as error:  # it reads fewer kinds of tokenizers, and says so in its own ways
        if not is_foreign_fault(error):
            raise
        _LOG.warning("fastokens cannot read this tokenizer (%s); using tokenizers", type(error).__name__)
        return sure
    if reason := differs(sure, candidate, self_check_texts(tokenizer)):
        _LOG.warning("fastokens is not used for this tokenizer: %s", reason)
        return sure
    return candidate


def self_check_texts(tokenizer: Tokenizer) -> list[str]:
    """What two tokenizers are compared on: the corpus, added tokens in context, and texts made of random tokens of this one."""
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:64]
    texts = [*CORPUS, *(f"a {content} b{content}{content}\n" for content in contents)]
    pick = random.Random(0)
    limit = tokenizer.get_vocab_size(with_added_tokens=True)
    texts += [tokenizer.decode(pick.choices(range(limit), k=24), skip_special_tokens=False) for _ in range(256)]
    return texts


def differs(sure: TokenizerBackend, other: TokenizerBackend, texts: Sequence[str]) -> str:
    """Where `other` gives other ids than `sure`, in words; "" where they agree on all of `texts`, one by one and together."""
    for special in (True, False):
        expected = sure.encode_batch(list(texts), special)
        try:
            together = other.encode_batch(list(texts), special)
            alone = [ids for text in texts for ids in other.encode_batch([text], special)]
        except TokenizeError as error:
            return f"it raised {type(error.__cause__).__name__}"
        for got in (together, alone):
            if len(got) != len(expected):
                return f"{len(got)} answers to {len(expected)} texts"
            wrong = [n for n, (a, b) in enumerate(zip(expected, got, strict=True)) if not np.array_equal(a, b)]
            if wrong:
                return f"other ids for text {wrong[0]} of the self-check, add_special_tokens {special}"
    return ""


# ---- the bound on tokens per byte ---------------------------------------------------------------------------------------

NFC_SHRINKS: Final = 4
"""At most this many bytes of any text become one byte of its NFC (the most that exists is 3.5; a test computes it)."""

_GROWING_PRE: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
_KEEPING: Final = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})


def max_token_bytes(tokenizer: Tokenizer) -> int | None:
    """The most bytes of UTF-8 prompt text that one token can stand for; None where no such bound is known to be sound."""
    try:
        shrink = _normalizer_shrinks(state_of(tokenizer.normalizer))
        if shrink is None or not _keeps_text(state_of(tokenizer.pre_tokenizer)):
            return None
        added = tokenizer.get_added_tokens_decoder().values()
        if tokenizer.truncation is not None or any(token.lstrip or token.rstrip for token in added):
            return None
        if not _covers_all(tokenizer):
            return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    sizes = [len(token.content.encode()) for token in added]
    by_bytes = _is_byte_level(tokenizer)  # then each character of a token that the model can give stands for one byte
    sizes += [len(token) if by_bytes else len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=False)]
    return max(sizes, default=1) * shrink


def _normalizer_shrinks(state: Any) -> int | None:
    """How many bytes at most become one: 1 for a normaliser that never shrinks, None where it may without a bound."""
    if state is None:
        return 1
    kind = state["type"]
    if kind == "Sequence":
        factors = [_normalizer_shrinks(part) for part in state["normalizers"]]
        return None if None in factors else int(np.prod([factor or 1 for factor in factors], dtype=np.int64))
    if kind == "Prepend" or kind == "ByteLevel":
        return 1
    if kind == "NFC":
        return NFC_SHRINKS
    if kind == "Replace":
        pattern = state["pattern"].get("String")
        return 1 if pattern and len(state["content"].encode()) >= len(pattern.encode()) else None
    return None


def _keeps_text(state: Any) -> bool:
    """Whether a pre-tokenizer hands on every byte it was given."""
    if state is None:
        return True
    kind = state["type"]
    if kind == "Sequence":
        return all(map(_keeps_text, state["pretokenizers"]))
    return kind in _GROWING_PRE or (kind in ("Split", "Punctuation") and state["behavior"] in _KEEPING)


def _covers_all(tokenizer: Tokenizer) -> bool:
    """Whether every text has tokens for all of it: no character is dropped, or fused with others into one unknown token."""
    model = tokenizer.model
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if type(model).__name__ != "BPE":
        return False
    if getattr(model, "byte_fallback", False):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return _is_byte_level(tokenizer) and all(char in vocabulary for char in BYTE_OF_CHAR)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    state = state_of(tokenizer.pre_tokenizer) or {}
    parts = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    return any(part.get("type") == "ByteLevel" for part in parts)
