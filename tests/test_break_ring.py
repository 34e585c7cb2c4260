"""`push(5)` handed over five zero bytes: `bytes()` of a number is that many zeros."""

import numpy as np
import pytest
from headrace.runtime import egress_ring


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
