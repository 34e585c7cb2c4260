"""Echo through the whole manager, in one process: total CPU per token, as a ratio to one `DecodeStream.step` per token in the same run.

256 concurrent streaming requests of 256 tokens each are submitted at once (flooded) and read to their ends. Counted is all CPU of the
process: submitting, ingress, both rings, the embedded scheduler, decoding, sinks, and the reading. The peer is what a server that
keeps one `DecodeStream` for each request pays for the text alone. Readers: one thread that takes the handles in turn (the target is
a ratio of at most 2), and beside it, without a target, one thread for each handle. Last, what a trace of every transition adds
(the target is at most 15 %; off, the cost is a comparison with None).

    python benchmarks/bench_echo.py [--rounds N] [--requests N] [--tokens N] [--tokenizer PATH]

Machines change speed within minutes, so the peer is measured next to every round and the median of the ratios is printed.
Exit status 1 if a request does not get its own text back.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from headrace import specs
from headrace.runtime import EchoScheduler, RequestHandle, RuntimeConfig, TokenizerManager
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

TARGET = 2.0


def peer(tokenizer: Tokenizer, prompts: Sequence[list[int]]) -> float:
    """CPU seconds per token of one `DecodeStream.step` per token."""
    began = time.process_time()
    for prompt in prompts:
        stream = DecodeStream(skip_special_tokens=True)
        for token in prompt:
            stream.step(tokenizer, token)
    return (time.process_time() - began) / sum(map(len, prompts))


def round_robin(handles: Sequence[RequestHandle]) -> list[str]:
    """One thread takes a chunk of each handle in turn until all have ended."""
    texts = [""] * len(handles)
    readers = {at: iter(handle) for at, handle in enumerate(handles)}
    while readers:
        for at, reader in list(readers.items()):
            chunk = next(reader, None)
            if chunk is None:
                del readers[at]
            else:
                texts[at] += chunk.text
    return texts


def threads(handles: Sequence[RequestHandle]) -> list[str]:
    """A thread for each handle."""
    texts = [""] * len(handles)

    def read(at: int) -> None:
        texts[at] = "".join(chunk.text for chunk in handles[at])

    readers = [threading.Thread(target=read, args=(at,)) for at in range(len(handles))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return texts


def echo(
    tm: TokenizerManager, prompts: Sequence[list[int]], read: Callable[[Sequence[RequestHandle]], list[str]]
) -> tuple[float, list[str]]:
    """CPU seconds of the whole process per token, and the texts."""
    params = {"max_new_tokens": len(prompts[0]), "ignore_eos": True}
    began = time.process_time()
    texts = read(tm.generate_batch(prompts, params))
    return (time.process_time() - began) / sum(map(len, prompts)), texts


def tracing(config: RuntimeConfig, prompts: Sequence[list[int]], wanted: list[str], rounds: int) -> int:
    """What recording every transition costs the whole manager: one that traces (with room for every event) beside one that does not."""
    events = 4 * rounds * sum(map(len, prompts))
    recorded = msgspec.structs.replace(config, trace=True, trace_capacity=2 * events)
    ratios = []
    wrong = 0
    with TokenizerManager(config) as off, TokenizerManager(recorded) as on:
        with EchoScheduler(off.scheduler, max_batch=len(prompts)), EchoScheduler(on.scheduler, max_batch=len(prompts)):
            for index in range(rounds + 1):
                costs = []
                for tm in (off, on):
                    cost, texts = echo(tm, prompts, round_robin)
                    wrong += texts != wanted
                    costs.append(cost)
                if index:
                    ratios.append(costs[1] / costs[0])
        assert on.trace is not None
        if on.trace.dropped:
            raise RuntimeError("the trace was full; its cost was not measured")
    print(
        f"  {'tracing on':<20} {statistics.median(ratios):.2f} × the CPU of tracing off (best {min(ratios):.2f})   target 1.15"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tokenizer", default=str(specs.path("data", "tokenizer.json")))
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(args.tokenizer)
    text = specs.path("data", "text.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ids = ids * (args.requests * args.tokens // len(ids) + 1)
    prompts = [ids[at * args.tokens : (at + 1) * args.tokens] for at in range(args.requests)]
    wanted = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
    config = RuntimeConfig(tokenizer=tokenizer, context_len=2 * args.tokens + 2)
    wrong = 0
    with TokenizerManager(config) as tm, EchoScheduler(tm.scheduler, max_batch=args.requests):
        print(f"{args.requests} requests of {args.tokens} tokens, {args.rounds} rounds, µs of CPU per token")
        for name, read, rounds in (("one reader, in turn", round_robin, args.rounds), ("a thread each", threads, 3)):
            ratios, costs, peers = [], [], []
            for index in range(rounds + 1):
                base = peer(tokenizer, prompts[: max(1, args.requests // 4)])
                cost, texts = echo(tm, prompts, read)
                wrong += texts != wanted
                if index:  # the first round warms up
                    ratios.append(cost / base)
                    costs.append(cost)
                    peers.append(base)
            print(
                f"  {name:<20} headrace {statistics.median(costs) * 1e6:5.2f}   DecodeStream.step "
                f"{statistics.median(peers) * 1e6:5.2f}   ratio {statistics.median(ratios):5.2f} (best {min(ratios):.2f}, "
                f"worst {max(ratios):.2f})" + (f"   target {TARGET}" if read is round_robin else "")
            )
    wrong += tracing(config, prompts, wanted, args.rounds)
    if wrong:
        print(f"{wrong} rounds did not give every request its own text")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
