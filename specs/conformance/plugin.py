"""The pytest plugin: `pytest --headrace-target=MODULE:FACTORY` adds one test per case and wire revision.

Owns: options and items. It is loaded in every pytest run of an environment that has headrace in it, so it imports nothing but the
standard library and pytest until the option is given (a test holds that).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("headrace", "conformance of a tokenizer manager (headrace)")
    group.addoption("--headrace-target", metavar="MODULE:FACTORY", help="run the conformance kit against this target")
    group.addoption("--headrace-exec", metavar="COMMAND", help="or against this program, which speaks JSON lines")
    group.addoption("--headrace-suite", metavar="NAMES", help="only these suites of the kit, with commas between")
    group.addoption("--headrace-known-failures", metavar="FILE", help="cases known to fail, with reasons")
    group.addoption("--headrace-time-limit", type=float, default=5.0, metavar="S", help="seconds that a step may take")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among the items
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[Any]) -> None:
    target, program = config.getoption("--headrace-target"), config.getoption("--headrace-exec")
    if target is not None or program is not None:
        from .pytest_items import collect

        items.extend(collect(session, config))


def pytest_report_header(config: pytest.Config) -> Iterable[str]:
    target = config.getoption("--headrace-target") or config.getoption("--headrace-exec")
    return [f"headrace: conformance of {target}"] if target else []
