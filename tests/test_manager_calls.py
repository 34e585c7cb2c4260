"""control, decode, health, stats, and the ways in: what raises at once, what ends the handle, and that a refusal leaves no trace."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest
from headrace.codec import (
    ClientClosedError,
    EncodeError,
    HeadraceError,
    InternalError,
    QueueFullError,
    SchedulerGoneError,
    ShuttingDownError,
    ValidationError,
)
from headrace.runtime import EchoScheduler
from manager_helpers import (
    BOUND,
    STOP,
    T_ID,
    ControlMessage,
    V,
    chunk,
    every_config,
    held,
    in_thread,
    make,
    rig,
    threads,
    until,
)

# -- control ---------------------------------------------------------------------------------------------------------------


@every_config
def test_control_returns_the_schedulers_bytes_verbatim(config):
    with rig(**config) as r:
        answer = in_thread(lambda: r.tm.control("FlushCacheReqInput", 0.5, "x", timeout=BOUND))
        message = r.one()
        assert isinstance(message, ControlMessage)
        assert (message.tag, message.fields) == ("FlushCacheReqInput", (0.5, "x"))
        payload = b"\x00\xff not json"
        assert r.port.push_control_result(message.rid, payload)
        assert answer() == payload

        async def main():
            task = asyncio.create_task(r.tm.acontrol("GetInternalStateReq", timeout=BOUND))
            message = await asyncio.to_thread(r.one)
            r.port.push_control_result(message.rid, payload)
            return await task

        assert asyncio.run(main()) == payload
        r.gone()
        r.no_more()


@every_config
def test_a_control_request_that_times_out_drops_its_entry_and_absorbs_a_late_answer(config):
    with rig(**config) as r:
        with pytest.raises(TimeoutError, match="FlushCacheReqInput"):
            r.tm.control("FlushCacheReqInput", timeout=0)

        def sent():
            r.drain()
            return [message for message in r.seen if isinstance(message, ControlMessage)]

        async def main():
            with pytest.raises(TimeoutError):
                await r.tm.acontrol("FlushCacheReqInput", timeout=0)
            task = asyncio.create_task(r.tm.acontrol("GetInternalStateReq"))
            await asyncio.to_thread(
                lambda: until(lambda: any(m.tag == "GetInternalStateReq" for m in sent()), "it is sent")
            )
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        r.gone()
        r.idle()
        for message in sent():
            assert r.port.push_control_result(message.rid, b"late")
        r.idle()
        assert r.states() == {}
        assert in_thread(lambda: r.tm.stats())().live == {}


@pytest.mark.parametrize(
    "tag",
    [
        "TokenizedGenerateReqInput",
        "TokenizedEmbeddingReqInput",
        "BatchTokenizedGenerateReqInput",
        "BatchTokenizedEmbeddingReqInput",
        "AbortReq",
        "",
        7,
    ],
)
def test_control_refuses_the_tags_of_generate_embedding_and_abort_requests(tag):
    with rig() as r:
        with pytest.raises(ValidationError):
            r.tm.control(tag)
        with pytest.raises(EncodeError):
            r.tm.control("FlushCacheReqInput", object())
        assert r.live() == 0
        r.no_more()


@every_config
def test_output_for_a_control_request_and_a_result_for_a_generate_request_are_faults_told_once(config):
    with rig(**config) as r:
        answer = in_thread(lambda: r.tm.control("FlushCacheReqInput", timeout=BOUND))
        control = r.one().rid
        h = r.tm.generate([1], rid="mine")
        rid = r.request()
        r.chunk(control, [65])
        r.port.push_control_result(rid, b"?")
        with pytest.raises(InternalError):
            answer()
        with pytest.raises(InternalError) as caught:
            h.result(BOUND)
        assert caught.value.rid == "mine"
        assert sorted(m.rid for m in r.receive(2)) == sorted([control, rid])
        r.no_more()


# -- decode ----------------------------------------------------------------------------------------------------------------


@every_config
def test_decode_gives_the_text_without_a_word_to_the_scheduler(config):
    with rig(ingress_ring_capacity=1, **config) as r:
        assert r.tm.decode([72, 105, T_ID]) == "Hi"
        assert asyncio.run(r.tm.adecode([72, 105])) == "Hi"
        assert r.tm.decode([]) == ""
        assert r.tm.decode([V + 1, 2**32 - 1]) == ""  # no vocabulary bound
        # a ring that is full, with aborts that want it, is no reason to refuse a decode
        h = r.tm.generate([1])
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "the ring is full")
        h.close()
        until(
            lambda: r.tm._thread("headrace-ingress").call(lambda: len(r.tm._pipeline.ingress.owed), BOUND),
            "an abort waits",
        )
        assert r.tm.decode([72, 105]) == "Hi"
        assert [type(m).__name__ for m in r.receive(2)] == ["GenerateMessage", "AbortMessage"]
        r.no_more()


@pytest.mark.parametrize("bad", [[-1], [2**32], [True], ["a"], [1.0], "ab", None, [0] * 257])
def test_decode_refuses_what_is_no_list_of_token_ids(bad):
    with rig() as r:
        with pytest.raises(ValidationError):
            r.tm.decode(bad)
        assert r.live() == 0


def test_a_decode_that_times_out_leaves_nothing_behind():
    with rig() as r:
        with held(r, "headrace-ingress"), pytest.raises(TimeoutError):
            r.tm.decode([65], timeout=0)
        r.gone()
        r.no_more()


def test_a_decoder_that_raises_is_a_500_for_that_decode_and_no_abort(monkeypatch):
    with rig() as r:
        monkeypatch.setattr(r.tm._engine, "decode", lambda *a, **k: 1 / 0)
        with pytest.raises(HeadraceError) as caught:
            r.tm.decode([65])
        assert (caught.value.http_status, caught.value.code) == (500, "detokenize")
        monkeypatch.undo()
        assert r.tm.decode([65]) == "A"
        r.no_more()


def test_without_a_tokenizer_ids_pass_through_text_is_empty_and_decode_is_400():
    with rig(skip_tokenizer_init=True, vocab_size=100) as r:
        with pytest.raises(ValidationError):
            r.tm.decode([1])
        with pytest.raises(ValidationError):
            r.tm.generate("text")
        h = r.tm.generate([99])
        rid = r.request()
        r.chunk(rid, [7, 2**31 - 1])
        r.chunk(rid, [9], STOP)
        whole = h.result(BOUND)
        assert (whole.text, whole.token_ids.tolist()) == ("", [7, 2**31 - 1, 9])
        assert r.tm.stats().decoder == "none"
    with pytest.raises(ValidationError, match="tokenizer"):
        make(tokenizer=None)
    with pytest.raises(ValidationError, match="vocab_size"):
        make(skip_tokenizer_init=True)


# -- stats -----------------------------------------------------------------------------------------------------------------


@every_config
def test_stats_count_live_requests_by_state_rings_and_activity(config):
    with rig(**config) as r:
        assert r.tm.stats().live == {}
        hs = [r.tm.generate([1]) for _ in range(3)]
        until(lambda: r.states() == {"QUEUED": 3}, "three are queued")
        assert r.tm.stats().ingress_ring.fill == 3
        rids = [r.request() for _ in hs]
        r.chunk(rids[0], [65])
        until(lambda: r.states() == {"QUEUED": 2, "STREAMING": 1}, "one streams")
        stats = r.tm.stats()
        assert (stats.activity, stats.ingress_ring.fill, stats.egress_ring.fill) == (1, 0, 0)
        assert (stats.state, stats.decoder, stats.waiting_bytes) == ("RUNNING", "byte-level", 0)
        r.push(*(chunk(rid, [65], STOP) for rid in rids))
        assert [h.result(BOUND).text for h in hs] == ["AA", "A", "A"]
        assert r.states() == {}
        r.chunk("nobody", [1], STOP)
        r.idle()
        assert r.tm.stats().counters["late_chunks"] == 1
    assert r.tm.stats().state == "STOPPED"  # still answered after the end
    assert r.tm.stats().ingress_ring.fill == 0


# -- health ----------------------------------------------------------------------------------------------------------------


@every_config
def test_B57_a_probe_is_one_greedy_token_and_is_alive_as_soon_as_it_is_answered(config):
    with rig(**config) as r:
        alive = in_thread(lambda: r.tm.health(BOUND))
        probe = r.one()
        assert probe.rid.startswith("HEALTH_CHECK_")
        assert probe.input_ids.tolist() == [0]
        assert (probe.sampling.max_new_tokens, probe.sampling.top_k) == (1, 1)
        r.chunk(probe.rid, [65], {"type": "length", "length": 1})
        assert alive() is True
        r.gone()
        r.idle()
        # A shard on a thread of its own may not have seen the answer yet when the probe is taken back: then an abort follows.
        late = [] if config.get("fused", True) else [probe.rid]
        assert [message.rid for message in r.drain()] in ([], late)


@every_config
def test_B57_output_for_any_request_is_alive_and_the_late_probe_output_is_dropped(config):
    with rig(**config) as r:
        h = r.tm.generate([1])
        rid = r.request()
        alive = in_thread(lambda: r.tm.health(BOUND))
        probe = r.one()
        r.chunk(rid, [65])
        assert alive() is True
        assert r.one().rid == probe.rid  # the probe is taken back
        r.chunk(probe.rid, [66], STOP)
        r.chunk(rid, [67], STOP)
        assert h.result(BOUND).text == "AC"
        r.gone()
        r.no_more()
        assert r.tm.stats().counters["late_chunks"] == 1


@every_config
def test_B57_probes_at_the_same_moment_are_two_requests(config):
    with rig(**config) as r:
        alive = [in_thread(lambda: r.tm.health(BOUND)) for _ in range(2)]
        probes = r.receive(2)
        assert len({probe.rid for probe in probes}) == 2
        r.chunk(probes[0].rid, [65], STOP)
        assert [join() for join in alive] == [True, True]
        r.gone()


@every_config
def test_B57_without_any_sign_of_life_it_is_false_in_time_and_the_probe_is_gone(config):
    with rig(**config) as r:
        assert r.tm.health(0) is False
        assert asyncio.run(r.tm.ahealth(0)) is False
        r.gone()
        r.idle()
        r.drain()
        assert r.states() == {}


@every_config
def test_B57_a_full_ring_with_recent_output_is_alive_and_without_it_is_not(config):
    with rig(ingress_ring_capacity=1, **config) as r:
        first = r.tm.generate([1])
        rid = r.request()
        second = r.tm.generate([1])
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "the ring is full")
        assert r.tm.health(0) is False
        before = r.tm.stats().counters.get("refused_ring_full", 0)
        alive = in_thread(lambda: r.tm.health(BOUND))
        until(lambda: r.tm.stats().counters.get("refused_ring_full", 0) > before, "the probe was refused")
        r.chunk(rid, [65], STOP)
        assert alive() is True
        assert first.result(BOUND).text == "A"
        second.close()
        assert [type(m).__name__ for m in r.receive(2)] == ["GenerateMessage", "AbortMessage"]
        r.gone()
        r.no_more()


@every_config
def test_B57_a_scheduler_that_is_gone_or_goes_is_not_alive_at_once(config):
    with rig(**config) as r:
        alive = in_thread(lambda: r.tm.health(1e9))
        r.one()
        r.port.close()
        assert alive() is False
        assert r.tm.health(1e9) is False
    assert r.tm.health(1e9) is False


# -- refusals --------------------------------------------------------------------------------------------------------------

AT_ONCE = {
    "empty ids": {"prompt": []},
    "negative id": {"prompt": [-1]},
    "id beyond the vocabulary": {"prompt": [V]},
    "id that would wrap": {"prompt": [2**32 + 5]},
    "bool": {"prompt": [True]},
    "float": {"prompt": [1.0]},
    "no prompt": {"prompt": None},
    "nested ids": {"prompt": [[1]]},
    "lone surrogate": {"prompt": "a\ud800b"},
    "surrogate rid": {"prompt": "a", "rid": "\ud800"},
    "long rid": {"prompt": "a", "rid": "x" * 129},
    "rid of a probe": {"prompt": "a", "rid": "HEALTH_CHECK_1"},
    "rid list": {"prompt": "a", "rid": ["a"]},
    "unknown parameter": {"prompt": "a", "params": {"temprature": 1}},
    "nan": {"prompt": "a", "params": {"temperature": float("nan")}},
    "n": {"prompt": "a", "params": {"n": 2}},
    "regex that backtracks": {"prompt": "a", "params": {"stop_regex": "(a+)+b"}},
    "regex that is none": {"prompt": "a", "params": {"stop_regex": "("}},
    "hidden states": {"prompt": "a", "return_hidden_states": True},
    "logprob ids": {"prompt": "a", "token_ids_logprob": [[0]]},
    "unknown wire field": {"prompt": "a", "wire_fields": {"rid": "x"}},
    "text of megabytes": {"prompt": "." * 5_000_000},
    "sink": {"prompt": "a", "sink": "paper"},
}


@pytest.mark.parametrize("fields", AT_ONCE.values(), ids=AT_ONCE)
def test_what_can_be_judged_without_the_tokenizer_raises_from_generate_and_leaves_no_trace(fields):
    with rig() as r:
        fields = dict(fields)
        prompt = fields.pop("prompt")
        with pytest.raises(ValidationError) as caught:
            r.tm.generate(prompt, fields.pop("params", None), **fields)
        assert caught.value.http_status == 400
        str(caught.value).encode()
        assert r.live() == 0
        assert len(r.tm._pipeline.inbox) == 0
        r.no_more()
        assert not [e for e in r.tm.trace if getattr(e, "machine", "") in ("request", "abort", "sink")]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("", {}),
        ([1] * 256, {}),
        ("x" * 255, {"max_new_tokens": 2}),
        ([1] * 255, {"max_new_tokens": 2}),
        ([1], {"max_new_tokens": 256}),
    ],
    ids=["no tokens", "fills the window", "text and output", "ids and output", "output alone"],
)
@every_config
def test_what_needs_the_tokenizer_or_the_length_ends_the_handle(config, prompt, params):
    with rig(**config) as r:
        h = r.tm.generate(prompt, params, rid="mine")
        with pytest.raises(ValidationError) as caught:
            h.result(BOUND)
        assert caught.value.rid == "mine"
        with pytest.raises(ValidationError):
            list(h)
        assert r.live() == 0
        r.no_more()


@every_config
def test_room_in_the_ring_ends_the_handle_and_the_inbox_raises(config):
    with rig(ingress_ring_capacity=1, channel_capacity=2, **config) as r:
        first = r.tm.generate([1])
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "the ring is full")
        with pytest.raises(QueueFullError) as caught:
            r.tm.generate([1], rid="mine").result(BOUND)
        assert (caught.value.http_status, caught.value.rid) == (503, "mine")
        with held(r, "headrace-ingress"):
            waiting = [r.tm.generate([1]), r.tm.generate([1])]
            with pytest.raises(QueueFullError):
                r.tm.generate([1])
            waiting[0].abort()  # a place that is given back
            waiting.append(r.tm.generate([1]))
        for h in waiting:
            with pytest.raises(HeadraceError):
                h.result(BOUND)
        r.chunk(r.request(), [65], STOP)
        assert first.result(BOUND).text == "A"
        r.no_more()


def test_a_full_tokenizer_queue_ends_the_handle_with_503_and_ids_pass_by():
    with rig(channel_capacity=1) as r:
        with held(r, "headrace-tok-0"):
            waits = r.tm.generate("a")
            until(lambda: r.states() == {"TOKENIZING": 1}, "it waits for the tokenizer")
            with pytest.raises(QueueFullError, match="tokenizer"):
                r.tm.generate("b").result(BOUND)
            by = r.tm.generate([65])
            r.chunk(r.request(), [65], STOP)
            assert by.result(BOUND).text == "A"
        r.chunk(r.request(), [97], STOP)
        assert waits.result(BOUND).text == "a"
        r.no_more()


def test_an_item_withdrawn_on_its_way_to_a_full_inbox_leaves_the_inbox_its_places():
    """An abort between the booking and the inbox counted a place out that was never counted in."""
    with rig(channel_capacity=1, ingress_ring_capacity=8) as r:
        inbox = r.tm._pipeline.inbox
        with held(r, "headrace-ingress"):
            first = r.tm.generate([1])
            put = type(inbox).put

            def late(group):
                assert r.tm.abort("y_0") == 1
                return put(inbox, group)

            r.tm._pipeline.inbox = type("Late", (), {"put": staticmethod(late), "withdraw": inbox.withdraw})()
            try:
                with pytest.raises(QueueFullError):
                    r.tm.generate_batch([[1], [2]], rid="y")
            finally:
                r.tm._pipeline.inbox = inbox
            assert inbox._count == 1
            first.close()
        with pytest.raises(ClientClosedError):
            first.result(BOUND)
        r.idle()
        assert inbox._count == 0
        r.no_more()


def test_the_live_table_and_the_admitted_bytes_are_bounded():
    with rig(max_live_requests=2) as r:
        hs = [r.tm.generate([1]), r.tm.generate([1])]
        with pytest.raises(QueueFullError, match="live"):
            r.tm.generate([1])
        rids = [r.request(), r.request()]
        r.chunk(rids[0], [65], STOP)
        hs[0].result(BOUND)
        until(lambda: r.live() == 1, "a place is free")
        hs.append(r.tm.generate([1]))
        for rid in (rids[1], r.request()):
            r.chunk(rid, [65], STOP)
        assert [h.result(BOUND).text for h in hs] == ["A", "A", "A"]
    with rig(admitted_bytes=4096) as r:
        kept = []  # a handle that is dropped aborts its request, perhaps before the ring has it
        fill = in_thread(lambda: [kept.append(r.tm.generate([1] * 100, {"max_new_tokens": 1})) for _ in range(100)])
        with pytest.raises(QueueFullError, match="bytes"):
            fill()
        rids = [m.rid for m in until(r.drain, "the ring has some")]
        assert rids


def test_before_start_and_after_shutdown_everything_is_503():
    tm = make()
    for call in (lambda: tm.generate("a"), lambda: tm.control("FlushCacheReqInput"), lambda: tm.decode([1])):
        with pytest.raises(ShuttingDownError):
            call()
    assert tm.health(0) is False
    with tm, pytest.raises(ShuttingDownError, match="once"):
        tm.start()
    for call in (
        lambda: tm.generate("a"),
        lambda: tm.generate_batch(["a", "b"]),
        lambda: tm.submit({"text": "a"}),
        lambda: tm.control("FlushCacheReqInput"),
        lambda: tm.decode([1]),
    ):
        with pytest.raises(ShuttingDownError) as caught:
            call()
        assert caught.value.http_status == 503
    with pytest.raises(ShuttingDownError):
        tm.start()
    assert threads() == []


# -- batches ---------------------------------------------------------------------------------------------------------------


@every_config
def test_a_batch_is_tokenised_and_checked_whole_and_then_pushed_in_order(config):
    with rig(**config) as r:
        hs = r.tm.generate_batch(["a", [2], "c"], {"max_new_tokens": 4}, rid="r")
        assert [h.rid for h in hs] == ["r_0", "r_1", "r_2"]
        messages = r.receive(3)
        assert [m.input_ids.tolist() for m in messages] == [[97], [2], [99]]
        for m in messages:
            r.chunk(m.rid, m.input_ids, STOP)
        assert [h.result(BOUND).text for h in hs] == ["a", "\x02", "c"]
        hs = r.tm.generate_batch([[1], [2]], [{"max_new_tokens": 1}, None], rid=["x", "y"], stream=False)
        assert [(h.rid, m.sampling.max_new_tokens) for h, m in zip(hs, r.receive(2), strict=True)] == [
            ("x", 1),
            ("y", 128),
        ]
        r.tm.abort_all()
        assert len(r.receive(2)) == 2


@every_config
def test_if_one_item_does_not_fit_none_is_sent_and_each_is_told(config):
    with rig(**config) as r:
        for bad in ("", "x" * 300, [1] * 300):
            hs = r.tm.generate_batch(["a", bad, "b"], rid="r")
            errors = []
            for h in hs:
                with pytest.raises(ValidationError) as caught:
                    h.result(BOUND)
                errors.append(caught.value)
            assert [error.rid for error in errors] == ["r_0", "r_1", "r_2"]
            assert "not admitted" in errors[0].message
            assert "not admitted" not in errors[1].message
        assert r.live() == 0
        r.no_more()


@every_config
def test_a_batch_that_does_not_fit_the_ring_is_refused_whole(config):
    with rig(ingress_ring_capacity=3, **config) as r:
        first = r.tm.generate([1])
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "one is in the ring")
        for h in r.tm.generate_batch([[1], "b", [3]]):
            with pytest.raises(QueueFullError):
                h.result(BOUND)
        with pytest.raises(ValidationError):
            r.tm.generate_batch([[1]] * 4)
        with pytest.raises(ValidationError):
            r.tm.generate_batch([])
        rid = r.request()
        r.no_more()
        hs = r.tm.generate_batch(["a", "b", "c"])
        rids = [r.request() for _ in hs]
        r.chunk(rid, [65], STOP)
        for one in rids:
            r.chunk(one, [65], STOP)
        assert [h.result(BOUND).text for h in [first, *hs]] == ["A"] * 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": "ab"},
        {"prompts": ["a"], "rid": ["a", "b"]},
        {"prompts": ["a", "b"], "rid": ["a", "a"]},
        {"prompts": ["a", "b"], "rid": 7},
        {"prompts": ["a", "b"], "params": [{}]},
        {"prompts": ["a", []]},
        {"prompts": ["a", "b\ud800"]},
        {"prompts": ["a", "b"], "params": {"n": 0}},
        {"prompts": ["a", "b"], "rid": "x" * 127},
    ],
)
def test_a_malformed_batch_raises_at_once_and_none_is_admitted(arguments):
    with rig() as r:
        prompts = arguments.pop("prompts") if "prompts" in arguments else None
        with pytest.raises(ValidationError):
            r.tm.generate_batch(prompts, **arguments)
        assert r.live() == 0
        r.no_more()


def test_cancelling_one_item_of_a_batch_lets_the_others_go():
    with rig(tokenizer_workers=1) as r:
        with held(r, "headrace-tok-0"):
            hs = r.tm.generate_batch(["a", "b", [3]], rid="r")
            until(lambda: r.states() == {"TOKENIZING": 2, "PRE_SEND_VALIDATING": 1}, "the batch waits for its text")
            hs[1].abort()
            with pytest.raises(ClientClosedError):
                hs[1].result(BOUND)
        assert list(r.requests(2)) == ["r_0", "r_2"]
        r.idle()
        assert r.tm.stats().counters["late_tokenised"] == 1
        r.tm.abort_all()
        assert len(r.receive(2)) == 2


@every_config
def test_wire_fields_reach_the_header_and_are_checked_against_the_schema(config):
    with rig(**config) as r:
        free = {field.name for field in r.port.schema.ingress_fields if not field.owned}
        value = {"wire_fields": {"lora_id": "adapter"}} if "lora_id" in free else {}
        r.tm.generate([1], **value).forget()
        assert r.one().fields == value.get("wire_fields", {})
        if free:
            with pytest.raises(ValidationError, match="lora_id"):
                r.tm.generate([1], wire_fields={"lora_id": 7})
        with pytest.raises(ValidationError, match="image"):
            r.tm.submit({"text": "a", "image_data": "x"})
        r.tm.abort_all()
        r.one()


def test_the_port_has_one_consumer_at_a_time():
    with rig() as r:
        parked = in_thread(lambda: r.port.wait_request(BOUND))
        until(lambda: r.port._consuming.locked(), "a consumer is parked")
        for call in (r.port.recv_requests, lambda: r.port.wait_request(0)):
            with pytest.raises(RuntimeError, match="one consumer"):
                call()
        r.tm.generate([1]).forget()
        assert parked() is True
        assert len(r.port.recv_requests(0)) == 0
        r.one()
        r.tm.abort_all()
        r.one()


@every_config
def test_an_embedded_scheduler_serves_the_same_manager(config):
    with rig(**config) as r, EchoScheduler(r.port):
        hs = r.tm.generate_batch(["hello", "world"], {"max_new_tokens": 5})
        assert [h.result(BOUND).text for h in hs] == ["hello", "world"]
        assert r.tm.health(BOUND) is True
        assert b"running" in r.tm.control("GetInternalStateReq")
    with pytest.raises((ShuttingDownError, SchedulerGoneError)):
        r.tm.generate("a")


def test_numpy_prompts_are_copied():
    with rig() as r:
        prompt = np.array([65, 66], dtype=np.int32)
        h = r.tm.generate(prompt)
        prompt[:] = 0
        assert r.one().input_ids.tolist() == [65, 66]
        h.close()
        r.one()


# -- fork ------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_in_a_forked_child_raises_a_clear_error_and_never_hangs():
    with rig() as r:
        h = r.tm.generate([1])
        rid = r.request()
        # locks of the parent that happen to be held at the fork are held for ever in the child
        with r.tm._lock, r.tm._pipeline.live._lock, h._lock, h._sink._hub.lock:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    calls = {
                        "generate": lambda: r.tm.generate([1]),
                        "batch": lambda: r.tm.generate_batch([[1]]),
                        "submit": lambda: r.tm.submit({"text": "a"}),
                        "control": lambda: r.tm.control("FlushCacheReqInput"),
                        "decode": lambda: r.tm.decode([1]),
                        "health": lambda: r.tm.health(0),
                        "abort": lambda: r.tm.abort("x"),
                        "abort_all": lambda: r.tm.abort_all(),
                        "stats": lambda: r.tm.stats(),
                        "shutdown": lambda: r.tm.shutdown(),
                        "start": lambda: r.tm.start(),
                        "iter": lambda: iter(h),
                        "result": lambda: h.result(),
                        "h.abort": lambda: h.abort(),
                        "wait_request": lambda: r.port.wait_request(),
                        "recv_requests": lambda: r.port.recv_requests(),
                    }
                    wrong = []
                    for name, call in calls.items():
                        try:
                            call()
                        except InternalError as error:
                            if "process" not in error.message:
                                wrong.append(name)
                        else:
                            wrong.append(name)
                    h.close()
                    status = 0 if not wrong else 2
                    os.write(2, repr(wrong).encode() if wrong else b"")
                finally:
                    os._exit(status)
        ended = []
        until(lambda: ended.append(os.waitpid(pid, os.WNOHANG)) or ended[-1][0], "the child has ended")
        assert os.waitstatus_to_exitcode(ended[-1][1]) == 0
        r.chunk(rid, [65], STOP)
        assert h.result(BOUND).text == "A"
        r.no_more()
