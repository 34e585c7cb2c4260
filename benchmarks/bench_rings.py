"""Rings between two threads beside `queue.Queue` and ZeroMQ inproc, in one run, as ratios.

    python benchmarks/bench_rings.py [--seconds 20] [--json]

What is compared, always one producer thread and one consumer thread, with the same objects and the same capacity:

- one at a time: `try_push` (on FULL the egress ring's waiting `push` is used instead) and `drain(1)` beside `put` and `get`;
- 64 at a time: `try_push_many(64)` and `drain(64)` beside a queue.Queue that carries lists of 64;
- both beside ZeroMQ inproc (PUSH/PULL) with pickle of a request of 1000 tokens, which is how the engines that use it send requests.

Rounds of the peers alternate, so that a slow spell of the machine hits all of them; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import pickle
import queue
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
from headrace.codec import IngressMessage
from headrace.runtime import PushResult, egress_ring, ingress_ring
from headrace.runtime.channel import Bell

CAPACITY = 8192  # the default of both rings
BATCH = 64
TARGETS = {
    "one at a time / queue.Queue": 2.0,
    "64 at a time / queue.Queue of lists": 1.3,
    "one at a time / ZeroMQ inproc with pickle": 10.0,
    "64 at a time / ZeroMQ inproc with pickle": 10.0,
}


def timed(produce: Callable[[], None], consume: Callable[[], None]) -> float:
    """Seconds until both have ended, started together."""
    gate = threading.Barrier(3)
    faults: list[BaseException] = []

    def run(part: Callable[[], None]) -> None:
        gate.wait()
        try:
            part()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(part,)) for part in (produce, consume)]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if faults:
        raise faults[0]
    return took


def ring_one(count: int) -> float:
    producer, consumer = egress_ring(CAPACITY)
    frame = b"x" * 64

    def produce() -> None:
        push = producer.push
        for _ in range(count):
            push(frame)

    def consume() -> None:
        left = count
        drain, wait = consumer.drain, consumer.wait
        while left:
            got = drain(1)
            if got:
                left -= 1
            else:
                wait(None)

    return timed(produce, consume) / count


def queue_one(count: int) -> float:
    line: queue.Queue[bytes] = queue.Queue(CAPACITY)
    frame = b"x" * 64

    def produce() -> None:
        put = line.put
        for _ in range(count):
            put(frame)

    def consume() -> None:
        get = line.get
        for _ in range(count):
            get()

    return timed(produce, consume) / count


def message() -> IngressMessage:
    return IngressMessage("rid", b"h" * 200, np.arange(1000, dtype=np.int64))


def ring_many(count: int) -> float:
    """The consumer counts what came; putting the columns together is the scheduler's work, and queue.Queue has nothing like it."""
    producer, consumer = ingress_ring(CAPACITY)
    batch = [message() for _ in range(BATCH)]
    rounds = count // BATCH
    room = Bell()
    producer.ring_bell_on_room(room)

    def produce() -> None:
        push = producer.try_push_many
        for _ in range(rounds):
            while push(batch) is not PushResult.OK:
                room.wait()

    def consume() -> None:
        left = rounds * BATCH
        drain, wait = consumer.drain, consumer.wait
        while left:
            got = len(drain(BATCH))
            if got:
                left -= got
            else:
                wait(None)

    return timed(produce, consume) / (rounds * BATCH)


def queue_many(count: int) -> float:
    line: queue.Queue[list[IngressMessage]] = queue.Queue(CAPACITY // BATCH)
    batch = [message() for _ in range(BATCH)]
    rounds = count // BATCH

    def produce() -> None:
        for _ in range(rounds):
            line.put(list(batch))

    def consume() -> None:
        left = rounds * BATCH
        while left:
            left -= len(line.get())

    return timed(produce, consume) / (rounds * BATCH)


def zmq_one(count: int) -> float:
    import zmq

    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    address = "inproc://bench"
    pull.set_hwm(CAPACITY)
    push.set_hwm(CAPACITY)
    pull.bind(address)
    push.connect(address)
    request = {
        "rid": "rid",
        "input_ids": list(range(1000)),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 128},
    }

    def produce() -> None:
        for _ in range(count):
            push.send(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))

    def consume() -> None:
        for _ in range(count):
            pickle.loads(pull.recv())

    try:
        return timed(produce, consume) / count
    finally:
        push.close()
        pull.close()
        context.term()


def measure(seconds: float) -> dict[str, list[float]]:
    """Seconds per item of every peer, round by round."""
    peers: dict[str, tuple[Callable[[int], float], int]] = {
        "ring one": (ring_one, 40_000),
        "queue one": (queue_one, 20_000),
        "ring many": (ring_many, 800_000),
        "queue many": (queue_many, 800_000),
    }
    try:
        import zmq  # noqa: F401
    except ImportError:
        print("pyzmq is not installed (pip install pyzmq): the ratios to ZeroMQ are left out")
    else:
        peers["zmq"] = (zmq_one, 5_000)
    found: dict[str, list[float]] = {name: [] for name in peers}
    end = time.monotonic() + seconds
    rounds = 0
    while rounds < 3 or time.monotonic() < end:
        for name, (run, count) in peers.items():
            found[name].append(run(count))
        rounds += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measure(options.seconds)
    median = {name: statistics.median(times) for name, times in found.items()}
    ratios = {
        "one at a time / queue.Queue": median["queue one"] / median["ring one"],
        "64 at a time / queue.Queue of lists": median["queue many"] / median["ring many"],
    }
    if "zmq" in median:
        ratios["one at a time / ZeroMQ inproc with pickle"] = median["zmq"] / median["ring one"]
        ratios["64 at a time / ZeroMQ inproc with pickle"] = median["zmq"] / median["ring many"]
    if options.json:
        print(json.dumps({"us_per_item": {k: v * 1e6 for k, v in median.items()}, "ratios": ratios}, indent=2))
    else:
        print(f"{len(found['ring one'])} rounds; microseconds per item (median, best, worst):")
        for name, times in found.items():
            print(f"  {name:12} {median[name] * 1e6:9.3f} {min(times) * 1e6:9.3f} {max(times) * 1e6:9.3f}")
        for name, ratio in ratios.items():
            verdict = "reached" if ratio >= TARGETS[name] else "missed"
            print(f"  {ratio:7.2f} x  {name} (target {TARGETS[name]}: {verdict})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
