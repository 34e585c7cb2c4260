"""on_step, rule by rule of the API page; and what a manager may write into a log."""

from __future__ import annotations

import logging
import re
import threading

import pytest
from headrace.codec import HeadraceError, InternalError, Stop, ValidationError
from headrace.runtime.faults import FaultLog, describe, where
from manager_helpers import BOUND, STOP, V, chunk, every_config, held, rig, server_lines, until


class Steps:
    """A callback that keeps what it was given, and in which thread."""

    def __init__(self):
        self.batches = []
        self.threads = []

    def __call__(self, batch):
        self.threads.append(threading.current_thread().name)
        self.batches.append(batch)

    def rows(self, handle):
        """(text, ids, finish, error) of this handle, in order."""
        out = []
        for b in list(self.batches):
            assert len(b.handles) == len(b.texts) == len(b.finish_reasons) == len(b.errors) == len(b.offsets) - 1
            assert b.offsets[0] == 0
            assert b.offsets[-1] == len(b.token_ids)
            for at, h in enumerate(b.handles):
                if h is handle:
                    ids = b.token_ids[b.offsets[at] : b.offsets[at + 1]].tolist()
                    out.append((b.texts[at], ids, b.finish_reasons[at], b.errors[at] and b.errors[at].code))
        return out

    def ended(self, handle):
        return [row for row in self.rows(handle) if row[2] is not None or row[3] is not None]


@every_config
def test_one_call_per_step_and_shard_in_columns_on_the_shards_own_thread(config):
    with rig(**config) as r:
        steps = Steps()
        r.tm.on_step(steps)
        hs = [r.tm.generate([1], sink="step", rid=f"r{i}") for i in range(20)]
        other = r.tm.generate([1])  # an ordinary one in the same frames
        rids = [r.request() for _ in range(21)]
        for token in (65, 66, 67, 68):
            r.push(*(chunk(rid, [token], STOP if token == 68 else None) for rid in rids))
        assert other.result(BOUND).text == "ABCD"
        r.gone()
        r.idle()
        for h in hs:
            rows = steps.rows(h)
            assert "".join(row[0] for row in rows) == "ABCD"
            assert [row[1] for row in rows] == [[65], [66], [67], [68]]
            assert [row[2] for row in rows] == [None, None, None, Stop(None)]
        shards = config.get("detokenizer_shards", 1)
        assert len(steps.batches) <= 4 * shards
        assert len({(b.shard, b.step) for b in steps.batches}) == len(steps.batches)
        assert {b.shard for b in steps.batches} == set(range(shards))
        names = {"headrace-egress"} if config.get("fused", True) else {f"headrace-detok-{i}" for i in range(shards)}
        assert set(steps.threads) == names
        r.no_more()


@every_config
def test_a_handle_of_the_step_sink_cannot_be_read_and_close_aborts_it(config):
    with rig(**config) as r:
        steps = Steps()
        r.tm.on_step(steps)
        h = r.tm.generate([1], sink="step")
        rid = r.request()
        for call in (lambda: iter(h), lambda: aiter(h), lambda: h.result(0)):
            with pytest.raises(InternalError, match="on_step"):
                call()
        with h:
            pass
        assert r.one().rid == rid
        r.gone()
        r.idle()
        assert steps.rows(h) == [("", [], None, "client_closed")]
        r.no_more()


@every_config
def test_a_dropped_handle_of_the_step_sink_runs_on_because_the_callback_is_its_reader(config):
    with rig(**config) as r:
        steps = Steps()
        r.tm.on_step(steps)
        r.tm.generate([1], sink="step")
        r.chunk(r.request(), [65], STOP)
        r.gone()
        r.no_more()
        assert [b.texts for b in steps.batches] == [["A"]]


@every_config
def test_every_terminal_appears_exactly_once_also_one_before_the_ring(config):
    with rig(ingress_ring_capacity=2, **config) as r:
        steps = Steps()
        r.tm.on_step(steps)
        empty = r.tm.generate("", sink="step")
        long = r.tm.generate([1] * 256, sink="step")
        r.gone()
        with held(r, "headrace-ingress"):
            withdrawn = r.tm.generate([1], sink="step")
            withdrawn.abort()
        a, b = r.tm.generate([1], sink="step"), r.tm.generate([1], sink="step")
        until(lambda: r.tm.stats().ingress_ring.fill == 2, "the ring is full")
        full = r.tm.generate([1], sink="step")
        until(lambda: steps.ended(full), "it is refused")
        rids = [r.request(), r.request()]
        r.push(chunk(rids[0], [65]), chunk(rids[0], [66], STOP), chunk(rids[0], [67], STOP), chunk(rids[1], [V + 7]))
        assert r.one().rid == rids[1]
        until(lambda: steps.ended(a), "the other shard has delivered its part of the frame")
        gone = r.tm.generate([1], sink="step")
        r.request()
        r.tm.abort_all()
        r.one()
        last = r.tm.generate([1], sink="step")
        r.request()
        r.tm.shutdown(0)
        expected = {
            empty: "validation", long: "validation", withdrawn: "client_closed", full: "queue_full", b: "detokenize",
            gone: "client_closed", last: "client_closed",
        }  # fmt: skip
        for h, code in expected.items():
            assert [row[3] for row in steps.ended(h)] == [code]
        assert [row[:3] for row in steps.rows(a)] == [("A", [65], None), ("B", [66], Stop(None))]


@every_config
def test_requests_that_do_not_stream_appear_only_at_their_end(config):
    with rig(**config) as r:
        steps = Steps()
        r.tm.on_step(steps)
        h = r.tm.generate([1], sink="step", stream=False)
        rid = r.request()
        r.chunk(rid, [72])
        r.chunk(rid, [105])
        r.idle()
        assert steps.batches == []
        r.chunk(rid, [33], STOP)
        r.gone()
        r.idle()
        assert steps.rows(h) == [("Hi!", [72, 105, 33], Stop(None), None)]


@every_config
def test_a_callback_that_raises_aborts_the_requests_of_that_batch_and_the_stage_lives_on(config, caplog):
    with rig(**config) as r:
        raised = []

        def callback(batch):
            if not raised:
                raised.append(batch)
                raise KeyError("THE TEXT " + batch.texts[0])
            raised.append(batch)

        r.tm.on_step(callback)
        h = r.tm.generate([1], sink="step")
        rid = r.request()
        r.chunk(rid, [65])
        assert r.one().rid == rid
        r.gone()
        r.idle()
        assert [b.errors[0].code for b in raised[1:]] == ["client_closed"]
        assert raised[1].handles == [h]
        other = r.tm.generate([1], sink="step")
        r.chunk(r.request(), [66], STOP)
        r.gone()
        r.idle()
        assert (raised[2].handles, raised[2].texts) == ([other], ["B"])
        r.no_more()
        lines = server_lines(caplog)
        assert len(lines) == 1
        assert lines[0].levelno == logging.ERROR
        assert "KeyError" in lines[0].getMessage()
        assert "THE TEXT" not in caplog.text


@every_config
def test_a_callback_may_generate_abort_and_shut_down_without_waiting_for_its_own_thread(config):
    with rig(**config) as r:
        made = []

        def callback(batch):
            if not made:
                made.append(r.tm.generate([2]))
                made.append(r.tm.generate([3], sink="step"))
                made.append(r.tm.abort("victim"))
            elif batch.finish_reasons[0] is not None and len(made) == 3:
                made.append(r.tm.shutdown(0))
                made.append(r.tm.shutdown(0))

        victim = r.tm.generate([9], rid="victim")
        victim_rid = r.request()
        r.tm.on_step(callback)
        r.tm.generate([1], sink="step")
        rid = r.request()
        r.chunk(rid, [65])
        got = {m.rid: m for m in r.receive(3)}
        assert made[2] == 1
        assert victim_rid in got
        with pytest.raises(HeadraceError):
            victim.result(BOUND)
        r.chunk(rid, [66], STOP)
        until(lambda: r.tm.state.name == "STOPPED", "the callback's shutdown has come to its end")
        r.tm.shutdown()
        with pytest.raises(HeadraceError):
            made[0].result(BOUND)


@every_config
def test_a_callback_that_would_wait_for_its_own_thread_is_told_so(config):
    with rig(**config) as r:
        told = []

        def callback(batch):
            calls = (
                lambda: r.tm.decode([65]),
                lambda: r.tm.control("FlushCacheReqInput"),
                lambda: r.tm.health(1),
            )
            for call in calls:
                try:
                    call()
                except InternalError as error:
                    told.append(error.message)

        r.tm.on_step(callback)
        r.tm.generate([1], sink="step")
        r.chunk(r.request(), [65], STOP)
        r.gone()
        r.idle()
        assert len(told) == 3
        assert all("itself" in message for message in told)
        r.no_more()


def test_a_second_registration_is_an_error_and_a_step_request_needs_one():
    with rig() as r:
        with pytest.raises(ValidationError, match="on_step"):
            r.tm.generate([1], sink="step")
        r.tm.on_step(Steps())
        with pytest.raises(InternalError):
            r.tm.on_step(Steps())
        assert r.live() == 0


# -- logs ------------------------------------------------------------------------------------------------------------------

SECRET = "sesame"


@every_config
def test_client_errors_499_and_503_write_nothing_above_debug_and_no_line_has_text_ids_or_rids(config, caplog):
    caplog.set_level(logging.DEBUG)
    with rig(ingress_ring_capacity=1, **config) as r:
        with pytest.raises(ValidationError):
            r.tm.generate(SECRET, {"n": 2}, rid=SECRET)
        for prompt in ("", SECRET * 100):
            with pytest.raises(ValidationError):
                r.tm.generate(prompt).result(BOUND)
        h = r.tm.generate([1], rid=SECRET)
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "the ring is full")
        with pytest.raises(HeadraceError):
            r.tm.generate(SECRET).result(BOUND)
        rid = r.request()
        h.close()
        r.one()
        h = r.tm.generate([1])
        r.port.push_error(r.request(), "no")
        with pytest.raises(HeadraceError):
            h.result(BOUND)
        r.one()
        h = r.tm.generate([1])
        r.chunk(r.request(), [], {"type": "abort", "message": SECRET, "status_code": 500, "err_type": None})
        with pytest.raises(HeadraceError):
            h.result(BOUND)
        r.idle()
    assert server_lines(caplog) == []
    assert SECRET not in caplog.text
    assert rid not in caplog.text


@every_config
def test_server_faults_are_errors_at_most_once_a_second_for_each_reason_with_a_count(config, caplog):
    with rig(**config) as r:
        r.tm._faults._clock = lambda: 100.0
        hs, secrets = [], []
        for _ in range(5):
            hs.append(r.tm.generate(SECRET, rid=SECRET))
            rid = r.request()
            secrets.append(rid)
            r.chunk(rid, [V + 424242])
            r.one()
            r.port.push_frame(b"\x02garbage")
            r.idle()
        for h in hs:
            with pytest.raises(HeadraceError) as caught:
                h.result(BOUND)
            assert str(V + 424242) in caught.value.message
        r.idle()
        lines = server_lines(caplog)
        assert [line.levelno for line in lines] == [logging.ERROR] * 2
        assert {line.name for line in lines} == {"headrace.detok", "headrace.egress"}
        r.tm._faults._clock = lambda: 101.0
        r.port.push_frame(b"\x02garbage")
        r.idle()
        assert "(4 more since the last line)" in server_lines(caplog)[-1].getMessage()
    assert (
        "(4 more since the last line)" in server_lines(caplog)[-1].getMessage()
    )  # what was held back is told at the end
    for secret in (SECRET, "424242", *secrets):
        assert secret not in caplog.text
    assert all(record.name.startswith("headrace") for record in server_lines(caplog))


@every_config
def test_no_text_and_no_id_stands_in_a_trace_or_in_stats(config):
    with rig(**config) as r:
        h = r.tm.generate(SECRET, {"stop": ["unseen"]})
        r.chunk(r.request(), list(b"open " + SECRET.encode()), STOP)
        assert SECRET in h.result(BOUND).text
        r.idle()
        for line in (*r.tm.trace.lines(), repr(r.tm.stats())):
            assert SECRET not in line
            assert "unseen" not in line


def test_no_handler_is_installed():
    with rig():
        names = [name for name in logging.root.manager.loggerDict if name.startswith("headrace")]
    for name in names:
        assert logging.getLogger(name).handlers == []


def test_a_fault_is_described_without_the_words_of_foreign_exceptions():
    def raises(fault):
        try:
            raise fault
        except type(fault) as caught:
            return caught

    fault = raises(KeyError(SECRET))
    assert describe(fault) == "KeyError"
    assert re.fullmatch(r"  .*test_manager_steps\.py:\d+ in raises", where(fault))
    assert describe(InternalError("our own words")) == "InternalError: our own words"
    assert where(ValueError("never raised")) == ""


def test_the_fault_log_forgets_reasons_rather_than_grow():
    faults = FaultLog(lambda: 0.0)
    logging.getLogger("headrace.x").setLevel(logging.CRITICAL)
    try:
        for number in range(10_000):
            faults.report("headrace.x", str(number))
        assert len(faults._last) <= 256
    finally:
        logging.getLogger("headrace.x").setLevel(logging.NOTSET)


def test_a_scheduler_that_goes_with_requests_live_is_one_error_line(caplog):
    with rig() as r:
        h = r.tm.generate([1])
        r.request()
        r.port.close()
        with pytest.raises(HeadraceError):
            h.result(BOUND)
    lines = server_lines(caplog)
    assert len(lines) == 1
    assert lines[0].levelno == logging.ERROR
    assert "scheduler" in lines[0].getMessage()
    caplog.clear()
    with rig() as r:
        r.port.close()
        until(lambda: r.tm.state.name == "DRAINING", "it is noticed")
    assert server_lines(caplog) == []
