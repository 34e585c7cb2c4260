"""docs/benchmarks.md: what is measured and how, and the numbers of the last run out of docs/ledger/bench.json.

headrace bench --rust-so FILE --tokenizer-dir DIR --json docs/ledger/bench.json --plot docs/bench.svg
python docs/tools/bench_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.runtime.bench.report import verdicts

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "docs" / "ledger" / "bench.json"
PAGE = ROOT / "docs" / "benchmarks.md"


def page() -> str:
    """The page in Markdown."""
    result: dict[str, Any] = json.loads(DATA.read_text("utf-8"))
    found = [verdict for row in result["rows"] for *_, verdict in verdicts(row)]
    reached, missed = found.count("reached"), sum(verdict.startswith("not reached") for verdict in found)
    unmeasured = found.count("not measured")
    rest = f", {unmeasured} could not be measured in this run" if unmeasured else ""
    out = [
        "# Benchmarks",
        "",
        "Written from `docs/ledger/bench.json` by `python docs/tools/bench_page.py`; do not edit.",
        "",
        "What is measured is **frame to text, without HTTP**: the CPU from a scheduler's frame in the egress ring to the delta in the",
        "hands of whoever serves the client. Every number is a ratio to a peer that was measured in the same run, in turns, because",
        "machines change speed within minutes; of each, the least of several rounds counts. Less is better.",
        "",
        "```sh",
        "headrace bench --rounds 3                    # without the compiled peer",
        "headrace bench --rust-so _server.so --tokenizer-dir tokenizer --json bench.json --plot bench.svg",
        "```",
        "",
        "The peers:",
        "",
        "- **Rust server, two threads**: SGLang's compiled server, fed the same frames over its scheduler port. Only the CPU of the two",
        "  threads that turn frames into text is counted, read per thread; its HTTP, JSON and sockets are not, because they are not in",
        "  our number either. How to get the extension is said in [differences](differences.md).",
        "- **DecodeStream.step**: one call of the `tokenizers` library per token, and nothing else: no frame, no routing, no stops, no delivery.",
        "- **bare asyncio.Event**: as many tasks that only wake. **encode_batch_fast**: the tokenizer library alone.",
        "- **headrace, plain**: the same workload without the extra that the row is about.",
        "",
        "Rows are *flooded* unless they say otherwise: 64 steps wait in the ring before the first is served, as they do where the front-end",
        "is what everybody waits for (the Rust server is fed as fast as it takes). Steps that differ in nothing but their ids are then served",
        "together. *Step by step* is the other end: one step is pushed and served before the next one comes. *Paced* rows run the real threads,",
        "with a step every few milliseconds, so that every step finds cold caches and sleeping threads; a plan that names no pace is held",
        "against both.",
        "",
        f"## Results: {reached} targets reached, {missed} not reached{rest}",
        "",
        (f"Machine: {result['machine']}. "
        f"{', '.join(f'{name} {number}' for name, number in result['versions'].items())}. {result['rounds']} rounds; "
        f"tokenizer: {result['tokenizer']}."),
        "",
        "![Ratios of headrace to its peers, with the targets](bench.svg)",
        "",
        "| what | headrace | peer | | ratio | target | |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["rows"]:
        for at, (peer, ratio, target, verdict) in enumerate(verdicts(row)):
            name = f"{row['name']} | {row['ours']:.3g} {row['unit']}" if at == 0 else " | "
            there = f"{row['peers'][peer]:.3g}" if ratio is not None else "–"
            shown = f"{ratio:.3g}" if ratio is not None else "–"
            want = f"≤ {target:.3g}" if target is not None else ""
            bold = f"**{verdict}**" if verdict.startswith("not reached") else verdict
            out.append(f"| {name} | {peer} | {there} | {shown} | {want} | {bold} |")
    out += [
        "",
        "The targets are those of the project's plan, and were set from a sketch without features. Where one is not reached it says so;",
        "nothing is left out because of its number. *limit* is a time of its own and not a peer; *two bare hand-overs* is what the same",
        "machine needs in the same minutes to wake two sleeping threads one after the other, with no work in between.",
        "",
        "### Floors",
        "",
        "What nobody can do without, for 256 requests with one id each per frame:",
        "",
        "| floor | CPU µs per token |",
        "|---|---|",
        *(f"| {name} | {value:.4f} |" for name, value in result["floors"].items()),
        "",
        "## Other benchmarks",
        "",
        "Scripts in `benchmarks/`, each a ratio to a peer of the same run: `bench_text.py` (the text engine alone), `bench_codec.py`",
        "(frames), `bench_fsm.py` (the machines), `bench_rings.py` (rings beside `queue.Queue` and ZeroMQ), `bench_echo.py` (the whole",
        "manager, ring to reader), `soak.py` (thousands of clients that come, read and leave).",
        "",
    ]
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
