"""What a client holds: reading, leaving, dropping; and that leaving aborts exactly once at the scheduler."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest
from headrace.codec import ClientClosedError, InternalError, Stop, ValidationError
from manager_helpers import BOUND, STOP, Rig, chunk, every_config, rig, until


def ids_of(chunks):
    return [token for chunk in chunks for token in chunk.token_ids.tolist()]


@every_config
def test_a_stream_gives_disjoint_deltas_and_then_the_whole_again(config):
    with rig(**config) as r:
        h = r.tm.generate("hi", rid="x")
        rid = r.request()
        it = iter(h)
        got = []
        for ids in ([65], [66, 67], [68]):
            r.chunk(rid, ids, prompt_tokens=2)
            got.append(next(it))
        r.chunk(rid, [69], STOP, prompt_tokens=2)
        got += it
        assert [c.text for c in got] == ["A", "BC", "D", "E"]
        assert ids_of(got) == [65, 66, 67, 68, 69]
        assert [c.completion_tokens for c in got] == [1, 3, 4, 5]
        assert [c.finish_reason for c in got] == [None, None, None, Stop(None)]
        whole = h.result(BOUND)
        assert (whole.rid, whole.text, whole.token_ids.tolist()) == ("x", "ABCDE", [65, 66, 67, 68, 69])
        assert (whole.prompt_tokens, whole.completion_tokens, whole.usage.total_tokens) == (2, 5, 7)
        assert h.result(BOUND).text == "ABCDE"
        assert list(h) == []  # a stream that has ended has no more deltas
        r.no_more()


@every_config
def test_the_same_in_asyncio(config):
    with rig(**config) as r:

        async def main():
            h = r.tm.generate("hi")
            rid = r.request()
            texts = []
            r.chunk(rid, [65])
            async for chunk in h:
                texts.append(chunk.text)
                if len(texts) < 3:
                    r.chunk(rid, [65 + len(texts)], STOP if len(texts) == 2 else None)
            whole = await h.aresult(BOUND)
            return texts, whole.text

        assert asyncio.run(main()) == (["A", "B", "C"], "ABC")
        r.no_more()


@pytest.mark.parametrize("stream", [True, False])
@every_config
def test_result_is_the_whole_text_streamed_or_not(config, stream):
    with rig(**config) as r:
        h = r.tm.generate([1, 2, 3], stream=stream)
        rid = r.request()
        r.chunk(rid, [72])
        r.chunk(rid, [105], STOP)
        whole = h.result(BOUND)
        assert whole.text == "Hi"
        assert whole.token_ids.dtype == np.int64
        assert whole.finish_reason == Stop(None)


@every_config
def test_a_result_that_times_out_leaves_the_request_running(config):
    with rig(**config) as r:
        h = r.tm.generate("hi")
        rid = r.request()
        with pytest.raises(TimeoutError, match="goes on running"):
            h.result(timeout=0)

        async def again():
            with pytest.raises(TimeoutError, match="goes on running"):
                await h.aresult(timeout=0)

        asyncio.run(again())
        r.chunk(rid, [65], STOP)
        assert h.result(BOUND).text == "A"
        r.no_more()


@pytest.mark.parametrize("bad", [-1, float("nan"), "1", True])
def test_a_timeout_that_is_no_duration_is_refused_before_anything_is_touched(bad):
    with rig() as r:
        h = r.tm.generate("hi")
        rid = r.request()
        for call in (
            lambda: h.result(bad),
            lambda: asyncio.run(h.aresult(bad)),
            lambda: r.tm.control("FlushCacheReqInput", timeout=bad),
            lambda: r.tm.decode([65], timeout=bad),
            lambda: r.tm.health(bad),
            lambda: r.tm.shutdown(bad),
        ):
            with pytest.raises(ValidationError):
                call()
        assert r.live() == 1
        assert r.tm.state.name == "RUNNING"
        r.chunk(rid, [65], STOP)
        assert h.result(float("inf")).text == "A"


@every_config
def test_a_handle_has_one_reader_at_a_time(config):
    with rig(**config) as r:
        h = r.tm.generate("hi")
        rid = r.request()
        first = iter(h)
        with pytest.raises(InternalError, match="already being read"):
            iter(h)
        with pytest.raises(InternalError, match="already being read"):
            h.result(0)
        r.chunk(rid, [65])
        assert next(first).text == "A"
        for other in (iter, aiter):
            with pytest.raises(InternalError, match="already being read"):
                other(h)
        r.chunk(rid, [66], STOP)
        assert [c.text for c in first] == ["B"]
        assert h.result(BOUND).text == "AB"


def test_an_iterator_that_never_started_does_not_hold_the_handle():
    with rig() as r:
        h = r.tm.generate("hi")
        rid = r.request()
        iterator = iter(h)
        del iterator
        again = aiter(h)
        del again
        r.chunk(rid, [65], STOP)
        assert h.result(BOUND).text == "A"
        r.no_more()


def left_aborts_once(r: Rig, rid: str) -> None:
    message = r.one()
    assert r.aborts() == [rid], message
    r.gone()
    r.chunk(rid, [66])  # late output of a request that is gone
    r.chunk(rid, [67], STOP)
    r.no_more()
    assert r.aborts() == [rid]


@every_config
def test_leaving_a_for_loop_aborts_once(config):
    with rig(**config) as r:
        h = r.tm.generate("hi")
        rid = r.request()
        r.chunk(rid, [65])
        for chunk in h:
            assert chunk.text == "A"
            break
        left_aborts_once(r, rid)
        with pytest.raises(ClientClosedError):
            h.result(BOUND)
        with pytest.raises(ClientClosedError):
            next(iter(h))
        h.close()
        h.abort()
        r.no_more()


@every_config
def test_leaving_an_async_for_loop_aborts_once(config):
    with rig(**config) as r:

        async def main():
            h = r.tm.generate("hi")
            rid = r.request()
            r.chunk(rid, [65])
            async for chunk in h:
                assert chunk.text == "A"
                break
            return rid, h

        rid, h = asyncio.run(main())
        left_aborts_once(r, rid)
        with pytest.raises(ClientClosedError):
            h.result(BOUND)


@pytest.mark.parametrize("how", ["iterate", "aresult"])
@every_config
def test_cancelling_a_task_aborts_once(config, how):
    with rig(**config) as r:

        async def main():
            h = r.tm.generate("hi")
            rid = r.request()
            inside = asyncio.Event()

            async def read():
                inside.set()
                if how == "aresult":
                    await h.aresult()
                else:
                    async for _ in h:
                        pass

            task = asyncio.create_task(read())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return rid, h

        rid, h = asyncio.run(main())
        left_aborts_once(r, rid)
        with pytest.raises(ClientClosedError):
            h.result(BOUND)


@every_config
def test_the_end_of_a_with_block_aborts_once_unless_the_request_has_ended(config):
    with rig(**config) as r:
        with r.tm.generate("hi") as h:
            rid = r.request()
            r.chunk(rid, [65], STOP)
            assert h.result(BOUND).text == "A"
        r.no_more()
        with r.tm.generate("hi") as h:
            rid = r.request()
        left_aborts_once(r, rid)

        async def main():
            async with r.tm.generate("hi"):
                return r.request()

        rid = asyncio.run(main())
        assert r.one().rid == rid
        r.no_more()


@every_config
def test_a_dropped_handle_aborts_once(config):
    with rig(**config) as r:
        h = r.tm.generate("hi")
        rid = r.request()
        del h
        left_aborts_once(r, rid)


@every_config
def test_a_handle_dropped_after_its_end_aborts_nothing(config):
    with rig(**config) as r:
        h = r.tm.generate("hi")
        r.chunk(r.request(), [65], STOP)
        h.result(BOUND)
        del h
        for stream in (True, False):  # ended, though nobody has read the end
            h = r.tm.generate("hi", stream=stream)
            r.chunk(r.request(), [65], STOP)
            r.gone()
            del h
        gc.collect()
        r.no_more()


@pytest.mark.parametrize("how", ["close", "drop", "abort", "by rid", "abort_all", "leave", "cycle"])
@every_config
def test_a_request_that_never_reached_the_ring_is_ended_without_a_word_to_the_scheduler(config, how):
    with rig(ingress_ring_capacity=1, channel_capacity=8, **config) as r:
        held = threading.Event()
        inside = threading.Event()

        def hold():
            inside.set()
            held.wait(BOUND)

        # the ingress thread is kept busy between two steps, so what is submitted now waits in the inbox
        blocker = threading.Thread(target=lambda: r.tm._thread("headrace-ingress").call(hold, BOUND))
        blocker.start()
        assert inside.wait(BOUND)
        h = r.tm.generate("hi", rid="mine")
        if how == "close":
            h.close()
        elif how == "abort":
            h.abort()
            h.abort()
        elif how == "by rid":
            assert r.tm.abort("mine") == 1
            assert r.tm.abort("mine") == 0
        elif how == "abort_all":
            assert r.tm.abort_all() == 1
        elif how == "leave":
            it = h._begin(h._chunks())
            threading.Thread(target=h.abort).start()
            with pytest.raises(ClientClosedError):
                next(it)
        elif how == "cycle":
            box = [iter(h)]
            box.append(box)
            del box
        if how in ("drop", "cycle"):
            del h
            gc.collect()
        r.gone()
        held.set()
        blocker.join(BOUND)
        r.no_more()
        assert r.seen == []
        other = r.tm.generate("hi")  # its place in the inbox is free again, and the ring never saw it
        r.chunk(r.request(), [65], STOP)
        assert other.result(BOUND).text == "A"


@every_config
def test_abort_by_rid_names_every_live_request_that_has_it_and_nothing_else(config):
    with rig(**config) as r:
        hs = [r.tm.generate([1], rid=name) for name in ("x", "x", "xy", "x#0123456789abcdef")]
        rids = [r.request() for _ in hs]
        for unknown in ("", "X", "x#", "nobody", rids[0]):
            assert r.tm.abort(unknown) == 0
        assert r.tm.abort("x") == 2
        assert r.tm.abort("x") == 0
        assert sorted(m.rid for m in r.receive(2)) == sorted(rids[:2])
        for h in hs[:2]:
            with pytest.raises(ClientClosedError) as caught:
                h.result(BOUND)
            assert caught.value.rid == "x"
        r.push(*(chunk(rid, [65], STOP) for rid in rids))
        assert [h.result(BOUND).text for h in hs[2:]] == ["A", "A"]
        assert [h.rid for h in hs] == ["x", "x", "xy", "x#0123456789abcdef"]
        r.no_more()


@every_config
def test_abort_all_ends_everything_with_one_abort_each(config):
    with rig(**config) as r:
        hs = [r.tm.generate("hi", stream=stream) for stream in (True, False, True)]
        rids = [r.request() for _ in hs]
        r.chunk(rids[0], [65])
        assert r.tm.abort_all() == 3
        assert r.tm.abort_all() == 0
        assert sorted(m.rid for m in r.receive(3)) == sorted(rids)
        for h in hs:
            with pytest.raises(ClientClosedError):
                h.result(BOUND)
            h.abort()
        r.no_more()


@every_config
def test_a_deadline_aborts_and_a_request_that_ended_before_it_is_left_alone(config):
    with rig(**config) as r:
        late = r.tm.generate("hi", deadline_s=0)
        with pytest.raises(ClientClosedError, match="aborted"):
            late.result(BOUND)
        r.gone()
        r.idle()
        r.drain()
        far = r.tm.generate("hi", deadline_s=1e300)  # more than any lock can wait for
        until(lambda: r.tm._deadlines, "the reaper waits for it")
        done = r.tm.generate("hi", deadline_s=3600)
        rids = [r.request(), r.request()]
        for rid in rids:
            r.chunk(rid, [65], STOP)
        assert done.result(BOUND).text == far.result(BOUND).text == "A"
        late = r.tm.generate("hi", deadline_s=1e-9)  # the reaper is still there
        with pytest.raises(ClientClosedError):
            late.result(BOUND)
        for bad in (-1, float("inf"), float("nan"), "1", True):
            with pytest.raises(ValidationError):
                r.tm.generate("hi", deadline_s=bad)
        r.gone()


def test_deadlines_of_requests_that_have_ended_are_forgotten():
    with rig(trace=False) as r:
        for _ in range(1200):
            h = r.tm.generate([1], deadline_s=3600)
            r.chunk(r.request(), [65], STOP)
            h.result(BOUND)
        r.idle()
        until(lambda: len(r.tm._deadlines) < 1100, "ended requests have left the heap of deadlines")


@every_config
def test_closing_a_handle_ends_a_reader_that_is_parked_on_another_thread(config):
    with rig(**config) as r:
        h = r.tm.generate("hi")
        rid = r.request()
        outcome = []

        def read():
            try:
                outcome.append([c.text for c in h])
            except ClientClosedError as error:
                outcome.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: any(hub.parked for hub in r.tm._pipeline.hubs), "the reader is parked")
        h.close()
        reader.join(BOUND)
        assert isinstance(outcome[0], ClientClosedError)
        assert r.one().rid == rid
        r.no_more()


def test_a_raised_error_does_not_gather_the_frames_of_earlier_calls():
    with rig() as r:
        h = r.tm.generate("hi")
        r.chunk(r.request(), [], {"type": "abort", "message": "no", "status_code": 429, "err_type": None})
        depths = []
        for _ in range(3):
            with pytest.raises(Exception, match="no") as caught:
                h.result(BOUND)
            depth, tb = 0, caught.value.__traceback__
            while tb:
                depth, tb = depth + 1, tb.tb_next
            depths.append(depth)
        assert len(set(depths)) == 1
        assert caught.value.http_status == 429
