"""Steps that wait together are served as one run: every request gets exactly what it gets when they come one by one."""

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
from headrace.codec import ChunkEvent, FinishReason, HeadraceError, decode_ingress, encode_batch
from headrace.codec import batch as batch_module
from headrace.runtime.stages import frames as frames_module
from headrace.runtime.text.engine import TextEngine, TextOptions
from hypothesis import event, given
from hypothesis import strategies as st
from manager_helpers import LENGTH, STOP_ID, T_ID, TOKENIZER, V, make
from text_helpers import tf
from tokenizers import Tokenizer, models

ENGINE = TextEngine(TOKENIZER)
SPLIT = [0xF0, 0x9F, 0x98, 0x80]  # the bytes of one emoji
BYTE_FALLBACK = tf(["▁one", "▁two", "three"], specials=["</s>"])
NO_DECODER = Tokenizer(models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0"))
KINDS = ("handle", "handle with stops", "specials shown", "not streaming", "step", "step with stops")
TOKENS = [65, 66, 10, STOP_ID, T_ID, STOP_ID + 1, STOP_ID + 4, *SPLIT, 0xC3, 0xA9, 0xFF]


class Work(NamedTuple):
    """Requests by kind; steps as rows of (request, ids, whether it ends here); how many are pushed at once; extras of which steps."""

    kinds: list[str]
    steps: list[list[tuple[int, list[int], bool]]]
    bursts: list[int]
    reads: list[bool]
    extras: list[bool]
    options: dict[str, Any]


@st.composite
def works(draw: st.DrawFn) -> Work:
    count = draw(st.sampled_from([1, 2, 3, 17, 20]))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))
    if draw(st.booleans()):
        kinds = [kinds[0]] * count
    alive = list(range(count))
    late = [alive.pop() for _ in range(draw(st.integers(0, count - 1)))] if draw(st.booleans()) else []
    steps: list[list[tuple[int, list[int], bool]]] = []
    token = st.sampled_from(TOKENS) if draw(st.booleans()) else st.sampled_from([65, 66, STOP_ID])
    odd = draw(st.sampled_from([0, 0, 1, 3]))
    for _ in range(draw(st.integers(2, 14))):
        step = []
        while late and draw(st.integers(0, 2)) == 0:  # a batch that grows, mostly at its end
            alive.insert(draw(st.sampled_from([len(alive), len(alive), 0])), late.pop())
        width = draw(st.sampled_from([1, 1, 1, 3])) if odd else 1
        for request in list(alive):
            ends = bool(odd) and draw(st.integers(0, 60)) == 0
            size = draw(st.sampled_from([width, width, width, 0, 2])) if odd else width
            ids = draw(st.lists(token, min_size=size, max_size=size))
            if odd == 3 and draw(st.integers(0, 80)) == 0:
                ids = [draw(st.sampled_from([V, -1, 2**31 - 1]))]
            step.append((request, ids, ends))
            if ends:
                alive.remove(request)
        steps.append(step)
        if not alive and not late:
            break
    if alive or late:
        steps.append([(request, [65], True) for request in [*alive, *late]])
    bursts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    return Work(
        kinds,
        [step for step in steps if step],
        bursts,
        draw(st.lists(st.booleans(), min_size=1, max_size=5)),
        draw(st.sampled_from([[False], [False], [True], [False, False, True]])),
        {
            "wire": draw(st.sampled_from(["v1", "v2"])),
            "sink_capacity": draw(st.sampled_from([2, 5, 4096])),
            "context_len": draw(st.sampled_from([6, 64])),
            "detokenizer_shards": draw(st.sampled_from([1, 1, 2])),
            "trace": draw(st.booleans()),
        },
    )


def served(work: Work, bursts: list[int], **more: Any) -> tuple[list[Any], set[str]]:
    """What each request was given in all, (text, ids, extras, end), and which ways were taken."""
    tm = make(**work.options, **more)
    pipeline, ways = tm._pipeline, set()
    pipeline.live.open_admission()
    texts: list[Any] = [["", [], [], None] for _ in work.kinds]

    def on_step(batch: Any) -> None:
        for at, handle in enumerate(batch.handles):
            mine = texts[handles.index(handle)]
            mine[0] += batch.texts[at]
            mine[1] += batch.token_ids[batch.offsets[at] : batch.offsets[at + 1]].tolist()
            mine[2] += batch.extras[at].get("out_lp_val", np.empty(0)).tolist()
            mine[3] = batch.finish_reasons[at] or (batch.errors[at] and batch.errors[at].code) or mine[3]
        assert batch.ended == [
            at
            for at in range(len(batch.handles))
            if batch.finish_reasons[at] is not None or batch.errors[at] is not None
        ]

    tm.on_step(on_step)
    handles = []
    for kind in work.kinds:
        params = {"max_new_tokens": None, "skip_special_tokens": kind != "specials shown"}
        if kind.endswith("stops"):
            params["stop"] = ["STOP!", "AB\n"]
        sink = "step" if kind.startswith("step") else "handle"
        handles.append(tm.generate([1], params, stream=kind != "not streaming", return_logprob=True, sink=sink))
    while pipeline.move_ingress():
        pass
    rids = [message.rid for message in decode_ingress(tm.scheduler.recv_requests(), tm.scheduler.schema)]

    def read() -> None:
        for mine, handle in zip(texts, handles, strict=True):
            if handle._sink is None:
                continue
            taken = handle._sink.take()
            mine[0] += taken.text
            mine[1] += taken.token_ids.tolist()
            for part in taken.extras:
                mine[2] += part["out_lp_val"].tolist()
            if taken.terminal is not None:
                end = taken.terminal
                mine[3] = end.error.code if hasattr(end, "error") else end.finish_reason
                if hasattr(end, "error") and isinstance(end.error, HeadraceError):
                    assert end.error.http_status >= 400

    for shard in pipeline.shards:
        run = shard._run
        shard._run = lambda plan, ids, out, run=run: _noted(run(plan, ids, out), ways)
    at = turn = 0
    while at < len(work.steps):
        # a reader reads at the same places of the stream, however the steps were pushed
        for number in range(at, min(at + bursts[turn % len(bursts)], len(work.steps))):
            chunks = [
                ChunkEvent(
                    rid=rids[request],
                    token_ids=ids,
                    finish_reason=LENGTH if ends else None,
                    prompt_tokens=1,
                    extras={"out_lp_val": [number + 0.5] * len(ids), "out_lp_idx": ids}
                    if work.extras[number % len(work.extras)] and all(0 <= value < V for value in ids)
                    else None,
                )
                for request, ids, ends in work.steps[number]
            ]
            assert tm.scheduler.push_frame(encode_batch(chunks, tm.scheduler.schema))
            at = number + 1
        turn += 1
        while pipeline.move_egress():
            pass
        if work.reads[at % len(work.reads)]:
            read()
    while pipeline.move_ingress() or pipeline.move_egress():
        pass
    read()
    if work.options["trace"]:
        from headrace.fsm import validate

        assert validate(tm.trace) == []
    return texts, ways


def _noted(steps: int, ways: set[str]) -> int:
    ways.add("several at once" if steps > 1 else "one")
    return steps


@given(work=works())
def test_a_run_gives_every_request_what_its_steps_give_one_by_one(work: Work) -> None:
    work = work._replace(reads=[False])  # nobody reads, so that a full sink is full at the same chunk
    single, _ = served(work, [1])
    together, ways = served(work, work.bursts)
    assert together == single
    for way in ways:
        event(way)


@given(work=works())
def test_whatever_waits_together_every_text_is_that_of_its_ids(work: Work) -> None:
    given_out, _ = served(work, work.bursts)
    for kind, (text, ids, _, end) in zip(work.kinds, given_out, strict=True):
        if isinstance(end, FinishReason) and not kind.endswith("stops"):
            options = TextOptions(skip_special_tokens=kind != "specials shown")
            assert text == ENGINE.whole(options, ids, len(ids), None)


@given(work=works())
def test_readers_that_come_in_between_lose_nothing_of_a_run(work: Work) -> None:
    work = work._replace(options={**work.options, "sink_capacity": 4096})
    single, _ = served(work, [1])
    together, _ = served(work, work.bursts)
    assert together == single


def _plain(count: int, steps: int, **options: Any) -> Work:
    rows = [[(request, [65 + (number + request) % 26], False) for request in range(count)] for number in range(steps)]
    return Work(
        ["handle"] * count,
        [*rows, [(request, [10], True) for request in range(count)]],
        [steps],
        [False],
        [False],
        {"wire": "v1", "sink_capacity": 4096, "context_len": 500, "detokenizer_shards": 1, "trace": False, **options},
    )


@pytest.mark.parametrize("count", [1, 20])
def test_steps_that_wait_together_are_one_run(count: int) -> None:
    texts, ways = served(work := _plain(count, 40), work.bursts)
    assert "several at once" in ways
    assert [len(mine[1]) for mine in texts] == [41] * count


@pytest.mark.parametrize("capacity", [1, 3, 40])
def test_a_sink_that_fills_up_within_a_run_has_every_chunk_that_fitted(capacity: int) -> None:
    texts, _ = served(work := _plain(2, 40, sink_capacity=capacity), work.bursts)
    assert [(len(ids), end) for _, ids, _, end in texts] == [(capacity, "slow_client")] * 2


def test_the_context_length_is_met_within_a_run_at_its_token() -> None:
    texts, ways = served(work := _plain(3, 40, context_len=17), work.bursts)
    assert "several at once" in ways
    assert [(len(ids), end) for _, ids, _, end in texts] == [(17, "internal")] * 3


@pytest.mark.parametrize("count", [2, 20])
def test_large_extras_are_each_rows_own_and_small_ones_are_shared_and_both_are_the_same(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _plain(count, 12)._replace(extras=[True])
    work = work._replace(kinds=[KINDS[number % len(KINDS)] for number in range(count)])
    shared, _ = served(work, [13])
    monkeypatch.setattr(batch_module, "_SHARED_BYTES", 0)
    assert served(work, [13])[0] == shared
    assert all(extras == [number + 0.5 for number in range(13)] for _, _, extras, _ in shared)


def test_chunks_without_ids_count_against_a_sink_whose_request_joins_a_batch() -> None:
    work = _plain(3, 8, sink_capacity=4)
    for number, step in enumerate(work.steps[:4]):
        step[:] = step[:2] if number == 3 else [(2, [], False)]
    texts, _ = served(work, [1])
    assert [(len(ids), end) for _, ids, _, end in texts] == [(4, "slow_client")] * 2 + [(1, "slow_client")]


@pytest.mark.parametrize("width", [0, 2])
def test_a_broken_character_of_an_uneven_step_stands_before_the_next_steps_text_in_the_step_sink(width: int) -> None:
    """What a step that is not alike for all rows leaves in a text is known to the plan that serves the next step."""
    work = _plain(20, 4)
    work = work._replace(kinds=["handle", *["step"] * 19])
    work.steps[1][5] = (5, [0xC3], False)
    work.steps[1][0] = (0, [65] * width, False)
    for bursts in ([1], [5]):
        texts, _ = served(work, bursts)
        assert (texts[5][0], texts[6][0]) == ("F\ufffdHI\n", "GHIJ\n")


@pytest.mark.parametrize("count", [1, 20])
def test_half_a_character_that_several_ids_left_is_seen_at_the_next_step_of_the_step_sink(count: int) -> None:
    work = _plain(count, 6)._replace(kinds=["step"] * count)
    work.steps[2] = [(request, [65, 65, 0xC3], False) for request in range(count)]
    work.steps[3] = [(request, [66], False) for request in range(count)]
    for bursts in ([1], [7], [2]):
        texts, _ = served(work, bursts)
        assert [mine[0][2:6] for mine in texts] == ["AA\ufffdB"] * count


def test_a_fallback_tokenizer_and_none_at_all_are_served_step_by_step_or_by_ids() -> None:
    work = _plain(2, 12)
    for more in (
        {"tokenizer": BYTE_FALLBACK},
        {"tokenizer": NO_DECODER},
        {"tokenizer": None, "skip_tokenizer_init": True, "vocab_size": 300},
    ):
        single, _ = served(work, [1], **more)
        assert served(work, [13], **more)[0] == single
        assert [len(mine[1]) for mine in single] == [13, 13]


@pytest.mark.parametrize(
    "mutant",
    [
        ("_before", lambda classes, kind: len(classes)),  # an id that is no token does not end a run
        ("_any", lambda classes, kind: False),  # a split character is taken for text
    ],
    ids=["unknown id ignored", "part taken for whole"],
)
def test_a_broken_run_is_seen(mutant: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    work = _plain(2, 12)
    for number, token in enumerate(SPLIT):
        work.steps[4 + number][1] = (1, [token], False)
    work.steps[10][0] = (0, [V + 5], False)
    single, _ = served(work, [1])
    assert served(work, [13])[0] == single
    monkeypatch.setattr(frames_module, *mutant)
    with suppress(TypeError, IndexError, KeyError):  # it falls over, which is seen as well
        assert served(work, [13])[0] != single


def test_ids_are_told_apart_whatever_their_sign_and_width() -> None:
    engine = TextEngine(TOKENIZER)
    assert engine.classes(np.array([[65, T_ID, V, -1]], np.int32)).tolist() == [[2, 1, 0, 0]]
    assert engine.classes(np.array([[65, T_ID, V, -1]], np.int64)).tolist() == [[2, 1, 0, 0]]
    assert TextEngine(NO_DECODER).classes(np.array([[65]], np.int32)) is None
