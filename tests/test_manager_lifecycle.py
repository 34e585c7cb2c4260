"""Shutdown, death and the collector: every live request gets one terminal, every thread is joined, nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial

import pytest
from headrace.codec import (
    ClientClosedError,
    HeadraceError,
    InternalError,
    SchedulerGoneError,
    ShuttingDownError,
    TokenizeError,
)
from headrace.runtime import RuntimeConfig, TokenizerManager
from headrace.runtime.threads import DriverThread
from manager_helpers import (
    BOUND,
    STOP,
    AbortMessage,
    Rig,
    check_ended,
    chunk,
    every_config,
    held,
    in_thread,
    make,
    rig,
    threads,
    until,
)  # fmt: skip


def ends(handles):
    """How each handle ends: its text, or its error's code."""
    out = []
    for h in handles:
        try:
            out.append(h.result(BOUND).text)
        except HeadraceError as error:
            out.append(error.code)
    return out


# -- shutdown --------------------------------------------------------------------------------------------------------------


@every_config
def test_B59_a_drain_lets_live_requests_finish_and_refuses_new_ones(config):
    with rig(**config) as r:
        h = r.tm.generate([1])
        rid = r.request()
        r.chunk(rid, [65])
        over = in_thread(lambda: r.tm.shutdown(BOUND))
        until(lambda: r.tm.state.name == "DRAINING", "the drain has begun")
        with pytest.raises(ShuttingDownError) as caught:
            r.tm.generate([1])
        assert caught.value.http_status == 503
        r.chunk(rid, [66])
        r.chunk(rid, [67], STOP)
        over()
        assert h.result(BOUND).text == "ABC"
        assert r.tm.state.name == "STOPPED"
        assert r.drain() == []
        assert not r.port.push_frame(b"late")
        assert r.port.wait_request(BOUND) is False


@every_config
def test_B59_after_the_deadline_every_live_request_gets_one_terminal_and_the_scheduler_one_abort_each(config):
    with rig(**config) as r:
        streaming, queued, silent = (r.tm.generate([1], stream=s) for s in (True, True, False))
        rids = [r.request() for _ in range(3)]
        r.chunk(rids[0], [65])
        r.idle()
        r.tm.shutdown(0)
        assert ends([streaming, queued, silent]) == ["client_closed"] * 3
        assert sorted(m.rid for m in r.drain() if isinstance(m, AbortMessage)) == sorted(rids)
        sources = {e.event for e in r.tm.trace if getattr(e, "machine", "") == "abort" and e.after == "REQUESTED"}
        assert sources == {"ABORT_SHUTDOWN"}


@every_config
def test_a_request_that_is_tokenised_or_waits_in_the_inbox_at_the_deadline_is_told_too(config):
    with rig(**config) as r:
        tokenising = []
        with held(r, "headrace-tok-0"):
            if config.get("tokenizer_workers", 1) == 1:
                tokenising.append(r.tm.generate("text"))
                until(lambda: r.states() == {"TOKENIZING": 1}, "it is tokenised")
            with held(r, "headrace-ingress"):
                waiting = r.tm.generate([1])
                over = in_thread(lambda: r.tm.shutdown(0))
                with pytest.raises(ClientClosedError):
                    waiting.result(BOUND)
            assert ends(tokenising) == ["client_closed"] * len(tokenising)
        over()
        assert r.drain() == []


@every_config
def test_shutdown_twice_and_from_several_threads_is_one_shutdown(config):
    with rig(**config) as r:
        h = r.tm.generate([1])
        rid = r.request()
        callers = [in_thread(lambda: r.tm.shutdown(BOUND)) for _ in range(3)]
        until(lambda: r.tm.state.name == "DRAINING", "the drain has begun")
        r.chunk(rid, [65], STOP)
        for join in callers:
            join()
        assert h.result(BOUND).text == "A"
        r.tm.shutdown()
        asyncio.run(r.tm.ashutdown())
        assert threads() == []


@every_config
def test_a_second_shutdown_with_an_earlier_deadline_counts(config):
    with rig(**config) as r:
        h = r.tm.generate([1])
        r.request()
        patient = in_thread(lambda: r.tm.shutdown(1e9))
        until(lambda: r.tm.state.name == "DRAINING", "the drain has begun")
        r.tm.shutdown(0)
        assert threads() == []
        patient()
        assert ends([h]) == ["client_closed"]


@every_config
def test_shutdown_before_start_and_during_start(config, monkeypatch):
    tm = make(**config)
    tm.shutdown()
    assert tm.state.name == "STOPPED"
    with pytest.raises(ShuttingDownError):
        tm.start()
    check_ended(tm)

    tm = make(**config)
    begun, go = threading.Event(), threading.Event()
    start = DriverThread.start

    def slow(self):
        begun.set()
        assert go.wait(BOUND)
        start(self)

    monkeypatch.setattr(DriverThread, "start", slow)
    starting = in_thread(tm.start)
    assert begun.wait(BOUND)
    stopping = in_thread(lambda: tm.shutdown(0))
    until(lambda: tm.state.name == "STOPPING", "the shutdown came during the start")
    go.set()
    starting()
    stopping()
    assert tm.state.name == "STOPPED"
    with pytest.raises(ShuttingDownError):
        tm.generate([1])
    check_ended(tm)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_B58_a_part_that_fails_to_start_makes_start_raise_and_leaves_nothing_running(at, monkeypatch):
    tm = make(fused=False)
    start, count = DriverThread.start, []

    def failing(self):
        count.append(self)
        if len(count) == at + 1:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(DriverThread, "start", failing)
    with pytest.raises(RuntimeError, match="new thread"):
        tm.start()
    assert threads() == []
    assert tm.state.name == "FAILED"
    with pytest.raises(ShuttingDownError):
        tm.generate([1])
    tm.shutdown()
    check_ended(tm)


def test_B58_a_part_that_cannot_be_made_makes_the_constructor_raise(monkeypatch):
    monkeypatch.setattr("headrace.runtime.pipeline.Shard", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make()
    assert threads() == []


@every_config
def test_a_scheduler_parked_in_wait_request_is_woken_by_a_shutdown(config):
    with rig(**config) as r:
        parked = in_thread(lambda: r.port.wait_request())
        until(lambda: r.tm._pipeline.ring_in._core._parked_consumers, "the scheduler is parked")
        r.tm.shutdown(0)
        assert parked() is False
        assert r.port.closed


@every_config
def test_a_scheduler_parked_in_a_push_is_woken_by_a_shutdown(config):
    with rig(egress_ring_capacity=1, **config) as r:
        from headrace.codec import encode_batch

        with held(r, "headrace-egress"):
            frame = encode_batch([chunk("nobody", [1])], r.port.schema)
            assert r.port.push_frame(frame)
            parked = in_thread(lambda: r.port.push_frame(frame))
            until(lambda: r.tm._pipeline.ring_out._core._parked_producers, "the scheduler is parked")
            over = in_thread(lambda: r.tm.shutdown(0))
            assert parked() is False  # it is woken by the close, while the egress thread still has the ring full
        over()


@every_config
def test_an_abort_that_finds_the_ring_full_is_drained_in_the_shutdown(config):
    with rig(ingress_ring_capacity=1, **config) as r:
        first = r.tm.generate([1])
        rid = r.request()
        second = r.tm.generate([1])
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "the ring is full")
        over = in_thread(lambda: r.tm.shutdown(0))
        got = r.receive(3)
        over()
        assert sorted(m.rid for m in got[1:]) == sorted([rid, got[0].rid])
        assert ends([first, second]) == ["client_closed"] * 2


def test_a_scheduler_that_never_drains_cannot_hold_a_shutdown():
    with rig(ingress_ring_capacity=1, join_timeout_s=0.2) as r:
        hs = [r.tm.generate([1])]
        r.request()
        hs.append(r.tm.generate([1]))
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "the ring is full")
        r.tm.shutdown(0)
        assert ends(hs) == ["client_closed"] * 2
        assert r.tm.stats().counters["aborts_undeliverable"] == 2


def test_an_interrupt_ends_the_drain_and_not_the_shutdown(monkeypatch):
    with rig() as r:
        h = r.tm.generate([1])
        rid = r.request()
        live, calls = r.tm._pipeline.live, []
        wait = type(live).wait_empty

        def interrupted(self, timeout):
            calls.append(timeout)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return wait(self, timeout)

        monkeypatch.setattr(type(live), "wait_empty", interrupted)
        with pytest.raises(KeyboardInterrupt):
            r.tm.shutdown(1e9)
        assert threads() == []
        assert ends([h]) == ["client_closed"]
        assert [m.rid for m in r.drain()] == [rid]


def test_a_thread_that_does_not_end_is_named():
    tm = make(join_timeout_s=0.05).start()
    blocked = threading.Event()
    tm._pipeline.workers[0]._backend = Stuck(blocked)
    h = tm.generate("text")
    until(lambda: tm.stats().live == {"TOKENIZING": 1}, "it is tokenised")
    with pytest.raises(InternalError, match="headrace-tok-0"):
        tm.shutdown()
    assert tm.state.name == "FAILED"
    assert ends([h]) == ["client_closed"]
    blocked.set()
    until(lambda: threads() == [], "the thread has ended after all")


class Stuck:
    """A tokenizer that hangs."""

    name = "stuck"

    def __init__(self, event):
        self.event = event

    def encode_batch(self, texts, special):
        self.event.wait(BOUND)
        raise RuntimeError("late")


@every_config
def test_async_with_starts_and_ends_without_blocking_the_loop(config):
    async def main():
        tm = make(**config)
        async with tm as same:
            assert same is tm
            r = Rig(tm)
            h = tm.generate([1])
            r.chunk(r.request(), [65], STOP)
            assert (await h.aresult(BOUND)).text == "A"
        return tm

    check_ended(asyncio.run(main()))


@every_config
def test_threads_have_the_names_of_their_parts(config):
    with rig(**config):
        shards, workers = config.get("detokenizer_shards", 1), config.get("tokenizer_workers", 1)
        expected = {"headrace-ingress", "headrace-egress", "headrace-reaper"}
        expected |= {f"headrace-tok-{i}" for i in range(workers)}
        if not config.get("fused", True):
            expected |= {f"headrace-detok-{i}" for i in range(shards)}
        assert set(threads()) == expected


def test_a_core_that_cannot_be_used_is_one_warning_and_no_failure(monkeypatch, caplog):
    monkeypatch.setattr("headrace.runtime.threads._warned_about_cores", threading.Event())
    with rig(cores=(1 << 20,), fused=False) as r:
        h = r.tm.generate([1])
        r.chunk(r.request(), [65], STOP)
        assert ends([h]) == ["A"]
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "unpinned" in warnings[0].getMessage()


def test_two_managers_live_side_by_side_and_end_apart():
    with rig() as one:
        other = make().start()
        try:
            a = one.tm.generate([1], rid="x")
            b = other.generate([1], rid="x")
            second = Rig(other)
            one.chunk(one.request(), [65], STOP)
            second.chunk(second.request(), [66], STOP)
            assert ends([a, b]) == ["A", "B"]
        finally:
            other.shutdown(0)
        c = one.tm.generate([1])
        one.chunk(one.request(), [67], STOP)
        assert ends([c]) == ["C"]
    check_ended(other)


# -- death -----------------------------------------------------------------------------------------------------------------


@every_config
def test_a_scheduler_that_goes_ends_everything_live_once_and_then_nothing_is_admitted(config):
    with rig(**config) as r:
        hs = [r.tm.generate([1], rid=f"r{i}") for i in range(3)]
        rids = [r.request() for _ in range(2)]  # the third is in the ring
        r.chunk(rids[0], [65])
        r.chunk(rids[1], [66], STOP)  # given before it went, so delivered
        answer = in_thread(lambda: r.tm.control("FlushCacheReqInput", timeout=BOUND))
        until(lambda: r.live() == 3, "one has ended, and the control request is live")
        r.port.close()
        assert ends(hs) == ["scheduler_gone", "B", "scheduler_gone"]
        with pytest.raises(SchedulerGoneError):
            answer()
        with pytest.raises(SchedulerGoneError) as caught:
            r.tm.generate([1])
        assert caught.value.http_status == 503
        r.gone()
        assert not r.port.push_frame(b"")
        r.port.close()


@pytest.mark.parametrize("part", ["ingress", "dispatcher", "shard", "worker"])
@every_config
def test_a_stage_that_raises_ends_everything_live_and_moves_the_manager_to_FAILED(config, part, monkeypatch, caplog):
    with rig(**config) as r:
        got = []
        r.tm.on_step(got.append)
        hs = [r.tm.generate([1], stream=stream) for stream in (True, False)]
        step = r.tm.generate([1], sink="step")
        rids = [r.request() for _ in range(3)]
        r.idle()
        pipeline = r.tm._pipeline

        def dies(*_):
            raise RuntimeError("PROMPT")

        if part == "ingress":
            monkeypatch.setattr(type(pipeline.ingress), "step", dies)
            hs.append(r.tm.generate([1]))
        elif part == "dispatcher":
            monkeypatch.setattr(type(pipeline.dispatcher), "step", dies)
            r.port.push_frame(b"x")
        elif part == "shard":
            monkeypatch.setattr(type(pipeline.shards[0]), "step", dies)
            r.chunk(rids[0], [65])
        else:
            monkeypatch.setattr(type(pipeline.workers[0]), "step", dies)
            hs.append(r.tm.generate("text"))
        assert ends(hs) == ["internal"] * len(hs)
        until(lambda: got, "the step sink is told")
        assert [(b.handles, b.errors[0].code) for b in got] == [([step], "internal")]
        assert r.tm.state.name == "FAILED"
        for call in (lambda: r.tm.generate([1]), lambda: r.tm.generate("x"), lambda: r.tm.decode([1])):
            with pytest.raises(ShuttingDownError):
                call()
        assert r.tm.health(1e9) is False
        r.tm.stats()
        r.tm.shutdown()
        assert r.tm.state.name == "FAILED"
        assert len(got) == 1
        assert "PROMPT" not in caplog.text
        assert "RuntimeError" in caplog.text


class Raises:
    """A tokenizer that raises for one text and serves the others."""

    name = "raises"

    def __init__(self, inner, fault):
        self.inner, self.fault = inner, fault

    def encode_batch(self, texts, special):
        if any("bad" in text for text in texts):
            raise self.fault
        return self.inner.encode_batch(texts, special)


class PanicException(BaseException):
    """What a panic in the tokenizer library looks like: not an Exception."""


PanicException.__module__ = "pyo3_runtime"


@pytest.mark.parametrize(
    "fault", [ValueError("PROMPT"), PanicException("PROMPT"), TokenizeError("no")], ids=lambda f: type(f).__name__
)
@every_config
def test_a_tokenizer_that_raises_fails_the_request_it_was_working_on_and_goes_on(config, fault, caplog):
    with rig(**config) as r:
        for worker in r.tm._pipeline.workers:
            worker._backend = Raises(worker._backend, fault)
        hs = [r.tm.generate(text) for text in ("a", "bad", "b")]
        for message in r.receive(2):
            r.chunk(message.rid, message.input_ids, STOP)
        assert ends(hs) == ["a", "tokenize", "b"]
        r.no_more()
        assert "PROMPT" not in caplog.text


def test_a_tokenizer_that_answers_for_fewer_texts_fails_them_and_not_the_worker():
    with rig() as r:
        worker = r.tm._pipeline.workers[0]

        class Short:
            name = "short"

            def encode_batch(self, texts, special):
                return []

        worker._backend, whole = Short(), worker._backend
        assert ends([r.tm.generate("a")]) == ["tokenize"]
        worker._backend = whole
        h = r.tm.generate("a")
        r.chunk(r.request(), [65], STOP)
        assert ends([h]) == ["A"]


def test_a_reaper_that_dies_is_told_like_a_dead_stage(monkeypatch, caplog):
    with rig() as r:
        monkeypatch.setattr(r.tm._pipeline, "abandon", lambda rid: 1 / 0)
        other = r.tm.generate([1])
        r.request()
        h = r.tm.generate([1])
        r.request()
        del h
        assert ends([other]) == ["internal"]
        assert r.tm.state.name == "FAILED"
        assert "headrace-reaper" in caplog.text


# -- the collector ---------------------------------------------------------------------------------------------------------


class _Collecting:
    """Locks and conditions that run the collector as soon as they are held, and before they are let go.

    A handle, an iterator and an unfinished coroutine are left in a reference cycle before each, so that their finalisers run there.
    """

    def __init__(self, garbage):
        self.garbage = garbage
        self.busy = threading.local()
        self.times = 0

    def collect(self):
        if getattr(self.busy, "yes", False):
            return
        self.busy.yes = True
        try:
            if self.garbage():
                gc.collect()
                self.times += 1
            else:
                gc.collect(0)
        finally:
            self.busy.yes = False

    def Lock(self):
        return _Lock(self)

    def Condition(self, lock=None):
        lock = lock if lock is not None else self.Lock()
        condition = threading.Condition(lock.inner)
        return _Condition(self, condition)


class _Lock:
    def __init__(self, owner):
        self.inner, self.owner = threading.Lock(), owner

    def acquire(self, *how):
        held = self.inner.acquire(*how)
        if held:
            self.owner.collect()
        return held

    def release(self):
        self.owner.collect()
        self.inner.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class _Condition:
    def __init__(self, owner, inner):
        self.owner, self.inner = owner, inner

    def __enter__(self):
        self.inner.__enter__()
        self.owner.collect()

    def __exit__(self, *exc):
        self.owner.collect()
        return self.inner.__exit__(*exc)

    def wait_for(self, fact, timeout=None):
        return self.inner.wait_for(fact, timeout)

    def notify(self):
        self.owner.collect()
        self.inner.notify()

    def notify_all(self):
        self.owner.collect()
        self.inner.notify_all()


@every_config
def test_the_collector_inside_every_critical_section_takes_no_lock_and_every_dropped_request_is_aborted(
    config, monkeypatch
):
    """Handles, started iterators and parked coroutines die in cycles inside each critical section, on the thread that holds it."""
    waste: list = []
    calls: list = []
    step = [1]

    def garbage():
        calls.append(1)
        if waste and len(calls) % step[0] == 0:  # another critical section in each round
            waste.pop()  # the last reference to a cycle: only the collector can end it
            return True
        return False

    primitives = _Collecting(garbage)
    from headrace.runtime import pipeline as module

    plain = module.Pipeline.__init__
    monkeypatch.setattr(module.Pipeline, "__init__", lambda self, *a, **k: plain(self, *a, primitives=primitives, **k))
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with rig(**{**config, "max_live_requests": 64}) as r:
            served = 0
            for step[0] in range(1, 25, 2):
                doomed = []
                for kind in ("handle", "iterator", "coroutine", "async iterator"):
                    h = r.tm.generate([1])
                    rid = next_request(r)
                    doomed.append(rid)
                    r.chunk(rid, [65])
                    r.idle()
                    cycle = [h]
                    if kind == "iterator":
                        it = iter(h)
                        next(it)
                        cycle.append(it)
                        del it
                    elif kind in ("coroutine", "async iterator"):
                        loop = asyncio.new_event_loop()
                        h._sink.take()
                        co = h.aresult() if kind == "coroutine" else _read(h)
                        task = loop.create_task(co)
                        loop.run_until_complete(_turn())
                        task._log_destroy_pending = False
                        loop.close()
                        cycle += [co, task]
                        del co, task, loop
                    cycle.append(cycle)
                    waste.append([cycle])
                    del h, cycle
                    if kind in ("coroutine", "async iterator"):
                        r.chunk(rid, [66])  # a reader that waits in a closed loop is let go at the next output
                        r.idle()
                # traffic: every lock of the pipeline is taken many times, by every thread
                live = [r.tm.generate([1]), r.tm.generate("x", stream=False)]
                mates = [next_request(r), next_request(r)]
                r.push(*(chunk(rid, [66]) for rid in mates))
                r.push(*(chunk(rid, [67], STOP) for rid in mates))
                assert ends(live) == ["BC", "BC"]
                served += 2
                r.tm.decode([65])
                until(partial(all_aborted, r, primitives, set(doomed)), "all are aborted")
            assert sorted(r.aborts()) == sorted(set(r.aborts()))
            assert served == 24
            assert primitives.times == 48
            r.gone()
    finally:
        gc.enable()
        gc.unfreeze()


def all_aborted(r, primitives, doomed):
    primitives.collect()
    gc.collect()  # one that began while another thread collected has done nothing
    r.tm.stats()
    r.drain()
    return doomed <= set(r.aborts())


def next_request(r):
    """The next generate request; aborts of what was dropped come in between."""
    while isinstance(message := r.one(), AbortMessage):
        pass
    return message.rid


async def _read(h):
    async for _ in h:
        pass


async def _turn():
    """One turn of the loop: every task that was ready has run up to its next wait."""
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, None)
    await future


def test_the_manager_and_its_handles_are_collectable():
    import weakref

    with rig() as r:
        h = r.tm.generate([1])
        r.chunk(r.request(), [65], STOP)
        h.result(BOUND)
        sink = weakref.ref(h._sink)
        handle = weakref.ref(h)
        del h
        r.gone()
        r.idle()
        until(lambda: gc.collect() is not None and handle() is None and sink() is None, "neither is kept by a table")


def test_a_config_that_contradicts_itself_leaves_nothing():
    with pytest.raises(HeadraceError):
        TokenizerManager(RuntimeConfig(tokenizer=None))
    assert threads() == []
