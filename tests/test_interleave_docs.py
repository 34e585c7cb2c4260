"""The page names what the code can say. (Its examples run in test_docs_examples.)"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "interleave.md"


def test_every_kind_of_failure_is_on_the_page_and_in_the_code() -> None:
    package = PAGE.parent.parent / "runtime" / "interleave"
    code = "".join(path.read_text(encoding="utf-8") for path in package.glob("*.py"))
    made = set(re.findall(r'Failure\(\s*"(\w+)"|(?:fail|note)\(\s*"(\w+)"|kind = "(\w+)" if .* else "(\w+)"', code))
    kinds = {name for row in made for name in row if name}
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert kinds == listed
