"""A client's JSON and text: parsed or refused with a message that says what is wrong.

Owns: what of JSON is accepted. Rules it keeps:

* Numbers are finite: ``1e400``, ``NaN`` and ``Infinity`` are refused (Python's own parser accepts all three).
* A lone surrogate, escaped or raw, is refused: it makes a string that no tokenizer and no wire can encode.
* No message repeats the body; a fault is named by its place in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

import msgspec

from .errors import ValidationError, show


def check_text(field: str, text: str) -> int:
    """Bytes of `text` in UTF-8. ValidationError if a lone surrogate makes that impossible; the text is not echoed."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValidationError(
            f"{field} holds a lone surrogate, which cannot be encoded as UTF-8", field=field
        ) from None


def parse_json(source: object, what: str) -> Any:
    """The value of the JSON text `source` (`what` names it in errors). Raises ValidationError and nothing else.

    Integers have any size here; the fields bound them. Of a key that stands twice the last value is taken.
    """
    if not isinstance(source, (bytes, bytearray, memoryview, str)):
        raise ValidationError(f"{what} must be JSON text or an object, not {show(source)}")
    try:
        return msgspec.json.decode(source)
    except RecursionError:
        raise ValidationError(f"{what} is not usable: it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeError, ValueError) as fault:
        raise ValidationError(f"{what} is not usable JSON: {_explain(source, fault)}") from None


def _explain(source: bytes | bytearray | memoryview | str, fault: Exception) -> str:
    """What is wrong, found again by the standard library's more lenient parser, which keeps what the strict one refuses."""
    try:
        text = source if isinstance(source, str) else bytes(source).decode("utf-8")
        text.encode("utf-8")
    except UnicodeError:
        return "it is not UTF-8"
    try:
        value = json.loads(text, parse_constant=_constant)
    except _Constant as constant:
        return f"{constant} is not a JSON number"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return str(error)[:200]
    return _find(value) or str(fault)[:200]


class _Constant(Exception):
    pass


def _constant(name: str) -> object:
    raise _Constant(name)


def _find(value: object) -> str | None:
    """The place of a lone surrogate or of a number that is not finite. Depth first, so it holds one path and not all of them."""
    fault = _fault(value, "")
    stack = [_entries(value, "")]
    while stack and fault is None:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            continue
        path, entry = step
        fault = _fault(entry, path)
        if isinstance(entry, (dict, list)):
            stack.append(_entries(entry, path))
    return fault


def _entries(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield f"{path}.{show(key)[1:-1]}"[:200], entry
    elif isinstance(value, list):
        for at, entry in enumerate(value):
            yield f"{path}[{at}]"[:200], entry


def _fault(value: object, path: str) -> str | None:
    where = f"at {path}" if path else "at the top"
    if isinstance(value, str) and not _encodable(value):
        return f"a lone surrogate {where} cannot be encoded as UTF-8"
    if isinstance(value, float) and not isfinite(value):
        return f"a number {where} is too large"
    if isinstance(value, dict) and not all(map(_encodable, value)):
        return f"a lone surrogate in a key {where} cannot be encoded as UTF-8"
    return None


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
