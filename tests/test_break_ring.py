"""`push(5)` handed over five zero bytes: `bytes()` of a number is that many zeros. And empty frames, which have no bytes to count."""

import numpy as np
import pytest
from headrace.runtime import PushResult, egress_ring


@pytest.mark.parametrize("frame", [5, 0, 2**60, True, None, "x", [1, 2], object()])
def test_only_a_buffer_is_a_frame(frame):
    producer, consumer = egress_ring(2)
    for push in (producer.push, producer.try_push):
        with pytest.raises(TypeError):
            push(frame)
    assert consumer.drain() == []


def test_every_kind_of_buffer_is_copied_in_the_order_of_its_elements():
    producer, consumer = egress_ring(8)
    held = bytearray(b"abcd")
    for frame in (held, memoryview(held)[::2], memoryview(b"wxyz")[1:], np.frombuffer(b"0123", np.uint8)[::-1]):
        assert producer.push(frame)
    held[:] = b"...."
    assert consumer.drain() == [b"abcd", b"ac", b"xyz", b"3210"]


def test_an_empty_frame_is_refused_where_the_bytes_are_used_up():
    """Also after a drain that left the ring with room for more frames: `try_push` took it and `push` parked."""
    producer, consumer = egress_ring(3, max_bytes=1)
    for frame in (b"", b"", b"x"):
        assert producer.try_push(frame) is PushResult.OK
    assert consumer.drain(2) == [b"", b""]
    assert producer.try_push(b"") is PushResult.FULL
    with pytest.raises(TimeoutError):
        producer.push(b"", timeout=0)
    assert consumer.drain() == [b"x"]
    assert producer.try_push(b"") is PushResult.OK
