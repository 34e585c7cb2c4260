"""Durations that a caller gives, checked before anything is touched.

Owns: what counts as a duration. A wait that raised in the middle (an infinite or a negative time, a string) would leave a request
registered or a shutdown half done, so every public wait asks here first.
"""

from __future__ import annotations

import threading
from typing import overload

from ..codec.errors import ValidationError, show


@overload
def seconds(name: str, value: None) -> None: ...
@overload
def seconds(name: str, value: float) -> float: ...
@overload
def seconds(name: str, value: float | None) -> float | None: ...
def seconds(name: str, value: float | None) -> float | None:
    """`value` as seconds that a lock can wait for; None stays None. ValidationError unless it is a number of at least 0.

    Infinity and everything beyond what the platform can wait for (some 292 years) are that bound.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValidationError(f"{name} must be a number of seconds of at least 0, not {show(value)}", field=name)
    return float(min(value, threading.TIMEOUT_MAX / 2))
