"""The thread driver: one thread per stage (or several stages on one), each pumping moves and waiting on its bell.

Owns: threads, waiting, crash handling, pinning. Rules it keeps:

* A thread runs moves until none is enabled, then waits on its bell; every source of its moves rings that bell.
* Stopping is a fact, not an interrupt: a thread that is told to stop first runs out of enabled moves.
* Whatever a move raises is a fault of the stage, because stages turn every request's fault into that request's error. The driver
  logs it, tells its owner (who fails what is live), and the thread ends; nothing goes on with a half-done stage.
* `call` runs a function between two steps of a thread, which is how another thread looks at a stage's state without a lock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..codec.errors import InternalError
from .channel import Bell
from .faults import describe, where

_LOG = logging.getLogger("headrace.threads")
_MOVES_BETWEEN_CALLS = 16
_warned_about_cores = threading.Event()


class DriverThread:
    """One thread and its moves. `pump()` returns True if it moved; it is called only on this thread."""

    def __init__(
        self,
        name: str,
        bell: Bell,
        pump: Callable[[], bool],
        on_death: Callable[[str, BaseException], None],
        *,
        core: int | None = None,
        primitives: Any = threading,
    ) -> None:
        self.name = name
        self._bell = bell
        self._pump = pump
        self._on_death = on_death
        self._core = core
        self._primitives = primitives
        self._lock = primitives.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._stop = False
        self._started = False
        self._ended = False
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    def start(self) -> None:
        """Run on a thread of its own."""
        with self._lock:
            self._started = True
        try:
            self._thread.start()
        except BaseException:
            with self._lock:
                self._started = False
            raise

    def stop(self) -> None:
        """End after the moves that are enabled now. From any thread; does not wait."""
        with self._lock:
            self._stop = True
        self._bell.ring()

    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return self._thread is threading.current_thread()

    def join(self, timeout: float) -> bool:
        """True when the thread has ended (or is the caller itself, which ends when it returns)."""
        if self.is_current() or self._thread.ident is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def call(self, function: Callable[[], Any], timeout: float) -> Any:
        """The result of `function()`, run between two steps of this thread; TimeoutError after `timeout` seconds."""
        if self.is_current():
            return function()
        done = self._primitives.Event()
        box: list[Any] = []

        def run() -> None:
            try:
                box.append((True, function()))
            except Exception as fault:  # carried to the caller, who raises it
                box.append((False, fault))
            finally:
                done.set()

        with self._lock:
            running = self._started and not self._ended
            if running:
                self._calls.append(run)
        if not running:
            return function()  # no thread has the stage: the caller may look
        self._bell.ring()
        if not done.wait(timeout):
            raise TimeoutError(f"{self.name} did not answer within {timeout} s")
        ok, value = box[0]
        if not ok:
            raise value
        return value

    def _take_calls(self) -> tuple[Sequence[Callable[[], None]], bool]:
        with self._lock:
            if not self._calls:
                return (), self._stop
            calls = list(self._calls)
            self._calls.clear()
            return calls, self._stop

    def run(self) -> None:
        """The thread's body; called directly only where a test runs it on a thread of its own making."""
        with self._lock:
            self._started = True
        try:
            self._pin()
            while True:
                moves = 0
                while self._pump():
                    moves += 1
                    if moves % _MOVES_BETWEEN_CALLS == 0:  # under a flood `call` must still be answered
                        self._answer()
                if self._answer():
                    # What came before the word to stop is still served; it may have come since the last move found nothing.
                    while self._pump():
                        pass
                    return
                self._bell.wait()
        except BaseException as fault:
            # A stage died. It is not resumed: its state may be half changed.
            _LOG.error("%s died: %s\n%s", self.name, describe(fault), where(fault))
            self._on_death(self.name, fault)
        finally:
            with self._lock:
                self._ended = True
            self._answer()

    def _answer(self) -> bool:
        """Run the calls that wait; True if the thread is to stop."""
        calls, stop = self._take_calls()
        for call in calls:
            call()
        return stop

    def _pin(self) -> None:
        if self._core is None:
            return
        try:
            os.sched_setaffinity(0, {self._core})
        except (AttributeError, OSError, ValueError) as fault:
            if not _warned_about_cores.is_set():
                _warned_about_cores.set()
                _LOG.warning("threads stay unpinned: core %s cannot be used (%s)", self._core, type(fault).__name__)


def dead_stage(name: str) -> InternalError:
    """What clients are told when a stage has died."""
    return InternalError(f"a part of the server ({name}) has failed")
