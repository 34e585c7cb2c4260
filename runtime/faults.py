"""Server faults in the log: each reason at most once a second, with a count, and never with anything a client wrote.

Owns: the rate limit, and how an exception is put into a line. Rules it keeps:

* A scheduler that sends one bad frame per step, or a model that emits a bad id for every request, must not fill a disk: in the field
  one such fault wrote 19 000 tracebacks. What was held back is counted and told with the next line of that reason, or at the end.
* The message of an exception can hold text, ids or a rid (``KeyError: 'the prompt'``), so only its type and where it was raised are
  logged. `HeadraceError`s keep their words, because their messages follow the same rule.
* Stages have no clock. They name their faults; a driver brings them here.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable

from ..codec.errors import HeadraceError

_EVERY_S = 1.0
_REASONS = 256  # reasons are our own words and names of exception types; a table of more than that is forgotten whole


class FaultLog:
    """See the module's head. `clock` gives seconds. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], float] = {}
        self._held: dict[tuple[str, str], int] = {}

    def report(self, logger: str, reason: str, detail: str = "") -> None:
        """One fault. `reason` is a stable phrase, `detail` is for this line only."""
        key = (logger, reason)
        now = self._clock()
        with self._lock:
            last = self._last.get(key)
            if last is not None and now - last < _EVERY_S:
                self._held[key] = self._held.get(key, 0) + 1
                return
            if len(self._last) >= _REASONS:
                self._last.clear()
                self._held.clear()
            self._last[key] = now
            held = self._held.pop(key, 0)
        # Outside the lock: a handler is a user's code.
        logging.getLogger(logger).error("%s%s%s", reason, _more(held), detail and f"\n{detail}")

    def flush(self) -> None:
        """Tell what is still held back."""
        with self._lock:
            held = dict(self._held)
            self._held.clear()
        for (logger, reason), count in held.items():
            logging.getLogger(logger).error("%s%s", reason, _more(count))


def _more(held: int) -> str:
    return f" ({held} more since the last line)" if held else ""


def describe(fault: BaseException) -> str:
    """The fault without what a client may have written: its type, and its words only where they are ours."""
    return f"{type(fault).__name__}: {fault.message}" if isinstance(fault, HeadraceError) else type(fault).__name__


def where(fault: BaseException) -> str:
    """Where the fault was raised, outermost call first, one place a line: a traceback without its message and without source text."""
    frames = traceback.extract_tb(fault.__traceback__)
    return "\n".join(f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
