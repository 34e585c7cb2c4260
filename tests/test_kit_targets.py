"""The kit on targets: headrace, a naive implementation, its broken variants, and programs that misbehave."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from headrace.runtime.conformance_target import simulation
from headrace.specs.conformance.cases import load_cases
from headrace.specs.conformance.lines import Caller, Direct, Process, python_target, serve
from headrace.specs.conformance.protocol import CAPABILITIES, KitError, TargetFault, check_hello
from headrace.specs.conformance.runner import (
    FAILED,
    KNOWN,
    NOT_APPLICABLE,
    PASSED,
    SURPRISE,
    Known,
    Report,
    run,
    run_case,
)
from kit_helpers import BROKEN, Crashes, FallsSilent, Naive, Talks

CASES = load_cases()
BY_ID = {case.id: case for case in CASES}
THREADS = "headrace.runtime.conformance_target:threads"


@pytest.fixture(autouse=True)
def _targets_can_import_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent))


def failures(report: Report) -> list[str]:
    return [f"{outcome.id}: {outcome.message}" for outcome in report.outcomes if outcome.status == FAILED]


def on(spec: str, **options: Any) -> Report:
    caller = python_target(spec)
    try:
        return run(caller, options.pop("cases", CASES), target=spec, **options)
    finally:
        caller.end()


def test_headrace_conforms_on_both_wires_and_every_case_is_applicable() -> None:
    report = on(THREADS)
    assert failures(report) == []
    assert report.ok
    assert [outcome.id for outcome in report.outcomes if outcome.status == NOT_APPLICABLE] == []
    assert report.counts[PASSED] == sum(len(case.wires) for case in CASES)


def test_headrace_conforms_with_three_shards_and_every_stage_on_its_own_thread() -> None:
    chosen = [
        case
        for case in CASES
        if case.suite in ("machines", "abort", "shutdown", "errors") or case.id.startswith("text.s")
    ]
    report = on("headrace.runtime.conformance_target:threads_apart", cases=chosen, wires=["v1"])
    assert failures(report) == []
    assert report.ok


def test_headrace_in_simulation_conforms() -> None:
    """The same stages, moved by one seeded thread: every case on one wire, all of the others' are the same code."""
    report = run(Direct(simulation), [case for case in CASES if "vector" not in case.steps[0]], wires=["v2"])
    assert failures(report) == []
    assert report.ok


def test_the_naive_implementation_conforms() -> None:
    report = run(Direct(Naive), CASES, limit_s=1.0)
    assert failures(report) == []
    assert report.ok
    assert report.counts[PASSED] > 700


@pytest.mark.parametrize("variant", BROKEN, ids=lambda variant: variant.__name__)
def test_a_broken_variant_is_caught_by_the_case_named_for_it(variant: type[Naive]) -> None:
    outcome = run_case(Direct(variant), BY_ID[BROKEN[variant]], "v2", 0.05)
    assert outcome.status == FAILED
    assert outcome.case.must
    assert outcome.message


def test_no_broken_variant_gets_through_the_whole_kit() -> None:
    """Each is caught with the verdict `does not conform`, not only by its one case (checked on the cases of its suite)."""
    for variant, case_id in BROKEN.items():
        report = run(Direct(variant), [BY_ID[case_id], BY_ID["wire.batch-delivers"]], limit_s=0.05)
        assert not report.ok, variant.__name__


def test_a_crash_fails_its_case_and_the_next_one_runs() -> None:
    cases = [BY_ID["wire.batch-delivers"], BY_ID["sampling.defaults/absent"], BY_ID["errors.refused-stream-status"]]
    report = on("kit_helpers:Crashes", cases=cases, wires=["v1"])
    assert "the target ended (status 3)" in report.outcomes[0].message
    assert [outcome.status for outcome in report.outcomes] == [FAILED] * 3  # every case of this target ends in a push
    assert Crashes is not Naive


def test_silence_fails_its_case_within_the_time_limit_and_the_target_is_started_anew() -> None:
    caller = python_target("kit_helpers:FallsSilent")
    try:
        caller.call("hello", {}, 30.0)
        first = caller._process
        outcome = run_case(caller, BY_ID["wire.batch-delivers"], "v1", 0.5)
        assert "push: no answer within 0.5 s" in outcome.message
        assert caller.call("hello", {}, 30.0)["name"] == "naive"
        assert caller._process is not first
    finally:
        caller.end()
    assert FallsSilent is not Naive


def test_what_a_target_prints_is_kept_apart_from_the_protocol() -> None:
    report = on("kit_helpers:Talks", cases=[BY_ID["wire.batch-delivers"]], wires=["v1"])
    assert failures(report) == []
    assert Talks is not Naive


def test_any_program_that_speaks_json_lines_is_a_target() -> None:
    program = (
        "import sys; from kit_helpers import Naive; from headrace.specs.conformance.lines import serve; "
        "serve(Naive(), sys.stdin, sys.stdout)"
    )
    caller = Process([sys.executable, "-c", program])
    try:
        report = run(caller, [BY_ID["text.split-character.four-chunks"], BY_ID["wire.message-logprobs"]])
    finally:
        caller.end()
    assert failures(report) == []
    assert report.counts[PASSED] == 4


@pytest.mark.parametrize(
    "answer", ["not json", "[]", '{"ok": "yes"}', '{"ok": true, "result": [{"header": 5}]}', '{"result": 1}']
)
def test_an_answer_that_is_no_line_of_the_protocol_is_a_fault_and_not_an_exception(answer: str) -> None:
    script = (
        "import sys, json\n"
        "for line in sys.stdin:\n"
        "    hello = json.dumps({'ok': True, 'result': {'protocol': 1, 'wires': ['v1'], 'capabilities': []}})\n"
        f"    print(hello if 'hello' in line else {answer!r}, flush=True)\n"
    )
    caller = Process([sys.executable, "-c", script])
    try:
        report = run(caller, [BY_ID["wire.batch-delivers"]], limit_s=2.0)
    finally:
        caller.end()
    assert len(failures(report)) == 1


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (None, "object"),
        ({}, "protocol"),
        ({"protocol": 2, "wires": ["v1"], "capabilities": []}, "this kit speaks 1"),
        ({"protocol": 1, "wires": [], "capabilities": []}, "wires"),
        ({"protocol": 1, "wires": ["v1"], "capabilities": ["wings"]}, "wings"),
        ({"protocol": 1, "wires": ["v1"], "capabilities": None}, "capabilities"),
        ({"protocol": 1, "wires": ["v1"], "capabilities": [], "machines": ["request"]}, "machines"),
    ],
)
def test_a_hello_that_cannot_be_used_is_one_clear_line(hello: Any, said: str) -> None:
    with pytest.raises(KitError, match=said):
        check_hello(hello)


class OnlyV1(Naive):
    def hello(self) -> dict[str, Any]:
        return {**super().hello(), "wires": ["v1"], "capabilities": []}


def test_what_a_target_does_not_claim_is_not_applicable_and_never_passed() -> None:
    chosen = [case for case in CASES if case.suite in ("wire", "machines", "shutdown", "abort")]
    report = run(Direct(OnlyV1), chosen, limit_s=1.0)
    for outcome in report.outcomes:
        needs = bool(outcome.case.needs) or "machine" in outcome.case.steps[0] or "v1" not in outcome.case.wires
        assert (outcome.status == NOT_APPLICABLE) == needs, outcome.id
        assert outcome.message or not needs
    assert report.ok


class LaterMachines(Naive):
    def hello(self) -> dict[str, Any]:
        return {**super().hello(), "capabilities": ["machines"], "machines": {"request": 2, "sink": 1}}

    def machine(self, name: str) -> dict[str, Any]:
        return {"states": ["another"]}


def test_a_machine_of_another_revision_is_not_judged_by_this_ones_table() -> None:
    chosen = [BY_ID["machines.table-request"], BY_ID["machines.table-sink"], BY_ID["machines.table-ring"]]
    report = run(Direct(LaterMachines), chosen, wires=["v1"])
    assert [outcome.status for outcome in report.outcomes] == [NOT_APPLICABLE, FAILED, NOT_APPLICABLE]
    assert "revision 2" in report.outcomes[0].message


def test_the_first_line_each_way_is_a_hello_also_after_a_restart(tmp_path: Path) -> None:
    script = (
        "import sys, json\n"
        f"log = open({str(tmp_path / 'log')!r}, 'a')\n"
        "for at, line in enumerate(sys.stdin):\n"
        "    asked = json.loads(line)\n"
        "    print(at, asked['op'], asked.get('protocol'), asked.get('wires'), file=log, flush=True)\n"
        "    if asked['op'] == 'push': sys.exit(1)\n"
        "    hello = {'protocol': 1, 'wires': ['v1'], 'capabilities': []}\n"
        "    print(json.dumps({'ok': True, 'result': hello if asked['op'] == 'hello' else []}), flush=True)\n"
    )
    caller = Process([sys.executable, "-c", script])
    try:
        caller.call("push", {"frame": b""}, 5.0)
    except TargetFault:
        caller.restart()
    try:
        caller.call("drain", {"max": 1, "timeout_s": 0}, 5.0)
    finally:
        caller.end()
    hello = "0 hello 1 ['v1', 'v2']"
    assert (tmp_path / "log").read_text().splitlines() == [hello, "1 push None None", hello, "1 drain None None"]


def test_a_run_in_which_nothing_passed_does_not_conform() -> None:
    assert not run(Direct(OnlyV1), [BY_ID["machines.table-request"]]).ok


def test_a_known_failure_may_fail_one_that_passes_is_an_error_and_so_is_one_that_names_no_case() -> None:
    broken = next(variant for variant in BROKEN if BROKEN[variant] == "text.stop-leftmost")
    cases = [BY_ID["text.stop-leftmost"], BY_ID["wire.batch-delivers"]]

    def verdict(*known: Known) -> tuple[bool, list[str], list[str]]:
        report = run(Direct(broken), cases, known=known, wires=["v1"], limit_s=0.2)
        return report.ok, [outcome.status for outcome in report.outcomes], report.stale

    assert verdict() == (False, [FAILED, PASSED], [])
    assert verdict(Known("text.stop-leftmost", "rightmost")) == (True, [KNOWN, PASSED], [])
    assert verdict(Known("text.stop-leftmost", "r"), Known("wire.batch-delivers", "no")) == (
        False,
        [KNOWN, SURPRISE],
        [],
    )
    assert verdict(Known("text.stop-leftmost", "r"), Known("wire.batch-delivers", "race", True)) == (
        True,
        [KNOWN, PASSED],
        [],
    )
    assert verdict(Known("text.stop-leftmost", "r"), Known("gone.case", "old")) == (
        False,
        [KNOWN, PASSED],
        ["gone.case"],
    )


def test_a_failed_should_does_not_make_the_run_fail() -> None:
    class Mute(Naive):
        def read(self, key: str, timeout_s: float) -> dict[str, Any]:
            told = super().read(key, timeout_s)
            if told["end"] is not None and "error" in told["end"]:
                told["end"]["error"]["message"] = "no"
            return told

    report = run(Direct(Mute), [BY_ID["errors.value-is-named"], BY_ID["wire.batch-delivers"]], limit_s=0.2)
    assert [outcome.status for outcome in report.outcomes] == [FAILED, FAILED, PASSED, PASSED]
    assert report.ok


def test_serve_answers_an_unknown_operation_and_a_line_that_is_no_json() -> None:
    import io

    sink = io.StringIO()
    serve(Naive(), io.StringIO('{"op": "fly"}\nnonsense\n{"op": "machine", "name": "x"}\n'), sink)
    assert sink.getvalue().count('"ok": false') == 3


def test_the_targets_own_capabilities_are_known() -> None:
    for spec in (THREADS, "headrace.runtime.conformance_target:simulation"):
        caller: Caller = python_target(spec)
        try:
            hello = check_hello(caller.call("hello", {}, 30.0))
        finally:
            caller.end()
        assert set(hello["capabilities"]) == set(CAPABILITIES) - {"multimodal", "n"}
