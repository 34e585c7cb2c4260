"""A manager with the scheduler's side in the test's hand: what was received, what is pushed, and what must hold at the end.

Nothing here sleeps. `until` asks again and again with a deadline; every wait of a rig has one, so a lost message is a failure
with a name and never a hang.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from headrace.codec import AbortMessage, ChunkEvent, ControlMessage, GenerateMessage, Rid, decode_ingress, encode_batch
from headrace.fsm import validate
from headrace.runtime import RuntimeConfig, TokenizerManager
from text_helpers import tb

BOUND = 20.0
"""Seconds until a wait for a fact is given up. Only a failing test waits that long."""

STOP = {"type": "stop", "matched": None}
LENGTH = {"type": "length", "length": 1}

TOKENIZER = tb(["STOP", " one", " two", " three", " four", "Done;;"], specials=["<T>", "</s>"])
STOP_ID, T_ID = TOKENIZER.token_to_id("STOP"), TOKENIZER.token_to_id("<T>")
V = TOKENIZER.get_vocab_size()

CONFIGS: dict[str, dict[str, Any]] = {
    "fused-v1": {},
    "fused-v2-3shards-2workers": {"wire": "v2", "detokenizer_shards": 3, "tokenizer_workers": 2},
    "threads-v1-3shards-2workers": {"fused": False, "detokenizer_shards": 3, "tokenizer_workers": 2},
    "threads-v2": {"fused": False, "wire": "v2"},
}


def every_config(function: Any) -> Any:
    """Run the test once for each topology; it takes the argument `config`, to be given to `rig`."""
    return pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))(function)


def until(fact: Callable[[], Any], what: str, bound: float = BOUND) -> Any:
    """The first true value of `fact()`; fails after `bound` seconds."""
    deadline = time.monotonic() + bound
    while not (value := fact()):
        if time.monotonic() > deadline:
            pytest.fail(f"this did not come true within {bound} s: {what}")
        os.sched_yield()
    return value


def threads() -> list[str]:
    """Names of the headrace threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace")]


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


class Rig:
    """`tm`, and its scheduler played by the test."""

    def __init__(self, tm: TokenizerManager) -> None:
        self.tm = tm
        self.port = tm.scheduler
        self.seen: list[Any] = []

    # -- the scheduler's side ------------------------------------------------------------------------------------------

    def drain(self) -> list[Any]:
        """What is in the ring now, decoded; also appended to `seen`."""
        messages = []
        while len(columns := self.port.recv_requests()):
            messages += decode_ingress(columns, self.port.schema)
        self.seen += messages
        return messages

    def receive(self, count: int = 1) -> list[Any]:
        """The next `count` messages."""
        got: list[Any] = []
        while len(got) < count:
            if not self.port.wait_request(BOUND):
                pytest.fail(f"the scheduler got {len(got)} of {count} messages within {BOUND} s")
            columns = self.port.recv_requests(count - len(got))
            got += decode_ingress(columns, self.port.schema)
        self.seen += got
        return got

    def one(self) -> Any:
        """The next message."""
        return self.receive(1)[0]

    def request(self) -> str:
        """The internal rid of the next message, which must be a generate request."""
        message = self.one()
        assert isinstance(message, GenerateMessage), message
        return message.rid

    def requests(self, count: int) -> dict[str, str]:
        """The next `count` generate requests: internal rid by client-facing rid."""
        return {Rid.from_wire(message.rid).client_facing: message.rid for message in self.receive(count)}

    def aborts(self) -> list[str]:
        """Rids of all aborts received so far."""
        return [message.rid for message in self.seen if isinstance(message, AbortMessage)]

    def push(self, *chunks: ChunkEvent) -> None:
        """One BATCH frame."""
        assert self.port.push_frame(encode_batch(chunks, self.port.schema), BOUND)

    def chunk(self, rid: str, ids: Sequence[int] = (), finish: Any = None, **more: Any) -> None:
        """One BATCH frame with one chunk."""
        self.push(chunk(rid, ids, finish, **more))

    # -- looking -------------------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Return when every stage has done all it can do: no message on any lane, no frame in the ring, no news for the reaper."""
        pipeline, tm = self.tm._pipeline, self.tm

        def quiet() -> bool:
            lanes = (
                pipeline.aborts, pipeline.tokenised, pipeline.inbox,
                *pipeline.jobs, *pipeline.registrations, *pipeline.frames,
            )  # fmt: skip
            return not any(map(len, lanes)) and not pipeline.ring_out.facts().fill and tm._forgotten.empty()

        def twice() -> bool:
            # a stage that holds a message answers `call` only after its step, and a lane it fed is then not quiet
            for _ in range(3):
                if not quiet():
                    return False
                tm.stats()
                for thread in tm._threads:
                    thread.call(lambda: None, BOUND)
            return quiet()

        until(twice, "the pipeline is idle")

    def live(self) -> int:
        """Live requests."""
        return len(self.tm._pipeline.live)

    def gone(self) -> None:
        """Return when nothing is live."""
        assert self.tm._pipeline.live.wait_empty(BOUND), self.tm.stats()

    def no_more(self) -> None:
        """When all is done, the scheduler has got nothing more."""
        self.idle()
        assert self.drain() == []

    def states(self) -> dict[str, int]:
        return self.tm.stats().live


def chunk(rid: str, ids: Sequence[int] = (), finish: Any = None, **more: Any) -> ChunkEvent:
    return ChunkEvent(
        rid=rid, token_ids=list(ids), finish_reason=finish, prompt_tokens=more.pop("prompt_tokens", 1), **more
    )


def make(**config: Any) -> TokenizerManager:
    """A manager of the byte-level toy: 256 bytes and a few words, context of 256 tokens."""
    given: dict[str, Any] = {
        "context_len": 256,
        "tokenizer_workers": 1,
        "trace": True,
        "drain_timeout_s": 0.0,
        "join_timeout_s": 10.0,
    }
    if not config.get("skip_tokenizer_init"):
        given["tokenizer"] = TOKENIZER
    return TokenizerManager(RuntimeConfig(**{**given, **config}))


@contextmanager
def rig(**config: Any) -> Iterator[Rig]:
    """A running manager; at the end it is shut down, and `check_ended` must hold."""
    before = descriptors()
    tm = make(**config)
    one = Rig(tm)
    try:
        with tm:
            yield one
    finally:
        with suppress(Exception):
            tm.scheduler.close()
            tm.shutdown(0)
    check_ended(tm, before)


def check_ended(tm: TokenizerManager, fds: int | None = None) -> None:
    """After a shutdown: no thread, no descriptor, empty tables, and a trace in which every machine conforms and has ended."""
    assert threads() == []
    if fds is not None:
        gc.collect()
        assert descriptors() <= fds
    pipeline = tm._pipeline
    live = pipeline.live
    tables = [live._lives, live._shown, live._asked, live._owed, live._bytes, live._nbytes]
    assert not any(tables), tables
    if tm.state.name != "FAILED":
        assert not pipeline.ingress.entries
        assert not pipeline.ingress.owed
        for shard in pipeline.shards:
            assert len(shard) == 0
            assert len(shard._free) == tm.config.max_live_requests
    if tm.trace is not None:
        assert tm.trace.dropped == 0
        # a stage that died takes its entries' last steps with it; their clients are told past it
        spared = {"unfinished"} if tm.state.name == "FAILED" else set()
        problems = [str(violation) for violation in validate(tm.trace) if violation.rule not in spared]
        assert not problems, "\n".join(problems)


@contextmanager
def held(r: Rig, thread: str) -> Iterator[None]:
    """Inside, this driver thread is kept between two steps; what reaches it waits on its lanes."""
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        over.wait(BOUND)

    driver = r.tm._thread(thread)
    assert driver is not None
    blocker = threading.Thread(target=driver.call, args=(hold, 2 * BOUND))
    blocker.start()
    assert inside.wait(BOUND)
    try:
        yield
    finally:
        over.set()
        blocker.join(BOUND)


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call()` on another thread; returns a function that waits for it and gives its result or raises its error."""
    box: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            box.append((True, call()))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join(BOUND)
        assert box, "the call has not come back"
        ok, value = box[0]
        if not ok:
            raise value
        return value

    return join


def server_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Log records above debug."""
    return [
        record for record in caplog.records if record.levelno > logging.DEBUG and record.name.startswith("headrace")
    ]


__all__ = ["AbortMessage", "ChunkEvent", "ControlMessage", "GenerateMessage"]
