"""The reference pages that need no hand: the Python API from docstrings and signatures, the command line from its own help.

They are written when the site is built (`hooks.py`), so they cannot be stale. ``python docs/tools/reference.py api`` prints one.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MODULES: dict[str, str] = {
    "headrace": "The face of the package: the names most programs need, loaded when they are used.",
    "headrace.runtime": "The manager and what is around it: configuration, handles, rings, embedded schedulers, simulation.",
    "headrace.codec": "Messages, frames, sampling parameters, finish reasons, errors. Knows no threads and no clocks.",
    "headrace.codec.strategies": "Hypothesis strategies, for tests of your own code (extra `testing`).",
    "headrace.fsm": "The machines as tables, their exports, traces and the validator.",
    "headrace.runtime.interleave": "Every schedule of a threaded object ([how to](../interleave.md)).",
    "headrace.specs.conformance.protocol": "What a target of the conformance kit is ([how to](../conformance.md)).",
}


def api() -> str:
    """The API page in Markdown."""
    out = ["# Python API", "", "Written from the docstrings when this site is built.", ""]
    out += [f"- [`{name}`](#{_anchor(name)}): {says}" for name, says in MODULES.items()]
    for name, says in MODULES.items():
        module = importlib.import_module(name)
        out += ["", f"## {name} {{ #{_anchor(name)} }}", "", says, ""]
        for public in names(module):
            out += _entry(name, public, getattr(module, public))
    return "\n".join(out) + "\n"


def names(module: types.ModuleType) -> list[str]:
    """The public names of a module: `__all__`, or what it defines itself without an underscore."""
    found = getattr(module, "__all__", None)
    if found is None:
        found = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return sorted(found, key=lambda name: (name.casefold(), name))


def _anchor(name: str) -> str:
    return name.replace(".", "-")


def _entry(module: str, name: str, value: Any) -> list[str]:
    head = [f"### {name} {{ #{_anchor(module)}-{name} }}", ""]
    home = getattr(value, "__module__", module)
    if module == "headrace" and isinstance(value, type):
        there = next((m for m in list(MODULES)[1:] if name in names(importlib.import_module(m))), None)
        if there is not None:
            return [*head, f"See [`{there}.{name}`](#{_anchor(there)}-{name}).", ""]
    if isinstance(value, type) and issubclass(value, enum.Enum):
        members = ", ".join(f"`{member.name}`" for member in value)
        return [*head, *_doc(value), f"Members: {members}.", ""]
    if isinstance(value, type):
        return [*head, *_class(name, value)]
    if callable(value) and isinstance(home, str):
        return [*head, *_signature(name, value), *_doc(value)]
    return [*head, f"`{type(value).__name__}`" + (f" `{value!r}`" if isinstance(value, (int, str)) else ""), ""]


def _class(name: str, value: type) -> list[str]:
    out = [*_signature(name, value), *_doc(value)]
    for member, raw in _members(value):
        found = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        if isinstance(found, property):
            out += [f"**`.{member}`** {_first(found)}", ""]
        elif inspect.isfunction(found):
            out += [
                f"**`.{member}{_parameters(found, skip_first=not isinstance(raw, staticmethod))}`**",
                "",
                *_doc(found),
            ]
    return out


def _members(value: type) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for owner in value.__mro__:
        if not owner.__module__.startswith("headrace"):
            continue
        for name, raw in vars(owner).items():
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                if inspect.getdoc(raw):
                    yield name, raw


def _signature(name: str, value: Callable[..., Any]) -> list[str]:
    parameters = _parameters(value)
    if not parameters:
        return []
    if len(name) + len(parameters) > 100:
        parameters = re.sub(r", (?=\**\w+(?::|=|,|\))|\*, |/, )", ",\n    ", parameters.replace("(", "(\n    ", 1))
        parameters = parameters.replace("*,\n    ", "*, ")
    return ["```text", f"{name}{parameters}", "```", ""]


def _parameters(value: Callable[..., Any], *, skip_first: bool = False) -> str:
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return ""
    parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
    shown = [p.replace(default=_Shown(p.default)) if p.default is not p.empty else p for p in parameters]
    text = str(signature.replace(parameters=shown))
    text = re.sub(r"'([^']*)'(?=[,)=]| =|$)", r"\1", text)  # annotations are strings; their quotes say nothing
    return re.sub(r"\bheadrace(\.\w+)+\.(\w+)", r"\2", text).replace(
        " -> None", "" if inspect.isclass(value) else " -> None"
    )


class _Shown:
    """A default as a reader wants it: without addresses, short."""

    def __init__(self, value: Any) -> None:
        text = repr(value)
        self.text = "…" if len(text) > 40 or " at 0x" in text else text.replace("'", '"')

    def __repr__(self) -> str:
        return self.text


def _doc(value: Any) -> list[str]:
    text = inspect.cleandoc(value.__doc__) if isinstance(getattr(value, "__doc__", None), str) else ""
    if isinstance(value, type) and text.startswith(f"{value.__name__}("):
        text = ""  # what a dataclass or a named tuple writes by itself
    return [re.sub(r"``(.+?)``", r"`\1`", text), ""] if text else []


def _first(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


# ---- command line


def commands() -> list[str]:
    """Every command as it is typed: `demo`, `spec export`, …"""
    import typer.main
    from headrace.__main__ import app

    return [path for path, _ in _walk(typer.main.get_command(app), "")]


def _walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in sorted(getattr(command, "commands", {}).items()):
        where = f"{path} {name}".strip()
        if getattr(child, "commands", None):
            yield from _walk(child, where)
        else:
            yield where, child


def cli() -> str:
    """The command line page in Markdown: what `--help` says, command by command."""
    import typer.main
    from headrace.__main__ import app

    root = typer.main.get_command(app)
    out = [
        "# Command line",
        "",
        "Written from the commands' own help when this site is built. `headrace` and `python -m headrace` are the same.",
        "A mistake on the command line or in a file is one clear line and exit status 2; 1 means that what was asked about",
        "is broken or incomplete.",
        "",
    ]
    for path, command in _walk(root, ""):
        context = command.make_context(f"headrace {path}", ["--help"], resilient_parsing=True)
        context.max_content_width = context.terminal_width = 100
        out += [f"## headrace {path}", "", "```text", command.get_help(context).strip(), "```", ""]
    return "\n".join(out)


PAGES: dict[str, Callable[[], str]] = {"reference/api.md": api, "reference/cli.md": cli}
"""Pages below `docs/` that exist only in the built site."""


if __name__ == "__main__":
    sys.stdout.write({"api": api, "cli": cli}[sys.argv[1]]())
