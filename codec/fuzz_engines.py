"""The two engines of `headrace fuzz`: Hypothesis in this process, atheris in a child.

Owns: how cases are made. Rules: every case goes through the run's `case`, so that counting and findings are the same for both;
the seeds come first; a run says whether its budget was used whole (`complete`) and stops early only for enough findings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

from .errors import ValidationError

if TYPE_CHECKING:
    from .fuzz import _Run

_ROUND = 100


def hypothesis(
    run: _Run, inputs: st.SearchStrategy[bytes], seeds: list[bytes], seconds: float | None, cases: int | None, seed: int
) -> bool:
    """Rounds of examples, each with its own seed, until the budget is used or enough is found."""
    end = None if seconds is None else time.monotonic() + seconds

    def spent() -> bool:
        return (end is not None and time.monotonic() >= end) or (cases is not None and run.executions >= cases)

    for data in seeds:
        if spent() or run.done:
            break
        run.case(data)
    mutated = st.builds(_mutate, st.sampled_from(seeds), st.randoms(use_true_random=False)) if seeds else inputs
    both = st.one_of(inputs, inputs, mutated)
    number = 0
    while not spent() and not run.done:
        left = _ROUND if cases is None else min(_ROUND, cases - run.executions)

        @settings(
            max_examples=left,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @with_seed(seed * 1_000_003 + number)
        @given(both)
        def one(data: bytes) -> None:
            if not spent() and not run.done:
                run.case(data)

        one()
        number += 1
    return not run.done


def _mutate(data: bytes, random: Any) -> bytes:
    """A seed with one to three small changes."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(changed))
        way = random.randint(0, 4)
        if way == 0:
            changed[at:at] = random.choice(
                (b"\x00", b"\xc0", b"\xff", b"\x90", b"\x01\x00\x00\x00", b"\xdd\xff\xff\xff\xff")
            )
        elif way == 1:
            del changed[at : at + random.randint(1, 4)]
        elif at < len(changed):
            changed[at] = (
                (changed[at] ^ 1 << random.randint(0, 7)) if way == 2 else (changed[at] + random.choice((1, 255))) & 255
            )
    return bytes(changed)


def atheris(
    run: _Run, options: dict[str, Any], seeds: list[bytes], seconds: float | None, cases: int | None, seed: int
) -> bool:
    """Coverage-guided, in a child: libFuzzer owns its process and never returns, and the code under test must be instrumented
    before it is imported. The child writes the inputs that are findings; this process judges, minimises and counts them."""
    if any(v is not None and not isinstance(v, (str, bool, int, float)) for v in options.values()):
        raise ValidationError("with atheris a target is given by its name (module:callable)", field="engine")
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as scratch:
        folder = Path(scratch)
        for name in ("corpus", "found"):
            (folder / name).mkdir()
        for at, data in enumerate(seeds):
            (folder / "corpus" / f"{at:05}").write_bytes(data)
        flags = [f"-seed={seed + 1}", "-verbosity=0", "-print_final_stats=1", "-rss_limit_mb=4096", "-max_len=65536"]
        flags += [f"-max_total_time={max(1, round(seconds))}"] if seconds is not None else []
        flags += [f"-runs={cases}"] if cases is not None else []
        told = {
            "folder": scratch,
            "options": options,
            "flags": flags,
            "max_findings": run.max_findings,
            "path": sys.path,
        }
        child = subprocess.run([sys.executable, "-c", _CHILD, json.dumps(told)], capture_output=True, check=False)
        try:
            counts = json.loads((folder / "counts.json").read_text("utf-8"))
        except (OSError, ValueError):
            last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise ValidationError(f"the atheris engine did not run: {' '.join(last)}", field="engine") from None
        for path in sorted((folder / "found").iterdir()):
            run.case(path.read_bytes())
        for path in sorted(folder.glob("crash-*")) + sorted(folder.glob("oom-*")) + sorted(folder.glob("timeout-*")):
            run.case(path.read_bytes())
        run.executions, run.accepted, run.rejected = counts["executions"], counts["accepted"], counts["rejected"]
        # The child cannot write at its very end; libFuzzer's own count is exact.
        total = re.search(rb"number_of_executed_units:\s*(\d+)", child.stderr)
        run.executions = max(run.executions, int(total[1]) if total else 0)
        return child.returncode == 0 and not run.done


_CHILD = """
import json, os, sys
told = json.loads(sys.argv[1])
sys.path[:] = told["path"]
import atheris
custom = told["options"].get("custom")
# Only what is under test: instrumenting numpy and Hypothesis as well takes half a minute and guides to nothing.
with atheris.instrument_imports(include=["headrace"] + ([custom.partition(":")[0].partition(".")[0]] if custom else [])):
    from headrace.codec import fuzz
    subject = fuzz.make_subject(**told["options"])[0]
counts = {"executions": 0, "accepted": 0, "rejected": 0}
seen = set()
def write():
    path = os.path.join(told["folder"], "counts.json")
    with open(path + ".new", "w") as out:
        json.dump(counts, out)
    os.replace(path + ".new", path)
def one(data):
    counts["executions"] += 1
    got = subject.judge(data)
    if isinstance(got, fuzz.Finding):
        if (got.kind, got.where) not in seen:
            seen.add((got.kind, got.where))
            with open(os.path.join(told["folder"], "found", "%03d" % len(seen)), "wb") as out:
                out.write(data)
            write()
            if len(seen) >= told["max_findings"]:
                os._exit(0)
    elif got == "accept":
        counts["accepted"] += 1
    else:
        counts["rejected"] += 1
    if counts["executions"] % 500 == 0 or counts["executions"] < 20:
        write()
write()
atheris.Setup(["fuzz", os.path.join(told["folder"], "corpus"), "-artifact_prefix=" + told["folder"] + "/", *told["flags"]], one)
atheris.Fuzz()
"""
