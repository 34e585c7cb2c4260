"""Cases as data: read, checked, and spread out into single ones.

Owns: the shape of `specs/cases/*.json`. A file is ``{"format": 1, "suite": NAME, "cases": [CASE, …]}``; a case is

    {"id": "text.split-character", "clause": "text-2", "level": "MUST", "needs": ["logprobs"], "wires": ["v1", "v2"],
     "about": "one line", "config": {…}, "steps": [STEP, …]}

`needs` (capabilities), `wires` (default: both), and `config` may be left out. A case with ``"each": {NAME: VALUES}`` stands for one
case per entry: its id is ID/NAME, and ``{"$": "x"}`` anywhere in its steps is replaced by the entry's value of x. Steps are explained
in `steps.py` and in specs/cases/README.md. Everything wrong with a file is one KitError that names the case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ... import specs
from .protocol import CAPABILITIES, KitError

FORMAT: Final = 1
SUITES: Final = ("wire", "machines", "admission", "sampling", "text", "abort", "shutdown", "errors")
DEFAULT_CONFIG: Final[Mapping[str, Any]] = {"tokenizer": "byte-level", "context_len": 256, "vocab_size": 260}
_KEYS: Final = frozenset({"id", "clause", "level", "needs", "wires", "about", "config", "steps", "each"})


@dataclass(frozen=True)
class Case:
    """One case, ready to run on one of its wire revisions."""

    id: str
    suite: str
    clause: str
    level: str
    about: str
    needs: tuple[str, ...]
    wires: tuple[str, ...]
    config: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]

    @property
    def must(self) -> bool:
        return self.level == "MUST"


def tokenizer_folder(name: str) -> Path:
    """The folder of one of the kit's tokenizers ("byte-level", "byte-fallback")."""
    folder = specs.path("cases", "tokenizers", name)
    if not folder.is_dir():
        raise KitError(f"there is no tokenizer {name!r} in specs/cases/tokenizers")
    return folder


def case_files() -> list[Path]:
    """The shipped case files, one per suite."""
    return [specs.path("cases", f"{suite}.json") for suite in SUITES]


def cases_hash(files: Iterable[Path] | None = None) -> str:
    """sha256 over the case files and the wire vectors: a transcript names the cases it was made with."""
    digest = hashlib.sha256()
    for file in files if files is not None else case_files():
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def load_cases(files: Iterable[Path] | None = None, suites: Iterable[str] = SUITES) -> list[Case]:
    """All cases of `files` (default: the shipped ones) in `suites`, spread out, in order. KitError for a file with a mistake."""
    wanted = set(suites)
    unknown = wanted - set(SUITES)
    if unknown:
        raise KitError(f"unknown suite {', '.join(sorted(unknown))}; known: {', '.join(SUITES)}")
    cases: list[Case] = []
    for file in files if files is not None else case_files():
        try:
            data = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as fault:
            raise KitError(f"{file.name}: {fault}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("suite") not in SUITES:
            raise KitError(f"{file.name}: format must be {FORMAT} and suite one of {', '.join(SUITES)}")
        if data["suite"] in wanted:
            for raw in data["cases"]:
                cases += _spread(raw, data["suite"], file.name)
    if "wire" in wanted and files is None:
        cases += vector_cases()
    twice = {case.id for case in cases if sum(other.id == case.id for other in cases) > 1} if _twice(cases) else set()
    if twice:
        raise KitError(f"case ids that stand twice: {', '.join(sorted(twice))}")
    return cases


def _twice(cases: list[Case]) -> bool:
    return len({case.id for case in cases}) != len(cases)


def _spread(raw: Mapping[str, Any], suite: str, origin: str) -> list[Case]:
    name = raw.get("id")
    where = f"{origin}: {name}"
    unknown = set(raw) - _KEYS
    if not isinstance(name, str) or unknown:
        raise KitError(f"{where}: unknown keys {sorted(unknown)}" if unknown else f"{origin}: a case without an id")
    if raw.get("level") not in ("MUST", "SHOULD"):
        raise KitError(f"{where}: level must be MUST or SHOULD")
    if not isinstance(raw.get("clause"), str) or not isinstance(raw.get("steps"), list) or not raw["steps"]:
        raise KitError(f"{where}: clause and steps are missing")
    needs = tuple(raw.get("needs", ()))
    if set(needs) - set(CAPABILITIES):
        raise KitError(f"{where}: unknown capability {sorted(set(needs) - set(CAPABILITIES))}")
    config = {**DEFAULT_CONFIG, **raw.get("config", {})}
    common = {
        "suite": suite,
        "clause": raw["clause"],
        "level": raw["level"],
        "about": raw.get("about", ""),
        "needs": needs,
        "wires": tuple(raw.get("wires", ("v1", "v2"))),
    }
    if "each" not in raw:
        return [Case(id=name, config=config, steps=tuple(raw["steps"]), **common)]
    return [
        Case(id=f"{name}/{entry}", config=_fill(config, values), steps=tuple(_fill(raw["steps"], values)), **common)
        for entry, values in raw["each"].items()
    ]


def _fill(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, dict):
        if set(part) == {"$"}:
            return values[part["$"]]
        return {key: _fill(value, values) for key, value in part.items()}
    if isinstance(part, list):
        return [_fill(value, values) for value in part]
    return part


def vector_cases() -> list[Case]:
    """One case per golden vector of `specs/vectors/egress-*.json`, for targets that can judge a frame by itself."""
    cases = []
    for wire in ("v1", "v2"):
        for at, vector in enumerate(json.loads(specs.path("vectors", f"egress-{wire}.json").read_text("utf-8"))):
            cases.append(
                Case(
                    id=f"wire.vector-{wire}/{at:03d}",
                    suite="wire",
                    clause="wire-1" if vector["verdict"] == "accept" else "wire-2",
                    level="MUST",
                    about=vector["name"],
                    needs=("codec",),
                    wires=(wire,),
                    config=dict(DEFAULT_CONFIG),
                    steps=({"vector": vector},),
                )
            )
    return cases
