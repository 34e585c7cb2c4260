"""What is made when it is asked for is what would have been made at once, whatever the receiver did meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
from headrace.runtime.handle import Chunk, RequestHandle
from headrace.runtime.steps import StepBatch
from manager_helpers import STOP, chunk, rig


def test_columns_of_a_step_do_not_depend_on_what_the_receiver_did_to_its_lists() -> None:
    """The lists are the receiver's own: it may sort out rows of them before it looks at the rest."""
    found: list[tuple[Any, ...]] = []

    def on_step(batch: StepBatch) -> None:
        size = len(batch.handles)
        batch.handles.clear()
        batch.texts.clear()
        batch.finish_reasons.clear()
        batch.errors.clear()
        found.append(
            (size, batch.offsets.tolist(), batch.ended, len(batch.finish_reasons), len(batch.errors), len(batch.extras))
        )

    with rig() as one:
        one.tm.on_step(on_step)
        kept: list[RequestHandle] = [one.tm.generate([1], sink="step") for _ in range(2)]
        first, second = one.request(), one.request()
        one.push(chunk(first, [1]), chunk(second, [1]))
        one.push(chunk(first, [1, 2]), chunk(second, [1, 2]))
        one.push(chunk(first, [], STOP), chunk(second, [], STOP))
        one.gone()
    assert len(kept) == 2
    assert found == [
        (2, [0, 1, 2], [], 2, 2, 2),
        (2, [0, 2, 4], [], 2, 2, 2),
        (2, [0, 0, 0], [0, 1], 2, 2, 2),
    ]


def test_a_chunk_shows_the_fields_that_its_reader_knows() -> None:
    assert repr(Chunk("a", 5, None, 1, 1)) == (
        "Chunk(text='a', token_ids=array([5]), finish_reason=None, prompt_tokens=1, completion_tokens=1)"
    )
    some = Chunk("", np.array([], dtype=np.int64), None, 1, 1, {"out_lp_val": np.array([0.5])}, {"cached_tokens": 3})
    assert "extras={'out_lp_val': array([0.5])}, meta={'cached_tokens': 3})" in repr(some)
    assert "_ids=" not in repr(some).replace("token_ids=", "")


def test_requests_of_a_callback_that_raises_are_aborted_although_it_emptied_the_batch() -> None:
    def on_step(batch: StepBatch) -> None:
        batch.handles.clear()
        raise ValueError("mine")

    with rig() as one:
        one.tm.on_step(on_step)
        kept = [one.tm.generate([1], sink="step") for _ in range(2)]
        rids = [one.request(), one.request()]
        one.push(*[chunk(rid, [1]) for rid in rids])
        one.receive(2)
        assert sorted(one.aborts()) == sorted(rids)
        one.gone()
    assert len(kept) == 2
