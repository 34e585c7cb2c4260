"""The stream decoder for every tokenizer that has no columnar form: exact under every chunking, through `decode` alone.

Owns: the window rule. The window is the ids whose text was shown last (the context, so that rules about the first token of
a text do not strike in its middle) plus the ids not shown yet. Ids are taken one at a time, so chunks cannot matter. The
library's `DecodeStream` does nearly this, but it is opaque: it cannot be compared, hashed or restored, it raises where
a decoder takes back text, and it has no flush.

* A text that ends in U+FFFD may be an unfinished character and waits, but for at most `MOST_PENDING` ids: a character has at
  most four bytes, so by then the U+FFFD is the model's own or the bytes are broken.
* Where the decoder takes back text that was shown (byte fallback over a broken run), what was shown stays and the new ids
  are decoded on their own.
* Skipped special tokens never enter the window, as the library drops them before decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .vocabulary import REPLACEMENT

MOST_PENDING: Final = 4
MOST_CONTEXT: Final = 16
"""Ids without any text (a blank, a repetition) join the context up to this many; beyond it the older ones are dropped."""

Decode = Callable[[list[int]], str]
Window = tuple[tuple[int, ...], int]
"""The ids, and how many of them from the start are context."""

EMPTY: Final[Window] = ((), 0)


def _delta(decode: Decode, ids: list[int], shown: int) -> tuple[str, bool]:
    """The text that ids[shown:] add, and whether it may be the beginning of a character."""
    old = decode(ids[:shown]) if shown else ""
    new = decode(ids)
    text = new[len(old) :] if new.startswith(old) else decode(ids[shown:])
    return text, text.endswith(REPLACEMENT)


def advance(decode: Decode, window: Window, new: int) -> tuple[str, Window]:
    """Take one id: (text to show now, window afterwards)."""
    ids, shown = [*window[0], new], window[1]
    text, unsure = _delta(decode, ids, shown)
    if unsure and len(ids) - shown < MOST_PENDING:
        return "", (tuple(ids), shown)
    if text:
        ids = ids[shown:]
    elif len(ids) > MOST_CONTEXT:
        ids = [ids[0], *ids[2:]]
    return text, (tuple(ids), len(ids))


def flush(decode: Decode, window: Window) -> str:
    """What the ids still waiting give when nothing follows."""
    ids, shown = window
    return _delta(decode, list(ids), shown)[0] if len(ids) > shown else ""
