"""The kit's cases as pytest items. Loaded by `plugin` once a target is given."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .cases import SUITES, Case, load_cases
from .lines import Caller, Process, python_target
from .protocol import KitError, TargetFault, check_hello
from .report import details
from .runner import KNOWN, PASSED, SURPRISE, Known, Report, _with_known, load_known, missing, run_case


class CaseFailed(Exception):
    """A case failed; pytest shows its text and no traceback."""


class ConformanceItem(pytest.Item):
    """One case on one wire revision."""

    def __init__(self, *, case: Case, wire: str, kit: Kit, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case, self.wire, self.kit = case, wire, kit

    def runtest(self) -> None:
        reason = missing(self.case, self.kit.report.hello)
        if reason:
            pytest.skip(f"not applicable: {reason}")
        outcome = run_case(self.kit.caller, self.case, self.wire, self.kit.limit_s)
        listed = next((entry for entry in self.kit.known if entry.fits(self.case.id)), None)
        if listed is not None:
            outcome = _with_known(outcome, listed)
        if outcome.status == KNOWN:
            pytest.xfail(f"{listed.why if listed else ''}: {outcome.message}")
        if outcome.status == SURPRISE:
            raise CaseFailed(f"{outcome.status}: {outcome.known}")
        if outcome.status != PASSED:
            if not self.case.must:
                pytest.xfail(f"SHOULD: {outcome.message}")
            raise CaseFailed("\n".join([outcome.message, *details(self.kit.report, outcome)]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CaseFailed):
            return f"clause {self.case.clause} ({self.case.level}): {excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return Path(f"headrace-{self.case.suite}"), None, self.name


class Kit:
    """What the items of a run share."""

    def __init__(self, caller: Caller, target: str, known: list[Known], limit_s: float) -> None:
        self.caller, self.known, self.limit_s = caller, known, limit_s
        self.report = Report(check_hello(caller.call("hello", {}, 30.0)), target)


def collect(session: pytest.Session, config: pytest.Config) -> Iterable[ConformanceItem]:
    """The items. UsageError for a target that cannot be had."""
    target, program = config.getoption("--headrace-target"), config.getoption("--headrace-exec")
    suites = config.getoption("--headrace-suite")
    try:
        caller = Process(shlex.split(program)) if program else python_target(target)
        config.add_cleanup(caller.end)
        name = f"--exec {shlex.quote(program)}" if program else target
        kit = Kit(
            caller,
            name,
            load_known(config.getoption("--headrace-known-failures")),
            config.getoption("--headrace-time-limit"),
        )
        cases = load_cases(suites=suites.split(",") if suites else SUITES)
    except (KitError, TargetFault) as fault:
        raise pytest.UsageError(f"headrace: {fault}") from None
    kept = []
    for case in cases:
        for wire in case.wires:
            if wire in kit.report.hello["wires"]:
                item = ConformanceItem.from_parent(
                    session,
                    name=f"{case.id}[{wire}]",
                    nodeid=f"headrace::{case.id}[{wire}]",
                    case=case,
                    wire=wire,
                    kit=kit,
                )
                kept.append(item)
    return kept
