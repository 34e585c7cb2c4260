"""Every Python block of the README and the docs runs, in a process of its own, as a reader would run it.

A block that must not run says so in the line above it: `<!-- not run: why -->`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(?P<above>[^\n]*)\n```python\n(?P<code>.*?)```", re.DOTALL)


def _blocks() -> list[tuple[str, str]]:
    """(page and number, code) of every block; the blocks of one page are one program, so that later ones may use earlier ones."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        blocks = [m["code"] for m in _BLOCK.finditer("\n\n" + page.read_text("utf-8")) if "not run:" not in m["above"]]
        if blocks:
            found.append((str(page.relative_to(ROOT)), "\n".join(blocks)))
    return found


@pytest.mark.parametrize(("page", "code"), _blocks(), ids=[page for page, _ in _blocks()])
def test_the_examples_of_a_page_run(page: str, code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, f"{page}:\n{done.stdout}\n{done.stderr}"


def test_the_readme_has_an_example() -> None:
    assert "README.md" in dict(_blocks())
