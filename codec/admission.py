"""Admission: what may become a request, and the type that proves it.

Owns: `GenerateRequest` (a client's), `NormalizedRequest` (checked), `admit` between them, and `fit_length`. Rules it keeps:

* `admit` is everything that can be judged on the caller's thread: shape, rid, ids, sampling parameters, patterns, flags and
  wire fields. What needs the tokenizer (the number of tokens) is `fit_length`. Neither leaves a trace when it refuses.
* Nothing but a `NormalizedRequest` can be encoded for the ring, and only `admit` makes one.
* Ids are ints in [0, vocab_size), judged before they become 64 bit integers: -1 as a logprob id silently named the *last*
  token in the field, and 2^32 + 5 became 5 in a narrower column. A bool is not an id.
* The window: a prompt must leave room (input + reserved < context_len) and input + reserved + max_new_tokens must fit; nothing
  is clipped unless `allow_auto_truncate` is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .checks import DEFAULT_LIMITS, RequestLimits, flag, integer, token_ids
from .clientjson import check_text
from .errors import ValidationError, show
from .limits import default
from .rid import Rid
from .sampling import Form, Normaliser, NormalizedSamplingParams
from .schema import IngressField, WireSchema

Ids = NDArray[np.int64]

_INT64_MAX: Final = (1 << 63) - 1
_FIXED_BYTES: Final = (
    1024  # what a request costs beside its text and ids: objects of the table, the header's fixed slots
)


MEDIA_KEYS: Final = ("image_data", "audio_data", "video_data", "modalities")
"""What a body may carry for an encoder, whose input it is; headrace never looks inside."""


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True):
    """What admission needs to know of the model and the configuration. Lengths count tokens.

    `vocab_size` is the number of rows of the model's embedding, not the tokenizer's base vocabulary (added special tokens lie
    above that). `max_prompt_bytes` bounds a prompt's UTF-8 before it is tokenised; whoever knows a sound bound on bytes per
    token lowers it.
    """

    context_len: int
    vocab_size: int
    num_reserved_tokens: int = 0
    skip_tokenizer_init: bool = False
    allow_auto_truncate: bool = False
    enable_return_hidden_states: bool = False
    max_prompt_bytes: int = default("max_prompt_bytes")
    has_encoder: bool = False
    limits: RequestLimits = DEFAULT_LIMITS


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What a client asks for: exactly one of `text` and `input_ids`. Nothing is checked until `admit`.

    None means the default for every field. `logprob_start_len` -1 is "no input logprobs". `wire_fields` are header fields of
    the schema that headrace does not own. `rid` is the client's own id, or a `Rid` that headrace made.
    """

    text: str | None = None
    input_ids: Any = None
    sampling_params: Any = None
    rid: Any = None
    stream: Any = False
    return_logprob: Any = False
    logprob_start_len: Any = -1
    top_logprobs_num: Any = 0
    token_ids_logprob: Any = None
    return_text_in_logprobs: Any = False
    return_hidden_states: Any = False
    add_special_tokens: Any = True
    wire_fields: Mapping[str, Any] | None = None
    media: Mapping[str, Any] | None = None


class NormalizedRequest(msgspec.Struct, frozen=True):
    """A request that passed `admit`: exactly one of `text` and `input_ids` (int64 [tokens], this request's own copy).

    `nbytes` is what it counts against the budget of admitted bytes: text, ids, and everything of a client's own size. `form` is
    where `sampling` comes from; what else is in it is good only for those very parameters.
    """

    rid: Rid
    text: str | None
    input_ids: Ids | None
    sampling: NormalizedSamplingParams
    stream: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...] | None
    return_text_in_logprobs: bool
    return_hidden_states: bool
    add_special_tokens: bool
    wire_fields: dict[str, Any]
    media: dict[str, Any] | None
    nbytes: int
    form: Form | None = None


class Fit(NamedTuple):
    """How a prompt fits: keep the first `n_input` tokens; `max_new_tokens` for the scheduler (None: no cap)."""

    n_input: int
    max_new_tokens: int | None


class Admission:
    """`admit` for one set of rules and one schema, with what both mean worked out once. Safe to call from several threads."""

    def __init__(self, rules: AdmissionRules, schema: WireSchema) -> None:
        self.rules = rules
        self.schema = schema
        self._normalise = Normaliser(rules.vocab_size, rules.skip_tokenizer_init, rules.limits, schema)
        self._most_top_logprobs = min(rules.limits.max_top_logprobs, rules.vocab_size)

    def admit(self, request: GenerateRequest) -> NormalizedRequest:
        """See `admit`."""
        if not isinstance(request, GenerateRequest):
            raise ValidationError(f"a request must be a GenerateRequest, not {show(request)}")
        given = request.rid
        if given is None:
            return self._admit(request, Rid.mint())
        rid = given if isinstance(given, Rid) else Rid.from_client(given, self.rules.limits.max_rid_bytes)
        try:
            return self._admit(request, rid)
        except ValidationError as error:
            error.rid = rid.client_facing
            raise

    def _admit(self, request: GenerateRequest, rid: Rid) -> NormalizedRequest:
        text, ids, rules = request.text, None, self.rules
        if (text is None) == (request.input_ids is None):
            got = "neither" if text is None else "both"
            raise ValidationError(f"exactly one of text and input_ids must be given, not {got}", field="text")
        nbytes = _FIXED_BYTES
        if text is not None:
            if not isinstance(text, str):
                raise ValidationError(f"text must be a string, not {show(text)}", field="text")
            if rules.skip_tokenizer_init:
                raise ValidationError(
                    "text needs a tokenizer, and skip_tokenizer_init is set: send input_ids", field="text"
                )
            size = check_text("text", text) if len(text) <= rules.max_prompt_bytes else len(text)
            if size > rules.max_prompt_bytes:
                raise ValidationError(
                    f"text has {size} bytes or more; at most {rules.max_prompt_bytes} can be tokenised or fit",
                    field="text",
                )
            nbytes += size
            text = str(text)
        else:
            ids = prompt_ids(request.input_ids, rules.vocab_size)
            nbytes += ids.nbytes
        form = self._normalise(request.sampling_params)
        hidden = request.return_hidden_states
        if (
            hidden is not False
            and flag("return_hidden_states", hidden, False)
            and not rules.enable_return_hidden_states
        ):
            raise ValidationError(
                "return_hidden_states needs a server started with enable_return_hidden_states",
                field="return_hidden_states",
            )
        asked, media = None, None
        wire_fields: dict[str, Any] = {}
        if request.token_ids_logprob is not None:
            asked = token_ids(
                "token_ids_logprob", request.token_ids_logprob, rules.vocab_size, rules.limits.max_token_ids_logprob
            )
            nbytes += 8 * len(asked or ())
        if request.media is not None:
            media, size = _media(request.media, rules)
            nbytes += size
        if request.wire_fields is not None:
            wire_fields = _wire_fields(request.wire_fields, self.schema, rules.limits.max_custom_params_bytes)
            nbytes += _encoded_size(wire_fields) if wire_fields else 0
        start_len, top = request.logprob_start_len, request.top_logprobs_num
        if start_len is not _NO_LOGPROBS:
            start_len = integer("logprob_start_len", start_len, -1, -1, _INT64_MAX)
        if top is not _NO_TOP:
            top = integer("top_logprobs_num", top, 0, 0, self._most_top_logprobs)
        flags: tuple[Any, ...] = (
            request.stream,
            request.return_logprob,
            request.return_text_in_logprobs,
            hidden,
            request.add_special_tokens,
        )
        if not _BOOLS.issuperset(map(type, flags)):
            flags = tuple(flag(name, given, absent) for given, (name, absent) in zip(flags, _FLAGS, strict=True))
        stream, return_logprob, return_text, hidden, special = flags
        return NormalizedRequest(  # by position: sixteen keywords cost eight times as much
            rid,
            text,
            ids,
            form.sampling,
            stream,
            return_logprob,
            start_len,
            top,
            asked,
            return_text,
            hidden,
            special,
            wire_fields,
            media,
            nbytes + form.nbytes,
            form,
        )


_BOOLS: Final = frozenset({bool})
_FLAGS: Final = (
    ("stream", False),
    ("return_logprob", False),
    ("return_text_in_logprobs", False),
    ("return_hidden_states", False),
    ("add_special_tokens", True),
)
_NO_LOGPROBS: Final = -1
_NO_TOP: Final = 0
_admissions: Final[dict[tuple[int, int], Admission]] = {}


def admit(request: GenerateRequest, rules: AdmissionRules, schema: WireSchema) -> NormalizedRequest:
    """The checked form of `request`. Raises ValidationError, which names the field and shows its value safely.

    Its `rid` is the client's own, once that was found usable.
    """
    admission = _admissions.get((id(rules), id(schema)))  # hashing both by content would cost more than an admission
    if admission is None or admission.rules is not rules or admission.schema is not schema:
        if len(_admissions) >= 64:
            _admissions.clear()
        admission = _admissions[id(rules), id(schema)] = Admission(rules, schema)
    return admission.admit(request)


def fit_length(n_input_tokens: int, request: NormalizedRequest, rules: AdmissionRules) -> Fit:
    """How `request` with a prompt of `n_input_tokens` tokens fits the context. Raises ValidationError where it does not.

    With `allow_auto_truncate` a prompt that does not fit keeps its head and leaves room for max_new_tokens, at least one token
    of each; a prompt that fits has max_new_tokens lowered, which is refused below min_new_tokens.
    """
    sampling = request.sampling
    asked = sampling.max_new_tokens
    if (
        asked
        and sampling.min_new_tokens <= asked
        and request.logprob_start_len <= n_input_tokens > 0
        and n_input_tokens + asked <= rules.context_len - rules.num_reserved_tokens
    ):
        return Fit(n_input_tokens, asked)  # as most requests do
    try:
        return _fit(n_input_tokens, request, rules)
    except ValidationError as error:
        error.rid = request.rid.client_facing
        raise


def _fit(n_input_tokens: int, request: NormalizedRequest, rules: AdmissionRules) -> Fit:
    asked, least = request.sampling.max_new_tokens, request.sampling.min_new_tokens
    room = rules.context_len - rules.num_reserved_tokens
    kept, budget = n_input_tokens, asked
    if n_input_tokens < 1:
        raise ValidationError(
            "the prompt is empty: it has no tokens", field="input_ids" if request.text is None else "text"
        )
    if n_input_tokens >= room:
        if not rules.allow_auto_truncate or room < 2:
            raise ValidationError(
                f"the prompt has {n_input_tokens} tokens{_reserved(rules)}; a context of {rules.context_len} leaves no room for "
                "output",
                field="input_ids" if request.text is None else "text",
            )
        wanted = max(1, least if asked is None else asked)
        kept = max(1, room - wanted)
        budget = None if asked is None else min(asked, room - kept)
    elif asked is not None and n_input_tokens + asked > room:
        if not rules.allow_auto_truncate:
            raise ValidationError(
                f"the prompt has {n_input_tokens} tokens{_reserved(rules)} and max_new_tokens is {asked}; together they do not fit "
                f"a context of {rules.context_len}",
                field="max_new_tokens",
            )
        budget = room - n_input_tokens
    if budget is not None and budget < least:
        raise ValidationError(
            f"min_new_tokens is {least}, but only {budget} new tokens fit behind {kept} tokens of prompt",
            field="min_new_tokens",
        )
    if request.logprob_start_len > kept:
        raise ValidationError(
            f"logprob_start_len is {request.logprob_start_len}, beyond the prompt's {kept} tokens",
            field="logprob_start_len",
        )
    return Fit(kept, budget)


def _reserved(rules: AdmissionRules) -> str:
    return f" (and {rules.num_reserved_tokens} are reserved)" if rules.num_reserved_tokens else ""


def _media(media: Any, rules: AdmissionRules) -> tuple[dict[str, Any] | None, int]:
    """What goes to the encoder, and its size. Refused where there is no encoder: media that is ignored gives a wrong answer."""
    if not isinstance(media, Mapping):
        raise ValidationError(f"media must be an object, not {show(media)}", field="media")
    if not media:
        return None, 0
    for key in media:
        if key not in MEDIA_KEYS:
            raise ValidationError(
                f"{show(key)} is not a kind of media; known are {', '.join(MEDIA_KEYS)}", field="media"
            )
        if not rules.has_encoder:
            raise ValidationError(f"{key}: this server has no encoder for media", field=key)
    try:
        size = len(msgspec.msgpack.encode(media))
    except (TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError) as fault:
        raise ValidationError(f"media cannot be encoded: {type(fault).__name__}", field="media") from None
    if size > rules.max_prompt_bytes:
        raise ValidationError(f"media has {size} bytes; at most {rules.max_prompt_bytes} are taken", field="media")
    return dict(media), size


def prompt_ids(value: Any, vocab_size: int, field: str = "input_ids") -> Ids:
    """A prompt's ids as an int64 array of its own. ValidationError unless they are ints (no bools) in [0, vocab_size)."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise ValidationError(
                f"{field} must be one row of integers, not {value.dtype} with shape {value.shape}", field=field
            )
        low, high = (int(value.min()), int(value.max())) if value.size else (0, 0)  # before the cast: it could wrap
        if low < 0 or high >= vocab_size:
            at = int(np.argmax((value < 0) | (value >= vocab_size)))
            raise _bad_id(field, at, int(value[at]), vocab_size)
        ids = value.astype(np.int64)
    else:
        if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Sequence):
            raise ValidationError(f"{field} must be a list of token ids, not {show(value)}", field=field)
        if value and set(map(type, value)) != {int}:
            at = next(at for at, token in enumerate(value) if type(token) is not int)
            if not isinstance(value[at], np.integer):
                raise _bad_id(field, at, value[at], vocab_size)
            value = [int(v) if isinstance(v, np.integer) else v for v in value]
            return prompt_ids(value, vocab_size, field)
        if value and not (min(value) >= 0 and max(value) < vocab_size):
            at = next(at for at, token in enumerate(value) if not 0 <= token < vocab_size)
            raise _bad_id(field, at, value[at], vocab_size)
        ids = np.array(value, dtype=np.int64)
    if ids.size == 0:
        raise ValidationError(f"{field} is empty: a prompt needs at least one token", field=field)
    return ids


def _bad_id(field: str, at: int, value: object, vocab_size: int) -> ValidationError:
    return ValidationError(f"{field}[{at}] is {show(value)}; it must be an integer in [0, {vocab_size})", field=field)


def _encoded_size(value: object) -> int:
    return len(msgspec.msgpack.encode(value))


_WIRE_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "any": (object,),
}


def _wire_fields(fields: Any, schema: WireSchema, limit: int) -> dict[str, Any]:
    """Header fields that headrace does not own, checked against the schema; null is the field's default."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise ValidationError(f"wire_fields must be an object, not {show(fields)}", field="wire_fields")
    free = {field.name: field for field in schema.ingress_fields if not field.owned}
    checked: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in free:
            raise ValidationError(
                f"{show(name)} is not a field of wire {schema.name} that a client may set; those are {', '.join(free)}",
                field=name if isinstance(name, str) else "wire_fields",
            )
        if value is not None:
            checked[name] = _wire_value(free[name], value, limit)
    return checked


def _wire_value(field: IngressField, value: Any, limit: int) -> Any:
    kind = field.type.removesuffix("?")
    if kind == "ints":
        if not isinstance(value, (list, tuple)):
            raise ValidationError(f"{field.name} must be a list of integers, not {show(value)}", field=field.name)
        return [integer(f"{field.name}[{at}]", entry, 0, -_INT64_MAX - 1, _INT64_MAX) for at, entry in enumerate(value)]
    wanted = _WIRE_TYPES.get(kind)
    if (
        wanted is None
        or not isinstance(value, wanted)
        or (isinstance(value, bool) and bool not in wanted and kind != "any")
    ):
        raise ValidationError(f"{field.name} must be of type {field.type}, not {show(value)}", field=field.name)
    if isinstance(value, str):
        check_text(field.name, value)
    try:
        size = _encoded_size(value)
    except Exception:  # whatever has no place in msgpack: integers beyond 64 bit, foreign objects, endless nesting
        raise ValidationError(f"{field.name} cannot be put on the wire: {show(value)}", field=field.name) from None
    if size > limit:
        raise ValidationError(f"{field.name} has {size} bytes; at most {limit} are allowed", field=field.name)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value)) if kind == "any" else value
