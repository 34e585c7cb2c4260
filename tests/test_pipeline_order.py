"""What may happen between two looks of one move: everything, because other threads run there.

Each test puts the whole other side of the house between two looks, at the one place where it hurts, without any thread.
"""

from typing import Any

import pytest
from headrace.codec import decode_ingress, encode_batch
from manager_helpers import STOP, chunk, make


class _Between:
    """A lane whose `take` lets `happen` run once, after it has found the lane empty."""

    def __init__(self, lane: Any, happen: Any) -> None:
        self._lane, self._happen = lane, happen

    def take(self, most: int = 1) -> Any:
        taken = self._lane.take(most)
        if not taken and self._happen is not None:
            happen, self._happen = self._happen, None
            happen()
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    def __len__(self) -> int:
        return len(self._lane)


def _scheduler_answers(pipeline: Any, port: Any) -> None:
    (message,) = decode_ingress(port.recv_requests(), port.schema)
    assert port.push_frame(encode_batch([chunk(message.rid, [65], STOP)], port.schema))


@pytest.mark.parametrize("fused", [True, False])
def test_a_frame_never_overtakes_the_registration_of_its_request(fused):
    tm = make(fused=fused)
    pipeline, port = tm._pipeline, tm.scheduler
    pipeline.live.open_admission()
    handle = tm.generate([1])

    def happen():  # registered, pushed, answered and dispatched, all behind the shard's back
        while pipeline.move_ingress():
            pass
        _scheduler_answers(pipeline, port)
        if not fused:
            assert pipeline.move_dispatch()

    pipeline.registrations[0] = _Between(pipeline.registrations[0], happen)
    for _ in range(4):
        if fused:
            pipeline.move_egress()
        else:
            pipeline.move_shard(0)
            pipeline.move_dispatch()
    assert handle.result(0).text == "A"
    assert pipeline.shard_counts[0] == {}


@pytest.mark.parametrize("fused", [True, False])
def test_the_last_frame_of_a_scheduler_that_goes_is_delivered(fused):
    tm = make(fused=fused)
    pipeline, port = tm._pipeline, tm.scheduler
    pipeline.live.open_admission()
    handle = tm.generate([1])
    while pipeline.move_ingress():
        pass
    found_empty = pipeline.ring_out.drain_some

    def drain(most, most_bytes):  # the ring is found empty, and then the scheduler gives its last frame and goes
        frames = found_empty(most, most_bytes)
        if not frames and not port.closed:
            _scheduler_answers(pipeline, port)
            port.close()
        return frames

    pipeline.ring_out.drain_some = drain
    for _ in range(6):
        if fused:
            pipeline.move_egress()
        else:
            pipeline.move_dispatch()
            pipeline.move_shard(0)
    assert handle.result(0).text == "A"
