"""The generated pages: which clause is covered by which case, and how SGLang's server differs.

Owns: `docs/coverage.md` and `docs/differences.md`. Both are written from data (the clauses in docs/spec, the cases, the numbered
differences) and a test fails when they are stale. Run ``python -m headrace.specs.conformance.pages`` in a checkout to write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ... import specs
from .cases import Case, load_cases

_CLAUSE: Final = re.compile(r"^\*\*([a-z]+-\d+)\*\* (.+?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def clauses(folder: Path) -> dict[str, dict[str, str]]:
    """The numbered clauses of the pages in `folder`: page name -> clause -> text."""
    return {
        page.stem: {clause: " ".join(text.split()) for clause, text in _CLAUSE.findall(page.read_text("utf-8"))}
        for page in sorted(folder.glob("*.md"))
    }


def coverage(pages: Mapping[str, Mapping[str, str]], cases: list[Case]) -> str:
    """The page that shows which clause is covered by what."""
    out = [
        "# Which clause is covered by what",
        "",
        "Written from the clauses in `docs/spec/` and the cases in `specs/cases/` by `python -m headrace.specs.conformance.pages`;",
        "do not edit. An id that ends with `/*` stands for one case per entry of its table; *n* is the number of cases.",
        "",
    ]
    for page, texts in pages.items():
        out += [f"## [{page}](spec/{page}.md)", "", "| clause | n | cases |", "|---|---|---|"]
        for clause in texts:
            ids = [case.id for case in cases if case.clause == clause]
            groups = list(dict.fromkeys(f"{case_id.split('/')[0]}/*" if "/" in case_id else case_id for case_id in ids))
            out.append(f"| {clause} | {len(ids)} | {', '.join(f'`{group}`' for group in groups)} |")
        out.append("")
    return "\n".join(out)


def differences(data: Mapping[str, Any]) -> str:
    """The page on SGLang's real server."""
    out = [
        f"# Differences from {data['target']} {data['version']}",
        "",
        "Written from `specs/cases/differences.json` by `python -m headrace.specs.conformance.pages`; do not edit. Every entry was seen on",
        "the running server by the named case, which is a known failure there: if it passes one day, the run of the kit fails until the",
        "entry is taken out. *Sometimes* marks a race on the server's side.",
        "",
        "To run the comparison yourself (extra `interop`; CPython 3.11 on Linux x86-64): nothing of SGLang is installed, only its compiled",
        "extension is taken out of its wheel, by",
        "",
        "```sh",
        f"pip download --no-deps sglang=={data['version']}",
        "unzip -j sglang-*.whl 'sglang/srt/rust_extensions/_server*.so'",
        "export HEADRACE_SGLANG_SO=$PWD/_server.cpython-311-x86_64-linux-gnu.so",
        "headrace conform headrace.specs.conformance.sglang_target:server --known-failures specs/cases/differences.json",
        "```",
        "",
        "Without the variable the adapter does the same by itself and keeps the file in the user's cache; with `HEADRACE_OFFLINE=1` it",
        f"does not. The file's SHA-256 must be `{data['so_sha256']}`.",
        f"What the server answered is also kept, in `specs/transcripts/sglang-{data['version']}.json.xz`, and the tests judge those answers",
        "anew on every run, on every platform.",
        "",
    ]
    for entry in data["differences"]:
        cases = ", ".join(f"`{case}`" for case in entry["cases"])
        out += [
            f"## {entry['id']} {entry['title']}",
            "",
            f"Clause {entry['clause']}. Seen by {cases}{' (sometimes)' if entry.get('sometimes') else ''}.",
            "",
            f"- Theirs: {entry['theirs']}",
            f"- Ours: {entry['ours']}",
            f"- Why: {entry['why']}",
            "",
        ]
    out += ["## Suspected, and not found", ""]
    for entry in data["not_found"]:
        case = f" Case `{entry['case']}`." if entry["case"] else ""
        out.append(f"- *{entry['claim']}* ({entry['clause']}). {entry['found']}{case}")
    return "\n".join(out) + "\n"


def generated(docs: Path) -> dict[str, str]:
    """Each generated page by its name."""
    data = json.loads(specs.path("cases", "differences.json").read_text("utf-8"))
    return {
        "coverage.md": coverage(clauses(docs / "spec"), load_cases()),
        "differences.md": differences(data),
    }


def main(root: Path) -> None:
    """Write the pages of the checkout `root`."""
    for name, text in generated(root / "docs").items():
        (root / "docs" / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path.cwd())
