"""The ledgers: nothing in them is stale, every promise is checked, every fault and defect has its test, and the words are allowed ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import docs_helpers as docs
import ledger
import pytest

DATA = ledger.load("promises")
CHECKS = {check["id"]: check for check in DATA["check"]}
DEFECTS = ledger.load("defects")["defect"]
FORBIDDEN = ("formally verified", "race-free", "race free", "proved correct", "proven correct", "bug-free")


def test_no_result_is_stale_and_the_page_shows_them() -> None:
    assert ledger.stale() == [], "run python docs/tools/ledger.py run"


@pytest.mark.parametrize("name", CHECKS)
def test_the_last_run_of_a_check_was_complete_and_looked_at_something(name: str) -> None:
    result = ledger.results()[name]
    assert result["ok"]
    assert result["complete"] or result.get("skipped"), "a check that was cut says what was left out"
    assert any(result.get(count) for count in ("searches", "states", "cases", "tests"))


def test_a_changed_command_a_changed_list_and_a_forgotten_check_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ledger.results()
    broken = json.loads(json.dumps(known))
    del broken["tables"]
    broken["house"]["command"] += " -x"
    broken["explorer"]["pins"][0] = "stream, abort: 1 states"
    broken["another"] = broken["kit"]
    monkeypatch.setattr(ledger, "results", lambda: broken)
    assert [line.split(":")[0] for line in ledger.stale()] == ["tables", "explorer", "house", "another"]


def test_a_page_that_does_not_show_the_results_is_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "verification.md"
    page.write_text(ledger.PAGE.read_text("utf-8").replace("complete=true", "complete=maybe"), "utf-8")
    monkeypatch.setattr(ledger, "PAGE", page)
    assert any("verification.md" in line for line in ledger.stale())


def test_what_a_command_prints_is_read_as_it_is_meant() -> None:
    cut = "a: complete=true states=10 x\nb: complete=false states=5 x\n"
    assert ledger.read("headrace check", cut, 1) == {"ok": False, "complete": False, "searches": 2, "states": 15}
    skipped = "SKIPPED [1] tests/a.py:3: no npm\n3 passed, 1 skipped in 1 s\n  - 100 passing, 0 failing\n"
    assert ledger.read("pytest tests/a.py", skipped, 0) == {
        "ok": True,
        "complete": False,
        "tests": 3,
        "examples": 100,
        "skipped": ["no npm"],
    }


def test_every_promise_names_checks_that_exist_and_every_check_serves_a_promise() -> None:
    used = {name for promise in DATA["promise"] for name in promise["checks"]}
    assert used <= set(CHECKS)
    assert set(CHECKS) - used <= {"explorer-keys", "kit-tests"}, "checks of the checks only"
    assert {check["layer"] for check in CHECKS.values()} == set(ledger.LAYERS)


def test_every_promise_is_specified_in_a_clause_or_on_a_page_that_exists() -> None:
    clauses = set(re.findall(r"(?m)^\*\*([a-z]+-\d+)\*\* ", "\n".join(
        page.read_text("utf-8") for page in (docs.ROOT / "docs/spec").glob("*.md")
    )))  # fmt: skip
    for promise in DATA["promise"]:
        for place in promise["spec"]:
            assert place in clauses or (docs.ROOT / "docs" / place).is_file(), place


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_the_files_that_a_check_runs_exist(check: dict[str, str]) -> None:
    for word in check["command"].split():
        if word.startswith("tests/"):
            assert (docs.ROOT / word).is_file()


@pytest.mark.parametrize("defect", DEFECTS, ids=[defect["fix"] for defect in DEFECTS])
def test_a_defect_is_held_by_a_test_that_exists(defect: dict[str, str]) -> None:
    file, _, name = defect["test"].partition("::")
    text = (docs.ROOT / file).read_text("utf-8")
    assert not name or re.search(rf"(?m)^ *(async )?def {name}\(", text)
    assert all(defect[part] for part in ("what", "found_by", "missed", "fix"))


def test_the_kill_matrix_has_dozens_of_faults_and_a_fault_for_every_layer_that_searches() -> None:
    kills = ledger.kills()
    assert len(kills) >= 12
    layers = {layer.split(" (")[0] for kill in kills for layer in kill.layer.split("; ")}
    assert layers >= {
        "formal model",
        "explorer",
        "schedules",
        "linearizability",
        "stateful",
        "simulation",
        "fuzzing",
        "conformance",
    }
    assert all(kill.fault for kill in kills)


@pytest.mark.parametrize("page", docs.PAGES, ids=docs.name)
def test_a_page_claims_no_more_than_was_checked(page: Path) -> None:
    text = " ".join(page.read_text("utf-8").lower().split())
    assert [words for words in FORBIDDEN if words in text] == []
