"""Token ids of a whole step to text deltas, one row per request; plain data per request and nothing else.

Owns: the text of every request, from its first id to its flush. Rules it keeps:

* The text of a request depends on its ids and options only: not on how the ids were cut into chunks, and never on the other
  rows of the step.
* Text that was returned is never taken back; what may still change (an unfinished character, a text that may become
  a stop) waits in the state, is bounded, and is flushed by `finish`.
* An id that is no token fails its own row and names itself; it is compared as a signed number before anything else.
* `spaces_between_special_tokens` changes nothing: the `tokenizers` library has no such rule in its decode, and that decode
  is the definition of the text. It travels to the scheduler, which may have one.

The step is columnar: one look-up in one table gives the text of a token that is whole characters and no special token; it is
the delta of every row that is `plain` (no stops, nothing pending). Only rows that hold, or receive, something else take the
slow path, one by one.
"""

from __future__ import annotations

import enum
from codecs import utf_8_decode
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...codec.errors import DetokenizeError, ValidationError, show
from . import window
from .stops import StopSet, StopSets, cut, without_stop_token
from .vocabulary import Kind, build, is_foreign_fault, strip_lead
from .window import EMPTY, Window

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    Ids = Sequence[int] | NDArray[np.integer[Any]]

_FEW: Final = 16
"""Below this many ids a plain loop is cheaper than calls that check and look up all of a list at once."""
_MANY: Final = 64
"""The same for an array."""


_UNSIGNED: Final = {4: np.uint32, 8: np.uint64}


class Token(enum.IntEnum):
    """What an id is to the text of a step."""

    UNKNOWN = 0  # no token
    PART = 1  # a special token, or bytes that are not whole characters
    WHOLE = 2  # its text is the delta


_NONE, _SOME = bytes((Token.UNKNOWN,)), bytes((Token.PART,))  # looked for among the bytes of classes: a search in C


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What of a request's sampling parameters decides its text. Immutable and hashable."""

    stops: tuple[str, ...] = ()
    stop_regexes: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False


class TextState:
    """The text of one request so far, as far as it still matters. Owned by the shard that owns the request.

    `pending`: bytes of an unfinished character (at most 3). `held`: text that may become a stop. `lead`: leading spaces that
    may still be stripped. `window`: the ids of the fallback decoder. `plain`: no stops, none of the above, so that the text
    of the next token is the next delta. `stops` is what `options` say, looked up once.
    """

    __slots__ = ("held", "lead", "options", "pending", "plain", "stops", "window")

    def __init__(
        self,
        options: TextOptions,
        plain: bool,
        pending: bytes,
        held: str,
        lead: int,
        window: Window,
        stops: StopSet | None,
    ) -> None:
        self.options = options
        self.plain = plain
        self.pending = pending
        self.held = held
        self.lead = lead
        self.window = window
        self.stops = stops

    def key(self) -> tuple[Any, ...]:
        """All of the state as one hashable value; `TextEngine.restore` takes it back."""
        stops = None if self.stops is None else self.stops.strings
        return (self.options, self.plain, self.pending, self.held, self.lead, self.window, stops)


class _BadId(Exception):
    """An id that cannot be decoded, on its way to the caller that knows the row."""

    def __init__(self, bad: int) -> None:
        super().__init__(bad)
        self.id = bad


class TextEngine:
    """Text of requests from token ids, for one tokenizer (None: ids pass through and every text is empty).

    Immutable after construction but for two caches, so that several shards may share one. `kind` says which decoder is in
    use, `reason` why, `vocab_limit` is one more than the highest token id.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = build(tokenizer)
        self.kind: Kind = self._vocabulary.rules.kind
        self.reason: str = self._vocabulary.rules.reason
        self.vocab_limit: int = self._vocabulary.limit
        self._raw = self._vocabulary.raw
        self._errors = self._vocabulary.errors
        self._columnar = self.kind in ("byte-level", "byte-fallback")
        self._pieces = self._vocabulary.pieces or [None] * self.vocab_limit
        self._piece_array = np.empty(len(self._pieces), dtype=object)
        self._piece_array[:] = self._pieces
        # (text, id) of every token that is its own delta: what a sink holds, made once and not once per token produced
        self._pairs = [None if piece is None else (piece, token) for token, piece in enumerate(self._pieces)]
        # One more than there are ids, so that whatever lies outside can be looked up at the end of the table.
        self._classes = np.zeros(self.vocab_limit + 1, dtype=np.uint8)
        self._classes[list(self._vocabulary.known)] = Token.PART
        self._classes[:-1][[piece is not None for piece in self._pieces]] = Token.WHOLE
        self._pair_array = _objects(self._pairs)
        # the same without a text, for ids whose text stands behind a later one
        self._blank_array = _objects([("", token) for token in range(self.vocab_limit)] if self._columnar else [])
        self._raw_arrays = tuple(map(_objects, self._raw))  # by skip_special_tokens
        self._stop_sets = StopSets()
        self._token_texts: dict[int, str] = {}

    def open(self, options: TextOptions) -> TextState:
        """The state of a request that has no output yet."""
        state = TextState(
            options, False, b"", "", self._vocabulary.rules.lead, EMPTY, self._stop_sets.get(options.stops)
        )
        self._settle(state)
        return state

    def restore(self, options: TextOptions, key: tuple[Any, ...]) -> TextState:
        """The state whose `key()` this is. ValueError where it belongs to other options."""
        if key[0] != options:
            raise ValueError("this key belongs to a state with other options")
        _, plain, pending, held, lead, ids, _ = key
        return TextState(options, plain, pending, held, lead, ids, self._stop_sets.get(options.stops))

    def feed_plain(self, ids: list[int] | NDArray[np.integer[Any]]) -> Sequence[str | None]:
        """Deltas of rows that are all `plain`, one id each: the fastest way in, and twice as fast for an array of many.

        None marks a row whose id needs `feed` (a broken character, a special token, an id outside the vocabulary). States
        are not needed, because the other rows stay plain and unchanged. Without a tokenizer every row is plain and
        every delta "". Never raises.
        """
        count, limit = len(ids), self.vocab_limit
        if self.kind == "none":
            return [""] * count
        # A negative index would count from the end of a table, so it must be seen before any look-up.
        if isinstance(ids, list):
            if count >= _FEW and min(ids) >= 0 and max(ids) < limit:
                found: tuple[str | None, ...] = itemgetter(*ids)(self._pieces)
                return found
        elif count >= _MANY and ids.min() >= 0 and ids.max() < limit:
            texts: list[str | None] = self._piece_array.take(ids).tolist()
            return texts
        else:
            ids = ids.tolist()
        pieces = self._pieces
        return [pieces[value] if 0 <= value < limit else None for value in ids]

    def feed_pairs(self, ids: NDArray[np.integer[Any]]) -> tuple[list[tuple[str, int] | None], bool]:
        """`feed_plain` of an array with each delta as (text, id), ready for a sink, and whether every row has its delta."""
        if self.kind == "none":
            return [("", token) for token in ids.tolist()], True
        pairs, limit = self._pairs, self.vocab_limit
        found = [pairs[token] if 0 <= token < limit else None for token in ids.tolist()]
        return found, None not in found

    def classes(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.uint8] | None:
        """A `Token` for each id, in the shape of `ids`; None where the decoder is not columnar. Never raises."""
        if self.kind == "none":
            return np.full(ids.shape, Token.WHOLE, dtype=np.uint8)
        return self._classes_of(ids) if self._columnar else None

    def _classes_of(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
        indices: NDArray[Any] = ids.view(_UNSIGNED[ids.dtype.itemsize])  # a negative id then lies above every limit
        if indices.dtype == np.uint64:
            indices = np.minimum(indices, self.vocab_limit).view(np.int64)
        return self._classes.take(indices, mode="clip")

    def columns(self, ids: NDArray[np.integer[Any]]) -> Sequence[Any]:
        """The (text, id) of ids [steps, rows] that are all WHOLE: of one step one for each row, else a list for each row."""
        if len(ids) > 1:
            return self.pairs(ids)
        if self.kind == "none":
            return [("", token) for token in ids[0].tolist()]
        found: Sequence[Any] = self._pair_array.take(ids[0]).tolist()
        return found

    def pairs(self, ids: NDArray[np.integer[Any]]) -> list[list[tuple[str, int]]]:
        """The (text, id) of ids [steps, rows] that are all WHOLE, row by row."""
        if self.kind == "none":
            return [[("", token) for token in row] for row in ids.T.tolist()]
        found: list[list[tuple[str, int]]] = self._pair_array.take(ids.T).tolist()
        return found

    def feed_run(
        self, states: Sequence[TextState], ids: NDArray[np.integer[Any]], part: Sequence[bool]
    ) -> list[list[tuple[str, int]]]:
        """(text, id) row by row for several steps at once: `ids` [steps, rows], none UNKNOWN; `part`: which rows have a PART.

        The texts of a row are those of its steps as far as they can be told apart without work; where something was held back or a
        character is split, they stand together behind the last of its ids. Only for a columnar decoder.
        """
        care = [at for at, state in enumerate(states) if part[at] or state.pending or state.lead]
        rows: list[Any]
        if len(care) < len(states):
            rows = self.pairs(ids)
            for at, state in enumerate(states):
                if state.stops is not None and not (part[at] or state.pending or state.lead):
                    reach = state.stops.reach  # what is held lies in so many characters at the end
                    tail = "".join([pair[0] for pair in rows[at][-reach - 1 :]])
                    if state.held or len(tail) < reach or state.stops.held(tail):
                        text = "".join([pair[0] for pair in rows[at]])
                        rows[at] = self._blank_array.take(ids[:, at]).tolist()
                        rows[at][-1] = (self._hold(state, state.stops, text), int(ids[-1, at]))
        else:
            rows = [None] * len(states)
        if care:
            mine = ids[:, care].T
            blanks = self._blank_array.take(mine).tolist()
            skips = [states[at].options.skip_special_tokens for at in care]
            raw = {skip: self._raw_arrays[skip].take(mine).tolist() for skip in set(skips)}
            for line, (at, skip, pairs) in enumerate(zip(care, skips, blanks, strict=True)):
                state, rows[at] = states[at], pairs
                text = self._text_of(state, b"".join(raw[skip][line]))
                if state.stops is not None:
                    text = self._hold(state, state.stops, text)
                else:
                    self._settle(state)
                pairs[-1] = (text, pairs[-1][1])
        return rows

    def feed_steps(
        self, states: Sequence[TextState], ids: NDArray[np.integer[Any]], classes: NDArray[np.uint8], odd: set[int]
    ) -> list[list[str]]:
        """Deltas of several steps, step by step: `ids` and their `classes` are [steps, rows], none UNKNOWN. `odd` are the rows whose
        state is not plain, and is brought up to date. Only for a columnar decoder."""
        if self.kind == "none":
            return [[""] * ids.shape[1] for _ in range(len(ids))]
        texts: list[list[Any]] = self._piece_array.take(ids).tolist()
        rows = set(odd)
        if _SOME in classes.tobytes():
            rows.update(np.flatnonzero(classes.min(axis=0) == Token.PART).tolist())
        for at in rows:
            state = states[at]
            for line, token in zip(texts, ids[:, at].tolist(), strict=True):
                if line[at] is None or not state.plain:
                    line[at] = self._one(state, token, line[at])
            if state.plain:
                odd.discard(at)
            else:
                odd.add(at)
        return texts

    def unknown(self, ids: NDArray[np.integer[Any]]) -> list[int]:
        """The positions of ids that are no token; empty without a tokenizer. Never raises."""
        if self.kind == "none" or not len(ids):
            return []
        if self._columnar:
            classes = self._classes_of(ids)
            return [] if _NONE not in classes.tobytes() else np.flatnonzero(classes == Token.UNKNOWN).tolist()
        known = self._vocabulary.known
        return [at for at, token in enumerate(ids.tolist()) if token not in known]

    def feed_single(
        self, states: Sequence[TextState], ids: list[int] | NDArray[np.integer[Any]]
    ) -> tuple[list[str], list[tuple[int, int]]]:
        """`feed` for exactly one id in every row, plain or not."""
        bad: list[tuple[int, int]] = []
        texts = self.feed_plain(ids)
        deltas: list[str] = list(texts)  # type: ignore[arg-type]  # every None is replaced below
        for row, (state, text) in enumerate(zip(states, texts, strict=True)):
            if text is None or not state.plain:
                stops = state.stops
                if text is None or stops is None or state.held or state.pending or state.lead:
                    try:
                        deltas[row] = self._one(state, int(ids[row]), text)
                    except _BadId as error:
                        deltas[row] = ""
                        bad.append((row, error.id))
                    continue
                held = stops.memo.get(text)  # the common row with stops, without a call
                if held is None:
                    held = stops.held_of_fresh(text)
                if held:
                    state.held, deltas[row] = text[-held:], text[:-held]
        return deltas, bad

    def feed(
        self, states: Sequence[TextState], ids: NDArray[np.integer[Any]], offsets: Sequence[int] | NDArray[np.int64]
    ) -> tuple[list[str], list[tuple[int, int]]]:
        """Deltas of one step for chunks that are not the last of their request; the rows are distinct requests.

        Row i has the ids ``ids[offsets[i]:offsets[i + 1]]``. Returns the deltas, row by row, and (row, id) for each row
        that holds an id outside the vocabulary (its first one), or whose ids the tokenizer's own decoder raised on (its
        last one); the delta of such a row is "" and its request is over. Never raises.
        """
        rows = len(states)
        if rows == 1:
            state, values = states[0], ids[offsets[0] : offsets[1]].tolist()
            try:
                if len(values) != 1:
                    return [self._advance(state, values)], []
                (value,) = values
                piece = self._pieces[value] if 0 <= value < self.vocab_limit else None
                return [piece if state.plain and piece is not None else self._one(state, value, piece)], []
            except _BadId as error:
                return [""], [(0, error.id)]
        bounds: list[int] = offsets if isinstance(offsets, list) else np.asarray(offsets).tolist()
        if len(ids) == rows and bounds == list(range(rows + 1)):
            return self.feed_single(states, ids)
        bad: list[tuple[int, int]] = []
        deltas = []
        values = ids.tolist()
        start = bounds[0]
        for row, state in enumerate(states):
            end = bounds[row + 1]
            try:
                deltas.append(self._advance(state, values[start:end]) if end > start else "")
            except _BadId as error:
                deltas.append("")
                bad.append((row, error.id))
            start = end
        return deltas, bad

    def finish(self, state: TextState, ids: Ids, finish_reason: object) -> str:
        """Delta of the terminal chunk: its text, all that was pending or held, less the stop that the reason names.

        Raises DetokenizeError naming an id outside the vocabulary. The state is spent afterwards.
        """
        if self.kind == "none":
            return ""
        matched = getattr(finish_reason, "matched", None)
        if state.plain and len(ids) == 1 and (matched is None or type(matched) is int):
            token = int(ids[0])  # the common end, without a list
            if 0 <= token < self.vocab_limit and (piece := self._pieces[token]) is not None:
                return "" if token == matched else piece
        values = _as_list(ids)
        try:
            self._check(values)
            if isinstance(matched, (int, list, tuple)):
                values = without_stop_token(values, matched)
            text = state.held + self._decode(state, values) + self._flush(state)
        except _BadId as error:
            raise bad_id(error.id) from None
        state.held = ""
        if isinstance(matched, str):
            options = state.options
            text = cut(text, matched, options.stops, options.stop_regexes, options.no_stop_trim)
        return text

    def whole(self, options: TextOptions, ids: Ids, terminal_start: int, finish_reason: object) -> str:
        """Text of a whole request at once, equal to what its chunks would have given.

        `terminal_start` is where its terminal chunk begins in `ids`: earlier text counts as sent but for what would have
        been held. Raises DetokenizeError as `finish` does.
        """
        if self.kind == "none":
            return ""
        state = self.open(options)
        # an array of many is looked up at once
        values = ids if isinstance(ids, np.ndarray) and len(ids) >= _MANY else _as_list(ids)
        try:
            sent = self._advance(state, values[:terminal_start])
        except _BadId as error:
            raise bad_id(error.id) from None
        return sent + self.finish(state, values[terminal_start:], finish_reason)

    def decode(self, ids: Ids, skip_special_tokens: bool = True) -> str:
        """The tokenizer's own text of a complete list of ids in [0, 2^32); ids that are no token count as nothing.

        Raises ValidationError without a tokenizer, DetokenizeError where the tokenizer fails.
        """
        if self._tokenizer is None:
            raise ValidationError("there is no tokenizer, so token ids cannot be decoded")
        try:
            return str(self._tokenizer.decode(_as_list(ids), skip_special_tokens=skip_special_tokens))
        except BaseException as error:
            if not is_foreign_fault(error):
                raise
            raise DetokenizeError("the tokenizer could not decode these ids") from error

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own, specials included, for logprobs; "" for an id outside the vocabulary."""
        text = self._token_texts.get(token_id)
        if text is None:
            if token_id not in self._vocabulary.known:
                return ""  # not remembered: a scheduler chooses these ids, the vocabulary bounds the others
            text = self.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    # ---- one row ------------------------------------------------------------------------------------------------------

    def _settle(self, state: TextState) -> None:
        """Set `plain` as the rest of the state says."""
        state.plain = not (state.pending or state.lead or state.stops is not None) and self.kind != "fallback"

    def _check(self, values: list[int]) -> None:
        """Raise _BadId for the first id that is no token. A negative one must never reach an index or an unsigned type."""
        known = self._vocabulary.known
        if not known.issuperset(values):
            raise _BadId(next(value for value in values if value not in known))

    def _advance(self, state: TextState, values: list[int] | NDArray[np.integer[Any]]) -> str:
        """The delta of a chunk that is not the last one."""
        if self.kind == "none":
            return ""
        if isinstance(values, list):
            self._check(values)
            text = self._decode(state, values)
        else:
            text = self._decode_array(state, values)
        if state.stops is not None:
            return self._hold(state, state.stops, text)
        self._settle(state)
        return text

    def _one(self, state: TextState, value: int, text: str | None) -> str:
        """`_advance` for one id that is not simply its own text; `text` is its piece, if it has one."""
        if text is None or state.pending:
            if not self._columnar:
                return self._advance(state, [value])
            if value not in self._vocabulary.known:
                raise _BadId(value)
            data = state.pending + self._raw[state.options.skip_special_tokens][value]
            text, used = utf_8_decode(data, self._errors, False)
            state.pending = data[used:]
        if state.lead and text:
            text, state.lead = strip_lead(text, self._vocabulary.rules, state.lead)
        if state.stops is not None:
            return self._hold(state, state.stops, text) if text else ""
        state.plain = not (state.pending or state.lead)
        return text

    def _hold(self, state: TextState, stops: StopSet, new: str) -> str:
        """What may be sent of the text held before and of `new`; the rest is held."""
        text = state.held + new
        free = len(text) - stops.held(text)
        state.held = text[free:]
        return text[:free]

    def _decode(self, state: TextState, values: list[int]) -> str:
        """The text that these ids complete, whatever the stops."""
        if not self._columnar:
            return self._decode_window(state, values)
        raw = self._raw[state.options.skip_special_tokens]
        return self._text_of(state, b"".join([raw[value] for value in values]))

    def _decode_array(self, state: TextState, ids: NDArray[np.integer[Any]]) -> str:
        """`_check` and `_decode` for an array of many."""
        if not self._columnar:
            self._check(values := ids.tolist())
            return self._decode_window(state, values)
        classes = self._classes_of(ids).tobytes()
        if (at := classes.find(Token.UNKNOWN)) >= 0:
            raise _BadId(int(ids[at]))
        if not state.pending and not state.lead and _SOME not in classes:
            return "".join(self._piece_array.take(ids).tolist())
        return self._text_of(state, b"".join(self._raw_arrays[state.options.skip_special_tokens].take(ids).tolist()))

    def _text_of(self, state: TextState, data: bytes) -> str:
        """The text that these bytes complete, whatever the stops; unfinished ones wait in the state."""
        if state.pending:
            data = state.pending + data
        text, used = utf_8_decode(data, self._errors, False)
        state.pending = data[used:]
        if state.lead and text:
            text, state.lead = strip_lead(text, self._vocabulary.rules, state.lead)
        return text

    def _decode_window(self, state: TextState, values: list[int]) -> str:
        decode, special = self._library_decode(state), self._vocabulary.special
        texts = []
        for value in values:
            if state.options.skip_special_tokens and value in special:
                continue
            text, state.window = window.advance(decode, state.window, value)
            texts.append(text)
        return "".join(texts)

    def _library_decode(self, state: TextState) -> window.Decode:
        tokenizer, skip = self._tokenizer, state.options.skip_special_tokens
        assert tokenizer is not None

        def decode(ids: list[int]) -> str:
            try:
                return str(tokenizer.decode(ids, skip_special_tokens=skip))
            except BaseException as error:  # a decoder may be anybody's code, and must end only its own request
                if not is_foreign_fault(error):
                    raise
                raise _BadId(ids[-1]) from error

        return decode

    def _flush(self, state: TextState) -> str:
        """What is pending, as the decoder writes it when nothing follows."""
        if not self._columnar:
            text, state.window = window.flush(self._library_decode(state), state.window), EMPTY
            return text
        text, state.pending = utf_8_decode(state.pending, self._errors, True)[0], b""
        return text


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    """An array of these very objects (numpy would take a list of pairs for a matrix)."""
    array = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):
        array[at] = value
    return array


def _as_list(ids: Ids) -> list[int]:
    return list(ids) if isinstance(ids, (list, tuple)) else ids.tolist()  # type: ignore[union-attr]


def bad_id(token_id: int) -> DetokenizeError:
    """The error of a request whose output holds an id that cannot be decoded."""
    return DetokenizeError(
        f"the scheduler sent token id {show(token_id)}, which is outside the tokenizer's vocabulary or cannot be decoded"
    )
