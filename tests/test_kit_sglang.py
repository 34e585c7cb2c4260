"""SGLang's real server: what it answered (everywhere), and what it answers now (where its extension runs)."""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
from headrace import specs
from headrace.codec import load_schema
from headrace.specs.conformance import sglang_target, transcript
from headrace.specs.conformance.cases import cases_hash, load_cases
from headrace.specs.conformance.frames import Received
from headrace.specs.conformance.lines import Direct, python_target
from headrace.specs.conformance.protocol import KitError
from headrace.specs.conformance.runner import FAILED, KNOWN, PASSED, SURPRISE, load_known, run
from kit_helpers import Naive
from kit_sglang import need_server

CASES = load_cases()
KNOWN_FILE = specs.path("cases", "differences.json")
RECORDED = specs.path("transcripts", f"sglang-{sglang_target.VERSION}.json.xz")
TRANSCRIPT = transcript.load(RECORDED)


def test_the_recorded_answers_differ_from_the_specification_exactly_as_the_list_of_differences_says() -> None:
    known = load_known(KNOWN_FILE)
    report = transcript.replay(TRANSCRIPT, CASES, known)
    assert [(one.id, one.message) for one in report.outcomes if one.status in (FAILED, SURPRISE)] == []
    assert report.counts[KNOWN] > 40
    assert report.counts[PASSED] > 300
    seen = {entry.case for entry in known for one in report.outcomes if one.status == KNOWN and entry.fits(one.case.id)}
    assert seen >= {entry.case for entry in known if not entry.sometimes}


def test_the_transcript_names_its_version_its_file_and_the_cases_it_was_made_with() -> None:
    differences = json.loads(KNOWN_FILE.read_text("utf-8"))
    assert TRANSCRIPT["hello"]["version"] == sglang_target.VERSION == differences["version"]
    assert TRANSCRIPT["file_sha256"] == sglang_target.SO_SHA256 == differences["so_sha256"]
    assert TRANSCRIPT["cases_sha256"] == cases_hash(), "the cases have changed: record the transcript anew"


def test_a_changed_expectation_changes_the_verdict_and_a_changed_step_is_noticed() -> None:
    case = next(one for one in CASES if one.id == "text.stop-in-one-chunk")
    steps: list[Any] = json.loads(json.dumps(case.steps))
    steps[-1]["expect"]["text"] = "another"
    changed = type(case)(**{**vars(case), "steps": tuple(steps)})
    assert transcript.replay(TRANSCRIPT, [changed]).outcomes[0].status == FAILED
    steps[0]["body"]["sampling_params"] = {}
    changed = type(case)(**{**vars(case), "steps": tuple(steps)})
    with pytest.raises(KitError, match="record it anew"):
        transcript.replay(TRANSCRIPT, [changed])


def test_a_recording_of_a_run_gives_the_runs_own_verdicts_again(tmp_path: Path) -> None:
    chosen = [case for case in CASES if case.suite in ("abort", "shutdown", "text")]
    kept = transcript.record(Direct(Naive), chosen, 0.3)
    transcript.save(kept, tmp_path / "t.xz")
    report = transcript.replay(transcript.load(tmp_path / "t.xz"), chosen)
    assert (
        [one.status for one in report.outcomes]
        == [entry["status"] for entry in kept["cases"]]
        == [PASSED] * len(kept["cases"])
    )


@pytest.mark.parametrize(
    "content", [b"", b"no xz", lzma.compress(b"{}"), lzma.compress(b'{"format": 9}'), lzma.compress(b"[]")]
)
def test_a_file_that_is_no_transcript_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.xz").write_bytes(content)
    with pytest.raises(KitError, match=r"t\.xz"):
        transcript.load(tmp_path / "t.xz")


def test_an_extension_that_is_not_the_known_file_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "other.so"
    file.write_bytes(b"other")
    monkeypatch.setenv("HEADRACE_SGLANG_SO", str(file))
    monkeypatch.setattr(sglang_target, "wrong_platform", lambda: "")
    with pytest.raises(OSError, match="is not the file"):
        sglang_target.fetch()


def test_nothing_is_fetched_offline_and_a_wrong_platform_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_SGLANG_SO", raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("HEADRACE_OFFLINE", "1")
    with pytest.raises(OSError, match=r"HEADRACE_OFFLINE=1|is built for"):
        sglang_target.fetch()
    monkeypatch.setattr(sys, "platform", "plan9")
    assert "Linux" in sglang_target.wrong_platform() or "3.11" in sglang_target.wrong_platform()


def test_the_running_server_differs_exactly_as_the_list_of_differences_says() -> None:
    need_server()
    assert hashlib.sha256(sglang_target.fetch().read_bytes()).hexdigest() == sglang_target.SO_SHA256
    caller = python_target("headrace.specs.conformance.sglang_target:server")
    try:
        report = run(caller, CASES, known=load_known(KNOWN_FILE))
    finally:
        caller.end()
    assert [(one.id, one.status, one.message) for one in report.outcomes if one.bad] == []
    assert report.stale == []
    assert report.ok


def test_with_a_full_queue_the_servers_aborts_are_delivered_and_stand_before_their_requests() -> None:
    """The suspicion that they are dropped was not confirmed (docs/differences.md, D05 and below)."""
    need_server()
    target = sglang_target.server()
    config = {"tokenizer": None, "skip_tokenizer_init": True, "context_len": 256, "vocab_size": 260}
    target.start("v2", config)
    try:
        for at in range(2):
            target.submit(f"big{at}", json.dumps({"input_ids": [[1, 2]] * 4096, "rid": f"r{at}"}))
        refused: dict[str, Any] = {"end": None}
        for at in range(200):  # until the queue is full, one request at a time; each that is admitted is one more in it
            target.submit(f"more{at}", '{"input_ids": [1]}')
            refused = target.read(f"more{at}", 0.2)
            if refused["end"]:
                break
        assert refused["end"]["error"]["status"] == 503
        target.abort("r0_7")
        schema = load_schema("v2")
        seen: list[tuple[str, str]] = []
        while ("AbortReq", "r0_7") not in seen or not any(tag != "AbortReq" and rid == "r0_7" for tag, rid in seen):
            taken = [Received(raw, schema) for raw in target.drain(4096, 5.0)]
            assert taken, "an abort was lost"
            seen += [(one.tag, one.rid.split("#")[0]) for one in taken]
        rids = [rid for _, rid in seen]
        assert seen[rids.index("r0_7")][0] == "AbortReq"
    finally:
        target.stop()
