"""Field cases as a client of the manager meets them. The test names bear the case ids; the cases' own page says what hurt."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from headrace.codec import (
    AbortMessage,
    ClientClosedError,
    DetokenizeError,
    HeadraceError,
    InternalError,
    QueueFullError,
    ValidationError,
    encode_batch,
)
from headrace.runtime import cumulative
from manager_helpers import (
    BOUND,
    LENGTH,
    STOP,
    STOP_ID,
    T_ID,
    TOKENIZER,
    V,
    chunk,
    every_config,
    held,
    in_thread,
    rig,
    until,
)  # fmt: skip
from text_helpers import tb
from tokenizers import processors

ONE, TWO, THREE, FOUR = (TOKENIZER.token_to_id("Ġ" + word) for word in ("one", "two", "three", "four"))


def stop(matched):
    return {"type": "stop", "matched": matched}


def abort(status, message="no"):
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


def lp(*values):
    return {"out_lp_val": np.array(values, dtype="<f4"), "out_lp_idx": np.arange(len(values), dtype="<i4")}


def outcome(handle):
    try:
        return handle.result(BOUND).text
    except HeadraceError as error:
        return error


# -- 1. the way in ---------------------------------------------------------------------------------------------------------


@every_config
def test_B01_two_live_requests_with_one_rid_are_both_served_and_one_abort_reaches_both(config):
    with rig(**config) as r:
        a, b = r.tm.generate([97], rid="x"), r.tm.generate([98], rid="x")
        ra, rb = r.request(), r.request()
        assert ra != rb
        r.push(chunk(rb, [66]), chunk(ra, [65]))
        r.push(chunk(ra, [65], STOP), chunk(rb, [66], STOP))
        assert [(h.rid, h.result(BOUND).rid, h.result(BOUND).text) for h in (a, b)] == [
            ("x", "x", "AA"),
            ("x", "x", "BB"),
        ]
        c, d = r.tm.generate([97], rid="x"), r.tm.generate([98], rid="x")
        pair = [r.request(), r.request()]
        assert r.tm.abort("x") == 2
        assert sorted(m.rid for m in r.receive(2)) == sorted(pair)
        assert all(isinstance(outcome(h), ClientClosedError) and outcome(h).rid == "x" for h in (c, d))
        r.no_more()


@every_config
def test_B02_the_shape_of_the_rid_and_of_the_prompt(config):
    with rig(**config) as r:
        for body in (
            {"text": "hi", "rid": ["a", "b"]},
            {"text": ["p", "q", "s"], "rid": ["a", "b"]},
            {"text": ["p", "q"], "rid": ["a", "a"]},
        ):
            with pytest.raises(ValidationError) as caught:
                r.tm.submit(json.dumps(body))
            assert caught.value.http_status == 400
        assert r.live() == 0
        hs = r.tm.submit(json.dumps({"text": ["p", "q"], "rid": "r", "stream": True}))
        assert [h.rid for h in hs] == ["r_0", "r_1"]
        assert set(r.requests(2)) == {"r_0", "r_1"}
        r.tm.abort_all()
        r.receive(2)
        (single,) = r.tm.submit({"text": ["p"], "rid": "r"})
        assert single.rid == "r_0"
        r.request()
        single.close()
        r.one()


@every_config
def test_B03_an_empty_prompt_is_judged_on_its_tokens(config):
    with rig(**config) as r:
        with pytest.raises(ValidationError):
            r.tm.generate([])
        assert outcome(r.tm.generate("")).http_status == 400
        with pytest.raises(ValidationError):
            r.tm.submit({"input_ids": [[5], []]})
        r.no_more()
    adds_bos = tb(specials=["<s>"])
    adds_bos.post_processor = processors.Sequence(
        [processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", adds_bos.token_to_id("<s>"))])]
    )
    with rig(**config, tokenizer=adds_bos) as r:
        h = r.tm.generate("")
        message = r.one()
        assert message.input_ids.tolist() == [256]
        r.chunk(message.rid, [65], STOP)
        assert outcome(h) == "A"
        assert outcome(r.tm.generate("", add_special_tokens=False)).http_status == 400
        r.no_more()


@every_config
def test_B06_a_lone_surrogate_anywhere_is_400_with_a_printable_error_and_a_pair_is_a_character(config):
    with rig(**config) as r:
        for body in (
            r'{"text":"a\ud800b"}',
            r'{"text":"a","rid":"\ud800"}',
            r'{"text":"a","sampling_params":{"stop":"\udfff"}}',
            r'{"text":["a","b\ud800"]}',
            r'{"text":"a\ud800b","stream":true}',
        ):
            with pytest.raises(ValidationError) as caught:
                r.tm.submit(body)
            json.dumps(caught.value.to_dict(), ensure_ascii=False).encode()
        assert r.live() == 0
        (h,) = r.tm.submit(r'{"text":"\ud83d\ude00"}')
        message = r.one()
        assert bytes(message.input_ids.tolist()) == "\U0001f600".encode()
        r.chunk(message.rid, message.input_ids, STOP)
        assert outcome(h) == "\U0001f600"


@every_config
def test_B08_the_context_boundary_in_both_directions(config):
    with rig(**config, context_len=8) as r:
        for prompt, most in ((7, 1), (5, 3)):
            h = r.tm.generate([1] * prompt, {"max_new_tokens": most})
            message = r.one()
            assert (len(message.input_ids), message.sampling.max_new_tokens) == (prompt, most)
            for _ in range(most - 1):
                r.chunk(message.rid, [65])
            r.chunk(message.rid, [65], {"type": "length", "length": most})
            assert outcome(h) == "A" * most
        for prompt, most in ((8, 1), (7, 2), (8, 0)):
            for form in ([1] * prompt, "a" * prompt):
                assert outcome(r.tm.generate(form, {"max_new_tokens": most})).http_status == 400
        r.no_more()


@every_config
def test_B09_auto_truncation_keeps_the_head_and_leaves_room_for_the_answer(config):
    with rig(**config, context_len=8, allow_auto_truncate=True) as r:
        for prompt in (list(range(1, 13)), "abcdefghijkl"):
            r.tm.generate(prompt, {"max_new_tokens": 3}).forget()
            message = r.one()
            assert message.sampling.max_new_tokens == 3
            head = list(range(1, 6)) if isinstance(prompt, list) else list(b"abcde")
            assert message.input_ids.tolist() == head
        r.tm.generate([1, 2], {"max_new_tokens": 100}).forget()
        assert r.one().sampling.max_new_tokens == 6
        assert outcome(r.tm.generate([1, 2], {"max_new_tokens": 100, "min_new_tokens": 7})).http_status == 400
        r.tm.abort_all()
        r.receive(3)


@every_config
def test_B10_a_failure_before_dispatch_leaks_nothing(config):
    with rig(**config, context_len=8, trace=False) as r:
        for _ in range(100):
            for h in r.tm.generate_batch([[1], [1] * 9], {"max_new_tokens": 1}):
                assert outcome(h).http_status == 400
        assert r.live() == 0
        assert r.states() == {}
        h = r.tm.generate([1], {"max_new_tokens": 1})
        r.chunk(r.request(), [65], LENGTH)
        assert outcome(h) == "A"
        r.no_more()


@every_config
def test_B11_a_huge_prompt_is_refused_while_others_are_served(config):
    with rig(**config, context_len=2048) as r:
        with pytest.raises(ValidationError):
            r.tm.generate("." * 5_000_000)
        r.no_more()
    with rig(
        **config, context_len=2048, allow_auto_truncate=True
    ) as r:  # no early bound here: it is tokenised, on its own thread
        huge = r.tm.generate("." * 1_500_000, {"max_new_tokens": 1})
        until(lambda: r.states() == {"TOKENIZING": 1}, "it is tokenised")
        short = r.tm.generate([1])
        rid = r.request()  # before the huge one, which is still tokenised
        assert r.states().get("TOKENIZING") == 1
        alive = in_thread(lambda: r.tm.health(BOUND))
        r.one()
        r.chunk(rid, [65], STOP)
        assert outcome(short) == "A"
        assert alive()
        r.tm.shutdown(0)
        assert outcome(huge).http_status == 499


# -- 3. rings --------------------------------------------------------------------------------------------------------------


@every_config
def test_B22_a_full_ring_is_answered_at_once_and_nothing_is_lost_or_reordered(config):
    with rig(**config, ingress_ring_capacity=2) as r:
        h1, h2 = r.tm.generate([1], rid="r1"), r.tm.generate([1], rid="r2")
        until(lambda: r.tm.stats().ingress_ring.fill == 2, "the ring is full")
        refused = outcome(r.tm.generate([1], rid="r3"))
        assert isinstance(refused, QueueFullError)
        assert refused.http_status == 503
        assert r.live() == 2
        first = r.requests(1)
        h4 = r.tm.generate([1], rid="r4")
        until(lambda: r.tm.stats().ingress_ring.fill == 2, "the ring is full again")
        h1.close()  # its abort finds the ring full and is not lost
        until(lambda: r.live() == 2, "r1 has ended")
        rest = r.receive(2)
        assert [m.rid.split("#")[0] for m in rest] == ["r2", "r4"]
        message = r.one()
        assert isinstance(message, AbortMessage)
        assert message.rid == first["r1"]
        for m in rest:
            r.chunk(m.rid, [65], STOP)
        assert [outcome(h2), outcome(h4)] == ["A", "A"]
        r.no_more()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [503, 429, 400])
@every_config
def test_B23_a_refusal_by_the_scheduler_has_its_own_status(config, status, stream):
    with rig(**config) as r:
        h = r.tm.generate([1], stream=stream, rid="mine")
        r.chunk(r.request(), [], abort(status, "busy"))
        error = outcome(h)
        assert (error.http_status, error.message, error.rid) == (status, "busy", "mine")
        with pytest.raises(HeadraceError):
            list(h)
        r.no_more()


@every_config
def test_B23_after_a_chunk_it_is_one_error_in_the_stream_and_without_a_status_an_ordinary_end(config):
    with rig(**config) as r:
        h = r.tm.generate([1])
        rid = r.request()
        it = iter(h)
        r.chunk(rid, [65])
        assert next(it).text == "A"
        r.chunk(rid, [], abort(503))
        with pytest.raises(HeadraceError) as caught:
            next(it)
        assert caught.value.http_status == 503
        assert list(it) == []
        h = r.tm.generate([1])
        r.chunk(r.request(), [65], abort(None))
        whole = h.result(BOUND)
        assert (whole.text, whole.finish_reason.to_map()["type"]) == ("A", "abort")
        r.no_more()


@every_config
def test_B25_several_chunks_before_the_reader_wakes_are_merged_and_none_is_dropped(config):
    with rig(**config) as r:
        h = r.tm.generate([1], return_logprob=True)
        rid = r.request()
        for token, value, finish in ((65, -0.5, None), (66, -0.6, None), (67, -0.7, STOP)):
            r.chunk(rid, [token], finish, extras=lp(value))
        r.gone()
        chunks = list(h)
        assert np.concatenate([c.token_ids for c in chunks]).tolist() == [65, 66, 67]
        values = np.concatenate([c.extras["out_lp_val"] for c in chunks])
        assert values.tobytes() == np.array([-0.5, -0.6, -0.7], dtype="<f4").tobytes()
        assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert h.result(BOUND).extras["out_lp_val"].tobytes() == values.tobytes()


# -- 5 and 6. ends and text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@every_config
def test_B32_an_empty_terminal_chunk_is_delivered_once(config, stream):
    with rig(**config) as r:
        h = r.tm.generate([1], stream=stream)
        rid = r.request()
        r.chunk(rid, [65])
        r.chunk(rid, [])
        r.chunk(rid, [], abort(None))
        chunks = list(h)
        assert "".join(c.text for c in chunks) == "A"
        assert sum(c.finish_reason is not None for c in chunks) == 1
        h = r.tm.generate([1], {"max_new_tokens": 0}, stream=stream)
        r.chunk(r.request(), [], {"type": "length", "length": 0})
        (only,) = list(h)
        assert (only.text, only.token_ids.tolist(), only.finish_reason.to_map()["type"]) == ("", [], "length")
        assert h.result(BOUND).completion_tokens == 0


@pytest.mark.parametrize("bad", [-1, V, 2**31 - 1])
@pytest.mark.parametrize("stream", [True, False])
@every_config
def test_B38_an_id_that_is_no_token_ends_its_own_request_with_one_abort(config, stream, bad):
    with rig(**config) as r:
        a, b = r.tm.generate([1], stream=stream, rid="a"), r.tm.generate([1], stream=stream, rid="b")
        ra, rb = r.request(), r.request()
        r.push(chunk(ra, [65, bad]), chunk(rb, [66]))
        assert r.one().rid == ra  # at once, whether its text is asked for now or at the end
        r.push(chunk(ra, [65], STOP), chunk(rb, [67], STOP))
        error = outcome(a)
        assert isinstance(error, DetokenizeError)
        assert (error.http_status, error.rid) == (500, "a")
        assert str(bad) in error.message
        assert outcome(b) == "BC"
        r.no_more()


@pytest.mark.parametrize("stream", [True, False])
@every_config
def test_B38_also_among_many_and_after_the_first_chunk(config, stream):
    with rig(**config) as r:
        handles = {f"r{i}": r.tm.generate([1], stream=stream, rid=f"r{i}") for i in range(40)}
        rids = r.requests(40)
        for token in (65, 66):
            r.push(*[chunk(rid, [token]) for rid in rids.values()])
        r.push(*[chunk(rid, [-1 if name == "r7" else 67]) for name, rid in rids.items()])
        assert r.one().rid == rids["r7"]
        r.push(*[chunk(rid, [68], STOP) for rid in rids.values()])
        assert {name for name, handle in handles.items() if outcome(handle) != "ABCD"} == {"r7"}
        assert isinstance(outcome(handles["r7"]), DetokenizeError)
        r.no_more()


@pytest.mark.parametrize("order", [1, -1])
@every_config
def test_B39_decode_options_are_each_requests_own(config, order):
    with rig(**config) as r:
        a = r.tm.generate([1], {"skip_special_tokens": True})
        b = r.tm.generate([1], {"skip_special_tokens": False})
        rids = [r.request(), r.request()]
        r.push(*[chunk(rid, [T_ID]) for rid in rids][::order])
        r.push(*[chunk(rid, [T_ID], STOP) for rid in rids][::order])
        assert [outcome(a), outcome(b)] == ["", "<T><T>"]
        assert a.result(BOUND).token_ids.tolist() == [T_ID, T_ID]
        assert a.result(BOUND).completion_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
@every_config
def test_B40_a_stop_string_spread_over_chunks_is_never_sent(config, stream):
    with rig(**config) as r:
        h = r.tm.generate([1], {"stop": [" two three four"]}, stream=stream)
        rid = r.request()
        for token in (ONE, TWO, THREE):
            r.chunk(rid, [token])
        r.chunk(rid, [FOUR], stop(" two three four"))
        assert "".join(c.text for c in h) == " one"
        h = r.tm.generate([1], {"stop": ["<|end|>"]}, stream=stream)
        rid = r.request()
        for piece, finish in (("x<", None), ("|e", None), ("nd|>", stop("<|end|>"))):
            r.chunk(rid, list(piece.encode()), finish)
        assert "".join(c.text for c in h) == "x"
        assert h.result(BOUND).completion_tokens == 8


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@every_config
def test_B45_ids_logprobs_and_usage_stay_as_sent_and_only_the_text_is_cut(config, keep, stream):
    with rig(**config) as r:
        params = {"stop": ["STOP"], "no_stop_trim": keep}
        h = r.tm.generate([1], params, stream=stream, return_logprob=True)
        r.chunk(r.request(), [97, STOP_ID, 98], stop("STOP"), extras=lp(-1, -2, -3))
        whole = h.result(BOUND)
        assert whole.text == ("aSTOP" if keep else "a")
        assert (whole.token_ids.tolist(), whole.completion_tokens) == ([97, STOP_ID, 98], 3)
        assert len(whole.extras["out_lp_val"]) == 3
        h = r.tm.generate([1], {"stop_token_ids": [2], "no_stop_trim": keep}, stream=stream, return_logprob=True)
        r.chunk(r.request(), [97, 98, 2], stop(2), extras=lp(-1, -2, -3))
        whole = h.result(BOUND)
        assert whole.text == "ab"
        assert (len(whole.token_ids), len(whole.extras["out_lp_val"])) == (3, 3)


# -- 8. the shape of a stream ----------------------------------------------------------------------------------------------


@every_config
def test_B47_deltas_are_disjoint_in_everything_and_the_cumulative_view_is_their_fold(config):
    def stream(r):
        h = r.tm.generate([1], return_logprob=True)
        rid = r.request()
        it, out = iter(h), []
        for token, finish in ((65, None), (66, None), (67, STOP)):
            r.chunk(rid, [token], finish, extras=lp(-token))
            out.append(next(it))
        assert list(it) == []
        return out

    with rig(**config) as r:
        deltas = stream(r)
    with rig(**config, incremental_streaming_output=False) as r:
        totals = stream(r)
    assert [c.text for c in deltas] == ["A", "B", "C"]
    for view in (totals, list(cumulative(deltas))):
        assert [c.text for c in view] == ["A", "AB", "ABC"]
        assert [c.token_ids.tolist() for c in view] == [[65], [65, 66], [65, 66, 67]]
        assert [c.extras["out_lp_val"].tolist() for c in view] == [[-65], [-65, -66], [-65, -66, -67]]
        assert [c.completion_tokens for c in view] == [1, 2, 3]


@pytest.mark.parametrize("stream", [True, False])
@every_config
def test_B48_logprobs_pass_bit_by_bit_whatever_they_are(config, stream):
    values = np.array([0xFF800000, 0x7FC00001, 0x7F800000, 0x80000000], dtype="<u4").view("<f4")
    with rig(**config) as r:
        h = r.tm.generate([1], return_logprob=True, stream=stream)
        rid = r.request()
        extras = lp(*values)
        extras["out_lp_val"] = values
        first = {"in_lp_val": values[1:2], "in_lp_idx": np.array([7], dtype="<i4")}
        r.chunk(rid, [65, 66, 67, 68], extras={**extras, **first})
        r.chunk(rid, [], STOP)
        whole = h.result(BOUND)
        assert whole.extras["out_lp_val"].tobytes() == values.tobytes()
        assert whole.extras["in_lp_val"].tobytes() == values[1:2].tobytes()
        assert whole.extras["in_lp_idx"].tolist() == [7]


# -- 9. aborts -------------------------------------------------------------------------------------------------------------


@every_config
def test_B49_a_client_that_leaves_after_dispatch_is_one_abort_and_late_chunks_are_dropped(config):
    with rig(**config) as r:
        h = r.tm.generate([1])
        rid = r.request()
        r.chunk(rid, [65])
        r.idle()
        h.close()
        assert r.one().rid == rid
        r.gone()
        for finish in (None, None, STOP):
            r.chunk(rid, [66], finish)
        h.close()
        h.abort()
        r.no_more()
        assert r.tm.stats().counters["late_chunks"] == 3


@every_config
def test_B50_an_abort_while_it_is_tokenised_ends_it_here(config):
    with rig(**{**config, "tokenizer_workers": 1}) as r:
        with held(r, "headrace-tok-0"):
            h = r.tm.generate("text", rid="mine")
            until(lambda: r.states() == {"TOKENIZING": 1}, "it is tokenised")
            assert r.tm.abort("mine") == 1
            assert isinstance(outcome(h), ClientClosedError)
            assert r.tm.abort("mine") == 0
        r.no_more()
        assert r.seen == []
        assert r.tm.stats().counters["late_tokenised"] == 1


@every_config
def test_B52_an_echo_of_an_abort_behind_the_end_is_nothing_and_the_first_terminal_wins(config):
    with rig(**config) as r:
        h = r.tm.generate([1])
        rid = r.request()
        r.push(chunk(rid, [65], STOP), chunk(rid, [], abort(500)))
        r.chunk(rid, [], abort(None))
        r.port.push_error(rid, "late")
        r.port.push_control_result(rid, b"late")
        assert outcome(h) == "A"
        h = r.tm.generate([1])
        rid = r.request()
        h.abort()
        assert r.one().rid == rid
        r.chunk(rid, [65], STOP)
        assert isinstance(outcome(h), ClientClosedError)
        r.no_more()


@every_config
def test_B53_a_rid_that_is_used_again_gets_its_own_tokens(config):
    with rig(**config) as r:
        first = r.tm.generate([1], rid="x")
        old = r.request()
        first.close()
        second = r.tm.generate([1], rid="x")
        got = r.receive(2)
        new = next(m.rid for m in got if not isinstance(m, AbortMessage))
        assert r.aborts() == [old]
        r.push(chunk(old, [88]), chunk(new, [65]), chunk(old, [88], STOP))
        r.chunk(new, [66], STOP)
        assert outcome(second) == "AB"
        r.no_more()


@every_config
def test_B54_a_slow_client_gets_an_error_and_the_scheduler_one_abort(config):
    with rig(**config, sink_capacity=1) as r:
        h = r.tm.generate([1])
        rid = r.request()
        r.chunk(rid, [65])
        r.chunk(rid, [66])
        assert r.one().rid == rid
        r.chunk(rid, [67], STOP)
        it = iter(h)
        assert next(it).text == "A"
        with pytest.raises(HeadraceError) as caught:
            next(it)
        assert (caught.value.code, caught.value.http_status) == ("slow_client", 500)
        r.no_more()
        unread = r.tm.generate([1], stream=False)  # only ids are kept, so it cannot overflow
        rid = r.request()
        for token in (65, 66, 67):
            r.chunk(rid, [token], STOP if token == 67 else None)
        assert outcome(unread) == "ABC"
        r.no_more()


@every_config
def test_B54_a_final_chunk_that_does_not_fit_is_no_success_and_needs_no_abort(config):
    with rig(**config, sink_capacity=1) as r:
        h = r.tm.generate([1])
        rid = r.request()
        r.chunk(rid, [65])
        r.chunk(rid, [66], STOP)
        assert outcome(h).code == "slow_client"
        h = r.tm.generate([1])  # an empty end has its reserved slot
        rid = r.request()
        r.chunk(rid, [65])
        r.chunk(rid, [], STOP)
        assert outcome(h) == "A"
        r.no_more()


@every_config
def test_B54_a_decoder_that_raises_ends_its_own_request(config, monkeypatch):
    with rig(**config) as r:
        engine = r.tm._engine
        finish = engine.finish

        def raising(state, ids, reason):
            if list(ids) == [66]:
                raise RuntimeError("a decoder's fault")
            return finish(state, ids, reason)

        monkeypatch.setattr(engine, "finish", raising)
        a, b = r.tm.generate([1], rid="a"), r.tm.generate([1], rid="b")
        ra, rb = r.request(), r.request()
        r.push(chunk(ra, [66], STOP), chunk(rb, [67], STOP))
        assert outcome(a).http_status == 500
        assert outcome(b) == "C"
        r.no_more()


@every_config
def test_B54_queued_and_closed_before_any_chunk_is_one_abort(config):
    with rig(**config) as r:
        h = r.tm.generate([1])
        until(lambda: r.states() == {"QUEUED": 1}, "it is queued")
        h.close()
        messages = r.receive(2)
        assert isinstance(messages[1], AbortMessage)
        assert messages[0].rid == messages[1].rid  # behind its request, never before it
        r.gone()
        r.no_more()


# -- malformed frames ------------------------------------------------------------------------------------------------------


@every_config
def test_a_malformed_frame_fails_those_it_names_with_one_abort_each_and_nobody_else(config):
    with rig(**config) as r:
        a, b, c = (r.tm.generate([1], rid=name) for name in "abc")
        ra, rb, rc = r.request(), r.request(), r.request()
        frame = encode_batch([chunk(ra, [65]), chunk(rb, [66])], r.port.schema)
        assert r.port.push_frame(frame[:-1])
        assert sorted(m.rid for m in r.receive(2)) == sorted([ra, rb])
        for h, name in ((a, "a"), (b, "b")):
            error = outcome(h)
            assert isinstance(error, InternalError)
            assert error.rid == name
            assert not any(rid in error.message for rid in (ra, rb, rc))
        r.chunk(rc, [67], STOP)
        assert outcome(c) == "C"
        r.no_more()


@every_config
def test_a_frame_whose_rids_cannot_be_read_fails_every_live_entry_once(config):
    with rig(**config) as r:
        hs = [r.tm.generate([1], stream=bool(i % 2)) for i in range(4)]
        rids = [r.request() for _ in hs]
        assert r.port.push_frame(b"\x02\xff\xff\xff\xffgarbage")
        assert r.port.push_frame(b"\x02\xff\xff\xff\xffgarbage")
        assert all(isinstance(outcome(h), InternalError) for h in hs)
        assert sorted(m.rid for m in r.receive(4)) == sorted(rids)
        r.idle()  # both are worked off: what comes now is not concerned
        later = r.tm.generate([1])
        rid = r.request()
        for nothing in (b"", b"\x09", b"\x01", b"\x03\x90"):
            r.port.push_frame(nothing)
        r.chunk(rid, [65], STOP)
        assert outcome(later) == "A"
        r.no_more()


@every_config
def test_an_error_frame_is_400_for_its_client_and_one_abort(config):
    with rig(**config) as r:
        h = r.tm.generate([1], rid="mine")
        rid = r.request()
        r.port.push_error(rid, "cannot be read")
        error = outcome(h)
        assert (error.http_status, error.rid, error.message) == (400, "mine", "cannot be read")
        assert r.one().rid == rid
        r.no_more()


@every_config
def test_output_beyond_the_context_length_is_500_and_one_abort(config):
    with rig(**config, context_len=8) as r:
        for stream in (True, False):
            h = r.tm.generate([1], {"max_new_tokens": 1}, stream=stream)
            rid = r.request()
            r.chunk(rid, [65] * 8)
            r.chunk(rid, [65])
            assert r.one().rid == rid
            assert outcome(h).http_status == 500
        r.no_more()


@every_config
def test_B11_a_huge_prompt_that_may_be_truncated_holds_up_nobody_else(config):
    """With `allow_auto_truncate` no bound on text applies, so it is tokenised; on a worker of its own kind."""
    entered, go_on = threading.Event(), threading.Event()
    with rig(allow_auto_truncate=True, **{"tokenizer_workers": 2, **config}) as r:
        backend = r.tm._pipeline.workers[0]._backend
        encode = backend.encode_batch

        def slow(texts, special):
            if max(map(len, texts)) > 100_000:
                entered.set()
                assert go_on.wait(BOUND)
            return encode(texts, special)

        for worker in r.tm._pipeline.workers:
            worker._backend = SimpleNamespace(encode_batch=slow, name="slow")
        huge = r.tm.generate("." * 200_000, {"max_new_tokens": 1})
        assert entered.wait(BOUND)
        for _ in range(5):
            short = r.tm.generate("ab", {"max_new_tokens": 1})
            r.chunk(r.request(), [65], STOP)
            assert short.result(BOUND).text == "A"
        go_on.set()
        message = r.one()
        assert len(message.input_ids) == 255  # the head, with room for one token
        r.chunk(message.rid, [66], STOP)
        assert huge.result(BOUND).text == "B"


@every_config
def test_refusals_are_counted_by_the_limit_that_was_reached(config):
    with rig(max_live_requests=2, ingress_ring_capacity=1, sink_capacity=1, **config) as r:
        first = r.tm.generate([1])
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "the ring is full")
        second = r.tm.generate([1])
        assert isinstance(outcome(second), QueueFullError)
        r.idle()
        second = r.tm.generate([1])
        assert isinstance(outcome(second), QueueFullError)
        rid = r.request()
        r.idle()
        third = r.tm.generate([1])
        until(lambda: r.tm.stats().ingress_ring.fill == 1, "it is in the ring, before an abort wants the place")
        for _ in range(3):
            with pytest.raises(QueueFullError):
                r.tm.generate([1])
        r.chunk(rid, [65])
        r.chunk(rid, [66])
        until(lambda: r.tm.stats().limits_reached.get("sink_capacity"), "the sink has overflowed")
        assert r.tm.stats().limits_reached == {"max_live_requests": 3, "ingress_ring_capacity": 2, "sink_capacity": 1}
        assert outcome(first).code == "slow_client"
        third.close()
        until(lambda: r.drain() or not r.live(), "nothing is left for the ring")
        r.gone()
        r.drain()
