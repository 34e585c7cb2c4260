"""A bounded soak: many streaming clients that come, read, and leave at random, over rings that are much too small for them.

    python benchmarks/soak.py [--seconds 60] [--clients 2000] [--ring 64] [--seed N] [--threads-topology]

Each client submits, reads and checks its echo token by token, again and again; about half of them leave early: out of the loop, by a
cancelled task, by `close`, by an abort by rid, or by dropping the handle. A full ring is answered with 503 and tried again. At the end
must hold: every request that was read to its end got exactly its own ids and text (none lost, none doubled), every one that was left
was a prefix; no entry in any table, nothing running in the scheduler (each one that was left was aborted there), no thread left; and
the memory of the last half of the run is flat. Exit status 1, with the reason, if not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from headrace import specs
from headrace.codec import ClientClosedError, QueueFullError
from headrace.runtime import EchoScheduler, RuntimeConfig, TokenizerManager
from tokenizers import Tokenizer

LOOPS = 2  # event loops, each on its own thread with its share of the clients
ENDLESS = 500_000  # tokens
GROWTH = 1.10  # of the resident set, from the middle of the run to its end
PATIENCE_S = 10.0  # for what is on its way when the clients have ended
SLACK_MIB = 16.0  # what an allocator may keep


def resident_mib() -> float:
    """Resident memory of this process in MiB, now (Linux) or at its highest (elsewhere)."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Soak:
    """One run: what the clients share, and what they counted."""

    def __init__(self, tm: TokenizerManager, tokenizer: Tokenizer, ids: list[int], until: float) -> None:
        self.tm = tm
        self.tokenizer = tokenizer
        self.ids = ids
        self.until = until
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def count(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    async def client(self, number: int, seed: int) -> None:
        choose = random.Random(seed * 1_000_003 + number)
        while time.monotonic() < self.until:
            start = choose.randrange(len(self.ids) - 400)
            # some run for longer than the rings' lag, or no abort would ever meet a request that still runs
            prompt = self.ids[start : start + choose.choice((8, 24, 48, 400))]
            try:
                await self.request(prompt, f"client-{number}", choose)
            except QueueFullError:
                self.count("refused with 503")
                await asyncio.sleep(choose.random() * 0.2)

    async def request(self, prompt: list[int], rid: str, choose: random.Random) -> None:
        leave = choose.choice(("", "", "", "", "break", "cancel", "close", "abort", "drop"))
        stop_at = choose.randint(1, len(prompt))
        # some that will be left would go on for ever (the echo starts over): only an abort ends them
        total = ENDLESS if leave and choose.random() < 0.3 else len(prompt)
        handle = self.tm.generate(prompt, {"max_new_tokens": total, "ignore_eos": True}, rid=rid)
        got: list[int] = []
        texts: list[str] = []
        if leave == "cancel":
            await self.cancelled(handle, stop_at)
            return
        try:
            async for chunk in handle:
                got += chunk.token_ids.tolist()
                texts.append(chunk.text)
                if leave and len(got) >= stop_at:
                    if leave == "close":
                        handle.close()
                    elif leave == "abort":
                        self.tm.abort(rid)
                    if leave in ("break", "drop"):
                        break
            else:
                leave = ""
        except ClientClosedError:
            pass
        if got != (prompt * (len(got) // len(prompt) + 1))[: len(got)]:
            self.wrong.append(f"{rid}: other ids than its own")
        elif leave:
            self.count(f"left by {leave}")
        elif got != prompt or "".join(texts) != self.tokenizer.decode(prompt):
            self.wrong.append(f"{rid}: {len(got)} of {len(prompt)} ids, or another text")
        else:
            self.count("read to the end")

    async def cancelled(self, handle, stop_at: int) -> None:  # type: ignore[no-untyped-def]
        seen = asyncio.Event()
        taken = 0

        async def read() -> None:
            nonlocal taken
            async for chunk in handle:
                taken += len(chunk.token_ids)
                if taken >= stop_at:
                    seen.set()

        task = asyncio.ensure_future(read())
        waiting = asyncio.ensure_future(seen.wait())
        try:
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            await task
            self.count("read to the end")
        except asyncio.CancelledError:
            self.count("left by cancel")
        finally:
            waiting.cancel()


def run(args: argparse.Namespace) -> int:
    tokenizer = Tokenizer.from_file(str(specs.path("data", "tokenizer.json")))
    ids = tokenizer.encode(specs.path("data", "text.txt").read_text(encoding="utf-8"), add_special_tokens=False).ids
    config = RuntimeConfig(
        tokenizer=tokenizer,
        context_len=2 * ENDLESS,
        ingress_ring_capacity=args.ring,
        egress_ring_capacity=args.ring,
        fused=not args.threads_topology,
        detokenizer_shards=3 if args.threads_topology else 1,
    )
    began = time.monotonic()
    tm = TokenizerManager(config).start()
    scheduler = EchoScheduler(tm.scheduler, max_batch=256).start()
    soak = Soak(tm, tokenizer, ids, began + args.seconds)

    async def clients(part: int) -> None:
        await asyncio.gather(*(soak.client(number, args.seed) for number in range(part, args.clients, LOOPS)))

    def loop(part: int) -> None:
        try:
            asyncio.run(clients(part))
        except BaseException as fault:
            soak.wrong.append(f"the clients died with {fault!r}")
            raise

    loops = [threading.Thread(target=loop, args=(part,)) for part in range(LOOPS)]
    for one in loops:
        one.start()
    middle = 0.0
    while any(one.is_alive() for one in loops):
        loops[0].join(1.0)
        passed = time.monotonic() - began
        if passed > args.seconds / 2 and not middle:
            gc.collect()
            middle = resident_mib()
        if args.verbose:
            print(f"{passed:5.0f} s  {resident_mib():6.0f} MiB  live {tm.stats().live}", file=sys.stderr)
        if passed > args.seconds + 60:
            print(f"FAILED: clients still wait a minute after the end; {tm.stats()}")
            tm.shutdown(0)
            scheduler.stop()
            return 1
    for one in loops:
        one.join()
    gc.collect()
    problems = soak.wrong[:5]
    live = tm._pipeline.live
    if not live.wait_empty(PATIENCE_S):
        problems.append(f"requests are still live: {tm.stats().live}")
    live.wait_settled(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while (scheduler.running or scheduler._waiting) and time.monotonic() < deadline:
        time.sleep(0.01)  # the aborts are in the ring; the scheduler takes them at its next step
    if scheduler.running or scheduler._waiting:
        problems.append(f"the scheduler still runs {scheduler.running} and holds {len(scheduler._waiting)}")
    end = resident_mib()
    stats = tm.stats()
    tm.shutdown()
    scheduler.stop()
    tables = [
        live._lives,
        live._shown,
        live._asked,
        live._owed,
        live._bytes,
        *(shard._rows for shard in tm._pipeline.shards),
    ]
    tables += [tm._pipeline.ingress.entries, tm._pipeline.ingress.owed]
    if any(map(len, tables)):
        problems.append(f"entries leaked: {[len(table) for table in tables]}")
    if left := [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace")]:
        problems.append(f"threads left: {left}")
    if end > middle * GROWTH + SLACK_MIB:
        problems.append(f"memory grew from {middle:.0f} to {end:.0f} MiB in the second half")
    total = sum(soak.counts.values())
    print(f"{args.clients} clients, {time.monotonic() - began:.0f} s, rings of {args.ring}, seed {args.seed}")
    print(f"  requests        {total:>9,}")
    for name, count in sorted(soak.counts.items()):
        print(f"    {name:<16}{count:>7,}")
    print(f"  tokens          {scheduler.counters['tokens']:>9,}  in {scheduler.counters['steps']:,} steps")
    print(
        f"  aborts sent     {stats.counters.get('aborts_sent', 0):>9,}  ({scheduler.counters['aborts']:,} met a request)"
    )
    print(f"  ring full       {stats.counters.get('refused_ring_full', 0):>9,}")
    print(f"  late chunks     {stats.counters.get('late_chunks', 0):>9,}")
    print(f"  memory          {middle:>9.0f} MiB in the middle, {end:.0f} MiB at the end")
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("nothing lost, nothing doubled, nothing leaked")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--ring", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads-topology", action="store_true", help="a thread per stage, three shards")
    parser.add_argument("--verbose", action="store_true")
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
