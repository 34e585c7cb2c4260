"""A move that serves several requests serves each as if it had come alone, after those before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace.codec import GenerateRequest, Rid, TokenizeError, admit
from headrace.codec.errors import QueueFullError
from headrace.fsm import REQUEST, IllegalTransition, RequestEvent, RequestState
from headrace.runtime.live import LiveTable
from headrace.runtime.stages import ingress as stage
from headrace.runtime.stages.ingress import Facts, Ingress, Outbox
from headrace.runtime.stages.life import Group, Job, Kind, Life, Tokenised, Way, advance_along
from headrace.runtime.stages.tokenize import TokenizerWorker
from ingress_helpers import RULES, V1
from manager_helpers import make

FREE = Facts(ring_room=100, ring_closed=False, pool_room=100)
WAYS = [stage._OF_TEXT, stage._OF_MEDIA, stage._OF_IDS, stage._OF_OTHERS]


def life(**fields: Any) -> Life:
    request = admit(GenerateRequest(rid=Rid.mint(), **fields), RULES, V1)
    return Life(str(request.rid), Kind.GENERATE, None, request=request, ids=request.input_ids, nbytes=request.nbytes)


def groups(count: int, **fields: Any) -> list[Group]:
    return [Group([life(**fields)]) for _ in range(count)]


def refusals(out: Outbox) -> list[str]:
    return [type(message.item.error).__name__ for _, message in out.shard if hasattr(message, "item")]


# -- ingress ------------------------------------------------------------------------------------------------------------------


def test_room_that_one_request_of_a_move_took_is_not_there_for_the_next() -> None:
    some = groups(3, input_ids=[1])
    firsts = [group.members[0] for group in some]
    out = Ingress(V1, RULES).step("fresh", some, FREE._replace(ring_room=2))
    assert [one for one, _ in out.requests] == firsts[:2]
    assert refusals(out) == ["QueueFullError"]
    assert firsts[2].state is RequestState.FAILED


def test_room_in_the_pool_is_shared_by_the_groups_of_a_move() -> None:
    out = Ingress(V1, RULES).step("fresh", groups(3, text="mill"), FREE._replace(pool_room=2))
    assert (len(out.jobs), refusals(out)) == (2, ["QueueFullError"])


def test_tokenised_requests_of_one_move_share_the_room_of_the_ring() -> None:
    ingress = Ingress(V1, RULES)
    jobs = ingress.step("fresh", groups(3, text="mill"), FREE).jobs
    done = [Tokenised(job.rid, np.array([1]), None, 1) for job in jobs]
    out = ingress.step("tokenised", done, FREE._replace(ring_room=1))
    assert ([one.rid for one, _ in out.requests], refusals(out)) == ([jobs[0].rid], ["QueueFullError"] * 2)
    assert not ingress.entries


@pytest.mark.parametrize("highest", [None, RULES.vocab_size, RULES.vocab_size - 1])
def test_an_id_that_the_model_has_no_row_for_fails_its_request_and_no_mate(highest: int | None) -> None:
    """`highest` is a bound for the whole batch, so it can lie above every id of a request."""
    ingress = Ingress(V1, RULES)
    jobs = ingress.step("fresh", groups(2, text="mill"), FREE).jobs
    top = RULES.vocab_size - 1 if highest == RULES.vocab_size - 1 else RULES.vocab_size
    done = [Tokenised(job.rid, np.array([1, last]), None, highest) for job, last in zip(jobs, (5, top), strict=True)]
    out = ingress.step("tokenised", done, FREE)
    bad = top >= RULES.vocab_size
    assert ([one.rid for one, _ in out.requests], refusals(out)) == (
        [job.rid for job in jobs[: 2 - bad]],
        ["ValidationError"] * bad,
    )


def test_a_move_takes_all_that_waits_and_keeps_its_order() -> None:
    tm = make()
    pipeline = tm._pipeline
    pipeline.live.open_admission()
    kept = [tm.generate([1]) for _ in range(5)] + tm.generate_batch(["a", "b", "c"])
    assert pipeline.move_ingress()
    assert not len(pipeline.inbox)
    assert pipeline.move_worker(0)
    assert pipeline.move_ingress()
    assert not pipeline.move_ingress()
    heads = tm.scheduler.recv_requests().headers
    assert [handle._rid.encode() in head for handle, head in zip(kept, heads, strict=True)] == [True] * 8
    assert pipeline.live.nbytes == 0


# -- ways through the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(event.name for event in way.events))
@pytest.mark.parametrize("state", RequestState, ids=lambda state: state.name)
def test_a_way_ends_where_its_events_lead_one_by_one(way: Way, state: RequestState) -> None:
    recorded: list[tuple[int, int, int]] = []

    class Recorder:
        def record(self, machine: str, rid: str, from_: int, event: int, to: int, stage: str) -> None:
            recorded.append((from_, event, to))

    expected: Any = state
    try:
        for event in way.events:
            expected = REQUEST.next(expected, event)
    except IllegalTransition:
        expected = IllegalTransition
    for record in (None, Recorder()):
        one = life(input_ids=[1])
        one.state = state
        try:
            advance_along(one, way, "ingress", record)
            found: Any = one.state
        except IllegalTransition as fault:
            found = type(fault)
        assert found is expected
    assert [event for _, event, _ in recorded] == list(way.events)[: len(recorded)]
    assert (len(recorded) == len(way.events)) == (expected is not IllegalTransition)


# -- the worker ---------------------------------------------------------------------------------------------------------------


class Cuts:
    """A back end whose answers are cut out of one array, are arrays of their own, cut out of several, or views of other things."""

    name = "cuts"

    def __init__(self, how: str) -> None:
        self.how = how

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        if "boom" in texts:
            raise TokenizeError("boom")
        whole = np.array([ord(char) for text in texts for char in text], dtype=np.int64)
        ends = np.cumsum([len(text) for text in texts]).tolist()
        cuts = [whole[end - len(text) : end] for end, text in zip(ends, texts, strict=True)]
        ways = {
            "one": lambda ids: ids,
            "own": lambda ids: ids.copy(),
            "several": lambda ids: ids.copy()[:],
            "bytes": lambda ids: np.frombuffer(ids.tobytes(), dtype=np.int64),
            "bits": lambda ids: np.frombuffer(bytearray(ids.tobytes()), dtype=np.uint8).view(np.int64),
        }
        if self.how == "same bits":  # one array of another type under all of them
            whole = np.frombuffer(bytearray(whole.tobytes()), dtype=np.uint8).view(np.int64)
            return [whole[end - len(text) : end] for end, text in zip(ends, texts, strict=True)]
        return list(map(ways[self.how], cuts))


@pytest.mark.parametrize("how", ["one", "own", "several", "bytes", "bits", "same bits"])
@pytest.mark.parametrize("texts", [["a"], [""], ["", ""], ["a", "", "\u4e00", "b"], ["a", "boom", "z"]], ids=repr)
def test_no_id_of_an_answer_is_above_what_it_says(how: str, texts: list[str]) -> None:
    jobs = [Job(f"r{at}", text, True) for at, text in enumerate(texts)]
    done = TokenizerWorker(Cuts(how)).step(jobs)
    assert [one.rid for one in done] == [job.rid for job in jobs]
    for one, text in zip(done, texts, strict=True):
        if text == "boom":
            assert one.ids is None
            assert one.error is not None
            continue
        assert one.ids is not None
        assert one.ids.tolist() == [ord(char) for char in text]
        assert one.highest is None or not text or int(one.ids.max()) <= one.highest
        if how == "one" and "boom" not in texts:
            assert one.highest == max(map(ord, "".join(texts)), default=-1)


# -- bytes that wait ----------------------------------------------------------------------------------------------------------


def lives(count: int, nbytes: int) -> list[Life]:
    return [
        Life(f"r{at}-{nbytes}", Kind.GENERATE, None, shown_rid=f"r{at}-{nbytes}", nbytes=nbytes) for at in range(count)
    ]


def table(most: int = 100) -> LiveTable:
    made = LiveTable(50, most)
    made.open_admission()
    return made


def test_bytes_that_the_ring_has_given_do_not_count_for_ever() -> None:
    """What the ring gives is not told; only what is refused without looking would be wrong."""
    bounded = table()
    for one in lives(20, 30):
        if not bounded.book([one]):
            bounded.book_exactly([one], 0, bounded.mark())
        bounded.pushed([one], 30)
        bounded.end(one.rid)
    assert bounded.refusals() == {}


def test_bytes_in_the_ring_and_before_it_are_refused_at_the_limit_and_not_below() -> None:
    bounded = table(100)
    first, second, third = lives(3, 40)
    assert bounded.book([first])
    bounded.pushed([first], 40)
    assert bounded.book([second])
    assert not bounded.book([third])
    with pytest.raises(QueueFullError, match="bytes"):
        bounded.book_exactly([third], 40, bounded.mark())
    assert len(bounded) == 2
    bounded.book_exactly([third], 20, bounded.mark())
    assert (len(bounded), bounded.nbytes) == (3, 80)


def test_what_reaches_the_ring_behind_the_mark_is_counted() -> None:
    bounded = table(100)
    first, second = lives(2, 60)
    assert bounded.book([first])
    assert not bounded.book([second])
    mark = bounded.mark()
    bounded.pushed([first], 60)  # and the ring was looked at before that, and found empty
    with pytest.raises(QueueFullError, match="bytes"):
        bounded.book_exactly([second], 0, mark)


def test_a_minted_rid_names_its_request_and_a_clients_rid_all_that_carry_it() -> None:
    bounded = table(1000)
    minted = Life("m", Kind.GENERATE, None, shown_rid="m")
    mates = [Life(f"m#{at}", Kind.GENERATE, None, shown_rid="m") for at in range(2)]
    unnamed = Life("u", Kind.GENERATE, None)
    for one in (minted, *mates, unnamed):
        assert bounded.book([one])
    assert sorted(bounded.named("m")) == ["m", "m#0", "m#1"]
    assert bounded.named("m#0") == bounded.named("u") == bounded.named("") == []
    bounded.end("m")
    bounded.end("m#0")
    assert bounded.named("m") == ["m#1"]
    bounded.end("m#1")
    assert bounded.named("m") == []
    assert not bounded._shown


def test_every_request_event_has_a_state_to_start_from() -> None:
    """`Way.ends` is indexed by the number of a state."""
    assert [int(state) for state in RequestState] == list(range(len(RequestState)))
    assert all(isinstance(event, RequestEvent) for way in WAYS for event in way.events)
