"""`headrace conform` and the pytest plugin."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from headrace.__main__ import main
from headrace.specs.conformance.command import Options, conform
from headrace.specs.conformance.lines import Direct
from headrace.specs.conformance.report import junit, line, page, summary
from headrace.specs.conformance.runner import FAILED, run, run_case
from kit_helpers import BROKEN, Naive, NoFlush

TESTS = Path(__file__).resolve().parent
# without the options of the run that this one is part of (workers, coverage): they are not a user's
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))},
    "PYTHONPATH": str(TESTS),
}


@pytest.fixture(autouse=True)
def _targets_can_import_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def test_a_conforming_target_exits_0_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "kit_helpers:Naive", "--suite", "errors", "--wire", "v1"]) == 0
    out = capsys.readouterr().out
    assert "verdict   conforms" in out
    assert "not applicable" in out


def test_a_failed_case_prints_its_clause_a_replay_and_its_bytes_and_the_replay_fails_the_same_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["conform", "kit_helpers:NoFlush", "--suite", "text", "--wire", "v2"]) == 1
    out = capsys.readouterr().out
    assert "text.flush/length[v2]  clause text-4" in out
    replay = next(text for text in out.splitlines() if "replay:" in text and "text.flush/length" in text).split(":", 1)[
        1
    ]
    shown = next(text for text in out.splitlines() if "frame:" in text)
    assert main(shlex.split(replay)[1:]) == 1
    again = capsys.readouterr().out
    assert "text.flush/length[v2]  clause text-4" in again
    kept = sorted((tmp_path / "frames").iterdir())
    assert main(["inspect", "--wire", "v2", str(kept[-1])]) == 0
    assert "length" in capsys.readouterr().out
    digits = shown.split("echo ")[1].split(" ")[0]
    (tmp_path / "frame.hex").write_text(digits)
    assert main(["inspect", "--wire", "v2", "--hex", str(tmp_path / "frame.hex")]) == 0


def test_junit_and_html_say_the_same_as_the_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    options = Options(
        target="kit_helpers:CutsAtTheLast", suite="text", junit=str(tmp_path / "j.xml"), html=str(tmp_path / "h.html")
    )
    assert conform(options, out) == 1
    suites = ElementTree.parse(tmp_path / "j.xml").getroot()
    failed = [case.get("name") for case in suites.iter("testcase") if case.find("failure") is not None]
    skipped = [case.get("name") for case in suites.iter("testcase") if case.find("skipped") is not None]
    assert failed
    assert skipped
    for name in failed:
        assert f"failed         {name}" in out.getvalue()
    suite = suites.find("testsuite")
    assert suite is not None
    assert (int(suite.get("failures", "0")), int(suite.get("skipped", "0"))) == (len(failed), len(skipped))
    text = (tmp_path / "h.html").read_text("utf-8")
    assert all(str(name) in text for name in failed + skipped)
    assert "<script" not in text


def test_reports_hold_whatever_a_target_says() -> None:
    class Nasty(Naive):
        def read(self, key: str, timeout_s: float) -> dict[str, object]:
            raise RuntimeError("\x00\x1b[31m<script>&\ud800\ufffe]]>\n")

    report = run(Direct(Nasty), [case for case in _cases() if case.id == "wire.batch-delivers"], target="a b")
    ElementTree.fromstring(junit(report).encode())
    assert "<script>" not in page(report)
    page(report).encode("utf-8", "strict") if "\ud800" not in page(report) else None
    assert "does not conform" in "\n".join(summary(report))
    assert line(report.outcomes[0])


def _cases() -> list[object]:
    from headrace.specs.conformance.cases import load_cases

    return list(load_cases())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a target"),
        (["kit_helpers:Naive", "--exec", "x"], "give a target"),
        (["kit_helpers"], "MODULE:FACTORY"),
        (["no_such_module:x"], "cannot be imported"),
        (["kit_helpers:no_such"], "has no no_such"),
        (["--exec", "/no/such/program"], "cannot be started"),
        (["kit_helpers:Naive", "--suite", "nope"], "unknown suite nope"),
        (["kit_helpers:Naive", "--case", "nope"], "no case is called nope"),
        (["kit_helpers:Naive", "--cases", "/no/such/file"], "file"),
        (["kit_helpers:Naive", "--known-failures", "/no/such/file"], "known failures"),
        (["kit_helpers:Naive", "--case", "wire.batch-delivers", "--junit", "/no/such/folder/x"], "/no/such/folder/x"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_list_shows_every_case_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--list", "--suite", "shutdown"]) == 0
    out = capsys.readouterr().out
    assert "shutdown.drains" in out
    assert "shut-4" in out


def pytest_run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_plugin(), *arguments]
    return subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)


def _plugin() -> list[str]:
    """Named by hand only where the environment's install does not have the entry point yet."""
    from importlib.metadata import entry_points

    there = any(point.name == "headrace" for point in entry_points(group="pytest11"))
    return [] if there else ["-p", "headrace.specs.conformance.plugin"]


def test_the_pytest_plugin_adds_one_test_per_case_and_wire(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    done = pytest_run(
        tmp_path, "--headrace-target=kit_helpers:Naive", "--headrace-suite=shutdown,errors", "--junitxml=j.xml"
    )
    assert done.returncode == 0, done.stdout
    names = {case.get("name") for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase")}
    assert {"test_own", "shutdown.drains[v1]", "errors.after-a-chunk[v2]"} <= names


def test_the_pytest_plugin_fails_with_the_clause_and_a_replay_and_heeds_known_failures(tmp_path: Path) -> None:
    arguments = ["--headrace-target=kit_helpers:NoFlush", "--headrace-suite=text", "-k", "flush and length or smileys"]
    done = pytest_run(tmp_path, *arguments)
    assert done.returncode == 1
    assert "clause text-4 (MUST)" in done.stdout
    assert "headrace conform kit_helpers:NoFlush --case text.flush/length" in done.stdout
    assert "2 failed, 2 passed" in done.stdout
    known = tmp_path / "known.json"
    known.write_text(json.dumps([{"case": "text.flush/*", "why": "not yet"}]))
    done = pytest_run(tmp_path, *arguments, f"--headrace-known-failures={known}")
    assert done.returncode == 0, done.stdout
    assert "2 xfailed" in done.stdout
    known.write_text(json.dumps([{"case": "text.two-smileys.at-seven", "why": "wrong"}]))
    assert (
        "passes, though known to fail" in pytest_run(tmp_path, *arguments, f"--headrace-known-failures={known}").stdout
    )


def test_a_target_that_cannot_be_had_is_a_usage_error_of_pytest(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--headrace-target=no_such_module:x")
    assert done.returncode == 4
    assert "cannot be imported" in done.stdout + done.stderr


def test_the_plugin_loads_neither_numpy_nor_tokenizers_nor_msgspec_without_its_option() -> None:
    program = (
        "import sys, headrace.specs.conformance.plugin; "
        "print([name for name in ('numpy', 'tokenizers', 'msgspec', 'hypothesis', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_broken_variant_named_on_the_command_line_is_the_one_in_the_table() -> None:
    assert BROKEN[NoFlush] == "text.flush/length"
    case = next(one for one in _cases() if one.id == "text.flush/length")  # type: ignore[attr-defined]
    assert run_case(Direct(NoFlush), case, "v1", 0.2).status == FAILED  # type: ignore[arg-type]
