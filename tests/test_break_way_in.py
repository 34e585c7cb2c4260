"""The way in, attacked: what is remembered, served together or counted lazily must not hang, leak, copy or count wrong."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from headrace.codec import GenerateRequest, Rid, SamplingParams, ValidationError, admit
from headrace.codec.checks import DEFAULT_LIMITS
from headrace.codec.errors import QueueFullError
from headrace.codec.sampling import Normaliser
from headrace.runtime.stages.tokenize import TokenizerWorker
from headrace.runtime.text.tokenize import TokenizersBackend
from ingress_helpers import RULES, V1, V2, refusal
from manager_helpers import STOP, TOKENIZER, chunk, make, rig


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a" * (8 << 20)},
        {"stop": "a" * (8 << 20)},
        {"stop": ["a" * (8 << 20)]},
        {"stop": ["a" * 1024] * 8192},
        {"stop_token_ids": [1] * (1 << 20)},
        {"stop_token_ids": (1 << 62,) * (1 << 20)},
        {"x" * (8 << 20): 1},
    ],
    ids=lambda fields: next(f"{name:.20}-{type(value).__name__}" for name, value in fields.items()),
)
@pytest.mark.parametrize("kind", ["mapping", "object"])
def test_what_is_too_large_is_refused_without_a_copy_of_it(kind: str, fields: dict[str, Any]) -> None:
    """A refusal must not cost more memory the more a client sends."""
    params: Any = fields if kind == "mapping" or "xx" in next(iter(fields)) else SamplingParams(**fields)
    normalise = Normaliser(100, False, DEFAULT_LIMITS, V2)
    tracemalloc.start()
    try:
        error = refusal(normalise, params)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 18
    assert len(error.message) < 2000


@pytest.mark.parametrize("media", [0, False, "", [], (), set(), np.array([1, 2]), np.array([])], ids=repr)
def test_media_that_is_no_object_is_refused_and_not_ignored(media: Any) -> None:
    assert refusal(admit, GenerateRequest(text="mill", media=media), RULES, V1).field == "media"


def test_no_media_is_no_media() -> None:
    for media in (None, {}):
        assert admit(GenerateRequest(text="mill", media=media), RULES, V1).media is None


def test_two_admitted_requests_share_no_container() -> None:
    one, other = (admit(GenerateRequest(text="mill"), RULES, V1) for _ in range(2))
    one.wire_fields["priority"] = 1
    assert other.wire_fields == {}
    assert admit(GenerateRequest(text="mill"), RULES, V1).wire_fields == {}


def test_a_worker_has_no_answer_to_nothing() -> None:
    assert TokenizerWorker(TokenizersBackend(TOKENIZER)).step([]) == []


def test_aborts_that_wait_in_the_ring_count_as_bytes_that_wait() -> None:
    """Or a client that sends and aborts fills the ring beyond the limit."""
    tm = make(admitted_bytes=20_000, trace=False)
    pipeline = tm._pipeline
    pipeline.live.open_admission()
    kept, total = [], 0
    for _ in range(1000):
        try:
            kept.append(tm.generate([1]))
        except QueueFullError:
            break
        while pipeline.move_ingress() or pipeline.move_egress():
            pass
        kept[-1].abort()
        while pipeline.move_ingress() or pipeline.move_egress():
            pass
        total = pipeline.ring_in.facts().nbytes
        assert total <= 20_000
    else:
        pytest.fail("nothing was ever refused")
    # and not refused before the next one would have been too much
    assert total + tm._admission.admit(GenerateRequest(input_ids=[1])).nbytes > 20_000


def test_a_small_prompt_keeps_no_large_one_in_memory() -> None:
    """Texts are tokenised together, but each is somebody's own: a live request holds no more than its own ids."""
    tm = make(context_len=1 << 16, trace=False)
    pipeline = tm._pipeline
    pipeline.live.open_admission()
    kept = [tm.generate(text) for text in ("mill", *["race " * 9000] * 3)]
    assert pipeline.move_ingress()
    assert pipeline.move_worker(0)
    small = pipeline.tokenised.take(4)[0].ids
    assert len(kept) == 4
    assert small.base is None or small.base.nbytes <= 1 << 16


def test_what_the_ring_has_taken_is_kept_nowhere_else() -> None:
    tm = make(trace=False)
    pipeline = tm._pipeline
    pipeline.live.open_admission()
    kept = [tm.generate("mill"), tm.generate([1, 2])]
    while pipeline.move_ingress() or pipeline.move_worker(0):
        pass
    assert len(kept) == 2
    assert [life.ids for life in pipeline.live.lives()] == [None, None]


@pytest.mark.parametrize("prompt", ["one", [1]], ids=repr)
def test_a_rid_object_that_is_used_again_names_two_requests(prompt: Any) -> None:
    """As when a client tries again with the rid it has made: neither hangs, and nothing stays booked."""
    rid = Rid.mint()
    with rig() as one:
        handles = [one.tm.generate(prompt, rid=rid, stream=False) for _ in range(2)]
        handles += one.tm.generate_batch([prompt], rid=[rid], stream=False)
        handles += one.tm.submit({"text": "one", "rid": rid})
        assert {handle.rid for handle in handles} == {str(rid)}
        rids = [message.rid for message in one.receive(4)]
        assert len(set(rids)) == 4
        one.push(*[chunk(name, [1], STOP) for name in rids])
        for handle in handles:
            assert handle.result(timeout=20).finish_reason is not None
        assert one.tm._pipeline.live.nbytes == 0


def test_a_rid_of_the_wrong_type_is_named() -> None:
    with pytest.raises(ValidationError, match="5"):
        make().generate([1], rid=5)
