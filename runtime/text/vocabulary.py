"""What each token id contributes to the text: built once from a tokenizer, never changed afterwards.

Owns: recognising the tokenizer's decoder from its own JSON, and the tables that turn ids into bytes and text.

Theory. Two families of decoders are a plain concatenation of bytes, so the text of a request is the UTF-8 reading of the
bytes of its ids and the only state is an unfinished character of at most three bytes:

* **byte-level** (GPT-2, Llama-3, Qwen, DeepSeek): every character of a token stands for one byte; a token with any other
  character in it (added tokens) stands for its own UTF-8. A broken sequence becomes one U+FFFD.
* **byte-fallback** (Llama-2, Gemma, Mistral): replace ▁, `<0xNN>` is a byte, fuse, strip leading spaces once. A normal piece
  is whole characters, so it ends a run of bytes by itself; every broken byte becomes one U+FFFD of its own.

Anything else is **fallback**: correct, through the tokenizer's own `decode` on a small window, and slower. So is a tokenizer
of the first two families whose whole vocabulary does not decode to what these tables say: the check runs at every build,
because a wrong guess here would be wrong text for every request.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ...codec.errors import ValidationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["byte-level", "byte-fallback", "fallback", "none"]

MAX_IDS: Final = 1 << 22
"""Tables are as long as the highest id, whatever the number of tokens; the largest vocabularies in use have some 300,000 ids."""
EACH_BYTE: Final = "headrace.each-byte"
REPLACEMENT: Final = "\ufffd"


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Error handler: one U+FFFD for every byte of a broken sequence, as byte-fallback decoders give it."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF_CHAR: Final = _byte_of_char()
_TRANSLATE: Final = {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}
_BYTE_LEVEL_TOKEN: Final = re.compile("[" + re.escape("".join(BYTE_OF_CHAR)) + "]*")
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""The second form is no joke: the library parses the two digits as a number, which may have a sign."""


class Rules(NamedTuple):
    """How a decoder was read: its kind, why (for people), and what byte-fallback needs to know."""

    kind: Kind
    reason: str
    replace: tuple[tuple[str, str], ...] = ()
    lead: int = 0
    lead_char: str = " "


class Vocabulary(NamedTuple):
    """Tables by id, all of length `limit`; empty for the kinds fallback and none.

    `raw[skip][id]` is the token's bytes; `skip` says whether special tokens are skipped (b""). `pieces[id]` is the text of
    a token that is whole characters and not special, so that it holds whatever the options; else None. `known` and
    `special` (sets of ids) are always filled; an id that is not known has b"" in `raw`, so ask first.
    """

    rules: Rules
    limit: int
    raw: tuple[list[bytes], list[bytes]]
    pieces: list[str | None]
    known: frozenset[int]
    special: frozenset[int]

    @property
    def errors(self) -> str:
        """The codec error handler that writes broken bytes the way this kind of decoder does."""
        return EACH_BYTE if self.rules.kind == "byte-fallback" else "replace"


NO_VOCABULARY: Final = Vocabulary(Rules("none", "there is no tokenizer"), 0, ([], []), [], frozenset(), frozenset())


def is_foreign_fault(error: BaseException) -> bool:
    """Whether the tokenizer library failed: any Exception, or a panic of its native code, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def state_of(part: Any) -> Any:
    """The JSON of a tokenizer's part (decoder, normaliser, …); None where there is none, ValueError where it has no JSON."""
    if part is None:
        return None
    try:
        return json.loads(part.__getstate__())
    except Exception as error:
        # A part written in Python cannot be serialised; what the library then raises differs by version.
        raise ValueError(f"the tokenizer's {type(part).__name__} cannot be read") from error


def read_decoder(decoder: Any) -> Rules:
    """Recognise a decoder from its JSON. Exactly the known shapes; everything else is fallback, with the reason."""
    if decoder is None:
        return Rules("fallback", "the tokenizer has no decoder")
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return Rules("byte-level", "decoder ByteLevel")
    if names not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return Rules("fallback", f"decoder {' + '.join(map(str, names))} has no columnar form")
    pattern, content = steps[0].get("pattern", {}).get("String"), steps[0].get("content")
    if not pattern or not isinstance(content, str):
        return Rules("fallback", "decoder Replace with a pattern that is no plain string")
    lead, lead_char = 0, " "
    if len(steps) == 4:
        lead, lead_char = steps[3]["start"], steps[3]["content"]
        if steps[3]["stop"]:
            return Rules("fallback", "decoder Strip at the end of the text")
    return Rules("byte-fallback", f"decoder {' + '.join(names)}", ((pattern, content),), lead, lead_char)


def byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token with a foreign character in it stands for its own UTF-8."""
    if _BYTE_LEVEL_TOKEN.fullmatch(token):
        return token.translate(_TRANSLATE).encode("latin-1")
    return token.encode()


def byte_fallback_bytes(token: str, rules: Rules) -> bytes:
    """The bytes a byte-fallback piece stands for."""
    for pattern, content in rules.replace:
        token = token.replace(pattern, content)
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    """Every id with its token; where two tokens share an id, the one that the library's own look-up gives."""
    tokens: dict[int, str] = {}
    twice: set[int] = set()
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id in tokens:
            twice.add(token_id)
        tokens[token_id] = token
    for token_id in twice:
        tokens[token_id] = str(tokenizer.id_to_token(token_id))
    return tokens


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _agrees(tokenizer: Tokenizer, vocabulary: Vocabulary) -> bool:
    """Whether the tokenizer decodes its whole vocabulary, in order, to what the tables say, with and without specials."""
    for skip in (False, True):
        raw = vocabulary.raw[skip]
        sample = sorted(vocabulary.known)
        if vocabulary.rules.kind == "byte-fallback":
            # Broken bytes make that decoder take back the good ones beside them.
            sample = [i for i in sample if _text(raw[i]) is not None]
        text = b"".join(raw[i] for i in sample).decode("utf-8", vocabulary.errors)
        if tokenizer.decode(sample, skip_special_tokens=skip) != strip_lead(text, vocabulary.rules)[0]:
            return False
    return True


def strip_lead(text: str, rules: Rules, left: int | None = None) -> tuple[str, int]:
    """`text` without its leading spaces, and how many may still be stripped from what follows (0 once text was seen)."""
    left = rules.lead if left is None else left
    while left and text:
        if text[0] != rules.lead_char:
            return text, 0
        text, left = text[1:], left - 1
    return text, left


def build(tokenizer: Tokenizer | None) -> Vocabulary:
    """The tables of a tokenizer. A strange tokenizer is `fallback`, with the reason; only ids beyond `MAX_IDS` are refused.

    ValidationError (field `tokenizer`) then: one stray id in a file must not be able to ask for gigabytes.
    """
    if tokenizer is None:
        return NO_VOCABULARY
    try:
        rules = read_decoder(state_of(tokenizer.decoder))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rules = Rules("fallback", str(error))
    tokens = _tokens_by_id(tokenizer)
    limit = max(tokens, default=-1) + 1
    if limit > MAX_IDS:
        raise ValidationError(
            f"the tokenizer has {len(tokens)} tokens, but an id of {limit - 1}; at most {MAX_IDS - 1} is usable",
            field="tokenizer",
        )
    specials = {added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special}
    special = frozenset(i for i, token in tokens.items() if token in specials)
    bare = Vocabulary(rules, limit, ([], []), [], frozenset(tokens), special)
    if rules.kind == "fallback":
        return bare
    keep = [b""] * limit
    for token_id, token in tokens.items():
        data = byte_level_bytes(token) if rules.kind == "byte-level" else byte_fallback_bytes(token, rules)
        if not data and rules.kind == "byte-fallback":
            return bare._replace(rules=Rules("fallback", "an empty token ends a run of bytes without being text"))
        keep[token_id] = data
    skip = [b"" if i in special else data for i, data in enumerate(keep)]
    pieces = [_text(data) if i in tokens and i not in special else None for i, data in enumerate(keep)]
    tables = bare._replace(raw=(keep, skip), pieces=pieces)
    if not _agrees(tokenizer, tables):
        return bare._replace(rules=Rules("fallback", f"{rules.reason}, but the tokenizer decodes otherwise"))
    return tables
