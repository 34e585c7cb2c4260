"""`headrace bench`: runs the rows, prints them as a table, writes JSON and draws the plot.

Owns: the command, the shape of its JSON, and the picture. A target that is not reached is said to be not reached; a peer that is not
there is said to be not measured. Neither changes the exit status: a benchmark reports, it does not judge.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Final

from ... import specs
from ..._version import __version__
from ...codec.errors import ValidationError, show
from ..text.tokenize import load_tokenizer

SLACK: Final = 1.25
"""A ratio within this of its target is told apart from one that is far off: short runs scatter that much."""

_PACKAGES: Final = ("numpy", "msgspec", "tokenizers", "fastokens")


def run_command(
    out: IO[str],
    *,
    rust_so: str | None = None,
    tokenizer_dir: str | None = None,
    rounds: int = 5,
    scale: float = 1.0,
    only: str = "",
    json_to: str | None = None,
    plot_to: str | None = None,
) -> int:
    """Measures and prints; 0, or ValidationError for a file that is not there or cannot be written."""
    if rust_so is not None and tokenizer_dir is None:
        raise ValidationError("--rust-so needs --tokenizer-dir: the folder that its server reads the tokenizer from")
    for wanted in (rust_so, tokenizer_dir):
        if wanted is not None and not Path(wanted).exists():
            raise ValidationError(f"{show(wanted)} does not exist")
    for file in (json_to, plot_to):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ValidationError(f"{show(file)} cannot be written: there is no such folder")
    from .rows import floors, measure, rows

    tokenizer = load_tokenizer(tokenizer_dir if tokenizer_dir is not None else specs.path("data", "tokenizer.json"))
    text = specs.path("data", "text.txt").read_text("utf-8")
    with ExitStack() as stack:
        rust = None
        if rust_so is not None and tokenizer_dir is not None:
            from .rust import rust_peer

            size = tokenizer.get_vocab_size(with_added_tokens=True)
            try:
                rust = stack.enter_context(rust_peer(Path(rust_so), Path(tokenizer_dir), vocab_size=size))
            except (ImportError, FileNotFoundError, AttributeError) as error:
                raise ValidationError(f"{show(rust_so)} cannot be loaded: {error}") from None
        chosen = [row for row in rows(tokenizer, text, rust, scale=scale) if only in row.name]
        if not chosen:
            raise ValidationError(f"no row is called {show(only)}")
        found = [
            {"name": row.name, "unit": row.unit, "ours": row.ours, "peers": row.peers, "targets": row.targets}
            for row in measure(chosen, rounds, lambda name: print(f"… {name}", file=sys.stderr))
        ]
        result: dict[str, Any] = {
            "machine": machine(),
            "versions": versions(rust_so),
            "rounds": rounds,
            "scale": scale,
            "tokenizer": Path(tokenizer_dir).name if tokenizer_dir is not None else "specs/data/tokenizer.json",
            "floors": floors(tokenizer, text),
            "rows": found,
        }
    out.write("".join(f"{line}\n" for line in lines(result)))
    if json_to is not None:
        Path(json_to).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if plot_to is not None:
        Path(plot_to).write_text(plot(result), "utf-8")
    return 0


def machine() -> str:
    """Processor, cores and load, in a line."""
    model = platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    except OSError:  # not Linux
        pass
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"


def versions(rust_so: str | None) -> dict[str, str]:
    """What was measured, with versions."""
    found = {"headrace": __version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if rust_so is not None:
        found["Rust server"] = _server(rust_so)
    return found


def _server(rust_so: str) -> str:
    """Which server the extension is; by its hash, because it does not say."""
    known = json.loads(specs.path("cases", "differences.json").read_text("utf-8"))
    digest = hashlib.sha256(Path(rust_so).read_bytes()).hexdigest()
    if digest == known.get("so_sha256"):
        return f"{known['target']} {known['version']}"
    return f"unknown ({digest[:12]})"


def verdicts(row: dict[str, Any]) -> list[tuple[str, float | None, float | None, str]]:
    """(peer, ratio, target, verdict) of every peer of a row; a target whose peer was not there is "not measured"."""
    found: list[tuple[str, float | None, float | None, str]] = []
    for peer in dict.fromkeys([*row["targets"], *row["peers"]]):
        target = row["targets"].get(peer)
        if peer not in row["peers"]:
            found.append((peer, None, target, "not measured"))
            continue
        ratio = row["ours"] / row["peers"][peer]
        found.append((peer, ratio, target, "" if target is None else _verdict(ratio, target)))
    return found


def _verdict(ratio: float, target: float) -> str:
    if ratio <= target:
        return "reached"
    return "not reached" if ratio > SLACK * target else "not reached, within 25 %"


def lines(result: dict[str, Any]) -> list[str]:
    """The table for a terminal."""
    out = [
        (
            "frame to text, without HTTP; every number is the least of "
            f"{result['rounds']} rounds, and a ratio is headrace over the peer"
        ),
        f"machine: {result['machine']}",
        "versions: " + ", ".join(f"{name} {number}" for name, number in result["versions"].items()),
        "",
    ]
    for row in result["rows"]:
        out.append(f"{row['name']:<40} {row['ours']:>10.3f} {row['unit']}")
        for peer, ratio, target, verdict in verdicts(row):
            there = f"{row['peers'][peer]:>10.3f}   ratio {ratio:<8.3f}" if ratio is not None else " " * 26
            want = f"target {target:<8.3f}{verdict}" if target is not None else ""
            out.append(f"  {peer:<38} {there} {want}".rstrip())
    out += ["", "floors, CPU µs per token with 256 requests in a frame:"]
    out += [f"  {name:<38} {value:>10.4f}" for name, value in result["floors"].items()]
    return out


# ---- the picture

_LEFT, _WIDTH, _STEP = 470, 460, 22


def plot(result: dict[str, Any]) -> str:
    """Bars of the ratios on a logarithmic axis, and a mark at each target. SVG with text that a reader can select."""
    bars = [
        (row["name"], peer, ratio, target, verdict)
        for row in result["rows"]
        for peer, ratio, target, verdict in verdicts(row)
        if ratio is not None
    ]
    numbers = [value for _, _, ratio, target, _ in bars for value in (ratio, target) if value]
    low = math.floor(math.log10(min([*numbers, 0.1])))
    high = math.ceil(math.log10(max([*numbers, 10.0])))

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * _WIDTH

    height = 70 + _STEP * len(bars)
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 80} {height}" '
            'font-family="sans-serif" font-size="12" role="img">'
        ),
        "<title>headrace over its peers: less is better</title>",
        f'<rect width="100%" height="{height}" fill="white"/>',
        (
            '<text x="10" y="20" font-size="14">headrace / peer, CPU (or time) of the same work, logarithmic; less is better; '
            "the dark mark is the target</text>"
        ),
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        out.append(f'<line x1="{at:.1f}" y1="34" x2="{at:.1f}" y2="{height - 24}" stroke="#ccc"/>')
        out.append(f'<text x="{at:.1f}" y="{height - 8}" text-anchor="middle">{10.0**power:g}</text>')
    out.append(f'<line x1="{x(1):.1f}" y1="34" x2="{x(1):.1f}" y2="{height - 24}" stroke="#555"/>')
    out += _bars(bars, x, x(10.0**low))
    return "\n".join([*out, "</svg>"]) + "\n"


def _bars(bars: Sequence[tuple[str, str, float, float | None, str]], x: Any, left: float) -> list[str]:
    out = []
    for at, (name, peer, ratio, target, verdict) in enumerate(bars):
        y = 40 + at * _STEP
        colour = "#2a9d5c" if verdict == "reached" else "#d98324" if verdict.startswith("not reached") else "#8aa4bf"
        says = f"{name}: {ratio:.3g} of {peer}" + (f", target {target:.3g} {verdict}" if target is not None else "")
        out.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)} / {escape(peer)}</text>')
        out.append(
            f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, x(ratio) - left):.1f}" height="15" fill="{colour}">'
            f"<title>{escape(says)}</title></rect>"
        )
        out.append(f'<text x="{max(x(ratio), left) + 4:.1f}" y="{y + 12}">{ratio:.3g}</text>')
        if target is not None:
            out.append(
                f'<line x1="{x(target):.1f}" y1="{y - 2}" x2="{x(target):.1f}" y2="{y + 17}" stroke="#222" stroke-width="2"/>'
            )
    return out
