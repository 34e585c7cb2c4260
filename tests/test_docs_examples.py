"""Every Python block of the README and the docs runs, in a process of its own, as a reader would run it; and so does every shell line
that calls headrace.

A block that must not run says so in the line above it: `<!-- not run: why -->`. A block with a title is a file that the reader is told
to write. A shell line that ends with `# exit status 1` is meant to end so.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import docs_helpers as docs
import pytest

NOT_RUN = {
    "my_package.adapter": "is the reader's own code",
    "./my-server": "is the reader's own program",
    "./decoder": "is the reader's own program",
    "path/to/": "is the reader's own file",
    "sglang_target": "needs SGLang's extension; tests/test_kit_sglang.py runs it where that is there",
    "headrace conform headrace.runtime.conformance_target:threads ": "the whole kit; tests/test_kit_targets.py runs it",
    "--rust-so": "needs SGLang's extension",
    "headrace bench": "the benchmark: tests/test_cli_commands.py runs a row of it",
}
"""Shell lines that hold one of these are not run, and why. One that no page has any more is a mistake here."""

PROGRAMS = [page for page in docs.PAGES if docs.program(page)]
SHELLS = [page for page in docs.PAGES if any(docs.shell_lines(page))]


@pytest.fixture
def reader(tmp_path: Path) -> dict[str, str]:
    """A reader's shell: `headrace` and `python` are this interpreter's, warnings are errors, and there are two prompts in a file."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("headrace", " -m headrace"), ("python", "")):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W error{module} "$@"\n')
        script.chmod(0o755)
    (tmp_path / "prompts.txt").write_text("It is\nMr. Darcy\n")
    return {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}


def _program(page: Path, folder: Path, environment: dict[str, str]) -> None:
    for block in docs.blocks(page):
        if block.title:
            (folder / block.title).write_text(block.code, "utf-8")
    (folder / "example.py").write_text(docs.program(page), "utf-8")
    done = subprocess.run(
        ["python", "example.py"], capture_output=True, text=True, timeout=60, cwd=folder, env=environment, check=False
    )
    assert done.returncode == 0, f"{page}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PROGRAMS, ids=docs.name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, reader: dict[str, str]) -> None:
    _program(page, tmp_path, reader)


@pytest.mark.parametrize("page", SHELLS, ids=docs.name)
def test_the_shell_lines_of_a_page_run_and_end_as_they_say(page: Path, tmp_path: Path, reader: dict[str, str]) -> None:
    _program(page, tmp_path, reader)
    for line in docs.shell_lines(page):
        if any(words in line for words in NOT_RUN):
            continue
        command, _, note = line.partition(" #")
        wanted = re.search(r"exit status (\d)", note)
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=100, cwd=tmp_path, env=reader,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == (int(wanted[1]) if wanted else 0), f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr


def test_every_reason_not_to_run_a_line_is_still_needed() -> None:
    lines = [line for page in docs.PAGES for line in docs.shell_lines(page)]
    assert [words for words in NOT_RUN if not any(words in line for line in lines)] == []


def test_an_example_that_fails_is_noticed(tmp_path: Path, reader: dict[str, str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError, match="1 == 2"):
        _program(page, tmp_path, reader)


def test_the_readme_and_the_tutorial_have_examples() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/scheduler.md"} <= {docs.name(page) for page in PROGRAMS}
