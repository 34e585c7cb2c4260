"""The kit's data: cases, clauses, differences, pages, and what is said about a file with a mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from headrace import specs
from headrace.specs.conformance.cases import SUITES, case_files, load_cases
from headrace.specs.conformance.frames import LIES, with_lie
from headrace.specs.conformance.pages import clauses, generated
from headrace.specs.conformance.protocol import CAPABILITIES, OPS, KitError, Target
from headrace.specs.conformance.runner import load_known
from headrace.specs.conformance.steps import VERBS

ROOT = Path(__file__).resolve().parent.parent
CASES = load_cases()
NAMED = {clause for page in clauses(ROOT / "docs" / "spec").values() for clause in page}


def test_every_clause_has_a_case_and_every_case_a_clause() -> None:
    assert NAMED - {case.clause for case in CASES} == set()
    assert {case.clause for case in CASES} - NAMED == set()
    assert len(NAMED) > 80


def test_every_clause_has_a_case_that_runs_where_only_frames_and_requests_are_spoken() -> None:
    """Not only golden vectors: a front-end without a separate decoder is checked on every clause but those of special abilities."""
    plain = {case.clause for case in CASES if not case.needs}
    special = NAMED - plain
    assert special == {
        "abort-3", "abort-4", "abort-6", "abort-7", "adm-8", "adm-9", "adm-13", "adm-14", "adm-17", "err-5", "mach-1", "shut-4",
        "shut-6", "shut-7", "text-6", "text-19", "wire-10", "wire-11", "wire-12", "wire-15", "wire-16", "wire-3",
    }  # fmt: skip


def test_clause_numbers_have_no_holes_and_stand_on_one_page() -> None:
    for page, texts in clauses(ROOT / "docs" / "spec").items():
        prefix = {clause.split("-")[0] for clause in texts}
        assert len(prefix) == 1, page
        assert [int(clause.split("-")[1]) for clause in texts] == list(range(1, len(texts) + 1)), page


def test_the_generated_pages_are_up_to_date() -> None:
    for name, text in generated(ROOT / "docs").items():
        assert (ROOT / "docs" / name).read_text("utf-8") == text, (
            f"run python -m headrace.specs.conformance.pages for {name}"
        )


def test_every_difference_names_cases_and_clauses_that_exist() -> None:
    data = json.loads(specs.path("cases", "differences.json").read_text("utf-8"))
    assert [entry["id"] for entry in data["differences"]] == [
        f"D{at + 1:02d}" for at in range(len(data["differences"]))
    ]
    known = load_known(specs.path("cases", "differences.json"))
    for entry in known:
        assert any(entry.fits(case.id) for case in CASES), entry.case
    for entry in data["differences"] + data["not_found"]:
        assert entry["clause"] in NAMED, entry
    for entry in data["not_found"]:
        assert entry["case"] is None or any(case.id == entry["case"] for case in CASES), entry


def test_the_format_page_speaks_of_every_verb_and_no_other() -> None:
    text = specs.path("cases", "README.md").read_text("utf-8")
    table = text.split("| verb | does |")[1].split("\n\n")[0]
    told = set()
    for row in table.splitlines():
        cell = row.split("|")[1] if row.startswith("|") else ""
        told |= set(re.findall(r"(?:^|; |`, )`(\w+)`", cell.strip()))
    assert set(VERBS) <= told | {"error", "result"}
    assert told <= set(VERBS) | {
        "lie",
        "max",
        "expect",
        "body",
        "items",
        "positions",
        "length",
        "cells",
        "until_ids",
        "fields",
        "answer",
    }


def test_every_suite_has_cases_for_both_wires_and_ids_begin_with_their_suite() -> None:
    for suite in SUITES:
        some = [case for case in CASES if case.suite == suite]
        assert {wire for case in some for wire in case.wires} == {"v1", "v2"}
        assert all(case.id.startswith(f"{suite}.") for case in some)


def test_the_protocol_documents_every_operation_and_capability() -> None:
    page = (ROOT / "docs" / "conformance.md").read_text("utf-8")
    for op in OPS:
        assert f"`{op}`" in page, op
    methods = {name for name in vars(Target) if not name.startswith("_")}
    assert methods <= set(OPS)
    used = {need for case in CASES for need in case.needs}
    assert used <= set(CAPABILITIES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "format must be 1"),
        ("{", "Expecting"),
        ('{"format": 2, "suite": "text", "cases": []}', "format must be 1"),
        ('{"format": 1, "suite": "nope", "cases": []}', "suite one of"),
        ('{"format": 1, "suite": "text", "cases": [{"id": "x"}]}', "level must be"),
        ('{"format": 1, "suite": "text", "cases": [{"clause": "x"}]}', "without an id"),
        (
            '{"format": 1, "suite": "text", "cases": [{"id": "x", "level": "MUST", "clause": "c", "steps": []}]}',
            "steps are missing",
        ),
        ('{"format": 1, "suite": "text", "cases": [{"id": "x", "bogus": 1}]}', "bogus"),
        (
            '{"format": 1, "suite": "text", "cases": [{"id": "x", "level": "MUST", "clause": "c", "needs": ["wings"], "steps": [{}]}]}',
            "wings",
        ),
    ],
)
def test_a_mistake_in_a_case_file_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cases.json"
    file.write_text(text)
    with pytest.raises(KitError, match=said) as caught:
        load_cases([file])
    assert "\n" not in str(caught.value)


def test_a_case_with_a_table_stands_for_one_case_per_entry(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    case = {
        "id": "text.x", "clause": "text-1", "level": "MUST", "each": {"one": {"v": 1}, "two": {"v": [2]}}, "config": {"context_len": {"$": "v"}},
        "steps": [{"open": "a", "body": {"input_ids": {"$": "v"}}}],
    }  # fmt: skip
    file.write_text(json.dumps({"format": 1, "suite": "text", "cases": [case]}))
    one, two = load_cases([file])
    assert (one.id, one.config["context_len"], one.steps[0]["body"]) == ("text.x/one", 1, {"input_ids": 1})
    assert (two.id, two.steps[0]["body"]) == ("text.x/two", {"input_ids": [2]})


def test_case_ids_are_unique(tmp_path: Path) -> None:
    case = {"id": "text.x", "clause": "text-1", "level": "MUST", "steps": [{"shutdown": 0}]}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"format": 1, "suite": "text", "cases": [case, case]}))
    with pytest.raises(KitError, match=r"text\.x"):
        load_cases([file])
    assert len({case.id for case in CASES}) == len(CASES)


def test_an_unknown_lie_is_a_mistake_of_the_case() -> None:
    from headrace.codec import load_schema

    with pytest.raises(KitError, match="fib"):
        with_lie(b"\x02\x00\x00\x00\x00", {"fib": 1}, load_schema("v1"))
    assert len(LIES) == 8


def test_case_files_are_one_per_suite() -> None:
    assert [file.stem for file in case_files()] == list(SUITES)
