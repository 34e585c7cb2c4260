"""Sampling parameters: the client's type, the normalised type, and the one function between them.

Owns: every rule about a sampling parameter. Rules it keeps:

* `SamplingParams` is what a client says; `NormalizedSamplingParams` is what a scheduler gets. They are two types, and only
  `SamplingParams.normalize` turns one into the other, so no path to the ring can skip it; twice is the same as once.
* Every check is "refuse unless lo <= x <= hi": a comparison with NaN is false, so a check for the bad side admits it.
  Nothing is judged by truthiness (``max_new_tokens=0`` stays 0).
* null means the default for every field but `max_new_tokens`, where absent is 128, null is "no cap" and 0 is 0.
* Whatever is admitted can be encoded: integers within the wire's range, strings within UTF-8. Messages name key and value.
* What was normalised before is known again by its values, never by the object that held them: a client may change its
  parameters between two requests, and a list in them even without touching the object.
"""

from __future__ import annotations

import marshal
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar, Final, NamedTuple, Never

import msgspec

from . import checks
from .checks import DEFAULT_LIMITS, RequestLimits
from .clientjson import check_text, parse_json
from .errors import ValidationError, show
from .schema import WireSchema
from .stop_regex import compile_stop_regex

TOP_K_ALL: Final = 1 << 30
"""`top_k` when every token is a candidate; what -1 becomes."""

INT32_MAX: Final = (1 << 31) - 1
_INT64: Final = (-(1 << 63), (1 << 63) - 1)
_GREEDY_BELOW: Final = 1e-6
_GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")


class NormalizedSamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked sampling parameters, ready for the wire. Made by `SamplingParams.normalize` (or read back from a header).

    `max_new_tokens` None is no cap; `top_k` is 1 to 2^31 - 1 (2^30: all). `stop_str_max_len` is the longest stop string in
    bytes of UTF-8, `stop_regex_max_len` the widest pattern in characters (2^30 when unbounded).
    """

    max_new_tokens: int | None
    stop_token_ids: tuple[int, ...] | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    n: int
    beam_width: int | None
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    structural_tag: str | None
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    stream_interval: int | None
    logit_bias: dict[str, float] | None
    sampling_seed: int | None
    custom_params: dict[str, Any] | None
    stop_strs: tuple[str, ...]
    stop_regex_strs: tuple[str, ...]
    stop_str_max_len: int
    stop_regex_max_len: int

    # Slots that are the same in every normalised message: the client's raw stops are gone, the rest is not ours to set.
    stop: ClassVar[None] = None
    stop_regex: ClassVar[None] = None
    is_normalized: ClassVar[bool] = True
    watermark: ClassVar[None] = None
    ebnf_full_assistant: ClassVar[bool] = False

    def normalize(
        self,
        *,
        vocab_size: int | None = None,
        skip_tokenizer_init: bool = False,
        limits: RequestLimits = DEFAULT_LIMITS,
    ) -> NormalizedSamplingParams:
        """Itself: normalising twice is normalising once."""
        return self

    def to_wire(self, schema: WireSchema) -> list[object]:
        """All slots of the schema's sampling array, in its order; a slot this build has no value for is nil."""
        return list(_slots(schema.sampling_slots)(self))


@lru_cache(maxsize=16)
def _slots(slots: tuple[str, ...]) -> attrgetter[tuple[object, ...]]:
    """A getter of all `slots` at once; names that no attribute has read a nil."""
    known = [slot if hasattr(NormalizedSamplingParams, slot) else "watermark" for slot in slots]
    return attrgetter(*known)


class SamplingParams:
    """What a client asks of the sampler. Nothing is checked until `normalize`, which raises ValidationError.

    `stop` and `stop_regex` take a string or a list; `logit_bias` maps token ids (as decimal strings) to biases;
    `custom_params` maps strings to a scalar, a list of scalars or a string-keyed object of scalars. An unknown keyword is a
    ValidationError that names the known ones.
    """

    __slots__ = (
        "beam_width", "custom_params", "ebnf", "frequency_penalty", "ignore_eos", "json_schema", "logit_bias",
        "max_new_tokens", "min_new_tokens", "min_p", "n", "no_stop_trim", "presence_penalty", "regex",
        "repetition_penalty", "sampling_seed", "skip_special_tokens", "spaces_between_special_tokens", "stop",
        "stop_regex", "stop_token_ids", "stream_interval", "structural_tag", "temperature", "top_k", "top_p",
    )  # fmt: skip

    def __init__(
        self,
        *,
        max_new_tokens: int | None = 128,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        top_k: int | None = -1,
        min_p: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        presence_penalty: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        min_new_tokens: int | None = 0,
        n: int | None = 1,
        beam_width: int | None = None,
        json_schema: str | None = None,
        regex: str | None = None,
        ebnf: str | None = None,
        structural_tag: str | None = None,
        ignore_eos: bool | None = False,
        skip_special_tokens: bool | None = True,
        spaces_between_special_tokens: bool | None = True,
        no_stop_trim: bool | None = False,
        stream_interval: int | None = None,
        logit_bias: Mapping[str, float] | None = None,
        sampling_seed: int | None = None,
        custom_params: Mapping[str, Any] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise _unknown_key(next(iter(unknown)))
        self.max_new_tokens = max_new_tokens
        self.stop = stop
        self.stop_token_ids = stop_token_ids
        self.stop_regex = stop_regex
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.min_p = min_p
        self.frequency_penalty = frequency_penalty
        self.presence_penalty = presence_penalty
        self.repetition_penalty = repetition_penalty
        self.min_new_tokens = min_new_tokens
        self.n = n
        self.beam_width = beam_width
        self.json_schema = json_schema
        self.regex = regex
        self.ebnf = ebnf
        self.structural_tag = structural_tag
        self.ignore_eos = ignore_eos
        self.skip_special_tokens = skip_special_tokens
        self.spaces_between_special_tokens = spaces_between_special_tokens
        self.no_stop_trim = no_stop_trim
        self.stream_interval = stream_interval
        self.logit_bias = logit_bias
        self.sampling_seed = sampling_seed
        self.custom_params = custom_params

    @classmethod
    def from_json(cls, source: bytes | bytearray | str | Mapping[str, Any]) -> SamplingParams:
        """From a JSON object, as text or already parsed. ValidationError for bad JSON and for a key that is not known."""
        if not isinstance(source, Mapping):
            source = parse_json(source, "sampling_params")
        if not isinstance(source, Mapping):
            raise ValidationError(f"sampling_params must be an object, not {show(source)}", field="sampling_params")
        for key in source:
            if key not in _KEYS:
                raise _unknown_key(key)
        return cls(**source)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as given."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, SamplingParams) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        given = (
            f"{name}={getattr(self, name)!r}"
            for name in self.__slots__
            if getattr(self, name) != getattr(_DEFAULT, name)
        )
        return f"SamplingParams({', '.join(given)})"

    def normalize(
        self, *, vocab_size: int, skip_tokenizer_init: bool = False, limits: RequestLimits = DEFAULT_LIMITS
    ) -> NormalizedSamplingParams:
        """The checked form, with every default filled in. `vocab_size` is the number of rows of the model's embedding.

        `skip_tokenizer_init`: there is no text, so stop strings, stop_regex and min_new_tokens > 0 are refused.
        `limits` are the sizes allowed. Raises ValidationError with `field` set; keeps no reference to a client's container.
        """
        temperature = checks.number("temperature", self.temperature, 1.0)
        top_k = checks.integer("top_k", self.top_k, -1, -INT32_MAX, INT32_MAX)
        # The order is the reference's: these two rewrites come before the range checks.
        if 0.0 <= temperature < _GREEDY_BELOW:
            temperature, top_k = 1.0, 1
        if top_k == -1:
            top_k = TOP_K_ALL
        if not temperature >= 0.0:
            raise checks.out_of_range("temperature", self.temperature, "at least 0")
        if not top_k >= 1:
            raise checks.out_of_range("top_k", self.top_k, "-1 or at least 1")
        top_p = checks.number("top_p", self.top_p, 1.0)
        if not 0.0 < top_p <= 1.0:
            raise checks.out_of_range("top_p", self.top_p, "in (0, 1]")
        min_p = checks.number("min_p", self.min_p, 0.0)
        if not 0.0 <= min_p <= 1.0:
            raise checks.out_of_range("min_p", self.min_p, "in [0, 1]")
        frequency_penalty = checks.number("frequency_penalty", self.frequency_penalty, 0.0)
        if not -2.0 <= frequency_penalty <= 2.0:
            raise checks.out_of_range("frequency_penalty", self.frequency_penalty, "in [-2, 2]")
        presence_penalty = checks.number("presence_penalty", self.presence_penalty, 0.0)
        if not -2.0 <= presence_penalty <= 2.0:
            raise checks.out_of_range("presence_penalty", self.presence_penalty, "in [-2, 2]")
        repetition_penalty = checks.number("repetition_penalty", self.repetition_penalty, 1.0)
        if not 0.0 < repetition_penalty <= 2.0:
            raise checks.out_of_range("repetition_penalty", self.repetition_penalty, "in (0, 2]")
        max_new_tokens = (
            None
            if self.max_new_tokens is None
            else checks.integer("max_new_tokens", self.max_new_tokens, 0, 0, INT32_MAX)
        )
        min_new_tokens = checks.integer("min_new_tokens", self.min_new_tokens, 0, 0, INT32_MAX)
        if max_new_tokens is not None and min_new_tokens > max_new_tokens:
            raise ValidationError(
                f"min_new_tokens is {min_new_tokens}, more than max_new_tokens ({max_new_tokens})",
                field="min_new_tokens",
            )
        n = checks.integer("n", self.n, 1, 1, INT32_MAX)
        if n != 1:
            raise ValidationError(f"n is {show(n)}; only 1 is supported: send {n} requests instead", field="n")
        beam_width = None if self.beam_width is None else checks.integer("beam_width", self.beam_width, 1, 1, 1)
        stop_strs = checks.strings("stop", self.stop, limits.max_stop_strings)
        stop_str_max_len = 0
        for stop in stop_strs:
            size = check_text("stop", stop)
            if not 0 < size <= limits.max_stop_bytes:
                raise ValidationError(
                    f"stop holds {show(stop)} of {size} bytes; each must have 1 to {limits.max_stop_bytes}",
                    field="stop",
                )
            stop_str_max_len = max(stop_str_max_len, size)
        stop_regex_strs = checks.strings("stop_regex", self.stop_regex, limits.max_stop_regexes)
        stop_regex_max_len = 0
        for pattern in stop_regex_strs:
            size = check_text("stop_regex", pattern)
            if size > limits.max_stop_regex_bytes:
                raise ValidationError(
                    f"stop_regex {show(pattern)} has {size} bytes; at most {limits.max_stop_regex_bytes} are allowed",
                    field="stop_regex",
                )
            stop_regex_max_len = max(stop_regex_max_len, compile_stop_regex(pattern)[1])
        if skip_tokenizer_init:
            for key, bad in (("stop", stop_strs), ("stop_regex", stop_regex_strs), ("min_new_tokens", min_new_tokens)):
                if bad not in ((), 0):
                    raise ValidationError(
                        f"{key} needs text, and skip_tokenizer_init is set; got {show(bad)}", field=key
                    )
        grammars = [checks.grammar(key, getattr(self, key), limits.max_grammar_bytes) for key in _GRAMMARS]
        if len(grammars) - grammars.count(None) > 1:
            names = [key for key, value in zip(_GRAMMARS, grammars, strict=True) if value is not None]
            raise ValidationError(
                f"at most one of {', '.join(_GRAMMARS)} may be set; got {' and '.join(names)}", field=names[1]
            )
        json_schema, regex, ebnf, structural_tag = grammars
        return NormalizedSamplingParams(
            max_new_tokens=max_new_tokens,
            stop_token_ids=checks.token_ids(
                "stop_token_ids", self.stop_token_ids, vocab_size, limits.max_stop_token_ids
            ),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repetition_penalty=repetition_penalty,
            min_new_tokens=min_new_tokens,
            n=n,
            beam_width=beam_width,
            json_schema=json_schema,
            regex=regex,
            ebnf=ebnf,
            structural_tag=structural_tag,
            ignore_eos=checks.flag("ignore_eos", self.ignore_eos, False),
            skip_special_tokens=checks.flag("skip_special_tokens", self.skip_special_tokens, True),
            spaces_between_special_tokens=checks.flag(
                "spaces_between_special_tokens", self.spaces_between_special_tokens, True
            ),
            no_stop_trim=checks.flag("no_stop_trim", self.no_stop_trim, False),
            stream_interval=None
            if self.stream_interval is None
            else checks.integer("stream_interval", self.stream_interval, 1, 1, INT32_MAX),
            logit_bias=checks.logit_bias(self.logit_bias, vocab_size, limits.max_logit_bias),
            sampling_seed=None
            if self.sampling_seed is None
            else checks.integer("sampling_seed", self.sampling_seed, 0, *_INT64),
            custom_params=checks.custom_params(self.custom_params, limits.max_custom_params_bytes),
            stop_strs=stop_strs,
            stop_regex_strs=stop_regex_strs,
            stop_str_max_len=stop_str_max_len,
            stop_regex_max_len=stop_regex_max_len,
        )


class Form(NamedTuple):
    """A normal form with what is always wanted beside it.

    `nbytes` is what it counts against the budget of admitted bytes; `slots` its sampling array as `schema` has it on the wire, or
    None where that is not worth keeping.
    """

    sampling: NormalizedSamplingParams
    nbytes: int
    schema: WireSchema
    slots: bytes | None = None


class Normaliser:
    """`normalize` for one model, one set of limits and one wire, with the answers to parameters that were asked about lately.

    Most requests of a server carry one of a few sets of parameters, and normalising one costs as much as all the rest of
    admission. Answers are found by the exact values, and are worked out from the very copy of them that they are found by, so
    nothing that a client does to its objects meanwhile can put a wrong answer there. Only plain values (and lists of strings or
    of integers) are remembered, and only small ones; a refusal is worked out every time. Safe to call from several threads.
    """

    def __init__(self, vocab_size: int, skip_tokenizer_init: bool, limits: RequestLimits, schema: WireSchema) -> None:
        self._vocab_size = vocab_size
        self._skip_tokenizer_init = skip_tokenizer_init
        self._limits = limits
        self._schema = schema
        self._lock = threading.Lock()
        self._known: dict[bytes, Form] = {}

    def __call__(self, params: Any) -> Form:
        """The normal form of `params`: SamplingParams, normalised or not, a mapping as for `SamplingParams.from_json`, or None for the
        defaults. ValidationError for anything else, and what those raise."""
        key = _fingerprint(params)
        if key is None:
            return self._form(params)
        with self._lock:
            form = self._known.get(key)
        if form is None:
            values = marshal.loads(key)
            if type(values) is tuple:
                values = dict(zip(SamplingParams.__slots__, values, strict=True))
            form = self._form(values)
            form = form._replace(slots=msgspec.msgpack.encode(form.sampling.to_wire(self._schema)))
            with self._lock:
                if len(self._known) >= _KNOWN_FORMS:
                    self._known.clear()
                self._known[key] = form
        return form

    def _form(self, params: Any) -> Form:
        if isinstance(params, Mapping):
            params = SamplingParams.from_json(params)
        elif params is None:
            params = SamplingParams()
        elif not isinstance(params, (SamplingParams, NormalizedSamplingParams)):
            raise ValidationError(f"sampling_params must be an object, not {show(params)}", field="sampling_params")
        sampling: NormalizedSamplingParams = params.normalize(
            vocab_size=self._vocab_size, skip_tokenizer_init=self._skip_tokenizer_init, limits=self._limits
        )
        return Form(sampling, _nbytes(sampling), self._schema)


_KNOWN_FORMS: Final = 512
_LARGEST_KNOWN: Final = 2048  # bytes of a fingerprint: what is remembered stays below a few MiB
_LONGEST_KNOWN: Final = _LARGEST_KNOWN // 5  # entries of a list, which take five bytes or more each
_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_STRINGS: Final = frozenset({str})
_INTEGERS: Final = frozenset({int})
_NOTHING: Final = marshal.dumps({}, 2)
_values: Final = attrgetter(*SamplingParams.__slots__)


def _fingerprint(params: Any) -> bytes | None:
    """A copy of the values as bytes, equal only for values that are equal in type and in every bit; None for what is not plain.

    `marshal` writes the exact type, where comparing would take True, 1 and 1.0 for one value, and -0.0 for 0.0. (Version 2, because
    later ones note which objects are shared, and so depend on who else holds them.) It takes any foreign buffer for bytes, which
    is why the types are looked at first. So are the sizes: what is large is refused without a copy of it, or worked out without one.
    """
    held: Any
    values: Iterable[Any]
    if type(params) is dict:
        if not (_KEYS.issuperset(params) and _STRINGS.issuperset(map(type, params))):
            return None
        held, values = params, params.values()
    elif type(params) is SamplingParams:
        held = values = _values(params)
    elif params is None:
        return _NOTHING
    else:
        return None
    if not _NUMBERS.issuperset(map(type, values)) and not all(map(_is_plain, values)):
        return None
    key = marshal.dumps(held, 2)
    return key if len(key) <= _LARGEST_KNOWN else None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _NUMBERS:
        return True
    if kind is str:
        return len(value) <= _LARGEST_KNOWN
    if (kind is not list and kind is not tuple) or len(value) > _LONGEST_KNOWN:
        return False
    if _STRINGS.issuperset(map(type, value)):
        return sum(map(len, value)) <= _LARGEST_KNOWN
    return _INTEGERS.issuperset(map(type, value))


def _nbytes(sampling: NormalizedSamplingParams) -> int:
    size = 8 * len(sampling.stop_token_ids or ()) + 16 * len(sampling.logit_bias or ())
    size += sum(map(len, sampling.stop_strs)) + sum(map(len, sampling.stop_regex_strs))
    for grammar in (sampling.json_schema, sampling.regex, sampling.ebnf, sampling.structural_tag):
        size += 0 if grammar is None else len(grammar)
    return size + (0 if sampling.custom_params is None else len(msgspec.msgpack.encode(sampling.custom_params)))


_KEYS: Final = frozenset(SamplingParams.__slots__)
_INTERNAL: Final = frozenset(
    {
        "is_normalized",
        "stop_strs",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_regex_max_len",
        "watermark",
        "ebnf_full_assistant",
    }
)
_DEFAULT: Final = SamplingParams()


def _unknown_key(key: object) -> ValidationError:
    field = key if isinstance(key, str) else None
    if key in _INTERNAL:
        return ValidationError(f"sampling_params: {show(key)} is internal and cannot be set by a client", field=field)
    return ValidationError(
        f"sampling_params: {show(key)} is not known; known are {', '.join(SamplingParams.__slots__)}", field=field
    )
