"""A manager on its real threads, fed one step every few milliseconds as a GPU gives them, and what the same wakes cost without it.

Owns: the paced workloads, where a process sleeps between steps and every hand-over is a wake of a sleeping thread. Waits are bounded
by the steps that are fed, so nothing here can run for ever unless headrace loses a request.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...codec import GenerateMessage, decode_ingress
from ..config import RuntimeConfig
from ..manager import TokenizerManager
from ..steps import StepBatch
from .egress import Workload, frames


@contextmanager
def running(
    tokenizer: Tokenizer, load: Workload, *, step: Callable[[StepBatch], None] | None = None
) -> Iterator[tuple[TokenizerManager, list[Any], list[tuple[bytes, list[Any]]]]]:
    """A running manager, the handles of the workload's requests, and the steps that answer them, not pushed yet."""
    vocab = max(tokenizer.get_vocab_size(with_added_tokens=True), int(load.ids.max()) + 1)
    with TokenizerManager(RuntimeConfig(tokenizer=tokenizer, context_len=1 << 20, vocab_size=vocab)) as manager:
        if step is not None:
            manager.on_step(step)
        params = {"max_new_tokens": None, "ignore_eos": True}
        handles = [
            manager.generate([1, 2, 3, 4], params, sink="step" if step is not None else "handle")
            for _ in range(load.requests)
        ]
        port, rids = manager.scheduler, list[str]()
        while len(rids) < load.requests and port.wait_request(10):
            received = decode_ingress(port.recv_requests(4096), port.schema)
            rids += [message.rid for message in received if isinstance(message, GenerateMessage)]
        yield manager, handles, list(frames(load, port.schema, rids))


def paced(tokenizer: Tokenizer, load: Workload, *, period_s: float = 0.025, steps: int = 60) -> float:
    """Seconds from the push of a step to its last delta, median: in the step sink's hands, or for one request in the hands of the
    thread that iterates its handle. A thread that was late finds several steps in one chunk, which then counts for the last of them."""
    pushed: list[float] = []
    taken: dict[int, float] = {}  # by the number of steps that had come by then
    one = load.requests == 1
    load = load._replace(ids=load.ids[:, :steps])

    def read(handle: Any) -> None:
        for chunk in handle:
            taken[chunk.completion_tokens] = time.perf_counter()

    def step(_: StepBatch) -> None:
        taken[len(taken) + 1] = time.perf_counter()

    with running(tokenizer, load, step=None if one else step) as (manager, handles, batches):
        reader = threading.Thread(target=read, args=(handles[0] if one else (),))
        reader.start()
        pause = threading.Event()
        for batch in batches:
            pause.wait(period_s)
            pushed.append(time.perf_counter())
            manager.scheduler.push_batch(*batch)
        reader.join()
        manager.shutdown(drain_timeout=5.0)  # the last step's callback has returned
    return float(np.median([at - pushed[step - 1] for step, at in taken.items()]))


def bare_hops(*, period_s: float = 0.025, steps: int = 60) -> float:
    """Seconds from waking one sleeping thread to the waking of the next one by it, median: the two hand-overs alone, by bare locks."""
    first, second, pause = threading.Lock(), threading.Lock(), threading.Event()
    first.acquire()
    second.acquire()
    arrived: list[float] = []
    begun: list[float] = []

    def hop() -> None:
        for _ in range(steps):
            first.acquire()
            second.release()

    def end() -> None:
        for _ in range(steps):
            second.acquire()
            arrived.append(time.perf_counter())

    threads = [threading.Thread(target=hop), threading.Thread(target=end)]
    for thread in threads:
        thread.start()
    for _ in range(steps):
        pause.wait(period_s)
        begun.append(time.perf_counter())
        first.release()
    for thread in threads:
        thread.join()
    return float(np.median(np.array(arrived) - np.array(begun)))


class Turns:
    """A pace: the next step comes `period_s` seconds after the last one, or (None) as soon as all consumers have had it."""

    def __init__(self, consumers: int, period_s: float | None) -> None:
        self._consumers = consumers
        self._period = period_s
        self._had = 0
        self._all = threading.Event()
        self._pause = threading.Event()  # never set

    def had(self) -> None:
        """One consumer has had a step. On the loop's thread."""
        self._had += 1
        if self._had == self._consumers:
            self._had = 0
            self._all.set()

    def feed(self, push: Callable[..., object], batches: Sequence[tuple[Any, ...]]) -> None:
        """Push all, in turn."""
        for batch in batches:
            if self._period is not None:
                self._pause.wait(self._period)
            push(*batch)
            if self._period is None:
                self._all.wait()
                self._all.clear()


def readers(tokenizer: Tokenizer, load: Workload, *, period_s: float | None = 0.005, steps: int = 60) -> float:
    """CPU µs of the whole process per token, each request read by an asyncio task of its own; flooded where `period_s` is None."""
    load = load._replace(ids=load.ids[:, :steps])
    turns = Turns(load.requests, period_s)
    with running(tokenizer, load) as (manager, handles, batches):

        async def read(handle: Any) -> None:
            async for _ in handle:
                turns.had()

        async def run() -> None:
            tasks = [asyncio.ensure_future(read(handle)) for handle in handles]
            await asyncio.sleep(0)
            feeder = threading.Thread(target=turns.feed, args=(manager.scheduler.push_batch, batches))
            feeder.start()
            await asyncio.gather(*tasks)
            await asyncio.to_thread(feeder.join)

        return process_cpu(lambda: asyncio.run(run())) / load.tokens * 1e6


def bare_events(load: Workload, *, period_s: float | None = 0.005, steps: int = 60) -> float:
    """The same wakes without any work: one task per request waits for an asyncio.Event that a thread has set, step by step.

    Where the loop is late, two steps are one wake, as two steps are one chunk for a reader that is late.
    """
    over = False
    turns = Turns(load.requests, period_s)

    async def wait(event: asyncio.Event) -> None:
        while not over:
            await event.wait()
            event.clear()
            turns.had()

    async def run() -> None:
        loop, events = asyncio.get_running_loop(), [asyncio.Event() for _ in range(load.requests)]
        tasks = [asyncio.ensure_future(wait(event)) for event in events]
        await asyncio.sleep(0)

        def wake() -> None:
            for event in events:
                event.set()

        def end() -> None:
            nonlocal over
            over = True
            wake()

        batches = [*[(wake,)] * (steps - 1), (end,)]
        feeder = threading.Thread(target=turns.feed, args=(loop.call_soon_threadsafe, batches))
        feeder.start()
        await asyncio.gather(*tasks)
        await asyncio.to_thread(feeder.join)

    return process_cpu(lambda: asyncio.run(run())) / (load.requests * steps) * 1e6


def process_cpu(run: Callable[[], object]) -> float:
    """CPU seconds of the whole process while `run` runs."""
    gc.collect()
    began = time.process_time()
    run()
    return time.process_time() - began
