"""What mkdocs calls while it builds the site: adds the pages that are written at that moment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import reference


def on_files(files: Files, config: Any) -> Files:
    """Adds the reference pages."""
    for path, write in reference.PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files
