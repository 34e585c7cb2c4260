"""Transcripts: what a target answered, kept as data, so that a comparison also runs where the target cannot.

Owns: recording and replay. A transcript holds, for each case and wire, every operation with a checksum of its arguments and the answer
that came, plus the target's hello, the hash of the target's own file, and the hash of the cases. Rules it keeps:

* A replay runs the case itself, judgement included, against the recorded answers; so a changed expectation gives a changed verdict,
  and a changed *step* is noticed (its checksum differs) instead of being answered with something else's answer.
* Time is part of what was recorded: a wait that ran out when recording runs out at once when replayed (see `Replay.clock`).
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from .cases import Case, cases_hash
from .lines import Caller
from .protocol import KitError, TargetFault, check_hello, pack_args, pack_result, unpack_result
from .runner import Known, Outcome, Report, _with_known, missing, run_case

FORMAT: Final = 1
_NOT_CHECKED: Final = ("timeout_s", "config")  # one follows the clock, the other holds a path


def _sum(op: str, args: dict[str, Any]) -> int:
    told = {name: value for name, value in pack_args(op, args).items() if name not in _NOT_CHECKED}
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


class Recorder:
    """A caller that keeps what it sees."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.steps: list[list[Any]] = []

    def call(self, op: str, args: dict[str, Any], limit_s: float) -> Any:
        try:
            result = self._caller.call(op, args, limit_s)
        except TargetFault as fault:
            self.steps.append([op, _sum(op, args), None, str(fault)])
            raise
        self.steps.append([op, _sum(op, args), pack_result(op, result)])
        return result

    def restart(self) -> None:
        self._caller.restart()

    def end(self) -> None:
        self._caller.end()


class Replay:
    """A caller that answers from a transcript of one case."""

    def __init__(self, steps: list[list[Any]]) -> None:
        self._steps = steps
        self._at = 0

    def call(self, op: str, args: dict[str, Any], limit_s: float) -> Any:
        if op == "stop":  # a verdict that is another one than when recording may come earlier
            return None
        if self._at >= len(self._steps):
            raise KitError(f"the transcript ends before {op}: record it anew")
        step = self._steps[self._at]
        if step[0] != op or step[1] != _sum(op, args):
            raise KitError(f"step {self._at} of the transcript is another one than {op}: record it anew")
        self._at += 1
        if len(step) == 4:
            raise TargetFault(step[3])
        return unpack_result(op, step[2])

    def clock(self, op: str) -> float:
        """The time for a wait that is about to call `op`: past every deadline where the recording did not call it any more."""
        more = self._at < len(self._steps) and self._steps[self._at][0] == op
        return 0.0 if more else 1e9

    def restart(self) -> None:
        pass

    def end(self) -> None:
        pass


def record(caller: Caller, cases: Iterable[Case], limit_s: float, **about: Any) -> dict[str, Any]:
    """A transcript of all applicable cases. `about`: what else is to stand in it (the hash of the target's file, a note)."""
    hello = check_hello(caller.call("hello", {}, 60.0))
    kept = []
    for case in cases:
        if missing(case, hello):
            continue
        for wire in case.wires:
            if wire in hello["wires"]:
                recorder = Recorder(caller)
                outcome = run_case(recorder, case, wire, limit_s)
                kept.append({"case": case.id, "wire": wire, "status": outcome.status, "steps": recorder.steps})
    return {"format": FORMAT, "hello": hello, "cases_sha256": cases_hash(), **about, "cases": kept}


def save(transcript: dict[str, Any], path: Path) -> None:
    """Write it, xz-compressed JSON."""
    path.write_bytes(lzma.compress(json.dumps(transcript, separators=(",", ":")).encode(), preset=9))


def load(path: Path) -> dict[str, Any]:
    """Read it. KitError for what is no transcript."""
    try:
        transcript = json.loads(lzma.decompress(path.read_bytes()))
        if transcript["format"] != FORMAT:
            raise KitError(f"{path.name}: format {transcript['format']}")
        return dict(transcript)
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError) as fault:
        raise KitError(f"{path.name}: not a transcript ({type(fault).__name__})") from None


def replay(transcript: dict[str, Any], cases: Iterable[Case], known: Iterable[Known] = ()) -> Report:
    """The kit's verdicts over the recorded answers. KitError where a case and its recording no longer fit together."""
    by_key = {(entry["case"], entry["wire"]): entry for entry in transcript["cases"]}
    report = Report(transcript["hello"], "a transcript")
    listed = list(known)
    for case in cases:
        for wire in case.wires:
            if missing(case, report.hello) or wire not in report.hello["wires"]:
                continue
            entry = by_key.get((case.id, wire))
            if entry is None:
                raise KitError(f"{case.id}[{wire}] is not in the transcript: record it anew")
            answers = Replay(entry["steps"])
            outcome: Outcome = run_case(answers, case, wire, 5.0, clock=answers.clock)
            fits = next((item for item in listed if item.fits(case.id)), None)
            report.outcomes.append(outcome if fits is None else _with_known(outcome, fits))
    return report


def main(root: Path) -> None:
    """Record SGLang's server anew into the checkout `root` (needs its extension; see docs/differences.md)."""
    from .cases import load_cases
    from .lines import python_target
    from .sglang_target import SO_NAME, SO_SHA256, VERSION

    caller = python_target("headrace.specs.conformance.sglang_target:server")
    try:
        kept = record(caller, load_cases(), 1.5, file=SO_NAME, file_sha256=SO_SHA256)
    finally:
        caller.end()
    save(kept, root / "specs" / "transcripts" / f"sglang-{VERSION}.json.xz")


if __name__ == "__main__":
    main(Path.cwd())
