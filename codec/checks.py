"""Checks of single values: a client's number, flag, list or map, as the type the wire wants or a ValidationError.

Owns: what counts as a number, an integer, a flag, a list of ids. Rules it keeps:

* A bool is not a number and a float is not an integer; nothing is judged by truthiness; every number is finite.
* None is the default that the caller names. What comes back is a copy that shares no container with the client's.
* A message names the key, the place within it, and the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final

import msgspec

from .clientjson import check_text
from .errors import ValidationError, show
from .limits import default


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a client's request may have; names, defaults and reasons are those of `codec.limits`."""

    max_rid_bytes: int = default("max_rid_bytes")
    max_stop_strings: int = default("max_stop_strings")
    max_stop_bytes: int = default("max_stop_bytes")
    max_stop_regexes: int = default("max_stop_regexes")
    max_stop_regex_bytes: int = default("max_stop_regex_bytes")
    max_stop_token_ids: int = default("max_stop_token_ids")
    max_token_ids_logprob: int = default("max_token_ids_logprob")
    max_top_logprobs: int = default("max_top_logprobs")
    max_logit_bias: int = default("max_logit_bias")
    max_grammar_bytes: int = default("max_grammar_bytes")
    max_custom_params_bytes: int = default("max_custom_params_bytes")


DEFAULT_LIMITS: Final = RequestLimits()

_FLOAT32_END: Final = 3.4028235677973366e38  # the first double that rounds to infinity in float32


def out_of_range(key: str, value: object, rule: str, where: str = "") -> ValidationError:
    """The error for a value of the right type outside its range; `rule` follows "it must be"."""
    return ValidationError(f"{key}{where} is {show(value)}; it must be {rule}", field=key)


def number(key: str, value: Any, absent: float, where: str = "") -> float:
    """A finite float; ints become floats. `where` is the place within `key`, for the message."""
    if value is None:
        return absent
    kind = type(value)
    if kind is not float:
        if kind is not int and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValidationError(f"{key}{where} must be a number, not {show(value)}", field=key)
        try:
            value = float(value)
        except OverflowError:
            raise out_of_range(key, value, "a finite number", where) from None
    if not isfinite(value):
        raise out_of_range(key, value, "a finite number", where)
    return value  # type: ignore[no-any-return]


def integer(key: str, value: Any, absent: int, low: int, high: int) -> int:
    """`value` as an int in [low, high], `absent` where it is None. Bools and floats are refused."""
    if value is None:
        return absent
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValidationError(f"{key} must be an integer, not {show(value)}", field=key)
        value = int(value)
    if not low <= value <= high:
        raise out_of_range(key, value, f"in [{low}, {high}]")
    return value  # type: ignore[no-any-return]


def flag(key: str, value: object, absent: bool) -> bool:
    """`value` as a bool, `absent` where it is None. ValidationError for anything else: 0 and "false" are not bools."""
    if value is True or value is False:
        return value
    if value is None:
        return absent
    raise ValidationError(f"{key} must be true or false, not {show(value)}", field=key)


def token_ids(key: str, value: Any, vocab_size: int, limit: int) -> tuple[int, ...] | None:
    """A list of at most `limit` ids of the vocabulary as a tuple; None where it is None or empty."""
    if value is None:
        return None
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ValidationError(f"{key} must be a list of token ids, not {show(value)}", field=key)
    if len(value) > limit:
        raise ValidationError(f"{key} holds {len(value)} ids; at most {limit} are allowed", field=key)
    for at, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValidationError(
                f"{key}[{at}] is {show(token)}; it must be an integer in [0, {vocab_size})", field=key
            )
    return tuple(int(token) for token in value) or None


def strings(key: str, value: Any, limit: int) -> tuple[str, ...]:
    """One string or a list of at most `limit` of them as a tuple; empty where it is None."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise ValidationError(f"{key} must be a string or a list of strings, not {show(value)}", field=key)
    if len(value) > limit:
        raise ValidationError(f"{key} holds {len(value)} entries; at most {limit} are allowed", field=key)
    for at, entry in enumerate(value):
        if not isinstance(entry, str):
            raise ValidationError(f"{key}[{at}] must be a string, not {show(entry)}", field=key)
    return tuple(str(entry) for entry in value)


def grammar(key: str, value: Any, limit: int) -> str | None:
    """A grammar within its limit of bytes; an empty one counts as absent."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise ValidationError(f"{key} must be a string, not {show(value)}", field=key)
    size = check_text(key, value)
    if size > limit:
        raise ValidationError(f"{key} has {size} bytes; at most {limit} are allowed", field=key)
    return str(value)


def logit_bias(value: Any, vocab_size: int, limit: int) -> dict[str, float] | None:
    """A copy of the biases: keys are ids of the vocabulary in ASCII digits, values finite in float32."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValidationError(
            f"logit_bias must be an object of token id to bias, not {show(value)}", field="logit_bias"
        )
    if len(value) > limit:
        raise ValidationError(f"logit_bias holds {len(value)} entries; at most {limit} are allowed", field="logit_bias")
    bias: dict[str, float] = {}
    for key, entry in value.items():
        # isdecimal alone admits other scripts' digits, and int() of a very long string is slow or raises
        if not (
            isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 20 and int(key) < vocab_size
        ):
            raise ValidationError(
                f"logit_bias: key {show(key)} must be a token id in [0, {vocab_size}) written in decimal digits",
                field="logit_bias",
            )
        value_of = number("logit_bias", entry, float("nan"), f"[{key}]")  # null has no default here
        if not abs(value_of) < _FLOAT32_END:
            raise ValidationError(
                f"logit_bias[{key}] is {show(entry)}; it must be finite in float32", field="logit_bias"
            )
        bias[str(key)] = value_of
    return bias


def custom_params(value: Any, limit: int) -> dict[str, Any] | None:
    """A copy of the free-form parameters: scalars, lists of scalars, objects of scalars, all of them encodable."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValidationError(f"custom_params must be an object, not {show(value)}", field="custom_params")
    params = {_key(key, "custom_params"): _custom(entry, f"custom_params[{show(key)}]") for key, entry in value.items()}
    size = len(msgspec.msgpack.encode(params))
    if size > limit:
        raise ValidationError(f"custom_params has {size} bytes; at most {limit} are allowed", field="custom_params")
    return params


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValidationError(f"{where}: key {show(key)} must be a string", field="custom_params")
    check_text("custom_params", key)
    return str(key)


def _custom(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {_key(key, where): _scalar(entry, where) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scalar(entry, where) for entry in value]
    return _scalar(value, where)


def _scalar(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        check_text("custom_params", value)
        return str(value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValidationError(
                f"{where} is {show(value)}; integers must be in [-2^63, 2^64 - 1]", field="custom_params"
            )
        return int(value)
    if isinstance(value, float):
        if not isfinite(value):
            raise ValidationError(f"{where} is {show(value)}; it must be a finite number", field="custom_params")
        return float(value)
    raise ValidationError(
        f"{where} is {show(value)}; allowed are a scalar, a list of scalars or an object of scalars",
        field="custom_params",
    )
