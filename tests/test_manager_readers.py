"""How readers are woken: every task of a loop in one call, nothing lost by a cancelled wait, and leaving in every way there is."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from headrace.codec import ClientClosedError, InternalError, Length
from headrace.runtime import wakes
from headrace.runtime.handle import Chunk, RequestHandle, arrival
from headrace.runtime.sink import Columns, EgressItem, Hub, Sink
from manager_helpers import BOUND, STOP, every_config, rig, until


class House:
    """Some handles on one hub, with the shard's and the driver's part played by the test."""

    def __init__(self, count: int = 1, capacity: int = 4096) -> None:
        self.hub = Hub()
        self.sinks = [Sink(self.hub, capacity, str(at)) for at in range(count)]
        self.left: list[str] = []
        self.handles = [
            RequestHandle(str(at), str(at), sink, lambda *_: True, self.left.append)
            for at, sink in enumerate(self.sinks)
        ]
        self.sent = 0

    def step(self, *only: int) -> None:
        """One plain chunk for each request, or for some."""
        sinks = [self.sinks[at] for at in only] if only else self.sinks
        pairs = [(chr(97 + self.sent % 26), self.sent)] * len(sinks)
        self.sent += 1
        columns = Columns(range(len(sinks)), sinks, [sink.waiting() for sink in sinks], pairs)
        assert self.hub.put_columns(columns, 4096) == []

    def finish(self, *only: int) -> None:
        end = EgressItem.Done(Length(1), EgressItem.Frame("", np.empty(0, np.int64)))
        sinks = [self.sinks[at] for at in only] if only else self.sinks
        assert self.hub.put_items([(sink, end) for sink in sinks]) == []

    def waiting(self) -> int:
        return sum(len(book.turns) for book in self.hub.tasks.values())


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 7, 200])
def test_a_step_is_one_call_of_the_loop_and_every_task_gets_its_chunk(count):
    house = House(count)
    got: list[list[int]] = [[] for _ in range(count)]

    async def read(at: int) -> None:
        async for chunk in house.handles[at]:
            got[at] += chunk.token_ids.tolist()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls = []
        plain = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call, **more: (calls.append(call), plain(*call, **more))[1]
        tasks = [asyncio.create_task(read(at)) for at in range(count)]
        await turns()
        for step in range(5):
            assert house.waiting() == count
            house.step()
            assert len(calls) == step + 1
            house.step()  # before the loop has looked: the call that is on its way is enough
            assert len(calls) == step + 1
            await turns()
        house.finish()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert got == [list(range(10))] * count


def test_a_reader_that_is_busy_finds_everything_in_order_when_it_comes_back():
    house = House(3)

    async def main() -> None:
        it = aiter(house.handles[0])
        others = [asyncio.create_task(anext(aiter(handle))) for handle in house.handles[1:]]
        await turns()
        house.step()
        assert (await anext(it)).text == "a"
        for _ in range(3):
            house.step(0)
            await turns()
        chunk = await anext(it)
        assert (chunk.text, chunk.token_ids.tolist(), chunk.completion_tokens) == ("bcd", [1, 2, 3], 4)
        house.step(0)
        assert (await anext(it)).text == "e"
        assert [(await other).text for other in others] == ["a", "a"]

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, 20])
def test_a_cancelled_wait_did_not_happen_also_when_its_wake_is_on_its_way(count):
    house = House(count)

    async def main() -> None:
        waits = [asyncio.create_task(arrival(sink)) for sink in house.sinks]
        await turns()
        house.step()
        assert all(wait.cancel() for wait in waits)
        for wait in waits:
            with pytest.raises(asyncio.CancelledError):
                await wait
        assert [sink.take().text for sink in house.sinks] == ["a"] * count
        again = [asyncio.create_task(arrival(sink)) for sink in house.sinks]
        await turns()
        assert house.waiting() == count
        house.step()
        await asyncio.gather(*again)
        assert [sink.take().text for sink in house.sinks] == ["b"] * count

    asyncio.run(main())
    assert house.left == []


def test_a_result_that_timed_out_has_taken_nothing():
    house = House()

    async def main() -> str:
        with pytest.raises(TimeoutError):
            await house.handles[0].aresult(0)
        house.step()
        with pytest.raises(TimeoutError):
            await house.handles[0].aresult(0)
        house.step()
        house.finish()
        return (await house.handles[0].aresult(BOUND)).text

    assert asyncio.run(main()) == "ab"
    assert house.left == []


def test_a_message_of_a_cancellation_reaches_the_task():
    house = House()

    async def main() -> None:
        task = asyncio.create_task(anext(aiter(house.handles[0])))
        await turns()
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task
        assert house.waiting() == 0

    asyncio.run(main())
    assert house.left == ["0"]


def test_the_last_of_many_readers_is_served_although_an_earlier_one_ends_the_loop():
    house = House(150)
    got: list[str] = []

    async def read(at: int) -> None:
        async for chunk in house.handles[at]:
            got.append(chunk.text)
            if at in (3, 77):
                raise SystemExit(at)

    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(read(at)) for at in range(150)]
    loop.run_until_complete(turns())
    house.step()
    for at in (3, 77):
        with pytest.raises(SystemExit, match=str(at)):
            loop.run_until_complete(asyncio.wait(tasks))
        assert len(got) == at + 1
    house.finish()
    loop.run_until_complete(asyncio.wait(tasks))
    assert got.count("a") == 150
    loop.close()


def test_a_loop_that_runs_inside_a_task_serves_the_other_readers():
    """As `nest_asyncio` does it: a task that the loop goes on with turns the loop itself until another reader has its chunk."""
    house = House(100)
    got: list[int] = []

    async def read(at: int) -> None:
        async for _ in house.handles[at]:
            got.append(at)
            if at == 0:
                task, loop = asyncio.current_task(), asyncio.get_running_loop()
                asyncio.tasks._leave_task(loop, task)
                while len(got) < 100:
                    assert loop._ready, "nothing will serve the others"
                    loop._run_once()
                asyncio.tasks._enter_task(loop, task)

    async def main() -> None:
        tasks = [asyncio.create_task(read(at)) for at in range(100)]
        await turns()
        house.step()
        await turns()
        assert got == list(range(100))
        house.finish()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_task_goes_on_in_its_own_context():
    house = House(2)
    who: contextvars.ContextVar[int] = contextvars.ContextVar("who")
    seen = []

    async def read(at: int) -> None:
        who.set(at)
        async for _ in house.handles[at]:
            seen.append((who.get(), asyncio.current_task().get_name()))

    async def main() -> None:
        tasks = [asyncio.create_task(read(at), name=f"t{at}") for at in range(2)]
        await turns()
        house.step()
        await turns()
        house.finish()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert seen == [(0, "t0"), (1, "t1")] * 2


def test_two_waits_in_one_iterator_are_refused_and_the_first_goes_on():
    house = House()

    async def main() -> None:
        it = aiter(house.handles[0])
        first = asyncio.create_task(anext(it))
        await turns()
        with pytest.raises(InternalError, match="one reader at a time"):
            await anext(it)
        house.step()
        assert (await first).text == "a"
        house.finish()
        assert (await anext(it)).finish_reason == Length(1)
        assert await anext(it, "over") == "over"
        with pytest.raises(StopAsyncIteration):
            await anext(it)

    asyncio.run(main())
    assert house.left == []


def test_a_task_and_a_thread_cannot_wait_for_one_output():
    house = House()

    async def main() -> None:
        wait = asyncio.create_task(arrival(house.sinks[0]))
        await turns()
        with pytest.raises(InternalError, match="another reader"):
            house.sinks[0].wait(0)
        with pytest.raises(InternalError, match="another reader"):
            await arrival(house.sinks[0])
        house.step()
        await wait

    asyncio.run(main())


@pytest.mark.parametrize("how", ["break", "aclose", "drop", "raise", "cancel"])
def test_an_iterator_that_is_left_says_so_at_once_and_only_once(how):
    house = House()

    async def main() -> None:
        handle = house.handles[0]
        if how in ("aclose", "drop", "cancel"):
            it = aiter(handle)
            house.step()
            await anext(it)
            if how == "aclose":
                await it.aclose()
                await it.aclose()
            elif how == "cancel":
                task = asyncio.create_task(anext(it))
                await turns()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            if how != "drop":
                with pytest.raises(StopAsyncIteration):
                    await anext(it)
            del it
        else:
            house.step()
            with pytest.raises(KeyError) if how == "raise" else nullcontext():
                async for _ in handle:
                    if how == "raise":
                        raise KeyError
                    break
        assert house.left == ["0"]  # without a turn of the loop
        with pytest.raises(ClientClosedError):
            await handle.aresult()

    asyncio.run(main())
    house.handles.clear()
    gc.collect()
    assert house.left == ["0"]


def test_an_iterator_that_was_never_begun_or_has_ended_leaves_nothing_behind():
    house = House()

    async def main() -> None:
        it = aiter(house.handles[0])
        await it.aclose()
        del it
        it = aiter(house.handles[0])
        del it
        house.step()
        house.finish()
        assert [chunk.text async for chunk in house.handles[0]] == ["a"]
        assert (await house.handles[0].aresult()).text == "a"

    asyncio.run(main())
    house.handles.clear()
    assert house.left == []


@every_config
def test_readers_in_two_loops_and_a_thread_are_all_woken_by_one_step(config):
    with rig(**config) as r:
        handles = [r.tm.generate([1]) for _ in range(6)]
        rids = [r.request() for _ in handles]
        got = [""] * 6

        async def read(at: int) -> None:
            async for chunk in handles[at]:
                got[at] += chunk.text

        async def both(first: int) -> None:
            await asyncio.gather(read(first), read(first + 1))

        def plain(at: int) -> None:
            for chunk in handles[at]:
                got[at] += chunk.text

        threads = [
            threading.Thread(target=asyncio.run, args=(both(0),)),
            threading.Thread(target=asyncio.run, args=(both(2),)),
            threading.Thread(target=plain, args=(4,)),
            threading.Thread(target=plain, args=(5,)),
        ]
        for thread in threads:
            thread.start()
        for step in range(4):
            until(
                lambda: sum(len(hub.parked) + sum(len(book.turns) for book in hub.tasks.values()) for hub in r.tm._pipeline.hubs) == 6,
                "everybody waits",
            )  # fmt: skip
            for at, rid in enumerate(rids):
                r.chunk(rid, [65 + at], STOP if step == 3 else None)
        for thread in threads:
            thread.join(BOUND)
        assert got == [chr(65 + at) * 4 for at in range(6)]


def test_the_readers_of_a_loop_that_is_closed_are_let_go_at_the_next_output():
    house = House(12)
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(arrival(sink)) for sink in house.sinks]
    loop.run_until_complete(turns())
    assert house.waiting() == 12
    loop.close()
    house.step(3)
    assert house.hub.tasks == {}
    assert house.sinks[3].wait(0).text == "a"
    for task in tasks:
        task._log_destroy_pending = False


def test_a_loop_that_is_far_behind_keeps_a_bounded_number_of_words():
    house = House(20)

    async def main() -> None:
        waits = [asyncio.create_task(arrival(sink)) for sink in house.sinks]
        await turns()
        (book,) = house.hub.tasks.values()
        house.step(19)
        for at in range(1000):
            house.step(at % 10, at % 9)
            assert len(book.touched) <= wakes._WORDS
        await turns()
        assert [wait.done() for wait in waits] == [True] * 10 + [False] * 9 + [True]
        for wait in waits:
            wait.cancel()

    asyncio.run(main())


def test_a_chunk_makes_its_array_when_it_is_asked_for():
    chunk = Chunk("a", 7, None, 1, 1)
    assert chunk.token_ids.dtype == np.int64
    assert chunk.token_ids.tolist() == [7]
    assert chunk.token_ids is chunk.token_ids
    assert (chunk.extras, chunk.meta) == ({}, {})
    with pytest.raises(AttributeError):
        chunk.text = "b"


@pytest.mark.parametrize(("prompt_tokens", "meta"), [(4, None), (0, {"cached_tokens": 2})])
def test_what_comes_with_the_first_output_is_known_from_then_on(prompt_tokens, meta):
    house = House()
    first = EgressItem.Frame("x", np.array([9]), prompt_tokens=prompt_tokens, meta=meta)
    house.hub.put_items([(house.sinks[0], first)])
    reader = iter(house.handles[0])
    for text, count in (("x", 1), ("a", 2)):
        chunk = next(reader)
        assert (chunk.text, chunk.completion_tokens) == (text, count)
        assert (chunk.prompt_tokens, chunk.meta) == (prompt_tokens, meta or {})
        house.step()


def test_a_reader_whose_handle_was_closed_gets_nothing_that_was_taken_for_it_before():
    house = House(2)
    got = []

    async def read(at: int) -> None:
        async for chunk in house.handles[at]:
            got.append((at, chunk.text))
            house.handles[1].close()

    async def main() -> None:
        tasks = [asyncio.create_task(read(at)) for at in range(2)]
        await turns()
        house.step()
        with pytest.raises(ClientClosedError):
            await tasks[1]
        house.finish(0)
        await tasks[0]

    asyncio.run(main())
    assert (1, "a") not in got
    assert (0, "a") in got


def test_a_reader_that_has_ended_needs_no_collector():
    house = House(2)

    async def main() -> None:
        async def read(at: int) -> None:
            async for _ in house.handles[at]:
                pass

        tasks = [asyncio.create_task(read(at)) for at in range(2)]
        await turns()
        house.step()
        await turns()
        house.finish()
        await asyncio.gather(*tasks)

    gc.disable()
    try:
        asyncio.run(main())
        sinks, handles = [weakref.ref(one) for one in house.sinks], [weakref.ref(one) for one in house.handles]
        house.sinks.clear()
        house.handles.clear()
        assert [one() for one in sinks + handles] == [None] * 4
    finally:
        gc.enable()


def test_a_second_task_at_an_iterator_is_refused_also_while_the_first_ones_cancellation_is_on_its_way():
    """It would wait for ever: the first one, when it hears of its end, takes their common place off the books."""
    house = House()

    async def main() -> None:
        it = aiter(house.handles[0])
        first = asyncio.ensure_future(anext(it))
        await turns()
        first.cancel()
        with pytest.raises(InternalError, match="already being read"):
            async with asyncio.timeout(BOUND):
                await anext(it)
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(main())
    assert house.left == ["0"]


def test_an_iterator_goes_on_in_another_loop():
    house = House()
    it = aiter(house.handles[0])
    got = []

    async def one() -> None:
        task = asyncio.ensure_future(anext(it))
        await turns()
        house.step()
        got.append((await task).text)

    loops = [asyncio.new_event_loop() for _ in range(2)]
    for loop in [*loops, *loops]:
        loop.run_until_complete(one())
    loops[0].close()
    loops[1].run_until_complete(one())
    assert got == list("abcde")
    assert house.left == []
    loops[1].close()


def test_a_loop_that_was_called_and_closed_before_it_looked_keeps_nothing_alive():
    house = House()
    loop = asyncio.new_event_loop()
    handle = house.handles.pop()
    task = loop.create_task(anext(aiter(handle)))
    loop.run_until_complete(turns())
    house.step()
    loop.close()
    house.step()
    assert house.hub.tasks == {}
    task._log_destroy_pending = False
    gone = weakref.ref(handle)
    del task, handle
    gc.collect()
    assert gone() is None
    assert "0" in house.left


class _NoLock:
    """Stands for a lock that this very thread holds."""

    def acquire(self, *_):
        raise AssertionError("a lock is taken")

    __enter__ = acquire

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("kind", ["with", "async with"])
def test_the_block_of_a_handle_that_dies_with_its_generator_or_coroutine_takes_no_lock(kind):
    """The collector may close them inside any critical section; the request is then aborted like one whose handle was dropped."""
    house = House()
    handle = house.handles[0]

    def generator():
        with handle:
            yield from handle

    async def coroutine():
        async with handle:
            async for _ in handle:
                pass

    if kind == "with":
        dying = generator()
        house.step()
        next(dying)
    else:
        dying = coroutine()
        loop = asyncio.new_event_loop()
        task = loop.create_task(dying)
        loop.run_until_complete(turns())
        loop.close()
        task._log_destroy_pending = False
    locks = house.hub.lock, handle._lock
    house.hub.lock = handle._lock = _NoLock()
    try:
        dying.close()
    finally:
        house.hub.lock, handle._lock = locks
    assert house.left == ["0"]
    with pytest.raises(ClientClosedError):
        handle.result()
