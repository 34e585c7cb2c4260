"""Finish reasons: a closed set plus `Unknown`, each echoed exactly as it came.

Owns: how a finish reason map is understood. Rules it keeps (specs: the page on the wire, "Finish reasons"):

* A map this build does not know is a normal end, neither an abort nor a matched stop, and is echoed key for key. A scheduler
  that learns a new reason must not break a front-end that has not.
* Unknown *extra* keys on a known type never change its class: an abort with a status and a new key is still that error.
* No map can fail a frame: what Python cannot hold without loss (duplicate or unhashable keys, extension types, timestamps,
  text that is not UTF-8, nesting deeper than 64) is `Unknown` too, kept as its raw msgpack bytes.
* A bool is not an int here: ``{"type": "stop", "matched": true}`` is Unknown, not token 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, overload

import msgspec

from .errors import show
from .frame_walk import MAX_DEPTH, Lossy, Malformed, read_strict

_PLAIN: Final = (str, int, float, bool, bytes, type(None))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_matched(value: object) -> bool:
    if value is None or isinstance(value, str) or _is_int(value):
        return True
    return isinstance(value, list) and all(_is_int(item) for item in value)


def _is_int_or_nil(value: object) -> bool:
    return value is None or _is_int(value)


def _is_str_or_nil(value: object) -> bool:
    return value is None or isinstance(value, str)


class FinishReason:
    """Why a request ended. One of `Stop`, `Length`, `Abort`, `Unknown`; immutable, compared by content."""

    __slots__ = ("_map",)

    _map: dict[Any, Any]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a finish reason is immutable; cannot set {name}")

    def _fill(self, table: Mapping[Any, Any]) -> None:
        object.__setattr__(self, "_map", dict(table))

    @property
    def matched(self) -> int | str | list[int] | None:
        """What was matched (a token id, a stop string or pattern, a list of token ids); None for every other end."""
        return None

    @property
    def abort_status(self) -> int | None:
        """The status code of an abort that has one: then it is a request error. None for every other end."""
        return None

    @property
    def raw(self) -> bytes | None:
        """The msgpack bytes of a reason that Python cannot hold as a dict without loss; None for all others."""
        return None

    def to_map(self) -> Any:
        """The map exactly as it came, key for key (a new dict); the raw msgpack `bytes` where `raw` is not None."""
        return dict(self._map)

    def to_json(self) -> dict[str, object]:
        """A dict for JSON answers: the map itself, or ``{"type": None, "msgpack": hex}`` for a raw one."""
        return {str(key): value for key, value in self._map.items()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FinishReason):
            return NotImplemented
        return type(self) is type(other) and bool(self.to_map() == other.to_map())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({show(self.to_map())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return parse_finish_reason, (self.to_map(),)


class Stop(FinishReason):
    """The model stopped: end of sequence, or a stop token, string or pattern (`matched`)."""

    __slots__ = ()

    def __init__(self, matched: int | str | list[int] | None = None, extra: Mapping[str, Any] | None = None) -> None:
        if not _is_matched(matched):
            raise TypeError(f"matched must be an int, a str, a list of ints or None, not {show(matched)}")
        self._fill({"type": "stop", "matched": matched, **(extra or {})})

    @property
    def matched(self) -> int | str | list[int] | None:
        value: int | str | list[int] | None = self._map.get("matched")
        return value


class Length(FinishReason):
    """A length limit was reached: `length` output tokens (None where the scheduler did not say)."""

    __slots__ = ()

    def __init__(self, length: int, extra: Mapping[str, Any] | None = None) -> None:
        if not _is_int(length):
            raise TypeError(f"length must be an int, not {show(length)}")
        self._fill({"type": "length", "length": length, **(extra or {})})

    @property
    def length(self) -> int | None:
        value: int | None = self._map.get("length")
        return value


class Abort(FinishReason):
    """The scheduler ended the request. With a `status_code` it is a request error with that status, without one an end."""

    __slots__ = ()

    def __init__(
        self,
        message: str | None = None,
        status_code: int | None = None,
        err_type: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not (_is_str_or_nil(message) and _is_int_or_nil(status_code) and _is_str_or_nil(err_type)):
            raise TypeError("an abort has a str message, an int status_code and a str err_type, each may be None")
        self._fill(
            {"type": "abort", "message": message, "status_code": status_code, "err_type": err_type, **(extra or {})}
        )

    @property
    def message(self) -> str | None:
        value: str | None = self._map.get("message")
        return value

    @property
    def status_code(self) -> int | None:
        value: int | None = self._map.get("status_code")
        return value

    @property
    def err_type(self) -> str | None:
        value: str | None = self._map.get("err_type")
        return value

    @property
    def abort_status(self) -> int | None:
        return self.status_code


class Unknown(FinishReason):
    """A reason this build does not know, or one whose fields have unexpected types. Echoed unchanged."""

    __slots__ = ("_raw",)

    _raw: bytes | None

    def __init__(self, table: Mapping[Any, Any] | bytes) -> None:
        raw = bytes(table) if isinstance(table, (bytes, bytearray)) else None
        object.__setattr__(self, "_raw", raw)
        self._fill({} if isinstance(table, (bytes, bytearray)) else table)

    @property
    def raw(self) -> bytes | None:
        return self._raw

    def to_map(self) -> Any:
        return dict(self._map) if self._raw is None else self._raw

    def to_json(self) -> dict[str, object]:
        return super().to_json() if self._raw is None else {"type": None, "msgpack": self._raw.hex()}


_FIELDS: Final[dict[str, tuple[type[FinishReason], tuple[tuple[str, Any], ...]]]] = {
    "stop": (Stop, (("matched", _is_matched),)),
    "length": (Length, (("length", _is_int),)),
    "abort": (
        Abort,
        (("message", _is_str_or_nil), ("status_code", _is_int_or_nil), ("err_type", _is_str_or_nil)),
    ),
}


@overload
def parse_finish_reason(value: Mapping[Any, Any] | bytes | msgspec.Raw | FinishReason) -> FinishReason: ...
@overload
def parse_finish_reason(value: None) -> None: ...
def parse_finish_reason(value: Mapping[Any, Any] | bytes | msgspec.Raw | FinishReason | None) -> FinishReason | None:
    """A finish reason from its map, or from the msgpack bytes of one; None stays None (still running).

    Total on maps: whatever the keys and values, the result's `to_map()` is the argument again. Raises TypeError for a value
    that is neither a map nor bytes.
    """
    if value is None or isinstance(value, FinishReason):
        return value
    if isinstance(value, (bytes, bytearray, msgspec.Raw)):
        return _parse_raw(bytes(value))
    if not isinstance(value, Mapping):
        raise TypeError(f"a finish reason is a map or None, not {show(value)}")
    kind = value.get("type")
    if isinstance(kind, str) and kind in _FIELDS:
        cls, fields = _FIELDS[kind]
        if all(check(value[name]) for name, check in fields if name in value):
            known = cls.__new__(cls)
            known._fill(value)
            return known
    return Unknown(value)


def _is_plain(value: object, depth: int = 0) -> bool:
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, list):
        return all(_is_plain(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and _is_plain(item, depth + 1) for key, item in value.items())
    return isinstance(value, _PLAIN)


def decode_plain(raw: bytes) -> object:
    """The msgpack value in `raw` in plain Python types, or `raw` itself as a `msgspec.Raw` where they cannot hold it.

    The library's decoder keeps the last of two equal keys without a word and turns extension types into objects, so its
    answer counts only when encoding it again gives the same bytes; everything else goes to the strict reader.
    """
    try:
        value = msgspec.msgpack.decode(raw)
        if msgspec.msgpack.encode(value) == raw and _is_plain(value):
            return value
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        pass
    try:
        value, end = read_strict(raw, 0, len(raw))
    except (Lossy, Malformed):
        return msgspec.Raw(raw)
    return value if end == len(raw) else msgspec.Raw(raw)


def _parse_raw(raw: bytes) -> FinishReason:
    if len(raw) <= _SHORT and (known := _parse_short(raw)) is not None:
        return known
    value = decode_plain(raw)
    return parse_finish_reason(value) if isinstance(value, dict) else Unknown(raw)


_SHORT: Final = 64


@lru_cache(maxsize=1024)
def _parse_short(raw: bytes) -> FinishReason | None:
    """The reason in a few bytes, remembered, because a scheduler ends most requests with the same few; None for one that holds
    something that its readers could change."""
    value = decode_plain(raw)
    if isinstance(value, dict) and not any(isinstance(item, (list, dict)) for item in value.values()):
        return parse_finish_reason(value)
    return None


def finish_to_wire(value: FinishReason | Mapping[Any, Any] | None) -> object:
    """What the encoder puts into the finish column: nil, the map, or the raw bytes as they came."""
    if isinstance(value, FinishReason):
        return msgspec.Raw(value.raw) if value.raw is not None else value._map
    return value
