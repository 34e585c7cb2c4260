"""Normative data: wire schemas, exported machines, vectors, corpora. Floor 0: this module imports nothing of headrace.

Everything here is data that another implementation can read without Python; `path()` is the only code.
"""

from importlib.resources import files
from pathlib import Path


def path(*parts: str) -> Path:
    """The file (or folder) of shipped data named by `parts`, e.g. ``path("wire", "v1.toml")``.

    headrace is installed unpacked (it is never run from a zip), so this is a real path.
    """
    return Path(str(files(__package__).joinpath(*parts)))
