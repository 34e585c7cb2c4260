"""Lists that must agree are compared as sets: pages and the site's navigation, commands, limits, error codes, links."""

import ast
import json
import re
from pathlib import Path

import bench_page
import docs_helpers as docs
import pytest
import reference
from headrace.codec import errors, limits
from headrace.runtime.bench.report import plot

DOCS = docs.ROOT / "docs"
NAV = re.findall(r"(?m)^ +- [^:\n]+: (\S+\.md)$", (docs.ROOT / "mkdocs.yml").read_text("utf-8"))
FILES = {str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md")}


def test_the_navigation_has_every_page_once_and_nothing_else() -> None:
    assert len(NAV) == len(set(NAV))
    assert set(NAV) == FILES | set(reference.PAGES)


def test_the_command_line_page_has_every_command() -> None:
    page = reference.cli()
    assert set(re.findall(r"(?m)^## headrace (.+)$", page)) == set(reference.commands())
    assert {"demo", "bench", "check", "conform", "fuzz", "simulate", "trace", "spec export"} <= set(
        reference.commands()
    )


OPTIONS = {
    command: set(re.findall(r"--[\w-]+", section))
    for command, _, section in (part.partition("\n") for part in re.split(r"(?m)^## headrace ", reference.cli())[1:])
}


@pytest.mark.parametrize("page", docs.PAGES, ids=docs.name)
def test_a_page_mentions_only_commands_and_options_that_exist(page: Path) -> None:
    for call in docs.mentioned(page):
        words = call.split()[1:]
        if not words or words[0].startswith(("-", "…")):
            continue
        two = " ".join(words[:2])
        command = two if two in OPTIONS else words[0]
        if command == "spec":  # `headrace spec` by itself
            continue
        assert command in OPTIONS, f"{call}: there is no such command"
        options = {word.split("=")[0] for word in re.split(r"[ |]", call.split("--exec")[0]) if word.startswith("--")}
        assert options <= OPTIONS[command], f"{call}: no such option"


def test_every_command_is_used_on_some_page() -> None:
    used = {" ".join(call.split()[1:3]) for page in docs.PAGES for call in docs.mentioned(page)}
    assert [name for name in reference.commands() if not any(f"{call} ".startswith(f"{name} ") for call in used)] == []


def test_the_page_on_limits_names_every_limit() -> None:
    text = (DOCS / "limits.md").read_text("utf-8")
    declared = {limit.name for limit in limits.LIMITS.values()}
    assert set(re.findall(r"(?m)^\| `(\w+)` ", text)) == declared


def test_the_page_on_errors_names_every_code_and_no_other() -> None:
    text = (DOCS / "errors.md").read_text("utf-8")
    classes = [errors.HeadraceError]
    for found in classes:
        classes += found.__subclasses__()
    declared = {(found.__name__, found.code) for found in classes[1:] if found.__module__ == errors.__name__}
    assert set(re.findall(r"(?m)^\| `(\w+)` \| `(\w+)` \|", text)) == declared


@pytest.mark.parametrize("page", docs.PAGES, ids=docs.name)
def test_a_relative_link_leads_to_something(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
        if "://" in target:
            continue
        there = (page.parent / target).resolve()
        generated = str(there.relative_to(DOCS.resolve())) if there.is_relative_to(DOCS.resolve()) else ""
        assert there.exists() or generated in reference.PAGES, f"{target} is not there"


def test_the_api_page_has_every_public_name_with_words() -> None:
    page = reference.api()
    for module in ("headrace.codec", "headrace.fsm", "headrace.runtime"):
        section = page.split(f"\n## {module} ")[1].split("\n## ")[0]
        entries = dict(re.findall(r"(?ms)^### (\w+) \{[^\n]*\}\n(.*?)(?=^### |\Z)", section))
        source = docs.ROOT / module.split(".")[1] / "__init__.py"
        assert set(entries) == _exported(source)
        empty = [
            name for name, text in entries.items() if name[0].islower() and len(text.split("```")[-1].strip()) < 10
        ]
        assert empty == [], "public functions without a docstring"


def _exported(source: Path) -> set[str]:
    for node in ast.parse(source.read_text("utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            assert node.value is not None
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{source} has no __all__")


def test_the_benchmark_page_shows_the_numbers_that_are_kept() -> None:
    assert bench_page.PAGE.read_text("utf-8") == bench_page.page(), "run python docs/tools/bench_page.py"
    data = json.loads(bench_page.DATA.read_text("utf-8"))
    assert (DOCS / "bench.svg").read_text("utf-8") == plot(data)
    assert "frame to text, without HTTP" in bench_page.page()
