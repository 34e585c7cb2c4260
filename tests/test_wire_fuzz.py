"""The fuzzer: every target runs clean, every planted fault is found within the CI budget, every finding replays."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wire_helpers as wire
from headrace.codec import ValidationError, decode_frame, fuzz, load_schema, strategies
from headrace.codec.fuzz import CommandSubject, Finding, Subject, engines, minimise, replay, run_fuzz
from headrace.codec.fuzz_export import corpus_files, dictionary, export_kit
from headrace.codec.fuzz_targets import target_named

ROOT = Path(__file__).resolve().parent.parent
V1 = load_schema("v1")
CI_CASES = 1200
"""What CI gives each target; the planted faults must be found within it."""


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_each_target_runs_clean_for_a_bounded_number_of_cases(name: str, tmp_path: Path) -> None:
    report = run_fuzz(name, cases=80, engine="hypothesis", crashes=tmp_path)
    assert report.executions == 80
    assert report.findings == []
    assert report.complete
    assert report.accepted  # sometimes a case gets through …
    assert report.rejected or name in ("finish", "inspect")  # … and sometimes one does not (these two are total)


@pytest.mark.parametrize("name", fuzz.TARGETS)
@pytest.mark.parametrize("data", [b"", b"\x00", b"\x02\xff\xff\xff\xff", b"{", b"\x91\x91", b"\xff" * 40])
def test_a_target_takes_any_bytes_and_returns_nothing(name: str, data: bytes) -> None:
    call: Any = fuzz.TARGETS[name]
    assert call(data) is None


@pytest.mark.parametrize("module", ["strategies", "fuzz"])
def test_without_hypothesis_there_is_one_line_that_says_what_to_install(module: str) -> None:
    code = f"import sys; sys.modules['hypothesis'] = None; import headrace.codec; import headrace.codec.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: headrace.codec.{module} needs Hypothesis: pip install 'headrace[testing]'"


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_the_shipped_corpus_gives_no_finding(name: str) -> None:
    folder = ROOT / "specs" / "corpus" / name
    assert sorted(folder.iterdir())
    for path in sorted(folder.iterdir()):
        assert replay(path, name) in ("accept", "reject"), path.name


def test_the_seeds_of_the_corpus_are_up_to_date() -> None:
    for name, data in corpus_files().items():
        assert (ROOT / name).read_bytes() == data, f"{name}: run python -m headrace.codec.fuzz_export"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("off_by_one", "verdict"),
        ("clamp", "verdict"),
        ("short_column", "verdict"),
        ("foreign", "exception"),
        ("hang", "hang"),
        ("greedy", "memory"),
    ],
)
def test_a_planted_fault_is_found_within_the_ci_budget_and_replays(fault: str, kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "custom": f"wire_planted:{fault}",
        "rejects": "wire_planted:Refused",
        "oracle": True,
        "hang_s": 0.3 if fault == "hang" else 10.0,
        "memory_bytes": 128 << 20,
    }
    report = run_fuzz(cases=CI_CASES, engine="hypothesis", crashes=tmp_path, max_findings=1, **options)
    assert [f.kind for f in report.findings] == [kind], "\n".join(report.lines())
    finding = report.findings[0]
    assert f"--target wire_planted:{fault}" in finding.replay
    assert Path(finding.path).read_bytes() == finding.data
    if kind != "memory":  # the high-water mark of this process has been raised by then
        again = replay(Path(finding.path), **options)
        assert isinstance(again, Finding)
        assert (again.kind, again.where) == (finding.kind, finding.where)


def test_a_decoder_without_a_fault_has_no_findings(tmp_path: Path) -> None:
    report = run_fuzz(
        cases=CI_CASES // 10,
        engine="hypothesis",
        crashes=tmp_path,
        custom="wire_planted:right",
        rejects="wire_planted:Refused",
        oracle=True,
    )
    assert report.findings == []
    assert report.complete
    assert not list(tmp_path.iterdir())


def test_the_naive_decoder_of_the_tests_agrees_with_the_oracle(tmp_path: Path) -> None:
    report = run_fuzz(
        cases=80,
        engine="hypothesis",
        crashes=tmp_path,
        custom=lambda data: wire.naive_decode(data, V1),
        rejects=wire.Reject,
        oracle=True,
    )
    assert [f for f in report.findings if "RecursionError" not in f.where] == []


def test_a_finding_is_made_small() -> None:
    def run(data: bytes) -> None:
        if b"\xc1\xc1" in data:
            raise RuntimeError("two")

    subject = Subject("s", run)
    found = subject.judge(b"abc" * 50 + b"\xc1\xc1" + b"x" * 99)
    assert isinstance(found, Finding)
    assert minimise(subject, found).data == b"\xc1\xc1"


_PROGRAM = """
import sys
data = sys.stdin.buffer.read()
if data[:1] == b"\\x03":
    sys.exit(7)
sys.exit(0 if data[:1] == b"\\x02" else 1)
"""


def test_a_program_in_any_language_is_judged_by_its_exit_status(tmp_path: Path) -> None:
    program = tmp_path / "decoder.py"
    program.write_text(_PROGRAM, "utf-8")
    command = f"{shlex.quote(sys.executable)} -S -E {shlex.quote(str(program))}"
    subject = CommandSubject(command, oracle=V1)
    assert subject.judge(bytes.fromhex("020500000094909090" + "90")) == "accept"
    assert subject.judge(b"") == "reject"
    verdict = subject.judge(b"\x02")
    assert isinstance(verdict, Finding)
    assert (verdict.kind, verdict.where) == ("verdict", "accept header_length")
    died = subject.judge(b"\x03\x92\xa1r\xa1m")
    assert isinstance(died, Finding)
    assert (died.kind, died.where) == ("exit", "exit status 7")
    report = run_fuzz(
        cases=40, engine="hypothesis", crashes=tmp_path / "c", command=command, oracle=True, max_findings=1
    )
    assert report.findings
    assert "--target-cmd" in report.findings[0].replay


@pytest.mark.parametrize(
    "options",
    [
        {"target": "no-such"},
        {"custom": "no_such_module:f"},
        {"custom": "wire_planted:no_such"},
        {"custom": "wire_planted:V1"},
        {"custom": "wire_planted:right", "rejects": "wire_planted:right"},
        {"command": ""},
        {"command": "/no/such/program"},
        {"wire": "v9"},
        {"engine": "no-such"},
    ],
)
def test_an_option_that_means_nothing_is_one_clear_line(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as caught:
        run_fuzz(cases=1, crashes=tmp_path, **options)
    assert "\n" not in caught.value.message


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    def once(seed: int) -> list[bytes]:
        seen: list[bytes] = []
        run_fuzz(cases=90, seed=seed, engine="hypothesis", crashes=tmp_path, custom=seen.append, rejects=ValueError)
        return seen

    assert once(3) == once(3)
    assert once(3) != once(4)


def test_the_report_says_the_engine_and_whether_it_is_complete(tmp_path: Path) -> None:
    report = run_fuzz("finish", cases=20, engine="hypothesis", crashes=tmp_path)
    assert "engine hypothesis" in report.lines()[0]
    assert "complete=true" in report.lines()[0]
    assert engines()[-1] == "hypothesis"


@pytest.mark.skipif("atheris" not in engines(), reason="atheris is not installed here")
def test_atheris_runs_where_it_is_installed(tmp_path: Path) -> None:
    report = run_fuzz("frame-v1", cases=2000, engine="atheris", crashes=tmp_path)
    assert report.executions >= 2000
    assert report.findings == []
    options: dict[str, Any] = {"custom": "wire_planted:off_by_one", "rejects": "wire_planted:Refused", "oracle": True}
    found = run_fuzz(cases=20_000, engine="atheris", crashes=tmp_path, max_findings=1, **options)
    assert [f.kind for f in found.findings] == ["verdict"]


def test_the_kit_for_other_fuzzers_says_what_each_lie_must_give(tmp_path: Path) -> None:
    count = export_kit(tmp_path, V1, target_named("frame-v1"))
    listed = json.loads((tmp_path / "lies.json").read_text("utf-8"))
    assert len(listed) > 40
    for entry in listed:
        assert entry["verdict"] == "reject"
        assert wire.ours((tmp_path / entry["file"]).read_bytes(), V1) == ("reject", entry["rule"])
    assert count == len([p for p in tmp_path.rglob("*") if p.is_file()])
    for line in (tmp_path / "frames.dict").read_text("utf-8").splitlines():
        name, _, token = line.partition("=")
        assert name.isidentifier()
        assert bytes.fromhex(token.strip('"').replace("\\x", "")) == dict(dictionary(V1))[name]
    valid = [p for p in (tmp_path / "corpus").iterdir() if p.name.startswith("valid")]
    for path in valid:
        decode_frame(path.read_bytes(), V1)
    with pytest.raises(ValidationError):
        export_kit(tmp_path / "README.md" / "x", V1, target_named("frame-v1"))


def test_the_command_runs_replays_and_exports(tmp_path: Path) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"custom": "wire_planted:off_by_one", "rejects": "wire_planted:Refused", "oracle": True}
    status = fuzz.command(cases=CI_CASES, engine="hypothesis", crashes=tmp_path, out=lines.append, **options)
    assert status == 1
    assert any("engine hypothesis" in line for line in lines)
    crash = next(tmp_path.glob("verdict-*.bin"))
    assert fuzz.command(replay_file=crash, out=lines.append, **options) == 1
    assert lines[-1].startswith("verdict: it says accept, headrace says reject (data_length)")
    assert fuzz.command("frame-v1", replay_file=crash, out=lines.append) == 0
    assert lines[-1] == "reject"
    assert fuzz.command(export=tmp_path / "kit", wire="v2", out=lines.append) == 0
    assert (tmp_path / "kit" / "lies.json").is_file()


def test_the_example_on_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "fuzzing.md").read_text("utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    space: dict[str, Any] = {}
    # In brackets: by a name that exists, Hypothesis would read the page as the source, which Python 3.13 refuses to tokenise.
    exec(compile(code, "<docs/fuzzing.md>", "exec"), space)
    space["test_every_lie_is_rejected"]()
    for name in re.findall(r"`(\w+)\(", page):
        assert hasattr(strategies, name), name


def test_the_command_line_fuzzes_exports_and_says_a_mistake_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.__main__ import main

    assert main(["fuzz", "finish", "--cases", "30", "--engine", "hypothesis", "--crashes", str(tmp_path)]) == 0
    assert "complete=true" in capsys.readouterr().out
    assert main(["fuzz", "--export", str(tmp_path / "kit")]) == 0
    assert (tmp_path / "kit" / "frames.dict").is_file()
    capsys.readouterr()
    assert main(["fuzz", "no-such"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("headrace: no fuzz target")
    assert told.count("\n") == 1
