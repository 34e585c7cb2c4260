"""Everything at once over the real threads: random prompts and parameters, and every request gets its own text back exactly once."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

from headrace.codec import ClientClosedError, GenerateMessage, encode_batch
from headrace.runtime import EchoScheduler, RuntimeConfig, TokenizerManager
from headrace.runtime.text.engine import TextEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manager_helpers import BOUND, CONFIGS, STOP, TOKENIZER, check_ended, chunk, every_config, rig

ENGINE = TextEngine(TOKENIZER)
_PROMPTS = st.one_of(
    st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
    st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=20),
)


@st.composite
def requests(draw):
    """What one client does: prompt, parameters, and how it reads or leaves."""
    return SimpleNamespace(
        prompt=draw(_PROMPTS),
        max_new_tokens=draw(st.integers(0, 30)),
        ignore_eos=draw(st.booleans()),
        skip=draw(st.booleans()),
        stream=draw(st.booleans()),
        rid=draw(st.none() | st.sampled_from(["x", "y", "x#0000000000000000"])),
        how=draw(st.sampled_from(["result", "iterate", "aresult", "aiterate", "step", "close", "leave", "drop"])),
    )


@contextmanager
def fast_switching():
    """The interpreter changes threads as often as it can, which finds more orders of events."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def expected(request):
    """(text, ids, type of finish) as the echo scheduler must give it, by a whole decode of what it sends."""
    ids = list(request.prompt) if not isinstance(request.prompt, str) else TOKENIZER.encode(request.prompt).ids
    produced = min(request.max_new_tokens, len(ids)) if not request.ignore_eos else request.max_new_tokens
    out = [ids[at % len(ids)] for at in range(produced)]
    kind = "length" if produced == request.max_new_tokens else "stop"
    return TOKENIZER.decode(out, skip_special_tokens=request.skip), out, kind


class Steps:
    """What the step sink gave, by handle."""

    def __init__(self):
        self.lock = threading.Lock()
        self.rows = {}

    def __call__(self, batch):
        with self.lock:
            for at, handle in enumerate(batch.handles):
                ids = batch.token_ids[batch.offsets[at] : batch.offsets[at + 1]].tolist()
                self.rows.setdefault(handle, []).append(
                    (batch.texts[at], ids, batch.finish_reasons[at], batch.errors[at])
                )


def run_clients(tm, plan):
    """Submits and reads everything on several threads; returns what each saw, in order of the plan."""
    seen = [None] * len(plan)
    steps = Steps()
    tm.on_step(steps)
    step_handles = {}

    def client(at):
        request = plan[at]
        handle = tm.generate(
            request.prompt,
            {
                "max_new_tokens": request.max_new_tokens,
                "ignore_eos": request.ignore_eos,
                "skip_special_tokens": request.skip,
            },
            rid=request.rid,
            stream=request.stream,
            sink="step" if request.how == "step" else "handle",
        )
        if request.rid is not None:
            assert handle.rid == request.rid
        if request.how == "step":
            step_handles[at] = handle
        elif request.how == "result":
            seen[at] = whole(handle.result(BOUND))
        elif request.how == "iterate":
            seen[at] = fold(list(handle))
        elif request.how == "aresult":
            seen[at] = whole(asyncio.run(handle.aresult(BOUND)))
        elif request.how == "aiterate":

            async def read():
                return [chunk async for chunk in handle]

            seen[at] = fold(asyncio.run(read()))
        elif request.how == "close":
            handle.close()
        elif request.how == "leave":
            for _ in handle:
                break

    workers = [
        threading.Thread(target=lambda part=part: [client(at) for at in range(part, len(plan), 3)]) for part in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(BOUND)
        assert not worker.is_alive(), tm.stats()
    assert tm._pipeline.live.wait_empty(BOUND), tm.stats()
    return seen, steps, step_handles


def whole(completion):
    return completion.text, completion.token_ids.tolist(), completion.finish_reason.to_map()["type"]


def fold(chunks):
    ids = [token for c in chunks for token in c.token_ids.tolist()]
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].completion_tokens == len(ids)
    return "".join(c.text for c in chunks), ids, chunks[-1].finish_reason.to_map()["type"]


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=max(20, settings().max_examples // 3))
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.lists(requests(), min_size=1, max_size=12),
    st.integers(1, 8),
    st.sampled_from([2, 64]),
)
def test_every_request_gets_its_own_text_back_exactly_once(config, plan, max_batch, ring):
    tm = TokenizerManager(
        RuntimeConfig(
            tokenizer=TOKENIZER,
            context_len=64,
            trace=True,
            drain_timeout_s=BOUND,
            egress_ring_capacity=ring,
            **CONFIGS[config],
        )
    )
    with fast_switching(), tm, EchoScheduler(tm.scheduler, max_batch=max_batch):
        seen, steps, step_handles = run_clients(tm, plan)
        tm.shutdown()
    for at, request in enumerate(plan):
        text, ids, kind = expected(request)
        if at in step_handles:
            rows = steps.rows[step_handles[at]]
            assert [row[2] is not None for row in rows] == [False] * (len(rows) - 1) + [True]
            assert not any(row[3] for row in rows)
            seen[at] = (
                "".join(row[0] for row in rows),
                [token for row in rows for token in row[1]],
                rows[-1][2].to_map()["type"],
            )
        if seen[at] is not None:
            assert seen[at] == (text, ids, kind)
    check_ended(tm)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=max(20, settings().max_examples // 3))
@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_a_scheduler_that_cuts_and_mixes_at_will_changes_nothing_for_anybody(config, data):
    """Chunks of any size (none too), requests that join and leave frames, special and broken bytes; text equals the engine's own."""
    outputs = data.draw(
        st.lists(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=12), min_size=1, max_size=5),
        "outputs",
    )
    with rig(**CONFIGS[config]) as r:
        handles = [
            r.tm.generate(
                [1], {"skip_special_tokens": data.draw(st.booleans())}, stream=data.draw(st.booleans()), rid=str(at)
            )
            for at in range(len(outputs))
        ]
        rids = r.requests(len(outputs))
        left = {str(at): list(ids) for at, ids in enumerate(outputs)}
        while left:
            batch = []
            for name in sorted(left):
                take = len(left[name]) + 1 - data.draw(st.integers(0, len(left[name]) + 1))
                ids, left[name] = left[name][:take], left[name][take:]
                over = take > len(ids)
                batch.append(chunk(rids[name], ids, STOP if over else None))
                if over:
                    del left[name]
            r.push(*batch)
        for handle, ids in zip(handles, outputs, strict=True):
            done = handle.result(BOUND)
            assert done.token_ids.tolist() == ids
            assert done.text in {TOKENIZER.decode(ids, skip_special_tokens=skip) for skip in (True, False)}
        r.no_more()


@every_config
def test_a_rush_of_clients_that_read_leave_and_abort_ends_clean(config):
    """64 clients on 4 threads, a scheduler driven by hand on a fifth: nothing lost, nothing doubled, nothing left."""
    count = 64
    with fast_switching(), rig(**config) as r:
        done = threading.Event()

        def scheduler():
            live, at = {}, 0
            while not done.is_set() or live:
                if not live:
                    r.port.wait_request(0.05)
                for message in r.drain():
                    if isinstance(message, GenerateMessage):
                        live[message.rid] = 0
                    else:
                        live.pop(message.rid, None)
                if not live:
                    continue
                at += 1
                batch = []
                for rid, step in list(live.items()):
                    batch.append(chunk(rid, [97 + step % 26], STOP if step == 9 else None))
                    live[rid] = step + 1
                    if step == 9:
                        del live[rid]
                r.port.push_frame(encode_batch(batch, r.port.schema))

        outcomes = [None] * count

        def client(part):
            for at in range(part, count, 4):
                handle = r.tm.generate([1], rid=f"c{at}")
                if at % 4 == 0:
                    outcomes[at] = "".join(c.text for c in handle)
                elif at % 4 == 1:
                    outcomes[at] = handle.result(BOUND).text
                elif at % 4 == 2:
                    for c in handle:
                        outcomes[at] = c.text
                        break
                else:
                    r.tm.abort(f"c{at}")
                    try:
                        outcomes[at] = handle.result(BOUND).text
                    except ClientClosedError:
                        outcomes[at] = "aborted"

        engine = threading.Thread(target=scheduler)
        engine.start()
        clients = [threading.Thread(target=client, args=(part,)) for part in range(4)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(BOUND)
        r.gone()
        done.set()
        engine.join(BOUND)
        for at, outcome in enumerate(outcomes):
            if at % 4 < 2:
                assert outcome == "abcdefghij"
            elif at % 4 == 2:
                assert outcome
                assert "abcdefghij".startswith(outcome)
            else:
                assert outcome in ("aborted", "abcdefghij")
        assert len(r.aborts()) == len(set(r.aborts()))
