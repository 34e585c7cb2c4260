"""The soak of `benchmarks/` in small: it runs, and it is red when a promise is broken on purpose."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from headrace.runtime import AbortSource
from headrace.runtime.pipeline import Pipeline
from headrace.runtime.sink import Hub
from manager_helpers import threads

SOAK = Path(__file__).resolve().parents[1] / "benchmarks" / "soak.py"


@pytest.fixture
def soak(monkeypatch):
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["soak.py", "--seconds", "1", "--clients", "100", "--ring", "16", *arguments])
        return module.main()

    monkeypatch.setattr(module, "SLACK_MIB", 256.0)  # one second is warming up, not a memory test
    run.module = module
    return run


@pytest.mark.parametrize("topology", [[], ["--threads-topology"]])
def test_a_second_of_the_soak_loses_doubles_and_leaks_nothing(soak, topology, capsys):
    assert soak(*topology) == 0
    assert "nothing lost, nothing doubled, nothing leaked" in capsys.readouterr().out
    assert threads() == []


def test_the_soak_is_red_when_leaving_does_not_abort(soak, monkeypatch, capsys):
    """Requests that were left run on: the scheduler has long ones, and the table of live requests does not empty in time."""
    abort = Pipeline.abort
    monkeypatch.setattr(
        Pipeline, "abort", lambda self, rid, source: source is not AbortSource.GUARD and abort(self, rid, source)
    )
    monkeypatch.setattr(soak.module, "PATIENCE_S", 0.0)
    assert soak() == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_soak_is_red_when_a_delta_is_given_twice(soak, monkeypatch, capsys):
    put = Hub.put_columns

    def twice(self, columns, capacity):
        return put(self, columns, capacity) + put(self, columns, capacity)

    monkeypatch.setattr(Hub, "put_columns", twice)
    assert soak() == 1
    assert "other ids than its own" in capsys.readouterr().out
