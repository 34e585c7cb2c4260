"""A pipeline on threads: its life cycle, from start to the last joined thread.

Owns: the life cycle (through the table `LIFECYCLE`), the driver threads, the reaper, and shutdown. Rules it keeps:

* `shutdown` is idempotent, may be called from any thread (also from a callback on one of its own), ends within its bounds, and
  afterwards every submit is refused and no thread is left.
* A stage that dies ends everything live and moves the life cycle to FAILED; a scheduler that goes ends everything live and starts the
  orderly end. Nothing hangs.
* What the collector or a deadline ends goes through the reaper's queue, because a finaliser may take no lock.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from ..codec.errors import HeadraceError, InternalError, SchedulerGoneError, ShuttingDownError
from ..fsm import LIFECYCLE, AbortSource, LifecycleEvent, LifecycleState, Trace
from .closing import Closing, Until
from .config import RuntimeConfig
from .faults import FaultLog, describe, where
from .pipeline import Pipeline
from .threads import DriverThread, dead_stage
from .waits import seconds

_LOG = logging.getLogger("headrace.manager")
_LONGEST_WAIT_S = 3600.0  # the reaper looks again at least that often; a lock cannot wait for any number of seconds


class Service:
    """One pipeline, started once and shut down once."""

    def __init__(self, config: RuntimeConfig, pipeline: Pipeline, trace: Trace | None) -> None:
        self.config = config
        self.trace = trace
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._state: int = LIFECYCLE.initial
        self._failure: HeadraceError | None = None
        self._over = threading.Condition(self._lock)  # start or shutdown has come to its end
        self._starting = False
        self._shutting_down = False
        self._shut_down = False
        self._from_callback: threading.Thread | None = None  # the shutdown that one of our own threads asked for
        self._pid = os.getpid()
        self._activity = 0
        self._active = threading.Condition()
        self._forgotten: queue.SimpleQueue[tuple[str, float] | str | None] = queue.SimpleQueue()
        self._deadlines: list[tuple[float, str]] = []  # a heap; the reaper's own
        self._threads: list[DriverThread] = []
        self._reaper = threading.Thread(target=self._reap, name="headrace-reaper", daemon=True)
        self._faults = FaultLog()
        self._cut_off = False  # a stage has died or the threads are gone: ends are told past the shards
        self._pipeline.on_fault = self._faults.report
        self._pipeline.on_activity = self._count_activity
        self._pipeline.on_scheduler_gone = self._scheduler_gone

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aexit__(self, *_: object) -> None:
        await self.ashutdown()

    @property
    def state(self) -> LifecycleState:
        """Where the manager is in its life."""
        with self._lock:
            return LifecycleState(self._state)

    def _step(self, event: LifecycleEvent) -> LifecycleState:
        """Under the lock: one event of the life cycle."""
        before = self._state
        self._state = LIFECYCLE.next(LifecycleState(before), event)
        if self.trace is not None:
            self.trace.record("lifecycle", "", before, event, self._state, "manager")
        return LifecycleState(self._state)

    def start(self) -> Self:
        """Start the threads. Raises, with nothing left running, if one cannot be started; a second start raises too.

        A shutdown that comes meanwhile waits for the threads to be there and then ends them; every submit is then refused.
        """
        self._check_usable()
        with self._lock:
            if LifecycleState(self._state) is not LifecycleState.CREATED:
                raise ShuttingDownError(f"a manager is started once; this one is {LifecycleState(self._state).name}")
            self._step(LifecycleEvent.START)
            self._starting = True
        try:
            self._threads = self._build_threads()
            for thread in self._threads:
                thread.start()
            self._reaper.start()
        except BaseException:
            with self._lock:
                self._step(LifecycleEvent.FAULT)
            self._stop_threads(self.config.join_timeout_s)
            raise
        else:
            with self._lock:
                if self._step(LifecycleEvent.STARTED) is LifecycleState.RUNNING:
                    self._pipeline.live.open_admission()
        finally:
            with self._lock:
                self._starting = False
                self._over.notify_all()
        return self

    def _build_threads(self) -> list[DriverThread]:
        pipeline = self._pipeline
        cores = self.config.cores or ()
        shards = [_bound(pipeline.move_shard, index) for index in range(len(pipeline.shards))]
        plan: list[tuple[str, Any, Callable[[], bool]]] = [
            ("headrace-ingress", pipeline.ingress_bell, pipeline.move_ingress),
        ]
        if self.config.fused:
            plan.append(("headrace-egress", pipeline.egress_bell, pipeline.move_egress))
        else:
            plan.append(("headrace-egress", pipeline.egress_bell, pipeline.move_dispatch))
            plan.extend((f"headrace-detok-{i}", pipeline.shard_bells[i], move) for i, move in enumerate(shards))
        for index, bell in enumerate(pipeline.worker_bells):
            plan.append((f"headrace-tok-{index}", bell, _bound(pipeline.move_worker, index)))
        return [
            DriverThread(name, bell, pump, self._on_death, core=cores[at % len(cores)] if cores else None)
            for at, (name, bell, pump) in enumerate(plan)
        ]

    def shutdown(self, drain_timeout: float | None = None) -> None:
        """Stop admitting, let live requests finish for `drain_timeout` seconds, abort the rest, close the rings, join the threads.

        Idempotent and callable from any thread. A second caller waits for the first one's end, and if its own deadline comes
        earlier, that one counts. On one of the manager's own threads (a callback) it starts the shutdown and returns, because it
        could not wait for itself. An exception that interrupts the drain (KeyboardInterrupt) ends the drain, not the shutdown.
        Raises InternalError naming a thread that did not end within the join bound.
        """
        self._check_usable()
        drain = seconds("drain_timeout", self.config.drain_timeout_s if drain_timeout is None else drain_timeout)
        if self._own_thread():
            with self._lock:
                if self._from_callback is None:
                    self._from_callback = threading.Thread(
                        target=self._shutdown_logged, args=(drain,), name="headrace-shutdown", daemon=True
                    )
                    self._from_callback.start()
            return
        try:
            self._shutdown(drain)
        finally:
            helper = self._from_callback
            if helper is not None and helper is not threading.current_thread():
                helper.join(self.config.join_timeout_s)

    def _shutdown_logged(self, drain: float) -> None:
        try:
            self._shutdown(drain)
        except HeadraceError as error:
            _LOG.error("a shutdown that a callback asked for: %s", error.message)

    def _shutdown(self, drain: float) -> None:
        live, bound = self._pipeline.live, self.config.join_timeout_s
        with self._lock:
            self._step(LifecycleEvent.DRAIN)
            first, self._shutting_down = not self._shutting_down, True
            if first and not self._over.wait_for(lambda: not self._starting, bound):
                self._shutting_down = False
                raise InternalError("the start of this manager has not come to its end")
            state = LifecycleState(self._state)
            refusal = self._failure or ShuttingDownError("the manager is shutting down")
        if not first:
            live.wait_empty(drain)
            for life in live.lives():
                self._pipeline.abort(life.rid, AbortSource.SHUTDOWN)
            with self._lock:
                if not self._over.wait_for(lambda: self._shut_down, 4 * bound):
                    raise InternalError("another thread's shutdown has not come to its end")
            return
        served = bool(self._threads) and state is not LifecycleState.FAILED  # a dead stage settles nothing any more
        left: list[str] = []
        interrupted: BaseException | None = None
        for wait in Closing(
            self._pipeline,
            refusal,
            drain=drain if state is LifecycleState.DRAINING else None,
            settle=bound if served else None,
            join=bound,
        ):
            try:
                if wait.until is Until.EMPTY:
                    live.wait_empty(wait.timeout)
                elif wait.until is Until.SETTLED:
                    live.wait_settled(wait.timeout)
                elif wait.until is Until.DRAINED:
                    with self._lock:
                        self._step(LifecycleEvent.DRAINED)
                else:
                    left = self._stop_threads(wait.timeout)
                    self._cut_off = True
            except BaseException as stop:  # an impatient user ends the wait, not the shutdown
                interrupted = stop
        self._faults.flush()
        with self._lock:
            self._step(LifecycleEvent.FAULT if left else LifecycleEvent.JOINED)
            self._shut_down = True
            self._over.notify_all()
        if interrupted is not None:
            raise interrupted
        if left:
            raise InternalError(f"shutdown left threads behind: {', '.join(left)}")

    async def ashutdown(self, drain_timeout: float | None = None) -> None:
        """`shutdown` without blocking the event loop."""
        await asyncio.to_thread(self.shutdown, drain_timeout)

    def _own_thread(self) -> bool:
        current = threading.current_thread()
        return current is self._reaper or any(thread.is_current() for thread in self._threads)

    def _thread(self, name: str) -> DriverThread | None:
        return next((thread for thread in self._threads if thread.name == name), None)

    def _stop_threads(self, timeout: float) -> list[str]:
        """Stop and join all; the names of those that did not end in time."""
        for thread in self._threads:
            thread.stop()
        self._forgotten.put(None)
        deadline = time.monotonic() + timeout
        left = [thread.name for thread in self._threads if not thread.join(max(0.0, deadline - time.monotonic()))]
        if self._reaper.ident is not None and self._reaper is not threading.current_thread():
            self._reaper.join(max(0.0, deadline - time.monotonic()))
            if self._reaper.is_alive():
                left.append(self._reaper.name)
        return left

    def _on_death(self, name: str, fault: BaseException) -> None:
        self._fail(dead_stage(name))

    def _scheduler_gone(self) -> None:
        """Called on the egress thread when the scheduler has closed its side: what is live is being failed, nothing new comes in.

        The manager itself is sound, so this is the start of its orderly end and not FAILED (which means a dead stage).
        """
        error = SchedulerGoneError("the scheduler has gone")
        with self._lock:
            self._failure = self._failure or error
            stopping = self._shutting_down
            self._step(LifecycleEvent.DRAIN)
        lost = len(self._pipeline.live)
        if lost and not stopping:
            self._faults.report("headrace.manager", f"the scheduler has gone; {lost} live requests are failed")
        self._pipeline.live.close_admission(error)
        with self._active:
            self._active.notify_all()  # a health probe need not wait any longer

    def _fail(self, error: HeadraceError) -> None:
        """A stage has died: end everything live directly, since its lanes are not served any more."""
        with self._lock:
            self._failure = error
            self._step(LifecycleEvent.FAULT)
            self._cut_off = True
        self._pipeline.live.close_admission(ShuttingDownError(error.message))
        self._pipeline.close_channels()
        with self._active:
            self._active.notify_all()
        for thread in self._threads:
            thread.stop()
        self._pipeline.fail_everything(error)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise InternalError(
                "this manager was made in another process; threads do not survive a fork, so make one here"
            )

    def _check_may_wait(self) -> None:
        self._check_usable()
        if self._own_thread():
            raise InternalError(
                "a callback on one of the manager's own threads cannot wait for an answer: it would wait for itself"
            )

    def _count_activity(self, frames: int) -> None:
        with self._active:
            self._activity += frames
            self._active.notify_all()

    def _reap(self) -> None:
        """The reaper thread: requests whose handle was collected, and deadlines."""
        try:
            while self._reap_one():
                pass
        except BaseException as fault:
            # Without it dropped handles would run on for ever, unseen: as bad as a dead stage, and told the same way.
            _LOG.error("headrace-reaper died: %s\n%s", describe(fault), where(fault))
            self._fail(dead_stage("headrace-reaper"))

    def _reap_one(self) -> bool:
        """One piece of news or one deadline; False at the end."""
        due = self._deadlines
        wait = min(max(0.0, due[0][0] - time.monotonic()), _LONGEST_WAIT_S) if due else None
        try:
            news = self._forgotten.get(timeout=wait)
        except queue.Empty:
            if due[0][0] <= time.monotonic():
                self._pipeline.abort(heapq.heappop(due)[1], AbortSource.API)
            return True
        if news is None:
            return False
        if isinstance(news, str):
            self._pipeline.abandon(news)
            return True
        rid, when = news
        heapq.heappush(due, (when, rid))
        if len(due) > 2 * len(self._pipeline.live) + 1024:  # mostly requests that have ended long before their deadline
            due[:] = [entry for entry in due if entry[1] in self._pipeline.live]
            heapq.heapify(due)
        return True


def _bound(move: Callable[[int], bool], index: int) -> Callable[[], bool]:
    return lambda: move(index)
