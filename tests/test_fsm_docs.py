"""Everything generated is up to date, complete and says what the tables say."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from fsm_helpers import ALL
from headrace.fsm import MACHINES, docs
from headrace.fsm.diagram import pictures

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).resolve().parent.parent  # of the checkout: an installed package holds no docs/
PAGE = ROOT / docs.PAGE


def test_every_generated_file_is_up_to_date() -> None:
    assert docs.stale(ROOT) == [], "run `python -m headrace.fsm.docs`"


def test_generated_names_every_machine_export_and_diagram_and_nothing_else_lies_there() -> None:
    files = set(docs.generated(ROOT))
    assert files >= {f"specs/machines/{name}.json" for name in MACHINES}
    assert {f"specs/machines/{p.name}" for p in (ROOT / "specs/machines").glob("*.json")} - files == {
        "specs/machines/machine.schema.json"
    }
    assert {f"docs/machines/{p.name}" for p in (ROOT / "docs/machines").iterdir()} <= files


def test_a_stale_or_missing_file_is_named(tmp_path: Path) -> None:
    for path in docs.generated(ROOT):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    assert docs.stale(tmp_path) == []
    for path in docs.generated(ROOT):
        kept = (tmp_path / path).read_text()
        changed = kept.replace("ABORTED", "GONE") if path == docs.PAGE else kept + " "
        (tmp_path / path).write_text(changed)
        assert docs.stale(tmp_path) == [path]
        (tmp_path / path).write_text(kept)
    (tmp_path / "docs/machines/request.svg").unlink()
    assert docs.stale(tmp_path) == ["docs/machines/request.svg"]


def test_without_the_page_only_the_exports_are_generated(tmp_path: Path) -> None:
    assert set(docs.generated(tmp_path)) == {f"specs/machines/{name}.json" for name in MACHINES}


@pytest.mark.parametrize("change", ["missing", "unknown", "doubled"])
def test_a_block_that_is_missing_unknown_or_doubled_is_named(change: str) -> None:
    page = PAGE.read_text()
    block = "<!-- generated: sink -->"
    new = {"missing": "", "unknown": "<!-- generated: drain -->", "doubled": "<!-- generated: request -->"}[change]
    with pytest.raises(ValueError, match="sink"):
        docs.fill(page.replace(block, new))


def test_a_walk_through_that_the_machines_refuse_cannot_be_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = docs.WALKS["walk-stream"]
    monkeypatch.setitem(docs.WALKS, "walk-stream", walk[:-1])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="unfinished"):
        docs.generated(ROOT)


def test_the_page_answers_what_happens_when_a_client_disconnects_while_tokenising() -> None:
    section = (
        PAGE.read_text().split("## The client disconnects while its request is being tokenised")[1].split("\n## ")[0]
    )
    assert "| TOKENIZING | DISCONNECT | ABORTED |" in section
    assert "| NOT_PUSHED | ABORT_GUARD | CANCELLED_LOCALLY |" in section
    assert "| ABORTED | TOKENIZE_DONE | *absorbed* |" in section
    assert "RING_TOOK" not in section


def test_every_link_inside_the_page_leads_somewhere() -> None:
    page = PAGE.read_text()
    anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.+)$", page, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors
    for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page):
        assert (PAGE.parent / image).is_file()


def test_diagrams_show_every_state_and_mark_the_terminal_ones() -> None:
    for machine in ALL:
        drawn, marked = set(), 0
        for text in pictures(machine).values():
            root = ET.fromstring(text)
            drawn |= {t.text for t in root.iter(f"{SVG}text") if t.get("class") == "name"}
            marked += sum(1 for r in root.iter(f"{SVG}rect") if r.get("class") == "terminal")
        if machine.name == "ring":
            assert {f"{a}_{b}" for a in drawn for b in drawn} >= {state.name for state in machine.states}
        else:
            assert drawn - {"any live state"} == {state.name for state in machine.states}
            assert marked == len(machine.terminal)


def test_diagrams_draw_every_move() -> None:
    for machine in ALL:
        labels = {
            t.text
            for text in pictures(machine).values()
            for t in ET.fromstring(text).iter(f"{SVG}text")
            if t.get("class") == "label"
        }
        moved = {e.name for e in machine.events if any(machine.outcome(s, e) == "move" for s in machine.states)}
        assert labels == moved
