"""Reading the documentation: its pages, their code blocks and their shell lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_BLOCK = re.compile(
    r'(?P<above>[^\n]*)\n```(?P<kind>python|sh)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)```', re.DOTALL
)


class Block(NamedTuple):
    """A fenced block: `title` is the file that the reader is told to write it to, or ""."""

    kind: str
    title: str
    code: str


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The Python and shell blocks of a page that are meant to run: not those with `<!-- not run: why -->` in the line above."""
    return [
        Block(m["kind"], m["title"] or "", m["code"])
        for m in _BLOCK.finditer("\n\n" + page.read_text("utf-8"))
        if "not run:" not in m["above"]
    ]


def program(page: Path) -> str:
    """The Python blocks of a page as one program, so that later ones may use earlier ones; those with a title are files instead."""
    return "\n".join(block.code for block in blocks(page) if block.kind == "python" and not block.title)


def shell_lines(page: Path) -> Iterator[str]:
    """Lines of the shell blocks that call headrace, or Python on a file of the page."""
    for block in blocks(page):
        if block.kind == "sh":
            yield from (line for line in block.code.splitlines() if re.match(r"headrace |python \w+\.py", line))


def mentioned(page: Path) -> Iterator[str]:
    """Every call of the command line that a page mentions: in shell blocks, indented blocks and inline code."""
    text = page.read_text("utf-8")
    yield from (
        m[1]
        for m in re.finditer(r"(?m)^ *(headrace [^\n#]*)", "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)))
    )
    yield from (m[1] for m in re.finditer(r"(?m)^    (headrace [^\n#]*)", text))
    yield from (m[1] for m in re.finditer(r"`(headrace [^`\n]*)`", text))
